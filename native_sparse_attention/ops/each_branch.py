"""The operations of one branch each, on the checked arguments of a call of the whole layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..block_sizes import flat
from ..config import SELECTION, AttentionConfig
from . import dispatch, flex
from .call import Call

Backend = str | tuple[str, ...]


def common(call: Call, config: AttentionConfig) -> dict[str, Any]:
    return dict(
        causal=config.causal, q_offset=call.q_offset, scale=config.scale, soft_cap=config.soft_cap,
        documents=call.documents,
    )  # fmt: skip


def compressed(
    call: Call, config: AttentionConfig, backend: Backend, sinks: Tensor | None
) -> Tensor:
    """The output of the compressed branch."""
    cq = call.q if call.cq is None else call.cq
    out: Tensor = dispatch.run(
        backend, "compressed_attention", cq, call.ck, call.cv, mem_k=call.mem_k, mem_v=call.mem_v,
        sinks=sinks, compress_block_sliding_stride=config.d, return_lse=False,
        block_sizes=flat(config.block_sizes), **common(call, config),
    )  # fmt: skip
    return out


def rank(
    call: Call, config: AttentionConfig, backend: Backend, sinks: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The selected block indices [B T R n], and gates with differentiable top-k. `sinks` are those
    of the compressed branch."""
    if not config.ranks:
        ranks = call.k.shape[2] if config.query_heads_share_selected_kv else call.q.shape[2]
        return call.q.new_empty(*call.q.shape[:2], ranks, 0, dtype=torch.int32), None
    tensors: list[Any] = [call.q if call.cq is None else call.cq, call.ck, call.mem_k, sinks]
    if not config.use_diff_topk:
        tensors = [None if t is None else t.detach() for t in tensors]
    q, ck, mem_k, sinks = tensors
    found: tuple[Tensor, Tensor | None] = dispatch.run(
        backend, "select_blocks", q, ck, mem_k=mem_k, sinks=sinks, seq_len=call.k.shape[1],
        leader_indices=call.leader_indices, return_gates=config.use_diff_topk,
        **{name: getattr(config, name) for name in SELECTION}, **common(call, config),
    )  # fmt: skip
    return found


def selected(
    call: Call,
    config: AttentionConfig,
    backend: Backend,
    block_indices: Tensor,
    gates: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """The output of the selected branch."""
    out: Tensor = dispatch.run(
        backend, "selected_attention", call.q, call.k, call.v, block_indices, gates=gates,
        sinks=sinks, selection_block_size=config.selection_block_size,
        num_initial_blocks=config.num_initial_blocks, num_local_blocks=config.num_local_blocks,
        return_lse=False, block_sizes=flat(config.block_sizes), **common(call, config),
    )  # fmt: skip
    return out


def under_fine_mask(
    call: Call,
    config: AttentionConfig,
    block_indices: Tensor,
    gates: Tensor | None,
    fine_mask: Callable[..., Any],
) -> Tensor:
    """The output of the selected branch in flex_attention, under a mask of `create_fine_mask`."""
    if gates is not None:
        raise NotImplementedError(
            "flex_attention has no differentiable top-k: leave out fine_selection_flex_mask, "
            "or set use_diff_topk=False"
        )
    return flex.selected_under_mask(
        call.q, call.k, call.v, block_indices, fine_mask, causal=config.causal, scale=config.scale,
        selection_block_size=config.selection_block_size,
        num_initial_blocks=config.num_initial_blocks, num_local_blocks=config.num_local_blocks,
    )  # fmt: skip


def window(
    call: Call, config: AttentionConfig, backend: Backend, w: int, sinks: Tensor | None
) -> Tensor:
    """The output of a window of w tokens."""
    out: Tensor = dispatch.run(
        backend, "sliding_window_attention", call.q, *call.of_window(), sinks=sinks,
        sliding_window_size=w, return_lse=False, block_sizes=flat(config.block_sizes),
        **common(call, config),
    )  # fmt: skip
    return out
