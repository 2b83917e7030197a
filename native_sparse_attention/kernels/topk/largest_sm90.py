"""Ranking by importance="max" for Hopper GPUs, in Gluon: products of mean queries with all keys of
the blocks, the largest of each block, and a running top n, all on chip. By "head_max" a leader has
a query of each head of its group: HEADS rows of a tile in each of LAYERS products with the same
keys. A thread takes the largest of the layers before it compares rows.

A persistent program ranks tiles of CONSUMERS x ROWS leaders. A producer warp copies tiles of KEYS
keys into a ring, which two consumer warpgroups multiply by their queries. Keys lie in an order in
which a thread of the product's accumulator holds keys of a single block of four for each of its two
rows: it takes their maximum, and keeps the n best of its blocks sorted in registers. At the end the
four threads of a row merge their columns. A score costs no exchange between threads.

With `ranking_bits=8` keys and queries are integers, whose products take half the time and bytes.
The integers of a block have one size, by which its largest product alone is multiplied.

The second stage of a ranking reads those of a tile's groups of blocks alone that some of its
leaders keep. Each row walks through its own groups, which are in order as the tile's are.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..common import gluon_sm90 as hopper
from ..common import launch
from ..common import primitives as steps
from ..common.launch import cdiv, strided
from ..common.precompile import launcher
from . import topn

CONSUMERS, ROWS, KEYS = gl.constexpr(2), gl.constexpr(64), gl.constexpr(128)
# blocks of a group, whose keys fill tiles together
BLOCKS = gl.constexpr(4)
THREADS = gl.constexpr(32 * (4 * CONSUMERS.value + 1))
# slots of the ring; named barrier after theirs, by which consumers release the queries
STAGES, QUERIES = gl.constexpr(4), gl.constexpr(7)
REGISTERS = gl.constexpr(240)
# layouts of products of float16, and of 8-bit integers
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS.value, 16]))
ACC_8 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS.value, 32]))
# most blocks of a ranking, widths of heads, and keys of a block
MAX_SLOTS, WIDTHS, BLOCK_KEYS = 32, (16, 32, 64, 128), (32, 64, 128)
# leaders of a work tile
TILE = CONSUMERS.value * ROWS.value
LENGTHS = ["first_token", "T", "C", "GROUPS", "TILES", "LINES", "RANKS"]

# heads, rows of a leader in each of LAYERS products, and their width; keys of a block, in STEPS
# tiles for a group; top n; tokens that share it; groups that a leader keeps, a power of two, 0 for
# all; bits of the products' numbers, and of keys before they are rounded to these
Settings = namedtuple(
    "Settings",
    "G HEADS LAYERS RANKS_PER_KV D PER_BLOCK STEPS SLOTS INITIAL LOCAL d s STRIDE CAUSAL KEPT BITS "
    "KEY_BITS",
)
Memory = namedtuple("Memory", "q q_bar k full")
Problem = namedtuple("Problem", "starts first_token T C GROUPS TILES LINES RANKS kept")
# groups that the leaders of a tile keep: how many, and their numbers [LINES TILES GROUPS] in order;
# and the numbers of each row's leader [LINES TILES 128 KEPT + 1], followed by NO_GROUP
Kept = namedtuple("Kept", "count of_tile of_leader")
NO_GROUP = gl.constexpr(1 << 30)


@triton.jit(do_not_specialize=["W", "K", "C", "GROUPS"])
def nsa_topk_key_tiles(ck, keys, sizes, W, K, C, GROUPS, sign, F: tl.constexpr):
    """One program: the keys of a group of blocks of one row and KV head, as tiles [STEPS, 128, D]
    in float16, and the power of two [4] that undoes a block's scaling; or 8-bit integers and their
    sizes [4]. Column n of a tile is key `n // 8 * 2 + n % 2` of 32 of block `n % 8 // 2`."""
    group, line = tl.program_id(0), tl.program_id(1)
    b, h = (line // K).to(tl.int64), (line % K).to(tl.int64)
    n, i = tl.arange(0, 128), tl.arange(0, 4)
    block, key = n % 8 // 2, n // 8 * 2 + n % 2
    c = group * 4 + block
    largest = tl.full([4], 0.0, tl.float32)
    if F.KEY_BITS == 4:  # of each feature
        least = tl.full([4, F.D], float("inf"), tl.float32)
        most = -least
    for step in range(F.STEPS):
        # a key that is missing is another key of its block: the largest stays
        w = tl.minimum(tl.minimum(c, C - 1) * F.PER_BLOCK + step * 32 + key, W - 1)
        rows = b * ck.b + h * ck.h + w.to(tl.int64) * ck.n
        x = steps.load_rows(ck.ptr, rows, F.D, F.D, n >= 0).to(tl.float32)
        if F.KEY_BITS == 4:
            in_blocks = tl.reshape(x, [16, 4, 2, F.D])
            least = tl.minimum(least, tl.min(tl.min(in_blocks, 2), 0))
            most = tl.maximum(most, tl.max(tl.max(in_blocks, 2), 0))
        x = tl.reshape(tl.max(tl.abs(x), 1), [16, 4, 2])
        largest = tl.maximum(largest, tl.max(tl.max(x, 2), 0))
    if F.BITS == 8:
        factor = steps.factor_of_integers(largest, F.KEY_BITS)
        size = steps.quotient(1.0, factor)
        if F.KEY_BITS == 4:
            least = steps.round_even(least * factor[:, None])[None, :, None]
            most = steps.round_even(most * factor[:, None])[None, :, None]
    else:
        exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 1), 253)
        factor = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        size = (exponent << 23).to(tl.float32, bitcast=True)
    signed = 1.0 if F.KEY_BITS == 4 else sign  # 16 values round to other ones with another sign
    factor = tl.sum(tl.where(i[None] == block[:, None], factor[None] * signed, 0.0), 1)
    tl.store(sizes + line.to(tl.int64) * (GROUPS * 4) + group * 4 + i, size)
    for step in range(F.STEPS):
        w = tl.minimum(tl.minimum(c, C - 1) * F.PER_BLOCK + step * 32 + key, W - 1)
        rows = b * ck.b + h * ck.h + w.to(tl.int64) * ck.n
        x = steps.load_rows(ck.ptr, rows, F.D, F.D, n >= 0).to(tl.float32) * factor[:, None]
        if F.BITS == 8:
            x = steps.round_even(x)
        if F.KEY_BITS == 4:
            size_of_step = steps.step_of_codes(least, most)
            code = steps.code_of(tl.reshape(x, [16, 4, 2, F.D]), least, size_of_step)
            x = tl.reshape(least + code * size_of_step, [128, F.D]) * sign
        row = ((line.to(tl.int64) * GROUPS + group) * F.STEPS + step) * 128 + n
        tl.store(keys + row[:, None] * F.D + tl.arange(0, F.D)[None], x.to(keys.dtype.element_ty))


@triton.jit(do_not_specialize=["first_token", "T", "TILES", "RANKS"])
def nsa_topk_mean_queries(q, queries, starts, first_token, T, TILES, RANKS, F: tl.constexpr):
    """One program: 128 queries of one row and ranking head, but for a positive factor: the mean of
    its G heads, or each of them, in float16 or as 8-bit integers [LINES TILES LAYERS 128 D]."""
    line = tl.program_id(1)
    b, r = (line // RANKS).to(tl.int64), (line % RANKS).to(tl.int64)
    if starts is not None:
        first_token = tl.load(starts + b).to(tl.int32)
    HEADS: tl.constexpr = F.LAYERS * F.HEADS
    row = tl.program_id(0) * 128 + tl.arange(0, 128)
    leader, head_of_leader = row // HEADS, row % HEADS
    _, token, ranked = steps.leaders(leader, first_token, T, F.STRIDE)
    q_sum = tl.full([128, F.D], 0.0, tl.float32)
    for g in range(F.G if HEADS == 1 else 1):
        head = g + tl.minimum(head_of_leader, F.G - 1)  # padding is the last head again
        rows = b * q.b + token.to(tl.int64) * q.n + (r * F.G + head) * q.h
        q_sum += steps.load_rows(q.ptr, rows, F.D, F.D, ranked).to(tl.float32)
    if F.BITS == 8:
        high, _ = steps.quantize(q_sum, HEADS)
    else:
        high, _, _ = steps.two_halves(q_sum, HEADS)
    LEADERS: tl.constexpr = 128 // F.HEADS  # of a tile
    layer = leader // LEADERS * F.LAYERS + head_of_leader // F.HEADS
    row = layer * 128 + leader % LEADERS * F.HEADS + head_of_leader % F.HEADS
    row = (line.to(tl.int64) * (TILES * F.LAYERS * 128) + row)[:, None]
    tl.store(queries + row * F.D + tl.arange(0, F.D)[None], high.to(queries.dtype.element_ty))


@triton.jit(do_not_specialize=["first_token", "T", "GROUPS", "TILES", "RANKS"])
def nsa_topk_unions(groups, kept, starts, first_token, T, GROUPS, TILES, RANKS, N, F: tl.constexpr,
                    BINS: tl.constexpr):  # fmt: skip
    """One program: which of the groups [B T R N] a tile of leaders of one row and ranking head
    keep, in order, and those of each row's leader."""
    tile, line = tl.program_id(0), tl.program_id(1)
    b, r = (line // RANKS).to(tl.int64), (line % RANKS).to(tl.int64)
    if starts is not None:
        first_token = tl.load(starts + b).to(tl.int32)
    index = tile * 128 + tl.arange(0, 128)
    _, token, ranked = steps.leaders(index // F.HEADS, first_token, T, F.STRIDE)
    i = tl.arange(0, F.KEPT)
    row = (b * T + token) * RANKS + r
    is_slot = ranked[:, None] & (i < N)[None]
    group = tl.load(groups + row[:, None] * N + i[None], mask=is_slot, other=-1)
    group = tl.where(group < 0, NO_GROUP, group)
    leader = line.to(tl.int64) * (TILES * 128) + index
    of_leader = kept.of_leader + leader[:, None] * (F.KEPT + 1)
    tl.store(of_leader + i[None], tl.sort(group, 1))
    tl.store(of_leader + F.KEPT, tl.full([128, 1], NO_GROUP, tl.int32))

    flat = tl.reshape(tl.minimum(group, BINS - 1), [128 * F.KEPT])
    number = tl.arange(0, BINS)
    is_kept = (tl.histogram(flat, BINS) > 0) & (number < GROUPS)
    place = tl.cumsum(is_kept.to(tl.int32), 0) - 1
    tiles = line.to(tl.int64) * TILES + tile
    tl.store(kept.of_tile + tiles * GROUPS + place, number, mask=is_kept)
    tl.store(kept.count + tiles, tl.sum(is_kept.to(tl.int32), 0))


@gluon.jit
def work_tile(nth, call, F: gl.constexpr):
    """The nth tile, the last and longest of all lines first: its number, its line, the position of
    the call's first token, and the groups of blocks that its leaders rank. Every other turn of the
    programs goes backwards, but for the last one, so that they have equal work."""
    programs = gl.num_programs(0)
    turn, turns = nth // programs, gl.cdiv(call.TILES * call.LINES, programs)
    if (turns - turn) % 2 == 0:
        nth = (2 * turn + 1) * programs - 1 - nth
    tile, line = call.TILES - 1 - nth // call.LINES, nth % call.LINES
    first = call.first_token
    if call.starts is not None:
        first = gl.load(call.starts + line // call.RANKS).to(gl.int32)
    position = (first // F.STRIDE + (tile + 1) * (CONSUMERS * ROWS // F.HEADS) - 1) * F.STRIDE
    # leaders are tokens of the call
    position = gl.minimum(position, first + call.T - 1)
    end = steps.candidates_end(position, call.C, F.LOCAL, F.d, F.s, F.CAUSAL)
    begin, end = F.INITIAL // BLOCKS, gl.cdiv(gl.maximum(end, 0), BLOCKS)
    if F.KEPT:
        begin, end = 0, gl.load(call.kept.count + line * call.TILES + tile)
    return tile, line, first, begin, end


@gluon.jit
def group_at(i, end, tile, line, call, F: gl.constexpr):
    """The number of a tile's i-th group of blocks; of the last one from `end` on."""
    if F.KEPT:
        row = (line * call.TILES + tile).to(gl.int64) * call.GROUPS
        return gl.load(call.kept.of_tile + row + gl.maximum(gl.minimum(i, end - 1), 0))
    else:
        return i


@gluon.jit
def produce(queries, keys, call, memory, F: gl.constexpr):
    """Producer warp: a tile's queries, and the keys of its groups of blocks."""
    turn = 0
    q_bar = memory.q_bar.index(0)
    for nth in range(gl.program_id(0), call.TILES * call.LINES, gl.num_programs(0)):
        tile, line, _first, begin, end = work_tile(nth, call, F)
        if nth >= gl.num_programs(0):
            hopper.named_barrier("sync", QUERIES, THREADS)
        mbarrier.expect(q_bar, F.LAYERS * CONSUMERS * ROWS * F.D * F.BITS // 8)
        for i in gl.static_range(F.LAYERS * CONSUMERS):
            row = ((line * call.TILES + tile) * F.LAYERS * CONSUMERS + i) * ROWS
            hopper.load_box(queries, [row, 0], q_bar, memory.q.index(i))
        kv_line = line // F.RANKS_PER_KV
        group = group_at(begin, end, tile, line, call, F)
        for i in range(begin, end):
            next_group = group_at(i + 1, end, tile, line, call, F)
            for step in range(F.STEPS):
                slot = turn % STAGES
                if turn >= STAGES:
                    hopper.named_barrier("sync", slot, THREADS)
                bar = memory.full.index(slot)
                mbarrier.expect(bar, KEYS * F.D * F.BITS // 8)
                row = ((kv_line * call.GROUPS + group) * F.STEPS + step) * KEYS
                hopper.load_box(keys, [row, 0], bar, memory.k.index(slot))
                turn += 1
            group = next_group
    # complete every barrier before the warp exits: a program has a tile or more
    hopper.named_barrier("sync", QUERIES, THREADS)
    for i in range(gl.maximum(turn - STAGES, 0), turn):
        hopper.named_barrier("sync", i % STAGES, THREADS)


@gluon.jit
def largest_of_blocks(x):
    """The largest of each block [ROWS, BLOCKS] of products [ROWS, KEYS], without an exchange."""
    x = gl.reshape(x, [ROWS, KEYS // (2 * BLOCKS), BLOCKS, 2])
    return gl.max(gl.max(x, 3), 1)


@gluon.jit
def largest_of_heads(x, F: gl.constexpr):
    """The largest of each leader's rows, in each of them [ROWS, BLOCKS]."""
    of_heads = gl.reshape(x, [ROWS // F.HEADS, F.HEADS, BLOCKS])
    largest, _ = gl.broadcast(gl.expand_dims(gl.max(of_heads, 1), 1), of_heads)
    return gl.convert_layout(gl.reshape(largest, [ROWS, BLOCKS]), x.type.layout)


@gluon.jit
def write(scores, blocks, out, leader_indices, tile, line, first, call, CONSUMER: gl.constexpr,
          F: gl.constexpr):  # fmt: skip
    """Merge the columns of each row, best first, and write them for the tokens of its group. A
    group whose leader came before this call gets the ranking at `leader_indices`."""
    ROW: gl.constexpr = gl.SliceLayout(1, scores[0].type.layout)
    i = gl.arange(0, ROWS, ROW)
    index = (tile * CONSUMERS + CONSUMER) * ROWS + i
    token = (first // F.STRIDE + index // F.HEADS) * F.STRIDE - first
    b, r = line // call.RANKS, line % call.RANKS
    SLOTS: gl.constexpr = F.SLOTS
    for slot in gl.static_range(SLOTS):
        best = gl.max(scores[0], 1)
        is_best = scores[0] == best[:, None]
        c = gl.min(gl.where(is_best, blocks[0], topn.NO_BLOCK), 1)
        scores, blocks = topn.take(scores, blocks, c)
        value = gl.where(c == topn.NO_BLOCK, -1, c)
        if F.STRIDE > 1:
            leader = -1
            if leader_indices is not None:
                leader = gl.load(leader_indices + line * F.SLOTS + slot)
            value = gl.where(token < 0, leader, value)
        for j in range(F.STRIDE):
            t = token + j
            row = (b * call.T + t).to(gl.int64) * call.RANKS + r
            is_new = (t >= 0) & (t < call.T) & (index % F.HEADS == 0)
            gl.store(out + row * F.SLOTS + slot, value, mask=is_new)


@gluon.jit
def consume(sizes, out, leader_indices, call, memory, CONSUMER: gl.constexpr, F: gl.constexpr):
    """Consumer warpgroup: the rankings of its rows of each tile."""
    NUMBER: gl.constexpr = gl.int32 if F.BITS == 8 else gl.float32
    LEAST: gl.constexpr = -(1 << 31) if F.BITS == 8 else float("-inf")
    zero = gl.zeros([ROWS, KEYS], NUMBER, ACC_8 if F.BITS == 8 else ACC)
    SLOTS: gl.constexpr = F.SLOTS
    LAYERS: gl.constexpr = F.LAYERS
    PRODUCTS: gl.constexpr = F.STEPS * LAYERS
    # wider products take longer than the maxima: one at a time is as fast; deep columns take the
    # registers of another
    IS_PAIR: gl.constexpr = (F.D == 64 or F.BITS == 8) and SLOTS <= 16
    PAIR: gl.constexpr = 2 if PRODUCTS > 1 and IS_PAIR else 1
    COLUMNS: gl.constexpr = largest_of_blocks(zero).type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, COLUMNS)
    i, column = gl.arange(0, ROWS, ROW), gl.arange(0, BLOCKS, gl.SliceLayout(0, COLUMNS))
    turn = 0
    q_phase = 0
    for nth in range(gl.program_id(0), call.TILES * call.LINES, gl.num_programs(0)):
        tile, line, first, begin, end = work_tile(nth, call, F)
        index = (tile * CONSUMERS + CONSUMER) * ROWS + i
        position = (first // F.STRIDE + index // F.HEADS) * F.STRIDE
        row_end = steps.candidates_end(position, call.C, F.LOCAL, F.d, F.s, F.CAUSAL)
        size_row = sizes + (line // F.RANKS_PER_KV).to(gl.int64) * (call.GROUPS * BLOCKS)
        group = group_at(begin, end, tile, line, call, F)
        size = gl.load(size_row + group * BLOCKS + column, mask=column < (end - begin) * BLOCKS,
                       other=0.0)  # fmt: skip
        if F.KEPT:
            # a leader's next group
            own = call.kept.of_leader
            own += ((line * call.TILES * (CONSUMERS * ROWS)) + index).to(gl.int64) * (F.KEPT + 1)
            own_group = gl.load(own)
        scores = ()
        blocks = ()
        for _ in gl.static_range(SLOTS):
            scores += (gl.full([ROWS, BLOCKS], float("-inf"), gl.float32, COLUMNS),)
            blocks += (gl.full([ROWS, BLOCKS], topn.NO_BLOCK, gl.int32, COLUMNS),)
        mbarrier.wait(memory.q_bar.index(0), q_phase)
        for i_group in range(begin, end):
            c = group * BLOCKS + column
            next_group = group_at(i_group + 1, end, tile, line, call, F)
            is_next = column < (end - 1 - i_group) * BLOCKS
            next_size = gl.load(size_row + next_group * BLOCKS + column, mask=is_next, other=0.0)
            best = gl.full([ROWS, BLOCKS], LEAST, NUMBER, COLUMNS)
            for _pair in range(PRODUCTS // PAIR):
                # while the first product's maxima are taken, the second one is formed
                products = ()
                for i_pair in gl.static_range(PAIR):
                    tile_of_keys, layer = (turn + i_pair) // LAYERS, (turn + i_pair) % LAYERS
                    slot = tile_of_keys % STAGES
                    mbarrier.wait(memory.full.index(slot), (tile_of_keys // STAGES) & 1)
                    q = memory.q.index(layer * CONSUMERS + CONSUMER)
                    k = memory.k.index(slot).permute((1, 0))
                    products += (warpgroup_mma(q, k, zero, use_acc=False, is_async=True),)
                for i_pair in gl.static_range(PAIR):
                    x = warpgroup_mma_wait(PAIR - 1 - i_pair, deps=[products[i_pair]])
                    tile_of_keys, layer = (turn + i_pair) // LAYERS, (turn + i_pair) % LAYERS
                    if layer == LAYERS - 1:
                        hopper.named_barrier("arrive", tile_of_keys % STAGES, THREADS)
                    best = gl.maximum(best, largest_of_blocks(x))
                turn += PAIR
            is_candidate = (c >= F.INITIAL)[None] & (c[None] < row_end[:, None])
            if F.KEPT:
                is_own = own_group == group
                own += is_own.to(gl.int32)
                own_group = gl.load(own, mask=is_own, other=own_group)
                is_candidate &= is_own[:, None]
            if F.HEADS > 1:
                best = largest_of_heads(best, F)
            score = gl.where(is_candidate, best.to(gl.float32) * size[None], float("-inf"))
            # a column as deep as the top n loses none of it
            columns, c = (scores, blocks, score), gl.broadcast(c[None], score)[0]
            scores, blocks, _lost = topn.insert(columns, score, c)
            size = next_size
            group = next_group
        hopper.named_barrier("arrive", QUERIES, THREADS)
        q_phase ^= 1
        write(scores, blocks, out, leader_indices, tile, line, first, call, CONSUMER, F)


@gluon.jit(do_not_specialize=LENGTHS)
def nsa_topk_largest_sm90(
    queries, keys, sizes, kept, out, leader_indices, starts, first_token, T, C, GROUPS, TILES,
    LINES, RANKS, F: gl.constexpr,
):  # fmt: skip
    """One persistent program per multiprocessor: block indices of tiles of leaders of a row and
    ranking head, from their mean queries and the keys of their candidates."""
    call = Problem(starts, first_token, T, C, GROUPS, TILES, LINES, RANKS, kept)
    memory = Memory(
        hopper.buffers(queries, F.LAYERS * CONSUMERS), hopper.barriers(1, 1),
        hopper.buffers(keys, STAGES), hopper.barriers(STAGES, 1),
    )  # fmt: skip
    fence_async_shared()
    hopper.thread_barrier()
    gl.warp_specialize(
        [
            (consume, (sizes, out, leader_indices, call, memory, 0, F)),
            (consume, (sizes, out, leader_indices, call, memory, 1, F)),
            (produce, (queries, keys, call, memory, F)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


def is_supported(q: Tensor, ranks: int, config: Any, documents: Any) -> bool:
    """Whether the kernel supports a ranking of q [B T H D] by `ranks` heads, on a GPU that runs
    Gluon kernels, and is faster. `launch.using({"largest_sm90": True})` ignores the number of
    tokens; False disables the kernel."""
    s, d, forced = config.selection_block_size, config.d, launch.override.get("largest_sm90")
    # a product takes 16 features in float16, 32 integers
    sizes = q.shape[-1] in WIDTHS and q.shape[-1] >= (32 if config.ranks_by_integers else 16)
    sizes = sizes and q.dtype.itemsize == 2 and s % d == 0 and s // d in BLOCK_KEYS
    is_ranked = config.ranks_by_largest and config.num_selected_blocks <= MAX_SLOTS
    if config.ranks_by_heads:  # rows of a leader lie in one warp
        is_ranked &= q.shape[2] <= 16 * ranks
    fills = forced or q.shape[1] >= TILE * config.selection_stride
    return bool(forced is not False and is_ranked and sizes and documents is None and fills)


def select_blocks(
    q: Tensor, ck: Tensor, config: Any, out: Tensor, num_ranked: int, start: int,
    starts: Tensor | None, leaders: Tensor | None, kept_groups: Tensor | None = None,
) -> None:  # fmt: skip
    """As `selection.select_blocks`, of the calls that `is_supported`."""
    (B, T, H, D), (W, K), ranks = q.shape, ck.shape[1:3], out.shape[2]
    s, d, stride = config.selection_block_size, config.d, config.selection_stride
    per_block, groups = s // d, cdiv(num_ranked, BLOCKS.value)
    heads = launch.next_power_of_2(H // ranks) if config.ranks_by_heads else 1
    bits = 8 if config.ranks_by_integers else 16
    # as many as shared memory holds
    layers = min(heads, 4 if D * bits <= 1024 else 2)
    F = Settings(
        H // ranks, heads // layers, layers, ranks // K, D, per_block, per_block // 32,
        config.num_selected_blocks, config.num_initial_blocks, max(config.num_local_blocks, 1), d,
        s, stride, config.causal,
        0 if kept_groups is None else launch.next_power_of_2(kept_groups.shape[3]),
        bits, config.ranking_bits,
    )  # fmt: skip
    tiles = cdiv(cdiv(T + stride - 1, stride), TILE // F.HEADS)
    lines, scale = B * ranks, config.scale_of(D)
    dtype = torch.int8 if F.BITS == 8 else torch.float16
    keys = ck.new_empty(B * K * groups * F.STEPS * KEYS.value, D, dtype=dtype)
    sizes = ck.new_empty(B * K, groups * BLOCKS.value, dtype=torch.float32)
    queries = q.new_empty(lines * tiles * layers * TILE, D, dtype=dtype)
    sign = float((scale > 0) - (scale < 0))
    launcher(nsa_topk_key_tiles, (groups, B * K))(
        strided(ck), keys, sizes, W=W, K=K, C=num_ranked, GROUPS=groups, sign=sign, F=F
    )
    launcher(nsa_topk_mean_queries, (tiles * layers, lines))(
        strided(q), queries, starts, first_token=start, T=T, TILES=tiles, RANKS=ranks, F=F,
        num_warps=8,
    )  # fmt: skip
    kept = None
    if kept_groups is not None:
        kept = Kept(*(
            torch.empty(shape, dtype=torch.int32, device=q.device)
            for shape in ((lines, tiles), (lines, tiles, groups), (lines, tiles, TILE, F.KEPT + 1))
        ))  # fmt: skip
        launcher(nsa_topk_unions, (tiles, lines))(
            kept_groups, kept, starts, first_token=start, T=T, GROUPS=groups, TILES=tiles,
            RANKS=ranks, N=kept_groups.shape[3], F=F, BINS=launch.next_power_of_2(groups + 1),
            num_warps=8,
        )  # fmt: skip
    programs = min(tiles * lines, launch.multiprocessors(q.device))
    launcher(nsa_topk_largest_sm90, (programs,))(
        queries=launch.gluon_box(queries, [ROWS.value, D]),
        keys=launch.gluon_box(keys, [KEYS.value, D]), sizes=sizes, kept=kept, out=out,
        leader_indices=leaders, starts=starts, first_token=start, T=T, C=num_ranked, GROUPS=groups,
        TILES=tiles,
        LINES=lines, RANKS=ranks, F=F, num_warps=4,
    )  # fmt: skip
