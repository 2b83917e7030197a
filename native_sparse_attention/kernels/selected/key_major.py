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

import functools
from collections import namedtuple
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
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
from .inputs import Backward, Facts, Inputs, combine_group

# one compiled kernel for all lengths
LENGTHS = ["T", "S", "C", "BLOCKS", "start", "tile_pairs", "first", "length", "head", "heads"]
# reductions: rows of a program; keys of a program, fewer if blocks are few
REDUCE_ROWS, DKV_KEYS = 16, 64

# compile-time settings of the kernels over work tiles. Forward: BLOCK_N keys are a block. Backward:
# a block has KEY_TILES tiles of BLOCK_N keys
Settings = namedtuple(
    "Settings",
    "K R n G s D E BLOCK_D BLOCK_E BLOCK_M BLOCK_N KEY_TILES RAGGED DIAGONAL ENDS CAP WHOLE "
    "POSITIVE GATES GATED DQ WIDE",
)
# of the reduction of dk and dv
KeyReduction = namedtuple("KeyReduction", "K s D E BLOCK_D BLOCK_E BLOCK_N")
# of the reductions for each query. A chunk has GROUPS head groups of a token
Reduction = namedtuple(
    "Reduction", "R G GROUPS KEY_TILES WIDTH BLOCK BLOCK_M SLOTS ADD COMBINE FLIPPED"
)


@triton.jit
def work_tile_pairs(work_tile, csr, tile_pairs, F: tl.constexpr):
    """Block, first pair and end of a work tile, in 64 bits if WIDE."""
    block = tl.load(csr.owner + work_tile)
    ordinal = tl.load(csr.ordinals + work_tile).to(tl.int64)
    begin = tl.load(csr.offsets + block) + ordinal * tile_pairs
    end = tl.minimum(begin + tile_pairs, tl.load(csr.offsets + block + 1))
    return large(block, F.WIDE), narrow(begin, F.WIDE), narrow(end, F.WIDE)


@triton.jit
def load_pairs(pairs, i, end, F: tl.constexpr):
    """Pair of each of BLOCK_M rows, from pair i on; 0 for padding rows."""
    row = tl.arange(0, F.BLOCK_M)
    at = i + row // F.G
    return tl.load(pairs + at, mask=(row < F.BLOCK_M // F.G * F.G) & (at < end), other=0)


@triton.jit
def pair_rows(e, i, end, F: tl.constexpr):
    """Pair, batch row x T + token, head and validity of each row of a tile, from pair i on."""
    row = tl.arange(0, F.BLOCK_M)
    real = (row < F.BLOCK_M // F.G * F.G) & (i + row // F.G < end)
    bt, head = large(e // F.n // F.R, F.WIDE), e // F.n % F.R * F.G + row % F.G
    return large(e, F.WIDE), bt, head, real


@triton.jit(do_not_specialize=LENGTHS)
def nsa_selected_fwd_key_major(
    q, k, v, index, partial_out, partial_lse, csr, tile_pairs, T, S, C, BLOCKS, start, first,
    length, scale_log2, cap, F: tl.constexpr,
):  # fmt: skip
    """One program: a work tile. Reads its block and the queries of its pairs. Writes each row's
    partial out and lse over the block."""
    work_tile = tl.program_id(0)
    if tl.load(csr.owner + work_tile) < BLOCKS:
        block, begin, end = work_tile_pairs(work_tile, csr, tile_pairs, F)
        b, h, c = block // C // F.K, block // C % F.K, block % C
        if F.RAGGED:
            start = tl.load(index.starts + b).to(tl.int32)
        key = c * F.s + tl.arange(0, F.BLOCK_N)
        valid = (tl.arange(0, F.BLOCK_N) < F.s) & (key < S)
        k_tile = load_rows(k.ptr + b * k.b + h * k.h, key * k.n, F.D, F.BLOCK_D, valid)
        v_tile = load_rows(v.ptr + b * v.b + h * v.h, key * v.n, F.E, F.BLOCK_E, valid)
        next_pairs = load_pairs(csr.pairs, begin, end, F)
        for i in range(begin, end, F.BLOCK_M // F.G):
            # prefetch: addresses of the next tile's rows depend on its pairs
            e, bt, query_head, real = pair_rows(next_pairs, i, end, F)
            next_pairs = load_pairs(csr.pairs, i + F.BLOCK_M // F.G, end, F)
            t = bt - b * T
            q_tile = load_rows(q.ptr, b * q.b + t * q.n + query_head * q.h, F.D, F.BLOCK_D, real)
            logits = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
            unit_scale = scale_log2
            if F.CAP or not F.POSITIVE:
                logits, unit_scale = logits * scale_log2, 1.0
            if F.CAP:
                logits = soft_capped(logits, cap)
            if not F.WHOLE:
                visible = valid[None]
                if F.DIAGONAL:
                    visible = visible & (key[None] <= start + t[:, None])
                if F.ENDS:
                    ends = tl.load(index.doc_last + bt, mask=real, other=0)
                    visible = visible & (key[None] < ends[:, None])
                logits = tl.where(visible, logits, float("-inf"))
            m = tl.max(logits, 1) * unit_scale
            # padding rows may see no key
            p = tl.exp2(logits * unit_scale - tl.where(real, m, 0.0)[:, None])
            l = tl.where(real, tl.sum(p, 1), 1.0)
            o = tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee") * (1.0 / l)[:, None]
            row = (e - (b * (T - length) + first) * (F.R * F.n)) * F.G + query_head % F.G
            store_rows(partial_out, row * F.E, o, F.E, F.BLOCK_E, real, ONCE=True)
            tl.store(partial_lse + row, m + tl.log2(l), mask=real)


@triton.jit(do_not_specialize=LENGTHS)
def nsa_selected_bwd_key_major(
    q, k, v, index, bwd, partial_dq, dk, dv, partial_dk, partial_dv, csr, tile_pairs, T, S, C,
    BLOCKS, start, head, heads, scale, cap, F: tl.constexpr,
):  # fmt: skip
    """One program: a work tile and N keys of its block. Reads the keys, and the queries of the
    tile's pairs. Adds to dk and dv of the block, or writes partial dk and dv if the block has
    several work tiles. With DQ also writes each row's partial dq."""
    work_tile = tl.program_id(0)
    if tl.load(csr.owner + work_tile) < BLOCKS:
        block, begin, end = work_tile_pairs(work_tile, csr, tile_pairs, F)
        b, h, c = block // C // heads, head + block // C % heads, block % C
        if F.RAGGED:
            start = tl.load(index.starts + b).to(tl.int32)
        key_tile = tl.program_id(1)
        j = key_tile * F.BLOCK_N + tl.arange(0, F.BLOCK_N)
        key = c * F.s + j
        valid = (j < F.s) & (key < S)
        k_tile = load_rows(k.ptr + b * k.b + h * k.h, key * k.n, F.D, F.BLOCK_D, valid)
        v_tile = load_rows(v.ptr + b * v.b + h * v.h, key * v.n, F.E, F.BLOCK_E, valid)
        dk_acc = tl.full([F.BLOCK_N, F.BLOCK_D], 0.0, tl.float32)
        dv_acc = tl.full([F.BLOCK_N, F.BLOCK_E], 0.0, tl.float32)
        next_pairs = load_pairs(csr.pairs, begin, end, F)
        for i in range(begin, end, F.BLOCK_M // F.G):
            # prefetch: addresses of the next tile's rows depend on its pairs
            e, bt, query_head, real = pair_rows(next_pairs, i, end, F)
            next_pairs = load_pairs(csr.pairs, i + F.BLOCK_M // F.G, end, F)
            t = bt - b * T
            row = bt * (F.R * F.G) + query_head
            q_tile = load_rows(q.ptr, b * q.b + t * q.n + query_head * q.h, F.D, F.BLOCK_D, real)
            do_tile = load_rows(bwd.d_out, row * F.E, F.E, F.BLOCK_E, real)
            lse_row = tl.load(bwd.lse + row, mask=real, other=0.0)
            delta_row = tl.load(bwd.delta + row, mask=real, other=0.0)

            # [N, M]: p and ds are the left operands of the next products
            product = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
            if F.CAP or F.GATES:
                logits = product * scale
                if F.CAP:
                    logits = soft_capped(logits, cap)
                weight = 1.0
                if F.GATES:
                    weight = tl.load(index.gates + e, mask=real, other=1.0).to(tl.float32)[None]
                logits2 = logits * weight * 1.4426950408889634
            else:
                logits2 = product * (scale * 1.4426950408889634)
            if not F.WHOLE:  # padding rows add nothing: their q, d_out and delta are zeros
                visible = valid[:, None] & real[None]
                if F.DIAGONAL:
                    visible = visible & (key[:, None] <= start + t[None])
                if F.ENDS:
                    ends = tl.load(index.doc_last + bt, mask=real, other=0)
                    visible = visible & (key[:, None] < ends[None])
                logits2 = tl.where(visible, logits2, float("-inf"))
            dp = tl.dot(v_tile, tl.trans(do_tile), input_precision="ieee")
            p, ds = softmax_grad(logits2, 1.0, dp, lse_row[None], delta_row[None], F.GATED)
            dv_acc += tl.dot(p.to(do_tile.dtype), do_tile, input_precision="ieee")
            if F.GATES:
                ds *= weight
            if F.CAP:
                ds *= cap_slope(logits, cap)
            ds_tile = ds.to(q_tile.dtype)
            dk_acc += tl.dot(ds_tile, q_tile, input_precision="ieee")
            if F.DQ:
                dq = tl.dot(tl.trans(ds_tile), k_tile, input_precision="ieee") * scale
                # index of each row's pair within the chunk
                pair = i - narrow(tl.load(csr.offsets), F.WIDE) + tl.arange(0, F.BLOCK_M) // F.G
                at = (large(pair, F.WIDE) * F.KEY_TILES + key_tile) * F.G + query_head % F.G
                store_rows(partial_dq, at * F.D, dq, F.D, F.BLOCK_D, real, ONCE=True)

        dk_acc *= scale
        if tl.load(csr.offsets + block + 1) - tl.load(csr.offsets + block) <= tile_pairs:
            at = (b * S + key) * F.K + h
            dk_acc += load_rows(dk, at * F.D, F.D, F.BLOCK_D, valid)
            dv_acc += load_rows(dv, at * F.E, F.E, F.BLOCK_E, valid)
            store_rows(dk, at * F.D, dk_acc, F.D, F.BLOCK_D, valid)
            store_rows(dv, at * F.E, dv_acc, F.E, F.BLOCK_E, valid)
        else:
            ordinal = tl.load(csr.ordinals + work_tile)
            partial = (tl.load(csr.partial_offsets + block) + ordinal) * F.s + j
            store_rows(partial_dk, partial * F.D, dk_acc, F.D, F.BLOCK_D, valid)
            store_rows(partial_dv, partial * F.E, dv_acc, F.E, F.BLOCK_E, valid)


@triton.jit(do_not_specialize=LENGTHS)
def nsa_selected_reduce_out(
    partial_out, partial_lse, block_indices, out, lse, combine, T, n, first, length,
    F: tl.constexpr,
):  # fmt: skip
    """One program: M rows (token, head) of a chunk. Reduces the partials of a row's slots into out
    and lse; with ADD out and lse are a partial too. partial_lse is in units of log2. With COMBINE
    also writes the layer's output."""
    tile, b, _tiles, _rows = grid_position(F.FLIPPED)
    i, b = tile * F.BLOCK_M + tl.arange(0, F.BLOCK_M), b.to(tl.int64)
    H: tl.constexpr = F.R * F.G
    E: tl.constexpr = F.WIDTH
    BLOCK_E: tl.constexpr = F.BLOCK
    real = i < length * H
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
    acc = tl.full([F.BLOCK_M, BLOCK_E], 0.0, tl.float32)
    if F.ADD:
        weight = tl.exp2(stored_lse - origin)
        acc = load_rows(out, row * E, E, BLOCK_E, real).to(tl.float32) * weight[:, None]
        l += weight
    for j in tl.range(0, n, loop_unroll_factor=4):
        chosen = real & (tl.load(indices + j, mask=real, other=-1) >= 0)
        at = base + j * F.G
        weight = tl.exp2(tl.load(partial_lse + at, mask=chosen, other=float("-inf")) - origin)
        o = load_rows(partial_out, at * E, E, BLOCK_E, chosen, ONCE=True)
        acc += weight[:, None] * o.to(tl.float32)
    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    acc = acc / l[:, None]
    if F.COMBINE:
        token = first + i // H
        gate = combine.gates + b * combine.b + token.to(tl.int64) * combine.t + i % H * combine.h
        store_combined(
            combine.out, acc, combine.cmp, combine.win, gate, row, combine.branch, E, BLOCK_E, real
        )
    store_rows(out, row * E, acc, E, BLOCK_E, real)
    tl.store(
        lse + row, tl.where(empty, float("-inf"), (m + tl.log2(l)) * 0.6931471805599453), mask=real
    )


@triton.jit
def add_partials(
    d, partials, at, j, begin, end, valid, WIDTH: tl.constexpr, BLOCK: tl.constexpr, F: tl.constexpr
):  # fmt: skip
    """Adds keys j of partials begin .. end - 1 to rows `at` of d, in order."""
    acc = load_rows(d, at * WIDTH, WIDTH, BLOCK, valid)
    for partial in tl.range(begin, end, loop_unroll_factor=4):
        acc += load_rows(partials, (partial * F.s + j) * WIDTH, WIDTH, BLOCK, valid)
    store_rows(d, at * WIDTH, acc, WIDTH, BLOCK, valid)


@triton.jit(do_not_specialize=LENGTHS)
def nsa_selected_reduce_dkv(
    dk, dv, partial_dk, partial_dv, partial_offsets, S, C, head, heads, F: tl.constexpr
):  # fmt: skip
    """One program: N keys of a block that has several work tiles. Adds the partials to dk or dv."""
    block = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(partial_offsets + block), tl.load(partial_offsets + block + 1)
    if begin < end:
        b, h, c = block // C // heads, head + block // C % heads, block % C
        j = tl.program_id(1) * F.BLOCK_N + tl.arange(0, F.BLOCK_N)
        valid = (j < F.s) & (c * F.s + j < S)
        at = (b * S + c * F.s + j) * F.K + h
        if tl.program_id(2) == 0:
            add_partials(dk, partial_dk, at, j, begin, end, valid, F.D, F.BLOCK_D, F)
        else:
            add_partials(dv, partial_dv, at, j, begin, end, valid, F.E, F.BLOCK_E, F)


@triton.jit(do_not_specialize=[*LENGTHS, "first_group"])
def nsa_selected_reduce_dq(
    partial_dq, pair_indices, dq, T, n, first, length, first_group, F: tl.constexpr
):  # fmt: skip
    """One program: M rows (token, head) of a chunk. Writes, with ADD adds to dq, the sum of a row's
    partial dq over slots and key tiles."""
    tile, b, _tiles, _rows = grid_position(F.FLIPPED)
    i, b = tile * F.BLOCK_M + tl.arange(0, F.BLOCK_M), b.to(tl.int64)
    real = i < length * (F.GROUPS * F.G)
    token, group = first + i // F.G // F.GROUPS, first_group + i // F.G % F.GROUPS
    group_row = (b * T + token) * F.R + group
    row, slots = group_row * F.G + i % F.G, group_row * n
    acc = tl.full([F.BLOCK_M, F.BLOCK], 0.0, tl.float32)
    if F.ADD:
        acc = load_rows(dq, row * F.WIDTH, F.WIDTH, F.BLOCK, real).to(tl.float32)
    for slot in tl.range(0, n * F.KEY_TILES, loop_unroll_factor=4):
        at = pair_indices + slots + slot // F.KEY_TILES
        pair = tl.load(at, mask=real, other=-1).to(tl.int64)
        partial = (pair * F.KEY_TILES + slot % F.KEY_TILES) * F.G + i % F.G
        rows = load_rows(partial_dq, partial * F.WIDTH, F.WIDTH, F.BLOCK, pair >= 0, ONCE=True)
        acc += rows.to(tl.float32)
    store_rows(dq, row * F.WIDTH, acc, F.WIDTH, F.BLOCK, real)


def gluon_kernels(inputs: Inputs) -> Any:
    """The module of the Gluon backward if it supports a call, else None."""
    if not launch.supports_gluon(inputs.q):
        return None
    from . import key_major_sm90

    return key_major_sm90 if key_major_sm90.is_supported(inputs) else None


def pair_tokens(inputs: Inputs) -> int:
    """Tokens of a pair in a backward without dq."""
    gluon = gluon_kernels(inputs)
    return 1 if gluon is None else gluon.pair_tokens(inputs)


def is_faster(inputs: Inputs) -> bool:
    """Whether forward and dq are key-major: query-major tiles would have few rows."""
    at = inputs.facts
    few = at.rows < launch.FEW_ROWS and not at.gated
    return few and launch.holds_block(at.s, inputs.k, inputs.v)


class Plan(NamedTuple):
    """Settings of a kernel over work tiles, as plain data."""

    settings: Any
    num_warps: int
    num_stages: int


@functools.lru_cache(maxsize=256)
def plan(
    kernel: str, facts: Facts, length: int, heads: int, has_dq: bool = False, gated: bool = False
) -> Plan:
    """The settings of "forward" or "backward" over a chunk of `length` tokens and `heads` heads."""
    at, s, is_forward = facts, facts.s, kernel == "forward"
    tile = launch.key_major_tile(kernel, at.width, at.G, at.dtype)
    keys = launch.padded(s) if is_forward else min(launch.padded(s), tile.block_n)
    # rows of d_out, of partials, of dk
    num_rows = length * heads * (at.H // at.K) * at.n * cdiv(s, tile.block_n)
    elements = max(at.T * at.H, num_rows, at.S * at.K) * at.width
    wide = at.B * max(elements, at.T * at.R * at.n) >= 1 << 31
    settings = Settings(
        K=at.K, R=at.R, n=at.n, G=at.G, s=s, D=at.D, E=at.E, BLOCK_D=launch.padded(at.D),
        BLOCK_E=launch.padded(at.E), BLOCK_M=tile.block_m, BLOCK_N=keys, KEY_TILES=cdiv(s, keys),
        RAGGED=at.ragged, DIAGONAL=at.diagonal, ENDS=at.ends, CAP=at.capped,
        # tiles have no padding keys, and each row sees all keys
        WHOLE=launch.padded(s) == s and at.whole, POSITIVE=at.positive or not is_forward,
        GATES=at.gated and not is_forward, GATED=gated, DQ=has_dq, WIDE=at.wide or wide,
    )  # fmt: skip
    return Plan(settings, tile.num_warps, tile.num_stages)


def key_tiles(inputs: Inputs) -> int:
    """Tiles of the keys of a block in the backward."""
    at = inputs.facts
    if gluon_kernels(inputs) is not None:
        return 1
    return plan("backward", at, at.T, at.K).settings.KEY_TILES


def allocate_backward(inputs: Inputs, has_dq: bool, pair_tokens: int = 1) -> CSRPlan:
    """Workspaces of the CSR of a backward, with partial dq if `has_dq`."""
    rows = key_tiles(inputs) * inputs.facts.G if has_dq else 0
    return csr.allocate_chunks(inputs, "backward", rows, pair_tokens)


def arguments(inputs: Inputs, block_csr: BlockCSR, at: Plan) -> dict[str, Any]:
    """Arguments of both kernels over work tiles."""
    facts = inputs.facts
    q, k, v = (launch.strided(t) for t in (inputs.q, inputs.k, inputs.v))
    return dict(
        q=q, k=k, v=v, index=inputs.index(), csr=block_csr.group, tile_pairs=block_csr.tile_pairs,
        T=facts.T, S=facts.S, C=facts.C, BLOCKS=facts.B * block_csr.heads * facts.C,
        start=inputs.selection.start, F=at.settings, num_warps=at.num_warps,
        num_stages=at.num_stages,
    )  # fmt: skip


def forward(
    inputs: Inputs,
    block_csrs: list[BlockCSR],
    partial: tuple[Tensor, Tensor] | None,
    combine_inputs: CombineInputs | None,
) -> tuple[Tensor, Tensor]:
    """out [B T H E] and lse [B T H] over the top-n blocks; accumulates in place into `partial`, out
    and lse of other keys. Writes the layer's output of `combine_inputs`. Chunks have all heads."""
    q, facts = inputs.q, inputs.facts
    out, lse = partial or launch.empty_outputs(q, inputs.v)
    # of each pair and head, in the longest chunk; lse in units of log2
    rows = facts.B * max(block_csr.length for block_csr in block_csrs) * facts.H * facts.n
    partials = q.new_empty(rows, facts.E), q.new_empty(rows, dtype=torch.float32)
    for block_csr in block_csrs:
        at, length = plan("forward", facts, block_csr.length, facts.K), block_csr.length
        launcher(nsa_selected_fwd_key_major, (len(block_csr.owner),))(
            **arguments(inputs, block_csr, at), partial_out=partials[0], partial_lse=partials[1],
            first=block_csr.first, length=length, scale_log2=inputs.scale * LOG2_E,
            cap=launch.cap(inputs.selection.soft_cap),
        )  # fmt: skip
        grid, flipped = launch.grid(cdiv(length * facts.H, REDUCE_ROWS), facts.B)
        settings = Reduction(
            facts.R, facts.G, facts.R, 1, facts.E, launch.padded(facts.E), REDUCE_ROWS,
            next_power_of_2(facts.n), partial is not None, combine_inputs is not None, flipped,
        )  # fmt: skip
        launcher(nsa_selected_reduce_out, grid)(
            *partials, inputs.selection.block_indices, out, lse, combine_group(combine_inputs),
            facts.T, facts.n, block_csr.first, length, settings,
        )  # fmt: skip
    return out, lse


def backward(
    inputs: Inputs,
    bwd: BackwardInputs,
    block_csrs: list[BlockCSR],
    dk: Tensor,
    dv: Tensor,
    dq: Accumulator | None,
    pair_tokens: int = 1,
) -> None:
    """Accumulates dk [B S K D] and dv [B S K E] in float32, and dq if given. A pair has
    `pair_tokens` tokens, more than one only on Hopper and without dq."""
    q, facts, tiles = inputs.q, inputs.facts, key_tiles(inputs)
    B, K, s, n, D, E = facts.B, facts.K, facts.s, facts.n, facts.D, facts.E
    (dq_out, add), gluon = (None, False) if dq is None else dq.next_launch(), gluon_kernels(inputs)
    for block_csr in block_csrs:
        heads, length = block_csr.heads, block_csr.length
        partial_dq, num_groups = None, heads * (facts.R // K)
        if dq_out is not None:
            partial_dq = q.new_empty(B * length * num_groups * n * tiles * facts.G, D)
        partials = [d.new_empty(block_csr.num_partials, s, d.shape[-1]) for d in (dk, dv)]
        if gluon is not None:
            gluon.backward(inputs, bwd, dk, dv, partials, partial_dq, block_csr, pair_tokens)
        else:
            at = plan("backward", facts, length, heads, dq_out is not None, bwd.gated)
            launcher(nsa_selected_bwd_key_major, (len(block_csr.owner), tiles))(
                **arguments(inputs, block_csr, at), bwd=Backward(bwd.d_out, bwd.lse, bwd.delta),
                partial_dq=partial_dq, dk=dk, dv=dv, partial_dk=partials[0],
                partial_dv=partials[1], head=block_csr.head, heads=heads,
                scale=inputs.scale, cap=launch.cap(inputs.selection.soft_cap, log2=False),
            )  # fmt: skip
        blocks = B * heads * facts.C
        enough = blocks >= ENOUGH_PROGRAMS
        settings: Any = KeyReduction(
            K, s, D, E, launch.padded(D), launch.padded(E), DKV_KEYS if enough else DKV_KEYS // 4
        )
        launcher(nsa_selected_reduce_dkv, (blocks, cdiv(s, settings.BLOCK_N), 2))(
            dk, dv, *partials, block_csr.partial_offsets, facts.S, facts.C, block_csr.head, heads,
            settings,
        )  # fmt: skip
        if dq_out is not None:
            grid, flipped = launch.grid(cdiv(length * num_groups * facts.G, REDUCE_ROWS), B)
            settings = Reduction(
                facts.R, facts.G, num_groups, tiles, D, launch.padded(D), REDUCE_ROWS, 0,
                add, False, flipped,
            )  # fmt: skip
            launcher(nsa_selected_reduce_dq, grid)(
                partial_dq, block_csr.pair_indices, dq_out, facts.T, n, block_csr.first,
                length, block_csr.head * (facts.R // K), settings,
            )  # fmt: skip
        del partial_dq, partials
