"""Rotary embedding in Triton, as torch operators and autograd nodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call import needs_gradient
from .operator import operator, unit_stride


@operator(
    "rotate(Tensor[] tensors, Tensor freqs, Tensor? starts, Tensor? positions, SymInt start, "
    "float factor) -> Tensor[]",
    fake=lambda tensors, *_: [
        t.new_empty(t.transpose(1, 2).shape).transpose(1, 2) for t in tensors
    ],
)
def rotate_pairs(tensors, freqs, starts, positions, start, factor):
    """Rotate pairs of the first features of `tensors` [b h n d] by `position / factor * freqs`, in
    fp32, and copy the other features. The tensors differ only in their heads. Results have memory
    order [b n h d]. Positions are `positions` [b n], or count from `starts` [b] or `start`."""
    from ...kernels import rotary

    return rotary.rotate(unit_stride(*tensors), freqs, starts, positions, start, factor)


class Rotate(torch.autograd.Function):
    """`rotate_pairs`; the backward rotates the gradients by the negative angles."""

    @staticmethod
    def forward(
        ctx: Any, freqs: Tensor, starts: Tensor | None, positions: Tensor | None, start: int,
        factor: float, *tensors: Tensor,
    ) -> Any:  # fmt: skip
        ctx.start, ctx.factor = start, factor
        ctx.save_for_backward(freqs, starts, positions)
        return tuple(rotate_pairs(tensors, freqs, starts, positions, start, factor))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        places = *ctx.saved_tensors, ctx.start, -ctx.factor
        if torch.compiler.is_compiling():  # dynamo traces no node in the backward of another
            return *(None,) * 5, *rotate_pairs(grads, *places)
        return *(None,) * 5, *Rotate.apply(*places, *grads)


def rotate(
    tensors: list[Tensor], freqs: Tensor, start: int | Tensor, positions: Tensor | None,
    factor: float,
) -> list[Tensor]:  # fmt: skip
    """`rotate_pairs` from a position `start`, or from one for each sequence [b]."""
    starts, start = (start, 0) if isinstance(start, Tensor) else (None, start)
    if not needs_gradient(tensors):
        return list(rotate_pairs(tensors, freqs, starts, positions, start, factor))
    return list(Rotate.apply(freqs, starts, positions, start, factor, *tensors))
