"""Training of many models: its text, equal beginnings, runs that continue exactly; recall."""

import gzip
import itertools
import signal
from argparse import Namespace

import numpy as np
import pytest
import torch

from benchmarks import common, corpus, learning, recall, recipe, runs_pool, variants
from native_sparse_attention import recipes
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
needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")


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
    for name, value in weights["paper's ranking, means"].items():
        if "to_qkv" in name:
            q, kv = value.split([64, 3 * 64])
            assert torch.equal(q, dense[name][:64])
            assert all(torch.equal(part, dense[name][64:]) for part in kv.split(64))
    networks = [layer.k_compress for layer in variants.layers(models["published form"])]
    assert not torch.equal(networks[0][-1].weight, networks[1][-1].weight)
    other = variants.build(SMALL["dense"], SHAPE, seed=2)
    assert not torch.equal(other.token_emb.weight, models["dense"].token_emb.weight)


@pytest.mark.parametrize("T", [8192, 16384])
def test_presets_are_what_is_trained(T):
    """docs/training.md measures presets under names of variants; no other has a preset's name."""
    assert not variants.VARIANTS.keys() & {*PRESETS}
    assert variants.VARIANTS["MLP over windows of 8"] == preset("short-windows", T)
    trained = dict(variants.VARIANTS["1088 keys, blocks of 32"])
    del trained["sliding_window_size"]  # of a branch that is not there
    one = preset("one-softmax", T) | dict(branches=["selected"])
    assert one.pop("dense_length") == 8192 and trained == one
    longer = preset("one-softmax") | dict(branches=["selected"], sliding_window_size=255)
    assert longer.pop("dense_length") and variants.VARIANTS["1600 keys, blocks of 64"] == longer


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
    assert keys("paper's ranking, means") == {"compressed": 512, "selected": 576, "window": 256}
    ones = [name for name in variants.VARIANTS if name.startswith("one softmax")]
    assert all(keys(name) == {"selected": 768} for name in ones)


@pytest.mark.parametrize("how", ["old", pytest.param("muon,short=0.5,average=1", marks=needs_muon)])
def test_a_stopped_run_continues_exactly(how, tmp_path, monkeypatch):
    """Stopped after every step and started again: the row of a run that was not."""
    names = ["--variants", "paper's ranking, means", "--recipe", how]
    whole = learning.main([*QUICK, *names, "--work", str(tmp_path / "whole")])

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


def test_processes_share_the_runs(tmp_path):
    """A run that another process has is left to it; a second call finds the rows, and appends
    none."""
    out, work = tmp_path / "rows.jsonl", tmp_path / "work"
    call = [*QUICK, "--work", str(work), "--out", str(out), "--variants", "dense", "window"]
    assert learning.main([*call, "--deadline", "1e-6"]) == []
    plan = learning.quick_plan(
        Namespace(lrs=None, seeds=None, compile=False), {"window": variants.VARIANTS["window"]},
        {"name": "README", **corpus.about(learning.QUICK_TEXT)}, recipe.RECIPES["old"],
    )  # fmt: skip
    (job,) = plan.jobs([])
    (work / job.key).mkdir(parents=True)
    with runs_pool.locked(work / job.key):
        (row,) = learning.main([*call, "--deadline", "3"])
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
    with pytest.raises(SystemExit, match="1 cases failed, the first: .*window .*no such thing"):
        learning.main(call)
    monkeypatch.undo()
    assert "bits" in learning.main(call)[0]


def test_order_of_the_jobs():
    """Learning rates of the first seed; then the other seeds and lengths with the best one."""
    names = ["dense", "window", "paper's ranking, means", "published form", "one softmax, logits"]
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


# recipes


@needs_muon
def test_recipes():
    """A name with changes, which rows tell; what is unknown is refused."""
    found = recipe.parsed("muon,warmup=5,qk_norm=0,depth=3,rope_theta=1e5")
    assert found.settings == recipe.RECIPES["muon"].settings | dict(
        recipe="muon,warmup=5,qk_norm=0,depth=3,rope_theta=1e5", warmup=5, qk_norm=False
    )
    plan = learning.Plan({"dense": variants.VARIANTS["dense"]}, {}, recipe=found)
    assert plan.shape == learning.SHAPE | dict(depth=3, rope_theta=1e5)
    spec = plan.jobs([])[0].spec
    assert (spec["optimizer"], spec["warmup"], spec["lr"]) == ("muon", 5, found.lrs[0])
    bad = {
        "sgd": "recipe must begin with one of old, muon, got 'sgd'",
        "old,optimizer=sgd": "optimizer must be one of adamw, muon, got 'sgd'",
        "old,warmup=x": "warmup of a recipe has another type, got 'warmup=x'",
        "old,short=2": "short must be from 0 to 1, got 2",
    }
    for text, message in bad.items():
        with pytest.raises(ValueError, match=message):
            recipe.parsed(text)
    with pytest.raises(ValueError, match="variant dense: .* argument 'width'"):
        learning.Plan(plan.variants, {}, recipe=recipe.parsed("old,width=3"))


def test_muon_needs_a_torch_that_has_it(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(ValueError, match="needs torch.optim.Muon of torch 2.9 or later"):
        recipe.parsed("muon,warmup=5")


def test_rates():
    """Linear up, constant, linear to 0; the cosine ends at a tenth."""
    cfg = Namespace(lr=2.0, warmup=10, steps=100, schedule="linear", decay=0.5)
    rates = [recipe.rate(cfg, step) for step in (1, 10, 50, 51, 100)]
    assert rates == pytest.approx([0.2, 2, 2, 2, 0.04])
    cosine = Namespace(**vars(cfg) | dict(schedule="cosine"))
    assert recipe.rate(cosine, 100) == pytest.approx(0.2)


@needs_muon
def test_what_an_optimizer_trains():
    """Muon the matrices of the layers, AdamW all others, each parameter once."""
    model = variants.build(SMALL["MLP over windows of 8"], SHAPE, seed=0)
    cfg = Namespace(optimizer="muon", lr=0.1, weight_decay=0.1, device="cpu")
    muon, others = recipe.build_optimizers(model, cfg)
    names = {id(p): name for name, p in model.named_parameters()}
    lists = [[names[id(p)] for g in o.param_groups for p in g["params"]] for o in (muon, others)]
    assert sorted(itertools.chain(*lists)) == sorted(names.values())
    assert {name.partition(".")[0] for name in lists[0]} == {"layers"}
    assert {"token_emb.weight", "to_logits.weight"} <= {*lists[1]}
    assert any("to_strategy_combine" in name for name in lists[1])


def test_the_average_is_what_is_tested(tmp_path):
    """Of one step it is the last weights."""
    call = [*QUICK, "--variants", "dense", "--lrs", "0.1", "--recipe"]
    first, last = learning.main(
        [
            *call,
            "old,average=1,qk_norm=1",
            "old,average=0.25,qk_norm=1,start=zero",
            "--work",
            str(tmp_path),
        ]
    )
    assert last["bits"] == last["bits_of_last_weights"]
    assert first["bits"] != first["bits_of_last_weights"]
    weights = torch.load(tmp_path / first["run"] / "weights.pt")
    assert {*weights} == {*variants.build(SMALL["dense"], SHAPE, 0).state_dict()} | {
        name for name in weights if name.startswith(("layers.2", "layers.3")) or "_norm." in name
    }


def row_of(seed, recipe_name, positions, text="a", **others):
    total = {"all": fmean_of(positions), "last_half": 1.0, "positions": positions}
    row = dict(kind="train", variant="dense", settings={}, seed=seed, T=4096, lr=0.1, seconds=2.0)
    row |= dict(steps=2, batch=1, shape={}, bits=total, data={"name": text, "sha256": "s"})
    row |= {} if recipe_name is None else dict(recipe=recipe_name)
    return row | dict(train_bytes=8192) | others


def fmean_of(positions):
    return sum(positions.values()) / len(positions)


def test_tables_keep_recipes_and_texts_apart():
    positions = {"0-256": 3.0, "256-512": 2.0, "512-1024": 1.4, "1024-2048": 1.0, "2048-4096": 0.5}
    rows = [row_of(0, None, dict(positions, **{"0-256": 9.0}))]
    rows += [row_of(seed, "muon", positions, text) for seed in (0, 1) for text in ("a", "b")]
    assert learning.reach(rows[1]) == pytest.approx(0.5 - (256 * 2 + 512 * 1.4) / 768)
    assert learning.reach(rows[1] | dict(T=2048)) is None
    assert {n: len(runs) for n, runs in learning.by_text(rows).items()} == {"a": 2, "b": 2}
    (variant,) = learning.by_length(learning.by_text(rows)["b"])[4096].values()
    assert [row["data"]["name"] for row in variant] == ["b", "b"]
    lines = learning.table_of_recipes(rows).splitlines()
    assert len(lines) == 5 and "| muon | 0.1 | 2 | 1.580 ± 0.000 | -1.100 ± 0.000 |" in lines[2]
    assert "| old | 0.1 | 1 |" in lines[3]


# associative recall and the needle: the task is what it says


def test_sequences():
    """A question's key has come once, with the value that follows; far enough, noise elsewhere."""
    task = recall.Task(pairs=5, noise=10, keys=8, values=6, least_distance=16)
    ids, asked, distance = task.draw(50, 128, np.random.default_rng(0))
    again = task.draw(50, 128, np.random.default_rng(0))
    assert all(torch.equal(a, b) for a, b in zip((ids, asked, distance), again))
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
    with pytest.raises(ValueError, match="T must be a multiple of 4 from 52 on, got 48"):
        task.draw(1, 48, np.random.default_rng(0))


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


def test_settings_of_every_variant():
    """They make models, and questions are beyond windows and local blocks."""
    found, sizes = recall.variants(), recall.LARGE
    plan = recall.plan_of(found, sizes, (0, 1, 2), recall.LR)
    assert len(plan([])) == len(found) * len(recall.LR)
    for settings in found.values():
        local = settings["num_local_blocks"] * settings["selection_block_size"]
        assert max(local, settings["sliding_window_size"]) < sizes.task.least_distance
    assert found["published form"]["compress_block_size"] == 8
    assert found["one softmax, max of 4, rotated"]["compress_block_size"] == 4
    assert len(set(map(str, found.values()))) == len(found)
    assert min(sizes.lengths + sizes.train_lengths) >= sizes.task.least_length


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
    assert learning.digits_found(Copies(), text, 3, cfg) == dict.fromkeys(
        ("0.1", "0.5", "0.9"), right
    )
    wrong = learning.digits_found(Copies(1), text, 3, cfg)
    assert all(found["digits"] == found["numbers"] == 0 < found["bits"] for found in wrong.values())
    for depth in learning.DEPTHS:
        row = learning.context(text, 400, depth, np.random.default_rng(0))
        at = bytes(row.tolist()).index(b"/* The number")
        assert len(row) == 400 and abs(at - depth * 320) < 40
    with pytest.raises(ValueError, match="T must be from 136 to the bytes of text=1100, got 100"):
        learning.digits_found(Copies(), text, 3, Namespace(seq_len=100))


# the text that models are trained on: the same of a directory and of an archive, nothing leaks


SIZES = corpus.Sizes(whole=30_000, held_out=9_000, file=2_000)


@pytest.fixture
def tree(tmp_path):
    """Sources in directories of three levels, and what is left out."""
    root = tmp_path / "linux-1"
    for index in range(40):
        folder = root / f"drivers/kind{index % 4}/maker{index // 4}/chip"
        folder.mkdir(parents=True)
        for name in ("b.c", "a.h"):
            (folder / name).write_text(f"/* {name} of {index} */\n" * 20)
        (folder / "sub").mkdir()
        (folder / "sub" / "c.rst").write_text(f"Chip {index}\n")
    folder = root / "drivers/kind0/maker0/chip"
    (folder / "copy.c").write_bytes((folder / "b.c").read_bytes())
    (folder / "binary.c").write_bytes(b"a\0b")
    (folder / "large.h").write_text("x" * 2_001)
    (folder / "program.py").write_text("pass\n")
    (folder / "link.c").symlink_to("b.c")
    return root


def files_in(text):
    return [part.partition(b"\n")[0].decode() for part in text.split(b"\0") if part]


def test_text_of_a_tree(tree, tmp_path):
    out = tmp_path / "text"
    row = corpus.build([tree], out, SIZES)
    content = out.read_bytes()
    assert len(content) == row["bytes"] <= SIZES.whole
    assert corpus.about(out) == {"bytes": row["bytes"], "sha256": row["sha256"]}
    train, held_out = (part.tobytes() for part in corpus.mapped(out))
    assert train + corpus.HELD_OUT + held_out == content
    assert len(train) == row["train_bytes"] and len(held_out) == row["held_out_bytes"]
    groups = [{corpus.group_of(name, 4) for name in files_in(text)} for text in (train, held_out)]
    assert groups[0] and groups[1] and not groups[0] & groups[1]
    assert groups[1] == set(row["held_out_groups"])
    for text in (train, held_out):
        names = files_in(text)
        assert names == sorted(names, key=lambda name: name.rpartition("/")[::2])
        assert not any(
            word in name for name in names for word in ("copy", "binary", "large", ".py")
        )
        assert not any("link" in name for name in names)
    name = files_in(train)[0]
    assert train.startswith(b"\0" + name.encode() + b"\n" + (tree / name).read_bytes() + b"\0")


def test_what_cannot_be_read(tree, tmp_path):
    whole = tmp_path / "bytes"  # any file has held-out text
    whole.write_bytes(bytes(range(1, 101)))
    assert [len(part) for part in corpus.mapped(whole)] == [95, 5]
    out = tmp_path / "text"
    for source in (tmp_path / "nothing", whole):
        with pytest.raises(ValueError, match="source must be a directory, got .*; unpack"):
            corpus.build([source], out, SIZES)
    with pytest.raises(ValueError, match="make no training text"):
        corpus.build([tree / "drivers/kind1/maker1"], out, SIZES)
    with pytest.raises(ValueError, match="whole must be at least 6, got 5"):
        corpus.Sizes(whole=5, held_out=5)
    with pytest.raises(SystemExit, match="source must be a directory"):
        corpus.main([str(tmp_path / "nothing"), "--text", str(out)])
    assert not out.exists()


def test_text_of_packages(tmp_path):
    """Several packages of two kinds: pages without markup, dictionaries in pieces."""
    page = b"<head><title>T</title></head><body><nav>N</nav><p>A &lt; %d<br>b <b>c</b></p></body>"
    files = {f"doc/{i}.html": page % i for i in range(30)}
    files |= {"doc/same.html": page % 7, "doc/x.html.gz": gzip.compress(page % 99)}
    files |= {"words.dict.dz": gzip.compress(bytes(range(33, 126)) * 5), "doc/left.png": b"out"}
    sources = [tmp_path / "a_1.deb", tmp_path / "b-1.whl"]
    packages = files, {f"b/{i}.pod": b"=head1 %d\n" % i for i in range(9)}
    for source, contents in zip(sources, packages):
        for name, data in contents.items():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(data)
    out = tmp_path / "text"
    sizes = corpus.Sizes(whole=20_000, held_out=600, file=200, depth=0)
    row = corpus.build(sources, out, sizes, (".html", ".pod", ".dict"))
    assert row["source"] == "a_1.deb b-1.whl"
    assert row["train_files"] + row["held_out_files"] == 31 + 3 + 9 and row["held_out_files"] > 3
    parts = dict(p.partition(b"\n")[::2] for p in out.read_bytes().split(b"\0") if p)
    assert parts[b"a_1.deb/doc/5.html"] == b"A < 5\nb c\n"
    assert parts[b"a_1.deb/doc/x.html"] == b"A < 99\nb c\n"
    assert parts[b"b-1.whl/b/3.pod"] == b"=head1 3\n"
    pieces = [parts[b"a_1.deb/words.dict.000%d" % i] for i in range(3)]
    assert b"".join(pieces) == bytes(range(33, 126)) * 5


def test_command(tree, tmp_path, capsys):
    text, out = tmp_path / "text", tmp_path / "rows.jsonl"
    sizes = ["--bytes", "30000", "--held-out-bytes", "9000", "--file-bytes", "2000"]
    (row,) = corpus.main([str(tree), "--text", str(text), *sizes, "--out", str(out)])
    assert row["sha256"] in capsys.readouterr().out
    assert common.read_rows(out)[0]["sha256"] == row["sha256"]
    assert {path.name for path in tmp_path.iterdir()} == {
        "linux-1", "text", "text.json", "rows.jsonl",
    }  # fmt: skip
