"""What every benchmark needs: times, where it ran, rows on disk, tables, and its program."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Row = dict[str, Any]
PASSES = ("forward", "backward")


class WrongResult(Exception):
    """A result is not what it should be: not to be timed."""


# at most: a wait that ends early is no wait
CYCLES_PER_SECOND = 2e9

# written before each timed call, so that none finds its inputs in a cache of the GPU
FLUSH_BYTES = 256 * 1024 * 1024


# where it ran


def output_of(*command: str) -> str | None:
    """What a command prints, None where there is no such command or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> str | None:
    """The commit of this checkout, with "-dirty" after it where tracked files differ from it; what
    `BENCHMARK_COMMIT` says where it is set, for copies of a checkout."""
    head = output_of("git", "rev-parse", "--short=10", "HEAD")
    if "BENCHMARK_COMMIT" in os.environ or head is None:
        return os.environ.get("BENCHMARK_COMMIT")
    # results are what a benchmark writes, not what it runs
    changed = output_of(
        "git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results"
    )
    return f"{head}-dirty" if changed else head


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(device: torch.device) -> Row:
    """The fields that every row of a run has in common."""
    now = datetime.datetime.now(datetime.timezone.utc)
    cuda = device.type == "cuda"
    driver = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "gpu": torch.cuda.get_device_name(device) if cuda else f"none ({platform.machine()})",
        "driver": (output_of(*driver) or "").partition("\n")[0] or None if cuda else None,
        "torch": torch.__version__,
        "triton": version("triton"),
        "commit": commit(),
        "date": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


# rows


def read_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def append_row(path: Path | None, row: Row) -> None:
    """One more line; a reader, or a run cut short, never finds half of one."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(before + json.dumps(row) + "\n", encoding="utf-8")
    unfinished.replace(path)


# tables and pages

NO_ROWS = "no rows yet"
Key = Callable[[Row], Any]
Tables = Mapping[Path, Mapping[str, Callable[[Sequence[Row]], str]]]


def markdown(lines: list[list[str]]) -> str:
    """A table: its head, and the lines beneath."""
    head, *body = lines
    drawn = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in drawn)


def grid(
    rows: Iterable[Row],
    head: str,
    line: Key,
    column: Key,
    cell: Callable[[dict[str, Row]], str],
    title: Key = lambda row: None,
) -> str:
    """A table for each title, its lines and named columns in the order of their first rows, other
    columns sorted. A cell is drawn from the latest row of each pass; a failure takes the place of
    older rows. Beneath, where these rows were taken."""
    latest: dict[Any, dict[Any, dict[Any, dict[str, Row]]]] = {}
    for row in rows:
        cells = latest.setdefault(title(row), {}).setdefault(line(row), {})
        passes = cells.setdefault(column(row), {})
        if "failed" in row or "failed" in passes:
            passes.clear()
        passes["failed" if "failed" in row else row.get("pass", "")] = row
    tables = []
    for name, lines in latest.items():
        columns = list(dict.fromkeys(key for cells in lines.values() for key in cells))
        if not any(isinstance(key, str) for key in columns):
            columns.sort()
        drawn = [[head, *map(label_of, columns)]]
        for label, cells in lines.items():
            of_line = [cells.get(key, {}) for key in columns]
            texts = [("failed" if "failed" in p else cell(p)) if p else "" for p in of_line]
            drawn += [[str(label), *texts]] if any(texts) else []
        if len(drawn) > 1:
            tables.append(markdown(drawn) if name is None else f"{name}:\n\n{markdown(drawn)}")
    if tables:
        by_line = [cells for lines in latest.values() for cells in lines.values()]
        used = [row for cells in by_line for passes in cells.values() for row in passes.values()]
        tables.append(machine(used))
    return "\n\n".join(tables) or NO_ROWS


def label_of(key: Any) -> str:
    """Of a column: lengths in k, several values one after another."""
    if isinstance(key, tuple):
        return ", ".join(map(label_of, key))
    return length(key) if isinstance(key, int) else str(key)


def machine(rows: Sequence[Row]) -> str:
    """Where and at what commits rows were taken."""
    fields = ("gpu", "torch", "triton", "commit")
    gpu, torch_version, triton, commit = (
        ", ".join(dict.fromkeys(str(row[field]) for row in rows if row.get(field)))
        for field in fields
    )
    return f"{gpu}, torch {torch_version}, triton {triton}; {commit}."


def failures(rows: Iterable[Row], name: Key) -> str:
    """Why rows have no result, a line each."""
    return "\n".join(dict.fromkeys(f"* {name(r)}: {r['failed']}" for r in rows if "failed" in r))


def redraw(page: str, name: str, text: str) -> str:
    """The page with the text between `<!-- begin: NAME -->` and `<!-- end: NAME -->`."""
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    drawn = f"{begin}\n{text}\n{end}"
    return re.sub(f"{begin}.*?{end}", lambda _: drawn, page, flags=re.DOTALL)


def render(page: str, tables: Mapping[str, Callable[[Sequence[Row]], str]], rows: Any) -> str:
    for name, table in tables.items():
        page = redraw(page, name, table(rows))
    return page


def length(T: int) -> str:
    return f"{T // 1024}k" if T and T % 1024 == 0 else str(T)


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def both(passes: Mapping[str, Row], field: str) -> str:
    """A field of the forward and of the backward pass."""
    cells = [number(passes.get(name, {}).get(field)) for name in PASSES]
    return " / ".join(cell or "-" for cell in cells) if any(cells) else ""


Curves = Mapping[str, Mapping[float, float | list[float]]]


def chart(
    panels: Mapping[str, Curves], path: Path, x: str, y: str, columns: int = 2, is_log: bool = True
) -> None:
    """A panel for each title, a line for each label of all panels in a color of its own, and one
    legend; x is logarithmic, and y unless it is not `is_log`. Of several values at a point the line
    has the mean, and a bar the standard deviation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(4.6 * columns, 3.4 * lines), squeeze=False,
        constrained_layout=True, sharey=not is_log,
    )  # fmt: skip
    colors = {label: f"C{i}" for i, label in enumerate(dict.fromkeys(
        label for curves in panels.values() for label in curves))}  # fmt: skip
    handles = {}
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (title, curves) in zip(axes.flat, panels.items(), strict=False):
        for label, points in curves.items():
            at, values = zip(*sorted(points.items()), strict=True)
            seeds = [value if isinstance(value, list) else [value] for value in values]
            bars = [statistics.stdev(some) if len(some) > 1 else 0.0 for some in seeds]
            handles[label] = axis.errorbar(
                at, [*map(statistics.fmean, seeds)], bars, fmt="o-", ms=4, color=colors[label]
            )
        ticks = sorted({round(at) for points in curves.values() for at in points})
        axis.set_xscale("log", base=2)
        if is_log:
            axis.set_yscale("log")
        axis.set_xticks(ticks, list(map(length, ticks)))
        axis.set(title=title, xlabel=x, ylabel=y)
        axis.grid(alpha=0.3)
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=columns, frameon=False
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


# the program


class Recorder:
    """Rows of a run: each gets what it ran on, is appended to a file and printed as it comes."""

    def __init__(self, out: Path | None, device: torch.device, fields: Sequence[str]) -> None:
        self.out, self.device, self.fields = out, device, fields
        self.environment, self.rows = environment(device), list[Row]()

    def add(self, row: Row) -> None:
        row = {**row, **self.environment}
        append_row(self.out, row)
        self.rows.append(row)
        print(text_of(row, self.fields), flush=True)


def text_of(row: Row, fields: Sequence[str]) -> str:
    """A row as a person reads it: some fields, then what was measured or why nothing was."""
    head = " ".join(f"{row[field]!s:<8}" for field in fields if row.get(field) is not None)
    values = (f"{name} {value:g}" for name, value in row.items() if isinstance(value, float))
    return f"{head} {row.get('failed') or row.get('refused') or ', '.join(values)}"


def check_least(plan: Any, least: Mapping[str, int]) -> None:
    """Raises ValueError for a setting, or one of several, that is less than it may be."""
    for name, at_least in least.items():
        value = getattr(plan, name)
        value = min(value) if isinstance(value, tuple) else value
        if value < at_least:
            raise ValueError(f"{name} must be at least {at_least}, got {value}")


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A program that appends rows to results/NAME.jsonl and draws pages from them.

    options:   adds its options to a parser
    run:       measures; `args.device` is a torch.device
    fields:    of a row, which tell a person what was measured
    required:  whether a row that failed makes the program fail
    """

    name: str
    about: str | None
    options: Callable[[argparse.ArgumentParser], Any]
    run: Callable[[argparse.Namespace, Recorder], Any]
    fields: tuple[str, ...]
    tables: Tables = dataclasses.field(default_factory=dict)
    plot: Callable[[Sequence[Row]], Any] | None = None
    required: Callable[[Row], bool] = lambda row: True
    seconds: float | None = None

    @property
    def results(self) -> Path:
        return RESULTS / f"{self.name}.jsonl"

    def main(self, argv: list[str] | None = None) -> list[Row]:
        args = self.arguments(argv)
        if args.table:
            rows = read_rows(args.out or self.results)
            self.draw(rows)
            return rows
        out = args.out or (None if args.quick else self.results)
        recorder = Recorder(out, args.device, self.fields)
        try:
            self.run(args, recorder)
        except ValueError as error:
            sys.exit(f"benchmarks.{self.name}: {error}")
        failed = [row for row in recorder.rows if "failed" in row and self.required(row)]
        if failed:
            sys.exit(f"{len(failed)} cases failed, the first: {text_of(failed[0], self.fields)}")
        return recorder.rows

    def arguments(self, argv: list[str] | None) -> argparse.Namespace:
        about = (self.about or "").partition("\n")[0]
        parser = argparse.ArgumentParser(prog=f"benchmarks.{self.name}", description=about)
        add = parser.add_argument
        add("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
        if self.seconds is not None:
            add("--seconds", type=float, default=self.seconds, help="of timing for each row")
        add("--out", type=Path, help=f"JSONL; results/{self.name}.jsonl, none with --quick")
        add("--table", action="store_true", help="redraw the tables from the rows there")
        add("--quick", action="store_true", help="tiny sizes, nothing recorded")
        self.options(parser)
        return parser.parse_args(argv)

    def draw(self, rows: Sequence[Row]) -> None:
        """Redraw the tables of every page in place, and the plot."""
        for path, tables in self.tables.items():
            page = path.read_text(encoding="utf-8")
            path.write_text(render(page, tables, rows), encoding="utf-8")
        if self.plot is not None and rows:
            self.plot(rows)


# time and memory


def quantiles(times: list[float]) -> Row:
    """p20, p50, p80 of times in ms, and how many there were."""
    if len(times) == 1:
        times = times * 2
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    names = ("p20_ms", "p50_ms", "p80_ms")
    return {**{n: round(cuts[i], 5) for n, i in zip(names, (1, 4, 7), strict=True)}}


def time_cpu(call: Callable[[], Any], seconds: float) -> list[float]:
    call()
    times: list[float] = []
    while not times or (sum(times) < seconds * 1e3 and len(times) < 100):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e3)
    return times


def time_cuda(
    call: Callable[[], Any], seconds: float, device: torch.device, clean: bool
) -> list[float]:
    """Times in ms by CUDA events around the call alone, the L2 cache overwritten before each. The
    GPU is kept waiting until the call is launched, as it is kept busy in training: what is timed is
    the GPU's work."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    call()  # compiles
    torch.cuda.synchronize(device)
    launching = []
    for _ in range(3):  # one of them may compile, or find the CPU in use
        began = time.perf_counter()
        call()
        launching.append(time.perf_counter() - began)
        torch.cuda.synchronize(device)
    wait = int(2 * min(launching) * CYCLES_PER_SECOND)

    def times(repeats: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for start, end in events:
            flush.zero_()
            if clean:
                flush.view(torch.int64).sum()
            torch.cuda._sleep(wait)
            start.record()
            call()
            end.record()
        torch.cuda.synchronize(device)
        return [start.elapsed_time(end) for start, end in events]

    estimate = min(times(2))
    repeats = max(3, min(200, int(seconds * 1e3 / max(estimate, 1e-3))))
    times(max(1, repeats // 4))  # to the clock that lasts
    return times(repeats)


def time_call(
    call: Callable[[], Any], seconds: float, device: torch.device, clean: bool = False
) -> Row:
    """p20, p50, p80 of about `seconds` of repeated calls. With `clean` the flush of the GPU's cache
    ends with a read: what a write leaves there the call would have to write back, which counts
    where the call takes microseconds."""
    if device.type == "cuda":
        times = time_cuda(call, seconds, device, clean)
    else:
        times = time_cpu(call, seconds)
    return {**quantiles(times), "repeats": len(times)}


def release() -> None:
    """Give back what dead tensors held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def why(error: BaseException) -> str:
    """An exception in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def still_alive(device: torch.device) -> bool:
    """False where an error has taken the CUDA context with it: nothing more can run."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def attempt(measure: Callable[[], Row], device: torch.device) -> Row:
    """What a measurement gives, or a row that says why it failed."""
    try:
        return measure()
    except WrongResult as error:
        return {"failed": f"wrong: {error}"}
    except Exception as error:
        if not still_alive(device):
            raise
        return {"failed": why(error)}


def synchronize(device: torch.device) -> float:
    """The time at which the device has done all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
