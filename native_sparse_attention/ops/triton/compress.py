"""Means of windows of keys and values in Triton, as a torch operator."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compat.transforms import refuse_legacy_batched, refuse_second_derivatives
from .operator import Arguments, operator, rows

SIZES = ("SymInt l", "SymInt d")
MEAN = Arguments(
    "Tensor k", "Tensor v", "Tensor k_positions", "Tensor v_positions", *SIZES, "SymInt windows",
    settings=False,
)  # fmt: skip
MEAN_KEYS = Arguments("Tensor k", *SIZES, "SymInt windows", settings=False)
MEAN_BACKWARD = Arguments(
    "Tensor dck", "Tensor dcv", "Tensor k_positions", "Tensor v_positions", *SIZES,
    "SymInt tokens", settings=False,
)  # fmt: skip


def heads_last(like: Tensor, n: int) -> Tensor:
    """Allocate [b h n d] with memory order [b n h d]."""
    b, h, _, d = like.shape
    return like.new_empty(b, n, h, d).transpose(1, 2)


@operator(
    "compress_mean", MEAN, "(Tensor, Tensor)",
    fake=lambda at: (heads_last(at.k, at.windows), heads_last(at.v, at.windows)),
)  # fmt: skip
def compress_mean(at):
    """Window means [b h windows d] of k and v [b h n d] with positions [h l d] added."""
    from ...kernels import compress_mean

    positions = rows(at.k_positions, at.v_positions)
    return compress_mean.forward(*rows(at.k, at.v), *positions, at.l, at.d, at.windows)


def gradients_fake(at):
    grads = [heads_last(t, at.tokens) for t in (at.dck, at.dcv)]
    return [*grads, *(torch.empty_like(p) for p in (at.k_positions, at.v_positions))]


@operator("compress_mean_backward", MEAN_BACKWARD, "Tensor[]", fake=gradients_fake)
def compress_mean_backward(at):
    """Gradients of k, v and the positions."""
    from ...kernels import compress_mean

    positions = at.k_positions, at.v_positions
    return list(compress_mean.backward(*rows(at.dck, at.dcv), *positions, at.l, at.d, at.tokens))


@operator("compress_mean_keys", MEAN_KEYS, "Tensor", fake=lambda at: heads_last(at.k, at.windows))
def compress_mean_keys(at):
    """Window means [b h windows d] of keys k [b h n d] that only rank blocks: no gradient."""
    from ...kernels import compress_mean

    return compress_mean.of_keys(*rows(at.k), at.l, at.d, at.windows)


def setup(ctx, at, output):
    ctx.numbers = dict(l=at.l, d=at.d, tokens=at.k.shape[2])
    ctx.save_for_backward(at.k_positions, at.v_positions)


def backward(ctx, grads):
    refuse_legacy_batched(*grads)
    positions = dict(zip(("k_positions", "v_positions"), ctx.saved_tensors, strict=True))
    found = compress_mean_backward(dck=grads[0], dcv=grads[1], **positions, **ctx.numbers)
    return dict(zip(("k", "v", "k_positions", "v_positions"), found, strict=True))


def means(
    k: Tensor, v: Tensor, k_positions: Tensor, v_positions: Tensor, l: int, d: int, windows: int
) -> dict[str, Tensor]:
    """Means of the windows of k and v, as "ck" and "cv"."""
    ck, cv = compress_mean(
        k=k, v=v, k_positions=k_positions, v_positions=v_positions, l=l, d=d, windows=windows
    )
    return {"ck": ck, "cv": cv}


def means_of_keys(k: Tensor, l: int, d: int, windows: int) -> dict[str, Tensor]:
    """Means of the windows of k, as "ck"."""
    return {"ck": compress_mean_keys(k=k.detach(), l=l, d=d, windows=windows)}


compress_mean.differentiable(setup, backward, many=False)
refuse_second_derivatives(compress_mean_backward)
