"""Rotary embedding in Triton, as a torch operator: queries and keys by one launch."""

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
def turn(at):
    from ...kernels import rotary

    where = at.freqs, at.starts, at.positions, at.start, at.factor
    return rotary.rotate(rows(*at.tensors), *where)


def setup(ctx, at, output):
    ctx.numbers = at.start, at.factor
    ctx.save_for_backward(at.freqs, at.starts, at.positions)


def backward(ctx, grads):
    """Gradients are turned back."""
    refuse_legacy_batched(*grads)
    start, factor = ctx.numbers
    return dict(tensors=rotate(list(grads), *ctx.saved_tensors, start, -factor))


turn.differentiable(setup, backward, many=True)


def rotate(
    tensors: list[Tensor],
    freqs: Tensor,
    starts: Tensor | None,
    positions: Tensor | None,
    start: int,
    factor: float,
) -> list[Tensor]:
    """Tensors [b h n d] that differ in their heads only, the pairs of their first features turned
    by the angles `position / factor * freqs`, in fp32, and the other features copied. In memory
    they are [b n h d] then. Positions are `positions` [b n], or go on from `starts` [b] or `start`.
    """
    return list(
        turn(
            tensors=tensors, freqs=freqs, starts=starts, positions=positions, start=start,
            factor=factor,
        )
    )  # fmt: skip


# of a projection's output, to heads of which some are rotated

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
    """The gradient of `ProjectedHeads`' input."""
    from ...kernels import rotary

    grads = rows(*(getattr(at, name) for name in GRADIENTS))
    return rotary.backward(*grads, at.freqs, at.positions, at.start, at.factor)


refuse_second_derivatives(projected_heads_backward)


class Heads(NamedTuple):
    """[b h n d], the first two rotated; cq, ck and cv are for the compressed branch. In `v` and
    `cv` are the same numbers, in the same memory."""

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
    """q, k and v from a projection's output [b n (h + 2 k) d], rotated and as they are. Its
    backward adds up what they get, turned back, where it belongs, by one launch; autograd would
    take one for each sum, and one to concatenate."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, heads: int, dim_head: int, freqs: Tensor, positions: Tensor | None,
        factor: float,
    ) -> Any:  # fmt: skip
        q, k, v = split(qkv.detach(), heads, dim_head)
        ctx.factor = factor
        ctx.save_for_backward(freqs, positions)
        return *rotate([q, k], freqs, None, positions, 0, factor), q, k, v, v.view_as(v)

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
    """The heads of a projection's output; None where nothing is gained."""
    if not (torch.is_grad_enabled() and qkv.requires_grad and is_plain([qkv, freqs, positions])):
        return None
    return Heads(*ProjectedHeads.apply(qkv, heads, dim_head, freqs, positions, factor))
