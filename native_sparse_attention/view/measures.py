"""What sampled queries of one call of a layer read, and how much attention that holds.

b  sequences    m  sampled queries    h  query heads    k  KV heads    g  query heads of a KV head
j  keys         c  blocks             r  heads that rank: k, or h without shared rankings
n  ranked slots of a query            x  its slots: initial, ranked and local blocks
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor

from .. import blocks
from ..compat.autocast import no_autocast
from ..config import AttentionConfig
from ..ops import branches
from ..ops.call import Call
from ..ops.nsa import choose_backend
from ..ops.reference import capped, importance_scores, visible_windows
from ..varlen import Documents

# scores of queries and keys that exist at one time, in numbers
MOST_SCORES = {"cpu": 2**24}
MOST_SCORES_ELSEWHERE = 2**25


class Queries(NamedTuple):
    """Rows `at` [m] of a call, and for each the first row of its document and one past the last
    [b|1 m]. Without documents a sequence is one document."""

    at: Tensor
    first: Tensor
    last: Tensor

    @property
    def exist(self) -> Tensor:
        """Which rows hold a token, [b|1 m]."""
        return (self.at >= self.first) & (self.at < self.last)

    def some(self, part: slice) -> Queries:
        return Queries(self.at[part], self.first[:, part], self.last[:, part])

    def keys(self, length: int, causal: bool) -> Tensor:
        """Which keys full attention sees, [b|1 m j]; none for a row without a token."""
        j = torch.arange(length, device=self.at.device)
        seen = (j >= self.first[..., None]) & (j < self.last[..., None]) & self.exist[..., None]
        return seen & (j <= self.at[:, None]) if causal else seen


def queries_of(call: Call, at: Tensor) -> Queries:
    """The rows `at` [m] of a call."""
    at = at.to(call.q.device)
    if call.documents is None:
        first = torch.zeros_like(at)[None]
        return Queries(at, first, first + call.k.shape[1])
    return Queries(at, *(bound[:, at].long() for bound in call.documents))


def is_dense(queries: Queries, config: AttentionConfig) -> Tensor:
    """Which queries attend to all keys by `dense_length`, [b|1 m]."""
    if config.causal:
        return queries.at - queries.first < config.dense_length
    return queries.last - queries.first <= config.dense_length


def ranked_blocks(call: Call, config: AttentionConfig, found: Tensor | None) -> Tensor:
    """Block indices [b i r n] of all queries. The layer has none of its first queries where they
    are dense, and none at all where the blocks of every query cover all that it sees."""
    b, T, h = call.q.shape[:3]
    if found is None and call.ck is not None and config.dense_length < call.k.shape[1]:
        found = branches.rank(call, config, choose_backend(call, config, "auto"), None)[0]
    if found is None:
        r = call.k.shape[2] if config.query_heads_share_selected_kv else h
        return torch.full((b, T, r, 0), -1, dtype=torch.int32, device=call.q.device)
    return F.pad(found, (0, 0, 0, 0, T - found.shape[1], 0), value=-1)


def slots(
    queries: Queries, ranked: Tensor, dense: Tensor, config: AttentionConfig, length: int
) -> tuple[Tensor, tuple[str, ...]]:
    """The blocks [b m r x] that queries read, each once and -1 in an empty slot, and the kind of
    each slot. `ranked` [b m r n] lies between the initial and the local blocks."""
    s = config.selection_block_size
    count = blocks.num_blocks(length, s)
    low, end = queries.first // s, blocks.ceil_div(queries.last, s)
    own = queries.at // s
    if config.causal:
        end = end.minimum(own + 1)
    device = own.device
    initial = low[..., None] + torch.arange(min(config.num_initial_blocks, count), device=device)
    initial = torch.where(initial < end[..., None], initial, -1)
    back = torch.arange(min(config.num_local_blocks, count) if config.causal else 0, device=device)
    local = own[:, None] - back.flip(0)
    local = torch.where(local >= low[..., None] + config.num_initial_blocks, local, -1)
    forced = (t[:, :, None].expand(*ranked.shape[:3], -1) for t in (initial, local))
    before, after = forced
    found = torch.cat((before, ranked, after), dim=-1).to(torch.int32)
    hidden = (dense | ~queries.exist)[..., None, None]
    names = "initial", "ranked", "local"
    sizes = before.shape[-1], ranked.shape[-1], after.shape[-1]
    kinds = tuple(name for name, size in zip(names, sizes, strict=True) for _ in range(size))
    return found.masked_fill(hidden, -1), kinds


def exact(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def probabilities(q: Tensor, k: Tensor, seen: Tensor, config: AttentionConfig) -> Tensor:
    """Full attention [b m h j] of queries [b m h d] and keys [b j k d] that they see [b|1 m j], in
    fp32. Sinks take no part. NaN for a query that sees no key."""
    grouped = rearrange(exact(q), "b m (k g) d -> b m k g d", k=k.shape[2])
    logits = einsum(grouped, exact(k), "b m k g d, b j k d -> b m k g j")
    logits = capped(logits * config.scale_of(q.shape[-1]), config.soft_cap).flatten(2, 3)
    return logits.masked_fill(~seen[:, :, None], float("-inf")).softmax(dim=-1)


def mass_of_blocks(mass: Tensor, chosen: Tensor, s: int) -> Tensor:
    """The mass [b m h x] of chosen blocks [b m r x], of probabilities [b m h j]."""
    by_block = F.pad(mass, (0, -mass.shape[-1] % s)).unflatten(-1, (-1, s)).sum(dim=-1)
    chosen = chosen.repeat_interleave(mass.shape[2] // chosen.shape[2], dim=2)
    held = by_block.gather(-1, chosen.clamp(min=0).long())
    return held.masked_fill((chosen < 0) & ~held.isnan(), 0.0)


def mass_of_window(mass: Tensor, at: Tensor, w: int) -> Tensor:
    """The mass [b m h] of the keys of a sliding window, of probabilities [b m h j]."""
    j = torch.arange(mass.shape[-1], device=at.device)
    inside = (j - at[:, None]).abs() <= w
    return mass.masked_fill(~inside[None, :, None], 0.0).sum(dim=-1)


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
    sinks = call.branch_sinks(config.branches).get("compressed")
    cq = call.q if call.cq is None else call.cq
    scores = importance_scores(
        exact(cq[:, at]), exact(call.ck), None if call.mem_k is None else exact(call.mem_k),
        visible_windows(at[None], call.ck.shape[1], d, config.causal, documents),
        torch.arange(blocks.num_blocks(call.k.shape[1], s), device=at.device),
        rule=config.importance, interpolated=config.interpolated_importance_score,
        shared=config.query_heads_share_selected_kv, l=config.compress_block_size, d=d, s=s,
        scale=scale, soft_cap=config.soft_cap,
        sinks=None if sinks is None else exact(sinks),
    )  # fmt: skip
    picked = rearrange(scores, "b r m c -> b m r c").gather(-1, ranked.clamp(min=0).long())
    return picked.masked_fill(ranked < 0, float("nan"))


def in_common(these: Tensor, others: Tensor) -> Tensor:
    """The share of blocks [.. n] that are among `others` [.. x] too; NaN where one of them has no
    block. -1 is no block."""
    there = these >= 0
    common = ((these[..., :, None] == others[..., None, :]).any(dim=-1) & there).sum(dim=-1)
    both = there.any(dim=-1) & (others >= 0).any(dim=-1)
    return torch.where(both, common / there.sum(dim=-1), float("nan"))


class Measured(NamedTuple):
    """Of m queries, on the call's device. `view.Reading` describes them."""

    dense: Tensor
    blocks: Tensor | None = None
    kinds: tuple[str, ...] = ()
    scores: Tensor | None = None
    block_mass: Tensor | None = None
    mass: Tensor | None = None
    window_mass: Tensor | None = None
    agreement: Tensor | None = None


def measure(
    call: Call,
    config: AttentionConfig,
    indices: Tensor | None,
    queries: Queries,
    rank_scale: float | None,
) -> Measured:
    """Measure rows of a checked call with block indices [b i r n] as the layer has them, by scores
    with `rank_scale`. O(m j) in time; in memory O(m) and a bounded number of scores."""
    at, length, s = queries.at, call.k.shape[1], config.selection_block_size
    dense = is_dense(queries, config)
    chosen = ranked = agreement = None
    kinds: tuple[str, ...] = ()
    if "selected" in config.branches:
        every = ranked_blocks(call, config, indices)
        hidden = (dense | ~queries.exist)[..., None, None]
        ranked = every[:, at].masked_fill(hidden, -1)
        chosen, kinds = slots(queries, ranked, dense, config, length)
        has_one_before = at > queries.first
        if config.causal:  # a dense query has no chosen blocks
            has_one_before &= at - 1 - queries.first >= config.dense_length
        before = every[:, (at - 1).clamp(min=0)]
        agreement = in_common(ranked, before)
        agreement = agreement.masked_fill(~has_one_before[..., None], float("nan"))

    limit = MOST_SCORES.get(at.device.type, MOST_SCORES_ELSEWHERE)
    step = max(1, limit // max(1, call.q.shape[0] * call.q.shape[2] * length))
    window_k, _ = call.window_keys()
    found: dict[str, list[Tensor]] = {"block_mass": [], "window_mass": [], "scores": []}
    with no_autocast(at.device.type):
        for start in range(0, max(1, len(at)), step):
            part = slice(start, start + step)
            some = queries.some(part)
            q, seen = call.q[:, some.at], some.keys(length, config.causal)
            p = None
            if chosen is not None:
                p = probabilities(q, call.k, seen, config)
                found["block_mass"].append(mass_of_blocks(p, chosen[:, part], s))
            if "window" in config.branches:
                if p is None or window_k is not call.k:
                    p = probabilities(q, window_k, seen, config)
                w = config.sliding_window_size
                found["window_mass"].append(mass_of_window(p, some.at, w))
            if ranked is not None and ranked.shape[-1] and call.ck is not None:
                scores = scores_of_ranked(call, config, some, ranked[:, part], rank_scale)
                found["scores"].append(scores)
    whole = {name: torch.cat(t, dim=1) for name, t in found.items() if t}
    mass = None
    if "block_mass" in whole:
        mass = whole["block_mass"].sum(dim=-1)
        mass = torch.where((dense & queries.exist)[..., None], 1.0, mass)
    return Measured(dense, chosen, kinds, mass=mass, agreement=agreement, **whole)
