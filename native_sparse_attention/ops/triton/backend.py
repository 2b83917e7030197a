"""The Triton backend: which calls its kernels support, and the branches on its operators. Layouts
and arguments are as in `functional.py`."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from ... import blocks
from ...checks import BRANCHES
from ...config import AttentionConfig
from ..call import Call, needs_gradient
from .attention import attention
from .attention import select_blocks as select_blocks

# looked up at import, since a compiled graph cannot look it up
HAS_TRITON = importlib.util.find_spec("triton") is not None

# most query heads per KV head, and largest head width, that fit a tile
MAX_GROUP = 64
MAX_WIDTH = 256
# most keys of a selection block that fit a tile
MAX_BLOCK = 128
# most blocks that a query may select
MAX_SELECTED = 64
# most new tokens per sequence of a decode step
MAX_NEW = 16


def too_large(op: str, q: Tensor, group: int, width: int, s: int, index_dim: int) -> list[str]:
    """Reason why even the smallest tile of a call exceeds the GPU's shared memory; else empty."""
    decoding = op == "decode_attention"
    if q.dtype != torch.float32 and not decoding:
        return []
    from ...kernels.common import launch

    size, most = q.element_size(), launch.shared_memory()
    if decoding:
        needed = launch.decode_bytes(group, width, size, q.shape[1], s, index_dim)
        width = max(width, index_dim)
    else:
        needed = launch.backward_bytes(group, width)
    if needed <= most:
        return []
    tile = f"{group} heads of width {width} in {str(q.dtype).removeprefix('torch.')}"
    return [f"a tile of {tile} takes {needed} bytes, this GPU holds {most}"]


def why_not(
    op: str, call: Call, config: AttentionConfig, index_dim: int | None = None
) -> list[str]:
    """Reasons why the kernels cannot run this call; empty if they can. `index_dim` is the width of
    the queries that rank, where a decode step has none yet."""
    q, k, v = call.q, call.k, call.v
    if k is None:  # a ranking
        k = call.ck
    reasons = []
    if not HAS_TRITON:
        reasons.append("triton is not installed")
    if not q.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        reasons.append(f"q is on {q.device.type}, needs cuda")
    elif not q.is_cuda and q.dtype == torch.bfloat16:
        reasons.append("q is bfloat16, whose bits Triton's interpreter multiplies as integers")
    if q.dtype == torch.float64:
        reasons.append("q is float64, needs float16, bfloat16 or float32")
    group = q.shape[2] // k.shape[2] if k.shape[2] else 0
    if group > MAX_GROUP:
        reasons.append(f"{group} query heads share a KV head, at most {MAX_GROUP}")
    n, s, indices = config.num_selected_blocks, config.selection_block_size, call.block_indices
    n = n if indices is None else indices.shape[-1]
    width = max(t.shape[-1] for t in (q, v) if t is not None)
    index_dim = index_dim or (q if call.cq is None else call.cq).shape[-1]
    if width > MAX_WIDTH:
        reasons.append(f"heads are {width} wide, at most {MAX_WIDTH}")
    elif op == "decode_attention" and index_dim > MAX_WIDTH:
        reasons.append(f"queries that rank are {index_dim} wide, at most {MAX_WIDTH}")
    elif q.is_cuda and not reasons:
        reasons += too_large(op, q, group, width, s, index_dim)
    for number, what in ((n, "blocks"), (config.num_selected_groups, "groups of blocks")):
        if number > MAX_SELECTED:
            reasons.append(f"a query has {number} selected {what}, at most {MAX_SELECTED}")
    if s > MAX_BLOCK:
        reasons.append(f"selection_block_size is {s}, at most {MAX_BLOCK}")
    if 0 in q.shape:
        reasons.append(f"q is empty, {list(q.shape)}")
    windows = blocks.windows_per_block(config.d, s)
    by_blocks = op == "decode_attention" or config.ranks_by_integers
    ranks = config.ranks and indices is None
    if ranks and config.ranks_by_largest and by_blocks and windows & (windows - 1):
        reasons.append(f"a block has {windows} windows, needs a power of two")
    if op == "decode_attention":
        branches = config.branches
        if branches not in (BRANCHES, ("selected",)):
            reasons.append(f"branches={branches}, its kernels compute all or the selected one")
        if branches != BRANCHES and config.importance == "probs":
            reasons.append("importance='probs' without the compressed branch")
        if config.num_selected_groups:
            group, stride = blocks.GROUP * s, config.selection_stride
            if s < 4 or s & (s - 1) or s % config.d or group > MAX_BLOCK * config.d or stride > 1:
                reasons.append(
                    f"two stages with selection_block_size={s}, windows {config.d} apart and "
                    f"selection_stride={stride}: they need a power of two of at least 4, which "
                    f"windows divide, at most {MAX_BLOCK} windows in a group, and stride 1"
                )
        if config.dense_length:
            reasons.append(
                f"dense_length={config.dense_length}: some tokens may attend to all keys"
            )
        if q.shape[1] > MAX_NEW:
            reasons.append(f"{q.shape[1]} new tokens in each row, at most {MAX_NEW}")
        if needs_gradient(call):
            reasons.append("its kernels have no gradients")
    return reasons


def native_sparse_attention(call: Call, config: AttentionConfig) -> tuple[Tensor, Tensor]:
    """The output [B T H E] of three branches, or of the selected one, and the block indices."""
    if call.window_k is not None or call.window_v is not None:
        window = call.branch("window", config.branches)
        call = call.but(window_k=window.k, window_v=window.v)
    if config.branches == ("selected",) and config.ranks:  # ck and cq only rank
        call = call.but(ck=call.ck.detach(), cq=None if call.cq is None else call.cq.detach())
    out, _, block_indices = attention(call, config)
    return out, block_indices if call.block_indices is None else call.block_indices


def attend_branch(call: Call, config: AttentionConfig, return_lse: bool = False) -> Any:
    out, lse, _ = attention(call, config)
    return (out, lse) if return_lse else out
