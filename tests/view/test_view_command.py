"""`python -m training.view` and `train_enwik8.py --view`, on tiny runs."""

import os
import stat
import subprocess
import sys
import threading

import pytest

from tests.helpers.tiny_runs import load_equal, make_runs
from tests.training.test_train_enwik8 import ROOT, TINY, in_process
from tests.view.test_page import content_of
from training.view import main

TEXT = "17 squared is 289\n" * 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    cwd = make_runs(tmp_path_factory.mktemp("runs"), "whole")
    (cwd / "text").write_text(TEXT)
    (cwd / "empty").write_text("")
    return cwd


def call(folder, *args):
    return main([str(folder / "runs" / "whole"), "--text", str(folder / "text"), *map(str, args)])


def test_page_of_a_run(folder, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert call(folder, "--out", out) == 0
    told = capsys.readouterr()
    assert told.out.startswith(f"{out}: {len(TEXT)} tokens; ") and told.err == ""
    data = content_of(out.read_text())
    assert "".join(data["texts"]) == TEXT and len(data["layers"]) == 1
    assert list(tmp_path.iterdir()) == [out]


def test_options(folder, tmp_path, capsys):
    out = tmp_path / "page.html"
    out.write_text("of before")
    options = ("--max-tokens", 50, "--queries", 7, "--layers", "layers.0.0", "--device", "cpu")
    assert call(folder, "--out", out, *options) == 0
    assert "50 tokens, the first of" in capsys.readouterr().out
    data = content_of(out.read_text())
    assert "".join(data["texts"]) == TEXT[:50] and len(data["positions"]) == 7


@pytest.mark.parametrize("most", [10**12, 10**30])
def test_more_tokens_than_memory_are_those_of_the_file(folder, tmp_path, capsys, most):
    out = tmp_path / "page.html"
    assert call(folder, "--out", out, "--max-tokens", most) == 0
    assert capsys.readouterr().out.startswith(f"{out}: {len(TEXT)} tokens; ")


def test_as_a_module(folder):
    command = [sys.executable, "-W", "error", "-m", "training.view"]
    done = subprocess.run(
        [*command, "runs/whole", "--text", "text", "--layers", "0"], cwd=folder,
        capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("view.html: ")
    (folder / "view.html").unlink()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--layers", "3"), "layers must name layers of the model"),
        (("--layers", ""), "layers must name layers of the model"),
        (("--queries", "0"), "argument --queries: must be a number of at least 1, got '0'"),
        (("--max-tokens", "x"), "argument --max-tokens: must be a number of at least 1, got 'x'"),
        (("--device", "tpu9"), "--device 'tpu9' is not usable here"),
        (("--device", "meta"), "--device 'meta' is not usable here"),
        (("--text", "nowhere"), "nowhere: No such file or directory"),
        (("--text", "{folder}/empty"), "empty is empty"),
        (("--text", "{folder}"), "Is a directory"),
        (("--out", "nowhere/page.html"), "--out must be a file in a folder there is"),
        (("--out", "{folder}"), "--out must be a file in a folder there is"),
        (("--settings", "{{}}"), "--settings goes with a model of transformers, got a run"),
        (("--bees",), "unrecognized arguments: --bees"),
        (("--quer", "3"), "unrecognized arguments"),
    ],
)
def test_bad_input_is_told_in_one_line(args, message, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = [value.format(folder=folder) for value in args]
    assert call(folder, *args) == 2
    told = capsys.readouterr()
    (line,) = told.err.splitlines()
    assert line.startswith("python -m training.view: ") and message in line
    assert told.out == "" and not list(tmp_path.iterdir())


def test_what_is_no_sparse_run(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = ["--text", str(folder / "text")]
    assert main(["nowhere", *text]) == 2
    assert "nowhere is not a run directory" in capsys.readouterr().err
    assert main([*text]) == 2
    assert "the following arguments are required: MODEL" in capsys.readouterr().err
    dense = ["--data", "data", "--name", "dense", "--attention", "dense", "--steps", 1]
    done = in_process(folder, *dense, "--sample-every", 0, *TINY)
    assert done.returncode == 0, done.stderr
    assert main([str(folder / "runs" / "dense"), *text]) == 2
    assert "must have SparseAttention layers, got Transformer" in capsys.readouterr().err
    dense[dense.index("--name") + 1] = "other"
    done = in_process(folder, *dense, "--view", *TINY)
    assert done.returncode == 2 and "--view goes with sparse attention" in done.stderr


def test_a_failed_write_leaves_what_was_there(folder, tmp_path, capsys, monkeypatch):
    out = tmp_path / "page.html"
    out.write_text("of before")

    def full(*args):
        raise OSError(28, "No space left on device", str(args[0]))

    monkeypatch.setattr(os, "replace", full)
    assert call(folder, "--out", out) == 2
    assert f"{out}: No space left on device" in capsys.readouterr().err
    assert out.read_text() == "of before" and list(tmp_path.iterdir()) == [out]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_a_pipe_is_written_to(folder, tmp_path):
    out, came = tmp_path / "pipe", []
    os.mkfifo(out)
    reader = threading.Thread(target=lambda: came.append(out.read_text()), daemon=True)
    reader.start()
    assert call(folder, "--out", out) == 0
    assert stat.S_ISFIFO(out.lstat().st_mode) and list(tmp_path.iterdir()) == [out]
    reader.join(60)
    assert "".join(content_of(came[0])["texts"]) == TEXT


def test_a_device_is_written_to(folder, tmp_path, capsys):
    """One that is always full, made here: a replaced one would be lost."""
    out = tmp_path / "full"
    try:
        os.mknod(out, stat.S_IFCHR | 0o600, os.makedev(1, 7))
        out.open("wb").close()
    except (AttributeError, PermissionError):
        pytest.skip("devices cannot be made here")
    assert call(folder, "--out", out) == 2
    assert f"{out}: No space left on device" in capsys.readouterr().err
    assert stat.S_ISCHR(out.lstat().st_mode) and list(tmp_path.iterdir()) == [out]


@pytest.mark.skipif(os.name == "nt", reason="modes and links are others")
@pytest.mark.parametrize("there", [True, False])
def test_links_and_modes_are_kept(folder, tmp_path, there):
    out, link = tmp_path / "page.html", tmp_path / "link"
    link.symlink_to(out.name)
    if there:
        out.touch(mode=0o600)
    other = tmp_path / "other"
    other.touch()  # of the usual mode
    assert call(folder, "--out", link) == 0
    assert link.is_symlink() and "".join(content_of(out.read_text())["texts"]) == TEXT
    assert stat.S_IMODE(out.stat().st_mode) == (0o600 if there else other.stat().st_mode & 0o777)
    assert {*tmp_path.iterdir()} == {out, link, other}


def test_the_longest_name(folder, tmp_path, capsys):
    out = tmp_path / ("n" * 250 + ".html")
    assert call(folder, "--out", out) == 0 and list(tmp_path.iterdir()) == [out]
    out = tmp_path / ("n" * 251 + ".html")
    assert call(folder, "--out", out) == 2
    assert f"{out}: File name too long" in capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
def test_an_output_that_is_full(folder, tmp_path):
    command = [sys.executable, "-m", "training.view", "runs/whole"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*command, "--text", "text", "--out", tmp_path / "page.html"], cwd=folder,
            stdout=full, stderr=subprocess.PIPE, text=True,
            env={"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.endswith("No space left on device") and "None" not in line


def test_a_run_of_packed_documents_shows_one(tmp_path, capsys):
    """The first one: attention crosses no marker, and a page has one text."""
    documents = [f"<p>{i} squared is {i * i}\n" for i in range(10, 300)]
    (tmp_path / "data").write_text("".join(documents))
    options = ("--steps", 1, "--save-every", 1, "--sample-every", 0, "--view", *TINY)
    done = in_process(tmp_path, "--data", "data", "--name", "packed", "--pack", "<p>", *options)
    assert done.returncode == 0, done.stderr
    run, out = tmp_path / "runs" / "packed", tmp_path / "page.html"
    assert "".join(content_of((run / "step-00000001.html").read_text())["texts"]) in documents
    for text, shown, told in (
        ("of before" + documents[0] + documents[1], documents[0], "the first document of"),
        (documents[1][:-4] * 2, documents[1][:-4], "the first document of"),
        (documents[1], documents[1], ""),
        ("of no document", "of no document", ""),
        ("of before <p>" * 9, "<p>of before ", "the first document of"),
        ("y" * 190 + "<p>" + "z" * 500, "<p>" + "z" * 197, "the start of the first document of"),
        ("<p>" + "z" * 197, "<p>" + "z" * 197, ""),
        ("<p>" + "z" * 198, "<p>" + "z" * 197, "the start of the first document of"),
        ("<p>" + "z" * 197 + "<p>", "<p>" + "z" * 197, "the first document of"),
        ("y" * 300 + "<p>", "y" * 200, "the first of"),
    ):
        (tmp_path / "text").write_text(text)
        args = ["--text", str(tmp_path / "text"), "--out", str(out), "--max-tokens", "200"]
        assert main([str(run), *args]) == 0
        assert "".join(content_of(out.read_text())["texts"]) == shown
        line = capsys.readouterr().out.splitlines()[0].partition(f" {tmp_path / 'text'};")[0]
        assert line.partition(" tokens")[2].removeprefix(", ").startswith(told)
        assert (", the " in line) == bool(told)


def test_training_writes_pages_and_learns_the_same(folder):
    options = ("--steps", 8, "--save-every", 4, "--eval-every", 4, "--sample-every", 0, *TINY)
    done = in_process(folder, "--data", "data", "--name", "seen", "--view", "--keep", 1, *options)
    assert done.returncode == 0, done.stderr
    seen, whole = folder / "runs" / "seen", folder / "runs" / "whole"
    pages = sorted(path.name for path in seen.glob("*.html"))
    assert pages == [f"step-0000000{step}.html" for step in (0, 4, 8)]
    assert "<title>seen, step 8</title>" in (seen / pages[-1]).read_text()
    assert load_equal(*(run / "step-00000008.safetensors" for run in (seen, whole)))
    done = in_process(folder, "--resume", seen, "--steps", 12, "--view")
    assert done.returncode == 0, done.stderr
    assert (seen / "step-00000012.html").exists()
    assert in_process(folder, "--sample", seen, "--view").returncode == 2
