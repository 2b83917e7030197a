"""The selected branch alone: one softmax over the initial, local and ranked blocks.

It is dense attention for queries whose blocks cover all that they may see, and below
`dense_length`. Dense attention runs in torch's SDPA, or as a window over all tokens where SDPA has
no form of it (documents, offsets, sinks, soft caps).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from .. import blocks
from ..compat import transforms
from ..compat.graphs import is_exporting
from ..compat.sdpa import sdpa
from ..config import AttentionConfig
from . import dispatch, each_branch
from .call import Call
from .each_branch import Backend
from .triton import one_softmax as kernels

OP = "native_sparse_attention"


def attend(
    call: Call, config: AttentionConfig, backend: Backend, keep_slots: bool
) -> tuple[Tensor, Tensor | None]:
    """The output [B T H E], and the block indices, with `keep_slots` of dense queries too."""
    T, k = call.q.shape[1], call.k
    sinks = call.sinks_of(config.branches).get("selected")
    by_query = dense_queries(call, config)
    first = dense_prefix(call, config) if by_query is None else 0
    if first == T:
        indices = each_branch.rank(call, config, backend, None)[0] if keep_slots else None
        return dense_attention(call, config, backend, sinks), indices

    rest = without_first(call, first)
    facts: dict[str, Any] = dict(
        q_offset=call.q_offset, num_selected_blocks=config.num_selected_blocks,
        selection_block_size=config.selection_block_size, importance=config.importance,
        return_gates=config.use_diff_topk,
    )  # fmt: skip
    at_once = config.ranks and not config.use_diff_topk and not (keep_slots and first)
    if at_once and dispatch.takes_kernels(backend, OP, call.q, k, v=call.v, **facts):
        out, indices = kernels.attend(rest, config)
    else:
        ranked = call if keep_slots else rest
        indices, gates = each_branch.rank(ranked, config, backend, None)
        chosen: list[Any] = [t if t is None else t[:, first - T :] for t in (indices, gates)]
        out = each_branch.selected(rest, config, backend, chosen[0], chosen[1], sinks)
    if by_query is not None:
        dense = each_branch.window(call, config, backend, config.dense_length, sinks)
        # contiguous: no guard on the strides of an exported graph
        out = torch.where(by_query[..., None, None], dense.contiguous(), out.contiguous())
    elif first:
        head = call.but(q=call.q[:, :first])
        out = torch.cat((dense_attention(head, config, backend, sinks), out), dim=1)
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
    known = not isinstance(call.q_offset, Tensor) and not is_exporting()
    # blocks whose windows end later are no candidates; gradients of scores need the ranking
    whole = config.d <= s and not config.use_diff_topk
    whole = whole and (config.num_local_blocks > 0 or not config.causal)
    if known and (length >= S or (whole and blocks.num_blocks(S, s) <= n)):
        return T
    if not config.causal or not length or isinstance(call.q_offset, Tensor):
        return 0
    return max(0, min(T, length - call.q_offset))


def without_first(call: Call, m: int) -> Call:
    """The call without its first m queries."""
    if m == 0:
        return call
    cq = None if call.cq is None else call.cq[:, m:]
    return call.but(q=call.q[:, m:], cq=cq, q_offset=call.q_offset + m, leader_indices=None)


def dense_attention(
    call: Call, config: AttentionConfig, backend: Backend, sinks: Tensor | None
) -> Tensor:
    """Attention [B T H E] over all keys, causally over those up to the query."""
    q, k, v = call.q, call.k, call.v
    T, offset = q.shape[1], call.q_offset
    if config.causal and not isinstance(offset, Tensor) and k.shape[1] != offset + T:
        k, v = (t[:, : offset + T] for t in (k, v))
    S, keys, values = k.shape[1], k, v

    def as_window() -> Tensor:
        seen = call.but(k=keys, v=values)
        return each_branch.window(seen, config, backend, S, sinks)

    plain = call.documents is None and sinks is None and config.soft_cap is None
    if not plain or isinstance(offset, Tensor):
        return as_window()
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = by_sdpa(q, k, v, config.causal, config.scale, backend)
    return as_window() if out is None else out.transpose(1, 2)


def by_sdpa(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, backend: Backend
) -> Tensor | None:
    """SDPA of q [B H T D] and k, v [B K S D], of which the queries are the last; None where it has
    no form of it, or not what eager PyTorch has: second derivatives, and NaN where it is seen."""
    T, S = q.shape[2], k.shape[2]
    # SDPA aligns its causal mask with the first key
    aligned = not causal or T in (1, S)
    if not aligned or q.shape[-1] != v.shape[-1] or 0 in q.shape or transforms.active():
        return None
    compiles = torch.compiler.is_compiling()
    records = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    if records or backend != "auto":  # which runs everywhere
        tensors = (t.transpose(1, 2) for t in (q, k, v))
        chosen = dispatch.choose(backend, "sliding_window_attention", *tensors)
        if records and chosen == "eager":
            return None
    if records and not compiles:
        q, k, v = transforms.FirstDerivatives.apply(q, k, v)
    if T == 1:  # the last token sees all keys; SDPA takes no symbol for a bool
        causal = False
    out = sdpa(q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    if out.device.type == "cpu" and not compiles and not out.sum().isfinite():
        return None
    return out
