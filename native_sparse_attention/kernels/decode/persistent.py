"""Persistent decode kernel: ranks the KV blocks of a long cache, then reads the selected ones.

One launch runs all stages of a decode step. Each program runs one stage, chosen by its id:

    compressed_split        attention of the compressed branch over one split of the windows, and
                            the scores of the windows
    window_probabilities    softmax probabilities of the windows, with importance="probs"
    rank_blocks             the top-n blocks of a token, by one program or by several
    block_split             attention of the window or the selected branch over one split of blocks
    reduce_and_combine      reduction of the partial results, weighted by the gates

A program that needs the output of another stage loads its other inputs first. Then it waits at
`ready`, a grid barrier of its sequence and KV head, until all `producers` of that stage have
arrived.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...blocks import windows_per_block
from ...config import AttentionConfig
from ...ops import call as calls
from ...ops.reference import quantize_queries
from ..common import launch
from ..common.launch import cdiv, next_power_of_2
from ..common.precompile import launcher
from ..common.primitives import candidates_end, load_rows, quantize, soft_capped, softmax_step
from ..common.tile_configs import MAX_COLUMN_N
from ..selected.branch import keep_valid_blocks
from ..topk import topn
from . import read_all, stages, step
from .kv_cache import cache_offsets, load_page, slot_offsets
from .packed import pack_keys, packed_products, packed_queries

# counters of a sequence and KV head: programs that have finished a stage, and reduce programs that
# have passed their waits
SCORES_DONE, PROBS_DONE, RANKING_DONE, BLOCKS_DONE, REDUCE_STARTED = (
    tl.constexpr(i) for i in range(5)
)
# the scores of a window that `compressed_split` stores: none, the sum of the logits over the query
# heads of a KV head, or one logit per query head
SCORES_NONE, SCORES_SUM, SCORES_PER_HEAD = (tl.constexpr(i) for i in range(3))

# tensor sizes, and splits of the stages. The windows have CMP_SPLITS splits for each of TILES query
# tiles, of which CMP_PARTIALS give partial results. The sliding window has WINDOW_SPLITS splits of
# WINDOW_SPLIT_BLOCKS blocks, the selected branch SELECTED_SPLITS. A token has RANK_PROGRAMS
NUMBERS = (
    "B T W MEMORY TILES CMP_SPLITS CMP_PARTIALS PROB_SPLITS WINDOW_SPLITS WINDOW_SPLIT_BLOCKS "
    "SELECTED_SPLITS SELECTED_SPLIT_BLOCKS REDUCE_PROGRAMS RANK_PROGRAMS SCORE_COLUMNS"
)
Call = step.tuple_type("Call", step.TENSORS + NUMBERS)


@triton.jit
def first_phase(counter, programs, WARMUP: tl.constexpr):
    """The phase in which a program starts: 1 (wait, then work), or with WARMUP, if it would have to
    wait now, 0: it first executes the code that follows the wait with all loads and stores masked,
    which loads the instructions into the instruction cache."""
    phase = 1
    if WARMUP:
        phase = (tl.atomic_add(counter, 0, sem="relaxed") >= programs).to(tl.int32)
    return phase


@triton.jit
def store_scores(call, row, x, n0, n, num_windows, valid, BLOCK_WINDOWS: tl.constexpr):
    """Write scores x [M, N] of windows n; with BLOCK_WINDOWS the largest of each block."""
    scores, is_stored = call.work.scores + row[:, None] * call.SCORE_COLUMNS, n < num_windows
    if BLOCK_WINDOWS > 0:
        M: tl.constexpr = x.shape[0]
        N: tl.constexpr = x.shape[1]
        x = tl.where(is_stored[None], x, topn.NO_SCORE)
        x = tl.max(tl.reshape(x, [M, N // BLOCK_WINDOWS, BLOCK_WINDOWS]), 2)
        n = n0 // BLOCK_WINDOWS + tl.arange(0, N // BLOCK_WINDOWS)
        is_stored = n * BLOCK_WINDOWS < num_windows
    tl.store(scores + n[None], x, mask=valid[:, None] & is_stored[None])


@triton.jit
def compressed_split(call, split, tile, b, h, F: tl.constexpr):
    """Attention of the compressed branch over one split of the windows, for one sequence, KV head
    and tile of BLOCK_M (token, query head) rows; split 0 also reads the memory. Writes the partial
    result (not with ONE_SOFTMAX) and, by SCORE_MODE, the scores of the windows. Queries and keys
    are I wide; a KV head has CMP_G queries, 1 where one ranks for its head group. With QUANTIZED
    above 0 queries are 8-bit integers, and so are keys, so many of one size. With PACKED above 0 so
    many keys of a block are packed, and queries are rounded here."""
    length = tl.load(call.cache.lengths + b).to(tl.int32)
    TOKENS: tl.constexpr = F.BLOCK_M // F.PADDED_G
    ATTEND: tl.constexpr = not F.ONE_SOFTMAX
    row = tl.arange(0, F.BLOCK_M)
    t, g = tile * TOKENS + row // F.PADDED_G, row % F.PADDED_G
    valid = (t < call.T) & (g < F.CMP_G)
    window_end = (length + t) // F.d
    q_offsets = b * call.cq.b + t.to(tl.int64) * call.cq.n + (h * F.CMP_G + g) * call.cq.h
    if F.PACKED > 0:
        ROWS: tl.constexpr = F.PADDED_G if F.BY_HEADS and F.SCORE_MODE == SCORES_SUM else 1
        q_tile = packed_queries(call.cq.ptr, q_offsets, valid, ROWS, F.I, F.BLOCK_I)
    else:
        q_tile = load_rows(call.cq.ptr, q_offsets, F.I, F.BLOCK_I, valid)

    m = tl.full([F.BLOCK_M], topn.NO_SCORE, tl.float32)
    l = tl.full([F.BLOCK_M], 0.0, tl.float32)
    acc = tl.full([F.BLOCK_M, F.BLOCK_E], 0.0, tl.float32)
    if ATTEND and split == 0:
        for n0 in range(0, call.MEMORY, F.BLOCK_N):
            n = n0 + tl.arange(0, F.BLOCK_N)
            k_offsets = h * call.mem_k.h + n.to(tl.int64) * call.mem_k.n
            v_offsets = h * call.mem_v.h + n.to(tl.int64) * call.mem_v.n
            k_tile = load_rows(call.mem_k.ptr, k_offsets, F.I, F.BLOCK_I, n < call.MEMORY)
            v_tile = load_rows(call.mem_v.ptr, v_offsets, F.E, F.BLOCK_E, n < call.MEMORY)
            x = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * call.scale_log2
            if F.CAP:
                x = soft_capped(x, call.cap)
            x = tl.where((n < call.MEMORY)[None], x, topn.NO_SCORE)
            acc, m, l = softmax_step(x, v_tile, acc, m, l)

    # windows past it may be unwritten
    count = tl.load(call.cache.counts + b).to(tl.int32) if call.cache.counts is not None else call.T
    num_windows = tl.minimum((length + count - 1) // F.d, call.W)
    if F.PACKED > 0:  # of complete blocks
        num_windows = num_windows // F.PACKED * F.PACKED
    if F.ONE_SOFTMAX and F.STRIDE > 1:  # scores are read where a token leads its group
        leader = (length + count - 1) // F.STRIDE * F.STRIDE
        num_windows *= (leader >= length).to(tl.int32)
    split_size = tl.cdiv(tl.cdiv(num_windows, F.BLOCK_N), call.CMP_SPLITS) * F.BLOCK_N
    end = tl.minimum((split + 1) * split_size, num_windows)
    for n0 in tl.range(split * split_size, end, F.BLOCK_N, num_stages=F.STAGES):
        n = n0 + tl.arange(0, F.BLOCK_N)
        clamped = tl.minimum(n, num_windows - 1)
        if F.PACKED > 0:
            block = b * 0 + n0 // F.PACKED
            logits, size = packed_products(
                q_tile, call.ck, h * call.ck.h, block, b, call.cache, F.PACKED, F.I,
                F.WINDOWS_PER_PAGE // F.PACKED,
            )  # fmt: skip
        else:
            k_ptr = call.ck.ptr + h * call.ck.h
            k_offsets = cache_offsets(
                clamped, b, call.ck.b, call.ck.n, call.cache, F.WINDOWS_PER_PAGE
            )
            k_tile = load_rows(k_ptr, k_offsets, F.I, F.BLOCK_I, n < num_windows)
        if ATTEND:
            v_ptr = call.cv.ptr + h * call.cv.h
            v_offsets = cache_offsets(
                clamped, b, call.cv.b, call.cv.n, call.cache, F.WINDOWS_PER_PAGE
            )
            v_tile = load_rows(v_ptr, v_offsets, F.E, F.BLOCK_E, n < num_windows)
        scale = call.scale_log2
        if F.QUANTIZED > 0:
            integers, size = quantize(k_tile.to(tl.float32), F.QUANTIZED)
            k_tile = integers.to(tl.float16)
        if F.QUANTIZED + F.PACKED > 0:
            scale = size[None] * ((scale > 0).to(tl.float32) - (scale < 0).to(tl.float32))
        if F.PACKED == 0:
            logits = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        logits *= scale
        x = logits
        if F.CAP:
            x = soft_capped(x, call.cap)
        if F.SCORE_MODE == SCORES_SUM:
            score = tl.sum(tl.reshape(logits, [TOKENS, F.PADDED_G, F.BLOCK_N]), 1)
            if F.BY_HEADS:
                score = tl.where(valid[:, None], logits, topn.NO_SCORE)
                score = tl.max(tl.reshape(score, [TOKENS, F.PADDED_G, F.BLOCK_N]), 1)
            token = tile * TOKENS + tl.arange(0, TOKENS)
            score_row, is_row = (b * call.T + token) * call.heads.K + h, token < call.T
        elif F.SCORE_MODE == SCORES_PER_HEAD:
            score, is_row = x if F.PROBS else logits, valid
            score_row = (b * call.T + t) * (call.heads.K * F.G) + h * F.G + g
        if F.SCORE_MODE != SCORES_NONE:
            store_scores(call, score_row, score, n0, n, num_windows, is_row, F.BLOCK_WINDOWS)
        if ATTEND:
            x = tl.where(n[None] < window_end[:, None], x, topn.NO_SCORE)
            acc, m, l = softmax_step(x, v_tile, acc, m, l)

    if ATTEND:
        out_row = ((split * call.B + b) * call.T + t) * (call.heads.K * F.G) + h * F.G + g
        step.store_partial(call, out_row, acc, m, l, valid, F)


@triton.jit
def window_probabilities(call, ready, producers, split, b, r, t, F: tl.constexpr):
    """Softmax probabilities of one split of the windows for token t and ranking head r: the sum
    over the heads that share the ranking. Reads their logits and the lse of partial results."""
    window_end = tl.minimum((tl.load(call.cache.lengths + b).to(tl.int32) + t) // F.d, call.W)
    if call.cache.counts is not None:
        window_end = tl.where(t < tl.load(call.cache.counts + b), window_end, 0)
    token = (b * call.T + t) * call.heads.RANKS + r
    g = tl.arange(0, F.PADDED_G // F.RANKS_PER_KV)
    row, valid = token * F.GROUP + g, g < F.GROUP
    cmp_split = tl.arange(0, F.PADDED_CMP_SPLITS)
    step.wait(ready, producers)
    mask = (cmp_split < call.CMP_SPLITS)[:, None] & valid[None]
    split_stride = call.B * call.T * call.heads.H
    lse_ptr = call.work.partial_lse + cmp_split[:, None] * split_stride + row[None]
    split_lse = tl.load(lse_ptr, mask=mask, other=topn.NO_SCORE)
    m = tl.max(split_lse, 0)
    if F.SINKS:
        sink = tl.load(call.sinks + r * F.GROUP + g, mask=valid, other=0.0) * 1.4426950408889634
        m = tl.maximum(m, sink)
    m = tl.where(m == topn.NO_SCORE, 0.0, m)
    denominator = tl.sum(tl.exp2(split_lse - m[None]), 0)
    if F.SINKS:
        denominator += tl.exp2(sink - m)
    lse = m + tl.log2(denominator)
    split_size = tl.cdiv(tl.cdiv(window_end, F.BLOCK_W), call.PROB_SPLITS) * F.BLOCK_W
    first, end = split * split_size, tl.minimum((split + 1) * split_size, window_end)
    for n0 in range(first, end, F.BLOCK_W):
        n = n0 + tl.arange(0, F.BLOCK_W)
        visible = valid[:, None] & (n < window_end)[None]
        logits = tl.load(
            call.work.scores + row[:, None] * call.W + n[None], mask=visible, other=topn.NO_SCORE
        )
        p = tl.where(visible, tl.exp2(logits - lse[:, None]), 0.0)
        tl.store(call.work.importances + token * call.W + n, tl.sum(p, 0), mask=n < window_end)


@triton.jit
def best_blocks(
    scores, end, window_end, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """The top-n [1, PADDED_TOPN] of blocks INITIAL .. end - 1, and whether it must be redone. All
    CHUNKS chunks are loaded before the first is merged."""
    candidates = topn.start(1, F.PADDED_TOPN, COLUMNS, DEPTH)
    for c0 in range(F.INITIAL // (CHUNKS * BLOCK_N) * (CHUNKS * BLOCK_N), end, CHUNKS * BLOCK_N):
        tiles = ()
        for i in tl.static_range(CHUNKS):
            c = topn.permute_blocks(c0 + i * BLOCK_N + tl.arange(0, BLOCK_N), COLUMNS)
            is_candidate = (c >= F.INITIAL) & (c < end)
            clamped = tl.where(is_candidate, c, F.INITIAL)
            score = step.block_scores(scores, clamped, window_end, F)
            tiles += (tl.where(is_candidate, score, topn.NO_SCORE)[None],)
        for i in tl.static_range(CHUNKS):
            c = topn.permute_blocks(c0 + i * BLOCK_N + tl.arange(0, BLOCK_N), COLUMNS)
            candidates = topn.fold(candidates, tiles[i], c, COLUMNS)
    return topn.finish(candidates, F.TOPN, F.PADDED_TOPN, COLUMNS)


@triton.jit
def write_block_indices(ranking, call, row, tail_slot, tail_topn, F: tl.constexpr):
    """Write a ranking [PADDED_TOPN] to `block_indices`, and `tail_topn` blocks of it to a tail."""
    slot = tl.arange(0, ranking.shape[0])
    tl.store(call.work.block_indices + row * F.TOPN + slot, ranking, mask=slot < F.TOPN)
    if F.TAIL_SIZE > 0:
        tl.store(call.work.ranking_tail + tail_slot * F.TOPN + slot, ranking, mask=slot < tail_topn)


@triton.jit
def count_better(token_scores, call, row, all_end, window_end, split, phase, F: tl.constexpr):
    """Write those of RANK_SPLIT_BLOCKS blocks that are among the top n, at the number of better
    ones."""
    CHUNKS: tl.constexpr = F.RANK_SPLIT_CHUNKS
    c = split * F.RANK_SPLIT_BLOCKS + tl.arange(0, F.RANK_SPLIT_BLOCKS)
    slot = tl.arange(0, F.PADDED_TOPN)
    end = tl.where(phase == 1, all_end, 0)
    split_keys, rounds = tl.full([F.RANK_SPLIT_BLOCKS], topn.NO_KEY, tl.int64), 1
    # a loop of one iteration: the compiler computes the result of a `while` once, and not again for
    # each layout in which it is used
    while rounds > 0:
        split_keys = step.block_sort_keys(token_scores, c, end, window_end, F)
        rounds -= 1
    better = tl.full([F.RANK_SPLIT_BLOCKS], 0, tl.int32)
    for c0 in range(0, tl.maximum(end, 1), CHUNKS * F.RANK_COMPARED):
        chunks = ()
        for i in tl.static_range(CHUNKS):
            peers = c0 + i * F.RANK_COMPARED + tl.arange(0, F.RANK_COMPARED)
            chunks += (step.block_sort_keys(token_scores, peers, end, window_end, F),)
        for i in tl.static_range(CHUNKS):
            better += tl.sum((chunks[i][:, None] > split_keys[None]).to(tl.int32), 0)
    is_best = (c >= F.INITIAL) & (c < end) & (better < F.TOPN)
    tl.store(call.work.block_indices + row * F.TOPN + better, c, mask=is_best)
    if split == 0:
        is_empty = (slot >= end - F.INITIAL) & (slot < F.TOPN) & (phase == 1)
        tl.store(call.work.block_indices + row * F.TOPN + slot, -1, mask=is_empty)


@triton.jit
def rank_blocks(scores, call, ready, producers, split, b, r, t, F: tl.constexpr):
    """Rank the blocks of token t for ranking head r; with RANK_SPLIT_BLOCKS, so many of them
    against all. A token that leads its group writes the top-n blocks for all tokens of the group to
    `block_indices` and the ranking tail; a leader before the new tokens has left its own there."""
    MODULO: tl.constexpr = F.TAIL_SIZE if F.TAIL_SIZE > 0 else 1
    length = tl.load(call.cache.lengths + b).to(tl.int32)
    count = tl.load(call.cache.counts + b).to(tl.int32) if call.cache.counts is not None else call.T
    row, position = (b * call.T + t) * call.heads.RANKS + r, length + t
    tail_row = (b * call.heads.RANKS + r) * F.TAIL_SIZE
    leader = position // F.STRIDE * F.STRIDE
    if (leader == position) & (t < count):
        window_end = tl.minimum(position // F.PITCH, call.SCORE_COLUMNS)
        end = candidates_end(position, step.NO_LIMIT, F.RANKED_LOCAL, F.PITCH, F.s, True)
        token_scores = scores + row * call.SCORE_COLUMNS
        for phase in range(first_phase(ready, producers, F.WARMUP), 2):
            if phase == 1:
                step.wait(ready, producers)
            if F.RANK_SPLIT_BLOCKS > 0:
                count_better(token_scores, call, row, end, window_end, split, phase, F)
            else:
                ranking, missed = best_blocks(
                    token_scores, tl.where(phase == 1, end, tl.minimum(end, F.INITIAL + 1)),
                    window_end, F.RANK_CHUNKS, F.RANK_N, F.RANK_COLUMNS, F.RANK_DEPTH, F,
                )  # fmt: skip
                if F.RANK_DEPTH < F.TOPN and F.RANK_COLUMNS > 0:  # noqa: SIM102
                    if missed > 0:
                        ranking, missed = best_blocks(
                            token_scores, end, window_end, 1, F.RANK_MERGE_N, 0, 0, F
                        )
                ranking = tl.where(ranking == topn.NO_BLOCK, -1, ranking)
                ranking = tl.reshape(ranking, [F.PADDED_TOPN])
                for j in range(F.STRIDE):
                    if (t + j < call.T) & (phase == 1):
                        out_row = row + j * call.heads.RANKS
                        tail_slot = tail_row + (position + j) % MODULO
                        tail_topn = tl.where(t + j < count, F.TOPN, 0)
                        write_block_indices(ranking, call, out_row, tail_slot, tail_topn, F)
    elif (leader < length) & (t < count):
        slot = tl.arange(0, F.PADDED_TOPN)
        leader_ptr = call.work.ranking_tail + (tail_row + (length - 1) % MODULO) * F.TOPN + slot
        ranking = tl.load(leader_ptr, mask=slot < F.TOPN, other=-1)
        tail_slot = tail_row + position % MODULO
        write_block_indices(ranking, call, row, tail_slot, F.TOPN, F)


@triton.jit
def block_split(call, ready, producers, split, b, r, t, F: tl.constexpr):
    """Attention of the window or of the selected branch over one split of the KV blocks, for token
    t and the GROUP query heads of ranking head r; BLOCK_KEYS keys at a time.

    The first WINDOW_SPLITS splits cover the blocks that overlap the window. The others wait for the
    ranking and cover TOPN ranked blocks, then the initial and the local ones. With FUSE_LOCAL the
    window covers the local blocks: its last split holds these and counts for both branches."""
    h = r // F.RANKS_PER_KV
    is_window = split < call.WINDOW_SPLITS
    split_blocks = tl.where(is_window, call.WINDOW_SPLIT_BLOCKS, call.SELECTED_SPLIT_BLOCKS)
    first_index = tl.where(is_window, split, split - call.WINDOW_SPLITS) * split_blocks
    last = step.token_position(call, b, t)
    own_block, window_start = last // F.s, tl.maximum(last - F.w, 0)
    first_window_block, window_block_end = window_start // F.s + first_index, own_block + 1
    first_token = tl.where(is_window, window_start, 0)
    if F.FUSE_LOCAL:
        is_local = split == call.WINDOW_SPLITS - 1
        first_local_block = tl.maximum(own_block - F.LOCAL + 1, 0)
        first_window_block = tl.where(is_local, first_local_block, first_window_block)
        window_block_end = tl.where(is_local, own_block + 1, own_block - F.LOCAL + 1)
    row = tl.arange(0, F.BLOCK_G)
    head, valid = r * F.GROUP + row, row < F.GROUP
    q_offsets = b * call.q.b + t.to(tl.int64) * call.q.n + head * call.q.h
    q_tile = load_rows(call.q.ptr, q_offsets, F.D, F.BLOCK_D, valid)
    k, v = call.k, call.v
    if F.SEPARATE_WINDOW:  # noqa: SIM102
        if is_window:
            k, v = call.window_k, call.window_v
    i = tl.arange(0, F.PADDED_SPLIT_BLOCKS)
    # index among the selected blocks: TOPN ranked ones, INITIAL, LOCAL
    index = first_index + i
    forced = index - F.TOPN
    is_initial = (forced >= 0) & (forced < F.INITIAL) & (forced <= own_block - F.LOCAL)
    window_block = first_window_block + i
    tile_block = tl.arange(0, F.BLOCK_KEYS) // F.BLOCK_S
    key_slot = tl.arange(0, F.BLOCK_KEYS) % F.BLOCK_S
    out_row = (((call.CMP_PARTIALS + split) * call.B + b) * call.T + t) * (
        call.heads.RANKS * F.GROUP
    ) + head
    start = 1
    if F.TOPN > 0:  # noqa: SIM102
        if not is_window:
            start = first_phase(ready, producers, F.WARMUP)
    # Triton before 3.6 loses the range of a bound that is set in a branch: repeat it by `minimum`
    for phase in range(tl.minimum(start, 1), 2):
        block = i * 0 - 1
        if F.TOPN > 0:  # noqa: SIM102
            if not is_window:
                if phase == 1:
                    step.wait(ready, producers)
                index_row = (b * call.T + t) * call.heads.RANKS + r
                index_ptr = call.work.block_indices + index_row * F.TOPN + index
                is_ranked = (i < split_blocks) & (index < F.TOPN) & (phase == 1)
                block = tl.load(index_ptr, mask=is_ranked, other=-1)
        block = tl.where(is_initial, forced, block)
        is_last = (forced >= F.INITIAL) & (index < F.SELECTED_BLOCKS)
        block = tl.where(is_last, own_block - (forced - F.INITIAL), block)
        is_window_block = window_block < window_block_end
        block = tl.where(is_window, tl.where(is_window_block, window_block, -1), block)
        split_block = tl.where((i < split_blocks) & (phase == 1), block, -1)
        # a block lies in one page
        clamped_block = tl.maximum(tl.minimum(split_block, own_block), 0)
        block_pages = load_page(clamped_block * F.s, b, call.cache, F.PAGE_SIZE)

        m = tl.full([F.BLOCK_G], topn.NO_SCORE, tl.float32)
        l_sum = tl.full([F.BLOCK_G], 0.0, tl.float32)
        acc = tl.full([F.BLOCK_G, F.BLOCK_E], 0.0, tl.float32)
        num_blocks = tl.where(phase == 1, split_blocks, F.BLOCKS_PER_TILE)
        for i0 in tl.range(0, num_blocks, F.BLOCKS_PER_TILE, num_stages=F.BLOCK_STAGES):
            is_block = i[None] == (i0 + tile_block)[:, None]
            token = tl.max(tl.where(is_block, split_block[None], -1), 1) * F.s + key_slot
            visible = (
                (key_slot < F.s) & (token >= first_token) & (token <= last)
            )  # never of block -1
            clamped, page = tl.minimum(tl.maximum(token, 0), tl.maximum(last, 0)), b
            if F.PAGE_SIZE > 0:
                page = tl.max(tl.where(is_block, block_pages[None], 0), 1)
            k_offsets = slot_offsets(clamped, page, k.b, k.n, F.PAGE_SIZE)
            v_offsets = slot_offsets(clamped, page, v.b, v.n, F.PAGE_SIZE)
            k_tile = load_rows(k.ptr + h * k.h, k_offsets, F.D, F.BLOCK_D, visible)
            v_tile = load_rows(v.ptr + h * v.h, v_offsets, F.E, F.BLOCK_E, visible)
            x = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * call.scale_log2
            if F.CAP:
                x = soft_capped(x, call.cap)
            x = tl.where(visible[None], x, topn.NO_SCORE)
            acc, m, l_sum = softmax_step(x, v_tile, acc, m, l_sum)
        out_mask = valid & (phase == 1)
        step.store_partial(call, out_row, acc, m, l_sum, out_mask, F)


@triton.jit
def split_and_token(program, splits, T, RANKS):
    """Of a program of `splits` for each token: its split, and sequence, ranking head and token."""
    token = program // splits
    b, r = (token // T // RANKS).to(tl.int64), (token // T % RANKS).to(tl.int64)
    return program % splits, b, r, token % T


@triton.jit
def reduce_and_combine(
    call, ready, producers, reduce_started, reduce_tile, b, h, F: tl.constexpr,
):  # fmt: skip
    """Reduce the partial results of REDUCE_ROWS (token, query head) rows of one sequence and KV
    head, REDUCE_COLUMNS features: `out = g_cmp cmp + g_sel sel + g_win win`, or `out = sel` with
    ONE_SOFTMAX. Returns how many programs had passed their waits before."""
    i = reduce_tile // F.COLUMN_TILES * F.REDUCE_ROWS + tl.arange(0, F.REDUCE_ROWS)[:, None]
    e = reduce_tile % F.COLUMN_TILES * F.REDUCE_COLUMNS + tl.arange(0, F.REDUCE_COLUMNS)
    valid, t, head = i < call.T * F.G, tl.minimum(i // F.G, call.T - 1), h * F.G + i % F.G
    row, split = (b * call.T + t) * call.heads.H + head, tl.arange(0, F.PADDED_SPLITS)
    first_selected = call.CMP_PARTIALS + call.WINDOW_SPLITS
    partial_row = split.to(tl.int64)[None] * call.B * call.T * call.heads.H + row
    branch_gates = step.load_gates(call, b, t, head, valid, F.ONE_SOFTMAX)
    is_cmp = split < call.CMP_PARTIALS
    is_sel = split >= (first_selected - 1 if F.FUSE_LOCAL else first_selected)
    is_win, started_before = (split >= call.CMP_PARTIALS) & (split < first_selected), 0
    for phase in range(first_phase(ready, producers, F.WARMUP), 2):
        if phase == 1:
            step.wait(ready, producers)
        mask = valid & (split < first_selected + call.SELECTED_SPLITS)[None] & (phase == 1)
        started_before = step.reduce_partials(
            call, partial_row, mask, (is_cmp, is_sel, is_win), branch_gates, row, b, t, head,
            call.heads.H, e, valid, reduce_started, phase, F,
        )  # fmt: skip
    return started_before


@triton.jit(do_not_specialize=NUMBERS.split())
def nsa_decode_persistent(
    cq, q, k, v, window_k, window_v, ck, cv, mem_k, mem_v, gates, sinks, cache, work, out, heads,
    scale_log2, cap, B, T, W, MEMORY, TILES, CMP_SPLITS, CMP_PARTIALS, PROB_SPLITS, WINDOW_SPLITS,
    WINDOW_SPLIT_BLOCKS, SELECTED_SPLITS, SELECTED_SPLIT_BLOCKS, REDUCE_PROGRAMS, RANK_PROGRAMS,
    SCORE_COLUMNS, F: tl.constexpr,
):  # fmt: skip
    """One decode step: T new tokens of B sequences attend over a KV cache. A program owns one work
    tile of one stage, for a sequence and KV head or for a token and ranking head; stages are in the
    order of program ids. The last reduce program resets the counters to zero."""
    call = Call(
        cq, q, k, v, window_k, window_v, ck, cv, mem_k, mem_v, gates, sinks, cache, work, out,
        heads, scale_log2, cap, B, T, W, MEMORY, TILES, CMP_SPLITS, CMP_PARTIALS, PROB_SPLITS,
        WINDOW_SPLITS, WINDOW_SPLIT_BLOCKS, SELECTED_SPLITS, SELECTED_SPLIT_BLOCKS, REDUCE_PROGRAMS,
        RANK_PROGRAMS, SCORE_COLUMNS,
    )  # fmt: skip
    K, RANKS, counters = call.heads.K, call.heads.RANKS, call.work.counters
    program = tl.program_id(0)
    compressed_end = B * K * TILES * CMP_SPLITS
    probabilities_end = compressed_end + B * RANKS * T * PROB_SPLITS
    window_splits_end = probabilities_end + B * RANKS * T * (RANK_PROGRAMS + WINDOW_SPLITS)
    selected_splits_end = window_splits_end + B * RANKS * T * SELECTED_SPLITS

    if program < compressed_end:
        kv_index, tile = program // (TILES * CMP_SPLITS), program // CMP_SPLITS % TILES
        b, h = (kv_index // K).to(tl.int64), (kv_index % K).to(tl.int64)
        barriers = counters + kv_index * step.COUNTERS
        compressed_split(call, program % CMP_SPLITS, tile, b, h, F)
        step.arrive(barriers + SCORES_DONE)
    elif program < probabilities_end:
        if F.PROBS:
            split, b, r, t = split_and_token(program - compressed_end, PROB_SPLITS, T, RANKS)
            barriers = counters + (b * K + r // F.RANKS_PER_KV) * step.COUNTERS
            window_probabilities(
                call, barriers + SCORES_DONE, TILES * CMP_SPLITS, split, b, r, t, F
            )
            step.arrive(barriers + PROBS_DONE)
    elif program < selected_splits_end:
        is_early = program < window_splits_end
        splits = tl.where(is_early, RANK_PROGRAMS + WINDOW_SPLITS, SELECTED_SPLITS)
        first_program = tl.where(is_early, probabilities_end, window_splits_end)
        stage_split, b, r, t = split_and_token(program - first_program, splits, T, RANKS)
        # negative for programs that rank; window splits come before selected ones
        split = stage_split + tl.where(is_early, -RANK_PROGRAMS, WINDOW_SPLITS)
        barriers = counters + (b * K + r // F.RANKS_PER_KV) * step.COUNTERS
        if F.TOPN > 0:  # noqa: SIM102
            if split < 0:
                scores, ready = call.work.scores, barriers + SCORES_DONE
                producers = TILES * CMP_SPLITS
                if F.PROBS:
                    scores, ready = call.work.importances, barriers + PROBS_DONE
                    producers = PROB_SPLITS * T * F.RANKS_PER_KV
                rank_blocks(scores, call, ready, producers, stage_split, b, r, t, F)
                step.arrive(barriers + RANKING_DONE)
        if split >= 0:
            producers = RANK_PROGRAMS * T * F.RANKS_PER_KV
            block_split(call, barriers + RANKING_DONE, producers, split, b, r, t, F)
            step.arrive(barriers + BLOCKS_DONE)
    else:
        reduce_program = program - selected_splits_end
        reduce_tile, kv_index = reduce_program % REDUCE_PROGRAMS, reduce_program // REDUCE_PROGRAMS
        b, h = (kv_index // K).to(tl.int64), kv_index % K
        barriers = counters + kv_index * step.COUNTERS
        # no other program does where no token leads its group
        if F.SCORE_MODE == SCORES_NONE or F.STRIDE > 1:
            step.wait(barriers + SCORES_DONE, TILES * CMP_SPLITS)
            if F.PROBS:
                step.wait(barriers + PROBS_DONE, PROB_SPLITS * T * F.RANKS_PER_KV)
        producers = (WINDOW_SPLITS + SELECTED_SPLITS) * T * F.RANKS_PER_KV
        started_before = reduce_and_combine(
            call, barriers + BLOCKS_DONE, producers, barriers + REDUCE_STARTED, reduce_tile,
            b, h, F,
        )  # fmt: skip
        if started_before == REDUCE_PROGRAMS - 1:  # no program waits any more: reset the counters
            tl.store(barriers + tl.arange(0, step.COUNTERS), 0)


# programs of a stage that fill a GPU, and splits at most
TARGET_PROGRAMS, MAX_SPLITS = 396, 64
# the most programs of a launch with warm-up phases: about as many as are resident on a GPU, two per
# multiprocessor; and of a launch in which several programs rank the blocks of a token
MAX_RESIDENT, MAX_RESIDENT_RANKING = 340, 290
# `count_better`: blocks per program (least, most), blocks that they are compared with at once, and
# such chunks that are loaded together
RANK_SPLIT_BLOCKS, RANK_COMPARED, RANK_SPLIT_CHUNKS = (16, 32), 256, 4
# `rank_blocks`: blocks of a chunk, each in a sorted column of this depth; blocks where columns are
# merged anew; and the most chunks that are loaded together
RANK_N, RANK_DEPTH, RANK_MERGE_N, RANK_CHUNKS = 128, 4, 64, 8
# by width: windows of a tile and their stages, keys of blocks of a tile and their stages
TILES = {128: (64, 3, 64, 2), 256: (32, 2, 64, 1)}
TILES_FLOAT32 = 32, 1, 32, 1
# rows (token, query head) of a window tile, unless a token has more heads
WINDOW_ROWS = 64
# the most partial result elements that one reduce program reads, and the most rows
REDUCE_ELEMENTS, REDUCE_ROWS = 8192, 4
# windows per tile of `window_probabilities`
BLOCK_W = 256


def num_splits(programs: int, units: int) -> int:
    """Splits per work tile, at most one per unit, so that `programs` tiles fill the GPU."""
    return max(1, min(TARGET_PROGRAMS // max(1, programs), units, MAX_SPLITS))


def block_splits(
    programs: int, blocks: int, blocks_per_tile: int, min_blocks: int = 1
) -> tuple[int, int]:
    """Blocks per split, at least `min_blocks` and a multiple of the blocks that a tile of keys
    holds; and the number of splits."""
    split_blocks = cdiv(blocks, num_splits(programs, blocks))
    split_blocks = cdiv(max(1, split_blocks, min_blocks), blocks_per_tile) * blocks_per_tile
    return split_blocks, cdiv(blocks, split_blocks)


@functools.lru_cache(maxsize=256)
def plan(shape: step.Shape, config: AttentionConfig) -> step.Plan:
    """The launch of a step, so that each stage has about TARGET_PROGRAMS programs."""
    B, T, H, K, E, W = shape.B, shape.T, shape.H, shape.K, shape.E, shape.windows
    s, d, local = config.selection_block_size, config.d, config.num_local_blocks
    (ranks, n), one_softmax = step.ranking_size(shape, config), shape.one_softmax
    is_ranked = n > 0 and shape.index_shape is None
    # of keys that rank by themselves the largest score of a block is stored
    per_block = s // d if config.ranks_by_largest and s > d else 0
    is_integers = is_ranked and config.ranks_by_integers
    packed = max(1, s // d) if is_integers and config.ranking_bits == 4 else 0
    settings = step.settings_of(shape, config, per_block)
    probs, block_s, w = settings["PROBS"], settings["BLOCK_S"], settings["w"]
    score_mode, score_heads = SCORES_SUM, K
    if not is_ranked:
        score_mode, score_heads = SCORES_NONE, 0
    elif probs or not config.query_heads_share_selected_kv:
        score_mode, score_heads = SCORES_PER_HEAD, H
    # the window covers the local blocks, and both branches have the same keys
    fuse_local = not shape.has_window and 0 < local * s <= w + 1

    window_tile, key_tile = (launch.row(TILES, max(width, E)) for width in (shape.I, shape.D))
    if shape.dtype == torch.float32:
        window_tile = key_tile = TILES_FLOAT32
    (block_n, stages), (block_keys, block_stages) = window_tile[:2], key_tile[2:]
    # a tile holds whole blocks
    block_n, block_keys = packed or max(block_n, per_block), max(block_keys, block_s)
    width = cdiv(shape.I, 4) if packed else shape.I  # of a product
    heads = next_power_of_2(shape.cmp_heads // K)
    block_m = max(16, heads, min(WINDOW_ROWS, next_power_of_2(T) * heads))
    # blocks of the selected branch, without the local ones if the window covers them
    selected = n + config.num_initial_blocks + (0 if fuse_local else local)
    window_blocks = local if one_softmax else cdiv(w, s) + 1

    tiles = cdiv(T * heads, block_m)
    tokens, blocks_per_tile = B * ranks * T, block_keys // block_s
    cmp = 0 if one_softmax and not is_ranked else num_splits(B * K * tiles, cdiv(W, block_n))
    cmp_partials = 0 if one_softmax else cmp
    prob_splits = num_splits(tokens, cdiv(W, BLOCK_W)) if probs else 0
    # fused local blocks are one split of their own
    fused = local * fuse_local
    window_split, window = block_splits(tokens, window_blocks - fused, blocks_per_tile, fused)
    selected_split, num_selected = block_splits(tokens, selected, blocks_per_tile)
    window += fuse_local
    partials = cmp_partials + window + num_selected
    splits, columns = next_power_of_2(max(1, partials)), settings["BLOCK_E"]
    reduce_rows = max(1, min(REDUCE_ROWS, REDUCE_ELEMENTS // (splits * columns)))
    reduce_columns = max(16, min(columns, REDUCE_ELEMENTS // splits))
    column_tiles = cdiv(E, reduce_columns)
    reduce_programs = cdiv(T * (H // K), reduce_rows) * column_tiles

    programs = B * K * (cmp * tiles + reduce_programs)
    programs += tokens * (prob_splits + is_ranked + window + num_selected)
    warmup = programs <= MAX_RESIDENT
    # several programs rank a token's blocks where there is room for them
    blocks, rank_programs, rank_split_blocks = cdiv(shape.tokens, s), int(is_ranked), 0
    if is_ranked and config.selection_stride == 1:
        min_blocks, most = RANK_SPLIT_BLOCKS
        free = max(0, MAX_RESIDENT_RANKING - programs)
        split_programs = min(cdiv(blocks, min_blocks), 1 + free // tokens)
        ranked = max(min_blocks, next_power_of_2(cdiv(blocks, split_programs)))
        if split_programs > 1 and ranked <= most:
            rank_programs, rank_split_blocks = cdiv(blocks, ranked), ranked
            programs += tokens * (rank_programs - 1)
    merge_n, is_sorted = max(RANK_MERGE_N, next_power_of_2(n)), n <= MAX_COLUMN_N
    # 1 where the kernel does not read it: another value would compile it again
    compared, rank_chunks = 1, 1
    if rank_split_blocks:
        compared = next_power_of_2(cdiv(blocks, RANK_COMPARED))
    elif is_ranked and is_sorted:
        rank_chunks = min(RANK_CHUNKS, next_power_of_2(cdiv(max(1, W * d // s), RANK_N)))

    numbers = dict(
        B=B, T=T, W=W, MEMORY=shape.memory, TILES=tiles, CMP_SPLITS=cmp, CMP_PARTIALS=cmp_partials,
        PROB_SPLITS=prob_splits, WINDOW_SPLITS=window, WINDOW_SPLIT_BLOCKS=window_split,
        SELECTED_SPLITS=num_selected, SELECTED_SPLIT_BLOCKS=selected_split,
        REDUCE_PROGRAMS=reduce_programs, RANK_PROGRAMS=rank_programs,
        SCORE_COLUMNS=cdiv(W, per_block) if per_block else W,
    )  # fmt: skip
    constants = step.constants(
        **settings, I=shape.I, BLOCK_I=launch.padded(width), CMP_G=shape.cmp_heads // K,
        PADDED_G=heads, BLOCK_M=block_m, BLOCK_N=block_n, GROUP=H // ranks,
        BLOCK_G=launch.padded(H // ranks), BLOCK_W=BLOCK_W, BLOCK_KEYS=block_keys, STAGES=stages,
        BLOCK_STAGES=block_stages if block_keys <= 64 else 1, BLOCKS_PER_TILE=blocks_per_tile,
        PADDED_CMP_SPLITS=next_power_of_2(cmp) if probs else 1, PADDED_SPLITS=splits,
        PADDED_SPLIT_BLOCKS=next_power_of_2(max(2, blocks_per_tile, window_blocks, selected)),
        REDUCE_ROWS=reduce_rows, REDUCE_COLUMNS=reduce_columns, COLUMN_TILES=column_tiles,
        RANK_CHUNKS=rank_chunks,
        RANK_N=RANK_N if is_sorted else merge_n, RANK_COLUMNS=RANK_N if is_sorted else 0,
        RANK_DEPTH=min(RANK_DEPTH, n) if is_sorted else 0, RANK_MERGE_N=merge_n,
        RANK_SPLIT_BLOCKS=rank_split_blocks, RANK_SPLIT_CHUNKS=min(RANK_SPLIT_CHUNKS, compared),
        RANK_COMPARED=RANK_COMPARED, PADDED_TOPN=max(2, next_power_of_2(n)),
        SELECTED_BLOCKS=selected,
        TAIL_SIZE=shape.tail_size if config.selection_stride > 1 and is_ranked else 0,
        SCORE_MODE=score_mode.value, BY_HEADS=config.ranks_by_heads,
        BLOCK_WINDOWS=per_block, FUSE_LOCAL=fuse_local,
        SEPARATE_WINDOW=shape.has_window, WARMUP=warmup, ONE_SOFTMAX=one_softmax,
        QUANTIZED=max(1, s // d) if is_integers and not packed else 0, PACKED=packed,
    )  # fmt: skip
    return step.Plan(
        nsa_decode_persistent, programs, partials, (score_heads, numbers["SCORE_COLUMNS"]),
        (ranks, W) if probs else None, (B, T, ranks, n), numbers | dict(F=constants, num_warps=4),
    )  # fmt: skip


def decode(call: calls.Call, config: AttentionConfig) -> Tensor:
    """Run a decode step: `read_all` for a short cache, else the persistent kernel. [B T H E]."""
    # kernels read rows at consecutive addresses, and integers contiguous
    readable: Any = (
        t.contiguous() if isinstance(t, Tensor) and t.stride(-1) != 1 else t for t in call
    )
    call = calls.Call(*readable)
    if config.num_selected_groups and config.ranks:
        indices = stages.rank(call, config)
        if call.new_indices is not None:
            call.new_indices.copy_(indices)
        call = call.but(block_indices=indices, ck=None, ranking=None, new_indices=None)
        config = config.but(importance="given", num_selected_groups=0)
    elif config.ranks_by_integers and config.ranks and call.block_indices is None:
        q, ck = call.q if call.cq is None else call.cq, call.ck
        if config.ranking_bits == 8:
            q = quantize_queries(q.float(), call.k.shape[2], config).half()
        elif config.query_heads_share_selected_kv and not config.ranks_by_heads:  # of their sum
            q = q.float().unflatten(2, (call.k.shape[2], -1)).sum(dim=3)
        if config.ranking_bits == 4 and ck.dtype != torch.int16:  # of a cache that keeps none
            ck = pack_keys(ck, windows_per_block(config.d, config.selection_block_size))
        call = call.but(cq=q, ck=ck)
    elif call.block_indices is not None:
        selection = launch.Selection(
            call.block_indices, config.selection_block_size, config.num_initial_blocks,
            config.num_local_blocks, True, starts=call.lengths,
        )  # fmt: skip
        tokens = step.shape_of(call).tokens
        call = call.but(block_indices=keep_valid_blocks(selection, tokens).block_indices)
    shape = step.shape_of(call)
    if shape.windows and call.ck.dtype == torch.int16:
        per_block = windows_per_block(config.d, config.selection_block_size)
        shape = shape._replace(windows=shape.windows * per_block)
    # no tile has room for blocks that do not exist
    most, counts = cdiv(shape.tokens, config.selection_block_size), dict[str, int]()
    for name in ("num_initial_blocks", "num_local_blocks"):
        if getattr(config, name) > most:
            counts[name] = most
    config = config.but(**counts) if counts else config
    out = call.q.new_empty(shape.B, shape.T, shape.H, shape.E)
    if out.numel() == 0:
        return out
    launch_plan = read_all.plan(shape, config) or plan(shape, config)
    arguments = step.tensor_arguments(call, shape, launch_plan, config, out) | launch_plan.args
    launcher(launch_plan.kernel, (launch_plan.programs,))(**arguments, num_stages=1)
    return out
