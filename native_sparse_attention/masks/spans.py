"""Masks of packed documents: each query sees one KV range, given as tensors.

b       batch row
i, j    query, key
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .tiles import MaskMod, from_tiles, scalar, tile_bounds

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def span_mask_mod(lo: Tensor, hi: Tensor, memory: Tensor) -> MaskMod:
    """First the `memory` keys, then keys `lo .. hi - 1` after the memory, [b i] each."""

    def span_mask(b_idx: Tensor, h_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        key = kv_idx - memory
        inside = (key >= lo[b_idx, q_idx]) & (key < hi[b_idx, q_idx])
        return inside | (key < 0)

    return span_mask


def span_block_mask(lo: Tensor, hi: Tensor, memory: int, kv_len: int) -> BlockMask:
    """Block mask of `span_mask_mod`; `kv_len` counts memory too. lo and hi must not fall along
    i."""
    q_len, device = lo.shape[1], lo.device
    lo, hi = lo.contiguous(), hi.contiguous()
    first, last, whole_q = tile_bounds(q_len, device)
    left, right, whole_kv = tile_bounds(kv_len, device)
    # [b tq 1], against [tk]
    lo_top, hi_top = (memory + t[:, first, None] for t in (lo, hi))
    lo_bottom, hi_bottom = (memory + t[:, last, None] for t in (lo, hi))
    touched = ((left < hi_bottom) & (right >= lo_top)) | (left < memory)
    full = ((left >= lo_bottom) & (right < hi_top)) | (right < memory)
    full = full & whole_q[:, None] & whole_kv
    mask_mod = span_mask_mod(lo, hi, scalar(memory, device))
    return from_tiles(touched[:, None], full[:, None], mask_mod, q_len, kv_len)


def before_mask_mod(mask_mod: MaskMod, ends: Tensor) -> MaskMod:
    """`mask_mod` restricted to keys before `ends` [b i]."""

    def before_mask(b_idx: Tensor, h_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_mod(b_idx, h_idx, q_idx, kv_idx) & (kv_idx < ends[b_idx, q_idx])

    return before_mask


def full_before(ends: Tensor, q_len: int, kv_len: int) -> Tensor:
    """Tiles [b 1 tq tk] whose keys all lie before the `ends` of their queries. `ends` must not
    fall along i."""
    first, _, _ = tile_bounds(q_len, ends.device)
    _, right, _ = tile_bounds(kv_len, ends.device)
    return (right < ends[:, first, None])[:, None]
