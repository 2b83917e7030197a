"""KVCache: what a layer keeps of the tokens it has seen, preallocated, appended to in place.

    b  batch    h  KV heads (or ranking heads)    n  tokens, or windows    d  width

A token stream (keys, values) holds one entry a token, a window stream (compressed keys and values)
one a compression window, and the tail the last raw keys and values, of which the next window is
made.

Who writes entries in kernels of his own takes the storage of `room` and `ring`, writes the entry of
the token at position p to slot p of a token stream, of window w to slot w of a window stream, and
to slot `p mod size` of a tail, and counts the tokens. `lengths_on` has the rows' lengths for them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from operator import add
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .entries import (
    check_entries,
    check_full,
    counts_of,
    differentiable,
    fill,
    integers,
    pick,
    places_of,
    put,
    row_numbers,
    zeros,
)
from .ops.scalars import TOO_MANY, as_int, check_device, check_int, check_ints


class KVCache:
    """Keys and values of one attention layer, for any number of rows of different lengths.

    Storage is allocated when the layer first appends, and doubles (to powers of two) as rows grow,
    so that a step never copies what is already there; with `max_length` it is allocated once, and a
    full cache raises before anything is written. It is updated in place; `clone()` keeps a copy.
    While nothing grows and the number of rows stays, so does every tensor: a CUDA graph may use it.

    Args:
        max_length: tokens a row may hold; None grows without limit.
        batch: rows; None takes the batch of the first call.
        rollback: how many tokens back `truncate` reaches at least. It keeps that many raw keys and
            values more (`rollback=max_length` reaches everywhere); 0 tokens is always in reach.

    Raises:
        ValueError: a size that is not an integer of at least 1 (rollback: 0).
    """

    page_size: int | None = None

    def __init__(self, max_length: int | None = None, batch: int | None = None, rollback: int = 64):
        if max_length is not None:
            max_length = check_int("max_length", max_length, 1)
        if batch is not None:
            batch = check_int("batch", batch, 1, TOO_MANY)
        self.max_length = max_length
        self.batch = batch
        self.rollback = check_int("rollback", rollback, 0)
        self.lengths: list[int] = [] if batch is None else [0] * batch
        self._reached = list(self.lengths)  # most tokens that a row has ever held
        self._streams: dict[str, Tensor] = {}
        self._tail: dict[str, Tensor] = {}
        self._known: dict[str, Tensor] = {}  # the device's copy: "lengths", "page_table"
        self.counts_itself = False  # whether the device counted the tokens that came last

    def __len__(self) -> int:
        """Tokens in the longest row."""
        return max(self.lengths, default=0)

    def __bool__(self) -> bool:
        return True  # an empty cache is a cache

    def __repr__(self) -> str:
        limit = "" if self.max_length is None else f", max_length={self.max_length}"
        return f"{type(self).__name__}(lengths={self.lengths}{limit}, nbytes={self.nbytes})"

    @property
    def is_uniform(self) -> bool:
        """Whether all rows have one length."""
        return len(set(self.lengths)) <= 1

    @property
    def nbytes(self) -> int:
        return sum(self.memory().values())

    def memory(self) -> dict[str, int]:
        """Bytes allocated, by name: of each stream, of each tail ("tail k"), of what the device
        knows of the rows ("lengths", after `lengths_on`; "page_table", of a paged cache), and of
        the "workspace" of kernels."""
        return {name: t.nbytes for name, t in self._tensors().items()}

    @property
    def device(self) -> torch.device | None:
        groups = self._streams, self._tail, self._known
        return next((t.device for group in groups for t in group.values()), None)

    @property
    def page_table(self) -> Tensor | None:
        """Where the pages of each row lie; None where there are none."""
        return self._known.get("page_table")

    def lengths_on(self, device: torch.device | str) -> Tensor:
        """The rows' lengths on a device, int32 [b]: one tensor while the number of rows stays,
        which follows `lengths` through all but `count`.

        Raises:
            ValueError: a cache on another device, or one that has no rows yet.
        """
        if self.batch is None:
            raise ValueError("cache has no rows yet, and no lengths: construct it with batch=...")
        wanted = check_device("device", device)
        held = self.device or wanted
        if wanted.type != held.type or wanted.index not in (None, held.index):
            raise ValueError(f"cache is on {held}, got {wanted} for its lengths")
        if "lengths" not in self._known:
            with torch.inference_mode(False):
                lengths = torch.tensor(self.lengths, dtype=torch.int32)
                self._known["lengths"] = lengths.to(held)
        return self._known["lengths"]

    def workspace(self, device: torch.device | str, *size: int) -> Tensor:
        """int32 zeros [b, *size] on a device, for kernels that leave them so: one tensor while the
        number of rows stays."""
        rows = self.lengths_on(device)
        held = self._known.get("workspace")
        if held is None or held.shape != (len(rows), *size):
            with torch.inference_mode(False):
                held = self._known["workspace"] = rows.new_zeros(len(rows), *size)
        return held

    def positions(self, device: torch.device, counts: list[int], new: int) -> int | Tensor:
        """Where each row goes on: an int where all rows have one length and the longest takes all
        `new` tokens, else a tensor [b]."""
        if counts and max(counts) == new and self.is_uniform:
            return len(self)
        return torch.tensor(self.starts(len(counts)), dtype=torch.long, device=device)

    # appending: a layer writes to its streams, then counts the tokens with `advance`

    def check(self, batch: int, new: int, lengths: Sequence[int] | Tensor | None) -> list[int]:
        """How many of `new` tokens each row takes; raises before anything is written."""
        if not self.lengths:
            # storage of a first call that failed half-way
            self._streams, self._tail = {}, {}
        if self.batch is not None and self.batch != batch:
            raise ValueError(f"cache holds {self.batch} rows but the input has {batch}")
        counts = counts_of(batch, new, lengths)
        check_full(self.max_length, self.starts(batch), counts)
        return counts

    def starts(self, batch: int) -> list[int]:
        """Tokens that each row holds, also before the first call."""
        return self.lengths or [0] * batch

    def append(
        self, new: dict[str, Tensor], starts: list[int], counts: list[int], every: int = 1
    ) -> dict[str, Tensor]:
        """Write entries [b h n d], one for each `every` tokens, to their streams: `counts[row]` of
        them from `starts[row]` on.

        Returns each stream up to its last entry: views of the storage where it lies in one piece
        and no gradients flow to the new entries.
        """
        check_full(self.max_length, starts, counts, every)
        ends = [a + n for a, n in zip(starts, counts, strict=True)]
        stores = self._hold(new, ends, every)
        streams = {}
        for name, entries in new.items():
            self._write(stores[name], entries.detach(), starts, counts)
            streams[name] = self._read(stores[name], ends)
            if torch.is_grad_enabled() and entries.requires_grad:
                streams[name] = differentiable(streams[name], entries, starts, counts)
        return streams

    def room(self, new: dict[str, Tensor], counts: list[int], every: int = 1) -> dict[str, Tensor]:
        """Storage of streams with one entry for each `every` tokens, in which `counts[row]` more
        tokens fit, for entries like `new` [b h n d] (any n): [b h capacity d]. Nothing is written.

        Raises:
            ValueError: a full cache, or entries that do not fit what it holds.
        """
        self._check_counts(counts)
        check_ints(1, every=every)
        starts = self.starts(len(counts))
        check_full(self.max_length, starts, counts)
        ends = [n // every for n in map(add, starts, counts)]
        return self._hold(new, ends, every)

    def ring(self, new: dict[str, Tensor], length: int) -> dict[str, Tensor]:
        """Storage of tails that keep `length` entries like `new` [b h n d] (any n), and `rollback`
        more: [b h length+rollback d]. Nothing is written."""
        size = length + self.rollback
        for name, entries in new.items():
            check_entries(self._tail, {name: entries}, self.batch or len(entries), self.device)
            held = self._tail[name].shape[2] if name in self._tail else size
            if held != size:
                raise ValueError(
                    f"cache keeps the last {held} of {name}, not {size}: is it another layer's?"
                )
        for name, entries in new.items():
            if name not in self._tail:
                self._tail[name] = zeros(entries, len(entries), size)
        return {name: self._tail[name] for name in new}

    def recent(self, name: str, length: int) -> Tensor:
        """The last `length` entries of a tail, [b h length d]; zeros stand for those before the
        first token."""
        tail = self._tail[name]
        at = torch.tensor(self.lengths)[:, None] - length + torch.arange(length)
        slots = (at % max(1, tail.shape[2])).to(tail.device)[:, None, :, None]
        entries = tail.gather(2, slots.expand(-1, tail.shape[1], -1, tail.shape[3]))
        return entries.masked_fill((at < 0).to(tail.device)[:, None, :, None], 0)

    def with_recent(self, new: dict[str, Tensor], length: int) -> dict[str, Tensor]:
        """New entries [b h n d] behind the last `length` entries of their tails."""
        return {
            name: torch.cat((self.recent(name, length), t), dim=2)
            if name in self._tail
            else F.pad(t, (0, 0, length, 0))
            for name, t in new.items()
        }

    def keep_recent(self, new: dict[str, Tensor], counts: list[int], length: int) -> None:
        """Remember the last `length` entries [b h n d] of each row, and `rollback` more: the entry
        of the token at position p lies in slot `p mod size`."""
        tails = self.ring(new, length)
        size = length + self.rollback
        starts = self.starts(len(counts))
        rows, places, at = places_of(starts, counts, [max(0, n - size) for n in counts])
        for name, entries in new.items():
            put(tails[name], rows, places % max(1, size), entries.detach(), at)

    def count(self, counts: list[int]) -> None:
        """Count the tokens appended, on the host alone: whoever appended them adds `counts` to the
        tensor of `lengths_on` himself."""
        self._check_counts(counts)
        self.counts_itself = True
        self.lengths = list(map(add, self.starts(len(counts)), counts))
        self.batch = len(counts)
        self._reached = list(map(max, self._reached or counts, self.lengths))

    def advance(self, counts: list[int]) -> None:
        """Count the tokens appended."""
        self.count(counts)
        self.counts_itself = False
        self._tell_lengths()

    @staticmethod
    def zero_padding(out: Tensor, counts: list[int]) -> Tensor:
        """Zero the output [b n d] of tokens that a row did not take."""
        if all(n == out.shape[1] for n in counts):
            return out
        padding = torch.arange(out.shape[1]) >= torch.tensor(counts)[:, None]
        return out.masked_fill(padding.to(out.device)[..., None], 0.0)

    # managing rows

    def truncate(self, lengths: int | Sequence[int] | Tensor) -> None:
        """Forget all but the first `lengths` tokens of every row (an int, or one for each row).

        Raises:
            ValueError: more tokens than a row has, or fewer than `rollback` lets it go back to.
        """
        several: Any = lengths
        rows, one = len(self.lengths), as_int(lengths)
        wanted = integers("lengths", several) if one is None else [one] * rows
        if len(wanted) != rows:
            raise ValueError(f"lengths must be one integer or {rows} of them, got {len(wanted)}")
        for row, new in enumerate(wanted):
            held, reached = self.lengths[row], self._reached[row]
            if not 0 <= new <= held:
                raise ValueError(f"lengths[{row}] must be between 0 and {held}, got {new}")
            if self._tail and 0 < new < reached - self.rollback:
                raise ValueError(
                    f"lengths[{row}]={new} is out of reach: the row has held {reached} tokens, of "
                    f"which rollback={self.rollback} can be taken back (or all). Build the cache "
                    "with a larger rollback"
                )
        self.lengths = wanted
        self._reached = [0 if n == 0 else r for n, r in zip(wanted, self._reached, strict=True)]
        self._tell_lengths()

    def reset(self, rows: Sequence[int] | Tensor | None = None) -> None:
        """Forget all tokens of all rows, or of those listed, whose places new sequences can take;
        the storage stays.

        Raises:
            ValueError: a row that is not there.
        """
        gone = range(len(self.lengths)) if rows is None else row_numbers(rows, len(self.lengths))
        self.truncate([0 if row in gone else n for row, n in enumerate(self.lengths)])

    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        """Make row r a copy of the former row `rows[r]`, as beam search does; the number of rows
        may change.

        Raises:
            ValueError: a row that is not there.
        """
        index = row_numbers(rows, len(self.lengths))
        with torch.inference_mode(False), torch.no_grad():
            self._reorder_streams(index)
            self._tail = {name: pick(t, index) for name, t in self._tail.items()}
            self.lengths = [self.lengths[r] for r in index]
            self._reached = [self._reached[r] for r in index]
            self.batch = len(index)
            self._tell_lengths()

    def to(self, device: torch.device | str) -> KVCache:
        """Move the storage to a device; returns self."""
        where = check_device("device", device)
        self._apply(lambda t: t.to(where))
        return self

    def clone(self) -> KVCache:
        """A copy that shares nothing with this cache."""
        other = copy.copy(self)
        other.lengths, other._reached = list(self.lengths), list(self._reached)
        other._apply(lambda t: t.clone())
        return other

    # storage

    def _tensors(self) -> dict[str, Tensor]:
        tails = {f"tail {name}": t for name, t in self._tail.items()}
        return {**self._streams, **tails, **self._known}

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self._streams = {name: fn(t) for name, t in self._streams.items()}
            self._tail = {name: fn(t) for name, t in self._tail.items()}
            self._known = {name: fn(t) for name, t in self._known.items()}

    def _tell_lengths(self) -> None:
        """Bring the device's copy of `lengths` up to date."""
        held = self._known.get("lengths")
        if held is None:
            return
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        if len(held) == len(lengths):
            held.copy_(lengths, non_blocking=True)
        else:
            self._known["lengths"] = lengths.to(held.device)

    def _hold(self, new: dict[str, Tensor], ends: list[int], every: int) -> dict[str, Tensor]:
        """Storage of streams in which `ends[row]` entries like `new` fit."""
        check_entries(self._streams, new, len(ends), self.device)
        for name, entries in new.items():
            self._streams[name] = self._storage(name, entries, max(ends, default=0), every)
        return {name: self._streams[name] for name in new}

    def _storage(self, name: str, like: Tensor, end: int, every: int) -> Tensor:
        """The storage of one stream, grown to hold `end` entries a row."""
        store = self._streams.get(name)
        if store is not None and end <= store.shape[2]:
            return store
        doubled = 1 << max(0, end - 1).bit_length()
        size = doubled if self.max_length is None else self.max_length // every
        grown = zeros(like, len(like), size)
        if store is not None:
            grown[:, :, : store.shape[2]] = store
        return grown

    def _write(self, store: Tensor, new: Tensor, starts: list[int], counts: list[int]) -> None:
        """Put `counts[row]` entries [b h n d] in their places from `starts[row]` on."""
        fill(store, new, starts, counts)

    def _read(self, store: Tensor, ends: list[int]) -> Tensor:
        """A stream up to its last entry, [b h max(ends) d]."""
        return store[:, :, : max(ends, default=0)]

    def _reorder_streams(self, index: list[int]) -> None:
        self._streams = {name: pick(t, index) for name, t in self._streams.items()}

    def _check_counts(self, counts: list[int]) -> None:
        rows = len(counts) if self.batch is None else self.batch
        if len(counts) != rows or min(counts, default=0) < 0:
            raise ValueError(f"counts must be {rows} integers of at least 0, got {counts}")
