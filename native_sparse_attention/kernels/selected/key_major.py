"""The selected branch, key-major: a program reads one block of keys and values and the queries that
chose it. It computes dk and dv. For small head groups, whose query-major tiles would be nearly
empty, it also computes the forward and dq, as partials that other kernels reduce for each query.
Every reduction has a fixed order.

A CSR, the block indices [B T R n] transposed, has the queries that chose each block. A pair (query,
block) is the flat index e of a slot: slot e % n of head group e // n % R of token e // (n R). A
chunk has some tokens and some KV heads. Pairs are sorted by chunk and by block, stably. The pairs
of a block are cut into work tiles of `tile_pairs` pairs; one program runs one work tile. Those of
every TILE_BLOCKS blocks are sorted, the longest first: concurrent tiles then have similar lengths,
and the last ones are short. Sizes depend on shapes alone, so the host never waits for the GPU.

The sort is a counting sort. A line is the block indices of one batch row and KV head in one chunk,
cut into splits of tokens. A program ranks the pairs of its split within each block. A pair's index
adds to its rank the pairs of the same block in earlier splits, and the pairs of earlier blocks.

Rows of a tile are pairs x heads. Partials have one row per pair and head. The forward's are in the
order of the block indices, so that the lse of a query's slots are adjacent, partial dq in that of
the chunk's pairs.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common import primitives as steps
from ..common.precompile import launcher
from .inputs import Args, Backward, Facts, Gradients, Inputs
from .query_major import gated_logits, visible_keys

# pairs of a split, at least and per block; pairs counted at once, by so many warps; pairs scattered
# at once
SPLIT_PAIRS, SPLIT_PER_BLOCK, COUNT_PAIRS, COUNT_WARPS, SCATTER_PAIRS = 1024, 4, 64, 1, 1024
# blocks and splits whose counts are added at once; blocks whose work tiles are sorted at once, and
# length classes of work tiles shorter than tile_pairs
SCAN_BLOCKS, SCAN_SPLITS = tl.constexpr(32), tl.constexpr(64)
TILE_BLOCKS, CLASSES = tl.constexpr(512), tl.constexpr(8)
# reductions: rows of a program; keys of a program, fewer if blocks are few
REDUCE_ROWS, DKV_KEYS = tl.constexpr(16), 64
# one compiled kernel for all lengths
LENGTHS = [
    "T", "S", "B", "C", "BLOCKS", "blocks", "start", "first", "length", "head", "heads", "tokens",
    "splits", "tile_pairs", "capacity", "max_tiles", "offsets_stride",
]  # fmt: skip

# compile-time settings of the kernels over splits: numbers of head groups, KV heads and slots
Slots = namedtuple("Slots", "R K n")
# argument group of the kernels over work tiles: all pairs, first pair of each block, block and
# number within its block of each work tile, and first partial of each block. A block past the last
# one marks a work tile without pairs
Pairs = namedtuple("Pairs", "pairs offsets owner ordinals partial_offsets")
# `length` tokens from `first` on, KV heads from `head` on, and their pairs. Blocks of a chunk have
# numbers (b heads + h - head) C + c
Chunk = namedtuple("Chunk", "first length head csr")


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
def nsa_csr_scan(split_counts, block_counts, C, splits):
    """One program: some blocks of a line. Replaces counts by their exclusive prefix sums over
    splits, and writes their sums."""
    line, first_block = tl.program_id(0).to(tl.int64), tl.program_id(1) * SCAN_BLOCKS
    c = first_block + tl.arange(0, SCAN_BLOCKS)
    block_count = tl.zeros([SCAN_BLOCKS], tl.int32)
    for first in range(0, splits, SCAN_SPLITS):
        split = first + tl.arange(0, SCAN_SPLITS)
        counts = split_counts + (line * splits + split)[:, None] * C + c[None]
        real = (split < splits)[:, None] & (c < C)[None]
        count = tl.load(counts, mask=real, other=0)
        tl.store(counts, block_count[None] + tl.cumsum(count, 0) - count, mask=real)
        block_count += tl.sum(count, 0)
    tl.store(block_counts + line * C + c, block_count, mask=c < C)


@triton.jit(do_not_specialize=LENGTHS)
def nsa_csr_work_tiles(
    block_counts, offsets, partial_offsets, owner, ordinals, offsets_stride, blocks, tile_pairs,
    capacity, max_tiles,
):  # fmt: skip
    """One program: a chunk of at most `capacity` pairs. Writes offsets and work tiles."""
    chunk = tl.program_id(0).to(tl.int64)
    begin, partials, work_tiles = chunk * capacity, tl.cast(0, tl.int32), tl.cast(0, tl.int32)
    offsets += chunk * offsets_stride
    partial_offsets += chunk * offsets_stride
    block_counts += chunk * blocks
    owner += chunk * max_tiles
    ordinals += chunk * max_tiles
    for first in range(0, blocks, TILE_BLOCKS):
        block = first + tl.arange(0, TILE_BLOCKS)
        real = block < blocks
        block_count = tl.load(block_counts + block, mask=real, other=0)
        num_tiles = tl.cdiv(block_count, tile_pairs)
        block_partials = tl.where(num_tiles > 1, num_tiles, 0)
        tl.store(offsets + block, begin + tl.cumsum(block_count, 0) - block_count, mask=real)
        first_partial = partials + tl.cumsum(block_partials, 0) - block_partials
        tl.store(partial_offsets + block, first_partial, mask=real)
        # full work tiles; the others follow by length class
        full_tiles = block_count // tile_pairs
        offset = work_tiles + tl.cumsum(full_tiles, 0) - full_tiles
        for i in range(0, tl.max(full_tiles, 0)):
            tl.store(owner + offset + i, block, mask=i < full_tiles)
            tl.store(ordinals + offset + i, tl.zeros_like(block) + i, mask=i < full_tiles)
        remainder = block_count - full_tiles * tile_pairs
        length_class = (tile_pairs - 1 - remainder) * CLASSES // tile_pairs
        length_class = tl.where(remainder > 0, length_class, -1)
        is_class = length_class[:, None] == tl.arange(0, CLASSES)[None]
        class_ranks = tl.cumsum(is_class.to(tl.int32), 0)
        class_counts = tl.sum(is_class.to(tl.int32), 0)
        offset = work_tiles + tl.sum(full_tiles, 0) + tl.cumsum(class_counts, 0)
        offset = (offset - class_counts)[None] + class_ranks - 1
        offset = tl.sum(tl.where(is_class, offset, 0), 1)
        tl.store(owner + offset, block, mask=remainder > 0)
        tl.store(ordinals + offset, full_tiles, mask=remainder > 0)
        begin += tl.sum(block_count, 0)
        partials += tl.sum(block_partials, 0)
        work_tiles += tl.sum(num_tiles, 0)
    tl.store(offsets + blocks, begin)
    tl.store(partial_offsets + blocks, partials)
    for first in range(work_tiles, max_tiles, TILE_BLOCKS):
        work_tile = first + tl.arange(0, TILE_BLOCKS)
        tl.store(owner + work_tile, tl.zeros_like(work_tile) + blocks, mask=work_tile < max_tiles)


@triton.jit(do_not_specialize=LENGTHS)
def nsa_csr_scatter(
    block_indices, ranks, split_counts, offsets, pairs, offsets_stride, T, C, length, heads, tokens,
    splits, B, F: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a split. Writes each pair to its index, which replaces its rank."""
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


class CSR:
    """The CSR of block indices [B T R n] of every `pair_tokens`-th token, unwritten, with B x
    num_heads x num_blocks blocks, in chunks of `length` tokens and `heads` KV heads, a divisor of
    `num_heads`."""

    def __init__(
        self, block_indices: Tensor, num_heads: int, num_blocks: int, tile_pairs: int, length: int,
        heads: int, pair_tokens: int = 1,
    ) -> None:  # fmt: skip
        B, T, R, n = block_indices.shape
        self.num_heads, self.tile_pairs, self.pair_tokens = num_heads, tile_pairs, pair_tokens
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
        self.block_counts = empty(chunks * B * heads, num_blocks)
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
        """Writes the CSR of the block indices of all tokens."""
        block_indices = block_indices[:, :: self.pair_tokens].contiguous()
        (B, T, R, n), (lines, splits, C) = block_indices.shape, self.split_counts.shape
        sizes = (T, C, self.length, self.heads, self.split, splits, B)
        settings = Slots(R, self.num_heads, n)
        launcher(nsa_csr_count, (lines, splits))(
            block_indices, self.pair_indices, self.split_counts, *sizes, settings,
            BLOCK=COUNT_PAIRS, num_warps=COUNT_WARPS, num_stages=1,
        )  # fmt: skip
        launcher(nsa_csr_scan, (lines, launch.cdiv(C, SCAN_BLOCKS.value)))(
            self.split_counts, self.block_counts, C, splits, num_stages=1
        )
        launcher(nsa_csr_work_tiles, (len(self.offsets),))(
            self.block_counts, self.offsets, self.partial_offsets, self.owner, self.ordinals,
            self.offsets.stride(0), self.blocks, self.tile_pairs, self.capacity, self.max_tiles,
            num_warps=8, num_stages=1,
        )  # fmt: skip
        launcher(nsa_csr_scatter, (lines, splits))(
            block_indices, self.pair_indices, self.split_counts, self.offsets, self.pairs,
            self.offsets.stride(0), *sizes, settings, BLOCK=SCATTER_PAIRS,
        )  # fmt: skip


# memory of a chunk's partial results relative to q. A chunk has at least `tokens` tokens, as far as
# `max_ratio` allows
Budget = namedtuple("Budget", "ratio tokens max_ratio")
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
    return CSR(block_indices, K, blocks, tile_pairs, length, heads, pair_tokens)


@triton.jit
def load_work_tile(k, v, index, csr, tile_pairs, start, S, C, head, key_tile, F: tl.constexpr):
    """Block, first pair and end of this program's work tile, batch row, KV head and position of the
    first token; a tile of the block's keys and values, and their numbers j in the block."""
    block = tl.load(csr.owner + tl.program_id(0))
    ordinal = tl.load(csr.ordinals + tl.program_id(0)).to(tl.int64)
    begin = tl.load(csr.offsets + block) + ordinal * tile_pairs
    end = tl.minimum(begin + tile_pairs, tl.load(csr.offsets + block + 1))
    block = steps.large(block, F.WIDE)
    begin, end = steps.narrow(begin, F.WIDE), steps.narrow(end, F.WIDE)
    b, h, c = block // C // F.HEADS, head + block // C % F.HEADS, block % C
    if F.RAGGED:
        start = tl.load(index.starts + b).to(tl.int32)
    j = key_tile * F.BLOCK_N + tl.arange(0, F.BLOCK_N)
    key = c * F.s + j
    valid = (j < F.s) & (key < S)
    k_tile = steps.load_rows(k.ptr + b * k.b + h * k.h, key * k.n, F.D, F.BLOCK_D, valid)
    v_tile = steps.load_rows(v.ptr + b * v.b + h * v.h, key * v.n, F.E, F.BLOCK_E, valid)
    return block, begin, end, b, h, start, j, key, valid, k_tile, v_tile


@triton.jit
def load_pairs(pairs, i, end, F: tl.constexpr):
    """Pair of each of BLOCK_M rows, from pair i on; 0 for padding rows."""
    row = tl.arange(0, F.BLOCK_M)
    offset = i + row // F.G
    return tl.load(pairs + offset, mask=(row < F.BLOCK_M // F.G * F.G) & (offset < end), other=0)


@triton.jit
def load_tile(q, index, csr, next_pairs, b, i, end, start, T, F: tl.constexpr):
    """The tile of `next_pairs`, from pair i on: pair e, batch row x T + token, position, document's
    end, head and validity of each row, and queries; and the pairs after it, a tile ahead."""
    e, row = next_pairs, tl.arange(0, F.BLOCK_M)
    next_pairs = load_pairs(csr.pairs, i + F.BLOCK_M // F.G, end, F)
    real = (row < F.BLOCK_M // F.G * F.G) & (i + row // F.G < end)
    bt, head = steps.large(e // F.n // F.R, F.WIDE), e // F.n % F.R * F.G + row % F.G
    t = bt - b * T
    ends = t
    if F.ENDS:
        ends = tl.load(index.doc_last + bt, mask=real, other=0)
    q_tile = steps.load_rows(q.ptr, b * q.b + t * q.n + head * q.h, F.D, F.BLOCK_D, real)
    return next_pairs, steps.large(e, F.WIDE), bt, start + t, ends, head, real, q_tile


@triton.jit(do_not_specialize=LENGTHS)
def nsa_selected_fwd_key_major(
    q, k, v, index, partial_out, partial_lse, csr, tile_pairs, T, S, C, BLOCKS, start, first,
    length, scale_log2, cap, F: tl.constexpr,
):  # fmt: skip
    """One program: a work tile. Writes each row's partial out and lse over the block."""
    if tl.load(csr.owner + tl.program_id(0)) < BLOCKS:
        _block, begin, end, b, _h, start, _j, key, valid, k_tile, v_tile = load_work_tile(
            k, v, index, csr, tile_pairs, start, S, C, 0, 0, F
        )
        next_pairs = load_pairs(csr.pairs, begin, end, F)
        for i in range(begin, end, F.BLOCK_M // F.G):
            next_pairs, e, _bt, position, ends, head, real, q_tile = load_tile(
                q, index, csr, next_pairs, b, i, end, start, T, F
            )
            logits = steps.logits(q_tile, k_tile, scale_log2, cap, F)
            unit_scale = steps.logits_scale(scale_log2, F)
            if not F.WHOLE:
                visible = visible_keys(valid[None], key[None], position[:, None], ends[:, None], F)
                logits = tl.where(visible, logits, float("-inf"))
            m = tl.max(logits, 1) * unit_scale
            # padding rows may see no key
            p = tl.exp2(logits * unit_scale - tl.where(real, m, 0.0)[:, None])
            l = tl.where(real, tl.sum(p, 1), 1.0)
            o = tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee") * (1.0 / l)[:, None]
            row = (e - (b * (T - length) + first) * (F.R * F.n)) * F.G + head % F.G
            steps.store_rows(partial_out, row * F.E, o, F.E, F.BLOCK_E, real, STREAM=True)
            tl.store(partial_lse + row, m + tl.log2(l), mask=real)


@triton.jit(do_not_specialize=LENGTHS)
def nsa_selected_bwd_key_major(
    q, k, v, index, bwd, partial_dq, gradients, csr, tile_pairs, T, S, C, BLOCKS, start, head,
    scale, cap, F: tl.constexpr,
):  # fmt: skip
    """One program: a work tile and N keys of its block. Adds to dk and dv, or writes their partials
    if the block has several work tiles. With DQ also writes each row's partial dq."""
    key_tile = tl.program_id(1)
    if tl.load(csr.owner + tl.program_id(0)) < BLOCKS:
        block, begin, end, b, h, start, j, key, valid, k_tile, v_tile = load_work_tile(
            k, v, index, csr, tile_pairs, start, S, C, head, key_tile, F
        )
        dk_acc = tl.full([F.BLOCK_N, F.BLOCK_D], 0.0, tl.float32)
        dv_acc = tl.full([F.BLOCK_N, F.BLOCK_E], 0.0, tl.float32)
        next_pairs = load_pairs(csr.pairs, begin, end, F)
        for i in range(begin, end, F.BLOCK_M // F.G):
            next_pairs, e, bt, position, ends, query_head, real, q_tile = load_tile(
                q, index, csr, next_pairs, b, i, end, start, T, F
            )
            row = bt * (F.R * F.G) + query_head
            do_tile = steps.load_rows(bwd.d_out, row * F.E, F.E, F.BLOCK_E, real)
            lse_row = tl.load(bwd.lse + row, mask=real, other=0.0)
            delta_row = tl.load(bwd.delta + row, mask=real, other=0.0)

            # [N, M]: p and ds are the left operands of the next products
            product = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
            weight = 1.0
            if F.GATES:
                weight = tl.load(index.gates + e, mask=real, other=1.0).to(tl.float32)[None]
            logits, logits2 = gated_logits(product, scale, cap, weight, F)
            if not F.WHOLE:  # padding rows add nothing: their q, d_out and delta are zeros
                visible = valid[:, None] & real[None]
                visible = visible_keys(visible, key[:, None], position[None], ends[None], F)
                logits2 = tl.where(visible, logits2, float("-inf"))
            dp = tl.dot(v_tile, tl.trans(do_tile), input_precision="ieee")
            p, ds = steps.softmax_grad(logits2, 1.0, dp, lse_row[None], delta_row[None], F.GATED)
            dv_acc += tl.dot(p.to(do_tile.dtype), do_tile, input_precision="ieee")
            if F.GATES:
                ds *= weight
            if F.CAP:
                ds *= steps.cap_slope(logits, cap)
            ds_tile = ds.to(q_tile.dtype)
            dk_acc += tl.dot(ds_tile, q_tile, input_precision="ieee")
            if F.DQ:
                dq = tl.dot(tl.trans(ds_tile), k_tile, input_precision="ieee") * scale
                # index of each row's pair within the chunk
                origin = steps.narrow(tl.load(csr.offsets), F.WIDE)
                pair = steps.large(i - origin + tl.arange(0, F.BLOCK_M) // F.G, F.WIDE)
                offset = (pair * F.KEY_TILES + key_tile) * F.G + query_head % F.G
                steps.store_rows(partial_dq, offset * F.D, dq, F.D, F.BLOCK_D, real, STREAM=True)

        dk_acc *= scale
        if tl.load(csr.offsets + block + 1) - tl.load(csr.offsets + block) <= tile_pairs:
            offset = (b * S + key) * F.K + h
            dk_acc += steps.load_rows(gradients.dk, offset * F.D, F.D, F.BLOCK_D, valid)
            dv_acc += steps.load_rows(gradients.dv, offset * F.E, F.E, F.BLOCK_E, valid)
            steps.store_rows(gradients.dk, offset * F.D, dk_acc, F.D, F.BLOCK_D, valid)
            steps.store_rows(gradients.dv, offset * F.E, dv_acc, F.E, F.BLOCK_E, valid)
        else:
            ordinal = tl.load(csr.ordinals + tl.program_id(0))
            partial = (tl.load(csr.partial_offsets + block) + ordinal) * F.s + j
            steps.store_rows(gradients.partial_dk, partial * F.D, dk_acc, F.D, F.BLOCK_D, valid)
            steps.store_rows(gradients.partial_dv, partial * F.E, dv_acc, F.E, F.BLOCK_E, valid)


@triton.jit
def chunk_rows(T, first, length, heads):
    """Batch row and numbers of this program's rows of a chunk, `heads` a token."""
    tiles = tl.cdiv(length * heads, REDUCE_ROWS)
    b, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    i = tile * REDUCE_ROWS + tl.arange(0, REDUCE_ROWS)
    return b.to(tl.int64), i, i < length * heads


@triton.jit(do_not_specialize=LENGTHS)
def nsa_selected_reduce_out(
    partial_out, partial_lse, block_indices, out, lse, combine, T, n, first, length, F: tl.constexpr
):  # fmt: skip
    """One program: M rows (token, head) of a chunk. Reduces the partials of a row's slots, lse in
    units of log2, and with ADD out and lse, into these. COMBINE: writes the layer's output, too."""
    H: tl.constexpr = F.R * F.G
    b, i, real = chunk_rows(T, first, length, H)
    row = (b * T + first) * H + i
    indices = block_indices + ((b * T + first) * F.R + i // F.G) * n
    base = (b * length * F.R + i // F.G) * (n * F.G) + i % F.G

    # the maximum over all slots first: then no partial waits for the previous one
    slot = tl.arange(0, F.SLOTS)
    mask = real[:, None] & (slot < n)[None]
    mask = mask & (tl.load(indices[:, None] + slot[None], mask=mask, other=-1) >= 0)
    all_slots = base[:, None] + slot[None] * F.G
    logs = tl.load(partial_lse + all_slots, mask=mask, other=float("-inf"))
    m = tl.max(logs, 1)
    if F.ADD:
        stored_lse = tl.load(lse + row, mask=real, other=float("-inf")) * 1.4426950408889634
        m = tl.maximum(m, stored_lse)
    origin = tl.where(m == float("-inf"), 0.0, m)
    l = tl.sum(tl.exp2(logs - origin[:, None]), 1)
    acc = tl.full([REDUCE_ROWS, F.BLOCK_E], 0.0, tl.float32)
    if F.ADD:
        weight = tl.exp2(stored_lse - origin)
        acc = steps.load_rows(out, row * F.E, F.E, F.BLOCK_E, real).to(tl.float32) * weight[:, None]
        l += weight
    for j in tl.range(0, n, loop_unroll_factor=4):
        chosen = real & (tl.load(indices + j, mask=real, other=-1) >= 0)
        offset = base + j * F.G
        weight = tl.exp2(tl.load(partial_lse + offset, mask=chosen, other=float("-inf")) - origin)
        o = steps.load_rows(partial_out, offset * F.E, F.E, F.BLOCK_E, chosen, STREAM=True)
        acc += weight[:, None] * o.to(tl.float32)
    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    acc = acc / l[:, None]
    if F.COMBINE:
        steps.store_combined(combine, acc, b, first + i // H, i % H, row, F.E, F.BLOCK_E, real)
    steps.store_rows(out, row * F.E, acc, F.E, F.BLOCK_E, real)
    log = tl.where(empty, float("-inf"), (m + tl.log2(l)) * 0.6931471805599453)
    tl.store(lse + row, log, mask=real)


@triton.jit
def add_partials(
    d, partials, row, j, begin, end, valid, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    F: tl.constexpr,
):  # fmt: skip
    """Adds keys j of partials begin .. end - 1 to rows of d, in order."""
    acc = steps.load_rows(d, row * WIDTH, WIDTH, BLOCK, valid)
    for partial in tl.range(begin, end, loop_unroll_factor=4):
        acc += steps.load_rows(partials, (partial * F.s + j) * WIDTH, WIDTH, BLOCK, valid)
    steps.store_rows(d, row * WIDTH, acc, WIDTH, BLOCK, valid)


@triton.jit(do_not_specialize=LENGTHS)
def nsa_selected_reduce_dkv(
    gradients, partial_offsets, S, C, head, BLOCK_N: tl.constexpr, F: tl.constexpr
):  # fmt: skip
    """One program: N keys of a block with several work tiles. Adds the partials to dk or dv."""
    block = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(partial_offsets + block), tl.load(partial_offsets + block + 1)
    if begin < end:
        b, h, c = block // C // F.HEADS, head + block // C % F.HEADS, block % C
        j = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = (j < F.s) & (c * F.s + j < S)
        offset = (b * S + c * F.s + j) * F.K + h
        d = gradients
        if tl.program_id(2) == 0:
            add_partials(d.dk, d.partial_dk, offset, j, begin, end, valid, F.D, F.BLOCK_D, F)
        else:
            add_partials(d.dv, d.partial_dv, offset, j, begin, end, valid, F.E, F.BLOCK_E, F)


@triton.jit(do_not_specialize=LENGTHS)
def nsa_selected_reduce_dq(
    partial_dq, pair_indices, dq, T, n, first, length, head, F: tl.constexpr
):  # fmt: skip
    """One program: M rows (token, head) of a chunk. Writes dq, with ADD adds to it: the sum of
    partials over slots and key tiles."""
    GROUPS: tl.constexpr = F.R // F.K * F.HEADS  # head groups of a token
    b, i, real = chunk_rows(T, first, length, GROUPS * F.G)
    token, group = first + i // F.G // GROUPS, head * (F.R // F.K) + i // F.G % GROUPS
    group_row = (b * T + token) * F.R + group
    row, slots = group_row * F.G + i % F.G, group_row * n
    acc = tl.full([REDUCE_ROWS, F.BLOCK_D], 0.0, tl.float32)
    if F.ADD:
        acc = steps.load_rows(dq, row * F.D, F.D, F.BLOCK_D, real).to(tl.float32)
    for slot in tl.range(0, n * F.KEY_TILES, loop_unroll_factor=4):
        offset = pair_indices + slots + slot // F.KEY_TILES
        pair = tl.load(offset, mask=real, other=-1).to(tl.int64)
        partial = (pair * F.KEY_TILES + slot % F.KEY_TILES) * F.G + i % F.G
        rows = steps.load_rows(partial_dq, partial * F.D, F.D, F.BLOCK_D, pair >= 0, STREAM=True)
        acc += rows.to(tl.float32)
    steps.store_rows(dq, row * F.D, acc, F.D, F.BLOCK_D, real)


def is_faster(inputs: Inputs) -> bool:
    """Whether forward and dq are key-major: query-major tiles would have few rows, and a key-major
    tile can hold the keys and values of a block."""
    facts, F = inputs.facts, inputs.facts.F
    size = launch.padded(F.s) * (F.BLOCK_D + F.BLOCK_E) * facts.dtype.itemsize
    few = facts.rows < launch.FEW_ROWS and not F.GATES
    return few and size <= launch.architecture().block_bytes


@functools.lru_cache(maxsize=256)
def plan(
    kernel: str, facts: Facts, length: int, heads: int, is_gluon: bool = False, **flags: bool
) -> Args:
    """How to launch "forward" or "backward" over a chunk of `length` tokens and `heads` heads."""
    F = facts.F
    tile = launch.key_major_tile(kernel, max(F.D, F.E), F.G, facts.dtype)
    keys = launch.padded(F.s)
    if kernel == "backward" and not is_gluon:
        keys = min(keys, tile.block_n)
    # rows of d_out, of partials, of dk
    num_rows = length * heads * (F.R // F.K * F.G) * F.n * launch.cdiv(F.s, tile.block_n)
    elements = max(facts.T * F.R * F.G, num_rows, facts.S * F.K) * max(F.D, F.E)
    wide = facts.B * max(elements, facts.T * F.R * F.n) >= 1 << 31
    # a chunk has HEADS KV heads, a block KEY_TILES tiles of BLOCK_N keys. With WHOLE tiles have no
    # padding keys, and each row sees all keys
    F = F._replace(
        HEADS=heads, BLOCK_M=tile.block_m, BLOCK_N=keys, KEY_TILES=launch.cdiv(F.s, keys),
        WHOLE=launch.padded(F.s) == F.s and facts.whole, WIDE=facts.wide or wide, **flags,
    )  # fmt: skip
    return dict(F=F, num_warps=tile.num_warps, num_stages=tile.num_stages)


def arguments(inputs: Inputs, csr: CSR, chunk: Chunk) -> Args:
    """Arguments of both kernels over work tiles."""
    facts = inputs.facts
    q, k, v = (launch.strided(t) for t in (inputs.q, inputs.k, inputs.v))
    return dict(
        q=q, k=k, v=v, index=inputs.index(), csr=chunk.csr, tile_pairs=csr.tile_pairs, T=facts.T,
        S=facts.S, C=facts.C, BLOCKS=csr.blocks, start=inputs.selection.start,
    )  # fmt: skip


def forward(inputs: Inputs, csr: CSR, gluon: Any, outputs: Args, flags: Args) -> None:
    """Writes `outputs`, arguments of `nsa_selected_reduce_out`, by the kernel of the module `gluon`
    if there is one. Chunks have all heads."""
    facts, F, H = inputs.facts, inputs.facts.F, inputs.q.shape[2]
    # of each pair and head, in the longest chunk; lse in units of log2
    rows = facts.B * min(csr.length, facts.T) * H * F.n
    partial_out, partial_lse = inputs.q.new_empty(rows, F.E), outputs["lse"].new_empty(rows)
    partials = dict(partial_out=partial_out, partial_lse=partial_lse)
    for chunk in csr.chunks():
        step = plan("forward", facts, chunk.length, F.K, **flags)
        chunk_args = partials | dict(first=chunk.first, length=chunk.length)
        if gluon is not None:
            gluon.forward(inputs, chunk_args, csr, chunk)
        else:
            launcher(nsa_selected_fwd_key_major, (csr.max_tiles,))(
                **arguments(inputs, csr, chunk), **step, **chunk_args,
                scale_log2=inputs.scale * launch.LOG2_E, cap=launch.cap(inputs.selection.soft_cap),
            )  # fmt: skip
        tiles = launch.cdiv(chunk.length * H, REDUCE_ROWS.value)
        launcher(nsa_selected_reduce_out, (facts.B * tiles,))(
            **chunk_args, **outputs, block_indices=inputs.selection.block_indices, T=facts.T, n=F.n,
            F=step["F"],
        )  # fmt: skip


def backward(
    inputs: Inputs, bwd: launch.BackwardInputs, csr: CSR, gluon: Any, dk: Tensor, dv: Tensor,
    dq: launch.Accumulator | None,
) -> None:  # fmt: skip
    """Accumulates dk [B S K D] and dv [B S K E] in float32, and dq if given, by the kernels of the
    module `gluon` if there are some. Pairs have several tokens only with these and without dq."""
    facts, F, H = inputs.facts, inputs.facts.F, inputs.q.shape[2]
    dq_out, add = (None, False) if dq is None else dq.next_launch()
    for chunk in csr.chunks():
        step = plan(
            "backward", facts, chunk.length, csr.heads, gluon is not None, DQ=dq is not None,
            GATED=bwd.gated, ADD=add,
        )  # fmt: skip
        chunk_rows, tiles = chunk.length * csr.heads * (H // F.K), step["F"].KEY_TILES
        partial_dq = None
        if dq is not None:
            partial_dq = inputs.q.new_empty(facts.B * chunk_rows * F.n * tiles, F.D)
        partials = (d.new_empty(csr.num_partials, F.s, d.shape[-1]) for d in (dk, dv))
        gradients = Gradients(dk, dv, *partials)
        if gluon is not None:
            gluon.backward(inputs, bwd, gradients, partial_dq, csr, chunk)
        else:
            launcher(nsa_selected_bwd_key_major, (csr.max_tiles, tiles))(
                **arguments(inputs, csr, chunk), **step, head=chunk.head, gradients=gradients,
                bwd=Backward(bwd.d_out, bwd.lse, bwd.delta), partial_dq=partial_dq,
                scale=inputs.scale, cap=launch.cap(inputs.selection.soft_cap, log2=False),
            )  # fmt: skip
        keys = DKV_KEYS if csr.blocks >= launch.ENOUGH_PROGRAMS else DKV_KEYS // 4
        launcher(nsa_selected_reduce_dkv, (csr.blocks, launch.cdiv(F.s, keys), 2))(
            gradients, chunk.csr.partial_offsets, facts.S, facts.C, chunk.head, keys, step["F"]
        )
        if dq is not None:
            grid = (facts.B * launch.cdiv(chunk_rows, REDUCE_ROWS.value),)
            launcher(nsa_selected_reduce_dq, grid)(
                partial_dq, csr.pair_indices, dq_out, facts.T, F.n, chunk.first, chunk.length,
                chunk.head, step["F"],
            )  # fmt: skip
        del partial_dq, gradients
