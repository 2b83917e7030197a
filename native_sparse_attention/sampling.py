"""One token from a model's logits."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor


def check_sampling(filter_thres: float, top_p: float | None) -> None:
    if not 0.0 <= filter_thres < 1.0:
        raise ValueError(f"filter_thres must be in [0, 1), got {filter_thres}")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")


def sample_token(
    logits: Tensor,
    temperature: float,
    filter_thres: float,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Tensor:
    """One token [b] from logits [b t]."""
    if temperature <= 0.0:
        return logits.argmax(dim=-1)
    count = max(1, ceil((1.0 - filter_thres) * logits.shape[-1]))
    values, tokens = logits.float().topk(count, dim=-1)
    probs = (values / temperature).softmax(dim=-1)
    if top_p is not None:
        # drop a token where those before it already hold top_p
        probs = probs.masked_fill(probs.cumsum(dim=-1) - probs >= top_p, 0.0)
    choice = probs.multinomial(1, generator=generator)
    return tokens.gather(-1, choice)[:, 0]
