"""Where a cache's entries lie, and what a decoding step writes there.

A cache holds entries by row, or by page: entry n of row b is entry n % PAGE of page table[b, n //
PAGE]. A ring holds the last ones, each in its place modulo the ring's size. Lengths are read on the
device: nothing here asks it for one, and a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common.counts import next_power_of_2
from ..common.primitives import grid_position, load_rows, store_rows


@triton.jit
def pages_of(n, b, table, t_b, PAGE: tl.constexpr):
    """Where entries n of row b lie: their pages, or the row."""
    if PAGE == 0:
        page = b
    else:
        page = tl.load(table + b * t_b + n // PAGE).to(tl.int64)
    return page


@triton.jit
def offsets(n, page, by_b, by_n, PAGE: tl.constexpr):
    """Offsets in a cache of entries n of a row, which lie in these pages, or rows."""
    if PAGE > 0:
        n = n % PAGE
    return page * by_b + n.to(tl.int64) * by_n


@triton.jit
def places(n, b, table, by_b, by_n, t_b, PAGE: tl.constexpr):
    """Offsets of entries n of row b in a cache."""
    return offsets(n, pages_of(n, b, table, t_b, PAGE), by_b, by_n, PAGE)


@triton.jit(do_not_specialize=["T"])
def nsa_kv_cache_append(
    x, y, x_store, y_store, lengths, counts, table, T, K, n_b, n_h, n_t, o_b, o_h, o_t, x_b, x_h,
    x_n, y_b, y_h, y_n, t_b,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
    EVERY: tl.constexpr, RING: tl.constexpr, PAGE: tl.constexpr, COUNTED: tl.constexpr,
    FLIPPED: tl.constexpr,
):  # fmt: skip
    """One program: one new entry of each of two streams, of a row and head, to its place; an entry
    stands for EVERY tokens, and is there once the row has them all."""
    i, line, _each, _lines = grid_position(FLIPPED)
    b, h = (line // K).to(tl.int64), (line % K).to(tl.int64)
    length, count = tl.load(lengths + b), T
    if COUNTED:
        count = tl.load(counts + b)
    n = length // EVERY + i
    if (n + 1) * EVERY <= length + count:
        if RING > 0:
            n = n % RING
        at, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
        value = tl.load(x + b * n_b + h * n_h + i * n_t + at, mask=at < D)
        tl.store(
            x_store + h * x_h + places(n, b, table, x_b, x_n, t_b, PAGE) + at, value, mask=at < D
        )
        value = tl.load(y + b * o_b + h * o_h + i * o_t + e, mask=e < E)
        tl.store(
            y_store + h * y_h + places(n, b, table, y_b, y_n, t_b, PAGE) + e, value, mask=e < E
        )


@triton.jit(do_not_specialize=["T"])
def nsa_kv_cache_recent(
    x, y, lengths, x_out, y_out, T, K, x_b, x_h, x_n, y_b, y_h, y_n,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
    l: tl.constexpr, BLOCK_L: tl.constexpr, d: tl.constexpr, RING: tl.constexpr,
    FLIPPED: tl.constexpr,
):  # fmt: skip
    """One program: the raw keys and values of the i-th window that T new tokens may complete, of a
    row and head, out of their rings; zeros stand for tokens before the first and past the last."""
    i, line, each, _lines = grid_position(FLIPPED)
    b, h = (line // K).to(tl.int64), (line % K).to(tl.int64)
    length = tl.load(lengths + b)
    u = tl.arange(0, BLOCK_L)
    token = (length // d + i + 1) * d - l + u
    there = (u < l) & (token >= 0) & (token < length + T)
    slot = (tl.maximum(token, 0) % RING).to(tl.int64)
    row = ((line * each + i) * l + u).to(tl.int64)
    tile = load_rows(x, b * x_b + h * x_h + slot * x_n, D, BLOCK_D, there)
    store_rows(x_out, row * D, tile, D, BLOCK_D, u < l)
    tile = load_rows(y, b * y_b + h * y_h + slot * y_n, E, BLOCK_E, there)
    store_rows(y_out, row * E, tile, E, BLOCK_E, u < l)


# launches


@dataclass(frozen=True)
class Step:
    """New tokens T of each row over what a cache holds: `lengths` [B] tokens before them; `counts`
    [B] of them are real, all where that is None. Pages of `page` tokens lie where `table` [B, n]
    says, or rows as they are."""

    lengths: Tensor
    counts: Tensor | None = None
    table: Tensor | None = None
    page: int = 0

    def pages(self, every: int = 1) -> dict[str, Any]:
        """What a kernel takes of the places of entries, each of which stands for `every` tokens."""
        if self.table is None:
            return dict(table=self.lengths, t_b=0, PAGE=0)
        return dict(table=self.table, t_b=self.table.stride(0), PAGE=self.page // every)

    def arguments(self, every: int = 1) -> dict[str, Any]:
        counted = self.counts is not None
        counts = self.counts if counted else self.lengths
        return dict(lengths=self.lengths, counts=counts, COUNTED=counted, **self.pages(every))


def widths(k: Tensor, v: Tensor) -> dict[str, int]:
    D, E = k.shape[-1], v.shape[-1]
    return dict(D=D, BLOCK_D=launch.padded(D), E=E, BLOCK_E=launch.padded(E))


def append(new: tuple[Tensor, Tensor], stores: tuple[Tensor, Tensor], step: Step, tokens: int, *,
           every: int = 1, ring: bool = False) -> None:  # fmt: skip
    """Write entries [b h n d] of two streams to their places, of those that `tokens` new tokens of
    each row may complete. A cache's rows and pages are [.. h n d]; a ring takes a token's entry at
    its position modulo the ring's size."""
    x, y = new
    B, K, n = x.shape[:3]
    if x.numel() + y.numel() == 0:
        return
    x_store, y_store = stores
    arguments = step.arguments(every)
    if ring:
        arguments |= dict(table=step.lengths, t_b=0, PAGE=0)
    grid, flipped = launch.grid(n, B * K)
    nsa_kv_cache_append[grid](
        x=x, y=y, x_store=x_store, y_store=y_store, T=tokens, K=K, **launch.strides("n", x, "bht"),
        **launch.strides("o", y, "bht"), **launch.strides("x", x_store, "bhn"),
        **launch.strides("y", y_store, "bhn"), **arguments, **widths(x, y), EVERY=every,
        RING=x_store.shape[2] if ring else 0, FLIPPED=flipped, num_warps=1,
    )  # fmt: skip


def recent(
    rings: tuple[Tensor, Tensor], tokens: int, l: int, d: int, step: Step
) -> tuple[Tensor, Tensor]:
    """Windows [b h w l d] that so many new tokens may complete, out of rings [b h size d]."""
    x, y = rings
    B, K, size = x.shape[:3]
    most = (tokens + d - 1) // d
    outs = tuple(t.new_empty(B, K, most, l, t.shape[-1]) for t in rings)
    grid, flipped = launch.grid(most, B * K)
    nsa_kv_cache_recent[grid](
        x=x, y=y, lengths=step.lengths, x_out=outs[0], y_out=outs[1], T=tokens, K=K,
        **launch.strides("x", x, "bhn"), **launch.strides("y", y, "bhn"), **widths(x, y), l=l,
        BLOCK_L=next_power_of_2(l), d=d, RING=size, FLIPPED=flipped, num_warps=4,
    )  # fmt: skip
    return outs[0], outs[1]
