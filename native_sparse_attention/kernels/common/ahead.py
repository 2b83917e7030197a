"""Compile and load kernels ahead of their first launch, in parallel.

A call compiles its kernels one after the other, each at its launch. Here the call's host code runs
once without launching anything, and threads compile its kernels: the compiler releases Python's
lock for most of its time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
from triton.runtime.jit import JITFunction

try:  # from Triton 3.6 on
    from triton import knobs
    from triton.runtime import build
    from triton.runtime._async_compile import AsyncCompileMode

    build._load_module_from_path  # noqa: B018  (without it threads cannot be kept apart)
except (ImportError, AttributeError):
    AsyncCompileMode = None

# whether launches of this thread only compile
only_compiles: ContextVar[bool] = ContextVar("only_compiles", default=False)
# held while launches are replaced
one_at_a_time = threading.Lock()


def cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def is_possible() -> bool:
    """Whether this Triton can compile in threads and there are several cores."""
    return AsyncCompileMode is not None and not knobs.runtime.interpret and cores() > 1


@contextmanager
def without_launches() -> Iterator[None]:
    """Launches of this thread compile but do not run; other threads launch as usual."""
    own = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return own(self, *args, grid=grid, warmup=warmup or only_compiles.get(), **kwargs)

    JITFunction.run = run
    token = only_compiles.set(True)
    try:
        yield
    finally:
        only_compiles.reset(token)
        JITFunction.run = own


@contextmanager
def own_launchers() -> Iterator[None]:
    """Each launcher that is loaded, by any thread, is a module of its own.

    Before 3.8 Triton builds a C module for each kernel, all of one name. Where Python loads a file
    again, it puts its functions into the module that was loaded last under that name, so that two
    threads may take each other's launcher."""
    load, lock = build._load_module_from_path, threading.Lock()

    def load_apart(name: str, path: str) -> ModuleType:
        with lock:
            module = ModuleType(name)
            vars(module).update(vars(load(name, path)))
            return module

    build._load_module_from_path = load_apart
    try:
        yield
    finally:
        build._load_module_from_path = load


class Threads(ThreadPoolExecutor):
    """Threads that compile kernels and load them onto the current GPU. Otherwise Triton loads a
    kernel at its first launch, for which it also builds a launcher with a C compiler."""

    def submit(self, compile_one: Callable[[], Any]) -> Future:  # type: ignore[override]
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        return super().submit(loaded, compile_one, device)


def loaded(compile_one: Callable[[], Any], device: int | None) -> Any:
    kernel = compile_one()
    if device is not None:
        try:
            with torch.cuda.device(device):
                kernel._init_handles()
        except Exception:  # the launch loads it again, and raises
            kernel._run = None
    return kernel


def compile_ahead(
    dry_run: Callable[[], Any],
    done: Callable[[int, int], None] | None = None,
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
    with one_at_a_time, own_launchers(), Threads(cores(), "nsa-compile") as pool:
        with AsyncCompileMode(pool, ignore_errors=ignore_errors) as mode, without_launches():
            dry_run()
            futures: list[Future] = mode.raw_futures
            for number, _ in enumerate(as_completed(futures), 1):
                if done is not None:
                    done(number, len(futures))
        return len(futures)
