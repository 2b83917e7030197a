"""Training runs of a benchmark, each resumable, shared by as many processes as are started.

    for gpu in 0 1 2 3; do CUDA_VISIBLE_DEVICES=$gpu python -m benchmarks.recall --work DIR & done

A benchmark gives a plan: from the rows that are complete, the jobs that it wants, best first. Each
process takes the first job that no other one has, until none is left. A job has a directory of its
own under `--work`:

    spec.json      everything that decides its row
    checkpoint.pt  where it continues: written every `SAVE_EVERY` seconds and when it stops
    weights.pt     the trained weights
    row.json       its result; the run is complete

A process ends when all jobs are complete, or after `--deadline` seconds: then its run writes a
checkpoint and stops, as it does on SIGTERM and SIGINT. The next call continues it.

What a step of a run does is a function of the run's settings and the step's number: `recipe.py`
has its optimizers, its schedule and the average of its weights.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import json
import math
import re
import signal
import tempfile
import time
import traceback
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from native_sparse_attention import Transformer
from training.errors import UserError
from training.runs import locked, write

from . import common
from .common import Row
from .recipe import Recipe, build_optimizers, set_rate
from .variants import Settings

SPEC, CHECKPOINT, WEIGHTS = "spec.json", "checkpoint.pt", "weights.pt"
ROW = "row.json"
SAVE_EVERY = 60.0
# names whose runs of all seeds come before those of the next ones
TIER = 4


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
    """A job as it runs."""

    name: str
    folder: Path
    device: torch.device
    stop_at: float = math.inf
    options: dict[str, Any] = field(default_factory=dict)
    signals: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.saved = time.monotonic()

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


# its training

Losses = Tensor | tuple[Tensor, ...]


@dataclass
class Fitted:
    """What training measured: at each point of the curve (step, seconds, mean training loss since
    the last point in nats), and the seconds of all steps."""

    step: int = 0
    seconds: float = 0.0
    curve: list[list[float]] = field(default_factory=list)


def fit(
    model: Transformer, loss_at: Callable[[int], Losses], cfg: Namespace, run: Run,
    average: AveragedModel | None = None,
) -> Fitted:  # fmt: skip
    """Train to the last step, from the run's checkpoint if it has one.

    `loss_at(step)` is the loss of step 1, 2, ..., alone or with others that are added to it; the
    curve has that loss alone. `cfg` is that of `config`. `average` follows the weights.

    Raises:
        Stopped: the run has to stop; its checkpoint is written.
        ArithmeticError: a loss that is not finite.
    """
    optimizers, done = build_optimizers(model, cfg), Fitted()
    saved: dict[str, Any] = {"model": model} | ({} if average is None else {"average": average})
    saved |= {f"optimizer {index}": optimizer for index, optimizer in enumerate(optimizers)}
    total = torch.zeros((), dtype=torch.float64, device=cfg.device)
    if (state := run.load()) is not None:
        for name, part in saved.items():
            part.load_state_dict(state[name])
        done, total = Fitted(**state["done"]), state["total"]
    points = {round(cfg.steps * (i + 1) / cfg.points) for i in range(cfg.points)}
    model.train()
    before, since = done.seconds, common.synchronize(run.device)
    for step in range(done.step + 1, cfg.steps + 1):
        set_rate(optimizers, cfg, step)
        losses = loss_at(step)
        add_up(losses).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        if average is not None:
            average.update_parameters(model)
        total += (losses[0] if isinstance(losses, tuple) else losses).detach()
        done.step = step
        if step in points:
            done.seconds = before + common.synchronize(run.device) - since
            mean = total.item() / (step - (int(done.curve[-1][0]) if done.curve else 0))
            if not math.isfinite(mean):
                raise ArithmeticError(f"loss is {mean} in the steps up to {step}")
            done.curve.append([step, round(done.seconds, 3), mean])
            total.zero_()
            print(f"{run.name}: step {step} of {cfg.steps}, loss {mean:.4f}", flush=True)
        if run.stopping or run.save_due:
            done.seconds = before + common.synchronize(run.device) - since
            state = {name: part.state_dict() for name, part in saved.items()}
            run.save({**state, "done": vars(done), "total": total})
            if run.stopping:
                raise Stopped(f"{run.name}: stopped at step {done.step} of {cfg.steps}")
            before, since = done.seconds, common.synchronize(run.device)
    model.eval()
    run.write(WEIGHTS, (model if average is None else average.module).state_dict())
    return done


def add_up(losses: Losses) -> Tensor:
    return torch.stack(losses).sum() if isinstance(losses, tuple) else losses


def config(spec: dict[str, Any], run: Run) -> Namespace:
    """The settings of a run in the words of train_enwik8.py."""
    values = Recipe().settings
    names = ("steps", "points", "lr", "seed", "precision")
    values |= {name: spec[name] for name in (*names, *values) if name in spec}
    fixed = dict(accumulate=1, pack="", attention="sparse", backend="auto", compile="off")
    where = dict(device=str(run.device), batch_size=spec["batch"], seq_len=spec["T"])
    return Namespace(**values | fixed | where)


def on(tensor: Tensor, device: torch.device) -> Tensor:
    """On the GPU without waiting for it."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


# all of them


@dataclass
class Pool:
    """Where runs are, what executes them, and how long they run."""

    execute: Callable[[dict[str, Any], Run], Row]
    work: Path
    recorder: common.Recorder
    deadline: float = math.inf
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.deadline > 0:
            raise ValueError(f"deadline must be positive, got {self.deadline}")
        self.stop_at = time.time() + self.deadline
        self.rows: dict[str, Row] = {}

    def run(self, plan: Plan) -> list[Row]:
        """Run what the plan wants until it wants no more, or until the deadline.

        Returns the rows of the plan's jobs that are complete or have failed in this call.
        """
        self.work.mkdir(parents=True, exist_ok=True)
        signals: list[int] = []
        numbers = (signal.SIGTERM, signal.SIGINT)
        before = [signal.signal(n, lambda number, frame: signals.append(number)) for n in numbers]
        try:
            while (jobs := self.wanted(plan)) and not signals and time.time() < self.stop_at:
                for job in jobs:
                    folder = self.work / job.key
                    folder.mkdir(exist_ok=True)
                    try:
                        with locked(folder):
                            self.perform(job, signals)
                        break
                    except UserError:  # another process has it
                        continue
                else:
                    time.sleep(1)
        except Stopped as stop:
            print(stop, flush=True)
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)
        self.wanted(plan)
        return list(self.rows.values())

    def wanted(self, plan: Plan) -> list[Job]:
        """Collect what is complete, to the fixed point of the plan; the jobs that are left."""
        while True:
            before, jobs = len(self.rows), plan(list(self.rows.values()))
            for job in jobs:
                path = self.work / job.key / ROW
                if job.key not in self.rows and path.exists():
                    self.rows[job.key] = {"run": job.key, **json.loads(path.read_text())}
            if len(self.rows) == before:
                return [job for job in jobs if job.key not in self.rows]

    def perform(self, job: Job, signals: list[int]) -> None:
        """Run a job to its end: its row, or why it has none. Raises Stopped."""
        folder = self.work / job.key
        if (folder / ROW).exists():
            return
        write(folder / SPEC, json.dumps(job.spec, sort_keys=True).encode())
        run = Run(job.name, folder, self.recorder.device, self.stop_at, self.options, signals)
        try:
            row = self.execute(json.loads(json.dumps(job.spec)), run)
        except Stopped:
            raise
        except Exception as error:
            traceback.print_exc()
            row = {**job.spec, "failed": common.why(error)}
        content = json.dumps({**row, **self.recorder.environment})
        if "failed" not in row:
            write(folder / ROW, content.encode())
            (folder / CHECKPOINT).unlink(missing_ok=True)
        self.rows[job.key] = {"run": job.key, **json.loads(content)}
        while True:
            try:
                with locked(self.work):
                    self.recorder.add(self.rows[job.key])
                return
            except UserError:  # another process adds a row
                time.sleep(0.1)


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


def options(parser: argparse.ArgumentParser) -> None:
    """The options of every benchmark of runs."""
    add = parser.add_argument
    add("--work", type=Path, help="directory of the runs, on a local disk; a next call continues")
    add("--deadline", type=float, default=math.inf, help="seconds, after which a run stops")
    add("--variants", nargs="+", metavar="NAME", help="or patterns such as '1088*'; all by default")
    add("--seeds", type=int, nargs="+", help="0 1 2 by default")
    add("--lrs", type=float, nargs="+", help="learning rates that the first seed tries")


def variants_of(args: Namespace, known: dict[str, Settings]) -> dict[str, Settings]:
    """Raises ValueError for a name that is not known."""
    found = dict[str, Settings]()
    for pattern in args.variants or ["*"]:
        if not (names := [name for name in known if fnmatchcase(name, pattern)]):
            raise ValueError(f"variants must be some of {', '.join(known)}, got {pattern!r}")
        found |= {name: known[name] for name in names}
    return found


@contextmanager
def work_of(args: Namespace) -> Iterator[Path]:
    """The directory of the runs: --work, or with --quick one that goes. Raises ValueError: there is
    neither."""
    if args.work is None and not args.quick:
        raise ValueError("work must be given to train, --work DIR")
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield args.work or Path(temporary)


def run_all(pool: Pool, plan: Plan) -> None:
    """Run a plan; the rows of the program are those of complete and of failed runs."""
    rows = pool.run(plan)
    print(f"{len(rows)} runs complete or failed, {len(plan(rows)) - len(rows)} known ones left")
    pool.recorder.rows = rows


# statistics over seeds

# the runs of a variant, one for each seed
Variants = dict[str, list[Row]]


def chosen(rows: Sequence[Row], loss: Callable[[Row], float]) -> list[Row]:
    """Of one variant's runs, the latest one of each seed with the chosen learning rate: that of the
    most seeds, of several that of the least loss. The settings are those of the last row."""
    by_lr: dict[float, dict[int, Row]] = {}
    for row in rows:
        if row["settings"] == rows[-1]["settings"]:
            by_lr.setdefault(row["lr"], {})[row["seed"]] = row

    def rank(lr: float) -> tuple[int, float]:
        return -len(by_lr[lr]), fmean(map(loss, by_lr[lr].values()))

    best = by_lr[min(by_lr, key=rank)]
    return [best[seed] for seed in sorted(best)]


def by_variant(rows: Sequence[Row], loss: Callable[[Row], float]) -> Variants:
    """The chosen runs of every variant, the least loss first."""
    names = dict.fromkeys(row["variant"] for row in rows)
    runs = {name: chosen([row for row in rows if row["variant"] == name], loss) for name in names}
    return dict(sorted(runs.items(), key=lambda item: fmean(map(loss, item[1]))))


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean and standard deviation."""
    mean = f"{fmean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {stdev(values):.{digits}f}"
