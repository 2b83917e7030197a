"""Unions of the block indices of neighbouring tokens with enough overlap: each block once, with the
tokens that chose it. A group then reads a block once (`query_major.py`). Other groups use shared
unions (`union_sm90.py`), whose blocks have an order for that kernel.

A group has `members` consecutive members of one head group; a member is an aligned group of
`stride` tokens, which share block indices. By `launch.UnionRule` the device decides which groups
have a union. A packed block has the block in its low 32 bits, a bit per member in its high 32.
"""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common import primitives as steps
from ..common.precompile import launcher
from .inputs import Inputs

# comparisons of block indices of a program at most, and block indices of a one-warp program
MAX_COMPARISONS, WARP_INDICES = 1 << 14, 256
# blocks of a chunk of a shared union
CHUNK = 3
# compile-time settings: a program has GROUPS groups of MEMBERS members. CHUNK is 0 without shared
# unions
Settings = namedtuple("Settings", "R MEMBERS GROUPS STRIDE SLOTS CHUNK OVERLAPPING RAGGED FLIPPED")


class Unions(NamedTuple):
    """Packed blocks of each group's union and their number, 0 for a group without a union."""

    blocks: Tensor  # [B R groups limit] int64
    counts: Tensor  # [B R groups] int32
    groups: int
    limit: int  # of the blocks of a union
    members: int  # of a group
    cost: float = 0.0  # of a block, relative to a block of one member


@triton.jit
def load_blocks(block_indices, b, r, token, slot, T, R, n):
    """Block indices of slots; -1 for empty ones. Tokens before the call share those of token 0."""
    line = (b * T + tl.maximum(token, 0)) * R + r
    return tl.load(block_indices + line * n + slot, mask=slot < tl.where(token < T, n, 0), other=-1)


@triton.jit
def spread_bits(x):
    """The low 8 bits, spread to the lowest of four bits each."""
    x = (x | (x << 12)) & 0x000F000F
    x = (x | (x << 6)) & 0x03030303
    return (x | (x << 3)) & 0x11111111


@triton.jit
def store_by_chunks(blocks, c, holders, leads, size, CHUNK: tl.constexpr):
    """Write packed blocks in an order in which a CHUNK has few blocks of one member."""
    # a key: number of members in the chunk that chose the block too, block, and mask of the members
    # that chose it, in 4, 18 and 8 bits; `none` is above all keys
    none = 0x40000000
    key = tl.where(leads, (c << 8) | holders, none)
    spread_holders = tl.where(leads, spread_bits(holders), 0)
    for first in range(0, size, CHUNK):
        used = size * 0
        for j in tl.static_range(CHUNK):
            score = key
            if j > 0:
                shared = ((spread_holders & used) * 0x11111111).to(tl.uint32, bitcast=True) >> 28
                score += shared.to(tl.int32) << 26
            best = tl.min(score, 0) & 0x3FFFFFF
            key = tl.where(key == best, none, key)
            used |= spread_bits(best & 0xFF)
            packed = ((best & 0xFF).to(tl.int64) << 32) | (best >> 8)
            tl.store(blocks + first + j, packed, mask=first + j < size)


@triton.jit(do_not_specialize=["T", "start", "limit", "shared_limit", "groups", "all_members"])
def nsa_selected_union(
    block_indices, blocks, counts, shared, shared_counts, starts, start, T, n, limit, shared_limit,
    groups, all_members, cost, F: tl.constexpr,
):  # fmt: skip
    """One program: GROUPS groups of MEMBERS members. With OVERLAPPING writes each group's union if
    it has fewer than 1 / cost of the members' blocks, and its size, else 0. With a CHUNK also
    writes the shared union of all groups and its size: -1 - size, for `nsa_selected_union_settle`,
    if every group has a union; otherwise no group has one."""
    MEMBERS: tl.constexpr = F.MEMBERS
    SLOTS: tl.constexpr = F.SLOTS
    ALL: tl.constexpr = F.GROUPS * MEMBERS * SLOTS
    program, br, programs, _brs = steps.grid_position(F.FLIPPED)
    b, r = (br // F.R).to(tl.int64), br % F.R
    if F.RAGGED:
        start = tl.load(starts + b).to(tl.int32)
    first = program * (F.GROUPS * MEMBERS * F.STRIDE) - start % F.STRIDE
    i = tl.arange(0, ALL)
    member = i // SLOTS
    c = load_blocks(block_indices, b, r, first + member * F.STRIDE, i % SLOTS, T, F.R, n)
    holders = tl.full([ALL], 0, tl.int32)
    # few loops are unrolled: a program runs once, and unrolled code would have to be fetched
    for peer in range(0, all_members):
        same, token = c < -1, first + peer * F.STRIDE
        for first_slot in range(0, n, 4):
            for j in tl.static_range(4):
                same |= c == load_blocks(block_indices, b, r, token, first_slot + j, T, F.R, n)
        holders |= tl.where(same, 1 << peer, 0)

    lower_members = (1 << member) - 1
    line = br.to(tl.int64)
    if F.CHUNK > 0:
        # a block belongs to the first member that chose it
        leads = (c >= 0) & ((holders & lower_members) == 0)
        size = tl.sum(leads.to(tl.int32), 0)
    if F.OVERLAPPING:
        group_number = member // MEMBERS
        members = (holders >> (group_number * MEMBERS)) & ((1 << MEMBERS) - 1)
        leads_group = (c >= 0) & ((members & (lower_members >> (group_number * MEMBERS))) == 0)
        GROUP_SHAPE: tl.constexpr = (F.GROUPS, MEMBERS * SLOTS)
        group = program * F.GROUPS + tl.arange(0, F.GROUPS)
        sizes = tl.sum(tl.reshape(leads_group.to(tl.int32), GROUP_SHAPE), 1)
        num_chosen = tl.sum(tl.reshape((c >= 0).to(tl.int32), GROUP_SHAPE), 1)
        sizes = tl.where(sizes * cost < num_chosen, sizes, 0)
        if F.CHUNK > 0:
            all_overlap = tl.min(tl.where(group < groups, sizes, 1), 0) > 0
            sizes = tl.where(all_overlap, sizes, 0)
        tl.store(counts + line * groups + group, sizes, mask=group < groups)
        if tl.max(sizes, 0) > 0:
            offset = tl.cumsum(tl.reshape(leads_group.to(tl.int32), GROUP_SHAPE), 1) - 1
            offset += ((line * groups + group) * limit)[:, None]
            packed = tl.reshape((members.to(tl.int64) << 32) | c, GROUP_SHAPE)
            mask = tl.reshape(leads_group, GROUP_SHAPE) & (sizes > 0)[:, None]
            tl.store(blocks + offset, packed, mask=mask)
    if F.CHUNK > 0:
        line = line * programs + program
        store_by_chunks(shared + line * shared_limit, c, holders, leads, size, F.CHUNK)
        if F.OVERLAPPING:
            size = tl.where(all_overlap, -1 - size, size)
        tl.store(shared_counts + line, size)


@triton.jit(do_not_specialize=["groups", "shared_groups"])
def nsa_selected_union_settle(counts, shared_counts, groups, shared_groups, BLOCK: tl.constexpr):
    """One program. If groups of at least half of the shared unions have unions, they keep these and
    the shared ones get size -1. Otherwise no group keeps a union."""
    i = tl.arange(0, BLOCK)
    overlapping = tl.zeros([BLOCK], tl.int32)
    for first in range(0, shared_groups, BLOCK):
        size = tl.load(shared_counts + first + i, mask=first + i < shared_groups, other=0)
        overlapping += (size < 0).to(tl.int32)
    few = tl.sum(overlapping, 0) < shared_groups - tl.sum(overlapping, 0)
    for first in range(0, shared_groups, BLOCK):
        size = tl.load(shared_counts + first + i, mask=first + i < shared_groups, other=0)
        size = tl.where(size < 0, tl.where(few, -1 - size, -1), size)
        tl.store(shared_counts + first + i, size, mask=first + i < shared_groups)
    for first in range(0, tl.where(few, groups, 0), BLOCK):
        tl.store(counts + first + i, tl.zeros([BLOCK], tl.int32), mask=first + i < groups)


def allocate(selection: launch.Selection, members: int, limit: int, cost: float = 0.0) -> Unions:
    """Unions of `members` members each, of `limit` blocks at most."""
    indices = selection.block_indices
    B, _T, R, _n = indices.shape
    groups = launch.cdiv(selection.aligned, members * selection.stride)
    blocks = indices.new_empty(B, R, groups, limit, dtype=torch.int64)
    counts = indices.new_empty(B, R, groups, dtype=torch.int32)
    return Unions(blocks, counts, groups, limit, members, cost)


def write_unions(
    selection: launch.Selection, unions: Unions | None, shared: Unions | None = None
) -> None:
    """Writes the unions of groups with enough overlap, if any, and the `shared` unions."""
    whole = unions if shared is None else shared
    if whole is None:
        return
    B, T, R, n = selection.block_indices.shape
    groups, slots = unions or whole, launch.next_power_of_2(n)
    chunk = 0 if shared is None else CHUNK
    grid, flipped = launch.grid(whole.groups, B * R)
    settings = Settings(
        R, groups.members, whole.members // groups.members, selection.stride, slots, chunk,
        unions is not None, selection.starts is not None, flipped,
    )  # fmt: skip
    launcher(nsa_selected_union, grid)(
        selection.block_indices, groups.blocks, groups.counts, whole.blocks, whole.counts,
        selection.starts, selection.start, T, n, groups.limit, whole.limit, groups.groups,
        whole.members, groups.cost, settings,
        num_warps=1 if whole.members * slots <= (128 if chunk else WARP_INDICES) else 4,
    )  # fmt: skip
    if shared is not None and unions is not None:
        launcher(nsa_selected_union_settle, (1,))(
            unions.counts, shared.counts, unions.counts.numel(), shared.counts.numel(),
            BLOCK=2048, num_warps=8,
        )  # fmt: skip


def allocate_unions(inputs: Inputs) -> Unions | None:
    """The unwritten unions of a call; None if unions cannot be faster."""
    facts, n = inputs.facts, inputs.facts.F.n
    rule = launch.union_rule(facts.rows, facts.dtype)
    if rule is None or facts.F.GATES or not n:
        return None
    few = (
        facts.B * facts.F.R * launch.cdiv(facts.aligned, rule.members * facts.F.stride)
        < rule.min_groups
    )
    if few or rule.members * facts.F.SLOTS**2 > MAX_COMPARISONS:
        return None
    # a larger union is slower than its members
    limit = min(int(rule.members * n / rule.cost) + 1, rule.members * n)
    return allocate(inputs.selection, rule.members, limit, float(rule.cost))
