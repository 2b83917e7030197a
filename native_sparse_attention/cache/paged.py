"""PagedKVCache: a KVCache whose rows share one pool of pages.

    b  batch    h  KV heads    p  pages of a row    n  entries    d  width

A page holds `page_size` tokens of every token stream and `page_size // every` entries of a stream
with one entry for each `every` tokens, so that one page table serves them all. The token at
position t of row r lies in page `page_table[r, t // page_size]`, slot `t % page_size`; window w of
`every` tokens in page `page_table[r, w * every // page_size]`, slot `w % (page_size // every)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from ..blocks import ceil_div
from ..checks.scalars import TOO_MANY, check_int, check_ints
from .entries import hide_behind, places_of, zeros
from .kv_cache import KVCache


class PagedKVCache(KVCache):
    """A KVCache in pages, which a row takes as it grows and gives back with the tokens that it
    forgets (`truncate`, `reset`): memory follows the tokens held, not rows times `max_length`.

    Storage of a stream is [num_pages h page_size//every d], made on first use; the tails stay per
    row. Layers read and write it as they do a KVCache, through gathered copies of its streams.
    Each row owns its pages: `reorder` moves those of a row to its first copy, and copies them for
    the others. Entries of `page_table` behind a row's pages are 0 and mean nothing: a kernel writes
    for the rows alone that take tokens, and reads below their lengths.

    Args:
        page_size: tokens of a page, a multiple of the layer's selection_block_size and
            compress_block_sliding_stride.
        num_pages: pages of the pool.
        batch: rows.
        max_length: tokens a row may hold.
        rollback: how many tokens back `truncate` reaches, as KVCache's.

    Raises:
        ValueError: a size that is not an integer of at least 1 (rollback: 0).
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
        # of every row, and the free ones, the next to be taken last
        self._pages: list[list[int]] = [[] for _ in range(batch)]
        self._free = list(range(num_pages))[::-1]
        self._width = ceil_div(max_length, page_size)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def check(self, batch: int, new: int, lengths: Sequence[int] | Tensor | None) -> list[int]:
        counts = super().check(batch, new, lengths)
        self._missing([a + n for a, n in zip(self.lengths, counts, strict=True)])
        return counts

    def truncate(self, lengths: int | Sequence[int] | Tensor) -> None:
        super().truncate(lengths)
        pages = [held[:n] for held, n in zip(self._pages, self._used(), strict=True)]
        for kept, held in zip(pages, self._pages, strict=True):
            self._free += held[len(kept) :][::-1]
        self._assign(pages)

    def clone(self) -> PagedKVCache:
        other: Any = super().clone()
        other._pages, other._free = [list(pages) for pages in self._pages], list(self._free)
        return other

    # pages

    def _used(self) -> list[int]:
        """Pages that the tokens of each row lie in."""
        return [ceil_div(n, self.page_size) for n in self.lengths]

    def _missing(self, lengths: list[int]) -> list[int]:
        """Pages that each row has yet to take before it can hold so many tokens."""
        sizes = map(len, self._pages)
        missing = [-(-n // self.page_size) - size for n, size in zip(lengths, sizes, strict=True)]
        if max(missing, default=0) <= 0:
            return [0] * len(missing)
        missing = [max(0, n) for n in missing]
        self._check_free(sum(missing), len(self._free))
        return missing

    def _check_free(self, needed: int, free: int) -> None:
        if needed > free:
            raise ValueError(
                f"cache is full: {needed} pages needed, {free} of num_pages={self.num_pages} free"
            )

    def _assign(self, pages: list[list[int]]) -> None:
        """Give each row these pages, and write to the page table what has changed in it."""
        changes = [
            (row, column, page)
            for row, (now, before) in enumerate(zip(pages, self._pages, strict=True))
            if now != before
            for column, (page, old) in enumerate(zip_longest(now, before, fillvalue=0))
            if page != old
        ]
        self._pages = pages
        if changes:
            table = self._known["page_table"]
            rows, columns, numbers = torch.tensor(changes).T.to(table.device, non_blocking=True)
            table[rows, columns] = numbers.to(table.dtype)

    def _new_table(self, rows: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._known["page_table"] = torch.zeros(
                rows, self._width, dtype=torch.int32, device=device
            )

    # storage

    def _hold(self, new: dict[str, Tensor], ends: list[int], every: int) -> dict[str, Tensor]:
        missing = self._missing([end * every for end in ends])
        stores = super()._hold(new, ends, every)
        if "page_table" not in self._known:
            self._new_table(len(ends), next(iter(new.values())).device)
        if any(missing):
            self._assign(
                [
                    pages + [self._free.pop() for _ in range(n)] if n else pages
                    for pages, n in zip(self._pages, missing, strict=True)
                ]
            )
        return stores

    def _storage(self, name: str, like: Tensor, end: int, every: int) -> Tensor:
        slots, odd = divmod(self.page_size, every)
        if odd:
            raise ValueError(f"page_size must be a multiple of every={every}, got {self.page_size}")
        store = self._streams.get(name)
        if store is None:
            return zeros(like, self.num_pages, slots)
        if store.shape[2] != slots:
            raise ValueError(
                f"cache holds {store.shape[2]} entries of {name} a page, not {slots}: is it "
                "another layer's?"
            )
        return store

    def _write(self, store: Tensor, new: Tensor, starts: list[int], counts: list[int]) -> None:
        rows, places, at = (
            t.to(store.device, non_blocking=True) for t in places_of(starts, counts)
        )
        slots = store.shape[2]
        pages = self._known["page_table"][rows, places // slots]
        store[pages, :, places % slots] = new[rows, :, at]

    def _read(self, store: Tensor, ends: list[int], copied: bool) -> Tensor:
        """A stream up to its last entry, [b h max(ends) d], gathered; 0 behind the end of a row,
        where a page may hold what another row left."""
        end = max(ends, default=0)
        pages = self._known["page_table"][:, : ceil_div(end, store.shape[2])]
        # [b p h slots d] -> [b h n d]
        return hide_behind(store[pages].transpose(1, 2).flatten(2, 3)[:, :, :end], ends)

    def _reorder_streams(self, index: list[int]) -> None:
        used = [held[:n] for held, n in zip(self._pages, self._used(), strict=True)]
        # the first copy of a row takes over its pages
        heirs = {source: row for row, source in reversed(list(enumerate(index)))}
        free = self._free.copy()
        for row, held in enumerate(self._pages):
            free += (held[len(used[row]) :] if row in heirs else held)[::-1]
        copies = [source for row, source in enumerate(index) if heirs[source] != row]
        self._check_free(sum(len(used[source]) for source in copies), len(free))

        moved: list[tuple[int, int]] = []
        pages: list[list[int]] = []
        for row, source in enumerate(index):
            own = used[source]
            if heirs[source] != row:
                own = [free.pop() for _ in own]
                moved += zip(own, used[source], strict=True)
            pages.append(own)
        self._free = free
        self._copy_pages(moved)
        if len(index) != len(self._pages):
            self._pages = [[] for _ in index]
            if self.page_table is not None:
                self._new_table(len(index), self.page_table.device)
        self._assign(pages)

    def _copy_pages(self, moved: list[tuple[int, int]]) -> None:
        """Page a of every stream becomes a copy of page b, for each (a, b)."""
        if not moved:
            return
        for store in self._streams.values():
            to, of = torch.tensor(moved).T.to(store.device, non_blocking=True)
            store[to] = store[of]


def new_cache(
    max_length: int | None,
    rollback: int,
    batch: int | None,
    page_size: int | None,
    num_pages: int | None,
) -> KVCache:
    """A PagedKVCache where `page_size` is given, which then needs the other sizes too."""
    if page_size is None and num_pages is None:
        return KVCache(max_length, batch, rollback)
    sizes: dict[str, Any] = dict(
        page_size=page_size, num_pages=num_pages, batch=batch, max_length=max_length
    )
    return PagedKVCache(**sizes, rollback=rollback)
