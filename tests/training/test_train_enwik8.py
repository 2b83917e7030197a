"""train_enwik8.py as its users meet it, with small models."""

import io
import json
import os
import runpy
import shlex
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

import train_enwik8 as script
from native_sparse_attention.checks import TOO_LARGE
from native_sparse_attention.presets import preset
from training import options
from training.runs import load_model
from training.sample import generate
from training.settings import new_settings

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    *("--dim", 16, "--depth", 1, "--heads", 2, "--kv-heads", 1, "--dim-head", 8),
    *("--sliding-window-size", 8, "--compress-block-size", 4, "--compress-block-sliding-stride", 2),
    *("--selection-block-size", 4, "--num-selected-blocks", 2, "--seq-len", 32, "--batch-size", 2),
    *("--accumulate", 2, "--warmup", 2, "--eval-bytes", 256, "--test-bytes", 256),
    *("--sample-length", 8, "--device", "cpu", "--threads", 1),
]


def command(*args):
    return [sys.executable, "-W", "error", str(ROOT / "train_enwik8.py"), *map(str, args)]


def refused(done):
    """The one line of an exit with status 2."""
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line]
    assert len(lines) == 1 and lines[0].startswith("train_enwik8.py: "), done.stderr
    return lines[0]


def finished(done):
    assert done.returncode == 0, done.stderr
    return done


def metrics(run):
    """What is not a matter of the clock."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_s"} for line in lines]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text):
    """A run of 20 steps that nothing disturbed."""
    cwd = tmp_path_factory.mktemp("trained")
    plan = ["--steps", 20, "--eval-every", 10, "--save-every", 5, "--sample-every", 10]
    done = finished(in_process(cwd, "--data", text, "--name", "whole", *plan, *TINY))
    return cwd, plan, done


def test_run_leaves_what_it_promises(trained):
    cwd, _, done = trained
    run = cwd / "runs/whole"
    names = sorted(path.name for path in run.iterdir())
    kinds = "json", "optimizer", "safetensors"
    steps = [f"step-000000{n}.{kind}" for n in (15, 20) for kind in kinds]
    assert names == ["best.safetensors", "config.json", "lock", "loss.png", "metrics.jsonl", *steps]
    records = metrics(run)
    assert [r["step"] for r in records] == list(range(21))
    assert [r["step"] for r in records if "val_bpb" in r] == [0, 10, 20]
    assert records[-1]["val_bpb"] < records[0]["val_bpb"] - 0.2
    assert 0 < records[-1]["test_bpb"] < 9
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert done.stdout.count("--- step") == 2
    last = done.stderr.split("\r")[-1].strip()  # of a terminal of 80 columns
    assert last.startswith("20/20 |") and last.endswith(" tokens/s") and len(last) < 80
    assert " left, loss " in last and " bits/byte, val " in last
    assert "32 tokens a sequence: dense attention is faster up to 4096\n" in done.stdout
    again = in_process(cwd, "--resume", "runs/whole")
    assert again.returncode == 0 and "finished at step 20" in again.stdout


def test_one_softmax(tmp_path, text):
    """From 2048 tokens on it is what a new run trains, with sizes of its own; and whenever it is
    asked for."""
    sizes = [TINY.index(name) for name in ("--sliding-window-size", "--seq-len")]
    tiny = TINY[: sizes[0]] + TINY[sizes[1] :]
    plan = ["--steps", 1, "--sample-every", 0, "--batch-size", 1, "--accumulate", 1]
    finished(in_process(tmp_path, "--data", text, *tiny, *plan, "--seq-len", 2048))
    run = tmp_path / "runs/squares-one-softmax-1"
    settings = json.loads((run / "config.json").read_text())["settings"]
    expected = preset("one-softmax", 2048)
    assert all(settings[name] == expected[name] for name in settings.keys() & expected.keys())
    model = load_model(run)
    for layer, _ in model.layers:
        config = layer.config
        assert config.branches == ("selected",) and config.rank_rotated
        assert config.selection_block_size == expected["selection_block_size"]
    finished(in_process(tmp_path, "--resume", run.relative_to(tmp_path), "--steps", 2))

    local = ["--attention", "one-softmax", "--local-layers", "0", "--name", "of a name"]
    done = finished(in_process(tmp_path, "--data", text, *tiny, *plan, *local))
    layers = load_model(tmp_path / "runs/of a name").layers
    assert [layer.config.ranks for layer, _ in layers] == [False, *[True] * (len(layers) - 1)]
    command = shlex.split(done.stdout.splitlines()[-1].partition(": ")[2])
    assert command[1:] == ["train_enwik8.py", "--sample", "runs/of a name", "--prompt", "TEXT"]


@pytest.mark.parametrize(
    ("given", "attention", "local"),
    [
        (dict(seq_len=2047), "sparse", "none"),
        (dict(seq_len=2048), "one-softmax", "none"),
        (dict(seq_len=8192), "one-softmax", "none"),
        (dict(seq_len=16385), "one-softmax", "0,2"),
        (dict(seq_len=16385, depth=2), "one-softmax", "none"),
        (dict(seq_len=16384, attention="one-softmax"), "one-softmax", "0,2"),
        (dict(seq_len=16383, attention="one-softmax"), "one-softmax", "none"),
        (dict(seq_len=16385, attention="dense"), "dense", "none"),
        (dict(seq_len=16385, local_layers="none"), "one-softmax", "none"),
        (dict(seq_len=512, local_layers="0,5"), "sparse", "0,5"),
    ],
)
def test_attention_and_layers_that_rank_nothing(given, attention, local):
    cfg = new_settings(Namespace(device="cpu", **dict(depth=6) | given), script.SETTINGS)
    assert (cfg.attention, cfg.local_layers) == (attention, local)
    sizes = preset("one-softmax", given["seq_len"]) if attention == "one-softmax" else {}
    if attention == "sparse":
        sizes = {name: row[1] for name, row in script.SETTINGS.items() if "block" in name}
    assert all(vars(cfg)[name] == sizes[name] for name in vars(cfg).keys() & sizes.keys())
    given = Namespace(device="cpu", **dict(depth=6) | given, importance="logits")
    assert new_settings(given, script.SETTINGS).ranking_bits == 16


def test_sample_streams_text_that_repeats(trained):
    args = ["--sample", "runs/whole", "--prompt", "12", "--length", 20, "--device", "cpu"]
    done = finished(in_process(trained[0], *args))
    assert done.stdout.startswith("12") and len(done.stdout) >= 10
    again, other = (finished(in_process(trained[0], *args, "--seed", seed)) for seed in (0, 1))
    assert again.stdout == done.stdout != other.stdout


def test_a_model_that_predicts_nothing_finite(tmp_path, text):
    plan = ["--data", text, *TINY, "--steps", 1, "--warmup", 0, "--lr", 1e38, "--name", "far"]
    said = "predictions of the model are not finite: train with a lower --lr"
    done = in_process(tmp_path, *plan, "--sample-every", 1)
    assert done.returncode == 2 and done.stderr.endswith(f"{said}\n")
    finished(in_process(tmp_path, "--resume", "runs/far", "--sample-every", 0))
    assert said in refused(in_process(tmp_path, "--sample", "runs/far", "--device", "cpu"))


def test_text_is_decoded_across_bytes_and_kept_from_the_terminal():
    class Model:
        new_cache = dict

        def __call__(self, ids, cache):
            return ids

        def stream(self, ids, seq_len, generator):
            for byte in "é\x1b[2J".encode() + b"\xc3":
                yield script.torch.tensor([byte])

    cfg = Namespace(device="cpu", precision="fp32", seed=0)
    assert "".join(generate(Model(), cfg, b"a", 6)) == "é\ufffd[2J\ufffd"


@pytest.mark.parametrize(
    "args, said",
    [
        (["--data", "none.txt"], "none.txt: No such file"),
        (["--data", "short.txt"], "the data has 100 bytes; --seq-len 32 needs 660"),
        (["--seq-len", "3"], "--seq-len 3 is shorter than --compress-block-size 4"),
        (["--kv-heads", "3"], "kv_heads"),
        (["--name", "whole"], "runs/whole is there already"),
        (["--name", "a/b"], "not a plain directory name"),
        (["--name", ".."], "not a plain directory name"),
        (["--out-dir", "short.txt"], "short.txt: File exists"),
        (["--data", "."], ": Is a directory"),
        (["--data", "/dev/zero"], "/dev/zero is a device"),
        (["--seq-len", str(2**30)], f"--seq-len: {2**30} is out of range"),
        (["--threads", "0"], "--threads: 0 is out of range, expected 1 to 1024"),
        (["--seed", "-1"], "--seed: -1 is out of range"),
        (["--lr", "nan"], "--lr: nan is out of range"),
        (["--pack", "\udcff"], "begins no document"),
        *((["--device", name], f"device '{name}' is not usable") for name in ("meta", "hpu")),
        (["--steps", "0"], "--steps: 0 is out of range"),
        (["--attention", "other"], "--attention: invalid choice"),
        (["--local-layers", "1;3"], "'1;3' is not auto, none or indices such as 0,2"),
        (["--local-layers", "9" * 5000], "is not auto, none or indices such as 0,2"),
        (["--local-layers", "9"], "--local-layers has layer 9, but --depth 1 begins at 0"),
        (
            ["--attention", "dense", "--local-layers", "0"],
            "--local-layers goes with sparse attention",
        ),
        (["--prompt", "text"], "--prompt does not go with training"),
        (["--unknown"], "unrecognized arguments: --unknown"),
        (["--resume", "runs/whole", "--steps", 28, "--dim", "32"], "--dim 32 was 16 in"),
        (["--resume", "runs/whole", "--name", "other"], "--name does not go with --resume"),
        *(
            (["--sample", "runs/whole", "--device", "cpu", name, value], said or name.strip("-"))
            for name, value, said in (
                *(("--top-p", "2", "top_p"), ("--filter-thres", "1.5", "filter_thres")),
                *(("--dim", "16", ""), ("--top-k", "0", ""), ("--prompt", "\ud800", "ud800")),
                *(("--temperature", value, "") for value in ("nan", "inf", "-1", "hot")),
                *(("--seed", "-1", ""), ("--seed", str(2**63), "")),
                *(("--max-new-tokens", "0", ""), ("--out-dir", "there", ""), ("--name", "new", "")),
            )
        ),
    ],
)
def test_bad_input(trained, text, args, said):
    cwd = trained[0]
    (cwd / "short.txt").write_bytes(b"x" * 100)
    before = {path: path.read_bytes() for path in cwd.rglob("*") if path.is_file()}
    if not {"--resume", "--sample"} & set(args):
        args = [*TINY, *([] if "--data" in args else ["--data", text]), *args]
    assert said in refused(in_process(cwd, *args))
    assert before == {path: path.read_bytes() for path in cwd.rglob("*") if path.is_file()}


def in_process(cwd, *args):
    """Without a process of its own: a start of torch for each bad option is long."""
    out, err, before = io.StringIO(), io.StringIO(), os.getcwd()
    threads = script.torch.get_num_threads()
    # training lets fp32 products be TF32: on a GPU, every later test of the process would err
    precision = script.torch.get_float32_matmul_precision()
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    try:
        os.chdir(cwd)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            patch.setenv("COLUMNS", "80")
            patch.setenv("LINES", "24")
            status = script.main(list(map(str, args)))
    finally:
        os.chdir(before)
        script.torch.set_num_threads(threads)
        script.torch.set_float32_matmul_precision(precision)
        signal.signal(signal.SIGINT, handlers[0])
        signal.signal(signal.SIGTERM, handlers[1])
    return subprocess.CompletedProcess(args, status, out.getvalue(), err.getvalue())


def test_help_needs_no_torch(tmp_path):
    for name in ("torch", "numpy", "matplotlib", "tqdm"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command("--help"), env=env, capture_output=True, text=True)
    assert "--seq-len" in finished(done).stdout
    assert options.tokens.most == TOO_LARGE - 1


@pytest.mark.parametrize("name", ["tqdm", "matplotlib.figure"])
def test_the_extra_is_named(name, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "training.plot", raising=False)
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(ROOT / "train_enwik8.py"))
    told = f"needs {name.partition('.')[0]}: pip install -e '.[train]'"
    assert left.value.code == 2 and told in capsys.readouterr().err
