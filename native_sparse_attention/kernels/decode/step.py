"""What both kernels of a decode step share: arguments, grid barriers, partial results, scores.

The keys of each branch are divided into splits. A split gives a partial result: an output and its
log-sum-exp (lse) in units of log2. "Windows" are compression windows; "the window" is the sliding
window. The queries of sequence b are at positions `lengths[b]` .. `lengths[b] + T - 1`. Their keys
and values are in the cache already. The host reads no length, so a CUDA graph can capture the
launch.

At a grid barrier a program waits until others of the launch, with smaller ids, have written their
output. A GPU starts programs in the order of their ids, so every wait ends.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...config import AttentionConfig
from ...ops.call import Call
from ..common import launch
from ..common.primitives import Gates, Strided, load_sinks, store_rows
from ..topk.selection import window_weight
from ..topk.topn import NO_KEY, NO_SCORE, first_window, sort_keys

NO_LIMIT = tl.constexpr(1 << 30)
# counters of a sequence and KV head
COUNTERS = tl.constexpr(8)

# argument groups of both kernels. Sequence lengths [B] before the new tokens, `counts` [B] of real
# new tokens, None where all are, and the page table, if any, with the stride of its rows
Cache = namedtuple("Cache", "lengths counts page_table t_b")
# what the programs of a launch exchange: `scores` of windows [B T heads W], `importances`
# (probabilities) [B T ranks W], `block_indices` [B T ranks n] and a `ranking_tail` of earlier ones,
# `partial_out` [splits B T H E] and `partial_lse`, `counters` [B K COUNTERS] of the grid barriers
Workspace = namedtuple(
    "Workspace", "scores importances block_indices ranking_tail partial_out partial_lse counters"
)
# numbers of query, KV and ranking heads
Heads = namedtuple("Heads", "H K RANKS")
# all of a call that does not depend on the kernel: `Strided` tensors, the memory with strides of
# slots and heads, and the groups above. A kernel makes one tuple `call` of these arguments and its
# numbers: within an argument, Triton 3.6 loses numbers of an inner tuple, and numbers of a tuple
# are compiled in where they are 1
TENSORS = (
    "cq q k v window_k window_v ck cv mem_k mem_v gates sinks cache work out heads scale_log2 cap "
)


@functools.cache
def tuple_type(name: str, fields: str) -> Any:
    return namedtuple(name, fields)


@triton.jit
def arrive(counter):
    """Signal that all threads of this program have written their output."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="acq_rel")


@triton.jit
def wait(counter, programs):
    """Wait until the output of `programs` programs that arrive at the counter is visible."""
    while tl.atomic_add(counter, 0, sem="acquire") < programs:
        pass


@triton.jit
def token_position(call, b, t):
    """The position of new token t; of the last real token if t is past `counts`."""
    if call.cache.counts is not None:
        t = tl.minimum(t, tl.load(call.cache.counts + b) - 1)
    return (tl.load(call.cache.lengths + b) + t).to(tl.int32)


@triton.jit
def store_partial(call, row, acc, m, l, valid, F: tl.constexpr):
    """Write the outputs of rows that see at least one key, and the lse of all `valid` rows."""
    denominator = tl.where(l == 0.0, 1.0, l)
    offsets = row * F.E
    out = acc * (1.0 / denominator)[:, None]
    store_rows(call.work.partial_out, offsets, out, F.E, F.BLOCK_E, valid & (l > 0.0))
    lse_ptr = call.work.partial_lse + row
    tl.store(lse_ptr, tl.where(l == 0.0, NO_SCORE, m + tl.log2(denominator)), mask=valid)


@triton.jit
def block_scores(scores, c, window_end, F: tl.constexpr):
    """Scores [C] of blocks c from the scores of the windows before `window_end`."""
    WINDOWS_PER_BLOCK: tl.constexpr = F.s // F.PITCH if F.s > F.PITCH else 1
    NEIGHBOURS: tl.constexpr = 1 if F.INTERPOLATED else 0
    WINDOWS_READ: tl.constexpr = (
        (F.SPAN + F.s - 1) // F.PITCH
        if F.PROBS and F.s >= F.PITCH
        else WINDOWS_PER_BLOCK + NEIGHBOURS
    )
    total = tl.zeros([c.shape[0]], tl.float32)
    # interpolation sums differences from the first score, so that blocks of equal window scores
    # get equal scores
    origin, count = total, total
    if F.INTERPOLATED:
        window = tl.minimum(first_window(c, F.PITCH, F.s), window_end - 1)
        origin = tl.load(scores + window, mask=window >= 0, other=0.0)
    for j in tl.static_range(-NEIGHBOURS, WINDOWS_READ):
        window = first_window(c, F.PITCH, F.s) + j
        if F.PROBS:
            # tokens that the blocks share with the window
            overlap, end = c * 0 + 1, (window + 1) * F.PITCH
            if F.s >= F.PITCH:
                overlap = tl.minimum(end, (c + 1) * F.s) - tl.maximum(end - F.SPAN, c * F.s)
            overlap = tl.maximum(overlap, 0).to(tl.float32)
            weight = tl.where(window < window_end, overlap, 0.0)
        else:
            weight = window_weight(
                c, j, window_end + c * 0, F.PITCH, F.s, F.BLOCK_S, F.INTERPOLATED
            )
        window = tl.minimum(tl.maximum(window, 0), window_end - 1)
        score = tl.load(scores + window, mask=window >= 0, other=0.0)
        if F.INTERPOLATED:
            score -= origin
            count += weight
        total += weight * score
    if F.INTERPOLATED:
        total += origin * count
    return total


@triton.jit
def block_sort_keys(scores, c, end, window_end, F: tl.constexpr):
    """Distinct integers in the order of blocks c's scores; NO_KEY outside INITIAL .. end - 1."""
    is_candidate = (c >= F.INITIAL) & (c < end)
    clamped = tl.where(is_candidate, c, F.INITIAL)
    score = block_scores(scores, clamped, window_end, F)
    return tl.where(is_candidate, sort_keys(score, c), NO_KEY)


@triton.jit
def max_of_three(a, b, c, x, y, z):
    return tl.maximum(a, x), tl.maximum(b, y), tl.maximum(c, z)


@triton.jit
def sum_of_three(a, b, c, x, y, z):
    return a + x, b + y, c + z


@triton.jit
def masked_exp2(x, m):
    """2^(x - m); 0 where x is -inf."""
    return tl.exp2(x - tl.where(m == NO_SCORE, 0.0, m))


@triton.jit
def partial_weights(lse, in_branch, gates, sinks, head, H, SINKS: tl.constexpr):
    """Weights [M, N] of N partial results in the gated sum of the three branches, for M rows.

    `in_branch` holds by branch which partial results belong to it, [N]. A weight is the sum over
    branches of the result's fraction of the softmax denominator, times the branch's gate [M, 1].
    The maxima of all branches share one reduction, and so do the sums: each reduction synchronizes
    the threads."""
    logs, sink_logs, tops, terms, weights = (), (), (), (), ()
    for branch in tl.static_range(3):
        logs += (tl.where(in_branch[branch][None], lse, NO_SCORE),)
        if SINKS:
            sink_logs += (load_sinks(sinks, branch * H + head),)
    maxima = tl.reduce(logs, 1, max_of_three, keep_dims=True)
    for branch in tl.static_range(3):
        tops += (tl.maximum(maxima[branch], sink_logs[branch]) if SINKS else maxima[branch],)
        terms += (masked_exp2(logs[branch], tops[branch]),)
    totals = tl.reduce(terms, 1, sum_of_three, keep_dims=True)
    for branch in tl.static_range(3):
        total = totals[branch]
        if SINKS:
            total += masked_exp2(sink_logs[branch], tops[branch])
        # the gate itself if the total is 0
        weights += (terms[branch] * (gates[branch] / tl.where(total == 0.0, 1.0, total)),)
    return weights[0] + weights[1] + weights[2]


@triton.jit
def load_gates(call, b, t, head, valid, ONE_SOFTMAX: tl.constexpr):
    """Gates [M, 1] of the three branches; of one softmax 1 for the selected branch alone."""
    gates, pointer = (), call.gates.ptr + b * call.gates.b + t * call.gates.t + head * call.gates.h
    for branch in tl.static_range(3):
        if ONE_SOFTMAX:
            gates += (tl.full([head.shape[0], 1], 1.0 if branch == 1 else 0.0, tl.float32),)
        else:
            gate = tl.load(pointer + branch * call.gates.branch, mask=valid, other=0.0)
            gates += (gate.to(tl.float32),)
    return gates


@triton.jit
def reduce_partials(
    call, partial_row, mask, in_branch, gates, row, b, t, head, H, e, valid, reduce_started, phase,
    F: tl.constexpr,
):  # fmt: skip
    """Reduce partial results to the output, `g_cmp cmp + g_sel sel + g_win win`.

    Reads N partial results of M rows, `partial_row` [M, N], where `mask` [M, N], with the branches
    that they belong to, [N]. Writes features e of rows `row` [M, 1] of `out`, zeros for tokens past
    `counts`; nothing in phase 0. Returns how many programs had passed their waits before."""
    started_before = 0
    # a partial result with an lse of -inf is uninitialized: its weight is 0
    lse = tl.load(call.work.partial_lse + partial_row, mask=mask, other=NO_SCORE)
    values = tl.load(
        call.work.partial_out + partial_row[:, :, None] * F.E + e[None, None],
        mask=mask[:, :, None] & (e < F.E)[None, None], other=0.0,
    )  # fmt: skip
    if phase == 1:
        started_before = tl.atomic_add(reduce_started, 1, sem="relaxed")
    weight = partial_weights(lse, in_branch, gates, call.sinks, head, H, F.SINKS)[:, :, None]
    acc = tl.sum(tl.where(weight != 0.0, values * weight, 0.0), 1)
    if call.cache.counts is not None:
        acc = tl.where(t < tl.load(call.cache.counts + b), acc, 0.0)
    out_mask = valid & (e < F.E)[None] & (phase == 1)
    out_ptr = call.out + row * F.E + e[None]
    tl.store(out_ptr, acc.to(call.out.dtype.element_ty), mask=out_mask)
    return started_before


# what a plan depends on besides the settings. `tokens` and `windows` are what the storage of one
# sequence holds; page size 0 without a page table. With `is_wide`, offsets within a sequence need
# 64 bits. The queries of windows have `cmp_heads` heads, I wide. `index_shape` is that of block
# indices of the caller, and `returns_indices` whether a step writes its own
Shape = namedtuple(
    "Shape",
    "B T H K D E tokens windows memory page_size tail_size dtype has_sinks has_window one_softmax "
    "is_wide cmp_heads I index_shape returns_indices",
)


class Plan(NamedTuple):
    """A launch, as plain data: heads and columns of `scores` and of `importances`, the shape of
    `block_indices`, and the arguments besides the tensors."""

    kernel: Any
    programs: int
    partials: int  # partial results of a row
    scores: tuple[int, int]
    importances: tuple[int, int] | None
    block_indices: tuple[int, ...]
    args: dict[str, Any]


def shape_of(call: Call) -> Shape:
    B, T, H, D = call.q.shape
    pages = 1 if call.page_table is None else call.page_table.shape[1]
    cmp_heads, I = (call.q if call.cq is None else call.cq).shape[2:]
    streams = [t for t in (call.k, call.v, call.ck, call.cv) if t is not None]
    return Shape(
        B, T, H, call.k.shape[2], D, call.v.shape[3],
        call.k.shape[1] * pages, 0 if call.ck is None else call.ck.shape[1] * pages,
        0 if call.mem_k is None else call.mem_k.shape[1],
        0 if call.page_table is None else call.k.shape[1],
        0 if call.ranking is None else call.ranking.shape[2], call.q.dtype,
        call.sinks is not None, call.window_k is not None, call.branch_gates is None,
        any(t.shape[1] * pages * t.stride(1) >= 1 << 31 for t in streams),
        cmp_heads, I, None if call.block_indices is None else tuple(call.block_indices.shape),
        call.new_indices is not None,
    )  # fmt: skip


def ranking_size(shape: Shape, config: AttentionConfig) -> tuple[int, int]:
    """Ranking heads, and block indices of each."""
    if shape.index_shape is not None:
        return shape.index_shape[2:]  # type: ignore[no-any-return]
    ranks = shape.K if config.query_heads_share_selected_kv else shape.H
    return ranks, config.num_selected_blocks if shape.windows else 0


def settings_of(shape: Shape, config: AttentionConfig, block_windows: int = 0) -> dict[str, Any]:
    """Compile-time settings F of both kernels. PAGE_SIZE is 0 without a page table. RANKED_LOCAL is
    the number of local blocks, at least 1. A stored score covers SPAN tokens, one every PITCH: a
    window, or with `block_windows` a whole block."""
    s, w, local = config.selection_block_size, config.sliding_window_size, config.num_local_blocks
    if shape.one_softmax:  # a window of the local blocks
        w = max(0, local * s - 1)
    ranks, n = ranking_size(shape, config)
    l, d = (s, s) if block_windows else (config.compress_block_size, config.d)
    return dict(
        d=config.d, s=s, w=w, BLOCK_S=launch.padded(s), TOPN=n, INITIAL=config.num_initial_blocks,
        LOCAL=local, STRIDE=config.selection_stride, PROBS=n > 0 and config.importance == "probs",
        G=shape.H // shape.K, RANKS_PER_KV=ranks // shape.K, D=shape.D,
        BLOCK_D=launch.padded(shape.D), E=shape.E, BLOCK_E=launch.padded(shape.E),
        CAP=config.soft_cap is not None, SINKS=shape.has_sinks,
        PAGE_SIZE=shape.page_size, WINDOWS_PER_PAGE=shape.page_size // config.d, SPAN=l, PITCH=d,
        RANKED_LOCAL=max(1, local), INTERPOLATED=config.interpolated_importance_score,
    )  # fmt: skip


def constants(**settings: Any) -> Any:
    """Compile-time settings as one named tuple."""
    return tuple_type("F", " ".join(settings))(**settings)


def cache_arguments(lengths: Tensor, counts: Tensor | None, page_table: Tensor | None) -> Cache:
    return Cache(lengths, counts, page_table, 0 if page_table is None else page_table.stride(0))


def tensor_arguments(
    call: Call, shape: Shape, plan: Plan, config: AttentionConfig, out: Tensor
) -> dict[str, Any]:
    """The TENSORS of a step, with what its programs exchange."""
    B, T, H, K, D, E = shape[:6]
    partial_out = call.q.new_empty(plan.partials, B, T, H, E, dtype=torch.float32)
    scores = partial_out.new_empty(B, T, *plan.scores)
    block_indices = call.block_indices if call.new_indices is None else call.new_indices
    if block_indices is None:
        block_indices = call.counters.new_empty(plan.block_indices)
    work = Workspace(
        scores, partial_out.new_empty(B, T, *plan.importances) if plan.importances else scores,
        block_indices, block_indices if call.ranking is None else call.ranking, partial_out,
        partial_out.new_empty(plan.partials, B, T, H), call.counters,
    )  # fmt: skip
    # another tensor stands in for one that the kernel does not read
    ck = call.k[:, :0] if call.ck is None else call.ck
    cv = ck if call.cv is None else call.cv
    streams = [
        call.q if call.cq is None else call.cq, call.q, call.k, call.v,
        call.k if call.window_k is None else call.window_k,
        call.v if call.window_v is None else call.window_v, ck, cv,
    ]  # fmt: skip
    memory = [
        Strided(ck, 0, 0, 0) if t is None else Strided(t, 0, t.stride(1), t.stride(0))
        for t in (call.mem_k, call.mem_v)
    ]
    gates = call.branch_gates
    sinks = call.counters if call.sinks is None else call.sinks.float().expand(3, -1).contiguous()
    values = (
        *map(launch.strided, streams), *memory,
        Gates(call.q, 0, 0, 0, 0) if gates is None else Gates(gates, *gates.stride()), sinks,
        cache_arguments(call.lengths, call.counts, call.page_table), work, out,
        Heads(H, K, ranking_size(shape, config)[0]),
        config.scale_of(D) * launch.LOG2_E, launch.cap(config.soft_cap),
    )  # fmt: skip
    return dict(zip(TENSORS.split(), values, strict=True))
