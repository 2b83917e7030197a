"""What is timed of attention: the oracle refuses what is wrong, and counts are right."""

import importlib

import pytest
import torch

from benchmarks import attention, oracle, problem
from benchmarks.providers import Dense, Ours, OursSelect, OursSelected, OursWindow
from benchmarks.providers import providers as known_providers

pytestmark = pytest.mark.usefixtures("nothing_to_release")

CPU = torch.device("cpu")
SMALL = attention.tiny(200, 4, 2)


def verify(provider, setting=SMALL, spot=False):
    x = attention.prepared(provider, setting, CPU)
    rows = attention.spot_rows(setting.T, CPU) if spot else None
    return attention.verify(provider, x, setting, rows)


def test_a_wrong_provider_is_not_timed(monkeypatch, capsys):
    class Wrong(OursWindow):
        def call(self, x, setting):
            return super().call(x, setting) * 1.001

    wrong = {**known_providers(), "ours": [Wrong()]}
    monkeypatch.setattr(attention, "providers", lambda: wrong)
    with pytest.raises(SystemExit, match="1 cases failed, the first: ours .*wrong: out errs by"):
        attention.main(["--quick", "--providers", "ours", "--device", "cpu"])


def test_ratios():
    """Over dense cuDNN, over ours of the same part, over independent neighbours, of the run."""
    times = {}
    case = {"T": 8, "H": 4, "K": 2, "pass": "forward", "part": "whole"}

    def ratios(provider, ms, **fields):
        return attention.ratios({**case, "provider": provider, "p50_ms": ms, **fields}, times)

    assert ratios("dense-cudnn", 6.0) == {"speedup_over_cudnn": 1.0}
    assert ratios("ours", 4.0) == {"speedup_over_cudnn": 1.5}
    assert ratios("fla", 8.0) == {"speedup_over_cudnn": 0.75, "times_ours": 2.0}
    assert ratios("ours", 1.0, part="window") == {}
    assert ratios("ours", 4.0, part="selected", alike=1) == {}
    assert ratios("ours", 2.0, part="selected", alike=4) == {"speedup_over_independent": 2.0}
    assert attention.ratios({"failed": "why"}, times) == {}


# the oracle


@pytest.mark.slow(one_of=3)
@pytest.mark.parametrize("stride", [1, 8])
@pytest.mark.parametrize("T", [5, 17, 100])
def test_oracle_accepts_what_is_right(T, stride):
    setting = attention.tiny(T, 6, 2)
    setting = type(setting)(**{**vars(setting), "stride": stride})
    ours = Ours(), Ours(importance="probs"), Ours(scale=4.0), OursSelected(), OursSelected(4)
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
        inputs = {**x, **problem.draw(setting, Ours.names, CPU)}
        return Ours(importance="probs").indices(inputs, setting)


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
