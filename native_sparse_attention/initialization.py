"""Starts of modules: `reset_parameters` gives what the constructor gave.

A recipe calls `reset_parameters` of every module that has one, in any order: FSDP's deferred
initialisation, and training scripts after `to_empty`. So a module whose weights have a start of
their own is a class with that start, and a module that holds such modules starts them too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module


def assign(tensor: Tensor, values: Tensor) -> None:
    """Write values to a parameter or buffer in place, one sharded by FSDP2 (a DTensor) included."""
    mesh = getattr(tensor, "device_mesh", None)
    with torch.no_grad():
        if mesh is not None:
            from torch.distributed.tensor import DTensor, Replicate

            whole = values.to(tensor.device, tensor.dtype)
            replicated: Any = DTensor.from_local(
                whole, mesh, [Replicate()] * mesh.ndim, run_check=False
            )
            values = replicated.redistribute(placements=tensor.placements)  # type: ignore[attr-defined]
        tensor.copy_(values)


def reset_below(module: Module) -> None:
    """Start every module below this one anew, children before the module that holds them."""
    for child in module.children():
        reset(child)


def reset(module: Module) -> None:
    """Start a module and all below it anew."""
    # FSDP1 has started what it wraps, and left flat shards there
    if hasattr(module, "_fsdp_wrapped_module"):
        return
    if not isinstance(module, Started):
        reset_below(module)
    start = getattr(module, "reset_parameters", None)
    if callable(start):
        start()


def reset_twin(module: Module, twin: Module) -> None:
    """Start a module anew, and its deep copy `twin` with the same values."""
    reset(module)
    pairs = [(getattr(twin, kind)(), getattr(module, kind)()) for kind in ("parameters", "buffers")]
    same = [(a, b) for to, of in pairs for a, b in zip(to, of, strict=False)]
    if any(a.shape != b.shape or a.device != b.device for a, b in same):
        reset(twin)  # one of the two is sharded, or has no data yet
        return
    started = {
        name for name, m in module.named_modules() if callable(getattr(m, "reset_parameters", None))
    }
    twins = dict(twin.named_modules())
    with torch.no_grad():
        for name in started:
            for to, of in zip(direct(twins[name]), direct(module.get_submodule(name)), strict=True):
                to.copy_(of)


def direct(module: Module) -> list[Tensor]:
    """Parameters and buffers of a module, without those of its children."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


class Started(Module):
    """A module whose `reset_parameters` starts all below it anew; parameters of its own are 0.

    Of `twins`, names of two children, the second starts as a copy of the first.
    """

    twins: tuple[str, ...] = ()

    def reset_parameters(self) -> None:
        """Restore what the constructor gives, in every module below too: the same values or, where
        they are random, new ones of the same distribution. In modules that others wrote their own
        `reset_parameters` decide."""
        for name, child in self.named_children():
            if name not in self.twins:
                reset(child)
            elif name == self.twins[0]:
                reset_twin(child, self.get_submodule(self.twins[1]))
        for parameter in self.parameters(recurse=False):
            nn.init.zeros_(parameter)
