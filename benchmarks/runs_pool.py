"""Training runs of a benchmark: many at a time, over all GPUs, each resumable.

A benchmark gives a plan: from the rows that are complete, the jobs that it wants, best first. Each
job runs in a process of its own, on one GPU, and in a directory of its own under `--work`:

    spec.json      everything that decides its row
    checkpoint.pt  where it continues: written every `SAVE_EVERY` seconds and when it stops
    weights.pt     the trained weights
    row.json       its result; the run is complete
    failed.json    why it has none
    log.txt        what it printed

A call ends when all jobs are complete, or after `--deadline` seconds: then all runs write a
checkpoint and stop, as they do on SIGTERM and SIGINT. The next call continues them. Only the first
process writes rows, one for each complete run.

What a step of a run does is a function of the run's settings and the step's number. AdamW, linear
warm-up, cosine down to a tenth of the learning rate, as train_enwik8.py.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import io
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import traceback
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from native_sparse_attention import Transformer
from train_enwik8 import build_optimizer, learning_rate
from training.runs import locked, write

from . import common
from .common import Row

SPEC, CHECKPOINT, WEIGHTS, ROW, FAILED, LOG = (
    "spec.json", "checkpoint.pt", "weights.pt", "row.json", "failed.json", "log.txt",
)  # fmt: skip
SAVE_EVERY = 60.0
# names whose runs of all seeds come before those of the next ones
TIER = 4
# exit status of a run that stopped at a checkpoint
STOPPED = 75


class Stopped(Exception):
    """A run ended at a checkpoint, before it was complete."""


@dataclass(frozen=True)
class Job:
    """A run: `name` is for people, `spec` (JSON) is everything that decides its row."""

    name: str
    spec: dict[str, Any]

    @property
    def key(self) -> str:
        """The name of its directory, and of its row."""
        content = json.dumps(self.spec, sort_keys=True).encode()
        slug = re.sub(r"[^a-z0-9.]+", "-", self.name.lower()).strip("-")
        return f"{slug[:80]}-{hashlib.sha256(content).hexdigest()[:10]}"


Plan = Callable[[list[Row]], list[Job]]


# a run


@dataclass
class Run:
    """A job as the process that runs it sees it."""

    name: str
    folder: Path
    device: torch.device
    stop_at: float = math.inf
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.saved = time.monotonic()
        self.signals: list[int] = []

    def catch_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: self.signals.append(number))

    @property
    def stopping(self) -> bool:
        return bool(self.signals or time.time() >= self.stop_at)

    @property
    def save_due(self) -> bool:
        return time.monotonic() - self.saved >= SAVE_EVERY

    def save(self, state: dict[str, Any]) -> None:
        self.write(CHECKPOINT, state)
        self.saved = time.monotonic()

    def write(self, name: str, state: dict[str, Any]) -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write(self.folder / name, buffer.getvalue())

    def load(self) -> dict[str, Any] | None:
        """The last checkpoint."""
        path = self.folder / CHECKPOINT
        if not path.exists():
            return None
        return torch.load(path, map_location=self.device, weights_only=True)


def perform(module: str, run: Run) -> None:
    """Run a job to its end, and write its row or why it has none. Raises Stopped."""
    spec = json.loads((run.folder / SPEC).read_text())
    execute: Callable[[dict[str, Any], Run], Row] = importlib.import_module(module).execute
    (run.folder / FAILED).unlink(missing_ok=True)
    try:
        with locked(run.folder):
            row = execute(spec, run)
    except Stopped:
        raise
    except Exception as error:
        traceback.print_exc()
        content = {"failed": common.why(error)} | common.environment(run.device)
        write(run.folder / FAILED, json.dumps(content).encode())
        return
    row = {**row, **common.environment(run.device)}
    write(run.folder / ROW, json.dumps(row).encode())
    (run.folder / CHECKPOINT).unlink(missing_ok=True)


def child(argv: list[str] | None = None) -> int:
    """`python -m benchmarks.runs_pool`: the process of one job."""
    parser = argparse.ArgumentParser(prog="benchmarks.runs_pool")
    for name in ("module", "folder", "name", "device", "options"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--stop-at", type=float, required=True)
    args = parser.parse_args(argv)
    device, options = torch.device(args.device), json.loads(args.options)
    run = Run(args.name, Path(args.folder), device, args.stop_at, options)
    run.catch_signals()
    torch.set_num_threads(1)
    try:
        perform(args.module, run)
        return 0
    except Stopped as stop:
        print(stop, flush=True)
        return STOPPED


# its training

Losses = Tensor | tuple[Tensor, ...]


class Diverged(Exception):
    """The loss of a run is not finite."""


@dataclass
class Fitted:
    """What training measured: at each point of the curve (step, seconds, mean training loss since
    the last point in nats), and the seconds of all steps."""

    step: int = 0
    seconds: float = 0.0
    curve: list[list[float]] = field(default_factory=list)


def fit(model: Transformer, loss_at: Callable[[int], Losses], cfg: Namespace, run: Run) -> Fitted:
    """Train to the last step, from the run's checkpoint if it has one.

    `loss_at(step)` is the loss of step 1, 2, ..., alone or with others that are added to it; the
    curve has that loss alone. `cfg` is that of `config`.

    Raises:
        Stopped: the run has to stop; its checkpoint is written.
        Diverged: a loss that is not finite.
    """
    optimizer, done = build_optimizer(model, cfg), Fitted()
    total = torch.zeros((), dtype=torch.float64, device=cfg.device)
    if (state := run.load()) is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done, total = Fitted(**state["done"]), state["total"]
    points = {round(cfg.steps * (i + 1) / cfg.points) for i in range(cfg.points)}
    model.train()
    before, since = done.seconds, common.synchronize(run.device)
    for step in range(done.step + 1, cfg.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(cfg, step)
        losses = loss_at(step)
        add_up(losses).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        optimizer.step()
        optimizer.zero_grad()
        total += (losses[0] if isinstance(losses, tuple) else losses).detach()
        done.step = step
        if step in points:
            done.seconds = before + common.synchronize(run.device) - since
            mean = total.item() / (step - (int(done.curve[-1][0]) if done.curve else 0))
            if not math.isfinite(mean):
                raise Diverged(f"loss is {mean} in the steps up to {step}")
            done.curve.append([step, round(done.seconds, 3), mean])
            total.zero_()
            print(f"{run.name}: step {step} of {cfg.steps}, loss {mean:.4f}", flush=True)
        if run.stopping or run.save_due:
            done.seconds = before + common.synchronize(run.device) - since
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            run.save({**state, "done": vars(done), "total": total})
            if run.stopping:
                raise Stopped(f"{run.name}: stopped at step {done.step} of {cfg.steps}")
            before, since = done.seconds, common.synchronize(run.device)
    model.eval()
    run.write(WEIGHTS, model.state_dict())
    return done


def add_up(losses: Losses) -> Tensor:
    return torch.stack(losses).sum() if isinstance(losses, tuple) else losses


def config(spec: dict[str, Any], run: Run) -> Namespace:
    """The settings of a run in the words of train_enwik8.py."""
    names = ("steps", "points", "lr", "warmup", "weight_decay", "clip", "seed", "precision")
    fixed = dict(accumulate=1, pack="", attention="sparse", backend="auto", compile="off")
    where = dict(device=str(run.device), batch_size=spec["batch"], seq_len=spec["T"])
    return Namespace(**{name: spec[name] for name in names}, **fixed, **where)


def on(tensor: Tensor, device: torch.device) -> Tensor:
    """On the GPU without waiting for it."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


# all of them


@dataclass
class Pool:
    """Where and how long runs run. `jobs`: how many at a time; 0: in this process, one after
    another."""

    module: str
    work: Path
    device: torch.device
    jobs: int = 1
    deadline: float = math.inf
    out: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.jobs < 0:
            raise ValueError(f"jobs must be at least 0, got {self.jobs}")
        if not self.deadline > 0:
            raise ValueError(f"deadline must be positive, got {self.deadline}")
        self.stop_at = time.time() + self.deadline
        self.rows: dict[str, Row] = {}
        recorded = common.read_rows(self.out) if self.out else []
        self.recorded = {row.get("run") for row in recorded if "failed" not in row}

    def run(self, plan: Plan) -> list[Row]:
        """Run what the plan wants until it wants no more, or until the deadline.

        Returns the rows of the plan's jobs that are complete or have failed, and appends those to
        `out` that it does not have.
        """
        running: dict[str, tuple[Job, subprocess.Popen[bytes], str | None]] = {}
        free, stopped = places(self.device, self.jobs), False
        while True:
            jobs = [job for job in self.wanted(plan) if job.key not in running]
            while jobs and not stopped and time.time() < self.stop_at and (free or not self.jobs):
                job = jobs.pop(0)
                if self.jobs:
                    place = free.pop(0)
                    running[job.key] = (job, self.start(job, place), place)
                else:
                    stopped = self.perform(job)
                    jobs = self.wanted(plan)
            if not running:
                return list(self.rows.values())
            time.sleep(0.2)
            for key, (job, process, place) in list(running.items()):
                if (status := process.poll()) is not None:
                    del running[key]
                    free.append(place)
                    stopped |= status == STOPPED
                    self.finish(job, status)

    def wanted(self, plan: Plan) -> list[Job]:
        """Collect what is complete, to the fixed point of the plan; the jobs that are left."""
        while True:
            before, jobs = len(self.rows), plan(list(self.rows.values()))
            for job in jobs:
                path = self.work / job.key / ROW
                if job.key not in self.rows and path.exists():
                    self.collect({"run": job.key, **json.loads(path.read_text())})
            if len(self.rows) == before:
                return [job for job in jobs if job.key not in self.rows]

    def collect(self, row: Row) -> None:
        self.rows[row["run"]] = row
        if row["run"] not in self.recorded:
            common.append_row(self.out, row)
            self.recorded.add(row["run"])

    def prepare(self, job: Job) -> Path:
        folder = self.work / job.key
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / SPEC, json.dumps(job.spec, sort_keys=True).encode())
        return folder

    def finish(self, job: Job, status: int) -> None:
        """What a run left: its failure is told once a call."""
        folder = self.work / job.key
        if status == STOPPED or (folder / ROW).exists():
            return
        row: Row = {"run": job.key, **job.spec, "failed": f"its process ended with status {status}"}
        if (folder / FAILED).exists():
            row |= json.loads((folder / FAILED).read_text())
        print(f"{job.name}: failed: {row['failed']}", flush=True)
        self.collect(row)

    def perform(self, job: Job) -> bool:
        """A job in this process; whether it stopped."""
        run = Run(job.name, self.prepare(job), self.device, self.stop_at, self.options)
        try:
            perform(self.module, run)
        except Stopped:
            return True
        self.finish(job, 0)
        return False

    def start(self, job: Job, place: str | None) -> subprocess.Popen[bytes]:
        folder = self.prepare(job)
        values = {
            "module": self.module, "folder": folder.resolve(), "name": job.name,
            "device": self.device, "options": json.dumps(self.options), "stop-at": self.stop_at,
        }  # fmt: skip
        command = [sys.executable, "-u", "-m", "benchmarks.runs_pool"]
        command += [f"--{name}={value}" for name, value in values.items()]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        env |= {} if place is None else {"CUDA_VISIBLE_DEVICES": place}
        with (folder / LOG).open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, cwd=common.ROOT, env=env)


def places(device: torch.device, jobs: int) -> list[str | None]:
    """For each of the processes at a time, its CUDA_VISIBLE_DEVICES: the GPUs in turn."""
    if device.type != "cuda":
        return [None] * jobs
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
    return [names[index % len(names)] for index in range(jobs)]


# what benchmarks of runs have in common


def sweep(
    names: Sequence[str], lengths: Sequence[int], seeds: Sequence[int], lrs: Sequence[float],
    training: Callable[[str, int, int, float], Job], loss: Callable[[Row], float], rows: list[Row],
) -> list[Job]:  # fmt: skip
    """Jobs of `training(name, T, seed, lr)` in the order of their value, as far as the rows tell:
    of each `TIER` names first the learning rates, at the first seed and length; then the other
    seeds and lengths with the rate of the least `loss(row)`."""
    known, jobs = {row["run"]: row for row in rows}, list[Job]()

    def trials(name: str) -> list[Job]:
        return [training(name, lengths[0], seeds[0], lr) for lr in lrs]

    def best(name: str) -> float | None:
        """Once all rates are complete or have failed."""
        tried = [known.get(job.key) for job in trials(name)]
        complete = [row for row in tried if row is not None and "failed" not in row]
        if None in tried or not complete:
            return None
        return min(complete, key=loss)["lr"]

    tiers = [names[first : first + TIER] for first in range(0, len(names), TIER)]
    for T, group in itertools.product(lengths, tiers):
        if lengths[0] == T:
            jobs += [job for some in zip(*map(trials, group), strict=True) for job in some]
        for seed, name in itertools.product(seeds, group):
            lr = best(name)
            if lr is not None and (T, seed) != (lengths[0], seeds[0]):
                jobs.append(training(name, T, seed, lr))
    return jobs


def parser_of(name: str, about: str | None, jobs: int) -> argparse.ArgumentParser:
    """The options of every benchmark of runs."""
    parser = common.parser_of(name, about, seconds=None)
    add = parser.add_argument
    add("--work", type=Path, help="directory of the runs, on a local disk; a next call continues")
    add("--jobs", type=int, help=f"runs at a time, over all GPUs ({jobs}); 0: in this process")
    parser.set_defaults(usual_jobs=jobs)
    add("--deadline", type=float, default=math.inf, help="seconds, after which all runs stop")
    return parser


def pool_of(args: Namespace, module: str, work: Path | None, results: Path, **options: Any) -> Pool:
    """The pool of a command's options; `options` are for its runs.

    Raises:
        ValueError: an option out of range, or no directory of runs.
    """
    if work is None:
        raise ValueError("work must be given to train, --work DIR")
    device, jobs = torch.device(args.device), args.jobs
    if jobs is None:
        jobs = 0 if args.quick else args.usual_jobs
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    options["runs_per_gpu"] = jobs / gpus if gpus else None
    out = common.out_of(args, results)
    return Pool(module, work, device, jobs, args.deadline, out, options)


def report(pool: Pool, plan: Plan, table: Callable[[list[Row]], str]) -> list[Row]:
    """Run a plan and print its rows; the exit status tells of failures."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = pool.run(plan)
    print(table(rows), flush=True)
    failed = [row for row in rows if "failed" in row]
    left = len(plan(rows)) - len(rows)
    print(f"{len(rows)} runs complete or failed, {left} known ones left", flush=True)
    if failed:
        sys.exit(f"{len(failed)} runs failed: {failed[0]['failed']}")
    return rows


if __name__ == "__main__":
    # the module that benchmarks import, so that there is one class Stopped
    sys.exit(importlib.import_module("benchmarks.runs_pool").child())
