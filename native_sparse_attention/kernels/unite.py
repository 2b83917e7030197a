"""Lists of neighbouring tokens united, where they happen to be alike: each block that one of them
holds once, with the lists that hold it. Those groups then read a block once (`gather.py`).

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

from . import launch
from .device import grid_place
from .launch import Selection

# pairs of entries that one program compares at once
MOST_PAIRS = 1 << 14


@dataclass(frozen=True)
class Unions:
    """Of each group of lists: its entries, and how many; none where the group is not united."""

    entries: Tensor  # [B R groups limit] int64
    counts: Tensor  # [B R groups] int32
    lists: int  # of a group

    @property
    def groups(self) -> int:
        return self.counts.shape[2]

    @property
    def limit(self) -> int:
        return self.entries.shape[3]


@triton.jit
def list_blocks(lists, b, r, token, slot, T, R, n):
    """Blocks in slots of the list r of tokens; -1 for none. The first group may begin before the
    call, at tokens that share their list with token 0."""
    line = (b * T + tl.maximum(token, 0)) * R + r
    return tl.load(lists + line * n + slot, mask=slot < tl.where(token < T, n, 0), other=-1)


@triton.jit(do_not_specialize=["T", "start", "limit"])
def unite_kernel(
    lists, entries, counts, starts, start, T, R, n, limit, cost,
    LISTS: tl.constexpr, STRIDE: tl.constexpr, SLOTS: tl.constexpr, RAGGED: tl.constexpr,
    FLIPPED: tl.constexpr,
):  # fmt: skip
    """One program: a group of LISTS lists, none of which holds a block twice. Writes its union
    where that has fewer than 1 / cost of the lists' blocks, and its size, or else 0."""
    group, pair, groups, _pairs = grid_place(FLIPPED)
    b, r = (pair // R).to(tl.int64), pair % R
    if RAGGED:
        start = tl.load(starts + b).to(tl.int32)
    first = group * (LISTS * STRIDE) - start % STRIDE
    number = tl.arange(0, LISTS * SLOTS) // SLOTS
    c = list_blocks(
        lists, b, r, first + number * STRIDE, tl.arange(0, LISTS * SLOTS) % SLOTS, T, R, n
    )
    held = tl.zeros([LISTS * SLOTS], tl.int32)
    for other in range(0, LISTS):
        its = list_blocks(lists, b, r, first + other * STRIDE, tl.arange(0, SLOTS), T, R, n)
        held |= tl.max((c[:, None] == its[None]).to(tl.int32), 1) << other

    # an entry stands for its block in the first list that holds it
    leads = ((c >= 0) & ((held & ((1 << number) - 1)) == 0)).to(tl.int32)
    size = tl.sum(leads, 0)
    size = tl.where(size * cost < tl.sum((c >= 0).to(tl.int32), 0), size, 0)
    line = pair.to(tl.int64) * groups + group
    at = line * limit + tl.cumsum(leads, 0) - 1
    tl.store(entries + at, (held.to(tl.int64) << 32) | c, mask=leads * size > 0)
    tl.store(counts + line, size)


def unite(selection: Selection, H: int, dtype: torch.dtype) -> Unions | None:
    """Unions of the lists of a call with H query heads; None where they cannot pay."""
    B, T, R, n = selection.lists.shape
    rule = launch.uniting(H // R * selection.stride, dtype)
    if rule is None or selection.gates is not None or not n:
        return None
    groups = triton.cdiv(selection.aligned, rule.lists * selection.stride)
    slots = triton.next_power_of_2(n)
    few = B * R * groups < rule.least
    if few or rule.lists * slots * slots > MOST_PAIRS:
        return None
    # as many as pay at most
    limit = min(int(rule.lists * n / rule.cost) + 1, rule.lists * n)
    entries = selection.lists.new_empty(B, R, groups, limit, dtype=torch.int64)
    counts = selection.lists.new_empty(B, R, groups, dtype=torch.int32)
    grid, flipped = launch.grid(groups, B * R)
    unite_kernel[grid](
        selection.lists, entries, counts, selection.starts, selection.start, T, R, n, limit,
        float(rule.cost), LISTS=rule.lists, STRIDE=selection.stride, SLOTS=slots,
        RAGGED=selection.starts is not None, FLIPPED=flipped,
        num_warps=1 if rule.lists * slots <= 64 else 4,
    )  # fmt: skip
    return Unions(entries, counts, rule.lists)


def others(selection: Selection, unions: Unions) -> Selection:
    """The selection without the lists of united groups, which become empty."""
    T, stride = selection.lists.shape[1], selection.stride
    token = torch.arange(T, device=selection.lists.device)
    start = selection.start if selection.starts is None else selection.starts[:, None]
    group = ((token + start % stride) // (stride * unions.lists)).long().view(-1, 1, T)
    united = (unions.counts > 0).gather(2, group.expand(*unions.counts.shape[:2], T))
    lists = selection.lists.masked_fill(united.transpose(1, 2)[..., None], -1)
    return replace(selection, lists=lists)
