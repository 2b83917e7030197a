"""dk, dv and, in parts, dq of the listed blocks, as `key_major.py`. In Gluon.

A program has two items (see `csr.py`), one for each part of four warps, which holds dk and dv
of the item's block in registers; a warp reads the rows of both, each into a ring of places of its
own. [keys, rows] of a product are the left operand of the next, in registers; for dq its transpose
is needed, in shared memory, where dq itself is then, until it is written.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..common.buffers_sm90 import at_named_barrier, barriers, buffers
from ..common.dialect_sm90 import thread_barrier
from ..common.softmax_sm90 import probabilities
from .key_major_rows_sm90 import (
    KEYS,
    PARTS,
    ROWS,
    TILE,
    WIDTH,
    item_of,
    read,
    tile_of,
    write_boxes,
    write_rows,
)

# one compiled kernel for all lengths
LENGTHS = ["T", "S", "C", "BLOCKS", "chunk", "items", "head"]


@gluon.jit
def walk(
    part, begin, end, count, origin, scale, dk, dv, k_tile, v_tile, q_smem, do_smem,
    lse_smem, delta_smem, ds_smem, full, PART: gl.constexpr, G: gl.constexpr, GROUP: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, DQ: gl.constexpr,
    FEW: gl.constexpr,
):  # fmt: skip
    """What tiles of an item's entries add to dk and dv; with DQ also writes dq of each."""
    EACH: gl.constexpr = TOKENS * GROUP
    ENTRIES: gl.constexpr = ROWS // EACH
    D: gl.constexpr = k_tile.shape[1]
    THREADS: gl.constexpr = 256 if FEW else 160  # of a part and the warps that read
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, S)
    dtype: gl.constexpr = q_smem.dtype
    row = gl.arange(0, ROWS, ROW)
    zero = gl.zeros([KEYS, ROWS], gl.float32, S)
    for j in range(0, count):
        i = begin + j * ENTRIES
        slot = PART * STAGES + j % STAGES
        mbarrier.wait(full.index(slot), (j // STAGES) & 1)
        if FEW:
            fence_async_shared()  # threads wrote it
        q_tile, do_tile = tile_of(q_smem, slot, D), tile_of(do_smem, slot, D)
        s = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(v_tile, do_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        lse_row = lse_smem.index(slot).load(ROW)
        delta_row = delta_smem.index(slot).load(ROW)
        real = (i + row // EACH < end) & (row % GROUP < G)
        lse_row = gl.where(real, lse_row, float("inf"))
        s, dp = warpgroup_mma_wait(0, deps=[s, dp])
        p = probabilities(s, scale * 1.4426950408889634, lse_row[None], delta_row[None], GATED)
        ds = p * (dp - delta_row[None])
        dv = warpgroup_mma(gl.convert_layout(p.to(dtype), LEFT), do_tile, dv, is_async=True)
        left = gl.convert_layout(ds.to(dtype), LEFT)
        dk = warpgroup_mma(left, q_tile, dk, is_async=True)
        if DQ:
            ds_tile = tile_of(ds_smem, PART * (D // ROWS), ROWS)
            if not FEW:
                tma.store_wait(0)  # what was there before is written
            thread_barrier()
            ds_tile.store(left)
            fence_async_shared()
            thread_barrier()
        dv, dk = warpgroup_mma_wait(0, deps=[dv, dk])
        at_named_barrier("arrive", slot, THREADS)
        if DQ:
            dq = gl.zeros([ROWS, D], gl.float32, ACC)
            dq = warpgroup_mma(ds_tile.permute((1, 0)), k_tile, dq, use_acc=False, is_async=True)
            dq = (warpgroup_mma_wait(0, deps=[dq]) * scale).to(dtype)
            thread_barrier()  # all have read ds
            if FEW:
                here = tile_of(ds_smem, PART, D)
                write_rows(part, dq, here, i, end, origin, G, GROUP)
            else:
                write_boxes(part, dq, ds_smem, i, end, origin, PART, GROUP)
    return dk, dv


@gluon.jit
def form(
    part, overlapping, block_csr, items, head, S, C, BLOCKS, scale, dk, dv, spill_k, spill_v,
    k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem, kv_bar, full,
    PART: gl.constexpr, K: gl.constexpr, HEADS: gl.constexpr, G: gl.constexpr, GROUP: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, DQ: gl.constexpr,
    OVERLAPPING: gl.constexpr, FEW: gl.constexpr,
):  # fmt: skip
    """A part. What the item adds to dk and dv is written to the block's, or apart where the block
    has several items."""
    D: gl.constexpr = k_smem.shape[4]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    bounds, ordinals, chunk, spill_bounds = block_csr[1], block_csr[3], block_csr[4], block_csr[5]
    item = gl.program_id(0) * PARTS + PART
    block, b, h, c, begin, end = item_of(item, items, block_csr, C, BLOCKS, head, HEADS)
    k_tile = k_smem.index(PART).reshape([KEYS, D])
    v_tile = v_smem.index(PART).reshape([KEYS, D])
    dk_acc = gl.zeros([KEYS, D], gl.float32, ACC)
    dv_acc = gl.zeros([KEYS, D], gl.float32, ACC)
    origin = gl.load(bounds).to(gl.int32)
    steps = gl.maximum(gl.cdiv(end - begin, ROWS // (TOKENS * GROUP)), 0)
    with_dq = steps if DQ else 0
    if OVERLAPPING:
        with_dq = gl.where(gl.load(overlapping) != 0, 0, steps)
    mbarrier.wait(kv_bar.index(PART), 0)
    if DQ:
        dk_acc, dv_acc = walk(
            part, begin, end, with_dq, origin, scale, dk_acc, dv_acc, k_tile, v_tile, q_smem,
            do_smem, lse_smem, delta_smem, ds_smem, full, PART, G, GROUP, TOKENS, STAGES, GATED,
            True, FEW,
        )  # fmt: skip
        tma.store_wait(0)
    if OVERLAPPING or not DQ:
        dk_acc, dv_acc = walk(
            part, begin, end, steps - with_dq, origin, scale, dk_acc, dv_acc, k_tile, v_tile,
            q_smem, do_smem, lse_smem, delta_smem, ds_smem, full, PART, G, GROUP, TOKENS, STAGES,
            GATED, False, FEW,
        )  # fmt: skip
    dk_acc *= scale
    if end > begin:
        key = gl.arange(0, KEYS, gl.SliceLayout(1, ACC))
        feature = gl.arange(0, D, gl.SliceLayout(0, ACC))
        if gl.load(bounds + block + 1) - gl.load(bounds + block) <= chunk:
            at = ((b * S + c * KEYS + key).to(gl.int64) * K + h) * D
            at = at[:, None] + feature[None]
            gl.store(dk + at, dk_acc + gl.load(dk + at))
            gl.store(dv + at, dv_acc + gl.load(dv + at))
        else:
            share = gl.load(spill_bounds + block) + gl.load(ordinals + item)
            at = (share * KEYS + key).to(gl.int64) * D
            at = at[:, None] + feature[None]
            gl.store(spill_k + at, dk_acc)
            gl.store(spill_v + at, dv_acc)


@gluon.jit(do_not_specialize=LENGTHS)
def nsa_selected_bwd_key_major_sm90(
    q, k, v, d_out, q_b, q_t, q_h, lse, delta, part, overlapping, dk, dv, spill_k, spill_v, entries,
    bounds, owner, ordinals, spill_bounds, chunk, items, head, T, S, C, BLOCKS, scale,
    K: gl.constexpr, HEADS: gl.constexpr, R: gl.constexpr, n: gl.constexpr, G: gl.constexpr,
    GROUP: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
    DQ: gl.constexpr, OVERLAPPING: gl.constexpr, FEW: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program: two items. With ALIKE no dq where that says so. With FEW q, d_out and `part` are
    pointers, else descriptors of boxes of an entry."""
    block_csr = (entries, bounds, owner, ordinals, chunk, spill_bounds)
    strides = (q_b, q_t, q_h)
    D: gl.constexpr = k.block_shape[3]
    TILES: gl.constexpr = ROWS // (TOKENS * GROUP) * (D // WIDTH)
    SLOTS: gl.constexpr = PARTS * STAGES
    k_smem, v_smem = buffers(k, PARTS), buffers(v, PARTS)
    if FEW:
        q_smem = gl.allocate_shared_memory(k.dtype, [SLOTS, ROWS.value, D], TILE)
        do_smem = gl.allocate_shared_memory(k.dtype, [SLOTS, ROWS.value, D], TILE)
        ds_smem = q_smem
        if DQ:
            ds_smem = gl.allocate_shared_memory(k.dtype, [PARTS.value, ROWS.value, D], TILE)
    else:
        q_smem, do_smem = buffers(q, SLOTS * TILES), buffers(q, SLOTS * TILES)
        ds_smem = buffers(part, PARTS * TILES) if DQ else q_smem
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_smem = gl.allocate_shared_memory(gl.float32, [SLOTS, ROWS], FLAT)
    delta_smem = gl.allocate_shared_memory(gl.float32, [SLOTS, ROWS], FLAT)
    # of a ring's place the threads arrive too, which copy
    kv_bar, full = barriers(PARTS, 1), barriers(SLOTS, 128 if FEW else 33)
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (form, (
                part, overlapping, block_csr, items, head, S, C, BLOCKS, scale, dk, dv, spill_k,
                spill_v, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem, kv_bar,
                full, 0, K, HEADS, G, GROUP, TOKENS, STAGES, GATED, DQ, OVERLAPPING, FEW,
            )),
            (form, (
                part, overlapping, block_csr, items, head, S, C, BLOCKS, scale, dk, dv, spill_k,
                spill_v, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem, kv_bar,
                full, 1, K, HEADS, G, GROUP, TOKENS, STAGES, GATED, DQ, OVERLAPPING, FEW,
            )),
            (read, (
                q, d_out, k, v, lse, delta, strides, block_csr, items, head, T, C, BLOCKS, k_smem,
                v_smem, q_smem, do_smem, lse_smem, delta_smem, kv_bar, full, HEADS, R, n, G, GROUP,
                TOKENS, STAGES, FEW,
            )),
        ],
        [4, 4 if FEW else 1],
        [REGISTERS, 32 if FEW else 24],
    )  # fmt: skip
