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

from ...checks.tensors import BRANCHES
from ...compat import transforms
from ...config import AttentionConfig
from ...varlen import Documents
from .operator import layout
from .operators import range_attention, selected_attention_op
from .topk import select_blocks

__all__ = [
    "compressed_attention",
    "select_blocks",
    "selected_attention",
    "sliding_window_attention",
    "why_not",
]

OPERATIONS = (
    "compressed_attention",
    "decode_attention",
    "native_sparse_attention",
    "rotate",
    "compress_mean",
    "select_blocks",
    "selected_attention",
    "sliding_window_attention",
)

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


def too_large(op_name: str, q: Tensor, group: int, width: int, s: int) -> list[str]:
    """Reason why even the smallest tile of a call exceeds the GPU's shared memory; else empty."""
    decoding = op_name == "decode_attention"
    if q.dtype != torch.float32 and not decoding:
        return []
    from ...kernels.common import limits

    size, most = q.element_size(), limits.shared_memory()
    if decoding:
        needed = limits.step_bytes(group, width, size, q.shape[1], s)
    else:
        needed = limits.backward_bytes(group, width)
    if needed <= most:
        return []
    of = f"{group} heads of width {width} in {str(q.dtype).removeprefix('torch.')}"
    return [f"a tile of {of} takes {needed} bytes, this GPU holds {most}"]


def why_no_step(
    branches: tuple[str, ...], dense_length: int, importance: str, block_windows: int
) -> list[str]:
    """Reasons why the decode kernels cannot run a layer with these settings; empty if they can."""
    reasons = []
    if branches not in (BRANCHES, ("selected",)):
        reasons.append(f"branches={branches}, its kernels compute all three or the selected one")
    if branches != BRANCHES and importance == "probs":
        reasons.append("importance='probs' without the compressed branch")
    if dense_length:
        reasons.append(f"dense_length={dense_length}: some tokens may attend to all keys")
    if importance == "max" and block_windows & (block_windows - 1):
        reasons.append(f"a block has {block_windows} windows, needs a power of two")
    return reasons


def why_not(
    op_name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    gates: Tensor | None = None,
    q_offset: int | Tensor = 0,
    num_selected_blocks: int = 0,
    selection_block_size: int = 0,
    importance: str = "logits",
    return_gates: bool = False,
    branches: tuple[str, ...] = BRANCHES,
    dense_length: int = 0,
    block_windows: int = 1,
    others: Sequence[Tensor | None] = (),
) -> list[str]:
    """Reasons why the kernels cannot run this call; empty if they can."""
    if op_name not in OPERATIONS:
        return [f"this version has no kernel for {op_name} yet"]
    reasons = transforms.unsupported_by_kernels()
    if not HAS_TRITON:
        reasons.append("triton is not installed")
    if not q.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        reasons.append(f"q is on {q.device.type}, needs cuda")
    if q.dtype == torch.float64:
        reasons.append("q is float64, needs float16, bfloat16 or float32")
    group = q.shape[2] // k.shape[2] if k.shape[2] else 0
    if group > MAX_GROUP:
        reasons.append(f"{group} query heads share a KV head, at most {MAX_GROUP}")
    width = max(t.shape[-1] for t in (q, v) if t is not None)
    if width > MAX_WIDTH:
        reasons.append(f"heads are {width} wide, at most {MAX_WIDTH}")
    elif q.is_cuda and not reasons:
        reasons += too_large(op_name, q, group, width, selection_block_size)
    if num_selected_blocks > MAX_SELECTED:
        reasons.append(f"num_selected_blocks is {num_selected_blocks}, at most {MAX_SELECTED}")
    if selection_block_size > MAX_BLOCK:
        reasons.append(f"selection_block_size is {selection_block_size}, at most {MAX_BLOCK}")
    if importance == "max" and return_gates:
        reasons.append("importance='max' has no kernel for use_diff_topk yet")
    if 0 in q.shape:
        reasons.append(f"q is empty, {list(q.shape)}")
    if op_name == "decode_attention":
        reasons += why_no_step(branches, dense_length, importance, block_windows)
        if q.shape[1] > MAX_NEW:
            reasons.append(f"{q.shape[1]} new tokens in each row, at most {MAX_NEW}")
        given = (t for t in (q, k, v, *others) if t is not None)
        if torch.is_grad_enabled() and any(t.requires_grad for t in given):
            reasons.append("its kernels have no gradients")
    return reasons


# the branches


def compressed_attention(
    q: Tensor,
    ck: Tensor,
    cv: Tensor,
    *,
    mem_k: Tensor | None,
    mem_v: Tensor | None,
    q_offset: int | Tensor,
    return_lse: bool = False,
    documents: Documents | None = None,
    sinks: Tensor | None = None,
    **settings: Any,
) -> Any:
    config = AttentionConfig.unchecked(**settings)
    tensors = dict(q=q, k=ck, v=cv, mem_k=mem_k, mem_v=mem_v, sinks=sinks)
    layout_args = layout(q_offset, documents)
    out, lse = range_attention(config, branch="cmp", **tensors, **layout_args)
    return (out, lse) if return_lse else out


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    *,
    gates: Tensor | None,
    q_offset: int | Tensor,
    return_lse: bool = False,
    documents: Documents | None = None,
    sinks: Tensor | None = None,
    **settings: Any,
) -> Any:
    config = AttentionConfig.unchecked(**settings)
    tensors = dict(q=q, k=k, v=v, block_indices=block_indices, gates=gates, sinks=sinks)
    layout_args = layout(q_offset, documents)
    out, lse, _ = selected_attention_op(config, **tensors, **layout_args)
    return (out, lse) if return_lse else out


def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_offset: int | Tensor,
    return_lse: bool = False,
    documents: Documents | None = None,
    sinks: Tensor | None = None,
    **settings: Any,
) -> Any:
    config = AttentionConfig.unchecked(**settings)
    tensors = dict(q=q, k=k, v=v, sinks=sinks)
    layout_args = layout(q_offset, documents)
    out, lse = range_attention(config, branch="win", **tensors, **layout_args)
    return (out, lse) if return_lse else out
