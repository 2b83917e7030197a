"""The selected branch, key-major like `key_major.py`, in Gluon for Hopper: the forward, and dk, dv
and partial dq.

Forward: a program of four warps has a work tile. They copy the next tile of queries while they
multiply one, whose buffer then holds its output.

Backward: a tile has the rows of some pairs. A pair has TOKENS neighbouring tokens, which share
block indices, of GROUP rows each, of which G are heads. The tensor memory accelerator copies pairs
of eight or more rows, a box per half row. Threads of four warps copy smaller pairs, of one token.

A program has two work tiles, one per consumer warpgroup, which holds dk and dv of its
block in registers. One producer copies the rows of both tiles, into a ring of stages per consumer.
Products [keys, rows] are the left operands of the next products, in registers. dq needs ds
transposed, in shared memory; the same buffer then holds dq until it is written.
"""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..common import gluon_sm90 as hopper
from ..common import launch
from ..common import primitives as steps
from ..common.precompile import launcher
from .inputs import Gradients, Inputs
from .key_major import CSR, Chunk

CONSUMERS = gl.constexpr(2)
KEYS = gl.constexpr(64)  # of a block
ROWS = gl.constexpr(64)  # of a tile of pairs
WIDTH = gl.constexpr(64)  # of a box
# layout of product operands
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
# rows of a pair from which the tensor memory accelerator copies them
MIN_BOX_ROWS = 8
# stages of each consumer's ring, and registers of a consumer thread
STAGES, REGISTERS = gl.constexpr(2), gl.constexpr(240)
# one compiled kernel for all lengths
LENGTHS = ["T", "S", "C", "BLOCKS", "tile_pairs", "num_tiles", "head", "first", "length"]

# the work tiles of a launch (`key_major.Pairs`), and their sizes
Work = namedtuple("Work", "csr tile_pairs num_tiles C BLOCKS head T S")
# of both consumers: keys and values of their blocks, and the barrier of these
Block = namedtuple("Block", "k v bar")
# stages of both consumers: q, d_out, lse and delta of tiles, and their barriers
Ring = namedtuple("Ring", "q d_out lse delta full")


@gluon.jit
def work_tile(tile, work, F: gl.constexpr):
    """Block of a work tile, its batch row, KV head, block number, first pair and end. Past the last
    work tile first pair and end are equal."""
    csr, C = work.csr, work.C
    valid = tile < work.num_tiles
    block = gl.load(csr.owner + tile, mask=valid, other=0x7FFFFFFF)
    valid = block < work.BLOCKS
    block = gl.where(valid, block, 0)
    ordinal = gl.load(csr.ordinals + tile, mask=valid, other=0).to(gl.int64)
    begin = gl.load(csr.offsets + block) + ordinal * work.tile_pairs
    end = gl.minimum(begin + work.tile_pairs, gl.load(csr.offsets + block + 1))
    end = gl.where(valid, end, begin)
    b, h = block // C // F.HEADS, work.head + block // C % F.HEADS
    return block, b, h, block % C, begin.to(gl.int32), end.to(gl.int32)


@gluon.constexpr_function
def tile_shape(shape, width):
    """The shape of boxes or rows, viewed as consecutive tiles [ROWS, width]."""
    return [math.prod(map(int, shape)) // (ROWS.value * width), ROWS.value, width]


@gluon.jit
def shared_tile(smem, number, D: gl.constexpr):
    """Tile `number` [ROWS, D] of shared memory."""
    return hopper.reinterpret(smem, smem.dtype, tile_shape(smem.shape, D), TILE).index(number)


@gluon.jit
def pair_heads(e, row, F: gl.constexpr):
    """Head of each row of pairs e; the pair's last head for padding rows."""
    return e // F.n % F.R * F.G + gl.minimum(row % F.GROUP, F.G - 1)


@gluon.constexpr_function
def copy_layout(GROUP):
    """Layout in which four warps copy a tile: a thread has rows of one pair."""
    return gl.BlockedLayout([min(int(GROUP), 4), 8], [4, 8], [4, 1], [1, 0])


@gluon.jit
def load_pairs(pairs, i, end, F: gl.constexpr, LAYOUT: gl.constexpr):
    """Pair of each row of a tile, from pair i on; the last pair for padding rows."""
    row = gl.arange(0, ROWS, LAYOUT)
    return gl.load(pairs + gl.minimum(i + row // F.GROUP, end - 1)).to(gl.int32)


@gluon.jit
def copy_rows(t, strides, e, token_offset, b, tile, F: gl.constexpr):
    """Copies the rows of pairs e of tensor t to `tile`, by four warps."""
    LAYOUT: gl.constexpr = copy_layout(F.GROUP)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, tile.shape[1], gl.SliceLayout(0, LAYOUT))
    token, head = e // (F.n * F.R) - token_offset, pair_heads(e, row, F).to(gl.int64)
    offset = b.to(gl.int64) * strides[0] + token.to(gl.int64) * strides[1] + head * strides[2]
    hopper.load_elements(tile, t + (offset[:, None] + column[None]))


@gluon.jit
def copy_boxes(
    q, d_out, pairs, token_offset, b, i, end, bar, ring, first, D: gl.constexpr, F: gl.constexpr
):  # fmt: skip
    """Copies q and d_out of a tile from pair i on, to boxes from `first` on."""
    PAIRS: gl.constexpr = F.PAIRS
    mbarrier.expect(bar, ROWS * D * 4)
    for t in gl.static_range(PAIRS):
        e = gl.load(pairs + gl.minimum(i + t, end - 1)).to(gl.int32)
        token, head = e // (F.n * F.R) * F.TOKENS - token_offset, e // F.n % F.R * F.G
        for half in gl.static_range(D // WIDTH):
            offset = [b, token, head, half * WIDTH]
            box = first + half * PAIRS + t
            hopper.load_box(q, offset, bar, ring.q.index(box))
            hopper.load_box(d_out, offset, bar, ring.d_out.index(box))


@gluon.jit
def produce(q, d_out, k, v, lse, delta, strides, work, block, ring, F: gl.constexpr):
    """Producer for both consumers in turn: one warp, or with BY_ROW four warps. Padding rows repeat
    the last pair, so that they are finite."""
    D: gl.constexpr = k.block_shape[3]
    BOXES: gl.constexpr = 1 if F.BY_ROW else F.PAIRS * (D // WIDTH)
    WARPS: gl.constexpr = 4 if F.BY_ROW else 1
    LANES: gl.constexpr = gl.BlockedLayout([1 if F.BY_ROW else 2], [32], [WARPS], [0])
    THREADS: gl.constexpr = 128 + 32 * WARPS
    pairs, T = work.csr.pairs, work.T
    row = gl.arange(0, ROWS, LANES)
    tile = gl.program_id(0) * CONSUMERS
    _, b0, h0, c0, begin0, end0 = work_tile(tile, work, F)
    _, b1, h1, c1, begin1, end1 = work_tile(tile + 1, work, F)
    for consumer in gl.static_range(CONSUMERS):
        b, h, c = (b0, h0, c0) if consumer == 0 else (b1, h1, c1)
        bar = block.bar.index(consumer)
        mbarrier.expect(bar, KEYS * D * 4)
        hopper.load_box(k, [b, c * KEYS, h, 0], bar, block.k.index(consumer))
        hopper.load_box(v, [b, c * KEYS, h, 0], bar, block.v.index(consumer))
    steps = gl.cdiv(gl.maximum(end0 - begin0, end1 - begin1), F.PAIRS)
    for j in range(0, steps):
        for consumer in gl.static_range(CONSUMERS):
            b, begin, end = (b0, begin0, end0) if consumer == 0 else (b1, begin1, end1)
            i = begin + j * F.PAIRS
            if i < end:
                stage = consumer * STAGES + j % STAGES
                e = gl.load(pairs + gl.minimum(i + row // F.PAIR_ROWS, end - 1)).to(gl.int32)
                token = e // (F.n * F.R) * F.TOKENS + row // F.GROUP % F.TOKENS
                offset = token.to(gl.int64) * (F.R * F.G) + pair_heads(e, row, F)
                if j >= STAGES:
                    hopper.named_barrier("sync", stage, THREADS)
                bar, first = ring.full.index(stage), stage * BOXES
                if F.BY_ROW:
                    ROW: gl.constexpr = gl.SliceLayout(1, copy_layout(F.GROUP))
                    row_pairs = load_pairs(pairs, i, end, F, ROW)
                    copy_rows(q, strides, row_pairs, b * T, b, ring.q.index(first), F)
                    # d_out is contiguous
                    packed = (0, F.R * F.G * D, D)
                    copy_rows(d_out, packed, row_pairs, 0, b, ring.d_out.index(first), F)
                else:
                    copy_boxes(q, d_out, pairs, b * T, b, i, end, bar, ring, first, D, F)
                hopper.load_elements(ring.lse.index(stage), lse + offset)
                hopper.load_elements(ring.delta.index(stage), delta + offset)
                async_copy.mbarrier_arrive(bar, increment_count=False)
    # complete every barrier
    for consumer in gl.static_range(CONSUMERS):
        begin, end = (begin0, end0) if consumer == 0 else (begin1, end1)
        steps = gl.maximum(gl.cdiv(end - begin, F.PAIRS), 0)
        for j in range(gl.maximum(steps - STAGES, 0), steps):
            hopper.named_barrier("sync", consumer * STAGES + j % STAGES, THREADS)


@gluon.jit
def write_rows(partial_dq, tile, buffer, i, end, origin, F: gl.constexpr):
    """Writes dq of a tile, from pair i on, to partial_dq at the pairs' indices in the chunk, whose
    first pair is `origin`, in whole rows through shared memory, `buffer`."""
    D: gl.constexpr = tile.shape[1]
    LAYOUT: gl.constexpr = copy_layout(F.GROUP)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    valid = (i + row // F.GROUP < end) & (row % F.GROUP < F.G)
    offset = ((i - origin + row // F.GROUP).to(gl.int64) * F.G + row % F.GROUP) * D
    buffer.store(tile)
    hopper.thread_barrier()
    # evict first: read after they have left the cache
    offset = partial_dq + (offset[:, None] + column[None])
    gl.store(offset, buffer.load(LAYOUT), mask=valid[:, None], eviction_policy="evict_first")


@gluon.jit
def consume(
    partial_dq, work, scale, gradients, block, ring, ds_smem, CONSUMER: gl.constexpr,
    F: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup of a work tile: dk and dv over its tiles, added to those of the block, or
    written as partials if the block has several work tiles; with DQ also partial dq."""
    D: gl.constexpr = block.k.shape[4]
    THREADS: gl.constexpr = 256 if F.BY_ROW else 160  # of a consumer and the producer
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, S)
    dtype: gl.constexpr = ring.q.dtype
    csr = work.csr
    tile = gl.program_id(0) * CONSUMERS + CONSUMER
    number, b, h, c, begin, end = work_tile(tile, work, F)
    k_tile = block.k.index(CONSUMER).reshape([KEYS, D])
    v_tile = block.v.index(CONSUMER).reshape([KEYS, D])
    dk = gl.zeros([KEYS, D], gl.float32, ACC)
    dv = gl.zeros([KEYS, D], gl.float32, ACC)
    origin = gl.load(csr.offsets).to(gl.int32)
    row = gl.arange(0, ROWS, ROW)
    zero = gl.zeros([KEYS, ROWS], gl.float32, S)
    mbarrier.wait(block.bar.index(CONSUMER), 0)
    for j in range(0, gl.maximum(gl.cdiv(end - begin, F.PAIRS), 0)):
        i = begin + j * F.PAIRS
        stage = CONSUMER * STAGES + j % STAGES
        mbarrier.wait(ring.full.index(stage), (j // STAGES) & 1)
        if F.BY_ROW:
            fence_async_shared()  # threads wrote it
        q_tile, do_tile = shared_tile(ring.q, stage, D), shared_tile(ring.d_out, stage, D)
        s = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(v_tile, do_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        lse_row = ring.lse.index(stage).load(ROW)
        delta_row = ring.delta.index(stage).load(ROW)
        real = (i + row // F.PAIR_ROWS < end) & (row % F.GROUP < F.G)
        lse_row = gl.where(real, lse_row, float("inf"))
        s, dp = warpgroup_mma_wait(0, deps=[s, dp])
        p, ds = steps.softmax_grad(
            s, scale * 1.4426950408889634, dp, lse_row[None], delta_row[None], F.GATED
        )
        dv = warpgroup_mma(gl.convert_layout(p.to(dtype), LEFT), do_tile, dv, is_async=True)
        left = gl.convert_layout(ds.to(dtype), LEFT)
        dk = warpgroup_mma(left, q_tile, dk, is_async=True)
        if F.DQ:
            ds_tile = shared_tile(ds_smem, CONSUMER * (D // ROWS), ROWS)
            hopper.thread_barrier()
            ds_tile.store(left)
            fence_async_shared()
            hopper.thread_barrier()
        dv, dk = warpgroup_mma_wait(0, deps=[dv, dk])
        hopper.named_barrier("arrive", stage, THREADS)
        if F.DQ:
            dq = gl.zeros([ROWS, D], gl.float32, ACC)
            dq = warpgroup_mma(ds_tile.permute((1, 0)), k_tile, dq, use_acc=False, is_async=True)
            dq = (warpgroup_mma_wait(0, deps=[dq]) * scale).to(dtype)
            hopper.thread_barrier()  # all have read ds
            write_rows(partial_dq, dq, shared_tile(ds_smem, CONSUMER, D), i, end, origin, F)
    dk *= scale
    if end > begin:
        key = gl.arange(0, KEYS, gl.SliceLayout(1, ACC))
        feature = gl.arange(0, D, gl.SliceLayout(0, ACC))
        if gl.load(csr.offsets + number + 1) - gl.load(csr.offsets + number) <= work.tile_pairs:
            offset = ((b * work.S + c * KEYS + key).to(gl.int64) * F.K + h) * D
            offset = offset[:, None] + feature[None]
            gl.store(gradients.dk + offset, dk + gl.load(gradients.dk + offset))
            gl.store(gradients.dv + offset, dv + gl.load(gradients.dv + offset))
        else:
            partial = gl.load(csr.partial_offsets + number) + gl.load(csr.ordinals + tile)
            offset = (partial * KEYS + key).to(gl.int64) * D
            offset = offset[:, None] + feature[None]
            gl.store(gradients.partial_dk + offset, dk)
            gl.store(gradients.partial_dv + offset, dv)


@gluon.jit(do_not_specialize=LENGTHS)
def nsa_selected_fwd_key_major_sm90(
    q, k, v, strides, partial_out, partial_lse, csr, tile_pairs, num_tiles, T, S, C, BLOCKS, first,
    length, scale_log2, F: gl.constexpr,
):  # fmt: skip
    """One program: a work tile. Writes each row's partial out and lse over the block."""
    D: gl.constexpr = k.block_shape[3]
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    COPY: gl.constexpr = copy_layout(F.GROUP)
    ROW: gl.constexpr = gl.SliceLayout(1, COPY)
    LOGITS_ROW: gl.constexpr = gl.SliceLayout(1, LOGITS)
    k_smem, v_smem, bar = hopper.buffers(k, 1), hopper.buffers(v, 1), hopper.barriers(1, 1)
    q_smem = gl.allocate_shared_memory(k.dtype, [2, ROWS.value, D], TILE)
    fence_async_shared()
    hopper.thread_barrier()
    work = Work(csr, tile_pairs, num_tiles, C, BLOCKS, 0, T, S)
    _block, b, h, c, begin, end = work_tile(gl.program_id(0), work, F)
    if begin < end:
        mbarrier.expect(bar.index(0), KEYS * D * 4)
        hopper.load_box(k, [b, c * KEYS, h, 0], bar.index(0), k_smem.index(0))
        hopper.load_box(v, [b, c * KEYS, h, 0], bar.index(0), v_smem.index(0))
        e = load_pairs(csr.pairs, begin, end, F, ROW)
        copy_rows(q, strides, e, b * T, b, q_smem.index(0), F)
        async_copy.commit_group()
        next_pairs = load_pairs(csr.pairs, begin + F.PAIRS, end, F, ROW)
        k_tile, v_tile = k_smem.index(0).reshape([KEYS, D]), v_smem.index(0).reshape([KEYS, D])
        row, logits_row = gl.arange(0, ROWS, ROW), gl.arange(0, ROWS, LOGITS_ROW)
        column = gl.arange(0, D, gl.SliceLayout(0, COPY))
        zero = gl.zeros([ROWS, KEYS], gl.float32, LOGITS)
        out_zero = gl.zeros([ROWS, D], gl.float32, ACC)
        origin, stage = (b * (T - length) + first) * (F.R * F.n), 0
        mbarrier.wait(bar.index(0), 0)
        for i in range(begin, end, F.PAIRS):
            if i + F.PAIRS < end:
                copy_rows(q, strides, next_pairs, b * T, b, q_smem.index(1 - stage), F)
            async_copy.commit_group()
            later_pairs = load_pairs(csr.pairs, i + 2 * F.PAIRS, end, F, ROW)
            logits_pairs = load_pairs(csr.pairs, i, end, F, LOGITS_ROW)
            async_copy.wait_group(1)
            fence_async_shared()
            buffer = q_smem.index(stage)
            s = warpgroup_mma(buffer, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            m = gl.max(s, 1) * scale_log2
            p = gl.exp2(s * scale_log2 - m[:, None])
            l = gl.sum(p, 1)
            left = gl.convert_layout(p.to(k.dtype), gl.DotOperandLayout(0, ACC, 2))
            o = warpgroup_mma(left, v_tile, out_zero, use_acc=False, is_async=True)
            offset = (logits_pairs - origin).to(gl.int64) * F.G + logits_row % F.GROUP
            real = (i + logits_row // F.GROUP < end) & (logits_row % F.GROUP < F.G)
            gl.store(partial_lse + offset, m + gl.log2(l), mask=real)
            scale_row = gl.convert_layout(1.0 / l, gl.SliceLayout(1, ACC))
            o = warpgroup_mma_wait(0, deps=[o])
            buffer.store((o * scale_row[:, None]).to(k.dtype))
            hopper.thread_barrier()
            valid = (i + row // F.GROUP < end) & (row % F.GROUP < F.G)
            offset = ((e - origin).to(gl.int64) * F.G + row % F.GROUP) * D
            # evict first: read after they have left the cache
            gl.store(
                partial_out + (offset[:, None] + column[None]), buffer.load(COPY),
                mask=valid[:, None], eviction_policy="evict_first",
            )  # fmt: skip
            e, next_pairs, stage = next_pairs, later_pairs, 1 - stage


@gluon.jit(do_not_specialize=LENGTHS)
def nsa_selected_bwd_key_major_sm90(
    q, k, v, d_out, strides, lse, delta, partial_dq, gradients, csr, tile_pairs, num_tiles, head,
    T, S, C, BLOCKS, scale, F: gl.constexpr,
):  # fmt: skip
    """One program: two work tiles. Reads their blocks and the queries of their pairs; adds to dk
    and dv or writes their partials, and with DQ partial dq. With BY_ROW q and d_out are pointers,
    else descriptors of boxes of a pair."""
    work = Work(csr, tile_pairs, num_tiles, C, BLOCKS, head, T, S)
    D: gl.constexpr = k.block_shape[3]
    BOXES: gl.constexpr = F.PAIRS * (D // WIDTH)
    BUFFERS: gl.constexpr = CONSUMERS * STAGES
    k_smem, v_smem = hopper.buffers(k, CONSUMERS), hopper.buffers(v, CONSUMERS)
    if F.BY_ROW:
        q_smem = gl.allocate_shared_memory(k.dtype, [BUFFERS, ROWS.value, D], TILE)
        do_smem = gl.allocate_shared_memory(k.dtype, [BUFFERS, ROWS.value, D], TILE)
    else:
        q_smem, do_smem = hopper.buffers(q, BUFFERS * BOXES), hopper.buffers(q, BUFFERS * BOXES)
    ds_smem = q_smem
    if F.DQ:
        ds_smem = gl.allocate_shared_memory(k.dtype, [CONSUMERS.value, ROWS.value, D], TILE)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_smem = gl.allocate_shared_memory(gl.float32, [BUFFERS, ROWS], FLAT)
    delta_smem = gl.allocate_shared_memory(gl.float32, [BUFFERS, ROWS], FLAT)
    # the threads that copy into a stage arrive at its barrier too
    kv_bar, full = hopper.barriers(CONSUMERS, 1), hopper.barriers(BUFFERS, 128 if F.BY_ROW else 33)
    fence_async_shared()
    hopper.thread_barrier()
    block = Block(k_smem, v_smem, kv_bar)
    ring = Ring(q_smem, do_smem, lse_smem, delta_smem, full)
    gl.warp_specialize(
        [
            (consume, (partial_dq, work, scale, gradients, block, ring, ds_smem, 0, F)),
            (consume, (partial_dq, work, scale, gradients, block, ring, ds_smem, 1, F)),
            (produce, (q, d_out, k, v, lse, delta, strides, work, block, ring, F)),
        ],
        [4, 4 if F.BY_ROW else 1],
        [REGISTERS, 32 if F.BY_ROW else 24],
    )  # fmt: skip


def is_supported(inputs: Inputs, kernel: str) -> bool:
    """Whether "forward" or "backward" supports a call on a GPU that runs Gluon kernels."""
    G, pairs = inputs.facts.F.G, inputs.selection.block_indices.numel()
    # threads copy 16 bytes each, which Triton infers from strides divisible by 16
    copied = kernel == "forward" or launch.next_power_of_2(G) < MIN_BOX_ROWS
    aligned = not copied or all(stride % 16 == 0 for stride in inputs.q.stride()[:3])
    fits = ROWS.value >= G and 0 < pairs < 1 << 31
    return aligned and fits and inputs.suits_gluon("key_major_sm90", f"key_major.{kernel}")


def pair_tokens(inputs: Inputs) -> int:
    """Neighbouring tokens of one pair: they share their block indices and fit in a tile. 1 if they
    are not aligned to token 0, or have fewer than MIN_BOX_ROWS rows."""
    facts, rows = inputs.facts, launch.next_power_of_2(inputs.facts.F.G)
    if facts.F.RAGGED:
        return 1
    tokens = math.gcd(facts.F.stride, inputs.selection.start, facts.T, ROWS.value // rows)
    return tokens if tokens * rows >= MIN_BOX_ROWS else 1


def boxes(inputs: Inputs) -> dict[str, Any]:
    """Descriptors of keys and values, a block a box."""
    box = [1, KEYS.value, 1, inputs.facts.F.D]
    return dict(k=launch.gluon_box(inputs.k, box), v=launch.gluon_box(inputs.v, box))


def forward(inputs: Inputs, partials: dict[str, Any], csr: CSR, chunk: Chunk) -> None:
    """Like `nsa_selected_fwd_key_major`: writes partial out and lse of a chunk of all heads."""
    facts, group = inputs.facts, launch.next_power_of_2(inputs.facts.F.G)
    F = facts.F._replace(HEADS=facts.F.K, GROUP=group, PAIRS=ROWS.value // group)
    launcher(nsa_selected_fwd_key_major_sm90, (csr.max_tiles,))(
        q=inputs.q, **boxes(inputs), strides=inputs.q.stride()[:3], **partials, csr=chunk.csr,
        tile_pairs=csr.tile_pairs, num_tiles=csr.max_tiles, T=facts.T, S=facts.S, C=facts.C,
        BLOCKS=csr.blocks, scale_log2=inputs.scale * launch.LOG2_E, F=F, num_warps=4,
    )  # fmt: skip


def backward(
    inputs: Inputs, bwd: launch.BackwardInputs, gradients: Gradients, partial_dq: Tensor | None,
    csr: CSR, chunk: Chunk,
) -> None:  # fmt: skip
    """Like `nsa_selected_bwd_key_major`: adds to dk and dv or writes partial dk and dv. Writes
    partial dq [pairs G, D]. Pairs of several `tokens` have no partial dq."""
    facts, F, tokens = inputs.facts, inputs.facts.F, csr.pair_tokens
    group = launch.next_power_of_2(F.G)
    # a tile has PAIRS pairs of PAIR_ROWS rows: TOKENS tokens of GROUP rows
    F = F._replace(
        HEADS=csr.heads, GROUP=group, TOKENS=tokens, GATED=bwd.gated,
        DQ=partial_dq is not None, BY_ROW=tokens * group < MIN_BOX_ROWS,
        PAIR_ROWS=tokens * group, PAIRS=ROWS.value // (tokens * group),
    )  # fmt: skip
    q_box = [1, tokens, group, WIDTH.value]
    q, d_out = (t if F.BY_ROW else launch.gluon_box(t, q_box) for t in (inputs.q, bwd.d_out))
    launcher(nsa_selected_bwd_key_major_sm90, (launch.cdiv(csr.max_tiles, 2),))(
        q=q, **boxes(inputs), d_out=d_out, strides=inputs.q.stride()[:3], lse=bwd.lse,
        delta=bwd.delta, partial_dq=partial_dq, gradients=gradients, csr=chunk.csr,
        tile_pairs=csr.tile_pairs, num_tiles=csr.max_tiles, head=chunk.head, T=facts.T, S=facts.S,
        C=facts.C, BLOCKS=csr.blocks, scale=inputs.scale,
        F=F, num_warps=4,
    )  # fmt: skip
