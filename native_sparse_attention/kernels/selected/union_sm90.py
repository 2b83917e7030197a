"""Launches of `union_fwd_sm90.py`: where it can run and pays, and which lists it leaves to
`query_major.py`."""

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

# lists of a program: two parts of as many warps, and rows of each
WARPS, ROWS = 4, 16
MEMBERS = 2 * WARPS
# blocks between two meetings of a part, and how many times as many are on their way; keys of a
# product; registers of a warp
CHUNK, CHUNKS, SLICE, REGISTERS = 3, 2, 16, 208
# neighbours are alike whose lists have more than so many times the blocks of their union: on an
# H200 both ways took as long where two of four neighbours had one list
OVERLAPPING = 2.0
# widths of heads, and sizes of blocks
WIDTHS, SIZES = (64, 128), (64,)
# slots of a list at most; blocks of keys are fewer than those that `unite.store_by_chunks` can name
MOST_SLOTS, BLOCKS = 32, 1 << 18
# tiles that a multiprocessor has at least: of fewer the last ones leave too many idle
LEAST_TILES = 8


def is_supported(q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float) -> bool:
    """Whether the kernel takes a call: where it can, and has enough tiles to be the faster one.
    With `launch.using({"union_sm90": True})` however few there are; with False never, and not where
    the call asks for tiles."""
    wanted = launch.override.get("union_sm90")
    if wanted is False or requested_sizes("query_major.forward") or not sm90.available(q):
        return False
    (B, T, R, n), s, S = selection.block_indices.shape, selection.s, k.shape[1]
    groups, stride = q.shape[2] // R, selection.stride
    rows = launch.FEW_ROWS <= groups * stride <= ROWS
    if stride > 1:  # a tile begins where tokens that share a list do
        rows = rows and ROWS % stride == 0
        rows = rows and selection.starts is None and selection.start % stride == 0
    slots = 0 < n <= MOST_SLOTS and S // s < BLOCKS and selection.gates is None
    whole = s in SIZES and S % s == 0
    whole = whole and not selection.diagonal and not launch.ends(selection)["ENDS"]
    # rows of q lie where keys and values do
    sizes = q.element_size() == 2 and k.shape[-1] == v.shape[-1] in WIDTHS
    plain = selection.soft_cap is None and scale > 0
    least = 0 if wanted else LEAST_TILES * sm90.multiprocessors(q.device)
    if not (
        rows and slots and whole and sizes and plain and least <= B * R * (T // (MEMBERS * stride))
    ):
        return False
    return all(launch.tma_descriptor(t, ROWS) is not None for t in (q, k, v))


class Plan(NamedTuple):
    """Which blocks are read for whom: of all groups of neighbours but those that are `alike`, which
    `query_major.py` reads."""

    overlapping: Unions | None
    cost: float
    shared: Unions

    def run(self, selection: Selection) -> None:
        if self.overlapping is None:
            union.write_unions(selection, self.shared, None, self.shared, CHUNK)
        else:
            union.write_unions(selection, self.overlapping, self.cost, self.shared, CHUNK)


def plan(q: Tensor, k: Tensor, selection: Selection) -> Plan:
    """Room for what `fill` writes."""
    blocks = min(MEMBERS * selection.block_indices.shape[3], cdiv(k.shape[1], selection.s))
    overlapping, cost = union.allocate_unions(selection, q.shape[2], q.dtype, beside_shared=True)
    return Plan(overlapping, max(cost, OVERLAPPING), union.allocate(selection, MEMBERS, blocks))


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
    unions: Unions,
) -> None:
    """out and lse over the listed blocks, as `query_major.forward`, of those groups that are not
    alike; `joined` with what those hold."""
    from .union_fwd_sm90 import nsa_selected_fwd_union_sm90

    R, s, tiles = selection.block_indices.shape[2], selection.s, unions.counts.numel()
    shape = [1, WARPS * selection.stride, ROWS // selection.stride, q.shape[-1]]
    if not tiles:
        return
    # one for each multiprocessor, which it fills
    nsa_selected_fwd_union_sm90[(min(tiles, sm90.multiprocessors(q.device)),)](
        q=sm90.box(q, shape), k=sm90.box(k, [1, s, 1, k.shape[-1]]),
        v=sm90.box(v, [1, s, 1, v.shape[-1]]), entries=unions.entries, counts=unions.counts,
        out=out, lse=lse, T=q.shape[1], K=k.shape[2], R=R, limit=unions.limit, s=s,
        groups=unions.groups, tiles=tiles, scale_log2=scale * LOG2_E, G=q.shape[2] // R,
        WARPS=WARPS, CHUNK=CHUNK, CHUNKS=CHUNKS, SLICE=SLICE, REGISTERS=REGISTERS, ADD=joined,
        num_warps=WARPS,
        **bounds(norms), **launch.combine_arguments(combine_inputs),
    )  # fmt: skip
