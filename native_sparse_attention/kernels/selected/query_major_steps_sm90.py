"""Steps of the query-major Gluon kernels for Hopper. A tile has 64 rows: of tokens that share block
indices, or of the members of a union.

A program has two consumer warpgroups, each with a producer warp. The producer copies the rows of a
tile and then its blocks, one after the other, into the consumer's ring of stages. A consumer runs
tiles in turn, with accumulators in registers. Consumers do not synchronise with each other: one
computes probabilities while the other waits for its products.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..common.buffers_sm90 import at_named_barrier, barriers, buffers
from ..common.dialect_sm90 import load_box, reinterpret, thread_barrier
from ..common.epilogue_sm90 import fetch_rows

# one compiled kernel for all lengths
LENGTHS = ["T", "limit", "tiles", "all_tiles"]

CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # of a tile
KEYS = gl.constexpr(64)  # of a block
THREADS = gl.constexpr(32 * (4 + 1))  # of a consumer and its producer


@gluon.jit
def ring(k, v, STAGES: gl.constexpr):
    """Rings of both consumers for keys and values, and their full barriers."""
    k_smem, v_smem = buffers(k, CONSUMERS * STAGES), buffers(v, CONSUMERS * STAGES)
    full = barriers(CONSUMERS * STAGES, 1)
    fence_async_shared()
    thread_barrier()
    return k_smem, v_smem, full


@gluon.jit
def tile_coords(nth, tiles, K, R):
    """Line (batch row x head group), batch row, head group, KV head and number of the nth tile.
    Tiles of a line, which share keys and values in the cache, are adjacent. The last tiles, with
    the most blocks, are first."""
    line = nth // tiles
    return line, line // R, line % R, line % R * K // R, tiles - 1 - nth % tiles


@gluon.jit
def tile_blocks(
    block_indices, counts, line, b, r, tile, tiles, T, R, limit, WARPS: gl.constexpr,
    TOKENS: gl.constexpr, SLOTS: gl.constexpr, UNION: gl.constexpr,
):  # fmt: skip
    """Pointer to the blocks of a tile and their number, up to the last valid one; -1 for a group
    without a union."""
    if UNION:
        tile_number = line * tiles + tile
        count = gl.load(counts + tile_number)
        return block_indices + tile_number.to(gl.int64) * limit, gl.where(count > 0, count, -1)
    at = block_indices + ((b * T + tile * TOKENS).to(gl.int64) * R + r) * limit
    slot = gl.arange(0, SLOTS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    c = gl.load(at + slot, mask=slot < limit, other=-1)
    return at, gl.max(gl.where(c >= 0, slot + 1, 0), 0)


@gluon.jit
def sees(e, member, UNION: gl.constexpr):
    """Whether rows of these members see the packed block e."""
    if UNION:
        return (((e >> 32).to(gl.int32) >> member) & 1) != 0
    return member <= e.to(gl.int32)  # members are 0: e is -1 for an empty slot


@gluon.jit
def produce(
    q, d_out, k, v, block_indices, counts, prefetched, T, K, R, limit, tiles, all_tiles, k_smem,
    v_smem, full, CONSUMER: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr,
    SLOTS: gl.constexpr, UNION: gl.constexpr, BACKWARD: gl.constexpr,
):  # fmt: skip
    """Producer warp of a consumer. Copies q of each tile to a stage of keys, in the backward d_out
    to the same stage of values, and then the tile's blocks. Prefetches the rows of the tensors
    `prefetched` into L2."""
    TOKENS: gl.constexpr = q.block_shape[1]
    D: gl.constexpr = k.block_shape[3]
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    done = 0
    for nth in range(
        gl.program_id(0) * CONSUMERS + CONSUMER, all_tiles, gl.num_programs(0) * CONSUMERS
    ):
        line, b, r, h, tile = tile_coords(nth, tiles, K, R)
        at, count = tile_blocks(
            block_indices, counts, line, b, r, tile, tiles, T, R, limit, 1, TOKENS, SLOTS, UNION
        )
        e = gl.load(at, mask=count > 0, other=0)
        if count >= 0:
            stage = CONSUMER * STAGES + done % STAGES
            if done >= STAGES:
                at_named_barrier("sync", stage, THREADS)
            bar = full.index(stage)
            mbarrier.expect(bar, ROWS * D * (4 if BACKWARD else 2))
            of_rows = [b, tile * TOKENS, r * G, 0]
            smem = reinterpret(k_smem.index(stage), q.dtype, q.block_shape, q.layout)
            load_box(q, of_rows, bar, smem)
            if BACKWARD:
                smem = reinterpret(v_smem.index(stage), q.dtype, q.block_shape, q.layout)
                load_box(d_out, of_rows, bar, smem)
            done += 1
        for j in range(0, count):
            c = gl.maximum(e.to(gl.int32), 0)
            e = gl.load(at + j + 1, mask=j + 1 < count, other=0)
            stage = CONSUMER * STAGES + done % STAGES
            if done >= STAGES:
                at_named_barrier("sync", stage, THREADS)
            bar = full.index(stage)
            mbarrier.expect(bar, KEYS * D * 4)
            load_box(k, [b, c * KEYS, h, 0], bar, k_smem.index(stage))
            load_box(v, [b, c * KEYS, h, 0], bar, v_smem.index(stage))
            done += 1
        for first in gl.static_range(0, TOKENS, 32):
            i = first + gl.arange(0, 32, LANES)
            token = tile * TOKENS + i
            row = ((b * T + token).to(gl.int64) * R + r) * (G * D)
            real = (i < TOKENS) & (token < T) & (count >= 0)
            for tensor in gl.static_range(len(prefetched)):
                fetch_rows(prefetched[tensor], row, real, G * D * 2)
    # complete every barrier
    for i in range(gl.maximum(done - STAGES, 0), done):
        at_named_barrier("sync", CONSUMER * STAGES + i % STAGES, THREADS)
