"""The selection turned round: for each block of keys, the queries that chose it.

An entry is one slot of one list of `lists` [B T R n], numbered as it lies there. Entries are sorted
by span, which is some tokens' and some KV heads', and by the block that they name, in their own
order within a block, and cut into items of `chunk` entries, or what is left: what one program works
through. These lie by block, or of every so many blocks the longest first: those that run side by
side are about as long then, and those at the end are short. Sizes depend on shapes alone, so that
nothing waits for the GPU.

They are sorted by counting. A line is the lists of one row and KV head in one span; it is cut into
shares of tokens. A program numbers the entries of its share by the block that they name; those
before it in the line, then those of the blocks before, are added; that is an entry's place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.counts import cdiv

# entries of a share, or as many times as many as there are blocks; entries that are numbered at
# once; those that are placed at once; blocks and shares that are added up at once
SHARE, SHARE_OF_BLOCKS, NUMBERED, PLACED, SUMMED = 1024, 4, 64, 1024, (32, 64)
# warps of a program that numbers
NUMBERING = 1
# blocks whose items are counted, and ordered, at once; lengths that are told apart there of items
# that are no chunk
ITEMS, CLASSES = 512, 8
LENGTHS = ["T", "C", "length", "heads", "tokens", "shares", "B", "blocks", "capacity", "most"]


@dataclass(frozen=True)
class BlockCSR:
    """Entries of a span by block: blocks are numbered (b heads + h - head) C + c."""

    first: int  # token
    length: int  # tokens
    head: int  # the first KV head
    heads: int  # KV heads
    entries: Tensor  # of all spans, capacity for all there could be in each
    places: Tensor  # [B T R n], where among its span's an entry lies; -1 of one that is none
    bounds: Tensor  # [blocks + 1], where each block's entries begin, and the next one's
    owner: Tensor  # [items], the block of each item; `blocks` for an item that is none
    ordinals: Tensor  # [items], its number among those of its block
    spill_bounds: Tensor  # [blocks + 1], where each block's begin among those that have several
    chunk: int
    spills: int  # bound of the last of spill_bounds

    def selections(self, of_token: int, num_heads: int) -> tuple[int, int]:
        """The first of a token's lists that is the span's, and how many are, of all KV heads'."""
        each = of_token // num_heads
        return self.head * each, self.heads * each


@triton.jit
def share_entries(x, end, first, b, h, T, R: tl.constexpr, K: tl.constexpr, n: tl.constexpr):
    """Numbers of entries x, counted from a token on, of a row and KV head, and which are there."""
    EACH: tl.constexpr = R // K * n
    token = b * T + first + x // EACH
    return (token * R + h * (R // K)) * n + x % EACH, x < end


@triton.jit
def share_of_tokens(line, T, length, heads, tokens, B, K: tl.constexpr):
    """Row and KV head of this program's share, its first token, and how many. Spans of the same
    heads lie side by side."""
    span, b, h = line // heads // B, line // heads % B, line % heads
    spans = tl.cdiv(T, length)
    span, h = span % spans, span // spans * heads + h
    first = span * length + tl.program_id(1) * tokens
    end = tl.minimum(tl.minimum(first + tokens, span * length + length), T)
    return b.to(tl.int64), h, first, tl.maximum(end - first, 0)


@triton.jit
def bounds_of(blocks):
    """Bounds of a span: one more than blocks, and perhaps one that says nothing, so that each
    span's begin at a multiple of 16 bytes."""
    return (blocks // 2 + 1) * 2


@triton.jit(do_not_specialize=LENGTHS)
def nsa_csr_count(
    block_indices, numbers, counts, T, C, length, heads, tokens, shares, B,
    R: tl.constexpr, K: tl.constexpr, n: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a share. Numbers its entries by block, and others -1; and counts those of each
    block."""
    line = tl.program_id(0)
    b, h, first, held = share_of_tokens(line, T, length, heads, tokens, B, K)
    counted = counts + (line.to(tl.int64) * shares + tl.program_id(1)) * C
    i = tl.arange(0, BLOCK)
    for c0 in range(0, C, BLOCK):
        tl.store(counted + c0 + i, tl.zeros_like(i), mask=c0 + i < C)
    end = held * (R // K * n)
    entry, there = share_entries(i, end, first, b, h, T, R, K, n)
    ahead = tl.load(block_indices + entry, mask=there, other=-1)
    # of two that are numbered together: 1 for the earlier one, in the upper half for the later one
    order = tl.where(i[None] < i[:, None], 1, tl.where(i[None] > i[:, None], 1 << 16, 0))
    for x in range(0, end, BLOCK):
        c = ahead
        tl.debug_barrier()  # what the last turn has counted
        number = tl.load(counted + c, mask=c >= 0, other=0)
        # of the same block among those numbered with it
        same = tl.sum(tl.where(c[:, None] == c[None], order, 0), 1)
        number += same & 0xFFFF
        entry, there = share_entries(x + i, end, first, b, h, T, R, K, n)
        tl.store(numbers + entry, tl.where(c >= 0, number, -1), mask=there)
        # those of the next turn now
        entry, there = share_entries(x + BLOCK + i, end, first, b, h, T, R, K, n)
        ahead = tl.load(block_indices + entry, mask=there, other=-1)
        tl.debug_barrier()  # all have read
        tl.store(counted + c, number + 1, mask=(c >= 0) & (same < 1 << 16))


@triton.jit(do_not_specialize=LENGTHS)
def nsa_csr_scan(
    counts, totals, C, shares, BLOCKS: tl.constexpr, SHARES: tl.constexpr
):  # fmt: skip
    """One program: some blocks of a line. Instead of what each share counted, what those before it
    did; and of all."""
    line = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    total = tl.zeros([BLOCKS], tl.int32)
    for first in range(0, shares, SHARES):
        share = first + tl.arange(0, SHARES)
        at = counts + (line * shares + share)[:, None] * C + c[None]
        there = (share < shares)[:, None] & (c < C)[None]
        counted = tl.load(at, mask=there, other=0)
        tl.store(at, total[None] + tl.cumsum(counted, 0) - counted, mask=there)
        total += tl.sum(counted, 0)
    tl.store(totals + line * C + c, total, mask=c < C)


@triton.jit(do_not_specialize=LENGTHS)
def nsa_csr_work_tiles(
    totals, bounds, spill_bounds, owner, ordinals, blocks, chunk, capacity, most,
    BLOCKS: tl.constexpr, CLASSES: tl.constexpr, LONGEST: tl.constexpr,
):  # fmt: skip
    """One program: a span. Where the entries of each block begin, and the items, by block or, with
    LONGEST, of every BLOCKS blocks the longest first; `capacity` entries belong to a span."""
    span = tl.program_id(0).to(tl.int64)
    begins, spills, items = span * capacity, tl.cast(0, tl.int32), tl.cast(0, tl.int32)
    line = span * bounds_of(blocks)
    totals += span * blocks
    owner += span * most
    ordinals += span * most
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        real = block < blocks
        total = tl.load(totals + block, mask=real, other=0)
        own = tl.cdiv(total, chunk)
        spilt = tl.where(own > 1, own, 0)
        tl.store(bounds + line + block, begins + tl.cumsum(total, 0) - total, mask=real)
        tl.store(spill_bounds + line + block, spills + tl.cumsum(spilt, 0) - spilt, mask=real)
        in_order = own  # items of each block that lie by block
        if LONGEST:  # those of a chunk; behind them the others, class by class
            in_order = total // chunk
            left = total - in_order * chunk
            of_length = tl.where(left > 0, (chunk - 1 - left) * CLASSES // chunk, -1)
            among = of_length[:, None] == tl.arange(0, CLASSES)[None]
            numbers = tl.cumsum(among.to(tl.int32), 0)
            counts = tl.sum(among.to(tl.int32), 0)
            at = items + tl.sum(in_order, 0) + tl.cumsum(counts, 0) - counts
            at = tl.sum(tl.where(among, at[None] + numbers - 1, 0), 1)
            tl.store(owner + at, block, mask=left > 0)
            tl.store(ordinals + at, in_order, mask=left > 0)
        at = items + tl.cumsum(in_order, 0) - in_order
        for i in range(0, tl.max(in_order, 0)):
            tl.store(owner + at + i, block, mask=i < in_order)
            tl.store(ordinals + at + i, tl.zeros_like(block) + i, mask=i < in_order)
        begins += tl.sum(total, 0)
        spills += tl.sum(spilt, 0)
        items += tl.sum(own, 0)
    tl.store(bounds + line + blocks, begins)
    tl.store(spill_bounds + line + blocks, spills)
    for first in range(items, most, BLOCKS):
        item = first + tl.arange(0, BLOCKS)
        tl.store(owner + item, tl.zeros_like(item) + blocks, mask=item < most)


@triton.jit(do_not_specialize=LENGTHS)
def nsa_csr_scatter(
    block_indices, numbers, counts, bounds, entries, T, C, length, heads, tokens, shares, B,
    R: tl.constexpr, K: tl.constexpr, n: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a share. Writes each entry to its place, and that place, counted from the span's
    first, instead of its number."""
    line = tl.program_id(0)
    b, h, first, held = share_of_tokens(line, T, length, heads, tokens, B, K)
    before = counts + (line.to(tl.int64) * shares + tl.program_id(1)) * C
    lines = B * heads
    bounds += (line // lines).to(tl.int64) * bounds_of(lines * C)
    blocks = bounds + (line % lines).to(tl.int64) * C
    origin = tl.load(bounds)
    end = held * (R // K * n)
    for x in range(0, end, BLOCK):
        entry, there = share_entries(x + tl.arange(0, BLOCK), end, first, b, h, T, R, K, n)
        c = tl.load(block_indices + entry, mask=there, other=-1)
        there = c >= 0
        number = tl.load(numbers + entry, mask=there, other=0)
        number += tl.load(before + c, mask=there, other=0)
        place = tl.load(blocks + c, mask=there, other=0) + number
        tl.store(entries + place, entry.to(entries.dtype.element_ty), mask=there)
        tl.store(numbers + entry, (place - origin).to(tl.int32), mask=there)


@dataclass(frozen=True)
class CSRPlan:
    """Room for the inverse of lists [B T R n], by spans, and what is on its way to it."""

    spans: list[BlockCSR]
    numbers: Tensor  # as the lists; in the end the places
    counts: Tensor  # [spans lines, shares, C]
    totals: Tensor  # [spans, blocks]
    tensors: dict[str, Tensor]  # of all spans
    num_heads: int
    tokens: int  # of a share
    longest: bool  # items first, of every ITEMS blocks

    def run(self, block_indices: Tensor) -> list[BlockCSR]:
        """Writes the inverse of `lists`, contiguous."""
        B, T, R, n = block_indices.shape
        lines, shares, C = self.counts.shape
        spans, blocks = self.totals.shape
        at, first = self.tensors, self.spans[0]
        args = dict(T=T, C=C, length=first.length, heads=first.heads, tokens=self.tokens)
        args |= dict(shares=shares, B=B, R=R, K=self.num_heads, n=n)
        nsa_csr_count[(lines, shares)](
            block_indices, self.numbers, self.counts, BLOCK=NUMBERED, num_warps=NUMBERING,
            num_stages=1,
            **args,
        )  # fmt: skip
        nsa_csr_scan[(lines, cdiv(C, SUMMED[0]))](
            self.counts, self.totals, C, shares, BLOCKS=SUMMED[0], SHARES=SUMMED[1], num_stages=1
        )
        nsa_csr_work_tiles[(spans,)](
            self.totals, at["bounds"], at["spill_bounds"], at["owner"], at["ordinals"], blocks,
            first.chunk, len(at["entries"]) // spans, at["owner"].shape[1], BLOCKS=ITEMS,
            CLASSES=CLASSES, LONGEST=self.longest, num_warps=8, num_stages=1,
        )  # fmt: skip
        nsa_csr_scatter[(lines, shares)](
            block_indices,
            self.numbers,
            self.counts,
            at["bounds"],
            at["entries"],
            BLOCK=PLACED,
            **args,
        )
        return self.spans


def allocate(
    block_indices: Tensor,
    num_heads: int,
    num_blocks: int,
    chunk: int,
    length: int,
    heads: int,
    longest: bool = False,
) -> CSRPlan:
    """For the entries of each of B x num_heads x num_blocks blocks, for each span of `length`
    tokens and of `heads` KV heads, by which `num_heads` can be divided. Items lie by block, or of
    every ITEMS blocks the `longest` first."""
    B, T, R, n = block_indices.shape
    lines, blocks = B * heads, B * heads * num_blocks
    firsts = [(t, h) for h in range(0, num_heads, heads) for t in range(0, T, length)]
    spans, each = len(firsts), R // num_heads * n
    tokens = max(max(SHARE, SHARE_OF_BLOCKS * num_blocks) // each, 1)
    shares = cdiv(length, tokens)
    entries_of_span = lines * min(length, T) * each
    small = torch.int32 if spans * entries_of_span < 1 << 31 else torch.int64
    # rows begin at multiples of 16 bytes, whatever the length: else each needs kernels of its own
    most = cdiv(entries_of_span // chunk + min(blocks, entries_of_span), 4) * 4
    ends = (blocks // 2 + 1) * 2

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return block_indices.new_empty(shape, dtype=dtype)

    bounds, items = ("bounds", "spill_bounds"), ("owner", "ordinals")
    tensors = {name: empty(spans, ends, dtype=torch.int64) for name in bounds}
    tensors |= {name: empty(spans, most) for name in items}
    tensors["entries"] = empty(spans * entries_of_span, dtype=small)
    numbers = empty(*block_indices.shape)
    inverses = [
        BlockCSR(
            token,
            min(length, T - token),
            head,
            heads,
            tensors["entries"],
            numbers,
            tensors["bounds"][i, : blocks + 1],
            tensors["owner"][i],
            tensors["ordinals"][i],
            tensors["spill_bounds"][i, : blocks + 1],
            chunk,
            entries_of_span // chunk + min(blocks, entries_of_span // chunk),
        )
        for i, (token, head) in enumerate(firsts)
    ]
    return CSRPlan(
        inverses, numbers, empty(spans * lines, shares, num_blocks),
        empty(spans, blocks), tensors, num_heads, tokens, longest,
    )  # fmt: skip
