"""The backward of `shared_blocks.py`: dq. dk and dv are formed block by block (`pairs.py`)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, mma_v2

from .shared_steps import LENGTHS, flat, place_of, read, ring, rows_of, warp_number


@gluon.jit
def fold_grad(
    q, d_out, k_tile, v_tile, acc, lse, delta, scale_log2, GATED: gl.constexpr, SLICE: gl.constexpr
):  # fmt: skip
    """What a block of keys and values adds to dq, SLICE keys at a time; see
    `device.softmax_grad`."""
    MMA: gl.constexpr = acc.type.layout
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    for i in gl.static_range(k_tile.shape[0] // SLICE):
        zeros = gl.zeros([q.shape[0], SLICE], gl.float32, MMA)
        keys = k_tile.slice(i * SLICE, SLICE, 0)
        values = v_tile.slice(i * SLICE, SLICE, 0)
        x = mma_v2(q, keys.permute((1, 0)).load(RIGHT), zeros)
        dp = mma_v2(d_out, values.permute((1, 0)).load(RIGHT), zeros)
        p = gl.exp2(x * scale_log2 - lse[:, None])
        if GATED:
            sign = delta.to(gl.int32, bitcast=True) << 31
            p = (p.to(gl.int32, bitcast=True) ^ sign[:, None]).to(gl.float32, bitcast=True)
        ds = p * (dp - delta[:, None])
        acc = mma_v2(gl.convert_layout(ds.to(q.dtype), q.type.layout), keys.load(RIGHT), acc)
    return acc


@gluon.jit
def attend_backward(
    entries, counts, lse, delta, dq, T, K, R, limit, groups, tiles, scale, k_smem, v_smem, full,
    empty, PART: gl.constexpr, G: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr,
    WARPS: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr, SLICE: gl.constexpr,
    EACH: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """A part: dq of its tokens through the blocks that they chose."""
    M: gl.constexpr = WARPS * ROWS
    D: gl.constexpr = k_smem.shape[4]
    E: gl.constexpr = v_smem.shape[4]
    BLOCK_N: gl.constexpr = k_smem.shape[2]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    FLAT: gl.constexpr = flat(WARPS, D)
    number = PART * WARPS + warp_number() % WARPS
    rows = k_smem if PART == 0 else v_smem
    done = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, r, _h, group = place_of(tile, groups, K, R)
        n = gl.load(counts + tile)
        at = entries + tile.to(gl.int64) * limit
        e = gl.load(at, mask=n > 0, other=0)
        first = (group * PARTS + PART) * WARPS
        row, real = rows_of(b, r, first, T, R, G, ROWS, M, gl.SliceLayout(1, MMA))
        lse_row = gl.load(lse + row, mask=real, other=0.0)
        delta_row = gl.load(delta + row, mask=real, other=0.0)

        # of all places: what is done with here must not count for what was there before
        turn = done % CHUNKS
        for i in gl.static_range(CHUNK):
            mbarrier.wait(full[i].index(turn), (done // CHUNKS) & 1)
        q = rows.index(turn * CHUNK).reshape([M, D]).load(LEFT)
        d_out = rows.index(turn * CHUNK + 1).reshape([M, E]).load(LEFT)
        for i in gl.static_range(CHUNK):
            async_copy.mbarrier_arrive(empty[i].index(turn), increment_count=False)
        done += 1

        acc = gl.zeros([M, D], gl.float32, MMA)
        for j in range(0, n, CHUNK):
            turn, phase = done % CHUNKS, (done // CHUNKS) & 1
            if EACH:
                for i in gl.static_range(CHUNK):
                    chosen = ((e >> 32).to(gl.int32) >> number) & 1
                    e = gl.load(at + j + i + 1, mask=j + i + 1 < n, other=0)
                    mbarrier.wait(full[i].index(turn), phase)
                    if chosen != 0:
                        place = turn * CHUNK + i
                        acc = fold_grad(
                            q, d_out, k_smem.index(place).reshape([BLOCK_N, D]),
                            v_smem.index(place).reshape([BLOCK_N, E]), acc, lse_row, delta_row,
                            scale * 1.4426950408889634, GATED, SLICE,
                        )  # fmt: skip
                    async_copy.mbarrier_arrive(empty[i].index(turn), increment_count=False)
            else:
                for i in gl.static_range(CHUNK):
                    mbarrier.wait(full[i].index(turn), phase)
                for i in range(CHUNK):
                    chosen = ((e >> 32).to(gl.int32) >> number) & 1
                    e = gl.load(at + j + i + 1, mask=j + i + 1 < n, other=0)
                    if chosen != 0:
                        place = turn * CHUNK + i
                        acc = fold_grad(
                            q, d_out, k_smem.index(place).reshape([BLOCK_N, D]),
                            v_smem.index(place).reshape([BLOCK_N, E]), acc, lse_row, delta_row,
                            scale * 1.4426950408889634, GATED, SLICE,
                        )  # fmt: skip
                for i in gl.static_range(CHUNK):
                    async_copy.mbarrier_arrive(empty[i].index(turn), increment_count=False)
            done += 1
        acc = gl.convert_layout((acc * scale).to(dq.dtype.element_ty), FLAT)
        row, real = rows_of(b, r, first, T, R, G, ROWS, M, gl.SliceLayout(1, FLAT))
        at_row = row[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, FLAT))[None]
        if ADD:
            before = gl.load(dq + at_row, mask=real[:, None], other=0.0)
            acc = (acc.to(gl.float32) + before.to(gl.float32)).to(dq.dtype.element_ty)
        gl.store(dq + at_row, acc, mask=real[:, None])


@gluon.jit(do_not_specialize=LENGTHS)
def dq_kernel(
    q, k, v, d_out, entries, counts, lse, delta, dq, T, K, R, limit, s, groups, tiles, scale,
    G: gl.constexpr, WARPS: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr,
    SLICE: gl.constexpr, EACH: gl.constexpr, REGISTERS: gl.constexpr, GATED: gl.constexpr,
    ADD: gl.constexpr,
):  # fmt: skip
    """One program: as the forward. Writes dq, added to what is there if ADD."""
    PARTS: gl.constexpr = 2
    ROWS: gl.constexpr = q.block_shape[2]
    k_smem, v_smem, full, empty = ring(k, v, PARTS, WARPS, CHUNK, CHUNKS)
    gl.warp_specialize(
        [
            (attend_backward, (
                entries, counts, lse, delta, dq, T, K, R, limit, groups, tiles, scale, k_smem,
                v_smem, full, empty, 0, G, ROWS, PARTS, WARPS, CHUNK, CHUNKS, SLICE,
                EACH, GATED, ADD,
            )),
            (attend_backward, (
                entries, counts, lse, delta, dq, T, K, R, limit, groups, tiles, scale, k_smem,
                v_smem, full, empty, 1, G, ROWS, PARTS, WARPS, CHUNK, CHUNKS, SLICE,
                EACH, GATED, ADD,
            )),
            (read, (
                (q, d_out), k, v, entries, counts, K, R, limit, s, groups, tiles, k_smem, v_smem,
                full, empty, G, PARTS, WARPS, CHUNK, CHUNKS,
            )),
        ],
        [WARPS, 1],
        [REGISTERS, 24],
    )  # fmt: skip
