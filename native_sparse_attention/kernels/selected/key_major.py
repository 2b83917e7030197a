"""The selected branch, key-major: a program reads one block of keys and values and the queries that
chose it. It computes dk and dv. For small head groups, whose query-major tiles would be nearly
empty, it also computes the forward and dq, as partials that `reduce.py` reduces for each query.

Rows of a tile are pairs (see `csr.py`) x heads. Pair e of block indices [B T R n] is slot e % n of
head group e // n % R of token e // (n R). Partials have one row per pair and head. The forward's
are in the order of the block indices, so that the lse of a query's slots are adjacent. Partial dq
is in the order of the chunk's pairs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch, streams
from ..common.counts import cdiv, next_power_of_2
from ..common.launch import (
    ENOUGH_PROGRAMS,
    LOG2_E,
    Accumulator,
    BackwardInputs,
    CombineInputs,
    Selection,
    strides,
)
from ..common.primitives import (
    cap_slope,
    large,
    load_rows,
    narrow,
    soft_capped,
    softmax_grad,
    store_rows,
)
from . import key_major_sm90, workspace
from .csr import BlockCSR
from .reduce import (
    DKV_KEYS,
    DQ_ROWS,
    OUT_ROWS,
    UNROLL,
    nsa_selected_reduce_dkv,
    nsa_selected_reduce_dq,
    nsa_selected_reduce_out,
    store_partials,
)

# one compiled kernel for all lengths
LENGTHS = ["T", "S", "C", "BLOCKS", "start"]


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


@triton.jit(do_not_specialize=[*LENGTHS, "first", "length"])
def nsa_selected_fwd_key_major(
    q, k, v, gates, partial_out, partial_lse, pairs, offsets, owner, ordinals, tile_pairs, starts,
    start, doc_last, T, S, K, s, C, BLOCKS, first, length, scale_log2, cap,
    q_b, q_t, q_h, k_b, k_n, k_h, v_b, v_n, v_h,
    R: tl.constexpr, n: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
    RAGGED: tl.constexpr, DIAGONAL: tl.constexpr, ENDS: tl.constexpr, CAP: tl.constexpr,
    GATES: tl.constexpr, WHOLE: tl.constexpr, POSITIVE: tl.constexpr, WIDE: tl.constexpr,
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
            if CAP or GATES or not POSITIVE:
                logits, unit_scale = logits * scale_log2, 1.0
            if CAP:
                logits = soft_capped(logits, cap)
            if GATES:
                logits *= tl.load(gates + e, mask=real, other=1.0).to(tl.float32)[:, None]
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
    q, k, v, gates, d_out, lse, delta, partial_dq, d_gates, dk, dv, partial_dk, partial_dv,
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
    dq, and with GATES each row's gradient of its pair's gate."""
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
                if DQ:
                    at = (e * KEY_TILES + key_tile) * G + query_head % G
                    tl.store(d_gates + at, tl.sum(ds * logits, 0), mask=real)
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


# launches


def arguments(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, block_csr: BlockCSR, kernel: str
) -> dict[str, Any]:
    """Arguments of both kernels over work tiles."""
    H, D = q.shape[2:]
    S, K, E = k.shape[1], k.shape[2], v.shape[-1]
    B, T, R, n = selection.block_indices.shape
    tile = launch.key_major_tile(kernel, max(D, E), H // R, q.dtype)
    num_blocks = cdiv(S, selection.s)
    # tiles have no padding keys, and each row sees all keys
    whole = launch.padded(selection.s) == selection.s and S % selection.s == 0
    whole = whole and not selection.diagonal and not launch.ends(selection)["ENDS"]
    # rows of d_out, of partials, of dk
    key_tiles, num_groups = cdiv(selection.s, tile.block_n), block_csr.head_groups(R, K)[1]
    max_rows = max(T * H, block_csr.length * num_groups * (H // R) * n * key_tiles, S * K)
    return dict(
        q=q, k=k, v=v, **strides("q", q, "bth"), **strides("k", k, "bnh"), **strides("v", v, "bnh"),
        gates=selection.gates, pairs=block_csr.pairs, offsets=block_csr.offsets,
        owner=block_csr.owner, ordinals=block_csr.ordinals, tile_pairs=block_csr.tile_pairs,
        starts=selection.starts, start=selection.start, T=T, S=S, K=K, R=R, n=n, s=selection.s,
        C=num_blocks, BLOCKS=B * block_csr.heads * num_blocks, G=H // R, D=D, E=E,
        BLOCK_D=launch.padded(D), BLOCK_E=launch.padded(E), BLOCK_M=tile.block_m,
        RAGGED=selection.starts is not None, DIAGONAL=selection.diagonal, **launch.ends(selection),
        **launch.cap(selection.soft_cap, in_log2=kernel == "forward"),
        GATES=selection.gates is not None, WHOLE=whole,
        WIDE=launch.wide(q, k, v) or B * max(max_rows * max(D, E), T * R * n) >= 1 << 31,
        PRECISION="ieee", num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    scale: float,
    block_csrs: list[BlockCSR],
    partial: tuple[Tensor, Tensor] | None = None,
    combine_inputs: CombineInputs | None = None,
) -> tuple[Tensor, Tensor]:
    """out [B T H E] and lse [B T H] over the top-n blocks; accumulates in place into `partial`, out
    and lse of other keys. Writes the layer's output of `combine_inputs`. Chunks have all heads."""
    (B, T, H, _), E = q.shape, v.shape[-1]
    out, lse = partial or launch.empty_outputs(q, v)
    R, n = selection.block_indices.shape[2:]
    # of each pair and head, in the longest chunk; lse in units of log2
    rows = B * max(block_csr.length for block_csr in block_csrs) * H * n
    partial_out, partial_lse = q.new_empty(rows, E), q.new_empty(rows, dtype=torch.float32)
    on_hopper = key_major_sm90.is_supported(q, k, v, selection, scale, "forward")
    for block_csr in block_csrs:
        if on_hopper:
            key_major_sm90.forward(q, k, v, selection, scale, block_csr, partial_out, partial_lse)
        else:
            nsa_selected_fwd_key_major[(len(block_csr.owner),)](
                partial_out=partial_out, partial_lse=partial_lse, first=block_csr.first,
                length=block_csr.length, scale_log2=scale * LOG2_E, POSITIVE=scale > 0,
                BLOCK_S=launch.padded(selection.s),
                **arguments(q, k, v, selection, block_csr, "forward"),
            )  # fmt: skip
        grid, flipped = launch.grid(cdiv(block_csr.length * H, OUT_ROWS), B)
        nsa_selected_reduce_out[grid](
            partial_out, partial_lse, selection.block_indices, out, lse, T=T, R=R, n=n,
            first=block_csr.first, length=block_csr.length, G=H // R, E=E,
            BLOCK_E=launch.padded(E), BLOCK_M=OUT_ROWS, SLOTS=next_power_of_2(n),
            ADD=partial is not None, FLIPPED=flipped,
            **launch.combine_arguments(combine_inputs),
        )  # fmt: skip
    return out, lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    scale: float,
    bwd: BackwardInputs,
    block_csrs: list[BlockCSR],
    dk: Tensor,
    dv: Tensor,
    dq: Accumulator | None,
    overlapping: Tensor | None = None,
    after: torch.cuda.Event | None = None,
    pair_tokens: int = 1,
) -> Tensor | None:
    """Accumulates dk [B S K D] and dv [B S K E] in float32, and dq if given: after the event
    `after`, and unless `overlapping` is not 0 on the device. With dq returns the gradient of the
    gates. A pair has `pair_tokens` tokens, more than one only on Hopper and without dq."""
    B, T, H, D = q.shape
    S, K, E = k.shape[1], k.shape[2], v.shape[-1]
    s, (R, n) = selection.s, selection.block_indices.shape[2:]
    key_tiles, block_n, rows, on_hopper = workspace.block_tiles(q, k, v, selection, scale)
    d_gates = None
    if dq is not None and selection.gates is not None:
        d_gates = q.new_zeros(
            *selection.block_indices.shape, key_tiles * H // R, dtype=torch.float32
        )
    dq_args = None if dq is None else dq.arguments()
    for block_csr in block_csrs:
        partial_dq, (first_group, num_groups) = None, block_csr.head_groups(R, K)
        if dq_args is not None:
            partial_dq = q.new_empty(B * block_csr.length * num_groups * n * key_tiles, rows, D)
        partials = [d.new_empty(block_csr.num_partials, s, d.shape[-1]) for d in (dk, dv)]
        if on_hopper:
            key_major_sm90.backward(
                q, k, v, selection, scale, bwd, dk, dv, partials, partial_dq, overlapping,
                block_csr, pair_tokens,
            )  # fmt: skip
        else:
            nsa_selected_bwd_key_major[(len(block_csr.owner), key_tiles)](
                partial_dq=partial_dq, d_gates=d_gates, dk=dk, dv=dv, partial_dk=partials[0],
                partial_dv=partials[1], partial_offsets=block_csr.partial_offsets, scale=scale,
                BLOCK_N=block_n, head=block_csr.head, heads=block_csr.heads,
                DQ=dq_args is not None, KEY_TILES=key_tiles, **bwd.arguments(),
                **arguments(q, k, v, selection, block_csr, "backward"),
            )  # fmt: skip
        lines, blocks = B * block_csr.heads, cdiv(S, s)
        keys = DKV_KEYS if lines * blocks >= ENOUGH_PROGRAMS else DKV_KEYS // 4
        nsa_selected_reduce_dkv[(lines * blocks, cdiv(s, keys), 2)](
            *partials, dk, dv, block_csr.partial_offsets, S, K, s, blocks, block_csr.head,
            block_csr.heads, D=D, E=E, BLOCK_D=launch.padded(D), BLOCK_E=launch.padded(E),
            BLOCK_N=keys, UNROLL=UNROLL,
        )  # fmt: skip
        if dq_args is not None:
            streams.wait(q.device, after)
            tiles = cdiv(block_csr.length * num_groups * (H // R), DQ_ROWS)
            grid, flipped = launch.grid(tiles, B)
            nsa_selected_reduce_dq[grid](
                partial_dq, block_csr.pair_indices, skip_if=overlapping, T=T, R=R, n=n,
                first=block_csr.first, length=block_csr.length, first_group=first_group,
                GROUPS=num_groups, KEY_TILES=key_tiles, ROWS=rows, G=H // R, D=D,
                BLOCK_D=launch.padded(D), BLOCK_M=DQ_ROWS, SKIP_IF=overlapping is not None,
                FLIPPED=flipped, **dq_args,
            )  # fmt: skip
        del partial_dq, partials
    return None if d_gates is None else d_gates.sum(-1)
