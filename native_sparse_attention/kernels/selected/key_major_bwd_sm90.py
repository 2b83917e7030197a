"""dk, dv and partial dq of the top-n blocks, key-major like `key_major.py`, in Gluon.

A program has two work tiles (see `csr.py`), one per consumer warpgroup. A consumer holds dk and dv
of its block in registers. One producer copies the rows of both tiles, into a ring of stages per
consumer. Products [keys, rows] are the left operands of the next products, in registers. dq needs
ds transposed, in shared memory; the same buffer then holds dq until it is written.
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
    CONSUMERS,
    KEYS,
    ROWS,
    TILE,
    WIDTH,
    produce,
    tile_of,
    work_tile,
    write_boxes,
    write_rows,
)

# one compiled kernel for all lengths
LENGTHS = ["T", "S", "C", "BLOCKS", "tile_pairs", "num_tiles", "head"]


@gluon.jit
def accumulate(
    partial_dq, begin, end, count, origin, scale, dk, dv, k_tile, v_tile, q_smem, do_smem,
    lse_smem, delta_smem, ds_smem, full, CONSUMER: gl.constexpr, G: gl.constexpr,
    GROUP: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
    DQ: gl.constexpr, BY_ROW: gl.constexpr,
):  # fmt: skip
    """Accumulates dk and dv over the tiles of a work tile; with DQ also writes partial dq."""
    PAIR_ROWS: gl.constexpr = TOKENS * GROUP
    PAIRS: gl.constexpr = ROWS // PAIR_ROWS
    D: gl.constexpr = k_tile.shape[1]
    THREADS: gl.constexpr = 256 if BY_ROW else 160  # of a consumer and the producer
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, S)
    dtype: gl.constexpr = q_smem.dtype
    row = gl.arange(0, ROWS, ROW)
    zero = gl.zeros([KEYS, ROWS], gl.float32, S)
    for j in range(0, count):
        i = begin + j * PAIRS
        stage = CONSUMER * STAGES + j % STAGES
        mbarrier.wait(full.index(stage), (j // STAGES) & 1)
        if BY_ROW:
            fence_async_shared()  # threads wrote it
        q_tile, do_tile = tile_of(q_smem, stage, D), tile_of(do_smem, stage, D)
        s = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(v_tile, do_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        lse_row = lse_smem.index(stage).load(ROW)
        delta_row = delta_smem.index(stage).load(ROW)
        real = (i + row // PAIR_ROWS < end) & (row % GROUP < G)
        lse_row = gl.where(real, lse_row, float("inf"))
        s, dp = warpgroup_mma_wait(0, deps=[s, dp])
        p = probabilities(s, scale * 1.4426950408889634, lse_row[None], delta_row[None], GATED)
        ds = p * (dp - delta_row[None])
        dv = warpgroup_mma(gl.convert_layout(p.to(dtype), LEFT), do_tile, dv, is_async=True)
        left = gl.convert_layout(ds.to(dtype), LEFT)
        dk = warpgroup_mma(left, q_tile, dk, is_async=True)
        if DQ:
            ds_tile = tile_of(ds_smem, CONSUMER * (D // ROWS), ROWS)
            if not BY_ROW:
                tma.store_wait(0)  # the previous dq is written
            thread_barrier()
            ds_tile.store(left)
            fence_async_shared()
            thread_barrier()
        dv, dk = warpgroup_mma_wait(0, deps=[dv, dk])
        at_named_barrier("arrive", stage, THREADS)
        if DQ:
            dq = gl.zeros([ROWS, D], gl.float32, ACC)
            dq = warpgroup_mma(ds_tile.permute((1, 0)), k_tile, dq, use_acc=False, is_async=True)
            dq = (warpgroup_mma_wait(0, deps=[dq]) * scale).to(dtype)
            thread_barrier()  # all have read ds
            if BY_ROW:
                buffer = tile_of(ds_smem, CONSUMER, D)
                write_rows(partial_dq, dq, buffer, i, end, origin, G, GROUP)
            else:
                write_boxes(partial_dq, dq, ds_smem, i, end, origin, CONSUMER, GROUP)
    return dk, dv


@gluon.jit
def consume(
    partial_dq, overlapping, block_csr, num_tiles, head, S, C, BLOCKS, scale, dk, dv, partial_dk,
    partial_dv, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem, kv_bar, full,
    CONSUMER: gl.constexpr, K: gl.constexpr, HEADS: gl.constexpr, G: gl.constexpr,
    GROUP: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
    DQ: gl.constexpr, OVERLAPPING: gl.constexpr, BY_ROW: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup of a work tile. Adds to dk and dv of the block, or writes partials if the
    block has several work tiles."""
    D: gl.constexpr = k_smem.shape[4]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    offsets, ordinals, tile_pairs, partial_offsets = (
        block_csr[1], block_csr[3], block_csr[4], block_csr[5],
    )  # fmt: skip
    tile = gl.program_id(0) * CONSUMERS + CONSUMER
    block, b, h, c, begin, end = work_tile(tile, num_tiles, block_csr, C, BLOCKS, head, HEADS)
    k_tile = k_smem.index(CONSUMER).reshape([KEYS, D])
    v_tile = v_smem.index(CONSUMER).reshape([KEYS, D])
    dk_acc = gl.zeros([KEYS, D], gl.float32, ACC)
    dv_acc = gl.zeros([KEYS, D], gl.float32, ACC)
    origin = gl.load(offsets).to(gl.int32)
    steps = gl.maximum(gl.cdiv(end - begin, ROWS // (TOKENS * GROUP)), 0)
    dq_steps = steps if DQ else 0
    if OVERLAPPING:
        dq_steps = gl.where(gl.load(overlapping) != 0, 0, steps)
    mbarrier.wait(kv_bar.index(CONSUMER), 0)
    if DQ:
        dk_acc, dv_acc = accumulate(
            partial_dq, begin, end, dq_steps, origin, scale, dk_acc, dv_acc, k_tile, v_tile, q_smem,
            do_smem, lse_smem, delta_smem, ds_smem, full, CONSUMER, G, GROUP, TOKENS, STAGES, GATED,
            True, BY_ROW,
        )  # fmt: skip
        tma.store_wait(0)
    if OVERLAPPING or not DQ:
        dk_acc, dv_acc = accumulate(
            partial_dq, begin, end, steps - dq_steps, origin, scale, dk_acc, dv_acc, k_tile, v_tile,
            q_smem, do_smem, lse_smem, delta_smem, ds_smem, full, CONSUMER, G, GROUP, TOKENS,
            STAGES, GATED, False, BY_ROW,
        )  # fmt: skip
    dk_acc *= scale
    if end > begin:
        key = gl.arange(0, KEYS, gl.SliceLayout(1, ACC))
        feature = gl.arange(0, D, gl.SliceLayout(0, ACC))
        if gl.load(offsets + block + 1) - gl.load(offsets + block) <= tile_pairs:
            at = ((b * S + c * KEYS + key).to(gl.int64) * K + h) * D
            at = at[:, None] + feature[None]
            gl.store(dk + at, dk_acc + gl.load(dk + at))
            gl.store(dv + at, dv_acc + gl.load(dv + at))
        else:
            partial = gl.load(partial_offsets + block) + gl.load(ordinals + tile)
            at = (partial * KEYS + key).to(gl.int64) * D
            at = at[:, None] + feature[None]
            gl.store(partial_dk + at, dk_acc)
            gl.store(partial_dv + at, dv_acc)


@gluon.jit(do_not_specialize=LENGTHS)
def nsa_selected_bwd_key_major_sm90(
    q, k, v, d_out, q_b, q_t, q_h, lse, delta, partial_dq, overlapping, dk, dv, partial_dk,
    partial_dv, pairs, offsets, owner, ordinals, partial_offsets, tile_pairs, num_tiles, head, T,
    S, C, BLOCKS, scale, K: gl.constexpr, HEADS: gl.constexpr, R: gl.constexpr, n: gl.constexpr,
    G: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, DQ: gl.constexpr, OVERLAPPING: gl.constexpr, BY_ROW: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program: two work tiles. With OVERLAPPING no dq unless `overlapping` is 0. With BY_ROW q,
    d_out and partial_dq are pointers, else descriptors of boxes of a pair."""
    block_csr = (pairs, offsets, owner, ordinals, tile_pairs, partial_offsets)
    strides = (q_b, q_t, q_h)
    D: gl.constexpr = k.block_shape[3]
    BOXES: gl.constexpr = ROWS // (TOKENS * GROUP) * (D // WIDTH)
    BUFFERS: gl.constexpr = CONSUMERS * STAGES
    k_smem, v_smem = buffers(k, CONSUMERS), buffers(v, CONSUMERS)
    if BY_ROW:
        q_smem = gl.allocate_shared_memory(k.dtype, [BUFFERS, ROWS.value, D], TILE)
        do_smem = gl.allocate_shared_memory(k.dtype, [BUFFERS, ROWS.value, D], TILE)
        ds_smem = q_smem
        if DQ:
            ds_smem = gl.allocate_shared_memory(k.dtype, [CONSUMERS.value, ROWS.value, D], TILE)
    else:
        q_smem, do_smem = buffers(q, BUFFERS * BOXES), buffers(q, BUFFERS * BOXES)
        ds_smem = buffers(partial_dq, CONSUMERS * BOXES) if DQ else q_smem
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_smem = gl.allocate_shared_memory(gl.float32, [BUFFERS, ROWS], FLAT)
    delta_smem = gl.allocate_shared_memory(gl.float32, [BUFFERS, ROWS], FLAT)
    # the threads that copy into a stage arrive at its barrier too
    kv_bar, full = barriers(CONSUMERS, 1), barriers(BUFFERS, 128 if BY_ROW else 33)
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (consume, (
                partial_dq, overlapping, block_csr, num_tiles, head, S, C, BLOCKS, scale, dk, dv,
                partial_dk, partial_dv, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem,
                ds_smem, kv_bar, full, 0, K, HEADS, G, GROUP, TOKENS, STAGES, GATED, DQ,
                OVERLAPPING, BY_ROW,
            )),
            (consume, (
                partial_dq, overlapping, block_csr, num_tiles, head, S, C, BLOCKS, scale, dk, dv,
                partial_dk, partial_dv, k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem,
                ds_smem, kv_bar, full, 1, K, HEADS, G, GROUP, TOKENS, STAGES, GATED, DQ,
                OVERLAPPING, BY_ROW,
            )),
            (produce, (
                q, d_out, k, v, lse, delta, strides, block_csr, num_tiles, head, T, C, BLOCKS,
                k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, kv_bar, full, HEADS, R, n,
                G, GROUP, TOKENS, STAGES, BY_ROW,
            )),
        ],
        [4, 4 if BY_ROW else 1],
        [REGISTERS, 32 if BY_ROW else 24],
    )  # fmt: skip
