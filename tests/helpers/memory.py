"""How much memory a step needs at its peak, what lies in it before anything is written, and whether
the host waits for a GPU."""

import itertools
import warnings
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile


def peak(step):
    """Bytes that `step` has alive at most, beyond what was there before it, of the CPU's memory."""
    settings = dict(profile_memory=True, acc_events=True)  # torch 2.11 warns without the last
    with profile(activities=[ProfilerActivity.CPU], **settings) as seen:
        step()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in events), initial=0))


@contextmanager
def poisoned():
    """Tensors that nothing was written to hold NaN, those of integers the largest."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def no_sync():
    """To wait for the GPU is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is a prototype, torch says
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
