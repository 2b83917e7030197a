"""Layout of a KV cache: slot mappings for sequences of different lengths, checks, and copies.

    b  sequences    h  KV heads (or ranking heads)    n  entries    d  head dimension

`starts[b]` is the position of a sequence's first new entry, `counts[b]` how many it takes.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..checks.scalars import as_int, shown


def new_token_counts(batch: int, new: int, lengths: Sequence[int] | Tensor | None) -> list[int]:
    """How many of `new` tokens each sequence takes: all of them, or `lengths`."""
    if lengths is None:
        return [new] * batch
    counts = integers("lengths", lengths)
    if len(counts) != batch or any(n < 0 or n > new for n in counts):
        raise ValueError(
            f"lengths must be {batch} integers between 0 and {new} (the new tokens), got {counts}"
        )
    return counts


def check_capacity(
    max_length: int | None, starts: list[int], counts: list[int], every: int = 1
) -> None:
    """Raise if the new entries, each of `every` tokens, exceed `max_length`."""
    longest = max(map(operator.add, starts, counts), default=0) * every
    if max_length is None or longest <= max_length:
        return
    for row, (held, count) in enumerate(zip(starts, counts, strict=True)):
        if (held + count) * every > max_length:
            raise ValueError(
                f"cache is full: row {row} holds {held * every} of max_length={max_length} "
                f"tokens, {count * every} more were given"
            )


def check_entries(
    streams: dict[str, Tensor], new: dict[str, Tensor], batch: int, device: torch.device | None
) -> None:
    """Raise unless new entries [b h n d] match the batch size, and their streams by name."""
    for name, entries in new.items():
        if len(entries) != batch:
            raise ValueError(f"{name} must have {batch} rows, got {len(entries)}")
        if name in streams:
            _check_like(streams[name], name, entries)
        elif device not in (None, entries.device):
            raise ValueError(f"cache is on {device}, got {name} on {entries.device}")


def _check_like(store: Tensor, name: str, new: Tensor) -> None:
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


def integers(name: str, values: Sequence[int] | Tensor) -> list[int]:
    """One integer per sequence. Floats and booleans are errors: they are never converted."""
    try:
        given = list(values.tolist() if isinstance(values, Tensor) else values)
    except (TypeError, RuntimeError, NotImplementedError):
        given = [None]
    numbers = [as_int(value) for value in given]
    if isinstance(values, (str, bytes)) or None in numbers:
        raise ValueError(f"{name} must be integers, one for each row, got {shown(values)}")
    return [number for number in numbers if number is not None]


def sequence_indices(rows: Sequence[int] | Tensor, batch: int) -> list[int]:
    """Indices of sequences, each in 0 .. batch - 1."""
    indices = integers("rows", rows)
    for row in indices:
        if not 0 <= row < batch:
            raise ValueError(f"rows must be between 0 and {batch - 1}, got {row}")
    return indices


def allocate_zeros(like: Tensor, batch: int, size: int) -> Tensor:
    """Zeroed storage [batch h size d] for entries like `like`.

    It is allocated outside inference mode: later writes outside inference mode must be allowed.
    """
    with torch.inference_mode(False):
        return like.new_zeros(batch, like.shape[1], size, like.shape[3])


def first_device(*groups: Mapping[str, Tensor]) -> torch.device | None:
    """The device of the first tensor in the groups; None if there is none."""
    for group in groups:
        for tensor in group.values():
            return tensor.device
    return None


def slot_mapping(
    starts: list[int], counts: list[int], first: list[int] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The slot mapping of new entries: for each one its sequence, its slot and its source index.

    Sequence b writes its new entries `first[b]` .. `counts[b] - 1`; entry i goes to slot
    `starts[b] + i`. Entries are ordered by sequence.
    """
    first = [0] * len(counts) if first is None else first
    with torch.device("cpu"):
        ranges = [torch.arange(a, b) for a, b in zip(first, counts, strict=True)]
        source = torch.cat(ranges) if ranges else torch.arange(0)
        lengths = torch.tensor([len(entries) for entries in ranges], dtype=torch.long)
        sequence = torch.repeat_interleave(torch.arange(len(ranges)), lengths)
        return sequence, source + torch.tensor(starts, dtype=torch.long)[sequence], source


def write_slots(store: Tensor, sequence: Tensor, slot: Tensor, new: Tensor, source: Tensor) -> None:
    """store[sequence, :, slot] = new[sequence, :, source], by a slot mapping."""
    sequence, slot, source = (
        t.to(store.device, non_blocking=True) for t in (sequence, slot, source)
    )
    store[sequence, :, slot] = new[sequence, :, source]


def _common_range(starts: list[int], counts: list[int]) -> tuple[int, int] | None:
    """(start, count) of the new entries if all sequences share them, else None."""
    if len(set(starts)) > 1 or len(set(counts)) > 1:
        return None
    return (starts or [0])[0], (counts or [0])[0]


def write_entries(store: Tensor, new: Tensor, starts: list[int], counts: list[int]) -> None:
    """store[b, :, starts[b] + i] = new[b, :, i] for i < counts[b]."""
    common = _common_range(starts, counts)
    if common is None:
        sequence, slot, source = slot_mapping(starts, counts)
        write_slots(store, sequence, slot, new, source)
    else:
        start, count = common
        store[:, :, start : start + count] = new[:, :, :count]


def zero_past_end(entries: Tensor, ends: list[int]) -> Tensor:
    """Entries [b h n d] with zeros past the end of each sequence.

    An attention weight of 0 does not mask non-finite values. Returns `entries` itself if all
    sequences have the same end.
    """
    if len(set(ends)) <= 1:
        return entries
    past_end = torch.arange(entries.shape[2]) >= torch.tensor(ends)[:, None]
    past_end = past_end.to(entries.device, non_blocking=True)
    return entries.masked_fill(past_end[:, None, :, None], 0)


def append_differentiably(
    stream: Tensor, new: Tensor, starts: list[int], counts: list[int]
) -> Tensor:
    """A copy of a stream that includes the new entries and passes gradients to them."""
    common = _common_range(starts, counts)
    if common is None:
        stream = stream.clone()
        write_entries(stream, new, starts, counts)
        return stream
    start, count = common
    return torch.cat((stream[:, :, :start].clone(), new[:, :, :count]), dim=2)


def select_sequences(t: Tensor, index: list[int]) -> Tensor:
    """t[index] along the batch; in place, in `t` itself, if the batch size does not change."""
    if len(index) != len(t):
        return t.index_select(0, torch.tensor(index, dtype=torch.long, device=t.device))
    moved = [(row, source) for row, source in enumerate(index) if row != source]
    if moved:
        rows, sources = torch.tensor(moved).T.to(t.device, non_blocking=True)
        t[rows] = t[sources]
    return t
