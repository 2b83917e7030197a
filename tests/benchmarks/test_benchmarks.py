"""What is timed: oracles refuse what is wrong, and counts are right."""

import dataclasses
import re

import pytest
import torch

from benchmarks import against, attention, clock, common, decode, oracle
from benchmarks.oracle import WrongResult
from benchmarks.providers import Ours
from benchmarks.providers import providers as known_providers
from native_sparse_attention.compress import MeanPool

pytestmark = pytest.mark.usefixtures("nothing_to_release")

CPU = torch.device("cpu")
SMALL = attention.tiny(200, 4, 2)


def verify(provider, setting=SMALL, spot=False):
    x = attention.prepared(provider, setting, CPU)
    rows = attention.spot_rows(setting.T, CPU) if spot else None
    return attention.verify(provider, x, setting, rows)


def test_a_wrong_provider_is_not_timed(monkeypatch, capsys):
    class Wrong(Ours):
        def call(self, x, setting):
            return super().call(x, setting) * 1.001

    wrong = {**known_providers(), "ours": Wrong()}
    monkeypatch.setattr(attention, "providers", lambda: wrong)
    with pytest.raises(SystemExit, match="2 cases failed, the first: ours .*wrong: out errs by"):
        attention.main(["--quick", "--providers", "ours", "--device", "cpu"])


def test_ratios():
    """Over dense cuDNN, and over ours, of the run."""
    times = {}
    case = {"T": 8, "H": 4, "K": 2, "pass": "forward", "part": "whole"}

    def ratios(provider, ms, **fields):
        return attention.ratios({**case, "provider": provider, "p50_ms": ms, **fields}, times)

    assert ratios("dense-cudnn", 6.0) == {"speedup_over_cudnn": 1.0}
    assert ratios("ours", 4.0) == {"speedup_over_cudnn": 1.5}
    assert ratios("fla", 8.0) == {"speedup_over_cudnn": 0.75, "times_ours": 2.0}
    assert attention.ratios({"failed": "why"}, times) == {}


class ShortWindow(Ours):
    def branches(self, setting):
        return [*super().branches(setting)[:2], oracle.window(setting.w + 1, gate=2)]


class DroppedBlock(Ours):
    def call(self, x, setting):
        return super().call(x, dataclasses.replace(setting, n=setting.n - 1))


class OtherRule(Ours):
    def indices(self, x, setting):
        return Ours(importance="probs").indices(x, setting)


class Changed(Ours):
    """One slot of the last query holds another block, or that of the first slot."""

    def __init__(self, slot, block=None):
        super().__init__()
        self.slot, self.block = slot, block

    def indices(self, x, setting):
        chosen = super().indices(x, setting)
        chosen[:, -1, :, self.slot] = chosen[:, -1, :, 0] if self.block is None else self.block
        return chosen


WRONG = [(ShortWindow(), "out"), (DroppedBlock(), "out"), (OtherRule(), "higher score")]
WRONG += [(Changed(1), "selected twice"), (Changed(0, 0), "forced")]
WRONG += [(Changed(2, -1), "fewer blocks")]


@pytest.mark.parametrize("spot", [False, True])
@pytest.mark.parametrize("provider, told", WRONG, ids=lambda v: type(v).__name__)
def test_oracle_refuses_what_is_wrong(provider, told, spot):
    assert verify(Ours(), spot=spot) <= 1
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


STEP = decode.Step(attention.tiny(320, 4, 2), B=2, T=2)


@pytest.mark.parametrize("change", ["scaled", "other blocks", "one block less", "a token late"])
def test_wrong_results_are_not_timed(monkeypatch, change):
    right = decode.decode_attention

    def wrong(q, **settings):
        if change == "other blocks":
            settings["compress_block_size"] = 4
            settings["importance"] = "probs"
        if change == "one block less":
            settings["num_selected_blocks"] -= 1
        if change == "a token late":
            settings["lengths"] = settings["lengths"] - 1
        return right(q, **settings) * (1.001 if change == "scaled" else 1)

    monkeypatch.setattr(decode, "decode_attention", wrong)
    with pytest.raises(WrongResult):
        decode.check(decode.Ours("ours", "logits"), STEP, CPU)
    with pytest.raises(SystemExit, match="1 cases failed, the first: ours .* wrong"):
        decode.main(["--quick", "--device", "cpu", "--providers", "ours"])


def test_wrong_dense_attention_is_not_timed():
    class Unmasked(decode.Dense):
        def prepare(self, x, step):
            super().prepare(x, step)
            x["mask"] = torch.zeros_like(x["mask"])

    decode.check(decode.PROVIDERS[0], STEP, CPU)
    with pytest.raises(WrongResult, match="out errs by"):
        decode.check(Unmasked("wrong"), STEP, CPU)


def test_a_wrong_layer_is_not_timed(monkeypatch):
    make = clock.make

    def wrong(*args):
        net = make(*args)
        net.register_forward_hook(lambda net, _, out: out * (1 + 0.1 * (net.backend == "auto")))
        return net

    monkeypatch.setattr(clock, "make", wrong)
    options = ["--subjects", "layer, 32/8", "--forms", "one softmax"]
    with pytest.raises(
        SystemExit, match="1 cases failed, the first: layer, 32/8 .*wrong: out errs"
    ):
        clock.main(["--quick", "--device", "cpu", *options])


def test_wrong_attention_is_not_timed(monkeypatch):
    """A step of decoding that misses one value; a forward that loses a little."""
    pytest.importorskip("transformers", reason="needs the extra hf")
    from benchmarks import generation
    from native_sparse_attention.hf import attention as hf_attention

    network = generation.network_of("tiny", None, CPU, torch.float32)
    small = generation.checked_network(network)
    forms = {form.name: form for form in generation.forms_of((16,), 32, 32)}
    for name in ("max of 16", "converted, 16", "means of 16"):
        assert generation.check(forms[name], small) < 1e-4
    form = forms["max of 16"]
    right = hf_attention.branches.attend

    def one_value_less(call, *rest):
        if call.q.shape[1] == 1:
            call = call.but(v=call.v.index_fill(1, torch.tensor([1]), 0))
        return right(call, *rest)

    def scaled(call, *rest):
        out, block_indices = right(call, *rest)
        return 0.9 * out, block_indices

    for wrong in (one_value_less, scaled):
        monkeypatch.setattr(hf_attention.branches, "attend", wrong)
        with pytest.raises(WrongResult, match="logits with all blocks are .* off SDPA's"):
            generation.check(form, small)
    plan = generation.Plan("tiny", (form,), (8,), (1,))
    recorder = common.Recorder(None, CPU, ("form",))
    generation.measure_all(network, plan, recorder)
    (row,) = recorder.rows
    assert row["form"] == "max of 16" and row["failed"].startswith("wrong: logits")


@pytest.mark.slow
def test_a_checkout_against_itself(capsys):
    options = ["--quick", "--device", "cpu", "--rounds", "1", str(common.ROOT), "decode"]
    rows = against.main([*options, "--seconds", "0.01", "--providers", "dense-cudnn", "ours"])
    assert [row["case"] for row in rows] == [
        "dense-cudnn, 3, 320, 1, 4, 2: p50", "ours, 3, 320, 1, 4, 2: p50",
    ]  # fmt: skip
    for row in rows:
        assert row["times_other"] == pytest.approx(row["ms"] / row["other_ms"], abs=1e-3)
        assert min(row["ms"], row["other_ms"]) > 0 and row["other_commit"]
    assert "| case | this, ms | other, ms | this / other |" in capsys.readouterr().out


def test_settings_of_whole_models():
    """docs/performance.md names those that `clock` times."""
    text = re.sub(r"\s+", " ", clock.PAGE.read_text("utf-8"))
    told = re.findall(r'`(?:NSAConfig\.)?preset\("([a-z-]+)", length(?:, ([^)]*))?\)`', text)
    found = {name: dict(re.findall(r'(\w+)="(\w+)"', more)) for name, more in told}
    (one, nothing), (three, changes) = (clock.FORMS[n] for n in ("one softmax", "three branches"))
    assert found[one] == nothing == {}
    assert isinstance(changes["compress_mlp"], MeanPool) and "with `MeanPool`" in text
    assert found[three] == {n: v for n, v in changes.items() if n != "compress_mlp"}
