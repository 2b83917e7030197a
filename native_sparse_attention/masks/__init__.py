"""Masks and score modifications for torch's flex_attention.

`nsa` has the masks of native sparse attention's branches, and makes block masks of mask mods;
`gallery` has mask and score mods of other papers. `attention` runs mods, also over packed rows.
`python -m native_sparse_attention.masks NAME` draws a mask. A setting out of range, or a tensor of
another dtype or shape, is a ValueError that names it.
"""

from .attention import (
    dense_attention,
    jagged_attention,
    jagged_block_mask,
    jagged_mask_mod,
    jagged_score_mod,
)
from .gallery import (
    ScoreMod,
    alibi,
    alibi_bias,
    alibi_slopes,
    causal,
    dilated_window,
    document,
    flamingo,
    natten,
    prefix_lm,
    relative_bias,
    relative_position,
    sasa,
    sliding_window,
    soft_cap,
    tanh_approx,
)
from .nsa import (
    MaskMod,
    and_masks,
    block_mask_of,
    compress_mask_mod,
    create_compress_mask,
    create_fine_mask,
    create_sliding_mask,
    or_masks,
    selected_mask_mod,
    sliding_mask_mod,
)

__all__ = [
    "MaskMod", "ScoreMod", "alibi", "alibi_bias", "alibi_slopes", "and_masks", "block_mask_of",
    "causal", "compress_mask_mod", "create_compress_mask", "create_fine_mask",
    "create_sliding_mask", "dense_attention", "dilated_window", "document", "flamingo",
    "jagged_attention", "jagged_block_mask", "jagged_mask_mod", "jagged_score_mod", "natten",
    "or_masks", "prefix_lm", "relative_bias", "relative_position", "sasa", "selected_mask_mod",
    "sliding_mask_mod", "sliding_window", "soft_cap", "tanh_approx",
]  # fmt: skip
