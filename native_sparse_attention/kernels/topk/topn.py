"""A running top n on chip: fold tiles of scores in, take the n best out, best first.

Scores [M, N] come chunk by chunk, the blocks of a chunk after those of the chunk before; -inf is no
candidate. Ties go to the earlier block. Two ways, chosen by COLUMNS:

* COLUMNS > 0, column lists: of every COLUMNS-th score a sorted list of DEPTH, kept by comparing and
  swapping only; at the end the heads of the lists are merged. Exact unless one list should have
  kept more than DEPTH of the n best. That is noticed, and the tile is to be done again;
* COLUMNS = 0, a bitonic merge: the chunk's n best are merged into the running n best, always exact.
"""

import triton
import triton.language as tl

NO_BLOCK = tl.constexpr(0x7FFFFFFF)
NO_SCORE = tl.constexpr(float("-inf"))
# the order-preserving integer of -inf
NO_ORDER = tl.constexpr(-0x7F800001)
NO_KEY = tl.constexpr(-0x8000000000000000)


@triton.jit
def chunk_blocks(c0, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr):
    """Blocks [N] of the chunk at c0, in the order of its columns.

    Turned a little from one COLUMNS of them to the next, so that blocks that lie at a regular
    distance, such as the first of each document, do not meet in one list.
    """
    n = c0 + tl.arange(0, BLOCK_N)
    if COLUMNS > 1:
        # by 2531 / 4096 = 0.618 of a whole turn
        n = n ^ (((n & -COLUMNS) * 2531 >> 12) & (COLUMNS - 1))
    return n


@triton.jit
def start(M: tl.constexpr, SLOTS_2: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """Nothing found yet, for M rows."""
    if COLUMNS == 0:
        found = (tl.full([M, SLOTS_2], NO_KEY, tl.int64),)
    else:
        scores = ()
        blocks = ()
        for _ in tl.static_range(DEPTH):
            scores += (tl.full([M, COLUMNS], NO_SCORE, tl.float32),)
            blocks += (tl.full([M, COLUMNS], NO_BLOCK, tl.int32),)
        # the third: the best that each list has let go of
        found = scores, blocks, tl.full([M, COLUMNS], NO_SCORE, tl.float32)
    return found


@triton.jit
def halves(x):
    """Left and right half of [M, N]."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    return tl.split(tl.permute(tl.reshape(x, [M, 2, N // 2]), [0, 2, 1]))


@triton.jit
def insert(found, s, c):
    """Put scores s of blocks c [M, COLUMNS] into the lists, each into its column's."""
    scores, blocks, lost = found
    new_scores = ()
    new_blocks = ()
    # what takes a place is s or, from the place after its own on, what stood one before
    s_above, c_above = s, c
    for depth in tl.static_range(len(scores)):
        # strictly: what is in a list is earlier
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
                finer += halves(pieces[i])
            pieces = finer
    return pieces


@triton.jit
def in_order(s):
    """Integers in the order of scores s."""
    bits = (s + 0.0).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def sort_keys(s, c):
    """One 64-bit integer of a score and its block: greater is better, then earlier."""
    return (in_order(s).to(tl.int64) << 32) | (c ^ NO_BLOCK).to(tl.int64)


@triton.jit
def fold(found, s, c, COLUMNS: tl.constexpr):
    """Fold scores s [M, N] of blocks c [N] into what was found."""
    c = tl.broadcast_to(c[None], s.shape)
    if COLUMNS > 0:
        s_pieces, c_pieces = slices(s, COLUMNS), slices(c, COLUMNS)
        for i in tl.static_range(len(s_pieces)):
            found = insert(found, s_pieces[i], c_pieces[i])
    else:
        (best,) = found
        # one ascending, one descending: their maximum is the n best, ready to be merged
        best = tl.maximum(best, tl.topk(sort_keys(s, c), best.shape[1]))
        found = (tl.bitonic_merge(best),)
    return found


@triton.jit
def merge_lists(found, SLOTS: tl.constexpr, SLOTS_2: tl.constexpr):
    """The SLOTS best of the lists [M, SLOTS_2] and whether a list may have lost one of them."""
    scores, blocks, lost = found
    DEPTH: tl.constexpr = len(scores)
    M: tl.constexpr = lost.shape[0]
    slot = tl.arange(0, SLOTS_2)[None]
    indices = tl.full([M, SLOTS_2], NO_BLOCK, tl.int32)
    nth = tl.full([M], NO_SCORE, tl.float32)
    for j in range(SLOTS):
        nth = tl.max(scores[0], 1)
        c = tl.min(tl.where(scores[0] == nth[:, None], blocks[0], NO_BLOCK), 1)
        indices = tl.where(slot == j, c[:, None], indices)
        taken = blocks[0] == c[:, None]
        new_scores = ()
        new_blocks = ()
        for depth in tl.static_range(1, DEPTH):
            new_scores += (tl.where(taken, scores[depth], scores[depth - 1]),)
            new_blocks += (tl.where(taken, blocks[depth], blocks[depth - 1]),)
        new_scores += (tl.where(taken, NO_SCORE, scores[DEPTH - 1]),)
        new_blocks += (tl.where(taken, NO_BLOCK, blocks[DEPTH - 1]),)
        scores, blocks = new_scores, new_blocks
    # what a list let go of comes after all that it kept: it matters where all of that was taken,
    # and not where that is all that was asked for
    missed = (blocks[0] == NO_BLOCK) & (lost >= nth[:, None]) & (lost > NO_SCORE)
    missed &= SLOTS > DEPTH
    return indices, tl.max(tl.max(missed.to(tl.int32), 1), 0)


@triton.jit
def finish(found, SLOTS: tl.constexpr, SLOTS_2: tl.constexpr, COLUMNS: tl.constexpr):
    """The ranking [M, SLOTS_2], best first, NO_BLOCK in empty slots and past SLOTS; and 1 if it
    must be done again with COLUMNS = 0, else 0."""
    if COLUMNS > 0:
        indices, missed = merge_lists(found, SLOTS, SLOTS_2)
    else:
        (best,) = found
        best = tl.sort(best, descending=True)
        block = (best & NO_BLOCK).to(tl.int32) ^ NO_BLOCK
        filled = ((best >> 32).to(tl.int32) > NO_ORDER) & (tl.arange(0, SLOTS_2)[None] < SLOTS)
        indices, missed = tl.where(filled, block, NO_BLOCK), 0
    return indices, missed
