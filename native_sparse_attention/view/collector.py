"""`collect`: record what the sparse layers of a model read, while it runs.

b     sequences          h  query heads    r  heads that rank: k, or h without shared rankings
m, i  sampled queries    k  KV heads       n  ranked slots of a query
j     keys               c  blocks         x  its slots: initial, ranked and local blocks
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from .. import blocks
from ..attention import SparseAttention, find_sparse_layers
from ..checks import as_int, check_int, check_values, describe
from ..compat import no_autocast
from ..config import AttentionConfig, NSAConfig
from ..ops import branches, dispatch
from ..ops.call import Call
from ..ops.reference import block_scores, capped, scores, slice_documents, upcast
from ..ranking import sampled

# scores of queries and keys that exist at one time
MOST_SCORES = 2**24
NAN = float("nan")


@dataclass(frozen=True)
class Reading:
    """What m queries of each sequence read in one call of one layer; tensors on the CPU.

    Query head h reads by the ranking of head `h * r // heads`. A **dense** query attends to all
    keys: its slots are empty and its mass is 1. Without a token (padding) numbers are NaN.

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
        window_mass: [b, m, h], the probability of the sliding window, by its own keys.
        gates: [b, m, h, branches], in the order of `config.branches`. None for a branch alone.
        agreement: [b, m, r], the share of the ranked blocks that the query before ranks too; NaN
            where one of them ranks none.

    None without their branch: `window_mass`; `blocks`, `scores`, `block_mass`, `mass`, `agreement`.
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

    def slots(self, kind: str) -> Tensor | None:
        """The slots of `blocks` of one kind: "initial", "ranked" or "local"."""
        if self.blocks is None:
            return None
        return self.blocks[..., [slot for slot, name in enumerate(self.kinds) if name == kind]]

    initial = property(lambda self: self.slots("initial"))
    # block indices [b, m, r, n] as `select_blocks` returns them, of the m queries
    ranked = property(lambda self: self.slots("ranked"))
    local = property(lambda self: self.slots("local"))


class Collection(dict[str, list[Reading]]):
    """Readings by layer name, in the order of the model: one for each call of the layer."""

    def clear(self) -> None:
        """Forget what was recorded."""
        for readings in self.values():
            readings.clear()

    def forward(self) -> list[Reading]:
        """The reading of each layer in its last call."""
        if idle := [name for name, readings in self.items() if not readings]:
            raise ValueError(f"every layer must have had a call, got none of {idle[0]!r}")
        return [readings[-1] for readings in self.values()]

    def agreement(self) -> Tensor:
        """Agreement between layers [layers, layers] in their last call: the share of the blocks
        that a query ranks in layer i, in any head, and in layer j too, as a mean over queries that
        rank in both. NaN where there are none or block sizes differ.

        Raises:
            ValueError: a layer has had no call, or layers ran over different rows.
        """
        readings = self.forward()
        positions = readings[0].positions
        if any(not torch.equal(reading.positions, positions) for reading in readings):
            raise ValueError("all layers must have run over the same rows in their last call")
        agreement = torch.full((len(readings), len(readings)), NAN)
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


def sparse_layers(model: Any, layers: Any) -> dict[str, SparseAttention]:
    """The sparse layers of a model by name: all, or those given by name or number."""
    sparse = find_sparse_layers(model, " (hf.convert gives a decoder of transformers such)")
    if layers is None:
        return sparse
    names = [*sparse, *range(len(sparse))]
    is_list = isinstance(layers, Sequence) and not isinstance(layers, str) and len(layers) > 0
    if is_list:  # neither True nor 1.0 is a number of a layer
        layers = [layer if isinstance(layer, str) else as_int(layer) for layer in layers]
    if not is_list or any(layer not in names for layer in layers):
        known = f"layers ({', '.join([*sparse][:4])} ...) or of numbers below {len(sparse)}"
        raise ValueError(f"layers must be a list of names of {known}, got {describe(layers)}")
    numbered = enumerate(sparse.items())
    return {name: layer for i, (name, layer) in numbered if name in layers or i in layers}


def attention_probs(q: Tensor, k: Tensor, visible: Tensor, config: AttentionConfig) -> Tensor:
    """Full attention [b m h j] of queries [b m h d] and keys [b j k d] that they see [b|1 m j], in
    fp32. Sinks take no part. NaN for a query that sees no key."""
    q, k = upcast(q, k)
    logits = capped(scores(q, k, config.scale), config.soft_cap)
    probs = logits.masked_fill(~visible[:, None, None], float("-inf")).softmax(dim=-1)
    return rearrange(probs, "b k g m j -> b m (k g) j")


def ranking_scores(call: Call, config: AttentionConfig, i: Tensor, ranked: Tensor) -> Tensor:
    """The scores [b m r n] by which blocks `ranked` were chosen; NaN in an empty slot."""
    i = blocks.leader(i, config.selection_stride)
    part = call.ranking_call(config)
    if config.num_selected_groups:
        part, config = part.but(ck=part.k), config.stages[1]
    queries = part.but(q=part.q[:, i], documents=slice_documents(part.documents, i))
    values = rearrange(block_scores(queries, i[None], config)[0], "b r m c -> b m r c")
    return values.gather(-1, ranked.clamp(min=0).long()).masked_fill(ranked < 0, NAN)


def share_in_common(chosen: Tensor, compared: Tensor) -> Tensor:
    """The share of blocks [.. n] that are among those `compared` [.. x] too; NaN where one of them
    has no block. -1 is no block."""
    real = chosen >= 0
    common = ((chosen[..., :, None] == compared[..., None, :]).any(dim=-1) & real).sum(dim=-1)
    have_blocks = real.any(dim=-1) & (compared >= 0).any(dim=-1)
    return torch.where(have_blocks, common / real.sum(dim=-1), NAN)


def read(
    call: Call,
    config: AttentionConfig,
    ranked: Tensor | None,
    kinds: tuple[str, ...],
    scale: float | None,
    i: Tensor,
) -> dict[str, Tensor]:
    """Fields of a `Reading` for queries in rows i [m], from block indices [b i r n] of all queries,
    which were ranked by logits with `scale`."""
    length, s, q = call.q.shape[1], config.selection_block_size, call.q[:, i]
    j = torch.arange(length, device=i.device)
    # the first row of a query's document and one past the last, [b m]
    first, last = i.new_zeros(q.shape[:2]), i.new_full(q.shape[:2], length)
    if call.documents is not None:
        first, last = (bound[:, i].long() for bound in call.documents)
    exist = (i >= first) & (i < last)
    visible = (j >= first[..., None]) & (j < last[..., None]) & exist[..., None]
    dense = exist & (last - first <= config.dense_length)
    if config.causal:
        visible &= j <= i[:, None]
        dense = exist & (i - first < config.dense_length)
    fields = {"dense": dense, "positions": (i - first).masked_fill(~exist, -1)}
    if call.documents is not None:
        starts = (call.documents.first == j) & (call.documents.last > j)
        fields["documents"] = (starts.cumsum(dim=1) - 1)[:, i].masked_fill(~exist, -1)
    if call.branch_gates is not None:
        gates = call.branch_gates[:, i].float()
        fields["gates"] = gates.masked_fill(~exist[..., None, None], NAN)

    probs = None
    if ranked is not None:
        hidden = (dense | ~exist)[..., None, None]
        best = ranked[:, i].masked_fill(hidden, -1)
        has_previous = i > first
        if config.causal:  # a dense query has no chosen blocks
            has_previous &= i - 1 - first >= config.dense_length
        agreement = share_in_common(best, ranked[:, (i - 1).clamp(min=0)])
        fields["agreement"] = agreement.masked_fill(~has_previous[..., None], NAN)
        # each block once: the best ones lie between the initial and the local ones
        low, block, end = first // s, i // s, blocks.ceil_div(last, s)
        if config.causal:
            end = end.minimum(block + 1)
        initial = low[..., None] + torch.arange(kinds.count("initial"), device=i.device)
        initial = torch.where(initial < end[..., None], initial, -1)
        local = block[:, None] - torch.arange(kinds.count("local"), device=i.device).flip(0)
        local = torch.where(local >= low[..., None] + config.num_initial_blocks, local, -1)
        initial, local = (t[:, :, None].expand(*best.shape[:3], -1) for t in (initial, local))
        chosen = torch.cat((initial, best, local), dim=-1).masked_fill(hidden, -1)

        probs = attention_probs(q, call.k, visible, config)
        mass = F.pad(probs, (0, -length % s)).unflatten(-1, (-1, s)).sum(dim=-1)
        slots = chosen.repeat_interleave(q.shape[2] // chosen.shape[2], dim=2)
        mass = mass.gather(-1, slots.clamp(min=0).long())
        fields["block_mass"] = mass.masked_fill((slots < 0) & ~mass.isnan(), 0.0)
        fields["mass"] = fields["block_mass"].sum(dim=-1).masked_fill(dense[..., None], 1.0)
        if best.shape[-1] and config.ranks:
            fields["scores"] = ranking_scores(call, config.but(scale=scale), i, best)
        # blocks count from the document's first token
        chosen = torch.where(chosen < 0, -1, chosen - low[..., None, None])
        fields["blocks"] = chosen.to(torch.int32)
    if "window" in config.branches:
        window_k = call.branch("window", config.branches).k
        if probs is None or window_k is not call.k:
            probs = attention_probs(q, window_k, visible, config)
        is_near = (j - i[:, None]).abs() <= config.sliding_window_size
        fields["window_mass"] = probs.masked_fill(~is_near[None, :, None], 0.0).sum(dim=-1)
    return fields


@torch.no_grad()
def record(
    name: str,
    layer: SparseAttention,
    readings: list[Reading],
    queries: int | Tensor | None,
    seed: int,
    call: Call,
    config: AttentionConfig,
    indices: Tensor | None,
) -> None:
    """Record a call of a layer, which has block indices [b i r n]."""
    if torch._C._current_graph_task_id() != -1:
        return  # a backward pass, where checkpointing calls layers once more
    b, length, heads = call.q.shape[:3]
    rows = torch.arange(length, device=call.q.device)
    if queries is not None:  # the same for equal lengths
        generator = torch.Generator().manual_seed(seed)
        rows = sampled(queries, length, generator, call.q.device, "queries")
    ranked, kinds = None, []
    if "selected" in config.branches:
        if indices is None:  # the blocks of every query cover all that it sees
            is_ranked = call.ck is not None and config.dense_length < length
            ranking = config if is_ranked else config.but(num_selected_blocks=0)
            backend = dispatch.choose("auto", "native_sparse_attention", call, ranking)
            indices = branches.rank(call, ranking, backend)[0]
        # dense queries at the begin have none
        ranked = F.pad(indices, (0, 0, 0, 0, length - indices.shape[1], 0), value=-1)
        count = blocks.num_blocks(length, config.selection_block_size)
        kinds += ["initial"] * min(config.num_initial_blocks, count) + ["ranked"] * ranked.shape[-1]
        kinds += ["local"] * (min(config.num_local_blocks, count) if config.causal else 0)
    # an index has its own scale
    scale = None if layer.to_index is not None else config.scale
    step = max(1, MOST_SCORES // max(1, b * heads * length))
    with no_autocast(call.q.device.type):
        parts = [read(call, config, ranked, tuple(kinds), scale, i) for i in rows.split(step)]
    fields = {
        field: torch.cat([part[field] for part in parts], dim=1).to("cpu", copy=True).contiguous()
        for field in parts[0]
    }
    readings.append(Reading(name, layer.config, length, kinds=tuple(kinds), **fields))


@contextmanager
def collect(
    model: nn.Module,
    queries: int | Tensor | None = 64,
    *,
    layers: Sequence[str | int] | None = None,
    seed: int = 0,
) -> Iterator[Collection]:
    """Record what the sparse layers of a model read, while the context is open.

    Each call of a `SparseAttention` in the model adds a `Reading` to `collection[name]`; the second
    run of a checkpointed layer does not. Outputs and gradients stay the same, bit by bit. The cost
    is O(m T) in each layer for m queries of T tokens. A compiled model runs eagerly.

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
    if isinstance(queries, Tensor):
        check_values("queries", queries)
        queries = queries.cpu()
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
            layer.observer = partial(record, name, layer, collection[name], queries, seed)
        with eager:
            yield collection
    finally:
        for layer in layer_by_name.values():
            layer.__dict__.pop("observer", None)
