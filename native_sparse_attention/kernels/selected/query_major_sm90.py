"""Launches of `query_major_fwd_sm90.py` and `query_major_dq_sm90.py`, and the supported calls."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..common import launch, sm90
from ..common.counts import cdiv, next_power_of_2
from ..common.key_norms import bounds
from ..common.launch import LOG2_E, BackwardInputs, CombineInputs, Selection
from ..common.overrides import requested_sizes
from .union import Unions

# rows of a tile; widths of heads, and keys of a block
ROWS, WIDTHS, KEYS = 64, (128,), 64
# slots of a head group at most
MAX_SLOTS = 128
# tiles of a multiprocessor at least: the selected forward took 137 µs instead of 120 with 8 tiles,
# the same with 15.5, 387 instead of 430 with 31. And groups of a multiprocessor at most if some of
# them may have no union, as a consumer checks its groups one after the other
MIN_TILES_PER_SM, MAX_GROUPS_PER_SM = 16, 128
# stages of a consumer's ring, and registers of a consumer thread
STAGES, REGISTERS = 3, 232


def is_supported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    scale: float,
    kernel: str,
    unions: Unions | None = None,
    run_if: Tensor | None = None,
) -> bool:
    """Whether `kernel`, "forward" or "dq", supports a call or its `unions`, and has enough tiles to
    be faster. Without `run_if` some groups may have no union. With
    `launch.using({"query_major_sm90": True})` any number of tiles is enough; with False, or with a
    tile config of the caller, the kernel never runs."""
    wanted = launch.override.get("query_major_sm90")
    if wanted is False or requested_sizes(f"query_major.{kernel}") or not sm90.available(q):
        return False
    members = 1 if unions is None else unions.members
    (B, T, R, n), s, S = selection.block_indices.shape, selection.s, k.shape[1]
    groups, stride = q.shape[2] // R, selection.stride
    aligned = selection.starts is None and selection.start % stride == 0
    # a tile has tokens that share block indices, or all members of a group
    rows = groups * stride * members
    whole_tiles = ROWS % groups == 0 and (rows == ROWS or (members == 1 and rows % ROWS == 0))
    whole = s == KEYS and S % s == 0
    whole = whole and not selection.diagonal and not launch.ends(selection)["ENDS"]
    sizes = q.element_size() == 2 and k.shape[-1] == v.shape[-1] in WIDTHS
    plain = selection.gates is None and selection.soft_cap is None and scale > 0
    if not (aligned and whole_tiles and whole and sizes and plain and 0 < n <= MAX_SLOTS):
        return False
    tiles = B * R * cdiv(T, ROWS // groups)
    if not wanted:
        tiles_per_sm = tiles / sm90.multiprocessors(q.device)
        some_groups = unions is not None and run_if is None
        if tiles_per_sm < MIN_TILES_PER_SM or (some_groups and tiles_per_sm > MAX_GROUPS_PER_SM):
            return False
    if not tiles:
        return False
    return all(launch.tma_descriptor(t, ROWS) is not None for t in (q, k, v))


def arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    unions: Unions | None,
    run_if: Tensor | None,
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Grid and arguments of both kernels."""
    (B, T, R, n), G = selection.block_indices.shape, q.shape[2] // selection.block_indices.shape[2]
    tiles = cdiv(T, ROWS // G)
    block_args: dict[str, Any] = dict(
        block_indices=selection.block_indices, counts=None, limit=n, MEMBERS=1
    )
    if unions is not None:
        block_args = dict(
            block_indices=unions.blocks,
            counts=unions.counts,
            limit=unions.limit,
            MEMBERS=unions.members,
        )
    all_tiles = tiles * B * R
    args = dict(
        q=sm90.box(q, [1, ROWS // G, G, q.shape[-1]]), k=sm90.box(k, [1, KEYS, 1, k.shape[-1]]),
        v=sm90.box(v, [1, KEYS, 1, v.shape[-1]]), T=T, K=k.shape[2], R=R, tiles=tiles,
        all_tiles=all_tiles, G=G, SLOTS=next_power_of_2(n), STAGES=STAGES, UNION=unions is not None,
        run_if=run_if, RUN_IF=run_if is not None, REGISTERS=REGISTERS, num_warps=4, **block_args,
    )  # fmt: skip
    # a program fills a multiprocessor
    return (min(cdiv(all_tiles, 2), sm90.multiprocessors(q.device)),), args


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    scale: float,
    out: Tensor,
    lse: Tensor,
    add: bool,
    norms: Tensor | None,
    combine_inputs: CombineInputs | None,
    unions: Unions | None,
    run_if: Tensor | None,
) -> None:
    """Writes out and lse over the top-n blocks, with `add` combined with their previous values.
    With `unions` runs only groups that have one. Does nothing if `run_if` is 0 on the device."""
    from .query_major_fwd_sm90 import nsa_selected_fwd_query_major_sm90

    grid, args = arguments(q, k, v, selection, unions, run_if)
    nsa_selected_fwd_query_major_sm90[grid](
        out=out, lse=lse, scale_log2=scale * LOG2_E, ADD=add, **bounds(norms),
        **launch.combine_arguments(combine_inputs), **args,
    )  # fmt: skip


def backward_q(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    scale: float,
    bwd: BackwardInputs,
    dq_args: dict[str, Any],
    unions: Unions | None,
    run_if: Tensor | None,
) -> None:
    """Like `forward`: dq, into the accumulator of `dq_args`."""
    from .query_major_dq_sm90 import nsa_selected_dq_query_major_sm90

    grid, args = arguments(q, k, v, selection, unions, run_if)
    d_out = bwd.d_out
    nsa_selected_dq_query_major_sm90[grid](
        d_out=sm90.box(d_out, args["q"].block_shape), lse=bwd.lse, delta=bwd.delta,
        scale=scale, GATED=bwd.gated, **dq_args, **args,
    )  # fmt: skip
