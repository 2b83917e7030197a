"""The backward of `fwd_sm90.py`: dq, and dk and dv. In Gluon.

dq is as the forward: programs over query tiles, whose producer warp loads blocks of keys.

For dk and dv a program owns a block of CONSUMERS x KEYS keys and one split of the query tiles that
see it. Two consumer warpgroups own KEYS keys each, with their dk and dv in registers. A producer
warp loads query tiles into a ring buffer that both consumers read. While one consumer waits or
forms probabilities, the tensor cores work for the other. A product [keys, queries] is the left
operand of the next one, in registers. In a window, the query tiles that see some of the keys as
local blocks come first.
"""

from __future__ import annotations

import torch
from torch import Tensor
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

from ..common import launch
from ..common.gluon_sm90 import (
    at_named_barrier,
    barriers,
    buffers,
    load_box,
    load_elements,
    probabilities,
    store_box,
    thread_barrier,
)
from ..common.precompile import launcher
from ..common.primitives import BEHIND, LOCAL_BLOCKS
from .call import Facts, Rows
from .fwd_sm90 import (
    ADDED,
    CONSUMERS,
    KEYS,
    LENGTHS,
    QUERIES,
    ROWS,
    THREADS,
    arguments,
    blocks_of,
    consumer_rows,
    key_range,
    local_start,
    num_work_tiles,
    plan,
    prefix_boxes,
    prefix_range,
    produce,
    tile_position,
    visible_range,
)


@gluon.jit
def process_blocks(
    q, d_out, k_smem, v_smem, full, done, acc, lse, delta, other_lse, other_delta, first, count,
    lo, hi, other_lo, all_lo, all_hi, scale_log2, STAGES: gl.constexpr, BOTH: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Add the contribution of `count` blocks to dq. BOTH: of both softmaxes; the other one covers
    the keys from `other_lo` on."""
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
        ds = probabilities(s, scale_log2, lse[:, None], delta[:, None], GATED)
        ds = ds * (dp - delta[:, None])
        if BOTH:
            s = gl.where(n[None] >= other_lo[:, None], s, float("-inf"))
            p = probabilities(s, scale_log2, other_lse[:, None], other_delta[:, None], GATED)
            ds += p * (dp - other_delta[:, None])
        left = gl.convert_layout(ds.to(k_smem.dtype), LEFT)
        acc = warpgroup_mma(left, k_tile, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        at_named_barrier("arrive", slot, THREADS)
        done += 1
    return done, acc


@gluon.jit
def load_lse_delta(i, iteration, tiles, B, rows, start, T, CONSUMER: gl.constexpr, F: gl.constexpr):
    """lse and delta of a consumer's rows i of a work tile; with INNER of both softmaxes."""
    tile, b, h = tile_position(iteration, tiles, B, F.K)
    _, _, row, real = consumer_rows(i, tile, b, h, start, T, F.K, CONSUMER, F.G)
    real = real & (tile >= 0)  # there may be no next work tile
    lse_row = gl.load(rows.lse + row, mask=real, other=0.0)
    delta_row = gl.load(rows.delta + row, mask=real, other=0.0)
    other_lse, other_delta = lse_row, delta_row
    if F.INNER:
        other_lse = gl.load(rows.inner_lse + row, mask=real, other=0.0)
        other_delta = gl.load(rows.inner_delta + row, mask=real, other=0.0)
    return lse_row, delta_row, other_lse, other_delta


@gluon.jit
def consume_dq(
    dq, rows, kv_range, scale, tiles, B, q_smem, do_smem, dq_smem, k_smem, v_smem, q_bar, dq_bar,
    full, CONSUMER: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """One consumer warpgroup."""
    D: gl.constexpr = k_smem.shape[4]
    TOKENS: gl.constexpr = ROWS // F.G
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    start, T, N = kv_range.start, kv_range.T, kv_range.N
    i, scale_log2 = gl.arange(0, ROWS, ROW), scale * 1.4426950408889634
    done = 0
    next_lse, next_delta, next_other_lse, next_other_delta = load_lse_delta(
        i, 0, tiles, B, rows, start, T, CONSUMER, F
    )
    for iteration in range(0, num_work_tiles(tiles * B * F.K)):
        tile, b, h = tile_position(iteration, tiles, B, F.K)
        local, num_local, begin, num_outer, num_initial = blocks_of(
            tile, kv_range, CONSUMERS * TOKENS, F
        )
        token, position, _, _ = consumer_rows(i, tile, b, h, start, T, F.K, CONSUMER, F.G)
        p0, p1 = start + token, start + token + TOKENS - 1
        lo, hi, all_lo, all_hi = visible_range(position, p0, p1, kv_range, F.KIND)
        lse_row, delta_row = next_lse, next_delta
        other_lse, other_delta = next_other_lse, next_other_delta
        mbarrier.wait(q_bar.index(0), iteration & 1)
        q = q_smem.index(CONSUMER).reshape([ROWS, D]).load(gl.DotOperandLayout(0, S, 2))
        d_out = do_smem.index(CONSUMER).reshape([ROWS, D]).load(gl.DotOperandLayout(0, S, 2))
        fence_async_shared()  # TMA may overwrite q and d_out after these loads
        at_named_barrier("arrive", QUERIES, THREADS)
        # prefetch for the next work tile
        next_lse, next_delta, next_other_lse, next_other_delta = load_lse_delta(
            i, iteration + 1, tiles, B, rows, start, T, CONSUMER, F
        )
        tma.store_wait(0)  # the previous work tile's dq is written
        if F.ADD:  # noqa: SIM102
            if iteration > 0:
                at_named_barrier("arrive", ADDED, THREADS)
        acc = gl.zeros([ROWS, D], gl.float32, ACC)
        hi_before, all_before = hi, all_hi
        if F.INNER:
            # the window contains the local keys
            done, acc = process_blocks(
                q, d_out, k_smem, v_smem, full, done, acc, lse_row, delta_row, other_lse,
                other_delta, local, num_local, lo, hi, local_start(position, kv_range), all_lo,
                all_hi, scale_log2, F.STAGES, True, F.GATED,
            )  # fmt: skip
            # the first local block's keys before the local range are already processed
            at = local_start(start + tile * (CONSUMERS * TOKENS), kv_range)
            at = gl.where(num_local > 0, at // KEYS * KEYS, N)
            hi_before, all_before = gl.minimum(hi, at), gl.minimum(all_hi, at)
        done, acc = process_blocks(
            q, d_out, k_smem, v_smem, full, done, acc, lse_row, delta_row, lse_row, delta_row,
            begin, num_outer, lo, hi_before, lo, all_lo, all_before, scale_log2, F.STAGES, False,
            F.GATED,
        )  # fmt: skip
        if F.INNER:
            floor = kv_range.inner_floor
            done, acc = process_blocks(
                q, d_out, k_smem, v_smem, full, done, acc, other_lse, other_delta, lse_row,
                delta_row, 0, num_initial, lo * 0, gl.minimum(position + 1, floor), lo, 0,
                gl.minimum(p0 + 1, floor), scale_log2, F.STAGES, False, F.GATED,
            )  # fmt: skip
        if F.PREFIX:
            prefix_hi, prefix_all_hi = prefix_range(position, p0, kv_range.P, F.KIND)
            done, acc = process_blocks(
                q, d_out, k_smem, v_smem, full, done, acc, lse_row, delta_row, lse_row, delta_row,
                0, num_initial, lo * 0, prefix_hi, lo, 0, prefix_all_hi, scale_log2, F.STAGES,
                False, F.GATED,
            )  # fmt: skip
        smem = dq_smem.index(CONSUMER)
        acc = acc * scale
        if F.ADD:
            mbarrier.wait(dq_bar.index(0), iteration & 1)
            acc += smem.reshape([ROWS, D]).load(ACC).to(gl.float32)
        smem.reshape([ROWS, D]).store(acc.to(dq_smem.dtype))
        fence_async_shared()
        store_box(dq, [b, token, h * F.G, 0], smem)
    tma.store_wait(0)
    if F.ADD:
        at_named_barrier("arrive", ADDED, THREADS)


@gluon.jit(do_not_specialize=LENGTHS)
def nsa_flash_dq_sm90(
    q, k, v, pk, pv, d_out, dq, rows, kv_range, start, T, N, P, each, scale, tiles, B,
    F: gl.constexpr,
):  # fmt: skip
    """One persistent program per multiprocessor: dq of query tiles of a sequence and KV head. It
    reads their `rows` and the keys and values that they see. With ADD adds to dq."""
    kv_range = key_range(start, T, N, P, kv_range, F)
    q_smem, do_smem = buffers(q, CONSUMERS), buffers(d_out, CONSUMERS)
    dq_smem = buffers(dq, CONSUMERS)
    k_smem, v_smem = buffers(k, F.STAGES), buffers(v, F.STAGES)
    q_bar, dq_bar, full = barriers(1, 1), barriers(1, 1), barriers(F.STAGES, 1)
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (consume_dq, (
                dq, rows, kv_range, scale, tiles, B, q_smem, do_smem, dq_smem, k_smem, v_smem,
                q_bar, dq_bar, full, 0, F,
            )),
            (consume_dq, (
                dq, rows, kv_range, scale, tiles, B, q_smem, do_smem, dq_smem, k_smem, v_smem,
                q_bar, dq_bar, full, 1, F,
            )),
            (produce, (
                q, d_out, k, v, pk, pv, each, dq, kv_range, tiles, B, q_smem, do_smem, dq_smem,
                k_smem, v_smem, q_bar, dq_bar, full, F, True,
            )),
        ],
        [4, 1],
        [F.REGISTERS, 24],
    )  # fmt: skip


DKV_LENGTHS = ["start", "T", "N", "blocks", "B"]


@gluon.jit
def window_end(key, reach, stride, KIND: gl.constexpr):
    """One past the last position whose window, or whose local blocks, hold a key."""
    end = key + reach + 1
    if KIND == LOCAL_BLOCKS:
        end = ((key + reach) // stride + 1) * stride
    return end


@gluon.jit
def query_tile_range(n0, kv_range, F: gl.constexpr):
    """First query tile of this program's split, and its end; first tile whose queries see all keys
    from n0 on (none of them as a local key), and the end of these tiles."""
    TOKENS: gl.constexpr = ROWS // F.G
    start, T, N, floor = kv_range.start, kv_range.T, kv_range.N, kv_range.floor
    reach, stride = kv_range.reach, kv_range.stride
    last = gl.minimum(n0 + CONSUMERS * KEYS, N) - 1
    if F.KIND == BEHIND:
        first, full = (n0 + 1) * stride, (last + 1) * stride
        end, full_end = 0x7FFFFFFF, 0x7FFFFFFF
    else:
        first, full = n0, last
        end = window_end(last, reach, stride, F.KIND)
        full_end = window_end(n0, reach, stride, F.KIND)
    first = gl.maximum(first - start, 0) // TOKENS
    end = gl.cdiv(gl.minimum(gl.maximum(end - start, 0), T), TOKENS)
    split_tiles = gl.cdiv(gl.maximum(end - first, 0), gl.num_programs(1))
    begin = first + gl.program_id(1) * split_tiles
    end = gl.minimum(begin + split_tiles, end)
    full = gl.maximum(gl.cdiv(gl.maximum(full - start, 0), TOKENS), begin)
    full_end = gl.minimum(gl.minimum(gl.maximum(full_end - start, 0), T) // TOKENS, end)
    if F.INNER:
        local_end = window_end(last, kv_range.inner_reach, kv_range.inner_stride, LOCAL_BLOCKS)
        full = gl.maximum(full, gl.cdiv(gl.maximum(local_end - start, 0), TOKENS))
    if n0 < floor:
        full_end = full
    return begin, end, full, full_end


@gluon.jit
def produce_dkv(
    q, d_out, k, v, rows, T, n0, b, h, begin, end, k_smem, v_smem, q_smem, do_smem, rows_smem,
    kv_bar, full, F: gl.constexpr,
):  # fmt: skip
    """The producer warp. With INNER it loads lse and delta of both softmaxes."""
    LANES: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    D: gl.constexpr = q.block_shape[3]
    TOKENS: gl.constexpr = ROWS // F.G
    row = gl.arange(0, ROWS, LANES)
    mbarrier.expect(kv_bar.index(0), CONSUMERS * KEYS * D * 4)
    for consumer in gl.static_range(CONSUMERS):
        at = [b, n0 + consumer * KEYS, h, 0]
        load_box(k, at, kv_bar.index(0), k_smem.index(consumer))
        load_box(v, at, kv_bar.index(0), v_smem.index(consumer))
    for tile in range(begin, end):
        i = tile - begin
        slot = i % F.STAGES
        if i >= F.STAGES:
            at_named_barrier("sync", slot, THREADS)
        bar = full.index(slot)
        mbarrier.expect(bar, ROWS * D * 4)
        at = [b, tile * TOKENS, h * F.G, 0]
        load_box(q, at, bar, q_smem.index(slot))
        load_box(d_out, at, bar, do_smem.index(slot))
        # padding rows load the last token's finite lse and delta; they see no key
        token = gl.minimum(tile * TOKENS + row // F.G, T - 1)
        row_offset = (b * T + token).to(gl.int64) * (F.K * F.G) + h * F.G + row % F.G
        for index in gl.static_range(4 if F.INNER else 2):
            slot_rows = rows_smem.index(slot * 4 + index)
            load_elements(slot_rows, rows[index + 1] + row_offset)
        async_copy.mbarrier_arrive(bar, increment_count=False)
    # complete every barrier before the warp exits
    for i in range(gl.maximum(end - begin - F.STAGES, 0), gl.maximum(end - begin, 0)):
        at_named_barrier("sync", i % F.STAGES, THREADS)


@gluon.jit
def visible_positions(n, kv_range, F: gl.constexpr):
    """First position that sees each key, and the end of these positions; the end of the positions
    that see it as a local key."""
    start, T, stride = kv_range.start, kv_range.T, kv_range.stride
    if F.KIND == BEHIND:
        first, end = (n + 1) * stride, n * 0 + (start + T)
    else:
        # compared first: another order compiles to other instructions
        is_before = n < kv_range.floor
        end = gl.minimum(window_end(n, kv_range.reach, stride, F.KIND), start + T)
        first, end = n, gl.where(is_before, 0, end)
    local_end = end
    if F.INNER:
        local_end = window_end(n, kv_range.inner_reach, kv_range.inner_stride, LOCAL_BLOCKS)
        local_end = gl.where(n < kv_range.inner_floor, 0, local_end)
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
def consume_dkv(
    dk, dv, n0, b, B, h, tiles, kv_range, scale, k_smem, v_smem, q_smem, do_smem, rows_smem, kv_bar,
    full, CONSUMER: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """One consumer warpgroup."""
    D: gl.constexpr = q_smem.shape[4]
    TOKENS: gl.constexpr = ROWS // F.G
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    HALF: gl.constexpr = ROWS // 2
    begin, end, full_tile, full_end = tiles
    scale_log2 = scale * 1.4426950408889634
    dk_acc = gl.zeros([KEYS, D], gl.float32, ACC)
    dv_acc = gl.zeros([KEYS, D], gl.float32, ACC)
    k_tile = k_smem.index(CONSUMER).reshape([KEYS, D])
    v_tile = v_smem.index(CONSUMER).reshape([KEYS, D])
    key = n0 + CONSUMER * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, ACC))
    bounds = visible_positions(key, kv_range, F)
    start, N = kv_range.start, kv_range.N
    middle = begin
    mbarrier.wait(kv_bar.index(0), 0)
    if F.INNER:
        # two softmaxes: half a query tile at a time, for lack of registers
        middle = gl.minimum(full_tile, end)
        for tile in range(begin, middle):
            slot = (tile - begin) % F.STAGES
            mbarrier.wait(full.index(slot), ((tile - begin) // F.STAGES) & 1)
            q_tile = q_smem.index(slot).reshape([ROWS, D])
            do_tile = do_smem.index(slot).reshape([ROWS, D])
            for half in gl.static_range(2):
                dk_acc, dv_acc = accumulate(
                    k_tile, v_tile, q_tile.slice(half * HALF, HALF, 0),
                    do_tile.slice(half * HALF, HALF, 0), dk_acc, dv_acc,
                    rows_smem, slot, half * HALF, start + tile * TOKENS, bounds, True, scale_log2,
                    F.G, True, F.GATED,
                )  # fmt: skip
            at_named_barrier("arrive", slot, THREADS)
    for tile in range(middle, end):
        slot = (tile - begin) % F.STAGES
        mbarrier.wait(full.index(slot), ((tile - begin) // F.STAGES) & 1)
        q_tile = q_smem.index(slot).reshape([ROWS, D])
        do_tile = do_smem.index(slot).reshape([ROWS, D])
        masked = (tile < full_tile) | (tile >= full_end)
        dk_acc, dv_acc = accumulate(
            k_tile, v_tile, q_tile, do_tile, dk_acc, dv_acc, rows_smem, slot, 0,
            start + tile * TOKENS, bounds, masked, scale_log2, F.G, False, F.GATED,
        )  # fmt: skip
        at_named_barrier("arrive", slot, THREADS)
    entry = ((gl.program_id(1) * B + b) * N + key).to(gl.int64) * F.K + h
    at = entry[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, ACC))[None]
    gl.store(dk + at, dk_acc * scale, mask=(key < N)[:, None])
    gl.store(dv + at, dv_acc, mask=(key < N)[:, None])


@gluon.jit(do_not_specialize=DKV_LENGTHS)
def nsa_flash_dkv_sm90(
    q, k, v, d_out, dk, dv, rows, kv_range, start, T, N, scale, blocks, B, F: gl.constexpr
):
    """One program owns a block of keys and one split (axis 1) of the queries that see it. It reads
    their `rows` and writes partial dk and dv, [splits, B, N, K, D]."""
    kv_range = key_range(start, T, N, 0, kv_range, F)
    n0 = gl.program_id(0) % blocks * (CONSUMERS * KEYS)
    b, h = gl.program_id(0) // blocks // F.K, gl.program_id(0) // blocks % F.K
    tiles = query_tile_range(n0, kv_range, F)
    begin, end, _full, _full_end = tiles
    k_smem, v_smem = buffers(k, CONSUMERS), buffers(v, CONSUMERS)
    q_smem, do_smem = buffers(q, F.STAGES), buffers(d_out, F.STAGES)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows_smem = gl.allocate_shared_memory(gl.float32, [F.STAGES * 4, ROWS.value], FLAT)
    # 33 arrivals per stage: one for TMA, 32 of the lanes that copy lse and delta
    kv_bar, full = barriers(1, 1), barriers(F.STAGES, 33)
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (consume_dkv, (
                dk, dv, n0, b, B, h, tiles, kv_range, scale, k_smem, v_smem, q_smem, do_smem,
                rows_smem, kv_bar, full, 0, F,
            )),
            (consume_dkv, (
                dk, dv, n0, b, B, h, tiles, kv_range, scale, k_smem, v_smem, q_smem, do_smem,
                rows_smem, kv_bar, full, 1, F,
            )),
            (produce_dkv, (
                q, d_out, k, v, rows, T, n0, b, h, begin, end, k_smem, v_smem, q_smem, do_smem,
                rows_smem, kv_bar, full, F,
            )),
        ],
        [4, 1],
        [F.REGISTERS, 24],
    )  # fmt: skip


# launches


def backward_q(
    call: Facts,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: int,
    scale: float,
    rows: Rows,
    dq: Tensor,
    prefix: tuple[Tensor, Tensor] | None,
) -> None:
    """As `bwd.backward_q`, of queries from position `start` on."""
    at = plan("dq", call, launch.tuning())
    args = arguments(at, q, k, v, start)
    d_out, dq_box = (launch.gluon_box(t, args["q"].block_shape) for t in (rows.d_out, dq))
    launcher(nsa_flash_dq_sm90, at.grid)(
        **args, **prefix_boxes(args, prefix), d_out=d_out, dq=dq_box, rows=rows, scale=scale
    )


def backward_kv(
    call: Facts, q: Tensor, k: Tensor, v: Tensor, start: int, scale: float, rows: Rows
) -> tuple[Tensor, Tensor]:
    """As `bwd.backward_kv`, of queries from position `start` on."""
    at = plan("dkv", call, launch.tuning())
    args = arguments(at, q, k, v, start)
    dk, dv = (t.new_empty(at.grid[1], *t.shape, dtype=torch.float32) for t in (k, v))
    launcher(nsa_flash_dkv_sm90, at.grid)(
        **args, d_out=launch.gluon_box(rows.d_out, args["q"].block_shape), rows=rows, dk=dk, dv=dv,
        scale=scale,
    )  # fmt: skip
    return dk, dv
