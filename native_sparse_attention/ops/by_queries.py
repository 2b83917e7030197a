"""The specification in memory linear in the length: its own functions, on a few queries at a time.

`reference.py` and `ranking.py` form all T x S scores at once. Past a size these call them on chunks
of queries, with the keys that those can see, and let the backward form each chunk again: what is
computed is the same to rounding, and a backend "eager" can be handed any length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .. import blocks
from . import ranking, reference

# Scores that a chunk may form on the CPU: 16 MiB of fp32, of which a backward holds a handful of
# copies. The layer's step is faster so than whole, as keys that a chunk cannot see are cut and what
# passes between operations stays in the cache; four times as many are slower. A GPU, which would
# wait for the launches of small chunks, is given more.
MAX_SCORES = 2**22
GPU_FACTOR = 16
# Queries of a chunk at least: each chunk adds to the gradients of all keys that it sees, which must
# not be the most of its work. Past 2**18 keys times heads, a chunk's scores grow with those.
LEAST_QUERIES = 16

# what this module cuts by queries, or need not cut; a call with any other tensor runs whole
TENSORS = frozenset({"mem_k", "mem_v", "gates", "q_offset", "leader_indices", "documents", "sinks"})

Chunk = tuple[int, int]


def run(op: str, q: Tensor, *tensors: Tensor, **settings: Any) -> Any:
    """An operation of the specification, by chunks of queries where it would form more scores than
    a chunk may. Not in a compiled graph, which would unroll them."""
    whole: Callable[..., Any] = getattr(ranking if op == "select_blocks" else reference, op)
    if torch.compiler.is_compiling() or not all(map(can_cut, settings, settings.values())):
        return whole(q, *tensors, **settings)
    size = chunk_size(op, q, *tensors, **settings)
    if size >= q.shape[1]:
        return whole(q, *tensors, **settings)
    by_chunks = select_blocks if op == "select_blocks" else attention
    chunks = [(a, min(a + size, q.shape[1])) for a in range(0, q.shape[1], size)]
    return by_chunks(whole, chunks, q, *tensors, **settings)


def can_cut(name: str, value: Any) -> bool:
    return name in TENSORS or value is None or isinstance(value, (int, float, str))


def chunk_size(op: str, q: Tensor, k: Tensor, *_: Tensor, **settings: Any) -> int:
    """Queries that form as many scores as a chunk may, or the least number of them."""
    heads, keys, stride = q.shape[2], k.shape[1], 1
    if settings.get("mem_k") is not None:
        keys += settings["mem_k"].shape[1]
    if op == "select_blocks":
        d, s = settings["compress_block_sliding_stride"], settings["selection_block_size"]
        if settings["importance"] == "logits" and settings["query_heads_share_selected_kv"]:
            heads = k.shape[2]
        # interpolated there is a score for every token, else for every window and every block
        keys *= d if settings["interpolated_importance_score"] else max(1, d // s)
        # one token of a group is ranked; a chunk of whole groups ranks none of them twice
        stride = settings["selection_stride"]
    most = MAX_SCORES if q.device.type == "cpu" else MAX_SCORES * GPU_FACTOR
    return max(LEAST_QUERIES, most // max(1, q.shape[0] * heads * keys)) * stride


def again(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call fn, and keep nothing of it for the backward but its arguments."""
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    return checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def visible_keys(chunk: Chunk, length: int, settings: dict[str, Any]) -> tuple[int, int]:
    """The first key that a chunk of queries may see, and one past the last; windows where the keys
    are those. Where positions are known on the device only, all."""
    offset, causal = settings["q_offset"], settings["causal"]
    if isinstance(offset, Tensor):
        return 0, length
    first, last = offset + chunk[0], offset + chunk[1] - 1
    if "compress_block_sliding_stride" in settings:
        d = settings["compress_block_sliding_stride"]
        return 0, min(length, blocks.num_visible_windows(last, d)) if causal else length
    w = settings.get("sliding_window_size")
    if w is None:
        return 0, min(length, last + 1) if causal else length
    stop = min(length, last + 1 if causal else last + w + 1)
    return min(max(0, first - w), stop), stop


def attention(
    whole: Callable[..., Any], chunks: list[Chunk], q: Tensor, k: Tensor, v: Tensor, *rest, **kwargs
) -> Any:
    """Any of the branches. `rest`, block indices, and gates run along the queries."""
    gates, documents = kwargs.pop("gates", None), kwargs.pop("documents", None)
    outs = []
    for chunk in chunks:
        a, b = chunk
        start, stop = visible_keys(chunk, k.shape[1], kwargs)
        own: dict[str, Any] = {"q_offset": kwargs["q_offset"] + a - start}
        if gates is not None:
            own["gates"] = gates[:, a:b]
        elif rest:
            own["gates"] = None
        if documents is not None:
            own["documents"] = documents.among(a, b, start)
        outs.append(
            again(
                whole,
                q[:, a:b],
                k[:, start:stop],
                v[:, start:stop],
                *(t[:, a:b] for t in rest),
                **(kwargs | own),
            )
        )
    if not kwargs["return_lse"]:
        return torch.cat(outs, dim=1)
    return tuple(torch.cat(parts, dim=1) for parts in zip(*outs, strict=True))


def select_blocks(
    whole: Callable[..., Any], chunks: list[Chunk], q: Tensor, ck: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The ranking. A group of tokens that share one may be cut by a chunk's end, where rows start
    at different places for one; what the last token before it has, the rest of the group takes."""
    offset, stride = kwargs.pop("q_offset"), kwargs["selection_stride"]
    before, documents = kwargs.pop("leader_indices"), kwargs.pop("documents", None)
    place = {name: kwargs[name] for name in ("causal", "compress_block_sliding_stride")}
    place["q_offset"] = offset
    indices: list[Tensor] = []
    gates: list[Tensor] = []
    for chunk in chunks:
        a, b = chunk
        _, stop = visible_keys(chunk, ck.shape[1], place)
        leader = indices[-1][:, -1] if indices and stride > 1 else before
        ranked, gate = again(
            whole,
            q[:, a:b],
            ck[:, :stop],
            q_offset=offset + a,
            leader_indices=leader,
            documents=None if documents is None else documents.among(a, b, 0),
            **kwargs,
        )
        if gate is not None and gates and stride > 1:
            i = reference.query_positions(q[:, a:b], offset + a)
            continued = i // stride == (i[:, :1] - 1) // stride
            gate = torch.where(continued[..., None, None], gates[-1][:, -1:], gate)
        indices.append(ranked)
        gates += [] if gate is None else [gate]
    return torch.cat(indices, dim=1), torch.cat(gates, dim=1) if gates else None
