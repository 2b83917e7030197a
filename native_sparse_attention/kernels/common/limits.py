"""Least shared memory of a kernel: some calls need more than some GPUs have, with any tile config.
The numbers are from `tests/scripts/compile_kernels.py`."""

from __future__ import annotations

import torch

from . import launch
from .counts import next_power_of_2, padded

# least rows of a query tile, and least keys of a tile
ROWS, KEYS = 16, 16
# decoding, windows: rows of a query tile unless a token has more heads, and windows of a tile
STEP_ROWS, STEP_WINDOWS = 64, 32
# decoding, blocks: least keys of a tile, by bytes per element
STEP_KEYS = {2: 64, 4: 32}
# bytes besides the tiles: probabilities and row sums
BESIDES = 8 * 1024


@torch.compiler.assume_constant_result
def shared_memory() -> int:
    """Bytes of shared memory per program on the current GPU."""
    return launch.architecture().shared_memory


def step_bytes(group: int, width: int, size: int, T: int, s: int) -> int:
    """Bytes of shared memory to decode T new tokens: queries of several tokens and a tile of
    windows, or queries of one token and the keys and values of a block of `s` tokens."""
    heads = max(ROWS, next_power_of_2(group))
    rows = max(heads, min(STEP_ROWS, next_power_of_2(T) * next_power_of_2(group)))
    keys = max(STEP_KEYS[size], next_power_of_2(s))
    return max(rows + 2 * STEP_WINDOWS, heads + 2 * keys) * padded(width) * size


def backward_bytes(group: int, width: int) -> int:
    """Bytes of shared memory for dq, dk and dv in float32: q and d_out of a token's head group, and
    a tile of keys and values. 16-bit tiles always fit."""
    rows = max(ROWS, next_power_of_2(group))
    return 2 * (rows + KEYS) * padded(width) * 4 + BESIDES
