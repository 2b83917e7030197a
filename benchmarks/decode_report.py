"""Tables and plot of decoding and sampling in docs/performance.md, between `<!-- begin: NAME -->`
and `<!-- end: NAME -->`: drawn by `python -m benchmarks.decode --table`.

Of the GPU of the most rows, and of several rows of one case, the latest counts. One softmax has a
table of its newest run.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from . import cards_report, report
from .common import Row, markdown, redraw
from .decode_step import BASELINE
from .report import length, number

PAGE = report.PAGE
PLOT = report.PLOT.with_name("decode.png")
NO_ROWS = "not measured yet: run `python -m benchmarks.decode`"
NO_SAMPLES = "not measured yet: run `python -m benchmarks.decode --sampling`"

Shape = tuple[int, int, int]  # H, K, T
# speed-up over dense cuDNN in the same run, by provider, (H, K, T) and (B, S); else 1 from some
# length on
TARGETS: dict[str, dict[Shape, dict[tuple[int, int], float]]] = {
    "ours": {(64, 4, 1): {(16, 8192): 1.5, (16, 65536): 7.0}},
    "one-softmax": {(64, 4, 1): {(16, 65536): 9.0}},
}
NEVER_SLOWER_FROM = 4096


class Steps:
    """The latest row of each (H, K, T), B, provider and S."""

    def __init__(self, rows: list[Row]) -> None:
        gpu = Counter(row["gpu"] for row in rows).most_common(1)[0][0]
        self.used = [row for row in rows if row["gpu"] == gpu]
        self.cases: dict[tuple[Shape, int, str, int], Row] = {}
        for row in self.used:
            self.cases[(row["H"], row["K"], row["T"]), row["B"], row["provider"], row["S"]] = row
        self.panels = sorted({case[:2] for case in self.cases})

    def providers(self, shape: Shape, B: int) -> list[str]:
        """As they were first timed."""
        return list(dict.fromkeys(case[2] for case in self.cases if case[:2] == (shape, B)))

    def lengths(self, shape: Shape, B: int) -> list[int]:
        return sorted({case[3] for case in self.cases if case[:2] == (shape, B)})

    def of(self, shape: Shape, B: int, provider: str, field: str) -> dict[int, Any]:
        """A field by S, of the rows that have it."""
        rows = {S: self.cases.get((shape, B, provider, S), {}) for S in self.lengths(shape, B)}
        return {S: row[field] for S, row in rows.items() if field in row}


# the tables


def times(steps: Steps, shape: Shape, B: int) -> str:
    """Microseconds, the speed-up over dense cuDNN, and the bandwidth reached."""
    lengths = steps.lengths(shape, B)
    lines = [["µs (times as fast as dense cuDNN); GB/s", *map(length, lengths)]]
    for name in steps.providers(shape, B):
        us, gbps, speedup = (
            steps.of(shape, B, name, field) for field in ("p50_us", "gbps", "speedup_over_cudnn")
        )
        cells = []
        for S in lengths:
            cell = "" if S not in us else number(us[S])
            if S in speedup and name != BASELINE:
                cell += f" ({number(speedup[S])})"
            cells.append(cell and f"{cell}; {gbps[S]:.0f}")
        if any(cells):
            lines.append([name, *cells])
        goals = TARGETS.get(name, {}).get(shape, {})
        if any((B, S) in goals for S in lengths):
            targets = [f"({number(goals[B, S])})" if (B, S) in goals else "" for S in lengths]
            lines.append(["*target*", *targets])
    return "B={}, H={}, K={}, T={}:\n\n".format(B, *shape) + markdown(lines)


def losses(steps: Steps) -> str:
    """Where ours misses its target or is slower than dense."""
    found = []
    for shape, B in steps.panels:
        for name in steps.providers(shape, B):
            goals = TARGETS.get(name, {}).get(shape, {})
            for S, got in steps.of(shape, B, name, "speedup_over_cudnn").items():
                where = "{}, B={}, H={}, K={}, T={}, S={}".format(name, B, *shape, length(S))
                goal = goals.get((B, S), 1.0 if S >= NEVER_SLOWER_FROM else 0.0)
                if not name.startswith(report.OF_OURS) or got >= goal:
                    continue
                missed = f"target {number(goals[B, S])}" if (B, S) in goals else "slower than dense"
                found.append(f"* {where}: {number(got)}, {missed}")
    return "\n".join(found) or "nowhere in these rows"


def failures(steps: Steps) -> str:
    """What was not timed, and why."""
    found: dict[str, list[str]] = {}
    for (shape, B, name, S), row in steps.cases.items():
        if "failed" in row:
            what = "{}, H={}, K={}, T={}: {}".format(name, *shape, row["failed"])
            found.setdefault(what, []).append(f"{B} x {length(S)}")
    return "\n".join(f"* {what} (B x S = {', '.join(at)})" for what, at in found.items()) or "none"


def where(rows: list[Row]) -> str:
    return "{gpu}, driver {driver}, torch {torch}, triton {triton}, commit {commit}.".format(
        **rows[-1]
    )


def table(rows: list[Row]) -> str:
    if not rows:
        return NO_ROWS
    steps = Steps(rows)
    parts = [times(steps, *panel) for panel in steps.panels]
    if pictured(steps):
        parts.append(f"![Time against S, log-log, for each B]({PLOT.parent.name}/{PLOT.name})")
    parts += [f"Misses:\n\n{losses(steps)}", f"Not timed, and why:\n\n{failures(steps)}"]
    return "\n\n".join([*parts, where(steps.used)])


def one_softmax(rows: list[Row]) -> str:
    """The newest run of it, with what was timed beside it."""
    run = cards_report.run_of(rows, cards_report.is_one_softmax)
    if not run:
        return NO_ROWS
    steps = Steps(run)
    return "\n\n".join([*(times(steps, *panel) for panel in steps.panels), where(steps.used)])


def sampling_table(rows: list[Row]) -> str:
    """Tokens a second by batch, and how many times the published package's."""
    if not rows:
        return NO_SAMPLES
    latest = {(row["provider"], row["batch"]): row for row in rows}
    batches = sorted({batch for _, batch in latest})
    lines = [["tokens/s (multiple of nsa-pytorch)", *(f"batch {batch}" for batch in batches)]]
    for name in dict.fromkeys(name for name, _ in latest):
        cells = []
        for batch in batches:
            row = latest.get((name, batch), {})
            cell = row.get("failed", "").replace("|", "/")
            if "tokens_per_s" in row:
                cell = f"{row['tokens_per_s']:.0f}"
                if name == "ours" and "over_published" in row:
                    cell += f" ({number(row['over_published'])})"
            cells.append(cell)
        lines.append([name, *cells])
    return f"{markdown(lines)}\n\n{where(rows)}"


def render(page: str, rows: list[Row], samples: list[Row]) -> str:
    """The page with its tables drawn anew."""
    page = redraw(page, "decode", table(rows))
    page = redraw(page, "decode_one_softmax", one_softmax(rows))
    return redraw(page, "sampling", sampling_table(samples))


# the plot


def pictured(steps: Steps) -> list[tuple[Shape, int]]:
    """The panels of the shape that has targets, or else of the first that was timed."""
    timed = [case[:2] for case, row in steps.cases.items() if "p50_us" in row]
    shapes = [shape for shape, _ in timed]
    shown = next((shape for shape in shapes if shape in TARGETS), shapes[0] if shapes else None)
    return sorted({panel for panel in timed if panel[0] == shown})


def plot(steps: Steps) -> None:
    """p50 against S, log-log, one panel for each B."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = pictured(steps)
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4.6 * len(panels), 4.2), squeeze=False, constrained_layout=True
    )
    for axis, (shape, B) in zip(axes[0], panels, strict=True):
        for name in steps.providers(shape, B):
            points = steps.of(shape, B, name, "p50_us")
            style = "o-" if name.startswith("ours") else "s--"
            if points:
                axis.plot(list(points), list(points.values()), style, ms=4, label=name)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        ticks = steps.lengths(shape, B)
        axis.set_xticks(ticks, [length(S) for S in ticks])
        axis.set(title="B={}, H={}, K={}, T={}".format(B, *shape), xlabel="S", ylabel="µs")
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7)
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT, dpi=130)
    pyplot.close(figure)


def draw(rows: list[Row], samples: list[Row]) -> None:
    """Page and plot."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(render(page, rows, samples), encoding="utf-8")
    if rows and pictured(Steps(rows)):
        plot(Steps(rows))
