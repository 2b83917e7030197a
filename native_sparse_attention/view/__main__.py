"""`python -m native_sparse_attention.view RUN --text FILE`: a page of what a model's layers read.

python -m native_sparse_attention.view runs/NAME --text book.txt --out book.html
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..transformer import Transformer
from .pages import byte_texts, page

PROGRAM = "python -m native_sparse_attention.view"


class Parser(argparse.ArgumentParser):
    """A parser that raises instead of leaving the program."""

    def error(self, message: str) -> Any:
        raise ValueError(message)


def count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, got {text!r}")
    return int(text)


def layer_list(text: str) -> list[str | int]:
    """Numbers or names, separated by commas."""
    return [int(name) if name.isdigit() else name for name in text.split(",")]


def parser() -> Parser:
    made = Parser(
        prog=PROGRAM,
        description="Writes one HTML page: point at a token and see what it reads.",
        allow_abbrev=False,
    )
    made.add_argument("model", metavar="RUN", help="directory of a run of train_enwik8.py")
    made.add_argument("--text", type=Path, required=True, metavar="FILE", help="text to read")
    made.add_argument("--out", type=Path, default=Path("view.html"), help="page (view.html)")
    made.add_argument(
        "--layers", type=layer_list, help="layers to record, such as 0,3 or their names (all)"
    )
    made.add_argument("--queries", type=count, help="tokens to record, drawn at random (all)")
    made.add_argument(
        "--max-tokens", type=count, default=4096, help="tokens of the text, from its start (4096)"
    )
    made.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 ... (cpu)")
    return made


def check_usable(device: str) -> None:
    try:
        torch.zeros(1, device=device).item()  # meta has no values
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(f"--device {device!r} is not usable here: give --device cpu") from None


def load(name: str, device: str) -> nn.Module:
    """The model of a run, whose tokens are bytes."""
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always", UserWarning)
        model = Transformer.from_run(name, device)
    for note in notes:
        sys.stderr.write(f"{note.message}\n")
    return model


def write_whole(path: Path, content: str) -> None:
    """Write a file at once, or leave what was there."""
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        part.write_text(content, encoding="utf-8", newline="\n")
        os.replace(part, path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)
        raise


def run(argv: list[str] | None) -> None:
    args = parser().parse_args(argv)
    out: Path = args.out
    if out.is_dir() or not out.parent.is_dir():
        raise ValueError(f"--out must be a file in a folder there is, got {out}")
    check_usable(args.device)
    with args.text.open("rb") as file:
        data = file.read(args.max_tokens + 1)
    if not data:
        raise ValueError(f"{args.text} is empty")
    shortened, data = len(data) > args.max_tokens, data[: args.max_tokens]
    model = load(args.model, args.device)
    title = f"What {args.model} reads in {args.text.name}"
    options: dict[str, Any] = dict(layers=args.layers, queries=args.queries, title=title)
    content = page(model, list(data), byte_texts(data), **options)
    write_whole(out, content)
    only = f", the first of {args.text}" if shortened else ""
    size = len(content) / 1e6
    sys.stdout.write(f"{out}: {len(data):,} tokens{only}; {size:.1f} MB\n")


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 2 after bad input, told in one line."""
    try:
        run(argv)
        return 0
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.strerror else str(error)
    except (ValueError, ImportError, NotImplementedError) as error:
        message = str(error)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        message = "out of memory: give a smaller --max-tokens"
    except KeyboardInterrupt:
        return 130
    sys.stderr.write(f"{PROGRAM}: {' '.join(message.split())}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
