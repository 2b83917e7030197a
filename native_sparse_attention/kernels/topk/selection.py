"""Ranking of blocks: scores are computed tile by tile and folded into a running top n on chip.

A tile ranks the leaders of groups of STRIDE tokens (every token where STRIDE = 1). Every token of a
group gets the block indices of its leader. By `importance`, a block's score is

* "logits": the product of the mean query of the heads that rank together with the block's mean key;
* "max": the largest product of the mean query with a key of the block's windows;
* "head_max": the largest product of any of these heads' queries with such a key;
* "probs": the block's softmax mass: the probabilities of the windows that overlap the block, each
  times the number of tokens they share, summed over the heads that rank together.

`ops/reference.py` is the specification. Kernels omit a positive factor of all scores of a query: it
does not change the ranking. Means are float32, split into two float16 halves, whose products tensor
cores sum in float32; a product is accurate to 2^-21 of the product of its rows' largest elements.
Of "max", one half is exact for keys of 16 bits, and mean queries are rounded to it. It is exact for
8-bit integers, too, whose products are: `ranking_bits=8` ranks to the bit as the specification.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...blocks import GROUP
from ...varlen import Documents
from ..common import launch
from ..common import primitives as steps
from ..common.launch import Layout, Plan, cdiv, layout, next_power_of_2, strided
from ..common.precompile import launcher
from . import topn
from .topn import NO_SCORE, first_window

# compile-time settings of the kernels that rank. A block has WINDOWS windows, and PER_BLOCK keys
# (of probs: windows), padded to a power of two; with LARGEST they are those of its windows. HEADS
# pads G where each has scores of its own, or is 1. Of probs a window covers WINDOW tokens; of the
# others: keys of HALVES, ONE_HALF where queries are exact in float16. Candidates lie in GROUPS
# groups of GROUP blocks of each query, if not 0
Settings = namedtuple(
    "Settings",
    "G RANKS_PER_KV D BLOCK_D BLOCK_M BLOCK_N COLUMNS DEPTH MERGE_N SLOTS SLOTS_2 WINDOWS "
    "PER_BLOCK d s INITIAL LOCAL STRIDE CAUSAL DOCUMENTS FLIPPED INTERPOLATED ONE_HALF HALVES "
    "NUM_STAGES_Q LARGEST WINDOW HEADS WARPS WIDE CAP GROUPS GROUP QUANTIZED",
)
# of the kernel that converts keys, BLOCK_C a program; with QUANTIZED above 0 so many have one size
KeySettings = namedtuple(
    "KeySettings",
    "D BLOCK_D HALVES FLIPPED BLOCK_C BLOCK_S WINDOWS d s INTERPOLATED QUANTIZED BITS",
)
BLOCK_C = 16


@triton.jit
def window_weight(c, j, end, d: tl.constexpr, s: tl.constexpr, BLOCK_S: tl.constexpr,
                  INTERPOLATED: tl.constexpr):  # fmt: skip
    """Weight of window j of each block c [C] in the block's mean key; 0 from window `end` on."""
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


@triton.jit(do_not_specialize=["first_token", "T", "C", "W"])
def nsa_topk_block_keys(
    ck, keys, sizes, documents, first_token, T, C, W, K, scale, F: tl.constexpr
):
    """One program: mean keys of a tile of blocks of one row and KV head, as [HALVES, BLOCK_D] and
    the power of two that undoes their scaling. Program 1 of axis 2 writes the keys for queries that
    do not see the window after the block: the block's last window replaces that window."""
    tile_index, line, _tiles, lines = steps.grid_position(F.FLIPPED)
    b, h = (line // K).to(tl.int64), (line % K).to(tl.int64)
    c = tile_index * F.BLOCK_C + tl.arange(0, F.BLOCK_C)
    first = first_window(c, F.d, F.s)
    lo = c * 0
    end = lo + W
    if documents is not None:
        # bounds at queries: those of blocks that no query sees do not matter
        lo, end = steps.document_interval(
            lo, end, c * F.s - first_token, T, documents.first + b * T, documents.last + b * T, F.d
        )
    last = end - 1
    if tl.program_id(2) == 1:
        last = tl.minimum(last, first + F.WINDOWS - 1)

    k_sum = tl.full([F.BLOCK_C, F.BLOCK_D], 0.0, tl.float32)
    count = tl.full([F.BLOCK_C], 0.0, tl.float32)
    # interpolated: sums of differences from the first key, so the mean of equal keys is exact
    origin = k_sum
    if F.INTERPOLATED:
        w = tl.minimum(tl.maximum(first, lo), last)
        rows = b * ck.b + h * ck.h + w.to(tl.int64) * ck.n
        origin = steps.load_rows(ck.ptr, rows, F.D, F.BLOCK_D, (c < C) & (w < W)).to(tl.float32)
    MARGIN: tl.constexpr = 1 if F.INTERPOLATED else 0
    for j in range(-MARGIN, F.WINDOWS + MARGIN):
        w = first + j
        weight = window_weight(c, j, end, F.d, F.s, F.BLOCK_S, F.INTERPOLATED)
        if F.INTERPOLATED:
            w = tl.minimum(tl.maximum(w, lo), last)
        rows = b * ck.b + h * ck.h + w.to(tl.int64) * ck.n
        tile = steps.load_rows(ck.ptr, rows, F.D, F.BLOCK_D, (c < C) & (w < W)).to(tl.float32)
        if F.INTERPOLATED:
            tile -= origin
        k_sum += weight[:, None] * tile
        count += weight
    key = (origin + k_sum / tl.maximum(count, 1.0)[:, None]) * (1.0 if F.BITS == 4 else scale)

    row = (tl.program_id(2) * lines + line).to(tl.int64) * C + c
    if F.QUANTIZED > 0:
        key, block_size = steps.quantize(key, F.QUANTIZED, F.BITS)
    if F.BITS == 4:  # 16 values round to other ones with another sign
        key *= scale
    high, low, size = steps.two_halves(key)
    if F.QUANTIZED > 0:
        size *= block_size
    offsets = row[:, None] * (F.HALVES * F.BLOCK_D) + tl.arange(0, F.BLOCK_D)[None]
    tl.store(keys + offsets, high, mask=(c < C)[:, None])
    if F.HALVES == 2:
        tl.store(keys + offsets + F.BLOCK_D, low, mask=(c < C)[:, None])
    tl.store(sizes + row, size, mask=c < C)


@triton.jit
def products(q_high, q_low, keys, sizes, row, is_key, F: tl.constexpr):
    """q.k [M, N] of rows [N] of `keys` in float32, smallest terms first."""
    width: tl.constexpr = F.HALVES * F.BLOCK_D
    k_high = steps.load_rows(keys, row * width, F.BLOCK_D, F.BLOCK_D, is_key)
    if F.HALVES == 2:
        k_low = steps.load_rows(keys + F.BLOCK_D, row * width, F.BLOCK_D, F.BLOCK_D, is_key)
        size = tl.load(sizes + row, mask=is_key, other=0.0)
        x = tl.dot(q_high, tl.trans(k_low))
        if not F.ONE_HALF:  # else q_low is zero
            x = tl.dot(q_low, tl.trans(k_high), x)
        x = tl.dot(q_high, tl.trans(k_high), x)
    else:
        size = tl.load(sizes + row, mask=is_key, other=0.0)
        x = tl.dot(q_high, tl.trans(k_high))
    return x * size[None]


@triton.jit
def best_blocks(
    inputs, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, F: tl.constexpr
):
    """The ranking [M, SLOTS_2] of blocks low .. end - 1, and whether it must be repeated. A step
    scores SLICE keys, of N, of each of CHUNK blocks, for ROWS queries. With PARTIAL, rows see
    windows before hi only, also inside of candidates; causally they see all windows of candidates.
    """
    q_high, q_low, keys, sizes, first_row, edge_row, position, low, end, hi, N, groups = inputs
    M: tl.constexpr = end.shape[0]
    ROWS: tl.constexpr = M * F.HEADS
    KEYS: tl.constexpr = F.WINDOWS if F.LARGEST else 1
    PARTIAL: tl.constexpr = F.LARGEST and F.DOCUMENTS and not F.CAUSAL
    GROUPS: tl.constexpr = F.GROUPS
    # a query's edge block holds the last windows that it sees
    EDGES: tl.constexpr = F.INTERPOLATED and F.CAUSAL
    ROOM: tl.constexpr = BLOCK_N // (
        COLUMNS if COLUMNS > 4 else (F.SLOTS_2 if F.SLOTS_2 > 4 else 4)
    )
    SLICE: tl.constexpr = F.PER_BLOCK if F.PER_BLOCK < ROOM else ROOM
    CHUNK: tl.constexpr = BLOCK_N // SLICE
    STEPS: tl.constexpr = F.PER_BLOCK // SLICE
    running = topn.start(M, F.SLOTS_2, COLUMNS, DEPTH)
    running_max = tl.full([ROWS, CHUNK], NO_SCORE, tl.float32)
    # the block of a chunk and the key of a slice that each column scores. A thread of an MMA holds
    # columns 2 i and 2 i + 1 of every 8: they are of one block
    column = tl.arange(0, BLOCK_N)
    block = column
    key = column * 0
    if SLICE > 1:
        HALF: tl.constexpr = SLICE // 2
        block = column // 8 // HALF * 4 + column % 8 // 2
        key = column // 8 % HALF * 2 + column % 2
    first_edge = (tl.min(position, 0) // F.d - F.WINDOWS) * F.d // F.s
    chunks = tl.cdiv(tl.max(end, 0), CHUNK)
    for step in range(tl.min(low, 0) // CHUNK * STEPS, chunks * STEPS):
        c0, j0 = step // STEPS * CHUNK, step % STEPS * SLICE
        key_block = topn.permute_blocks(c0 + block, COLUMNS)
        window = first_window(key_block, F.d, F.s)
        n = (window if F.LARGEST else key_block) + (j0 + key)
        is_key = (n < N) & (j0 + key < KEYS)
        x = products(q_high, q_low, keys, sizes, first_row + n, is_key, F)
        if EDGES:  # noqa: SIM102
            if c0 + CHUNK > first_edge:
                edge = products(q_high, q_low, keys, sizes, edge_row + n, is_key, F)
                is_edge = (window + F.WINDOWS)[None] == (position // F.d)[:, None]
                x = tl.where(is_edge, edge, x)
        if F.LARGEST:
            x += tl.where(is_key, 0.0, NO_SCORE)[None]
        if PARTIAL:
            x = tl.reshape(x, [M, F.HEADS, BLOCK_N])
            x = tl.where(n[None, None] < hi[:, None, None], x, NO_SCORE)
            x = tl.reshape(x, [ROWS, BLOCK_N])
        score = x
        if SLICE > 1:  # the largest of each block [ROWS, CHUNK]
            score = tl.reshape(x, [ROWS, BLOCK_N // (4 * SLICE), SLICE // 2, 4, 2])
            score = tl.reshape(tl.max(tl.max(score, 4), 2), [ROWS, CHUNK])
        if STEPS > 1:
            score = tl.maximum(score, tl.where(j0 == 0, NO_SCORE, running_max))
            running_max = score
        if j0 == F.PER_BLOCK - SLICE:
            best = score
            if F.HEADS > 1:
                best = tl.max(tl.reshape(score, [M, F.HEADS, CHUNK]), 1)
            c = topn.permute_blocks(c0 + tl.arange(0, CHUNK), COLUMNS)
            candidate = (c[None] >= low[:, None]) & (c[None] < end[:, None])
            if F.GROUPS > 0:
                is_kept = candidate & (c < 0)[None]
                for i in tl.static_range(GROUPS):
                    is_kept |= tl.load(groups + i)[:, None] == (c // F.GROUP)[None]
                candidate &= is_kept
            running = topn.fold(running, tl.where(candidate, best, NO_SCORE), c, COLUMNS)
    return topn.finish(running, F.SLOTS, F.SLOTS_2, COLUMNS)


@triton.jit(do_not_specialize=topn.LENGTHS)
def nsa_topk_logits(
    q, keys, sizes, groups, out, leader_indices, starts, documents, first_token, T, C, W, RANKS,
    F: tl.constexpr,
):  # fmt: skip
    """One program: the rankings of a tile of groups of tokens of one row and ranking head, which is
    the mean of G query heads, or HEADS rows of BLOCK_M. Reads the queries, with NUM_STAGES_Q heads
    in flight, and the keys of their candidates. RANKS_PER_KV ranking heads share a KV head."""
    tile, line, tiles, lines = steps.grid_position(F.FLIPPED)
    tile = tiles - 1 - tile  # tiles with most candidates first
    b, r = (line // RANKS).to(tl.int64), (line % RANKS).to(tl.int64)
    if starts is not None:
        first_token = tl.load(starts + b).to(tl.int32)
    LEADERS: tl.constexpr = F.BLOCK_M // F.HEADS
    index = tile * LEADERS + tl.arange(0, LEADERS)
    position, token, ranked = steps.leaders(index, first_token, T, F.STRIDE)
    low, end, _lo, hi = topn.candidate_ranges(position, token, ranked, documents, b, T, C, W, F)

    q_sum = tl.full([F.BLOCK_M, F.BLOCK_D], 0.0, tl.float32)
    row = tl.arange(0, F.BLOCK_M)
    _, row_token, is_row = steps.leaders(tile * LEADERS + row // F.HEADS, first_token, T, F.STRIDE)
    for g in tl.range(0, F.G if F.HEADS == 1 else 1, num_stages=F.NUM_STAGES_Q):
        head = g + tl.minimum(row % F.HEADS, F.G - 1)  # padding is the last head again
        rows = b * q.b + row_token.to(tl.int64) * q.n + (r * F.G + head) * q.h
        q_sum += steps.load_rows(q.ptr, rows, F.D, F.BLOCK_D, is_row).to(tl.float32)
    if F.QUANTIZED:
        q_sum, _ = steps.quantize(q_sum, F.HEADS)
    q_high, q_low, _ = steps.two_halves(q_sum, F.HEADS)

    N = W if F.LARGEST else C
    first_row = (line // F.RANKS_PER_KV).to(tl.int64) * N
    edge_row = first_row + (lines // F.RANKS_PER_KV).to(tl.int64) * N
    row = (b * T + tl.minimum(tl.maximum(token, 0), T - 1)) * RANKS + r
    groups += row * F.GROUPS
    inputs = q_high, q_low, keys, sizes, first_row, edge_row, position, low, end, hi, N, groups
    indices, missed = best_blocks(inputs, F.BLOCK_N, F.COLUMNS, F.DEPTH, F)
    if F.DEPTH < F.SLOTS and F.COLUMNS > 0:  # noqa: SIM102
        if missed > 0:
            indices, missed = best_blocks(inputs, F.MERGE_N, 0, 0, F)
    topn.write_block_indices(indices, out, leader_indices, b, r, token, T, RANKS, F)


@triton.jit
def block_sums(p, j, NUM_EARLIER: tl.constexpr, F: tl.constexpr):
    """Scores [TOKENS, CHUNK] that windows j [SLICE] of a chunk's blocks add to the block in which
    they end, to the block before it, and so on. p is [CHUNK, SLICE, TOKENS, PARTIALS]."""
    sums = ()
    for g in tl.static_range(NUM_EARLIER + 1):
        # tokens that block c shares with window j of the WINDOWS that end in block c + g
        overlap = j * 0 + 1
        if F.s >= F.d:
            stop = (j + (g * F.WINDOWS + 1)) * F.d  # the window's end
            overlap = tl.maximum(tl.minimum(stop, F.s) - tl.maximum(stop - F.WINDOW, 0), 0)
        overlap = tl.where(j < F.WINDOWS, overlap, 0).to(tl.float32)
        sums += (tl.trans(tl.sum(tl.sum(p * overlap[None, :, None, None], 1), 2)),)
    return sums


@triton.jit
def gather_columns(x, n):
    """Columns n [N] of x [M, N]."""
    return tl.gather(x, tl.broadcast_to(n[None], x.shape), 1)


@triton.jit
def complete_scores(sums, carried):
    """Scores [TOKENS, CHUNK] that are complete with these `block_sums`. They are shifted by one
    column for each block that windows reach back. Incomplete scores at the end of the chunk are
    `carried` for the next chunk."""
    CHUNK: tl.constexpr = sums[0].shape[1]
    n = tl.arange(0, CHUNK)
    score = sums[0]
    new_carried = ()
    for g in tl.static_range(len(carried)):
        shifted = tl.where((n == CHUNK - 1)[None], carried[g], score)
        new_carried += (score,)
        score = gather_columns(shifted, (n - 1) & (CHUNK - 1)) + sums[g + 1]
    return score, new_carried


@triton.jit
def best_by_probs(
    inputs, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, F: tl.constexpr
):
    """The ranking [TOKENS, SLOTS_2] of blocks low .. end - 1, and whether it must be repeated.
    Tokens see windows lo .. hi - 1; all tokens see windows `latest` .. `fewest` - 1. `lse_log2` is
    by row. PER_BLOCK is the windows per block, padded to a power of two; a step takes SLICE."""
    q_tile, lse_log2, lo, hi, ck, k_base, low, end, fewest, latest, W, scale_log2, cap = inputs
    TOKENS: tl.constexpr = end.shape[0]
    # blocks that a window overlaps before the one in which it ends
    NUM_EARLIER: tl.constexpr = (F.WINDOW + F.s - F.d - 1) // F.s if F.s >= F.d else 0
    # Triton before 3.6 has no `min` of constexprs
    PARTIALS: tl.constexpr = (F.HEADS + 1) // 2 if F.HEADS < 7 else 4
    PAIR: tl.constexpr = 1 if F.HEADS == 1 else 2
    EIGHTS: tl.constexpr = F.HEADS // (PAIR * PARTIALS)
    ROOM: tl.constexpr = BLOCK_N // (COLUMNS if COLUMNS > 0 else F.SLOTS_2)
    SLICE: tl.constexpr = F.PER_BLOCK if F.PER_BLOCK < ROOM else ROOM
    CHUNK: tl.constexpr = BLOCK_N // SLICE
    STEPS: tl.constexpr = F.PER_BLOCK // SLICE
    running = topn.start(TOKENS, F.SLOTS_2, COLUMNS, DEPTH)
    carried = ()
    sums = ()
    for g in tl.static_range(NUM_EARLIER + 1):
        sums += (tl.zeros([TOKENS, CHUNK], tl.float32),)
        if g < NUM_EARLIER:
            carried += (tl.zeros([TOKENS, CHUNK], tl.float32),)

    # the window of a step that each row of its tile holds. A thread of an MMA has rows r and r + 8
    # of every 16 WARPS rows. They hold consecutive windows, so that the thread sums them alone.
    # With fewer rows, windows are in order: there sorting them gives wrong results with Triton 3.6
    # on an H200 (8 warps, 32 rows)
    ROWS: tl.constexpr = 16 * F.WARPS
    u = tl.arange(0, BLOCK_N)
    if BLOCK_N >= ROWS:
        thread = u // 16 % F.WARPS * 8 + u % 8
        u = thread * (BLOCK_N // (8 * F.WARPS)) + u // ROWS * 2 + u // 8 % 2
    chunks = tl.cdiv(tl.max(end, 0) + NUM_EARLIER, CHUNK)
    for step in range(tl.min(low, 0) // CHUNK * STEPS, chunks * STEPS):
        c0, j0 = step // STEPS * CHUNK, step % STEPS * SLICE
        w = first_window(c0 + u // SLICE, F.d, F.s) + (j0 + u % SLICE)
        rows = steps.large(tl.minimum(w, W - 1), F.WIDE) * ck.n
        every = tl.full([BLOCK_N], True, tl.int1)
        k_tile = steps.load_rows(ck.ptr + k_base, rows, F.D, F.BLOCK_D, every)
        x = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
        x *= scale_log2
        if F.CAP:
            x = steps.soft_capped(x, cap)
        x -= lse_log2[None]
        if W > 0:  # always true: the compiler puts the next step's loads before a branch
            last = first_window(c0 + (CHUNK - 1), F.d, F.s) + F.PER_BLOCK
            if (last > fewest) | (first_window(c0, F.d, F.s) < latest):
                visible = (w[:, None] >= lo[None]) & (w[:, None] < hi[None])
                x = tl.reshape(x, [BLOCK_N, TOKENS, F.HEADS])
                x = tl.where(visible[:, :, None], x, NO_SCORE)
                x = tl.reshape(x, [BLOCK_N, F.BLOCK_M])
            # sum the heads that one thread of an MMA holds: columns 2 i and 2 i + 1 of every 8
            p = tl.reshape(tl.exp2(x), [BLOCK_N, TOKENS, EIGHTS, PARTIALS, PAIR])
            p = tl.reshape(tl.sum(tl.sum(p, 4), 2), [BLOCK_N, TOKENS * PARTIALS])
            if BLOCK_N >= ROWS:  # in the order of their windows
                p = tl.reshape(p, [BLOCK_N // ROWS, F.WARPS, 2, 8, TOKENS * PARTIALS])
                p = tl.reshape(tl.permute(p, [1, 3, 0, 2, 4]), [BLOCK_N, TOKENS * PARTIALS])
            p = tl.reshape(p, [CHUNK, SLICE, TOKENS, PARTIALS])
            step_sums = block_sums(p, j0 + tl.arange(0, SLICE), NUM_EARLIER, F)
            if STEPS > 1:
                new_sums = ()
                for g in tl.static_range(NUM_EARLIER + 1):
                    new_sums += (tl.where(j0 == 0, 0.0, sums[g]) + step_sums[g],)
                sums = new_sums
                step_sums = new_sums
            if j0 == F.PER_BLOCK - SLICE:
                score, carried = complete_scores(step_sums, carried)
                c = topn.permute_blocks(c0 + tl.arange(0, CHUNK), COLUMNS)
                if COLUMNS > 1:
                    score = gather_columns(score, c - c0)
                c -= NUM_EARLIER
                candidate = (c[None] >= low[:, None]) & (c[None] < end[:, None])
                score = tl.where(candidate, score, NO_SCORE)
                # a sort key has no bit for the sign of a block
                running = topn.fold(running, score, tl.maximum(c, 0), COLUMNS)
    return topn.finish(running, F.SLOTS, F.SLOTS_2, COLUMNS)


@triton.jit(do_not_specialize=topn.LENGTHS)
def nsa_topk_softmax_mass(
    q, ck, lse, out, leader_indices, starts, documents, first_token, T, C, W, RANKS, scale_log2,
    cap, F: tl.constexpr,
):  # fmt: skip
    """One program: the rankings of a tile of groups of tokens of one row and ranking head, which
    sums the scores of G query heads. Reads their queries, log-sum-exp and visible windows."""
    tile, line, tiles, _lines = steps.grid_position(F.FLIPPED)
    tile = tiles - 1 - tile
    b, r = (line // RANKS).to(tl.int64), (line % RANKS).to(tl.int64)
    if starts is not None:
        first_token = tl.load(starts + b).to(tl.int32)
    GROUPS: tl.constexpr = F.BLOCK_M // F.HEADS
    index = tile * GROUPS + tl.arange(0, GROUPS)
    position, token, ranked = steps.leaders(index, first_token, T, F.STRIDE)
    low, end, lo, hi = topn.candidate_ranges(position, token, ranked, documents, b, T, C, W, F)
    # all tokens see the windows `latest` .. `fewest` - 1
    fewest, latest = tl.min(tl.where(ranked, hi, W), 0), tl.max(tl.where(ranked, lo, 0), 0)
    hi = tl.where(ranked, hi, 0)

    # rows are leaders x the G query heads of ranking head r, padded to HEADS
    row = tl.arange(0, F.BLOCK_M)
    _, row_token, ranked = steps.leaders(tile * GROUPS + row // F.HEADS, first_token, T, F.STRIDE)
    head, real = r * F.G + row % F.HEADS, ranked & (row % F.HEADS < F.G)
    q_rows = b * q.b + row_token.to(tl.int64) * q.n + head * q.h
    q_tile = steps.load_rows(q.ptr, q_rows, F.D, F.BLOCK_D, real)
    row = (b * T + row_token) * (RANKS * F.G) + head
    lse_log2 = tl.load(lse + row, mask=real, other=0.0) * 1.4426950408889634
    # rows that do not exist, or see no window, have probability 0
    lse_log2 = tl.where(real & (lse_log2 > NO_SCORE), lse_log2, float("inf"))

    k_base = b * ck.b + r // F.RANKS_PER_KV * ck.h
    inputs = q_tile, lse_log2, lo, hi, ck, k_base, low, end, fewest, latest, W, scale_log2, cap
    indices, missed = best_by_probs(inputs, F.BLOCK_N, F.COLUMNS, F.DEPTH, F)
    if F.DEPTH < F.SLOTS and F.COLUMNS > 0:  # noqa: SIM102
        if missed > 0:
            indices, missed = best_by_probs(inputs, F.MERGE_N, 0, 0, F)
    topn.write_block_indices(indices, out, leader_indices, b, r, token, T, RANKS, F)


@functools.lru_cache(maxsize=1024)
def plan(
    q: Layout, ck: Layout, ranks: int, n: int, num_ranked: int, has_documents: bool, groups: int,
    config: Any, _tuning: Any,
) -> tuple[Plan, Plan]:  # fmt: skip
    """The launch of a ranking and of its keys' conversion."""
    (B, T, H, D), K, dtype = q.shape, ck.shape[2], q.dtype
    G, s, d, stride = H // ranks, config.selection_block_size, config.d, config.selection_stride
    importance, interpolated = config.importance, config.interpolated_importance_score
    tile = launch.topk_tile(importance, D, G, n, dtype, interpolated)
    probs, is_max, block_d = importance == "probs", config.ranks_by_largest, launch.padded(D)
    is_quantized, per_block = config.ranks_by_integers, max(1, s // d)
    halves = 1 if is_quantized or (is_max and dtype != torch.float32) else 2
    rows = next_power_of_2(G) if probs or config.ranks_by_heads else 1
    grid, flipped = launch.grid(cdiv(cdiv(T + stride - 1, stride), tile.block_m // rows), B * ranks)
    settings = Settings(
        G, ranks // K, D, block_d, tile.block_m, tile.block_n, tile.columns, tile.depth,
        tile.block_n if is_max else tile.merge_n, n, max(2, next_power_of_2(n)),
        per_block, 1 if importance == "logits" else next_power_of_2(per_block), d, s,
        config.num_initial_blocks, max(config.num_local_blocks, 1), stride, config.causal,
        has_documents, flipped, interpolated, HALVES=halves, LARGEST=is_max, HEADS=rows,
        ONE_HALF=(G == 1 or config.ranks_by_heads) and dtype != torch.float32,
        WINDOW=config.compress_block_size,
        # query heads that a tile loads at once
        NUM_STAGES_Q=4 if tile.block_m * block_d * dtype.itemsize <= 1 << 14 else 1,
        WARPS=tile.num_warps, WIDE=probs and launch.has_wide_offsets(ck),
        CAP=config.soft_cap is not None, GROUPS=groups, GROUP=GROUP, QUANTIZED=is_quantized,
    )  # fmt: skip
    options = dict(F=settings, num_warps=tile.num_warps, num_stages=tile.num_stages)
    # of "max" the keys are those of windows, and only the sign of the scale matters
    C, unit, scale = num_ranked, s, config.scale_of(D)
    if is_max:
        C, unit, scale = ck.shape[1], d, float((scale > 0) - (scale < 0))
    block_c = max(BLOCK_C, per_block) if is_quantized else BLOCK_C
    keys_grid, flipped = launch.grid(cdiv(C, block_c), B * K, 2 if interpolated else 1)
    key_settings = KeySettings(
        D, block_d, halves, flipped, block_c, next_power_of_2(s), max(1, unit // d), d, unit,
        interpolated, per_block if is_quantized else 0, config.ranking_bits,
    )  # fmt: skip
    key_options = dict(C=C, scale=scale, F=key_settings, num_warps=4 if block_c < 64 else 8)
    return Plan(grid, options), Plan(keys_grid, key_options)


def select_blocks(
    q: Tensor,
    ck: Tensor,
    config: Any,
    *,
    out: Tensor,
    num_ranked: int,
    start: int = 0,
    starts: Tensor | None = None,
    documents: Documents | None = None,
    leaders: Tensor | None = None,
    lse: Tensor | None = None,
    groups: Tensor | None = None,
) -> None:
    """Write to `out` [B T R n] the block indices of q [B T H D] for ck [B W K D], by the settings
    of `config`, an `AttentionConfig`: the top n of the first `num_ranked` blocks. `leaders` [B R n]
    is the ranking of the first query's group if its leader came before this call. `lse` [B T H] is
    that of the compressed branch, for importance="probs". Candidates lie in `groups` [B T R n1] of
    blocks, where these are given."""
    (B, W, K), ranks = ck.shape[:3], out.shape[2]
    if launch.supports_gluon(q):
        from . import largest_sm90

        if largest_sm90.is_supported(q, ranks, config, documents):
            return largest_sm90.select_blocks(
                q, ck, config, out, num_ranked, start, starts, leaders, groups
            )
    num_groups = 0 if groups is None else groups.shape[3]
    facts = num_ranked, documents is not None, num_groups, config, launch.tuning()
    ranking, conversion = plan(layout(q), layout(ck), *out.shape[2:], *facts)
    args: dict[str, Any] = ranking.args | dict(
        q=strided(q), out=out, leader_indices=leaders, starts=starts, documents=documents,
        first_token=start, T=q.shape[1], C=num_ranked, W=W, RANKS=ranks,
    )  # fmt: skip
    if config.importance == "probs":
        launcher(nsa_topk_softmax_mass, ranking.grid)(
            ck=strided(ck), lse=lse, scale_log2=config.scale_of(q.shape[-1]) * launch.LOG2_E,
            cap=launch.cap(config.soft_cap), **args,
        )  # fmt: skip
        return
    F, sets = conversion.args["F"], conversion.grid[2]
    rows = sets, B, K, conversion.args["C"]
    keys = ck.new_empty(*rows, F.HALVES, F.BLOCK_D, dtype=torch.float16)
    sizes = ck.new_empty(rows, dtype=torch.float32)
    launcher(nsa_topk_block_keys, conversion.grid)(
        strided(ck), keys, sizes, None if config.ranks_by_largest else documents,
        first_token=start, T=q.shape[1], W=W, K=K, **conversion.args,
    )  # fmt: skip
    groups = out if groups is None else groups
    launcher(nsa_topk_logits, ranking.grid)(keys=keys, sizes=sizes, groups=groups, **args)


def select_blocks_in_stages(
    q: Tensor, ck: Tensor, k: Tensor, config: Any, *, out: Tensor, num_ranked: int,
    leaders: Tensor | None = None, **places: Any,
) -> None:  # fmt: skip
    """As `select_blocks`, by windows ck of groups of blocks first, then by keys k of tokens.
    `leaders` [B R n1] are the groups of the first query's group of tokens."""
    by_groups, by_tokens = config.stages
    groups = out.new_empty(*out.shape[:3], config.num_selected_groups)
    most = ck.shape[1] * config.d // by_groups.selection_block_size
    select_blocks(q, ck, by_groups, out=groups, num_ranked=most, leaders=leaders, **places)
    select_blocks(q, k, by_tokens, out=out, num_ranked=num_ranked, groups=groups, **places)
