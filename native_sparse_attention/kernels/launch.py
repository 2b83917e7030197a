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


@dataclass(frozen=True)
class RankingTile:
    """BLOCK_M rows of queries against BLOCK_N blocks a step, whose n best are found by `columns`
    lists of `depth` blocks, or by merging where `columns` is 0."""

    block_m: int
    block_n: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


MERGED = RankingTile(64, 64, 0, 0, 8, 2)
# by rule; not measured: none spills registers when compiled for an H100 at width 128
RANKING_TILES = {
    "logits": RankingTile(64, 64, 8, 8, 4, 3),
    "probs": RankingTile(64, 64, 32, 4, 4, 3),
}
# lists are too short for more
MOST_IN_LISTS = 16


def ranking_tile(
    rule: str, width: int, groups: int, n: int, dtype: torch.dtype, columns: bool = True
) -> RankingTile:
    """For heads of `width`, `groups` of which rank together, and the n best."""
    tile = RANKING_TILES[rule] if columns and n <= MOST_IN_LISTS else MERGED
    block_n = max(tile.block_n, triton.next_power_of_2(n))
    block_m = tile.block_m
    if rule == "probs":
        # a tile holds at least one token with all heads of its group
        block_m = max(block_m, triton.next_power_of_2(groups))
    return RankingTile(
        block_m, block_n, tile.columns, min(tile.depth, n), tile.num_warps, tile.num_stages
    )
