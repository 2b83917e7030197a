"""Settings of a run: their ranges, the presets of a new run, what `config.json` may hold."""

from __future__ import annotations

import argparse
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from native_sparse_attention.checks.scalars import TOO_LARGE
from native_sparse_attention.presets import preset
from native_sparse_attention.runs import CHANGEABLE, CONFIG, read_config, verify_config

from .errors import UserError


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

    def holds(self, value: Any) -> bool:
        kinds = (int,) if self.kind is int else (int, float)
        return type(value) in kinds and self.least <= value <= self.most


def layer_indices(text: str) -> str:
    """The kind of `--local-layers`."""
    if text in ("auto", "none") or re.fullmatch(r"\d+(,\d+)*", text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is not auto, none or indices such as 1,3")


count, whole, real = number(int, 1, 2**31 - 1), number(int, 0, 2**31 - 1), number(float)
tokens = number(int, 1, TOO_LARGE - 1)
size, seed, threads = number(int, 1, 2**63 - 1), number(int, 0, 2**63 - 1), number(int, 1, 1024)
Kind = Callable[[str], Any] | tuple[str, ...]
# name: (type or choices, preset on CPU, preset on CUDA, meaning)
Table = dict[str, tuple[Kind, Any, Any, str]]


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


# tokens of a sequence from which on one softmax is the attention of a new run, but for lengths at
# which docs/training.md has short windows ahead; and from which on a third of its layers rank
# nothing
ONE_SOFTMAX_FROM, LOCAL_FROM = 2048, 16384
SHORT_WINDOWS = range(8192, 16384 + 1)


def new_settings(given: Namespace, table: Table) -> Namespace:
    """The settings of a new run: what was given, the rest from the preset of the device, or from
    `NSAConfig.preset` for one softmax and for long sequences."""
    device = find_device(getattr(given, "device", None))
    column = 2 if device.startswith("cuda") else 1
    usual: dict[str, Any] = {name: row[column] for name, row in table.items()}
    length = getattr(given, "seq_len", usual["seq_len"])
    attention = getattr(given, "attention", usual["attention"])
    if attention == "auto":
        three = length < ONE_SOFTMAX_FROM or length in SHORT_WINDOWS
        attention = "sparse" if three else "one-softmax"
    sizes: dict[str, Any] = {}
    if attention == "one-softmax":
        sizes = preset("one-softmax", length)
    elif attention == "sparse" and length >= SHORT_WINDOWS.start:
        sizes = preset("short-windows", length)
    usual |= {name: value for name, value in sizes.items() if name in table}
    usual |= vars(given) | dict(attention=attention)
    if usual["local_layers"] == "auto":
        usual["local_layers"] = "none"
        if attention == "one-softmax" and length >= LOCAL_FROM:
            usual["local_layers"] = third_of(usual["depth"])
    cfg = Namespace(**{name: usual[name] for name in table})
    # half the cores: threads wait for each other, and all of them for one whose core is taken
    cfg.device, cfg.threads = device, cfg.threads or max(1, torch.get_num_threads() // 2)
    for name in ("compress_block_size", "selection_block_size"):
        if cfg.attention != "dense" and cfg.seq_len < (size := getattr(cfg, name)):
            raise UserError(f"--seq-len {cfg.seq_len} is shorter than {option(name)} {size}")
    return cfg


def third_of(depth: int) -> str:
    """A third of the layers, every second one from the second on: "1,3" of 6."""
    return ",".join(map(str, range(1, depth - 1, 2)[: depth // 3])) or "none"


def find_device(name: str | None) -> str:
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=name).item()  # meta has no values
    except (RuntimeError, AssertionError, NotImplementedError):
        raise UserError(f"device {name!r} is not usable here; give --device cpu") from None
    return name


def open_run(run: Path, given: Namespace, table: Table) -> tuple[Namespace, dict[str, Any]]:
    """The settings of a run with the given changes, and its whole `config.json`.

    A change of a setting that cannot change is a UserError.
    """
    path, config = run / CONFIG, read_config(run)
    saved = {"local_layers": "none"} | dict(config["settings"])  # which older runs do not have
    if odd := sorted(saved.keys() ^ table.keys()):
        what = "has no setting" if odd[0] in table else "has an unknown setting"
        raise UserError(f"{path} {what} {odd[0]!r}")
    for name, (kind, *_) in table.items():
        check_setting(path, name, kind, saved[name])
    verify_config(run, config)
    for name in sorted(table.keys() & vars(given).keys()):
        value, old = getattr(given, name), saved[name]
        if name == "data" and value == "auto":
            continue
        if "sample" in given or name in CHANGEABLE:
            saved[name] = value
        elif value != old:
            raise UserError(f"{option(name)} {value} was {old} in {path}: it cannot change")
    return Namespace(**saved), config


def check_setting(path: Path, name: str, kind: Kind, value: Any) -> None:
    if isinstance(kind, number):
        what = f"must be a {kind.__name__} of {kind.range()}"
        right = kind.holds(value)
    elif isinstance(kind, tuple):
        right, what = value in kind, f"must be one of {', '.join(kind)}"
    elif kind is layer_indices:
        right = isinstance(value, str) and re.fullmatch(r"none|\d+(,\d+)*", value) is not None
        what = "must be none or indices of layers"
    else:
        right, what = isinstance(value, str), "must be a string"
    if not right:
        raise UserError(f"{path}: {name} {what}, got {value!r}")
