"""Attention in which every query sees one KV range and optionally a prefix: the window, the
compressed branch with its memory, the forced blocks of the selected branch.

A tile holds tokens x heads of one head group, so that the group reads keys and values once.
`primitives.interval` computes the KV range of a query. The prefix is a few more keys, in tensors of
their own. With `inner`, the same pass also computes attention to a narrower KV range of local
blocks within a causal window; the prefix then belongs to `inner`.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common.key_norms import key_norms
from ..common.launch import LOG2_E, KVRange, Plan, cdiv, strided
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
from ..common.tile_configs import FEW_KEYS
from .call import Facts, facts, supports_sm90

# one compiled kernel for all lengths
LENGTHS = ["T", "N", "P", "start"]

# the prefix: none, seen by every query, or causal (key n by the queries from position n on)
NO_PREFIX, OPEN_PREFIX, CAUSAL_PREFIX = (tl.constexpr(i) for i in range(3))

# out [B T H E] and lse [B T H], and those of the local blocks
Outputs = namedtuple("Outputs", "out lse inner_out inner_lse")
# compile-time settings of the three kernels
Settings = namedtuple(
    "Settings",
    "G D E BLOCK_D BLOCK_E BLOCK_M BLOCK_N KIND INNER PREFIX RAGGED DOCUMENTS CAP SINKS TMA "
    "POSITIVE BOUNDED GATED ADD WIDE FLIPPED",
)


@triton.jit
def tile_ranges(token, first, last, start, entry, documents, T, N, kv_range, F: tl.constexpr):
    """KV ranges lo .. hi - 1 of each row's token [M], of the tile's first token and of its last.
    With documents, clipped to the token's document; the row's bounds begin at `entry`."""
    floor, reach, stride = kv_range.floor, kv_range.reach, kv_range.stride
    lo, hi = interval(start + token, N, floor, reach, stride, F.KIND)
    lo_first, hi_first = interval(start + first, N, floor, reach, stride, F.KIND)
    lo_last, hi_last = interval(start + last, N, floor, reach, stride, F.KIND)
    if F.DOCUMENTS:
        firsts, lasts, unit = documents.first + entry, documents.last + entry, kv_range.unit
        lo, hi = in_document(lo, hi, token, T, firsts, lasts, unit)
        lo_first, hi_first = in_document(lo_first, hi_first, first, T, firsts, lasts, unit)
        lo_last, hi_last = in_document(lo_last, hi_last, last, T, firsts, lasts, unit)
    return lo, hi, lo_first, hi_first, lo_last, hi_last


@triton.jit
def local_blocks(position, N, kv_range):
    """The KV range of a position's local blocks."""
    return interval(
        position, N, kv_range.inner_floor, kv_range.inner_reach, kv_range.inner_stride, LOCAL_BLOCKS
    )


@triton.jit
def load_tile(keys, b, h, n, n0, N, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr):
    """Rows n of head h of `keys` [B N K WIDTH], zeros from row N on; n0 is the first of n. With TMA
    `keys` is a descriptor."""
    if TMA:
        rows = load_keys(keys, b, h, n, n0, n < N, 0, 0, 0, WIDTH, BLOCK, True)
    else:
        rows = load_keys(
            keys.ptr, b, h, n, n0, n < N, keys.b, keys.n, keys.h, WIDTH, BLOCK, False
        )  # fmt: skip
    return rows


@triton.jit
def logits(x, y, scale_log2, cap, F: tl.constexpr):
    """Products [M, N] of x [M, D] and y [N, D], queries and keys. Scaled logits with CAP or without
    POSITIVE; otherwise the caller scales them."""
    # in float32 errors of "tf32x3" are up to four times as large
    s = tl.dot(x, tl.trans(y), input_precision="ieee")
    if F.CAP:
        s = soft_capped(s * scale_log2, cap)
    elif not F.POSITIVE:
        s *= scale_log2
    return s


@triton.jit
def prefix_end(position, P, PREFIX: tl.constexpr):
    """End of the prefix keys that each query sees, of P keys."""
    return tl.minimum(position + 1, P) if PREFIX == CAUSAL_PREFIX else position * 0 + P


@triton.jit
def attend_to_prefix(
    q_tile, pk, pv, b, h, position, P, acc, m, l, scale_log2, unit_scale, cap, pointer,
    F: tl.constexpr,
):  # fmt: skip
    """Fold the prefix into a tile's softmax; see `rare` for `pointer`."""
    hi = prefix_end(position, P, F.PREFIX)
    for n0 in range(0, P, F.BLOCK_N):
        n = n0 + tl.arange(0, F.BLOCK_N)
        k_tile = load_tile(pk, b, h, n, n0, P, F.D, F.BLOCK_D, False)
        v_tile = load_tile(pv, b, h, n, n0, P, F.E, F.BLOCK_E, False)
        s = logits(q_tile, k_tile, scale_log2, cap, F)
        s = tl.where(n[None] < hi[:, None], s, float("-inf"))
        acc, m, l = scaled_step(
            s, unit_scale, 0.0, v_tile, acc, m, l, True, pointer, n0, False, "ieee"
        )
    return acc, m, l


@triton.jit(do_not_specialize=LENGTHS)
def nsa_flash_fwd(
    q, k, v, pk, pv, outputs, norms, sinks, inner_sinks, starts, documents, start, T, N, P, K,
    kv_range, scale_log2, cap, F: tl.constexpr,
):  # fmt: skip
    """One program owns a tile of queries of one sequence and KV head. It reads the tile's KV range
    and writes out and lse. With INNER it writes a second out and lse, of the local blocks and the
    initial keys."""
    # longest tiles first
    tile, line, tiles, _lines = grid_position(F.FLIPPED)
    tile = tiles - 1 - tile
    b, h = large(line // K, F.WIDE), large(line % K, F.WIDE)
    TOKENS: tl.constexpr = F.BLOCK_M // F.G
    token, g, real = tile_rows(tile, T, F.G, F.BLOCK_M)
    out, lse = outputs.out, outputs.lse
    if F.RAGGED:
        start = tl.load(starts + b).to(tl.int32)
    first, last = tile * TOKENS, tl.minimum(tile * TOKENS + TOKENS, T) - 1
    lo, hi, lo_first, hi_first, lo_last, hi_last = tile_ranges(
        token, first, last, start, b * T, documents, T, N, kv_range, F
    )

    # [M, D]
    head = h * F.G + g
    q_rows = b * q.b + large(token, F.WIDE) * q.n + head * q.h
    q_tile = load_rows(q.ptr, q_rows, F.D, F.BLOCK_D, real)
    m = tl.full([F.BLOCK_M], float("-inf"), tl.float32)
    l = tl.full([F.BLOCK_M], 0.0, tl.float32)
    acc = tl.full([F.BLOCK_M, F.BLOCK_E], 0.0, tl.float32)
    row = (b * T + token) * (K * F.G) + head
    if F.SINKS:
        m, l = load_sinks(sinks, head), l + 1.0

    # applies to products that `logits` leaves unscaled
    unit_scale = scale_log2
    if F.CAP or not F.POSITIVE:
        unit_scale = 1.0

    # key tiles that some row sees; all rows see keys all_lo .. all_hi - 1
    begin = lo_first // F.BLOCK_N * F.BLOCK_N
    tiles_seen = tl.maximum(tl.cdiv(hi_last - begin, F.BLOCK_N), 0)
    all_lo, all_hi = lo_last, hi_first
    if F.INNER:
        # in order: keys before the local blocks, local blocks, initial blocks
        inner_floor = kv_range.inner_floor
        local, _hi = local_blocks(start + token, N, kv_range)
        local_first, _hi_first = local_blocks(start + first, N, kv_range)
        local_last, _hi_last = local_blocks(start + last, N, kv_range)
        local, end = tl.maximum(local, lo), hi
        hi = tl.minimum(hi, local)
        local_begin = local_first // F.BLOCK_N * F.BLOCK_N
        to_local = tl.maximum(tl.cdiv(tl.minimum(hi_last, local_last) - begin, F.BLOCK_N), 0)
        to_initial = to_local + tl.maximum(tl.cdiv(hi_last - local_begin, F.BLOCK_N), 1)
        tiles_seen = to_initial + tl.cdiv(inner_floor, F.BLOCK_N)
        all_hi = tl.minimum(all_hi, local_first)

    large_logits = True
    if F.BOUNDED:
        keys = hi - lo
        if F.INNER:
            keys = end - local + tl.minimum(start + token + 1, inner_floor)
        m, factor, large_logits = measured_from(
            q_tile, norms, b * K + h, scale_log2, tl.where(real, keys, 16), m, not F.SINKS
        )
        if F.SINKS:
            l *= factor
    if F.INNER:
        outer_m, outer_l, outer_acc = m, l, acc
        inner_m = tl.full([F.BLOCK_M], float("-inf"), tl.float32)
        if F.BOUNDED:
            inner_m = tl.where(large_logits, inner_m, m)

    for j in range(0, tiles_seen):
        n0 = begin + j * F.BLOCK_N
        if F.INNER:
            if j >= to_local:
                n0 = local_begin + (j - to_local) * F.BLOCK_N
            if j >= to_initial:
                n0 = (j - to_initial) * F.BLOCK_N
        n = n0 + tl.arange(0, F.BLOCK_N)
        # [N, D], [N, E]
        k_tile = load_tile(k, b, h, n, n0, N, F.D, F.BLOCK_D, F.TMA)
        v_tile = load_tile(v, b, h, n, n0, N, F.E, F.BLOCK_E, F.TMA)
        s = logits(q_tile, k_tile, scale_log2, cap, F)
        if F.INNER:
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
        if (n0 < all_lo) | (n0 + F.BLOCK_N > all_hi):
            rare(lse, n0)
            s = tl.where((n[None] >= lo[:, None]) & (n[None] < hi[:, None]), s, float("-inf"))
        acc, m, l = scaled_step(
            s, unit_scale, 0.0, v_tile, acc, m, l, large_logits, lse, n0, F.BOUNDED, "ieee"
        )

    if F.INNER:
        if tiles_seen == to_initial:
            outer_acc, outer_m, outer_l = joined(outer_acc, outer_m, outer_l, acc, m, l)
        store_softmax(out, lse, row, outer_acc, outer_m, outer_l, F.E, F.BLOCK_E, real)
        if F.SINKS:
            nothing, one = tl.zeros_like(acc), tl.full([F.BLOCK_M], 1.0, tl.float32)
            acc, m, l = joined(acc, m, l, nothing, load_sinks(inner_sinks, head), one)
        store_softmax(outputs.inner_out, outputs.inner_lse, row, acc, m, l, F.E, F.BLOCK_E, real)
    else:
        if F.PREFIX:
            acc, m, l = attend_to_prefix(
                q_tile, pk, pv, b, h, start + token, P, acc, m, l, scale_log2, unit_scale, cap, lse,
                F,
            )  # fmt: skip
        store_softmax(out, lse, row, acc, m, l, F.E, F.BLOCK_E, real)


# launches


@functools.lru_cache(maxsize=1024)
def plan(kernel: str, call: Facts, _tuning: Any) -> Plan | None:
    """The launch of `kernel` "forward", "dq" or "dkv"; None where a Hopper kernel takes its place.
    The third axis of the grid of "dkv" has the splits of the queries."""
    (B, T, H, D), (_, N, K, _), E = call.q.shape, call.k.shape, call.v.shape[-1]
    kv_range, groups, dtype = call.kv_range, call.groups, call.q.dtype
    few = kernel == "dkv" and N <= FEW_KEYS
    if not few and supports_sm90(kernel, call):
        return None
    tile = launch.flash_tile(
        "prefix.dkv" if few else kernel, kv_range.wide, max(D, E), groups, dtype, N
    )
    tokens, wide = tile.block_m // groups, launch.has_wide_offsets(call.q, call.k, call.v)
    wide |= B * T * H * max(D, E) >= 1 << 31
    tma = False
    if kernel == "dkv":
        blocks = cdiv(N, tile.block_n)
        seeing = T if kv_range.wide else min(T, kv_range.reach + tile.block_n)
        splits = launch.query_splits(blocks * B * K, cdiv(seeing, tokens), kv_range.wide)
        wide |= splits * B * N * K * max(D, E) >= 1 << 31
        grid, flipped = launch.grid(blocks, B * K, splits)
    else:
        grid, flipped = launch.grid(cdiv(T, tokens), B * K)
        # not in float32: its products take far longer than its loads
        tma = dtype.itemsize < 4 and tile.block_n <= launch.MAX_BOX_ROWS
        tma = tma and launch.supports_tma(call.k, call.v)
    prefix = NO_PREFIX
    if call.prefix is not None:
        prefix = CAUSAL_PREFIX if kv_range.causal_prefix else OPEN_PREFIX
    settings = Settings(
        groups, D, E, launch.padded(D), launch.padded(E), tile.block_m, tile.block_n, kv_range.kind,
        call.inner is not None, prefix.value, kv_range.has_starts, kv_range.has_documents,
        kv_range.has_cap, call.sinks, tma, call.positive, call.bounded, call.gated, call.add, wide,
        flipped,
    )  # fmt: skip
    options = dict(num_warps=tile.num_warps, num_stages=tile.num_stages)
    return Plan(grid, dict(F=settings, kv_range=call.numbers(), **options))


def arguments(q: Tensor, k: Tensor, v: Tensor, kv_range: KVRange, at: Plan) -> dict[str, Any]:
    """Arguments of all three kernels."""
    keys: Any = strided(k), strided(v)
    if at.args["F"].TMA:
        keys = (launch.box(t, at.args["F"].BLOCK_N) for t in (k, v))
    keys, values = keys
    return dict(
        q=strided(q), k=keys, v=values, starts=kv_range.starts, documents=kv_range.documents,
        start=kv_range.start, T=q.shape[1], N=k.shape[1], K=k.shape[2],
        cap=launch.cap(kv_range.soft_cap), **at.args,
    )  # fmt: skip


def prefix_arguments(prefix: tuple[Tensor, Tensor] | None, q: Tensor) -> dict[str, Any]:
    """Arguments of the prefix; q stands in for a missing one."""
    pk, pv = (q, q) if prefix is None else prefix
    return dict(pk=strided(pk), pv=strided(pv), P=0 if prefix is None else pk.shape[1])


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
    call = facts(
        q, k, v, kv_range, scale, inner, prefix,
        sinks=sinks is not None or inner_sinks is not None, bounded=norms is not None,
    )  # fmt: skip
    at = plan("forward", call, launch.tuning())
    if at is None:
        from . import flash_sm90

        return flash_sm90.forward(call, q, k, v, kv_range.start, scale, norms, prefix)
    outputs = launch.empty_outputs(q, v)
    inner_outputs = () if inner is None else launch.empty_outputs(q, v)
    launcher(nsa_flash_fwd, at.grid)(
        **arguments(q, k, v, kv_range, at), **prefix_arguments(prefix, q),
        outputs=Outputs(*outputs, *(inner_outputs or (None, None))), norms=norms, sinks=sinks,
        inner_sinks=inner_sinks, scale_log2=scale * LOG2_E,
    )  # fmt: skip
    return *outputs, *inner_outputs
