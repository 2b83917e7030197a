"""The selection in Triton, as a torch operator. `library.py` says which calls it can run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import blocks


def on_its_device(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Run an operator with the GPU of its first tensor the current one: Triton launches there."""

    @functools.wraps(operator)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device_of(args[0]):
            return operator(*args, **kwargs)

    return run


def in_its_sizes(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Run an operator with tiles of the sizes that are its last argument (`BlockSizes`)."""

    @functools.wraps(operator)
    def run(*args: Any) -> Any:
        from ..kernels import sizes

        with sizes.sized(args[-1]):
            return operator(*args)

    return run


@torch.library.custom_op("native_sparse_attention::select_blocks", mutates_args=())
@on_its_device
def ranked_blocks(
    q: Tensor,
    ck: Tensor,
    mem_k: Tensor | None,
    lse: Tensor | None,
    starts: Tensor | None,
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
) -> Tensor:
    """Block indices [B T R n] of the n best of the first `num_ranked` blocks, int32."""
    from ..kernels import scoring

    return scoring.select_blocks(
        q, ck, mem_k, lse, starts, leader_indices, start, num_ranked, num_selected, l, d, s,
        importance, interpolated, num_initial, num_local, stride, shared, causal, scale,
    )  # fmt: skip


@ranked_blocks.register_fake
def _(q, ck, mem_k, lse, starts, leader_indices, start, num_ranked, num_selected, l, d, s,
      importance, interpolated, num_initial, num_local, stride, shared, causal,
      scale):  # fmt: skip
    ranks = ck.shape[2] if shared else q.shape[2]
    return q.new_empty(*q.shape[:2], ranks, num_selected, dtype=torch.int32)


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
) -> tuple[Tensor, None]:
    """As `ranking.select_blocks`, without gates. `lse` is branch 1's, [B, T, H]: where it is at
    hand, the ranking by `"probs"` need not form it again."""
    d, s = compress_block_sliding_stride, selection_block_size
    num_ranked = blocks.num_complete_blocks(ck.shape[1] * d, d, s)
    if not causal:
        num_ranked = blocks.num_blocks(seq_len, s)
    if num_ranked == 0 or num_selected_blocks == 0:
        ranks = ck.shape[2] if query_heads_share_selected_kv else q.shape[2]
        shape = (*q.shape[:2], ranks, num_selected_blocks)
        return torch.full(shape, -1, dtype=torch.int32, device=q.device), None
    starts, start = (q_offset, 0) if isinstance(q_offset, Tensor) else (None, q_offset)
    indices = ranked_blocks(
        q.detach(),
        ck.detach(),
        None if mem_k is None else mem_k.detach(),
        None if lse is None else lse.detach().contiguous(),
        starts,
        None if leader_indices is None else leader_indices.contiguous(),
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
    )
    return indices, None
