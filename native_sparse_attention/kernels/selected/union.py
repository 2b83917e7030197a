"""Unions of the block indices of neighbouring tokens, where they overlap enough: each block once,
with the tokens that chose it. A group then reads a block once (`query_major.py`). Other groups
share blocks all the same (`union_fwd_sm90.py`); their unions are in an order for that.

A group is `count` consecutive lists of one ranking head, each of the tokens of an aligned group of
`stride`. Whether it is united is decided on the device, by the rule in `launch.Unite`; an entry of
a union is a block in its low 32 bits and, in the high 32, a bit for each list that holds it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common.counts import cdiv, next_power_of_2
from ..common.launch import Selection
from ..common.primitives import grid_position

# pairs of entries that one program compares, and entries that one warp does
MOST_PAIRS, ALONE = 1 << 14, 256


@dataclass(frozen=True)
class Unions:
    """Of each group of lists: its entries, and how many; none where the group is not united."""

    entries: Tensor  # [B R groups limit] int64
    counts: Tensor  # [B R groups] int32
    members: int  # of a group
    some: Tensor | None = None  # [] int32, beside shared ones: whether any group is united

    @property
    def groups(self) -> int:
        return self.counts.shape[2]

    @property
    def limit(self) -> int:
        return self.entries.shape[3]


@triton.jit
def list_blocks(block_indices, b, r, token, slot, T, R, n):
    """Blocks in slots of the list r of tokens; -1 for none. The first group may begin before the
    call, at tokens that share their list with token 0."""
    line = (b * T + tl.maximum(token, 0)) * R + r
    return tl.load(block_indices + line * n + slot, mask=slot < tl.where(token < T, n, 0), other=-1)


@triton.jit
def copy_lists(block_indices, rest, left, b, r, token, slot, T, R, n, STRIDE: tl.constexpr):
    """Copy the list r of tokens, and of those that share it, where it is `left`; else -1."""
    for j in tl.static_range(STRIDE):
        t = token + j
        at = ((b * T + t) * R + r) * n + slot
        there = (t >= 0) & (t < T) & (slot < n)
        tl.store(rest + at, tl.load(block_indices + at, mask=there & left, other=-1), mask=there)


@triton.jit
def spread(x):
    """The low 8 bits, each the lowest of four."""
    x = (x | (x << 12)) & 0x000F000F
    x = (x | (x << 6)) & 0x03030303
    return (x | (x << 3)) & 0x11111111


@triton.jit
def store_by_chunks(entries, c, held, leads, size, CHUNK: tl.constexpr):
    """Write blocks with those that hold them, in an order in which a CHUNK has few of one list."""
    # a key: how many lists of the chunk hold the block too, its number, and who holds it, in 4, 18
    # and 8 bits; past all of them
    none = 0x40000000
    key = tl.where(leads, (c << 8) | held, none)
    holders = tl.where(leads, spread(held), 0)
    for first in range(0, size, CHUNK):
        used = size * 0
        for j in tl.static_range(CHUNK):
            score = key
            if j > 0:
                shared = ((holders & used) * 0x11111111).to(tl.uint32, bitcast=True) >> 28
                score += shared.to(tl.int32) << 26
            best = tl.min(score, 0) & 0x3FFFFFF
            key = tl.where(key == best, none, key)
            used |= spread(best & 0xFF)
            entry = ((best & 0xFF).to(tl.int64) << 32) | (best >> 8)
            tl.store(entries + first + j, entry, mask=first + j < size)


@triton.jit(do_not_specialize=["T", "start", "limit", "shared_limit", "groups", "together"])
def nsa_selected_union(
    block_indices, entries, counts, shared, shared_counts, rest, starts, start, T, R, n, limit,
    shared_limit, groups, together, cost,
    MEMBERS: tl.constexpr, PARTS: tl.constexpr, STRIDE: tl.constexpr, SLOTS: tl.constexpr,
    CHUNK: tl.constexpr, OVERLAPPING: tl.constexpr, REST: tl.constexpr, RAGGED: tl.constexpr,
    FLIPPED: tl.constexpr,
):  # fmt: skip
    """One program: PARTS groups of LISTS lists, none of which holds a block twice. Writes of each,
    if ALIKE, its union where that has fewer than 1 / cost of the lists' blocks, and its size, or
    else 0; and with REST to `rest` the lists, empty where they are united.

    With a CHUNK, of all of them together: their union and its size. Where each of them has a union
    that is -1 - size, for `settle_kernel`; otherwise none of them has one."""
    place, pair, places, _pairs = grid_position(FLIPPED)
    b, r = (pair // R).to(tl.int64), pair % R
    if RAGGED:
        start = tl.load(starts + b).to(tl.int32)
    first = place * (PARTS * MEMBERS * STRIDE) - start % STRIDE
    i = tl.arange(0, PARTS * MEMBERS * SLOTS)
    number = i // SLOTS
    c = list_blocks(block_indices, b, r, first + number * STRIDE, i % SLOTS, T, R, n)
    held = tl.zeros([PARTS * MEMBERS * SLOTS], tl.int32)
    # few loops are unrolled: a program runs once, and its code is fetched as it runs
    for other in range(0, together):
        same = c < -1
        for first_slot in range(0, n, 4):
            for j in tl.static_range(4):
                slot = first_slot + j
                same |= c == list_blocks(block_indices, b, r, first + other * STRIDE, slot, T, R, n)
        held |= tl.where(same, 1 << other, 0)

    before = (1 << number) - 1
    line = pair.to(tl.int64)
    if CHUNK > 0:
        # an entry stands for its block in the first list that holds it
        leads = (c >= 0) & ((held & before) == 0)
        size = tl.sum(leads.to(tl.int32), 0)
    if OVERLAPPING:
        part = number // MEMBERS
        members = (held >> (part * MEMBERS)) & ((1 << MEMBERS) - 1)
        alone = (c >= 0) & ((members & (before >> (part * MEMBERS))) == 0)
        by_part: tl.constexpr = (PARTS, MEMBERS * SLOTS)
        group = place * PARTS + tl.arange(0, PARTS)
        sizes = tl.sum(tl.reshape(alone.to(tl.int32), by_part), 1)
        total = tl.sum(tl.reshape((c >= 0).to(tl.int32), by_part), 1)
        sizes = tl.where(sizes * cost < total, sizes, 0)
        if CHUNK > 0:
            all_overlap = tl.min(tl.where(group < groups, sizes, 1), 0) > 0
            sizes = tl.where(all_overlap, sizes, 0)
        tl.store(counts + line * groups + group, sizes, mask=group < groups)
        if tl.max(sizes, 0) > 0:
            at = tl.cumsum(tl.reshape(alone.to(tl.int32), by_part), 1) - 1
            at += ((line * groups + group) * limit)[:, None]
            entry = tl.reshape((members.to(tl.int64) << 32) | c, by_part)
            mask = tl.reshape(alone, by_part) & (sizes > 0)[:, None]
            tl.store(entries + at, entry, mask=mask)
        if REST:
            left = tl.reshape(tl.broadcast_to((sizes == 0)[:, None], by_part), c.shape)
            token = first + number * STRIDE
            copy_lists(block_indices, rest, left, b, r, token, i % SLOTS, T, R, n, STRIDE)
    if CHUNK > 0:
        line = line * places + place
        store_by_chunks(shared + line * shared_limit, c, held, leads, size, CHUNK)
        if OVERLAPPING:
            size = tl.where(all_overlap, -1 - size, size)
        tl.store(shared_counts + line, size)


@triton.jit(do_not_specialize=["groups", "shared_groups"])
def nsa_selected_union_settle(
    counts, shared_counts, some, groups, shared_groups, BLOCK: tl.constexpr
):
    """One program. Where at least half of the shared unions are of groups that all have one of
    their own, those count: the shared ones get -1. Otherwise there are only shared ones, and `some`
    is 0."""
    i = tl.arange(0, BLOCK)
    overlapping = tl.zeros([BLOCK], tl.int32)
    for first in range(0, shared_groups, BLOCK):
        size = tl.load(shared_counts + first + i, mask=first + i < shared_groups, other=0)
        overlapping += (size < 0).to(tl.int32)
    few = tl.sum(overlapping, 0) < shared_groups - tl.sum(overlapping, 0)
    tl.store(some, tl.where(few, 0, 1))
    for first in range(0, shared_groups, BLOCK):
        size = tl.load(shared_counts + first + i, mask=first + i < shared_groups, other=0)
        size = tl.where(size < 0, tl.where(few, -1 - size, -1), size)
        tl.store(shared_counts + first + i, size, mask=first + i < shared_groups)
    for first in range(0, tl.where(few, groups, 0), BLOCK):
        tl.store(counts + first + i, tl.zeros([BLOCK], tl.int32), mask=first + i < groups)


def allocate(selection: Selection, members: int, limit: int) -> Unions:
    """For the unions of as many lists, of `limit` blocks at most."""
    B, _T, R, _n = selection.block_indices.shape
    groups = cdiv(selection.aligned, members * selection.stride)
    entries = selection.block_indices.new_empty(B, R, groups, limit, dtype=torch.int64)
    return Unions(
        entries, selection.block_indices.new_empty(B, R, groups, dtype=torch.int32), members
    )


def write_unions(
    selection: Selection,
    unions: Unions,
    cost: float | None,
    shared: Unions | None = None,
    chunk: int = 0,
    rest: Tensor | None = None,
) -> None:
    """Writes unions where they pay, but with no cost none, and the shared ones in chunks; to `rest`
    the lists, empty where they are united; as the kernels say."""
    B, T, R, n = selection.block_indices.shape
    whole = unions if shared is None else shared
    slots = next_power_of_2(n)
    grid, flipped = launch.grid(whole.groups, B * R)
    nsa_selected_union[grid](
        selection.block_indices, unions.entries, unions.counts, whole.entries, whole.counts,
        rest, selection.starts, selection.start, T, R, n, unions.limit, whole.limit, unions.groups,
        whole.members, float(cost or 0.0), MEMBERS=unions.members,
        PARTS=whole.members // unions.members, STRIDE=selection.stride, SLOTS=slots, CHUNK=chunk,
        OVERLAPPING=cost is not None, REST=rest is not None, RAGGED=selection.starts is not None,
        FLIPPED=flipped, num_warps=1 if whole.members * slots <= (128 if chunk else ALONE) else 4,
    )  # fmt: skip
    if shared is not None and cost is not None:
        nsa_selected_union_settle[(1,)](
            unions.counts, shared.counts, unions.some, unions.counts.numel(), shared.counts.numel(),
            BLOCK=2048, num_warps=8,
        )  # fmt: skip


def allocate_unions(
    selection: Selection, H: int, dtype: torch.dtype, beside_shared: bool = False
) -> tuple[Unions | None, float]:
    """Room for unions of the lists of a call with H query heads, beside shared ones or not, and
    what a block of one costs; None where they cannot pay."""
    B, _T, R, n = selection.block_indices.shape
    rule = launch.union_rule(H // R * selection.stride, dtype)
    if rule is None or selection.gates is not None or not n:
        return None, 0.0
    groups = cdiv(selection.aligned, rule.members * selection.stride)
    slots = next_power_of_2(n)
    few = B * R * groups < rule.least
    if few or rule.members * slots * slots > MOST_PAIRS:
        return None, 0.0
    # as many as pay at most
    limit = min(int(rule.members * n / rule.cost) + 1, rule.members * n)
    unions = allocate(selection, rule.members, limit)
    if beside_shared:
        unions = replace(unions, some=unions.counts.new_empty(()))
    return unions, rule.cost


def make_unions(selection: Selection, H: int, dtype: torch.dtype) -> Unions | None:
    """Unions of the lists of a call with H query heads; None where they cannot pay."""
    overlapping, cost = allocate_unions(selection, H, dtype)
    if overlapping is not None:
        write_unions(selection, overlapping, cost)
    return overlapping


@triton.jit(do_not_specialize=["groups"])
def nsa_selected_union_majority(counts, out, groups, BLOCK: tl.constexpr):
    """One program. Whether most groups are united."""
    is_union = tl.zeros([BLOCK], tl.int32)
    for first in range(0, groups, BLOCK):
        i = first + tl.arange(0, BLOCK)
        is_union += (tl.load(counts + i, mask=i < groups, other=0) > 0).to(tl.int32)
    tl.store(out, (tl.sum(is_union, 0) > groups // 2).to(tl.int32))


def most(unions: Unions, out: Tensor) -> None:
    """Writes whether most groups are united, [] int32."""
    nsa_selected_union_majority[(1,)](
        unions.counts, out, unions.counts.numel(), BLOCK=4096, num_warps=8
    )
