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

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..block_sizes import BlockSizes
from ..checks import (
    BRANCHES,
    FLOAT_DTYPES,
    INDEX_DTYPES,
    check_block_mask,
    check_bool,
    check_callable,
    check_documents,
    check_given,
    check_groups,
    check_int,
    check_offset,
    check_same,
    check_shapes,
    check_tensor,
    check_windows,
    describe,
)
from ..config import AttentionConfig
from ..varlen import Documents
from . import branches as branches_of
from . import dispatch
from .call import Call
from .chunked import selection_gates
from .packed import takes_documents

AXES = dict(
    q="B T H D", cq="B T H D", k="B S K D", v="B S K E", ck="B W K D", cv="B W K E", mem_k="K m D",
    mem_v="K m E", window_k="B S K D", window_v="B S K E", block_indices="B T R n", gates="B T R n",
)  # fmt: skip
# tensors of a dtype of their own
DTYPES = dict(
    block_indices=INDEX_DTYPES, gates=FLOAT_DTYPES, lengths=INDEX_DTYPES, counts=INDEX_DTYPES,
    page_table=INDEX_DTYPES,
)  # fmt: skip
# what only one branch of a layer reads
READ_BY = dict(
    cv="compressed", mem_k="compressed", mem_v="compressed", window_k="window", window_v="window",
    sliding_window_flex_mask="window", fine_selection_flex_mask="selected",
)  # fmt: skip


def check_read(call: Call, config: AttentionConfig) -> None:
    """Check that the branches of a layer have what they read, and that nothing else is given."""
    branches = config.branches
    is_read = {name: branch in branches for name, branch in READ_BY.items()}
    is_read |= dict(ck=config.compresses, cq=config.compresses, branch_gates=len(branches) > 1)
    if config.num_selected_groups and config.ranks and call.cq is not None:
        raise ValueError("cq must be None with num_selected_groups: q ranks windows and tokens")
    is_read |= dict(block_indices=config.takes_blocks, leader_indices=config.ranks)
    for name in is_read:
        value = getattr(call, name)
        if value is not None and not is_read[name]:
            settings = f"branches={branches}" + ", block_indices" * config.takes_blocks
            raise ValueError(f"{name} must be None with {settings}, which do not read it")
        if is_read[name] and name in ("ck", "cv", "branch_gates", "block_indices"):
            check_given(**{name: value})


def check_masks(window: Any, fine: Any) -> None:
    """Check flex masks of the window and of the selected branch."""
    if window is not None:
        check_block_mask("sliding_window_flex_mask", window, "create_sliding_mask")
    signature = "(block_indices, num_grouped_queries), as create_fine_mask makes it,"
    check_callable("fine_selection_flex_mask", fine, signature)


def axes_of(call: Call, config: AttentionConfig) -> dict[str, str]:
    """The axes of a call's tensors. What only ranks, cq and ck without the compressed branch, may
    have a width of its own, and a query for each KV head that shares rankings."""
    if call.cq is None or "compressed" in config.branches:
        return AXES
    axis = "R" if config.query_heads_share_selected_kv else "H"
    return AXES | dict(cq=f"B T {axis} I", ck="B W K I")


def check_tensors(
    call: Call, config: AttentionConfig, axes: dict[str, str], is_layer: bool = True
) -> dict[str, int]:
    """Check that the tensors of a call have these axes, and match one another.
    Sinks are [branches, H] in a layer, else [H]. Returns the sizes of the axes."""
    number, device = len(config.branches), call.q.device
    tensors = {name: t for name in axes if (t := getattr(call, name)) is not None}
    dims = check_shapes(**{name: (t, axes[name]) for name, t in tensors.items()})
    H, K, R = dims["H"], dims["K"], dims.get("R")
    if R not in (None, K, H) and not (R == 1 and is_layer and "block_indices" in tensors):
        name = "block_indices" if "block_indices" in tensors else "cq"
        raise ValueError(f"{name} must have K={K} or H={H} heads, got {R}")
    check_same(**{name: t for name, t in tensors.items() if name not in DTYPES})
    for name in tensors:
        if name in DTYPES:
            check_tensor(name, tensors[name], DTYPES[name], device)
    shape = dims["B"], dims["T"], H, number
    check_tensor("branch_gates", call.branch_gates, FLOAT_DTYPES, device, shape)
    check_tensor("sinks", call.sinks, FLOAT_DTYPES, device, (number, H) if is_layer else (H,))
    check_groups(H, K, (dims["T"], dims.get("S", dims.get("W", 0))))
    if call.cv is not None and (call.mem_k is None) != (call.mem_v is None):
        raise ValueError("mem_k and mem_v go together: give both or none")
    return dims


def checked(call: Call, config: AttentionConfig, is_layer: bool = True) -> Call:
    """Check the call of a layer, or of an operation of one branch. Its offset becomes a number, or
    a tensor with one offset per sequence."""
    device, causal = call.q.device, config.causal
    if is_layer:
        check_read(call, config)
        check_masks(call.sliding_window_flex_mask, call.fine_selection_flex_mask)
    dims = check_tensors(call, config, axes_of(call, config), is_layer)
    S: Any = dims.get("S")
    if S is not None and call.ck is not None:
        check_windows(dims["W"], S, config.d, causal=causal)
    elif S is None:
        S = dims["T"]  # without an offset the queries end the sequence
        if call.seq_len is not None:
            S = check_int("seq_len", call.seq_len, 0)
        elif call.q_offset is not None and not isinstance(call.q_offset, Tensor):
            S += check_int("q_offset", call.q_offset, 0)
        if causal or config.ranks:
            check_windows(dims["W"], S, config.d, causal=causal, q_offset=call.q_offset)
    offset = check_offset(call.q_offset, dims, S, causal, device)
    check_documents(call.documents, (dims["B"], dims["T"]), offset, device)
    heads = dims["K" if config.query_heads_share_selected_kv else "H"]
    shape, stride = (dims["B"], heads, config.leader_slots), config.leader_stride
    check_tensor("leader_indices", call.leader_indices, (torch.int32,), device, shape)
    is_split = config.ranks and isinstance(offset, int) and offset % stride != 0
    if is_split and call.leader_indices is None:
        raise ValueError(
            f"leader_indices must be given where q_offset={offset} is not a multiple of the "
            f"{stride} tokens that share a ranking: that of the first query was made before"
        )
    if call.has_masks():
        others = dict(documents=call.documents, sinks=call.sinks, soft_cap=config.soft_cap)
        for name, value in others.items():
            if value is not None:
                raise ValueError(
                    "sliding_window_flex_mask and fine_selection_flex_mask must be None with "
                    f"{name}, which they know nothing of"
                )
    sinks = call.sinks if is_layer or call.sinks is None else call.sinks[None]
    return expand_heads(call.but(q_offset=offset, sinks=sinks, seq_len=S))


def expand_heads(call: Call) -> Call:
    """The call with block indices of one head for each KV head."""
    if call.block_indices is None or call.block_indices.shape[2] != 1 or call.k is None:
        return call
    return call.but(block_indices=call.block_indices.expand(-1, -1, call.k.shape[2], -1))


def attend(op: str, call: Call, config: AttentionConfig, backend: Any, return_lse: Any) -> Any:
    """Check the call of an operation of one branch, choose a backend and run it."""
    return_lse = check_bool("return_lse", return_lse)
    call = checked(call, config, is_layer=False)
    if op == "compressed_attention":
        call = call.branch("compressed", config.branches)
    name = dispatch.choose(backend, op, call, config)
    return dispatch.MODULES[name].attend_branch(call, config, return_lse)


@takes_documents
def native_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ck: Tensor | None = None,
    cv: Tensor | None = None,
    branch_gates: Tensor | None = None,
    *,
    compress_block_size: int,
    compress_block_sliding_stride: int,
    selection_block_size: int,
    num_selected_blocks: int,
    sliding_window_size: int,
    cq: Tensor | None = None,
    mem_k: Tensor | None = None,
    mem_v: Tensor | None = None,
    window_k: Tensor | None = None,
    window_v: Tensor | None = None,
    importance: str = "logits",
    interpolated_importance_score: bool = False,
    num_initial_blocks: int = 0,
    num_local_blocks: int = 1,
    selection_stride: int = 1,
    num_selected_groups: int = 0,
    ranking_bits: int = 16,
    query_heads_share_selected_kv: bool = True,
    branches: tuple[str, ...] = BRANCHES,
    dense_length: int = 0,
    use_diff_topk: bool = False,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    block_indices: Tensor | None = None,
    leader_indices: Tensor | None = None,
    scale: float | None = None,
    return_block_indices: bool = False,
    recompute: bool = False,
    block_sizes: BlockSizes | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    documents: Documents | None = None,
    sliding_window_flex_mask: Any = None,
    fine_selection_flex_mask: Callable[..., Any] | None = None,
    backend: str | tuple[str, ...] = "auto",
) -> Any:
    """The whole layer between projection and output: selection, three branches and their gates
    (Eq. 5).

    `out = g_cmp compressed(cq, ck, cv) + g_sel selected(q, k, v) + g_win window(q, k, v)`.

    Args:
        q, k, v: [B, T, H, D], [B, S, K, D] and [B, S, K, E], with rotary embedding applied.
        ck, cv: compressed keys and values, [B, W, K, D] and [B, W, K, E]. Without the compressed
            branch, cv is None, and ck only ranks blocks.
        branch_gates: [B, T, H, branches], in the order compressed, selected, window; None for one
            branch, which has no gate.
        branches: some of the three; tensors of the others must be None. `("selected",)` is one
            softmax over the initial, local and ranked blocks.
        dense_length: with `("selected",)` queries at positions below it attend to all keys that
            they may see; not causal: in sequences of at most this length.
        cq: queries of branch 1 and of the ranking, without rotary embedding; q by default. Without
            the compressed branch cq and ck may have another width, and cq one query for each KV
            head, [B, T, K, I], if the query heads share rankings.
        window_k, window_v: keys and values of branch 3; k and v by default.
        use_diff_topk: let gradients reach the scores through straight-through gates.
        block_indices: blocks that queries select, in place of a ranking: [B, T, K, n], [B, T, H, n]
            or [B, T, 1, n] for all heads, as `selected_attention` takes them; equal within groups
            of `selection_stride` tokens. Then `num_selected_blocks` and the settings of the
            ranking have no effect, and ck and cq are of the compressed branch alone.
        return_block_indices: also return the selected block indices, [B, T, K or H, n]; -1 for
            calls that `dense_length` makes dense. Given back as `block_indices` with the same
            settings, they give the same bits.
        recompute: do not save branch outputs; the backward computes them again (Triton only; other
            backends save the tensors that autograd saves).
        block_sizes: replace the tile configs of the Triton kernels; other backends have none.
        sliding_window_flex_mask, fine_selection_flex_mask: masks of
            `native_sparse_attention.masks`. flex_attention then computes the branch under that
            mask.
        soft_cap: c; logits x of all branches become `c tanh(x / c)`.
        sinks: [branches, H], for each branch and query head the logit of one more key with value 0.

    The remaining arguments are those of `compressed_attention`, `select_blocks`,
    `selected_attention` and `sliding_window_attention`. With `backend="flex"` the branches run in
    flex_attention and the ranking runs in eager PyTorch.

    Returns:
        [B, T, H, E], and with `return_block_indices` also the block indices.
    """
    return_block_indices = check_bool("return_block_indices", return_block_indices)
    if block_indices is not None:
        importance, num_selected_groups, ranking_bits = "given", 0, 16
        interpolated_importance_score = False
    config = AttentionConfig(
        compress_block_size=compress_block_size,
        compress_block_sliding_stride=compress_block_sliding_stride,
        selection_block_size=selection_block_size, num_selected_blocks=num_selected_blocks,
        sliding_window_size=sliding_window_size, importance=importance,
        interpolated_importance_score=interpolated_importance_score,
        num_initial_blocks=num_initial_blocks, num_local_blocks=num_local_blocks,
        selection_stride=selection_stride, num_selected_groups=num_selected_groups,
        ranking_bits=ranking_bits,
        query_heads_share_selected_kv=query_heads_share_selected_kv, branches=branches,
        dense_length=dense_length, scale=scale, soft_cap=soft_cap, causal=causal,
        use_diff_topk=use_diff_topk, recompute=recompute, block_sizes=block_sizes,
    )  # fmt: skip
    call = Call(
        q, k, v, ck, cv, branch_gates, cq, mem_k, mem_v, window_k, window_v, sinks,
        block_indices=block_indices, leader_indices=leader_indices, documents=documents,
        q_offset=q_offset,
        sliding_window_flex_mask=sliding_window_flex_mask,
        fine_selection_flex_mask=fine_selection_flex_mask,
    )  # fmt: skip
    call = checked(call, config)
    name = dispatch.choose(backend, "native_sparse_attention", call, config)
    out, block_indices = branches_of.attend(call, config, name, keep_slots=return_block_indices)
    return (out, block_indices) if return_block_indices else out


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
    """
    d = compress_block_sliding_stride
    config = AttentionConfig(
        compress_block_sliding_stride=d, compress_block_size=d, selection_block_size=1,
        branches=("compressed",), causal=causal, scale=scale, soft_cap=soft_cap,
        block_sizes=block_sizes,
    )  # fmt: skip
    call = Call(
        q, ck=ck, cv=cv, mem_k=mem_k, mem_v=mem_v, sinks=sinks, documents=documents,
        q_offset=q_offset, seq_len=seq_len,
    )  # fmt: skip
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
    k: Tensor | None = None,
    mem_k: Tensor | None = None,
    importance: str = "logits",
    interpolated_importance_score: bool = False,
    num_initial_blocks: int = 0,
    num_local_blocks: int = 1,
    selection_stride: int = 1,
    num_selected_groups: int = 0,
    ranking_bits: int = 16,
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
    * `"max"`: the largest over the block's windows of the mean over the group's heads;
    * `"head_max"`: the largest over both;
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
        num_selected_groups: n1; ranks in two stages. The best n1 groups of 4 blocks by `importance`
            ("logits", "max" or "head_max") of their windows are kept, the same for the tokens
            `[4 s t, 4 s t + 4 s)`, by the first of them. A block of these groups scores the
            largest of `q_i . k_j * scale` over its tokens, with the mean query of the heads that
            share the ranking, or by "head_max" with each of them. 0 for one stage.
        ranking_bits: 8 rounds the heads' sum of queries, or by "head_max" all queries of a group,
            and the keys of a block to 8-bit integers, each to its own scale (causal).
        k: keys of tokens [B, S, K, D], for the second stage alone; S is their number.
        query_heads_share_selected_kv: False ranks for every query head on its own.
        seq_len: S; T by default.
        leader_indices: block indices [B, R_, n] of the first token of the first query's group, in
            two stages its groups of blocks [B, R_, n1]. Required if `q_offset` is not a multiple of
            the tokens that share a ranking. A tensor `q_offset` is not checked, since that would
            wait for the GPU; without leader indices the first tokens of such a sequence select
            nothing.
        soft_cap, sinks: as in branch 1, for `"probs"`; other scores ignore them.
        return_gates: also return the gates of differentiable top-k.

    Returns:
        Block indices [B, T, K, n] (H in place of K if heads do not share), int32, best first, -1
        for an empty slot. With `return_gates` also gates of that shape with value 1. Their gradient
        is that of the softmax of the scores over the candidates and one logit of -1e3, or with
        `"probs"` of the score itself.
    """
    return_gates = check_bool("return_gates", return_gates)
    config = AttentionConfig(
        compress_block_size=compress_block_size,
        compress_block_sliding_stride=compress_block_sliding_stride,
        selection_block_size=selection_block_size, num_selected_blocks=num_selected_blocks,
        importance=importance, interpolated_importance_score=interpolated_importance_score,
        num_initial_blocks=num_initial_blocks, num_local_blocks=num_local_blocks,
        selection_stride=selection_stride, num_selected_groups=num_selected_groups,
        ranking_bits=ranking_bits,
        query_heads_share_selected_kv=query_heads_share_selected_kv, causal=causal, scale=scale,
        soft_cap=soft_cap, branches=("selected",),
    )  # fmt: skip
    if (k is None) != (config.num_selected_groups == 0):
        raise ValueError(
            "k and num_selected_groups go together, got "
            f"k={describe(k)} and num_selected_groups={config.num_selected_groups}"
        )
    call = Call(
        q, k, ck=ck, mem_k=mem_k, sinks=sinks, leader_indices=leader_indices, documents=documents,
        q_offset=q_offset, seq_len=seq_len,
    )  # fmt: skip
    call = checked(call, config, is_layer=False)
    if isinstance(backend, str) and backend == "flex":  # it cannot rank
        backend = "eager"
    name = dispatch.choose(backend, "select_blocks", call, config)
    indices = dispatch.MODULES[name].select_blocks(call, config)
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
    """
    config = AttentionConfig(
        compress_block_size=1, compress_block_sliding_stride=1,
        selection_block_size=selection_block_size, num_selected_blocks=0,
        num_initial_blocks=num_initial_blocks, num_local_blocks=num_local_blocks,
        branches=("selected",), causal=causal, scale=scale, soft_cap=soft_cap,
        block_sizes=block_sizes,
    )  # fmt: skip
    call = Call(
        q, k, v, sinks=sinks, gates=gates, block_indices=block_indices, documents=documents,
        q_offset=q_offset,
    )  # fmt: skip
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
    """
    config = AttentionConfig(
        sliding_window_size=sliding_window_size, branches=("window",), causal=causal, scale=scale,
        soft_cap=soft_cap, block_sizes=block_sizes,
    )  # fmt: skip
    call = Call(q, k, v, sinks=sinks, documents=documents, q_offset=q_offset)
    return attend("sliding_window_attention", call, config, backend, return_lse)
