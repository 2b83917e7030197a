"""dq through intervals of keys on a Hopper, as `wide_forward.py`. In Gluon."""

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
from .wide_forward import (
    BEHIND,
    FIRST_BARRIER,
    KEYS,
    LENGTHS,
    PARTS,
    QUERIES,
    ROWS,
    leave,
    local_start,
    steps_of,
    wait_left,
)

SUM = gl.constexpr(14)  # the barrier of the place of dq


@gluon.jit
def read(q, d_out, k, v, dq, start, T, N, K, floor, reach, stride, inner_floor, inner_reach,
         inner_stride, tiles, lines, q_smem, do_smem, dq_smem, k_smem, v_smem, q_bar, dq_bar, full,
         G: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr, INNER: gl.constexpr,
         ADD: gl.constexpr):  # fmt: skip
    D: gl.constexpr = q.block_shape[3]
    TOKENS: gl.constexpr = PARTS * ROWS // G
    done = 0
    turns = 0
    for w in range(gl.program_id(0), tiles * lines, gl.num_programs(0)):
        tile, b, h = tiles - 1 - w // lines, w % lines // K, w % lines % K
        local, locals_, begin, others, initial = steps_of(
            tile, start, T, N, floor, reach, stride, inner_floor, inner_reach, inner_stride, TOKENS,
            KIND, INNER,
        )  # fmt: skip
        if turns > 0:
            wait_left(QUERIES)
        mbarrier.expect(q_bar, PARTS * ROWS * D * 4)
        for part in gl.static_range(PARTS):
            at = [b, tile * TOKENS + part * (TOKENS // PARTS), h * G, 0]
            tma.async_copy_global_to_shared(q, at, q_bar, q_smem.index(part))
            tma.async_copy_global_to_shared(d_out, at, q_bar, do_smem.index(part))
        for j in range(0, locals_ + others + initial):
            block = local + j
            block = gl.where(j >= locals_, begin + j - locals_, block)
            block = gl.where(j >= locals_ + others, j - locals_ - others, block)
            slot = done % STAGES
            if done >= STAGES:
                wait_left(FIRST_BARRIER + slot)
            bar = full.index(slot)
            mbarrier.expect(bar, KEYS * D * 4)
            tma.async_copy_global_to_shared(k, [b, block * KEYS, h, 0], bar, k_smem.index(slot))
            tma.async_copy_global_to_shared(v, [b, block * KEYS, h, 0], bar, v_smem.index(slot))
            done += 1
        if ADD:
            if turns > 0:
                wait_left(SUM)
            mbarrier.expect(dq_bar, PARTS * ROWS * D * 2)
            for part in gl.static_range(PARTS):
                at = [b, tile * TOKENS + part * (TOKENS // PARTS), h * G, 0]
                tma.async_copy_global_to_shared(dq, at, dq_bar, dq_smem.index(part))
        turns += 1
    if turns > 0:
        wait_left(QUERIES)
        if ADD:
            wait_left(SUM)
    for i in range(gl.maximum(done - STAGES, 0), done):
        wait_left(FIRST_BARRIER + i % STAGES)


@gluon.jit
def walk(q, d_out, k_smem, v_smem, full, done, acc, lse, delta, other_lse, other_delta, first, count,
         lo, hi, other_lo, all_lo, all_hi, scale_log2, STAGES: gl.constexpr, BOTH: gl.constexpr,
         GATED: gl.constexpr):  # fmt: skip
    """What blocks of keys add to dq; with BOTH by two softmaxes, the other of keys from other_lo
    on."""
    D: gl.constexpr = k_smem.shape[4]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    zero = gl.zeros([ROWS, KEYS], gl.float32, S)
    for j in range(0, count):
        slot = done % STAGES
        mbarrier.wait(full.index(slot), (done // STAGES) & 1)
        k_tile = k_smem.index(slot).reshape([KEYS, D])
        v_tile = v_smem.index(slot).reshape([KEYS, D])
        s = warpgroup_mma(q, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(d_out, v_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        s, dp = warpgroup_mma_wait(0, deps=[s, dp])
        n0 = (first + j) * KEYS
        n = n0 + gl.arange(0, KEYS, gl.SliceLayout(0, S))
        if (n0 < all_lo) | (n0 + KEYS > all_hi):
            s = gl.where((n[None] >= lo[:, None]) & (n[None] < hi[:, None]), s, float("-inf"))
        ds = grad_rows(s, dp, scale_log2, lse, delta, GATED)
        if BOTH:
            s = gl.where(n[None] >= other_lo[:, None], s, float("-inf"))
            ds += grad_rows(s, dp, scale_log2, other_lse, other_delta, GATED)
        left = gl.convert_layout(ds.to(k_smem.dtype), LEFT)
        acc = warpgroup_mma(left, k_tile, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        leave(FIRST_BARRIER + slot)
        done += 1
    return done, acc


@gluon.jit
def grad_rows(s, dp, scale, lse, delta, GATED: gl.constexpr):
    p = gl.exp2(s * scale - lse[:, None])
    if GATED:
        sign = delta.to(gl.int32, bitcast=True) << 31
        p = (p.to(gl.int32, bitcast=True) ^ sign[:, None]).to(gl.float32, bitcast=True)
    return p * (dp - delta[:, None])


@gluon.jit
def form(dq, lse, delta, inner_lse, inner_delta, start, T, N, K, scale, floor, reach, stride,
         inner_floor, inner_reach, inner_stride, tiles, lines, q_smem, do_smem, dq_smem, k_smem,
         v_smem, q_bar, dq_bar, full, PART: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr,
         KIND: gl.constexpr, INNER: gl.constexpr, GATED: gl.constexpr,
         ADD: gl.constexpr):  # fmt: skip
    D: gl.constexpr = k_smem.shape[4]
    TOKENS: gl.constexpr = PARTS * ROWS // G
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    i = gl.arange(0, ROWS, ROW)
    scale_log2 = scale * 1.4426950408889634
    done = 0
    turns = 0
    for w in range(gl.program_id(0), tiles * lines, gl.num_programs(0)):
        tile, b, h = tiles - 1 - w // lines, w % lines // K, w % lines % K
        local, locals_, begin, others, initial = steps_of(
            tile, start, T, N, floor, reach, stride, inner_floor, inner_reach, inner_stride, TOKENS,
            KIND, INNER,
        )  # fmt: skip
        first = tile * TOKENS + PART * (TOKENS // PARTS)
        position = start + first + i // G
        row = (b * T + first + i // G).to(gl.int64) * (K * G) + h * G + i % G
        real = first + i // G < T
        p0, p1 = start + first, start + first + TOKENS // PARTS - 1
        if KIND == BEHIND:
            lo, hi = position * 0, gl.minimum(position // stride, N)
            all_lo, all_hi = p0 * 0, gl.minimum(p0 // stride, N)
        else:
            lo, hi = gl.maximum(position - reach, floor), gl.minimum(position + 1, N)
            all_lo, all_hi = gl.maximum(p1 - reach, floor), gl.minimum(p0 + 1, N)
        lse_row = gl.load(lse + row, mask=real, other=0.0)
        delta_row = gl.load(delta + row, mask=real, other=0.0)
        other_lse, other_delta = lse_row, delta_row
        if INNER:
            other_lse = gl.load(inner_lse + row, mask=real, other=0.0)
            other_delta = gl.load(inner_delta + row, mask=real, other=0.0)
        mbarrier.wait(q_bar, turns & 1)
        q = q_smem.index(PART).reshape([ROWS, D]).load(gl.DotOperandLayout(0, S, 2))
        d_out = do_smem.index(PART).reshape([ROWS, D]).load(gl.DotOperandLayout(0, S, 2))
        leave(QUERIES)
        tma.store_wait(0)
        if ADD:
            if turns > 0:
                leave(SUM)
        acc = gl.zeros([ROWS, D], gl.float32, ACC)
        if INNER:
            # local keys are of the window too
            local_lo = local_start(position, inner_floor, inner_reach, inner_stride)
            done, acc = walk(
                q, d_out, k_smem, v_smem, full, done, acc, lse_row, delta_row, other_lse,
                other_delta, local, locals_, lo, hi, local_lo, all_lo, all_hi, scale_log2, STAGES,
                True, GATED,
            )  # fmt: skip
            # of a block that has both the first walk has seen all keys from its first row's on
            at = local_start(start + tile * TOKENS, inner_floor, inner_reach, inner_stride)
            at = gl.where(locals_ > 0, at // KEYS * KEYS, N)
            hi_before, all_before = gl.minimum(hi, at), gl.minimum(all_hi, at)
        else:
            hi_before, all_before = hi, all_hi
        done, acc = walk(
            q, d_out, k_smem, v_smem, full, done, acc, lse_row, delta_row, lse_row, delta_row, begin,
            others, lo, hi_before, lo, all_lo, all_before, scale_log2, STAGES, False, GATED,
        )  # fmt: skip
        if INNER:
            done, acc = walk(
                q, d_out, k_smem, v_smem, full, done, acc, other_lse, other_delta, lse_row,
                delta_row, 0, initial, lo * 0, gl.minimum(position + 1, inner_floor), lo, 0,
                gl.minimum(p0 + 1, inner_floor), scale_log2, STAGES, False, GATED,
            )  # fmt: skip
        smem = dq_smem.index(PART)
        acc = acc * scale
        if ADD:
            mbarrier.wait(dq_bar, turns & 1)
            acc += smem.reshape([ROWS, D]).load(ACC).to(gl.float32)
        smem.reshape([ROWS, D]).store(acc.to(dq_smem.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dq, [b, first, h * G, 0], smem)
        turns += 1
    tma.store_wait(0)
    if ADD:
        if turns > 0:
            leave(SUM)


@gluon.jit(do_not_specialize=LENGTHS)
def dq_kernel(
    q, k, v, d_out, dq, lse, delta, inner_lse, inner_delta, start, T, N, K, scale, floor, reach,
    stride, inner_floor, inner_reach, inner_stride, tiles, lines,
    G: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr, INNER: gl.constexpr,
    GATED: gl.constexpr, ADD: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    q_smem = gl.allocate_shared_memory(q.dtype, [PARTS.value] + q.block_shape, q.layout)
    do_smem = gl.allocate_shared_memory(q.dtype, [PARTS.value] + q.block_shape, q.layout)
    dq_smem = gl.allocate_shared_memory(dq.dtype, [PARTS.value] + dq.block_shape, dq.layout)
    k_smem = gl.allocate_shared_memory(k.dtype, [STAGES] + k.block_shape, k.layout)
    v_smem = gl.allocate_shared_memory(v.dtype, [STAGES] + v.block_shape, v.layout)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_bar = gl.allocate_shared_memory(gl.int64, [1], BAR)
    dq_bar = gl.allocate_shared_memory(gl.int64, [1], BAR)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    mbarrier.init(q_bar, count=1)
    mbarrier.init(dq_bar, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (form, (
                dq, lse, delta, inner_lse, inner_delta, start, T, N, K, scale, floor, reach, stride,
                inner_floor, inner_reach, inner_stride, tiles, lines, q_smem, do_smem, dq_smem,
                k_smem, v_smem, q_bar, dq_bar, full, 0, G, STAGES, KIND, INNER, GATED, ADD,
            )),
            (form, (
                dq, lse, delta, inner_lse, inner_delta, start, T, N, K, scale, floor, reach, stride,
                inner_floor, inner_reach, inner_stride, tiles, lines, q_smem, do_smem, dq_smem,
                k_smem, v_smem, q_bar, dq_bar, full, 1, G, STAGES, KIND, INNER, GATED, ADD,
            )),
            (read, (
                q, d_out, k, v, dq, start, T, N, K, floor, reach, stride, inner_floor, inner_reach,
                inner_stride, tiles, lines, q_smem, do_smem, dq_smem, k_smem, v_smem, q_bar, dq_bar,
                full, G, STAGES, KIND, INNER, ADD,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
