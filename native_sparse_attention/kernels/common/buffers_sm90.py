"""Shared-memory buffers between producer and consumer warps, and their barriers.

A "full" barrier (mbarrier) lies in shared memory and counts the bytes that arrive in a slot. A
named barrier of some warps releases a slot: consumers arrive and continue, the producer waits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# first free named barrier: Triton uses the lower numbers
FIRST_BARRIER = gl.constexpr(8)


@gluon.jit
def at_named_barrier(ACTION: gl.constexpr, number, THREADS: gl.constexpr):
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
