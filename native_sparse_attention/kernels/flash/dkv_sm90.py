"""dk and dv of the flash kernels, as `bwd.py`. In Gluon.

A program owns a block of CONSUMERS x KEYS keys and one split of the query tiles that see it. Two
consumer warpgroups own KEYS keys each, with their dk and dv in registers. A producer warp loads
query tiles into a ring buffer that both consumers read. While one consumer waits or forms
probabilities, the tensor cores work for the other. A product [keys, queries] is the left operand of
the next one, in registers.

In a window, the query tiles that see some of the keys as local blocks come first.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..common.gluon_sm90 import (
    at_named_barrier,
    barriers,
    buffers,
    load_box,
    load_elements,
    probabilities,
    thread_barrier,
)
from ..common.primitives import BEHIND, LOCAL_BLOCKS
from .steps_sm90 import CONSUMERS, KEYS, ROWS, THREADS

# one compiled kernel for all lengths
LENGTHS = ["start", "T", "N", "floor", "reach", "inner_floor", "inner_reach", "blocks", "B"]


@gluon.jit
def window_end(key, reach, stride, KIND: gl.constexpr):
    """One past the last position whose window, or whose local blocks, hold a key."""
    end = key + reach + 1
    if KIND == LOCAL_BLOCKS:
        end = ((key + reach) // stride + 1) * stride
    return end


@gluon.jit
def query_tiles(n0, kv_range, TOKENS: gl.constexpr, KIND: gl.constexpr, INNER: gl.constexpr):
    """First query tile of this program's split, and its end; first tile whose queries see all keys
    from n0 on (none of them as a local key), and the end of these tiles."""
    start, T, N, floor, reach, stride = (
        kv_range[0],
        kv_range[1],
        kv_range[2],
        kv_range[3],
        kv_range[4],
        kv_range[5],
    )
    last = gl.minimum(n0 + CONSUMERS * KEYS, N) - 1
    if KIND == BEHIND:
        first, full = (n0 + 1) * stride, (last + 1) * stride
        end, full_end = 0x7FFFFFFF, 0x7FFFFFFF
    else:
        first, full = n0, last
        end = window_end(last, reach, stride, KIND)
        full_end = window_end(n0, reach, stride, KIND)
    first = gl.maximum(first - start, 0) // TOKENS
    end = gl.cdiv(gl.minimum(gl.maximum(end - start, 0), T), TOKENS)
    split_tiles = gl.cdiv(gl.maximum(end - first, 0), gl.num_programs(1))
    begin = first + gl.program_id(1) * split_tiles
    end = gl.minimum(begin + split_tiles, end)
    full = gl.maximum(gl.cdiv(gl.maximum(full - start, 0), TOKENS), begin)
    full_end = gl.minimum(gl.minimum(gl.maximum(full_end - start, 0), T) // TOKENS, end)
    if INNER:
        inner_reach, inner_stride = kv_range[7], kv_range[8]
        local_end = window_end(last, inner_reach, inner_stride, LOCAL_BLOCKS)
        full = gl.maximum(full, gl.cdiv(gl.maximum(local_end - start, 0), TOKENS))
    if n0 < floor:
        full_end = full
    return begin, end, full, full_end


@gluon.jit
def produce(
    q, d_out, k, v, rows, T, n0, b, h, begin, end, k_smem, v_smem, q_smem, do_smem, rows_smem,
    kv_bar, full, K, G: gl.constexpr, STAGES: gl.constexpr, INNER: gl.constexpr,
):  # fmt: skip
    """The producer warp. `rows` holds lse and delta, with INNER those of both softmaxes."""
    LANES: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    D: gl.constexpr = q.block_shape[3]
    TOKENS: gl.constexpr = ROWS // G
    row = gl.arange(0, ROWS, LANES)
    mbarrier.expect(kv_bar.index(0), CONSUMERS * KEYS * D * 4)
    for consumer in gl.static_range(CONSUMERS):
        at = [b, n0 + consumer * KEYS, h, 0]
        load_box(k, at, kv_bar.index(0), k_smem.index(consumer))
        load_box(v, at, kv_bar.index(0), v_smem.index(consumer))
    for tile in range(begin, end):
        i = tile - begin
        slot = i % STAGES
        if i >= STAGES:
            at_named_barrier("sync", slot, THREADS)
        bar = full.index(slot)
        mbarrier.expect(bar, ROWS * D * 4)
        at = [b, tile * TOKENS, h * G, 0]
        load_box(q, at, bar, q_smem.index(slot))
        load_box(d_out, at, bar, do_smem.index(slot))
        # padding rows load the last token's finite lse and delta; they see no key
        token = gl.minimum(tile * TOKENS + row // G, T - 1)
        of_row = (b * T + token).to(gl.int64) * (K * G) + h * G + row % G
        for which in gl.static_range(4 if INNER else 2):
            there = rows_smem.index(slot * 4 + which)
            load_elements(there, rows[which] + of_row)
        async_copy.mbarrier_arrive(bar, increment_count=False)
    # complete every barrier before the warp exits
    for i in range(gl.maximum(end - begin - STAGES, 0), gl.maximum(end - begin, 0)):
        at_named_barrier("sync", i % STAGES, THREADS)


@gluon.jit
def visible_positions(n, kv_range, KIND: gl.constexpr, INNER: gl.constexpr):
    """First position that sees each key, and the end of these positions; the end of the positions
    that see it as a local key."""
    start, T, floor, reach, stride = kv_range[0], kv_range[1], kv_range[3], kv_range[4], kv_range[5]
    if KIND == BEHIND:
        first, end = (n + 1) * stride, n * 0 + (start + T)
    else:
        # compared first: another order compiles to other instructions
        is_before = n < floor
        end = gl.minimum(window_end(n, reach, stride, KIND), start + T)
        first, end = n, gl.where(is_before, 0, end)
    local_end = end
    if INNER:
        inner_floor, inner_reach, inner_stride = kv_range[6], kv_range[7], kv_range[8]
        local_end = window_end(n, inner_reach, inner_stride, LOCAL_BLOCKS)
        local_end = gl.where(n < inner_floor, 0, local_end)
    return first, end, local_end


@gluon.jit
def accumulate(
    k_tile, v_tile, q_tile, do_tile, dk, dv, rows, slot, first_row, at, bounds, masked, scale_log2,
    G: gl.constexpr, LOCAL: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Add the contribution of query rows to dk and dv of a consumer. The query tile begins at
    position `at`; `bounds` are the keys' `visible_positions`. LOCAL: of both softmaxes."""
    M: gl.constexpr = q_tile.shape[0]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, S)
    KEY: gl.constexpr = gl.SliceLayout(1, S)
    dtype: gl.constexpr = q_tile.dtype
    first, end, local_end = bounds
    lse = rows.index(slot * 4).slice(first_row, M, 0).load(ROW)
    delta = rows.index(slot * 4 + 1).slice(first_row, M, 0).load(ROW)
    zero = gl.zeros([KEYS, M], gl.float32, S)
    s = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma(v_tile, do_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    s, dp = warpgroup_mma_wait(0, deps=[s, dp])
    position = at + (first_row + gl.arange(0, M, ROW)) // G
    if masked:
        lo, hi = gl.convert_layout(first, KEY), gl.convert_layout(end, KEY)
        sees = (position[None] >= lo[:, None]) & (position[None] < hi[:, None])
        s = gl.where(sees, s, float("-inf"))
    p = probabilities(s, scale_log2, lse[None], delta[None], GATED)
    ds = p * (dp - delta[None])
    if LOCAL:
        lse = rows.index(slot * 4 + 2).slice(first_row, M, 0).load(ROW)
        delta = rows.index(slot * 4 + 3).slice(first_row, M, 0).load(ROW)
        hi = gl.convert_layout(local_end, KEY)
        s = gl.where(position[None] < hi[:, None], s, float("-inf"))
        other = probabilities(s, scale_log2, lse[None], delta[None], GATED)
        p += other
        ds += other * (dp - delta[None])
    dv = warpgroup_mma(gl.convert_layout(p.to(dtype), LEFT), do_tile, dv, is_async=True)
    dk = warpgroup_mma(gl.convert_layout(ds.to(dtype), LEFT), q_tile, dk, is_async=True)
    return warpgroup_mma_wait(0, deps=[dk, dv])


@gluon.jit
def consume(
    dk, dv, n0, b, B, h, K, tiles, kv_range, scale, k_smem, v_smem, q_smem, do_smem, rows_smem,
    kv_bar, full, CONSUMER: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr,
    KIND: gl.constexpr, INNER: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """One consumer warpgroup."""
    D: gl.constexpr = q_smem.shape[4]
    TOKENS: gl.constexpr = ROWS // G
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    HALF: gl.constexpr = ROWS // 2
    begin, end, full_tile, full_end = tiles
    scale_log2 = scale * 1.4426950408889634
    dk_acc = gl.zeros([KEYS, D], gl.float32, ACC)
    dv_acc = gl.zeros([KEYS, D], gl.float32, ACC)
    k_tile = k_smem.index(CONSUMER).reshape([KEYS, D])
    v_tile = v_smem.index(CONSUMER).reshape([KEYS, D])
    key = n0 + CONSUMER * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, ACC))
    bounds = visible_positions(key, kv_range, KIND, INNER)
    start, N = kv_range[0], kv_range[2]
    middle = begin
    mbarrier.wait(kv_bar.index(0), 0)
    if INNER:
        # two softmaxes: half a query tile at a time, for lack of registers
        middle = gl.minimum(full_tile, end)
        for tile in range(begin, middle):
            slot = (tile - begin) % STAGES
            mbarrier.wait(full.index(slot), ((tile - begin) // STAGES) & 1)
            q_tile = q_smem.index(slot).reshape([ROWS, D])
            do_tile = do_smem.index(slot).reshape([ROWS, D])
            for half in gl.static_range(2):
                dk_acc, dv_acc = accumulate(
                    k_tile, v_tile, q_tile.slice(half * HALF, HALF, 0),
                    do_tile.slice(half * HALF, HALF, 0), dk_acc, dv_acc,
                    rows_smem, slot, half * HALF, start + tile * TOKENS, bounds, True, scale_log2,
                    G, True, GATED,
                )  # fmt: skip
            at_named_barrier("arrive", slot, THREADS)
    for tile in range(middle, end):
        slot = (tile - begin) % STAGES
        mbarrier.wait(full.index(slot), ((tile - begin) // STAGES) & 1)
        q_tile = q_smem.index(slot).reshape([ROWS, D])
        do_tile = do_smem.index(slot).reshape([ROWS, D])
        masked = (tile < full_tile) | (tile >= full_end)
        dk_acc, dv_acc = accumulate(
            k_tile, v_tile, q_tile, do_tile, dk_acc, dv_acc, rows_smem, slot, 0,
            start + tile * TOKENS, bounds, masked, scale_log2, G, False, GATED,
        )  # fmt: skip
        at_named_barrier("arrive", slot, THREADS)
    entry = ((gl.program_id(1) * B + b) * N + key).to(gl.int64) * K + h
    at = entry[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, ACC))[None]
    gl.store(dk + at, dk_acc * scale, mask=(key < N)[:, None])
    gl.store(dv + at, dv_acc, mask=(key < N)[:, None])


@gluon.jit(do_not_specialize=LENGTHS)
def nsa_flash_dkv_sm90(
    q, k, v, d_out, lse, delta, inner_lse, inner_delta, dk, dv, start, T, N, floor, reach,
    inner_floor, inner_reach, scale, B, blocks, stride: gl.constexpr, inner_stride: gl.constexpr,
    K: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr, INNER: gl.constexpr,
    GATED: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program owns a block of keys and one split (axis 1) of the queries that see it. It writes
    partial dk and dv, [splits, B, N, K, D]."""
    kv_range = (start, T, N, floor, reach, stride, inner_floor, inner_reach, inner_stride)
    rows = (lse, delta, inner_lse, inner_delta)
    n0 = gl.program_id(0) % blocks * (CONSUMERS * KEYS)
    b, h = gl.program_id(0) // blocks // K, gl.program_id(0) // blocks % K
    tiles = query_tiles(n0, kv_range, ROWS // G, KIND, INNER)
    begin, end, _full, _full_end = tiles
    k_smem, v_smem = buffers(k, CONSUMERS), buffers(v, CONSUMERS)
    q_smem, do_smem = buffers(q, STAGES), buffers(d_out, STAGES)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows_smem = gl.allocate_shared_memory(gl.float32, [STAGES * 4, ROWS.value], FLAT)
    # 33 arrivals per stage: one for TMA, 32 of the lanes that copy lse and delta
    kv_bar, full = barriers(1, 1), barriers(STAGES, 33)
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (consume, (
                dk, dv, n0, b, B, h, K, tiles, kv_range, scale, k_smem, v_smem, q_smem, do_smem,
                rows_smem, kv_bar, full, 0, G, STAGES, KIND, INNER, GATED,
            )),
            (consume, (
                dk, dv, n0, b, B, h, K, tiles, kv_range, scale, k_smem, v_smem, q_smem, do_smem,
                rows_smem, kv_bar, full, 1, G, STAGES, KIND, INNER, GATED,
            )),
            (produce, (
                q, d_out, k, v, rows, T, n0, b, h, begin, end, k_smem, v_smem, q_smem, do_smem,
                rows_smem, kv_bar, full, K, G, STAGES, INNER,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
