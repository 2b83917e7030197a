"""The specification of Native Sparse Attention in eager PyTorch: `docs/semantics.md` as code. Every
backend computes these functions.

The code favours reading over speed: dense masks, a softmax, memory O(T S), gradients by autograd.
`chunked.py` runs the same functions in linear memory: it passes its own `attend`, `rank` and
`gate`. A masked key has weight 0 and no gradient. As in SDPA, 0 times a NaN or infinite value is
NaN, even if the mask hides that value; padding is zeros (`varlen.py`) before it comes here.

    b  batch         i  query        h  query heads        d  key width
    k  KV heads      j  key          g  query heads of one KV head
    w  windows       c  blocks       r  heads that rank: k (shared by the group) or h (each its own)
    n  slots         t  queries that are ranked: one of each group of `selection_stride`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, reduce, repeat
from torch import Tensor

from .. import blocks
from ..compat import free_size, is_exporting, no_autocast
from ..config import AttentionConfig
from ..varlen import Documents
from .call import Call

# softmax attention


def upcast(*tensors: Any) -> tuple[Any, ...]:
    """Cast to fp32 or better for products and softmax. fp16 overflows if unscaled logits pass
    65504; bf16 rounds logits by 1 in 256. None stays None."""
    float32 = torch.float32
    return tuple(t if t is None else t.to(torch.promote_types(t.dtype, float32)) for t in tensors)


def times(a: Tensor, x: Tensor) -> Tensor:
    """[b k g i j] times [b k j y] as one matmul for all heads of a group. An exported program keeps
    the axes apart, since merging them would fix the lengths."""
    if is_exporting():
        return torch.matmul(a, x[:, :, None])
    b, k, g, i, j = a.shape
    return torch.matmul(a.reshape(b, k, g * i, j), x).reshape(b, k, g, i, x.shape[-1])


class Visibility(NamedTuple):
    """Which keys each query sees, by slices of queries and keys."""

    # [b|1 k|1 g|1 i j], or None if each of these queries sees each of these keys
    mask: Callable[[slice, slice], Any]
    # the first key, and one past the last, that queries at positions `first` to `last` may see; it
    # may pass the ends of the keys
    key_range: Callable[[int, int], tuple[int, int]]
    q_offset: int | Tensor  # position of query 0
    # the factors [b k g|1 i j] of logits, from the gates of these queries
    expand_gates: Callable[[Tensor, slice, slice], Tensor] = lambda gates, rows, keys: gates


Keys = tuple[Tensor, Tensor, Visibility]


def query_positions(q: Tensor, q_offset: int | Tensor) -> Tensor:
    """Absolute position of each query: [1, T], or [b, T] where offsets differ by sequence."""
    i = torch.arange(q.shape[1], device=q.device)
    return i[None] + (q_offset[:, None] if isinstance(q_offset, Tensor) else q_offset)


def slice_documents(documents: Documents | None, rows: slice | Tensor) -> Documents | None:
    return None if documents is None else Documents(*(bound[:, rows] for bound in documents))


def keep_document(mask: Tensor, j: Tensor, documents: Documents | None, rows: slice) -> Tensor:
    """The mask [b|1 i j] without keys j of other documents."""
    if documents is None:
        return mask
    first, last = (bound[:, rows, None] for bound in documents)
    return mask & (j >= first) & (j < last)


def scores(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """Scaled logits [b k g i j] of q [b i (k g) d] and k [b j k d]."""
    q = rearrange(q, "b i (k g) d -> b k g i d", k=k.shape[2])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return times(q, rearrange(k, "b j k d -> b k j d").mT) * scale


def capped(sim: Tensor, soft_cap: float | None) -> Tensor:
    """`c tanh(logit / c)`"""
    return sim if soft_cap is None else soft_cap * (sim / soft_cap).tanh()


def append_sinks(sim: Tensor, mask: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logits [b k g i j] and their mask, with the sinks [(k g)] as one more visible column."""
    if sinks is None:
        return sim, mask
    column = rearrange(sinks.to(sim.dtype), "(k g) -> 1 k g 1 1", k=sim.shape[1])
    sim = torch.cat((sim, column.expand(*sim.shape[:-1], 1)), dim=-1)
    # not F.pad: torch's CPU compiler does not vectorize padding a bool tensor with True
    return sim, torch.cat((mask, mask.new_ones(()).expand(*mask.shape[:-1], 1)), dim=-1)


def masked_softmax(sim: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last axis where mask is True; returns (probabilities, masked logits).

    A row that sees no key has probability 0 everywhere and no gradient. Zeros replace its logits
    before the softmax, so no NaN forms.
    """
    empty = ~mask.any(dim=-1, keepdim=True)
    sim = sim.masked_fill(~mask, float("-inf")).masked_fill(empty, 0.0)
    return sim.softmax(dim=-1).masked_fill(empty, 0.0), sim


def attend(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, *, gates: Tensor | None = None,
    scale: float | None = None, soft_cap: float | None = None, sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Softmax attention of q [b i h d] over k [b j k d] and v [b j k e]: [b i h e], and on request
    its log-sum-exp [b i h]. Gates multiply the capped logits. A sink [h] is one more logit of the
    softmax with value 0."""
    everything = slice(None), slice(None)
    sim, mask = capped(scores(q, k, scale), soft_cap), visibility.mask(*everything)
    if gates is not None:
        sim = sim * visibility.expand_gates(gates, *everything)
    sim, mask = append_sinks(sim, mask, sinks)
    probs, sim = masked_softmax(sim, mask)
    out = times(probs[..., : k.shape[1]], rearrange(v, "b j k e -> b k j e"))
    out = rearrange(out, "b k g i e -> b i (k g) e")
    if not return_lse:
        return out
    lse = sim.logsumexp(dim=-1).masked_fill(~mask.any(dim=-1), float("-inf"))
    return out, rearrange(lse, "b k g i -> b i (k g)")


def attend_branch(
    call: Call, config: AttentionConfig, attend: Callable[..., Any] = attend,
    return_lse: bool = False,
) -> Any:  # fmt: skip
    """The attention of one branch: over the keys and values that its function below returns, under
    their visibility."""
    k, v, visibility = BRANCHES[config.branches[0]](call, config)
    return attend(
        call.q, k, v, visibility, gates=call.gates, scale=config.scale, soft_cap=config.soft_cap,
        sinks=None if call.sinks is None else call.sinks[0], return_lse=return_lse,
    )  # fmt: skip


# branch 1: compressed


def visible_windows(
    i: Tensor, num_windows: int, d: int, causal: bool, documents: Documents | None = None
) -> tuple[Tensor, Tensor]:
    """The first window that each query at position i sees, and one past the last: causally the
    windows that end before the query, `(w + 1) d - 1 < i`."""
    first, end = torch.zeros_like(i), torch.full_like(i, num_windows)
    if documents is not None:
        first, last = documents.windows(d, causal=causal)
        end = last.clamp(max=num_windows)
    if causal:
        end = end.minimum(blocks.num_visible_windows(i, d))
    return first, end


def window_mask(visible: tuple[Tensor, Tensor], w: Tensor) -> Tensor:
    """Which windows w each query sees, [b|1 1 1 i w]. All see memory, which has w < 0."""
    first, end = (bound[..., None] for bound in visible)
    return rearrange(((w >= first) & (w < end)) | (w < 0), "b i w -> b 1 1 i w")


def prepend_memory(memory: Tensor | None, x: Tensor) -> Tensor:
    """Learned memory [k m d] before the windows [b w k d] of every sequence."""
    if memory is None:
        return x
    return torch.cat((repeat(memory, "k m d -> b m k d", b=x.shape[0]), x), dim=1)


def compressed_keys(call: Call, config: AttentionConfig) -> Keys:
    """Memory and the visible windows."""
    d, W = config.d, call.k.shape[1]
    k, v = prepend_memory(call.mem_k, call.k), prepend_memory(call.mem_v, call.v)
    i = query_positions(call.q, call.q_offset)
    first, end = visible_windows(i, W, d, config.causal, call.documents)
    w = torch.arange(W - k.shape[1], W, device=i.device)

    def mask(rows: slice, keys: slice) -> Tensor:
        return window_mask((first[:, rows], end[:, rows]), w[keys])

    def key_range(first: int, last: int) -> tuple[int, int]:
        return 0, len(w) - W + (blocks.num_visible_windows(last, d) if config.causal else W)

    return k, v, Visibility(mask, key_range, call.q_offset)


# branch 2: selected


def forced_blocks(
    i: Tensor, c: Tensor, config: AttentionConfig, documents: Documents | None = None
) -> Tensor:
    """Blocks that a query reads without ranking, [b|1 i] x [c] -> [b|1 i c]: the initial blocks
    and, if causal, the `num_local_blocks` that end with the query's own block."""
    s = config.selection_block_size
    first = torch.zeros_like(i) if documents is None else documents.blocks(s)[0]
    first = first[..., None]
    forced = c < first + config.num_initial_blocks
    if config.causal:
        own_block = (i // s)[..., None]
        forced = (forced | (c > own_block - config.num_local_blocks)) & (c <= own_block)
    return forced & (c >= first)


def scatter_blocks(
    values: Tensor, block_indices: Tensor, num_blocks: int, default: float
) -> Tensor:
    """Scatter the values of the selected blocks over all blocks, [b i r n] -> [b r i c]. Index -1
    is skipped."""
    b, i, r, _ = block_indices.shape
    dense = values.new_full((b, i, r, num_blocks + 1), default)
    index = block_indices.long()
    index = torch.where((index >= 0) & (index < num_blocks), index, num_blocks)
    dense = dense.scatter(-1, index, values)[..., :num_blocks]
    return rearrange(dense, "b i r c -> b r i c")


def selected_keys(call: Call, config: AttentionConfig) -> Keys:
    """The tokens of the forced and the selected blocks, causal inside."""
    q, k, block_indices, documents = call.q, call.k, call.block_indices, call.documents
    s, S, kv = config.selection_block_size, k.shape[1], k.shape[2]
    i, j = query_positions(q, call.q_offset), torch.arange(S, device=q.device)
    num_blocks = free_size(blocks.num_blocks(S, s))
    c = torch.arange(num_blocks, device=q.device)
    # `j // s` fails: torch's CPU compiler splits that loop by s and drops the last S % s keys
    block_of_key = (j % s == 0).cumsum(0) - 1

    def forced(rows: slice) -> Tensor:
        return forced_blocks(i[:, rows], c, config, slice_documents(documents, rows))[:, None]

    def mask(rows: slice, keys: slice) -> Tensor:
        indices = block_indices[:, rows]
        chosen = torch.ones_like(indices, dtype=torch.bool)
        chosen = scatter_blocks(chosen, indices, num_blocks, False)
        # [b r i c] -> [b k g' i j] with g' = 1 if a group shares its block indices
        attended = rearrange(chosen | forced(rows), "b (k g) i c -> b k g i c", k=kv)
        visible_keys = (j[keys] <= i[:, rows, None]) | (not config.causal)
        visible_keys = keep_document(visible_keys, j[keys], documents, rows)
        return attended.index_select(-1, block_of_key[keys]) & visible_keys[:, None, None]

    def expand_gates(gates: Tensor, rows: slice, keys: slice) -> Tensor:
        gate = scatter_blocks(gates.to(q.dtype), block_indices[:, rows], num_blocks, 1.0)
        gate = gate.masked_fill(forced(rows), 1.0)
        gate = rearrange(gate, "b (k g) i c -> b k g i c", k=kv)
        # index_select's CUDA backward adds with atomics, in any order; that of indexing sorts
        return gate[..., block_of_key[keys]]

    def key_range(first: int, last: int) -> tuple[int, int]:
        return 0, last + 1 if config.causal else S

    return k, call.v, Visibility(mask, key_range, call.q_offset, expand_gates)


# branch 3: sliding window


def window_keys(call: Call, config: AttentionConfig) -> Keys:
    """Keys `i - w .. i`, or `i - w .. i + w` if not causal."""
    max_past = config.sliding_window_size
    max_future = 0 if config.causal else max_past
    i = query_positions(call.q, call.q_offset)
    j = torch.arange(call.k.shape[1], device=i.device)

    def mask(rows: slice, keys: slice) -> Tensor:
        distance = i[:, rows, None] - j[keys]
        visible = (distance <= max_past) & (-distance <= max_future)
        return keep_document(visible, j[keys], call.documents, rows)[:, None, None]

    def key_range(first: int, last: int) -> tuple[int, int]:
        return first - max_past, last + max_future + 1

    return call.k, call.v, Visibility(mask, key_range, call.q_offset)


BRANCHES = {"compressed": compressed_keys, "selected": selected_keys, "window": window_keys}


# the gate


def combine_branches(outs: Sequence[Tensor], gates: Tensor) -> Tensor:
    """`sum_b gate_b out_b`: gates [b i h branches] in the order compressed, selected, window."""
    terms = [g[..., None].to(o.dtype) * o for g, o in zip(gates.unbind(-1), outs, strict=True)]
    return sum(terms[1:], start=terms[0])


# importance of blocks


def pool_windows(
    window_scores: Tensor, end: Tensor, c: Tensor, d: int, s: int, by_largest: bool
) -> Tensor:
    """Score of block c: the mean, or the largest, of its windows before `end` [b|1 i],
    [b r i w] -> [b r i c]; 0 without one."""
    w = blocks.first_window_of_block(c, d, s)[:, None]
    w = w + torch.arange(blocks.windows_per_block(d, s), device=c.device)
    exists = (w < end[..., None, None])[:, None]
    values = window_scores[..., w.clamp(max=window_scores.shape[-1] - 1)]
    if by_largest:
        largest = values.masked_fill(~exists, float("-inf")).amax(dim=-1)
        return largest.masked_fill(~exists.any(dim=-1), 0.0)
    return values.masked_fill(~exists, 0.0).sum(dim=-1) / exists.sum(dim=-1).clamp(min=1)


def interpolate_windows(
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
    first, end = (n[:, None, :, None] for n in visible)
    # advanced indexing, since its CUDA backward sorts: gather's adds with atomics, in any order
    W = window_scores.shape[-1]
    w = torch.arange(W, device=c.device)
    edges = [n.clamp(0, W - 1) for n in (first.minimum(end - 1), end - 1)]
    edges = [n.expand(*window_scores.shape[:3], 1) for n in edges]
    # one window of each query
    first_scores, last_scores = (window_scores.gather(-1, edge) for edge in edges)
    nearest = torch.where(w < first, first_scores, window_scores)
    nearest = torch.where(w >= end, last_scores, nearest)

    def pick(w: Tensor) -> Tensor:
        return nearest[..., w.clamp(0, nearest.shape[-1] - 1)]

    covered = t < end[..., None] * d
    token_scores = torch.lerp(pick(left), pick(left + 1), weight).masked_fill(~covered, 0.0)
    return token_scores.sum(dim=-1) / covered.sum(dim=-1).clamp(min=1)


def block_mass(probs: Tensor, c: Tensor, l: int, d: int, s: int) -> Tensor:
    """Score of block c: `sum_w overlap(w, c) / d * p_w`, the probabilities of its windows weighted
    by overlap. If d > s, the score is the probability of the one window over the block."""
    W = probs.shape[-1]
    mass = probs.new_zeros(*probs.shape[:-1], c.shape[0])
    first = blocks.first_window_of_block(c, d, s)
    for w in (first + j for j in range(1 if d > s else (s + l - 1) // d + 1)):
        share = torch.ones_like(w) if d > s else blocks.overlap(w, c, l, d, s) / d
        weight = torch.where((w >= 0) & (w < W), share, 0).to(probs.dtype)
        mass = mass + probs[..., w.clamp(0, W - 1)] * weight
    return mass


def quantize(x: Tensor, largest: Tensor, top: int = 127) -> tuple[Tensor, Tensor]:
    """8-bit integers of x, as floats, where |x| is at most `largest`, and their size: x times a
    factor, rounded half to even, and the inverse of the factor, `cut_quotient(top, largest)`."""
    factor = cut_quotient(top, largest.clamp(min=1e-30))
    return (x * factor).round(), factor.reciprocal()


def cut_quotient(number: int, x: Tensor) -> Tensor:
    """`number / x` cut to 12 bits, so that products with half precisions are exact, however they
    are computed."""
    # torch rounds twice in `127 / x`
    quotient = (torch.full_like(x, number) / x).float()
    return (quotient.view(torch.int32) & -4096).view(torch.float32)


def quantize_queries(q: Tensor, kv_heads: int, config: AttentionConfig) -> Tensor:
    """Integers [b i r d] that rank: of the sum of the heads that share a ranking, or of each of
    them. They have one size for a ranking; a positive factor changes none: it is left out."""
    shared, by_heads = config.query_heads_share_selected_kv, config.ranks_by_heads
    if shared and not by_heads:
        q = reduce(q, "b i (k g) d -> b i k d", "sum", k=kv_heads)
    largest = q.abs().amax(dim=-1, keepdim=True)
    if shared and by_heads:
        largest = reduce(largest, "b i (k g) 1 -> b i k 1", "max", k=kv_heads)
        largest = largest.repeat_interleave(q.shape[2] // kv_heads, dim=2)
    return quantize(q, largest)[0]


def four_bits(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integers x [b c w k d] of the windows w of blocks as codes 0 to 15 for each feature of a
    block, its least integer and its step: x is about `least + code step`."""
    least, largest = x.amin(dim=2, keepdim=True), x.amax(dim=2, keepdim=True)
    step = ((largest - least + 14) / 15).floor().clamp(min=1)
    return ((x - least) * cut_quotient(1, step)).round(), least, step


def quantize_keys(ck: Tensor, d: int, s: int, bits: int = 8) -> tuple[Tensor, Tensor]:
    """Integers of windows [b w k d] and their sizes [b k 1 1 w]: one for each block and KV head. A
    candidate is complete, so that no later key changes its size. With 4 bits those up to 119 take
    one of 16 values for each feature of a block, up to 127."""
    W, per_block = ck.shape[1], blocks.windows_per_block(d, s)
    num_blocks = free_size(-(-W // per_block))
    padding, in_blocks = num_blocks * per_block - W, (num_blocks, per_block)
    largest = F.pad(ck.abs().amax(dim=-1), (0, 0, 0, padding))
    largest = largest.unflatten(1, in_blocks).amax(dim=2)
    largest = repeat(largest, "b c k -> b (c w) k 1", w=per_block).narrow(1, 0, W)
    integers, size = quantize(ck, largest, 127 if bits == 8 else 119)
    if bits == 4:
        code, least, step = four_bits(
            F.pad(integers, (0, 0, 0, 0, 0, padding)).unflatten(1, in_blocks)
        )
        integers = (least + code * step).flatten(1, 2).narrow(1, 0, W)
    return integers, rearrange(size, "b w k 1 -> b k 1 1 w")


def entry_words(m: int, d: int) -> int:
    """Words of 16 bits of a block of m packed keys of width d."""
    return -(-((m + 8) * -(-d // 4) + 2) // 16) * 16


def pack_keys(ck: Tensor, m: int) -> Tensor:
    """Complete blocks of m keys [b n k d] in 4 bits, int16 [b, n / m, k, words]: the integers of
    `quantize_keys`, as `kernels.decode.packed` describes them."""
    (n, _, d), h = ck.shape[1:], -(-ck.shape[3] // 4)
    in_blocks = ck[:, : n // m * m].float().unflatten(1, (n // m, m))
    integers, size = quantize(in_blocks, in_blocks.abs().amax(dim=(2, 4), keepdim=True), 119)
    code, *values = four_bits(F.pad(integers, (0, 4 * h - d)))
    quarters = code.int().transpose(2, 3).unflatten(-1, (4, h))
    words = (quarters << torch.arange(0, 16, 4, device=ck.device)[:, None]).sum(dim=-2).flatten(3)
    # of integers: without a sign of zero
    values = [t[:, :, 0].int().half().view(torch.int16) for t in values]
    entry = torch.cat((words.to(torch.int16), *values, size[:, :, 0].view(torch.int16)), dim=-1)
    return F.pad(entry, (0, entry_words(m, d) - entry.shape[-1]))


def importance_scores(
    q: Tensor, ck: Tensor, mem_k: Tensor | None, visible: tuple[Tensor, Tensor], c: Tensor,
    config: AttentionConfig, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Scores [b r i c] of blocks c for queries that see windows `visible[0]` to `visible[1] - 1`,
    [b|1 i] each, by the rules of `docs/semantics.md`."""
    shared, d, s = config.query_heads_share_selected_kv, config.d, config.selection_block_size
    # sequences without a window, as those of a compiled graph may be, get a hidden one
    hidden = 1 if torch.compiler.is_compiling() or ck.shape[1] == 0 else 0
    if config.importance == "probs":
        k, W = prepend_memory(mem_k, ck), ck.shape[1]
        mask = window_mask(visible, torch.arange(W - k.shape[1], W, device=q.device))
        sim = capped(scores(q, k, config.scale), config.soft_cap)
        probs, _ = masked_softmax(*append_sinks(sim, mask, sinks))
        probs = F.pad(probs[..., k.shape[1] - W : k.shape[1]], (0, hidden))
        probs = probs.sum(dim=2) if shared else rearrange(probs, "b k g i w -> b (k g) i w")
        return block_mass(probs, c, config.compress_block_size, d, s)
    scale, size = config.scale, None
    if config.ranks_by_integers:  # products of integers are exact, and only the sign matters
        scale = config.scale_of(q.shape[-1])
        scale = float((scale > 0) - (scale < 0))
        q = quantize_queries(q, ck.shape[2], config)
        ck, size = quantize_keys(ck, d, s, config.ranking_bits)
    elif shared and not config.ranks_by_heads:
        # the mean over heads of dot products is the dot product with the mean query
        q = rearrange(q, "b i (k g) d -> b i k g d", k=ck.shape[2]).mean(dim=3)
    window_scores = scores(q, ck, scale)
    if size is not None:
        window_scores = window_scores * size
    if shared:  # of one mean query, or those of each head
        window_scores = window_scores.amax(dim=2)
    else:
        window_scores = rearrange(window_scores, "b k g i w -> b (k g) i w")
    window_scores = F.pad(window_scores, (0, hidden))
    if config.interpolated_importance_score:
        return interpolate_windows(window_scores, visible, c, d, s)
    return pool_windows(window_scores, visible[1], c, d, s, config.ranks_by_largest)


# selection


def candidates(
    i: Tensor, c: Tensor, num_ranked: int, documents: Documents | None, config: AttentionConfig
) -> Tensor:
    """Which blocks c below `num_ranked` a query at position i [b|1 i] may select, [b|1 i c]: those
    that are not forced and, if causal, past and wholly visible."""
    s, num_initial = config.selection_block_size, config.num_initial_blocks
    candidate = ((c >= num_initial) & (c < num_ranked)).expand(*i.shape, -1)
    if documents is not None:
        first, end = (t[..., None] for t in documents.blocks(s))
        candidate = (c >= first + num_initial) & (c < end)
    if config.causal:
        complete = blocks.num_complete_blocks(i, config.d, s)[..., None]
        is_past = c <= (i // s)[..., None] - max(config.num_local_blocks, 1)
        candidate = candidate & is_past & (c < complete)
    return candidate


def block_scores(call: Call, i: Tensor, config: AttentionConfig) -> tuple[Tensor, Tensor]:
    """Scores [b r t c] of n blocks or more, in fp32 or better (in bf16 half of them would tie), for
    the queries q [b t h d] of a call, at positions i [b|1 t]; and which blocks are candidates,
    [b|1 1 t c]."""
    q, ck, mem_k, sinks = upcast(call.q, call.ck, call.mem_k, call.sinks)
    W, n, d, s = ck.shape[1], config.num_selected_blocks, config.d, config.selection_block_size
    complete = blocks.num_complete_blocks(W * d, d, s)
    num_ranked = free_size(complete if config.causal else blocks.num_blocks(call.seq_len, s))
    # a compiled graph runs other lengths, so it always appends n columns
    missing = n if torch.compiler.is_compiling() else max(0, n - num_ranked)
    c = torch.arange(num_ranked + missing, device=q.device)
    visible = visible_windows(i, W, d, config.causal, call.documents)
    sinks = None if sinks is None else sinks[0]
    with no_autocast(q.device.type):
        values = importance_scores(q, ck, mem_k, visible, c, config, sinks)
    return values, candidates(i, c, num_ranked, call.documents, config)[:, None]


def rank(call: Call, i: Tensor, config: AttentionConfig) -> Tensor:
    """Block indices [b t r n] of the top-n candidates, best first, -1 for an empty slot. The
    earlier block wins a tie."""
    with torch.no_grad():
        if config.num_selected_groups:  # by tokens, in the groups at `block_indices`
            values, candidate = block_scores(call.but(ck=call.k), i, config.stages[1])
            groups = rearrange(call.block_indices, "b t r n -> b r t n 1")
            c = torch.arange(values.shape[-1], device=values.device)
            candidate = candidate & (groups == c // blocks.GROUP).any(dim=-2)
        else:
            values, candidate = block_scores(call, i, config)
        masked = values.masked_fill(~candidate, float("-inf"))
        order = masked.sort(dim=-1, descending=True, stable=True).indices
        order = order[..., : config.num_selected_blocks]
        order = order.where(candidate.expand_as(masked).gather(-1, order), -1)
        return rearrange(order.to(torch.int32), "b r t n -> b t r n")


def gate(call: Call, i: Tensor, config: AttentionConfig, block_indices: Tensor) -> Tensor:
    """Gates [b t r n] of selected blocks: value 1, with the gradient of the block's score (`probs`)
    or of its softmax over the candidates and one constant logit of -1e3."""
    values, candidate = block_scores(call, i, config)
    if config.importance != "probs":
        values = F.pad(values.masked_fill(~candidate, float("-inf")), (1, 0), value=-1e3)
        values = values.softmax(dim=-1)[..., 1:]
    index = rearrange(block_indices.long(), "b t r n -> b r t n")
    values = values.gather(-1, index.clamp(0, values.shape[-1] - 1)).masked_fill(index < 0, 0.0)
    return rearrange(1.0 + (values - values.detach()), "b r t n -> b t r n")


def share(ranked: Tensor, group: Tensor, default: Tensor) -> Tensor:
    """Give each group's ranking [b t r n] to its tokens. Tokens of group -1 get `default`."""
    # advanced indexing, since its CUDA backward sorts: gather's adds with atomics, in any order
    row = torch.arange(ranked.shape[0], device=ranked.device)[:, None]
    return torch.where(group[..., None, None] < 0, default, ranked[row, group.clamp(min=0)])


def ranked_queries(call: Call, config: AttentionConfig) -> tuple[Call, Tensor, Any, Any]:
    """The call of the queries that are ranked, and their positions [b|1 t]; with a stride these are
    the first of each group, whose ranking the group shares, and follow their rows [b t] and each
    query's group [b|1 i]. A group that began before this call is -1."""
    q, documents, stride = call.q, call.documents, config.selection_stride
    i = query_positions(q, call.q_offset)
    if stride == 1:
        return call, i, None, None
    T, start = q.shape[1], i[:, :1]
    group = i // stride - blocks.ceil_div(start, stride)
    groups = free_size(blocks.ceil_div(T, stride))
    t = -start % stride + stride * torch.arange(groups, device=q.device)
    t = t.clamp(max=T - 1)
    rows = t.expand(q.shape[0], -1)
    if documents is not None:
        documents = Documents(*(bound.gather(1, rows) for bound in documents))
    q = q.gather(1, rows[..., None, None].expand(-1, -1, *q.shape[2:]))
    return call.but(q=q, documents=documents), i.gather(1, t), rows, group


def selection_gates(
    call: Call, config: AttentionConfig, block_indices: Tensor, gate: Callable[..., Tensor] = gate
) -> Tensor:
    """Straight-through gates of block indices [b i r n]: ones of float32 (float64 for float64
    inputs), with gradients for q, ck, mem_k and sinks; see `gate`. With a stride, scores are those
    of each group's first query, and tokens whose group began before this call have gates without
    gradient."""
    if block_indices.numel() == 0:
        dtype = torch.promote_types(call.q.dtype, torch.float32)
        return call.q.new_ones(block_indices.shape, dtype=dtype)
    call, i, rows, group = ranked_queries(call, config)
    if group is None:
        return gate(call, i, config, block_indices)
    rows = rows[..., None, None].expand(-1, -1, *block_indices.shape[2:])
    gates = gate(call, i, config, block_indices.gather(1, rows))
    return share(gates, group, gates.new_ones(()))


def select_blocks(
    call: Call, config: AttentionConfig, rank: Callable[..., Tensor] = rank
) -> Tensor:
    """Block indices [b i r n], int32, by the queries q and windows ck of a call."""
    q, shared = call.q, config.query_heads_share_selected_kv
    shape = *q.shape[:2], (call.ck if shared else q).shape[2], config.num_selected_blocks
    if 0 in shape:
        return torch.full(shape, -1, dtype=torch.int32, device=q.device)
    if config.num_selected_groups:
        call = call.but(block_indices=select_blocks(call, config.stages[0], rank))
    queries, i, _, group = ranked_queries(call, config)
    indices = rank(queries, i, config)
    if group is None:
        return indices
    leader = call.leader_indices
    return share(indices, group, indices.new_full((), -1) if leader is None else leader[:, None])
