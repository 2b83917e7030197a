"""Room for the inverse of lists, by spans whose parts fit in memory."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from ..common import launch
from ..common.counts import cdiv
from ..common.launch import Selection
from . import csr, key_major_sm90
from .csr import CSRPlan


class Parts(NamedTuple):
    """Memory for the parts of a span, over that of q; tokens, all of whose parts are kept anyhow,
    but not in more than `most` times the memory of q."""

    share: float
    tokens: int = 0
    most: float = math.inf


# by query heads a KV head. With `most` a forward and a backward pass take less than 1.5 times the
# memory of dense attention, also of few tokens
PARTS = {
    "forward": {1: Parts(3.3, 2816, 4.4), 8: Parts(3.3, 4096, 6.6)},
    "backward": {1: Parts(1.7, 2048, 3.3), 8: Parts(3.3, 4096, 6.6), 64: Parts(4.5)},
}
# larger groups: lists, all of whose parts are kept anyhow
FEW_LISTS = 1 << 14
# tokens, all of whose parts are kept however much that is
LEAST_TOKENS = 128
# rows of an item at least, where parts of dq are kept: shares of dk and dv, which items of a block
# that has several leave, then take little memory beside these
LEAST_ROWS = 4096
# rows of an item of the forward at most, which leaves no shares: short items end together
FORWARD_ROWS = 1024


def allocate(
    q: Tensor, k: Tensor, selection: Selection, kernel: str, parts: int, neighbours: int = 1
) -> CSRPlan:
    """For the inverse, by spans whose parts, of so many rows, together take `PARTS` times as much
    memory as q does; in one where no parts are kept. It is of the lists of every so many-th token
    where `neighbours` are one entry."""
    block_indices = selection.block_indices[:, ::neighbours]
    (B, T, R, n), K = block_indices.shape, k.shape[2]
    groups = q.shape[2] // R * neighbours
    tokens = T  # whose parts are kept at once, of all heads
    if parts:
        share, few, most = launch.row(PARTS[kernel], groups)
        if groups >= launch.FEW_ROWS:
            few = FEW_LISTS // (B * R)
        of_q = groups * T / (n * parts)  # whose parts take as much memory as q
        tokens = int(max(min(max(share * of_q, few), most * of_q), LEAST_TOKENS))
    num_blocks = cdiv(k.shape[1], selection.s)
    heads = K
    if kernel == "backward" and groups < launch.FEW_ROWS:
        heads = heads_of_span(K, tokens * K // T, B * num_blocks)
    length = cdiv(T, cdiv(T * heads, tokens * K))
    rows = B * length * (R // K * heads) * groups * n
    most_rows = launch.work_tile_rows(rows, B * heads * num_blocks)
    if kernel == "forward":
        most_rows = min(most_rows, FORWARD_ROWS)
    if parts and kernel == "backward":
        most_rows = max(most_rows, LEAST_ROWS)
    chunk = max(most_rows // groups, 1)
    # short items of the forward end together anyhow, and by block more is found in the cache
    longest = kernel == "backward"
    return csr.allocate(block_indices, K, num_blocks, chunk, length, heads, longest)


def heads_of_span(num_heads: int, most: int, blocks: int) -> int:
    """KV heads of a backward span, each of so many blocks; at most so many of all tokens fit.
    Rather some heads of all tokens than all heads of some: dk and dv of a block then pass through
    memory once, and it has more rows in a span. But of no fewer blocks than keep the GPU busy. In
    larger groups and in the forward pass that counts for little, and rows of fewer tokens are read
    from the cache more often."""
    divisors = [heads for heads in range(1, num_heads + 1) if num_heads % heads == 0]
    fitting = [heads for heads in divisors if heads <= most]
    enough = [heads for heads in divisors if heads * blocks >= launch.ENOUGH_PROGRAMS]
    return max(fitting[-1] if fitting else 1, enough[0] if enough else num_heads)


class Pieces(NamedTuple):
    """How the backward pass takes a block: in so many pieces of so many keys, each of which leaves
    parts of so many rows; in Gluon or not."""

    number: int
    keys: int
    rows: int
    on_hopper: bool


def pieces(q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float) -> Pieces:
    s, groups = selection.s, q.shape[2] // selection.block_indices.shape[2]
    if key_major_sm90.is_supported(q, k, v, selection, scale):
        return Pieces(1, s, key_major_sm90.rows_of_part(groups), True)
    tile = launch.key_major_tile("backward", max(k.shape[-1], v.shape[-1]), groups, q.dtype)
    keys = min(launch.padded(s), tile.block_n)
    return Pieces(cdiv(s, keys), keys, groups, False)


def allocate_backward(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float, with_dq: bool,
    neighbours: int = 1,
) -> CSRPlan:  # fmt: skip
    """For the inverse of a `backward` that forms dq too, or not."""
    taken = pieces(q, k, v, selection, scale)
    parts = taken.number * taken.rows if with_dq else 0
    return allocate(q, k, selection, "backward", parts, neighbours)
