"""Keys that rank blocks, packed to 4 bits: what a decode step with `ranking_bits=4` reads of them.

An entry holds the m keys of a block of one KV head, as words of 16 bits. A word holds the codes of
four features, h = D / 4, rounded up, apart. Words [m, h], least integers [4, h] and steps [4, h] in
float16 and the two halves of the size make an entry, padded to 32 bytes. `reference.four_bits` has
the numbers.

The product of a query q of integers with a key is `q . least + (q step) . code`, all of integers
below 2^24. Bits of a code that lie low in a float16 are a subnormal number, 2^-24 times the code or
16 times that: codes are multiplied as they lie.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.reference import entry_words
from ..common import launch
from ..common import primitives as steps
from ..common.launch import cdiv, next_power_of_2, strided
from ..common.precompile import launcher
from .kv_cache import cache_offsets


@triton.jit
def load_quarter(base, rows, i, D: tl.constexpr, H: tl.constexpr, mask):
    """Features i h to (i + 1) h of rows at `base` in float32, as [M, H]; zeros past D."""
    h: tl.constexpr = (D + 3) // 4
    f = tl.arange(0, H)[None] + i * h
    is_there = mask[:, None] & (tl.arange(0, H)[None] < h) & (f < D)
    return tl.load(base + rows[:, None] + f, mask=is_there, other=0.0).to(tl.float32)


@triton.jit
def nsa_decode_pack_keys(
    ck, packed, K, m: tl.constexpr, M: tl.constexpr, D: tl.constexpr, H: tl.constexpr
):
    """One program: the entry of a block of m keys [B W K D] of one row and KV head."""
    h: tl.constexpr = (D + 3) // 4
    block, line = tl.program_id(0), tl.program_id(1)
    b, head = (line // K).to(tl.int64), (line % K).to(tl.int64)
    j, f = tl.arange(0, M), tl.arange(0, H)[None]
    is_key = (j < m)[:, None]
    rows = b * ck.b + head * ck.h + (block * m + j).to(tl.int64) * ck.n
    largest = tl.zeros([M, H], tl.float32)
    for i in range(4):
        largest = tl.maximum(largest, tl.abs(load_quarter(ck.ptr, rows, i, D, H, j < m)))
    factor = steps.factor_of_integers(tl.max(largest) + tl.zeros([1], tl.float32), 4)
    entry = packed.ptr + b * packed.b + head * packed.h + block.to(tl.int64) * packed.n
    words = tl.zeros([M, H], tl.int32)
    for i in range(4):
        x = steps.round_even(load_quarter(ck.ptr, rows, i, D, H, j < m) * factor[None])
        least = tl.min(tl.where(is_key, x, 127.0), 0, keep_dims=True)
        step = steps.step_of_codes(least, tl.max(tl.where(is_key, x, -127.0), 0, keep_dims=True))
        words += steps.code_of(x, least, step).to(tl.int32) << 4 * i
        least = least.to(tl.int32).to(tl.float16)  # without a sign of zero
        step = step.to(tl.float16)
        tl.store(entry + (m + i) * h + f, least.to(tl.int16, bitcast=True), mask=f < h)
        tl.store(entry + (m + 4 + i) * h + f, step.to(tl.int16, bitcast=True), mask=f < h)
    tl.store(entry + j[:, None] * h + f, words.to(tl.int16), mask=is_key & (f < h))
    i = tl.arange(0, 2)
    size = steps.quotient(1.0, factor).to(tl.int32, bitcast=True) >> 16 * i
    tl.store(entry + (m + 8) * h + i, size.to(tl.int16))


@triton.jit
def packed_queries(q, offsets, valid, ROWS: tl.constexpr, D: tl.constexpr, H: tl.constexpr):
    """8-bit integers of queries in float16, four tiles [M, H], ROWS of them of one size."""
    x, largest = (), tl.zeros([offsets.shape[0], H], tl.float32)
    for i in tl.static_range(4):
        x += (load_quarter(q, offsets, i, D, H, valid),)
        largest = tl.maximum(largest, tl.abs(x[i]))
    factor, integers = steps.factor_of_rows(largest, ROWS)[:, None], ()
    for i in tl.static_range(4):
        integers += (steps.round_even(x[i] * factor).to(tl.float16),)
    return integers


@triton.jit
def packed_products(
    q, ck, line, block, b, cache, m: tl.constexpr, D: tl.constexpr, BLOCKS_PER_PAGE: tl.constexpr
):
    """Products [M, m] of queries with the integers of the keys of a block, and their size."""
    h: tl.constexpr = (D + 3) // 4
    H: tl.constexpr = q[0].shape[1]
    entry = ck.ptr + line + cache_offsets(block, b, ck.b, ck.n, cache, BLOCKS_PER_PAGE)
    j, f = tl.arange(0, m)[:, None], tl.arange(0, H)
    words = tl.load(entry + j * h + f[None], mask=f[None] < h, other=0)
    x = tl.zeros([q[0].shape[0], m], tl.float32)
    bias = tl.zeros(q[0].shape, tl.float32)
    for i in tl.static_range(4):
        least = tl.load(entry + (m + i) * h + f, mask=f < h, other=0)
        step = tl.load(entry + (m + 4 + i) * h + f, mask=f < h, other=0)
        least, step = least.to(tl.float16, bitcast=True), step.to(tl.float16, bitcast=True)
        bias += q[i].to(tl.float32) * least.to(tl.float32)[None]
        bits = (words >> 8 if i > 1 else words) & (15 if i % 2 == 0 else 240)
        codes = bits.to(tl.int16).to(tl.float16, bitcast=True)
        scaled = q[i] * (step if i % 2 == 0 else step * 0.0625).to(tl.float16)[None]
        x = tl.dot(scaled, tl.trans(codes), x)
    i = tl.arange(0, 2)
    size = tl.load(entry + (m + 8) * h + i).to(tl.int32) & 65535
    size = tl.sum(size << 16 * i, 0).to(tl.float32, bitcast=True)
    return tl.sum(bias, 1)[:, None] + x * 16777216.0, size + tl.zeros([1], tl.float32)


def pack_keys(ck: Tensor, m: int) -> Tensor:
    """Complete blocks of m keys [B W K D], packed: [B, W / m, K, words]."""
    B, W, K, D = ck.shape
    ck = ck if ck.stride(-1) == 1 else ck.contiguous()
    out = ck.new_empty(B, W // m, K, entry_words(m, D), dtype=torch.int16)
    if out.numel():
        launcher(nsa_decode_pack_keys, (W // m, B * K))(
            strided(ck), strided(out), K=K, m=m, M=next_power_of_2(m), D=D,
            H=launch.padded(cdiv(D, 4)),
        )  # fmt: skip
    return out
