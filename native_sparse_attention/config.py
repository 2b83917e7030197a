"""The settings of Native Sparse Attention, each defined and checked once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from .block_sizes import BlockSizes, check_block_sizes
from .checks.scalars import check_elements, check_factor
from .checks.tensors import (
    BACKENDS,
    BRANCH_KV,
    check_bools,
    check_choice,
    check_groups,
    check_int,
    check_ints,
    check_positive,
    check_scale,
    check_selection,
)

SELECTION = (
    "compress_block_size", "compress_block_sliding_stride", "selection_block_size",
    "num_selected_blocks", "importance", "interpolated_importance_score", "num_initial_blocks",
    "num_local_blocks", "selection_stride", "query_heads_share_selected_kv",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """The settings of the three branches. `NSAConfig` describes them.

    Raises:
        ValueError: a setting out of range, or two incompatible settings.
    """

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
    query_heads_share_selected_kv: bool = True
    use_diff_topk: bool = False
    causal: bool = False
    scale: float | None = None
    soft_cap: float | None = None
    recompute: bool = False
    block_sizes: BlockSizes | None = None

    def __post_init__(self) -> None:
        self.keep(**self.checked())

    def keep(self, **values: Any) -> None:
        """Replace the given values by checked values."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def checked(self) -> dict[str, Any]:
        """The settings by name as plain values: any integral type becomes `int`."""
        (w,) = check_ints(0, sliding_window_size=self.sliding_window_size)
        selection = check_selection(**{name: getattr(self, name) for name in SELECTION})
        names = ("causal", "use_diff_topk", "recompute")
        bools = check_bools(**{name: getattr(self, name) for name in names})
        check_block_sizes(self.block_sizes)
        return dict(
            **selection,
            **dict(zip(names, bools, strict=True)),
            sliding_window_size=w,
            scale=check_scale(self.scale),
            soft_cap=check_positive("soft_cap", self.soft_cap),
        )

    @property
    def d(self) -> int:
        """`compress_block_sliding_stride`."""
        return self.compress_block_sliding_stride

    def scale_of(self, width: int) -> float:
        """The scale of logits for this head dimension."""
        return width**-0.5 if self.scale is None else self.scale

    @classmethod
    def unchecked(cls, **values: Any) -> AttentionConfig:
        """Settings from checked values, and defaults for the others."""
        config = object.__new__(AttentionConfig)
        config.keep(**DEFAULTS | values)
        return config

    def with_selected(self, n: int) -> AttentionConfig:
        """These settings with n selected blocks, not checked again."""
        values = {name: getattr(self, name) for name in DEFAULTS}
        return AttentionConfig.unchecked(**values | {"num_selected_blocks": n})


DEFAULTS = {field.name: field.default for field in fields(AttentionConfig)}


@dataclass(frozen=True, kw_only=True)
class NSAConfig(AttentionConfig):
    """Every setting of `SparseAttention` except its networks. Default sizes are the paper's.

    `SparseAttention.from_config(NSAConfig(dim=512, dim_head=64, heads=8, causal=True))` makes the
    same layer as the same keyword arguments do. `layer.config` returns the settings as plain
    values.

    Args:
        dim, dim_head, heads: width of the input and output; D, head dimension; H, query heads.
        kv_heads: K, key and value heads; `heads` by default.
        compress_block_size: l, tokens of a window.
        compress_block_sliding_stride: d, tokens from window to window; l by default. s and d divide
            one another, and l >= d.
        selection_block_size: s, tokens of a block.
        num_selected_blocks: n, ranked blocks of a query; 0 leaves the forced blocks.
        sliding_window_size: w; the window branch attends to keys `i - w .. i`.
        importance: "logits" (mean logit) or "probs" (the paper's softmax mass).
        interpolated_importance_score: interpolate window scores to tokens before ranking blocks.
        num_initial_blocks: first blocks that every query attends to, not ranked.
        num_local_blocks: blocks ending with the query's own that it attends to, not ranked
            (causal).
        selection_stride: R; R neighbouring tokens share the ranking of the first of them. R divides
            s.
        query_heads_share_selected_kv: False lets every query head select for itself.
        use_diff_topk: let gradients reach the selection scores (straight-through gates).
        causal: whether a query sees no later tokens.
        scale: multiplies the dot products; `dim_head ** -0.5` by default.
        soft_cap: c, logits x of all branches become `c tanh(x / c)`.
        num_compressed_mem_kv: m, learned memory slots of the compressed branch.
        norm: RMSNorm of the input.
        branch_kv: "shared", or "independent" for keys and values of their own for each branch.
        attention_sinks: learn a logit of one more key of value 0 for each branch and query head.
        compress_mlp_expand_factor: hidden width of the default compression network over its input
            width.
        recompute: the backward recomputes the branch outputs instead of storing them (Triton only).
        block_sizes: tile sizes of the Triton kernels.
        backend: "auto", "triton", "flex" or "eager".

    Raises:
        ValueError: a setting out of range, or two incompatible settings.
    """

    dim: int
    dim_head: int
    heads: int
    kv_heads: int | None = None
    compress_block_sliding_stride: int | None = None  # type: ignore[assignment]
    num_compressed_mem_kv: int = 1
    norm: bool = True
    branch_kv: str = "shared"
    attention_sinks: bool = False
    compress_mlp_expand_factor: float = 1.0
    backend: str = "auto"

    def checked(self) -> dict[str, Any]:
        if self.compress_block_sliding_stride is None:
            self.keep(compress_block_sliding_stride=self.compress_block_size)
        dim, dim_head, heads = check_ints(1, dim=self.dim, dim_head=self.dim_head, heads=self.heads)
        kv_heads = heads if self.kv_heads is None else check_int("kv_heads", self.kv_heads, 1)
        check_groups(heads, kv_heads)
        (m,) = check_ints(0, num_compressed_mem_kv=self.num_compressed_mem_kv)
        attention = super().checked()
        norm, attention_sinks = check_bools(norm=self.norm, attention_sinks=self.attention_sinks)
        check_choice("branch_kv", self.branch_kv, BRANCH_KV)
        check_choice("backend", self.backend, BACKENDS)
        check_elements(dim=dim, heads=heads, dim_head=dim_head)
        check_elements(kv_heads=kv_heads, num_compressed_mem_kv=m, dim_head=dim_head)
        l = attention["compress_block_size"]
        check_elements(kv_heads=kv_heads, compress_block_size=l, dim_head=dim_head)
        factor = check_factor("compress_mlp_expand_factor", self.compress_mlp_expand_factor)
        return attention | dict(
            dim=dim,
            dim_head=dim_head,
            heads=heads,
            kv_heads=kv_heads,
            num_compressed_mem_kv=m,
            norm=norm,
            attention_sinks=attention_sinks,
            compress_mlp_expand_factor=factor,
        )
