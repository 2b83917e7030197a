"""The network of the gate that combines the branches."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .checks import BRANCHES
from .initialization import StartedLinear


def gate_linear(dim: int, heads: int, biases: tuple[float, ...]) -> StartedLinear:
    """[.. dim] -> [.. branches heads], initially with weight 0 and these biases for every head."""
    return StartedLinear(dim, len(biases) * heads, partial(start_gate, biases))


def start_gate(biases: tuple[float, ...], weight: Tensor) -> tuple[Tensor, Tensor]:
    bias = torch.tensor(biases, device=weight.device).repeat(len(weight) // len(biases))
    return torch.zeros(weight.shape, device=weight.device), bias


def default_gate(dim: int, heads: int, branches: tuple[str, ...] = BRANCHES) -> StartedLinear:
    """The gate before its sigmoid. It initially favours the window for any input: a network learns
    local patterns first. Without a window all gates begin at 0.5."""
    bias = -2.0 if "window" in branches else 0.0
    return gate_linear(dim, heads, tuple(2.0 if name == "window" else bias for name in branches))
