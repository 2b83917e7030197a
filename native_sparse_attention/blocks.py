"""Block geometry: which tokens a window covers, who sees it, which block it belongs to.

Every function is integer arithmetic only, so it takes Python ints and integer tensors alike. This
is the one place where an off-by-one can live; `tests/test_blocks.py` holds each line to a brute
force.

    i, j    absolute position of a query, of a key            [0, S)
    l       compress_block_size             tokens a compression window covers
    d       compress_block_sliding_stride   tokens from one window's end to the next one's
    s       selection_block_size            tokens of a selection block

Window `w` covers `[(w + 1) d - l, (w + 1) d)`: it is named by the stride segment it ends, and
tokens before 0 are zeros. Selection block `c` covers `[c s, (c + 1) s)`. Either d divides s or s
divides d.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

Int = TypeVar("Int", int, Tensor)

# blocks of a group, which a first stage of ranking keeps together
GROUP = 4


def ceil_div(a: Int, b: int) -> Int:
    return (a + b - 1) // b


def minimum(a, b):
    """The smaller of two integers or integer tensors."""
    return (a + b - abs(a - b)) // 2


def num_windows(length: Int, d: int, *, causal: bool = True) -> Int:
    """Windows of a sequence. Causal: the complete ones. Otherwise the last one may hang over the
    end (over zeros), so that no token is out of reach."""
    return length // d if causal else ceil_div(length, d)


def num_visible_windows(i: Int, d: int) -> Int:
    """Windows that query i sees, causally: those whose last token lies strictly before it,
    `(w + 1) d - 1 < i`. They are windows 0 .. i // d - 1."""
    return i // d


def num_blocks(length: Int, s: int) -> Int:
    """Selection blocks of a sequence; the last one may be partial."""
    return ceil_div(length, s)


def windows_per_block(d: int, s: int) -> int:
    """How many windows end inside one selection block; 1 where a window spans several blocks."""
    return max(1, s // d)


def first_window_of_block(c: Int, d: int, s: int) -> Int:
    """Block c's windows are this one and the `windows_per_block` that follow: the windows whose
    stride segment lies in the block or, for d > s, the one whose segment contains it."""
    return c * s // d


def num_complete_blocks(i: Int, d: int, s: int) -> Int:
    """Blocks that query i may rank, causally: 0 .. this - 1 lie strictly before its own block, and
    each of their windows is visible to it (for d <= s the one follows from the other)."""
    return i // max(d, s) * max(1, d // s)


def overlap(w: Int, c: Int, l: int, d: int, s: int) -> Int:
    """Tokens that window w and selection block c share: the first end less the last start."""
    end = (w + 1) * d
    shared = minimum(end, (c + 1) * s) + minimum(l - end, -c * s)
    return shared - minimum(shared, 0)


def leader(i: Int, stride: int) -> Int:
    """The token whose ranking query i uses: the first of its group of `selection_stride` tokens."""
    return i - i % stride
