"""The settings of a model's sparse attention, and the dict that keeps them in `model.config`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from transformers.utils import logging

from ..checks.keywords import check_keywords
from ..checks.scalars import TOO_LARGE, shown
from ..checks.tensors import IMPORTANCE_RULES, check_choice
from ..config import NSAConfig

# the name of the attention implementation
NAME = "nsa"
# the key of `model.config`, and within it the implementation that the sparse one replaces
KEY, REPLACED = "nsa_config", "replaced_implementation"
# the key of a converted model's settings
CONVERTED_KEY = "nsa_converted"
# kinds of layers that "nsa" computes
LAYER_TYPES = {"full_attention", "sliding_attention"}
# the greatest `dense_length`
ANY_LENGTH = TOO_LARGE - 1

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


def named_settings(
    config: NSAConfig | Mapping[str, Any] | None, names: Iterable[str]
) -> dict[str, Any]:
    """The settings that `config` names; of an NSAConfig those of these names.

    Raises:
        ValueError: neither an NSAConfig nor a mapping.
    """
    if config is None or isinstance(config, Mapping):
        return dict(config or {})
    if not isinstance(config, NSAConfig):
        raise ValueError(
            f"config must be an NSAConfig, a dict of settings or None, got {shown(config)}"
        )
    known = {field.name for field in fields(config)}
    return {name: getattr(config, name) for name in names if name in known}


def drop_in_settings(
    config: NSAConfig | Mapping[str, Any] | None, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """All settings of `use_sparse_attention` as plain values, those not named by default.

    Raises:
        ValueError: an unknown setting, one out of range, two incompatible ones, or an NSAConfig of
            another form.
    """
    user = named_settings(config, (*DEFAULTS, *FIXED)) | dict(settings)
    user.pop(REPLACED, None)
    source = "config must have {}={!r}" if isinstance(config, NSAConfig) else "{} must be {!r}"
    for name, value in FIXED.items():
        if (other := user.pop(name, value)) != value:
            raise ValueError(
                f"{source.format(name, value)} in a model of transformers, got {shown(other)}"
            )
    check_keywords(user, DEFAULTS)
    values = DEFAULTS | user
    if user.get("compress_block_sliding_stride") is None:  # d is l by default
        values["compress_block_sliding_stride"] = values["compress_block_size"]
    check_choice("importance", values["importance"], IMPORTANCE_RULES)
    sizes: dict[str, Any] = dict(dim=1, dim_head=1, heads=1)  # any: the model decides them
    layer = NSAConfig(**sizes, branches=("selected",), causal=True, rank_rotated=True, **values)
    return {name: getattr(layer, name) for name in values}


def layer_types(config: Any) -> list[str]:
    """The kind of each layer; of one layer where all are alike."""
    kinds: list[str] | None = getattr(config, "layer_types", None)
    if kinds is None:
        window = getattr(config, "sliding_window", None)
        kinds = ["full_attention" if window is None else "sliding_attention"]
    return kinds


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
    return DEFAULTS | (getattr(config, KEY, None) or {})


def check_widths(argument: str, config: NSAConfig, widths: Mapping[str, Any]) -> None:
    """Check the settings of an `NSAConfig` that the model decides: equal, or left at a default."""
    defaults = {field.name: field.default for field in fields(NSAConfig)}
    for name, value in widths.items():
        user = getattr(config, name)
        if user not in (value, defaults[name]):
            raise ValueError(
                f"{argument} must have {name}={value!r}, as the model has, got {user!r}"
            )


@contextmanager
def without_notes() -> Iterator[None]:
    """Keep notes and progress bars of transformers from the terminal."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
