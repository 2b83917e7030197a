"""Pictures of masks as characters or with matplotlib: the pairs that a mask allows, and the tiles
that its block mask skips."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .tiles import MaskMod, tile_counts

# most cells along the longer side of a picture in characters
CELLS = 48

# a cell with no, some and all pairs allowed
MARKS = (".", "+", "#")
EMPTY, PARTIAL, FULL = range(3)


@dataclass(frozen=True)
class Drawing:
    """A mask of q_len x kv_len in cells: the pairs that each cell allows and the pairs that it
    holds, [rows columns] each."""

    q_len: int
    kv_len: int
    size: int
    allowed: Tensor
    area: Tensor

    def states(self) -> Tensor:
        return (self.allowed > 0).int() + (self.allowed == self.area).int()

    def text(self) -> str:
        return "\n".join("".join(MARKS[c] for c in row) for row in self.states().tolist())


def sides(length: int, size: int) -> Tensor:
    """Number of tokens that each cell covers."""
    first = torch.arange(0, length, size)
    return (length - first).clamp(max=size)


def draw(
    mask_mod: MaskMod, q_len: int, kv_len: int, size: int, device: torch.device, whole: bool = False
) -> Drawing:
    """Draw a mask in cells of size x size. With `whole` a cell past the end is never full, as in a
    block mask."""
    allowed = tile_counts(mask_mod, q_len, kv_len, device, size).cpu()
    area = sides(q_len, size)[:, None] * sides(kv_len, size)
    return Drawing(
        q_len, kv_len, size, allowed, torch.full_like(area, size * size) if whole else area
    )


def fine(mask_mod: MaskMod, q_len: int, kv_len: int, device: torch.device) -> Drawing:
    """Draw one cell per pair, or larger cells to keep each side within CELLS."""
    size = math.ceil(max(q_len, kv_len) / CELLS)
    return draw(mask_mod, q_len, kv_len, size, device)


def describe(name: str, pairs: Drawing, tiles: Drawing) -> str:
    """Both pictures as text, with their counts."""
    states = tiles.states()
    of = states.numel()
    counts = [int((states == state).sum()) for state in (EMPTY, PARTIAL, FULL)]
    total = int(tiles.allowed.sum())
    cell = "one pair" if pairs.size == 1 else f"{pairs.size} x {pairs.size} pairs"
    none, some, every = MARKS
    legend = f"{none} none  {some} some  {every} all"
    return "\n".join(
        (
            f"{name}: {tiles.q_len} queries, {tiles.kv_len} keys, "
            f"{100 * total / (tiles.q_len * tiles.kv_len):.1f} % of the pairs allowed",
            "",
            f"a cell is {cell} ({legend})",
            pairs.text(),
            "",
            f"a cell is a tile of {tiles.size} x {tiles.size} ({legend})",
            tiles.text(),
            "",
            f"{of} tiles: {counts[EMPTY]} empty, {counts[PARTIAL]} partial, {counts[FULL]} full; "
            f"{100 * counts[EMPTY] / of:.1f} % skipped",
        )
    )


def save(path: Path, name: str, mask_mod: MaskMod, tiles: Drawing, device: torch.device) -> None:
    """Save both pictures side by side as a PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "drawing a picture needs matplotlib: pip install 'native-sparse-attention[train]'"
        ) from error
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image  # a dependency of matplotlib

    # one dot per pair, up to 512 dots
    longest = max(tiles.q_len, tiles.kv_len)
    pairs = draw(mask_mod, tiles.q_len, tiles.kv_len, math.ceil(longest / 512), device)
    colours = matplotlib.colors.ListedColormap(["#f4f4f4", "#9ecae1", "#08519c"])
    figure = Figure(figsize=(7, 3.7), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    extent = (0, tiles.kv_len, tiles.q_len, 0)
    left.imshow(
        (pairs.allowed / pairs.area).numpy(),
        cmap="Blues",
        vmin=0,
        vmax=1,
        extent=extent,
        aspect="auto",
    )
    rows, columns = tiles.allowed.shape
    over = (0, columns * tiles.size, rows * tiles.size, 0)
    right.imshow(tiles.states().numpy(), cmap=colours, vmin=0, vmax=2, extent=over, aspect="auto")
    right.set_xticks(range(0, columns * tiles.size + 1, tiles.size), minor=True)
    right.set_yticks(range(0, rows * tiles.size + 1, tiles.size), minor=True)
    right.grid(which="minor", color="white", linewidth=0.8)
    right.tick_params(which="minor", length=0)
    left.set(title=name, xlabel="key", ylabel="query")
    skipped = 100 * float((tiles.states() == EMPTY).float().mean())
    right.set(title=f"tiles of {tiles.size}: {skipped:.0f} % skipped", xlabel="key")
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=70)
    # 32 colours take a fifth of the bytes
    Image.open(drawn).convert("RGB").quantize(32).save(path, optimize=True)
