"""Which calls the Hopper kernels support."""

from __future__ import annotations

import math

from torch import Tensor

from ..common import launch, sm90
from ..common.launch import KVRange, cdiv
from ..common.overrides import requested_sizes
from ..common.primitives import BEHIND, CAUSAL_WINDOW, LOCAL_BLOCKS

# rows of a consumer's tile on a Hopper GPU
HOPPER_ROWS = 64
# head dimensions there. For 64, ptxas 12.8 overwrites registers of d_out that the dq loop reads
# again; `tests/scripts/compile_kernels.py` checks for this
HOPPER_WIDTHS = (128,)
# the fewest query tiles per multiprocessor: 3.9 were measured faster; with fewer tiles, programs of
# half the rows use more multiprocessors
LEAST_HOPPER_TILES = 3


def supports_sm90(
    kernel: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_range: KVRange,
    scale: float,
    inner: KVRange | None = None,
    prefix: tuple[Tensor, Tensor] | None = None,
) -> bool:
    """Whether `kernel`, "forward", "dq" or "dkv", supports a call without sinks and has enough
    tiles to be faster. `launch.using({"flash_sm90": True})` ignores the number of tiles; False, or
    a requested tile config, disables the kernel."""
    wanted = launch.override.get("flash_sm90")
    tiled = requested_sizes(kernel if kv_range.wide else f"window.{kernel}")
    if wanted is False or tiled or not sm90.available(q):
        return False
    groups = q.shape[2] // max(k.shape[2], 1)
    kinds = kv_range.kind in (BEHIND.value, CAUSAL_WINDOW.value, LOCAL_BLOCKS.value)
    plain = kv_range.starts is None and kv_range.documents is None and kv_range.soft_cap is None
    within = inner is None or (inner.starts is None and kv_range.kind == CAUSAL_WINDOW.value)
    sizes = q.element_size() == 2 and q.shape[-1] == v.shape[-1] in HOPPER_WIDTHS
    whole = 0 < groups <= HOPPER_ROWS and HOPPER_ROWS % groups == 0
    if not (kinds and plain and within and sizes and whole and scale > 0):
        return False
    if not wanted and math.prod(query_tiles(q, k)) < LEAST_HOPPER_TILES * sm90.multiprocessors(
        q.device
    ):
        return False
    prefixed = (BEHIND.value, False), (LOCAL_BLOCKS.value, True)
    if prefix is not None and (kv_range.kind, kv_range.causal_prefix) not in prefixed:
        return False
    return all(
        launch.tma_descriptor(t, HOPPER_ROWS) is not None for t in (q, k, v, *prefix_rows(prefix))
    )


def prefix_rows(prefix: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
    """The prefix; of a prefix that all sequences share, the first sequence's."""
    return () if prefix is None else tuple(t if t.stride(0) else t[0][None] for t in prefix)


def query_tiles(q: Tensor, k: Tensor) -> tuple[int, int]:
    """Query tiles per sequence and KV head, and the number of sequences x KV heads."""
    groups = q.shape[2] // k.shape[2]
    return cdiv(q.shape[1], 2 * HOPPER_ROWS // groups), q.shape[0] * k.shape[2]
