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
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common import primitives as steps
from ..common.precompile import launcher
from .csr import CSR, Chunk
from .inputs import Backward, Facts, Gradients, Inputs, combine_group, settings
from .query_major import gated_logits, visible_keys

# one compiled kernel for all lengths
LENGTHS = ["T", "S", "C", "BLOCKS", "start", "tile_pairs", "first", "length", "head"]
# reductions: rows of a program; keys of a program, fewer if blocks are few
REDUCE_ROWS, DKV_KEYS = tl.constexpr(16), 64


@triton.jit
def load_work_tile(
    k, v, index, csr, tile_pairs, start, S, C, head, key_tile, F: tl.constexpr
):  # fmt: skip
    """Block, first pair and end of this program's work tile, batch row, KV head and position of the
    first token; a tile of the block's keys and values, and their numbers j in the block."""
    block = tl.load(csr.owner + tl.program_id(0))
    ordinal = tl.load(csr.ordinals + tl.program_id(0)).to(tl.int64)
    begin = tl.load(csr.offsets + block) + ordinal * tile_pairs
    end = tl.minimum(begin + tile_pairs, tl.load(csr.offsets + block + 1))
    block, begin, end = (
        steps.large(block, F.WIDE),
        steps.narrow(begin, F.WIDE),
        steps.narrow(end, F.WIDE),
    )
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
            logits = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
            unit_scale = scale_log2
            if F.CAP or not F.POSITIVE:
                logits, unit_scale = logits * scale_log2, 1.0
            if F.CAP:
                logits = steps.soft_capped(logits, cap)
            if not F.WHOLE:
                visible = visible_keys(valid[None], key[None], position[:, None], ends[:, None], F)
                logits = tl.where(visible, logits, float("-inf"))
            m = tl.max(logits, 1) * unit_scale
            # padding rows may see no key
            p = tl.exp2(logits * unit_scale - tl.where(real, m, 0.0)[:, None])
            l = tl.where(real, tl.sum(p, 1), 1.0)
            o = tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee") * (1.0 / l)[:, None]
            row = (e - (b * (T - length) + first) * (F.R * F.n)) * F.G + head % F.G
            steps.store_rows(partial_out, row * F.E, o, F.E, F.BLOCK_E, real, ONCE=True)
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
                pair = (
                    i - steps.narrow(tl.load(csr.offsets), F.WIDE) + tl.arange(0, F.BLOCK_M) // F.G
                )
                offset = (
                    steps.large(pair, F.WIDE) * F.KEY_TILES + key_tile
                ) * F.G + query_head % F.G
                steps.store_rows(partial_dq, offset * F.D, dq, F.D, F.BLOCK_D, real, ONCE=True)

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
    """One program: M rows (token, head) of a chunk. Reduces the partials of a row's slots, and with
    ADD out and lse, into these. partial_lse is in units of log2. With COMBINE also writes the
    layer's output."""
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
        o = steps.load_rows(partial_out, offset * F.E, F.E, F.BLOCK_E, chosen, ONCE=True)
        acc += weight[:, None] * o.to(tl.float32)
    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    acc = acc / l[:, None]
    if F.COMBINE:
        token = first + i // H
        gate = combine.gates + b * combine.b + token.to(tl.int64) * combine.t + i % H * combine.h
        steps.store_combined(
            combine.out, acc, combine.cmp, combine.win, gate, row, combine.branch, F.E, F.BLOCK_E,
            real,
        )  # fmt: skip
    steps.store_rows(out, row * F.E, acc, F.E, F.BLOCK_E, real)
    tl.store(
        lse + row, tl.where(empty, float("-inf"), (m + tl.log2(l)) * 0.6931471805599453), mask=real
    )


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
        rows = steps.load_rows(partial_dq, partial * F.D, F.D, F.BLOCK_D, pair >= 0, ONCE=True)
        acc += rows.to(tl.float32)
    steps.store_rows(dq, row * F.D, acc, F.D, F.BLOCK_D, real)


def gluon_kernels(inputs: Inputs) -> Any:
    """The module of the Gluon backward if it supports a call, else None."""
    if not launch.supports_gluon(inputs.q):
        return None
    from . import key_major_sm90

    return key_major_sm90 if key_major_sm90.is_supported(inputs) else None


def is_faster(inputs: Inputs) -> bool:
    """Whether forward and dq are key-major: query-major tiles would have few rows."""
    facts = inputs.facts
    few = facts.rows < launch.FEW_ROWS and not facts.F.GATES
    return few and launch.holds_block(facts.F.s, inputs.k, inputs.v)


@functools.lru_cache(maxsize=256)
def plan(
    kernel: str, facts: Facts, length: int, heads: int, has_dq: bool = False, gated: bool = False,
    add: bool = False, combine: bool = False, is_gluon: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """How to launch "forward" or "backward" over a chunk of `length` tokens and `heads` heads."""
    F = facts.F
    tile = launch.key_major_tile(kernel, facts.width, F.G, facts.dtype)
    keys = launch.padded(F.s)
    if kernel == "backward" and not is_gluon:
        keys = min(keys, tile.block_n)
    # rows of d_out, of partials, of dk
    num_rows = length * heads * (F.R // F.K * F.G) * F.n * launch.cdiv(F.s, tile.block_n)
    elements = max(facts.T * F.R * F.G, num_rows, facts.S * F.K) * facts.width
    wide = facts.B * max(elements, facts.T * F.R * F.n) >= 1 << 31
    # a chunk has HEADS KV heads, a block KEY_TILES tiles of BLOCK_N keys
    F = settings(
        F, HEADS=heads, BLOCK_M=tile.block_m, BLOCK_N=keys, KEY_TILES=launch.cdiv(F.s, keys),
        # tiles have no padding keys, and each row sees all keys
        WHOLE=launch.padded(F.s) == F.s and facts.whole, GATED=gated, DQ=has_dq,
        WIDE=facts.wide or wide, ADD=add, COMBINE=combine,
    )  # fmt: skip
    return dict(F=F, num_warps=tile.num_warps, num_stages=tile.num_stages)


def arguments(inputs: Inputs, csr: CSR, chunk: Chunk) -> dict[str, Any]:
    """Arguments of both kernels over work tiles."""
    facts = inputs.facts
    q, k, v = (launch.strided(t) for t in (inputs.q, inputs.k, inputs.v))
    return dict(
        q=q, k=k, v=v, index=inputs.index(), csr=chunk.csr, tile_pairs=csr.tile_pairs, T=facts.T,
        S=facts.S, C=facts.C, BLOCKS=csr.blocks, start=inputs.selection.start,
    )  # fmt: skip


def forward(
    inputs: Inputs,
    csr: CSR,
    partial: tuple[Tensor, Tensor] | None,
    combine_inputs: launch.CombineInputs | None,
) -> tuple[Tensor, Tensor]:
    """out [B T H E] and lse [B T H]; accumulates in place into `partial`. Chunks have all heads."""
    facts, F, H = inputs.facts, inputs.facts.F, inputs.facts.H
    out, lse = partial or launch.empty_outputs(inputs.q, inputs.v)
    # of each pair and head, in the longest chunk; lse in units of log2
    rows = facts.B * min(csr.length, facts.T) * H * F.n
    partials = inputs.q.new_empty(rows, F.E), lse.new_empty(rows)
    for chunk in csr.chunks():
        length, add, combine = chunk.length, partial is not None, combine_inputs is not None
        step = plan("forward", facts, length, F.K, add=add, combine=combine)
        launcher(nsa_selected_fwd_key_major, (csr.max_tiles,))(
            **arguments(inputs, csr, chunk), **step, partial_out=partials[0],
            partial_lse=partials[1], first=chunk.first, length=length,
            scale_log2=inputs.scale * launch.LOG2_E, cap=launch.cap(inputs.selection.soft_cap),
        )  # fmt: skip
        launcher(nsa_selected_reduce_out, (facts.B * launch.cdiv(length * H, REDUCE_ROWS.value),))(
            *partials, inputs.selection.block_indices, out, lse, combine_group(combine_inputs),
            facts.T, F.n, chunk.first, length, step["F"],
        )  # fmt: skip
    return out, lse


def backward(
    inputs: Inputs,
    bwd: launch.BackwardInputs,
    csr: CSR,
    dk: Tensor,
    dv: Tensor,
    dq: launch.Accumulator | None,
    gluon: Any,
    pair_tokens: int = 1,
) -> None:
    """Accumulates dk [B S K D] and dv [B S K E] in float32, and dq if given. A pair has
    `pair_tokens` tokens, more than one only with the `gluon` kernels and without dq."""
    facts, F = inputs.facts, inputs.facts.F
    dq_out, add = (None, False) if dq is None else dq.next_launch()
    for chunk in csr.chunks():
        step = plan(
            "backward", facts, chunk.length, csr.heads, dq is not None, bwd.gated, add=add,
            is_gluon=gluon is not None,
        )  # fmt: skip
        chunk_rows, tiles = chunk.length * csr.heads * (facts.H // F.K), step["F"].KEY_TILES
        partial_dq = None
        if dq is not None:
            partial_dq = inputs.q.new_empty(facts.B * chunk_rows * F.n * tiles, F.D)
        partials = (d.new_empty(csr.num_partials, F.s, d.shape[-1]) for d in (dk, dv))
        gradients = Gradients(dk, dv, *partials)
        if gluon is not None:
            gluon.backward(inputs, bwd, gradients, partial_dq, csr, chunk, pair_tokens)
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
