"""Ranking of blocks by `importance="logits"`: a block's score is one dot product, mean query of the
heads that rank together times mean key of the block's windows.

Both means are float32. The kernels split them into two float16 halves, whose products tensor cores
sum in float32; a product is accurate to 2^-21 of the product of its rows' largest elements.
"""

import torch
import triton
import triton.language as tl

from ..common import launch
from ..common.launch import cdiv, next_power_of_2
from ..common.precompile import launcher
from ..common.primitives import (
    candidates_end,
    candidates_in_document,
    grid_position,
    in_document,
    leaders,
    load_rows,
    visible_windows,
)
from .topn import LENGTHS, NO_SCORE, chunk_blocks, finish, fold, start, write_block_indices

# blocks of a program of `block_keys`
BLOCK_C = 16


@triton.jit
def first_window(c, d: tl.constexpr, s: tl.constexpr):
    """The first window that ends in block c or, for d > s, the window that covers block c."""
    return c * (s // d) if s >= d else c // (d // s)


@triton.jit
def two_halves(x):
    """Rows [M, D] as float16 `high + low`, each row scaled by a power of two; also the factors [M]
    that undo the scaling. The error is at most 2^-23 of a row's largest element."""
    bits = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum(bits >> 23, 1), 253)
    x = x * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    high = x.to(tl.float16)
    low = (x - high.to(tl.float32)).to(tl.float16)
    return high, low, (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def window_weight(c, j, end, d: tl.constexpr, s: tl.constexpr, BLOCK_S: tl.constexpr,
                  INTERPOLATED: tl.constexpr):  # fmt: skip
    """Weight of the j-th window of each block c [C] in the block's mean key; 0 from window `end`
    [C] on."""
    w = first_window(c, d, s) + j
    if INTERPOLATED:
        # [C, BLOCK_S]
        u = tl.arange(0, BLOCK_S)[None]
        t = c[:, None] * s + u
        # twice the distance of token and window centre, in units of 1 / (2 d)
        distance = tl.abs(2 * t + 1 - d - 2 * d * w[:, None])
        near = tl.where((u < s) & (t < end[:, None] * d), tl.maximum(2 * d - distance, 0), 0)
        weight = tl.sum(near, 1).to(tl.float32)
    else:
        weight = (w < end).to(tl.float32)
    return weight


@triton.jit(do_not_specialize=["T", "C", "W"])
def nsa_topk_block_keys(
    ck, keys, sizes, doc_first, doc_last, T, C, W, K, scale,
    k_b, k_w, k_h,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
    d: tl.constexpr, s: tl.constexpr, INTERPOLATED: tl.constexpr, DOCUMENTS: tl.constexpr,
    FLIPPED: tl.constexpr,
):  # fmt: skip
    """One program: keys of a tile of blocks of one row and KV head, as halves [2, BLOCK_D] and the
    power of two that undoes their scaling. Program 1 of axis 2 writes the keys for queries that do
    not see the window after the block: the block's last window replaces that window."""
    tile_index, line, _tiles, lines = grid_position(FLIPPED)
    b, h = (line // K).to(tl.int64), (line % K).to(tl.int64)
    c = tile_index * BLOCK_C + tl.arange(0, BLOCK_C)
    WINDOWS: tl.constexpr = s // d if s > d else 1
    first = first_window(c, d, s)
    lo = c * 0
    end = lo + W
    if DOCUMENTS:
        lo, end = in_document(lo, end, c * s, T, doc_first + b * T, doc_last + b * T, d)
    last = end - 1
    if tl.program_id(2) == 1:
        last = tl.minimum(last, first + WINDOWS - 1)

    k_sum = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    count = tl.zeros([BLOCK_C], tl.float32)
    # interpolated: sums of differences from the first key, so the mean of equal keys is exact
    origin = k_sum
    if INTERPOLATED:
        w = tl.minimum(tl.maximum(first, lo), last)
        rows = b * k_b + h * k_h + w.to(tl.int64) * k_w
        origin = load_rows(ck, rows, D, BLOCK_D, (c < C) & (w < W)).to(tl.float32)
    MARGIN: tl.constexpr = 1 if INTERPOLATED else 0
    for j in range(-MARGIN, WINDOWS + MARGIN):
        w = first + j
        weight = window_weight(c, j, end, d, s, BLOCK_S, INTERPOLATED)
        if INTERPOLATED:
            w = tl.minimum(tl.maximum(w, lo), last)
        rows = b * k_b + h * k_h + w.to(tl.int64) * k_w
        tile = load_rows(ck, rows, D, BLOCK_D, (c < C) & (w < W)).to(tl.float32)
        if INTERPOLATED:
            tile -= origin
        k_sum += weight[:, None] * tile
        count += weight
    key = (origin + k_sum / tl.maximum(count, 1.0)[:, None]) * scale

    row = (tl.program_id(2) * lines + line).to(tl.int64) * C + c
    high, low, size = two_halves(key)
    x = tl.arange(0, BLOCK_D)[None]
    tl.store(keys + row[:, None] * (2 * BLOCK_D) + x, high, mask=(c < C)[:, None])
    tl.store(keys + row[:, None] * (2 * BLOCK_D) + BLOCK_D + x, low, mask=(c < C)[:, None])
    tl.store(sizes + row, size, mask=c < C)


def block_keys(ck, C, config, documents):
    """Keys of blocks 0 .. C - 1: halves [sets, B, K, C, 2, BLOCK_D] and their scales [sets, B, K,
    C]. If interpolated, a second set is for queries that do not see the window after the block."""
    B, W, K, D = ck.shape
    s, interpolated = config.selection_block_size, config.interpolated_importance_score
    sets, block_d = (2 if interpolated else 1), launch.padded(D)
    keys = ck.new_empty(sets, B, K, C, 2, block_d, dtype=torch.float16)
    sizes = ck.new_empty(sets, B, K, C, dtype=torch.float32)
    grid, flipped = launch.grid(cdiv(C, BLOCK_C), B * K, sets)
    launcher(nsa_topk_block_keys, grid)(
        ck, keys, sizes, T=0 if documents is None else documents.first.shape[1], C=C, W=W, K=K,
        scale=config.scale_of(D), **launch.strides("k", ck, "bwh"), **launch.bounds(documents), D=D,
        BLOCK_D=block_d, BLOCK_C=BLOCK_C, BLOCK_S=next_power_of_2(s), d=config.d, s=s,
        INTERPOLATED=interpolated, FLIPPED=flipped,
    )  # fmt: skip
    return keys, sizes


@triton.jit
def dot_of_halves(q_high, q_low, k_high, k_low, ONE_HALF: tl.constexpr):
    """q.k [M, N] in float32, smallest terms first. With ONE_HALF q_low is zero."""
    acc = tl.dot(q_high, tl.trans(k_low))
    if not ONE_HALF:
        acc = tl.dot(q_low, tl.trans(k_high), acc)
    return tl.dot(q_high, tl.trans(k_high), acc)


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
    q, keys, sizes, out, leader_indices, starts, first_token, doc_first, doc_last, T, C, RANKS,
    q_b, q_t, q_h,
    G: tl.constexpr, RANKS_PER_KV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    MERGE_N: tl.constexpr, SLOTS: tl.constexpr, SLOTS_2: tl.constexpr,
    d: tl.constexpr, s: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr,
    STRIDE: tl.constexpr, CAUSAL: tl.constexpr, INTERPOLATED: tl.constexpr, RAGGED: tl.constexpr,
    LEADERS: tl.constexpr, DOCUMENTS: tl.constexpr, ONE_HALF: tl.constexpr, FLIPPED: tl.constexpr,
    NUM_STAGES_Q: tl.constexpr,
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
    write_block_indices(indices, out, leader_indices, b, r, token, T, RANKS, SLOTS, STRIDE, LEADERS)
