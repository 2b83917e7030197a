"""The forward of the selected branch over unions, in Gluon for Hopper: a program reads each block
that one of its tokens chose once.

A program has the queries of CONSUMERS x WARPS members of one head group, a member per warp: a
token, or neighbours that share block indices. A producer warp copies the blocks of their union, one
after the other, into a ring of CHUNK x CHUNKS slots. A warp computes only the blocks that its
member chose. The warps of a consumer synchronise once per CHUNK blocks.

A scalar is the same in all threads of a consumer, except `warp_number` and values derived from it.
A branch on such a value diverges by warp and must not contain a barrier of several warps.
"""

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, mma_v2

from ..common import gluon_sm90 as hopper
from ..common import launch
from ..common.precompile import launcher
from . import query_major
from .inputs import Args, Inputs
from .query_major import Unions

# one compiled kernel for all lengths
LENGTHS = ["T", "limit", "groups", "tiles"]

# consumer warpgroups, which never synchronise with each other, and warps of each
CONSUMERS, WARPS = gl.constexpr(2), gl.constexpr(4)
THREADS = gl.constexpr((CONSUMERS.value * WARPS.value + 1) * 32)
# rows of a warp, which has one member
ROWS, MEMBERS = 16, CONSUMERS.value * WARPS.value
# blocks of a chunk; chunks of the ring; keys of a product; registers of a consumer thread
CHUNK, CHUNKS, SLICE = gl.constexpr(query_major.CHUNK), gl.constexpr(2), gl.constexpr(16)
REGISTERS = gl.constexpr(208)
# supported: slots of a head group; blocks of keys below the limit of `query_major.store_by_chunks`
MAX_SLOTS, MAX_BLOCKS = 32, 1 << 18
# tiles of a multiprocessor at least: with fewer, too many are idle during the last tiles
MIN_TILES_PER_SM = 8

# tensors of `query_major.Unions` and their sizes; `tiles` are all unions
Tiles = namedtuple("Tiles", "blocks counts limit groups tiles")
# slots of keys and values, and a full barrier per chunk
Ring = namedtuple("Ring", "k v full")


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
def tile_coords(nth, unions, F: gl.constexpr):
    """The nth tile: its number, batch row, head group, KV head and group of tokens. Tiles of a line
    (batch row x head group), which share keys and values in the cache, are adjacent. The last line,
    and every second line before it, starts with its last tokens, whose unions are largest: sizes
    then change gradually, and the last tiles are small."""
    groups = unions.groups
    line, group = nth // groups, nth % groups
    if (unions.tiles // groups - line) % 2 == 1:
        group = groups - 1 - group
    return line * groups + group, line // F.R, line % F.R, line % F.R * F.K // F.R, group


@gluon.jit
def rows_smem(q, ring, slot, CONSUMER: gl.constexpr):
    """Shared memory of a consumer's queries: from a slot on, in keys or values."""
    smem = (ring.k if CONSUMER == 0 else ring.v).index(slot)
    return hopper.reinterpret(smem, q.dtype, q.block_shape, q.layout)


@gluon.jit
def produce(q, k, v, unions, ring, F: gl.constexpr):
    """Producer warp. Copies each tile's queries, a consumer's to the slots of keys or of values,
    then its blocks."""
    TOKENS: gl.constexpr = q.block_shape[1]
    BYTES: gl.constexpr = F.s * F.D * 4
    turn = 0
    for nth in range(gl.program_id(0), unions.tiles, gl.num_programs(0)):
        tile, b, r, h, group = tile_coords(nth, unions, F)
        n = gl.load(unions.counts + tile)
        offset = unions.blocks + tile.to(gl.int64) * unions.limit
        e, next_e = gl.load(offset, mask=n > 0, other=0), gl.load(offset + 1, mask=n > 1, other=0)
        stage = turn % CHUNKS
        if turn >= CHUNKS:
            for i in gl.static_range(CHUNK):
                hopper.named_barrier("sync", stage * CHUNK + i, THREADS)
        bar = ring.full.index(stage)
        mbarrier.expect(bar, BYTES)
        mbarrier.arrive(bar, count=CHUNK - 1)
        for consumer in gl.static_range(CONSUMERS):
            token = (group * CONSUMERS + consumer) * TOKENS
            smem = rows_smem(q, ring, stage * CHUNK, consumer)
            hopper.load_box(q, [b, token, r * F.G, 0], bar, smem)
        turn += 1
        for j in range(0, n, CHUNK):
            stage = turn % CHUNKS
            bar = ring.full.index(stage)
            for i in gl.static_range(CHUNK):
                corner, valid = [b, e.to(gl.int32) * F.s, h, 0], j + i < n
                slot = stage * CHUNK + i
                if turn >= CHUNKS:
                    hopper.named_barrier("sync", slot, THREADS)
                mbarrier.expect(bar, BYTES, pred=valid)
                mbarrier.arrive(bar, count=1, pred=j + i >= n)
                hopper.load_box(k, corner, bar, ring.k.index(slot), pred=valid)
                hopper.load_box(v, corner, bar, ring.v.index(slot), pred=valid)
                e = next_e
                next_e = gl.load(offset + j + i + 2, mask=j + i + 2 < n, other=0)
            turn += 1
    # complete every barrier
    for chunk in range(gl.maximum(turn - CHUNKS, 0), turn):
        for i in gl.static_range(CHUNK):
            hopper.named_barrier("sync", chunk % CHUNKS * CHUNK + i, THREADS)


@gluon.jit
def fold(q, k_tile, v_tile, acc, m, l, scale_log2):
    """`primitives.scaled_step` of a block of keys and values, by products of SLICE keys."""
    MMA: gl.constexpr = acc.type.layout
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    SLICES: gl.constexpr = k_tile.shape[0] // SLICE
    zero, logits = gl.zeros([q.shape[0], SLICE], gl.float32, MMA), ()
    for i in gl.static_range(SLICES):
        keys = k_tile.slice(i * SLICE, SLICE, 0).permute((1, 0)).load(RIGHT)
        logits += (mma_v2(q, keys, zero),)
    top = logits[0]
    for i in gl.static_range(1, SLICES):
        top = gl.maximum(top, logits[i])
    m_old, m = m, gl.maximum(m, gl.max(top, 1) * scale_log2)
    origin = gl.where(m == float("-inf"), 0.0, m)
    alpha = gl.exp2(m_old - origin)
    acc, p_sum = acc * alpha[:, None], zero
    for i in gl.static_range(SLICES):
        p = gl.exp2(logits[i] * scale_log2 - origin[:, None])
        p_sum += p
        values = v_tile.slice(i * SLICE, SLICE, 0).load(RIGHT)
        acc = mma_v2(gl.convert_layout(p.to(q.dtype), q.type.layout), values, acc)
    l = l * alpha + gl.sum(p_sum, 1)
    return acc, m, l


@gluon.jit
def consume(
    queries, unions, out, lse, combine, T, scale_log2, ring, CONSUMER: gl.constexpr,
    F: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup: attention of its members to their blocks."""
    TOKENS: gl.constexpr = queries.block_shape[1]
    GROUP: gl.constexpr = queries.block_shape[2]
    M: gl.constexpr = TOKENS * GROUP
    D: gl.constexpr = F.D
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    member = CONSUMER * WARPS + warp_number() % WARPS
    turn = 0
    for nth in range(gl.program_id(0), unions.tiles, gl.num_programs(0)):
        tile, b, r, _h, group = tile_coords(nth, unions, F)
        n = gl.load(unions.counts + tile)
        offset = unions.blocks + tile.to(gl.int64) * unions.limit
        e = gl.load(offset)  # unused without blocks
        stage = turn % CHUNKS
        mbarrier.wait(ring.full.index(stage), (turn // CHUNKS) & 1)
        q_tile = rows_smem(queries, ring, stage * CHUNK, CONSUMER).reshape([M, D])
        q = q_tile.load(gl.DotOperandLayout(0, MMA, 2))
        fence_async_shared()  # order the loads before the next TMA write
        for number in gl.static_range(CHUNK):
            hopper.named_barrier("arrive", stage * CHUNK + number, THREADS)
        turn += 1

        acc = gl.zeros([M, D], gl.float32, MMA)
        m = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
        l = gl.zeros([M], gl.float32, gl.SliceLayout(1, MMA))
        for j in range(0, n, CHUNK):
            stage = turn % CHUNKS
            mbarrier.wait(ring.full.index(stage), (turn // CHUNKS) & 1)
            for i in range(CHUNK):
                chosen = ((e >> 32).to(gl.int32) >> member) & 1
                e = gl.load(offset + j + i + 1, mask=j + i + 1 < n, other=0)
                slot = stage * CHUNK + i
                if chosen != 0:
                    acc, m, l = fold(
                        q, ring.k.index(slot).reshape([F.s, D]),
                        ring.v.index(slot).reshape([F.s, D]), acc, m, l, scale_log2,
                    )  # fmt: skip
                hopper.named_barrier("arrive", slot, THREADS)
            turn += 1
        token = (group * CONSUMERS + CONSUMER) * TOKENS
        hopper.finish(
            acc, m, l, out, lse, combine, b, r, token, T, GROUP, WARPS, F
        )  # fmt: skip


@gluon.jit(do_not_specialize=LENGTHS)
def nsa_selected_fwd_union_sm90(
    q, k, v, blocks, counts, out, lse, combine, T, limit, groups, tiles, scale_log2,
    F: gl.constexpr,
):  # fmt: skip
    """One persistent program; a consumer's queries are a box of q. Writes out and lse, with ADD
    combined with the previous out and lse; with COMBINE also the layer's output."""
    SLOTS: gl.constexpr = CHUNK * CHUNKS
    unions = Tiles(blocks, counts, limit, groups, tiles)
    ring = Ring(hopper.buffers(k, SLOTS), hopper.buffers(v, SLOTS), hopper.barriers(CHUNKS, CHUNK))
    fence_async_shared()
    hopper.thread_barrier()
    gl.warp_specialize(
        [
            (consume, (q, unions, out, lse, combine, T, scale_log2, ring, 0, F)),
            (consume, (q, unions, out, lse, combine, T, scale_log2, ring, 1, F)),
            (produce, (q, k, v, unions, ring, F)),
        ],
        [WARPS, 1],
        [REGISTERS, 24],
    )  # fmt: skip


def is_supported(inputs: Inputs) -> bool:
    """Whether the kernel supports a call on a GPU that runs Gluon kernels, and has enough tiles to
    be faster. With `launch.using({"union_sm90": True})` any number of tiles is enough."""
    facts, F, start = inputs.facts, inputs.facts.F, inputs.selection.start
    # a tile starts at an aligned group of tokens
    aligned = F.stride == 1 or (ROWS % F.stride == start % F.stride == 0 and not F.RAGGED)
    fits = launch.FEW_ROWS <= facts.rows <= ROWS and facts.S // F.s < MAX_BLOCKS
    forced, device = launch.override.get("union_sm90"), inputs.q.device
    min_tiles = 0 if forced else MIN_TILES_PER_SM * launch.multiprocessors(device)
    enough = facts.B * F.R * (facts.T // (MEMBERS * F.stride)) >= min_tiles
    slots = 0 < F.n <= MAX_SLOTS
    suits = inputs.suits_gluon("union_sm90", "query_major.forward")
    return aligned and fits and slots and enough and suits


def forward(inputs: Inputs, unions: Unions, outputs: Args, flags: Args) -> None:
    """Writes `outputs`, arguments of the kernel."""
    q, F, tiles = inputs.q, inputs.facts.F, unions.counts.numel()
    box, q_box = [1, F.s, 1, F.D], [1, WARPS.value * F.stride, ROWS // F.stride, F.D]
    if not tiles:
        return
    # a program fills a multiprocessor
    launcher(nsa_selected_fwd_union_sm90, (min(tiles, launch.multiprocessors(q.device)),))(
        q=launch.gluon_box(q, q_box), k=launch.gluon_box(inputs.k, box),
        v=launch.gluon_box(inputs.v, box), blocks=unions.blocks, counts=unions.counts,
        **outputs, T=inputs.facts.T, limit=unions.blocks.shape[3], groups=unions.counts.shape[2],
        tiles=tiles, scale_log2=inputs.scale * launch.LOG2_E,
        F=F._replace(**flags), num_warps=WARPS.value,
    )  # fmt: skip
