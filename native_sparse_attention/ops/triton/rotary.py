"""Rotary embedding in Triton, as a torch operator. One launch rotates queries and keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...compat.transforms import is_plain, refuse_legacy_batched, refuse_second_derivatives
from .operator import Arguments, operator, rows

ROTATE = Arguments(
    "Tensor[] tensors", "Tensor freqs", "Tensor? starts", "Tensor? positions", "SymInt start",
    "float factor", settings=False,
)  # fmt: skip


def rotated_fake(at):
    return [t.new_empty(t.transpose(1, 2).shape).transpose(1, 2) for t in at.tensors]


@operator("rotate", ROTATE, "Tensor[]", fake=rotated_fake)
def rotate(at):
    """Rotate pairs of the first features of `tensors` [b h n d] by `position / factor * freqs`, in
    fp32, and copy the other features. The tensors differ only in their heads. Results have memory
    order [b n h d]. Positions are `positions` [b n], or count from `starts` [b] or `start`."""
    from ...kernels import rotary

    tensors = rows(*at.tensors)
    return rotary.rotate(tensors, at.freqs, at.starts, at.positions, at.start, at.factor)


def setup(ctx, at, output):
    ctx.start, ctx.factor = at.start, at.factor
    ctx.save_for_backward(at.freqs, at.starts, at.positions)


def backward(ctx, grads):
    """Rotate the gradients by the negative angles."""
    refuse_legacy_batched(*grads)
    freqs, starts, positions = ctx.saved_tensors
    turned = rotate(
        tensors=list(grads), freqs=freqs, starts=starts, positions=positions, start=ctx.start,
        factor=-ctx.factor,
    )  # fmt: skip
    return dict(tensors=list(turned))


rotate.differentiable(setup, backward, many=True)


# from a projection's output to heads, some of them rotated

GRADIENTS = ("dq", "dcq", "dk", "dck", "dv", "dcv")
PROJECTED = Arguments(
    *(f"Tensor {name}" for name in GRADIENTS), "Tensor freqs", "Tensor? positions", "SymInt start",
    "float factor", settings=False,
)  # fmt: skip


def projected_fake(at):
    (B, H, T, D), K = at.dq.shape, at.dk.shape[1]
    return at.dq.new_empty(B, T, (H + 2 * K) * D)


@operator("projected_heads_backward", PROJECTED, "Tensor", fake=projected_fake)
def projected_heads_backward(at):
    """Gradient of the input of `ProjectedHeads`."""
    from ...kernels import rotary

    grads = rows(*(getattr(at, name) for name in GRADIENTS))
    return rotary.backward(*grads, at.freqs, at.positions, at.start, at.factor)


refuse_second_derivatives(projected_heads_backward)


class Heads(NamedTuple):
    """Heads [b h n d]; only q and k are rotated. cq, ck and cv are for the compressed branch. `v`
    and `cv` share their memory."""

    q: Tensor
    k: Tensor
    cq: Tensor
    ck: Tensor
    v: Tensor
    cv: Tensor


def split(qkv: Tensor, heads: int, dim_head: int) -> tuple[Tensor, ...]:
    """Queries, keys and values [b h n d] of a projection's output [b n (h + 2 k) d]."""
    every = qkv.unflatten(-1, (-1, dim_head)).transpose(1, 2)
    kv_heads = (every.shape[1] - heads) // 2
    return every.split((heads, kv_heads, kv_heads), dim=1)


class ProjectedHeads(torch.autograd.Function):
    """Split a projection's output [b n (h + 2 k) d] into q, k and v, with q and k both rotated and
    unrotated. One launch of the backward rotates, sums and writes all gradients. Autograd would
    launch a kernel for each sum and one to concatenate."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, heads: int, dim_head: int, freqs: Tensor, positions: Tensor | None,
        factor: float,
    ) -> Any:  # fmt: skip
        q, k, v = split(qkv.detach(), heads, dim_head)
        ctx.factor = factor
        ctx.save_for_backward(freqs, positions)
        rotated = rotate(tensors=[q, k], freqs=freqs, positions=positions, start=0, factor=factor)
        return *rotated, q, k, v, v.view_as(v)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        freqs, positions = ctx.saved_tensors
        named = dict(zip(("dq", "dk", "dcq", "dck", "dv", "dcv"), grads, strict=True))
        found = projected_heads_backward(
            **named, freqs=freqs, positions=positions, start=0, factor=-ctx.factor
        )
        return found, *(None,) * 5


def projected_heads(
    qkv: Tensor, heads: int, dim_head: int, freqs: Tensor, positions: Tensor | None, factor: float
) -> Heads | None:
    """The heads of a projection's output; None if one launch would not help."""
    if not (torch.is_grad_enabled() and qkv.requires_grad and is_plain([qkv, freqs, positions])):
        return None
    return Heads(*ProjectedHeads.apply(qkv, heads, dim_head, freqs, positions, factor))
