"""A decode step, and its writes to a KV cache. The kernels read sequence lengths on the device.
Later calls of the same shapes repeat recorded launches (`kernels/common/replay.py`)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...compat import transforms


def repeated(
    run: Callable[[SimpleNamespace], Any], tensors: list[Tensor | None], **values: Any
) -> Any:
    """run(of values and `tensors`), recorded once and then repeated."""
    at = SimpleNamespace(tensors=tensors, **values)
    return replayed(run, at, tensors, tuple(values.values()))


def replayed(
    run: Callable[[SimpleNamespace], Any], at: SimpleNamespace, tensors: list[Any], key: Any
) -> Any:
    """run(at), recorded once and then repeated: a function of these tensors, and of what the key
    says."""
    from ...kernels.common import replay

    device = next(t for t in tensors if t is not None)
    with torch.cuda.device_of(device):
        if not replay.is_possible(device):
            return run(at)
        return replay.repeats(run)(at, tensors, key)


def step(
    run: Callable[[SimpleNamespace], Tensor], at: SimpleNamespace, tensors: list[Any], key: Any
) -> Tensor:
    """`replayed` of a whole step, unless a mode or a subclass of tensors observes its operators."""
    plain = transforms.is_plain(tensors)
    out: Tensor = replayed(run, at, tensors, key) if plain else run(at)
    return out


def starts(lengths: Tensor, counts: Tensor | None, tokens: int, max_length: int) -> Tensor:
    """The lengths [b] in int64, after a device-side assertion that `counts` of `tokens` new ones
    fit."""
    from ...kernels.decode import kv_cache

    with torch.cuda.device_of(lengths):
        return kv_cache.starts(lengths, counts, tokens, max_length)


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
    tail: bool = False,
) -> None:
    """Append the entries `new` [b h n d] that `tokens` new tokens may complete to two streams.

    The streams' storage is [b h n d], or [pages h n d] with a page table. An entry covers `every`
    tokens. With `tail` the storage is a ring buffer: slot `p mod size` holds position p.
    """
    tensors = [*new, *stores, lengths, counts, page_table]
    repeated(append_now, tensors, page_size=page_size or 0, tokens=tokens, every=every, tail=tail)


def append_now(at: SimpleNamespace) -> None:
    from ...kernels.decode import kv_cache

    k, v, k_store, v_store, lengths, counts, page_table = at.tensors
    metadata = kv_cache.CacheMetadata(lengths, counts, page_table, at.page_size)
    kv_cache.append((k, v), (k_store, v_store), metadata, at.tokens, every=at.every, tail=at.tail)


def recent(
    tails: tuple[Tensor, Tensor], lengths: Tensor, tokens: int, l: int, d: int
) -> tuple[Tensor, Tensor]:
    """The windows [b h w l d] of raw keys and values that `tokens` new tokens may complete.

    The tails [b h size d] hold the new tokens already. Tokens before the first are zeros.
    """
    k, v = repeated(recent_now, [*tails, lengths], tokens=tokens, l=l, d=d)
    return k, v


def recent_now(at: SimpleNamespace) -> tuple[Tensor, Tensor]:
    from ...kernels.decode import kv_cache

    *tails, lengths = at.tensors
    metadata = kv_cache.CacheMetadata(lengths)
    return kv_cache.recent(tails, at.tokens, at.l, at.d, metadata)
