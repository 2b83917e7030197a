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
import os
import secrets
import stat
import sys
from codecs import getincrementaldecoder
from collections.abc import Callable
from contextlib import suppress
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from .collector import sparse_layers
from .pages import page
from .texts import token_texts

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


def json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(
            f"must be a JSON object such as '{{\"dense_length\": 0}}', got {text!r}"
        )
    return found


def parser() -> Parser:
    made = Parser(
        prog=PROGRAM,
        description="Writes one HTML page: point at a token and see what it reads.",
        allow_abbrev=False,
    )
    made.add_argument(
        "model",
        metavar="MODEL",
        help="folder of a model of transformers with its tokenizer, or .gguf file",
    )
    made.add_argument("--text", type=Path, required=True, metavar="FILE", help="text to read")
    made.add_argument("--out", type=Path, default=Path("view.html"), help="page (view.html)")
    made.add_argument(
        "--layers", type=layer_list, help="layers to record, such as 0,3 or their names (all)"
    )
    made.add_argument("--queries", type=count, help="tokens to record, drawn at random (all)")
    made.add_argument(
        "--max-tokens", type=count, default=4096, help="tokens of the text, from its start (4096)"
    )
    made.add_argument(
        "--settings",
        type=json_object,
        metavar="JSON",
        help="of use_sparse_attention, for a model of transformers with dense attention (those in "
        "its config.json, or the defaults)",
    )
    made.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 ... (cpu)")
    return made


def check_usable(device: str) -> None:
    try:
        torch.zeros(1, device=device).item()  # meta has no values
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(f"--device {device!r} is not usable here: give --device cpu") from None


def check_pretrained(name: str) -> None:
    """Raises ValueError: no model of transformers."""
    path = Path(name)
    if path.suffix == ".gguf" and path.is_file():
        return
    config, keys = path / "config.json", set()
    if config.is_file():
        try:
            content = json.loads(config.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{config} is broken: {error}") from None
        keys = set(content) if isinstance(content, dict) else set()
    if "model_type" not in keys:
        hint = ": python -m training.view shows a run of train_enwik8.py" * ("settings" in keys)
        raise ValueError(
            "MODEL must be a folder of a model of transformers with config.json, or a .gguf file, "
            f"got {name}{hint}"
        )


# bytes that are read at a time
PART = 2**24


def read_up_to(file: BufferedReader, most: int) -> bytes:
    """The next `most` bytes of a file, or fewer at its end. It takes no memory for more."""
    parts = []
    while most > 0 and (part := file.read(min(most, PART))):
        parts.append(part)
        most -= len(part)
    return b"".join(parts)


class Text(NamedTuple):
    """Ids of tokens, what each is in the text, and which part of the file they are ("": all)."""

    ids: list[int]
    pieces: list[str]
    part: str


def read_tokens(file: BufferedReader, most: int, tokenizer: Any) -> Text:
    """The first `most` tokens of a file."""
    decoder, text, size = getincrementaldecoder("utf-8")("replace"), "", 16 * most + 64
    while True:
        data = read_up_to(file, size)
        is_whole = len(data) < size
        text += decoder.decode(data, is_whole)
        ids, pieces = token_texts(tokenizer, text)
        # where a part of the file ends may change its last tokens
        if is_whole or len(ids) >= 2 * most:
            return Text(ids[:most], pieces[:most], "the first" if len(ids) > most else "")
        size *= 4


def check_ids(model: Any, ids: list[int], name: str) -> None:
    rows = model.get_input_embeddings().num_embeddings
    if ids and max(ids) >= rows:
        raise ValueError(
            f"{name} must have an embedding for each token of its tokenizer, got {rows} and the "
            f"token {max(ids)}"
        )


def write_whole(path: Path, content: str) -> None:
    """Write a file at once, or leave what was there. A link stays one, and so do a pipe and a
    device, which are written to; a file that is there keeps its mode."""
    part = None
    try:
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            mode = None
        if mode is not None and not stat.S_ISREG(mode):
            path.write_text(content, encoding="utf-8", newline="\n")
            return
        target = Path(os.path.realpath(path))
        # shorter than the longest name of a file
        part = target.with_name(f".{secrets.token_hex(8)}.tmp")
        with part.open("x", encoding="utf-8", newline="\n") as file:
            if mode is not None:
                os.chmod(part, stat.S_IMODE(mode))
            file.write(content)
        os.replace(part, target)
    except BaseException as error:
        if part is not None:
            with suppress(OSError):
                part.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)
        raise


# what `load_pretrained` is
Load = Callable[[argparse.Namespace, BufferedReader], tuple[Text, nn.Module, dict[str, Any]]]


def run(argv: list[str] | None, load: Load, program: str) -> None:
    command = parser()
    command.prog = program
    args = command.parse_args(argv)
    out: Path = args.out
    if out.is_dir() or not out.parent.is_dir():
        raise ValueError(f"--out must be a file in a folder there is, got {out}")
    check_usable(args.device)
    with args.text.open("rb") as file:  # once: it may be a pipe
        if not file.peek(1):
            raise ValueError(f"{args.text} is empty")
        text, model, given = load(args, file)
    if not text.ids:
        raise ValueError(f"{args.text} has no token")
    title = f"What {args.model} reads in {args.text.name}"
    options: dict[str, Any] = dict(layers=args.layers, queries=args.queries, model_kwargs=given)
    content = page(model, text.ids, text.pieces, title=title, **options)
    write_whole(out, content)
    only = f", {text.part} of {args.text}" if text.part else ""
    size = len(content) / 1e6
    sys.stdout.write(f"{out}: {len(text.ids):,} tokens{only}; {size:.1f} MB\n")
    least = min(one.config.dense_length for one in sparse_layers(model, args.layers).values())
    if least >= len(text.ids):
        other = """: --settings '{"dense_length": 0}' shows blocks""" if given else ""
        sys.stdout.write(f"every token attends to all keys, as dense_length is {least}{other}\n")


def load_pretrained(
    args: argparse.Namespace, file: BufferedReader
) -> tuple[Text, nn.Module, dict[str, Any]]:
    """The text, the model, and what else the model is called with."""
    check_pretrained(args.model)
    from ..hf.viewing import load_viewed

    model, tokenizer = load_viewed(args.model, args.settings, args.device)
    text = read_tokens(file, args.max_tokens, tokenizer)
    check_ids(model, text.ids, args.model)
    return text, model, dict(use_cache=False, logits_to_keep=1)


def main(argv: list[str] | None = None, load: Load | None = None, program: str = PROGRAM) -> int:
    """Exit status: 0, or 2 after bad input, told in one line. `load` stands in for
    `load_pretrained`."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace", line_buffering=True)
    try:
        run(argv, load or load_pretrained, program)
        return 0
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except (ValueError, ImportError, NotImplementedError) as error:
        message = str(error)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        message = "out of memory: give a smaller --max-tokens"
    except KeyboardInterrupt:
        return 130
    sys.stderr.write(f"{program}: {' '.join(message.split())}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
