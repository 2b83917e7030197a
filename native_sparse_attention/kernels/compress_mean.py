"""Means of overlapping windows of keys and values, and their backward; one launch for both.

Window w covers tokens `w d - (l - d) .. w d + d - 1`, with zeros before the first and after the
last token. Its tokens get intra-block positions added. d divides l.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .common import launch
from .common.launch import cdiv, head_strided
from .common.precompile import launcher
from .common.primitives import Strided, load_rows, store_rows

# elements of a tile; rows that are loaded at once
ELEMENTS, UNROLL = 2048, tl.constexpr(4)
# features of a program that sums gradients over windows; windows that it loads at once
WIDTH, WINDOWS = tl.constexpr(32), tl.constexpr(64)

# compile-time settings: windows of L tokens, one every STRIDE; K heads; ROWS of a tile
Settings = namedtuple("Settings", "L STRIDE K D BLOCK_D ROWS")


@triton.jit
def mean_rows(x, positions, out, b, h, w, W, T, F: tl.constexpr):
    """Means of windows w of x [B K T D], with any positions [K L D] added, to out [B W K D]."""
    rows_ptr = x.ptr + b * x.b + h * x.h
    acc = tl.full([w.shape[0], F.BLOCK_D], 0.0, tl.float32)
    position_sum = tl.full([F.BLOCK_D], 0.0, tl.float32)
    feature = tl.arange(0, F.BLOCK_D)
    for i in tl.range(0, F.L, loop_unroll_factor=UNROLL):
        t = w * F.STRIDE + (F.STRIDE - F.L + i)
        is_token = (w < W) & (t >= 0) & (t < T)
        acc += load_rows(rows_ptr, t.to(tl.int64) * x.n, F.D, F.BLOCK_D, is_token).to(tl.float32)
        if positions is not None:
            pointer = positions.ptr + h * positions.h + i * positions.n + feature
            position_sum += tl.load(pointer, mask=feature < F.D, other=0.0).to(tl.float32)
    mean = (acc + position_sum[None]) / F.L
    store_rows(out, ((b * W + w) * F.K + h) * F.D, mean, F.D, F.BLOCK_D, w < W)


@triton.jit(do_not_specialize=["T", "W", "tiles"])
def nsa_compress_mean_fwd(k, v, k_positions, v_positions, ck, cv, T, W, tiles, F: tl.constexpr):
    """One program: ROWS windows of a head of k, or of v."""
    line = tl.program_id(0) // tiles
    w = tl.program_id(0) % tiles * F.ROWS + tl.arange(0, F.ROWS)
    b, h = (line // F.K).to(tl.int64), (line % F.K).to(tl.int64)
    if tl.program_id(1) == 0:
        mean_rows(k, k_positions, ck, b, h, w, W, T, F)
    else:
        mean_rows(v, v_positions, cv, b, h, w, W, T, F)


@triton.jit
def spread_rows(d_out, dx, b, h, t, W, T, F: tl.constexpr):
    """Write dx [B T K D] of tokens t: the sum of d_out [B K W D] / L over windows that cover t."""
    rows_ptr = d_out.ptr + b * d_out.b + h * d_out.h
    acc = tl.full([t.shape[0], F.BLOCK_D], 0.0, tl.float32)
    for i in tl.range(0, F.L // F.STRIDE, loop_unroll_factor=2):
        w = t // F.STRIDE + i
        rows = load_rows(rows_ptr, w.to(tl.int64) * d_out.n, F.D, F.BLOCK_D, (t < T) & (w < W))
        acc += rows.to(tl.float32)
    store_rows(dx, ((b * T + t) * F.K + h) * F.D, acc / F.L, F.D, F.BLOCK_D, t < T)


@triton.jit(do_not_specialize=["T", "W", "tiles"])
def nsa_compress_mean_bwd(dck, dcv, dk, dv, T, W, tiles, F: tl.constexpr):
    """One program: ROWS tokens of a head of k, or of v."""
    line = tl.program_id(0) // tiles
    t = tl.program_id(0) % tiles * F.ROWS + tl.arange(0, F.ROWS)
    b, h = (line // F.K).to(tl.int64), (line % F.K).to(tl.int64)
    if tl.program_id(1) == 0:
        spread_rows(dck, dk, b, h, t, W, T, F)
    else:
        spread_rows(dcv, dv, b, h, t, W, T, F)


@triton.jit
def sum_windows(d_out, dp, h, feature, B, W, F: tl.constexpr):
    """Write the gradient of a head's positions [L D]: the sum of d_out / L over all windows. It is
    the same for all L positions."""
    acc = tl.zeros([WINDOWS, feature.shape[0]], tl.float32)
    for b in range(0, B):
        rows = d_out.ptr + tl.cast(b, tl.int64) * d_out.b + h * d_out.h
        for w0 in range(0, W, WINDOWS):
            w = w0 + tl.arange(0, WINDOWS)
            offset = w.to(tl.int64)[:, None] * d_out.n + feature[None]
            acc += tl.load(rows + offset, mask=(w < W)[:, None] & (feature < F.D)[None], other=0.0)
    grad = (tl.sum(acc, 0) / F.L).to(dp.dtype.element_ty)
    for i in range(0, F.L):
        tl.store(dp + (h * F.L + i) * F.D + feature, grad, mask=feature < F.D)


@triton.jit(do_not_specialize=["B", "W"])
def nsa_compress_mean_dpositions(dck, dcv, dkp, dvp, B, W, F: tl.constexpr):
    """One program: WIDTH features of a head of k's positions, or of v's."""
    h = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    if tl.program_id(2) == 0:
        sum_windows(dck, dkp, h, feature, B, W, F)
    else:
        sum_windows(dcv, dvp, h, feature, B, W, F)


def forward(
    tensors: Sequence[Tensor], positions: Sequence[Tensor], l: int, d: int, windows: int
) -> list[Tensor]:
    """Means [b h w d], [b w h d] in memory, of one or two tensors [b h n d], with positions [h l d]
    if there are any."""
    B, K, T, D = tensors[0].shape
    outs = [t.new_empty(B, windows, K, D) for t in tensors]
    block_d = launch.padded(D)
    F = Settings(l, d, K, D, block_d, max(1, ELEMENTS // block_d))
    tiles = cdiv(windows, F.ROWS)
    p: list[Any] = [Strided(p, 0, p.stride(1), p.stride(0)) for p in positions] or [None]
    k, v = head_strided(tensors[0]), head_strided(tensors[-1])
    if B * tiles:
        launcher(nsa_compress_mean_fwd, (B * K * tiles, len(tensors)))(
            k, v, p[0], p[-1], outs[0], outs[-1], T=T, W=windows, tiles=tiles, F=F
        )
    return [out.transpose(1, 2) for out in outs]


def backward(
    dck: Tensor, dcv: Tensor, k_positions: Tensor, v_positions: Tensor, l: int, d: int, tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of k and v [b h n d], which are [b n h d] in memory, and of the positions."""
    B, K, W, D = dck.shape
    dk, dv = (dck.new_empty(B, tokens, K, D) for _ in range(2))
    dkp, dvp = (p.new_empty(p.shape) for p in (k_positions, v_positions))
    block_d = launch.padded(D)
    F = Settings(l, d, K, D, block_d, max(1, ELEMENTS // block_d))
    tiles = cdiv(tokens, F.ROWS)
    grads = head_strided(dck), head_strided(dcv)
    if B * tiles:
        launcher(nsa_compress_mean_bwd, (B * K * tiles, 2))(
            *grads, dk, dv, T=tokens, W=W, tiles=tiles, F=F
        )
    launcher(nsa_compress_mean_dpositions, (K, cdiv(D, WIDTH.value), 2))(
        *grads, dkp, dvp, B=B, W=W, F=F
    )
    return dk.transpose(1, 2), dv.transpose(1, 2), dkp, dvp
