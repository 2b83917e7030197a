"""The network of the gate that combines the branches."""

from __future__ import annotations

import torch
from torch import nn

from .initialization import assign


class GateLinear(nn.Linear):
    """A linear map, initially with weight 0 and bias (-2, -2, 2) for every head.

    A recipe that initialises every `nn.Linear` can skip modules with `_no_reinit`.
    """

    _no_reinit = True

    def reset_parameters(self) -> None:
        """Restore the initial weights."""
        # draw numbers as nn.Linear does, so that a seed gives all other modules the same weights
        super().reset_parameters()
        nn.init.zeros_(self.weight)
        start = torch.tensor([-2.0, -2.0, 2.0], device=self.bias.device)
        assign(self.bias, start.repeat(self.out_features // 3))


def default_gate(dim: int, heads: int) -> GateLinear:
    """[.. dim] -> [.. 3 heads], before the sigmoid: compressed, selected and window of every head.

    It initially favours the window for any input: a network learns local patterns first.
    """
    return GateLinear(dim, 3 * heads)
