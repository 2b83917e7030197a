"""Bits per byte of the sparse layer and of its dense twin, at equal steps of `train_enwik8.py`.

    python benchmarks/enwik8.py                  train all seven, append a row each, print the table
    python benchmarks/enwik8.py --table          print the table of the rows that are there
    python benchmarks/enwik8.py --steps 50 ...   what follows is handed on to train_enwik8.py

Without a GPU it needs `--selection-block-size 16`, which a stride of 16 divides.

Rows go to `benchmarks/results/enwik8.jsonl`; docs/training.md has a copy of the printed table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_enwik8
from training.cli import parse
from training.errors import UserError
from training.runs import check_name
from training.settings import new_settings

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "enwik8.jsonl"
SETTINGS = [
    *(("sparse", rule, stride) for rule in ("logits", "probs") for stride in (1, 4, 16)),
    ("dense", None, None),
]
COLUMNS = (250, 500, 1000, 2000, 3000)


def options_of(attention: str, importance: str | None, stride: int | None) -> list[str]:
    name = "-".join(str(part) for part in ("bench", attention, importance, stride) if part)
    options = ["--name", name, "--attention", attention]
    if importance is not None:
        options += ["--importance", importance, "--selection-stride", str(stride)]
    return options


def check(options: list[str]) -> Path:
    """The folder of a run to come.

    Raises:
        UserError: the run cannot begin.
    """
    given = parse(options, train_enwik8.SETTINGS, "")
    if given.name != options[1]:
        raise UserError("--name does not go with this benchmark, which names its runs")
    folder = ROOT / getattr(given, "out_dir", "runs")
    check_name(folder, given.name)
    cfg = new_settings(given, train_enwik8.SETTINGS)
    try:
        model = train_enwik8.build(Namespace(**vars(cfg) | dict(device="cpu", backend="eager")))
        with torch.no_grad():
            model(torch.zeros(1, 2, dtype=torch.long))
    except (UserError, ValueError) as error:
        raise UserError(f"{given.name}, with the preset of {cfg.device}: {error}") from None
    return folder / given.name


def train(options: list[str]) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "train_enwik8.py"), *options], cwd=ROOT)
    if done.returncode:
        raise UserError(f"{options[1]} ended with status {done.returncode}")


def row(run: Path) -> dict:
    """What a finished run measured, with the settings and the machine that it ran on."""
    config = json.loads((run / "config.json").read_text())["settings"]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    commit = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return {
        "config": config,
        "val_bpb": {m["step"]: round(m["val_bpb"], 4) for m in metrics if "val_bpb" in m},
        "test_bpb": round(metrics[-1]["test_bpb"], 4),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "commit": subprocess.run(commit, capture_output=True, text=True).stdout.strip() or None,
    }


def table(rows: list[dict]) -> str:
    """Markdown: validation bits per byte at some steps, the best, and the test split at the end."""
    steps = [c for c in COLUMNS if all(str(c) in r["val_bpb"] for r in rows)]
    head = ["attention", "importance", "`selection_stride`", *(f"step {c}" for c in steps)]
    lines = [[*head, "best", "test, at the end"], ["---"] * (len(head) + 2)]
    for r in rows:
        sparse = r["config"]["attention"] == "sparse"
        keys = ("importance", "selection_stride")
        lines.append(
            [
                r["config"]["attention"],
                *(str(r["config"][key]) if sparse else "" for key in keys),
                *(f"{r['val_bpb'][str(c)]:.3f}" for c in steps),
                f"{min(r['val_bpb'].values()):.3f}",
                f"{r['test_bpb']:.3f}",
            ]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def measure(runs: list[list[str]]) -> None:
    """Train the runs of these options, and append a row for each. All are checked before one is
    trained."""
    folders = [check(options) for options in runs]
    for options, folder in zip(runs, folders, strict=True):
        train(options)
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(row(folder)) + "\n")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--table", action="store_true", help="print the rows that are there")
    args, options = parser.parse_known_args(argv)
    if not args.table:
        try:
            measure([[*options_of(*setting), *options] for setting in SETTINGS])
        except UserError as error:
            sys.exit(f"benchmarks/enwik8.py: {error}")
        except KeyboardInterrupt:
            sys.exit(130)
    if not RESULTS.exists():
        sys.exit(f"{RESULTS} is not there: run without --table first")
    print(table([json.loads(line) for line in RESULTS.read_text().splitlines()]))


if __name__ == "__main__":
    main()
