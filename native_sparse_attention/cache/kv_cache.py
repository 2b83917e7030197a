"""KVCache: keys and values of one attention layer, preallocated and appended to in place.

    b  sequences    h  KV heads (or ranking heads)    n  tokens, or windows    d  head dimension

A token stream (keys, values) has one entry per token, a window stream (compressed keys and values)
one entry per compression window. A tail is a ring buffer of the last raw keys and values, from
which the next compression window is formed.

A layer walks the same lines for prefill, decoding and compiled steps: `new_tokens`, `append` and
`windows`, attention over what they return, `keep_recent`, `finish`. The token at position p lies in
slot p of a token stream and in slot `p mod size` of a tail, window w in slot w of a window stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import TOO_MANY, as_int, check_device, check_int, check_type, describe, refusal
from ..compat import is_exporting


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
        tokens = zip(*self.host, strict=True)
        return max(((a + n) // every - a // every for a, n in tokens), default=0)

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
        self, store: Tensor, new: Tensor, every: int, page_table: Tensor | None = None,
        is_ring: bool = False,
    ) -> None:  # fmt: skip
        """Write the new entries [b h n d] that are complete to a stream, or the last that fit to a
        ring buffer, in place: entry n of a sequence to slot n modulo the size, with a page table of
        its page. Slots are distinct.

        By `index_put_` on the storage itself: of all writes this one torch's compiler does in
        place. In a graph masked slots get their old values; otherwise the mask is the host's, and
        they are left out.
        """
        first, end = self.bounds(every)
        if isinstance(first, int) and isinstance(end, int) and page_table is None and not is_ring:
            store[:, :, first:end] = new[:, :, : end - first]
            return
        width = self.new if is_ring else self.width(every)
        if is_ring or self.host is None:  # entries beyond the capacity can only be padding
            width = min(width, store.shape[2])
        if width == 0 and not new.requires_grad:  # else the gradients of its parameters are zeros
            return
        index = torch.arange(width, device=end.device if isinstance(end, Tensor) else store.device)
        if is_ring:
            index = column(end - first) - width + index  # negative for sequences that take fewer
            new = take(new, index.clamp(min=0).to(new.device, non_blocking=True))
        new = new[:, :, :width].transpose(1, 2)
        slots = (column(first) + index).expand(len(new), -1)
        rows, mask = torch.arange(len(new), device=slots.device)[:, None], None
        if self.counts is not None or (every > 1 and isinstance(first, Tensor)):
            mask = (index >= 0 if is_ring else slots < column(end)).expand_as(slots)
        if mask is not None and not torch.compiler.is_compiling():
            rows, entries = mask.nonzero(as_tuple=True)
            slots, mask = slots[rows, entries], None
            new = new[tuple(t.to(store.device, non_blocking=True) for t in (rows, entries))]
        rows, slots = (t.to(store.device, non_blocking=True) for t in (rows, slots))
        size, heads = store.shape[2], torch.arange(store.shape[1], device=store.device)
        if page_table is not None:
            rows = page_table[rows, slots // size]
        slot = rows[..., None], heads, (slots % size)[..., None]
        if mask is not None:
            new = torch.where(mask[..., None, None], new, store[slot])
        store.index_put_(slot, new)


def column(bound: Any) -> Any:
    """An int, or [b] as [b 1]."""
    return bound[:, None] if isinstance(bound, Tensor) else bound


def take(t: Tensor, index: Tensor) -> Tensor:
    """Entries `index` [m] or [b m] of t [b h n d]: [b h m d]."""
    index = index.expand(len(t), -1)[:, None, :, None]
    return t.gather(2, index.expand(-1, t.shape[1], -1, t.shape[3]))


def kernels() -> Any:
    """The kernels that write to a cache. To import them loads triton."""
    from ..kernels.decode import kv_cache

    return kv_cache


ONE_CACHE = "each layer needs a cache of its own, or one that was reset"
# fewest tokens of a first call that has a graph of its own
FIRST_GRAPH = 1024


@torch.library.custom_op("native_sparse_attention::places", mutates_args=())
def checked_starts(lengths: Tensor, counts: Tensor | None, new: int, max_length: int) -> Tensor:
    """The lengths in int64, after a check that `counts` of `new` more tokens fit. A GPU checks with
    a device-side assertion, for which the host does not wait."""
    if lengths.is_cuda:
        with torch.cuda.device_of(lengths):
            return kernels().starts(lengths, counts, new, max_length)
    if lengths.device.type == "cpu":
        new_token_counts(lengths.tolist(), new, counts, max_length)
    return lengths.to(torch.int64, copy=True)


@checked_starts.register_fake
def _(lengths, counts, new, max_length):
    return lengths.new_empty(lengths.shape, dtype=torch.int64)


def new_token_counts(
    starts: list[int], new: int, lengths: Sequence[int] | Tensor | None, max_length: int | None
) -> list[int]:
    """How many of `new` tokens each sequence takes, all of them or `lengths`, after `starts` that
    it holds of at most `max_length`."""
    batch = len(starts)
    counts = [new] * batch if lengths is None else integers("lengths", lengths)
    if len(counts) != batch or any(n < 0 or n > new for n in counts):
        raise refusal("lengths", f"{batch} integers between 0 and {new}, the new tokens", counts)
    for row, (held, count) in enumerate(zip(starts, counts, strict=True)):
        if max_length is not None and held + count > max_length:
            limit = f"{held} of max_length={max_length} tokens"
            raise ValueError(f"cache is full: row {row} holds {limit}, {count} more were given")
    return counts


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
            got = f"{entries.dtype} on {entries.device}"
            raise ValueError(f"cache holds {name} in {store.dtype} on {store.device}, got {got}")
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
    is_float = isinstance(values, Tensor) and values.is_floating_point()
    if is_float or isinstance(values, (str, bytes, dict, set)) or None in numbers:
        raise refusal(name, "integers, one for each row", values)
    return [number for number in numbers if number is not None]


def sequence_indices(rows: Sequence[int] | Tensor, batch: int) -> list[int]:
    return [check_int("rows", row, 0, batch) for row in integers("rows", rows)]


def allocate_zeros(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros like `like`, allocated outside inference mode, so that any mode may write to them."""
    with torch.inference_mode(False):
        return like.new_zeros(shape, dtype=dtype)


def select_sequences(t: Tensor, index: list[int]) -> Tensor:
    """t[index] along the batch; in place, in `t` itself, if the batch size does not change."""
    if len(index) != len(t):
        return t.index_select(0, torch.tensor(index, dtype=torch.long, device=t.device))
    moves = [(row, source) for row, source in enumerate(index) if row != source]
    if moves:
        rows, sources = torch.tensor(moves).T.to(t.device, non_blocking=True)
        t[rows] = t[sources]
    return t


class Identity:
    """The identity of one attention layer, by which a cache knows it. A deepcopied or unpickled
    layer gets a new one, because its weights may change independently; a wrapper shares it."""


def capacity_of(entries: int) -> int:
    """Entries of a storage that grows: few copies, and little memory that nothing uses."""
    return entries + entries // 8 if entries > 1024 else 1 << max(0, entries - 1).bit_length()


class KVCache:
    """Keys and values of one attention layer, for a batch of sequences of different lengths.

    Storage is allocated when the layer first appends, and grows with the sequences: to a power of
    two of up to 1024 tokens, then to an eighth more than is needed. With `max_length` it is
    allocated once, and an append to a full cache raises before anything is written. The cache is
    updated in place; `clone()` copies it. Its tensors stay the same while the storage does not grow
    and the batch size does not change, so a CUDA graph can use them.

    A cache belongs to the layer that first used it, and to the layer's geometry, until all
    sequences are empty. A clone or a deepcopy belongs to the same layer; a deepcopy of layer and
    cache together, the layer first, to the copied layer; an unpickled cache to the next layer of
    its geometry that uses it.

    Args:
        max_length: the most tokens of a sequence; None: unlimited.
        batch: number of sequences; None: the batch size of the first call.
        rollback: number of tokens that `truncate` can always remove. The tails keep `rollback` more
            raw keys and values for this (`rollback=max_length` allows any length). Truncation to 0
            tokens is always possible.

    Attributes:
        batch: number of sequences; None before the first call, if it was not given.
        counts_itself: whether kernels appended the last tokens and updated the lengths on the
            device themselves.
        is_new: whether the host knows that all sequences are empty, also in a compiled graph.
        least_length: each sequence holds at least so many tokens: the layer's `dense_length`, or 0.
            Compiled steps, which do not know the lengths, only add tokens.
    """

    page_size: int | None = None
    least_length = 0
    is_new = False  # of caches that were pickled before there was one

    # These names are in users' pickles of caches: they must not change.
    def __init__(self, max_length: int | None = None, batch: int | None = None, rollback: int = 64):
        if max_length is not None:
            max_length = check_int("max_length", max_length, 1)
        if batch is not None:
            batch = check_int("batch", batch, 1, TOO_MANY)
        self.max_length = max_length
        self.batch = batch
        self.rollback = check_int("rollback", rollback, 0)
        self._lengths: list[int] = [] if batch is None else [0] * batch
        self._reached = list(self._lengths)  # the maximal length of each sequence so far
        self._is_behind = False  # whether the device has counted tokens that the host has not
        self.counts_itself = False
        self.is_new = True
        self._streams: dict[str, Tensor] = {}
        self._tail: dict[str, Tensor] = {}
        self._known: dict[str, Tensor] = {}  # on the device: "lengths", "page_table", "workspace"
        self._layer: Identity | None = None
        self._geometry: dict[str, Any] = {}

    def __bool__(self) -> bool:
        return True  # an empty cache is a cache

    def __len__(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths, default=0)

    def __repr__(self) -> str:
        limit = "" if self.max_length is None else f", max_length={self.max_length}"
        return f"{type(self).__name__}(lengths={self.lengths}{limit}, nbytes={self.nbytes})"

    @property
    def nbytes(self) -> int:
        return sum(self.memory().values())

    def memory(self) -> dict[str, int]:
        """Bytes allocated, by name: each stream, each tail ("tail k"), the sequence lengths on the
        device ("lengths"), the "page_table" of a paged cache, and the "workspace" of kernels."""
        return {name: t.nbytes for name, t in self.tensors().items()}

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence; [] while the batch size is unknown. In a compiled step only the
        device counts: the host reads its lengths here."""
        if self._is_behind:
            self._is_behind = False
            self._lengths = self._known["lengths"].tolist()
            self._reached = list(map(max, self._reached or self._lengths, self._lengths))
        return self._lengths

    @lengths.setter
    def lengths(self, lengths: list[int]) -> None:
        self._is_behind = False
        self._lengths = lengths
        self.is_new = not any(lengths)

    @property
    def is_fixed(self) -> bool:
        """Whether a compiled step may use the cache, and count on the device only."""
        return self.max_length is not None and self.page_size is None

    @property
    def device(self) -> torch.device | None:
        devices = [t.device for t in self.tensors().values()]
        return devices[0] if devices else None  # dynamo of torch 2.8 knows no default of `next`

    @property
    def page_table(self) -> Tensor | None:
        """Page indices of each sequence, int32 [b, pages]; None for a cache without pages."""
        return self._known.get("page_table")

    def check(self, batch: int, new: int, lengths: Sequence[int] | Tensor | None) -> list[int]:
        """How many of `new` tokens each sequence takes; raises before anything is written."""
        if not self.lengths:
            # drop the storage of a first call that raised
            self._streams, self._tail = {}, {}
        self._check_batch(batch)
        return new_token_counts(self.starts(batch), new, lengths, self.max_length)

    def new_tokens(self, inp: Tensor, lengths: Sequence[int] | Tensor | None) -> NewTokens:
        """The positions of the tokens [b n ..] that the sequences take, all or `lengths` of each.

        Raises:
            ValueError: another batch size, lengths that are not integers [b], or a full cache (in a
                compiled graph on a GPU a device-side assertion instead).
        """
        (b, n), device, real = inp.shape[:2], inp.device, None
        if not torch.compiler.is_compiling():
            counts = self.check(b, n, lengths)
            # queries are the last tokens, so that one sequence must take all
            is_even = len(set(self.lengths)) <= 1 and bool(counts) and max(counts) == n
            starts = self.starts(b)
            start: int | Tensor = len(self)
            if not is_even:
                held = self._known.get("lengths")  # a CUDA graph copies nothing from the host
                known = starts if held is None else held
                start = torch.as_tensor(known, dtype=torch.long, device=device)
            if any(count != n for count in counts):
                real = torch.tensor(counts, dtype=torch.int32).to(device, non_blocking=True)
            return NewTokens(start, real, n, (starts, counts))
        self._check_batch(b)
        if lengths is not None:
            real = torch.as_tensor(lengths).to(device)  # [b], checked by `checks.check_rows`
        if "lengths" not in self._known:
            self._known["lengths"] = allocate_zeros(inp, b, dtype=torch.int32)
        # the first tokens of all sequences have a graph of their own, if they are many: at
        # positions that the device alone knows, the fastest kernels do not run. An exported program
        # is for any lengths
        capacity = self.max_length or 0
        first = self.is_new and FIRST_GRAPH <= n <= capacity and not is_exporting()
        if first and real is None:  # which fit
            return NewTokens(0, None, n)
        held = checked_starts(self._known["lengths"], real, n, capacity)
        return NewTokens(0 if first else held, real, n)

    def decoded(self, tokens: NewTokens, device: torch.device) -> NewTokens:
        """The tokens as the decode kernels take them, with positions on the device."""
        start = tokens.start if tokens.host is None else self.lengths_on(device)
        return NewTokens(start, tokens.counts, tokens.new, tokens.host, True)

    def finish(self, tokens: NewTokens, least_length: int = 0) -> None:
        """Count new tokens, after all is written. `least_length`: see there."""
        added = tokens.new if tokens.counts is None else tokens.counts
        if tokens.host is None:
            held = self._known["lengths"]
            held.add_(added)
            self.batch, self._is_behind, self.counts_itself = len(held), True, False
            self.is_new = False
            return
        self.count(tokens.host[1])
        if tokens.decoded and isinstance(tokens.start, Tensor):  # the lengths, in a CUDA graph
            tokens.start.add_(added)
        else:
            self.counts_itself = False
            self._update_device_lengths()
        self.least_length = least_length if min(self.lengths, default=0) >= least_length else 0

    def lengths_on(self, device: torch.device | str) -> Tensor:
        """Lengths of the sequences on a device, int32 [b]: the same tensor while the batch size
        does not change. Every method but `count` keeps it up to date with `lengths`.

        Raises:
            ValueError: the cache is on another device, or its batch size is unknown.
        """
        if self.batch is None:
            raise ValueError("cache has no rows yet, and no lengths: construct it with batch=...")
        requested = check_device("device", device)
        held = self.device or requested
        if requested.type != held.type or requested.index not in (None, held.index):
            raise ValueError(f"cache is on {held}, got {requested} for its lengths")
        if "lengths" not in self._known:
            with torch.inference_mode(False):
                lengths = torch.tensor(self.lengths, dtype=torch.int32)
                self._known["lengths"] = lengths.to(held)
        return self._known["lengths"]

    def workspace(self, device: torch.device | str, *size: int) -> Tensor:
        """int32 zeros [b, *size] on a device, for kernels that reset what they write to zero; the
        same tensor outside of compiled graphs while the batch size does not change."""
        lengths = self.lengths_on(device)
        if torch.compiler.is_compiling():
            return lengths.new_zeros(len(lengths), *size)
        held = self._known.get("workspace")
        if held is None or held.shape != (len(lengths), *size):
            held = self._known["workspace"] = allocate_zeros(lengths, len(lengths), *size)
        return held

    def starts(self, batch: int) -> list[int]:
        """Tokens of each of `batch` sequences; zeros before the first call."""
        return self.lengths or [0] * batch

    def count(self, counts: list[int]) -> None:
        """Count appended tokens on the host alone."""
        self._check_batch(len(counts))
        self.counts_itself = True
        self.lengths = list(map(add, self.starts(len(counts)), counts))
        self.batch = len(counts)
        self._reached = list(map(max, self._reached or counts, self.lengths))

    def _update_device_lengths(self) -> None:
        """Copy `lengths` to the device's tensor, if there is one or a compiled step may need it."""
        held, device = self._known.get("lengths"), self.device
        if held is not None and len(held) == len(self.lengths):
            held.copy_(torch.tensor(self.lengths, dtype=torch.int32), non_blocking=True)
        elif self.batch is not None and device is not None and (held is not None or self.is_fixed):
            self._known.pop("lengths", None)
            self.lengths_on(device)

    def _check_batch(self, batch: int) -> None:
        if self.batch is not None and self.batch != batch:
            raise ValueError(f"cache holds {self.batch} rows but the input has {batch}")

    def bind(self, layer: Identity, geometry: dict[str, Any], new: dict[str, Tensor]) -> None:
        """Bind the cache to the layer that is about to append entries like `new`. Raises a
        ValueError if it holds tokens of another layer or another geometry."""
        held = [(self._streams[name], t) for name, t in new.items() if name in self._streams]
        fits = all(a.dtype == b.dtype and a.device == b.device for a, b in held)
        if fits and self._layer is layer and geometry == self._geometry:
            return
        if any(self.lengths):
            check_entries(self._streams, new, len(self.lengths), self.device)
            self.check_layer(layer, geometry)
        elif not fits or geometry != self._geometry:
            self._streams, self._tail = {}, {}
            device = next(iter(new.values())).device
            self._known = {name: t.to(device) for name, t in self._known.items()}
        self._layer, self._geometry = layer, dict(geometry)

    def check_layer(self, layer: Identity, geometry: dict[str, Any]) -> None:
        """Raise a ValueError if the cache holds tokens of another layer or another geometry."""
        is_bound = self._layer is layer and geometry == self._geometry
        # a compiled step reads no lengths
        if is_bound or (self.is_new if torch.compiler.is_compiling() else not any(self.lengths)):
            return
        for name in (*self._geometry, *geometry) if self._geometry else ():
            held, got = (g.get(name) for g in (self._geometry, geometry))
            if held != got:
                other = f"a layer with {name}={held}, this one has {name}={got}"
                raise ValueError(f"cache holds tokens of {other}: {ONE_CACHE}")
        if self._layer not in (None, layer):
            other = "another layer (which a deepcopy of a layer is too)"
            raise ValueError(f"cache holds tokens of {other}: {ONE_CACHE}")

    def append(
        self, new: dict[str, Tensor], tokens: NewTokens, every: int = 1, saved: bool = False
    ) -> dict[str, Tensor]:
        """Write the entries [b h n d] that new tokens complete, each of `every` tokens, to their
        streams, and return what attention reads: each stream [b h n d] up to its last entry, with
        zeros past the end of each sequence, or for the decode kernels the storage itself.

        It is a view of the storage if all sequences have the same length. For gradients of the new
        entries they are written to a copy of it, too. `saved`: always return a copy, because
        autograd saves the result for the backward and later calls overwrite the storage.
        """
        stores = self._allocate(new, tokens.ends(every), every)
        self._write(stores, new, tokens, every)
        if tokens.decoded:
            return stores
        for name, entries in new.items():
            stream = tokens.hide_past_end(self._read(stores[name], tokens.end(every)), every)
            needs_grad = torch.is_grad_enabled() and entries.requires_grad
            if needs_grad or saved:
                stream = stream.clone()
            if needs_grad:
                tokens.write(stream, entries, every)
            stores[name] = stream
        return stores

    def extend(
        self, tensors: dict[str, Tensor], raw: dict[str, Tensor], tokens: NewTokens, l: int, d: int,
        compress: Callable[[dict[str, Tensor]], dict[str, Tensor]], saved: bool,
        packs: bool = False,
    ) -> dict[str, Tensor]:  # fmt: skip
        """`append` the tensors of new tokens that attention reads, and the windows of raw entries
        that they complete, compressed, or packed as other numbers."""
        new = {name: t for name, t in tensors.items() if name not in ("q", "cq")}
        streams = self.append(new, tokens, saved=saved)
        if not raw:
            return streams
        if tokens.host is not None and tokens.width(d) == 0 and not (saved or packs):
            summaries = {f"c{name}": t[:, :, :0] for name, t in raw.items()}
        else:
            summaries = compress(self.windows(raw, tokens, l, d))
        return streams | self.append(summaries, tokens, d, saved)

    def rankings(self, like: Tensor, tokens: NewTokens) -> tuple[Tensor, Tensor | None]:
        """The ring buffer of rankings that tokens share, allocated for entries like `like`, and
        the last of each sequence, which the new tokens may share; None for its first tokens."""
        ring = self.ring({"ranking": like}, 1)["ranking"]
        is_first = not isinstance(tokens.start, Tensor) and tokens.start == 0
        if tokens.decoded or is_first:
            return ring, None
        return ring, self.recent("ranking", tokens, 1)[:, :, 0]

    def windows(
        self, new: dict[str, Tensor], tokens: NewTokens, l: int, d: int
    ) -> dict[str, Tensor]:
        """The windows [b h w l d] of raw entries that the new ones [b h n d] complete, with those
        of the tails. A sequence that completes fewer has any windows behind its own."""
        tails, width = self.ring(new, l - 1), tokens.width(d)
        if width == 0:
            return {name: t.new_empty(*t.shape[:2], 0, l, t.shape[3]) for name, t in new.items()}
        if tokens.decoded and tokens.host is not None:
            return kernels().windows(new, tails, tokens.start, l, d)
        streams = {
            name: torch.cat((self.recent(name, tokens, l - 1), t), dim=2) for name, t in new.items()
        }
        # the next window begins d - 1 - start % d into the last l - 1 tokens and the new ones
        if isinstance(tokens.start, int):
            first = d - 1 - tokens.start % d
            return {n: t[:, :, first:].unfold(2, l, d).mT for n, t in streams.items()}
        if tokens.host is None:
            width = min(width, (self.max_length or 0) // d)
        device = tokens.start.device
        begins = (d - 1 - tokens.start % d)[:, None] + d * torch.arange(width, device=device)
        index = (begins[..., None] + torch.arange(l, device=device)).clamp(max=l - 2 + tokens.new)
        return {
            name: take(t, index.flatten(1)).unflatten(2, (width, l)) for name, t in streams.items()
        }

    def recent(self, name: str, tokens: NewTokens, length: int) -> Tensor:
        """The last `length` entries of a tail before the new tokens, [b h length d]; zeros before
        the first token."""
        tail = self._tail[name]
        position = column(tokens.start) - length + torch.arange(length, device=tail.device)
        position = position.expand(len(tail), -1)
        entries = take(tail, position % max(1, tail.shape[2]))
        return entries.masked_fill((position < 0)[:, None, :, None], 0)

    def keep_recent(self, new: dict[str, Tensor], tokens: NewTokens, length: int) -> None:
        """Write the last `length + rollback` entries [b h n d] of each sequence to the tails."""
        self._write(self.ring(new, length), new, tokens, is_ring=True)

    def _write(
        self, stores: dict[str, Tensor], new: dict[str, Tensor], tokens: NewTokens, every: int = 1,
        is_ring: bool = False,
    ) -> None:  # fmt: skip
        """Write new entries to streams or tails, for the decode kernels by a kernel, which reads
        the lengths on the device."""
        page_table = None if is_ring else self.page_table
        if tokens.decoded and tokens.host is not None:
            kernels().append(
                new, stores, tokens.start, tokens.new, counts=tokens.counts, page_table=page_table,
                page_size=self.page_size, every=every, tail=is_ring,
            )  # fmt: skip
            return
        for name, entries in new.items():
            tokens.write(stores[name], entries.detach(), every, page_table, is_ring)

    def reserve(self, counts: list[int]) -> None:
        """Allocate pages for `counts[b]` more tokens of each sequence, before a CUDA graph writes
        them. Raises as `check` does."""
        counts = [check_int("counts", n, 0) for n in integers("counts", counts)]
        self.check(len(counts), max(counts, default=0), counts)
        self._allocate({}, list(map(add, self.starts(len(counts)), counts)), 1)

    def ring(self, new: dict[str, Tensor], length: int) -> dict[str, Tensor]:
        """The ring buffers [b h length+rollback d] of the tails named in `new`, allocated for
        entries like `new` [b h n d] (any n), without writing to them."""
        for name, entries in new.items():
            check_entries(self._tail, {name: entries}, self.batch or len(entries), self.device)
            if name not in self._tail:
                shape = (*entries.shape[:2], length + self.rollback, entries.shape[3])
                self._tail[name] = allocate_zeros(entries, *shape)
        return {name: self._tail[name] for name in new}

    def truncate(self, lengths: int | Sequence[int] | Tensor) -> None:
        """Keep only the first `lengths` tokens of each sequence (an int, or one per sequence).

        Raises:
            ValueError: more tokens than a sequence has, or fewer than `rollback` allows.
        """
        per_sequence: Any = lengths
        batch, one = len(self.lengths), as_int(lengths)
        requested = integers("lengths", per_sequence) if one is None else [one] * batch
        if (count := len(requested)) != batch:
            raise ValueError(f"lengths must be one integer or {batch} of them, got {count}")
        for row, new in enumerate(requested):
            held, reached = self.lengths[row], self._reached[row]
            if not 0 <= new <= held:
                raise ValueError(f"lengths[{row}] must be between 0 and {held}, got {new}")
            if self._tail and 0 < new < reached - self.rollback:
                raise ValueError(
                    f"lengths[{row}]={new} is out of reach: the row has held {reached} tokens, of "
                    f"which rollback={self.rollback} can be taken back (or all). Build the cache "
                    "with a larger rollback"
                )
        self.lengths, self.least_length = requested, 0
        self._reached = [0 if n == 0 else r for n, r in zip(requested, self._reached, strict=True)]
        self._update_device_lengths()

    def reset(self, rows: Sequence[int] | Tensor | None = None) -> None:
        """Empty all sequences, or those with indices `rows`, for new ones. The storage stays
        allocated."""
        batch = len(self.lengths)
        emptied = range(batch) if rows is None else sequence_indices(rows, batch)
        self.truncate([0 if row in emptied else n for row, n in enumerate(self.lengths)])

    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        """Replace each sequence b by a copy of sequence `rows[b]`, as beam search does. The batch
        size becomes `len(rows)`."""
        index = sequence_indices(rows, len(self.lengths))
        with torch.inference_mode(False), torch.no_grad():
            self._reorder_streams(index)
            self._tail = {name: select_sequences(t, index) for name, t in self._tail.items()}
            self.lengths = [self.lengths[r] for r in index]
            self._reached = [self._reached[r] for r in index]
            self.batch = len(index)
            self._update_device_lengths()

    def to(self, device: torch.device | str | None) -> KVCache:
        """Move the storage to a device, in place; returns self. None, as of tensors, is no move."""
        target = None if device is None else check_device("device", device)
        self._apply(lambda t: t.to(target))
        return self

    def clone(self) -> KVCache:
        """A copy that shares no storage with this cache, as are those of the module `copy`."""
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        copied.lengths, copied._reached = list(self.lengths), list(self._reached)
        copied._apply(lambda t: t.clone())
        return copied

    def __copy__(self) -> KVCache:
        return self.clone()  # two that share storage would not see what the other counts

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        copied = self.clone()
        copied._layer = memo.get(id(self._layer), self._layer)  # that of its layer's copy
        return copied

    def __getstate__(self) -> dict[str, Any]:
        # the property reads lengths that only the device has counted
        return vars(self) | {"_layer": None, "_lengths": self.lengths, "_is_behind": False}

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
        """Storage of the streams in `new`, grown to hold `ends[b]` entries of each sequence; []:
        of as many as there is room for."""
        rows = len(ends) or (len(next(iter(new.values()))) if new else 0)
        check_entries(self._streams, new, rows, self.device)
        for name, entries in new.items():
            self._streams[name] = self._allocate_stream(name, entries, max(ends, default=0), every)
        return {name: self._streams[name] for name in new}

    def _allocate_stream(self, name: str, like: Tensor, end: int, every: int) -> Tensor:
        """Storage of one stream, grown to hold `end` entries per sequence."""
        store = self._streams.get(name)
        if store is not None and end <= store.shape[2]:
            return store
        size = capacity_of(end) if self.max_length is None else self.max_length // every
        grown = allocate_zeros(like, *like.shape[:2], size, like.shape[3])
        if store is not None:
            grown[:, :, : store.shape[2]] = store
        return grown

    def _read(self, store: Tensor, end: int | None) -> Tensor:
        """The first `end` entries of a stream, [b h end d]; None: all that there is room for."""
        return store[:, :, :end]

    def _reorder_streams(self, index: list[int]) -> None:
        self._streams = {name: select_sequences(t, index) for name, t in self._streams.items()}


def check_cache(
    cache: KVCache | None, return_cache: bool, lengths: Sequence[int] | Tensor | None, causal: bool,
    alignment: int = 1,
) -> KVCache | None:  # fmt: skip
    """Check the cache of a layer's call; `return_cache` without a cache makes a new one. Pages hold
    a multiple of `alignment` tokens: whole blocks and windows."""
    check_type("cache", cache, KVCache, "a KVCache", or_none=True)
    if (return_cache or cache is not None) and not causal:
        raise ValueError("cache and return_cache need causal=True, this layer has causal=False")
    if cache is None and return_cache:
        cache = KVCache()
    if cache is not None and (cache.page_size or 0) % alignment:
        sizes = "the layer's selection_block_size and compress_block_sliding_stride"
        raise refusal("page_size", f"a multiple of {sizes}, of {alignment}", cache.page_size)
    if lengths is not None and cache is None:
        raise ValueError("lengths goes with a cache or return_cache=True")
    return cache


def check_caches(
    caches: Any, layers: Sequence[Any], return_loss: bool = False, lengths: Any = None
) -> None:
    """Check before any write that there is one cache per layer, each bound to its layer, or None.
    A loss excludes caches."""
    for name, value in (("cache", caches), ("lengths", lengths)):
        if return_loss and value is not None:
            raise ValueError(f"{name} must be None with return_loss=True, got {describe(value)}")
    if caches is None:
        return
    is_list = isinstance(caches, (list, tuple))
    if not is_list or len(caches) != len(layers):
        raise ValueError(
            f"cache must be a list of one KVCache for each of {len(layers)} layers, as new_cache "
            f"makes it, got {f'{len(caches)} of them' if is_list else describe(caches)}"
        )
    if len(set(map(id, caches))) != len(caches):
        raise ValueError("cache must hold a KVCache for each layer, got one of them twice")
    for index, (cache, layer) in enumerate(zip(caches, layers, strict=True)):
        check_type(f"cache[{index}]", cache, KVCache, "a KVCache")
        if hasattr(layer, "identity"):
            cache.check_layer(layer.identity, layer.geometry)


def check_room(
    caches: Sequence[KVCache], batch: int, new: int, lengths: Sequence[int] | Tensor | None
) -> None:
    """Check before any layer writes that each cache has room for the new tokens, and that all hold
    the same ones: an error in a later layer would leave those before it a step ahead."""
    for index, cache in enumerate(caches):
        cache.check(batch, new, lengths)
        if (held := cache.starts(batch)) != (first := caches[0].starts(batch)):
            expected = f"as many tokens as cache[0], {describe(first)}"
            raise ValueError(f"cache[{index}] must hold {expected}, got {describe(held)}")
