"""PagedKVCache: a KVCache whose sequences allocate pages from one pool.

    b  sequences    h  KV heads    p  pages of a sequence    n  entries    d  head dimension

A page holds `page_size` tokens of every token stream, and `page_size // every` entries of a stream
whose entries cover `every` tokens, so all streams use one page table. The token at position t of
sequence b lies in page `page_table[b, t // page_size]`, slot `t % page_size`. Window w of `every`
tokens lies in page `page_table[b, w * every // page_size]`, slot `w % (page_size // every)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..blocks import ceil_div
from ..checks import TOO_MANY, check_int, check_ints, refusal
from .kv_cache import KVCache, allocate_zeros


class PagedKVCache(KVCache):
    """A KVCache in pages. Memory follows the tokens held, not batch times `max_length`.

    A sequence takes pages from the pool as it grows, and returns them when it is truncated or
    reset. The storage of a stream is [num_pages h page_size//every d]; tails are stored per
    sequence. Layers read the streams as gathered copies. Sequences do not share pages: after
    `reorder`, the first copy of a sequence owns its pages and the others get new ones. Entries of
    `page_table` past a sequence's pages are 0; a kernel must neither read nor write through them.

    Args:
        page_size: tokens per page, a multiple of the layer's selection_block_size and
            compress_block_sliding_stride.
        num_pages: pages in the pool.
        batch, max_length, rollback: see KVCache.
    """

    page_size: int

    def __init__(
        self, page_size: int, num_pages: int, batch: int, max_length: int, rollback: int = 64
    ):
        page_size, max_length = check_ints(1, page_size=page_size, max_length=max_length)
        num_pages = check_int("num_pages", num_pages, 1, TOO_MANY)
        batch = check_int("batch", batch, 1, TOO_MANY)
        super().__init__(max_length, batch, rollback)
        self.page_size = page_size
        self.num_pages = num_pages
        # pages of each sequence, and the free pages; the last free page is allocated next
        self._pages: list[list[int]] = [[] for _ in range(batch)]
        self._free = list(range(num_pages))[::-1]
        self._width = ceil_div(max_length, page_size)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def check(self, batch: int, new: int, lengths: Sequence[int] | Tensor | None) -> list[int]:
        counts = super().check(batch, new, lengths)
        self._pages_needed([a + n for a, n in zip(self.lengths, counts, strict=True)])
        return counts

    def truncate(self, lengths: int | Sequence[int] | Tensor) -> None:
        super().truncate(lengths)
        pages = self._used_pages()
        for used, held in zip(pages, self._pages, strict=True):
            self._free += held[len(used) :][::-1]
        self._assign(pages)

    def clone(self) -> PagedKVCache:
        clone: Any = super().clone()
        clone._pages, clone._free = [list(pages) for pages in self._pages], list(self._free)
        return clone

    def _used_pages(self) -> list[list[int]]:
        held_tokens = zip(self._pages, self.lengths, strict=True)
        return [held[: ceil_div(n, self.page_size)] for held, n in held_tokens]

    def _pages_needed(self, lengths: list[int]) -> list[int]:
        """Pages that each sequence must allocate to hold `lengths` tokens, if as many are free."""
        held_tokens = zip(self._pages, lengths, strict=True)
        needed = [max(0, ceil_div(n, self.page_size) - len(held)) for held, n in held_tokens]
        self._check_free(sum(needed), len(self._free))
        return needed

    def _check_free(self, needed: int, free: int) -> None:
        if needed > free:
            held = f"{free} of num_pages={self.num_pages} free"
            raise ValueError(f"cache is full: {needed} pages needed, {held}")

    def _assign(self, pages: list[list[int]]) -> None:
        """Set the pages of each sequence, and update the changed rows of the page table."""
        for row, (new, old) in enumerate(zip(pages, self._pages, strict=True)):
            if new != old:
                entries = torch.tensor(new + [0] * (self._width - len(new)), dtype=torch.int32)
                self._known["page_table"][row].copy_(entries, non_blocking=True)
        self._pages = pages

    def _allocate(self, new: dict[str, Tensor], ends: list[int], every: int) -> dict[str, Tensor]:
        needed = self._pages_needed([end * every for end in ends])
        stores = super()._allocate(new, ends, every)
        if "page_table" not in self._known:
            if not new:
                raise ValueError("cache has no pages to reserve before the first call of its layer")
            like, shape = next(iter(new.values())), (len(ends), self._width)
            self._known["page_table"] = allocate_zeros(like, *shape, dtype=torch.int32)
        grown = zip(self._pages, needed, strict=True)
        self._assign([held + [self._free.pop() for _ in range(n)] for held, n in grown])
        return stores

    def _allocate_stream(self, name: str, like: Tensor, end: int, every: int) -> Tensor:
        slots, odd = divmod(self.page_size, every)
        if odd:
            raise refusal("page_size", f"a multiple of every={every}", self.page_size)
        store = self._streams.get(name)
        if store is not None:
            return store
        return allocate_zeros(like, self.num_pages, like.shape[1], slots, like.shape[3])

    def _read(self, store: Tensor, end: int | None) -> Tensor:
        """A gathered copy of the first entries. Past the end of a sequence pages may hold entries
        of an earlier owner."""
        end = end or 0  # the host always knows it
        pages = self._known["page_table"][:, : ceil_div(end, store.shape[2])]
        # [b p h slots d] -> [b h n d]
        return store[pages].transpose(1, 2).flatten(2, 3)[:, :, :end]

    def _reorder_streams(self, index: list[int]) -> None:
        used = self._used_pages()
        # the first copy of a sequence takes over its pages
        owners = {source: row for row, source in reversed(list(enumerate(index)))}
        free = self._free.copy()
        for row, held in enumerate(self._pages):
            free += (held[len(used[row]) :] if row in owners else held)[::-1]
        copies = {row: used[r] for row, r in enumerate(index) if owners[r] != row}
        self._check_free(sum(map(len, copies.values())), len(free))
        copied = {row: [free.pop() for _ in held] for row, held in copies.items()}
        pages = [copied.get(row, used[source]) for row, source in enumerate(index)]
        self._free = free
        if any(copied.values()):
            pairs = torch.tensor([list(chain(*rows.values())) for rows in (copied, copies)])
            for store in self._streams.values():
                targets, sources = pairs.to(store.device, non_blocking=True)
                store[targets] = store[sources]
        if len(index) != len(self._pages):
            self._pages = [[] for _ in index]
            if self.page_table is not None:
                self._known["page_table"] = allocate_zeros(self.page_table, len(index), self._width)
        self._assign(pages)
