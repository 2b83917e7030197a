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
from ..common.launch import CombineInputs, Selection, next_power_of_2

# block indices or unions, the sizes of the unions, the gates of slots, first positions of sequences
# and last tokens of documents
Index = namedtuple("Index", "blocks counts gates starts doc_last")
# `launch.BackwardInputs`
Backward = namedtuple("Backward", "d_out lse delta")
# dk and dv, and their partials
Gradients = namedtuple("Gradients", "dk dv partial_dk partial_dv")
# `launch.CombineInputs`, with the strides of gates [B T H 3]
Combine = namedtuple("Combine", "cmp win gates out b t h branch")
# the first of every `F`: KV heads, head groups of G query heads each, slots and their power of two,
# keys of a block. DIAGONAL: a query sees its own block up to itself. ENDS: documents end before the
# last key. GATES are those of slots. POSITIVE is the scale
Sizes = namedtuple(
    "Sizes", "K R G n SLOTS s stride D E BLOCK_D BLOCK_E RAGGED DIAGONAL ENDS CAP GATES POSITIVE"
)


@functools.cache
def settings_type(names: tuple[str, ...]) -> Any:
    return namedtuple("F", names)  # type: ignore[misc]


def settings(sizes: Sizes, **others: Any) -> Any:
    """`F` of a kernel that is compiled for `sizes` and `others`."""
    return settings_type((*sizes._fields, *others))(*sizes, *others.values())


class Facts(NamedTuple):
    """Sizes and settings of a call. `aligned` are the tokens from the first aligned group of
    `stride` on; `tuning` is the state of tile configs."""

    F: Sizes
    B: int
    T: int
    S: int
    aligned: int
    dtype: torch.dtype
    tma: bool  # TMA loads k and v
    wide: bool  # offsets into q, k or v need 64 bits
    tuning: Any

    @property
    def H(self) -> int:
        return self.F.R * self.F.G  # type: ignore[no-any-return]

    @property
    def C(self) -> int:
        """Blocks of keys."""
        return launch.cdiv(self.S, self.F.s)

    @property
    def rows(self) -> int:
        """Rows of the tokens that share block indices."""
        return self.F.G * self.F.stride

    @property
    def width(self) -> int:
        return max(self.F.D, self.F.E)

    @property
    def whole(self) -> bool:
        """Whether a query that selects a block sees all of its s keys."""
        return self.S % self.F.s == 0 and not self.F.DIAGONAL and not self.F.ENDS


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
        (B, T, H, D), (S, K), E = q.shape, k.shape[1:3], v.shape[-1]
        R, n = selection.block_indices.shape[2:]
        layouts = [launch.layout(t) for t in (q, k, v)]
        sizes = Sizes(
            K, R, H // R, n, next_power_of_2(n), selection.s, selection.stride, D, E,
            launch.padded(D), launch.padded(E), selection.starts is not None, selection.diagonal,
            selection.documents is not None and not selection.causal,
            selection.soft_cap is not None, selection.gates is not None, self.scale > 0,
        )  # fmt: skip
        return Facts(
            sizes, B, T, S, selection.aligned, q.dtype, launch.supports_tma(*layouts[1:]),
            launch.has_wide_offsets(*layouts), launch.tuning(),
        )  # fmt: skip

    @property
    def suits_gluon(self) -> bool:
        """What all Gluon kernels need: 16 bits, keys and values of 64 or 128 features, whole blocks
        of 64 keys, strides for TMA, a positive scale, no soft cap and no gates."""
        at, F = self.facts, self.facts.F
        sizes = at.dtype.itemsize == 2 and F.D == F.E in (64, 128) and F.s == 64 and at.whole
        plain = F.POSITIVE and not F.CAP and not F.GATES
        return sizes and plain and at.tma and launch.supports_tma(launch.layout(self.q))

    def index(self, blocks: Tensor | None = None, counts: Tensor | None = None) -> Index:
        selection, documents = self.selection, self.selection.documents
        return Index(
            selection.block_indices if blocks is None else blocks, counts, selection.gates,
            selection.starts, documents.last if self.facts.F.ENDS and documents else None,
        )  # fmt: skip


def combine_group(combine_inputs: CombineInputs | None) -> Combine:
    if combine_inputs is None:
        return Combine(*(None,) * 4, *(0,) * 4)
    gates = combine_inputs.gates
    return Combine(
        combine_inputs.cmp, combine_inputs.win, gates, combine_inputs.out, *gates.stride()
    )  # fmt: skip
