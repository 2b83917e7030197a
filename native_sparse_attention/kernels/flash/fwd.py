"""Attention in which every query sees one KV range and optionally a prefix: the window, the
compressed branch with its memory, the forced blocks of the selected branch.

A tile holds tokens x heads of one head group, so that the group reads keys and values once.
`primitives.interval` computes the KV range of a query. The prefix is a few more keys, in tensors of
their own. With `inner`, the same pass also computes attention to a narrower KV range of local
blocks within a causal window; the prefix then belongs to `inner`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common.key_norms import bounds, key_norms
from ..common.launch import LOG2_E, KVRange, cdiv, strides
from ..common.precompile import launcher
from ..common.primitives import (
    LOCAL_BLOCKS,
    grid_position,
    in_document,
    interval,
    joined,
    large,
    load_keys,
    load_rows,
    load_sinks,
    measured_from,
    rare,
    scaled_step,
    soft_capped,
    store_softmax,
    tile_rows,
)
from .support import supports_sm90

# one compiled kernel for all lengths and KV ranges
LENGTHS = ["T", "N", "P", "start", "floor", "reach", "inner_floor", "inner_reach"]

# the prefix: none, seen by every query, or causal (key n by the queries from position n on)
NO_PREFIX, OPEN_PREFIX, CAUSAL_PREFIX = (tl.constexpr(i) for i in range(3))


@triton.jit
def tile_ranges(
    token, first, last, start, entry, doc_first, doc_last, unit, T, N, floor, reach, stride,
    KIND: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """KV ranges lo .. hi - 1 of each row's token [M], of the tile's first token and of its last.
    With documents, clipped to the token's document; the row's bounds begin at `entry`."""
    lo, hi = interval(start + token, N, floor, reach, stride, KIND)
    lo_first, hi_first = interval(start + first, N, floor, reach, stride, KIND)
    lo_last, hi_last = interval(start + last, N, floor, reach, stride, KIND)
    if DOCUMENTS:
        firsts, lasts = doc_first + entry, doc_last + entry
        lo, hi = in_document(lo, hi, token, T, firsts, lasts, unit)
        lo_first, hi_first = in_document(lo_first, hi_first, first, T, firsts, lasts, unit)
        lo_last, hi_last = in_document(lo_last, hi_last, last, T, firsts, lasts, unit)
    return lo, hi, lo_first, hi_first, lo_last, hi_last


@triton.jit
def logits(
    x, y, scale_log2, cap, CAP: tl.constexpr, POSITIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Products [M, N] of x [M, D] and y [N, D], queries and keys. Scaled logits with CAP or without
    POSITIVE; otherwise the caller scales them."""
    s = tl.dot(x, tl.trans(y), input_precision=PRECISION)
    if CAP:
        s = soft_capped(s * scale_log2, cap)
    elif not POSITIVE:
        s *= scale_log2
    return s


@triton.jit
def prefix_end(position, P, PREFIX: tl.constexpr):
    """End of the prefix keys that each query sees, of P keys."""
    return tl.minimum(position + 1, P) if PREFIX == CAUSAL_PREFIX else position * 0 + P


@triton.jit
def attend_to_prefix(
    q_tile, pk, pv, b, h, position, P, acc, m, l, scale_log2, unit_scale, cap, somewhere,
    pk_b, pk_n, pk_h, pv_b, pv_n, pv_h, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, PREFIX: tl.constexpr, CAP: tl.constexpr,
    POSITIVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold the prefix into a tile's softmax."""
    hi = prefix_end(position, P, PREFIX)
    for n0 in range(0, P, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        k_tile = load_keys(pk, b, h, n, n0, n < P, pk_b, pk_n, pk_h, D, BLOCK_D, False)
        v_tile = load_keys(pv, b, h, n, n0, n < P, pv_b, pv_n, pv_h, E, BLOCK_E, False)
        s = logits(q_tile, k_tile, scale_log2, cap, CAP, POSITIVE, PRECISION)
        s = tl.where(n[None] < hi[:, None], s, float("-inf"))
        acc, m, l = scaled_step(
            s, unit_scale, 0.0, v_tile, acc, m, l, True, somewhere, n0, False, PRECISION
        )
    return acc, m, l


@triton.jit(do_not_specialize=LENGTHS)
def nsa_flash_fwd(
    q, k, v, norms, pk, pv, out, lse, inner_out, inner_lse, sinks, inner_sinks, starts, start,
    doc_first, doc_last, unit, T, N, P, K, scale_log2, cap, floor, reach, stride,
    inner_floor, inner_reach, inner_stride,
    q_b, q_t, q_h, k_b, k_n, k_h, v_b, v_n, v_h, pk_b, pk_n, pk_h, pv_b, pv_n, pv_h,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    KIND: tl.constexpr, INNER: tl.constexpr, PREFIX: tl.constexpr, RAGGED: tl.constexpr,
    DOCUMENTS: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, TMA: tl.constexpr,
    POSITIVE: tl.constexpr, BOUNDED: tl.constexpr, WIDE: tl.constexpr,
    FLIPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program owns a tile of queries of one sequence and KV head. It reads the tile's KV range
    and writes out and lse. With INNER it writes a second out and lse, of the local blocks and the
    initial keys."""
    # longest tiles first
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

    # [M, D]
    head = h * G + g
    q_tile = load_rows(q, b * q_b + large(token, WIDE) * q_t + head * q_h, D, BLOCK_D, real)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    row = (b * T + token) * (K * G) + head
    if SINKS:
        m, l = load_sinks(sinks, head), l + 1.0

    # applies to products that `logits` leaves unscaled
    unit_scale = scale_log2
    if CAP or not POSITIVE:
        unit_scale = 1.0

    # key tiles that some row sees; all rows see keys all_lo .. all_hi - 1
    begin = lo_first // BLOCK_N * BLOCK_N
    tiles_seen = tl.maximum(tl.cdiv(hi_last - begin, BLOCK_N), 0)
    all_lo, all_hi = lo_last, hi_first
    if INNER:
        # in order: keys before the local blocks, local blocks, initial blocks
        local, _hi = interval(
            start + token, N, inner_floor, inner_reach, inner_stride, LOCAL_BLOCKS
        )
        local_first, _hi_first = interval(
            start + first, N, inner_floor, inner_reach, inner_stride, LOCAL_BLOCKS
        )
        local_last, _hi_last = interval(
            start + last, N, inner_floor, inner_reach, inner_stride, LOCAL_BLOCKS
        )
        local, end = tl.maximum(local, lo), hi
        hi = tl.minimum(hi, local)
        local_begin = local_first // BLOCK_N * BLOCK_N
        to_local = tl.maximum(tl.cdiv(tl.minimum(hi_last, local_last) - begin, BLOCK_N), 0)
        to_initial = to_local + tl.maximum(tl.cdiv(hi_last - local_begin, BLOCK_N), 1)
        tiles_seen = to_initial + tl.cdiv(inner_floor, BLOCK_N)
        all_hi = tl.minimum(all_hi, local_first)

    large_logits = True
    if BOUNDED:
        keys = hi - lo
        if INNER:
            keys = end - local + tl.minimum(start + token + 1, inner_floor)
        m, factor, large_logits = measured_from(
            q_tile, norms, b * K + h, scale_log2, tl.where(real, keys, 16), m, not SINKS
        )
        if SINKS:
            l *= factor
    if INNER:
        outer_m, outer_l, outer_acc = m, l, acc
        inner_m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        if BOUNDED:
            inner_m = tl.where(large_logits, inner_m, m)

    for j in range(0, tiles_seen):
        n0 = begin + j * BLOCK_N
        if INNER:
            if j >= to_local:
                n0 = local_begin + (j - to_local) * BLOCK_N
            if j >= to_initial:
                n0 = (j - to_initial) * BLOCK_N
        n = n0 + tl.arange(0, BLOCK_N)
        # [N, D], [N, E]
        k_tile = load_keys(k, b, h, n, n0, n < N, k_b, k_n, k_h, D, BLOCK_D, TMA)
        v_tile = load_keys(v, b, h, n, n0, n < N, v_b, v_n, v_h, E, BLOCK_E, TMA)
        s = logits(q_tile, k_tile, scale_log2, cap, CAP, POSITIVE, PRECISION)
        if INNER:
            if j == to_local:
                rare(lse, n0)
                outer_acc, outer_m, outer_l = acc, m, l
                acc, l = tl.zeros_like(acc), tl.zeros_like(l)
                m = inner_m
                lo, hi = local, end
                all_lo, all_hi = local_last, hi_first
            if j == to_initial:
                rare(lse, n0)
                outer_acc, outer_m, outer_l = joined(outer_acc, outer_m, outer_l, acc, m, l)
                lo, hi = lo * 0, tl.minimum(start + token + 1, inner_floor)
                all_lo, all_hi = 0, tl.minimum(start + first + 1, inner_floor)
        if (n0 < all_lo) | (n0 + BLOCK_N > all_hi):
            rare(lse, n0)
            s = tl.where((n[None] >= lo[:, None]) & (n[None] < hi[:, None]), s, float("-inf"))
        acc, m, l = scaled_step(
            s, unit_scale, 0.0, v_tile, acc, m, l, large_logits, lse, n0, BOUNDED, PRECISION
        )

    if INNER:
        if tiles_seen == to_initial:
            outer_acc, outer_m, outer_l = joined(outer_acc, outer_m, outer_l, acc, m, l)
        store_softmax(out, lse, row, outer_acc, outer_m, outer_l, E, BLOCK_E, real)
        if SINKS:
            nothing, one = tl.zeros_like(acc), tl.full([BLOCK_M], 1.0, tl.float32)
            acc, m, l = joined(acc, m, l, nothing, load_sinks(inner_sinks, head), one)
        store_softmax(inner_out, inner_lse, row, acc, m, l, E, BLOCK_E, real)
    else:
        if PREFIX:
            acc, m, l = attend_to_prefix(
                q_tile, pk, pv, b, h, start + token, P, acc, m, l, scale_log2, unit_scale, cap, lse,
                pk_b, pk_n, pk_h, pv_b, pv_n, pv_h, D, E, BLOCK_D, BLOCK_E, BLOCK_N, PREFIX, CAP,
                POSITIVE, PRECISION,
            )  # fmt: skip
        store_softmax(out, lse, row, acc, m, l, E, BLOCK_E, real)


# launches


def load_arguments(k: Tensor, v: Tensor, block_n: int) -> dict[str, Any]:
    """k and v, as TMA descriptors if TMA can read both. Not in float32: its products take far
    longer than its loads."""
    boxes = [
        None if t.dtype == torch.float32 else launch.tma_descriptor(t, block_n) for t in (k, v)
    ]
    return dict(k=k, v=v, TMA=False) if None in boxes else dict(k=boxes[0], v=boxes[1], TMA=True)


def arguments(
    q: Tensor, k: Tensor, v: Tensor, kv_range: KVRange, kernel: str, inner: KVRange | None = None
) -> dict[str, Any]:
    """Arguments of all three kernels, with their tile config."""
    _, T, H, D = q.shape
    N, K, E = k.shape[1], k.shape[2], v.shape[-1]
    tile = launch.flash_tile(kernel, kv_range.wide, max(D, E), H // K, q.dtype, N)
    return dict(
        q=q, k=k, v=v, **strides("q", q, "bth"), **strides("k", k, "bnh"), **strides("v", v, "bnh"),
        starts=kv_range.starts, start=kv_range.start, T=T, N=N, K=K, floor=kv_range.floor,
        reach=kv_range.reach, stride=kv_range.stride, KIND=kv_range.kind,
        **launch.bounds(kv_range.documents), unit=kv_range.unit, **launch.cap(kv_range.soft_cap),
        inner_floor=inner.floor if inner else 0, inner_reach=inner.reach if inner else 0,
        inner_stride=inner.stride if inner else 1, INNER=inner is not None, G=H // K, D=D, E=E,
        BLOCK_D=launch.padded(D), BLOCK_E=launch.padded(E), BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n, RAGGED=kv_range.starts is not None,
        WIDE=launch.wide(q, k, v) or q.shape[0] * T * H * max(D, E) >= 1 << 31,
        PRECISION="ieee",  # for float32; the errors of tf32x3 are up to four times as large
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def tiles_of_queries(q: Tensor, k: Tensor, args: dict[str, Any]) -> tuple[tuple[int, ...], bool]:
    """Grid of a launch over tiles of queries, and whether it is flipped."""
    tiles = cdiv(q.shape[1], args["BLOCK_M"] // args["G"])
    return launch.grid(tiles, q.shape[0] * k.shape[2])


def prefix_arguments(prefix: tuple[Tensor, Tensor] | None, kv_range: KVRange) -> dict[str, Any]:
    pk, pv = (None, None) if prefix is None else prefix
    form = NO_PREFIX if pk is None else CAUSAL_PREFIX if kv_range.causal_prefix else OPEN_PREFIX
    return dict(
        pk=pk, pv=pv, P=0 if pk is None else pk.shape[1], PREFIX=form.value,
        **strides("pk", pk, "bnh"), **strides("pv", pv, "bnh"),
    )  # fmt: skip


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_range: KVRange,
    scale: float,
    prefix: tuple[Tensor, Tensor] | None = None,
    inner: KVRange | None = None,
    sinks: Tensor | None = None,
    inner_sinks: Tensor | None = None,
    norms: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """out [B T H E] and natural lse [B T H] of q [B T H D], k [B N K D], v [B N K E], and of a
    prefix k [B P K D], v [B P K E]. With an `inner` range, also out and lse of its local blocks and
    the keys before its floor. `sinks` and `inner_sinks` [H] are float32, both or none; `norms` are
    the norms of `key_norms.py`, if known."""
    norms = key_norms(q, k)[0] if norms is None else norms
    plain = sinks is None and inner_sinks is None
    if plain and supports_sm90("forward", q, k, v, kv_range, scale, inner, prefix):
        from .fwd_sm90 import forward as forward_sm90

        return forward_sm90(q, k, v, kv_range, scale, inner, norms, prefix)
    outputs = launch.empty_outputs(q, v)
    inner_outputs = () if inner is None else launch.empty_outputs(q, v)
    inner_out, inner_lse = inner_outputs or (None, None)
    args = arguments(q, k, v, kv_range, "forward", inner) | prefix_arguments(prefix, kv_range)
    grid, flipped = tiles_of_queries(q, k, args)
    args |= bounds(norms) | load_arguments(k, v, args["BLOCK_N"])
    launcher(nsa_flash_fwd, grid)(
        out=outputs[0], lse=outputs[1], inner_out=inner_out, inner_lse=inner_lse, sinks=sinks,
        inner_sinks=inner_sinks, SINKS=sinks is not None, scale_log2=scale * LOG2_E,
        POSITIVE=scale > 0, FLIPPED=flipped, **args,
    )  # fmt: skip
    return *outputs, *inner_outputs
