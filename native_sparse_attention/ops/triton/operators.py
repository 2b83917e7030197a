"""The kernels of the branches as torch operators: schemas, fakes, autograd. `topk.py` has
those of the selection, `layer.py` that of the whole layer.

Nothing here imports triton before a kernel runs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ...compat.transforms import refuse_legacy_batched, refuse_second_derivatives, refuse_vmap
from .topk import bounds, in_its_sizes, on_its_device

# which keys: `kernels.device` has the same numbers, under the same names
CAUSAL_WINDOW, TWO_SIDED_WINDOW, BEHIND, EVERYTHING = range(4)


@torch.library.custom_op("native_sparse_attention::range_attention", mutates_args=())
@on_its_device
@in_its_sizes
def range_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mem_k: Tensor | None,
    mem_v: Tensor | None,
    starts: Tensor | None,
    doc_first: Tensor | None,
    doc_last: Tensor | None,
    sinks: Tensor | None,
    kind: int,
    reach: int,
    stride: int,
    start: int,
    scale: float,
    soft_cap: float | None,
    block_sizes: list[int] | None,
) -> tuple[Tensor, Tensor]:
    """Attention to one interval of keys a query, `kind` saying which, and to memory; out [B T H E],
    lse [B T H]."""
    from ...kernels.common import launch
    from ...kernels.flash import fwd as flash_fwd

    documents = bounds(doc_first, doc_last)
    kv_range = launch.KVRange(
        kind, reach, stride, start=start, starts=starts, documents=documents,
        unit=stride if kind in (BEHIND, EVERYTHING) else 1, soft_cap=soft_cap,
    )  # fmt: skip
    q, k, v = rows(q, k, v)
    memory = prefix(mem_k, mem_v, k.shape[0])
    out, lse = flash_fwd.forward(q, k, v, kv_range, scale, memory, sinks=of_heads(sinks))
    return out, lse


@range_attention.register_fake
def _(q, k, v, *others):
    return empty_outputs(q, v)


@torch.library.custom_op("native_sparse_attention::range_attention_backward", mutates_args=())
@on_its_device
@in_its_sizes
def range_attention_backward(
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
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    kind: int,
    reach: int,
    stride: int,
    start: int,
    scale: float,
    soft_cap: float | None,
    block_sizes: list[int] | None,
) -> list[Tensor]:
    """dq, dk, dv, and those of the memory."""
    from ...kernels import combine
    from ...kernels.common import launch
    from ...kernels.common.reduce import reduce_partials
    from ...kernels.flash import bwd as flash_bwd

    documents = bounds(doc_first, doc_last)
    kv_range = launch.KVRange(
        kind, reach, stride, start=start, starts=starts, documents=documents,
        unit=stride if kind in (BEHIND, EVERYTHING) else 1, soft_cap=soft_cap,
    )  # fmt: skip
    q, k, v = rows(q, k, v)
    d_out = whole(d_out)
    bwd = combine.backward_inputs(d_out, out, lse, d_lse.contiguous())
    memory = prefix(mem_k, mem_v, k.shape[0])
    dq = launch.Sum(q)
    flash_bwd.backward_q(q, k, v, kv_range, scale, bwd, dq, memory)
    shares = flash_bwd.backward_kv(q, k, v, kv_range, scale, bwd)
    grads = [dq.total(), *reduce_partials([shares], k, v, q.dtype)]
    if memory is not None:
        shares = flash_bwd.backward_prefix(q, memory, kv_range, scale, bwd)
        grads += memory_grads(*reduce_partials([shares], *memory))
    elif mem_k is not None and mem_v is not None:
        grads += [torch.zeros_like(mem_k), torch.zeros_like(mem_v)]
    grads = [g.to(q.dtype) for g in grads]
    return grads if sinks is None else [*grads, sink_grads(sinks, lse, bwd.delta)]


@range_attention_backward.register_fake
def _(d_out, d_lse, q, k, v, mem_k, mem_v, starts, doc_first, doc_last, sinks, *others):
    return [t.new_empty(t.shape) for t in (q, k, v, mem_k, mem_v, sinks) if t is not None]


def interval_setup(ctx, inputs, output):
    ctx.numbers = inputs[9:]
    ctx.save_for_backward(*inputs[:9], *output)


def flash_bwd(ctx, d_out, d_lse):
    refuse_legacy_batched(d_out, d_lse)
    tensors = ctx.saved_tensors
    some = iter(range_attention_backward(d_out, d_lse, *tensors, *ctx.numbers))
    q, k, v, mem_k, mem_v = (None if t is None else next(some) for t in tensors[:5])
    d_sinks = None if tensors[8] is None else next(some)
    return (q, k, v, mem_k, mem_v, None, None, None, d_sinks, *(None,) * 7)


range_attention.register_autograd(flash_bwd, setup_context=interval_setup)
refuse_vmap(range_attention)
refuse_second_derivatives(range_attention_backward)


@torch.library.custom_op("native_sparse_attention::selected_attention", mutates_args=())
@on_its_device
@in_its_sizes
def selected_attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    gates: Tensor | None,
    starts: Tensor | None,
    doc_first: Tensor | None,
    doc_last: Tensor | None,
    sinks: Tensor | None,
    block_size: int,
    num_initial: int,
    num_local: int,
    causal: bool,
    stride: int,
    start: int,
    scale: float,
    soft_cap: float | None,
    block_sizes: list[int] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention to listed and forced blocks: out [B T H E], lse [B T H], and the lists as they were
    used."""
    from ...kernels.common import launch
    from ...kernels.selected import branch as selected

    selection = launch.Selection(
        block_indices, block_size, num_initial, num_local, causal, start, starts, gates, stride,
        bounds(doc_first, doc_last), soft_cap,
    )  # fmt: skip
    valid = selected.valid_block_indices(selection, k.shape[1])
    gates = None if gates is None else gates.contiguous()
    selection = dataclasses.replace(selection, block_indices=valid, gates=gates)
    selection = selected.with_initial(selection)
    q, k, v = rows(q, k, v)
    out, lse = selected.forward(q, k, v, selection, scale, sinks=of_heads(sinks))
    return out, lse, valid


@selected_attention_op.register_fake
def _(q, k, v, block_indices, *others):
    return *empty_outputs(q, v), block_indices.new_empty(block_indices.shape, dtype=torch.int32)


@torch.library.custom_op("native_sparse_attention::selected_attention_backward", mutates_args=())
@on_its_device
@in_its_sizes
def selected_attention_backward(
    d_out: Tensor,
    d_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor | None,
    starts: Tensor | None,
    doc_first: Tensor | None,
    doc_last: Tensor | None,
    sinks: Tensor | None,
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
    soft_cap: float | None,
    block_sizes: list[int] | None,
) -> list[Tensor]:
    """dq, dk, dv, and those of the gates."""
    from ...kernels import combine
    from ...kernels.common import launch
    from ...kernels.selected import branch as selected

    d_out = whole(d_out)
    bwd = combine.backward_inputs(d_out, out, lse, d_lse.contiguous())
    gates = None if gates is None else gates.contiguous()
    selection = launch.Selection(
        valid, block_size, num_initial, num_local, causal, start, starts, gates, stride,
        bounds(doc_first, doc_last), soft_cap,
    )  # fmt: skip
    selection = selected.with_initial(selection)
    q, k, v = rows(q, k, v)
    *grads, d_gates = selected.backward(q, k, v, selection, scale, bwd)
    grads = [g.to(q.dtype) for g in grads]
    if gates is not None and d_gates is not None:
        grads.append(d_gates[..., : gates.shape[-1]].to(gates.dtype).contiguous())
    return grads if sinks is None else [*grads, sink_grads(sinks, lse, bwd.delta)]


@selected_attention_backward.register_fake
def _(d_out, d_lse, q, k, v, gates, starts, doc_first, doc_last, sinks, *others):
    return [t.new_empty(t.shape) for t in (q, k, v, gates, sinks) if t is not None]


def listed_setup(ctx, inputs, output):
    q, k, v, _, *others = inputs[:9]
    ctx.numbers = inputs[9:]
    ctx.save_for_backward(q, k, v, *others, *output)
    ctx.mark_non_differentiable(output[2])


def listed_backward(ctx, d_out, d_lse, _):
    refuse_legacy_batched(d_out, d_lse)
    tensors = ctx.saved_tensors
    some = iter(selected_attention_backward(d_out, d_lse, *tensors, *ctx.numbers))
    dq, dk, dv, d_gates = (None if t is None else next(some) for t in tensors[:4])
    d_sinks = None if tensors[7] is None else next(some)
    return (dq, dk, dv, None, d_gates, None, None, None, d_sinks, *(None,) * 9)


selected_attention_op.register_autograd(listed_backward, setup_context=listed_setup)
refuse_vmap(selected_attention_op)
refuse_second_derivatives(selected_attention_backward)


# what the operators share


def rows(*tensors: Tensor) -> Any:
    """Kernels take any strides but the last."""
    return [t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in tensors]


def whole(t: Tensor) -> Tensor:
    """Contiguous, and at an address that the tensor memory accelerator takes: a gradient may be
    part of another tensor."""
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


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


def of_heads(sinks: Tensor | None) -> Any:
    """Sinks as the kernels read them."""
    return None if sinks is None else sinks.to(torch.float32).contiguous()


def sink_grads(sinks: Tensor, lse: Tensor, delta: Tensor, gates: Tensor | None = None) -> Tensor:
    """Gradient of the sinks [H] of a branch, whose value is 0: `-sum p delta` over the queries,
    times the gate of its output where it has one. lse, delta and gates [B T H]."""
    share = torch.exp(sinks.float() - lse) * delta
    share = share if gates is None else share * gates.float()
    return -share.sum((0, 1)).to(sinks.dtype)


def offsets(q_offset: int | Tensor) -> tuple[Tensor | None, int]:
    return (q_offset, 0) if isinstance(q_offset, Tensor) else (None, q_offset)
