"""The branches of the specification in memory linear in the length. They compute `attention.py`
tile by tile, with its arguments and equal up to rounding.

    b  batch    i  query    h  query heads    k  KV heads    j  key    m  memory    d  key width
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import repeat
from torch import Tensor

from ...varlen import Documents
from .attention import query_positions
from .bands import Band, Visible, band_attention
from .gathered import Choice, Gathered
from .online import Plan
from .products import isolated

# Scores of a tile, of all heads. On the CPU these are 4 MiB of fp32, so intermediates stay in the
# cache. A GPU uses GPU_FACTOR times more, since it would wait for the launches of small tiles.
TILE_SCORES = 2**20
GPU_FACTOR = 64
KEYS = 1024  # keys of a tile
LEAST_QUERIES = 16  # queries of a tile, since each tile adds to the gradients of its keys


def tile_scores(device: torch.device) -> int:
    return TILE_SCORES if device.type == "cpu" else TILE_SCORES * GPU_FACTOR


def chunk_sizes(q: Tensor, window: int | None = None) -> tuple[int, int]:
    """Queries and keys of a tile. A window limits its queries to about its size."""
    most = max(LEAST_QUERIES, tile_scores(q.device) // max(1, q.shape[0] * q.shape[2] * KEYS))
    return (most if window is None else min(most, max(window, 64))), KEYS


def inside(low: Tensor, high: Tensor, memory: int = 0) -> Visible:
    """Mask of keys low .. high - 1 of each query, [b i] each, and of the memory before them."""

    def visible(rows: slice, keys: slice) -> Tensor:
        j = torch.arange(keys.start, keys.stop, device=low.device) - memory
        seen = (j >= low[:, rows, None]) & (j < high[:, rows, None])
        return (seen | (j < 0))[:, None]

    return visible


def finish(
    out: Tensor, lse: Tensor, sinks: Tensor | None, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Apply a sink [h]: one more logit of the softmax with value 0."""
    if sinks is not None:
        logits = sinks.to(lse.dtype)

        def shared(lse: Tensor, out: Tensor) -> tuple[Tensor, ...]:
            with_sink = torch.logaddexp(lse, logits)
            return out * (lse - with_sink).exp()[..., None], with_sink

        out, lse = isolated(shared, lse, out)
    return (out, lse) if return_lse else out


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
) -> Tensor | tuple[Tensor, Tensor]:
    d, m, W = compress_block_sliding_stride, 0, ck.shape[1]
    if mem_k is not None and mem_v is not None:
        m = mem_k.shape[1]
        ck, cv = (
            torch.cat((repeat(mem, "k m d -> b m k d", b=len(q)), c), dim=1)
            for mem, c in ((mem_k, ck), (mem_v, cv))
        )
    # query i sees window w if w < i // d
    band = Band(None, -1 if causal else None, q_offset, stride=d, memory=m)
    others = []
    if documents is not None:
        low, high = documents.windows(d, causal=causal)
        others.append(inside(low, high.clamp(max=W), m))
    sizes = chunk_sizes(q)
    out, lse = band_attention(
        q, ck, cv, band, others, chunk_sizes=sizes, scale=scale, soft_cap=soft_cap
    )
    return finish(out, lse, sinks, return_lse)


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
) -> Tensor | tuple[Tensor, Tensor]:
    w = sliding_window_size
    band = Band(w, 0 if causal else w, q_offset)
    others = [] if documents is None else [inside(*documents)]
    sizes = chunk_sizes(q, w)
    out, lse = band_attention(
        q, k, v, band, others, chunk_sizes=sizes, scale=scale, soft_cap=soft_cap
    )
    return finish(out, lse, sinks, return_lse)


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
) -> Tensor | tuple[Tensor, Tensor]:
    (B, _, R, n), s = block_indices.shape, selection_block_size
    slots = n + num_initial_blocks + (num_local_blocks if causal else 0)
    if slots == 0:  # add one empty slot
        block_indices, slots = F.pad(block_indices, (0, 1), value=-1), 1
    # numbers that a chunk gathers per query
    entries = B * R * slots * s * max(q.shape[-1], v.shape[-1])
    choice = Choice(
        block_indices,
        query_positions(q, q_offset),
        length=k.shape[1],
        s=s,
        num_initial=num_initial_blocks,
        num_local=num_local_blocks,
        causal=causal,
        documents=documents,
        rows=max(1, tile_scores(q.device) // max(1, entries)),
    )
    plan = Plan((), lambda *_: None, q.shape[-1] ** -0.5 if scale is None else scale, soft_cap)
    out, lse = Gathered.apply(q, k, v, gates, choice, plan)
    return finish(out, lse, sinks, return_lse)
