"""Settings of a Transformer, and its `sparse_attn_kwargs` merged with their defaults."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from .attention import SparseAttention
from .checks.keywords import nearest
from .checks.scalars import check_bools, check_elements, check_ints, shown

DEFAULT_SPARSE_ATTN = dict(
    sliding_window_size=32,
    compress_block_size=8,
    compress_block_sliding_stride=4,
    selection_block_size=8,
    num_selected_blocks=4,
)

# arguments of SparseAttention that a Transformer sets: SparseAttention's name -> Transformer's
GIVEN = {name: name for name in ("dim", "dim_head", "heads", "kv_heads", "causal")} | {
    "use_triton_kernel": "use_triton_fine_selection"
}
KNOWN = [name for name in inspect.signature(SparseAttention).parameters if name not in GIVEN]


FLAGS = (
    "use_sparse_attn", "causal", "use_flex_sliding_window", "use_flex_fine_selection",
    "use_triton_fine_selection", "activation_checkpointing",
)  # fmt: skip


def check_sizes(given: dict[str, Any]) -> tuple[int, ...]:
    """num_tokens, dim and depth of a Transformer's arguments."""
    sizes = check_ints(1, **{name: given[name] for name in ("num_tokens", "dim", "depth")})
    check_elements(num_tokens=sizes[0], dim=sizes[1])
    return sizes


def check_flags(given: dict[str, Any]) -> tuple[bool, ...]:
    """`FLAGS` of a Transformer's arguments."""
    flags = check_bools(**{name: given[name] for name in FLAGS})
    if flags[3] and flags[4]:
        raise ValueError(
            "use_flex_fine_selection and use_triton_fine_selection are two ways to compute one "
            "branch: set at most one of them"
        )
    return flags


def merged(given: Any, shape: dict[str, Any], used: bool) -> dict[str, Any]:
    """The given arguments of SparseAttention, and `DEFAULT_SPARSE_ATTN` for the others. The stride
    of a given compress_block_size is by default the block size.

    A dense Transformer does not use the arguments: it checks them and warns.

    Raises:
        ValueError: not a dict, an unknown name, a name that the Transformer sets, or arguments that
            SparseAttention refuses.
    """
    if given is None:
        return dict(DEFAULT_SPARSE_ATTN)
    if not isinstance(given, Mapping):
        raise ValueError(f"sparse_attn_kwargs must be a dict or None, got {shown(given)}")
    for name in given:
        if name in GIVEN:
            raise ValueError(
                f"sparse_attn_kwargs must not hold {name!r}, which Transformer gives: "
                f"set Transformer({GIVEN[name]}=...)"
            )
        if name not in KNOWN:
            raise ValueError(
                f"sparse_attn_kwargs must hold arguments of SparseAttention, got {shown(name)}"
                + nearest(name, KNOWN)
            )
    defaults = dict(DEFAULT_SPARSE_ATTN)
    if "compress_block_size" in given:
        del defaults["compress_block_sliding_stride"]
    settings = defaults | dict(given)
    if not used:
        with torch.device("meta"):
            SparseAttention(**shape, **settings)
        warnings.warn(
            "sparse_attn_kwargs are not used by a Transformer with use_sparse_attn=False",
            stacklevel=3,
        )
    return settings


def without_ranking(given: Mapping[str, Any]) -> dict[str, Any]:
    """Of a layer that ranks no blocks, what differs from these arguments: compressed keys that only
    rank are not needed, and no query is dense."""
    found = dict(num_selected_blocks=0, use_diff_topk=False, dense_length=0)
    alone = "compressed" not in given.get("branches", ("compressed",))
    return found | ({"compress_mlp": None} if alone else {})
