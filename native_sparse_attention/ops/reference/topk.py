"""The specification of the selection: block scores, top-n and the gates of selected blocks.

b  batch         i  query       h  query heads        d  key width
k  KV heads      w  windows     g  query heads of one KV head
c  blocks        n  slots       r  heads that rank: k (shared by the group) or h (each its own)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ... import blocks
from ...compat.autocast import no_autocast
from ...compat.graphs import free_size
from ...varlen import Documents
from .attention import (
    capped,
    compressed_scores,
    masked_softmax,
    query_positions,
    visible_windows,
    with_sinks,
)
from .products import finite


def windows_of_blocks(
    window_scores: Tensor, end: Tensor, c: Tensor, d: int, s: int
) -> tuple[Tensor, Tensor]:
    """Scores [b r i c j] of the windows j of block c, and whether they are before `end` [b|1 i]."""
    w = blocks.first_window_of_block(c, d, s)[:, None]
    w = w + torch.arange(blocks.windows_per_block(d, s), device=c.device)
    exists = (w < end[..., None, None])[:, None]
    return window_scores[..., w.clamp(max=window_scores.shape[-1] - 1)], exists


def block_mean(window_scores: Tensor, end: Tensor, c: Tensor, d: int, s: int) -> Tensor:
    """Score of block c: the mean over its windows before `end` [b|1 i], [b r i w] -> [b r i c]."""
    picked, exists = windows_of_blocks(window_scores, end, c, d, s)
    return picked.masked_fill(~exists, 0.0).sum(dim=-1) / exists.sum(dim=-1).clamp(min=1)


def block_max(window_scores: Tensor, end: Tensor, c: Tensor, d: int, s: int) -> Tensor:
    """Score of block c: the largest of its windows before `end` [b|1 i], [b r i w] -> [b r i c]; 0
    without one."""
    picked, exists = windows_of_blocks(window_scores, end, c, d, s)
    largest = picked.masked_fill(~exists, float("-inf")).amax(dim=-1)
    return largest.masked_fill(~exists.any(dim=-1), 0.0)


def block_mean_interpolated(
    window_scores: Tensor, visible: tuple[Tensor, Tensor], c: Tensor, d: int, s: int
) -> Tensor:
    """Score of block c: the mean over its tokens under a window of interpolated window scores.

    Token t lies at `(t + 0.5) / d - 0.5` on the axis of window centres. The query sees windows
    `visible[0]` to `visible[1] - 1`, [b|1 i] each. The nearest window that it sees replaces a
    neighbour that is hidden or does not exist.
    """
    t = c[:, None] * s + torch.arange(s, device=c.device)
    # both neighbours in integer arithmetic: positions in units of 1 / (2 d)
    left, remainder = (2 * t + 1 - d) // (2 * d), (2 * t + 1 - d) % (2 * d)
    weight = remainder.to(window_scores.dtype) / (2 * d)
    first, end = (n[..., None, None] for n in visible)

    def at(w: Tensor) -> Tensor:
        nearest = w.maximum(first).minimum(end - 1).clamp(min=0)
        index = rearrange(nearest, "b i c t -> b 1 i (c t)")
        index = index.expand(*window_scores.shape[:3], -1)
        return window_scores.gather(-1, index).unflatten(-1, t.shape)

    covered = (t < end * d)[:, None]
    token_scores = torch.lerp(at(left), at(left + 1), weight).masked_fill(~covered, 0.0)
    return token_scores.sum(dim=-1) / covered.sum(dim=-1).clamp(min=1)


def block_mass(probs: Tensor, c: Tensor, l: int, d: int, s: int) -> Tensor:
    """Score of block c: `sum_w overlap(w, c) / d * p_w`, the probabilities of its windows weighted
    by overlap. If d > s, the score is the probability of the one window over the block."""
    W = probs.shape[-1]
    mass = probs.new_zeros(*probs.shape[:-1], c.shape[0])
    if W == 0:
        return mass
    first = blocks.first_window_of_block(c, d, s) if d > s else c * s // d
    for w in (first + j for j in range(1 if d > s else (s + l - 1) // d + 1)):
        share = torch.ones_like(w) if d > s else blocks.overlap(w, c, l, d, s) / d
        weight = torch.where((w >= 0) & (w < W), share, 0).to(probs.dtype)
        mass = mass + probs[..., w.clamp(0, W - 1)] * weight
    return mass


def with_last(t: Tensor) -> Tensor:
    """Append a hidden window of zeros to t [.. w] in a compiled graph, since its sequences may have
    no window."""
    return F.pad(t, (0, 1)) if torch.compiler.is_compiling() else t


def importance_scores(
    q: Tensor,
    ck: Tensor,
    mem_k: Tensor | None,
    visible: tuple[Tensor, Tensor],
    c: Tensor,
    *,
    rule: str,
    interpolated: bool,
    shared: bool,
    l: int,
    d: int,
    s: int,
    scale: float | None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Scores [b r i c] of blocks c for queries that see windows `visible[0]` to `visible[1] - 1`,
    [b|1 i] each."""
    if rule == "probs":
        sim, mask = compressed_scores(q, ck, mem_k, visible, scale)
        keys, sim = sim.shape[-1], capped(finite(sim), soft_cap)
        probs, _ = masked_softmax(*with_sinks(sim, mask, sinks))
        probs = with_last(probs[..., keys - ck.shape[1] : keys])
        probs = probs.sum(dim=2) if shared else rearrange(probs, "b k g i w -> b (k g) i w")
        return block_mass(probs, c, l, d, s)
    if shared:
        # the mean over heads of dot products is the dot product with the mean query
        q = rearrange(q, "b i (k g) d -> b i k g d", k=ck.shape[2]).mean(dim=3)
    sim, _ = compressed_scores(q, ck, None, visible, scale)
    window_scores = with_last(rearrange(finite(sim), "b k g i w -> b (k g) i w"))
    if interpolated:
        return block_mean_interpolated(window_scores, visible, c, d, s)
    pool = block_max if rule == "max" else block_mean
    return pool(window_scores, visible[1], c, d, s)


def rank(block_scores: Tensor, candidate: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Top-n candidates of each query, best first: block indices [b r i n] and which of them are
    candidates. The earlier block wins a tie."""
    masked = block_scores.detach().masked_fill(~candidate, float("-inf"))
    order = masked.sort(dim=-1, descending=True, stable=True).indices[..., :n]
    return order, candidate.expand_as(masked).gather(-1, order)


def candidates(
    i: Tensor, c: Tensor, num_ranked: int, documents: Documents | None, *, d: int, s: int,
    num_initial_blocks: int, num_local_blocks: int, causal: bool,
) -> Tensor:  # fmt: skip
    """Which blocks c below `num_ranked` a query at position i [b|1 i] may select, [b|1 i c]: those
    that are not forced and, if causal, past and wholly visible."""
    candidate = ((c >= num_initial_blocks) & (c < num_ranked)).expand(*i.shape, -1)
    if documents is not None:
        first, end = (t[..., None] for t in documents.blocks(s))
        candidate = (c >= first + num_initial_blocks) & (c < end)
    if causal:
        past = c <= (i // s)[..., None] - max(num_local_blocks, 1)
        candidate = candidate & past & (c < blocks.num_complete_blocks(i, d, s)[..., None])
    return candidate


def straight_through_gates(block_scores: Tensor, candidate: Tensor, rule: str) -> Tensor:
    """Gates [b r i c] of value 1 with the gradient of a block's score (`probs`) or of its softmax
    over the candidates and one constant logit of -1e3 (`logits`, `max`)."""
    gate = block_scores
    if rule != "probs":
        gate = F.pad(gate.masked_fill(~candidate, float("-inf")), (1, 0), value=-1e3)
        gate = gate.softmax(dim=-1)[..., 1:]
    return gate + (1.0 - gate).detach()


def leaders(q: Tensor, i: Tensor, stride: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first token of each group, whose ranking the group shares: queries [b t h d], positions
    [b|1 t], and each query's group [b|1 i]. A group that began before this call is -1."""
    T, first = q.shape[1], i[:, :1]
    group = i // stride - blocks.ceil_div(first, stride)
    groups = free_size(blocks.ceil_div(T, stride))
    t = -first % stride + stride * torch.arange(groups, device=q.device)
    t = t.clamp(max=T - 1)
    rows = t.expand(q.shape[0], -1)[..., None, None].expand(-1, -1, *q.shape[2:])
    return q.gather(1, rows), i.gather(1, t), group


def share(ranked: Tensor, group: Tensor, before: Tensor) -> Tensor:
    """Give each group's ranking [b t r n] to its tokens. Tokens of group -1 get `before`."""
    index = group.clamp(min=0)[..., None, None].expand(ranked.shape[0], -1, *ranked.shape[2:])
    return torch.where(group[..., None, None] < 0, before, ranked.gather(1, index))


def select_blocks(
    q: Tensor,
    ck: Tensor,
    *,
    seq_len: int,
    mem_k: Tensor | None,
    compress_block_size: int,
    compress_block_sliding_stride: int,
    selection_block_size: int,
    num_selected_blocks: int,
    importance: str,
    interpolated_importance_score: bool,
    num_initial_blocks: int,
    num_local_blocks: int,
    selection_stride: int,
    query_heads_share_selected_kv: bool,
    causal: bool,
    q_offset: int | Tensor,
    leader_indices: Tensor | None = None,
    scale: float | None = None,
    return_gates: bool = False,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    documents: Documents | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Block indices [b i r n], int32, and on request their straight-through gates."""
    l, d, s = compress_block_size, compress_block_sliding_stride, selection_block_size
    n, shared = num_selected_blocks, query_heads_share_selected_kv
    i = query_positions(q, q_offset)
    shape = (q.shape[0], q.shape[1], ck.shape[2] if shared else q.shape[2], n)
    num_ranked = blocks.num_complete_blocks(ck.shape[1] * d, d, s)
    if not causal:
        num_ranked = free_size(blocks.num_blocks(seq_len, s))

    if (not torch.compiler.is_compiling() and num_ranked == 0) or 0 in shape:
        indices = torch.full(shape, -1, dtype=torch.int32, device=q.device)
        return indices, q.new_ones(shape) if return_gates else None

    group = None
    if selection_stride > 1:
        start = i[:, :1]
        q, i, group = leaders(q, i, selection_stride)
        if documents is not None:  # documents of the leaders
            at = (i - start).expand(len(q), -1)
            documents = Documents(*(bound.gather(1, at) for bound in documents))

    # at least n columns; a compiled graph runs other lengths, so it always appends n
    missing = n if torch.compiler.is_compiling() else max(0, n - num_ranked)
    c = torch.arange(num_ranked + missing, device=q.device)
    candidate = candidates(
        i, c, num_ranked, documents, d=d, s=s, num_initial_blocks=num_initial_blocks,
        num_local_blocks=num_local_blocks, causal=causal,
    )[:, None]  # fmt: skip

    # rank in fp32: in bf16 half of the scores would tie
    accumulate = torch.promote_types(q.dtype, torch.float32)
    with no_autocast(q.device.type):
        block_scores = importance_scores(
            q.to(accumulate),
            ck.to(accumulate),
            None if mem_k is None else mem_k.to(accumulate),
            visible_windows(i, ck.shape[1], d, causal, documents),
            c,
            rule=importance,
            interpolated=interpolated_importance_score,
            shared=shared,
            l=l,
            d=d,
            s=s,
            scale=scale,
            soft_cap=soft_cap,
            sinks=None if sinks is None else sinks.to(accumulate),
        )

    order, found = rank(block_scores, candidate, n)
    indices = order.masked_fill(~found, -1).to(torch.int32)
    indices = rearrange(indices, "b r i n -> b i r n")
    gates = None
    if return_gates:
        gates = straight_through_gates(block_scores, candidate, importance).gather(-1, order)
        gates = rearrange(gates.masked_fill(~found, 1.0), "b r i n -> b i r n")

    if group is not None:
        before = indices.new_full((), -1) if leader_indices is None else leader_indices[:, None]
        indices = share(indices, group, before)
        if gates is not None:
            gates = share(gates, group, gates.new_ones(()))
    return indices, gates
