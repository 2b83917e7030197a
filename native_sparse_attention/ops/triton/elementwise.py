"""Rotary embedding in Triton, as torch operators and autograd nodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .operator import needs_gradient, operator, refuse_higher_derivatives, unit_stride


def empty_heads(like: Tensor, n: int) -> Tensor:
    """Allocate [b h n d] with memory order [b n h d]."""
    b, h, _, d = like.shape
    return like.new_empty(b, n, h, d).transpose(1, 2)


# rotary embedding: one launch rotates queries and keys


@operator(
    "rotate(Tensor[] tensors, Tensor freqs, Tensor? starts, Tensor? positions, SymInt start, "
    "float factor) -> Tensor[]",
    fake=lambda tensors, *_: [empty_heads(t, t.shape[2]) for t in tensors],
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


# from the output of a projection to heads, some of them rotated


@operator(
    "projected_heads_backward(Tensor dq, Tensor dcq, Tensor dk, Tensor dck, Tensor dv, Tensor dcv, "
    "Tensor freqs, Tensor? positions, SymInt start, float factor) -> Tensor",
    fake=lambda dq, dcq, dk, *_: dq.new_empty(
        dq.shape[0], dq.shape[2], (dq.shape[1] + 2 * dk.shape[1]) * dq.shape[3]
    ),
)
def projected_heads_backward(dq, dcq, dk, dck, dv, dcv, freqs, positions, start, factor):
    """Gradient of the input of `ProjectedHeads`."""
    from ...kernels import rotary

    grads = unit_stride(dq, dcq, dk, dck, dv, dcv)
    return rotary.backward(grads, freqs, positions, start, factor)


class ProjectedHeads(torch.autograd.Function):
    """Split a projection's output [b n (h + 2 k) d] into heads [b h n d]: q and k rotated, q and k
    as they are, v, and v again for the compressed branch. One launch of the backward rotates, sums,
    and writes all gradients. Autograd would launch a kernel for each sum and one to concatenate."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, heads: int, dim_head: int, freqs: Tensor, positions: Tensor | None,
        factor: float,
    ) -> Any:  # fmt: skip
        rows = qkv.detach().unflatten(-1, (-1, dim_head)).transpose(1, 2)
        kv_heads = (rows.shape[1] - heads) // 2
        q, k, v = rows.split((heads, kv_heads, kv_heads), dim=1)
        ctx.factor = factor
        ctx.save_for_backward(freqs, positions)
        return *rotate_pairs([q, k], freqs, None, positions, 0, factor), q, k, v, v.view_as(v)

    @staticmethod
    def backward(ctx: Any, dq, dk, dcq, dck, dv, dcv) -> Any:
        refuse_higher_derivatives("rotary embedding")
        grad = projected_heads_backward(
            dq, dcq, dk, dck, dv, dcv, *ctx.saved_tensors, 0, -ctx.factor
        )
        return grad, *(None,) * 5
