"""Compression networks under trial, of the protocol [b h w l d] -> [b h w d].

The weights do not grow with the window, as those of the published network do, l^2 d^2.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from native_sparse_attention.compress import (
    CompressMLP,
    SumUnits,
    begun_as_sums,
    default_compress_mlp,
)
from native_sparse_attention.initialization import Started

POOLS = ("mean", "sum", "max", "softmax")


class ConvMLP(Started):
    """`pool_l (W2 relu(W1 [x_(l-k+1) .. x_l] + b1) + b2)`: two layers over each token of a window
    with the k - 1 tokens before it, zeros before the window's first.

    Args:
        kernel: k tokens that the first layer sees.
        expand: hidden width over that of a head.
        pool: over the window's tokens: "mean" or "sum", "max" of the hidden layer, or "softmax", a
            mean weighed by a third map of the hidden layer.
        residual: add the mean of the window (True), or its "sum".
        zero: begin with W2 = 0.
    """

    def __init__(
        self,
        dim_head: int,
        kernel: int = 2,
        expand: float = 8.0,
        pool: str = "mean",
        residual: bool | str = False,
        zero: bool = False,
    ) -> None:
        super().__init__()
        if pool not in POOLS:
            raise ValueError(f"pool must be one of {', '.join(POOLS)}, got {pool!r}")
        self.kernel, self.pool, self.residual, self.zero = kernel, pool, residual, zero
        hidden = int(expand * dim_head)
        self.to_hidden = nn.Linear(kernel * dim_head, hidden)
        self.to_out = nn.Linear(hidden, dim_head)
        self.to_weights = nn.Linear(hidden, 1, bias=False) if pool == "softmax" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for linear in (self.to_hidden, self.to_out, self.to_weights):
            if linear is not None:
                linear.reset_parameters()
        if self.zero:
            for parameter in self.to_out.parameters():
                nn.init.zeros_(parameter)

    def forward(self, kv: Tensor) -> Tensor:
        before = F.pad(kv, (0, 0, self.kernel - 1, 0))
        neighbours = before.unfold(3, self.kernel, 1).flatten(4)
        hidden = self.to_hidden(neighbours).relu()
        if self.pool == "max":
            pooled = hidden.amax(dim=3)
        elif self.to_weights is not None:
            weights = self.to_weights(hidden).softmax(dim=3, dtype=torch.float32)
            pooled = (weights * hidden).sum(dim=3).to(hidden.dtype)
        elif self.pool == "sum":
            pooled = hidden.sum(dim=3)
        else:
            pooled = hidden.mean(dim=3)
        out = self.to_out(pooled)
        if self.residual == "sum":
            return out + kv.sum(dim=3)
        return out + kv.mean(dim=3) if self.residual else out


class MeanMLP(CompressMLP):
    """The published network `W2 relu(W1 x + b1) + b2`, begun as the mean of the window plus what
    the hidden units after the first 2 d give: the layer's own begins as the sum."""

    def __init__(self, dim_head: int, window: int, expand_factor: float = 1.0) -> None:
        super().__init__(*default_compress_mlp(dim_head, window, expand_factor))
        self.window = window
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        first = self.get_submodule("1")
        assert isinstance(first, SumUnits)
        with torch.no_grad():
            first.weight[: 2 * begun_as_sums(first.dim_head, first.out_features)] /= self.window


class LowRankMLP(Started):
    """`W2 relu(V U x + b1) + b2` of the flattened window, with U [r, l d] and V [h, r]."""

    def __init__(self, dim_head: int, window: int, rank: float = 2.0, expand: float = 8.0) -> None:
        super().__init__()
        hidden, inner = int(expand * dim_head), int(rank * dim_head)
        self.to_rank = nn.Linear(window * dim_head, inner, bias=False)
        self.to_hidden = nn.Linear(inner, hidden)
        self.to_out = nn.Linear(hidden, dim_head)

    def forward(self, kv: Tensor) -> Tensor:
        return self.to_out(self.to_hidden(self.to_rank(kv.flatten(3))).relu())


class ConvolvedKeys(nn.Module):
    """In place of `to_index`: the same projection, whose keys are then convolved over the newest
    `taps` tokens, each feature by itself. It begins as the projection."""

    def __init__(self, layer: Any, taps: int) -> None:
        super().__init__()
        self.project = layer.to_index
        self.width = layer.index_heads * layer.index_dim
        self.taps = nn.Parameter(torch.zeros(self.width, 1, taps))
        with torch.no_grad():
            self.taps[..., -1] = 1.0

    def forward(self, x: Tensor) -> Tensor:
        queries, keys = self.project(x).split(
            [self.project.out_features - self.width, self.width], -1
        )
        keys = F.pad(keys.mT, (self.taps.shape[-1] - 1, 0))
        keys = F.conv1d(keys, self.taps.to(keys.dtype), groups=self.width)
        return torch.cat((queries, keys.mT), dim=-1)
