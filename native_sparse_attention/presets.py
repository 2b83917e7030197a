"""Named settings, with sizes by the length of the sequences. docs/training.md compares the forms,
which are variants of benchmarks/variants.py: at 8,192 tokens "short-windows" is "MLP over windows
of 8", and "one-softmax" with dense_length=0 is "1088 keys, blocks of 32, any head, 8 bits"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .blocks import GROUP
from .checks import IMPORTANCE_RULES, as_int, check_branches, check_choice, check_int

# of `NSAConfig` without sizes, `Transformer` and `NSAModelConfig`
RECOMMENDED = "one-softmax"
SIZES = (
    "compress_block_size", "compress_block_sliding_stride", "selection_block_size",
    "sliding_window_size", "num_initial_blocks", "num_local_blocks",
)  # fmt: skip
# by the longest sequences, in tokens, the sizes of `SIZES` that a preset sets
LONG = float("inf")
Sizes = dict[float, tuple[int | None, ...]]
THREE_BRANCHES: Sizes = {
    1024: (8, 4, 16, 63), 4096: (16, 8, 32, 255), LONG: (32, 16, 64, 511),
}  # fmt: skip
SHORT_WINDOWS: Sizes = {1024: (8, 4, 16, 63), 4096: (8, 4, 32, 255), LONG: (8, 4, 64, 255)}
ONE_SOFTMAX: Sizes = {16384: (1, 1, 32, None, 2, 16), LONG: (1, 1, 64, None, 1, 8)}
FORMS: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "published": (THREE_BRANCHES, dict(num_selected_blocks=16)),
    "paper": (THREE_BRANCHES, dict(
        importance="probs", branch_kv="independent", num_initial_blocks=1, num_local_blocks=2,
        num_selected_blocks=13,
    )),
    "short-windows": (SHORT_WINDOWS, dict(
        num_initial_blocks=1, num_local_blocks=2, num_selected_blocks=6,
    )),
    "one-softmax": (ONE_SOFTMAX, dict(
        branches=("selected",), importance="head_max", ranking_bits=8, rank_rotated=True,
        num_selected_blocks=16,
        # up to here blocks gain little time, or lose some (docs/performance.md)
        dense_length=8192,
    )),
}  # fmt: skip
PRESETS = tuple(FORMS)

# what settings go with, where they are not at their defaults
BY_KEYS = "max", "head_max", "logits"
WITHOUT_COMPRESSED = ("selected",), ("window",), ("selected", "window")
NEEDED: dict[str, dict[str, tuple[Any, ...]]] = {
    "interpolated_importance_score": dict(importance=("logits",)),
    "use_diff_topk": dict(importance=IMPORTANCE_RULES),
    "dense_length": dict(branches=(("selected",),)),
    "ranking_bits": dict(
        importance=("max", "head_max"), causal=(True,), use_diff_topk=(False,),
        num_selected_groups=(0,), branches=WITHOUT_COMPRESSED,
    ),
    "num_selected_groups": dict(
        importance=BY_KEYS, causal=(True,), use_diff_topk=(False,),
        interpolated_importance_score=(False,), selection_stride=(1,), branches=WITHOUT_COMPRESSED,
    ),
}  # fmt: skip


def preset(
    name: str, length: int | None = None, user_settings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Settings of `NSAConfig.preset`, some of them replaced by the user's."""
    check_choice("name", name, PRESETS)
    longest = LONG if length is None else check_int("length", length, 1)
    lengths, form = FORMS[name]
    sizes = next(sizes for limit, sizes in lengths.items() if longest <= limit)
    settings: dict[str, Any] = {
        key: size for key, size in zip(SIZES, sizes, strict=False) if size is not None
    }
    return completed(form | settings, user_settings or {})


def completed(defaults: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by default, replaced by others. A dense length and 8 bits are left out where the
    others exclude them."""
    settings = {**defaults, **changes}
    known = dict(settings)
    if "branches" in known:
        known["branches"] = check_branches(known["branches"])
    stride = max(1, as_int(settings.get("selection_stride")) or 1)
    if as_int(settings.get("num_selected_groups")):
        stride = GROUP * max(1, as_int(settings.get("selection_block_size")) or 1)
    for name in {"dense_length", "ranking_bits"} & (settings.keys() - changes.keys()):
        needed = NEEDED[name].items()
        fits = (is_in(known.get(other, values[0]), values) for other, values in needed)
        if not all(fits) or (name == "dense_length" and settings[name] % stride):
            del settings[name]
    return settings


def is_in(value: Any, values: tuple[Any, ...]) -> bool:
    """Whether a setting, not checked yet, has one of the values; vectors have none."""
    try:
        return value in values
    except (RuntimeError, ValueError):
        return False
