"""Ranking of blocks by `importance="max"`: a block's score is the largest dot product of the mean
query with a key of its windows, down to single tokens.

A step scores SLICE windows of each of CHUNK blocks. Windows are ordered so that a thread of an MMA
holds all of a block's scores in its rows: columns 2 i and 2 i + 1 of every 8 are of one block.
"""

import torch
import triton
import triton.language as tl

from ..common import launch
from ..common.launch import cdiv
from ..common.precompile import launcher
from ..common.primitives import grid_position, load_rows
from .logits import first_window, mean_queries, two_halves
from .topn import (
    LENGTHS,
    NO_SCORE,
    chunk_blocks,
    finish,
    fold,
    permute_blocks,
    start,
    write_block_indices,
)

# windows that a program of `window_keys` converts
BLOCK_W = 32


@triton.jit(do_not_specialize=["W"])
def nsa_topk_window_keys(
    ck, keys, sizes, W, K, sign,
    k_b, k_w, k_h,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr, HALVES: tl.constexpr,
    FLIPPED: tl.constexpr,
):  # fmt: skip
    """One program: a tile of windows of one row and KV head. Writes their keys as float16 halves
    [HALVES, BLOCK_D], and the powers of two that undo their scaling."""
    tile, line, _tiles, _lines = grid_position(FLIPPED)
    b, h = (line // K).to(tl.int64), (line % K).to(tl.int64)
    w = tile * BLOCK_W + tl.arange(0, BLOCK_W)
    rows = b * k_b + h * k_h + w.to(tl.int64) * k_w
    high, low, size = two_halves(load_rows(ck, rows, D, BLOCK_D, w < W).to(tl.float32) * sign)
    row = line.to(tl.int64) * W + w
    at = row[:, None] * (HALVES * BLOCK_D) + tl.arange(0, BLOCK_D)[None]
    tl.store(keys + at, high, mask=(w < W)[:, None])
    if HALVES == 2:
        tl.store(keys + at + BLOCK_D, low, mask=(w < W)[:, None])
    tl.store(sizes + row, size, mask=w < W)


def window_keys(ck, scale):
    """Keys of windows as float16 halves [B, K, W, HALVES, BLOCK_D] and their scales [B, K, W]. One
    half is exact for keys of 16 bits. Only the sign of `scale` matters to a ranking."""
    B, W, K, D = ck.shape
    halves, block_d = (2 if ck.dtype == torch.float32 else 1), launch.padded(D)
    keys = ck.new_empty(B, K, W, halves, block_d, dtype=torch.float16)
    sizes = ck.new_empty(B, K, W, dtype=torch.float32)
    grid, flipped = launch.grid(cdiv(W, BLOCK_W), B * K)
    launcher(nsa_topk_window_keys, grid)(
        ck, keys, sizes, W=W, K=K, sign=float((scale > 0) - (scale < 0)),
        **launch.strides("k", ck, "bwh"), D=D, BLOCK_D=block_d, BLOCK_W=BLOCK_W, HALVES=halves,
        FLIPPED=flipped,
    )  # fmt: skip
    return keys, sizes


@triton.jit
def window_of_column(N: tl.constexpr, SLICE: tl.constexpr):
    """The block of a chunk and the window of a slice that each column [N] of a tile scores."""
    n = tl.arange(0, N)
    block = n
    window = n * 0
    if SLICE > 1:
        HALF: tl.constexpr = SLICE // 2
        eighth = n // 8
        block = eighth // HALF * 4 + n % 8 // 2
        window = eighth % HALF * 2 + n % 2
    return block, window


@triton.jit
def largest_of_blocks(x, SLICE: tl.constexpr):
    """[M, N] in the order of `window_of_column` to the largest score of each block [M, CHUNK]."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    if SLICE > 1:
        x = tl.reshape(x, [M, N // (4 * SLICE), SLICE // 2, 4, 2])
        x = tl.reshape(tl.max(tl.max(x, 4), 2), [M, N // SLICE])
    return x


@triton.jit
def best_by_max(
    q_high, q_low, keys, sizes, first_row, low, end, hi, W, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SLOTS: tl.constexpr,
    SLOTS_2: tl.constexpr, PER_BLOCK: tl.constexpr, d: tl.constexpr, s: tl.constexpr,
    HALVES: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """The ranking [M, SLOTS_2] of blocks low .. end - 1, and whether it must be repeated. PER_BLOCK
    is the windows per block, padded to a power of two. With PARTIAL, rows see windows before hi
    only, also inside of candidates."""
    M: tl.constexpr = end.shape[0]
    P: tl.constexpr = s // d if s > d else 1
    ROOM: tl.constexpr = BLOCK_N // (COLUMNS if COLUMNS > 4 else (SLOTS_2 if SLOTS_2 > 4 else 4))
    SLICE: tl.constexpr = PER_BLOCK if PER_BLOCK < ROOM else ROOM
    CHUNK: tl.constexpr = BLOCK_N // SLICE
    STEPS: tl.constexpr = PER_BLOCK // SLICE
    running = start(M, SLOTS_2, COLUMNS, DEPTH)
    running_max = tl.full([M, CHUNK], NO_SCORE, tl.float32)
    block, window = window_of_column(BLOCK_N, SLICE)
    chunks = tl.cdiv(tl.max(end, 0), CHUNK)
    for step in range(tl.min(low, 0) // CHUNK * STEPS, chunks * STEPS):
        c0, j0 = step // STEPS * CHUNK, step % STEPS * SLICE
        w = first_window(permute_blocks(c0 + block, COLUMNS), d, s) + (j0 + window)
        inside = (w < W) & (j0 + window < P)
        row = first_row + w
        k_high = load_rows(keys, row * (HALVES * BLOCK_D), BLOCK_D, BLOCK_D, inside)
        x = tl.dot(q_high, tl.trans(k_high))
        if HALVES == 2:
            k_low = load_rows(keys + BLOCK_D, row * (2 * BLOCK_D), BLOCK_D, BLOCK_D, inside)
            x = tl.dot(q_low, tl.trans(k_high), x)
            x = tl.dot(q_high, tl.trans(k_low), x)
        size = tl.load(sizes + row, mask=inside, other=1.0)
        x = x * size[None] + tl.where(inside, 0.0, NO_SCORE)[None]
        if PARTIAL:
            x = tl.where(w[None] < hi[:, None], x, NO_SCORE)
        score = largest_of_blocks(x, SLICE)
        if STEPS > 1:
            score = tl.maximum(score, tl.where(j0 == 0, NO_SCORE, running_max))
            running_max = score
        if j0 == PER_BLOCK - SLICE:
            c = chunk_blocks(c0, CHUNK, COLUMNS)
            candidate = (c[None] >= low[:, None]) & (c[None] < end[:, None])
            running = fold(running, tl.where(candidate, score, NO_SCORE), c, COLUMNS)
    return finish(running, SLOTS, SLOTS_2, COLUMNS)


@triton.jit(do_not_specialize=LENGTHS)
def nsa_topk_max(
    q, keys, sizes, out, leader_indices, starts, first_token, doc_first, doc_last, T, C, W, RANKS,
    q_b, q_t, q_h,
    G: tl.constexpr, RANKS_PER_KV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    MERGE_N: tl.constexpr, SLOTS: tl.constexpr, SLOTS_2: tl.constexpr, PER_BLOCK: tl.constexpr,
    d: tl.constexpr, s: tl.constexpr,
    INITIAL: tl.constexpr, LOCAL: tl.constexpr, STRIDE: tl.constexpr, CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr, LEADERS: tl.constexpr, DOCUMENTS: tl.constexpr, HALVES: tl.constexpr,
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
    write_block_indices(indices, out, leader_indices, b, r, token, T, RANKS, SLOTS, STRIDE, LEADERS)
