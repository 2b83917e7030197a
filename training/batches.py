"""The bytes of a step as tensors, and which bytes of packed documents have a prediction."""

from __future__ import annotations

from argparse import Namespace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .data import encoded


class Batch(NamedTuple):
    """Windows ids [b, n + 1] of a forward pass; with --pack the document of each byte. `predicted`
    counts the bytes that have a prediction: the first byte of a document has none. `weight` is that
    count over its mean in the forward passes of a step."""

    ids: Tensor
    segment_ids: Tensor | None
    predicted: int
    weight: float = 1.0


def windows(data: np.ndarray, starts: np.ndarray, cfg: Namespace) -> Tensor:
    """The `seq_len + 1` bytes from each start, [b, n + 1]."""
    ids = data[starts[:, None] + np.arange(cfg.seq_len + 1)]
    return torch.from_numpy(ids.astype(np.int64))


def segments(ids: Tensor, marker: str) -> Tensor:
    """The document of each byte [b, n], counted along a row: one begins with each marker in it."""
    text = torch.tensor(list(encoded(marker)))
    begins = torch.zeros_like(ids)
    if ids.shape[1] >= len(text):
        begins[:, : ids.shape[1] - len(text) + 1] = (ids.unfold(1, len(text), 1) == text).all(-1)
    return begins.cumsum(1)


def batch_of(ids: Tensor, cfg: Namespace) -> Batch:
    if not cfg.pack:
        return Batch(ids, None, ids[:, 1:].numel())
    segment_ids = segments(ids, cfg.pack)
    return Batch(ids, segment_ids, int((segment_ids[:, 1:] == segment_ids[:, :-1]).sum()))


def batches(data: np.ndarray, cfg: Namespace, step: int) -> list[Batch]:
    """What step `step` learns from: a function of (seed, step) and nothing else. The mean of the
    weighted losses of its batches is the mean over all predictions of the step."""
    draw = np.random.default_rng([cfg.seed, step])
    shape = cfg.accumulate, cfg.batch_size
    starts = draw.integers(len(data) - cfg.seq_len, size=shape)
    found = [batch_of(windows(data, some, cfg), cfg) for some in starts]
    mean = sum(batch.predicted for batch in found) / len(found)
    return [batch._replace(weight=batch.predicted / mean if mean else 0.0) for batch in found]
