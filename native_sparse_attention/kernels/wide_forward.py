"""Attention over intervals of keys on a Hopper: two groups of four warps, each with 64 rows of
queries and what is summed for them in registers, and a warp that reads. In Gluon.

One program takes tiles of queries in turn; what the next one needs is read while the last one is
written. Of a window within which local blocks lie, those come first: what they sum up to is common to
both softmaxes; then the rest of the window, then the initial blocks."""

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

BEHIND = gl.constexpr(2)
FIRST_BARRIER = gl.constexpr(8)
QUERIES = gl.constexpr(15)  # the barrier of the queries' place
PARTS = gl.constexpr(2)
KEYS = gl.constexpr(64)
ROWS = gl.constexpr(64)
THREADS = gl.constexpr(288)
LENGTHS = ["start", "T", "N", "floor", "reach", "inner_floor", "inner_reach", "tiles", "lines"]


@gluon.jit
def leave(barrier):
    gl.inline_asm_elementwise(
        "bar.arrive $1, $2; mov.u32 $0, 0;", "=r,r,r",
        [gl.to_tensor(barrier), gl.to_tensor(THREADS)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_left(barrier):
    gl.inline_asm_elementwise(
        "bar.sync $1, $2; mov.u32 $0, 0;", "=r,r,r",
        [gl.to_tensor(barrier), gl.to_tensor(THREADS)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def local_start(position, inner_floor, inner_reach, inner_stride):
    return gl.maximum(position // inner_stride * inner_stride - inner_reach, inner_floor)


@gluon.jit
def steps_of(tile, start, T, N, floor, reach, stride, inner_floor, inner_reach, inner_stride,
             TOKENS: gl.constexpr, KIND: gl.constexpr, INNER: gl.constexpr):  # fmt: skip
    """Blocks of KEYS that some row of a tile sees: the first of the local ones and how many, the
    same of the others, and how many initial ones."""
    first = start + tile * TOKENS
    last = start + gl.minimum(tile * TOKENS + TOKENS, T) - 1
    local, locals_, initial = first * 0, first * 0, first * 0
    if KIND == BEHIND:
        begin, end = first * 0, gl.minimum(last // stride, N)
    else:
        begin, end = gl.maximum(first - reach, floor), gl.minimum(last + 1, N)
    if INNER:
        at = local_start(first, inner_floor, inner_reach, inner_stride)
        local = at // KEYS
        locals_ = gl.where(at < end, gl.cdiv(end, KEYS) - local, 0)
        end = gl.minimum(
            end, gl.maximum(local_start(last, inner_floor, inner_reach, inner_stride), begin)
        )
        initial = gl.cdiv(gl.minimum(last + 1, inner_floor), KEYS)
    begin = begin // KEYS
    return local, locals_, begin, gl.maximum(gl.cdiv(end, KEYS) - begin, 0), initial


@gluon.jit
def read(q, k, v, start, T, N, K, floor, reach, stride, inner_floor, inner_reach, inner_stride,
         tiles, lines, q_smem, k_smem, v_smem, q_bar, full, G: gl.constexpr, STAGES: gl.constexpr,
         KIND: gl.constexpr, INNER: gl.constexpr):  # fmt: skip
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
        mbarrier.expect(q_bar, PARTS * ROWS * D * 2)
        for part in gl.static_range(PARTS):
            at = [b, tile * TOKENS + part * (TOKENS // PARTS), h * G, 0]
            tma.async_copy_global_to_shared(q, at, q_bar, q_smem.index(part))
        turns += 1
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
    if turns > 0:
        wait_left(QUERIES)
    for i in range(gl.maximum(done - STAGES, 0), done):
        wait_left(FIRST_BARRIER + i % STAGES)


@gluon.jit
def walk(q, k_smem, v_smem, full, done, acc, m, l, first, count, lo, hi, all_lo, all_hi,
         scale_log2, STAGES: gl.constexpr, BY_BOUND: gl.constexpr):  # fmt: skip
    """Blocks of keys into a running softmax; see `device.scaled_step`."""
    D: gl.constexpr = k_smem.shape[4]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    zero = gl.zeros([ROWS, KEYS], gl.float32, S)
    for j in range(0, count):
        slot = done % STAGES
        mbarrier.wait(full.index(slot), (done // STAGES) & 1)
        k_tile = k_smem.index(slot).reshape([KEYS, D])
        s = warpgroup_mma(q, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        n0 = (first + j) * KEYS
        if (n0 < all_lo) | (n0 + KEYS > all_hi):
            n = n0 + gl.arange(0, KEYS, gl.SliceLayout(0, S))
            s = gl.where((n[None] >= lo[:, None]) & (n[None] < hi[:, None]), s, float("-inf"))
        if BY_BOUND:
            p = gl.exp2(s * scale_log2 - m[:, None])
        else:
            before = m
            m = gl.maximum(m, gl.max(s, 1) * scale_log2)
            origin = gl.where(m == float("-inf"), 0.0, m)
            p, alpha = gl.exp2(s * scale_log2 - origin[:, None]), gl.exp2(before - origin)
            l = l * alpha
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
        l += gl.sum(p, 1)
        v_tile = v_smem.index(slot).reshape([KEYS, D])
        left = gl.convert_layout(p.to(k_smem.dtype), LEFT)
        acc = warpgroup_mma(left, v_tile, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        leave(FIRST_BARRIER + slot)
        done += 1
    return done, acc, m, l


@gluon.jit
def write(out, lse, smem, acc, m, l, at_row, row, real):
    """Out and natural lse of a part's rows."""
    empty = l == 0.0
    l = gl.where(empty, 1.0, l)
    share = gl.convert_layout(1.0 / l, gl.SliceLayout(1, acc.type.layout))
    tma.store_wait(0)
    smem.reshape(acc.shape).store((acc * share[:, None]).to(smem.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, at_row, smem)
    log = gl.where(empty, float("-inf"), (m + gl.log2(l)) * 0.6931471805599453)
    gl.store(lse + row, log, mask=real)


@gluon.jit
def attend(out, lse, inner_out, inner_lse, norms, start, T, N, K, scale_log2, floor, reach, stride,
           inner_floor, inner_reach, inner_stride, tiles, lines, q_smem, k_smem, v_smem, out_smem,
           q_bar, full, PART: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr,
           KIND: gl.constexpr, INNER: gl.constexpr, BOUNDED: gl.constexpr):  # fmt: skip
    D: gl.constexpr = k_smem.shape[4]
    TOKENS: gl.constexpr = PARTS * ROWS // G
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    i = gl.arange(0, ROWS, ROW)
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
        keys = hi - lo
        if INNER:
            local_lo = local_start(position, inner_floor, inner_reach, inner_stride)
            local_lo = gl.maximum(local_lo, lo)
            keys = gl.maximum(hi - local_lo, 0) + gl.minimum(position + 1, inner_floor)

        mbarrier.wait(q_bar, turns & 1)
        q_tile = q_smem.index(PART).reshape([ROWS, D])
        q = q_tile.load(gl.DotOperandLayout(0, S, 2))
        m = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        by_bound = False
        if BOUNDED:
            x = q_tile.load(ACC).to(gl.float32)
            bound = gl.convert_layout(gl.sqrt(gl.sum(x * x, 1)), ROW)
            bound = bound * (gl.load(norms + b * K + h) * gl.abs(scale_log2))
            by_bound = gl.max(gl.where((keys < 16) & real, float("inf"), bound), 0) <= 48.0
            m = gl.where(by_bound, bound, m)
        leave(QUERIES)
        turns += 1

        l = gl.zeros([ROWS], gl.float32, ROW)
        acc = gl.zeros([ROWS, D], gl.float32, ACC)
        at_row = [b, first, h * G, 0]
        for way in gl.static_range(0 if BOUNDED else 1, 2):
            taken = by_bound == (way == 0)
            if INNER:
                inner_hi = gl.where(local_lo < hi, hi, 0)
                done, acc, m, l = walk(
                    q, k_smem, v_smem, full, done, acc, m, l, local, gl.where(taken, locals_, 0),
                    local_lo, inner_hi, local_start(p1, inner_floor, inner_reach, inner_stride),
                    all_hi, scale_log2, STAGES, way == 0,
                )  # fmt: skip
                inner_acc, inner_m, inner_l = acc, m, l
                hi_before = gl.minimum(hi, local_lo)
                all_before = local_start(p0, inner_floor, inner_reach, inner_stride)
                done, acc, m, l = walk(
                    q, k_smem, v_smem, full, done, acc, m, l, begin, gl.where(taken, others, 0), lo,
                    hi_before, all_lo, gl.minimum(all_hi, all_before), scale_log2, STAGES, way == 0,
                )  # fmt: skip
                if taken:
                    write(out, lse, out_smem.index(PART), acc, m, l, at_row, row, real)
                done, inner_acc, inner_m, inner_l = walk(
                    q, k_smem, v_smem, full, done, inner_acc, inner_m, inner_l, 0,
                    gl.where(taken, initial, 0), lo * 0, gl.minimum(position + 1, inner_floor), 0,
                    gl.minimum(p0 + 1, inner_floor), scale_log2, STAGES, way == 0,
                )  # fmt: skip
                if taken:
                    write(
                        inner_out, inner_lse, out_smem.index(PART), inner_acc, inner_m, inner_l,
                        at_row, row, real,
                    )  # fmt: skip
            else:
                done, acc, m, l = walk(
                    q, k_smem, v_smem, full, done, acc, m, l, begin, gl.where(taken, others, 0), lo,
                    hi, all_lo, all_hi, scale_log2, STAGES, way == 0,
                )  # fmt: skip
        if not INNER:
            write(out, lse, out_smem.index(PART), acc, m, l, at_row, row, real)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=LENGTHS)
def forward_kernel(
    q, k, v, out, lse, inner_out, inner_lse, norms, start, T, N, K, scale_log2, floor, reach, stride,
    inner_floor, inner_reach, inner_stride, tiles, lines,
    G: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr, INNER: gl.constexpr,
    BOUNDED: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    q_smem = gl.allocate_shared_memory(q.dtype, [PARTS.value] + q.block_shape, q.layout)
    out_smem = gl.allocate_shared_memory(out.dtype, [PARTS.value] + out.block_shape, out.layout)
    k_smem = gl.allocate_shared_memory(k.dtype, [STAGES] + k.block_shape, k.layout)
    v_smem = gl.allocate_shared_memory(v.dtype, [STAGES] + v.block_shape, v.layout)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_bar = gl.allocate_shared_memory(gl.int64, [1], BAR)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    mbarrier.init(q_bar, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (attend, (
                out, lse, inner_out, inner_lse, norms, start, T, N, K, scale_log2, floor, reach,
                stride, inner_floor, inner_reach, inner_stride, tiles, lines, q_smem, k_smem,
                v_smem, out_smem, q_bar, full, 0, G, STAGES, KIND, INNER, BOUNDED,
            )),
            (attend, (
                out, lse, inner_out, inner_lse, norms, start, T, N, K, scale_log2, floor, reach,
                stride, inner_floor, inner_reach, inner_stride, tiles, lines, q_smem, k_smem,
                v_smem, out_smem, q_bar, full, 1, G, STAGES, KIND, INNER, BOUNDED,
            )),
            (read, (
                q, k, v, start, T, N, K, floor, reach, stride, inner_floor, inner_reach,
                inner_stride, tiles, lines, q_smem, k_smem, v_smem, q_bar, full, G, STAGES, KIND,
                INNER,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
