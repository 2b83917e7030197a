"""Draws the pictures of semantics.md: `python docs/draw_masks.py`, or `make docs`.

No mask is written down here. Attention over values that are the identity matrix returns its own
probabilities, so each picture is what the library's public functions attend to: a probability
above zero is a coloured cell.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from native_sparse_attention import (
    blocks,
    compressed_attention,
    select_blocks,
    selected_attention,
    sliding_window_attention,
)

IMAGES = Path(__file__).parent / "images"

T, D = 48, 16
l, d, s, n, w, m = 8, 4, 8, 2, 6, 1

# Okabe and Ito's colours, told apart by colour-blind eyes
MEMORY, CMP, CMP_LIGHT = "#CC79A7", "#56B4E9", "#C6E4F7"
OWN, RANKED, WINDOW, WINDOW_LIGHT = "#D55E00", "#F0B64D", "#009E73", "#9BD8C6"
NOT_TAKEN, FUTURE, INK, LINE = "#DADADA", "#F6F6F6", "#333333", "#8C8C8C"

plt.rcParams.update(
    {
        "font.size": 9,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
    }
)


# what the library attends to


def attended(probabilities: Tensor) -> Tensor:
    """[1, i, 1, j] attention over identity values -> [i, j] who sees whom."""
    return probabilities[0, :, 0] > 0


def masks() -> dict[str, Tensor]:
    """For each query: the windows it sees, memory first, and the tokens each branch attends to."""
    generator = torch.Generator().manual_seed(2)

    def randn(length: int) -> Tensor:
        return torch.randn(1, length, 1, D, generator=generator, dtype=torch.float64)

    def identity(length: int) -> Tensor:
        return torch.eye(length, dtype=torch.float64)[None, :, None]

    # neighbouring queries resemble each other, as they do in a trained model
    q = randn(T).cumsum(dim=1) + 2 * randn(T)
    k, ck = randn(T), randn(blocks.num_windows(T, d))
    slots = identity(m + ck.shape[1])
    compressed = compressed_attention(
        q,
        ck,
        slots[:, m:],
        mem_k=randn(m)[0].transpose(0, 1),
        mem_v=slots[0, :m].transpose(0, 1),
        compress_block_sliding_stride=d,
    )
    ranked = select_blocks(
        q,
        ck,
        compress_block_size=l,
        compress_block_sliding_stride=d,
        selection_block_size=s,
        num_selected_blocks=n,
    )
    every = torch.arange(blocks.num_blocks(T, s)).expand(1, T, 1, -1)

    def selected(block_indices: Tensor) -> Tensor:
        values = identity(T)
        return attended(selected_attention(q, k, values, block_indices, selection_block_size=s))

    return {
        "compressed": attended(compressed),
        "own": selected(ranked[..., :0]),
        "selected": selected(ranked),
        "past": selected(every),
        "window": attended(sliding_window_attention(q, k, identity(T), sliding_window_size=w)),
    }


# how it is drawn


def paint(ax: Axes, layers: list[tuple[Tensor, str]], x: float = 0.0, cell: float = 1.0) -> None:
    """Colour the cells of each [T, columns] mask, later masks over earlier ones."""
    shape = layers[0][0].shape
    image = torch.ones(*shape, 3)
    for mask, color in layers:
        image[mask] = torch.tensor(to_rgb(color))
    ax.imshow(
        image.numpy(),
        extent=(x, x + shape[1] * cell, T, 0),
        interpolation="nearest",
        aspect="equal",
    )


def grid(ax: Axes, fine: int, coarse: int, xlabel: str) -> None:
    """White hairlines around tokens, columns of `fine` tokens; firmer ones every `coarse`."""
    hair = {"linewidth": 0.5, "color": "white"}
    ax.vlines(range(0, T + 1, fine), 0, T, **hair)
    ax.hlines(range(T + 1), 0, T, **hair)
    firm = {"linewidth": 0.7, "color": LINE}
    ax.vlines(range(0, T + 1, coarse), 0, T, **firm)
    ax.hlines(range(0, T + 1, s), 0, T, **firm)
    ticks = range(0, T, s)
    ax.set(xlim=(0, T), ylim=(T, 0), xlabel=xlabel, ylabel="query $i$")
    ax.set_xticks([t + 0.5 for t in ticks], map(str, ticks))
    ax.set_yticks([t + 0.5 for t in ticks], map(str, ticks))
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def outline(ax: Axes, mask: Tensor, color: str) -> None:
    """A firm line around the cells of a mask."""
    padded = torch.nn.functional.pad(mask.int(), (1, 1, 1, 1))
    across, down = padded.diff(dim=1)[1:-1].nonzero(), padded.diff(dim=0)[:, 1:-1].nonzero()
    line = {"colors": color, "linewidth": 2.2, "capstyle": "projecting", "clip_on": False}
    ax.vlines(across[:, 1], across[:, 0], across[:, 0] + 1, **line)
    ax.hlines(down[:, 0], down[:, 1], down[:, 1] + 1, **line)


def legend(ax: Axes, entries: list[tuple[str, str]], **options) -> None:
    handles = [Patch(facecolor=color, edgecolor=LINE, label=text) for color, text in entries]
    ax.legend(handles=handles, loc="upper right", framealpha=1.0, edgecolor=LINE, **options)


def save(figure: Figure, name: str) -> None:
    IMAGES.mkdir(exist_ok=True)
    # no version or date inside, so that an unchanged picture is an unchanged file
    figure.savefig(
        IMAGES / name, dpi=130, bbox_inches="tight", pad_inches=0.1, metadata={"Software": None}
    )
    plt.close(figure)
    print(IMAGES / name)


def draw_windows(ax: Axes) -> None:
    """Each window as a bar, its stride segment in full colour; staggered, as they overlap."""
    rows = -(-l // d)
    for j in range(blocks.num_windows(T, d)):
        start, end, y = (j + 1) * d - l, (j + 1) * d, j % rows + 0.1
        box = {"height": 0.8, "linewidth": 0.8, "edgecolor": INK}
        for x, width, style in (
            (start, end - start, {"facecolor": CMP_LIGHT}),
            (start, max(0, -start), {"facecolor": "white", "hatch": "////"}),
            (end - d, d, {"facecolor": CMP}),
        ):
            ax.add_patch(Rectangle((x, y), width, **style, **box))
        ax.text(end - d / 2, y + 0.4, f"{j}", ha="center", va="center")
    ax.text((d - l) / 2, 1.5, "zeros", ha="center", va="center")
    ax.set_ylim(rows, 0)
    ax.set_axis_off()


def draw_compressed(sees: dict[str, Tensor]) -> None:
    figure, (above, ax) = plt.subplots(
        2, 1, figsize=(7.2, 8.1), sharex=True, height_ratios=(1, 9), layout="constrained"
    )
    figure.suptitle(f"Compressed branch: windows of $l={l}$ tokens, one ending every $d={d}$")
    draw_windows(above)
    seen = sees["compressed"]
    paint(ax, [(seen[:, m:], CMP), (~seen[:, m:], FUTURE)], cell=d)
    paint(ax, [(seen[:, :m], MEMORY)], x=-2 * m - 1, cell=2)
    grid(ax, d, d, "token; window $j$ is drawn over its stride segment $[jd,\\,(j+1)d)$")
    ax.set_xlim(-d - 0.2, T + 0.2)
    ax.set_anchor("N")
    ax.plot((0, T), (0, T), color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    ax.text(31.4, 29.6, "own position", rotation=-45, ha="center", va="center")
    legend(
        ax,
        [
            (MEMORY, f"memory ($m={m}$), always seen"),
            (CMP, "window seen: it ended before $i$"),
            (FUTURE, "not seen"),
        ],
    )
    save(figure, "compressed.png")


def draw_selected(sees: dict[str, Tensor]) -> None:
    figure, ax = plt.subplots(figsize=(7.2, 7.4), layout="constrained")
    figure.suptitle(f"Selected branch: blocks of $s={s}$ tokens, the best $n={n}$ and its own")
    paint(
        ax,
        [
            (sees["past"], NOT_TAKEN),
            (sees["selected"], RANKED),
            (sees["own"], OWN),
            (~sees["past"], FUTURE),
        ],
    )
    grid(ax, 1, s, "key $j$")
    legend(
        ax,
        [
            (OWN, "own block, forced, causal inside"),
            (RANKED, f"the {n} blocks ranked highest"),
            (NOT_TAKEN, "candidate, not taken"),
            (FUTURE, "future"),
        ],
    )
    save(figure, "selected.png")


def draw_window(sees: dict[str, Tensor]) -> None:
    figure, ax = plt.subplots(figsize=(7.2, 7.4), layout="constrained")
    figure.suptitle(f"Sliding window: $w={w}$ keys back and the query's own, ${w + 1}$ in all")
    paint(ax, [(sees["past"], NOT_TAKEN), (sees["window"], WINDOW), (~sees["past"], FUTURE)])
    grid(ax, 1, s, "key $j$")
    legend(
        ax,
        [(WINDOW, "attended: $i-w \\leq j \\leq i$"), (NOT_TAKEN, "too old"), (FUTURE, "future")],
    )
    save(figure, "window.png")


def draw_together(sees: dict[str, Tensor]) -> None:
    figure, ax = plt.subplots(figsize=(7.2, 7.6), layout="constrained")
    figure.suptitle(
        "The three branches together\n"
        f"$T={T}$, $l={l}$, $d={d}$, $s={s}$, $n={n}$, $w={w}$, own block forced"
    )
    paint(
        ax,
        [
            (torch.ones(T, T, dtype=torch.bool), FUTURE),
            (sees["compressed"][:, m:].repeat_interleave(d, dim=1), CMP),
            (sees["window"], WINDOW_LIGHT),
            (sees["selected"], RANKED),
            (sees["own"], OWN),
        ],
    )
    grid(ax, 1, s, "token $j$")
    outline(ax, sees["window"], WINDOW)
    legend(
        ax,
        [
            (OWN, "selected branch: own block"),
            (RANKED, "selected branch: ranked block"),
            (WINDOW_LIGHT, "window branch (all inside the line)"),
            (CMP, "compressed branch only"),
            (FUTURE, "future"),
        ],
    )
    save(figure, "together.png")


def main() -> None:
    sees = masks()
    draw_compressed(sees)
    draw_selected(sees)
    draw_window(sees)
    draw_together(sees)


if __name__ == "__main__":
    main()
