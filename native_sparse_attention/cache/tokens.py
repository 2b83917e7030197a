"""New tokens of the sequences in a KV cache, and the entries that they write and read.

    b  sequences    h  KV heads (or ranking heads)    n  entries    d  head dimension

An entry of a stream covers `every` tokens: one, or the stride of the compression windows. In an
eager call the host counts the tokens of each sequence. In a compiled graph only the device does: no
shape depends on a length, and streams are read at full capacity.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks.scalars import as_int, shown
from ..ops.triton.cache import kernels


class NewTokens(NamedTuple):
    """The new tokens of each sequence.

    Attributes:
        start: position of the first one: an int if the host knows that all sequences share it, else
            [b] on the device.
        counts: how many of the `new` tokens of the input are real, [b] on the device; None: all.
        host: the first position and the count of each sequence; None if only the device knows.
        decoded: whether the decode kernels attend to them, which read storage by its addresses.
    """

    start: int | Tensor
    counts: Tensor | None
    new: int
    host: tuple[list[int], list[int]] | None = None
    decoded: bool = False

    def bounds(self, every: int) -> tuple[Any, Any]:
        """The first new entry of each sequence and one past its last: an int if all share it, else
        [b], on the host if it knows them."""
        start, counts = self.start, self.new if self.counts is None else self.counts
        if self.host is not None and (isinstance(start, Tensor) or isinstance(counts, Tensor)):
            start, counts = torch.tensor(self.host, dtype=torch.long, device="cpu")
        return start // every, (start + counts) // every

    def ends(self, every: int) -> list[int]:
        """One past the last entry of each sequence; [] if only the device knows."""
        return [(a + n) // every for a, n in zip(*self.host, strict=True)] if self.host else []

    def end(self, every: int) -> int | None:
        """One past the last entry of all sequences; None if only the device knows."""
        if isinstance(self.start, int):
            return (self.start + self.new) // every
        return None if self.host is None else max(self.ends(every), default=0)

    def width(self, every: int) -> int:
        """The most entries that the tokens of a sequence complete."""
        if isinstance(self.start, int):
            return (self.start + self.new) // every - self.start // every
        if self.host is None:
            return -(-self.new // every)
        return max(
            map(operator.sub, self.ends(every), [a // every for a in self.host[0]]), default=0
        )

    def slots(self, every: int, width: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Positions [n] or [b n] of `width` new entries, and a mask of those that are complete;
        None: all are. On the device, or on the host if it knows that sequences differ."""
        first, end = self.bounds(every)
        slots = column(first) + torch.arange(width, device=device_of(device, first, end))
        if self.counts is None and (every == 1 or isinstance(first, int)):
            return slots, None
        return slots, slots < column(end)

    def hide_past_end(self, stream: Tensor, every: int) -> Tensor:
        """A stream [b h n d] with zeros past the end of each sequence: an attention weight of 0
        does not mask non-finite values. The stream itself if all sequences fill it."""
        n, end = stream.shape[2], self.bounds(every)[1]
        if isinstance(end, int) or (self.host is not None and bool((end == n).all())):
            return stream
        past_end = torch.arange(n, device=end.device) >= end[:, None]
        past_end = past_end.to(stream.device, non_blocking=True)
        return stream.masked_fill(past_end[:, None, :, None], 0)

    def zero_padding(self, t: Tensor) -> Tensor:
        """t [b n d] with zeros for the tokens that are not real."""
        if self.counts is None:
            return t
        padding = torch.arange(self.new, device=t.device) >= self.counts[:, None]
        return t.masked_fill(padding[..., None], 0)

    def write(
        self, store: Tensor, new: Tensor, every: int, page_table: Tensor | None = None
    ) -> None:
        """Write the new entries [b h n d] that are complete to a stream, in place."""
        first, end = self.bounds(every)
        if isinstance(first, int) and isinstance(end, int) and page_table is None:
            store[:, :, first:end] = new[:, :, : end - first]
            return
        width = self.width(every)
        if self.host is None:  # entries beyond the capacity can only be padding
            width = min(width, store.shape[2])
        if width:
            slots = self.slots(every, width, store.device)
            write(store, new[:, :, :width], *slots, page_table)

    def write_recent(self, ring: Tensor, new: Tensor) -> None:
        """Write the last real tokens of each sequence, as many as fit, to a ring buffer."""
        size = ring.shape[2]
        width = min(self.new, size)
        if width == 0:
            return
        first, end = self.bounds(1)
        last = torch.arange(width, device=device_of(ring.device, first, end)) - width
        # negative for sequences that take fewer
        index = column(end - first) + last
        mask = None if self.counts is None else index >= 0
        new = take(new, index.clamp(min=0).to(new.device, non_blocking=True))
        write(ring, new, (column(end) + last) % size, mask)


def column(bound: Any) -> Any:
    """An int, or [b] as [b 1]."""
    return bound[:, None] if isinstance(bound, Tensor) else bound


def device_of(default: torch.device, *bounds: Any) -> torch.device:
    return next((bound.device for bound in bounds if isinstance(bound, Tensor)), default)


def take(t: Tensor, index: Tensor) -> Tensor:
    """Entries `index` [m] or [b m] of t [b h n d]: [b h m d]."""
    index = index.expand(len(t), -1)[:, None, :, None]
    return t.gather(2, index.expand(-1, t.shape[1], -1, t.shape[3]))


def write(
    store: Tensor,
    new: Tensor,
    slots: Tensor,
    mask: Tensor | None,
    page_table: Tensor | None = None,
) -> None:
    """store[b, :, slots[b, i]] = new[b, :, i] where mask[b, i], in place; slots [n] or [b n] are
    distinct. With a page table, slots of a sequence lie in its pages.

    By `index_put_` on the storage itself: of all writes this one torch's compiler does in place. In
    a graph masked slots get their old values; otherwise the mask is the host's, and they are left
    out.
    """
    device, size = store.device, store.shape[2]
    slots, new = slots.expand(len(new), -1), new.transpose(1, 2)
    rows = torch.arange(len(new), device=slots.device)[:, None].expand_as(slots)
    if mask is not None and not torch.compiler.is_compiling():
        mask = mask.expand_as(slots)
        entries = torch.arange(slots.shape[1], device=slots.device).expand_as(slots)[mask]
        rows, slots, mask = rows[mask], slots[mask], None
        new = new[rows.to(device, non_blocking=True), entries.to(device, non_blocking=True)]
    rows, slots = (t.to(device, non_blocking=True) for t in (rows, slots))
    if page_table is not None:
        rows = page_table[rows, slots // size]
    index = rows[..., None], torch.arange(store.shape[1], device=device), (slots % size)[..., None]
    if mask is not None:
        new = torch.where(mask[..., None, None], new, store[index])
    store.index_put_(index, new)


def write_by_kernels(
    new: dict[str, Tensor],
    stores: dict[str, Tensor],
    tokens: NewTokens,
    *,
    page_table: Tensor | None = None,
    page_size: int | None = None,
    every: int = 1,
    ring: bool = False,
) -> None:
    """`NewTokens.write` and `NewTokens.write_recent` in Triton, which reads the lengths on the
    device. A kernel writes a pair of streams; a stream without a partner is its own."""
    lengths: Any = tokens.start
    for names in pairs(new):
        kernels().append(
            pick(new, names), pick(stores, names), lengths, tokens.new, counts=tokens.counts,
            page_table=page_table, page_size=page_size, every=every, tail=ring,
        )  # fmt: skip


def windows_by_kernels(
    new: dict[str, Tensor], tails: dict[str, Tensor], tokens: NewTokens, l: int, d: int
) -> dict[str, Tensor]:
    """`KVCache.windows` of raw keys and values in Triton."""
    lengths: Any = tokens.start
    (names,) = pairs(new)
    windows = kernels().windows(pick(new, names), pick(tails, names), lengths, l, d)
    return dict(zip(names, windows, strict=True))


def pairs(new: dict[str, Tensor]) -> list[tuple[str, str]]:
    """Names of streams, two by two; a stream without a partner is its own."""
    names = list(new)
    return [(name, names[min(i + 1, len(names) - 1)]) for i, name in enumerate(names)][::2]


def pick(tensors: dict[str, Tensor], names: tuple[str, str]) -> tuple[Tensor, Tensor]:
    return tensors[names[0]], tensors[names[1]]


# positions in compiled graphs

# fewest tokens of a first call that has a graph of its own
FIRST_GRAPH = 1024


@torch.library.custom_op("native_sparse_attention::places", mutates_args=())
def checked_starts(lengths: Tensor, counts: Tensor | None, new: int, max_length: int) -> Tensor:
    """The lengths in int64, after a check that `counts` of `new` more tokens fit.

    A GPU checks with a device-side assertion, for which the host does not wait.
    """
    if lengths.is_cuda:
        with torch.cuda.device_of(lengths):
            return kernels().starts(lengths, counts, new, max_length)
    if lengths.device.type == "cpu":
        numbers = new_token_counts(len(lengths), new, counts)
        check_capacity(max_length, lengths.tolist(), numbers)
    return lengths.to(torch.int64, copy=True)


@checked_starts.register_fake
def _(lengths, counts, new, max_length):
    return lengths.new_empty(lengths.shape, dtype=torch.int64)


def device_counts(lengths: Any, batch: int, device: torch.device) -> Tensor | None:
    """`lengths` of a compiled call as a tensor [b] on the device.

    Raises:
        ValueError: lengths that are not integers [b].
    """
    if lengths is None:
        return None
    counts: Tensor = lengths if isinstance(lengths, Tensor) else torch.tensor(lengths)
    if counts.shape != (batch,) or counts.is_floating_point() or counts.dtype == torch.bool:
        raise ValueError(
            f"lengths must be {batch} integers, got {counts.dtype} of shape {list(counts.shape)}"
        )
    return counts.to(device)


# checks


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


def check_capacity(max_length: int | None, starts: list[int], counts: list[int]) -> None:
    """Raise if the new tokens exceed `max_length`."""
    for row, (held, count) in enumerate(zip(starts, counts, strict=True)):
        if max_length is not None and held + count > max_length:
            raise ValueError(
                f"cache is full: row {row} holds {held} of max_length={max_length} tokens, "
                f"{count} more were given"
            )


def check_entries(
    streams: dict[str, Tensor], new: dict[str, Tensor], batch: int, device: torch.device | None
) -> None:
    """Raise unless new entries [b h n d] match the batch size, and their streams by name."""
    for name, entries in new.items():
        if len(entries) != batch:
            raise ValueError(f"{name} must have {batch} rows, got {len(entries)}")
        store = streams.get(name)
        if store is None:
            if device not in (None, entries.device):
                raise ValueError(f"cache is on {device}, got {name} on {entries.device}")
            continue
        if entries.device != store.device or entries.dtype != store.dtype:
            raise ValueError(
                f"cache holds {name} in {store.dtype} on {store.device}, "
                f"got {entries.dtype} on {entries.device}"
            )
        if (entries.shape[1], entries.shape[3]) != (store.shape[1], store.shape[3]):
            raise ValueError(
                f"cache holds {name} of {store.shape[1]} heads x {store.shape[3]}, "
                f"got {entries.shape[1]} x {entries.shape[3]}: is it another layer's?"
            )


def integers(name: str, values: Sequence[int] | Tensor) -> list[int]:
    """One integer per sequence. Floats and booleans are errors: they are never converted."""
    try:
        elements = list(values.tolist() if isinstance(values, Tensor) else values)
    except (TypeError, RuntimeError, NotImplementedError):
        elements = [None]
    numbers = [as_int(value) for value in elements]
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


# storage


def allocate_zeros(like: Tensor, batch: int, size: int) -> Tensor:
    """Zeroed storage [batch h size d] for entries like `like`.

    It is allocated outside inference mode: later writes outside inference mode must be allowed.
    """
    with torch.inference_mode(False):
        return like.new_zeros(batch, like.shape[1], size, like.shape[3])


def first_device(*groups: Mapping[str, Tensor]) -> torch.device | None:
    """The device of the first tensor in the groups; None if there is none."""
    return next((t.device for group in groups for t in group.values()), None)


def select_sequences(t: Tensor, index: list[int]) -> Tensor:
    """t[index] along the batch; in place, in `t` itself, if the batch size does not change."""
    if len(index) != len(t):
        return t.index_select(0, torch.tensor(index, dtype=torch.long, device=t.device))
    moved = [(row, source) for row, source in enumerate(index) if row != source]
    if moved:
        rows, sources = torch.tensor(moved).T.to(t.device, non_blocking=True)
        t[rows] = t[sources]
    return t
