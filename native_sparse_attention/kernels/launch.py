"""Tile sizes and launch parameters, as data: a function of the problem, not tuned at a first call.

Those of width 128 are the best of the four or five tried on an H200, bf16, at 65536 tokens and 16
query heads a KV head; the others are safe, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    """BLOCK_M rows of queries against BLOCK_N blocks a step, whose n best are kept in `columns`
    lists of `depth` blocks, or merged where `columns` is 0; `merge_n` blocks a step where lists
    lost one and the tile is done again."""

    block_m: int
    block_n: int
    columns: int
    depth: int
    merge_n: int
    num_warps: int
    num_stages: int


# not measured: chosen so that no registers spill, compiled for an H100. With 8 lists of 8, one
# tile in 60 of random scores loses one of the 16 best, and one in 370 one of the 13 best.
LOGITS_TILES = {
    128: RankingTile(64, 64, 8, 8, 32, 4, 2),
    256: RankingTile(64, 32, 8, 8, 32, 4, 2),
}
INTERPOLATED_TILES = {
    128: RankingTile(64, 32, 8, 8, 32, 4, 2),
    256: RankingTile(64, 32, 0, 0, 32, 8, 2),
}
# by the heads of a group, a power of two: many of them leave a tile few tokens, whose scores are
# spread over more lists
PROBS_TILES = {
    2: RankingTile(64, 64, 8, 8, 32, 4, 2),
    8: RankingTile(64, 32, 8, 8, 32, 4, 3),
    64: RankingTile(64, 32, 32, 4, 32, 4, 3),
}
PROBS_FLOAT32 = RankingTile(32, 32, 0, 0, 32, 8, 1)
# lists are too short for more
MOST_IN_LISTS = 16


def first_at_least(tiles: dict[int, RankingTile], size: int) -> RankingTile:
    return next(tile for limit, tile in tiles.items() if size <= limit)


def logits_tile(width: int, n: int, interpolated: bool) -> RankingTile:
    """For heads of `width` and the n best."""
    tile = first_at_least(INTERPOLATED_TILES if interpolated else LOGITS_TILES, width)
    return for_the_n_best(tile, n)


def probs_tile(heads: int, n: int, dtype: torch.dtype) -> RankingTile:
    """For groups of `heads`, a power of two, and the n best."""
    tile = PROBS_FLOAT32 if dtype == torch.float32 else first_at_least(PROBS_TILES, heads)
    # a tile holds at least one token with all heads of its group
    return for_the_n_best(replace(tile, block_m=max(tile.block_m, heads)), n)


def for_the_n_best(tile: RankingTile, n: int) -> RankingTile:
    if n > MOST_IN_LISTS or tile.columns == 0:
        block_n = max(32, triton.next_power_of_2(n))
        return replace(tile, block_n=block_n, columns=0, depth=0, num_warps=8)
    return replace(tile, depth=min(tile.depth, n))
