"""Autocast on any device type, those that have none included (meta tensors)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

# not asked of torch.amp: dynamo cannot trace that in every version
WITHOUT = ("meta",)


def no_autocast(device: str) -> AbstractContextManager[object]:
    """Autocast disabled on a device type, such as "cuda"."""
    if device in WITHOUT:
        return nullcontext()
    return torch.autocast(device, enabled=False)


def is_autocast_enabled(device: str) -> bool:
    """Whether autocast is enabled on a device type."""
    return device not in WITHOUT and torch.is_autocast_enabled(device)
