"""`collect`: record what the sparse layers of a model read, while it runs.

b  sequences    m  sampled queries    h  query heads    r  heads that rank
n  ranked slots of a query            x  its slots: initial, ranked and local blocks
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import SparseAttention
from ..checks import INDEX_DTYPES, as_int, check_int, check_model, describe
from ..config import AttentionConfig, NSAConfig
from ..ops.call import Call
from .measures import Queries, measure, share_in_common

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
    dense: Tensor
    kinds: tuple[str, ...]
    documents: Tensor | None = None
    blocks: Tensor | None = None
    scores: Tensor | None = None
    block_mass: Tensor | None = None
    mass: Tensor | None = None
    window_mass: Tensor | None = None
    gates: Tensor | None = None
    agreement: Tensor | None = None

    def of_kind(self, kind: str) -> Tensor | None:
        """The slots of `blocks` of one kind: "initial", "ranked" or "local"."""
        if kind not in ("initial", "ranked", "local"):
            raise ValueError(f"kind must be 'initial', 'ranked' or 'local', got {describe(kind)}")
        if self.blocks is None:
            return None
        first = self.kinds.index(kind) if kind in self.kinds else 0
        return self.blocks[..., first : first + self.kinds.count(kind)]

    initial = property(lambda self: self.of_kind("initial"))
    local = property(lambda self: self.of_kind("local"))

    @property
    def ranked(self) -> Tensor | None:
        """Block indices [b, m, r, n] as `select_blocks` returns them, of the m queries."""
        return self.of_kind("ranked")


class Collection(dict[str, list[Reading]]):
    """Readings by layer name, in the order of the model: one for each call of the layer."""

    def clear(self) -> None:
        """Forget what was recorded."""
        for readings in self.values():
            readings.clear()

    def forward(self, index: int = -1) -> list[Reading]:
        """The reading of each layer in its call `index`; the last call by default.

        Raises:
            ValueError: a layer has no such call.
        """
        for name, readings in self.items():
            if not -len(readings) <= index < len(readings):
                raise ValueError(
                    f"index must be a call that every layer has had: {name!r} has had "
                    f"{len(readings)}, got {index}"
                )
        return [readings[index] for readings in self.values()]

    def agreement(self, index: int = -1) -> Tensor:
        """Agreement between layers [layers, layers] in call `index`: the share of the blocks that
        a query ranks in layer i, in any head, and in layer j too, as a mean over queries that
        rank in both. NaN where there are none or block sizes differ.

        Raises:
            ValueError: a layer has no such call, or layers ran over different rows.
        """
        readings = self.forward(index)
        positions = readings[0].positions
        if any(not torch.equal(reading.positions, positions) for reading in readings):
            raise ValueError("index must be a call in which all layers ran over the same rows")
        agreement = torch.full((len(readings), len(readings)), float("nan"))
        for i, reading in enumerate(readings):
            if reading.ranked is None:
                continue
            # each block once: -1 in place of a repeat
            ordered = reading.ranked.flatten(2).sort(dim=-1).values
            ordered[..., 1:][ordered[..., 1:] == ordered[..., :-1]] = -1
            size = reading.config.selection_block_size
            for j, compared in enumerate(readings):
                if compared.ranked is not None and compared.config.selection_block_size == size:
                    shares = share_in_common(ordered, compared.ranked.flatten(2))
                    agreement[i, j] = shares.nanmean()
        return agreement


def sample(queries: int | Tensor | None, seed: int, length: int) -> Tensor:
    """Positions [m] of queries in rows of `length` tokens, in order: the same for equal lengths."""
    if not isinstance(queries, Tensor):
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randperm(length, generator=generator)[:queries]
        return torch.arange(length) if queries is None else drawn.sort().values
    if (last := int(queries.max())) >= length:
        raise ValueError(
            f"queries must be positions below {length}, the number of tokens, got {last}"
        )
    return queries


def sparse_layers(model: Any, layers: Any) -> dict[str, SparseAttention]:
    """The sparse layers of a model by name: all, or those given by name or number."""
    check_model(model)
    sparse = {n: m for n, m in model.named_modules() if isinstance(m, SparseAttention)}
    if not sparse:
        raise ValueError(
            f"model must have SparseAttention layers, got {type(model).__name__} without one: a "
            "decoder of transformers gets them by convert(model), not by use_sparse_attention"
        )
    if layers is None:
        return sparse
    if isinstance(layers, (str, bytes)) or not isinstance(layers, Sequence) or not layers:
        raise ValueError(f"layers must be a list of names or numbers, got {describe(layers)}")
    names = list(sparse)
    picked = set()
    for layer in layers:
        number = as_int(layer)
        name = names[number] if number is not None and 0 <= number < len(names) else layer
        if name not in names:
            raise ValueError(
                f"layers must name layers of the model ({', '.join(names[:4])} ...) or be numbers "
                f"below {len(names)}, got {describe(layer)}"
            )
        picked.add(name)
    return {name: layer for name, layer in sparse.items() if name in picked}


@torch.no_grad()
def record(
    call: Call,
    config: AttentionConfig,
    indices: Tensor | None,
    *,
    name: str,
    layer: SparseAttention,
    readings: list[Reading],
    queries: int | Tensor | None,
    seed: int,
) -> None:
    """Record a call of a layer, which has block indices [b i r n]."""
    if torch._C._current_graph_task_id() != -1:
        return  # a backward pass, where checkpointing calls layers once more
    b, length = call.q.shape[:2]
    sampled = Queries.select(call, sample(queries, seed, length))
    exist = sampled.exist.expand(b, -1)
    # an index has its own scale
    rank_scale = None if layer.to_index is not None else config.scale
    fields = measure(call, config, indices, sampled, rank_scale)
    fields["positions"] = (sampled.at - sampled.first).masked_fill(~exist, -1)
    if call.documents is not None:
        rows = torch.arange(length, device=exist.device)
        starts = (call.documents.first == rows) & (call.documents.last > rows)
        documents = (starts.cumsum(dim=1) - 1)[:, sampled.at]
        fields["documents"] = documents.masked_fill(~exist, -1)
    if call.branch_gates is not None:
        gates = call.branch_gates[:, sampled.at].float()
        fields["gates"] = gates.masked_fill(~exist[..., None, None], float("nan"))
    fields["dense"] = fields["dense"].expand(b, -1)
    for field, value in fields.items():
        if isinstance(value, Tensor):
            fields[field] = value.to("cpu", copy=True).contiguous()
    readings.append(Reading(layer=name, config=layer.config, length=length, **fields))


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
    O(m T) in each layer for m queries of T tokens. A compiled model runs eagerly while the context
    is open, and rounds as an eager one does. Activation checkpointing's second run of a layer is
    not recorded. Closed, it costs nothing.

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
        NotImplementedError: while open, a call with a cache (decoding).
    """
    seed = check_int("seed", seed, 0, 2**63)
    if isinstance(queries, Tensor) and queries.ndim:
        is_right = queries.dtype in INDEX_DTYPES and queries.ndim == 1 and queries.numel() > 0
        if not is_right or queries.min() < 0:
            raise ValueError(
                "queries must be a number, positions [m] of at least 0 or None for all, "
                f"got {describe(queries)}"
            )
        queries = queries.detach().cpu().long()
    elif queries is not None:
        queries = check_int("queries", queries, 1)
    layer_by_name = sparse_layers(model, layers)
    for name, layer in layer_by_name.items():
        if layer.observer is not None:
            raise ValueError(f"model has a layer that another collect records: {name!r}")
    collection = Collection({name: [] for name in layer_by_name})
    # a compiled graph calls no observer
    is_compiler_loaded = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if is_compiler_loaded else nullcontext()
    try:
        for name, layer in layer_by_name.items():
            options: dict[str, Any] = dict(name=name, layer=layer, queries=queries, seed=seed)
            layer.observer = partial(record, readings=collection[name], **options)
        with eager:
            yield collection
    finally:
        for layer in layer_by_name.values():
            layer.__dict__.pop("observer", None)
