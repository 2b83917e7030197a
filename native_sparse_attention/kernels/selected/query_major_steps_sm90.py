"""What the kernels have in common that go through lists of blocks, a tile of 64 rows a list: of
tokens that share it, or of lists that are united. In Gluon, for a Hopper.

A program has two parts of four warps, each with a warp that reads for it: of a tile its rows, and
then the blocks of its list, one after the other, into a ring of places of its own. A part takes
tiles in turn, with what is summed for them in registers, and meets no other; while one waits for
its products, the other forms probabilities.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..common.buffers_sm90 import at_named_barrier, barriers, buffers
from ..common.dialect_sm90 import load_box, reinterpret, thread_barrier
from ..common.epilogue_sm90 import fetch_rows

# one compiled kernel for all lengths
LENGTHS = ["T", "limit", "tiles", "total"]

PARTS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # of a tile
KEYS = gl.constexpr(64)  # of a block
THREADS = gl.constexpr(32 * (4 + 1))  # of a part and the warp that reads for it


@gluon.jit
def ring(k, v, STAGES: gl.constexpr):
    """Places of both parts for keys and values, and what counts the bytes that arrive there."""
    k_smem, v_smem = buffers(k, PARTS * STAGES), buffers(v, PARTS * STAGES)
    full = barriers(PARTS * STAGES, 1)
    fence_async_shared()
    thread_barrier()
    return k_smem, v_smem, full


@gluon.jit
def place_of(nth, tiles, K, R):
    """The nth tile: its line, a row and group of heads, these two, its KV head, and its number in
    the line. Line by line, whose keys and values stay in the cache; the last tiles, whose lists are
    longest, first."""
    line = nth // tiles
    return line, line // R, line % R, line % R * K // R, tiles - 1 - nth % tiles


@gluon.jit
def list_of(
    block_indices, counts, line, b, r, tile, tiles, T, R, limit, WARPS: gl.constexpr,
    TOKENS: gl.constexpr, SLOTS: gl.constexpr, UNION: gl.constexpr,
):  # fmt: skip
    """Where a tile's entries are and how many, up to the last that holds a block; -1 of a group
    that is not united."""
    if UNION:
        number = line * tiles + tile
        count = gl.load(counts + number)
        return block_indices + number.to(gl.int64) * limit, gl.where(count > 0, count, -1)
    at = block_indices + ((b * T + tile * TOKENS).to(gl.int64) * R + r) * limit
    slot = gl.arange(0, SLOTS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    c = gl.load(at + slot, mask=slot < limit, other=-1)
    return at, gl.max(gl.where(c >= 0, slot + 1, 0), 0)


@gluon.jit
def sees(e, number, UNION: gl.constexpr):
    """Which rows, of the lists of these numbers, see an entry's block."""
    if UNION:
        return (((e >> 32).to(gl.int32) >> number) & 1) != 0
    return number <= e.to(gl.int32)  # all numbers are 0: where the entry is a block


@gluon.jit
def read(
    q, d_out, k, v, block_indices, counts, needed, T, K, R, limit, tiles, total, k_smem, v_smem,
    full, PART: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
    UNION: gl.constexpr, BACKWARD: gl.constexpr,
):  # fmt: skip
    """The warp that reads for a part: of each tile its queries, where keys of a block would be, in
    the backward d_out where values would, and then its blocks. What is `needed` of its rows at the
    end comes nearer."""
    TOKENS: gl.constexpr = q.block_shape[1]
    D: gl.constexpr = k.block_shape[3]
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    done = 0
    for nth in range(gl.program_id(0) * PARTS + PART, total, gl.num_programs(0) * PARTS):
        line, b, r, h, tile = place_of(nth, tiles, K, R)
        at, count = list_of(
            block_indices, counts, line, b, r, tile, tiles, T, R, limit, 1, TOKENS, SLOTS, UNION
        )
        e = gl.load(at, mask=count > 0, other=0)
        if count >= 0:
            place = PART * STAGES + done % STAGES
            if done >= STAGES:
                at_named_barrier("sync", place, THREADS)
            bar = full.index(place)
            mbarrier.expect(bar, ROWS * D * (4 if BACKWARD else 2))
            of_rows = [b, tile * TOKENS, r * G, 0]
            smem = reinterpret(k_smem.index(place), q.dtype, q.block_shape, q.layout)
            load_box(q, of_rows, bar, smem)
            if BACKWARD:
                smem = reinterpret(v_smem.index(place), q.dtype, q.block_shape, q.layout)
                load_box(d_out, of_rows, bar, smem)
            done += 1
        for j in range(0, count):
            c = gl.maximum(e.to(gl.int32), 0)
            e = gl.load(at + j + 1, mask=j + 1 < count, other=0)
            place = PART * STAGES + done % STAGES
            if done >= STAGES:
                at_named_barrier("sync", place, THREADS)
            bar = full.index(place)
            mbarrier.expect(bar, KEYS * D * 4)
            load_box(k, [b, c * KEYS, h, 0], bar, k_smem.index(place))
            load_box(v, [b, c * KEYS, h, 0], bar, v_smem.index(place))
            done += 1
        for first in gl.static_range(0, TOKENS, 32):
            i = first + gl.arange(0, 32, LANES)
            token = tile * TOKENS + i
            row = ((b * T + token).to(gl.int64) * R + r) * (G * D)
            real = (i < TOKENS) & (token < T) & (count >= 0)
            for which in gl.static_range(len(needed)):
                fetch_rows(needed[which], row, real, G * D * 2)
    # no barrier may be left halfway
    for i in range(gl.maximum(done - STAGES, 0), done):
        at_named_barrier("sync", PART * STAGES + i % STAGES, THREADS)
