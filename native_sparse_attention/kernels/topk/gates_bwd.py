"""Backward of the gates of differentiable top-k. Their value is 1, so there is no forward.

Both rules are one problem: softmax probabilities p of rows over keys; the gate of block c is
`sum_j weight(j, c) p_j`.

    rule     rows                        keys         other keys                  weight(j, c)
    probs    query heads                 windows      memory                      overlap(j, c) / d
    logits   means of the query heads    block keys   one constant logit, -1e3    j == c

With gradients g of the chosen blocks' gates, `dp_j = sum_c weight(j, c) g_c` and
`ds = p (dp - delta)`, `delta = sum p dp`, for all keys, chosen or not. One kernel computes dq, the
log-sum-exp and delta of each row, another kernel dk. Both recompute p and dp. Rows are those of
groups' leaders (see `scores.py`), tokens x heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common.counts import cdiv
from ..common.launch import strides
from ..common.primitives import (
    cap_slope,
    grid_position,
    in_document,
    large,
    leaders,
    load_rows,
    load_sinks,
    soft_capped,
    store_rows,
)
from .block_keys import block_keys_backward
from .gates import (
    BLOCKS,
    EDGES,
    MEMORY,
    NOTHING,
    Problem,
    TopkSettings,
    dot_terms,
    gate_grads,
    gates_problem,
    load_terms,
    repeat_heads,
    row_tile,
    seeing_groups,
    seen_keys,
    to_terms,
)

# one compiled kernel for all lengths and positions
LENGTHS = ["T", "N", "P", "GROUPS", "first_token"]


@triton.jit(do_not_specialize=["T", "GROUPS", "first_token"])
def nsa_gates_bwd_preprocess(
    block_indices, d_gates, chosen, grads, starts, first_token, T, RANKS, GROUPS, n, weight,
    STRIDE: tl.constexpr, BLOCKS_PER_WINDOW: tl.constexpr, RAGGED: tl.constexpr,
    BLOCK_M: tl.constexpr, FLIPPED: tl.constexpr,
):  # fmt: skip
    """One program: a slot of BLOCK_M groups of one row and ranking head. Writes the chosen unit of
    keys (of BLOCKS_PER_WINDOW blocks) and the sum of the group's gradients, both [B R n GROUPS]."""
    tile, line, _tiles, _lines = grid_position(FLIPPED)
    b, r = (line // RANKS).to(tl.int64), line % RANKS
    slot = tl.program_id(2)
    if RAGGED:
        first_token = tl.load(starts + b).to(tl.int32)
    index = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    _position, token, ranked = leaders(index, first_token, T, STRIDE)
    at = ((b * T + token) * RANKS + r) * n + slot
    c = tl.load(block_indices + at, mask=ranked, other=-1)
    grad = tl.zeros([BLOCK_M], tl.float32)
    for j in range(STRIDE):
        there = (c >= 0) & (token + j < T)
        grad += tl.load(d_gates + at + j * RANKS * n, mask=there, other=0.0).to(tl.float32)
    to = ((b * RANKS + r) * n + slot) * GROUPS + index
    tl.store(chosen + to, c // BLOCKS_PER_WINDOW, mask=index < GROUPS)
    tl.store(grads + to, grad * weight, mask=index < GROUPS)


@triton.jit(do_not_specialize=LENGTHS)
def nsa_gates_bwd_dq(
    q, k, other, lse, delta, dq, chosen, grads, starts, first_token, doc_first, doc_last,
    T, N, P, GROUPS, RANKS, slots,
    scale_log2, cap, dq_scale, sinks, q_b, q_t, q_h, k_b, k_n, k_h, other_b, other_n, other_h,
    G: tl.constexpr, HEADS: tl.constexpr, RANKS_PER_KV: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLOTS: tl.constexpr,
    STEP: tl.constexpr, PER_UNIT: tl.constexpr, EXPAND: tl.constexpr, REACH: tl.constexpr,
    WINDOW: tl.constexpr, d: tl.constexpr, s: tl.constexpr, INITIAL: tl.constexpr,
    LOCAL: tl.constexpr, STRIDE: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr,
    DOCUMENTS: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, KIND: tl.constexpr,
    OTHER: tl.constexpr, WIDE: tl.constexpr, TERMS: tl.constexpr, MEAN: tl.constexpr,
    ADD: tl.constexpr, FLIPPED: tl.constexpr,
):  # fmt: skip
    """One program: a tile of rows of one batch row and ranking head. A row is the mean of MEAN
    query heads. Reads the keys, and other keys of kind OTHER, twice: first for log-sum-exp (in
    units of log2) and delta, then for dq [B T H D], which ADD adds to the stored dq."""
    tile, line, tiles, _lines = grid_position(FLIPPED)
    tile = tiles - 1 - tile  # tiles with most keys first
    b, r = large(line // RANKS, WIDE), large(line % RANKS, WIDE)
    if RAGGED:
        first_token = tl.load(starts + b).to(tl.int32)
    index, position, token, head, real = row_tile(
        tile, r, first_token, T, G, HEADS, STRIDE, BLOCK_M
    )
    group = tile * (BLOCK_M // HEADS) + tl.arange(0, BLOCK_M // HEADS)
    slot0 = (b * RANKS + r) * slots
    q_rows = b * q_b + large(token, WIDE) * q_t + head * q_h
    q_tile, q_low = load_terms(q, q_rows, D, BLOCK_D, real, TERMS)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    delta_row = tl.zeros([BLOCK_M], tl.float32)
    if KIND == BLOCKS:
        m, l = l - 1e3 * 1.4426950408889634, l + 1.0
    if SINKS:
        # rows that pad the heads have no sink
        m, l = load_sinks(sinks, tl.where(real, head, 0)), l + 1.0
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    firsts, lasts = doc_first, doc_last
    if DOCUMENTS:
        firsts, lasts = doc_first + b * T, doc_last + b * T
    PHASES: tl.constexpr = 1 if OTHER == NOTHING else 2
    for phase in tl.static_range(2 * PHASES):
        k_base, key, length = k + b * k_b + r // RANKS_PER_KV * k_h, k_n, N
        if phase % PHASES == 1:
            k_base, key = other + b * other_b + r // RANKS_PER_KV * other_h, other_n
            length = P
        lo, hi = seen_keys(
            position, token, real, length, T, firsts, lasts, d, s, INITIAL, LOCAL, CAUSAL,
            OTHER == EDGES, KIND if phase % PHASES == 0 else OTHER, DOCUMENTS,
        )  # fmt: skip
        for n0 in range(tl.min(lo, 0) // BLOCK_N * BLOCK_N, tl.max(hi, 0), BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            k_rows = large(n, WIDE) * key
            k_tile, k_low = load_terms(k_base, k_rows, D, BLOCK_D, n < length, TERMS)
            x = dot_terms(q_tile, q_low, tl.trans(k_tile), tl.trans(k_low), TERMS) * scale_log2
            slope = 1.0
            if CAP:
                x = soft_capped(x, cap)
                slope = cap_slope(x, cap)
            seen = (n[None] >= lo[:, None]) & (n[None] < hi[:, None])
            x = tl.where(seen, x, float("-inf"))
            dp = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            if phase % PHASES == 0 or OTHER == EDGES:
                dp = gate_grads(
                    chosen, grads, slot0, group, n0, GROUPS, slots, BLOCK_N, SLOTS, STEP,
                    PER_UNIT, EXPAND, REACH, WINDOW, d, s,
                )  # fmt: skip
                dp = repeat_heads(dp, HEADS)
            if phase < PHASES:
                m_new = tl.maximum(m, tl.max(x, 1))
                m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # no keys so far
                p, alpha = tl.exp2(x - m_safe[:, None]), tl.exp2(m - m_safe)
                l, delta_row = l * alpha + tl.sum(p, 1), delta_row * alpha + tl.sum(p * dp, 1)
                m = m_new
            else:
                ds = tl.exp2(x - m[:, None]) * (dp - delta_row[:, None]) * slope
                ds, ds_low = to_terms(ds, k_tile, TERMS)
                acc += dot_terms(ds, ds_low, k_tile, k_low, TERMS)
        if phase == PHASES - 1:
            # from here on m is the log-sum-exp, and delta_row is normalized
            empty = l == 0.0
            l = tl.where(empty, 1.0, l)
            m, delta_row = tl.where(empty, 0.0, m + tl.log2(l)), delta_row / l

    row = (b * GROUPS + index) * (RANKS * G) + head
    tl.store(lse + row, m, mask=real)
    tl.store(delta + row, delta_row, mask=real)
    acc *= dq_scale
    for g in range(MEAN):
        at = ((b * T + token) * (RANKS * G) + head) * MEAN + g
        value = acc
        if ADD:
            value += load_rows(dq, at * D, D, BLOCK_D, real).to(tl.float32)
        store_rows(dq, at * D, value, D, BLOCK_D, real)


@triton.jit(do_not_specialize=[n for n in LENGTHS if n != "P"])
def nsa_gates_bwd_dk(
    q, k, lse, delta, dk, chosen, grads, starts, first_token, doc_first, doc_last,
    T, N, GROUPS, RANKS, slots,
    scale_log2, cap, dk_scale, q_b, q_t, q_h, k_b, k_n, k_h,
    G: tl.constexpr, HEADS: tl.constexpr, RANKS_PER_KV: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLOTS: tl.constexpr,
    STEP: tl.constexpr, PER_UNIT: tl.constexpr, EXPAND: tl.constexpr, REACH: tl.constexpr,
    WINDOW: tl.constexpr, d: tl.constexpr, s: tl.constexpr, INITIAL: tl.constexpr,
    LOCAL: tl.constexpr, STRIDE: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr,
    DOCUMENTS: tl.constexpr, CAP: tl.constexpr, KIND: tl.constexpr, HAS_EDGES: tl.constexpr,
    WIDE: tl.constexpr, TERMS: tl.constexpr, FLIPPED: tl.constexpr,
):  # fmt: skip
    """One program owns a block of keys and one split (axis 2) of the rows of one ranking head that
    see it. It writes partial dk, [splits, B, N, RANKS, D]."""
    block, line, _blocks, lines = grid_position(FLIPPED)
    b, r = large(line // RANKS, WIDE), large(line % RANKS, WIDE)
    split = tl.program_id(2)
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    if RAGGED:
        first_token = tl.load(starts + b).to(tl.int32)
    n0 = block * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)
    k_rows = b * k_b + r // RANKS_PER_KV * k_h + large(n, WIDE) * k_n
    k_tile, k_low = load_terms(k, k_rows, D, BLOCK_D, n < N, TERMS)
    slot0 = (b * RANKS + r) * slots
    acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)

    last = tl.minimum(n0 + BLOCK_N, N) - 1
    first, end = seeing_groups(n0, last, first_token, d, s, LOCAL, STRIDE, CAUSAL, KIND)
    firsts, lasts = doc_first, doc_last
    if DOCUMENTS and KIND != MEMORY:
        firsts, lasts = doc_first + b * T, doc_last + b * T
        UNIT: tl.constexpr = s if KIND >= BLOCKS else d
        first, _end = in_document(first, end, n0 * UNIT, T, firsts, lasts, STRIDE)
        _first, end = in_document(first, end, last * UNIT, T, firsts, lasts, STRIDE)
    first_tile = first // TOKENS
    end_tile = tl.cdiv(tl.minimum(tl.maximum(end, 0), GROUPS), TOKENS)
    split_tiles = tl.cdiv(tl.maximum(end_tile - first_tile, 0), tl.num_programs(2))
    begin_tile = first_tile + split * split_tiles
    for tile in range(begin_tile, tl.minimum(begin_tile + split_tiles, end_tile)):
        index, position, token, head, real = row_tile(
            tile, r, first_token, T, G, HEADS, STRIDE, BLOCK_M
        )
        q_rows = b * q_b + large(token, WIDE) * q_t + head * q_h
        q_tile, q_low = load_terms(q, q_rows, D, BLOCK_D, real, TERMS)
        row = (b * GROUPS + index) * (RANKS * G) + head
        lse_row = tl.load(lse + row, mask=real, other=0.0)
        delta_row = tl.load(delta + row, mask=real, other=0.0)
        lo, hi = seen_keys(
            position, token, real, N, T, firsts, lasts, d, s, INITIAL, LOCAL, CAUSAL, HAS_EDGES,
            KIND, DOCUMENTS,
        )  # fmt: skip

        # [N, M]: ds is the left operand of the product that forms dk
        x = dot_terms(k_tile, k_low, tl.trans(q_tile), tl.trans(q_low), TERMS) * scale_log2
        slope = 1.0
        if CAP:
            x = soft_capped(x, cap)
            slope = cap_slope(x, cap)
        seen = (n[:, None] >= lo[None]) & (n[:, None] < hi[None])
        x = tl.where(seen, x, float("-inf"))
        ds = -delta_row[None]
        if KIND != MEMORY:
            group = tile * TOKENS + tl.arange(0, TOKENS)
            dp = gate_grads(
                chosen, grads, slot0, group, n0, GROUPS, slots, BLOCK_N, SLOTS, STEP, PER_UNIT,
                EXPAND, REACH, WINDOW, d, s,
            )  # fmt: skip
            ds += tl.trans(repeat_heads(dp, HEADS))
        ds *= tl.exp2(x - lse_row[None]) * slope
        ds, ds_low = to_terms(ds, q_tile, TERMS)
        acc += dot_terms(ds, ds_low, q_tile, q_low, TERMS)

    B = lines // RANKS
    to = ((split * B + b) * N + n) * RANKS + r
    store_rows(dk, to * D, acc * dk_scale, D, BLOCK_D, n < N)


# launches


def chosen_blocks(
    block_indices: Tensor, d_gates: Tensor, settings: TopkSettings
) -> dict[str, Tensor]:
    """The units of keys that each group's leader chose, and the gradients of their gates."""
    B, T, R, n = block_indices.shape
    groups = settings.groups(T)
    chosen = block_indices.new_empty(B, R, n, groups, dtype=torch.int32)
    grads = torch.empty_like(chosen, dtype=torch.float32)
    probs = settings.importance == "probs"
    blocks_per_window = settings.d // settings.s if probs and settings.d > settings.s else 1
    weight = 1 / settings.d if probs and settings.d <= settings.s else 1.0
    grid, flipped = launch.grid(cdiv(groups, 128), B * R, n)
    nsa_gates_bwd_preprocess[grid](
        block_indices.contiguous(), d_gates.contiguous(), chosen, grads, settings.starts,
        settings.start, T, R, groups, n, weight, STRIDE=settings.stride,
        BLOCKS_PER_WINDOW=blocks_per_window, RAGGED=settings.starts is not None, BLOCK_M=128,
        FLIPPED=flipped,
    )  # fmt: skip
    return dict(chosen=chosen, grads=grads)


def backward_k(problem: Problem, keys: Tensor, kind: int, tensors: dict[str, Tensor]) -> Tensor:
    """dk [B N K D] of `keys` (the problem's keys or its other keys), in float32."""
    B, N, K, D = *keys.shape[:3], keys.shape[3] // problem.terms
    tile = problem.tile("dk")
    args = problem.arguments(keys, tile)
    ranks, ranks_per_kv = args["RANKS"], args["RANKS_PER_KV"]
    blocks = cdiv(N, tile.block_n)
    tiles = cdiv(args["GROUPS"], tile.block_m // args["HEADS"])
    splits = 1 if kind == EDGES.value else launch.query_splits(blocks * B * ranks, tiles)
    dk = keys.new_empty(splits, B, N, ranks, D, dtype=torch.float32)
    args["WIDE"] |= dk.numel() >= 1 << 31
    grid, flipped = launch.grid(blocks, B * ranks, splits)
    nsa_gates_bwd_dk[grid](
        dk=dk, dk_scale=problem.scale, KIND=kind, HAS_EDGES=problem.other_kind == EDGES.value,
        FLIPPED=flipped,
        **args, **tensors,
    )  # fmt: skip
    return dk[0] if splits == ranks_per_kv == 1 else dk.unflatten(3, (K, ranks_per_kv)).sum((0, 4))


def backward(
    q: Tensor,
    ck: Tensor,
    mem_k: Tensor | None,
    block_indices: Tensor,
    d_gates: Tensor,
    settings: TopkSettings,
    dq: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q [B T H D], ck [B W K D], mem_k [K m D] and the sinks [H], from the gradients
    of the gates of `block_indices` [B T R n]. dq adds to `dq` if given; the other gradients are
    float32."""
    q, ck, mem_k = (t if t is None or t.stride(-1) == 1 else t.contiguous() for t in (q, ck, mem_k))
    problem, add = gates_problem(q, ck, mem_k, settings), dq is not None
    if dq is None:
        # tokens that lead no group have gradient 0
        dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
    tensors = chosen_blocks(block_indices, d_gates, settings)
    tile = problem.tile("dq")
    args = problem.arguments(problem.keys, tile)
    args |= dict(
        other=problem.other,
        OTHER=problem.other_kind,
        P=0 if problem.other is None else problem.other.shape[1],
    )
    args |= strides("other", problem.other, "bnh")
    for name in ("lse", "delta"):
        shape = (len(q), args["GROUPS"], problem.rows.shape[2])
        tensors[name] = q.new_zeros(shape, dtype=torch.float32)
    tiles = cdiv(args["GROUPS"], tile.block_m // args["HEADS"])
    grid, flipped = launch.grid(tiles, len(q) * args["RANKS"])
    nsa_gates_bwd_dq[grid](
        dq=dq, dq_scale=problem.scale / problem.mean, MEAN=problem.mean, ADD=add,
        KIND=problem.kind, sinks=settings.sinks, SINKS=settings.sinks is not None, FLIPPED=flipped,
        **args, **tensors,
    )  # fmt: skip
    d_sinks = None
    if settings.sinks is not None:
        # the sink has dp = 0
        sink_probs = torch.exp2(settings.sinks * launch.LOG2_E - tensors["lse"])
        d_sinks = -(sink_probs * tensors["delta"]).sum((0, 1))

    grads = [backward_k(problem, problem.keys, problem.kind, tensors)]
    if problem.other is not None:
        grads.append(backward_k(problem, problem.other, problem.other_kind, tensors))
    if settings.importance == "probs":
        d_mem = grads[1].sum(0).transpose(0, 1) if len(grads) > 1 else None
        return dq, grads[0], d_mem, d_sinks
    d_keys = torch.stack(grads).transpose(2, 3).contiguous()
    dck = block_keys_backward(
        d_keys,
        ck.shape[1],
        settings.d,
        settings.s,
        settings.interpolated,
        settings.scale,
        settings.documents,
    )
    return dq, dck, None, None
