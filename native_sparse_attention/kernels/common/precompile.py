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
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch

try:  # from Triton 3.6 on
    from triton import knobs
    from triton.runtime._async_compile import AsyncCompileMode, active_mode
except ImportError:
    AsyncCompileMode, active_mode = None, ContextVar("active_mode", default=None)

# one call compiles at a time; and one thread loads: before 3.8 Triton imports a C module of one
# name for each kernel
COMPILING, LOADING = threading.Lock(), threading.Lock()
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """`kernel[grid]`, or in `compile_ahead` what only compiles the kernel."""
    return functools.partial(kernel.warmup, grid=grid) if active_mode.get() else kernel[grid]


def is_possible() -> bool:
    """Whether this Triton can compile in threads and there are several cores."""
    return AsyncCompileMode is not None and not knobs.runtime.interpret and CORES > 1


def compile_ahead(dry_run: Callable[[], Any]) -> int:
    """Compile the kernels that `dry_run` would launch, and return how many were not compiled yet.
    `dry_run` is host code, which may allocate but must not read results of kernels. A later launch
    raises errors of the compiler."""
    if not is_possible():
        return 0
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def compile_and_load(compile_one: Callable[[], Any]) -> Any:
        # Triton loads a kernel at its first launch, and builds a launcher with a C compiler
        kernel = compile_one()
        if device is not None:
            try:
                with LOADING, torch.cuda.device(device):
                    kernel._init_handles()
            except Exception:  # the launch loads it again, and raises
                kernel._run = None
        return kernel

    with COMPILING, ThreadPoolExecutor(CORES, "nsa-compile") as pool:
        executor = SimpleNamespace(submit=lambda job: pool.submit(compile_and_load, job))
        with AsyncCompileMode(executor, ignore_errors=True) as mode:
            dry_run()
            futures: list[Future[Any]] = mode.raw_futures
        return len(futures)
