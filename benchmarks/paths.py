"""What a path of the kernels is worth: the layer with it and without it, at documented settings.

    python -m benchmarks.paths               append rows to results/paths.jsonl
    python -m benchmarks.paths --table       print the table of the rows there
    python -m benchmarks.paths --quick       a tiny size, nothing recorded

A path stays where it is worth 5 % of a pass at some setting. Each is timed as `attention.py` times
the layer, checked by its oracle with the path and without it, in one process: with, without, with.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from native_sparse_attention.ops.triton import backend

from . import attention, common
from .cases import NO_ROWS, length
from .common import Row
from .problem import Setting
from .providers import Ours, OursProbs

RESULTS = common.RESULTS / "paths.jsonl"
# by the name of a path: what `launch.using` takes for it to be left out
WITHOUT: dict[str, dict[str, Any]] = {
    "unions": {"union": None},
    "blocks shared by neighbours": {"union_sm90": False},
    "key-major in Gluon": {"key_major_sm90": False},
    "dq in parts": {"key_major_dq_sm90": False},
    "compressed and window in Gluon": {"flash_sm90": False},
    "softmax mass in Gluon": {"softmax_mass_sm90": False},
}
# of which layers: the last is of those that rank by probabilities
PROBS = ("softmax mass in Gluon",)
HEADS = ((64, 4), (32, 8), (32, 32))
LENGTHS = (4096, 8192, 65536)
STRIDES = (1, 4)
LEAST_GAIN = 1.05


def times(
    name: str, setting: Setting, plan: attention.Plan, device: torch.device, tiles: dict[str, Any]
) -> dict[str, float]:
    """ms of each pass, launched with these tiles.

    Raises:
        RuntimeError: the layer failed, or its results are wrong.
    """
    from native_sparse_attention.kernels.common import launch

    provider = OursProbs() if name in PROBS else Ours()
    run = attention.Run(dataclasses.replace(plan, providers=(provider,)), device)
    with launch.using(tiles):
        run.one(provider, setting)
    failed = [row["failed"] for row in run.rows if "failed" in row]
    if failed:
        raise RuntimeError(failed[0])
    return {row["pass"]: row["p50_ms"] for row in run.rows}


def compare(name: str, setting: Setting, plan: attention.Plan, device: torch.device) -> list[Row]:
    """Rows of a path at a setting, one of each pass, or one that says what failed."""
    case = {"path": name, **setting.row()}
    # what is named nowhere changes nothing, and keeps calls from being recorded
    given: tuple[dict[str, Any], ...] = ({"as ever": None}, WITHOUT[name], {"as ever": None})
    try:
        first, without, again = (times(name, setting, plan, device, tiles) for tiles in given)
    except RuntimeError as error:
        return [{**case, "failed": str(error)}]
    rows = []
    for which, ms in without.items():
        with_ms = round((first[which] + again[which]) / 2, 5)
        apart = round(abs(first[which] - again[which]) / with_ms, 4)
        row = {"pass": which, "with_ms": with_ms, "without_ms": ms, "apart": apart}
        rows.append({**case, **row, "gain": round(ms / with_ms, 4)})
    return rows


def run(
    names: Sequence[str], plan: attention.Plan, device: torch.device, out: Path | None
) -> list[Row]:
    known, rows = common.environment(device), []
    for setting in plan.settings:
        for name in names:
            for row in compare(name, setting, plan, device):
                row = {**row, **known}
                common.append_row(out, row)
                rows.append(row)
    return rows


def table(rows: Sequence[Row]) -> str:
    """By path and pass, the gain at each setting: of the latest rows, bold from `LEAST_GAIN` on."""
    if not rows:
        return NO_ROWS
    latest: dict[tuple[str, ...], Row] = {}
    columns: dict[str, None] = {}
    for row in rows:
        stride = row["selection_stride"]
        where = f"{row['H']}/{row['K']}, {length(row['T'])}" + (f", {stride}" if stride > 1 else "")
        columns[where] = None
        for which in (row["pass"],) if "pass" in row else attention.DIRECTIONS:
            latest[row["path"], which, where] = row

    def cell(row: Row | None) -> str:
        if row is None:
            return ""
        if "failed" in row:
            return "failed"
        told = f"{row['gain']:.2f}"
        return f"**{told}**" if row["gain"] >= LEAST_GAIN else told

    lines = [["time without / with", *columns]]
    for name in dict.fromkeys(row["path"] for row in rows):
        for which in attention.DIRECTIONS:
            cells = [cell(latest.get((name, which, where))) for where in columns]
            lines.append([f"{name}, {which}", *cells])
    return common.markdown(lines)


def main(argv: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(
        prog="benchmarks.paths", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--paths", nargs="+", choices=WITHOUT, default=list(WITHOUT), metavar="NAME")
    add("--heads", nargs="+", metavar="H/K", help="64/4, 32/8 and 32/32 by default")
    add("--lengths", type=int, nargs="+", default=LENGTHS, metavar="T")
    add("--strides", type=int, nargs="+", default=STRIDES, help="selection_stride")
    add("--seconds", type=float, default=0.15, help="of timing for each pass")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, help="JSONL; results/paths.jsonl, none with --quick")
    add("--table", action="store_true", help="print the table of the rows there")
    add("--quick", action="store_true", help="a tiny size, nothing recorded")
    args = parser.parse_args(argv)
    if args.table:
        rows = common.read_rows(args.out or RESULTS)
        print(table(rows))
        return rows
    if not backend.HAS_TRITON:
        parser.error("there are no kernels without Triton")
    device, out = torch.device(args.device), args.out or (None if args.quick else RESULTS)
    heads = [tuple(map(int, pair.split("/"))) for pair in args.heads or ()] or HEADS
    settings: tuple[Setting, ...] = tuple(
        Setting(T, H, K, stride=stride) for H, K in heads for T in args.lengths
        for stride in args.strides
    )  # fmt: skip
    options: dict[str, Any] = dict(seconds=args.seconds)
    if args.quick:
        settings, options = (attention.tiny(96, 4, 2),), dict(seconds=1e-3, check_length=96)
    plan = attention.Plan(settings, (), (1,), **options)
    rows = run(args.paths, plan, device, out)
    print(table(rows))
    return rows


if __name__ == "__main__":
    main()
