"""Launches of `union_fwd_sm90.py`: supported calls, and groups that `query_major.py` runs."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..common import launch, sm90
from ..common.counts import cdiv
from ..common.key_norms import bounds
from ..common.launch import LOG2_E, CombineInputs, Selection
from ..common.overrides import requested_sizes
from . import union
from .union import Unions

# warps of each of two consumers, and rows of a warp, which has one member
WARPS, ROWS = 4, 16
MEMBERS = 2 * WARPS
# blocks of a chunk, and chunks of the ring; keys of a product; registers of a consumer thread
CHUNK, CHUNKS, SLICE, REGISTERS = 3, 2, 16, 208
# cost of a union's block, at least: groups overlap if their members have more than this many times
# the union's blocks. On an H200 both kernels took as long if two of four members were equal
OVERLAPPING = 2.0
# widths of heads, and sizes of blocks
WIDTHS, BLOCK_SIZES = (64, 128), (64,)
# slots of a head group at most; blocks of keys below the limit of `union.store_by_chunks`
MAX_SLOTS, MAX_BLOCKS = 32, 1 << 18
# tiles of a multiprocessor at least: with fewer, too many are idle during the last tiles
MIN_TILES_PER_SM = 8


def is_supported(q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float) -> bool:
    """Whether the kernel supports a call and has enough tiles to be faster. With
    `launch.using({"union_sm90": True})` any number of tiles is enough; with False, or with a tile
    config of the caller, the kernel never runs."""
    wanted = launch.override.get("union_sm90")
    if wanted is False or requested_sizes("query_major.forward") or not sm90.available(q):
        return False
    (B, T, R, n), s, S = selection.block_indices.shape, selection.s, k.shape[1]
    groups, stride = q.shape[2] // R, selection.stride
    rows = launch.FEW_ROWS <= groups * stride <= ROWS
    if stride > 1:  # a tile starts at an aligned group of tokens
        rows = rows and ROWS % stride == 0
        rows = rows and selection.starts is None and selection.start % stride == 0
    slots = 0 < n <= MAX_SLOTS and S // s < MAX_BLOCKS and selection.gates is None
    whole = s in BLOCK_SIZES and S % s == 0
    whole = whole and not selection.diagonal and not launch.ends(selection)["ENDS"]
    # q uses the shared memory of keys and values
    sizes = q.element_size() == 2 and k.shape[-1] == v.shape[-1] in WIDTHS
    plain = selection.soft_cap is None and scale > 0
    least = 0 if wanted else MIN_TILES_PER_SM * sm90.multiprocessors(q.device)
    if not (
        rows and slots and whole and sizes and plain and least <= B * R * (T // (MEMBERS * stride))
    ):
        return False
    return all(launch.tma_descriptor(t, ROWS) is not None for t in (q, k, v))


class Plan(NamedTuple):
    """Plan of the forward: this kernel reads the `shared` unions, `query_major.py` reads the groups
    with unions of their own in `overlapping`."""

    overlapping: Unions | None
    cost: float
    shared: Unions

    def run(self, selection: Selection) -> None:
        if self.overlapping is None:
            union.write_unions(selection, self.shared, None, self.shared, CHUNK)
        else:
            union.write_unions(selection, self.overlapping, self.cost, self.shared, CHUNK)


def plan(q: Tensor, k: Tensor, selection: Selection) -> Plan:
    """Allocate the unions that `run` writes."""
    blocks = min(MEMBERS * selection.block_indices.shape[3], cdiv(k.shape[1], selection.s))
    overlapping, cost = union.allocate_unions(selection, q.shape[2], q.dtype)
    return Plan(overlapping, max(cost, OVERLAPPING), union.allocate(selection, MEMBERS, blocks))


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
    unions: Unions,
) -> None:
    """Writes out and lse over the top-n blocks of groups without unions of their own, with `add`
    combined with their previous values."""
    from .union_fwd_sm90 import nsa_selected_fwd_union_sm90

    R, s, tiles = selection.block_indices.shape[2], selection.s, unions.counts.numel()
    shape = [1, WARPS * selection.stride, ROWS // selection.stride, q.shape[-1]]
    if not tiles:
        return
    # a program fills a multiprocessor
    nsa_selected_fwd_union_sm90[(min(tiles, sm90.multiprocessors(q.device)),)](
        q=sm90.box(q, shape), k=sm90.box(k, [1, s, 1, k.shape[-1]]),
        v=sm90.box(v, [1, s, 1, v.shape[-1]]), blocks=unions.blocks, counts=unions.counts,
        out=out, lse=lse, T=q.shape[1], K=k.shape[2], R=R, limit=unions.limit, s=s,
        groups=unions.groups, tiles=tiles, scale_log2=scale * LOG2_E, G=q.shape[2] // R,
        WARPS=WARPS, CHUNK=CHUNK, CHUNKS=CHUNKS, SLICE=SLICE, REGISTERS=REGISTERS, ADD=add,
        num_warps=WARPS,
        **bounds(norms), **launch.combine_arguments(combine_inputs),
    )  # fmt: skip
