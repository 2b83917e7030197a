"""The table and the plot of docs/training.md and the table of docs/sizes.md, drawn from the rows of
`learning.py`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from native_sparse_attention.checks.tensors import BRANCHES

from . import common
from .cases import NO_ROWS, length
from .common import Row

PAGES = tuple(common.ROOT / "docs" / name for name in ("training.md", "sizes.md"))
PLOT = common.ROOT / "docs" / "images" / "learning.png"
DENSE = "dense"
# the runs of a variant, one for each seed
Variants = dict[str, list[Row]]
# drawn in any case, and this many of the others
DRAWN, OTHERS = ("dense", "window", "paper", "published"), 3
# of different sizes
SIZED = (
    *("MLP over windows of 8", "MLP over windows of 8, 8 apart", "paper"),
    *("1088 keys, blocks of 16", "1088 keys, blocks of 32", "1088 keys"),
    *("one softmax, max of tokens, rotated", "window"),
)


def one_experiment(rows: Sequence[Row]) -> list[Row]:
    """Complete rows with the data, the bytes and the model of the last one."""
    rows = [row for row in rows if "failed" not in row]
    if not rows:
        return []

    def experiment(row: Row) -> tuple[str, int, str]:
        return row["data"]["sha256"], row["steps"] * row["batch"] * row["T"], str(row["shape"])

    return [row for row in rows if experiment(row) == experiment(rows[-1])]


def bits(row: Row) -> float:
    return row["bits"]["all"]


def settings_of(row: Row) -> dict[str, Any]:
    """The settings of a run. Those of "published" did not name its network while that was the
    library's default, which began with random weights then."""
    random = {"compress_mlp": {"name": "mlp", "start": "random"}}
    return (random if row["variant"] == "published" else {}) | row["settings"]


def chosen(rows: Sequence[Row], loss: Callable[[Row], float] = bits) -> list[Row]:
    """Of one variant's runs, the latest one of each seed with the chosen learning rate: that of the
    most seeds, of several that of the least loss. The settings are those of the last row."""
    by_lr: dict[float, dict[int, Row]] = {}
    for row in rows:
        if settings_of(row) == settings_of(rows[-1]):
            by_lr.setdefault(row["lr"], {})[row["seed"]] = row

    def rank(lr: float) -> tuple[int, float]:
        return -len(by_lr[lr]), mean(map(loss, by_lr[lr].values()))

    found = by_lr[min(by_lr, key=rank)]
    return [found[seed] for seed in sorted(found)]


def by_variant(rows: Sequence[Row], T: int) -> Variants:
    """Of the runs at a length, those of every variant, by bits per byte."""
    trained = [row for row in rows if row["kind"] == "train" and row["T"] == T]
    names = dict.fromkeys(row["variant"] for row in trained)
    found = {name: chosen([row for row in trained if row["variant"] == name]) for name in names}
    return dict(sorted(found.items(), key=lambda item: mean(map(bits, item[1]))))


def timed(rows: Sequence[Row], T: int, compiled: bool) -> dict[str, Row]:
    """Of each variant the latest row of a speed, with nothing beside it."""
    of_speed = (row for row in rows if row["kind"] == "speed" and row["T"] == T)
    return {row["variant"]: row for row in of_speed if row["compile"] == compiled}


def over_dense(rows: Sequence[Row], row: Row) -> float | None:
    """Tokens a second over those of dense attention on the same card and at the same commit."""
    where = row["gpu"], row["commit"]
    beside = [other for other in rows if (other["gpu"], other["commit"]) == where]
    dense = timed(beside, row["T"], row["compile"]).get(DENSE)
    return None if dense is None else row["tokens_per_s"] / dense["tokens_per_s"]


def speeds(rows: Sequence[Row], T: int) -> dict[str, float]:
    """Tokens a second of a variant alone on the card that timed dense attention last: those of
    another card are scaled by what dense attention has there."""
    alone = timed(rows, T, compiled=False)
    dense = alone.get(DENSE)
    ratios = {name: over_dense(rows, row) for name, row in alone.items()}
    if dense is None:
        return {}
    return {name: r * dense["tokens_per_s"] for name, r in ratios.items() if r is not None}


def speed_cell(rows: Sequence[Row], T: int, name: str) -> str:
    """Thousands of tokens a second, eager / compiled; in brackets times those of dense
    attention."""
    cells = []
    for row in (timed(rows, T, compiled).get(name) for compiled in (False, True)):
        if row is not None:
            ratio = None if name == DENSE else over_dense(rows, row)
            cell = f"{row['tokens_per_s'] / 1e3:.0f}"
            cells.append(cell if ratio is None else f"{cell} ({ratio:.2f})")
    return " / ".join(cells)


def mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean and standard deviation."""
    told = f"{mean(values):.{digits}f}"
    return told if len(values) < 2 else f"{told} ± {statistics.stdev(values):.{digits}f}"


def keys(row: Row) -> str:
    return " + ".join(str(count) for count in row["keys_per_query"].values())


def minus_dense(runs: list[Row], dense: list[Row]) -> str:
    """The difference of runs of equal seeds."""
    twins = {row["seed"]: bits(row) for row in dense}
    pairs = [bits(row) - twins[row["seed"]] for row in runs if row["seed"] in twins]
    return spread(pairs) if pairs else ""


def digits(runs: list[Row]) -> list[str]:
    """Of the needle, the share of right digits at each depth."""
    depths = runs[0]["needle"]
    return [f"{mean(run['needle'][d]['digits'] for run in runs):.2f}" for d in depths]


def table_of(rows: Sequence[Row], T: int) -> str:
    variants = by_variant(rows, T)
    positions = next(iter(variants.values()))[0]["bits"]["positions"]
    shown = [name for name in positions if int(name.partition("-")[0]) >= T // 32]
    head = ["variant", "M parameters", "keys a query", "learning rate", "seeds"]
    head += [
        "bits per byte",
        "minus dense",
        "last half",
        *shown,
        "digits found",
        "thousand tokens/s (times dense), eager / compiled",
    ]
    lines = [head]
    for name, runs in variants.items():
        row = runs[0]
        cells = [name, f"{row['parameters'] / 1e6:.1f}", keys(row), f"{row['lr']:g}"]
        cells.append(str(len(runs)))
        cells.append(spread(list(map(bits, runs))))
        cells.append("" if name == DENSE else minus_dense(runs, variants.get(DENSE, [])))
        cells.append(spread([run["bits"]["last_half"] for run in runs]))
        cells += [f"{mean([run['bits']['positions'][p] for run in runs]):.3f}" for p in shown]
        cells.append(" / ".join(digits(runs)))
        cells.append(speed_cell(rows, T, name))
        lines.append(cells)
    return common.markdown(lines)


def lengths(rows: Sequence[Row]) -> list[int]:
    return sorted({row["T"] for row in rows if row["kind"] == "train"})


def table(rows: Sequence[Row]) -> str:
    """For each length, the variants by their bits per byte."""
    rows = one_experiment(rows)
    if not lengths(rows):
        return NO_ROWS
    parts = [f"T = {T}:\n\n{table_of(rows, T)}" for T in lengths(rows)]
    last = [row for row in rows if row["kind"] == "train"][-1]

    where = f"{last['train_bytes'] / 1e6:.0f} MB of training text a run, {last['schedule']}; "
    where += f"text with SHA-256 {last['data']['sha256'][:12]}, {last['data']['bytes']} bytes. "
    where += f"{common.seen(rows, 'gpu')}, torch {common.seen(rows, 'torch')}, "
    where += f"triton {common.seen(rows, 'triton')}, commits {common.seen(rows, 'commit')}."
    return "\n\n".join([*parts, where])


def sizes(row: Row) -> list[str]:
    """l, d, s, blocks and w + 1 of the branches that a model has."""
    settings, branches = row["settings"], row["settings"].get("branches", BRANCHES)
    counts = (settings[f"num_{kind}_blocks"] for kind in ("initial", "local", "selected"))
    cells = [str(settings["compress_block_size"]), str(settings["compress_block_sliding_stride"])]
    cells += [str(settings["selection_block_size"]), " + ".join(map(str, counts))]
    if branches == ["window"]:
        cells = [""] * len(cells)
    return [*cells, str(settings["sliding_window_size"] + 1) if "window" in branches else ""]


def table_of_sizes(rows: Sequence[Row]) -> str:
    """What models of different sizes learn at each length, minus what dense attention does."""
    rows = one_experiment(rows)
    found = {T: by_variant(rows, T) for T in lengths(rows)}
    if not found:
        return NO_ROWS
    keys_at = f"keys a query, T = {min(found)}"
    head = ["variant", "l", "d", "s", "initial + local + n", "w + 1", keys_at]
    lines = [[*head, *(f"minus dense, T = {T}" for T in found)]]
    for name in SIZED:
        runs = next((variants[name] for variants in found.values() if name in variants), None)
        if runs is None:
            continue
        cells = [name, *sizes(runs[0]), keys(runs[0])]
        for variants in found.values():
            cells.append(minus_dense(variants.get(name, []), variants.get(DENSE, [])))
        lines.append(cells)
    return common.markdown(lines)


def picture(rows: Sequence[Row]) -> str:
    if not lengths(one_experiment(rows)):
        return NO_ROWS
    told = "Bits per byte against the position, and training loss against time"
    return f"![{told}]({PLOT.parent.name}/{PLOT.name})"


def render(page: str, rows: Sequence[Row]) -> str:
    page = common.redraw(page, "learning", table(rows))
    page = common.redraw(page, "learning_sizes", table_of_sizes(rows))
    return common.redraw(page, "learning_plot", picture(rows))


def draw(rows: Sequence[Row], pages: Iterable[Path] = PAGES, image: Path | None = None) -> None:
    for path in pages:
        path.write_text(render(path.read_text(encoding="utf-8"), rows), encoding="utf-8")
    if picture(rows) != NO_ROWS:
        plot(one_experiment(rows), image or PLOT)


# the plot


def drawn(variants: Variants) -> Variants:
    """Those that are drawn in any case, and the best of the others."""
    others = [name for name in variants if name not in DRAWN][:OTHERS]
    return {name: runs for name, runs in variants.items() if name in (*DRAWN, *others)}


def points_by_position(runs: list[Row]) -> list[tuple[float, float]]:
    """(geometric mean of a range, bits per byte)"""
    found = []
    for name in runs[0]["bits"]["positions"]:
        begin, end = map(int, name.split("-"))
        value = mean([run["bits"]["positions"][name] for run in runs])
        found.append(((max(begin, end // 4) * end) ** 0.5, value))
    return found


def points_by_time(runs: list[Row], tokens_per_s: float | None) -> list[tuple[float, float]]:
    """(seconds, bits per byte of the training text): of the time alone on a GPU if it is known."""
    found = []
    for points in zip(*(run["curve"] for run in runs), strict=True):
        seconds = [
            point[1] if tokens_per_s is None else point[0] / tokens_per_s for point in points
        ]
        found.append((mean(seconds), mean([point[2] for point in points])))
    return found


def plot(rows: Sequence[Row], path: Path) -> None:
    """A line of axes for each length: bits against position, training loss against time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = lengths(rows)
    size = (12, 4.6 * len(found))
    figure, axes = pyplot.subplots(
        len(found), 2, figsize=size, squeeze=False, constrained_layout=True
    )
    for (left, right), T in zip(axes, found, strict=True):
        variants, alone = drawn(by_variant(rows, T)), speeds(rows, T)
        is_alone = all(name in alone for name in variants)
        lows = []
        for name, runs in variants.items():
            style = "-" if name in DRAWN else "--"
            left.plot(*zip(*points_by_position(runs), strict=True), style, marker="o", label=name)
            points = points_by_time(runs, alone[name] if is_alone else None)
            right.plot(*zip(*points, strict=True), style, label=name)
            lows += [loss for _, loss in points[len(points) // 10 :]]
        left.set_xscale("log", base=2)
        ends = [int(name.split("-")[1]) for name in runs[0]["bits"]["positions"]]
        left.set_xticks(ends, [length(end) for end in ends])
        left.set(title=f"held-out text, T = {length(T)}", xlabel="position", ylabel="bits per byte")
        label = "seconds alone on a GPU" if is_alone else "seconds, several runs on a GPU"
        right.set(title="training text", xlabel=label, ylabel="bits per byte")
        right.set_ylim(min(lows), max(lows))
        for axis in (left, right):
            axis.grid(alpha=0.3)
        left.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
