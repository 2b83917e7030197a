"""Operations over packed documents and padded batches. They copy tokens to aligned rows
(`varlen.py`), run the operation there, and copy the results back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import blocks
from .. import varlen as docs
from ..checks import (
    HINT,
    INDEX_DTYPES,
    check_bool,
    check_bounds,
    check_given,
    check_ints,
    check_keywords,
    check_tensor,
    is_strided,
)
from ..compat import refuse_transforms

# arguments whose second axis counts tokens or windows
TOKENS = ("q", "k", "v", "cq", "window_k", "window_v", "branch_gates", "block_indices", "gates")
WINDOWS = ("ck", "cv")
# arguments that `takes_documents` adds
ADDED = ("cu_seqlens", "segment_ids", "mask")

DOCUMENTATION = """
    Packed documents and padding. Queries and keys must be the same tokens:

        cu_seqlens: [documents + 1], integers from 0 to the number of tokens: the begin of each
            document in one packed row, [1, total, ...] or [total, ...]. Each document has the
            results that it has alone: positions and blocks count from its first token. Windows are
            in the order of documents. The host waits for `cu_seqlens` on a GPU, not on the CPU.
        segment_ids: [B, T], integers, instead of `cu_seqlens`: a run of one id is a document.
        mask: [B, T], True for tokens and False for padding, on either side. No token sees padding;
            results of padding are 0.
        documents: `varlen.Documents` of rows that are aligned already; of the queries alone with
            `q_offset`, an integer.

    Raises:
        ValueError: shapes, dtypes, devices or settings do not match.
        NotImplementedError: no given backend supports the call.
"""


def takes_documents(op: Callable[..., Any]) -> Callable[..., Any]:
    """Add the arguments and the documentation above to an operation that takes `documents`."""
    signature = inspect.signature(op)
    parameters = signature.parameters
    names, accepted = list(parameters), {*parameters, *ADDED}
    required = [name for name, p in parameters.items() if p.default is p.empty]
    tensors = [name for name in required if parameters[name].annotation == "Tensor"]
    keyword = inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter(n, keyword, default=None, annotation="Tensor | None") for n in ADDED]

    @functools.wraps(op)
    def run(*args: Any, **kwargs: Any) -> Any:
        refuse_transforms(op.__name__)
        if not accepted.issuperset(kwargs):
            check_keywords(kwargs, accepted)
        bounds = {name: kwargs.pop(name, None) for name in ADDED}
        call = dict(zip(names[: len(args)], args, strict=False)) | kwargs
        check_given(**{name: call[name] for name in tensors if name in call})
        if all(value is None for value in bounds.values()):
            return op(*args, **kwargs)
        return run_packed(op, signature.bind(*args, **kwargs).arguments, bounds)

    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*parameters.values(), *added]
    )
    run.__doc__ = inspect.cleandoc(op.__doc__ or "") + "\n" + DOCUMENTATION
    return run


def run_packed(
    op: Callable[..., Any], call: dict[str, Any], bounds: dict[str, Tensor | None]
) -> Any:
    """`op(**call)` over the documents `bounds`."""
    for name in ("q_offset", "leader_indices", "seq_len", "documents"):
        if call.get(name) is not None:
            raise ValueError(
                f"{name} must be None with cu_seqlens, segment_ids or mask: "
                "queries and keys are the same tokens"
            )
    causal = check_bool("causal", call.get("causal", True))
    steps = ("compress_block_sliding_stride", "selection_block_size")
    d, s = check_ints(1, **{name: call.get(name, 1) for name in steps})
    names = [name for name in (*TOKENS, *WINDOWS) if call.get(name) is not None]
    check_given(**{name: call[name] for name in names})
    flat = call["q"].ndim == 3 and bounds["cu_seqlens"] is not None
    if flat:
        call = call | {name: call[name][None] for name in names}
    q = call["q"]
    if q.ndim != 4:
        got = list(q.shape)
        raise ValueError(f"q must have shape [B, T, H, D], or [total, H, D] packed, got {got}")
    shape = (q.shape[0], q.shape[1])
    for name in names:
        if name in TOKENS and tuple(call[name].shape[:2]) != shape:
            got = list(call[name].shape)
            raise ValueError(f"{name} must have B, T = {shape} as q has, got {got}")
    mask = bounds["mask"]
    if is_strided(mask) and q.shape[1] != q.shape[2] and mask.shape == q.shape[::2]:
        raise ValueError(f"mask must have shape {list(shape)}, got {list(mask.shape)}. {HINT}")
    check_tensor("block_indices", call.get("block_indices"), INDEX_DTYPES, q.device)
    check_bounds(shape, q.device, **bounds)
    # in two stages a document begins with a group of blocks
    step = max(d, blocks.GROUP * s if call.get("num_selected_groups") else s)
    layout = docs.layout(shape, q.device, step, **bounds)
    documents = layout.documents
    aligned = {name: layout.spread(call[name]) for name in names if name in TOKENS}
    if "block_indices" in names:
        aligned["block_indices"] = layout.spread_blocks(call["block_indices"], s)
    if "ck" in names:
        windows = layout.windows(d, call["ck"].shape[1], causal=causal)
        W, counts = call["ck"].shape[1], (windows.source >= 0).sum(1)
        is_known = len(counts) > 0 and not docs.is_traced(counts)
        most = int(counts.max()) if is_known else W
        if most != W:
            kind = "complete " if causal else ""
            raise ValueError(
                f"ck must hold the {most} {kind}windows, {d} apart, of the documents of a row, "
                f"got {W}"
            )
        aligned |= {name: windows.spread(call[name]) for name in names if name in WINDOWS}
    if 0 in layout.source.shape and isinstance(call.get("backend"), str):
        call = call | {"backend": "eager"}  # every document is empty
    results = op(**call | aligned, documents=documents)

    def restore(t: Tensor | None) -> Tensor | None:
        if t is None:  # block indices of branches that select none
            return None
        t = layout.collect_blocks(t, s) if t.dtype == torch.int32 else layout.collect(t)
        if t.ndim == 3:  # log-sum-exps
            t = t.masked_fill((layout.target < 0)[..., None], float("-inf"))
        return t[0] if flat else t

    return tuple(map(restore, results)) if isinstance(results, tuple) else restore(results)
