"""The backward of `fwd.py`: dq, and dk/dv without atomics."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common.launch import UNLIMITED, Accumulator, BackwardInputs, KVRange, cdiv
from ..common.precompile import launcher
from ..common.primitives import (
    CAUSAL_WINDOW,
    EVERYTHING,
    LOCAL_BLOCKS,
    cap_slope,
    grid_position,
    in_document,
    interval,
    large,
    load_keys,
    load_rows,
    rare,
    seen_by,
    softmax_grad,
    store_rows,
    tile_rows,
)
from ..common.reduce import Partials
from ..common.tile_configs import FEW_KEYS
from .fwd import (
    LENGTHS,
    arguments,
    load_arguments,
    logits,
    prefix_arguments,
    prefix_end,
    tile_ranges,
    tiles_of_queries,
)
from .support import supports_sm90


@triton.jit
def add_dq_of_prefix(
    q_tile, do_tile, pk, pv, b, h, position, P, acc, lse_row, delta_row, scale_log2, unit_scale,
    cap, pk_b, pk_n, pk_h, pv_b, pv_n, pv_h, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, PREFIX: tl.constexpr,
    CAP: tl.constexpr, GATED: tl.constexpr, POSITIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the prefix's contribution to a tile's dq."""
    hi = prefix_end(position, P, PREFIX)
    for n0 in range(0, P, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        k_tile = load_keys(pk, b, h, n, n0, n < P, pk_b, pk_n, pk_h, D, BLOCK_D, False)
        v_tile = load_keys(pv, b, h, n, n0, n < P, pv_b, pv_n, pv_h, E, BLOCK_E, False)
        s = logits(q_tile, k_tile, scale_log2, cap, CAP, POSITIVE, PRECISION)
        if CAP:
            slope = cap_slope(s, cap)
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
        s = tl.where(n[None] < hi[:, None], s, float("-inf"))
        _p, ds = softmax_grad(s, unit_scale, dp, lse_row[:, None], delta_row[:, None], GATED)
        if CAP:
            ds *= slope
        acc += tl.dot(ds.to(k_tile.dtype), k_tile, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=LENGTHS)
def nsa_flash_dq(
    q, k, v, pk, pv, d_out, lse, delta, inner_lse, inner_delta, dq, starts, start,
    doc_first, doc_last, unit, T, N, P, K, scale, cap, floor, reach, stride,
    inner_floor, inner_reach, inner_stride,
    q_b, q_t, q_h, k_b, k_n, k_h, v_b, v_n, v_h, pk_b, pk_n, pk_h, pv_b, pv_n, pv_h,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    KIND: tl.constexpr, INNER: tl.constexpr, PREFIX: tl.constexpr, RAGGED: tl.constexpr,
    DOCUMENTS: tl.constexpr, CAP: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    TMA: tl.constexpr, POSITIVE: tl.constexpr, WIDE: tl.constexpr, FLIPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program owns a tile of queries of one sequence and KV head. It reads the tile's KV range
    and writes dq, or with ADD adds to dq."""
    tile, line, tiles, _lines = grid_position(FLIPPED)
    tile = tiles - 1 - tile
    b, h = large(line // K, WIDE), large(line % K, WIDE)
    TOKENS: tl.constexpr = BLOCK_M // G
    token, g, real = tile_rows(tile, T, G, BLOCK_M)
    if RAGGED:
        start = tl.load(starts + b).to(tl.int32)
    first, last = tile * TOKENS, tl.minimum(tile * TOKENS + TOKENS, T) - 1
    lo, hi, lo_first, hi_first, lo_last, hi_last = tile_ranges(
        token, first, last, start, b * T, doc_first, doc_last, unit, T, N, floor, reach, stride,
        KIND, DOCUMENTS,
    )  # fmt: skip

    head = h * G + g
    row = (b * T + token) * (K * G) + head
    q_tile = load_rows(q, b * q_b + large(token, WIDE) * q_t + head * q_h, D, BLOCK_D, real)
    do_tile = load_rows(d_out, row * E, E, BLOCK_E, real)
    lse_row = tl.load(lse + row, mask=real, other=0.0)
    delta_row = tl.load(delta + row, mask=real, other=0.0)
    if INNER:
        inner_lse_row = tl.load(inner_lse + row, mask=real, other=0.0)
        inner_delta_row = tl.load(inner_delta + row, mask=real, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # applies to products that `logits` leaves unscaled
    scale_log2 = scale * 1.4426950408889634
    unit_scale = scale_log2
    if CAP or not POSITIVE:
        unit_scale = 1.0

    begin = lo_first // BLOCK_N * BLOCK_N
    steps = tl.maximum(tl.cdiv(hi_last - begin, BLOCK_N), 0)
    all_lo, all_hi = lo_last, hi_first
    if INNER:
        local, _local_hi = interval(
            start + token, N, inner_floor, inner_reach, inner_stride, LOCAL_BLOCKS
        )
        local_first, _local_hi_first = interval(
            start + first, N, inner_floor, inner_reach, inner_stride, LOCAL_BLOCKS
        )
        to_initial = steps
        steps += tl.cdiv(inner_floor, BLOCK_N)
    for j in range(0, steps):
        n0 = begin + j * BLOCK_N
        if INNER and j >= to_initial:
            n0 = (j - to_initial) * BLOCK_N
        n = n0 + tl.arange(0, BLOCK_N)
        k_tile = load_keys(k, b, h, n, n0, n < N, k_b, k_n, k_h, D, BLOCK_D, TMA)
        v_tile = load_keys(v, b, h, n, n0, n < N, v_b, v_n, v_h, E, BLOCK_E, TMA)
        s = logits(q_tile, k_tile, scale_log2, cap, CAP, POSITIVE, PRECISION)
        if CAP:
            slope = cap_slope(s, cap)
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
        if INNER and j == to_initial:
            rare(delta, n0)
            lse_row, delta_row = inner_lse_row, inner_delta_row
            lo, hi = lo * 0, tl.minimum(start + token + 1, inner_floor)
            all_lo, all_hi = 0, tl.minimum(start + first + 1, inner_floor)
        if (n0 < all_lo) | (n0 + BLOCK_N > all_hi):
            rare(delta, n0)
            s = tl.where((n[None] >= lo[:, None]) & (n[None] < hi[:, None]), s, float("-inf"))
        _p, ds = softmax_grad(s, unit_scale, dp, lse_row[:, None], delta_row[:, None], GATED)
        if INNER and (j < to_initial) & (n0 + BLOCK_N > local_first):
            rare(delta, n0)
            s = tl.where(n[None] >= local[:, None], s, float("-inf"))
            _p, inner_ds = softmax_grad(
                s, unit_scale, dp, inner_lse_row[:, None], inner_delta_row[:, None], GATED
            )  # fmt: skip
            ds += inner_ds
        if CAP:
            ds *= slope
        acc += tl.dot(ds.to(k_tile.dtype), k_tile, input_precision=PRECISION)

    if PREFIX and not INNER:
        acc = add_dq_of_prefix(
            q_tile, do_tile, pk, pv, b, h, start + token, P, acc, lse_row, delta_row, scale_log2,
            unit_scale, cap, pk_b, pk_n, pk_h, pv_b, pv_n, pv_h, D, E, BLOCK_D, BLOCK_E, BLOCK_N,
            PREFIX, CAP, GATED, POSITIVE, PRECISION,
        )  # fmt: skip
    acc *= scale
    if ADD:
        acc += load_rows(dq, row * D, D, BLOCK_D, real).to(tl.float32)
    store_rows(dq, row * D, acc, D, BLOCK_D, real)


@triton.jit(do_not_specialize=LENGTHS)
def nsa_flash_dkv(
    q, k, v, d_out, lse, delta, inner_lse, inner_delta, dk, dv, starts, start,
    doc_first, doc_last, unit, T, N, K, scale, cap, floor, reach, stride,
    inner_floor, inner_reach, inner_stride,
    q_b, q_t, q_h, k_b, k_n, k_h, v_b, v_n, v_h,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    KIND: tl.constexpr, INNER: tl.constexpr, RAGGED: tl.constexpr, DOCUMENTS: tl.constexpr,
    CAP: tl.constexpr, GATED: tl.constexpr, POSITIVE: tl.constexpr, WIDE: tl.constexpr,
    FLIPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program owns a block of keys and one split (axis 2) of the queries that see it. It writes
    partial dk and dv, [splits, B, N, K, ...]."""
    block, line, _blocks, lines = grid_position(FLIPPED)
    b, h = large(line // K, WIDE), large(line % K, WIDE)
    split = tl.program_id(2)
    TOKENS: tl.constexpr = BLOCK_M // G
    if RAGGED:
        start = tl.load(starts + b).to(tl.int32)
    n0 = block * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)
    inside = n < N
    k_tile = load_rows(k, b * k_b + h * k_h + large(n, WIDE) * k_n, D, BLOCK_D, inside)
    v_tile = load_rows(v, b * v_b + h * v_h + large(n, WIDE) * v_n, E, BLOCK_E, inside)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    # applies to products that `logits` leaves unscaled
    scale_log2 = scale * 1.4426950408889634
    unit_scale = scale_log2
    if CAP or not POSITIVE:
        unit_scale = 1.0

    # positions that see some of the keys: first .. end - 1; all keys: full .. full_end - 1
    last = tl.minimum(n0 + BLOCK_N, N) - 1
    first, end = seen_by(n0, last, reach, stride, KIND)
    full, full_end = seen_by(last, n0, reach, stride, KIND)
    if DOCUMENTS:
        firsts, lasts = doc_first + b * T, doc_last + b * T
        first, full_end = in_document(first, full_end, n0 * unit, T, firsts, lasts, 1)
        full, end = in_document(full, end, last * unit, T, firsts, lasts, 1)
        # no query sees a key past its document's last token
        full_end = tl.where(last * unit < end, full_end, 0)
    first_tile = tl.maximum(first - start, 0) // TOKENS
    end_tile = tl.cdiv(tl.minimum(tl.maximum(end - start, 0), T), TOKENS)
    split_tiles = tl.cdiv(tl.maximum(end_tile - first_tile, 0), tl.num_programs(2))
    begin_tile = first_tile + split * split_tiles
    end_tile = tl.minimum(begin_tile + split_tiles, end_tile)
    full_tile = tl.maximum(tl.cdiv(tl.maximum(full - start, 0), TOKENS), begin_tile)
    full_end_tile = tl.minimum(tl.minimum(tl.maximum(full_end - start, 0), T) // TOKENS, end_tile)
    if INNER:
        _local_begin, local_end = seen_by(n0, last, inner_reach, inner_stride, LOCAL_BLOCKS)
        local_end_tile = tl.cdiv(tl.maximum(local_end - start, 0), TOKENS)
        full_tile = tl.maximum(full_tile, local_end_tile)
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
            q_tile = load_rows(q, b * q_b + large(token, WIDE) * q_t + head * q_h, D, BLOCK_D, real)
            do_tile = load_rows(d_out, row * E, E, BLOCK_E, real)
            lse_row = tl.load(lse + row, mask=real, other=0.0)
            delta_row = tl.load(delta + row, mask=real, other=0.0)

            # [N, M]: p and ds are the left operands of the next products
            s = logits(k_tile, q_tile, scale_log2, cap, CAP, POSITIVE, PRECISION)
            if CAP:
                slope = cap_slope(s, cap)
            dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)
            if phase != 1:
                lo, hi = interval(start + token, N, floor, reach, stride, KIND)
                if DOCUMENTS:
                    lo, hi = in_document(lo, hi, token, T, firsts, lasts, unit)
                seen = (n[:, None] >= lo[None]) & (n[:, None] < hi[None]) & real[None]
                s = tl.where(seen, s, float("-inf"))
            p, ds = softmax_grad(s, unit_scale, dp, lse_row[None], delta_row[None], GATED)
            if INNER and phase == 0:
                lse_row = tl.load(inner_lse + row, mask=real, other=0.0)
                delta_row = tl.load(inner_delta + row, mask=real, other=0.0)
                lo, hi = interval(
                    start + token, N, inner_floor, inner_reach, inner_stride, LOCAL_BLOCKS
                )
                s = tl.where(n[:, None] >= lo[None], s, float("-inf"))
                inner_p, inner_ds = softmax_grad(
                    s, unit_scale, dp, lse_row[None], delta_row[None], GATED
                )
                p, ds = p + inner_p, ds + inner_ds
            if CAP:
                ds *= slope
            dv_acc += tl.dot(p.to(do_tile.dtype), do_tile, input_precision=PRECISION)
            dk_acc += tl.dot(ds.to(q_tile.dtype), q_tile, input_precision=PRECISION)

    B = lines // K
    entry = ((split * B + b) * N + n) * K + h
    store_rows(dk, entry * D, dk_acc * scale, D, BLOCK_D, inside)
    store_rows(dv, entry * E, dv_acc, E, BLOCK_E, inside)


# launches


def backward_arguments(bwd: BackwardInputs, inner: BackwardInputs | None) -> dict[str, Any]:
    """Arguments of both kernels from the backward inputs."""
    args = bwd.arguments()
    within = (inner or bwd).arguments()
    for name in ("lse", "delta"):
        args[f"inner_{name}"] = None if inner is None else within[name]
    return args


def backward_q(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_range: KVRange,
    scale: float,
    bwd: BackwardInputs,
    dq: Accumulator,
    prefix: tuple[Tensor, Tensor] | None = None,
    inner: tuple[KVRange, BackwardInputs] | None = None,
) -> None:
    """Add to dq. With an `inner` range and its backward inputs, also add through its local blocks
    and the keys before its floor."""
    within, inner_bwd = inner or (None, None)
    if supports_sm90("dq", q, k, v, kv_range, scale, within, prefix):
        from . import bwd_sm90

        bwd_sm90.backward_q(q, k, v, kv_range, scale, bwd, dq, inner, prefix)
        return
    args = arguments(q, k, v, kv_range, "dq", within) | prefix_arguments(prefix, kv_range)
    grid, args["FLIPPED"] = tiles_of_queries(q, k, args)
    args |= load_arguments(k, v, args["BLOCK_N"])
    args |= dq.arguments() | backward_arguments(bwd, inner_bwd)
    launcher(nsa_flash_dq, grid)(scale=scale, POSITIVE=scale > 0, **args)


def backward_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_range: KVRange,
    scale: float,
    bwd: BackwardInputs,
    inner: tuple[KVRange, BackwardInputs] | None = None,
) -> Partials:
    """Partial dk and dv; with `inner` also through its local blocks, without the prefix."""
    within, inner_bwd = inner or (None, None)
    few = k.shape[1] <= FEW_KEYS
    if not few and supports_sm90("dkv", q, k, v, kv_range, scale, within):
        from . import bwd_sm90

        return bwd_sm90.backward_kv(q, k, v, kv_range, scale, bwd, inner)
    kernel = "prefix.dkv" if few else "dkv"
    B, T, _, D = q.shape
    N, K, E = k.shape[1], k.shape[2], v.shape[-1]
    args = arguments(q, k, v, kv_range, kernel, within)
    seeing = T if kv_range.wide else min(T, kv_range.reach + args["BLOCK_N"])
    tiles = cdiv(seeing, args["BLOCK_M"] // args["G"])
    blocks = cdiv(N, args["BLOCK_N"])
    splits = launch.query_splits(blocks * B * K, tiles, kv_range.wide)
    dk = k.new_empty(splits, B, N, K, D, dtype=torch.float32)
    dv = v.new_empty(splits, B, N, K, E, dtype=torch.float32)
    args["WIDE"] |= max(dk.numel(), dv.numel()) >= 1 << 31
    args |= backward_arguments(bwd, inner_bwd)
    grid, args["FLIPPED"] = launch.grid(blocks, B * K, splits)
    launcher(nsa_flash_dkv, grid)(dk=dk, dv=dv, scale=scale, POSITIVE=scale > 0, **args)
    return dk, dv


def backward_prefix(
    q: Tensor,
    prefix: tuple[Tensor, Tensor],
    kv_range: KVRange,
    scale: float,
    bwd: BackwardInputs,
) -> Partials:
    """Partial dk and dv of a prefix."""
    kind = CAUSAL_WINDOW if kv_range.causal_prefix else EVERYTHING
    start, starts, soft_cap = kv_range.start, kv_range.starts, kv_range.soft_cap
    seen = KVRange(kind.value, UNLIMITED, start=start, starts=starts, soft_cap=soft_cap)
    return backward_kv(q, *prefix, seen, scale, bwd)
