"""Tables of docs/huggingface.md, of `generation.py`'s rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import common
from .cases import length
from .common import Row
from .goals import LEAST_DECODE, LEAST_PREFILL

PAGE = common.ROOT / "docs" / "huggingface.md"
NO_ROWS = "no rows yet: run `python -m benchmarks.generation`"
BASELINE = "sdpa"
MEASURES = {
    "prefill": "prefill, thousand tokens/s",
    "graph": "prefill in one CUDA graph, thousand tokens/s",
    "dynamic": "decoding, tokens/s",
    "unseen": "decoding at lengths for the first time, tokens/s",
    "static": "decoding over a static cache, tokens/s",
}

PREFILL = ("prefill", "graph")
# of which the table has the peaks
PEAKS = ("prefill", "dynamic", "static")
# after a ratio that is not to the row of SDPA in its table
EARLIER = "\\*"

# batch and context; of each the latest row of each form
Case = tuple[int, int]
Cases = dict[Case, dict[str, Row]]
# by name, layers and GPU
Models = dict[tuple[str, int, str], Cases]


def latest(rows: Sequence[Row]) -> Models:
    """The latest rows of each model, depth and GPU. Each has SDPA's row of its own run."""

    def run(row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("model", "layers", "gpu", "commit", "B", "T"))

    base = {run(row): row for row in rows if row["form"] == BASELINE}
    found: Models = {}
    for row in rows:
        cases = found.setdefault((row["model"], row["layers"], row["gpu"]), {})
        forms = cases.setdefault((row["B"], row["T"]), {})
        forms[row["form"]] = {**row, BASELINE: base.get(run(row), {})}
    return found


def speedup(rows: dict[str, Row], form: str, what: str) -> float | None:
    """Times as fast as SDPA in the same run, and in one CUDA graph as SDPA with or without one,
    whichever is faster; None where one of them has no time."""
    row = rows.get(form, {})
    ways = PREFILL if what == "graph" else (what,)
    own = row.get(f"{what}_tokens_per_s")
    base = max(row.get(BASELINE, {}).get(f"{way}_tokens_per_s", 0) for way in ways)
    return own / base if own and base else None


def goal(what: str, B: int, T: int) -> float | None:
    """The least speed-up that is a target."""
    if what in PREFILL:
        first, least = LEAST_PREFILL
        return least if first <= T else None
    return LEAST_DECODE.get((B, T))


def cell(rows: dict[str, Row], form: str, what: str) -> str:
    row = rows.get(form, {})
    if f"{what}_failed" in row:
        return "failed"
    speed = row.get(f"{what}_tokens_per_s")
    if speed is None:
        return ""
    shown = f"{speed / 1e3:.1f}" if what in PREFILL else f"{speed:.0f}"
    ratio = speedup(rows, form, what)
    if ratio is None or form == BASELINE:
        return shown
    is_shown = row[BASELINE].get("commit") == rows[BASELINE].get("commit")
    return f"{shown} ({ratio:.2f})" if is_shown else f"{shown} ({ratio:.2f}){EARLIER}"


def peaks(rows: dict[str, Row], form: str) -> str:
    row = rows.get(form, {})
    found = [row.get(f"{what}_peak_mib") for what in PEAKS]
    return " / ".join("-" if mib is None else f"{mib / 1024:.1f}" for mib in found)


def model_table(name: str, cases: Cases) -> str:
    order = sorted(cases)
    rows = [row for found in cases.values() for row in found.values()]
    forms = list(dict.fromkeys(row["form"] for row in rows))
    forms.sort(key=lambda form: form != BASELINE)
    first = rows[0]
    depth = f"{first['layers']} layers"
    if first["layers"] != first["all_layers"]:
        depth += f" of {first['all_layers']}"
    heads = f"{first['H']} query and {first['K']} KV heads, {first['dtype']}"
    parts = [f"{name} ({depth}, {heads}), {first['gpu']}:"]
    for what, told in MEASURES.items():
        shown = [c for c in order if any(cell(cases[c], form, what) for form in forms)]
        if shown:
            head = [f"{told} (times SDPA)", *(f"B={B}, {length(T)}" for B, T in shown)]
            lines = [[form, *(cell(cases[c], form, what) for c in shown)] for form in forms]
            parts.append(common.markdown([head, *(line for line in lines if any(line[1:]))]))
    if any(row.get("prefill_peak_mib") for row in rows):
        told = "peak GiB: prefill / decoding / static"
        head = [told, *(f"B={B}, {length(T)}" for B, T in order)]
        parts.append(
            common.markdown([head, *([f, *(peaks(cases[c], f) for c in order)] for f in forms)])
        )
    if any(EARLIER in part for part in parts):
        parts.append(f"{EARLIER} times SDPA of its own run; the row of sdpa is of a later one.")
    return "\n\n".join(parts)


def verdict(models: Models) -> str:
    """Of each target whether it is hit: by the fastest form in decoding, by every form in
    prefill."""
    lines = []
    for (name, layers, gpu), cases in models.items():
        for (B, T), rows in sorted(cases.items()):
            for what in MEASURES:
                least = goal(what, B, T)
                sparse = [form for form, row in rows.items() if row.get("settings")]
                ratios = {form: speedup(rows, form, what) for form in sparse}
                known = {form: ratio for form, ratio in ratios.items() if ratio is not None}
                if least is None or not known:
                    continue
                choose = min if what in PREFILL else max
                form = choose(known, key=lambda form: known[form])
                hit = "hit" if known[form] >= least else "missed"
                case = f"{name}, {layers} layers, B={B}, {length(T)}, {gpu}, {MEASURES[what]}"
                lines.append(f"* {case}: {hit}, {form} {known[form]:.2f} of {least:g}")
    return "\n".join(lines)


def table(rows: Sequence[Row]) -> str:
    if not rows:
        return NO_ROWS
    models = latest(rows)
    used = [row for cases in models.values() for found in cases.values() for row in found.values()]
    parts = [model_table(name, cases) for (name, *_), cases in models.items()]
    found = verdict(models)
    failed = dict.fromkeys(
        f"* {row['model']}, {row['form']}, B={row['B']}, {length(row['T'])}, {what}: {reason}"
        for row in used
        for what in MEASURES
        if (reason := row.get(f"{what}_failed"))
    )
    last = rows[-1]
    commits = ", ".join(sorted({str(row["commit"])[:7] for row in used}))
    gpus = ", ".join(dict.fromkeys(gpu for *_, gpu in models))
    where = (
        f"{gpus}, torch {last['torch']}, triton {last['triton']}, transformers "
        f"{last['transformers']}; {commits}."
    )
    parts += [f"Targets:\n\n{found}"] if found else []
    parts += ["\n".join(failed)] if failed else []
    return "\n\n".join([*parts, where])


def show(row: Row) -> str:
    """A row in one line."""
    cells = [f"{row['model']} {row['form']:12} B={row['B']:<3} T={row['T']:<6}"]
    for what in MEASURES:
        if f"{what}_failed" in row:
            cells.append(f"{what} failed: {row[f'{what}_failed']}")
        elif f"{what}_ms" in row:
            first = f" (first {row[f'{what}_first_s']} s)" if f"{what}_first_s" in row else ""
            cells.append(f"{what} {row[f'{what}_ms']:.2f} ms{first}")
    return "  ".join(cells)


def render(page: str, rows: Sequence[Row]) -> str:
    return common.redraw(page, "generation", table(rows))


def draw(rows: Sequence[Row], page: Path | None = None) -> None:
    page = page or PAGE
    page.write_text(render(page.read_text(encoding="utf-8"), rows), encoding="utf-8")
