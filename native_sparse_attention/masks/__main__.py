"""`python -m native_sparse_attention.masks NAME`: draw the pairs that a mask allows and the tiles
that its block mask skips.

    python -m native_sparse_attention.masks natten --length 256 --kernel-height 5
    python -m native_sparse_attention.masks sliding_window --window 64 --out window.png
"""

from __future__ import annotations

import argparse
import io
import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from . import catalog
from .tiles import TILE, MaskMod, tile_counts

CPU = torch.device("cpu")
# most cells along the longer side of a picture in characters, and in pixels
CELLS, PIXELS = 48, 512

# a cell with no, some and all pairs allowed
MARKS = ".+#"
LEGEND = ". none  + some  # all"


class Drawing(NamedTuple):
    """A mask in cells of size x size: the pairs that each cell allows, and the pairs it has."""

    size: int
    allowed: Tensor
    area: Tensor

    def states(self) -> Tensor:
        """0, 1 and 2 for cells with no, some and all pairs allowed."""
        return (self.allowed > 0).int() + (self.allowed == self.area).int()

    def text(self) -> str:
        return "\n".join("".join(MARKS[c] for c in row) for row in self.states().tolist())


def draw_pairs(mask_mod: MaskMod, q_len: int, kv_len: int, most: int = CELLS) -> Drawing:
    """Draw one cell per pair, or larger cells to keep each side within `most` cells."""
    size = math.ceil(max(q_len, kv_len) / most)
    # tokens of each cell
    rows, columns = ((n - torch.arange(0, n, size)).clamp(max=size) for n in (q_len, kv_len))
    allowed = tile_counts(mask_mod, q_len, kv_len, CPU, size)
    return Drawing(size, allowed, rows[:, None] * columns)


def describe(name: str, q_len: int, kv_len: int, pairs: Drawing, tiles: Drawing) -> str:
    """Both pictures as text, with their counts."""
    empty, partial, full = (int((tiles.states() == state).sum()) for state in range(3))
    count = tiles.allowed.numel()
    allowed = 100 * int(tiles.allowed.sum()) / (q_len * kv_len)
    cell = "one pair" if pairs.size == 1 else f"{pairs.size} x {pairs.size} pairs"
    return (
        f"{name}: {q_len} queries, {kv_len} keys, {allowed:.1f} % of the pairs allowed\n\n"
        f"a cell is {cell} ({LEGEND})\n{pairs.text()}\n\n"
        f"a cell is a tile of {tiles.size} x {tiles.size} ({LEGEND})\n{tiles.text()}\n\n"
        f"{count} tiles: {empty} empty, {partial} partial, {full} full; "
        f"{100 * empty / count:.1f} % skipped\n"
    )


def save(path: Path, name: str, q_len: int, kv_len: int, pairs: Drawing, tiles: Drawing) -> None:
    """Save both pictures side by side as a PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from PIL import Image  # a dependency of matplotlib
    except ImportError as error:
        raise ImportError(
            "drawing a picture needs matplotlib: pip install 'native-sparse-attention[train]'"
        ) from error

    figure = Figure(figsize=(7, 3.7), layout="constrained")
    left, right = figure.subplots(1, 2)
    share = (pairs.allowed / pairs.area).numpy()
    options = dict(vmin=0, aspect="auto", extent=(0, kv_len, q_len, 0))
    left.imshow(share, cmap="Blues", vmax=1, **options)
    left.set(title=name, xlabel="key", ylabel="query")
    height, width = (count * tiles.size for count in tiles.allowed.shape)
    options["extent"] = (0, width, height, 0)
    colours = ListedColormap(["#f4f4f4", "#9ecae1", "#08519c"])
    right.imshow(tiles.states().numpy(), cmap=colours, vmax=2, **options)
    right.set_xticks(range(0, width + 1, tiles.size), minor=True)
    right.set_yticks(range(0, height + 1, tiles.size), minor=True)
    right.grid(which="minor", color="white", linewidth=0.8)
    right.tick_params(which="minor", length=0)
    skipped = 100 * float((tiles.allowed == 0).float().mean())
    right.set(title=f"tiles of {tiles.size}: {skipped:.0f} % skipped", xlabel="key")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=70)
    # 32 colours take a fifth of the bytes
    Image.open(picture).convert("RGB").quantize(32).save(path, optimize=True)


def main(argv: list[str] | None = None) -> None:
    """Each mask is a command with its own settings."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--length", type=int, default=512, help="queries (512)")
    common.add_argument("--block-size", type=int, default=TILE, help=f"side of a tile ({TILE})")
    common.add_argument("--out", type=Path, metavar="FILE.png", help="draw both pictures there")
    parser = argparse.ArgumentParser(
        prog="python -m native_sparse_attention.masks",
        description="Draws a mask: every pair, and the tiles that a block mask of it skips.",
    )
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, entry in catalog.CATALOG.items():
        command = commands.add_parser(name, parents=[common], help=entry.meaning)
        for key, option in entry.options.items():
            flag, default = f"--{key.replace('_', '-')}", argparse.SUPPRESS
            command.add_argument(flag, type=int, default=default, help=option.meaning)
    args = parser.parse_args(argv)
    names = catalog.CATALOG[args.name].options.keys() & vars(args).keys()
    options = {name: getattr(args, name) for name in names}
    try:
        if args.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {args.block_size}")
        if args.out is not None and (args.out.suffix != ".png" or not args.out.parent.is_dir()):
            raise ValueError(f"--out must be a .png file in a folder there is, got {args.out}")
        mask_mod, q_len, kv_len = catalog.make(args.name, args.length, CPU, **options)
        pairs = draw_pairs(mask_mod, q_len, kv_len)
        # a tile past the end is never full
        counts = tile_counts(mask_mod, q_len, kv_len, CPU, args.block_size)
        tiles = Drawing(args.block_size, counts, torch.tensor(args.block_size**2))
        sys.stdout.write(describe(args.name, q_len, kv_len, pairs, tiles))
        if args.out is not None:
            dots = draw_pairs(mask_mod, q_len, kv_len, PIXELS)
            save(args.out, args.name, q_len, kv_len, dots, tiles)
    except (ValueError, ImportError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
