"""How torch operators are made here: tensors and numbers, then the fields of `AttentionConfig`.

torch hands an operator a flat tuple. `Arguments` names what lies in it, so that nobody counts
places, and its schema has the fields of the settings. Nothing here imports triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...block_sizes import BlockSizes, flat
from ...compat import transforms
from ...config import AttentionConfig
from ...varlen import Documents

# types of fields, as annotated, and of a schema
TYPES = {
    "int": "SymInt", "bool": "bool", "str": "str", "float | None": "float?",
    "BlockSizes | None": "SymInt[]?",
}  # fmt: skip
CONFIG = {field.name: TYPES[str(field.type)] for field in fields(AttentionConfig)}
# where documents lie, and where queries stand: at `start`, or at `starts` [B]
LAYOUT = ("Tensor? starts", "Tensor? doc_first", "Tensor? doc_last")


class Arguments:
    """What an operator takes: `declared` as in a schema ("Tensor? cq", "SymInt start"), then the
    settings."""

    def __init__(self, *declared: str) -> None:
        self.declared = declared
        self.names = tuple(one.split()[1] for one in declared)

    def schema(self, returns: str) -> str:
        settings = (f"{kind} {name}" for name, kind in CONFIG.items())
        return f"({', '.join((*self.declared, *settings))}) -> {returns}"

    def flat(self, config: AttentionConfig, **values: Any) -> list[Any]:
        """The values in order; one that is not given is None."""
        settings = {name: getattr(config, name) for name in CONFIG}
        if isinstance(config.block_sizes, BlockSizes):
            settings["block_sizes"] = flat(config.block_sizes)
        return [*(values.get(name) for name in self.names), *settings.values()]

    def named(self, values: tuple[Any, ...]) -> SimpleNamespace:
        """The values by name, and the settings as `config`, in which tiles are a list."""
        found = dict(zip((*self.names, *CONFIG), values, strict=True))
        config = AttentionConfig.unchecked(**{name: found.pop(name) for name in CONFIG})
        return SimpleNamespace(**found, config=config)

    def gradients(self, found: dict[str, Tensor | None]) -> tuple[Tensor | None, ...]:
        """A gradient for each argument, None for those that have none."""
        return (*(found.get(name) for name in self.names), *(None,) * len(CONFIG))


def operator(
    name: str,
    arguments: Arguments,
    returns: str,
    fake: Callable[[SimpleNamespace], Any],
    mutates: tuple[str, ...] = (),
) -> Callable[[Callable[[SimpleNamespace], Any]], Any]:
    """Make a function of named arguments a torch operator, which runs with the GPU of its first
    tensor the current one, as Triton launches there, in tiles of `block_sizes`, and not under
    forward-mode AD. `fake` gives the results without their values."""

    def make(run: Callable[[SimpleNamespace], Any]) -> Any:
        def implementation(*values: Any) -> Any:
            from ...kernels.common import overrides

            at = arguments.named(values)
            with torch.cuda.device_of(values[0]), overrides.sized(at.config.block_sizes):
                return run(at)

        implementation.__name__ = run.__name__
        made = torch.library.custom_op(
            f"native_sparse_attention::{name}", transforms.on_values(implementation),
            mutates_args=mutates, schema=arguments.schema(returns),
        )  # fmt: skip
        made.register_fake(lambda *values: fake(arguments.named(values)))
        return made

    return make


def documents_of(at: SimpleNamespace) -> Documents | None:
    """The documents of an operator's arguments."""
    if at.doc_first is None or at.doc_last is None:
        return None
    return Documents(at.doc_first.contiguous(), at.doc_last.contiguous())


def layout(q_offset: int | Tensor, documents: Documents | None) -> dict[str, Any]:
    """Offset and documents as an operator takes them: `LAYOUT`, and `start`."""
    starts, start = (q_offset, 0) if isinstance(q_offset, Tensor) else (None, q_offset)
    first, last = (None, None) if documents is None else (documents.first, documents.last)
    return dict(starts=starts, start=start, doc_first=first, doc_last=last)


def rows(*tensors: Tensor) -> Any:
    """Kernels take any strides but the last."""
    return [t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in tensors]


def whole(t: Tensor) -> Tensor:
    """Contiguous, and at an address that the tensor memory accelerator takes: a gradient may be
    part of another tensor."""
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


def empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def empty_block_indices(q: Tensor, ck: Tensor, config: AttentionConfig) -> Tensor:
    """[B T R n], unwritten."""
    ranks = ck.shape[2] if config.query_heads_share_selected_kv else q.shape[2]
    return q.new_empty(*q.shape[:2], ranks, config.num_selected_blocks, dtype=torch.int32)


def prefix(mem_k: Tensor | None, mem_v: Tensor | None, batch: int) -> tuple[Tensor, Tensor] | None:
    """Memory [K m D] as the keys and values [B m K D] before all others; None without any."""
    if mem_k is None or mem_v is None or mem_k.shape[1] == 0:
        return None
    k, v = (m.transpose(0, 1).expand(batch, -1, -1, -1) for m in rows(mem_k, mem_v))
    return k, v


def memory_grads(dk: Tensor, dv: Tensor) -> list[Tensor]:
    """Gradients [K m D] of memory from those of its rows [B m K D]."""
    return [d.sum(0).transpose(0, 1).contiguous() for d in (dk, dv)]


def of_heads(sinks: Tensor | None) -> Any:
    """Sinks as the kernels read them."""
    return None if sinks is None else sinks.to(torch.float32).contiguous()


def sink_grads(sinks: Tensor, lse: Tensor, delta: Tensor, gates: Tensor | None = None) -> Tensor:
    """Gradient of the sinks [H] of a branch, whose value is 0: `-sum p delta` over the queries,
    times the gate of its output where it has one. lse, delta and gates [B T H]."""
    share = torch.exp(sinks.float() - lse) * delta
    share = share if gates is None else share * gates.float()
    return -share.sum((0, 1)).to(sinks.dtype)
