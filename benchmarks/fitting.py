"""The training loop of `learning.py` and `recall.py`, which continues from its checkpoint exactly.

What a step does is a function of the run's settings and the step's number: its data and whether it
is dense. AdamW, linear warm-up, cosine down to a tenth of the learning rate, as train_enwik8.py.
"""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from native_sparse_attention import Transformer
from train_enwik8 import build_optimizer, learning_rate

from .runs_pool import WEIGHTS, Run, Stopped
from .variants import Settings, is_dense_step, set_dense

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


def fit(
    model: Transformer, loss_at: Callable[[int], Losses], settings: Settings, cfg: Namespace,
    run: Run,
) -> Fitted:  # fmt: skip
    """Train to the last step, from the run's checkpoint if it has one.

    `loss_at(step)` is the loss of step 1, 2, ..., alone or with others that are added to it; the
    curve has that loss alone. `cfg` holds steps, points (of the curve), lr,
    warmup, weight_decay, clip, seed and device. `run.load()` of a run whose training is complete
    restores its weights.

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

    def save() -> None:
        tensors = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        run.save({**tensors, "done": vars(done), "total": total})

    def synchronize() -> float:
        if torch.device(cfg.device).type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic()

    model.train()
    before, since = done.seconds, synchronize()
    for step in range(done.step + 1, cfg.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(cfg, step)
        set_dense(model, settings, is_dense_step(settings, cfg.steps, step, cfg.seed))
        losses = loss_at(step)
        summed(losses).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        optimizer.step()
        optimizer.zero_grad()
        total += (losses[0] if isinstance(losses, tuple) else losses).detach()
        done.step = step
        if step in points:
            done.seconds = before + synchronize() - since
            steps = step - (int(done.curve[-1][0]) if done.curve else 0)
            mean = total.item() / steps
            if not math.isfinite(mean):
                raise Diverged(f"loss is {mean} in the steps up to {step}")
            done.curve.append([step, round(done.seconds, 3), mean])
            total.zero_()
        run.say(lambda: told(done, cfg.steps))
        if run.stopping or run.save_due:
            done.seconds = before + synchronize() - since
            save()
            if run.stopping:
                raise Stopped(f"{run.name}: stopped at step {done.step} of {cfg.steps}")
            before, since = done.seconds, synchronize()
    set_dense(model, settings, dense=False)
    model.eval()
    run.write(WEIGHTS, model.state_dict())
    return done


def summed(losses: Losses) -> Tensor:
    return torch.stack(losses).sum() if isinstance(losses, tuple) else losses


def told(done: Fitted, steps: int) -> str:
    loss = f", loss {done.curve[-1][2]:.4f}" if done.curve else ""
    return f"step {done.step} of {steps}{loss}"


def config(spec: dict[str, Any], run: Run) -> Namespace:
    """The settings of a run in the words of train_enwik8.py."""
    names = ("steps", "points", "lr", "warmup", "weight_decay", "clip", "seed", "precision")
    given = {name: spec[name] for name in names}
    fixed = dict(accumulate=1, pack="", attention="sparse", backend="auto", compile="off")
    where = dict(device=str(run.device), batch_size=spec["batch"], seq_len=spec["T"])
    return Namespace(**given, **fixed, **where)
