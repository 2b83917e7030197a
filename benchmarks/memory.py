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
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch

from native_sparse_attention import SparseAttention

from . import common
from .common import Row

PAGE = common.ROOT / "docs" / "attention.md"
RESULTS = common.RESULTS / "memory.jsonl"
SIZE: dict[str, Any] = dict(
    heads=1, dim_head=16, compress_block_size=32, compress_block_sliding_stride=16,
    selection_block_size=32, num_selected_blocks=8, sliding_window_size=64,
)  # fmt: skip


def resident() -> int:
    """Bytes that this process has had in memory at most."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


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
    before = torch.cuda.memory_allocated() if cuda else resident()
    seconds = run(T)
    after = torch.cuda.max_memory_allocated() if cuda else resident()
    return {"mib": round((after - before) / 2**20, 1), "seconds": round(seconds, 3)}


def measure(T: int, importance: str, device: torch.device) -> Row:
    """A step in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.memory", "--device", str(device)]
    command += ["--one", str(T), "--importances", importance]
    done = subprocess.run(command, capture_output=True, text=True, cwd=common.ROOT)
    if done.returncode:
        raise SystemExit(f"T={T}, {importance}: {done.stderr.strip()}")
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return {"importance": importance, "T": T, **SIZE, "threads": torch.get_num_threads(), **row}


def table(rows: Sequence[Row]) -> str:
    """MiB and seconds; the latest row of each case."""
    latest = {(row["gpu"], row["importance"], row["T"]): row for row in rows}
    if not latest:
        return common.NO_ROWS
    lengths = sorted({T for _, _, T in latest})
    lines = [["MiB; seconds", *map(common.length, lengths)]]
    for gpu, importance in dict.fromkeys((gpu, importance) for gpu, importance, _ in latest):
        cells = []
        for T in lengths:
            row = latest.get((gpu, importance, T))
            cells.append("" if row is None else f"{row['mib']:.0f}; {row['seconds']:.3g}")
        last = next(row for row in reversed(rows) if row["gpu"] == gpu)
        where = "CPU" if gpu.startswith("none") else gpu
        where += f", torch {last['torch']}, commit {last['commit'][:7]}"
        lines.append([f"`{importance}`; {where}", *cells])
    return common.markdown(lines)


TABLES = {PAGE: {"memory": table}}


def main(argv: list[str] | None = None) -> list[Row]:
    parser, both = common.parser_of("memory", __doc__, seconds=None), ["logits", "probs"]
    lengths = [2**e for e in range(12, 18)]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths, metavar="T")
    parser.add_argument("--importances", nargs="+", choices=both, default=both)
    parser.add_argument("--one", type=int, metavar="T", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    device, out = torch.device(args.device), common.out_of(args, RESULTS)
    if args.one is not None:
        print(json.dumps(step(args.one, args.importances[0], device)))
        return []
    if args.table:
        rows = common.read_rows(args.out or RESULTS)
        common.draw_pages(TABLES, rows)
        return rows
    if args.quick:
        args.lengths, args.importances = [512, 1024], ["logits"]
    known, rows = common.environment(device), []
    for importance in args.importances:
        for T in args.lengths:
            row = {**measure(T, importance, device), **known}
            print(f"{importance:7} T={T:<7} {row['mib']:9.1f} MiB {row['seconds']:8.2f} s")
            common.append_row(out, row)
            rows.append(row)
    return rows


if __name__ == "__main__":
    main()
