"""The three branches of the layer in Triton, without the operators around them: what the forward of
`layer.py` runs, and its backward again with `recompute`; and their backward."""

from __future__ import annotations

import dataclasses
import functools
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...varlen import Documents
from .operators import of_heads


class Settings(NamedTuple):
    """What is not a tensor, in the operators' order."""

    start: int
    num_ranked: int
    num_selected: int
    l: int
    d: int
    s: int
    w: int
    importance: str
    interpolated: bool
    num_initial: int
    num_local: int
    stride: int
    shared: bool
    causal: bool
    scale: float
    soft_cap: float | None
    recompute: bool
    diff_topk: bool
    block_sizes: list[int] | None

    def ranking(
        self, starts: Tensor | None, documents: Documents | None, sinks: Tensor | None
    ) -> Any:
        from ...kernels.topk.gates_launch import Ranking

        return Ranking(
            self.start, self.num_ranked, self.num_selected, self.l, self.d, self.s,
            self.importance, self.interpolated, self.num_initial, self.num_local, self.stride,
            self.shared, self.causal, self.scale, starts, documents, self.soft_cap,
            None if self.importance == "logits" else sinks,
        )  # fmt: skip

    def allocate_block_indices(self, q: Tensor, ck: Tensor, ranked: bool) -> Tensor:
        """[B T R n]: unwritten if blocks are ranked, of no block if not."""
        ranks = ck.shape[2] if self.shared else q.shape[2]
        block_indices = q.new_empty(*q.shape[:2], ranks, self.num_selected, dtype=torch.int32)
        return block_indices if ranked else block_indices.fill_(-1)

    def selection(
        self, block_indices: Tensor, starts: Tensor | None, documents: Documents | None
    ) -> Any:
        from ...kernels.common.launch import Selection

        return Selection(
            block_indices, self.s, self.num_initial, self.num_local, self.causal, self.start,
            starts, stride=self.stride, documents=documents, soft_cap=self.soft_cap,
        )  # fmt: skip

    def kv_ranges(self, starts: Tensor | None, documents: Documents | None) -> tuple[Any, Any]:
        """Of the compressed branch and of the window."""
        from ...kernels.common import primitives
        from ...kernels.common.launch import KVRange

        wide = primitives.BEHIND if self.causal else primitives.EVERYTHING
        near = primitives.CAUSAL_WINDOW if self.causal else primitives.TWO_SIDED_WINDOW
        where: dict[str, Any] = dict(
            start=self.start, starts=starts, documents=documents, soft_cap=self.soft_cap
        )
        return (
            KVRange(wide.value, stride=self.d, unit=self.d, **where),
            KVRange(near.value, self.w, **where),
        )


def attend(
    settings: Settings,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ck: Tensor,
    cv: Tensor,
    cq: Tensor,
    memory: tuple[Tensor, Tensor] | None,
    mem_k: Tensor | None,
    window: tuple[Tensor, Tensor] | None,
    sinks: Tensor | None,
    starts: Tensor | None,
    documents: Documents | None,
    leaders: Tensor | None,
    block_indices: Tensor | None,
    layer_out: tuple[Tensor, Tensor] | None = None,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Outputs and log-sum-exps of the three branches, and the selection where `lists` is not it.
    Given gates [B T H 3] and a tensor for the layer's output in `mixed`, writes that."""
    from ...kernels.common import streams
    from ...kernels.common.key_norms import key_norms
    from ...kernels.common.launch import CombineInputs
    from ...kernels.flash import fwd as flash_fwd
    from ...kernels.selected import branch as selected
    from ...kernels.topk import scores

    at = settings
    leaders = None if leaders is None else leaders.contiguous()
    range_cmp, range_win = at.kv_ranges(starts, documents)
    sink_cmp, sink_sel, sink_win = (None,) * 3 if sinks is None else of_heads(sinks)
    ranked = block_indices is None and at.num_ranked > 0 and at.num_selected > 0
    if block_indices is None:
        block_indices = at.allocate_block_indices(q, ck, ranked)
    # where no one waits for the compressed branch, whose keys are ranked beside it
    ahead = ranked and at.importance == "logits" and leaders is None and documents is None

    def rank(lse: Tensor | None) -> None:
        scores.select_blocks(
            cq, ck, mem_k, lse, starts, leaders, at.start, at.num_ranked, at.num_selected,
            at.l, at.d, at.s, at.importance, at.interpolated, at.num_initial, at.num_local,
            at.stride, at.shared, at.causal, at.scale, documents, at.soft_cap, out=block_indices,
        )  # fmt: skip

    attend_compressed = functools.partial(
        flash_fwd.forward, cq, ck, cv, range_cmp, at.scale, memory, sinks=sink_cmp
    )
    if not ahead:
        out_cmp, lse_cmp = attend_compressed()
        if ranked:
            rank(lse_cmp)
    selection = at.selection(block_indices, starts, documents)
    if leaders is not None and block_indices.shape[-1]:
        # handed in by a caller, not ranked here
        block_indices = selected.valid_block_indices(selection, k.shape[1])
        selection = at.selection(block_indices, starts, documents)
    selection = selected.with_initial(selection)
    if window is None:
        near, of_window = selected.within_window(selection, k, v, at.w)[1], (k, v)
    else:
        near, of_window = None, window
    plan = selected.allocate(q, k, v, selection, at.scale)
    # short programs, on the way to the selection: the tensor cores have little to do
    fork = ahead or plan is not None
    with streams.forked(q.device, ahead=True) if fork else nullcontext(nullcontext()) as beside:
        with beside:
            if ahead:
                rank(None)
            if plan is not None:
                plan.run(selection)
        norms = key_norms(q, k)
        if ahead:
            out_cmp, lse_cmp = attend_compressed()
        out_win, lse_win, *partial = flash_fwd.forward(
            q, *of_window, range_win, at.scale, inner=near, sinks=sink_win, inner_sinks=sink_sel,
            norms=norms if window is None else None,
        )  # fmt: skip
    done = (partial[0], partial[1]) if partial else None
    combine_inputs = None if layer_out is None else CombineInputs(out_cmp, out_win, *layer_out)
    out_sel, lse_sel = selected.forward(
        q, k, v, selection, at.scale, done, sink_sel, combine_inputs, norms, plan
    )
    return [out_cmp, out_sel, out_win], [lse_cmp, lse_sel, lse_win], block_indices


class BranchGradients(NamedTuple):
    """Of the tensors that the branches read, from their outputs; dcq is dq where the compressed
    branch has no queries of its own. `window`: of its keys and values if it has its own; `chosen`:
    of the slots of the selection, with differentiable top-k."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dck: Tensor
    dcv: Tensor
    dcq: Tensor
    window: tuple[Tensor, Tensor] | None
    chosen: Tensor | None


def attend_backward(
    settings: Settings,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ck: Tensor,
    cv: Tensor,
    cq: Tensor | None,
    memory: tuple[Tensor, Tensor] | None,
    window: tuple[Tensor, Tensor] | None,
    starts: Tensor | None,
    documents: Documents | None,
    block_indices: Tensor,
    cmp: Any,
    sel: Any,
    win: Any,
) -> BranchGradients:
    """Gradients from those of the branches' outputs, `launch.Cotangent`s. What adds to dq, one
    launch after the other, runs beside what forms dk and dv."""
    from ...kernels.common import streams
    from ...kernels.common.launch import Sum
    from ...kernels.common.reduce import reduce_partials
    from ...kernels.flash import bwd as flash_bwd
    from ...kernels.selected import branch as selected

    at = settings
    range_cmp, range_win = at.kv_ranges(starts, documents)
    chosen = at.selection(block_indices, starts, documents)
    if at.diff_topk and at.num_ranked and at.num_selected:
        chosen = dataclasses.replace(
            chosen, gates=torch.ones_like(block_indices, dtype=torch.float32)
        )
    chosen = selected.with_initial(chosen)
    first, inner = selected.within_window(chosen, k, v, at.w) if window is None else (None, None)
    within = None if inner is None else (inner, sel)
    near = window or (k, v)
    listed = (q, k, v, chosen, at.scale, sel)
    plan = selected.plan_backward(q, k, v, chosen, at.scale)
    dq = Sum(q)
    query, dcq = (q, dq) if cq is None else (cq, Sum(cq))

    def through_queries() -> None:
        flash_bwd.backward_q(query, ck, cv, range_cmp, at.scale, cmp, dcq, memory)
        flash_bwd.backward_q(q, *near, range_win, at.scale, win, dq, inner=within)
        if within is None:
            selected.forced_backward_q(*listed, dq)
        if chosen.gates is None:
            streams.wait(q.device, ready)
            selected.topn_backward_q(*listed, dq, plan)

    d_chosen = None
    if chosen.gates is not None:
        d_chosen = selected.topn_backward_q(*listed, dq, plan)
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
                selected.topn_backward_kv(*listed, topn_dk, topn_dv, dq, plan, ready, done)
            else:
                through_queries()
        # with differentiable top-k what goes through its scores is added to these
        dtype = ck.dtype if chosen.gates is None else torch.float32
        parts = [flash_bwd.backward_kv(query, ck, cv, range_cmp, at.scale, cmp)]
        dck, dcv = reduce_partials(parts, ck, cv, dtype)
        parts = [flash_bwd.backward_kv(q, *near, range_win, at.scale, win, within)]
        d_window = None
        if window is not None:
            d_window, parts = reduce_partials(parts, *near, k.dtype), []
        if inner is not None and first is not None:
            parts.append(flash_bwd.backward_prefix(q, first, inner, at.scale, sel))
        if not within:
            dk, dv = selected.forced_backward_kv(*listed)
            parts.append((dk[None], dv[None]))
        if not plan.concurrent:
            dk, dv = reduce_partials(parts, k, v)  # what is listed is added to these
            parts = [(dk[None], dv[None])]
        if not plan.is_key_major:
            selected.topn_backward_kv(*listed, dk, dv, dq, plan, ready)
    if plan.concurrent:
        parts.append((topn_dk[None], topn_dv[None]))
    elif plan.is_key_major:
        d_chosen = selected.topn_backward_kv(*listed, dk, dv, dq, plan)
    dk, dv = reduce_partials(parts, k, v, k.dtype)
    return BranchGradients(dq.total(), dk, dv, dck, dcv, dcq.total(), d_window, d_chosen)
