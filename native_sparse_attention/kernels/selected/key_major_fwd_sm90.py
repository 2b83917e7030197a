"""The forward of the listed blocks, block by block, as `key_major.py`. In Gluon.

A program of four warps has an item (see `csr.py`), whose keys and values it keeps in shared
memory, beside two tiles of rows: threads copy the next tile's while this one's are attended to. A
tile's place then holds what is written of it, in whole rows.
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
from .key_major_rows_sm90 import KEYS, ROWS, TILE, by_rows, copy_rows, item_of, load_entries

# one compiled kernel for all lengths
LENGTHS = ["T", "C", "BLOCKS", "first", "length", "chunk", "items"]


@gluon.jit(do_not_specialize=LENGTHS)
def nsa_selected_fwd_key_major_sm90(
    q, k, v, part, part_lse, entries, bounds, owner, ordinals, chunk, items, T, C, BLOCKS,
    first, length, scale_log2, q_b, q_t, q_h,
    K: gl.constexpr, R: gl.constexpr, n: gl.constexpr, G: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """One program: an item. Writes each row's attention to the item's block alone and its lse."""
    D: gl.constexpr = k.block_shape[3]
    ENTRIES: gl.constexpr = ROWS // GROUP
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LAYOUT: gl.constexpr = by_rows(GROUP)
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    SEEN: gl.constexpr = gl.SliceLayout(1, S)
    dtype: gl.constexpr = k.dtype
    strides = (q_b, q_t, q_h)
    block_csr = (entries, bounds, owner, ordinals, chunk)
    k_smem, v_smem, bar = buffers(k, 1), buffers(v, 1), barriers(1, 1)
    q_smem = gl.allocate_shared_memory(dtype, [2, ROWS.value, D], TILE)
    fence_async_shared()
    thread_barrier()
    _block, b, h, c, begin, end = item_of(gl.program_id(0), items, block_csr, C, BLOCKS, 0, K)
    if begin < end:
        mbarrier.expect(bar.index(0), KEYS * D * 4)
        load_box(k, [b, c * KEYS, h, 0], bar.index(0), k_smem.index(0))
        load_box(v, [b, c * KEYS, h, 0], bar.index(0), v_smem.index(0))
        e = load_entries(entries, begin, end, GROUP, ROW)
        copy_rows(q, strides, e, b * T, b, q_smem.index(0), R, n, G, GROUP)
        async_copy.commit_group()
        ahead = load_entries(entries, begin + ENTRIES, end, GROUP, ROW)
        k_tile, v_tile = k_smem.index(0).reshape([KEYS, D]), v_smem.index(0).reshape([KEYS, D])
        row, seen_row = gl.arange(0, ROWS, ROW), gl.arange(0, ROWS, SEEN)
        column = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
        s_zero = gl.zeros([ROWS, KEYS], gl.float32, S)
        o_zero = gl.zeros([ROWS, D], gl.float32, ACC)
        origin = (b * (T - length) + first) * (R * n)
        mbarrier.wait(bar.index(0), 0)
        slot = 0
        for i in range(begin, end, ENTRIES):
            if i + ENTRIES < end:
                copy_rows(q, strides, ahead, b * T, b, q_smem.index(1 - slot), R, n, G, GROUP)
            async_copy.commit_group()
            later = load_entries(entries, i + 2 * ENTRIES, end, GROUP, ROW)
            seen = load_entries(entries, i, end, GROUP, SEEN)
            async_copy.wait_group(1)
            fence_async_shared()
            here = q_smem.index(slot)
            s = warpgroup_mma(here, k_tile.permute((1, 0)), s_zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            m = gl.max(s, 1) * scale_log2
            p = gl.exp2(s * scale_log2 - m[:, None])
            l = gl.sum(p, 1)
            left = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, ACC, 2))
            o = warpgroup_mma(left, v_tile, o_zero, use_acc=False, is_async=True)
            at = (seen - origin).to(gl.int64) * G + seen_row % GROUP
            real = (i + seen_row // GROUP < end) & (seen_row % GROUP < G)
            gl.store(part_lse + at, m + gl.log2(l), mask=real)
            share = gl.convert_layout(1.0 / l, gl.SliceLayout(1, ACC))
            o = warpgroup_mma_wait(0, deps=[o])
            here.store((o * share[:, None]).to(dtype))
            thread_barrier()
            there = (i + row // GROUP < end) & (row % GROUP < G)
            at = ((e - origin).to(gl.int64) * G + row % GROUP) * D
            # read when the cache no longer holds them
            gl.store(
                part + (at[:, None] + column[None]), here.load(LAYOUT), mask=there[:, None],
                eviction_policy="evict_first",
            )  # fmt: skip
            e, ahead, slot = ahead, later, 1 - slot
