"""What a step of decoding writes to a cache, by kernels that read lengths on the device. In a graph
that is compiled they are torch operators."""

from __future__ import annotations

import torch
from torch import Tensor


def append(
    new: tuple[Tensor, Tensor],
    stores: tuple[Tensor, Tensor],
    lengths: Tensor,
    tokens: int,
    *,
    counts: Tensor | None = None,
    page_table: Tensor | None = None,
    page_size: int | None = None,
    every: int = 1,
    ring: bool = False,
) -> None:
    """Write two streams' entries [b h n d], those that `tokens` new tokens of each row may
    complete, behind what the storage [b or pages, h, n, d] holds: one entry for each `every`
    tokens. A ring takes a token's at its position modulo the ring's size."""
    run = append_operator if torch.compiler.is_compiling() else append_entries
    run(*new, *stores, lengths, counts, page_table, tokens, page_size or 0, every, ring)


def append_entries(
    x: Tensor,
    y: Tensor,
    x_store: Tensor,
    y_store: Tensor,
    lengths: Tensor,
    counts: Tensor | None,
    page_table: Tensor | None,
    tokens: int,
    page_size: int,
    every: int,
    ring: bool,
) -> None:
    from ..kernels import entries

    step = entries.Step(lengths, counts, page_table, page_size)
    with torch.cuda.device_of(lengths):
        entries.append((x, y), (x_store, y_store), step, tokens, every=every, ring=ring)


append_operator = torch.library.custom_op(
    "native_sparse_attention::append", append_entries, mutates_args=("x_store", "y_store")
)
append_operator.register_fake(lambda *args: None)


def recent(
    rings: tuple[Tensor, Tensor], lengths: Tensor, tokens: int, l: int, d: int
) -> tuple[Tensor, Tensor]:
    """The windows [b h w l d] of raw keys and values that so many new tokens, in the rings [b h
    size d] already, may complete; zeros stand for tokens before the first."""
    run = recent_operator if torch.compiler.is_compiling() else recent_windows
    return run(*rings, lengths, tokens, l, d)


def recent_windows(
    x: Tensor, y: Tensor, lengths: Tensor, tokens: int, l: int, d: int
) -> tuple[Tensor, Tensor]:
    from ..kernels import entries

    with torch.cuda.device_of(lengths):
        return entries.recent((x, y), tokens, l, d, entries.Step(lengths))


recent_operator = torch.library.custom_op(
    "native_sparse_attention::recent", recent_windows, mutates_args=()
)


@recent_operator.register_fake
def _(x, y, lengths, tokens, l, d):
    return tuple(t.new_empty(*t.shape[:2], -(-tokens // d), l, t.shape[3]) for t in (x, y))
