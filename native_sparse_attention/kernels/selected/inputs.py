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

# arguments of a kernel or of its plan, by name
Args = dict[str, Any]

# block indices or unions, the sizes of the unions, the gates of slots, first positions of sequences
# and last tokens of documents
Index = namedtuple("Index", "blocks counts gates starts doc_last")
# `launch.BackwardInputs`
Backward = namedtuple("Backward", "d_out lse delta")
# dk and dv, and their partials
Gradients = namedtuple("Gradients", "dk dv partial_dk partial_dv")
# what a kernel is compiled for, `F`. The call: KV heads, head groups of G query heads each, slots
# and their power of two, keys of a block. DIAGONAL: a query sees its own block up to itself. ENDS:
# documents end before the last key. GATES are those of slots. PLAIN logits have none, no cap and
# a positive scale
CALL = "K R G n SLOTS s stride D E BLOCK_D BLOCK_E RAGGED DIAGONAL ENDS CAP GATES PLAIN "
# what plans choose, each for its kernels
CHOICES = (
    "BLOCK_M BLOCK_N WHOLE ADD COMBINE GATED DQ HEADS KEY_TILES WIDE BLOCK_S TOKENS MEMBERS UNION "
    "TMA FLIPPED GROUP BY_ROW PAIR_ROWS PAIRS"
)
defaults = [0] * len(CHOICES.split())
Settings: Any = namedtuple("Settings", CALL + CHOICES, defaults=defaults)  # type: ignore[misc]


class Facts(NamedTuple):
    """What plans depend on."""

    F: Any  # `Settings` without the choices
    B: int
    T: int
    S: int
    C: int  # blocks of keys
    aligned: int  # tokens from the first aligned group of `stride` on
    rows: int  # of the tokens that share block indices
    whole: bool  # a query that selects a block sees all of its s keys
    dtype: torch.dtype
    tma: bool  # TMA loads k and v
    wide: bool  # offsets into q, k or v need 64 bits
    tuning: Any  # the state of tile configs


@dataclass(frozen=True)
class Inputs:
    """q [B T H D], k [B S K D], v [B S K E], the selected blocks, and the scale of the logits."""

    q: Tensor
    k: Tensor
    v: Tensor
    selection: launch.Selection
    scale: float

    @functools.cached_property
    def facts(self) -> Facts:
        q, k, v, selection = self.q, self.k, self.v, self.selection
        (B, T, H, D), (S, K), E = q.shape, k.shape[1:3], v.shape[-1]
        (R, n), s, stride = selection.block_indices.shape[2:], selection.s, selection.stride
        layouts = [launch.layout(t) for t in (q, k, v)]
        diagonal = selection.causal and selection.num_local == 0
        ends = selection.documents is not None and not selection.causal
        F = Settings(  # type: ignore[call-arg]
            K, R, H // R, n, launch.next_power_of_2(n), s, stride, D, E, launch.padded(D),
            launch.padded(E), selection.starts is not None, diagonal, ends,
            selection.soft_cap is not None, selection.gates is not None,
            self.scale > 0 and selection.soft_cap is None and selection.gates is None,
        )  # fmt: skip
        return Facts(
            F, B, T, S, launch.cdiv(S, s), selection.aligned, H // R * stride,
            S % s == 0 and not diagonal and not ends, q.dtype, launch.supports_tma(*layouts[1:]),
            launch.has_wide_offsets(*layouts), launch.tuning(),
        )  # fmt: skip

    def suits_gluon(self, kernel: str, portable: str) -> bool:
        """What all Gluon kernels need: 16 bits, keys and values of 64 or 128 features, whole blocks
        of 64 keys, strides for TMA, a positive scale, no soft cap and no gates. None runs with
        `launch.using({kernel: False})`, or with a tile config of the caller for `portable`."""
        facts, F = self.facts, self.facts.F
        if launch.override.get(kernel) is False or launch.requested_sizes(portable):
            return False
        sizes = facts.dtype.itemsize == 2 and F.D == F.E in (64, 128) and F.s == 64 and facts.whole
        return sizes and F.PLAIN and facts.tma and launch.supports_tma(launch.layout(self.q))

    def index(self, blocks: Tensor | None = None, counts: Tensor | None = None) -> Index:
        selection, documents = self.selection, self.selection.documents
        return Index(
            selection.block_indices if blocks is None else blocks, counts, selection.gates,
            selection.starts, documents.last if self.facts.F.ENDS and documents else None,
        )  # fmt: skip
