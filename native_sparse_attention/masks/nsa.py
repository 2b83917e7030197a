"""Masks of the three branches, and block masks of torch's flex_attention.

A *mask mod* decides about one pair (b, h, i, j). A *block mask* adds the tiles [tq tk] of queries
and keys with some allowed pair and those with only allowed pairs. No function here forms a T x S
array: `tile_counts` evaluates the pairs of one strip of queries at a time.

b, h    batch row, query head              c       selection blocks
i, j    query, key: indices of tensors     tq, tk  tiles of queries, of keys
r       heads that select: KV heads, or query heads if each selects for itself
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import blocks
from ..checks import (
    INDEX_DTYPES,
    check_bool,
    check_callable,
    check_device,
    check_int,
    check_ints,
    check_shapes,
    check_tensor,
)
from ..config import AttentionConfig
from ..ops.reference import forced_blocks, query_positions, scatter_blocks
from ..varlen import Documents

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

TILE = 128

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# pairs that one strip evaluates at once
PAIRS_AT_ONCE = 2**24


def constant(name: str, value: int, minimum: int = 0) -> str:
    """Check an integer for the closure of a mod, which reads it with `int`. torch's compiler makes
    a number in a closure symbolic at its second value, which flex_attention cannot compile. A
    string stays a constant of the graph."""
    return repr(check_int(name, value, minimum))


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """torch's `flex_attention.and_masks`: a pair is allowed if every mask mod allows it."""
    from torch.nn.attention import flex_attention as flex  # loads sympy, so not at import

    return flex.and_masks(*mask_mods)


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """torch's `flex_attention.or_masks`: a pair is allowed if any mask mod allows it."""
    from torch.nn.attention import flex_attention as flex

    return flex.or_masks(*mask_mods)


# mask mods. `offset` is the absolute position of query 0


def sliding_mask_mod(window_size: int, causal: bool = True, offset: int = 0) -> MaskMod:
    """Keys `i - w .. i`, or `i - w .. i + w` if not causal."""
    max_past, first = constant("window_size", window_size), constant("offset", offset)
    max_future = "0" if check_bool("causal", causal) else max_past

    def sliding_mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = i + int(first) - j
        return (distance <= int(max_past)) & (distance >= -int(max_future))

    return sliding_mask


def compress_mask_mod(stride: int, mem_kv_len: int = 0, offset: int = 0) -> MaskMod:
    """First the `mem_kv_len` memory keys, then the windows that end before the query."""
    step, first = constant("stride", stride, 1), constant("offset", offset)
    memory = constant("mem_kv_len", mem_kv_len)

    def compress_mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        # memory keys are windows of negative index, which every query sees
        return j - int(memory) < blocks.num_visible_windows(i + int(first), int(step))

    return compress_mask


def selected_mask_mod(
    membership: Tensor,
    block_size: int,
    num_grouped_queries: int = 1,
    causal: bool = True,
    offset: int = 0,
) -> MaskMod:
    """Keys of the blocks c with `membership[b, r, i, c]`, bool [b r i c+1] with a last column that
    no key reads; if causal, only keys up to the query. r is `h // num_grouped_queries`.
    """
    check_shapes(membership=(membership, "b r i c+1"))
    check_tensor("membership", membership, (torch.bool,), membership.device)
    size, first = constant("block_size", block_size, 1), constant("offset", offset)
    groups = constant("num_grouped_queries", num_grouped_queries, 1)
    causal = check_bool("causal", causal)

    def selected_mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        member = membership[b, h // int(groups), i, j // int(size)]
        return member & (j <= i + int(first)) if causal else member

    return selected_mask


def block_membership(
    block_indices: Tensor,
    num_blocks: int,
    config: AttentionConfig,
    offset: int = 0,
    documents: Documents | None = None,
) -> Tensor:
    """Blocks that each query reads, bool [b r i c+1]: those of its block indices [b i r n], and the
    forced ones of `config`. Mods never read the last column: it keeps the axis longer than 1, since
    torch would compile length 1 separately."""
    c = torch.arange(num_blocks + 1, device=block_indices.device)
    chosen = torch.ones_like(block_indices, dtype=torch.bool)
    chosen = scatter_blocks(chosen, block_indices, num_blocks + 1, False)
    i = query_positions(block_indices, offset)
    membership = chosen | forced_blocks(i, c, config, documents)[:, None]
    if documents is not None:
        first, end = (t[:, None, :, None] for t in documents.blocks(config.selection_block_size))
        membership &= (c >= first) & (c < end)
    return membership.contiguous()


def default_device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return check_device("device", device)


def cached(build: Callable[..., BlockMask]) -> Callable[..., BlockMask]:
    """Cache the masks of the last 64 shapes, except during tracing. Cached masks are never
    inference tensors, since the next user of a mask may train."""
    build_once = lru_cache(maxsize=64)(torch.inference_mode(False)(build))

    @wraps(build)
    def get(*args: Any) -> BlockMask:
        return (build if torch.compiler.is_compiling() else build_once)(*args)

    return get


def tile_bounds(length: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """First and last index of each tile of a sequence, and whether the tile is whole."""
    first = torch.arange(0, length, TILE, device=device)
    return first, (first + TILE - 1).clamp(max=length - 1), first + TILE <= length


def make_block_mask(
    touched: Tensor, full: Tensor, mask_mod: MaskMod, q_len: int, kv_len: int
) -> BlockMask:
    """A block mask from the tiles [b h tq tk] with some allowed pair and those with all allowed."""
    from torch.nn.attention.flex_attention import BlockMask

    def count_and_order(tiles: Tensor) -> tuple[Tensor, Tensor]:
        # marked tiles first
        order = tiles.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
        return tiles.sum(dim=-1, dtype=torch.int32), order.to(torch.int32)

    return BlockMask.from_kv_blocks(
        *count_and_order(touched & ~full),
        *count_and_order(full),
        BLOCK_SIZE=TILE,
        mask_mod=mask_mod,
        seq_lengths=(q_len, kv_len),
    )


def tile_counts(
    mask_mod: MaskMod, q_len: int, kv_len: int, device: torch.device, tile: int = TILE
) -> Tensor:
    """Number of allowed pairs of batch row 0 and head 0 in each tile of `tile` x `tile`, int64
    [tq tk], in memory O(T S / tile^2)."""
    from torch.nn.attention.flex_attention import create_mask

    # a whole number of tiles of queries
    rows = max(1, PAIRS_AT_ONCE // max(1, kv_len * tile)) * tile
    strips = []
    for first in range(0, q_len, rows):
        size = min(rows, q_len - first)

        def strip(b: Tensor, h: Tensor, i: Tensor, j: Tensor, first: int = first) -> Tensor:
            return mask_mod(b, h, i + first, j)

        allowed = create_mask(strip, 1, 1, size, kv_len, device=str(device))[0, 0]
        check_tensor("what mask_mod returns", allowed, (torch.bool,), allowed.device)
        padded = F.pad(allowed, (0, -kv_len % tile, 0, -size % tile))
        strips.append(padded.unflatten(1, (-1, tile)).unflatten(0, (-1, tile)).sum((1, 3)))
    return torch.cat(strips)


def block_mask_of(
    mask_mod: MaskMod, q_len: int, kv_len: int, device: torch.device | str | None = None
) -> BlockMask:
    """The block mask of any mask mod that depends on neither b nor h: the tiles of torch's
    `create_block_mask`, formed from a strip of pairs at a time, not from all T x S. `device` is
    CUDA by default if available."""
    q_len, kv_len = check_ints(1, q_len=q_len, kv_len=kv_len)
    check_callable("mask_mod", mask_mod, "(b, h, i, j)", required=True)
    counts = tile_counts(mask_mod, q_len, kv_len, default_device(device))[None, None]
    return make_block_mask(counts > 0, counts == TILE * TILE, mask_mod, q_len, kv_len)


# block masks. Their mods hold tensors and no numbers, so no value of a setting compiles anew


def range_block_mask(lo: Tensor, hi: Tensor, kv_len: int, memory: int = 0) -> BlockMask:
    """Block mask for queries that see the first `memory` keys and one KV range after them, keys
    `memory + lo .. memory + hi - 1`, [b i] each, or [1 i] for all rows of a batch. Neither bound
    may decrease along i, and ranges of neighbours must overlap or adjoin: the first and the last
    query of a tile determine the tile."""
    lo, hi = (memory + lo).contiguous(), (memory + hi).contiguous()
    q_len, device, is_batched = lo.shape[1], lo.device, len(lo) > 1
    num_memory = torch.full((), memory, device=device)

    def range_mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row = b if is_batched else b * 0
        return ((j >= lo[row, i]) & (j < hi[row, i])) | (j < num_memory)

    top, bottom, whole_q = tile_bounds(q_len, device)
    left, right, whole_kv = tile_bounds(kv_len, device)
    # [b tq 1], against [tk]
    lo_top, lo_bottom, hi_top, hi_bottom = (
        bound[:, edge, None] for bound in (lo, hi) for edge in (top, bottom)
    )
    touched = ((left < hi_bottom) & (right >= lo_top)) | (left < memory)
    full = ((left >= lo_bottom) & (right < hi_top)) | (right < memory)
    full = full & whole_q[:, None] & whole_kv
    return make_block_mask(touched[:, None], full[:, None], range_mask, q_len, kv_len)


@cached
def sliding_block_mask(
    q_len: int, kv_len: int, window_size: int, causal: bool, offset: int, device: torch.device
) -> BlockMask:
    """Block mask of `sliding_mask_mod`: T queries from position `offset`, over S keys."""
    i = torch.arange(q_len, device=device)[None] + offset
    return range_block_mask(i - window_size, i + 1 + (not causal) * window_size, kv_len)


@cached
def compress_block_mask(
    q_len: int, kv_len: int, stride: int, mem_kv_len: int, offset: int, device: torch.device
) -> BlockMask:
    """Block mask of `compress_mask_mod`; `kv_len` counts windows and memory."""
    i = torch.arange(q_len, device=device)[None] + offset
    num_visible = mem_kv_len + blocks.num_visible_windows(i, stride)
    return range_block_mask(torch.zeros_like(i), num_visible, kv_len)


def selected_block_mask(
    membership: Tensor, ends: Tensor, kv_len: int, block_size: int, num_grouped_queries: int = 1
) -> BlockMask:
    """Block mask of keys of the blocks in `membership` [b r i c+1] of `block_membership`, in memory
    O(T * S / s). Query i sees only keys before `ends` [b i] or [1 i], which may not decrease."""
    q_len, device, is_batched = membership.shape[2], membership.device, len(ends) > 1
    size, groups = (torch.full((), n, device=device) for n in (block_size, num_grouped_queries))
    ends = ends.contiguous()

    def selected_mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return membership[b, h // groups, i, j // size] & (j < ends[b if is_batched else b * 0, i])

    top, bottom, whole_q = tile_bounds(q_len, device)
    left, right, whole_kv = tile_bounds(kv_len, device)
    # whether some and all queries of each tile read each block [b r tq c]
    rows = F.pad(membership, (0, 0, 0, -q_len % TILE)).unflatten(2, (-1, TILE))

    def count(marked: Tensor) -> Tensor:
        """Number of marked blocks that overlap each tile of keys, [b r tq tk]"""
        sums = F.pad(marked.cumsum(dim=-1, dtype=torch.int32), (1, 0))
        return sums[..., right // block_size + 1] - sums[..., left // block_size]

    num_overlapping = right // block_size - left // block_size + 1
    touched = (count(rows.any(dim=3)) > 0) & (left < ends[:, bottom, None])[:, None]
    full = (count(rows.all(dim=3)) == num_overlapping) & (right < ends[:, top, None])[:, None]
    full = full & whole_q[:, None] & whole_kv
    touched, full = (t.repeat_interleave(num_grouped_queries, dim=1) for t in (touched, full))
    return make_block_mask(touched, full, selected_mask, q_len, kv_len)


# names of the published package


def create_sliding_mask(
    seq_len: int, window_size: int, causal: bool = True, device: torch.device | str | None = None
) -> BlockMask:
    """Mask of the window branch, for `SparseAttention.forward(sliding_window_flex_mask=...)`: keys
    `i - window_size .. i`, up to `i + window_size` if not causal. `device` is CUDA by default if
    available."""
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
    """Mask of the compressed branch: `mem_kv_len` memory keys, then `kv_seq_len` windows. Query i
    sees all memory, and window j if `(j + 1) * stride - 1 < i`. None if not causal, since all pairs
    are visible. `device` is CUDA by default if available."""
    seq_len = check_int("seq_len", seq_len, 1)
    stride = check_int("compress_block_sliding_stride", compress_block_sliding_stride, 1)
    kv_seq_len, mem_kv_len = check_ints(0, kv_seq_len=kv_seq_len, mem_kv_len=mem_kv_len)
    device = default_device(device)
    if not check_bool("causal", causal):
        return None
    return compress_block_mask(seq_len, mem_kv_len + kv_seq_len, stride, mem_kv_len, 0, device)


def create_fine_mask(
    seq_len: int, fine_block_size: int, causal: bool = True
) -> Callable[..., BlockMask]:
    """Mask of the selected branch, for `SparseAttention.forward(fine_selection_flex_mask=...)`.

    Returns `inner(selected_block_indices, num_grouped_queries=1)`, which maps the block indices
    [b h i sel] of each query (-1 for an empty slot) to their block mask on the same device, with
    `h * num_grouped_queries` heads. Causally a query always reads its own block, and no key after
    itself.
    """
    seq_len, fine_block_size = check_ints(1, seq_len=seq_len, fine_block_size=fine_block_size)
    causal = check_bool("causal", causal)
    config = AttentionConfig.unchecked(selection_block_size=fine_block_size, causal=causal)
    num_blocks = blocks.num_blocks(seq_len, fine_block_size)

    def inner(selected_block_indices: Tensor, num_grouped_queries: int = 1) -> BlockMask:
        indices = selected_block_indices
        check_shapes(selected_block_indices=(indices, f"b h {seq_len} sel"))
        check_tensor("selected_block_indices", indices, INDEX_DTYPES, indices.device)
        groups = check_int("num_grouped_queries", num_grouped_queries, 1)
        membership = block_membership(indices.transpose(1, 2), num_blocks, config)
        i = torch.arange(seq_len, device=indices.device)[None]
        ends = i + 1 if causal else torch.full_like(i, seq_len)
        return selected_block_mask(membership, ends, seq_len, fine_block_size, groups)

    return inner
