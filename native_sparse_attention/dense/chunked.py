"""Softmax attention under any mask in memory linear in the length, in plain PyTorch.

B batch    T query tokens    S key tokens    H query heads    K KV heads
D key width    E value width
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..checks import (
    TOO_LARGE,
    check_any_offset,
    check_bools,
    check_callable,
    check_groups,
    check_int,
    check_ints,
    check_mask,
    check_positive,
    check_scale,
)
from ..compat import no_autocast, refuse_transforms
from ..ops.chunked import attend, slice_axis
from ..ops.reference import Visibility, query_positions, upcast
from .segments import SegmentIds, check_qkv, check_segment_ids, is_same_segment

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def chunked_attention(
    q: Tensor, k: Tensor, v: Tensor, *, q_chunk_size: int = 1024, k_chunk_size: int = 4096,
    causal: bool = False, sliding_window_size: int | None = None,
    segment_ids: SegmentIds | Tensor | None = None, soft_cap: float | None = None,
    mask: Tensor | None = None, mask_mod: MaskMod | None = None,
    q_offset: int | Tensor | None = None, scale: float | None = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    """Softmax attention in memory O(T + S), forward and backward, under any mask.

    `out_i = softmax_j(cap(q_i . k_j * scale)) v_j` over the keys j that query i sees, with
    `cap(x) = c tanh(x / c)` for `soft_cap` c. The function visits tiles of queries and keys with a
    running maximum and sum (Rabe and Staats, arXiv 2112.05682). The backward recomputes the
    probabilities of each tile from the log-sum-exp. At any time a few tiles of
    `B * H * q_chunk_size * k_chunk_size` float32 scores are alive. The chunk sizes change results
    only by rounding. Chunks of keys that causality or the window hides are skipped, unless
    `q_offset` is a tensor, since that would wait for the device.

    A query sees a key if all of `causal`, `sliding_window_size`, `segment_ids`, `mask` and
    `mask_mod` allow it. Query t has position `q_offset + t`; key j has position j.

    Args:
        q, k, v: [B, T, H, D], [B, S, K, D] and [B, S, K, E]. K divides H, and query head h reads KV
            head `h // (H / K)`. Autocast casts them to its dtype.
        q_chunk_size, k_chunk_size: queries and keys of a tile.
        causal: keys j <= i only.
        sliding_window_size: w, in tokens: keys `i - w .. i` if causal, else `i - w .. i + w`.
        segment_ids: `SegmentIds(q [B, T], kv [B, S])`, or one tensor [B, T] if T = S. A query sees
            only keys of its own segment.
        soft_cap: c, in logits; applied after `scale` and before the masks.
        mask: bool, broadcasts to [B, H, T, S]; True is visible.
        mask_mod: `(b, h, i, j) -> bool` of index tensors that broadcast, as in flex_attention. i
            and j index q and k, regardless of `q_offset`. It is called tile by tile.
        q_offset: position of query 0, an int or a tensor [B]. By default `S - T`: the queries are
            the last tokens. Queries before all keys (T > S) or past them are allowed.
        scale: multiplies the dot products; `D ** -0.5` by default.
        return_lse: also return the log-sum-exp of each query's logits.

    Returns:
        [B, T, H, E] in q's dtype, and with `return_lse` also the natural log-sum-exp [B, T, H],
        float32 (float64 for float64 inputs), which has gradients too. A query that sees no key has
        output 0, log-sum-exp -inf and no gradient. Deterministic. Second derivatives work, but keep
        every tile.

    Raises:
        ValueError: shapes, dtypes, devices or settings do not match.
    """
    refuse_transforms("chunked_attention")
    dims, q, k, v = check_qkv(q, k, v, "B T H D", "B S K D", "B S K E")
    causal, return_lse = check_bools(causal=causal, return_lse=return_lse)
    check_groups(dims["H"], dims["K"], (dims["T"], dims["S"]))
    B, T, S, H = (dims[axis] for axis in "BTSH")
    q_chunk_size, k_chunk_size = check_ints(1, q_chunk_size=q_chunk_size, k_chunk_size=k_chunk_size)
    if sliding_window_size is not None:
        sliding_window_size = check_int("sliding_window_size", sliding_window_size, 0)
    soft_cap = check_positive("soft_cap", soft_cap)
    scale = check_scale(scale)
    check_mask("mask", mask, q.device, B=B, H=H, T=T, S=S)
    mask = None if mask is None else mask[(None,) * (4 - mask.ndim)]
    check_callable("mask_mod", mask_mod, "(b, h, i, j)")
    segments = check_segment_ids(segment_ids, B, T, S, q.device)
    q_offset = S - T if q_offset is None else check_any_offset(q_offset, B, q.device)
    is_banded = causal or sliding_window_size is not None
    max_past = TOO_LARGE if sliding_window_size is None else sliding_window_size
    max_future = 0 if causal else max_past
    positions = query_positions(q, q_offset)[:, None, :, None]
    b, h, i, j = (
        torch.arange(n, device=q.device).view([-1 if axis == a else 1 for a in range(4)])
        for axis, n in enumerate((B, H, T, S))
    )

    def covers(rows: slice, keys: slice) -> bool:
        """Whether each of these queries has each of these keys in its band, as far as the host
        knows."""
        if isinstance(q_offset, Tensor):
            return False
        farthest_past = q_offset + rows.stop - 1 - keys.start
        farthest_future = keys.stop - 1 - q_offset - rows.start
        return farthest_past <= max_past and farthest_future <= max_future

    def tile_mask(rows: slice, keys: slice) -> Tensor | None:
        """[b|1 k|1 g|1 i j]"""
        masks = []
        if is_banded and not covers(rows, keys):
            distance = positions[:, :, rows] - j[..., keys]
            masks.append((distance <= max_past) & (-distance <= max_future))
        if segments is not None:
            masks.append(is_same_segment(segments, rows, keys)[:, None])
        if mask is not None:
            masks.append(slice_axis(slice_axis(mask, 2, rows), 3, keys))
        if mask_mod is not None:
            allowed = mask_mod(b, h, i[:, :, rows], j[..., keys])
            axes = dict(b=B, h=H, i=rows.stop - rows.start, j=keys.stop - keys.start)
            check_mask("what mask_mod returns", allowed, q.device, **axes)
            masks.append(allowed[(None,) * (4 - allowed.ndim)])
        if not masks:
            return None
        visible = reduce(torch.logical_and, masks)
        # [b h i j] -> [b k g i j]; an axis of length 1 becomes two
        return visible.unflatten(1, (dims["K"], -1) if visible.shape[1] > 1 else (1, 1))

    def key_range(first: int, last: int) -> tuple[int, int]:
        return (first - max_past, last + max_future + 1) if is_banded else (0, S)

    dtype = q.dtype
    with no_autocast(q.device.type):
        q, k, v = upcast(q, k, v)
        out, lse = attend(
            q, k, v, Visibility(tile_mask, key_range, q_offset), scale=scale, soft_cap=soft_cap,
            return_lse=True, chunk_sizes=(q_chunk_size, k_chunk_size),
        )  # fmt: skip
    out = out.to(dtype)
    return (out, lse) if return_lse else out
