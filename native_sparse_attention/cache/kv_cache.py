"""KVCache: keys and values of one attention layer, preallocated and appended to in place.

    b  sequences    h  KV heads (or ranking heads)    n  tokens, or windows    d  head dimension

A token stream (keys, values) has one entry per token, a window stream (compressed keys and values)
one entry per compression window. A tail is a ring buffer of the last raw keys and values, from
which the next compression window is formed.

A kernel that appends by itself gets the storage from `room` and `ring` and the sequence lengths
from `lengths_on`. It writes the token at position p to slot p of a token stream and to slot
`p mod size` of a tail, writes window w to slot w of a window stream, and adds the tokens to the
lengths.
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
from .identity import Identity
from .layout import (
    allocate_zeros,
    append_differentiably,
    check_capacity,
    check_entries,
    first_device,
    integers,
    new_token_counts,
    select_sequences,
    sequence_indices,
    slot_mapping,
    write_entries,
    write_slots,
    zero_past_end,
)
from .sequences import Sequences


def with_room(entries: int) -> int:
    """Entries of a storage that grows: few copies, and little memory that nothing uses."""
    return entries + entries // 8 if entries > 1024 else 1 << max(0, entries - 1).bit_length()


class KVCache(Sequences):
    """Keys and values of one attention layer, for a batch of sequences of different lengths.

    Storage is allocated when the layer first appends, and grows with the sequences: to a power of
    two of up to 1024 tokens, then to an eighth more than is needed. With `max_length` it is
    allocated once, and an append to a full cache raises before anything is written. The cache is
    updated in place; `clone()` copies it. Its tensors stay the same while the storage does not grow
    and the batch size does not change, so a CUDA graph can use them.

    A cache belongs to the layer that first used it, and to the layer's geometry, until all
    sequences are empty. A clone or a deepcopy belongs to the same layer. A deepcopy of layer and
    cache together belongs to the copied layer. An unpickled cache belongs to the next layer of its
    geometry that uses it.

    Args:
        max_length: the most tokens of a sequence; None: unlimited.
        batch: number of sequences; None: the batch size of the first call.
        rollback: number of tokens that `truncate` can always remove. The tails keep `rollback` more
            raw keys and values for this (`rollback=max_length` allows any length). Truncation to 0
            tokens is always possible.

    Raises:
        ValueError: a size that is not an integer of at least 1 (rollback: 0).
    """

    page_size: int | None = None
    # each sequence holds at least so many tokens: the layer's `dense_length`, or 0. Compiled steps,
    # which do not know the lengths, only add tokens
    least_length = 0
    # of a deepcopy: the copy of the layer, while there is one
    _copied: weakref.ref[Identity] | None = None

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
        """Bytes allocated, by name: each stream, each tail ("tail k"), the sequence lengths on the
        device ("lengths", after `lengths_on`), the "page_table" of a paged cache, and the
        "workspace" of kernels."""
        tensors = self.tensors()
        if not self._is_asked:
            tensors.pop("lengths", None)  # b numbers, which a fixed cache allocates early
        return {name: t.nbytes for name, t in tensors.items()}

    @property
    def is_fixed(self) -> bool:
        return self.max_length is not None and self.page_size is None

    @property
    def device(self) -> torch.device | None:
        return first_device(self._streams, self._tail, self._known)

    # appending: a layer writes to its streams, then calls `advance` to count the tokens

    def check(self, batch: int, new: int, lengths: Sequence[int] | Tensor | None) -> list[int]:
        """How many of `new` tokens each sequence takes; raises before anything is written."""
        if not self.lengths:
            # drop the storage of a first call that raised
            self._streams, self._tail = {}, {}
        if self.batch is not None and self.batch != batch:
            raise ValueError(f"cache holds {self.batch} rows but the input has {batch}")
        counts = new_token_counts(batch, new, lengths)
        check_capacity(self.max_length, self.starts(batch), counts)
        return counts

    def bind(self, layer: Identity, geometry: dict[str, Any], new: dict[str, Tensor]) -> None:
        """Bind the cache to the layer that is about to append entries like `new`.

        Raises:
            ValueError: the cache holds tokens of another layer or of another geometry.
        """
        held = self._streams
        fits = all(
            t.dtype == held[name].dtype and t.device == held[name].device
            for name, t in new.items()
            if name in held
        )
        if fits and self._is_bound_to(layer, geometry):
            if self._copied is not None and self._copied() is layer:
                self._layer, self._copied = self._copied, None
            return
        if any(self.lengths):
            check_entries(self._streams, new, len(self.lengths), self.device)
            self.check_layer(layer, geometry)
        elif not fits or geometry != self._geometry:
            self._streams, self._tail = {}, {}
            if not fits:  # of another device
                device = next(iter(new.values())).device
                self._known = {name: t.to(device) for name, t in self._known.items()}
        self._layer, self._copied, self._geometry = weakref.ref(layer), None, dict(geometry)

    def _is_bound_to(self, layer: Identity, geometry: dict[str, Any]) -> bool:
        return self._owner() is layer and geometry == self._geometry

    def _owner(self) -> Identity | None:
        """The layer that the cache is bound to, while it lives."""
        layer = None if self._copied is None else self._copied()
        if layer is None and self._layer is not None:
            layer = self._layer()
        return layer

    def check_layer(self, layer: Identity, geometry: dict[str, Any]) -> None:
        """Check that a layer may use the cache.

        Raises:
            ValueError: the cache holds tokens of another layer or of another geometry.
        """
        if self._is_bound_to(layer, geometry) or not any(self.lengths):
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
        """Write entries [b h n d], each of `every` tokens, to their streams.

        Sequence b writes its first `counts[b]` entries, from entry `starts[b]` of the stream on.
        Returns each stream up to its last entry, with zeros past the end of each sequence. The
        result is a view of the storage if all sequences have the same length and no gradients flow
        to the new entries. `saved`: always return a copy, because autograd saves the result for the
        backward and later calls overwrite the storage.
        """
        check_capacity(self.max_length, starts, counts, every)
        ends = [a + n for a, n in zip(starts, counts, strict=True)]
        stores = self._allocate(new, ends, every)
        streams = {}
        for name, entries in new.items():
            self._write(stores[name], entries.detach(), starts, counts)
            needs_grad = torch.is_grad_enabled() and entries.requires_grad
            stream = self._read(stores[name], ends, saved and not needs_grad)
            if needs_grad:
                stream = append_differentiably(stream, entries, starts, counts)
            streams[name] = stream
        return streams

    def room(self, new: dict[str, Tensor], counts: list[int], every: int = 1) -> dict[str, Tensor]:
        """Allocate storage for `counts[b]` more tokens of each sequence, without writing to it.

        Returns the storage [b h capacity d] of the streams named in `new`, for entries of `every`
        tokens each that look like `new` [b h n d] (any n).

        Raises:
            ValueError: a full cache, or entries that do not match the streams.
        """
        self._check_counts(counts)
        check_ints(1, every=every)
        starts = self.starts(len(counts))
        check_capacity(self.max_length, starts, counts)
        ends = [n // every for n in map(add, starts, counts)]
        return self._allocate(new, ends, every)

    def ring(self, new: dict[str, Tensor], length: int) -> dict[str, Tensor]:
        """Allocate tails for the last `length + rollback` entries, without writing to them.

        Returns the ring buffers [b h length+rollback d] of the tails named in `new`, for entries
        that look like `new` [b h n d] (any n).
        """
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
                self._tail[name] = allocate_zeros(entries, len(entries), size)
        return {name: self._tail[name] for name in new}

    def recent(self, name: str, length: int) -> Tensor:
        """The last `length` entries of a tail, [b h length d]; zeros before the first token."""
        tail = self._tail[name]
        position = torch.tensor(self.lengths)[:, None] - length + torch.arange(length)
        slots = (position % max(1, tail.shape[2])).to(tail.device)[:, None, :, None]
        entries = tail.gather(2, slots.expand(-1, tail.shape[1], -1, tail.shape[3]))
        return entries.masked_fill((position < 0).to(tail.device)[:, None, :, None], 0)

    def with_recent(self, new: dict[str, Tensor], length: int) -> dict[str, Tensor]:
        """The last `length` entries of the tails, followed by the new entries [b h n d]."""
        return {
            name: torch.cat((self.recent(name, length), t), dim=2)
            if name in self._tail
            else F.pad(t, (0, 0, length, 0))
            for name, t in new.items()
        }

    def keep_recent(self, new: dict[str, Tensor], counts: list[int], length: int) -> None:
        """Write the last `length + rollback` entries [b h n d] of each sequence to the tails.

        The token at position p goes to slot `p mod size`.
        """
        tails = self.ring(new, length)
        size = length + self.rollback
        starts = self.starts(len(counts))
        first = [max(0, n - size) for n in counts]
        sequence, position, source = slot_mapping(starts, counts, first)
        slot = position % max(1, size)
        for name, entries in new.items():
            write_slots(tails[name], sequence, slot, entries.detach(), source)

    @staticmethod
    def zero_padding(out: Tensor, counts: list[int]) -> Tensor:
        """Zero the output [b n d] of padding, the tokens beyond `counts` of each sequence."""
        if all(n == out.shape[1] for n in counts):
            return out
        padding = torch.arange(out.shape[1]) >= torch.tensor(counts)[:, None]
        return out.masked_fill(padding.to(out.device)[..., None], 0.0)

    # managing sequences

    def truncate(self, lengths: int | Sequence[int] | Tensor) -> None:
        """Keep only the first `lengths` tokens of each sequence (an int, or one per sequence).

        Raises:
            ValueError: more tokens than a sequence has, or fewer than `rollback` allows.
        """
        per_sequence: Any = lengths
        batch, one = len(self.lengths), as_int(lengths)
        wanted = integers("lengths", per_sequence) if one is None else [one] * batch
        if len(wanted) != batch:
            raise ValueError(f"lengths must be one integer or {batch} of them, got {len(wanted)}")
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
        self.lengths, self.least_length = wanted, 0
        self._reached = [0 if n == 0 else r for n, r in zip(wanted, self._reached, strict=True)]
        self._update_device_lengths()

    def reset(self, rows: Sequence[int] | Tensor | None = None) -> None:
        """Empty all sequences, or the sequences with indices `rows`, for new sequences.

        The storage stays allocated.

        Raises:
            ValueError: an index that is out of range.
        """
        batch = len(self.lengths)
        emptied = range(batch) if rows is None else sequence_indices(rows, batch)
        self.truncate([0 if row in emptied else n for row, n in enumerate(self.lengths)])

    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        """Replace each sequence b by a copy of sequence `rows[b]`, as beam search does.

        The batch size becomes `len(rows)`.

        Raises:
            ValueError: an index that is out of range.
        """
        index = sequence_indices(rows, len(self.lengths))
        with torch.inference_mode(False), torch.no_grad():
            self._reorder_streams(index)
            self._tail = {name: select_sequences(t, index) for name, t in self._tail.items()}
            self.lengths = [self.lengths[r] for r in index]
            self._reached = [self._reached[r] for r in index]
            self.batch = len(index)
            self._update_device_lengths()

    def to(self, device: torch.device | str) -> KVCache:
        """Move the storage to a device, in place; returns self."""
        target = check_device("device", device)
        self._apply(lambda t: t.to(target))
        return self

    def clone(self) -> KVCache:
        """A copy that shares no storage with this cache."""
        other = self._twin()
        other.lengths, other._reached = list(self.lengths), list(self._reached)
        other._apply(lambda t: t.clone())
        return other

    def __copy__(self) -> KVCache:
        other = self._twin()
        # each counts on the device what the other's host does not see
        self.is_new = other.is_new = False
        return other

    def _twin(self) -> KVCache:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        other = self.clone()
        layer = self._owner()
        if layer is not None:  # its copy, if it is copied too: before this cache or after it
            other._layer = weakref.ref(layer)
            other._copied = weakref.ref(copy.deepcopy(layer, memo))
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "_layer": None,
            "_copied": None,
            "_lengths": self.lengths,
            "_is_behind": False,
        }

    # storage

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by the names of `memory`."""
        tails = {f"tail {name}": t for name, t in self._tail.items()}
        return {**self._streams, **tails, **self._known}

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self._streams = {name: fn(t) for name, t in self._streams.items()}
            self._tail = {name: fn(t) for name, t in self._tail.items()}
            self._known = {name: fn(t) for name, t in self._known.items()}

    def _allocate(self, new: dict[str, Tensor], ends: list[int], every: int) -> dict[str, Tensor]:
        """Storage of the streams in `new`, grown to hold `ends[b]` entries of each sequence."""
        check_entries(self._streams, new, len(ends), self.device)
        for name, entries in new.items():
            self._streams[name] = self._allocate_stream(name, entries, max(ends, default=0), every)
        return {name: self._streams[name] for name in new}

    def _allocate_stream(self, name: str, like: Tensor, end: int, every: int) -> Tensor:
        """Storage of one stream, grown to hold `end` entries per sequence."""
        store = self._streams.get(name)
        if store is not None and end <= store.shape[2]:
            return store
        size = with_room(end) if self.max_length is None else self.max_length // every
        grown = allocate_zeros(like, len(like), size)
        if store is not None:
            grown[:, :, : store.shape[2]] = store
        return grown

    def _write(self, store: Tensor, new: Tensor, starts: list[int], counts: list[int]) -> None:
        """Write the first `counts[b]` entries [b h n d] from slot `starts[b]` on."""
        write_entries(store, new, starts, counts)

    def _read(self, store: Tensor, ends: list[int], copied: bool) -> Tensor:
        """A stream up to its last entry, [b h max(ends) d], with zeros past the end of a sequence.

        The result is a view of the storage if possible, and a copy if `copied`.
        """
        entries = store[:, :, : max(ends, default=0)]
        return zero_past_end(entries.clone() if copied else entries, ends)

    def _reorder_streams(self, index: list[int]) -> None:
        self._streams = {name: select_sequences(t, index) for name, t in self._streams.items()}
