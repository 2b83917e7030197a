"""Pictures of a collection, as matplotlib Figures: what is read, the gates, the attention mass. All
raise ValueError where there is nothing to draw, and ImportError without matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..checks import check_int, check_type
from .collector import Collection, Reading

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIND_COLORS = {"initial": "#803ebe", "ranked": "#de600e", "local": "#1074b8", "dense": "#8a8a84"}
BRANCH_COLORS = {"compressed": "#5b8c3e", "selected": "#de600e", "window": "#1074b8"}


def new_figure(width: float, height: float) -> tuple[Figure, Any]:
    """A figure that no window shows, and its axes."""
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install -e '.[plot]'") from error
    figure = Canvas(figsize=(width, height), dpi=120, layout="constrained")
    return figure, figure.subplots()


def plot_selection(reading: Reading, head: int = 0, *, sequence: int = 0) -> Figure:
    """Which keys each recorded query reads by its blocks, with initial, ranked and local ones in
    colours; the stronger, the larger the block's share of full attention. A row for each query.

    Args:
        reading: of `collect`, with a selected branch: `seen["layers.0.0"][0]`.
        head, sequence: query head, and row of the batch.
    """
    check_type("reading", reading, Reading, "a Reading of collect")
    config, s, length = reading.config, reading.config.selection_block_size, reading.length
    if reading.blocks is None or reading.block_mass is None:
        raise ValueError(f"reading must be of a selected branch, got {config.branches}")
    head = check_int("head", head, 0, config.heads)
    sequence = check_int("sequence", sequence, 0, len(reading.positions))
    figure, axes = new_figure(7, 6)
    from matplotlib.collections import LineCollection

    chosen = reading.blocks[sequence, :, head * reading.blocks.shape[2] // config.heads]
    mass = reading.block_mass[sequence, :, head]
    strength = 0.25 + 0.75 * mass / mass.amax(dim=-1, keepdim=True).clamp(min=1e-9)
    positions = reading.positions[sequence]
    width = max(0.8, min(8.0, 300 / max(1, len(positions))))
    for kind in [*dict.fromkeys(reading.kinds), "dense"]:
        if kind == "dense":
            (query,) = reading.dense[sequence].nonzero(as_tuple=True)
            if not len(query):
                continue
            first, end, alpha = 0 * query, 0 * query + length, None
        else:
            slots = [slot for slot, name in enumerate(reading.kinds) if name == kind]
            query, slot = (chosen[:, slots] >= 0).nonzero(as_tuple=True)
            first = s * chosen[:, slots][query, slot]
            end, alpha = first + s, strength[:, slots][query, slot].tolist() or None
        t, color = positions[query], KIND_COLORS[kind]
        end = end.minimum(t + 1) if config.causal else end.clamp(max=length)
        lines = torch.stack((first, t, end, t), dim=-1).unflatten(-1, (2, 2)).tolist()
        axes.add_collection(
            LineCollection(lines, alpha=alpha or 0.6, linewidths=width, colors=color)
        )
        label = "all keys" if kind == "dense" else f"{kind} blocks"
        axes.plot([], [], color=color, linewidth=6, label=label)
    axes.set(
        xlim=(0, length), ylim=(length, 0), xlabel="key position (tokens)",
        ylabel="query position (tokens)",
        title=f"{reading.layer or 'layer'}, query head {head}: blocks of {s} tokens",
    )  # fmt: skip
    if axes.lines:
        axes.legend(frameon=False, loc="upper right")
    return figure


def plot_gates(collection: Collection) -> Figure:
    """The gates of each branch by layer, in its last call: the mean over queries, heads and
    sequences, and the range of the heads."""
    check_type("collection", collection, Collection, "what collect gives")
    readings = collection.forward()
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
    axes.legend(frameon=False)
    return figure


def plot_mass(collection: Collection) -> Figure:
    """The share of full attention that the chosen blocks hold, by layer and query head, in the
    last call of each layer: a mean over queries and sequences."""
    check_type("collection", collection, Collection, "what collect gives")
    readings = [one for one in collection.forward() if one.mass is not None]
    if not readings:
        raise ValueError("collection must have a layer with a selected branch, got none")
    # a layer may have fewer heads
    masses = [one.mass.nanmean(dim=(0, 1)) for one in readings if one.mass is not None]
    table = torch.nn.utils.rnn.pad_sequence(masses, True, float("nan"))
    heads = table.shape[1]
    figure, axes = new_figure(2.8 + 0.5 * heads, 1.8 + 0.45 * len(readings))
    image = axes.imshow(100 * table.numpy(), cmap="viridis", vmin=0, vmax=100, aspect="auto")
    axes.set(xlabel="query head", ylabel="layer", title="Attention mass on chosen blocks")
    axes.set_xticks(range(0, heads, max(1, heads // 32)))
    axes.set_yticks(range(len(readings)), [one.layer or "layer" for one in readings])
    figure.colorbar(image, ax=axes, label="% of full attention")
    return figure
