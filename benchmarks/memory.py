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
import time
from pathlib import Path
from typing import Any

import torch

from native_sparse_attention import SparseAttention

from . import common
from .common import Row

PAGE = common.ROOT / "docs" / "attention.md"
RESULTS = common.RESULTS / "memory.jsonl"
NO_ROWS = "not measured yet: run `python -m benchmarks.memory`"
LENGTHS = [2**e for e in range(12, 18)]
SIZE = dict(
    heads=1,
    dim_head=16,
    compress_block_size=32,
    compress_block_sliding_stride=16,
    selection_block_size=32,
    num_selected_blocks=8,
    sliding_window_size=64,
)


def resident() -> int:
    """Bytes that this process has had in memory at most."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def step(T: int, importance: str, device: torch.device) -> Row:
    """A step at length T, in this process."""
    torch.manual_seed(0)
    size: dict[str, Any] = dict(SIZE, dim=SIZE["heads"] * SIZE["dim_head"])
    layer = SparseAttention(**size, importance=importance, backend="eager").to(device)
    cuda = device.type == "cuda"

    def run(length: int) -> float:
        x = torch.randn(1, length, size["dim"], device=device, requires_grad=True)
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        layer(x).square().sum().backward()
        if cuda:
            torch.cuda.synchronize()
        assert x.grad is not None and bool(x.grad.isfinite().all())
        return time.perf_counter() - began

    run(256)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else resident()
    seconds = run(T)
    after = torch.cuda.max_memory_allocated() if cuda else resident()
    return {"mib": round((after - before) / 2**20, 1), "seconds": round(seconds, 3)}


def run(
    lengths: list[int], importances: list[str], out: Path | None, device: torch.device
) -> list[Row]:
    known, rows = common.environment(device), []
    for importance in importances:
        for T in lengths:
            command = [sys.executable, "-m", "benchmarks.memory", "--device", str(device)]
            command += ["--one", str(T), "--importances", importance]
            done = subprocess.run(command, capture_output=True, text=True, cwd=common.ROOT)
            if done.returncode:
                raise SystemExit(f"T={T}, {importance}: {done.stderr.strip()}")
            head = {"importance": importance, "T": T, **SIZE, "threads": torch.get_num_threads()}
            row = {**head, **json.loads(done.stdout.splitlines()[-1]), **known}
            print(
                f"{importance:7} T={T:<7} {row['mib']:9.1f} MiB {row['seconds']:8.2f} s", flush=True
            )
            common.append_row(out, row)
            rows.append(row)
    return rows


def table(rows: list[Row]) -> str:
    """MiB and seconds; the latest row of each case."""
    latest = {(row["gpu"], row["importance"], row["T"]): row for row in rows}
    if not latest:
        return NO_ROWS
    lengths = sorted({T for _, _, T in latest})
    lines = [["MiB; seconds", *(f"{T // 1024}k" for T in lengths)]]
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


def render(page: str, rows: list[Row]) -> str:
    """The page with its table drawn anew."""
    return common.redraw(page, "memory", table(rows))


def main(argv: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(prog="benchmarks.memory")
    both = ["logits", "probs"]
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="T")
    parser.add_argument("--importances", nargs="+", choices=both, default=both)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="JSONL; results/memory.jsonl, none with --quick")
    parser.add_argument("--table", action="store_true", help="redraw the table of the rows there")
    parser.add_argument("--quick", action="store_true", help="short ones, nothing recorded")
    parser.add_argument("--one", type=int, metavar="T", help="one step in this process, as JSON")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if args.one is not None:
        print(json.dumps(step(args.one, args.importances[0], device)))
        return []
    out = args.out or (None if args.quick and not args.table else RESULTS)
    if args.table:
        rows = common.read_rows(out or RESULTS)
        PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
        return rows
    lengths, importances = args.lengths, args.importances
    if args.quick:
        lengths, importances = [512, 1024], ["logits"]
    return run(lengths, importances, out, device)


if __name__ == "__main__":
    main()
