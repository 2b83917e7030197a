"""Initialization of modules: `reset_parameters` restores the constructor's weights.

FSDP's deferred initialisation, and training scripts after `to_empty`, call `reset_parameters` of
every module that has it, in any order. So each module with special initial weights has a class that
sets them, and a module that contains other modules resets them too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import Module


def assign(tensor: Tensor, values: Tensor) -> None:
    """Write values to a parameter or buffer in place, also to a DTensor sharded by FSDP2. NaN keeps
    the tensor's own value."""
    with torch.no_grad():
        values = values.to(tensor.device, tensor.dtype)
        mesh = getattr(tensor, "device_mesh", None)
        if mesh is not None:
            from torch.distributed.tensor import distribute_tensor

            # every rank has the whole values: without a source none are sent
            values = distribute_tensor(values, mesh, tensor.placements, src_data_rank=None)  # type: ignore[attr-defined]
        tensor.copy_(torch.where(values.isnan(), tensor, values))


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


class Started(Module):
    """A module whose `reset_parameters` resets all modules below it, and its own parameters to 0.

    `twins` names two children in their order; the second draws the numbers that the first draws.
    """

    twins: tuple[str, ...] = ()

    def reset_parameters(self) -> None:
        """Restore the constructor's values, in every module below too. Random values are drawn anew
        from the same distribution. Modules of other libraries use their own `reset_parameters`."""
        for name, child in self.named_children():
            gpus = [p.device for p in child.parameters() if p.is_cuda][:1]
            with torch.random.fork_rng(gpus) if name in self.twins[:1] else nullcontext():
                reset(child)
        for parameter in self.parameters(recurse=False):
            nn.init.zeros_(parameter)


class StartedLinear(nn.Linear):
    """A linear map that begins as nn.Linear, with the values of `start(weight)` for its weight and
    bias, where these are not NaN.

    A recipe that initialises every `nn.Linear` can skip modules with `_no_reinit`.
    """

    _no_reinit = True

    def __init__(
        self, in_features: int, out_features: int, start: Callable[[Tensor], tuple[Tensor, ...]],
        bias: bool = True,
    ):  # fmt: skip
        self.start = start  # before nn.Linear, whose constructor resets
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        super().reset_parameters()  # draws the same random numbers as nn.Linear
        for parameter, values in zip((self.weight, self.bias), self.start(self.weight)):  # noqa: B905
            assign(parameter, values)


def gate_linear(dim: int, heads: int, biases: Sequence[float]) -> StartedLinear:
    """[.. dim] -> [.. branches heads], initially with weight 0 and these biases for every head."""
    return StartedLinear(dim, len(biases) * heads, partial(start_gate, tuple(biases)))


def start_gate(biases: tuple[float, ...], weight: Tensor) -> tuple[Tensor, Tensor]:
    bias = torch.tensor(biases, device=weight.device).repeat(len(weight) // len(biases))
    return torch.zeros(weight.shape, device=weight.device), bias
