"""Ranking and selected branch in Triton, as one torch operator and one autograd node: one softmax
over initial, local and ranked blocks. The ranking runs beside the forced blocks."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from ...compat.transforms import refuse_legacy_batched, refuse_second_derivatives
from ...config import AttentionConfig
from ..call import Call
from .layer import compile_first, numbers_of
from .operator import (
    LAYOUT,
    Arguments,
    documents_of,
    empty_block_indices,
    empty_outputs,
    of_heads,
    operator,
    rows,
    sink_grads,
    whole,
)
from .operators import leaves_of, selection_of

LEAVES = ("q", "k", "v", "sinks")
FORWARD = Arguments(
    "Tensor q", "Tensor k", "Tensor v", "Tensor ck", "Tensor? cq", "Tensor? sinks", *LAYOUT,
    "Tensor? leaders", "SymInt start", "SymInt num_ranked",
)  # fmt: skip
BACKWARD = Arguments(
    "Tensor d_out", "Tensor q", "Tensor k", "Tensor v", "Tensor? sinks", *LAYOUT, "Tensor out",
    "Tensor lse", "Tensor block_indices", "SymInt start",
)  # fmt: skip
SAVED = (*LEAVES, *Arguments(*LAYOUT).names)


def forward_fake(at: SimpleNamespace) -> tuple[Tensor, ...]:
    return *empty_outputs(at.q, at.v), empty_block_indices(at.q, at.ck, at.config)


@operator("one_softmax", FORWARD, "(Tensor, Tensor, Tensor)", fake=forward_fake)
def one_softmax(at):
    """The output [B T H E], its log-sum-exp [B T H] and the block indices [B T R n]."""
    from ...kernels.common import streams
    from ...kernels.common.key_norms import key_norms
    from ...kernels.flash import fwd as flash_fwd
    from ...kernels.selected import branch as selected
    from ...kernels.topk import scores

    config, documents = at.config, documents_of(at)
    q, k, v, ck = rows(at.q, at.k, at.v, at.ck)
    cq = q if at.cq is None else rows(at.cq)[0]
    scale, sinks = config.scale_of(q.shape[-1]), of_heads(at.sinks)
    leaders = None if at.leaders is None else at.leaders.contiguous()
    ranked = at.num_ranked > 0 and config.num_selected_blocks > 0
    block_indices = empty_block_indices(q, ck, config)
    if not ranked:
        block_indices.fill_(-1)

    def rank() -> None:
        if ranked:
            scores.select_blocks(
                cq, ck, None, None, at.starts, leaders, at.start, at.num_ranked,
                config.num_selected_blocks, config.compress_block_size, config.d,
                config.selection_block_size, config.importance,
                config.interpolated_importance_score, config.num_initial_blocks,
                config.num_local_blocks, config.selection_stride,
                config.query_heads_share_selected_kv, config.causal, scale, documents,
                config.soft_cap, out=block_indices,
            )  # fmt: skip

    # otherwise block indices of the caller, or those of documents, are formed between the two
    beside = leaders is None and documents is None
    if not beside:
        rank()
    selection = selection_of(at, block_indices)
    if leaders is not None and block_indices.shape[-1]:
        block_indices = selected.valid_block_indices(selection, k.shape[1])
        selection = selection_of(at, block_indices)
    selection = selected.with_initial(selection)
    plan = selected.allocate(q, k, v, selection, scale)
    norms, partial = key_norms(q, k)[0], None
    with streams.forked(q.device, ahead=True) as ahead:
        with ahead:
            if beside:
                rank()
            if plan is not None:
                plan.run(selection)
        forced = selected.forced_blocks(selection, k, v)
        if forced is not None:
            partial = flash_fwd.forward(q, scale=scale, sinks=sinks, norms=norms, **forced)[:2]
    out, lse = selected.forward(q, k, v, selection, scale, partial, sinks, norms=norms, plan=plan)
    return out, lse, block_indices


@operator(
    "one_softmax_backward", BACKWARD, "Tensor[]",
    fake=lambda at: [t.new_empty(t.shape) for t in leaves_of(at, LEAVES)],
)  # fmt: skip
def one_softmax_backward(at):
    """Gradients of the differentiable tensors that are not None, in order."""
    from ...kernels import combine
    from ...kernels.selected import branch as selected

    bwd = combine.backward_inputs(whole(at.d_out), at.out, at.lse)
    selection = selected.with_initial(selection_of(at, at.block_indices))
    q, k, v = rows(at.q, at.k, at.v)
    *grads, _ = selected.backward(q, k, v, selection, at.config.scale_of(q.shape[-1]), bwd)
    grads = [g.to(q.dtype) for g in grads]
    return grads if at.sinks is None else [*grads, sink_grads(at.sinks, at.lse, bwd.delta)]


def setup(ctx, at, output):
    ctx.at = dict(start=at.start), at.config
    ctx.save_for_backward(*(getattr(at, name) for name in SAVED), *output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def backward(ctx, grads):
    refuse_legacy_batched(grads[0])
    names = (*SAVED, "out", "lse", "block_indices")
    tensors = dict(zip(names, ctx.saved_tensors, strict=True))
    numbers, config = ctx.at
    some = one_softmax_backward(config, d_out=grads[0], **tensors, **numbers)
    here = [name for name in LEAVES if tensors[name] is not None]
    return dict(zip(here, some, strict=True))


one_softmax.differentiable(setup, backward, many=False)
refuse_second_derivatives(one_softmax_backward)


def compile_ahead(at: SimpleNamespace, trains: bool) -> None:
    """`compile_first` of the operator."""

    def dry_run() -> None:
        out, lse, block_indices = one_softmax.run(at)
        if trains:
            tensors = {name: getattr(at, name) for name in SAVED}
            tensors |= dict(out=out, lse=lse, block_indices=block_indices)
            tensors |= dict(d_out=torch.empty_like(out), start=at.start)
            one_softmax_backward.run(BACKWARD.given(at.config, tensors))

    compile_first(FORWARD, at, trains, dry_run)


one_softmax.before = compile_ahead


def attend(call: Call, config: AttentionConfig) -> tuple[Tensor, Tensor]:
    """The output [B T H E] and the block indices of checked arguments."""
    sinks = None if call.sinks is None else call.sinks[0]
    out, _, block_indices = one_softmax(
        config, q=call.q, k=call.k, v=call.v, ck=call.ck.detach(),
        cq=None if call.cq is None else call.cq.detach(), sinks=sinks, **numbers_of(call, config),
    )  # fmt: skip
    return out, block_indices
