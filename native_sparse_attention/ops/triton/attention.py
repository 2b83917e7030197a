"""Attention in Triton: one torch operator and one autograd node over the branches of a call.

A call has one branch, or all three. With three the forward also ranks the blocks and combines the
branches by their gates, and the backward computes delta, dq, dk and dv once for all of them. The
forward saves the branch outputs [B T H E]; with `recompute` the backward computes them again.

The order here is that of a call: `attention`, its autograd node, the operators, and the launches of
a forward and of a backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import blocks
from ...checks import BRANCHES
from ...config import AttentionConfig, config_of_key
from ..call import DIFFERENTIABLE, Call, needs_gradient, unflatten
from .operator import aligned, operator, unit_stride

BRANCH_GATES = DIFFERENTIABLE.index("branch_gates")


def attention(call: Call, config: AttentionConfig) -> tuple[Tensor, Tensor, Tensor]:
    """The output [B T H E] of a checked call; the log-sum-exp [B T H] of a single branch; and the
    block indices [B T R n] of the selected branch. What there is none of is empty."""
    inputs, start = call.flat()
    if not needs_gradient(call):
        out, lse, block_indices, *_ = attend(inputs, start, config.key, False)
        return out, lse, block_indices
    if torch.compiler.is_compiling():
        inputs = distinct(inputs)
    return Attention.apply(config.key, start, *inputs)  # type: ignore[no-any-return]


def distinct(tensors: Sequence[Any]) -> list[Any]:
    """The tensors, with views of those that come again: dynamo passes none twice to a node."""
    result: list[Any] = []
    for t in tensors:
        is_again = t is not None and any(t is previous for previous in result)
        result.append(t.view_as(t) if is_again else t)
    return result


class Attention(torch.autograd.Function):
    """`attend` and its gradients."""

    @staticmethod
    def forward(ctx: Any, key: str, start: int, *inputs: Any) -> Any:
        out, lse, block_indices, *saved_rows = attend(inputs, start, key, True)
        ctx.key, ctx.start = key, start
        is_single = lse.ndim == 3
        ctx.save_for_backward(*inputs, block_indices, *((out, lse) if is_single else saved_rows))
        ctx.mark_non_differentiable(*((block_indices,) if is_single else (block_indices, lse)))
        if not torch.compiler.is_compiling():  # dynamo has no such setting
            ctx.set_materialize_grads(False)
        return out, lse, block_indices

    @staticmethod
    def backward(ctx: Any, d_out: Any, d_lse: Any, _: Any) -> Any:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            raise NotImplementedError(
                "the kernels of attention give first derivatives only: use backend='eager' for "
                "second derivatives"
            )
        saved = ctx.saved_tensors  # read once: activation checkpointing gives them only once
        number = len(ctx.needs_input_grad) - 2
        inputs, block_indices, saved_rows = saved[:number], saved[number], list(saved[number + 1 :])
        is_needed = list(ctx.needs_input_grad[2 : 2 + len(DIFFERENTIABLE)])
        grads = [None] * number
        if len(saved_rows) == 6:  # outputs and log-sum-exps of three branches
            d_gates, *rows = backward_preprocess(d_out, saved_rows, inputs[BRANCH_GATES])
            saved_rows = [*saved_rows[3:], *rows]
            grads[BRANCH_GATES], is_needed[BRANCH_GATES] = d_gates, False
            del saved  # the last references to the branch outputs
            if not torch.compiler.is_compiling():
                ctx.maybe_clear_saved_tensors()
        call = inputs, block_indices, saved_rows, is_needed, ctx.start, ctx.key
        results = iter(attend_backward([d_out, d_lse], *call))
        for i, needs_grad in enumerate(is_needed):
            grads[i] = next(results) if needs_grad else grads[i]
        return None, None, *grads


def attend_fake(inputs: list[Any], start: int, key: str, trains: bool) -> list[Tensor]:
    from ...kernels.common import launch

    t, config = unflatten(inputs, start), config_of_key(key)
    out, lse = launch.empty_outputs(t.q, t.v)
    indices = empty_block_indices(t, config)
    if len(config.branches) == 1:
        return [out, lse, indices]
    number = 0 if config.recompute else 3
    outs, lses = ([torch.empty_like(x) for _ in range(number)] for x in (out, lse))
    return [out, lse.new_empty(0), indices, *outs, *lses]


@operator(
    "attend(Tensor?[] inputs, SymInt start, str key, bool trains) -> Tensor[]", fake=attend_fake
)
def attend(inputs, start, key, trains):
    """The output, the log-sum-exp of a single branch, the block indices; and of three branches,
    unless `recompute`, their outputs and log-sum-exps. `trains`: the first call compiles the
    kernels of the backward too."""
    t, config = unflatten(inputs, start), config_of_key(key)
    compile_first(t, config, trains)
    return forward(t, config)


def preprocess_fake(d_out: Tensor, saved_rows: list[Tensor], gates: Tensor) -> list[Tensor]:
    rows = [gates.new_empty(3, *d_out.shape[:3], dtype=torch.float32) for _ in range(2)]
    return [torch.empty_like(gates, memory_format=torch.contiguous_format), *rows]


@operator(
    "attend_backward_preprocess(Tensor d_out, Tensor[] saved_rows, Tensor gates) -> Tensor[]",
    fake=preprocess_fake,
)
def backward_preprocess(d_out, saved_rows, gates):
    """Gradient of the gates, gated log-sum-exps and deltas of the branches [3 B T H], from their
    outputs and log-sum-exps."""
    from ...kernels import combine

    return list(combine.backward(d_out.contiguous(), saved_rows[:3], saved_rows[3:], gates))


@operator(
    "attend_backward(Tensor?[] d_outs, Tensor?[] inputs, Tensor block_indices, "
    "Tensor[] saved_rows, bool[] is_needed, SymInt start, str key) -> Tensor[]",
    fake=lambda d_outs, inputs, block_indices, saved_rows, is_needed, *_: [
        t.new_empty(t.shape) for t, needed in zip(inputs, is_needed, strict=False) if needed
    ],
)
def attend_backward(d_outs, inputs, block_indices, saved_rows, is_needed, start, key):
    """Gradients of the needed differentiable inputs, in order, from those of the output and of
    the log-sum-exp. `saved_rows`: the output and log-sum-exp of a single branch; or the
    log-sum-exps of three branches and the rows of `backward_preprocess`, which formed the gradient
    of the gates."""
    t, config = unflatten(inputs, start), config_of_key(key)
    grads = backward(d_outs, t, block_indices, saved_rows, config)
    leaves = zip(DIFFERENTIABLE, inputs, is_needed, strict=False)
    chosen = [(grads[name], leaf) for name, leaf, needs_grad in leaves if needs_grad]
    return [grad.to(leaf.dtype).contiguous() for grad, leaf in chosen]


# the kinds of calls whose kernels this process has compiled
compiled: set[Any] = set()


def compile_first(t: Call, config: AttentionConfig, trains: bool) -> None:
    """At the first call of these settings, widths and power-of-two range of lengths, compile its
    kernels in parallel: one by one, at their launches, they take several times as long."""
    if not t.q.is_cuda:
        return
    tensors = (x if isinstance(x, Tensor) else None for x in t)
    widths = tuple(None if x is None else x.shape[2:] for x in tensors)
    is_packed = t.documents is not None
    kind = config, trains, t.q.dtype, t.q.device, t.q.shape[1].bit_length(), widths, is_packed
    if kind in compiled:
        return
    from ...kernels.common import precompile

    if precompile.active_mode.get() or torch.cuda.is_current_stream_capturing():
        return
    compiled.add(kind)

    def dry_run() -> None:
        out, lse, block_indices, *saved_rows = forward(t, config)
        if trains:
            d_out = torch.empty_like(out)
            if saved_rows:
                rows = backward_preprocess(d_out, saved_rows, t.branch_gates)[1:]
                saved_rows = [*saved_rows[3:], *rows]
            backward([d_out, None], t, block_indices, saved_rows or [out, lse], config)

    # out of memory: kernels compile at their launch instead
    with contextlib.suppress(torch.OutOfMemoryError):
        precompile.compile_ahead(dry_run)


def forward(t: Call, config: AttentionConfig) -> list[Tensor]:
    """The results of `attend`."""
    from ...kernels.common import launch

    t = prepared(t)
    out = None if len(config.branches) == 1 else launch.empty_outputs(t.q, t.v)[0]
    with launch.sized(config.block_sizes):
        outs, lses, block_indices = forward_branches(t, config, out)
    if out is None:
        return [outs[0], lses[0], block_indices]
    saved_rows = [] if config.recompute else [*outs, *lses]
    return [out, lses[0].new_empty(0), block_indices, *saved_rows]


def backward(
    d_outs: list[Any], t: Call, block_indices: Tensor, saved_rows: list[Tensor],
    config: AttentionConfig,
) -> dict[str, Tensor]:  # fmt: skip
    """Gradients by the names of the inputs."""
    from ...kernels import combine
    from ...kernels.common import launch

    t, grads = prepared(t), dict[str, Tensor]()
    with launch.sized(config.block_sizes):
        if len(config.branches) == 1:
            out, *lses = saved_rows
            d_out = torch.zeros_like(out) if d_outs[0] is None else aligned(d_outs[0])
            d_lse = None if d_outs[1] is None else d_outs[1].contiguous()
            each = [combine.backward_inputs(d_out, out, lses[0], d_lse)]
        else:
            d_out = aligned(d_outs[0])
            if config.recompute:
                if d_out.is_cuda:  # TMA descriptors need a context; a new thread has none
                    torch.cuda.set_device(d_out.device)
                outs, lses, _ = forward_branches(t._replace(block_indices=block_indices), config)
                results = combine.backward(d_out, outs, lses, t.branch_gates)
                grads["branch_gates"], gated, delta = results
                del outs
            else:
                *lses, gated, delta = saved_rows
            pairs = zip(gated, delta, strict=True)
            each = [launch.BackwardInputs(d_out, *pair, gated=True) for pair in pairs]
        bwd = dict(zip(config.branches, each, strict=True))
        if "selected" in bwd:
            grads |= backward_branches(t, block_indices, bwd, config)
        else:
            grads |= backward_range(t, each[0], config)
        if t.sinks is not None:  # `-sum p delta` over the queries, times gates: a sink has value 0
            gates = [1.0] if t.branch_gates is None else t.branch_gates.float().unbind(-1)
            rows = zip(t.sinks, lses, each, gates, strict=True)
            weighted = [torch.exp(sink - lse) * b.delta * gate for sink, lse, b, gate in rows]
            grads["sinks"] = torch.stack([-w.sum((0, 1)) for w in weighted])
    return grads


def prepared(t: Call) -> Call:
    """The call as kernels take it: last strides of 1, and contiguous sinks in fp32."""
    names = ("q", "k", "v", "ck", "cv", "cq", "mem_k", "mem_v", "window_k", "window_v")
    tensors = {name: x for name in names if (x := getattr(t, name)) is not None}
    values: Any = dict(zip(tensors, unit_stride(*tensors.values()), strict=True))
    if t.sinks is not None:
        values["sinks"] = t.sinks.to(torch.float32).contiguous()
    if t.gates is not None:
        values["gates"] = t.gates.contiguous()
    return t._replace(**values)


def forward_branches(
    t: Call, config: AttentionConfig, out: Tensor | None = None
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Outputs and log-sum-exps of all three branches or of one, and the block indices, which are
    ranked unless given. Writes the output of three to `out`."""
    from ...kernels.common import streams
    from ...kernels.flash import flash
    from ...kernels.selected import branch as selected

    q, k, v = t[:3]
    sinks = [None] * len(config.branches) if t.sinks is None else t.sinks
    sink_of = dict(zip(config.branches, sinks, strict=True))
    inputs_of = {b: range_inputs(b, t, config) for b in config.branches if b != "selected"}
    if "selected" not in config.branches:
        (branch,) = config.branches
        out, lse = flash.forward(inputs_of[branch], sink_of[branch])
        return [out], [lse], empty_block_indices(t, config)
    is_single = len(config.branches) == 1
    block_indices, rank = plan_ranking(t, config)
    # then the ranking needs nothing that is not there yet, and runs beside the other branches
    is_concurrent = rank is not None and (is_single or config.importance != "probs")
    is_concurrent = is_concurrent and t.leader_indices is None and t.documents is None

    out_cmp: Any = None
    lse_cmp: Any = None
    compressed: Any = inputs_of.get("compressed"), sink_of.get("compressed")
    if not is_concurrent:
        if not is_single:
            out_cmp, lse_cmp = flash.forward(*compressed)
        if rank is not None:
            rank(lse_cmp)
    selection = selection_of(t, block_indices, config)
    if t.block_indices is not None or t.leader_indices is not None:  # of the caller
        selection = selected.keep_valid_blocks(selection, k.shape[1])
        block_indices = selection.block_indices
    selection = selected.append_initial_blocks(selection)
    inputs = selected.Inputs(q, k, v, selection, config.scale_of(q.shape[-1]))
    plan = selected.plan_forward(inputs)
    # short programs that the selection waits for; they leave the tensor cores idle
    fork = is_concurrent or plan is not None
    partial: Any = ()  # of the forced blocks
    with streams.forked(q.device, urgent=True, enabled=fork) as side:
        with side:
            if is_concurrent and rank is not None:
                rank(None)
            if plan is not None:
                plan.run(selection)
        if is_concurrent and not is_single:
            out_cmp, lse_cmp = flash.forward(*compressed)
        if not is_single:
            window, is_shared = inputs_of["window"], t.window_k is None
            in_window = selected.forced_blocks_in_window(inputs, window) if is_shared else None
            out_win, lse_win, *partial = flash.forward(
                window._replace(inner=in_window and in_window.kv_range), sink_of["window"],
                sink_of["selected"],
            )  # fmt: skip
        if not partial and (forced := selected.forced_blocks(inputs)) is not None:
            partial = flash.forward(forced, sink_of["selected"])
    combined = None
    if not is_single and out is not None:
        gates = t.branch_gates
        combined = selected.Combine(out_cmp, out_win, gates, out, *gates.stride())
    sink = sink_of["selected"]
    out_sel, lse_sel = selected.forward(inputs, tuple(partial), sink, combined, plan)
    if is_single:
        return [out_sel], [lse_sel], block_indices
    return [out_cmp, out_sel, out_win], [lse_cmp, lse_sel, lse_win], block_indices


def backward_range(t: Call, bwd: Any, config: AttentionConfig) -> dict[str, Tensor]:
    """Gradients of the compressed branch or of the window alone: each query sees one KV range."""
    from ...kernels.common.launch import Accumulator
    from ...kernels.common.reduce import reduce_partials
    from ...kernels.flash import flash

    inputs, dq = range_inputs(config.branches[0], t, config), Accumulator(t.q)
    flash.backward_q(inputs, bwd, dq)
    dk, dv = reduce_partials([flash.backward_kv(inputs, bwd)], t.k, t.v, t.q.dtype)
    return dict(q=dq.result(), k=dk, v=dv) | memory_grads(t, inputs, bwd)


def memory_grads(t: Call, inputs: Any, bwd: Any) -> dict[str, Tensor]:
    """Gradients [K m D] of the memory of the compressed branch."""
    if t.mem_k is None or t.mem_v is None:
        return {}
    if inputs.prefix is None:
        return dict(mem_k=torch.zeros_like(t.mem_k), mem_v=torch.zeros_like(t.mem_v))
    from ...kernels.common.reduce import reduce_partials
    from ...kernels.flash import flash

    partials = reduce_partials([flash.backward_prefix(inputs, bwd)], *inputs.prefix)
    dk, dv = (d.sum(0).transpose(0, 1).contiguous() for d in partials)
    return dict(mem_k=dk, mem_v=dv)


def backward_branches(
    t: Call, block_indices: Tensor, bwd: dict[str, Any], config: AttentionConfig
) -> dict[str, Tensor]:
    """Gradients of all three branches, or of the selected one. The launches that add to dq run one
    after the other, beside the launches for dk and dv."""
    from ...kernels.common import streams
    from ...kernels.common.launch import Accumulator
    from ...kernels.common.reduce import reduce_partials
    from ...kernels.flash import flash
    from ...kernels.selected import branch as selected

    grads: dict[str, Tensor] = {}
    q, k, v, ck, cv = t[:5]
    is_single, device = len(bwd) == 1, q.device
    each: list[Any] = [bwd.get(branch) for branch in BRANCHES]
    cmp, sel, win = each
    selection = selected.append_initial_blocks(selection_of(t, block_indices, config))
    inputs = selected.Inputs(q, k, v, selection, config.scale_of(q.shape[-1]))
    plan = selected.plan_backward(inputs)
    compressed, window = (range_inputs(name, t, config) for name in ("compressed", "window"))
    is_shared = not is_single and t.window_k is None  # not by identity: a caller may give k again
    in_window = selected.forced_blocks_in_window(inputs, window) if is_shared else None
    window, inner_bwd = window._replace(inner=in_window and in_window.kv_range), in_window and sel
    dq = Accumulator(q)
    dq_cmp = dq if is_single or t.cq is None else Accumulator(t.cq)

    def add_to_queries() -> None:
        if not is_single:
            flash.backward_q(compressed, cmp, dq_cmp)
            flash.backward_q(window, win, dq, inner_bwd)
        forced = selected.forced_blocks(inputs) if in_window is None else None
        if forced is not None:
            flash.backward_q(forced, sel, dq)
        if selection.gates is None:
            streams.wait(device, ready)
            selected.topn_backward_q(inputs, sel, dq, plan)

    if t.gates is not None:
        d_gates = selected.topn_backward_q(inputs, sel, dq, plan)
        grads["gates"] = d_gates[..., : t.gates.shape[-1]]
    with streams.forked(device, urgent=True) as prefetch, streams.forked(device) as side:
        with prefetch:
            plan.run(selection)
            ready = streams.mark(device)
        with side:
            add_to_queries()
        partials = []
        if not is_single:
            partials = [flash.backward_kv(compressed, cmp)]
            grads["ck"], grads["cv"] = reduce_partials(partials, ck, cv, ck.dtype)
            partials = [flash.backward_kv(window, win, inner_bwd)]
            if t.window_k is not None:
                d_window, partials = reduce_partials(partials, window.k, window.v, k.dtype), []
                grads["window_k"], grads["window_v"] = d_window
        if in_window is None:
            dk, dv = selected.forced_backward_kv(inputs, sel)
            partials.append((dk[None], dv[None]))
        elif in_window.prefix is not None:
            partials.append(flash.backward_prefix(in_window, sel))
        dk, dv = reduce_partials(partials, k, v)  # topn_backward_kv adds to these
        partials.clear()  # before it allocates partials of its own
        if not plan.is_key_major:
            streams.wait(device, ready)
            selected.topn_backward_kv(inputs, sel, dk, dv, dq, plan)
    if plan.is_key_major:  # adds to dq behind the other launches
        selected.topn_backward_kv(inputs, sel, dk, dv, dq, plan)
    grads["k"], grads["v"] = reduce_partials([(dk[None], dv[None])], k, v, k.dtype)
    grads["q"] = dq.result()
    if is_single:
        return grads
    return grads | dict(cq=dq_cmp.result()) | memory_grads(t, compressed, cmp)


def empty_block_indices(t: Call, config: AttentionConfig) -> Tensor:
    """Allocate [B T R n], like the block indices if given; nothing without a selection."""
    if "selected" not in config.branches:
        return t.q.new_empty(0, dtype=torch.int32)
    if t.block_indices is not None:
        return t.block_indices.new_empty(t.block_indices.shape, dtype=torch.int32)
    ranking = t.q if not config.query_heads_share_selected_kv else t.k if t.ck is None else t.ck
    heads, n = ranking.shape[2], config.num_selected_blocks
    return t.q.new_empty(*t.q.shape[:2], heads, n, dtype=torch.int32)


def plan_ranking(
    t: Call, config: AttentionConfig, sinks: Tensor | None = None
) -> tuple[Tensor, Callable[[Tensor | None], Any] | None]:
    """The block indices, and the function that writes them, of the log-sum-exp of the compressed
    branch if it is known; None where they are given or nothing is ranked."""
    if t.block_indices is not None:
        return t.block_indices, None
    block_indices, num_ranked = empty_block_indices(t, config), 0
    if t.ck is not None and config.num_selected_blocks:
        d, s = config.d, config.selection_block_size
        num_ranked = blocks.num_complete_blocks(t.ck.shape[1] * d, d, s)
        if not config.causal:
            num_ranked = blocks.num_blocks(t.k.shape[1] if t.seq_len is None else t.seq_len, s)
        elif config.num_selected_groups:  # ranked by tokens
            num_ranked = t.k.shape[1] // s
    if not num_ranked:
        return block_indices.fill_(-1), None
    from ...kernels.flash import flash
    from ...kernels.topk import selection

    leaders = None if t.leader_indices is None else t.leader_indices.contiguous()
    q, places = t.q if t.cq is None else t.cq, positions(t)
    places |= dict(out=block_indices, num_ranked=num_ranked, leaders=leaders)

    def rank(lse: Tensor | None) -> None:
        if config.num_selected_groups:
            selection.select_blocks_in_stages(q, t.ck, t.k, config, **places)
            return
        if lse is None and config.importance == "probs":
            keys = t._replace(cv=t.ck, mem_v=t.mem_k)
            lse = flash.forward(range_inputs("compressed", keys, config), sinks)[1]
        selection.select_blocks(q, t.ck, config, lse=lse, **places)

    return block_indices, rank


def positions(t: Call) -> dict[str, Any]:
    """Where the queries are, as launches take it."""
    is_tensor = isinstance(t.q_offset, Tensor)
    return dict(
        start=0 if is_tensor else t.q_offset, starts=t.q_offset if is_tensor else None,
        documents=t.documents,
    )  # fmt: skip


def selection_of(t: Call, block_indices: Tensor, config: AttentionConfig) -> Any:
    from ...kernels.common.launch import Selection

    return Selection(
        block_indices, config.selection_block_size, config.num_initial_blocks,
        config.num_local_blocks, config.causal, stride=config.selection_stride,
        gates=t.gates, soft_cap=config.soft_cap,
        **positions(t),
    )  # fmt: skip


def range_inputs(branch: str, t: Call, config: AttentionConfig) -> Any:
    """`flash.Inputs` of the compressed branch or of the window."""
    from ...kernels.common import primitives
    from ...kernels.common.launch import KVRange
    from ...kernels.flash import flash

    (q, k, v), scale = t[:3], config.scale_of(t.q.shape[-1])
    common = positions(t) | dict(soft_cap=config.soft_cap)
    if branch == "compressed":
        if t.ck is not None:
            q, k, v = q if t.cq is None else t.cq, t.ck, t.cv
        kind, memory = primitives.COMPRESSED if config.causal else primitives.EVERYTHING, None
        if t.mem_k is not None and t.mem_k.shape[1]:  # [K m D] -> [B m K D]
            batch = (len(q), -1, -1, -1)
            memory = tuple(m.transpose(0, 1).expand(batch) for m in (t.mem_k, t.mem_v))
        kv_range = KVRange(kind.value, stride=config.d, unit=config.d, **common)
        return flash.Inputs(q, k, v, kv_range, scale, memory)
    if t.window_k is not None:
        k, v = t.window_k, t.window_v
    kind = primitives.CAUSAL_WINDOW if config.causal else primitives.TWO_SIDED_WINDOW
    return flash.Inputs(q, k, v, KVRange(kind.value, config.sliding_window_size, **common), scale)


@operator(
    "select_blocks(Tensor?[] inputs, SymInt start, SymInt seq_len, str key) -> Tensor",
    fake=lambda inputs, start, _, key: empty_block_indices(
        unflatten(inputs, start), config_of_key(key)
    ),
)
def rank_blocks(inputs, start, seq_len, key):
    """Top-n of the blocks of `seq_len` tokens: block indices [B T R n], int32."""
    t, config = unflatten(inputs, start, seq_len), config_of_key(key)
    t = prepared(t)
    has_sinks = t.sinks is not None and config.importance == "probs"
    block_indices, rank = plan_ranking(t, config, t.sinks[0] if has_sinks else None)
    if rank is not None:
        rank(None)
    return block_indices


def select_blocks(call: Call, config: AttentionConfig) -> Tensor:
    """Block indices [B T R n] by q, ck and, with "probs", the memory and sinks of the compressed
    branch."""
    inputs, start = call.flat()
    detached = [None if t is None else t.detach() for t in inputs]
    return rank_blocks(detached, start, call.seq_len, config.key)  # type: ignore[no-any-return]
