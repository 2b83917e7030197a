"""Rows of queries into shared memory for `key_major_fwd_sm90.py` and `key_major_bwd_sm90.py`, and
partial dq out of it, in Gluon.

A tile has rows of some entries: of TOKENS neighbours, which share a list, GROUP each, of which G
are heads. Of eight rows and more the tensor memory accelerator moves an entry's, a box for each
half of a row; fewer are no box: threads of four warps copy them, of one token.
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

PARTS = gl.constexpr(2)
KEYS = gl.constexpr(64)  # of a block
ROWS = gl.constexpr(64)  # of a tile of entries
WIDTH = gl.constexpr(64)  # of a box
# as products read it
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))


@gluon.jit
def item_of(item, items, block_csr, C, BLOCKS, head, HEADS):
    """Block of an item, its row, KV head (of so many from `head` on) and number there, its first
    entry and one past the last; no entries for one that is none."""
    bounds, owner, ordinals, chunk = block_csr[1], block_csr[2], block_csr[3], block_csr[4]
    there = item < items
    block = gl.load(owner + item, mask=there, other=0x7FFFFFFF)
    there = block < BLOCKS
    block = gl.where(there, block, 0)
    ordinal = gl.load(ordinals + item, mask=there, other=0).to(gl.int64)
    begin = gl.load(bounds + block) + ordinal * chunk
    end = gl.minimum(begin + chunk, gl.load(bounds + block + 1))
    end = gl.where(there, end, begin)
    b, h = block // C // HEADS, head + block // C % HEADS
    return block, b, h, block % C, begin.to(gl.int32), end.to(gl.int32)


@gluon.constexpr_function
def in_tiles(shape, width):
    """The shape of boxes, or rows, as tiles of rows that wide, one after the other."""
    return [math.prod(map(int, shape)) // (ROWS.value * width), ROWS.value, width]


@gluon.jit
def tile_of(smem, number, D: gl.constexpr):
    """A tile of rows so wide, counted by such tiles."""
    return reinterpret(smem, smem.dtype, in_tiles(smem.shape, D), TILE).index(number)


@gluon.jit
def head_of(e, row, R: gl.constexpr, n: gl.constexpr, G: gl.constexpr, GROUP: gl.constexpr):
    """Of rows of entries e the head; of those that are none the last of the entry's."""
    return e // n % R * G + gl.minimum(row % GROUP, G - 1)


@gluon.jit
def copy_boxes(
    q, d_out, entries, before, b, i, end, bar, q_smem, do_smem, first, R: gl.constexpr,
    n: gl.constexpr, G: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """q and d_out of a tile of entries from i on, to boxes from `first` on; `before` are the tokens
    of rows before b."""
    TOKENS: gl.constexpr = q.block_shape[1]
    ENTRIES: gl.constexpr = ROWS // (TOKENS * q.block_shape[2])
    mbarrier.expect(bar, ROWS * D * 4)
    for t in gl.static_range(ENTRIES):
        e = gl.load(entries + gl.minimum(i + t, end - 1)).to(gl.int32)
        token, head = e // (n * R) * TOKENS - before, e // n % R * G
        for half in gl.static_range(D // WIDTH):
            at = [b, token, head, half * WIDTH]
            place = first + half * ENTRIES + t
            load_box(q, at, bar, q_smem.index(place))
            load_box(d_out, at, bar, do_smem.index(place))


@gluon.constexpr_function
def by_rows(GROUP):
    """How four warps copy a tile: a thread has rows of one entry."""
    return gl.BlockedLayout([min(int(GROUP), 4), 8], [4, 8], [4, 1], [1, 0])


@gluon.jit
def load_entries(entries, i, end, GROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """The entry of each row of a tile of entries from i on; of rows that are none the last."""
    row = gl.arange(0, ROWS, LAYOUT)
    return gl.load(entries + gl.minimum(i + row // GROUP, end - 1)).to(gl.int32)


@gluon.jit
def copy_rows(
    t, strides, e, before, b, tile, R: gl.constexpr, n: gl.constexpr, G: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """As `copy_boxes`, of t the rows of entries e, row by row, by four warps."""
    LAYOUT: gl.constexpr = by_rows(GROUP)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, tile.shape[1], gl.SliceLayout(0, LAYOUT))
    token, head = e // (n * R) - before, head_of(e, row, R, n, G, GROUP).to(gl.int64)
    at = b.to(gl.int64) * strides[0] + token.to(gl.int64) * strides[1] + head * strides[2]
    load_elements(tile, t + (at[:, None] + column[None]))


@gluon.jit
def read(
    q, d_out, k, v, lse, delta, strides, block_csr, items, head, T, C, BLOCKS, k_smem, v_smem,
    q_smem, do_smem, lse_smem, delta_smem, kv_bar, full, HEADS: gl.constexpr, R: gl.constexpr,
    n: gl.constexpr, G: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr,
    STAGES: gl.constexpr, FEW: gl.constexpr,
):  # fmt: skip
    """The warps that read, for both parts in turn: with FEW four, row by row. Rows that are none
    are those of the last entry: they are finite."""
    EACH: gl.constexpr = TOKENS * GROUP
    ENTRIES: gl.constexpr = ROWS // EACH
    D: gl.constexpr = k.block_shape[3]
    TILES: gl.constexpr = 1 if FEW else ENTRIES * (D // WIDTH)
    WARPS: gl.constexpr = 4 if FEW else 1
    LANES: gl.constexpr = gl.BlockedLayout([1 if FEW else 2], [32], [WARPS], [0])
    THREADS: gl.constexpr = 128 + 32 * WARPS
    entries = block_csr[0]
    row = gl.arange(0, ROWS, LANES)
    item = gl.program_id(0) * PARTS
    _, b0, h0, c0, begin0, end0 = item_of(item, items, block_csr, C, BLOCKS, head, HEADS)
    _, b1, h1, c1, begin1, end1 = item_of(item + 1, items, block_csr, C, BLOCKS, head, HEADS)
    for part in gl.static_range(PARTS):
        b, h, c = (b0, h0, c0) if part == 0 else (b1, h1, c1)
        bar = kv_bar.index(part)
        mbarrier.expect(bar, KEYS * D * 4)
        load_box(k, [b, c * KEYS, h, 0], bar, k_smem.index(part))
        load_box(v, [b, c * KEYS, h, 0], bar, v_smem.index(part))
    steps = gl.cdiv(gl.maximum(end0 - begin0, end1 - begin1), ENTRIES)
    for j in range(0, steps):
        for part in gl.static_range(PARTS):
            b, begin, end = (b0, begin0, end0) if part == 0 else (b1, begin1, end1)
            i = begin + j * ENTRIES
            if i < end:
                slot = part * STAGES + j % STAGES
                e = gl.load(entries + gl.minimum(i + row // EACH, end - 1)).to(gl.int32)
                token = e // (n * R) * TOKENS + row // GROUP % TOKENS
                at = token.to(gl.int64) * (R * G) + head_of(e, row, R, n, G, GROUP)
                if j >= STAGES:
                    at_named_barrier("sync", slot, THREADS)
                bar, first = full.index(slot), slot * TILES
                if FEW:
                    own = load_entries(entries, i, end, GROUP, gl.SliceLayout(1, by_rows(GROUP)))
                    copy_rows(q, strides, own, b * T, b, q_smem.index(first), R, n, G, GROUP)
                    # counted through all rows
                    whole = (0, R * G * D, D)
                    copy_rows(d_out, whole, own, 0, b, do_smem.index(first), R, n, G, GROUP)
                else:
                    copy_boxes(
                        q, d_out, entries, b * T, b, i, end, bar, q_smem, do_smem, first, R, n, G, D
                    )
                load_elements(lse_smem.index(slot), lse + at)
                load_elements(delta_smem.index(slot), delta + at)
                async_copy.mbarrier_arrive(bar, increment_count=False)
    # no barrier may be left halfway
    for part in gl.static_range(PARTS):
        begin, end = (begin0, end0) if part == 0 else (begin1, end1)
        steps = gl.maximum(gl.cdiv(end - begin, ENTRIES), 0)
        for j in range(gl.maximum(steps - STAGES, 0), steps):
            at_named_barrier("sync", part * STAGES + j % STAGES, THREADS)


@gluon.jit
def write_boxes(part, dq, smem, i, end, origin, number, GROUP: gl.constexpr):
    """dq of a tile of entries from i on, each where it lies among the span's, which begin at
    `origin`; by way of boxes of shared memory, those of its tile of that number."""
    TOKENS: gl.constexpr = ROWS // GROUP
    HALVES: gl.constexpr = dq.shape[1] // WIDTH
    here = tile_of(smem, number * HALVES, WIDTH)
    if HALVES == 1:
        here.store(dq)
    else:
        low, high = dq.reshape([ROWS, HALVES, WIDTH]).permute((0, 2, 1)).split()
        here.store(low)
        tile_of(smem, number * HALVES + 1, WIDTH).store(high)
    fence_async_shared()
    thread_barrier()
    for t in gl.static_range(TOKENS):
        if i + t < end:
            for half in gl.static_range(HALVES):
                box = smem.index((number * HALVES + half) * TOKENS + t)
                store_box(part, [i - origin + t, 0, half * WIDTH], box)


@gluon.jit
def write_rows(part, tile, here, i, end, origin, G: gl.constexpr, GROUP: gl.constexpr):
    """As `write_boxes`, row by row, by way of `here`."""
    D: gl.constexpr = tile.shape[1]
    LAYOUT: gl.constexpr = by_rows(GROUP)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    there = (i + row // GROUP < end) & (row % GROUP < G)
    at = ((i - origin + row // GROUP).to(gl.int64) * G + row % GROUP) * D
    here.store(tile)
    thread_barrier()
    # read when the cache no longer holds them
    at = part + (at[:, None] + column[None])
    gl.store(at, here.load(LAYOUT), mask=there[:, None], eviction_policy="evict_first")
