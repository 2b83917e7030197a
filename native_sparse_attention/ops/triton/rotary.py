"""Rotary embedding in Triton, as a torch operator: queries and keys by one launch."""

from __future__ import annotations

from torch import Tensor

from ...compat.transforms import refuse_legacy_batched
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
