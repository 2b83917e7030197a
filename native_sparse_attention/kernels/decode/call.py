"""Inputs of a decode step, and the argument groups of its kernels.

The host never reads a sequence length from the device. What a kernel is compiled for (`Settings`,
`Ranking`) depends on the layer's settings and on shapes only, so plans are cached.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...config import AttentionConfig
from ..common import launch
from ..common.primitives import Strided

# argument groups of both kernels. Sequence lengths [B] before the new tokens, `counts` [B] of real
# new tokens, and the page table with the stride of its rows
Cache = namedtuple("Cache", "lengths counts page_table t_b")
# gates [B T H 3] and their strides
Gates = namedtuple("Gates", "ptr b t h branch")
# what the programs of a launch exchange: `scores` of windows [B T heads W], `importances`
# (probabilities) [B T ranks W], `block_indices` [B T ranks n] and a `ranking_tail` of earlier ones,
# `partial_out` [splits B T H E] and `partial_lse`, `counters` [B K 8] of the grid barriers
Workspace = namedtuple(
    "Workspace",
    "scores importances block_indices ranking_tail partial_out partial_lse counters",
)
# numbers of query, KV and ranking heads
Heads = namedtuple("Heads", "H K RANKS")

# compile-time settings of both kernels; PAGE_SIZE is 0 without a page table
Settings = namedtuple(
    "Settings",
    "l d s w BLOCK_S TOPN INITIAL LOCAL STRIDE PROBS G RANKS_PER_KV D BLOCK_D E BLOCK_E CAP SINKS "
    "HAS_COUNTS PAGE_SIZE WINDOWS_PER_PAGE COUNTERS",
)
# compile-time settings of a ranking. A stored score covers `l` tokens, one every `d`. LOCAL counts
# the query's own block
Ranking = namedtuple("Ranking", "l d s BLOCK_S INITIAL LOCAL PROBS INTERPOLATED")

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


def compile_time(
    shape: Shape, config: AttentionConfig, n: int, block_windows: int = 0
) -> tuple[Settings, Ranking]:
    """The compile-time settings of a step that selects n blocks; a stored score is that of
    `block_windows` windows, a whole block, unless this is 0."""
    s, w, local = config.selection_block_size, config.sliding_window_size, config.num_local_blocks
    if shape.one_softmax:  # a window of the local blocks
        w = max(0, local * s - 1)
    probs, block_s = n > 0 and config.importance == "probs", launch.padded(s)
    ranks = shape.K if config.query_heads_share_selected_kv else shape.H
    l, d = (s, s) if block_windows else (config.compress_block_size, config.d)
    ranking = Ranking(
        l, d, s, block_s, config.num_initial_blocks, max(1, local), probs,
        config.interpolated_importance_score,
    )  # fmt: skip
    settings = Settings(
        config.compress_block_size, config.d, s, w, block_s, n, config.num_initial_blocks, local,
        config.selection_stride, probs, shape.H // shape.K, ranks // shape.K, shape.D,
        launch.padded(shape.D), shape.E, launch.padded(shape.E), config.soft_cap is not None,
        shape.has_sinks, shape.has_counts, shape.page_size, shape.page_size // config.d,
        COUNTERS=8,
    )  # fmt: skip
    return settings, ranking


class Call(NamedTuple):
    """The tensors of a decode step, as `ops.decode` names them; `ck` has no window where there are
    no compressed keys, and `gates` are None for one softmax.

    `ranking_tail` keeps the block indices of the last tokens of each sequence, for a selection
    stride above 1."""

    q: Tensor
    k: Tensor
    v: Tensor
    ck: Tensor
    cv: Tensor
    gates: Tensor | None
    cq: Tensor | None
    memory: tuple[Tensor, Tensor] | None
    window: tuple[Tensor, Tensor] | None
    ranking_tail: Tensor | None
    sinks: Tensor | None
    counters: Tensor
    lengths: Tensor
    counts: Tensor | None
    page_table: Tensor | None

    def shape(self) -> Shape:
        B, T, H, D = self.q.shape
        pages = 1 if self.page_table is None else self.page_table.shape[1]
        tail = self.ranking_tail
        return Shape(
            B, T, H, self.k.shape[2], D, self.v.shape[-1], self.k.shape[1] * pages,
            self.ck.shape[1] * pages, 0 if self.memory is None else self.memory[0].shape[1], pages,
            0 if self.page_table is None else self.k.shape[1], 0 if tail is None else tail.shape[2],
            self.q.dtype, self.counts is not None, self.sinks is not None, self.window is not None,
            self.gates is None,
        )  # fmt: skip

    def arguments(self, config: AttentionConfig) -> dict[str, Any]:
        """Arguments of both decode kernels."""
        named = dict(cq=self.q if self.cq is None else self.cq, q=self.q, k=self.k, v=self.v,
                     ck=self.ck, cv=self.cv)  # fmt: skip
        args: dict[str, Any] = {name: Strided(t, *t.stride()[:3]) for name, t in named.items()}
        for name, t, i in (("mem_k", self.ck, 0), ("mem_v", self.cv, 1)):
            strides = (0, 0)
            if self.memory is not None:
                t = self.memory[i]
                strides = t.stride(1), t.stride(0)
            args[name] = Strided(t, 0, *strides)
        gates = (self.q, 0, 0, 0, 0) if self.gates is None else (self.gates, *self.gates.stride())
        return args | dict(
            gates=Gates(*gates), scale_log2=config.scale_of(self.q.shape[-1]) * launch.LOG2_E,
            cap=launch.cap(config.soft_cap)["cap"], B=self.q.shape[0],
            sinks=self.counters if self.sinks is None else self.sinks.float().contiguous(),
            cache=cache_arguments(self.lengths, self.counts, self.page_table),
        )  # fmt: skip

    def allocate_partials(self, splits: int) -> tuple[Tensor, Tensor]:
        """Partial results of `splits` splits: outputs [splits B T H E] and their lse [.. H]."""
        B, T, H, _ = self.q.shape
        partial_out = self.q.new_empty(splits, B, T, H, self.v.shape[-1], dtype=torch.float32)
        return partial_out, partial_out.new_empty(splits, B, T, H)
