"""benchmarks.distributed in two processes over gloo, and its intervals."""

import pytest
import torch

from benchmarks import common

if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from benchmarks import clock, distributed, scaling
from native_sparse_attention import Transformer
from tests.helpers.processes import printed, torchrun


def test_quick_form(tmp_path):
    script, out = tmp_path / "run.py", tmp_path / "rows.jsonl"
    # collecting garbage between rows takes as long as many of them
    without_collecting = "common.release = lambda: None"
    program = "from benchmarks import common, distributed", without_collecting, "distributed.main()"
    script.write_text("\n".join(program))
    options = "--quick", "--device", "cpu", "--out", out
    printed(torchrun(2, script, *options, imports=["benchmarks.distributed"]))
    rows = common.read_rows(out)
    assert [(row["subject"], row["mode"]) for row in rows] == [
        *[("model", mode) for mode in distributed.MODES] * 2,
        *[("layer", mode) for mode in ("one", "cp")] * 3,
    ]
    assert not any("failed" in row for row in rows)
    assert all(row["error_share"] < 1 for row in rows if row["subject"] == "layer")
    assert all(row["tokens_per_s"] > 0 for row in rows if row["subject"] == "model")
    check_sent_bytes(rows)


def check_sent_bytes(rows):
    """The processes send what `scaling` counts."""
    sizes = {**distributed.MODEL, **distributed.SMALL}
    for row in rows:
        T, dp, cp = scaling.sizes_of(row) if row["mode"] != "one" else (row["T"], 1, 1)
        settings = distributed.settings_of(row["form"], T)
        net = Transformer(**sizes, use_sparse_attn=True, sparse_attn_kwargs=settings)
        if row["subject"] == "model":
            expected = scaling.sent_bytes(net, T, dp, cp)
        else:  # both passes of one layer, without recomputation
            keys = scaling.layer_bytes(net.layers[0][0].config, T // cp, cp)
            expected = dict(row["sent_bytes"]) | {"keys": keys, "gradients of keys": keys}
        assert row["sent_bytes"] == expected
        assert any(expected.values()) == (row["mode"] != "one")


def test_rates_are_those_of_measured_rows():
    rows = clock.last_run(common.read_rows(clock.BENCHMARK.results), "transformer")
    rows = [r for r in rows if r["form"] == distributed.FORMS[0] and r["T"] >= 2**14]
    assert rows
    for row in rows:
        settings = distributed.settings_of(row["form"], row["T"])
        with torch.device("meta"):
            net = Transformer(**clock.MODEL, use_sparse_attn=True, sparse_attn_kwargs=settings)
        forward, backward, logits = scaling.compute_seconds(net, row["T"])
        prefill = len(net.layers) * forward + logits / 3
        step = len(net.layers) * (forward + backward) + logits
        assert prefill * 1e3 == pytest.approx(row["prefill"], rel=0.15)
        assert step * 1e3 == pytest.approx(row["training step"], rel=0.15)


def test_simulated_schedule():
    """Weights travel beside computation, keys do not."""
    T, nvlink = 2**16, 45e9
    net = scaling.model_of(T)

    def exposed(dp, cp, nvlink=nvlink):
        seconds, compute = scaling.simulate(net, T, dp, cp, nvlink=nvlink)
        return seconds - compute, scaling.sent_bytes(net, T, dp, cp)

    assert exposed(1, 1)[0] == pytest.approx(0)
    seconds, sent = exposed(2, 1)
    assert 0 < seconds < 0.1 * sum(sent.values()) / nvlink
    seconds, sent = exposed(1, 2)
    keys = sent["keys"] + sent["gradients of keys"]
    assert keys / nvlink < seconds < sum(sent.values()) / nvlink
    # over a slow link it is busy throughout
    sent, seconds = exposed(2, 1)[1], scaling.simulate(net, T, 2, 1, nvlink=1e9)[0]
    assert seconds == pytest.approx(sum(sent.values()) / 1e9, 0.1)


def test_covered_intervals():
    spans = [(9, 22), (2, 4), (3, 5), (26, 26)]
    assert distributed.covered(spans) == 3 + 13
    assert distributed.covered([*spans, (20, 30), (0, 10)]) == 30
    assert distributed.covered([]) == 0
