"""The selection in Triton, as torch operators: block indices, and gates of differentiable top-k.
`backend.py` decides which calls they support."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import blocks
from ...compat import transforms
from ...config import AttentionConfig
from ...varlen import Documents
from .operator import (
    LAYOUT,
    Arguments,
    documents_of,
    empty_block_indices,
    layout,
    of_heads,
    operator,
)

NUMBERS = ("SymInt start", "SymInt num_ranked")
TENSORS = ("Tensor q", "Tensor ck", "Tensor? mem_k", "Tensor? sinks")
RANKED = Arguments(*TENSORS, "Tensor? lse", "Tensor? leader_indices", *LAYOUT, *NUMBERS)
GATES = Arguments(*TENSORS, "Tensor block_indices", *LAYOUT, *NUMBERS)
GATES_BACKWARD = Arguments("Tensor d_gates", *GATES.declared)
LEAVES = Arguments(*TENSORS).names
SAVED = (*LEAVES, "block_indices", *Arguments(*LAYOUT).names)


@operator(
    "select_blocks", RANKED, "Tensor", fake=lambda at: empty_block_indices(at.q, at.ck, at.config)
)
def ranked_blocks(at):
    """Top-n of the first `num_ranked` blocks: block indices [B T R n], int32."""
    from ...kernels.topk import scores

    config = at.config
    return scores.select_blocks(
        at.q, at.ck, at.mem_k, at.lse, at.starts, at.leader_indices, at.start, at.num_ranked,
        config.num_selected_blocks, config.compress_block_size, config.d,
        config.selection_block_size, config.importance, config.interpolated_importance_score,
        config.num_initial_blocks, config.num_local_blocks, config.selection_stride,
        config.query_heads_share_selected_kv, config.causal, config.scale_of(at.q.shape[-1]),
        documents_of(at), config.soft_cap, at.sinks,
    )  # fmt: skip


def empty_gates(at):
    return at.q.new_empty(at.block_indices.shape, dtype=torch.float32)


@operator("selection_gates", GATES, "Tensor", fake=empty_gates)
def selection_gates(at):
    """Straight-through gates of ranked blocks [B T R n]: value 1, differentiable."""
    return empty_gates(at).fill_(1.0)


def gates_gradients(at):
    return [t.new_empty(t.shape) for t in (at.q, at.ck, at.mem_k, at.sinks) if t is not None]


@operator("selection_gates_backward", GATES_BACKWARD, "Tensor[]", fake=gates_gradients)
def selection_gates_backward(at):
    """dq, dck, and the gradients of memory and sinks if given."""
    from ...kernels.topk import gates_bwd

    q, ck, mem_k, sinks = at.q, at.ck, at.mem_k, at.sinks
    ranking = ranking_of(at.config, q, at.start, at.num_ranked, at.starts, documents_of(at), sinks)
    dq, dck, d_mem, d_sinks = gates_bwd.backward(
        q, ck, mem_k, at.block_indices, at.d_gates, ranking
    )
    grads = [dq.to(q.dtype), dck.to(ck.dtype)]
    if mem_k is not None:
        grads.append(torch.zeros_like(mem_k) if d_mem is None else d_mem.to(mem_k.dtype))
    if sinks is not None:
        grads.append(torch.zeros_like(sinks) if d_sinks is None else d_sinks.to(sinks.dtype))
    return [g.contiguous() for g in grads]


def ranking_of(
    config: AttentionConfig,
    q: Tensor,
    start: int,
    num_ranked: int,
    starts: Tensor | None,
    documents: Documents | None,
    sinks: Tensor | None,
) -> Any:
    """Settings of the ranking for the backward of the gates."""
    from ...kernels.topk.gates import TopkSettings

    return TopkSettings(
        start, num_ranked, config.num_selected_blocks, config.compress_block_size, config.d,
        config.selection_block_size, config.importance, config.interpolated_importance_score,
        config.num_initial_blocks, config.num_local_blocks, config.selection_stride,
        config.query_heads_share_selected_kv, config.causal, config.scale_of(q.shape[-1]), starts,
        documents, config.soft_cap, sinks if config.importance == "probs" else None,
    )  # fmt: skip


def gates_setup(ctx, at, output):
    ctx.at = dict(start=at.start, num_ranked=at.num_ranked), at.config
    ctx.save_for_backward(*(getattr(at, name) for name in SAVED))


def gates_backward(ctx, grads):
    transforms.refuse_legacy_batched(*grads)
    tensors = dict(zip(SAVED, ctx.saved_tensors, strict=True))
    numbers, config = ctx.at
    some = selection_gates_backward(config, d_gates=grads[0], **tensors, **numbers)
    names = [name for name in LEAVES if tensors[name] is not None]
    return dict(zip(names, some, strict=True))


selection_gates.differentiable(gates_setup, gates_backward, many=False)
transforms.refuse_second_derivatives(selection_gates_backward)


def select_blocks(
    q: Tensor,
    ck: Tensor,
    *,
    seq_len: int,
    mem_k: Tensor | None,
    q_offset: int | Tensor,
    leader_indices: Tensor | None = None,
    return_gates: bool = False,
    lse: Tensor | None = None,
    documents: Documents | None = None,
    sinks: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor | None]:
    """As `ops.reference.topk.select_blocks`. `lse` [B, T, H] of branch 1 saves the ranking by
    `"probs"` from computing it again."""
    config = AttentionConfig.unchecked(**settings)
    d, s = config.d, config.selection_block_size
    num_ranked = blocks.num_complete_blocks(ck.shape[1] * d, d, s)
    if not config.causal:
        num_ranked = blocks.num_blocks(seq_len, s)
    if num_ranked == 0 or config.num_selected_blocks == 0:
        indices = empty_block_indices(q, ck, config).fill_(-1)
        return indices, q.new_ones(indices.shape, dtype=torch.float32) if return_gates else None
    if config.importance != "probs":
        sinks = None
    elif sinks is not None:
        sinks = of_heads(sinks)
    layout_args = dict(layout(q_offset, documents), num_ranked=num_ranked)
    leaves = dict(q=q, ck=ck, mem_k=mem_k, sinks=sinks)
    fixed = {name: None if t is None else t.detach() for name, t in leaves.items()}
    indices = ranked_blocks(
        config, **fixed, **layout_args,
        lse=None if lse is None else lse.detach().contiguous(),
        leader_indices=None if leader_indices is None else leader_indices.contiguous(),
    )  # fmt: skip
    gates = None
    if return_gates:
        gates = selection_gates(config, **leaves, block_indices=indices, **layout_args)
    return indices, gates
