"""Rotary embedding in Triton, as a torch operator: queries and keys by one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compat.transforms import on_values, refuse_legacy_batched, refuse_vmap
from .operators import rows


@torch.library.custom_op("native_sparse_attention::rotate", mutates_args=())
@on_values
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
    from ...kernels import rotary

    with torch.cuda.device_of(tensors[0]):
        return rotary.rotate(rows(*tensors), freqs, starts, positions, start, factor)


@rotate.register_fake
def _(tensors, *others):
    return [t.new_empty(t.transpose(1, 2).shape).transpose(1, 2) for t in tensors]


def setup(ctx, inputs, output):
    _, *where, start, factor = inputs
    ctx.numbers = start, factor
    ctx.save_for_backward(*where)


def backward(ctx, grads):
    """Gradients are turned back."""
    refuse_legacy_batched(*grads)
    start, factor = ctx.numbers
    return rotate(grads, *ctx.saved_tensors, start, -factor), *(None,) * 5


rotate.register_autograd(backward, setup_context=setup)
refuse_vmap(rotate)
