"""Copies of query rows into shared memory for `key_major_fwd_sm90.py` and `key_major_bwd_sm90.py`,
and of partial dq out of it, in Gluon.

A tile has the rows of some pairs. A pair has TOKENS neighbouring tokens, which share block indices,
of GROUP rows each, of which G are heads. The tensor memory accelerator copies pairs of eight or
more rows, a box per half row. Threads of four warps copy smaller pairs, of one token.
"""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
)

from ..common.buffers_sm90 import at_named_barrier
from ..common.dialect_sm90 import load_box, load_elements, reinterpret, store_box, thread_barrier

CONSUMERS = gl.constexpr(2)
KEYS = gl.constexpr(64)  # of a block
ROWS = gl.constexpr(64)  # of a tile of pairs
WIDTH = gl.constexpr(64)  # of a box
# layout of product operands
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))


@gluon.jit
def work_tile(tile, num_tiles, block_csr, C, BLOCKS, head, HEADS):
    """Block of a work tile, its batch row, KV head (of HEADS heads from `head` on), block number,
    first pair and end. Past the last work tile first pair and end are equal."""
    offsets, owner, ordinals, tile_pairs = block_csr[1], block_csr[2], block_csr[3], block_csr[4]
    valid = tile < num_tiles
    block = gl.load(owner + tile, mask=valid, other=0x7FFFFFFF)
    valid = block < BLOCKS
    block = gl.where(valid, block, 0)
    ordinal = gl.load(ordinals + tile, mask=valid, other=0).to(gl.int64)
    begin = gl.load(offsets + block) + ordinal * tile_pairs
    end = gl.minimum(begin + tile_pairs, gl.load(offsets + block + 1))
    end = gl.where(valid, end, begin)
    b, h = block // C // HEADS, head + block // C % HEADS
    return block, b, h, block % C, begin.to(gl.int32), end.to(gl.int32)


@gluon.constexpr_function
def in_tiles(shape, width):
    """The shape of boxes or rows, viewed as consecutive tiles [ROWS, width]."""
    return [math.prod(map(int, shape)) // (ROWS.value * width), ROWS.value, width]


@gluon.jit
def tile_of(smem, number, D: gl.constexpr):
    """Tile `number` [ROWS, D] of shared memory."""
    return reinterpret(smem, smem.dtype, in_tiles(smem.shape, D), TILE).index(number)


@gluon.jit
def head_of(e, row, R: gl.constexpr, n: gl.constexpr, G: gl.constexpr, GROUP: gl.constexpr):
    """Head of each row of pairs e; the pair's last head for padding rows."""
    return e // n % R * G + gl.minimum(row % GROUP, G - 1)


@gluon.jit
def copy_boxes(
    q, d_out, pairs, token_offset, b, i, end, bar, q_smem, do_smem, first, R: gl.constexpr,
    n: gl.constexpr, G: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Copies q and d_out of a tile from pair i on, to boxes from `first` on."""
    TOKENS: gl.constexpr = q.block_shape[1]
    PAIRS: gl.constexpr = ROWS // (TOKENS * q.block_shape[2])
    mbarrier.expect(bar, ROWS * D * 4)
    for t in gl.static_range(PAIRS):
        e = gl.load(pairs + gl.minimum(i + t, end - 1)).to(gl.int32)
        token, head = e // (n * R) * TOKENS - token_offset, e // n % R * G
        for half in gl.static_range(D // WIDTH):
            at = [b, token, head, half * WIDTH]
            box = first + half * PAIRS + t
            load_box(q, at, bar, q_smem.index(box))
            load_box(d_out, at, bar, do_smem.index(box))


@gluon.constexpr_function
def by_rows(GROUP):
    """Layout in which four warps copy a tile: a thread has rows of one pair."""
    return gl.BlockedLayout([min(int(GROUP), 4), 8], [4, 8], [4, 1], [1, 0])


@gluon.jit
def load_pairs(pairs, i, end, GROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """Pair of each row of a tile, from pair i on; the last pair for padding rows."""
    row = gl.arange(0, ROWS, LAYOUT)
    return gl.load(pairs + gl.minimum(i + row // GROUP, end - 1)).to(gl.int32)


@gluon.jit
def copy_rows(
    t, strides, e, token_offset, b, tile, R: gl.constexpr, n: gl.constexpr, G: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Copies the rows of pairs e of tensor t to `tile`, by four warps."""
    LAYOUT: gl.constexpr = by_rows(GROUP)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, tile.shape[1], gl.SliceLayout(0, LAYOUT))
    token, head = e // (n * R) - token_offset, head_of(e, row, R, n, G, GROUP).to(gl.int64)
    at = b.to(gl.int64) * strides[0] + token.to(gl.int64) * strides[1] + head * strides[2]
    load_elements(tile, t + (at[:, None] + column[None]))


@gluon.jit
def produce(
    q, d_out, k, v, lse, delta, strides, block_csr, num_tiles, head, T, C, BLOCKS, k_smem, v_smem,
    q_smem, do_smem, lse_smem, delta_smem, kv_bar, full, HEADS: gl.constexpr, R: gl.constexpr,
    n: gl.constexpr, G: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr,
    STAGES: gl.constexpr, BY_ROW: gl.constexpr,
):  # fmt: skip
    """Producer for both consumers in turn: one warp, or with BY_ROW four warps. Padding rows repeat
    the last pair, so that they are finite."""
    PAIR_ROWS: gl.constexpr = TOKENS * GROUP
    PAIRS: gl.constexpr = ROWS // PAIR_ROWS
    D: gl.constexpr = k.block_shape[3]
    BOXES: gl.constexpr = 1 if BY_ROW else PAIRS * (D // WIDTH)
    WARPS: gl.constexpr = 4 if BY_ROW else 1
    LANES: gl.constexpr = gl.BlockedLayout([1 if BY_ROW else 2], [32], [WARPS], [0])
    THREADS: gl.constexpr = 128 + 32 * WARPS
    pairs = block_csr[0]
    row = gl.arange(0, ROWS, LANES)
    tile = gl.program_id(0) * CONSUMERS
    _, b0, h0, c0, begin0, end0 = work_tile(tile, num_tiles, block_csr, C, BLOCKS, head, HEADS)
    _, b1, h1, c1, begin1, end1 = work_tile(tile + 1, num_tiles, block_csr, C, BLOCKS, head, HEADS)
    for consumer in gl.static_range(CONSUMERS):
        b, h, c = (b0, h0, c0) if consumer == 0 else (b1, h1, c1)
        bar = kv_bar.index(consumer)
        mbarrier.expect(bar, KEYS * D * 4)
        load_box(k, [b, c * KEYS, h, 0], bar, k_smem.index(consumer))
        load_box(v, [b, c * KEYS, h, 0], bar, v_smem.index(consumer))
    steps = gl.cdiv(gl.maximum(end0 - begin0, end1 - begin1), PAIRS)
    for j in range(0, steps):
        for consumer in gl.static_range(CONSUMERS):
            b, begin, end = (b0, begin0, end0) if consumer == 0 else (b1, begin1, end1)
            i = begin + j * PAIRS
            if i < end:
                stage = consumer * STAGES + j % STAGES
                e = gl.load(pairs + gl.minimum(i + row // PAIR_ROWS, end - 1)).to(gl.int32)
                token = e // (n * R) * TOKENS + row // GROUP % TOKENS
                at = token.to(gl.int64) * (R * G) + head_of(e, row, R, n, G, GROUP)
                if j >= STAGES:
                    at_named_barrier("sync", stage, THREADS)
                bar, first = full.index(stage), stage * BOXES
                if BY_ROW:
                    own_pairs = load_pairs(pairs, i, end, GROUP, gl.SliceLayout(1, by_rows(GROUP)))
                    copy_rows(q, strides, own_pairs, b * T, b, q_smem.index(first), R, n, G, GROUP)
                    # d_out is contiguous
                    packed = (0, R * G * D, D)
                    copy_rows(d_out, packed, own_pairs, 0, b, do_smem.index(first), R, n, G, GROUP)
                else:
                    copy_boxes(
                        q, d_out, pairs, b * T, b, i, end, bar, q_smem, do_smem, first, R, n, G, D
                    )
                load_elements(lse_smem.index(stage), lse + at)
                load_elements(delta_smem.index(stage), delta + at)
                async_copy.mbarrier_arrive(bar, increment_count=False)
    # complete every barrier
    for consumer in gl.static_range(CONSUMERS):
        begin, end = (begin0, end0) if consumer == 0 else (begin1, end1)
        steps = gl.maximum(gl.cdiv(end - begin, PAIRS), 0)
        for j in range(gl.maximum(steps - STAGES, 0), steps):
            at_named_barrier("sync", consumer * STAGES + j % STAGES, THREADS)


@gluon.jit
def write_boxes(partial_dq, dq, smem, i, end, origin, number, GROUP: gl.constexpr):
    """Writes dq of a tile, from pair i on, to partial_dq at the pairs' indices in the chunk, whose
    first pair is `origin`, through boxes of tile `number` of shared memory."""
    PAIRS: gl.constexpr = ROWS // GROUP
    HALVES: gl.constexpr = dq.shape[1] // WIDTH
    buffer = tile_of(smem, number * HALVES, WIDTH)
    if HALVES == 1:
        buffer.store(dq)
    else:
        low, high = dq.reshape([ROWS, HALVES, WIDTH]).permute((0, 2, 1)).split()
        buffer.store(low)
        tile_of(smem, number * HALVES + 1, WIDTH).store(high)
    fence_async_shared()
    thread_barrier()
    for t in gl.static_range(PAIRS):
        if i + t < end:
            for half in gl.static_range(HALVES):
                box = smem.index((number * HALVES + half) * PAIRS + t)
                store_box(partial_dq, [i - origin + t, 0, half * WIDTH], box)


@gluon.jit
def write_rows(partial_dq, tile, buffer, i, end, origin, G: gl.constexpr, GROUP: gl.constexpr):
    """Like `write_boxes`, but threads write the rows, through `buffer`."""
    D: gl.constexpr = tile.shape[1]
    LAYOUT: gl.constexpr = by_rows(GROUP)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    valid = (i + row // GROUP < end) & (row % GROUP < G)
    at = ((i - origin + row // GROUP).to(gl.int64) * G + row % GROUP) * D
    buffer.store(tile)
    thread_barrier()
    # evict first: read after they have left the cache
    at = partial_dq + (at[:, None] + column[None])
    gl.store(at, buffer.load(LAYOUT), mask=valid[:, None], eviction_policy="evict_first")
