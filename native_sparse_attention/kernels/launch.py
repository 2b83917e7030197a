"""Tile sizes and launch parameters, as data: a function of the problem, not tuned at a first call.

Those of width 128 are the best of the four or five tried on an H200, bf16, at 65536 tokens and 16
query heads a KV head; the others are safe, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

# programs that keep a large GPU busy through the tail of a launch
ENOUGH_PROGRAMS = 1024


@dataclass(frozen=True)
class Tile:
    """BLOCK_M rows of queries (tokens x heads) against BLOCK_N keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# by kernel; "forward" of a window, whose queries see few keys, apart
TILES = {
    128: {
        "forward": Tile(128, 128, 8, 2),
        "window": Tile(64, 64, 4, 3),
        "dq": Tile(128, 64, 8, 3),
        "dkv": Tile(128, 64, 8, 2),
    },
    256: {
        "forward": Tile(64, 64, 8, 2),
        "window": Tile(64, 64, 8, 2),
        "dq": Tile(64, 32, 8, 2),
        "dkv": Tile(64, 32, 8, 2),
    },
}
FLOAT32 = Tile(32, 32, 4, 1)


def interval_tile(kernel: str, wide: bool, width: int, groups: int, dtype: torch.dtype) -> Tile:
    """For `kernel` "forward", "dq" or "dkv", heads of `width` (the wider of keys and values) and
    queries that see many keys (`wide`) or a window of them."""
    if kernel == "forward" and not wide:
        kernel = "window"
    bucket = next(limit for limit in TILES if width <= limit)
    tile = FLOAT32 if dtype == torch.float32 else TILES[bucket][kernel]
    # a tile holds at least one token with all heads of its group
    block_m = max(tile.block_m, triton.next_power_of_2(groups))
    return Tile(block_m, tile.block_n, tile.num_warps, tile.num_stages)


def query_splits(programs: int, tiles: int) -> int:
    """Into how many shares the queries of a block of keys are cut, where few blocks of keys are
    seen by many queries."""
    return max(1, min(ENOUGH_PROGRAMS // max(1, programs), tiles // 8))
