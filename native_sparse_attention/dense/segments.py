"""Segment ids of packed documents, and the position of blocks relative to the diagonal."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..checks import (
    INTEGER_DTYPES,
    check_given,
    check_int,
    check_ints,
    check_same,
    check_shapes,
    check_tensor,
    describe,
)
from ..compat import cast_to_autocast_dtype

Int = TypeVar("Int", int, Tensor)


class SegmentIds(NamedTuple):
    """Segment ids of queries and keys. A query sees only keys with its own id.

    Attention then never crosses documents that share a packed row. Ids are integers in any order. A
    segment need not be contiguous, and an id of the queries need not occur among the keys.

    Args:
        q: ids of the queries, [B, T].
        kv: ids of the keys and values, [B, S].
    """

    q: Tensor
    kv: Tensor


def below_or_on_diag(r: Int, r_blk_size: int, c: Int, c_blk_size: int) -> Any:
    """Whether block (r, c) has an element on or below the diagonal, that is, a key that a causal
    query sees.

    `(r + 1) r_blk_size - 1 >= c c_blk_size`: the index of the block's last row is at least the
    index of its first column. (Other kernels compare strictly. They lose blocks that touch the
    diagonal only in that corner; blocks of equal even sizes never do.)

    Args:
        r, c: row and column of the block, counted in blocks; ints or integer tensors.
        r_blk_size, c_blk_size: rows and columns of a block.

    Returns:
        A bool, or a tensor of bools if r or c is a tensor.

    Raises:
        ValueError: r or c is not an integer of at least 0, or a size is below 1.
    """
    r_blk_size, c_blk_size = check_ints(1, r_blk_size=r_blk_size, c_blk_size=c_blk_size)
    for name, value in (("r", r), ("c", c)):
        if isinstance(value, Tensor):
            if value.dtype not in INTEGER_DTYPES:
                raise ValueError(f"{name} must be integers, got {describe(value)}")
        else:
            check_int(name, value, 0)
    return (r + 1) * r_blk_size - 1 >= c * c_blk_size


def check_qkv(
    q: Tensor, k: Tensor, v: Tensor, *shapes: str
) -> tuple[dict[str, int], Tensor, Tensor, Tensor]:
    """Check queries, keys and values, and cast them as autocast casts a matmul's inputs."""
    check_given(q=q, k=k, v=v)
    q, k, v = cast_to_autocast_dtype(q, k, v)
    dims = check_shapes(q=(q, shapes[0]), k=(k, shapes[1]), v=(v, shapes[2]))
    check_same(q=q, k=k, v=v)
    return dims, q, k, v


def check_segment_ids(
    segment_ids: SegmentIds | Tensor | None, B: int, T: int, S: int, device: torch.device
) -> SegmentIds | None:
    """Check segment ids: integers [B, T] and [B, S], or one tensor for both if T = S."""
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
        check_given(**{f"segment_ids.{name}": ids})
        check_tensor(f"segment_ids.{name}", ids, INTEGER_DTYPES, device, (B, length))
    return SegmentIds(*segment_ids)


def is_same_segment(segments: SegmentIds, rows: slice, keys: slice) -> Tensor:
    """Which queries and keys of a tile share a segment, [b i j]."""
    return segments.q[:, rows, None] == segments.kv[:, None, keys]
