"""Named settings, with sizes by the length of the sequences. docs/training.md compares the forms:
at 8,192 tokens "short-windows" is its variant "MLP over windows of 8", and "one-softmax" with
dense_length=0 is "1088 keys, blocks of 32"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .checks.scalars import check_int
from .checks.tensors import check_choice

PRESETS = ("published", "paper", "short-windows", "one-softmax")
# sequences of at most so many tokens, and sizes for them
THREE_BRANCHES: tuple[tuple[float, dict[str, int]], ...] = (
    (
        1024,
        dict(
            compress_block_size=8, compress_block_sliding_stride=4, selection_block_size=16,
            sliding_window_size=63,
        ),
    ),
    (
        4096,
        dict(
            compress_block_size=16, compress_block_sliding_stride=8, selection_block_size=32,
            sliding_window_size=255,
        ),
    ),
    (
        float("inf"),
        dict(
            compress_block_size=32, compress_block_sliding_stride=16, selection_block_size=64,
            sliding_window_size=511,
        ),
    ),
)  # fmt: skip
SHORT_WINDOWS: tuple[tuple[float, dict[str, int]], ...] = (
    (1024, dict(selection_block_size=16, sliding_window_size=63)),
    (4096, dict(selection_block_size=32, sliding_window_size=255)),
    (float("inf"), dict(selection_block_size=64, sliding_window_size=255)),
)
ONE_SOFTMAX: tuple[tuple[float, dict[str, int]], ...] = (
    (16384, dict(selection_block_size=32, num_initial_blocks=2, num_local_blocks=16)),
    (float("inf"), dict(selection_block_size=64, num_initial_blocks=1, num_local_blocks=8)),
)
FORMS: dict[str, dict[str, Any]] = {
    "published": dict(num_selected_blocks=16),
    "paper": dict(
        importance="probs", branch_kv="independent", num_initial_blocks=1, num_local_blocks=2,
        num_selected_blocks=13,
    ),
    "short-windows": dict(
        compress_block_size=8, compress_block_sliding_stride=4, num_initial_blocks=1,
        num_local_blocks=2, num_selected_blocks=6,
    ),
    "one-softmax": dict(
        branches=("selected",), importance="max", rank_rotated=True, compress_block_size=1,
        compress_block_sliding_stride=1, num_selected_blocks=16,
        # up to here blocks gain little time, or lose some (docs/performance.md)
        dense_length=8192,
    ),
}  # fmt: skip


def preset(
    name: str, length: int | None = None, own: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Settings of `NSAConfig.preset`, with `own` ones in their place."""
    check_choice("name", name, PRESETS)
    longest = float("inf") if length is None else check_int("length", length, 1)
    own_sizes = {"short-windows": SHORT_WINDOWS, "one-softmax": ONE_SOFTMAX}
    sizes = own_sizes.get(name, THREE_BRANCHES)
    given = dict(own or {})
    found = FORMS[name] | next(found for limit, found in sizes if longest <= limit) | given
    if "dense_length" in found and "dense_length" not in given and not can_be_dense(found):
        del found["dense_length"]
    return found


def can_be_dense(settings: Mapping[str, Any]) -> bool:
    """Whether `dense_length` goes with settings that replace those of a preset."""
    stride = settings.get("selection_stride", 1)
    fits = not isinstance(stride, int) or stride < 1 or settings["dense_length"] % stride == 0
    return fits and tuple(settings["branches"]) == ("selected",)
