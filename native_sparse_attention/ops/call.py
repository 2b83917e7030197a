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
    ck: Tensor
    cv: Tensor
    branch_gates: Tensor
    cq: Tensor | None = None
    mem_k: Tensor | None = None
    mem_v: Tensor | None = None
    window_k: Tensor | None = None
    window_v: Tensor | None = None
    sinks: Tensor | None = None
    q_offset: Any = None  # int or Tensor [B]; before the checks None for the last T tokens
    leader_indices: Tensor | None = None
    documents: Documents | None = None

    def at(self, q_offset: int | Tensor) -> Call:
        """The same call with another `q_offset`."""
        values = {name: getattr(self, name) for name in FIELDS}
        return Call(**values | {"q_offset": q_offset})

    def tensors(self) -> dict[str, Any]:
        """The differentiable tensors by name."""
        names = (
            "q", "k", "v", "ck", "cv", "branch_gates", "cq", "mem_k", "mem_v", "window_k",
            "window_v", "sinks",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}


FIELDS = Call._fields  # dynamo of torch 2.8 traces neither `self._fields` nor `_replace`
