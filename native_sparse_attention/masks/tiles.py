"""Block masks of torch's flex_attention: the tiles of queries and keys that hold an allowed pair.

A *mask mod* decides about one pair (b, h, i, j): batch row, query head, query and key. A *block
mask* adds the tiles [tq tk] with some allowed pair and those with only allowed pairs. This module
evaluates every pair for one strip of queries at a time: it never forms a T x S array.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import check_callable, check_device, check_int, check_ints

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

TILE = 128

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# pairs that one strip evaluates at once
PAIRS_AT_ONCE = 2**24


def constant(name: str, value: int, minimum: int = 0) -> str:
    """Check an integer for the closure of a mod, which reads it with `int`. torch's compiler makes
    a number in a closure symbolic at its second value, which flex_attention cannot compile. A
    string stays a constant of the graph."""
    return repr(check_int(name, value, minimum))


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """torch's `flex_attention.and_masks`: a pair is allowed if every mask mod allows it."""
    from torch.nn.attention import flex_attention as flex  # loads sympy, so not at import

    return flex.and_masks(*mask_mods)


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """torch's `flex_attention.or_masks`: a pair is allowed if any mask mod allows it."""
    from torch.nn.attention import flex_attention as flex

    return flex.or_masks(*mask_mods)


def default_device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return check_device("device", device)


def cached(build: Callable[..., BlockMask]) -> Callable[..., BlockMask]:
    """Cache the masks of the last 64 shapes, except during tracing. Cached masks are never
    inference tensors, since the next user of a mask may train."""
    build_once = lru_cache(maxsize=64)(torch.inference_mode(False)(build))

    @wraps(build)
    def get(*args: Any) -> BlockMask:
        return (build if torch.compiler.is_compiling() else build_once)(*args)

    return get


def tile_bounds(length: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """First and last index of each tile of a sequence, and whether the tile is whole."""
    first = torch.arange(0, length, TILE, device=device)
    return first, (first + TILE - 1).clamp(max=length - 1), first + TILE <= length


def make_block_mask(
    touched: Tensor, full: Tensor, mask_mod: MaskMod, q_len: int, kv_len: int
) -> BlockMask:
    """A block mask from the tiles [b h tq tk] with some allowed pair and those with all allowed."""
    from torch.nn.attention.flex_attention import BlockMask

    def count_and_order(tiles: Tensor) -> tuple[Tensor, Tensor]:
        # marked tiles first
        order = tiles.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
        return tiles.sum(dim=-1, dtype=torch.int32), order.to(torch.int32)

    return BlockMask.from_kv_blocks(
        *count_and_order(touched & ~full),
        *count_and_order(full),
        BLOCK_SIZE=TILE,
        mask_mod=mask_mod,
        seq_lengths=(q_len, kv_len),
    )


def tile_counts(
    mask_mod: MaskMod, q_len: int, kv_len: int, device: torch.device, tile: int = TILE
) -> Tensor:
    """Number of allowed pairs of batch row 0 and head 0 in each tile of `tile` x `tile`, int64
    [tq tk], in memory O(T S / tile^2)."""
    from torch.nn.attention.flex_attention import create_mask

    # a whole number of tiles of queries
    rows = max(1, PAIRS_AT_ONCE // max(1, kv_len * tile)) * tile
    strips = []
    for first in range(0, q_len, rows):
        size = min(rows, q_len - first)

        def strip(b: Tensor, h: Tensor, i: Tensor, j: Tensor, first: int = first) -> Tensor:
            return mask_mod(b, h, i + first, j)

        allowed = create_mask(strip, 1, 1, size, kv_len, device=str(device))[0, 0]
        padded = F.pad(allowed, (0, -kv_len % tile, 0, -size % tile))
        strips.append(padded.unflatten(1, (-1, tile)).unflatten(0, (-1, tile)).sum((1, 3)))
    return torch.cat(strips)


def block_mask_of(
    mask_mod: MaskMod, q_len: int, kv_len: int, device: torch.device | str | None = None
) -> BlockMask:
    """The block mask of any mask mod that depends on neither b nor h: the tiles of torch's
    `create_block_mask`, formed from a strip of pairs at a time, not from all T x S. `device` is
    CUDA by default if available."""
    q_len, kv_len = check_ints(1, q_len=q_len, kv_len=kv_len)
    check_callable("mask_mod", mask_mod, "(b, h, i, j)", required=True)
    counts = tile_counts(mask_mod, q_len, kv_len, default_device(device))[None, None]
    return make_block_mask(counts > 0, counts == TILE * TILE, mask_mod, q_len, kv_len)
