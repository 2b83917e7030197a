"""Inputs of a decode step, and the argument groups of its kernels.

The host never reads a sequence length from the device. What a kernel is compiled for (`Settings`)
depends on the layer's settings and on shapes only, so plans are cached.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...config import AttentionConfig
from ...ops.call import DecodeInputs
from ..common import launch
from ..common.primitives import Gates, Strided

# argument groups of both kernels. Sequence lengths [B] before the new tokens, `counts` [B] of real
# new tokens, and the page table with the stride of its rows
Cache = namedtuple("Cache", "lengths counts page_table t_b")
# what the programs of a launch exchange: `scores` of windows [B T heads W], `importances`
# (probabilities) [B T ranks W], `block_indices` [B T ranks n] and a `ranking_tail` of earlier ones,
# `partial_out` [splits B T H E] and `partial_lse`, `counters` [B K 8] of the grid barriers
Workspace = namedtuple(
    "Workspace",
    "scores importances block_indices ranking_tail partial_out partial_lse counters",
)
# numbers of query, KV and ranking heads
Heads = namedtuple("Heads", "H K RANKS")
# all of a call that does not depend on the kernel: `Strided` tensors, the memory with strides of
# slots and heads, and the groups above. Kernels make it of their arguments: within an argument,
# Triton 3.6 loses numbers of an inner tuple
Tensors = namedtuple(
    "Tensors",
    "cq q k v window_k window_v ck cv mem_k mem_v gates sinks cache work out heads scale_log2 cap",
)

# compile-time settings of both kernels; PAGE_SIZE is 0 without a page table. A stored score covers
# SPAN tokens, one every PITCH. RANKED_LOCAL are the local blocks, at least the query's own
Settings = namedtuple(
    "Settings",
    "d s w BLOCK_S TOPN INITIAL LOCAL STRIDE PROBS G RANKS_PER_KV D BLOCK_D E BLOCK_E CAP SINKS "
    "HAS_COUNTS PAGE_SIZE WINDOWS_PER_PAGE COUNTERS SPAN PITCH RANKED_LOCAL INTERPOLATED",
)
# what a plan depends on besides the settings. `tokens` and `windows` are what the storage of one
# sequence holds; 1 page, of size 0, without a page table
Shape = namedtuple(
    "Shape",
    "B T H K D E tokens windows memory pages page_size tail_size dtype has_counts has_sinks "
    "has_window one_softmax",
)


def cache_arguments(lengths: Tensor, counts: Tensor | None, page_table: Tensor | None) -> Cache:
    counts = lengths if counts is None else counts
    if page_table is None:
        return Cache(lengths, counts, lengths, 0)
    return Cache(lengths, counts, page_table, page_table.stride(0))


def window_blocks(config: AttentionConfig, one_softmax: bool) -> int:
    """The most KV blocks that a sliding window overlaps."""
    if one_softmax:
        return config.num_local_blocks
    s = config.selection_block_size
    return (config.sliding_window_size + s - 1) // s + 1


def compile_time(shape: Shape, config: AttentionConfig, n: int, block_windows: int = 0) -> Settings:
    """The compile-time settings of a step that selects n blocks; a stored score is that of
    `block_windows` windows, a whole block, unless this is 0."""
    s, w, local = config.selection_block_size, config.sliding_window_size, config.num_local_blocks
    if shape.one_softmax:  # a window of the local blocks
        w = max(0, local * s - 1)
    probs, block_s = n > 0 and config.importance == "probs", launch.padded(s)
    ranks = shape.K if config.query_heads_share_selected_kv else shape.H
    l, d = (s, s) if block_windows else (config.compress_block_size, config.d)
    return Settings(
        config.d, s, w, block_s, n, config.num_initial_blocks, local,
        config.selection_stride, probs, shape.H // shape.K, ranks // shape.K, shape.D,
        launch.padded(shape.D), shape.E, launch.padded(shape.E), config.soft_cap is not None,
        shape.has_sinks, shape.has_counts, shape.page_size, shape.page_size // config.d,
        8, l, d, max(1, local), config.interpolated_importance_score,
    )  # fmt: skip


class Plan(NamedTuple):
    """A launch, as plain data: heads and columns of `scores` and of `importances`, the shape of
    `block_indices`, and the arguments besides `Tensors`."""

    kernel: Any
    programs: int
    partials: int  # partial results of a row
    scores: tuple[int, int]
    importances: tuple[int, int] | None
    block_indices: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int]


def shape_of(call: DecodeInputs) -> Shape:
    B, T, H, D = call.q.shape
    pages = 1 if call.page_table is None else call.page_table.shape[1]
    windows = 0 if call.ck is None else call.ck.shape[1] * pages
    return Shape(
        B, T, H, call.k.shape[2], D, call.v.shape[-1], call.k.shape[1] * pages, windows,
        0 if call.mem_k is None else call.mem_k.shape[1], pages,
        0 if call.page_table is None else call.k.shape[1],
        0 if call.ranking is None else call.ranking.shape[2], call.q.dtype,
        call.counts is not None, call.sinks is not None, call.window_k is not None,
        call.branch_gates is None,
    )  # fmt: skip


def has_wide_offsets(call: DecodeInputs) -> bool:
    """Whether offsets within a sequence need 64 bits."""
    pages = 1 if call.page_table is None else call.page_table.shape[1]
    streams = (t for t in (call.k, call.v, call.ck, call.cv) if t is not None)
    return any(t.shape[1] * pages * t.stride(1) >= 1 << 31 for t in streams)


def readable(call: DecodeInputs) -> DecodeInputs:
    """The call with tensors as the kernels read them: rows at consecutive addresses, and integers,
    which they read by address, contiguous (one that is expanded has fewer elements)."""
    rows = ("q", "k", "v", "ck", "cv", "cq", "mem_k", "mem_v", "window_k", "window_v")
    tensors = {name: getattr(call, name) for name in (*rows, "lengths", "counts", "page_table")}
    return call._replace(**{
        name: t.contiguous()
        for name, t in tensors.items()
        if t is not None and (name not in rows or t.stride(-1) != 1)
    })  # fmt: skip


def tensors_of(call: DecodeInputs, plan: Plan, config: AttentionConfig, out: Tensor) -> Tensors:
    """The arguments of both kernels, with what their programs exchange."""
    (B, T, H, D), (K, E) = call.q.shape, call.v.shape[2:]
    partial_out = call.q.new_empty(plan.partials, B, T, H, E, dtype=torch.float32)
    scores = partial_out.new_empty(B, T, *plan.scores)
    block_indices = call.counters.new_empty(plan.block_indices)
    work = Workspace(
        scores, partial_out.new_empty(B, T, *plan.importances) if plan.importances else scores,
        block_indices,
        block_indices if call.ranking is None else call.ranking, partial_out,
        partial_out.new_empty(plan.partials, B, T, H), call.counters,
    )  # fmt: skip
    ck = call.k[:, :0] if call.ck is None else call.ck
    cv = ck if call.cv is None else call.cv
    streams = (
        call.q if call.cq is None else call.cq, call.q, call.k, call.v,
        call.k if call.window_k is None else call.window_k,
        call.v if call.window_v is None else call.window_v, ck, cv,
    )  # fmt: skip
    memory = (Strided(ck, 0, 0, 0), Strided(cv, 0, 0, 0))
    if call.mem_k is not None and call.mem_v is not None:
        memory = tuple(Strided(t, 0, t.stride(1), t.stride(0)) for t in (call.mem_k, call.mem_v))
    gates = Gates(call.q, 0, 0, 0, 0)
    if call.branch_gates is not None:
        gates = Gates(call.branch_gates, *call.branch_gates.stride())
    sinks = call.counters if call.sinks is None else call.sinks.float().expand(3, -1).contiguous()
    ranks = K if config.query_heads_share_selected_kv else H
    groups: list[Any] = [Strided(t, *t.stride()[:3]) for t in streams]
    groups += [
        *memory, gates, sinks, cache_arguments(call.lengths, call.counts, call.page_table), work,
        out, Heads(H, K, ranks), config.scale_of(D) * launch.LOG2_E,
        launch.cap(config.soft_cap),
    ]  # fmt: skip
    return Tensors(*groups)
