"""Tables of the layer's wall, host and GPU time in docs/performance.md, of `host.py`'s rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from . import common
from .cases import NO_ROWS, length
from .common import Row

PAGE = common.ROOT / "docs" / "performance.md"
PASSES = {"forward": "forward", "both": "both passes", "decode": "decode step"}
FIELDS = {"wall_ms": "wall, ms", "host_ms": "host, ms", "busy_ms": "GPU, ms", "kernels": "kernels"}
FORMS = {
    "first": "first call",
    "again": "the same again",
    "length": "another length",
    "batch": "another batch",
    "documents": "packed documents",
    "other documents": "others of them",
}

Cases = dict[tuple[str, int, str | None], dict[str, Row]]


def latest(rows: Sequence[Row], passes: Collection[str]) -> Cases:
    """Of the rows of these passes the last ones of the last row's GPU, of both layers, by case."""
    rows = [row for row in rows if row.get("pass") in passes and "failed" not in row]
    found: Cases = {}
    for row in rows:
        if row["gpu"] == rows[-1]["gpu"]:
            case = (row["pass"], row["T"], row.get("form"))
            found.setdefault(case, {})[row["provider"]] = row
    return {case: pair for case, pair in found.items() if "sparse" in pair}


def where(cases: Cases) -> str:
    rows = [row for pair in cases.values() for row in pair.values()]
    commits = ", ".join(sorted({str(row["commit"])[:7] for row in rows}))
    return f"{rows[0]['gpu']}, torch {rows[0]['torch']}, triton {rows[0]['triton']}; {commits}."


def cell(pair: dict[str, Row], field: str) -> str:
    """Ours, and how many times that of the dense twin it is."""
    ours, dense = (pair.get(name, {}).get(field) for name in ("sparse", "dense"))
    if ours is None:
        return ""
    told = f"{ours:.3g}" if isinstance(ours, float) else str(ours)
    return f"{told} ({ours / dense:.2f})" if dense else told


def wall_table(rows: Sequence[Row]) -> str:
    cases = latest(rows, PASSES)
    if not cases:
        return NO_ROWS
    head = ["sparse (times dense)", *(f"{PASSES[name]}, {length(T)}" for name, T, _ in cases)]
    lines = [[told, *(cell(p, f) for p in cases.values())] for f, told in FIELDS.items()]
    return f"{common.markdown([head, *lines])}\n\n{where(cases)}"


def first_call_table(rows: Sequence[Row]) -> str:
    cases = latest(rows, ("first call",))
    if not cases:
        return NO_ROWS
    lines = [["call", "sparse, s", "dense, s", "kernels compiled"]]
    for (_, T, form), pair in cases.items():
        seconds = (f"{pair[n]['seconds']:.3g}" if n in pair else "" for n in ("sparse", "dense"))
        compiled = pair["sparse"]["compiled"]
        name = f"{FORMS[str(form)]}, {length(T)}"
        lines.append([name, *seconds, "" if compiled is None else str(compiled)])
    return f"{common.markdown(lines)}\n\n{where(cases)}"


def render(page: str, rows: Sequence[Row]) -> str:
    page = common.redraw(page, "wall", wall_table(rows))
    return common.redraw(page, "first_call", first_call_table(rows))


def draw(rows: Sequence[Row], page: Path | None = None) -> None:
    path = page or PAGE
    path.write_text(render(path.read_text(encoding="utf-8"), rows), encoding="utf-8")
