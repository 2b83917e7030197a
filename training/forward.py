"""The forward pass of a step: precision, torch.compile, the loss."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from native_sparse_attention import Transformer

from .batches import Batch
from .errors import UserError, reason


def autocast(cfg: Namespace) -> AbstractContextManager[Any]:
    on = cfg.precision == "bf16"
    return torch.autocast(torch.device(cfg.device).type, dtype=torch.bfloat16, enabled=on)


def compiled(model: Transformer, cfg: Namespace) -> Callable[..., Tensor]:
    """The model through torch.compile where asked for or, with auto, on CUDA if it works there.

    Without the kernels, a compiled graph forms T x S scores, which do not fit for long texts.
    """
    scores = cfg.attention != "dense" and cfg.backend in ("eager", "flex") and cfg.seq_len > 8192
    # nor is it known beforehand how long rows of packed documents are
    helps = cfg.device.startswith("cuda") and not scores and not cfg.pack
    if cfg.compile == "off" or (cfg.compile == "auto" and not helps):
        return model
    # CUDA graphs leave no launches to wait for, but write the next gradients over the last
    graphs = cfg.device.startswith("cuda") and cfg.accumulate == 1
    program = torch.compile(model, mode="reduce-overhead" if graphs else "default")

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        if graphs:
            torch.compiler.cudagraph_mark_step_begin()
        return program(*args, **kwargs)

    ids = torch.zeros(cfg.batch_size, cfg.seq_len + 1, dtype=torch.long, device=cfg.device)
    try:
        for learning in (True, False):  # two programs
            with autocast(cfg), torch.set_grad_enabled(learning):
                loss = forward(ids, return_loss=True)
            if learning:
                loss.backward()
        return forward
    except Exception as error:  # of a compiler, of any kind
        if cfg.compile == "on":
            raise UserError(f"torch.compile failed, give --compile off: {reason(error)}") from None
        print(f"torch.compile failed, going on without it: {reason(error)}")
        return model
    finally:
        model.zero_grad()


def loss_of(forward: Callable[..., Tensor], batch: Batch, cfg: Namespace) -> Tensor:
    """The mean over the predictions of a batch, each of a byte from those before it in its row or
    in its document there; times the weight of the batch."""
    named = {} if batch.segment_ids is None else {"segment_ids": batch.segment_ids}
    with autocast(cfg):
        loss = forward(batch.ids.to(cfg.device), return_loss=True, **named)
    return loss if batch.segment_ids is None else loss * batch.weight
