"""Associative recall: which models find the value of a key that they read long ago.

    python -m benchmarks.recall --work DIR            train, append rows to results/recall.jsonl
    python -m benchmarks.recall --table               redraw results/training.md from the rows
    python -m benchmarks.recall --quick               tiny sizes, nothing recorded

A sequence is noise with pairs of a key and a value in its first half. In its second half each key
comes once more, and the next token is to be its value. A question is farther from its pair than
the window and the local blocks reach. Models of two layers train at lengths up to T, one of them
drawn for each step, and are tested at longer ones, with as many pairs. Variants, seeds and learning
rates as in `learning.py`: the first seed tries every rate, the best accuracy at T decides.

Rows: accuracy by length. `runs_pool.py` runs them.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from native_sparse_attention import Transformer
from training.forward import autocast

from . import common, runs_pool
from .common import NO_ROWS, Row, length
from .runs_pool import Job, Run, by_variant, on, spread, sweep
from .variants import VARIANTS, Settings, build, check, describe, scaled

LR = (1e-3, 3e-3)


@dataclass(frozen=True)
class Task:
    """Sequences of recall. Tokens are noise, then keys, then values."""

    pairs: int = 32
    noise: int = 64
    keys: int = 64
    values: int = 64
    # tokens from a pair to its question, at least
    least_distance: int = 128

    @property
    def tokens(self) -> int:
        return self.noise + self.keys + self.values

    @property
    def least_length(self) -> int:
        return 4 * self.pairs + 2 * self.least_distance

    def draw(self, count: int, T: int, draw: np.random.Generator) -> tuple[Tensor, ...]:
        """Token ids [count, T], positions [count, pairs] of the questions, and their distances.
        Raises ValueError: T is too short."""
        if self.least_length > T or T % 4:
            raise ValueError(f"T must be a multiple of 4 from {self.least_length} on, got {T}")
        # pairs and questions are cells of two tokens
        half, gap = T // 4, self.least_distance // 2

        def choose(among: int) -> np.ndarray:
            return draw.random((count, among)).argsort(axis=1)[:, : self.pairs]

        told, asked = 2 * choose(half - gap), 2 * (half + choose(T // 2 - half))
        key = self.noise + choose(self.keys)
        value = self.noise + self.keys + draw.integers(self.values, size=key.shape)
        ids = draw.integers(self.noise, size=(count, T))
        for at in (told, asked):
            np.put_along_axis(ids, at, key, axis=1)
            np.put_along_axis(ids, at + 1, value, axis=1)
        return tuple(map(torch.from_numpy, (ids, asked, asked - told)))


@dataclass(frozen=True)
class Sizes:
    """A setting of the benchmark: the task, the model, lengths, and how long it trains."""

    task: Task
    shape: dict[str, Any]
    T: int
    train_lengths: tuple[int, ...]
    lengths: tuple[int, ...]
    batch: int  # sequences of T in a step; shorter ones are more
    steps: int
    test_tokens: int
    warmup: int = 100
    precision: str = "bf16"


def shape(dim: int, dim_head: int, task: Task) -> dict[str, Any]:
    model = dict(dim=dim, depth=2, heads=4, kv_heads=2, dim_head=dim_head, causal=True)
    return {"num_tokens": task.tokens, **model}


TASK, QUICK_TASK = Task(), Task(3, 8, 8, 8, least_distance=24)
LENGTHS = tuple(2**i for i in range(9, 17))
LARGE = Sizes(
    TASK, shape(128, 32, TASK), 2048, (512, 1024, 2048), LENGTHS, batch=16, steps=10_000,
    test_tokens=2**19,
)  # fmt: skip
QUICK = Sizes(
    QUICK_TASK, shape(32, 16, QUICK_TASK), 96, (96,), (96, 192), batch=2, steps=3, test_tokens=192,
    warmup=1, precision="fp32",
)  # fmt: skip
# tokens of windows and blocks, over those of `VARIANTS`
FACTOR = 4


def variants() -> dict[str, Settings]:
    """Those of `learning.py` with shorter windows and blocks; windows of 32 tokens become windows
    of 8, and one variant has a network over 32. Those of 8 are left out, and those whose question
    is not this task."""
    found: dict[str, Settings] = {}
    for name, settings in VARIANTS.items():
        if name.startswith(("1088 keys", "1600 keys")) or "windows of 8" in name:
            continue
        found[name] = scaled(settings, FACTOR)
        if settings["compress_block_size"] == 32:
            found[name] |= dict(compress_block_size=8, compress_block_sliding_stride=4)
    s = found["published form"]["selection_block_size"]
    wide = dict(compress_block_size=32, compress_block_sliding_stride=s)
    return found | {"published, windows of 32": found["published form"] | wide}


# a run


def execute(spec: dict[str, Any], run: Run) -> Row:
    """Train and test one model: its row."""
    torch.set_float32_matmul_precision("high")
    task, cfg = Task(**spec["task"]), runs_pool.config(spec, run)
    model = build(spec["settings"], spec["shape"], spec["seed"]).to(run.device)

    def loss_at(step: int) -> runs_pool.Losses:
        draw = np.random.default_rng([spec["seed"], step])
        T = int(draw.choice(spec["train_lengths"]))
        drawn = task.draw(spec["batch"] * spec["T"] // T, T, draw)
        return F.cross_entropy(*asked(model, drawn, cfg))

    row = {**spec, **describe(model, spec["T"])}
    done = runs_pool.fit(model, loss_at, cfg, run)
    tests = {str(T): evaluate(model, task, T, spec["test_tokens"], cfg) for T in spec["lengths"]}
    return {
        **row,
        "accuracy": tests,
        "seconds": round(done.seconds, 2),
        "curve": [[int(step), seconds, round(loss, 5)] for step, seconds, loss in done.curve],
    }


def asked(model: Transformer, drawn: tuple[Tensor, ...], cfg: Namespace) -> tuple[Tensor, Tensor]:
    """Logits [questions, tokens] and the right values."""
    ids, at, _ = (on(t, torch.device(cfg.device)) for t in drawn)
    with autocast(cfg):
        logits = model(ids)
    rows = torch.arange(len(ids), device=ids.device)[:, None]
    return logits[rows, at].float().flatten(0, 1), ids[rows, at + 1].flatten()


@torch.no_grad()
def evaluate(model: Transformer, task: Task, T: int, tokens: int, cfg: Namespace) -> float:
    """Accuracy at a length. The sequences are the same for all models."""
    draw, sequences = np.random.default_rng([2**32, T]), max(1, tokens // T)
    at_once = max(1, cfg.batch_size * cfg.seq_len // T)
    hits = []
    for first in range(0, sequences, at_once):
        drawn = task.draw(min(at_once, sequences - first), T, draw)
        logits, answers = asked(model, drawn, cfg)
        hits.append((logits.argmax(-1) == answers).double().cpu())
    return round(torch.cat(hits).mean().item(), 4)


# all of them


def plan_of(
    found: dict[str, Settings], sizes: Sizes, seeds: Sequence[int], lrs: Sequence[float]
) -> runs_pool.Plan:
    """Raises ValueError for settings that make no model."""
    for name, settings in found.items():
        check(name, settings, sizes.shape)

    def training(name: str, T: int, seed: int, lr: float) -> Job:
        spec = asdict(sizes) | dict(points=50, weight_decay=0.1, clip=1.0, seed=seed, lr=lr)
        spec |= dict(kind="recall", variant=name, settings=found[name])
        return Job(f"recall, {name}, T={T}, seed {seed}, lr {lr:g}", spec)

    return lambda rows: sweep(list(found), (sizes.T,), seeds, lrs, training, errors, rows)


# the table


def errors(row: Row) -> float:
    return 1 - row["accuracy"][str(row["T"])]


def table(rows: Sequence[Row]) -> str:
    """For each training length and number of steps, the variants by their accuracy. The task and
    the model of a length are those of its last row."""
    rows, parts = [row for row in rows if "failed" not in row], []
    last = {row["T"]: row for row in rows}
    same = ("task", "shape", "batch", "lengths")
    for T, steps in sorted({(row["T"], row["steps"]) for row in rows}):
        runs = [row for row in rows if (row["T"], row["steps"]) == (T, steps)]
        runs = [row for row in runs if all(row[name] == last[T][name] for name in same)]
        if not runs:
            continue
        row, lengths = runs[-1], runs[-1]["lengths"]
        text = f"Trained at {', '.join(map(length, row['train_lengths']))} tokens with "
        text += f"{row['task']['pairs']} pairs, {steps} steps of {row['batch'] * T} tokens; "
        text += f"dim {row['shape']['dim']}, {row['shape']['depth']} layers:"
        lines = [["accuracy", "M parameters", "learning rate", "seeds", *map(length, lengths)]]
        for name, of_variant in by_variant(runs, errors).items():
            row = of_variant[0]
            cells = [name, f"{row['parameters'] / 1e6:.2f}", f"{row['lr']:g}", str(len(of_variant))]
            for t in lengths:
                cells.append(spread([run["accuracy"][str(t)] for run in of_variant], 2))
            lines.append(cells)
        parts += [text, common.markdown(lines), common.machine(runs)]
    return "\n\n".join(parts) or NO_ROWS


TABLES = {common.RESULTS / "training.md": {"recall": table}}


# the program


def options(parser: argparse.ArgumentParser) -> None:
    runs_pool.options(parser)
    parser.add_argument("--steps", type=int, help="of training")


def run(args: Namespace, recorder: common.Recorder) -> None:
    sizes = QUICK if args.quick else LARGE
    if args.steps is not None:
        sizes = replace(sizes, steps=args.steps)
    seeds, lrs = args.seeds or (0, 1, 2), args.lrs or LR
    if args.quick:
        seeds, lrs = seeds[:1], lrs[:1]
    plan = plan_of(runs_pool.variants_of(args, variants()), sizes, seeds, lrs)
    with runs_pool.work_of(args) as work:
        pool = runs_pool.Pool(execute, work, recorder, args.deadline)
        runs_pool.run_all(pool, plan)


BENCHMARK = common.Benchmark(
    "recall", __doc__, options, run, ("variant", "T", "seed", "lr"), TABLES
)
main = BENCHMARK.main

if __name__ == "__main__":
    main()
