"""A step of decoding: its tensors, what it needs to know of the layer, and the arguments that its
kernels have in common. Nothing here asks the device for a length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..common import launch
from .kv_cache import Step, widths


@dataclass(frozen=True)
class Settings:
    """Of the layer, as `ops.decode` names them."""

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

    @property
    def near_blocks(self) -> int:
        """Blocks that a window may reach into."""
        return (self.w + self.s - 1) // self.s + 1


@dataclass(frozen=True)
class Call:
    """The tensors of a step, as `ops.decode` names them; where their entries lie, and how many of
    them are there, says `step`."""

    q: Tensor
    k: Tensor
    v: Tensor
    ck: Tensor
    cv: Tensor
    gates: Tensor
    cq: Tensor | None
    memory: tuple[Tensor, Tensor] | None
    window: tuple[Tensor, Tensor] | None
    ranking: Tensor | None
    sinks: Tensor | None
    counters: Tensor
    step: Step

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """B, T, H, K, D and E."""
        B, T, H, D = self.q.shape
        return B, T, H, self.k.shape[2], D, self.v.shape[-1]

    @property
    def tokens(self) -> int:
        """That a row has room for."""
        return self.k.shape[1] * self.pages

    @property
    def windows(self) -> int:
        """That a row has room for."""
        return self.ck.shape[1] * self.pages

    @property
    def pages(self) -> int:
        """Of a row; 1 where it lies by itself."""
        return 1 if self.step.table is None else self.step.table.shape[1]

    @property
    def memories(self) -> int:
        return 0 if self.memory is None else self.memory[0].shape[1]

    def arguments(self, at: Settings) -> dict[str, Any]:
        """What both kernels take, but for what they write beside the output."""
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
            gates=self.gates, counters=self.counters,
            sinks=self.counters if self.sinks is None else self.sinks.float().contiguous(),
        )  # fmt: skip
        return dict(
            **tensors, **strides, **self.step.arguments(), **widths(self.k, self.v),
            **launch.cap(at.soft_cap), B=self.q.shape[0], T=self.q.shape[1], K=K, G=H // K,
            W=self.windows, MEMORY=self.memories, scale_log2=at.scale * launch.LOG2_E,
            WINDOW_PAGE=0 if self.step.table is None else self.step.page // at.d,
            COUNTERS=self.counters.shape[2], l=at.l, d=at.d, s=at.s,
            BLOCK_S=launch.padded(at.s), w=at.w, SLOTS=at.n, INITIAL=at.num_initial,
            LOCAL=at.num_local, INTERPOLATED=at.interpolated, SINKS=self.sinks is not None,
        )  # fmt: skip

    def empty(self) -> Tensor:
        B, T, H, _, _, E = self.sizes
        return self.q.new_empty(B, T, H, E)

    def shares(self, number: int) -> tuple[Tensor, Tensor]:
        """Places for so many shares of every row: outputs and log-sum-exps."""
        B, T, H, _, _, E = self.sizes
        parts = self.q.new_empty(number, B, T, H, E, dtype=torch.float32)
        return parts, parts.new_empty(number, B, T, H)
