"""The whole layer between projection and output in Triton, as one torch operator and one autograd
node. It computes delta, dq, dk and dv once for all branches.

The forward saves the branch outputs [B T H E]; with `recompute` the backward computes them again.
The preprocess operator reduces each output row to two numbers, so that the branch outputs are free
during the rest of the backward. Arguments are those of `ops.nsa.native_sparse_attention`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ... import blocks
from ...compat.transforms import refuse_legacy_batched, refuse_second_derivatives
from ...config import AttentionConfig
from ..call import Call
from .branches import Problem, attend, attend_backward
from .operator import (
    LAYOUT,
    Arguments,
    documents_of,
    empty_block_indices,
    empty_outputs,
    layout,
    memory_grads,
    of_heads,
    operator,
    prefix,
    rows,
    sink_grads,
    whole,
)
from .operators import kv_range
from .topk import ranking_of

DIFFERENTIABLE = (
    "Tensor q", "Tensor k", "Tensor v", "Tensor ck", "Tensor cv", "Tensor branch_gates",
    "Tensor? cq", "Tensor? mem_k", "Tensor? mem_v", "Tensor? window_k", "Tensor? window_v",
    "Tensor? sinks",
)  # fmt: skip
NUMBERS = ("SymInt start", "SymInt num_ranked")
FORWARD = Arguments(*DIFFERENTIABLE, *LAYOUT, "Tensor? leaders", *NUMBERS)
BACKWARD = Arguments("Tensor d_out", *DIFFERENTIABLE, *LAYOUT, "Tensor[] kept", *NUMBERS)
PREPROCESS = Arguments(
    "Tensor d_out", "Tensor[] outs", "Tensor[] lses", "Tensor branch_gates", settings=False
)
LEAVES = Arguments(*DIFFERENTIABLE).names
SAVED = (*LEAVES, *Arguments(*LAYOUT).names)


def problem(at: SimpleNamespace) -> Problem:
    """Convert an operator's arguments to a `Problem`."""
    q, k, v, ck, cv = rows(at.q, at.k, at.v, at.ck, at.cv)
    own_window = at.window_k is not None and at.window_v is not None
    documents = documents_of(at)
    offsets = at.start, at.starts, documents
    return Problem(
        q, k, v, ck, cv,
        cq=q if at.cq is None else rows(at.cq)[0],
        own_cq=at.cq is not None,
        mem_k=at.mem_k,
        memory=prefix(at.mem_k, at.mem_v, q.shape[0]),
        window=rows(at.window_k, at.window_v) if own_window else None,
        sinks=at.sinks,
        starts=at.starts,
        documents=documents,
        start=at.start,
        num_ranked=at.num_ranked,
        range_cmp=kv_range("cmp", at.config, *offsets),
        range_win=kv_range("win", at.config, *offsets),
        scale=at.config.scale_of(q.shape[-1]),
        config=at.config,
    )  # fmt: skip


def layer_fake(at: SimpleNamespace) -> list[Tensor]:
    out, lse = empty_outputs(at.q, at.v)
    kept = 0 if at.config.recompute else 3
    return [
        out,
        empty_block_indices(at.q, at.ck, at.config),
        *(torch.empty_like(out) for _ in range(kept)),
        *(torch.empty_like(lse) for _ in range(kept)),
    ]


@operator("layer", FORWARD, "Tensor[]", fake=layer_fake)
def layer(at):
    """The output [B T H E], block indices [B T R n] and, unless `recompute`, outputs and
    log-sum-exps of the branches."""
    call = problem(at)
    out, _ = empty_outputs(call.q, call.v)
    outs, lses, block_indices = attend(call, at.leaders, None, (at.branch_gates, out))
    kept = [] if at.config.recompute else [*outs, *lses]
    return [out, block_indices, *kept]


def preprocess_fake(at: SimpleNamespace) -> list[Tensor]:
    gates, rows = at.branch_gates, at.d_out.shape[:3]
    of_rows = [gates.new_empty(3, *rows, dtype=torch.float32) for _ in range(2)]
    return [torch.empty_like(gates, memory_format=torch.contiguous_format), *of_rows]


@operator("layer_backward_preprocess", PREPROCESS, "Tensor[]", fake=preprocess_fake)
def layer_backward_preprocess(at):
    """Gradient of the gates, gated log-sum-exps and deltas of the branches [3 B T H]."""
    from ...kernels import combine

    return list(combine.backward(at.d_out.contiguous(), at.outs, at.lses, at.branch_gates))


def gradients_fake(at: SimpleNamespace) -> list[Tensor]:
    here = (name for name in LEAVES if name != "branch_gates" or at.config.recompute)
    tensors = (getattr(at, name) for name in here)
    return [t.new_empty(t.shape) for t in tensors if t is not None]


@operator("layer_backward", BACKWARD, "Tensor[]", fake=gradients_fake)
def layer_backward(at):
    """Gradients of the differentiable tensors that are not None, in order; of the gates only with
    `recompute`. `kept`: the block indices and, without `recompute`, the branches' log-sum-exps, and
    the gated log-sum-exps and deltas of `layer_backward_preprocess`."""
    from ...kernels import combine
    from ...kernels.common.reduce import reduce_partials
    from ...kernels.flash import bwd as flash_bwd
    from ...kernels.topk import gates_bwd

    block_indices, *kept = at.kept
    call = problem(at)
    d_out = whole(at.d_out)
    found: dict[str, Tensor | None] = {}
    if at.config.recompute:
        outs, lses, _ = attend(call, None, block_indices)
        found["branch_gates"], gated, delta = combine.backward(d_out, outs, lses, at.branch_gates)
        del outs
    else:
        *lses, gated, delta = kept
    cmp, sel, win = combine.branch_backward_inputs(d_out, gated, delta)
    d_sinks = None
    if at.sinks is not None:
        of_branches = zip(at.sinks, lses, (cmp, sel, win), at.branch_gates.unbind(-1), strict=True)
        d_sinks = torch.stack([sink_grads(a, b, c.delta, g).float() for a, b, c, g in of_branches])
    grads = attend_backward(call, block_indices, cmp, sel, win)
    dck, d_scored = grads.dck, None
    if grads.chosen is not None:
        # add the gradients of the block scores, through the gates, in place to dq or dcq
        ranking = ranking_of(
            at.config, call.q, at.start, at.num_ranked, at.starts, call.documents,
            None if at.sinks is None else of_heads(at.sinks)[0],
        )  # fmt: skip
        d_chosen = grads.chosen[..., : block_indices.shape[-1]]
        _, more, d_scored, d_sink = gates_bwd.backward(
            call.cq, call.ck, at.mem_k, block_indices, d_chosen, ranking, grads.dcq
        )
        if d_sinks is not None and d_sink is not None:
            d_sinks[0] += d_sink
        dck = dck + more
    found |= dict(q=grads.dq, k=grads.dk, v=grads.dv, ck=dck, cv=grads.dcv, cq=grads.dcq)
    if call.memory is not None:
        partials = flash_bwd.backward_prefix(call.cq, call.memory, call.range_cmp, call.scale, cmp)
        d_mem = memory_grads(*reduce_partials([partials], *call.memory))
        if d_scored is not None:
            d_mem[0] += d_scored
        found["mem_k"], found["mem_v"] = d_mem
    elif at.mem_k is not None and at.mem_v is not None:
        found |= dict(mem_k=torch.zeros_like(at.mem_k), mem_v=torch.zeros_like(at.mem_v))
    if grads.window is not None:
        found["window_k"], found["window_v"] = grads.window
    found["sinks"] = d_sinks
    return [
        found[name].to(getattr(at, name).dtype)
        for name in LEAVES
        if getattr(at, name) is not None and found.get(name) is not None
    ]


def setup(ctx, at, output):
    ctx.config = at.config
    ctx.numbers = dict(start=at.start, num_ranked=at.num_ranked)
    ctx.kept = len(output) - 1
    ctx.save_for_backward(*(getattr(at, name) for name in SAVED), *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def backward(ctx, grads):
    refuse_legacy_batched(grads[0])
    saved = ctx.saved_tensors  # read once: activation checkpointing gives them only once
    tensors = dict(zip(SAVED, saved, strict=False))
    block_indices, *kept = saved[-ctx.kept :]
    d_out, found = grads[0].contiguous(), {}
    if kept:
        outs, lses = kept[:3], kept[3:]
        found["branch_gates"], *rest = layer_backward_preprocess(
            d_out=d_out, outs=outs, lses=lses, branch_gates=tensors["branch_gates"]
        )
        kept = [*lses, *rest]
        # these are the last references to the branch outputs
        del saved, outs
        ctx.maybe_clear_saved_tensors()
    some = layer_backward(
        ctx.config, d_out=d_out, kept=[block_indices, *kept], **tensors, **ctx.numbers
    )
    here = (name for name in LEAVES if tensors[name] is not None and name not in found)
    return found | dict(zip(here, some, strict=True))


layer.differentiable(setup, backward, many=True)
refuse_second_derivatives(layer_backward_preprocess)
refuse_second_derivatives(layer_backward)


def compile_ahead(dry_run: Callable[[], Any], done: Callable[[int, int], None] | None) -> int:
    """`kernels.common.ahead.compile_ahead`; compiles 0 kernels if that is not possible."""
    from ...kernels.common import ahead

    return ahead.compile_ahead(dry_run, done) if ahead.is_possible() else 0


# the kinds of calls whose kernels this process has compiled
compiled: set[Any] = set()


def compile_first(
    arguments: Arguments, at: SimpleNamespace, trains: bool, dry_run: Callable[[], Any]
) -> None:
    """At the first call of an operator with these settings, widths and power-of-two range of
    lengths, compile the kernels of its forward and backward in parallel."""
    if not at.q.is_cuda:
        return
    q, k, v = at.q, at.k, at.v
    kind = (
        arguments.names, at.config, trains, q.dtype, q.device, q.shape[1].bit_length(),
        q.shape[2:], k.shape[2:], v.shape[3],
        tuple(name for name in arguments.names if getattr(at, name) is None),
    )  # fmt: skip
    compile_kind(kind, dry_run)


def compile_kind(kind: Any, dry_run: Callable[[], Any]) -> None:
    """At the first call of a kind, compile the kernels of its forward and backward in parallel. One
    by one, at their launches, they would take several times as long. No compiler, mode or transform
    observes the call."""
    from ...kernels.common import ahead

    if kind in compiled or ahead.only_compiles.get() or torch.cuda.is_current_stream_capturing():
        return
    compiled.add(kind)
    if ahead.is_possible():
        # out of memory: kernels compile at their launch instead
        with torch.no_grad(), contextlib.suppress(torch.OutOfMemoryError):
            ahead.compile_ahead(dry_run, ignore_errors=True)


def preprocessed(kept: Sequence[Tensor], d_out: Tensor, gates: Tensor) -> list[Tensor]:
    """Convert the tensors that `layer` saved to arguments of `layer_backward`, in a dry run."""
    from ...kernels import combine

    if not kept:
        return []
    return [*kept[3:], *combine.backward(d_out, list(kept[:3]), list(kept[3:]), gates)[1:]]


def compile_layer(at: SimpleNamespace, trains: bool) -> None:
    """`compile_first` of the operator."""

    def dry_run() -> None:
        out, block_indices, *kept = layer.run(at)
        if trains:
            d_out = torch.empty_like(out)
            kept = [block_indices, *preprocessed(kept, d_out, at.branch_gates)]
            tensors = {name: getattr(at, name) for name in SAVED}
            tensors |= dict(start=at.start, num_ranked=at.num_ranked, d_out=d_out, kept=kept)
            layer_backward.run(BACKWARD.given(at.config, tensors))

    compile_first(FORWARD, at, trains, dry_run)


layer.before = compile_layer


def numbers_of(call: Call, config: AttentionConfig) -> dict[str, Any]:
    """The layout, the leaders and the number of ranked blocks, as arguments of an operator."""
    d, s = config.d, config.selection_block_size
    num_ranked = blocks.num_complete_blocks(call.ck.shape[1] * d, d, s)
    if not config.causal:
        num_ranked = blocks.num_blocks(call.k.shape[1], s)
    layout_args = layout(call.q_offset, call.documents)
    return {**layout_args, "leaders": call.leader_indices, "num_ranked": num_ranked}


def operands(call: Call, config: AttentionConfig) -> dict[str, Any]:
    """The tensors and numbers of the operator."""
    tensors = call.tensors()
    if call.window_k is not None or call.window_v is not None:
        tensors |= dict(
            window_k=call.k if call.window_k is None else call.window_k,
            window_v=call.v if call.window_v is None else call.window_v,
        )
    return {**tensors, **numbers_of(call, config)}


def native_sparse_attention(call: Call, config: AttentionConfig) -> tuple[Tensor, Tensor]:
    """The output [B T H E] and the selected block indices."""
    out, block_indices, *_ = layer(config, **operands(call, config))
    return out, block_indices
