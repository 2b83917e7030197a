"""Pages of what the layers of a run read.

python train_enwik8.py --view                              one next to each checkpoint
python -m training.view runs/NAME --text FILE --out PAGE   of any text, whose tokens are bytes
"""

from __future__ import annotations

import sys
import warnings
from argparse import Namespace
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from native_sparse_attention import Transformer
from native_sparse_attention.view import __main__ as viewer
from native_sparse_attention.view import byte_texts, page
from native_sparse_attention.view.texts import first_document

from .data import encoded
from .errors import UserError
from .forward import autocast
from .runs import checkpoint_path, load_model, read_config, write

PROGRAM = "python -m training.view"


def check_view(args: Namespace, cfg: Namespace) -> bool:
    """Whether pages are asked for."""
    if "view" in args and cfg.attention == "dense":
        raise UserError("--view goes with sparse attention: dense attention reads all tokens")
    return "view" in args


def write_view(run: Path, model: Transformer, cfg: Namespace, data: np.ndarray, step: int) -> None:
    """`step-N.html`, of the first bytes of a text; of packed documents, of the first one's. It
    stays when its checkpoint goes."""
    if cfg.pack:
        text = first_document(data.tobytes(), encoded(cfg.pack))[: cfg.seq_len]
    else:
        text = data[: cfg.seq_len].tobytes()
    with autocast(cfg):
        content = page(model, list(text), byte_texts(text), title=f"{run.name}, step {step:,}")
    write(checkpoint_path(run, step, ".html"), content.encode())


# the command


def read_bytes(file: BufferedReader, most: int, marker: bytes) -> viewer.Text:
    """The first `most` bytes of a file, each a token. Of a run that packs documents, which begin
    with a marker, as many of the first document that begins in them: the page shows no documents
    side by side."""
    data, part = viewer.read_up_to(file, most + max(1, len(marker))), "the first"
    whole = len(data) <= most
    if marker and (start := data.find(marker)) >= 0:
        data += viewer.read_up_to(file, start)
        document = first_document(data, marker)
        part = "the first document" if len(document) <= most else "the start of the first document"
        whole, data = whole and document == data, document
    return viewer.Text(list(data[:most]), byte_texts(data[:most]), "" if whole else part)


def load_run(
    args: Namespace, file: BufferedReader
) -> tuple[viewer.Text, Transformer, dict[str, Any]]:
    """The text, and the model of a run."""
    if args.settings is not None:
        raise ValueError("--settings goes with a model of transformers, got a run")
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always", UserWarning)
        model = load_model(args.model, args.device)
    for note in notes:
        print(note.message, file=sys.stderr)
    marker = encoded(read_config(Path(args.model))["settings"].get("pack", ""))
    return read_bytes(file, args.max_tokens, marker), model, {}


def main(argv: list[str] | None = None) -> int:
    return viewer.main(argv, load_run, PROGRAM)


if __name__ == "__main__":
    sys.exit(main())
