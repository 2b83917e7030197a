"""The files of a training run, as `train_enwik8.py` writes them, verified before they are used.

    config.json                  every setting, the data's SHA-256, a checksum of both
    step-00000100.safetensors    weights, with the step and checksums of the tensors, of the
                                 optimizer file and of the configuration
    step-00000100.optimizer      optimizer state, also safetensors, with step and other checksums
    step-00000100.json           the index: size and SHA-256 of both files, step, best validation,
                                 checksum of the configuration
    best.safetensors             the weights that validated best

The checksum of the configuration leaves out CHANGEABLE: a resumed run may change those settings.
A missing or truncated file is torn, as after an interrupted copy or on a full disk; the
readers then use an older checkpoint. Any other difference raises an error that names the file.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

FORMAT = 2
# fixed length of a record, so that a shorter file is a torn file
RECORD = 1024
CONFIG, BEST = "config.json", "best.safetensors"
WEIGHTS, OPTIMIZER, INDEX = ".safetensors", ".optimizer", ".json"
# settings that a resumed run may change: its length, and settings that do not affect the metrics
CHANGEABLE = {
    *("backend", "device", "threads", "steps", "compile", "activation_checkpointing", "data"),
    *("sample_every", "sample_length", "save_every", "keep"),
}
SHAPE = ("dim", "depth", "heads", "kv_heads", "dim_head", "ff_expansion_factor")
SPARSE = (
    *("sliding_window_size", "compress_block_size", "compress_block_sliding_stride"),
    *("selection_block_size", "num_selected_blocks", "num_initial_blocks", "num_local_blocks"),
    *("importance", "selection_stride", "backend"),
)


class RunError(ValueError):
    """A file of a run differs from the written file; the message names it."""


class TornError(RunError):
    """A file of a run is missing or ends early: an older checkpoint may be usable."""


@dataclass
class Checkpoint:
    """`best` is the best validation up to `step`, in bits per byte."""

    step: int
    best: float
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def library() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError(
            "the files of a run need safetensors: pip install 'native-sparse-attention[train]'"
        ) from None
    return safetensors.torch


def checksum(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def seal(record: Mapping[str, Any]) -> str:
    """The record with its own checksum, RECORD characters long."""
    text = json.dumps({**record, "sha256": checksum(record)}, sort_keys=True)
    return text.ljust(RECORD)


def unseal(text: str) -> dict[str, Any]:
    """The record that `seal` got; ValueError for a text that `seal` did not return."""
    record = json.loads(text)
    del record["sha256"]
    if seal(record) != text:
        raise ValueError("its checksum is wrong")
    return record


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def pack(tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> bytes:
    """A safetensors file that carries a sealed record."""
    # clones, because safetensors refuses tensors that share memory
    own = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    return library().save(own, {"checkpoint": seal(record)})


def record_of(content: bytes) -> dict[str, Any] | None:
    """The record in a safetensors file, possibly torn or damaged; None if unreadable."""
    try:
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        return unseal(header["__metadata__"]["checkpoint"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


# configuration


def read_config(run: Path) -> dict[str, Any]:
    """The contents of config.json, before `verify_config`.

    Raises:
        FileNotFoundError: `run` holds no config.json.
        RunError: the file cannot be read, or an older version of the script wrote it.
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
    return config


def verify_config(run: Path, config: Mapping[str, Any]) -> None:
    rest = {name: value for name, value in config.items() if name != "sha256"}
    if config.get("sha256") != checksum(rest):
        raise RunError(
            f"{run / CONFIG} is not what was written: its checksum is wrong; "
            "restore it, and give changes as options of --resume"
        )


def identity(config: Mapping[str, Any]) -> str:
    """The checksum of the settings that affect a run's numbers; all checkpoint files carry it."""
    settings = {k: v for k, v in config["settings"].items() if k not in CHANGEABLE}
    rest = {k: v for k, v in config.items() if k not in ("settings", "sha256")}
    return checksum(rest | {"settings": settings})


def model_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of Transformer from the settings of a run."""
    sparse = settings["attention"] != "dense"
    given: dict[str, Any] = {name: settings[name] for name in SPARSE}
    if settings["attention"] == "one-softmax":
        given |= dict(branches=("selected",), rank_rotated=True)
    local = settings.get("local_layers", "none")
    return {
        "num_tokens": 256,
        "use_sparse_attn": sparse,
        "activation_checkpointing": settings["activation_checkpointing"] == "on",
        "sparse_attn_kwargs": given if sparse else None,
        "local_layers": [] if local == "none" else [int(index) for index in local.split(",")],
        **{name: settings[name] for name in SHAPE},
    }


# checkpoints


def checkpoint_path(run: Path, step: int, kind: str) -> Path:
    return run / f"step-{step:08d}{kind}"


def checkpoint_steps(run: Path) -> list[int]:
    """The steps with at least one file, in ascending order."""
    stems = {path.stem.removeprefix("step-") for path in run.glob("step-*") if is_part(path)}
    return sorted(int(stem) for stem in stems)


def is_part(path: Path) -> bool:
    digits = path.stem.removeprefix("step-")
    number = len(digits) >= 8 and digits.isascii() and digits.isdigit()
    return number and path.suffix in (WEIGHTS, OPTIMIZER, INDEX)


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise TornError(f"{path} is missing") from None


def check_record(path: Path, record: Mapping[str, Any], step: int | None, config: str) -> None:
    if step is not None and record.get("step") != step:
        raise RunError(f"{path} is of step {record.get('step')}, not of step {step}")
    if record.get("config") != config:
        raise RunError(f"{path} is of another run: its configuration is not that of {CONFIG}")


def read_checkpoint(run: Path, step: int, config: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint of a step, every byte of it verified.

    Raises:
        TornError: a file of the checkpoint is missing or ends early.
        RunError: a file is damaged, or belongs to another step or run.
    """
    mine = identity(config)
    index_path = checkpoint_path(run, step, INDEX)
    content = read(index_path)
    if len(content) < RECORD:
        raise TornError(f"{index_path} is torn: {len(content):,} of {RECORD:,} bytes")
    try:
        index = unseal(content.decode())
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RunError(f"{index_path} is damaged: its checksum is wrong") from None
    check_record(index_path, index, step, mine)

    tensors = {}
    for kind in (WEIGHTS, OPTIMIZER):
        path = checkpoint_path(run, step, kind)
        content, expected = read(path), index["files"][kind]
        if hashlib.sha256(content).hexdigest() != expected["sha256"]:
            if record := record_of(content):
                check_record(path, record, step, mine)
            if len(content) < expected["bytes"]:
                raise TornError(f"{path} is torn: {len(content):,} of {expected['bytes']:,} bytes")
            raise RunError(f"{path} is damaged: its SHA-256 is not that in {index_path.name}")
        if (record := record_of(content)) is None:
            raise RunError(f"{path} is broken: it carries no record")
        check_record(path, record, step, mine)
        tensors[kind] = library().load(content)
    return Checkpoint(step, index["best"], tensors[WEIGHTS], tensors[OPTIMIZER])


def newest_checkpoint(run: Path, config: Mapping[str, Any]) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, and the errors of torn newer ones. None if there is no file, or
    only a torn one of step 0: its writer was killed before it had trained.

    Raises:
        RunError: a checkpoint is wrong rather than torn, or all checkpoints are torn.
    """
    while True:
        torn: list[str] = []
        steps = checkpoint_steps(run)
        for step in reversed(steps):
            try:
                return read_checkpoint(run, step, config), torn
            except TornError as error:
                torn.append(str(error))
            except RunError as error:
                raise RunError(f"{error}; remove step {step} to use the one before") from None
        if steps == checkpoint_steps(run):  # otherwise the writer replaced the files meanwhile
            break
    if torn and steps != [0]:
        raise RunError(f"{run} has no whole checkpoint: {torn[0]}")
    return None, torn


def load_weights(path: Path, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise RunError(f"{path} is of another model: {reason}") from None


def load_best(run: Path, config: Mapping[str, Any], model: nn.Module) -> bool:
    """Load the weights that validated best, verified; False if there are none yet.

    Raises:
        TornError: the file ends early.
        RunError: the file is damaged, or belongs to another run.
    """
    path = run / BEST
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    try:
        if (record := record_of(content)) is None:
            raise ValueError("it carries no record")
        check_record(path, record, None, identity(config))
        tensors = library().load(content)
        if fingerprint(tensors) != record["weights"]:
            raise ValueError("its checksum is wrong")
    except RunError:
        raise
    except Exception as error:  # safetensors raises its own error types
        # all weight files of a model have one length, because records have
        size = len(pack(model.state_dict(), {"step": 0, "config": "0" * 64, "weights": "0" * 64}))
        if len(content) < size:
            raise TornError(f"{path} is torn: {len(content):,} of {size:,} bytes") from None
        raise RunError(f"{path} is damaged: {error}") from None
    load_weights(path, model, tensors)
    return True


def load_run(run: Path, config: Mapping[str, Any], model: nn.Module, which: str) -> list[str]:
    """Load the "best" or the "last" weights of a run; returns notes on torn files.

    The last weights are loaded if there are no best ones yet or their file is torn.
    """
    torn = []
    if which == "best":
        try:
            if load_best(run, config, model):
                return []
        except TornError as error:
            torn.append(str(error))
    found, passed = newest_checkpoint(run, config)
    if found is None:
        raise RunError(f"{run} has no checkpoint yet")
    load_weights(checkpoint_path(run, found.step, WEIGHTS), model, found.weights)
    return [f"{text}; taking step {found.step}" for text in torn + passed]


Model = TypeVar("Model", bound="FromRun")


class FromRun(nn.Module):
    """A module that loads the weights of a run: Transformer."""

    @classmethod
    def from_run(
        cls: type[Model],
        path: str | Path,
        device: torch.device | str | None = None,
        *,
        which: str = "best",
    ) -> Model:
        """The model of a run of `train_enwik8.py`, in eval mode, from verified files.

        Its layers use `backend="auto"`. Weights are float32: a run with `precision` bf16 computes
        in `torch.autocast`.

        Args:
            path: directory of the run.
            device: device of the weights; the CPU by default.
            which: "best", the weights that validated best, or "last", the newest checkpoint. The
                newest whole checkpoint is loaded if a file is missing or truncated, with a warning,
                or if there are no best weights yet.

        Raises:
            FileNotFoundError: `path` is no directory of a run.
            ValueError: a file is damaged or of another run; the message names it.
            ImportError: safetensors is not installed.
        """
        if which not in ("best", "last"):
            raise ValueError(f"which must be 'best' or 'last', got {which!r}")
        run = Path(path)
        config = read_config(run)
        verify_config(run, config)
        # the loaded weights replace the random ones, whatever the defaults are
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            model = cls(**model_arguments({**config["settings"], "backend": "auto"})).float()
            notes = load_run(run, config, model, which)
        for note in notes:
            warnings.warn(note, stacklevel=2)
        return model.to(torch.device("cpu") if device is None else device).eval()
