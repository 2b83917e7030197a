"""Tile sizes that a user gives the Triton kernels."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from .checks import FLOAT_DTYPES, as_int, check_choice, check_groups, check_int, check_ints, refusal


@dataclass(frozen=True)
class BlockSizes:
    """Tile sizes of the Triton kernels. By default the kernels choose by GPU, head dimension and G.

    A tile has `block_q` rows (tokens x the query heads of one KV head) and processes `block_k` keys
    at a time; rows are rounded up to hold a token with all heads of its group. The sizes change
    results only by rounding; they change time, registers and shared memory, and Triton refuses a
    tile that the GPU cannot hold. They do not change warps, stages, or the tiles of the ranking,
    its gates, and dk and dv of a few memory or initial keys. With these sizes
    a Hopper GPU runs Triton kernels instead of the faster Gluon kernels, whose tiles are fixed.
    Other backends ignore the sizes.

    Args:
        block_q, block_k: the compressed branch, forward.
        block_q_window, block_k_window: the window and the forced blocks, forward.
        block_q_selected, block_k_selected: the selected blocks, forward. A query-major tile holds
            the rows that share block indices and ignores `block_q_selected`; a key-major tile holds
            a whole block of keys and ignores `block_k_selected`.
        block_q_dq, ..., block_k_selected_dq: of the same branches, gradient of queries. The
            key-major dq of selected blocks is computed together with dk and dv.
        block_q_dkv, ..., block_k_selected_dkv: gradients of keys and values. The backward's sizes
            (`_dq` and `_dkv`) are given all together or not at all.

    Raises:
        ValueError: a size that is not a power of two of at least 16, or some of the backward's
            sizes without the others.
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
            if size is None and name in BACKWARD:
                continue
            number = as_int(size) or 0
            if not 16 <= number <= LARGEST or number & (number - 1):
                raise refusal(name, f"a power of two from 16 to {LARGEST}", size)
            object.__setattr__(self, name, number)
        missing = [name for name in BACKWARD if getattr(self, name) is None]
        if 0 < len(missing) < len(BACKWARD):
            names = ", ".join(missing)
            raise ValueError(f"backward sizes go together, all or none: {names} must be given too")

    @property
    def has_backward_blocks(self) -> bool:
        """Whether the backward's sizes are given; otherwise the kernels choose them."""
        return self.block_q_dq is not None

    @classmethod
    def get_default(
        cls,
        dim_head: int,
        heads: int,
        kv_heads: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> BlockSizes:
        """The sizes that the Triton kernels choose on the current GPU, as a base for changes. Sizes
        of the compressed branch are for many keys; for few, some kernels use smaller tiles.

        Args:
            dim_head: head dimension, the larger one of keys and values.
            heads, kv_heads: query heads, and KV heads (as many by default).
            dtype: dtype of queries, keys and values.
        """
        from .kernels.common import launch

        dim_head, heads = check_ints(1, dim_head=dim_head, heads=heads)
        kv_heads = heads if kv_heads is None else check_int("kv_heads", kv_heads, 1)
        groups = check_groups(heads, kv_heads)
        check_choice("dtype", dtype, FLOAT_DTYPES)
        problem = (dim_head, groups, dtype)
        sizes: list[int] = []
        for kernel in ("forward", "dq", "dkv"):
            for wide in (True, False):
                tile = launch.flash_tile(kernel, wide, *problem)
                sizes += (tile.block_m, tile.block_n)
            direction = "forward" if kernel == "forward" else "backward"
            key_major = query_major = launch.key_major_tile(direction, *problem)
            if kernel != "dkv":
                query_major = launch.query_major_tile(kernel, *problem)
            sizes += (key_major.block_m, query_major.block_n)
        return cls(*sizes)


NAMES = tuple(field.name for field in fields(BlockSizes))
# the most elements along an axis of a Triton tile
LARGEST = 2**20
BACKWARD = NAMES[6:]
