"""Block masks of torch's flex_attention: which tiles of queries and keys hold an allowed pair.

    b, h    batch row, query head
    i, j    query, key
    tq, tk  tiles of queries, of keys

A *mask mod* answers for one pair (b, h, i, j). A *block mask* adds the list of tiles in which some
pair is allowed, and of those in which all are. Here they are found from geometry, or by asking for
every pair a strip of queries at a time: no T x S array is formed, and no length need be a multiple
of anything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks.scalars import check_callable, check_device, check_ints

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

TILE = 128

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Number = Any  # an int, or a tensor of one element

# pairs that are asked for at once
PAIRS_AT_ONCE = 2**24


# PyTorch's functions, without loading flex_attention when this package is imported


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """`torch.nn.attention.flex_attention.and_masks`: a pair is allowed if every mask mod allows it.

    Raises:
        RuntimeError: a mask mod that is not callable.
    """
    from torch.nn.attention import flex_attention as flex

    return flex.and_masks(*mask_mods)


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """`torch.nn.attention.flex_attention.or_masks`: a pair is allowed if any mask mod allows it.

    Raises:
        RuntimeError: a mask mod that is not callable.
    """
    from torch.nn.attention import flex_attention as flex

    return flex.or_masks(*mask_mods)


def default_device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return check_device("device", device)


def ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Tiles [b h tq tk] as their number in each row, and their indices, those of the row first."""
    tiles = tiles.to(torch.int32)
    order = tiles.argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(dim=-1, dtype=torch.int32), order.to(torch.int32)


def from_tiles(
    touched: Tensor, full: Tensor, mask_mod: MaskMod, q_len: int, kv_len: int
) -> BlockMask:
    """A block mask of the tiles [b h tq tk] where some pair is allowed, and those where all are."""
    from torch.nn.attention.flex_attention import BlockMask

    return BlockMask.from_kv_blocks(
        *ordered(touched & ~full),
        *ordered(full),
        BLOCK_SIZE=TILE,
        mask_mod=mask_mod,
        seq_lengths=(q_len, kv_len),
    )


def tile_bounds(length: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """First and last index of each tile of a sequence, and whether it is a whole one."""
    first = torch.arange(0, length, TILE, device=device)
    return first, (first + TILE - 1).clamp(max=length - 1), first + TILE <= length


def from_intervals(
    interval: Callable[[Tensor], tuple[Tensor, Tensor]],
    mask_mod: MaskMod,
    q_len: int,
    kv_len: int,
    device: torch.device,
) -> BlockMask:
    """A block mask for queries that see one interval of keys each, `interval(i) = (first, last)`.

    Both ends must rise with i, and neighbours' intervals overlap or adjoin, so that a tile's first
    and last query tell about all between.
    """
    top, bottom, whole_q = (t[:, None] for t in tile_bounds(q_len, device))
    left, right, whole_kv = tile_bounds(kv_len, device)
    (first_top, last_top), (first_bottom, last_bottom) = interval(top), interval(bottom)
    touched = (left <= last_bottom) & (right >= first_top)
    full = (left >= first_bottom) & (right <= last_top) & whole_q & whole_kv
    return from_tiles(touched[None, None], full[None, None], mask_mod, q_len, kv_len)


def scalar(value: int, device: torch.device) -> Tensor:
    return torch.full((), value, device=device)


def cached(build: Callable[..., BlockMask]) -> Callable[..., BlockMask]:
    """Keep the masks of the last few shapes. Not while a graph is traced, and never as inference
    tensors: the next user of the mask may train."""

    @lru_cache(maxsize=64)
    def keep(*args: int | bool | torch.device) -> BlockMask:
        with torch.inference_mode(False):
            return build(*args)

    def get(*args: int | bool | torch.device) -> BlockMask:
        return build(*args) if torch.compiler.is_compiling() else keep(*args)

    return get


# masks of no known geometry


def tile_counts(
    mask_mod: MaskMod, q_len: int, kv_len: int, device: torch.device, tile: int = TILE
) -> Tensor:
    """How many pairs each tile of `tile` x `tile` allows, int64 [tq tk].

    Every pair is asked for, in batch row 0 and head 0: time O(T S), memory O(T S / tile^2).
    """
    from torch.nn.attention.flex_attention import create_mask

    # a whole number of tiles of queries
    rows = max(1, PAIRS_AT_ONCE // max(1, kv_len * tile)) * tile
    strips = []
    for first in range(0, q_len, rows):
        here = min(rows, q_len - first)

        def strip(b: Tensor, h: Tensor, i: Tensor, j: Tensor, first: int = first) -> Tensor:
            return mask_mod(b, h, i + first, j)

        allowed = create_mask(strip, 1, 1, here, kv_len, device=str(device))[0, 0]
        padded = F.pad(allowed, (0, -kv_len % tile, 0, -here % tile))
        strips.append(padded.unflatten(1, (-1, tile)).unflatten(0, (-1, tile)).sum((1, 3)))
    return torch.cat(strips)


def block_mask_of(
    mask_mod: MaskMod, q_len: int, kv_len: int, device: torch.device | str | None = None
) -> BlockMask:
    """The block mask of any mask mod that looks at neither b nor h.

    Tile for tile what torch's `create_block_mask` makes; that one holds all T x S pairs at once,
    this one a strip of them. `device` is CUDA by default where there is one.

    Raises:
        ValueError: q_len or kv_len below 1, a mask_mod that is no function, a device that is none.
    """
    q_len, kv_len = check_ints(1, q_len=q_len, kv_len=kv_len)
    check_callable("mask_mod", mask_mod, "(b, h, i, j)", required=True)
    counts = tile_counts(mask_mod, q_len, kv_len, default_device(device))[None, None]
    return from_tiles(counts > 0, counts == TILE * TILE, mask_mod, q_len, kv_len)
