"""Who belongs together: ids of packed documents, and blocks against the diagonal."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..checks.scalars import check_int, check_ints, shown

Int = TypeVar("Int", int, Tensor)


class SegmentIds(NamedTuple):
    """Ids of the segments that queries and keys belong to; only the same id attends to the same.

    Segments keep documents apart that are packed into one row. Ids are integers in any order; a
    segment need not be contiguous, and an id of the queries need not occur among the keys.

    Args:
        q: ids of the queries, [B, T].
        kv: ids of the keys and values, [B, S].
    """

    q: Tensor
    kv: Tensor


def below_or_on_diag(r: Int, r_blk_size: int, c: Int, c_blk_size: int) -> Any:
    """Whether block (r, c) has an element on or below the diagonal, that is, something for a causal
    query to see.

    `(r + 1) r_blk_size - 1 >= c c_blk_size`: the block's last row stands at least as far down as
    its first column stands right. (Kernels elsewhere compare strictly, which loses the blocks that
    touch the diagonal in that one corner; blocks of equal even sizes have none.)

    Args:
        r, c: row and column of the block, counted in blocks; ints or integer tensors.
        r_blk_size, c_blk_size: rows and columns of a block.

    Returns:
        A bool, or a tensor of bools where r or c is a tensor.

    Raises:
        ValueError: rows or columns that are no integers of at least 0, or a size below 1.
    """
    r_blk_size, c_blk_size = check_ints(1, r_blk_size=r_blk_size, c_blk_size=c_blk_size)
    for name, value in (("r", r), ("c", c)):
        if isinstance(value, Tensor):
            if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
                raise ValueError(f"{name} must be integers, got {shown(value)}")
        else:
            check_int(name, value, 0)
    return (r + 1) * r_blk_size - 1 >= c * c_blk_size


def check_segment_ids(
    segment_ids: SegmentIds | Tensor | None, B: int, T: int, S: int, device: torch.device
) -> SegmentIds | None:
    """Integers of shapes [B, T] and [B, S]; one tensor serves both where T is S."""
    if segment_ids is None:
        return None
    if isinstance(segment_ids, Tensor):
        if T != S:
            raise ValueError(
                "segment_ids must be SegmentIds(q, kv) where queries and keys differ in number, "
                f"got one tensor for T={T} and S={S}"
            )
        segment_ids = SegmentIds(segment_ids, segment_ids)
    if not isinstance(segment_ids, tuple) or len(segment_ids) != 2:
        raise ValueError(
            "segment_ids must be SegmentIds(q, kv), a tensor or None, "
            f"got {type(segment_ids).__name__}"
        )
    for name, ids, length in zip(("q", "kv"), segment_ids, (T, S), strict=True):
        name = f"segment_ids.{name}"
        if not isinstance(ids, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(ids).__name__}")
        if list(ids.shape) != [B, length]:
            raise ValueError(f"{name} must have shape {[B, length]}, got {list(ids.shape)}")
        other = ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool
        if other or ids.device != device:
            raise ValueError(
                f"{name} must be integers on {device}, got {ids.dtype} on {ids.device}"
            )
    return SegmentIds(*segment_ids)
