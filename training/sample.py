"""Text sampled from a model, during training and by `--sample`."""

from __future__ import annotations

import codecs
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from native_sparse_attention import Transformer

from .data import encoded
from .errors import UserError
from .forward import autocast
from .options import Table
from .runs import load_run
from .settings import find_device, open_run


def sample(given: Namespace, table: Table, build: Callable[[Namespace], Transformer]) -> int:
    """`--sample`: stream text from the best weights of a run to stdout."""
    run: Path = given.sample
    cfg, config = open_run(run, given, table)
    cfg.device = find_device(getattr(given, "device", None))
    torch.set_num_threads(cfg.threads)
    model = build(cfg)
    load_run(run, config, model, "best")
    prompt = encoded(getattr(given, "prompt", "") or "\n")
    keys = "temperature", "filter_thres", "top_k", "top_p"
    how = {key: value for key, value in vars(given).items() if key in keys}
    if "top_k" in how:
        how.setdefault("filter_thres", 0.0)
    length = getattr(given, "max_new_tokens", 512)
    try:
        texts = generate(model, cfg, prompt, length, **how)
        first = next(texts)  # what is wrong with the options is said before any text
        print(printable(prompt.decode(errors="replace")) + first, end="", flush=True)
        for text in texts:
            print(text, end="", flush=True)
        print()
    except ValueError as error:
        raise UserError(str(error)) from None
    except BrokenPipeError:  # the reader has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


@torch.no_grad()
def generate(
    model: Transformer, cfg: Namespace, prompt: bytes, length: int, **how: Any
) -> Iterator[str]:
    """Text after `prompt`, byte by byte from the KV cache, decoded as it comes.

    Its generator is its own: sampling leaves the randomness of training alone.
    """
    generator = torch.Generator(cfg.device).manual_seed(cfg.seed)
    ids = torch.tensor([list(prompt)], device=cfg.device)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with autocast(cfg):
        # to draw from such fails within torch, and on a GPU ends all work there
        if not model(ids, cache=model.new_cache()).isfinite().all():
            raise UserError("predictions of the model are not finite: train with a lower --lr")
        for token in model.stream(ids, len(prompt) + length, generator=generator, **how):
            yield printable(decoder.decode(bytes(token.tolist())))
    yield printable(decoder.decode(b"", final=True))


def printable(text: str) -> str:
    """An untrained model says control characters too, which a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
