"""Whether the kernels of this folder can run, and what their launches have in common."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
import triton
from torch import Tensor

from . import launch

# versions of Triton with which these kernels have run on a GPU: Gluon, in which they are written,
# changes from one version to the next
VERSIONS = ((3, 6), (3, 7), (3, 8), (3, 9))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def triton_is_known() -> bool:
    return tuple(map(int, triton.__version__.split(".")[:2])) in VERSIONS


@functools.cache
def warn_of_unknown(version: str) -> None:
    """Say once what another Triton costs."""
    warnings.warn(
        f"the kernels for Hopper GPUs have not been run with Triton {version}. The portable "
        "kernels take their place: about 1.3 times the forward's time and 1.2 times the "
        "backward's. Install 'triton>=3.6,<3.10' for the faster ones.",
        stacklevel=2,
    )


def available(q: Tensor) -> bool:
    """Whether this GPU and this Triton can run them. `launch.using({"gluon": True})` tries them
    with a Triton that they have not been run with."""
    if not q.is_cuda or launch.capability(q.device.index) != (9, 0):
        return False
    if triton_is_known() or launch.override.get("gluon"):
        return True
    warn_of_unknown(triton.__version__)
    return False


def box(t: Tensor, shape: list[int]) -> Any:
    """A descriptor of t, of whose boxes of this shape rows lie as products read them."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(128, 8 * t.element_size(), rank=t.ndim)
    return TensorDescriptor(t, list(t.shape), list(t.stride()), shape, layout)
