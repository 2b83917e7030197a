"""How long keys are, which bounds logits: |scale q . k| <= |scale| |q| |k|. Where the bound is
small it can be subtracted in place of each row's largest logit, and no maximum need be followed;
see `primitives.measured_from`."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .counts import cdiv
from .launch import strides
from .primitives import grid_position, load_rows

# keys of a program
BLOCK_N = 128

# what may be measured from a bound: probabilities of float16 would be rounded to too few bits, and
# logits of float32
BOUNDED_DTYPES = (torch.bfloat16,)

# keys a query up to which it pays to read all keys for their norms
MAX_KEYS_PER_QUERY = 4


@triton.jit(do_not_specialize=["N"])
def nsa_key_norms(
    k, norms, N, K, k_b, k_n, k_h,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, FLIPPED: tl.constexpr,
):  # fmt: skip
    """One program: N keys of one row and head. Raises the largest norm to the largest of theirs, in
    the bits of a float32: those of floats that are not negative lie in their order."""
    tile, line, _tiles, _lines = grid_position(FLIPPED)
    b, h = (line // K).to(tl.int64), (line % K).to(tl.int64)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k_tile = load_rows(k + b * k_b + h * k_h, n.to(tl.int64) * k_n, D, BLOCK_D, n < N).to(
        tl.float32
    )
    longest = tl.sqrt(tl.max(tl.sum(k_tile * k_tile, 1), 0))
    tl.atomic_max(norms + line, longest.to(tl.int32, bitcast=True), sem="relaxed")


def key_norms(q: Tensor, k: Tensor) -> Tensor | None:
    """The largest norm of the keys k [B N K D] of each row and head [B K], float32, for queries q
    [B T H D]. None where they would not serve or pay."""
    B, N, K, D = k.shape
    if k.dtype not in BOUNDED_DTYPES or MAX_KEYS_PER_QUERY * q.shape[1] < N:
        return None
    norms = k.new_zeros(B, K, dtype=torch.float32)
    if k.numel():
        grid, flipped = launch.grid(cdiv(N, BLOCK_N), B * K)
        nsa_key_norms[grid](
            k, norms.view(torch.int32), N, K, **strides("k", k, "bnh"), D=D,
            BLOCK_D=launch.padded(D), BLOCK_N=BLOCK_N, FLIPPED=flipped,
        )  # fmt: skip
    return norms


def bounds(norms: Tensor | None) -> dict[str, Any]:
    """Kernel arguments of the norms."""
    return dict(norms=norms, BOUNDED=norms is not None)
