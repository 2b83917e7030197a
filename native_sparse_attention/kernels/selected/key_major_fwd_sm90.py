"""The forward over the top-n blocks, key-major like `key_major.py`, in Gluon.

A program of four warps has a work tile (see `csr.py`). Shared memory holds the keys and values of
its block and two tiles of rows: threads copy the next tile during the products of the current one.
The buffer of a tile then holds its output, which is written in whole rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..common.buffers_sm90 import barriers, buffers
from ..common.dialect_sm90 import load_box, thread_barrier
from .key_major_rows_sm90 import KEYS, ROWS, TILE, by_rows, copy_rows, load_pairs, work_tile

# one compiled kernel for all lengths
LENGTHS = ["T", "C", "BLOCKS", "first", "length", "tile_pairs", "num_tiles"]


@gluon.jit(do_not_specialize=LENGTHS)
def nsa_selected_fwd_key_major_sm90(
    q, k, v, partial_out, partial_lse, pairs, offsets, owner, ordinals, tile_pairs, num_tiles, T,
    C, BLOCKS, first, length, scale_log2, q_b, q_t, q_h,
    K: gl.constexpr, R: gl.constexpr, n: gl.constexpr, G: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """One program: a work tile. Writes each row's partial out and lse over the tile's block."""
    D: gl.constexpr = k.block_shape[3]
    PAIRS: gl.constexpr = ROWS // GROUP
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LAYOUT: gl.constexpr = by_rows(GROUP)
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    S_ROW: gl.constexpr = gl.SliceLayout(1, S)
    dtype: gl.constexpr = k.dtype
    strides = (q_b, q_t, q_h)
    block_csr = (pairs, offsets, owner, ordinals, tile_pairs)
    k_smem, v_smem, bar = buffers(k, 1), buffers(v, 1), barriers(1, 1)
    q_smem = gl.allocate_shared_memory(dtype, [2, ROWS.value, D], TILE)
    fence_async_shared()
    thread_barrier()
    _block, b, h, c, begin, end = work_tile(gl.program_id(0), num_tiles, block_csr, C, BLOCKS, 0, K)
    if begin < end:
        mbarrier.expect(bar.index(0), KEYS * D * 4)
        load_box(k, [b, c * KEYS, h, 0], bar.index(0), k_smem.index(0))
        load_box(v, [b, c * KEYS, h, 0], bar.index(0), v_smem.index(0))
        e = load_pairs(pairs, begin, end, GROUP, ROW)
        copy_rows(q, strides, e, b * T, b, q_smem.index(0), R, n, G, GROUP)
        async_copy.commit_group()
        next_pairs = load_pairs(pairs, begin + PAIRS, end, GROUP, ROW)
        k_tile, v_tile = k_smem.index(0).reshape([KEYS, D]), v_smem.index(0).reshape([KEYS, D])
        row, s_row = gl.arange(0, ROWS, ROW), gl.arange(0, ROWS, S_ROW)
        column = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
        s_zero = gl.zeros([ROWS, KEYS], gl.float32, S)
        o_zero = gl.zeros([ROWS, D], gl.float32, ACC)
        origin = (b * (T - length) + first) * (R * n)
        mbarrier.wait(bar.index(0), 0)
        stage = 0
        for i in range(begin, end, PAIRS):
            if i + PAIRS < end:
                copy_rows(q, strides, next_pairs, b * T, b, q_smem.index(1 - stage), R, n, G, GROUP)
            async_copy.commit_group()
            later_pairs = load_pairs(pairs, i + 2 * PAIRS, end, GROUP, ROW)
            s_pairs = load_pairs(pairs, i, end, GROUP, S_ROW)
            async_copy.wait_group(1)
            fence_async_shared()
            buffer = q_smem.index(stage)
            s = warpgroup_mma(buffer, k_tile.permute((1, 0)), s_zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            m = gl.max(s, 1) * scale_log2
            p = gl.exp2(s * scale_log2 - m[:, None])
            l = gl.sum(p, 1)
            left = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, ACC, 2))
            o = warpgroup_mma(left, v_tile, o_zero, use_acc=False, is_async=True)
            at = (s_pairs - origin).to(gl.int64) * G + s_row % GROUP
            real = (i + s_row // GROUP < end) & (s_row % GROUP < G)
            gl.store(partial_lse + at, m + gl.log2(l), mask=real)
            inv_l = gl.convert_layout(1.0 / l, gl.SliceLayout(1, ACC))
            o = warpgroup_mma_wait(0, deps=[o])
            buffer.store((o * inv_l[:, None]).to(dtype))
            thread_barrier()
            valid = (i + row // GROUP < end) & (row % GROUP < G)
            at = ((e - origin).to(gl.int64) * G + row % GROUP) * D
            # evict first: read after they have left the cache
            gl.store(
                partial_out + (at[:, None] + column[None]), buffer.load(LAYOUT),
                mask=valid[:, None], eviction_policy="evict_first",
            )  # fmt: skip
            e, next_pairs, stage = next_pairs, later_pairs, 1 - stage
