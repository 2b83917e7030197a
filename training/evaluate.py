"""Validation."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .batches import batch_of, windows
from .forward import loss_of
from .ranks import mean


@torch.no_grad()
def evaluate(forward: Callable[..., Tensor], data: np.ndarray, cfg: Namespace, size: int) -> float:
    """Bits per predicted byte over about `size` bytes, in windows spread evenly over `data`."""
    shape = max(1, min(size, len(data)) // (cfg.batch_size * cfg.seq_len)), cfg.batch_size
    starts = np.linspace(0, len(data) - cfg.seq_len - 1, math.prod(shape)).astype(np.int64)
    total, predicted = 0.0, 0
    for rows in starts.reshape(shape):
        batch = batch_of(windows(data, rows, cfg), cfg)
        total += mean(loss_of(forward, batch, cfg)).item() * batch.predicted
        predicted += batch.predicted
    return total / max(predicted, 1) / math.log(2)
