"""Tile sizes, as data: what `launch.py` takes for a problem on a GPU.

A GPU takes the rows of its architecture. Only a Hopper's are measured, on an H200: in 16 bits those
of width 128, as they were chosen at 65536 and 8192 tokens, and in float32 at 4096. Tiles tried
since are in `benchmarks/results/tune.jsonl`, in 16 bits of what a Hopper runs in Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

# programs that keep a large GPU busy through the tail of a launch
ENOUGH_PROGRAMS = 1024


@dataclass(frozen=True)
class TileConfig:
    """BLOCK_M rows of queries (tokens x heads) against BLOCK_N keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# by width and kernel; "window." where queries see few keys, "few.", "prefix." where there are few
FLASH = {
    128: {
        "forward": TileConfig(64, 64, 4, 3),
        "few.forward": TileConfig(64, 32, 4, 2),
        "window.forward": TileConfig(64, 64, 4, 3),
        "dq": TileConfig(128, 64, 8, 3),
        "window.dq": TileConfig(64, 64, 4, 2),
        "dkv": TileConfig(64, 128, 8, 3),
        "window.dkv": TileConfig(64, 128, 8, 3),
        "prefix.dkv": TileConfig(64, 64, 4, 2),
    },
    256: {
        "forward": TileConfig(64, 64, 8, 2),
        "few.forward": TileConfig(64, 64, 8, 2),
        "window.forward": TileConfig(64, 64, 8, 2),
        "dq": TileConfig(64, 32, 8, 2),
        "window.dq": TileConfig(64, 32, 8, 2),
        "dkv": TileConfig(64, 32, 8, 2),
        "window.dkv": TileConfig(64, 32, 8, 2),
        "prefix.dkv": TileConfig(64, 32, 8, 2),
    },
}
# dk and dv of few query heads a KV head
FEW_HEADS_TILES = {
    "dkv": TileConfig(32, 128, 8, 3),
    "window.dkv": TileConfig(32, 64, 4, 3),
    "prefix.dkv": TileConfig(32, 64, 4, 2),
}
# of all kernels in float32, but for those of the selected branch where they have their own
FLOAT32 = {
    64: {"flash": TileConfig(32, 32, 4, 1), "key_major": TileConfig(32, 64, 8, 1)},
    128: {
        "flash": TileConfig(64, 32, 8, 1),
        "query_major": TileConfig(16, 32, 4, 1),
        "key_major": TileConfig(32, 64, 8, 1),
    },
    256: {"flash": TileConfig(16, 16, 4, 1)},
}

# the selected branch query by query: by rows of a tile (those of the tokens that share a list).
# Entries of lists are fetched before their keys: of five stages two hold keys
QUERY_MAJOR = {
    16: {"forward": TileConfig(16, 32, 1, 5), "dq": TileConfig(16, 64, 2, 5)},
    32: {"forward": TileConfig(32, 64, 2, 5), "dq": TileConfig(32, 64, 2, 3)},
    64: {"forward": TileConfig(64, 64, 4, 5), "dq": TileConfig(64, 64, 4, 2)},
    128: {"forward": TileConfig(128, 64, 8, 2), "dq": TileConfig(128, 64, 8, 2)},
}


@dataclass(frozen=True)
class UnionRule:
    """As many lists of neighbouring tokens are walked as one where they are alike: where `cost` x
    the blocks of their union are fewer than those of the lists. Not tried on fewer groups than
    `least`."""

    members: int
    cost: float
    least: int = ENOUGH_PROGRAMS


# by rows of a list's tile. `cost` is the time of a tile of lists x rows rows over one block, in
# that which one list takes a block: query by query, or under FEW_ROWS rows block by block. Two
# lists of 32 rows are faster together whatever they hold (on an H200 1.00 ms for 1.39, H = 64,
# K = 2, 8k; not tried of tokens that share a list), so that theirs is under 1. 256 groups are those
# of 512 tokens, 8 KV heads: on an H200 the layer's forward takes 97 µs for 110 with them
UNION_RULES = {
    4: UnionRule(16, 5.0, least=256),
    8: UnionRule(8, 1.8),
    16: UnionRule(4, 1.6),
    32: UnionRule(2, 0.95),
}

# and block by block; "one." of one query head a KV head, where its tile is another
KEY_MAJOR = {
    128: {
        "forward": TileConfig(64, 64, 4, 2),
        "one.forward": TileConfig(64, 64, 4, 1),
        "backward": TileConfig(32, 64, 4, 3),
    },
    256: {"forward": TileConfig(64, 64, 8, 2), "backward": TileConfig(32, 64, 8, 1)},
}

# keys that are few: a prefix, of memory or of the initial block
FEW_KEYS = 64

# where queries may see many keys but there are at most so many: whose tile a kernel takes
FEWER_KEYS = {"dq": (1024, "window.dq"), "forward": (512, "few.forward")}

# query heads a KV head up to which dk and dv are better formed of few rows at a time
FEW_HEADS = 8


# the ranking


@dataclass(frozen=True)
class TopkTileConfig:
    """BLOCK_M rows of queries against BLOCK_N blocks (`probs`: windows) a step, whose n best are
    kept in `columns` lists of `depth` blocks, or merged where `columns` is 0. Where lists lose a
    block, the tile is done again by merging, `merge_n` a step."""

    block_m: int
    block_n: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    merge_n: int = 32


# chosen so that no registers spill, compiled for an H100; of 14 others for logits, width 128, the
# best took 0.957 of the time at 65536 tokens. With 8 lists of 8, one tile in 60 of random scores
# loses one of the 16 best, and one in 370 one of the 13 best. A row of a tile's scores should lie
# in one warp, which 16 rows a warp achieve
LOGITS_TILES = {128: TopkTileConfig(64, 64, 8, 8, 4, 2), 256: TopkTileConfig(64, 32, 8, 8, 4, 2)}
# blocks that are ranked 32 a step: 191 µs for 205 of 128, H = K = 32, but 5.06 ms for 4.82 of 1024
FEW_BLOCKS = 128
INTERPOLATED_TILES = {
    128: TopkTileConfig(64, 32, 8, 8, 4, 2),
    256: TopkTileConfig(64, 32, 0, 0, 8, 1),
}
# by the heads of a group: many of them leave a tile few tokens, whose scores are spread over more
# lists
PROBS_TILES = {
    2: TopkTileConfig(64, 64, 8, 8, 4, 2, 64),
    8: TopkTileConfig(64, 128, 32, 4, 4, 2, 64),
    64: TopkTileConfig(128, 128, 32, 4, 4, 2, 64),
}
# of wide heads, and for GPUs that hold less
NARROW_PROBS_TILES = {
    2: TopkTileConfig(64, 64, 8, 8, 8, 2, 64),
    64: TopkTileConfig(64, 64, 32, 4, 4, 2, 64),
}
PROBS_FLOAT32 = TopkTileConfig(32, 32, 0, 0, 8, 1)
# lists are too short for more
MOST_IN_LISTS = 16


def heads_ahead(size: int) -> int:
    """Heads of a tile of `logits`, of `size` bytes each, that are on their way at once, to be added
    up: several where they fit, as measured on an H200 (65 µs for 70, H = 64, K = 4, 8k tokens)."""
    return 4 if size <= 1 << 14 else 1


# other architectures; not measured, chosen to fit and to spill little


@dataclass(frozen=True)
class Architecture:
    """Tables of tiles: by width, and by rows of a tile (query_major) or heads of a group
    (probs)."""

    shared_memory: int  # bytes that a program may hold
    flash: dict[int, dict[str, TileConfig]]
    few_heads: dict[str, TileConfig]
    query_major: dict[int, dict[int, dict[str, TileConfig]]]
    query_major_rows: int  # at most
    key_major: dict[int, dict[str, TileConfig]]
    float32: dict[int, dict[str, TileConfig]]
    block_bytes: int  # of keys and values, of a block that tiles of `pairs` can hold
    logits: dict[int, TopkTileConfig]
    interpolated: dict[int, TopkTileConfig]
    probs: dict[int, dict[int, TopkTileConfig]]

    def float32_tile(self, kind: str, width: int) -> TileConfig:
        """For kernels of a kind, "flash", "query_major" or "key_major", in float32."""
        tiles = next(found for limit, found in self.float32.items() if width <= limit)
        return tiles.get(kind, tiles["flash"])


def in_one_stage(table: dict[int, Any]) -> dict[int, Any]:
    """A table whose tiles wait for their keys, for less shared memory."""
    return {
        limit: {key: replace(tile, num_stages=1) for key, tile in found.items()}
        if isinstance(found, dict)
        else replace(found, num_stages=1)
        for limit, found in table.items()
    }


BY_WIDTH = {128: PROBS_TILES, 256: NARROW_PROBS_TILES}
RANKING: tuple[Any, Any, Any] = (LOGITS_TILES, INTERPOLATED_TILES, BY_WIDTH)
WIDE_QUERY_MAJOR = in_one_stage(QUERY_MAJOR)
HOPPER = Architecture(
    227 * 1024,
    FLASH,
    FEW_HEADS_TILES,
    {128: QUERY_MAJOR, 256: WIDE_QUERY_MAJOR},
    # of 128 rows in two to four stages 1.27 ms for 1.06 (the layer's forward, H = 64, K = 4, 8k, 16
    # tokens a list), 16.0 for 14.4 at 64k; backward 3.19 for 3.08
    64,
    KEY_MAJOR,
    FLOAT32,
    128 * 1024,
    *RANKING,
)

# an A100's
AMPERE = Architecture(
    163 * 1024,
    {
        128: dict.fromkeys(FLASH[128], TileConfig(64, 64, 8, 2))
        | {"forward": TileConfig(128, 64, 8, 2)},
        256: dict.fromkeys(FLASH[256], TileConfig(32, 64, 8, 1)),
    },
    dict.fromkeys(FEW_HEADS_TILES, TileConfig(32, 64, 8, 2)),
    {
        128: QUERY_MAJOR,
        256: WIDE_QUERY_MAJOR | {128: dict.fromkeys(QUERY_MAJOR[128], TileConfig(128, 16, 8, 1))},
    },
    128,
    {
        128: dict.fromkeys(KEY_MAJOR[128], TileConfig(64, 64, 8, 2)),
        256: dict.fromkeys(KEY_MAJOR[256], TileConfig(32, 64, 8, 1)),
    },
    FLOAT32,
    64 * 1024,
    *RANKING,
)

# what holds least and runs bfloat16: an Ampere or Ada of the desktop
SMALL = {128: TileConfig(64, 64, 8, 1), 256: TileConfig(32, 32, 4, 1)}
ELSEWHERE = Architecture(
    99 * 1024,
    {width: dict.fromkeys(FLASH[width], tile) for width, tile in SMALL.items()},
    dict.fromkeys(FEW_HEADS_TILES, TileConfig(32, 64, 4, 1)),
    {
        128: in_one_stage(QUERY_MAJOR),
        256: {
            16: dict.fromkeys(QUERY_MAJOR[16], TileConfig(16, 32, 2, 1)),
            32: dict.fromkeys(QUERY_MAJOR[32], TileConfig(32, 32, 2, 1)),
            64: dict.fromkeys(QUERY_MAJOR[64], TileConfig(64, 16, 4, 1)),
        },
    },
    64,
    {width: dict.fromkeys(KEY_MAJOR[width], tile) for width, tile in SMALL.items()},
    {
        128: {"flash": TileConfig(32, 32, 4, 1), "query_major": TileConfig(16, 16, 4, 1)},
        256: {"flash": TileConfig(16, 16, 4, 1)},
    },
    32 * 1024,
    in_one_stage(LOGITS_TILES),
    in_one_stage(INTERPOLATED_TILES),
    dict.fromkeys(BY_WIDTH, in_one_stage(NARROW_PROBS_TILES)),
)

# by compute capability
ARCHITECTURES = {(9, 0): HOPPER, (8, 0): AMPERE, (8, 7): AMPERE}
