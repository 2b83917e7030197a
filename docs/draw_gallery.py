"""Draws the pictures of masks.md, as the command line does: `python docs/draw_gallery.py`."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from native_sparse_attention.masks import __main__ as command
from native_sparse_attention.masks.catalog import CATALOG

PICTURES = Path(__file__).parent / "masks"


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for name in CATALOG:
        # what it would print is in the pictures
        with (
            open(os.devnull, "w", encoding="utf-8") as nowhere,
            contextlib.redirect_stdout(nowhere),
        ):
            command.main([name, "--length", "1024", "--out", str(PICTURES / f"{name}.png")])


if __name__ == "__main__":
    main()
