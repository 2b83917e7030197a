"""How good models with this layer become: bits per byte of text, against dense attention.

    python -m benchmarks.learning --data linux.txt.xz --work DIR     train, append rows
    python -m benchmarks.learning --data linux.txt.xz --speed        steps/s, nothing beside them
    python -m benchmarks.learning --table                            redraw training.md and sizes.md
    python -m benchmarks.learning --quick                            tiny sizes, nothing recorded

A byte-level Transformer for each variant of `variants.py`, on the text of `corpus.py`: dim 512,
depth 6, 8 query and 2 KV heads of 64, AdamW, bf16 autocast, cosine down to a tenth of the learning
rate. All variants of a seed see the same bytes in the same order and begin with the same values of
the weights that they share. The first seed tries every learning rate at the first length; the best
one is used for the other seeds and lengths. Each run is resumable, see `runs_pool.py`.

Rows (results/learning.jsonl): bits per byte of held-out text, over all positions, over the last
half and by ranges of positions; the training loss against bytes and seconds; `needle.py`'s test.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from native_sparse_attention import Transformer
from training.batches import batches, windows
from training.forward import autocast, compiled, loss_of

from . import common, corpus, fitting, learning_report, needle, runs_pool, training
from .common import Row
from .runs_pool import Job, Run, on, sweep
from .variants import (
    VARIANTS,
    Settings,
    build,
    check,
    describe,
    parsed,
    ranking_of,
    scaled,
    set_dense,
)

RESULTS = common.RESULTS / "learning.jsonl"
SHAPE = dict(num_tokens=256, dim=512, depth=6, heads=8, kv_heads=2, dim_head=64, causal=True)
LR = (1e-3, 5e-4, 2e-3)


@dataclass(frozen=True)
class Plan:
    """What to train."""

    variants: dict[str, Settings]
    data: dict[str, Any]
    lengths: tuple[int, ...] = (8192,)
    seeds: tuple[int, ...] = (0, 1, 2)
    lrs: tuple[float, ...] = LR
    train_bytes: int = 150_000_000
    step_tokens: int = 32768
    held_out_bytes: int = 4_000_000
    needles: int = 64
    warmup: int = 200
    points: int = 50
    precision: str = "bf16"
    compile: bool = False
    shape: dict[str, Any] = field(default_factory=lambda: dict(SHAPE))

    def __post_init__(self) -> None:
        for name in ("lengths", "seeds", "lrs", "variants"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
        for T in self.lengths:
            if T < 2 or self.step_tokens % T:
                raise ValueError(f"lengths must divide {self.step_tokens} tokens, got {T}")
        for name, settings in self.variants.items():
            check(name, settings, self.shape)

    def spec(self, kind: str, name: str, T: int, **others: Any) -> dict[str, Any]:
        found = dict(kind=kind, variant=name, settings=self.variants[name], T=T, shape=self.shape)
        names = ("warmup", "points", "held_out_bytes", "needles", "precision", "compile", "data")
        found |= {name: getattr(self, name) for name in names}
        found |= dict(batch=self.step_tokens // T, weight_decay=0.1, clip=1.0)
        return found | dict(steps=math.ceil(self.train_bytes / self.step_tokens)) | others

    def training(self, name: str, T: int, seed: int, lr: float) -> Job:
        spec = self.spec("train", name, T, seed=seed, lr=lr)
        return Job(f"{name}, T={T}, seed {seed}, lr {lr:g}", spec)

    def jobs(self, rows: list[Row]) -> list[Job]:
        def bits(row: Row) -> float:
            return row["bits"]["all"]

        names = list(self.variants)
        return sweep(names, self.lengths, self.seeds, self.lrs, self.training, bits, rows)

    def speeds(self, rows: list[Row]) -> list[Job]:
        """Steps of every variant that are timed."""
        pairs = itertools.product(self.lengths, self.variants)
        specs = [self.spec("speed", name, T, seed=0, lr=1e-4) for T, name in pairs]
        return [Job(f"speed of {spec['variant']}, T={spec['T']}", spec) for spec in specs]


# a run


def execute(spec: dict[str, Any], run: Run) -> Row:
    """Train or time one model: its row."""
    torch.set_float32_matmul_precision("high")
    train, held_out = corpus.mapped(Path(run.options["data"]))
    settings: Settings = spec["settings"]
    cfg = fitting.config(spec, run)
    cfg.compile = "on" if spec["compile"] else "off"
    model = build(settings, spec["shape"], spec["seed"]).to(run.device)
    forward = compiled(model, cfg)

    def loss_at(step: int) -> fitting.Losses:
        (ids,) = batches(train, cfg, step)
        given = ranking_of(settings, spec["seed"], step, run.device)
        return loss_of(functools.partial(forward, **given), on(ids, run.device), cfg)

    row = {**spec, **describe(model, spec["shape"], spec["T"])}
    if spec["kind"] == "speed":
        return {**row, **speed(model, settings, loss_at, cfg, run.device)}
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    done = fitting.fit(model, loss_at, settings, cfg, run)
    tokens = spec["batch"] * spec["T"]
    curve = [
        [int(step) * tokens, seconds, round(loss / math.log(2), 5)]
        for step, seconds, loss in done.curve
    ]
    cuda, runs = run.device.type == "cuda", run.options["runs_per_gpu"]
    return {
        **row,
        "bits": evaluate(model, held_out, spec["held_out_bytes"], cfg),
        "needle": needle.evaluate(model, held_out, spec["needles"], cfg),
        "schedule": f"warm-up of {spec['warmup']} steps, cosine to a tenth",
        "train_bytes": spec["steps"] * tokens,
        "seconds": round(done.seconds, 2),
        "tokens_per_s": round(spec["steps"] * tokens / done.seconds),
        "runs_per_gpu": runs,
        "gpu_seconds": round(done.seconds / runs, 1) if runs else None,
        "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20) if cuda else None,
        "curve": curve,
    }


def speed(
    model: Transformer, settings: Settings, loss_at: Callable[[int], fitting.Losses],
    cfg: Namespace, device: torch.device,
) -> Row:  # fmt: skip
    """Time of a step with nothing beside it. A recipe is timed as the sparse steps are."""
    from train_enwik8 import build_optimizer

    optimizer = build_optimizer(model, cfg)
    set_dense(model, settings, dense=False)

    def step() -> None:
        fitting.summed(loss_at(1)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        optimizer.step()
        optimizer.zero_grad()

    times = training.step_times(step, device)
    row = common.quantiles(times)
    per_s = round(cfg.batch_size * cfg.seq_len / row["p50_ms"] * 1e3)
    return {**row, "tokens_per_s": per_s, "repeats": len(times)}


def ranges(T: int) -> list[tuple[int, int]]:
    """Positions from 0 to T, bounded by powers of two."""
    edge = 256 if T >= 1024 else 16
    edges = [0]
    while edge < T:
        edges.append(edge)
        edge *= 2
    return list(itertools.pairwise([*edges, T]))


@torch.no_grad()
def evaluate(model: Transformer, data: np.ndarray, size: int, cfg: Namespace) -> Row:
    """Bits per byte of held-out text, in sequences of T spread evenly over about `size` bytes.
    Position i predicts a byte from the i + 1 bytes before it.

    Raises:
        ValueError: the held-out text is shorter than a sequence.
    """
    T = cfg.seq_len
    if len(data) <= T:
        raise ValueError(f"data has {len(data)} bytes of held-out text, T={T} needs more")
    count = max(1, min(size, len(data)) // T)
    starts = np.linspace(0, len(data) - T - 1, count).astype(np.int64)
    total = torch.zeros(T, dtype=torch.float64, device=cfg.device)
    for some in np.array_split(starts, math.ceil(count / cfg.batch_size)):
        ids = windows(data, some, cfg).to(cfg.device)
        with autocast(cfg):
            logits = model(ids[:, :-1])
        losses = F.cross_entropy(logits.float().transpose(1, 2), ids[:, 1:], reduction="none")
        total += losses.double().sum(0)
    bits = total / (count * math.log(2))

    def mean(begin: int, end: int) -> float:
        return round(bits[begin:end].mean().item(), 5)

    positions = {f"{begin}-{end}": mean(begin, end) for begin, end in ranges(T)}
    return {"all": mean(0, T), "last_half": mean(T // 2, T), "positions": positions}


# the command line


def table(rows: Sequence[Row]) -> str:
    """A line for each run."""
    lines = [["variant", "T", "seed", "lr", "bits per byte", "last half", "tokens/s", "seconds"]]
    for row in rows:
        cells = [row["variant"], str(row["T"])]
        if "failed" in row:
            lines.append([*cells, str(row["seed"]), f"{row['lr']:g}", row["failed"], "", "", ""])
        elif row["kind"] == "speed":
            lines.append([*cells, "", "", "", "", str(row["tokens_per_s"]), ""])
        else:
            bits = (f"{row['bits'][name]:.4f}" for name in ("all", "last_half"))
            measured = str(row["tokens_per_s"]), f"{row['seconds']:.0f}"
            lines.append([*cells, str(row["seed"]), f"{row['lr']:g}", *bits, *measured])
    return common.markdown(lines)


def quick_plan(args: Namespace, variants: dict[str, Settings], data: dict[str, Any]) -> Plan:
    shape = dict(SHAPE, dim=32, depth=4, heads=4, dim_head=16, ff_expansion_factor=2.0)
    small = {name: scaled(settings, 8) for name, settings in variants.items()}
    sizes: dict[str, Any] = dict(train_bytes=1280, step_tokens=320, held_out_bytes=320, needles=2)
    how: dict[str, Any] = dict(
        precision="fp32", points=2, warmup=1, shape=shape, compile=args.compile
    )
    lrs, seeds = args.lrs or (1e-3,), args.seeds or (0,)
    return Plan(small, data, (160,), tuple(seeds), tuple(lrs), **sizes, **how)


def write_quick_text(folder: Path) -> Path:
    words = np.random.default_rng(0).integers(97, 123, size=(64, 5)).astype(np.uint8)
    text = words[np.random.default_rng(1).integers(64, size=1000)]
    path = folder / "words.txt"
    path.write_bytes(np.pad(text, ((0, 0), (0, 1)), constant_values=32).tobytes())
    return path


def main(argv: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(
        prog="benchmarks.learning", description=(__doc__ or "").split("\n")[0]
    )
    runs_pool.add_options(parser, jobs=3 * torch.cuda.device_count() or 1)
    add = parser.add_argument
    add("--data", type=Path, help="the text of benchmarks.corpus, or any file of bytes; .xz too")
    add("--variants", nargs="+", choices=VARIANTS, metavar="NAME", help="all by default")
    add("--variant", action="append", default=[], metavar="NAME=JSON", help="one more, of settings")
    add("--lengths", type=int, nargs="+", default=[8192], metavar="T")
    add("--seeds", type=int, nargs="+", help="0 1 2 by default")
    add("--lrs", type=float, nargs="+", help="1e-3 5e-4 2e-3 by default")
    add("--bytes", type=int, default=150_000_000, help="to train on, each run")
    add("--compile", action="store_true", help="torch.compile with CUDA graphs")
    add("--speed", action="store_true", help="time steps instead, one run a GPU")
    args = parser.parse_args(argv)
    if args.table:
        rows = common.read_rows(args.out or RESULTS)
        learning_report.draw(rows)
        return rows
    with tempfile.TemporaryDirectory(prefix="learning-") as temporary:
        try:
            return run(args, Path(temporary))
        except ValueError as error:
            sys.exit(f"benchmarks.learning: {error}")


def run(args: Namespace, temporary: Path) -> list[Row]:
    given = dict(map(parsed, args.variant))
    names = args.variants or ([] if given else list(VARIANTS))
    variants = {name: VARIANTS[name] for name in names} | given
    work = args.work or (temporary if args.quick else None)
    if work is None or not (args.quick or args.data):
        raise ValueError("work and data must be given to train, --work DIR --data FILE")
    path = corpus.unpacked(args.data or write_quick_text(temporary), work)
    about = corpus.about(path)
    if args.quick:
        plan = quick_plan(args, variants, about)
    else:
        plan = Plan(
            variants, about, tuple(args.lengths), tuple(args.seeds or (0, 1, 2)),
            tuple(args.lrs or LR), args.bytes, compile=args.compile,
        )  # fmt: skip
    if args.speed and torch.cuda.device_count():
        args.jobs = torch.cuda.device_count()
    pool = runs_pool.pool_of(args, "benchmarks.learning", work, RESULTS, data=str(path.resolve()))
    return runs_pool.report(pool, plan.speeds if args.speed else plan.jobs, table)


if __name__ == "__main__":
    main()
