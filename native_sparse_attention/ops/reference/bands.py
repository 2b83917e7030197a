"""Attention within a band of keys, tile by tile. Chunked attention uses it, and so do the branches
of the specification in linear memory.

    b  batch         i  query        g  query heads of one KV head
    k  KV heads      j  key          h  query heads (k g)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from .online import Plan, attend, chunks

# mask of a tile of queries and keys: [b|1 h|1 i|1 j|1], or None if no pair is masked
Visible = Callable[[slice, slice], Tensor | None]


@dataclass(frozen=True)
class Band:
    """The keys `p - behind .. p + ahead` of a query at key position p; None means no bound. Query t
    has position `(offset + t) // stride`. Every query also sees `memory` keys that come first."""

    behind: int | None
    ahead: int | None
    offset: int | Tensor
    stride: int = 1
    memory: int = 0

    def positions(self, rows: slice) -> tuple[int, int] | None:
        """Key positions of the first and the last of these queries, or None if the offset is on the
        device."""
        if isinstance(self.offset, Tensor):
            return None
        first, last = self.offset + rows.start, self.offset + rows.stop - 1
        return first // self.stride, last // self.stride

    def key_range(self, rows: slice, length: int) -> tuple[int, int]:
        """The keys that some of these queries may see. `length` counts the memory too. All keys if
        the host does not know the positions."""
        positions = self.positions(rows)
        if positions is None:
            return 0, length
        start, stop = 0, length
        if self.behind is not None and not self.memory:
            start = max(0, positions[0] - self.behind)
        if self.ahead is not None:
            stop = min(length, self.memory + max(0, positions[1] + self.ahead + 1))
        return start, max(start, stop)

    def contains(self, rows: slice, keys: slice) -> bool:
        """Whether each of these queries sees each of these keys, as far as the host knows."""
        if self.behind is None and self.ahead is None:
            return True
        positions = self.positions(rows)
        if positions is None:
            return False
        first, last = max(keys.start - self.memory, 0), keys.stop - self.memory - 1
        return (self.behind is None or positions[1] - first <= self.behind) and (
            self.ahead is None or last - positions[0] <= self.ahead
        )

    def mask(self, rows: slice, keys: slice, device: torch.device) -> Tensor:
        """[b|1 1 i j]"""
        offset = self.offset[:, None] if isinstance(self.offset, Tensor) else self.offset
        i = torch.arange(rows.start, rows.stop, device=device)[None] + offset
        j = torch.arange(keys.start, keys.stop, device=device) - self.memory
        ahead_by = j - (i // self.stride)[..., None]
        seen = torch.ones_like(ahead_by, dtype=torch.bool)
        if self.behind is not None:
            seen = seen & (ahead_by >= -self.behind)
        if self.ahead is not None:
            seen = seen & (ahead_by <= self.ahead)
        return (seen | (j < 0) if self.memory else seen)[:, None]


def band_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    band: Band,
    others: Sequence[Visible],
    *,
    chunk_sizes: tuple[int, int],
    scale: float | None,
    soft_cap: float | None,
) -> tuple[Tensor, Tensor]:
    """Attention of q [b i h d] over k and v [b j k d|e]: [b i h e] and its log-sum-exp [b i h]. A
    query sees a key if the band and all of `others` allow it."""
    heads = k.shape[2]

    def visible(rows: slice, keys: slice) -> Tensor | None:
        allowed = [other(rows, keys) for other in others]
        if not band.contains(rows, keys):
            allowed.append(band.mask(rows, keys, q.device))
        seen = None
        for mask in allowed:
            if mask is not None:
                seen = mask if seen is None else seen & mask
        if seen is None:
            return None
        # [b h i j] -> [b k g i j]; an axis of length 1 becomes two
        return seen.unflatten(1, (heads, -1) if seen.shape[1] > 1 else (1, 1))

    tiles = []
    for rows in chunks(0, q.shape[1], chunk_sizes[0]):
        tiles.append((rows, chunks(*band.key_range(rows, k.shape[1]), chunk_sizes[1])))
    plan = Plan(tiles, visible, q.shape[-1] ** -0.5 if scale is None else scale, soft_cap)

    # one matmul multiplies all heads of a group with their KV head
    out, lse, _ = attend(
        rearrange(q, "b i (k g) d -> b k g i d", k=heads),
        rearrange(k, "b j k d -> b k j d"),
        rearrange(v, "b j k e -> b k j e"),
        plan,
    )
    return rearrange(out, "b k g i e -> b i (k g) e"), rearrange(lse, "b k g i -> b i (k g)")
