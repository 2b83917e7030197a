"""Launches of `query_major_fwd_sm90.py` and `query_major_dq_sm90.py`: the calls where they pay."""

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
# slots of a list at most
MOST_SLOTS = 128
# tiles that a multiprocessor has at least: with 8 the selected branch forward took 137 µs for 120,
# with 15.5 as long, with 31 387 for 430. And groups of which only some are united at most, as a
# part looks at its groups one after the other
LEAST_TILES, MOST_GROUPS = 16, 128
# places of a part, and registers of a thread that computes
STAGES, REGISTERS = 3, 232


def is_supported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    scale: float,
    kernel: str,
    unions: Unions | None = None,
    only: Tensor | None = None,
) -> bool:
    """Whether `kernel`, "forward" or "dq", takes a call, or its groups that are united, all of
    which might not be unless `only` says where they are: where it can, and is the faster one for
    that many tiles. With `launch.using({"query_major_sm90": True})` however many there are; with
    False never, and not where the call asks for tiles."""
    wanted = launch.override.get("query_major_sm90")
    if wanted is False or requested_sizes(f"query_major.{kernel}") or not sm90.available(q):
        return False
    members = 1 if unions is None else unions.members
    (B, T, R, n), s, S = selection.block_indices.shape, selection.s, k.shape[1]
    groups, stride = q.shape[2] // R, selection.stride
    aligned = selection.starts is None and selection.start % stride == 0
    # a tile has the tokens that share a list, some of them, or those of all lists of a group
    rows = groups * stride * members
    whole_tiles = ROWS % groups == 0 and (rows == ROWS or (members == 1 and rows % ROWS == 0))
    whole = s == KEYS and S % s == 0
    whole = whole and not selection.diagonal and not launch.ends(selection)["ENDS"]
    sizes = q.element_size() == 2 and k.shape[-1] == v.shape[-1] in WIDTHS
    plain = selection.gates is None and selection.soft_cap is None and scale > 0
    if not (aligned and whole_tiles and whole and sizes and plain and 0 < n <= MOST_SLOTS):
        return False
    tiles = B * R * cdiv(T, ROWS // groups)
    if not wanted:
        each = tiles / sm90.multiprocessors(q.device)
        some = unions is not None and only is None
        if each < LEAST_TILES or (some and each > MOST_GROUPS):
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
    only: Tensor | None,
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Grid, and what both kernels take."""
    (B, T, R, n), G = selection.block_indices.shape, q.shape[2] // selection.block_indices.shape[2]
    tiles = cdiv(T, ROWS // G)
    which: dict[str, Any] = dict(
        block_indices=selection.block_indices, counts=None, limit=n, MEMBERS=1
    )
    if unions is not None:
        which = dict(
            block_indices=unions.entries,
            counts=unions.counts,
            limit=unions.limit,
            MEMBERS=unions.members,
        )
    total = tiles * B * R
    args = dict(
        q=sm90.box(q, [1, ROWS // G, G, q.shape[-1]]), k=sm90.box(k, [1, KEYS, 1, k.shape[-1]]),
        v=sm90.box(v, [1, KEYS, 1, v.shape[-1]]), T=T, K=k.shape[2], R=R, tiles=tiles, total=total,
        G=G, SLOTS=next_power_of_2(n), STAGES=STAGES, UNION=unions is not None,
        only=only, ONLY=only is not None, REGISTERS=REGISTERS, num_warps=4, **which,
    )  # fmt: skip
    # one for each multiprocessor, which it fills
    return (min(cdiv(total, 2), sm90.multiprocessors(q.device)),), args


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    scale: float,
    out: Tensor,
    lse: Tensor,
    joined: bool,
    norms: Tensor | None,
    combine_inputs: CombineInputs | None,
    unions: Unions | None,
    only: Tensor | None,
) -> None:
    """out and lse over the listed blocks, `joined` with what those hold; of the groups that are
    united where there are `unions`. Nothing where `only` is given and 0, on the device."""
    from .query_major_fwd_sm90 import nsa_selected_fwd_query_major_sm90

    grid, args = arguments(q, k, v, selection, unions, only)
    nsa_selected_fwd_query_major_sm90[grid](
        out=out, lse=lse, scale_log2=scale * LOG2_E, ADD=joined, **bounds(norms),
        **launch.combine_arguments(combine_inputs), **args,
    )  # fmt: skip


def backward_q(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    scale: float,
    bwd: BackwardInputs,
    into: dict[str, Any],
    unions: Unions | None,
    only: Tensor | None,
) -> None:
    """As `forward`, dq `into` what that says."""
    from .query_major_dq_sm90 import nsa_selected_dq_query_major_sm90

    grid, args = arguments(q, k, v, selection, unions, only)
    d_out = bwd.d_out
    nsa_selected_dq_query_major_sm90[grid](
        d_out=sm90.box(d_out, args["q"].block_shape), lse=bwd.lse, delta=bwd.delta,
        scale=scale, GATED=bwd.gated, **into, **args,
    )  # fmt: skip
