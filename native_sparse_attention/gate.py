"""The network of the gate that combines the branches."""

from __future__ import annotations

import torch
from torch import nn

from .checks.tensors import BRANCHES
from .initialization import assign


class GateLinear(nn.Linear):
    """A linear map, initially with weight 0 and a bias `start` for every head.

    A recipe that initialises every `nn.Linear` can skip modules with `_no_reinit`.
    """

    _no_reinit = True

    def __init__(self, dim: int, heads: int, start: tuple[float, ...] = (-2.0, -2.0, 2.0)):
        self.start = start
        super().__init__(dim, len(start) * heads)

    def reset_parameters(self) -> None:
        """Restore the initial weights."""
        # draw numbers as nn.Linear does, so that a seed gives all other modules the same weights
        super().reset_parameters()
        nn.init.zeros_(self.weight)
        start = torch.tensor(self.start, device=self.bias.device)
        assign(self.bias, start.repeat(self.out_features // len(self.start)))


def default_gate(dim: int, heads: int, branches: tuple[str, ...] = BRANCHES) -> GateLinear:
    """[.. dim] -> [.. branches heads], before the sigmoid: the branches of every head.

    It initially favours the window for any input: a network learns local patterns first. Without a
    window all gates begin at 0.5.
    """
    bias = -2.0 if "window" in branches else 0.0
    return GateLinear(dim, heads, tuple(2.0 if name == "window" else bias for name in branches))
