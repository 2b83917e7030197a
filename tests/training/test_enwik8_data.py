"""The bytes that train_enwik8.py trains on: splits, batches, documents, and their download."""

import gzip
import hashlib
import http.server
import io
import json
import sysconfig
import threading
import zipfile
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

from native_sparse_attention import Transformer
from training import data
from training.batches import batch_of, batches, segments
from training.errors import UserError
from training.evaluate import evaluate
from training.forward import loss_of


def test_splits_are_90_5_5_in_order():
    corpus = bytes(range(250)) * 4
    parts = data.split(corpus, seq_len=16)
    assert [len(part) for part in parts] == [900, 50, 50]
    assert np.concatenate(parts).tobytes() == corpus


def test_stdlib_corpus_is_free_of_tests():
    corpus = data.stdlib_corpus()
    assert len(corpus) > 2**22 and Path(json.__file__).read_bytes() in corpus
    names = ["test/__init__.py", "unittest/test/__init__.py"]
    for path in (Path(sysconfig.get_paths()["stdlib"], name) for name in names):
        if path.exists() and len(content := path.read_bytes()) > 100:
            assert content not in corpus


def test_batches_are_a_function_of_seed_and_step():
    text = np.arange(200, dtype=np.uint8)
    cfg = Namespace(seed=1, accumulate=2, batch_size=3, seq_len=8, pack="")

    def drawn(step):
        return [batch.ids.tolist() for batch in batches(text, cfg, step)]

    assert drawn(5) == drawn(5) != drawn(6)
    assert np.shape(drawn(5)) == (2, 3, 9)
    assert all(row == list(range(row[0], row[0] + 9)) for ids in drawn(5) for row in ids)


def test_segments():
    """A document begins with each whole marker of a row."""
    ids = torch.tensor([list(b"ab<p>cd<p><p>e"), list(b"<p>abcdefghi<p")])
    assert segments(ids, "<p>").tolist() == [[0] * 2 + [1] * 5 + [2] * 3 + [3] * 4, [1] * 14]
    assert segments(ids[:, :2], "<p>").tolist() == [[0, 0], [0, 0]]


def test_loss_of_packed_documents():
    """What a document's bytes are predicted from is their document alone."""
    cfg = Namespace(pack="<p>", device="cpu", precision="fp32")
    net = Transformer(256, 16, 1, dim_head=8, heads=2, use_sparse_attn=True)
    parts = [torch.tensor([list(text)]) for text in (b"abc", b"<p>de", b"<p>fghij" * 3)]
    parts = [parts[0], parts[1], *parts[2].split(8, 1)]
    losses = [net(ids, return_loss=True) * (ids.shape[1] - 1) for ids in parts]
    expected = sum(losses) / sum(ids.shape[1] - 1 for ids in parts)
    torch.testing.assert_close(loss_of(net, batch_of(torch.cat(parts, 1), cfg), cfg), expected)


def test_packed_losses_do_not_depend_on_the_batch():
    """Gradients of a step and validations, of windows that hold few or many predictions."""
    net = Transformer(256, 16, 1, dim_head=8, heads=2)
    draw = np.random.default_rng(0)
    parts = [
        b"|a" * 40 if draw.random() < 0.5 else bytes(draw.integers(97, 123, 80)) for _ in "x" * 40
    ]
    text = np.frombuffer(b"".join(parts), dtype=np.uint8)

    def settings(accumulate, batch_size):
        sizes = dict(accumulate=accumulate, batch_size=batch_size, seq_len=64)
        return Namespace(seed=0, pack="|", precision="fp32", device="cpu", **sizes)

    def gradients(cfg, step):
        net.zero_grad()
        for batch in batches(text, cfg, step):
            (loss_of(net, batch, cfg) / cfg.accumulate).backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    for step in range(3):
        torch.testing.assert_close(gradients(settings(1, 4), step), gradients(settings(4, 1), step))
    bits = [evaluate(net, text, settings(1, size), 32 * 64) for size in (1, 32)]
    assert bits[0] == pytest.approx(bits[1], rel=1e-5)
    alone = np.full(130, ord("|"), dtype=np.uint8)  # every byte is a document
    assert evaluate(net, alone, settings(1, 1), 64) == 0


def zipped(content):
    """An archive of it, the same bytes whenever it is made."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo("enwik8"), content)
    return buffer.getvalue()


def test_packed_files(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"bytes"))
    (tmp_path / "a.zip").write_bytes(zipped(b"bytes"))
    (tmp_path / "a").write_bytes(b"bytes")
    assert {data.read_bytes(tmp_path / name) for name in ("a", "a.gz", "a.zip")} == {b"bytes"}
    for name in ("a.gz", "a.zip"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-10])
        with pytest.raises(UserError, match="broken"):
            data.read_bytes(tmp_path / name)
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("a", b"a")
        archive.writestr("b", b"b")
    with pytest.raises(UserError, match="b.zip holds 2 files, expected one"):
        data.read_bytes(tmp_path / "b.zip")


CONTENT = np.random.default_rng(0).bytes(300_000)


@pytest.fixture
def server():
    """Serves `body`, or its begin; `requests` counts."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            server.requests += 1
            self.send_response(200)
            self.send_header("Content-Length", str(len(server.body)))
            self.end_headers()
            self.wfile.write(server.body[: server.stop_at])

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.body, server.requests = zipped(CONTENT), 0
    server.stop_at = None
    server.url = f"http://127.0.0.1:{server.server_port}/enwik8.zip"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def fetch(server, folder):
    good = zipped(CONTENT)
    return data.enwik8(
        folder,
        server.url,
        zip_sha256=hashlib.sha256(good).hexdigest(),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


def test_download_once(server, tmp_path):
    """And not over a file that was placed by hand, which is verified and kept."""
    assert fetch(server, tmp_path / "data") == CONTENT
    assert fetch(server, tmp_path / "data") == CONTENT
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["enwik8.zip"]
    path = tmp_path / "enwik8.gz"
    path.write_bytes(gzip.compress(CONTENT[:-1]))
    with pytest.raises(UserError, match="not enwik8"):
        fetch(server, tmp_path)
    assert path.exists() and server.requests == 1


@pytest.mark.parametrize(
    ("change", "stop_at"),
    [(lambda b: b[:-1] + b"?", None), (lambda b: b + b"?", None), (lambda b: b, 100_000)],
)
def test_damaged_download_is_removed(server, tmp_path, change, stop_at):
    server.body, server.stop_at = change(server.body), stop_at
    with pytest.raises(data.DownloadError, match=r"other bytes than expected|IncompleteRead"):
        fetch(server, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_network_the_embedded_corpus(monkeypatch, tmp_path, capsys):
    gone = data.DownloadError("cannot download http://127.0.0.1:9/enwik8.zip (refused)")
    path = tmp_path / "enwik8.zip"

    def offline():
        data.download("http://127.0.0.1:9/enwik8.zip", path, "")
        raise gone

    monkeypatch.setattr(data, "enwik8", offline)
    monkeypatch.setattr(data, "stdlib_corpus", lambda: b"corpus")
    assert data.load_data("auto") == ("stdlib", b"corpus")
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 1 and "cannot download" in out[0] and "embedded corpus" in out[0]
    with pytest.raises(UserError, match=r"cannot download.*by hand"):
        data.load_data("enwik8")
