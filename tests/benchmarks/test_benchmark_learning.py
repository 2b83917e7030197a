"""Training of many models: its text, equal beginnings, runs that continue exactly; recall."""

import gzip
import signal
from argparse import Namespace

import numpy as np
import pytest
import torch

from benchmarks import common, corpus, learning, recall, recipe, runs_pool, variants
from native_sparse_attention.presets import PRESETS, preset

QUICK = ["--quick", "--device", "cpu"]
SHAPE = dict(learning.SHAPE, dim=32, depth=2, heads=4, dim_head=16)
# the models here are of two layers
SMALL = {
    name: variants.scaled(settings, 8)
    for name, settings in variants.VARIANTS.items()
    if not settings.keys() & {"local_layers", "share_ranking"}
}
NOT_MEASURED = ("seconds", "tokens_per_s", "date", "curve")
HAS_MUON = hasattr(torch.optim, "Muon")


def without_times(row):
    curve = [[step, bits] for step, _, bits in row["curve"]]
    return {name: value for name, value in row.items() if name not in NOT_MEASURED} | {"c": curve}


def test_variants_share_initial_values():
    """Weights of equal name and shape, and the projections of branches with their own."""
    weights = {
        name: dict(variants.build(settings, SHAPE, seed=1).named_parameters())
        for name, settings in SMALL.items()
    }
    dense = weights["dense"]
    assert not any("_compress." in name for name in dense)
    for other in weights.values():
        same = [n for n in dense.keys() & other.keys() if dense[n].shape == other[n].shape]
        assert len(same) >= len(dense) - 2
        assert all(torch.equal(dense[name], other[name]) for name in same)
    for name, value in weights["paper's ranking, means"].items():
        if "to_qkv" in name:
            q, kv = value.split([64, 3 * 64])
            assert torch.equal(q, dense[name][:64])
            assert all(torch.equal(part, dense[name][64:]) for part in kv.split(64))
    other = variants.build(SMALL["dense"], SHAPE, seed=2)
    assert not torch.equal(other.token_emb.weight, dense["token_emb.weight"])


@pytest.mark.parametrize("T", [8192, 16384])
def test_presets_are_what_is_trained(T):
    """docs/training.md measures presets under names of variants; no other has a preset's name."""
    assert not variants.VARIANTS.keys() & {*PRESETS}
    assert variants.VARIANTS["MLP over windows of 8"] == preset("short-windows", T)
    trained = dict(variants.VARIANTS["1088 keys, blocks of 32, any head, 8 bits"])
    long = variants.VARIANTS["1600 keys, blocks of 64, any head, 8 bits"]
    del trained["sliding_window_size"]  # of a branch that is not there
    one = preset("one-softmax", T) | dict(branches=["selected"])
    assert one.pop("dense_length") == 8192 and trained == one
    longer = preset("one-softmax") | dict(branches=["selected"], sliding_window_size=255)
    assert longer.pop("dense_length") and long == longer


def test_keys_of_a_query():
    def keys(name):
        with torch.device("meta"):
            model = variants.make(variants.VARIANTS[name], learning.SHAPE)
        return variants.keys_per_query(variants.layers(model)[0], 8192)

    assert keys("dense") == {"dense": 8192} and keys("window") == {"window": 256}
    assert keys("paper's ranking, means") == {"compressed": 512, "selected": 576, "window": 256}
    ones = [name for name in variants.VARIANTS if name.startswith("one softmax")]
    assert all(keys(name) == {"selected": 768} for name in ones)


def test_a_stopped_run_continues_exactly(tmp_path, monkeypatch):
    """Stopped after every step and started again: the row of a run that was not."""
    how = ("muon" if HAS_MUON else "old") + ",short=0.5,average=1"
    names = ["--variants", "paper's ranking, means", "--recipe", how]
    whole = learning.main([*QUICK, *names, "--work", str(tmp_path / "whole")])
    assert whole[0]["bits"] != whole[0]["bits_of_last_weights"]

    stops = []
    monkeypatch.setattr(runs_pool.Run, "stopping", property(lambda run: bool(stops and stops[-1])))
    add_up = runs_pool.add_up
    monkeypatch.setattr(runs_pool, "add_up", lambda *a: (stops.append(True), add_up(*a))[1])
    work, parts = tmp_path / "parts", []
    for _ in range(12):
        stops.clear()
        parts = learning.main([*QUICK, *names, "--work", str(work)])
        if parts:
            break
    assert len(parts) == 1
    assert list(map(without_times, parts)) == list(map(without_times, whole))
    assert not list(work.rglob("checkpoint.pt")) and len(list(work.rglob("weights.pt"))) == 1


def test_processes_share_the_runs(tmp_path, monkeypatch):
    """A signal stops a run at a checkpoint. A run that another process has is left to it, one that
    failed is told and tried again; later calls find the rows, and append none."""
    out, work = tmp_path / "rows.jsonl", tmp_path / "work"
    call = [*QUICK, "--recipe", "old", "--work", str(work), "--out", str(out), "--variants"]
    with monkeypatch.context() as patch:
        patch.setattr(
            runs_pool, "add_up", lambda losses: signal.raise_signal(signal.SIGTERM) or losses
        )
        before = signal.getsignal(signal.SIGTERM)
        assert learning.main([*call, "window"]) == []
        assert signal.getsignal(signal.SIGTERM) == before
    (path,) = work.rglob("checkpoint.pt")
    assert torch.load(path)["done"]["step"] == 1
    with runs_pool.locked(path.parent):
        (row,) = learning.main([*call, "dense", "window", "--deadline", "3"])
    assert row["variant"] == "dense"
    with monkeypatch.context() as patch:
        patch.setattr(learning, "evaluate", lambda *args: 1 / 0)
        with pytest.raises(SystemExit, match="1 cases failed, the first: .*window .*division"):
            learning.main([*call, "window"])
    for _ in range(2):
        rows = learning.main([*call, "dense", "window"])
        assert [row["variant"] for row in rows if "bits" in row] == ["dense", "window"]
    assert len(common.read_rows(out)) == 3


def test_best_rate_is_that_of_other_seeds_and_lengths():
    chosen = {"dense": variants.VARIANTS["dense"]}
    plan = learning.Plan(chosen, {"sha256": "x"}, lengths=(8192, 16384), lrs=(3.0, 1.0))
    rows = [{"run": job.key, "lr": job.spec["lr"]} for job in plan.jobs([])]
    others = [(8192, 1), (8192, 2), (16384, 0), (16384, 1), (16384, 2)]
    rows[0]["bits"] = {"all": 3.0}
    for last, lr in ((dict(bits={"all": 2.0}), 1.0), (dict(failed="why"), 3.0)):
        jobs = plan.jobs([rows[0], rows[1] | last])[2:]
        found = [(job.spec["T"], job.spec["seed"], job.spec["lr"]) for job in jobs]
        assert found == [(*place, lr) for place in others]


def test_rates():
    """Linear up, constant, linear to 0; the cosine ends at a tenth."""
    cfg = Namespace(lr=2.0, warmup=10, steps=100, schedule="linear", decay=0.5)
    rates = [recipe.rate(cfg, step) for step in (1, 10, 50, 51, 100)]
    assert rates == pytest.approx([0.2, 2, 2, 2, 0.04])
    cosine = Namespace(**vars(cfg) | dict(schedule="cosine"))
    assert recipe.rate(cosine, 100) == pytest.approx(0.2)


@pytest.mark.skipif(not HAS_MUON, reason="needs torch 2.9")
def test_muon_and_adamw_train_each_parameter_once():
    model = variants.build(SMALL["MLP over windows of 8"], SHAPE, seed=0)
    cfg = Namespace(optimizer="muon", lr=0.1, weight_decay=0.1, device="cpu")
    groups = [g for o in recipe.build_optimizers(model, cfg) for g in o.param_groups]
    trained = [id(p) for group in groups for p in group["params"]]
    assert sorted(trained) == sorted(map(id, model.parameters()))


class Uniform(torch.nn.Module):
    """256 bytes are equally likely up to position 15, 4 after it."""

    def forward(self, ids):
        logits = torch.zeros(*ids.shape, 256)
        logits[:, 16:, 4:] = -torch.inf
        return logits


def test_bits_per_byte():
    text = np.arange(99, dtype=np.uint8) % 4
    cfg = Namespace(device="cpu", precision="fp32", batch_size=2, seq_len=32)
    found = learning.evaluate(Uniform(), text, 99, cfg)
    assert found == {"all": 5.0, "last_half": 2.0, "positions": {"0-16": 8.0, "16-32": 2.0}}


# associative recall and the needle: the task is what it says


def test_sequences():
    """A question's key has come once, with the value that follows; far enough, noise elsewhere."""
    task = recall.Task(pairs=5, noise=10, keys=8, values=6, least_distance=16)
    ids, asked, distance = task.draw(50, 128, np.random.default_rng(0))
    assert ids.shape == (50, 128) and asked.shape == distance.shape == (50, 5)
    assert 16 <= distance.min() < 24 and 100 < distance.max() < 128
    told = asked - distance
    assert told.min() == 0 and told.max() < 64 - 16 and asked.min() == 64 and asked.max() == 126
    for row in range(50):
        keys, values = ids[row][asked[row]], ids[row][asked[row] + 1]
        assert keys.unique().numel() == 5 and set(keys.tolist()) <= set(range(10, 18))
        assert set(values.tolist()) <= set(range(18, 24)) and task.tokens == 24
        assert torch.equal(ids[row][told[row]], keys)
        assert torch.equal(ids[row][told[row] + 1], values)
        assert (ids[row] < 10).sum() == 128 - 20
    for settings in recall.variants().values():
        local = settings["num_local_blocks"] * settings["selection_block_size"]
        assert max(local, settings["sliding_window_size"]) < recall.LARGE.task.least_distance


class Perfect(torch.nn.Module):
    """The value of the last equal token."""

    def forward(self, ids):
        same = ids[:, :, None] == ids[:, None]
        past = torch.ones(ids.shape[1], ids.shape[1]).tril(-1).bool()
        last = (same & past) * torch.arange(1, ids.shape[1] + 1)
        at = last.max(-1).values.clamp(max=ids.shape[1] - 1)
        return torch.nn.functional.one_hot(ids.gather(1, at), 256).float() * 100


def test_accuracy():
    task = recall.QUICK_TASK
    cfg = Namespace(device="cpu", precision="fp32", batch_size=2, seq_len=96)
    assert recall.evaluate(Perfect(), task, 192, 4 * 192, cfg) == 1
    blind = torch.nn.Sequential(torch.nn.Embedding(task.tokens, task.tokens))
    assert recall.evaluate(blind, task, 192, 4 * 192, cfg) < 1


class Copies(torch.nn.Module):
    """Reads the number of the comment that the text ends with; `shift` finds another one."""

    def __init__(self, shift=0):
        super().__init__()
        self.shift = shift

    def forward(self, ids):
        logits = torch.zeros(*ids.shape, 256)
        for row, out in zip(ids, logits):
            text = bytes(row.tolist())
            question = text.rindex(b"/* The number of")
            before = text[question : text.index(b" is ", question) + 4]
            at = text.index(before) + len(before)
            answers = row[at : at + learning.DIGITS] + self.shift
            out[-learning.DIGITS :].scatter_(1, answers[:, None], 100.0)
        return logits


def test_needle():
    text = np.frombuffer(b"int x = 0;\n" * 100, dtype=np.uint8)
    cfg = Namespace(device="cpu", precision="fp32", batch_size=2, seq_len=400)
    right = {"digits": 1.0, "numbers": 1.0, "bits": 0.0}
    found = learning.digits_found(Copies(), text, 3, cfg)
    assert found == dict.fromkeys(("0.1", "0.5", "0.9"), right)
    wrong = learning.digits_found(Copies(1), text, 3, cfg)
    assert all(found["digits"] == found["numbers"] == 0 < found["bits"] for found in wrong.values())
    for depth in learning.DEPTHS:
        row = learning.context(text, 400, depth, np.random.default_rng(0))
        at = bytes(row.tolist()).index(b"/* The number")
        assert len(row) == 400 and abs(at - depth * 320) < 40


def test_text_of_packages(tmp_path):
    """Pages without markup, dictionaries in pieces; copies, binary and large files and other kinds
    left out. No group of directories is in both parts."""
    page = b"<head><title>T</title></head><body><nav>N</nav><p>A &lt; %d<br>b <b>c</b></p></body>"
    words = bytes(range(33, 126)) * 5
    files = {f"a.deb/doc/{i}/page.html": page % i for i in range(30)}
    files |= {"a.deb/doc/7/same.html": page % 7, "a.deb/x/x.html.gz": gzip.compress(page % 99)}
    files |= {"a.deb/words/words.dict.dz": gzip.compress(words), "a.deb/x/left.png": b"out"}
    files |= {"a.deb/x/binary.pod": b"a\0b", "a.deb/x/large.pod": b"x" * 201, "b/b.pod": b"=b\n"}
    out = tmp_path / "text"
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    sizes = corpus.Sizes(whole=20_000, held_out=600, file=200, depth=3)
    row = corpus.build([tmp_path / "a.deb", tmp_path / "b"], out, sizes, (".html", ".pod", ".dict"))
    assert corpus.about(out) == {name: row[name] for name in ("bytes", "sha256")}
    parts, groups = {}, []
    for text in corpus.mapped(out):
        files = dict(p.partition(b"\n")[::2] for p in text.tobytes().split(b"\0") if p)
        groups.append({corpus.group_of(name.decode(), 3) for name in files})
        parts |= files
    assert groups[0] and not groups[0] & groups[1] and groups[1] == set(row["held_out_groups"])
    assert len(parts) == row["train_files"] + row["held_out_files"] == 31 + 3 + 1
    assert parts[b"a.deb/doc/5/page.html"] == b"A < 5\nb c\n"
    assert parts[b"a.deb/x/x.html"] == b"A < 99\nb c\n"
    assert parts[b"b/b.pod"] == b"=b\n"
    pieces = [parts[b"a.deb/words/words.dict.000%d" % i] for i in range(3)]
    assert b"".join(pieces) == words


def test_held_out_text_of_any_file(tmp_path):
    whole = tmp_path / "bytes"
    whole.write_bytes(bytes(range(1, 101)))
    assert [len(part) for part in corpus.mapped(whole)] == [95, 5]
    with pytest.raises(SystemExit, match="source must be a directory, got .*; unpack"):
        corpus.main([str(whole), "--text", str(tmp_path / "text")])
