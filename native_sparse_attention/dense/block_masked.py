"""Attention under a mask that is split into blocks. It skips empty blocks.

b  batch    i  query    g  query heads of one KV head    d  head width
k  KV heads    j  key
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import blocks
from ..checks import (
    check_bool,
    check_devices,
    check_ints,
    check_mask_value,
    check_positive,
)
from ..compat import no_autocast, refuse_transforms
from ..ops.chunked import AttendTiles, Plan, slice_axis, split_range
from ..ops.reference import Visibility, upcast
from .segments import SegmentIds, check_qkv, check_segment_ids, is_same_segment


def mask_blocker(mask: Tensor, block_q: int, block_kv: int) -> Tensor:
    """Number of visible pairs in each block of a mask.

    `counts[.., r, c] = sum over the block's rows and columns of (mask != 0)`. The last blocks may
    be partial.

    Args:
        mask: [.., q_len, kv_len], of any dtype; nonzero is visible.
        block_q, block_kv: rows and columns of a block.

    Returns:
        int64 [.., ceil(q_len / block_q), ceil(kv_len / block_kv)].

    Raises:
        ValueError: a mask of fewer than two axes, or a block size that is not a positive integer.
    """
    block_q, block_kv = check_ints(1, block_q=block_q, block_kv=block_kv)
    if not isinstance(mask, Tensor) or mask.ndim < 2:
        got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"mask must be a tensor of shape [.., q_len, kv_len], got {got}")
    q_len, kv_len = mask.shape[-2:]
    r, c = blocks.ceil_div(q_len, block_q), blocks.ceil_div(kv_len, block_kv)
    counts = torch.empty((*mask.shape[:-2], r, c), dtype=torch.int64, device=mask.device)
    # one row of blocks at a time avoids a second array of the mask's size
    for row, rows in enumerate(split_range(0, q_len, block_q)):
        line = F.pad((mask[..., rows, :] != 0).sum(dim=-2), (0, -kv_len % block_kv))
        counts[..., row, :] = line.unflatten(-1, (c, block_kv)).sum(dim=-1)
    return counts


def block_masked_attention(
    q: Tensor, k: Tensor, v: Tensor, segment_ids: SegmentIds | Tensor | None, block_kv: int,
    block_q: int, mask: Tensor, mask_value: float, cap: float | None = None,
    save_residuals: bool = False,
) -> Any:  # fmt: skip
    """Softmax attention under an arbitrary mask, block by block. Memory beside the mask is linear
    in the lengths.

    `out_i = softmax_j(s_ij) v_j` with `s_ij = cap(q_i . k_j)` if query i sees key j, else
    `mask_value`, over the blocks of the mask that hold a nonzero; `cap(x) = c tanh(x / c)`. All
    other blocks are neither scored nor read. Blocks without a zero do not read the mask. Forward
    and backward visit blocks with a running maximum and sum, as `chunked_attention` does. The
    signature is that of `flash_attention_block_masked` in MaxText's `jax_flash_attention`; the code
    is independent.

    As in MaxText, nothing scales the dot products: pass `q * head_dim ** -0.5`.

    `mask_value` takes part in the softmax like any logit, but only in blocks that are not skipped.
    Choose it so low that `exp(mask_value - lse)` is 0 (-inf, -1e30). Then results depend on the
    block sizes only by rounding. A query that sees no key gives 0. (A softmax over its mask values
    would give the mean of hidden values.)

    Args:
        q: [batch, kv_heads, q_heads_per_kv, q_len, head_dim], scaled by the caller. Autocast casts
            q, k and v to its dtype.
        k, v: [batch, kv_heads, kv_len, head_dim] and [batch, kv_heads, kv_len, v_head_dim].
        segment_ids: `SegmentIds(q [batch, q_len], kv [batch, kv_len])`. A query sees only keys of
            its own segment. None for no segments. Segments do not skip blocks.
        block_kv, block_q: keys and queries of a block; the last may be partial.
        mask: [q_len, kv_len] for the whole batch, or [batch, q_len, kv_len], of any dtype; nonzero
            is visible. A block is skipped if it is empty in the whole batch. The mask's device
            counts the blocks and sends the counts to the host: one synchronization per call, and
            a graph break under torch.compile.
        mask_value: logit of masked pairs.
        cap: c, in logits; before the mask. None for no cap.
        save_residuals: also return the residuals.

    Returns:
        [batch, kv_heads, q_heads_per_kv, q_len, v_head_dim] in q's dtype, and with `save_residuals`
        also a dict of `logsumexp` (natural) and `max_logits` [batch, kv_heads, q_heads_per_kv,
        q_len], float32 (float64 for float64 inputs), both -inf for a query that sees no key.
        Gradients pass through `logsumexp`, not through `max_logits`. Deterministic.

    Raises:
        ValueError: shapes, dtypes, devices or settings do not match.
    """
    refuse_transforms("block_masked_attention")
    dims, q, k, v = check_qkv(q, k, v, "B K G T D", "B K S D", "B K S E")
    B, T, S = (dims[axis] for axis in "BTS")
    block_kv, block_q = check_ints(1, block_kv=block_kv, block_q=block_q)
    cap = check_positive("cap", cap)
    save_residuals = check_bool("save_residuals", save_residuals)
    mask_value = check_mask_value(mask_value, q.dtype)
    segments = check_segment_ids(segment_ids, B, T, S, q.device)
    if not isinstance(mask, Tensor) or list(mask.shape) not in ([T, S], [B, T, S]):
        got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"mask must have shape {[T, S]} or {[B, T, S]}, got {got}")
    check_devices(q=q, mask=mask)
    mask = mask if mask.ndim == 3 else mask[None]

    row_chunks, key_chunks = split_range(0, T, block_q), split_range(0, S, block_kv)
    counts = mask_blocker(mask, block_q, block_kv).sum(dim=0).tolist()
    tiles = [
        (rows, [keys for keys, count in zip(key_chunks, line, strict=True) if count])
        for rows, line in zip(row_chunks, counts, strict=True)
    ]

    def tile_mask(rows: slice, keys: slice) -> Tensor | None:
        """[b|1 1 1 i j]"""
        visible = None
        pairs = len(mask) * (rows.stop - rows.start) * (keys.stop - keys.start)
        if counts[rows.start // block_q][keys.start // block_kv] < pairs:
            visible = slice_axis(slice_axis(mask, 1, rows), 2, keys) != 0
        if segments is not None:
            same = is_same_segment(segments, rows, keys)
            visible = same if visible is None else visible & same
        return None if visible is None else visible[:, None, None]

    visibility = Visibility(tile_mask, lambda first, last: (0, S), q_offset=0)
    plan = Plan(tiles, visibility, scale=1.0, soft_cap=cap, mask_value=mask_value)
    with no_autocast(q.device.type):
        out, lse, max_logits = AttendTiles.apply(*upcast(q, k, v), None, plan)
    out = out.to(q.dtype)
    return (out, {"logsumexp": lse, "max_logits": max_logits}) if save_residuals else out
