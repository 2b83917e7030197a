"""Whether this checkout is slower than another one: both trees, in turns, on one GPU.

    python -m benchmarks.against PATH                       append rows to results/against.jsonl
    python -m benchmarks.against PATH --groups layers host  some of the groups of one_tree.py
    python -m benchmarks.against PATH --quick               tiny sizes, nothing recorded

PATH is a checkout of an earlier commit (`git worktree add PATH COMMIT`). Each group of cases runs
in a process of its own for each tree, in turns, `--rounds` times; of a case the fastest median
counts.
Times are the GPU's work, in ms, bf16, but for "host" (time until the call returns), "decode, layer"
and "llama, step" (wall time), and first calls (wall time of one call, an empty Triton cache).
The dense twin is the same code in both trees: its ratio is the noise of the run. Outputs are not
compared, the tests do that. A case that fails leaves a row that says why.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from . import common
from .common import Row
from .one_tree import GROUPS

CHILD = Path(__file__).with_name("one_tree.py")
# slower than the other tree, by more than a run's noise
MARKED = 1.03
# each with caches of its own, once
FIRST = ("first_call", "first_compile")


def times_of(
    tree: Path, group: str, device: torch.device, seconds: float, quick: bool
) -> dict[str, Row]:
    """The rows of a group's cases, by the package of a tree."""
    command = [sys.executable, str(CHILD), str(tree), group, str(device), str(seconds)]
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), *others])}
    with tempfile.TemporaryDirectory() as folder:
        if group in FIRST:
            env |= {"TRITON_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": folder}
        done = subprocess.run(
            [*command, *(["quick"] if quick else [])],
            capture_output=True, text=True, env=env, cwd=tree,
        )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {f"all of {group}": {"failed": last[:300]}}
    rows: dict[str, Row] = json.loads(done.stdout.splitlines()[-1])
    return rows


def compare(group: str, args: argparse.Namespace) -> list[Row]:
    best: dict[str, dict[str, Row]] = {"this": {}, "other": {}}
    trees = {"this": common.ROOT, "other": args.path.resolve()}
    for _ in range(1 if group in FIRST else args.rounds):
        for name, tree in trees.items():
            rows_of_tree = times_of(tree, group, args.device, args.seconds, args.quick)
            for case, row in rows_of_tree.items():
                known = best[name].setdefault(case, row)
                if "failed" in row or ("ms" in known and row["ms"] < known["ms"]):
                    best[name][case] = row  # a failure is told in any case
    rows: list[Row] = []
    for case in dict.fromkeys([*best["this"], *best["other"]]):
        this, that = (best[name].get(case, {"failed": "not reached"}) for name in trees)
        both: Row = {"case": case}
        both |= {"ms": this["ms"]} if "ms" in this else {"failed": this["failed"]}
        both |= {"other_ms": that["ms"]} if "ms" in that else {"other_failed": that["failed"]}
        if "ms" in both and "other_ms" in both:
            both["times_other"] = round(both["ms"] / both["other_ms"], 4)
        rows.append(both)
    return rows


def table(rows: Sequence[Row]) -> str:
    """Milliseconds of both and their ratio: above 1 this checkout is slower, in bold by more than
    3 %."""
    if not rows:
        return common.NO_ROWS
    lines = [["case", "this, ms", "other, ms", "this / other"]]
    for row in rows:
        cells = [f"{row[name]:.4g}" if name in row else "failed" for name in ("ms", "other_ms")]
        ratio = f"{row['times_other']:.3f}" if "times_other" in row else ""
        if row.get("times_other", 0) > MARKED:
            ratio = f"**{ratio}**"
        lines.append([row["case"], *cells, ratio])
    failed = [
        f"* {row['case']}, {name}: {row[field]}"
        for row in rows
        for name, field in (("this", "failed"), ("other", "other_failed"))
        if field in row
    ]
    where = f"{rows[0]['gpu']}; this {rows[0]['commit']}, other {rows[0]['other_commit']}."
    return "\n".join([common.markdown(lines), "", where, *failed])


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="the other checkout")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--rounds", type=int, default=2, help="processes of each tree and group")


def run(args: argparse.Namespace, recorder: common.Recorder) -> None:
    if not (args.path / "native_sparse_attention").is_dir():
        raise ValueError(f"path must be a checkout of this library, got {args.path}")
    head = common.output_of("git", "-C", str(args.path), "rev-parse", "--short=10", "HEAD")
    known = {"other_commit": head or args.path.name}
    for group in args.groups:
        timed = compare(group, args)
        for row in timed:
            recorder.add({**row, **known})
        # a run may be cut short: what is known is shown at once
        print(table(recorder.rows[-len(timed) :]), flush=True)


BENCHMARK = common.Benchmark(
    "against", __doc__, options, run, ("case",), plot=lambda rows: print(table(rows)),
    required=lambda row: False, seconds=0.5,
)  # fmt: skip
main = BENCHMARK.main

if __name__ == "__main__":
    main()
