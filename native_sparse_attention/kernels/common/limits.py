"""What no choice of tiles makes small enough for every GPU: calls whose tiles, at their smallest,
hold more than some GPUs have. As `tests/scripts/compile_kernels.py` found it."""

from __future__ import annotations

import torch

from . import launch
from .counts import next_power_of_2, padded

# rows of a tile of queries, and keys of a tile, at least
ROWS, KEYS = 16, 16
# a step of decoding, against windows: rows of queries unless a token has more heads, and keys
STEP_ROWS, STEP_WINDOWS = 64, 32
# and against blocks: keys at least, by bytes of a number
STEP_KEYS = {2: 64, 4: 32}
# besides the tiles: probabilities, and sums of a row
BESIDES = 8 * 1024


@torch.compiler.assume_constant_result
def shared_memory() -> int:
    """Bytes that a program may hold on the current GPU."""
    return launch.architecture().shared_memory


def step_bytes(group: int, width: int, size: int, T: int, s: int) -> int:
    """Of shared memory, for a step of decoding with T new tokens: queries of several tokens with
    windows, or of one token with the keys and values of a block of s."""
    heads = max(ROWS, next_power_of_2(group))
    rows = max(heads, min(STEP_ROWS, next_power_of_2(T) * next_power_of_2(group)))
    keys = max(STEP_KEYS[size], next_power_of_2(s))
    return max(rows + 2 * STEP_WINDOWS, heads + 2 * keys) * padded(width) * size


def backward_bytes(group: int, width: int) -> int:
    """Of shared memory, for dq, dk and dv in float32: queries and d_out of all heads of a token's
    group, and keys and values. Tiles in 16 bits always fit."""
    rows = max(ROWS, next_power_of_2(group))
    return 2 * (rows + KEYS) * padded(width) * 4 + BESIDES
