"""Every line of the geometry against sets of tokens, over all small (length, l, d, s)."""

import itertools

import pytest
import torch

from native_sparse_attention import blocks

SIZES = (1, 2, 3, 4, 6, 8)
# by the length of windows: stride and block
GEOMETRIES = {
    l: [(d, s) for d in SIZES for s in SIZES if l >= d and (s % d == 0 or d % s == 0)]
    for l in SIZES
}
windows_of = pytest.mark.parametrize("l", GEOMETRIES)
LENGTHS = range(0, 27)


def window_tokens(w, l, d):
    """By the definition: the l tokens that end with stride segment w."""
    return set(range((w + 1) * d - l, (w + 1) * d))


def block_tokens(c, s):
    return set(range(c * s, (c + 1) * s))


@windows_of
def test_windows(l):
    for d in (d for d in SIZES if d <= l):
        for length in LENGTHS:
            complete = [w for w in range(30) if max(window_tokens(w, l, d)) < length]
            assert blocks.num_windows(length, d) == len(complete)
            # two-sided: every token in a window, and no window of padding alone
            count = blocks.num_windows(length, d, causal=False)
            covered = set().union(*(window_tokens(w, l, d) for w in range(count)))
            assert covered >= set(range(length))
            assert count == 0 or set(range((count - 1) * d, count * d)) & set(range(length))


@windows_of
def test_blocks(l):
    """Windows of a block: segments inside it or, for d > s, the one around it. Complete: windows
    all visible, before the query's own block."""
    for d, s in GEOMETRIES[l]:
        windows = {}
        for c in range(30):
            block = block_tokens(c, s)
            segments = {
                w: set(range(w * d, (w + 1) * d)) for w in range(c * s // d, (c + 1) * s // d + 1)
            }
            windows[c] = [w for w, tokens in segments.items() if tokens <= block or tokens >= block]
            first = blocks.first_window_of_block(c, d, s)
            assert windows[c] == list(range(first, first + blocks.windows_per_block(d, s)))
        for i in LENGTHS:
            visible = {w for w in range(60) if max(window_tokens(w, l, d)) < i}
            assert visible == set(range(blocks.num_visible_windows(i, d)))
            complete = [
                c
                for c in windows
                if max(block_tokens(c, s)) < i // s * s and visible.issuperset(windows[c])
            ]
            assert complete == list(range(blocks.num_complete_blocks(i, d, s)))
            # no candidate holds a token that the query may not see
            assert all(max(block_tokens(c, s)) < i for c in complete)
        for length in LENGTHS:
            assert blocks.num_blocks(length, s) == len({t // s for t in range(length)})


@windows_of
def test_overlap(l):
    for d, s in GEOMETRIES[l]:
        for w, c in itertools.product(range(8), range(8)):
            shared = window_tokens(w, l, d) & block_tokens(c, s)
            assert blocks.overlap(w, c, l, d, s) == len(shared)
        # integers and tensors are one arithmetic
        w, c = torch.arange(8), torch.arange(8)[:, None]
        table = [[blocks.overlap(i, j, l, d, s) for i in range(8)] for j in range(8)]
        assert blocks.overlap(w, c, l, d, s).tolist() == table
