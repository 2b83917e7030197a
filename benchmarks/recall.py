"""Associative recall: which models find the value of a key that they read long ago.

    python -m benchmarks.recall --work DIR            train, append rows to results/recall.jsonl
    python -m benchmarks.recall --small --work DIR    T = 256, ten minutes a run on a CPU
    python -m benchmarks.recall --small --networks --work DIR    compare compression networks
    python -m benchmarks.recall --table               redraw docs/training.md
    python -m benchmarks.recall --quick               tiny sizes, nothing recorded

A sequence is noise with pairs of a key and a value in its first half. In its second half each key
comes once more, and the next token is to be its value. A question is farther from its pair than
the window and the local blocks reach. Models of two layers train at lengths up to T, one of them
drawn for each step, and are tested at longer ones, with as many pairs. Variants, seeds and learning
rates as in `learning.py`: the first seed tries every rate, the best accuracy at T decides.

Rows: accuracy by length, and by distance from question to pair. `runs_pool.py` runs them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from native_sparse_attention import Transformer
from training.forward import autocast

from . import common, fitting, recall_report, runs_pool
from .common import Row
from .runs_pool import Job, Run, on, sweep
from .variants import VARIANTS, Settings, build, check, describe, parsed, ranking_of, scaled

RESULTS = common.RESULTS / "recall.jsonl"
LR = (1e-3, 3e-3)


# compression networks of the published form; "small" has a quarter of the hidden width
NETWORKS: dict[str, Settings] = {
    "mean": {"name": "mean"},
    "sum": {"name": "sum"},
    "twice the sum": {"name": "sum", "gain": 2.0},
    "four times the sum": {"name": "sum", "gain": 4.0},
    "attention": {"name": "attention"},
    "linear": {"name": "linear"},
    "MLP": {"name": "mlp", "start": "random"},
    "MLP, small": {"name": "mlp", "start": "random", "expand_factor": 0.25},
    "MLP, begun as the sum": {"name": "mlp"},
    "MLP of each head": {"name": "grouped"},
    "MLP, begun as the mean": {"name": "mean MLP"},
    "low rank": {"name": "low rank"},
    **{
        ", ".join(["convolution", *(f"{key}={value}" for key, value in given.items())]): {
            "name": "conv", **given,
        }
        for given in (
            {},
            dict(kernel=1),
            dict(kernel=4),
            dict(expand=2),
            dict(expand=16),
            dict(kernel=4, expand=16),
            dict(pool="sum"),
            dict(pool="max"),
            dict(pool="softmax"),
            dict(kernel=4, pool="softmax"),
            dict(residual=True),
            dict(residual="sum"),
            dict(residual="sum", zero=True),
            dict(residual=True, zero=True),
            dict(residual=True, kernel=4, expand=16),
        )
    },
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """Sequences of recall. Tokens are noise, then keys, then values."""

    pairs: int = 32
    noise: int = 64
    keys: int = 64
    values: int = 64
    # tokens from a pair to its question, at least
    least_distance: int = 128

    def __post_init__(self) -> None:
        if not 1 <= self.pairs <= self.keys:
            raise ValueError(f"pairs must be from 1 to keys={self.keys}, got {self.pairs}")

    @property
    def tokens(self) -> int:
        return self.noise + self.keys + self.values

    @property
    def least_length(self) -> int:
        return 4 * self.pairs + 2 * self.least_distance

    def draw(self, count: int, T: int, draw: np.random.Generator) -> tuple[Tensor, ...]:
        """Token ids [count, T], positions [count, pairs] of the questions, and their distances.

        Raises:
            ValueError: T is too short.
        """
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
    # tokens of windows and blocks over those of `VARIANTS`
    factor: int
    # sequences of the longest training length in a step; shorter ones are more
    T: int
    train_lengths: tuple[int, ...]
    lengths: tuple[int, ...]
    batch: int
    steps: int
    test_tokens: int
    changes: Settings
    warmup: int = 100
    precision: str = "bf16"


def shape(dim: int, dim_head: int, task: Task) -> dict[str, Any]:
    model = dict(dim=dim, depth=2, heads=4, kv_heads=2, dim_head=dim_head, causal=True)
    return {"num_tokens": task.tokens, **model}


TASK, SMALL_TASK = Task(), Task(12, 32, 32, 32, least_distance=48)
LARGE = Sizes(
    TASK,
    shape(128, 32, TASK),
    factor=4,
    T=2048,
    train_lengths=(512, 1024, 2048),
    lengths=tuple(2**i for i in range(9, 17)),
    batch=16,
    steps=10_000,
    test_tokens=2**19,
    changes={},
)
# the setting of one CPU: windows of 8 tokens, 4 ranked blocks of 8
SMALL = Sizes(
    SMALL_TASK,
    shape(64, 16, SMALL_TASK),
    factor=8,
    T=256,
    train_lengths=(256,),
    lengths=(256, 512, 1024),
    batch=16,
    steps=1500,
    test_tokens=2**15,
    changes={"num_selected_blocks": 4, "sliding_window_size": 16},
    precision="fp32",
)
QUICK_TASK = Task(3, 8, 8, 8, least_distance=24)
QUICK = Sizes(
    QUICK_TASK,
    shape(32, 16, QUICK_TASK),
    factor=8,
    T=96,
    train_lengths=(96,),
    lengths=(96, 192),
    batch=2,
    steps=3,
    test_tokens=192,
    changes=SMALL.changes,
    warmup=1,
    precision="fp32",
)


def variants(sizes: Sizes) -> dict[str, Settings]:
    """Those of `learning.py` with shorter windows and blocks; windows of 32 tokens become windows
    of 8, and one variant has a network over 32. Those of 8 are left out, and those whose question
    is not this task."""
    chosen = {
        name: settings
        for name, settings in VARIANTS.items()
        if not (name.startswith("1088 keys") or "windows of 8" in name)
    }
    found: dict[str, Settings] = {}
    for name, settings in chosen.items():
        changes = {key: value for key, value in sizes.changes.items() if settings[key]}
        found[name] = scaled(settings, sizes.factor) | changes
        if settings["compress_block_size"] == 32:
            found[name] |= dict(compress_block_size=8, compress_block_sliding_stride=4)
    s = found["published"]["selection_block_size"]
    wide = dict(compress_block_size=32, compress_block_sliding_stride=s)
    found["published, windows of 32"] = found["published"] | wide
    one = found["one softmax, logits"] | dict(compress_mlp="grouped", use_diff_topk=True)
    return found | {"one softmax, MLP ranks, diff top-k": one}


def with_networks(sizes: Sizes) -> dict[str, Settings]:
    """The published form with each of `NETWORKS`."""
    base = variants(sizes)["published"]
    return {f"network: {name}": base | dict(compress_mlp=net) for name, net in NETWORKS.items()}


# a run


def execute(spec: dict[str, Any], run: Run) -> Row:
    """Train and test one model: its row."""
    torch.set_float32_matmul_precision("high")
    task, cfg = Task(**spec["task"]), fitting.config(spec, run)
    model = build(spec["settings"], spec["shape"], spec["seed"]).to(run.device)

    def loss_at(step: int) -> fitting.Losses:
        draw = np.random.default_rng([spec["seed"], step])
        T = int(draw.choice(spec["train_lengths"]))
        drawn = task.draw(spec["batch"] * spec["T"] // T, T, draw)
        given = ranking_of(spec["settings"], spec["seed"], step, run.device)
        logits, answers, _, *others = asked(model, drawn, cfg, **given)
        loss = F.cross_entropy(logits, answers)
        return (loss, *others) if others else loss

    row = {**spec, **describe(model, spec["shape"], spec["T"])}
    done = fitting.fit(model, loss_at, spec["settings"], cfg, run)
    tests = {str(T): evaluate(model, task, T, spec["test_tokens"], cfg) for T in spec["lengths"]}
    return {
        **row,
        "accuracy": {T: test["all"] for T, test in tests.items()},
        "by_distance": {T: test["by_distance"] for T, test in tests.items()},
        "seconds": round(done.seconds, 2),
        "curve": [[int(step), seconds, round(loss, 5)] for step, seconds, loss in done.curve],
    }


def asked(
    model: Transformer, drawn: tuple[Tensor, ...], cfg: Namespace, **given: Any
) -> tuple[Tensor, ...]:
    """Logits [questions, tokens], the right values, and the distances; the ranking loss, if
    `given` asks for it."""
    ids, at, distance = (on(t, torch.device(cfg.device)) for t in drawn)
    with autocast(cfg):
        found = model(ids, **given)
    logits, *others = found if given else (found,)
    rows = torch.arange(len(ids), device=ids.device)[:, None]
    answers, distances = ids[rows, at + 1].flatten(), distance.flatten()
    return logits[rows, at].float().flatten(0, 1), answers, distances, *others


@torch.no_grad()
def evaluate(model: Transformer, task: Task, T: int, tokens: int, cfg: Namespace) -> Row:
    """Accuracy at a length, over all questions and by distance (bounded by powers of two). The
    sequences are the same for all models."""
    draw, sequences = np.random.default_rng([2**32, T]), max(1, tokens // T)
    at_once = max(1, cfg.batch_size * cfg.seq_len // T)
    hits, distances = [], []
    for first in range(0, sequences, at_once):
        drawn = task.draw(min(at_once, sequences - first), T, draw)
        logits, answers, distance = asked(model, drawn, cfg)[:3]
        hits.append((logits.argmax(-1) == answers).double().cpu())
        distances.append(distance.cpu())
    hit, power = torch.cat(hits), torch.cat(distances).double().log2().floor().long()
    found = {}
    for p in power.unique().tolist():
        found[f"{2**p}-{2 ** (p + 1)}"] = round(hit[power == p].mean().item(), 4)
    return {"all": round(hit.mean().item(), 4), "by_distance": found}


# all of them


@dataclass(frozen=True)
class Plan:
    """What to train."""

    variants: dict[str, Settings]
    sizes: Sizes
    seeds: tuple[int, ...] = (0, 1, 2)
    lrs: tuple[float, ...] = LR

    def __post_init__(self) -> None:
        for name, settings in self.variants.items():
            check(name, settings, self.sizes.shape)

    def training(self, name: str, T: int, seed: int, lr: float) -> Job:
        given = asdict(self.sizes)
        names = (
            "task",
            "shape",
            "train_lengths",
            "lengths",
            "batch",
            "steps",
            "test_tokens",
            "warmup",
            "precision",
        )
        spec = {name: given[name] for name in names} | dict(points=50, weight_decay=0.1, clip=1.0)
        which = dict(kind="recall", variant=name, settings=self.variants[name])
        spec |= which | dict(T=T, seed=seed, lr=lr)
        return Job(f"recall, {name}, T={T}, seed {seed}, lr {lr:g}", spec)

    def jobs(self, rows: list[Row]) -> list[Job]:
        T = self.sizes.T

        def errors(row: Row) -> float:
            return 1 - row["accuracy"][str(T)]

        names = list(self.variants)
        return sweep(names, (T,), self.seeds, self.lrs, self.training, errors, rows)


def table(rows: Sequence[Row]) -> str:
    """A line for each run."""
    lengths = [str(T) for T in rows[0]["lengths"]] if rows else []
    lines = [["variant", "seed", "lr", *(f"T = {T}" for T in lengths), "seconds"]]
    for row in rows:
        cells = [row["variant"], str(row["seed"]), f"{row['lr']:g}"]
        if "failed" in row:
            lines.append([*cells, row["failed"], *[""] * len(lengths)])
        else:
            accuracies = (f"{row['accuracy'][T]:.3f}" for T in lengths)
            lines.append([*cells, *accuracies, f"{row['seconds']:.0f}"])
    return common.markdown(lines)


def main(argv: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(
        prog="benchmarks.recall", description=(__doc__ or "").split("\n")[0]
    )
    runs_pool.add_options(parser, jobs=6 * torch.cuda.device_count() or 1)
    add = parser.add_argument
    add("--small", action="store_true", help="T = 256, for a CPU")
    add("--networks", action="store_true", help="compression networks instead of the variants")
    add("--variants", nargs="+", metavar="NAME", help="all by default")
    add("--variant", action="append", default=[], metavar="NAME=JSON", help="one more, of settings")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--lrs", type=float, nargs="+", default=list(LR))
    add("--steps", type=int, help="of training")
    args = parser.parse_args(argv)
    if args.table:
        rows = common.read_rows(args.out or RESULTS)
        recall_report.draw(rows)
        return rows
    with tempfile.TemporaryDirectory(prefix="recall-") as temporary:
        try:
            plan = plan_of(args)
            work = args.work or (Path(temporary) if args.quick else None)
            pool = runs_pool.pool_of(args, "benchmarks.recall", work, RESULTS)
            return runs_pool.report(pool, plan.jobs, table)
        except ValueError as error:
            sys.exit(f"benchmarks.recall: {error}")


def plan_of(args: Namespace) -> Plan:
    sizes = QUICK if args.quick else SMALL if args.small else LARGE
    if args.steps is not None:
        sizes = Sizes(**{**vars(sizes), "steps": args.steps})
    if args.quick:
        args.seeds, args.lrs = args.seeds[:1], args.lrs[:1]
    known, given = variants(sizes), dict(map(parsed, args.variant))
    if args.networks:
        known = with_networks(sizes)
    names = args.variants or ([] if given else list(known))
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"variants must be some of {', '.join(known)}, got {unknown[0]!r}")
    chosen = {name: known[name] for name in names} | given
    return Plan(chosen, sizes, tuple(args.seeds), tuple(args.lrs))


if __name__ == "__main__":
    main()
