"""Train a byte-level language model with Native Sparse Attention, and watch it learn.

    python train_enwik8.py                                     a run with this device's preset
    python train_enwik8.py --resume runs/NAME                  go on exactly where a run stopped
    python train_enwik8.py --sample runs/NAME --prompt TEXT    stream text from a trained run

Everything that decides a run is a setting of the table below, written to `runs/NAME/config.json`.
The bytes of a step are drawn from (seed, step) alone, so a run that was killed and resumed equals
one that was not. `data/README.md` says where the bytes come from.
"""

from __future__ import annotations

import argparse
import codecs
import gzip
import hashlib
import http.client
import io
import itertools
import json
import math
import os
import queue
import signal
import sys
import sysconfig
import threading
import time
import urllib.request
import zipfile
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from native_sparse_attention import Transformer


class UserError(Exception):
    """What only the user can put right: told in one line, exit status 2."""


def reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


# settings


def number(kind: type, least: int = 0) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if not least <= (value := kind(text)) < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is out of range, expected {least} or more")
        return value

    read.__name__ = kind.__name__
    return read


count, whole, real = number(int, 1), number(int), number(float)
Kind = Callable[[str], Any] | tuple[str, ...]

# name: (type or choices, on CPU, on CUDA, meaning)
SETTINGS: dict[str, tuple[Kind, Any, Any, str]] = {
    "data": (str, "auto", "auto", "auto, enwik8, stdlib or the path of any file of bytes"),
    "pack": (str, "", "", "text that begins a document, as <page> in enwik8; they keep apart then"),
    "attention": (("sparse", "dense"), "sparse", "sparse", "native sparse or full attention"),
    "dim": (count, 128, 512, "model width"),
    "depth": (count, 2, 6, "layers"),
    "heads": (count, 4, 8, "query heads"),
    "kv_heads": (count, 2, 4, "key and value heads"),
    "dim_head": (count, 32, 64, "width of a head"),
    "ff_expansion_factor": (real, 4.0, 4.0, "feed-forward width over model width"),
    "sliding_window_size": (count, 32, 64, "w, tokens back in the window branch"),
    "compress_block_size": (count, 8, 16, "l, tokens in a compressed block"),
    "compress_block_sliding_stride": (count, 4, 8, "d, tokens between compressed blocks"),
    "selection_block_size": (count, 8, 16, "s, tokens in a selected block"),
    "num_selected_blocks": (whole, 4, 4, "n, blocks selected per query"),
    "importance": (("logits", "probs"), "logits", "logits", "how blocks are ranked"),
    "selection_stride": (count, 1, 1, "R, neighbouring tokens that share a selection"),
    "backend": (("auto", "eager", "flex", "triton"), "auto", "auto", "who computes attention"),
    "seq_len": (count, 256, 512, "tokens in a training sequence"),
    "batch_size": (count, 8, 32, "sequences in a forward pass"),
    "accumulate": (count, 1, 1, "forward passes in a step"),
    "steps": (count, 600, 5000, "optimizer steps in all"),
    "lr": (real, 2e-3, 1e-3, "peak learning rate"),
    "warmup": (whole, 50, 200, "steps of linear warm-up, before a cosine down to a tenth"),
    "weight_decay": (real, 0.1, 0.1, "of matrices, not of vectors"),
    "clip": (real, 1.0, 1.0, "largest gradient norm"),
    "seed": (whole, 0, 0, "of weights, data order and sampled text"),
    "precision": (("fp32", "bf16"), "fp32", "bf16", "of the forward pass; weights are fp32"),
    "compile": (
        ("auto", "on", "off"),
        "auto",
        "auto",
        "torch.compile; auto: on CUDA",
    ),
    "activation_checkpointing": (("on", "off"), "off", "off", "less memory, more time"),
    "log_every": (count, 1, 10, "steps between lines of metrics.jsonl"),
    "eval_every": (count, 50, 250, "steps between validations"),
    "eval_bytes": (count, 2**15, 2**20, "validation bytes read each time"),
    "test_bytes": (count, 2**16, 5 * 10**6, "test bytes read at the end"),
    "sample_every": (whole, 200, 1000, "steps between sampled texts; 0: none"),
    "sample_length": (count, 256, 512, "bytes of a sampled text"),
    "save_every": (count, 100, 500, "steps between checkpoints"),
    "keep": (count, 2, 2, "checkpoints kept, besides the best"),
    "threads": (
        count,
        None,
        None,
        "CPU threads; others may sum in another order (default: half the cores)",
    ),
    "device": (str, None, None, "cpu, cuda, cuda:1 ... (default: cuda where there is one)"),
}
SHAPE = ["dim", "depth", "heads", "kv_heads", "dim_head", "ff_expansion_factor"]
SPARSE = [
    *("sliding_window_size", "compress_block_size", "compress_block_sliding_stride"),
    *("selection_block_size", "num_selected_blocks", "importance", "selection_stride", "backend"),
]
SAMPLING = {"sample", "prompt", "length", "temperature", "filter_thres", "top_p"}
HARDWARE = {"backend", "device", "threads"}
# what --resume may change: the length of the run, and what leaves the metrics alone
CHANGEABLE = HARDWARE | {
    *("steps", "compile", "activation_checkpointing"),
    *("sample_every", "sample_length", "save_every", "keep"),
}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UserError(message)


def parse(argv: list[str] | None) -> Namespace:
    """The options given on the command line; those not given are not there."""
    about = (__doc__ or "").splitlines()[0]
    parser = Parser(description=about, argument_default=argparse.SUPPRESS, allow_abbrev=False)
    parser.add_argument("--name", help="directory under runs/; never one that is there already")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with the run in RUN")
    parser.add_argument("--tensorboard", action="store_true", help="also write TensorBoard events")
    group = parser.add_argument_group("settings (CPU preset / CUDA preset)")
    for name, (kind, cpu, cuda, text) in SETTINGS.items():
        preset = "" if cpu is None else f" ({cpu})" if cpu == cuda else f" ({cpu} / {cuda})"
        typing: Any = {"type": kind, "metavar": "X"} if callable(kind) else {"choices": kind}
        group.add_argument(option(name), help=text + preset, **typing)
    group = parser.add_argument_group("sampling (also --seed, --device, --threads, --backend)")
    group.add_argument("--sample", type=Path, metavar="RUN", help="stream text from the run in RUN")
    group.add_argument("--prompt", help="text to go on from (a line break)")
    group.add_argument("--length", type=count, help="bytes to sample (512)")
    group.add_argument("--temperature", type=real, help="0: the likeliest byte each time (1.0)")
    group.add_argument("--filter-thres", type=real, help="share of unlikely bytes left out (0.9)")
    group.add_argument("--top-p", type=real, help="nucleus sampling (off)")
    given = parser.parse_args(argv)

    names = set(vars(given))
    if "sample" in given:
        mode, refused = "--sample", names - SAMPLING - HARDWARE - {"seed"}
    elif "resume" in given:
        mode, refused = "--resume", names & (SAMPLING | {"name"})
    else:
        mode, refused = "training: it needs --sample RUN", names & SAMPLING
    if refused:
        raise UserError(f"{option(min(refused))} does not go with {mode}")
    if "data" in given and given.data not in ("auto", "enwik8", "stdlib"):
        given.data = os.path.abspath(given.data)
    return given


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


def new_settings(given: Namespace) -> Namespace:
    """The settings of a new run: what was given, the rest from the preset of the device."""
    device = find_device(getattr(given, "device", None))
    column = 2 if device.startswith("cuda") else 1
    cfg = Namespace(**{name: getattr(given, name, row[column]) for name, row in SETTINGS.items()})
    # half the cores: threads wait for each other, and all of them for one whose core is taken
    cfg.device, cfg.threads = device, cfg.threads or max(1, torch.get_num_threads() // 2)
    for name in ("compress_block_size", "selection_block_size"):
        if cfg.attention == "sparse" and cfg.seq_len < (size := getattr(cfg, name)):
            raise UserError(f"--seq-len {cfg.seq_len} is shorter than {option(name)} {size}")
    return cfg


def find_device(name: str | None) -> str:
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise UserError(f"device {name!r} is not usable here; give --device cpu") from None
    return name


# data

DATA = Path(__file__).resolve().parent / "data"
URL = "http://mattmahoney.net/dc/enwik8.zip"
ZIP_SIZE = 36_445_475
ZIP_SHA256 = "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"
ENWIK8_SHA256 = "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"


def load_data(which: str) -> tuple[str, bytes]:
    """The corpus and its name; `auto` is enwik8 where it is or can be had, else the stdlib."""
    if which == "stdlib":
        return which, stdlib_corpus()
    if which not in ("auto", "enwik8"):
        return which, read_bytes(Path(which))
    try:
        return "enwik8", enwik8()
    except DownloadError as error:
        if which == "enwik8":
            raise UserError(f"{error}; data/README.md says how to place the file by hand") from None
        print(f"{error}; training on the embedded corpus, the standard library's source files")
        return "stdlib", stdlib_corpus()


def enwik8(
    folder: Path = DATA,
    url: str = URL,
    zip_size: int = ZIP_SIZE,
    zip_sha256: str = ZIP_SHA256,
    sha256: str = ENWIK8_SHA256,
) -> bytes:
    """enwik8 from `folder`, downloaded into it first where it is not there."""
    there = [path for name in ("enwik8.gz", "enwik8.zip") if (path := folder / name).exists()]
    if not there:
        download(url, folder / "enwik8.zip", zip_size, zip_sha256)
    path = there[0] if there else folder / "enwik8.zip"
    content = read_bytes(path)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise UserError(f"{path} is not enwik8 (wrong SHA-256): remove it, or name it with --data")
    return content


def read_bytes(path: Path) -> bytes:
    """A file of bytes, unpacked if it is called .gz or .zip (then with one file in it)."""
    try:
        if path.suffix == ".gz":
            return gzip.decompress(path.read_bytes())
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                names = [name for name in archive.namelist() if not name.endswith("/")]
                if len(names) != 1:
                    raise UserError(f"{path} holds {len(names)} files, expected one")
                return archive.read(names[0])
    except (zipfile.BadZipFile, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path} is broken: {reason(error)}") from None
    return path.read_bytes()


class DownloadError(Exception):
    """The network or the far end failed; the embedded corpus may stand in."""


def download(url: str, path: Path, size: int, sha256: str, timeout: float = 5.0) -> None:
    """Fetch `url` to `path`: resumed from `path.part`, verified, renamed; one attempt.

    What came before a connection broke stays in `path.part`; what is complete but wrong is removed.
    """
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(exist_ok=True)
        have = part.stat().st_size if part.exists() else 0
        if have < size:
            fetch(url, part, have, size, timeout)
        have, digest = part.stat().st_size, hashlib.sha256(part.read_bytes()).hexdigest()
        if have < size:
            raise DownloadError(f"{url} broke off at {have:,} of {size:,} bytes")
        if have > size or digest != sha256:
            part.unlink()
            raise DownloadError(f"{url} sent other bytes than expected (wrong size or SHA-256)")
        os.replace(part, path)
    except (OSError, http.client.HTTPException) as error:
        raise DownloadError(f"cannot download {url} ({error})") from None


def fetch(url: str, part: Path, have: int, size: int, timeout: float, pace: int = 2**14) -> None:
    """Append to `part` from byte `have` on; a source slower than `pace` bytes/s is given up."""
    headers = {"User-Agent": "train_enwik8"} | ({"Range": f"bytes={have}-"} if have else {})
    with connect(urllib.request.Request(url, headers=headers), timeout) as response:
        if response.status != 206:  # the server sends the whole file, not the range
            have = 0
        style: dict[str, Any] = {"unit": "B", "unit_scale": True, "desc": part.stem}
        with (
            part.open("ab" if have else "wb") as file,
            tqdm(total=size, initial=have, **style) as bar,
        ):
            start, got = time.monotonic(), 0
            while chunk := response.read1(2**16):
                file.write(chunk)
                bar.update(len(chunk))
                got += len(chunk)
                waited = time.monotonic() - start
                if waited > 2 * timeout and got < pace * waited:
                    raise TimeoutError("too slow")
                if have + got > size:
                    break


def connect(request: urllib.request.Request, timeout: float) -> Any:
    """urlopen within `timeout`, the name lookup included, which a socket's own timeout is not."""
    answer: queue.Queue[Any] = queue.Queue()

    def attempt() -> None:
        try:
            answer.put(urllib.request.urlopen(request, timeout=timeout))
        except Exception as error:
            answer.put(error)

    threading.Thread(target=attempt, daemon=True).start()
    try:
        result = answer.get(timeout=timeout)
    except queue.Empty:
        raise TimeoutError(f"no answer within {timeout:g} s") from None
    if isinstance(result, Exception):
        raise result
    return result


def stdlib_corpus() -> bytes:
    """The embedded corpus: the source files of this Python's standard library, by sorted path.

    Tests, installed packages and the files that describe this build are left out, so that every
    machine with the same Python release has the same bytes.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = {
        path.relative_to(root).as_posix(): path
        for path in root.rglob("*.py")
        if not out.intersection(path.relative_to(root).parts)
        and not path.is_symlink()
        and not path.name.startswith(("_sysconfigdata", "sitecustomize", "usercustomize"))
        and "config-" not in path.relative_to(root).parts[0]
    }
    if not files:
        raise UserError(f"no source files of the standard library in {root}; give --data PATH")
    return b"".join(files[name].read_bytes() for name in sorted(files))


def split(corpus: bytes, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first 90 % to train, the next 5 % to validate, the last 5 % to test."""
    data = np.frombuffer(corpus, dtype=np.uint8)
    train, valid, test = np.split(data, [len(data) * 90 // 100, len(data) * 95 // 100])
    if min(len(valid), len(test)) <= seq_len:
        need = 20 * (seq_len + 1)
        raise UserError(f"the data has {len(data):,} bytes; --seq-len {seq_len} needs {need:,}")
    return train, valid, test


def windows(data: np.ndarray, starts: np.ndarray, cfg: Namespace) -> Tensor:
    """The `seq_len + 1` bytes from each start, [b, n + 1]."""
    ids = data[starts[:, None] + np.arange(cfg.seq_len + 1)]
    return torch.from_numpy(ids.astype(np.int64))


def segments(ids: Tensor, marker: str) -> Tensor:
    """The document of each byte [b, n], counted along a row: one begins with each marker in it."""
    text = torch.tensor(list(marker.encode()))
    begins = torch.zeros_like(ids)
    if ids.shape[1] >= len(text):
        begins[:, : ids.shape[1] - len(text) + 1] = (ids.unfold(1, len(text), 1) == text).all(-1)
    return begins.cumsum(1)


def batches(data: np.ndarray, cfg: Namespace, step: int) -> Iterator[Tensor]:
    """What step `step` learns from: a function of (seed, step) and nothing else."""
    draw = np.random.default_rng([cfg.seed, step])
    shape = cfg.accumulate, cfg.batch_size
    for starts in draw.integers(len(data) - cfg.seq_len, size=shape):
        yield windows(data, starts, cfg)


# model


def build(cfg: Namespace) -> Transformer:
    torch.manual_seed(cfg.seed)
    try:
        model = Transformer(
            num_tokens=256,
            use_sparse_attn=cfg.attention == "sparse",
            activation_checkpointing=cfg.activation_checkpointing == "on",
            sparse_attn_kwargs={name: getattr(cfg, name) for name in SPARSE},
            **{name: getattr(cfg, name) for name in SHAPE},
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    return model.to(cfg.device)


def autocast(cfg: Namespace) -> AbstractContextManager[Any]:
    on = cfg.precision == "bf16"
    return torch.autocast(torch.device(cfg.device).type, dtype=torch.bfloat16, enabled=on)


def compiled(model: Transformer, cfg: Namespace) -> Callable[..., Tensor]:
    """The model through torch.compile where asked for or, with auto, on CUDA if it works there.

    Without the kernels, a compiled graph forms T x S scores, which do not fit for long texts.
    """
    scores = cfg.attention == "sparse" and cfg.backend in ("eager", "flex") and cfg.seq_len > 8192
    # nor is it known beforehand how long rows of packed documents are
    helps = cfg.device.startswith("cuda") and not scores and not cfg.pack
    if cfg.compile == "off" or (cfg.compile == "auto" and not helps):
        return model
    # CUDA graphs leave no launches to wait for, but write the next gradients over the last
    graphs = cfg.device.startswith("cuda") and cfg.accumulate == 1
    program = torch.compile(model, mode="reduce-overhead" if graphs else "default")

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        if graphs:
            torch.compiler.cudagraph_mark_step_begin()
        return program(*args, **kwargs)

    ids = torch.zeros(cfg.batch_size, cfg.seq_len + 1, dtype=torch.long, device=cfg.device)
    try:
        for learning in (True, False):  # two programs
            with autocast(cfg), torch.set_grad_enabled(learning):
                loss = forward(ids, return_loss=True)
            if learning:
                loss.backward()
        return forward
    except Exception as error:  # of a compiler, of any kind
        if cfg.compile == "on":
            raise UserError(f"torch.compile failed, give --compile off: {reason(error)}") from None
        print(f"torch.compile failed, going on without it: {reason(error)}")
        return model
    finally:
        model.zero_grad()


def loss_of(forward: Callable[..., Tensor], ids: Tensor, cfg: Namespace) -> Tensor:
    """Of predicting bytes [b, n + 1], each from those of its row or of its document there."""
    named = {"segment_ids": segments(ids, cfg.pack)} if cfg.pack else {}
    with autocast(cfg):
        return forward(ids.to(cfg.device), return_loss=True, **named)


def build_optimizer(model: Transformer, cfg: Namespace) -> torch.optim.AdamW:
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = torch.device(cfg.device).type in ("cpu", "cuda", "mps")
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=(0.9, 0.95), fused=fused)


def learning_rate(cfg: Namespace, step: int) -> float:
    if step < cfg.warmup:
        return cfg.lr * step / cfg.warmup
    done = (step - cfg.warmup) / max(1, cfg.steps - cfg.warmup)
    return cfg.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


@torch.no_grad()
def evaluate(forward: Callable[..., Tensor], data: np.ndarray, cfg: Namespace, size: int) -> float:
    """Bits per byte over about `size` bytes, in windows spread evenly over `data`."""
    shape = max(1, min(size, len(data)) // (cfg.batch_size * cfg.seq_len)), cfg.batch_size
    starts = np.linspace(0, len(data) - cfg.seq_len - 1, math.prod(shape)).astype(np.int64)
    inputs = (windows(data, rows, cfg) for rows in starts.reshape(shape))
    losses = [loss_of(forward, ids, cfg).item() for ids in inputs]
    return sum(losses) / len(losses) / math.log(2)


@torch.no_grad()
def generate(
    model: Transformer, cfg: Namespace, prompt: bytes, length: int, **how: Any
) -> Iterator[str]:
    """Text after `prompt`, byte by byte from the KV cache, decoded as it comes.

    Its generator is its own: sampling leaves the randomness of training alone.
    """
    generator = torch.Generator(cfg.device).manual_seed(cfg.seed)
    ids = torch.tensor([list(prompt)], device=cfg.device)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with autocast(cfg):
        for token in model.stream(ids, len(prompt) + length, generator=generator, **how):
            yield printable(decoder.decode(bytes(token.tolist())))
    yield printable(decoder.decode(b"", final=True))


def printable(text: str) -> str:
    """An untrained model says control characters too, which a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


# run


def write(path: Path, content: bytes) -> None:
    """The whole of `content` or nothing."""
    part = path.with_name(path.name + ".tmp")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def new_run(name: str | None, stem: str) -> Path:
    """Make the directory of a new run: `name`, or `stem` with the first free number."""
    if name is not None and (not name or Path(name).name != name):
        raise UserError(f"--name {name!r} is not a plain directory name")
    Path("runs").mkdir(exist_ok=True)
    for number in itertools.count(1):
        run = Path("runs", name or f"{stem}-{number}")
        try:
            run.mkdir()
            break
        except FileExistsError:
            if name:
                raise UserError(f"{run} is there already; --resume {run} goes on") from None
    return run


def open_run(run: Path, given: Namespace) -> tuple[Namespace, dict[str, Any]]:
    """The settings of a run, changed by what was given and may change, and all of its config."""
    path = run / "config.json"
    if not path.is_file():
        raise UserError(f"{run} is not a run directory: there is no {path}")
    try:
        config = json.loads(path.read_text())
        settings = {"pack": ""} | config["settings"]  # runs from before there was one
        saved = {name: settings[name] for name in SETTINGS}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is broken: {reason(error)}") from None
    for name in sorted(SETTINGS.keys() & vars(given).keys()):
        value, old = getattr(given, name), saved[name]
        if "sample" in given or name in CHANGEABLE:
            saved[name] = value
        elif value not in (old, "auto"):
            raise UserError(f"{option(name)} {value} was {old} in {path}: it cannot change")
    return Namespace(**saved), config


def checkpoints(run: Path) -> list[Path]:
    return sorted(run.glob("step-*.safetensors"))


def save_weights(path: Path, model: Transformer) -> None:
    # clones, as safetensors refuses tensors that share memory
    tensors = {name: t.detach().cpu().clone() for name, t in model.state_dict().items()}
    write(path, safetensors.torch.save(tensors))


def load_weights(path: Path, model: Transformer) -> None:
    try:
        model.load_state_dict(safetensors.torch.load(path.read_bytes()))
    except (safetensors.SafetensorError, RuntimeError, ValueError) as error:
        raise UserError(f"{path} is broken or of another model: {reason(error)}") from None


def save_checkpoint(run: Path, model: Transformer, state: dict[str, Any], keep: int) -> None:
    """The state goes first: weights on disk mean that their checkpoint is whole."""
    path = run / f"step-{state['step']:08d}.safetensors"
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write(path.with_suffix(".pt"), buffer.getvalue())
    save_weights(path, model)
    kept = {path.stem for path in checkpoints(run)[-keep:]}
    for old in run.glob("step-*"):
        if old.stem not in kept:
            old.unlink()


def load_checkpoint(run: Path, model: Transformer, optimizer: torch.optim.Optimizer) -> Any:
    """Restore the last checkpoint; its step and the best validation so far."""
    if not (paths := checkpoints(run)):
        raise UserError(f"{run} has no checkpoint to go on from")
    load_weights(paths[-1], model)
    content = io.BytesIO((path := paths[-1].with_suffix(".pt")).read_bytes())
    try:
        state = torch.load(content, map_location="cpu", weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        return state["step"], state["best"]
    except Exception as error:  # torch.load raises whatever the broken bytes lead it to
        raise UserError(f"{path} is broken: {reason(error)}") from None


def load_metrics(run: Path, step: int) -> list[dict[str, Any]]:
    """The records up to `step`; what a killed run wrote after its checkpoint is cut off."""
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    try:
        records = [record for line in lines if (record := json.loads(line))["step"] <= step]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is broken: {reason(error)}") from None
    write(path, b"".join(lines[: len(records)]))
    return records


def draw(run: Path, records: list[dict[str, Any]]) -> None:
    """Bits per byte of training and validation against the step, to loss.png."""
    train = np.array([(r["step"], r["bpb"]) for r in records if "bpb" in r]).reshape(-1, 2)
    valid = np.array([(r["step"], r["val_bpb"]) for r in records if "val_bpb" in r]).reshape(-1, 2)
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    if len(train):
        # a running mean over the past: sums of the last `width` losses
        width = max(1, len(train) // 40)
        sums = np.cumsum(train[:, 1])
        sums[width:] -= sums[:-width].copy()
        mean = sums / np.minimum(np.arange(1, len(train) + 1), width)
        axes.plot(train[:, 0], train[:, 1], color="#4c78a8", alpha=0.25, linewidth=0.8)
        axes.plot(train[:, 0], mean, color="#4c78a8", linewidth=1.6, label="train, running mean")
    red = "#e45756"
    axes.plot(
        valid[:, 0], valid[:, 1], "o-", color=red, markersize=3.5, label="validation", clip_on=False
    )
    where: Any = {"xytext": (0, 8), "textcoords": "offset points", "ha": "right"}
    axes.annotate(f"{valid[-1, 1]:.3f}", valid[-1], color=red, weight="bold", **where)
    axes.set(title=run.name, xlabel="step", ylabel="bits per byte", ylim=(0, None))
    axes.set_xlim(0, max(1, records[-1]["step"]))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write(run / "loss.png", buffer.getvalue())


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


def train(given: Namespace) -> int:
    resumed = "resume" in given
    config: dict[str, Any] = {}
    if resumed:
        run: Path = given.resume
        cfg, config = open_run(run, given)
        find_device(cfg.device)
    else:
        cfg = new_settings(given)
    writer = tensorboard() if "tensorboard" in given else None
    torch.set_num_threads(cfg.threads)
    torch.set_float32_matmul_precision("high")

    cfg.data, corpus = load_data(cfg.data)
    about = {"bytes": len(corpus), "sha256": hashlib.sha256(corpus).hexdigest()}
    if cfg.pack.encode() not in corpus:
        raise UserError(f"--pack {cfg.pack} begins no document: {cfg.data} does not hold it")
    train_data, valid_data, test_data = split(corpus, cfg.seq_len)
    if config.get("data", about) != about:
        raise UserError(f"{cfg.data} is not what it was when {run} began (other size or SHA-256)")

    model = build(cfg)
    optimizer = build_optimizer(model, cfg)
    forward = compiled(model, cfg)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, {cfg.attention} attention on {cfg.device}")
    print(f"{cfg.data}: {len(train_data):,} bytes to train, {len(valid_data):,} to validate")

    def state(step: int) -> dict[str, Any]:
        return {"step": step, "best": best, "optimizer": optimizer.state_dict()}

    signals = catch_signals()
    if resumed:
        start, best = load_checkpoint(run, model, optimizer)
        if start >= cfg.steps:
            print(f"{run} is finished at step {start}; a larger --steps goes on")
            return 0
        records = load_metrics(run, start)
    else:
        start, best = 0, evaluate(forward, valid_data, cfg, cfg.eval_bytes)
        records = [{"step": 0, "val_bpb": best}]
        run = new_run(getattr(given, "name", None), f"{Path(cfg.data).stem}-{cfg.attention}")
        write(run / "metrics.jsonl", json.dumps(records[0]).encode() + b"\n")
    config = {"settings": vars(cfg), "data": about, "parameters": parameters}
    write(run / "config.json", json.dumps(config, indent=2).encode() + b"\n")
    if not resumed:
        save_checkpoint(run, model, state(0), cfg.keep)
    board = writer(str(run), purge_step=start + 1) if writer else None
    print(f"{run}: step {start} of {cfg.steps}, validation {best:.3f} bits per byte at best")

    progress: dict[str, Any] = {"total": cfg.steps, "initial": start, "unit": "step"}
    quiet = 0.1 if sys.stderr.isatty() else 10.0
    with (
        (run / "metrics.jsonl").open("a") as log,
        tqdm(desc=run.name, dynamic_ncols=True, mininterval=quiet, **progress) as bar,
    ):
        clock, tokens, valid = time.monotonic(), 0, best
        for step in range(start + 1, cfg.steps + 1):
            last = step == cfg.steps
            every = cfg.log_every, cfg.eval_every, cfg.sample_every, cfg.save_every
            log_due, eval_due, sample_due, save_due = (e and (last or step % e == 0) for e in every)
            lr = learning_rate(cfg, step)
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss = torch.zeros((), device=cfg.device)
            for ids in batches(train_data, cfg, step):
                share = loss_of(forward, ids, cfg) / cfg.accumulate
                share.backward()
                loss += share.detach()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
            optimizer.step()
            optimizer.zero_grad()
            bar.update()
            tokens += cfg.accumulate * cfg.batch_size * cfg.seq_len

            stopping = bool(signals)
            pause = eval_due or sample_due or save_due or stopping
            if (log_due or pause) and not math.isfinite(loss.item() + norm.item()):
                raise UserError(f"loss is {loss.item()} at step {step}: try a lower --lr")
            if log_due or eval_due:
                speed = tokens / (time.monotonic() - clock)
                record = {"step": step, "loss": loss.item(), "bpb": loss.item() / math.log(2)}
                record |= {"lr": lr, "grad_norm": norm.item(), "tokens_per_s": round(speed)}
                clock, tokens = time.monotonic(), 0
                if eval_due:
                    record["val_bpb"] = valid = evaluate(forward, valid_data, cfg, cfg.eval_bytes)
                    if valid < best:
                        best = valid
                        save_weights(run / "best.safetensors", model)
                if last:
                    record["test_bpb"] = evaluate(forward, test_data, cfg, cfg.test_bytes)
                records.append(record)
                log.write(json.dumps(record) + "\n")
                log.flush()
                shown = f"loss {record['loss']:.3f}, {record['bpb']:.3f} bits/byte, "
                shown += f"validation {valid:.3f}, {speed:,.0f} tokens/s"
                bar.set_postfix_str(shown, refresh=False)
                if board:
                    for name, value in record.items():
                        board.add_scalar(name, value, step)
            if eval_due:
                draw(run, records)
            if sample_due and not stopping:
                prompt = valid_data[:64].tobytes()
                text = "".join(generate(model, cfg, prompt, cfg.sample_length))
                bar.write(f"--- step {step}\n{text}\n---")
            if save_due or stopping:
                save_checkpoint(run, model, state(step), cfg.keep)
            if pause:
                clock, tokens = time.monotonic(), 0
            if stopping:
                break
    if board:
        board.close()
    if not last:
        print(f"stopped at step {step}; go on with: python train_enwik8.py --resume {run}")
        return 128 + signals[0]
    test = record["test_bpb"]
    print(f"{run}: bits per byte: validation {valid:.3f} (best {best:.3f}), test {test:.3f}")
    print(f"sample it with: python train_enwik8.py --sample {run} --prompt TEXT")
    return 0


def tensorboard() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("--tensorboard needs the package tensorboard, not installed") from None
    return SummaryWriter


def sample(given: Namespace) -> int:
    run: Path = given.sample
    cfg, _ = open_run(run, given)
    cfg.device = find_device(getattr(given, "device", None))
    torch.set_num_threads(cfg.threads)
    weights = [path for path in (*checkpoints(run)[-1:], run / "best.safetensors") if path.exists()]
    if not weights:
        raise UserError(f"{run} has no checkpoint to sample from")
    model = build(cfg)
    load_weights(weights[-1], model)
    prompt = os.fsencode(getattr(given, "prompt", "") or "\n")
    how = {k: v for k, v in vars(given).items() if k in ("temperature", "filter_thres", "top_p")}
    length = getattr(given, "length", 512)
    try:
        print(printable(prompt.decode(errors="replace")), end="", flush=True)
        for text in generate(model, cfg, prompt, length, **how):
            print(text, end="", flush=True)
        print()
    except ValueError as error:
        raise UserError(str(error)) from None
    except BrokenPipeError:  # the reader has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def main(argv: list[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace", line_buffering=True)
    try:
        given = parse(argv)
        return sample(given) if "sample" in given else train(given)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except (UserError, NotImplementedError) as error:
        message = str(error)
    print(f"train_enwik8.py: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
