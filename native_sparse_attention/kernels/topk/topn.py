"""A running top n on chip: fold tiles of scores in, take the n best out, best first.

Scores [M, N] come chunk by chunk, in the order of blocks; a score of -inf is no candidate. Ties go
to the earlier block. COLUMNS chooses one of two methods:

* COLUMNS > 0, sorted columns: column i keeps the DEPTH best of every COLUMNS-th score, sorted by
  compare and swap. At the end the columns are merged. The result is exact unless a column lost one
  of the n best. The kernel detects a possible loss, and the caller repeats the tile;
* COLUMNS = 0, a bitonic merge of the chunk's n best into the running n best: always exact.
"""

import triton
import triton.language as tl

from ..common.primitives import candidates_end, document_interval

# one compiled kernel for all lengths and positions
LENGTHS = ["T", "C", "W", "first_token"]
NO_BLOCK = tl.constexpr(0x7FFFFFFF)
NO_SCORE = tl.constexpr(float("-inf"))
# the order-preserving integer of -inf
NO_ORDER = tl.constexpr(-0x7F800001)
NO_KEY = tl.constexpr(-0x8000000000000000)


@triton.jit
def first_window(c, d: tl.constexpr, s: tl.constexpr):
    """The first window that ends in block c or, for d > s, the window that covers block c."""
    return c * (s // d) if s >= d else c // (d // s)


@triton.jit
def candidate_ranges(position, token, ranked, documents, b, T, C, W, F: tl.constexpr):
    """Of leaders [M]: the blocks low .. end - 1 that they may rank, of C, none where not `ranked`;
    the windows lo .. hi - 1 that they see, of W."""
    low = tl.full(position.shape, F.INITIAL, tl.int32)
    end = candidates_end(position, C, F.LOCAL, F.d, F.s, F.CAUSAL)
    lo = position * 0
    hi = tl.minimum(lo + W, position // F.d if F.CAUSAL else W)
    if F.DOCUMENTS:
        firsts, lasts = documents.first + b * T, documents.last + b * T
        clamped = tl.minimum(tl.maximum(token, 0), T - 1)
        low = tl.load(firsts + clamped) // F.s + F.INITIAL
        end = tl.minimum(end, tl.cdiv(tl.load(lasts + clamped), F.s))
        lo, hi = document_interval(lo, hi, token, T, firsts, lasts, F.d)
    return tl.where(ranked, low, C), tl.where(ranked, end, 0), lo, hi


@triton.jit
def permute_blocks(n, COLUMNS: tl.constexpr):
    """The blocks of columns n, counted over all chunks. Runs of COLUMNS blocks are permuted: blocks
    at a regular distance, such as the first of each document, do not fall into one column."""
    if COLUMNS > 1:
        # from one run to the next by 2531 / 4096 = 0.618 of COLUMNS
        n = n ^ (((n & -COLUMNS) * 2531 >> 12) & (COLUMNS - 1))
    return n


@triton.jit
def start(M: tl.constexpr, SLOTS_2: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """The empty top n of M rows."""
    if COLUMNS == 0:
        running = (tl.full([M, SLOTS_2], NO_KEY, tl.int64),)
    else:
        scores = ()
        blocks = ()
        for _ in tl.static_range(DEPTH):
            scores += (tl.full([M, COLUMNS], NO_SCORE, tl.float32),)
            blocks += (tl.full([M, COLUMNS], NO_BLOCK, tl.int32),)
        # the third: the best score that each column has lost
        running = scores, blocks, tl.full([M, COLUMNS], NO_SCORE, tl.float32)
    return running


@triton.jit
def insert(running, s, c):
    """Insert scores s of blocks c [M, COLUMNS], each into its column."""
    scores, blocks, lost = running
    new_scores = ()
    new_blocks = ()
    # a depth takes s, or below the depth of s the entry of the depth above
    s_above, c_above = s, c
    for depth in tl.static_range(len(scores)):
        # strictly better: blocks already in the column are earlier
        better = s > scores[depth]
        new_scores += (tl.where(better, s_above, scores[depth]),)
        new_blocks += (tl.where(better, c_above, blocks[depth]),)
        s_above = tl.where(better, scores[depth], s)
        c_above = tl.where(better, blocks[depth], c)
    return new_scores, new_blocks, tl.maximum(lost, s_above)


@triton.jit
def slices(x, COLUMNS: tl.constexpr):
    """[M, N] cut into a tuple of [M, COLUMNS], from left to right."""
    pieces = (x,)
    for _ in tl.static_range(8):
        if pieces[0].shape[1] > COLUMNS:
            finer = ()
            for i in tl.static_range(len(pieces)):
                halves = tl.reshape(pieces[i], [x.shape[0], 2, pieces[i].shape[1] // 2])
                finer += tl.split(tl.permute(halves, [0, 2, 1]))
            pieces = finer
    return pieces


@triton.jit
def sort_keys(s, c):
    """64-bit integers that order by score, then by block: greater is better, then earlier."""
    bits = (s + 0.0).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (order.to(tl.int64) << 32) | (c ^ NO_BLOCK).to(tl.int64)


@triton.jit
def fold(running, s, c, COLUMNS: tl.constexpr):
    """Fold scores s [M, N] of blocks c [N] into the running top n."""
    c = tl.broadcast_to(c[None], s.shape)
    if COLUMNS > 0:
        s_pieces, c_pieces = slices(s, COLUMNS), slices(c, COLUMNS)
        for i in tl.static_range(len(s_pieces)):
            running = insert(running, s_pieces[i], c_pieces[i])
    else:
        (best,) = running
        # one is ascending, one descending: their maximum is the n best, a bitonic sequence
        best = tl.maximum(best, tl.topk(sort_keys(s, c), best.shape[1]))
        running = (tl.bitonic_merge(best),)
    return running


@triton.jit
def take(scores, blocks, c):
    """The sorted columns without blocks c [M], at the top of theirs."""
    is_taken = blocks[0] == c[:, None]
    new_scores = ()
    new_blocks = ()
    for depth in tl.static_range(1, len(scores)):
        new_scores += (tl.where(is_taken, scores[depth], scores[depth - 1]),)
        new_blocks += (tl.where(is_taken, blocks[depth], blocks[depth - 1]),)
    new_scores += (tl.where(is_taken, NO_SCORE, scores[len(scores) - 1]),)
    new_blocks += (tl.where(is_taken, NO_BLOCK, blocks[len(blocks) - 1]),)
    return new_scores, new_blocks


@triton.jit
def merge_columns(running, SLOTS: tl.constexpr, SLOTS_2: tl.constexpr):
    """The SLOTS best of the columns [M, SLOTS_2], and 1 if a column may have lost one of them."""
    scores, blocks, lost = running
    DEPTH: tl.constexpr = len(scores)
    M: tl.constexpr = lost.shape[0]
    slot = tl.arange(0, SLOTS_2)[None]
    indices = tl.full([M, SLOTS_2], NO_BLOCK, tl.int32)
    nth = tl.full([M], NO_SCORE, tl.float32)
    for j in range(SLOTS):
        nth = tl.max(scores[0], 1)
        c = tl.min(tl.where(scores[0] == nth[:, None], blocks[0], NO_BLOCK), 1)
        indices = tl.where(slot == j, c[:, None], indices)
        scores, blocks = take(scores, blocks, c)
    # a column's lost scores rank below all scores that it kept: they matter only if all of these
    # were taken, and never if the column is as deep as the top n
    missed = (blocks[0] == NO_BLOCK) & (lost >= nth[:, None]) & (lost > NO_SCORE)
    missed &= SLOTS > DEPTH
    return indices, tl.max(tl.max(missed.to(tl.int32), 1), 0)


@triton.jit
def finish(running, SLOTS: tl.constexpr, SLOTS_2: tl.constexpr, COLUMNS: tl.constexpr):
    """The ranking [M, SLOTS_2], best first, NO_BLOCK in empty slots and past SLOTS; and 1 if the
    caller must repeat it with COLUMNS = 0, else 0."""
    if COLUMNS > 0:
        indices, missed = merge_columns(running, SLOTS, SLOTS_2)
    else:
        (best,) = running
        best = tl.sort(best, descending=True)
        block = (best & NO_BLOCK).to(tl.int32) ^ NO_BLOCK
        filled = ((best >> 32).to(tl.int32) > NO_ORDER) & (tl.arange(0, SLOTS_2)[None] < SLOTS)
        indices, missed = tl.where(filled, block, NO_BLOCK), 0
    return indices, missed


@triton.jit
def write_block_indices(indices, out, leader_indices, b, r, token, T, RANKS, F: tl.constexpr):
    """Write each group's ranking [M, SLOTS_2] for its tokens. A group whose leader came before
    this call gets the ranking at `leader_indices`."""
    slot = tl.arange(0, indices.shape[1])
    indices = tl.where(indices == NO_BLOCK, -1, indices)
    if F.STRIDE > 1:
        leader_ranking = tl.full([indices.shape[1]], -1, tl.int32)
        if leader_indices is not None:
            leader_ranking = tl.load(
                leader_indices + (b * RANKS + r) * F.SLOTS + slot, mask=slot < F.SLOTS, other=-1
            )
        indices = tl.where((token < 0)[:, None], leader_ranking[None], indices)
    for j in range(F.STRIDE):
        t = token + j
        row = (b * T + t) * RANKS + r
        mask = ((t >= 0) & (t < T))[:, None] & (slot < F.SLOTS)[None]
        tl.store(out + row[:, None] * F.SLOTS + slot[None], indices, mask=mask)
