"""Attention over KV ranges and its backward as in `flash.py`, for Hopper GPUs. In Gluon.

Forward and dq: a persistent program processes work tiles of CONSUMERS x ROWS query rows (tokens x
heads of a group). Two consumer warpgroups own ROWS rows each, with accumulators in registers. A
producer warp loads blocks of keys and values into a ring buffer that both consumers read, and
prefetches the next work tile's queries. Consumers release a ring slot at its named barrier. While
one consumer waits or forms probabilities, the tensor cores work for the other.

With local blocks inside a window, the local blocks come first, then the rest of the window, then
the initial blocks; both softmaxes start from the local blocks' partial sums. With local blocks
alone, the initial blocks are the prefix.

dk and dv: a program owns a block of CONSUMERS x KEYS keys and one split of the query tiles that see
it; the ring buffer holds query tiles, first those that see some of the keys as local blocks. A
product [keys, queries] is the left operand of the next one, in registers.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

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

from ..common import gluon_sm90 as hopper
from ..common import launch
from ..common import primitives as steps
from ..common.launch import Plan, cdiv
from ..common.precompile import launcher
from ..common.primitives import CAUSAL_WINDOW, COMPRESSED, LOCAL_BLOCKS

CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # of a consumer
KEYS = gl.constexpr(64)  # of a block
# layouts of logits [ROWS, KEYS] and of their rows
LOGITS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS.value, 16]))
ROW = gl.constexpr(gl.SliceLayout(1, LOGITS.value))
# left operands of logits, from registers
QUERY = gl.constexpr(gl.DotOperandLayout(0, LOGITS.value, 2))
THREADS = gl.constexpr(32 * (4 * CONSUMERS + 1))

# named barriers after those of the stages: consumers release the queries; the dq buffer
QUERIES = gl.constexpr(7)
ADDED = gl.constexpr(6)

# the sizes, KV range and scale of a launch; queries are in `tiles` work tiles per sequence and head
Problem = namedtuple(
    "Problem", "start T N P floor reach stride inner_floor inner_reach inner_stride scale tiles B"
)
# TMA descriptors that the producer reads; the prefix has keys per sequence with `each`
Boxes = namedtuple("Boxes", "q d_out k v pk pv each out")
# shared memory: a work tile of q, d_out and out (or dq) with barriers of their loads, and the ring
# buffer of keys and values with a barrier per slot
Memory = namedtuple("Memory", "q d_out out k v q_bar out_bar full")
# for dk and dv: keys and values, and a ring buffer of q, d_out and of lse and delta
RingMemory = namedtuple("RingMemory", "k v q d_out rows kv_bar full")
# KV blocks that some row of a tile sees: first local block and count, first other block and count,
# and the count of initial or prefix blocks
Blocks = namedtuple("Blocks", "local num_local begin num_outer num_initial")
# a consumer's rows of a work tile and its KV blocks: first token, its position and the last one's;
# position of each row, its offset in [B T H], and whether it exists; first key and end of each
# row's KV range, and of the keys that all rows see
TileRows = namedtuple(
    "TileRows", "tile b h blocks token first last position row real lo hi all_lo all_hi"
)
# lse [B T H], of the local blocks as well
ForwardRows = namedtuple("ForwardRows", "lse inner_lse")
# compile-time settings of the three kernels; ROWS rows have TOKENS tokens
Settings = namedtuple(
    "Settings", "K G D TOKENS STAGES KIND STRIDE INNER INNER_STRIDE PREFIX GATED ADD REGISTERS"
)

# one compiled kernel for all lengths
LENGTHS = ["start", "T", "N", "P", "tiles", "blocks", "B", "each"]


@gluon.constexpr_function
def accumulator(width):
    """Layout of accumulators [ROWS, width]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@gluon.constexpr_function
def left_operand(layout):
    """Layout in registers of a left operand, for a product that adds to accumulators."""
    return gl.DotOperandLayout(0, layout, 2)


@gluon.jit
def problem(start, T, N, P, kv_range, scale, tiles, B, F: gl.constexpr):
    return Problem(
        start, T, N, P, kv_range.floor, kv_range.reach, F.STRIDE, kv_range.inner_floor,
        kv_range.inner_reach, F.INNER_STRIDE, scale, tiles, B,
    )  # fmt: skip


@gluon.jit
def work_tile(i):
    """This program's i-th work tile. Tiles get shorter: every second round is in reverse order."""
    programs, number = gl.num_programs(0), gl.program_id(0)
    return i * programs + gl.where(i % 2 == 0, number, programs - 1 - number)


@gluon.jit
def num_work_tiles(count):
    """How many of `count` work tiles this program processes, for count >= programs."""
    last = gl.cdiv(count, gl.num_programs(0)) - 1
    return gl.where(work_tile(last) < count, last + 1, last)


@gluon.jit
def tile_position(i, call, K: gl.constexpr):
    """Query tile, sequence and KV head of the i-th work tile: the last, longest tiles first."""
    iteration = work_tile(i)
    return call.tiles - 1 - iteration // K // call.B, iteration // K % call.B, iteration % K


@gluon.jit
def blocks_of(tile, kv_range, F: gl.constexpr):
    start, T, N, floor = kv_range.start, kv_range.T, kv_range.N, kv_range.floor
    reach, stride = kv_range.reach, kv_range.stride
    token = tile * (CONSUMERS * F.TOKENS)
    first, last = start + token, start + gl.minimum(token + CONSUMERS * F.TOKENS, T) - 1
    local, num_local, num_initial = first * 0, first * 0, first * 0
    begin, _ = steps.interval(first, N, floor, reach, stride, F.KIND)
    _, end = steps.interval(last, N, floor, reach, stride, F.KIND)
    if F.INNER:
        local_key = steps.local_start(first, kv_range)
        local = local_key // KEYS
        num_local = gl.where(local_key < end, gl.cdiv(end, KEYS) - local, 0)
        end = gl.minimum(end, gl.maximum(steps.local_start(last, kv_range), begin))
        num_initial = gl.cdiv(gl.minimum(last + 1, kv_range.inner_floor), KEYS)
    if F.PREFIX:
        num_initial = gl.cdiv(kv_range.P, KEYS)
    begin = begin // KEYS
    num_outer = gl.maximum(gl.cdiv(end, KEYS) - begin, 0)
    return Blocks(local, num_local, begin, num_outer, num_initial)


@gluon.jit
def consumer_rows(iteration, i, call, CONSUMER: gl.constexpr, F: gl.constexpr):
    """A consumer's rows i of a work tile."""
    N, floor, reach, stride = call.N, call.floor, call.reach, call.stride
    tile, b, h = tile_position(iteration, call, F.K)
    blocks = blocks_of(tile, call, F)
    token = (tile * CONSUMERS + CONSUMER) * F.TOKENS
    position = call.start + token + i // F.G
    row = (b * call.T + token + i // F.G).to(gl.int64) * (F.K * F.G) + h * F.G + i % F.G
    real = token + i // F.G < call.T
    first, last = call.start + token, call.start + token + F.TOKENS - 1
    lo, hi = steps.interval(position, N, floor, reach, stride, F.KIND)
    all_lo, _ = steps.interval(last, N, floor, reach, stride, F.KIND)
    _, all_hi = steps.interval(first, N, floor, reach, stride, F.KIND)
    return TileRows(
        tile, b, h, blocks, token, first, last, position, row, real, lo, hi, all_lo, all_hi
    )


@gluon.jit
def read_rows(t, smem, bar, b, token, head):
    """Load a tile's rows of t, one TMA box per consumer."""
    for consumer in gl.static_range(CONSUMERS):
        corner = [b, token + consumer * t.block_shape[1], head, 0]
        hopper.load_box(t, corner, bar, smem.index(consumer))


@gluon.jit
def produce(boxes, call, memory, F: gl.constexpr, BACKWARD: gl.constexpr):
    """The producer warp: loads a tile's queries, its KV blocks and a prefix. BACKWARD: also
    d_out and, with ADD, dq after the blocks."""
    BYTES: gl.constexpr = CONSUMERS * ROWS * F.D * 2
    q_bar = memory.q_bar.index(0)
    turn = 0
    for iteration in range(0, num_work_tiles(call.tiles * call.B * F.K)):
        tile, b, h = tile_position(iteration, call, F.K)
        local, num_local, begin, num_outer, num_initial = blocks_of(tile, call, F)
        token = tile * (CONSUMERS * F.TOKENS)
        if iteration > 0:
            hopper.named_barrier("sync", QUERIES, THREADS)
        mbarrier.expect(q_bar, 2 * BYTES if BACKWARD else BYTES)
        read_rows(boxes.q, memory.q, q_bar, b, token, h * F.G)
        if BACKWARD:
            read_rows(boxes.d_out, memory.d_out, q_bar, b, token, h * F.G)
        for j in range(0, num_local + num_outer + num_initial):
            block = local + j
            block = gl.where(j >= num_local, begin + j - num_local, block)
            block = gl.where(j >= num_local + num_outer, j - num_local - num_outer, block)
            slot = turn % F.STAGES
            if turn >= F.STAGES:
                hopper.named_barrier("sync", slot, THREADS)
            bar = memory.full.index(slot)
            mbarrier.expect(bar, KEYS * F.D * 4)
            is_prefix = False
            if F.PREFIX:
                is_prefix = j >= num_local + num_outer
                corner = [b * boxes.each, block * KEYS, h, 0]
                hopper.load_box(boxes.pk, corner, bar, memory.k.index(slot), pred=is_prefix)
                hopper.load_box(boxes.pv, corner, bar, memory.v.index(slot), pred=is_prefix)
            corner = [b, block * KEYS, h, 0]
            hopper.load_box(boxes.k, corner, bar, memory.k.index(slot), pred=not is_prefix)
            hopper.load_box(boxes.v, corner, bar, memory.v.index(slot), pred=not is_prefix)
            turn += 1
        if F.ADD:
            if iteration > 0:
                hopper.named_barrier("sync", ADDED, THREADS)
            mbarrier.expect(memory.out_bar.index(0), BYTES)
            read_rows(boxes.out, memory.out, memory.out_bar.index(0), b, token, h * F.G)
    hopper.named_barrier("sync", QUERIES, THREADS)
    if F.ADD:
        hopper.named_barrier("sync", ADDED, THREADS)
    # complete every barrier before the warp exits
    for i in range(gl.maximum(turn - F.STAGES, 0), turn):
        hopper.named_barrier("sync", i % F.STAGES, THREADS)


@gluon.jit
def process_blocks(
    memory, q, turn, acc, m, l, first, count, lo, hi, all_lo, all_hi, scale_log2, F: gl.constexpr
):
    """Fold `count` blocks into a running softmax; see `primitives.scaled_step`."""
    ACC: gl.constexpr = acc.type.layout
    zero = gl.zeros([ROWS, KEYS], gl.float32, LOGITS)
    for j in range(0, count):
        slot = turn % F.STAGES
        mbarrier.wait(memory.full.index(slot), (turn // F.STAGES) & 1)
        k_tile = memory.k.index(slot).reshape([KEYS, F.D])
        s = warpgroup_mma(q, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        n0 = (first + j) * KEYS
        if (n0 < all_lo) | (n0 + KEYS > all_hi):
            n = n0 + gl.arange(0, KEYS, gl.SliceLayout(0, LOGITS))
            s = gl.where((n[None] >= lo[:, None]) & (n[None] < hi[:, None]), s, float("-inf"))
        m_old = m
        m = gl.maximum(m, gl.max(s, 1) * scale_log2)
        origin = gl.where(m == float("-inf"), 0.0, m)
        p, alpha = gl.exp2(s * scale_log2 - origin[:, None]), gl.exp2(m_old - origin)
        l = l * alpha + gl.sum(p, 1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, ACC))[:, None]
        v_tile = memory.v.index(slot).reshape([KEYS, F.D])
        left = gl.convert_layout(p.to(memory.k.dtype), left_operand(ACC))
        acc = warpgroup_mma(left, v_tile, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        hopper.named_barrier("arrive", slot, THREADS)
        turn += 1
    return turn, acc, m, l


@gluon.jit
def keep(operand, smem, call):
    """Use a left operand in registers after the loop that multiplies it, for a T that no call has.
    At width 64 ptxas 12.8 would otherwise give its registers to the probabilities, which are as
    many: it misses that the next iteration reads them again."""
    if operand.shape[1] == 64:  # noqa: SIM102
        if call.T < 0:
            smem.reshape(operand.shape).store(operand)


@gluon.jit
def write(out, lse, smem, acc, m, l, corner, row, real):
    """Write out and natural lse of a consumer's rows."""
    empty = l == 0.0
    l = gl.where(empty, 1.0, l)
    inverse_l = gl.convert_layout(1.0 / l, gl.SliceLayout(1, acc.type.layout))
    tma.store_wait(0)  # the previous contents are written
    smem.reshape(acc.shape).store((acc * inverse_l[:, None]).to(smem.dtype))
    fence_async_shared()
    hopper.store_box(out, corner, smem)
    log = gl.where(empty, float("-inf"), (m + gl.log2(l)) * 0.6931471805599453)
    gl.store(lse + row, log, mask=real)


@gluon.jit
def consume(out, inner_out, rows, call, memory, CONSUMER: gl.constexpr, F: gl.constexpr):
    """One consumer warpgroup."""
    D: gl.constexpr = F.D
    ACC: gl.constexpr = accumulator(D)
    i, scale_log2, floor = gl.arange(0, ROWS, ROW), call.scale, call.inner_floor
    turn = 0
    for iteration in range(0, num_work_tiles(call.tiles * call.B * F.K)):
        x = consumer_rows(iteration, i, call, CONSUMER, F)
        blocks, position = x.blocks, x.position
        lo, hi, all_lo, all_hi = x.lo, x.hi, x.all_lo, x.all_hi
        mbarrier.wait(memory.q_bar.index(0), iteration & 1)
        q = memory.q.index(CONSUMER).reshape([ROWS, D]).load(QUERY)
        fence_async_shared()  # TMA may overwrite q after this load
        hopper.named_barrier("arrive", QUERIES, THREADS)

        m = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        l = gl.zeros([ROWS], gl.float32, ROW)
        acc = gl.zeros([ROWS, D], gl.float32, ACC)
        corner = [x.b, x.token, x.h * F.G, 0]
        smem = memory.out.index(CONSUMER)
        outer_hi, outer_all_hi = hi, all_hi
        if F.INNER:
            local_lo = gl.maximum(steps.local_start(position, call), lo)
            turn, acc, m, l = process_blocks(
                memory, q, turn, acc, m, l, blocks.local, blocks.num_local, local_lo,
                gl.where(local_lo < hi, hi, 0), steps.local_start(x.last, call), all_hi,
                scale_log2, F,
            )  # fmt: skip
            inner_acc, inner_m, inner_l = acc, m, l
            outer_hi = gl.minimum(hi, local_lo)
            outer_all_hi = gl.minimum(all_hi, steps.local_start(x.first, call))
        turn, acc, m, l = process_blocks(
            memory, q, turn, acc, m, l, blocks.begin, blocks.num_outer, lo, outer_hi, all_lo,
            outer_all_hi, scale_log2, F,
        )  # fmt: skip
        if F.PREFIX:
            turn, acc, m, l = process_blocks(
                memory, q, turn, acc, m, l, 0, blocks.num_initial, lo * 0,
                steps.prefix_end(position, call.P, F.PREFIX), 0,
                steps.prefix_end(x.first, call.P, F.PREFIX), scale_log2, F,
            )  # fmt: skip
        write(out, rows.lse, smem, acc, m, l, corner, x.row, x.real)
        if F.INNER:
            turn, acc, m, l = process_blocks(
                memory, q, turn, inner_acc, inner_m, inner_l, 0, blocks.num_initial, lo * 0,
                gl.minimum(position + 1, floor), 0, gl.minimum(x.first + 1, floor), scale_log2, F,
            )  # fmt: skip
            write(inner_out, rows.inner_lse, smem, acc, m, l, corner, x.row, x.real)
        keep(q, smem, call)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=LENGTHS)
def nsa_flash_fwd_sm90(
    q, k, v, pk, pv, out, inner_out, rows, kv_range, start, T, N, P, each, scale_log2, tiles, B,
    F: gl.constexpr,
):  # fmt: skip
    """One persistent program per multiprocessor: out and lse of query tiles of a sequence and KV
    head, from the queries and the keys and values that they see."""
    call = problem(start, T, N, P, kv_range, scale_log2, tiles, B, F)
    q_smem, out_smem = hopper.buffers(q, CONSUMERS), hopper.buffers(out, CONSUMERS)
    k_smem, v_smem = hopper.buffers(k, F.STAGES), hopper.buffers(v, F.STAGES)
    q_bar, full = hopper.barriers(1, 1), hopper.barriers(F.STAGES, 1)
    memory = Memory(q_smem, q_smem, out_smem, k_smem, v_smem, q_bar, q_bar, full)
    fence_async_shared()
    hopper.thread_barrier()
    gl.warp_specialize(
        [
            (consume, (out, inner_out, rows, call, memory, 0, F)),
            (consume, (out, inner_out, rows, call, memory, 1, F)),
            (produce, (Boxes(q, q, k, v, pk, pv, each, q), call, memory, F, False)),
        ],
        [4, 1],
        [F.REGISTERS, 24],
    )


@gluon.jit
def process_dq_blocks(
    memory, q, d_out, turn, acc, lse, delta, other_lse, other_delta, first, count, lo, hi, other_lo,
    all_lo, all_hi, scale_log2, BOTH: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """Add the contribution of `count` blocks to dq. BOTH: of both softmaxes; the other one covers
    the keys from `other_lo` on."""
    ACC: gl.constexpr = acc.type.layout
    zero = gl.zeros([ROWS, KEYS], gl.float32, LOGITS)
    for j in range(0, count):
        slot = turn % F.STAGES
        mbarrier.wait(memory.full.index(slot), (turn // F.STAGES) & 1)
        k_tile = memory.k.index(slot).reshape([KEYS, F.D])
        v_tile = memory.v.index(slot).reshape([KEYS, F.D])
        s = warpgroup_mma(q, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(d_out, v_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        s, dp = warpgroup_mma_wait(0, deps=[s, dp])
        n0 = (first + j) * KEYS
        n = n0 + gl.arange(0, KEYS, gl.SliceLayout(0, LOGITS))
        if (n0 < all_lo) | (n0 + KEYS > all_hi):
            s = gl.where((n[None] >= lo[:, None]) & (n[None] < hi[:, None]), s, float("-inf"))
        _, ds = steps.softmax_grad(s, scale_log2, dp, lse[:, None], delta[:, None], F.GATED)
        if BOTH:
            s = gl.where(n[None] >= other_lo[:, None], s, float("-inf"))
            _, other_ds = steps.softmax_grad(
                s, scale_log2, dp, other_lse[:, None], other_delta[:, None], F.GATED
            )
            ds += other_ds
        left = gl.convert_layout(ds.to(memory.k.dtype), left_operand(ACC))
        acc = warpgroup_mma(left, k_tile, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        hopper.named_barrier("arrive", slot, THREADS)
        turn += 1
    return turn, acc


@gluon.jit
def load_lse_delta(iteration, i, call, rows, CONSUMER: gl.constexpr, F: gl.constexpr):
    """lse and delta of a consumer's rows i of a work tile; with INNER of both softmaxes."""
    x = consumer_rows(iteration, i, call, CONSUMER, F)
    row, real = x.row, x.real & (x.tile >= 0)  # there may be no next work tile
    lse_row = gl.load(rows.lse + row, mask=real, other=0.0)
    delta_row = gl.load(rows.delta + row, mask=real, other=0.0)
    other_lse, other_delta = lse_row, delta_row
    if F.INNER:
        other_lse = gl.load(rows.inner_lse + row, mask=real, other=0.0)
        other_delta = gl.load(rows.inner_delta + row, mask=real, other=0.0)
    return lse_row, delta_row, other_lse, other_delta


@gluon.jit
def consume_dq(dq, rows, call, memory, CONSUMER: gl.constexpr, F: gl.constexpr):
    """One consumer warpgroup."""
    D: gl.constexpr = F.D
    ACC: gl.constexpr = accumulator(D)
    i, scale_log2 = gl.arange(0, ROWS, ROW), call.scale * 1.4426950408889634
    turn = 0
    next_rows = load_lse_delta(0, i, call, rows, CONSUMER, F)
    for iteration in range(0, num_work_tiles(call.tiles * call.B * F.K)):
        x = consumer_rows(iteration, i, call, CONSUMER, F)
        blocks, lo, hi, all_lo, all_hi = x.blocks, x.lo, x.hi, x.all_lo, x.all_hi
        lse, delta, other_lse, other_delta = next_rows
        mbarrier.wait(memory.q_bar.index(0), iteration & 1)
        q = memory.q.index(CONSUMER).reshape([ROWS, D]).load(QUERY)
        d_out = memory.d_out.index(CONSUMER).reshape([ROWS, D]).load(QUERY)
        fence_async_shared()  # TMA may overwrite q and d_out after these loads
        hopper.named_barrier("arrive", QUERIES, THREADS)
        # prefetch for the next work tile
        next_rows = load_lse_delta(iteration + 1, i, call, rows, CONSUMER, F)
        tma.store_wait(0)  # the previous work tile's dq is written
        if F.ADD:  # noqa: SIM102
            if iteration > 0:
                hopper.named_barrier("arrive", ADDED, THREADS)
        acc = gl.zeros([ROWS, D], gl.float32, ACC)
        hi_before, all_before = hi, all_hi
        if F.INNER:
            # the window contains the local keys
            turn, acc = process_dq_blocks(
                memory, q, d_out, turn, acc, lse, delta, other_lse, other_delta, blocks.local,
                blocks.num_local, lo, hi, steps.local_start(x.position, call), all_lo, all_hi,
                scale_log2, True, F,
            )  # fmt: skip
            # the first local block's keys before the local range are already processed
            local_begin = steps.local_start(call.start + x.tile * (CONSUMERS * F.TOKENS), call)
            local_begin = gl.where(blocks.num_local > 0, local_begin // KEYS * KEYS, call.N)
            hi_before, all_before = gl.minimum(hi, local_begin), gl.minimum(all_hi, local_begin)
        turn, acc = process_dq_blocks(
            memory, q, d_out, turn, acc, lse, delta, lse, delta, blocks.begin, blocks.num_outer, lo,
            hi_before, lo, all_lo, all_before, scale_log2, False, F,
        )  # fmt: skip
        if F.INNER:
            floor = call.inner_floor
            turn, acc = process_dq_blocks(
                memory, q, d_out, turn, acc, other_lse, other_delta, lse, delta, 0,
                blocks.num_initial, lo * 0, gl.minimum(x.position + 1, floor), lo, 0,
                gl.minimum(x.first + 1, floor), scale_log2, False, F,
            )  # fmt: skip
        if F.PREFIX:
            turn, acc = process_dq_blocks(
                memory, q, d_out, turn, acc, lse, delta, lse, delta, 0, blocks.num_initial, lo * 0,
                steps.prefix_end(x.position, call.P, F.PREFIX), lo, 0,
                steps.prefix_end(x.first, call.P, F.PREFIX), scale_log2, False, F,
            )  # fmt: skip
        smem = memory.out.index(CONSUMER)
        keep(q, smem, call)
        keep(d_out, smem, call)
        acc = acc * call.scale
        if F.ADD:
            mbarrier.wait(memory.out_bar.index(0), iteration & 1)
            acc += smem.reshape(acc.shape).load(acc.type.layout).to(gl.float32)
        smem.reshape(acc.shape).store(acc.to(smem.dtype))
        fence_async_shared()
        hopper.store_box(dq, [x.b, x.token, x.h * F.G, 0], smem)
    tma.store_wait(0)
    if F.ADD:
        hopper.named_barrier("arrive", ADDED, THREADS)


@gluon.jit(do_not_specialize=LENGTHS)
def nsa_flash_dq_sm90(
    q, k, v, pk, pv, d_out, dq, rows, kv_range, start, T, N, P, each, scale, tiles, B,
    F: gl.constexpr,
):  # fmt: skip
    """One persistent program per multiprocessor: dq of query tiles of a sequence and KV head; with
    ADD added to what is there."""
    call = problem(start, T, N, P, kv_range, scale, tiles, B, F)
    q_smem, do_smem = hopper.buffers(q, CONSUMERS), hopper.buffers(d_out, CONSUMERS)
    dq_smem = hopper.buffers(dq, CONSUMERS)
    k_smem, v_smem = hopper.buffers(k, F.STAGES), hopper.buffers(v, F.STAGES)
    q_bar, dq_bar, full = hopper.barriers(1, 1), hopper.barriers(1, 1), hopper.barriers(F.STAGES, 1)
    memory = Memory(q_smem, do_smem, dq_smem, k_smem, v_smem, q_bar, dq_bar, full)
    fence_async_shared()
    hopper.thread_barrier()
    gl.warp_specialize(
        [
            (consume_dq, (dq, rows, call, memory, 0, F)),
            (consume_dq, (dq, rows, call, memory, 1, F)),
            (produce, (Boxes(q, d_out, k, v, pk, pv, each, dq), call, memory, F, True)),
        ],
        [4, 1],
        [F.REGISTERS, 24],
    )


@gluon.jit
def produce_dkv(q, d_out, k, v, rows, T, n0, b, h, begin, end, memory, F: gl.constexpr):
    """The producer warp. With INNER it loads lse and delta of both softmaxes."""
    LANES: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    row = gl.arange(0, ROWS, LANES)
    mbarrier.expect(memory.kv_bar.index(0), CONSUMERS * KEYS * F.D * 4)
    for consumer in gl.static_range(CONSUMERS):
        corner = [b, n0 + consumer * KEYS, h, 0]
        hopper.load_box(k, corner, memory.kv_bar.index(0), memory.k.index(consumer))
        hopper.load_box(v, corner, memory.kv_bar.index(0), memory.v.index(consumer))
    for tile in range(begin, end):
        i = tile - begin
        slot = i % F.STAGES
        if i >= F.STAGES:
            hopper.named_barrier("sync", slot, THREADS)
        bar = memory.full.index(slot)
        mbarrier.expect(bar, ROWS * F.D * 4)
        corner = [b, tile * F.TOKENS, h * F.G, 0]
        hopper.load_box(q, corner, bar, memory.q.index(slot))
        hopper.load_box(d_out, corner, bar, memory.d_out.index(slot))
        # padding rows load the last token's finite lse and delta; they see no key
        token = gl.minimum(tile * F.TOKENS + row // F.G, T - 1)
        row_offset = (b * T + token).to(gl.int64) * (F.K * F.G) + h * F.G + row % F.G
        for index in gl.static_range(4 if F.INNER else 2):
            slot_rows = memory.rows.index(slot * 4 + index)
            hopper.load_elements(slot_rows, rows[index + 1] + row_offset)
        async_copy.mbarrier_arrive(bar, increment_count=False)
    # complete every barrier before the warp exits
    for i in range(gl.maximum(end - begin - F.STAGES, 0), gl.maximum(end - begin, 0)):
        hopper.named_barrier("sync", i % F.STAGES, THREADS)


@gluon.jit
def visible_positions(n, kv_range, F: gl.constexpr):
    """First position that sees each key, and the end of these positions; the end of the positions
    that see it as a local key."""
    # compared first: another order compiles to other instructions
    is_before = n < kv_range.floor
    first, end = steps.seen_by(n, n, kv_range.reach, kv_range.stride, F.KIND)
    end = gl.minimum(end, kv_range.start + kv_range.T)
    if F.KIND != COMPRESSED:
        end = gl.where(is_before, 0, end)
    local_end = end
    if F.INNER:
        _, local_end = steps.seen_by(
            n, n, kv_range.inner_reach, kv_range.inner_stride, LOCAL_BLOCKS
        )
        local_end = gl.where(n < kv_range.inner_floor, 0, local_end)
    return first, end, local_end


@gluon.jit
def accumulate(
    k_tile, v_tile, q_tile, do_tile, dk, dv, rows, slot, first_row, first_position, bounds, masked,
    scale_log2, LOCAL: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """Add the contribution of query rows to dk and dv of a consumer. The query tile begins at
    `first_position`; `bounds` are the keys' `visible_positions`. LOCAL: of both softmaxes."""
    M: gl.constexpr = q_tile.shape[0]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(0, S)
    KEY: gl.constexpr = gl.SliceLayout(1, S)
    dtype: gl.constexpr = q_tile.dtype
    first, end, local_end = bounds
    lse = rows.index(slot * 4).slice(first_row, M, 0).load(COLUMN)
    delta = rows.index(slot * 4 + 1).slice(first_row, M, 0).load(COLUMN)
    zero = gl.zeros([KEYS, M], gl.float32, S)
    s = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma(v_tile, do_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    s, dp = warpgroup_mma_wait(0, deps=[s, dp])
    position = first_position + (first_row + gl.arange(0, M, COLUMN)) // F.G
    if masked:
        lo, hi = gl.convert_layout(first, KEY), gl.convert_layout(end, KEY)
        sees = (position[None] >= lo[:, None]) & (position[None] < hi[:, None])
        s = gl.where(sees, s, float("-inf"))
    p, ds = steps.softmax_grad(s, scale_log2, dp, lse[None], delta[None], F.GATED)
    if LOCAL:
        lse = rows.index(slot * 4 + 2).slice(first_row, M, 0).load(COLUMN)
        delta = rows.index(slot * 4 + 3).slice(first_row, M, 0).load(COLUMN)
        hi = gl.convert_layout(local_end, KEY)
        s = gl.where(position[None] < hi[:, None], s, float("-inf"))
        local_p, local_ds = steps.softmax_grad(s, scale_log2, dp, lse[None], delta[None], F.GATED)
        p, ds = p + local_p, ds + local_ds
    LEFT: gl.constexpr = left_operand(dk.type.layout)
    dv = warpgroup_mma(gl.convert_layout(p.to(dtype), LEFT), do_tile, dv, is_async=True)
    dk = warpgroup_mma(gl.convert_layout(ds.to(dtype), LEFT), q_tile, dk, is_async=True)
    return warpgroup_mma_wait(0, deps=[dk, dv])


@gluon.jit
def consume_dkv(dk, dv, n0, b, h, tiles, call, memory, CONSUMER: gl.constexpr, F: gl.constexpr):
    """One consumer warpgroup."""
    D: gl.constexpr = F.D
    ACC: gl.constexpr = accumulator(D)
    begin, full_tile, full_end, end = tiles
    N, B = call.N, call.B
    scale_log2 = call.scale * 1.4426950408889634
    dk_acc = gl.zeros([KEYS, D], gl.float32, ACC)
    dv_acc = gl.zeros([KEYS, D], gl.float32, ACC)
    k_tile = memory.k.index(CONSUMER).reshape([KEYS, D])
    v_tile = memory.v.index(CONSUMER).reshape([KEYS, D])
    key = n0 + CONSUMER * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, ACC))
    bounds = visible_positions(key, call, F)
    middle = begin
    mbarrier.wait(memory.kv_bar.index(0), 0)
    if F.INNER:
        middle = full_tile
    for phase in gl.static_range(0 if F.INNER else 1, 2):
        for tile in range(begin if phase == 0 else middle, middle if phase == 0 else end):
            slot = (tile - begin) % F.STAGES
            mbarrier.wait(memory.full.index(slot), ((tile - begin) // F.STAGES) & 1)
            q_tile = memory.q.index(slot).reshape([ROWS, D])
            do_tile = memory.d_out.index(slot).reshape([ROWS, D])
            masked = True
            if phase == 1:
                masked = (tile < full_tile) | (tile >= full_end)
            # two softmaxes: half a query tile at a time, for lack of registers
            for first in gl.static_range(0, ROWS, ROWS // 2 if phase == 0 else ROWS):
                dk_acc, dv_acc = accumulate(
                    k_tile, v_tile, q_tile.slice(first, ROWS // 2 if phase == 0 else ROWS, 0),
                    do_tile.slice(first, ROWS // 2 if phase == 0 else ROWS, 0), dk_acc, dv_acc,
                    memory.rows, slot, first, call.start + tile * F.TOKENS, bounds, masked,
                    scale_log2, phase == 0, F,
                )  # fmt: skip
            hopper.named_barrier("arrive", slot, THREADS)
    entry = ((gl.program_id(1) * B + b) * N + key).to(gl.int64) * F.K + h
    offset = entry[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, ACC))[None]
    gl.store(dk + offset, dk_acc * call.scale, mask=(key < N)[:, None])
    gl.store(dv + offset, dv_acc, mask=(key < N)[:, None])


@gluon.jit(do_not_specialize=LENGTHS)
def nsa_flash_dkv_sm90(
    q, k, v, d_out, dk, dv, rows, kv_range, start, T, N, scale, blocks, B, F: gl.constexpr
):
    """One program owns a block of keys and one split (axis 1) of the queries that see it. It writes
    partial dk and dv, [splits, B, N, K, D]."""
    call = problem(start, T, N, 0, kv_range, scale, 0, B, F)
    n0 = gl.program_id(0) % blocks * (CONSUMERS * KEYS)
    b, h = gl.program_id(0) // blocks // F.K, gl.program_id(0) // blocks % F.K
    last = gl.minimum(n0 + CONSUMERS * KEYS, N) - 1
    seen = steps.seen_by(n0, last, call.reach, call.stride, F.KIND)
    seen += steps.seen_by(last, n0, call.reach, call.stride, F.KIND)
    tiles = steps.query_tiles(
        n0, last, seen, start, T, call, gl.program_id(1), gl.num_programs(1), F.TOKENS, F.INNER
    )
    k_smem, v_smem = hopper.buffers(k, CONSUMERS), hopper.buffers(v, CONSUMERS)
    q_smem, do_smem = hopper.buffers(q, F.STAGES), hopper.buffers(d_out, F.STAGES)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows_smem = gl.allocate_shared_memory(gl.float32, [F.STAGES * 4, ROWS.value], FLAT)
    # 33 arrivals per stage: one for TMA, 32 of the lanes that copy lse and delta
    kv_bar, full = hopper.barriers(1, 1), hopper.barriers(F.STAGES, 33)
    memory = RingMemory(k_smem, v_smem, q_smem, do_smem, rows_smem, kv_bar, full)
    fence_async_shared()
    hopper.thread_barrier()
    gl.warp_specialize(
        [
            (consume_dkv, (dk, dv, n0, b, h, tiles, call, memory, 0, F)),
            (consume_dkv, (dk, dv, n0, b, h, tiles, call, memory, 1, F)),
            (produce_dkv, (q, d_out, k, v, rows, T, n0, b, h, tiles[0], tiles[3], memory, F)),
        ],
        [4, 1],
        [F.REGISTERS, 24],
    )


KERNELS = {"forward": nsa_flash_fwd_sm90, "dq": nsa_flash_dq_sm90, "dkv": nsa_flash_dkv_sm90}
WIDTHS = (64, 128)  # of heads
# stages of the ring buffer, and registers per consumer thread
STAGES, REGISTERS = {"forward": 4, "dq": 3, "dkv": 3}, 240
# a forward with one softmax: registers per consumer thread and on average, so that programs of
# short kernels can run on the same multiprocessor
FEWER_REGISTERS, AVERAGE_REGISTERS = 160, 120
# the fewest query tiles per split of dk and dv, if the splits fill the GPU
MIN_SPLIT_TILES = 64
# the fewest query tiles per multiprocessor; with fewer, programs of half the rows are faster
MIN_TILES = 3


def query_tiles(call: Any) -> tuple[int, int]:
    """Query tiles per sequence and KV head, and the number of sequences x KV heads."""
    B, T = call.q.shape[:2]
    return cdiv(T, 2 * ROWS.value // call.groups), B * call.k.shape[2]


def is_supported(kernel: str, call: Any) -> bool:
    """Whether `kernel` "forward", "dq" or "dkv" supports a call (`flash.Inputs`) and is faster.
    `launch.using({"flash_sm90": True})` ignores the number of tiles; False, or a requested tile
    config, disables the kernel."""
    q, k, v, prefix = call.q, call.k, call.v, call.prefix
    kv_range, inner = call.kv_range, call.inner
    forced = launch.override.get("flash_sm90")
    tiled = launch.requested_sizes(kernel if kv_range.wide else f"window.{kernel}")
    kinds = kv_range.kind in (COMPRESSED.value, CAUSAL_WINDOW.value, LOCAL_BLOCKS.value)
    plain = not (kv_range.starts or kv_range.documents or kv_range.soft_cap)
    nested = inner is None or kv_range.kind == CAUSAL_WINDOW.value
    sizes = q.dtype.itemsize == 2 and q.shape[-1] == v.shape[-1] in WIDTHS
    whole = 0 < call.groups <= ROWS.value and ROWS.value % call.groups == 0
    if forced is False or tiled or not (kinds and plain and nested and sizes and whole):
        return False
    tiles, lines = query_tiles(call)
    enough = forced or tiles * lines >= MIN_TILES * launch.multiprocessors(q.device)
    # of a prefix that all sequences share TMA reads the first sequence's
    prefix = (t._replace(stride=(t.stride[0] or t.stride[1], *t.stride[1:])) for t in prefix or ())
    return bool(enough and call.scale > 0 and launch.supports_tma(q, k, v, *prefix))


def plan(kernel: str, call: Any, gated: bool, add: bool) -> Plan:
    (B, T), (N, K), kv_range, inner = call.q.shape[:2], call.k.shape[1:3], call.kv_range, call.inner
    options, registers, tokens = dict(num_warps=4), REGISTERS, ROWS.value // call.groups
    if kernel == "forward" and inner is None:
        options["maxnreg"], registers = AVERAGE_REGISTERS, FEWER_REGISTERS
    settings = Settings(
        K, call.groups, call.q.shape[-1], tokens, STAGES[kernel], kv_range.kind, kv_range.stride,
        inner is not None, 1 if inner is None else inner.stride, call.prefix_kind, gated, add,
        registers,
    )  # fmt: skip
    if kernel == "dkv":
        blocks, most = cdiv(N, 2 * KEYS.value), kv_range.reach + 2 * KEYS.value
        tiles = cdiv(T if kv_range.wide else min(T, most), tokens)
        splits = launch.query_splits(blocks * B * K, tiles, kv_range.wide)
        if kv_range.wide:
            fill = launch.query_splits(blocks * B * K, tiles, False)
            splits = max(min(splits, tiles // MIN_SPLIT_TILES), fill)
        grid: tuple[int, ...] = blocks * B * K, splits
        lengths = dict(blocks=blocks, B=B)
    else:
        tiles, lines = query_tiles(call)
        # one program fills a multiprocessor
        grid = (min(tiles * lines, launch.multiprocessors(call.q.device)),)
        prefix = call.prefix and call.prefix[0]
        each = int(prefix is not None and prefix.shape[0] > 1 and prefix.stride[0] > 0)
        lengths = dict(tiles=tiles, B=B, each=each, P=0 if prefix is None else prefix.shape[1])
    args = dict(F=settings, kv_range=call.numbers(), **lengths, **options)
    return Plan(grid, args, is_sm90=True)


def run(kernel: str, launch_plan: Plan, inputs: Any, **args: Any) -> None:
    """Launch a planned kernel on `flash.Inputs`. Of a prefix that all sequences share it reads the
    first sequence's; other keys stand in for a missing one."""
    q, k, v = inputs[:3]
    queries: dict[str, Tensor] = dict(q=q)
    if kernel == "forward":
        out, lse, inner_out, inner_lse = args["outputs"]
        queries |= dict(out=out, inner_out=out if inner_out is None else inner_out)
        args = dict(rows=ForwardRows(lse, inner_lse), scale_log2=args["scale_log2"])
    else:
        queries["d_out"] = args["rows"].d_out
    if kernel == "dq":
        queries["dq"] = args["dq"]
    F = launch_plan.args["F"]
    query_box, key_box = [1, F.TOKENS, F.G, F.D], [1, KEYS.value, 1, F.D]
    args |= {name: launch.gluon_box(t, query_box) for name, t in queries.items()}
    args["k"], args["v"] = (launch.gluon_box(t, key_box) for t in (k, v))
    if inputs.prefix is not None:
        first = (t if t.stride(0) else t[0][None] for t in inputs.prefix)
        args["pk"], args["pv"] = (launch.gluon_box(t, key_box) for t in first)
    elif kernel != "dkv":
        args["pk"], args["pv"] = args["k"], args["v"]
    launcher(KERNELS[kernel], launch_plan.grid)(
        start=inputs.kv_range.start, T=q.shape[1], N=k.shape[1], **args, **launch_plan.args
    )
