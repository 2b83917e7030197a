"""Programs of one launch that wait for others.

Those they wait for must have smaller numbers: a GPU begins programs in the order of their numbers,
so these run, or have run, wherever it comes to waiting.
"""

import triton
import triton.language as tl


@triton.jit
def arrived(counter):
    """One program more has written what it had to; how many had before."""
    tl.debug_barrier()  # all its threads have
    return tl.atomic_add(counter, 1, sem="acq_rel")


@triton.jit
def first_turn(counter, programs, ROOM: tl.constexpr):
    """Of the turns up to 1, in which a program does its work: 0 where it would wait now and the GPU
    has ROOM. In turn 0 it does all that comes after the wait, of nothing: the instructions, which a
    GPU reads from its memory, are there when it counts."""
    turn = 1
    if ROOM:
        turn = (tl.atomic_add(counter, 0, sem="relaxed") >= programs).to(tl.int32)
    return turn


@triton.jit
def wait(counter, programs):
    """Until so many programs have arrived: what they wrote can be read."""
    while tl.atomic_add(counter, 0, sem="acquire") < programs:
        pass
