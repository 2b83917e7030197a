"""Grid barriers: a program waits until other programs of the same launch have written their output.

A program waits only for programs with smaller ids. A GPU starts programs in the order of their ids,
so the programs that it waits for are running or finished, and every wait ends.
"""

import triton
import triton.language as tl


@triton.jit
def arrive(counter):
    """Signal that this program has written its output; returns how many programs arrived before."""
    tl.debug_barrier()  # all threads of this program have written
    return tl.atomic_add(counter, 1, sem="acq_rel")


@triton.jit
def first_phase(counter, programs, WARMUP: tl.constexpr):
    """The phase in which a program starts: 1 (wait, then work) or 0 (warm up first).

    A program warms up with WARMUP, if it would have to wait now. Phase 0 executes the code that
    follows the wait with all loads and stores masked. This loads the instructions into the
    instruction cache before the wait ends.
    """
    phase = 1
    if WARMUP:
        phase = (tl.atomic_add(counter, 0, sem="relaxed") >= programs).to(tl.int32)
    return phase


@triton.jit
def wait(counter, programs):
    """Wait until `programs` programs have arrived at the counter. Their output is visible then."""
    while tl.atomic_add(counter, 0, sem="acquire") < programs:
        pass
