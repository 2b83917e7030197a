"""Workspaces of the CSR, in chunks whose partial results fit in memory."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from ..common import launch
from ..common.counts import cdiv
from ..common.launch import Selection
from . import csr, key_major_sm90
from .csr import CSRPlan


class Budget(NamedTuple):
    """Memory of a chunk's partial results relative to q. A chunk has at least `tokens` tokens, as
    far as `max_ratio` allows."""

    ratio: float
    tokens: int = 0
    max_ratio: float = math.inf


# by query heads a KV head. `max_ratio` keeps a forward and a backward pass below 1.5 times the
# memory of dense attention for few tokens too
BUDGETS = {
    "forward": {1: Budget(3.3, 2816, 4.4), 8: Budget(3.3, 4096, 6.6)},
    "backward": {1: Budget(1.7, 2048, 3.3), 8: Budget(3.3, 4096, 6.6), 64: Budget(4.5)},
}
# larger groups: rows of block indices that a chunk has at least
FEW_SELECTIONS = 1 << 14
# tokens that a chunk has at least, whatever the memory
MIN_TOKENS = 128
# rows of a work tile at least, with partial dq: partial dk and dv then take little memory beside it
MIN_DQ_TILE_ROWS = 4096
# rows of a forward work tile at most: short work tiles end together
MAX_FORWARD_TILE_ROWS = 1024


def allocate(
    q: Tensor, k: Tensor, selection: Selection, kernel: str, pair_rows: int, pair_tokens: int = 1
) -> CSRPlan:
    """Workspaces of the CSR, in chunks whose partial results of `pair_rows` rows a pair take the
    memory of BUDGETS; one chunk without partial results. The CSR has the block indices of
    every `pair_tokens`-th token."""
    block_indices = selection.block_indices[:, ::pair_tokens]
    (B, T, R, n), K = block_indices.shape, k.shape[2]
    groups = q.shape[2] // R * pair_tokens
    tokens = T  # of a chunk of all heads
    if pair_rows:
        ratio, min_tokens, max_ratio = launch.row(BUDGETS[kernel], groups)
        if groups >= launch.FEW_ROWS:
            min_tokens = FEW_SELECTIONS // (B * R)
        q_tokens = groups * T / (n * pair_rows)  # whose partial results take the memory of q
        tokens = int(max(min(max(ratio * q_tokens, min_tokens), max_ratio * q_tokens), MIN_TOKENS))
    num_blocks = cdiv(k.shape[1], selection.s)
    heads = K
    if kernel == "backward" and groups < launch.FEW_ROWS:
        heads = chunk_heads(K, tokens * K // T, B * num_blocks)
    length = cdiv(T, cdiv(T * heads, tokens * K))
    rows = B * length * (R // K * heads) * groups * n
    max_tile_rows = launch.work_tile_rows(rows, B * heads * num_blocks)
    if kernel == "forward":
        max_tile_rows = min(max_tile_rows, MAX_FORWARD_TILE_ROWS)
    if pair_rows and kernel == "backward":
        max_tile_rows = max(max_tile_rows, MIN_DQ_TILE_ROWS)
    tile_pairs = max(max_tile_rows // groups, 1)
    # the forward's work tiles are short, and sorted by block they reuse the cache
    longest = kernel == "backward"
    return csr.allocate(block_indices, K, num_blocks, tile_pairs, length, heads, longest)


def chunk_heads(num_heads: int, max_heads: int, blocks: int) -> int:
    """KV heads of a backward chunk. `max_heads` heads of all tokens fit in memory, and `blocks` is
    the number of blocks a head. Some heads of all tokens are better than all heads of some tokens:
    dk and dv of a block then pass through memory once. A chunk keeps enough blocks for the GPU."""
    divisors = [heads for heads in range(1, num_heads + 1) if num_heads % heads == 0]
    fitting = [heads for heads in divisors if heads <= max_heads]
    enough = [heads for heads in divisors if heads * blocks >= launch.ENOUGH_PROGRAMS]
    return max(fitting[-1] if fitting else 1, enough[0] if enough else num_heads)


class BlockTiles(NamedTuple):
    """Tiles of a block in the backward: their number, keys of each, rows of partial dq a pair, and
    whether the Gluon kernel runs."""

    key_tiles: int
    keys: int
    partial_rows: int
    on_hopper: bool


def block_tiles(q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float) -> BlockTiles:
    s, groups = selection.s, q.shape[2] // selection.block_indices.shape[2]
    if key_major_sm90.is_supported(q, k, v, selection, scale):
        return BlockTiles(1, s, key_major_sm90.partial_dq_rows(groups), True)
    tile = launch.key_major_tile("backward", max(k.shape[-1], v.shape[-1]), groups, q.dtype)
    keys = min(launch.padded(s), tile.block_n)
    return BlockTiles(cdiv(s, keys), keys, groups, False)


def allocate_backward(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float, with_dq: bool,
    pair_tokens: int = 1,
) -> CSRPlan:  # fmt: skip
    """Workspaces of the CSR of a key-major backward, with partial dq if `with_dq`."""
    tiles = block_tiles(q, k, v, selection, scale)
    pair_rows = tiles.key_tiles * tiles.partial_rows if with_dq else 0
    return allocate(q, k, selection, "backward", pair_rows, pair_tokens)
