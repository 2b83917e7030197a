"""Ranking of blocks by `importance="probs"`: a block's score is its softmax mass. It sums the
probabilities of the windows that overlap the block, each times the number of tokens they share,
over the heads that rank together.

Tiles are [N, M], windows by rows of queries, M = tokens x heads. A program reads its windows once,
in chunks of blocks. A window that ends in block c adds to the score of c and, if it is longer than
its stride, to the scores of blocks before c.
"""

import triton
import triton.language as tl

from ..common.primitives import grid_position, large, leaders, load_rows, soft_capped
from .topn import (
    LENGTHS,
    NO_SCORE,
    candidate_ranges,
    finish,
    first_window,
    fold,
    permute_blocks,
    start,
    write_block_indices,
)


@triton.jit
def step_windows(N: tl.constexpr, WARPS: tl.constexpr):
    """The window of a step, 0 .. N - 1, that each row of its tile holds. A thread of an MMA has
    rows r and r + 8 of every 16 WARPS rows. They hold consecutive windows, so that the thread sums
    them alone. With fewer rows, windows are in order: there `sort_windows` gives wrong results with
    Triton 3.6 on an H200 (8 warps, 32 rows)."""
    row = tl.arange(0, N)
    thread = row // 16 % WARPS * 8 + row % 8
    window = thread * (N // (8 * WARPS)) + row // (16 * WARPS) * 2 + row // 8 % 2
    return window if N >= 16 * WARPS else row


@triton.jit
def sort_windows(x, WARPS: tl.constexpr):
    """Rows [N, M] of a step's tile in the order of their windows."""
    N: tl.constexpr = x.shape[0]
    M: tl.constexpr = x.shape[1]
    if N >= 16 * WARPS:
        x = tl.reshape(x, [N // (16 * WARPS), WARPS, 2, 8, M])
        x = tl.reshape(tl.permute(x, [1, 3, 0, 2, 4]), [N, M])
    return x


@triton.jit
def mask_windows(x, visible):
    """Logits [N, M], -inf where the row's token, `visible` [N, TOKENS], does not see the window."""
    N: tl.constexpr = x.shape[0]
    M: tl.constexpr = x.shape[1]
    TOKENS: tl.constexpr = visible.shape[1]
    x = tl.where(visible[:, :, None], tl.reshape(x, [N, TOKENS, M // TOKENS]), NO_SCORE)
    return tl.reshape(x, [N, M])


@triton.jit
def sum_thread_heads(p, HEADS: tl.constexpr, PARTIALS: tl.constexpr):
    """[N, M] to [N, TOKENS x PARTIALS]: the sum over the heads that one thread of an MMA holds. It
    has columns 2 i and 2 i + 1 of every 8."""
    N: tl.constexpr = p.shape[0]
    M: tl.constexpr = p.shape[1]
    PAIR: tl.constexpr = 1 if HEADS == 1 else 2
    p = tl.reshape(p, [N, M // HEADS, HEADS // (PAIR * PARTIALS), PARTIALS, PAIR])
    return tl.reshape(tl.sum(tl.sum(p, 4), 2), [N, M // HEADS * PARTIALS])


@triton.jit
def overlap_tokens(j, P: tl.constexpr, g: tl.constexpr, WINDOW: tl.constexpr, d: tl.constexpr,
           s: tl.constexpr):  # fmt: skip
    """Tokens that block c shares with window j of the P windows that end in block c + g."""
    overlap = j * 0 + 1
    if s >= d:
        stop = (j + (g * P + 1)) * d  # the window's end
        overlap = tl.maximum(tl.minimum(stop, s) - tl.maximum(stop - WINDOW, 0), 0)
    return tl.where(j < P, overlap, 0).to(tl.float32)


@triton.jit
def block_sums(p, j, P: tl.constexpr, BACK: tl.constexpr, WINDOW: tl.constexpr, d: tl.constexpr,
               s: tl.constexpr):  # fmt: skip
    """Scores [TOKENS, CHUNK] that windows j [SLICE] of a chunk's blocks add to the block in which
    they end, to the block before it, and so on. p is [CHUNK, SLICE, TOKENS, PARTIALS]."""
    sums = ()
    for g in tl.static_range(BACK + 1):
        overlap = overlap_tokens(j, P, g, WINDOW, d, s)
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
    q_tile, lse_log2, lo, hi, ck, k_base, low, end, fewest, latest, W, scale_log2, cap,
    BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """The ranking [TOKENS, SLOTS_2] of blocks low .. end - 1, and whether it must be repeated.
    Tokens see windows lo .. hi - 1; all tokens see windows `latest` .. `fewest` - 1. `lse_log2` is
    by row. PER_BLOCK is the windows per block, padded to a power of two; a step takes SLICE."""
    TOKENS: tl.constexpr = end.shape[0]
    P: tl.constexpr = F.s // F.d if F.s > F.d else 1
    # blocks that a window overlaps before the one in which it ends
    BACK: tl.constexpr = (F.WINDOW + F.s - F.d - 1) // F.s if F.s >= F.d else 0
    # Triton before 3.6 has no `min` of constexprs
    PARTIALS: tl.constexpr = (F.HEADS + 1) // 2 if F.HEADS < 7 else 4
    ROOM: tl.constexpr = BLOCK_N // (COLUMNS if COLUMNS > 0 else F.SLOTS_2)
    SLICE: tl.constexpr = F.PER_BLOCK if F.PER_BLOCK < ROOM else ROOM
    CHUNK: tl.constexpr = BLOCK_N // SLICE
    STEPS: tl.constexpr = F.PER_BLOCK // SLICE
    running = start(TOKENS, F.SLOTS_2, COLUMNS, DEPTH)
    carried = ()
    sums = ()
    for g in tl.static_range(BACK + 1):
        sums += (tl.zeros([TOKENS, CHUNK], tl.float32),)
        if g < BACK:
            carried += (tl.zeros([TOKENS, CHUNK], tl.float32),)

    u = step_windows(BLOCK_N, F.WARPS)
    chunks = tl.cdiv(tl.max(end, 0) + BACK, CHUNK)
    for step in range(tl.min(low, 0) // CHUNK * STEPS, chunks * STEPS):
        c0, j0 = step // STEPS * CHUNK, step % STEPS * SLICE
        w = first_window(c0 + u // SLICE, F.d, F.s) + (j0 + u % SLICE)
        rows = large(tl.minimum(w, W - 1), F.WIDE) * ck.n
        k_tile = load_rows(ck.ptr + k_base, rows, F.D, F.BLOCK_D, tl.full([BLOCK_N], True, tl.int1))
        x = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
        x *= scale_log2
        if F.CAP:
            x = soft_capped(x, cap)
        x -= lse_log2[None]
        if W > 0:  # always true: the compiler puts the next step's loads before a branch
            last = first_window(c0 + (CHUNK - 1), F.d, F.s) + F.PER_BLOCK
            if (last > fewest) | (first_window(c0, F.d, F.s) < latest):
                x = mask_windows(x, (w[:, None] >= lo[None]) & (w[:, None] < hi[None]))
            p = sort_windows(sum_thread_heads(tl.exp2(x), F.HEADS, PARTIALS), F.WARPS)
            p = tl.reshape(p, [CHUNK, SLICE, TOKENS, PARTIALS])
            step_sums = block_sums(p, j0 + tl.arange(0, SLICE), P, BACK, F.WINDOW, F.d, F.s)
            if STEPS > 1:
                new_sums = ()
                for g in tl.static_range(BACK + 1):
                    new_sums += (tl.where(j0 == 0, 0.0, sums[g]) + step_sums[g],)
                sums = new_sums
                step_sums = new_sums
            if j0 == F.PER_BLOCK - SLICE:
                score, carried = complete_scores(step_sums, carried)
                c = permute_blocks(c0 + tl.arange(0, CHUNK), COLUMNS)
                if COLUMNS > 1:
                    score = gather_columns(score, c - c0)
                c -= BACK
                candidate = (c[None] >= low[:, None]) & (c[None] < end[:, None])
                score = tl.where(candidate, score, NO_SCORE)
                # a sort key has no bit for the sign of a block
                running = fold(running, score, tl.maximum(c, 0), COLUMNS)
    return finish(running, F.SLOTS, F.SLOTS_2, COLUMNS)


@triton.jit(do_not_specialize=LENGTHS)
def nsa_topk_softmax_mass(
    q, ck, lse, out, leader_indices, starts, documents, first_token, T, C, W, RANKS, scale_log2,
    cap, F: tl.constexpr,
):  # fmt: skip
    """One program: the rankings of a tile of groups of tokens of one row and ranking head, which
    sums the scores of G query heads. Reads their queries, log-sum-exp and visible windows."""
    tile, line, tiles, _lines = grid_position(F.FLIPPED)
    tile = tiles - 1 - tile
    b, r = (line // RANKS).to(tl.int64), (line % RANKS).to(tl.int64)
    if F.RAGGED:
        first_token = tl.load(starts + b).to(tl.int32)
    GROUPS: tl.constexpr = F.BLOCK_M // F.HEADS
    index = tile * GROUPS + tl.arange(0, GROUPS)
    position, token, ranked = leaders(index, first_token, T, F.STRIDE)
    low, end, lo, hi = candidate_ranges(position, token, ranked, documents, b, T, C, W, F)
    # all tokens see the windows `latest` .. `fewest` - 1
    fewest, latest = tl.min(tl.where(ranked, hi, W), 0), tl.max(tl.where(ranked, lo, 0), 0)
    hi = tl.where(ranked, hi, 0)

    # rows are leaders x the G query heads of ranking head r, padded to HEADS
    row = tl.arange(0, F.BLOCK_M)
    _, row_token, ranked = leaders(tile * GROUPS + row // F.HEADS, first_token, T, F.STRIDE)
    head, real = r * F.G + row % F.HEADS, ranked & (row % F.HEADS < F.G)
    q_rows = b * q.b + row_token.to(tl.int64) * q.n + head * q.h
    q_tile = load_rows(q.ptr, q_rows, F.D, F.BLOCK_D, real)
    row = (b * T + row_token) * (RANKS * F.G) + head
    lse_log2 = tl.load(lse + row, mask=real, other=0.0) * 1.4426950408889634
    # rows that do not exist, or see no window, have probability 0
    lse_log2 = tl.where(real & (lse_log2 > NO_SCORE), lse_log2, float("inf"))

    k_base = b * ck.b + r // F.RANKS_PER_KV * ck.h
    indices, missed = best_by_probs(
        q_tile, lse_log2, lo, hi, ck, k_base, low, end, fewest, latest, W, scale_log2, cap,
        F.BLOCK_N, F.COLUMNS, F.DEPTH, F,
    )  # fmt: skip
    if F.DEPTH < F.SLOTS and F.COLUMNS > 0:  # noqa: SIM102
        if missed > 0:
            indices, missed = best_by_probs(
                q_tile, lse_log2, lo, hi, ck, k_base, low, end, fewest, latest, W, scale_log2,
                cap, F.MERGE_N, 0, 0, F,
            )  # fmt: skip
    write_block_indices(indices, out, leader_indices, b, r, token, T, RANKS, F)
