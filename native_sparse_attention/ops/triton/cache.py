"""What a step of decoding writes to a cache, by kernels that read lengths on the device."""

from __future__ import annotations

import torch
from torch import Tensor


def append(
    new: tuple[Tensor, Tensor],
    stores: tuple[Tensor, Tensor],
    lengths: Tensor,
    tokens: int,
    *,
    counts: Tensor | None = None,
    page_table: Tensor | None = None,
    page_size: int | None = None,
    every: int = 1,
    ring: bool = False,
) -> None:
    """Write two streams' entries [b h n d], those that `tokens` new tokens of each row may
    complete, behind what the storage [b or pages, h, n, d] holds: one entry for each `every`
    tokens. A ring takes a token's at its position modulo the ring's size."""
    from ...kernels.decode import kv_cache

    step = kv_cache.Step(lengths, counts, page_table, page_size or 0)
    with torch.cuda.device_of(lengths):
        kv_cache.append(new, stores, step, tokens, every=every, ring=ring)


def recent(
    rings: tuple[Tensor, Tensor], lengths: Tensor, tokens: int, l: int, d: int
) -> tuple[Tensor, Tensor]:
    """The windows [b h w l d] of raw keys and values that so many new tokens, in the rings [b h
    size d] already, may complete; zeros stand for tokens before the first."""
    from ...kernels.decode import kv_cache

    with torch.cuda.device_of(lengths):
        return kv_cache.recent(rings, tokens, l, d, kv_cache.Step(lengths))
