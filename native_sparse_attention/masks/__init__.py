"""Masks and score modifications for torch's flex_attention.

`nsa` has the masks of native sparse attention's branches, `gallery` and `scores` those of others,
`jagged` makes them fit packed sequences, `tiles` turns a mask mod into a block mask.
`python -m native_sparse_attention.masks NAME` draws one.
"""

from torch.nn.attention.flex_attention import and_masks, or_masks

from .dense import dense_attention
from .gallery import (
    causal,
    dilated_window,
    document,
    flamingo,
    natten,
    prefix_lm,
    sasa,
    sliding_window,
)
from .jagged import jagged_attention, jagged_block_mask, jagged_mask_mod, jagged_score_mod
from .nsa import (
    block_membership,
    cached_compress_block_mask,
    cached_sliding_block_mask,
    compress_block_mask,
    compress_mask_mod,
    create_compress_mask,
    create_fine_mask,
    create_sliding_mask,
    selected_block_mask,
    selected_mask_mod,
    sliding_block_mask,
    sliding_mask_mod,
)
from .scores import (
    ScoreMod,
    alibi,
    alibi_bias,
    alibi_slopes,
    relative_bias,
    relative_position,
    soft_cap,
)
from .spans import before_mask_mod, full_before, span_block_mask, span_mask_mod
from .tanh import tanh_approx
from .tiles import (
    TILE,
    MaskMod,
    Number,
    block_mask_of,
    cached,
    default_device,
    from_intervals,
    from_tiles,
    ordered,
    scalar,
    tile_bounds,
    tile_counts,
)

__all__ = [
    "TILE",
    "MaskMod",
    "Number",
    "ScoreMod",
    "alibi",
    "alibi_bias",
    "alibi_slopes",
    "and_masks",
    "before_mask_mod",
    "block_mask_of",
    "block_membership",
    "cached",
    "cached_compress_block_mask",
    "cached_sliding_block_mask",
    "causal",
    "compress_block_mask",
    "compress_mask_mod",
    "create_compress_mask",
    "create_fine_mask",
    "create_sliding_mask",
    "default_device",
    "dense_attention",
    "dilated_window",
    "document",
    "flamingo",
    "from_intervals",
    "from_tiles",
    "full_before",
    "jagged_attention",
    "jagged_block_mask",
    "jagged_mask_mod",
    "jagged_score_mod",
    "natten",
    "or_masks",
    "ordered",
    "prefix_lm",
    "relative_bias",
    "relative_position",
    "sasa",
    "scalar",
    "selected_block_mask",
    "selected_mask_mod",
    "sliding_block_mask",
    "sliding_mask_mod",
    "sliding_window",
    "soft_cap",
    "span_block_mask",
    "span_mask_mod",
    "tanh_approx",
    "tile_bounds",
    "tile_counts",
]
