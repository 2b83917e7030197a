"""The specification: what every backend computes, in plain PyTorch, on any device, in any dtype.

Dense masks and a softmax, memory O(T S): to be read and to be compared with. Scores are formed in the
inputs' dtype and the softmax in fp32 or better. Autograd gives the gradients; fp64 stays fp64.

    b  batch         i  query       h  query heads        d  key width
    k  KV heads      j  key         g  query heads of one KV head
    w  windows       c  blocks      r  heads that rank: k (shared by the group) or h (each its own)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import einsum, rearrange, repeat
from torch import Tensor

from .. import blocks


def query_positions(q: Tensor, q_offset: int | Tensor) -> Tensor:
    """Absolute position of each query: [1, T], or [b, T] where rows start at different places."""
    i = torch.arange(q.shape[1], device=q.device)
    return i[None] + (q_offset[:, None] if isinstance(q_offset, Tensor) else q_offset)


def scores(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """Scaled logits [b k g i j] of q [b i (k g) d] and k [b j k d], in fp32 or better."""
    q = rearrange(q, "b i (k g) d -> b k g i d", k=k.shape[2])
    sim = einsum(q, k, "b k g i d, b j k d -> b k g i j")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return sim.to(torch.promote_types(sim.dtype, torch.float32)) * scale


def masked_softmax(sim: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last axis where mask is True; returns (probabilities, masked logits).

    A row with nothing to see has probability 0 everywhere and no gradient: its logits are replaced
    by zeros before the softmax, so that no NaN ever forms.
    """
    empty = ~mask.any(dim=-1, keepdim=True)
    sim = sim.masked_fill(~mask, float("-inf")).masked_fill(empty, 0.0)
    return sim.softmax(dim=-1).masked_fill(empty, 0.0), sim


def attend(
    sim: Tensor, v: Tensor, mask: Tensor, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of logits [b k g i j] over v [b j k e] -> [b i (k g) e], lse [b i (k g)]."""
    probs, sim = masked_softmax(sim, mask)
    out = einsum(probs.to(v.dtype), v, "b k g i j, b j k e -> b k g i e")
    out = rearrange(out, "b k g i e -> b i (k g) e")
    if not return_lse:
        return out
    if sim.shape[-1] == 0:
        lse = sim.new_full(sim.shape[:-1], float("-inf"))
    else:
        lse = sim.logsumexp(dim=-1).masked_fill(~mask.any(dim=-1), float("-inf"))
    return out, rearrange(lse, "b k g i -> b i (k g)")


# branch 1: compressed


def visible_windows(i: Tensor, num_windows: int, d: int, causal: bool) -> Tensor:
    """How many windows, counted from the first, each query at position i sees."""
    if not causal:
        return torch.full_like(i, num_windows)
    return blocks.num_visible_windows(i, d).clamp(max=num_windows)


def compressed_scores(
    q: Tensor, ck: Tensor, mem_k: Tensor | None, visible: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Logits [b k g i (m w)] over memory and windows, and who may see them [b|1 1 1 i (m w)]."""
    mask = torch.arange(ck.shape[1], device=q.device) < visible[..., None]
    if mem_k is not None:
        ck = torch.cat((repeat(mem_k, "k m d -> b m k d", b=ck.shape[0]), ck), dim=1)
        mask = F.pad(mask, (mem_k.shape[1], 0), value=True)
    return scores(q, ck, scale), rearrange(mask, "b i j -> b 1 1 i j")


def compressed_attention(
    q: Tensor,
    ck: Tensor,
    cv: Tensor,
    *,
    mem_k: Tensor | None,
    mem_v: Tensor | None,
    compress_block_sliding_stride: int,
    causal: bool,
    q_offset: int | Tensor,
    scale: float | None = None,
    return_lse: bool = False,
):
    i = query_positions(q, q_offset)
    visible = visible_windows(i, ck.shape[1], compress_block_sliding_stride, causal)
    sim, mask = compressed_scores(q, ck, mem_k, visible, scale)
    if mem_v is not None:
        cv = torch.cat((repeat(mem_v, "k m d -> b m k d", b=cv.shape[0]), cv), dim=1)
    return attend(sim, cv, mask, return_lse)


# selection: importance of blocks, then the ranking


def block_mean(window_scores: Tensor, c: Tensor, d: int, s: int) -> Tensor:
    """Score of block c: the mean over its windows that exist, [b r i w] -> [b r i c]."""
    w = blocks.first_window_of_block(c, d, s)[:, None]
    w = w + torch.arange(blocks.windows_per_block(d, s), device=c.device)
    exists = w < window_scores.shape[-1]
    picked = window_scores[..., w.clamp(max=window_scores.shape[-1] - 1)]
    return (picked * exists).sum(dim=-1) / exists.sum(dim=-1).clamp(min=1)


def block_mean_interpolated(
    window_scores: Tensor, visible: Tensor, c: Tensor, d: int, s: int
) -> Tensor:
    """The mean over block c's tokens (those under a window) of window scores interpolated to tokens.

    Token t lies at `(t + 0.5) / d - 0.5` on the axis of window centres; a neighbour that the query
    does not see (it sees `visible` [b|1 i] windows), or that does not exist, counts as the nearest
    one it sees.
    """
    t = c[:, None] * s + torch.arange(s, device=c.device)
    # both neighbours in integers: twice the position in units of 1 / (2 d)
    left, remainder = (2 * t + 1 - d) // (2 * d), (2 * t + 1 - d) % (2 * d)
    weight = remainder.to(window_scores.dtype) / (2 * d)
    last = (visible - 1).clamp(min=0)[..., None, None]

    def at(w: Tensor) -> Tensor:
        index = rearrange(w.clamp(min=0).minimum(last), "b i c t -> b 1 i (c t)")
        index = index.expand(*window_scores.shape[:3], -1)
        return rearrange(window_scores.gather(-1, index), "b r i (c t) -> b r i c t", t=s)

    covered = t < window_scores.shape[-1] * d
    token_scores = torch.lerp(at(left), at(left + 1), weight) * covered
    return token_scores.sum(dim=-1) / covered.sum(dim=-1)


def block_mass(probs: Tensor, c: Tensor, l: int, d: int, s: int) -> Tensor:
    """Score of block c: the probability of the windows over it, each by its share of the block,
    `sum_w overlap(w, c) / d * p_w`; where a window spans whole blocks, that window's probability."""
    w = torch.arange(probs.shape[-1], device=probs.device)
    if d > s:
        weights = blocks.first_window_of_block(c, d, s)[:, None] == w
    else:
        weights = blocks.overlap(w, c[:, None], l, d, s) / d
    return einsum(probs, weights.to(probs.dtype), "b r i w, c w -> b r i c")


def importance_scores(
    q: Tensor,
    ck: Tensor,
    mem_k: Tensor | None,
    visible: Tensor,
    c: Tensor,
    *,
    rule: str,
    interpolated: bool,
    shared: bool,
    l: int,
    d: int,
    s: int,
    scale: float | None,
) -> Tensor:
    """Scores [b r i c] of blocks c for queries that see `visible` windows."""
    if rule == "probs":
        sim, mask = compressed_scores(q, ck, mem_k, visible, scale)
        probs, _ = masked_softmax(sim, mask)
        probs = probs[..., sim.shape[-1] - ck.shape[1] :]
        probs = probs.sum(dim=2) if shared else rearrange(probs, "b k g i w -> b (k g) i w")
        return block_mass(probs, c, l, d, s)
    if shared:
        # the mean over heads of a dot product is the dot product with the mean query
        q = rearrange(q, "b i (k g) d -> b i k g d", k=ck.shape[2]).mean(dim=3)
    window_scores = rearrange(scores(q, ck, scale), "b k g i w -> b (k g) i w")
    if interpolated:
        return block_mean_interpolated(window_scores, visible, c, d, s)
    return block_mean(window_scores, c, d, s)


def rank(block_scores: Tensor, candidate: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n best candidates of each query, in order: block indices [b r i n] and which of them are
    there at all. Ties go to the earlier block."""
    masked = block_scores.detach().masked_fill(~candidate, float("-inf"))
    order = masked.sort(dim=-1, descending=True, stable=True).indices[..., :n]
    return order, candidate.expand_as(masked).gather(-1, order)


def straight_through_gates(block_scores: Tensor, candidate: Tensor, rule: str) -> Tensor:
    """Gates [b r i c] of value 1 with the gradient of a block's score (`probs`) or of its softmax
    over the candidates and one constant logit of -1e3 (`logits`)."""
    gate = block_scores
    if rule == "logits":
        gate = F.pad(gate.masked_fill(~candidate, float("-inf")), (1, 0), value=-1e3)
        gate = gate.softmax(dim=-1)[..., 1:]
    return gate + (1.0 - gate).detach()


def leaders(q: Tensor, i: Tensor, stride: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens whose ranking is shared: their queries [b t h d], their positions [b|1 t], and the
    group [b|1 i] that each query belongs to, -1 where its first token came before this call."""
    T, first = q.shape[1], i[:, :1]
    group = i // stride - blocks.ceil_div(first, stride)
    t = -first % stride + stride * torch.arange(blocks.ceil_div(T, stride), device=q.device)
    t = t.clamp(max=T - 1)
    rows = t.expand(q.shape[0], -1)[..., None, None].expand(-1, -1, *q.shape[2:])
    return q.gather(1, rows), i.gather(1, t), group


def share(ranked: Tensor, group: Tensor, before: Tensor) -> Tensor:
    """Hand each group's ranking [b t r n] to its tokens, and `before` to those of group -1."""
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
) -> tuple[Tensor, Tensor | None]:
    """Block indices [b i r n], int32, and on request their straight-through gates."""
    l, d, s = compress_block_size, compress_block_sliding_stride, selection_block_size
    n, shared = num_selected_blocks, query_heads_share_selected_kv
    i = query_positions(q, q_offset)
    shape = (q.shape[0], q.shape[1], ck.shape[2] if shared else q.shape[2], n)
    num_ranked = blocks.num_complete_blocks(ck.shape[1] * d, d, s)
    if not causal:
        num_ranked = blocks.num_blocks(seq_len, s)

    if num_ranked == 0 or 0 in shape:
        indices = torch.full(shape, -1, dtype=torch.int32, device=q.device)
        return indices, q.new_ones(shape) if return_gates else None

    group = None
    if selection_stride > 1:
        q, i, group = leaders(q, i, selection_stride)

    # candidates [b|1 1 i c]: not forced and, causally, past and wholly visible
    c = torch.arange(num_ranked, device=q.device)
    candidate = (c >= num_initial_blocks).expand(*i.shape, -1)
    if causal:
        past = (c <= (i // s)[..., None] - max(num_local_blocks, 1))
        candidate = candidate & past & (c < blocks.num_complete_blocks(i, d, s)[..., None])
    candidate = candidate[:, None]

    # a ranking is worth fp32: in bf16 half of its scores would tie
    accumulate = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        block_scores = importance_scores(
            q.to(accumulate),
            ck.to(accumulate),
            None if mem_k is None else mem_k.to(accumulate),
            visible_windows(i, ck.shape[1], d, causal),
            c,
            rule=importance,
            interpolated=interpolated_importance_score,
            shared=shared,
            l=l,
            d=d,
            s=s,
            scale=scale,
        )

    def pad(t: Tensor, value: int) -> Tensor:
        return rearrange(F.pad(t, (0, n - t.shape[-1]), value=value), "b r i n -> b i r n")

    order, found = rank(block_scores, candidate, n)
    indices = pad(order.masked_fill(~found, -1).to(torch.int32), -1)
    gates = None
    if return_gates:
        gates = straight_through_gates(block_scores, candidate, importance).gather(-1, order)
        gates = pad(gates.masked_fill(~found, 1.0), 1)

    if group is not None:
        before = indices.new_full((), -1) if leader_indices is None else leader_indices[:, None]
        indices = share(indices, group, before)
        if gates is not None:
            gates = share(gates, group, gates.new_ones(()))
    return indices, gates


# branch 2: selected


def forced_blocks(
    i: Tensor, c: Tensor, s: int, *, causal: bool, num_initial_blocks: int, num_local_blocks: int
) -> Tensor:
    """Blocks attended without being ranked, [b|1 i] x [c] -> [b|1 i c]: the initial ones and,
    causally, the `num_local_blocks` that end with the query's own."""
    forced = (c < num_initial_blocks).expand(*i.shape, -1)
    if causal:
        own = (i // s)[..., None]
        forced = (forced | (c > own - num_local_blocks)) & (c <= own)
    return forced


def scatter_blocks(values: Tensor, block_indices: Tensor, num_blocks: int, default: float) -> Tensor:
    """Values of the selected blocks laid out over all blocks, [b i r n] -> [b r i c]; -1 is skipped."""
    b, i, r, _ = block_indices.shape
    dense = values.new_full((b, i, r, num_blocks + 1), default)
    index = block_indices.long()
    index = torch.where((index >= 0) & (index < num_blocks), index, num_blocks)
    dense = dense.scatter(-1, index, values)[..., :num_blocks]
    return rearrange(dense, "b i r c -> b r i c")


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    *,
    gates: Tensor | None,
    selection_block_size: int,
    num_initial_blocks: int,
    num_local_blocks: int,
    causal: bool,
    q_offset: int | Tensor,
    scale: float | None = None,
    return_lse: bool = False,
):
    s, S, kv = selection_block_size, k.shape[1], k.shape[2]
    i = query_positions(q, q_offset)
    j = torch.arange(S, device=q.device)
    c = torch.arange(blocks.num_blocks(S, s), device=q.device)

    chosen = torch.ones_like(block_indices, dtype=torch.bool)
    chosen = scatter_blocks(chosen, block_indices, len(c), False)
    forced = forced_blocks(
        i,
        c,
        s,
        causal=causal,
        num_initial_blocks=num_initial_blocks,
        num_local_blocks=num_local_blocks,
    )
    # [b r i c] -> [b k g' i j] with g' = 1 where the group shares
    attended = rearrange(chosen | forced[:, None], "b (k g) i c -> b k g i c", k=kv)
    mask = attended[..., j // s]
    if causal:
        mask = mask & (j <= i[..., None])[:, None, None]

    sim = scores(q, k, scale)
    if gates is not None:
        gate = scatter_blocks(gates.to(sim.dtype), block_indices, len(c), 1.0)
        sim = sim * rearrange(gate, "b (k g) i c -> b k g i c", k=kv)[..., j // s]
    return attend(sim, v, mask, return_lse)


# branch 3: sliding window


def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sliding_window_size: int,
    causal: bool,
    q_offset: int | Tensor,
    scale: float | None = None,
    return_lse: bool = False,
):
    i = query_positions(q, q_offset)[..., None]
    j = torch.arange(k.shape[1], device=q.device)
    mask = (i - j <= sliding_window_size) & (j - i <= (0 if causal else sliding_window_size))
    return attend(scores(q, k, scale), v, mask[:, None, None], return_lse)


# the gate


def combine_branches(outs: tuple[Tensor, Tensor, Tensor], gates: Tensor) -> Tensor:
    """`sum_b gate_b out_b`: gates [b i h 3] in the order compressed, selected, window."""
    cmp, sel, win = (g[..., None].to(o.dtype) for g, o in zip(gates.unbind(-1), outs, strict=True))
    return cmp * outs[0] + sel * outs[1] + win * outs[2]
