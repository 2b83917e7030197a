"""The eager PyTorch backend. Small calls run the specification as written (`attention.py`,
`topk.py`); larger calls run it in memory linear in the length (`tiled.py`, `query_chunks.py`).

It computes half precisions in fp32, products included, and rounds results once. torch.func and
forward-mode AD cannot trace the linear-memory code, so they run the specification at any length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...compat import transforms
from ...compat.autocast import in_autocast_dtype, no_autocast
from . import attention as reference
from . import local, query_chunks, tiled
from . import topk as reference_topk
from .products import in_fp32

# Scores that the specification may form at once on the CPU: 16 MiB of fp32. A GPU forms
# GPU_FACTOR times more, since its launches cost more than its arithmetic.
MAX_SCORES = 2**22
GPU_FACTOR = 16


def few_scores(op: str, q: Tensor, k: Tensor, settings: dict[str, Any]) -> bool:
    each = q.shape[2] * k.shape[1]
    if op == "select_blocks":
        each = query_chunks.scores_of_a_query(q, k, settings)
        each = each // settings["selection_stride"]
    most = MAX_SCORES if q.device.type == "cpu" else MAX_SCORES * GPU_FACTOR
    return q.shape[0] * q.shape[1] * each <= most


def few_blocks(q: Tensor, k: Tensor, block_indices: Tensor, settings: dict[str, Any]) -> bool:
    """Whether gathering the keys that a query reads costs less than masking all other keys. More
    heads that share gathered keys favour gathering (measured on a CPU)."""
    causal = settings["causal"]
    slots = block_indices.shape[3] + settings["num_initial_blocks"]
    slots += settings["num_local_blocks"] if causal else 0
    heads = q.shape[2] // block_indices.shape[2]
    seen = k.shape[1] - q.shape[1] // 2 if causal else k.shape[1]
    return heads * seen >= 3 * (heads + 4) * slots * settings["selection_block_size"]


def implementation(
    op: str, q: Tensor, k: Tensor, tensors: tuple[Tensor, ...], settings: dict[str, Any]
) -> Any:
    """The module whose form of an operation suits the size of a call. Compiled graphs would unroll
    chunks, so they run the specification."""
    transformed = transforms.active()
    if op == "sliding_window_attention" and not transformed and local.fits(q, k, settings):
        return local
    whole = torch.compiler.is_compiling() or transformed or few_scores(op, q, k, settings)
    if op == "select_blocks":
        return reference_topk if whole else query_chunks
    if whole:
        return reference
    if op == "selected_attention" and not few_blocks(q, k, tensors[1], settings):
        return query_chunks
    return tiled


def run(op: str, q: Tensor, k: Tensor, *tensors: Tensor, **settings: Any) -> Any:
    """Run an operation of the specification in fp32 or better."""
    compute = getattr(implementation(op, q, k, tensors, settings), op)
    if op == "select_blocks":  # casts to fp32 itself
        return compute(q, k, **settings)
    memory = {n: settings[n] for n in ("mem_k", "mem_v") if settings.get(n) is not None}
    floats = in_autocast_dtype(q, k, tensors[0], *memory.values())
    dtype = floats[2].dtype
    with no_autocast(q.device.type):
        q, k, v, *rest = in_fp32(*floats)
        settings = settings | dict(zip(memory, rest, strict=True))
        result = compute(q, k, v, *tensors[1:], **settings)
    if settings.get("return_lse"):
        return result[0].to(dtype), result[1]
    return result.to(dtype)
