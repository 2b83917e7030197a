"""Rotary embedding (interleaved pairs, as in rotary-embedding-torch) at any positions, with fp32
angles."""

from __future__ import annotations

from collections.abc import Callable

import torch
from rotary_embedding_torch import RotaryEmbedding, apply_rotary_emb
from torch import Tensor
from torch.nn import Module

from .frequencies import cast, exact_frequencies, keep_exact, make_frequencies, reset_frequencies
from .ops.triton.elementwise import Heads, projected_heads
from .ops.triton.elementwise import rotate as run_kernel


class Rotary(Module):
    """Rotary embedding of the first `2 * len(freqs)` features: pair i rotates by `freqs[i]` radians
    per position. Each call computes the angles. The frequencies are a buffer, which optimizers and
    sharding ignore, and stay in fp32 when the model is cast.

    Args:
        dim: D, head dimension; even, unless inv_freq is given.
        theta: the frequencies are `theta^(-2 i / D)`.
        inv_freq: the frequencies themselves, [pairs], 1 to D / 2 of them.

    Raises:
        ValueError: an odd head dimension, or invalid frequencies.
    """

    freqs: Tensor
    exact: Tensor
    start: tuple[float, ...]
    # torch.compile treats a module's int as a constant; a float makes it trace twice
    interpolate_factor = 1

    def __init__(self, dim: int, theta: float = 10_000.0, inv_freq: Tensor | None = None):
        super().__init__()
        start = make_frequencies(dim, theta, inv_freq)
        self.register_buffer("freqs", torch.tensor(start, dtype=torch.float32))
        keep_exact(self, start)

    def reset_parameters(self) -> None:
        """Restore the frequencies of the constructor."""
        reset_frequencies(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        cast(self, lambda: super(Rotary, self)._apply(fn, recurse))
        return self


def rotation(
    rotary: RotaryEmbedding | Rotary | None,
    like: Tensor,
    start: int | Tensor,
    positions: Tensor | None = None,
) -> Callable[[Tensor], Tensor]:
    """Rotary embedding of [b h n d] at positions `start + 0 .. n - 1` (start: an int, or [b]), or
    at `positions` [b n].

    The angles are computed here: the embedding's own forward uses the dtype of its frequencies, and
    bf16 cannot tell position 257 from 256. Without an embedding nothing rotates.
    """
    if rotary is None:
        return lambda t: t
    if positions is None:
        position = torch.arange(like.shape[2], device=like.device)
        position = position + (start[:, None, None] if isinstance(start, Tensor) else start)
    else:
        position = positions[:, None]
    position = position.to(torch.promote_types(torch.float32, like.dtype))
    position = position / rotary.interpolate_factor
    angles = position[..., None] * exact_frequencies(rotary).to(position.dtype)
    angles = angles.repeat_interleave(2, dim=-1)
    return lambda t: apply_rotary_emb(angles, t)


def supports_kernels(rotary: RotaryEmbedding | Rotary, backend: str) -> bool:
    learned = rotary.freqs.requires_grad and torch.is_grad_enabled()
    return backend == "triton" and not learned


def rotate(
    rotary: RotaryEmbedding | Rotary | None,
    tensors: list[Tensor],
    start: int | Tensor,
    positions: Tensor | None,
    backend: str,
) -> list[Tensor]:
    """`rotation` of queries and then keys [b h n d]. A kernel rotates a pair in one launch, unless
    frequencies are learned. Without an embedding the tensors are returned unchanged."""
    if rotary is None:
        return tensors
    if not supports_kernels(rotary, backend):
        rotate_one = rotation(rotary, tensors[0], start, positions)
        return [rotate_one(t) for t in tensors]
    factor = float(rotary.interpolate_factor)
    return run_kernel(tensors, exact_frequencies(rotary), start, positions, factor)


def rotated_heads(
    rotary: RotaryEmbedding | Rotary | None,
    qkv: Tensor,
    heads: int,
    dim_head: int,
    positions: Tensor | None,
    backend: str,
) -> Heads | None:
    """Queries and keys [b h n d] of a projection's output [b n (h + 2 k) d], rotated and raw, and
    values. None if the caller should use `rotate`."""
    if rotary is None or not supports_kernels(rotary, backend):
        return None
    factor = float(rotary.interpolate_factor)
    return projected_heads(qkv, heads, dim_head, exact_frequencies(rotary), positions, factor)


def make_rotary(
    dim_head: int,
    rotary_emb: RotaryEmbedding | Rotary | bool | None,
    rope_theta: float | None,
    inv_freq: Tensor | None,
) -> RotaryEmbedding | Rotary | None:
    """The embedding of a layer, or None for one without positions (`rotary_emb=False`).

    Raises:
        ValueError: more than one of the three, or an embedding that does not match this head
            dimension at any length.
    """
    choices = dict(rotary_emb=rotary_emb, rope_theta=rope_theta, inv_freq=inv_freq)
    names = [name for name, value in choices.items() if value is not None]
    if len(names) > 1:
        raise ValueError(f"give at most one of {', '.join(choices)}, got {' and '.join(names)}")
    if rotary_emb is False:
        return None
    if rotary_emb is None:
        return Rotary(dim_head, 10_000.0 if rope_theta is None else rope_theta, inv_freq)
    if not isinstance(rotary_emb, (RotaryEmbedding, Rotary)):
        raise ValueError(
            "rotary_emb must be a RotaryEmbedding of the rotary-embedding-torch package, None for "
            f"the layer's own or False for no positions, got {rotary_emb!r}"
        )
    if getattr(rotary_emb, "use_xpos", False):
        raise ValueError(
            "rotary_emb must have use_xpos=False: a key's scale would depend on the length"
        )
    freqs = rotary_emb.freqs
    if freqs.ndim != 1 or not freqs.is_floating_point():
        raise ValueError(
            "rotary_emb must have a vector of floating-point frequencies, got "
            f"{list(freqs.shape)} of {freqs.dtype}"
        )
    if 2 * len(freqs) > dim_head:
        raise ValueError(
            f"rotary_emb must rotate at most dim_head={dim_head} features, got {2 * len(freqs)}"
        )
    if isinstance(rotary_emb, RotaryEmbedding):
        keep_exact(rotary_emb)
    return rotary_emb
