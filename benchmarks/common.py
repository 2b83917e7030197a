"""What every benchmark needs: times, where it ran, rows on disk, tables, and its command line."""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Row = dict[str, Any]


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
Tables = Mapping[Path, Mapping[str, Callable[[Sequence[Row]], str]]]


def markdown(lines: list[list[str]]) -> str:
    """A table: its head, and the lines beneath."""
    head, *rest = lines
    drawn = [head, ["---"] * len(head), *rest]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in drawn)


def redraw(page: str, name: str, text: str) -> str:
    """The page with the text between `<!-- begin: NAME -->` and `<!-- end: NAME -->`."""
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    drawn = f"{begin}\n{text}\n{end}"
    return re.sub(f"{begin}.*?{end}", lambda _: drawn, page, flags=re.DOTALL)


def render(page: str, tables: Mapping[str, Callable[[Sequence[Row]], str]], rows: Any) -> str:
    for name, table in tables.items():
        page = redraw(page, name, table(rows))
    return page


def draw_pages(tables: Tables, rows: Sequence[Row]) -> None:
    """Redraw the tables of every page in place."""
    for path, of_page in tables.items():
        page = path.read_text(encoding="utf-8")
        path.write_text(render(page, of_page, rows), encoding="utf-8")


def length(T: int) -> str:
    return f"{T // 1024}k" if T % 1024 == 0 else str(T)


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def seen(rows: Iterable[Row], field: str) -> str:
    """The values of a field, each once."""
    return ", ".join(dict.fromkeys(str(row[field]) for row in rows))


def commits(rows: Iterable[Row]) -> str:
    return ", ".join(sorted({str(row["commit"])[:7] for row in rows}))


def subplots(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure without a window, and its axes [rows columns]."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=size, squeeze=False, constrained_layout=True)


def log_log(axis: Any, lengths: Sequence[int], x: str, y: str) -> None:
    """Axes of time against length."""
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(lengths, list(map(length, lengths)))
    axis.set(xlabel=x, ylabel=y)
    axis.grid(alpha=0.3)


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    figure.clear()


# the command line


def parser_of(name: str, about: str | None, seconds: float | None = 0.3) -> argparse.ArgumentParser:
    """The options that benchmarks share; rows go to results/NAME.jsonl."""
    parser = argparse.ArgumentParser(
        prog=f"benchmarks.{name}", description=(about or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    if seconds is not None:
        add("--seconds", type=float, default=seconds, help="of timing for each row")
    add("--out", type=Path, help=f"JSONL; results/{name}.jsonl, none with --quick")
    add("--table", action="store_true", help="redraw the tables from the rows there")
    add("--quick", action="store_true", help="tiny sizes, nothing recorded")
    return parser


def out_of(args: argparse.Namespace, results: Path) -> Path | None:
    return args.out or (None if args.quick else results)


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
