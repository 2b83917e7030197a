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
from .checks import check_int, describe
from .compat import no_autocast
from .config import NSAConfig
from .ops.reference import (
    append_sinks,
    candidates,
    capped,
    importance_scores,
    masked_softmax,
    visible_windows,
)
from .varlen import Documents

# what a block is worth: the norm of what it adds to the output, or its attention mass
WEIGHTS = ("output", "mass")


def sampled(
    queries: int | Tensor, n: int, generator: Any, device: Any, name: str = "ranking_queries"
) -> Tensor:
    """Positions [m] of queries: those given, or that many at random, in order."""
    if isinstance(queries, Tensor):
        if queries.ndim != 1 or queries.is_floating_point() or queries.dtype == torch.bool:
            raise ValueError(f"{name} must be [m] integers, got {describe(queries)}")
        is_on_host = queries.device.type == "cpu" and not torch.compiler.is_compiling()
        if is_on_host and queries.numel() and not 0 <= int(queries.min()) <= int(queries.max()) < n:
            raise ValueError(f"{name} must be positions from 0 to {n - 1}, got {queries.tolist()}")
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
    logits = capped(einsum(q, k, "b k g m d, b k t d -> b k g m t") * scale, config.soft_cap)
    p, _ = masked_softmax(*append_sinks(logits, visible[:, None, None], sinks))
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
    config: NSAConfig,
    sinks: Tensor | None,
    tensors: dict[str, Tensor],
    queries: int | Tensor,
    documents: Documents | None,
    generator: torch.Generator | None = None,
    weigh: str = "output",
    rows: Tensor | None = None,
) -> Tensor:
    """The KL divergence of the index's softmax over candidate blocks from what these blocks are
    worth (`block_targets`), a mean over m sampled queries of each sequence and KV head that have
    two candidates or more: O(m t) in time and memory. `tensors` [b h n d] are those of `attend`.
    Queries are entries of the caller's rows, whose positions in these tensors `rows` [b t] has, -1
    for none; or with `documents` these positions themselves, [b m]."""
    s, K, n = config.selection_block_size, config.kv_heads, tensors["q"].shape[2]
    device, count = tensors["q"].device, 1 if documents is None else tensors["q"].shape[0]
    if documents is not None and isinstance(queries, Tensor) and queries.ndim == 2:
        if queries.is_floating_point() or queries.dtype == torch.bool:
            raise ValueError(f"ranking_queries must be [b, m] integers, got {describe(queries)}")
        i = queries.to(device, torch.long)
    else:
        i = sampled(queries, n if rows is None else rows.shape[1], generator, device)[None]
        i = i if rows is None else rows[:, i[0]]
    is_token, position = i >= 0, i.clamp(min=0).expand(count, -1)
    if documents is not None:
        bounds = (bound.expand(count, -1).gather(1, position) for bound in documents)
        documents = Documents(*bounds)
    j = torch.arange(n, device=i.device)
    visible = (j <= position[..., None]) if config.causal else torch.ones_like(j, dtype=torch.bool)
    visible = visible.expand(*position.shape, -1)
    if documents is not None:
        visible = visible & (j >= documents.first[..., None]) & (j < documents.last[..., None])
        visible = visible & (position < documents.last)[..., None]  # padding sees nothing

    with no_autocast(device.type):
        q, k, v, cq, ck = (tensors[name].float() for name in ("q", "k", "v", "cq", "ck"))
        if ck.shape[2] == 0:  # no window is complete: no block is a candidate
            ck = F.pad(ck, (0, 0, 0, 1))
        with torch.no_grad():
            heads = rearrange(select_queries(q, position), "b (k g) m d -> b k g m d", k=K)
            if sinks is not None:
                sinks = sinks[config.branches.index("selected")].detach()
            # detached: without gradients there are tangents of forward mode still
            exact = heads.detach(), k.detach(), v.detach()
            target = block_targets(*exact, sinks, visible, config, weigh)
            c = torch.arange(blocks.num_blocks(n, s), device=device)
            candidate = candidates(position, c, len(c), documents, config)
            candidate = (candidate & is_token[..., None])[:, None]
            target = target.masked_fill(~candidate, 0.0)
            total = target.sum(dim=-1, keepdim=True)
            target = target / total.clamp(min=torch.finfo(total.dtype).tiny)
            counts = (candidate.sum(dim=-1) > 1) & (total[..., 0] > 0)
        scores = importance_scores(
            select_queries(cq, position).transpose(1, 2),
            ck.expand(-1, K, -1, -1).transpose(1, 2), None,
            visible_windows(position, ck.shape[2], config.d, config.causal, documents), c,
            config.for_functions.but(scale=None),
        )  # fmt: skip
        logs = scores.masked_fill(~candidate, float("-inf")).log_softmax(dim=-1)
        logs = logs.masked_fill(~candidate, 0.0)
        entropy = torch.special.xlogy(target, target)
        divergence = (entropy - target * logs).sum(dim=-1)
        return (divergence * counts).sum() / counts.sum().clamp(min=1)
