"""The selection in Triton, as torch operators: the blocks, and the gates of differentiable top-k.
`backend.py` says which calls they can run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import blocks
from ...compat import transforms
from ...varlen import Documents


def on_its_device(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Run an operator with the GPU of its first tensor the current one, as Triton launches there;
    and not under forward-mode AD."""

    @functools.wraps(operator)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device_of(args[0]):
            return operator(*args, **kwargs)

    return transforms.on_values(run)


def in_its_sizes(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Run an operator with tiles of the sizes that are its last argument (`BlockSizes`)."""

    @functools.wraps(operator)
    def run(*args: Any) -> Any:
        from ...kernels.common import overrides

        with overrides.sized(args[-1]):
            return operator(*args)

    return run


def bounds(doc_first: Tensor | None, doc_last: Tensor | None) -> Documents | None:
    if doc_first is None or doc_last is None:
        return None
    return Documents(doc_first.contiguous(), doc_last.contiguous())


def of_documents(documents: Documents | None) -> tuple[Tensor | None, Tensor | None]:
    """What operators take of where documents lie."""
    return (None, None) if documents is None else (documents.first, documents.last)


@torch.library.custom_op("native_sparse_attention::select_blocks", mutates_args=())
@on_its_device
def ranked_blocks(
    q: Tensor,
    ck: Tensor,
    mem_k: Tensor | None,
    lse: Tensor | None,
    starts: Tensor | None,
    doc_first: Tensor | None,
    doc_last: Tensor | None,
    sinks: Tensor | None,
    leader_indices: Tensor | None,
    start: int,
    num_ranked: int,
    num_selected: int,
    l: int,
    d: int,
    s: int,
    importance: str,
    interpolated: bool,
    num_initial: int,
    num_local: int,
    stride: int,
    shared: bool,
    causal: bool,
    scale: float,
    soft_cap: float | None,
) -> Tensor:
    """Block indices [B T R n] of the n best of the first `num_ranked` blocks, int32."""
    from ...kernels.topk import scores

    return scores.select_blocks(
        q, ck, mem_k, lse, starts, leader_indices, start, num_ranked, num_selected, l, d, s,
        importance, interpolated, num_initial, num_local, stride, shared, causal, scale,
        bounds(doc_first, doc_last), soft_cap, sinks,
    )  # fmt: skip


@ranked_blocks.register_fake
def _(q, ck, mem_k, lse, starts, doc_first, doc_last, sinks, leader_indices, start, num_ranked,
      num_selected, l, d, s, importance, interpolated, num_initial, num_local, stride, shared,
      causal, scale, soft_cap):  # fmt: skip
    ranks = ck.shape[2] if shared else q.shape[2]
    return q.new_empty(*q.shape[:2], ranks, num_selected, dtype=torch.int32)


@torch.library.custom_op("native_sparse_attention::selection_gates", mutates_args=())
@transforms.on_values
def selection_gates(
    q: Tensor,
    ck: Tensor,
    mem_k: Tensor | None,
    indices: Tensor,
    starts: Tensor | None,
    doc_first: Tensor | None,
    doc_last: Tensor | None,
    sinks: Tensor | None,
    start: int,
    num_ranked: int,
    num_selected: int,
    l: int,
    d: int,
    s: int,
    importance: str,
    interpolated: bool,
    num_initial: int,
    num_local: int,
    stride: int,
    shared: bool,
    causal: bool,
    scale: float,
    soft_cap: float | None,
) -> Tensor:
    """Straight-through gates of ranked blocks [B T R n]: 1 in value, and differentiable."""
    return q.new_ones(indices.shape, dtype=torch.float32)


@selection_gates.register_fake
def _(q, ck, mem_k, indices, *others):
    return q.new_empty(indices.shape, dtype=torch.float32)


@torch.library.custom_op("native_sparse_attention::selection_gates_backward", mutates_args=())
@on_its_device
def selection_gates_backward(
    d_gates: Tensor,
    q: Tensor,
    ck: Tensor,
    mem_k: Tensor | None,
    indices: Tensor,
    starts: Tensor | None,
    doc_first: Tensor | None,
    doc_last: Tensor | None,
    sinks: Tensor | None,
    start: int,
    num_ranked: int,
    num_selected: int,
    l: int,
    d: int,
    s: int,
    importance: str,
    interpolated: bool,
    num_initial: int,
    num_local: int,
    stride: int,
    shared: bool,
    causal: bool,
    scale: float,
    soft_cap: float | None,
) -> list[Tensor]:
    """dq, dck, and dmem_k where there is memory."""
    from ...kernels.topk import gates_bwd as gates
    from ...kernels.topk import gates_launch

    ranking = gates_launch.Ranking(
        start, num_ranked, num_selected, l, d, s, importance, interpolated, num_initial, num_local,
        stride, shared, causal, scale, starts, bounds(doc_first, doc_last), soft_cap, sinks,
    )  # fmt: skip
    dq, dck, d_mem, d_sinks = gates.backward(q, ck, mem_k, indices, d_gates, ranking)
    grads = [dq.to(q.dtype), dck.to(ck.dtype)]
    if mem_k is not None:
        grads.append(torch.zeros_like(mem_k) if d_mem is None else d_mem.to(mem_k.dtype))
    if sinks is not None:
        grads.append(torch.zeros_like(sinks) if d_sinks is None else d_sinks.to(sinks.dtype))
    return [g.contiguous() for g in grads]


@selection_gates_backward.register_fake
def _(d_gates, q, ck, mem_k, indices, starts, doc_first, doc_last, sinks, *others):
    return [t.new_empty(t.shape) for t in (q, ck, mem_k, sinks) if t is not None]


def gates_setup(ctx, inputs, output):
    ctx.numbers = inputs[8:]
    ctx.save_for_backward(*inputs[:8])


def gates_backward(ctx, d_gates):
    transforms.refuse_legacy_batched(d_gates)
    tensors = ctx.saved_tensors
    some = iter(selection_gates_backward(d_gates, *tensors, *ctx.numbers))
    dq, dck, d_mem = (None if t is None else next(some) for t in tensors[:3])
    d_sinks = None if tensors[7] is None else next(some)
    return (dq, dck, d_mem, None, None, None, None, d_sinks, *(None,) * 15)


selection_gates.register_autograd(gates_backward, setup_context=gates_setup)
transforms.refuse_vmap(ranked_blocks)
transforms.refuse_vmap(selection_gates)
transforms.refuse_second_derivatives(selection_gates_backward)


def select_blocks(
    q: Tensor,
    ck: Tensor,
    *,
    seq_len: int,
    mem_k: Tensor | None,
    compress_block_size: int,
    compress_block_sliding_stride: int,
    selection_block_size: int,
    num_selected_blocks: int,
    importance: str,
    interpolated_importance_score: bool,
    num_initial_blocks: int,
    num_local_blocks: int,
    selection_stride: int,
    query_heads_share_selected_kv: bool,
    causal: bool,
    q_offset: int | Tensor,
    leader_indices: Tensor | None = None,
    scale: float | None = None,
    return_gates: bool = False,
    lse: Tensor | None = None,
    documents: Documents | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `ranking.select_blocks`. `lse` is branch 1's, [B, T, H]: where it is at
    hand, the ranking by `"probs"` need not form it again."""
    d, s = compress_block_sliding_stride, selection_block_size
    num_ranked = blocks.num_complete_blocks(ck.shape[1] * d, d, s)
    if not causal:
        num_ranked = blocks.num_blocks(seq_len, s)
    if num_ranked == 0 or num_selected_blocks == 0:
        ranks = ck.shape[2] if query_heads_share_selected_kv else q.shape[2]
        shape = (*q.shape[:2], ranks, num_selected_blocks)
        indices = torch.full(shape, -1, dtype=torch.int32, device=q.device)
        return indices, q.new_ones(shape, dtype=torch.float32) if return_gates else None
    starts, start = (q_offset, 0) if isinstance(q_offset, Tensor) else (None, q_offset)
    numbers = (
        start,
        num_ranked,
        num_selected_blocks,
        compress_block_size,
        d,
        s,
        importance,
        interpolated_importance_score,
        num_initial_blocks,
        num_local_blocks,
        selection_stride,
        query_heads_share_selected_kv,
        causal,
        q.shape[-1] ** -0.5 if scale is None else scale,
        soft_cap,
    )
    if importance == "logits":
        sinks = None
    elif sinks is not None:
        sinks = sinks.to(torch.float32)
    indices = ranked_blocks(
        q.detach(),
        ck.detach(),
        None if mem_k is None else mem_k.detach(),
        None if lse is None else lse.detach().contiguous(),
        starts,
        *of_documents(documents),
        None if sinks is None else sinks.detach(),
        None if leader_indices is None else leader_indices.contiguous(),
        *numbers,
    )
    gates = None
    if return_gates:
        gates = selection_gates(
            q, ck, mem_k, indices, starts, *of_documents(documents), sinks, *numbers
        )
    return indices, gates
