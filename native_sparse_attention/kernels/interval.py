"""Attention in which every query sees one interval of keys: the window and the compressed branch.

Forward, dq, and dk/dv, without atomics. A tile holds the tokens x heads of one KV head's group, so
that keys and values are read once for the group. `device.interval` says which keys a query sees.
"""

import torch
import triton
import triton.language as tl

from . import launch
from .device import (
    BEHIND,
    EVERYTHING,
    interval,
    load_rows,
    seen_by,
    softmax_step,
    store_rows,
    tile_rows,
)

LOG2_E = 1.4426950408889634

# one compiled kernel for all lengths and places
LENGTHS = ["T", "N", "start", "reach"]


@triton.jit(do_not_specialize=LENGTHS)
def forward_kernel(
    q, k, v, out, lse, starts, start, T, N, K, scale_log2, reach, stride,
    q_b, q_t, q_h, k_b, k_n, k_h, v_b, v_n, v_h,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    KIND: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
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
    lo, hi = interval(start + token, N, reach, stride, KIND)
    lo_first, hi_first = interval(start + tile * TOKENS, N, reach, stride, KIND)
    last = tl.minimum(tile * TOKENS + TOKENS, T) - 1
    lo_last, hi_last = interval(start + last, N, reach, stride, KIND)

    # [M, D]
    head = h * G + g
    q_tile = load_rows(q, b * q_b + token.to(tl.int64) * q_t + head * q_h, D, BLOCK_D, real)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)

    # keys that some rows see, that all see, that some see
    full = tl.cdiv(lo_last, BLOCK_N) * BLOCK_N
    full_end = tl.maximum(hi_first // BLOCK_N * BLOCK_N, full)
    for phase in tl.static_range(3):
        if phase == 0:
            begin, end = lo_first // BLOCK_N * BLOCK_N, tl.minimum(full, hi_last)
        elif phase == 1:
            begin, end = full, tl.minimum(full_end, hi_last)
        else:
            begin, end = full_end, hi_last
        for n0 in range(begin, end, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            inside = n < N
            # [N, D], [N, E]
            k_tile = load_rows(k, b * k_b + h * k_h + n.to(tl.int64) * k_n, D, BLOCK_D, inside)
            v_tile = load_rows(v, b * v_b + h * v_h + n.to(tl.int64) * v_n, E, BLOCK_E, inside)
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


@triton.jit
def delta_kernel(out, d_out, d_lse, delta, ROWS, E: tl.constexpr, BLOCK_E: tl.constexpr,
                 BLOCK_M: tl.constexpr):  # fmt: skip
    """One program: M rows of `delta = sum(out * d_out) - d_lse`, what each row's dp is measured
    from."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < ROWS
    o = load_rows(out, row * E, E, BLOCK_E, real).to(tl.float32)
    do = load_rows(d_out, row * E, E, BLOCK_E, real).to(tl.float32)
    value = tl.sum(o * do, 1) - tl.load(d_lse + row, mask=real, other=0.0)
    tl.store(delta + row, value, mask=real)


@triton.jit(do_not_specialize=LENGTHS)
def dq_kernel(
    q, k, v, d_out, lse, delta, dq, starts, start, T, N, K, scale, reach, stride,
    q_b, q_t, q_h, k_b, k_n, k_h, v_b, v_n, v_h,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    KIND: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: dq of a tile of queries of one row and KV head."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b, h = (tl.program_id(1) // K).to(tl.int64), (tl.program_id(1) % K).to(tl.int64)
    TOKENS: tl.constexpr = BLOCK_M // G
    token, g, real = tile_rows(tile, T, G, BLOCK_M)
    if RAGGED:
        start = tl.load(starts + b).to(tl.int32)
    lo, hi = interval(start + token, N, reach, stride, KIND)
    lo_first, hi_first = interval(start + tile * TOKENS, N, reach, stride, KIND)
    last = tl.minimum(tile * TOKENS + TOKENS, T) - 1
    lo_last, hi_last = interval(start + last, N, reach, stride, KIND)

    head = h * G + g
    row = (b * T + token) * (K * G) + head
    q_tile = load_rows(q, b * q_b + token.to(tl.int64) * q_t + head * q_h, D, BLOCK_D, real)
    do_tile = load_rows(d_out, row * E, E, BLOCK_E, real)
    # an empty row's lse is -inf; it has no keys, but its tile may have
    lse_row = tl.load(lse + row, mask=real, other=0.0) * 1.4426950408889634
    lse_row = tl.where(lse_row == float("-inf"), 0.0, lse_row)
    delta_row = tl.load(delta + row, mask=real, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    full = tl.cdiv(lo_last, BLOCK_N) * BLOCK_N
    full_end = tl.maximum(hi_first // BLOCK_N * BLOCK_N, full)
    for phase in tl.static_range(3):
        if phase == 0:
            begin, end = lo_first // BLOCK_N * BLOCK_N, tl.minimum(full, hi_last)
        elif phase == 1:
            begin, end = full, tl.minimum(full_end, hi_last)
        else:
            begin, end = full_end, hi_last
        for n0 in range(begin, end, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            inside = n < N
            k_tile = load_rows(k, b * k_b + h * k_h + n.to(tl.int64) * k_n, D, BLOCK_D, inside)
            v_tile = load_rows(v, b * v_b + h * v_h + n.to(tl.int64) * v_n, E, BLOCK_E, inside)
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            p = tl.exp2(s * (scale * 1.4426950408889634) - lse_row[:, None])
            if phase != 1:
                seen = (n[None] >= lo[:, None]) & (n[None] < hi[:, None])
                p = tl.where(seen, p, 0.0)
            dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
            ds = p * (dp - delta_row[:, None])
            acc += tl.dot(ds.to(k_tile.dtype), k_tile, input_precision=PRECISION)

    store_rows(dq, row * D, acc * scale, D, BLOCK_D, real)


@triton.jit(do_not_specialize=LENGTHS)
def dkv_kernel(
    q, k, v, d_out, lse, delta, dk, dv, starts, start, T, N, K, scale, reach, stride,
    q_b, q_t, q_h, k_b, k_n, k_h, v_b, v_n, v_h,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    KIND: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr, SPLITS: tl.constexpr,
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

    first, end = seen_by(n0, tl.minimum(n0 + BLOCK_N, N) - 1, reach, stride, KIND)
    first_tile = tl.maximum(first - start, 0) // TOKENS
    end_tile = tl.cdiv(tl.minimum(tl.maximum(end - start, 0), T), TOKENS)
    share = tl.cdiv(tl.maximum(end_tile - first_tile, 0), SPLITS)
    begin = first_tile + split * share
    for tile in range(begin, tl.minimum(begin + share, end_tile)):
        token, g, real = tile_rows(tile, T, G, BLOCK_M)
        lo, hi = interval(start + token, N, reach, stride, KIND)
        head = h * G + g
        row = (b * T + token) * (K * G) + head
        q_tile = load_rows(q, b * q_b + token.to(tl.int64) * q_t + head * q_h, D, BLOCK_D, real)
        do_tile = load_rows(d_out, row * E, E, BLOCK_E, real)
        lse_row = tl.load(lse + row, mask=real, other=0.0) * 1.4426950408889634
        lse_row = tl.where(lse_row == float("-inf"), 0.0, lse_row)
        delta_row = tl.load(delta + row, mask=real, other=0.0)

        # [M, N]
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        seen = (n[None] >= lo[:, None]) & (n[None] < hi[:, None]) & real[:, None]
        p = tl.exp2(s * (scale * 1.4426950408889634) - lse_row[:, None])
        p = tl.where(seen, p, 0.0)
        dv_acc += tl.dot(tl.trans(p.to(do_tile.dtype)), do_tile, input_precision=PRECISION)
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
        ds = p * (dp - delta_row[:, None])
        dk_acc += tl.dot(tl.trans(ds.to(q_tile.dtype)), q_tile, input_precision=PRECISION)

    B = tl.num_programs(1) // K
    entry = ((split * B + b) * N + n) * K + h
    store_rows(dk, entry * D, dk_acc * scale, D, BLOCK_D, inside)
    store_rows(dv, entry * E, dv_acc, E, BLOCK_E, inside)


# launches


def arguments(q, k, v, starts, start, kind, kernel):
    """What all three kernels take, and their tile."""
    _, T, H, D = q.shape
    N, K, E = k.shape[1], k.shape[2], v.shape[-1]
    wide = kind in (BEHIND.value, EVERYTHING.value)
    tile = launch.interval_tile(kernel, wide, max(D, E), H // K, q.dtype)
    numbers = dict(
        starts=starts,
        start=start,
        T=T,
        N=N,
        K=K,
        G=H // K,
        D=D,
        E=E,
        BLOCK_D=max(16, triton.next_power_of_2(D)),
        BLOCK_E=max(16, triton.next_power_of_2(E)),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        RAGGED=starts is not None,
        PRECISION="ieee",  # of float32; tf32x3 errs up to four times as much
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    for name, t in (("q", q), ("k", k), ("v", v)):
        axes = (f"{name}_b", f"{name}_t" if name == "q" else f"{name}_n", f"{name}_h")
        numbers |= dict(zip(axes, t.stride()[:3], strict=True))
    return numbers


def forward(q, k, v, starts, kind, reach, stride, start, scale):
    """out [B T H E] and natural lse [B T H] of q [B T H D], k [B N K D], v [B N K E]."""
    B, T, H, _ = q.shape
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    out = q.new_empty(B, T, H, v.shape[-1])
    lse = q.new_empty(B, T, H, dtype=torch.float32)
    args = arguments(q, k, v, starts, start, kind, "forward")
    grid = (triton.cdiv(T, args["BLOCK_M"] // args["G"]), B * k.shape[2])
    forward_kernel[grid](
        q=q, k=k, v=v, out=out, lse=lse, scale_log2=scale * LOG2_E, reach=reach, stride=stride,
        KIND=kind, **args,
    )  # fmt: skip
    return out, lse


def backward(d_out, d_lse, q, k, v, out, lse, starts, kind, reach, stride, start, scale):
    """dq, dk, dv."""
    B, T, H, D = q.shape
    N, K, E = k.shape[1], k.shape[2], v.shape[-1]
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    d_out, d_lse = d_out.contiguous(), d_lse.contiguous()
    delta = torch.empty_like(lse)
    block_e = max(16, triton.next_power_of_2(E))
    delta_kernel[(triton.cdiv(lse.numel(), 64),)](
        out, d_out, d_lse, delta, lse.numel(), E=E, BLOCK_E=block_e, BLOCK_M=64
    )
    common = dict(
        q=q, k=k, v=v, d_out=d_out, lse=lse, delta=delta, scale=scale, reach=reach, stride=stride,
        KIND=kind,
    )  # fmt: skip

    dq = q.new_empty(B, T, H, D)
    args = arguments(q, k, v, starts, start, kind, "dq")
    grid = (triton.cdiv(T, args["BLOCK_M"] // args["G"]), B * K)
    dq_kernel[grid](dq=dq, **common, **args)

    args = arguments(q, k, v, starts, start, kind, "dkv")
    tiles = triton.cdiv(T, args["BLOCK_M"] // args["G"])
    blocks = triton.cdiv(N, args["BLOCK_N"])
    wide = kind in (BEHIND.value, EVERYTHING.value)
    splits = launch.query_splits(blocks * B * K, tiles) if wide else 1
    dtype = k.dtype if splits == 1 else torch.float32
    dk = k.new_empty(splits, B, N, K, D, dtype=dtype)
    dv = v.new_empty(splits, B, N, K, E, dtype=dtype)
    dkv_kernel[(blocks, B * K, splits)](dk=dk, dv=dv, SPLITS=splits, **common, **args)
    if splits == 1:
        return dq, dk[0], dv[0]
    return dq, dk.sum(0).to(k.dtype), dv.sum(0).to(v.dtype)
