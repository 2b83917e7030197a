"""Attention in which every query sees one KV range and optionally a prefix, and its backward
without atomics: the window, the compressed branch with its memory, the forced blocks of the
selected branch.

A tile holds tokens x heads of one head group, so that the group reads keys and values once. The
prefix is a few more keys, in tensors of their own. With `inner`, the same pass also computes
attention to a narrower KV range of local blocks within a causal window, and to the initial keys.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common import primitives as steps
from ..common.launch import BackwardInputs, KVRange, Plan, cdiv, layout, strided
from ..common.precompile import launcher
from ..common.reduce import Partials
from ..common.tile_configs import FEW_KEYS

# one compiled kernel for all lengths
LENGTHS = ["T", "N", "P", "start"]

# numbers of a KV range and of the local blocks within it; a key covers `unit` tokens
Range = namedtuple("Range", "floor reach stride inner_floor inner_reach inner_stride unit")
# `launch.BackwardInputs` [B T H ..], and lse and delta of the local blocks
Rows = namedtuple("Rows", "d_out lse delta inner_lse inner_delta")
# out [B T H E] and lse [B T H], and those of the local blocks
Outputs = namedtuple("Outputs", "out lse inner_out inner_lse", defaults=(None, None))
# compile-time settings of the three kernels
Settings = namedtuple(
    "Settings",
    "G D E BLOCK_D BLOCK_E BLOCK_M BLOCK_N KIND INNER PREFIX RAGGED DOCUMENTS CAP SINKS TMA "
    "PLAIN GATED ADD WIDE FLIPPED",
)


@triton.jit
def visible_range(token, start, b, documents, T, N, kv_range, F: tl.constexpr):
    """First key and one past the last that tokens of sequence b see, in their own document."""
    floor, reach, stride = kv_range.floor, kv_range.reach, kv_range.stride
    lo, hi = steps.interval(start + token, N, floor, reach, stride, F.KIND)
    if F.DOCUMENTS:
        firsts, lasts = documents.first + b * T, documents.last + b * T
        lo, hi = steps.document_interval(lo, hi, token, T, firsts, lasts, kv_range.unit)
    return lo, hi


@triton.jit
def query_tile(q, starts, documents, start, T, N, K, kv_range, F: tl.constexpr):
    """A program's tile of queries [M, D], the longest first: sequence and KV head; positions of the
    tile's first token, of its last, and of each row's [M]; each row's head, row of [B T H], and
    whether it exists; and the KV ranges lo .. hi - 1 of the rows and of the first and the last
    token."""
    tile, line, tiles, _lines = steps.grid_position(F.FLIPPED)
    tile = tiles - 1 - tile
    b, h = steps.large(line // K, F.WIDE), steps.large(line % K, F.WIDE)
    TOKENS: tl.constexpr = F.BLOCK_M // F.G
    token, g, real = steps.tile_rows(tile, T, F.G, F.BLOCK_M)
    if F.RAGGED:
        start = tl.load(starts + b).to(tl.int32)
    first, last = tile * TOKENS, tl.minimum(tile * TOKENS + TOKENS, T) - 1
    lo, hi = visible_range(token, start, b, documents, T, N, kv_range, F)
    lo_first, hi_first = visible_range(first, start, b, documents, T, N, kv_range, F)
    lo_last, hi_last = visible_range(last, start, b, documents, T, N, kv_range, F)
    ranges = lo, hi, lo_first, hi_first, lo_last, hi_last
    head = h * F.G + g
    row = (b * T + token) * (K * F.G) + head
    q_rows = b * q.b + steps.large(token, F.WIDE) * q.n + head * q.h
    q_tile = steps.load_rows(q.ptr, q_rows, F.D, F.BLOCK_D, real)
    return q_tile, b, h, start + first, start + last, start + token, head, row, real, ranges


@triton.jit(do_not_specialize=LENGTHS)
def nsa_flash_fwd(
    q, k, v, pk, pv, outputs, sinks, inner_sinks, starts, documents, start, T, N, P, K, kv_range,
    scale_log2, cap, F: tl.constexpr,
):  # fmt: skip
    """One program owns a tile of queries of one sequence and KV head. It writes out and lse; with
    INNER also those of the local blocks and the initial keys."""
    q_tile, b, h, first, last, position, head, row, real, ranges = query_tile(
        q, starts, documents, start, T, N, K, kv_range, F
    )
    lo, hi, lo_first, hi_first, lo_last, hi_last = ranges
    out, lse = outputs.out, outputs.lse
    m = tl.full([F.BLOCK_M], float("-inf"), tl.float32)
    l = tl.full([F.BLOCK_M], 0.0, tl.float32)
    acc = tl.full([F.BLOCK_M, F.BLOCK_E], 0.0, tl.float32)
    if F.SINKS:
        m, l = steps.load_sinks(sinks, head), l + 1.0

    unit_scale = steps.logits_scale(scale_log2, F)

    # key tiles that some row sees; all rows see keys all_lo .. all_hi - 1
    begin = lo_first // F.BLOCK_N * F.BLOCK_N
    tiles_seen = tl.maximum(tl.cdiv(hi_last - begin, F.BLOCK_N), 0)
    all_lo, all_hi = lo_last, hi_first
    if F.INNER:
        # in order: keys before the local blocks, local blocks, initial blocks
        inner_floor = kv_range.inner_floor
        local, end = tl.maximum(steps.local_start(position, kv_range), lo), hi
        local_first = tl.maximum(steps.local_start(first, kv_range), lo_first)
        local_last = tl.maximum(steps.local_start(last, kv_range), lo_last)
        hi = tl.minimum(hi, local)
        local_begin = local_first // F.BLOCK_N * F.BLOCK_N
        local_step = tl.maximum(tl.cdiv(tl.minimum(hi_last, local_last) - begin, F.BLOCK_N), 0)
        initial_step = local_step + tl.maximum(tl.cdiv(hi_last - local_begin, F.BLOCK_N), 1)
        tiles_seen = initial_step + tl.cdiv(inner_floor, F.BLOCK_N)
        all_hi = tl.minimum(all_hi, local_first)
        outer_m, outer_l, outer_acc = m, l, acc

    for part in tl.static_range(2 if F.PREFIX else 1):
        if part == 1:  # the prefix
            k, v, N, lo, hi = pk, pv, P, lo * 0, steps.prefix_end(position, P, F.PREFIX)
            begin, tiles_seen, all_lo, all_hi = 0, tl.cdiv(P, F.BLOCK_N), 0, 0
        for j in range(0, tiles_seen):
            n0 = begin + j * F.BLOCK_N
            if F.INNER:
                if j >= local_step:
                    n0 = local_begin + (j - local_step) * F.BLOCK_N
                if j >= initial_step:
                    n0 = (j - initial_step) * F.BLOCK_N
            n = n0 + tl.arange(0, F.BLOCK_N)
            # [N, D], [N, E]
            k_tile = steps.load_keys(k, b, h, n, n0, n < N, F.D, F.BLOCK_D, F.TMA and part == 0)
            v_tile = steps.load_keys(v, b, h, n, n0, n < N, F.E, F.BLOCK_E, F.TMA and part == 0)
            s = steps.logits(q_tile, k_tile, scale_log2, cap, F)
            if F.INNER:
                if j == local_step:
                    steps.rare(lse, n0)
                    outer_acc, outer_m, outer_l = acc, m, l
                    acc, l = tl.zeros_like(acc), tl.zeros_like(l)
                    m = tl.full([F.BLOCK_M], float("-inf"), tl.float32)
                    lo, hi = local, end
                    all_lo, all_hi = local_last, hi_first
                if j == initial_step:
                    steps.rare(lse, n0)
                    outer_acc, outer_m, outer_l = steps.join_softmaxes(
                        outer_acc, outer_m, outer_l, acc, m, l
                    )
                    lo, hi = lo * 0, tl.minimum(position + 1, inner_floor)
                    all_lo, all_hi = 0, tl.minimum(first + 1, inner_floor)
            if (n0 < all_lo) | (n0 + F.BLOCK_N > all_hi):
                steps.rare(lse, n0)
                s = tl.where((n[None] >= lo[:, None]) & (n[None] < hi[:, None]), s, float("-inf"))
            acc, m, l = steps.scaled_step(s, unit_scale, 0.0, v_tile, acc, m, l)

    if F.INNER:
        if tiles_seen == initial_step:
            outer_acc, outer_m, outer_l = steps.join_softmaxes(
                outer_acc, outer_m, outer_l, acc, m, l
            )
        steps.store_softmax(out, lse, row, outer_acc, outer_m, outer_l, F.E, F.BLOCK_E, real)
        if F.SINKS:
            nothing, one = tl.zeros_like(acc), tl.full([F.BLOCK_M], 1.0, tl.float32)
            acc, m, l = steps.join_softmaxes(
                acc, m, l, nothing, steps.load_sinks(inner_sinks, head), one
            )
        out, lse = outputs.inner_out, outputs.inner_lse
    steps.store_softmax(out, lse, row, acc, m, l, F.E, F.BLOCK_E, real)


@triton.jit(do_not_specialize=LENGTHS)
def nsa_flash_dq(
    q, k, v, pk, pv, rows, dq, starts, documents, start, T, N, P, K, kv_range, scale, cap,
    F: tl.constexpr,
):  # fmt: skip
    """One program owns a tile of queries of one sequence and KV head. It writes dq, or with ADD
    adds to dq."""
    q_tile, b, h, first, _last, position, _head, row, real, ranges = query_tile(
        q, starts, documents, start, T, N, K, kv_range, F
    )
    lo, hi, lo_first, hi_first, lo_last, hi_last = ranges
    do_tile = steps.load_rows(rows.d_out, row * F.E, F.E, F.BLOCK_E, real)
    lse_row = tl.load(rows.lse + row, mask=real, other=0.0)
    delta_row = tl.load(rows.delta + row, mask=real, other=0.0)
    if F.INNER:
        inner_lse_row = tl.load(rows.inner_lse + row, mask=real, other=0.0)
        inner_delta_row = tl.load(rows.inner_delta + row, mask=real, other=0.0)
    acc = tl.full([F.BLOCK_M, F.BLOCK_D], 0.0, tl.float32)
    scale_log2 = scale * 1.4426950408889634
    unit_scale = steps.logits_scale(scale_log2, F)

    begin = lo_first // F.BLOCK_N * F.BLOCK_N
    tiles_seen = tl.maximum(tl.cdiv(hi_last - begin, F.BLOCK_N), 0)
    all_lo, all_hi = lo_last, hi_first
    if F.INNER:
        inner_floor = kv_range.inner_floor
        local = steps.local_start(position, kv_range)
        local_first = steps.local_start(first, kv_range)
        initial_step = tiles_seen
        tiles_seen += tl.cdiv(inner_floor, F.BLOCK_N)
    for part in tl.static_range(2 if F.PREFIX else 1):
        if part == 1:  # the prefix
            k, v, N, lo, hi = pk, pv, P, lo * 0, steps.prefix_end(position, P, F.PREFIX)
            begin, tiles_seen, all_lo, all_hi = 0, tl.cdiv(P, F.BLOCK_N), 0, 0
        for j in range(0, tiles_seen):
            n0 = begin + j * F.BLOCK_N
            if F.INNER and j >= initial_step:
                n0 = (j - initial_step) * F.BLOCK_N
            n = n0 + tl.arange(0, F.BLOCK_N)
            k_tile = steps.load_keys(k, b, h, n, n0, n < N, F.D, F.BLOCK_D, F.TMA and part == 0)
            v_tile = steps.load_keys(v, b, h, n, n0, n < N, F.E, F.BLOCK_E, F.TMA and part == 0)
            s = steps.logits(q_tile, k_tile, scale_log2, cap, F)
            if F.CAP:
                slope = steps.cap_slope(s, cap)
            dp = tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee")
            if F.INNER and j == initial_step:
                steps.rare(rows.delta, n0)
                lse_row, delta_row = inner_lse_row, inner_delta_row
                lo, hi = lo * 0, tl.minimum(position + 1, inner_floor)
                all_lo, all_hi = 0, tl.minimum(first + 1, inner_floor)
            if (n0 < all_lo) | (n0 + F.BLOCK_N > all_hi):
                steps.rare(rows.delta, n0)
                s = tl.where((n[None] >= lo[:, None]) & (n[None] < hi[:, None]), s, float("-inf"))
            _p, ds = steps.softmax_grad(
                s, unit_scale, dp, lse_row[:, None], delta_row[:, None], F.GATED
            )
            if F.INNER and (j < initial_step) & (n0 + F.BLOCK_N > local_first):
                steps.rare(rows.delta, n0)
                s = tl.where(n[None] >= local[:, None], s, float("-inf"))
                _p, inner_ds = steps.softmax_grad(
                    s, unit_scale, dp, inner_lse_row[:, None], inner_delta_row[:, None], F.GATED
                )  # fmt: skip
                ds += inner_ds
            if F.CAP:
                ds *= slope
            acc += tl.dot(ds.to(k_tile.dtype), k_tile, input_precision="ieee")
    acc *= scale
    if F.ADD:
        acc += steps.load_rows(dq, row * F.D, F.D, F.BLOCK_D, real).to(tl.float32)
    steps.store_rows(dq, row * F.D, acc, F.D, F.BLOCK_D, real)


@triton.jit(do_not_specialize=LENGTHS)
def nsa_flash_dkv(
    q, k, v, rows, dk, dv, starts, documents, start, T, N, K, kv_range, scale, cap, F: tl.constexpr
):
    """One program owns a block of keys and one split (axis 2) of the queries that see it. It writes
    partial dk and dv, [splits, B, N, K, ...]."""
    block, line, _blocks, lines = steps.grid_position(F.FLIPPED)
    b, h = steps.large(line // K, F.WIDE), steps.large(line % K, F.WIDE)
    split = tl.program_id(2)
    if F.RAGGED:
        start = tl.load(starts + b).to(tl.int32)
    n0 = block * F.BLOCK_N
    n = n0 + tl.arange(0, F.BLOCK_N)
    is_key = n < N
    k_rows = b * k.b + h * k.h + steps.large(n, F.WIDE) * k.n
    k_tile = steps.load_rows(k.ptr, k_rows, F.D, F.BLOCK_D, is_key)
    v_rows = b * v.b + h * v.h + steps.large(n, F.WIDE) * v.n
    v_tile = steps.load_rows(v.ptr, v_rows, F.E, F.BLOCK_E, is_key)
    dk_acc = tl.full([F.BLOCK_N, F.BLOCK_D], 0.0, tl.float32)
    dv_acc = tl.full([F.BLOCK_N, F.BLOCK_E], 0.0, tl.float32)
    scale_log2 = scale * 1.4426950408889634
    unit_scale = steps.logits_scale(scale_log2, F)

    reach, stride, unit = kv_range.reach, kv_range.stride, kv_range.unit
    # positions that see some of the keys: first .. end - 1; all keys: full .. full_end - 1
    last = tl.minimum(n0 + F.BLOCK_N, N) - 1
    first, end = steps.seen_by(n0, last, reach, stride, F.KIND)
    full, full_end = steps.seen_by(last, n0, reach, stride, F.KIND)
    if F.DOCUMENTS:
        firsts, lasts = documents.first + b * T, documents.last + b * T
        # bounds at queries: a key before them all may be of a document that ended before them
        n0_token, last_token = n0 * unit - start, last * unit - start
        first, full_end = steps.document_interval(first, full_end, n0_token, T, firsts, lasts, 1)
        full, end = steps.document_interval(full, end, last_token, T, firsts, lasts, 1)
        begin = tl.load(firsts)
        full_end = tl.where(n0 * unit < begin, 0, full_end)
        end = tl.where(last * unit < begin, 0, end)
        # no query sees a key past its document's last token
        full_end = tl.where(last * unit < end, full_end, 0)
    seen = first, end, full, full_end
    phases = steps.query_tiles(
        n0, last, seen, start, T, kv_range, split, tl.num_programs(2), F.BLOCK_M // F.G, F.INNER
    )
    for phase in tl.static_range(3):
        for tile in range(phases[phase], phases[phase + 1]):
            token, g, real = steps.tile_rows(tile, T, F.G, F.BLOCK_M)
            head = h * F.G + g
            row = (b * T + token) * (K * F.G) + head
            q_rows = b * q.b + steps.large(token, F.WIDE) * q.n + head * q.h
            q_tile = steps.load_rows(q.ptr, q_rows, F.D, F.BLOCK_D, real)
            do_tile = steps.load_rows(rows.d_out, row * F.E, F.E, F.BLOCK_E, real)
            lse_row = tl.load(rows.lse + row, mask=real, other=0.0)
            delta_row = tl.load(rows.delta + row, mask=real, other=0.0)

            # [N, M]: p and ds are the left operands of the next products
            s = steps.logits(k_tile, q_tile, scale_log2, cap, F)
            if F.CAP:
                slope = steps.cap_slope(s, cap)
            dp = tl.dot(v_tile, tl.trans(do_tile), input_precision="ieee")
            if phase != 1:
                lo, hi = visible_range(token, start, b, documents, T, N, kv_range, F)
                visible = (n[:, None] >= lo[None]) & (n[:, None] < hi[None]) & real[None]
                s = tl.where(visible, s, float("-inf"))
            p, ds = steps.softmax_grad(s, unit_scale, dp, lse_row[None], delta_row[None], F.GATED)
            if F.INNER and phase == 0:
                lse_row = tl.load(rows.inner_lse + row, mask=real, other=0.0)
                delta_row = tl.load(rows.inner_delta + row, mask=real, other=0.0)
                local = steps.local_start(start + token, kv_range)
                s = tl.where(n[:, None] >= local[None], s, float("-inf"))
                inner_p, inner_ds = steps.softmax_grad(
                    s, unit_scale, dp, lse_row[None], delta_row[None], F.GATED
                )
                p, ds = p + inner_p, ds + inner_ds
            if F.CAP:
                ds *= slope
            dv_acc += tl.dot(p.to(do_tile.dtype), do_tile, input_precision="ieee")
            dk_acc += tl.dot(ds.to(q_tile.dtype), q_tile, input_precision="ieee")

    B = lines // K
    entry = ((split * B + b) * N + n) * K + h
    steps.store_rows(dk, entry * F.D, dk_acc * scale, F.D, F.BLOCK_D, is_key)
    steps.store_rows(dv, entry * F.E, dv_acc, F.E, F.BLOCK_E, is_key)


KERNELS = {"forward": nsa_flash_fwd, "dq": nsa_flash_dq, "dkv": nsa_flash_dkv}


class Inputs(NamedTuple):
    """q [B T H D], k [B N K D] and v [B N K E], the KV range and the scale of the logits, and a
    prefix k [B P K D], v [B P K E]. An `inner` range asks for attention to its local blocks and the
    keys before its floor as well. A plan has layouts in place of the tensors."""

    q: Any
    k: Any
    v: Any
    kv_range: KVRange
    scale: float
    prefix: Any = None
    inner: KVRange | None = None

    def facts(self) -> Inputs:
        """What a plan depends on."""
        q, k, v = map(layout, self[:3])
        prefix = self.prefix and tuple(map(layout, self.prefix))
        inner = self.inner and self.inner.facts
        return Inputs(q, k, v, self.kv_range.facts, self.scale, prefix, inner)

    @property
    def groups(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[2] // max(self.k.shape[2], 1)  # type: ignore[no-any-return]

    @property
    def prefix_kind(self) -> int:
        if self.prefix is None:
            return steps.NO_PREFIX.value
        return (steps.CAUSAL_PREFIX if self.kv_range.causal_prefix else steps.OPEN_PREFIX).value

    def numbers(self) -> Range:
        kv_range, inner = self.kv_range, self.inner
        local = (0, 0, 1) if inner is None else (inner.floor, inner.reach, inner.stride)
        return Range(kv_range.floor, kv_range.reach, kv_range.stride, *local, kv_range.unit)


@functools.lru_cache(maxsize=1024)
def plan(
    kernel: str, call: Inputs, _tuning: Any, sinks: bool = False, gated: bool = False,
    add: bool = False,
) -> Plan:  # fmt: skip
    """The launch of `kernel` "forward", "dq" or "dkv", or of the Hopper kernel that is faster. The
    last axis of the grid of "dkv" has the splits of the queries."""
    (B, T, H, D), (_, N, K, _), E = call.q.shape, call.k.shape, call.v.shape[-1]
    kv_range, groups, dtype = call.kv_range, call.groups, call.q.dtype
    few = kernel == "dkv" and N <= FEW_KEYS
    if not few and launch.supports_gluon(call.q):
        from . import flash_sm90

        if not sinks and flash_sm90.is_supported(kernel, call):
            return flash_sm90.plan(kernel, call, gated, add)
    tile = launch.flash_tile(
        "prefix.dkv" if few else kernel, kv_range.wide, max(D, E), groups, dtype, N
    )
    tokens, wide = tile.block_m // groups, launch.has_wide_offsets(call.q, call.k, call.v)
    wide |= B * T * H * max(D, E) >= 1 << 31
    tma, lengths = False, {}
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
        lengths = dict(P=0 if call.prefix is None else call.prefix[0].shape[1])
    settings = Settings(
        groups, D, E, launch.padded(D), launch.padded(E), tile.block_m, tile.block_n, kv_range.kind,
        call.inner is not None, call.prefix_kind, kv_range.starts, kv_range.documents,
        kv_range.soft_cap, sinks, tma, call.scale > 0 and not kv_range.soft_cap, gated, add, wide,
        flipped,
    )  # fmt: skip
    options = dict(num_warps=tile.num_warps, num_stages=tile.num_stages)
    return Plan(grid, dict(F=settings, kv_range=call.numbers(), **lengths, **options))


def run(kernel: str, launch_plan: Plan, inputs: Inputs, **args: Any) -> None:
    """Launch a planned kernel; q stands in for a missing prefix."""
    if launch_plan.is_sm90:
        from . import flash_sm90

        flash_sm90.run(kernel, launch_plan, inputs, **args)
        return
    F, (q, k, v, kv_range) = launch_plan.args["F"], inputs[:4]
    keys, values = (launch.keys_argument(t, F.BLOCK_N, F.TMA) for t in (k, v))
    if "P" in launch_plan.args:
        args["pk"], args["pv"] = (strided(t) for t in inputs.prefix or (q, q))
    launcher(KERNELS[kernel], launch_plan.grid)(
        q=strided(q), k=keys, v=values, starts=kv_range.starts, documents=kv_range.documents,
        start=kv_range.start, T=q.shape[1], N=k.shape[1], K=k.shape[2],
        cap=launch.cap(kv_range.soft_cap), **launch_plan.args, **args,
    )  # fmt: skip


def forward(
    inputs: Inputs, sinks: Tensor | None = None, inner_sinks: Tensor | None = None
) -> tuple[Tensor, ...]:
    """out [B T H E] and natural lse [B T H]; with an `inner` range also those of its attention.
    `sinks` and `inner_sinks` [H] are float32, both or none."""
    q, _, v = inputs[:3]
    has_sinks, results = sinks is not None or inner_sinks is not None, launch.empty_outputs(q, v)
    launch_plan = plan("forward", inputs.facts(), launch.tuning(), has_sinks)
    if inputs.inner is not None:
        results += launch.empty_outputs(q, v)
    run(
        "forward", launch_plan, inputs, outputs=Outputs(*results), sinks=sinks,
        inner_sinks=inner_sinks, scale_log2=inputs.scale * launch.LOG2_E,
    )  # fmt: skip
    return results


def backward_rows(bwd: BackwardInputs, inner: BackwardInputs | None) -> Rows:
    inner_rows = (None, None) if inner is None else (inner.lse, inner.delta)
    return Rows(bwd.d_out, bwd.lse, bwd.delta, *inner_rows)


def backward_q(
    inputs: Inputs, bwd: BackwardInputs, dq: launch.Accumulator,
    inner_bwd: BackwardInputs | None = None,
) -> None:  # fmt: skip
    """Add to dq; with an `inner` range also through its attention."""
    dq_out, add = dq.next_launch()
    launch_plan = plan("dq", inputs.facts(), launch.tuning(), gated=bwd.gated, add=add)
    rows = backward_rows(bwd, inner_bwd)
    run("dq", launch_plan, inputs, rows=rows, dq=dq_out, scale=inputs.scale)


def backward_kv(
    inputs: Inputs, bwd: BackwardInputs, inner_bwd: BackwardInputs | None = None
) -> Partials:
    """Partial dk and dv, without the prefix; with an `inner` range also through its attention."""
    inputs = inputs._replace(prefix=None)
    launch_plan = plan("dkv", inputs.facts(), launch.tuning(), gated=bwd.gated)
    splits, rows = launch_plan.grid[-1], backward_rows(bwd, inner_bwd)
    dk, dv = (t.new_empty(splits, *t.shape, dtype=torch.float32) for t in (inputs.k, inputs.v))
    run("dkv", launch_plan, inputs, rows=rows, dk=dk, dv=dv, scale=inputs.scale)
    return dk, dv


def backward_prefix(inputs: Inputs, bwd: BackwardInputs) -> Partials:
    """Partial dk and dv of the prefix."""
    kv_range = inputs.kv_range
    kind = steps.CAUSAL_WINDOW if kv_range.causal_prefix else steps.EVERYTHING
    visible = KVRange(
        kind.value, launch.UNLIMITED, start=kv_range.start, starts=kv_range.starts,
        soft_cap=kv_range.soft_cap,
    )  # fmt: skip
    k, v = inputs.prefix or (inputs.k, inputs.v)
    return backward_kv(Inputs(inputs.q, k, v, visible, inputs.scale), bwd)
