"""Tables of tile configs, by architecture. `launch.py` looks up the config of a problem.

Only the rows of Hopper are measured, on an H200: 16-bit rows of width 128 at 65536 and 8192 tokens,
float32 rows at 4096 tokens. `benchmarks/results/tune.jsonl` has other configs that were tried.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

# programs that keep a large GPU busy to the end of a launch
ENOUGH_PROGRAMS = 1024


@dataclass(frozen=True)
class TileConfig:
    """BLOCK_M rows of queries (tokens x heads) against BLOCK_N keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# query-major, by rows of a tile (all rows of the tokens that share block indices). Block indices
# are loaded before their keys, so two of five stages hold keys
QUERY_MAJOR = {
    16: {"forward": TileConfig(16, 32, 1, 5), "dq": TileConfig(16, 64, 2, 5)},
    32: {"forward": TileConfig(32, 64, 2, 5), "dq": TileConfig(32, 64, 2, 3)},
    64: {"forward": TileConfig(64, 64, 4, 5), "dq": TileConfig(64, 64, 4, 2)},
    128: {"": TileConfig(128, 64, 8, 2)},
}
# for widths above 128
WIDE_QUERY_MAJOR = {
    rows: {kernel: replace(tile, num_stages=1) for kernel, tile in tiles.items()}
    for rows, tiles in QUERY_MAJOR.items()
}


@dataclass(frozen=True)
class UnionRule:
    """When to read the union of the block indices of `members` neighbouring selections: where
    `cost` times the blocks of the union are fewer than the blocks of all members, in a launch of at
    least `min_groups` groups of members."""

    members: int
    cost: float
    min_groups: int = ENOUGH_PROGRAMS


# by rows of a selection's tile. `cost` is the time of one block for a tile of members x rows rows,
# relative to one selection's. Below 1: unions of two selections of 32 rows are faster for any
# overlap. Selections of up to 8 rows are read key-major
UNION_RULES = {16: UnionRule(4, 1.6), 32: UnionRule(2, 0.95)}

# at most this many keys are a prefix: memory, or the initial block
FEW_KEYS = 64

# by kernel: largest number of keys for which it uses the tile config of another, and its name
FEWER_KEYS = {"dq": (1024, "window.dq"), "forward": (512, "few.forward")}

# query heads per KV head up to which dk and dv are faster with few rows per tile
FEW_HEADS = 8


@dataclass(frozen=True)
class TopkTileConfig:
    """BLOCK_M rows of queries against BLOCK_N blocks (`probs`: windows) per step. `topn.py` keeps
    the n best in `columns` sorted columns of `depth` blocks, or merges them if `columns` is 0. If a
    column loses a block, the program repeats the tile by merging, `merge_n` blocks per step."""

    block_m: int
    block_n: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    merge_n: int = 32


# `max`: a step scores windows of `columns` blocks
MAX_TILES = {128: TopkTileConfig(64, 128, 4, 8, 4, 3), 256: TopkTileConfig(64, 64, 4, 8, 4, 2)}
MAX_FLOAT32 = TopkTileConfig(64, 32, 0, 0, 4, 1)
# for wide heads, and for GPUs with less shared memory
NARROW_PROBS_TILES = {
    2: TopkTileConfig(64, 64, 8, 8, 8, 2, 64),
    64: TopkTileConfig(64, 64, 32, 4, 4, 2, 64),
}
PROBS_FLOAT32 = TopkTileConfig(32, 32, 0, 0, 8, 1)
# largest n ranked with sorted columns: they are too short for more
MAX_COLUMN_N = 16


class Architecture(NamedTuple):
    """Tables by width; `query_major` also by rows of a tile, `probs` by heads of a group."""

    shared_memory: int  # bytes per program
    max_stages: int
    block_bytes: int  # keys and values of a block in a key-major tile, at most
    query_major_rows: int  # of a tile, at most
    flash: dict[int, dict[str, TileConfig]]
    few_heads: dict[str, TileConfig]
    key_major: dict[int, dict[str, TileConfig]]
    float32: dict[int, dict[str, TileConfig]]
    query_major: dict[int, dict[int, dict[str, TileConfig]]]
    logits: dict[int, TopkTileConfig]
    interpolated: dict[int, TopkTileConfig]
    largest: dict[int, TopkTileConfig]
    probs: dict[int, dict[int, TopkTileConfig]]


# An entry of a kernel is for all kernels whose name ends in it, unless the whole name has an entry,
# and "" for all others. "window.": queries see few of the keys; "few." and "prefix.": there are
# few; "one.": one query head per KV head
HOPPER = Architecture(
    shared_memory=227 * 1024,
    max_stages=5,
    block_bytes=128 * 1024,
    query_major_rows=64,  # the layer's forward with 128 takes 1.2 times as long
    flash={
        128: {
            "forward": TileConfig(64, 64, 4, 3),
            "few.forward": TileConfig(64, 32, 4, 2),
            "dq": TileConfig(128, 64, 8, 3),
            "window.dq": TileConfig(64, 64, 4, 2),
            "dkv": TileConfig(64, 128, 8, 3),
            "prefix.dkv": TileConfig(64, 64, 4, 2),
        },
        256: {"forward": TileConfig(64, 64, 8, 2), "": TileConfig(64, 32, 8, 2)},
    },
    few_heads={
        "dkv": TileConfig(32, 128, 8, 3),
        "window.dkv": TileConfig(32, 64, 4, 3),
        "prefix.dkv": TileConfig(32, 64, 4, 2),
    },
    key_major={
        128: {
            "forward": TileConfig(64, 64, 4, 2),
            "one.forward": TileConfig(64, 64, 4, 1),
            "backward": TileConfig(32, 64, 4, 3),
        },
        256: {"forward": TileConfig(64, 64, 8, 2), "backward": TileConfig(32, 64, 8, 1)},
    },
    float32={
        64: {"key_major": TileConfig(32, 64, 8, 1), "": TileConfig(32, 32, 4, 1)},
        128: {
            "query_major": TileConfig(16, 32, 4, 1),
            "key_major": TileConfig(32, 64, 8, 1),
            "": TileConfig(64, 32, 8, 1),
        },
        256: {"": TileConfig(16, 16, 4, 1)},
    },
    query_major={128: QUERY_MAJOR, 256: WIDE_QUERY_MAJOR},
    # no registers spill, compiled for an H100. With 8 columns of depth 8 and random scores, one
    # tile in 60 loses one of the 16 best blocks. With 16 rows per warp, all scores of a row lie in
    # one warp
    logits={128: TopkTileConfig(64, 64, 8, 8, 4, 2), 256: TopkTileConfig(64, 32, 8, 8, 4, 2)},
    interpolated={128: TopkTileConfig(64, 32, 8, 8, 4, 2), 256: TopkTileConfig(64, 32, 0, 0, 8, 1)},
    largest=MAX_TILES,
    # with many heads a tile has few tokens, and more columns per token
    probs={
        128: {
            2: TopkTileConfig(64, 64, 8, 8, 4, 2, 64),
            8: TopkTileConfig(64, 128, 32, 4, 4, 2, 64),
            64: TopkTileConfig(128, 128, 32, 4, 4, 2, 64),
        },
        256: NARROW_PROBS_TILES,
    },
)

# A100; like all below not measured, but chosen to fit shared memory and to spill few registers
SQUARE = TileConfig(64, 64, 8, 2)
AMPERE = HOPPER._replace(
    shared_memory=163 * 1024,
    block_bytes=64 * 1024,
    query_major_rows=128,
    flash={
        128: dict.fromkeys(("few.forward", "window.forward", ""), SQUARE)
        | {"forward": TileConfig(128, 64, 8, 2)},
        256: {"": TileConfig(32, 64, 8, 1)},
    },
    few_heads={"": TileConfig(32, 64, 8, 2)},
    key_major={128: {"": SQUARE}, 256: {"": TileConfig(32, 64, 8, 1)}},
    query_major={128: QUERY_MAJOR, 256: WIDE_QUERY_MAJOR | {128: {"": TileConfig(128, 16, 8, 1)}}},
)

# desktop Ampere and Ada: the least shared memory of all GPUs that run bfloat16
SMALL = {128: {"": TileConfig(64, 64, 8, 1)}, 256: {"": TileConfig(32, 32, 4, 1)}}
OTHER_GPUS = HOPPER._replace(
    shared_memory=99 * 1024,
    max_stages=1,
    block_bytes=32 * 1024,
    flash=SMALL,
    few_heads={"": TileConfig(32, 64, 4, 1)},
    key_major=SMALL,
    float32={
        128: {"query_major": TileConfig(16, 16, 4, 1), "": TileConfig(32, 32, 4, 1)},
        256: {"": TileConfig(16, 16, 4, 1)},
    },
    query_major={
        128: QUERY_MAJOR,
        256: {
            16: {"": TileConfig(16, 32, 2, 1)},
            32: {"": TileConfig(32, 32, 2, 1)},
            64: {"": TileConfig(64, 16, 4, 1)},
        },
    },
    largest={256: MAX_TILES[256]},
    probs={256: NARROW_PROBS_TILES},
)

# by compute capability
ARCHITECTURES = {(9, 0): HOPPER, (8, 0): AMPERE, (8, 7): AMPERE}
