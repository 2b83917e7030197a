"""Tile sizes of the call under way, which travel with it through the operators (`BlockSizes`)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

# whose they are, rows and keys of one after the other; the backward's may be missing
SIZED: tuple[tuple[str, ...], ...] = (
    ("forward",),
    ("window.forward",),
    ("query_major.forward", "union.forward", "key_major.forward"),
    ("dq",),
    ("window.dq",),
    ("query_major.dq", "union.dq"),
    ("dkv",),
    ("window.dkv",),
    ("key_major.backward",),
)

# by kernel, in this thread: backward passes run in others
current: ContextVar[dict[str, tuple[int, int]]] = ContextVar("current")


def requested_sizes(kernel: str) -> tuple[int, int] | None:
    """Rows and keys that the call asks for."""
    return current.get({}).get(kernel)


@contextmanager
def sized(sizes: Sequence[int] | None) -> Iterator[None]:
    """Launch with these sizes."""
    pairs = [] if sizes is None else zip(sizes[::2], sizes[1::2], strict=True)
    before = current.set(
        {kernel: pair for names, pair in zip(SIZED, pairs, strict=False) for kernel in names}
    )
    try:
        yield
    finally:
        current.reset(before)
