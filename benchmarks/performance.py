"""Tables and plot of results/performance.md, of the rows of `attention.py`.

Of several rows of one case the latest counts; a failure takes the place of older times. Most tables
are of the GPU of the most rows; one softmax, short windows and peers of their newest run, which has
a GPU of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from . import common
from .common import NO_ROWS, Row, length, number
from .peers import PEERS
from .providers import SHORT_WINDOWS

PAGE = common.RESULTS / "performance.md"
PLOT = common.ROOT / "docs" / "images" / "attention.png"
PASSES = ("forward", "backward")
# what is timed of this library as a whole
OF_OURS = ("ours", "one-softmax")
MOST_MEMORY = 1.5  # times that of dense attention

# speed-up over dense cuDNN in the same run, forward and backward, by (H, K, selection_stride) and T
Goals = dict[tuple[int, int, int], dict[int, tuple[float, float]]]
TARGETS: Goals = {
    (64, 4, 1): {
        4096: (0.7, 0.8), 8192: (1.2, 1.4), 16384: (2.0, 2.3), 32768: (3.3, 3.9),
        65536: (5.0, 5.6), 131072: (7.5, 8.0),
    },
    (64, 4, 4): {8192: (1.6, 1.7), 65536: (6.5, 6.5)},
    (32, 8, 1): {8192: (0.8, 1.0), 65536: (3.5, 4.2)},
    (32, 8, 16): {8192: (1.4, 1.5), 65536: (6.0, 6.0)},
    (32, 32, 1): {8192: (0.6, 0.8), 65536: (2.8, 3.2)},
}  # fmt: skip
PUBLISHED: Goals = {
    (64, 4, 1): {
        4096: (0.41, 0.55), 8192: (0.79, 0.97), 16384: (1.3, 1.6), 32768: (2.1, 2.8),
        65536: (3.1, 3.9), 131072: (4.6, 5.5),
    },
    (32, 8, 1): {8192: (0.27, 0.51), 65536: (1.2, 2.6)},
}  # fmt: skip
ONE_SOFTMAX: Goals = {
    (64, 4, 1): {4096: (1.1, 1.2), 8192: (1.9, 2.0), 16384: (3.0, 3.6), 65536: (10.0, 14.0)},
    (32, 8, 1): {8192: (1.3, 1.5), 65536: (7.0, 10.0)},
}
AIMS: dict[str, dict[str, Goals]] = {
    "ours": {"target": TARGETS, "best published": PUBLISHED},
    "one-softmax": {"target": ONE_SOFTMAX},
}

# (H, K), provider, part, selection_stride, how many neighbours of random indices are alike
Case = tuple[tuple[int, int], str, str, int, int | None]


class Rows:
    """The latest rows of one GPU: case -> T -> pass -> row ("failed" in place of a pass)."""

    def __init__(self, rows: Sequence[Row], gpu: str | None = None) -> None:
        if gpu is None and rows:
            gpu = Counter(row["gpu"] for row in rows).most_common(1)[0][0]
        # a peer that cannot run a setting leaves a row for the reader of the rows alone
        self.used = [row for row in rows if row["gpu"] == gpu and "refused" not in row]
        self.cases: dict[Case, dict[int, dict[str, Row]]] = {}
        for row in self.used:
            heads = (row["H"], row["K"])
            case = (heads, row["provider"], row["part"], row["selection_stride"], row.get("alike"))
            passes = self.cases.setdefault(case, {}).setdefault(row["T"], {})
            if "failed" in row or "failed" in passes:
                passes.clear()
            passes[row.get("pass", "failed")] = row

    def select(self, **wanted: Any) -> list[Case]:
        """Cases by heads, provider, part, stride, alike: providers as they were first timed."""
        fields = ("heads", "provider", "part", "stride", "alike")
        first: dict[tuple[str, str], int] = {}
        for index, case in enumerate(self.cases):
            first.setdefault(case[1:3], index)
        selected = [
            case
            for case in self.cases
            if wanted.items() <= dict(zip(fields, case, strict=True)).items()
        ]
        return sorted(selected, key=lambda case: (first[case[1:3]], case[3], case[4] or 0))

    def lengths(self, cases: Iterable[Case]) -> list[int]:
        timed = (
            T for case in cases for T, rows in self.cases[case].items() if "failed" not in rows
        )
        return sorted(set(timed))

    def heads(self) -> list[tuple[int, int]]:
        return sorted({case[0] for case in self.cases}, key=lambda heads: (-heads[0], heads[1]))

    def pair(self, case: Case, T: int, field: str) -> list[float | None]:
        """A field of the forward and of the backward row."""
        passes = self.cases.get(case, {}).get(T, {})
        return [passes.get(name, {}).get(field) for name in PASSES]


def title(case: Case) -> str:
    _, provider, part, stride, alike = case
    name = provider if part == "whole" else f"{part}, {provider}"
    if stride > 1:
        name += f", `selection_stride={stride}`"
    return name if alike is None else f"{name}, {alike} alike"


def both(values: Iterable[float | None]) -> str:
    cells = [number(value) for value in values]
    return " / ".join(cell or "-" for cell in cells) if any(cells) else ""


def by_heads(
    rows: Sequence[Row],
    lines_of: Callable[[Rows, Case, list[int]], list[list[str]]],
    head: str = "forward / backward",
    **wanted: Any,
) -> str:
    """A table for each pair of heads: the lines of each case, those with nothing in them left
    out."""
    every, tables = Rows(rows), []
    for H, K in every.heads():
        cases = [c for c in every.select(heads=(H, K)) if is_wanted(c, wanted)]
        lengths = every.lengths(cases)
        lines = [line for c in cases for line in lines_of(every, c, lengths) if any(line[1:])]
        if lines:
            drawn = common.markdown([[head, *map(length, lengths)], *lines])
            tables.append(f"H={H}, K={K}:\n\n{drawn}")
    return "\n\n".join(tables) or NO_ROWS


def is_wanted(case: Case, wanted: dict[str, Any]) -> bool:
    """By `ours`, `whole` (or a part) and `alike` (or not)."""
    _, provider, part, _, alike = case
    answers = {
        "ours": provider.startswith(OF_OURS), "whole": part == "whole", "alike": alike is not None,
    }  # fmt: skip
    return wanted.items() <= answers.items()


# tables of one GPU


def speedup_lines(rows: Rows, case: Case, lengths: list[int]) -> list[list[str]]:
    """Over dense cuDNN, the targets and the best published beneath."""
    key = (*case[0], case[3])
    lines = [[title(case), *(both(rows.pair(case, T, "speedup_over_cudnn")) for T in lengths)]]
    if any(lines[0][1:]):
        for name, goals in AIMS.get(case[1], {}).items():
            lines.append([f"*{name}*", *(both(goals.get(key, {}).get(T, ())) for T in lengths)])
    return lines


def time_lines(rows: Rows, case: Case, lengths: list[int]) -> list[list[str]]:
    return [[title(case), *(both(rows.pair(case, T, "p50_ms")) for T in lengths)]]


def agreement_lines(rows: Rows, case: Case, lengths: list[int]) -> list[list[str]]:
    """Times, and where neighbours are alike over those of independent ones."""
    lines = time_lines(rows, case, lengths)
    cells = (both(rows.pair(case, T, "speedup_over_independent")) for T in lengths)
    return [*lines, [f"{title(case)}: speed-up", *cells]]


def memory_lines(rows: Rows, case: Case, lengths: list[int]) -> list[list[str]]:
    """MiB, and as a multiple of dense cuDNN's."""
    dense = (case[0], "dense-cudnn", "whole", 1, None)
    cells = []
    for T in lengths:
        peak, against = (rows.pair(c, T, "peak_mib")[0] for c in (case, dense))
        cell = "" if peak is None else f"{peak:.0f}"
        if peak is not None and against and case != dense:
            cell += f" ({peak / against:.2f})"
        cells.append(cell)
    return [[title(case), *cells]]


def machine_of_all(rows: Sequence[Row]) -> str:
    """Where and at what commits the rows were taken."""
    used = Rows(rows).used
    if not used:
        return NO_ROWS
    gpu, driver, torch, triton, commit = (
        common.seen((row for row in used if row.get(field)), field)
        for field in ("gpu", "driver", "torch", "triton", "commit")
    )
    days = sorted(row["date"][:10] for row in used)
    where = f"{gpu}, driver {driver}, torch {torch}, triton {triton}; "
    return f"{where}{days[0]} to {days[-1]}, commits {commit}."


# tables of a run of their own


def run_of(rows: Sequence[Row], is_wanted: Callable[[Row], bool]) -> list[Row]:
    """The rows of the newest run (GPU and commit) with a wanted row."""
    wanted = [row for row in rows if is_wanted(row)]
    if not wanted:
        return []
    gpu, commit = wanted[-1]["gpu"], wanted[-1]["commit"]
    return [row for row in rows if (row["gpu"], row["commit"]) == (gpu, commit)]


def machine(rows: Sequence[Row]) -> str:
    gpu, torch, triton, commit = (
        common.seen(rows, field) for field in ("gpu", "torch", "triton", "commit")
    )
    return f"{gpu}, torch {torch}, triton {triton}; {commit}."


def is_one_softmax(row: Row) -> bool:
    return bool(row["provider"].startswith("one-softmax"))


def is_short_windows(row: Row) -> bool:
    return bool(row["provider"] == SHORT_WINDOWS)


def heads(row: Row) -> str:
    text = f"{row['H']}/{row['K']}"
    return text if row["D"] == 128 else f"{text}, D={row['D']}"


def over_dense(rows: Sequence[Row], is_form: Callable[[Row], bool]) -> str:
    """Speed-up over dense cuDNN in the same run, forward / backward, and memory over that of dense:
    of each form and selection stride its newest run."""
    forms: dict[tuple[str, str, int], list[Row]] = {}
    for row in filter(is_form, rows):
        forms.setdefault((heads(row), row["provider"], row["selection_stride"]), []).append(row)
    if not forms:
        return NO_ROWS
    runs = {form: run_of(of_form, is_form) for form, of_form in forms.items()}
    used = [row for run in runs.values() for row in run]
    lengths = sorted({row["T"] for row in used})
    several = len({row["gpu"] for row in used}) > 1
    aims = {f"{H}/{K}": of_heads for (H, K, _), of_heads in ONE_SOFTMAX.items()}
    lines = [["H/K", "forward / backward; memory", *map(length, lengths)]]
    heads_of, names = (list(dict.fromkeys(form[i] for form in forms)) for i in (0, 1))
    for form in sorted(runs, key=lambda f: (heads_of.index(f[0]), names.index(f[1]), f[2])):
        at, name, stride = form
        cells = ratios(runs[form], [row for row in rows if heads(row) == at], lengths)
        label = name if stride == 1 else f"{name}, stride {stride}"
        card = runs[form][0]["gpu"].removeprefix("NVIDIA ").partition(" ")[0]
        lines.append([at, f"{label} ({card})" if several else label, *cells])
        if (name, stride) == ("one-softmax", 1) and at in aims:
            goals = (aims[at].get(T) for T in lengths)
            lines.append([at, "*target*", *(f"{g[0]:g} / {g[1]:g}" if g else "" for g in goals)])
    return f"{common.markdown(lines)}\n\n{machine(used)}"


def ratios(run: list[Row], neighbours: Sequence[Row], lengths: Sequence[int]) -> list[str]:
    """By length, how many times as fast as dense attention each pass of a form's run is, and memory
    over that of dense attention, whose rows are among `neighbours`."""
    gpu, commit = run[0]["gpu"], run[0]["commit"]
    dense = [r for r in neighbours if r["provider"] == "dense-cudnn" and r["commit"] == commit]
    cases = Rows([*dense, *run], gpu).cases
    (of_form,) = (by_length for case, by_length in cases.items() if case[1] == run[0]["provider"])
    of_dense = next((c for case, c in cases.items() if case[1] == "dense-cudnn"), {})
    cells = []
    for T in lengths:
        passes = of_form.get(T, {})
        cell = " / ".join(f"{passes[p]['speedup_over_cudnn']:.2f}" for p in PASSES if p in passes)
        if cell and "forward" in of_dense.get(T, {}):
            over = passes["forward"]["peak_mib"] / of_dense[T]["forward"]["peak_mib"]
            cell += f"; {over:.2f}"
        cells.append("failed" if "failed" in passes else cell)
    return cells


def peers(rows: Sequence[Row]) -> str:
    """Milliseconds of each part, and how many times ours of the same part."""
    known = {peer.name for some in PEERS.values() for peer in some}
    known |= {"infllm_v2", "flash_moba"}  # without an adapter, but with rows
    order, most_letters = {"dense-cudnn": 0, "ours": 1}, 120
    run = run_of(rows, lambda row: row["provider"] in known)
    of_peers = [row for row in run if row["provider"] in known]
    if not of_peers:
        return NO_ROWS
    columns = list(dict.fromkeys((heads(row), row["T"]) for row in of_peers))
    ours = [row for row in run if row["provider"] in order and (heads(row), row["T"]) in columns]
    # the latest row of each pass
    cells: dict[tuple[str, str], dict[tuple[str, int], dict[str, str]]] = {}
    why: dict[str, None] = {}
    for row in ours + of_peers:
        part = cells.setdefault((row["part"], row["provider"]), {})
        cell = part.setdefault((heads(row), row["T"]), {})
        reason = row.get("failed") or row.get("refused")
        if reason is None:
            times = f" ({row['times_ours']:.2f})" if "times_ours" in row else ""
            cell[row["pass"]] = f"{row['p50_ms']:.3g}{times}"
        else:
            cell["failed"] = "-"
            text = " ".join(reason.split())
            text = text if len(text) <= most_letters else text[:most_letters] + " ..."
            why[f"* {row['provider']}, {row['part']}, {heads(row)}: {text}"] = None
    parts = list(dict.fromkeys(part for part, _ in cells))
    keys = sorted(cells, key=lambda at: (parts.index(at[0]), order.get(at[1], 2)))
    lines = [["part", "ms (times ours)", *(f"{at}, {length(T)}" for at, T in columns)]]
    for key in keys:
        lines.append(
            [*key, *(" / ".join(cells[key].get(column, {}).values()) for column in columns)]
        )
    reasons = "\n".join(why)
    return f"{common.markdown(lines)}\n\n{reasons}\n\n{machine(run)}"


# the page


TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "machine": machine_of_all,
    "speedups": lambda rows: by_heads(rows, speedup_lines, ours=True, whole=True),
    "wholes": lambda rows: by_heads(rows, time_lines, whole=True),
    "parts": lambda rows: by_heads(rows, time_lines, whole=False, alike=False),
    "agreement": lambda rows: by_heads(rows, agreement_lines, whole=False, alike=True),
    "memory": lambda rows: by_heads(
        rows, memory_lines, "MiB (multiple of dense cuDNN)", whole=True
    ),
    "one_softmax": lambda rows: over_dense(rows, is_one_softmax),
    "short_windows": lambda rows: over_dense(rows, is_short_windows),
    "peers": peers,
}


def draw(rows: Sequence[Row]) -> None:
    """Page and plot."""
    common.draw_pages({PAGE: TABLES}, rows)
    drawn = Rows(rows)
    if drawn.lengths(drawn.select(part="whole")):
        plot(drawn)


def plot(rows: Rows) -> None:
    """p50 against T, log-log: forward and backward side by side, a line of them per (H, K)."""
    timed = [h for h in rows.heads() if rows.lengths(rows.select(heads=h, part="whole"))]
    figure, axes = common.subplots(len(timed), 2, (10, 4.2 * len(timed)))
    for line, of_heads in zip(axes, timed, strict=True):
        cases = rows.select(heads=of_heads, part="whole")
        for index, (axis, name) in enumerate(zip(line, PASSES, strict=True)):
            for case in cases:
                points = [(T, rows.pair(case, T, "p50_ms")[index]) for T in rows.lengths([case])]
                points = [(T, ms) for T, ms in points if ms is not None]
                if points:
                    style = "o-" if case[1].startswith(OF_OURS) else "s--"
                    label = title(case).replace("`", "")
                    axis.plot(*zip(*points, strict=True), style, ms=4, label=label)
            common.log_log(axis, rows.lengths(cases), "T", "ms")
            axis.set(title=f"{name}, H={of_heads[0]}, K={of_heads[1]}")
        line[0].legend(fontsize=7)
    common.save(figure, PLOT)
