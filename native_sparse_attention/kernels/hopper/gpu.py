"""Whether the kernels of this folder can run, and what their launches have in common."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor

from .. import launch

# versions of Triton in whose Gluon the kernels are written, which changes from one to the next; and
# those with which they have run
GLUON = ((3, 6), (3, 7), (3, 8), (3, 9))
MEASURED = ((3, 6), (3, 7))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def triton_is_of(versions: tuple[tuple[int, int], ...]) -> bool:
    return tuple(map(int, triton.__version__.split(".")[:2])) in versions


def available(q: Tensor) -> bool:
    """Whether this GPU and this Triton can run them; with a Triton that has not been measured,
    where it is asked for."""
    versions = GLUON if launch.override.get("gluon") else MEASURED
    hopper = q.is_cuda and launch.capability(q.device.index) == (9, 0)
    return hopper and triton_is_of(versions)


def box(t: Tensor, shape: list[int]) -> Any:
    """A descriptor of t, of whose boxes of this shape rows lie as products read them."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(128, 8 * t.element_size(), rank=t.ndim)
    return TensorDescriptor(t, list(t.shape), list(t.stride()), shape, layout)
