"""Steps of `query_major.py`: tiles of a program, blocks of a tile, and their visibility."""

import triton
import triton.language as tl


@triton.jit
def own_tiles(program, counts, line, T, start, groups, MEMBERS: tl.constexpr, UNION: tl.constexpr,
              STEP: tl.constexpr, TOKENS: tl.constexpr, STRIDE: tl.constexpr):  # fmt: skip
    """First tile of a program and one past its last. `counts` are the sizes of the unions, 0 for a
    group without one; a group has MEMBERS members. With UNION a program has STEP unions, otherwise
    STEP tiles of a group without a union."""
    first = program * STEP
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
def query_tile(tile, start, T, G: tl.constexpr, TOKENS: tl.constexpr, STRIDE: tl.constexpr,
               BLOCK_M: tl.constexpr):  # fmt: skip
    """Rows of a tile that starts at an aligned group: token, head of the head group and validity of
    each row, and a token that has the tile's block indices."""
    first = tile * TOKENS - start % STRIDE
    row = tl.arange(0, BLOCK_M)
    token = first + row // G
    real = (row < TOKENS * G) & (token >= 0) & (token < T)
    return token, row % G, real, tl.minimum(tl.maximum(first, 0), T - 1)


@triton.jit
def tile_keys(blocks, j0, n, S, s, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys from j0 on of n blocks, concatenated and padded to BLOCK_S each. Returns the position of
    the first key, positions and validity of all keys [N], and their packed blocks (a scalar if
    BLOCK_N <= BLOCK_S)."""
    j = j0 + tl.arange(0, BLOCK_N)
    if BLOCK_N <= BLOCK_S:
        packed = tl.load(blocks + j0 // BLOCK_S, mask=j0 // BLOCK_S < n, other=-1)
    else:
        packed = tl.load(blocks + j // BLOCK_S, mask=j // BLOCK_S < n, other=-1)
    c = packed.to(tl.int32)
    key = c * s + j % BLOCK_S
    # key >= 0 stands for c >= 0: a scalar mask times a vector is an integer in Triton 3.9's
    # interpreter
    return c * s + j0 % BLOCK_S, key, (key >= 0) & (j % BLOCK_S < s) & (key < S), packed


@triton.jit
def row_bias(packed, G: tl.constexpr, STRIDE: tl.constexpr, BLOCK_M: tl.constexpr,
             UNION: tl.constexpr):  # fmt: skip
    """0 for the rows [M] that see a packed block, else -inf. With UNION a row sees the blocks that
    its member chose; otherwise all rows see the block unless the index is -1."""
    if UNION:
        member = tl.arange(0, BLOCK_M) // (G * STRIDE)
        sees = (((packed >> 32).to(tl.int32) >> member) & 1) != 0
    else:
        sees = tl.full([BLOCK_M], packed, tl.int32) >= 0
    return tl.where(sees, 0.0, float("-inf"))


@triton.jit
def visible_keys(valid, key, packed, position, G: tl.constexpr, STRIDE: tl.constexpr,
                 BLOCK_M: tl.constexpr, UNION: tl.constexpr, DIAGONAL: tl.constexpr,
                 end, ENDS: tl.constexpr):  # fmt: skip
    """Mask [M, N] of the keys that each row sees. With UNION a row sees the blocks that its member
    chose; with ENDS the keys before the row's `end`."""
    visible = valid[None]
    if UNION:
        member = tl.arange(0, BLOCK_M) // (G * STRIDE)
        held = (packed + tl.zeros_like(key)) >> 32
        held = held.to(tl.int32)[None] >> member[:, None]
        visible = visible & ((held & 1) != 0)
    if DIAGONAL:
        visible = visible & (key[None] <= position[:, None])
    if ENDS:
        visible = visible & (key[None] < end[:, None])
    return visible


@triton.jit
def slot_gates(gates, bt, r, slot, R, n, real):
    """Gates [M, N] of slots [N] of rows [M]."""
    at = ((bt * R + r) * n)[:, None] + slot[None]
    valid = real[:, None] & (slot < n)[None]
    return tl.load(gates + at, mask=valid, other=1.0).to(tl.float32)


@triton.jit
def tile_blocks(block_indices, counts, line, tile, bt, r, R, n, groups, SLOTS: tl.constexpr,
                UNION: tl.constexpr):  # fmt: skip
    """Pointer to the blocks of a tile, and their number: of the union, or of the block indices of
    token bt up to the last valid one."""
    if UNION:
        blocks = block_indices + (line * groups + tile) * n
        length = tl.load(counts + line * groups + tile)
    else:
        blocks = block_indices + (bt * R + r) * n
        slot = tl.arange(0, SLOTS)
        c = tl.load(blocks + slot, mask=slot < n, other=-1)
        length = tl.max(tl.where(c >= 0, slot + 1, 0), 0)
    return blocks, length
