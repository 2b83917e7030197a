"""Table and plot of a trained model under rules that choose blocks, of `pretrained.py`'s rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from . import common
from .cases import length
from .common import Row

PAGE = common.ROOT / "docs" / "training.md"
PLOT = common.ROOT / "docs" / "images" / "pretrained.png"
NO_ROWS = "not measured yet: run `python -m benchmarks.pretrained`"
# what tells rules apart
FIELDS = ("rule", "s", "initial", "local", "n", "l", "d", "per_head")
# of the targets at the longest length
MOST_ABOVE = 2.0
# rules without windows
TOLD = {name: name for name in ("dense", "window", "oracle")}
TOLD |= {"heads": "mean of each head's greatest", "bounds": "bounds by channel"}
# in the plot, from the left, and the block size of all
PLOTTED = ("logits", "probs", "max", "oracle")
PLOTTED_SIZE = 32

Key = tuple[object, ...]
# by rule, then by text and length
Cases = dict[Key, dict[tuple[str, int], Row]]


def latest(rows: Sequence[Row]) -> Cases:
    """The last row of each rule on each text, of the last row's dtype."""
    found: Cases = {}
    for row in rows:
        if row["dtype"] == rows[-1]["dtype"]:
            rule = tuple(row[field] for field in FIELDS)
            found.setdefault(rule, {})[row["text"], row["T"]] = row
    return found


def named(row: Row) -> str:
    """A rule, without its blocks."""
    name, l, d = row["rule"], row["l"], row["d"]
    if name in TOLD:
        return TOLD[name]
    name += ", tokens" if l == d == 1 else f", means of {l}" + (f" every {d}" if d != l else "")
    return name + (", per head" if row["per_head"] else "")


def read(row: Row) -> str:
    """The blocks that a query reads."""
    if row["keys"] is None:
        return "all"
    return f"{row['initial']} + {row['local']} + {row['n']} of {row['s']}"


def loss_cell(row: Row | None) -> str:
    if row is None:
        return ""
    if "failed" in row:
        return "failed"
    if row["rule"] == "dense":
        return f"{row['loss']:.4f}"
    error = row["above_stderr"]
    percent = f"{row['above_percent']:+.2f} %"
    if error is None or not row["loss"]:
        return percent
    base = row["loss"] - row["above"]
    return f"{percent} ± {100 * error / base:.2f}"


def needle_cell(row: Row | None) -> str:
    if row is None or "found" not in row:
        return ""
    return " / ".join(map(str, row["found"])) + f" of {row['needles']}"


def caught_cell(row: Row | None) -> str:
    return "" if row is None or "caught" not in row else f"{row['caught']:.2f}"


def shown(cases: Cases, text: str, longest: int) -> list[dict[tuple[str, int], Row]]:
    """All rules that split the keys as the oracle of their block size does, and of each other split
    the one of least loss at the longest length."""
    rows = {key: found[text, longest] for key, found in cases.items() if (text, longest) in found}
    splits = {row["s"]: row["local"] for row in rows.values() if row["rule"] == "oracle"}
    best: dict[tuple[int, int], Key] = {}
    hidden = set()
    for key, row in rows.items():
        split = row["s"], row["local"]
        if not row["n"] or splits.get(row["s"], row["local"]) == row["local"]:
            continue
        hidden.add(key)
        if "loss" in row and (split not in best or row["loss"] < rows[best[split]]["loss"]):
            best[split] = key
    hidden -= set(best.values())
    return [found for key, found in cases.items() if key not in hidden]


def reaches(row: Row, dense: Row | None) -> bool:
    """Whether a rule reaches the targets on a text: its loss, and at every depth the needles that
    dense attention finds."""
    if "found" not in row or dense is None or "found" not in dense:
        return False
    pairs = zip(row["found"], dense["found"], strict=True)
    return bool(row["above_percent"] <= MOST_ABOVE and all(ours >= of for ours, of in pairs))


def verdict(cases: Cases, texts: Sequence[str]) -> str:
    """The rules that reach the targets on all texts at the longest length, fewest keys first."""
    longest = max(T for found in cases.values() for _, T in found)
    dense = next((c for c in cases.values() if all(r["rule"] == "dense" for r in c.values())), {})
    good: list[tuple[int, float, str]] = []
    for found in cases.values():
        at = [(text, longest) for text in texts if (text, longest) in found]
        rows = [found[where] for where in at]
        if len(at) < len(texts) or rows[0]["keys"] is None:
            continue
        if all(reaches(row, dense.get(where)) for row, where in zip(rows, at, strict=True)):
            most = max(row["above_percent"] for row in rows)
            name = f"{named(rows[0])} ({read(rows[0])}; {most:+.2f} %)"
            good.append((rows[0]["keys"], most, name))
    names = "; ".join(name for *_, name in sorted(good)) or "none"
    told = f"at most {MOST_ABOVE:g} % above dense, at every depth the needles that dense finds"
    return f"{length(longest)}, {told}: {names}."


def text_table(cases: Cases, text: str) -> str:
    """Loss at every length; needles and far mass at the longest."""
    lengths = sorted({T for found in cases.values() for name, T in found if name == text})
    longest = lengths[-1]
    head = ["rule", "initial + local + ranked blocks", *(f"loss, {length(T)}" for T in lengths)]
    depths = "needles at 10 / 50 / 80 %"
    lines = [[*head, f"{depths}, {length(longest)}", f"far mass caught, {length(longest)}"]]
    for found in shown(cases, text, longest):
        here = [found.get((text, T)) for T in lengths]
        row = next((r for r in here if r is not None), None)
        if row is not None:
            cells = [named(row), read(row), *map(loss_cell, here)]
            lines.append([*cells, needle_cell(here[-1]), caught_cell(here[-1])])
    return f"{text}:\n\n{common.markdown(lines)}"


def table(rows: Sequence[Row]) -> str:
    if not rows:
        return NO_ROWS
    cases = latest(rows)
    used = [row for found in cases.values() for row in found.values()]
    texts = sorted({row["text"] for row in used})
    tables = [*(text_table(cases, text) for text in texts), verdict(cases, texts)]
    commits = ", ".join(sorted({str(row["commit"])[:7] for row in used}))
    last = rows[-1]
    versions = f"torch {last['torch']}, triton {last['triton']}"
    where = f"{common.seen(used, 'gpu')}, {last['dtype']}, {versions}; "
    counts = f"{last.get('windows', '?')} texts of each length. "
    failed = dict.fromkeys(f"* {named(r)}: {r['failed']}" for r in used if "failed" in r)
    return "\n\n".join([*tables, "\n".join([f"{counts}{where}{commits}.", *failed])])


def picture() -> str:
    told = "Share of the far mass that each rule catches, by layer and head"
    return f'<img src="{PLOT.parent.name}/{PLOT.name}" width="760" alt="{told}">'


def render(page: str, rows: Sequence[Row]) -> str:
    drawn = f"{table(rows)}\n\n{picture()}" if plotted(rows) else table(rows)
    return common.redraw(page, "pretrained", drawn)


# the plot


def plotted(rows: Sequence[Row]) -> list[Row]:
    """Of the longest length and one text, the rules of `PLOTTED` that have their heads."""
    if not rows:
        return []
    cases = [row for found in latest(rows).values() for row in found.values()]
    cases = [r for r in cases if "caught_by_head" in r and not r["per_head"]]
    if not cases:
        return []
    longest = max(row["T"] for row in cases)
    sizes = {row["s"] for row in cases}
    s = PLOTTED_SIZE if PLOTTED_SIZE in sizes else max(sizes)
    text = min(row["text"] for row in cases)
    found: dict[str, Row] = {}
    for row in cases:
        if (row["T"], row["s"], row["text"]) == (longest, s, text):
            found.setdefault(row["rule"], row)  # of its forms the first, as the grid orders them
    return [found[name] for name in PLOTTED if name in found]


def plot(rows: Sequence[Row], path: Path) -> None:
    """Layer against head: the far mass, and the share of it that each rule catches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = plotted(rows)
    first = drawn[0]
    panels = [("far mass", first["far_by_head"])]
    panels += [(f"{named(row)}\n{row['caught']:.2f}", row["caught_by_head"]) for row in drawn]
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(2.1 * len(panels), 5.6), sharey=True, constrained_layout=True
    )
    for axis, (title, values) in zip(axes, panels, strict=True):
        image = axis.imshow(values, vmin=0, vmax=1, aspect="auto", cmap="viridis")
        axis.set_title(title, fontsize=9)
        axis.set(xlabel="head", xticks=range(0, len(values[0]), 1 + len(values[0]) // 8))
    axes[0].set(ylabel="layer")
    figure.suptitle(f"{first['text']}, T = {first['T']}, {read(first)}", fontsize=10)
    figure.colorbar(image, ax=list(axes), shrink=0.6)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def draw(rows: Sequence[Row], page: Path | None = None, path: Path | None = None) -> None:
    page = page or PAGE
    page.write_text(render(page.read_text(encoding="utf-8"), rows), encoding="utf-8")
    if plotted(rows):
        plot(rows, path or PLOT)
