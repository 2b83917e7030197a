"""Tile sizes that the current call requests (`BlockSizes`). Operators pass them to launches."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

# kernels in the order of a call's sizes (rows and keys of each); the backward's may be missing
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

# rows and keys by kernel, of this thread: backward passes run in other threads
current: ContextVar[dict[str, tuple[int, int]]] = ContextVar("current")


def requested_sizes(kernel: str) -> tuple[int, int] | None:
    """Rows and keys that the current call requests for a kernel, if any."""
    return current.get({}).get(kernel)


@contextmanager
def sized(sizes: Sequence[int] | None) -> Iterator[None]:
    """Launch with these sizes: rows and keys of each kernel, in the order of SIZED."""
    pairs = [] if sizes is None else zip(sizes[::2], sizes[1::2], strict=True)
    before = current.set(
        {kernel: pair for names, pair in zip(SIZED, pairs, strict=False) for kernel in names}
    )
    try:
        yield
    finally:
        current.reset(before)
