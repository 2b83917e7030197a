"""The dense twin of a layer, in PyTorch alone. `one_tree.py` loads this file by its path."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

# of a decode step: cuDNN builds a plan for each length of the cache, in 34 ms (H100)
STEP_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class DenseAttention(nn.Module):
    """The norm, projections and rotary embedding of `SparseAttention` around SDPA, whose MATH is
    `backend="eager"`."""

    backend = "auto"

    def __init__(
        self, dim: int, heads: int, kv_heads: int, dim_head: int, max_length: int = 2**16
    ) -> None:
        super().__init__()
        self.dim_head, self.heads, self.kv_heads = dim_head, heads, kv_heads
        self.norm = nn.RMSNorm(dim)
        self.to_qkv = nn.Linear(dim, (heads + 2 * kv_heads) * dim_head, bias=False)
        self.combine_heads = nn.Linear(heads * dim_head, dim, bias=False)
        inverse = 10000.0 ** -(torch.arange(0, dim_head, 2, dtype=torch.float64) / dim_head)
        angles = torch.arange(max_length, dtype=torch.float64)[:, None] * inverse
        turns = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
        # real, so that .to(dtype) of the layer leaves it alone
        self.turns: Tensor = torch.view_as_real(turns)

    def rotate(self, t: Tensor, start: int) -> Tensor:
        """Interleaved pairs of [b n h d] as complex numbers."""
        if self.turns.device != t.device:
            self.turns = self.turns.to(t.device)
        turns = torch.view_as_complex(self.turns[start : start + t.shape[1]])[:, None]
        wide = t.to(torch.promote_types(t.dtype, torch.float32)).unflatten(-1, (-1, 2))
        return torch.view_as_real(torch.view_as_complex(wide) * turns).flatten(-2).to(t.dtype)

    def forward(self, x: Tensor, cache: DenseCache | None = None) -> Tensor:
        heads = self.to_qkv(self.norm(x)).unflatten(-1, (-1, self.dim_head))
        qk, v = heads.split([self.heads + self.kv_heads, self.kv_heads], dim=2)
        qk = self.rotate(qk, 0 if cache is None else cache.size)
        q, k = qk.transpose(1, 2).split([self.heads, self.kv_heads], dim=1)
        v = v.transpose(1, 2)
        if cache is not None:
            k, v = cache.append(k, v)
        causal = q.shape[2] > 1
        kinds = [SDPBackend.MATH] if self.backend == "eager" else [] if causal else STEP_BACKENDS
        with sdpa_kernel(kinds) if kinds else contextlib.nullcontext():
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=self.heads != self.kv_heads
            )
        return self.combine_heads(out.transpose(1, 2).flatten(2))


class DenseCache:
    """Keys and values [b h s d] of the tokens so far, in storage allocated once."""

    def __init__(self, max_length: int) -> None:
        self.size, self.max_length = 0, max_length
        self.stored: list[Tensor] = []

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if not self.stored:
            b, h, _, d = k.shape
            self.stored = [t.new_empty(b, h, self.max_length, d) for t in (k, v)]
        end = self.size + k.shape[2]
        for stored, t in zip(self.stored, (k, v), strict=True):
            stored[:, :, self.size : end] = t
        self.size = end
        return self.stored[0][:, :, :end], self.stored[1][:, :, :end]
