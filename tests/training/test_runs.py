"""The files of a run: damaged, missing, of another run or version; loading them in Python; who may
write them, and what a kill or a full disk leaves of them."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import time
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from native_sparse_attention import Transformer
from tests.training.test_train_enwik8 import (
    TINY,
    command,
    finished,
    in_process,
    metrics,
    refused,
    script,
)
from training import runs
from training.runs import load_model
from training.sample import printable

pytestmark = pytest.mark.usefixtures("without_plots")
PLAN = ["--steps", 8, "--save-every", 4, "--eval-every", 4, "--sample-every", 0, *TINY]
KINDS = [".safetensors", ".optimizer", ".json"]
NEWEST, OLDER = "step-00000008", "step-00000004"


OPTIONS = {"whole": [], "seed": ["--seed", 2**63 - 1]}
OPTIONS["wide"] = ["--dim", 24, "--attention", "dense"]


def make_runs(cwd, *names):
    """Runs of 8 steps, with checkpoints of steps 4 and 8."""
    (cwd / "data").write_text("".join(f"{i} squared is {i * i}\n" for i in range(1000)))
    for name in names:
        finished(in_process(cwd, "--data", "data", "--name", name, *PLAN, *OPTIONS[name]))
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_runs(tmp_path_factory.mktemp("runs"), *OPTIONS)


@pytest.fixture
def run(folder, tmp_path):
    return shutil.copytree(folder / "runs/whole", tmp_path / "run")


@pytest.mark.parametrize("name", [*(NEWEST + kind for kind in KINDS), "best.safetensors"])
def test_one_flipped_bit_is_refused(run, name):
    """Anywhere: in the length of a header, in the header, in a tensor, at the end."""
    path, config = run / name, config_of(run)
    whole, draw = path.read_bytes(), np.random.default_rng(0)
    model = Transformer(**runs.model_arguments(config["settings"]))
    places = [*range(0, 12, 3), -1, *draw.integers(len(whole), size=5).tolist()]
    for place in places:
        content = bytearray(whole)
        content[place] ^= 1 << draw.integers(8).item()
        path.write_bytes(content)
        with pytest.raises(runs.RunError, match=f"{path} is "):
            runs.newest_checkpoint(run, config)
            runs.load_best(run, config, model)
    before = contents(run)
    assert f"{path} is damaged" in refused(resume(run))
    assert contents(run) == before
    with pytest.raises(ValueError, match=f"{path} is damaged"):
        load_model(run, which="best" if name.startswith("best") else "last")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", ["older", "seed", "wide"])
def test_a_file_of_another_checkpoint_is_refused(folder, run, kind, other):
    stem, name = (OLDER, "whole") if other == "older" else (NEWEST, other)
    path = run / (NEWEST + kind)
    shutil.copy(folder / "runs" / name / (stem + kind), path)
    of = "of step 4, not of step 8" if other == "older" else "of another run"
    before = contents(run)
    assert f"{path} is {of if kind == '.json' else 'damaged'}" in refused(resume(run))
    assert contents(run) == before


def test_a_checkpoint_without_its_index_gives_way_to_the_one_before(folder, run):
    """As a kill leaves it. Nothing of it is left, and all is as if it had never been."""
    (run / f"{NEWEST}.json").unlink()
    whole = shutil.copytree(run, run.parent / "again")
    for path in whole.glob(f"{NEWEST}*"):
        path.unlink()
    for each in (run, whole):
        done = finished(resume(each, "--save-every", 6))
        assert "step 4 of 12" in done.stdout
    assert runs.checkpoint_steps(run) == [6, 12] and not list(run.glob(f"{NEWEST}*"))
    assert metrics(run) == metrics(whole)
    assert load_equal(run / "step-00000012.safetensors", whole / "step-00000012.safetensors")


def test_an_old_checkpoint_that_is_half_removed(run):
    """As a kill leaves it, which has removed its index."""
    (run / f"{OLDER}.json").unlink()
    finished(resume(run))
    assert not list(run.glob(f"{OLDER}*")) and runs.checkpoint_steps(run) == [8, 12]


def test_a_best_that_is_missing(run):
    """The newest checkpoint stands in for it, and the next validation writes it anew."""
    path = run / "best.safetensors"
    path.unlink()
    finished(in_process(run, "--sample", run, "--device", "cpu", "--max-new-tokens", 3))
    finished(resume(run))
    assert load_equal(path, run / "step-00000012.safetensors")


def write_settings(path, **settings):
    """Other settings of a run, None for one that is not there, with a checksum of all."""
    config = json.loads(path.read_text())
    del config["sha256"]
    config["settings"] |= settings
    config["settings"] = {n: v for n, v in config["settings"].items() if v is not None}
    path.write_text(json.dumps(config | {"sha256": runs.checksum(config)}))


def without_format(path):
    config = json.loads(path.read_text())
    path.write_text(json.dumps({"settings": config["settings"]}))


HARMED = [(NEWEST + kind, Path.unlink, "missing") for kind in KINDS[:2]]
HARMED += [
    ("metrics.jsonl", lambda p, line=line: p.write_text(f"{p.read_text()}{line}\n"), "broken")
    for line in ("no json", "[]", "{}", '{"step": "1"}')
]
HARMED += [
    ("config.json", lambda path, text=text: path.write_text(text, encoding="latin-1"), "broken")
    for text in ("", "{", "[]", "{}", '{"settings": 1}', "\xff")
]
HARMED += [
    ("config.json", harm, said)
    for harm, said in (
        (lambda p: p.write_text(p.read_text().replace('"dim": 16', '"dim": 32')), "not what was"),
        (lambda p: write_settings(p, foo=1), "has an unknown setting 'foo'"),
        (lambda p: write_settings(p, lr=None), "has no setting 'lr'"),
        (without_format, "written by an older version"),
    )
]


@pytest.mark.parametrize("name, harm, said", HARMED)
def test_harmed_files_are_named(run, name, harm, said):
    path = run / name
    harm(path)
    before = contents(run)
    told = [refused(resume(run))]
    if name == "config.json":
        told.append(refused(in_process(run, "--sample", run, "--device", "cpu")))
        with pytest.raises(ValueError, match="config|of another run"):
            load_model(run)
    assert all(str(path) in line and said in line for line in told)
    assert contents(run) == before


def test_a_run_may_move_and_so_may_its_data(folder, run):
    data = shutil.copy(folder / "data", run.parent / "moved")
    finished(resume(run, "--data", data))
    assert config_of(run)["settings"]["data"] == str(data)
    data.write_text("".join(map(str, range(1000))))
    assert "is not what it was" in refused(in_process(run, "--resume", run, "--steps", 16))


def test_a_run_without_later_settings(folder, tmp_path, monkeypatch):
    """It loads, goes on, and its checkpoints stay those of the run."""
    args = ["--data", folder / "data", "--out-dir", ".", "--name", "run", *PLAN]
    with monkeypatch.context() as patch:
        for name in runs.ADDED:
            patch.delitem(script.SETTINGS, name)
        patch.setattr(script, "new_settings", lambda *args: Namespace(**before))
        before = config_of(folder / "runs/whole")["settings"]
        before = {name: value for name, value in before.items() if name not in runs.ADDED}
        finished(in_process(tmp_path, *args))
    run = tmp_path / "run"
    assert load_model(run).layers[0][0].ranking_bits == 16
    finished(resume(run))
    assert not runs.ADDED.keys() & config_of(run)["settings"].keys()
    assert runs.read_checkpoint(run, 8, config_of(run)).step == 8


def test_what_is_no_run(folder, run):
    assert f"; {run} is one" in refused(resume(run / f"{NEWEST}.json"))
    assert "is not a run directory" in refused(in_process(run, "--resume", "none"))
    for path in run.glob("step-*"):
        path.unlink()
    assert f"{run} has no checkpoint to go on from" in refused(resume(run))
    with pytest.raises(FileNotFoundError, match="is not a run directory"):
        load_model(run / "none")


@pytest.mark.parametrize("which, name", [("best", "best"), ("last", NEWEST)])
def test_from_run(folder, run, which, name):
    model = load_model(str(run), which=which)
    assert type(model) is Transformer and not model.training
    weights, saved = model.state_dict(), load_file(run / f"{name}.safetensors")
    assert weights.keys() == saved.keys()
    assert all(torch.equal(weights[key], saved[key]) for key in saved)
    tokens = model.sample(torch.tensor([list(b"12")]), 10, temperature=0.0)
    args = ["--sample", run, "--prompt", "12", "--temperature", 0, "--length", 8]
    text = in_process(run, *args, "--device", "cpu").stdout
    if which == "best":
        said = bytes(tokens[0].tolist()).decode(errors="replace")
        assert text == f"12{printable(said)}\n"
    assert not hasattr(load_model(folder / "runs/wide").layers[0][0], "backend")  # it is dense
    for name, bad in dict(which="first", device="nothing", path=None).items():
        with pytest.raises(ValueError, match=f"{name} must be .*, got {bad!r}"):
            load_model(**{"path": run, name: bad})


def test_killed_before_its_first_checkpoint(folder, run):
    """What was written by then: the configuration, and perhaps all of step 0 but its index."""
    expected = metrics(run)
    for path in [*run.glob("step-*"), run / "best.safetensors", run / "loss.png"]:
        path.unlink()
    (run / "step-00000000.optimizer.tmp").write_bytes(b"half")
    (run / "step-00000000.safetensors").write_bytes(b"whole")
    text = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(text[0])
    done = finished(in_process(run.parent, "--resume", run))
    assert "beginning at step 0" in done.stdout and "step 0 of 8" in done.stdout
    assert metrics(run) == expected
    assert not list(run.glob("*.tmp"))
    whole = folder / "runs/whole" / NEWEST
    for kind in KINDS[:2]:
        assert (run / (NEWEST + kind)).read_bytes() == whole.with_suffix(kind).read_bytes()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow(one_of=2)
def test_one_writer_at_a_time_and_readers_beside_it(folder, tmp_path, signum):
    """A signal saves, and says how to go on."""
    run, pipe = tmp_path / "out/busy", subprocess.PIPE
    args = ["--data", folder / "data", "--out-dir", "out", "--name", "busy", *PLAN]
    seldom = ["--steps", 100000, "--save-every", 1000, "--eval-every", 1000]
    start = command(*args, *seldom)
    with subprocess.Popen(start, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True) as process:
        end, lines = time.monotonic() + 60, run / "metrics.jsonl"
        while not lines.exists() or len(lines.read_text().splitlines()) <= 6:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.002)
        link = tmp_path / "link"
        link.symlink_to(run)
        owner = f"is being written by process {process.pid} on "
        for path in ("out/busy/", link):
            assert owner in refused(in_process(tmp_path, "--resume", path))
        assert "out/busy is there already" in refused(in_process(tmp_path, *args))
        sample = ["--sample", run, "--device", "cpu", "--max-new-tokens", 3]
        finished(in_process(tmp_path, *sample))
        assert not load_model(run).training
        process.send_signal(signum)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    step, last = runs.checkpoint_steps(run)[-1], out.splitlines()[-1]
    hint = "go on with: python train_enwik8.py --resume out/busy"
    assert last == f"stopped at step {step}; {hint}"
    finished(in_process(tmp_path, "--resume", run, "--steps", step + 1))


def test_killed_and_resumed_equals_undisturbed(folder, tmp_path):
    """Killed among checkpoints after every step."""
    args = ["--data", folder / "data", "--out-dir", ".", *PLAN]
    args += ["--save-every", 1, "--eval-every", 6]
    finished(in_process(tmp_path, *args, "--name", "undisturbed"))
    run = tmp_path / "killed"
    start = command(*args, "--name", "killed")
    with subprocess.Popen(start, cwd=tmp_path, stdout=-3, stderr=-3) as process:
        while not any(run.glob("step-0000000[3-7].optimizer")) and process.poll() is None:
            time.sleep(0.002)
        process.kill()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')  # what a kill in the middle of a line leaves
    finished(in_process(tmp_path, "--resume", "killed"))
    assert metrics(run) == metrics(tmp_path / "undisturbed")
    for kind in KINDS[:2]:
        name = NEWEST + kind
        assert (run / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()


@pytest.mark.slow(one_of=5)
@pytest.mark.parametrize("call", range(1, 12))
def test_a_full_disk_names_the_file(folder, run, monkeypatch, call):
    """Whichever write it is: no half of a file is left, and what was whole stays so."""
    monkeypatch.undo()  # a plot is a file too
    synced, sync = [], os.fsync

    def full(file):
        synced.append(file)
        if len(synced) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    monkeypatch.setattr(os, "fsync", full)
    done = resume(run, "--save-every", 2)
    said = done.stderr.splitlines()[-1]  # below a progress bar
    assert done.returncode == 2, done.stderr
    assert said.startswith(f"train_enwik8.py: {run}/") and said.endswith(
        ": No space left on device"
    )
    assert not list(run.glob("*.tmp"))
    monkeypatch.undo()
    assert runs.newest_checkpoint(run, runs.read_config(run)).step >= 8
    finished(resume(run))


def test_files_of_the_user_are_no_checkpoints(run):
    names = "step-notes.json", "step-best.safetensors", "step-00000099.copy.optimizer"
    for name in names:
        (run / name).write_text("mine")
    finished(resume(run))
    assert all((run / name).read_text() == "mine" for name in names)


def test_half_a_line_of_metrics_is_an_error(tmp_path):
    """A disk that is full takes the bytes that fit, and raises at the next write alone."""
    path = tmp_path / "metrics.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60, hard))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            for _ in range(2):
                runs.append(path, "x" * 40)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.filename == str(path) and path.stat().st_size == 60


def test_a_first_validation_that_is_not_finite(folder, tmp_path, monkeypatch):
    values = iter([float("nan"), 5.0, 6.0, 5.5])
    monkeypatch.setattr(script, "evaluate", lambda *_: next(values))
    plan = ["--name", "a", "--steps", 4, "--eval-every", 2]
    finished(in_process(tmp_path, "--data", folder / "data", *PLAN, *plan))
    best = tmp_path / "runs/a/best.safetensors"
    assert b'\\"step\\": 2' in best.read_bytes()
    values = iter([float("nan"), 4.0, 4.5])
    finished(in_process(tmp_path, "--resume", "runs/a", "--steps", 8))
    assert b'\\"step\\": 8' in best.read_bytes()
