"""Steps common to the Hopper flash kernels. In Gluon.

A persistent program processes work tiles of CONSUMERS x ROWS query rows (tokens x heads of a
group). Two consumer warpgroups own ROWS rows each and keep their accumulators in registers. A
producer warp loads blocks of keys and values into a ring buffer that both consumers read, and
prefetches the next work tile's queries. Consumers release a ring slot at its named barrier.

With local blocks inside a window, the local blocks come first, then the rest of the window, then
the initial blocks. With local blocks alone, the initial blocks are the prefix.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..common.gluon_sm90 import at_named_barrier, load_box
from ..common.primitives import BEHIND, LOCAL_BLOCKS

CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # of a consumer
KEYS = gl.constexpr(64)  # of a block
THREADS = gl.constexpr(32 * (4 * CONSUMERS + 1))

# named barriers after those of the stages: consumers release the queries; the dq buffer
QUERIES = gl.constexpr(7)
ADDED = gl.constexpr(6)

# one compiled kernel for all lengths
LENGTHS = ["start", "T", "N", "floor", "reach", "inner_floor", "inner_reach", "tiles", "B", "each"]


@gluon.jit
def work_tile(i):
    """Index of this program's i-th work tile. Every second round assigns them in reverse: work
    tiles get shorter, so this balances the programs."""
    programs, number = gl.num_programs(0), gl.program_id(0)
    return i * programs + gl.where(i % 2 == 0, number, programs - 1 - number)


@gluon.jit
def num_work_tiles(count):
    """How many of `count` work tiles this program processes, for count >= programs."""
    last = gl.cdiv(count, gl.num_programs(0)) - 1
    return gl.where(work_tile(last) < count, last + 1, last)


@gluon.jit
def tile_position(i, tiles, B, K: gl.constexpr):
    """Query tile, sequence and KV head of the i-th work tile: the last, longest tiles first."""
    iteration = work_tile(i)
    return tiles - 1 - iteration // K // B, iteration // K % B, iteration % K


@gluon.jit
def rows_of(i, tile, b, h, start, T, K, CONSUMER: gl.constexpr, G: gl.constexpr):
    """First token of a consumer's rows; position of rows i, their offset in [B T H], and whether
    they exist."""
    TOKENS: gl.constexpr = ROWS // G
    token = (tile * CONSUMERS + CONSUMER) * TOKENS
    position = start + token + i // G
    row = (b * T + token + i // G).to(gl.int64) * (K * G) + h * G + i % G
    real = token + i // G < T
    return token, position, row, real


@gluon.jit
def window_start(position, reach, stride, KIND: gl.constexpr):
    """The first key of a position's window, or of its local blocks."""
    if KIND == LOCAL_BLOCKS:
        position = position // stride * stride
    return position - reach


@gluon.jit
def local_start(position, kv_range):
    """The first key of a position's local blocks inside a window."""
    inner_floor, inner_reach, inner_stride = kv_range[6], kv_range[7], kv_range[8]
    return gl.maximum(window_start(position, inner_reach, inner_stride, LOCAL_BLOCKS), inner_floor)


@gluon.jit
def visible_range(position, first, last, kv_range, KIND: gl.constexpr):
    """First key and end of each position's KV range; first key and end of the keys that all
    positions from `first` to `last` see."""
    N, floor, reach, stride = kv_range[2], kv_range[3], kv_range[4], kv_range[5]
    if KIND == BEHIND:
        lo, all_lo = position * 0, first * 0
        hi, all_hi = gl.minimum(position // stride, N), gl.minimum(first // stride, N)
    else:
        lo = gl.maximum(window_start(position, reach, stride, KIND), floor)
        all_lo = gl.maximum(window_start(last, reach, stride, KIND), floor)
        hi, all_hi = gl.minimum(position + 1, N), gl.minimum(first + 1, N)
    return lo, hi, all_lo, all_hi


@gluon.jit
def prefix_range(position, first, P, KIND: gl.constexpr):
    """End of the prefix keys that each position sees; end of those that all positions from `first`
    on see. The prefix of local blocks is causal, learned memory is not."""
    hi, all_hi = position * 0 + P, first * 0 + P
    if KIND == LOCAL_BLOCKS:
        hi, all_hi = gl.minimum(position + 1, hi), gl.minimum(first + 1, all_hi)
    return hi, all_hi


@gluon.jit
def blocks_of(
    tile, kv_range, TOKENS: gl.constexpr, KIND: gl.constexpr, INNER: gl.constexpr,
    PREFIX: gl.constexpr,
):  # fmt: skip
    """KV blocks that some row of a tile sees: first local block and count, first other block and
    count, and the count of initial or prefix blocks."""
    start, T, N, floor, reach, stride = (
        kv_range[0],
        kv_range[1],
        kv_range[2],
        kv_range[3],
        kv_range[4],
        kv_range[5],
    )
    first = start + tile * TOKENS
    last = start + gl.minimum(tile * TOKENS + TOKENS, T) - 1
    local, num_local, num_initial = first * 0, first * 0, first * 0
    if KIND == BEHIND:
        begin, end = first * 0, gl.minimum(last // stride, N)
    else:
        begin = gl.maximum(window_start(first, reach, stride, KIND), floor)
        end = gl.minimum(last + 1, N)
    if INNER:
        at = local_start(first, kv_range)
        local = at // KEYS
        num_local = gl.where(at < end, gl.cdiv(end, KEYS) - local, 0)
        end = gl.minimum(end, gl.maximum(local_start(last, kv_range), begin))
        num_initial = gl.cdiv(gl.minimum(last + 1, kv_range[6]), KEYS)
    if PREFIX:
        num_initial = gl.cdiv(kv_range[9], KEYS)
    begin = begin // KEYS
    return local, num_local, begin, gl.maximum(gl.cdiv(end, KEYS) - begin, 0), num_initial


@gluon.jit
def read_rows(t, smem, bar, b, token, head):
    """Load a tile's rows of t, one TMA box per consumer."""
    for consumer in gl.static_range(CONSUMERS):
        at = [b, token + consumer * t.block_shape[1], head, 0]
        load_box(t, at, bar, smem.index(consumer))


@gluon.jit
def read_blocks(
    k, v, pk, pv, each, k_smem, v_smem, full, done, b, h, local, num_local, begin, num_outer,
    num_initial, STAGES: gl.constexpr, PREFIX: gl.constexpr,
):  # fmt: skip
    """Load a tile's KV blocks, and those of a prefix (per sequence with `each`), into the stages of
    the ring buffer as consumers release them."""
    BYTES: gl.constexpr = KEYS * (k.block_shape[3] + v.block_shape[3]) * 2
    for j in range(0, num_local + num_outer + num_initial):
        block = local + j
        block = gl.where(j >= num_local, begin + j - num_local, block)
        block = gl.where(j >= num_local + num_outer, j - num_local - num_outer, block)
        slot = done % STAGES
        if done >= STAGES:
            at_named_barrier("sync", slot, THREADS)
        bar = full.index(slot)
        mbarrier.expect(bar, BYTES)
        if PREFIX:
            there = j >= num_local + num_outer
            at = [b * each, block * KEYS, h, 0]
            load_box(pk, at, bar, k_smem.index(slot), pred=there)
            load_box(pv, at, bar, v_smem.index(slot), pred=there)
        else:
            there = False
        at = [b, block * KEYS, h, 0]
        load_box(k, at, bar, k_smem.index(slot), pred=not there)
        load_box(v, at, bar, v_smem.index(slot), pred=not there)
        done += 1
    return done


@gluon.jit
def wait_for_all(done, STAGES: gl.constexpr):
    """Wait until the consumers have released all stages, so that every barrier completes."""
    for i in range(gl.maximum(done - STAGES, 0), done):
        at_named_barrier("sync", i % STAGES, THREADS)
