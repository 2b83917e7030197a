"""The learned ranking of blocks (`importance="index"`): index queries and keys, and their loss.

An index query for each KV head and index keys of tokens score blocks as `importance="max"` does, a
single-head problem for each group. Nothing of a layer's output has a gradient in the index. It
learns from the exact attention of a few sampled queries.

b  batch     k  KV heads    g  query heads of a group    m  sampled queries
t  tokens    c  blocks      s  tokens of a block         d, e  widths
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor

from . import blocks
from .checks import INTEGER_DTYPES, check_choice, check_generator, check_int, is_strided, refusal
from .compat import no_autocast
from .config import NSAConfig
from .ops import reference
from .varlen import Documents, Layout

# what a block is worth: the norm of what it adds to the output, or its attention mass
WEIGHTS = ("output", "mass")


def check_ranking(queries: Any, weights: Any, generator: Any, cache: Any) -> None:
    """Check what a call of a layer or a model asks of learned rankings."""
    check_choice("ranking_weights", weights, WEIGHTS)
    check_generator(generator)
    if queries is not None and cache is not None:
        raise ValueError("ranking_queries must be None with a cache")


def sampled(
    queries: int | Tensor, n: int, generator: Any, device: torch.device,
    name: str = "ranking_queries", rows: int | None = None,
) -> Tensor:  # fmt: skip
    """Positions of queries: those given, [m] or [rows m], -1 for none; or m at random, in order."""
    if isinstance(queries, Tensor):
        fits = is_strided(queries) and queries.ndim in (1, 2)
        fits = fits and queries.shape[:-1] in ((), (rows,)) and queries.dtype in INTEGER_DTYPES
        if not fits or queries.device.type not in ("cpu", device.type):
            shapes = "[m]" if rows is None else f"[m] or [{rows}, m]"
            raise refusal(name, f"{shapes} integers", queries)
        is_on_host = queries.device.type == "cpu" and not torch.compiler.is_compiling()
        least, is_known = 1 - queries.ndim, is_on_host and queries.numel() > 0
        if is_known and not least <= int(queries.min()) <= int(queries.max()) < n:
            raise refusal(name, f"positions from {least} to {n - 1}", queries.tolist())
        return queries.to(device, torch.long)
    m = min(check_int(name, queries, 1), n)
    source = "cpu" if generator is None else generator.device
    drawn = torch.randperm(n, generator=generator, device=source)[:m]
    return drawn.sort().values.to(device)


def block_targets(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, visible: Tensor, config: Any, weigh: str
) -> Tensor:
    """What each block [b k m c] is worth to queries q [b k g m d] of keys and values [b k t d] that
    they see, [b|1 m t], with sinks [h]: its attention mass, or by "output" the norm of what it
    adds to the output, `|| sum_(j in c) p_j (v_j - out) ||`; summed over the heads of a group."""
    s, scale = config.selection_block_size, config.scale_of(q.shape[-1])
    logits = einsum(q, k, "b k g m d, b k t d -> b k g m t") * scale
    logits = reference.capped(logits, config.soft_cap)
    p, _ = reference.masked_softmax(*reference.append_sinks(logits, visible[:, None, None], sinks))
    p = p[..., : k.shape[2]]
    pad = -p.shape[-1] % s
    block_probs = rearrange(F.pad(p, (0, pad)), "b k g m (c s) -> b k g m c s", s=s)
    mass = block_probs.sum(dim=-1)
    if weigh == "mass":
        return mass.sum(dim=2)
    # contiguous: padded by nothing, v keeps strides that a compiled graph does not foresee
    values = rearrange(F.pad(v.contiguous(), (0, 0, 0, pad)), "b k (c s) e -> b k c s e", s=s)
    added = einsum(block_probs, values, "b k g m c s, b k c s e -> b k g m c e")
    out = added.sum(dim=-2, keepdim=True)
    return (added - mass[..., None] * out).norm(dim=-1).sum(dim=2)


def select_queries(t: Tensor, position: Tensor) -> Tensor:
    """Rows [b|1 m] of t [b h n d]: [b h m d]."""
    if len(position) == 1:
        return t[:, :, position[0]]
    return t.gather(2, position[:, None, :, None].expand(-1, t.shape[1], -1, t.shape[3]))


def ranking_loss(
    config: NSAConfig, sinks: Tensor | None, tensors: dict[str, Tensor], queries: int | Tensor,
    documents: Documents | None, generator: torch.Generator | None = None, weigh: str = "output",
    layout: Layout | None = None, positions: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The KL divergence of the index's softmax over candidate blocks from what these blocks are
    worth (`block_targets`), a mean over m sampled queries of each sequence and KV head that have
    two candidates or more: O(m t) in time and memory. `tensors` [b h n d] are those of `attend`.
    Queries are entries of the caller's rows, which `layout` moved to rows of `documents`, or rows
    of q that are at `positions` [b n] of the keys."""
    s, K, device = config.selection_block_size, config.kv_heads, tensors["q"].device
    b, n = len(tensors["q"]), tensors["k"].shape[2]
    length = tensors["q"].shape[2] if layout is None else layout.target.shape[1]
    i = sampled(queries, length, generator, device, rows=b)
    i = i if n else i[..., :0]  # rows of padding alone have no positions
    i = torch.atleast_2d(i if layout is None else layout.positions(i))
    is_token, row = i >= 0, i.clamp(min=0)
    position = row if positions is None else positions[: len(row)].gather(1, row)
    if documents is not None:
        position = position.expand(b, -1)
        rows = row.expand(b, -1)
        documents = Documents(*(t.expand(b, -1).gather(1, rows) for t in documents))
        is_token = is_token & (position < documents.last)  # others lie between documents
    j = torch.arange(n, device=device)
    visible = (j <= position[..., None]) | (not config.causal)
    visible = reference.keep_document(visible, j, documents, slice(None))

    with no_autocast(device.type):
        q, k, v, cq, ck = (tensors[name].float() for name in ("q", "k", "v", "cq", "ck"))
        if ck.shape[2] == 0:  # no window is complete: no block is a candidate
            ck = F.pad(ck, (0, 0, 0, 1))
        with torch.no_grad():
            heads = rearrange(select_queries(q, row), "b (k g) m d -> b k g m d", k=K)
            if sinks is not None:
                sinks = sinks[config.branches.index("selected")].detach()
            # detached: without gradients there are tangents of forward mode still
            exact = heads.detach(), k.detach(), v.detach()
            target = block_targets(*exact, sinks, visible, config, weigh)
            c = torch.arange(blocks.num_blocks(n, s), device=device)
            candidate = reference.candidates(position, c, len(c), documents, config)
            candidate = (candidate & is_token[..., None])[:, None]
            target = target.masked_fill(~candidate, 0.0)
            total = target.sum(dim=-1, keepdim=True)
            target = target / total.clamp(min=torch.finfo(total.dtype).tiny)
            counts = (candidate.sum(dim=-1) > 1) & (total[..., 0] > 0)
        scores = reference.importance_scores(
            select_queries(cq, row).transpose(1, 2),
            ck.expand(-1, K, -1, -1).transpose(1, 2), None,
            reference.visible_windows(position, ck.shape[2], config.d, config.causal, documents), c,
            config.for_functions.but(scale=None),
        )  # fmt: skip
        # finite: a row of -inf alone, of a query without candidates, would have NaN gradients
        logs = scores.masked_fill(~candidate, torch.finfo(scores.dtype).min).log_softmax(dim=-1)
        logs = logs.masked_fill(~candidate, 0.0)
        entropy = torch.special.xlogy(target, target)
        divergence = (entropy - target * logs).sum(dim=-1)
        return (divergence * counts).sum() / counts.sum().clamp(min=1)
