"""Norms of keys, for the row bound: |scale q . k| <= |scale| |q| |k|. A kernel subtracts a small
bound in place of the running maximum, and skips the rescaling.

With a bound of B the largest term is at least 2**(-2 B), and terms 2**(126 - 2 B) times smaller
underflow. With fewer than 16 keys the rounding of the largest term would be noticeable: after
subtraction of the maximum it is exactly 1."""

from collections import namedtuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .launch import cdiv, strided
from .precompile import launcher
from .primitives import grid_position, load_rows

# keys of a program
BLOCK_N = tl.constexpr(128)
Settings = namedtuple("Settings", "D BLOCK_D FLIPPED")

# dtypes that use the row bound: float16 would round probabilities to too few bits, and float32
# logits
BOUNDED_DTYPES = (torch.bfloat16,)

# keys per query up to which the norms are worth a read of all keys
MAX_KEYS_PER_QUERY = 4


@triton.jit(do_not_specialize=["N"])
def nsa_key_norms(k, norms, N, K, F: tl.constexpr):
    """One program: BLOCK_N of the N keys of one row and head. It raises their norm in `norms`. The
    maximum is of the float32 bits, which have the order of the floats where these are not
    negative."""
    tile, line, _tiles, _lines = grid_position(F.FLIPPED)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    b, h = (line // K).to(tl.int64), (line % K).to(tl.int64)
    base = k.ptr + b * k.b + h * k.h
    rows = load_rows(base, n.to(tl.int64) * k.n, F.D, F.BLOCK_D, n < N).to(tl.float32)
    longest = tl.sqrt(tl.max(tl.sum(rows * rows, 1), 0))
    tl.atomic_max(norms + line, longest.to(tl.int32, bitcast=True), sem="relaxed")


def key_norms(q: Tensor, k: Tensor) -> Tensor | None:
    """The largest norm of the keys k [B N K D] of each row and head, [B K] in float32, for queries
    q [B T H D]. None if kernels cannot use the norms (those for Hopper GPUs do) or if computing
    them does not pay."""
    B, N, K, D = k.shape
    is_used = k.dtype in BOUNDED_DTYPES and launch.supports_gluon(k)
    if not is_used or MAX_KEYS_PER_QUERY * q.shape[1] < N:
        return None
    norms = k.new_zeros(B, K, dtype=torch.float32)
    grid, flipped = launch.grid(cdiv(N, BLOCK_N.value), B * K)
    if k.numel():
        launcher(nsa_key_norms, grid)(
            strided(k), norms.view(torch.int32), N, K, F=Settings(D, launch.padded(D), flipped)
        )
    return norms
