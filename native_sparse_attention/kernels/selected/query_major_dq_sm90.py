"""dq of the selected blocks, query-major, in tiles of 64 rows, in Gluon: see
`query_major_steps_sm90.py`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..common.buffers_sm90 import at_named_barrier
from ..common.epilogue_sm90 import flat, rows_of
from ..common.softmax_sm90 import probabilities
from .query_major_steps_sm90 import (
    CONSUMERS,
    KEYS,
    LENGTHS,
    ROWS,
    THREADS,
    produce,
    ring,
    sees,
    tile_blocks,
    tile_coords,
)


@gluon.jit
def consume(
    block_indices, counts, lse, delta, dq, T, K, R, limit, tiles, all_tiles, scale, k_smem, v_smem,
    full, CONSUMER: gl.constexpr, G: gl.constexpr, MEMBERS: gl.constexpr, STAGES: gl.constexpr,
    SLOTS: gl.constexpr, UNION: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup: dq of its tiles."""
    TOKENS: gl.constexpr = ROWS // G
    D: gl.constexpr = k_smem.shape[4]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    FLAT: gl.constexpr = flat(4, D)
    member = gl.arange(0, ROWS, ROW) // (ROWS // MEMBERS)
    scale_log2 = scale * 1.4426950408889634
    zero = gl.zeros([ROWS, KEYS], gl.float32, S)
    done = 0
    for nth in range(
        gl.program_id(0) * CONSUMERS + CONSUMER, all_tiles, gl.num_programs(0) * CONSUMERS
    ):
        line, b, r, _h, tile = tile_coords(nth, tiles, K, R)
        at, count = tile_blocks(
            block_indices, counts, line, b, r, tile, tiles, T, R, limit, 4, TOKENS, SLOTS, UNION
        )
        if count >= 0:
            e = gl.load(at)  # unused without blocks
            row, real = rows_of(b, r, tile * TOKENS, T, R, G, G, ROWS, ROW)
            lse_row = gl.load(lse + row, mask=real, other=0.0)
            delta_row = gl.load(delta + row, mask=real, other=0.0)
            stage = CONSUMER * STAGES + done % STAGES
            mbarrier.wait(full.index(stage), (done // STAGES) & 1)
            q = k_smem.index(stage).reshape([ROWS, D]).load(gl.DotOperandLayout(0, S, 2))
            d_out = v_smem.index(stage).reshape([ROWS, D]).load(gl.DotOperandLayout(0, S, 2))
            fence_async_shared()  # order the loads before the next TMA write
            at_named_barrier("arrive", stage, THREADS)
            done += 1

            acc = gl.zeros([ROWS, D], gl.float32, ACC)
            for j in range(0, count):
                seen_lse = gl.where(sees(e, member, UNION), lse_row, float("inf"))
                e = gl.load(at + j + 1, mask=j + 1 < count, other=0)
                stage = CONSUMER * STAGES + done % STAGES
                mbarrier.wait(full.index(stage), (done // STAGES) & 1)
                keys = k_smem.index(stage).reshape([KEYS, D])
                values = v_smem.index(stage).reshape([KEYS, D])
                s = warpgroup_mma(q, keys.permute((1, 0)), zero, use_acc=False, is_async=True)
                dp = warpgroup_mma(
                    d_out, values.permute((1, 0)), zero, use_acc=False, is_async=True
                )
                s, dp = warpgroup_mma_wait(0, deps=[s, dp])
                p = probabilities(s, scale_log2, seen_lse[:, None], delta_row[:, None], GATED)
                ds = p * (dp - delta_row[:, None])
                left = gl.convert_layout(ds.to(k_smem.dtype), LEFT)
                acc = warpgroup_mma(left, keys, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                at_named_barrier("arrive", stage, THREADS)
                done += 1

            row, real = rows_of(b, r, tile * TOKENS, T, R, G, G, ROWS, gl.SliceLayout(1, FLAT))
            into = dq + row[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, FLAT))[None]
            valid = real[:, None]
            if ADD:
                previous = gl.load(into, mask=valid, other=0.0)
            value = gl.convert_layout(acc * scale, FLAT)
            if ADD:
                value += previous.to(gl.float32)
            gl.store(into, value.to(dq.dtype.element_ty), mask=valid)


@gluon.jit(do_not_specialize=LENGTHS)
def nsa_selected_dq_query_major_sm90(
    q, k, v, d_out, block_indices, counts, run_if, lse, delta, dq, T, K, R, limit, tiles, all_tiles,
    scale, G: gl.constexpr, MEMBERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr,
    UNION: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr, RUN_IF: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """One persistent program a multiprocessor. Writes dq, with ADD adds to dq; with RUN_IF does
    nothing if `run_if` is 0."""
    k_smem, v_smem, full = ring(k, v, STAGES)
    prefetched = ()
    if ADD:
        prefetched = prefetched + (dq,)  # noqa: RUF005
    if RUN_IF:
        all_tiles = gl.where(gl.load(run_if) != 0, all_tiles, 0)
    gl.warp_specialize(
        [
            (consume, (
                block_indices, counts, lse, delta, dq, T, K, R, limit, tiles, all_tiles, scale,
                k_smem, v_smem, full, 0, G, MEMBERS, STAGES, SLOTS, UNION, GATED, ADD,
            )),
            (consume, (
                block_indices, counts, lse, delta, dq, T, K, R, limit, tiles, all_tiles, scale,
                k_smem, v_smem, full, 1, G, MEMBERS, STAGES, SLOTS, UNION, GATED, ADD,
            )),
            (produce, (
                q, d_out, k, v, block_indices, counts, prefetched, T, K, R, limit, tiles,
                all_tiles, k_smem, v_smem, full, 0, G, STAGES, SLOTS, UNION, True,
            )),
            (produce, (
                q, d_out, k, v, block_indices, counts, prefetched, T, K, R, limit, tiles,
                all_tiles, k_smem, v_smem, full, 1, G, STAGES, SLOTS, UNION, True,
            )),
        ],
        [4, 1, 1],
        [REGISTERS, 24, 24],
    )  # fmt: skip
