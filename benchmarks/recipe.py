"""Recipes: how a model of `learning.py` is trained, apart from its attention.

A recipe is given as NAME or NAME,FIELD=VALUE,...: a name of RECIPES with other values of some
fields of `Recipe`, or of the model's shape, as in "muon,warmup=500,depth=12". Rows have the text in
`recipe`, so that tables never mix recipes.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from native_sparse_attention import Transformer
from train_enwik8 import build_optimizer, learning_rate

OPTIMIZERS, SCHEDULES = ("adamw", "muon"), ("cosine", "linear")
# rows and columns of a matrix that Muon trains, at least: not the gates
LEAST = 32


@dataclass(frozen=True)
class Recipe:
    """Fields of a run's settings.

    optimizer:     "adamw", or "muon" for the matrices of the layers and AdamW for all others, both
                   at the same rate (Muon's steps have the size of AdamW's)
    lrs:           peak rates that the first seed tries
    schedule:      after the linear warm-up "cosine", down to a tenth, or "linear": constant, and
                   linear to 0 in the last share `decay` of the steps
    step_tokens:   of a step
    short_tokens:  of a sequence in the first share `short` of the steps
    average:       share of the steps that a moving average of the weights remembers, which is
                   tested; 0 tests the last weights
    qk_norm:       of every layer
    shape:         arguments of Transformer that replace those of the benchmark
    """

    optimizer: str = "adamw"
    lrs: tuple[float, ...] = (1e-3, 5e-4, 2e-3)
    schedule: str = "cosine"
    warmup: int = 200
    decay: float = 0.5
    weight_decay: float = 0.1
    clip: float = 1.0
    step_tokens: int = 32768
    short: float = 0.0
    short_tokens: int = 512
    average: float = 0.0
    qk_norm: bool = False
    name: str = "old"
    shape: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        names = dict(optimizer=OPTIMIZERS, schedule=SCHEDULES)
        for name, known in names.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        for name in ("decay", "short", "average"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}")

    @property
    def settings(self) -> dict[str, Any]:
        """What a run's spec has of it."""
        apart = ("lrs", "shape", "name", "step_tokens")
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in apart}
        return {"recipe": self.name, **values}


# "muon" is the best of two searches (docs/dev/log.md)
RECIPES = {
    "old": Recipe(),
    "muon": Recipe(
        optimizer="muon", lrs=(4e-3, 2e-3, 8e-3), schedule="linear", warmup=100, step_tokens=16384,
        short=0.2, average=0.02, qk_norm=True, name="muon",
    ),
}  # fmt: skip


def parsed(text: str) -> Recipe:
    """A recipe given as NAME,FIELD=VALUE,... Raises ValueError for what is unknown, or not in this
    torch."""
    name, *changes = text.split(",")
    if name not in RECIPES:
        raise ValueError(f"recipe must begin with one of {', '.join(RECIPES)}, got {text!r}")
    found, shape = RECIPES[name], dict[str, Any]()
    known = {f.name for f in fields(Recipe)} - {"lrs", "name", "shape"}
    values = dict[str, Any]()
    for change in changes:
        field, _, content = change.partition("=")
        try:
            value = json.loads(content)
        except ValueError:
            value = content
        if field not in known:
            shape[field] = value
        elif type(value) in (int, type(getattr(found, field))):
            values[field] = type(getattr(found, field))(value)
        else:
            raise ValueError(f"{field} of a recipe has another type, got {change!r}")
    found = replace(found, **values, name=text, shape=tuple(shape.items()))
    if found.optimizer == "muon" and not hasattr(torch.optim, "Muon"):
        raise ValueError(
            "optimizer 'muon' needs torch.optim.Muon of torch 2.9 or later, got torch "
            f"{torch.__version__}; choose a recipe of AdamW"
        )
    return found


# what a step does


def build_optimizers(model: Transformer, cfg: Namespace) -> list[Optimizer]:
    if cfg.optimizer == "adamw":
        return [build_optimizer(model, cfg)]
    matrices = [p for p in model.layers.parameters() if p.ndim == 2 and min(p.shape) >= LEAST]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    muon = torch.optim.Muon(
        matrices, lr=cfg.lr, weight_decay=cfg.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, build_optimizer(nn.ParameterList(others), cfg)]


def set_rate(optimizers: Sequence[Optimizer], cfg: Namespace, step: int) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate(cfg, step)


def rate(cfg: Namespace, step: int) -> float:
    """The learning rate of step 1, 2, ..."""
    if cfg.schedule == "cosine":
        return learning_rate(cfg, step)
    left = (cfg.steps - step + 1) / max(1.0, cfg.decay * cfg.steps)
    return cfg.lr * min(1.0, step / max(1, cfg.warmup), left)


def averaged(model: Transformer, cfg: Namespace) -> AveragedModel | None:
    """A moving average of the model's weights, where the recipe has one."""
    if not cfg.average:
        return None
    decay = 1 - 1 / max(1.0, cfg.average * cfg.steps)
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
