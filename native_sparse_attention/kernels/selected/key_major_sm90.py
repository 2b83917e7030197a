"""The selected branch, key-major like `key_major.py`, in Gluon for Hopper: the forward, and dk, dv
and partial dq.

A tile has the rows of some pairs. A pair has TOKENS neighbouring tokens, which share block indices,
of GROUP rows each, of which G are heads. The tensor memory accelerator copies pairs of eight or
more rows, a box per half row. Threads of four warps copy smaller pairs, of one token.

Forward: a program of four warps has a work tile (see `csr.py`). Shared memory holds the keys and
values of its block and two tiles of rows: threads copy the next tile during the products of the
current one. The buffer of a tile then holds its output, which is written in whole rows.

Backward: a program has two work tiles, one per consumer warpgroup, which holds dk and dv of its
block in registers. One producer copies the rows of both tiles, into a ring of stages per consumer.
Products [keys, rows] are the left operands of the next products, in registers. dq needs ds
transposed, in shared memory; the same buffer then holds dq until it is written.
"""

from __future__ import annotations

import math

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

from ..common import launch, sm90
from ..common.gluon_sm90 import (
    at_named_barrier,
    barriers,
    buffers,
    load_box,
    load_elements,
    probabilities,
    reinterpret,
    store_box,
    thread_barrier,
)
from ..common.launch import LOG2_E, BackwardInputs, cdiv, next_power_of_2
from ..common.overrides import requested_sizes
from ..common.precompile import launcher
from .csr import BlockCSR
from .inputs import Inputs

CONSUMERS = gl.constexpr(2)
KEYS = gl.constexpr(64)  # of a block
ROWS = gl.constexpr(64)  # of a tile of pairs
WIDTH = gl.constexpr(64)  # of a box
# layout of product operands
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
# rows of a pair from which the tensor memory accelerator copies them
MIN_BOX_ROWS = 8
# stages of each consumer's ring, and registers of a consumer thread
STAGES, REGISTERS = 2, 240
# one compiled kernel for all lengths
LENGTHS = ["T", "S", "C", "BLOCKS", "tile_pairs", "num_tiles", "head"]


@gluon.jit
def work_tile(tile, work, HEADS):
    """Block of a work tile, its batch row, KV head (of HEADS heads from `head` on), block number,
    first pair and end. Past the last work tile first pair and end are equal."""
    _pairs, offsets, owner, ordinals, _, tile_pairs, num_tiles, C, BLOCKS, head = work
    valid = tile < num_tiles
    block = gl.load(owner + tile, mask=valid, other=0x7FFFFFFF)
    valid = block < BLOCKS
    block = gl.where(valid, block, 0)
    ordinal = gl.load(ordinals + tile, mask=valid, other=0).to(gl.int64)
    begin = gl.load(offsets + block) + ordinal * tile_pairs
    end = gl.minimum(begin + tile_pairs, gl.load(offsets + block + 1))
    end = gl.where(valid, end, begin)
    b, h = block // C // HEADS, head + block // C % HEADS
    return block, b, h, block % C, begin.to(gl.int32), end.to(gl.int32)


@gluon.constexpr_function
def in_tiles(shape, width):
    """The shape of boxes or rows, viewed as consecutive tiles [ROWS, width]."""
    return [math.prod(map(int, shape)) // (ROWS.value * width), ROWS.value, width]


@gluon.jit
def tile_of(smem, number, D: gl.constexpr):
    """Tile `number` [ROWS, D] of shared memory."""
    return reinterpret(smem, smem.dtype, in_tiles(smem.shape, D), TILE).index(number)


@gluon.jit
def head_of(e, row, R: gl.constexpr, n: gl.constexpr, G: gl.constexpr, GROUP: gl.constexpr):
    """Head of each row of pairs e; the pair's last head for padding rows."""
    return e // n % R * G + gl.minimum(row % GROUP, G - 1)


@gluon.constexpr_function
def by_rows(GROUP):
    """Layout in which four warps copy a tile: a thread has rows of one pair."""
    return gl.BlockedLayout([min(int(GROUP), 4), 8], [4, 8], [4, 1], [1, 0])


@gluon.jit
def load_pairs(pairs, i, end, GROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """Pair of each row of a tile, from pair i on; the last pair for padding rows."""
    row = gl.arange(0, ROWS, LAYOUT)
    return gl.load(pairs + gl.minimum(i + row // GROUP, end - 1)).to(gl.int32)


@gluon.jit
def copy_rows(
    t, strides, e, token_offset, b, tile, R: gl.constexpr, n: gl.constexpr, G: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Copies the rows of pairs e of tensor t to `tile`, by four warps."""
    LAYOUT: gl.constexpr = by_rows(GROUP)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, tile.shape[1], gl.SliceLayout(0, LAYOUT))
    token, head = e // (n * R) - token_offset, head_of(e, row, R, n, G, GROUP).to(gl.int64)
    at = b.to(gl.int64) * strides[0] + token.to(gl.int64) * strides[1] + head * strides[2]
    load_elements(tile, t + (at[:, None] + column[None]))


@gluon.jit(do_not_specialize=[*LENGTHS, "first", "length"])
def nsa_selected_fwd_key_major_sm90(
    q, k, v, partial_out, partial_lse, pairs, offsets, owner, ordinals, tile_pairs, num_tiles, T,
    C, BLOCKS, first, length, scale_log2, q_b, q_t, q_h,
    K: gl.constexpr, R: gl.constexpr, n: gl.constexpr, G: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """One program: a work tile. Writes each row's partial out and lse over the tile's block."""
    D: gl.constexpr = k.block_shape[3]
    PAIRS: gl.constexpr = ROWS // GROUP
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LAYOUT: gl.constexpr = by_rows(GROUP)
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    S_ROW: gl.constexpr = gl.SliceLayout(1, S)
    dtype: gl.constexpr = k.dtype
    strides = (q_b, q_t, q_h)
    work = (pairs, offsets, owner, ordinals, None, tile_pairs, num_tiles, C, BLOCKS, 0)
    k_smem, v_smem, bar = buffers(k, 1), buffers(v, 1), barriers(1, 1)
    q_smem = gl.allocate_shared_memory(dtype, [2, ROWS.value, D], TILE)
    fence_async_shared()
    thread_barrier()
    _block, b, h, c, begin, end = work_tile(gl.program_id(0), work, K)
    if begin < end:
        mbarrier.expect(bar.index(0), KEYS * D * 4)
        load_box(k, [b, c * KEYS, h, 0], bar.index(0), k_smem.index(0))
        load_box(v, [b, c * KEYS, h, 0], bar.index(0), v_smem.index(0))
        e = load_pairs(pairs, begin, end, GROUP, ROW)
        copy_rows(q, strides, e, b * T, b, q_smem.index(0), R, n, G, GROUP)
        async_copy.commit_group()
        next_pairs = load_pairs(pairs, begin + PAIRS, end, GROUP, ROW)
        k_tile, v_tile = k_smem.index(0).reshape([KEYS, D]), v_smem.index(0).reshape([KEYS, D])
        row, s_row = gl.arange(0, ROWS, ROW), gl.arange(0, ROWS, S_ROW)
        column = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
        s_zero = gl.zeros([ROWS, KEYS], gl.float32, S)
        o_zero = gl.zeros([ROWS, D], gl.float32, ACC)
        origin = (b * (T - length) + first) * (R * n)
        mbarrier.wait(bar.index(0), 0)
        stage = 0
        for i in range(begin, end, PAIRS):
            if i + PAIRS < end:
                copy_rows(q, strides, next_pairs, b * T, b, q_smem.index(1 - stage), R, n, G, GROUP)
            async_copy.commit_group()
            later_pairs = load_pairs(pairs, i + 2 * PAIRS, end, GROUP, ROW)
            s_pairs = load_pairs(pairs, i, end, GROUP, S_ROW)
            async_copy.wait_group(1)
            fence_async_shared()
            buffer = q_smem.index(stage)
            s = warpgroup_mma(buffer, k_tile.permute((1, 0)), s_zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            m = gl.max(s, 1) * scale_log2
            p = gl.exp2(s * scale_log2 - m[:, None])
            l = gl.sum(p, 1)
            left = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, ACC, 2))
            o = warpgroup_mma(left, v_tile, o_zero, use_acc=False, is_async=True)
            at = (s_pairs - origin).to(gl.int64) * G + s_row % GROUP
            real = (i + s_row // GROUP < end) & (s_row % GROUP < G)
            gl.store(partial_lse + at, m + gl.log2(l), mask=real)
            inv_l = gl.convert_layout(1.0 / l, gl.SliceLayout(1, ACC))
            o = warpgroup_mma_wait(0, deps=[o])
            buffer.store((o * inv_l[:, None]).to(dtype))
            thread_barrier()
            valid = (i + row // GROUP < end) & (row % GROUP < G)
            at = ((e - origin).to(gl.int64) * G + row % GROUP) * D
            # evict first: read after they have left the cache
            gl.store(
                partial_out + (at[:, None] + column[None]), buffer.load(LAYOUT),
                mask=valid[:, None], eviction_policy="evict_first",
            )  # fmt: skip
            e, next_pairs, stage = next_pairs, later_pairs, 1 - stage


@gluon.jit
def copy_boxes(
    q, d_out, pairs, token_offset, b, i, end, bar, q_smem, do_smem, first, R: gl.constexpr,
    n: gl.constexpr, G: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Copies q and d_out of a tile from pair i on, to boxes from `first` on."""
    TOKENS: gl.constexpr = q.block_shape[1]
    PAIRS: gl.constexpr = ROWS // (TOKENS * q.block_shape[2])
    mbarrier.expect(bar, ROWS * D * 4)
    for t in gl.static_range(PAIRS):
        e = gl.load(pairs + gl.minimum(i + t, end - 1)).to(gl.int32)
        token, head = e // (n * R) * TOKENS - token_offset, e // n % R * G
        for half in gl.static_range(D // WIDTH):
            at = [b, token, head, half * WIDTH]
            box = first + half * PAIRS + t
            load_box(q, at, bar, q_smem.index(box))
            load_box(d_out, at, bar, do_smem.index(box))


@gluon.jit
def produce(
    q, d_out, k, v, lse, delta, strides, work, T, block, ring, HEADS: gl.constexpr,
    R: gl.constexpr, n: gl.constexpr, G: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr,
    STAGES: gl.constexpr, BY_ROW: gl.constexpr,
):  # fmt: skip
    """Producer for both consumers in turn: one warp, or with BY_ROW four warps. Padding rows repeat
    the last pair, so that they are finite."""
    k_smem, v_smem, kv_bar = block
    q_smem, do_smem, lse_smem, delta_smem, full = ring
    PAIR_ROWS: gl.constexpr = TOKENS * GROUP
    PAIRS: gl.constexpr = ROWS // PAIR_ROWS
    D: gl.constexpr = k.block_shape[3]
    BOXES: gl.constexpr = 1 if BY_ROW else PAIRS * (D // WIDTH)
    WARPS: gl.constexpr = 4 if BY_ROW else 1
    LANES: gl.constexpr = gl.BlockedLayout([1 if BY_ROW else 2], [32], [WARPS], [0])
    THREADS: gl.constexpr = 128 + 32 * WARPS
    pairs = work[0]
    row = gl.arange(0, ROWS, LANES)
    tile = gl.program_id(0) * CONSUMERS
    _, b0, h0, c0, begin0, end0 = work_tile(tile, work, HEADS)
    _, b1, h1, c1, begin1, end1 = work_tile(tile + 1, work, HEADS)
    for consumer in gl.static_range(CONSUMERS):
        b, h, c = (b0, h0, c0) if consumer == 0 else (b1, h1, c1)
        bar = kv_bar.index(consumer)
        mbarrier.expect(bar, KEYS * D * 4)
        load_box(k, [b, c * KEYS, h, 0], bar, k_smem.index(consumer))
        load_box(v, [b, c * KEYS, h, 0], bar, v_smem.index(consumer))
    steps = gl.cdiv(gl.maximum(end0 - begin0, end1 - begin1), PAIRS)
    for j in range(0, steps):
        for consumer in gl.static_range(CONSUMERS):
            b, begin, end = (b0, begin0, end0) if consumer == 0 else (b1, begin1, end1)
            i = begin + j * PAIRS
            if i < end:
                stage = consumer * STAGES + j % STAGES
                e = gl.load(pairs + gl.minimum(i + row // PAIR_ROWS, end - 1)).to(gl.int32)
                token = e // (n * R) * TOKENS + row // GROUP % TOKENS
                at = token.to(gl.int64) * (R * G) + head_of(e, row, R, n, G, GROUP)
                if j >= STAGES:
                    at_named_barrier("sync", stage, THREADS)
                bar, first = full.index(stage), stage * BOXES
                if BY_ROW:
                    own_pairs = load_pairs(pairs, i, end, GROUP, gl.SliceLayout(1, by_rows(GROUP)))
                    copy_rows(q, strides, own_pairs, b * T, b, q_smem.index(first), R, n, G, GROUP)
                    # d_out is contiguous
                    packed = (0, R * G * D, D)
                    copy_rows(d_out, packed, own_pairs, 0, b, do_smem.index(first), R, n, G, GROUP)
                else:
                    copy_boxes(
                        q, d_out, pairs, b * T, b, i, end, bar, q_smem, do_smem, first, R, n, G, D
                    )
                load_elements(lse_smem.index(stage), lse + at)
                load_elements(delta_smem.index(stage), delta + at)
                async_copy.mbarrier_arrive(bar, increment_count=False)
    # complete every barrier
    for consumer in gl.static_range(CONSUMERS):
        begin, end = (begin0, end0) if consumer == 0 else (begin1, end1)
        steps = gl.maximum(gl.cdiv(end - begin, PAIRS), 0)
        for j in range(gl.maximum(steps - STAGES, 0), steps):
            at_named_barrier("sync", consumer * STAGES + j % STAGES, THREADS)


@gluon.jit
def write_boxes(partial_dq, dq, smem, i, end, origin, number, GROUP: gl.constexpr):
    """Writes dq of a tile, from pair i on, to partial_dq at the pairs' indices in the chunk, whose
    first pair is `origin`, through boxes of tile `number` of shared memory."""
    PAIRS: gl.constexpr = ROWS // GROUP
    HALVES: gl.constexpr = dq.shape[1] // WIDTH
    buffer = tile_of(smem, number * HALVES, WIDTH)
    if HALVES == 1:
        buffer.store(dq)
    else:
        low, high = dq.reshape([ROWS, HALVES, WIDTH]).permute((0, 2, 1)).split()
        buffer.store(low)
        tile_of(smem, number * HALVES + 1, WIDTH).store(high)
    fence_async_shared()
    thread_barrier()
    for t in gl.static_range(PAIRS):
        if i + t < end:
            for half in gl.static_range(HALVES):
                box = smem.index((number * HALVES + half) * PAIRS + t)
                store_box(partial_dq, [i - origin + t, 0, half * WIDTH], box)


@gluon.jit
def write_rows(partial_dq, tile, buffer, i, end, origin, G: gl.constexpr, GROUP: gl.constexpr):
    """Like `write_boxes`, but threads write the rows, through `buffer`."""
    D: gl.constexpr = tile.shape[1]
    LAYOUT: gl.constexpr = by_rows(GROUP)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    valid = (i + row // GROUP < end) & (row % GROUP < G)
    at = ((i - origin + row // GROUP).to(gl.int64) * G + row % GROUP) * D
    buffer.store(tile)
    thread_barrier()
    # evict first: read after they have left the cache
    at = partial_dq + (at[:, None] + column[None])
    gl.store(at, buffer.load(LAYOUT), mask=valid[:, None], eviction_policy="evict_first")


@gluon.jit
def accumulate(
    partial_dq, begin, end, count, origin, scale, dk, dv, k_tile, v_tile, ring, ds_smem,
    CONSUMER: gl.constexpr, G: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr,
    STAGES: gl.constexpr, GATED: gl.constexpr, DQ: gl.constexpr, BY_ROW: gl.constexpr,
):  # fmt: skip
    """Accumulates dk and dv over the tiles of a work tile; with DQ also writes partial dq."""
    q_smem, do_smem, lse_smem, delta_smem, full = ring
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
    partial_dq, overlapping, work, S, scale, gradients, block, ring, ds_smem,
    CONSUMER: gl.constexpr, K: gl.constexpr, HEADS: gl.constexpr, G: gl.constexpr,
    GROUP: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
    DQ: gl.constexpr, OVERLAPPING: gl.constexpr, BY_ROW: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup of a work tile. Adds to dk and dv of the block, or writes partials if the
    block has several work tiles."""
    dk, dv, partial_dk, partial_dv = gradients
    k_smem, v_smem, kv_bar = block
    D: gl.constexpr = k_smem.shape[4]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    offsets, ordinals, partial_offsets, tile_pairs = work[1], work[3], work[4], work[5]
    tile = gl.program_id(0) * CONSUMERS + CONSUMER
    number, b, h, c, begin, end = work_tile(tile, work, HEADS)
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
            partial_dq, begin, end, dq_steps, origin, scale, dk_acc, dv_acc, k_tile, v_tile, ring,
            ds_smem, CONSUMER, G, GROUP, TOKENS, STAGES, GATED, True, BY_ROW,
        )  # fmt: skip
        tma.store_wait(0)
    if OVERLAPPING or not DQ:
        dk_acc, dv_acc = accumulate(
            partial_dq, begin, end, steps - dq_steps, origin, scale, dk_acc, dv_acc, k_tile, v_tile,
            ring, ds_smem, CONSUMER, G, GROUP, TOKENS, STAGES, GATED, False, BY_ROW,
        )  # fmt: skip
    dk_acc *= scale
    if end > begin:
        key = gl.arange(0, KEYS, gl.SliceLayout(1, ACC))
        feature = gl.arange(0, D, gl.SliceLayout(0, ACC))
        if gl.load(offsets + number + 1) - gl.load(offsets + number) <= tile_pairs:
            at = ((b * S + c * KEYS + key).to(gl.int64) * K + h) * D
            at = at[:, None] + feature[None]
            gl.store(dk + at, dk_acc + gl.load(dk + at))
            gl.store(dv + at, dv_acc + gl.load(dv + at))
        else:
            partial = gl.load(partial_offsets + number) + gl.load(ordinals + tile)
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
    work = (pairs, offsets, owner, ordinals, partial_offsets, tile_pairs)
    work += (num_tiles, C, BLOCKS, head)
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
    gradients, block = (dk, dv, partial_dk, partial_dv), (k_smem, v_smem, kv_bar)
    ring = (q_smem, do_smem, lse_smem, delta_smem, full)
    gl.warp_specialize(
        [
            (consume, (
                partial_dq, overlapping, work, S, scale, gradients, block, ring, ds_smem, 0, K,
                HEADS, G, GROUP, TOKENS, STAGES, GATED, DQ, OVERLAPPING, BY_ROW,
            )),
            (consume, (
                partial_dq, overlapping, work, S, scale, gradients, block, ring, ds_smem, 1, K,
                HEADS, G, GROUP, TOKENS, STAGES, GATED, DQ, OVERLAPPING, BY_ROW,
            )),
            (produce, (
                q, d_out, k, v, lse, delta, (q_b, q_t, q_h), work, T, block, ring, HEADS, R, n, G,
                GROUP, TOKENS, STAGES, BY_ROW,
            )),
        ],
        [4, 4 if BY_ROW else 1],
        [REGISTERS, 32 if BY_ROW else 24],
    )  # fmt: skip


def pair_rows(groups: int) -> int:
    """Rows of a tile per pair of `groups` heads."""
    return next_power_of_2(groups)


def partial_dq_rows(groups: int) -> int:
    """Rows of partial dq per pair."""
    rows = pair_rows(groups)
    return groups if rows < MIN_BOX_ROWS else rows


def is_supported(inputs: Inputs, kernel: str) -> bool:
    """Whether the Gluon kernel ("forward" or "backward") supports a call; never with a tile config
    of the caller or with `launch.using({"key_major_sm90": False})`."""
    q, allowed = inputs.q, launch.override.get("key_major_sm90", True)
    if not allowed or requested_sizes(f"key_major.{kernel}") or not sm90.available(q):
        return False
    if inputs.groups > ROWS.value or not 0 < inputs.selection.block_indices.numel() < 1 << 31:
        return False
    # threads copy 16 bytes each, which Triton infers from strides divisible by 16
    copied = kernel == "forward" or pair_rows(inputs.groups) < MIN_BOX_ROWS
    aligned = not copied or all(stride % 16 == 0 for stride in q.stride()[:3])
    return aligned and inputs.suits_gluon


def pair_tokens(inputs: Inputs) -> int:
    """Neighbouring tokens of one pair: they share their block indices and fit in a tile. 1 if they
    are not aligned to token 0, or have fewer than MIN_BOX_ROWS rows."""
    selection, rows = inputs.selection, pair_rows(inputs.groups)
    if selection.starts is not None:
        return 1
    tokens = math.gcd(selection.stride, selection.start, inputs.q.shape[1], ROWS.value // rows)
    return tokens if tokens * rows >= MIN_BOX_ROWS else 1


def forward(inputs: Inputs, block_csr: BlockCSR, partial_out: Tensor, partial_lse: Tensor) -> None:
    """Like `nsa_selected_fwd_key_major`: writes partial out and lse of a chunk of all heads."""
    q, k, v, selection, scale = inputs
    T, (S, K, D) = q.shape[1], k.shape[1:]
    R, n = selection.block_indices.shape[2:]
    num_tiles, blocks, box = len(block_csr.owner), cdiv(S, KEYS.value), [1, KEYS.value, 1, D]
    launcher(nsa_selected_fwd_key_major_sm90, (num_tiles,))(
        q=q, k=sm90.box(k, box), v=sm90.box(v, box), partial_out=partial_out,
        partial_lse=partial_lse, **block_csr.arguments(), num_tiles=num_tiles, T=T, C=blocks,
        BLOCKS=q.shape[0] * K * blocks, first=block_csr.first, length=block_csr.length,
        scale_log2=scale * LOG2_E, **launch.strides("q", q, "bth"), K=K, R=R, n=n, G=inputs.groups,
        GROUP=pair_rows(inputs.groups), num_warps=4,
    )  # fmt: skip


def backward(
    inputs: Inputs,
    bwd: BackwardInputs,
    dk: Tensor,
    dv: Tensor,
    partials: list[Tensor],
    partial_dq: Tensor | None,
    overlapping: Tensor | None,
    block_csr: BlockCSR,
    tokens: int,
) -> None:
    """Like `nsa_selected_bwd_key_major`: adds to dk and dv or writes partial dk and dv. Writes
    partial dq [pairs, rows, D] unless `overlapping` is not 0. Pairs of several `tokens` have no
    partial dq."""
    q, k, v, selection, scale = inputs
    T, (S, K, D) = q.shape[1], k.shape[1:]
    R, n = selection.block_indices.shape[2:]
    num_tiles, blocks = len(block_csr.owner), cdiv(S, KEYS.value)
    box, group = [1, KEYS.value, 1, D], pair_rows(inputs.groups)
    by_row = tokens * group < MIN_BOX_ROWS
    d_out, partial_box = bwd.d_out, partial_dq
    if not by_row:
        q_box, d_out = (sm90.box(t, [1, tokens, group, WIDTH.value]) for t in (q, d_out))
        if partial_dq is not None:
            partial_box = sm90.box(partial_dq, [1, group, WIDTH.value])
    launcher(nsa_selected_bwd_key_major_sm90, (cdiv(num_tiles, 2),))(
        q=q if by_row else q_box, k=sm90.box(k, box), v=sm90.box(v, box), d_out=d_out,
        **launch.strides("q", q, "bth"), lse=bwd.lse, delta=bwd.delta, partial_dq=partial_box,
        overlapping=overlapping, dk=dk, dv=dv, partial_dk=partials[0], partial_dv=partials[1],
        **block_csr.arguments(), partial_offsets=block_csr.partial_offsets, num_tiles=num_tiles,
        head=block_csr.head, T=T, S=S, C=blocks, BLOCKS=q.shape[0] * block_csr.heads * blocks,
        scale=scale, K=K, HEADS=block_csr.heads, R=R, n=n, G=inputs.groups, TOKENS=tokens,
        GROUP=group, STAGES=STAGES, GATED=bwd.gated, DQ=partial_dq is not None,
        OVERLAPPING=overlapping is not None, BY_ROW=by_row, REGISTERS=REGISTERS, num_warps=4,
    )  # fmt: skip
