"""Autocast on any device type, including types without autocast (meta tensors)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

# fixed here, since dynamo cannot trace the query of torch.amp in every version
WITHOUT = ("meta",)


def no_autocast(device: str) -> AbstractContextManager[object]:
    """Disable autocast on a device type, such as "cuda"."""
    if device in WITHOUT:
        return nullcontext()
    return torch.autocast(device, enabled=False)


def is_autocast_enabled(device: str) -> bool:
    """Whether autocast is enabled on a device type."""
    return device not in WITHOUT and torch.is_autocast_enabled(device)
