"""The specification of the attention branches in plain PyTorch, on any device and in any dtype.
`topk.py` specifies the selection. Every backend computes these functions.

The code favours reading and comparison over speed: dense masks, a softmax, memory O(T S). It
computes in its inputs' dtype, and `eager.py` makes that dtype fp32 or better. Autograd gives the
gradients. A masked key never reaches a product, even if it is NaN or infinite (`products.py`).

    b  batch         i  query       h  query heads        d  key width
    k  KV heads      j  key         g  query heads of one KV head
    w  windows       c  blocks      r  heads that rank: k (shared by the group) or h (each its own)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange, repeat
from torch import Tensor

from ... import blocks
from ...compat.graphs import free_size
from ...varlen import Documents
from .products import apart, is_finite, isolated, logits, may_look, weighted


def query_positions(q: Tensor, q_offset: int | Tensor) -> Tensor:
    """Absolute position of each query: [1, T], or [b, T] where offsets differ by sequence."""
    i = torch.arange(q.shape[1], device=q.device)
    return i[None] + (q_offset[:, None] if isinstance(q_offset, Tensor) else q_offset)


def scores(q: Tensor, k: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """Scaled logits [b k g i j] of q [b i (k g) d] and k [b j k d]. All pairs get logits, but only
    pairs in the mask get gradients."""
    q = rearrange(q, "b i (k g) d -> b k g i d", k=k.shape[2])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return logits(q, rearrange(k, "b j k d -> b k j d"), mask) * scale


def capped(sim: Tensor, soft_cap: float | None) -> Tensor:
    """`c tanh(logit / c)`"""
    return sim if soft_cap is None else soft_cap * (sim / soft_cap).tanh()


def with_sinks(sim: Tensor, mask: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
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
    sim: Tensor,
    v: Tensor,
    mask: Tensor,
    return_lse: bool = False,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
    gate: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of logits [b k g i j] over v [b j k e]: [b i (k g) e], and on request its
    log-sum-exp [b i (k g)]. Gates multiply the capped logits. A sink is one more logit of the
    softmax with value 0."""
    v = rearrange(v, "b j k e -> b k j e")

    def attention(sim: Tensor, gate: Tensor | None = None) -> tuple[Tensor, ...]:
        keys, sim = sim.shape[-1], capped(sim, soft_cap)
        sim = sim if gate is None else sim.masked_fill(~mask, 0.0) * gate
        sim, visible = with_sinks(sim, mask, sinks)
        probs, sim = masked_softmax(sim, visible)
        out = weighted(probs[..., :keys], v, mask)
        if not return_lse:
            return (out,)
        if sim.shape[-1] == 0:
            return out, sim.new_full(sim.shape[:-1], float("-inf"))
        return out, sim.logsumexp(dim=-1).masked_fill(~visible.any(dim=-1), float("-inf"))

    out, *lse = isolated(attention, sim, gate)
    out = rearrange(out, "b k g i e -> b i (k g) e")
    return (out, rearrange(lse[0], "b k g i -> b i (k g)")) if return_lse else out


# branch 1: compressed


def visible_windows(
    i: Tensor, num_windows: int, d: int, causal: bool, documents: Documents | None = None
) -> tuple[Tensor, Tensor]:
    """The first window that each query at position i sees, and one past the last."""
    first, end = torch.zeros_like(i), torch.full_like(i, num_windows)
    if documents is not None:
        first, last = documents.windows(d, causal=causal)
        end = last.clamp(max=num_windows)
    if causal:
        end = end.minimum(blocks.num_visible_windows(i, d))
    return first, end


def compressed_scores(
    q: Tensor,
    ck: Tensor,
    mem_k: Tensor | None,
    visible: tuple[Tensor, Tensor],
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Logits [b k g i (m w)] over memory and windows, and their mask [b|1 1 1 i (m w)]."""
    memory, (first, end) = 0 if mem_k is None else mem_k.shape[1], visible
    w = torch.arange(-memory, ck.shape[1], device=q.device)
    mask = ((w >= first[..., None]) & (w < end[..., None])) | (w < 0)
    if mem_k is not None:
        ck = torch.cat((repeat(mem_k, "k m d -> b m k d", b=ck.shape[0]), ck), dim=1)
    mask = rearrange(mask, "b i j -> b 1 1 i j")
    return scores(q, ck, mask, scale), mask


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
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    documents: Documents | None = None,
):
    i = query_positions(q, q_offset)
    visible = visible_windows(i, ck.shape[1], compress_block_sliding_stride, causal, documents)
    sim, mask = compressed_scores(q, ck, mem_k, visible, scale)
    if mem_v is not None:
        cv = torch.cat((repeat(mem_v, "k m d -> b m k d", b=cv.shape[0]), cv), dim=1)
    return attend(sim, cv, mask, return_lse, sinks, soft_cap)


# branch 2: selected


def forced_blocks(
    i: Tensor,
    c: Tensor,
    s: int,
    *,
    causal: bool,
    num_initial_blocks: int,
    num_local_blocks: int,
    documents: Documents | None = None,
) -> Tensor:
    """Blocks that a query reads without ranking, [b|1 i] x [c] -> [b|1 i c]: the initial blocks
    and, if causal, the `num_local_blocks` that end with the query's own block."""
    first = torch.zeros_like(i) if documents is None else documents.blocks(s)[0]
    first = first[..., None]
    forced = c < first + num_initial_blocks
    if causal:
        own = (i // s)[..., None]
        forced = (forced | (c > own - num_local_blocks)) & (c <= own)
    return forced & (c >= first)


def same_document(j: Tensor, documents: Documents) -> Tensor:
    """Which keys j lie in each query's document, [b i j]."""
    return (j >= documents.first[..., None]) & (j < documents.last[..., None])


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


def block_numbers(S: int, s: int, device: torch.device) -> Tensor:
    """The block of each of S keys, [S]: the number of blocks that begin up to the key, less one.
    `j // s` fails: torch's CPU compiler splits that loop by s and drops the last S % s keys."""
    begins = torch.arange(S, device=device) % s == 0
    return begins.cumsum(0) - 1


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
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    documents: Documents | None = None,
):
    s, S, kv = selection_block_size, k.shape[1], k.shape[2]
    i = query_positions(q, q_offset)
    j = torch.arange(S, device=q.device)
    num_blocks = free_size(blocks.num_blocks(S, s))
    c = torch.arange(num_blocks, device=q.device)

    chosen = torch.ones_like(block_indices, dtype=torch.bool)
    chosen = scatter_blocks(chosen, block_indices, num_blocks, False)
    forced = forced_blocks(
        i,
        c,
        s,
        causal=causal,
        num_initial_blocks=num_initial_blocks,
        num_local_blocks=num_local_blocks,
        documents=documents,
    )
    # [b r i c] -> [b k g' i j] with g' = 1 if a group shares its block indices
    attended = rearrange(chosen | forced[:, None], "b (k g) i c -> b k g i c", k=kv)
    of_key = block_numbers(S, s, q.device)
    mask = attended.index_select(-1, of_key)
    if causal:
        mask = mask & (j <= i[..., None])[:, None, None]
    if documents is not None:
        mask = mask & same_document(j, documents)[:, None, None]

    gate = None
    if gates is not None:
        gate = scatter_blocks(gates.to(q.dtype), block_indices, num_blocks, 1.0)
        gate = gate.masked_fill(forced[:, None], 1.0)
        gate = rearrange(gate, "b (k g) i c -> b k g i c", k=kv).index_select(-1, of_key)
    return attend(scores(q, k, mask, scale), v, mask, return_lse, sinks, soft_cap, gate)


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
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    documents: Documents | None = None,
):
    i = query_positions(q, q_offset)[..., None]
    j = torch.arange(k.shape[1], device=q.device)
    mask = (i - j <= sliding_window_size) & (j - i <= (0 if causal else sliding_window_size))
    if documents is not None:
        mask = mask & same_document(j, documents)
    mask = mask[:, None, None]
    return attend(scores(q, k, mask, scale), v, mask, return_lse, sinks, soft_cap)


# the gate


def combine_branches(outs: Sequence[Tensor], gates: Tensor) -> Tensor:
    """`sum_b gate_b out_b`: gates [b i h branches] in the order compressed, selected, window."""
    pairs = [(g[..., None].to(o.dtype), o) for g, o in zip(gates.unbind(-1), outs, strict=True)]
    first, *rest = (g * o for g, o in pairs)
    out = sum(rest, start=first)
    if not may_look(out) or is_finite(out):
        return out
    first, *rest = (apart(g, o) for g, o in pairs)
    return sum(rest, start=first)
