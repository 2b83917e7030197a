"""Train a byte-level language model with Native Sparse Attention, and watch it learn.

    python train_enwik8.py                                     a run with this device's preset
    python train_enwik8.py --resume runs/NAME                  go on exactly where a run stopped
    python train_enwik8.py --sample runs/NAME --prompt TEXT    stream text from a trained run

Everything that decides a run is a setting of the table below, written to `runs/NAME/config.json`.
The bytes of a step are drawn from (seed, step) alone, so a run that was killed and resumed equals
one that was not. `data/README.md` says where the bytes come from, `training/` has what is no
training: the data, the files of a run (`native_sparse_attention.runs` reads them), the plot.
"""

from __future__ import annotations

import argparse
import codecs
import hashlib
import io
import json
import math
import os
import shutil
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from native_sparse_attention import Transformer
from native_sparse_attention.runs import (
    BEST,
    CHANGEABLE,
    CONFIG,
    RunError,
    TornError,
    load_best,
    load_run,
    model_arguments,
    newest_checkpoint,
    read_config,
    verify_config,
)
from training.data import DownloadError, download, enwik8, read_bytes, split, stdlib_corpus
from training.errors import UserError, reason
from training.plot import draw
from training.runs import (
    METRICS,
    append,
    check_name,
    claim,
    locked,
    missing_lines,
    new_run,
    read_metrics,
    restore,
    save_best,
    save_checkpoint,
    write,
    write_config,
)

__all__ = ["download", "main"]

# settings


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


count, whole, real = number(int, 1, 2**31 - 1), number(int, 0, 2**31 - 1), number(float)
size, seed, threads = number(int, 1, 2**63 - 1), number(int, 0, 2**63 - 1), number(int, 1, 1024)
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
    "seed": (seed, 0, 0, "of weights, data order and sampled text"),
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
    "eval_bytes": (size, 2**15, 2**20, "validation bytes read each time"),
    "test_bytes": (size, 2**16, 5 * 10**6, "test bytes read at the end"),
    "sample_every": (whole, 200, 1000, "steps between sampled texts; 0: none"),
    "sample_length": (count, 256, 512, "bytes of a sampled text"),
    "save_every": (count, 100, 500, "steps between checkpoints"),
    "keep": (count, 2, 2, "checkpoints kept, besides the best"),
    "threads": (
        threads,
        None,
        None,
        "CPU threads; others may sum in another order (default: half the cores)",
    ),
    "device": (str, None, None, "cpu, cuda, cuda:1 ... (default: cuda where there is one)"),
}
SAMPLING = {"sample", "prompt", "max_new_tokens", "temperature", "filter_thres", "top_k", "top_p"}
HARDWARE = {"backend", "device", "threads"}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UserError(message)


def parse(argv: list[str] | None) -> Namespace:
    """The options given on the command line; those not given are not there."""
    about = (__doc__ or "").splitlines()[0]
    parser = Parser(description=about, argument_default=argparse.SUPPRESS, allow_abbrev=False)
    parser.add_argument("--name", help="directory of the run; never one that is there already")
    parser.add_argument(
        "--out-dir", type=Path, metavar="DIR", help="where directories of runs are made (runs)"
    )
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
        torch.zeros(1, device=name).item()  # meta has no values
    except (RuntimeError, AssertionError, NotImplementedError):
        raise UserError(f"device {name!r} is not usable here; give --device cpu") from None
    return name


# data


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


def windows(data: np.ndarray, starts: np.ndarray, cfg: Namespace) -> Tensor:
    """The `seq_len + 1` bytes from each start, [b, n + 1]."""
    ids = data[starts[:, None] + np.arange(cfg.seq_len + 1)]
    return torch.from_numpy(ids.astype(np.int64))


def encoded(text: str) -> bytes:
    """The bytes of an option, bad UTF-8 among them."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise UserError(f"{text!a} is no text: it cannot be encoded") from None


def segments(ids: Tensor, marker: str) -> Tensor:
    """The document of each byte [b, n], counted along a row: one begins with each marker in it."""
    text = torch.tensor(list(encoded(marker)))
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
        model = Transformer(**model_arguments(vars(cfg)))
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


def open_run(run: Path, given: Namespace) -> tuple[Namespace, dict[str, Any]]:
    """The settings of a run, changed by what was given and may change, and all of its config."""
    path, config = run / CONFIG, read_config(run)
    saved = config["settings"]
    if odd := sorted(saved.keys() ^ SETTINGS.keys()):
        what = "has no setting" if odd[0] in SETTINGS else "has an unknown setting"
        raise UserError(f"{path} {what} {odd[0]!r}")
    for name, (kind, *_) in SETTINGS.items():
        check_setting(path, name, kind, saved[name])
    verify_config(run, config)
    for name in sorted(SETTINGS.keys() & vars(given).keys()):
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
    else:
        right, what = isinstance(value, str), "must be a string"
    if not right:
        raise UserError(f"{path}: {name} {what}, got {value!r}")


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


def go_on(
    run: Path,
    config: dict[str, Any],
    cfg: Namespace,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
) -> tuple[int, float, list[Any], list[bytes]] | None:
    """Restore the newest whole checkpoint of a run, and say what the run lacks.

    Its step, the best validation, the metrics up to it and their lines; None where there never was
    a checkpoint.
    """
    found, torn = newest_checkpoint(run, config)
    records, lines, notes = read_metrics(run)
    if found is None:
        if records and (reached := records[-1]["step"]):
            raise UserError(f"{run} has no checkpoint to go on from, but metrics to step {reached}")
        return None
    # what a killed run wrote after its checkpoint goes
    records = [record for record in records if record["step"] <= found.step]
    notes += missing_lines(run, records, found.step, cfg.log_every, cfg.eval_every)

    # what the next best has to beat; without the file of the last, any will do
    best, lost = found.best, ""
    first = records[0].get("val_bpb", math.nan) if records else math.nan
    try:
        if not load_best(run, config, model) and best < first:
            lost = f"{run / BEST} is missing"
    except TornError as error:
        lost = str(error)
    if lost:
        best = math.inf
        notes.append(f"{lost}; the next validation writes it")
    restore(run, found, model, optimizer)
    for note in [*(f"{text}; going on from step {found.step}" for text in torn), *notes]:
        print(note)
    return found.step, best, records, lines[: len(records)]


def refuse_processes() -> None:
    """Under torchrun and mpirun: several processes would each train the same run alone."""
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"):
        count = os.environ.get(name, "")
        if count.isdecimal() and int(count) > 1:
            raise UserError(
                f"{name} is {count}: training in several processes is not supported yet; "
                "start one process (torchrun --nproc-per-node 1)"
            )


def train(given: Namespace) -> int:
    with ExitStack() as held:
        return train_locked(given, held)


def train_locked(given: Namespace, held: ExitStack) -> int:
    """`held` keeps the run's lock until training ends."""
    resumed = "resume" in given
    config: dict[str, Any] = {}
    if resumed:
        run: Path = given.resume
        open_run(run, given)
        held.enter_context(locked(run))
        cfg, config = open_run(run, given)  # its last writer may have changed it meanwhile
        find_device(cfg.device)
    else:
        folder, name = getattr(given, "out_dir", Path("runs")), getattr(given, "name", None)
        if name is not None:
            check_name(folder, name)
        cfg = new_settings(given)
    writer = tensorboard() if "tensorboard" in given else None
    torch.set_num_threads(cfg.threads)
    torch.set_float32_matmul_precision("high")

    cfg.data, corpus = load_data(cfg.data)
    about = {"bytes": len(corpus), "sha256": hashlib.sha256(corpus).hexdigest()}
    if encoded(cfg.pack) not in corpus:
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

    signals = catch_signals()
    state = go_on(run, config, cfg, model, optimizer) if resumed else None
    first = state is None
    if state is None:
        valid = evaluate(forward, valid_data, cfg, cfg.eval_bytes)
        record: dict[str, Any] = {"step": 0, "val_bpb": valid}
        best = valid if math.isfinite(valid) else math.inf
        state = 0, best, [record], [json.dumps(record).encode() + b"\n"]
    start, best, records, lines = state
    if start >= cfg.steps:
        print(f"{run} is finished at step {start}; a larger --steps goes on")
        return 0
    if not resumed:
        run = new_run(folder, name, f"{Path(cfg.data).stem}-{cfg.attention}")
    try:
        if not resumed:
            held.enter_context(locked(run))
        claim(run)
        config = {"settings": vars(cfg), "data": about, "parameters": parameters}
        config = write_config(run, config)
    except OSError:
        if not resumed:  # without its config.json it could not go on
            shutil.rmtree(run, ignore_errors=True)
        raise
    write(run / METRICS, b"".join(lines))

    def save(step: int) -> None:
        save_checkpoint(run, model, optimizer, step, best, cfg.keep, config)

    if first:
        save(0)
    board = writer(str(run), purge_step=start + 1) if writer else None
    print(f"{run}: step {start} of {cfg.steps}, validation {best:.3f} bits per byte at best")

    progress: dict[str, Any] = {"total": cfg.steps, "initial": start, "unit": "step"}
    quiet = 0.1 if sys.stderr.isatty() else 10.0
    with tqdm(desc=run.name, dynamic_ncols=True, mininterval=quiet, **progress) as bar:
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
                        save_best(run, model, step, config)
                if last:
                    record["test_bpb"] = evaluate(forward, test_data, cfg, cfg.test_bytes)
                records.append(record)
                append(run / METRICS, json.dumps(record))
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
                save(step)
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
    cfg, config = open_run(run, given)
    cfg.device = find_device(getattr(given, "device", None))
    torch.set_num_threads(cfg.threads)
    model = build(cfg)
    for note in load_run(run, config, model, "best"):
        print(note, file=sys.stderr)
    prompt = encoded(getattr(given, "prompt", "") or "\n")
    keys = "temperature", "filter_thres", "top_k", "top_p"
    how = {key: value for key, value in vars(given).items() if key in keys}
    if "top_k" in how:
        how.setdefault("filter_thres", 0.0)
    length = getattr(given, "max_new_tokens", 512)
    try:
        texts = generate(model, cfg, prompt, length, **how)
        first = next(texts)  # what is wrong with the options is said before any text
        print(printable(prompt.decode(errors="replace")) + first, end="", flush=True)
        for text in texts:
            print(text, end="", flush=True)
        print()
    except ValueError as error:
        raise UserError(str(error)) from None
    except RuntimeError as error:
        if "probability tensor" not in str(error):
            raise
        raise UserError(f"{run} gives logits that are not finite: it diverged") from None
    except BrokenPipeError:  # the reader has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def main(argv: list[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace", line_buffering=True)
    try:
        given = parse(argv)
        refuse_processes()
        return sample(given) if "sample" in given else train(given)
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


if __name__ == "__main__":
    sys.exit(main())
