"""Forward and backward of the layer's three branches in Triton, without the operators around them.
`layer.py` runs them. With `recompute` its backward runs the forward again."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...config import AttentionConfig
from ...varlen import Documents
from .operator import empty_block_indices, of_heads


@dataclass(frozen=True)
class Problem:
    """The tensors of a call in the kernels' form, and its settings."""

    q: Tensor
    k: Tensor
    v: Tensor
    ck: Tensor
    cv: Tensor
    cq: Tensor  # queries of the compressed branch
    own_cq: bool  # whether they differ from q
    mem_k: Tensor | None
    memory: tuple[Tensor, Tensor] | None  # keys and values before all others
    window: tuple[Tensor, Tensor] | None  # keys and values of the window if they differ from k, v
    sinks: Tensor | None
    starts: Tensor | None
    documents: Documents | None
    start: int
    num_ranked: int
    range_cmp: Any  # `launch.KVRange` of the compressed branch and of the window
    range_win: Any
    scale: float
    config: AttentionConfig

    @property
    def ranks_blocks(self) -> bool:
        return self.num_ranked > 0 and self.config.num_selected_blocks > 0

    def selection(self, block_indices: Tensor) -> Any:
        from ...kernels.common.launch import Selection

        at = self.config
        return Selection(
            block_indices, at.selection_block_size, at.num_initial_blocks, at.num_local_blocks,
            at.causal, self.start, self.starts, stride=at.selection_stride,
            documents=self.documents, soft_cap=at.soft_cap,
        )  # fmt: skip


def attend(
    call: Problem,
    leaders: Tensor | None,
    block_indices: Tensor | None,
    combined: tuple[Tensor, Tensor] | None = None,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Outputs and log-sum-exps of the three branches, and the block indices. Ranks the blocks if
    `block_indices` is None. `combined` holds gates [B T H 3] and a tensor for the layer's output:
    writes that output."""
    from ...kernels.common import streams
    from ...kernels.common.key_norms import key_norms
    from ...kernels.common.launch import CombineInputs
    from ...kernels.flash import fwd as flash_fwd
    from ...kernels.selected import branch as selected
    from ...kernels.topk import scores

    at, q, k, v, scale = call.config, call.q, call.k, call.v, call.scale
    leaders = None if leaders is None else leaders.contiguous()
    sink_cmp, sink_sel, sink_win = (None,) * 3 if call.sinks is None else of_heads(call.sinks)
    ranked = block_indices is None and call.ranks_blocks
    if block_indices is None:
        block_indices = empty_block_indices(q, call.ck, at)
        block_indices = block_indices if ranked else block_indices.fill_(-1)
    # then the ranking needs nothing of the compressed branch and runs beside it
    ahead = ranked and at.importance != "probs" and leaders is None and call.documents is None

    def rank(lse: Tensor | None) -> None:
        scores.select_blocks(
            call.cq, call.ck, call.mem_k, lse, call.starts, leaders, call.start, call.num_ranked,
            at.num_selected_blocks, at.compress_block_size, at.d, at.selection_block_size,
            at.importance, at.interpolated_importance_score, at.num_initial_blocks,
            at.num_local_blocks, at.selection_stride, at.query_heads_share_selected_kv, at.causal,
            scale, call.documents, at.soft_cap, out=block_indices,
        )  # fmt: skip

    attend_compressed = functools.partial(
        flash_fwd.forward, call.cq, call.ck, call.cv, call.range_cmp, scale,
        call.memory, sinks=sink_cmp,
    )  # fmt: skip
    if not ahead:
        norms, norms_cmp = key_norms(q, k, call.ck)
        out_cmp, lse_cmp = attend_compressed(norms=norms_cmp)
        if ranked:
            rank(lse_cmp)
    selection = call.selection(block_indices)
    if leaders is not None and block_indices.shape[-1]:
        # the caller gave the leaders' block indices, so they may be invalid
        block_indices = selected.valid_block_indices(selection, k.shape[1])
        selection = call.selection(block_indices)
    selection = selected.with_initial(selection)
    of_window, near = call.window, None
    if of_window is None:
        of_window = k, v
        near = selected.within_window(selection, k, v, at.sliding_window_size)[1]
    plan = selected.allocate(q, k, v, selection, scale)
    # short programs that the selection waits for; they leave the tensor cores idle
    fork = ahead or plan is not None
    with streams.forked(q.device, ahead=True) if fork else nullcontext(nullcontext()) as beside:
        with beside:
            if ahead:
                rank(None)
            if plan is not None:
                plan.run(selection)
        if ahead:
            norms, norms_cmp = key_norms(q, k, call.ck)
            out_cmp, lse_cmp = attend_compressed(norms=norms_cmp)
        out_win, lse_win, *partial = flash_fwd.forward(
            q, *of_window, call.range_win, scale, inner=near, sinks=sink_win, inner_sinks=sink_sel,
            norms=norms if call.window is None else None,
        )  # fmt: skip
    done = (partial[0], partial[1]) if partial else None
    combine_inputs = None if combined is None else CombineInputs(out_cmp, out_win, *combined)
    out_sel, lse_sel = selected.forward(
        q, k, v, selection, scale, done, sink_sel, combine_inputs, norms, plan
    )
    return [out_cmp, out_sel, out_win], [lse_cmp, lse_sel, lse_win], block_indices


class BranchGradients(NamedTuple):
    """Gradients of the tensors that the branches read. dcq is dq if the compressed branch has no
    queries of its own. `window`: of the window's own keys and values. `chosen`: of the slots of the
    selection, with differentiable top-k."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dck: Tensor
    dcv: Tensor
    dcq: Tensor
    window: tuple[Tensor, Tensor] | None
    chosen: Tensor | None


def attend_backward(
    call: Problem, block_indices: Tensor, cmp: Any, sel: Any, win: Any
) -> BranchGradients:
    """Gradients from the `launch.BackwardInputs` of the branches. The launches that add to dq run
    one after the other, beside the launches for dk and dv."""
    from ...kernels.common import streams
    from ...kernels.common.launch import Accumulator
    from ...kernels.common.reduce import reduce_partials
    from ...kernels.flash import bwd as flash_bwd
    from ...kernels.selected import branch as selected

    q, k, v, ck, cv, scale = call.q, call.k, call.v, call.ck, call.cv, call.scale
    window = call.window
    range_cmp, range_win = call.range_cmp, call.range_win
    chosen = call.selection(block_indices)
    if call.config.use_diff_topk and call.ranks_blocks:
        chosen = replace(chosen, gates=torch.ones_like(block_indices, dtype=torch.float32))
    chosen = selected.with_initial(chosen)
    first, inner = (
        selected.within_window(chosen, k, v, call.config.sliding_window_size)
        if window is None
        else (None, None)
    )
    within = None if inner is None else (inner, sel)
    near = window or (k, v)
    selected_args = (q, k, v, chosen, scale, sel)
    plan = selected.plan_backward(q, k, v, chosen, scale)
    dq = Accumulator(q)
    query, dcq = (call.cq, Accumulator(call.cq)) if call.own_cq else (q, dq)

    def through_queries() -> None:
        flash_bwd.backward_q(query, ck, cv, range_cmp, scale, cmp, dcq, call.memory)
        flash_bwd.backward_q(q, *near, range_win, scale, win, dq, inner=within)
        if within is None:
            selected.forced_backward_q(*selected_args, dq)
        if chosen.gates is None:
            streams.wait(q.device, ready)
            selected.topn_backward_q(*selected_args, dq, plan)

    d_chosen = None
    if chosen.gates is not None:
        d_chosen = selected.topn_backward_q(*selected_args, dq, plan)
    if plan.concurrent:
        buffer = k.new_empty(k.numel() + v.numel(), dtype=torch.float32)
        topn_dk, topn_dv = buffer[: k.numel()].view(k.shape), buffer[k.numel() :].view(v.shape)
    with streams.forked(q.device, ahead=True) as ahead, streams.forked(q.device) as beside:
        with ahead:
            plan.run(chosen)
            if plan.concurrent:
                buffer.zero_()
            ready = streams.mark(q.device)
        if plan.concurrent:
            through_queries()
            done = streams.mark(q.device)
        with beside:
            if plan.concurrent:
                selected.topn_backward_kv(*selected_args, topn_dk, topn_dv, dq, plan, ready, done)
            else:
                through_queries()
        # differentiable top-k later adds the gradients of its scores to these
        dtype = ck.dtype if chosen.gates is None else torch.float32
        parts = [flash_bwd.backward_kv(query, ck, cv, range_cmp, scale, cmp)]
        dck, dcv = reduce_partials(parts, ck, cv, dtype)
        parts = [flash_bwd.backward_kv(q, *near, range_win, scale, win, within)]
        d_window = None
        if window is not None:
            d_window, parts = reduce_partials(parts, *near, k.dtype), []
        if inner is not None and first is not None:
            parts.append(flash_bwd.backward_prefix(q, first, inner, scale, sel))
        if not within:
            dk, dv = selected.forced_backward_kv(*selected_args)
            parts.append((dk[None], dv[None]))
        if not plan.concurrent:
            dk, dv = reduce_partials(parts, k, v)  # topn_backward_kv adds to these
            parts = [(dk[None], dv[None])]
        if not plan.is_key_major:
            selected.topn_backward_kv(*selected_args, dk, dv, dq, plan, ready)
    if plan.concurrent:
        parts.append((topn_dk[None], topn_dv[None]))
    elif plan.is_key_major:
        d_chosen = selected.topn_backward_kv(*selected_args, dk, dv, dq, plan)
    dk, dv = reduce_partials(parts, k, v, k.dtype)
    return BranchGradients(dq.result(), dk, dv, dck, dcv, dcq.result(), d_window, d_chosen)
