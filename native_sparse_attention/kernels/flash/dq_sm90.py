"""dq of the flash kernels, as `bwd.py`; see `steps_sm90.py`. In Gluon."""

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

from ..common.gluon_sm90 import (
    at_named_barrier,
    barriers,
    buffers,
    probabilities,
    store_box,
    thread_barrier,
)
from .steps_sm90 import (
    ADDED,
    CONSUMERS,
    KEYS,
    LENGTHS,
    QUERIES,
    ROWS,
    THREADS,
    blocks_of,
    local_start,
    num_work_tiles,
    prefix_range,
    read_blocks,
    read_rows,
    rows_of,
    tile_position,
    visible_range,
    wait_for_all,
)


@gluon.jit
def produce(
    q, d_out, k, v, pk, pv, each, dq, kv_range, K, tiles, B, q_smem, do_smem, dq_smem, k_smem,
    v_smem, q_bar, dq_bar, full, G: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr,
    INNER: gl.constexpr, PREFIX: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """The producer warp. With ADD it also loads dq, after the blocks."""
    BYTES: gl.constexpr = CONSUMERS * ROWS * q.block_shape[3] * 2
    TOKENS: gl.constexpr = CONSUMERS * ROWS // G
    done = 0
    for iteration in range(0, num_work_tiles(tiles * B * K)):
        tile, b, h = tile_position(iteration, tiles, B, K)
        local, num_local, begin, num_outer, num_initial = blocks_of(
            tile, kv_range, TOKENS, KIND, INNER, PREFIX
        )
        if iteration > 0:
            at_named_barrier("sync", QUERIES, THREADS)
        mbarrier.expect(q_bar.index(0), 2 * BYTES)
        read_rows(q, q_smem, q_bar.index(0), b, tile * TOKENS, h * G)
        read_rows(d_out, do_smem, q_bar.index(0), b, tile * TOKENS, h * G)
        done = read_blocks(
            k, v, pk, pv, each, k_smem, v_smem, full, done, b, h, local, num_local, begin,
            num_outer, num_initial, STAGES, PREFIX,
        )  # fmt: skip
        if ADD:
            if iteration > 0:
                at_named_barrier("sync", ADDED, THREADS)
            mbarrier.expect(dq_bar.index(0), BYTES)
            read_rows(dq, dq_smem, dq_bar.index(0), b, tile * TOKENS, h * G)
    at_named_barrier("sync", QUERIES, THREADS)
    if ADD:
        at_named_barrier("sync", ADDED, THREADS)
    wait_for_all(done, STAGES)


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
def load_lse_delta(
    i, iteration, tiles, B, lse, delta, inner_lse, inner_delta, start, T, K: gl.constexpr,
    CONSUMER: gl.constexpr, G: gl.constexpr, INNER: gl.constexpr,
):  # fmt: skip
    """lse and delta of a consumer's rows i of a work tile; with INNER of both softmaxes."""
    tile, b, h = tile_position(iteration, tiles, B, K)
    _, _, row, real = rows_of(i, tile, b, h, start, T, K, CONSUMER, G)
    real = real & (tile >= 0)  # there may be no next work tile
    lse_row = gl.load(lse + row, mask=real, other=0.0)
    delta_row = gl.load(delta + row, mask=real, other=0.0)
    other_lse, other_delta = lse_row, delta_row
    if INNER:
        other_lse = gl.load(inner_lse + row, mask=real, other=0.0)
        other_delta = gl.load(inner_delta + row, mask=real, other=0.0)
    return lse_row, delta_row, other_lse, other_delta


@gluon.jit
def consume(
    dq, lse, delta, inner_lse, inner_delta, kv_range, K, scale, tiles, B, q_smem, do_smem, dq_smem,
    k_smem, v_smem, q_bar, dq_bar, full, CONSUMER: gl.constexpr, G: gl.constexpr,
    STAGES: gl.constexpr, KIND: gl.constexpr, INNER: gl.constexpr, PREFIX: gl.constexpr,
    GATED: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """One consumer warpgroup."""
    D: gl.constexpr = k_smem.shape[4]
    TOKENS: gl.constexpr = ROWS // G
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    start, T, N = kv_range[0], kv_range[1], kv_range[2]
    i, scale_log2 = gl.arange(0, ROWS, ROW), scale * 1.4426950408889634
    done = 0
    next_lse, next_delta, next_other_lse, next_other_delta = load_lse_delta(
        i, 0, tiles, B, lse, delta, inner_lse, inner_delta, start, T, K, CONSUMER, G, INNER
    )
    for iteration in range(0, num_work_tiles(tiles * B * K)):
        tile, b, h = tile_position(iteration, tiles, B, K)
        local, num_local, begin, num_outer, num_initial = blocks_of(
            tile, kv_range, CONSUMERS * TOKENS, KIND, INNER, PREFIX
        )
        token, position, _, _ = rows_of(i, tile, b, h, start, T, K, CONSUMER, G)
        p0, p1 = start + token, start + token + TOKENS - 1
        lo, hi, all_lo, all_hi = visible_range(position, p0, p1, kv_range, KIND)
        lse_row, delta_row = next_lse, next_delta
        other_lse, other_delta = next_other_lse, next_other_delta
        mbarrier.wait(q_bar.index(0), iteration & 1)
        q = q_smem.index(CONSUMER).reshape([ROWS, D]).load(gl.DotOperandLayout(0, S, 2))
        d_out = do_smem.index(CONSUMER).reshape([ROWS, D]).load(gl.DotOperandLayout(0, S, 2))
        fence_async_shared()  # TMA may overwrite q and d_out after these loads
        at_named_barrier("arrive", QUERIES, THREADS)
        # prefetch for the next work tile
        next_lse, next_delta, next_other_lse, next_other_delta = load_lse_delta(
            i,
            iteration + 1,
            tiles,
            B,
            lse,
            delta,
            inner_lse,
            inner_delta,
            start,
            T,
            K,
            CONSUMER,
            G,
            INNER,
        )
        tma.store_wait(0)  # the previous work tile's dq is written
        if ADD:  # noqa: SIM102
            if iteration > 0:
                at_named_barrier("arrive", ADDED, THREADS)
        acc = gl.zeros([ROWS, D], gl.float32, ACC)
        hi_before, all_before = hi, all_hi
        if INNER:
            # the window contains the local keys
            done, acc = process_blocks(
                q, d_out, k_smem, v_smem, full, done, acc, lse_row, delta_row, other_lse,
                other_delta, local, num_local, lo, hi, local_start(position, kv_range), all_lo,
                all_hi, scale_log2, STAGES, True, GATED,
            )  # fmt: skip
            # the first local block's keys before the local range are already processed
            at = local_start(start + tile * (CONSUMERS * TOKENS), kv_range)
            at = gl.where(num_local > 0, at // KEYS * KEYS, N)
            hi_before, all_before = gl.minimum(hi, at), gl.minimum(all_hi, at)
        done, acc = process_blocks(
            q, d_out, k_smem, v_smem, full, done, acc, lse_row, delta_row, lse_row, delta_row,
            begin, num_outer, lo, hi_before, lo, all_lo, all_before, scale_log2, STAGES, False,
            GATED,
        )  # fmt: skip
        if INNER:
            floor = kv_range[6]
            done, acc = process_blocks(
                q, d_out, k_smem, v_smem, full, done, acc, other_lse, other_delta, lse_row,
                delta_row, 0, num_initial, lo * 0, gl.minimum(position + 1, floor), lo, 0,
                gl.minimum(p0 + 1, floor), scale_log2, STAGES, False, GATED,
            )  # fmt: skip
        if PREFIX:
            prefix_hi, prefix_all_hi = prefix_range(position, p0, kv_range[9], KIND)
            done, acc = process_blocks(
                q, d_out, k_smem, v_smem, full, done, acc, lse_row, delta_row, lse_row, delta_row,
                0, num_initial, lo * 0, prefix_hi, lo, 0, prefix_all_hi, scale_log2, STAGES, False,
                GATED,
            )  # fmt: skip
        smem = dq_smem.index(CONSUMER)
        acc = acc * scale
        if ADD:
            mbarrier.wait(dq_bar.index(0), iteration & 1)
            acc += smem.reshape([ROWS, D]).load(ACC).to(gl.float32)
        smem.reshape([ROWS, D]).store(acc.to(dq_smem.dtype))
        fence_async_shared()
        store_box(dq, [b, token, h * G, 0], smem)
    tma.store_wait(0)
    if ADD:
        at_named_barrier("arrive", ADDED, THREADS)


@gluon.jit(do_not_specialize=LENGTHS)
def nsa_flash_dq_sm90(
    q, k, v, d_out, dq, lse, delta, inner_lse, inner_delta, start, T, N, floor, reach, inner_floor,
    inner_reach, pk, pv, P, each, scale, tiles, B, stride: gl.constexpr,
    inner_stride: gl.constexpr, K: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr,
    KIND: gl.constexpr, INNER: gl.constexpr, PREFIX: gl.constexpr, GATED: gl.constexpr,
    ADD: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """One persistent program per multiprocessor: dq of query tiles of a sequence and KV head. With
    ADD adds to dq."""
    kv_range = (start, T, N, floor, reach, stride, inner_floor, inner_reach, inner_stride, P)
    q_smem, do_smem = buffers(q, CONSUMERS), buffers(d_out, CONSUMERS)
    dq_smem = buffers(dq, CONSUMERS)
    k_smem, v_smem = buffers(k, STAGES), buffers(v, STAGES)
    q_bar, dq_bar, full = barriers(1, 1), barriers(1, 1), barriers(STAGES, 1)
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (consume, (
                dq, lse, delta, inner_lse, inner_delta, kv_range, K, scale, tiles, B, q_smem,
                do_smem, dq_smem, k_smem, v_smem, q_bar, dq_bar, full, 0, G, STAGES, KIND, INNER,
                PREFIX, GATED, ADD,
            )),
            (consume, (
                dq, lse, delta, inner_lse, inner_delta, kv_range, K, scale, tiles, B, q_smem,
                do_smem, dq_smem, k_smem, v_smem, q_bar, dq_bar, full, 1, G, STAGES, KIND, INNER,
                PREFIX, GATED, ADD,
            )),
            (produce, (
                q, d_out, k, v, pk, pv, each, dq, kv_range, K, tiles, B, q_smem, do_smem, dq_smem,
                k_smem, v_smem, q_bar, dq_bar, full, G, STAGES, KIND, INNER, PREFIX, ADD,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
