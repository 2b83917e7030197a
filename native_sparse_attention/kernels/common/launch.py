"""Launch parameters, and the argument groups that launches pass to kernels.

Tile configs are a function of the problem and the GPU, from the tables of `tile_configs.py`.
Nothing is tuned at run time.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...varlen import Documents
from .primitives import COMPRESSED, EVERYTHING, Strided
from .tile_configs import (
    ARCHITECTURES,
    ENOUGH_PROGRAMS,
    FEW_HEADS,
    FEWER_KEYS,
    MAX_COLUMN_N,
    MAX_FLOAT32,
    OTHER_GPUS,
    PROBS_FLOAT32,
    UNION_RULES,
    Architecture,
    TileConfig,
    TopkTileConfig,
    UnionRule,
)

LOG2_E = 1.4426950408889634

# programs along the second and third axis of a grid, at most
MAX_GRID_Y = 65535

# rows of a TMA box, at most
MAX_BOX_ROWS = 256

# a reach past every sequence
UNLIMITED = 1 << 30

# tile configs that replace those of the tables, by kernel: "dq", "query_major.dq", "ranking.probs"
override: dict[str, Any] = {}

# rows of a key-major work tile: at most; and at least, where there are few blocks
WORK_TILE_ROWS = 16384
MIN_WORK_TILE_ROWS = 2048

# programs for dk and dv at most, where the queries of a block of keys are split
MAX_SPLIT_PROGRAMS = 2048
# programs that run at once; query tiles of a split, at least
CONCURRENT_PROGRAMS = 128
MIN_SPLIT_TILES = 8

# query-major tiles with fewer rows are slower than key-major
FEW_ROWS = 9


# counts of tiles and programs, on the host: Triton's own functions of these names take 2 us a call


def cdiv(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not less than n; 0 for n = 0."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


def padded(width: int) -> int:
    """The width of a tile: `width` rounded up to a power of two, at least 16."""
    return max(16, next_power_of_2(width))


# a kernel's sizes are the fields `block_q` and `block_k` of `BlockSizes` with these suffixes
BRANCHES = {"": "", "window": "_window"}
BRANCHES |= dict.fromkeys(("query_major", "union", "key_major"), "_selected")
PASSES = {"forward": "", "dq": "_dq", "dkv": "_dkv", "backward": "_dkv"}

# the `BlockSizes` of this thread's call: backward passes run in other threads
requested: ContextVar[Any] = ContextVar("requested", default=None)


def requested_sizes(kernel: str) -> tuple[int, int] | None:
    """Rows and keys that the current call requests for a kernel, if any."""
    (branch, _, direction), sizes = kernel.rpartition("."), requested.get()
    if sizes is None or branch not in BRANCHES:
        return None
    suffix = BRANCHES[branch] + PASSES[direction]
    rows, keys = getattr(sizes, f"block_q{suffix}"), getattr(sizes, f"block_k{suffix}")
    return None if rows is None else (rows, keys)


@contextmanager
def using(tiles: dict[str, Any]) -> Iterator[None]:
    """Launch with these tile configs, in all threads: backward passes run in their own."""
    previous = dict(override)
    override.update(tiles)
    try:
        yield
    finally:
        override.clear()
        override.update(previous)


@contextmanager
def sized(block_sizes: Any) -> Iterator[None]:
    """Launch with the tile sizes of a `BlockSizes`, or with the kernels' own for None."""
    token = requested.set(block_sizes)
    try:
        yield
    finally:
        requested.reset(token)


def apply_overrides(kernel: str, tile: TileConfig) -> TileConfig:
    """`tile`, or its override, with the block sizes that the call requests."""
    tile = override.get(kernel, tile)
    block_m, block_n = requested_sizes(kernel) or (tile.block_m, tile.block_n)
    return TileConfig(block_m, block_n, tile.num_warps, tile.num_stages)


@functools.cache
def capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def architecture() -> Architecture:
    """The tables of the current GPU. It calls no cached function: torch.compile may trace it."""
    if not torch.cuda.is_available():
        return OTHER_GPUS
    return ARCHITECTURES.get(torch.cuda.get_device_capability(), OTHER_GPUS)


def tuning() -> tuple[Any, ...]:
    """What tile configs depend on besides a problem; part of the key of a cached plan."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    return device, tuple(override.items()), requested.get()


class Layout(NamedTuple):
    """What a plan depends on of a tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_aligned: bool


class Plan(NamedTuple):
    """A launch as plain data: its grid, and the arguments that follow from layouts and settings."""

    grid: tuple[int, ...]
    args: dict[str, Any]
    is_sm90: bool = False


def layout(t: Tensor) -> Layout:
    return Layout(t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16 == 0)


def row(table: dict[int, Any], size: int) -> Any:
    """The first row of a table whose limit is at least `size`."""
    return next(value for limit, value in table.items() if size <= limit)


def entry(
    tiles: dict[str, TileConfig], kernel: str, family: str, width: int, dtype: torch.dtype
) -> TileConfig:
    """The tile config of a kernel in a row of the tables; in float32 that of its family."""
    tables = architecture()
    if dtype == torch.float32:
        tiles, kernel = row(tables.float32, width), family
    tile = tiles.get(kernel) or tiles.get(kernel.rpartition(".")[2]) or tiles[""]
    return replace(tile, num_stages=min(tile.num_stages, tables.max_stages))


def fit_head_group(kernel: str, groups: int, tile: TileConfig) -> TileConfig:
    """The tile config of `kernel`: at least one token with all heads of its group. A tile that
    grows to hold them has fewer keys."""
    min_rows = next_power_of_2(groups)
    grown = max(1, min_rows // tile.block_m)
    tile = replace(tile, block_m=tile.block_m * grown, block_n=max(16, tile.block_n // grown))
    tile = apply_overrides(kernel, tile)
    return replace(tile, block_m=max(tile.block_m, min_rows))


def flash_tile(
    kernel: str, wide: bool, width: int, groups: int, dtype: torch.dtype, keys: int = UNLIMITED
) -> TileConfig:
    """The tile config of `kernel` "forward", "dq" or "dkv". `width` is that of keys or of values,
    the wider. Queries see many of the `keys` (`wide`) or a window of them."""
    if not wide and "." not in kernel:
        kernel = f"window.{kernel}"
    tables, (most, cheaper) = architecture(), FEWER_KEYS.get(kernel, (-1, kernel))
    is_few_heads = kernel.endswith("dkv") and groups <= FEW_HEADS and width <= 128
    tiles = tables.few_heads if is_few_heads else row(tables.flash, width)
    tile = entry(tiles, cheaper if keys <= most else kernel, "flash", width, dtype)
    # at -O3 ptxas of CUDA 12.8 compiles two stages wrong for 3 heads of 144 to 224
    if kernel.endswith("dkv") and width > 128 and groups & (groups - 1):
        tile = replace(tile, num_stages=1)
    return fit_head_group(kernel, groups, tile)


def has_wide_offsets(*layouts: Layout) -> bool:
    """Whether an offset into a tensor of one of these layouts needs 64 bits."""
    last = (sum((n - 1) * step for n, step in zip(t.shape, t.stride, strict=True)) for t in layouts)
    return max(last) >= 1 << 31


def query_major_tile(
    kernel: str, width: int, rows: int, dtype: torch.dtype, is_union: bool = False
) -> TileConfig:
    """The tile config of the query-major `kernel` "forward" or "dq". A tile has `rows` rows, of one
    selection or of a union (`is_union`)."""
    tiles = row(row(architecture().query_major, width), rows)
    tile = entry(tiles, kernel, "query_major", width, dtype)
    tile = apply_overrides(f"{'union' if is_union else 'query_major'}.{kernel}", tile)
    return replace(tile, block_m=padded(rows))


def union_rule(rows: int, dtype: torch.dtype) -> UnionRule | None:
    """The rule for unions of selections with `rows` rows, or None for no unions. None in float32,
    where products take longer than loads."""
    rule = None if dtype == torch.float32 else UNION_RULES.get(next_power_of_2(rows))
    rule = override.get("union", rule)
    return rule if rule and rule.members * rows <= architecture().query_major_rows else None


def supports_tma(*layouts: Layout) -> bool:
    """Whether the GPU has TMA and can load tensors [B N K D] of all layouts by it."""
    device = layouts[0].device
    if device.type == "cuda" and capability(device.index) < (9, 0):
        return False
    return all(
        t.is_aligned
        and t.stride[-1] == 1
        and all(n > 0 and n * t.dtype.itemsize % 16 == 0 for n in t.stride[:3])
        and 0 not in t.shape
        for t in layouts
    )


def keys_argument(t: Tensor, rows: int, tma: bool) -> TensorDescriptor | Strided:
    """t [B N K D] for `primitives.load_keys`; with `tma` a descriptor with boxes of `rows`
    positions of one head."""
    if not tma:
        return strided(t)
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [1, rows, 1, padded(t.shape[-1])])


# versions of Triton with which these kernels have run on a GPU: Gluon changes between versions
VERSIONS = ((3, 6), (3, 7), (3, 8), (3, 9))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def triton_is_known() -> bool:
    return tuple(map(int, triton.__version__.split(".")[:2])) in VERSIONS


def supports_gluon(t: Tensor | Layout) -> bool:
    """Whether the GPU of t and this Triton can run `_sm90` kernels."""
    if t.device.type != "cuda" or capability(t.device.index) != (9, 0):
        return False
    if not triton_is_known():
        warnings.warn(
            f"the kernels for Hopper GPUs have not been run with Triton {triton.__version__}. The "
            "portable kernels take their place: about 1.3 times the forward's time and 1.2 times "
            "the backward's. Install 'triton>=3.6,<3.10' for the faster ones.",
            stacklevel=2,
        )
    return triton_is_known()


@functools.cache
def operand_layout(swizzle: int, bits: int, rank: int) -> Any:
    """The shared-memory layout of MMA operands."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle, bits, rank=rank)


def gluon_box(t: Tensor, shape: list[int]) -> Any:
    """A TMA descriptor of t with boxes of `shape`, in the layout of MMA operands."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    swizzle = min(128, shape[-1] * t.element_size())
    layout = operand_layout(swizzle, 8 * t.element_size(), t.ndim)
    return TensorDescriptor(t, list(t.shape), list(t.stride()), shape, layout)


def key_major_tile(kernel: str, width: int, groups: int, dtype: torch.dtype) -> TileConfig:
    """The tile config of the key-major `kernel` "forward" or "backward"."""
    tiles, name = row(architecture().key_major, width), f"one.{kernel}" if groups == 1 else kernel
    tile = entry(tiles, name, "key_major", width, dtype)
    return fit_head_group(f"key_major.{kernel}", groups, tile)


def grid(tiles: int, lines: int, *others: int) -> tuple[tuple[int, ...], bool]:
    """A grid of tiles x lines (batch rows x heads), and whether it is flipped. Tiles of a line are
    adjacent. The grid is flipped if its second axis cannot hold all lines: tiles are then few."""
    flipped = lines > MAX_GRID_Y
    return (*((lines, tiles) if flipped else (tiles, lines)), *others), flipped


def query_splits(programs: int, tiles: int, wide: bool = True) -> int:
    """Number of splits of the queries of a block of keys. In `wide` ranges many queries see few
    blocks: short splits balance better, long ones cost less to start and reduce. Both costs are
    equal at about this number. In a window equally many queries see each block: splits just fill
    the GPU."""
    if not wide:
        return max(1, min(CONCURRENT_PROGRAMS // max(1, programs), tiles // MIN_SPLIT_TILES))
    split_tiles = max(MIN_SPLIT_TILES, math.isqrt(programs * tiles // 8))
    return max(1, min(MAX_SPLIT_PROGRAMS // max(1, programs), tiles // split_tiles))


def work_tile_rows(rows: int, blocks: int) -> int:
    """Rows of a key-major work tile, at most. Few blocks get shorter work tiles, since few long
    programs would delay the end of the launch."""
    if blocks >= ENOUGH_PROGRAMS:
        return WORK_TILE_ROWS
    program_rows = next_power_of_2(max(1, rows // ENOUGH_PROGRAMS))
    return min(max(program_rows, MIN_WORK_TILE_ROWS), WORK_TILE_ROWS)


# least shared memory of a kernel: some calls need more than some GPUs have, with any tile config.
# The numbers are from `tests/scripts/compile_kernels.py`


@torch.compiler.assume_constant_result
def shared_memory() -> int:
    """Bytes of shared memory per program on the current GPU."""
    return architecture().shared_memory


def decode_bytes(group: int, width: int, size: int, T: int, s: int, index_dim: int = 0) -> int:
    """Bytes of shared memory to decode T new tokens: queries of several tokens (64 rows unless a
    token has more heads) and a tile of 32 windows, or queries of one token and the keys and values
    of a block of `s` tokens. Keys of windows that only rank are `index_dim` wide, and a tile has
    all windows of a block."""
    heads = max(16, next_power_of_2(group))
    rows = max(heads, min(64, next_power_of_2(T) * next_power_of_2(group)))
    keys = max({2: 64, 4: 32}[size], next_power_of_2(s))
    ranking = (rows + keys) * padded(index_dim)
    return max((rows + 2 * 32) * padded(width), (heads + 2 * keys) * padded(width), ranking) * size


def backward_bytes(group: int, width: int) -> int:
    """Bytes of shared memory for dq, dk and dv in float32: q and d_out of a token's head group, a
    tile of 16 keys and values, probabilities and row sums. 16-bit tiles always fit."""
    return 2 * (max(16, next_power_of_2(group)) + 16) * padded(width) * 4 + 8 * 1024


# argument groups


class KVRange(NamedTuple):
    """The range of keys that each query sees in a branch.

    The first query's position is `start`, or `starts` [B] per sequence. With `documents` a query
    sees keys of its own document only; a key covers `unit` tokens."""

    kind: int
    reach: int = 0
    stride: int = 1
    floor: int = 0
    start: int = 0
    starts: Any = None
    causal_prefix: bool = False
    documents: Any = None
    unit: int = 1
    soft_cap: Any = None

    @property
    def facts(self) -> KVRange:
        """What a plan depends on: not the start, but whether there are starts, documents, a cap."""
        return self._replace(
            start=0, starts=self.starts is not None, documents=self.documents is not None,
            soft_cap=self.soft_cap is not None,
        )  # fmt: skip

    @property
    def wide(self) -> bool:
        """Whether the range reaches beyond a window around the query."""
        return self.kind in (COMPRESSED.value, EVERYTHING.value) or self.reach == UNLIMITED


class Accumulator:
    """A tensor that several launches accumulate into, in order. The first launch overwrites it."""

    def __init__(self, like: Tensor) -> None:
        self.value = like.new_empty(like.shape)
        self.begun = False

    def next_launch(self) -> tuple[Tensor, bool]:
        """The tensor for the next launch, and whether it adds to what is there."""
        add, self.begun = self.begun, True
        return self.value, add

    def result(self) -> Tensor:
        return self.value if self.begun else self.value.zero_()


def cap(soft_cap: float | None, log2: bool = True) -> float:
    """The soft cap of logits as a kernel argument, 0 for none."""
    return 0.0 if soft_cap is None else float(soft_cap) * (LOG2_E if log2 else 1.0)


def strided(t: Tensor) -> Strided:
    """t [B N H D] as one kernel argument."""
    return Strided(t, *t.stride()[:3])


def head_strided(t: Tensor) -> Strided:
    """t [b h n d] as one kernel argument."""
    b, h, n, _ = t.stride()
    return Strided(t, b, n, h)


@dataclass(frozen=True)
class BackwardInputs:
    """Inputs of the backward of one branch: `d_out` [B T H E], and two float32 numbers per row
    [B T H]: `lse` (units of log2, 0 for an empty row) and `delta`, which is subtracted from dp. All
    are contiguous and aligned to 16 bytes.

    With `gated` the branch's output was multiplied by a gate. `lse` includes the size of the gate,
    so probabilities come out gated. The last bit of `delta` is its sign. Kernels short of registers
    then hold no third number per row."""

    d_out: Tensor
    lse: Tensor
    delta: Tensor
    gated: bool = False


@dataclass(frozen=True)
class Selection:
    """Blocks of `s` keys that a query attends to: its block indices [B T R n], the first
    `num_initial` blocks and, if causal, the last `num_local` up to its own. Tokens of an aligned
    group of `stride` share block indices. The first query's position is `start` or `starts` [B]."""

    block_indices: Tensor
    s: int
    num_initial: int
    num_local: int
    causal: bool
    start: int = 0
    starts: Tensor | None = None
    gates: Tensor | None = None
    stride: int = 1
    documents: Documents | None = None
    soft_cap: float | None = None

    @property
    def aligned(self) -> int:
        """Tokens from the begin of the first aligned group (with `starts`, at most)."""
        previous = self.start % self.stride if self.starts is None else self.stride - 1
        return self.block_indices.shape[1] + previous


def empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Unwritten out [B T H E] and lse [B T H]."""
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)


def topk_tile(
    rule: str, width: int, groups: int, n: int, dtype: torch.dtype, interpolated: bool = False
) -> TopkTileConfig:
    """The tile config of a ranking: heads of `width`, `groups` of which share it, and the n best
    blocks."""
    tables, is_float32 = architecture(), dtype == torch.float32
    if rule == "probs":
        tile = PROBS_FLOAT32 if is_float32 else row(row(tables.probs, width), groups)
    elif rule in ("max", "head_max"):
        tile = MAX_FLOAT32 if is_float32 else row(tables.largest, width)
        if n > tile.depth > 0:
            tile = replace(tile, columns=2 * tile.columns, num_warps=2 * tile.num_warps)
    else:
        tile = row(tables.interpolated if interpolated else tables.logits, width)
    tile = replace(tile, num_stages=min(tile.num_stages, tables.max_stages))
    tile = override.get(f"ranking.{rule}", tile)
    if rule in ("probs", "head_max"):
        # a tile holds at least one token with all heads of its group
        tile = replace(tile, block_m=max(tile.block_m, next_power_of_2(groups)))
    if n > MAX_COLUMN_N or tile.columns == 0:
        merged = tile.merge_n if rule in ("logits", "probs") else tile.block_n
        block_n = max(merged, next_power_of_2(n))
        return replace(tile, block_n=block_n, columns=0, depth=0, num_warps=8)
    return replace(tile, depth=min(tile.depth, n))
