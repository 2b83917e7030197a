"""Reduction of partial dk and dv in a fixed order: both in one launch, from partials that may cover
different numbers of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import cdiv
from .precompile import launcher

# dk [splits B n K D] and dv [splits B n K E] of the first n keys, float32 and contiguous
Partials = tuple[Tensor, Tensor]

# elements of a program; partials that are loaded at once
BLOCK, AHEAD = 1024, 4
# inputs of different lengths in one launch
MAX_INPUTS = 3


@triton.jit
def sum_partials(acc, partials, count, size, b, B, x, AHEAD: tl.constexpr):
    """acc plus elements x of row b of `count` partials, each of `size` elements a row."""
    for split in tl.range(0, count, loop_unroll_factor=AHEAD):
        row = (split * B + b).to(tl.int64)
        acc += tl.load(partials + row * size + x, mask=x < size, other=0.0)
    return acc


LENGTHS = ["B", "N", "n", "tiles", "count_0", "count_1", "count_2", "n_0", "n_1", "n_2"]


@triton.jit(do_not_specialize=LENGTHS)
def nsa_reduce_partials(
    dk, dv, dk_0, dv_0, dk_1, dv_1, dk_2, dv_2, count_0, count_1, count_2, n_0, n_1, n_2,
    B, N, n, tiles, width_k, width_v, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One program: some elements of the first n keys of a row of dk, or of dv, [N K D]: the sum of
    all partials. The output may alias the first partial."""
    b, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    x = tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    if tl.program_id(1) == 0:
        acc = sum_partials(acc, dk_0, count_0, n_0.to(tl.int64) * width_k, b, B, x, AHEAD)
        acc = sum_partials(acc, dk_1, count_1, n_1.to(tl.int64) * width_k, b, B, x, AHEAD)
        acc = sum_partials(acc, dk_2, count_2, n_2.to(tl.int64) * width_k, b, B, x, AHEAD)
        row = dk + b.to(tl.int64) * N * width_k
        tl.store(row + x, acc.to(dk.dtype.element_ty), mask=x < n.to(tl.int64) * width_k)
    else:
        acc = sum_partials(acc, dv_0, count_0, n_0.to(tl.int64) * width_v, b, B, x, AHEAD)
        acc = sum_partials(acc, dv_1, count_1, n_1.to(tl.int64) * width_v, b, B, x, AHEAD)
        acc = sum_partials(acc, dv_2, count_2, n_2.to(tl.int64) * width_v, b, B, x, AHEAD)
        row = dv + b.to(tl.int64) * N * width_v
        tl.store(row + x, acc.to(dv.dtype.element_ty), mask=x < n.to(tl.int64) * width_v)


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
    args: dict[str, Any] = {}
    for i in range(MAX_INPUTS):
        # a missing input has no partials
        partial_dk, partial_dv = inputs[i] if i < len(inputs) else (first_dk[:0], first_dv[:0])
        args |= {f"dk_{i}": partial_dk, f"dv_{i}": partial_dv}
        args |= {f"count_{i}": len(partial_dk), f"n_{i}": partial_dk.shape[2]}
    tiles = cdiv(n * K * max(D, E), BLOCK)
    if B * tiles:
        launcher(nsa_reduce_partials, (B * tiles, 2))(
            dk, dv, **args, B=B, N=N, n=n, tiles=tiles, width_k=K * D, width_v=K * E, BLOCK=BLOCK,
            AHEAD=AHEAD,
        )  # fmt: skip
    return dk, dv
