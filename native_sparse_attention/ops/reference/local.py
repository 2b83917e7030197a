"""The causal or two-sided sliding window in memory O(T w), by package local-attention."""

from __future__ import annotations

from functools import lru_cache

import torch
from einops import rearrange, repeat
from local_attention import LocalAttention
from torch import Tensor


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


def fits(q: Tensor, k: Tensor, w: int, q_offset: int | Tensor, return_lse: bool) -> bool:
    """Whether the package supports this call and is faster: whole sequences of at least two
    windows, no log-sum-exp, no compiled graph (the package branches on the length)."""
    if torch.compiler.is_compiling() or return_lse or not isinstance(q_offset, int):
        return False
    return q.shape[0] > 0 and q.shape[1] == k.shape[1] and 0 < 2 * w <= q.shape[1]


def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sliding_window_size: int,
    causal: bool,
    q_offset: int,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor:
    del q_offset, return_lse  # 0 and False, as `fits` says
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
