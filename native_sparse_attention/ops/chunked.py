"""Operations of the specification in memory linear in the length: a few queries at a time. The
backward computes each chunk again."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from .. import blocks
from ..compat import transforms
from ..compat.autocast import no_autocast
from ..compat.graphs import free_size
from ..varlen import Documents
from .reference.attention import query_positions, visible_windows
from .reference.topk import (
    candidates,
    importance_scores,
    leaders,
    share,
    straight_through_gates,
)

# Scores that a chunk forms on the CPU: 16 MiB of fp32. A backward holds a handful of copies. A GPU
# forms GPU_FACTOR times more, since it would wait for the launches of small chunks.
CHUNK_SCORES = 2**22
GPU_FACTOR = 16
LEAST_QUERIES = 16  # of a chunk, since each chunk adds to the gradients of all keys


def selection_gates(
    q: Tensor,
    ck: Tensor,
    block_indices: Tensor,
    *,
    mem_k: Tensor | None = None,
    sinks: Tensor | None = None,
    q_offset: int | Tensor,
    documents: Documents | None = None,
    **settings: Any,
) -> Tensor:
    """Straight-through gates of selected blocks, in memory O(T + S).

    A gate has value 1 and the gradient of `softmax_c(score_c)` over the candidate blocks c and one
    constant logit of -1e3, or with `importance="probs"` of the score itself. With
    `selection_stride` R, the scores are those of the first query of each group of R. Tokens whose
    group began before this call have gates without gradient.

    The forward computes nothing. The backward scores a chunk of queries at a time, in fp32 or
    better. A compiled graph and torch.func get one chunk of all queries.

    Args:
        q, ck, mem_k, sinks, q_offset, documents: as in `select_blocks`.
        block_indices: [B, T, R, n], -1 for an empty slot; a block of a query must be a candidate.
        settings: those of `select_blocks`: seq_len, compress_block_size,
            compress_block_sliding_stride, selection_block_size, importance,
            interpolated_importance_score, num_initial_blocks, num_local_blocks, selection_stride,
            query_heads_share_selected_kv, causal, scale and soft_cap. num_selected_blocks, which
            is n, has no effect.

    Returns:
        Ones [B, T, R, n], float32 (float64 for float64 inputs), with gradients for q, ck, mem_k and
        sinks. Deterministic.
    """
    i, stride, group = query_positions(q, q_offset), settings["selection_stride"], None
    if stride > 1:
        start = i[:, :1]
        q, i, group = leaders(q, i, stride)
        first = (i - start).expand(len(q), -1)
        if documents is not None:
            documents = Documents(*(bound.gather(1, first) for bound in documents))
        rows = first[..., None, None].expand(-1, -1, *block_indices.shape[2:])
        block_indices = block_indices.gather(1, rows)
    chunks = query_chunks(q, ck, q_offset, settings)
    tensors = q, ck, mem_k, sinks
    if torch.compiler.is_compiling() or transforms.active():
        gates = gates_of_queries(*tensors, block_indices, i, documents, settings)
    else:
        gates = SelectionGates.apply(*tensors, block_indices, i, documents, settings, chunks)
    return gates if group is None else share(gates, group, gates.new_ones(()))


def query_chunks(
    q: Tensor, ck: Tensor, q_offset: int | Tensor, settings: dict[str, Any]
) -> list[tuple[slice, slice]]:
    """Slices of the queries that are ranked [b t h d], and of the windows that they see."""
    T, W, d = q.shape[1], ck.shape[1], settings["compress_block_sliding_stride"]
    heads = q.shape[2] if ranks_each_head(settings) else ck.shape[2]
    # interpolation scores every token; otherwise every window and every block has a score
    per_window = max(1, d // settings["selection_block_size"])
    if settings["interpolated_importance_score"]:
        per_window = d
    most = CHUNK_SCORES if q.device.type == "cpu" else CHUNK_SCORES * GPU_FACTOR
    size = max(LEAST_QUERIES, most // max(1, len(q) * heads * W * per_window))
    chunks = []
    for a in range(0, T, size):
        b, stop = min(a + size, T), W
        if settings["causal"] and isinstance(q_offset, int):
            stride = settings["selection_stride"]
            last = blocks.ceil_div(q_offset, stride) * stride + (b - 1) * stride
            stop = min(W, blocks.num_visible_windows(last, d))
        chunks.append((slice(a, b), slice(0, stop)))
    return chunks


def ranks_each_head(settings: dict[str, Any]) -> bool:
    """Whether every query head has scores of its own at some time."""
    return settings["importance"] == "probs" or not settings["query_heads_share_selected_kv"]


def gates_of_queries(
    q: Tensor,
    ck: Tensor,
    mem_k: Tensor | None,
    sinks: Tensor | None,
    block_indices: Tensor,
    i: Tensor,
    documents: Documents | None,
    settings: dict[str, Any],
) -> Tensor:
    """Gates [b t r n] of queries at positions i [b|1 t], in operations that autograd traces."""
    d, s = settings["compress_block_sliding_stride"], settings["selection_block_size"]
    dtype = torch.promote_types(q.dtype, torch.float32)
    num_ranked = blocks.num_complete_blocks(ck.shape[1] * d, d, s)
    if not settings["causal"]:
        num_ranked = free_size(blocks.num_blocks(settings["seq_len"], s))
    if num_ranked == 0 or block_indices.numel() == 0:
        return q.new_ones(block_indices.shape, dtype=dtype)
    c = torch.arange(num_ranked, device=q.device)
    candidate = candidates(
        i, c, num_ranked, documents, d=d, s=s, causal=settings["causal"],
        num_initial_blocks=settings["num_initial_blocks"],
        num_local_blocks=settings["num_local_blocks"],
    )[:, None]  # fmt: skip
    with no_autocast(q.device.type):
        scores = importance_scores(
            q.to(dtype),
            ck.to(dtype),
            None if mem_k is None else mem_k.to(dtype),
            visible_windows(i, ck.shape[1], d, settings["causal"], documents),
            c,
            rule=settings["importance"],
            interpolated=settings["interpolated_importance_score"],
            shared=settings["query_heads_share_selected_kv"],
            l=settings["compress_block_size"],
            d=d,
            s=s,
            scale=settings.get("scale"),
            soft_cap=settings.get("soft_cap"),
            sinks=None if sinks is None else sinks.to(dtype),
        )
        gates = straight_through_gates(scores, candidate, settings["importance"])
    index = rearrange(block_indices.long(), "b t r n -> b r t n")
    gates = gates.gather(-1, index.clamp(min=0)).masked_fill(index < 0, 1.0)
    return rearrange(gates, "b r t n -> b t r n")


class SelectionGates(torch.autograd.Function):
    """Ones, with the gradients of `gates_of_queries`, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, q, ck, mem_k, sinks, block_indices, i, documents, settings, chunks
    ) -> Tensor:
        ctx.save_for_backward(q, ck, mem_k, sinks, block_indices, i, *(documents or ()))
        ctx.settings, ctx.chunks = settings, chunks
        dtype = torch.promote_types(q.dtype, torch.float32)
        return q.new_ones(block_indices.shape, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, d_gates: Tensor) -> Any:
        transforms.refuse_legacy_batched(d_gates)
        *tensors, block_indices, i = ctx.saved_tensors[:6]
        documents = ctx.saved_tensors[6:]
        again = torch.is_grad_enabled()  # for gradients of gradients
        needed = [n for n, need in enumerate(ctx.needs_input_grad[:4]) if need]
        if not again:
            tensors = [t if t is None else t.detach().requires_grad_() for t in tensors]
        sums: list[Any] = [None] * 4
        for n in needed:
            dtype = torch.promote_types(tensors[n].dtype, torch.float32)
            sums[n] = torch.zeros_like(tensors[n], dtype=dtype)
        for rows, windows in ctx.chunks:
            with torch.enable_grad():
                parts = [tensors[0][:, rows], tensors[1][:, windows], *tensors[2:]]
                gates = gates_of_queries(
                    *parts, block_indices[:, rows], i[:, rows],
                    Documents(*(bound[:, rows] for bound in documents)) if documents else None,
                    ctx.settings,
                )  # fmt: skip
            if not gates.requires_grad:
                continue
            grads = torch.autograd.grad(
                gates, [parts[n] for n in needed], d_gates[:, rows], allow_unused=True,
                create_graph=again,
            )  # fmt: skip
            for n, grad in zip(needed, grads, strict=True):
                if grad is not None:
                    total = sums[n]
                    total = total[:, rows] if n == 0 else total
                    total = total[:, windows] if n == 1 else total
                    total += grad
        grads = [t if t is None else t.to(tensors[n].dtype) for n, t in enumerate(sums)]
        return *grads, None, None, None, None, None
