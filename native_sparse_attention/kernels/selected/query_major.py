"""The selected branch, query-major: a tile of tokens that share block indices reads their blocks of
keys and values. Forward and dq.

Rows of a tile are tokens x heads. Block indices [B T R n] are -1 for empty slots; each of the R
head groups of a token has G = H / R query heads. Tokens of an aligned group of `stride` share block
indices. One launch reads the groups that have a union (`union.py`), each block of the union once;
another launch reads the other groups.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch, streams
from ..common.counts import cdiv, next_power_of_2
from ..common.key_norms import bounds
from ..common.launch import LOG2_E, Accumulator, BackwardInputs, CombineInputs, Selection, strides
from ..common.primitives import (
    cap_slope,
    grid_position,
    load_keys,
    load_rows,
    measured_from,
    scaled_step,
    soft_capped,
    softmax_grad,
    store_combined,
    store_rows,
)
from .query_major_steps import (
    own_tiles,
    query_tile,
    row_bias,
    slot_gates,
    tile_blocks,
    tile_keys,
    visible_keys,
)
from .union import Unions

LENGTHS = ["T", "S", "start", "groups"]

# rows of a tile from which the kernel subtracts the row bound rather than the running maximum
BOUNDED_ROWS = 64


@triton.jit(do_not_specialize=LENGTHS)
def nsa_selected_fwd_query_major(
    q, k, v, norms, block_indices, counts, gates, out, lse, combine_cmp, combine_win,
    combine_gates, layer_out, starts, start, doc_last, T, S, K, R, n, s, groups, scale_log2, cap,
    q_b, q_t, q_h, k_b, k_n, k_h, v_b, v_n, v_h, g_b, g_t, g_h, g_3,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr, SLOTS: tl.constexpr, TOKENS: tl.constexpr, STRIDE: tl.constexpr,
    MEMBERS: tl.constexpr, UNION: tl.constexpr, STEP: tl.constexpr,
    TMA: tl.constexpr, RAGGED: tl.constexpr, DIAGONAL: tl.constexpr, ENDS: tl.constexpr,
    CAP: tl.constexpr, GATES: tl.constexpr, WHOLE: tl.constexpr, POSITIVE: tl.constexpr,
    BOUNDED: tl.constexpr,
    ADD: tl.constexpr, COMBINE: tl.constexpr, FLIPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: STEP tiles of tokens that share block indices, or STEP unions. Writes out and
    lse, with ADD combined with the previous out and lse; with COMBINE also the layer's output."""
    program, br, _programs, _brs = grid_position(FLIPPED)
    b, r = (br // R).to(tl.int64), (br % R).to(tl.int64)
    h = r * K // R
    if RAGGED:
        start = tl.load(starts + b).to(tl.int32)
    line = b * R + r
    first, end = own_tiles(
        program, counts, line, T, start, groups, MEMBERS, UNION, STEP, TOKENS, STRIDE
    )
    for tile in range(first, end):
        token, g, real, index_token = query_tile(tile, start, T, G, TOKENS, STRIDE, BLOCK_M)
        blocks, length = tile_blocks(
            block_indices, counts, line, tile, b * T + index_token, r, R, n, groups, SLOTS, UNION
        )
        if UNION:  # a group without a union beside one with
            real = tl.where(real, length, 0) > 0
        ends = token
        if ENDS:
            ends = tl.load(doc_last + b * T + token, mask=real, other=0)

        head = r * G + g
        row = (b * T + token) * (R * G) + head
        q_tile = load_rows(q, b * q_b + token.to(tl.int64) * q_t + head * q_h, D, BLOCK_D, real)
        if ADD:
            acc = load_rows(out, row * E, E, BLOCK_E, real).to(tl.float32)
            m = tl.load(lse + row, mask=real, other=float("-inf")) * 1.4426950408889634
            l = tl.where(m == float("-inf"), 0.0, 1.0)
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
            m = tl.full([BLOCK_M], float("-inf"), tl.float32)
            l = tl.zeros([BLOCK_M], tl.float32)
        large_logits = True
        if BOUNDED:
            m, factor, large_logits = measured_from(
                q_tile, norms, b * K + h, scale_log2, s, m, not ADD
            )
            if ADD:
                l *= factor
                acc *= factor[:, None]

        for j0 in range(0, length * BLOCK_S, BLOCK_N):
            key0, key, valid, packed = tile_keys(blocks, j0, length, S, s, BLOCK_S, BLOCK_N)
            k_tile = load_keys(k, b, h, key, key0, valid, k_b, k_n, k_h, D, BLOCK_D, TMA)
            v_tile = load_keys(v, b, h, key, key0, valid, v_b, v_n, v_h, E, BLOCK_E, TMA)
            logits = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            unit_scale, bias = scale_log2, 0.0
            if CAP or GATES or not POSITIVE:
                logits, unit_scale = logits * scale_log2, 1.0
            if CAP:
                logits = soft_capped(logits, cap)
            if GATES:
                slot = (j0 + tl.arange(0, BLOCK_N)) // BLOCK_S
                logits *= slot_gates(gates, b * T + token, r, slot, R, n, real)
            if WHOLE:
                bias = row_bias(packed, G, STRIDE, BLOCK_M, UNION)
            else:
                visible = visible_keys(
                    valid, key, packed, start + token, G, STRIDE, BLOCK_M, UNION, DIAGONAL,
                    ends, ENDS,
                )  # fmt: skip
                logits = tl.where(visible, logits, float("-inf"))
            acc, m, l = scaled_step(
                logits, unit_scale, bias, v_tile, acc, m, l, large_logits, lse, j0, BOUNDED,
                PRECISION,
            )  # fmt: skip

        empty = l == 0.0
        l = tl.where(empty, 1.0, l)
        acc *= (1.0 / l)[:, None]
        store_rows(out, row * E, acc, E, BLOCK_E, real)
        log = tl.where(empty, float("-inf"), (m + tl.log2(l)) * 0.6931471805599453)
        tl.store(lse + row, log, mask=real)
        if COMBINE:
            gate = combine_gates + b * g_b + token.to(tl.int64) * g_t + head * g_h
            store_combined(
                layer_out, acc, combine_cmp, combine_win, gate, row, g_3, E, BLOCK_E, real
            )


@triton.jit(do_not_specialize=LENGTHS)
def nsa_selected_dq_query_major(
    q, k, v, block_indices, counts, gates, d_out, lse, delta, dq, d_gates, run_if, starts, start,
    doc_last, T, S, K, R, n, s, groups, scale, cap, q_b, q_t, q_h, k_b, k_n, k_h, v_b, v_n, v_h,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr, SLOTS: tl.constexpr, TOKENS: tl.constexpr, STRIDE: tl.constexpr,
    MEMBERS: tl.constexpr, UNION: tl.constexpr, STEP: tl.constexpr,
    TMA: tl.constexpr, RAGGED: tl.constexpr, DIAGONAL: tl.constexpr, ENDS: tl.constexpr,
    CAP: tl.constexpr, GATES: tl.constexpr, WHOLE: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, RUN_IF: tl.constexpr, FLIPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: like the forward. Writes dq, with ADD adds to dq; with GATES also each head's
    gradient of each slot's gate, [B T H n]. With RUN_IF does nothing if `run_if` is 0."""
    program, br, _programs, _brs = grid_position(FLIPPED)
    b, r = (br // R).to(tl.int64), (br % R).to(tl.int64)
    h = r * K // R
    if RAGGED:
        start = tl.load(starts + b).to(tl.int32)
    line = b * R + r
    first, end = own_tiles(
        program, counts, line, T, start, groups, MEMBERS, UNION, STEP, TOKENS, STRIDE
    )
    if RUN_IF:
        end = tl.where(tl.load(run_if) != 0, end, first)
    for tile in range(first, end):
        token, g, real, index_token = query_tile(tile, start, T, G, TOKENS, STRIDE, BLOCK_M)
        blocks, length = tile_blocks(
            block_indices, counts, line, tile, b * T + index_token, r, R, n, groups, SLOTS, UNION
        )
        if UNION:  # a group without a union beside one with
            real = tl.where(real, length, 0) > 0
        ends = token
        if ENDS:
            ends = tl.load(doc_last + b * T + token, mask=real, other=0)

        head = r * G + g
        row = (b * T + token) * (R * G) + head
        q_tile = load_rows(q, b * q_b + token.to(tl.int64) * q_t + head * q_h, D, BLOCK_D, real)
        do_tile = load_rows(d_out, row * E, E, BLOCK_E, real)
        lse_row = tl.load(lse + row, mask=real, other=0.0)
        delta_row = tl.load(delta + row, mask=real, other=0.0)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        gate_sum = tl.zeros([BLOCK_M], tl.float32)

        for j0 in range(0, length * BLOCK_S, BLOCK_N):
            key0, key, valid, packed = tile_keys(blocks, j0, length, S, s, BLOCK_S, BLOCK_N)
            k_tile = load_keys(k, b, h, key, key0, valid, k_b, k_n, k_h, D, BLOCK_D, TMA)
            v_tile = load_keys(v, b, h, key, key0, valid, v_b, v_n, v_h, E, BLOCK_E, TMA)
            product = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            if CAP or GATES:
                logits = product * scale
                if CAP:
                    logits = soft_capped(logits, cap)
                weight = 1.0
                if GATES:
                    slot = (j0 + tl.arange(0, BLOCK_N)) // BLOCK_S
                    weight = slot_gates(gates, b * T + token, r, slot, R, n, real)
                logits2 = logits * weight * 1.4426950408889634
            else:
                logits2 = product * (scale * 1.4426950408889634)
            seen_lse = lse_row
            if WHOLE:
                seen_lse -= row_bias(packed, G, STRIDE, BLOCK_M, UNION)
            else:
                visible = visible_keys(
                    valid, key, packed, start + token, G, STRIDE, BLOCK_M, UNION, DIAGONAL, ends,
                    ENDS,
                )  # fmt: skip
                logits2 = tl.where(visible, logits2, float("-inf"))
            dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
            _p, ds = softmax_grad(logits2, 1.0, dp, seen_lse[:, None], delta_row[:, None], GATED)
            if GATES:
                gate_grad, first_slot = ds * logits, j0 // BLOCK_S
                if BLOCK_N < BLOCK_S:  # a block takes several iterations; store at the last
                    gate_sum = tl.sum(gate_grad, 1) + tl.where(j0 % BLOCK_S == 0, 0.0, gate_sum)
                    complete = real & ((j0 + BLOCK_N) % BLOCK_S == 0)
                    tl.store(d_gates + row * n + first_slot, gate_sum, mask=complete)
                else:
                    gate_grad = tl.reshape(gate_grad, [BLOCK_M, BLOCK_N // BLOCK_S, BLOCK_S])
                    slot = first_slot + tl.arange(0, BLOCK_N // BLOCK_S)
                    at = (row * n)[:, None] + slot[None]
                    seen = real[:, None] & (slot < n)[None]
                    tl.store(d_gates + at, tl.sum(gate_grad, 2), mask=seen)
                ds *= weight
            if CAP:
                ds *= cap_slope(logits, cap)
            acc += tl.dot(ds.to(k_tile.dtype), k_tile, input_precision=PRECISION)

        acc *= scale
        if ADD:
            acc += load_rows(dq, row * D, D, BLOCK_D, real).to(tl.float32)
        store_rows(dq, row * D, acc, D, BLOCK_D, real)


# launches


def arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    kernel: str,
    unions: Unions | None,
    is_union: bool,
    rare: bool,
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Grid and arguments of both kernels. With `unions` they run the groups that have a union if
    `is_union`, else the other groups. With `rare` few programs have work."""
    B, T, H, D = q.shape
    S, K, E = k.shape[1], k.shape[2], v.shape[-1]
    R, n = selection.block_indices.shape[2:]
    s, stride, G = selection.s, selection.stride, H // R
    # the largest number of tokens that divides `stride` and fits in a tile
    max_rows = launch.architecture().query_major_rows
    fitting = (t for t in range(1, stride + 1) if stride % t == 0 and t * G <= max_rows)
    tokens = max(fitting, default=1)
    members = 1 if unions is None else unions.members
    if is_union:
        tokens *= members
    tile = launch.query_major_tile(kernel, max(D, E), tokens * G, q.dtype, is_union)
    step = 1 if unions is None else launch.tiles_per_program(unions.counts.numel(), members, rare)
    if not is_union:
        step = min(step, members)  # tiles of one group, all run or all skipped
    block_n, block_s = tile.block_n, next_power_of_2(s)
    # a row sees all keys of a tile or none
    whole = block_n <= block_s == s and S % s == 0
    whole = whole and not selection.diagonal and not launch.ends(selection)["ENDS"]
    # the tensor memory accelerator reads blocks that are a multiple of a tile
    descriptors = [
        launch.tma_descriptor(t, block_n) if block_n <= block_s else None for t in (k, v)
    ]
    tma = None not in descriptors
    args = dict(
        q=q, k=descriptors[0] if tma else k, v=descriptors[1] if tma else v, TMA=tma,
        **strides("q", q, "bth"), **strides("k", k, "bnh"), **strides("v", v, "bnh"),
        block_indices=unions.blocks if unions and is_union else selection.block_indices,
        gates=selection.gates, counts=None if unions is None else unions.counts,
        groups=0 if unions is None else unions.groups, starts=selection.starts,
        start=selection.start, T=T, S=S, K=K, R=R, s=s, G=G, D=D,
        n=unions.limit if unions and is_union else n, E=E, BLOCK_D=launch.padded(D),
        BLOCK_E=launch.padded(E), BLOCK_M=tile.block_m, BLOCK_N=block_n, BLOCK_S=block_s,
        SLOTS=next_power_of_2(n), TOKENS=tokens,
        STRIDE=stride, MEMBERS=members, UNION=is_union, STEP=step, RAGGED=selection.starts is
        not None, DIAGONAL=selection.diagonal, **launch.ends(selection),
        **launch.cap(selection.soft_cap, in_log2=kernel == "forward"),
        GATES=selection.gates is not None, WHOLE=whole, PRECISION="ieee", num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    grid, args["FLIPPED"] = launch.grid(cdiv(selection.aligned, tokens * step), B * R)
    return grid, args


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    scale: float,
    partial: tuple[Tensor, Tensor] | None = None,
    unions: Unions | None = None,
    outputs: tuple[Tensor, Tensor] | None = None,
    norms: Tensor | None = None,
    combine_inputs: CombineInputs | None = None,
) -> tuple[Tensor, Tensor]:
    """out [B T H E] and lse [B T H] over the top-n blocks; accumulates in place into `partial`.
    With `outputs`, in which another kernel writes most groups, writes only those that have a union.
    `norms` are the key norms. Writes the layer's output of `combine_inputs`."""
    out, lse = outputs or partial or launch.empty_outputs(q, v)
    rare = outputs is not None

    def run(is_union: bool) -> None:
        grid, args = arguments(q, k, v, selection, "forward", unions, is_union, rare)
        # small tiles wait for keys, not for the running maximum
        bounded = selection.gates is None and args["BLOCK_M"] >= BOUNDED_ROWS
        args |= bounds(norms if bounded else None)
        nsa_selected_fwd_query_major[grid](
            out=out, lse=lse, scale_log2=scale * LOG2_E, POSITIVE=scale > 0,
            ADD=partial is not None,
            **launch.combine_arguments(combine_inputs), **args,
        )  # fmt: skip

    if unions is None or rare:
        run(unions is not None)
        return out, lse
    with streams.forked(q.device) as side:
        with side:
            run(True)
        run(False)
    return out, lse


def backward_q(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    scale: float,
    bwd: BackwardInputs,
    dq: Accumulator,
    unions: Unions | None = None,
    run_if: Tensor | None = None,
) -> Tensor | None:
    """Accumulates dq and returns the gradient of the gates. Does nothing if `run_if` is 0 on the
    device."""
    R, n = selection.block_indices.shape[2:]
    d_gates = None
    if selection.gates is not None:
        d_gates = q.new_zeros(*q.shape[:3], n, dtype=torch.float32)
    if run_if is not None:  # the kernels may write nothing
        dq.begin()
    dq_args = dq.arguments()
    for is_union in (False,) if unions is None else (False, True):
        grid, args = arguments(q, k, v, selection, "dq", unions, is_union, run_if is not None)
        args |= bwd.arguments() | dq_args
        nsa_selected_dq_query_major[grid](
            d_gates=d_gates, scale=scale, run_if=run_if, RUN_IF=run_if is not None, **args
        )
    return None if d_gates is None else d_gates.unflatten(2, (R, -1)).sum(3)
