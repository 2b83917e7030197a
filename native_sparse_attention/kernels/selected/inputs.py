"""Inputs of the selected branch, what its plans depend on, and the argument groups of its kernels.

A launch has few arguments: pointers and strides in named tuples, everything that a kernel is
compiled for in one constexpr tuple `F`. Plans make `F` and the grid from `Facts`, and are cached.
Lengths are flat arguments: Triton specializes the integers of a tuple.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common import launch
from ..common.launch import CombineInputs, Selection

# strides of sequences, positions and heads
Strides = namedtuple("Strides", "b n h")
# block indices or unions, the sizes of the unions, the gates of slots, first positions of sequences
# and last tokens of documents
Index = namedtuple("Index", "blocks counts gates starts doc_last")
# `launch.BackwardInputs`
Backward = namedtuple("Backward", "d_out lse delta")
# `launch.CombineInputs`, with the strides of gates [B T H 3]
Combine = namedtuple("Combine", "cmp win gates out b t h branch")


class Facts(NamedTuple):
    """Sizes and settings of a call. `aligned` are the tokens from the first aligned group of
    `stride` on; `tuning` is the state of tile configs."""

    B: int
    T: int
    S: int
    H: int
    K: int
    D: int
    E: int
    R: int  # head groups
    n: int
    s: int
    stride: int
    aligned: int
    dtype: torch.dtype
    diagonal: bool  # a query sees its own block up to itself
    ragged: bool  # sequences start at positions of their own
    ends: bool  # documents end before the last key
    capped: bool
    gated: bool  # slots have gates
    positive: bool  # the scale
    tma: bool  # TMA loads k and v
    wide: bool  # offsets into q, k or v need 64 bits
    tuning: Any

    @property
    def G(self) -> int:
        """Query heads of a head group, which share block indices."""
        return self.H // self.R

    @property
    def C(self) -> int:
        """Blocks of keys."""
        return launch.cdiv(self.S, self.s)

    @property
    def rows(self) -> int:
        """Rows of the tokens that share block indices."""
        return self.G * self.stride

    @property
    def width(self) -> int:
        return max(self.D, self.E)

    @property
    def whole(self) -> bool:
        """Whether a query that selects a block sees all of its s keys."""
        return self.S % self.s == 0 and not self.diagonal and not self.ends


@dataclass(frozen=True)
class Inputs:
    """q [B T H D], k [B S K D], v [B S K E], the selected blocks, and the scale of the logits."""

    q: Tensor
    k: Tensor
    v: Tensor
    selection: Selection
    scale: float

    @functools.cached_property
    def facts(self) -> Facts:
        q, k, v, selection = self.q, self.k, self.v, self.selection
        (B, T, H, D), (S, K), (R, n) = q.shape, k.shape[1:3], selection.block_indices.shape[2:]
        layouts = [launch.layout(t) for t in (q, k, v)]
        return Facts(
            B, T, S, H, K, D, v.shape[-1], R, n, selection.s, selection.stride, selection.aligned,
            q.dtype, selection.diagonal, selection.starts is not None,
            selection.documents is not None and not selection.causal,
            selection.soft_cap is not None, selection.gates is not None, self.scale > 0,
            launch.supports_tma(*layouts[1:]), launch.has_wide_offsets(*layouts),
            launch.tuning(),
        )  # fmt: skip

    @property
    def suits_gluon(self) -> bool:
        """What all Gluon kernels need: 16 bits, keys and values of 64 or 128 features, whole blocks
        of 64 keys, strides for TMA, a positive scale, no soft cap and no gates."""
        at = self.facts
        sizes = at.dtype.itemsize == 2 and at.D == at.E in (64, 128) and at.s == 64
        plain = at.positive and not at.capped and not at.gated
        return (
            sizes and at.whole and plain and at.tma and launch.supports_tma(launch.layout(self.q))
        )

    def index(self, blocks: Tensor | None = None, counts: Tensor | None = None) -> Index:
        selection = self.selection
        doc_last = selection.documents.last if self.facts.ends and selection.documents else None
        return Index(
            selection.block_indices if blocks is None else blocks, counts, selection.gates,
            selection.starts, doc_last,
        )  # fmt: skip


def strides(t: Tensor) -> Strides:
    return Strides(*t.stride()[:3])


def combine_group(combine_inputs: CombineInputs | None) -> Combine:
    if combine_inputs is None:
        return Combine(*(None,) * 4, *(0,) * 4)
    return Combine(
        combine_inputs.cmp, combine_inputs.win, combine_inputs.gates, combine_inputs.out,
        *combine_inputs.gates.stride(),
    )  # fmt: skip
