"""Rotary embedding of interleaved pairs of features. The kernel reads positions on the device: a
CUDA graph can capture a launch and replay it as sequences grow."""

from __future__ import annotations

import functools
from collections import namedtuple

import triton
import triton.language as tl
from torch import Tensor

from .common import launch
from .common.launch import cdiv, head_strided
from .common.precompile import launcher
from .common.primitives import grid_position, load_rows, store_rows

# elements of a tile, and tiles of a program, which share their angles
FEATURES = 1024
TILES = 8


# frequencies [R]; first positions [B] of rows, or positions [B T] and their strides
Angles = namedtuple("Angles", "freqs starts positions b t")
# compile-time settings: a program has TILES x HEADS heads of TOKENS tokens; the first Q_GROUPS of
# GROUPS programs have heads of q, the others of k
Settings = namedtuple("Settings", "TOKENS HEADS TILES GROUPS Q_GROUPS D BLOCK_D ROTATED FLIPPED")


@triton.jit
def rotate_rows(x, out, b, angle, t, group, T, H, F: tl.constexpr):
    """Rotate the group's TILES x HEADS heads of x, of tokens t of row b, by `angle` [TOKENS, pairs]
    and write them to `out`, where the heads of a token are contiguous. All loads come before the
    first store: none waits for a store."""
    TOKENS: tl.constexpr = F.TOKENS
    HEADS: tl.constexpr = F.HEADS
    TILES: tl.constexpr = F.TILES
    token = tl.reshape(tl.broadcast_to(t[:, None], [TOKENS, HEADS]), [TOKENS * HEADS]).to(tl.int64)
    first = group * (HEADS * TILES)
    head = (first + tl.arange(0, TOKENS * HEADS) % HEADS).to(tl.int64)
    tiles = ()
    for i in tl.static_range(TILES):
        h = head + i * HEADS
        mask = (token < T) & (h < H)
        tiles += (load_rows(x.ptr + b * x.b, token * x.n + h * x.h, F.D, F.BLOCK_D, mask),)
    out += b * T * H * F.D
    cos, sin = tl.cos(angle)[:, None], tl.sin(angle)[:, None]
    for i in tl.static_range(TILES):
        rows, h = tiles[i].to(tl.float32), head + i * HEADS
        first_half, second_half = tl.split(tl.reshape(rows, [TOKENS, HEADS, F.BLOCK_D // 2, 2]))
        rotated = tl.join(
            first_half * cos - second_half * sin, second_half * cos + first_half * sin
        )
        rotated = tl.reshape(rotated, [TOKENS * HEADS, F.BLOCK_D])
        if F.ROTATED < F.D:
            rotated = tl.where((tl.arange(0, F.BLOCK_D) < F.ROTATED)[None], rotated, rows)
        mask = (token < T) & (h < H)
        store_rows(out, (token * H + h) * F.D, rotated, F.D, F.BLOCK_D, mask)


@triton.jit(do_not_specialize=["start", "T"])
def nsa_rotary(q, k, q_out, k_out, angles, start, factor, T, H, K, F: tl.constexpr):
    """One program: TILES x HEADS heads of q, or of k, of TOKENS tokens of a row, rotated to `q_out`
    or `k_out` by a token's position over `factor`, times the frequency of each pair."""
    tile, b, _tiles, _rows = grid_position(F.FLIPPED)
    group, b = tile % F.GROUPS, b.to(tl.int64)
    t = tile // F.GROUPS * F.TOKENS + tl.arange(0, F.TOKENS)
    if angles.positions is not None:
        position_ptr = angles.positions + b * angles.b + t.to(tl.int64) * angles.t
        position = tl.load(position_ptr, mask=t < T, other=0)
    elif angles.starts is not None:
        position = tl.load(angles.starts + b) + t
    else:
        position = start + t
    pair = tl.arange(0, F.BLOCK_D // 2)
    freq = tl.load(angles.freqs + pair, mask=pair < F.ROTATED // 2, other=0.0).to(tl.float32)
    angle = tl.div_rn(position.to(tl.float32), factor)[:, None] * freq[None]  # [TOKENS, pairs]
    if group < F.Q_GROUPS:
        rotate_rows(q, q_out, b, angle, t, group, T, H, F)
    else:
        rotate_rows(k, k_out, b, angle, t, group - F.Q_GROUPS, T, K, F)


@functools.lru_cache(maxsize=1024)
def plan(
    B: int, T: int, H: int, K: int, D: int, tensors: int, rotated: int
) -> tuple[tuple[int, ...], Settings]:
    """Grid and settings of a launch for one tensor of H heads, or two of H and K."""
    block_d = launch.padded(D)
    rows = max(1, FEATURES // block_d)
    # rows of a tile are tokens, or the heads of the only one
    tokens, heads, tiles = (1, rows, 1) if T == 1 else (rows, 1, TILES)
    tiles = min(tiles, max(H, K))
    q_groups, k_groups = (cdiv(n, heads * tiles) for n in (H, K))
    groups = q_groups + k_groups * (tensors - 1)
    grid, flipped = launch.grid(cdiv(T, tokens) * groups, B)
    return grid, Settings(tokens, heads, tiles, groups, q_groups, D, block_d, rotated, flipped)


def rotate(
    tensors: list[Tensor],
    freqs: Tensor,
    starts: Tensor | None,
    positions: Tensor | None,
    start: int,
    factor: float,
) -> list[Tensor]:
    """Tensors [b h n d], rotated two per launch: see `ops.triton.elementwise`."""
    outs = [t.new_empty(t.transpose(1, 2).shape).transpose(1, 2) for t in tensors]
    starts = None if starts is None else starts.contiguous()
    strides = (0, 0) if positions is None else positions.stride()
    angles = Angles(freqs.contiguous(), starts, positions, *strides)
    for i in range(0, len(tensors), 2):
        pair, pair_outs = tensors[i : i + 2], outs[i : i + 2]
        (B, H, T, D), K = pair[0].shape, pair[-1].shape[1]
        grid, settings = plan(B, T, H, K, D, len(pair), 2 * len(freqs))
        launcher(nsa_rotary, grid)(
            head_strided(pair[0]), head_strided(pair[-1]), pair_outs[0], pair_outs[-1], angles,
            start, float(factor), T, H, K, F=settings, num_warps=4,
        )  # fmt: skip
    return outs
