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
from ..common.key_norms import bounds
from ..common.launch import (
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
    load_keys,
    load_rows,
    measured_from,
    scaled_step,
    soft_capped,
    softmax_grad,
    store_combined,
    store_rows,
)
from .inputs import Inputs
from .union import Unions

LENGTHS = ["T", "S", "start", "groups"]

# rows of a tile from which the kernel subtracts the row bound rather than the running maximum
BOUNDED_ROWS = 64


@triton.jit
def program_tiles(
    counts, starts, start, T, K, R, groups, MEMBERS: tl.constexpr, UNION: tl.constexpr,
    STEP: tl.constexpr, TOKENS: tl.constexpr, STRIDE: tl.constexpr, RAGGED: tl.constexpr,
    FLIPPED: tl.constexpr,
):  # fmt: skip
    """Batch row, head group and KV head of a program; their line in block indices; position of the
    first token; first tile and one past the last. `counts` are the sizes of the unions, 0 for a
    group without one; a group has MEMBERS members. With UNION a program has STEP unions, otherwise
    STEP tiles of a group without a union."""
    program, br, _programs, _brs = grid_position(FLIPPED)
    b, r = (br // R).to(tl.int64), (br % R).to(tl.int64)
    h = r * K // R
    if RAGGED:
        start = tl.load(starts + b).to(tl.int32)
    line = b * R + r
    first = program * STEP
    if MEMBERS == 1:
        end = first + 1
    elif UNION:
        group = first + tl.arange(0, STEP)
        count = tl.load(counts + line * groups + group, mask=group < groups, other=0)
        end = tl.where(tl.max(count, 0) > 0, tl.minimum(first + STEP, groups), first)
    else:
        count = tl.load(counts + line * groups + first // MEMBERS)
        end = tl.minimum(first + STEP, tl.cdiv(T + start % STRIDE, TOKENS))
        end = tl.where(count > 0, first, end)
    return b, r, h, line, start, first, end


@triton.jit
def load_tile(
    q, block_indices, counts, doc_last, b, r, line, tile, start, T, R, n, groups, q_b, q_t, q_h,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    SLOTS: tl.constexpr, TOKENS: tl.constexpr, STRIDE: tl.constexpr, UNION: tl.constexpr,
    ENDS: tl.constexpr,
):  # fmt: skip
    """Queries of a tile, which starts at an aligned group: token, head, row of [B T H], validity
    and document's end of each; pointer to the tile's blocks and their number: of the union, or of
    the block indices up to the last valid one."""
    first = tile * TOKENS - start % STRIDE
    i = tl.arange(0, BLOCK_M)
    token = first + i // G
    real = (i < TOKENS * G) & (token >= 0) & (token < T)
    g = i % G
    # a token that has the tile's block indices
    index_token = tl.minimum(tl.maximum(first, 0), T - 1)
    if UNION:
        blocks = block_indices + (line * groups + tile) * n
        length = tl.load(counts + line * groups + tile)
        real = tl.where(real, length, 0) > 0  # no group without a union
    else:
        blocks = block_indices + ((b * T + index_token) * R + r) * n
        slot = tl.arange(0, SLOTS)
        c = tl.load(blocks + slot, mask=slot < n, other=-1)
        length = tl.max(tl.where(c >= 0, slot + 1, 0), 0)
    ends = token
    if ENDS:
        ends = tl.load(doc_last + b * T + token, mask=real, other=0)
    head = r * G + g
    row = (b * T + token) * (R * G) + head
    q_tile = load_rows(q, b * q_b + token.to(tl.int64) * q_t + head * q_h, D, BLOCK_D, real)
    return q_tile, token, head, row, real, ends, blocks, length


@triton.jit
def tile_keys(blocks, j0, n, S, s, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys from j0 on of n blocks, concatenated and padded to BLOCK_S each. Returns the position of
    the first key, positions and validity of all keys [N], and their packed blocks (a scalar if
    BLOCK_N <= BLOCK_S)."""
    j = j0 + tl.arange(0, BLOCK_N)
    if BLOCK_N <= BLOCK_S:
        packed = tl.load(blocks + j0 // BLOCK_S, mask=j0 // BLOCK_S < n, other=-1)
    else:
        packed = tl.load(blocks + j // BLOCK_S, mask=j // BLOCK_S < n, other=-1)
    c = packed.to(tl.int32)
    key = c * s + j % BLOCK_S
    # key >= 0 stands for c >= 0: a scalar mask times a vector is an integer in Triton 3.9's
    # interpreter
    return c * s + j0 % BLOCK_S, key, (key >= 0) & (j % BLOCK_S < s) & (key < S), packed


@triton.jit
def row_bias(packed, G: tl.constexpr, STRIDE: tl.constexpr, BLOCK_M: tl.constexpr,
             UNION: tl.constexpr):  # fmt: skip
    """0 for the rows [M] that see a packed block, else -inf. With UNION a row sees the blocks that
    its member chose; otherwise all rows see the block unless the index is -1."""
    if UNION:
        member = tl.arange(0, BLOCK_M) // (G * STRIDE)
        sees = (((packed >> 32).to(tl.int32) >> member) & 1) != 0
    else:
        sees = tl.full([BLOCK_M], packed, tl.int32) >= 0
    return tl.where(sees, 0.0, float("-inf"))


@triton.jit
def visible_keys(valid, key, packed, position, G: tl.constexpr, STRIDE: tl.constexpr,
                 BLOCK_M: tl.constexpr, UNION: tl.constexpr, DIAGONAL: tl.constexpr,
                 end, ENDS: tl.constexpr):  # fmt: skip
    """Mask [M, N] of the keys that each row sees. With UNION a row sees the blocks that its member
    chose; with ENDS the keys before the row's `end`."""
    visible = valid[None]
    if UNION:
        member = tl.arange(0, BLOCK_M) // (G * STRIDE)
        members = (packed + tl.zeros_like(key)) >> 32
        members = members.to(tl.int32)[None] >> member[:, None]
        visible = visible & ((members & 1) != 0)
    if DIAGONAL:
        visible = visible & (key[None] <= position[:, None])
    if ENDS:
        visible = visible & (key[None] < end[:, None])
    return visible


@triton.jit
def slot_gates(gates, bt, r, slot, R, n, real):
    """Gates [M, N] of slots [N] of rows [M]."""
    at = ((bt * R + r) * n)[:, None] + slot[None]
    valid = real[:, None] & (slot < n)[None]
    return tl.load(gates + at, mask=valid, other=1.0).to(tl.float32)


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
    b, r, h, line, start, first, end = program_tiles(
        counts, starts, start, T, K, R, groups, MEMBERS, UNION, STEP, TOKENS, STRIDE, RAGGED,
        FLIPPED,
    )  # fmt: skip
    for tile in range(first, end):
        q_tile, token, head, row, real, ends, blocks, length = load_tile(
            q, block_indices, counts, doc_last, b, r, line, tile, start, T, R, n, groups, q_b, q_t,
            q_h, G, D, BLOCK_D, BLOCK_M, SLOTS, TOKENS, STRIDE, UNION, ENDS,
        )  # fmt: skip
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
    b, r, h, line, start, first, end = program_tiles(
        counts, starts, start, T, K, R, groups, MEMBERS, UNION, STEP, TOKENS, STRIDE, RAGGED,
        FLIPPED,
    )  # fmt: skip
    if RUN_IF:
        end = tl.where(tl.load(run_if) != 0, end, first)
    for tile in range(first, end):
        q_tile, token, _head, row, real, ends, blocks, length = load_tile(
            q, block_indices, counts, doc_last, b, r, line, tile, start, T, R, n, groups, q_b, q_t,
            q_h, G, D, BLOCK_D, BLOCK_M, SLOTS, TOKENS, STRIDE, UNION, ENDS,
        )  # fmt: skip
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


def arguments(
    inputs: Inputs, kernel: str, unions: Unions | None, is_union: bool, rare: bool
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Grid and arguments of both kernels. With `unions` they run the groups that have a union if
    `is_union`, else the other groups. With `rare` few programs have work."""
    q, k, v, selection, _scale = inputs
    args, s, stride, G = (
        inputs.arguments(kernel == "forward"),
        selection.s,
        selection.stride,
        inputs.groups,
    )
    # the largest number of tokens that divides `stride` and fits in a tile
    max_rows = launch.architecture().query_major_rows
    fitting = (t for t in range(1, stride + 1) if stride % t == 0 and t * G <= max_rows)
    tokens = max(fitting, default=1)
    members = 1 if unions is None else unions.members
    if is_union:
        tokens *= members
    tile = launch.query_major_tile(
        kernel, max(q.shape[-1], v.shape[-1]), tokens * G, q.dtype, is_union
    )
    step = 1 if unions is None else launch.tiles_per_program(unions.counts.numel(), members, rare)
    if not is_union:
        step = min(step, members)  # tiles of one group, all run or all skipped
    block_n, block_s = tile.block_n, next_power_of_2(s)
    args |= dict(
        block_indices=selection.block_indices, counts=None, groups=0, gates=selection.gates,
        GATES=selection.gates is not None, BLOCK_M=tile.block_m, BLOCK_N=block_n, BLOCK_S=block_s,
        SLOTS=next_power_of_2(args["n"]), TOKENS=tokens, STRIDE=stride, MEMBERS=members,
        UNION=is_union, STEP=step, TMA=False,
        # a row sees all keys of a tile or none
        WHOLE=block_n <= block_s == s and inputs.has_whole_blocks,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if unions is not None:
        args |= dict(counts=unions.counts, groups=unions.groups)
        if is_union:
            args |= dict(block_indices=unions.blocks, n=unions.limit)
    if block_n <= block_s:  # TMA reads blocks that are a multiple of a tile
        descriptors = [launch.tma_descriptor(t, block_n) for t in (k, v)]
        if None not in descriptors:
            args |= dict(k=descriptors[0], v=descriptors[1], TMA=True)
    lines = selection.block_indices.shape[0] * args["R"]
    grid, args["FLIPPED"] = launch.grid(cdiv(selection.aligned, tokens * step), lines)
    return grid, args


def forward(
    inputs: Inputs,
    partial: tuple[Tensor, Tensor] | None = None,
    unions: Unions | None = None,
    outputs: tuple[Tensor, Tensor] | None = None,
    norms: Tensor | None = None,
    combine_inputs: CombineInputs | None = None,
) -> tuple[Tensor, Tensor]:
    """out [B T H E] and lse [B T H] over the top-n blocks; accumulates in place into `partial`.
    With `outputs`, in which another kernel writes most groups, writes only those that have a union.
    `norms` are the key norms. Writes the layer's output of `combine_inputs`."""
    q, _k, v, selection, scale = inputs
    out, lse = outputs or partial or launch.empty_outputs(q, v)
    rare = outputs is not None

    def run(is_union: bool) -> None:
        grid, args = arguments(inputs, "forward", unions, is_union, rare)
        # small tiles wait for keys, not for the running maximum
        bounded = selection.gates is None and args["BLOCK_M"] >= BOUNDED_ROWS
        args |= bounds(norms if bounded else None)
        launcher(nsa_selected_fwd_query_major, grid)(
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
    inputs: Inputs,
    bwd: BackwardInputs,
    dq: Accumulator,
    unions: Unions | None = None,
    run_if: Tensor | None = None,
) -> Tensor | None:
    """Accumulates dq and returns the gradient of the gates. Does nothing if `run_if` is 0 on the
    device."""
    q, selection = inputs.q, inputs.selection
    R, n = selection.block_indices.shape[2:]
    d_gates = None
    if selection.gates is not None:
        d_gates = q.new_zeros(*q.shape[:3], n, dtype=torch.float32)
    if run_if is not None:  # the kernels may write nothing
        dq.begin()
    dq_args = dq.arguments()
    for is_union in (False,) if unions is None else (False, True):
        grid, args = arguments(inputs, "dq", unions, is_union, run_if is not None)
        args |= bwd.arguments() | dq_args
        launcher(nsa_selected_dq_query_major, grid)(
            d_gates=d_gates, scale=inputs.scale, run_if=run_if, RUN_IF=run_if is not None, **args
        )
    return None if d_gates is None else d_gates.unflatten(2, (R, -1)).sum(3)
