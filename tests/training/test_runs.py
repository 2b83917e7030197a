"""Who may write a run, what a kill or a full disk leaves of it, and options of the script."""

import errno
import os
import shutil
import signal
import subprocess
import time

import pytest

from tests.helpers.tiny_runs import KINDS, NEWEST, PLAN, contents, make_runs, resume
from tests.training.test_train_enwik8 import (
    command,
    in_process,
    metrics,
    read,
    refused,
    script,
    wait_for,
)
from training import runs
from training.runs import load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_runs(tmp_path_factory.mktemp("runs"), "whole")


@pytest.fixture
def run(folder, tmp_path):
    return shutil.copytree(folder / "runs/whole", tmp_path / "run")


def test_killed_before_its_first_checkpoint(folder, run):
    """What was written by then: the configuration, and perhaps all of step 0 but its index."""
    expected = metrics(run)
    for path in [*run.glob("step-*"), run / "best.safetensors", run / "loss.png"]:
        path.unlink()
    (run / "step-00000000.optimizer.tmp").write_bytes(b"half")
    (run / "step-00000000.safetensors").write_bytes(b"whole")
    text = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(text[0])
    done = in_process(run.parent, "--resume", run)
    assert done.returncode == 0, done.stderr
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
    start = command(*args, "--steps", 100000, "--save-every", 1000)
    with subprocess.Popen(start, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True) as process:
        wait_for(lambda: len(read(run / "metrics.jsonl").splitlines()) > 6, process)
        link = tmp_path / "link"
        link.symlink_to(run)
        owner = f"is being written by process {process.pid} on "
        for path in ("out/busy/", link):
            assert owner in refused(in_process(tmp_path, "--resume", path))
        assert "out/busy is there already" in refused(in_process(tmp_path, *args))
        sample = ["--sample", run, "--device", "cpu", "--max-new-tokens", 3]
        assert in_process(tmp_path, *sample).returncode == 0
        assert not load_model(run).training
        process.send_signal(signum)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    step, last = runs.checkpoint_steps(run)[-1], out.splitlines()[-1]
    hint = "go on with: python train_enwik8.py --resume out/busy"
    assert last == f"stopped at step {step}; {hint}"
    done = in_process(tmp_path, "--resume", run, "--steps", step + 1)
    assert done.returncode == 0, done.stderr


def test_killed_and_resumed_equals_undisturbed(folder, tmp_path):
    """Killed among checkpoints after every step."""
    args = ["--data", folder / "data", "--out-dir", ".", *PLAN, "--save-every", 1, "--steps", 12]
    assert in_process(tmp_path, *args, "--name", "undisturbed").returncode == 0
    run = tmp_path / "killed"
    start = command(*args, "--name", "killed")
    with subprocess.Popen(start, cwd=tmp_path, stdout=-3, stderr=-3) as process:
        while not any(run.glob("step-0000000[3-9].optimizer")) and process.poll() is None:
            time.sleep(0.002)
        process.kill()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "lo')  # what a kill in the middle of a line leaves
    done = in_process(tmp_path, "--resume", "killed")
    assert done.returncode == 0, done.stderr
    assert metrics(run) == metrics(tmp_path / "undisturbed")
    for kind in KINDS[:2]:
        name = "step-00000012" + kind
        assert (run / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()


@pytest.mark.parametrize("line", ["no json", "[]", "{}", '{"step": "1"}'])
def test_metrics_that_are_none(run, line):
    path = run / "metrics.jsonl"
    path.write_text(path.read_text() + line + "\n")
    before = contents(run)
    assert f"{path} is broken" in refused(resume(run))
    assert contents(run) == before


@pytest.mark.slow(one_of=5)
@pytest.mark.parametrize("call", range(1, 12))
def test_a_full_disk_names_the_file(folder, run, monkeypatch, call):
    """Whichever write it is: no half of a file is left, and what was whole stays so."""
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
    config = runs.read_config(run)
    runs.verify_config(run, config)
    assert runs.newest_checkpoint(run, config).step >= 8
    assert resume(run).returncode == 0


def test_several_processes_are_refused(folder, tmp_path, monkeypatch):
    name = "WORLD_SIZE"
    args = ["--data", folder / "data", *PLAN, "--steps", 1]
    monkeypatch.setenv(name, "2")
    assert f"{name} is 2: training in several processes" in refused(in_process(tmp_path, *args))
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(name, "1")
    assert in_process(tmp_path, *args).returncode == 0


def test_a_first_validation_that_is_not_finite(folder, tmp_path, monkeypatch):
    values = iter([float("nan"), 5.0, 6.0, 5.5])
    monkeypatch.setattr(script, "evaluate", lambda *_: next(values))
    plan = ["--name", "a", "--steps", 4, "--eval-every", 2]
    done = in_process(tmp_path, "--data", folder / "data", *PLAN, *plan)
    assert done.returncode == 0, done.stderr
    best = tmp_path / "runs/a/best.safetensors"
    assert b'\\"step\\": 2' in best.read_bytes()
    values = iter([float("nan"), 4.0, 4.5])
    done = in_process(tmp_path, "--resume", "runs/a", "--steps", 8)
    assert done.returncode == 0, done.stderr
    assert b'\\"step\\": 8' in best.read_bytes()
