"""`python -m native_sparse_attention.masks NAME`: draw the pairs that a mask allows and the tiles
that its block mask skips.

    python -m native_sparse_attention.masks natten --length 256 --kernel-height 5
    python -m native_sparse_attention.masks sliding_window --window 64 --out window.png
"""

from __future__ import annotations

import argparse
import inspect
import math
import sys
from pathlib import Path

import torch
from torch import Tensor

from ..checks import check_int
from . import catalog
from .nsa import TILE, MaskMod, tile_counts

CPU = torch.device("cpu")
# most cells along the longer side of a picture in characters, and in pixels
CELLS, PIXELS = 48, 512
# a cell with no, some and all pairs allowed
MARKS, LEGEND = ".+#", ". none  + some  # all"


def draw_pairs(mask_mod: MaskMod, q_len: int, kv_len: int, most: int = CELLS) -> tuple[int, Tensor]:
    """The size of a cell, one pair or more to keep each side within `most` cells, and the share of
    the pairs of each cell that is allowed."""
    size = math.ceil(max(q_len, kv_len) / most)
    rows, columns = ((n - torch.arange(0, n, size)).clamp(max=size) for n in (q_len, kv_len))
    allowed = tile_counts(mask_mod, q_len, kv_len, CPU, size)
    # float32 would round a share of nearly all pairs to all
    return size, allowed.double() / (rows[:, None] * columns)


def cell_states(share: Tensor) -> Tensor:
    """0, 1 and 2 for cells with no, some and all pairs allowed."""
    return (share > 0).int() + (share == 1).int()


def draw_text(share: Tensor) -> str:
    return "\n".join("".join(MARKS[c] for c in row) for row in cell_states(share).tolist())


def save(path: Path, title: str, shape: tuple[int, int], share: Tensor, tiles: Tensor) -> None:
    """Save the pairs and the tiles of a mask side by side as a PNG."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.7), layout="constrained")
    left, right = figure.subplots(1, 2)
    extent = (0, shape[1], shape[0], 0)
    left.imshow(share.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto", extent=extent)
    left.set(title=title, xlabel="key", ylabel="query")
    colours = ListedColormap(["#f4f4f4", "#9ecae1", "#08519c"])
    right.imshow(cell_states(tiles).numpy(), cmap=colours, vmin=0, vmax=2, aspect="auto")
    skipped = 100 * float((tiles == 0).float().mean())
    right.set(title=f"tiles: {skipped:.0f} % skipped", xlabel="tile of keys")
    figure.savefig(path, dpi=70)


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
    for name, factory in catalog.CATALOG.items():
        text = (inspect.getdoc(factory) or "").partition("\n\n")[0]
        command = commands.add_parser(name, parents=[common], help=text, description=text)
        for key, default in catalog.options_of(name).items():
            command.add_argument(
                f"--{key.replace('_', '-')}", type=int, default=argparse.SUPPRESS,
                help=f"default at 512 queries: {default}",
            )  # fmt: skip
    options = vars(parser.parse_args(argv))
    name, length, tile, out = (options.pop(key) for key in ("name", "length", "block_size", "out"))
    try:
        tile = check_int("block_size", tile, 1)
        if out is not None and (out.suffix != ".png" or not out.parent.is_dir()):
            raise ValueError(f"--out must be a .png file in a folder there is, got {out}")
        mask_mod, q_len, kv_len = catalog.make(name, length, CPU, **options)
        size, share = draw_pairs(mask_mod, q_len, kv_len)
        # a tile past the end is never full
        counts = tile_counts(mask_mod, q_len, kv_len, CPU, tile)
        tiles = counts.double() / tile**2
        empty, partial, full = cell_states(tiles).flatten().bincount(minlength=3).tolist()
        cell = "one pair" if size == 1 else f"{size} x {size} pairs"
        sys.stdout.write(
            f"{name}: {q_len} queries, {kv_len} keys, "
            f"{100 * int(counts.sum()) / (q_len * kv_len):.1f} % of the pairs allowed\n\n"
            f"a cell is {cell} ({LEGEND})\n{draw_text(share)}\n\n"
            f"a cell is a tile of {tile} x {tile} ({LEGEND})\n{draw_text(tiles)}\n\n"
            f"{tiles.numel()} tiles: {empty} empty, {partial} partial, {full} full; "
            f"{100 * empty / tiles.numel():.1f} % skipped\n"
        )
        if out is not None:
            share = draw_pairs(mask_mod, q_len, kv_len, PIXELS)[1]
            save(out, name, (q_len, kv_len), share, tiles)
    except ImportError as error:
        parser.error(f"a picture needs matplotlib: pip install -e '.[plot]' ({error})")
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
