"""The branches of a checked call, by one backend.

The selected branch alone is one softmax over initial, local and ranked blocks. It is dense
attention for queries whose blocks cover all that they may see, and below `dense_length`: that runs
in torch's SDPA, or as a window over all tokens where SDPA has no form of it (documents, offsets,
sinks, soft caps).
"""

from __future__ import annotations

import sys
import warnings

import torch
from torch import Tensor

from .. import blocks
from ..checks import BRANCHES
from ..compat import is_exporting, sdpa
from ..config import AttentionConfig
from . import chunked, dispatch, reference
from .call import Call, needs_gradient
from .triton import backend as triton_backend

# up to so many selected blocks, a call keeps a slot for each even if the sequence has fewer blocks
MANY_BLOCKS = 64
TOLD: set[int] = set()  # limits that `warn_dense` told; Python forgets when filters change


class DenseAttentionWarning(UserWarning):
    """Sequences are so short that a layer of sparse attention attends densely."""


def attend(
    call: Call, config: AttentionConfig, backend: str, keep_slots: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The output [B T H E] and the selected block indices, None without a selection. Unless
    `keep_slots`, the indices may lack slots past the number of blocks, or be None in dense
    attention."""
    n = config.num_selected_blocks
    if n > MANY_BLOCKS and not keep_slots and call.leader_indices is None:
        # the caller does not read the slots past the last block
        num_blocks = blocks.num_blocks(call.k.shape[1], config.selection_block_size)
        config = config.but(num_selected_blocks=min(n, max(MANY_BLOCKS, num_blocks)))
    if not call.has_masks():
        if config.branches == ("selected",):
            return attend_one_softmax(call, config, backend, keep_slots)
        if config.branches == BRANCHES and backend == "triton":
            if config.ranks and config.use_diff_topk:
                indices, gates = rank(call, config, backend)
                call = call.but(block_indices=indices, gates=gates, leader_indices=None)
            return triton_backend.native_sparse_attention(call, config)
    outs, block_indices = [], None
    for branch in config.branches:
        part = call.branch(branch, config.branches)
        if branch == "selected":
            block_indices, gates = rank(call, config, backend)
            part = part.but(block_indices=block_indices, gates=gates)
        # flex_attention knows masks of the user
        name = "flex" if part.has_masks() else backend
        outs.append(dispatch.MODULES[name].attend_branch(part, config.but(branches=(branch,))))
    if call.branch_gates is None:
        return outs[0], block_indices
    return reference.combine_branches(outs, call.branch_gates), block_indices


def rank(call: Call, config: AttentionConfig, backend: str) -> tuple[Tensor, Tensor | None]:
    """The selected block indices [B T R n], and gates with differentiable top-k."""
    if call.block_indices is not None:
        return call.block_indices, None
    if not config.ranks:
        return no_blocks(call, config, 0), None
    ranking = call.ranking_call(config)
    block_indices = dispatch.MODULES[backend].select_blocks(ranking, config)
    if not config.use_diff_topk:
        return block_indices, None
    return block_indices, chunked.selection_gates(ranking, config, block_indices)


def rankings_to_share(
    call: Call, config: AttentionConfig, backend: str, block_indices: Tensor | None
) -> Tensor | None:
    """What later tokens may take from those of a call [B T R n]: their block indices, or in two
    stages their groups of blocks."""
    if not config.num_selected_groups:
        return block_indices
    part = call.ranking_call(config).but(k=None)
    return dispatch.MODULES[backend].select_blocks(part, config.stages[0])


def rank_in_place_of_leader(call: Call, config: AttentionConfig, backend: str) -> Tensor | None:
    """What later tokens of its group may take from the first query [B 1 R n], which ranks as if at
    the leader's position: for calls over keys of earlier tokens whose rankings nobody kept."""
    leader = blocks.leader(call.q_offset, config.leader_stride)
    first = call.but(q=call.q[:, :1], q_offset=leader)
    is_staged = config.num_selected_groups > 0
    indices = None if is_staged else rank(first, config, backend)[0]
    return rankings_to_share(first, config, backend, indices)


def no_blocks(call: Call, config: AttentionConfig, n: int) -> Tensor:
    """Block indices [B T R n] of queries that select none."""
    heads = (call.k if config.query_heads_share_selected_kv else call.q).shape[2]
    return call.q.new_full((*call.q.shape[:2], heads, n), -1, dtype=torch.int32)


def attend_one_softmax(
    call: Call, config: AttentionConfig, backend: str, keep_slots: bool
) -> tuple[Tensor, Tensor | None]:
    """The output [B T H E], and the block indices. With `keep_slots` a call whose blocks cover its
    sequences ranks them too, and one that is dense by `dense_length` alone selects none."""
    T, is_dense = call.q.shape[1], dense_queries(call, config, keep_slots)
    first = 0 if isinstance(is_dense, Tensor) else is_dense
    if first == T:
        indices = None
        if keep_slots and config.dense_length == sys.maxsize:  # a later call may not be dense
            indices = rank(call, config, backend)[0]
        elif keep_slots:
            indices = no_blocks(call, config, config.num_selected_blocks)
        return attend_densely(call, config, backend), indices

    sparse = call
    if first:
        names = [n for n in ("q", "cq", "block_indices") if getattr(call, n) is not None]
        rows = {name: getattr(call, name)[:, first:] for name in names}
        sparse = call.but(**rows, q_offset=call.q_offset + first, leader_indices=None)
    whole = config.ranks and not config.use_diff_topk and not (keep_slots and first)
    if whole and backend == "triton":
        out, indices = triton_backend.native_sparse_attention(sparse, config)
    else:
        indices, gates = rank(call if keep_slots else sparse, config, backend)
        part = sparse.branch("selected", config.branches).but(
            block_indices=indices[:, first - T :],
            gates=None if gates is None else gates[:, first - T :],
        )
        out = dispatch.MODULES[backend].attend_branch(part, config)
    if isinstance(is_dense, Tensor):
        dense = attend_window(call, config, backend, config.dense_length)
        # contiguous: no guard on the strides of an exported graph
        out = torch.where(is_dense[..., None, None], dense.contiguous(), out.contiguous())
    elif first:
        dense = attend_densely(call.but(q=call.q[:, :first]), config, backend)
        out = torch.cat((dense, out), dim=1)
    return out, indices


def dense_queries(call: Call, config: AttentionConfig, keep_slots: bool) -> int | Tensor:
    """How many of the first queries are dense: all, by `dense_length` or, unless `keep_slots`,
    because their blocks cover all that they see, or those before `dense_length`. Or if that differs
    between sequences or the host does not know, which queries [B|1 T] are."""
    T, S, offset, documents = call.q.shape[1], call.k.shape[1], call.q_offset, call.documents
    length, causal = config.dense_length, config.causal
    if length == sys.maxsize:
        return T
    # an exported graph has one form for all lengths
    is_known = not isinstance(offset, Tensor) and not is_exporting()
    if length and documents is not None:
        positions = reference.query_positions(call.q, offset) - documents.first
        return positions < length if causal else documents.last - documents.first <= length
    if length and causal and not is_known:
        return reference.query_positions(call.q, offset) < length
    if is_known and (length if keep_slots else config.dense_limit) >= S:
        return T
    return max(0, min(T, length - offset)) if causal and length else 0


def attend_densely(call: Call, config: AttentionConfig, backend: str) -> Tensor:
    """Attention [B T H E] over all keys, causally over those up to the query: by SDPA, unless it
    has no form of the call or eager PyTorch has to give second derivatives."""
    q, k, v, offset, causal = call.q, call.k, call.v, call.q_offset, config.causal
    T, is_known = q.shape[1], not isinstance(offset, Tensor)
    if causal and is_known and k.shape[1] != offset + T:
        k, v = (t[:, : offset + T] for t in (k, v))
    is_plain = call.documents is None and call.sinks is None and config.soft_cap is None
    # SDPA aligns its causal mask with the first key
    is_plain = is_plain and is_known and (not causal or T in (1, k.shape[1]))
    is_plain = is_plain and q.shape[-1] == v.shape[-1] and 0 not in q.shape
    if not is_plain or (backend == "eager" and needs_gradient((q, k, v))):
        return attend_window(call.but(k=k, v=v), config, backend, k.shape[1])
    # the last token sees all keys; SDPA takes no symbol for a bool
    causal, is_grouped = False if T == 1 else causal, q.shape[2] != k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = sdpa(q, k, v, is_causal=causal, scale=config.scale, enable_gqa=is_grouped)
    return out.transpose(1, 2)


def warn_dense(call: Call, config: AttentionConfig) -> None:
    """Warn of whole sequences that attend densely, not asked to, where blocks were to be ranked."""
    limit, T = config.dense_limit, call.q.shape[1]
    is_told = torch.compiler.is_compiling() or limit in TOLD or config.dense_length == sys.maxsize
    ranks = config.ranks and config.branches == ("selected",) and not call.has_masks()
    if ranks and not is_told and 1 < T == call.k.shape[1] <= limit:
        reason = "dense_length" if config.dense_length == limit else "the blocks cover them"
        text = f"attention is dense up to {limit} tokens ({reason}), sparse for longer sequences"
        warnings.warn(text, DenseAttentionWarning, stacklevel=3)
        TOLD.add(limit)


def attend_window(call: Call, config: AttentionConfig, backend: str, w: int) -> Tensor:
    """The call of the selected branch as one of a window of w keys."""
    part = call.branch("selected", config.branches)
    config = config.but(branches=("window",), sliding_window_size=w)
    out: Tensor = dispatch.MODULES[backend].attend_branch(part, config)
    return out
