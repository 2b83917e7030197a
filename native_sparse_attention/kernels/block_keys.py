"""Keys of selection blocks, for scores by `importance="logits"`.

A block's score is one dot product: the mean query of the heads that rank together, and the mean key
of the block's windows. Both are formed in float32 and cut into two float16 halves, whose products a
tensor core adds up in float32: what is left out is 2^-24 of a term.
"""

import torch
import triton
import triton.language as tl

from . import launch
from .device import load_rows


@triton.jit
def first_window(c, d: tl.constexpr, s: tl.constexpr):
    """Of block c's windows: the first that ends in it or, for d > s, the one that spans it."""
    return c * (s // d) if s >= d else c // (d // s)


@triton.jit
def two_halves(x):
    """Rows [M, D] as float16 `high + low`, each row times a power of two, [M], that is returned to
    undo it. Of a row's largest element 2^-24 is left out."""
    bits = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum(bits >> 23, 1), 253)
    x = x * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    high = x.to(tl.float16)
    low = (x - high.to(tl.float32)).to(tl.float16)
    return high, low, (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["C", "W"])
def keys_kernel(
    ck, keys, sizes, C, W, K, scale,
    k_b, k_w, k_h,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
    d: tl.constexpr, s: tl.constexpr, INTERPOLATED: tl.constexpr,
):  # fmt: skip
    """One program: keys of a tile of blocks of one row and KV head, halves [2, BLOCK_D] and the
    power of two that undoes their scaling. Program 1 of axis 2 writes them for queries that do not
    see the window after the block's, whom that window counts as the block's last."""
    b, h = (tl.program_id(1) // K).to(tl.int64), (tl.program_id(1) % K).to(tl.int64)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    WINDOWS: tl.constexpr = s // d if s > d else 1
    first = first_window(c, d, s)
    last = first * 0 + W - 1
    if tl.program_id(2) == 1:
        last = tl.minimum(last, first + WINDOWS - 1)
    # [BLOCK_C, BLOCK_S]
    u = tl.arange(0, BLOCK_S)[None]
    t = c[:, None] * s + u
    covered = (u < s) & (t < W * d)

    total = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    count = tl.zeros([BLOCK_C], tl.float32)
    AROUND: tl.constexpr = 1 if INTERPOLATED else 0
    for j in range(-AROUND, WINDOWS + AROUND):
        w = first + j
        if INTERPOLATED:
            # twice the distance of token and window centre, in units of 1 / (2 d)
            distance = tl.abs(2 * t + 1 - d - 2 * d * w[:, None])
            near = tl.where(covered, tl.maximum(2 * d - distance, 0), 0)
            weight = tl.sum(near, 1).to(tl.float32)
            w = tl.minimum(tl.maximum(w, 0), last)
        else:
            weight = (w < W).to(tl.float32)
        rows = b * k_b + h * k_h + w.to(tl.int64) * k_w
        tile = load_rows(ck, rows, D, BLOCK_D, (c < C) & (w < W))
        total += weight[:, None] * tile.to(tl.float32)
        count += weight
    key = total / tl.maximum(count, 1.0)[:, None] * scale

    high, low, size = two_halves(key)
    row = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * C + c
    x = tl.arange(0, BLOCK_D)[None]
    tl.store(keys + row[:, None] * (2 * BLOCK_D) + x, high, mask=(c < C)[:, None])
    tl.store(keys + row[:, None] * (2 * BLOCK_D) + BLOCK_D + x, low, mask=(c < C)[:, None])
    tl.store(sizes + row, size, mask=c < C)


def block_keys(ck, C, d, s, interpolated, scale):
    """Keys of blocks 0 .. C - 1, halves [sets, B, K, C, 2, BLOCK_D], and their sizes [sets, B, K,
    C]; a second set for queries that do not see the window after the block, where interpolated."""
    B, W, K, D = ck.shape
    block_d = launch.padded(D)
    sets = 2 if interpolated else 1
    keys = ck.new_empty(sets, B, K, C, 2, block_d, dtype=torch.float16)
    sizes = ck.new_empty(sets, B, K, C, dtype=torch.float32)
    block_c = 16
    keys_kernel[(triton.cdiv(C, block_c), B * K, sets)](
        ck, keys, sizes, C, W, K, scale, *ck.stride()[:3],
        D=D, BLOCK_D=block_d, BLOCK_C=block_c, BLOCK_S=triton.next_power_of_2(s), d=d, s=s,
        INTERPOLATED=interpolated,
    )  # fmt: skip
    return keys, sizes
