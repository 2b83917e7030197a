"""Ranking of blocks: scores are computed tile by tile and folded into a running top n on chip.

A tile ranks the leaders of groups of STRIDE tokens (every token where STRIDE = 1). Every token of a
group gets the block indices of its leader. `ops/reference.py` is the specification.

Kernels omit a positive factor of all scores of a query: it does not change the ranking.
"""

import torch
import triton
import triton.language as tl

from ..common import launch
from ..common import tile_configs as tiles
from ..common.counts import cdiv, next_power_of_2
from ..common.primitives import (
    candidates_end,
    candidates_in_document,
    grid_position,
    in_document,
    leaders,
    load_rows,
    visible_windows,
)
from . import launch_sm90 as topk_sm90
from .block_keys import block_keys, first_window, two_halves
from .largest import best_by_max, window_keys
from .softmax_mass import best_by_probs, log_sum_exp
from .topn import NO_BLOCK, NO_SCORE, chunk_blocks, finish, fold, start

# one compiled kernel for all lengths and positions
LENGTHS = ["T", "C", "W", "first_token"]


# steps


@triton.jit
def dot_of_halves(q_high, q_low, k_high, k_low, ONE_HALF: tl.constexpr):
    """q.k [M, N] in float32, smallest terms first. With ONE_HALF q_low is zero."""
    acc = tl.dot(q_high, tl.trans(k_low))
    if not ONE_HALF:
        acc = tl.dot(q_low, tl.trans(k_high), acc)
    return tl.dot(q_high, tl.trans(k_high), acc)


@triton.jit
def write_block_indices(indices, out, before, b, r, token, T, RANKS, SLOTS: tl.constexpr,
                  STRIDE: tl.constexpr, BEFORE: tl.constexpr):  # fmt: skip
    """Write each group's ranking [M, SLOTS_2] for its tokens. A group whose leader came before this
    call gets the ranking at `before`."""
    slot = tl.arange(0, indices.shape[1])
    indices = tl.where(indices == NO_BLOCK, -1, indices)
    if STRIDE > 1:
        earlier = tl.full([indices.shape[1]], -1, tl.int32)
        if BEFORE:
            earlier = tl.load(before + (b * RANKS + r) * SLOTS + slot, mask=slot < SLOTS, other=-1)
        indices = tl.where((token < 0)[:, None], earlier[None], indices)
    for j in range(STRIDE):
        t = token + j
        row = (b * T + t) * RANKS + r
        mask = ((t >= 0) & (t < T))[:, None] & (slot < SLOTS)[None]
        tl.store(out + row[:, None] * SLOTS + slot[None], indices, mask=mask)


# logits: the mean query with each block's mean key, or with each key of its windows


@triton.jit
def mean_queries(
    q, starts, first_token, doc_first, doc_last, tile, b, r, T, C, W, q_b, q_t, q_h,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    d: tl.constexpr, s: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr,
    STRIDE: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, DOCUMENTS: tl.constexpr,
    NUM_STAGES_Q: tl.constexpr,
):  # fmt: skip
    """Of the leaders of a tile [M]: position and token, candidates low .. end - 1, one past the
    last of W windows that they see, and the sums [M, D] of the G query heads as two halves."""
    if RAGGED:
        first_token = tl.load(starts + b).to(tl.int32)
    index = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    position, token, ranked = leaders(index, first_token, T, STRIDE)
    low = tl.full([BLOCK_M], INITIAL, tl.int32)
    end = candidates_end(position, C, LOCAL, d, s, CAUSAL)
    lo, hi = visible_windows(position, W, d, CAUSAL)
    if DOCUMENTS:
        firsts, lasts = doc_first + b * T, doc_last + b * T
        low, end = candidates_in_document(end, token, T, firsts, lasts, s, INITIAL)
        lo, hi = in_document(lo, hi, token, T, firsts, lasts, d)
    low, end = tl.where(ranked, low, C), tl.where(ranked, end, 0)

    q_sum = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for g in tl.range(0, G, num_stages=NUM_STAGES_Q):
        rows = b * q_b + token.to(tl.int64) * q_t + (r * G + g) * q_h
        q_sum += load_rows(q, rows, D, BLOCK_D, ranked).to(tl.float32)
    q_high, q_low, _ = two_halves(q_sum)
    return position, token, low, end, hi, q_high, q_low


@triton.jit
def score_chunk(q_high, q_low, keys, sizes, first_row, c, C, BLOCK_D: tl.constexpr,
                ONE_HALF: tl.constexpr):  # fmt: skip
    """Scores [M, N] of blocks c [N]."""
    inside = c < C
    row = first_row + c
    k_high = load_rows(keys, row * (2 * BLOCK_D), BLOCK_D, BLOCK_D, inside)
    k_low = load_rows(keys + BLOCK_D, row * (2 * BLOCK_D), BLOCK_D, BLOCK_D, inside)
    size = tl.load(sizes + row, mask=inside, other=0.0)
    return dot_of_halves(q_high, q_low, k_high, k_low, ONE_HALF) * size[None]


@triton.jit
def best_by_logits(
    q_high, q_low, keys, sizes, first_row, edge_row, position, low, end, C, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SLOTS: tl.constexpr,
    SLOTS_2: tl.constexpr, d: tl.constexpr, s: tl.constexpr, EDGES: tl.constexpr,
    ONE_HALF: tl.constexpr,
):  # fmt: skip
    """The ranking [M, SLOTS_2] of blocks low .. end - 1, and whether it must be repeated."""
    # a query's edge block holds the last windows that it sees
    WINDOWS: tl.constexpr = s // d if s > d else 1
    first_edge = (tl.min(position, 0) // d - WINDOWS) * d // s
    running = start(position.shape[0], SLOTS_2, COLUMNS, DEPTH)
    for c0 in range(tl.min(low, 0) // BLOCK_N * BLOCK_N, tl.max(end, 0), BLOCK_N):
        c = chunk_blocks(c0, BLOCK_N, COLUMNS)
        score = score_chunk(q_high, q_low, keys, sizes, first_row, c, C, BLOCK_D, ONE_HALF)
        if EDGES:  # noqa: SIM102
            if c0 + BLOCK_N > first_edge:
                edge = score_chunk(q_high, q_low, keys, sizes, edge_row, c, C, BLOCK_D, ONE_HALF)
                is_edge = (first_window(c, d, s) + WINDOWS)[None] == (position // d)[:, None]
                score = tl.where(is_edge, edge, score)
        candidate = (c[None] >= low[:, None]) & (c[None] < end[:, None])
        running = fold(running, tl.where(candidate, score, NO_SCORE), c, COLUMNS)
    return finish(running, SLOTS, SLOTS_2, COLUMNS)


@triton.jit(do_not_specialize=LENGTHS)
def nsa_topk_logits(
    q, keys, sizes, out, before, starts, first_token, doc_first, doc_last, T, C, RANKS,
    q_b, q_t, q_h,
    G: tl.constexpr, RANKS_PER_KV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    MERGE_N: tl.constexpr, SLOTS: tl.constexpr, SLOTS_2: tl.constexpr,
    d: tl.constexpr, s: tl.constexpr,
    INITIAL: tl.constexpr, LOCAL: tl.constexpr, STRIDE: tl.constexpr, CAUSAL: tl.constexpr,
    INTERPOLATED: tl.constexpr, RAGGED: tl.constexpr, BEFORE: tl.constexpr, DOCUMENTS: tl.constexpr,
    ONE_HALF: tl.constexpr, FLIPPED: tl.constexpr, NUM_STAGES_Q: tl.constexpr,
):  # fmt: skip
    """One program: the rankings of BLOCK_M groups of tokens of one row and ranking head, which is
    the mean of G query heads. Reads the queries, with NUM_STAGES_Q heads in flight, and the keys of
    their candidates. RANKS_PER_KV ranking heads share a KV head."""
    tile, line, tiles, lines = grid_position(FLIPPED)
    tile = tiles - 1 - tile  # tiles with most candidates first
    b, r = (line // RANKS).to(tl.int64), (line % RANKS).to(tl.int64)
    position, token, low, end, _hi, q_high, q_low = mean_queries(
        q, starts, first_token, doc_first, doc_last, tile, b, r, T, C, 0, q_b, q_t, q_h, G, D,
        BLOCK_D, BLOCK_M, d, s, INITIAL, LOCAL, STRIDE, CAUSAL, RAGGED, DOCUMENTS, NUM_STAGES_Q,
    )  # fmt: skip
    first_row = (line // RANKS_PER_KV).to(tl.int64) * C
    edge_row = first_row + (lines // RANKS_PER_KV).to(tl.int64) * C
    EDGES: tl.constexpr = INTERPOLATED and CAUSAL
    indices, missed = best_by_logits(
        q_high, q_low, keys, sizes, first_row, edge_row, position, low, end, C, BLOCK_D, BLOCK_N,
        COLUMNS, DEPTH, SLOTS, SLOTS_2, d, s, EDGES, ONE_HALF,
    )  # fmt: skip
    if DEPTH < SLOTS and COLUMNS > 0:  # noqa: SIM102
        if missed > 0:
            indices, missed = best_by_logits(
                q_high, q_low, keys, sizes, first_row, edge_row, position, low, end, C, BLOCK_D,
                MERGE_N, 0, 0, SLOTS, SLOTS_2, d, s, EDGES, ONE_HALF,
            )  # fmt: skip
    write_block_indices(indices, out, before, b, r, token, T, RANKS, SLOTS, STRIDE, BEFORE)


@triton.jit(do_not_specialize=LENGTHS)
def nsa_topk_max(
    q, keys, sizes, out, before, starts, first_token, doc_first, doc_last, T, C, W, RANKS,
    q_b, q_t, q_h,
    G: tl.constexpr, RANKS_PER_KV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    MERGE_N: tl.constexpr, SLOTS: tl.constexpr, SLOTS_2: tl.constexpr, PER_BLOCK: tl.constexpr,
    d: tl.constexpr, s: tl.constexpr,
    INITIAL: tl.constexpr, LOCAL: tl.constexpr, STRIDE: tl.constexpr, CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr, BEFORE: tl.constexpr, DOCUMENTS: tl.constexpr, HALVES: tl.constexpr,
    FLIPPED: tl.constexpr, NUM_STAGES_Q: tl.constexpr,
):  # fmt: skip
    """One program: the rankings of BLOCK_M groups of tokens of one row and ranking head, by the
    largest product of the mean of G query heads with a key of a block's windows."""
    tile, line, tiles, _lines = grid_position(FLIPPED)
    tile = tiles - 1 - tile
    b, r = (line // RANKS).to(tl.int64), (line % RANKS).to(tl.int64)
    _position, token, low, end, hi, q_high, q_low = mean_queries(
        q, starts, first_token, doc_first, doc_last, tile, b, r, T, C, W, q_b, q_t, q_h, G, D,
        BLOCK_D, BLOCK_M, d, s, INITIAL, LOCAL, STRIDE, CAUSAL, RAGGED, DOCUMENTS, NUM_STAGES_Q,
    )  # fmt: skip
    first_row = (line // RANKS_PER_KV).to(tl.int64) * W
    # causally, queries see all windows of candidates
    PARTIAL: tl.constexpr = DOCUMENTS and not CAUSAL
    indices, missed = best_by_max(
        q_high, q_low, keys, sizes, first_row, low, end, hi, W, BLOCK_D, BLOCK_N, COLUMNS, DEPTH,
        SLOTS, SLOTS_2, PER_BLOCK, d, s, HALVES, PARTIAL,
    )  # fmt: skip
    if DEPTH < SLOTS and COLUMNS > 0:  # noqa: SIM102
        if missed > 0:
            indices, missed = best_by_max(
                q_high, q_low, keys, sizes, first_row, low, end, hi, W, BLOCK_D, BLOCK_N, 0, 0,
                SLOTS, SLOTS_2, PER_BLOCK, d, s, HALVES, PARTIAL,
            )  # fmt: skip
    write_block_indices(indices, out, before, b, r, token, T, RANKS, SLOTS, STRIDE, BEFORE)


# probs


@triton.jit
def head_rows(tile, r, first_token, T, G: tl.constexpr, HEADS: tl.constexpr, BLOCK_M: tl.constexpr,
              STRIDE: tl.constexpr):  # fmt: skip
    """Position, token and query head of each row of a tile, and whether the row exists. Rows are
    leaders of groups x the G query heads of ranking head r, padded to HEADS, a power of two."""
    row = tl.arange(0, BLOCK_M)
    index = tile * (BLOCK_M // HEADS) + row // HEADS
    position, token, ranked = leaders(index, first_token, T, STRIDE)
    g = row % HEADS
    return position, token, r * G + g, ranked & (g < G)


@triton.jit(do_not_specialize=[*LENGTHS, "MEMORY"])
def nsa_topk_lse(
    q, ck, mem_k, lse, starts, first_token, doc_first, doc_last, T, W, RANKS, MEMORY, scale_log2,
    cap,
    q_b, q_t, q_h, k_b, k_w, k_h, m_h, m_m,
    G: tl.constexpr, RANKS_PER_KV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, d: tl.constexpr, STRIDE: tl.constexpr,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, DOCUMENTS: tl.constexpr, CAP: tl.constexpr,
    HEADS: tl.constexpr, FLIPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: the log-sum-exp of a tile of rows. Reads their queries, all memory slots and the
    windows that they see."""
    tile, line, tiles, _lines = grid_position(FLIPPED)
    tile = tiles - 1 - tile
    b, r = (line // RANKS).to(tl.int64), (line % RANKS).to(tl.int64)
    if RAGGED:
        first_token = tl.load(starts + b).to(tl.int32)
    position, token, head, real = head_rows(tile, r, first_token, T, G, HEADS, BLOCK_M, STRIDE)
    q_rows = b * q_b + token.to(tl.int64) * q_t + head * q_h
    q_tile = load_rows(q, q_rows, D, BLOCK_D, real)
    lo, hi = visible_windows(position, W, d, CAUSAL)
    if DOCUMENTS:
        lo, hi = in_document(lo, hi, token, T, doc_first + b * T, doc_last + b * T, d)
    lse_log2 = log_sum_exp(
        q_tile, ck, b * k_b + r // RANKS_PER_KV * k_h, k_w, mem_k, r // RANKS_PER_KV * m_h, m_m,
        tl.where(real, lo, W), tl.where(real, hi, 0), real, W, MEMORY, scale_log2, cap, D,
        BLOCK_D, BLOCK_N, CAP, PRECISION,
    )  # fmt: skip
    row = (b * T + token) * (RANKS * G) + head
    tl.store(lse + row, lse_log2 * 0.6931471805599453, mask=real)


@triton.jit(do_not_specialize=LENGTHS)
def nsa_topk_softmax_mass(
    q, ck, lse, out, before, starts, first_token, doc_first, doc_last, T, C, W, RANKS, scale_log2,
    cap,
    q_b, q_t, q_h, k_b, k_w, k_h,
    G: tl.constexpr, RANKS_PER_KV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    MERGE_N: tl.constexpr, SLOTS: tl.constexpr, SLOTS_2: tl.constexpr,
    PER_BLOCK: tl.constexpr, WINDOW: tl.constexpr, d: tl.constexpr, s: tl.constexpr,
    INITIAL: tl.constexpr, LOCAL: tl.constexpr, STRIDE: tl.constexpr, CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr, BEFORE: tl.constexpr, DOCUMENTS: tl.constexpr, CAP: tl.constexpr,
    HEADS: tl.constexpr, WARPS: tl.constexpr, WIDE: tl.constexpr, FLIPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: the rankings of a tile of groups of tokens of one row and ranking head, which
    sums the scores of G query heads. Reads their queries, log-sum-exp and visible windows."""
    tile, line, tiles, _lines = grid_position(FLIPPED)
    tile = tiles - 1 - tile
    b, r = (line // RANKS).to(tl.int64), (line % RANKS).to(tl.int64)
    if RAGGED:
        first_token = tl.load(starts + b).to(tl.int32)
    GROUPS: tl.constexpr = BLOCK_M // HEADS
    index = tile * GROUPS + tl.arange(0, GROUPS)
    position, token, ranked = leaders(index, first_token, T, STRIDE)
    low = tl.full([GROUPS], INITIAL, tl.int32)
    end = candidates_end(position, C, LOCAL, d, s, CAUSAL)
    lo, hi = visible_windows(position, W, d, CAUSAL)
    if DOCUMENTS:
        firsts, lasts = doc_first + b * T, doc_last + b * T
        low, end = candidates_in_document(end, token, T, firsts, lasts, s, INITIAL)
        lo, hi = in_document(lo, hi, token, T, firsts, lasts, d)
    # all tokens see the windows `latest` .. `fewest` - 1
    fewest, latest = tl.min(tl.where(ranked, hi, W), 0), tl.max(tl.where(ranked, lo, 0), 0)
    low, end = tl.where(ranked, low, C), tl.where(ranked, end, 0)
    hi = tl.where(ranked, hi, 0)

    # [M, D] and [M]
    _, row_token, head, real = head_rows(tile, r, first_token, T, G, HEADS, BLOCK_M, STRIDE)
    q_rows = b * q_b + row_token.to(tl.int64) * q_t + head * q_h
    q_tile = load_rows(q, q_rows, D, BLOCK_D, real)
    row = (b * T + row_token) * (RANKS * G) + head
    lse_log2 = tl.load(lse + row, mask=real, other=0.0) * 1.4426950408889634
    # rows that do not exist, or see no window, have probability 0
    lse_log2 = tl.where(real & (lse_log2 > NO_SCORE), lse_log2, float("inf"))

    k_base = b * k_b + r // RANKS_PER_KV * k_h
    indices, missed = best_by_probs(
        q_tile, lse_log2, lo, hi, ck, k_base, k_w, low, end, fewest, latest, W, scale_log2, cap,
        HEADS, D, BLOCK_D, BLOCK_N, COLUMNS, DEPTH, SLOTS, SLOTS_2, PER_BLOCK, WINDOW, d, s, WARPS,
        WIDE, CAP, PRECISION,
    )  # fmt: skip
    if DEPTH < SLOTS and COLUMNS > 0:  # noqa: SIM102
        if missed > 0:
            indices, missed = best_by_probs(
                q_tile, lse_log2, lo, hi, ck, k_base, k_w, low, end, fewest, latest, W, scale_log2,
                cap, HEADS, D, BLOCK_D, MERGE_N, 0, 0, SLOTS, SLOTS_2, PER_BLOCK, WINDOW, d, s,
                WARPS, WIDE, CAP, PRECISION,
            )  # fmt: skip
    write_block_indices(indices, out, before, b, r, token, T, RANKS, SLOTS, STRIDE, BEFORE)


# launches


def topk_grid(args, groups, B):
    """The grid of tiles of `groups` groups of tokens x lines (batch rows x ranking heads), and
    whether it is flipped."""
    leaders = cdiv(args["T"] + args["STRIDE"] - 1, args["STRIDE"])
    return launch.grid(cdiv(leaders, groups), B * args["RANKS"])


def log_sum_exps(mem_k, args, B, H):
    """lse [B T H] of the ranked queries. Both kernels of `probs` take `args`."""
    q, heads = args["q"], args["HEADS"]
    lse = q.new_empty(B, q.shape[1], H, dtype=torch.float32)
    tile = launch.flash_tile("forward", True, args["D"], heads, q.dtype)
    grid, flipped = topk_grid(args, tile.block_m // heads, B)
    nsa_topk_lse[grid](
        mem_k=args["ck"] if mem_k is None else mem_k, lse=lse,
        MEMORY=0 if mem_k is None else mem_k.shape[1], **launch.strides("m", mem_k, "hm"),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, num_warps=tile.num_warps,
        num_stages=tile.num_stages, FLIPPED=flipped, **args,
    )  # fmt: skip
    return lse


def select_blocks(
    q, ck, mem_k, lse, starts, before, first_token, num_ranked, num_selected, l, d, s, importance,
    interpolated, num_initial, num_local, stride, shared, causal, scale, documents=None,
    soft_cap=None, sinks=None, out=None,
):  # fmt: skip
    """Block indices [B T R n] for q [B T H D] and ck [B W K D], written to `out` if given. `before`
    [B R n] is the ranking of the first query's group if its leader came before this call. lse
    [B T H] and sinks [H] are those of the compressed branch."""
    B, T, H, D = q.shape
    W, K = ck.shape[1:3]
    ranks, n = (K if shared else H), num_selected
    G = H // ranks
    out = q.new_empty(B, T, ranks, n, dtype=torch.int32) if out is None else out
    q, ck, mem_k = (t if t is None or t.stride(-1) == 1 else t.contiguous() for t in (q, ck, mem_k))

    args = dict(
        q=q, starts=starts, first_token=first_token, T=T, RANKS=ranks, G=G,
        RANKS_PER_KV=ranks // K, D=D, BLOCK_D=launch.padded(D), d=d, STRIDE=stride, CAUSAL=causal,
        RAGGED=starts is not None,
        **launch.strides("q", q, "bth"), **launch.bounds(documents),
    )  # fmt: skip
    if importance == "logits":
        kernel, rows = nsa_topk_logits, 1
        tile = launch.topk_tile(importance, D, G, n, q.dtype, interpolated, num_ranked)
        keys, sizes = block_keys(ck, num_ranked, d, s, interpolated, scale, documents=documents)
        one_half = G == 1 and q.dtype != torch.float32
        args |= dict(
            keys=keys, sizes=sizes, INTERPOLATED=interpolated, ONE_HALF=one_half,
            NUM_STAGES_Q=tiles.heads_in_flight(tile.block_m * args["BLOCK_D"] * q.element_size()),
        )  # fmt: skip
    elif importance == "max":
        kernel, rows = nsa_topk_max, 1
        tile = launch.topk_tile(importance, D, G, n, q.dtype)
        keys, sizes = window_keys(ck, scale)
        args |= dict(
            keys=keys, sizes=sizes, W=W, HALVES=keys.shape[3],
            PER_BLOCK=next_power_of_2(max(1, s // d)),
            NUM_STAGES_Q=tiles.heads_in_flight(tile.block_m * args["BLOCK_D"] * q.element_size()),
        )  # fmt: skip
    else:
        kernel, rows = nsa_topk_softmax_mass, next_power_of_2(G)
        tile = launch.topk_tile(importance, D, G, n, q.dtype)
        args |= dict(
            ck=ck, W=W, scale_log2=scale * launch.LOG2_E, **launch.strides("k", ck, "bwh"),
            HEADS=rows, PRECISION="ieee", **launch.cap(soft_cap),
        )  # fmt: skip
        if lse is None:
            lse = log_sum_exps(mem_k, args, B, H)
            lse = lse if sinks is None else torch.logaddexp(lse, sinks)
        plain = starts is None and documents is None and soft_cap is None
        if topk_sm90.is_supported(q, ck, first_token, ranks, l, d, s, n, stride, plain):
            topk_sm90.rank(
                q, ck, lse, out, first_token, num_ranked, l, d, s, num_initial, num_local, stride,
                causal, scale,
            )  # fmt: skip
            return out
        args |= dict(
            lse=lse, WINDOW=l, PER_BLOCK=next_power_of_2(max(1, s // d)),
            WARPS=tile.num_warps, WIDE=launch.wide(ck),
        )  # fmt: skip

    grid, flipped = topk_grid(args, tile.block_m // rows, B)
    kernel[grid](
        out=out, before=before, C=num_ranked, SLOTS=n, SLOTS_2=max(2, next_power_of_2(n)),
        s=s, INITIAL=num_initial, LOCAL=max(num_local, 1), BEFORE=before is not None,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, COLUMNS=tile.columns, DEPTH=tile.depth,
        MERGE_N=tile.merge_n, FLIPPED=flipped, num_warps=tile.num_warps,
        num_stages=tile.num_stages, **args,
    )  # fmt: skip
    return out
