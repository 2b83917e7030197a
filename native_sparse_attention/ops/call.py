"""The arguments of one call, passed whole from its checks to a backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..varlen import Documents


class Call(NamedTuple):
    """Tensors [B T H D] with the names of `native_sparse_attention`, None where the branches read
    none, positions and masks. A call of one branch alone has its keys and values as k and v."""

    q: Tensor
    k: Any = None
    v: Any = None
    ck: Any = None
    cv: Any = None
    branch_gates: Any = None
    cq: Any = None
    mem_k: Any = None
    mem_v: Any = None
    window_k: Any = None
    window_v: Any = None
    sinks: Any = None  # [branches, H]
    gates: Any = None  # of block_indices
    # without gradients
    block_indices: Any = None
    leader_indices: Any = None
    # of a decode step, as `decode_attention` has them
    lengths: Any = None
    counts: Any = None
    page_table: Any = None
    counters: Any = None
    ranking: Any = None
    new_indices: Any = None  # [B T R n], which a step writes
    documents: Documents | None = None
    q_offset: Any = 0  # int or Tensor [B]; before the checks None for the last T tokens
    seq_len: Any = None  # S, where the call has windows alone
    sliding_window_flex_mask: Any = None
    fine_selection_flex_mask: Any = None

    def has_masks(self) -> bool:
        """Whether flex masks of the user are given."""
        window, fine = self.sliding_window_flex_mask, self.fine_selection_flex_mask
        return window is not None or fine is not None

    def but(self, **values: Any) -> Call:
        """The same call with other values."""
        return Call(*[values.get(name, value) for name, value in zip(FIELDS, self, strict=True)])

    def branch(self, name: str, branches: tuple[str, ...]) -> Call:
        """The call of one of the branches alone."""
        k, v = self.k, self.v
        common: dict[str, Any] = dict(documents=self.documents, q_offset=self.q_offset)
        if self.sinks is not None and name in branches:
            common["sinks"] = self.sinks[branches.index(name)][None]
        if name == "compressed":
            q = self.q if self.cq is None else self.cq
            return Call(q, self.ck, self.cv, mem_k=self.mem_k, mem_v=self.mem_v, **common)
        if name == "window":
            k = k if self.window_k is None else self.window_k
            v = v if self.window_v is None else self.window_v
            common["sliding_window_flex_mask"] = self.sliding_window_flex_mask
        else:
            common["fine_selection_flex_mask"] = self.fine_selection_flex_mask
            common |= dict(block_indices=self.block_indices, gates=self.gates)
        return Call(self.q, k, v, **common)

    def ranking_call(self, config: Any) -> Call:
        """What the ranking of blocks reads: queries q, ck and the softmax of the compressed branch,
        in a sequence of `seq_len` tokens; in two stages k, too."""
        part = self.branch("compressed", config.branches)
        return Call(
            part.q, self.k if config.num_selected_groups else None, ck=part.k, mem_k=part.mem_k,
            sinks=part.sinks, documents=part.documents,
            leader_indices=self.leader_indices, q_offset=part.q_offset, seq_len=self.k.shape[1],
        )  # fmt: skip

    def flat(self) -> tuple[list[Any], int]:
        """The tensors as a torch operator takes them, and the position of the first query."""
        offset = self.q_offset
        starts, start = (offset, 0) if isinstance(offset, Tensor) else (None, offset)
        first, last = (None, None) if self.documents is None else self.documents
        return [*(getattr(self, name) for name in TENSORS), starts, first, last], start


def needs_gradient(values: Sequence[Any]) -> bool:
    """Whether autograd records a call with these values."""
    tensors = (t for t in values if isinstance(t, Tensor))
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


FIELDS = Call._fields  # dynamo of torch 2.8 traces neither `self._fields` nor `_replace`
DIFFERENTIABLE = FIELDS[: FIELDS.index("block_indices")]
TENSORS = FIELDS[: FIELDS.index("lengths")]  # of a call that is no decode step


def unflatten(inputs: Sequence[Any], start: int, seq_len: int | None = None) -> Call:
    """The call of the values of `Call.flat`."""
    *tensors, starts, first, last = inputs
    documents = None if first is None else Documents(first.contiguous(), last.contiguous())
    offset = start if starts is None else starts
    return Call(  # type: ignore[misc]
        *tensors, documents=documents, q_offset=offset, seq_len=seq_len
    )
