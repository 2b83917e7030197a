"""Table of a converted model before and after training, of `distillation.py`'s rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from . import common
from .cases import length
from .common import Row
from .pretrained_report import needle_cell

PAGE = common.ROOT / "docs" / "training.md"
NO_ROWS = "no rows yet: run `python -m benchmarks.distillation`"
TOLD = {
    "dense": "dense",
    "dense, tuned": "dense, tuned",
    "index": "converted, untrained",
    "index, ranking": "ranking trained",
    "index, all": "ranking trained, then all",
    "heads": "a ranking for each head, untrained",
    "heads, tuned": "a ranking for each head, all trained",
    "max, tuned": "all trained, no learned ranking",
}

# percent above the dense model of the same steps
MOST_ABOVE = 0.5

# form, block size, seed (None for what is not trained)
Key = tuple[str, int, int | None]
Cases = dict[Key, dict[str, Row]]


def latest(rows: Sequence[Row]) -> Cases:
    """The last row of each form and text, of the last row's length: forms in the order of `TOLD`,
    by block size."""
    found: Cases = {}
    for row in rows:
        if row["T"] == rows[-1]["T"]:
            seed = row.get("seed") if "seconds" in row else None
            found.setdefault((row["form"], row.get("s", 0), seed), {})[row.get("text", "")] = row
    forms = list(TOLD)
    order = sorted(found, key=lambda key: (key[1], forms.index(key[0]), key[2] or 0))
    return {key: found[key] for key in order}


def above(row: Row, field: str) -> str:
    """Percent beyond another model, with the standard error over texts."""
    if f"{field}_percent" not in row:
        return ""
    percent, error = f"{row[f'{field}_percent']:+.2f} %", row[f"{field}_stderr"]
    base = row["loss"] - row[field]
    return percent if error is None or not base else f"{percent} ± {100 * error / base:.2f}"


def blocks(row: Row) -> str:
    return "all" if "s" not in row else f"{row['initial']} + {row['local']} + {row['n']}"


def line(name: str, row: Row, s: int) -> list[str]:
    if "failed" in row:
        return [name, str(s), blocks(row), "failed", "", "", "", ""]
    over = "" if row["form"] == "dense" else above(row, "above")
    over_tuned = "" if row["form"].startswith("dense") else above(row, "above_tuned")
    caught = f"{row['caught']:.2f}" if "caught" in row else ""
    loss = f"{row['loss']:.4f}"
    return [name, str(s or ""), blocks(row), loss, over, over_tuned, needle_cell(row), caught]


def text_table(cases: Cases, text: str) -> str:
    seeds = {seed for *_, seed in cases if seed is not None}
    head = ["", "block size", "initial + local + ranked", "loss", "above dense"]
    lines = [[*head, "above dense, tuned", "needles at 10 / 50 / 80 %", "far mass caught"]]
    for (form, s, seed), found in cases.items():
        row = found.get(text) or found.get("")
        if row is not None:
            name = TOLD[form] + (f", seed {seed}" if seed is not None and len(seeds) > 1 else "")
            lines.append(line(name, row, s))
    return f"{text}:\n\n{common.markdown(lines)}"


def verdict(cases: Cases, texts: Sequence[str]) -> str:
    """Which sparse forms reach the target on all texts."""
    good = []
    for (form, s, seed), found in cases.items():
        rows = [found.get(text, {}) for text in texts]
        if not s or not all("above_tuned_percent" in row for row in rows):
            continue
        most = max(row["above_tuned_percent"] for row in rows)
        if most <= MOST_ABOVE:
            told = "" if seed is None else f", seed {seed}"
            good.append(f"{TOLD[form]} (blocks of {s}{told}; {most:+.2f} %)")
    return f"At most {MOST_ABOVE:g} % above dense, tuned: {'; '.join(good) or 'none'}."


def table(rows: Sequence[Row]) -> str:
    if not rows:
        return NO_ROWS
    cases = latest(rows)
    used = [row for found in cases.values() for row in found.values()]
    texts = sorted({row["text"] for row in used if "text" in row})
    last = used[-1]
    trained = (
        f"{length(last['T'])} tokens, {last.get('windows', '?')} texts of each kind. Trained on "
        f"{last['train_rows']} rows of {length(last['train_T'])}: {last['steps']} steps of "
        f"{last['batch']} with learning rate {last['lr']:g}, of the ranking alone "
        f"{last['ranking_steps']} with {last['ranking_lr']:g}."
    )
    slowest = max((row["seconds"] for row in used if "seconds" in row), default=None)
    took = "" if slowest is None else f" The longest training took {slowest:.0f} s."
    commits = ", ".join(sorted({str(row["commit"])[:7] for row in used}))
    versions = f"torch {last['torch']}, triton {last['triton']}"
    where = f"{common.seen(used, 'gpu')}, {versions}; {commits}."
    failed = dict.fromkeys(f"* {r['form']}: {r['failed']}" for r in used if "failed" in r)
    parts = [*(text_table(cases, text) for text in texts), verdict(cases, texts)]
    return "\n\n".join([*parts, "\n".join([f"{trained}{took} {where}", *failed])])


def show(row: Row) -> str:
    """A row in one line."""
    cells = [f"{row['form']:14}", f"s={row['s']}" if "s" in row else "", row.get("text", "")]
    if "failed" in row:
        return "  ".join([*cells, row["failed"]])
    cells += [f"loss {row['loss']:.4f}", above(row, "above"), needle_cell(row)]
    cells += [f"caught {row['caught']}"] if "caught" in row else []
    if "seconds" in row:
        cells.append(f"{row['first_losses']:.4f} to {row['last_losses']:.4f}, {row['seconds']} s")
    return "  ".join(cell for cell in cells if cell)


def render(page: str, rows: Sequence[Row]) -> str:
    return common.redraw(page, "distillation", table(rows))


def draw(rows: Sequence[Row], page: Path | None = None) -> None:
    page = page or PAGE
    page.write_text(render(page.read_text(encoding="utf-8"), rows), encoding="utf-8")
