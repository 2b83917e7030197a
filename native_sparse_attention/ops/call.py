"""The arguments of one call of the whole layer, passed from its checks to a backend."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..varlen import Documents


class Call(NamedTuple):
    """Tensors [B T H D] and their positions, with the names of `native_sparse_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    # None without a branch that reads them; after the checks each branch has its own
    ck: Any = None
    cv: Any = None
    branch_gates: Tensor | None = None
    cq: Tensor | None = None
    mem_k: Tensor | None = None
    mem_v: Tensor | None = None
    window_k: Tensor | None = None
    window_v: Tensor | None = None
    sinks: Tensor | None = None
    q_offset: Any = None  # int or Tensor [B]; before the checks None for the last T tokens
    leader_indices: Tensor | None = None
    documents: Documents | None = None

    def but(self, **values: Any) -> Call:
        """The same call with other values."""
        return Call(**{name: getattr(self, name) for name in FIELDS} | values)

    def branch_sinks(self, branches: tuple[str, ...]) -> dict[str, Tensor]:
        """The sinks [H] of each branch, if there are any."""
        return {} if self.sinks is None else dict(zip(branches, self.sinks, strict=True))

    def window_keys(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the window branch."""
        k = self.k if self.window_k is None else self.window_k
        return k, self.v if self.window_v is None else self.window_v

    def tensors(self) -> dict[str, Any]:
        """The differentiable tensors by name."""
        names = (
            "q", "k", "v", "ck", "cv", "branch_gates", "cq", "mem_k", "mem_v", "window_k",
            "window_v", "sinks",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}


FIELDS = Call._fields  # dynamo of torch 2.8 traces neither `self._fields` nor `_replace`


class DecodeInputs(NamedTuple):
    """The tensors of a decode step, with the names of `decode_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor
    ck: Tensor | None = None
    cv: Tensor | None = None
    branch_gates: Tensor | None = None
    counts: Tensor | None = None
    page_table: Tensor | None = None
    sinks: Tensor | None = None
    cq: Tensor | None = None
    mem_k: Tensor | None = None
    mem_v: Tensor | None = None
    window_k: Tensor | None = None
    window_v: Tensor | None = None
    counters: Any = None
    ranking: Tensor | None = None
