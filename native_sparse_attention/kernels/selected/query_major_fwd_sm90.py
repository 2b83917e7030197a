"""The forward of `query_major.py` in tiles of 64 rows, in Gluon: `query_major_steps_sm90.py`."""

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
from ..common.epilogue_sm90 import finish
from ..common.primitives import LARGEST_BOUND
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
    norms, block_indices, counts, out, lse, combine_cmp, combine_win, combine_gates, layer_out, T,
    K, R, limit, tiles, all_tiles, scale_log2, g_b, g_t, g_h, g_3, k_smem, v_smem, full,
    CONSUMER: gl.constexpr, G: gl.constexpr, MEMBERS: gl.constexpr, STAGES: gl.constexpr,
    SLOTS: gl.constexpr, UNION: gl.constexpr, BOUNDED: gl.constexpr, ADD: gl.constexpr,
    COMBINE: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup: out and lse of its tiles. Subtracts the row bound if the bound is small
    enough, else the running maximum: one of the two loops has no iterations."""
    TOKENS: gl.constexpr = ROWS // G
    D: gl.constexpr = k_smem.shape[4]
    E: gl.constexpr = v_smem.shape[4]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    member = gl.arange(0, ROWS, ROW) // (ROWS // MEMBERS)
    zero = gl.zeros([ROWS, KEYS], gl.float32, S)
    done = 0
    for nth in range(
        gl.program_id(0) * CONSUMERS + CONSUMER, all_tiles, gl.num_programs(0) * CONSUMERS
    ):
        line, b, r, h, tile = tile_coords(nth, tiles, K, R)
        at, count = tile_blocks(
            block_indices, counts, line, b, r, tile, tiles, T, R, limit, 4, TOKENS, SLOTS, UNION
        )
        if BOUNDED:
            longest_key = gl.load(norms + b * K + h)
        if count >= 0:
            e = gl.load(at)  # unused without blocks
            stage = CONSUMER * STAGES + done % STAGES
            mbarrier.wait(full.index(stage), (done // STAGES) & 1)
            q = k_smem.index(stage).reshape([ROWS, D]).load(gl.DotOperandLayout(0, S, 2))
            m = gl.full([ROWS], float("-inf"), gl.float32, ROW)
            by_bound = False
            if BOUNDED:
                x = q.to(gl.float32)
                bound = gl.convert_layout(gl.sqrt(gl.sum(x * x, 1)), ROW)
                bound = bound * (longest_key * gl.abs(scale_log2))
                by_bound = gl.max(bound, 0) <= LARGEST_BOUND
                m = gl.where(by_bound, bound, m)
            fence_async_shared()  # order the loads before the next TMA write
            at_named_barrier("arrive", stage, THREADS)
            done += 1

            acc = gl.zeros([ROWS, E], gl.float32, ACC)
            l = gl.zeros([ROWS], gl.float32, ROW)
            for way in gl.static_range(0 if BOUNDED else 1, 2):
                blocks = count
                if BOUNDED:
                    blocks = gl.where(by_bound == (way == 0), count, 0)
                for j in range(0, blocks):
                    seen = sees(e, member, UNION)
                    e = gl.load(at + j + 1, mask=j + 1 < blocks, other=0)
                    stage = CONSUMER * STAGES + done % STAGES
                    mbarrier.wait(full.index(stage), (done // STAGES) & 1)
                    keys = k_smem.index(stage).reshape([KEYS, D]).permute((1, 0))
                    s = warpgroup_mma(q, keys, zero, use_acc=False, is_async=True)
                    s = warpgroup_mma_wait(0, deps=[s])
                    if way == 0:
                        origin = gl.where(seen, m, float("inf"))
                        p = gl.exp2(s * scale_log2 - origin[:, None])
                    else:
                        s = gl.where(seen[:, None], s, float("-inf"))
                        before = m
                        m = gl.maximum(m, gl.max(s, 1) * scale_log2)
                        origin = gl.where(m == float("-inf"), 0.0, m)
                        p = gl.exp2(s * scale_log2 - origin[:, None])
                        alpha = gl.exp2(before - origin)
                        l = l * alpha
                        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, ACC))[:, None]
                    l += gl.sum(p, 1)
                    left = gl.convert_layout(p.to(k_smem.dtype), LEFT)
                    values = v_smem.index(stage).reshape([KEYS, E])
                    acc = warpgroup_mma(left, values, acc, is_async=True)
                    acc = warpgroup_mma_wait(0, deps=[acc])
                    at_named_barrier("arrive", stage, THREADS)
                    done += 1
            to: gl.constexpr = gl.SliceLayout(1, ACC)
            finish(
                acc, gl.convert_layout(m, to), gl.convert_layout(l, to), out, lse, combine_cmp,
                combine_win, combine_gates, layer_out, b, r, tile * TOKENS, T, R, g_b, g_t, g_h,
                g_3, G, G, 4, ADD, COMBINE,
            )  # fmt: skip


@gluon.jit(do_not_specialize=LENGTHS)
def nsa_selected_fwd_query_major_sm90(
    q, k, v, norms, block_indices, counts, run_if, out, lse, combine_cmp, combine_win,
    combine_gates, layer_out, T, K, R, limit, tiles, all_tiles, scale_log2, g_b, g_t, g_h, g_3,
    G: gl.constexpr, MEMBERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr,
    UNION: gl.constexpr, BOUNDED: gl.constexpr, ADD: gl.constexpr, COMBINE: gl.constexpr,
    RUN_IF: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """One persistent program a multiprocessor. Writes out and lse, with ADD combined with the
    previous out and lse; with COMBINE also the layer's output; with RUN_IF nothing if 0."""
    k_smem, v_smem, full = ring(k, v, STAGES)
    if RUN_IF:
        all_tiles = gl.where(gl.load(run_if) != 0, all_tiles, 0)
    prefetched = ()
    if ADD:
        prefetched = prefetched + (out,)  # noqa: RUF005
    if COMBINE:
        prefetched = prefetched + (combine_cmp, combine_win)  # noqa: RUF005
    gl.warp_specialize(
        [
            (consume, (
                norms, block_indices, counts, out, lse, combine_cmp, combine_win, combine_gates,
                layer_out, T, K, R, limit, tiles, all_tiles, scale_log2, g_b, g_t, g_h, g_3, k_smem,
                v_smem, full, 0, G, MEMBERS, STAGES, SLOTS, UNION, BOUNDED, ADD, COMBINE,
            )),
            (consume, (
                norms, block_indices, counts, out, lse, combine_cmp, combine_win, combine_gates,
                layer_out, T, K, R, limit, tiles, all_tiles, scale_log2, g_b, g_t, g_h, g_3, k_smem,
                v_smem, full, 1, G, MEMBERS, STAGES, SLOTS, UNION, BOUNDED, ADD, COMBINE,
            )),
            (produce, (
                q, q, k, v, block_indices, counts, prefetched, T, K, R, limit, tiles, all_tiles,
                k_smem, v_smem, full, 0, G, STAGES, SLOTS, UNION, False,
            )),
            (produce, (
                q, q, k, v, block_indices, counts, prefetched, T, K, R, limit, tiles, all_tiles,
                k_smem, v_smem, full, 1, G, STAGES, SLOTS, UNION, False,
            )),
        ],
        [4, 1, 1],
        [REGISTERS, 24, 24],
    )  # fmt: skip
