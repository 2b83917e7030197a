"""Attention in which every query sees one interval of keys, and perhaps a prefix: the window, the
compressed branch with its memory, the forced blocks of the selected branch.

Forward, dq, and dk/dv, without atomics. A tile holds the tokens x heads of one KV head's group, so
that keys and values are read once for the group. `device.interval` says which keys a query sees;
the prefix is a few more keys, of tensors of their own.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .device import (
    CAUSAL_WINDOW,
    EVERYTHING,
    gate_rows,
    interval,
    load_lse,
    load_rows,
    seen_by,
    softmax_step,
    store_rows,
    tile_rows,
)
from .launch import ALWAYS, LOG2_E, Cotangent, Place, strides

# one compiled kernel for all lengths and places
LENGTHS = ["T", "N", "P", "start", "floor", "reach"]

# the prefix: none, seen by every query, or causal (key n by the queries from position n on)
NO_PREFIX, OPEN_PREFIX, CAUSAL_PREFIX = (tl.constexpr(i) for i in range(3))


@triton.jit(do_not_specialize=LENGTHS)
def forward_kernel(
    q, k, v, pk, pv, out, lse, starts, start, T, N, P, K, scale_log2, floor, reach, stride,
    q_b, q_t, q_h, k_b, k_n, k_h, v_b, v_n, v_h, pk_b, pk_n, pk_h, pv_b, pv_n, pv_h,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    KIND: tl.constexpr, PREFIX: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: a tile of queries of one row and KV head. Reads their keys, writes out and
    lse."""
    # the queries that see most go first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b, h = (tl.program_id(1) // K).to(tl.int64), (tl.program_id(1) % K).to(tl.int64)
    TOKENS: tl.constexpr = BLOCK_M // G
    token, g, real = tile_rows(tile, T, G, BLOCK_M)
    if RAGGED:
        start = tl.load(starts + b).to(tl.int32)
    lo, hi = interval(start + token, N, floor, reach, stride, KIND)
    lo_first, hi_first = interval(start + tile * TOKENS, N, floor, reach, stride, KIND)
    last = start + tl.minimum(tile * TOKENS + TOKENS, T) - 1
    lo_last, hi_last = interval(last, N, floor, reach, stride, KIND)

    # [M, D]
    head = h * G + g
    q_tile = load_rows(q, b * q_b + token.to(tl.int64) * q_t + head * q_h, D, BLOCK_D, real)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)

    # keys that some rows see, that all see, that some see; then the prefix
    full = tl.cdiv(lo_last, BLOCK_N) * BLOCK_N
    full_end = tl.maximum(hi_first // BLOCK_N * BLOCK_N, full)
    k_base, v_base, key, value = k + b * k_b + h * k_h, v + b * v_b + h * v_h, k_n, v_n
    for phase in tl.static_range(4 if PREFIX else 3):
        if phase == 0:
            begin, end = lo_first // BLOCK_N * BLOCK_N, tl.minimum(full, hi_last)
        elif phase == 1:
            begin, end = full, tl.minimum(full_end, hi_last)
        elif phase == 2:
            begin, end = full_end, hi_last
        else:
            begin, end = 0, P
            k_base, v_base, key, value = (
                pk + b * pk_b + h * pk_h,
                pv + b * pv_b + h * pv_h,
                pk_n,
                pv_n,
            )
            N, lo = P, lo * 0
            hi = tl.minimum(start + token + 1, P) if PREFIX == CAUSAL_PREFIX else lo + P
        for n0 in range(begin, end, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            # [N, D], [N, E]
            k_tile = load_rows(k_base, n.to(tl.int64) * key, D, BLOCK_D, n < N)
            v_tile = load_rows(v_base, n.to(tl.int64) * value, E, BLOCK_E, n < N)
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale_log2
            if phase != 1:
                seen = (n[None] >= lo[:, None]) & (n[None] < hi[:, None])
                s = tl.where(seen, s, float("-inf"))
            acc, m, l = softmax_step(s, v_tile, acc, m, l, PRECISION)

    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    row = (b * T + token) * (K * G) + head
    store_rows(out, row * E, acc / l[:, None], E, BLOCK_E, real)
    log = tl.where(empty, float("-inf"), (m + tl.log2(l)) * 0.6931471805599453)
    tl.store(lse + row, log, mask=real)


@triton.jit(do_not_specialize=LENGTHS)
def dq_kernel(
    q, k, v, pk, pv, d_out, lse, delta, gate, dq, starts, start, T, N, P, K, scale,
    floor, reach, stride, q_b, q_t, q_h, k_b, k_n, k_h, v_b, v_n, v_h,
    pk_b, pk_n, pk_h, pv_b, pv_n, pv_h, gate_b, gate_t, gate_h,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    KIND: tl.constexpr, PREFIX: tl.constexpr, RAGGED: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: dq of a tile of queries of one row and KV head, added to what is there if
    ADD."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b, h = (tl.program_id(1) // K).to(tl.int64), (tl.program_id(1) % K).to(tl.int64)
    TOKENS: tl.constexpr = BLOCK_M // G
    token, g, real = tile_rows(tile, T, G, BLOCK_M)
    if RAGGED:
        start = tl.load(starts + b).to(tl.int32)
    lo, hi = interval(start + token, N, floor, reach, stride, KIND)
    lo_first, hi_first = interval(start + tile * TOKENS, N, floor, reach, stride, KIND)
    last = start + tl.minimum(tile * TOKENS + TOKENS, T) - 1
    lo_last, hi_last = interval(last, N, floor, reach, stride, KIND)

    head = h * G + g
    row = (b * T + token) * (K * G) + head
    q_tile = load_rows(q, b * q_b + token.to(tl.int64) * q_t + head * q_h, D, BLOCK_D, real)
    do_tile = load_rows(d_out, row * E, E, BLOCK_E, real)
    lse_row = load_lse(lse, row, real)
    delta_row = tl.load(delta + row, mask=real, other=0.0)
    gate_row = gate_rows(gate, b, token, head, gate_b, gate_t, gate_h, real, GATED)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    full = tl.cdiv(lo_last, BLOCK_N) * BLOCK_N
    full_end = tl.maximum(hi_first // BLOCK_N * BLOCK_N, full)
    k_base, v_base, key, value = k + b * k_b + h * k_h, v + b * v_b + h * v_h, k_n, v_n
    for phase in tl.static_range(4 if PREFIX else 3):
        if phase == 0:
            begin, end = lo_first // BLOCK_N * BLOCK_N, tl.minimum(full, hi_last)
        elif phase == 1:
            begin, end = full, tl.minimum(full_end, hi_last)
        elif phase == 2:
            begin, end = full_end, hi_last
        else:
            begin, end = 0, P
            k_base, v_base, key, value = (
                pk + b * pk_b + h * pk_h,
                pv + b * pv_b + h * pv_h,
                pk_n,
                pv_n,
            )
            N, lo = P, lo * 0
            hi = tl.minimum(start + token + 1, P) if PREFIX == CAUSAL_PREFIX else lo + P
        for n0 in range(begin, end, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            k_tile = load_rows(k_base, n.to(tl.int64) * key, D, BLOCK_D, n < N)
            v_tile = load_rows(v_base, n.to(tl.int64) * value, E, BLOCK_E, n < N)
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            p = tl.exp2(s * (scale * 1.4426950408889634) - lse_row[:, None])
            if phase != 1:
                seen = (n[None] >= lo[:, None]) & (n[None] < hi[:, None])
                p = tl.where(seen, p, 0.0)
            dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
            if GATED:
                dp *= gate_row[:, None]
            ds = p * (dp - delta_row[:, None])
            acc += tl.dot(ds.to(k_tile.dtype), k_tile, input_precision=PRECISION)

    acc *= scale
    if ADD:
        acc += load_rows(dq, row * D, D, BLOCK_D, real).to(tl.float32)
    store_rows(dq, row * D, acc, D, BLOCK_D, real)


@triton.jit(do_not_specialize=LENGTHS)
def dkv_kernel(
    q, k, v, d_out, lse, delta, gate, dk, dv, starts, start, T, N, K, scale, floor, reach, stride,
    q_b, q_t, q_h, k_b, k_n, k_h, v_b, v_n, v_h, gate_b, gate_t, gate_h,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    KIND: tl.constexpr, RAGGED: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """One program: what one of SPLITS equal shares of the queries that see a block of keys adds to
    its dk and dv, written to [SPLITS, B, N, K, ...]."""
    b, h = (tl.program_id(1) // K).to(tl.int64), (tl.program_id(1) % K).to(tl.int64)
    split = tl.program_id(2)
    TOKENS: tl.constexpr = BLOCK_M // G
    if RAGGED:
        start = tl.load(starts + b).to(tl.int32)
    n0 = tl.program_id(0) * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)
    inside = n < N
    k_tile = load_rows(k, b * k_b + h * k_h + n.to(tl.int64) * k_n, D, BLOCK_D, inside)
    v_tile = load_rows(v, b * v_b + h * v_h + n.to(tl.int64) * v_n, E, BLOCK_E, inside)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)

    # tiles of queries that see some of the keys, and among them those that see all
    last = tl.minimum(n0 + BLOCK_N, N) - 1
    first, end = seen_by(n0, last, reach, stride, KIND)
    full, full_end = seen_by(last, n0, reach, stride, KIND)
    first_tile = tl.maximum(first - start, 0) // TOKENS
    end_tile = tl.cdiv(tl.minimum(tl.maximum(end - start, 0), T), TOKENS)
    share = tl.cdiv(tl.maximum(end_tile - first_tile, 0), SPLITS)
    begin_tile = first_tile + split * share
    end_tile = tl.minimum(begin_tile + share, end_tile)
    full_tile = tl.maximum(tl.cdiv(tl.maximum(full - start, 0), TOKENS), begin_tile)
    full_end_tile = tl.minimum(tl.minimum(tl.maximum(full_end - start, 0), T) // TOKENS, end_tile)
    full_tile = tl.minimum(full_tile, end_tile)
    if n0 < floor:
        full_end_tile = full_tile
    full_end_tile = tl.maximum(full_end_tile, full_tile)
    for phase in tl.static_range(3):
        if phase == 0:
            begin, end = begin_tile, full_tile
        elif phase == 1:
            begin, end = full_tile, full_end_tile
        else:
            begin, end = full_end_tile, end_tile
        for tile in range(begin, end):
            token, g, real = tile_rows(tile, T, G, BLOCK_M)
            head = h * G + g
            row = (b * T + token) * (K * G) + head
            q_tile = load_rows(q, b * q_b + token.to(tl.int64) * q_t + head * q_h, D, BLOCK_D, real)
            do_tile = load_rows(d_out, row * E, E, BLOCK_E, real)
            lse_row = load_lse(lse, row, real)
            delta_row = tl.load(delta + row, mask=real, other=0.0)
            gate_row = gate_rows(gate, b, token, head, gate_b, gate_t, gate_h, real, GATED)

            # [N, M]: p and ds are the left operands of what follows
            s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
            p = tl.exp2(s * (scale * 1.4426950408889634) - lse_row[None])
            if phase != 1:
                lo, hi = interval(start + token, N, floor, reach, stride, KIND)
                seen = (n[:, None] >= lo[None]) & (n[:, None] < hi[None]) & real[None]
                p = tl.where(seen, p, 0.0)
            dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)
            ds = p * (dp - delta_row[None])
            if GATED:
                ds = p * (dp * gate_row[None] - delta_row[None])
                p *= gate_row[None]
            dv_acc += tl.dot(p.to(do_tile.dtype), do_tile, input_precision=PRECISION)
            dk_acc += tl.dot(ds.to(q_tile.dtype), q_tile, input_precision=PRECISION)

    B = tl.num_programs(1) // K
    entry = ((split * B + b) * N + n) * K + h
    store_rows(dk, entry * D, dk_acc * scale, D, BLOCK_D, inside)
    store_rows(dv, entry * E, dv_acc, E, BLOCK_E, inside)


# launches


def arguments(q: Tensor, k: Tensor, v: Tensor, place: Place, kernel: str) -> dict[str, Any]:
    """What all three kernels take, and their tile."""
    _, T, H, D = q.shape
    N, K, E = k.shape[1], k.shape[2], v.shape[-1]
    tile = launch.interval_tile(kernel, place.wide, max(D, E), H // K, q.dtype)
    return dict(
        q=q,
        k=k,
        v=v,
        **strides("q", q, "bth"),
        **strides("k", k, "bnh"),
        **strides("v", v, "bnh"),
        starts=place.starts,
        start=place.start,
        T=T,
        N=N,
        K=K,
        floor=place.floor,
        reach=place.reach,
        stride=place.stride,
        KIND=place.kind,
        G=H // K,
        D=D,
        E=E,
        BLOCK_D=launch.padded(D),
        BLOCK_E=launch.padded(E),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        RAGGED=place.starts is not None,
        PRECISION="ieee",  # of float32; tf32x3 errs up to four times as much
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def prefix_arguments(prefix: tuple[Tensor, Tensor] | None, place: Place) -> dict[str, Any]:
    pk, pv = (None, None) if prefix is None else prefix
    form = NO_PREFIX if pk is None else CAUSAL_PREFIX if place.causal_prefix else OPEN_PREFIX
    return dict(
        pk=pk,
        pv=pv,
        P=0 if pk is None else pk.shape[1],
        PREFIX=form.value,
        **strides("pk", pk, "bnh"),
        **strides("pv", pv, "bnh"),
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    place: Place,
    scale: float,
    prefix: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """out [B T H E] and natural lse [B T H] of q [B T H D], k [B N K D], v [B N K E], and of a
    prefix k [B P K D], v [B P K E]."""
    out, lse = launch.empty_outputs(q, v)
    args = arguments(q, k, v, place, "forward") | prefix_arguments(prefix, place)
    grid = (triton.cdiv(q.shape[1], args["BLOCK_M"] // args["G"]), q.shape[0] * k.shape[2])
    forward_kernel[grid](out=out, lse=lse, scale_log2=scale * LOG2_E, **args)
    return out, lse


def backward_q(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    place: Place,
    scale: float,
    cotangent: Cotangent,
    prefix: tuple[Tensor, Tensor] | None = None,
    dq: Tensor | None = None,
) -> Tensor:
    """dq, added to the `dq` given."""
    add = dq is not None
    dq = q.new_empty(q.shape) if dq is None else dq
    args = arguments(q, k, v, place, "dq") | prefix_arguments(prefix, place)
    grid = (triton.cdiv(q.shape[1], args["BLOCK_M"] // args["G"]), q.shape[0] * k.shape[2])
    dq_kernel[grid](dq=dq, scale=scale, ADD=add, **args, **cotangent.arguments())
    return dq


def backward_kv(
    q: Tensor, k: Tensor, v: Tensor, place: Place, scale: float, cotangent: Cotangent
) -> tuple[Tensor, Tensor]:
    """dk and dv, in float32 where many queries were summed in shares."""
    B, T, _, D = q.shape
    N, K, E = k.shape[1], k.shape[2], v.shape[-1]
    args = arguments(q, k, v, place, "dkv")
    tiles = triton.cdiv(T, args["BLOCK_M"] // args["G"])
    blocks = triton.cdiv(N, args["BLOCK_N"])
    splits = launch.query_splits(blocks * B * K, tiles) if place.wide else 1
    dk = k.new_empty(splits, B, N, K, D, dtype=torch.float32)
    dv = v.new_empty(splits, B, N, K, E, dtype=torch.float32)
    dkv_kernel[(blocks, B * K, splits)](
        dk=dk, dv=dv, scale=scale, SPLITS=splits, **args, **cotangent.arguments()
    )
    return (dk[0], dv[0]) if splits == 1 else (dk.sum(0), dv.sum(0))


def backward_prefix(
    q: Tensor,
    prefix: tuple[Tensor, Tensor],
    place: Place,
    scale: float,
    cotangent: Cotangent,
) -> tuple[Tensor, Tensor]:
    """dk and dv of a prefix."""
    kind = CAUSAL_WINDOW if place.causal_prefix else EVERYTHING
    seen = Place(kind.value, ALWAYS, start=place.start, starts=place.starts)
    return backward_kv(q, *prefix, seen, scale, cotangent)
