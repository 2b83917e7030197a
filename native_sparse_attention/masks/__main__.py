"""`python -m native_sparse_attention.masks NAME`: draw the pairs that a mask allows and the tiles
that its block mask skips.

    python -m native_sparse_attention.masks natten --length 256 --kernel-height 5
    python -m native_sparse_attention.masks sliding_window --window 64 --out window.png
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from . import catalog, pictures
from .tiles import TILE


def parser() -> argparse.ArgumentParser:
    """A parser with one command per mask, each with its own settings."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--length", type=int, default=512, help="queries (512)")
    common.add_argument("--block-size", type=int, default=TILE, help=f"side of a tile ({TILE})")
    common.add_argument("--out", type=Path, metavar="FILE.png", help="draw both pictures there")
    whole = argparse.ArgumentParser(
        prog="python -m native_sparse_attention.masks",
        description="Draws a mask: every pair, and the tiles that a block mask of it skips.",
    )
    names = whole.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, entry in catalog.CATALOG.items():
        one = names.add_parser(name, parents=[common], help=entry.meaning)
        for key, option in entry.options.items():
            one.add_argument(f"--{key.replace('_', '-')}", type=int, help=option.meaning)
    return whole


def main(argv: list[str] | None = None) -> None:
    whole = parser()
    args = whole.parse_args(argv)
    device = torch.device("cpu")
    given = {
        key: getattr(args, key)
        for key in catalog.CATALOG[args.name].options
        if getattr(args, key) is not None
    }
    try:
        if args.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {args.block_size}")
        if args.out is not None and (args.out.suffix != ".png" or not args.out.parent.is_dir()):
            raise ValueError(f"--out must be a .png file in a folder there is, got {args.out}")
        mask_mod, q_len, kv_len = catalog.make(args.name, args.length, device, **given)
        tiles = pictures.draw(mask_mod, q_len, kv_len, args.block_size, device, whole=True)
        pairs = pictures.fine(mask_mod, q_len, kv_len, device)
        sys.stdout.write(pictures.describe(args.name, pairs, tiles) + "\n")
        if args.out is not None:
            pictures.save(args.out, args.name, mask_mod, tiles, device)
    except (ValueError, ImportError, OSError) as error:
        whole.error(str(error))


if __name__ == "__main__":
    main()
