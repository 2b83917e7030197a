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
def wait(counter, programs):
    """Until so many programs have arrived: what they wrote can be read."""
    while tl.atomic_add(counter, 0, sem="acquire") < programs:
        pass
