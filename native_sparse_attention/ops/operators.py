"""The kernels of the branches as torch operators: schemas, fakes, autograd. `selection.py` has
those of the selection, `fused.py` that of the whole layer.

Nothing here imports triton before a kernel runs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from .selection import bounds, in_its_sizes, on_its_device

# which keys: `kernels.device` has the same numbers, under the same names
CAUSAL_WINDOW, TWO_SIDED_WINDOW, BEHIND, EVERYTHING = range(4)


@torch.library.custom_op("native_sparse_attention::interval_attention", mutates_args=())
@on_its_device
@in_its_sizes
def interval_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mem_k: Tensor | None,
    mem_v: Tensor | None,
    starts: Tensor | None,
    doc_first: Tensor | None,
    doc_last: Tensor | None,
    kind: int,
    reach: int,
    stride: int,
    start: int,
    scale: float,
    block_sizes: list[int] | None,
) -> tuple[Tensor, Tensor]:
    """Attention to one interval of keys a query, `kind` saying which, and to memory; out [B T H E],
    lse [B T H]."""
    from ..kernels import interval, launch

    documents = bounds(doc_first, doc_last)
    place = launch.Place(
        kind, reach, stride, start=start, starts=starts, documents=documents,
        unit=stride if kind in (BEHIND, EVERYTHING) else 1,
    )  # fmt: skip
    q, k, v = rows(q, k, v)
    out, lse = interval.forward(q, k, v, place, scale, prefix(mem_k, mem_v, k.shape[0]))
    return out, lse


@interval_attention.register_fake
def _(q, k, v, *others):
    return empty_outputs(q, v)


@torch.library.custom_op("native_sparse_attention::interval_attention_backward", mutates_args=())
@on_its_device
@in_its_sizes
def interval_attention_backward(
    d_out: Tensor,
    d_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mem_k: Tensor | None,
    mem_v: Tensor | None,
    starts: Tensor | None,
    doc_first: Tensor | None,
    doc_last: Tensor | None,
    out: Tensor,
    lse: Tensor,
    kind: int,
    reach: int,
    stride: int,
    start: int,
    scale: float,
    block_sizes: list[int] | None,
) -> list[Tensor]:
    """dq, dk, dv, and those of the memory."""
    from ..kernels import combine, interval_backward, launch

    documents = bounds(doc_first, doc_last)
    place = launch.Place(
        kind, reach, stride, start=start, starts=starts, documents=documents,
        unit=stride if kind in (BEHIND, EVERYTHING) else 1,
    )  # fmt: skip
    q, k, v = rows(q, k, v)
    d_out = d_out.contiguous()
    cotangent = launch.Cotangent(d_out, lse, combine.deltas(out, d_out, d_lse.contiguous()))
    memory = prefix(mem_k, mem_v, k.shape[0])
    dq = interval_backward.backward_q(q, k, v, place, scale, cotangent, memory)
    grads = [dq, *interval_backward.backward_kv(q, k, v, place, scale, cotangent)]
    if memory is not None:
        grads += memory_grads(
            *interval_backward.backward_prefix(q, memory, place, scale, cotangent)
        )
    return [g.to(q.dtype) for g in grads]


@interval_attention_backward.register_fake
def _(d_out, d_lse, q, k, v, mem_k, mem_v, *others):
    return [t.new_empty(t.shape) for t in (q, k, v, mem_k, mem_v) if t is not None]


def interval_setup(ctx, inputs, output):
    ctx.numbers = inputs[8:]
    ctx.save_for_backward(*inputs[:8], *output)


def interval_backward(ctx, d_out, d_lse):
    grads = interval_attention_backward(d_out, d_lse, *ctx.saved_tensors, *ctx.numbers)
    grads = [*grads, None, None][:5]
    return (*grads, *(None,) * 10)


interval_attention.register_autograd(interval_backward, setup_context=interval_setup)


@torch.library.custom_op("native_sparse_attention::selected_attention", mutates_args=())
@on_its_device
@in_its_sizes
def listed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Tensor,
    gates: Tensor | None,
    starts: Tensor | None,
    doc_first: Tensor | None,
    doc_last: Tensor | None,
    block_size: int,
    num_initial: int,
    num_local: int,
    causal: bool,
    stride: int,
    start: int,
    scale: float,
    block_sizes: list[int] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention to listed and forced blocks: out [B T H E], lse [B T H], and the lists as they were
    used."""
    from ..kernels import launch, selected

    selection = launch.Selection(
        lists, block_size, num_initial, num_local, causal, start, starts, gates, stride,
        bounds(doc_first, doc_last),
    )  # fmt: skip
    valid = selected.valid_lists(selection, k.shape[1])
    gates = None if gates is None else gates.contiguous()
    selection = dataclasses.replace(selection, lists=valid, gates=gates)
    selection = selected.with_initial(selection)
    q, k, v = rows(q, k, v)
    return *selected.forward(q, k, v, selection, scale), valid


@listed_attention.register_fake
def _(q, k, v, lists, *others):
    return *empty_outputs(q, v), lists.new_empty(lists.shape, dtype=torch.int32)


@torch.library.custom_op("native_sparse_attention::selected_attention_backward", mutates_args=())
@on_its_device
@in_its_sizes
def listed_attention_backward(
    d_out: Tensor,
    d_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor | None,
    starts: Tensor | None,
    doc_first: Tensor | None,
    doc_last: Tensor | None,
    out: Tensor,
    lse: Tensor,
    valid: Tensor,
    block_size: int,
    num_initial: int,
    num_local: int,
    causal: bool,
    stride: int,
    start: int,
    scale: float,
    block_sizes: list[int] | None,
) -> list[Tensor]:
    """dq, dk, dv, and those of the gates."""
    from ..kernels import combine, launch, selected

    d_out = d_out.contiguous()
    cotangent = launch.Cotangent(d_out, lse, combine.deltas(out, d_out, d_lse.contiguous()))
    gates = None if gates is None else gates.contiguous()
    selection = launch.Selection(
        valid, block_size, num_initial, num_local, causal, start, starts, gates, stride,
        bounds(doc_first, doc_last),
    )  # fmt: skip
    selection = selected.with_initial(selection)
    q, k, v = rows(q, k, v)
    *grads, d_gates = selected.backward(q, k, v, selection, scale, cotangent)
    grads = [g.to(q.dtype) for g in grads]
    if gates is not None and d_gates is not None:
        grads.append(d_gates[..., : gates.shape[-1]].to(gates.dtype).contiguous())
    return grads


@listed_attention_backward.register_fake
def _(d_out, d_lse, q, k, v, gates, *others):
    return [t.new_empty(t.shape) for t in (q, k, v, gates) if t is not None]


def listed_setup(ctx, inputs, output):
    q, k, v, _, gates, starts, doc_first, doc_last, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, gates, starts, doc_first, doc_last, *output)
    ctx.mark_non_differentiable(output[2])


def listed_backward(ctx, d_out, d_lse, _):
    grads = listed_attention_backward(d_out, d_lse, *ctx.saved_tensors, *ctx.numbers)
    d_gates = grads[3] if len(grads) > 3 else None
    return (*grads[:3], None, d_gates, *(None,) * 11)


listed_attention.register_autograd(listed_backward, setup_context=listed_setup)


# what the operators share


def rows(*tensors: Tensor) -> Any:
    """Kernels take any strides but the last."""
    return [t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in tensors]


def empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def prefix(mem_k: Tensor | None, mem_v: Tensor | None, batch: int) -> tuple[Tensor, Tensor] | None:
    """Memory [K m D] as the keys and values [B m K D] before all others; None without any."""
    if mem_k is None or mem_v is None or mem_k.shape[1] == 0:
        return None
    k, v = (m.transpose(0, 1).expand(batch, -1, -1, -1) for m in rows(mem_k, mem_v))
    return k, v


def memory_grads(dk: Tensor, dv: Tensor) -> list[Tensor]:
    """Gradients [K m D] of memory from those of its rows [B m K D]."""
    return [d.sum(0).transpose(0, 1).contiguous() for d in (dk, dv)]


def offsets(q_offset: int | Tensor) -> tuple[Tensor | None, int]:
    return (q_offset, 0) if isinstance(q_offset, Tensor) else (None, q_offset)
