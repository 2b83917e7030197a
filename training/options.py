"""The command line of a run: kinds of settings, options, signals, exit status. Without torch, whose
import takes longer than `--help` may."""

from __future__ import annotations

import argparse
import io
import os
import re
import signal
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import UserError, reason


class number:
    """A kind of setting: a number from `least` to `most`, both allowed."""

    def __init__(self, kind: type, least: float = 0, most: float = sys.float_info.max):
        self.kind, self.least, self.most, self.__name__ = kind, least, most, kind.__name__

    def __call__(self, text: str) -> Any:
        if not self.least <= (value := self.kind(text)) <= self.most:
            raise argparse.ArgumentTypeError(f"{text} is out of range, expected {self.range()}")
        return value

    def range(self) -> str:
        to = "or more" if self.most == sys.float_info.max else f"to {self.most}"
        return f"{self.least} {to}"


def layer_indices(text: str) -> str:
    """The kind of `--local-layers`."""
    if text in ("auto", "none") or re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is not auto, none or indices such as 0,2")


count, whole, real = number(int, 1, 2**31 - 1), number(int, 0, 2**31 - 1), number(float)
tokens = number(int, 1, 2**30 - 1)  # below TOO_LARGE of the package
size, seed, threads = number(int, 1, 2**63 - 1), number(int, 0, 2**63 - 1), number(int, 1, 1024)
Kind = Callable[[str], Any] | tuple[str, ...]
# name: (type or choices, preset on CPU, preset on CUDA, meaning)
Table = dict[str, tuple[Kind, Any, Any, str]]


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


# the command line

SAMPLING = {"sample", "prompt", "max_new_tokens", "temperature", "filter_thres", "top_k", "top_p"}
HARDWARE = {"backend", "device", "threads"}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UserError(message)


def parse(argv: list[str] | None, table: Table, about: str) -> Namespace:
    """The options given on the command line; of the others, a new run has `out_dir` and `name`."""
    parser = Parser(description=about, argument_default=argparse.SUPPRESS, allow_abbrev=False)
    parser.add_argument("--name", help="directory of the run; never one that is there already")
    parser.add_argument(
        "--out-dir", type=Path, metavar="DIR", help="where directories of runs are made (runs)"
    )
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with the run in RUN")
    parser.add_argument("--tensorboard", action="store_true", help="also write TensorBoard events")
    parser.add_argument(
        "--view", action="store_true", help="also write a page of what the layers read"
    )
    group = parser.add_argument_group("several processes, started by torchrun")
    for name, text in (
        ("dp", "processes that read other rows (all that --cp and --tp leave)"),
        ("cp", "processes that share the tokens of a row (1)"),
        ("tp", "processes that share the heads of a layer (1)"),
    ):
        group.add_argument(option(name), type=count, metavar="X", help=text)
    group.add_argument(
        "--timeout", type=count, metavar="X", help="seconds to wait for other processes (600)"
    )
    group = parser.add_argument_group("settings (CPU preset / CUDA preset)")
    for name, (kind, cpu, cuda, text) in table.items():
        preset = "" if cpu is None else f" ({cpu})" if cpu == cuda else f" ({cpu} / {cuda})"
        typing: Any = {"type": kind, "metavar": "X"} if callable(kind) else {"choices": kind}
        group.add_argument(option(name), help=text + preset, **typing)
    group = parser.add_argument_group("sampling (also --seed, --device, --threads, --backend)")
    group.add_argument("--sample", type=Path, metavar="RUN", help="stream text from the run in RUN")
    group.add_argument("--prompt", help="text to go on from (a line break)")
    group.add_argument(
        *("--max-new-tokens", "--length"), type=count, metavar="X", help="bytes to sample (512)"
    )
    group.add_argument("--temperature", type=real, help="0: the likeliest byte each time (1.0)")
    group.add_argument("--top-k", type=count, help="sample from so many likeliest bytes (off)")
    group.add_argument(
        "--filter-thres", type=real, help="share of unlikely bytes left out (0.9; 0 with --top-k)"
    )
    group.add_argument("--top-p", type=real, help="nucleus sampling (off)")
    given = parser.parse_args(argv)

    names = set(vars(given))
    if "sample" in given:
        mode, refused = "--sample", names - SAMPLING - HARDWARE - {"seed"}
    elif "resume" in given:
        mode, refused = "--resume", names & (SAMPLING | {"name", "out_dir"})
    else:
        mode, refused = "training: it needs --sample RUN", names & SAMPLING
        vars(given).setdefault("out_dir", Path("runs"))
        vars(given).setdefault("name", None)
    if refused:
        raise UserError(f"{option(min(refused))} does not go with {mode}")
    if "data" in given and given.data not in ("auto", "enwik8", "stdlib"):
        given.data = os.path.abspath(given.data)
    return given


def catch_signals() -> list[int]:
    """The SIGINT and SIGTERM that came: one asks to end after this step, two end it."""
    came: list[int] = []

    def note(signum: int, _: Any) -> None:
        came.append(signum)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGINT, note)
    signal.signal(signal.SIGTERM, note)
    return came


def exit_status(command: Callable[[], int]) -> int:
    """What `command` returns; 2 after an error that the user can put right, told in one line."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace", line_buffering=True)
    try:
        return command()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except (UserError, NotImplementedError) as error:
        message = str(error)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        message = f"out of memory: {reason(error)}"
    print(f"train_enwik8.py: {' '.join(message.split())}", file=sys.stderr)
    return 2
