"""The sliding window of whole sequences in eager PyTorch and memory O(T w), by the package
local-attention."""

from __future__ import annotations

from functools import lru_cache

import torch
from einops import rearrange, repeat
from local_attention import LocalAttention
from torch import Tensor

from ..config import AttentionConfig
from .call import Call

# a layer has no weights, so all callers share one
make_layer = lru_cache(maxsize=64)(LocalAttention)
OPTIONS = dict(exact_windowsize=True, autopad=True, use_rotary_pos_emb=False)


def is_supported(call: Call, config: AttentionConfig) -> bool:
    """Whether the package supports this call and is faster: whole sequences of at least two
    windows, no compiled graph (the package branches on the length)."""
    q, w = call.q, config.sliding_window_size
    if config.branches != ("window",) or torch.compiler.is_compiling():
        return False
    if call.documents is not None or call.sinks is not None or config.soft_cap is not None:
        return False
    whole = isinstance(call.q_offset, int) and q.shape[1] == call.k.shape[1]
    return whole and len(q) > 0 and 0 < 2 * w <= q.shape[1]


def window_attention(call: Call, config: AttentionConfig) -> Tensor:
    """Attention [B T H E] of a call that `is_supported`."""
    q, k, v, w, causal = call.q, call.k, call.v, config.sliding_window_size, config.causal
    groups = q.shape[2] // k.shape[2]
    q = rearrange(q, "b i h d -> b h i d")
    k, v = (repeat(t, "b j k d -> b (k g) j d", g=groups) for t in (k, v))
    # the package pads to whole windows; a two-sided window would attend to the padding
    padding = None
    if not causal and q.shape[2] % w:
        padding = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device)
    out = make_layer(w, causal=causal, scale=config.scale, **OPTIONS)(q, k, v, mask=padding)
    return rearrange(out, "b h i e -> b i h e")
