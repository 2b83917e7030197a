"""The forward of the selected branch over shared unions, in Gluon for Hopper: a program reads each
block that one of its tokens chose once.

A program has the queries of CONSUMERS x WARPS members of one head group, a member per warp: a
token, or neighbours that share block indices. A producer warp copies the blocks of their union, one
after the other, into a ring of CHUNK x CHUNKS slots. A warp computes only the blocks that its
member chose. The warps of a consumer synchronise once per CHUNK blocks.

A scalar is the same in all threads of a consumer, except `warp_number` and values derived from it.
A branch on such a value diverges by warp and must not contain a barrier of several warps.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
)

from ..common import launch, sm90
from ..common.gluon_sm90 import (
    at_named_barrier,
    barriers,
    buffers,
    fetch_rows,
    finish,
    load_box,
    reinterpret,
    thread_barrier,
)
from ..common.key_norms import bounds
from ..common.launch import LOG2_E, CombineInputs, cdiv
from ..common.overrides import requested_sizes
from ..common.precompile import launcher
from ..common.primitives import LARGEST_BOUND
from . import union
from .inputs import Inputs
from .union import Unions

# one compiled kernel for all lengths
LENGTHS = ["T", "limit", "groups", "tiles"]

# consumer warpgroups, which never synchronise with each other
CONSUMERS = gl.constexpr(2)
# warps of each consumer, and rows of a warp, which has one member
WARPS, ROWS = 4, 16
MEMBERS = CONSUMERS.value * WARPS
# chunks of the ring; keys of a product; registers of a consumer thread
CHUNKS, SLICE, REGISTERS = 2, 16, 208
# cost of a union's block, at least: groups overlap if their members have more than this many times
# the union's blocks. On an H200 both kernels took as long if two of four members were equal
OVERLAPPING = 2.0
# supported: slots of a head group; blocks of keys below the limit of `union.store_by_chunks`
MAX_SLOTS, MAX_BLOCKS = 32, 1 << 18
# tiles of a multiprocessor at least: with fewer, too many are idle during the last tiles
MIN_TILES_PER_SM = 8


@gluon.jit
def warp_number():
    """Number of this thread's warp in the program."""
    return gl.inline_asm_elementwise(
        "{.reg .u32 w; mov.u32 w, %tid.x; shr.u32 w, w, 5; shfl.sync.idx.b32 $0, w, 0, 31, -1;}",
        "=r,r",
        [gl.to_tensor(0)],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def tile_coords(nth, groups, tiles, K, R):
    """The nth tile: its number, batch row, head group, KV head and group of tokens. Tiles of a line
    (batch row x head group), which share keys and values in the cache, are adjacent. The last line,
    and every second line before it, starts with its last tokens, whose unions are largest: sizes
    then change gradually, and the last tiles are small."""
    line, group = nth // groups, nth % groups
    if (tiles // groups - line) % 2 == 1:
        group = groups - 1 - group
    return line * groups + group, line // R, line % R, line % R * K // R, group


@gluon.jit
def rows_smem(q, k_smem, v_smem, slot, CONSUMER: gl.constexpr):
    """Shared memory of a consumer's queries: from a slot on, in keys or values."""
    smem = (k_smem if CONSUMER == 0 else v_smem).index(slot)
    return reinterpret(smem, q.dtype, q.block_shape, q.layout)


@gluon.jit
def produce(
    q, k, v, out, combine_cmp, combine_win, unions, sizes, s, ring, G: gl.constexpr,
    WARPS: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr, ADD: gl.constexpr,
    COMBINE: gl.constexpr,
):  # fmt: skip
    """Producer warp. Copies each tile's queries, a consumer's to the slots of keys or of values,
    then its blocks. Prefetches the rows that the epilogue reads into L2."""
    blocks, counts, limit, groups, tiles = unions
    T, K, R = sizes
    k_smem, v_smem, full = ring
    TOKENS: gl.constexpr = q.block_shape[1]
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    E: gl.constexpr = v.block_shape[3]
    THREADS: gl.constexpr = (CONSUMERS * WARPS + 1) * 32
    BYTES: gl.constexpr = k.block_shape[1] * (k.block_shape[3] + v.block_shape[3]) * 2
    done = 0
    for nth in range(gl.program_id(0), tiles, gl.num_programs(0)):
        tile, b, r, h, group = tile_coords(nth, groups, tiles, K, R)
        n = gl.load(counts + tile)
        at = blocks + tile.to(gl.int64) * limit
        e, next_e = gl.load(at, mask=n > 0, other=0), gl.load(at + 1, mask=n > 1, other=0)
        if n >= 0:
            stage = done % CHUNKS
            if done >= CHUNKS:
                for i in gl.static_range(CHUNK):
                    at_named_barrier("sync", stage * CHUNK + i, THREADS)
            bar = full.index(stage)
            mbarrier.expect(bar, BYTES)
            mbarrier.arrive(bar, count=CHUNK - 1)
            for consumer in gl.static_range(CONSUMERS):
                token = (group * CONSUMERS + consumer) * TOKENS
                smem = rows_smem(q, k_smem, v_smem, stage * CHUNK, consumer)
                load_box(q, [b, token, r * G, 0], bar, smem)
            done += 1
        for j in range(0, n, CHUNK):
            stage = done % CHUNKS
            bar = full.index(stage)
            for i in gl.static_range(CHUNK):
                at_key, valid = [b, e.to(gl.int32) * s, h, 0], j + i < n
                slot = stage * CHUNK + i
                if done >= CHUNKS:
                    at_named_barrier("sync", slot, THREADS)
                mbarrier.expect(bar, BYTES, pred=valid)
                mbarrier.arrive(bar, count=1, pred=j + i >= n)
                load_box(k, at_key, bar, k_smem.index(slot), pred=valid)
                load_box(v, at_key, bar, v_smem.index(slot), pred=valid)
                e = next_e
                next_e = gl.load(at + j + i + 2, mask=j + i + 2 < n, other=0)
            done += 1
        for first in gl.static_range(0, CONSUMERS * TOKENS, 32):
            i = first + gl.arange(0, 32, LANES)
            token = group * CONSUMERS * TOKENS + i
            row = ((b * T + token).to(gl.int64) * R + r) * (G * E)
            real = (i < CONSUMERS * TOKENS) & (token < T) & (n >= 0)
            if ADD:
                fetch_rows(out, row, real, G * E * 2)
            if COMBINE:
                fetch_rows(combine_cmp, row, real, G * E * 2)
                fetch_rows(combine_win, row, real, G * E * 2)
    # complete every barrier
    for chunk in range(gl.maximum(done - CHUNKS, 0), done):
        for i in gl.static_range(CHUNK):
            at_named_barrier("sync", chunk % CHUNKS * CHUNK + i, THREADS)


@gluon.jit
def allocate_ring(k, v, CHUNK: gl.constexpr, CHUNKS: gl.constexpr):
    """Ring of slots for keys and values, and a full barrier per chunk."""
    SLOTS: gl.constexpr = CHUNK * CHUNKS
    k_smem, v_smem, full = buffers(k, SLOTS), buffers(v, SLOTS), barriers(CHUNKS, CHUNK)
    fence_async_shared()
    thread_barrier()
    return k_smem, v_smem, full


@gluon.jit
def fold(q, k_tile, v_tile, acc, m, l, scale_log2, BY_BOUND: gl.constexpr, SLICE: gl.constexpr):
    """Fold a block of keys and values into a running softmax, SLICE keys at a time; see
    `primitives.scaled_step`."""
    MMA: gl.constexpr = acc.type.layout
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    for i in gl.static_range(k_tile.shape[0] // SLICE):
        keys = k_tile.slice(i * SLICE, SLICE, 0).permute((1, 0)).load(RIGHT)
        x = mma_v2(q, keys, gl.zeros([q.shape[0], SLICE], gl.float32, MMA))
        if BY_BOUND:
            p = gl.exp2(x * scale_log2 - m[:, None])
        else:
            m_old = m
            m = gl.maximum(m, gl.max(x, 1) * scale_log2)
            origin = gl.where(m == float("-inf"), 0.0, m)
            p, alpha = gl.exp2(x * scale_log2 - origin[:, None]), gl.exp2(m_old - origin)
            acc, l = acc * alpha[:, None], l * alpha
        l += gl.sum(p, 1)
        values = v_tile.slice(i * SLICE, SLICE, 0).load(RIGHT)
        acc = mma_v2(gl.convert_layout(p.to(q.dtype), q.type.layout), values, acc)
    return acc, m, l


@gluon.jit
def consume(
    queries, norms, unions, outputs, combine, sizes, scale_log2, ring, CONSUMER: gl.constexpr,
    G: gl.constexpr, WARPS: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr,
    SLICE: gl.constexpr, BOUNDED: gl.constexpr, ADD: gl.constexpr, COMBINE: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup: attention of its members to the blocks that they chose. Skips tiles of
    negative size."""
    blocks, counts, limit, groups, tiles = unions
    out, lse, layer_out = outputs
    combine_cmp, combine_win, combine_gates, g_b, g_t, g_h, g_3 = combine
    T, K, R = sizes
    k_smem, v_smem, full = ring
    THREADS: gl.constexpr = (CONSUMERS * WARPS + 1) * 32
    TOKENS: gl.constexpr = queries.block_shape[1]
    GROUP: gl.constexpr = queries.block_shape[2]
    M: gl.constexpr = TOKENS * GROUP
    D: gl.constexpr = k_smem.shape[4]
    E: gl.constexpr = v_smem.shape[4]
    BLOCK_N: gl.constexpr = k_smem.shape[2]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    member = CONSUMER * WARPS + warp_number() % WARPS
    done = 0
    for nth in range(gl.program_id(0), tiles, gl.num_programs(0)):
        tile, b, r, h, group = tile_coords(nth, groups, tiles, K, R)
        n = gl.load(counts + tile)
        at = blocks + tile.to(gl.int64) * limit
        e = gl.load(at)  # unused without blocks
        if BOUNDED:
            longest_key = gl.load(norms + b * K + h)
        if n >= 0:
            stage = done % CHUNKS
            mbarrier.wait(full.index(stage), (done // CHUNKS) & 1)
            q_tile = rows_smem(queries, k_smem, v_smem, stage * CHUNK, CONSUMER).reshape([M, D])
            q = q_tile.load(gl.DotOperandLayout(0, MMA, 2))
            m = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
            by_bound = False
            if BOUNDED:
                x = q_tile.load(MMA).to(gl.float32)
                bound = gl.sqrt(gl.sum(x * x, 1)) * longest_key
                bound = bound * gl.abs(scale_log2)
                by_bound = gl.max(bound, 0) <= LARGEST_BOUND
                m = gl.where(by_bound, bound, m)
            fence_async_shared()  # order the loads before the next TMA write
            for other in gl.static_range(CHUNK):
                at_named_barrier("arrive", stage * CHUNK + other, THREADS)
            done += 1

            acc = gl.zeros([M, E], gl.float32, MMA)
            l = gl.zeros([M], gl.float32, gl.SliceLayout(1, MMA))
            # subtracts the row bound, or else the running maximum
            for way in gl.static_range(0 if BOUNDED else 1, 2):
                count = n
                if BOUNDED:
                    count = gl.where(by_bound == (way == 0), n, 0)
                for j in range(0, count, CHUNK):
                    stage = done % CHUNKS
                    mbarrier.wait(full.index(stage), (done // CHUNKS) & 1)
                    for i in range(CHUNK):
                        chosen = ((e >> 32).to(gl.int32) >> member) & 1
                        e = gl.load(at + j + i + 1, mask=j + i + 1 < n, other=0)
                        slot = stage * CHUNK + i
                        if chosen != 0:
                            acc, m, l = fold(
                                q, k_smem.index(slot).reshape([BLOCK_N, D]),
                                v_smem.index(slot).reshape([BLOCK_N, E]), acc, m, l, scale_log2,
                                way == 0, SLICE,
                            )  # fmt: skip
                        at_named_barrier("arrive", slot, THREADS)
                    done += 1
            token = (group * CONSUMERS + CONSUMER) * TOKENS
            finish(
                acc, m, l, out, lse, combine_cmp, combine_win, combine_gates, layer_out, b, r,
                token, T, R, g_b, g_t, g_h, g_3, G, GROUP, WARPS, ADD, COMBINE,
            )  # fmt: skip


@gluon.jit(do_not_specialize=LENGTHS)
def nsa_selected_fwd_union_sm90(
    q, k, v, norms, blocks, counts, out, lse, combine_cmp, combine_win, combine_gates, layer_out,
    T, K, R, limit, s, groups, tiles, scale_log2, g_b, g_t, g_h, g_3,
    G: gl.constexpr, WARPS: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr,
    SLICE: gl.constexpr, REGISTERS: gl.constexpr, BOUNDED: gl.constexpr, ADD: gl.constexpr,
    COMBINE: gl.constexpr,
):  # fmt: skip
    """One persistent program; a consumer's queries are a box of q. Writes out and lse, with ADD
    combined with the previous out and lse; with COMBINE also the layer's output."""
    unions, sizes = (blocks, counts, limit, groups, tiles), (T, K, R)
    outputs = (out, lse, layer_out)
    combine = (combine_cmp, combine_win, combine_gates, g_b, g_t, g_h, g_3)
    ring = allocate_ring(k, v, CHUNK, CHUNKS)
    gl.warp_specialize(
        [
            (consume, (
                q, norms, unions, outputs, combine, sizes, scale_log2, ring, 0, G, WARPS, CHUNK,
                CHUNKS, SLICE, BOUNDED, ADD, COMBINE,
            )),
            (consume, (
                q, norms, unions, outputs, combine, sizes, scale_log2, ring, 1, G, WARPS, CHUNK,
                CHUNKS, SLICE, BOUNDED, ADD, COMBINE,
            )),
            (produce, (
                q, k, v, out, combine_cmp, combine_win, unions, sizes, s, ring, G, WARPS, CHUNK,
                CHUNKS, ADD, COMBINE,
            )),
        ],
        [WARPS, 1],
        [REGISTERS, 24],
    )  # fmt: skip


def is_supported(inputs: Inputs) -> bool:
    """Whether the kernel supports a call and has enough tiles to be faster. With
    `launch.using({"union_sm90": True})` any number of tiles is enough; with False, or with a tile
    config of the caller, the kernel never runs."""
    q, k, selection = inputs.q, inputs.k, inputs.selection
    allowed = launch.override.get("union_sm90")
    if allowed is False or requested_sizes("query_major.forward") or not sm90.available(q):
        return False
    (B, T, R, n), stride = selection.block_indices.shape, selection.stride
    rows = launch.FEW_ROWS <= inputs.groups * stride <= ROWS
    if stride > 1:  # a tile starts at an aligned group of tokens
        rows = rows and ROWS % stride == 0
        rows = rows and selection.starts is None and selection.start % stride == 0
    slots = 0 < n <= MAX_SLOTS and k.shape[1] // selection.s < MAX_BLOCKS
    least = 0 if allowed else MIN_TILES_PER_SM * sm90.multiprocessors(q.device)
    enough = B * R * (T // (MEMBERS * stride)) >= least
    return rows and slots and enough and inputs.suits_gluon


def allocate_shared(inputs: Inputs) -> Unions:
    """Shared unions, unwritten."""
    selection = inputs.selection
    blocks = cdiv(inputs.k.shape[1], selection.s)
    return union.allocate(
        selection, MEMBERS, min(MEMBERS * selection.block_indices.shape[3], blocks)
    )


def forward(
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    add: bool,
    norms: Tensor | None,
    combine_inputs: CombineInputs | None,
    unions: Unions,
) -> None:
    """Writes out and lse over the top-n blocks of groups without unions of their own, with `add`
    combined with their previous values."""
    q, k, v, selection, scale = inputs
    tiles, stride, box = unions.counts.numel(), selection.stride, [1, selection.s, 1, q.shape[-1]]
    if not tiles:
        return
    # a program fills a multiprocessor
    launcher(nsa_selected_fwd_union_sm90, (min(tiles, sm90.multiprocessors(q.device)),))(
        q=sm90.box(q, [1, WARPS * stride, ROWS // stride, q.shape[-1]]), k=sm90.box(k, box),
        v=sm90.box(v, box), blocks=unions.blocks, counts=unions.counts, out=out, lse=lse,
        T=q.shape[1], K=k.shape[2], R=selection.block_indices.shape[2], limit=unions.limit,
        s=selection.s, groups=unions.groups, tiles=tiles, scale_log2=scale * LOG2_E,
        G=inputs.groups, WARPS=WARPS, CHUNK=union.CHUNK, CHUNKS=CHUNKS, SLICE=SLICE,
        REGISTERS=REGISTERS, ADD=add, num_warps=WARPS, **bounds(norms),
        **launch.combine_arguments(combine_inputs),
    )  # fmt: skip
