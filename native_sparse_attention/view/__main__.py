"""`python -m native_sparse_attention.view MODEL --text FILE`: a page of what a model's layers read.

python -m native_sparse_attention.view MODEL_FOLDER --text book.txt --settings '{"dense_length": 0}'

MODEL is a folder of a model of transformers with its tokenizer: an NSAForCausalLM, a converted
model, or another decoder, which is shown as it attends under `use_sparse_attention`; or a GGUF
file. Nothing is downloaded. `python -m training.view`, of a checkout, shows a run of
train_enwik8.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .collector import sparse_layers
from .pages import page
from .texts import token_texts

PROGRAM = "python -m native_sparse_attention.view"
# bytes that are read for each token of a text: no text has longer ones on average
BYTES_PER_TOKEN = 64


def number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) < 2**24:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, got {text!r}")
    return int(text)


def layer_list(text: str) -> list[str | int]:
    """Numbers or names, separated by commas."""
    return [int(name) if name.isdigit() else name for name in text.split(",")]


def json_object(text: str) -> dict[str, Any]:
    try:
        settings = json.loads(text)
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise argparse.ArgumentTypeError(
            f"must be a JSON object such as '{{\"dense_length\": 0}}', got {text!r}"
        )
    return settings


MODEL = "folder of a model of transformers with its tokenizer, or .gguf file"
SETTINGS = "of use_sparse_attention, for a dense model (those in its config.json, or the defaults)"

# the model, the ids of tokens and what each is in the text, and what else the model is called with
Loaded = tuple[nn.Module, list[int], list[str], dict[str, Any]]


def load_pretrained(args: argparse.Namespace, data: bytes) -> Loaded:
    """A model of transformers, and the tokens of a text."""
    path, config = args.model, {}
    is_gguf = path.suffix == ".gguf" and path.is_file()
    if not is_gguf and (file := path / "config.json").is_file():
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} is broken: {error}") from None
    if not is_gguf and "model_type" not in config:
        hint = ": python -m training.view shows a run of train_enwik8.py"
        raise ValueError(
            "MODEL must be a folder of a model of transformers with config.json, or a .gguf file, "
            f"got {path}{hint if 'settings' in config else ''}"
        )
    from ..hf.viewing import load_viewed

    model, tokenizer = load_viewed(path, args.settings, args.device)
    ids, pieces = token_texts(tokenizer, data.decode("utf-8", "replace"))
    rows = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if ids and max(ids) >= rows:
        raise ValueError(
            f"{path} must have an embedding for each token of its tokenizer, got {rows} and the "
            f"token {max(ids)}"
        )
    return model, ids, pieces, dict(use_cache=False, logits_to_keep=1)


def write_page(
    args: argparse.Namespace, load: Callable[[argparse.Namespace, bytes], Loaded]
) -> None:
    if args.out.is_dir() or not args.out.parent.is_dir():
        raise ValueError(f"--out must be a file in a folder there is, got {args.out}")
    try:
        torch.zeros(1, device=args.device).item()  # meta has no values
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(f"--device {args.device!r} is not usable here: use --device cpu") from None
    with args.text.open("rb") as file:
        data = file.read(BYTES_PER_TOKEN * args.max_tokens)
    model, ids, pieces, model_kwargs = load(args, data)
    if not ids:
        raise ValueError(f"{args.text} is empty")
    part = f", the first of {args.text}" if len(ids) > args.max_tokens else ""
    ids, pieces = ids[: args.max_tokens], pieces[: args.max_tokens]
    title = f"What {args.model} reads in {args.text.name}"
    content = page(
        model, ids, pieces, layers=args.layers, queries=args.queries, title=title,
        model_kwargs=model_kwargs,
    )  # fmt: skip
    args.out.write_text(content, encoding="utf-8", newline="\n")
    size = len(content) / 1e6
    sys.stdout.write(f"{args.out}: {len(ids):,} tokens{part}; {size:.1f} MB\n")
    layers = sparse_layers(model, args.layers).values()
    dense_length = min(layer.config.dense_length for layer in layers)
    if dense_length >= len(ids):
        hint = ": --settings '{\"dense_length\": 0}' shows blocks" if model_kwargs else ""
        sys.stdout.write(
            f"every token attends to all keys, as dense_length is {dense_length}{hint}\n"
        )


def main(
    argv: list[str] | None = None, load: Any = load_pretrained, program: str = PROGRAM
) -> None:
    """Exit status: 0, or 2 after bad input. `load` returns what the model runs on."""
    parser = argparse.ArgumentParser(
        prog=program,
        usage="%(prog)s MODEL --text FILE [options]",
        description="Writes one HTML page: point at a token and see what it reads.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", type=Path, help=MODEL)
    add("--text", type=Path, required=True, metavar="FILE", help="text to read")
    add("--out", type=Path, default=Path("view.html"), help="page (view.html)")
    add("--layers", type=layer_list, help="layers to record, such as 0,3 or names (all)")
    add("--queries", type=number, help="tokens to record, drawn at random (all)")
    add("--max-tokens", type=number, default=4096, help="first tokens of the text (4096)")
    add("--settings", type=json_object, metavar="JSON", help=SETTINGS)
    add("--device", default="cpu", help="cpu, cuda, cuda:1 ... (cpu)")
    args = parser.parse_args(argv)
    try:
        write_page(args, load)
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (ValueError, ImportError, NotImplementedError) as error:
        parser.error(" ".join(str(error).split()))
    except (MemoryError, torch.OutOfMemoryError):
        parser.error("out of memory: use a smaller --max-tokens")


if __name__ == "__main__":
    main()
