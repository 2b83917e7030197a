"""The branches in Triton, each as a differentiable torch operator. `topk.py` has the operators of
the selection; `layer.py` has the operator of the whole layer.

This module does not import triton before a kernel runs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...compat.transforms import refuse_legacy_batched, refuse_second_derivatives
from ...config import AttentionConfig
from ...varlen import Documents
from .operator import (
    LAYOUT,
    Arguments,
    documents_of,
    empty_outputs,
    memory_grads,
    of_heads,
    operator,
    prefix,
    rows,
    sink_grads,
    whole,
)


def kv_range(
    branch: str,
    config: AttentionConfig,
    start: int,
    starts: Tensor | None,
    documents: Documents | None,
) -> Any:
    """KV range of the compressed branch ("cmp") or the window ("win")."""
    from ...kernels.common import primitives
    from ...kernels.common.launch import KVRange

    common: dict[str, Any] = dict(
        start=start, starts=starts, documents=documents, soft_cap=config.soft_cap
    )
    if branch == "cmp":
        kind = primitives.BEHIND if config.causal else primitives.EVERYTHING
        return KVRange(kind.value, stride=config.d, unit=config.d, **common)
    kind = primitives.CAUSAL_WINDOW if config.causal else primitives.TWO_SIDED_WINDOW
    return KVRange(kind.value, config.sliding_window_size, **common)


# the compressed branch and the window: each query sees one KV range


TENSORS = ("Tensor q", "Tensor k", "Tensor v", "Tensor? mem_k", "Tensor? mem_v", "Tensor? sinks")
RANGE = Arguments(*TENSORS, *LAYOUT, "str branch", "SymInt start")
RANGE_BACKWARD = Arguments(
    "Tensor d_out", "Tensor d_lse", *TENSORS, *LAYOUT, "Tensor out", "Tensor lse", "str branch",
    "SymInt start",
)  # fmt: skip
RANGE_LEAVES = Arguments(*TENSORS).names
RANGE_SAVED = (*RANGE_LEAVES, *Arguments(*LAYOUT).names)


def seen(at: SimpleNamespace) -> Any:
    return kv_range(at.branch, at.config, at.start, at.starts, documents_of(at))


@operator("range_attention", RANGE, "(Tensor, Tensor)", fake=lambda at: empty_outputs(at.q, at.v))
def range_attention(at):
    """Attention to one KV range per query and to memory; out [B T H E], lse [B T H]."""
    from ...kernels.flash import fwd as flash_fwd

    q, k, v = rows(at.q, at.k, at.v)
    memory = prefix(at.mem_k, at.mem_v, k.shape[0])
    scale = at.config.scale_of(q.shape[-1])
    out, lse = flash_fwd.forward(q, k, v, seen(at), scale, memory, sinks=of_heads(at.sinks))
    return out, lse


@operator(
    "range_attention_backward", RANGE_BACKWARD, "Tensor[]",
    fake=lambda at: [t.new_empty(t.shape) for t in leaves_of(at, RANGE_LEAVES)],
)  # fmt: skip
def range_attention_backward(at):
    """Gradients of the differentiable tensors that are not None, in order."""
    from ...kernels import combine
    from ...kernels.common import launch
    from ...kernels.common.reduce import reduce_partials
    from ...kernels.flash import bwd as flash_bwd

    q, k, v = rows(at.q, at.k, at.v)
    bwd = combine.backward_inputs(whole(at.d_out), at.out, at.lse, at.d_lse.contiguous())
    memory, keys = prefix(at.mem_k, at.mem_v, k.shape[0]), seen(at)
    scale = at.config.scale_of(q.shape[-1])
    dq = launch.Accumulator(q)
    flash_bwd.backward_q(q, k, v, keys, scale, bwd, dq, memory)
    partials = flash_bwd.backward_kv(q, k, v, keys, scale, bwd)
    grads = [dq.result(), *reduce_partials([partials], k, v, q.dtype)]
    if memory is not None:
        partials = flash_bwd.backward_prefix(q, memory, keys, scale, bwd)
        grads += memory_grads(*reduce_partials([partials], *memory))
    elif at.mem_k is not None and at.mem_v is not None:
        grads += [torch.zeros_like(at.mem_k), torch.zeros_like(at.mem_v)]
    grads = [g.to(q.dtype) for g in grads]
    return grads if at.sinks is None else [*grads, sink_grads(at.sinks, at.lse, bwd.delta)]


def leaves_of(at: SimpleNamespace, names: tuple[str, ...]) -> list[Tensor]:
    """The tensors of these names that are not None."""
    return [getattr(at, name) for name in names if getattr(at, name) is not None]


def range_setup(ctx, at, output):
    ctx.at = dict(branch=at.branch, start=at.start), at.config
    ctx.save_for_backward(*(getattr(at, name) for name in RANGE_SAVED), *output)


def range_backward(ctx, grads):
    refuse_legacy_batched(*grads)
    d_out, d_lse = grads
    tensors = dict(zip((*RANGE_SAVED, "out", "lse"), ctx.saved_tensors, strict=True))
    numbers, config = ctx.at
    some = range_attention_backward(config, d_out=d_out, d_lse=d_lse, **tensors, **numbers)
    names = [name for name in RANGE_LEAVES if tensors[name] is not None]
    return dict(zip(names, some, strict=True))


range_attention.differentiable(range_setup, range_backward, many=False)
refuse_second_derivatives(range_attention_backward)


# the selected branch


SELECTED = Arguments(
    "Tensor q", "Tensor k", "Tensor v", "Tensor block_indices", "Tensor? gates", "Tensor? sinks",
    *LAYOUT, "SymInt start",
)  # fmt: skip
SELECTED_BACKWARD = Arguments(
    "Tensor d_out", "Tensor d_lse", "Tensor q", "Tensor k", "Tensor v", "Tensor? gates",
    "Tensor? sinks", *LAYOUT, "Tensor out", "Tensor lse", "Tensor block_indices", "SymInt start",
)  # fmt: skip
SELECTED_LEAVES = ("q", "k", "v", "gates", "sinks")
SELECTED_SAVED = (*SELECTED_LEAVES, *Arguments(*LAYOUT).names)


def selection_of(at: SimpleNamespace, block_indices: Tensor) -> Any:
    from ...kernels.common.launch import Selection

    config, gates = at.config, getattr(at, "gates", None)
    return Selection(
        block_indices, config.selection_block_size, config.num_initial_blocks,
        config.num_local_blocks, config.causal, at.start, at.starts,
        None if gates is None else gates.contiguous(), config.selection_stride,
        documents_of(at), config.soft_cap,
    )  # fmt: skip


def selected_fake(at: SimpleNamespace) -> Any:
    valid = at.block_indices.new_empty(at.block_indices.shape, dtype=torch.int32)
    return *empty_outputs(at.q, at.v), valid


@operator("selected_attention", SELECTED, "(Tensor, Tensor, Tensor)", fake=selected_fake)
def selected_attention_op(at):
    """Attention to selected and forced blocks: out [B T H E], lse [B T H], and the valid block
    indices."""
    from ...kernels.selected import branch as selected

    valid = selected.valid_block_indices(selection_of(at, at.block_indices), at.k.shape[1])
    selection = selected.with_initial(selection_of(at, valid))
    q, k, v = rows(at.q, at.k, at.v)
    scale = at.config.scale_of(q.shape[-1])
    out, lse = selected.forward(q, k, v, selection, scale, sinks=of_heads(at.sinks))
    return out, lse, valid


@operator(
    "selected_attention_backward", SELECTED_BACKWARD, "Tensor[]",
    fake=lambda at: [t.new_empty(t.shape) for t in leaves_of(at, SELECTED_LEAVES)],
)  # fmt: skip
def selected_attention_backward(at):
    """Gradients of the differentiable tensors that are not None, in order."""
    from ...kernels import combine
    from ...kernels.selected import branch as selected

    bwd = combine.backward_inputs(whole(at.d_out), at.out, at.lse, at.d_lse.contiguous())
    selection = selected.with_initial(selection_of(at, at.block_indices))
    q, k, v = rows(at.q, at.k, at.v)
    scale = at.config.scale_of(q.shape[-1])
    *grads, d_gates = selected.backward(q, k, v, selection, scale, bwd)
    grads = [g.to(q.dtype) for g in grads]
    if at.gates is not None and d_gates is not None:
        grads.append(d_gates[..., : at.gates.shape[-1]].to(at.gates.dtype).contiguous())
    return grads if at.sinks is None else [*grads, sink_grads(at.sinks, at.lse, bwd.delta)]


def selected_setup(ctx, at, output):
    ctx.at = dict(start=at.start), at.config
    ctx.save_for_backward(*(getattr(at, name) for name in SELECTED_SAVED), *output)
    ctx.mark_non_differentiable(output[2])


def selected_backward(ctx, grads):
    d_out, d_lse, _ = grads
    refuse_legacy_batched(d_out, d_lse)
    names = (*SELECTED_SAVED, "out", "lse", "block_indices")
    tensors = dict(zip(names, ctx.saved_tensors, strict=True))
    numbers, config = ctx.at
    some = selected_attention_backward(config, d_out=d_out, d_lse=d_lse, **tensors, **numbers)
    names = [name for name in SELECTED_LEAVES if tensors[name] is not None]
    return dict(zip(names, some, strict=True))


selected_attention_op.differentiable(selected_setup, selected_backward, many=False)
refuse_second_derivatives(selected_attention_backward)
