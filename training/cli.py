"""The command line of `train_enwik8.py`: options, signals, exit status."""

from __future__ import annotations

import argparse
import io
import math
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from native_sparse_attention.runs import RunError

from .errors import UserError, reason
from .settings import Table, count, option, real

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
    group.add_argument(
        "--temperature", type=temperature, help="0: the likeliest byte each time (1.0)"
    )
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


def temperature(text: str) -> float:
    value = float(text)
    # a divisor that float32 has, or none at all
    if value != 0 and not float(np.finfo(np.float32).tiny) <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is out of range, expected 0 or a usual number")
    return value


def refuse_processes() -> None:
    """Under torchrun and mpirun: several processes would each train the same run alone."""
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"):
        count = os.environ.get(name, "")
        if count.isdecimal() and int(count) > 1:
            raise UserError(
                f"{name} is {count}: training in several processes is not supported yet; "
                "start one process (torchrun --nproc-per-node 1)"
            )


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
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by 2>&-
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace", line_buffering=True)
    try:
        return command()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except (UserError, RunError, NotImplementedError) as error:
        message = str(error)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        message = f"out of memory: {reason(error)}"
    print(f"train_enwik8.py: {' '.join(message.split())}", file=sys.stderr)
    return 2
