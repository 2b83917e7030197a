"""How much memory a step needs at its peak, and what lies in it before anything is written."""

import weakref
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Live(TorchDispatchMode):
    """Counts the bytes of every storage that an operation makes, from its birth to its death.
    `peak` is the greatest sum: it is exact, and knows nothing of allocators."""

    def __init__(self):
        super().__init__()
        self.known = weakref.WeakSet()
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = [t.untyped_storage() for t in tree_iter((args, kwargs)) if torch.is_tensor(t)]
        out = func(*args, **(kwargs or {}))
        for t in tree_iter(out):
            if torch.is_tensor(t):
                self.add(t.untyped_storage(), before)
        return out

    def add(self, storage, before):
        if storage in self.known or any(storage._cdata == s._cdata for s in before):
            return
        size = storage.nbytes()
        self.known.add(storage)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self.free, size)

    def free(self, size):
        self.bytes -= size


def peak(step):
    """Bytes that `step` has alive at most, beyond what was there before it."""
    with Live() as live:
        step()
    return live.peak


def cuda_peak(step):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - before


@contextmanager
def poisoned():
    """Tensors that nothing was written to hold NaN, those of integers the largest."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
