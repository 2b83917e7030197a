"""Settings of a run: of a new one by its device and length, of another from its `config.json`."""

from __future__ import annotations

from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from native_sparse_attention.checks import is_usable
from native_sparse_attention.presets import preset

from .errors import UserError
from .options import Table, option
from .runs import ADDED, CHANGEABLE, CONFIG, locked, read_config

# tokens of a sequence from which on one softmax is the attention of a new run: in shorter ones all
# of it would be dense; and from which on a third of its layers rank nothing
ONE_SOFTMAX_FROM, LOCAL_FROM = 2048, 16384


def new_settings(given: Namespace, table: Table) -> Namespace:
    """The settings of a new run: what was given, the rest from the preset of the device, or from
    `NSAConfig.preset` for one softmax and for long sequences."""
    device = find_device(getattr(given, "device", None))
    column = 2 if device.startswith("cuda") else 1
    usual: dict[str, Any] = {name: row[column] for name, row in table.items()}
    length = getattr(given, "seq_len", usual["seq_len"])
    attention = getattr(given, "attention", usual["attention"])
    if attention == "auto":
        attention = "sparse" if length < ONE_SOFTMAX_FROM else "one-softmax"
    sizes: dict[str, Any] = {}
    if attention == "one-softmax":
        ranking = {name: value for name, value in vars(given).items() if name == "importance"}
        sizes = preset("one-softmax", length, ranking)
    usual |= {name: value for name, value in sizes.items() if name in table}
    usual |= vars(given) | dict(attention=attention)
    if usual["local_layers"] == "auto":
        usual["local_layers"] = "none"
        if attention == "one-softmax" and length >= LOCAL_FROM:
            # every second one from the first on, "0,2" of 6: others cost more in docs/training.md
            third = range(0, usual["depth"] - 1, 2)[: usual["depth"] // 3]
            usual["local_layers"] = ",".join(map(str, third)) or "none"
    cfg = Namespace(**{name: usual[name] for name in table})
    local = [] if cfg.local_layers == "none" else map(int, cfg.local_layers.split(","))
    if (last := max(local, default=-1)) >= 0 and attention == "dense":
        raise UserError("--local-layers goes with sparse attention, got --attention dense")
    if last >= cfg.depth:
        raise UserError(f"--local-layers has layer {last}, but --depth {cfg.depth} begins at 0")
    # half the cores: threads wait for each other, and all of them for one whose core is taken
    cfg.device, cfg.threads = device, cfg.threads or max(1, torch.get_num_threads() // 2)
    for name in ("compress_block_size", "selection_block_size"):
        if cfg.attention != "dense" and cfg.seq_len < (size := getattr(cfg, name)):
            raise UserError(f"--seq-len {cfg.seq_len} is shorter than {option(name)} {size}")
    return cfg


def find_device(name: str | None) -> str:
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if not is_usable(name):
        raise UserError(f"device {name!r} is not usable here; give --device cpu")
    return name


def open_run(run: Path, given: Namespace, table: Table) -> tuple[Namespace, dict[str, Any]]:
    """The settings of a run with the given changes, and its whole `config.json`.

    A change of a setting that cannot change is a UserError.
    """
    path, config = run / CONFIG, read_config(run)
    saved = ADDED | dict(config["settings"])
    if odd := sorted(saved.keys() ^ table.keys()):
        what = "has no setting" if odd[0] in table else "has an unknown setting"
        raise UserError(f"{path} {what} {odd[0]!r}")
    for name in sorted(table.keys() & vars(given).keys()):
        value, old = getattr(given, name), saved[name]
        if name == "data" and value == "auto":
            continue
        if "sample" in given or name in CHANGEABLE:
            saved[name] = value
        elif value != old:
            raise UserError(f"{option(name)} {value} was {old} in {path}: it cannot change")
    return Namespace(**saved), config


def resume_settings(
    given: Namespace, table: Table, held: ExitStack | None
) -> tuple[Namespace, dict[str, Any]]:
    """The settings of the run and its `config.json`; `held` keeps the lock of the run;
    None in a process that does not write."""
    run: Path = given.resume
    open_run(run, given, table)
    if held is not None:
        held.enter_context(locked(run))
    cfg, config = open_run(run, given, table)  # its last writer may have changed it meanwhile
    cfg.device = find_device(cfg.device)
    return cfg, config
