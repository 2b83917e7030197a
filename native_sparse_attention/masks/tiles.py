"""Block masks of torch's flex_attention: the tiles of queries and keys that hold an allowed pair.

    b, h    batch row, query head
    i, j    query, key
    tq, tk  tiles of queries, of keys

A *mask mod* decides about one pair (b, h, i, j). A *block mask* adds the tiles with some allowed
pair and the tiles with only allowed pairs. This module finds the tiles from geometry, or evaluates
every pair for one strip of queries at a time. It never forms a T x S array. Any length works.
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

# pairs that one strip evaluates at once
PAIRS_AT_ONCE = 2**24


# functions of PyTorch, without loading flex_attention at import


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
    """The number of marked tiles in each row of [b h tq tk], and tile indices, marked ones
    first."""
    tiles = tiles.to(torch.int32)
    order = tiles.argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(dim=-1, dtype=torch.int32), order.to(torch.int32)


def from_tiles(
    touched: Tensor, full: Tensor, mask_mod: MaskMod, q_len: int, kv_len: int
) -> BlockMask:
    """A block mask from the tiles [b h tq tk] with some allowed pair and those with all allowed."""
    from torch.nn.attention.flex_attention import BlockMask

    return BlockMask.from_kv_blocks(
        *ordered(touched & ~full),
        *ordered(full),
        BLOCK_SIZE=TILE,
        mask_mod=mask_mod,
        seq_lengths=(q_len, kv_len),
    )


def tile_bounds(length: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """First and last index of each tile of a sequence, and whether the tile is whole."""
    first = torch.arange(0, length, TILE, device=device)
    return first, (first + TILE - 1).clamp(max=length - 1), first + TILE <= length


def from_intervals(
    interval: Callable[[Tensor], tuple[Tensor, Tensor]],
    mask_mod: MaskMod,
    q_len: int,
    kv_len: int,
    device: torch.device,
) -> BlockMask:
    """A block mask for queries that see one KV range each, `interval(i) = (first, last)`.

    Both ends must rise with i, and ranges of neighbours must overlap or adjoin. Then the first and
    the last query of a tile determine the tile.
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
    """Cache the masks of the last 64 shapes, except during tracing. Cached masks are never
    inference tensors, since the next user of a mask may train."""

    @lru_cache(maxsize=64)
    def keep(*args: int | bool | torch.device) -> BlockMask:
        with torch.inference_mode(False):
            return build(*args)

    def get(*args: int | bool | torch.device) -> BlockMask:
        return build(*args) if torch.compiler.is_compiling() else keep(*args)

    return get


# masks without known geometry


def tile_counts(
    mask_mod: MaskMod, q_len: int, kv_len: int, device: torch.device, tile: int = TILE
) -> Tensor:
    """Number of allowed pairs in each tile of `tile` x `tile`, int64 [tq tk].

    Evaluates every pair of batch row 0 and head 0: time O(T S), memory O(T S / tile^2).
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
    """The block mask of any mask mod that depends on neither b nor h.

    It has the tiles of torch's `create_block_mask`, but holds a strip of pairs at a time, not all
    T x S. `device` is CUDA by default if available.

    Raises:
        ValueError: q_len or kv_len below 1, mask_mod not a function, device not a device.
    """
    q_len, kv_len = check_ints(1, q_len=q_len, kv_len=kv_len)
    check_callable("mask_mod", mask_mod, "(b, h, i, j)", required=True)
    counts = tile_counts(mask_mod, q_len, kv_len, default_device(device))[None, None]
    return from_tiles(counts > 0, counts == TILE * TILE, mask_mod, q_len, kv_len)
