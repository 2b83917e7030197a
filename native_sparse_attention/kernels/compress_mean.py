"""Means of overlapping windows of keys and values, and their backward; one launch for both.

Window w covers tokens `w d - (l - d) .. w d + d - 1`, with zeros before the first and after the
last token. Its tokens get intra-block positions added. d divides l.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .common import launch
from .common.launch import cdiv
from .common.precompile import launcher
from .common.primitives import load_rows, store_rows

# elements of a tile; rows that are loaded at once
ELEMENTS, AHEAD = 2048, 4
# features of a program that sums gradients over windows; windows that it loads at once
WIDTH, WINDOWS = 32, 64


@triton.jit
def mean_rows(
    x, positions, out, b, h, w, W, T, x_b, x_h, x_t, p_h, p_i,
    L: tl.constexpr, STRIDE: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, AHEAD: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Means of windows w of x [B K T D], with POSITIONS their positions [K L D] added, to out
    [B W K D]."""
    x += b * x_b + h * x_h
    if POSITIONS:
        positions += h * p_h
    acc = tl.zeros([w.shape[0], BLOCK_D], tl.float32)
    position_sum = tl.zeros([BLOCK_D], tl.float32)
    feature = tl.arange(0, BLOCK_D)
    for i in tl.range(0, L, loop_unroll_factor=AHEAD):
        t = w * STRIDE + (STRIDE - L + i)
        rows = load_rows(x, t.to(tl.int64) * x_t, D, BLOCK_D, (w < W) & (t >= 0) & (t < T))
        acc += rows.to(tl.float32)
        if POSITIONS:
            position = tl.load(positions + i * p_i + feature, mask=feature < D, other=0.0)
            position_sum += position.to(tl.float32)
    mean = (acc + position_sum[None]) / L
    store_rows(out, ((b * W + w) * K + h) * D, mean, D, BLOCK_D, w < W)


@triton.jit(do_not_specialize=["T", "W", "tiles"])
def nsa_compress_mean_fwd(
    k, v, k_positions, v_positions, ck, cv, T, W, tiles, k_b, k_h, k_t, v_b, v_h, v_t,
    kp_h, kp_i, vp_h, vp_i, L: tl.constexpr, STRIDE: tl.constexpr, K: tl.constexpr,
    D: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr, AHEAD: tl.constexpr,
    POSITIONS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_W windows of a head of k, or of v."""
    line = tl.program_id(0) // tiles
    w = tl.program_id(0) % tiles * BLOCK_W + tl.arange(0, BLOCK_W)
    b, h = (line // K).to(tl.int64), (line % K).to(tl.int64)
    if tl.program_id(1) == 0:
        mean_rows(
            k, k_positions, ck, b, h, w, W, T, k_b, k_h, k_t, kp_h, kp_i, L, STRIDE, K, D, BLOCK_D,
            AHEAD, POSITIONS,
        )  # fmt: skip
    else:
        mean_rows(
            v, v_positions, cv, b, h, w, W, T, v_b, v_h, v_t, vp_h, vp_i, L, STRIDE, K, D, BLOCK_D,
            AHEAD, POSITIONS,
        )  # fmt: skip


@triton.jit
def spread_rows(
    d_out, dx, b, h, t, W, T, o_b, o_h, o_w, L: tl.constexpr, STRIDE: tl.constexpr,
    K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write dx [B T K D] of tokens t: the sum of d_out [B K W D] / L over windows that cover t."""
    d_out += b * o_b + h * o_h
    acc = tl.zeros([t.shape[0], BLOCK_D], tl.float32)
    for i in tl.range(0, L // STRIDE, loop_unroll_factor=2):
        w = t // STRIDE + i
        rows = load_rows(d_out, w.to(tl.int64) * o_w, D, BLOCK_D, (t < T) & (w < W))
        acc += rows.to(tl.float32)
    store_rows(dx, ((b * T + t) * K + h) * D, acc / L, D, BLOCK_D, t < T)


@triton.jit(do_not_specialize=["T", "W", "tiles"])
def nsa_compress_mean_bwd(
    dck, dcv, dk, dv, T, W, tiles, k_b, k_h, k_w, v_b, v_h, v_w, L: tl.constexpr,
    STRIDE: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_T tokens of a head of k, or of v."""
    line = tl.program_id(0) // tiles
    t = tl.program_id(0) % tiles * BLOCK_T + tl.arange(0, BLOCK_T)
    b, h = (line // K).to(tl.int64), (line % K).to(tl.int64)
    if tl.program_id(1) == 0:
        spread_rows(dck, dk, b, h, t, W, T, k_b, k_h, k_w, L, STRIDE, K, D, BLOCK_D)
    else:
        spread_rows(dcv, dv, b, h, t, W, T, v_b, v_h, v_w, L, STRIDE, K, D, BLOCK_D)


@triton.jit
def sum_windows(
    d_out, dp, h, feature, B, W, o_b, o_h, o_w, L: tl.constexpr, D: tl.constexpr,
    WINDOWS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a head's positions [L D]: the sum of d_out / L over all windows. It is
    the same for all L positions."""
    acc = tl.zeros([WINDOWS, feature.shape[0]], tl.float32)
    for b in range(0, B):
        rows = d_out + tl.cast(b, tl.int64) * o_b + h * o_h
        for w0 in range(0, W, WINDOWS):
            w = w0 + tl.arange(0, WINDOWS)
            at = w.to(tl.int64)[:, None] * o_w + feature[None]
            acc += tl.load(rows + at, mask=(w < W)[:, None] & (feature < D)[None], other=0.0)
    grad = (tl.sum(acc, 0) / L).to(dp.dtype.element_ty)
    for i in range(0, L):
        tl.store(dp + (h * L + i) * D + feature, grad, mask=feature < D)


@triton.jit(do_not_specialize=["B", "W"])
def nsa_compress_mean_dpositions(
    dck, dcv, dkp, dvp, B, W, k_b, k_h, k_w, v_b, v_h, v_w, L: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, WINDOWS: tl.constexpr,
):  # fmt: skip
    """One program: WIDTH features of a head of k's positions, or of v's."""
    h = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    if tl.program_id(2) == 0:
        sum_windows(dck, dkp, h, feature, B, W, k_b, k_h, k_w, L, D, WINDOWS)
    else:
        sum_windows(dcv, dvp, h, feature, B, W, v_b, v_h, v_w, L, D, WINDOWS)


def tile(d: int) -> tuple[int, int]:
    """Rows of a tile, and its padded width."""
    block_d = launch.padded(d)
    return max(1, ELEMENTS // block_d), block_d


def forward(
    k: Tensor, v: Tensor, k_positions: Tensor, v_positions: Tensor, l: int, d: int, windows: int
) -> tuple[Tensor, Tensor]:
    """Means [b h w d] of k and v [b h n d], [b w h d] in memory, with positions [h l d]."""
    B, K, T, D = k.shape
    ck, cv = (k.new_empty(B, windows, K, D) for _ in range(2))
    rows, block_d = tile(D)
    tiles = cdiv(windows, rows)
    args: dict[str, Any] = {}
    for name, t, p in (("k", k, k_positions), ("v", v, v_positions)):
        args |= launch.strides(name, t, "bht") | launch.strides(f"{name}p", p, "hi")
    if B * tiles:
        launcher(nsa_compress_mean_fwd, (B * K * tiles, 2))(
            k, v, k_positions, v_positions, ck, cv, T=T, W=windows, tiles=tiles, L=l, STRIDE=d, K=K,
            D=D, BLOCK_W=rows, BLOCK_D=block_d, AHEAD=AHEAD, POSITIONS=True, **args,
        )  # fmt: skip
    return ck.transpose(1, 2), cv.transpose(1, 2)


def of_keys(k: Tensor, l: int, d: int, windows: int) -> Tensor:
    """Means [b h w d] of k [b h n d] alone, without positions."""
    B, K, T, D = k.shape
    ck = k.new_empty(B, windows, K, D)
    rows, block_d = tile(D)
    tiles = cdiv(windows, rows)
    if B * tiles:
        launcher(nsa_compress_mean_fwd, (B * K * tiles, 1))(
            k, k, k, k, ck, ck, T=T, W=windows, tiles=tiles, L=l, STRIDE=d, K=K, D=D,
            BLOCK_W=rows, BLOCK_D=block_d, AHEAD=AHEAD, POSITIONS=False,
            **launch.strides("k", k, "bht"), **launch.strides("v", k, "bht"),
            kp_h=0, kp_i=0, vp_h=0, vp_i=0,
        )  # fmt: skip
    return ck.transpose(1, 2)


def backward(
    dck: Tensor, dcv: Tensor, k_positions: Tensor, v_positions: Tensor, l: int, d: int, tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of k and v [b h n d], which are [b n h d] in memory, and of the positions."""
    B, K, W, D = dck.shape
    dk, dv = (dck.new_empty(B, tokens, K, D) for _ in range(2))
    dkp, dvp = (p.new_empty(p.shape) for p in (k_positions, v_positions))
    rows, block_d = tile(D)
    tiles = cdiv(tokens, rows)
    strides = launch.strides("k", dck, "bhw") | launch.strides("v", dcv, "bhw")
    if B * tiles:
        launcher(nsa_compress_mean_bwd, (B * K * tiles, 2))(
            dck, dcv, dk, dv, T=tokens, W=W, tiles=tiles, L=l, STRIDE=d, K=K, D=D, BLOCK_T=rows,
            BLOCK_D=block_d, **strides,
        )  # fmt: skip
    launcher(nsa_compress_mean_dpositions, (K, cdiv(D, WIDTH), 2))(
        dck, dcv, dkp, dvp, B=B, W=W, L=l, D=D, WIDTH=WIDTH, WINDOWS=WINDOWS, **strides
    )
    return dk.transpose(1, 2), dv.transpose(1, 2), dkp, dvp
