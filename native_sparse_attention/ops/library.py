"""The Triton kernels as torch operators: schemas, fakes, autograd; and the branches that call them.

Layouts and arguments are those of `functional.py`. Nothing here imports triton before a kernel
runs.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from .selection import select_blocks

__all__ = ["compressed_attention", "select_blocks", "sliding_window_attention", "why_not"]

# `kernels.device` has the same numbers, under the same names
CAUSAL_WINDOW, TWO_SIDED_WINDOW, BEHIND, EVERYTHING = range(4)

# query heads of a KV head, and width of a head, that fit a tile
MAX_GROUP = 64
MAX_WIDTH = 256
# blocks that a query's ranking may hold
MAX_SELECTED = 64


def why_not(
    op_name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    gates: Tensor | None = None,
    q_offset: int | Tensor = 0,
    num_selected_blocks: int = 0,
    return_gates: bool = False,
) -> list[str]:
    """Reasons why the kernels cannot run this call; empty where they can."""
    if op_name not in ("compressed_attention", "select_blocks", "sliding_window_attention"):
        return [f"this version has no kernel for {op_name} yet"]
    reasons = []
    if importlib.util.find_spec("triton") is None:
        reasons.append("triton is not installed")
    if not q.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        reasons.append(f"q is on {q.device.type}, needs cuda")
    if q.dtype == torch.float64:
        reasons.append("q is float64, needs float16, bfloat16 or float32")
    if k.shape[2] and q.shape[2] // k.shape[2] > MAX_GROUP:
        reasons.append(
            f"{q.shape[2] // k.shape[2]} query heads share a KV head, at most {MAX_GROUP}"
        )
    width = max(t.shape[-1] for t in (q, v) if t is not None)
    if width > MAX_WIDTH:
        reasons.append(f"heads are {width} wide, at most {MAX_WIDTH}")
    if num_selected_blocks > MAX_SELECTED:
        reasons.append(f"num_selected_blocks is {num_selected_blocks}, at most {MAX_SELECTED}")
    if return_gates:
        reasons.append("the gates of differentiable top-k have no kernel yet")
    if 0 in q.shape:
        reasons.append(f"q is empty, {list(q.shape)}")
    return reasons


@torch.library.custom_op("native_sparse_attention::interval_attention", mutates_args=())
def interval_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    kind: int,
    reach: int,
    stride: int,
    start: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention to one interval of keys a query, `kind` saying which; out [B T H E], lse [B T
    H]."""
    from ..kernels import interval

    return interval.forward(q, k, v, starts, kind, reach, stride, start, scale)


@interval_attention.register_fake
def _(q, k, v, starts, kind, reach, stride, start, scale):
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("native_sparse_attention::interval_attention_backward", mutates_args=())
def interval_attention_backward(
    d_out: Tensor,
    d_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor | None,
    kind: int,
    reach: int,
    stride: int,
    start: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from ..kernels import interval

    return interval.backward(
        d_out, d_lse, q, k, v, out, lse, starts, kind, reach, stride, start, scale
    )


@interval_attention_backward.register_fake
def _(d_out, d_lse, q, k, v, out, lse, starts, kind, reach, stride, start, scale):
    return tuple(t.new_empty(t.shape) for t in (q, k, v))


def setup_context(ctx, inputs, output):
    q, k, v, starts, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, *output, starts)


def backward(ctx, d_out, d_lse):
    q, k, v, out, lse, starts = ctx.saved_tensors
    grads = interval_attention_backward(d_out, d_lse, q, k, v, out, lse, starts, *ctx.numbers)
    return (*grads, None, None, None, None, None, None)


interval_attention.register_autograd(backward, setup_context=setup_context)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kind: int,
    reach: int,
    stride: int,
    q_offset: int | Tensor,
    scale: float | None,
    return_lse: bool,
) -> Any:
    starts, start = (q_offset, 0) if isinstance(q_offset, Tensor) else (None, q_offset)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = interval_attention(q, k, v, starts, kind, reach, stride, start, scale)
    return (out, lse) if return_lse else out


def compressed_attention(
    q: Tensor,
    ck: Tensor,
    cv: Tensor,
    *,
    mem_k: Tensor | None,
    mem_v: Tensor | None,
    compress_block_sliding_stride: int,
    causal: bool,
    q_offset: int | Tensor,
    scale: float | None = None,
    return_lse: bool = False,
) -> Any:
    num_mem = 0
    if mem_k is not None and mem_v is not None:
        num_mem = mem_k.shape[1]
        mem_k, mem_v = (m.transpose(0, 1).expand(ck.shape[0], -1, -1, -1) for m in (mem_k, mem_v))
        ck, cv = torch.cat((mem_k, ck), dim=1), torch.cat((mem_v, cv), dim=1)
    kind, d = (BEHIND if causal else EVERYTHING), compress_block_sliding_stride
    return attend(q, ck, cv, kind, num_mem, d, q_offset, scale, return_lse)


def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sliding_window_size: int,
    causal: bool,
    q_offset: int | Tensor,
    scale: float | None = None,
    return_lse: bool = False,
) -> Any:
    kind = CAUSAL_WINDOW if causal else TWO_SIDED_WINDOW
    return attend(q, k, v, kind, sliding_window_size, 1, q_offset, scale, return_lse)
