"""dk, dv and, in parts, dq of the listed blocks, as `pairs.py`. In Gluon.

A program has two items (see `inverse.py`), one for each part of four warps, which holds dk and dv
of the item's block in registers; a warp reads the rows of both, each into a ring of places of its
own. [keys, rows] of a product are the left operand of the next, in registers; for dq its transpose
is needed, in shared memory, where dq itself is then, until it is written.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .gradients import probabilities
from .ring import at_barrier, counters, places

PARTS = gl.constexpr(2)
KEYS = gl.constexpr(64)  # of a block
ROWS = gl.constexpr(64)  # of a tile of entries
THREADS = gl.constexpr(160)  # of a part and the warp that reads

# one compiled kernel for all lengths
LENGTHS = ["T", "S", "C", "BLOCKS", "chunk", "items", "first", "length"]


@gluon.jit
def item_of(item, items, inverse, C, BLOCKS, K):
    """Block of an item, its row, KV head and number there, its first entry and one past the last;
    no entries for one that is none."""
    bounds, owner, item_bounds, chunk = inverse[1], inverse[2], inverse[3], inverse[4]
    there = item < items
    block = gl.load(owner + item, mask=there, other=0x7FFFFFFF)
    there = block < BLOCKS
    block = gl.where(there, block, 0)
    begin = gl.load(bounds + block) + (item - gl.load(item_bounds + block)) * chunk
    end = gl.minimum(begin + chunk, gl.load(bounds + block + 1))
    end = gl.where(there, end, begin)
    return block, block // C // K, block // C % K, block % C, begin.to(gl.int32), end.to(gl.int32)


@gluon.jit
def read(
    q, d_out, k, v, lse, delta, inverse, items, T, C, BLOCKS, k_smem, v_smem, q_smem, do_smem,
    lse_smem, delta_smem, kv_bar, full, K: gl.constexpr, R: gl.constexpr, n: gl.constexpr,
    G: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that reads, for both parts in turn. Rows that are none are those of the last entry:
    they are finite."""
    GROUP: gl.constexpr = q.block_shape[2]
    TOKENS: gl.constexpr = ROWS // GROUP
    D: gl.constexpr = k.block_shape[3]
    HALVES: gl.constexpr = D // q.block_shape[3]
    LANES: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    entries = inverse[0]
    row = gl.arange(0, ROWS, LANES)
    item = gl.program_id(0) * PARTS
    _, b0, h0, c0, begin0, end0 = item_of(item, items, inverse, C, BLOCKS, K)
    _, b1, h1, c1, begin1, end1 = item_of(item + 1, items, inverse, C, BLOCKS, K)
    for part in gl.static_range(PARTS):
        b, h, c = (b0, h0, c0) if part == 0 else (b1, h1, c1)
        bar = kv_bar.index(part)
        mbarrier.expect(bar, KEYS * D * 4)
        tma.async_copy_global_to_shared(k, [b, c * KEYS, h, 0], bar, k_smem.index(part))
        tma.async_copy_global_to_shared(v, [b, c * KEYS, h, 0], bar, v_smem.index(part))
    steps = gl.cdiv(gl.maximum(end0 - begin0, end1 - begin1), TOKENS)
    for j in range(0, steps):
        for part in gl.static_range(PARTS):
            b, begin, end = (b0, begin0, end0) if part == 0 else (b1, begin1, end1)
            i = begin + j * TOKENS
            if i < end:
                slot = part * STAGES + j % STAGES
                e = gl.load(entries + gl.minimum(i + row // GROUP, end - 1)).to(gl.int32)
                at = (e // (n * R)).to(gl.int64) * (R * G) + e // n % R * G
                at += gl.minimum(row % GROUP, G - 1)
                if j >= STAGES:
                    at_barrier("sync", slot, THREADS)
                bar = full.index(slot)
                mbarrier.expect(bar, ROWS * D * 4)
                for t in gl.static_range(TOKENS):
                    e_t = gl.load(entries + gl.minimum(i + t, end - 1)).to(gl.int32)
                    token, head = e_t // (n * R) - b * T, e_t // n % R * G
                    for half in gl.static_range(HALVES):
                        place = (slot * HALVES + half) * TOKENS + t
                        at_row = [b, token, head, half * (D // HALVES)]
                        tma.async_copy_global_to_shared(q, at_row, bar, q_smem.index(place))
                        tma.async_copy_global_to_shared(d_out, at_row, bar, do_smem.index(place))
                async_copy.async_copy_global_to_shared(lse_smem.index(slot), lse + at)
                async_copy.async_copy_global_to_shared(delta_smem.index(slot), delta + at)
                async_copy.mbarrier_arrive(bar, increment_count=False)
    # no barrier may be left halfway
    for part in gl.static_range(PARTS):
        begin, end = (begin0, end0) if part == 0 else (begin1, end1)
        steps = gl.maximum(gl.cdiv(end - begin, TOKENS), 0)
        for j in range(gl.maximum(steps - STAGES, 0), steps):
            at_barrier("sync", part * STAGES + j % STAGES, THREADS)


@gluon.jit
def write_part(part, dq, smem, entries, i, end, before, PART: gl.constexpr):
    """dq of a tile of entries from i on, each at its number among the parts."""
    GROUP: gl.constexpr = part.block_shape[1]
    TOKENS: gl.constexpr = ROWS // GROUP
    WIDTH: gl.constexpr = part.block_shape[2]
    HALVES: gl.constexpr = dq.shape[1] // WIDTH
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    first = PART * HALVES * TOKENS
    here = smem.index(first)._reinterpret(smem.dtype, [ROWS, WIDTH], TILE)
    if HALVES == 1:
        here.store(dq)
    else:
        low, high = dq.reshape([ROWS, HALVES, WIDTH]).permute((0, 2, 1)).split()
        here.store(low)
        smem.index(first + TOKENS)._reinterpret(smem.dtype, [ROWS, WIDTH], TILE).store(high)
    fence_async_shared()
    gl.thread_barrier()
    for t in gl.static_range(TOKENS):
        if i + t < end:
            at = gl.load(entries + i + t).to(gl.int32) - before
            for half in gl.static_range(HALVES):
                tile = smem.index(first + half * TOKENS + t)
                tma.async_copy_shared_to_global(part, [at, 0, half * WIDTH], tile)


@gluon.jit
def walk(
    part, entries, begin, end, count, before, scale, dk, dv, k_tile, v_tile, q_smem, do_smem,
    lse_smem, delta_smem, ds_smem, full, PART: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, DQ: gl.constexpr,
):  # fmt: skip
    """What tiles of an item's entries add to dk and dv; with DQ also writes dq of each."""
    GROUP: gl.constexpr = q_smem.shape[3]
    TOKENS: gl.constexpr = ROWS // GROUP
    D: gl.constexpr = k_tile.shape[1]
    HALVES: gl.constexpr = D // q_smem.shape[4]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, S)
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    dtype: gl.constexpr = q_smem.dtype
    row = gl.arange(0, ROWS, ROW)
    zero = gl.zeros([KEYS, ROWS], gl.float32, S)
    for j in range(0, count):
        i = begin + j * TOKENS
        slot = PART * STAGES + j % STAGES
        mbarrier.wait(full.index(slot), (j // STAGES) & 1)
        q_tile = q_smem.index(slot * HALVES * TOKENS)._reinterpret(dtype, [ROWS, D], TILE)
        do_tile = do_smem.index(slot * HALVES * TOKENS)._reinterpret(dtype, [ROWS, D], TILE)
        s = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(v_tile, do_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        lse_row = lse_smem.index(slot).load(ROW)
        delta_row = delta_smem.index(slot).load(ROW)
        real = (i + row // GROUP < end) & (row % GROUP < G)
        lse_row = gl.where(real, lse_row, float("inf"))
        s, dp = warpgroup_mma_wait(0, deps=[s, dp])
        p = probabilities(s, scale * 1.4426950408889634, lse_row[None], delta_row[None], GATED)
        ds = p * (dp - delta_row[None])
        dv = warpgroup_mma(gl.convert_layout(p.to(dtype), LEFT), do_tile, dv, is_async=True)
        left = gl.convert_layout(ds.to(dtype), LEFT)
        dk = warpgroup_mma(left, q_tile, dk, is_async=True)
        if DQ:
            ds_tile = ds_smem.index(PART * HALVES * TOKENS)._reinterpret(dtype, [KEYS, ROWS], TILE)
            tma.store_wait(0)  # what was there before is written
            gl.thread_barrier()
            ds_tile.store(left)
            fence_async_shared()
            gl.thread_barrier()
        dv, dk = warpgroup_mma_wait(0, deps=[dv, dk])
        at_barrier("arrive", slot, THREADS)
        if DQ:
            dq = gl.zeros([ROWS, D], gl.float32, ACC)
            dq = warpgroup_mma(ds_tile.permute((1, 0)), k_tile, dq, use_acc=False, is_async=True)
            dq = (warpgroup_mma_wait(0, deps=[dq]) * scale).to(dtype)
            gl.thread_barrier()  # all have read ds
            write_part(part, dq, ds_smem, entries, i, end, before, PART)
    return dk, dv


@gluon.jit
def form(
    part, alike, inverse, items, first, length, T, S, C, BLOCKS, scale, dk, dv, spill_k, spill_v,
    k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem, kv_bar, full,
    PART: gl.constexpr, K: gl.constexpr, R: gl.constexpr, n: gl.constexpr, G: gl.constexpr,
    STAGES: gl.constexpr, GATED: gl.constexpr, DQ: gl.constexpr, ALIKE: gl.constexpr,
):  # fmt: skip
    """A part. What the item adds to dk and dv is written to the block's, or apart where the block
    has several items."""
    TOKENS: gl.constexpr = ROWS // q_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    entries, item_bounds, spill_bounds = inverse[0], inverse[3], inverse[5]
    item = gl.program_id(0) * PARTS + PART
    block, b, h, c, begin, end = item_of(item, items, inverse, C, BLOCKS, K)
    k_tile = k_smem.index(PART).reshape([KEYS, D])
    v_tile = v_smem.index(PART).reshape([KEYS, D])
    dk_acc = gl.zeros([KEYS, D], gl.float32, ACC)
    dv_acc = gl.zeros([KEYS, D], gl.float32, ACC)
    # entries before those of the parts
    before = (b * (T - length) + first) * (R * n)
    steps = gl.maximum(gl.cdiv(end - begin, TOKENS), 0)
    with_dq = steps if DQ else 0
    if ALIKE:
        with_dq = gl.where(gl.load(alike) != 0, 0, steps)
    mbarrier.wait(kv_bar.index(PART), 0)
    if DQ:
        dk_acc, dv_acc = walk(
            part, entries, begin, end, with_dq, before, scale, dk_acc, dv_acc, k_tile, v_tile,
            q_smem, do_smem, lse_smem, delta_smem, ds_smem, full, PART, G, STAGES, GATED, True,
        )  # fmt: skip
        tma.store_wait(0)
    if ALIKE or not DQ:
        dk_acc, dv_acc = walk(
            part, entries, begin, end, steps - with_dq, before, scale, dk_acc, dv_acc, k_tile,
            v_tile, q_smem, do_smem, lse_smem, delta_smem, ds_smem, full, PART, G, STAGES, GATED,
            False,
        )  # fmt: skip
    dk_acc *= scale
    if end > begin:
        key = gl.arange(0, KEYS, gl.SliceLayout(1, ACC))
        feature = gl.arange(0, D, gl.SliceLayout(0, ACC))
        first_item = gl.load(item_bounds + block)
        if gl.load(item_bounds + block + 1) - first_item == 1:
            at = ((b * S + c * KEYS + key).to(gl.int64) * K + h) * D
            at = at[:, None] + feature[None]
            gl.store(dk + at, dk_acc + gl.load(dk + at))
            gl.store(dv + at, dv_acc + gl.load(dv + at))
        else:
            share = gl.load(spill_bounds + block) + item - first_item
            at = (share * KEYS + key).to(gl.int64) * D
            at = at[:, None] + feature[None]
            gl.store(spill_k + at, dk_acc)
            gl.store(spill_v + at, dv_acc)


@gluon.jit(do_not_specialize=LENGTHS)
def backward_kernel(
    q, k, v, d_out, lse, delta, part, alike, dk, dv, spill_k, spill_v, entries, bounds, owner,
    item_bounds, spill_bounds, chunk, items, first, length, T, S, C, BLOCKS, scale,
    K: gl.constexpr, R: gl.constexpr, n: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, DQ: gl.constexpr, ALIKE: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program: two items. With ALIKE no dq where that says so."""
    inverse = (entries, bounds, owner, item_bounds, chunk, spill_bounds)
    GROUP: gl.constexpr = q.block_shape[2]
    HALVES: gl.constexpr = k.block_shape[3] // q.block_shape[3]
    TILES: gl.constexpr = HALVES * (ROWS // GROUP)
    SLOTS: gl.constexpr = PARTS * STAGES
    k_smem, v_smem = places(k, PARTS), places(v, PARTS)
    q_smem, do_smem = places(q, SLOTS * TILES), places(q, SLOTS * TILES)
    ds_smem = places(part, PARTS * TILES) if DQ else q_smem
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_smem = gl.allocate_shared_memory(gl.float32, [SLOTS, ROWS], FLAT)
    delta_smem = gl.allocate_shared_memory(gl.float32, [SLOTS, ROWS], FLAT)
    # of a ring's place the lanes arrive too, which copy
    kv_bar, full = counters(PARTS, 1), counters(SLOTS, 33)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (form, (
                part, alike, inverse, items, first, length, T, S, C, BLOCKS, scale, dk, dv, spill_k,
                spill_v, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem, kv_bar,
                full, 0, K, R, n, G, STAGES, GATED, DQ, ALIKE,
            )),
            (form, (
                part, alike, inverse, items, first, length, T, S, C, BLOCKS, scale, dk, dv, spill_k,
                spill_v, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem, kv_bar,
                full, 1, K, R, n, G, STAGES, GATED, DQ, ALIKE,
            )),
            (read, (
                q, d_out, k, v, lse, delta, inverse, items, T, C, BLOCKS, k_smem, v_smem, q_smem,
                do_smem, lse_smem, delta_smem, kv_bar, full, K, R, n, G, STAGES,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
