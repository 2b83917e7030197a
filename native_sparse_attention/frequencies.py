"""Rotary frequencies that stay in fp32 through casts, checkpoints and mixed precision.

In bf16 the angle at position 10,000 would be off by whole turns. An embedding therefore keeps a
copy of its frequencies in the buffer `exact`: their fp32 bits as integers, which no cast changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from rotary_embedding_torch import RotaryEmbedding
from torch import Tensor, nn
from torch.nn import Module

from .checks.scalars import as_float, shown
from .initialization import Started, assign


def is_wide(t: Tensor) -> bool:
    return t.dtype.itemsize >= 4


def is_sharded(t: Tensor) -> bool:
    return hasattr(t, "device_mesh")


def bits(freqs: Tensor) -> Tensor:
    return freqs.detach().to(torch.float32, copy=True).view(torch.int32)


def keep_exact(rotary: Any, start: tuple[float, ...] | None = None) -> None:
    """Keep the frequencies of an embedding in fp32 from here on. `reset_parameters` restores
    `start`, by default the current frequencies."""
    freqs = rotary.freqs.detach()
    if start is None and not freqs.is_meta:
        start = tuple(freqs.double().tolist())
    hooked = hasattr(rotary, "exact")
    rotary.start = start
    rotary.register_buffer("exact", bits(freqs), persistent=False)
    if not hooked:
        rotary.register_load_state_dict_pre_hook(keep_loaded)


def exact_frequencies(rotary: Any) -> Tensor:
    """Frequencies in fp32 or better, unless they are learned in a narrower dtype."""
    freqs = rotary.freqs
    if is_wide(freqs) or freqs.requires_grad or not hasattr(rotary, "exact"):
        return freqs
    return rotary.exact.to(freqs.device).view(torch.float32)


def set_frequencies(rotary: Any, freqs: Tensor) -> None:
    if isinstance(rotary.freqs, nn.Parameter):
        rotary.freqs.data = freqs
    else:
        rotary.freqs = freqs


def cast(rotary: Any, apply: Callable[[], Any]) -> None:
    """Run `apply`, which casts or moves the embedding, and keep the dtype of its frequencies."""
    if is_sharded(rotary.freqs) or not hasattr(rotary, "exact"):
        apply()
        return
    if is_wide(rotary.freqs):
        rotary.exact = bits(rotary.freqs)
    exact = rotary.exact
    apply()
    if rotary.exact.dtype != torch.int32:
        rotary.exact = exact.to(rotary.exact.device)
    if not is_wide(rotary.freqs):
        set_frequencies(rotary, rotary.exact.view(torch.float32).clone())


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
    if isinstance(rotary, RotaryEmbedding):  # clear its caches
        for name, buffer in rotary.named_buffers(recurse=False):
            if name != "exact":
                buffer.zero_()
        rotary.cached_freqs_seq_len = 0
    freqs = rotary.freqs
    values = torch.tensor(rotary.start, dtype=torch.float32, device=freqs.device)
    rotary.exact = bits(values)
    if is_wide(freqs) or is_sharded(freqs):
        assign(freqs, values)
    else:
        set_frequencies(rotary, values)


def keep_loaded(rotary: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a state dict loads, convert its frequencies to fp32. If they are the embedding's own
    in less precision, use its own."""
    name = f"{prefix}freqs"
    loaded = state_dict.get(name)
    if not isinstance(loaded, Tensor) or is_sharded(loaded) or loaded.is_meta:
        return
    if loaded.shape != rotary.freqs.shape or not loaded.is_floating_point():
        return
    value = loaded.detach()
    # the current and the initial frequencies of the embedding
    references = []
    if not (rotary.freqs.is_meta or is_sharded(rotary.freqs)):
        references.append(exact_frequencies(rotary).detach())
    if rotary.start is not None:
        references.append(torch.tensor(rotary.start, dtype=torch.float32))
    for freqs in references:
        if is_rounded(value, freqs := freqs.to(value.device)):
            value = freqs
            break
    value = value if is_wide(value) else value.float()
    if value is not loaded:
        state_dict[name] = value.clone()
    device = value.device if rotary.freqs.is_meta else rotary.exact.device
    rotary.exact = bits(value).to(device)
    for other, buffer in rotary.named_buffers(recurse=False):  # its caches have no data yet
        if buffer.is_meta and other != "freqs":
            setattr(rotary, other, torch.zeros_like(buffer, device=device))


def is_rounded(loaded: Tensor, exact: Tensor) -> bool:
    """Whether frequencies are `exact` in less precision. In a narrow dtype they must be within its
    rounding; in a wide dtype they must equal `exact` rounded to a narrow dtype."""
    if is_wide(loaded):
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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Module:
        def apply(embeddings: list[RotaryEmbedding]) -> None:
            if embeddings:
                cast(embeddings[0], lambda: apply(embeddings[1:]))
            else:
                super(RotaryLayer, self)._apply(fn, recurse)

        apply([module for module in self.children() if isinstance(module, RotaryEmbedding)])
        return self


def make_frequencies(dim: int, theta: float = 10_000.0, inv_freq: Any = None) -> tuple[float, ...]:
    """Frequencies of heads of width `dim`, in float64: `theta^(-2 i / dim)` or `inv_freq`.

    Raises:
        ValueError: more frequencies than the width allows, or frequencies that are not finite.
    """
    if inv_freq is None:
        if dim % 2:
            raise ValueError(
                f"dim_head must be even for rotary embedding, got {dim}: give inv_freq of fewer "
                "pairs or rotary_emb=False"
            )
        base = as_float(theta)
        if not 0.0 < base < math.inf:
            raise ValueError(f"rope_theta must be a positive finite number, got {shown(theta)}")
        return tuple(base ** (-2 * i / dim) for i in range(dim // 2))
    expected = f"inv_freq must be a vector of 1 to dim_head / 2 = {dim // 2} finite numbers"
    if not isinstance(inv_freq, Tensor):
        raise ValueError(f"{expected}, a tensor, got {type(inv_freq).__name__}")
    if inv_freq.ndim != 1 or not 1 <= len(inv_freq) <= dim // 2:
        raise ValueError(f"{expected}, got shape {list(inv_freq.shape)}")
    if not inv_freq.is_floating_point():
        raise ValueError(f"{expected}, of a floating dtype, got {inv_freq.dtype}")
    if inv_freq.requires_grad:
        raise ValueError(
            "inv_freq must not require a gradient; for learned frequencies give rotary_emb, "
            "a RotaryEmbedding with learned_freq=True"
        )
    if inv_freq.is_meta:
        raise ValueError(f"{expected}, got a meta tensor, which has none: make it on the CPU")
    freqs = tuple(inv_freq.double().tolist())
    if not all(map(math.isfinite, freqs)):
        raise ValueError(f"{expected}, got {freqs}")
    return freqs
