"""Operations of Gluon whose names differ from one version of Triton to the next."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma


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
