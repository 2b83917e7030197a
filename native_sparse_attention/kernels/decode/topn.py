"""Ranking of KV blocks in a decode step: block scores from window scores, and the top-n blocks."""

import triton
import triton.language as tl

from ..common.primitives import candidates_end
from ..topk.selection import window_weight
from ..topk.topn import (
    NO_BLOCK,
    NO_KEY,
    NO_ORDER,
    NO_SCORE,
    finish,
    first_window,
    fold,
    ordered_bits,
    permute_blocks,
    sort_keys,
    start,
)
from .split_kv import first_phase, wait

NEVER = tl.constexpr(1 << 30)


@triton.jit
def window_probabilities(
    call, ready, producers, split, b, r, t, step, S: tl.constexpr, P: tl.constexpr
):
    """Softmax probabilities of the windows, with importance="probs".

    A program owns one split of the windows for one token t and ranking head r. It waits until the
    `producers` programs of the compressed branch have arrived at `ready`. It reads the logits
    `scores` of the query heads that share the ranking and the lse of all partial results, and
    writes to `importances` the probabilities summed over these heads. It writes nothing for a token
    past `counts`."""
    GROUP: tl.constexpr = S.G // S.RANKS_PER_KV
    window_end = tl.minimum((tl.load(call.cache.lengths + b).to(tl.int32) + t) // S.d, step.W)
    if S.HAS_COUNTS:
        window_end = tl.where(t < tl.load(call.cache.counts + b), window_end, 0)
    token = (b * step.T + t) * call.heads.RANKS + r
    g = tl.arange(0, P.PADDED_G // S.RANKS_PER_KV)
    row, valid = token * GROUP + g, g < GROUP
    cmp_split = tl.arange(0, P.PADDED_CMP_SPLITS)
    wait(ready, producers)
    mask = (cmp_split < step.CMP_SPLITS)[:, None] & valid[None]
    split_stride = step.B * step.T * call.heads.H
    lse_ptr = call.work.partial_lse + cmp_split[:, None] * split_stride + row[None]
    split_lse = tl.load(lse_ptr, mask=mask, other=NO_SCORE)
    m = tl.max(split_lse, 0)
    if S.SINKS:
        sink = tl.load(call.sinks + r * GROUP + g, mask=valid, other=0.0) * 1.4426950408889634
        m = tl.maximum(m, sink)
    m = tl.where(m == NO_SCORE, 0.0, m)
    denominator = tl.sum(tl.exp2(split_lse - m[None]), 0)
    if S.SINKS:
        denominator += tl.exp2(sink - m)
    lse = m + tl.log2(denominator)
    split_size = tl.cdiv(tl.cdiv(window_end, P.BLOCK_W), step.PROB_SPLITS) * P.BLOCK_W
    first, end = split * split_size, tl.minimum((split + 1) * split_size, window_end)
    for n0 in range(first, end, P.BLOCK_W):
        n = n0 + tl.arange(0, P.BLOCK_W)
        visible = valid[:, None] & (n < window_end)[None]
        logits = tl.load(
            call.work.scores + row[:, None] * step.W + n[None], mask=visible, other=NO_SCORE
        )
        p = tl.where(visible, tl.exp2(logits - lse[:, None]), 0.0)
        tl.store(call.work.importances + token * step.W + n, tl.sum(p, 0), mask=n < window_end)


@triton.jit
def window_overlaps(c, j, l: tl.constexpr, d: tl.constexpr, s: tl.constexpr):
    """Tokens that blocks c share with the j-th of the windows that end in or after them."""
    overlap = c * 0 + 1
    if s >= d:
        end = (first_window(c, d, s) + j + 1) * d
        overlap = tl.minimum(end, (c + 1) * s) - tl.maximum(end - l, c * s)
    return tl.maximum(overlap, 0).to(tl.float32)


@triton.jit
def block_scores(scores, c, window_end, S: tl.constexpr):
    """Scores [C] of blocks c from the scores of the windows before `window_end`."""
    WINDOWS_PER_BLOCK: tl.constexpr = S.s // S.PITCH if S.s > S.PITCH else 1
    NEIGHBOURS: tl.constexpr = 1 if S.INTERPOLATED else 0
    WINDOWS_READ: tl.constexpr = (
        (S.SPAN + S.s - 1) // S.PITCH
        if S.PROBS and S.s >= S.PITCH
        else WINDOWS_PER_BLOCK + NEIGHBOURS
    )
    total = tl.zeros([c.shape[0]], tl.float32)
    # interpolation sums differences from the first score, so that blocks of equal window scores
    # get equal scores
    origin, count = total, total
    if S.INTERPOLATED:
        window = tl.minimum(first_window(c, S.PITCH, S.s), window_end - 1)
        origin = tl.load(scores + window, mask=window >= 0, other=0.0)
    for j in tl.static_range(-NEIGHBOURS, WINDOWS_READ):
        window = first_window(c, S.PITCH, S.s) + j
        if S.PROBS:
            weight = tl.where(window < window_end, window_overlaps(c, j, S.SPAN, S.PITCH, S.s), 0.0)
        else:
            weight = window_weight(
                c, j, window_end + c * 0, S.PITCH, S.s, S.BLOCK_S, S.INTERPOLATED
            )
        window = tl.minimum(tl.maximum(window, 0), window_end - 1)
        score = tl.load(scores + window, mask=window >= 0, other=0.0)
        if S.INTERPOLATED:
            score -= origin
            count += weight
        total += weight * score
    if S.INTERPOLATED:
        total += origin * count
    return total


@triton.jit
def block_sort_keys(scores, c, end, window_end, S: tl.constexpr):
    """Sort keys of blocks c: distinct integers in the order of the scores.

    Candidates are blocks INITIAL .. end - 1; the others get NO_KEY."""
    is_candidate = (c >= S.INITIAL) & (c < end)
    clamped = tl.where(is_candidate, c, S.INITIAL)
    score = block_scores(scores, clamped, window_end, S)
    return tl.where(is_candidate, sort_keys(score, c), NO_KEY)


@triton.jit
def merge_by_warps(candidates, TOPN: tl.constexpr, PADDED_TOPN: tl.constexpr):
    """`topn.merge_columns` of one row: the TOPN best blocks [1, PADDED_TOPN], and whether a column
    may have dropped one of them.

    Each warp merges its 32 sorted columns into one of TOPN blocks. The position of a block in the
    result is the number of better blocks in the columns of all warps."""
    scores, blocks, lost = candidates
    DEPTH: tl.constexpr = len(scores)
    WARPS: tl.constexpr = lost.shape[1] // 32
    score_order = ()
    block_ids = ()
    for depth in tl.static_range(DEPTH):
        score_order += (tl.reshape(ordered_bits(scores[depth]), [WARPS, 32]),)
        block_ids += (tl.reshape(blocks[depth], [WARPS, 32]),)
    slot = tl.arange(0, PADDED_TOPN)
    warp_order = tl.full([WARPS, PADDED_TOPN], NO_ORDER, tl.int32)
    warp_block = tl.full([WARPS, PADDED_TOPN], NO_BLOCK, tl.int32)
    for j in range(TOPN):
        best_order = tl.max(score_order[0], 1)
        c = tl.min(tl.where(score_order[0] == best_order[:, None], block_ids[0], NO_BLOCK), 1)
        warp_order = tl.where(slot[None] == j, best_order[:, None], warp_order)
        warp_block = tl.where(slot[None] == j, c[:, None], warp_block)
        is_taken = block_ids[0] == c[:, None]
        new_orders = ()
        new_block_ids = ()
        for depth in tl.static_range(1, DEPTH):
            new_orders += (tl.where(is_taken, score_order[depth], score_order[depth - 1]),)
            new_block_ids += (tl.where(is_taken, block_ids[depth], block_ids[depth - 1]),)
        new_orders += (tl.where(is_taken, NO_ORDER, score_order[DEPTH - 1]),)
        new_block_ids += (tl.where(is_taken, NO_BLOCK, block_ids[DEPTH - 1]),)
        score_order, block_ids = new_orders, new_block_ids
    order = tl.reshape(warp_order, [WARPS * PADDED_TOPN])
    warp_block = tl.reshape(warp_block, [WARPS * PADDED_TOPN])
    better = order[None] > order[:, None]
    better |= (order[None] == order[:, None]) & (warp_block[None] < warp_block[:, None])
    position = tl.sum(better.to(tl.int32), 1)
    is_position = (position[None] == slot[:, None]) & (warp_block[None] != NO_BLOCK)
    ranking = tl.min(tl.where(is_position, warp_block[None], NO_BLOCK), 1)
    # the n-th best; a column that dropped a block at least as good may have dropped a top-n block
    nth = tl.max(tl.where(position == TOPN - 1, order, NO_ORDER), 0)
    nth = tl.where(tl.sum((warp_block != NO_BLOCK).to(tl.int32), 0) >= TOPN, nth, NO_ORDER)
    missed = (ordered_bits(lost) >= nth) & (lost > NO_SCORE)
    return ranking[None], tl.max(tl.max(missed.to(tl.int32), 1), 0)


@triton.jit
def best_blocks(
    scores, end, window_end, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, TOPN: tl.constexpr, PADDED_TOPN: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """The top-n [1, PADDED_TOPN] of blocks INITIAL .. end - 1, and whether it must be redone.

    It must be redone if a column of candidates may have dropped one of the top n. The scores of
    CHUNKS chunks are loaded before the first chunk is merged."""
    candidates = start(1, PADDED_TOPN, COLUMNS, DEPTH)
    for c0 in range(S.INITIAL // (CHUNKS * BLOCK_N) * (CHUNKS * BLOCK_N), end, CHUNKS * BLOCK_N):
        tiles = ()
        for i in tl.static_range(CHUNKS):
            c = permute_blocks(c0 + i * BLOCK_N + tl.arange(0, BLOCK_N), COLUMNS)
            is_candidate = (c >= S.INITIAL) & (c < end)
            clamped = tl.where(is_candidate, c, S.INITIAL)
            score = block_scores(scores, clamped, window_end, S)
            tiles += (tl.where(is_candidate, score, NO_SCORE)[None],)
        for i in tl.static_range(CHUNKS):
            c = permute_blocks(c0 + i * BLOCK_N + tl.arange(0, BLOCK_N), COLUMNS)
            candidates = fold(candidates, tiles[i], c, COLUMNS)
    if COLUMNS > 0:
        ranking, missed = merge_by_warps(candidates, TOPN, PADDED_TOPN)
    else:
        ranking, missed = finish(candidates, TOPN, PADDED_TOPN, COLUMNS)
    return ranking, missed


@triton.jit
def write_block_indices(
    ranking, call, row, tail_slot, tail_topn, TOPN: tl.constexpr, TAIL_SIZE: tl.constexpr
):
    """Write a ranking [PADDED_TOPN] to `block_indices`, and `tail_topn` blocks of it to a tail."""
    slot = tl.arange(0, ranking.shape[0])
    tl.store(call.work.block_indices + row * TOPN + slot, ranking, mask=slot < TOPN)
    if TAIL_SIZE > 0:
        tl.store(call.work.ranking_tail + tail_slot * TOPN + slot, ranking, mask=slot < tail_topn)


@triton.jit
def rank_blocks(
    scores, call, ready, producers, b, r, t, step, S: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Rank the blocks of one token.

    A program owns token t and ranking head r. If the token leads its group of tokens, the
    program waits until `producers` programs have arrived at `ready`, reads the window scores, and
    writes the top-n blocks for all tokens of the group to `block_indices` and the ranking tail. If
    the leader precedes the new tokens, the program copies the leader's ranking from the tail."""
    MODULO: tl.constexpr = P.TAIL_SIZE if P.TAIL_SIZE > 0 else 1
    length = tl.load(call.cache.lengths + b).to(tl.int32)
    count = tl.load(call.cache.counts + b).to(tl.int32) if S.HAS_COUNTS else step.T
    position = length + t
    tail_row = (b * call.heads.RANKS + r) * P.TAIL_SIZE
    row = (b * step.T + t) * call.heads.RANKS + r
    leader = position // S.STRIDE * S.STRIDE
    if (leader == position) & (t < count):
        window_end = tl.minimum(position // S.PITCH, step.SCORE_COLUMNS)
        end = candidates_end(position, NEVER, S.RANKED_LOCAL, S.PITCH, S.s, True)
        token_scores = scores + row * step.SCORE_COLUMNS
        for phase in range(first_phase(ready, producers, P.WARMUP), 2):
            if phase == 1:
                wait(ready, producers)
            ranking, missed = best_blocks(
                token_scores, tl.where(phase == 1, end, tl.minimum(end, S.INITIAL + 1)), window_end,
                P.RANK_CHUNKS, P.RANK_N, P.RANK_COLUMNS, P.RANK_DEPTH, S.TOPN, P.PADDED_TOPN, S,
            )  # fmt: skip
            if P.RANK_DEPTH < S.TOPN and P.RANK_COLUMNS > 0:  # noqa: SIM102
                if missed > 0:
                    ranking, missed = best_blocks(
                        token_scores, end, window_end, 1, P.RANK_MERGE_N, 0, 0, S.TOPN,
                        P.PADDED_TOPN, S,
                    )  # fmt: skip
            ranking = tl.reshape(tl.where(ranking == NO_BLOCK, -1, ranking), [P.PADDED_TOPN])
            for j in range(S.STRIDE):
                if (t + j < step.T) & (phase == 1):
                    out_row = row + j * call.heads.RANKS
                    tail_slot = tail_row + (position + j) % MODULO
                    tail_topn = tl.where(t + j < count, S.TOPN, 0)
                    write_block_indices(
                        ranking, call, out_row, tail_slot, tail_topn, S.TOPN, P.TAIL_SIZE
                    )
    elif (leader < length) & (t < count):
        slot = tl.arange(0, P.PADDED_TOPN)
        leader_ptr = call.work.ranking_tail + (tail_row + (length - 1) % MODULO) * S.TOPN + slot
        ranking = tl.load(leader_ptr, mask=slot < S.TOPN, other=-1)
        tail_slot = tail_row + position % MODULO
        write_block_indices(ranking, call, row, tail_slot, S.TOPN, S.TOPN, P.TAIL_SIZE)


@triton.jit
def rank_blocks_split(
    scores, call, ready, producers, split, b, r, t, step, S: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Rank RANK_SPLIT_BLOCKS blocks of one token against all blocks.

    A program owns one split of the blocks for token t and ranking head r. It waits until
    `producers` programs have arrived at `ready`, reads the window scores, and counts for each of
    its blocks the blocks that are better. This count is the block's position in the ranking; the
    program writes its blocks with a position below n to `block_indices`."""
    CHUNKS: tl.constexpr = P.RANK_SPLIT_CHUNKS
    COMPARED: tl.constexpr = P.RANK_COMPARED
    length = tl.load(call.cache.lengths + b).to(tl.int32)
    count = tl.load(call.cache.counts + b).to(tl.int32) if S.HAS_COUNTS else step.T
    row, position = (b * step.T + t) * call.heads.RANKS + r, length + t
    if t < count:
        window_end = tl.minimum(position // S.PITCH, step.SCORE_COLUMNS)
        token_scores = scores + row * step.SCORE_COLUMNS
        all_end = candidates_end(position, NEVER, S.RANKED_LOCAL, S.PITCH, S.s, True)
        c = split * P.RANK_SPLIT_BLOCKS + tl.arange(0, P.RANK_SPLIT_BLOCKS)
        slot = tl.arange(0, P.PADDED_TOPN)
        for phase in range(first_phase(ready, producers, P.WARMUP), 2):
            if phase == 1:
                wait(ready, producers)
            end = tl.where(phase == 1, all_end, 0)
            own_keys, rounds = tl.full([P.RANK_SPLIT_BLOCKS], NO_KEY, tl.int64), 1
            # a loop of one iteration: the compiler computes the result of a `while` once, and not
            # again for each layout in which it is used
            while rounds > 0:
                own_keys = block_sort_keys(token_scores, c, end, window_end, S)
                rounds -= 1
            better = tl.full([P.RANK_SPLIT_BLOCKS], 0, tl.int32)
            for c0 in range(0, tl.maximum(end, 1), CHUNKS * COMPARED):
                chunks = ()
                for i in tl.static_range(CHUNKS):
                    peers = c0 + i * COMPARED + tl.arange(0, COMPARED)
                    chunks += (block_sort_keys(token_scores, peers, end, window_end, S),)
                for i in tl.static_range(CHUNKS):
                    better += tl.sum((chunks[i][:, None] > own_keys[None]).to(tl.int32), 0)
            is_best = (c >= S.INITIAL) & (c < end) & (better < S.TOPN)
            tl.store(call.work.block_indices + row * S.TOPN + better, c, mask=is_best)
            if split == 0:
                is_empty = (slot >= end - S.INITIAL) & (slot < S.TOPN) & (phase == 1)
                tl.store(call.work.block_indices + row * S.TOPN + slot, -1, mask=is_empty)
