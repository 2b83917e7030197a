"""KVCache: what a layer keeps of the tokens it has seen, preallocated, appended to in place.

    b  batch    h  KV heads (or ranking heads)    n  tokens, or windows    d  width

A token stream (keys, values) holds one entry a token, a window stream (compressed keys and values)
one a compression window, and the tail the last raw keys and values, of which the next window is
made.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


class KVCache:
    """Keys and values of one attention layer, for any number of rows of different lengths.

    Storage is allocated when the layer first appends, and doubles (to powers of two) as rows grow,
    so that a step never copies what is already there; with `max_length` it is allocated once, and a
    full cache raises before anything is written. It is updated in place; `clone()` keeps a copy.

    Args:
        max_length: tokens a row may hold; None grows without limit.
        batch: rows; None takes the batch of the first call.
        rollback: how many tokens back `truncate` reaches at least. It keeps that many raw keys and
            values more (`rollback=max_length` reaches everywhere); 0 tokens is always in reach.

    Raises:
        ValueError: a size that is not an integer of at least 1 (rollback: 0).
    """

    def __init__(self, max_length: int | None = None, batch: int | None = None, rollback: int = 64):
        for name, value, least in (
            ("max_length", max_length, 1),
            ("batch", batch, 1),
            ("rollback", rollback, 0),
        ):
            if value is None and name != "rollback":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        self.max_length = max_length
        self.batch = batch
        self.rollback = rollback
        self.lengths: list[int] = [] if batch is None else [0] * batch
        # how many tokens a row has ever held: its tail reaches back from here
        self._reached: list[int] = list(self.lengths)
        self._streams: dict[str, Tensor] = {}
        self._tail: dict[str, Tensor] = {}

    def __len__(self) -> int:
        """Tokens in the longest row."""
        return max(self.lengths, default=0)

    def __bool__(self) -> bool:
        return True  # an empty cache is a cache

    def __repr__(self) -> str:
        limit = "" if self.max_length is None else f", max_length={self.max_length}"
        return f"KVCache(lengths={self.lengths}{limit}, nbytes={self.nbytes})"

    @property
    def is_uniform(self) -> bool:
        """Whether all rows have one length."""
        return len(set(self.lengths)) <= 1

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._tensors())

    @property
    def device(self) -> torch.device | None:
        return next((t.device for t in self._tensors()), None)

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
        if lengths is None:
            counts = [new] * batch
        else:
            counts = _integers("lengths", lengths)
            if len(counts) != batch or any(n < 0 or n > new for n in counts):
                raise ValueError(
                    f"lengths must be {batch} integers between 0 and {new} (the new tokens), "
                    f"got {counts}"
                )
        if self.max_length is not None:
            for row, (held, count) in enumerate(zip(self.starts(batch), counts, strict=True)):
                if held + count > self.max_length:
                    raise ValueError(
                        f"cache is full: row {row} holds {held} of max_length={self.max_length} "
                        f"tokens, {count} more were given"
                    )
        return counts

    def starts(self, batch: int) -> list[int]:
        """Tokens that each row holds, also before the first call."""
        return self.lengths or [0] * batch

    def append(
        self,
        new: dict[str, Tensor],
        starts: list[int],
        counts: list[int],
        limit: int | None = None,
    ) -> dict[str, Tensor]:
        """Write entries [b h n d] to their streams, `counts[row]` of them from `starts[row]` on.

        Returns each stream up to its last entry: views, except where gradients flow to the new
        entries. Storage holds `limit` entries, or grows.
        """
        for name, entries in new.items():
            self._check_entries(self._streams.get(name), name, entries)
        end = max((a + n for a, n in zip(starts, counts, strict=True)), default=0)
        streams = {}
        for name, entries in new.items():
            store = self._room(name, entries, end, limit)
            streams[name] = self._write(store, entries, starts, counts)[:, :, :end]
        return streams

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
        if not self._tail:
            return {name: F.pad(t, (0, 0, length, 0)) for name, t in new.items()}
        return {name: torch.cat((self.recent(name, length), t), dim=2) for name, t in new.items()}

    def keep_recent(self, new: dict[str, Tensor], counts: list[int], length: int) -> None:
        """Remember the last `length` entries [b h n d] of each row, and `rollback` more: the entry
        of the token at position p lies in slot `p mod size`."""
        size = length + self.rollback
        rows, at = _index([max(0, n - size) for n in counts], counts)
        slots = (at + torch.tensor(self.starts(len(counts)), dtype=torch.long)[rows]) % max(1, size)
        for name, entries in new.items():
            self._check_entries(self._tail.get(name), name, entries)
            if name not in self._tail:
                self._tail[name] = _zeros(entries, size)
            _put(self._tail[name], rows, slots, entries.detach(), at)

    def advance(self, counts: list[int]) -> None:
        """Count the tokens appended."""
        self.lengths = [a + n for a, n in zip(self.starts(len(counts)), counts, strict=True)]
        self.batch = len(counts)
        reached = self._reached or [0] * self.batch
        self._reached = [max(a, b) for a, b in zip(reached, self.lengths, strict=True)]

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
        if isinstance(lengths, Tensor):
            lengths = lengths.tolist()
        rows = len(self.lengths)
        wanted = [lengths] * rows if isinstance(lengths, int) else _integers("lengths", lengths)
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

    def reset(self) -> None:
        """Forget all tokens; the storage stays."""
        self.truncate(0)

    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        """Make row r a copy of the former row `rows[r]`, as beam search does; the number of rows
        may change.

        Raises:
            ValueError: a row that is not there.
        """
        index = _integers("rows", rows)
        for r in index:
            if not 0 <= r < len(self.lengths):
                raise ValueError(f"rows must be between 0 and {len(self.lengths) - 1}, got {r}")
        self._apply(
            lambda t: t.index_select(0, torch.tensor(index, dtype=torch.long, device=t.device))
        )
        self.lengths = [self.lengths[r] for r in index]
        self._reached = [self._reached[r] for r in index]
        self.batch = len(index)

    def to(self, device: torch.device | str) -> KVCache:
        """Move the storage to a device; returns self."""
        self._apply(lambda t: t.to(device))
        return self

    def clone(self) -> KVCache:
        """A copy that shares nothing with this cache."""
        other = copy.copy(self)
        other.lengths, other._reached = list(self.lengths), list(self._reached)
        other._apply(lambda t: t.clone())
        return other

    # storage

    def _tensors(self) -> list[Tensor]:
        return [*self._streams.values(), *self._tail.values()]

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self._streams = {name: fn(t) for name, t in self._streams.items()}
            self._tail = {name: fn(t) for name, t in self._tail.items()}

    def _check_entries(self, store: Tensor | None, name: str, new: Tensor) -> None:
        if store is None:
            return
        if new.device != store.device or new.dtype != store.dtype:
            raise ValueError(
                f"cache holds {name} in {store.dtype} on {store.device}, "
                f"got {new.dtype} on {new.device}"
            )
        if (new.shape[1], new.shape[3]) != (store.shape[1], store.shape[3]):
            raise ValueError(
                f"cache holds {name} of {store.shape[1]} heads x {store.shape[3]}, "
                f"got {new.shape[1]} x {new.shape[3]}: is it another layer's?"
            )

    def _room(self, name: str, new: Tensor, end: int, limit: int | None) -> Tensor:
        """The storage of a stream, grown to hold `end` entries a row."""
        store = self._streams.get(name)
        held = 0 if store is None else store.shape[2]
        if store is None or end > held:
            size = limit if limit is not None else 1 << max(0, end - 1).bit_length()
            grown = _zeros(new, size)
            if store is not None:
                grown[:, :, :held] = store
            self._streams[name] = store = grown
        return store

    @staticmethod
    def _write(store: Tensor, new: Tensor, starts: list[int], counts: list[int]) -> Tensor:
        """Put new entries in place; returns the storage, or a copy through which gradients flow."""
        differentiable = torch.is_grad_enabled() and new.requires_grad
        if len(set(starts)) <= 1 and len(set(counts)) <= 1:
            start, count = (starts or [0])[0], (counts or [0])[0]
            store[:, :, start : start + count] = new[:, :, :count].detach()
            if not differentiable:
                return store
            return torch.cat((store[:, :, :start].clone(), new[:, :, :count]), dim=2)
        rows, at = _index([0] * len(counts), counts)
        slots = at + torch.tensor(starts)[rows]
        _put(store, rows, slots, new.detach(), at)
        if not differentiable:
            return store
        copied = store.clone()
        _put(copied, rows, slots, new, at)
        return copied


def _integers(name: str, values: Sequence[int] | Tensor) -> list[int]:
    """One integer for each row; a float is an error, not a number to cut short."""
    try:
        listed = values.tolist() if isinstance(values, Tensor) else values
        return [operator.index(value) for value in listed]
    except TypeError:
        raise ValueError(f"{name} must be integers, one for each row, got {values!r}") from None


def _zeros(like: Tensor, size: int) -> Tensor:
    """Storage [b h size d] for entries like these; never an inference tensor, which only inference
    mode could write to."""
    with torch.inference_mode(False):
        return like.new_zeros(*like.shape[:2], size, like.shape[-1])


def _index(first: list[int], last: list[int]) -> tuple[Tensor, Tensor]:
    """Row and place of every entry in `first[row] .. last[row] - 1`, row by row."""
    counts = torch.tensor([b - a for a, b in zip(first, last, strict=True)], dtype=torch.long)
    rows = torch.repeat_interleave(torch.arange(len(first)), counts)
    places = [torch.arange(a, b) for a, b in zip(first, last, strict=True)]
    return rows, torch.cat(places) if places else torch.arange(0)


def _put(store: Tensor, rows: Tensor, slots: Tensor, new: Tensor, at: Tensor) -> None:
    """store[row, :, slot] = new[row, :, at] for each of the listed entries."""
    rows, slots, at = (t.to(store.device, non_blocking=True) for t in (rows, slots, at))
    store[rows, :, slots] = new[rows, :, at]


def check_cache(
    cache: KVCache | None,
    return_cache: bool,
    lengths: Sequence[int] | Tensor | None,
    causal: bool,
) -> KVCache | None:
    """The cache that a layer's call uses, a new one where only its return is asked for."""
    if cache is not None and not isinstance(cache, KVCache):
        raise ValueError(f"cache must be a KVCache, got {type(cache).__name__}")
    if (return_cache or cache is not None) and not causal:
        raise ValueError("cache and return_cache need causal=True, this layer has causal=False")
    if cache is None and return_cache:
        cache = KVCache()
    if lengths is not None and cache is None:
        raise ValueError("lengths goes with a cache or return_cache=True")
    return cache
