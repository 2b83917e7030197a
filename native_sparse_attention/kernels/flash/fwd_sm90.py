"""Attention over KV ranges, as `fwd.py`; see `steps_sm90.py`. With local blocks inside a window,
both softmaxes start from the local blocks' partial sums. In Gluon."""

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

from ..common.gluon_sm90 import at_named_barrier, barriers, buffers, store_box, thread_barrier
from ..common.primitives import LARGEST_BOUND, LOCAL_BLOCKS
from .steps_sm90 import (
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

# keys that each row must see for the row bound to be used, as in `primitives.measured_from`
FEWEST = gl.constexpr(16)


@gluon.jit
def produce(
    q, k, v, pk, pv, each, kv_range, K, tiles, B, q_smem, k_smem, v_smem, q_bar, full,
    G: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr, INNER: gl.constexpr,
    PREFIX: gl.constexpr,
):  # fmt: skip
    """The producer warp."""
    TOKENS: gl.constexpr = CONSUMERS * ROWS // G
    done = 0
    for iteration in range(0, num_work_tiles(tiles * B * K)):
        tile, b, h = tile_position(iteration, tiles, B, K)
        local, num_local, begin, num_outer, num_initial = blocks_of(
            tile, kv_range, TOKENS, KIND, INNER, PREFIX
        )
        if iteration > 0:
            at_named_barrier("sync", QUERIES, THREADS)
        mbarrier.expect(q_bar.index(0), CONSUMERS * ROWS * q.block_shape[3] * 2)
        read_rows(q, q_smem, q_bar.index(0), b, tile * TOKENS, h * G)
        done = read_blocks(
            k, v, pk, pv, each, k_smem, v_smem, full, done, b, h, local, num_local, begin,
            num_outer, num_initial, STAGES, PREFIX,
        )  # fmt: skip
    at_named_barrier("sync", QUERIES, THREADS)
    wait_for_all(done, STAGES)


@gluon.jit
def process_blocks(
    q, k_smem, v_smem, full, done, acc, m, l, first, count, lo, hi, all_lo, all_hi, scale_log2,
    STAGES: gl.constexpr, BY_BOUND: gl.constexpr,
):  # fmt: skip
    """Fold `count` blocks into a running softmax; see `primitives.scaled_step`."""
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
        at_named_barrier("arrive", slot, THREADS)
        done += 1
    return done, acc, m, l


@gluon.jit
def measured_from(q, key_norm, scale_log2, keys, real, m):
    """The row bounds, if all are small and the rows see enough keys, else m; and whether the bounds
    are used."""
    x = q.to(gl.float32)
    bound = gl.convert_layout(gl.sqrt(gl.sum(x * x, 1)), m.type.layout)
    bound = bound * (key_norm * gl.abs(scale_log2))
    most = gl.max(gl.where((keys < FEWEST) & real, float("inf"), bound), 0)
    by_bound = most <= LARGEST_BOUND
    return gl.where(by_bound, bound, m), by_bound


@gluon.jit
def write(out, lse, smem, acc, m, l, at, row, real):
    """Write out and natural lse of a consumer's rows."""
    empty = l == 0.0
    l = gl.where(empty, 1.0, l)
    inverse_l = gl.convert_layout(1.0 / l, gl.SliceLayout(1, acc.type.layout))
    tma.store_wait(0)  # the previous contents are written
    smem.reshape(acc.shape).store((acc * inverse_l[:, None]).to(smem.dtype))
    fence_async_shared()
    store_box(out, at, smem)
    log = gl.where(empty, float("-inf"), (m + gl.log2(l)) * 0.6931471805599453)
    gl.store(lse + row, log, mask=real)


@gluon.jit
def consume(
    out, lse, inner_out, inner_lse, norms, kv_range, K, scale_log2, tiles, B, q_smem, k_smem,
    v_smem, out_smem, q_bar, full, CONSUMER: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr,
    KIND: gl.constexpr, INNER: gl.constexpr, PREFIX: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    """One consumer warpgroup. It subtracts row bounds from the logits if they are small enough. Of
    the two code paths, with and without bounds, one processes no blocks."""
    D: gl.constexpr = k_smem.shape[4]
    TOKENS: gl.constexpr = ROWS // G
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    start, T = kv_range[0], kv_range[1]
    i = gl.arange(0, ROWS, ROW)
    done = 0
    if BOUNDED:
        _, b, h = tile_position(0, tiles, B, K)
        key_norm = gl.load(norms + b * K + h)
    for iteration in range(0, num_work_tiles(tiles * B * K)):
        tile, b, h = tile_position(iteration, tiles, B, K)
        local, num_local, begin, num_outer, num_initial = blocks_of(
            tile, kv_range, CONSUMERS * TOKENS, KIND, INNER, PREFIX
        )
        token, position, row, real = rows_of(i, tile, b, h, start, T, K, CONSUMER, G)
        p0, p1 = start + token, start + token + TOKENS - 1
        lo, hi, all_lo, all_hi = visible_range(position, p0, p1, kv_range, KIND)
        keys = hi - lo
        if PREFIX:
            prefix_hi, prefix_all_hi = prefix_range(position, p0, kv_range[9], KIND)
            if KIND == LOCAL_BLOCKS:
                keys = gl.maximum(keys, 0) + prefix_hi
        if INNER:
            floor = kv_range[6]
            local_lo = gl.maximum(local_start(position, kv_range), lo)
            keys = gl.maximum(hi - local_lo, 0) + gl.minimum(position + 1, floor)

        mbarrier.wait(q_bar.index(0), iteration & 1)
        q = q_smem.index(CONSUMER).reshape([ROWS, D]).load(gl.DotOperandLayout(0, S, 2))
        m = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        by_bound = False
        if BOUNDED:
            m, by_bound = measured_from(q, key_norm, scale_log2, keys, real, m)
        fence_async_shared()  # TMA may overwrite q after this load
        at_named_barrier("arrive", QUERIES, THREADS)
        if BOUNDED:  # prefetch for the next work tile
            _, next_b, next_h = tile_position(iteration + 1, tiles, B, K)
            key_norm = gl.load(norms + next_b * K + next_h)

        l = gl.zeros([ROWS], gl.float32, ROW)
        acc = gl.zeros([ROWS, D], gl.float32, ACC)
        at = [b, token, h * G, 0]
        smem = out_smem.index(CONSUMER)
        for way in gl.static_range(0 if BOUNDED else 1, 2):
            taken = by_bound == (way == 0)
            if INNER:
                done, acc, m, l = process_blocks(
                    q, k_smem, v_smem, full, done, acc, m, l, local, gl.where(taken, num_local, 0),
                    local_lo, gl.where(local_lo < hi, hi, 0), local_start(p1, kv_range), all_hi,
                    scale_log2, STAGES, way == 0,
                )  # fmt: skip
                inner_acc, inner_m, inner_l = acc, m, l
                done, acc, m, l = process_blocks(
                    q, k_smem, v_smem, full, done, acc, m, l, begin, gl.where(taken, num_outer, 0),
                    lo, gl.minimum(hi, local_lo), all_lo,
                    gl.minimum(all_hi, local_start(p0, kv_range)), scale_log2, STAGES, way == 0,
                )  # fmt: skip
                if taken:
                    write(out, lse, smem, acc, m, l, at, row, real)
                done, inner_acc, inner_m, inner_l = process_blocks(
                    q, k_smem, v_smem, full, done, inner_acc, inner_m, inner_l, 0,
                    gl.where(taken, num_initial, 0), lo * 0, gl.minimum(position + 1, floor), 0,
                    gl.minimum(p0 + 1, floor), scale_log2, STAGES, way == 0,
                )  # fmt: skip
                if taken:
                    write(inner_out, inner_lse, smem, inner_acc, inner_m, inner_l, at, row, real)
            else:
                done, acc, m, l = process_blocks(
                    q, k_smem, v_smem, full, done, acc, m, l, begin, gl.where(taken, num_outer, 0),
                    lo, hi, all_lo, all_hi, scale_log2, STAGES, way == 0,
                )  # fmt: skip
            if PREFIX:  # the bounds do not cover learned memory
                done, acc, m, l = process_blocks(
                    q, k_smem, v_smem, full, done, acc, m, l, 0, gl.where(taken, num_initial, 0),
                    lo * 0, prefix_hi, 0, prefix_all_hi, scale_log2, STAGES,
                    way == 0 and KIND == LOCAL_BLOCKS,
                )  # fmt: skip
        if not INNER:
            write(out, lse, smem, acc, m, l, at, row, real)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=LENGTHS)
def nsa_flash_fwd_sm90(
    q, k, v, out, lse, inner_out, inner_lse, norms, start, T, N, floor, reach, inner_floor,
    inner_reach, pk, pv, P, each, scale_log2, tiles, B, stride: gl.constexpr,
    inner_stride: gl.constexpr, K: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr,
    KIND: gl.constexpr, INNER: gl.constexpr, PREFIX: gl.constexpr, BOUNDED: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """One persistent program per multiprocessor: attention of query tiles of a sequence and KV
    head."""
    kv_range = (start, T, N, floor, reach, stride, inner_floor, inner_reach, inner_stride, P)
    q_smem, out_smem = buffers(q, CONSUMERS), buffers(out, CONSUMERS)
    k_smem, v_smem = buffers(k, STAGES), buffers(v, STAGES)
    q_bar, full = barriers(1, 1), barriers(STAGES, 1)
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (consume, (
                out, lse, inner_out, inner_lse, norms, kv_range, K, scale_log2, tiles, B, q_smem,
                k_smem, v_smem, out_smem, q_bar, full, 0, G, STAGES, KIND, INNER, PREFIX,
                BOUNDED,
            )),
            (consume, (
                out, lse, inner_out, inner_lse, norms, kv_range, K, scale_log2, tiles, B, q_smem,
                k_smem, v_smem, out_smem, q_bar, full, 1, G, STAGES, KIND, INNER, PREFIX,
                BOUNDED,
            )),
            (produce, (
                q, k, v, pk, pv, each, kv_range, K, tiles, B, q_smem, k_smem, v_smem, q_bar, full,
                G, STAGES, KIND, INNER, PREFIX,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
