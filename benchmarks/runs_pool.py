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
checkpoint and stop. They also stop on SIGTERM, SIGINT, or if the first process is gone. The next
call continues them. Only the first process writes rows, one for each complete run.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from training.errors import UserError
from training.runs import locked, write

from . import common
from .common import Row

SPEC, CHECKPOINT, WEIGHTS, ROW, FAILED, LOG = (
    "spec.json", "checkpoint.pt", "weights.pt", "row.json", "failed.json", "log.txt",
)  # fmt: skip
SAVE_EVERY = 60.0
SAY_EVERY = 20.0
# a run that begins so late before the deadline would only start
LEAST_SECONDS = 30.0
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
    parent: int = 0

    def __post_init__(self) -> None:
        self.saved = self.said = time.monotonic()
        self.signals: list[int] = []

    def catch_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: self.signals.append(number))

    @property
    def stopping(self) -> bool:
        gone = self.parent and os.getppid() != self.parent
        return bool(self.signals or gone or time.time() >= self.stop_at)

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

    def say(self, text: Callable[[], str]) -> None:
        """A line of progress, if the last one is old enough."""
        if time.monotonic() - self.said >= SAY_EVERY:
            self.said = time.monotonic()
            print(f"{self.name}: {text()}", flush=True)


def perform(module: str, run: Run) -> None:
    """Run a job to its end, and write its row or why it has none. Raises Stopped."""
    spec = json.loads((run.folder / SPEC).read_text())
    execute: Callable[[dict[str, Any], Run], Row] = importlib.import_module(module).execute
    (run.folder / FAILED).unlink(missing_ok=True)
    try:
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
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args(argv)
    device, options = torch.device(args.device), json.loads(args.options)
    run = Run(args.name, Path(args.folder), device, args.stop_at, options, args.parent)
    run.catch_signals()
    torch.set_num_threads(1)
    while True:
        try:
            with locked(run.folder):
                perform(args.module, run)
            return 0
        except Stopped as stop:
            print(stop, flush=True)
            return STOPPED
        except UserError as error:  # a process of an earlier call is about to stop
            print(error, flush=True)
            if run.stopping:
                return STOPPED
            time.sleep(1)


# all of them


@dataclass(frozen=True)
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

    def folder(self, job: Job) -> Path:
        return self.work / job.key

    def prepare(self, job: Job) -> Path:
        folder = self.folder(job)
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / SPEC, json.dumps(job.spec, sort_keys=True).encode())
        return folder

    def row(self, job: Job) -> Row | None:
        """The row of a complete run."""
        path = self.folder(job) / ROW
        return {"run": job.key, **json.loads(path.read_text())} if path.exists() else None

    def failure(self, job: Job) -> Row | None:
        path = self.folder(job) / FAILED
        if not path.exists():
            return None
        return {"run": job.key, **job.spec, **json.loads(path.read_text())}

    def run(self, plan: Plan) -> list[Row]:
        """Run what the plan wants until it wants no more, or until the deadline.

        Returns the rows of the plan's jobs that are complete or have failed, and appends those to
        `out` that it does not have.
        """
        return Call(self, plan).run()


def places(device: torch.device, jobs: int) -> list[str | None]:
    """For each of the processes at a time, its CUDA_VISIBLE_DEVICES: the GPUs in turn."""
    if device.type != "cuda":
        return [None] * jobs
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
    return [names[index % len(names)] for index in range(jobs)]


class Call:
    """One call of a pool: its queue and its processes."""

    def __init__(self, pool: Pool, plan: Plan) -> None:
        self.pool, self.plan = pool, plan
        self.stop_at = time.time() + pool.deadline
        self.free = places(pool.device, pool.jobs)
        self.running: dict[str, tuple[Job, subprocess.Popen[bytes], str | None]] = {}
        self.failed: dict[str, Row] = {}
        self.rows: dict[str, Row] = {}
        self.recorded = {
            row.get("run") for row in common.read_rows(pool.out or Path()) if "failed" not in row
        } if pool.out else set()  # fmt: skip
        self.stopped = False
        self.told = time.monotonic()

    def run(self) -> list[Row]:
        try:
            while jobs := self.update():
                if self.pool.jobs == 0:
                    self.perform(jobs[0])
                else:
                    self.start(jobs)
                    if not self.running:
                        break
                    self.wait()
        except KeyboardInterrupt:
            self.stop_at = 0.0
            for _, process, _ in self.running.values():
                process.terminate()
            while self.running:
                self.wait()
            self.update()
        except Stopped:
            self.update()
        return list(self.rows.values())

    def update(self) -> list[Job]:
        """Collect what is complete, to the fixed point of the plan; the jobs that are left."""
        while True:
            before = len(self.rows)
            jobs = self.plan(list(self.rows.values()))
            for job in jobs:
                if job.key not in self.rows:
                    self.collect(job)
            if len(self.rows) == before:
                return [job for job in jobs if job.key not in self.rows]

    def collect(self, job: Job) -> None:
        row = self.pool.row(job) or self.failed.get(job.key)
        if row is None:
            return
        self.rows[job.key] = row
        if job.key not in self.recorded:
            common.append_row(self.pool.out, row)
            self.recorded.add(job.key)

    def finish(self, job: Job, status: int) -> None:
        """What a run's process left: its failure is told once a call."""
        if self.pool.row(job) is None and status != STOPPED:
            failed = self.pool.failure(job) or {
                "run": job.key,
                **job.spec,
                "failed": f"its process ended with status {status}",
            }
            self.failed[job.key] = failed
            print(f"{job.name}: failed: {failed['failed']}", flush=True)
        elif status != STOPPED:
            print(f"{job.name}: complete", flush=True)

    def perform(self, job: Job) -> None:
        """A job in this process."""
        folder = self.pool.prepare(job)
        run = Run(job.name, folder, self.pool.device, self.stop_at, self.pool.options)
        if run.stopping:
            raise Stopped
        with locked(folder):
            perform(self.pool.module, run)
        self.finish(job, 0)

    def start(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            late = self.stop_at - time.time() < LEAST_SECONDS and self.pool.deadline > LEAST_SECONDS
            if not self.free or late or time.time() >= self.stop_at or self.stopped:
                return
            if job.key in self.running:
                continue
            place, folder = self.free.pop(0), self.pool.prepare(job)
            command = [sys.executable, "-u", "-m", "benchmarks.runs_pool"]
            given = {
                "module": self.pool.module, "folder": folder.resolve(), "name": job.name,
                "device": self.pool.device, "options": json.dumps(self.pool.options),
                "stop-at": self.stop_at, "parent": os.getpid(),
            }  # fmt: skip
            command += [part for name, value in given.items() for part in (f"--{name}", str(value))]
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            env |= {} if place is None else {"CUDA_VISIBLE_DEVICES": place}
            with (folder / LOG).open("ab") as log:
                process = subprocess.Popen(
                    command, stdout=log, stderr=log, cwd=common.ROOT, env=env
                )
            self.running[job.key] = job, process, place

    def wait(self, pause: float = 0.2) -> None:
        """Until a process ends; what all of them are at, now and then."""
        while self.running:
            time.sleep(pause)
            ended = [key for key, (_, p, _) in self.running.items() if p.poll() is not None]
            for key in ended:
                job, process, place = self.running.pop(key)
                # the place that was free longest is taken first, the GPUs stay even
                self.free.append(place)
                self.stopped |= process.returncode == STOPPED
                self.finish(job, process.returncode)
            if time.monotonic() - self.told >= SAY_EVERY:
                self.told = time.monotonic()
                for _, (job, _, place) in self.running.items():
                    where = "" if place is None else f"GPU {place}, "
                    print(f"  {where}{self.last_line(job)}", flush=True)
            if ended:
                return

    def last_line(self, job: Job) -> str:
        lines = (self.pool.folder(job) / LOG).read_text(errors="replace").splitlines()
        return lines[-1] if lines else f"{job.name}: starts"


# what benchmarks of runs have in common


def sweep(
    names: Sequence[str], lengths: Sequence[int], seeds: Sequence[int], lrs: Sequence[float],
    training: Callable[[str, int, int, float], Job], loss: Callable[[Row], float], rows: list[Row],
) -> list[Job]:  # fmt: skip
    """Jobs of `training(name, T, seed, lr)` in the order of their value, as far as the rows tell:
    of each `TIER` names first the learning rates, at the first seed and length; then the other
    seeds and lengths with the rate of the least `loss(row)`."""
    known, found = {row["run"]: row for row in rows}, []

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
            found += [job for jobs in zip(*map(trials, group), strict=True) for job in jobs]
        for seed, name in itertools.product(seeds, group):
            lr = best(name)
            if lr is not None and (T, seed) != (lengths[0], seeds[0]):
                found.append(training(name, T, seed, lr))
    return found


def on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the GPU without waiting for it."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def pool_of(
    args: argparse.Namespace, module: str, work: Path | None, results: Path, **options: Any
) -> Pool:
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
    out = args.out or (None if args.quick else results)
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


def add_options(parser: argparse.ArgumentParser, jobs: int) -> None:
    """The options of every benchmark of runs."""
    add = parser.add_argument
    add("--work", type=Path, help="directory of the runs, on a local disk; a next call continues")
    add("--jobs", type=int, help=f"runs at a time, over all GPUs ({jobs}); 0: in this process")
    parser.set_defaults(usual_jobs=jobs)
    add("--deadline", type=float, default=math.inf, help="seconds, after which all runs stop")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, help="JSONL of the rows; none with --quick")
    add("--table", action="store_true", help="redraw tables and plots of the rows there")
    add("--quick", action="store_true", help="tiny sizes, nothing recorded")


if __name__ == "__main__":
    # the module that benchmarks import, so that there is one class Stopped
    sys.exit(importlib.import_module("benchmarks.runs_pool").child())
