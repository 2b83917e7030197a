"""The network of the gate that joins the branches."""

import einx
import torch
from torch import nn


def default_gate(dim: int, heads: int) -> nn.Linear:
    """[.. dim] -> [.. 3 heads], before the sigmoid: compressed, selected and window of every head.

    It starts at the window whatever the input: a network picks up local patterns first.
    """
    gate = nn.Linear(dim, 3 * heads)
    nn.init.zeros_(gate.weight)
    with torch.no_grad():
        bias = torch.tensor([-2.0, -2.0, 2.0])
        gate.bias.copy_(einx.multiply("h, s -> (h s)", torch.ones(heads), bias))
    return gate
