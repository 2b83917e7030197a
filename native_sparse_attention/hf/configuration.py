"""Settings of sparse attention in models of transformers: the dicts of `NSAConfig` settings that
`model.config` keeps, and the configuration of a decoder whose layers are `SparseAttention`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from transformers import PreTrainedConfig

from ..checks import (
    IMPORTANCE_RULES,
    TOO_LARGE,
    check_bool,
    check_choice,
    check_factor,
    check_int,
    check_keywords,
    check_layers,
    check_number,
    check_ranks,
    check_share_ranking,
    describe,
    refusal,
)
from ..config import GIVEN, LOCAL, AttentionConfig, NSAConfig
from ..presets import PRESETS, RECOMMENDED, completed, preset
from ..ranking import WEIGHTS

# the name of the attention implementation
NAME = "nsa"
# the key of `model.config`, and within it the implementation that the sparse one replaces
KEY, REPLACED = "nsa_config", "replaced_implementation"
# the key of a converted model's settings, and the quantizer that gives it its layers as it loads
CONVERTED_KEY, LOADER = "nsa_converted", "native_sparse_attention.hf"
# sizes of a layer that no model has
NO_SIZES: dict[str, Any] = dict(dim=1, dim_head=1, heads=1)
USUAL = {f.name: f.default for f in fields(NSAConfig)}

FIXED: dict[str, Any] = dict(
    branches=("selected",), causal=True, rank_rotated=True, scale=None, soft_cap=None,
    attention_sinks=False, recompute=False, block_sizes=None,
)  # fmt: skip


# of the drop-in: one softmax over initial, local and ranked blocks, whose largest token is the
# score of a block; in 16 bits, since those of 8 depend on where a model's positions begin
DEFAULTS = {
    name: value
    for name, value in (USUAL | preset(RECOMMENDED) | dict(ranking_bits=16)).items()
    if name in {*AttentionConfig.__annotations__, "backend"} - {*FIXED, "sliding_window_size"}
}


def layer_config(
    user: Any,
    settings: Mapping[str, Any],
    defaults: Mapping[str, Any],
    fixed: Mapping[str, Any],
    argument: str = "config",
) -> NSAConfig:
    """The settings of a layer: those of `user`, replaced by `settings`, or `defaults`. What the
    model decides (`fixed`) a dict may repeat, and an `NSAConfig`, but for branches, leave out."""
    if not isinstance(user, (NSAConfig, Mapping, type(None))):
        raise refusal(argument, "an NSAConfig, a dict of settings or None", user)
    if isinstance(user, NSAConfig):
        values, needed = user.values_of(*defaults, *fixed), {*defaults, "branches"}
        values = {n: v for n, v in values.items() if n in needed or v != USUAL.get(n)}
        user = completed(values, settings)
    values = {**(user or {}), **settings}
    for name, value in fixed.items():
        got = values.pop(name, value)
        got = tuple(got) if isinstance(got, list) else got  # of branches in a file
        if getattr(got, "ndim", 0) or got != value:  # arrays compare by their elements
            raise refusal(name, f"{value!r}, which the model decides", got)
    check_keywords(values, defaults)
    if "compress_block_size" in values:
        values.setdefault("compress_block_sliding_stride", None)
    return NSAConfig(**NO_SIZES | completed(defaults, {**values, **fixed}))


def drop_in_config(config: Any) -> AttentionConfig:
    """The settings of layers under "nsa" that a model's configuration keeps, or defaults."""
    saved = getattr(config, KEY, None) or {}
    settings = {name: saved.get(name, value) for name, value in DEFAULTS.items()}
    del settings["backend"]  # which the functions of branches do not know
    return AttentionConfig.unchecked(**settings, branches=("selected",), causal=True)


def drop_in_settings(
    config: Any, user: Any, settings: Mapping[str, Any], argument: str = "config"
) -> dict[str, Any]:
    """What a model's configuration keeps of layers under "nsa", checked: the settings of `user`, an
    `NSAConfig` or a dict, replaced by `settings`."""
    if isinstance(user, Mapping):
        settings, user = {**user, **settings}, None
        settings.pop(REPLACED, None)  # of another model's configuration
    settings = dict(settings)
    shared = settings.pop("share_ranking", None)
    if isinstance(user, NSAConfig):
        for name in ("dim", "dim_head", "heads", "kv_heads"):
            size = getattr(config, NAMES[name], None)
            if size is not None and getattr(user, name) != size:
                raise refusal(name, f"{size}, which the model decides", getattr(user, name))
    layer = layer_config(user, settings, DEFAULTS, FIXED, argument)
    check_choice("importance", layer.importance, IMPORTANCE_RULES)
    if shared is not None:
        depth = config.num_hidden_layers
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * depth
        full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
        check_share_ranking(shared, full, depth)
        shared = sorted({int(i) % depth for i in shared})
    return layer.values_of(*DEFAULTS) | dict(share_ranking=shared)


# settings of a layer by their names in the configuration, and those that it has not: tile sizes
# belong to a machine
NAMES = dict(
    dim="hidden_size", dim_head="head_dim", heads="num_attention_heads",
    kv_heads="num_key_value_heads", qkv_bias="qkv_bias", out_bias="out_bias", qk_norm="qk_norm",
    qk_norm_eps="rms_norm_eps",
)  # fmt: skip
DECIDED: dict[str, Any] = dict(causal=True, norm=False, block_sizes=None)
SETTINGS = {name: value for name, value in USUAL.items() if name not in NAMES | DECIDED}
# those that a layer of dense attention has too
DENSE_SETTINGS = (
    "compress_block_size", "compress_block_sliding_stride", "selection_block_size", "scale",
    "soft_cap", "attention_sinks", "recompute", "backend",
)  # fmt: skip
# what configurations of other decoders name, and what this one is
ABSENT: dict[str, Any] = dict(
    attention_dropout=0.0, attention_bias=False, mlp_bias=False, hidden_act="silu",
    sliding_window=None, rope_scaling=None, rope_parameters=None, layer_types=None,
)  # fmt: skip


class NSAModelConfig(PreTrainedConfig):
    """The sizes of an `NSAModel`, and the settings of its attention.

    Args:
        vocab_size, num_hidden_layers: tokens of the vocabulary; layers.
        hidden_size, intermediate_size: widths of the residual stream and of the SwiGLU.
        num_attention_heads, num_key_value_heads: H and K, query heads and KV heads; K = H if None.
        head_dim: D; `hidden_size / num_attention_heads` by default.
        max_position_embeddings: tokens of the longest sequences: the sizes of presets depend on it.
        rms_norm_eps: epsilon of all norms.
        rope_theta: rotary frequencies are `rope_theta^(-2 i / D)`.
        qkv_bias, out_bias, qk_norm: as in `SparseAttention`.
        dense_layers: indices of layers of dense attention; -1 is the last.
        local_layers, share_ranking: as in `Transformer`.
        nsa: the other settings of `NSAConfig`: a dict; a dict with the name of a preset as
            "preset", its "length" perhaps, and what replaces its settings; that name alone
            ("one-softmax" by default); or an `NSAConfig`. It is kept as a dict of all settings.
        ranking_queries: with importance="index", queries of a training step from which each layer's
            ranking learns; None for no such loss.
        ranking_weights: what a block is worth to them, "output" or "mass".
        initializer_range: standard deviation of initial embeddings and projections.
        tie_word_embeddings: whether the head has the weights of the embedding.
        options: those of `PreTrainedConfig`.
    """

    model_type = "nsa"
    # what the MLP of a Llama reads
    hidden_act, mlp_bias = "silu", False
    # `distributed.parallelize` splits the heads of layers
    base_model_tp_plan = {  # noqa: RUF012
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    vocab_size: int = 32000
    hidden_size: int = 1024
    intermediate_size: int = 2816
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    dense_layers: Sequence[int] = ()
    local_layers: Sequence[int] = ()
    share_ranking: Sequence[int] | None = None
    nsa: Any = None
    ranking_queries: int | None = None
    ranking_weights: str = "output"
    initializer_range: float = 0.02
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **options: Any) -> None:
        if inner := sorted(options.keys() & SETTINGS.keys()):
            raise refusal(inner[0], "a setting in nsa", options[inner[0]])
        self.check()
        for name, value in ABSENT.items():
            if (got := options.get(name)) not in (None, value):
                raise refusal(name, f"{value!r}, as in this model", got)
        super().__post_init__(**options)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As `PreTrainedConfig.from_dict`, but keyword arguments are checked like others. A dict as
        `nsa` without a preset replaces single settings."""
        names = NSAModelConfig.__annotations__.keys() & kwargs.keys()
        user = {name: kwargs.pop(name) for name in names}
        nsa, saved = user.get("nsa"), config_dict.get("nsa") or RECOMMENDED
        if isinstance(nsa, Mapping) and "preset" not in nsa:
            user["nsa"] = completed(dict(preset=saved) if isinstance(saved, str) else saved, nsa)
        return super().from_dict({**config_dict, **user}, **kwargs)

    def check(self) -> None:
        """Check all arguments, and complete them: attributes may be set later."""
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        for name in (
            "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size",
            "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
        ):  # fmt: skip
            setattr(self, name, check_int(name, getattr(self, name), 1))
        if self.num_attention_heads % self.num_key_value_heads:
            expected = f"a multiple of num_key_value_heads={self.num_key_value_heads}"
            raise refusal("num_attention_heads", expected, self.num_attention_heads)
        if self.head_dim is None:
            self.head_dim, remainder = divmod(self.hidden_size, self.num_attention_heads)
            if remainder:
                size = f"hidden_size={self.hidden_size}"
                raise refusal("head_dim", f"given where num_attention_heads does not divide {size}")
        self.head_dim = check_int("head_dim", self.head_dim, 1)
        if self.head_dim % 2:
            raise refusal("head_dim", "even for rotary embedding", self.head_dim)
        for name in ("rms_norm_eps", "rope_theta"):
            setattr(self, name, check_factor(name, getattr(self, name)))
        deviation = check_number("initializer_range", self.initializer_range, "in [0, 1]", 0.0, 1.0)
        self.initializer_range = deviation
        if self.pad_token_id is not None:
            self.pad_token_id = check_int("pad_token_id", self.pad_token_id, 0, self.vocab_size)
        if self.bos_token_id is not None:
            self.bos_token_id = check_int("bos_token_id", self.bos_token_id, 0)
        if isinstance(self.eos_token_id, (list, tuple)):
            self.eos_token_id = [check_int("eos_token_id", i, 0) for i in self.eos_token_id]
        elif self.eos_token_id is not None:
            self.eos_token_id = check_int("eos_token_id", self.eos_token_id, 0)
        for name in ("qkv_bias", "out_bias", "qk_norm", "tie_word_embeddings", "use_cache"):
            setattr(self, name, check_bool(name, getattr(self, name)))
        for name in ("dense_layers", "local_layers"):
            setattr(self, name, check_layers(name, getattr(self, name), self.num_hidden_layers))
        if both := sorted({*self.dense_layers} & {*self.local_layers}):
            raise ValueError(f"local_layers must not be dense_layers too, got {both} in both")
        if self.share_ranking is not None:
            indices = check_layers("share_ranking", self.share_ranking, self.num_hidden_layers)
            self.share_ranking = indices
        self.check_ranking_layers()
        layer = check_ranks(self.read_settings(self.nsa))
        self.nsa = layer.values_of(*SETTINGS)
        if self.ranking_queries is not None:
            self.ranking_queries = check_int("ranking_queries", self.ranking_queries, 1)
            if not layer.is_indexed:
                got = f"{self.ranking_queries} with importance={layer.importance!r}"
                raise ValueError(f"ranking_queries goes with importance='index' in nsa, got {got}")
        check_choice("ranking_weights", self.ranking_weights, WEIGHTS)

    @property
    def widths(self) -> dict[str, Any]:
        """The settings of an `NSAConfig` that the other arguments decide."""
        return DECIDED | {name: getattr(self, attribute) for name, attribute in NAMES.items()}

    def check_ranking_layers(self) -> dict[int, int]:
        """For each layer that shares its block indices, the layer that ranks."""
        others = {*self.dense_layers, *self.local_layers}
        selecting = [i for i in range(self.num_hidden_layers) if i not in others]
        return check_share_ranking(self.share_ranking, selecting, self.num_hidden_layers)

    def layer_config_of(self, index: int) -> NSAConfig:
        """The settings of a layer; a dense one is one softmax without a limit and a ranking."""
        nsa = dict(self.nsa)
        if index in self.local_layers:
            nsa |= LOCAL
        elif index in self.dense_layers:
            nsa = {name: nsa[name] for name in DENSE_SETTINGS} | dict(branches=["selected"])
            nsa |= dict(num_selected_blocks=0, dense_length=TOO_LARGE - 1)
        elif self.check_ranking_layers().get(index, index) != index:
            nsa |= GIVEN
        return NSAConfig(**self.widths, **nsa)

    def read_settings(self, nsa: Any) -> NSAConfig:
        """The settings of a layer that the argument `nsa` names, with those of its preset."""
        nsa = RECOMMENDED if nsa is None else nsa
        nsa = dict(preset=nsa) if isinstance(nsa, str) else nsa
        if isinstance(nsa, Mapping):
            nsa = dict(nsa)
            form, length = nsa.pop("preset", None), nsa.pop("length", None)
            if form is None and length is not None:
                raise ValueError(f"length in nsa goes with a preset, got {describe(length)} alone")
            if form is not None:
                check_choice("preset in nsa", form, PRESETS)
                nsa = preset(form, self.max_position_embeddings if length is None else length, nsa)
        return layer_config(nsa, {}, SETTINGS, self.widths, "nsa")
