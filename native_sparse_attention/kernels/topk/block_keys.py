"""Keys of selection blocks, for scores by `importance="logits"`, and their backward.

A block's score is one dot product: mean query of the heads that rank together times mean key of the
block's windows. Both means are float32. The ranking splits them into two float16 halves, whose
products tensor cores sum in float32; a product is accurate to 2^-21 of the product of its rows'
largest elements. The backward splits them into two bfloat16 terms without scaling: 2^-17.
"""

import os

import torch
import triton
import triton.language as tl

from ..common import launch
from ..common.counts import cdiv, next_power_of_2
from ..common.primitives import grid_position, in_document, load_rows, store_rows


@triton.jit
def first_window(c, d: tl.constexpr, s: tl.constexpr):
    """The first window that ends in block c or, for d > s, the window that covers block c."""
    return c * (s // d) if s >= d else c // (d // s)


@triton.jit
def two_halves(x):
    """Rows [M, D] as float16 `high + low`, each row scaled by a power of two; also the factors [M]
    that undo the scaling. The error is at most 2^-23 of a row's largest element."""
    bits = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum(bits >> 23, 1), 253)
    x = x * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    high = x.to(tl.float16)
    low = (x - high.to(tl.float32)).to(tl.float16)
    return high, low, (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def store_terms(base, offsets, x, D: tl.constexpr, BLOCK_D: tl.constexpr, mask,
                TERMS: tl.constexpr):  # fmt: skip
    """Write rows x [M, D] as a sum of one term or two."""
    high = x.to(base.dtype.element_ty)
    store_rows(base, offsets, high, D, BLOCK_D, mask)
    if TERMS == 2:
        store_rows(base + D, offsets, x - high.to(tl.float32), D, BLOCK_D, mask)


@triton.jit(do_not_specialize=["T"])
def nsa_topk_mean_keys(
    q, means, T, RANKS, q_b, q_t, q_h,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    TERMS: tl.constexpr, FLIPPED: tl.constexpr,
):  # fmt: skip
    """One program: the mean queries of M tokens of one row and ranking head."""
    tile_index, line, _tiles, _lines = grid_position(FLIPPED)
    b, r = (line // RANKS).to(tl.int64), (line % RANKS).to(tl.int64)
    token = (tile_index * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    q_sum = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for g in range(G):
        rows = b * q_b + token * q_t + (r * G + g) * q_h
        q_sum += load_rows(q, rows, D, BLOCK_D, token < T).to(tl.float32)
    rows = ((b * T + token) * RANKS + r) * (TERMS * D)
    store_terms(means, rows, q_sum / G, D, BLOCK_D, token < T, TERMS)


@triton.jit
def block_windows(c, W, b, T, doc_first, doc_last, d: tl.constexpr, s: tl.constexpr,
                  DOCUMENTS: tl.constexpr):  # fmt: skip
    """The first of W windows in the documents of blocks c [C] of row b, and one past the last."""
    lo = c * 0
    hi = lo + W
    if DOCUMENTS:
        lo, hi = in_document(lo, hi, c * s, T, doc_first + b * T, doc_last + b * T, d)
    return lo, hi


@triton.jit
def window_weight(c, j, end, d: tl.constexpr, s: tl.constexpr, BLOCK_S: tl.constexpr,
                  INTERPOLATED: tl.constexpr):  # fmt: skip
    """Weight of the j-th window of each block c [C] in the block's mean key; 0 from window `end`
    [C] on."""
    w = first_window(c, d, s) + j
    if INTERPOLATED:
        # [C, BLOCK_S]
        u = tl.arange(0, BLOCK_S)[None]
        t = c[:, None] * s + u
        # twice the distance of token and window centre, in units of 1 / (2 d)
        distance = tl.abs(2 * t + 1 - d - 2 * d * w[:, None])
        near = tl.where((u < s) & (t < end[:, None] * d), tl.maximum(2 * d - distance, 0), 0)
        weight = tl.sum(near, 1).to(tl.float32)
    else:
        weight = (w < end).to(tl.float32)
    return weight


@triton.jit(do_not_specialize=["T", "C", "W"])
def nsa_topk_block_keys(
    ck, keys, sizes, doc_first, doc_last, T, C, W, K, scale,
    k_b, k_w, k_h,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
    d: tl.constexpr, s: tl.constexpr, INTERPOLATED: tl.constexpr, DOCUMENTS: tl.constexpr,
    TERMS: tl.constexpr, FLIPPED: tl.constexpr,
):  # fmt: skip
    """One program: keys of a tile of blocks of one row and KV head. They are [TERMS, D] or, with
    TERMS = 0, halves [2, BLOCK_D] and the power of two that undoes their scaling. Program 1 of axis
    2 writes the keys for queries that do not see the window after the block: the block's last
    window replaces that window."""
    tile_index, line, _tiles, lines = grid_position(FLIPPED)
    b, h = (line // K).to(tl.int64), (line % K).to(tl.int64)
    c = tile_index * BLOCK_C + tl.arange(0, BLOCK_C)
    WINDOWS: tl.constexpr = s // d if s > d else 1
    first = first_window(c, d, s)
    lo, end = block_windows(c, W, b, T, doc_first, doc_last, d, s, DOCUMENTS)
    last = end - 1
    if tl.program_id(2) == 1:
        last = tl.minimum(last, first + WINDOWS - 1)

    k_sum = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    count = tl.zeros([BLOCK_C], tl.float32)
    # interpolated: sums of differences from the first key, so the mean of equal keys is exact
    origin = k_sum
    if INTERPOLATED:
        w = tl.minimum(tl.maximum(first, lo), last)
        rows = b * k_b + h * k_h + w.to(tl.int64) * k_w
        origin = load_rows(ck, rows, D, BLOCK_D, (c < C) & (w < W)).to(tl.float32)
    AROUND: tl.constexpr = 1 if INTERPOLATED else 0
    for j in range(-AROUND, WINDOWS + AROUND):
        w = first + j
        weight = window_weight(c, j, end, d, s, BLOCK_S, INTERPOLATED)
        if INTERPOLATED:
            w = tl.minimum(tl.maximum(w, lo), last)
        rows = b * k_b + h * k_h + w.to(tl.int64) * k_w
        tile = load_rows(ck, rows, D, BLOCK_D, (c < C) & (w < W)).to(tl.float32)
        if INTERPOLATED:
            tile -= origin
        k_sum += weight[:, None] * tile
        count += weight
    key = (origin + k_sum / tl.maximum(count, 1.0)[:, None]) * scale

    row = (tl.program_id(2) * lines + line).to(tl.int64) * C + c
    if TERMS == 0:
        high, low, size = two_halves(key)
        x = tl.arange(0, BLOCK_D)[None]
        tl.store(keys + row[:, None] * (2 * BLOCK_D) + x, high, mask=(c < C)[:, None])
        tl.store(keys + row[:, None] * (2 * BLOCK_D) + BLOCK_D + x, low, mask=(c < C)[:, None])
        tl.store(sizes + row, size, mask=c < C)
    else:
        store_terms(keys, row * (TERMS * D), key, D, BLOCK_D, c < C, TERMS)


@triton.jit(do_not_specialize=["T", "C", "W"])
def nsa_topk_block_keys_bwd(
    d_keys, d_ck, doc_first, doc_last, T, C, W, K, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_S: tl.constexpr,
    d: tl.constexpr, s: tl.constexpr, INTERPOLATED: tl.constexpr, DOCUMENTS: tl.constexpr,
    SETS: tl.constexpr, FLIPPED: tl.constexpr,
):  # fmt: skip
    """One program: gradients of a tile of windows of one row and KV head, summed over the blocks
    around each window. d_keys [SETS B K C D], d_ck [B W K D]."""
    tile_index, line, _tiles, lines = grid_position(FLIPPED)
    b, h = (line // K).to(tl.int64), (line % K).to(tl.int64)
    w = tile_index * BLOCK_W + tl.arange(0, BLOCK_W)
    WINDOWS: tl.constexpr = s // d if s > d else 1
    BLOCKS: tl.constexpr = d // s if d > s else 1
    AROUND: tl.constexpr = 1 if INTERPOLATED else 0
    acc = tl.zeros([BLOCK_W, BLOCK_D], tl.float32)
    for near in range(-AROUND * BLOCKS, (1 + AROUND) * BLOCKS):
        c = w // WINDOWS * BLOCKS + near
        there = (w < W) & (c >= 0) & (c < C)
        first = first_window(c, d, s)
        lo, end = block_windows(c, W, b, T, doc_first, doc_last, d, s, DOCUMENTS)
        count = tl.zeros([BLOCK_W], tl.float32)
        own = tl.zeros([BLOCK_W], tl.float32)
        own_edge = tl.zeros([BLOCK_W], tl.float32)
        for j in range(-AROUND, WINDOWS + AROUND):
            weight = window_weight(c, j, end, d, s, BLOCK_S, INTERPOLATED)
            count += weight
            counts_as = tl.minimum(tl.maximum(first + j, lo), end - 1)
            own += tl.where(counts_as == w, weight, 0.0)
            counts_as = tl.minimum(counts_as, first + WINDOWS - 1)
            own_edge += tl.where(counts_as == w, weight, 0.0)
        rows = line.to(tl.int64) * C + c
        fraction = own / tl.maximum(count, 1.0)
        acc += fraction[:, None] * load_rows(d_keys, rows * D, D, BLOCK_D, there)
        if SETS == 2:
            rows += lines.to(tl.int64) * C
            fraction = own_edge / tl.maximum(count, 1.0)
            acc += fraction[:, None] * load_rows(d_keys, rows * D, D, BLOCK_D, there)
    store_rows(d_ck, ((b * W + w) * K + h) * D, acc * scale, D, BLOCK_D, w < W)


def term_dtype(terms):
    """The dtype of `terms` terms that sum to a float32 value."""
    if terms == 1:
        return torch.float32
    # Triton's interpreter has no bfloat16
    return torch.float16 if os.environ.get("TRITON_INTERPRET") == "1" else torch.bfloat16


def mean_queries(q, ranks, terms):
    """Means [B, T, ranks, terms * D] of the queries q [B T H D] that rank together: one float32
    term, or bfloat16 terms."""
    B, T, H, D = q.shape
    means = q.new_empty(B, T, ranks, terms * D, dtype=term_dtype(terms))
    grid, flipped = launch.grid(cdiv(T, 32), B * ranks)
    nsa_topk_mean_keys[grid](
        q, means, T, ranks, *q.stride()[:3],
        G=H // ranks, D=D, BLOCK_D=launch.padded(D), BLOCK_M=32, TERMS=terms,
        FLIPPED=flipped,
    )  # fmt: skip
    return means


def document_arguments(documents):
    """Kernel arguments of the document bounds, and the number of tokens T."""
    return dict(T=0 if documents is None else documents.first.shape[1], **launch.bounds(documents))


def block_keys(ck, C, d, s, interpolated, scale, terms=0, documents=None):
    """Keys of blocks 0 .. C - 1: halves [sets, B, K, C, 2, BLOCK_D] and their scales [sets, B, K,
    C]. If interpolated, a second set is for queries that do not see the window after the block.
    With `terms`: float32 or bfloat16 terms [sets, B, K, C, terms * D] and None."""
    B, W, K, D = ck.shape
    block_d = launch.padded(D)
    sets = 2 if interpolated else 1
    if terms:
        keys, sizes = ck.new_empty(sets, B, K, C, terms * D, dtype=term_dtype(terms)), None
    else:
        keys = ck.new_empty(sets, B, K, C, 2, block_d, dtype=torch.float16)
        sizes = ck.new_empty(sets, B, K, C, dtype=torch.float32)
    block_c = 16
    grid, flipped = launch.grid(cdiv(C, block_c), B * K, sets)
    nsa_topk_block_keys[grid](
        ck, keys, sizes, C=C, W=W, K=K, scale=scale, **launch.strides("k", ck, "bwh"),
        **document_arguments(documents), D=D, BLOCK_D=block_d, BLOCK_C=block_c,
        BLOCK_S=next_power_of_2(s), d=d, s=s, INTERPOLATED=interpolated, TERMS=terms,
        FLIPPED=flipped,
    )  # fmt: skip
    return keys, sizes


def block_keys_backward(d_keys, W, d, s, interpolated, scale, documents=None):
    """Gradient [B W K D] of ck from the gradient [sets, B, K, C, D] of its block keys, float32."""
    sets, B, K, C, D = d_keys.shape
    d_ck = d_keys.new_empty(B, W, K, D)
    block_w = 16
    grid, flipped = launch.grid(cdiv(W, block_w), B * K)
    nsa_topk_block_keys_bwd[grid](
        d_keys, d_ck, C=C, W=W, K=K, scale=scale, **document_arguments(documents), D=D,
        BLOCK_D=launch.padded(D), BLOCK_W=block_w, BLOCK_S=next_power_of_2(s),
        d=d, s=s, INTERPOLATED=interpolated, SETS=sets, FLIPPED=flipped,
    )  # fmt: skip
    return d_ck
