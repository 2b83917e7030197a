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
import weakref
from collections.abc import Callable, Sequence
from operator import add
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks.scalars import TOO_MANY, as_int, check_device, check_int, check_ints
from .entries import (
    check_entries,
    check_full,
    counts_of,
    differentiable,
    fill,
    first_device,
    hide_behind,
    integers,
    pick,
    places_of,
    put,
    row_numbers,
    zeros,
)
from .identity import Identity
from .rows import Rows


class KVCache(Rows):
    """Keys and values of one attention layer, for any number of rows of different lengths.

    Storage is allocated when the layer first appends, and doubles (to powers of two) as rows grow,
    so that a step never copies what is already there; with `max_length` it is allocated once, and a
    full cache raises before anything is written. It is updated in place; `clone()` keeps a copy.
    While nothing grows and the number of rows stays, so does every tensor: a CUDA graph may use it.

    It belongs to the layer that first used it, and to its geometry, until all rows are empty: what
    another layer keeps means something else. A clone or a deepcopy belongs to the same layer (and a
    deepcopy of layer and cache together to the copied one); after a pickle the next layer of that
    geometry takes it.

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
        super().__init__(batch)
        self.rollback = check_int("rollback", rollback, 0)
        self._streams: dict[str, Tensor] = {}
        self._tail: dict[str, Tensor] = {}
        self._layer: weakref.ref[Identity] | None = None
        self._geometry: dict[str, Any] = {}

    def __bool__(self) -> bool:
        return True  # an empty cache is a cache

    def __repr__(self) -> str:
        limit = "" if self.max_length is None else f", max_length={self.max_length}"
        return f"{type(self).__name__}(lengths={self.lengths}{limit}, nbytes={self.nbytes})"

    @property
    def nbytes(self) -> int:
        return sum(self.memory().values())

    def memory(self) -> dict[str, int]:
        """Bytes allocated, by name: of each stream, of each tail ("tail k"), of what the device
        knows of the rows ("lengths", after `lengths_on`; "page_table", of a paged cache), and of
        the "workspace" of kernels."""
        tensors = self._tensors()
        if not self._is_asked:
            tensors.pop("lengths", None)  # a fixed cache has them at hand, b numbers
        return {name: t.nbytes for name, t in tensors.items()}

    @property
    def is_fixed(self) -> bool:
        return self.max_length is not None and self.page_size is None

    @property
    def device(self) -> torch.device | None:
        return first_device(self._streams, self._tail, self._known)

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

    def bind(self, layer: Identity, geometry: dict[str, Any], new: dict[str, Tensor]) -> None:
        """Hold the cache to the layer that uses it, which is about to append entries like `new`.

        Raises:
            ValueError: it holds tokens of another layer, or those of another geometry.
        """
        if self._is_of(layer, geometry):
            return
        if any(self.lengths):
            check_entries(self._streams, new, len(self.lengths), self.device)
            self.check_layer(layer, geometry)
        elif geometry != self._geometry:
            self._streams, self._tail = {}, {}
        self._layer, self._geometry = weakref.ref(layer), geometry

    def _is_of(self, layer: Identity, geometry: dict[str, Any]) -> bool:
        of_it = self._layer is not None and self._layer() is layer
        return of_it and geometry == self._geometry

    def check_layer(self, layer: Identity, geometry: dict[str, Any]) -> None:
        """Whether a layer may use the cache.

        Raises:
            ValueError: it holds tokens of another layer, or those of another geometry.
        """
        if self._is_of(layer, geometry) or not any(self.lengths):
            return
        for name in (*self._geometry, *geometry) if self._geometry else ():
            held, got = (g.get(name) for g in (self._geometry, geometry))
            if held != got:
                raise ValueError(
                    f"cache holds tokens of a layer with {name}={held}, this one has {name}={got}: "
                    "each layer needs a cache of its own"
                )
        if self._layer is not None:
            raise ValueError(
                "cache holds tokens of another layer (which a deepcopy of a layer is too): each "
                "layer needs a cache of its own, or one that was reset"
            )

    def append(
        self,
        new: dict[str, Tensor],
        starts: list[int],
        counts: list[int],
        every: int = 1,
        saved: bool = False,
    ) -> dict[str, Tensor]:
        """Write entries [b h n d], one for each `every` tokens, to their streams: `counts[row]` of
        them from `starts[row]` on.

        Returns each stream up to its last entry, zeros behind the end of a row: views of the
        storage where all rows have one length and no gradients flow to the new entries. `saved`:
        copies in any case, as autograd needs of what it saves while later calls write.
        """
        check_full(self.max_length, starts, counts, every)
        ends = [a + n for a, n in zip(starts, counts, strict=True)]
        stores = self._hold(new, ends, every)
        streams = {}
        for name, entries in new.items():
            self._write(stores[name], entries.detach(), starts, counts)
            grows = torch.is_grad_enabled() and entries.requires_grad
            held = self._read(stores[name], ends, saved and not grows)
            streams[name] = differentiable(held, entries, starts, counts) if grows else held
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

    def __copy__(self) -> KVCache:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        other = self.clone()
        copied = None if self._layer is None else memo.get(id(self._layer()))
        other._layer = self._layer if copied is None else weakref.ref(copied)
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_layer": None, "_lengths": self.lengths, "_is_behind": False}

    # storage

    def _tensors(self) -> dict[str, Tensor]:
        tails = {f"tail {name}": t for name, t in self._tail.items()}
        return {**self._streams, **tails, **self._known}

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self._streams = {name: fn(t) for name, t in self._streams.items()}
            self._tail = {name: fn(t) for name, t in self._tail.items()}
            self._known = {name: fn(t) for name, t in self._known.items()}

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

    def _read(self, store: Tensor, ends: list[int], copied: bool) -> Tensor:
        """A stream up to its last entry, [b h max(ends) d]; 0 behind the end of a row, where there
        may be what it held before. A view where it can be, unless a copy is asked for."""
        entries = store[:, :, : max(ends, default=0)]
        return hide_behind(entries.clone() if copied else entries, ends)

    def _reorder_streams(self, index: list[int]) -> None:
        self._streams = {name: pick(t, index) for name, t in self._streams.items()}
