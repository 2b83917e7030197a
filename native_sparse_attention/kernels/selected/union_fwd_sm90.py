"""The selected branch of neighbouring queries that chose differently: each block that one of them
chose is read once for all, and attended to by those that chose it. In Gluon, for a Hopper.

A program holds the queries of PARTS x WARPS lists, of one group of heads, one list a warp: of a
token, or of neighbours that share it. One warp more reads: the blocks of their union, one after the
other, into a ring of CHUNK x CHUNKS places. A warp attends to a block that its list holds and
passes by the others; the warps of a part meet once in CHUNK blocks. So nothing is computed that is
masked, and little is waited for.

A scalar is the same in all threads of a part, but for `warp_number` and what is made of it: a
branch on that is one that each warp takes for itself, and may hold nothing for which warps meet.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
)

from ..common.buffers_sm90 import at_named_barrier, barriers, buffers
from ..common.dialect_sm90 import load_box, reinterpret, thread_barrier
from ..common.epilogue_sm90 import fetch_rows, finish
from ..common.primitives import LARGEST_BOUND

# one compiled kernel for all lengths
LENGTHS = ["T", "limit", "groups", "tiles"]

# groups of warps that never meet
PARTS = gl.constexpr(2)


@gluon.jit
def warp_number():
    """Of the program's warps, this thread's."""
    return gl.inline_asm_elementwise(
        "{.reg .u32 w; mov.u32 w, %tid.x; shr.u32 w, w, 5; shfl.sync.idx.b32 $0, w, 0, 31, -1;}",
        "=r,r",
        [gl.to_tensor(0)],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def place_of(nth, groups, tiles, K, R):
    """The nth tile; its row, group of heads, KV head, and group of tokens. Line by line, a row and
    group of heads, whose keys and values stay in the cache; of the last one, and of every second
    before it, the last tokens first, whose unions are largest: so tiles get larger and smaller
    evenly, and those at the end are small."""
    line, group = nth // groups, nth % groups
    if (tiles // groups - line) % 2 == 1:
        group = groups - 1 - group
    return line * groups + group, line // R, line % R, line % R * K // R, group


@gluon.jit
def rows_smem(q, k_smem, v_smem, place, PART: gl.constexpr):
    """Where the queries of a part are: from that place on, in keys or values."""
    smem = (k_smem if PART == 0 else v_smem).index(place)
    return reinterpret(smem, q.dtype, q.block_shape, q.layout)


@gluon.jit
def read(
    q, k, v, out, combine_cmp, combine_win, entries, counts, T, K, R, limit, s, groups, tiles,
    k_smem, v_smem, full, G: gl.constexpr, WARPS: gl.constexpr, CHUNK: gl.constexpr,
    CHUNKS: gl.constexpr, ADD: gl.constexpr, COMBINE: gl.constexpr,
):  # fmt: skip
    """The warp that reads, as there is room: of each tile its queries, a part's where keys or
    values of a block would be, and then its blocks. What is needed at its end comes nearer."""
    TOKENS: gl.constexpr = q.block_shape[1]
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    E: gl.constexpr = v.block_shape[3]
    THREADS: gl.constexpr = (PARTS * WARPS + 1) * 32
    BYTES: gl.constexpr = k.block_shape[1] * (k.block_shape[3] + v.block_shape[3]) * 2
    done = 0
    for nth in range(gl.program_id(0), tiles, gl.num_programs(0)):
        tile, b, r, h, group = place_of(nth, groups, tiles, K, R)
        n = gl.load(counts + tile)
        at = entries + tile.to(gl.int64) * limit
        e, ahead = gl.load(at, mask=n > 0, other=0), gl.load(at + 1, mask=n > 1, other=0)
        if n >= 0:
            turn = done % CHUNKS
            if done >= CHUNKS:
                for i in gl.static_range(CHUNK):
                    at_named_barrier("sync", turn * CHUNK + i, THREADS)
            bar = full.index(turn)
            mbarrier.expect(bar, BYTES)
            mbarrier.arrive(bar, count=CHUNK - 1)
            for part in gl.static_range(PARTS):
                token = (group * PARTS + part) * TOKENS
                smem = rows_smem(q, k_smem, v_smem, turn * CHUNK, part)
                load_box(q, [b, token, r * G, 0], bar, smem)
            done += 1
        for j in range(0, n, CHUNK):
            turn = done % CHUNKS
            bar = full.index(turn)
            for i in gl.static_range(CHUNK):
                at_key, there = [b, e.to(gl.int32) * s, h, 0], j + i < n
                place = turn * CHUNK + i
                if done >= CHUNKS:
                    at_named_barrier("sync", place, THREADS)
                mbarrier.expect(bar, BYTES, pred=there)
                mbarrier.arrive(bar, count=1, pred=j + i >= n)
                load_box(k, at_key, bar, k_smem.index(place), pred=there)
                load_box(v, at_key, bar, v_smem.index(place), pred=there)
                e = ahead
                ahead = gl.load(at + j + i + 2, mask=j + i + 2 < n, other=0)
            done += 1
        for first in gl.static_range(0, PARTS * TOKENS, 32):
            i = first + gl.arange(0, 32, LANES)
            token = group * PARTS * TOKENS + i
            row = ((b * T + token).to(gl.int64) * R + r) * (G * E)
            real = (i < PARTS * TOKENS) & (token < T) & (n >= 0)
            if ADD:
                fetch_rows(out, row, real, G * E * 2)
            if COMBINE:
                fetch_rows(combine_cmp, row, real, G * E * 2)
                fetch_rows(combine_win, row, real, G * E * 2)
    # none is left behind
    for chunk in range(gl.maximum(done - CHUNKS, 0), done):
        for i in gl.static_range(CHUNK):
            at_named_barrier("sync", chunk % CHUNKS * CHUNK + i, THREADS)


@gluon.jit
def chunks(k, v, CHUNK: gl.constexpr, CHUNKS: gl.constexpr):
    """Room for keys and values, and of each chunk the barrier of what is there."""
    PLACES: gl.constexpr = CHUNK * CHUNKS
    k_smem, v_smem, full = buffers(k, PLACES), buffers(v, PLACES), barriers(CHUNKS, CHUNK)
    fence_async_shared()
    thread_barrier()
    return k_smem, v_smem, full


@gluon.jit
def fold(q, k_tile, v_tile, acc, m, l, scale_log2, BY_BOUND: gl.constexpr, SLICE: gl.constexpr):
    """A block of keys and values into a running softmax, SLICE keys at a time; see
    `device.scaled_step`."""
    MMA: gl.constexpr = acc.type.layout
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    for i in gl.static_range(k_tile.shape[0] // SLICE):
        keys = k_tile.slice(i * SLICE, SLICE, 0).permute((1, 0)).load(RIGHT)
        x = mma_v2(q, keys, gl.zeros([q.shape[0], SLICE], gl.float32, MMA))
        if BY_BOUND:
            p = gl.exp2(x * scale_log2 - m[:, None])
        else:
            before = m
            m = gl.maximum(m, gl.max(x, 1) * scale_log2)
            origin = gl.where(m == float("-inf"), 0.0, m)
            p, alpha = gl.exp2(x * scale_log2 - origin[:, None]), gl.exp2(before - origin)
            acc, l = acc * alpha[:, None], l * alpha
        l += gl.sum(p, 1)
        values = v_tile.slice(i * SLICE, SLICE, 0).load(RIGHT)
        acc = mma_v2(gl.convert_layout(p.to(q.dtype), q.type.layout), values, acc)
    return acc, m, l


@gluon.jit
def attend(
    queries, norms, entries, counts, out, lse, combine_cmp, combine_win, combine_gates, layer_out,
    T, K, R, limit, groups, tiles, scale_log2, g_b, g_t, g_h, g_3, k_smem, v_smem, full,
    PART: gl.constexpr, G: gl.constexpr, WARPS: gl.constexpr,
    CHUNK: gl.constexpr, CHUNKS: gl.constexpr, SLICE: gl.constexpr,
    BOUNDED: gl.constexpr, ADD: gl.constexpr, COMBINE: gl.constexpr,
):  # fmt: skip
    """A part: attention of its lists' tokens to the blocks that these hold. Tiles of less than none
    are left out."""
    THREADS: gl.constexpr = (PARTS * WARPS + 1) * 32
    TOKENS: gl.constexpr = queries.block_shape[1]
    GROUP: gl.constexpr = queries.block_shape[2]
    M: gl.constexpr = TOKENS * GROUP
    D: gl.constexpr = k_smem.shape[4]
    E: gl.constexpr = v_smem.shape[4]
    BLOCK_N: gl.constexpr = k_smem.shape[2]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    number = PART * WARPS + warp_number() % WARPS
    done = 0
    for nth in range(gl.program_id(0), tiles, gl.num_programs(0)):
        tile, b, r, h, group = place_of(nth, groups, tiles, K, R)
        n = gl.load(counts + tile)
        at = entries + tile.to(gl.int64) * limit
        e = gl.load(at)  # of no meaning where there is none
        if BOUNDED:
            longest_key = gl.load(norms + b * K + h)
        if n >= 0:
            turn = done % CHUNKS
            mbarrier.wait(full.index(turn), (done // CHUNKS) & 1)
            q_tile = rows_smem(queries, k_smem, v_smem, turn * CHUNK, PART).reshape([M, D])
            q = q_tile.load(gl.DotOperandLayout(0, MMA, 2))
            m = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
            by_bound = False
            if BOUNDED:
                x = q_tile.load(MMA).to(gl.float32)
                bound = gl.sqrt(gl.sum(x * x, 1)) * longest_key
                bound = bound * gl.abs(scale_log2)
                by_bound = gl.max(bound, 0) <= LARGEST_BOUND
                m = gl.where(by_bound, bound, m)
            fence_async_shared()  # what was read may be overwritten from outside
            for other in gl.static_range(CHUNK):
                at_named_barrier("arrive", turn * CHUNK + other, THREADS)
            done += 1

            acc = gl.zeros([M, E], gl.float32, MMA)
            l = gl.zeros([M], gl.float32, gl.SliceLayout(1, MMA))
            # by the bound, or else by the maximum
            for way in gl.static_range(0 if BOUNDED else 1, 2):
                count = n
                if BOUNDED:
                    count = gl.where(by_bound == (way == 0), n, 0)
                for j in range(0, count, CHUNK):
                    turn = done % CHUNKS
                    mbarrier.wait(full.index(turn), (done // CHUNKS) & 1)
                    for i in range(CHUNK):
                        chosen = ((e >> 32).to(gl.int32) >> number) & 1
                        e = gl.load(at + j + i + 1, mask=j + i + 1 < n, other=0)
                        place = turn * CHUNK + i
                        if chosen != 0:
                            acc, m, l = fold(
                                q, k_smem.index(place).reshape([BLOCK_N, D]),
                                v_smem.index(place).reshape([BLOCK_N, E]), acc, m, l, scale_log2,
                                way == 0, SLICE,
                            )  # fmt: skip
                        at_named_barrier("arrive", place, THREADS)
                    done += 1
            token = (group * PARTS + PART) * TOKENS
            finish(
                acc, m, l, out, lse, combine_cmp, combine_win, combine_gates, layer_out, b, r,
                token, T, R, g_b, g_t, g_h, g_3, G, GROUP, WARPS, ADD, COMBINE,
            )  # fmt: skip


@gluon.jit(do_not_specialize=LENGTHS)
def nsa_selected_fwd_union_sm90(
    q, k, v, norms, entries, counts, out, lse, combine_cmp, combine_win, combine_gates, layer_out,
    T, K, R, limit, s, groups, tiles, scale_log2, g_b, g_t, g_h, g_3,
    G: gl.constexpr, WARPS: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr,
    SLICE: gl.constexpr, REGISTERS: gl.constexpr, BOUNDED: gl.constexpr, ADD: gl.constexpr,
    COMBINE: gl.constexpr,
):  # fmt: skip
    """One program: every so many tiles, of the tokens of a group of lists, those of a part a box of
    q. Writes out and lse, with ADD of the keys seen so far and these; and with MIX the layer's
    output."""
    k_smem, v_smem, full = chunks(k, v, CHUNK, CHUNKS)
    gl.warp_specialize(
        [
            (attend, (
                q, norms, entries, counts, out, lse, combine_cmp, combine_win, combine_gates,
                layer_out, T, K, R, limit, groups, tiles, scale_log2, g_b, g_t, g_h, g_3, k_smem,
                v_smem, full, 0, G, WARPS, CHUNK, CHUNKS, SLICE, BOUNDED, ADD, COMBINE,
            )),
            (attend, (
                q, norms, entries, counts, out, lse, combine_cmp, combine_win, combine_gates,
                layer_out, T, K, R, limit, groups, tiles, scale_log2, g_b, g_t, g_h, g_3, k_smem,
                v_smem, full, 1, G, WARPS, CHUNK, CHUNKS, SLICE, BOUNDED, ADD, COMBINE,
            )),
            (read, (
                q, k, v, out, combine_cmp, combine_win, entries, counts, T, K, R, limit, s, groups,
                tiles, k_smem, v_smem, full, G, WARPS, CHUNK, CHUNKS, ADD, COMBINE,
            )),
        ],
        [WARPS, 1],
        [REGISTERS, 24],
    )  # fmt: skip
