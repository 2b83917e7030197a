"""The selection and the selected branch of the specification in memory linear in the length. They
call the specification on a few queries and the keys that these can see. The backward recomputes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import blocks
from ...compat import transforms
from ...compat.autocast import no_autocast
from ...varlen import Documents
from . import attention as reference
from . import topk as reference_topk

# Scores that a chunk may form on the CPU: 16 MiB of fp32. A backward holds a handful of copies. A
# GPU forms GPU_FACTOR times more, since it would wait for the launches of small chunks.
CHUNK_SCORES = 2**22
GPU_FACTOR = 16
# Minimum number of queries in a chunk. Each chunk adds to the gradients of all keys that it sees,
# and this must not dominate. Past 2**18 keys times heads, a chunk's scores exceed CHUNK_SCORES.
LEAST_QUERIES = 16


@dataclass(frozen=True, eq=False)
class Chunk:
    """A call that computes some rows of the outputs.

    Args:
        rows: the rows of the outputs.
        parts: for each tensor the rows that the call reads, or None for all rows.
        call: maps the sliced tensors to these rows of all outputs.
    """

    rows: slice
    parts: Sequence[slice | None]
    call: Callable[..., tuple[Tensor, ...]]

    def of(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        return [
            t if t is None or some is None else t[:, some]
            for t, some in zip(tensors, self.parts, strict=True)
        ]


class ByChunks(torch.autograd.Function):
    """Compute the outputs [b i ...] chunk by chunk; the chunks cover all rows.

    The forward saves the inputs for the backward. Whole outputs and gradients are allocated at the
    start: small pieces between the memory that chunks free would fragment the heap.
    """

    @staticmethod
    def forward(length: int, chunks: Sequence[Chunk], *tensors: Tensor | None) -> Any:
        outs: list[Tensor] = []
        for chunk in chunks:
            values = chunk.call(*chunk.of(tensors))
            if not outs:
                outs = [v.new_empty(len(v), length, *v.shape[2:]) for v in values]
            for out, value in zip(outs, values, strict=True):
                out[:, chunk.rows] = value
        return tuple(outs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.chunks, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(t for t in output if not t.is_floating_point()))

    @staticmethod
    def backward(ctx: Any, *d_outs: Tensor) -> Any:
        transforms.refuse_legacy_batched(*d_outs)
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        if transforms.active():  # torch.func transforms only the backward, as `jacrev` does

            def plainly(*tensors: Tensor | None) -> list[Tensor]:
                found = zip(*(c.call(*c.of(tensors)) for c in ctx.chunks), strict=True)
                return [torch.cat(some, dim=1) for some in found]

            return None, None, *transforms.vjp(plainly, tensors, d_outs)
        again = torch.is_grad_enabled()  # for gradients of gradients
        wanted = [i for i, need in enumerate(needed) if need]
        sums = {
            i: torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32))
            for i, t in enumerate(tensors)
            if needed[i]
        }
        for chunk in ctx.chunks:
            with torch.enable_grad():
                parts = chunk.of(tensors)
                if not again:
                    parts = [
                        None if t is None else t.detach().requires_grad_(need)
                        for t, need in zip(parts, needed, strict=True)
                    ]
                values = chunk.call(*parts)
            pairs = [
                (v, d[:, chunk.rows])
                for v, d in zip(values, d_outs, strict=True)
                if v.requires_grad
            ]
            if not pairs:
                continue
            outs, d_parts = zip(*pairs, strict=True)
            given = [parts[i] for i in wanted]
            grads = torch.autograd.grad(outs, given, d_parts, allow_unused=True, create_graph=again)
            for i, grad in zip(wanted, grads, strict=True):
                if grad is not None:
                    some = chunk.parts[i]
                    to = sums[i] if some is None else sums[i][:, some]
                    to += grad
        return (
            None,
            None,
            *(sums[i].to(t.dtype) if i in sums else None for i, t in enumerate(tensors)),
        )


def by_chunks(chunks: Sequence[Chunk], *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Run `ByChunks`. The caller handles autocast."""
    device = next(t.device.type for t in tensors if t is not None)
    with no_autocast(device):
        return ByChunks.apply(chunks[-1].rows.stop, chunks, *tensors)


def chunk_size(q: Tensor, scores: int) -> int:
    """Queries per chunk within the limit of scores, at least LEAST_QUERIES."""
    most = CHUNK_SCORES if q.device.type == "cpu" else CHUNK_SCORES * GPU_FACTOR
    return max(LEAST_QUERIES, most // max(1, q.shape[0] * scores))


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    *,
    gates: Tensor | None,
    causal: bool,
    q_offset: int | Tensor,
    return_lse: bool = False,
    sinks: Tensor | None = None,
    documents: Documents | None = None,
    **settings: Any,
) -> Tensor | tuple[Tensor, ...]:
    def call(a: int, b: int, q: Tensor, k: Tensor, v: Tensor, gates: Any, sinks: Any) -> Any:
        out = reference.selected_attention(
            q,
            k,
            v,
            block_indices[:, a:b],
            gates=gates,
            causal=causal,
            q_offset=q_offset + a,
            return_lse=return_lse,
            sinks=sinks,
            documents=None if documents is None else documents.among(a, b, 0),
            **settings,
        )
        return out if return_lse else (out,)

    T, S = q.shape[1], k.shape[1]
    size = chunk_size(q, q.shape[2] * S)
    chunks = []
    for a in range(0, T, size):
        b = min(a + size, T)
        seen = slice(0, min(S, q_offset + b) if causal and isinstance(q_offset, int) else S)
        rows = slice(a, b)
        chunks.append(Chunk(rows, (rows, seen, seen, rows, None), partial(call, a, b)))
    outs = by_chunks(chunks, q, k, v, gates, sinks)
    return outs if return_lse else outs[0]


def scores_of_a_query(q: Tensor, ck: Tensor, settings: dict[str, Any]) -> int:
    """Scores that the ranking of one query forms at once."""
    heads, keys = q.shape[2], ck.shape[1]
    if settings["mem_k"] is not None:
        keys += settings["mem_k"].shape[1]
    if settings["importance"] != "probs" and settings["query_heads_share_selected_kv"]:
        heads = ck.shape[2]
    d, s = settings["compress_block_sliding_stride"], settings["selection_block_size"]
    # interpolation scores every token; otherwise every window and every block has a score
    return heads * keys * (d if settings["interpolated_importance_score"] else max(1, d // s))


def select_blocks(
    q: Tensor,
    ck: Tensor,
    *,
    mem_k: Tensor | None,
    q_offset: int | Tensor,
    return_gates: bool = False,
    leader_indices: Tensor | None = None,
    sinks: Tensor | None = None,
    documents: Documents | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor | None]:
    T, W, stride = q.shape[1], ck.shape[1], settings["selection_stride"]
    # only one token of a group is ranked
    size = chunk_size(q, scores_of_a_query(q, ck, settings | {"mem_k": mem_k})) * stride

    def call(start: int, a: int, b: int, q: Tensor, ck: Tensor, mem_k: Any, sinks: Any) -> Any:
        indices, gates = reference_topk.select_blocks(
            q,
            ck,
            mem_k=mem_k,
            q_offset=q_offset + start,
            return_gates=return_gates,
            leader_indices=None if start else leader_indices,
            sinks=sinks,
            documents=None if documents is None else documents.among(start, b, 0),
            **settings,
        )
        values = (indices,) if gates is None else (indices, gates)
        return tuple(t[:, a - start :] for t in values)

    chunks = []
    for a in range(0, T, size):
        # start where the first query's group may have begun
        start, b, stop = max(0, a - stride + 1), min(a + size, T), W
        if settings["causal"] and isinstance(q_offset, int):
            d = settings["compress_block_sliding_stride"]
            stop = min(W, blocks.num_visible_windows(q_offset + b - 1, d))
        parts = (slice(start, b), slice(0, stop), None, None)
        chunks.append(Chunk(slice(a, b), parts, partial(call, start, a, b)))
    indices, *gates = by_chunks(chunks, q, ck, mem_k, sinks)
    return indices, gates[0] if gates else None
