"""The tensors and settings of a decode step, and the arguments that its kernels share.

The host never reads a sequence length from the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..common import launch
from .kv_cache import CacheMetadata, head_dims


@dataclass(frozen=True)
class Settings:
    """Settings of the attention layer, as `ops.decode` names them."""

    l: int
    d: int
    s: int
    n: int
    w: int
    importance: str
    interpolated: bool
    num_initial: int
    num_local: int
    stride: int
    shared: bool
    scale: float
    soft_cap: float | None
    one_softmax: bool = False  # the selected branch alone; the window is then its local blocks

    @property
    def window_blocks(self) -> int:
        """The most KV blocks that a sliding window overlaps."""
        return self.num_local if self.one_softmax else (self.w + self.s - 1) // self.s + 1

    @property
    def block_windows(self) -> int:
        """With importance="max", the windows of a block, whose largest score is stored; else 0."""
        return self.s // self.d if self.importance == "max" and self.s > self.d else 0


@dataclass(frozen=True)
class Call:
    """The tensors of a decode step, as `ops.decode` names them.

    `metadata` has the sequence lengths and the page table. `ranking_tail` keeps the block indices
    of the last tokens of each sequence, for a selection stride above 1.
    """

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
    metadata: CacheMetadata

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """B, T, H, K, D and E."""
        B, T, H, D = self.q.shape
        return B, T, H, self.k.shape[2], D, self.v.shape[-1]

    @property
    def max_tokens(self) -> int:
        """Tokens that the storage of one sequence can hold."""
        return self.k.shape[1] * self.pages

    @property
    def max_windows(self) -> int:
        """Compression windows that the storage of one sequence can hold."""
        return self.ck.shape[1] * self.pages

    @property
    def pages(self) -> int:
        """Pages of one sequence; 1 without a page table."""
        return 1 if self.metadata.page_table is None else self.metadata.page_table.shape[1]

    @property
    def memory_tokens(self) -> int:
        """Learned memory keys and values per KV head."""
        return 0 if self.memory is None else self.memory[0].shape[1]

    def arguments(self, settings: Settings) -> dict[str, Any]:
        """Arguments of both decode kernels: inputs, strides, sizes and settings."""
        H, K = self.q.shape[2], self.k.shape[2]
        cq = self.q if self.cq is None else self.cq
        mem_k, mem_v = self.memory or (self.ck, self.cv)
        strides = launch.strides("g", self.gates, "bth3")
        for name, t in (("p", cq), ("q", self.q)):
            strides |= launch.strides(name, t, "bth")
        for name, t in (("k", self.k), ("v", self.v), ("c", self.ck), ("o", self.cv)):
            strides |= launch.strides(name, t, "bnh")
        for name, t in (("m", mem_k), ("u", mem_v)):
            strides |= launch.strides(name, t if self.memory else None, "hm")
        tensors = dict(
            cq=cq, q=self.q, k=self.k, v=self.v, ck=self.ck, cv=self.cv, mem_k=mem_k, mem_v=mem_v,
            gates=self.q if self.gates is None else self.gates, counters=self.counters,
            sinks=self.counters if self.sinks is None else self.sinks.float().contiguous(),
        )  # fmt: skip
        is_paged = self.metadata.page_table is not None
        return dict(
            **tensors, **strides, **self.metadata.arguments(), **head_dims(self.k, self.v),
            **launch.cap(settings.soft_cap), B=self.q.shape[0], T=self.q.shape[1], K=K, G=H // K,
            W=self.max_windows, MEMORY=self.memory_tokens,
            scale_log2=settings.scale * launch.LOG2_E,
            WINDOWS_PER_PAGE=self.metadata.page_size // settings.d if is_paged else 0,
            COUNTERS=self.counters.shape[2], l=settings.l, d=settings.d, s=settings.s,
            BLOCK_S=launch.padded(settings.s), w=settings.w, TOPN=settings.n,
            INITIAL=settings.num_initial, LOCAL=settings.num_local,
            INTERPOLATED=settings.interpolated, SINKS=self.sinks is not None,
        )  # fmt: skip

    def allocate_output(self) -> Tensor:
        """The step's output, [B T H E]."""
        B, T, H, _, _, E = self.sizes
        return self.q.new_empty(B, T, H, E)

    def allocate_partials(self, splits: int) -> tuple[Tensor, Tensor]:
        """Partial results of `splits` splits: outputs [splits B T H E] and their lse [.. H]."""
        B, T, H, _, _, E = self.sizes
        partial_out = self.q.new_empty(splits, B, T, H, E, dtype=torch.float32)
        return partial_out, partial_out.new_empty(splits, B, T, H)
