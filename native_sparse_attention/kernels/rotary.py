"""Rotary embedding of interleaved pairs of features, and its backward. Kernels read positions on
the device: a CUDA graph can capture a launch and replay it as sequences grow. The backward also
adds the gradients of unrotated queries, keys and values."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .common import launch
from .common.launch import cdiv
from .common.precompile import launcher
from .common.primitives import grid_position, load_rows, store_rows

# elements of a tile, and tiles of a program, which share their angles
FEATURES = 1024
TILES = 8
# tiles of a program that adds a second tile to each
ADDED_TILES = 4


@triton.jit
def rotate_rows(
    x, added, out, position, freq, t, first, T, H, x_t, x_h, added_t, added_h, out_t,
    HEADS: tl.constexpr, TILES: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    ROTATED: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Rotate TILES x HEADS heads of x from `first` on, of tokens t, and write them to `out`, where
    the heads of a token are contiguous. A pair turns by `freq` radians per position. ADD adds rows
    of `added` without rotation. All loads come before the first store: none waits for a store."""
    TOKENS: tl.constexpr = t.shape[0]
    token = tl.reshape(tl.broadcast_to(t[:, None], [TOKENS, HEADS]), [TOKENS * HEADS]).to(tl.int64)
    head = (first + tl.arange(0, TOKENS * HEADS) % HEADS).to(tl.int64)
    tiles, others = (), ()
    for i in tl.static_range(TILES):
        h = head + i * HEADS
        tiles += (load_rows(x, token * x_t + h * x_h, D, BLOCK_D, (token < T) & (h < H)),)
        if ADD:
            at = token * added_t + h * added_h
            others += (load_rows(added, at, D, BLOCK_D, (token < T) & (h < H)),)
    angle = position[:, None] * freq[None]
    cos, sin = tl.cos(angle)[:, None], tl.sin(angle)[:, None]
    for i in tl.static_range(TILES):
        rows, h = tiles[i].to(tl.float32), head + i * HEADS
        even, odd = tl.split(tl.reshape(rows, [TOKENS, HEADS, BLOCK_D // 2, 2]))
        rotated = tl.join(even * cos - odd * sin, odd * cos + even * sin)
        rotated = tl.reshape(rotated, [TOKENS * HEADS, BLOCK_D])
        if ROTATED < D:
            rotated = tl.where((tl.arange(0, BLOCK_D) < ROTATED)[None], rotated, rows)
        if ADD:
            rotated += others[i].to(tl.float32)
        store_rows(out, token * out_t + h * D, rotated, D, BLOCK_D, (token < T) & (h < H))


@triton.jit
def positions_of(t, b, starts, positions, start, factor, T, p_b, p_t, RAGGED: tl.constexpr,
                 GIVEN: tl.constexpr):  # fmt: skip
    """Positions of tokens t of row b, over `factor`."""
    if GIVEN:
        position = tl.load(positions + b * p_b + t.to(tl.int64) * p_t, mask=t < T, other=0)
    elif RAGGED:
        position = tl.load(starts + b) + t
    else:
        position = start + t
    return tl.div_rn(position.to(tl.float32), factor)


@triton.jit(do_not_specialize=["start", "T"])
def nsa_rotary(
    q, k, q_out, k_out, freqs, starts, positions, start, factor, T, H, K, q_b, q_t, q_h, k_b, k_t,
    k_h, p_b, p_t,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, TILES: tl.constexpr, GROUPS: tl.constexpr,
    Q_GROUPS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROTATED: tl.constexpr,
    RAGGED: tl.constexpr, GIVEN: tl.constexpr, FLIPPED: tl.constexpr,
):  # fmt: skip
    """One program: TILES x HEADS heads of q, or of k, of TOKENS tokens of a row. The angle of a
    pair is the token's position over `factor`, times the pair's frequency."""
    tile, b, _tiles, _rows = grid_position(FLIPPED)
    group, b = tile % GROUPS, b.to(tl.int64)
    t = tile // GROUPS * TOKENS + tl.arange(0, TOKENS)
    position = positions_of(t, b, starts, positions, start, factor, T, p_b, p_t, RAGGED, GIVEN)
    pair = tl.arange(0, BLOCK_D // 2)
    freq = tl.load(freqs + pair, mask=pair < ROTATED // 2, other=0.0).to(tl.float32)
    if group < Q_GROUPS:
        out, first = q_out + b * T * H * D, group * (HEADS * TILES)
        rotate_rows(
            q + b * q_b, q, out, position, freq, t, first, T, H, q_t, q_h, q_t, q_h, H * D, HEADS,
            TILES, D, BLOCK_D, ROTATED, False,
        )  # fmt: skip
    else:
        out, first = k_out + b * T * K * D, (group - Q_GROUPS) * (HEADS * TILES)
        rotate_rows(
            k + b * k_b, k, out, position, freq, t, first, T, K, k_t, k_h, k_t, k_h, K * D, HEADS,
            TILES, D, BLOCK_D, ROTATED, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["start", "T"])
def nsa_rotary_bwd(
    dq, dcq, dk, dck, dv, dcv, out, freqs, positions, start, factor, T, H, K,
    dq_b, dq_t, dq_h, dcq_b, dcq_t, dcq_h, dk_b, dk_t, dk_h, dck_b, dck_t, dck_h, dv_b, dv_t, dv_h,
    dcv_b, dcv_t, dcv_h, p_b, p_t,
    TOKENS: tl.constexpr, TILES: tl.constexpr, GROUPS: tl.constexpr, Q_GROUPS: tl.constexpr,
    K_GROUPS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROTATED: tl.constexpr,
    GIVEN: tl.constexpr, FLIPPED: tl.constexpr,
):  # fmt: skip
    """One program: gradients of TILES heads of q, k or v of TOKENS tokens of a row, to out
    [B T H+K+K D], the gradient of their projection. For q and k it is the gradient of the rotated
    tensor, rotated back, plus that of the unrotated one; for v the sum of both gradients."""
    tile, b, _tiles, _rows = grid_position(FLIPPED)
    group, b = tile % GROUPS, b.to(tl.int64)
    t = tile // GROUPS * TOKENS + tl.arange(0, TOKENS)
    position = positions_of(t, b, out, positions, start, factor, T, p_b, p_t, False, GIVEN)
    pair = tl.arange(0, BLOCK_D // 2)
    freq = tl.load(freqs + pair, mask=pair < ROTATED // 2, other=0.0).to(tl.float32)
    out_t = (H + 2 * K) * D
    out += b * T * out_t
    if group < Q_GROUPS:
        rotate_rows(
            dq + b * dq_b, dcq + b * dcq_b, out, position, freq, t, group * TILES, T, H, dq_t, dq_h,
            dcq_t, dcq_h, out_t, 1, TILES, D, BLOCK_D, ROTATED, True,
        )  # fmt: skip
    elif group < Q_GROUPS + K_GROUPS:
        rotate_rows(
            dk + b * dk_b, dck + b * dck_b, out + H * D, position, freq, t,
            (group - Q_GROUPS) * TILES, T, K, dk_t, dk_h, dck_t, dck_h, out_t, 1, TILES, D, BLOCK_D,
            ROTATED, True,
        )  # fmt: skip
    else:
        rotate_rows(
            dv + b * dv_b, dcv + b * dcv_b, out + (H + K) * D, position, freq, t,
            (group - Q_GROUPS - K_GROUPS) * TILES, T, K, dv_t, dv_h, dcv_t, dcv_h, out_t, 1, TILES,
            D, BLOCK_D, 0, True,
        )  # fmt: skip


def rotate(
    tensors: list[Tensor],
    freqs: Tensor,
    starts: Tensor | None,
    positions: Tensor | None,
    start: int,
    factor: float,
) -> list[Tensor]:
    """Tensors [b h n d], rotated two per launch: see `ops.rotary`."""
    outs = [t.new_empty(t.transpose(1, 2).shape).transpose(1, 2) for t in tensors]
    position_args = dict(
        freqs=freqs.contiguous(), starts=freqs if starts is None else starts.contiguous(),
        positions=freqs if positions is None else positions, start=start, factor=float(factor),
        **launch.strides("p", positions, "bt"), RAGGED=starts is not None,
        GIVEN=positions is not None, ROTATED=2 * len(freqs),
    )  # fmt: skip
    for i in range(0, len(tensors), 2):
        launch_pair(tensors[i : i + 2], outs[i : i + 2], position_args)
    return outs


def launch_pair(tensors: list[Tensor], outs: list[Tensor], position_args: dict[str, Any]) -> None:
    """Rotate one tensor or two."""
    q, k = tensors[0], tensors[-1]
    (B, H, T, D), K = q.shape, k.shape[1]
    if B * T == 0:
        return
    block_d = launch.padded(D)
    rows = max(1, FEATURES // block_d)
    # rows of a tile are tokens, or the heads of the only one
    tokens, heads, tiles = (1, rows, 1) if T == 1 else (rows, 1, TILES)
    tiles = min(tiles, max(H, K))
    q_groups, k_groups = (cdiv(n, heads * tiles) for n in (H, K))
    groups = q_groups + k_groups * (len(tensors) - 1)
    grid, flipped = launch.grid(cdiv(T, tokens) * groups, B)
    launcher(nsa_rotary, grid)(
        q=q, k=k, q_out=outs[0], k_out=outs[-1], T=T, H=H, K=K, **launch.strides("q", q, "bht"),
        **launch.strides("k", k, "bht"), TOKENS=tokens, HEADS=heads, TILES=tiles, GROUPS=groups,
        Q_GROUPS=q_groups, D=D, BLOCK_D=block_d, FLIPPED=flipped, **position_args, num_warps=4,
    )  # fmt: skip


def backward(
    dq: Tensor,
    dcq: Tensor,
    dk: Tensor,
    dck: Tensor,
    dv: Tensor,
    dcv: Tensor,
    freqs: Tensor,
    positions: Tensor | None,
    start: int,
    factor: float,
) -> Tensor:
    """The gradient [b n (h + 2 k) d] of the projection, from the gradients [b h n d] of queries and
    [b k n d] of keys and values: see `ops.triton.rotary`."""
    (B, H, T, D), K = dq.shape, dk.shape[1]
    out = dq.new_empty(B, T, (H + 2 * K) * D)
    if out.numel() == 0:
        return out
    block_d = launch.padded(D)
    tokens, tiles = max(1, FEATURES // block_d), min(ADDED_TILES, max(H, K))
    q_groups, k_groups = cdiv(H, tiles), cdiv(K, tiles)
    groups = q_groups + 2 * k_groups
    grid, flipped = launch.grid(cdiv(T, tokens) * groups, B)
    grads = dict(dq=dq, dcq=dcq, dk=dk, dck=dck, dv=dv, dcv=dcv)
    strides: dict[str, int] = {}
    for name, t in grads.items():
        strides |= launch.strides(name, t, "bht")
    launcher(nsa_rotary_bwd, grid)(
        **grads, out=out, freqs=freqs.contiguous(),
        positions=freqs if positions is None else positions, start=start, factor=float(factor), T=T,
        H=H, K=K, **strides, **launch.strides("p", positions, "bt"), TOKENS=tokens, TILES=tiles,
        GROUPS=groups, Q_GROUPS=q_groups, K_GROUPS=k_groups, D=D, BLOCK_D=block_d,
        ROTATED=2 * len(freqs), GIVEN=positions is not None, FLIPPED=flipped, num_warps=4,
    )  # fmt: skip
    return out
