"""Block indices [B T R n] transposed to a CSR: for each KV block the queries that chose it.

A pair (query, block) is the flat index of a slot of the block indices. A chunk has some tokens and
some KV heads. Pairs are sorted by chunk and by block, stably. The pairs of a block are cut into
work tiles of `tile_pairs` pairs; one program runs one work tile. Work tiles are sorted by block, or
the longest first within every TILE_BLOCKS blocks: concurrent tiles then have similar lengths, and
the last ones are short. Sizes depend on shapes alone, so the host never waits for the GPU.

The sort is a counting sort. A line is the block indices of one batch row and KV head in one chunk,
cut into splits of tokens. A program ranks the pairs of its split within each block. A pair's index
adds to its rank the pairs of the same block in earlier splits, and the pairs of earlier blocks.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common.precompile import launcher
from .inputs import Inputs

# pairs of a split, at least and per block; pairs exists at once; pairs scattered at once
SPLIT_PAIRS, SPLIT_PER_BLOCK, COUNT_PAIRS, SCATTER_PAIRS = 1024, 4, 64, 1024
# warps of a program that counts
COUNT_WARPS = 1
# blocks whose work tiles are sorted at once, splits whose counts are added at once, and length
# classes of work tiles shorter than tile_pairs
TILE_BLOCKS, TILE_SPLITS, CLASSES = 512, 16, 8
LENGTHS = [
    "T", "C", "length", "heads", "tokens", "splits", "B", "blocks", "capacity",
    "max_tiles", "offsets_stride",
]  # fmt: skip

# compile-time settings of the kernels over splits: numbers of head groups, KV heads and slots
Settings = namedtuple("Settings", "R K n")
# argument group of the kernels over work tiles: all pairs, first pair of each block, block and
# number within its block of each work tile, and first partial of each block. A block past the last
# one marks a work tile without pairs
Pairs = namedtuple("Pairs", "pairs offsets owner ordinals partial_offsets")


@triton.jit
def split_pairs(x, end, first, b, h, T, F: tl.constexpr):
    """Flat indices of a split's pairs x, and which are below `end`."""
    TOKEN_PAIRS: tl.constexpr = F.R // F.K * F.n
    token = b * T + first + x // TOKEN_PAIRS
    return (token * F.R + h * (F.R // F.K)) * F.n + x % TOKEN_PAIRS, x < end


@triton.jit
def split_tokens(line, T, length, heads, tokens, B):
    """Batch row, KV head, first token and number of tokens of this program's split."""
    chunk, b, h = line // heads // B, line // heads % B, line % heads
    chunks = tl.cdiv(T, length)
    chunk, h = chunk % chunks, chunk // chunks * heads + h
    first = chunk * length + tl.program_id(1) * tokens
    end = tl.minimum(tl.minimum(first + tokens, chunk * length + length), T)
    return b.to(tl.int64), h, first, tl.maximum(end - first, 0)


@triton.jit(do_not_specialize=LENGTHS)
def nsa_csr_count(
    block_indices, ranks, split_counts, T, C, length, heads, tokens, splits, B,
    F: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a split. Writes each pair's rank in its block, -1 for an empty slot, and the
    number of pairs of each block."""
    line = tl.program_id(0)
    b, h, first, num_tokens = split_tokens(line, T, length, heads, tokens, B)
    pair_counts = split_counts + (line.to(tl.int64) * splits + tl.program_id(1)) * C
    i = tl.arange(0, BLOCK)
    for c0 in range(0, C, BLOCK):
        tl.store(pair_counts + c0 + i, tl.zeros_like(i), mask=c0 + i < C)
    end = num_tokens * (F.R // F.K * F.n)
    pair, valid = split_pairs(i, end, first, b, h, T, F)
    next_c = tl.load(block_indices + pair, mask=valid, other=-1)
    # of two pairs: 1 for the earlier one in the lower half, for the later one in the upper half
    order = tl.where(i[None] < i[:, None], 1, tl.where(i[None] > i[:, None], 1 << 16, 0))
    for x in range(0, end, BLOCK):
        c = next_c
        tl.debug_barrier()  # counts of the last iteration are written
        rank = tl.load(pair_counts + c, mask=c >= 0, other=0)
        # pairs of the same block in this iteration
        same = tl.sum(tl.where(c[:, None] == c[None], order, 0), 1)
        rank += same & 0xFFFF
        pair, valid = split_pairs(x + i, end, first, b, h, T, F)
        tl.store(ranks + pair, tl.where(c >= 0, rank, -1), mask=valid)
        # prefetch the next iteration
        pair, valid = split_pairs(x + BLOCK + i, end, first, b, h, T, F)
        next_c = tl.load(block_indices + pair, mask=valid, other=-1)
        tl.debug_barrier()  # all threads have read
        tl.store(pair_counts + c, rank + 1, mask=(c >= 0) & (same < 1 << 16))


@triton.jit(do_not_specialize=LENGTHS)
def nsa_csr_work_tiles(
    split_counts, offsets, partial_offsets, owner, ordinals, offsets_stride, C, splits, blocks,
    tile_pairs, capacity, max_tiles, BLOCKS: tl.constexpr, SPLITS: tl.constexpr,
    CLASSES: tl.constexpr, LONGEST: tl.constexpr,
):  # fmt: skip
    """One program: a chunk of at most `capacity` pairs. Replaces counts by their exclusive prefix
    sums over splits; writes offsets and work tiles."""
    chunk = tl.program_id(0).to(tl.int64)
    begin, partials, work_tiles = chunk * capacity, tl.cast(0, tl.int32), tl.cast(0, tl.int32)
    offsets += chunk * offsets_stride
    partial_offsets += chunk * offsets_stride
    split_counts += chunk * blocks * splits
    owner += chunk * max_tiles
    ordinals += chunk * max_tiles
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        real = block < blocks
        # counts have the shape [lines, splits, C]
        first_count = block // C * C * splits + block % C
        block_count = tl.zeros([BLOCKS], tl.int32)
        for first_split in range(0, splits, SPLITS):
            split = first_split + tl.arange(0, SPLITS)
            offset = split_counts + first_count[None] + split[:, None] * C
            exists = (split < splits)[:, None] & real[None]
            count = tl.load(offset, mask=exists, other=0)
            tl.store(offset, block_count[None] + tl.cumsum(count, 0) - count, mask=exists)
            block_count += tl.sum(count, 0)
        num_tiles = tl.cdiv(block_count, tile_pairs)
        block_partials = tl.where(num_tiles > 1, num_tiles, 0)
        tl.store(offsets + block, begin + tl.cumsum(block_count, 0) - block_count, mask=real)
        first_partial = partials + tl.cumsum(block_partials, 0) - block_partials
        tl.store(partial_offsets + block, first_partial, mask=real)
        ordered_tiles = num_tiles  # work tiles of each block that are sorted by block
        if LONGEST:  # full work tiles; the others follow by length class
            ordered_tiles = block_count // tile_pairs
            remainder = block_count - ordered_tiles * tile_pairs
            length_class = tl.where(
                remainder > 0, (tile_pairs - 1 - remainder) * CLASSES // tile_pairs, -1
            )
            is_class = length_class[:, None] == tl.arange(0, CLASSES)[None]
            class_ranks = tl.cumsum(is_class.to(tl.int32), 0)
            class_counts = tl.sum(is_class.to(tl.int32), 0)
            offset = (
                work_tiles + tl.sum(ordered_tiles, 0) + tl.cumsum(class_counts, 0) - class_counts
            )
            offset = tl.sum(tl.where(is_class, offset[None] + class_ranks - 1, 0), 1)
            tl.store(owner + offset, block, mask=remainder > 0)
            tl.store(ordinals + offset, ordered_tiles, mask=remainder > 0)
        offset = work_tiles + tl.cumsum(ordered_tiles, 0) - ordered_tiles
        for i in range(0, tl.max(ordered_tiles, 0)):
            tl.store(owner + offset + i, block, mask=i < ordered_tiles)
            tl.store(ordinals + offset + i, tl.zeros_like(block) + i, mask=i < ordered_tiles)
        begin += tl.sum(block_count, 0)
        partials += tl.sum(block_partials, 0)
        work_tiles += tl.sum(num_tiles, 0)
    tl.store(offsets + blocks, begin)
    tl.store(partial_offsets + blocks, partials)
    for first in range(work_tiles, max_tiles, BLOCKS):
        work_tile = first + tl.arange(0, BLOCKS)
        tl.store(owner + work_tile, tl.zeros_like(work_tile) + blocks, mask=work_tile < max_tiles)


@triton.jit(do_not_specialize=LENGTHS)
def nsa_csr_scatter(
    block_indices, ranks, split_counts, offsets, pairs, offsets_stride, T, C, length, heads, tokens,
    splits, B, F: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a split. Writes each pair to its index, and replaces its rank by its index in
    the chunk."""
    line = tl.program_id(0)
    b, h, first, num_tokens = split_tokens(line, T, length, heads, tokens, B)
    split_offsets = split_counts + (line.to(tl.int64) * splits + tl.program_id(1)) * C
    lines = B * heads
    offsets += (line // lines).to(tl.int64) * offsets_stride
    blocks = offsets + (line % lines).to(tl.int64) * C
    origin = tl.load(offsets)
    end = num_tokens * (F.R // F.K * F.n)
    for x in range(0, end, BLOCK):
        pair, valid = split_pairs(x + tl.arange(0, BLOCK), end, first, b, h, T, F)
        c = tl.load(block_indices + pair, mask=valid, other=-1)
        valid = c >= 0
        rank = tl.load(ranks + pair, mask=valid, other=0)
        rank += tl.load(split_offsets + c, mask=valid, other=0)
        index = tl.load(blocks + c, mask=valid, other=0) + rank
        tl.store(pairs + index, pair.to(pairs.dtype.element_ty), mask=valid)
        tl.store(ranks + pair, (index - origin).to(tl.int32), mask=valid)


class Chunk(NamedTuple):
    """`length` tokens from `first` on, KV heads from `head` on, and their pairs. Blocks of a chunk
    have numbers (b heads + h - head) C + c."""

    first: int
    length: int
    head: int
    csr: Pairs


class CSR:
    """The CSR of block indices [B T R n], unwritten, with B x num_heads x num_blocks blocks, in
    chunks of `length` tokens and `heads` KV heads, a divisor of `num_heads`. Work tiles are sorted
    by block, or the `longest` first."""

    def __init__(
        self,
        block_indices: Tensor,
        num_heads: int,
        num_blocks: int,
        tile_pairs: int,
        length: int,
        heads: int,
        longest: bool = False,
    ) -> None:
        B, T, R, n = block_indices.shape
        self.num_heads, self.tile_pairs, self.longest = num_heads, tile_pairs, longest
        self.length, self.heads, self.blocks = length, heads, B * heads * num_blocks
        chunks, token_pairs = num_heads // heads * launch.cdiv(T, length), R // num_heads * n
        self.capacity = B * heads * min(length, T) * token_pairs  # pairs of a chunk, at most
        full_tiles = self.capacity // tile_pairs
        # partials of a chunk, at most: one per work tile of a block with several
        self.num_partials = full_tiles + min(self.blocks, full_tiles)
        # rows start at multiples of 16 bytes for any length: one compiled kernel
        self.max_tiles = launch.cdiv(full_tiles + min(self.blocks, self.capacity), 4) * 4
        self.split = max(max(SPLIT_PAIRS, SPLIT_PER_BLOCK * num_blocks) // token_pairs, 1)  # tokens

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return block_indices.new_empty(shape, dtype=dtype)

        wide = torch.int64 if chunks * self.capacity >= 1 << 31 else torch.int32
        self.pairs = empty(chunks * self.capacity, dtype=wide)
        # index of a slot's pair in its chunk, -1 for an empty slot; first the rank in its split
        self.pair_indices = empty(*block_indices.shape)
        self.split_counts = empty(chunks * B * heads, launch.cdiv(length, self.split), num_blocks)
        self.offsets, self.partial_offsets = (
            empty(chunks, (self.blocks // 2 + 1) * 2, dtype=torch.int64) for _ in range(2)
        )
        self.owner, self.ordinals = (empty(chunks, self.max_tiles) for _ in range(2))

    def chunks(self) -> Iterator[Chunk]:
        T = self.pair_indices.shape[1]
        starts = product(range(0, self.num_heads, self.heads), range(0, T, self.length))
        tables = self.offsets, self.owner, self.ordinals, self.partial_offsets
        for (head, first), *rows in zip(starts, *tables, strict=True):
            yield Chunk(first, min(self.length, T - first), head, Pairs(self.pairs, *rows))

    def write(self, block_indices: Tensor) -> None:
        """Writes the CSR of contiguous block indices."""
        B, T, R, n = block_indices.shape
        lines, splits, C = self.split_counts.shape
        sizes = (T, C, self.length, self.heads, self.split, splits, B)
        settings = Settings(R, self.num_heads, n)
        launcher(nsa_csr_count, (lines, splits))(
            block_indices, self.pair_indices, self.split_counts, *sizes, settings,
            BLOCK=COUNT_PAIRS, num_warps=COUNT_WARPS, num_stages=1,
        )  # fmt: skip
        launcher(nsa_csr_work_tiles, (len(self.offsets),))(
            self.split_counts, self.offsets, self.partial_offsets, self.owner, self.ordinals,
            self.offsets.stride(0), C, splits, self.blocks, self.tile_pairs, self.capacity,
            self.max_tiles, BLOCKS=TILE_BLOCKS, SPLITS=TILE_SPLITS, CLASSES=CLASSES,
            LONGEST=self.longest, num_warps=16, num_stages=1,
        )  # fmt: skip
        launcher(nsa_csr_scatter, (lines, splits))(
            block_indices, self.pair_indices, self.split_counts, self.offsets, self.pairs,
            self.offsets.stride(0), *sizes, settings, BLOCK=SCATTER_PAIRS,
        )  # fmt: skip


class Budget(NamedTuple):
    """Memory of a chunk's partial results relative to q. A chunk has at least `tokens` tokens, as
    far as `max_ratio` allows."""

    ratio: float
    tokens: int = 0
    max_ratio: float = math.inf


# by query heads a KV head. `max_ratio` keeps a forward and a backward pass below 1.5 times the
# memory of dense attention for few tokens too
BUDGETS = {
    "forward": {1: Budget(3.3, 2816, 4.4), 8: Budget(3.3, 4096, 6.6)},
    "backward": {1: Budget(1.7, 2048, 3.3), 8: Budget(3.3, 4096, 6.6)},
}
# tokens that a chunk has at least, whatever the memory
MIN_TOKENS = 128
# rows of a work tile at least, with partial dq: partial dk and dv then take little memory beside it
MIN_DQ_TILE_ROWS = 4096
# rows of a forward work tile at most: short work tiles end together
MAX_FORWARD_TILE_ROWS = 1024


def allocate(inputs: Inputs, kernel: str, pair_rows: int, pair_tokens: int = 1) -> CSR:
    """The unwritten CSR for "forward" or "backward", of every `pair_tokens`-th token, in chunks
    whose partial results of `pair_rows` rows a pair take the memory of BUDGETS."""
    block_indices = inputs.selection.block_indices[:, ::pair_tokens]
    (B, T, R, n), K, blocks = block_indices.shape, inputs.facts.F.K, inputs.facts.C
    groups = inputs.facts.F.G * pair_tokens
    heads, tokens = K, T
    if pair_rows:
        ratio, min_tokens, max_ratio = launch.row(BUDGETS[kernel], groups)
        q_tokens = groups * T / (n * pair_rows)  # whose partial results take the memory of q
        tokens = int(max(min(max(ratio * q_tokens, min_tokens), max_ratio * q_tokens), MIN_TOKENS))
        if kernel == "backward":
            # some heads of all tokens are better than all heads of some tokens: dk and dv of a
            # block then pass through memory once. A chunk keeps enough blocks for the GPU
            divisors = [h for h in range(1, K + 1) if K % h == 0]
            fitting = max((h for h in divisors if h <= tokens * K // T), default=1)
            enough = (h for h in divisors if h * B * blocks >= launch.ENOUGH_PROGRAMS)
            heads = max(fitting, min(enough, default=K))
    length = launch.cdiv(T, launch.cdiv(T * heads, tokens * K))
    rows = B * length * (R // K * heads) * groups * n
    max_tile_rows = launch.work_tile_rows(rows, B * heads * blocks)
    if kernel == "forward":
        max_tile_rows = min(max_tile_rows, MAX_FORWARD_TILE_ROWS)
    elif pair_rows:
        max_tile_rows = max(max_tile_rows, MIN_DQ_TILE_ROWS)
    tile_pairs = max(max_tile_rows // groups, 1)
    # the forward's work tiles are short, and sorted by block they reuse the cache
    longest = kernel == "backward"
    return CSR(block_indices, K, blocks, tile_pairs, length, heads, longest)
