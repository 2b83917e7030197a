"""Rotary embedding (interleaved pairs, as in rotary-embedding-torch) at any positions, with fp32
angles.

In bf16 the angle at position 10,000 would be off by whole turns. An embedding therefore keeps a
copy of its frequencies in the buffer `exact`: their fp32 bits as integers, which casts and mixed
precision leave alone. Learned frequencies have no such copy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from rotary_embedding_torch import RotaryEmbedding, apply_rotary_emb
from torch import Tensor
from torch.nn import Module

from .checks import check_number, describe
from .initialization import Started, assign
from .ops.triton.elementwise import Heads, projected_heads
from .ops.triton.elementwise import rotate as run_kernel


def is_narrow(t: Tensor) -> bool:
    return t.dtype.itemsize < 4


def bits(freqs: Tensor) -> Tensor:
    return freqs.detach().to(torch.float32, copy=True).view(torch.int32)


def keep_exact(rotary: Any, start: tuple[float, ...] | None = None) -> None:
    """Keep the frequencies of an embedding in fp32 from here on. `reset_parameters` restores
    `start`, by default the current frequencies."""
    freqs, is_kept = rotary.freqs.detach(), hasattr(rotary, "start")
    if start is None and not freqs.is_meta:
        start = tuple(freqs.double().tolist())
    rotary.start = start
    if rotary.freqs.requires_grad:
        return
    rotary.register_buffer("exact", bits(freqs), persistent=False)
    if not is_kept:
        rotary.register_load_state_dict_pre_hook(keep_loaded)


def exact_frequencies(rotary: Any) -> Tensor:
    """Frequencies in fp32 or better, unless they are learned in a narrower dtype."""
    freqs = rotary.freqs
    if not is_narrow(freqs) or not hasattr(rotary, "exact"):
        return freqs
    return rotary.exact.to(freqs.device).view(torch.float32)


def reset_frequencies(rotary: Any) -> None:
    """Restore the initial frequencies. An embedding of package rotary-embedding-torch has the
    frequencies that it had when a layer got it.

    Raises:
        ValueError: the layer got the embedding on the meta device, without values.
    """
    if rotary.start is None:
        raise ValueError(
            "rotary_emb was given on the meta device, so that its frequencies are not known: "
            "make it on another device, or use rope_theta or inv_freq"
        )
    values = torch.tensor(rotary.start, dtype=torch.float32, device=rotary.freqs.device)
    if isinstance(rotary, Rotary):
        rotary.freqs = values
    else:
        for buffer in rotary.buffers(recurse=False):  # its caches
            buffer.zero_()
        rotary.cached_freqs_seq_len = 0
        assign(rotary.freqs, values)
    if hasattr(rotary, "exact"):
        rotary.exact = bits(values)


def keep_loaded(rotary: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a state dict loads, replace its frequencies by the initial ones if they are these in
    less precision, and by fp32 otherwise."""
    name = f"{prefix}freqs"
    loaded = state_dict.get(name)
    if not isinstance(loaded, Tensor) or loaded.is_meta or loaded.shape != rotary.freqs.shape:
        return
    if hasattr(loaded, "device_mesh"):  # sharded
        return
    value = loaded.detach().float() if is_narrow(loaded) else loaded.detach().clone()
    if rotary.start is not None:
        start = torch.tensor(rotary.start, dtype=torch.float32, device=value.device)
        value = start if is_rounded(loaded.detach(), start) else value
    state_dict[name] = value
    rotary.exact = bits(value).to(value.device if rotary.exact.is_meta else rotary.exact.device)


def is_rounded(loaded: Tensor, exact: Tensor) -> bool:
    """Whether frequencies are `exact` in less precision. In a narrow dtype they must be within its
    rounding; in a wide dtype they must equal `exact` rounded to a narrow dtype."""
    if not is_narrow(loaded):
        narrow = (torch.bfloat16, torch.float16)
        return any(torch.equal(loaded, exact.to(dtype).to(loaded.dtype)) for dtype in narrow)
    precision = torch.finfo(loaded.dtype)
    allowed = precision.eps * (exact.abs() + precision.tiny)
    return bool(((loaded.float() - exact).abs() <= allowed).all())


class RotaryLayer(Started):
    """A layer with a rotary embedding, perhaps one of package rotary-embedding-torch."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for module in self.children():
            if isinstance(module, RotaryEmbedding):
                reset_frequencies(module)


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
        freqs = exact_frequencies(self)
        super()._apply(fn, recurse)
        if is_narrow(self.freqs):
            self.freqs = freqs.to(self.freqs.device, torch.float32)
        return self


def make_frequencies(dim: int, theta: float, inv_freq: Any) -> tuple[float, ...]:
    """Frequencies of heads of width `dim`, in float64: `theta^(-2 i / dim)` or `inv_freq`."""
    if inv_freq is None:
        if dim % 2:
            raise ValueError(
                f"dim_head must be even for rotary embedding, got {dim}: give inv_freq of fewer "
                "pairs or rotary_emb=False"
            )
        expected, smallest = "a positive finite number", sys.float_info.min
        base = check_number("rope_theta", theta, expected, smallest, sys.float_info.max)
        return tuple(base ** (-2 * i / dim) for i in range(dim // 2))
    is_vector = isinstance(inv_freq, Tensor) and inv_freq.ndim == 1 and not inv_freq.is_meta
    if (
        not is_vector
        or not inv_freq.is_floating_point()
        or not 1 <= len(inv_freq) <= dim // 2
        or not inv_freq.isfinite().all()
        or inv_freq.requires_grad
    ):
        raise ValueError(
            f"inv_freq must be a vector of 1 to dim_head / 2 = {dim // 2} finite floats, not on "
            f"the meta device and without gradient, got {describe(inv_freq)}; for learned "
            "frequencies give rotary_emb, a RotaryEmbedding with learned_freq=True"
        )
    return tuple(inv_freq.double().tolist())


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
    if freqs.ndim != 1 or not freqs.is_floating_point() or 2 * len(freqs) > dim_head:
        raise ValueError(
            "rotary_emb must have a vector of floating-point frequencies, which rotate at most "
            f"dim_head={dim_head} features, got {describe(freqs.detach())}"
        )
    if isinstance(rotary_emb, RotaryEmbedding):
        keep_exact(rotary_emb)
    return rotary_emb


def supports_kernels(rotary: RotaryEmbedding | Rotary, backend: str) -> bool:
    learned = rotary.freqs.requires_grad and torch.is_grad_enabled()
    return backend == "triton" and not learned


def rotate(
    rotary: RotaryEmbedding | Rotary | None,
    tensors: list[Tensor],
    start: int | Tensor = 0,
    positions: Tensor | None = None,
    backend: str = "eager",
) -> list[Tensor]:
    """Rotate queries and then keys [b h n d] to positions `start + 0 .. n - 1` (start: an int, or
    [b]), or to `positions` [b n]. A kernel rotates a pair in one launch, unless frequencies are
    learned. Without an embedding the tensors are returned unchanged.

    The angles are computed here: the embedding's own forward uses the dtype of its frequencies, and
    bf16 cannot tell position 257 from 256.
    """
    if rotary is None:
        return tensors
    freqs = exact_frequencies(rotary)
    if supports_kernels(rotary, backend):
        return run_kernel(tensors, freqs, start, positions, float(rotary.interpolate_factor))
    like = tensors[0]
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
