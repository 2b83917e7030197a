"""The settings of Native Sparse Attention, each defined and checked once."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch

from .block_sizes import NAMES, BlockSizes
from .blocks import GROUP
from .checks import (
    BACKENDS,
    BRANCH_KV,
    BRANCHES,
    IMPORTANCE_RULES,
    TOO_LARGE,
    TOO_MANY_BLOCKS,
    check_bool,
    check_branches,
    check_choice,
    check_factor,
    check_groups,
    check_int,
    check_number,
    check_positive,
    check_scale,
    check_type,
    refusal,
)
from .presets import BY_KEYS, NEEDED, RECOMMENDED, WITHOUT_COMPRESSED, preset

# settings that the contents of a cache depend on; RANKED_GEOMETRY if it holds shared rankings, or
# packed keys of blocks
GEOMETRY = (
    "kv_heads", "dim_head", "compress_block_size", "compress_block_sliding_stride", "branch_kv",
    "selection_stride", "branches", "rank_rotated", "importance", "index_dim", "index_heads",
)  # fmt: skip
RANKED_GEOMETRY = (
    *GEOMETRY, "num_selected_blocks", "num_selected_groups", "query_heads_share_selected_kv",
    "selection_block_size", "num_initial_blocks", "num_local_blocks", "ranking_bits",
    "interpolated_importance_score",
)  # fmt: skip

# what a layer has in place of a ranking that takes the block indices of another
GIVEN: dict[str, Any] = dict(
    importance="given", use_diff_topk=False, interpolated_importance_score=False,
    num_selected_groups=0, ranking_bits=16,
)  # fmt: skip

# what a layer that ranks no blocks has in place of a ranking
LOCAL: dict[str, Any] = dict(num_selected_blocks=0, use_diff_topk=False, dense_length=0)

# of layers, and of those that rank by an index
LAYER_NEEDED: dict[str, dict[str, tuple[Any, ...]]] = {
    "rank_rotated": dict(branches=WITHOUT_COMPRESSED),
    "num_selected_groups": dict(rank_rotated=(True,), importance=BY_KEYS),
}
INDEX_NEEDED: dict[str, dict[str, tuple[Any, ...]]] = {
    "importance": dict(
        branches=WITHOUT_COMPRESSED, use_diff_topk=(False,), ranking_bits=(16,),
        query_heads_share_selected_kv=(True,),
    ),
}  # fmt: skip

# by "index", a block's score from those of its windows: the rule of that name
INDEX_RULES = {"max": "max", "mean": "logits"}


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """The settings of the three branches. `NSAConfig` describes them."""

    compress_block_size: int = 32
    compress_block_sliding_stride: int = 16
    selection_block_size: int = 64
    num_selected_blocks: int = 16
    sliding_window_size: int = 512
    importance: str = "logits"
    interpolated_importance_score: bool = False
    num_initial_blocks: int = 0
    num_local_blocks: int = 1
    selection_stride: int = 1
    num_selected_groups: int = 0
    ranking_bits: int = 16
    query_heads_share_selected_kv: bool = True
    branches: tuple[str, ...] = BRANCHES
    dense_length: int = 0
    use_diff_topk: bool = False
    causal: bool = False
    scale: float | None = None
    soft_cap: float | None = None
    recompute: bool = False
    block_sizes: BlockSizes | None = None

    def __post_init__(self) -> None:
        self.check()

    @property
    def key(self) -> str:
        """These settings as a string, by which torch operators take them. In a graph only an
        operator forms it, since it fixes symbolic sizes."""
        key: str | None = self.__dict__.get("_key")
        if key is None:
            key = key_of(self) if torch.compiler.is_compiling() else self.but().key
        return key

    def keep(self, **values: Any) -> None:
        """Replace the given values by checked values."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def keep_checked(self, check: Callable[..., Any], *names: str, **limits: int) -> None:
        for name in names:
            object.__setattr__(self, name, check(name, getattr(self, name), **limits))

    def values_of(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    def check(self) -> None:
        """Check the settings, and keep plain values: any integral type becomes `int`."""
        sizes = (
            "compress_block_sliding_stride", "compress_block_size", "selection_block_size",
            "selection_stride",
        )  # fmt: skip
        flags = [name for name, default in DEFAULTS.items() if isinstance(default, bool)]
        self.keep_checked(check_int, *sizes, minimum=1)
        self.keep_checked(check_int, "sliding_window_size", "dense_length", minimum=0)
        self.keep_checked(check_int, "ranking_bits", minimum=1)
        numbers = "num_selected_blocks", "num_selected_groups"
        self.keep_checked(check_int, *numbers, minimum=0, limit=TOO_MANY_BLOCKS)
        self.keep_checked(check_bool, *flags)
        self.keep_checked(check_positive, "soft_cap")
        self.keep(branches=check_branches(self.branches), scale=check_scale(self.scale))
        check_type("block_sizes", self.block_sizes, BlockSizes, "a BlockSizes", or_none=True)
        check_choice("importance", self.importance, (*IMPORTANCE_RULES, "given"))
        d, l, s, stride = (getattr(self, name) for name in sizes)
        # token positions must fit into 32 bits
        limit = TOO_LARGE // s + 1
        self.keep_checked(
            check_int, "num_initial_blocks", "num_local_blocks", minimum=0, limit=limit
        )
        if l < d:  # tokens between windows
            expected = f"at least compress_block_sliding_stride={d}"
            raise refusal("compress_block_size", expected, l)
        if s % d and d % s:
            names = "selection_block_size and compress_block_sliding_stride"
            raise ValueError(f"{names} must divide one another, got {s} and {d}")
        if s % stride:  # tokens that share a ranking share their own block
            raise ValueError(f"selection_stride must divide selection_block_size={s}, got {stride}")
        if self.ranking_bits not in (4, 8, 16):
            raise refusal("ranking_bits", "4, 8 or 16", self.ranking_bits)
        if self.ranking_bits == 4 and s < 16 * d:
            raise refusal("selection_block_size", f"at least {16 * d} with ranking_bits=4", s)
        self.check_needed(NEEDED)
        local = self.num_local_blocks
        if self.num_selected_groups and (local % GROUP or not local):  # groups are complete
            expected = f"a positive multiple of {GROUP} with num_selected_groups"
            raise refusal("num_local_blocks", expected, local)
        size = self.leader_stride
        if self.num_selected_groups and size % d and d % size:
            expected = f"a divisor or a multiple of the {size} tokens of a group of blocks"
            raise refusal("compress_block_sliding_stride", expected, d)
        if self.dense_length % self.leader_stride:
            expected = f"a multiple of the {self.leader_stride} tokens that share a ranking"
            raise refusal("dense_length", expected, self.dense_length)

    def check_needed(self, needed: dict[str, dict[str, tuple[Any, ...]]]) -> None:
        """Check that others have the values that a setting goes with, if it is not the default."""
        for setting, others in needed.items():
            value = getattr(self, setting)
            for name, values in others.items() if value != getattr(type(self), setting) else ():
                if (got := getattr(self, name)) not in values:
                    expected = f"={' or '.join(map(repr, values))}"
                    expected = " without 'compressed'" if values is WITHOUT_COMPRESSED else expected
                    raise ValueError(f"{setting}={value!r} goes with {name}{expected}, got {got!r}")

    @property
    def leader_stride(self) -> int:
        """Tokens from a leader, which ranks for those after it, to the next: those of a selection
        stride, or in two stages those of a group of blocks, which keep the same groups."""
        is_staged = self.num_selected_groups > 0
        return GROUP * self.selection_block_size if is_staged else self.selection_stride

    @property
    def leader_slots(self) -> int:
        """What a leader ranks for others: blocks, or in two stages groups of blocks."""
        return self.num_selected_groups or self.num_selected_blocks

    @property
    def stages(self) -> tuple[AttentionConfig, AttentionConfig]:
        """Of a ranking in two stages the ranking of groups by their windows, and that of their
        blocks by tokens."""
        groups = self.but(
            num_selected_groups=0, num_selected_blocks=self.num_selected_groups,
            selection_block_size=GROUP * self.selection_block_size,
            selection_stride=self.leader_stride,
            num_initial_blocks=self.num_initial_blocks // GROUP,
            num_local_blocks=self.num_local_blocks // GROUP,
        )  # fmt: skip
        tokens = self.but(
            num_selected_groups=0, importance="head_max" if self.ranks_by_heads else "max",
            compress_block_size=1, compress_block_sliding_stride=1,
        )  # fmt: skip
        return groups, tokens

    @property
    def d(self) -> int:
        """`compress_block_sliding_stride`."""
        return self.compress_block_sliding_stride

    @property
    def ranks(self) -> bool:
        """Whether there are blocks to rank."""
        is_ranked = self.num_selected_blocks > 0 and self.importance != "given"
        return is_ranked and "selected" in self.branches

    @property
    def takes_blocks(self) -> bool:
        """Whether calls are given the blocks of the selected branch."""
        return self.importance == "given" and "selected" in self.branches

    @property
    def ranks_by_heads(self) -> bool:
        """Whether each query head has scores of its own, of which the largest count."""
        return self.importance == "head_max"

    @property
    def ranks_by_largest(self) -> bool:
        """Whether a block's score is that of its largest window."""
        return self.importance in ("max", "head_max")

    @property
    def ranks_by_integers(self) -> bool:
        """Whether queries and keys are integers in the ranking."""
        return self.ranking_bits < 16

    @property
    def compresses(self) -> bool:
        """Whether there are compressed keys: a branch of their own, or only for the ranking."""
        return "compressed" in self.branches or self.ranks

    @property
    def dense_limit(self) -> int:
        """Queries of sequences of up to so many tokens attend to all that they may see."""
        s, n = self.selection_block_size, self.num_initial_blocks + self.num_selected_blocks
        n += self.num_local_blocks if self.causal else 0
        # blocks whose windows end later are no candidates; gradients of scores need the ranking
        has_candidates = self.d <= s and (self.num_local_blocks > 0 or not self.causal)
        is_covered = has_candidates and not self.use_diff_topk and self.importance != "given"
        covered = s * n // self.leader_stride * self.leader_stride
        return max(self.dense_length, covered if is_covered else 0)

    def but(self, **values: Any) -> AttentionConfig:
        """These settings of the branches with other values, not checked again."""
        return AttentionConfig.unchecked(**self.values_of(*DEFAULTS) | values)

    def scale_of(self, width: int) -> float:
        """The scale of logits for this head dimension."""
        return width**-0.5 if self.scale is None else self.scale

    @classmethod
    def unchecked(cls, **values: Any) -> AttentionConfig:
        """Settings from checked values, and defaults for the others."""
        values = DEFAULTS | values
        if not torch.compiler.is_compiling():
            return config_of_values(*values.values())
        config = object.__new__(AttentionConfig)
        config.keep(**values, _key=None)
        return config


# one of these, and the recommended settings are not used
SIZES = (
    "compress_block_size", "selection_block_size", "sliding_window_size", "num_selected_blocks",
)  # fmt: skip
DEFAULTS = {field.name: field.default for field in fields(AttentionConfig)}


@functools.lru_cache(maxsize=4096)
def config_of_values(*values: Any) -> AttentionConfig:
    """The settings of the values of `DEFAULTS`, with their key: to form one takes 15 us or more."""
    config = object.__new__(AttentionConfig)
    config.keep(**dict(zip(DEFAULTS, values, strict=True)))
    config.keep(_key=key_of(config))
    return config


def key_of(config: AttentionConfig) -> str:
    """The settings of the branches as a string, which `config_of_key` reads: those of `DEFAULTS`,
    and then block sizes. Of constants only, so that torch.compile can trace it."""
    values = config.values_of(*DEFAULTS)
    values["branches"] = " ".join(values["branches"])
    sizes = values.pop("block_sizes")
    blocks = [] if sizes is None else [getattr(sizes, name) for name in NAMES]
    return "".join([f"{constant(value)!r}," for value in [*values.values(), *blocks]])


def constant(value: Any) -> Any:
    """The value; of a symbolic integer the one that a graph is compiled for."""
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


@functools.lru_cache(maxsize=4096)
def config_of_key(key: str) -> AttentionConfig:
    """The settings of a `key`."""
    constants = ast.literal_eval(f"({key})")
    values = dict(zip(DEFAULTS, constants, strict=False))
    sizes = constants[len(DEFAULTS) - 1 :]  # `block_sizes` is the last setting
    values["block_sizes"] = BlockSizes(*sizes) if sizes else None
    values["branches"] = tuple(values["branches"].split())
    return AttentionConfig.unchecked(**values)


def recommend(config_class: Any) -> Any:
    """The class, whose instances have the recommended settings where no size is given."""
    initialize = config_class.__init__

    @functools.wraps(initialize)
    def complete(self: Any, **settings: Any) -> None:
        if settings.keys().isdisjoint(SIZES):
            settings = preset(RECOMMENDED, None, dict(causal=True) | settings)
        initialize(self, **settings)

    config_class.__init__ = complete
    return config_class


@recommend
@dataclass(frozen=True, kw_only=True)
class NSAConfig(AttentionConfig):
    """Every setting of `SparseAttention` except its networks.

    With sizes, `SparseAttention.from_config(NSAConfig(...))` makes the same layer as
    `SparseAttention(...)` does. Without any size of a window or a block, and without a number of
    blocks, the settings are those of the recommended preset, "one-softmax" for long sequences,
    causal. `layer.config` returns the settings as plain values.

    Args:
        dim, dim_head, heads: width of the input and output; D, head dimension; H, query heads.
        kv_heads: K, key and value heads; `heads` by default.
        compress_block_size: l, tokens of a window.
        compress_block_sliding_stride: d, tokens from window to window; l by default. s and d divide
            one another, and l >= d.
        selection_block_size: s, tokens of a block.
        num_selected_blocks: n, ranked blocks of a query; 0 leaves the forced blocks.
        sliding_window_size: w; the window branch attends to keys `i - w .. i`.
        importance: the score of a block: "logits" (mean logit of its windows), "max" (largest
            logit of the mean query of a group), "head_max" (largest logit of any of its heads),
            "probs" (the paper's softmax mass), or "index": by index queries and keys, which learn
            from the loss of `ranking_queries` (not with "compressed"). "given": nothing is ranked,
            calls are given `block_indices`.
        interpolated_importance_score: interpolate window scores to tokens before ranking blocks.
        num_initial_blocks: first blocks that every query attends to, not ranked.
        num_local_blocks: blocks ending with the query's own that it attends to, not ranked
            (causal).
        selection_stride: R; R neighbouring tokens share the ranking of the first of them. R divides
            s.
        num_selected_groups: n1, ranks in two stages: groups of 4 blocks first, and then the blocks
            of the n1 best groups (`select_blocks`). `dense_length` is a multiple of a group. 0 for
            one stage.
        ranking_bits: 16, or 8: queries and keys are rounded to 8-bit integers for the ranking alone
            (importance="max" or "head_max", causal, without "compressed" and num_selected_groups);
            4: keys also take one of 16 values for each feature of a block, so that a cache can keep
            them packed (blocks of 16 windows or more).
        query_heads_share_selected_kv: False lets every query head select for itself.
        branches: some of "compressed", "selected" and "window". One alone has no gate.
            `("selected",)` is one softmax over the initial, local and ranked blocks; its compressed
            keys only rank. Settings of branches left out have no effect.
        dense_length: queries at positions below it attend to all keys, with `("selected",)`; not
            causal: sequences of at most this length.
        index_dim: width of index queries, one for each KV head, and of index keys; `dim_head` by
            default. With `rank_rotated` an even part of what is rotated, or at least that.
        index_heads: heads of index keys: 1, or `kv_heads`.
        index_pool: "max" or "mean", of a block's windows of index keys.
        rank_rotated: rank by keys and queries with rotary embedding (not with "compressed").
        use_diff_topk: let gradients reach the selection scores (straight-through gates).
        causal: whether a query sees no later tokens.
        scale: multiplies the dot products; `dim_head ** -0.5` by default. Above 0 with "index".
        soft_cap: c, logits x of all branches become `c tanh(x / c)`.
        num_compressed_mem_kv: m, learned memory slots of the compressed branch.
        norm: RMSNorm of the input.
        qkv_bias, out_bias: biases of the projections of the input and of the output.
        qk_norm: RMSNorm of every head of queries and keys, with learned weights [D], before the
            rotary embedding.
        qk_norm_eps: its epsilon, at least 1e-20.
        branch_kv: "shared", or "independent" for keys and values of their own for each branch.
        attention_sinks: learn a logit of one more key of value 0 for each branch and query head.
        compress_mlp_expand_factor: hidden width of the default compression network over its input
            width.
        recompute: the backward recomputes the branch outputs instead of storing them (Triton only).
        block_sizes: tile sizes of the Triton kernels.
        backend: "auto", "triton", "flex" or "eager".
    """

    dim: int
    dim_head: int
    heads: int
    kv_heads: int = None  # type: ignore[assignment]  # an integer once checked
    compress_block_sliding_stride: int | None = None  # type: ignore[assignment]
    num_compressed_mem_kv: int = 1
    norm: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    qk_norm_eps: float = 1e-6
    branch_kv: str = "shared"
    rank_rotated: bool = False
    index_dim: int = None  # type: ignore[assignment]
    index_heads: int = 1
    index_pool: str = "max"
    attention_sinks: bool = False
    compress_mlp_expand_factor: float = 1.0
    backend: str = "auto"

    # Derived settings, not fields. They are made with the instance: graphs are compiled again where
    # an attribute is added later.
    # what functions take, which rank by the queries and keys that they are given
    for_functions: ClassVar[AttentionConfig]
    # the same of steps past `dense_length`; with block indices of the caller; dense at any length;
    # and with nothing ranked
    for_steps: ClassVar[AttentionConfig]
    for_given: ClassVar[AttentionConfig]
    dense: ClassVar[AttentionConfig]
    dense_alone: ClassVar[AttentionConfig]
    # what the contents of a cache depend on, by name
    geometry: ClassVar[dict[str, Any]]
    # packed documents passed as `documents` begin at multiples of this number
    alignment: ClassVar[int]

    @classmethod
    def preset(cls, name: str, length: int | None = None, **settings: Any) -> NSAConfig:
        """Settings by name.

        Args:
            name: "published", the three branches of the published package; "paper", those of the
                paper: ranking by softmax mass, keys and values for each branch, an initial and two
                local blocks; "short-windows", three branches that compress windows of 8 tokens, 4
                apart; or "one-softmax", one softmax over initial, local and ranked blocks, ranked
                by the largest logit that any head gives one of their tokens, in 8 bits, and dense
                up to 8192 tokens (`ranking_bits` and `dense_length`, if settings allow them).
                docs/training.md says which to choose.
            length: tokens of the longest sequences; long by default. The sizes of three branches
                grow after 1024 and 4096 tokens, those of one softmax after 16384 alone.
            settings: other settings, dim, dim_head and heads among them, and those that replace
                settings of the preset. `causal` is False by default.
        """
        return cls(**preset(name, length, dict(causal=False) | settings))

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = INDEX_RULES[self.index_pool] if self.is_indexed else self.importance
        is_ranked = self.leader_stride > 1 or self.ranking_bits == 4
        dense_rule = "logits" if rule == "given" else rule
        grouped = GROUP if self.num_selected_groups else 1
        dense = self.but(importance=dense_rule, dense_length=sys.maxsize)
        self.keep(
            geometry=self.values_of(*(RANKED_GEOMETRY if is_ranked else GEOMETRY)),
            alignment=max(self.d, self.selection_block_size * grouped),
            for_functions=self.but(importance=rule),
            for_steps=self.but(importance=rule, dense_length=0),
            for_given=self.but(importance="given"),
            dense=dense,
            dense_alone=dense.but(num_selected_blocks=0),
        )

    def check(self) -> None:
        if self.compress_block_sliding_stride is None:
            size = check_int("compress_block_size", self.compress_block_size, 1)
            self.keep(compress_block_sliding_stride=size)
        if self.kv_heads is None:
            self.keep(kv_heads=self.heads)
        if self.index_dim is None:
            self.keep(index_dim=self.dim_head)
        check_choice("importance", self.importance, (*IMPORTANCE_RULES, "index", "given"))
        check_choice("index_pool", self.index_pool, INDEX_RULES)
        check_choice("branch_kv", self.branch_kv, BRANCH_KV)
        check_choice("backend", self.backend, BACKENDS)
        importance = self.importance
        if self.is_indexed:
            self.keep(importance=INDEX_RULES[self.index_pool])
            check_positive("scale", self.scale)  # the loss teaches the largest scores
        super().check()
        self.keep(importance=importance)
        sizes = "dim", "dim_head", "heads", "kv_heads", "index_heads", "index_dim"
        self.keep_checked(check_int, *sizes, minimum=1)
        self.keep_checked(check_int, "num_compressed_mem_kv", minimum=0)
        self.keep_checked(check_factor, "compress_mlp_expand_factor")
        eps = check_number("qk_norm_eps", self.qk_norm_eps, "a number of at least 1e-20", 1e-20)
        self.keep(qk_norm_eps=eps)  # float32 holds eps^(-3/2), of gradients of zeros
        flags = "norm", "attention_sinks", "rank_rotated", "qkv_bias", "out_bias", "qk_norm"
        self.keep_checked(check_bool, *flags)
        check_groups(self.heads, self.kv_heads)
        if self.index_heads not in (1, self.kv_heads):
            raise refusal("index_heads", f"1 or kv_heads={self.kv_heads}", self.index_heads)
        self.check_needed(LAYER_NEEDED)
        if self.is_indexed:
            self.check_needed(INDEX_NEEDED)

    @property
    def is_indexed(self) -> bool:
        """Whether index queries and keys rank blocks."""
        return self.importance == "index"


# settings that decide which weights a layer has
WEIGHT_SETTINGS = (
    "dim", "dim_head", "heads", "kv_heads", "branches", "branch_kv", "attention_sinks",
    "num_compressed_mem_kv", "compress_mlp_expand_factor", "is_indexed", "index_dim",
    "index_heads", "qkv_bias", "out_bias", "qk_norm", "qk_norm_eps",
)  # fmt: skip


# names by which a layer shows its settings; its `norm` is a module
SETTINGS = frozenset(field.name for field in fields(NSAConfig)) - {"norm"}


def changed(layer: Any, name: str, value: Any) -> NSAConfig:
    """The settings of a layer with another value of one."""
    config = replace(layer.config, **{name: value})
    fixed = [*WEIGHT_SETTINGS]
    if layer.k_intrablock_positions is not None:  # one for each token of a window
        fixed.append("compress_block_size")
    if layer.to_index is not None:  # index queries and keys are as wide as they rotate
        fixed.append("rank_rotated")
    if any(getattr(config, n) != getattr(layer.config, n) for n in fixed) or (
        config.compresses and layer.k_compress is None
    ):
        expected = f"{getattr(layer.config, name)!r}: the layer has no weights for another value"
        raise ValueError(f"{name} must stay {expected}, got {value!r}")
    return config
