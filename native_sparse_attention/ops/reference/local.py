"""The causal or two-sided sliding window in memory O(T w), by package local-attention."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from local_attention import LocalAttention
from torch import Tensor

from . import tiled
from .products import finite_part, is_finite, may_look


@lru_cache(maxsize=64)
def local_attention(sliding_window_size: int, causal: bool) -> LocalAttention:
    """The package's layer for a window. It has no weights, so all callers share one."""
    return LocalAttention(
        window_size=sliding_window_size,
        causal=causal,
        exact_windowsize=True,
        autopad=True,
        use_rotary_pos_emb=False,
    )


def fits(q: Tensor, k: Tensor, settings: dict[str, Any]) -> bool:
    """Whether the package supports this call and is faster: whole sequences of at least two
    windows, no log-sum-exp, no compiled graph (the package branches on the length)."""
    if any(settings.get(name) is not None for name in ("documents", "sinks", "soft_cap")):
        return False
    if torch.compiler.is_compiling() or settings["return_lse"]:
        return False
    whole = isinstance(settings["q_offset"], int) and q.shape[1] == k.shape[1]
    return whole and len(q) > 0 and 0 < 2 * settings["sliding_window_size"] <= q.shape[1]


def attend(
    q: Tensor, k: Tensor, v: Tensor, sliding_window_size: int, causal: bool, scale: float | None
) -> Tensor:
    """The package's attention. A NaN or infinite value leaks into queries that do not see it."""
    if scale is not None:
        q = q * (scale * q.shape[-1] ** 0.5)
    groups = q.shape[2] // k.shape[2]
    q = rearrange(q, "b i h d -> b h i d")
    k, v = (repeat(t, "b j k d -> b (k g) j d", g=groups) for t in (k, v))
    # the package pads to whole windows; a two-sided window would attend to the padding
    padding = None
    if not causal and q.shape[2] % sliding_window_size:
        padding = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device)
    out = local_attention(sliding_window_size, causal)(q, k, v, mask=padding)
    return rearrange(out, "b h i e -> b i h e")


def sliding_window_attention(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
    window = settings["sliding_window_size"], settings["causal"], settings["scale"]
    out = attend(q, k, v, *window)
    if not may_look(out) or is_finite(out):
        return out
    out = attend(finite_part(q), finite_part(k), finite_part(v), *window)
    right: Any = tiled.sliding_window_attention(q, k, v, **settings)
    # a non-finite value is seen in the output; an infinite logit may leave it finite
    same = right.isfinite() & ~has_infinite_logits(q, k, *window[:2])[..., None]
    return torch.where(same, out, right)


def has_infinite_logits(q: Tensor, k: Tensor, sliding_window_size: int, causal: bool) -> Tensor:
    """Which queries [b i h] are not finite, or see a key that is not."""
    bad = (~k.isfinite()).any(dim=-1).long().cumsum(1)
    before = F.pad(bad, (0, 0, 1, 0))  # keys [b j k] that are not, before each
    i = torch.arange(q.shape[1], device=q.device)
    first = (i - sliding_window_size).clamp(min=0)
    last = i if causal else (i + sliding_window_size).clamp(max=k.shape[1] - 1)
    seen = before[:, last + 1] > before[:, first]
    seen = seen.repeat_interleave(q.shape[2] // k.shape[2], dim=-1)
    return seen | (~q.isfinite()).any(dim=-1)
