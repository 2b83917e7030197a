"""The benchmarks on a CPU: they run end to end, refuse what is wrong, count what is there, and draw
the page that is committed."""

import importlib
import json

import pytest
import torch

from benchmarks import attention, common, oracle, performance, problem
from benchmarks.providers import (
    SHORT_WINDOWS,
    Dense,
    Ours,
    OursLarge,
    OursProbs,
    OursSelect,
    OursSelected,
    OursWindow,
)
from benchmarks.providers import providers as known_providers
from native_sparse_attention import blocks
from tests.helpers import oracles

pytestmark = pytest.mark.usefixtures("nothing_to_release")

CPU = torch.device("cpu")
SMALL = attention.tiny(200, 4, 2)


def verify(provider, setting=SMALL, spot=False):
    x = attention.prepared(provider, setting, CPU)
    rows = attention.spot_rows(setting.T, CPU) if spot else None
    return attention.verify(provider, x, setting, rows)


# end to end


def test_quick_form(tmp_path, capsys):
    path = tmp_path / "results" / "rows.jsonl"
    options = ["--quick", "--parts", "--agreement", "4", "--device", "cpu", "--seconds", "1e-4"]
    rows = attention.main([*options, "--out", str(path)])
    assert common.read_rows(path) == json.loads(json.dumps(rows))
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
    timed = {(row["provider"], row["part"], row["pass"]) for row in rows if "failed" not in row}
    for part in ("whole", "compressed", "selected", "window"):
        assert {("ours", part, "forward"), ("ours", part, "backward")} <= timed
    assert {("ours-probs", "whole", "backward"), ("ours-probs", "select", "forward")} <= timed
    assert ("dense-sdpa", "whole", "forward") in timed
    assert {row["alike"] for row in rows if "alike" in row} == {1, 4}
    assert all(("speedup_over_independent" in row) == (row.get("alike") == 4) for row in rows)
    assert {row["selection_stride"] for row in rows if row["provider"] == "ours"} == {1, 4}
    for row in rows:
        assert row["T"] and row["gpu"] and row["torch"] and row["date"]
        if "failed" in row:
            assert "cuda" in row["failed"] and not row["provider"].startswith("ours")
        else:
            assert 0 < row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"]
            assert row["part"] == "select" or row["error_share"] <= 1


def test_a_wrong_provider_is_not_timed(tmp_path, monkeypatch):
    class Wrong(OursWindow):
        def call(self, x, setting):
            return super().call(x, setting) * 1.001

    wrong = {**known_providers(), "ours": [Wrong()]}
    monkeypatch.setattr(attention, "providers", lambda: wrong)
    path = tmp_path / "rows.jsonl"
    with pytest.raises(SystemExit, match="ours not timed in 1 cases"):
        attention.main(["--quick", "--providers", "ours", "--device", "cpu", "--out", str(path)])
    (row,) = common.read_rows(path)
    assert row["failed"].startswith("wrong at T=96: out errs by") and "p50_ms" not in row


def test_speedup_is_over_the_baseline_of_the_run(monkeypatch):
    plan = attention.Plan((), (), ())
    run = attention.Run(plan, CPU)
    dense = Dense("dense-cudnn", None)
    time = {"pass": "forward", "tflops": 1.0, "peak_mib": None}
    run.write(dense, SMALL, {**time, "p50_ms": 6.0})
    run.write(Ours(), SMALL, {**time, "p50_ms": 4.0})
    run.write(OursWindow(), SMALL, {**time, "p50_ms": 1.0})
    assert [row.get("speedup_over_cudnn") for row in run.rows] == [1.0, 1.5, None]


# the oracle


@pytest.mark.slow(one_of=3)
@pytest.mark.parametrize("stride", [1, 8])
@pytest.mark.parametrize("T", [5, 17, 100])
def test_oracle_accepts_what_is_right(T, stride):
    setting = attention.tiny(T, 6, 2)
    setting = type(setting)(**{**vars(setting), "stride": stride})
    ours = Ours(), OursProbs(), OursLarge(), OursSelected(), OursSelected(4)
    for provider in (*ours, Dense("sdpa", None)):
        for spot in (False, True):
            assert verify(provider, setting, spot) <= 1


class ShortWindow(OursWindow):
    def branches(self, setting):
        return [oracle.window(setting.w + 1)]


class DroppedBlock(OursSelected):
    def call(self, x, setting):
        few = {**x, "indices": x["indices"].clone()}
        few["indices"][:, 90:, 0, 0] = -1
        return super().call(few, setting)


class OtherRule(OursSelect):
    def indices(self, x, setting):
        return OursProbs().indices({**x, **problem.draw(setting, Ours.names, CPU)}, setting)


class Twice(OursSelect):
    def indices(self, x, setting):
        chosen = self.call(x, setting)
        chosen[:, -1, :, 1] = chosen[:, -1, :, 0]
        return chosen


class Forced(OursSelect):
    def indices(self, x, setting):
        chosen = self.call(x, setting)
        chosen[:, -1, :, 0] = 0
        return chosen


class TooFew(OursSelect):
    def indices(self, x, setting):
        chosen = self.call(x, setting)
        chosen[:, -1, :, 2] = -1
        return chosen


WRONG = [(ShortWindow(), "out"), (DroppedBlock(), "out"), (OtherRule(), "higher score")]
WRONG += [(Twice(), "selected twice"), (Forced(), "forced"), (TooFew(), "fewer blocks")]


@pytest.mark.parametrize("spot", [False, True])
@pytest.mark.parametrize("provider, told", WRONG, ids=lambda v: type(v).__name__)
def test_oracle_refuses_what_is_wrong(provider, told, spot):
    with pytest.raises(oracle.WrongResult, match=told):
        verify(provider, spot=spot)


@pytest.mark.parametrize("broken", ["dk", "dv", "dck", "dcv"])
def test_laws_notice_a_key_that_gets_no_gradient(broken):
    provider, setting = Ours(), SMALL
    x = attention.prepared(provider, setting, CPU)
    grads = attention.backward(provider, x, provider.call(x, setting))
    named = {f"d{name}": grad.clone() for name, grad in zip(provider.names, grads)}
    inputs = {name: x[name].detach() for name in (*provider.names, "d_out")}
    oracle.check_laws(provider.branches(setting), inputs, named)
    named[broken][0, 5, 1] = 0
    with pytest.raises(oracle.WrongResult):
        oracle.check_laws(provider.branches(setting), inputs, named)


def test_definition_is_that_of_the_tests():
    """Written twice, sharing nothing."""
    c = attention.tiny(40, 4, 2)
    x = problem.draw(c, ("q", "k", "v", "ck", "cv", "d_out"), CPU)
    x = {name: t.double() for name, t in x.items()}
    indices = problem.random_indices(c, 1, CPU)
    every = torch.arange(c.T)

    def ours(branch):
        return oracle.compute([branch], x, ("q",), every, indices, torch.float64)["out"][None]

    q, k, v = x["q"], x["k"], x["v"]
    expected = oracles.compressed(q, x["ck"], x["cv"], None, None, c.d, True, 0)[0]
    torch.testing.assert_close(ours(oracle.behind(c.d)), expected)
    expected = oracles.window(q, k, v, c.w, True, 0)[0]
    torch.testing.assert_close(ours(oracle.window(c.w)), expected)
    expected = oracles.selected(q, k, v, indices, c.s, True, 0, c.initial, c.local)[0]
    torch.testing.assert_close(ours(oracle.chosen(c.s, c.n, c.initial, c.local)), expected)


# the problem


def test_branches_count_the_keys_that_they_show():
    c = attention.tiny(333, 4, 2)
    i = torch.arange(c.T)
    indices = problem.random_indices(c, 1, CPU)[0, :, 0]
    for branch, keys in (
        (oracle.behind(c.d), c.T // c.d),
        (oracle.window(c.w), c.T),
        (oracle.window(None), c.T),
        (oracle.chosen(c.s, c.n, c.initial, c.local), c.T),
    ):
        seen = branch.seen(i[:, None], torch.arange(keys), indices)
        assert torch.equal(seen.sum(1), branch.count(i))


def test_operations_of_dense_attention():
    c = attention.tiny(64, 4, 2)
    assert Dense("", None).flops(c) == 4 * 16 * 4 * 64 * 65 // 2
    # one product with every second window's leader, for 2 KV heads
    pairs = sum(i // c.d for i in range(64))
    assert problem.scoring_flops(c, "logits") == 2 * 16 * 2 * pairs
    assert problem.scoring_flops(c, "probs") == 2 * 16 * 4 * pairs


def test_pooled_windows():
    x = torch.randn(1, 23, 2, 3)
    means = problem.pooled(x, 8, 4)
    assert means.shape == (1, 5, 2, 3)
    for j in range(5):
        start, end = max(0, blocks.window_start(j, 8, 4)), blocks.window_end(j, 4)
        torch.testing.assert_close(means[:, j], x[:, start:end].sum(1) / 8)


@pytest.mark.parametrize("alike", [1, 4])
def test_random_selections(alike):
    c = attention.tiny(333, 4, 2)
    indices = problem.random_indices(c, alike, CPU)
    assert indices.shape == (1, c.T, c.K, c.n) and indices.dtype == torch.int32
    for t in range(c.T):
        own = t // c.s
        for chosen in indices[0, t].tolist():
            real = [block for block in chosen if block >= 0]
            assert len(set(real)) == len(real) == min(c.n, max(0, own - c.local + 1 - c.initial))
            assert all(c.initial <= block <= own - c.local for block in real)
    groups = indices[0, : c.T // 4 * 4].unflatten(0, (-1, 4))
    assert (groups == groups[:, :1]).all().item() == (alike == 4)
    with pytest.raises(ValueError, match="alike must divide"):
        problem.random_indices(c, 3, CPU)


# rows, tables, plot


def made_up(provider, T, ms, speedup=None, **fields):
    row = dict(provider=provider, part="whole", T=T, H=64, K=4, selection_stride=1, gpu="G")
    row |= dict(driver="1", torch="2", triton="3", commit="c", date="2026-01-01T00:00:00Z")
    row |= dict(p50_ms=ms, peak_mib=100.0, **fields)
    row |= {} if speedup is None else {"speedup_over_cudnn": speedup}
    return [{**row, "pass": name} for name in performance.PASSES]


def test_tables_of_a_run_of_their_own():
    """One softmax (each pair of heads apart) and peers: of the newest run, on whatever GPU; the
    latest row of each pass."""
    one_softmax = performance.TABLES["one_softmax"]
    old = made_up("one-softmax", 8192, 9.0, 9.0, D=128)
    run = made_up("dense-cudnn", 8192, 3.0, 1.0, D=128) + made_up("ours", 8192, 1.0, 2.0, D=128)
    run += made_up("one-softmax", 8192, 2.0, 1.5, D=128)
    run += made_up("flash_nsa", 8192, 5.0, D=128, times_ours=5.0)
    run += made_up("flash_nsa", 8192, 4.0, D=128, times_ours=4.0)
    refused = made_up("fsa", 8192, 1.0, D=128)[:1]
    del refused[0]["p50_ms"], refused[0]["pass"]
    refused[0] |= dict(part="selected", refused="takes other heads")
    run = [{**row, "gpu": "H", "commit": "d"} for row in run + refused]
    text = one_softmax(old + run)
    assert "| 64/4 | one-softmax | 1.50 / 1.50; 1.00 |" in text and "9.00" not in text
    assert "| 64/4 | *target* | 1.9 / 2 |" in text and text.endswith("H, torch 2, triton 3; d.")
    narrow = [{**row, "H": 9, "K": 3, "D": 64, "commit": "e"} for row in run[2:] + run[:4]]
    text = one_softmax(old + run + narrow)
    assert "| 64/4 | one-softmax | 1.50 / 1.50; 1.00 |" in text and text.endswith("3; d, e.")
    assert "| 9/3, D=64 | one-softmax | 1.50 / 1.50; 1.00 |" in text
    broken = dict(run[4], failed="why", selection_stride=4)
    del broken["pass"], broken["p50_ms"]
    text = one_softmax([*old, *run, broken])
    assert "| 64/4 | one-softmax, stride 4 | failed |" in text
    text = performance.peers(old + run)
    assert "| whole | flash_nsa | 4 (4.00) / 4 (4.00) |" in text
    assert "| selected | fsa | - |" in text
    assert "* fsa, selected, 64/4: takes other heads" in text
    assert performance.peers(old) == common.NO_ROWS


def test_short_windows_have_the_sizes_of_their_preset():
    (provider,) = known_providers()[SHORT_WINDOWS]
    c = provider.sized(problem.Setting(8192))
    assert (c.l, c.d, c.s, c.n, c.initial, c.local, c.w) == (8, 4, 64, 6, 1, 2, 255)
    assert provider.sized(SMALL) == SMALL
    rows = made_up(provider.name, 8192, 1.0, 1.25, D=128)
    rows += made_up("one-softmax", 8192, 9.0, 9.0, D=128)
    text = performance.TABLES["short_windows"](rows)
    assert "| 64/4 | ours-short-windows | 1.25 / 1.25 |" in text and "9.00" not in text


def test_tables():
    rows = made_up("dense-cudnn", 8192, 2.0, 1.0) + made_up("ours", 8192, 1.0, 1.3)
    other = [{**row, "gpu": "another", "p50_ms": 77.0} for row in rows]
    drawn = {name: table(other[:-1] + rows) for name, table in performance.TABLES.items()}
    text = drawn["speedups"]
    assert "| ours | 1.30 / 1.30 |" in text and "| *target* | 1.20 / 1.40 |" in text
    assert "| *best published* | 0.79 / 0.97 |" in text and "77" not in drawn["wholes"]
    assert "| ours | 100 (1.00) |" in drawn["memory"]
    assert drawn["parts"] == drawn["agreement"] == common.NO_ROWS
    one, four = {"part": "selected", "alike": 1}, {"part": "selected", "alike": 4}
    alike = made_up("ours", 8192, 1.0, **one)
    alike += made_up("ours", 8192, 0.4, speedup_over_independent=2.5, **four)
    text = performance.TABLES["agreement"](alike)
    assert "| selected, ours, 4 alike | 0.40 / 0.40 |" in text and text.count("speed-up") == 1
    assert "| selected, ours, 4 alike: speed-up | 2.50 / 2.50 |" in text
    # the latest row counts, a failure too
    failed = {**rows[2], "failed": "out of memory"}
    for name in ("pass", "p50_ms", "speedup_over_cudnn"):
        del failed[name]
    speedups = performance.TABLES["speedups"]
    assert "1.30" not in speedups([*rows, failed])
    assert "1.30 / 1.30" in speedups([*rows, failed, *rows])


# tiles


def test_tiles_stand_in_and_go_again():
    launch = pytest.importorskip("native_sparse_attention.kernels.common.launch")

    def tiles():
        return [
            launch.flash_tile("dq", True, 64, 2, torch.bfloat16),
            launch.key_major_tile("backward", 64, 2, torch.float32),
            launch.query_major_tile("dq", 64, 2, torch.bfloat16),
            launch.topk_tile("probs", 64, 2, 16, torch.bfloat16),
        ]

    before, others = tiles(), [launch.TileConfig(256, 16, 1, 1)] * 4
    # rows of a gather are what they are
    gathered = launch.TileConfig(16, 16, 1, 1)
    others[3] = launch.TopkTileConfig(256, 16, 1, 1, 1, 1)
    for index, kernel in enumerate(("dq", "key_major.backward", "query_major.dq", "ranking.probs")):
        other = others[index]
        with launch.using({kernel: other}):
            after = tiles()
        changed = [now != then for now, then in zip(after, before)]
        assert changed == [n == index for n in range(4)]
        assert after[index] == (gathered if index == 2 else other)
        with pytest.raises(KeyError), launch.using({kernel: other}):
            raise KeyError
        assert tiles() == before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
def test_tuner(tmp_path, capsys):
    pytest.importorskip("triton")
    tune = importlib.import_module("benchmarks.tune")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = ["--lengths", "24", "--heads", "2/1", "--seconds", "1e-4", "--device", device]
    options += ["--kernels", "window.forward", "query_major.dq", "--tiles", "16,16,4,1", "16,7,4,1"]
    options += ["--operations", "window"]
    try:
        rows = tune.main([*options, "--out", str(tmp_path / "tune.jsonl")])
    except Exception as error:
        if "0-dimensional arrays" not in str(error):
            raise
        pytest.skip(f"Triton's interpreter and this numpy do not go together: {error}")
    assert [row["kernel"] for row in rows] == ["window.forward"] * 3
    assert [row["tile"] for row in rows] == ["default", [16, 16, 4, 1], [16, 7, 4, 1]]
    assert "failed" in rows[2] and rows[1]["p50_ms"] > 0 and rows[1]["over_default"] > 0
    assert '"window.forward": ' in capsys.readouterr().out.splitlines()[-1]


def test_winning_tiles():
    tune = pytest.importorskip("benchmarks.tune")
    case = dict(gpu="GPU", kernel="dq", D=128, G=4, s=64, dtype="bfloat16", H=32)
    case |= {"pass": "backward", "selection_stride": 1}

    def row(part, T, tile, over):
        return {**case, "part": part, "T": T, "tile": tile, "over_default": over}

    rows = [row(part, 8192, "default", 1.0) for part in ("window", "selected")]
    rows += [row(part, 8192, [64, 64, 4, 2], 0.9) for part in ("window", "selected")]
    # faster, but it ran in one of the two; slower on the whole; and one that failed
    rows += [row("window", 8192, [64, 64, 4, 1], 0.5)]
    rows += [row("window", 8192, [64, 32, 4, 1], 0.5), row("selected", 8192, [64, 32, 4, 1], 2.0)]
    rows += [{**row("window", 8192, [128, 64, 4, 1], 0.1), "failed": "wrong"}]
    (told,) = tune.winners(rows)
    assert told.startswith(
        '"dq": TileConfig(64, 64, 4, 2),  # 0.900 of the time; width 128, G=4, s=64'
    )
