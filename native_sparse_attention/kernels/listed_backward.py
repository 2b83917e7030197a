"""dk and dv of the listed blocks on a Hopper (`pairs.backward` without dq): two groups of four warps,
each with an item of its own, and a warp that reads the rows of both. In Gluon."""

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
from .wide_backward import grad

FIRST_BARRIER = gl.constexpr(8)
KEYS = gl.constexpr(64)
ROWS = gl.constexpr(64)
THREADS = gl.constexpr(160)
LENGTHS = ["T", "S", "C", "BLOCKS", "chunk"]


@gluon.jit
def leave(place):
    gl.inline_asm_elementwise(
        "bar.arrive $1, $2; mov.u32 $0, 0;", "=r,r,r",
        [FIRST_BARRIER + place, gl.to_tensor(THREADS)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_left(place):
    gl.inline_asm_elementwise(
        "bar.sync $1, $2; mov.u32 $0, 0;", "=r,r,r",
        [FIRST_BARRIER + place, gl.to_tensor(THREADS)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def item_of(item, items, owner, bounds, item_bounds, chunk, BLOCKS):
    """Block of an item, its first entry and one past the last; no entries for one that is none."""
    there = item < items
    block = gl.load(owner + item, mask=there, other=0x7FFFFFFF)
    there = block < BLOCKS
    block = gl.where(there, block, 0)
    begin = gl.load(bounds + block) + (item - gl.load(item_bounds + block)) * chunk
    end = gl.minimum(begin + chunk, gl.load(bounds + block + 1))
    return block, begin.to(gl.int32), gl.where(there, end, begin).to(gl.int32)


@gluon.jit
def read(q, d_out, k, v, lse, delta, entries, bounds, owner, item_bounds, chunk, items, T, C, BLOCKS,
         k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, kv_bar, full, K: gl.constexpr,
         R: gl.constexpr, n: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    GROUP: gl.constexpr = q.block_shape[2]
    TOKENS: gl.constexpr = ROWS // GROUP
    HALVES: gl.constexpr = k.block_shape[3] // q.block_shape[3]
    D: gl.constexpr = k.block_shape[3]
    LANES: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    row = gl.arange(0, ROWS, LANES)
    block0, begin0, end0 = item_of(
        gl.program_id(0) * 2, items, owner, bounds, item_bounds, chunk, BLOCKS
    )
    block1, begin1, end1 = item_of(
        gl.program_id(0) * 2 + 1, items, owner, bounds, item_bounds, chunk, BLOCKS
    )
    for part in gl.static_range(2):
        block = block0 if part == 0 else block1
        b, h, c = block // C // K, block // C % K, block % C
        mbarrier.expect(kv_bar.index(part), KEYS * D * 4)
        tma.async_copy_global_to_shared(
            k, [b, c * KEYS, h, 0], kv_bar.index(part), k_smem.index(part)
        )
        tma.async_copy_global_to_shared(
            v, [b, c * KEYS, h, 0], kv_bar.index(part), v_smem.index(part)
        )
    steps = gl.cdiv(gl.maximum(end0 - begin0, end1 - begin1), TOKENS)
    for j in range(0, steps):
        for part in gl.static_range(2):
            block = block0 if part == 0 else block1
            begin = begin0 if part == 0 else begin1
            end = end0 if part == 0 else end1
            i = begin + j * TOKENS
            if i < end:
                b = block // C // K
                slot = part * STAGES + j % STAGES
                # of rows that are none those of the last entry
                e = gl.load(entries + gl.minimum(i + row // GROUP, end - 1)).to(gl.int32)
                bt, r = e // (n * R), e // n % R
                at = bt.to(gl.int64) * (R * G) + r * G + gl.minimum(row % GROUP, G - 1)
                if j >= STAGES:
                    wait_left(slot)
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
    # none is left behind
    for part in gl.static_range(2):
        begin = begin0 if part == 0 else begin1
        end = end0 if part == 0 else end1
        steps = gl.cdiv(end - begin, TOKENS)
        for j in range(gl.maximum(steps - STAGES, 0), gl.maximum(steps, 0)):
            wait_left(part * STAGES + j % STAGES)


@gluon.jit
def form(entries, bounds, owner, item_bounds, spill_bounds, chunk, items, dk, dv, spill_k, spill_v,
         S_keys, C, BLOCKS, scale, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, kv_bar,
         full, PART: gl.constexpr, K: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr,
         GATED: gl.constexpr):  # fmt: skip
    GROUP: gl.constexpr = q_smem.shape[3]
    TOKENS: gl.constexpr = ROWS // GROUP
    D: gl.constexpr = k_smem.shape[4]
    HALVES: gl.constexpr = D // q_smem.shape[4]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, S)
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    dtype: gl.constexpr = q_smem.dtype
    item = gl.program_id(0) * 2 + PART
    block, begin, end = item_of(item, items, owner, bounds, item_bounds, chunk, BLOCKS)
    row = gl.arange(0, ROWS, ROW)
    k_tile = k_smem.index(PART).reshape([KEYS, D])
    v_tile = v_smem.index(PART).reshape([KEYS, D])
    dk_acc = gl.zeros([KEYS, D], gl.float32, ACC)
    dv_acc = gl.zeros([KEYS, D], gl.float32, ACC)
    zero = gl.zeros([KEYS, ROWS], gl.float32, S)
    mbarrier.wait(kv_bar.index(PART), 0)
    for i in range(begin, end, TOKENS):
        j = (i - begin) // TOKENS
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
        p, ds = grad(s, dp, scale * 1.4426950408889634, lse_row, delta_row, GATED)
        left = gl.convert_layout(p.to(dtype), LEFT)
        dv_acc = warpgroup_mma(left, do_tile, dv_acc, is_async=True)
        other = gl.convert_layout(ds.to(dtype), LEFT)
        dk_acc = warpgroup_mma(other, q_tile, dk_acc, is_async=True)
        dv_acc, dk_acc = warpgroup_mma_wait(0, deps=[dv_acc, dk_acc])
        leave(slot)
    dk_acc *= scale
    if end > begin:
        b, h, c = block // C // K, block // C % K, block % C
        key = gl.arange(0, KEYS, gl.SliceLayout(1, ACC))
        feature = gl.arange(0, D, gl.SliceLayout(0, ACC))
        first_item = gl.load(item_bounds + block)
        if gl.load(item_bounds + block + 1) - first_item == 1:
            at = ((b * S_keys + c * KEYS + key).to(gl.int64) * K + h) * D
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
def listed_dkv_kernel(
    q, k, v, d_out, lse, delta, dk, dv, spill_k, spill_v, entries, bounds, owner, item_bounds,
    spill_bounds, chunk, items, T, S, C, BLOCKS, scale,
    K: gl.constexpr, R: gl.constexpr, n: gl.constexpr, G: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, GATED: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    GROUP: gl.constexpr = q.block_shape[2]
    HALVES: gl.constexpr = D // q.block_shape[3]
    PLACES: gl.constexpr = 2 * STAGES * HALVES * (ROWS // GROUP)
    k_smem = gl.allocate_shared_memory(k.dtype, [2] + k.block_shape, k.layout)
    v_smem = gl.allocate_shared_memory(v.dtype, [2] + v.block_shape, v.layout)
    q_smem = gl.allocate_shared_memory(q.dtype, [PLACES] + q.block_shape, q.layout)
    do_smem = gl.allocate_shared_memory(q.dtype, [PLACES] + q.block_shape, q.layout)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_smem = gl.allocate_shared_memory(gl.float32, [2 * STAGES, ROWS], FLAT)
    delta_smem = gl.allocate_shared_memory(gl.float32, [2 * STAGES, ROWS], FLAT)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    kv_bar = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], BAR)
    for i in gl.static_range(2):
        mbarrier.init(kv_bar.index(i), count=1)
    for i in gl.static_range(2 * STAGES):
        mbarrier.init(full.index(i), count=33)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (form, (
                entries, bounds, owner, item_bounds, spill_bounds, chunk, items, dk, dv, spill_k,
                spill_v, S, C, BLOCKS, scale, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem,
                kv_bar, full, 0, K, G, STAGES, GATED,
            )),
            (form, (
                entries, bounds, owner, item_bounds, spill_bounds, chunk, items, dk, dv, spill_k,
                spill_v, S, C, BLOCKS, scale, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem,
                kv_bar, full, 1, K, G, STAGES, GATED,
            )),
            (read, (
                q, d_out, k, v, lse, delta, entries, bounds, owner, item_bounds, chunk, items, T, C,
                BLOCKS, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, kv_bar, full, K, R,
                n, G, STAGES,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
