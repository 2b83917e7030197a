"""A needle in held-out text: does a trained byte-level model copy a number that it read once?

A comment that tells a random number of a random name is put into the text at some depth. The text
ends with the same comment up to the number; the model is asked for each digit, given those before.
"""

from __future__ import annotations

import math
from argparse import Namespace

import numpy as np
import torch
import torch.nn.functional as F

from native_sparse_attention import Transformer
from training.forward import autocast

from .common import Row

DEPTHS = (0.1, 0.5, 0.9)
DIGITS = 8
NAME = 10


def comment(draw: np.random.Generator) -> tuple[bytes, bytes]:
    """The text before a number, and the number."""
    name = bytes(draw.integers(97, 123, size=NAME).astype(np.uint8))
    number = bytes(draw.integers(48, 58, size=DIGITS).astype(np.uint8))
    return b"/* The number of " + name + b" is ", number


def context(text: np.ndarray, T: int, depth: float, draw: np.random.Generator) -> np.ndarray:
    """T bytes: held-out text with a needle, then the question and, at the end, the number."""
    before, number = comment(draw)
    needle, question = before + number + b" */\n", b"\n" + before + number
    left = T - len(needle) - len(question)
    start = int(draw.integers(len(text) - left))
    hay = text[start : start + left].tobytes()
    at = hay.rfind(b"\n", 0, round(depth * left)) + 1
    whole = hay[:at] + needle + hay[at:] + question
    return np.frombuffer(whole, dtype=np.uint8).astype(np.int64)


@torch.no_grad()
def evaluate(model: Transformer, text: np.ndarray, contexts: int, cfg: Namespace) -> Row:
    """By depth: the share of digits and of whole numbers whose most likely bytes are right, and
    bits per digit. The contexts of a depth are the same for all models of a length.

    Raises:
        ValueError: T is too short for a needle and some text.
    """
    T, found = cfg.seq_len, {}
    least = 4 * (NAME + DIGITS) + 64
    if least > T or len(text) <= T:
        raise ValueError(f"T must be from {least} to the bytes of text={len(text)}, got {T}")
    for depth in DEPTHS:
        draw = np.random.default_rng([round(depth * 1000), T])
        rows = [context(text, T, depth, draw) for _ in range(contexts)]
        right, bits = [], []
        for first in range(0, contexts, cfg.batch_size):
            some = np.stack(rows[first : first + cfg.batch_size])
            ids = torch.from_numpy(some).to(cfg.device)
            with autocast(cfg):
                logits = model(ids[:, :-1])[:, -DIGITS:].float()
            answers = ids[:, -DIGITS:]
            right.append(logits.argmax(-1) == answers)
            bits.append(F.cross_entropy(logits.transpose(1, 2), answers, reduction="none"))
        hits = torch.cat(right).float()
        found[f"{depth:g}"] = {
            "digits": round(hits.mean().item(), 4),
            "numbers": round(hits.min(1).values.mean().item(), 4),
            "bits": round(torch.cat(bits).mean().item() / math.log(2), 4),
        }
    return found
