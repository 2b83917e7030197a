"""The public operations: check the call, choose a backend, run it.

All tensors have layout [B, T, H, D]. Symbols as in the paper (arXiv 2502.11089) and
`docs/semantics.md`:

    B batch        T query tokens    S key tokens, T <= S    H query heads    K KV heads
    G = H / K      D key width       E value width           W windows        m memory slots
    n selected blocks

Query t has absolute position `q_offset + t`. By default the queries are the last T of the S tokens.
Causal calls also take a tensor `q_offset` [B], one offset per sequence. Then no query sees a key
past the last query of its sequence.

`backend` is "triton", "flex", "eager", a tuple of these, or "auto". The first backend of a tuple
that supports the call runs it. "auto" is all three in this order on CUDA, else eager.

`block_sizes` replace the tile configs of the Triton kernels; other backends ignore them.

With a `soft_cap` c, logits x become `c tanh(x / c)`, before gates and masks. `sinks` [H] are logits
of one more key per query head. Every query sees this key, and its value is 0. The softmax and the
log-sum-exp include it.

Log-sum-exps are natural, float32 (float64 for float64 inputs). A query that sees no key has output
0, log-sum-exp -inf (or its sink) and no gradient. All backends are deterministic except flex's
backward on CUDA.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..block_sizes import BlockSizes, check_block_sizes
from ..checks import (
    FLOAT_DTYPES,
    INDEX_DTYPES,
    check_bool,
    check_documents,
    check_first_group,
    check_forced_blocks,
    check_groups,
    check_int,
    check_leaders,
    check_memory,
    check_offset,
    check_positive,
    check_same,
    check_scale,
    check_selection,
    check_shapes,
    check_tensor,
    check_windows,
    default_seq_len,
)
from ..config import AttentionConfig
from ..varlen import Documents
from . import dispatch
from .call import Call
from .chunked import selection_gates
from .packed import takes_documents


def checked(
    call: Call,
    dims: dict[str, int],
    S: int,
    settings: dict[str, Any],
    *,
    causal: Any,
    q_offset: Any,
    scale: Any,
    soft_cap: Any,
    sinks: Any,
    documents: Any,
    block_sizes: Any = None,
) -> tuple[Call, AttentionConfig]:
    """The call of a branch of these settings, and its config, with the arguments that all
    operations take, checked. Its sequence has S tokens, and as many keys as the axis W or S has."""
    device, causal = call.q.device, check_bool("causal", causal)
    check_groups(dims["H"], dims["K"], (dims["T"], dims.get("W", S)))
    q_offset = check_offset(q_offset, dims, S, causal, device)
    check_documents(documents, dims, q_offset, device)
    check_tensor("sinks", sinks, FLOAT_DTYPES, device, (dims["H"],))
    check_block_sizes(block_sizes)
    config = AttentionConfig.unchecked(
        **settings, causal=causal, scale=check_scale(scale), block_sizes=block_sizes,
        soft_cap=check_positive("soft_cap", soft_cap),
    )  # fmt: skip
    sinks = None if sinks is None else sinks[None]
    return call.but(q_offset=q_offset, sinks=sinks, documents=documents), config


def attend(
    op: str, call: Call, config: AttentionConfig, backend: dispatch.Backend, return_lse: Any
) -> Any:
    """Choose a backend for the attention of a branch, and run it."""
    return_lse = check_bool("return_lse", return_lse)
    name = dispatch.choose(backend, op, call, config)
    return dispatch.attend_branch(name, call, config, return_lse)


@takes_documents
def compressed_attention(
    q: Tensor,
    ck: Tensor,
    cv: Tensor,
    *,
    compress_block_sliding_stride: int,
    mem_k: Tensor | None = None,
    mem_v: Tensor | None = None,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    seq_len: int | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    block_sizes: BlockSizes | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    documents: Documents | None = None,
    backend: str | tuple[str, ...] = "auto",
) -> Any:
    """Branch 1: softmax attention over learned memory and the windows before a query.

    `out_i = softmax_w(q_i . ck_w * scale) cv_w`, over all m memory slots and, causally, the windows
    w with `(w + 1) d - 1 < i` (strictly before i); otherwise all windows (Eq. 7).

    Args:
        q: queries without rotary embedding, [B, T, H, D].
        ck, cv: compressed keys and values, [B, W, K, D] and [B, W, K, E].
        compress_block_sliding_stride: d, tokens from the end of one window to the end of the next.
        mem_k, mem_v: memory that every query sees, [K, m, D] and [K, m, E]; None for m = 0.
        seq_len: S, for the default `q_offset = S - T`; T by default.
        scale: multiplies the dot products; `D ** -0.5` by default.

    Returns:
        [B, T, H, E], and with `return_lse` also [B, T, H].

    Raises:
        ValueError: shapes, dtypes or devices do not match.
        NotImplementedError: no given backend supports the call.
    """
    common = dict(
        causal=causal, q_offset=q_offset, scale=scale, soft_cap=soft_cap, sinks=sinks,
        documents=documents, block_sizes=block_sizes,
    )  # fmt: skip
    dims = check_shapes(
        q=(q, "B T H D"),
        ck=(ck, "B W K D"),
        cv=(cv, "B W K E"),
        mem_k=(mem_k, "K m D"),
        mem_v=(mem_v, "K m E"),
    )
    check_same(q=q, ck=ck, cv=cv, mem_k=mem_k, mem_v=mem_v)
    check_memory(mem_k, mem_v)
    d = check_int("compress_block_sliding_stride", compress_block_sliding_stride, 1)
    S = default_seq_len(seq_len, dims["T"], q_offset)
    if causal:
        check_windows(dims["W"], S, d, causal=True, q_offset=q_offset)
    settings = dict(branches=("compressed",), compress_block_sliding_stride=d)
    call = Call(q, ck, cv, mem_k=mem_k, mem_v=mem_v)
    call, config = checked(call, dims, S, settings, **common)
    return attend("compressed_attention", call, config, backend, return_lse)


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
    common = dict(
        causal=causal, q_offset=q_offset, scale=scale, soft_cap=soft_cap, sinks=sinks,
        documents=documents,
    )  # fmt: skip
    dims = check_shapes(q=(q, "B T H D"), ck=(ck, "B W K D"), mem_k=(mem_k, "K m D"))
    check_same(q=q, ck=ck, mem_k=mem_k)
    return_gates = check_bool("return_gates", return_gates)
    settings = check_selection(
        compress_block_size=compress_block_size,
        compress_block_sliding_stride=compress_block_sliding_stride,
        selection_block_size=selection_block_size, num_selected_blocks=num_selected_blocks,
        importance=importance, interpolated_importance_score=interpolated_importance_score,
        num_initial_blocks=num_initial_blocks, num_local_blocks=num_local_blocks,
        selection_stride=selection_stride,
        query_heads_share_selected_kv=query_heads_share_selected_kv,
    )  # fmt: skip
    S = default_seq_len(seq_len, dims["T"], q_offset)
    d = settings["compress_block_sliding_stride"]
    check_windows(dims["W"], S, d, causal=causal, q_offset=q_offset)
    call = Call(q, ck=ck, mem_k=mem_k, leader_indices=leader_indices, seq_len=S)
    call, config = checked(call, dims, S, settings, **common)
    shared = config.query_heads_share_selected_kv
    check_leaders(leader_indices, dims, config.num_selected_blocks, shared, q.device)
    check_first_group(call.q_offset, config.selection_stride, leader_indices)
    # flex_attention cannot rank
    name = dispatch.choose("eager" if backend == "flex" else backend, "select_blocks", call, config)
    indices = dispatch.select_blocks(name, call, config)
    return (indices, selection_gates(call, config, indices)) if return_gates else indices


@takes_documents
def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    *,
    selection_block_size: int,
    gates: Tensor | None = None,
    num_initial_blocks: int = 0,
    num_local_blocks: int = 1,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    block_sizes: BlockSizes | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    documents: Documents | None = None,
    backend: str | tuple[str, ...] = "auto",
) -> Any:
    """Branch 2: softmax attention over the tokens of each query's forced and selected blocks.

    `out_i = softmax_j(g_ij q_i . k_j * scale) v_j`, over the tokens j of the blocks in
    `block_indices`, of the first `num_initial_blocks` blocks and, causally, of the
    `num_local_blocks` blocks that end with the query's own. Causally only j <= i. g_ij is the gate
    of a selected block, and 1 for a forced block, even if it is in `block_indices`.

    Args:
        q, k, v: [B, T, H, D], [B, S, K, D] and [B, S, K, E].
        block_indices: [B, T, K, n] shared by a head group, or [B, T, H, n]; int32 or int64, each
            block once, -1 for an empty slot. The caller must keep out indices of no block: to check
            them would wait for the GPU.
        gates: same shape as `block_indices`, for differentiable top-k.

    Returns:
        [B, T, H, E], and with `return_lse` also [B, T, H].

    Raises:
        ValueError: shapes, dtypes or devices do not match.
        NotImplementedError: no given backend supports the call.
    """
    common = dict(
        causal=causal, q_offset=q_offset, scale=scale, soft_cap=soft_cap, sinks=sinks,
        documents=documents, block_sizes=block_sizes,
    )  # fmt: skip
    dims = check_shapes(
        q=(q, "B T H D"),
        k=(k, "B S K D"),
        v=(v, "B S K E"),
        block_indices=(block_indices, "B T R n"),
        gates=(gates, "B T R n"),
    )
    check_same(q=q, k=k, v=v)
    if dims["R"] not in (dims["K"], dims["H"]):
        raise ValueError(
            f"block_indices must have K={dims['K']} or H={dims['H']} heads, got {dims['R']}"
        )
    check_tensor("block_indices", block_indices, INDEX_DTYPES, q.device)
    check_tensor("gates", gates, FLOAT_DTYPES, q.device)
    s = check_int("selection_block_size", selection_block_size, 1)
    initial, local = check_forced_blocks(s, num_initial_blocks, num_local_blocks)
    settings = dict(
        branches=("selected",), selection_block_size=s, num_selected_blocks=0,
        num_initial_blocks=initial, num_local_blocks=local,
    )  # fmt: skip
    call = Call(q, k, v, block_indices=block_indices, gates=gates)
    call, config = checked(call, dims, dims["S"], settings, **common)
    return attend("selected_attention", call, config, backend, return_lse)


@takes_documents
def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sliding_window_size: int,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    block_sizes: BlockSizes | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    documents: Documents | None = None,
    backend: str | tuple[str, ...] = "auto",
) -> Any:
    """Branch 3: softmax attention over the w + 1 keys `i - w .. i`, or `i - w .. i + w` if not
    causal.

    Args:
        q, k, v: [B, T, H, D], [B, S, K, D] and [B, S, K, E].
        sliding_window_size: w, in tokens; 0 leaves only the query's own key.

    Returns:
        [B, T, H, E], and with `return_lse` also [B, T, H].

    Raises:
        ValueError: shapes, dtypes or devices do not match.
        NotImplementedError: no given backend supports the call.
    """
    common = dict(
        causal=causal, q_offset=q_offset, scale=scale, soft_cap=soft_cap, sinks=sinks,
        documents=documents, block_sizes=block_sizes,
    )  # fmt: skip
    dims = check_shapes(q=(q, "B T H D"), k=(k, "B S K D"), v=(v, "B S K E"))
    check_same(q=q, k=k, v=v)
    w = check_int("sliding_window_size", sliding_window_size, 0)
    settings = dict(branches=("window",), sliding_window_size=w)
    call, config = checked(Call(q, k, v), dims, dims["S"], settings, **common)
    return attend("sliding_window_attention", call, config, backend, return_lse)
