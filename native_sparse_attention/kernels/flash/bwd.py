"""The backward of `fwd.py`: dq, and dk/dv without atomics."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common.launch import UNLIMITED, Accumulator, BackwardInputs, KVRange
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
    load_rows,
    rare,
    seen_by,
    softmax_grad,
    store_rows,
    tile_rows,
)
from ..common.reduce import Partials
from .call import backward_rows, facts
from .fwd import (
    LENGTHS,
    arguments,
    load_tile,
    local_blocks,
    logits,
    plan,
    prefix_arguments,
    prefix_end,
    tile_ranges,
)


@triton.jit
def add_dq_of_prefix(
    q_tile, do_tile, pk, pv, b, h, position, P, acc, lse_row, delta_row, scale_log2, unit_scale,
    cap, F: tl.constexpr,
):  # fmt: skip
    """Add the prefix's contribution to a tile's dq."""
    hi = prefix_end(position, P, F.PREFIX)
    for n0 in range(0, P, F.BLOCK_N):
        n = n0 + tl.arange(0, F.BLOCK_N)
        k_tile = load_tile(pk, b, h, n, n0, P, F.D, F.BLOCK_D, False)
        v_tile = load_tile(pv, b, h, n, n0, P, F.E, F.BLOCK_E, False)
        s = logits(q_tile, k_tile, scale_log2, cap, F)
        if F.CAP:
            slope = cap_slope(s, cap)
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee")
        s = tl.where(n[None] < hi[:, None], s, float("-inf"))
        _p, ds = softmax_grad(s, unit_scale, dp, lse_row[:, None], delta_row[:, None], F.GATED)
        if F.CAP:
            ds *= slope
        acc += tl.dot(ds.to(k_tile.dtype), k_tile, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=LENGTHS)
def nsa_flash_dq(
    q, k, v, pk, pv, rows, dq, starts, documents, start, T, N, P, K, kv_range, scale, cap,
    F: tl.constexpr,
):  # fmt: skip
    """One program owns a tile of queries of one sequence and KV head. It reads the tile's KV range
    and writes dq, or with ADD adds to dq."""
    tile, line, tiles, _lines = grid_position(F.FLIPPED)
    tile = tiles - 1 - tile
    b, h = large(line // K, F.WIDE), large(line % K, F.WIDE)
    TOKENS: tl.constexpr = F.BLOCK_M // F.G
    token, g, real = tile_rows(tile, T, F.G, F.BLOCK_M)
    if F.RAGGED:
        start = tl.load(starts + b).to(tl.int32)
    first, last = tile * TOKENS, tl.minimum(tile * TOKENS + TOKENS, T) - 1
    lo, hi, lo_first, hi_first, lo_last, hi_last = tile_ranges(
        token, first, last, start, b * T, documents, T, N, kv_range, F
    )

    head = h * F.G + g
    row = (b * T + token) * (K * F.G) + head
    q_rows = b * q.b + large(token, F.WIDE) * q.n + head * q.h
    q_tile = load_rows(q.ptr, q_rows, F.D, F.BLOCK_D, real)
    do_tile = load_rows(rows.d_out, row * F.E, F.E, F.BLOCK_E, real)
    lse_row = tl.load(rows.lse + row, mask=real, other=0.0)
    delta_row = tl.load(rows.delta + row, mask=real, other=0.0)
    if F.INNER:
        inner_lse_row = tl.load(rows.inner_lse + row, mask=real, other=0.0)
        inner_delta_row = tl.load(rows.inner_delta + row, mask=real, other=0.0)
    acc = tl.full([F.BLOCK_M, F.BLOCK_D], 0.0, tl.float32)
    # applies to products that `logits` leaves unscaled
    scale_log2 = scale * 1.4426950408889634
    unit_scale = scale_log2
    if F.CAP or not F.POSITIVE:
        unit_scale = 1.0

    begin = lo_first // F.BLOCK_N * F.BLOCK_N
    steps = tl.maximum(tl.cdiv(hi_last - begin, F.BLOCK_N), 0)
    all_lo, all_hi = lo_last, hi_first
    if F.INNER:
        inner_floor = kv_range.inner_floor
        local, _local_hi = local_blocks(start + token, N, kv_range)
        local_first, _local_hi_first = local_blocks(start + first, N, kv_range)
        to_initial = steps
        steps += tl.cdiv(inner_floor, F.BLOCK_N)
    for j in range(0, steps):
        n0 = begin + j * F.BLOCK_N
        if F.INNER and j >= to_initial:
            n0 = (j - to_initial) * F.BLOCK_N
        n = n0 + tl.arange(0, F.BLOCK_N)
        k_tile = load_tile(k, b, h, n, n0, N, F.D, F.BLOCK_D, F.TMA)
        v_tile = load_tile(v, b, h, n, n0, N, F.E, F.BLOCK_E, F.TMA)
        s = logits(q_tile, k_tile, scale_log2, cap, F)
        if F.CAP:
            slope = cap_slope(s, cap)
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee")
        if F.INNER and j == to_initial:
            rare(rows.delta, n0)
            lse_row, delta_row = inner_lse_row, inner_delta_row
            lo, hi = lo * 0, tl.minimum(start + token + 1, inner_floor)
            all_lo, all_hi = 0, tl.minimum(start + first + 1, inner_floor)
        if (n0 < all_lo) | (n0 + F.BLOCK_N > all_hi):
            rare(rows.delta, n0)
            s = tl.where((n[None] >= lo[:, None]) & (n[None] < hi[:, None]), s, float("-inf"))
        _p, ds = softmax_grad(s, unit_scale, dp, lse_row[:, None], delta_row[:, None], F.GATED)
        if F.INNER and (j < to_initial) & (n0 + F.BLOCK_N > local_first):
            rare(rows.delta, n0)
            s = tl.where(n[None] >= local[:, None], s, float("-inf"))
            _p, inner_ds = softmax_grad(
                s, unit_scale, dp, inner_lse_row[:, None], inner_delta_row[:, None], F.GATED
            )  # fmt: skip
            ds += inner_ds
        if F.CAP:
            ds *= slope
        acc += tl.dot(ds.to(k_tile.dtype), k_tile, input_precision="ieee")

    if F.PREFIX and not F.INNER:
        acc = add_dq_of_prefix(
            q_tile, do_tile, pk, pv, b, h, start + token, P, acc, lse_row, delta_row, scale_log2,
            unit_scale, cap, F,
        )  # fmt: skip
    acc *= scale
    if F.ADD:
        acc += load_rows(dq, row * F.D, F.D, F.BLOCK_D, real).to(tl.float32)
    store_rows(dq, row * F.D, acc, F.D, F.BLOCK_D, real)


@triton.jit(do_not_specialize=LENGTHS)
def nsa_flash_dkv(
    q, k, v, rows, dk, dv, starts, documents, start, T, N, K, kv_range, scale, cap, F: tl.constexpr
):
    """One program owns a block of keys and one split (axis 2) of the queries that see it. It writes
    partial dk and dv, [splits, B, N, K, ...]."""
    block, line, _blocks, lines = grid_position(F.FLIPPED)
    b, h = large(line // K, F.WIDE), large(line % K, F.WIDE)
    split = tl.program_id(2)
    TOKENS: tl.constexpr = F.BLOCK_M // F.G
    if F.RAGGED:
        start = tl.load(starts + b).to(tl.int32)
    n0 = block * F.BLOCK_N
    n = n0 + tl.arange(0, F.BLOCK_N)
    inside = n < N
    k_tile = load_rows(k.ptr, b * k.b + h * k.h + large(n, F.WIDE) * k.n, F.D, F.BLOCK_D, inside)
    v_tile = load_rows(v.ptr, b * v.b + h * v.h + large(n, F.WIDE) * v.n, F.E, F.BLOCK_E, inside)
    dk_acc = tl.full([F.BLOCK_N, F.BLOCK_D], 0.0, tl.float32)
    dv_acc = tl.full([F.BLOCK_N, F.BLOCK_E], 0.0, tl.float32)
    # applies to products that `logits` leaves unscaled
    scale_log2 = scale * 1.4426950408889634
    unit_scale = scale_log2
    if F.CAP or not F.POSITIVE:
        unit_scale = 1.0

    floor, reach, stride = kv_range.floor, kv_range.reach, kv_range.stride
    unit = kv_range.unit
    # positions that see some of the keys: first .. end - 1; all keys: full .. full_end - 1
    last = tl.minimum(n0 + F.BLOCK_N, N) - 1
    first, end = seen_by(n0, last, reach, stride, F.KIND)
    full, full_end = seen_by(last, n0, reach, stride, F.KIND)
    if F.DOCUMENTS:
        firsts, lasts = documents.first + b * T, documents.last + b * T
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
    if F.INNER:
        _local_begin, local_end = seen_by(
            n0, last, kv_range.inner_reach, kv_range.inner_stride, LOCAL_BLOCKS
        )
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
            token, g, real = tile_rows(tile, T, F.G, F.BLOCK_M)
            head = h * F.G + g
            row = (b * T + token) * (K * F.G) + head
            q_rows = b * q.b + large(token, F.WIDE) * q.n + head * q.h
            q_tile = load_rows(q.ptr, q_rows, F.D, F.BLOCK_D, real)
            do_tile = load_rows(rows.d_out, row * F.E, F.E, F.BLOCK_E, real)
            lse_row = tl.load(rows.lse + row, mask=real, other=0.0)
            delta_row = tl.load(rows.delta + row, mask=real, other=0.0)

            # [N, M]: p and ds are the left operands of the next products
            s = logits(k_tile, q_tile, scale_log2, cap, F)
            if F.CAP:
                slope = cap_slope(s, cap)
            dp = tl.dot(v_tile, tl.trans(do_tile), input_precision="ieee")
            if phase != 1:
                lo, hi = interval(start + token, N, floor, reach, stride, F.KIND)
                if F.DOCUMENTS:
                    lo, hi = in_document(lo, hi, token, T, firsts, lasts, unit)
                seen = (n[:, None] >= lo[None]) & (n[:, None] < hi[None]) & real[None]
                s = tl.where(seen, s, float("-inf"))
            p, ds = softmax_grad(s, unit_scale, dp, lse_row[None], delta_row[None], F.GATED)
            if F.INNER and phase == 0:
                lse_row = tl.load(rows.inner_lse + row, mask=real, other=0.0)
                delta_row = tl.load(rows.inner_delta + row, mask=real, other=0.0)
                lo, hi = local_blocks(start + token, N, kv_range)
                s = tl.where(n[:, None] >= lo[None], s, float("-inf"))
                inner_p, inner_ds = softmax_grad(
                    s, unit_scale, dp, lse_row[None], delta_row[None], F.GATED
                )
                p, ds = p + inner_p, ds + inner_ds
            if F.CAP:
                ds *= slope
            dv_acc += tl.dot(p.to(do_tile.dtype), do_tile, input_precision="ieee")
            dk_acc += tl.dot(ds.to(q_tile.dtype), q_tile, input_precision="ieee")

    B = lines // K
    entry = ((split * B + b) * N + n) * K + h
    store_rows(dk, entry * F.D, dk_acc * scale, F.D, F.BLOCK_D, inside)
    store_rows(dv, entry * F.E, dv_acc, F.E, F.BLOCK_E, inside)


# launches


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
    dq_out, add = dq.next_launch()
    call = facts(q, k, v, kv_range, scale, within, prefix, gated=bwd.gated, add=add)
    at, rows = plan("dq", call, launch.tuning()), backward_rows(bwd, inner_bwd)
    if at is None:
        from . import flash_sm90

        flash_sm90.backward_q(
            call, q, k, v, kv_range.start, scale, rows, dq_out, prefix
        )  # fmt: skip
        return
    launcher(nsa_flash_dq, at.grid)(
        **arguments(q, k, v, kv_range, at), **prefix_arguments(prefix, q),
        rows=rows, dq=dq_out, scale=scale,
    )  # fmt: skip


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
    call = facts(q, k, v, kv_range, scale, within, gated=bwd.gated)
    at, rows = plan("dkv", call, launch.tuning()), backward_rows(bwd, inner_bwd)
    if at is None:
        from . import flash_sm90

        return flash_sm90.backward_kv(call, q, k, v, kv_range.start, scale, rows)
    dk, dv = (t.new_empty(at.grid[2], *t.shape, dtype=torch.float32) for t in (k, v))
    launcher(nsa_flash_dkv, at.grid)(
        **arguments(q, k, v, kv_range, at), rows=rows, dk=dk, dv=dv, scale=scale
    )
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
