"""Training of many models: equal beginnings, runs that continue exactly, rows, table, plot."""

import itertools
import signal
from argparse import Namespace

import pytest
import torch

from benchmarks import common, corpus, learning, runs_pool, variants
from native_sparse_attention import recipes
from native_sparse_attention.presets import preset

QUICK = ["--quick", "--device", "cpu"]
SHAPE = dict(learning.SHAPE, dim=32, depth=2, heads=4, dim_head=16)
# the models here are of two layers
SMALL = {n: variants.scaled(s, 8) for n, s in variants.VARIANTS.items() if "local_layers" not in s}
NOT_MEASURED = ("seconds", "tokens_per_s", "date", "curve")


def without_times(row):
    curve = [[step, bits] for step, _, bits in row["curve"]]
    return {name: value for name, value in row.items() if name not in NOT_MEASURED} | {"c": curve}


def test_variants_share_initial_values():
    """Weights of equal name and shape, and the projections of branches with their own."""
    models = {name: variants.build(s, SHAPE, seed=1) for name, s in SMALL.items()}
    weights = {name: dict(model.named_parameters()) for name, model in models.items()}
    dense = weights["dense"]
    for (_, a), (_, b) in itertools.combinations(weights.items(), 2):
        same = [name for name in a.keys() & b.keys() if a[name].shape == b[name].shape]
        networks = [{n: t.shape for n, t in x.items() if "_compress." in n} for x in (a, b)]
        if networks[0] != networks[1]:
            same = [name for name in same if "_compress." not in name]
        assert len(same) >= len(dense) - 2
        assert all(torch.equal(a[name], b[name]) for name in same)
    for name, value in weights["paper"].items():
        if "to_qkv" in name:
            q, kv = value.split([64, 3 * 64])
            assert torch.equal(q, dense[name][:64])
            assert all(torch.equal(part, dense[name][64:]) for part in kv.split(64))
    networks = [layer.k_compress for layer in variants.layers(models["published"])]
    assert not torch.equal(networks[0][-1].weight, networks[1][-1].weight)
    other = variants.build(SMALL["dense"], SHAPE, seed=2)
    assert not torch.equal(other.token_emb.weight, models["dense"].token_emb.weight)


@pytest.mark.parametrize("T", [8192, 16384])
def test_presets_are_what_is_trained(T):
    """docs/training.md measures presets under the names of variants."""
    assert variants.VARIANTS["MLP over windows of 8"] == preset("short-windows", T)
    trained = dict(variants.VARIANTS["1088 keys, blocks of 32"])
    del trained["sliding_window_size"]  # of a branch that is not there
    one = preset("one-softmax", T) | dict(branches=["selected"])
    assert one.pop("dense_length") == 8192 and trained == one


def test_dense_attention_is_that_of_the_same_weights():
    """Its layers spend nothing on compressed keys."""
    model = variants.build(SMALL["dense"], SHAPE, seed=0)
    assert all(layer.k_compress is None for layer in variants.layers(model))
    tokens = SMALL["one softmax, max of tokens, rotated"]
    sparse = variants.build(tokens, SHAPE, seed=0)
    recipes.set_dense(sparse, True)
    ids = torch.randint(0, 256, (1, 200))
    assert torch.equal(model(ids), sparse(ids))
    recipes.set_dense(sparse, False)
    assert not torch.allclose(model(ids), sparse(ids), atol=1e-4)


def test_keys_of_a_query():
    def keys(name):
        with torch.device("meta"):
            model = variants.make(variants.VARIANTS[name], learning.SHAPE)
        return variants.keys_per_query(variants.layers(model)[0], 8192)

    assert keys("dense") == {"dense": 8192} and keys("window") == {"window": 256}
    assert keys("paper") == {"compressed": 512, "selected": 576, "window": 256}
    ones = [name for name in variants.VARIANTS if name.startswith("one softmax")]
    assert all(keys(name) == {"selected": 768} for name in ones)


def test_a_stopped_run_continues_exactly(tmp_path, monkeypatch):
    """Stopped after every step and started again: the row of a run that was not."""
    names = ["--variants", "paper"]
    whole = learning.main([*QUICK, *names])
    run = learning.main([*QUICK, *names, "--work", str(tmp_path / "whole")])

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
    assert list(map(without_times, run)) == list(map(without_times, whole))
    assert not list(work.rglob("checkpoint.pt")) and len(list(work.rglob("weights.pt"))) == 1


def test_processes_share_the_runs(tmp_path):
    """A run that another process has is left to it; a second call finds the rows, and appends
    none."""
    out, work = tmp_path / "rows.jsonl", tmp_path / "work"
    call = [*QUICK, "--work", str(work), "--out", str(out), "--variants", "dense", "window"]
    assert learning.main([*call, "--deadline", "1e-6"]) == []
    plan = learning.quick_plan(
        Namespace(lrs=None, seeds=None, compile=False), {"window": variants.VARIANTS["window"]},
        corpus.about(learning.QUICK_TEXT),
    )  # fmt: skip
    (job,) = plan.jobs([])
    (work / job.key).mkdir(parents=True)
    with runs_pool.locked(work / job.key):
        (row,) = learning.main([*call, "--deadline", "5"])
    assert row["variant"] == "dense"
    rows = learning.main(call)
    assert {row["variant"] for row in rows} == {"dense", "window"}
    assert sorted(map(str, learning.main(call))) == sorted(map(str, rows))
    assert len(common.read_rows(out)) == 2


def test_a_signal_stops_at_a_checkpoint(tmp_path, monkeypatch):
    add_up = runs_pool.add_up
    monkeypatch.setattr(
        runs_pool, "add_up", lambda *a: (signal.raise_signal(signal.SIGTERM), add_up(*a))[1]
    )
    before = signal.getsignal(signal.SIGTERM)
    assert learning.main([*QUICK, "--variants", "window", "--work", str(tmp_path)]) == []
    assert signal.getsignal(signal.SIGTERM) == before
    (path,) = tmp_path.rglob("checkpoint.pt")
    assert torch.load(path)["done"]["step"] == 1


def test_what_failed_is_told(tmp_path, monkeypatch):
    def fail(*args):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(learning, "evaluate", fail)
    call = [*QUICK, "--variants", "window", "--work", str(tmp_path)]
    with pytest.raises(SystemExit, match="1 cases failed, the first: window .*no such thing"):
        learning.main(call)
    monkeypatch.undo()
    assert "bits" in learning.main(call)[0]


def test_order_of_the_jobs():
    """Learning rates of the first seed; then the other seeds and lengths with the best one."""
    names = ["dense", "window", "paper", "published", "one softmax, logits"]
    chosen = {name: variants.VARIANTS[name] for name in names}
    plan = learning.Plan(chosen, {"sha256": "x", "bytes": 1}, lengths=(8192, 16384), lrs=(3.0, 1.0))

    def told(jobs):
        return [tuple(job.spec[n] for n in ("variant", "T", "seed", "lr")) for job in jobs]

    trials = [(name, 8192, 0, lr) for lr in (3.0, 1.0) for name in names[:4]]
    rest = [(names[4], 8192, 0, lr) for lr in (3.0, 1.0)]
    first = plan.jobs([])
    assert told(first) == trials + rest
    rows = [
        {"run": job.key, **job.spec, "bits": {"all": job.spec["lr"]}}
        for job in first[:1] + first[4:5]
    ]
    found = told(plan.jobs(rows))
    more = [("dense", 8192, seed, 1.0) for seed in (1, 2)]
    long = [("dense", 16384, seed, 1.0) for seed in (0, 1, 2)]
    assert found == trials + more + rest + long
    rows[1]["failed"] = rows[1].pop("bits")
    assert ("dense", 8192, 1, 3.0) in told(plan.jobs(rows))
    with pytest.raises(ValueError, match="lengths must divide 32768 tokens, got 1000"):
        learning.Plan(chosen, {}, lengths=(1000,))


def made_up(variant, seed, lr, bits, **others):
    row = dict(kind="train", variant=variant, seed=seed, lr=lr, T=1024, steps=10, batch=2)
    row |= dict(run=f"{variant} {seed} {lr}", shape={}, train_bytes=20480)
    row |= dict(settings=variants.VARIANTS.get(variant, {}))
    row |= dict(parameters=1_500_000, keys_per_query={"selected": 512, "window": 64})
    row["bits"] = {"all": bits, "last_half": bits, "positions": {"0-256": 2.0, "256-1024": bits}}
    row["needle"] = {"0.1": {"digits": 0.25}, "0.9": {"digits": bits / 2}}
    row |= dict(curve=[[10240, 1.0, 3.0], [20480, 2.0, bits]], schedule="cosine")
    row |= dict(data={"sha256": "f" * 64, "bytes": 9}, gpu="a GPU", torch="2", triton="3")
    return row | dict(commit="abc", tokens_per_s=1000) | others


def test_table():
    rows = [
        made_up("other text", 0, 1e-3, 9.0, steps=5),
        made_up("dense", 0, 1e-3, 1.0), made_up("dense", 0, 2e-3, 1.1),
        made_up("dense", 1, 1e-3, 1.2), made_up("window", 0, 1e-3, 1.35),
        {"variant": "window", "kind": "train", "failed": "why"},
        made_up("window", 0, 2e-3, 1.3), made_up("window", 1, 2e-3, 1.4),
        made_up("dense", 0, 1e-4, 0.0, kind="speed", compile=False, tokens_per_s=5000),
        made_up("window", 0, 1e-4, 0.0, kind="speed", compile=False, tokens_per_s=10_000),
        made_up("window", 0, 1e-4, 0.0, kind="speed", compile=True, tokens_per_s=12_000),
        # of another card: nobody's baseline
        made_up("dense", 0, 1e-4, 0.0, kind="speed", compile=True, tokens_per_s=1, gpu="old"),
    ]  # fmt: skip
    text = learning.table_of_runs(rows)
    lines = text.splitlines()
    assert lines[0] == "T = 1024:" and lines[2].startswith(
        "| variant | M parameters | keys a query"
    )
    assert lines[4:6] == [
        "| dense | 1.5 | 512 + 64 | 0.001 | 2 | 1.100 ± 0.141 |  | 1.100 ± 0.141 | 1.100 "
        "| 0.25 / 0.55 | 5 / 0 |",
        "| window | 1.5 | 512 + 64 | 0.002 | 2 | 1.350 ± 0.071 | 0.250 ± 0.071 | 1.350 ± 0.071 "
        "| 1.350 | 0.25 / 0.68 | 10 (2.00) / 12 |",
    ]
    assert lines[-1].endswith("a GPU, torch 2, triton 3; abc.") and "other" not in text
    assert learning.table_of_sizes(rows).splitlines()[2:] == [
        "| window |  |  |  |  | 256 | 512 + 64 | 0.250 ± 0.071 |"
    ]
