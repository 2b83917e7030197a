"""Initialization of modules: `reset_parameters` restores the constructor's weights.

FSDP's deferred initialisation, and training scripts after `to_empty`, call `reset_parameters` of
every module that has it, in any order. So each module with special initial weights has a class that
sets them, and a module that contains other modules resets them too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module


def assign(tensor: Tensor, values: Tensor, mask: Tensor | None = None) -> None:
    """Write values to a parameter or buffer in place, also to a DTensor sharded by FSDP2; those
    alone where a mask of its shape is true."""
    mesh = getattr(tensor, "device_mesh", None)

    def shard(whole: Tensor) -> Tensor:
        if mesh is None:
            return whole
        from torch.distributed.tensor import DTensor, Replicate

        replicated: Any = DTensor.from_local(
            whole, mesh, [Replicate()] * mesh.ndim, run_check=False
        )
        return replicated.redistribute(placements=tensor.placements)  # type: ignore[attr-defined]

    with torch.no_grad():
        values = shard(values.to(tensor.device, tensor.dtype))
        if mask is not None:
            values = torch.where(shard(mask.to(tensor.device)), values, tensor)
        tensor.copy_(values)


def reset(module: Module) -> None:
    """Reset a module and all modules below it, children before parents."""
    # FSDP1 has reset the modules that it wraps; they now hold flat shards
    if hasattr(module, "_fsdp_wrapped_module"):
        return
    if not isinstance(module, Started):
        for child in module.children():
            reset(child)
    start = getattr(module, "reset_parameters", None)
    if callable(start):
        start()


def reset_twin(module: Module, twin: Module) -> None:
    """Reset a module, and its deep copy `twin` to the same values."""
    reset(module)
    tensors = ([*m.parameters(), *m.buffers()] for m in (twin, module))
    if any(a.shape != b.shape or a.device != b.device for a, b in zip(*tensors, strict=False)):
        reset(twin)  # module or twin is sharded, or has no data yet
        return
    started = {
        name for name, m in module.named_modules() if callable(getattr(m, "reset_parameters", None))
    }
    twins = dict(twin.named_modules())
    with torch.no_grad():
        for name in started:
            # without the tensors of children
            targets, sources = (
                [*m.parameters(recurse=False), *m.buffers(recurse=False)]
                for m in (twins[name], module.get_submodule(name))
            )
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)


class Started(Module):
    """A module whose `reset_parameters` resets all modules below it, and its own parameters to 0.

    `twins` names two children; the second is reset to a copy of the first.
    """

    twins: tuple[str, ...] = ()

    def reset_parameters(self) -> None:
        """Restore the constructor's values, in every module below too. Random values are drawn anew
        from the same distribution. Modules of other libraries use their own `reset_parameters`."""
        for name, child in self.named_children():
            if name not in self.twins:
                reset(child)
            elif name == self.twins[0]:
                reset_twin(child, self.get_submodule(self.twins[1]))
        for parameter in self.parameters(recurse=False):
            nn.init.zeros_(parameter)
