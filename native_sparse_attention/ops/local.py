"""The sliding window of whole sequences in eager PyTorch and memory O(T w), by the package
local-attention."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from einops import rearrange, repeat
from local_attention import LocalAttention
from torch import Tensor


@lru_cache(maxsize=64)
def local_attention(sliding_window_size: int, causal: bool) -> LocalAttention:
    """The package's layer for a window. It has no weights, so all callers share one."""
    return LocalAttention(
        window_size=sliding_window_size, causal=causal, exact_windowsize=True, autopad=True,
        use_rotary_pos_emb=False,
    )  # fmt: skip


def is_supported(q: Tensor, k: Tensor, settings: dict[str, Any]) -> bool:
    """Whether the package supports this call and is faster: whole sequences of at least two
    windows, no log-sum-exp, no compiled graph (the package branches on the length)."""
    if any(settings.get(name) is not None for name in ("documents", "sinks", "soft_cap")):
        return False
    if torch.compiler.is_compiling() or settings["return_lse"]:
        return False
    whole = isinstance(settings["q_offset"], int) and q.shape[1] == k.shape[1]
    return whole and len(q) > 0 and 0 < 2 * settings["sliding_window_size"] <= q.shape[1]


def sliding_window_attention(
    q: Tensor, k: Tensor, v: Tensor, *, sliding_window_size: int, causal: bool,
    scale: float | None, **_: Any,
) -> Tensor:  # fmt: skip
    """Attention [B T H E] of a call that `is_supported`."""
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
