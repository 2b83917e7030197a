"""Gluon helpers of the `_sm90` kernels: names of several versions of Triton, buffers between
producer and consumer warps, and the epilogue of a tile.

A "full" barrier (mbarrier) counts the bytes that arrive in a slot of shared memory. A named barrier
of some warps releases a slot: consumers arrive and continue, the producer waits.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma


def first_of(module: Any, *names: str) -> Any:
    return next(getattr(module, name) for name in names if hasattr(module, name))


# barrier of all threads of some warps
thread_barrier = first_of(gl, "thread_barrier", "barrier")
# TMA loads and stores of boxes
load_box = first_of(tma, "async_load", "async_copy_global_to_shared")
store_box = first_of(tma, "async_store", "async_copy_shared_to_global")
# (shared memory, dtype, shape, layout): another view of the same bytes
reinterpret = first_of(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")
# cp.async loads of elements by threads
load_elements = first_of(async_copy, "async_load", "async_copy_global_to_shared")

# first free named barrier: Triton uses the lower numbers
FIRST_BARRIER = gl.constexpr(8)


@gluon.jit
def named_barrier(ACTION: gl.constexpr, number, THREADS: gl.constexpr):
    """Arrive or sync (ACTION) at a named barrier of THREADS threads, from FIRST_BARRIER on."""
    gl.inline_asm_elementwise(
        "bar." + ACTION + " $1, $2; mov.u32 $0, 0;", "=r,r,r",
        [gl.to_tensor(FIRST_BARRIER + number), gl.to_tensor(THREADS)], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def buffers(t, COUNT: gl.constexpr):
    """Allocate shared memory for COUNT boxes of descriptor t."""
    return gl.allocate_shared_memory(t.dtype, [COUNT] + t.block_shape, t.layout)  # noqa: RUF005


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate COUNT mbarriers, each of ARRIVALS arrivals besides the bytes."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.constexpr_function
def flat(warps, width):
    """Layout of a tile with 16 rows per warp: as a product's accumulator, but a thread holds 8
    consecutive features. A conversion exchanges elements only between threads of one row."""
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
def finish(
    acc, m, l, out, lse, combine, b, r, token, T, GROUP: gl.constexpr, WARPS: gl.constexpr,
    F: gl.constexpr,
):  # fmt: skip
    """Write out and lse of a tile that begins at `token`. ADD combines them with the stored out and
    lse of other keys. COMBINE also writes the layer's output."""
    M: gl.constexpr = acc.shape[0]
    E: gl.constexpr = acc.shape[1]
    FLAT: gl.constexpr = flat(WARPS, E)
    ROW: gl.constexpr = gl.SliceLayout(1, FLAT)
    i = gl.arange(0, M, ROW)
    row_token, g = token + i // GROUP, i % GROUP
    row = (b * T + row_token).to(gl.int64) * (F.R * F.G) + r * F.G + g
    real = (g < F.G) & (row_token < T)
    feature = gl.arange(0, E, gl.SliceLayout(0, FLAT))

    # all loads come before the first store: no load is moved ahead of a store
    offset = row[:, None] * E + feature[None]
    mask = real[:, None]
    if F.ADD:
        stored_lse = gl.load(lse + row, mask=real, other=float("-inf")) * 1.4426950408889634
        stored_out = gl.load(out + offset, mask=mask, other=0.0)
    if F.COMBINE:
        gate = combine.gates + b.to(gl.int64) * combine.b
        gate += row_token.to(gl.int64) * combine.t
        gate += (r * F.G + g).to(gl.int64) * combine.h
        gate_cmp = gl.load(gate, mask=real, other=0.0).to(gl.float32)
        gate_sel = gl.load(gate + combine.branch, mask=real, other=0.0).to(gl.float32)
        gate_win = gl.load(gate + 2 * combine.branch, mask=real, other=0.0).to(gl.float32)
        cmp = gl.load(combine.cmp + offset, mask=mask, other=0.0)
        win = gl.load(combine.win + offset, mask=mask, other=0.0)

    empty = l == 0.0
    l = gl.where(empty, 1.0, l)
    # round before the layout conversion: shared memory for the exchange is small
    acc = (acc * (1.0 / l)[:, None]).to(out.dtype.element_ty)
    acc = gl.convert_layout(acc, FLAT).to(gl.float32)
    log = gl.convert_layout(gl.where(empty, float("-inf"), m + gl.log2(l)), ROW)
    if F.ADD:
        top = gl.maximum(stored_lse, log)
        top = gl.where(top == float("-inf"), 0.0, top)
        w, w_stored = gl.exp2(log - top), gl.exp2(stored_lse - top)
        w_sum = w + w_stored
        none = w_sum == 0.0
        w_sum = gl.where(none, 1.0, w_sum)
        acc = acc * (w / w_sum)[:, None] + stored_out.to(gl.float32) * (w_stored / w_sum)[:, None]
        log = gl.where(none, float("-inf"), top + gl.log2(w_sum))
    gl.store(out + offset, acc.to(out.dtype.element_ty), mask=mask)
    gl.store(lse + row, log * 0.6931471805599453, mask=real)
    if F.COMBINE:
        x = gate_sel[:, None] * acc + gate_cmp[:, None] * cmp.to(gl.float32)
        x += gate_win[:, None] * win.to(gl.float32)
        gl.store(combine.out + offset, x.to(combine.out.dtype.element_ty), mask=mask)
