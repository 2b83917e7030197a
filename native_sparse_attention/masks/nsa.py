"""Masks of the three branches: sliding window, compressed, selected.

b, h    batch row, query head
i, j    query, key: indices of the tensors, unless stated to be absolute positions
r       heads that select: KV heads, or query heads if each selects for itself
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
from ..checks import (
    INDEX_DTYPES,
    TOO_LARGE,
    check_bool,
    check_given,
    check_int,
    check_ints,
    describe,
)
from .tiles import (
    TILE,
    MaskMod,
    and_masks,
    cached,
    constant,
    default_device,
    make_block_mask,
    make_range_mask,
    read,
    scalar,
    tile_bounds,
)

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# mask mods. `offset` is the absolute position of query 0. The block masks below pass all numbers as
# tensors of one element: their values may change without a recompilation

Number = int | Tensor  # a tensor of one element


def check_number(name: str, value: Number, minimum: int = -TOO_LARGE) -> str | Tensor:
    """Check an integer of at least `minimum`, or a tensor of one, whose value is not read. Returns
    what `read` reads inside of a mod."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.dtype in INDEX_DTYPES:
        return value
    return constant(check_int(name, value, minimum))


def sliding_mask_mod(window_size: Number, causal: bool = True, offset: Number = 0) -> MaskMod:
    """Keys `i - w .. i`, or `i - w .. i + w` if not causal.

    Raises:
        ValueError: window_size below 0, offset not an integer.
    """
    max_past, first = check_number("window_size", window_size, 0), check_number("offset", offset)
    max_future = constant(0) if check_bool("causal", causal) else max_past

    def sliding_mask(b_idx: Tensor, h_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = q_idx + read(first) - kv_idx
        return (distance <= read(max_past)) & (distance >= -read(max_future))

    return sliding_mask


def compress_mask_mod(stride: Number, mem_kv_len: Number = 0, offset: Number = 0) -> MaskMod:
    """First the `mem_kv_len` memory keys, then the windows that end before the query.

    Raises:
        ValueError: stride below 1, mem_kv_len below 0, offset not an integer.
    """
    step, first = check_number("stride", stride, 1), check_number("offset", offset)
    memory = check_number("mem_kv_len", mem_kv_len, 0)

    def compress_mask(b_idx: Tensor, h_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        # memory keys are windows of negative index, which every query sees
        num_visible = blocks.num_visible_windows(q_idx + read(first), read(step))
        return kv_idx - read(memory) < num_visible

    return compress_mask


def selected_mask_mod(
    membership: Tensor,
    block_size: Number,
    num_grouped_queries: Number = 1,
    causal: bool = True,
    offset: Number = 0,
) -> MaskMod:
    """Keys of the blocks in `membership`, bool [b r i c+1] of `block_membership`; if causal, only
    keys up to the query.

    Raises:
        ValueError: membership of another dtype or shape, block_size or num_grouped_queries below 1,
            offset not an integer.
    """
    check_given(membership=membership)
    if membership.dtype != torch.bool or membership.ndim != 4:
        raise ValueError(
            f"membership must be bool of shape [b, r, i, c + 1], got {describe(membership)}"
        )
    size, first = check_number("block_size", block_size, 1), check_number("offset", offset)
    groups = check_number("num_grouped_queries", num_grouped_queries, 1)
    causal = check_bool("causal", causal)

    def selected_mask(b_idx: Tensor, h_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        member = membership[b_idx, h_idx // read(groups), q_idx, kv_idx // read(size)]
        return member & (kv_idx <= q_idx + read(first)) if causal else member

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
    """Blocks that each query reads, bool [b r i c+1], from its block indices [b r i n].

    A query reads its selected blocks, the first `num_initial_blocks` and, causally, the
    `num_local_blocks` that end with its own block. Indices that are no block, such as -1, are
    skipped. Causally no block begins after the query. With `bounds` [b i] a query reads only blocks
    of its own document, `bounds[0] .. bounds[1] - 1`.

    Mods never read the last column. It collects indices that are no block, and it keeps the axis
    longer than 1, since torch would compile length 1 separately.
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
        query_block = (i // block_size)[:, None]
        membership |= (c <= query_block) & (c > query_block - num_local_blocks)
        membership &= c <= query_block
    return membership if bounds is None else membership & (c >= first) & (c < end)


# block masks


@cached
def sliding_block_mask(
    q_len: int, kv_len: int, window_size: int, causal: bool, offset: int, device: torch.device
) -> BlockMask:
    """Block mask of `sliding_mask_mod`: T queries from position `offset`, over S keys."""
    i = torch.arange(q_len, device=device)[None] + offset
    mask_mod = sliding_mask_mod(scalar(window_size, device), causal, scalar(offset, device))
    return make_range_mask(i - window_size, i + 1 + (not causal) * window_size, mask_mod, kv_len)


@cached
def compress_block_mask(
    q_len: int, kv_len: int, stride: int, mem_kv_len: int, offset: int, device: torch.device
) -> BlockMask:
    """Block mask of `compress_mask_mod`; `kv_len` counts windows and memory."""
    i = torch.arange(q_len, device=device)[None] + offset
    mask_mod = compress_mask_mod(*(scalar(n, device) for n in (stride, mem_kv_len, offset)))
    num_visible = mem_kv_len + blocks.num_visible_windows(i, stride)
    return make_range_mask(torch.zeros_like(i), num_visible, mask_mod, kv_len)


def range_block_mask(lo: Tensor, hi: Tensor, memory: int, kv_len: int) -> BlockMask:
    """Block mask of packed documents: query i sees the `memory` keys and, after them, keys
    `lo .. hi - 1`, [b i] each. `kv_len` counts memory too. `make_range_mask` has the conditions."""
    lo, hi, num_memory = lo.contiguous(), hi.contiguous(), scalar(memory, lo.device)

    def range_mask(b_idx: Tensor, h_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        key = kv_idx - num_memory
        return ((key >= lo[b_idx, q_idx]) & (key < hi[b_idx, q_idx])) | (key < 0)

    return make_range_mask(lo, hi, range_mask, kv_len, memory)


def selected_block_mask(
    membership: Tensor,
    kv_len: int,
    block_size: int,
    num_grouped_queries: int = 1,
    causal: bool = True,
    offset: int = 0,
    ends: Tensor | None = None,
) -> BlockMask:
    """Block mask of `selected_mask_mod`, from `block_membership` [b r i c+1], in memory
    O(T * S / s). With `ends` [b i], which may not decrease, query i sees only keys before
    `ends[b, i]`."""
    q_len, device = membership.shape[2], membership.device
    top, bottom, whole_q = (t[:, None] for t in tile_bounds(q_len, device))
    left, right, whole_kv = tile_bounds(kv_len, device)

    # whether some and all queries of each tile read each block [b r tq c]
    rows = F.pad(membership, (0, 0, 0, -q_len % TILE)).unflatten(2, (-1, TILE))

    def count(marked: Tensor) -> Tensor:
        """Number of marked blocks that overlap each tile of keys, [b r tq tk]"""
        sums = F.pad(marked.cumsum(dim=-1, dtype=torch.int32), (1, 0))
        return sums[..., right // block_size + 1] - sums[..., left // block_size]

    touched = count(rows.any(dim=3)) > 0
    num_overlapping = right // block_size - left // block_size + 1
    full = (count(rows.all(dim=3)) == num_overlapping) & whole_q & whole_kv
    if causal:
        touched &= left <= bottom + offset
        full &= right <= top + offset
    touched, full = (t.repeat_interleave(num_grouped_queries, dim=1) for t in (touched, full))
    size, groups, first = (scalar(n, device) for n in (block_size, num_grouped_queries, offset))
    mask_mod = selected_mask_mod(membership, size, groups, causal, first)
    if ends is not None:
        full = full & (right < ends[:, top])[:, None]
        mask_mod = and_masks(mask_mod, lambda b, h, i, j: j < ends[b, i])
    return make_block_mask(touched, full, mask_mod, q_len, kv_len)


# names of the published package


def create_sliding_mask(
    seq_len: int,
    window_size: int,
    causal: bool = True,
    device: torch.device | str | None = None,
) -> BlockMask:
    """Mask of the window branch, for `SparseAttention.forward(sliding_window_flex_mask=...)`.

    Query i sees keys `i - window_size .. i`, up to `i + window_size` if not causal. `device` is
    CUDA by default if available.

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
    """Mask of the compressed branch: `mem_kv_len` memory keys, then `kv_seq_len` windows.

    Query i sees all memory, and window j if `(j + 1) * stride - 1 < i`. None if not causal, since
    all pairs are visible. `device` is CUDA by default if available.

    Raises:
        ValueError: seq_len or the stride below 1, kv_seq_len or mem_kv_len below 0.
    """
    seq_len, stride = check_ints(
        1, seq_len=seq_len, compress_block_sliding_stride=compress_block_sliding_stride
    )
    kv_seq_len, mem_kv_len = check_ints(0, kv_seq_len=kv_seq_len, mem_kv_len=mem_kv_len)
    device = default_device(device)
    if not check_bool("causal", causal):
        return None
    return compress_block_mask(seq_len, mem_kv_len + kv_seq_len, stride, mem_kv_len, 0, device)


def create_fine_mask(
    seq_len: int, fine_block_size: int, causal: bool = True
) -> Callable[..., BlockMask]:
    """Mask of the selected branch, for `SparseAttention.forward(fine_selection_flex_mask=...)`.

    Returns:
        `inner(selected_block_indices, num_grouped_queries=1)`. It takes the block indices
        [b h i sel] of each query (-1 for an empty slot) and returns their block mask on the same
        device, with `h * num_grouped_queries` heads. Causally a query always reads its own block,
        and no key after itself.

    Raises:
        ValueError: seq_len or fine_block_size below 1, selected_block_indices of another length.
    """
    seq_len, fine_block_size = check_ints(1, seq_len=seq_len, fine_block_size=fine_block_size)
    causal = check_bool("causal", causal)
    num_blocks = blocks.num_blocks(seq_len, fine_block_size)

    def inner(selected_block_indices: Tensor, num_grouped_queries: int = 1) -> BlockMask:
        check_given(selected_block_indices=selected_block_indices)
        if selected_block_indices.dtype not in INDEX_DTYPES:
            got = selected_block_indices.dtype
            raise ValueError(f"selected_block_indices must be int32 or int64, got {got}")
        num_grouped_queries = check_int("num_grouped_queries", num_grouped_queries, 1)
        if selected_block_indices.ndim != 4 or selected_block_indices.shape[2] != seq_len:
            raise ValueError(
                f"selected_block_indices must have shape [b, h, {seq_len}, sel], "
                f"got {list(selected_block_indices.shape)}"
            )
        membership = block_membership(
            selected_block_indices, num_blocks, fine_block_size, causal=causal
        )
        return selected_block_mask(
            membership, seq_len, fine_block_size, num_grouped_queries, causal
        )

    return inner
