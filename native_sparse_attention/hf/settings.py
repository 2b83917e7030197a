"""Settings of sparse attention in models of transformers: an `NSAConfig`, and the dict of its
settings that `model.config` keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from transformers.utils import logging

from ..checks.keywords import check_keywords
from ..checks.scalars import TOO_LARGE, shown
from ..config import NSAConfig

# the name of the attention implementation
NAME = "nsa"
# the key of `model.config`, and within it the implementation that the sparse one replaces
KEY, REPLACED = "nsa_config", "replaced_implementation"
# the key of a converted model's settings
CONVERTED_KEY = "nsa_converted"
# the greatest `dense_length`
ANY_LENGTH = TOO_LARGE - 1
# sizes of a layer that no model has
NO_SIZES: dict[str, Any] = dict(dim=1, dim_head=1, heads=1)

# of the drop-in: one softmax over initial, local and ranked blocks, whose largest token is the
# score of a block
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
FIXED: dict[str, Any] = dict(
    branches=("selected",), causal=True, rank_rotated=True, scale=None, soft_cap=None,
    attention_sinks=False, recompute=False, block_sizes=None,
)  # fmt: skip


def free_settings(decided: Iterable[str]) -> dict[str, Any]:
    """The settings of an `NSAConfig` by name, with their defaults, but for those `decided`."""
    return {f.name: f.default for f in fields(NSAConfig) if f.name not in {*NO_SIZES, *decided}}


def layer_config(
    user: Any,
    settings: Mapping[str, Any],
    defaults: Mapping[str, Any],
    fixed: Mapping[str, Any],
    argument: str = "config",
) -> NSAConfig:
    """The settings of a layer.

    Args:
        user: an `NSAConfig`, a dict of its settings or None.
        settings: single settings, which replace those of `user`.
        defaults: of the settings that are free. The stride of windows is their size where only
            that is named.
        fixed: what the model decides. A dict may repeat it; an `NSAConfig` may have it or, but for
            branches, a default instead.

    Raises:
        ValueError: another kind of argument; a setting that is unknown, out of range or decided by
            the model; two incompatible ones.
    """
    if not isinstance(user, (NSAConfig, Mapping, type(None))):
        raise ValueError(
            f"{argument} must be an NSAConfig, a dict of settings or None, got {shown(user)}"
        )
    usual = {f.name: f.default for f in fields(NSAConfig)}
    if isinstance(user, NSAConfig):
        values = {n: getattr(user, n) for n in usual if n in defaults or n in fixed}
        for name in fixed.keys() - {"branches"}:
            if values[name] == usual[name]:
                del values[name]
    else:
        values = dict(user or {})
    values |= settings
    for name, value in fixed.items():
        if (got := values.pop(name, value)) != value:
            raise ValueError(f"{name} must be {value!r}, which the model decides, got {shown(got)}")
    check_keywords(values, defaults)
    if "compress_block_size" in values:
        values.setdefault("compress_block_sliding_stride", None)
    return NSAConfig(**NO_SIZES | {**defaults, **values, **fixed})


def kept_settings(config: NSAConfig, names: Iterable[str]) -> dict[str, Any]:
    """Settings of a layer as values of JSON, by which `layer_config` makes it again."""
    values = {name: getattr(config, name) for name in names}
    return {n: [*value] if n == "branches" else value for n, value in values.items()}


def drop_in_settings(config: Any) -> dict[str, Any]:
    """The settings of layers under "nsa" that a model's configuration keeps, or defaults."""
    saved = getattr(config, KEY, None) or {}
    return {name: saved.get(name, value) for name, value in DEFAULTS.items()}


@contextmanager
def quiet() -> Iterator[None]:
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
