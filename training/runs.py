"""The directory of a training run: made, locked, written, verified before it is read.

    config.json                  every setting, the data's SHA-256, a checksum of both
    step-00000100.safetensors    weights
    step-00000100.optimizer      optimizer state, also safetensors
    step-00000100.json           the index: size and SHA-256 of both files, step, best validation,
                                 checksum of the configuration
    best.safetensors             the weights that validated best, with step and checksums

The checksum of the configuration leaves out CHANGEABLE: a resumed run may change those settings.
The index of a checkpoint is written last: files without one, which a kill leaves, do not count. A
file that is not what was written raises an error that names it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import shutil
import socket
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

try:
    import fcntl
except ImportError:  # not on this system
    fcntl = None  # type: ignore[assignment]

import safetensors.torch
import torch
from torch import Tensor

from native_sparse_attention import Transformer
from native_sparse_attention.checks import check_choice, check_device, refusal

from . import ranks
from .errors import RunError, UserError, reason

FORMAT = 2
CONFIG, BEST, LOCK, METRICS = "config.json", "best.safetensors", "lock", "metrics.jsonl"
WEIGHTS, OPTIMIZER, INDEX = ".safetensors", ".optimizer", ".json"
# settings that a resumed run may change: its length, and settings that do not affect the metrics
CHANGEABLE = {
    *("backend", "device", "threads", "steps", "compile", "activation_checkpointing", "data"),
    *("sample_every", "sample_length", "save_every", "keep"),
}
# settings that older runs do not have, and what they trained with
ADDED: dict[str, Any] = {"local_layers": "none", "ranking_bits": 16}
SHAPE = ("dim", "depth", "heads", "kv_heads", "dim_head", "ff_expansion_factor")
SPARSE = (
    *("sliding_window_size", "compress_block_size", "compress_block_sliding_stride"),
    *("selection_block_size", "num_selected_blocks", "num_initial_blocks", "num_local_blocks"),
    *("importance", "ranking_bits", "selection_stride", "backend"),
)


@dataclass
class Checkpoint:
    """`best` is the best validation up to `step`, in bits per byte."""

    step: int
    best: float
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def checksum(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def sealed(record: dict[str, Any]) -> dict[str, Any]:
    """The record with its own checksum, which `check_seal` verifies."""
    return record | {"sha256": checksum(record)}


def check_seal(record: dict[str, Any]) -> None:
    content = {name: value for name, value in record.items() if name != "sha256"}
    if record != sealed(content):
        raise ValueError("its checksum is wrong")


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def pack(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """A safetensors file."""
    # clones, because safetensors refuses tensors that share memory
    copies = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    return safetensors.torch.save(copies, metadata)


# configuration


def read_config(run: Path) -> dict[str, Any]:
    """The contents of config.json, verified.

    Raises:
        FileNotFoundError: `run` holds no config.json.
        RunError: the file is not what was written, or an older version of the script wrote it.
    """
    path = run / CONFIG
    if not path.is_file():
        inside = (run.parent / CONFIG).is_file()
        hint = f"; {run.parent} is one" if inside else ""
        raise FileNotFoundError(f"{run} is not a run directory: there is no {path}{hint}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is broken: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("settings"), dict):
        raise RunError(f"{path} is broken: it holds no settings")
    if (form := config.get("format")) != FORMAT or isinstance(form, bool):
        age = "an older" if form is None else "another"
        raise RunError(
            f"{path} was written by {age} version of train_enwik8.py (format {form}, expected "
            f"{FORMAT}): go on with that version, or train anew under another name"
        )
    try:
        check_seal(config)
    except ValueError as error:
        hint = "restore it, and give changes as options of --resume"
        raise RunError(f"{path} is not what was written: {error}; {hint}") from None
    return config


def identity(config: Mapping[str, Any]) -> str:
    """The checksum of the settings that affect a run's numbers; all checkpoint files carry it."""
    settings = {k: v for k, v in config["settings"].items() if k not in CHANGEABLE}
    record = {k: v for k, v in config.items() if k not in ("settings", "sha256")}
    return checksum(record | {"settings": settings})


def model_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of Transformer from the settings of a run."""
    settings = ADDED | dict(settings)
    sparse = settings["attention"] != "dense"
    sizes: dict[str, Any] = {name: settings[name] for name in SPARSE}
    if settings["attention"] == "one-softmax":
        sizes |= dict(branches=("selected",), rank_rotated=True)
    local = settings["local_layers"]
    return {
        "num_tokens": 256,
        "use_sparse_attn": sparse,
        "activation_checkpointing": settings["activation_checkpointing"] == "on",
        "sparse_attn_kwargs": sizes if sparse else None,
        "local_layers": [] if local == "none" else [int(index) for index in local.split(",")],
        **{name: settings[name] for name in SHAPE},
    }


# checkpoints


def checkpoint_path(run: Path, step: int, kind: str) -> Path:
    return run / f"step-{step:08d}{kind}"


def checkpoint_steps(run: Path, kind: str = INDEX) -> list[int]:
    """The steps with an index, or another file, in ascending order; names of the user's own do not
    count."""
    names = (path.name.removesuffix(kind) for path in run.glob(f"step-*{kind}"))
    return sorted(int(name[5:]) for name in names if re.fullmatch(r"step-[0-9]{8,}", name))


def check_run(path: Path, record: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    if record.get("config") != identity(config):
        raise RunError(f"{path} is of another run: its configuration is not that of {CONFIG}")


def read_checkpoint(run: Path, step: int, config: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint of a step, every byte of it verified.

    Raises:
        FileNotFoundError: a file of the checkpoint is missing.
        RunError: a file is not what was written, or belongs to another step or run.
    """
    path = checkpoint_path(run, step, INDEX)
    try:
        index = json.loads(path.read_bytes())
        check_seal(index)
    except (ValueError, AttributeError, RecursionError):
        raise RunError(f"{path} is damaged: its checksum is wrong") from None
    check_run(path, index, config)
    if index["step"] != step:
        raise RunError(f"{path} is of step {index['step']}, not of step {step}")
    tensors = {}
    for kind in (WEIGHTS, OPTIMIZER):
        content = (file := checkpoint_path(run, step, kind)).read_bytes()
        if hashlib.sha256(content).hexdigest() != index["files"][kind]["sha256"]:
            raise RunError(f"{file} is damaged: its SHA-256 is not that in {path.name}")
        tensors[kind] = safetensors.torch.load(content)
    return Checkpoint(step, index["best"], tensors[WEIGHTS], tensors[OPTIMIZER])


def newest_checkpoint(run: Path, config: Mapping[str, Any]) -> Checkpoint | None:
    """The newest checkpoint; None if there is none.

    Raises:
        RunError: it is not what was written.
    """
    while steps := checkpoint_steps(run):
        index = checkpoint_path(run, steps[-1], INDEX)
        try:
            return read_checkpoint(run, steps[-1], config)
        except FileNotFoundError as error:
            if steps == checkpoint_steps(run):  # else the writer replaced the files meanwhile
                raise RunError(f"{error.filename} is missing") from None
        except RunError as error:
            raise RunError(f"{error}; without {index.name} the run goes on before it") from None
    return None


def load_weights(path: Path, model: Transformer, tensors: dict[str, Tensor]) -> None:
    try:
        ranks.load(model, tensors)
    except RuntimeError as error:
        raise RunError(f"{path} is of another model: {reason(error)}") from None


def load_best(run: Path, config: Mapping[str, Any], model: Transformer) -> bool:
    """Load the weights that validated best, verified; False if there are none yet.

    Raises:
        RunError: the file is not what was written, or belongs to another run.
    """
    path = run / BEST
    if not path.exists():
        return False
    content = path.read_bytes()
    try:
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        record = json.loads(header["__metadata__"]["checkpoint"])
        check_seal(record)
        check_run(path, record, config)
        tensors = safetensors.torch.load(content)
        if fingerprint(tensors) != record["weights"]:
            raise ValueError("its checksum is wrong")
    except RunError:
        raise
    except Exception as error:  # safetensors raises its own error types
        raise RunError(f"{path} is damaged: {reason(error)}") from None
    load_weights(path, model, tensors)
    return True


def load_run(run: Path, config: Mapping[str, Any], model: Transformer, which: str) -> None:
    """Load the "best" or the "last" weights of a run; the last if there are no best ones yet."""
    if which == "best" and load_best(run, config, model):
        return
    if (newest := newest_checkpoint(run, config)) is None:
        raise RunError(f"{run} has no checkpoint yet")
    load_weights(checkpoint_path(run, newest.step, WEIGHTS), model, newest.weights)


def load_model(
    path: str | Path, device: torch.device | str = "cpu", *, which: str = "best"
) -> Transformer:
    """The model of a run of `train_enwik8.py`, in eval mode, from verified files.

    Its layers use `backend="auto"`. Weights are float32: a run with `precision` bf16 computes in
    `torch.autocast`.

    Args:
        path: directory of the run.
        device: device of the weights.
        which: "best", the weights that validated best, or "last", the newest checkpoint, which is
            also loaded if there are no best weights yet.

    Raises:
        FileNotFoundError: `path` is no directory of a run.
        ValueError: a file is damaged or of another run; the message names it.
    """
    check_choice("which", which, ("best", "last"))
    if not isinstance(path, (str, Path)):
        raise refusal("path", "the directory of a run", path)
    run, device = Path(path), check_device("device", device)
    config = read_config(run)
    # the loaded weights replace the random ones, whatever the defaults are
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        model = Transformer(**model_arguments({**config["settings"], "backend": "auto"})).float()
        load_run(run, config, model, which)
    return model.to(device).eval()


# writing: whole files


def write(path: Path, content: bytes) -> None:
    """The whole of `content` or nothing; it is on the disk when this returns."""
    part = path.with_name(path.name + ".tmp")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        sync_folder(path.parent)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise named(error, path) from None
        raise


def sync_folder(folder: Path) -> None:
    if os.name != "nt":  # cannot open a directory
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def named(error: OSError, path: Path) -> OSError:
    """The same error, of a file that the user knows: those of a write do not say which."""
    return OSError(error.errno, error.strerror or reason(error), str(path))


def append(path: Path, line: str) -> None:
    try:
        with path.open("ab") as file:  # buffered: a full disk takes half a line without an error
            file.write(line.encode() + b"\n")
    except OSError as error:
        raise named(error, path) from None


# writing: directories


def begun_run(folder: Path) -> Path | None:
    """The run in `folder` that this launch of torchrun began before a restart; None of others."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
        return None
    lines = f"\n{ranks.launch()}\n"
    locks = [path for path in folder.glob(f"*/{LOCK}") if path.read_text().endswith(lines)]
    return next((path.parent for path in locks if (path.parent / CONFIG).exists()), None)


def check_name(folder: Path, name: str) -> None:
    if name in ("", ".", "..") or Path(name).name != name or not name.isprintable():
        raise UserError(f"--name {name!r} is not a plain directory name")
    run = folder / name
    if (run / CONFIG).exists():
        raise UserError(f"{run} is there already; --resume {quote(str(run))} goes on")
    if os.path.lexists(run):
        raise UserError(f"{run} is there already, and is no run: it has no {CONFIG}. Remove it")


def one_line(name: str) -> str:
    """A name without line breaks and bytes that are no text."""
    return "".join(c if c.isprintable() else "_" for c in name)


def open_folder(
    args: Namespace, stem: str, config: dict[str, Any], held: ExitStack
) -> tuple[Path, dict[str, Any]]:
    """The directory of a run, and the `config.json` written to it: that of `--resume`, or a new one
    named `--name`, or `stem` with the first free number.

    `held` keeps the lock of a new directory; `resume_settings` took that of an old one.
    """
    if "resume" in args:
        claim(args.resume)
        return args.resume, write_config(args.resume, config)
    args.out_dir.mkdir(parents=True, exist_ok=True)
    numbered = (f"{one_line(stem)}-{number}" for number in itertools.count(1))
    run: Path = next(
        path
        for name in ([args.name] if args.name else numbered)
        if not os.path.lexists(path := args.out_dir / name)
    )
    run.mkdir()
    try:
        held.enter_context(locked(run))
        claim(run)
        return run, write_config(run, config)
    except OSError:  # without its config.json it could not go on
        shutil.rmtree(run, ignore_errors=True)
        raise


@contextmanager
def locked(run: Path) -> Iterator[Path]:
    """Alone in writing `run`, until the block or the process ends, however it ends."""
    path = run / LOCK
    with path.open("a+") as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = " ".join(path.read_text(errors="replace").split())[:80]
            by = f" by {owner}" if owner else ""
            raise UserError(f"{run} is being written{by}: one process at a time") from None
        except OSError as error:
            print(f"{run} cannot be locked ({error.strerror}): let no other process write to it")
        yield path


def claim(run: Path) -> None:
    """What a locked run begins to be written with: who writes, and no halves of files."""
    (run / LOCK).write_text(f"process {os.getpid()} on {socket.gethostname()}\n{ranks.launch()}\n")
    for part in run.glob("*.tmp"):
        part.unlink()


def write_config(run: Path, config: dict[str, Any]) -> dict[str, Any]:
    config = sealed({"format": FORMAT} | config)
    write(run / CONFIG, json.dumps(config, indent=2).encode() + b"\n")
    return config


# writing: checkpoints


def optimizer_tensors(model: Transformer, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its state by name: `exp_avg` of `norm.weight` is "norm.weight.exp_avg"."""
    return {
        f"{name}.{key}": ranks.whole(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def weights_of(model: Transformer) -> dict[str, Tensor]:
    return {name: ranks.whole(tensor) for name, tensor in model.state_dict().items()}


def save_best(run: Path, model: Transformer, step: int, config: dict[str, Any]) -> None:
    weights = weights_of(model)
    if not ranks.is_first():
        return
    record = {"step": step, "config": identity(config), "weights": fingerprint(weights)}
    write(run / BEST, pack(weights, {"checkpoint": json.dumps(sealed(record))}))


def save_checkpoint(
    run: Path,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    step: int,
    best: float,
    keep: int,
    config: dict[str, Any],
) -> None:
    """The index goes last: with it the checkpoint is whole. Only then do old ones go."""
    files: dict[str, Any] = {}
    weights = weights_of(model)  # first: FSDP shards parameters again that a forward has gathered
    state = {OPTIMIZER: optimizer_tensors(model, optimizer), WEIGHTS: weights}
    if not ranks.is_first():
        return
    for kind, tensors in state.items():
        content = pack(tensors)
        write(checkpoint_path(run, step, kind), content)
        files[kind] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    index = sealed({"step": step, "config": identity(config), "best": best, "files": files})
    write(checkpoint_path(run, step, INDEX), json.dumps(index).encode())

    for old in checkpoint_steps(run)[:-keep]:
        for kind in (INDEX, WEIGHTS, OPTIMIZER):
            checkpoint_path(run, old, kind).unlink(missing_ok=True)


def restore(
    run: Path, checkpoint: Checkpoint, model: Transformer, optimizer: torch.optim.Optimizer
) -> None:
    load_weights(checkpoint_path(run, checkpoint.step, WEIGHTS), model, checkpoint.weights)
    state: dict[str, dict[str, Tensor]] = {}
    for full, tensor in checkpoint.optimizer.items():
        name, _, key = full.rpartition(".")
        state.setdefault(name, {})[key] = tensor
    if ranks.is_parallel():
        ranks.load_optimizer(model, optimizer, state)
        return
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    by_index = {i: state[name] for i, name in enumerate(order) if name in state}
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": by_index, "param_groups": groups})


# metrics


def read_metrics(run: Path, step: int) -> tuple[list[dict[str, Any]], list[bytes]]:
    """The records up to a step and their lines. What a killed run wrote after it goes, and a line
    that a kill cut."""
    path = run / METRICS
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    records = []
    try:
        for line in lines:
            if line.endswith(b"\n") and (record := json.loads(line))["step"] <= step:
                records.append(record)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{path} is broken: {reason(error)}") from None
    return records, lines[: len(records)]


# going on


def resume(
    run: Path, config: dict[str, Any], model: Transformer, optimizer: torch.optim.Optimizer
) -> tuple[int, float, list[Any], list[bytes]] | None:
    """Restore the newest checkpoint of a run: its step, the best validation, the metrics up to it
    and their lines; None where there never was a checkpoint."""
    checkpoint = newest_checkpoint(run, config)
    if checkpoint is None:
        if any(record["step"] for record in read_metrics(run, sys.maxsize)[0]):
            raise RunError(f"{run} has no checkpoint to go on from")
        print(f"{run} has no checkpoint yet; beginning at step 0")
        return None
    records, lines = read_metrics(run, checkpoint.step)
    # what the next best has to beat: where the file of an improvement is lost, any will do
    first = records[0].get("val_bpb", math.inf) if records else math.inf
    is_kept = load_best(run, config, model) or checkpoint.best >= first
    restore(run, checkpoint, model, optimizer)
    for kind in (WEIGHTS, OPTIMIZER):  # what a kill left: of one half written or half removed
        for step in {*checkpoint_steps(run, kind)} - {*checkpoint_steps(run)}:
            checkpoint_path(run, step, kind).unlink(missing_ok=True)
    return checkpoint.step, checkpoint.best if is_kept else math.inf, records, lines
