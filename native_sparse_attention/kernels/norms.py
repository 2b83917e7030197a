"""How long keys are, which bounds logits: |scale q . k| <= |scale| |q| |k|. Where the bound is
small it can be subtracted in place of each row's largest logit, and no maximum need be followed;
see `device.measured_from`."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .counts import cdiv
from .device import grid_place, load_rows
from .launch import strides

# keys of a program
BLOCK_N = 128

# what may be measured from a bound: probabilities of float16 would be rounded to too few bits, and
# logits of float32
MEASURED = (torch.bfloat16,)

# keys a query up to which it pays to read all keys for their norms
MOST_KEYS = 4


@triton.jit
def longest_of(keys, n, N, k_n, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The largest norm of keys n of one row and head, of which there are N."""
    tile = load_rows(keys, n.to(tl.int64) * k_n, D, BLOCK_D, n < N).to(tl.float32)
    return tl.sqrt(tl.max(tl.sum(tile * tile, 1), 0))


@triton.jit(do_not_specialize=["N", "M"])
def norms_kernel(
    k, other, norms, N, M, K, k_b, k_n, k_h, o_b, o_n, o_h,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, FLIPPED: tl.constexpr,
):  # fmt: skip
    """One program: some of the N keys of one row and head, or behind these of the M others, whose
    norms lie behind those of all rows and heads. Raises the largest norm to the largest of theirs,
    in the bits of a float32: those of floats that are not negative lie in their order."""
    part, line, _parts, lines = grid_place(FLIPPED)
    b, h = (line // K).to(tl.int64), (line % K).to(tl.int64)
    n, parts = tl.arange(0, BLOCK_N), tl.cdiv(N, BLOCK_N)
    if part < parts:
        n += part * BLOCK_N
        longest = longest_of(k + b * k_b + h * k_h, n, N, k_n, D, BLOCK_D)
    else:
        n += (part - parts) * BLOCK_N
        longest = longest_of(other + b * o_b + h * o_h, n, M, o_n, D, BLOCK_D)
        norms += lines
    tl.atomic_max(norms + line, longest.to(tl.int32, bitcast=True), sem="relaxed")


def measured(q: Tensor, k: Tensor) -> bool:
    """Whether logits of these may be measured from a bound, and that pays."""
    return k.dtype in MEASURED and MOST_KEYS * q.shape[1] >= k.shape[1]


def norms_of(k: Tensor, other: Tensor) -> Tensor:
    """The largest norms of both, [2 B K], by one launch."""
    B, N, K, D = k.shape
    M = other.shape[1]
    norms = k.new_zeros(2, B, K, dtype=torch.float32)
    parts = cdiv(N, BLOCK_N) + cdiv(M, BLOCK_N)
    if parts and norms.numel():
        grid, flipped = launch.grid(parts, B * K)
        norms_kernel[grid](
            k, other, norms.view(torch.int32), N, M, K, **strides("k", k, "bnh"),
            **strides("o", other, "bnh"), D=D, BLOCK_D=launch.padded(D), BLOCK_N=BLOCK_N,
            FLIPPED=flipped,
        )  # fmt: skip
    return norms


def key_norms(q: Tensor, k: Tensor) -> Tensor | None:
    """The largest norm of the keys k [B N K D] of each row and head [B K], float32, for queries q
    [B T H D]. None where they would not serve or pay."""
    return norms_of(k, k[:, :0])[0] if measured(q, k) else None


def norms_of_both(
    q: Tensor, k: Tensor, other_q: Tensor, other: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """`key_norms` of k and of other keys of as many heads, together where both are asked for."""
    if measured(q, k) and measured(other_q, other):
        first, second = norms_of(k, other)
        return first, second
    return key_norms(q, k), key_norms(other_q, other)


def bounds(norms: Tensor | None) -> dict[str, Any]:
    """What a kernel takes of them."""
    return dict(norms=norms, BOUNDED=norms is not None)
