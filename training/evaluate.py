"""Validation and test: bits per byte of a split."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .batches import windows
from .forward import loss_of


@torch.no_grad()
def evaluate(forward: Callable[..., Tensor], data: np.ndarray, cfg: Namespace, size: int) -> float:
    """Bits per byte over about `size` bytes, in windows spread evenly over `data`."""
    shape = max(1, min(size, len(data)) // (cfg.batch_size * cfg.seq_len)), cfg.batch_size
    starts = np.linspace(0, len(data) - cfg.seq_len - 1, math.prod(shape)).astype(np.int64)
    inputs = (windows(data, rows, cfg) for rows in starts.reshape(shape))
    losses = [loss_of(forward, ids, cfg).item() for ids in inputs]
    return sum(losses) / len(losses) / math.log(2)
