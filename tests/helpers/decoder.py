"""Sequences that a cache holds, each of them checked against one forward at every call."""

import torch

from native_sparse_attention import KVCache, PagedKVCache
from tests.helpers.layers import close

CACHES = {
    "growing": lambda batch=2: KVCache(),
    "fixed": lambda batch=2: KVCache(max_length=64),
    "paged": lambda batch=2: PagedKVCache(16, 20, batch, max_length=64),
}


class Decoder:
    """The first `rows` sequences of `x` [b n d], which `run` continues, each at its own position.
    Tokens that a call leaves out are NaN."""

    def __init__(self, module, x, cache, run=None, rows=None, tol=1e-12):
        self.run, self.x, self.cache, self.tol = module if run is None else run, x, cache, tol
        # row of x, and its next token
        self.place = [(row, 0) for row in range(len(x) if rows is None else rows)]
        with torch.no_grad():
            self.expected = module(x)

    @torch.no_grad()
    def step(self, *counts, width=0, times=1):
        """So many tokens of each sequence, of all as many if it is one number."""
        counts = counts if len(counts) > 1 else counts * len(self.place)
        for _ in range(times):
            self.call(counts, max(width, *counts))

    def call(self, counts, width):
        inp = self.x.new_full((len(counts), width, self.x.shape[-1]), torch.nan)
        for row, ((r, start), n) in enumerate(zip(self.place, counts, strict=True)):
            inp[row, :n] = self.x[r, start : start + n]
        lengths = {} if set(counts) == {width} else dict(lengths=torch.tensor(counts))
        out = self.run(inp, cache=self.cache, **lengths)
        for row, ((r, start), n) in enumerate(zip(self.place, counts, strict=True)):
            close(out[row, :n], self.expected[r, start : start + n], self.tol)
            assert (out[row, n:] == 0).all()
        self.move([(r, start + n) for (r, start), n in zip(self.place, counts, strict=True)])

    def move(self, place):
        self.place = place
        assert self.cache.lengths == [n for _, n in place]

    @torch.no_grad()
    def corrupt(self, *counts, value=float("nan")):
        """Tokens that are not finite, which are then taken back."""
        lengths = [n for _, n in self.place]
        shape = len(counts), max(counts), self.x.shape[-1]
        self.run(self.x.new_full(shape, value), cache=self.cache, lengths=torch.tensor(counts))
        self.cache.truncate(lengths)
        self.move(self.place)

    def truncate(self, *lengths):
        self.cache.truncate(torch.tensor(lengths))
        self.move([(r, n) for (r, _), n in zip(self.place, lengths, strict=True)])

    def reorder(self, *rows):
        self.cache.reorder(torch.tensor(rows))
        self.move([self.place[row] for row in rows])

    def restart(self, row, r):
        """Another sequence, from its first token on, in the place of one that ended."""
        self.cache.reset([row])
        self.move([(r, 0) if i == row else place for i, place in enumerate(self.place)])
