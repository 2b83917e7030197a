"""Whether this checkout is slower than another one: kernels of both, in turns, on one GPU.

    python -m benchmarks.against PATH           times, rows appended to results/against.jsonl
    python -m benchmarks.against PATH --quick   tiny sizes, nothing recorded

PATH is a checkout of an earlier commit (`git worktree add PATH COMMIT`). Each tree runs in a
process of its own, twice in turns; of a case the faster of two medians counts. Cases are the layer
of the paper's sizes, forward and both passes, at three numbers of heads, 8k and 64k tokens, and
steps of decoding over 64k. GPU times, bf16; outputs are not compared: the tests do that.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from . import common
from .cases import NO_ROWS
from .common import Row

RESULTS = common.RESULTS / "against.jsonl"
CHILD = Path(__file__).with_name("one_tree.py")
ROUNDS = 2


def times_of(tree: Path, device: torch.device, quick: bool, seconds: float) -> dict[str, float]:
    """ms of every case, by the package of a tree.

    Raises:
        RuntimeError: its process failed.
    """
    command = [sys.executable, str(CHILD), str(tree), str(device), "quick" if quick else "full"]
    env = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(
        [*command, str(seconds)], capture_output=True, text=True, env=env, cwd=tree
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"{tree.name} failed: {last}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def commit_of(tree: Path) -> str:
    """Its commit; the name of a folder that is no checkout, such as an export inside of one."""
    asked = ["git", "rev-parse", "--show-prefix", "--short=10", "HEAD"]
    found = subprocess.run(asked, capture_output=True, text=True, cwd=tree).stdout.splitlines()
    return found[-1] if found and not found[0] else tree.name


def run(other: Path, device: torch.device, quick: bool, seconds: float) -> list[Row]:
    trees = {"this": common.ROOT, "other": other.resolve()}
    best: dict[str, dict[str, float]] = {name: {} for name in trees}
    for _ in range(ROUNDS):
        for name, tree in trees.items():
            for case, ms in times_of(tree, device, quick, seconds).items():
                best[name][case] = min(ms, best[name].get(case, ms))
    known = {"other_commit": commit_of(other), **common.environment(device)}
    return [
        {"case": case, "ms": ms, "other_ms": best["other"][case],
         "times_other": round(ms / best["other"][case], 4), **known}
        for case, ms in best["this"].items() if case in best["other"]
    ]  # fmt: skip


def table(rows: list[Row]) -> str:
    """Milliseconds of both, and their ratio: above 1 this checkout is slower."""
    if not rows:
        return NO_ROWS
    lines = [["case", "this, ms", "other, ms", "this / other"]]
    for row in rows:
        times = (f"{row[name]:.4g}" for name in ("ms", "other_ms"))
        lines.append([row["case"], *times, f"{row['times_other']:.3f}"])
    where = f"{rows[0]['gpu']}; this {rows[0]['commit']}, other {rows[0]['other_commit']}."
    return f"{common.markdown(lines)}\n\n{where}"


def main(argv: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(
        prog="benchmarks.against", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("path", type=Path, help="the other checkout")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seconds", type=float, default=0.5, help="of a timed case")
    add("--out", type=Path, help="JSONL; results/against.jsonl, none with --quick")
    add("--quick", action="store_true", help="tiny sizes, nothing recorded")
    args = parser.parse_args(argv)
    if not (args.path / "native_sparse_attention").is_dir():
        sys.exit(f"benchmarks.against: path must be a checkout of this library, got {args.path}")
    rows = run(args.path, torch.device(args.device), args.quick, args.seconds)
    for row in rows:
        common.append_row(args.out or (None if args.quick else RESULTS), row)
    print(table(rows))
    return rows


if __name__ == "__main__":
    main()
