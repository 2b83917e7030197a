"""Launches of `fwd_sm90.py`, `dq_sm90.py` and `dkv_sm90.py`, and the calls that they support."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..common import launch, sm90
from ..common.launch import LOG2_E, Accumulator, BackwardInputs, KVRange, cdiv
from ..common.overrides import requested_sizes
from ..common.primitives import BEHIND, CAUSAL_WINDOW, LOCAL_BLOCKS

# rows and keys of a tile
ROWS, KEYS = 64, 64
# head dimensions. For 64, ptxas 12.8 overwrites registers of d_out that the dq loop reads again;
# `tests/scripts/compile_kernels.py` checks for this
WIDTHS = (128,)
# the fewest query tiles per multiprocessor: 3.9 were measured faster; with fewer tiles, programs of
# half the rows use more multiprocessors
LEAST_TILES = 3
# the fewest query tiles per split of dk and dv, if the splits fill the GPU
MIN_SPLIT_TILES = 64
# stages of the ring buffer, and registers per consumer thread
STAGES, REGISTERS = {"forward": 4, "dq": 3, "dkv": 3}, 240
# a forward with one softmax: registers per consumer thread and on average; at most four spill.
# Programs of short kernels can then run on the same multiprocessor
FEWER = {"REGISTERS": 160, "maxnreg": 120}


def is_supported(
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
    sizes = q.element_size() == 2 and q.shape[-1] == v.shape[-1] in WIDTHS
    whole = 0 < groups <= ROWS and ROWS % groups == 0
    if not (kinds and plain and within and sizes and whole and scale > 0):
        return False
    if not wanted and math.prod(query_tiles(q, k)) < LEAST_TILES * sm90.multiprocessors(q.device):
        return False
    prefixed = (BEHIND.value, False), (LOCAL_BLOCKS.value, True)
    if prefix is not None and (kv_range.kind, kv_range.causal_prefix) not in prefixed:
        return False
    return all(launch.tma_descriptor(t, ROWS) is not None for t in (q, k, v, *own(prefix)))


def own(prefix: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
    """The prefix; of a prefix that all sequences share, the first sequence's."""
    return () if prefix is None else tuple(t if t.stride(0) else t[0][None] for t in prefix)


def query_tiles(q: Tensor, k: Tensor) -> tuple[int, int]:
    """Query tiles per sequence and KV head, and the number of sequences x KV heads."""
    groups = q.shape[2] // k.shape[2]
    return cdiv(q.shape[1], 2 * ROWS // groups), q.shape[0] * k.shape[2]


def boxes(
    q: Tensor, k: Tensor, v: Tensor, kv_range: KVRange, inner: KVRange | None, kernel: str
) -> dict[str, Any]:
    """Arguments of all three kernels."""
    groups, D = q.shape[2] // k.shape[2], q.shape[-1]
    return dict(
        q=sm90.box(q, [1, ROWS // groups, groups, D]), k=sm90.box(k, [1, KEYS, 1, D]),
        v=sm90.box(v, [1, KEYS, 1, D]), start=kv_range.start, T=q.shape[1], N=k.shape[1],
        K=k.shape[2], floor=kv_range.floor, reach=kv_range.reach, stride=kv_range.stride,
        inner_floor=inner.floor if inner else 0, inner_reach=inner.reach if inner else 0,
        inner_stride=inner.stride if inner else 1, G=groups, STAGES=STAGES[kernel],
        KIND=kv_range.kind, INNER=inner is not None, REGISTERS=REGISTERS, num_warps=4,
    )  # fmt: skip


def query_tile_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_range: KVRange,
    inner: KVRange | None,
    prefix: tuple[Tensor, Tensor] | None,
    kernel: str,
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Grid and arguments of the kernels over query tiles."""
    tiles, lines = query_tiles(q, k)
    pk, pv = (sm90.box(t, [1, KEYS, 1, t.shape[-1]]) for t in (own(prefix) or (k, v)))
    args = boxes(q, k, v, kv_range, inner, kernel) | dict(
        pk=pk, pv=pv, P=0 if prefix is None else prefix[0].shape[1], each=int(pk.shape[0] > 1),
        PREFIX=prefix is not None, tiles=tiles, B=q.shape[0],
    )  # fmt: skip
    # one program fills a multiprocessor
    return (min(tiles * lines, sm90.multiprocessors(q.device)),), args


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_range: KVRange,
    scale: float,
    inner: KVRange | None,
    norms: Tensor | None,
    prefix: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """As `fwd.forward`."""
    from .fwd_sm90 import nsa_flash_fwd_sm90

    outputs = launch.empty_outputs(q, v)
    inner_outputs = () if inner is None else launch.empty_outputs(q, v)
    out, lse, inner_out, inner_lse = (*outputs, *(inner_outputs or outputs))
    grid, args = query_tile_arguments(q, k, v, kv_range, inner, prefix, "forward")
    shape = args["q"].block_shape
    if inner is None:
        args |= FEWER
    nsa_flash_fwd_sm90[grid](
        out=sm90.box(out, shape), lse=lse,
        inner_out=sm90.box(inner_out, shape), inner_lse=inner_lse,
        scale_log2=scale * LOG2_E, norms=norms, BOUNDED=norms is not None, **args,
    )  # fmt: skip
    return *outputs, *inner_outputs


def backward_q(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_range: KVRange,
    scale: float,
    bwd: BackwardInputs,
    dq: Accumulator,
    inner: tuple[KVRange, BackwardInputs] | None,
    prefix: tuple[Tensor, Tensor] | None = None,
) -> None:
    """As `bwd.backward_q`."""
    from .dq_sm90 import nsa_flash_dq_sm90

    within, of_inner = inner or (None, bwd)
    grid, args = query_tile_arguments(q, k, v, kv_range, within, prefix, "dq")
    shape, into = args["q"].block_shape, dq.arguments()
    nsa_flash_dq_sm90[grid](
        d_out=sm90.box(bwd.d_out, shape), dq=sm90.box(into["dq"], shape), ADD=into["ADD"],
        lse=bwd.lse, delta=bwd.delta, inner_lse=of_inner.lse,
        inner_delta=of_inner.delta, scale=scale, GATED=bwd.gated, **args,
    )  # fmt: skip


def backward_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_range: KVRange,
    scale: float,
    bwd: BackwardInputs,
    inner: tuple[KVRange, BackwardInputs] | None,
) -> tuple[Tensor, Tensor]:
    """As `bwd.backward_kv`."""
    from .dkv_sm90 import nsa_flash_dkv_sm90

    (B, T), (N, K, D) = q.shape[:2], k.shape[1:]
    within, of_inner = inner or (None, bwd)
    args = boxes(q, k, v, kv_range, within, "dkv")
    blocks = cdiv(N, 2 * KEYS)
    visible_positions = T if kv_range.wide else min(T, kv_range.reach + 2 * KEYS)
    tiles = cdiv(visible_positions, ROWS // args["G"])
    splits = launch.query_splits(blocks * B * K, tiles, kv_range.wide)
    if kv_range.wide:
        fill = launch.query_splits(blocks * B * K, tiles, False)
        splits = max(min(splits, tiles // MIN_SPLIT_TILES), fill)
    dk, dv = (t.new_empty(splits, B, N, K, D, dtype=torch.float32) for t in (k, v))
    nsa_flash_dkv_sm90[(blocks * B * K, splits)](
        d_out=sm90.box(bwd.d_out, args["q"].block_shape), lse=bwd.lse,
        delta=bwd.delta, inner_lse=of_inner.lse, inner_delta=of_inner.delta, dk=dk, dv=dv,
        B=B, blocks=blocks, scale=scale, GATED=bwd.gated, **args,
    )  # fmt: skip
    return dk, dv
