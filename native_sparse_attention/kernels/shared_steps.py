"""What the kernels of `shared_blocks.py` and `shared_backward.py` have in common: the warp that
reads, the ring that it reads into, and where rows are."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

# one compiled kernel for all lengths
LENGTHS = ["T", "limit", "groups", "tiles"]


@gluon.jit
def warp_number():
    return gl.inline_asm_elementwise(
        "{.reg .u32 w; mov.u32 w, %tid.x; shr.u32 w, w, 5; shfl.sync.idx.b32 $0, w, 0, 31, -1;}",
        "=r,r",
        [gl.to_tensor(0)],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def place_of(tile, groups, K, R):
    """Row, group of heads, KV head, and group of tokens of a tile."""
    line = tile // groups
    return line // R, line % R, line % R * K // R, tile % groups


@gluon.jit
def read(
    rows, k, v, entries, counts, K, R, limit, s, groups, tiles, k_smem, v_smem, full, empty,
    G: gl.constexpr, PARTS: gl.constexpr, WARPS: gl.constexpr,
    CHUNK: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    """The warp that reads, as there is room: of each tile its rows of tensors (queries, and what
    else there is), where keys and values of a block would be, and then its blocks."""
    BYTES: gl.constexpr = k.block_shape[1] * (k.block_shape[3] + v.block_shape[3]) * 2
    done = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, r, h, group = place_of(tile, groups, K, R)
        n = gl.load(counts + tile)
        at = entries + tile.to(gl.int64) * limit
        e, ahead = gl.load(at, mask=n > 0, other=0), gl.load(at + 1, mask=n > 1, other=0)
        for i in gl.static_range(CHUNK):
            turn = done % CHUNKS
            mbarrier.wait(empty[i].index(turn), ((done // CHUNKS) & 1) ^ 1)
            bar = full[i].index(turn)
            if i < len(rows):
                mbarrier.expect(bar, BYTES)
                for part in gl.static_range(PARTS):
                    smem = (k_smem if part == 0 else v_smem).index(turn * CHUNK + i)
                    smem = smem._reinterpret(rows[i].dtype, rows[i].block_shape, rows[i].layout)
                    token = (group * PARTS + part) * WARPS
                    tma.async_copy_global_to_shared(rows[i], [b, token, r * G, 0], bar, smem)
            else:
                mbarrier.arrive(bar, count=1)
        done += 1
        for j in range(0, n, CHUNK):
            turn = done % CHUNKS
            for i in gl.static_range(CHUNK):
                key, there = e.to(gl.int32) * s, j + i < n
                e = ahead
                ahead = gl.load(at + j + i + 2, mask=j + i + 2 < n, other=0)
                mbarrier.wait(empty[i].index(turn), ((done // CHUNKS) & 1) ^ 1)
                bar = full[i].index(turn)
                mbarrier.expect(bar, BYTES, pred=there)
                mbarrier.arrive(bar, count=1, pred=j + i >= n)
                place = turn * CHUNK + i
                tma.async_copy_global_to_shared(
                    k, [b, key, h, 0], bar, k_smem.index(place), pred=there
                )
                tma.async_copy_global_to_shared(
                    v, [b, key, h, 0], bar, v_smem.index(place), pred=there
                )
            done += 1


@gluon.constexpr_function
def flat(warps, width):
    """Of a tile's rows, 16 in each warp: as products lie, but for 8 features side by side in a
    thread. Only threads of one row exchange them."""
    features = [[0, 1 << bit] for bit in range(width.bit_length() - 1)]
    rows = [[1 << bit, 0] for bit in range(3 + warps.bit_length())]
    return gl.DistributedLinearLayout(
        reg_bases=[*features[:3], *features[5:], rows[3]],
        lane_bases=[*features[3:5], *rows[:3]],
        warp_bases=rows[4:],
        block_bases=[],
        shape=[16 * warps, width],
    )


@gluon.jit
def rows_of(
    b, r, first, T, R, G: gl.constexpr, ROWS: gl.constexpr, M: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Of the rows of tokens from `first` on: their numbers among rows of [B T H], and whether they
    are any."""
    i = gl.arange(0, M, LAYOUT)
    token, g = first + i // ROWS, i % ROWS
    return (b * T + token).to(gl.int64) * (R * G) + r * G + g, (g < G) & (token < T)


@gluon.jit
def load_row_block(base, row, E: gl.constexpr, feature, real):
    return gl.load(base + row[:, None] * E + feature[None], mask=real[:, None], other=0.0).to(
        gl.float32
    )


@gluon.jit
def ring(k, v, PARTS: gl.constexpr, WARPS: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr):
    """Room for keys and values, and for each place of a chunk the barriers of those that are there
    and of those that are done with."""
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    PLACES: gl.constexpr = CHUNK * CHUNKS
    k_smem = gl.allocate_shared_memory(k.dtype, [PLACES] + k.block_shape, k.layout)  # noqa: RUF005
    v_smem = gl.allocate_shared_memory(v.dtype, [PLACES] + v.block_shape, v.layout)  # noqa: RUF005
    full, empty = (), ()
    for _ in gl.static_range(CHUNK):
        full = full + (gl.allocate_shared_memory(gl.int64, [CHUNKS, 1], BAR),)  # noqa: RUF005
        empty = empty + (gl.allocate_shared_memory(gl.int64, [CHUNKS, 1], BAR),)  # noqa: RUF005
    for i in gl.static_range(CHUNK):
        for turn in gl.static_range(CHUNKS):
            mbarrier.init(full[i].index(turn), count=1)
            mbarrier.init(empty[i].index(turn), count=PARTS * WARPS * 32)
    fence_async_shared()
    gl.thread_barrier()
    return k_smem, v_smem, full, empty
