"""The selected branch, block by block: one block of keys and values against all queries that chose
it. dk and dv; and for small groups of heads, whose tiles would be nearly empty query by query, also
the forward and dq, in parts that are then joined for each query.

Rows of a tile are entries (see `csr.py`) x heads: entry e of lists [B T R n] is slot e % n of
list e // n % R of token e // (n R). Parts have one row an entry and head: those of the forward in
the order of the lists, where what they are joined by, one number each, is found in few sectors;
those of dq, which are only added up, in the order of the span's entries, as they are formed.
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
    JOIN_ROWS,
    SPILLS,
    SPILT_KEYS,
    SUM_ROWS,
    nsa_selected_reduce_dkv,
    nsa_selected_reduce_dq,
    nsa_selected_reduce_out,
    store_parts,
)

# one compiled kernel for all lengths
LENGTHS = ["T", "S", "C", "BLOCKS", "start"]


@triton.jit
def item_entries(item, owner, ordinals, bounds, chunk, WIDE: tl.constexpr):
    """The block of an item, and its first entry and one past the last. Numbers have 64 bits where
    offsets need them."""
    block = tl.load(owner + item)
    begin = tl.load(bounds + block) + tl.load(ordinals + item).to(tl.int64) * chunk
    end = tl.minimum(begin + chunk, tl.load(bounds + block + 1))
    return large(block, WIDE), narrow(begin, WIDE), narrow(end, WIDE)


@triton.jit
def load_entries(entries, i, end, G: tl.constexpr, BLOCK_M: tl.constexpr):
    """The entry of each row of a tile of entries from i on, 0 for rows that are none."""
    row = tl.arange(0, BLOCK_M)
    at = i + row // G
    return tl.load(entries + at, mask=(row < BLOCK_M // G * G) & (at < end), other=0)


@triton.jit
def entry_rows(
    e, i, end, R: tl.constexpr, n: tl.constexpr, G: tl.constexpr, BLOCK_M: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """The rows of a tile of entries e from i on: number of each entry, its batch row x token, its
    head, and whether it is one."""
    row = tl.arange(0, BLOCK_M)
    real = (row < BLOCK_M // G * G) & (i + row // G < end)
    return large(e, WIDE), large(e // n // R, WIDE), e // n % R * G + row % G, real


@triton.jit
def place_of(i, bounds, G: tl.constexpr, BLOCK_M: tl.constexpr, WIDE: tl.constexpr):
    """Where among the entries of the span those of the rows of a tile from entry i on lie."""
    return large(i - narrow(tl.load(bounds), WIDE) + tl.arange(0, BLOCK_M) // G, WIDE)


@triton.jit(do_not_specialize=[*LENGTHS, "first", "length"])
def nsa_selected_fwd_key_major(
    q, k, v, gates, part, part_lse, entries, bounds, owner, ordinals, chunk, starts, start,
    doc_last, T, S, K, s, C, BLOCKS, first, length, scale_log2, cap,
    q_b, q_t, q_h, k_b, k_n, k_h, v_b, v_n, v_h,
    R: tl.constexpr, n: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
    RAGGED: tl.constexpr, DIAGONAL: tl.constexpr, ENDS: tl.constexpr, CAP: tl.constexpr,
    GATES: tl.constexpr, WHOLE: tl.constexpr, POSITIVE: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: an item. Writes each row's attention to the item's block alone and its lse."""
    item = tl.program_id(0)
    if tl.load(owner + item) < BLOCKS:
        block, begin, end = item_entries(item, owner, ordinals, bounds, chunk, WIDE)
        b, h, c = block // C // K, block // C % K, block % C
        if RAGGED:
            start = tl.load(starts + b).to(tl.int32)
        key = c * s + tl.arange(0, BLOCK_S)
        there = (tl.arange(0, BLOCK_S) < s) & (key < S)
        k_tile = load_rows(k + b * k_b + h * k_h, key * k_n, D, BLOCK_D, there)
        v_tile = load_rows(v + b * v_b + h * v_h, key * v_n, E, BLOCK_E, there)
        ahead = load_entries(entries, begin, end, G, BLOCK_M)
        for i in range(begin, end, BLOCK_M // G):
            # those of the next tile now: where their rows lie must be known before these load
            e, bt, query_head, real = entry_rows(ahead, i, end, R, n, G, BLOCK_M, WIDE)
            ahead = load_entries(entries, i + BLOCK_M // G, end, G, BLOCK_M)
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
                visible = there[None]
                if DIAGONAL:
                    visible = visible & (key[None] <= start + t[:, None])
                if ENDS:
                    ends = tl.load(doc_last + b * T + t, mask=real, other=0)
                    visible = visible & (key[None] < ends[:, None])
                logits = tl.where(visible, logits, float("-inf"))
            m = tl.max(logits, 1) * unit_scale
            # rows that are none may see nothing
            p = tl.exp2(logits * unit_scale - tl.where(real, m, 0.0)[:, None])
            l = tl.where(real, tl.sum(p, 1), 1.0)
            o = tl.dot(p.to(v_tile.dtype), v_tile, input_precision=PRECISION) * (1.0 / l)[:, None]
            row = (e - (b * (T - length) + first) * (R * n)) * G + query_head % G
            store_parts(part, row * E, o, E, BLOCK_E, real)
            tl.store(part_lse + row, m + tl.log2(l), mask=real)


@triton.jit(do_not_specialize=[*LENGTHS, "head", "heads"])
def nsa_selected_bwd_key_major(
    q, k, v, gates, d_out, lse, delta, part, d_gates, dk, dv, spill_k, spill_v,
    entries, bounds, owner, ordinals, spill_bounds, chunk, starts, start,
    doc_last, T, S, K, s, C, BLOCKS, head, heads, scale, cap,
    q_b, q_t, q_h, k_b, k_n, k_h, v_b, v_n, v_h,
    R: tl.constexpr, n: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    RAGGED: tl.constexpr, DIAGONAL: tl.constexpr, ENDS: tl.constexpr, CAP: tl.constexpr,
    GATES: tl.constexpr, GATED: tl.constexpr, WHOLE: tl.constexpr,
    DQ: tl.constexpr, PIECES: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: an item, and a piece of N keys of its block. Adds to dk and dv of the block, or
    writes the item's share where the block has several. With DQ also writes each row's dq from the
    piece, and with GATES each row's gradient of its entry's gate."""
    item = tl.program_id(0)
    if tl.load(owner + item) < BLOCKS:
        block, begin, end = item_entries(item, owner, ordinals, bounds, chunk, WIDE)
        b, h, c = block // C // heads, head + block // C % heads, block % C
        if RAGGED:
            start = tl.load(starts + b).to(tl.int32)
        piece = tl.program_id(1)
        j = piece * BLOCK_N + tl.arange(0, BLOCK_N)
        key = c * s + j
        there = (j < s) & (key < S)
        k_tile = load_rows(k + b * k_b + h * k_h, key * k_n, D, BLOCK_D, there)
        v_tile = load_rows(v + b * v_b + h * v_h, key * v_n, E, BLOCK_E, there)
        dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv_acc = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
        ahead = load_entries(entries, begin, end, G, BLOCK_M)
        for i in range(begin, end, BLOCK_M // G):
            # those of the next tile now: where their rows lie must be known before these load
            e, bt, query_head, real = entry_rows(ahead, i, end, R, n, G, BLOCK_M, WIDE)
            ahead = load_entries(entries, i + BLOCK_M // G, end, G, BLOCK_M)
            t = bt - b * T
            row = bt * (R * G) + query_head
            q_tile = load_rows(q, b * q_b + t * q_t + query_head * q_h, D, BLOCK_D, real)
            do_tile = load_rows(d_out, row * E, E, BLOCK_E, real)
            lse_row = tl.load(lse + row, mask=real, other=0.0)
            delta_row = tl.load(delta + row, mask=real, other=0.0)

            # [N, M]: p and ds are the left operands of what follows
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
            if not WHOLE:  # rows that are none add nothing: their q, d_out and delta are zeros
                visible = there[:, None] & real[None]
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
                    at = (e * PIECES + piece) * G + query_head % G
                    tl.store(d_gates + at, tl.sum(ds * logits, 0), mask=real)
                ds *= weight
            if CAP:
                ds *= cap_slope(logits, cap)
            ds_tile = ds.to(q_tile.dtype)
            dk_acc += tl.dot(ds_tile, q_tile, input_precision=PRECISION)
            if DQ:
                dq = tl.dot(tl.trans(ds_tile), k_tile, input_precision=PRECISION) * scale
                at = (place_of(i, bounds, G, BLOCK_M, WIDE) * PIECES + piece) * G + query_head % G
                store_parts(part, at * D, dq, D, BLOCK_D, real)

        dk_acc *= scale
        if tl.load(bounds + block + 1) - tl.load(bounds + block) <= chunk:
            at = (b * S + key) * K + h
            dk_acc += load_rows(dk, at * D, D, BLOCK_D, there)
            dv_acc += load_rows(dv, at * E, E, BLOCK_E, there)
            store_rows(dk, at * D, dk_acc, D, BLOCK_D, there)
            store_rows(dv, at * E, dv_acc, E, BLOCK_E, there)
        else:
            share = (tl.load(spill_bounds + block) + tl.load(ordinals + item)) * s + j
            store_rows(spill_k, share * D, dk_acc, D, BLOCK_D, there)
            store_rows(spill_v, share * E, dv_acc, E, BLOCK_E, there)


# launches


def arguments(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, block_csr: BlockCSR, kernel: str
) -> dict[str, Any]:
    """What the kernels over items take."""
    H, D = q.shape[2:]
    S, K, E = k.shape[1], k.shape[2], v.shape[-1]
    B, T, R, n = selection.block_indices.shape
    tile = launch.key_major_tile(kernel, max(D, E), H // R, q.dtype)
    num_blocks = cdiv(S, selection.s)
    # no key of a tile is none, and rows see all
    whole = launch.padded(selection.s) == selection.s and S % selection.s == 0
    whole = whole and not selection.diagonal and not launch.ends(selection)["ENDS"]
    # rows of d_out, of parts, of dk
    pieces, ranks = cdiv(selection.s, tile.block_n), block_csr.selections(R, K)[1]
    most = max(T * H, block_csr.length * ranks * (H // R) * n * pieces, S * K)
    return dict(
        q=q, k=k, v=v, **strides("q", q, "bth"), **strides("k", k, "bnh"), **strides("v", v, "bnh"),
        gates=selection.gates, entries=block_csr.entries, bounds=block_csr.bounds,
        owner=block_csr.owner, ordinals=block_csr.ordinals, chunk=block_csr.chunk,
        starts=selection.starts, start=selection.start, T=T, S=S, K=K, R=R, n=n, s=selection.s,
        C=num_blocks, BLOCKS=B * block_csr.heads * num_blocks, G=H // R, D=D, E=E,
        BLOCK_D=launch.padded(D), BLOCK_E=launch.padded(E), BLOCK_M=tile.block_m,
        RAGGED=selection.starts is not None, DIAGONAL=selection.diagonal, **launch.ends(selection),
        **launch.cap(selection.soft_cap, in_log2=kernel == "forward"),
        GATES=selection.gates is not None, WHOLE=whole,
        WIDE=launch.wide(q, k, v) or B * max(most * max(D, E), T * R * n) >= 1 << 31,
        PRECISION="ieee", num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def allocate(
    q: Tensor, v: Tensor, selection: Selection, block_csrs: list[BlockCSR]
) -> tuple[Tensor, Tensor]:
    """For the parts of any span of all heads: out of each entry and head, and its lse in units of
    log2."""
    longest = max(block_csr.length for block_csr in block_csrs)
    rows = q.shape[0] * longest * q.shape[2] * selection.block_indices.shape[-1]
    return q.new_empty(rows, v.shape[-1]), q.new_empty(rows, dtype=torch.float32)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    scale: float,
    block_csr: BlockCSR,
    parts: tuple[Tensor, Tensor],
) -> None:
    """Writes the parts of a span."""
    part, part_lse = parts
    if key_major_sm90.is_supported(q, k, v, selection, scale, "forward"):
        key_major_sm90.forward(q, k, v, selection, scale, block_csr, *parts)
        return
    nsa_selected_fwd_key_major[(len(block_csr.owner),)](
        part=part, part_lse=part_lse, first=block_csr.first, length=block_csr.length,
        scale_log2=scale * LOG2_E, POSITIVE=scale > 0, BLOCK_S=launch.padded(selection.s),
        **arguments(q, k, v, selection, block_csr, "forward"),
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
    parts: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """out [B T H E] and lse [B T H] over the listed blocks, joined in place with those of other
    keys if `partial` holds them. Writes the layer's output to `mix`. Spans are of all heads; if
    `parts` is given it holds those of the first."""
    (B, T, H, _), E = q.shape, v.shape[-1]
    out, lse = partial or launch.empty_outputs(q, v)
    R, n = selection.block_indices.shape[2:]
    begun = parts is not None
    parts = parts or allocate(q, v, selection, block_csrs)
    for span, block_csr in enumerate(block_csrs):
        if span > 0 or not begun:
            attend(q, k, v, selection, scale, block_csr, parts)
        grid, flipped = launch.grid(cdiv(block_csr.length * H, JOIN_ROWS), B)
        nsa_selected_reduce_out[grid](
            *parts, selection.block_indices, out, lse, T=T, R=R, n=n, first=block_csr.first,
            length=block_csr.length, G=H // R, E=E, BLOCK_E=launch.padded(E), BLOCK_M=JOIN_ROWS,
            SLOTS=next_power_of_2(n), ADD=partial is not None, FLIPPED=flipped,
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
    neighbours: int = 1,
) -> Tensor | None:
    """Adds to dk [B S K D] and dv [B S K E], float32, and to dq if it is given and `alike`, if that
    is, is 0; then also gives the gradient of the gates. Others may add to dq until `after`. An
    entry is of so many `neighbours`, on a Hopper and without dq."""
    B, T, H, D = q.shape
    S, K, E = k.shape[1], k.shape[2], v.shape[-1]
    s, (R, n) = selection.s, selection.block_indices.shape[2:]
    pieces, block_n, rows, on_hopper = workspace.pieces(q, k, v, selection, scale)
    d_gates = None
    if dq is not None and selection.gates is not None:
        d_gates = q.new_zeros(*selection.block_indices.shape, pieces * H // R, dtype=torch.float32)
    into = None if dq is None else dq.arguments()
    for block_csr in block_csrs:
        part, (rank, ranks) = None, block_csr.selections(R, K)
        if into is not None:
            part = q.new_empty(B * block_csr.length * ranks * n * pieces, rows, D)
        spills = [d.new_empty(block_csr.spills, s, d.shape[-1]) for d in (dk, dv)]
        if on_hopper:
            key_major_sm90.backward(
                q, k, v, selection, scale, bwd, dk, dv, spills, part, overlapping, block_csr,
                neighbours,
            )  # fmt: skip
        else:
            nsa_selected_bwd_key_major[(len(block_csr.owner), pieces)](
                part=part, d_gates=d_gates, dk=dk, dv=dv, spill_k=spills[0], spill_v=spills[1],
                spill_bounds=block_csr.spill_bounds, scale=scale, BLOCK_N=block_n,
                head=block_csr.head, heads=block_csr.heads,
                DQ=into is not None, PIECES=pieces, **bwd.arguments(),
                **arguments(q, k, v, selection, block_csr, "backward"),
            )  # fmt: skip
        lines, blocks = B * block_csr.heads, cdiv(S, s)
        keys = SPILT_KEYS if lines * blocks >= ENOUGH_PROGRAMS else SPILT_KEYS // 4
        nsa_selected_reduce_dkv[(lines * blocks, cdiv(s, keys), 2)](
            *spills, dk, dv, block_csr.spill_bounds, S, K, s, blocks, block_csr.head,
            block_csr.heads, D=D, E=E, BLOCK_D=launch.padded(D), BLOCK_E=launch.padded(E),
            BLOCK_N=keys, SPILLS=SPILLS,
        )  # fmt: skip
        if into is not None:
            streams.wait(q.device, after)
            tiles = cdiv(block_csr.length * ranks * (H // R), SUM_ROWS)
            grid, flipped = launch.grid(tiles, B)
            nsa_selected_reduce_dq[grid](
                part, block_csr.places, unless=overlapping, T=T, R=R, n=n, first=block_csr.first,
                length=block_csr.length, rank=rank, RANKS=ranks, PIECES=pieces, ROWS=rows, G=H // R,
                D=D, BLOCK_D=launch.padded(D), BLOCK_M=SUM_ROWS, UNLESS=overlapping is not None,
                FLIPPED=flipped, **into,
            )  # fmt: skip
        del part, spills
    return None if d_gates is None else d_gates.sum(-1)
