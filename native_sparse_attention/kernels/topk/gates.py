"""Steps of the kernels of the gates' backward (`gates_bwd.py`), and arguments of their launches.

A row is a query of a group's leader, or the mean of several of its queries. A key is a window, a
memory slot or a selection block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...varlen import Documents
from ..common import launch
from ..common.counts import cdiv, next_power_of_2
from ..common.launch import strides
from ..common.primitives import (
    candidates_end,
    candidates_in_document,
    in_document,
    leaders,
    load_rows,
)
from ..common.tile_configs import ELSEWHERE, TileConfig
from .block_keys import block_keys, mean_queries

# kinds of keys: windows behind the query, memory slots, candidate blocks. If interpolated and
# causal, the candidates with a second key for this query are EDGES
WINDOWS_BEHIND, MEMORY, BLOCKS, EDGES = (tl.constexpr(i) for i in range(4))
NOTHING = tl.constexpr(-1)


@triton.jit
def seen_keys(position, token, real, N, T, firsts, lasts, d: tl.constexpr, s: tl.constexpr,
              INITIAL: tl.constexpr, LOCAL: tl.constexpr, CAUSAL: tl.constexpr,
              HAS_EDGES: tl.constexpr, KIND: tl.constexpr, DOCUMENTS: tl.constexpr):  # fmt: skip
    """The first of N keys that each row sees, and one past the last. With HAS_EDGES, BLOCKS end
    where EDGES begin."""
    lo = position * 0
    hi = lo + N
    if KIND == WINDOWS_BEHIND and CAUSAL:
        hi = tl.minimum(hi, position // d)
    if KIND == WINDOWS_BEHIND and DOCUMENTS:
        lo, hi = in_document(lo, hi, token, T, firsts, lasts, d)
    if KIND >= BLOCKS:
        lo += INITIAL
        hi = candidates_end(position, N, LOCAL, d, s, CAUSAL)
        if DOCUMENTS:
            lo, hi = candidates_in_document(hi, token, T, firsts, lasts, s, INITIAL)
        if HAS_EDGES:
            # the first block whose last window is the last that the query sees
            PER_BLOCK: tl.constexpr = s // d if s > d else 1
            PER_WINDOW: tl.constexpr = d // s if d > s else 1
            edge = (tl.cdiv(position // d, PER_BLOCK) - 1) * PER_WINDOW
            lo = tl.maximum(lo, edge) if KIND == EDGES else lo
            hi = tl.minimum(hi, edge) if KIND == BLOCKS else hi
    return tl.where(real, lo, N), tl.where(real, hi, 0)


@triton.jit
def seeing_groups(n, last, first_token, d: tl.constexpr, s: tl.constexpr, LOCAL: tl.constexpr,
                  STRIDE: tl.constexpr, CAUSAL: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """A group at or before the first that sees key n or a later key, and one past the last that
    sees key `last` or an earlier key."""
    first = n * 0
    end = last * 0 + 0x7FFFFFFF
    PER_WINDOW: tl.constexpr = d // s if d > s else 1
    if KIND == WINDOWS_BEHIND and CAUSAL:
        first = (n + 1) * d
    if KIND >= BLOCKS and CAUSAL:
        WIDER: tl.constexpr = d if d > s else s
        first = tl.maximum((n + LOCAL) * s, (n // PER_WINDOW + 1) * WIDER)
        if KIND == EDGES:
            after = (last // PER_WINDOW + 2) * d if d > s else (last + 1) * s + d
            end = tl.cdiv(after, STRIDE) - first_token // STRIDE
    return tl.maximum(first // STRIDE - first_token // STRIDE, 0), end


@triton.jit
def slot_grads(chosen, grads, slot0, index, unit, first, GROUPS, slots, STEP: tl.constexpr):
    """Gradients [TOKENS, UNITS] of the gates of units, summed over STEP slots from `first` on."""
    slot = first + tl.arange(0, STEP)
    at = (slot0 + slot)[:, None] * GROUPS + index[None]
    there = (slot < slots)[:, None] & (index < GROUPS)[None]
    c = tl.load(chosen + at, mask=there, other=-1)
    g = tl.load(grads + at, mask=there, other=0.0)
    return tl.sum(tl.where(c[:, :, None] == unit[None, None], g[:, :, None], 0.0), 0)


@triton.jit
def gate_grads(
    chosen, grads, slot0, index, n0, GROUPS, slots, BLOCK_N: tl.constexpr, SLOTS: tl.constexpr,
    STEP: tl.constexpr, PER_UNIT: tl.constexpr, EXPAND: tl.constexpr, REACH: tl.constexpr,
    WINDOW: tl.constexpr, d: tl.constexpr, s: tl.constexpr,
):  # fmt: skip
    """dp [TOKENS, N] of keys from n0 on. A slot chooses a unit of PER_UNIT keys. EXPAND consecutive
    keys lie in one unit. A key overlaps its own unit and the REACH - 1 units before it."""
    TOKENS: tl.constexpr = index.shape[0]
    UNITS: tl.constexpr = BLOCK_N // EXPAND
    unit = (n0 + tl.arange(0, UNITS) * EXPAND) // PER_UNIT
    end = ((n0 + tl.arange(0, BLOCK_N)) % PER_UNIT + 1) * d
    dp = tl.zeros([TOKENS, BLOCK_N], tl.float32)
    for back in tl.static_range(REACH):
        # [TOKENS, UNITS]
        grad = tl.zeros([TOKENS, UNITS], tl.float32)
        for first in range(0, SLOTS, STEP):
            grad += slot_grads(chosen, grads, slot0, index, unit - back, first, GROUPS, slots, STEP)
        if EXPAND > 1:
            grad = tl.broadcast_to(grad[:, :, None], [TOKENS, UNITS, EXPAND])
            grad = tl.reshape(grad, [TOKENS, BLOCK_N])
        if WINDOW > 0:
            overlap = tl.minimum(end, (1 - back) * s) - tl.maximum(end - WINDOW, -back * s)
            grad *= tl.maximum(overlap, 0).to(tl.float32)[None]
        dp += grad
    return dp


@triton.jit
def repeat_heads(x, HEADS: tl.constexpr):
    """Rows [TOKENS, N] repeated for each head: [TOKENS * HEADS, N]."""
    if HEADS > 1:
        TOKENS: tl.constexpr = x.shape[0]
        N: tl.constexpr = x.shape[1]
        x = tl.broadcast_to(x[:, None], [TOKENS, HEADS, N])
        x = tl.reshape(x, [TOKENS * HEADS, N])
    return x


@triton.jit
def row_tile(tile, r, first_token, T, G: tl.constexpr, HEADS: tl.constexpr, STRIDE: tl.constexpr,
             BLOCK_M: tl.constexpr):  # fmt: skip
    """Group of each row of a tile, its leader's position and token, head, and whether it exists."""
    row = tl.arange(0, BLOCK_M)
    index = tile * (BLOCK_M // HEADS) + row // HEADS
    position, token, real = leaders(index, first_token, T, STRIDE)
    return index, position, token, r * G + row % HEADS, real & (row % HEADS < G)


@triton.jit
def load_terms(base, offsets, D: tl.constexpr, BLOCK_D: tl.constexpr, mask, TERMS: tl.constexpr):
    """Rows [M, D] as a sum of terms. With TERMS = 1 the second result is unused."""
    high = load_rows(base, offsets, D, BLOCK_D, mask)
    low = high
    if TERMS == 2:
        low = load_rows(base + D, offsets, D, BLOCK_D, mask)
    return high, low


@triton.jit
def to_terms(x, like, TERMS: tl.constexpr):
    """x as a sum of terms of the dtype of `like`."""
    high = x.to(like.dtype)
    low = high
    if TERMS == 2:
        low = (x - high.to(tl.float32)).to(like.dtype)
    return high, low


@triton.jit
def dot_terms(a, a_low, b, b_low, TERMS: tl.constexpr):
    """The product of two sums of terms, in float32, without the product of the low terms."""
    x = tl.dot(a, b, input_precision="ieee")
    if TERMS == 2:
        x = tl.dot(a, b_low, tl.dot(a_low, b, x))
    return x


# launches

# tokens x units of keys x slots that are compared at a time
MAX_COMPARED = 4096

# not measured: chosen so that few registers spill, compiled for an H100
GATES_TILES = {
    "probs": {
        128: {"dq": TileConfig(128, 64, 8, 2), "dk": TileConfig(64, 128, 8, 2)},
        256: {"dq": TileConfig(64, 32, 8, 2), "dk": TileConfig(64, 32, 8, 2)},
    },
    "logits": {
        128: {"dq": TileConfig(64, 32, 4, 2), "dk": TileConfig(64, 32, 4, 2)},
        256: {"dq": TileConfig(32, 64, 8, 1), "dk": TileConfig(64, 32, 8, 1)},
    },
}
GATES_FLOAT32 = {64: TileConfig(32, 32, 8, 1), 256: TileConfig(16, 16, 8, 1)}


def gates_tile(kernel: str, rule: str, width: int, groups: int, dtype: torch.dtype) -> TileConfig:
    """The tile config of `kernel` "dq" or "dk": `groups` rows per token, keys of `dtype`."""
    tile = next(tiles[kernel] for limit, tiles in GATES_TILES[rule].items() if width <= limit)
    if dtype == torch.float32:
        tile = next(tile for limit, tile in GATES_FLOAT32.items() if width <= limit)
    if launch.architecture() is ELSEWHERE:
        most = 64 if width <= 128 else 32
        tile = TileConfig(min(tile.block_m, most), min(tile.block_n, most), 4, 1)
    tile = launch.override.get(f"gates.{kernel}", tile)
    return replace(tile, block_m=max(tile.block_m, next_power_of_2(groups)))


@dataclass(frozen=True)
class TopkSettings:
    """Settings of a top-n ranking, in the order of `ops.selection`. The first query's position is
    `start`, or `starts` [B]."""

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
    soft_cap: float | None = None  # of `probs`
    sinks: Tensor | None = None  # [H], of `probs`

    def groups(self, T: int) -> int:
        """Groups of tokens with one ranking that T tokens may span, at most."""
        return cdiv(T + self.stride - 1, self.stride)


@dataclass(frozen=True)
class Problem:
    """Inputs of the gates' backward: rows [B T H D], keys [B N K D] of a `kind`, and optionally
    `other` keys. `heads` rows rank together; a row is the mean of `mean` queries."""

    settings: TopkSettings
    rows: Tensor
    heads: int
    mean: int
    keys: Tensor
    kind: int
    other: Tensor | None
    other_kind: int
    terms: int = 1

    @property
    def scale(self) -> float:
        """Scale of the logits; block keys include it."""
        return 1.0 if self.settings.importance == "logits" else self.settings.scale

    def arguments(self, keys: Tensor, tile: TileConfig) -> dict[str, Any]:
        """Arguments of both kernels, for `keys` (the problem's keys or its other keys)."""
        settings, rows = self.settings, self.rows
        B, T, H, D = *rows.shape[:3], rows.shape[3] // self.terms
        logits = settings.importance == "logits"
        ranks, slots = H // self.heads, next_power_of_2(settings.num_selected)
        heads = next_power_of_2(self.heads)
        own_unit = logits or settings.d > settings.s  # each key is a unit of its own
        per_unit = 1 if own_unit else settings.s // settings.d
        expand = min(per_unit & -per_unit, tile.block_n)
        # of dq and of the gates, for each row
        most = max(self.mean * D, settings.num_selected)
        return dict(
            q=rows,
            k=keys,
            **strides("q", rows, "bth"),
            **strides("k", keys, "bnh"),
            starts=settings.starts,
            first_token=settings.start,
            T=T,
            N=keys.shape[1],
            GROUPS=settings.groups(T),
            RANKS=ranks,
            slots=settings.num_selected,
            scale_log2=self.scale * launch.LOG2_E,
            G=self.heads,
            HEADS=heads,
            RANKS_PER_KV=ranks // keys.shape[2],
            D=D,
            BLOCK_D=launch.padded(D),
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            SLOTS=slots,
            STEP=max(
                1, min(slots, MAX_COMPARED // (tile.block_m // heads * tile.block_n // expand))
            ),
            PER_UNIT=per_unit,
            EXPAND=expand,
            REACH=1 if own_unit else 1 + cdiv(settings.l - settings.d, settings.s),
            WINDOW=0 if own_unit else settings.l,
            d=settings.d,
            s=settings.s,
            INITIAL=settings.num_initial,
            LOCAL=max(settings.num_local, 1),
            STRIDE=settings.stride,
            CAUSAL=settings.causal,
            RAGGED=settings.starts is not None,
            **launch.bounds(settings.documents),
            **launch.cap(None if logits else settings.soft_cap),
            WIDE=launch.wide(rows, keys) or B * T * H * most >= 1 << 31,
            TERMS=self.terms,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

    def tile(self, kernel: str) -> TileConfig:
        width = self.rows.shape[-1] // self.terms
        rule, dtype = self.settings.importance, self.keys.dtype
        return gates_tile(kernel, rule, width, self.heads, dtype)


def gates_problem(q: Tensor, ck: Tensor, mem_k: Tensor | None, settings: TopkSettings) -> Problem:
    mean = q.shape[2] // ck.shape[2] if settings.shared else 1
    if settings.importance == "probs":
        other = None
        if mem_k is not None and mem_k.shape[1]:
            other = mem_k.transpose(0, 1).expand(len(q), -1, -1, -1)
        other_kind = NOTHING if other is None else MEMORY
        return Problem(settings, q, mean, 1, ck, WINDOWS_BEHIND.value, other, other_kind.value)
    # the mean of dot products is the dot product with the mean
    terms = 1 if q.dtype == torch.float32 else 2
    rows = mean_queries(q, q.shape[2] // mean, terms)
    keys, _ = block_keys(
        ck,
        settings.num_ranked,
        settings.d,
        settings.s,
        settings.interpolated,
        settings.scale,
        terms,
        settings.documents,
    )
    keys = keys.transpose(2, 3)
    other = keys[1] if settings.interpolated and settings.causal else None
    other_kind = NOTHING if other is None else EDGES
    return Problem(settings, rows, 1, mean, keys[0], BLOCKS.value, other, other_kind.value, terms)
