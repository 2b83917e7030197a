"""Tile sizes that a user gives the Triton kernels."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from .checks.scalars import as_int
from .checks.tensors import FLOAT_DTYPES, check_groups, check_int, check_ints, shown


@dataclass(frozen=True)
class BlockSizes:
    """Tile sizes of the Triton kernels, in place of those that they choose by GPU, width and group.

    A tile has `block_q` rows, tokens times the query heads of one KV head, and walks their keys
    `block_k` at a step; rows are rounded up to hold a token with all heads of its group. What is
    computed does not depend on them beyond rounding; time, registers and shared memory do, and
    Triton refuses a tile that the GPU cannot hold. Warps, stages and the tiles of the ranking, its
    gates, and of dk and dv of a few memory or initial keys stay the kernels' own. On a Hopper the
    Triton kernels with these sizes run in place of those in Gluon, which are faster and whose tiles
    are fixed. Other backends have no tiles and pass these sizes over.

    Args:
        block_q, block_k: the compressed branch, forward.
        block_q_window, block_k_window: the window and the forced blocks, forward.
        block_q_selected, block_k_selected: the selected blocks, forward. Query by query a tile has
            as many rows as share a list, whatever `block_q_selected` says; block by block it takes
            a whole block of keys, whatever `block_k_selected` says.
        block_q_dq, block_k_dq: the compressed branch, gradient of queries; the backward's sizes are
            given all together or not at all.
        block_q_window_dq, block_k_window_dq: the window and the forced blocks.
        block_q_selected_dq, block_k_selected_dq: the selected blocks query by query; block by block
            it is formed with the gradients of keys and values.
        block_q_dkv, block_k_dkv: the compressed branch, gradients of keys and values.
        block_q_window_dkv, block_k_window_dkv: the window and the forced blocks.
        block_q_selected_dkv, block_k_selected_dkv: the selected blocks.

    Raises:
        ValueError: a size that is no power of two of at least 16, or some of the backward's sizes
            without the others.
    """

    block_q: int
    block_k: int
    block_q_window: int
    block_k_window: int
    block_q_selected: int
    block_k_selected: int
    block_q_dq: int | None = None
    block_k_dq: int | None = None
    block_q_window_dq: int | None = None
    block_k_window_dq: int | None = None
    block_q_selected_dq: int | None = None
    block_k_selected_dq: int | None = None
    block_q_dkv: int | None = None
    block_k_dkv: int | None = None
    block_q_window_dkv: int | None = None
    block_k_window_dkv: int | None = None
    block_q_selected_dkv: int | None = None
    block_k_selected_dkv: int | None = None

    def __post_init__(self) -> None:
        for name in NAMES:
            size = getattr(self, name)
            if size is not None or name in FORWARD:
                object.__setattr__(self, name, check_size(name, size))
        missing = [name for name in BACKWARD if getattr(self, name) is None]
        if 0 < len(missing) < len(BACKWARD):
            raise ValueError(
                "the backward's sizes go together, all or none: "
                f"{', '.join(missing)} must be given too"
            )

    @property
    def has_backward_blocks(self) -> bool:
        """Whether the backward's sizes are given; where not, the kernels choose them."""
        return self.block_q_dq is not None

    @classmethod
    def get_default(
        cls,
        dim_head: int,
        heads: int,
        kv_heads: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> BlockSizes:
        """What the Triton kernels choose themselves on the current GPU, to change some of it. Of
        the compressed branch what they choose for many keys: for few some take smaller tiles.

        Args:
            dim_head: width of a head, the wider of keys and values.
            heads, kv_heads: query heads, and KV heads (as many by default).
            dtype: of queries, keys and values.

        Raises:
            ValueError: sizes that are no integers of at least 1, heads that do not go together, a
                dtype that is not floating.
            NotImplementedError: where triton is not installed.
        """
        dim_head, heads = check_ints(1, dim_head=dim_head, heads=heads)
        kv_heads = heads if kv_heads is None else check_int("kv_heads", kv_heads, 1)
        groups = check_groups(heads, kv_heads)
        if not isinstance(dtype, torch.dtype) or dtype not in FLOAT_DTYPES:
            raise ValueError(f"dtype must be a floating torch.dtype, got {shown(dtype)}")
        try:
            from .kernels.common import launch
        except ImportError as error:
            raise NotImplementedError(
                "the kernels choose their tiles for a GPU, and triton is not installed"
            ) from error
        how = (dim_head, groups, dtype)
        sizes: list[int] = []
        for kernel in ("forward", "dq", "dkv"):
            for wide in (True, False):
                tile = launch.flash_tile(kernel, wide, *how)
                sizes += (tile.block_m, tile.block_n)
            by_block = launch.key_major_tile("forward" if kernel == "forward" else "backward", *how)
            by_query = by_block if kernel == "dkv" else launch.query_major_tile(kernel, *how)
            sizes += (by_block.block_m, by_query.block_n)
        return cls(*sizes)


NAMES = tuple(field.name for field in fields(BlockSizes))
# elements along an axis of the widest tile that Triton has
LARGEST = 2**20
FORWARD, BACKWARD = NAMES[:6], NAMES[6:]


def check_size(name: str, size: Any) -> int:
    """A power of two that a tensor core takes."""
    number = as_int(size) or 0
    if number < 16 or number & (number - 1):
        raise ValueError(f"{name} must be a power of two of at least 16, got {shown(size)}")
    if number > LARGEST:
        raise ValueError(f"{name} must be at most {LARGEST}, got {shown(size)}")
    return number


def check_block_sizes(block_sizes: Any) -> None:
    if block_sizes is not None and not isinstance(block_sizes, BlockSizes):
        raise ValueError(f"block_sizes must be a BlockSizes, got {type(block_sizes).__name__}")


def flat(block_sizes: BlockSizes | None) -> list[int] | None:
    """The sizes that are given, as an operator takes them; `kernels.sizes` reads them."""
    check_block_sizes(block_sizes)
    if block_sizes is None:
        return None
    names = NAMES if block_sizes.has_backward_blocks else FORWARD
    return [getattr(block_sizes, name) for name in names]
