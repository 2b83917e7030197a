"""The masks of the three branches: sliding window, compressed, selected.

b, h    batch row, query head
i, j    query, key; absolute positions where said so, else indices of the tensors
r       heads that select: KV heads, or query heads where each selects for itself
c       selection blocks
tq, tk  tiles of queries, of keys
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import blocks
from ..checks.scalars import TOO_LARGE
from ..checks.tensors import (
    INDEX_DTYPES,
    check_bool,
    check_given,
    check_indices,
    check_int,
    check_ints,
    shown,
)
from .spans import before_mask_mod, full_before
from .tiles import (
    TILE,
    MaskMod,
    Number,
    cached,
    default_device,
    from_intervals,
    from_tiles,
    scalar,
    tile_bounds,
)

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# mask mods. `offset` is the absolute position of query 0. The block masks below hand all numbers
# over as tensors of one element: these may change without a recompilation, and an integer that
# dynamo has made symbolic cannot be lowered inside a mask mod (torch 2.11)


def check_number(name: str, value: Number, minimum: int) -> Number:
    """An integer of at least `minimum`, or a tensor of one, which is not looked at."""
    if isinstance(value, Tensor):
        if value.numel() == 1 and value.dtype in INDEX_DTYPES:
            return value
        raise ValueError(f"{name} must be an integer or a tensor of one, got {shown(value)}")
    return check_int(name, value, minimum)


def check_offset(offset: Number) -> Number:
    return check_number("offset", offset, -TOO_LARGE)


def sliding_mask_mod(window_size: Number, causal: bool = True, offset: Number = 0) -> MaskMod:
    """Keys `i - w .. i`, or `i - w .. i + w` where not causal.

    Raises:
        ValueError: a window_size below 0, an offset that is no integer.
    """
    window_size, offset = check_number("window_size", window_size, 0), check_offset(offset)
    causal = check_bool("causal", causal)
    ahead = window_size * 0 if causal else window_size

    def sliding_mask(b_idx: Tensor, h_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = q_idx + offset - kv_idx
        return (distance <= window_size) & (distance >= -ahead)

    return sliding_mask


def compress_mask_mod(stride: Number, mem_kv_len: Number = 0, offset: Number = 0) -> MaskMod:
    """The `mem_kv_len` memory keys, which come first, and the windows that end before the query.

    Raises:
        ValueError: a stride below 1, a mem_kv_len below 0, an offset that is no integer.
    """
    stride, offset = check_number("stride", stride, 1), check_offset(offset)
    mem_kv_len = check_number("mem_kv_len", mem_kv_len, 0)

    def compress_mask(b_idx: Tensor, h_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        # memory keys are windows of negative index, and before any window
        return kv_idx - mem_kv_len < blocks.num_visible_windows(q_idx + offset, stride)

    return compress_mask


def selected_mask_mod(
    membership: Tensor,
    block_size: Number,
    num_grouped_queries: Number = 1,
    causal: bool = True,
    offset: Number = 0,
) -> MaskMod:
    """Keys of the blocks in `membership`, bool [b r i c+1], of `block_membership`; causally,
    those up to the query.

    Raises:
        ValueError: a membership of another dtype or shape, a block_size or num_grouped_queries
            below 1, an offset that is no integer.
    """
    check_given(membership=membership)
    if membership.dtype != torch.bool or membership.ndim != 4:
        raise ValueError(
            f"membership must be bool of shape [b, r, i, c + 1], got {shown(membership)}"
        )
    block_size = check_number("block_size", block_size, 1)
    num_grouped_queries = check_number("num_grouped_queries", num_grouped_queries, 1)
    causal, offset = check_bool("causal", causal), check_offset(offset)

    def selected_mask(b_idx: Tensor, h_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        member = membership[b_idx, h_idx // num_grouped_queries, q_idx, kv_idx // block_size]
        if not causal:
            return member
        return member & (kv_idx <= q_idx + offset)

    return selected_mask


def block_membership(
    block_indices: Tensor,
    num_blocks: int,
    block_size: int,
    *,
    causal: bool = True,
    num_initial_blocks: int = 0,
    num_local_blocks: int = 1,
    offset: int = 0,
    bounds: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Which blocks each query attends to, bool [b r i c+1], from those selected, [b r i n].

    The last column is never read: it takes the entries that are no block, and keeps that axis from
    having length 1, which would be compiled apart.

    Attended are the selected ones (an entry that is no block, such as -1, is passed over), the
    first `num_initial_blocks` and, causally, the `num_local_blocks` that end with the query's own.
    Causally none begins after the query. With `bounds` [b i] each query has the blocks of its own
    document, from the first of them up to the second.
    """
    index = block_indices.long()
    index = torch.where((index >= 0) & (index < num_blocks), index, num_blocks)
    shape = (*index.shape[:-1], num_blocks + 1)
    membership = torch.zeros(shape, dtype=torch.bool, device=index.device).scatter_(-1, index, True)
    c = torch.arange(num_blocks + 1, device=index.device)
    if bounds is None:
        membership[..., :num_initial_blocks] = True
    else:
        first, end = (t[:, None, :, None] for t in bounds)
        membership |= c < first + num_initial_blocks
    if causal:
        i = torch.arange(index.shape[2], device=index.device) + offset
        own = (i // block_size)[:, None]
        membership |= (c <= own) & (c > own - num_local_blocks)
        membership &= c <= own
    return membership if bounds is None else membership & (c >= first) & (c < end)


# block masks


def sliding_block_mask(
    q_len: int, kv_len: int, window_size: int, causal: bool, offset: int, device: torch.device
) -> BlockMask:
    """Of `sliding_mask_mod`: T queries from position `offset` on, over S keys."""

    def interval(i: Tensor) -> tuple[Tensor, Tensor]:
        i = i + offset
        return i - window_size, i if causal else i + window_size

    mask_mod = sliding_mask_mod(scalar(window_size, device), causal, scalar(offset, device))
    return from_intervals(interval, mask_mod, q_len, kv_len, device)


def compress_block_mask(
    q_len: int, kv_len: int, stride: int, mem_kv_len: int, offset: int, device: torch.device
) -> BlockMask:
    """Of `compress_mask_mod`; `kv_len` counts the windows and the memory."""

    def interval(i: Tensor) -> tuple[Tensor, Tensor]:
        last = mem_kv_len + blocks.num_visible_windows(i + offset, stride) - 1
        return torch.zeros_like(i), last

    numbers = (scalar(n, device) for n in (stride, mem_kv_len, offset))
    mask_mod = compress_mask_mod(*numbers)
    return from_intervals(interval, mask_mod, q_len, kv_len, device)


def selected_block_mask(
    membership: Tensor,
    kv_len: int,
    block_size: int,
    num_grouped_queries: int = 1,
    causal: bool = True,
    offset: int = 0,
    ends: Tensor | None = None,
) -> BlockMask:
    """Of `selected_mask_mod`, from `block_membership` [b r i c+1]: memory O(T * S / s). With `ends`
    [b i] a query sees only the keys before its own."""
    q_len, device = membership.shape[2], membership.device
    top, bottom, whole_q = (t[:, None] for t in tile_bounds(q_len, device))
    left, right, whole_kv = tile_bounds(kv_len, device)

    # how many rows of each tile of queries attend to each block [b r tq c]
    padding = -q_len % TILE
    rows = F.pad(membership, (0, 0, 0, padding)).unflatten(2, (-1, TILE))
    some, every = rows.any(dim=3), rows.all(dim=3)

    def count(of: Tensor) -> Tensor:
        """How many of the blocks that each tile of keys shares tokens with, [b r tq tk]"""
        sums = F.pad(of.cumsum(dim=-1, dtype=torch.int32), (1, 0))
        return sums[..., right // block_size + 1] - sums[..., left // block_size]

    touched = count(some) > 0
    full = (count(every) == right // block_size - left // block_size + 1) & whole_q & whole_kv
    if causal:
        touched &= left <= bottom + offset
        full &= right <= top + offset
    touched, full = (t.repeat_interleave(num_grouped_queries, dim=1) for t in (touched, full))
    size, groups, first = (scalar(n, device) for n in (block_size, num_grouped_queries, offset))
    mask_mod = selected_mask_mod(membership, size, groups, causal, first)
    if ends is not None:
        full, mask_mod = full & full_before(ends, q_len, kv_len), before_mask_mod(mask_mod, ends)
    return from_tiles(touched, full, mask_mod, q_len, kv_len)


cached_sliding_block_mask = cached(sliding_block_mask)
cached_compress_block_mask = cached(compress_block_mask)


# the published package's names


def create_sliding_mask(
    seq_len: int,
    window_size: int,
    causal: bool = True,
    device: torch.device | str | None = None,
) -> BlockMask:
    """The window branch's mask for `SparseAttention.forward(sliding_window_flex_mask=...)`.

    Query i sees keys `i - window_size .. i`, non-causally to `i + window_size`. `device` is CUDA by
    default where there is one.

    Raises:
        ValueError: seq_len below 1, window_size below 0.
    """
    seq_len = check_int("seq_len", seq_len, 1)
    window_size = check_int("window_size", window_size, 0)
    causal = check_bool("causal", causal)
    return sliding_block_mask(seq_len, seq_len, window_size, causal, 0, default_device(device))


def create_compress_mask(
    seq_len: int,
    kv_seq_len: int,
    compress_block_sliding_stride: int,
    mem_kv_len: int = 0,
    causal: bool = True,
    device: torch.device | str | None = None,
) -> BlockMask | None:
    """The compressed branch's mask: `mem_kv_len` memory keys, then `kv_seq_len` windows.

    Query i sees all memory, and window j where `(j + 1) * stride - 1 < i`. None where not causal:
    everything is visible. `device` is CUDA by default where there is one.

    Raises:
        ValueError: seq_len or the stride below 1, kv_seq_len or mem_kv_len below 0.
    """
    seq_len, stride = check_ints(
        1, seq_len=seq_len, compress_block_sliding_stride=compress_block_sliding_stride
    )
    kv_seq_len, mem_kv_len = check_ints(0, kv_seq_len=kv_seq_len, mem_kv_len=mem_kv_len)
    where = default_device(device)
    if not check_bool("causal", causal):
        return None
    return compress_block_mask(seq_len, mem_kv_len + kv_seq_len, stride, mem_kv_len, 0, where)


def create_fine_mask(
    seq_len: int, fine_block_size: int, causal: bool = True
) -> Callable[..., BlockMask]:
    """The selected branch's mask, for `SparseAttention.forward(fine_selection_flex_mask=...)`.

    Returns:
        `inner(selected_block_indices, num_grouped_queries=1)`, which takes the blocks [b h i sel]
        that each query selected (-1 for an empty slot) and returns their block mask, with
        `h * num_grouped_queries` heads, on their device. Causally, a query's own block is always
        attended, and no key after the query.

    Raises:
        ValueError: seq_len or fine_block_size below 1, selected_block_indices of another length.
    """
    seq_len, fine_block_size = check_ints(1, seq_len=seq_len, fine_block_size=fine_block_size)
    causal = check_bool("causal", causal)

    def inner(selected_block_indices: Tensor, num_grouped_queries: int = 1) -> BlockMask:
        check_given(selected_block_indices=selected_block_indices)
        check_indices("selected_block_indices", selected_block_indices)
        num_grouped_queries = check_int("num_grouped_queries", num_grouped_queries, 1)
        if selected_block_indices.ndim != 4 or selected_block_indices.shape[2] != seq_len:
            raise ValueError(
                f"selected_block_indices must have shape [b, h, {seq_len}, sel], "
                f"got {list(selected_block_indices.shape)}"
            )
        num_blocks = blocks.num_blocks(seq_len, fine_block_size)
        membership = block_membership(
            selected_block_indices, num_blocks, fine_block_size, causal=causal
        )
        return selected_block_mask(
            membership, seq_len, fine_block_size, num_grouped_queries, causal
        )

    return inner
