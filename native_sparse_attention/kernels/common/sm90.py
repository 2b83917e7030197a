"""Availability of the `_sm90` kernels, and helpers of their launches."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
import triton
from torch import Tensor

from . import launch

# versions of Triton with which these kernels have run on a GPU: Gluon changes between versions
VERSIONS = ((3, 6), (3, 7), (3, 8), (3, 9))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def triton_is_known() -> bool:
    return tuple(map(int, triton.__version__.split(".")[:2])) in VERSIONS


@functools.cache
def warn_of_unknown(version: str) -> None:
    """Warn once of the cost of an unknown Triton."""
    warnings.warn(
        f"the kernels for Hopper GPUs have not been run with Triton {version}. The portable "
        "kernels take their place: about 1.3 times the forward's time and 1.2 times the "
        "backward's. Install 'triton>=3.6,<3.10' for the faster ones.",
        stacklevel=2,
    )


def available(t: Tensor | launch.Layout) -> bool:
    """Whether the GPU of t and this Triton can run `_sm90` kernels. `launch.using({"gluon": True})`
    also runs them with an unknown Triton."""
    if t.device.type != "cuda" or launch.capability(t.device.index) != (9, 0):
        return False
    if triton_is_known() or launch.override.get("gluon"):
        return True
    warn_of_unknown(triton.__version__)
    return False


@functools.cache
def operand_layout(bits: int, rank: int) -> Any:
    """The shared-memory layout of MMA operands."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(128, bits, rank=rank)


def box(t: Tensor, shape: list[int]) -> Any:
    """A TMA descriptor of t with boxes of `shape`, in the layout of MMA operands."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = operand_layout(8 * t.element_size(), t.ndim)
    return TensorDescriptor(t, list(t.shape), list(t.stride()), shape, layout)
