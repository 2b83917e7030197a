"""The public operation of the selection. `functional.py` defines its layouts and symbols."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..checks.tensors import (
    check_bools,
    check_documents,
    check_first_group,
    check_groups,
    check_leaders,
    check_offset,
    check_positive,
    check_same,
    check_scale,
    check_selection,
    check_shapes,
    check_sinks,
    check_windows,
    default_seq_len,
)
from ..varlen import Documents
from . import dispatch
from .packed import takes_documents


@takes_documents
def select_blocks(
    q: Tensor,
    ck: Tensor,
    *,
    compress_block_size: int,
    compress_block_sliding_stride: int,
    selection_block_size: int,
    num_selected_blocks: int,
    mem_k: Tensor | None = None,
    importance: str = "logits",
    interpolated_importance_score: bool = False,
    num_initial_blocks: int = 0,
    num_local_blocks: int = 1,
    selection_stride: int = 1,
    query_heads_share_selected_kv: bool = True,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    seq_len: int | None = None,
    leader_indices: Tensor | None = None,
    scale: float | None = None,
    return_gates: bool = False,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    documents: Documents | None = None,
    backend: str | tuple[str, ...] = "auto",
) -> Any:
    """Top-n selection blocks of every query (Eq. 8-12).

    `importance` defines the score of a block:

    * `"logits"`: the mean over the group's heads and the block's windows of `q_i . ck_w * scale`;
    * `"probs"`: `sum_w overlap(w, c) / d * p_w`, with p the softmax of branch 1, summed over the
      group's heads.

    Causal candidates are the blocks strictly before the query's own block, if the query sees all
    their windows. Otherwise all blocks are candidates. The `num_initial_blocks` first blocks and,
    causally, the `num_local_blocks` that end with the query's own are forced: no candidates, but
    `selected_attention` always reads them. The earlier block wins a tie. Scores are float32 or
    better.

    Args:
        q: queries without rotary embedding, [B, T, H, D].
        ck: compressed keys, [B, W, K, D].
        mem_k: memory keys [K, m, D]; the softmax of `"probs"` includes them.
        interpolated_importance_score: interpolate window scores linearly to tokens before averaging
            (logits only).
        selection_stride: R; tokens `[R t, R t + R)` share the ranking of token `R t`.
        query_heads_share_selected_kv: False ranks for every query head on its own.
        seq_len: S; T by default.
        leader_indices: block indices [B, R_, n] of the first token of the first query's group.
            Required if `q_offset` is not a multiple of `selection_stride`. A tensor `q_offset` is
            not checked, since that would wait for the GPU; without leader indices the first tokens
            of such a sequence select nothing.
        soft_cap, sinks: as in branch 1, for `"probs"`; `"logits"` ignores them.
        return_gates: also return the gates of differentiable top-k.

    Returns:
        Block indices [B, T, K, n] (H in place of K if heads do not share), int32, best first, -1
        for an empty slot. With `return_gates` also gates of that shape with value 1. Their gradient
        is that of the softmax of the scores over the candidates and one logit of -1e3 (`"logits"`),
        or of the score itself (`"probs"`).

    Raises:
        ValueError: shapes or settings do not match.
        NotImplementedError: no given backend supports the call.
    """
    dims = check_shapes(q=(q, "B T H D"), ck=(ck, "B W K D"), mem_k=(mem_k, "K m D"))
    check_same(q=q, ck=ck, mem_k=mem_k)
    causal, return_gates = check_bools(causal=causal, return_gates=return_gates)
    check_groups(dims["H"], dims["K"], (dims["T"], dims["W"]))
    settings = check_selection(
        compress_block_size=compress_block_size,
        compress_block_sliding_stride=compress_block_sliding_stride,
        selection_block_size=selection_block_size,
        num_selected_blocks=num_selected_blocks,
        importance=importance,
        interpolated_importance_score=interpolated_importance_score,
        num_initial_blocks=num_initial_blocks,
        num_local_blocks=num_local_blocks,
        selection_stride=selection_stride,
        query_heads_share_selected_kv=query_heads_share_selected_kv,
    )
    d, n, stride, shared = (
        settings[name]
        for name in (
            "compress_block_sliding_stride", "num_selected_blocks", "selection_stride",
            "query_heads_share_selected_kv",
        )
    )  # fmt: skip
    seq_len = default_seq_len(seq_len, dims["T"], q_offset)
    check_windows(dims["W"], seq_len, d, causal=causal, q_offset=q_offset)
    offset = check_offset(q_offset, dims, seq_len, causal, q)
    check_documents(documents, dims, offset, q)
    soft_cap = check_positive("soft_cap", soft_cap)
    scale = check_scale(scale)
    check_sinks(sinks, (dims["H"],), q.device)
    check_leaders(leader_indices, dims, n, shared, q)
    check_first_group(offset, stride, leader_indices)
    indices, gates = dispatch.run(
        scoring_backend(backend, q, ck, offset, n),
        "select_blocks",
        q,
        ck,
        seq_len=seq_len,
        mem_k=mem_k,
        **settings,
        causal=causal,
        q_offset=offset,
        leader_indices=leader_indices,
        scale=scale,
        return_gates=return_gates,
        soft_cap=soft_cap,
        sinks=sinks,
        documents=documents,
    )
    return (indices, gates) if return_gates else indices


def scoring_backend(
    backend: str | tuple[str, ...], q: Tensor, ck: Tensor, q_offset: int | Tensor, n: int
) -> str:
    """The backend that ranks blocks: eager PyTorch for "flex", which cannot rank."""
    if isinstance(backend, str) and backend == "flex":
        backend = "eager"
    return dispatch.choose(
        backend, "select_blocks", q, ck, q_offset=q_offset, num_selected_blocks=n
    )
