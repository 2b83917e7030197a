"""Reduction of partial dk and dv in a fixed order, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import cdiv
from .precompile import launcher

# dk [splits B n K D] and dv [splits B n K E] of the first n keys, float32 and contiguous
Partials = tuple[Tensor, Tensor]

# elements of a program; partials that are loaded at once
BLOCK, UNROLL = tl.constexpr(1024), tl.constexpr(4)
# inputs of different lengths in one launch
MAX_INPUTS = 3


@triton.jit
def sum_partials(out, partials, counts, lengths, B, N, n, b, x, width):
    """Write elements x of the first n keys of row b of `out`, `width` a key: sums of all partials,
    input by input."""
    acc = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(3):
        size = lengths[i].to(tl.int64) * width
        for split in tl.range(0, counts[i], loop_unroll_factor=UNROLL):
            row = (split * B + b).to(tl.int64)
            acc += tl.load(partials[i] + row * size + x, mask=x < size, other=0.0)
    rows = out + b.to(tl.int64) * N * width
    tl.store(rows + x, acc.to(out.dtype.element_ty), mask=x < n.to(tl.int64) * width)


LENGTHS = ["B", "N", "n", "tiles", "count_0", "count_1", "count_2", "n_0", "n_1", "n_2"]


@triton.jit(do_not_specialize=LENGTHS)
def nsa_reduce_partials(
    dk, dv, partial_dk, partial_dv, count_0, count_1, count_2, n_0, n_1, n_2, B, N, n, tiles,
    width_k, width_v,
):  # fmt: skip
    """One program: BLOCK elements of the first n keys of a row of dk, or of dv. The output may be
    the first partial."""
    b, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    x = tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    counts, lengths = (count_0, count_1, count_2), (n_0, n_1, n_2)
    if tl.program_id(1) == 0:
        sum_partials(dk, partial_dk, counts, lengths, B, N, n, b, x, width_k)
    else:
        sum_partials(dv, partial_dv, counts, lengths, B, N, n, b, x, width_v)


def reduce_partials(
    inputs: Sequence[Partials], k: Tensor, v: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """dk [B N K D] and dv [B N K E] of k and v: sums of the partials of one to three inputs. If the
    first input is a single partial of all keys in `dtype`, the sums overwrite it."""
    (B, N, K, D), E = k.shape, v.shape[-1]
    first_dk, first_dv = inputs[0]
    n = N
    if len(first_dk) == 1 and first_dk.shape[2] == N and first_dk.dtype == dtype:
        dk, dv = first_dk[0], first_dv[0]
        # later keys have no other partials
        n = max((partial_dk.shape[2] for partial_dk, _ in inputs[1:]), default=0)
    else:
        dk, dv = (t.new_empty(t.shape, dtype=dtype) for t in (k, v))
    missing = first_dk[:0], first_dv[:0]
    partial_dk, partial_dv = zip(*inputs, *[missing] * (MAX_INPUTS - len(inputs)), strict=True)
    tiles = cdiv(n * K * max(D, E), BLOCK.value)
    launcher(nsa_reduce_partials, (B * tiles, 2))(
        dk, dv, partial_dk, partial_dv, *map(len, partial_dk), *(t.shape[2] for t in partial_dk),
        B=B, N=N, n=n, tiles=tiles, width_k=K * D, width_v=K * E,
    )  # fmt: skip
    return dk, dv
