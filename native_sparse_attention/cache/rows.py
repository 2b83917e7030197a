"""Rows of a cache, b of them: how many tokens each holds, on the host and on the device."""

from __future__ import annotations

from operator import add

import torch
from torch import Tensor

from ..checks.scalars import check_device
from .entries import first_device


class Rows:
    """Lengths of the rows of a cache.

    The host counts the tokens that it appends. In a compiled step the device alone counts, and
    `lengths` asks it for them when next read.

    Attributes:
        batch: rows, None before the first call where none were asked for.
        counts_itself: whether the device counted the tokens that came last by kernels.
    """

    def __init__(self, batch: int | None):
        self.batch = batch
        self._lengths: list[int] = [] if batch is None else [0] * batch
        self._reached = list(self._lengths)  # most tokens that a row has ever held
        self._known: dict[str, Tensor] = {}  # the device's copy: "lengths", "page_table"
        self._is_asked = False  # whether somebody has asked for the device's lengths
        self._is_behind = False  # whether the device has counted tokens that the host has not
        self.counts_itself = False

    @property
    def lengths(self) -> list[int]:
        """Tokens that each row holds; [] before there are rows."""
        if self._is_behind:
            self._is_behind = False
            self._lengths = self._known["lengths"].tolist()
            self._reached = list(map(max, self._reached or self._lengths, self._lengths))
        return self._lengths

    @lengths.setter
    def lengths(self, lengths: list[int]) -> None:
        self._is_behind = False
        self._lengths = lengths

    def __len__(self) -> int:
        """Tokens in the longest row."""
        return max(self.lengths, default=0)

    @property
    def is_fixed(self) -> bool:
        """Whether a compiled step may leave it to the device to count."""
        return False

    @property
    def device(self) -> torch.device | None:
        return first_device(self._known)

    @property
    def is_uniform(self) -> bool:
        """Whether all rows have one length."""
        return len(set(self.lengths)) <= 1

    @property
    def page_table(self) -> Tensor | None:
        """Where the pages of each row lie; None where there are none."""
        return self._known.get("page_table")

    def lengths_on(self, device: torch.device | str) -> Tensor:
        """The rows' lengths on a device, int32 [b]: one tensor while the number of rows stays,
        which follows `lengths` through all but `count`.

        Raises:
            ValueError: a cache on another device, or one that has no rows yet.
        """
        if self.batch is None:
            raise ValueError("cache has no rows yet, and no lengths: construct it with batch=...")
        wanted = check_device("device", device)
        held = self.device or wanted
        if wanted.type != held.type or wanted.index not in (None, held.index):
            raise ValueError(f"cache is on {held}, got {wanted} for its lengths")
        self._is_asked = True
        return self._lengths_there(held)

    def _lengths_there(self, device: torch.device) -> Tensor:
        if "lengths" not in self._known:
            with torch.inference_mode(False):
                lengths = torch.tensor(self.lengths, dtype=torch.int32)
                self._known["lengths"] = lengths.to(device)
        return self._known["lengths"]

    def workspace(self, device: torch.device | str, *size: int) -> Tensor:
        """int32 zeros [b, *size] on a device, for kernels that leave them so: one tensor while the
        number of rows stays."""
        rows = self.lengths_on(device)
        held = self._known.get("workspace")
        if held is None or held.shape != (len(rows), *size):
            with torch.inference_mode(False):
                held = self._known["workspace"] = rows.new_zeros(len(rows), *size)
        return held

    def positions(self, device: torch.device, counts: list[int], new: int) -> int | Tensor:
        """Where each row goes on: an int where all rows have one length and the longest takes all
        `new` tokens, else a tensor [b]."""
        if counts and max(counts) == new and self.is_uniform:
            return len(self)
        return torch.tensor(self.starts(len(counts)), dtype=torch.long, device=device)

    def starts(self, batch: int) -> list[int]:
        """Tokens that each row holds, also before the first call."""
        return self.lengths or [0] * batch

    def count(self, counts: list[int]) -> None:
        """Count the tokens appended, on the host alone: whoever appended them adds `counts` to the
        tensor of `lengths_on` himself."""
        self._check_counts(counts)
        self.counts_itself = True
        self.lengths = list(map(add, self.starts(len(counts)), counts))
        self.batch = len(counts)
        self._reached = list(map(max, self._reached or counts, self.lengths))

    def advance(self, counts: list[int]) -> None:
        """Count the tokens appended."""
        self.count(counts)
        self.counts_itself = False
        self._tell_lengths()

    def is_counted_by(self, batch: int) -> None:
        """The device alone has counted tokens of so many rows."""
        self.batch, self._is_behind, self.counts_itself = batch, True, False

    def _tell_lengths(self) -> None:
        """Bring the device's copy of `lengths` up to date."""
        held = self._known.get("lengths")
        if held is None and self.is_fixed and self.device is not None:
            held = self._lengths_there(self.device)
        if held is None:
            return
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        if len(held) == len(lengths):
            held.copy_(lengths, non_blocking=True)
        else:
            self._known["lengths"] = lengths.to(held.device)

    def _check_counts(self, counts: list[int]) -> None:
        rows = len(counts) if self.batch is None else self.batch
        if len(counts) != rows or min(counts, default=0) < 0:
            raise ValueError(f"counts must be {rows} integers of at least 0, got {counts}")
