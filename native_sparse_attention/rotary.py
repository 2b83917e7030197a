"""Rotary embedding (interleaved pairs, as in rotary-embedding-torch) at any positions, with fp32
angles.

In bf16 the angle at position 10,000 would be off by whole turns. The frequencies therefore stay in
fp32 when a model is cast or loads a checkpoint of less precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rotary_embedding_torch import RotaryEmbedding, apply_rotary_emb
from torch import Tensor
from torch.nn import Module

from .checks import (
    FLOAT_DTYPES,
    TOO_MANY,
    check_int,
    check_number,
    describe,
    is_strided,
    refusal,
)
from .ops.triton.elementwise import rotate as run_kernel


class Rotary(Module):
    """Rotary embedding of the first `2 * len(freqs)` features: pair i rotates by `freqs[i]` radians
    per position. Each call computes the angles. The frequencies are a buffer, which optimizers and
    sharding ignore.

    Args:
        dim: D, head dimension; even, unless inv_freq is given.
        theta: the frequencies are `theta^(-2 i / D)`.
        inv_freq: the frequencies themselves, [pairs], 1 to D / 2 of them.
        interpolate_factor: divides the positions.
    """

    freqs: Tensor
    exact: Tensor

    def __init__(
        self, dim: int, theta: float = 10_000.0, inv_freq: Tensor | None = None,
        interpolate_factor: float = 1,
    ):  # fmt: skip
        super().__init__()
        # torch.compile treats a module's int as a constant; a float makes it trace twice
        self.interpolate_factor = interpolate_factor
        self.start = make_frequencies(dim, theta, inv_freq)
        self.register_buffer("freqs", torch.tensor(self.start, dtype=torch.float32))
        # their bits as integers, which mixed precision leaves alone
        self.register_buffer("exact", self.freqs.view(torch.int32).clone(), persistent=False)

    def forward(self) -> Tensor:
        """The frequencies in fp32 or better: hooks that offload buffers load them for this call."""
        return self.freqs if self.freqs.dtype.itemsize >= 4 else self.exact.view(torch.float32)

    def reset_parameters(self) -> None:
        """Restore the frequencies of the constructor."""
        # `freqs` alone may be on meta: a file holds it
        device = self.freqs.device if self.exact.is_meta else self.exact.device
        values = torch.tensor(self.start, dtype=torch.float32, device=device)
        self.freqs = self.freqs.to(torch.promote_types(self.freqs.dtype, torch.float32))
        self.freqs.copy_(values)
        self.exact = values.view(torch.int32)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        freqs = Rotary.forward(self)
        super()._apply(fn, recurse)
        if self.freqs.dtype.itemsize < 4:
            self.freqs = freqs.to(self.freqs.device, torch.float32)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Load frequencies in fp32, and the constructor's if these come in less precision."""
        loaded = state_dict.get(f"{prefix}freqs")
        if isinstance(loaded, Tensor) and loaded.shape == self.freqs.shape and not loaded.is_meta:
            start = torch.tensor(self.start, dtype=torch.float32, device=loaded.device)
            value = loaded.float() if loaded.dtype.itemsize < 4 else loaded.clone()
            state_dict[f"{prefix}freqs"] = value = start if is_rounded(loaded, start) else value
            bits = value.to(torch.float32, copy=True).view(torch.int32)
            self.exact = bits if self.exact.is_meta else bits.to(self.exact.device)
        super()._load_from_state_dict(state_dict, prefix, *args)


def is_rounded(loaded: Tensor, exact: Tensor) -> bool:
    """Whether frequencies are `exact` in less precision. In a narrow dtype they must be within its
    rounding; in a wide dtype they must equal `exact` rounded to a narrow dtype."""
    if loaded.dtype.itemsize >= 4:
        narrow = (torch.bfloat16, torch.float16)
        return any(torch.equal(loaded, exact.to(dtype).to(loaded.dtype)) for dtype in narrow)
    precision = torch.finfo(loaded.dtype)
    allowed = precision.eps * (exact.abs() + precision.tiny)
    return bool(((loaded.float() - exact).abs() <= allowed).all())


def make_frequencies(dim: int, theta: float, inv_freq: Any) -> tuple[float, ...]:
    """Frequencies of heads of width `dim`, in float64: `theta^(-2 i / dim)` or `inv_freq`."""
    dim = check_int("dim_head", dim, 1, TOO_MANY)
    if inv_freq is None:
        if dim % 2:
            got = f"{dim}: give inv_freq of fewer pairs or rotary_emb=False"
            raise refusal("dim_head", "even for rotary embedding", got=got)
        # angles fit into float32
        base = check_number("rope_theta", theta, "a number from 1e-28 to 3.4e38", 1e-28)
        return tuple(base ** (-2 * i / dim) for i in range(dim // 2))
    is_vector = is_strided(inv_freq) and inv_freq.ndim == 1 and not inv_freq.is_meta
    if (
        not is_vector
        or inv_freq.dtype not in FLOAT_DTYPES
        or not 1 <= len(inv_freq) <= dim // 2
        or not (inv_freq.double().abs() <= 1e28).all()
        or inv_freq.requires_grad
    ):
        limits = f"1 to dim_head / 2 = {dim // 2} finite floats up to 1e28"
        got = f"{describe(inv_freq)}; learned ones go with a RotaryEmbedding(learned_freq=True)"
        name = "inv_freq, or the frequencies of rotary_emb,"
        raise refusal(name, f"a vector of {limits}, not on meta", got=got)
    return tuple(inv_freq.double().tolist())


def make_rotary(
    dim_head: int, rotary_emb: RotaryEmbedding | Rotary | bool | None, rope_theta: float | None,
    inv_freq: Tensor | None,
) -> RotaryEmbedding | Rotary | None:  # fmt: skip
    """The embedding of a layer, or None for one without positions (`rotary_emb=False`). The layer
    shares a RotaryEmbedding of learned frequencies; of others it has a `Rotary` of its own."""
    choices = dict(rotary_emb=rotary_emb, rope_theta=rope_theta, inv_freq=inv_freq)
    names = [name for name, value in choices.items() if value is not None]
    if len(names) > 1:
        raise ValueError(f"give at most one of {', '.join(choices)}, got {' and '.join(names)}")
    if rotary_emb is False:
        return None
    if rotary_emb is None:
        return Rotary(dim_head, 10_000.0 if rope_theta is None else rope_theta, inv_freq)
    if not isinstance(rotary_emb, (RotaryEmbedding, Rotary)):
        expected = "a RotaryEmbedding, None for the layer's own or False for no positions"
        raise refusal("rotary_emb", expected, rotary_emb)
    if getattr(rotary_emb, "use_xpos", False):  # a key's scale would depend on the length
        raise ValueError("rotary_emb must have use_xpos=False, got True")
    if isinstance(rotary_emb, RotaryEmbedding) and not rotary_emb.freqs.requires_grad:
        factor = rotary_emb.interpolate_factor
        return Rotary(dim_head, inv_freq=rotary_emb.freqs, interpolate_factor=factor)
    if rotary_emb.freqs.ndim != 1 or 2 * len(rotary_emb.freqs) > dim_head:
        expected = f"a vector of frequencies, which rotate at most {dim_head=} features"
        raise ValueError(f"rotary_emb must have {expected}, got {list(rotary_emb.freqs.shape)}")
    return rotary_emb


def rotate(
    rotary: RotaryEmbedding | Rotary | None, tensors: list[Tensor], start: int | Tensor = 0,
    positions: Tensor | None = None, backend: str = "eager", every: int = 1,
) -> list[Tensor]:  # fmt: skip
    """Rotate queries and then keys [b h n d] to positions `start + 0 .. n - 1` (start: an int, or
    [b]), or to `positions` [b n], unless there is no embedding: by `every`-th frequency, which are
    those of narrower heads. A kernel rotates a pair in one launch, unless frequencies are
    learned."""
    if rotary is None:
        return tensors
    like = tensors[0]
    if isinstance(rotary, Rotary):
        freqs = rotary()
    else:  # angles of pairs at position 1, which may be learned in a narrower dtype
        freqs = rotary(torch.ones(1, device=like.device))[0, ::2]
    freqs = freqs if every == 1 else freqs[::every].contiguous()
    if backend == "triton" and not freqs.requires_grad:
        return run_kernel(tensors, freqs, start, positions, float(rotary.interpolate_factor))
    if positions is None:
        position = torch.arange(like.shape[2], device=like.device)
        position = position + (start[:, None, None] if isinstance(start, Tensor) else start)
    else:
        position = positions[:, None]
    position = position.to(torch.promote_types(torch.float32, like.dtype))
    position = position / rotary.interpolate_factor
    angles = position[..., None] * freqs.to(position.dtype)
    angles = angles.repeat_interleave(2, dim=-1)
    return [apply_rotary_emb(angles, t) for t in tensors]
