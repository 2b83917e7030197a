"""The selection turned round: for each block of keys, the queries that chose it.

An entry is one slot of one list of `lists` [B T R n], numbered as it lies there. Entries are sorted
by span of tokens and by the block that they name, in their own order within a block, and cut into
items of at most `chunk` entries: what one program works through. Sizes depend on shapes alone, so
that nothing waits for the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Inverse:
    """Entries of a span of tokens by block: blocks are numbered (b K + h) C + c."""

    first: int  # token
    length: int  # tokens
    entries: Tensor  # [B T R n], those of all spans
    bounds: Tensor  # [blocks + 1], where each block's entries begin, and the next one's
    owner: Tensor  # [items], the block of each item; `blocks` for an item that is none
    item_bounds: Tensor  # [blocks + 1], where each block's items begin
    spill_bounds: Tensor  # [blocks + 1], the same among the items of blocks that have several
    chunk: int
    spills: int  # bound of the last of spill_bounds


def starts(counts: Tensor) -> Tensor:
    """Where each of [spans, blocks] counts begins within its span, and one past the last."""
    return torch.nn.functional.pad(counts.cumsum(1), (1, 0))


def invert(
    lists: Tensor, num_heads: int, num_blocks: int, chunk: int, length: int
) -> list[Inverse]:
    """Entries of each of B x num_heads x num_blocks blocks, for each span of `length` tokens."""
    B, T, R, n = lists.shape
    spans, blocks = -(-T // length), B * num_heads * num_blocks
    token = torch.arange(T, device=lists.device).view(1, T, 1, 1)
    head = torch.arange(B * R, device=lists.device).view(B, 1, R, 1) * num_heads // R
    named = token // length * blocks + head * num_blocks + lists
    named = torch.where(lists >= 0, named, spans * blocks)
    if spans * blocks < 1 << 31:
        named = named.to(torch.int32)
    named, entries = named.view(-1).sort(stable=True)
    if lists.numel() < 1 << 31:
        entries = entries.to(torch.int32)
    number = torch.arange(spans * blocks + 1, device=lists.device, dtype=named.dtype)
    bounds = torch.searchsorted(named, number)

    items = (bounds.diff().view(spans, blocks) + chunk - 1) // chunk
    item_bounds = starts(items)
    spill_bounds = starts(torch.where(items > 1, items, 0))
    entries_of_span = B * min(length, T) * R * n
    most = entries_of_span // chunk + min(blocks, entries_of_span)
    item = torch.arange(most, device=lists.device).expand(spans, -1).contiguous()
    owner = torch.searchsorted(item_bounds[:, 1:].contiguous(), item, right=True, out_int32=True)
    return [
        Inverse(
            i * length,
            min(length, T - i * length),
            entries,
            bounds[i * blocks :],
            owner[i],
            item_bounds[i],
            spill_bounds[i],
            chunk,
            2 * entries_of_span // chunk,
        )
        for i in range(spans)
    ]
