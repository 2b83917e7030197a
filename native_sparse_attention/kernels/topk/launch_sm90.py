"""Launches of `softmax_mass_sm90.py`, and the calls that it supports."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..common import launch, sm90
from ..common.counts import cdiv
from ..common.launch import LOG2_E

# warps of a program; windows of a step; places of the ring
WARPS, KEYS, STAGES = 4, 64, 2
# rows of a tile, and registers of a thread, by heads that rank together: lists of 16 tokens fit the
# registers beside scores of 4 heads, not of 8; 3 or 4 programs fit a multiprocessor
TILES = {4: (64, 168), 8: (64, 128), 64: (128, 168)}
# columns of a box of queries
WIDTH = 64
# widths of heads; heads that rank together; windows that end in a block; and blocks that a query
# chooses, at most
WIDTHS, GROUPS, PER_BLOCK, MOST_SLOTS = (64, 128), (4, 8, 16, 32, 64), (2, 4, 8), 16
# tiles that a multiprocessor has at least
LEAST_TILES = 8


def tile_of(q: Tensor, ranks: int) -> tuple[int, int]:
    """Rows of a tile, and registers of a thread."""
    return launch.row(TILES, q.shape[2] // ranks)


def rows_of(q: Tensor, ranks: int, stride: int) -> Tensor:
    """The queries that are ranked: heads [B, of, T, heads, D], of neighbouring tokens so many that
    eight rows are of four tokens, or of as many as a tile has."""
    heads_per_row = 8 // min(4, tile_of(q, ranks)[0] * ranks // q.shape[2])
    return q[:, ::stride].unflatten(2, (-1, heads_per_row)).transpose(1, 2)


def tiles_of(q: Tensor, ranks: int, stride: int) -> tuple[int, int]:
    """Tiles of a line, a row and ranking head, and lines."""
    tokens = tile_of(q, ranks)[0] * ranks // q.shape[2]
    return cdiv(cdiv(q.shape[1], stride), tokens), q.shape[0] * ranks


def is_supported(
    q: Tensor,
    ck: Tensor,
    first_token: int,
    ranks: int,
    l: int,
    d: int,
    s: int,
    n: int,
    stride: int,
    plain: bool,
) -> bool:
    """Whether the kernel takes a call, `plain` without documents, soft cap and rows that start at
    different positions. With `launch.using({"softmax_mass_sm90": True})` however few tiles there
    are; with False never, and not where the call asks for tiles."""
    wanted = launch.override.get("softmax_mass_sm90")
    tiled = "ranking.probs" in launch.override
    if wanted is False or tiled or not plain or not sm90.available(q):
        return False
    sizes = q.element_size() == 2 and q.shape[-1] in WIDTHS and q.shape[2] // ranks in GROUPS
    # whole windows end in a block, and reach no further than the one before
    per_block = s // d
    whole = s % d == 0 and per_block in PER_BLOCK and d <= l <= d + s
    slots = whole and 0 < n <= min(MOST_SLOTS, KEYS // per_block)
    if not (sizes and slots and first_token % stride == 0):
        return False
    tiles, lines = tiles_of(q, ranks, stride)
    if not wanted and tiles * lines < LEAST_TILES * sm90.multiprocessors(q.device):
        return False
    return all(launch.tma_descriptor(t, KEYS) is not None for t in (q, ck))


def rank(
    q: Tensor,
    ck: Tensor,
    lse: Tensor,
    out: Tensor,
    first_token: int,
    num_ranked: int,
    l: int,
    d: int,
    s: int,
    num_initial: int,
    num_local: int,
    stride: int,
    causal: bool,
    scale: float,
) -> None:
    """As `softmax_mass.nsa_topk_softmax_mass`."""
    from .softmax_mass_sm90 import nsa_topk_softmax_mass_sm90

    ranks, n, D = out.shape[2], out.shape[3], q.shape[-1]
    tiles, lines = tiles_of(q, ranks, stride)
    groups, rows = q.shape[2] // ranks, rows_of(q, ranks, stride)
    size, registers = tile_of(q, ranks)
    shape = [1, groups // rows.shape[3], 8 // rows.shape[3], rows.shape[3], WIDTH]
    args: dict[str, Any] = dict(
        q=sm90.box(rows, shape), ck=sm90.box(ck, [1, KEYS, 1, D]), lse=lse, out=out,
        first_token=first_token, T=q.shape[1], C=num_ranked, W=ck.shape[1], RANKS=ranks,
        tiles=tiles, lines=lines, scale_log2=scale * LOG2_E,
    )  # fmt: skip
    nsa_topk_softmax_mass_sm90[(tiles * lines,)](
        **args, G=groups, RANKS_PER_KV=ranks // ck.shape[2], ROWS=size, SLOTS=n, WINDOW=l, d=d, s=s,
        INITIAL=num_initial, LOCAL=max(num_local, 1), STRIDE=stride, CAUSAL=causal, STAGES=STAGES,
        num_warps=WARPS, maxnreg=registers,
    )  # fmt: skip
