"""The Triton backend: which calls its kernels support, and the branches on its operators.

Layouts and arguments are as in `functional.py`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import blocks
from ...checks.tensors import BRANCHES
from ...config import SELECTION, AttentionConfig
from ...varlen import Documents
from ..call import Call
from ..chunked import selection_gates
from .attention import attention
from .attention import select_blocks as rank_blocks

# looked up at import, since a compiled graph cannot look it up
HAS_TRITON = importlib.util.find_spec("triton") is not None

# most query heads per KV head, and largest head width, that fit a tile
MAX_GROUP = 64
MAX_WIDTH = 256
# most keys of a selection block that fit a tile
MAX_BLOCK = 128
# most blocks that a query may select
MAX_SELECTED = 64
# most new tokens per sequence of a decode step
MAX_NEW = 16


def too_large(op: str, q: Tensor, group: int, width: int, s: int) -> list[str]:
    """Reason why even the smallest tile of a call exceeds the GPU's shared memory; else empty."""
    decoding = op == "decode_attention"
    if q.dtype != torch.float32 and not decoding:
        return []
    from ...kernels.common import launch

    size, most = q.element_size(), launch.shared_memory()
    if decoding:
        needed = launch.decode_bytes(group, width, size, q.shape[1], s)
    else:
        needed = launch.backward_bytes(group, width)
    if needed <= most:
        return []
    tile = f"{group} heads of width {width} in {str(q.dtype).removeprefix('torch.')}"
    return [f"a tile of {tile} takes {needed} bytes, this GPU holds {most}"]


def why_no_step(config: AttentionConfig) -> list[str]:
    """Reasons why the decode kernels cannot run a layer with these settings; empty if they can."""
    reasons, branches = [], config.branches
    if branches not in (BRANCHES, ("selected",)):
        reasons.append(f"branches={branches}, its kernels compute all three or the selected one")
    if branches != BRANCHES and config.importance == "probs":
        reasons.append("importance='probs' without the compressed branch")
    windows = blocks.windows_per_block(config.d, config.selection_block_size)
    if config.importance == "max" and windows & (windows - 1):
        reasons.append(f"a block has {windows} windows, needs a power of two")
    return reasons


def why_not(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    gates: Tensor | None = None,
    q_offset: int | Tensor = 0,
    config: AttentionConfig | None = None,
    operands: Sequence[Tensor | None] = (),
    dense_length: int = 0,
) -> list[str]:
    """Reasons why the kernels cannot run this call; empty if they can. Of a decode step: `operands`
    are its tensors beside q, k and v, and below `dense_length` tokens attend to all keys."""
    reasons = []
    if not HAS_TRITON:
        reasons.append("triton is not installed")
    if not q.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        reasons.append(f"q is on {q.device.type}, needs cuda")
    if q.dtype == torch.float64:
        reasons.append("q is float64, needs float16, bfloat16 or float32")
    group = q.shape[2] // k.shape[2] if k.shape[2] else 0
    if group > MAX_GROUP:
        reasons.append(f"{group} query heads share a KV head, at most {MAX_GROUP}")
    n, s = 0, 0
    if config is not None:
        n, s = config.num_selected_blocks, config.selection_block_size
    width = max(t.shape[-1] for t in (q, v) if t is not None)
    if width > MAX_WIDTH:
        reasons.append(f"heads are {width} wide, at most {MAX_WIDTH}")
    elif q.is_cuda and not reasons:
        reasons += too_large(op, q, group, width, s)
    if n > MAX_SELECTED:
        reasons.append(f"num_selected_blocks is {n}, at most {MAX_SELECTED}")
    if s > MAX_BLOCK:
        reasons.append(f"selection_block_size is {s}, at most {MAX_BLOCK}")
    if 0 in q.shape:
        reasons.append(f"q is empty, {list(q.shape)}")
    if op == "decode_attention" and config is not None:
        reasons += why_no_step(config)
        if dense_length:
            reasons.append(f"dense_length={dense_length}: some tokens may attend to all keys")
        if q.shape[1] > MAX_NEW:
            reasons.append(f"{q.shape[1]} new tokens in each row, at most {MAX_NEW}")
        leaves = (t for t in (q, k, v, *operands) if t is not None)
        if torch.is_grad_enabled() and any(t.requires_grad for t in leaves):
            reasons.append("its kernels have no gradients")
    return reasons


def native_sparse_attention(call: Call, config: AttentionConfig) -> tuple[Tensor, Tensor]:
    """The output [B T H E] of three branches, or of the selected one, and the block indices."""
    tensors = call.tensors()
    if call.window_k is not None or call.window_v is not None:
        tensors["window_k"], tensors["window_v"] = call.window_keys()
    if config.ranks and config.use_diff_topk:
        q = call.q if call.cq is None else call.cq
        settings = {name: getattr(config, name) for name in (*SELECTION, "causal", "soft_cap")}
        tensors["block_indices"], tensors["gates"] = select_blocks(
            q, call.ck, seq_len=call.k.shape[1], mem_k=call.mem_k, q_offset=call.q_offset,
            leader_indices=call.leader_indices, return_gates=True, documents=call.documents,
            sinks=call.branch_sinks(config.branches).get("compressed"),
            scale=config.scale_of(call.q.shape[-1]), **settings,
        )  # fmt: skip
    else:
        tensors["leader_indices"] = call.leader_indices
    if config.branches == ("selected",):  # ck and cq only rank
        tensors |= {n: t.detach() for n in ("ck", "cq") if (t := tensors[n]) is not None}
    out, _, block_indices = attention(config, call.q_offset, call.documents, **tensors)
    return out, block_indices


# one branch

# the branch of an operation, and the names of its tensors by position
OPERATIONS = {
    "compressed_attention": ("compressed", ("q", "ck", "cv")),
    "selected_attention": ("selected", ("q", "k", "v", "block_indices")),
    "sliding_window_attention": ("window", ("q", "k", "v")),
}


def attend(
    op: str,
    *tensors: Tensor,
    q_offset: int | Tensor,
    return_lse: bool = False,
    documents: Documents | None = None,
    sinks: Tensor | None = None,
    mem_k: Tensor | None = None,
    mem_v: Tensor | None = None,
    gates: Tensor | None = None,
    **settings: Any,
) -> Any:
    """The branch of an operation of `functional.py`, by its name and arguments."""
    branch, names = OPERATIONS[op]
    config = AttentionConfig.unchecked(branches=(branch,), **settings)
    named = dict(zip(names, tensors, strict=True), mem_k=mem_k, mem_v=mem_v, gates=gates)
    out, lse, _ = attention(config, q_offset, documents, **named, sinks=row(sinks))
    return (out, lse) if return_lse else out


def row(sinks: Tensor | None) -> Tensor | None:
    """The sinks [H] of one branch as those of branches, [1 H]."""
    return None if sinks is None else sinks[None]


def select_blocks(
    q: Tensor,
    ck: Tensor,
    *,
    seq_len: int,
    mem_k: Tensor | None,
    q_offset: int | Tensor,
    leader_indices: Tensor | None = None,
    return_gates: bool = False,
    lse: Tensor | None = None,
    documents: Documents | None = None,
    sinks: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor | None]:
    """As `ops.reference.select_blocks`. `lse` [B, T, H] of branch 1 saves the ranking by
    `"probs"` from computing it again."""
    config = AttentionConfig.unchecked(**settings)
    indices = rank_blocks(
        config, q_offset, seq_len, documents, lse, q=q, ck=ck, mem_k=mem_k, sinks=row(sinks),
        leader_indices=leader_indices,
    )  # fmt: skip
    if not return_gates:
        return indices, None
    leaves: dict[str, Any] = dict(mem_k=mem_k, sinks=sinks, q_offset=q_offset, documents=documents)
    return indices, selection_gates(q, ck, indices, **leaves, seq_len=seq_len, **settings)
