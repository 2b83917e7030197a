"""Whether this checkout is slower than another one: a benchmark with both packages, in turns.

    python -m benchmarks.against PATH clock --subjects 'layer, 32/8' --modes eager graph
    python -m benchmarks.against PATH attention --lengths 8192 65536 --heads 32/8 --strides 1
    python -m benchmarks.against --quick PATH decode       tiny sizes, nothing recorded

PATH is a checkout of an earlier commit (`git worktree add PATH COMMIT`). A benchmark and its
options follow. The benchmark is that of this checkout; it runs with the package of each tree in a
process of its own, in turns, `--rounds` times, and checks outputs as always. Of a case the least
time counts. Dense attention is the same code in both trees: its ratio is the noise of the run. A
case that fails leaves a row that says why, also where the other package lacks a name that the
benchmark uses; `clock` uses the fewest.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import common
from .common import Row

BENCHMARKS = ("attention", "clock", "decode", "generation")
PACKAGE = "native_sparse_attention"
# what benchmarks need besides it
OTHERS = ("benchmarks", "training", "train_enwik8.py")
# fields of their rows
PASSES = ("both passes", "forward", "training step", "prefill")
HOST = tuple(f"{name}, host" for name in PASSES)
TIMES = ("p50_ms", "p50_us", "prefill_ms", "dynamic_ms", "static_ms", *PASSES, *HOST)
# slower than the other tree, by more than a run's noise
MARKED = 1.03


def times_of(tree: Path, args: argparse.Namespace) -> dict[str, Row]:
    """By case the times of the benchmark with the package of a tree, in ms."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)  # where the process starts, and imports from first
        for part in OTHERS:
            (folder / part).symlink_to(common.ROOT / part)
        (folder / PACKAGE).symlink_to(tree / PACKAGE)
        out = folder / "rows.jsonl"
        command = [sys.executable, "-m", f"benchmarks.{args.benchmark}", "--out", str(out)]
        command += ["--device", str(args.device), *(["--quick"] if args.quick else [])]
        done = subprocess.run([*command, *args.options], capture_output=True, text=True, cwd=folder)
        rows = common.read_rows(out)
    if not rows:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {f"all of {args.benchmark}": {"failed": last[:300]}}
    fields = importlib.import_module(f"benchmarks.{args.benchmark}").BENCHMARK.fields
    found: dict[str, Row] = {}
    for row in rows:
        case = ", ".join(f"{row[field]}" for field in fields if row.get(field) is not None)
        if "failed" in row:
            found[case] = {"failed": row["failed"]}
        for name in (name for name in TIMES if name in row):
            ms = row[name] / 1e3 if name.endswith("_us") else row[name]
            found[f"{case}: {name.partition('_')[0]}"] = {"ms": ms}
    return found


def compare(args: argparse.Namespace) -> list[Row]:
    best: dict[str, dict[str, Row]] = {"this": {}, "other": {}}
    trees = {"this": common.ROOT, "other": args.path.resolve()}
    for _ in range(args.rounds):
        for name, tree in trees.items():
            for case, row in times_of(tree, args).items():
                known = best[name].setdefault(case, row)
                if "failed" in row or ("ms" in known and row["ms"] < known["ms"]):
                    best[name][case] = row  # a failure is told in any case
    rows: list[Row] = []
    for case in dict.fromkeys([*best["this"], *best["other"]]):
        this, that = (best[name].get(case, {"failed": "not reached"}) for name in trees)
        both: Row = {"benchmark": args.benchmark, "case": case}
        both |= {"ms": this["ms"]} if "ms" in this else {"failed": this["failed"]}
        both |= {"other_ms": that["ms"]} if "ms" in that else {"other_failed": that["failed"]}
        if "ms" in both and "other_ms" in both:
            both["times_other"] = round(both["ms"] / both["other_ms"], 4)
        rows.append(both)
    return rows


def table(rows: Sequence[Row]) -> str:
    """Milliseconds of both and their ratio: above 1 this checkout is slower, in bold past 3 %."""
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
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of the benchmark")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each tree")


def run(args: argparse.Namespace, recorder: common.Recorder) -> None:
    if not (args.path / PACKAGE).is_dir():
        raise ValueError(f"path must be a checkout of this library, got {args.path}")
    head = common.output_of("git", "-C", str(args.path), "rev-parse", "--short=10", "HEAD")
    for row in compare(args):
        recorder.add({**row, "other_commit": head or args.path.name})
    print(table(recorder.rows))


BENCHMARK = common.Benchmark(
    "against", __doc__, options, run, ("benchmark", "case"), plot=lambda rows: print(table(rows)),
    required=lambda row: False,
)  # fmt: skip
main = BENCHMARK.main

if __name__ == "__main__":
    main()
