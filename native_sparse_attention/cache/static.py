"""A KV cache of fixed size inside a compiled graph: no shape depends on a sequence length.

    b  sequences    h  KV heads    n  new tokens, or windows    d  head dimension    l  window size

Only the device knows the sequence lengths. Streams are returned at full capacity, with zeros past
the end of each sequence. The host reads the lengths the next time `KVCache.lengths` is accessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..compat.graphs import is_exporting
from ..ops.triton import cache as by_kernel
from .kv_cache import KVCache
from .layout import check_capacity

# fewest tokens of a first call that has a graph of its own
FIRST_GRAPH = 1024


class NewTokens(NamedTuple):
    """The new tokens of each sequence.

    The first one is at position `starts` [b]. Of `new` tokens in the input, the first `counts` [b]
    are real; None: all are. `first`: they are the first ones of all sequences, at position 0.
    """

    starts: Tensor
    counts: Tensor | None
    new: int
    first: bool = False

    def ends(self) -> Tensor:
        """The length of each sequence after the step, [b]."""
        return self.starts + (self.new if self.counts is None else self.counts)

    def slots(self, size: int, every: int) -> tuple[Tensor, Tensor | None]:
        """Slots of the entries that the new tokens may complete, and a mask of the complete ones.

        An entry covers `every` tokens and lies in slot `entry % size`. Returns slots [b n], n at
        most `size`, and a mask [b n]; the mask is None if all entries are complete.
        """
        i = torch.arange(min(size, -(-self.new // every)), device=self.starts.device)
        entry = (self.starts // every)[:, None] + i
        is_complete = None
        if every > 1 or self.counts is not None:
            is_complete = (entry + 1) * every <= self.ends()[:, None]
        return entry % size, is_complete


@torch.library.custom_op("native_sparse_attention::places", mutates_args=())
def checked_starts(lengths: Tensor, counts: Tensor | None, new: int, max_length: int) -> Tensor:
    """The lengths in int64, after a check that `counts` of `new` more tokens fit.

    A GPU checks with a device-side assertion, for which the host does not wait.
    """
    if lengths.is_cuda:
        return by_kernel.starts(lengths, counts, new, max_length)
    if lengths.device.type == "cpu":
        numbers = [new] * len(lengths) if counts is None else counts.tolist()
        if any(n < 0 or n > new for n in numbers):
            raise ValueError(
                f"lengths must be {len(numbers)} integers between 0 and {new} (the new tokens), "
                f"got {numbers}"
            )
        check_capacity(max_length, lengths.tolist(), numbers)
    return lengths.to(torch.int64, copy=True)


@checked_starts.register_fake
def _(lengths, counts, new, max_length):
    return lengths.new_empty(lengths.shape, dtype=torch.int64)


def new_tokens(cache: KVCache, inp: Tensor, lengths: Sequence[int] | Tensor | None) -> NewTokens:
    """Positions of the tokens [b n ..] that the sequences of a cache take.

    Raises:
        ValueError: another batch size, lengths that are not integers [b], or a full cache (on a
            GPU a device-side assertion instead).
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
    held, first = cache._known["lengths"], starts_anew(cache, n)
    if first and counts is None:  # which fit
        return NewTokens(held.new_zeros(b, dtype=torch.int64), None, n, first)
    return NewTokens(checked_starts(held, counts, n, cache.max_length or 0), counts, n, first)


def starts_anew(cache: KVCache, new: int) -> bool:
    """Whether so many tokens are the first ones of all sequences that a graph of their own pays: at
    positions that the device alone knows, the fastest kernels do not run. An exported program asks
    nothing of the host: it is for any lengths."""
    if is_exporting():
        return False
    return FIRST_GRAPH <= new <= (cache.max_length or 0) and cache.is_new


def write(store: Tensor, new: Tensor, slots: Tensor, mask: Tensor | None) -> None:
    """store[b, :, slots[b, i]] = new[b, :, i] where mask[b, i]; slots are distinct.

    By `index_put_` on the storage itself: of all writes this one torch's compiler does in place. A
    scatter would copy the whole storage, twice."""
    store.index_put_(*index_and_values(store, new.detach(), slots, mask))


def index_and_values(
    store: Tensor, new: Tensor, slots: Tensor, mask: Tensor | None
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Arguments of the `index_put` that `write` does; masked slots get their old values."""
    b, h = (torch.arange(size, device=store.device) for size in store.shape[:2])
    index = b[:, None, None], h[:, None], slots[:, None]
    if mask is None:
        return index, new
    return index, torch.where(mask[:, None, :, None], new, store[index])


def write_tokens(
    cache: KVCache, new: dict[str, Tensor], tokens: NewTokens, every: int = 1
) -> dict[str, Tensor]:
    """Write new entries. Returns the storage, with any values past the end of a sequence."""
    stores = cache._allocate(new, [0] * len(tokens.starts), every)
    size = (cache.max_length or 0) // every
    known = tokens.first and tokens.counts is None
    for name, entries in new.items() if size else ():
        if known:
            n = tokens.new // every
            stores[name][:, :, :n] = entries[:, :, :n].detach()
            continue
        # entries beyond the capacity can only be padding
        write(stores[name], entries[:, :, :size], *tokens.slots(size, every))
    return {name: stores[name] for name in new}


def append(
    cache: KVCache, new: dict[str, Tensor], tokens: NewTokens, every: int = 1
) -> dict[str, Tensor]:
    """`KVCache.append`."""
    streams, size = write_tokens(cache, new, tokens, every), (cache.max_length or 0) // every
    if size == 0:
        return streams
    ends = (tokens.ends() // every)[:, None]
    past_end = torch.arange(size, device=tokens.starts.device) >= ends
    for name, store in streams.items():
        stream = store.masked_fill(past_end[:, None, :, None], 0)
        entries = new[name][:, :, :size]
        if torch.is_grad_enabled() and entries.requires_grad:
            where = tokens.slots(size, every)
            stream = stream.index_put(*index_and_values(stream, entries, *where))
        streams[name] = stream
    return streams


def recent(cache: KVCache, name: str, tokens: NewTokens, length: int) -> Tensor:
    """`KVCache.recent`."""
    tail = cache._tail[name]
    position = tokens.starts[:, None] - length + torch.arange(length, device=tail.device)
    slots = (position % max(1, tail.shape[2]))[:, None, :, None]
    entries = tail.gather(2, slots.expand(-1, tail.shape[1], -1, tail.shape[3]))
    return entries.masked_fill((position < 0)[:, None, :, None], 0)


def windows(
    cache: KVCache, new: dict[str, Tensor], tokens: NewTokens, l: int, d: int
) -> dict[str, Tensor]:
    """The windows [b h w l d] that new entries [b h n d] may complete, with those of the tails."""
    cache.ring(new, l - 1)
    max_windows = min(-(-tokens.new // d), (cache.max_length or 0) // d)
    device = tokens.starts.device
    # the next window starts d - 1 - start % d tokens into the last l - 1 tokens and the new ones
    first = (d - 1 - tokens.starts % d)[:, None] + d * torch.arange(max_windows, device=device)
    index = (first[..., None] + torch.arange(l, device=device)).clamp(max=l - 2 + tokens.new)
    found = {}
    for name, t in new.items():
        seen = torch.cat((recent(cache, name, tokens, l - 1), t), dim=2)
        flat = index.flatten(1)[:, None, :, None].expand(-1, t.shape[1], -1, t.shape[3])
        found[name] = seen.gather(2, flat).unflatten(2, (max_windows, l))
    return found


def keep_recent(cache: KVCache, new: dict[str, Tensor], tokens: NewTokens, length: int) -> None:
    """`KVCache.keep_recent`."""
    tails = cache.ring(new, length)
    size = length + cache.rollback
    if size == 0 or tokens.new == 0:
        return
    kept = min(tokens.new, size)
    # of each sequence's new tokens the last `kept`; negative for sequences that take fewer
    i = torch.arange(kept, device=tokens.starts.device) - kept
    i = (tokens.ends() - tokens.starts)[:, None] + i
    slots = (tokens.starts[:, None] + i) % size
    index = i.clamp(min=0)[:, None, :, None]
    for name, t in new.items():
        last = t.gather(2, index.expand(-1, t.shape[1], -1, t.shape[3]))
        write(tails[name], last, slots, None if tokens.counts is None else i >= 0)


def advance(cache: KVCache, tokens: NewTokens) -> None:
    """Count the appended tokens, on the device only."""
    cache._known["lengths"].add_(tokens.new if tokens.counts is None else tokens.counts)
    cache.is_counted_by(len(tokens.starts))


def zero_padding(t: Tensor, tokens: NewTokens) -> Tensor:
    """[b n d] with zeros for the tokens that are not real."""
    if tokens.counts is None:
        return t
    padding = torch.arange(tokens.new, device=t.device) >= tokens.counts[:, None]
    return t.masked_fill(padding[..., None], 0)
