"""The whole layer between projection and output in Triton, as one torch operator and one autograd
node: delta, dq, dk and dv are formed once for all branches.

The forward keeps what each branch gave, [B T H E], for the backward; with `recompute` the backward
forms it again. Arguments are those of `ops.nsa.native_sparse_attention`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import blocks
from .documents import Documents
from .operators import empty_outputs, memory_grads, offsets, prefix, rows
from .selection import bounds, in_its_sizes, of_documents, on_its_device


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
    recompute: bool
    diff_topk: bool
    block_sizes: list[int] | None

    def ranking(self, starts: Tensor | None, documents: Documents | None) -> Any:
        from ..kernels.gate_launch import Ranking

        return Ranking(
            self.start, self.num_ranked, self.num_selected, self.l, self.d, self.s,
            self.importance, self.interpolated, self.num_initial, self.num_local, self.stride,
            self.shared, self.causal, self.scale, starts, documents,
        )  # fmt: skip

    def selection(self, lists: Tensor, starts: Tensor | None, documents: Documents | None) -> Any:
        from ..kernels.launch import Selection

        return Selection(
            lists, self.s, self.num_initial, self.num_local, self.causal, self.start, starts,
            stride=self.stride, documents=documents,
        )  # fmt: skip

    def places(self, starts: Tensor | None, documents: Documents | None) -> tuple[Any, Any]:
        """Of the compressed branch and of the window."""
        from ..kernels import device
        from ..kernels.launch import Place

        wide = device.BEHIND if self.causal else device.EVERYTHING
        near = device.CAUSAL_WINDOW if self.causal else device.TWO_SIDED_WINDOW
        where: dict[str, Any] = dict(start=self.start, starts=starts, documents=documents)
        return (
            Place(wide.value, stride=self.d, unit=self.d, **where),
            Place(near.value, self.w, **where),
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
    starts: Tensor | None,
    documents: Documents | None,
    leaders: Tensor | None,
    lists: Tensor | None,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Outputs and log-sum-exps of the three branches, and the selection where `lists` is not it."""
    from ..kernels import interval, scoring, selected

    at = settings
    leaders = None if leaders is None else leaders.contiguous()
    place_cmp, place_win = at.places(starts, documents)
    out_cmp, lse_cmp = interval.forward(cq, ck, cv, place_cmp, at.scale, memory)
    if lists is None and at.num_ranked and at.num_selected:
        lists = scoring.select_blocks(
            cq, ck, mem_k, lse_cmp, starts, leaders, at.start, at.num_ranked, at.num_selected,
            at.l, at.d, at.s, at.importance, at.interpolated, at.num_initial, at.num_local,
            at.stride, at.shared, at.causal, at.scale, documents,
        )  # fmt: skip
    elif lists is None:
        ranks = ck.shape[2] if at.shared else q.shape[2]
        lists = q.new_full((*q.shape[:2], ranks, at.num_selected), -1, dtype=torch.int32)
    selection = at.selection(lists, starts, documents)
    if leaders is not None and lists.shape[-1]:
        # handed in by a caller, not ranked here
        lists = selected.valid_lists(selection, k.shape[1])
        selection = at.selection(lists, starts, documents)
    selection = selected.with_initial(selection)
    near = selected.within_window(selection, k, v, at.w) if window is None else (None, None)
    wk, wv = window or (k, v)
    out_win, lse_win, *partial = interval.forward(q, wk, wv, place_win, at.scale, *near)
    done = (partial[0], partial[1]) if partial else None
    out_sel, lse_sel = selected.forward(q, k, v, selection, at.scale, done)
    return [out_cmp, out_sel, out_win], [lse_cmp, lse_sel, lse_win], lists


@torch.library.custom_op("native_sparse_attention::layer", mutates_args=())
@on_its_device
@in_its_sizes
def layer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ck: Tensor,
    cv: Tensor,
    branch_gates: Tensor,
    cq: Tensor | None,
    mem_k: Tensor | None,
    mem_v: Tensor | None,
    window_k: Tensor | None,
    window_v: Tensor | None,
    starts: Tensor | None,
    doc_first: Tensor | None,
    doc_last: Tensor | None,
    leaders: Tensor | None,
    start: int,
    num_ranked: int,
    num_selected: int,
    l: int,
    d: int,
    s: int,
    w: int,
    importance: str,
    interpolated: bool,
    num_initial: int,
    num_local: int,
    stride: int,
    shared: bool,
    causal: bool,
    scale: float,
    recompute: bool,
    diff_topk: bool,
    block_sizes: list[int] | None,
) -> list[Tensor]:
    """The output [B T H E], the selection [B T R n], and outputs and log-sum-exps of the
    branches, which `recompute` leaves out."""
    from ..kernels import combine

    settings = Settings(
        start, num_ranked, num_selected, l, d, s, w, importance, interpolated, num_initial,
        num_local, stride, shared, causal, scale, recompute, diff_topk, block_sizes,
    )  # fmt: skip
    q, k, v, ck, cv = rows(q, k, v, ck, cv)
    cq = q if cq is None else rows(cq)[0]
    window = None if window_k is None or window_v is None else rows(window_k, window_v)
    memory = prefix(mem_k, mem_v, q.shape[0])
    outs, lses, lists = attend(
        settings, q, k, v, ck, cv, cq, memory, mem_k, window, starts,
        bounds(doc_first, doc_last), leaders, None,
    )  # fmt: skip
    out = combine.forward(outs, branch_gates)
    return [out, lists] if recompute else [out, lists, *outs, *lses]


@layer.register_fake
def _(
    q, k, v, ck, cv, branch_gates, cq, mem_k, mem_v, window_k, window_v, starts, doc_first,
    doc_last, leaders, *others,
):  # fmt: skip
    settings = Settings(*others)
    out, lse = empty_outputs(q, v)
    ranks = ck.shape[2] if settings.shared else q.shape[2]
    lists = q.new_empty(*q.shape[:2], ranks, settings.num_selected, dtype=torch.int32)
    kept = 0 if settings.recompute else 3
    return [
        out,
        lists,
        *(torch.empty_like(out) for _ in range(kept)),
        *(torch.empty_like(lse) for _ in range(kept)),
    ]


@torch.library.custom_op("native_sparse_attention::layer_backward", mutates_args=())
@on_its_device
@in_its_sizes
def layer_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ck: Tensor,
    cv: Tensor,
    branch_gates: Tensor,
    cq: Tensor | None,
    mem_k: Tensor | None,
    mem_v: Tensor | None,
    window_k: Tensor | None,
    window_v: Tensor | None,
    starts: Tensor | None,
    doc_first: Tensor | None,
    doc_last: Tensor | None,
    kept: list[Tensor],
    start: int,
    num_ranked: int,
    num_selected: int,
    l: int,
    d: int,
    s: int,
    w: int,
    importance: str,
    interpolated: bool,
    num_initial: int,
    num_local: int,
    stride: int,
    shared: bool,
    causal: bool,
    scale: float,
    recompute: bool,
    diff_topk: bool,
    block_sizes: list[int] | None,
) -> list[Tensor]:
    """Gradients of all differentiable tensors that are there, in their order."""
    from ..kernels import combine, gates, interval_backward, selected

    settings = Settings(
        start, num_ranked, num_selected, l, d, s, w, importance, interpolated, num_initial,
        num_local, stride, shared, causal, scale, recompute, diff_topk, block_sizes,
    )  # fmt: skip
    lists, *kept = kept
    documents = bounds(doc_first, doc_last)
    dtype = q.dtype
    q, k, v, ck, cv, d_out = rows(q, k, v, ck, cv, d_out)
    d_out = d_out.contiguous()
    query = q if cq is None else rows(cq)[0]
    window = None if window_k is None or window_v is None else rows(window_k, window_v)
    memory = prefix(mem_k, mem_v, q.shape[0])
    outs, lses = kept[:3], kept[3:]
    if recompute:
        outs, lses, _ = attend(
            settings, q, k, v, ck, cv, query, memory, mem_k, window, starts, documents, None, lists
        )

    d_gates, (cmp, sel, win) = combine.backward(d_out, outs, lses, branch_gates)
    del outs
    place_cmp, place_win = settings.places(starts, documents)
    dcq = interval_backward.backward_q(query, ck, cv, place_cmp, scale, cmp, memory)
    dck, dcv = interval_backward.backward_kv(query, ck, cv, place_cmp, scale, cmp)
    dq = dcq if cq is None else None

    chosen = settings.selection(lists, starts, documents)
    if diff_topk and num_ranked and num_selected:
        chosen = dataclasses.replace(chosen, gates=torch.ones_like(lists, dtype=torch.float32))
    chosen = selected.with_initial(chosen)
    first, inner = selected.within_window(chosen, k, v, w) if window is None else (None, None)
    within = None if inner is None else (inner, sel)
    wk, wv = window or (k, v)
    dq = interval_backward.backward_q(q, wk, wv, place_win, scale, win, first, dq, within)
    d_window = interval_backward.backward_kv(q, wk, wv, place_win, scale, win, within)
    if inner is not None and first is not None:
        of_first = interval_backward.backward_prefix(q, first, inner, scale, sel)
        for whole, some in zip(d_window, of_first, strict=True):
            whole[:, : some.shape[1]] += some
    # in the window's own gradients where they are those of k and v too
    partial = d_window if within else None
    dq, dk, dv, d_chosen = selected.backward(q, k, v, chosen, scale, sel, dq, partial)
    if window is None and not within:
        dk, dv = dk + d_window[0], dv + d_window[1]

    d_scored = None
    if d_chosen is not None:
        # through the gates of the blocks to the scores that chose them, in place in dq or dcq
        into = dq if cq is None else dcq
        at = settings.ranking(starts, documents)
        d_chosen = d_chosen[..., : lists.shape[-1]]
        _, more, d_scored = gates.backward(query, ck, mem_k, lists, d_chosen, at, into)
        dck = dck + more
    grads = [dq, dk, dv, dck, dcv, d_gates]
    if cq is not None:
        grads.append(dcq)
    if memory is not None:
        d_mem = memory_grads(
            *interval_backward.backward_prefix(query, memory, place_cmp, scale, cmp)
        )
        if d_scored is not None:
            d_mem[0] += d_scored
        grads += d_mem
    elif mem_k is not None and mem_v is not None:
        grads += [torch.zeros_like(mem_k), torch.zeros_like(mem_v)]
    if window is not None:
        grads += d_window
    return [g.to(branch_gates.dtype if g is d_gates else dtype) for g in grads]


def differentiable(tensors: tuple[Tensor | None, ...]) -> list[Tensor]:
    return [t for t in tensors[:11] if t is not None]


@layer_backward.register_fake
def _(d_out, *others):
    return [t.new_empty(t.shape) for t in differentiable(others)]


def setup(ctx, inputs, output):
    *tensors, _ = inputs[:15]
    ctx.numbers = inputs[15:]
    ctx.kept = len(output) - 1
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def backward(ctx, grads):
    saved = ctx.saved_tensors  # asked for once: activation checkpointing gives them once
    tensors, kept = saved[: -ctx.kept], list(saved[-ctx.kept :])
    some = iter(layer_backward(grads[0], *tensors, kept, *ctx.numbers))
    others = (None,) * (4 + len(Settings._fields))
    return (*(None if t is None else next(some) for t in tensors[:11]), *others)


layer.register_autograd(backward, setup_context=setup)


def native_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ck: Tensor,
    cv: Tensor,
    branch_gates: Tensor,
    *,
    cq: Tensor | None,
    mem_k: Tensor | None,
    mem_v: Tensor | None,
    window_k: Tensor | None,
    window_v: Tensor | None,
    compress_block_size: int,
    compress_block_sliding_stride: int,
    selection_block_size: int,
    num_selected_blocks: int,
    sliding_window_size: int,
    importance: str,
    interpolated_importance_score: bool,
    num_initial_blocks: int,
    num_local_blocks: int,
    selection_stride: int,
    query_heads_share_selected_kv: bool,
    causal: bool,
    q_offset: int | Tensor,
    leader_indices: Tensor | None,
    scale: float | None,
    recompute: bool,
    use_diff_topk: bool,
    block_sizes: list[int] | None,
    documents: Documents | None = None,
) -> tuple[Tensor, Tensor]:
    """The output [B T H E] and the selected block indices."""
    starts, start = offsets(q_offset)
    if window_k is not None or window_v is not None:
        window_k, window_v = (
            k if window_k is None else window_k,
            v if window_v is None else window_v,
        )
    num_ranked = blocks.num_complete_blocks(
        ck.shape[1] * compress_block_sliding_stride,
        compress_block_sliding_stride,
        selection_block_size,
    )
    if not causal:
        num_ranked = blocks.num_blocks(k.shape[1], selection_block_size)
    settings = Settings(
        start, num_ranked, num_selected_blocks, compress_block_size,
        compress_block_sliding_stride, selection_block_size, sliding_window_size, importance,
        interpolated_importance_score, num_initial_blocks, num_local_blocks, selection_stride,
        query_heads_share_selected_kv, causal, q.shape[-1] ** -0.5 if scale is None else scale,
        recompute, use_diff_topk, block_sizes,
    )  # fmt: skip
    out, lists, *_ = layer(
        q, k, v, ck, cv, branch_gates, cq, mem_k, mem_v, window_k, window_v, starts,
        *of_documents(documents), leader_indices, *settings,
    )  # fmt: skip
    return out, lists
