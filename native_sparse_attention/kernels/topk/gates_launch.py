"""What the kernels of the gates' backward are told: the problem, and tiles. See `gates_bwd.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...varlen import Documents
from ..common import launch
from ..common.counts import cdiv, next_power_of_2
from ..common.launch import strides
from ..common.tile_configs import ELSEWHERE, Tile
from .block_keys import block_keys, mean_queries
from .gates_steps import BLOCKS, EDGES, MEMORY, NOTHING, WINDOWS_BEHIND

# tokens x units of keys x slots that are compared at a time
ENOUGH = 4096

# not measured: chosen so that few registers spill, compiled for an H100
GATES = {
    "probs": {
        128: {"dq": Tile(128, 64, 8, 2), "dk": Tile(64, 128, 8, 2)},
        256: {"dq": Tile(64, 32, 8, 2), "dk": Tile(64, 32, 8, 2)},
    },
    "logits": {
        128: {"dq": Tile(64, 32, 4, 2), "dk": Tile(64, 32, 4, 2)},
        256: {"dq": Tile(32, 64, 8, 1), "dk": Tile(64, 32, 8, 1)},
    },
}
GATES_FLOAT32 = {64: Tile(32, 32, 8, 1), 256: Tile(16, 16, 8, 1)}


def gates_tile(kernel: str, rule: str, width: int, groups: int, dtype: torch.dtype) -> Tile:
    """For `kernel` "dq" or "dk", rows of `groups` heads a token, keys of `dtype`."""
    tile = next(tiles[kernel] for limit, tiles in GATES[rule].items() if width <= limit)
    if dtype == torch.float32:
        tile = next(tile for limit, tile in GATES_FLOAT32.items() if width <= limit)
    if launch.architecture() is ELSEWHERE:
        most = 64 if width <= 128 else 32
        tile = Tile(min(tile.block_m, most), min(tile.block_n, most), 4, 1)
    tile = launch.override.get(f"gates.{kernel}", tile)
    return replace(tile, block_m=max(tile.block_m, next_power_of_2(groups)))


@dataclass(frozen=True)
class Ranking:
    """What is ranked, and how: the numbers of `ops.selection`, in their order. Queries stand at
    `start`, or at `starts` [B]."""

    start: int
    num_ranked: int
    num_selected: int
    l: int
    d: int
    s: int
    importance: str
    interpolated: bool
    num_initial: int
    num_local: int
    stride: int
    shared: bool
    causal: bool
    scale: float
    starts: Tensor | None = None
    documents: Documents | None = None
    soft_cap: float | None = None  # and sinks [H], of `probs`
    sinks: Tensor | None = None

    def groups(self, T: int) -> int:
        """As many groups of tokens with one ranking as T tokens may be in."""
        return cdiv(T + self.stride - 1, self.stride)


@dataclass(frozen=True)
class Problem:
    """Rows [B T H D], of which `heads` rank together and each is the mean of `mean` queries; keys
    [B N K D] of a `kind`, and those beside them."""

    ranking: Ranking
    rows: Tensor
    heads: int
    mean: int
    keys: Tensor
    kind: int
    other: Tensor | None
    beside: int
    parts: int = 1

    @property
    def scale(self) -> float:
        """Of the logits; block keys have it in them."""
        return 1.0 if self.ranking.importance == "logits" else self.ranking.scale

    def arguments(self, keys: Tensor, tile: Tile) -> dict[str, Any]:
        """What both kernels take, of `keys` or those beside them."""
        at, rows = self.ranking, self.rows
        B, T, H, D = *rows.shape[:3], rows.shape[3] // self.parts
        logits = at.importance == "logits"
        ranks, slots = H // self.heads, next_power_of_2(at.num_selected)
        heads = next_power_of_2(self.heads)
        per_unit = 1 if logits or at.d > at.s else at.s // at.d
        expand = min(per_unit & -per_unit, tile.block_n)
        # of dq and of the gates, for each row
        most = max(self.mean * D, at.num_selected)
        return dict(
            q=rows,
            k=keys,
            **strides("q", rows, "bth"),
            **strides("k", keys, "bnh"),
            starts=at.starts,
            first_token=at.start,
            T=T,
            N=keys.shape[1],
            GROUPS=at.groups(T),
            RANKS=ranks,
            slots=at.num_selected,
            scale_log2=self.scale * launch.LOG2_E,
            G=self.heads,
            HEADS=heads,
            SHARE=ranks // keys.shape[2],
            D=D,
            BLOCK_D=launch.padded(D),
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            SLOTS=slots,
            STEP=max(1, min(slots, ENOUGH // (tile.block_m // heads * tile.block_n // expand))),
            PER_UNIT=per_unit,
            EXPAND=expand,
            REACH=1 if logits or at.d > at.s else 1 + cdiv(at.l - at.d, at.s),
            WINDOW=0 if logits or at.d > at.s else at.l,
            d=at.d,
            s=at.s,
            INITIAL=at.num_initial,
            LOCAL=max(at.num_local, 1),
            STRIDE=at.stride,
            CAUSAL=at.causal,
            RAGGED=at.starts is not None,
            **launch.bounds(at.documents),
            **launch.cap(None if logits else at.soft_cap),
            WIDE=launch.wide(rows, keys) or B * T * H * most >= 1 << 31,
            PARTS=self.parts,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

    def tile(self, kernel: str) -> Tile:
        width = self.rows.shape[-1] // self.parts
        rule, dtype = self.ranking.importance, self.keys.dtype
        return gates_tile(kernel, rule, width, self.heads, dtype)


def problem(q: Tensor, ck: Tensor, mem_k: Tensor | None, at: Ranking) -> Problem:
    mean = q.shape[2] // ck.shape[2] if at.shared else 1
    if at.importance == "probs":
        other = None
        if mem_k is not None and mem_k.shape[1]:
            other = mem_k.transpose(0, 1).expand(len(q), -1, -1, -1)
        beside = NOTHING if other is None else MEMORY
        return Problem(at, q, mean, 1, ck, WINDOWS_BEHIND.value, other, beside.value)
    # the mean of dot products is the dot product with the mean
    parts = 1 if q.dtype == torch.float32 else 2
    rows = mean_queries(q, q.shape[2] // mean, parts)
    keys, _ = block_keys(
        ck, at.num_ranked, at.d, at.s, at.interpolated, at.scale, parts, at.documents
    )
    keys = keys.transpose(2, 3)
    other = keys[1] if at.interpolated and at.causal else None
    beside = NOTHING if other is None else EDGES
    return Problem(at, rows, 1, mean, keys[0], BLOCKS.value, other, beside.value, parts)
