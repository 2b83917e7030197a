"""`python -m native_sparse_attention.view MODEL --text FILE`: a page of what a model's layers read.

python -m native_sparse_attention.view MODEL_FOLDER --text book.txt --settings '{"dense_length": 0}'

MODEL is a folder of a model of transformers with its tokenizer: an NSAForCausalLM, a converted
model, or another decoder, which is shown as it attends under `use_sparse_attention`; or a GGUF
file. Nothing is downloaded. `python -m training.view` shows a run of train_enwik8.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from torch import nn

from ..checks import check_device, check_int, is_usable
from .pages import page, token_texts

PROGRAM = "python -m native_sparse_attention.view"
# bytes that are read for each token of a text: no text has longer ones on average
BYTES_PER_TOKEN = 64

MODEL = "folder of a model of transformers with its tokenizer, or .gguf file"
SETTINGS = "of use_sparse_attention, for a dense model (those in its config.json, or the defaults)"


def layer_list(text: str) -> list[str | int]:
    """Numbers or names, separated by commas."""
    return [int(name) if name.isdigit() else name for name in text.split(",")]


def json_object(text: str) -> dict[str, Any]:
    return dict(json.loads(text))


def load_pretrained(
    args: argparse.Namespace, data: bytes
) -> tuple[nn.Module, list[int], list[str], dict[str, Any]]:
    """A model of transformers, ids and texts of tokens, and other arguments of the model."""
    if not args.model.exists():
        raise ValueError(f"MODEL must be a {MODEL}, got {args.model}")
    from ..hf.convert import load_viewed, quiet

    with quiet(args.model):
        model, tokenizer = load_viewed(args.model, args.settings, args.device)
    ids, pieces = token_texts(tokenizer, data.decode("utf-8", "replace"))
    return model, ids, pieces, dict(use_cache=False, logits_to_keep=1)


def main(
    argv: list[str] | None = None,
    load: Any = load_pretrained,
    program: str = PROGRAM,
    what: str = MODEL,
) -> None:
    """Exit status: 0, or 2 after bad input. `load` returns what the model runs on, and `what` says
    which models it takes."""
    description = "Writes one HTML page: point at a token and see what it reads."
    usage = "%(prog)s MODEL --text FILE [options]"
    parser = argparse.ArgumentParser(program, usage, description, allow_abbrev=False)
    add = parser.add_argument
    add("model", metavar="MODEL", type=Path, help=what)
    add("--text", type=Path, required=True, metavar="FILE", help="text to read")
    add("--out", type=Path, default=Path("view.html"), help="page (view.html)")
    add("--layers", type=layer_list, help="layers to record, such as 0,3 or names (all)")
    add("--queries", type=int, help="tokens to record, drawn at random (all)")
    add("--max-tokens", type=int, default=4096, help="first tokens of the text (4096)")
    add("--settings", type=json_object, metavar="JSON", help=SETTINGS)
    add("--device", default="cpu", help="cpu, cuda, cuda:1 ... (cpu)")
    args = parser.parse_args(argv)
    try:
        most = check_int("--max-tokens", args.max_tokens, 1)
        args.device = check_device("--device", args.device)
        if not is_usable(args.device):
            raise ValueError(f"--device must be a device that is usable here, got {args.device}")
        if args.out.is_dir() or not args.out.parent.is_dir():
            raise ValueError(f"--out must be a file in a folder there is, got {args.out}")
        if args.out.exists() and args.out.samefile(args.text):
            raise ValueError(f"--out must be another file than --text, got {args.out}")
        with args.text.open("rb") as file:
            model, ids, pieces, model_kwargs = load(args, file.read(BYTES_PER_TOKEN * most))
        content = page(
            model, ids[:most], pieces[:most], layers=args.layers, queries=args.queries,
            title=f"What {args.model} reads in {args.text.name}", model_kwargs=model_kwargs,
        )  # fmt: skip
        args.out.write_text(content, encoding="utf-8", newline="\n")
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (ValueError, ImportError, NotImplementedError) as error:
        parser.error(" ".join(str(error).split()))
    part = f", the first of {args.text}" if len(ids) > most else ""
    told = f"{args.out}: {min(len(ids), most):,} tokens{part}; {len(content) / 1e6:.1f} MB\n"
    sys.stdout.write(told)


if __name__ == "__main__":
    main()
