"""train_enwik8.py as its users meet it: in processes of its own, with small models."""

import gzip
import hashlib
import http.server
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import train_enwik8 as script  # noqa: E402

TINY = [
    *("--dim", 16, "--depth", 1, "--heads", 2, "--kv-heads", 1, "--dim-head", 8),
    *("--sliding-window-size", 8, "--compress-block-size", 4, "--compress-block-sliding-stride", 2),
    *("--selection-block-size", 4, "--num-selected-blocks", 2, "--seq-len", 32, "--batch-size", 2),
    *("--accumulate", 2, "--warmup", 2, "--eval-bytes", 256, "--test-bytes", 256),
    *("--sample-length", 8, "--device", "cpu", "--threads", 1),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "squares.txt"
    path.write_text("".join(f"{i} squared is {i * i}\n" for i in range(3000)))
    return path


def command(*args):
    return [sys.executable, "-W", "error", str(ROOT / "train_enwik8.py"), *map(str, args)]


def call(cwd, *args):
    return subprocess.run(command(*args), cwd=cwd, capture_output=True, text=True, timeout=100)


def refused(done):
    """The one line of an exit with status 2."""
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line]
    assert len(lines) == 1 and lines[0].startswith("train_enwik8.py: "), done.stderr
    return lines[0]


def metrics(run):
    """What is not a matter of the clock."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_s"} for line in lines]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text):
    """A run of 20 steps that nothing disturbed."""
    cwd = tmp_path_factory.mktemp("trained")
    plan = ["--steps", 20, "--eval-every", 10, "--save-every", 5, "--sample-every", 10]
    done = in_process(cwd, "--data", text, "--name", "whole", *plan, *TINY)
    assert done.returncode == 0, done.stderr
    return cwd, plan, done


# data


def test_splits_are_90_5_5_in_order():
    corpus = bytes(range(250)) * 4
    train, valid, test = script.split(corpus, seq_len=16)
    assert (len(train), len(valid), len(test)) == (900, 50, 50)
    assert np.concatenate((train, valid, test)).tobytes() == corpus


def test_stdlib_corpus_is_the_same_each_time_and_free_of_tests():
    first = script.stdlib_corpus()
    assert first == script.stdlib_corpus()
    assert len(first) > 2**22
    assert Path(json.__file__).read_bytes() in first
    names = ["test/__init__.py", "unittest/test/__init__.py"]
    for path in (Path(sysconfig.get_paths()["stdlib"], name) for name in names):
        if path.exists() and len(content := path.read_bytes()) > 100:
            assert content not in first


def test_batches_are_a_function_of_seed_and_step():
    data = np.arange(200, dtype=np.uint8)
    cfg = script.Namespace(seed=1, accumulate=2, batch_size=3, seq_len=8, device="cpu")

    def drawn(step):
        return [ids.tolist() for ids in script.batches(data, cfg, step)]

    assert drawn(5) == drawn(5) != drawn(6)
    assert np.shape(drawn(5)) == (2, 3, 9)
    assert all(row == list(range(row[0], row[0] + 9)) for ids in drawn(5) for row in ids)


def test_every_window_can_be_drawn():
    data = np.arange(10, dtype=np.uint8)
    cfg = script.Namespace(seed=0, accumulate=1, batch_size=200, seq_len=8, device="cpu")
    (ids,) = script.batches(data, cfg, 1)
    assert {row[0] for row in ids.tolist()} == {0, 1}


def test_segments():
    """A document begins with each whole marker of a row."""
    ids = torch.tensor([list(b"ab<p>cd<p><p>e"), list(b"<p>abcdefghi<p")])
    assert script.segments(ids, "<p>").tolist() == [[0] * 2 + [1] * 5 + [2] * 3 + [3] * 4, [1] * 14]
    assert script.segments(ids[:, :2], "<p>").tolist() == [[0, 0], [0, 0]]


def test_loss_of_packed_documents():
    """What a document's bytes are predicted from is their document alone."""
    cfg = script.Namespace(pack="<p>", device="cpu", precision="fp32")
    net = script.Transformer(256, 16, 1, dim_head=8, heads=2, use_sparse_attn=True)
    parts = [torch.tensor([list(text)]) for text in (b"abc", b"<p>de", b"<p>fghij" * 3)]
    parts = [parts[0], parts[1], *parts[2].split(8, 1)]
    losses = [net(ids, return_loss=True) * (ids.shape[1] - 1) for ids in parts]
    expected = sum(losses) / sum(ids.shape[1] - 1 for ids in parts)
    torch.testing.assert_close(script.loss_of(net, torch.cat(parts, 1), cfg), expected)


def test_training_on_packed_documents(tmp_path):
    page = b"<page>" + bytes(range(97, 123)) + b"</page>"
    (tmp_path / "pages").write_bytes(page * 300)
    plan = ("--data", "pages", "--pack", "<page>", "--name", "a", "--steps", 2, *TINY)
    done = in_process(tmp_path, *plan)
    assert done.returncode == 0, done
    assert script.json.loads((tmp_path / "runs/a/config.json").read_text())["settings"]["pack"]
    said = refused(in_process(tmp_path, *plan, "--pack", "<p>", "--name", "b"))
    assert "--pack <p> begins no document" in said


def test_packed_files(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"bytes"))
    (tmp_path / "a.zip").write_bytes(zipped(b"bytes"))
    (tmp_path / "a").write_bytes(b"bytes")
    assert {script.read_bytes(tmp_path / name) for name in ("a", "a.gz", "a.zip")} == {b"bytes"}
    for name in ("a.gz", "a.zip"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-10])
        with pytest.raises(script.UserError, match="broken"):
            script.read_bytes(tmp_path / name)


# the download, from a server of our own

CONTENT = np.random.default_rng(0).bytes(300_000)


def zipped(content):
    """An archive of it, the same bytes whenever it is made."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo("enwik8"), content)
    return buffer.getvalue()


@pytest.fixture
def server():
    """Serves `body`, or the range of it that is asked for; `requests` has the headers that came."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            server.requests.append(dict(self.headers))
            if server.silent:
                time.sleep(server.silent)
                return
            asked = self.headers.get("Range") if server.ranges else None
            start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(len(server.body) - start))
            self.end_headers()
            self.wfile.write(server.body[start : server.stop_at])

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.body, server.requests = zipped(CONTENT), []
    server.ranges, server.stop_at, server.silent = True, None, 0.0
    server.url = f"http://127.0.0.1:{server.server_port}/enwik8.zip"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def fetch(server, folder):
    good = zipped(CONTENT)
    return script.enwik8(
        folder,
        server.url,
        zip_size=len(good),
        zip_sha256=hashlib.sha256(good).hexdigest(),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


def test_download_once(server, tmp_path):
    assert fetch(server, tmp_path / "data") == CONTENT
    assert fetch(server, tmp_path / "data") == CONTENT
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["enwik8.zip"]
    assert len(server.requests) == 1


@pytest.mark.parametrize("ranges", [True, False])
def test_download_resumes(server, tmp_path, ranges):
    server.stop_at, server.ranges = 100_000, ranges
    with pytest.raises(script.DownloadError, match=r"broke off|IncompleteRead"):
        fetch(server, tmp_path)
    assert (tmp_path / "enwik8.zip.part").stat().st_size == 100_000
    server.stop_at = None
    assert fetch(server, tmp_path) == CONTENT
    assert server.requests[1]["Range"] == "bytes=100000-"
    assert [path.name for path in tmp_path.iterdir()] == ["enwik8.zip"]


@pytest.mark.parametrize("wrong", [lambda b: b[:-1] + b"?", lambda b: b + b"?"])
def test_corrupted_download_is_removed(server, tmp_path, wrong):
    server.body = wrong(server.body)
    with pytest.raises(script.DownloadError, match="other bytes than expected"):
        fetch(server, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_silent_server_is_given_up(server, tmp_path):
    server.silent = 0.6
    start = time.monotonic()
    with pytest.raises(script.DownloadError, match="cannot download"):
        script.download(server.url, tmp_path / "enwik8.zip", 1, "", timeout=0.2)
    assert time.monotonic() - start < 0.6


def test_file_placed_by_hand_is_verified_and_kept(server, tmp_path):
    path = tmp_path / "enwik8.gz"
    path.write_bytes(gzip.compress(CONTENT[:-1]))
    with pytest.raises(script.UserError, match="not enwik8"):
        fetch(server, tmp_path)
    assert path.exists() and not server.requests


def test_without_network_the_embedded_corpus(monkeypatch, tmp_path, capsys):
    gone = script.DownloadError("cannot download http://127.0.0.1:9/enwik8.zip (refused)")
    path = tmp_path / "enwik8.zip"

    def offline():
        script.download("http://127.0.0.1:9/enwik8.zip", path, 1, "")
        raise gone

    monkeypatch.setattr(script, "enwik8", offline)
    name, corpus = script.load_data("auto")
    assert (name, corpus) == ("stdlib", script.stdlib_corpus())
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 1 and "cannot download" in out[0] and "embedded corpus" in out[0]
    with pytest.raises(script.UserError, match=r"cannot download.*by hand"):
        script.load_data("enwik8")


# training


def test_run_leaves_what_it_promises(trained):
    cwd, _, done = trained
    run = cwd / "runs/whole"
    names = sorted(path.name for path in run.iterdir())
    steps = [f"step-000000{n}.{kind}" for n in (15, 20) for kind in ("pt", "safetensors")]
    assert names == ["best.safetensors", "config.json", "loss.png", "metrics.jsonl", *steps]
    records = metrics(run)
    assert [r["step"] for r in records] == list(range(21))
    assert [r["step"] for r in records if "val_bpb" in r] == [0, 10, 20]
    assert records[-1]["val_bpb"] < records[0]["val_bpb"] - 0.2
    assert 0 < records[-1]["test_bpb"] < 9
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert done.stdout.count("--- step") == 2
    assert "bits/byte" in done.stderr and "tokens/s" in done.stderr


def test_killed_and_resumed_equals_undisturbed(trained, text):
    cwd, plan, _ = trained
    run = cwd / "runs/killed"
    args = command("--data", text, "--name", "killed", *plan, *TINY)
    with subprocess.Popen(args, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        wait_for(lambda: len(read(run / "metrics.jsonl").splitlines()) > 11, process)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 19, "lo')  # what a kill in the middle of a line leaves
    done = call(cwd, "--resume", "runs/killed")
    assert done.returncode == 0, done.stderr
    assert metrics(run) == metrics(cwd / "runs/whole")
    whole = (cwd / "runs/whole/step-00000020.safetensors").read_bytes()
    assert (run / "step-00000020.safetensors").read_bytes() == whole


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_and_says_how_to_go_on(trained, text, signum):
    cwd, plan, _ = trained
    run = cwd / f"runs/stopped-{signum.name}"
    args = command("--data", text, "--name", run.name, *plan, *TINY, "--save-every", 1000)
    pipe = subprocess.PIPE
    with subprocess.Popen(args, cwd=cwd, stdout=pipe, stderr=pipe, text=True) as process:
        wait_for(lambda: len(read(run / "metrics.jsonl").splitlines()) > 3, process)
        process.send_signal(signum)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    last = out.splitlines()[-1]
    resume = f"go on with: python train_enwik8.py --resume runs/{run.name}"
    assert last.startswith("stopped at step ") and last.endswith(resume)
    done = in_process(cwd, "--resume", f"runs/{run.name}")
    assert done.returncode == 0, done.stderr
    assert metrics(run) == metrics(cwd / "runs/whole")


def read(path):
    return path.read_text() if path.exists() else ""


def wait_for(condition, process, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.002)


def test_dense_twin_and_default_names(tmp_path, text):
    for number in (1, 2):
        plan = ["--steps", 2, "--attention", "dense", "--sample-every", 0]
        done = in_process(tmp_path, "--data", text, *plan, *TINY)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / f"runs/squares-dense-{number}/config.json").exists()


def test_finished_run_says_so(trained):
    done = in_process(trained[0], "--resume", "runs/whole")
    assert done.returncode == 0 and "finished at step 20" in done.stdout


def test_sample_streams_text_that_repeats(trained):
    args = ["--sample", "runs/whole", "--prompt", "12", "--length", 20, "--device", "cpu"]
    done = call(trained[0], *args)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("12") and len(done.stdout) >= 10
    again, other = (in_process(trained[0], *args, "--seed", seed) for seed in (0, 1))
    assert again.stdout == done.stdout != other.stdout


# bad input


def test_text_is_decoded_across_bytes_and_kept_from_the_terminal():
    class Model:
        def stream(self, ids, seq_len, generator):
            for byte in "é\x1b[2J".encode() + b"\xc3":
                yield script.torch.tensor([byte])

    cfg = script.Namespace(device="cpu", precision="fp32", seed=0)
    assert "".join(script.generate(Model(), cfg, b"a", 6)) == "é\ufffd[2J\ufffd"


@pytest.mark.parametrize(
    "args, said",
    [
        (["--data", "none.txt"], "none.txt: No such file"),
        (["--data", "short.txt"], "the data has 100 bytes; --seq-len 32 needs 660"),
        (["--data", "bad.zip"], "bad.zip is broken"),
        (["--seq-len", "3"], "--seq-len 3 is shorter than --compress-block-size 4"),
        (["--kv-heads", "3"], "kv_heads"),
        (["--name", "whole"], "runs/whole is there already"),
        (["--name", "a/b"], "not a plain directory name"),
        (["--steps", "0"], "--steps: 0 is out of range"),
        (["--attention", "other"], "--attention: invalid choice"),
        (["--prompt", "text"], "--prompt does not go with training"),
        (["--device", "cuda:99"], "device 'cuda:99' is not usable"),
        (["--unknown"], "unrecognized arguments: --unknown"),
    ],
)
def test_bad_input_of_a_new_run(trained, text, args, said):
    cwd = trained[0]
    (cwd / "short.txt").write_bytes(b"x" * 100)
    (cwd / "bad.zip").write_bytes(b"PK no archive")
    before = sorted(cwd.rglob("*"))
    data = [] if "--data" in args else ["--data", str(text)]
    assert said in refused(in_process(cwd, *TINY, *data, *args))
    assert sorted(cwd.rglob("*")) == before


def in_process(cwd, *args):
    """As `call`, without a process of its own: a start of torch for each bad option is long."""
    out, err, before = io.StringIO(), io.StringIO(), os.getcwd()
    threads = script.torch.get_num_threads()
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    try:
        os.chdir(cwd)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            status = script.main(list(map(str, args)))
    finally:
        os.chdir(before)
        script.torch.set_num_threads(threads)
        signal.signal(signal.SIGINT, handlers[0])
        signal.signal(signal.SIGTERM, handlers[1])
    return subprocess.CompletedProcess(args, status, out.getvalue(), err.getvalue())


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage(name, change):
    def apply(run):
        change(run / name)

    return apply


@pytest.mark.parametrize(
    "harm, args, said",
    [
        (damage("step-00000005.safetensors", cut), [], "step-00000005.safetensors is broken"),
        (damage("step-00000005.pt", cut), [], "step-00000005.pt is broken"),
        (damage("step-00000005.pt", Path.unlink), [], "step-00000005.pt: No such file"),
        (damage("config.json", cut), [], "config.json is broken"),
        (damage("config.json", Path.unlink), [], "is not a run directory"),
        (
            damage("metrics.jsonl", lambda p: p.write_text("no json\n")),
            [],
            "metrics.jsonl is broken",
        ),
        (lambda run: [p.unlink() for p in run.glob("step-*")], [], "has no checkpoint"),
        (lambda run: None, ["--dim", "32"], "--dim 32 was 16 in"),
        (lambda run: None, ["--name", "other"], "--name does not go with --resume"),
    ],
)
def test_bad_input_of_a_resume(short_run, tmp_path, harm, args, said):
    run = tmp_path / "run"
    run.mkdir()
    for path in short_run.iterdir():
        (run / path.name).write_bytes(path.read_bytes())
    harm(run)
    before = {path: path.read_bytes() for path in run.iterdir()}
    assert said in refused(in_process(tmp_path, "--resume", run, "--steps", 8, *args))
    assert {path: path.read_bytes() for path in run.iterdir()} == before


@pytest.fixture(scope="module")
def short_run(tmp_path_factory, text):
    cwd = tmp_path_factory.mktemp("short")
    plan = ["--steps", 5, "--save-every", 5, "--sample-every", 0]
    done = in_process(cwd, "--data", text, "--name", "short", *plan, *TINY)
    assert done.returncode == 0, done.stderr
    return cwd / "runs/short"


def test_changed_data_is_refused(tmp_path, text):
    data = tmp_path / "data.txt"
    data.write_bytes(text.read_bytes())
    plan = ["--steps", 2, "--sample-every", 0]
    assert in_process(tmp_path, "--data", data, "--name", "a", *plan, *TINY).returncode == 0
    data.write_bytes(text.read_bytes()[1:])
    assert "data.txt is not what it was" in refused(
        in_process(tmp_path, "--resume", "runs/a", "--steps", 3)
    )


def test_no_place_to_write(tmp_path, text):
    (tmp_path / "runs").write_text("a file")
    said = refused(call(tmp_path, "--data", text, *TINY))
    assert said == "train_enwik8.py: runs: File exists"
    assert (tmp_path / "runs").read_text() == "a file"


def test_sample_of_no_run(tmp_path):
    assert "is not a run directory" in refused(in_process(tmp_path, "--sample", tmp_path))


@pytest.mark.parametrize("args", [["--top-p", "2"], ["--filter-thres", "1.5"], ["--dim", "16"]])
def test_bad_sampling_options(short_run, args):
    name = args[0].strip("-").replace("-", "_")
    said = refused(in_process(short_run, "--sample", short_run, "--device", "cpu", *args))
    assert name in said.replace("-", "_")


def test_tensorboard_that_is_missing(short_run, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    args = ["--resume", short_run, "--steps", 8, "--tensorboard"]
    assert "--tensorboard needs the package" in refused(in_process(short_run, *args))


# the benchmark that is made of such runs


def benchmark():
    spec = importlib.util.spec_from_file_location("bench", ROOT / "benchmarks/enwik8.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_row_of_a_run(trained):
    bench = benchmark()
    row = bench.row(trained[0] / "runs/whole")
    assert row["config"]["attention"] == "sparse" and list(row["val_bpb"]) == [0, 10, 20]
    line = bench.table([json.loads(json.dumps(row))]).splitlines()[-1]
    assert line.startswith("| sparse | logits | 1 | ") and line.endswith(f"{row['test_bpb']:.3f} |")


def test_documented_table_is_that_of_the_rows():
    bench = benchmark()
    rows = [json.loads(line) for line in bench.RESULTS.read_text().splitlines()]
    assert bench.table(rows) in (ROOT / "docs/training.md").read_text()
