"""The ranking of a decoding step: blocks' scores out of the windows', and the n best of them."""

import triton
import triton.language as tl

from ..common.primitives import candidates_end
from ..topk.block_keys import first_window, window_weight
from ..topk.topn import (
    NO_BLOCK,
    NO_KEY,
    NO_ORDER,
    NO_SCORE,
    chunk_blocks,
    finish,
    fold,
    in_order,
    sort_keys,
    start,
)
from .grid_barrier import first_turn, wait

NEVER = tl.constexpr(1 << 30)


@triton.jit
def probabilities(
    scores, part_lse, sinks, lengths, counts, out, before, programs, share, SHARES, b, r, t, T, W,
    RANKS, SPLITS, ROWS,
    HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr, d: tl.constexpr, SINKS: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """The probabilities of a share of the windows, summed over the HEADS heads of token t that rank
    together; once the `programs` before have arrived. None for a token past `counts`."""
    hi = tl.minimum((tl.load(lengths + b) + t) // d, W)
    if COUNTED:
        hi = tl.where(t < tl.load(counts + b), hi, 0)
    token = (b * T + t) * RANKS + r
    g = tl.arange(0, BLOCK_HEADS)
    row, real = token * HEADS + g, g < HEADS
    split = tl.arange(0, BLOCK_SPLITS)
    wait(before, programs)
    there = (split < SPLITS)[:, None] & real[None]
    x = tl.load(part_lse + split[:, None] * ROWS + row[None], mask=there, other=NO_SCORE)
    m = tl.max(x, 0)
    if SINKS:
        sink = tl.load(sinks + r * HEADS + g, mask=real, other=0.0) * 1.4426950408889634
        m = tl.maximum(m, sink)
    m = tl.where(m == NO_SCORE, 0.0, m)
    total = tl.sum(tl.exp2(x - m[None]), 0)
    if SINKS:
        total += tl.exp2(sink - m)
    lse = m + tl.log2(total)
    size = tl.cdiv(tl.cdiv(hi, BLOCK_N), SHARES) * BLOCK_N
    for n0 in range(share * size, tl.minimum((share + 1) * size, hi), BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        seen = real[:, None] & (n < hi)[None]
        logits = tl.load(scores + row[:, None] * W + n[None], mask=seen, other=NO_SCORE)
        p = tl.where(seen, tl.exp2(logits - lse[:, None]), 0.0)
        tl.store(out + token * W + n, tl.sum(p, 0), mask=n < hi)


@triton.jit
def window_shares(c, j, l: tl.constexpr, d: tl.constexpr, s: tl.constexpr):
    """How many tokens blocks c share with the j-th of the windows that end in them or after."""
    share = c * 0 + 1
    if s >= d:
        past = (first_window(c, d, s) + j + 1) * d  # the window's end
        share = tl.minimum(past, (c + 1) * s) - tl.maximum(past - l, c * s)
    return tl.maximum(share, 0).to(tl.float32)


@triton.jit
def block_scores(
    scores, c, hi, l: tl.constexpr, d: tl.constexpr, s: tl.constexpr, PROBS: tl.constexpr,
    INTERPOLATED: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Scores [C] of blocks c from those of the windows, of which `hi` are seen."""
    WINDOWS: tl.constexpr = s // d if s > d else 1
    AROUND: tl.constexpr = 1 if INTERPOLATED else 0
    COUNT: tl.constexpr = (l + s - 1) // d if PROBS and s >= d else WINDOWS + AROUND
    total = tl.zeros([c.shape[0]], tl.float32)
    # interpolated, sums are of differences from the first: equal scores make equal blocks
    origin, count = total, total
    if INTERPOLATED:
        w = tl.minimum(first_window(c, d, s), hi - 1)
        origin = tl.load(scores + w, mask=w >= 0, other=0.0)
    for j in tl.static_range(-AROUND, COUNT):
        w = first_window(c, d, s) + j
        if PROBS:
            weight = tl.where(w < hi, window_shares(c, j, l, d, s), 0.0)
        else:
            weight = window_weight(c, j, hi + c * 0, d, s, BLOCK_S, INTERPOLATED)
        w = tl.minimum(tl.maximum(w, 0), hi - 1)
        score = tl.load(scores + w, mask=w >= 0, other=0.0)
        if INTERPOLATED:
            score -= origin
            count += weight
        total += weight * score
    if INTERPOLATED:
        total += origin * count
    return total


@triton.jit
def score_keys(
    scores, c, end, hi, l: tl.constexpr, d: tl.constexpr, s: tl.constexpr, BLOCK_S: tl.constexpr,
    INITIAL: tl.constexpr, PROBS: tl.constexpr, INTERPOLATED: tl.constexpr,
):  # fmt: skip
    """Of blocks c the scores, as integers of which no two are equal; NO_KEY of no candidate, which
    are INITIAL .. end - 1."""
    candidate = (c >= INITIAL) & (c < end)
    inside = tl.where(candidate, c, INITIAL)
    score = block_scores(scores, inside, hi, l, d, s, PROBS, INTERPOLATED, BLOCK_S)
    return tl.where(candidate, sort_keys(score, c), NO_KEY)


@triton.jit
def merge_by_warps(found, SLOTS: tl.constexpr, SLOTS_2: tl.constexpr):
    """As `topn.merge_lists` of one row: the SLOTS best [1, SLOTS_2] and whether a list may have
    lost one of them. Lists are merged by 32, within a warp, to one each; of what these hold, the
    place is how many are better."""
    scores, blocks, lost = found
    DEPTH: tl.constexpr = len(scores)
    ROWS: tl.constexpr = lost.shape[1] // 32
    orders = ()
    numbers = ()
    for depth in tl.static_range(DEPTH):
        orders += (tl.reshape(in_order(scores[depth]), [ROWS, 32]),)
        numbers += (tl.reshape(blocks[depth], [ROWS, 32]),)
    slot = tl.arange(0, SLOTS_2)
    best = tl.full([ROWS, SLOTS_2], NO_ORDER, tl.int32)
    block = tl.full([ROWS, SLOTS_2], NO_BLOCK, tl.int32)
    for j in range(SLOTS):
        most = tl.max(orders[0], 1)
        c = tl.min(tl.where(orders[0] == most[:, None], numbers[0], NO_BLOCK), 1)
        best = tl.where(slot[None] == j, most[:, None], best)
        block = tl.where(slot[None] == j, c[:, None], block)
        taken = numbers[0] == c[:, None]
        new_orders = ()
        new_numbers = ()
        for depth in tl.static_range(1, DEPTH):
            new_orders += (tl.where(taken, orders[depth], orders[depth - 1]),)
            new_numbers += (tl.where(taken, numbers[depth], numbers[depth - 1]),)
        new_orders += (tl.where(taken, NO_ORDER, orders[DEPTH - 1]),)
        new_numbers += (tl.where(taken, NO_BLOCK, numbers[DEPTH - 1]),)
        orders, numbers = new_orders, new_numbers
    order, block = tl.reshape(best, [ROWS * SLOTS_2]), tl.reshape(block, [ROWS * SLOTS_2])
    better = order[None] > order[:, None]
    better |= (order[None] == order[:, None]) & (block[None] < block[:, None])
    place = tl.sum(better.to(tl.int32), 1)
    is_there = (place[None] == slot[:, None]) & (block[None] != NO_BLOCK)
    ranking = tl.min(tl.where(is_there, block[None], NO_BLOCK), 1)
    # the worst of them: a list that let go of as much may have had one more
    nth = tl.max(tl.where(place == SLOTS - 1, order, NO_ORDER), 0)
    nth = tl.where(tl.sum((block != NO_BLOCK).to(tl.int32), 0) >= SLOTS, nth, NO_ORDER)
    missed = (in_order(lost) >= nth) & (lost > NO_SCORE)
    return ranking[None], tl.max(tl.max(missed.to(tl.int32), 1), 0)


@triton.jit
def best_blocks(
    scores, end, hi, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, SLOTS: tl.constexpr, SLOTS_2: tl.constexpr, l: tl.constexpr,
    d: tl.constexpr, s: tl.constexpr, BLOCK_S: tl.constexpr, INITIAL: tl.constexpr,
    PROBS: tl.constexpr, INTERPOLATED: tl.constexpr,
):  # fmt: skip
    """The ranking [1, SLOTS_2] of blocks INITIAL .. end - 1, and whether it must be done again.
    The scores of several chunks are asked for before the first is folded."""
    found = start(1, SLOTS_2, COLUMNS, DEPTH)
    for c0 in range(INITIAL // (CHUNKS * BLOCK_N) * (CHUNKS * BLOCK_N), end, CHUNKS * BLOCK_N):
        tiles = ()
        for i in tl.static_range(CHUNKS):
            c = chunk_blocks(c0 + i * BLOCK_N, BLOCK_N, COLUMNS)
            candidate = (c >= INITIAL) & (c < end)
            inside = tl.where(candidate, c, INITIAL)
            score = block_scores(scores, inside, hi, l, d, s, PROBS, INTERPOLATED, BLOCK_S)
            tiles += (tl.where(candidate, score, NO_SCORE)[None],)
        for i in tl.static_range(CHUNKS):
            c = chunk_blocks(c0 + i * BLOCK_N, BLOCK_N, COLUMNS)
            found = fold(found, tiles[i], c, COLUMNS)
    if COLUMNS > 0:
        ranking, missed = merge_by_warps(found, SLOTS, SLOTS_2)
    else:
        ranking, missed = finish(found, SLOTS, SLOTS_2, COLUMNS)
    return ranking, missed


@triton.jit
def write_list(
    ranking, block_indices, ring, row, ring_row, kept, SLOTS: tl.constexpr, RING: tl.constexpr
):
    """A ranking [SLOTS_2] as a token's list, and the first `kept` entries of it in the ring."""
    slot = tl.arange(0, ranking.shape[0])
    tl.store(block_indices + row * SLOTS + slot, ranking, mask=slot < SLOTS)
    if RING > 0:
        tl.store(ring + ring_row * SLOTS + slot, ranking, mask=slot < kept)


@triton.jit
def rank(
    scores, lengths, counts, block_indices, ring, before, programs, b, r, t, T, W, RANKS,
    CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    MERGE_N: tl.constexpr,
    SLOTS: tl.constexpr, SLOTS_2: tl.constexpr, l: tl.constexpr, d: tl.constexpr, s: tl.constexpr,
    BLOCK_S: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr, STRIDE: tl.constexpr,
    RING: tl.constexpr, PROBS: tl.constexpr, INTERPOLATED: tl.constexpr, COUNTED: tl.constexpr,
    ROOM: tl.constexpr,
):  # fmt: skip
    """The ranking of token t, for all tokens of its group where it leads one; else that which the
    ring holds. Once the `programs` before have arrived."""
    PLACES: tl.constexpr = RING if RING > 0 else 1
    length, count = tl.load(lengths + b), tl.load(counts + b) if COUNTED else T
    position = length + t
    ring_row = (b * RANKS + r) * RING
    row = (b * T + t) * RANKS + r
    leader = position // STRIDE * STRIDE
    if (leader == position) & (t < count):
        hi = tl.minimum(position // d, W)
        end = candidates_end(position, NEVER, LOCAL, d, s, True)
        own = scores + row * W
        for turn in range(first_turn(before, programs, ROOM), 2):
            if turn == 1:
                wait(before, programs)
            ranking, missed = best_blocks(
                own, tl.where(turn == 1, end, tl.minimum(end, INITIAL + 1)), hi, CHUNKS, BLOCK_N,
                COLUMNS, DEPTH, SLOTS, SLOTS_2, l, d, s, BLOCK_S, INITIAL, PROBS, INTERPOLATED,
            )  # fmt: skip
            if DEPTH < SLOTS and COLUMNS > 0:  # noqa: SIM102
                if missed > 0:
                    ranking, missed = best_blocks(
                        own, end, hi, 1, MERGE_N, 0, 0, SLOTS, SLOTS_2, l, d, s, BLOCK_S, INITIAL,
                        PROBS, INTERPOLATED,
                    )  # fmt: skip
            ranking = tl.reshape(tl.where(ranking == NO_BLOCK, -1, ranking), [SLOTS_2])
            for j in range(STRIDE):
                if (t + j < T) & (turn == 1):
                    to, at = row + j * RANKS, ring_row + (position + j) % PLACES
                    write_list(
                        ranking,
                        block_indices,
                        ring,
                        to,
                        at,
                        tl.where(t + j < count, SLOTS, 0),
                        SLOTS,
                        RING,
                    )
    elif (leader < length) & (t < count):
        slot = tl.arange(0, SLOTS_2)
        kept = ring + (ring_row + (length - 1) % PLACES) * SLOTS + slot
        ranking = tl.load(kept, mask=slot < SLOTS, other=-1)
        ring_at = ring_row + position % PLACES
        write_list(ranking, block_indices, ring, row, ring_at, SLOTS, SLOTS, RING)


@triton.jit
def rank_share(
    scores, lengths, counts, block_indices, before, programs, share, b, r, t, T, W, RANKS,
    OWN: tl.constexpr, CHUNKS: tl.constexpr, OTHERS: tl.constexpr, SLOTS: tl.constexpr,
    SLOTS_2: tl.constexpr, l: tl.constexpr, d: tl.constexpr, s: tl.constexpr, BLOCK_S: tl.constexpr,
    INITIAL: tl.constexpr, LOCAL: tl.constexpr, PROBS: tl.constexpr, INTERPOLATED: tl.constexpr,
    COUNTED: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Of OWN blocks those that are among the SLOTS best of token t, each to its place in the list:
    the number of blocks that are better, counted. Once the `programs` before have arrived."""
    length, count = tl.load(lengths + b), tl.load(counts + b) if COUNTED else T
    row, position = (b * T + t) * RANKS + r, length + t
    if t < count:
        hi, own_scores = tl.minimum(position // d, W), scores + row * W
        all_end = candidates_end(position, NEVER, LOCAL, d, s, True)
        c, slot = share * OWN + tl.arange(0, OWN), tl.arange(0, SLOTS_2)
        for turn in range(first_turn(before, programs, ROOM), 2):
            if turn == 1:
                wait(before, programs)
            end = tl.where(turn == 1, all_end, 0)
            mine, again = tl.full([OWN], NO_KEY, tl.int64), 1
            # a loop of one turn: what comes out of a `while` is not formed anew for each layout in
            # which a compiler would have it
            while again > 0:
                mine = score_keys(
                    own_scores, c, end, hi, l, d, s, BLOCK_S, INITIAL, PROBS, INTERPOLATED
                )
                again -= 1
            better = tl.zeros([OWN], tl.int32)
            for c0 in range(0, tl.maximum(end, 1), CHUNKS * OTHERS):
                chunks = ()
                for i in tl.static_range(CHUNKS):
                    them = c0 + i * OTHERS + tl.arange(0, OTHERS)
                    chunks += (
                        score_keys(
                            own_scores, them, end, hi, l, d, s, BLOCK_S, INITIAL, PROBS,
                            INTERPOLATED,
                        ),
                    )  # fmt: skip
                for i in tl.static_range(CHUNKS):
                    better += tl.sum((chunks[i][:, None] > mine[None]).to(tl.int32), 0)
            best = (c >= INITIAL) & (c < end) & (better < SLOTS)
            tl.store(block_indices + row * SLOTS + better, c, mask=best)
            if share == 0:
                none = (slot >= end - INITIAL) & (slot < SLOTS) & (turn == 1)
                tl.store(block_indices + row * SLOTS + slot, -1, mask=none)
