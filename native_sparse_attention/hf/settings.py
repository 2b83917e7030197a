"""The settings of a model's sparse attention, and the dict that keeps them in `model.config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..checks.keywords import check_keywords
from ..checks.scalars import shown
from ..checks.tensors import BACKENDS, check_choice
from ..config import SELECTION, AttentionConfig, NSAConfig

# the key of `model.config`, and within it the implementation that the sparse one replaces
KEY, REPLACED = "nsa_config", "replaced_implementation"
# the key of a converted model's settings
CONVERTED_KEY = "nsa_converted"

# kinds of layers that "nsa" computes
LAYER_TYPES = {"full_attention", "sliding_attention"}

# One softmax over initial, local and ranked blocks. A block's score is its largest token's.
DEFAULTS: dict[str, Any] = dict(
    compress_block_size=1,
    compress_block_sliding_stride=1,
    selection_block_size=64,
    num_selected_blocks=16,
    importance="max",
    interpolated_importance_score=False,
    num_initial_blocks=1,
    num_local_blocks=8,
    selection_stride=1,
    query_heads_share_selected_kv=True,
    dense_length=8192,
    use_diff_topk=False,
    backend="auto",
)

# what an NSAConfig must say of the other settings: the model decides, or there is one form
FIXED: dict[str, Any] = dict(
    branches=("selected",),
    causal=True,
    rank_rotated=True,
    scale=None,
    soft_cap=None,
    attention_sinks=False,
    recompute=False,
    block_sizes=None,
)


def given(config: NSAConfig | Mapping[str, Any] | None) -> dict[str, Any]:
    """The settings that `config` names.

    Raises:
        ValueError: neither an NSAConfig nor a mapping, or an NSAConfig of another form.
    """
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return {name: value for name, value in config.items() if name != REPLACED}
    if not isinstance(config, NSAConfig):
        raise ValueError(
            f"config must be an NSAConfig, a dict of settings or None, got {shown(config)}"
        )
    for name, value in FIXED.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"config must have {name}={value!r} in a model of transformers, "
                f"got {getattr(config, name)!r}"
            )
    names = {field.name for field in fields(config)} & set(DEFAULTS)
    return {name: getattr(config, name) for name in names}


def checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """All settings as plain values, those not given by default.

    Raises:
        ValueError: an unknown setting, one out of range, or two incompatible ones.
    """
    for name, value in FIXED.items():
        if name in settings and settings[name] != value:
            raise ValueError(
                f"{name} must be {value!r} in a model of transformers, got {shown(settings[name])}"
            )
    own = {name: value for name, value in settings.items() if name not in FIXED}
    check_keywords(own, DEFAULTS)
    all_of_them = DEFAULTS | own
    if own.get("compress_block_sliding_stride") is None:  # d is l by default
        l = all_of_them["compress_block_size"]
        all_of_them["compress_block_sliding_stride"] = l
    backend = all_of_them.pop("backend")
    check_choice("backend", backend, BACKENDS)
    config = AttentionConfig(branches=("selected",), causal=True, **all_of_them)
    names = (*SELECTION, "dense_length", "use_diff_topk")
    return {name: getattr(config, name) for name in names} | dict(backend=backend)


def layer_types(config: Any) -> list[str]:
    """The kind of each layer; of one layer where all are alike."""
    found: list[str] | None = getattr(config, "layer_types", None)
    if found is None:
        window = getattr(config, "sliding_window", None)
        found = ["full_attention" if window is None else "sliding_attention"]
    return found


def check_supported(config: Any, name: str) -> None:
    """Check that "nsa" computes every layer of a model of this configuration.

    Raises:
        ValueError: it has layers of other kinds, or cross-attention.
    """
    if others := sorted(set(layer_types(config)) - LAYER_TYPES):
        raise ValueError(
            f"model must be one with layers of {' and '.join(sorted(LAYER_TYPES))}, got {name} "
            f"with {others}"
        )
    if crossed := getattr(config, "cross_attention_layers", None):
        raise ValueError(
            f"model must be one without cross-attention, got {name} with "
            f"cross_attention_layers={list(crossed)}"
        )


def settings_of(config: Any) -> dict[str, Any]:
    """The settings that the configuration of a model keeps; defaults where it keeps none."""
    kept = getattr(config, KEY, None) or {}
    return DEFAULTS | kept
