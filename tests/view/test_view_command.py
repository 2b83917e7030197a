"""`python -m training.view` and `train_enwik8.py --view`, on tiny runs."""

import runpy
import sys

import pytest

from tests.training.test_runs import load_equal, make_runs
from tests.training.test_train_enwik8 import TINY, finished, in_process
from tests.view.test_page import content_of
from training.view import main

TEXT = "17 squared is 289\n" * 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    cwd = make_runs(tmp_path_factory.mktemp("runs"), "whole")
    (cwd / "text").write_text(TEXT)
    (cwd / "empty").write_text("")
    return cwd


def call(model, *args, main=main):
    """The exit status of a command."""
    try:
        main([str(model), *map(str, args)])
    except SystemExit as stop:
        return stop.code
    return 0


def view(folder, *args):
    return call(folder / "runs" / "whole", "--text", folder / "text", *args)


def told_error(capsys, program="training.view"):
    """The message of an error, after the usage."""
    told = capsys.readouterr()
    usage, line = told.err.splitlines()
    prefix = f"python -m {program}: error: "
    assert usage.startswith("usage: ") and line.startswith(prefix) and told.out == ""
    return line.removeprefix(prefix)


def test_as_a_module(folder, capsys, monkeypatch):
    """With a page of a name of its own, and with options over an older page."""
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "training.view")
    monkeypatch.setattr(sys, "argv", ["", "runs/whole", "--text", "text", "--layers", "0"])
    runpy.run_module("training.view", run_name="__main__")
    told, out = capsys.readouterr(), folder / "view.html"
    assert told.out.startswith(f"view.html: {len(TEXT)} tokens; ") and told.err == ""
    data = content_of(out.read_text())
    assert "".join(data["texts"]) == TEXT and len(data["layers"]) == 1
    options = ("--max-tokens", 50, "--queries", 7, "--layers", "layers.0.0", "--device", "cpu")
    assert view(folder, "--out", out, *options) == 0
    assert "50 tokens, the first of" in capsys.readouterr().out
    data = content_of(out.read_text())
    assert "".join(data["texts"]) == TEXT[:50] and len(data["positions"]) == 7
    out.unlink()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--layers", "3"), "layers must be a list of names of layers"),
        (("--max-tokens", "x"), "argument --max-tokens: invalid int value: 'x'"),
        (("--device", "tpu9"), "--device must be a torch.device or the name of one"),
        (("--device", "cuda:99"), "--device must be a device that is usable here, got cuda:99"),
        (("--text", "nowhere"), "nowhere: No such file or directory"),
        (("--text", "{folder}/empty"), "tokens must be ids [n] of one text"),
        (("--text", "{folder}"), "Is a directory"),
        (("--out", "{folder}"), "--out must be a file in a folder there is"),
        (("--out", "{folder}/text"), "--out must be another file than --text"),
        (("--settings", "{{}}"), "--settings goes with a model of transformers, got a run"),
        (("--quer", "3"), "unrecognized arguments"),
    ],
)
def test_bad_input_is_told_in_one_line(args, message, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert view(folder, *(value.format(folder=folder) for value in args)) == 2
    assert message in told_error(capsys) and not list(tmp_path.iterdir())


def test_what_is_no_sparse_run(folder, capsys):
    text = ("--text", folder / "text")
    assert call("nowhere", *text) == 2
    assert "nowhere is not a run directory" in told_error(capsys)
    dense = ["--data", "data", "--name", "dense", "--attention", "dense", "--steps", 1]
    finished(in_process(folder, *dense, "--sample-every", 0, *TINY))
    assert call(folder / "runs" / "dense", *text) == 2
    assert "must have SparseAttention layers (hf.convert" in told_error(capsys)
    dense[dense.index("--name") + 1] = "other"
    done = in_process(folder, *dense, "--view", *TINY)
    assert done.returncode == 2 and "--view goes with sparse attention" in done.stderr


def test_a_run_of_packed_documents_shows_one(tmp_path, capsys):
    """The first one: attention crosses no marker, and a page has one text."""
    documents = [f"<p>{i} squared is {i * i}\n" for i in range(10, 300)]
    (tmp_path / "data").write_text("".join(documents))
    options = ("--steps", 1, "--save-every", 1, "--sample-every", 0, "--view", *TINY)
    finished(in_process(tmp_path, "--data", "data", "--name", "packed", "--pack", "<p>", *options))
    run, out = tmp_path / "runs" / "packed", tmp_path / "page.html"
    assert "".join(content_of((run / "step-00000001.html").read_text())["texts"]) in documents
    for text, shown, is_cut in (
        ("of before" + documents[0] + documents[1], documents[0], False),
        ("of no document", "of no document", False),
        ("y" * 190 + "<p>" + "z" * 500, "<p>" + "z" * 197, True),
        ("y" * 300 + "<p>", "y" * 200, True),
    ):
        (tmp_path / "text").write_text(text)
        args = ["--text", tmp_path / "text", "--out", out, "--max-tokens", "200"]
        assert call(run, *args) == 0
        assert "".join(content_of(out.read_text())["texts"]) == shown
        assert ("the first of" in capsys.readouterr().out) == is_cut


def test_training_writes_pages_and_learns_the_same(folder):
    options = ("--steps", 8, "--save-every", 4, "--eval-every", 4, "--sample-every", 0, *TINY)
    plan = ("--data", "data", "--name", "seen", "--view", "--keep", 1)
    finished(in_process(folder, *plan, *options))
    seen, whole = folder / "runs" / "seen", folder / "runs" / "whole"
    pages = sorted(path.name for path in seen.glob("*.html"))
    assert pages == [f"step-0000000{step}.html" for step in (0, 4, 8)]
    assert "<title>seen, step 8</title>" in (seen / pages[-1]).read_text()
    assert load_equal(*(run / "step-00000008.safetensors" for run in (seen, whole)))
    finished(in_process(folder, "--resume", seen, "--steps", 12, "--view"))
    assert (seen / "step-00000012.html").exists()
    assert in_process(folder, "--sample", seen, "--view").returncode == 2
