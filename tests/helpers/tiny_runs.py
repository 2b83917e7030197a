"""Tiny runs of train_enwik8.py, to harm and to go on with."""

import json

import torch
from safetensors.torch import load_file

from tests.training.test_train_enwik8 import TINY, in_process

PLAN = ["--steps", 8, "--save-every", 4, "--eval-every", 4, "--sample-every", 0, *TINY]
KINDS = [".safetensors", ".optimizer", ".json"]
NEWEST, OLDER = "step-00000008", "step-00000004"


OPTIONS = {"whole": [], "seed": ["--seed", 1], "wide": ["--dim", 24]}


def make_runs(cwd, *names):
    """Runs of 8 steps, with checkpoints of steps 4 and 8."""
    (cwd / "data").write_text("".join(f"{i} squared is {i * i}\n" for i in range(1000)))
    for name in names:
        done = in_process(cwd, "--data", "data", "--name", name, *PLAN, *OPTIONS[name])
        assert done.returncode == 0, done.stderr
    return cwd


def resume(run, *args):
    return in_process(run.parent, "--resume", run, "--steps", 12, *args)


def contents(run):
    return {path: path.read_bytes() for path in run.iterdir()}


def config_of(run):
    return json.loads((run / "config.json").read_text())


def load_equal(one, other):
    one, other = load_file(one), load_file(other)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
