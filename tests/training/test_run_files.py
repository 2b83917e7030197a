"""The files of a run: torn, damaged, of another run or version; and loading them in Python."""

import json
import shutil
import sys
from argparse import Namespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from native_sparse_attention import Transformer
from tests.helpers.tiny_runs import (
    KINDS,
    NEWEST,
    OLDER,
    OPTIONS,
    PLAN,
    config_of,
    contents,
    load_equal,
    make_runs,
    resume,
)
from tests.training.test_train_enwik8 import TINY, cut, in_process, metrics, refused, script
from training import runs
from training.runs import load_model, restore
from training.sample import printable


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_runs(tmp_path_factory.mktemp("runs"), *OPTIONS)


@pytest.fixture
def run(folder, tmp_path):
    return shutil.copytree(folder / "runs/whole", tmp_path / "run")


# damage


@pytest.mark.parametrize("name", [*(NEWEST + kind for kind in KINDS), "best.safetensors"])
def test_one_flipped_bit_is_refused(run, name):
    """Anywhere: in the length of a header, in the header, in a tensor, at the end."""
    path, config = run / name, config_of(run)
    whole, draw = path.read_bytes(), np.random.default_rng(0)
    model = Transformer(**runs.model_arguments(config["settings"]))
    places = [*range(12), -1, -2, *draw.integers(len(whole), size=40).tolist()]
    for place in places:
        content = bytearray(whole)
        content[place] ^= 1 << draw.integers(8).item()
        path.write_bytes(content)
        with pytest.raises(runs.RunError, match=f"{path} is ") as caught:
            runs.newest_checkpoint(run, config)
            runs.load_best(run, config, model)
        assert caught.type is runs.RunError
    before = contents(run)
    assert f"{path} is damaged" in refused(resume(run))
    assert contents(run) == before
    with pytest.raises(ValueError, match=f"{path} is damaged"):
        load_model(run, which="best" if name.startswith("best") else "last")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", ["older", "seed", "wide"])
def test_a_file_of_another_checkpoint_is_refused(folder, run, kind, other):
    """Among them optimizer state of other shapes, which the fused update would read past."""
    stem, name = (OLDER, "whole") if other == "older" else (NEWEST, other)
    path = run / (NEWEST + kind)
    shutil.copy(folder / "runs" / name / (stem + kind), path)
    of = "of step 4, not of step 8" if other == "older" else "of another run"
    before = contents(run)
    assert f"{path} is {of}" in refused(resume(run))
    assert contents(run) == before


@pytest.mark.parametrize("name", ["seed", "wide"])
def test_a_checkpoint_of_another_run_is_refused(folder, run, name):
    for kind in KINDS:
        shutil.copy(folder / "runs" / name / (NEWEST + kind), run)
    assert f"{run / NEWEST}.json is of another run" in refused(resume(run))
    shutil.copy(folder / "runs" / name / "best.safetensors", run)
    sampled = in_process(run, "--sample", run, "--device", "cpu")
    assert "best.safetensors is of another run" in refused(sampled)


def test_optimizer_state_of_other_shapes_is_refused(run):
    """Even where every checksum is right."""
    config = config_of(run)
    found, _ = runs.newest_checkpoint(run, config)
    found.optimizer = {name: t.new_zeros(1) for name, t in found.optimizer.items()}
    model = Transformer(**runs.model_arguments(config["settings"]))
    optimizer = script.build_optimizer(model, Namespace(**config["settings"]))
    with pytest.raises(runs.RunError, match=f"{NEWEST}.optimizer is of another model"):
        restore(run, found, model, optimizer)


# torn files


@pytest.mark.parametrize("kind", KINDS)
def test_a_torn_checkpoint_gives_way_to_the_one_before(run, kind):
    path, config = run / (NEWEST + kind), config_of(run)
    whole = path.read_bytes()
    for length in (0, 1, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        found, (said,) = runs.newest_checkpoint(run, config)
        assert found.step == 4
        assert said == f"{path} is torn: {length:,} of {len(whole):,} bytes"
        with pytest.warns(UserWarning, match=r"is torn: .*; taking step 4"):
            load_model(run, which="last")
    path.unlink()
    found, (said,) = runs.newest_checkpoint(run, config)
    assert found.step == 4 and said == f"{path} is missing"


@pytest.mark.parametrize("keep", [1, 2])
def test_going_on_from_the_checkpoint_before(folder, run, keep):
    """Nothing of the torn one is left, and all is as if it had never been torn."""
    cut = run / f"{NEWEST}.optimizer"
    cut.write_bytes(cut.read_bytes()[:-1])
    whole = shutil.copytree(folder / "runs/whole", run.parent / "again")
    for path in whole.glob(f"{NEWEST}*"):
        path.unlink()
    for each in (run, whole):
        done = resume(each, "--keep", keep, "--save-every", 6)
        assert done.returncode == 0, done.stderr
        told = f"{NEWEST}.optimizer is torn", "; going on from step 4"
        assert all((text in done.stdout) == (each == run) for text in told)
    steps = [12] if keep == 1 else [6, 12]
    assert runs.checkpoint_steps(run) == steps
    assert metrics(run) == metrics(whole)
    assert load_equal(run / "step-00000012.safetensors", whole / "step-00000012.safetensors")


def test_a_torn_checkpoint_does_not_count_as_kept(run):
    cut(run / (NEWEST + ".safetensors"))
    done = in_process(run.parent, "--resume", run, "--steps", 9, "--save-every", 1000)
    assert done.returncode == 0, done.stderr
    assert runs.checkpoint_steps(run) == [4, 9]
    cut(run / "step-00000009.safetensors")
    assert "going on from step 4" in resume(run).stdout


def test_a_name_that_a_title_might_read_as_a_formula(run):
    done = in_process(run.parent, "--data", config_of(run)["settings"]["data"], *PLAN[:2],
                      "--name", "a$$b_$_", *PLAN[2:])  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (run.parent / "runs/a$$b_$_/loss.png").exists()


def test_a_directory_that_a_killed_run_left(run):
    (run.parent / "runs/half").mkdir(parents=True)
    given = ["--data", config_of(run)["settings"]["data"], *PLAN, "--name", "half"]
    assert "is no run: it has no config.json" in refused(in_process(run.parent, *given))


def test_a_best_that_is_missing_with_the_first_metrics(run):
    (run / "best.safetensors").unlink()
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(lines[1:]))
    assert "best.safetensors is missing; the next validation writes it" in resume(run).stdout
    assert (run / "best.safetensors").exists()


def test_a_device_that_is_empty_is_the_default(run):
    done = resume(run, "--device", "")
    assert done.returncode == 0, done.stderr


def test_no_whole_checkpoint(run):
    for stem in (OLDER, NEWEST):
        (run / f"{stem}.safetensors").write_bytes(b"")
    before = contents(run)
    assert f"{run} has no whole checkpoint: " in refused(resume(run))
    assert contents(run) == before


def test_all_checkpoints_gone(run):
    for path in run.glob("step-*"):
        path.unlink()
    assert f"{run} has no checkpoint to go on from" in refused(resume(run))


def test_a_torn_best(run):
    """The newest checkpoint stands in for it, and the next validation writes it anew."""
    path = run / "best.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    done = in_process(run, "--sample", run, "--device", "cpu", "--max-new-tokens", 3)
    assert done.returncode == 0 and "best.safetensors is torn" in done.stderr
    assert "taking step 8" in done.stderr
    done = resume(run)
    assert "best.safetensors is torn" in done.stdout
    assert "the next validation writes it" in done.stdout
    assert load_equal(path, run / "step-00000012.safetensors")
    path.unlink()
    assert "best.safetensors is missing" in resume(run).stdout


# configuration


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("dim", "16", "dim must be a int of 1 to 2147483647, got '16'"),
        ("dim", 16.0, "dim must be"),
        ("dim", True, "dim must be"),
        ("depth", -1, "depth must be"),
        ("heads", None, "heads must be"),
        ("lr", float("nan"), "lr must be a float of 0 or more, got nan"),
        ("lr", [1], "lr must be"),
        ("seed", 2**63, "seed must be"),
        (
            "attention",
            "other",
            "attention must be one of auto, sparse",
        ),
        ("attention", ["sparse"], "attention must be one of"),
        ("data", 3, "data must be a string"),
        ("device", None, "device must be a string"),
        ("foo", 1, "has an unknown setting 'foo'"),
        ("lr", ..., "has no setting 'lr'"),
        ("dim", 32, "is not what was written: its checksum is wrong"),
        ("steps", 640, "is not what was written: its checksum is wrong"),
    ],
)
def test_wrong_settings(run, name, value, said):
    path, config = run / "config.json", config_of(run)
    config["settings"][name] = value
    if value is ...:
        del config["settings"][name]
    path.write_text(json.dumps(config, indent=2))
    for args in (["--resume", run], ["--sample", run, "--device", "cpu"]):
        found = refused(in_process(run, *args))
        assert str(path) in found and said in found
    with pytest.raises(ValueError, match=r"config\.json"):
        load_model(run)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"settings": 1}', "[" * 100000, "\xff"])
def test_no_configuration_at_all(run, text):
    (run / "config.json").write_text(text, encoding="latin-1")
    assert "config.json is broken" in refused(resume(run))
    with pytest.raises(ValueError, match=r"config\.json is broken"):
        load_model(run)


def test_a_run_of_an_older_version(run):
    config = config_of(run)
    del config["format"], config["sha256"]
    (run / "config.json").write_text(json.dumps(config))
    said = refused(resume(run))
    assert "written by an older version" in said and "train anew under another name" in said


def test_a_run_may_move_and_so_may_its_data(folder, run):
    data = shutil.copy(folder / "data", run.parent / "moved")
    done = resume(run, "--data", data)
    assert done.returncode == 0, done.stderr
    assert config_of(run)["settings"]["data"] == str(data)
    data.write_text("".join(map(str, range(1000))))
    assert "is not what it was" in refused(in_process(run, "--resume", run, "--steps", 16))


def test_what_is_no_run(folder, run):
    assert f"; {run} is one" in refused(resume(run / f"{NEWEST}.json"))
    assert "is not a run directory" in refused(in_process(run, "--resume", "none"))
    with pytest.raises(FileNotFoundError, match="is not a run directory"):
        load_model(run / "none")


# loading in Python


@pytest.mark.parametrize("which, name", [("best", "best"), ("last", NEWEST)])
def test_from_run(run, which, name):
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


def test_from_run_of_a_dense_model_and_bad_arguments(folder, tmp_path):
    plan = ["--attention", "dense", "--steps", 1, "--name", "dense", "--sample-every", 0]
    plan += ["--seed", 2**63 - 1]
    assert in_process(tmp_path, "--data", folder / "data", *TINY, *plan).returncode == 0
    assert not hasattr(load_model(tmp_path / "runs/dense").layers[0][0], "backend")
    with pytest.raises(ValueError, match="which must be 'best' or 'last', got 'first'"):
        load_model(tmp_path / "runs/dense", which="first")


def test_from_run_under_other_defaults(run):
    expected = load_model(run).state_dict()
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                found = load_model(run).state_dict()
        finally:
            torch.set_default_dtype(torch.float32)
        torch.testing.assert_close(found, expected, atol=0, rtol=0)


def test_from_run_without_safetensors(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"native-sparse-attention\[train\]"):
        load_model(run)
