"""Addresses in a KV cache, and the kernels that write new tokens to it.

A stream stores entries (one per token, or one per compression window) contiguously per sequence or
in pages: entry n of sequence b lies in slot n % PAGE_SIZE of page page_table[b, n // PAGE_SIZE]. A
tail keeps the last entries of a sequence in a ring buffer: entry n lies in slot n % TAIL_SIZE.
Kernels read the sequence lengths on the device, so a decode step can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common.launch import cdiv, head_strided, next_power_of_2, padded
from ..common.precompile import launcher
from ..common.primitives import grid_position, load_rows, store_rows
from .step import cache_arguments


@triton.jit
def load_page(n, b, cache, PAGE_SIZE: tl.constexpr):
    """The pages that hold entries n of sequence b; b itself without pages."""
    if PAGE_SIZE == 0:
        return b
    else:
        return tl.load(cache.page_table + b * cache.t_b + n // PAGE_SIZE).to(tl.int64)


@triton.jit
def slot_offsets(n, page, stride_page, stride_slot, PAGE_SIZE: tl.constexpr):
    """Offsets of entries n of a sequence, given their pages (or the sequence, without pages)."""
    if PAGE_SIZE > 0:
        n = n % PAGE_SIZE
    return page * stride_page + n.to(tl.int64) * stride_slot


@triton.jit
def cache_offsets(n, b, stride_page, stride_slot, cache, PAGE_SIZE: tl.constexpr):
    """Offsets of entries n of sequence b in a stream."""
    page = load_page(n, b, cache, PAGE_SIZE)
    return slot_offsets(n, page, stride_page, stride_slot, PAGE_SIZE)


@triton.jit(debug=True, do_not_specialize=["B", "T", "max_length"])
def nsa_kv_cache_starts(lengths, counts, starts, B, T, max_length, BLOCK_B: tl.constexpr):
    """One program: sequences. Writes their lengths in 64 bits and asserts that new tokens fit."""
    b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    length, count = tl.load(lengths + b, mask=b < B, other=0), T
    if counts is not None:
        count = tl.load(counts + b, mask=b < B, other=0)
    fits = (count >= 0) & (count <= T) & (length + count <= max_length)
    tl.device_assert(fits, "cache is full, or lengths are not between 0 and n", mask=b < B)
    tl.store(starts + b, length.to(tl.int64), mask=b < B)


@triton.jit(do_not_specialize=["T"])
def nsa_kv_cache_append(
    k, v, k_cache, v_cache, cache, T, K,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
    EVERY: tl.constexpr, TAIL_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, FLIPPED: tl.constexpr,
):  # fmt: skip
    """One program: the i-th new entry of one sequence and KV head, from `k` and `v` [B K n D] to
    its slots in two streams, or in their tails (TAIL_SIZE > 0). An entry covers EVERY tokens; it is
    written only if the sequence holds all of them after the step."""
    i, line, _entries, _lines = grid_position(FLIPPED)
    b, h = (line // K).to(tl.int64), (line % K).to(tl.int64)
    length, count = tl.load(cache.lengths + b), T
    if cache.counts is not None:
        count = tl.load(cache.counts + b)
    n = length // EVERY + i
    if (n + 1) * EVERY <= length + count:
        if TAIL_SIZE > 0:
            n = n % TAIL_SIZE
        i_d, i_e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
        value = tl.load(k.ptr + b * k.b + h * k.h + i * k.n + i_d, mask=i_d < D)
        k_ptr = k_cache.ptr + h * k_cache.h
        k_slot = cache_offsets(n, b, k_cache.b, k_cache.n, cache, PAGE_SIZE)
        tl.store(k_ptr + k_slot + i_d, value, mask=i_d < D)
        value = tl.load(v.ptr + b * v.b + h * v.h + i * v.n + i_e, mask=i_e < E)
        v_ptr = v_cache.ptr + h * v_cache.h
        v_slot = cache_offsets(n, b, v_cache.b, v_cache.n, cache, PAGE_SIZE)
        tl.store(v_ptr + v_slot + i_e, value, mask=i_e < E)


@triton.jit(do_not_specialize=["T"])
def nsa_kv_cache_windows(
    k, v, k_tail, v_tail, lengths, k_out, v_out, T, K,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
    l: tl.constexpr, BLOCK_L: tl.constexpr, d: tl.constexpr, TAIL_SIZE: tl.constexpr,
    FLIPPED: tl.constexpr,
):  # fmt: skip
    """One program: the i-th window that T new tokens may complete, of one sequence and KV head.
    Reads the raw keys and values of its l tokens, new ones from `k` and `v` [B K T D] and earlier
    ones from the tails, and writes them to `k_out` and `v_out` [B K windows l D]. Tokens before the
    first and after the last one are zeros."""
    i, line, windows, _lines = grid_position(FLIPPED)
    b, h = (line // K).to(tl.int64), (line % K).to(tl.int64)
    length = tl.load(lengths + b)
    u = tl.arange(0, BLOCK_L)
    token = (length // d + i + 1) * d - l + u
    is_new = (token >= length) & (token < length + T) & (u < l)
    is_old = (token >= 0) & (token < length) & (u < l)
    n, slot = (token - length).to(tl.int64), (tl.maximum(token, 0) % TAIL_SIZE).to(tl.int64)
    row = ((line * windows + i) * l + u).to(tl.int64)
    tile = load_rows(k_tail.ptr, b * k_tail.b + h * k_tail.h + slot * k_tail.n, D, BLOCK_D, is_old)
    new_tile = load_rows(k.ptr, b * k.b + h * k.h + n * k.n, D, BLOCK_D, is_new)
    store_rows(k_out, row * D, tl.where(is_new[:, None], new_tile, tile), D, BLOCK_D, u < l)
    tile = load_rows(v_tail.ptr, b * v_tail.b + h * v_tail.h + slot * v_tail.n, E, BLOCK_E, is_old)
    new_tile = load_rows(v.ptr, b * v.b + h * v.h + n * v.n, E, BLOCK_E, is_new)
    store_rows(v_out, row * E, tl.where(is_new[:, None], new_tile, tile), E, BLOCK_E, u < l)


def starts(lengths: Tensor, counts: Tensor | None, tokens: int, max_length: int) -> Tensor:
    """The lengths [B] in int64. The device asserts that `counts` of `tokens` new ones fit."""
    out, B = lengths.new_empty(lengths.shape, dtype=torch.int64), len(lengths)
    launcher(nsa_kv_cache_starts, (cdiv(B, 128),))(
        lengths, None if counts is None else counts.contiguous(), out, B, tokens, max_length,
        BLOCK_B=128, num_warps=1,
    )  # fmt: skip
    return out


def append(
    new: dict[str, Tensor], stores: dict[str, Tensor], lengths: Tensor, tokens: int, *,
    counts: Tensor | None = None, page_table: Tensor | None = None, page_size: int | None = None,
    every: int = 1, tail: bool = False,
) -> None:  # fmt: skip
    """Write the entries `new` [b h n d] that `tokens` new tokens may complete to their streams.

    `lengths` [b] tokens precede the new ones, of which the first `counts` [b] are real (None: all).
    The streams' storage is [b h n d], or [pages h n d] with a page table [b pages] of pages of
    `page_size` tokens; with `tail` it is a ring buffer [b h size d], in which an entry's slot is
    its position modulo `size`. An entry covers `every` tokens.
    """
    names = list(new)
    # two streams a launch, or the last one twice
    for key, value in zip(names[::2], names[1::2] + names[-1:], strict=False):
        k, v, k_cache, v_cache = new[key], new[value], stores[key], stores[value]
        (B, K, n, D), E = k.shape, v.shape[-1]
        grid, flipped = launch.grid(n, B * K)
        with torch.cuda.device_of(lengths):
            launcher(nsa_kv_cache_append, grid)(
                k=head_strided(k), v=head_strided(v), k_cache=head_strided(k_cache),
                v_cache=head_strided(v_cache), cache=cache_arguments(lengths, counts, page_table),
                T=tokens, K=K, D=D, BLOCK_D=padded(D), E=E, BLOCK_E=padded(E), EVERY=every,
                TAIL_SIZE=k_cache.shape[2] if tail else 0,
                PAGE_SIZE=0 if page_table is None or page_size is None else page_size // every,
                FLIPPED=flipped, num_warps=1,
            )  # fmt: skip


def windows(
    new: dict[str, Tensor], tails: dict[str, Tensor], lengths: Tensor, l: int, d: int
) -> dict[str, Tensor]:
    """The windows [b h w l d] that new raw keys, and values, [b h n d] may complete, with those of
    the tails [b h size d]. Tokens before the first are zeros."""
    names = list(new)
    k, v, k_tail, v_tail = (t[names[n]] for t in (new, tails) for n in (0, -1))
    (B, K, T, D), E = k.shape, v.shape[-1]
    max_windows = cdiv(T, d)
    k_out, v_out = (t.new_empty(B, K, max_windows, l, t.shape[-1]) for t in (k_tail, v_tail))
    grid, flipped = launch.grid(max_windows, B * K)
    with torch.cuda.device_of(lengths):
        launcher(nsa_kv_cache_windows, grid)(
            k=head_strided(k), v=head_strided(v), k_tail=head_strided(k_tail),
            v_tail=head_strided(v_tail), lengths=lengths, k_out=k_out, v_out=v_out, T=T, K=K, D=D,
            BLOCK_D=padded(D), E=E, BLOCK_E=padded(E), l=l, BLOCK_L=next_power_of_2(l), d=d,
            TAIL_SIZE=k_tail.shape[2], FLIPPED=flipped, num_warps=4,
        )  # fmt: skip
    return dict(zip(new, (k_out, v_out), strict=False))
