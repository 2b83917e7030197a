"""Pictures of a collection, with matplotlib: what is read, the gates, the attention mass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..checks import check_int, describe
from .collector import Collection, Reading

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIND_COLORS = {"initial": "#803ebe", "ranked": "#de600e", "local": "#1074b8"}
BRANCH_COLORS = {"compressed": "#5b8c3e", "selected": "#de600e", "window": "#1074b8"}
DENSE_COLOR = "#8a8a84"


def new_figure(width: float, height: float) -> tuple[Figure, Any]:
    """A figure that no window shows, and its axes."""
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise ImportError(
            "pictures need matplotlib: pip install 'native-sparse-attention[plot]'"
        ) from None
    figure = Canvas(figsize=(width, height), dpi=120, layout="constrained")
    return figure, figure.subplots()


def get_readings(collection: Any, index: int) -> list[Reading]:
    if not isinstance(collection, Collection):
        raise ValueError(f"collection must be what collect gives, got {describe(collection)}")
    return collection.forward(index)


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
        raise ValueError(f"reading must be a Reading of collect, got {describe(reading)}")
    config = reading.config
    if reading.blocks is None or reading.block_mass is None:
        raise ValueError(f"reading must be of a selected branch, got {config.branches}")
    head = check_int("head", head, 0, config.heads)
    sequence = check_int("sequence", sequence, 0, len(reading.positions))
    figure, axes = new_figure(7, 6)
    from matplotlib.collections import LineCollection

    s, length = config.selection_block_size, reading.length
    chosen = reading.blocks[sequence, :, head * reading.blocks.shape[2] // config.heads].tolist()
    mass = reading.block_mass[sequence, :, head]
    strength = (0.25 + 0.75 * mass / mass.amax(dim=-1, keepdim=True).clamp(min=1e-9)).tolist()
    positions = reading.positions[sequence].tolist()
    colors = {kind: KIND_COLORS[kind] for kind in reading.kinds} | {"dense": DENSE_COLOR}
    # lines and their alphas by kind
    lines: dict[str, list[Any]] = {kind: [] for kind in colors}
    alphas: dict[str, list[float]] = {kind: [] for kind in colors}
    for i, t in enumerate(positions):
        last = t + 1 if config.causal else length
        blocks = zip(reading.kinds, chosen[i], strength[i], strict=True)
        slots = [(kind, c * s, c * s + s, alpha) for kind, c, alpha in blocks if c >= 0]
        if reading.dense[sequence, i]:
            slots.append(("dense", 0, last, 0.6))
        for kind, first, end, alpha in slots:
            lines[kind].append([(first, t), (min(end, last), t)])
            alphas[kind].append(alpha)
    width = max(0.8, min(8.0, 300 / max(1, len(positions))))
    for kind, segments in lines.items():
        if kind == "dense" and not segments:
            continue
        options: dict[str, Any] = dict(colors=colors[kind], linewidths=width, capstyle="butt")
        axes.add_collection(LineCollection(segments, alpha=alphas[kind] or None, **options))
        label = "all keys" if kind == "dense" else f"{kind} blocks"
        axes.plot([], [], color=colors[kind], linewidth=6, label=label)
    axes.set(
        xlim=(0, length), ylim=(length, 0), xlabel="key position (tokens)",
        ylabel="query position (tokens)",
        title=f"{reading.layer or 'layer'}, query head {head}: blocks of {s} tokens",
    )  # fmt: skip
    if axes.lines:
        axes.legend(frameon=False, loc="upper right")
    return figure


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
    readings = get_readings(collection, index)
    if all(reading.gates is None for reading in readings):
        raise ValueError("collection must have a layer with gates: one branch alone has none")
    figure, axes = new_figure(max(4.5, 1.5 + 0.6 * len(readings)), 4)
    for branch, color in BRANCH_COLORS.items():
        points = []
        for x, reading in enumerate(readings):
            if reading.gates is not None and branch in reading.config.branches:
                gates = reading.gates[..., reading.config.branches.index(branch)]
                heads = gates.nanmean(dim=(0, 1))
                points.append((x, *map(float, (heads.mean(), heads.min(), heads.max()))))
        if points:
            xs, means, lows, highs = zip(*points, strict=True)
            axes.fill_between(xs, lows, highs, color=color, alpha=0.15, linewidth=0)
            axes.vlines(xs, lows, highs, color=color, alpha=0.4)
            axes.plot(xs, means, "o-", color=color, label=branch, markersize=5)
    axes.set(
        ylim=(0, 1), xlim=(-0.5, len(readings) - 0.5), xlabel="layer", title="Gates by layer",
        ylabel="gate (mean over queries; band: range of heads)",
    )  # fmt: skip
    names = [reading.layer or "layer" for reading in readings]
    axes.set_xticks(range(len(readings)), names, rotation=30)
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
    readings = [one for one in get_readings(collection, index) if one.mass is not None]
    if not readings:
        raise ValueError("collection must have a layer with a selected branch, got none")
    # a layer may have fewer heads
    masses = [one.mass.nanmean(dim=(0, 1)) for one in readings if one.mass is not None]
    table = torch.nn.utils.rnn.pad_sequence(masses, True, float("nan"))
    heads = table.shape[1]
    figure, axes = new_figure(2.8 + 0.5 * heads, 1.8 + 0.45 * len(readings))
    image = axes.imshow(100 * table.numpy(), cmap="viridis", vmin=0, vmax=100, aspect="auto")
    if table.numel() <= 256:
        for y, x in (~table.isnan()).nonzero().tolist():
            share = float(table[y, x])
            color = "white" if share < 0.6 else "black"
            axes.text(x, y, f"{100 * share:.0f}", ha="center", va="center", color=color)
    axes.set(xlabel="query head", ylabel="layer", title="Attention mass on chosen blocks")
    axes.set_xticks(range(0, heads, max(1, heads // 32)))
    axes.set_yticks(range(len(readings)), [one.layer or "layer" for one in readings])
    figure.colorbar(image, ax=axes, label="% of full attention")
    return figure
