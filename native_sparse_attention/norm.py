"""RMSNorm of every head of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class HeadNorm(nn.RMSNorm):
    """`y = x / sqrt(mean(x^2) + eps) * weight` of each head of [.. (h d)]; all heads share the
    weight [d]."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (-1, *self.normalized_shape))
        # under autocast the weight is wider than x
        weight = self.weight.to(x.dtype)
        return F.rms_norm(heads, self.normalized_shape, weight, self.eps).flatten(-2)


def norm_heads(qkv: Tensor, split: Sequence[int], q_norm: nn.Module, k_norm: nn.Module) -> Tensor:
    """A projection [b n (q k v ..)] of queries, and keys and values in turn, of widths `split`,
    with queries and keys normalized."""
    q, *kv = qkv.split(list(split), dim=-1)
    kv = [t if i % 2 else k_norm(t) for i, t in enumerate(kv)]
    return torch.cat((q_norm(q), *kv), dim=-1)
