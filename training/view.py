"""Pages of what the layers of a run read.

python train_enwik8.py --view                              one next to each checkpoint
python -m training.view runs/NAME --text FILE --out PAGE   of any text, whose tokens are bytes
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np

from native_sparse_attention import Transformer
from native_sparse_attention.view import __main__ as viewer
from native_sparse_attention.view import byte_texts, page

from .data import encoded
from .forward import autocast
from .runs import checkpoint_path, load_model, read_config, write

PROGRAM = "python -m training.view"


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


def first_document(data: bytes, marker: bytes) -> bytes:
    """The bytes from the first marker up to the next one; all of them where there is none."""
    start = max(0, data.find(marker))
    end = data.find(marker, start + 1)
    return data[start:] if end < 0 else data[start:end]


# the command


def load_run(
    args: Namespace, data: bytes
) -> tuple[Transformer, list[int], list[str], dict[str, Any]]:
    """The model of a run, and the bytes of a text as its tokens. Of a run that packs documents,
    which begin with a marker, the first document that begins in the bytes to show: the page shows
    no documents side by side."""
    if args.settings is not None:
        raise ValueError("--settings goes with a model of transformers, got a run")
    model = load_model(args.model, args.device)
    marker = encoded(read_config(args.model)["settings"].get("pack", ""))
    if marker and marker in data[: args.max_tokens]:
        data = first_document(data, marker)
    return model, list(data), byte_texts(data), {}


def main(argv: list[str] | None = None) -> None:
    viewer.main(argv, load_run, PROGRAM, "directory of a run of train_enwik8.py")


if __name__ == "__main__":
    main()
