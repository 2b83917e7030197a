"""The selected branch, key-major: a program reads one block of keys and values and the queries that
chose it. It computes dk and dv. For small head groups, whose query-major tiles would be nearly
empty, it also computes the forward and dq, as partials that other kernels reduce for each query.
Every reduction has a fixed order.

Rows of a tile are pairs (see `csr.py`) x heads. Pair e of block indices [B T R n] is slot e % n of
head group e // n % R of token e // (n R). Partials have one row per pair and head. The forward's
are in the order of the block indices, so that the lse of a query's slots are adjacent. Partial dq
is in the order of the chunk's pairs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch, sm90, streams
from ..common.launch import (
    ENOUGH_PROGRAMS,
    LOG2_E,
    Accumulator,
    BackwardInputs,
    CombineInputs,
    cdiv,
    next_power_of_2,
)
from ..common.precompile import launcher
from ..common.primitives import (
    cap_slope,
    grid_position,
    large,
    load_rows,
    narrow,
    soft_capped,
    softmax_grad,
    store_combined,
    store_rows,
)
from . import csr
from .csr import BlockCSR, CSRPlan
from .inputs import Inputs

# one compiled kernel for all lengths
LENGTHS = ["T", "S", "C", "BLOCKS", "start"]
# reductions: rows of a program; partials read at once; keys of a program, fewer if blocks are few
REDUCE_ROWS, UNROLL, DKV_KEYS = 16, 4, 64
# rows of block indices [B T R] from which key-major dq is faster than query-major. With half as
# many a layer's backward takes 1.03 times as long by it, and the selected branch 2.3 times the
# memory (H100, H = 64, K = 4, 8k tokens)
MIN_SELECTIONS = 1 << 16


@triton.jit
def work_tile_pairs(work_tile, owner, ordinals, offsets, tile_pairs, WIDE: tl.constexpr):
    """Block, first pair and end of a work tile, in 64 bits if WIDE."""
    block = tl.load(owner + work_tile)
    begin = tl.load(offsets + block) + tl.load(ordinals + work_tile).to(tl.int64) * tile_pairs
    end = tl.minimum(begin + tile_pairs, tl.load(offsets + block + 1))
    return large(block, WIDE), narrow(begin, WIDE), narrow(end, WIDE)


@triton.jit
def load_pairs(pairs, i, end, G: tl.constexpr, BLOCK_M: tl.constexpr):
    """Pair of each of BLOCK_M rows, from pair i on; 0 for padding rows."""
    row = tl.arange(0, BLOCK_M)
    at = i + row // G
    return tl.load(pairs + at, mask=(row < BLOCK_M // G * G) & (at < end), other=0)


@triton.jit
def pair_rows(
    e, i, end, R: tl.constexpr, n: tl.constexpr, G: tl.constexpr, BLOCK_M: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Pair, batch row x T + token, head and validity of each row of a tile, from pair i on."""
    row = tl.arange(0, BLOCK_M)
    real = (row < BLOCK_M // G * G) & (i + row // G < end)
    return large(e, WIDE), large(e // n // R, WIDE), e // n % R * G + row % G, real


@triton.jit
def chunk_pair_indices(i, offsets, G: tl.constexpr, BLOCK_M: tl.constexpr, WIDE: tl.constexpr):
    """Index within the chunk of each row's pair, for a tile from pair i on."""
    return large(i - narrow(tl.load(offsets), WIDE) + tl.arange(0, BLOCK_M) // G, WIDE)


@triton.jit
def load_partials(partial, offsets, WIDTH: tl.constexpr, BLOCK: tl.constexpr, mask):
    """`load_rows` with evict_first: the rows are read once."""
    d = tl.arange(0, BLOCK)
    inside = mask[:, None] if WIDTH == BLOCK else mask[:, None] & (d[None] < WIDTH)
    at = partial + offsets[:, None] + d[None]
    return tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def store_partials(partial, offsets, value, WIDTH: tl.constexpr, BLOCK: tl.constexpr, mask):
    """`store_rows` with evict_first: the rows are read after they have left the cache."""
    d = tl.arange(0, BLOCK)
    inside = mask[:, None] if WIDTH == BLOCK else mask[:, None] & (d[None] < WIDTH)
    at = partial + offsets[:, None] + d[None]
    tl.store(at, value.to(partial.dtype.element_ty), mask=inside, eviction_policy="evict_first")


@triton.jit(do_not_specialize=[*LENGTHS, "first", "length"])
def nsa_selected_fwd_key_major(
    q, k, v, partial_out, partial_lse, pairs, offsets, owner, ordinals, tile_pairs, starts,
    start, doc_last, T, S, K, s, C, BLOCKS, first, length, scale_log2, cap,
    q_b, q_t, q_h, k_b, k_n, k_h, v_b, v_n, v_h,
    R: tl.constexpr, n: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
    RAGGED: tl.constexpr, DIAGONAL: tl.constexpr, ENDS: tl.constexpr, CAP: tl.constexpr,
    WHOLE: tl.constexpr, POSITIVE: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: a work tile. Writes each row's partial out and lse over the tile's block."""
    work_tile = tl.program_id(0)
    if tl.load(owner + work_tile) < BLOCKS:
        block, begin, end = work_tile_pairs(work_tile, owner, ordinals, offsets, tile_pairs, WIDE)
        b, h, c = block // C // K, block // C % K, block % C
        if RAGGED:
            start = tl.load(starts + b).to(tl.int32)
        key = c * s + tl.arange(0, BLOCK_S)
        valid = (tl.arange(0, BLOCK_S) < s) & (key < S)
        k_tile = load_rows(k + b * k_b + h * k_h, key * k_n, D, BLOCK_D, valid)
        v_tile = load_rows(v + b * v_b + h * v_h, key * v_n, E, BLOCK_E, valid)
        next_pairs = load_pairs(pairs, begin, end, G, BLOCK_M)
        for i in range(begin, end, BLOCK_M // G):
            # prefetch: addresses of the next tile's rows depend on its pairs
            e, bt, query_head, real = pair_rows(next_pairs, i, end, R, n, G, BLOCK_M, WIDE)
            next_pairs = load_pairs(pairs, i + BLOCK_M // G, end, G, BLOCK_M)
            t = bt - b * T
            q_tile = load_rows(q, b * q_b + t * q_t + query_head * q_h, D, BLOCK_D, real)
            logits = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            unit_scale = scale_log2
            if CAP or not POSITIVE:
                logits, unit_scale = logits * scale_log2, 1.0
            if CAP:
                logits = soft_capped(logits, cap)
            if not WHOLE:
                visible = valid[None]
                if DIAGONAL:
                    visible = visible & (key[None] <= start + t[:, None])
                if ENDS:
                    ends = tl.load(doc_last + b * T + t, mask=real, other=0)
                    visible = visible & (key[None] < ends[:, None])
                logits = tl.where(visible, logits, float("-inf"))
            m = tl.max(logits, 1) * unit_scale
            # padding rows may see no key
            p = tl.exp2(logits * unit_scale - tl.where(real, m, 0.0)[:, None])
            l = tl.where(real, tl.sum(p, 1), 1.0)
            o = tl.dot(p.to(v_tile.dtype), v_tile, input_precision=PRECISION) * (1.0 / l)[:, None]
            row = (e - (b * (T - length) + first) * (R * n)) * G + query_head % G
            store_partials(partial_out, row * E, o, E, BLOCK_E, real)
            tl.store(partial_lse + row, m + tl.log2(l), mask=real)


@triton.jit(do_not_specialize=[*LENGTHS, "head", "heads"])
def nsa_selected_bwd_key_major(
    q, k, v, gates, d_out, lse, delta, partial_dq, dk, dv, partial_dk, partial_dv,
    pairs, offsets, owner, ordinals, partial_offsets, tile_pairs, starts, start,
    doc_last, T, S, K, s, C, BLOCKS, head, heads, scale, cap,
    q_b, q_t, q_h, k_b, k_n, k_h, v_b, v_n, v_h,
    R: tl.constexpr, n: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    RAGGED: tl.constexpr, DIAGONAL: tl.constexpr, ENDS: tl.constexpr, CAP: tl.constexpr,
    GATES: tl.constexpr, GATED: tl.constexpr, WHOLE: tl.constexpr,
    DQ: tl.constexpr, KEY_TILES: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: a work tile and N keys of its block. Adds to dk and dv of the block, or writes
    partial dk and dv if the block has several work tiles. With DQ also writes each row's partial
    dq."""
    work_tile = tl.program_id(0)
    if tl.load(owner + work_tile) < BLOCKS:
        block, begin, end = work_tile_pairs(work_tile, owner, ordinals, offsets, tile_pairs, WIDE)
        b, h, c = block // C // heads, head + block // C % heads, block % C
        if RAGGED:
            start = tl.load(starts + b).to(tl.int32)
        key_tile = tl.program_id(1)
        j = key_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        key = c * s + j
        valid = (j < s) & (key < S)
        k_tile = load_rows(k + b * k_b + h * k_h, key * k_n, D, BLOCK_D, valid)
        v_tile = load_rows(v + b * v_b + h * v_h, key * v_n, E, BLOCK_E, valid)
        dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv_acc = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
        next_pairs = load_pairs(pairs, begin, end, G, BLOCK_M)
        for i in range(begin, end, BLOCK_M // G):
            # prefetch: addresses of the next tile's rows depend on its pairs
            e, bt, query_head, real = pair_rows(next_pairs, i, end, R, n, G, BLOCK_M, WIDE)
            next_pairs = load_pairs(pairs, i + BLOCK_M // G, end, G, BLOCK_M)
            t = bt - b * T
            row = bt * (R * G) + query_head
            q_tile = load_rows(q, b * q_b + t * q_t + query_head * q_h, D, BLOCK_D, real)
            do_tile = load_rows(d_out, row * E, E, BLOCK_E, real)
            lse_row = tl.load(lse + row, mask=real, other=0.0)
            delta_row = tl.load(delta + row, mask=real, other=0.0)

            # [N, M]: p and ds are the left operands of the next products
            product = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
            if CAP or GATES:
                logits = product * scale
                if CAP:
                    logits = soft_capped(logits, cap)
                weight = 1.0
                if GATES:
                    weight = tl.load(gates + e, mask=real, other=1.0).to(tl.float32)[None]
                logits2 = logits * weight * 1.4426950408889634
            else:
                logits2 = product * (scale * 1.4426950408889634)
            if not WHOLE:  # padding rows add nothing: their q, d_out and delta are zeros
                visible = valid[:, None] & real[None]
                if DIAGONAL:
                    visible = visible & (key[:, None] <= start + t[None])
                if ENDS:
                    ends = tl.load(doc_last + b * T + t, mask=real, other=0)
                    visible = visible & (key[:, None] < ends[None])
                logits2 = tl.where(visible, logits2, float("-inf"))
            dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)
            p, ds = softmax_grad(logits2, 1.0, dp, lse_row[None], delta_row[None], GATED)
            dv_acc += tl.dot(p.to(do_tile.dtype), do_tile, input_precision=PRECISION)
            if GATES:
                ds *= weight
            if CAP:
                ds *= cap_slope(logits, cap)
            ds_tile = ds.to(q_tile.dtype)
            dk_acc += tl.dot(ds_tile, q_tile, input_precision=PRECISION)
            if DQ:
                dq = tl.dot(tl.trans(ds_tile), k_tile, input_precision=PRECISION) * scale
                at = (
                    chunk_pair_indices(i, offsets, G, BLOCK_M, WIDE) * KEY_TILES + key_tile
                ) * G + query_head % G
                store_partials(partial_dq, at * D, dq, D, BLOCK_D, real)

        dk_acc *= scale
        if tl.load(offsets + block + 1) - tl.load(offsets + block) <= tile_pairs:
            at = (b * S + key) * K + h
            dk_acc += load_rows(dk, at * D, D, BLOCK_D, valid)
            dv_acc += load_rows(dv, at * E, E, BLOCK_E, valid)
            store_rows(dk, at * D, dk_acc, D, BLOCK_D, valid)
            store_rows(dv, at * E, dv_acc, E, BLOCK_E, valid)
        else:
            partial = (tl.load(partial_offsets + block) + tl.load(ordinals + work_tile)) * s + j
            store_rows(partial_dk, partial * D, dk_acc, D, BLOCK_D, valid)
            store_rows(partial_dv, partial * E, dv_acc, E, BLOCK_E, valid)


@triton.jit(do_not_specialize=["T", "first", "length"])
def nsa_selected_reduce_out(
    partial_out, partial_lse, block_indices, out, lse, combine_cmp, combine_win, combine_gates,
    layer_out, T, R, n, first, length, g_b, g_t, g_h, g_3,
    G: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    SLOTS: tl.constexpr, ADD: tl.constexpr, COMBINE: tl.constexpr, FLIPPED: tl.constexpr,
):  # fmt: skip
    """One program: M rows (token, head) of a chunk. Reduces the partials of a row's slots into out
    and lse; with ADD out and lse are a partial too. partial_lse is in units of log2. With COMBINE
    also writes the layer's output."""
    tile, b, _tiles, _rows = grid_position(FLIPPED)
    i, b = tile * BLOCK_M + tl.arange(0, BLOCK_M), b.to(tl.int64)
    H = R * G
    real = i < length * H
    row = (b * T + first) * H + i
    indices = block_indices + ((b * T + first) * R + i // G) * n
    base = (b * length * R + i // G) * (n * G) + i % G

    # the maximum over all slots first: then no partial waits for the previous one
    slot = tl.arange(0, SLOTS)
    mask = real[:, None] & (slot < n)[None]
    mask = mask & (tl.load(indices[:, None] + slot[None], mask=mask, other=-1) >= 0)
    all_slots = base[:, None] + slot[None] * G
    logs = tl.load(partial_lse + all_slots, mask=mask, other=float("-inf"))
    m = tl.max(logs, 1)
    if ADD:
        stored_lse = tl.load(lse + row, mask=real, other=float("-inf")) * 1.4426950408889634
        m = tl.maximum(m, stored_lse)
    origin = tl.where(m == float("-inf"), 0.0, m)
    l = tl.sum(tl.exp2(logs - origin[:, None]), 1)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    if ADD:
        weight = tl.exp2(stored_lse - origin)
        acc = load_rows(out, row * E, E, BLOCK_E, real).to(tl.float32) * weight[:, None]
        l += weight
    for j in tl.range(0, n, loop_unroll_factor=4):
        chosen = real & (tl.load(indices + j, mask=real, other=-1) >= 0)
        at = base + j * G
        weight = tl.exp2(tl.load(partial_lse + at, mask=chosen, other=float("-inf")) - origin)
        acc += weight[:, None] * load_partials(partial_out, at * E, E, BLOCK_E, chosen).to(
            tl.float32
        )
    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    acc = acc / l[:, None]
    if COMBINE:
        token = first + i // H
        gate = combine_gates + b * g_b + token.to(tl.int64) * g_t + i % H * g_h
        store_combined(layer_out, acc, combine_cmp, combine_win, gate, row, g_3, E, BLOCK_E, real)
    store_rows(out, row * E, acc, E, BLOCK_E, real)
    tl.store(
        lse + row, tl.where(empty, float("-inf"), (m + tl.log2(l)) * 0.6931471805599453), mask=real
    )


@triton.jit
def add_partials(partials, d, at, j, begin, end, s, valid, D: tl.constexpr, BLOCK_D: tl.constexpr,
                 UNROLL: tl.constexpr):  # fmt: skip
    """Adds keys j of partials begin .. end - 1 to rows `at` of d, in order."""
    acc = load_rows(d, at * D, D, BLOCK_D, valid)
    for partial in tl.range(begin, end, loop_unroll_factor=UNROLL):
        acc += load_rows(partials, (partial * s + j) * D, D, BLOCK_D, valid)
    store_rows(d, at * D, acc, D, BLOCK_D, valid)


@triton.jit(do_not_specialize=["S", "C", "head", "heads"])
def nsa_selected_reduce_dkv(
    partial_dk, partial_dv, dk, dv, partial_offsets, S, K, s, C, head, heads,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """One program: N keys of a block that has several work tiles. Adds the partials to dk or dv."""
    block = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(partial_offsets + block), tl.load(partial_offsets + block + 1)
    if begin < end:
        b, h, c = block // C // heads, head + block // C % heads, block % C
        j = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = (j < s) & (c * s + j < S)
        at = (b * S + c * s + j) * K + h
        if tl.program_id(2) == 0:
            add_partials(partial_dk, dk, at, j, begin, end, s, valid, D, BLOCK_D, UNROLL)
        else:
            add_partials(partial_dv, dv, at, j, begin, end, s, valid, E, BLOCK_E, UNROLL)


@triton.jit(do_not_specialize=["T", "first", "length", "first_group"])
def nsa_selected_reduce_dq(
    partial_dq, pair_indices, dq, skip_if, T, R, n, first, length, first_group,
    GROUPS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, KEY_TILES: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr,
    SKIP_IF: tl.constexpr, FLIPPED: tl.constexpr,
):  # fmt: skip
    """One program: M rows (token, head) of a chunk. Writes, with ADD adds to dq, the sum of a row's
    partial dq over slots and key tiles. A partial has ROWS rows, of which the first G are heads.
    With SKIP_IF the kernel does nothing unless `skip_if` is 0."""
    tile, b, _tiles, _rows = grid_position(FLIPPED)
    i, b = tile * BLOCK_M + tl.arange(0, BLOCK_M), b.to(tl.int64)
    real = i < length * GROUPS * G
    if SKIP_IF:
        real = real & (tl.load(skip_if) == 0)
    token, group = first + i // G // GROUPS, first_group + i // G % GROUPS
    group_row = (b * T + token) * R + group
    row, slots = group_row * G + i % G, group_row * n
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if ADD:
        acc = load_rows(dq, row * D, D, BLOCK_D, real).to(tl.float32)
    for slot in tl.range(0, n * KEY_TILES, loop_unroll_factor=4):
        index = tl.load(pair_indices + slots + slot // KEY_TILES, mask=real, other=-1).to(tl.int64)
        chosen, at = index >= 0, (index * KEY_TILES + slot % KEY_TILES) * ROWS + i % G
        acc += load_partials(partial_dq, at * D, D, BLOCK_D, chosen).to(tl.float32)
    store_rows(dq, row * D, acc, D, BLOCK_D, real)


class BlockTiles(NamedTuple):
    """Tiles of a block in the backward: their number, keys of each, and rows of partial dq a pair;
    and the module of the Gluon kernels if these run."""

    key_tiles: int
    keys: int
    partial_rows: int
    gluon: Any


def gluon_kernels(inputs: Inputs, kernel: str) -> Any:
    """The module of the Gluon kernels if it supports a call of `kernel`, else None."""
    if not sm90.available(inputs.q):
        return None
    from . import key_major_sm90

    return key_major_sm90 if key_major_sm90.is_supported(inputs, kernel) else None


def is_faster(inputs: Inputs) -> bool:
    """Whether forward and dq are key-major on every GPU: query-major tiles would have few rows."""
    _q, k, v, selection, _scale = inputs
    rows = inputs.groups * selection.stride
    few = rows < launch.FEW_ROWS and selection.gates is None
    return few and launch.holds_block(selection.s, k, v)


def forms_dq(inputs: Inputs) -> bool:
    """Whether dq of other groups is key-major too, in Gluon: by MIN_SELECTIONS or
    `launch.using({"key_major_dq_sm90": ...})`."""
    selection = inputs.selection
    enough = selection.block_indices.shape[:3].numel() >= MIN_SELECTIONS
    allowed = launch.override.get("key_major_dq_sm90", enough) and selection.stride == 1
    return bool(allowed) and gluon_kernels(inputs, "backward") is not None


def block_tiles(inputs: Inputs) -> BlockTiles:
    q, k, v, selection, _scale = inputs
    s, groups, gluon = selection.s, inputs.groups, gluon_kernels(inputs, "backward")
    if gluon is not None:
        return BlockTiles(1, s, gluon.partial_dq_rows(groups), gluon)
    tile = launch.key_major_tile("backward", max(k.shape[-1], v.shape[-1]), groups, q.dtype)
    keys = min(launch.padded(s), tile.block_n)
    return BlockTiles(cdiv(s, keys), keys, groups, None)


def allocate_backward(inputs: Inputs, with_dq: bool, pair_tokens: int = 1) -> CSRPlan:
    """Workspaces of the CSR of a backward, with partial dq if `with_dq`."""
    tiles = block_tiles(inputs)
    pair_rows = tiles.key_tiles * tiles.partial_rows if with_dq else 0
    return csr.allocate_chunks(inputs, "backward", pair_rows, pair_tokens)


def arguments(inputs: Inputs, block_csr: BlockCSR, kernel: str) -> dict[str, Any]:
    """Arguments of the portable kernels over work tiles."""
    q, k, v, selection, _scale = inputs
    (B, T, H, D), (S, K, E), s = q.shape, (*k.shape[1:3], v.shape[-1]), selection.s
    R, n = selection.block_indices.shape[2:]
    tile = launch.key_major_tile(kernel, max(D, E), inputs.groups, q.dtype)
    # rows of d_out, of partials, of dk
    num_rows = block_csr.length * block_csr.heads * (H // K) * n * cdiv(s, tile.block_n)
    wide = B * max(max(T * H, num_rows, S * K) * max(D, E), T * R * n) >= 1 << 31
    return dict(
        **inputs.arguments(in_log2=kernel == "forward"), **block_csr.arguments(), C=cdiv(S, s),
        BLOCKS=B * block_csr.heads * cdiv(S, s), BLOCK_M=tile.block_m,
        # tiles have no padding keys, and each row sees all keys
        WHOLE=launch.padded(s) == s and inputs.has_whole_blocks,
        WIDE=launch.wide(q, k, v) or wide, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def forward(
    inputs: Inputs,
    block_csrs: list[BlockCSR],
    partial: tuple[Tensor, Tensor] | None,
    combine_inputs: CombineInputs | None,
) -> tuple[Tensor, Tensor]:
    """out [B T H E] and lse [B T H] over the top-n blocks; accumulates in place into `partial`, out
    and lse of other keys. Writes the layer's output of `combine_inputs`. Chunks have all heads."""
    q, _k, v, selection, scale = inputs
    (B, T, H, _), E = q.shape, v.shape[-1]
    out, lse = partial or launch.empty_outputs(q, v)
    R, n = selection.block_indices.shape[2:]
    # of each pair and head, in the longest chunk; lse in units of log2
    rows = B * max(block_csr.length for block_csr in block_csrs) * H * n
    partials = q.new_empty(rows, E), q.new_empty(rows, dtype=torch.float32)
    gluon = gluon_kernels(inputs, "forward")
    for block_csr in block_csrs:
        if gluon is not None:
            gluon.forward(inputs, block_csr, *partials)
        else:
            launcher(nsa_selected_fwd_key_major, (len(block_csr.owner),))(
                partial_out=partials[0], partial_lse=partials[1], first=block_csr.first,
                length=block_csr.length, scale_log2=scale * LOG2_E, POSITIVE=scale > 0,
                BLOCK_S=launch.padded(selection.s), **arguments(inputs, block_csr, "forward"),
            )  # fmt: skip
        grid, flipped = launch.grid(cdiv(block_csr.length * H, REDUCE_ROWS), B)
        launcher(nsa_selected_reduce_out, grid)(
            *partials, selection.block_indices, out, lse, T=T, R=R, n=n, first=block_csr.first,
            length=block_csr.length, G=H // R, E=E, BLOCK_E=launch.padded(E), BLOCK_M=REDUCE_ROWS,
            SLOTS=next_power_of_2(n), ADD=partial is not None, FLIPPED=flipped,
            **launch.combine_arguments(combine_inputs),
        )  # fmt: skip
    return out, lse


def backward(
    inputs: Inputs,
    bwd: BackwardInputs,
    block_csrs: list[BlockCSR],
    dk: Tensor,
    dv: Tensor,
    dq: Accumulator | None,
    overlapping: Tensor | None = None,
    after: torch.cuda.Event | None = None,
    pair_tokens: int = 1,
) -> None:
    """Accumulates dk [B S K D] and dv [B S K E] in float32, and dq if given: after the event
    `after`, and unless `overlapping` is not 0 on the device. A pair has `pair_tokens` tokens, more
    than one only on Hopper and without dq."""
    q, k, v, selection, scale = inputs
    B, T, _H, D = q.shape
    S, K, E = k.shape[1], k.shape[2], v.shape[-1]
    s, (R, n), G = selection.s, selection.block_indices.shape[2:], inputs.groups
    key_tiles, block_n, rows, gluon = block_tiles(inputs)
    dq_args = None if dq is None else dq.arguments()
    for block_csr in block_csrs:
        partial_dq, num_groups = None, block_csr.heads * (R // K)
        if dq_args is not None:
            partial_dq = q.new_empty(B * block_csr.length * num_groups * n * key_tiles, rows, D)
        partials = [d.new_empty(block_csr.num_partials, s, d.shape[-1]) for d in (dk, dv)]
        if gluon is not None:
            gluon.backward(
                inputs, bwd, dk, dv, partials, partial_dq, overlapping, block_csr, pair_tokens
            )
        else:
            launcher(nsa_selected_bwd_key_major, (len(block_csr.owner), key_tiles))(
                partial_dq=partial_dq, dk=dk, dv=dv, partial_dk=partials[0],
                partial_dv=partials[1], partial_offsets=block_csr.partial_offsets, scale=scale,
                gates=selection.gates, GATES=selection.gates is not None, BLOCK_N=block_n,
                head=block_csr.head, heads=block_csr.heads, DQ=dq_args is not None,
                KEY_TILES=key_tiles, **bwd.arguments(),
                **arguments(inputs, block_csr, "backward"),
            )  # fmt: skip
        lines, blocks = B * block_csr.heads, cdiv(S, s)
        keys = DKV_KEYS if lines * blocks >= ENOUGH_PROGRAMS else DKV_KEYS // 4
        launcher(nsa_selected_reduce_dkv, (lines * blocks, cdiv(s, keys), 2))(
            *partials, dk, dv, block_csr.partial_offsets, S, K, s, blocks, block_csr.head,
            block_csr.heads, D=D, E=E, BLOCK_D=launch.padded(D), BLOCK_E=launch.padded(E),
            BLOCK_N=keys, UNROLL=UNROLL,
        )  # fmt: skip
        if dq_args is not None:
            streams.wait(q.device, after)
            tiles = cdiv(block_csr.length * num_groups * G, REDUCE_ROWS)
            grid, flipped = launch.grid(tiles, B)
            launcher(nsa_selected_reduce_dq, grid)(
                partial_dq, block_csr.pair_indices, skip_if=overlapping, T=T, R=R, n=n,
                first=block_csr.first, length=block_csr.length,
                first_group=block_csr.head * (R // K), GROUPS=num_groups, KEY_TILES=key_tiles,
                ROWS=rows, G=G, D=D, BLOCK_D=launch.padded(D), BLOCK_M=REDUCE_ROWS,
                SKIP_IF=overlapping is not None, FLIPPED=flipped, **dq_args,
            )  # fmt: skip
        del partial_dq, partials
