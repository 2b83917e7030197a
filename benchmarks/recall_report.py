"""The table and the plot of docs/training.md, drawn from the rows of `recall.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from . import common
from .cases import NO_ROWS, length
from .common import Row
from .learning_report import Variants, chosen, mean, spread

PAGE = common.ROOT / "docs" / "training.md"
PLOT = common.ROOT / "docs" / "images" / "recall.png"
# drawn in any case, and this many of the others
DRAWN, OTHERS = ("dense", "window", "paper", "published"), 4


def loss(row: Row) -> float:
    return 1 - row["accuracy"][str(row["T"])]


def by_length(rows: Sequence[Row]) -> dict[tuple[int, int], Variants]:
    """For each training length and number of steps, the runs of every variant, by accuracy. The
    task and the model of a length are those of its last row."""
    found = {}
    rows = [row for row in rows if "failed" not in row]
    last = {row["T"]: row for row in rows}
    same = ("task", "shape", "batch", "lengths")
    for T, steps in sorted({(row["T"], row["steps"]) for row in rows}):
        ours = [row for row in rows if (row["T"], row["steps"]) == (T, steps)]
        ours = [row for row in ours if all(row[name] == last[T][name] for name in same)]
        names = dict.fromkeys(row["variant"] for row in ours)
        runs = {n: chosen([row for row in ours if row["variant"] == n], loss) for n in names}
        if runs:
            found[T, steps] = dict(sorted(runs.items(), key=lambda item: mean(map(loss, item[1]))))
    return found


def told(runs: list[Row], T: int) -> str:
    return spread([run["accuracy"][str(T)] for run in runs], 2)


def table_of(variants: Variants) -> str:
    lengths = next(iter(variants.values()))[0]["lengths"]
    lines = [["accuracy", "M parameters", "learning rate", "seeds", *map(length, lengths)]]
    for name, runs in variants.items():
        cells = [name, f"{runs[0]['parameters'] / 1e6:.2f}", f"{runs[0]['lr']:g}", str(len(runs))]
        lines.append([*cells, *(told(runs, T) for T in lengths)])
    return common.markdown(lines)


def table(rows: Sequence[Row]) -> str:
    """For each training length and number of steps, the variants by their accuracy."""
    found = by_length(rows)
    if not found:
        return NO_ROWS
    parts = []
    for (T, _), variants in found.items():
        used = [row for runs in variants.values() for row in runs]
        row, task = used[0], used[0]["task"]
        trained = ", ".join(map(length, row["train_lengths"]))
        text = f"Trained at {trained} tokens with {task['pairs']} pairs, {row['steps']} steps of "
        text += (
            f"{row['batch'] * T} tokens; dim {row['shape']['dim']}, {row['shape']['depth']} layers:"
        )
        gpus, torch, triton, commits = (
            common.seen(used, field) for field in ("gpu", "torch", "triton", "commit")
        )
        where = f"{gpus}, torch {torch}, triton {triton}, commits {commits}."
        parts += [text, table_of(variants), where]
    return "\n\n".join(parts)


def picture(rows: Sequence[Row]) -> str:
    if not by_length(rows):
        return NO_ROWS
    told = "Accuracy against the length of a sequence, and against the distance of a question"
    return f"![{told}]({PLOT.parent.name}/{PLOT.name})"


def render(page: str, rows: Sequence[Row]) -> str:
    page = common.redraw(page, "recall", table(rows))
    return common.redraw(page, "recall_plot", picture(rows))


def draw(rows: Sequence[Row], page: Path | None = None, image: Path | None = None) -> None:
    path = page or PAGE
    path.write_text(render(path.read_text(encoding="utf-8"), rows), encoding="utf-8")
    if found := by_length(rows):
        longest = max(found)
        plot(found[longest], longest[0], image or PLOT)


def plot(variants: Variants, T: int, path: Path) -> None:
    """Of one training length: accuracy by length, and by distance at the training length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    others = [name for name in variants if name not in DRAWN][:OTHERS]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.6), constrained_layout=True)
    for name, runs in variants.items():
        if name not in DRAWN and name not in others:
            continue
        style = "o-" if name in DRAWN else "o--"
        lengths = runs[0]["lengths"]
        means = [mean(run["accuracy"][str(t)] for run in runs) for t in lengths]
        left.plot(lengths, means, style, label=name)
        distances = runs[0]["by_distance"][str(T)]
        means = [mean(run["by_distance"][str(T)][d] for run in runs) for d in distances]
        right.plot([int(d.partition("-")[0]) * 2**0.5 for d in distances], means, style)
    left.set(title=f"trained at {length(T)}", xlabel="length of a sequence", ylabel="accuracy")
    right.set(title=f"tested at {length(T)}", xlabel="tokens from a pair to its question")
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_ylim(-0.03, 1.03)
        axis.grid(alpha=0.3)
    left.set_xticks(lengths, list(map(length, lengths)))
    left.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
