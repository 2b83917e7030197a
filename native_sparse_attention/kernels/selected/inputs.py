"""Inputs of the selected branch, and the arguments that its kernels share."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..common import launch
from ..common.launch import Selection, strides


class Inputs(NamedTuple):
    """q [B T H D], k [B S K D], v [B S K E], the selected blocks, and the scale of the logits."""

    q: Tensor
    k: Tensor
    v: Tensor
    selection: Selection
    scale: float

    @property
    def groups(self) -> int:
        """G, the query heads of a head group, which share block indices."""
        return self.q.shape[2] // self.selection.block_indices.shape[2]

    @property
    def has_whole_blocks(self) -> bool:
        """Whether a query that selects a block sees all of its s keys."""
        selection = self.selection
        whole = self.k.shape[1] % selection.s == 0 and not selection.diagonal
        return whole and not launch.ends(selection)["ENDS"]

    @property
    def suits_gluon(self) -> bool:
        """What all Gluon kernels need: 16 bits, keys and values of 64 or 128 features, whole blocks
        of 64 keys, strides for TMA, a positive scale, no soft cap and no gates."""
        q, k, v, selection, scale = self
        sizes = q.element_size() == 2 and k.shape[-1] == v.shape[-1] in (64, 128)
        blocks = selection.s == 64 and self.has_whole_blocks
        plain = selection.gates is None and selection.soft_cap is None and scale > 0
        descriptors = (launch.tma_descriptor(t, 64) for t in (q, k, v))
        return sizes and blocks and plain and None not in descriptors

    def arguments(self, in_log2: bool) -> dict[str, Any]:
        """Arguments of the portable kernels, which form logits in units of log2 or not."""
        q, k, v, selection, _scale = self
        D, E = q.shape[-1], v.shape[-1]
        return dict(
            q=q, k=k, v=v, **strides("q", q, "bth"), **strides("k", k, "bnh"),
            **strides("v", v, "bnh"), starts=selection.starts, start=selection.start,
            T=q.shape[1], S=k.shape[1], K=k.shape[2], R=selection.block_indices.shape[2],
            n=selection.block_indices.shape[3], s=selection.s, G=self.groups, D=D, E=E,
            BLOCK_D=launch.padded(D), BLOCK_E=launch.padded(E),
            RAGGED=selection.starts is not None, DIAGONAL=selection.diagonal,
            **launch.ends(selection), **launch.cap(selection.soft_cap, in_log2=in_log2),
            PRECISION="ieee",
        )  # fmt: skip
