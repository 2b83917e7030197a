"""Tile sizes and launch parameters, as data: a function of the problem, not tuned at a first call.

Those of width 128 are the best of the four or five tried on an H200, bf16, at 65536 tokens and 16
query heads a KV head; the others are safe, not measured.
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

LOG2_E = 1.4426950408889634

# a reach past every sequence
ALWAYS = 1 << 30

# what the tiles of a Hopper need
ENOUGH_SHARED_MEMORY = 200 * 1024

# programs that keep a large GPU busy through the tail of a launch
ENOUGH_PROGRAMS = 1024


@dataclass(frozen=True)
class Tile:
    """BLOCK_M rows of queries (tokens x heads) against BLOCK_N keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# by kernel; "window." where queries see few keys, "prefix." where there are few keys
TILES = {
    128: {
        "forward": Tile(128, 128, 8, 3),
        "window.forward": Tile(64, 64, 4, 3),
        "dq": Tile(128, 64, 8, 3),
        "window.dq": Tile(64, 64, 4, 2),
        "dkv": Tile(64, 128, 8, 3),
        "window.dkv": Tile(64, 128, 8, 3),
        "prefix.dkv": Tile(64, 64, 4, 2),
    },
    256: {
        "forward": Tile(64, 64, 8, 2),
        "window.forward": Tile(64, 64, 8, 2),
        "dq": Tile(64, 32, 8, 2),
        "window.dq": Tile(64, 32, 8, 2),
        "dkv": Tile(64, 32, 8, 2),
        "window.dkv": Tile(64, 32, 8, 2),
        "prefix.dkv": Tile(64, 32, 8, 2),
    },
}
# dk and dv of few query heads a KV head
FEW_HEADS_TILES = {
    "dkv": Tile(32, 128, 8, 3),
    "window.dkv": Tile(32, 64, 4, 3),
    "prefix.dkv": Tile(32, 64, 4, 2),
}
FLOAT32 = Tile(32, 32, 4, 1)

# the selected branch query by query: by rows of a tile (those of the tokens that share a list)
GATHER = {
    16: {"forward": Tile(16, 64, 1, 2), "dq": Tile(16, 64, 2, 3)},
    32: {"forward": Tile(32, 64, 2, 3), "dq": Tile(32, 64, 2, 2)},
    64: {"forward": Tile(64, 64, 4, 3), "dq": Tile(64, 64, 4, 2)},
    128: {"forward": Tile(128, 64, 8, 2), "dq": Tile(128, 64, 8, 2)},
}
GATHER_ROWS = 128


@dataclass(frozen=True)
class Unite:
    """As many lists of neighbouring tokens are walked as one where they are alike: where `cost` x
    the blocks of their union are fewer than those of the lists. Not tried on fewer groups than
    `least`."""

    lists: int
    cost: float
    least: int = ENOUGH_PROGRAMS


# by rows of a list's tile. `cost` is the time of a tile of lists x rows rows over one block, in
# that which one list takes a block: query by query, or under FEW_ROWS rows block by block. That of
# 16 rows is of an untuned kernel, the others are estimates
UNITE = {4: Unite(16, 3.6), 8: Unite(8, 1.8), 16: Unite(4, 1.6), 32: Unite(2, 1.2)}

# and block by block
PAIRS = {
    128: {"forward": Tile(64, 64, 4, 2), "backward": Tile(32, 64, 4, 3)},
    256: {"forward": Tile(64, 64, 8, 2), "backward": Tile(32, 64, 8, 1)},
}

# tiles that stand in for those of this module, by kernel: "dq", "gather.dq", "ranking.probs"
override: dict[str, Any] = {}

# rows that a program of the selected branch, block by block, works through at most
ITEM_ROWS = 16384

# keys that are few: a prefix, of memory or of the initial block
FEW_KEYS = 64

# query heads a KV head up to which dk and dv are better formed of few rows at a time
FEW_HEADS = 8

# memory for the parts of the selected branch, over that of q, by query heads a KV head: where keys
# are as many as queries their gradients take most; and tokens whose parts are kept anyhow
PARTS = {1: 1, 64: 3}
FEW_TOKENS = 2048

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


def padded(width: int) -> int:
    """The power of two, at least 16, that a tile of `width` takes."""
    return max(16, triton.next_power_of_2(width))


@functools.cache
def shared_memory(device: int) -> int:
    """Bytes that a program may hold on a GPU."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def is_small() -> bool:
    """Whether this GPU holds too little for the tiles of a Hopper: an Ampere or Ada of the desktop
    has 99 KB."""
    return torch.cuda.is_available() and (
        shared_memory(torch.cuda.current_device()) < ENOUGH_SHARED_MEMORY
    )


def fitting(tile: Tile, width: int) -> Tile:
    """A tile that a small GPU holds too; not measured there."""
    if not is_small():
        return tile
    most = 64 if width <= 128 else 32
    return Tile(min(tile.block_m, most), min(tile.block_n, most), 4, 1)


def interval_tile(kernel: str, wide: bool, width: int, groups: int, dtype: torch.dtype) -> Tile:
    """For `kernel` "forward", "dq" or "dkv", heads of `width` (the wider of keys and values) and
    queries that see many keys (`wide`) or a window of them."""
    if not wide and "." not in kernel:
        kernel = f"window.{kernel}"
    bucket = next(limit for limit in TILES if width <= limit)
    tile = FLOAT32 if dtype == torch.float32 else TILES[bucket][kernel]
    if kernel in FEW_HEADS_TILES and groups <= FEW_HEADS and bucket == 128 and tile != FLOAT32:
        tile = FEW_HEADS_TILES[kernel]
    tile = override.get(kernel, fitting(tile, width))
    # a tile holds at least one token with all heads of its group
    block_m = max(tile.block_m, triton.next_power_of_2(groups))
    return Tile(block_m, tile.block_n, tile.num_warps, tile.num_stages)


def wide(*tensors: Tensor) -> bool:
    """Whether an offset into one of the tensors needs 64 bits."""
    last = (
        sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) for t in tensors
    )
    return max(last) >= 1 << 31


def gather_tile(kernel: str, width: int, rows: int, dtype: torch.dtype) -> Tile:
    """For `kernel` "forward" or "dq" query by query, tiles of `rows` rows."""
    tile = override.get(f"gather.{kernel}", GATHER[padded(rows)][kernel])
    if dtype == torch.float32:
        return Tile(padded(rows), 32, 4, 1)
    stages = tile.num_stages if width <= 128 and not is_small() else 1
    return Tile(padded(rows), tile.block_n, tile.num_warps, stages)


def uniting(rows: int, dtype: torch.dtype) -> Unite | None:
    """Whether and how lists are united whose tiles have `rows` rows. Not in float32, whose products
    take longer than reading."""
    rule = None if dtype == torch.float32 else UNITE.get(triton.next_power_of_2(rows))
    rule = override.get("unite", rule)
    return rule if rule and rule.lists * rows <= GATHER_ROWS else None


def tiles_a_program(groups: int, lists: int) -> int:
    """Tiles that a program walks where whole groups of lists may be left out: many programs that do
    nothing take time too."""
    return min(lists, 2) if groups >= 8 * ENOUGH_PROGRAMS else 1


def boxes(t: Tensor, rows: int) -> TensorDescriptor | None:
    """A descriptor of t [B N K D] by which the tensor memory accelerator reads `rows` positions of
    one head; None where there is none or it cannot."""
    if t.is_cuda and torch.cuda.get_device_capability(t.device) < (9, 0):
        return None
    size = t.element_size()
    aligned = t.data_ptr() % 16 == 0 and all(n > 0 and n * size % 16 == 0 for n in t.stride()[:3])
    if t.stride(-1) != 1 or not aligned or 0 in t.shape:
        return None
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [1, rows, 1, padded(t.shape[-1])])


def pair_tile(kernel: str, width: int, groups: int, dtype: torch.dtype) -> Tile:
    """For `kernel` "forward" or "backward" block by block."""
    bucket = next(limit for limit in PAIRS if width <= limit)
    tile = FLOAT32 if dtype == torch.float32 else PAIRS[bucket][kernel]
    tile = override.get(f"pairs.{kernel}", fitting(tile, width))
    block_m = max(tile.block_m, triton.next_power_of_2(groups))
    return Tile(block_m, tile.block_n, tile.num_warps, tile.num_stages)


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
    def aligned(self) -> int:
        """Tokens, from where an aligned group begins (with `starts`, at most)."""
        before = self.start % self.stride if self.starts is None else self.stride - 1
        return self.lists.shape[1] + before

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


# not measured: chosen so that no registers spill, compiled for an H100. With 8 lists of 8, one
# tile in 60 of random scores loses one of the 16 best, and one in 370 one of the 13 best. A row of
# a tile's scores should lie in one warp, which 16 rows a warp achieve
LOGITS_TILES = {128: RankingTile(64, 64, 8, 8, 4, 2), 256: RankingTile(64, 32, 8, 8, 4, 2)}
INTERPOLATED_TILES = {128: RankingTile(64, 32, 8, 8, 4, 2), 256: RankingTile(64, 32, 0, 0, 8, 2)}
# by the heads of a group: many of them leave a tile few tokens, whose scores are spread over more
# lists
PROBS_TILES = {
    2: RankingTile(64, 64, 8, 8, 4, 2, 64),
    8: RankingTile(64, 128, 32, 4, 4, 2, 64),
    64: RankingTile(128, 128, 32, 4, 4, 2, 64),
}
# of wide heads, and for GPUs that hold less
NARROW_PROBS_TILES = {
    2: RankingTile(64, 64, 8, 8, 8, 2, 64),
    64: RankingTile(64, 64, 32, 4, 4, 2, 64),
}
PROBS_FLOAT32 = RankingTile(32, 32, 0, 0, 8, 1)
# lists are too short for more
MOST_IN_LISTS = 16


def ranking_tile(
    rule: str, width: int, groups: int, n: int, dtype: torch.dtype, interpolated: bool = False
) -> RankingTile:
    """For heads of `width`, `groups` of which rank together, and the n best."""
    size, tiles = width, INTERPOLATED_TILES if interpolated else LOGITS_TILES
    if rule == "probs":
        narrow = width > 128 or is_small()
        size, tiles = groups, NARROW_PROBS_TILES if narrow else PROBS_TILES
    tile = next(tile for limit, tile in tiles.items() if size <= limit)
    if rule == "probs" and dtype == torch.float32:
        tile = PROBS_FLOAT32
    if is_small():
        tile = replace(tile, num_stages=1)
    tile = override.get(f"ranking.{rule}", tile)
    if rule == "probs":
        # a tile holds at least one token with all heads of its group
        tile = replace(tile, block_m=max(tile.block_m, triton.next_power_of_2(groups)))
    if n > MOST_IN_LISTS or tile.columns == 0:
        block_n = max(tile.merge_n, triton.next_power_of_2(n))
        return replace(tile, block_n=block_n, columns=0, depth=0, num_warps=8)
    return replace(tile, depth=min(tile.depth, n))
