"""Steps of `query_major.py`: which tiles a program has, what a tile's list holds, who sees it."""

import triton
import triton.language as tl


@triton.jit
def own_tiles(place, counts, line, T, start, groups, MEMBERS: tl.constexpr, UNION: tl.constexpr,
              STEP: tl.constexpr, TOKENS: tl.constexpr, STRIDE: tl.constexpr):  # fmt: skip
    """First tile of the program at `place` and one past its last. Where unions of LISTS lists have
    `counts` entries, those are STEP unions with UNITED, otherwise STEP tiles of a group without
    one."""
    first = place * STEP
    if MEMBERS == 1:
        end = first + 1
    elif UNION:
        group = first + tl.arange(0, STEP)
        count = tl.load(counts + line * groups + group, mask=group < groups, other=0)
        end = tl.where(tl.max(count, 0) > 0, tl.minimum(first + STEP, groups), first)
    else:
        count = tl.load(counts + line * groups + first // MEMBERS)
        end = tl.minimum(first + STEP, tl.cdiv(T + start % STRIDE, TOKENS))
        end = tl.where(count > 0, first, end)
    return first, end


@triton.jit
def list_tile(tile, start, T, G: tl.constexpr, TOKENS: tl.constexpr, STRIDE: tl.constexpr,
              BLOCK_M: tl.constexpr):  # fmt: skip
    """Rows of a tile that begins where an aligned group does: token and group head of each, whether
    it is one, and a token whose list is the tile's."""
    first = tile * TOKENS - start % STRIDE
    row = tl.arange(0, BLOCK_M)
    token = first + row // G
    real = (row < TOKENS * G) & (token >= 0) & (token < T)
    return token, row % G, real, tl.minimum(tl.maximum(first, 0), T - 1)


@triton.jit
def list_keys(entries, j0, n, S, s, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys j0 and on of the blocks of n entries laid end to end, each padded to BLOCK_S: the
    position of the first, the positions of all, which of them are there, and the entries: one
    where they are of one block."""
    j = j0 + tl.arange(0, BLOCK_N)
    if BLOCK_N <= BLOCK_S:
        entry = tl.load(entries + j0 // BLOCK_S, mask=j0 // BLOCK_S < n, other=-1)
    else:
        entry = tl.load(entries + j // BLOCK_S, mask=j // BLOCK_S < n, other=-1)
    c = entry.to(tl.int32)
    key = c * s + j % BLOCK_S
    # of a negative entry all keys are: a mask of c alone is a scalar, whose product with a vector
    # Triton 3.9's interpreter takes for an integer
    return c * s + j0 % BLOCK_S, key, (key >= 0) & (j % BLOCK_S < s) & (key < S), entry


@triton.jit
def row_bias(entry, G: tl.constexpr, STRIDE: tl.constexpr, BLOCK_M: tl.constexpr,
             UNION: tl.constexpr):  # fmt: skip
    """Of an entry, 0 where rows [M] see its block, else -inf: of a union those whose list holds
    it, otherwise all of them or none."""
    if UNION:
        number = tl.arange(0, BLOCK_M) // (G * STRIDE)
        sees = (((entry >> 32).to(tl.int32) >> number) & 1) != 0
    else:
        sees = tl.full([BLOCK_M], entry, tl.int32) >= 0
    return tl.where(sees, 0.0, float("-inf"))


@triton.jit
def visible_keys(there, key, entry, position, G: tl.constexpr, STRIDE: tl.constexpr,
                 BLOCK_M: tl.constexpr, UNION: tl.constexpr, DIAGONAL: tl.constexpr,
                 end, ENDS: tl.constexpr):  # fmt: skip
    """Which keys rows see, [M, N]: of an entry of a union, the rows whose list holds it; with ENDS
    those before each row's `end`."""
    visible = there[None]
    if UNION:
        number = tl.arange(0, BLOCK_M) // (G * STRIDE)
        held = (entry + tl.zeros_like(key)) >> 32
        held = held.to(tl.int32)[None] >> number[:, None]
        visible = visible & ((held & 1) != 0)
    if DIAGONAL:
        visible = visible & (key[None] <= position[:, None])
    if ENDS:
        visible = visible & (key[None] < end[:, None])
    return visible


@triton.jit
def slot_gates(gates, bt, r, slot, R, n, real):
    """Gates [M, N] of slots [N] of the lists of rows [M]."""
    at = ((bt * R + r) * n)[:, None] + slot[None]
    there = real[:, None] & (slot < n)[None]
    return tl.load(gates + at, mask=there, other=1.0).to(tl.float32)


@triton.jit
def tile_entries(block_indices, counts, line, tile, bt, r, R, n, groups, SLOTS: tl.constexpr,
                 UNION: tl.constexpr):  # fmt: skip
    """What the tile of token bt walks: where its entries are, and how many; of a list up to the
    last that holds a block."""
    if UNION:
        entries = block_indices + (line * groups + tile) * n
        length = tl.load(counts + line * groups + tile)
    else:
        entries = block_indices + (bt * R + r) * n
        slot = tl.arange(0, SLOTS)
        c = tl.load(entries + slot, mask=slot < n, other=-1)
        length = tl.max(tl.where(c >= 0, slot + 1, 0), 0)
    return entries, length
