"""Tables and plot of docs/performance.md, drawn from benchmarks/results/attention.jsonl.

    python -m benchmarks.report

Each table stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->`; what else the page says
is left alone. Of several rows of one case the latest counts; a failure takes the place of older
times.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from . import cards_report, common
from .cases import NO_ROWS, PASSES, Case, Rows, length, named
from .common import Row
from .gaps import not_run
from .goals import (
    LEAST_ALIKE,
    MOST_FOR_PROBS,
    MOST_MEMORY,
    MOST_MEMORY_ONE_SOFTMAX,
    ONE_SOFTMAX,
    PUBLISHED,
    TARGETS,
    Goals,
)
from .providers import SHORT_WINDOWS

PAGE = common.ROOT / "docs" / "performance.md"
PLOT = common.ROOT / "docs" / "images" / "attention.png"


# cells


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def both(values: Iterable[float | None]) -> str:
    cells = [number(value) for value in values]
    return " / ".join(cell or "-" for cell in cells) if any(cells) else ""


def table(head: list[str], lines: list[list[str]]) -> str:
    """Markdown; columns and lines with nothing in them left out."""
    lines = [line for line in lines if any(line[1:])]
    if not lines:
        return NO_ROWS
    return common.markdown([head, *lines])


def by_heads(rows: Rows, draw: Callable[[tuple[int, int]], str]) -> str:
    tables = [(heads, draw(heads)) for heads in rows.heads()]
    drawn = [f"H={H}, K={K}:\n\n{text}" for (H, K), text in tables if text != NO_ROWS]
    return "\n\n".join(drawn) or NO_ROWS


# what is timed of this library as a whole; beneath it, by provider, what it is compared with
OF_OURS = ("ours", "one-softmax")
AIMS: dict[str, dict[str, Goals]] = {
    "ours": {"target": TARGETS, "best published": PUBLISHED},
    "one-softmax": {"target": ONE_SOFTMAX},
}


# tables


def speedups(rows: Rows) -> str:
    """Ours over dense cuDNN, the targets and the best published beneath."""

    def draw(heads: tuple[int, int]) -> str:
        cases = [c for c in rows.of(heads=heads, part="whole") if c[1].startswith(OF_OURS)]
        lengths = rows.lengths(cases)
        lines = []
        for case in cases:
            key = (*heads, case[3])
            lines.append(
                [named(case), *(both(rows.pair(case, T, "speedup_over_cudnn")) for T in lengths)]
            )
            if not any(lines[-1][1:]):
                continue
            for name, goals in AIMS.get(case[1], {}).items():
                lines.append([f"*{name}*", *(both(goals.get(key, {}).get(T, ())) for T in lengths)])
        return table(["forward / backward", *map(length, lengths)], lines)

    return by_heads(rows, draw)


def times(rows: Rows, cases_of: Callable[[tuple[int, int]], list[Case]], field: str) -> str:
    def draw(heads: tuple[int, int]) -> str:
        cases = cases_of(heads)
        lengths = rows.lengths(cases)
        lines = [[named(c), *(both(rows.pair(c, T, field)) for T in lengths)] for c in cases]
        return table(["forward / backward", *map(length, lengths)], lines)

    return by_heads(rows, draw)


def wholes(rows: Rows) -> str:
    return times(rows, lambda heads: rows.of(heads=heads, part="whole"), "p50_ms")


def parts(rows: Rows) -> str:
    def cases(heads: tuple[int, int]) -> list[Case]:
        return [c for c in rows.of(heads=heads, alike=None) if c[2] != "whole"]

    return times(rows, cases, "p50_ms")


def agreement(rows: Rows) -> str:
    """Times, and where neighbours are alike over those of independent ones."""

    def draw(heads: tuple[int, int]) -> str:
        cases = [c for c in rows.of(heads=heads, part="selected") if c[4] is not None]
        lengths = rows.lengths(cases)
        lines = []
        for case in cases:
            for text, field in (("", "p50_ms"), (": speed-up", "speedup_over_independent")):
                cells = (both(rows.pair(case, T, field)) for T in lengths)
                lines.append([named(case) + text, *cells])
        return table(["forward / backward", *map(length, lengths)], lines)

    return by_heads(rows, draw)


def memory(rows: Rows) -> str:
    """MiB, and as a multiple of dense cuDNN's."""

    def draw(heads: tuple[int, int]) -> str:
        cases = rows.of(heads=heads, part="whole")
        lengths = rows.lengths(cases)
        dense = next(iter(rows.of(heads=heads, provider="dense-cudnn")), None)
        lines = []
        for case in cases:
            cells = []
            for T in lengths:
                peak = rows.pair(case, T, "peak_mib")[0]
                against = rows.pair(dense, T, "peak_mib")[0] if dense else None
                cell = "" if peak is None else f"{peak:.0f}"
                if peak is not None and against and case != dense:
                    cell += f" ({peak / against:.2f})"
                cells.append(cell)
            lines.append([named(case), *cells])
        return table(["MiB (multiple of dense cuDNN)", *map(length, lengths)], lines)

    return by_heads(rows, draw)


def losses(rows: Rows) -> str:
    """Where ours is slower than dense, misses a target, or asks for too much: a line for each case,
    and what of it is so at which lengths."""
    found: dict[str, list[str]] = {}

    def note(case: Case, what: str, T: int, got: float, goal: float | None = None) -> None:
        H, K = case[0]
        of = "" if goal is None else f" of {number(goal)}"
        # not rounded up to what it misses
        shown = number(got) if goal is None or number(got) != number(goal) else f"{got:.3f}"
        line = found.setdefault(f"{named(case)}, H={H}, K={K}, {what}", [])
        line.append(f"{length(T)} {shown}{of}")

    for case in [c for c in rows.of(part="whole") if c[1].startswith(OF_OURS)]:
        heads, provider, _, stride, _ = case
        one_softmax = provider.startswith("one-softmax")
        own_sizes = one_softmax or provider == SHORT_WINDOWS
        most_memory = MOST_MEMORY_ONE_SOFTMAX if one_softmax else MOST_MEMORY
        logits = (heads, "ours", "whole", stride, None)
        dense = (heads, "dense-cudnn", "whole", 1, None)
        for T in rows.lengths([case]):
            aims = AIMS.get(provider, {}).get("target", {})
            goals = aims.get((*heads, stride), {}).get(T, (0.0, 0.0))
            for name, got, goal in zip(
                PASSES, rows.pair(case, T, "speedup_over_cudnn"), goals, strict=True
            ):
                if got is None:
                    continue
                if got < goal:
                    note(case, f"{name}, under the target", T, got, goal)
                elif got < 1:
                    note(case, f"{name}, slower than dense", T, got)
            ms, of_logits = (rows.pair(c, T, "p50_ms")[0] for c in (case, logits))
            if ms and of_logits and not own_sizes and ms > MOST_FOR_PROBS * of_logits:
                note(case, "times the forward pass of logits", T, ms / of_logits, MOST_FOR_PROBS)
            peak, of_dense = (rows.pair(c, T, "peak_mib")[0] for c in (case, dense))
            if peak and of_dense and peak > most_memory * of_dense:
                note(case, "times the memory of dense", T, peak / of_dense, most_memory)
    for case in rows.of(part="selected", provider="ours"):
        for T in rows.lengths([case]):
            for i, got in enumerate(rows.pair(case, T, "speedup_over_independent")):
                if got is not None and got < LEAST_ALIKE:
                    note(case, f"{PASSES[i]}, times independent", T, got, LEAST_ALIKE)
    if not rows.lengths(c for c in rows.cases if c[1].startswith(OF_OURS)):
        return NO_ROWS
    lines = (f"* {what}: {', '.join(where)}" for what, where in found.items())
    return "\n".join(lines) or "nowhere in these rows"


def failures(rows: Rows) -> str:
    found: dict[str, list[str]] = {}
    for case, lengths in rows.cases.items():
        for T, passes in lengths.items():
            if "failed" in passes:
                H, K = case[0]
                what = f"{named(case)}, H={H}, K={K}: {passes['failed']['failed']}"
                found.setdefault(what, []).append(length(T))
    if not rows.cases:
        return NO_ROWS
    return "\n".join(f"* {what} (T = {', '.join(Ts)})" for what, Ts in found.items()) or "none"


def notes(rows: Rows) -> str:
    """What providers say of how they were called."""
    found: dict[str, list[str]] = {}
    for row in rows.used:
        if "note" in row and row["part"] == "whole" and "failed" not in row:
            heads = found.setdefault(f"{row['provider']}: {row['note']}", [])
            heads.append(f"{row['H']}/{row['K']}")
    if not rows.used:
        return NO_ROWS
    return "\n".join(f"* {what} (H/K = {', '.join(dict.fromkeys(h))})" for what, h in found.items())


def machine(rows: Rows) -> str:
    """Where and at what commits the rows were taken."""
    if not rows.used:
        return NO_ROWS

    def seen(field: str) -> str:
        return ", ".join(dict.fromkeys(str(row[field]) for row in rows.used if row.get(field)))

    days = sorted(row["date"][:10] for row in rows.used)
    return (
        f"{seen('gpu')}, driver {seen('driver')}, torch {seen('torch')}, triton {seen('triton')}; "
        f"{days[0]} to {days[-1]}, commits {seen('commit')}."
    )


def picture(rows: Rows) -> str:
    if not rows.lengths(rows.of(part="whole")):
        return NO_ROWS
    return f"![Time against T, log-log, forward and backward]({PLOT.parent.name}/{PLOT.name})"


# drawn by `benchmarks.decode`
OTHERS = ("wall", "first_call", "decode", "decode_one_softmax", "sampling")
DRAWN: dict[str, Callable[[Rows], str]] = {
    "machine": machine,
    "speedups": speedups,
    "plot": picture,
    "wholes": wholes,
    "parts": parts,
    "agreement": agreement,
    "memory": memory,
    "notes": notes,
    "losses": losses,
    "failures": failures,
    "missing": not_run,
}


# of all rows, whatever GPU the others are of
DRAWN_APART: dict[str, Callable[[list[Row]], str]] = {
    "one_softmax": cards_report.one_softmax,
    "short_windows": cards_report.short_windows,
    "peers": cards_report.peers,
}


def render(page: str, rows: Rows, every: list[Row]) -> str:
    """The page with what stands between its markers drawn anew, from the rows of one GPU and from
    every row.

    Raises:
        ValueError: a marker of a table that is not known.
    """

    def redraw(match: re.Match[str]) -> str:
        name = match["name"]
        if name in OTHERS:
            return match[0]
        if name not in DRAWN | DRAWN_APART:
            known = ", ".join(DRAWN | DRAWN_APART)
            raise ValueError(f"the page has a marker {name!r}, expected one of {known}")
        text = DRAWN[name](rows) if name in DRAWN else DRAWN_APART[name](every)
        return f"<!-- begin: {name} -->\n{text}\n<!-- end: {name} -->"

    marked = r"<!-- begin: (?P<name>\w+) -->\n.*?<!-- end: (?P=name) -->"
    return re.sub(marked, redraw, page, flags=re.DOTALL)


# the plot


def plot(rows: Rows, path: Path) -> None:
    """p50 against T, log-log: forward and backward side by side, a line of them per (H, K)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [heads for heads in rows.heads() if rows.lengths(rows.of(heads=heads, part="whole"))]
    figure, axes = pyplot.subplots(
        len(timed), 2, figsize=(10, 4.2 * len(timed)), squeeze=False, constrained_layout=True
    )
    for line, heads in zip(axes, timed, strict=True):
        cases = rows.of(heads=heads, part="whole")
        for index, (axis, name) in enumerate(zip(line, PASSES, strict=True)):
            for case in cases:
                points = [(T, rows.pair(case, T, "p50_ms")[index]) for T in rows.lengths([case])]
                points = [(T, ms) for T, ms in points if ms is not None]
                if points:
                    style = "o-" if case[1].startswith(OF_OURS) else "s--"
                    axis.plot(
                        *zip(*points, strict=True), style, ms=4, label=named(case).replace("`", "")
                    )
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            ticks = rows.lengths(cases)
            axis.set_xticks(ticks, [length(T) for T in ticks])
            axis.set(title=f"{name}, H={heads[0]}, K={heads[1]}", xlabel="T", ylabel="ms")
            axis.grid(alpha=0.3)
        line[0].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.report")
    parser.add_argument("--rows", type=Path, default=common.RESULTS / "attention.jsonl")
    parser.add_argument("--gpu", help="rows of this GPU; by default that of the most rows")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--plot", type=Path, default=PLOT)
    args = parser.parse_args(argv)
    every = common.read_rows(args.rows)
    rows = Rows(every, args.gpu)
    page = render(args.page.read_text(encoding="utf-8"), rows, every)
    args.page.write_text(page, encoding="utf-8")
    if picture(rows) != NO_ROWS:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
