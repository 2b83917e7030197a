"""The whole layer between projection and output in Triton, as one torch operator and one autograd
node: delta, dq, dk and dv are formed once for all branches.

The forward keeps what each branch gave, [B T H E], for the backward; with `recompute` the backward
forms it again. Most of the backward needs two numbers a row of it, which an operator of its own
forms: what each branch gave is gone by then. Arguments are those of
`ops.nsa.native_sparse_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import blocks
from ...compat.transforms import refuse_legacy_batched, refuse_second_derivatives, refuse_vmap
from ...varlen import Documents
from .branches import Settings, attend, attend_backward
from .operators import (
    empty_outputs,
    memory_grads,
    of_heads,
    offsets,
    prefix,
    rows,
    sink_grads,
    whole,
)
from .topk import bounds, in_its_sizes, of_documents, on_its_device


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
    sinks: Tensor | None,
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
    soft_cap: float | None,
    recompute: bool,
    diff_topk: bool,
    block_sizes: list[int] | None,
) -> list[Tensor]:
    """The output [B T H E], the selection [B T R n], and outputs and log-sum-exps of the
    branches, which `recompute` leaves out."""
    settings = Settings(
        start, num_ranked, num_selected, l, d, s, w, importance, interpolated, num_initial,
        num_local, stride, shared, causal, scale, soft_cap, recompute, diff_topk, block_sizes,
    )  # fmt: skip
    q, k, v, ck, cv = rows(q, k, v, ck, cv)
    cq = q if cq is None else rows(cq)[0]
    window = None if window_k is None or window_v is None else rows(window_k, window_v)
    memory = prefix(mem_k, mem_v, q.shape[0])
    out, _ = empty_outputs(q, v)
    outs, lses, block_indices = attend(
        settings, q, k, v, ck, cv, cq, memory, mem_k, window, sinks, starts,
        bounds(doc_first, doc_last), leaders, None, (branch_gates, out),
    )  # fmt: skip
    return [out, block_indices] if recompute else [out, block_indices, *outs, *lses]


@layer.register_fake
def _(
    q, k, v, ck, cv, branch_gates, cq, mem_k, mem_v, window_k, window_v, sinks, starts, doc_first,
    doc_last, leaders, *others,
):  # fmt: skip
    settings = Settings(*others)
    out, lse = empty_outputs(q, v)
    ranks = ck.shape[2] if settings.shared else q.shape[2]
    block_indices = q.new_empty(*q.shape[:2], ranks, settings.num_selected, dtype=torch.int32)
    kept = 0 if settings.recompute else 3
    return [
        out,
        block_indices,
        *(torch.empty_like(out) for _ in range(kept)),
        *(torch.empty_like(lse) for _ in range(kept)),
    ]


@torch.library.custom_op("native_sparse_attention::layer_backward_preprocess", mutates_args=())
@on_its_device
def layer_backward_preprocess(
    d_out: Tensor, outs: list[Tensor], lses: list[Tensor], branch_gates: Tensor
) -> list[Tensor]:
    """The gradient of the gates, and gated log-sum-exps and deltas of the branches [3 B T H]."""
    from ...kernels import combine

    return list(combine.backward(d_out.contiguous(), outs, lses, branch_gates))


@layer_backward_preprocess.register_fake
def _(d_out, outs, lses, branch_gates):
    of_rows = [branch_gates.new_empty(3, *d_out.shape[:3], dtype=torch.float32) for _ in range(2)]
    return [torch.empty_like(branch_gates, memory_format=torch.contiguous_format), *of_rows]


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
    sinks: Tensor | None,
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
    soft_cap: float | None,
    recompute: bool,
    diff_topk: bool,
    block_sizes: list[int] | None,
) -> list[Tensor]:
    """Gradients of all differentiable tensors that are there, in their order; of the gates only
    with `recompute`. `kept`: the selection, and without `recompute` the branches' log-sum-exps and
    what `layer_cotangents` formed beside that gradient."""
    from ...kernels import combine
    from ...kernels.common.reduce import reduce_partials
    from ...kernels.flash import bwd as flash_bwd
    from ...kernels.topk import gates_bwd

    settings = Settings(
        start, num_ranked, num_selected, l, d, s, w, importance, interpolated, num_initial,
        num_local, stride, shared, causal, scale, soft_cap, recompute, diff_topk, block_sizes,
    )  # fmt: skip
    block_indices, *kept = kept
    documents = bounds(doc_first, doc_last)
    dtype = q.dtype
    q, k, v, ck, cv, d_out = rows(q, k, v, ck, cv, d_out)
    d_out = whole(d_out)
    query = q if cq is None else rows(cq)[0]
    window = None if window_k is None or window_v is None else rows(window_k, window_v)
    memory = prefix(mem_k, mem_v, q.shape[0])
    d_gates = None
    if not recompute:
        *lses, gated, delta = kept
    else:
        outs, lses, _ = attend(
            settings, q, k, v, ck, cv, query, memory, mem_k, window, sinks, starts, documents,
            None, block_indices,
        )  # fmt: skip
        d_gates, gated, delta = combine.backward(d_out, outs, lses, branch_gates)
        del outs
    cmp, sel, win = combine.branch_backward_inputs(d_out, gated, delta)
    d_sinks = None
    if sinks is not None:
        of_branches = zip(sinks, lses, (cmp, sel, win), branch_gates.unbind(-1), strict=True)
        d_sinks = torch.stack([sink_grads(a, b, c.delta, g).float() for a, b, c, g in of_branches])
    dq, dk, dv, dck, dcv, dcq, d_window, d_chosen = attend_backward(
        settings, q, k, v, ck, cv, None if cq is None else query, memory, window, starts, documents,
        block_indices, cmp, sel, win,
    )  # fmt: skip
    d_scored = None
    if d_chosen is not None:
        # through the gates of the blocks to the scores that chose them, in place in dq or dcq
        at = settings.ranking(starts, documents, None if sinks is None else of_heads(sinks)[0])
        d_chosen = d_chosen[..., : block_indices.shape[-1]]
        _, more, d_scored, d_sink = gates_bwd.backward(
            query, ck, mem_k, block_indices, d_chosen, at, dcq
        )
        if d_sinks is not None and d_sink is not None:
            d_sinks[0] += d_sink
        dck = dck + more
    grads = [dq, dk, dv, dck, dcv]
    if d_gates is not None:
        grads.append(d_gates)
    if cq is not None:
        grads.append(dcq)
    if memory is not None:
        range_cmp = settings.kv_ranges(starts, documents)[0]
        shares = flash_bwd.backward_prefix(query, memory, range_cmp, scale, cmp)
        d_mem = memory_grads(*reduce_partials([shares], *memory))
        if d_scored is not None:
            d_mem[0] += d_scored
        grads += d_mem
    elif mem_k is not None and mem_v is not None:
        grads += [torch.zeros_like(mem_k), torch.zeros_like(mem_v)]
    if d_window is not None:
        grads += d_window
    grads = [g.to(branch_gates.dtype if g is d_gates else dtype) for g in grads]
    return grads if d_sinks is None or sinks is None else [*grads, d_sinks.to(sinks.dtype)]


# of an operator's arguments
GATES = 5


def differentiable(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [t for t in tensors[:12] if t is not None]


@layer_backward.register_fake
def _(d_out, *others):
    tensors, settings = list(others[:12]), Settings(*others[16:])
    if not settings.recompute:
        tensors[GATES] = None
    return [t.new_empty(t.shape) for t in differentiable(tensors)]


def setup(ctx, inputs, output):
    *tensors, _ = inputs[:16]
    ctx.numbers = inputs[16:]
    ctx.kept = len(output) - 1
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def backward(ctx, grads):
    refuse_legacy_batched(grads[0])
    saved = ctx.saved_tensors  # asked for once: activation checkpointing gives them once
    tensors, (block_indices, *kept) = saved[: -ctx.kept], saved[-ctx.kept :]
    d_out, d_gates = grads[0].contiguous(), None
    if kept:
        outs, lses = kept[:3], kept[3:]
        d_gates, *rest = layer_backward_preprocess(d_out, outs, lses, tensors[GATES])
        kept = [*lses, *rest]
        # nothing else has what the branches gave
        del saved, outs
        ctx.maybe_clear_saved_tensors()
    some = layer_backward(d_out, *tensors, [block_indices, *kept], *ctx.numbers)
    if d_gates is not None:
        some.insert(GATES, d_gates)
    found = iter(some)
    others = (None,) * (4 + len(Settings._fields))
    return (*(None if t is None else next(found) for t in tensors[:12]), *others)


layer.register_autograd(backward, setup_context=setup)
refuse_vmap(layer)
refuse_second_derivatives(layer_backward_preprocess)
refuse_second_derivatives(layer_backward)


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
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
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
        soft_cap, recompute, use_diff_topk, block_sizes,
    )  # fmt: skip
    out, block_indices, *_ = layer(
        q, k, v, ck, cv, branch_gates, cq, mem_k, mem_v, window_k, window_v, sinks, starts,
        *of_documents(documents), leader_indices, *settings,
    )  # fmt: skip
    return out, block_indices
