"""Autocast on any device type, including types without autocast (meta tensors)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

# fixed here, since dynamo cannot trace the query of torch.amp in every version
WITHOUT = ("meta",)


def no_autocast(device: str) -> AbstractContextManager[object]:
    """Disable autocast on a device type, such as "cuda"."""
    if device in WITHOUT:
        return nullcontext()
    return torch.autocast(device, enabled=False)


def in_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors as autocast casts a matmul's inputs: all but fp64 to its dtype."""
    device = tensors[0].device.type
    if device in WITHOUT or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    cast = (torch.float16, torch.bfloat16, torch.float32)
    return tuple(t.to(dtype) if t.dtype in cast else t for t in tensors)
