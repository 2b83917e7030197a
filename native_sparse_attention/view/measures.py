"""What sampled queries of one call of a layer read, and how much attention that holds.

b  sequences    m  sampled queries    h  query heads    k  KV heads    g  query heads of a KV head
j  keys         c  blocks             r  heads that rank: k, or h without shared rankings
n  ranked slots of a query            x  its slots: initial, ranked and local blocks
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor

from .. import blocks
from ..compat import no_autocast
from ..config import AttentionConfig
from ..ops import branches, dispatch
from ..ops.call import Call
from ..ops.reference import capped, importance_scores, upcast, visible_windows
from ..varlen import Documents

# scores of queries and keys that exist at one time
MOST_SCORES = 2**24


class Queries(NamedTuple):
    """Rows `at` [m] of a call, and for each the first row of its document and one past the last
    [b|1 m]. Without documents a sequence is one document."""

    at: Tensor
    first: Tensor
    last: Tensor

    @classmethod
    def select(cls, call: Call, at: Tensor) -> Queries:
        at = at.to(call.q.device)
        if call.documents is None:
            first = torch.zeros_like(at)[None]
            return cls(at, first, first + call.k.shape[1])
        return cls(at, *(bound[:, at].long() for bound in call.documents))

    @property
    def exist(self) -> Tensor:
        """Which rows hold a token, [b|1 m]."""
        return (self.at >= self.first) & (self.at < self.last)

    def keys(self, j: Tensor, causal: bool) -> Tensor:
        """Which keys j full attention sees, [b|1 m j]; none for a row without a token."""
        seen = (j >= self.first[..., None]) & (j < self.last[..., None]) & self.exist[..., None]
        return seen & (j <= self.at[:, None]) if causal else seen


def ranked_blocks(call: Call, config: AttentionConfig, indices: Tensor | None) -> Tensor:
    """Block indices [b i r n] of all queries. The layer has none of its first queries where they
    are dense, and none at all where the blocks of every query cover all that it sees."""
    b, T, h = call.q.shape[:3]
    if indices is None and call.ck is not None and config.dense_length < call.k.shape[1]:
        backend = dispatch.choose("auto", "native_sparse_attention", call, config)
        indices = branches.rank(call, config, backend)[0]
    if indices is None:
        r = call.k.shape[2] if config.query_heads_share_selected_kv else h
        return torch.full((b, T, r, 0), -1, dtype=torch.int32, device=call.q.device)
    return F.pad(indices, (0, 0, 0, 0, T - indices.shape[1], 0), value=-1)


def slots(
    queries: Queries, ranked: Tensor, hidden: Tensor, config: AttentionConfig, length: int
) -> tuple[Tensor, tuple[str, ...]]:
    """The blocks [b m r x] that queries read, each once and -1 in an empty slot, and the kind of
    each slot. `ranked` [b m r n] lies between the initial and the local blocks."""
    s, device = config.selection_block_size, ranked.device
    count = blocks.num_blocks(length, s)
    low, query_block = queries.first // s, queries.at // s
    end = blocks.ceil_div(queries.last, s)
    if config.causal:
        end = end.minimum(query_block + 1)
    initial = low[..., None] + torch.arange(min(config.num_initial_blocks, count), device=device)
    initial = torch.where(initial < end[..., None], initial, -1)
    num_local = min(config.num_local_blocks, count) if config.causal else 0
    local = query_block[:, None] - torch.arange(num_local, device=device).flip(0)
    local = torch.where(local >= low[..., None] + config.num_initial_blocks, local, -1)
    initial, local = (t[:, :, None].expand(*ranked.shape[:3], -1) for t in (initial, local))
    chosen = torch.cat((initial, ranked, local), dim=-1).masked_fill(hidden, -1)
    sizes = {"initial": initial.shape[-1], "ranked": ranked.shape[-1], "local": local.shape[-1]}
    return chosen, tuple(kind for kind, size in sizes.items() for _ in range(size))


def probabilities(q: Tensor, k: Tensor, seen: Tensor, config: AttentionConfig) -> Tensor:
    """Full attention [b m h j] of queries [b m h d] and keys [b j k d] that they see [b|1 m j], in
    fp32. Sinks take no part. NaN for a query that sees no key."""
    q, k = upcast(q, k)
    grouped = rearrange(q, "b m (k g) d -> b m k g d", k=k.shape[2])
    logits = einsum(grouped, k, "b m k g d, b j k d -> b m k g j")
    logits = capped(logits * config.scale_of(q.shape[-1]), config.soft_cap).flatten(2, 3)
    return logits.masked_fill(~seen[:, :, None], float("-inf")).softmax(dim=-1)


def mass_of_blocks(probs: Tensor, chosen: Tensor, s: int) -> Tensor:
    """The mass [b m h x] of chosen blocks [b m r x], of probabilities [b m h j]."""
    mass = F.pad(probs, (0, -probs.shape[-1] % s)).unflatten(-1, (-1, s)).sum(dim=-1)
    chosen = chosen.repeat_interleave(probs.shape[2] // chosen.shape[2], dim=2)
    mass = mass.gather(-1, chosen.clamp(min=0).long())
    return mass.masked_fill((chosen < 0) & ~mass.isnan(), 0.0)


def scores_of_ranked(
    call: Call, config: AttentionConfig, queries: Queries, ranked: Tensor, scale: float | None
) -> Tensor:
    """The scores [b m r n] by which blocks `ranked` were chosen, of logits with `scale`; NaN in an
    empty slot."""
    if call.ck.shape[1] == 0:  # no window, so no score
        return torch.full(ranked.shape, float("nan"), device=ranked.device)
    d, s = config.d, config.selection_block_size
    at = blocks.leader(queries.at, config.selection_stride)
    documents = None
    if call.documents is not None:
        documents = Documents(*(bound[:, at] for bound in call.documents))
    ranking = call.ranking(config.branches)
    tensors = ranking.q[:, at], ranking.ck, ranking.mem_k, ranking.sinks
    wide: list[Any] = [None if t is None else upcast(t)[0] for t in tensors]
    cq, ck, mem_k, sinks = wide
    scores = importance_scores(
        cq, ck, mem_k,
        visible_windows(at[None], call.ck.shape[1], d, config.causal, documents),
        torch.arange(blocks.num_blocks(call.k.shape[1], s), device=at.device),
        config.but(scale=scale), None if sinks is None else sinks[0],
    )  # fmt: skip
    scores = rearrange(scores, "b r m c -> b m r c").gather(-1, ranked.clamp(min=0).long())
    return scores.masked_fill(ranked < 0, float("nan"))


def share_in_common(chosen: Tensor, compared: Tensor) -> Tensor:
    """The share of blocks [.. n] that are among those `compared` [.. x] too; NaN where one of them
    has no block. -1 is no block."""
    real = chosen >= 0
    common = ((chosen[..., :, None] == compared[..., None, :]).any(dim=-1) & real).sum(dim=-1)
    have_blocks = real.any(dim=-1) & (compared >= 0).any(dim=-1)
    return torch.where(have_blocks, common / real.sum(dim=-1), float("nan"))


def measure(
    call: Call,
    config: AttentionConfig,
    indices: Tensor | None,
    queries: Queries,
    rank_scale: float | None,
) -> dict[str, Any]:
    """Fields of a `Reading` of a checked call with block indices [b i r n] as the layer has them,
    by scores with `rank_scale`. O(m j) in time; in memory O(m) and a bounded number of scores."""
    at, length, s = queries.at, call.k.shape[1], config.selection_block_size
    if config.causal:
        dense = at - queries.first < config.dense_length
    else:
        dense = queries.last - queries.first <= config.dense_length
    fields: dict[str, Any] = {"dense": dense & queries.exist, "kinds": ()}
    chosen = ranked = None
    if "selected" in config.branches:
        all_ranked = ranked_blocks(call, config, indices)
        hidden = (dense | ~queries.exist)[..., None, None]
        ranked = all_ranked[:, at].masked_fill(hidden, -1)
        chosen, fields["kinds"] = slots(queries, ranked, hidden, config, length)
        has_previous = at > queries.first
        if config.causal:  # a dense query has no chosen blocks
            has_previous &= at - 1 - queries.first >= config.dense_length
        agreement = share_in_common(ranked, all_ranked[:, (at - 1).clamp(min=0)])
        fields["agreement"] = agreement.masked_fill(~has_previous[..., None], float("nan"))

    parts: dict[str, list[Tensor]] = {"block_mass": [], "window_mass": [], "scores": []}
    step = max(1, MOST_SCORES // max(1, call.q.shape[0] * call.q.shape[2] * length))
    window_k = call.branch("window", config.branches).k
    j = torch.arange(length, device=at.device)
    with no_autocast(at.device.type):
        for start in range(0, max(1, len(at)), step):
            part = slice(start, start + step)
            chunk = Queries(at[part], queries.first[:, part], queries.last[:, part])
            q, seen = call.q[:, chunk.at], chunk.keys(j, config.causal)
            probs = None
            if chosen is not None:
                probs = probabilities(q, call.k, seen, config)
                parts["block_mass"].append(mass_of_blocks(probs, chosen[:, part], s))
            if "window" in config.branches:
                if probs is None or window_k is not call.k:
                    probs = probabilities(q, window_k, seen, config)
                is_near = (j - chunk.at[:, None]).abs() <= config.sliding_window_size
                mass = probs.masked_fill(~is_near[None, :, None], 0.0).sum(dim=-1)
                parts["window_mass"].append(mass)
            if ranked is not None and ranked.shape[-1] and call.ck is not None:
                scores = scores_of_ranked(call, config, chunk, ranked[:, part], rank_scale)
                parts["scores"].append(scores)
    fields |= {name: torch.cat(tensors, dim=1) for name, tensors in parts.items() if tensors}
    if chosen is not None:
        mass = fields["block_mass"].sum(dim=-1)
        fields["mass"] = mass.masked_fill(fields["dense"][..., None], 1.0)
        if call.documents is not None:  # blocks count from the document's first token
            chosen = torch.where(chosen < 0, -1, chosen - (queries.first // s)[..., None, None])
        fields["blocks"] = chosen.to(torch.int32)
    return fields
