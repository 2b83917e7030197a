"""Compile and load the kernels of a call before its first launch, in parallel.

A call compiles its kernels one after the other, each at its launch. Here the host code of a call
runs once without launching anything, and threads compile its kernels: the compiler releases
Python's lock for most of its time.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextvars import ContextVar
from typing import Any

import torch

try:  # from Triton 3.6 on
    from triton import knobs
    from triton.runtime._async_compile import AsyncCompileMode
except ImportError:
    AsyncCompileMode = None

# whether launches of this thread only compile
only_compiles: ContextVar[bool] = ContextVar("only_compiles", default=False)
# one call compiles at a time; and one thread loads: before 3.8 Triton imports a C module of one
# name for each kernel
COMPILING, LOADING = threading.Lock(), threading.Lock()


def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """`kernel[grid]`, or in `compile_ahead` what only compiles the kernel."""
    return functools.partial(kernel.warmup, grid=grid) if only_compiles.get() else kernel[grid]


def cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def is_possible() -> bool:
    """Whether this Triton can compile in threads and there are several cores."""
    return AsyncCompileMode is not None and not knobs.runtime.interpret and cores() > 1


class Threads(ThreadPoolExecutor):
    """Threads that compile kernels and load them onto the current GPU. Otherwise Triton loads a
    kernel at its first launch, for which it also builds a launcher with a C compiler."""

    def submit(self, compile_one: Callable[[], Any]) -> Future:  # type: ignore[override]
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        return super().submit(compile_and_load, compile_one, device)


def compile_and_load(compile_one: Callable[[], Any], device: int | None) -> Any:
    kernel = compile_one()
    if device is not None:
        try:
            with LOADING, torch.cuda.device(device):
                kernel._init_handles()
        except Exception:  # the launch loads it again, and raises
            kernel._run = None
    return kernel


def compile_ahead(
    dry_run: Callable[[], Any],
    report: Callable[[int, int], None] | None = None,
    ignore_errors: bool = False,
) -> int:
    """Compile the kernels that `dry_run` would launch, if they are not compiled yet.

    Args:
        dry_run: host code, which may allocate but must not read results of kernels.
        done: called with the number of compiled kernels and of all kernels, as each is compiled.
        ignore_errors: ignore errors of the compiler; a later launch raises them again.

    Returns:
        The number of kernels compiled, or loaded from Triton's cache on disk.
    """
    with COMPILING, Threads(cores(), "nsa-compile") as pool:
        with AsyncCompileMode(pool, ignore_errors=ignore_errors) as mode:
            token = only_compiles.set(True)
            try:
                dry_run()
            finally:
                only_compiles.reset(token)
            futures: list[Future] = mode.raw_futures
            for number, _ in enumerate(as_completed(futures), 1):
                if report is not None:
                    report(number, len(futures))
        return len(futures)
