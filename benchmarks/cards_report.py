"""Tables of docs/performance.md that have a run, and a GPU, of their own: one softmax, short
windows, and kernels of others from checkouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from . import common, goals
from .cases import NO_ROWS, PASSES, Rows, length
from .common import Row
from .peers import PEERS
from .providers import SHORT_WINDOWS

OF_PEERS = {peer.name for some in PEERS.values() for peer in some}
ORDER = {"dense-cudnn": 0, "ours": 1}
# of a message
MOST_LETTERS = 120


def run_of(rows: Sequence[Row], is_wanted: Callable[[Row], bool]) -> list[Row]:
    """The rows of the newest run (GPU and commit) with a wanted row."""
    wanted = [row for row in rows if is_wanted(row)]
    if not wanted:
        return []
    gpu, commit = wanted[-1]["gpu"], wanted[-1]["commit"]
    return [row for row in rows if (row["gpu"], row["commit"]) == (gpu, commit)]


def machine(rows: Sequence[Row]) -> str:
    fields = ("gpu", "torch", "triton", "commit")
    gpu, torch, triton, commit = (
        ", ".join(dict.fromkeys(str(row[field]) for row in rows)) for field in fields
    )
    return f"{gpu}, torch {torch}, triton {triton}; {commit}."


def is_one_softmax(row: Row) -> bool:
    return bool(row["provider"].startswith("one-softmax"))


def is_short_windows(row: Row) -> bool:
    return bool(row["provider"] == SHORT_WINDOWS)


def heads(row: Row) -> str:
    text = f"{row['H']}/{row['K']}"
    return text if row["D"] == 128 else f"{text}, D={row['D']}"


def one_softmax(rows: Sequence[Row]) -> str:
    return over_dense(rows, is_one_softmax)


def short_windows(rows: Sequence[Row]) -> str:
    return over_dense(rows, is_short_windows)


def over_dense(rows: Sequence[Row], is_form: Callable[[Row], bool]) -> str:
    """Speed-up over dense cuDNN in the same run, forward / backward, and memory over that of dense:
    of each form and selection stride its newest run, which has a card of its own."""
    forms: dict[tuple[str, str, int], list[Row]] = {}
    for row in filter(is_form, rows):
        forms.setdefault((heads(row), row["provider"], row["selection_stride"]), []).append(row)
    if not forms:
        return NO_ROWS
    runs = {form: run_of(own, is_form) for form, own in forms.items()}
    used = [row for run in runs.values() for row in run]
    lengths = sorted({row["T"] for row in used})
    several = len({row["gpu"] for row in used}) > 1
    aims = {
        f"{H}/{K}": {T: f"{fw:g} / {bw:g}" for T, (fw, bw) in of.items()}
        for (H, K, _), of in goals.ONE_SOFTMAX.items()
    }
    lines = [["H/K", "forward / backward; memory", *map(length, lengths)]]
    heads_of, names = (list(dict.fromkeys(form[i] for form in forms)) for i in (0, 1))
    order = sorted(runs, key=lambda f: (heads_of.index(f[0]), names.index(f[1]), f[2]))
    for form in order:
        of, name, stride = form
        cells = ratios(runs[form], [row for row in rows if heads(row) == of], lengths)
        told = name if stride == 1 else f"{name}, stride {stride}"
        card = runs[form][0]["gpu"].removeprefix("NVIDIA ").partition(" ")[0]
        lines.append([of, f"{told} ({card})" if several else told, *cells])
        if (name, stride) == ("one-softmax", 1) and of in aims:
            lines.append([of, "*target*", *(aims[of].get(T, "") for T in lengths)])
    return f"{common.markdown(lines)}\n\n{machine(used)}"


def ratios(run: list[Row], beside: Sequence[Row], lengths: Sequence[int]) -> list[str]:
    """By length, how many times as fast as dense attention each pass of a form's run is, and memory
    over that of dense attention, whose rows are `beside` it."""
    gpu, commit = run[0]["gpu"], run[0]["commit"]
    dense = [row for row in beside if row["provider"] == "dense-cudnn" and row["commit"] == commit]
    kept = Rows([*dense, *run], gpu).cases
    (own,) = (by_length for case, by_length in kept.items() if case[1] == run[0]["provider"])
    of_dense = next((c for case, c in kept.items() if case[1] == "dense-cudnn"), {})
    cells = []
    for T in lengths:
        passes = own.get(T, {})
        cell = " / ".join(f"{passes[p]['speedup_over_cudnn']:.2f}" for p in PASSES if p in passes)
        if cell and "forward" in of_dense.get(T, {}):
            over = passes["forward"]["peak_mib"] / of_dense[T]["forward"]["peak_mib"]
            cell += f"; {over:.2f}"
        cells.append("failed" if "failed" in passes else cell)
    return cells


def peers(rows: Sequence[Row]) -> str:
    """Milliseconds of each part, and how many times ours of the same part."""
    run = run_of(rows, lambda row: row["provider"] in OF_PEERS)
    of_peers = [row for row in run if row["provider"] in OF_PEERS]
    if not of_peers:
        return NO_ROWS
    columns = list(dict.fromkeys((heads(row), row["T"]) for row in of_peers))
    beside = [row for row in run if row["provider"] in ORDER and (heads(row), row["T"]) in columns]
    shown = beside + of_peers
    # the latest row of each pass
    cells: dict[tuple[str, str], dict[tuple[str, int], dict[str, str]]] = {}
    why: dict[str, None] = {}
    for row in shown:
        part = cells.setdefault((row["part"], row["provider"]), {})
        found = part.setdefault((heads(row), row["T"]), {})
        reason = row.get("failed") or row.get("refused")
        if reason is None:
            times = f" ({row['times_ours']:.2f})" if "times_ours" in row else ""
            found[row["pass"]] = f"{row['p50_ms']:.3g}{times}"
        else:
            found["failed"] = "-"
            told = " ".join(reason.split())
            told = told if len(told) <= MOST_LETTERS else told[:MOST_LETTERS] + " ..."
            why[f"* {row['provider']}, {row['part']}, {heads(row)}: {told}"] = None
    order = list(cells)
    of_part = {part: index for index, (part, _) in reversed(list(enumerate(order)))}
    order.sort(key=lambda at: (of_part[at[0]], ORDER.get(at[1], 2)))
    lines = [["part", "ms (times ours)", *(f"{of}, {length(T)}" for of, T in columns)]]
    lines += [
        [
            part,
            name,
            *(" / ".join(cells[part, name].get(column, {}).values()) for column in columns),
        ]
        for part, name in order
    ]
    told = "\n".join(why)
    return f"{common.markdown(lines)}\n\n{told}\n\n{machine(run)}"
