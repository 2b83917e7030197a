"""What the plan of a launch depends on, and which calls the Hopper kernels support."""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

from torch import Tensor

from ..common import launch
from ..common.launch import BackwardInputs, KVRange, Layout, RangeFacts, cdiv, layout
from ..common.primitives import BEHIND, CAUSAL_WINDOW, LOCAL_BLOCKS

# numbers of a KV range and of the local blocks within it; a key covers `unit` tokens
Range = namedtuple("Range", "floor reach stride inner_floor inner_reach inner_stride unit")

# `launch.BackwardInputs` [B T H ..], and lse and delta of the local blocks
Rows = namedtuple("Rows", "d_out lse delta inner_lse inner_delta")

# rows of a consumer's tile on a Hopper GPU
HOPPER_ROWS = 64
# head dimensions there. For 64, ptxas 12.8 overwrites registers of d_out that the dq loop reads
# again; `tests/scripts/compile_kernels.py` checks for this
HOPPER_WIDTHS = (128,)
# the fewest query tiles per multiprocessor: 3.9 were measured faster; with fewer tiles, programs of
# half the rows use more multiprocessors
LEAST_HOPPER_TILES = 3


class Facts(NamedTuple):
    """What a plan depends on. `gated` and `add` are of the backward."""

    q: Layout
    k: Layout
    v: Layout
    prefix: tuple[Layout, Layout] | None
    kv_range: RangeFacts
    inner: RangeFacts | None
    positive: bool
    sinks: bool = False
    bounded: bool = False
    gated: bool = False
    add: bool = False

    @property
    def groups(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[2] // max(self.k.shape[2], 1)

    def numbers(self) -> Range:
        at, inner = self.kv_range, self.inner
        local = (0, 0, 1) if inner is None else (inner.floor, inner.reach, inner.stride)
        return Range(at.floor, at.reach, at.stride, *local, at.unit)


def facts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_range: KVRange,
    scale: float,
    inner: KVRange | None,
    prefix: tuple[Tensor, Tensor] | None = None,
    **flags: bool,
) -> Facts:
    prefix_layouts = None if prefix is None else (layout(prefix[0]), layout(prefix[1]))
    inner_facts = None if inner is None else inner.facts
    return Facts(
        layout(q), layout(k), layout(v), prefix_layouts, kv_range.facts, inner_facts, scale > 0,
        **flags,
    )  # fmt: skip


def backward_rows(bwd: BackwardInputs, inner: BackwardInputs | None) -> Rows:
    inner_rows = (None, None) if inner is None else (inner.lse, inner.delta)
    return Rows(bwd.d_out, bwd.lse, bwd.delta, *inner_rows)


def supports_sm90(kernel: str, call: Facts) -> bool:
    """Whether `kernel`, "forward", "dq" or "dkv", supports a call and has enough tiles to be
    faster. `launch.using({"flash_sm90": True})` ignores the number of tiles; False, or a requested
    tile config, disables the kernel."""
    q, k, v, kv_range, inner = call.q, call.k, call.v, call.kv_range, call.inner
    forced = launch.override.get("flash_sm90")
    tiled = launch.requested_sizes(kernel if kv_range.wide else f"window.{kernel}")
    if forced is False or tiled or not launch.supports_gluon(q):
        return False
    kinds = kv_range.kind in (BEHIND.value, CAUSAL_WINDOW.value, LOCAL_BLOCKS.value)
    plain = not (call.sinks or kv_range.has_starts or kv_range.has_documents or kv_range.has_cap)
    nested = inner is None or (not inner.has_starts and kv_range.kind == CAUSAL_WINDOW.value)
    sizes = q.dtype.itemsize == 2 and q.shape[-1] == v.shape[-1] in HOPPER_WIDTHS
    whole = 0 < call.groups <= HOPPER_ROWS and HOPPER_ROWS % call.groups == 0
    if not (kinds and plain and nested and sizes and whole and call.positive):
        return False
    tiles, lines = query_tiles(call)
    if not forced and tiles * lines < LEAST_HOPPER_TILES * launch.multiprocessors(q.device):
        return False
    prefixed = (BEHIND.value, False), (LOCAL_BLOCKS.value, True)
    if call.prefix is None:
        return launch.supports_tma(q, k, v)
    # of a prefix that all sequences share TMA reads the first sequence's
    prefix = [t._replace(stride=(t.stride[0] or t.stride[1], *t.stride[1:])) for t in call.prefix]
    supported = (kv_range.kind, kv_range.causal_prefix) in prefixed
    return supported and launch.supports_tma(q, k, v, *prefix)


def query_tiles(call: Facts) -> tuple[int, int]:
    """Query tiles per sequence and KV head, and the number of sequences x KV heads."""
    B, T = call.q.shape[:2]
    return cdiv(T, 2 * HOPPER_ROWS // call.groups), B * call.k.shape[2]
