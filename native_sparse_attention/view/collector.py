"""`collect`: record what the sparse layers of a model read, while it runs.

b  sequences    m  sampled queries    h  query heads    r  heads that rank
n  ranked slots of a query            x  its slots: initial, ranked and local blocks
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import SparseAttention
from ..checks.networks import check_model
from ..checks.scalars import as_int, check_int, shown
from ..compat import transforms
from ..config import AttentionConfig, NSAConfig
from ..ops.call import Call
from .measures import in_common, measure, queries_of

# how many queries of a sequence `collect` samples, if not told
QUERIES = 64


@dataclass(frozen=True)
class Reading:
    """What m queries of each sequence read in one call of one layer; tensors on the CPU.

    Query head h reads by the ranking of head `h * r // heads`. A **dense** query attends to all
    keys: its slots are empty and its mass is 1. At a position without a token (padding) slots are
    empty and numbers NaN.

    Attributes:
        layer: name of the layer in the model. config: its settings. length: tokens of a row.
        positions: [b, m], of the queries in their sequence; -1 without a token.
        documents: [b, m], which packed document of its row a query belongs to, 0 in a row with
            padding; None without both. Positions and blocks count from its first token.
        dense: [b, m], whether a query attends to all keys, by `dense` or `dense_length`.
        blocks: [b, m, r, x] int32, the blocks that a query reads, each once; -1 is an empty slot.
        kinds: of the x slots, "initial", "ranked" (best first) or "local".
        scores: [b, m, r, n], the scores of the ranked blocks, of the token whose ranking the query
            shares; NaN in an empty slot. None if nothing is ranked.
        block_mass: [b, m, h, x], the probability of each block in full attention: the softmax in
            float32 over all keys that the query may see, `sum_(j in c) softmax_j(q . k_j scale)`,
            with queries and keys of the selected branch, scale and soft cap, without sinks.
        mass: [b, m, h], its sum over the slots: the share of full attention that is read.
        window_mass: [b, m, h], the probability of the sliding window, by its own keys. None without
            this branch.
        gates: [b, m, h, branches], in the order of `config.branches`. None for a branch alone.
        agreement: [b, m, r], the share of the ranked blocks that the query before ranks too; NaN
            where one of them ranks none.

    Without the selected branch `blocks`, `scores`, `block_mass`, `mass` and `agreement` are None.
    """

    layer: str
    config: NSAConfig
    length: int
    positions: Tensor
    documents: Tensor | None
    dense: Tensor
    blocks: Tensor | None
    kinds: tuple[str, ...]
    scores: Tensor | None
    block_mass: Tensor | None
    mass: Tensor | None
    window_mass: Tensor | None
    gates: Tensor | None
    agreement: Tensor | None

    def of_kind(self, kind: str) -> Tensor | None:
        """The slots of `blocks` of one kind: "initial", "ranked" or "local"."""
        if kind not in ("initial", "ranked", "local"):
            raise ValueError(f"kind must be 'initial', 'ranked' or 'local', got {shown(kind)}")
        if self.blocks is None:
            return None
        first = self.kinds.index(kind) if kind in self.kinds else 0
        return self.blocks[..., first : first + self.kinds.count(kind)]

    @property
    def initial(self) -> Tensor | None:
        return self.of_kind("initial")

    @property
    def ranked(self) -> Tensor | None:
        """Block indices [b, m, r, n] as `select_blocks` returns them, of the m queries."""
        return self.of_kind("ranked")

    @property
    def local(self) -> Tensor | None:
        return self.of_kind("local")


class Collection(Mapping[str, list[Reading]]):
    """Readings by layer name, in the order of the model: one for each call of the layer."""

    def __init__(self, names: Sequence[str]):
        self.readings: dict[str, list[Reading]] = {name: [] for name in names}

    def __getitem__(self, name: str) -> list[Reading]:
        return self.readings[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.readings)

    def __len__(self) -> int:
        return len(self.readings)

    def clear(self) -> None:
        """Forget what was recorded."""
        for held in self.readings.values():
            held.clear()

    def forward(self, index: int = -1) -> list[Reading]:
        """The reading of each layer in its call `index`; the last call by default.

        Raises:
            ValueError: a layer has no such call.
        """
        for name, held in self.items():
            if not -len(held) <= index < len(held):
                raise ValueError(
                    f"index must be a call that every layer has had: {name!r} has had "
                    f"{len(held)}, got {index}"
                )
        return [held[index] for held in self.values()]

    def agreement(self, index: int = -1) -> Tensor:
        """Agreement between layers [layers, layers] in call `index`: the share of the blocks that
        a query ranks in layer i, in any head, and in layer j too, as a mean over queries that
        rank in both. NaN where there are none or block sizes differ.

        Raises:
            ValueError: a layer has no such call, or layers ran over different rows.
        """
        found = self.forward(index)
        first = found[0].positions
        if any(not torch.equal(reading.positions, first) for reading in found):
            raise ValueError("index must be a call in which all layers ran over the same rows")
        out = torch.full((len(found), len(found)), float("nan"))
        sets = [None if one.ranked is None else one.ranked.flatten(2) for one in found]
        for i, these in enumerate(sets):
            for j, others in enumerate(sets):
                sizes = (found[at].config.selection_block_size for at in (i, j))
                if these is not None and others is not None and len(set(sizes)) == 1:
                    out[i, j] = in_common(without_repeats(these), others).nanmean()
        return out


def without_repeats(chosen: Tensor) -> Tensor:
    """Blocks [.. n], each once: -1 in place of a repeat."""
    ordered = chosen.sort(dim=-1).values
    repeat = torch.zeros_like(ordered, dtype=torch.bool)
    repeat[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    return ordered.masked_fill(repeat, -1)


def check_queries(queries: Any) -> int | Tensor | None:
    if queries is None:
        return None
    if isinstance(queries, Tensor) and queries.ndim:
        whole = queries.ndim == 1 and not (queries.is_floating_point() or queries.is_complex())
        if not whole or queries.dtype == torch.bool or not queries.numel() or queries.min() < 0:
            raise ValueError(
                "queries must be a number, positions [m] of at least 0 or None for all, "
                f"got {shown(queries)}"
            )
        return queries.detach().cpu().long()
    return check_int("queries", queries, 1)


def sampled(queries: int | Tensor | None, seed: int, length: int) -> Tensor:
    """Positions [m] of queries in rows of `length` tokens, in order: the same for equal lengths."""
    if queries is None:
        return torch.arange(length)
    if isinstance(queries, Tensor):
        if int(queries.max()) >= length:
            raise ValueError(
                f"queries must be positions below {length}, the number of tokens, "
                f"got {int(queries.max())}"
            )
        return queries
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(length, generator=generator)[:queries].sort().values


def sparse_layers(model: Any, layers: Any) -> dict[str, SparseAttention]:
    """The sparse layers of a model by name: all, or those given by name or number."""
    check_model(model)
    found = {n: m for n, m in model.named_modules() if isinstance(m, SparseAttention)}
    if not found:
        raise ValueError(
            f"model must have SparseAttention layers, got {type(model).__name__} without one: a "
            "decoder of transformers gets them by convert(model), not by use_sparse_attention"
        )
    if layers is None:
        return found
    if isinstance(layers, (str, bytes)) or not isinstance(layers, Sequence) or not layers:
        raise ValueError(f"layers must be a list of names or numbers, got {shown(layers)}")
    names, picked = list(found), {}
    for layer in layers:
        number = as_int(layer)
        if number is not None and 0 <= number < len(names):
            layer = names[number]
        if not isinstance(layer, str) or layer not in found:
            raise ValueError(
                f"layers must name layers of the model ({', '.join(names[:4])} ...) or be numbers "
                f"below {len(names)}, got {shown(layer)}"
            )
        picked[layer] = found[layer]
    return {name: picked[name] for name in names if name in picked}


def in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread, where checkpointing calls layers once
    more."""
    return torch._C._current_graph_task_id() != -1


def on_host(t: Tensor | None, dtype: torch.dtype = torch.float32) -> Any:
    return None if t is None else t.to("cpu", dtype, copy=True)


@dataclass(frozen=True)
class Observer:
    """Records each call of a layer. A copy of the layer, or a file of it, has none."""

    name: str
    layer: SparseAttention
    into: list[Reading]
    queries: int | Tensor | None
    seed: int

    def __reduce__(self) -> Any:
        return type(None), ()

    @torch.no_grad()
    def __call__(self, call: Call, config: AttentionConfig, indices: Tensor | None) -> None:
        if in_backward():
            return
        if transforms.active():
            raise NotImplementedError("collect cannot see calls under torch.func or forward AD")
        b, length = call.q.shape[:2]
        queries = queries_of(call, sampled(self.queries, self.seed, length))
        at, exist = queries.at, queries.exist.expand(b, -1)
        # an index has its own scale
        scale = None if self.layer.to_index is not None else config.scale
        found = measure(call, config, indices, queries, scale)
        documents, chosen, gates = None, found.blocks, call.branch_gates
        if call.documents is not None:
            rows = torch.arange(length, device=at.device)
            begins = (call.documents.first == rows) & (call.documents.last > rows)
            documents = (begins.cumsum(dim=1) - 1)[:, at].masked_fill(~exist, -1)
            if chosen is not None:
                low = (queries.first // config.selection_block_size)[..., None, None]
                chosen = torch.where(chosen < 0, chosen, chosen - low)
        if gates is not None:
            gates = gates[:, at].masked_fill(~exist[..., None, None], float("nan"))
        positions = (at - queries.first).masked_fill(~exist, -1)
        self.into.append(
            Reading(
                layer=self.name,
                config=self.layer.config,
                length=length,
                positions=on_host(positions, torch.int64),
                documents=on_host(documents, torch.int64),
                dense=on_host(found.dense & exist, torch.bool),
                blocks=on_host(chosen, torch.int32),
                kinds=found.kinds,
                scores=on_host(found.scores),
                block_mass=on_host(found.block_mass),
                mass=on_host(found.mass),
                window_mass=on_host(found.window_mass),
                gates=on_host(gates),
                agreement=on_host(found.agreement),
            )
        )


def uncompiled() -> AbstractContextManager[Any]:
    """Run what torch.compile has compiled eagerly: a compiled graph calls no observer."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


@contextmanager
def collect(
    model: nn.Module,
    queries: int | Tensor | None = QUERIES,
    *,
    layers: Sequence[str | int] | None = None,
    seed: int = 0,
) -> Iterator[Collection]:
    """Record what the sparse layers of a model read, while the context is open.

    Each call of a `SparseAttention` in the model adds a `Reading` to `collection[name]`: blocks
    (initial, ranked, local), scores, gates, attention mass, and agreement with the query before.
    Outputs and gradients stay the same, bit by bit, in training and in eval mode. The cost is
    O(m T) in each layer for m queries of T tokens, and the layer leaves its recorded launches. A
    compiled model runs eagerly while the context is open, and rounds as an eager one does.
    Activation checkpointing's second run of a layer is not recorded. Closed, it costs nothing.

    ```python
    with collect(model, queries=64) as seen:
        model(ids)
    seen["layers.0.0"][0].mass.mean(dim=(0, 1))  # share of full attention read, by head
    seen.agreement()  # between layers
    ```

    Args:
        model: any module with `SparseAttention` layers inside, at any depth.
        queries: how many queries of each row to record, drawn by `seed`: equal lengths give equal
            positions, in all layers and calls. Or positions [m] in a row, or None for all. With
            packed documents or padding the rows are those that layers compute: every document
            begins at a block, without the padding before it, and queries between two hold no token.
        layers: names (of `named_modules`) or numbers of the layers to record; all by default.
        seed: of the drawn positions. No other random number is drawn.

    Raises:
        ValueError: an argument out of range, a model without sparse layers, a layer that another
            open `collect` records, or a position that a row does not have.
        NotImplementedError: while open, a call with a cache (decoding), or under torch.func.
    """
    queries, seed = check_queries(queries), check_int("seed", seed, 0, 2**63)
    found = sparse_layers(model, layers)
    if taken := [name for name, layer in found.items() if layer.observer is not None]:
        raise ValueError(f"model has a layer that another collect records: {taken[0]!r}")
    collection = Collection(list(found))
    try:
        for name, layer in found.items():
            into = collection.readings[name]
            layer.observer = Observer(name, layer, into, queries, seed)
        with uncompiled():
            yield collection
    finally:
        for layer in found.values():
            layer.__dict__.pop("observer", None)
