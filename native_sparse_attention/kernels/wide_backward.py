"""dk and dv of keys that many queries see, on a Hopper: two groups of four warps, each with 64 keys
and all that is summed for them in registers, and a warp that reads the queries for both. In Gluon.

While one group waits for what its queries and keys have in common, or forms probabilities of it, the
tensor cores work for the other. [keys, queries] of a product are the left operand of the next, in
registers.
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

BEHIND = gl.constexpr(2)
FIRST_BARRIER = gl.constexpr(8)
PARTS = gl.constexpr(2)
KEYS = gl.constexpr(64)  # of a part
ROWS = gl.constexpr(64)  # of a tile of queries
THREADS = gl.constexpr(288)
LENGTHS = ["start", "T", "N", "floor", "reach", "stride", "inner_floor", "inner_reach"]


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
def tiles_of(n0, start, T, N, floor, reach, stride, inner_reach, inner_stride, TOKENS: gl.constexpr,
             KIND: gl.constexpr, INNER: gl.constexpr):  # fmt: skip
    """Tiles of queries that see some of the keys from n0 on: first, end; and those that see all."""
    last = gl.minimum(n0 + PARTS * KEYS, N) - 1
    if KIND == BEHIND:
        first, full = (n0 + 1) * stride, (last + 1) * stride
        end, full_end = 0x7FFFFFFF, 0x7FFFFFFF
    else:
        first, full = n0, last
        end, full_end = last + reach + 1, n0 + reach + 1
    first_tile = gl.maximum(first - start, 0) // TOKENS
    end_tile = gl.cdiv(gl.minimum(gl.maximum(end - start, 0), T), TOKENS)
    share = gl.cdiv(gl.maximum(end_tile - first_tile, 0), gl.num_programs(2))
    begin = first_tile + gl.program_id(2) * share
    end_tile = gl.minimum(begin + share, end_tile)
    full_tile = gl.maximum(gl.cdiv(gl.maximum(full - start, 0), TOKENS), begin)
    full_end = gl.minimum(gl.minimum(gl.maximum(full_end - start, 0), T) // TOKENS, end_tile)
    local_end = begin
    if INNER:
        local = ((last + inner_reach) // inner_stride + 1) * inner_stride
        local_end = gl.cdiv(gl.maximum(local - start, 0), TOKENS)
        full_tile = gl.maximum(full_tile, local_end)
    if n0 < floor:
        full_end = full_tile
    return begin, end_tile, full_tile, full_end


@gluon.jit
def read(q, d_out, k, v, n0, b, h, begin, end, k_smem, v_smem, q_smem, do_smem, kv_bar, full,
         G: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    D: gl.constexpr = q.block_shape[3]
    TOKENS: gl.constexpr = ROWS // G
    mbarrier.expect(kv_bar, PARTS * KEYS * D * 4)
    for part in gl.static_range(PARTS):
        at = [b, n0 + part * KEYS, h, 0]
        tma.async_copy_global_to_shared(k, at, kv_bar, k_smem.index(part))
        tma.async_copy_global_to_shared(v, at, kv_bar, v_smem.index(part))
    for tile in range(begin, end):
        i = tile - begin
        slot = i % STAGES
        if i >= STAGES:
            wait_left(slot)
        bar = full.index(slot)
        mbarrier.expect(bar, ROWS * D * 4)
        at_row = [b, tile * TOKENS, h * G, 0]
        tma.async_copy_global_to_shared(q, at_row, bar, q_smem.index(slot))
        tma.async_copy_global_to_shared(d_out, at_row, bar, do_smem.index(slot))
    for i in range(gl.maximum(end - begin - STAGES, 0), gl.maximum(end - begin, 0)):
        wait_left(i % STAGES)


@gluon.jit
def grad(s, dp, scale, lse, delta, GATED: gl.constexpr):
    p = gl.exp2(s * scale - lse[None])
    if GATED:
        sign = delta.to(gl.int32, bitcast=True) << 31
        p = (p.to(gl.int32, bitcast=True) ^ sign[None]).to(gl.float32, bitcast=True)
    return p, p * (dp - delta[None])


@gluon.jit
def add(k_tile, v_tile, q_tile, do_tile, dk_acc, dv_acc, lse, delta, inner_lse, inner_delta, n0, b,
        h, tile, row0, masked, start, T, scale, floor, reach, stride, inner_floor, inner_reach,
        inner_stride, G: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr, LOCAL: gl.constexpr,
        GATED: gl.constexpr):  # fmt: skip
    """What rows of a tile of queries, from row0 on, add to dk and dv of a part; with LOCAL by two
    softmaxes."""
    TOKENS: gl.constexpr = ROWS // G
    M: gl.constexpr = q_tile.shape[0]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, dk_acc.type.layout, 2)
    i = row0 + gl.arange(0, M, gl.SliceLayout(0, S))
    token = tile * TOKENS + i // G
    at_tile = (b * T + tile * TOKENS).to(gl.int64) * (K * G) + h * G
    at = i // G * (K * G) + i % G
    lse_row = gl.load(lse + at_tile + at, mask=token < T, other=0.0)
    delta_row = gl.load(delta + at_tile + at, mask=token < T, other=0.0)
    scale_log2 = scale * 1.4426950408889634
    zero = gl.zeros([KEYS, M], gl.float32, S)
    s = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma(v_tile, do_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    s, dp = warpgroup_mma_wait(0, deps=[s, dp])
    n = n0 + gl.arange(0, KEYS, gl.SliceLayout(1, S))
    if masked:
        position = start + token
        if KIND == BEHIND:
            lo, hi = position * 0, position // stride
        else:
            lo, hi = gl.maximum(position - reach, floor), position + 1
        s = gl.where((n[:, None] >= lo[None]) & (n[:, None] < hi[None]), s, float("-inf"))
    p, ds = grad(s, dp, scale_log2, lse_row, delta_row, GATED)
    if LOCAL:
        lse_row = gl.load(inner_lse + at_tile + at, mask=token < T, other=0.0)
        delta_row = gl.load(inner_delta + at_tile + at, mask=token < T, other=0.0)
        lo = gl.maximum((start + token) // inner_stride * inner_stride - inner_reach, inner_floor)
        s = gl.where(n[:, None] >= lo[None], s, float("-inf"))
        other_p, other_ds = grad(s, dp, scale_log2, lse_row, delta_row, GATED)
        p, ds = p + other_p, ds + other_ds
    left = gl.convert_layout(p.to(q_tile.dtype), LEFT)
    dv_acc = warpgroup_mma(left, do_tile, dv_acc, is_async=True)
    other = gl.convert_layout(ds.to(q_tile.dtype), LEFT)
    dk_acc = warpgroup_mma(other, q_tile, dk_acc, is_async=True)
    return warpgroup_mma_wait(0, deps=[dk_acc, dv_acc])


@gluon.jit
def form(lse, delta, inner_lse, inner_delta, dk, dv, n0, b, h, begin, end, full_tile, full_end,
         start, T, N, B, scale, floor, reach, stride, inner_floor, inner_reach, inner_stride,
         k_smem, v_smem, q_smem, do_smem, kv_bar, full, PART: gl.constexpr, G: gl.constexpr,
         K: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr, INNER: gl.constexpr,
         GATED: gl.constexpr):  # fmt: skip
    D: gl.constexpr = q_smem.shape[4]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dk_acc = gl.zeros([KEYS, D], gl.float32, ACC)
    dv_acc = gl.zeros([KEYS, D], gl.float32, ACC)
    k_tile = k_smem.index(PART).reshape([KEYS, D])
    v_tile = v_smem.index(PART).reshape([KEYS, D])
    first_key = n0 + PART * KEYS
    middle = begin
    mbarrier.wait(kv_bar, 0)
    if INNER:
        # those with a second softmax, over local blocks, a half at a time: there is no more room
        middle = gl.minimum(full_tile, end)
        for tile in range(begin, middle):
            slot = (tile - begin) % STAGES
            mbarrier.wait(full.index(slot), ((tile - begin) // STAGES) & 1)
            q_tile = q_smem.index(slot).reshape([ROWS, D])
            do_tile = do_smem.index(slot).reshape([ROWS, D])
            for half in gl.static_range(2):
                dk_acc, dv_acc = add(
                    k_tile, v_tile, q_tile.slice(half * ROWS // 2, ROWS // 2, 0),
                    do_tile.slice(half * ROWS // 2, ROWS // 2, 0), dk_acc, dv_acc, lse, delta,
                    inner_lse, inner_delta, first_key, b, h, tile, half * ROWS // 2, True, start,
                    T, scale, floor, reach, stride, inner_floor, inner_reach, inner_stride, G, K,
                    KIND, True, GATED,
                )  # fmt: skip
            leave(slot)
    for tile in range(middle, end):
        slot = (tile - begin) % STAGES
        mbarrier.wait(full.index(slot), ((tile - begin) // STAGES) & 1)
        q_tile = q_smem.index(slot).reshape([ROWS, D])
        do_tile = do_smem.index(slot).reshape([ROWS, D])
        dk_acc, dv_acc = add(
            k_tile, v_tile, q_tile, do_tile, dk_acc, dv_acc, lse, delta, inner_lse, inner_delta,
            first_key, b, h, tile, 0, (tile < full_tile) | (tile >= full_end), start, T, scale,
            floor, reach, stride, inner_floor, inner_reach, inner_stride, G, K, KIND, False, GATED,
        )  # fmt: skip
        leave(slot)
    split = gl.program_id(2)
    key = first_key + gl.arange(0, KEYS, gl.SliceLayout(1, ACC))
    entry = ((split * B + b) * N + key).to(gl.int64) * K + h
    at = entry[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, ACC))[None]
    gl.store(dk + at, dk_acc * scale, mask=(key < N)[:, None])
    gl.store(dv + at, dv_acc, mask=(key < N)[:, None])


@gluon.jit(do_not_specialize=LENGTHS)
def dkv_kernel(
    q, k, v, d_out, lse, delta, inner_lse, inner_delta, dk, dv, start, T, N, scale, floor, reach,
    stride, inner_floor, inner_reach, inner_stride,
    G: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr, INNER: gl.constexpr,
    GATED: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    TOKENS: gl.constexpr = ROWS // G
    n0 = gl.program_id(0) * (PARTS * KEYS)
    b, h = gl.program_id(1) // K, gl.program_id(1) % K
    B = gl.num_programs(1) // K
    begin, end, full_tile, full_end = tiles_of(
        n0, start, T, N, floor, reach, stride, inner_reach, inner_stride, TOKENS, KIND, INNER
    )
    k_smem = gl.allocate_shared_memory(k.dtype, [PARTS.value, 1, KEYS.value, 1, k.block_shape[3]], k.layout)
    v_smem = gl.allocate_shared_memory(v.dtype, [PARTS.value, 1, KEYS.value, 1, v.block_shape[3]], v.layout)
    q_smem = gl.allocate_shared_memory(q.dtype, [STAGES] + q.block_shape, q.layout)
    do_smem = gl.allocate_shared_memory(d_out.dtype, [STAGES] + d_out.block_shape, d_out.layout)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    kv_bar = gl.allocate_shared_memory(gl.int64, [1], BAR)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    mbarrier.init(kv_bar, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (form, (
                lse, delta, inner_lse, inner_delta, dk, dv, n0, b, h, begin, end, full_tile,
                full_end, start, T, N, B, scale, floor, reach, stride, inner_floor, inner_reach,
                inner_stride, k_smem, v_smem, q_smem, do_smem, kv_bar, full, 0, G, K, STAGES, KIND,
                INNER, GATED,
            )),
            (form, (
                lse, delta, inner_lse, inner_delta, dk, dv, n0, b, h, begin, end, full_tile,
                full_end, start, T, N, B, scale, floor, reach, stride, inner_floor, inner_reach,
                inner_stride, k_smem, v_smem, q_smem, do_smem, kv_bar, full, 1, G, K, STAGES, KIND,
                INNER, GATED,
            )),
            (read, (
                q, d_out, k, v, n0, b, h, begin, end, k_smem, v_smem, q_smem, do_smem, kv_bar, full,
                G, STAGES,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
