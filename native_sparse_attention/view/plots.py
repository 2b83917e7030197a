"""Pictures of a collection, with matplotlib: what is read, the gates, the attention mass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..checks.scalars import check_int, shown
from .collector import Collection, Reading

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = {"initial": "#803ebe", "ranked": "#de600e", "local": "#1074b8"}
BRANCH_COLORS = {"compressed": "#5b8c3e", "selected": "#de600e", "window": "#1074b8"}


def new_figure(width: float, height: float) -> Figure:
    """A figure of its own, which no window shows."""
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise ImportError(
            "pictures need matplotlib: pip install 'native-sparse-attention[plot]'"
        ) from None
    return Canvas(figsize=(width, height), dpi=120, layout="constrained")


def check_collection(collection: Any) -> None:
    if not isinstance(collection, Collection):
        raise ValueError(f"collection must be what collect gives, got {shown(collection)}")


def short(names: list[str]) -> list[str]:
    return [name or "layer" for name in names]


def plot_selection(reading: Reading, head: int = 0, *, sequence: int = 0) -> Figure:
    """Which keys each recorded query reads by its blocks, with initial, ranked and local ones in
    colours; the stronger, the larger the block's share of full attention. A row for each query.

    Args:
        reading: of `collect`: `seen["layers.0.0"][0]`.
        head, sequence: query head, and row of the batch.

    Returns:
        A matplotlib Figure: `figure.savefig("selection.png")`.

    Raises:
        ValueError: a layer without selected branch, or a head or sequence that is not there.
        ImportError: matplotlib is not installed.
    """
    if not isinstance(reading, Reading):
        raise ValueError(f"reading must be a Reading of collect, got {shown(reading)}")
    if reading.blocks is None or reading.block_mass is None:
        raise ValueError(f"reading must be of a selected branch, got {reading.config.branches}")
    h = reading.config.heads
    head = check_int("head", head, 0, h)
    sequence = check_int("sequence", sequence, 0, len(reading.positions))
    figure = new_figure(7, 6)
    from matplotlib.collections import LineCollection
    from matplotlib.lines import Line2D

    axes = figure.subplots()
    s, length = reading.config.selection_block_size, reading.length
    chosen = reading.blocks[sequence, :, head * reading.blocks.shape[2] // h]
    mass, positions = reading.block_mass[sequence, :, head], reading.positions[sequence]
    strength = 0.25 + 0.75 * mass / mass.amax(dim=-1, keepdim=True).clamp(min=1e-9)
    width = max(0.8, min(8.0, 300 / max(1, len(positions))))
    for kind in dict.fromkeys(reading.kinds):
        lines, alphas = [], []
        for slot in (x for x, name in enumerate(reading.kinds) if name == kind):
            for m in (chosen[:, slot] >= 0).nonzero().flatten().tolist():
                t, first = int(positions[m]), int(chosen[m, slot]) * s
                last = min(first + s, t + 1 if reading.config.causal else length)
                lines.append([(first, t), (last, t)])
                alphas.append(float(strength[m, slot]))
        drawn = LineCollection(
            lines, colors=COLORS[kind], linewidths=width, alpha=alphas or None, capstyle="butt"
        )
        axes.add_collection(drawn)
    dense = reading.dense[sequence].nonzero().flatten().tolist()
    rows = [int(positions[m]) for m in dense]
    lines = [[(0, t), (t + 1 if reading.config.causal else length, t)] for t in rows]
    if lines:
        axes.add_collection(LineCollection(lines, colors="#8a8a84", linewidths=width, alpha=0.6))
    handles: list[Any] = [
        Line2D([], [], color=COLORS[kind], linewidth=6, label=f"{kind} blocks")
        for kind in dict.fromkeys(reading.kinds)
    ]
    if lines:
        handles.append(Line2D([], [], color="#8a8a84", linewidth=6, label="all keys"))
    axes.set(
        xlim=(0, length), ylim=(length, 0), xlabel="key position (tokens)",
        ylabel="query position (tokens)",
        title=f"{reading.layer or 'layer'}, query head {head}: blocks of {s} tokens",
    )  # fmt: skip
    if handles:
        axes.legend(handles=handles, frameon=False, loc="upper right")
    return figure


def mean(t: Tensor, dims: tuple[int, ...]) -> Tensor:
    return t.nanmean(dim=dims)


def plot_gates(collection: Collection, index: int = -1) -> Figure:
    """The gates of each branch by layer: the mean over queries, heads and sequences, and the range
    of the heads.

    Args:
        collection: what `collect` gives. index: the call of each layer; the last by default.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: no layer has gates, or a layer has no such call.
        ImportError: matplotlib is not installed.
    """
    check_collection(collection)
    found = collection.forward(index)
    if all(reading.gates is None for reading in found):
        raise ValueError("collection must have a layer with gates: one branch alone has none")
    figure = new_figure(max(4.5, 1.5 + 0.6 * len(found)), 4)
    axes = figure.subplots()
    for branch, color in BRANCH_COLORS.items():
        points = []
        for x, reading in enumerate(found):
            if reading.gates is not None and branch in reading.config.branches:
                of_heads = mean(reading.gates, (0, 1))[:, reading.config.branches.index(branch)]
                low, high = float(of_heads.min()), float(of_heads.max())
                points.append((x, float(of_heads.mean()), low, high))
        if points:
            xs, means, lows, highs = zip(*points, strict=True)
            axes.fill_between(xs, lows, highs, color=color, alpha=0.15, linewidth=0)
            axes.vlines(xs, lows, highs, color=color, alpha=0.4)
            axes.plot(xs, means, "o-", color=color, label=branch, markersize=5)
    axes.set(
        ylim=(0, 1), xlabel="layer", title="Gates by layer",
        ylabel="gate (mean over queries; band: range of heads)",
    )  # fmt: skip
    axes.set_xticks(range(len(found)), short([reading.layer for reading in found]), rotation=30)
    axes.set_xlim(-0.5, len(found) - 0.5)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def plot_mass(collection: Collection, index: int = -1) -> Figure:
    """The share of full attention that the chosen blocks hold, by layer and query head: a mean over
    queries and sequences.

    Args:
        collection: what `collect` gives. index: the call of each layer; the last by default.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: no layer has a selected branch, or a layer has no such call.
        ImportError: matplotlib is not installed.
    """
    check_collection(collection)
    found = [reading for reading in collection.forward(index) if reading.mass is not None]
    if not found:
        raise ValueError("collection must have a layer with a selected branch, got none")
    heads = max(reading.config.heads for reading in found)
    table = torch.full((len(found), heads), float("nan"))
    for row, reading in zip(table, found, strict=True):
        if reading.mass is not None:
            row[: reading.config.heads] = mean(reading.mass, (0, 1))
    figure = new_figure(2.8 + 0.5 * heads, 1.8 + 0.45 * len(found))
    axes = figure.subplots()
    image = axes.imshow(100 * table.numpy(), cmap="viridis", vmin=0, vmax=100, aspect="auto")
    if table.numel() <= 256:
        for y, line in enumerate(table.tolist()):
            for x, value in enumerate(line):
                if value == value:  # a layer may have fewer heads
                    color = "white" if value < 0.6 else "black"
                    axes.text(x, y, f"{100 * value:.0f}", ha="center", va="center", color=color)
    axes.set(xlabel="query head", ylabel="layer", title="Attention mass on chosen blocks")
    step = max(1, heads // 32)
    axes.set_xticks(range(0, heads, step))
    axes.set_yticks(range(len(found)), short([reading.layer for reading in found]))
    figure.colorbar(image, ax=axes, label="% of full attention")
    return figure
