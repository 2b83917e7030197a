"""Memory and time of a training step of one layer, against the length.

    python -m benchmarks.memory               measure, append rows
    python -m benchmarks.memory --table       redraw the table of docs/attention.md from the rows
    python -m benchmarks.memory --quick       two short ones, nothing recorded

A step is forward and backward of `SparseAttention` in float32, in a process of its own. On a CPU
its memory is what the process has grown by at most (its resident set, after a step of a short row
has loaded everything); on a GPU, where the eager backend is asked for, what tensors held at most.
Time is that of one step, the first.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import resource
import sys
from collections.abc import Sequence
from typing import Any

import torch

from native_sparse_attention import SparseAttention

from . import common
from .common import Row

PAGE = common.ROOT / "docs" / "attention.md"
SIZE: dict[str, Any] = dict(
    heads=1, dim_head=16, compress_block_size=32, compress_block_sliding_stride=16,
    selection_block_size=32, num_selected_blocks=8, sliding_window_size=64,
)  # fmt: skip


def step(T: int, importance: str, device: torch.device) -> Row:
    """A step at length T, in this process."""
    torch.manual_seed(0)
    dim, cuda = SIZE["heads"] * SIZE["dim_head"], device.type == "cuda"
    layer = SparseAttention(dim, **SIZE, importance=importance, backend="eager").to(device)

    def run(length: int) -> float:
        x = torch.randn(1, length, dim, device=device, requires_grad=True)
        began = common.synchronize(device)
        layer(x).square().sum().backward()
        seconds = common.synchronize(device) - began
        if x.grad is None or not x.grad.isfinite().all():
            raise common.WrongResult("a gradient is not finite")
        return seconds

    run(256)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    kib = 1 if sys.platform == "darwin" else 1024
    usage = functools.partial(resource.getrusage, resource.RUSAGE_SELF)
    before = torch.cuda.memory_allocated() if cuda else usage().ru_maxrss * kib
    seconds = run(T)
    after = torch.cuda.max_memory_allocated() if cuda else usage().ru_maxrss * kib
    return {"mib": round((after - before) / 2**20, 1), "seconds": round(seconds, 3)}


def table(rows: Sequence[Row]) -> str:
    """MiB and seconds; the latest row of each case."""

    def line(row: Row) -> str:
        where = "CPU" if row["gpu"].startswith("none") else row["gpu"]
        where += f", torch {row['torch']}, commit {row['commit'][:7]}"
        return f"`{row['importance']}`; {where}"

    def cell(passes: dict[str, Row]) -> str:
        (row,) = passes.values()
        return f"{row['mib']:.0f}; {row['seconds']:.3g}"

    return common.grid(rows, "MiB; seconds", line, lambda row: row["T"], cell, is_signed=False)


TABLES = {PAGE: {"memory": table}}


def options(parser: argparse.ArgumentParser) -> None:
    importances, lengths = ["logits", "probs"], [2**e for e in range(12, 18)]
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=lengths, metavar="T")
    add("--importances", nargs="+", choices=importances, default=importances)


def run(args: argparse.Namespace, recorder: common.Recorder) -> None:
    if args.quick:
        args.lengths, args.importances = [512, 1024], ["logits"]
    for importance in args.importances:
        for T in args.lengths:
            # a process of its own for each, which has not been larger before
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                row = pool.apply(step, (T, importance, args.device))
            recorder.add({"importance": importance, "T": T, **SIZE, **row})


BENCHMARK = common.Benchmark("memory", __doc__, options, run, ("importance", "T"), TABLES)
main = BENCHMARK.main

if __name__ == "__main__":
    main()
