"""`--resume`: the settings of a run, its lock, its newest whole checkpoint."""

from __future__ import annotations

import math
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from native_sparse_attention import Transformer
from native_sparse_attention.runs import (
    BEST,
    TornError,
    checkpoint_steps,
    load_best,
    newest_checkpoint,
)

from .errors import UserError
from .runs import locked, missing_lines, read_metrics, remove_checkpoint, restore
from .settings import Table, find_device, open_run


def resume_settings(
    given: Namespace, table: Table, held: ExitStack
) -> tuple[Namespace, dict[str, Any]]:
    """The settings of the run and its `config.json`; `held` keeps the lock of the run."""
    run: Path = given.resume
    open_run(run, given, table)
    held.enter_context(locked(run))
    cfg, config = open_run(run, given, table)  # its last writer may have changed it meanwhile
    cfg.device = find_device(cfg.device)
    return cfg, config


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
        for text in torn:
            print(f"{text}; beginning at step 0")
        return None
    # what a killed run wrote after its checkpoint goes
    records = [record for record in records if record["step"] <= found.step]
    notes += missing_lines(run, records, found.step, cfg.log_every, cfg.eval_every)

    # what the next best has to beat; without the file of the last, any will do
    best, lost = found.best, ""
    first = records[0].get("val_bpb", math.nan) if records else math.nan
    try:
        known = not math.isnan(first) or found.step == 0
        if not load_best(run, config, model) and (best < first or not known):
            lost = f"{run / BEST} is missing"
    except TornError as error:
        lost = str(error)
    if lost:
        best = math.inf
        notes.append(f"{lost}; the next validation writes it")
    restore(run, found, model, optimizer)
    for step in checkpoint_steps(run):
        if step > found.step:  # torn ones, which would count as kept
            remove_checkpoint(run, step)
    for note in [*(f"{text}; going on from step {found.step}" for text in torn), *notes]:
        print(note)
    return found.step, best, records, lines[: len(records)]
