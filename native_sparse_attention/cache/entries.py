"""Entries of a cache: rows of different lengths, written and moved.

    b  batch    h  KV heads (or ranking heads)    n  entries    d  width

`starts` and `counts` say of each row where its new entries go, and how many they are.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..checks.scalars import as_int, shown


def counts_of(batch: int, new: int, lengths: Sequence[int] | Tensor | None) -> list[int]:
    """How many of `new` tokens each row takes: all, or as many as `lengths` says."""
    if lengths is None:
        return [new] * batch
    counts = integers("lengths", lengths)
    if len(counts) != batch or any(n < 0 or n > new for n in counts):
        raise ValueError(
            f"lengths must be {batch} integers between 0 and {new} (the new tokens), got {counts}"
        )
    return counts


def check_full(
    max_length: int | None, starts: list[int], counts: list[int], every: int = 1
) -> None:
    """Rows have room for the new entries, one for each `every` tokens."""
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
    held: dict[str, Tensor], new: dict[str, Tensor], rows: int, device: torch.device | None
) -> None:
    """New entries [b h n d] go with those in storage, by name."""
    for name, entries in new.items():
        if len(entries) != rows:
            raise ValueError(f"{name} must have {rows} rows, got {len(entries)}")
        if name in held:
            _check_like(held[name], name, entries)
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
    """One integer for each row; a float is an error, not a number to cut short, and True is not
    1."""
    try:
        listed = list(values.tolist() if isinstance(values, Tensor) else values)
    except (TypeError, RuntimeError, NotImplementedError):
        listed = [None]
    numbers = [as_int(value) for value in listed]
    if isinstance(values, (str, bytes)) or None in numbers:
        raise ValueError(f"{name} must be integers, one for each row, got {shown(values)}")
    return [number for number in numbers if number is not None]


def row_numbers(rows: Sequence[int] | Tensor, count: int) -> list[int]:
    """Integers that each number one of `count` rows."""
    listed = integers("rows", rows)
    for row in listed:
        if not 0 <= row < count:
            raise ValueError(f"rows must be between 0 and {count - 1}, got {row}")
    return listed


def zeros(like: Tensor, rows: int, size: int) -> Tensor:
    """Storage [rows h size d] for entries like these; never an inference tensor, which only
    inference mode could write to."""
    with torch.inference_mode(False):
        return like.new_zeros(rows, like.shape[1], size, like.shape[3])


def first_device(*groups: Mapping[str, Tensor]) -> torch.device | None:
    """The device of the first tensor that there is."""
    for group in groups:
        for tensor in group.values():
            return tensor.device
    return None


def places_of(
    starts: list[int], counts: list[int], first: list[int] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Row of each new entry, its place in the row, and which of the row's new ones it is: those
    from `first[row]` to `counts[row] - 1`, row by row."""
    first = [0] * len(counts) if first is None else first
    with torch.device("cpu"):
        spans = [torch.arange(a, b) for a, b in zip(first, counts, strict=True)]
        at = torch.cat(spans) if spans else torch.arange(0)
        lengths = torch.tensor([len(span) for span in spans], dtype=torch.long)
        rows = torch.repeat_interleave(torch.arange(len(spans)), lengths)
        return rows, at + torch.tensor(starts, dtype=torch.long)[rows], at


def put(store: Tensor, rows: Tensor, slots: Tensor, new: Tensor, at: Tensor) -> None:
    """store[row, :, slot] = new[row, :, at] for each of the listed entries."""
    rows, slots, at = (t.to(store.device, non_blocking=True) for t in (rows, slots, at))
    store[rows, :, slots] = new[rows, :, at]


def _span(starts: list[int], counts: list[int]) -> tuple[int, int] | None:
    """(start, count) of the entries, where all rows write alike."""
    if len(set(starts)) > 1 or len(set(counts)) > 1:
        return None
    return (starts or [0])[0], (counts or [0])[0]


def fill(held: Tensor, new: Tensor, starts: list[int], counts: list[int]) -> None:
    """held[row, :, starts[row] + i] = new[row, :, i] for i < counts[row]."""
    span = _span(starts, counts)
    if span is None:
        rows, places, at = places_of(starts, counts)
        put(held, rows, places, new, at)
    else:
        start, count = span
        held[:, :, start : start + count] = new[:, :, :count]


def hide_behind(entries: Tensor, ends: list[int]) -> Tensor:
    """Entries [b h n d] with 0 behind the end of each row: a weight of 0 does not hide what is not
    finite. The tensor itself where all rows end with it."""
    if len(set(ends)) <= 1:
        return entries
    behind = torch.arange(entries.shape[2]) >= torch.tensor(ends)[:, None]
    behind = behind.to(entries.device, non_blocking=True)
    return entries.masked_fill(behind[:, None, :, None], 0)


def differentiable(held: Tensor, new: Tensor, starts: list[int], counts: list[int]) -> Tensor:
    """A copy of a stream through which gradients flow to its new entries."""
    span = _span(starts, counts)
    if span is None:
        held = held.clone()
        fill(held, new, starts, counts)
        return held
    start, count = span
    return torch.cat((held[:, :, :start].clone(), new[:, :, :count]), dim=2)


def pick(t: Tensor, index: list[int]) -> Tensor:
    """Rows `index` of a tensor; the tensor itself, where their number stays."""
    if len(index) != len(t):
        return t.index_select(0, torch.tensor(index, dtype=torch.long, device=t.device))
    moved = [(row, source) for row, source in enumerate(index) if row != source]
    if moved:
        rows, sources = torch.tensor(moved).T.to(t.device, non_blocking=True)
        t[rows] = t[sources]
    return t
