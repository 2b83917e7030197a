"""Tile sizes and launch parameters, as data: a function of the problem, not tuned at a first call.

A GPU takes the rows of its architecture. A Hopper's of width 128 are the best of the four or five
tried on an H200, bf16, at 65536 tokens and 16 query heads a KV head; all others are not measured.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .device import BEHIND, EVERYTHING
from .sizes import asked

LOG2_E = 1.4426950408889634

# a reach past every sequence
ALWAYS = 1 << 30

# programs that keep a large GPU busy through the tail of a launch
ENOUGH_PROGRAMS = 1024


@dataclass(frozen=True)
class Tile:
    """BLOCK_M rows of queries (tokens x heads) against BLOCK_N keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# a Hopper's by width and kernel; "forward" of a window, whose queries see few keys, apart
TILES = {
    128: {
        "forward": Tile(128, 128, 8, 2),
        "window": Tile(64, 64, 4, 2),
        "dq": Tile(128, 64, 8, 3),
        "dkv": Tile(64, 128, 8, 3),
    },
    256: {
        "forward": Tile(64, 64, 8, 2),
        "window": Tile(64, 64, 8, 2),
        "dq": Tile(64, 32, 8, 2),
        "dkv": Tile(64, 32, 8, 2),
    },
}
FLOAT32 = {256: Tile(32, 32, 4, 1)}

# the selected branch query by query: by rows of a tile (those of the tokens that share a list)
GATHER = {
    16: {"forward": Tile(16, 64, 1, 2), "dq": Tile(16, 64, 2, 3)},
    32: {"forward": Tile(32, 64, 2, 3), "dq": Tile(32, 64, 2, 2)},
    64: {"forward": Tile(64, 64, 4, 3), "dq": Tile(64, 64, 4, 2)},
    128: {"forward": Tile(128, 64, 8, 2), "dq": Tile(128, 64, 8, 2)},
}
GATHER_ROWS = 128

# and block by block
PAIRS = {
    128: {"forward": Tile(64, 64, 4, 3), "dq": Tile(64, 64, 4, 3), "dkv": Tile(64, 64, 4, 2)},
    256: {"forward": Tile(64, 64, 8, 2), "dq": Tile(32, 64, 8, 1), "dkv": Tile(32, 64, 8, 1)},
}

# tiles that stand in for those of this module, by kernel: "dq", "gather.dq", "ranking.probs"
override: dict[str, Any] = {}

# rows that a program of the selected branch, block by block, works through at most
ITEM_ROWS = 16384

# query heads a KV head up to which dk and dv are better formed of few rows at a time
FEW_HEADS = 8

# tokens up to which the parts of the selected branch are kept at once
FEW_TOKENS = 4096

# rows of a query-by-query tile under which block by block is faster
FEW_ROWS = 9


@contextmanager
def using(tiles: dict[str, Any]) -> Iterator[None]:
    """Launch with these tiles, to try them out. In all threads: backward passes have their own."""
    before = dict(override)
    override.update(tiles)
    try:
        yield
    finally:
        override.clear()
        override.update(before)


def chosen(kernel: str, tile: Tile) -> Tile:
    """The tile of a launch: this one, or one to try out, in the sizes that the call asks for."""
    tile = override.get(kernel, tile)
    block_m, block_n = asked(kernel) or (tile.block_m, tile.block_n)
    return Tile(block_m, block_n, tile.num_warps, tile.num_stages)


def padded(width: int) -> int:
    """The power of two, at least 16, that a tile of `width` takes."""
    return max(16, triton.next_power_of_2(width))


@functools.cache
def capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def architecture() -> Architecture:
    """The rows of the tables that the current GPU takes."""
    if not torch.cuda.is_available():
        return ELSEWHERE
    return ARCHITECTURES.get(capability(torch.cuda.current_device()), ELSEWHERE)


def row(table: dict[int, Any], size: int) -> Any:
    """The first row of a table that reaches up to `size`."""
    return next(found for limit, found in table.items() if size <= limit)


def for_groups(kernel: str, groups: int, tile: Tile) -> Tile:
    """The tile of `kernel`, of at least one token with all heads of its group; of fewer keys where
    it is grown for them."""
    least = triton.next_power_of_2(groups)
    grown = max(1, least // tile.block_m)
    tile = replace(tile, block_m=tile.block_m * grown, block_n=max(16, tile.block_n // grown))
    tile = chosen(kernel, tile)
    return replace(tile, block_m=max(tile.block_m, least))


def interval_tile(kernel: str, wide: bool, width: int, groups: int, dtype: torch.dtype) -> Tile:
    """For `kernel` "forward", "dq" or "dkv", heads of `width` (the wider of keys and values) and
    queries that see many keys (`wide`) or a window of them."""
    if kernel == "forward" and not wide:
        kernel = "window"
    tables = architecture()
    tile = row(tables.intervals, width)[kernel]
    if dtype == torch.float32:
        tile = row(tables.float32, width)
    if kernel == "dkv" and groups <= FEW_HEADS and tile.block_m > 32:
        tile = Tile(32, tile.block_n, tile.num_warps, tile.num_stages)
    return for_groups(kernel, groups, tile)


def wide(*tensors: Tensor) -> bool:
    """Whether an offset into one of the tensors needs 64 bits."""
    last = (
        sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) for t in tensors
    )
    return max(last) >= 1 << 31


def gather_tile(kernel: str, width: int, rows: int, dtype: torch.dtype) -> Tile:
    """For `kernel` "forward" or "dq" query by query, tiles of `rows` rows."""
    tables = architecture()
    tile = row(tables.gather, rows)[kernel]
    if dtype == torch.float32:
        tile = row(tables.float32, width)
    tile = chosen(f"gather.{kernel}", tile)
    stages = tile.num_stages if width <= 128 else 1
    return Tile(padded(rows), tile.block_n, tile.num_warps, stages)


def boxes(t: Tensor, rows: int) -> TensorDescriptor | None:
    """A descriptor of t [B N K D] by which the tensor memory accelerator reads `rows` positions of
    one head; None where there is none or it cannot."""
    if t.is_cuda and capability(t.device.index) < (9, 0):
        return None
    size = t.element_size()
    aligned = t.data_ptr() % 16 == 0 and all(n > 0 and n * size % 16 == 0 for n in t.stride()[:3])
    if t.stride(-1) != 1 or not aligned or 0 in t.shape:
        return None
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [1, rows, 1, padded(t.shape[-1])])


def pair_tile(kernel: str, width: int, groups: int, dtype: torch.dtype) -> Tile:
    """For `kernel` "forward", "dq" or "dkv" block by block."""
    tables = architecture()
    tile = row(tables.pairs, width)[kernel]
    if dtype == torch.float32:
        tile = row(tables.float32, width)
    return for_groups(f"pairs.{kernel}", groups, tile)


def holds_block(s: int, k: Tensor, v: Tensor) -> bool:
    """Whether a tile of `pairs` can hold a block of s keys and their values."""
    width = padded(k.shape[-1]) + padded(v.shape[-1])
    return padded(s) * width * k.element_size() <= architecture().block_bytes


def query_splits(programs: int, tiles: int) -> int:
    """Into how many shares the queries of a block of keys are cut, where few blocks of keys are
    seen by many queries."""
    return max(1, min(ENOUGH_PROGRAMS // max(1, programs), tiles // 8))


# what a launch is told


@dataclass(frozen=True)
class Place:
    """Which keys each query sees, and where queries stand: at `start`, or at `starts` [B]."""

    kind: int
    reach: int = 0
    stride: int = 1
    floor: int = 0
    start: int = 0
    starts: Tensor | None = None
    causal_prefix: bool = False

    @property
    def wide(self) -> bool:
        """Whether queries see more keys than lie near them."""
        return self.kind in (BEHIND.value, EVERYTHING.value) or self.reach == ALWAYS


def strides(name: str, t: Tensor | None, axes: str) -> dict[str, int]:
    sizes = (0,) * len(axes) if t is None else t.stride()[: len(axes)]
    return {f"{name}_{axis}": size for axis, size in zip(axes, sizes, strict=True)}


@dataclass(frozen=True)
class Cotangent:
    """What the backward of one branch starts from: `d_out` [B T H E], the rows' log-sum-exp and
    `delta`, what each row's dp is measured from, [B T H] in float32; all contiguous.

    With `gated` the branch's output was multiplied by a gate. Its size is in `lse` already, that
    probabilities come out gated, and its sign in the last bit of `delta`: kernels short of
    registers need not hold a third number a row."""

    d_out: Tensor
    lse: Tensor
    delta: Tensor
    gated: bool = False

    def arguments(self) -> dict[str, Any]:
        return dict(
            d_out=self.d_out,
            lse=self.lse,
            delta=self.delta,
            GATED=self.gated,
        )


@dataclass(frozen=True)
class Selection:
    """What a query attends to: its list of blocks of `s` keys [B T R n], the first `num_initial`
    blocks and, causally, the `num_local` that end with its own. Tokens of an aligned group of
    `stride` have the same list. Queries stand at `start`, or at `starts` [B]."""

    lists: Tensor
    s: int
    num_initial: int
    num_local: int
    causal: bool
    start: int = 0
    starts: Tensor | None = None
    gates: Tensor | None = None
    stride: int = 1

    @property
    def diagonal(self) -> bool:
        """Whether a list may hold its query's own block, of which it sees the keys up to itself."""
        return self.causal and self.num_local == 0


def empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Unwritten out [B T H E] and lse [B T H]."""
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)


# the ranking


@dataclass(frozen=True)
class RankingTile:
    """BLOCK_M rows of queries against BLOCK_N blocks a step, whose n best are kept in `columns`
    lists of `depth` blocks, or merged where `columns` is 0. Where lists lose a block, the tile is
    done again by merging, `merge_n` blocks a step."""

    block_m: int
    block_n: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    merge_n: int = 32


# not measured: chosen so that no registers spill, compiled for an H100. With 8 lists of 8, one
# tile in 60 of random scores loses one of the 16 best, and one in 370 one of the 13 best. A row of
# a tile's scores should lie in one warp, which 16 rows a warp achieve
LOGITS_TILES = {128: RankingTile(64, 64, 8, 8, 4, 2), 256: RankingTile(64, 32, 8, 8, 4, 2)}
INTERPOLATED_TILES = {128: RankingTile(64, 32, 8, 8, 4, 2), 256: RankingTile(64, 32, 0, 0, 8, 2)}
# by the heads of a group: many of them leave a tile few tokens, whose scores are spread over more
# lists
PROBS_TILES = {
    2: RankingTile(64, 64, 8, 8, 4, 2),
    8: RankingTile(64, 32, 8, 8, 4, 3),
    64: RankingTile(64, 32, 32, 4, 4, 3),
}
PROBS_FLOAT32 = RankingTile(32, 32, 0, 0, 8, 1)
# lists are too short for more
MOST_IN_LISTS = 16


# other architectures; not measured, chosen to fit and to spill little


@dataclass(frozen=True)
class Architecture:
    """Tables of tiles: by width, by rows of a tile (gather), by heads of a group (probs)."""

    intervals: dict[int, dict[str, Tile]]
    gather: dict[int, dict[str, Tile]]
    pairs: dict[int, dict[str, Tile]]
    float32: dict[int, Tile]
    block_bytes: int  # of keys and values, of a block that tiles of `pairs` can hold
    logits: dict[int, RankingTile]
    interpolated: dict[int, RankingTile]
    probs: dict[int, RankingTile]


def in_one_stage(table: dict[int, Any]) -> dict[int, Any]:
    """A table whose tiles wait for their keys, for less shared memory."""
    return {
        limit: {kernel: replace(tile, num_stages=1) for kernel, tile in found.items()}
        if isinstance(found, dict)
        else replace(found, num_stages=1)
        for limit, found in table.items()
    }


RANKING = (LOGITS_TILES, INTERPOLATED_TILES, PROBS_TILES)
HOPPER = Architecture(TILES, GATHER, PAIRS, FLOAT32, 128 * 1024, *RANKING)

# an A100 holds 163 KB
AMPERE = Architecture(
    {
        128: {
            "forward": Tile(128, 64, 8, 2),
            "window": Tile(64, 64, 8, 2),
            "dq": Tile(64, 64, 8, 2),
            "dkv": Tile(64, 64, 8, 2),
        },
        256: dict.fromkeys(TILES[256], Tile(32, 64, 8, 1)),
    },
    GATHER,
    {
        128: dict.fromkeys(PAIRS[128], Tile(64, 64, 8, 2)),
        256: dict.fromkeys(PAIRS[256], Tile(32, 64, 8, 1)),
    },
    FLOAT32,
    64 * 1024,
    *RANKING,
)

# what holds least and runs bfloat16, an Ampere or Ada of the desktop, has 99 KB
SMALL = {128: Tile(64, 64, 8, 1), 256: Tile(32, 32, 4, 1)}
ELSEWHERE = Architecture(
    {width: dict.fromkeys(TILES[width], tile) for width, tile in SMALL.items()},
    in_one_stage(GATHER),
    {width: dict.fromkeys(PAIRS[width], tile) for width, tile in SMALL.items()},
    {128: Tile(32, 32, 4, 1), 256: Tile(16, 16, 4, 1)},
    32 * 1024,
    *(in_one_stage(table) for table in RANKING),
)

# by compute capability
ARCHITECTURES = {(9, 0): HOPPER, (8, 0): AMPERE, (8, 7): AMPERE}


def ranking_tile(
    rule: str, width: int, groups: int, n: int, dtype: torch.dtype, interpolated: bool = False
) -> RankingTile:
    """For heads of `width`, `groups` of which rank together, and the n best."""
    tables = architecture()
    if rule == "probs":
        tile = PROBS_FLOAT32 if dtype == torch.float32 else row(tables.probs, groups)
    else:
        tile = row(tables.interpolated if interpolated else tables.logits, width)
    tile = override.get(f"ranking.{rule}", tile)
    if rule == "probs":
        # a tile holds at least one token with all heads of its group
        tile = replace(tile, block_m=max(tile.block_m, triton.next_power_of_2(groups)))
    if n > MOST_IN_LISTS or tile.columns == 0:
        block_n = max(32, triton.next_power_of_2(n))
        return replace(tile, block_n=block_n, columns=0, depth=0, num_warps=8)
    return replace(tile, depth=min(tile.depth, n))
