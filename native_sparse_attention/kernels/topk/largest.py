"""Ranking of blocks by `importance="max"`: a block's score is the largest dot product of the mean
query with a key of its windows, down to single tokens.

A step scores SLICE windows of each of CHUNK blocks. Windows are ordered so that a thread of an MMA
holds all of a block's scores in its rows: columns 2 i and 2 i + 1 of every 8 are of one block.
"""

import torch
import triton
import triton.language as tl

from ..common import launch
from ..common.launch import cdiv, strided
from ..common.precompile import launcher
from ..common.primitives import grid_position, load_rows
from .logits import KeySettings, first_window, mean_queries, store_halves
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
BLOCK_W = tl.constexpr(32)


@triton.jit(do_not_specialize=["W"])
def nsa_topk_window_keys(ck, keys, sizes, W, K, sign, F: tl.constexpr):
    """One program: a tile of windows of one row and KV head. Writes their keys as float16 halves
    [HALVES, BLOCK_D], and the powers of two that undo their scaling."""
    tile, line, _tiles, _lines = grid_position(F.FLIPPED)
    b, h = (line // K).to(tl.int64), (line % K).to(tl.int64)
    w = tile * BLOCK_W + tl.arange(0, BLOCK_W)
    rows = b * ck.b + h * ck.h + w.to(tl.int64) * ck.n
    x = load_rows(ck.ptr, rows, F.D, F.BLOCK_D, w < W).to(tl.float32) * sign
    store_halves(keys, sizes, x, line.to(tl.int64) * W + w, w < W, F)


def window_keys(ck, config):
    """Keys of windows as float16 halves [B, K, W, HALVES, BLOCK_D] and their scales [B, K, W]. One
    half is exact for keys of 16 bits. Only the sign of the scale matters to a ranking."""
    (B, W, K, D), scale = ck.shape, config.scale_of(ck.shape[-1])
    halves, block_d = (2 if ck.dtype == torch.float32 else 1), launch.padded(D)
    keys = ck.new_empty(B, K, W, halves, block_d, dtype=torch.float16)
    sizes = ck.new_empty(B, K, W, dtype=torch.float32)
    grid, flipped = launch.grid(cdiv(W, BLOCK_W.value), B * K)
    settings = KeySettings(D, block_d, halves, flipped)
    launcher(nsa_topk_window_keys, grid)(
        strided(ck), keys, sizes, W=W, K=K, sign=float((scale > 0) - (scale < 0)), F=settings
    )
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
    q_high, q_low, keys, sizes, first_row, low, end, hi, W, BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """The ranking [M, SLOTS_2] of blocks low .. end - 1, and whether it must be repeated. PER_BLOCK
    is the windows per block, padded to a power of two. With PARTIAL, rows see windows before hi
    only, also inside of candidates."""
    M: tl.constexpr = end.shape[0]
    P: tl.constexpr = F.s // F.d if F.s > F.d else 1
    ROOM: tl.constexpr = BLOCK_N // (
        COLUMNS if COLUMNS > 4 else (F.SLOTS_2 if F.SLOTS_2 > 4 else 4)
    )
    # causally, queries see all windows of candidates
    PARTIAL: tl.constexpr = F.DOCUMENTS and not F.CAUSAL
    SLICE: tl.constexpr = F.PER_BLOCK if F.PER_BLOCK < ROOM else ROOM
    CHUNK: tl.constexpr = BLOCK_N // SLICE
    STEPS: tl.constexpr = F.PER_BLOCK // SLICE
    running = start(M, F.SLOTS_2, COLUMNS, DEPTH)
    running_max = tl.full([M, CHUNK], NO_SCORE, tl.float32)
    block, window = window_of_column(BLOCK_N, SLICE)
    chunks = tl.cdiv(tl.max(end, 0), CHUNK)
    for step in range(tl.min(low, 0) // CHUNK * STEPS, chunks * STEPS):
        c0, j0 = step // STEPS * CHUNK, step % STEPS * SLICE
        w = first_window(permute_blocks(c0 + block, COLUMNS), F.d, F.s) + (j0 + window)
        is_window = (w < W) & (j0 + window < P)
        row = first_row + w
        k_high = load_rows(keys, row * (F.HALVES * F.BLOCK_D), F.BLOCK_D, F.BLOCK_D, is_window)
        x = tl.dot(q_high, tl.trans(k_high))
        if F.HALVES == 2:
            k_low = load_rows(
                keys + F.BLOCK_D, row * (2 * F.BLOCK_D), F.BLOCK_D, F.BLOCK_D, is_window
            )
            x = tl.dot(q_low, tl.trans(k_high), x)
            x = tl.dot(q_high, tl.trans(k_low), x)
        size = tl.load(sizes + row, mask=is_window, other=1.0)
        x = x * size[None] + tl.where(is_window, 0.0, NO_SCORE)[None]
        if PARTIAL:
            x = tl.where(w[None] < hi[:, None], x, NO_SCORE)
        score = largest_of_blocks(x, SLICE)
        if STEPS > 1:
            score = tl.maximum(score, tl.where(j0 == 0, NO_SCORE, running_max))
            running_max = score
        if j0 == F.PER_BLOCK - SLICE:
            c = chunk_blocks(c0, CHUNK, COLUMNS)
            candidate = (c[None] >= low[:, None]) & (c[None] < end[:, None])
            running = fold(running, tl.where(candidate, score, NO_SCORE), c, COLUMNS)
    return finish(running, F.SLOTS, F.SLOTS_2, COLUMNS)


@triton.jit(do_not_specialize=LENGTHS)
def nsa_topk_max(
    q, keys, sizes, out, leader_indices, starts, documents, first_token, T, C, W, RANKS,
    F: tl.constexpr,
):  # fmt: skip
    """One program: the rankings of BLOCK_M groups of tokens of one row and ranking head, by the
    largest product of the mean of G query heads with a key of a block's windows."""
    tile, line, tiles, _lines = grid_position(F.FLIPPED)
    tile = tiles - 1 - tile
    b, r = (line // RANKS).to(tl.int64), (line % RANKS).to(tl.int64)
    _position, token, low, end, hi, q_high, q_low = mean_queries(
        q, starts, documents, first_token, tile, b, r, T, C, W, F
    )
    first_row = (line // F.RANKS_PER_KV).to(tl.int64) * W
    indices, missed = best_by_max(
        q_high, q_low, keys, sizes, first_row, low, end, hi, W, F.BLOCK_N, F.COLUMNS, F.DEPTH, F
    )
    if F.DEPTH < F.SLOTS and F.COLUMNS > 0:  # noqa: SIM102
        if missed > 0:
            indices, missed = best_by_max(
                q_high, q_low, keys, sizes, first_row, low, end, hi, W, F.BLOCK_N, 0, 0, F
            )
    write_block_indices(indices, out, leader_indices, b, r, token, T, RANKS, F)
