"""`--view`: the page of what the layers read, next to each checkpoint."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import numpy as np

from native_sparse_attention import Transformer
from native_sparse_attention.runs import checkpoint_path
from native_sparse_attention.view import byte_texts, page
from native_sparse_attention.view.texts import first_document

from .data import encoded
from .errors import UserError
from .forward import autocast
from .runs import write


def check_view(given: Namespace, cfg: Namespace) -> bool:
    """Whether pages are asked for."""
    if "view" in given and cfg.attention == "dense":
        raise UserError("--view goes with sparse attention: dense attention reads all tokens")
    return "view" in given


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
