"""Tile sizes and launch parameters, as data: a function of the problem, not tuned at a first call.

Those of width 128 are the best of the four or five tried on an H200, bf16, at 65536 tokens and 16
query heads a KV head; the others are safe, not measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from .device import BEHIND, EVERYTHING

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


# by kernel; "forward" of a window, whose queries see few keys, apart
TILES = {
    128: {
        "forward": Tile(128, 128, 8, 2),
        "window": Tile(64, 64, 4, 3),
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
FLOAT32 = Tile(32, 32, 4, 1)

# the selected branch query by query (block_m bounds the rows, they follow from the group), and
# block by block
GATHER = {
    128: {"forward": Tile(128, 64, 4, 3), "dq": Tile(128, 64, 4, 2)},
    256: {"forward": Tile(64, 64, 4, 2), "dq": Tile(64, 64, 8, 1)},
}
PAIRS = {
    128: {"forward": Tile(128, 64, 4, 3), "dkv": Tile(64, 64, 4, 2)},
    256: {"forward": Tile(64, 64, 8, 2), "dkv": Tile(32, 64, 8, 1)},
}

# tiles that stand in for all of the above, by kernel: "dq", "gather.dq", "pairs.dkv"
override: dict[str, Tile] = {}

# rows that a program of the selected branch, block by block, works through at most
ITEM_ROWS = 16384

# tokens up to which the parts of the selected branch are kept at once
FEW_TOKENS = 4096

# rows of a query-by-query tile under which block by block is faster
FEW_ROWS = 9


@contextmanager
def using(tiles: dict[str, Tile]) -> Iterator[None]:
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


def interval_tile(kernel: str, wide: bool, width: int, groups: int, dtype: torch.dtype) -> Tile:
    """For `kernel` "forward", "dq" or "dkv", heads of `width` (the wider of keys and values) and
    queries that see many keys (`wide`) or a window of them."""
    if kernel == "forward" and not wide:
        kernel = "window"
    bucket = next(limit for limit in TILES if width <= limit)
    tile = FLOAT32 if dtype == torch.float32 else TILES[bucket][kernel]
    tile = override.get(kernel, tile)
    # a tile holds at least one token with all heads of its group
    block_m = max(tile.block_m, triton.next_power_of_2(groups))
    return Tile(block_m, tile.block_n, tile.num_warps, tile.num_stages)


def gather_tile(kernel: str, width: int, groups: int, dtype: torch.dtype) -> Tile:
    """For `kernel` "forward" or "dq" query by query, lists that serve `groups` heads."""
    bucket = next(limit for limit in GATHER if width <= limit)
    tile = Tile(32, 32, 4, 1) if dtype == torch.float32 else GATHER[bucket][kernel]
    tile = override.get(f"gather.{kernel}", tile)
    return Tile(max(tile.block_m, groups), tile.block_n, tile.num_warps, tile.num_stages)


def pair_tile(kernel: str, width: int, groups: int, dtype: torch.dtype) -> Tile:
    """For `kernel` "forward" or "dkv" block by block."""
    bucket = next(limit for limit in PAIRS if width <= limit)
    tile = FLOAT32 if dtype == torch.float32 else PAIRS[bucket][kernel]
    tile = override.get(f"pairs.{kernel}", tile)
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
    """What a backward starts from, of one branch: `d_out` [B T H E] contiguous, times the branch's
    gate [B T H] if there is one, the rows' `lse`, and `delta`, what each row's dp is measured
    from."""

    d_out: Tensor
    lse: Tensor
    delta: Tensor
    gate: Tensor | None = None

    def arguments(self) -> dict[str, Any]:
        return dict(
            d_out=self.d_out,
            lse=self.lse,
            delta=self.delta,
            gate=self.gate,
            GATED=self.gate is not None,
            **strides("gate", self.gate, "bth"),
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

    def narrow(self, first: int, length: int) -> Selection:
        """That of `length` tokens from `first` on, to be read entry by entry."""
        end = first + length
        gates = None if self.gates is None else self.gates[:, first:end].contiguous()
        return replace(self, lists=self.lists[:, first:end].contiguous(), gates=gates)


def empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Unwritten out [B T H E] and lse [B T H]."""
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)
