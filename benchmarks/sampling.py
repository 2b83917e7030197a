"""Tokens a second of sampling with the enwik8 model of `training.py`, and of the published package.

    python -m benchmarks.decode --sampling            time both, append rows
    python -m benchmarks.decode --table               redraw the table of docs/performance.md
    python -m benchmarks.decode --sampling --quick    a small model, nothing recorded

`Transformer.sample` with a cache of keys and values, at temperature 1, under bf16 autocast: from
the call until the last token is there, the prompt's own pass included. Weights are random. Before
it is timed, ours samples a short text greedily, in float32: with a cache it must be the one
without. The text of the published package is not held against anything.
"""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import common, training
from .common import Row
from .oracle import WrongResult

RESULTS = common.RESULTS / "sampling.jsonl"
BATCHES: tuple[int, ...] = (1, 16)
PEER = "nsa-pytorch"
MAKERS = {PEER: training.published, "ours": training.ours}
REPEATS = 3


def check(net: Any, device: torch.device) -> None:
    """A greedy text with a cache is the one without.

    Raises:
        WrongResult: it is another.
    """
    generator = torch.Generator(device).manual_seed(1)
    prompt = torch.randint(0, 256, (2, 37), generator=generator, device=device)
    cached, anew = (net.sample(prompt, 70, 0.0, use_cache_kv=kept) for kept in (True, False))
    if not torch.equal(cached, anew):
        raise WrongResult("a greedy text with a cache differs from the one without")


def sampled(net: Any, prompt: Tensor, length: int) -> float:
    """Seconds until `length` tokens, the prompt's among them, are there."""
    cuda = prompt.is_cuda
    if cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    # the published one draws a bar of its progress
    with (
        torch.autocast(prompt.device.type, torch.bfloat16),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        net.sample(prompt, length, temperature=1.0, use_cache_kv=True)
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def one(
    name: str, model: dict[str, Any], batch: int, size: Row, repeats: int, device: torch.device
) -> Row:
    """A model's tokens a second, the first text (which compiles) left out."""
    torch.manual_seed(0)
    net = MAKERS[name](model).to(device).eval()
    if name == "ours":
        check(net, device)
    prompt = torch.randint(0, model["num_tokens"], (batch, size["prompt"]), device=device)
    length = size["prompt"] + size["new"]
    seconds = [sampled(net, prompt, length) for _ in range(1 + repeats)][1:]
    row = common.quantiles([1e3 * s for s in seconds])
    return {"tokens_per_s": round(batch * size["new"] / row["p50_ms"] * 1e3, 1), **row}


@torch.no_grad()
def run(quick: bool, out: Path | None, device: torch.device) -> list[Row]:
    """Rows of every provider and batch, the published one first: ours is compared with it."""
    model, size = training.MODEL, {"prompt": 512, "new": 512}
    batches, repeats = BATCHES, REPEATS
    if quick:
        model, size = training.QUICK, {"prompt": 24, "new": 8}
        batches, repeats = (2,), 1
    known, rows = common.environment(device), []
    for batch in batches:
        peer = None
        for name in MAKERS:
            row: Row
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    row = one(name, model, batch, size, repeats, device)
            except Exception as error:  # a model that fails leaves a row with its reason
                if not common.still_alive(device):
                    raise
                row = {"failed": common.why(error)}
            common.release()
            peer = row.get("tokens_per_s") if name == PEER else peer
            if peer and "tokens_per_s" in row:
                row["over_published"] = round(row["tokens_per_s"] / peer, 3)
            row = {"provider": name, "batch": batch, **size, **row, **known}
            print(line(row), flush=True)
            common.append_row(out, row)
            rows.append(row)
    return rows


def line(row: Row) -> str:
    """A row as a person reads it."""
    head = f"{row['provider']:12} batch {row['batch']:<3}"
    if "failed" in row:
        return f"{head} {row['failed']}"
    text = f"{head} {row['tokens_per_s']:9.1f} tokens/s"
    return text + (f" {row['over_published']:6.2f} x" if "over_published" in row else "")
