"""Writes of a decode step to a KV cache. The kernels read sequence lengths on the device."""

from __future__ import annotations

import torch
from torch import Tensor


def starts(lengths: Tensor, counts: Tensor | None, tokens: int, max_length: int) -> Tensor:
    """The lengths [b] in int64, after a device-side assertion that `counts` of `tokens` new ones
    fit."""
    from ...kernels.decode import kv_cache

    with torch.cuda.device_of(lengths):
        return kv_cache.starts(lengths, counts, tokens, max_length)


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
    tail: bool = False,
) -> None:
    """Append the entries `new` [b h n d] that `tokens` new tokens may complete to two streams.

    The streams' storage is [b h n d], or [pages h n d] with a page table. An entry covers `every`
    tokens. With `tail` the storage is a ring buffer: slot `p mod size` holds position p.
    """
    from ...kernels.decode import kv_cache

    with torch.cuda.device_of(lengths):
        kv_cache.append(
            new, stores, lengths, tokens, counts=counts, page_table=page_table,
            page_size=page_size or 0, every=every, tail=tail,
        )  # fmt: skip


def windows(
    new: tuple[Tensor, Tensor], tails: tuple[Tensor, Tensor], lengths: Tensor, l: int, d: int
) -> tuple[Tensor, Tensor]:
    """The windows [b h w l d] that new raw keys and values [b h n d] may complete, with those of
    the tails [b h size d]. Tokens before the first are zeros."""
    from ...kernels.decode import kv_cache

    with torch.cuda.device_of(lengths):
        return kv_cache.windows(new, tails, lengths, l, d)
