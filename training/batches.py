"""Bytes of a corpus as tensors: windows, the batches of a step, documents in a row."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from .data import encoded


def windows(data: np.ndarray, starts: np.ndarray, cfg: Namespace) -> Tensor:
    """The `seq_len + 1` bytes from each start, [b, n + 1]."""
    ids = data[starts[:, None] + np.arange(cfg.seq_len + 1)]
    return torch.from_numpy(ids.astype(np.int64))


def batches(data: np.ndarray, cfg: Namespace, step: int) -> Iterator[Tensor]:
    """What step `step` learns from: a function of (seed, step) and nothing else."""
    draw = np.random.default_rng([cfg.seed, step])
    shape = cfg.accumulate, cfg.batch_size
    for starts in draw.integers(len(data) - cfg.seq_len, size=shape):
        yield windows(data, starts, cfg)


def segments(ids: Tensor, marker: str) -> Tensor:
    """The document of each byte [b, n], counted along a row: one begins with each marker in it."""
    text = torch.tensor(list(encoded(marker)))
    begins = torch.zeros_like(ids)
    if ids.shape[1] >= len(text):
        begins[:, : ids.shape[1] - len(text) + 1] = (ids.unfold(1, len(text), 1) == text).all(-1)
    return begins.cumsum(1)
