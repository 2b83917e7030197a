"""Ranking of blocks by `importance="logits"`: a block's score is one dot product, mean query of the
heads that rank together times mean key of the block's windows.

Both means are float32. The kernels split them into two float16 halves, whose products tensor cores
sum in float32; a product is accurate to 2^-21 of the product of its rows' largest elements.
"""

from collections import namedtuple

import torch
import triton
import triton.language as tl

from ..common import launch
from ..common.launch import cdiv, next_power_of_2, strided
from ..common.precompile import launcher
from ..common.primitives import (
    candidates_end,
    candidates_in_document,
    document_interval,
    grid_position,
    leaders,
    load_rows,
    visible_windows,
)
from .topn import LENGTHS, NO_SCORE, chunk_blocks, finish, fold, start, write_block_indices

# blocks of a program of `block_keys`
BLOCK_C = tl.constexpr(16)
# compile-time settings of the kernels that convert keys
KeySettings = namedtuple(
    "KeySettings", "D BLOCK_D HALVES FLIPPED BLOCK_S d s INTERPOLATED DOCUMENTS",
    defaults=(None,) * 5,
)  # fmt: skip


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
def store_halves(keys, sizes, x, row, valid, F: tl.constexpr):
    """Write keys x [N, BLOCK_D] to rows of `keys` [HALVES, BLOCK_D], and the powers of two that
    undo their scaling."""
    high, low, size = two_halves(x)
    at = row[:, None] * (F.HALVES * F.BLOCK_D) + tl.arange(0, F.BLOCK_D)[None]
    tl.store(keys + at, high, mask=valid[:, None])
    if F.HALVES == 2:
        tl.store(keys + at + F.BLOCK_D, low, mask=valid[:, None])
    tl.store(sizes + row, size, mask=valid)


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
        shared = tl.where((u < s) & (t < end[:, None] * d), tl.maximum(2 * d - distance, 0), 0)
        weight = tl.sum(shared, 1).to(tl.float32)
    else:
        weight = (w < end).to(tl.float32)
    return weight


@triton.jit(do_not_specialize=["T", "C", "W"])
def nsa_topk_block_keys(ck, keys, sizes, documents, T, C, W, K, scale, F: tl.constexpr):
    """One program: keys of a tile of blocks of one row and KV head, as halves [2, BLOCK_D] and the
    power of two that undoes their scaling. Program 1 of axis 2 writes the keys for queries that do
    not see the window after the block: the block's last window replaces that window."""
    tile_index, line, _tiles, lines = grid_position(F.FLIPPED)
    b, h = (line // K).to(tl.int64), (line % K).to(tl.int64)
    c = tile_index * BLOCK_C + tl.arange(0, BLOCK_C)
    WINDOWS: tl.constexpr = F.s // F.d if F.s > F.d else 1
    first = first_window(c, F.d, F.s)
    lo = c * 0
    end = lo + W
    if F.DOCUMENTS:
        lo, end = document_interval(
            lo, end, c * F.s, T, documents.first + b * T, documents.last + b * T, F.d
        )
    last = end - 1
    if tl.program_id(2) == 1:
        last = tl.minimum(last, first + WINDOWS - 1)

    k_sum = tl.full([BLOCK_C, F.BLOCK_D], 0.0, tl.float32)
    count = tl.full([BLOCK_C], 0.0, tl.float32)
    # interpolated: sums of differences from the first key, so the mean of equal keys is exact
    origin = k_sum
    if F.INTERPOLATED:
        w = tl.minimum(tl.maximum(first, lo), last)
        rows = b * ck.b + h * ck.h + w.to(tl.int64) * ck.n
        origin = load_rows(ck.ptr, rows, F.D, F.BLOCK_D, (c < C) & (w < W)).to(tl.float32)
    MARGIN: tl.constexpr = 1 if F.INTERPOLATED else 0
    for j in range(-MARGIN, WINDOWS + MARGIN):
        w = first + j
        weight = window_weight(c, j, end, F.d, F.s, F.BLOCK_S, F.INTERPOLATED)
        if F.INTERPOLATED:
            w = tl.minimum(tl.maximum(w, lo), last)
        rows = b * ck.b + h * ck.h + w.to(tl.int64) * ck.n
        tile = load_rows(ck.ptr, rows, F.D, F.BLOCK_D, (c < C) & (w < W)).to(tl.float32)
        if F.INTERPOLATED:
            tile -= origin
        k_sum += weight[:, None] * tile
        count += weight
    key = (origin + k_sum / tl.maximum(count, 1.0)[:, None]) * scale

    row = (tl.program_id(2) * lines + line).to(tl.int64) * C + c
    store_halves(keys, sizes, key, row, c < C, F)


def block_keys(ck, C, config, documents):
    """Keys of blocks 0 .. C - 1: halves [sets, B, K, C, 2, BLOCK_D] and their scales [sets, B, K,
    C]. If interpolated, a second set is for queries that do not see the window after the block."""
    B, W, K, D = ck.shape
    s, interpolated = config.selection_block_size, config.interpolated_importance_score
    sets, block_d = (2 if interpolated else 1), launch.padded(D)
    keys = ck.new_empty(sets, B, K, C, 2, block_d, dtype=torch.float16)
    sizes = ck.new_empty(sets, B, K, C, dtype=torch.float32)
    grid, flipped = launch.grid(cdiv(C, BLOCK_C.value), B * K, sets)
    settings = KeySettings(
        D, block_d, 2, flipped, next_power_of_2(s), config.d, s, interpolated, documents is not None
    )
    launcher(nsa_topk_block_keys, grid)(
        strided(ck), keys, sizes, documents, T=0 if documents is None else documents.first.shape[1],
        C=C, W=W, K=K, scale=config.scale_of(D), F=settings,
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
def candidate_ranges(position, token, ranked, documents, b, T, C, W, F: tl.constexpr):
    """Of leaders [M]: the blocks low .. end - 1 that they may rank, of C, none where not `ranked`;
    the windows lo .. hi - 1 that they see, of W."""
    low = tl.full(position.shape, F.INITIAL, tl.int32)
    end = candidates_end(position, C, F.LOCAL, F.d, F.s, F.CAUSAL)
    lo, hi = visible_windows(position, W, F.d, F.CAUSAL)
    if F.DOCUMENTS:
        firsts, lasts = documents.first + b * T, documents.last + b * T
        low, end = candidates_in_document(end, token, T, firsts, lasts, F.s, F.INITIAL)
        lo, hi = document_interval(lo, hi, token, T, firsts, lasts, F.d)
    return tl.where(ranked, low, C), tl.where(ranked, end, 0), lo, hi


@triton.jit
def mean_queries(q, starts, documents, first_token, tile, b, r, T, C, W, F: tl.constexpr):
    """Of the leaders of a tile [M]: position and token, candidates low .. end - 1, one past the
    last of W windows that they see, and the sums [M, D] of the G query heads as two halves."""
    if F.RAGGED:
        first_token = tl.load(starts + b).to(tl.int32)
    index = tile * F.BLOCK_M + tl.arange(0, F.BLOCK_M)
    position, token, ranked = leaders(index, first_token, T, F.STRIDE)
    low, end, _lo, hi = candidate_ranges(position, token, ranked, documents, b, T, C, W, F)

    q_sum = tl.full([F.BLOCK_M, F.BLOCK_D], 0.0, tl.float32)
    for g in tl.range(0, F.G, num_stages=F.NUM_STAGES_Q):
        rows = b * q.b + token.to(tl.int64) * q.n + (r * F.G + g) * q.h
        q_sum += load_rows(q.ptr, rows, F.D, F.BLOCK_D, ranked).to(tl.float32)
    q_high, q_low, _ = two_halves(q_sum)
    return position, token, low, end, hi, q_high, q_low


@triton.jit
def score_chunk(q_high, q_low, keys, sizes, first_row, c, C, BLOCK_D: tl.constexpr,
                ONE_HALF: tl.constexpr):  # fmt: skip
    """Scores [M, N] of blocks c [N]."""
    is_block = c < C
    row = first_row + c
    k_high = load_rows(keys, row * (2 * BLOCK_D), BLOCK_D, BLOCK_D, is_block)
    k_low = load_rows(keys + BLOCK_D, row * (2 * BLOCK_D), BLOCK_D, BLOCK_D, is_block)
    size = tl.load(sizes + row, mask=is_block, other=0.0)
    return dot_of_halves(q_high, q_low, k_high, k_low, ONE_HALF) * size[None]


@triton.jit
def best_by_logits(
    q_high, q_low, keys, sizes, first_row, edge_row, position, low, end, C, BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """The ranking [M, SLOTS_2] of blocks low .. end - 1, and whether it must be repeated."""
    # a query's edge block holds the last windows that it sees
    EDGES: tl.constexpr = F.INTERPOLATED and F.CAUSAL
    WINDOWS: tl.constexpr = F.s // F.d if F.s > F.d else 1
    first_edge = (tl.min(position, 0) // F.d - WINDOWS) * F.d // F.s
    running = start(position.shape[0], F.SLOTS_2, COLUMNS, DEPTH)
    for c0 in range(tl.min(low, 0) // BLOCK_N * BLOCK_N, tl.max(end, 0), BLOCK_N):
        c = chunk_blocks(c0, BLOCK_N, COLUMNS)
        score = score_chunk(q_high, q_low, keys, sizes, first_row, c, C, F.BLOCK_D, F.ONE_HALF)
        if EDGES:  # noqa: SIM102
            if c0 + BLOCK_N > first_edge:
                edge = score_chunk(
                    q_high, q_low, keys, sizes, edge_row, c, C, F.BLOCK_D, F.ONE_HALF
                )
                is_edge = (first_window(c, F.d, F.s) + WINDOWS)[None] == (position // F.d)[:, None]
                score = tl.where(is_edge, edge, score)
        candidate = (c[None] >= low[:, None]) & (c[None] < end[:, None])
        running = fold(running, tl.where(candidate, score, NO_SCORE), c, COLUMNS)
    return finish(running, F.SLOTS, F.SLOTS_2, COLUMNS)


@triton.jit(do_not_specialize=LENGTHS)
def nsa_topk_logits(
    q, keys, sizes, out, leader_indices, starts, documents, first_token, T, C, RANKS,
    F: tl.constexpr,
):  # fmt: skip
    """One program: the rankings of BLOCK_M groups of tokens of one row and ranking head, which is
    the mean of G query heads. Reads the queries, with NUM_STAGES_Q heads in flight, and the keys of
    their candidates. RANKS_PER_KV ranking heads share a KV head."""
    tile, line, tiles, lines = grid_position(F.FLIPPED)
    tile = tiles - 1 - tile  # tiles with most candidates first
    b, r = (line // RANKS).to(tl.int64), (line % RANKS).to(tl.int64)
    position, token, low, end, _hi, q_high, q_low = mean_queries(
        q, starts, documents, first_token, tile, b, r, T, C, 0, F
    )
    first_row = (line // F.RANKS_PER_KV).to(tl.int64) * C
    edge_row = first_row + (lines // F.RANKS_PER_KV).to(tl.int64) * C
    indices, missed = best_by_logits(
        q_high, q_low, keys, sizes, first_row, edge_row, position, low, end, C, F.BLOCK_N,
        F.COLUMNS, F.DEPTH, F,
    )  # fmt: skip
    if F.DEPTH < F.SLOTS and F.COLUMNS > 0:  # noqa: SIM102
        if missed > 0:
            indices, missed = best_by_logits(
                q_high, q_low, keys, sizes, first_row, edge_row, position, low, end, C, F.MERGE_N,
                0, 0, F,
            )  # fmt: skip
    write_block_indices(indices, out, leader_indices, b, r, token, T, RANKS, F)
