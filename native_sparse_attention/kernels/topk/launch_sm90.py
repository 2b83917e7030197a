"""Launches of `softmax_mass_sm90.py`, and the calls that it supports."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..common import launch, sm90
from ..common.counts import cdiv
from ..common.launch import LOG2_E

# warps of a program; windows of a step; stages
WARPS, KEYS, STAGES = 4, 64, 2
# rows of a tile, and registers of a thread, by heads that rank together: registers hold the sorted
# columns of 16 tokens besides scores of 4 heads, not of 8; 3 or 4 programs fit a multiprocessor
TILES = {4: (64, 168), 8: (64, 128), 64: (128, 168)}
# features of a TMA box of queries
WIDTH = 64
# supported: widths of heads; heads that rank together; windows that end in a block; largest n
WIDTHS, GROUPS, PER_BLOCK, MOST_SLOTS = (64, 128), (4, 8, 16, 32, 64), (2, 4, 8), 16
# least tiles per multiprocessor
LEAST_TILES = 8


def tile_of(q: Tensor, ranks: int) -> tuple[int, int]:
    """Rows of a tile, and registers of a thread."""
    return launch.row(TILES, q.shape[2] // ranks)


def ranked_rows(q: Tensor, ranks: int, stride: int) -> Tensor:
    """The ranked queries, regrouped [B, groups of heads, T, heads, D]. Eight rows of a tile hold
    `heads` heads of four neighbouring tokens, or of all its tokens if it has fewer."""
    heads_per_row = 8 // min(4, tile_of(q, ranks)[0] * ranks // q.shape[2])
    return q[:, ::stride].unflatten(2, (-1, heads_per_row)).transpose(1, 2)


def tiles_and_lines(q: Tensor, ranks: int, stride: int) -> tuple[int, int]:
    """Tiles of a line, and lines (batch rows x ranking heads)."""
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
    """Whether the kernel can run a call. A `plain` call has no documents, no soft cap and one start
    for all sequences. `launch.using({"softmax_mass_sm90": True})` lifts the least number of tiles;
    False disables the kernel, and so does an override of "ranking.probs"."""
    wanted = launch.override.get("softmax_mass_sm90")
    tiled = "ranking.probs" in launch.override
    if wanted is False or tiled or not plain or not sm90.available(q):
        return False
    sizes = q.element_size() == 2 and q.shape[-1] in WIDTHS and q.shape[2] // ranks in GROUPS
    # windows end within one block, and reach at most into the block before
    per_block = s // d
    whole = s % d == 0 and per_block in PER_BLOCK and d <= l <= d + s
    slots = whole and 0 < n <= min(MOST_SLOTS, KEYS // per_block)
    if not (sizes and slots and first_token % stride == 0):
        return False
    tiles, lines = tiles_and_lines(q, ranks, stride)
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
    """Write block indices to `out`, as `scores.nsa_topk_softmax_mass`."""
    from .softmax_mass_sm90 import nsa_topk_softmax_mass_sm90

    ranks, n, D = out.shape[2], out.shape[3], q.shape[-1]
    tiles, lines = tiles_and_lines(q, ranks, stride)
    groups, rows = q.shape[2] // ranks, ranked_rows(q, ranks, stride)
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
