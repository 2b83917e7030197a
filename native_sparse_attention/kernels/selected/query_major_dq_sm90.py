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
    KEYS,
    LENGTHS,
    PARTS,
    ROWS,
    THREADS,
    list_of,
    place_of,
    read,
    ring,
    sees,
)


@gluon.jit
def form(
    block_indices, counts, lse, delta, dq, T, K, R, limit, tiles, total, scale, k_smem, v_smem,
    full, PART: gl.constexpr, G: gl.constexpr, MEMBERS: gl.constexpr, STAGES: gl.constexpr,
    SLOTS: gl.constexpr, UNION: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """A part."""
    TOKENS: gl.constexpr = ROWS // G
    D: gl.constexpr = k_smem.shape[4]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    FLAT: gl.constexpr = flat(4, D)
    number = gl.arange(0, ROWS, ROW) // (ROWS // MEMBERS)
    scale_log2 = scale * 1.4426950408889634
    zero = gl.zeros([ROWS, KEYS], gl.float32, S)
    done = 0
    for nth in range(gl.program_id(0) * PARTS + PART, total, gl.num_programs(0) * PARTS):
        line, b, r, _h, tile = place_of(nth, tiles, K, R)
        at, count = list_of(
            block_indices, counts, line, b, r, tile, tiles, T, R, limit, 4, TOKENS, SLOTS, UNION
        )
        if count >= 0:
            e = gl.load(at)  # of no meaning where there is none
            row, real = rows_of(b, r, tile * TOKENS, T, R, G, G, ROWS, ROW)
            lse_row = gl.load(lse + row, mask=real, other=0.0)
            delta_row = gl.load(delta + row, mask=real, other=0.0)
            place = PART * STAGES + done % STAGES
            mbarrier.wait(full.index(place), (done // STAGES) & 1)
            q = k_smem.index(place).reshape([ROWS, D]).load(gl.DotOperandLayout(0, S, 2))
            d_out = v_smem.index(place).reshape([ROWS, D]).load(gl.DotOperandLayout(0, S, 2))
            fence_async_shared()  # what was read may be overwritten from outside
            at_named_barrier("arrive", place, THREADS)
            done += 1

            acc = gl.zeros([ROWS, D], gl.float32, ACC)
            for j in range(0, count):
                seen_lse = gl.where(sees(e, number, UNION), lse_row, float("inf"))
                e = gl.load(at + j + 1, mask=j + 1 < count, other=0)
                place = PART * STAGES + done % STAGES
                mbarrier.wait(full.index(place), (done // STAGES) & 1)
                keys = k_smem.index(place).reshape([KEYS, D])
                values = v_smem.index(place).reshape([KEYS, D])
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
                at_named_barrier("arrive", place, THREADS)
                done += 1

            row, real = rows_of(b, r, tile * TOKENS, T, R, G, G, ROWS, gl.SliceLayout(1, FLAT))
            into = dq + row[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, FLAT))[None]
            there = real[:, None]
            if ADD:
                held = gl.load(into, mask=there, other=0.0)
            value = gl.convert_layout(acc * scale, FLAT)
            if ADD:
                value += held.to(gl.float32)
            gl.store(into, value.to(dq.dtype.element_ty), mask=there)


@gluon.jit(do_not_specialize=LENGTHS)
def nsa_selected_dq_query_major_sm90(
    q, k, v, d_out, block_indices, counts, only, lse, delta, dq, T, K, R, limit, tiles, total,
    scale, G: gl.constexpr, MEMBERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr,
    UNION: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr, ONLY: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program a multiprocessor: tiles in turn, a box of q each. Writes dq, added to what is
    there if ADD; with ONLY nothing where that is 0."""
    k_smem, v_smem, full = ring(k, v, STAGES)
    needed = ()
    if ADD:
        needed = needed + (dq,)  # noqa: RUF005
    if ONLY:
        total = gl.where(gl.load(only) != 0, total, 0)
    gl.warp_specialize(
        [
            (form, (
                block_indices, counts, lse, delta, dq, T, K, R, limit, tiles, total, scale, k_smem,
                v_smem, full, 0, G, MEMBERS, STAGES, SLOTS, UNION, GATED, ADD,
            )),
            (form, (
                block_indices, counts, lse, delta, dq, T, K, R, limit, tiles, total, scale, k_smem,
                v_smem, full, 1, G, MEMBERS, STAGES, SLOTS, UNION, GATED, ADD,
            )),
            (read, (
                q, d_out, k, v, block_indices, counts, needed, T, K, R, limit, tiles, total, k_smem,
                v_smem, full, 0, G, STAGES, SLOTS, UNION, True,
            )),
            (read, (
                q, d_out, k, v, block_indices, counts, needed, T, K, R, limit, tiles, total, k_smem,
                v_smem, full, 1, G, STAGES, SLOTS, UNION, True,
            )),
        ],
        [4, 1, 1],
        [REGISTERS, 24, 24],
    )  # fmt: skip
