"""Lengths of the sequences in a KV cache, on the host and on the device."""

from __future__ import annotations

from operator import add

import torch
from torch import Tensor

from ..checks.scalars import check_device
from .layout import first_device


class Sequences:
    """Lengths of the b sequences of a KV cache.

    The host counts the tokens that it appends. In a compiled step only the device counts; the host
    reads its lengths the next time `lengths` is accessed.

    Attributes:
        batch: number of sequences; None before the first call, if it was not given.
        counts_itself: whether kernels appended the last tokens and updated the lengths on the
            device themselves.
        is_new: whether the host knows that all sequences are empty, also in a compiled graph.
    """

    is_new = False  # of caches that were pickled before there was one

    # These names are in users' pickles of caches: they must not change.
    def __init__(self, batch: int | None):
        self.batch = batch
        self._lengths: list[int] = [] if batch is None else [0] * batch
        self._reached = list(self._lengths)  # the maximal length of each sequence so far
        self._known: dict[str, Tensor] = {}  # on the device: "lengths", "page_table", "workspace"
        self._is_asked = False  # whether `lengths_on` has been called
        self._is_behind = False  # whether the device has counted tokens that the host has not
        self.counts_itself = False
        self.is_new = True

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence; [] while the batch size is unknown."""
        if self._is_behind:
            self._is_behind = False
            self._lengths = self._known["lengths"].tolist()
            self._reached = list(map(max, self._reached or self._lengths, self._lengths))
        return self._lengths

    @lengths.setter
    def lengths(self, lengths: list[int]) -> None:
        self._is_behind = False
        self._lengths = lengths
        self.is_new = not any(lengths)

    def __len__(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths, default=0)

    @property
    def is_fixed(self) -> bool:
        """Whether a compiled step may count on the device only."""
        return False

    @property
    def device(self) -> torch.device | None:
        return first_device(self._known)

    @property
    def is_uniform(self) -> bool:
        """Whether all sequences have the same length."""
        return len(set(self.lengths)) <= 1

    @property
    def page_table(self) -> Tensor | None:
        """Page indices of each sequence, int32 [b, pages]; None for a cache without pages."""
        return self._known.get("page_table")

    def lengths_on(self, device: torch.device | str) -> Tensor:
        """Lengths of the sequences on a device, int32 [b].

        The tensor stays the same while the batch size does not change. Every method but `count`
        keeps it up to date with `lengths`.

        Raises:
            ValueError: the cache is on another device, or its batch size is unknown.
        """
        if self.batch is None:
            raise ValueError("cache has no rows yet, and no lengths: construct it with batch=...")
        wanted = check_device("device", device)
        held = self.device or wanted
        if wanted.type != held.type or wanted.index not in (None, held.index):
            raise ValueError(f"cache is on {held}, got {wanted} for its lengths")
        self._is_asked = True
        return self._device_lengths(held)

    def _device_lengths(self, device: torch.device) -> Tensor:
        if "lengths" not in self._known:
            with torch.inference_mode(False):
                lengths = torch.tensor(self.lengths, dtype=torch.int32)
                self._known["lengths"] = lengths.to(device)
        return self._known["lengths"]

    def workspace(self, device: torch.device | str, *size: int) -> Tensor:
        """int32 zeros [b, *size] on a device, for kernels that reset what they write to zero.

        The tensor stays the same while the batch size does not change.
        """
        lengths = self.lengths_on(device)
        held = self._known.get("workspace")
        if held is None or held.shape != (len(lengths), *size):
            with torch.inference_mode(False):
                held = self._known["workspace"] = lengths.new_zeros(len(lengths), *size)
        return held

    def positions(self, device: torch.device, counts: list[int], new: int) -> int | Tensor:
        """Position of the first new token of each sequence, [b].

        An int if all sequences have the same length and at least one takes all `new` tokens.
        """
        if counts and max(counts) == new and self.is_uniform:
            return len(self)
        return torch.tensor(self.starts(len(counts)), dtype=torch.long, device=device)

    def starts(self, batch: int) -> list[int]:
        """Tokens of each of `batch` sequences; zeros before the first call."""
        return self.lengths or [0] * batch

    def count(self, counts: list[int]) -> None:
        """Count appended tokens on the host only.

        The caller adds `counts` to the tensor of `lengths_on`.
        """
        self._check_counts(counts)
        self.counts_itself = True
        self.lengths = list(map(add, self.starts(len(counts)), counts))
        self.batch = len(counts)
        self._reached = list(map(max, self._reached or counts, self.lengths))

    def advance(self, counts: list[int]) -> None:
        """Count appended tokens on the host and on the device."""
        self.count(counts)
        self.counts_itself = False
        self._update_device_lengths()

    def is_counted_by(self, batch: int) -> None:
        """Note that the device has counted tokens of `batch` sequences and the host has not."""
        self.batch, self._is_behind, self.counts_itself = batch, True, False
        self.is_new = False

    def _update_device_lengths(self) -> None:
        """Copy `lengths` to the device's tensor, if there is one or a compiled step may need it."""
        held = self._known.get("lengths")
        if held is None and self.is_fixed and self.device is not None:
            held = self._device_lengths(self.device)
        if held is None:
            return
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        if len(held) == len(lengths):
            held.copy_(lengths, non_blocking=True)
        else:
            self._known["lengths"] = lengths.to(held.device)

    def _check_counts(self, counts: list[int]) -> None:
        batch = len(counts) if self.batch is None else self.batch
        if len(counts) != batch or min(counts, default=0) < 0:
            raise ValueError(f"counts must be {batch} integers of at least 0, got {counts}")
