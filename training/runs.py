"""The directory of a run: made, locked, written; `native_sparse_attention.runs` reads it."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import shutil
import socket
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from native_sparse_attention import Transformer, runs
from native_sparse_attention.runs import INDEX, OPTIMIZER, WEIGHTS, Checkpoint, checkpoint_path

from .errors import UserError, reason

LOCK, METRICS = "lock", "metrics.jsonl"


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
    if os.name == "nt":  # cannot open a directory
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot
            raise
    finally:
        os.close(handle)


def named(error: OSError, path: Path) -> Exception:
    """The same error, of a file that the user knows: those of a write do not say which."""
    if error.errno is None:
        return UserError(f"{path}: {reason(error)}")
    return OSError(error.errno, error.strerror or os.strerror(error.errno), str(path))


def append(path: Path, line: str) -> None:
    content = line.encode() + b"\n"
    try:
        with path.open("ab", buffering=0) as file:
            while content:
                content = content[file.write(content) :]
    except OSError as error:
        raise named(error, path) from None


# directories


def check_name(folder: Path, name: str) -> None:
    plain = name not in ("", ".", "..") and Path(name).name == name and name.isprintable()
    if not plain:
        raise UserError(f"--name {name!r} is not a plain directory name")
    run = folder / name
    if run.is_dir() and not (run / runs.CONFIG).exists():
        raise UserError(
            f"{run} is there already, and is no run: it has no {runs.CONFIG}. Remove it"
        )
    if run.is_dir():
        raise UserError(f"{run} is there already; --resume {quote(str(run))} goes on")
    if os.path.lexists(run):
        raise UserError(f"{run} is there already, and is no directory")


def one_line(name: str) -> str:
    """A name without line breaks and bytes that are no text."""
    return "".join(c if c.isprintable() else "_" for c in name)


def new_run(folder: Path, name: str | None, stem: str) -> Path:
    """Make the directory of a new run: `name`, or `stem` with the first free number."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = one_line(stem)
    for number in itertools.count(1):
        run = folder / (name or f"{stem}-{number}")
        try:
            run.mkdir()
            break
        except FileExistsError:
            if name:
                check_name(folder, name)
                raise
    return run


def open_folder(
    given: Namespace, stem: str, config: dict[str, Any], held: ExitStack
) -> tuple[Path, dict[str, Any]]:
    """The directory of a run, new or that of `--resume`, and the `config.json` written to it.

    `held` keeps the lock of a new directory; `resume_settings` took that of an old one.
    """
    resumed = "resume" in given
    run: Path = given.resume if resumed else new_run(given.out_dir, given.name, stem)
    try:
        if not resumed:
            held.enter_context(locked(run))
        claim(run)
        config = write_config(run, config)
    except OSError:
        if not resumed:  # without its config.json it could not go on
            shutil.rmtree(run, ignore_errors=True)
        raise
    return run, config


@contextmanager
def locked(run: Path) -> Iterator[Path]:
    """Alone in writing `run`, until the block or the process ends, however it ends."""
    path = run / LOCK
    with path.open("a+") as file:
        try:
            take(file)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):
                owner = " ".join(path.read_text(errors="replace").split())[:80]
                by = f" by {owner}" if owner else ""
                raise UserError(f"{run} is being written{by}: one process at a time") from None
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
                raise named(error, path) from None
            print(f"{run} cannot be locked ({error.strerror}): let no other process write to it")
        yield path


def take(file: Any) -> None:
    """Lock an open file for this process, at once or not at all."""
    try:
        import fcntl
    except ImportError:  # Windows: a byte past the text, which stays readable for others
        import msvcrt

        windows: Any = msvcrt
        file.seek(2**30)
        windows.locking(file.fileno(), windows.LK_NBLCK, 1)
        file.seek(0)
        return
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def claim(run: Path) -> None:
    """What a locked run begins to be written with: who writes, and no halves of files."""
    path = run / LOCK
    try:
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    except OSError as error:
        raise named(error, path) from None
    for part in run.glob("*.tmp"):
        part.unlink()


def write_config(run: Path, config: dict[str, Any]) -> dict[str, Any]:
    config = {"format": runs.FORMAT} | config
    config["sha256"] = runs.checksum(config)
    write(run / runs.CONFIG, json.dumps(config, indent=2).encode() + b"\n")
    return config


# checkpoints


def optimizer_tensors(model: Transformer, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its state by name: `exp_avg` of `norm.weight` is "norm.weight.exp_avg"."""
    return {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def save_best(run: Path, model: Transformer, step: int, config: dict[str, Any]) -> None:
    weights = model.state_dict()
    record = {"step": step, "config": runs.identity(config), "weights": runs.fingerprint(weights)}
    write(run / runs.BEST, runs.pack(weights, record))


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
    weights = model.state_dict()
    common = {"step": step, "config": runs.identity(config)}
    record = common | {"weights": runs.fingerprint(weights)}
    files: dict[str, Any] = {}
    for kind, tensors in (
        (OPTIMIZER, optimizer_tensors(model, optimizer)),
        (WEIGHTS, weights),
    ):
        content = runs.pack(tensors, record)
        write(checkpoint_path(run, step, kind), content)
        files[kind] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        record = record | {"optimizer": files[kind]["sha256"]}
    index = runs.seal(common | {"best": best, "files": files})
    write(checkpoint_path(run, step, INDEX), index.encode())

    for old in runs.checkpoint_steps(run)[:-keep]:
        remove_checkpoint(run, old)


def remove_checkpoint(run: Path, step: int) -> None:
    for kind in (INDEX, WEIGHTS, OPTIMIZER):
        checkpoint_path(run, step, kind).unlink(missing_ok=True)


def restore(
    run: Path, found: Checkpoint, model: Transformer, optimizer: torch.optim.Optimizer
) -> None:
    runs.load_weights(checkpoint_path(run, found.step, WEIGHTS), model, found.weights)
    path, parameters = checkpoint_path(run, found.step, OPTIMIZER), dict(model.named_parameters())
    state: dict[str, dict[str, Any]] = {}
    for full, tensor in found.optimizer.items():
        name, _, key = full.rpartition(".")
        parameter = parameters.get(name)
        # a wrong shape would be read past its end by the fused update
        shapes = {} if parameter is None else {
            "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape, "step": torch.Size(),
        }  # fmt: skip
        if shapes.get(key) != tensor.shape or tensor.dtype != torch.float32:
            what = f"{full} is {tensor.dtype} {list(tensor.shape)}"
            raise runs.RunError(f"{path} is of another model: {what}")
        state.setdefault(name, {})[key] = tensor
    if short := [name for name, held in state.items() if len(held) != 3]:
        raise runs.RunError(f"{path} is of another model: {short[0]} lacks a part of its state")
    names = {id(parameter): name for name, parameter in parameters.items()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    by_index = {i: state[name] for i, name in enumerate(order) if name in state}
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": by_index, "param_groups": groups})


# metrics


def read_metrics(run: Path) -> tuple[list[dict[str, Any]], list[bytes], list[str]]:
    """The records of all steps, their lines, and what is wrong with them."""
    path, notes = run / METRICS, []
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return [], [], [f"{path} is missing: it begins anew"]
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
        notes.append(f"{path} ends in a torn line, which is dropped")
    records: list[dict[str, Any]] = []
    try:
        for line in lines:
            record = json.loads(line)
            check_metrics(record, records[-1]["step"] if records else -1)
            records.append(record)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise UserError(f"{path} is broken: {reason(error)}") from None
    return records, lines, notes


def missing_lines(
    run: Path, records: list[dict[str, Any]], step: int, log_every: int, eval_every: int
) -> list[str]:
    got = {record["step"] for record in records}
    due = (s for s in range(step + 1) if s % log_every == 0 or s % eval_every == 0)
    if not (gone := [s for s in due if s not in got]):
        return []
    some = ", ".join(map(str, gone[:5])) + (", ..." if len(gone) > 5 else "")
    return [f"{run / METRICS} lacks {len(gone):,} lines up to step {step:,}: of step {some}"]


def check_metrics(record: Any, before: int) -> None:
    if type(record["step"]) is not int or record["step"] <= before:
        raise ValueError(f"step {record['step']!r} follows step {before}")
    for name in ("bpb", "val_bpb"):
        if type(record.get(name, 0.0)) not in (int, float):
            raise ValueError(f"{name} of step {record['step']} is {record[name]!r}")
        float(record.get(name, 0.0))  # an OverflowError
    if record["step"] == 0 and "val_bpb" not in record:
        raise ValueError("step 0 has no val_bpb")
