"""A cache of fixed size in a graph that is compiled: the device alone knows the rows' lengths, and
no shape depends on them.

    b  rows    h  KV heads    n  new tokens, or windows    d  width    l  tokens of a window

Streams are handed out whole, as many entries as their storage has, with zeros behind the end of a
row. The host's `lengths` are asked for when next read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .entries import check_full
from .kv_cache import KVCache


class Places(NamedTuple):
    """Where rows take `new` tokens: from position `starts` [b] on, `counts` [b] of them each, all
    where that is None."""

    starts: Tensor
    counts: Tensor | None
    new: int

    def ends(self) -> Tensor:
        return self.starts + (self.new if self.counts is None else self.counts)

    def slots(self, size: int, every: int) -> tuple[Tensor, Tensor | None]:
        """Of the entries that the new tokens may complete, one for each `every` and `size` at most,
        the slots [b n] modulo `size`; and which are there, None for all."""
        i = torch.arange(min(size, -(-self.new // every)), device=self.starts.device)
        entry = (self.starts // every)[:, None] + i
        there = None
        if every > 1 or self.counts is not None:
            there = (entry + 1) * every <= self.ends()[:, None]
        return entry % size, there


@torch.library.custom_op("native_sparse_attention::places", mutates_args=())
def starts_of(lengths: Tensor, counts: Tensor | None, new: int, max_length: int) -> Tensor:
    """Where rows of these lengths go on, int64, if `counts` of `new` more tokens fit. A GPU checks
    it by an assertion of its own, for which nobody waits."""
    taken = torch.full_like(lengths, new) if counts is None else counts
    if lengths.device.type == "cpu":
        numbers = taken.tolist()
        if any(n < 0 or n > new for n in numbers):
            raise ValueError(
                f"lengths must be {len(numbers)} integers between 0 and {new} (the new tokens), "
                f"got {numbers}"
            )
        check_full(max_length, lengths.tolist(), numbers)
    elif lengths.is_cuda:
        fits = (taken >= 0) & (taken <= new) & (lengths + taken <= max_length)
        torch._assert_async(fits.all(), "cache is full, or lengths are not between 0 and n")
    return lengths.to(torch.int64, copy=True)


@starts_of.register_fake
def _(lengths, counts, new, max_length):
    return lengths.new_empty(lengths.shape, dtype=torch.int64)


def places(cache: KVCache, inp: Tensor, lengths: Sequence[int] | Tensor | None) -> Places:
    """Where the rows of a cache take tokens [b n ..].

    Raises:
        ValueError: another number of rows, lengths that are no integers [b], or a full cache (on a
            GPU an assertion of the device).
    """
    b, n = inp.shape[:2]
    if cache.batch is not None and cache.batch != b:
        raise ValueError(f"cache holds {cache.batch} rows but the input has {b}")
    counts = None
    if lengths is not None:
        counts = lengths if isinstance(lengths, Tensor) else torch.tensor(lengths)
        if counts.shape != (b,) or counts.is_floating_point() or counts.dtype == torch.bool:
            raise ValueError(
                f"lengths must be {b} integers, got {counts.dtype} of shape {list(counts.shape)}"
            )
        counts = counts.to(inp.device)
    if "lengths" not in cache._known:
        with torch.inference_mode(False):
            cache._known["lengths"] = torch.zeros(b, dtype=torch.int32, device=inp.device)
    starts = starts_of(cache._known["lengths"], counts, n, cache.max_length or 0)
    return Places(starts, counts, n)


def write(store: Tensor, new: Tensor, slots: Tensor, there: Tensor | None) -> None:
    """store[row, :, slots[row, i]] = new[row, :, i] where that is there; no slot comes twice."""
    index, values = prepared(store, new.detach(), slots, there)
    store.scatter_(2, index, values)


def prepared(
    held: Tensor, new: Tensor, slots: Tensor, there: Tensor | None
) -> tuple[Tensor, Tensor]:
    index = slots[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3])
    if there is None:
        return index, new
    return index, torch.where(there[:, None, :, None], new, held.gather(2, index))


def append(cache: KVCache, new: dict[str, Tensor], at: Places, every: int = 1) -> dict[str, Tensor]:
    """`KVCache.append`."""
    stores = cache._hold(new, [0] * len(at.starts), every)
    size, streams = (cache.max_length or 0) // every, {}
    behind = torch.arange(size, device=at.starts.device) >= (at.ends() // every)[:, None]
    for name, entries in new.items():
        store = stores[name]
        if size == 0:
            streams[name] = store
            continue
        # more than there is room for can only be padding
        entries = entries[:, :, :size]
        slots, there = at.slots(size, every)
        write(store, entries, slots, there)
        held = store.masked_fill(behind[:, None, :, None], 0)
        if torch.is_grad_enabled() and entries.requires_grad:
            held = held.scatter(2, *prepared(held, entries, slots, there))
        streams[name] = held
    return streams


def recent(cache: KVCache, name: str, at: Places, length: int) -> Tensor:
    """`KVCache.recent`."""
    tail = cache._tail[name]
    position = at.starts[:, None] - length + torch.arange(length, device=tail.device)
    slots = (position % max(1, tail.shape[2]))[:, None, :, None]
    entries = tail.gather(2, slots.expand(-1, tail.shape[1], -1, tail.shape[3]))
    return entries.masked_fill((position < 0)[:, None, :, None], 0)


def windows(
    cache: KVCache, new: dict[str, Tensor], at: Places, l: int, d: int
) -> dict[str, Tensor]:
    """The windows [b h w l d] that new entries [b h n d] may complete, behind those of their
    tails."""
    cache.ring(new, l - 1)
    most = min(-(-at.new // d), (cache.max_length or 0) // d)
    device = at.starts.device
    # the next window begins d - 1 - start % d into the last l - 1 tokens and the new ones
    first = (d - 1 - at.starts % d)[:, None] + d * torch.arange(most, device=device)
    index = (first[..., None] + torch.arange(l, device=device)).clamp(max=l - 2 + at.new)
    found = {}
    for name, t in new.items():
        seen = torch.cat((recent(cache, name, at, l - 1), t), dim=2)
        every = index.flatten(1)[:, None, :, None].expand(-1, t.shape[1], -1, t.shape[3])
        found[name] = seen.gather(2, every).unflatten(2, (most, l))
    return found


def keep_recent(cache: KVCache, new: dict[str, Tensor], at: Places, length: int) -> None:
    """`KVCache.keep_recent`."""
    tails = cache.ring(new, length)
    size = length + cache.rollback
    if size == 0 or at.new == 0:
        return
    token = torch.arange(min(at.new, size), device=at.starts.device) - min(at.new, size)
    token = (at.ends() - at.starts)[:, None] + token
    slots = (at.starts[:, None] + token) % size
    index = token.clamp(min=0)[:, None, :, None]
    for name, t in new.items():
        last = t.gather(2, index.expand(-1, t.shape[1], -1, t.shape[3]))
        write(tails[name], last, slots, None if at.counts is None else token >= 0)


def advance(cache: KVCache, at: Places) -> None:
    """Count the tokens appended, on the device alone."""
    cache._known["lengths"].add_(at.new if at.counts is None else at.counts)
    cache.is_counted_by(len(at.starts))


def hide_padding(t: Tensor, at: Places) -> Tensor:
    """[b n d] with 0 for tokens that a row did not take."""
    if at.counts is None:
        return t
    padding = torch.arange(at.new, device=t.device) >= at.counts[:, None]
    return t.masked_fill(padding[..., None], 0)
