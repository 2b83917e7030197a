"""The selection turned round: for each block of keys, the queries that chose it.

An entry is one slot of one list of `lists` [B T R n], numbered as it lies there. Entries are sorted
by the block that they name, in their own order within a block, and cut into items of at most
`chunk` entries: what one program works through. Sizes depend on shapes alone, so that nothing waits
for the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Inverse:
    """Entries by block: blocks are numbered (b K + h) C + c."""

    entries: Tensor  # [B T R n], those of the first block first; unused slots last
    ends: Tensor  # [blocks], one past a block's last entry
    owner: Tensor  # [items], the block of each item; `blocks` for an item that is none
    item_ends: Tensor  # [blocks], one past a block's last item
    spill_ends: Tensor  # [blocks], the same among the items of blocks that have several
    chunk: int
    spills: int  # bound of the last of spill_ends


def invert(lists: Tensor, num_heads: int, num_blocks: int, chunk: int) -> Inverse:
    """Entries of each of B x num_heads x num_blocks blocks."""
    B, _, R, _ = lists.shape
    blocks = B * num_heads * num_blocks
    group = torch.arange(B * R, device=lists.device).view(B, 1, R, 1) * num_heads // R
    named = torch.where(lists >= 0, group * num_blocks + lists, blocks).to(torch.int32)
    named, entries = named.view(-1).sort(stable=True)
    if lists.numel() < 1 << 31:
        entries = entries.to(torch.int32)
    number = torch.arange(blocks, device=lists.device, dtype=torch.int32)
    ends = torch.searchsorted(named, number, right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))
    items = (counts + chunk - 1) // chunk
    item_ends = items.cumsum(0)
    most = lists.numel() // chunk + min(blocks, lists.numel())
    owner = torch.searchsorted(
        item_ends, torch.arange(most, device=lists.device), right=True, out_int32=True
    )
    spill_ends = torch.where(items > 1, items, 0).cumsum(0)
    return Inverse(entries, ends, owner, item_ends, spill_ends, chunk, 2 * lists.numel() // chunk)
