"""The branches of a checked call, by one backend.

The selected branch alone is one softmax over initial, local and ranked blocks. It is dense
attention for queries whose blocks cover all that they may see, and below `dense_length`: that runs
in torch's SDPA, or as a window over all tokens where SDPA has no form of it (documents, offsets,
sinks, soft caps).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from .. import blocks
from ..checks import BRANCHES
from ..compat import is_exporting, sdpa
from ..config import AttentionConfig
from . import chunked, dispatch, flex, reference
from .call import Call
from .triton import backend as triton_backend

# up to so many selected blocks, a call keeps a slot for each even if the sequence has fewer blocks
MANY_BLOCKS = 64


def attend(
    call: Call,
    config: AttentionConfig,
    backend: str,
    masks: tuple[Any, Any] = (None, None),
    keep_slots: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The output [B T H E] and the selected block indices, None without a selection. Unless
    `keep_slots`, the indices may lack slots past the number of blocks, or be None in dense
    attention."""
    n = config.num_selected_blocks
    if n > MANY_BLOCKS and not keep_slots and call.leader_indices is None:
        # the caller does not read the slots past the last block
        num_blocks = blocks.num_blocks(call.k.shape[1], config.selection_block_size)
        config = config.but(num_selected_blocks=min(n, max(MANY_BLOCKS, num_blocks)))
    if masks == (None, None):
        if config.branches == ("selected",):
            return attend_one_softmax(call, config, backend, keep_slots)
        if config.branches == BRANCHES and backend == "triton":
            return triton_backend.native_sparse_attention(call, config)
    masks_given = dict(zip(("window", "selected"), masks, strict=True))
    outs, block_indices = [], None
    for branch in config.branches:
        part = call.branch(branch, config.branches)
        if branch == "selected":
            block_indices, gates = rank(call, config, backend)
            part = part.but(block_indices=block_indices, gates=gates)
        branch_config, mask = config.but(branches=(branch,)), masks_given.get(branch)
        if mask is None:
            outs.append(dispatch.attend_branch(backend, part, branch_config))
        elif branch == "selected":
            outs.append(flex.attend_fine_mask(part, branch_config, mask))
        else:
            outs.append(flex.attend_given_mask(part, branch_config, mask))
    if call.branch_gates is None:
        return outs[0], block_indices
    return reference.combine_branches(outs, call.branch_gates), block_indices


def rank(call: Call, config: AttentionConfig, backend: str) -> tuple[Tensor, Tensor | None]:
    """The selected block indices [B T R n], and gates with differentiable top-k."""
    if not config.ranks:
        heads = (call.k if config.query_heads_share_selected_kv else call.q).shape[2]
        return call.q.new_empty(*call.q.shape[:2], heads, 0, dtype=torch.int32), None
    ranking = call.ranking(config.branches)
    if config.use_diff_topk:
        block_indices = dispatch.select_blocks(backend, ranking, config)
        return block_indices, chunked.selection_gates(ranking, config, block_indices)
    ranking = ranking.detached("q", "ck", "mem_k", "sinks")
    return dispatch.select_blocks(backend, ranking, config), None


# the selected branch alone


def attend_one_softmax(
    call: Call, config: AttentionConfig, backend: str, keep_slots: bool
) -> tuple[Tensor, Tensor | None]:
    """The output [B T H E], and the block indices, with `keep_slots` of dense queries too."""
    T = call.q.shape[1]
    is_dense = dense_queries(call, config)
    first = dense_prefix(call, config) if is_dense is None else 0
    if first == T:
        indices = rank(call, config, backend)[0] if keep_slots else None
        return attend_densely(call, config, backend), indices

    sparse = drop_first_queries(call, first)
    whole = config.ranks and not config.use_diff_topk and not (keep_slots and first)
    if whole and backend == "triton":
        out, indices = triton_backend.native_sparse_attention(sparse, config)
    else:
        indices, gates = rank(call if keep_slots else sparse, config, backend)
        part = sparse.branch("selected", config.branches).but(
            block_indices=indices[:, first - T :],
            gates=None if gates is None else gates[:, first - T :],
        )
        out = dispatch.attend_branch(backend, part, config)
    if is_dense is not None:
        dense = attend_window(call, config, backend, config.dense_length)
        # contiguous: no guard on the strides of an exported graph
        out = torch.where(is_dense[..., None, None], dense.contiguous(), out.contiguous())
    elif first:
        dense = attend_densely(call.but(q=call.q[:, :first]), config, backend)
        out = torch.cat((dense, out), dim=1)
    return out, indices


def dense_queries(call: Call, config: AttentionConfig) -> Tensor | None:
    """Which queries [B|1 T] are dense by `dense_length`, if that differs between sequences or is
    not known on the host; else None."""
    length, offset, documents = config.dense_length, call.q_offset, call.documents
    if not 0 < length < sys.maxsize:
        return None
    if documents is not None:
        if not config.causal:
            return documents.last - documents.first <= length
        return documents.positions() < length
    if not config.causal or not (isinstance(offset, Tensor) or is_exporting()):
        return None
    new = torch.arange(call.q.shape[1], device=call.q.device)
    return (offset[:, None] if isinstance(offset, Tensor) else offset) + new[None] < length


def dense_prefix(call: Call, config: AttentionConfig) -> int:
    """How many of the first queries are dense: all, by `dense_length` or because their blocks
    cover all that they see, or those before `dense_length`."""
    T, S = call.q.shape[1], call.k.shape[1]
    s, length = config.selection_block_size, config.dense_length
    if length == sys.maxsize:
        return T
    n = config.num_initial_blocks + config.num_selected_blocks
    n += config.num_local_blocks if config.causal else 0
    # an exported graph has one form for all lengths
    is_known = not isinstance(call.q_offset, Tensor) and not is_exporting()
    # blocks whose windows end later are no candidates; gradients of scores need the ranking
    whole = config.d <= s and not config.use_diff_topk
    whole = whole and (config.num_local_blocks > 0 or not config.causal)
    if is_known and (length >= S or (whole and blocks.num_blocks(S, s) <= n)):
        return T
    if not config.causal or not length or isinstance(call.q_offset, Tensor):
        return 0
    return max(0, min(T, length - call.q_offset))


def drop_first_queries(call: Call, m: int) -> Call:
    if m == 0:
        return call
    cq = None if call.cq is None else call.cq[:, m:]
    return call.but(q=call.q[:, m:], cq=cq, q_offset=call.q_offset + m, leader_indices=None)


def attend_densely(call: Call, config: AttentionConfig, backend: str) -> Tensor:
    """Attention [B T H E] over all keys, causally over those up to the query."""
    q, k, v, offset = call.q, call.k, call.v, call.q_offset
    T = q.shape[1]
    if config.causal and not isinstance(offset, Tensor) and k.shape[1] != offset + T:
        k, v = (t[:, : offset + T] for t in (k, v))
    is_plain = call.documents is None and call.sinks is None and config.soft_cap is None
    if is_plain and not isinstance(offset, Tensor):
        heads = [t.transpose(1, 2) for t in (q, k, v)]
        out = attend_sdpa(heads, config.causal, config.scale, backend)
        if out is not None:
            return out.transpose(1, 2)
    return attend_window(call.but(k=k, v=v), config, backend, k.shape[1])


def attend_window(call: Call, config: AttentionConfig, backend: str, w: int) -> Tensor:
    """The call of the selected branch as one of a window of w keys."""
    part = call.branch("selected", config.branches)
    config = config.but(branches=("window",), sliding_window_size=w)
    out: Tensor = dispatch.attend_branch(backend, part, config)
    return out


def attend_sdpa(
    heads: list[Tensor], causal: bool, scale: float | None, backend: str
) -> Tensor | None:
    """SDPA of q [B H T D] and k, v [B K S D], of which the queries are the last; None where it has
    no form of it, and where eager PyTorch gives second derivatives."""
    q, k, v = heads
    T, S = q.shape[2], k.shape[2]
    # SDPA aligns its causal mask with the first key
    aligned = not causal or T in (1, S)
    if not aligned or q.shape[-1] != v.shape[-1] or 0 in q.shape:
        return None
    has_gradients = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    if backend == "eager" and has_gradients:
        return None
    if T == 1:  # the last token sees all keys; SDPA takes no symbol for a bool
        causal = False
    return sdpa(q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
