"""The benchmark of `generate` of transformers: runs, refuses what is wrong, draws its page."""

import json

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf")

from benchmarks import common, generation
from benchmarks.generation import Form
from benchmarks.oracle import WrongResult
from native_sparse_attention.hf import attention

pytestmark = pytest.mark.usefixtures("nothing_to_release")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def network():
    return generation.network_of("tiny", None, CPU, torch.float32)


@pytest.mark.slow
def test_quick_form(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = generation.main(["--quick", "--device", "cpu", "--out", str(path)])
    assert common.read_rows(path) == json.loads(json.dumps(rows))
    forms = ["sdpa", "max of 16", "means of 16", "max of 16 by each head", "converted, 16"]
    forms += ["defaults", "converted, defaults"]
    assert [row["form"] for row in rows] == forms
    for row in rows:
        assert row["B"] == 2 and row["T"] == 256 and row["all_layers"] == row["layers"] == 2
        assert row["prefill_ms"] > 0 and row["dynamic_tokens_per_s"] > 0
        is_static = row["form"] in ("sdpa", "max of 16", "defaults")
        assert ("static_ms" in row) == is_static
    assert rows[0]["settings"] is None and rows[1]["settings"]["num_local_blocks"] == 2
    assert rows[0]["dynamic_over_sdpa"] == 1 and rows[1]["prefill_over_sdpa"] > 0


def test_forms_share_the_weights(network):
    before = network.config._attn_implementation
    sparse = generation.under(Form("sparse", dict(dense_length=0)), network)
    pairs = zip(sparse.parameters(), network.parameters(), strict=True)
    assert all(own is given for own, given in pairs) and sparse.config is not network.config
    assert (sparse.config._attn_implementation, before) == ("nsa", "sdpa")
    assert network.config._attn_implementation == before


def test_wrong_attention_is_not_timed(monkeypatch, network):
    """A step of decoding that misses one value; a forward that loses a little."""
    small = generation.checked_network(network)
    form = generation.forms_of((16,), 32, 32)[1]
    assert generation.check(form, small) < 1e-4
    forms = {form.name: form for form in generation.forms_of((16,), 32, 32)}
    assert generation.check(forms["converted, 16"], small) < 1e-4
    assert generation.check(forms["means of 16"], small) < 1e-4
    right = attention.branches.attend

    def one_value_less(call, *rest):
        if call.q.shape[1] == 1:
            call = call.but(v=call.v.index_fill(1, torch.tensor([1]), 0))
        return right(call, *rest)

    def scaled(call, *rest):
        out, block_indices = right(call, *rest)
        return 0.9 * out, block_indices

    for wrong in (one_value_less, scaled):
        monkeypatch.setattr(attention.branches, "attend", wrong)
        with pytest.raises(WrongResult, match="logits with all blocks are .* off SDPA's"):
            generation.check(form, small)
    plan = generation.Plan("tiny", (Form("sdpa"), form), (8,), (1,), deadline=0.0)
    recorder = common.Recorder(None, CPU, ("form",))
    generation.measure_all(network, plan, recorder)
    (row,) = recorder.rows
    assert row["form"] == "max of 16" and row["failed"].startswith("wrong: logits")


def test_table():
    dense = {
        "model": "llama-8b",
        "layers": 8,
        "all_layers": 32,
        "H": 32,
        "K": 8,
        "B": 16,
        "T": 8192,
    }
    dense |= {"gpu": "a GPU", "torch": "2", "triton": "3", "commit": "abc", "dtype": "bfloat16"}
    dense |= {"form": "sdpa", "prefill_ms": 1, "prefill_tokens_per_s": 1e5, "static_failed": "why"}
    sparse = {"form": "max of 64", "prefill_over_sdpa": 0.9, "prefill_peak_mib": 2048}
    drawn = generation.table([dense, dense | sparse]).splitlines()
    title = "llama-8b (8 of 32 layers, 32 query and 8 KV heads, bfloat16), a GPU, prefill, thousand"
    assert drawn[0] == f"{title} tokens/s (times SDPA); peak GiB:"
    assert drawn[2:6:2] == ["|  | B=16, 8k |", "| sdpa | 100.0 |"]
    assert "| max of 64 | 100.0 (0.90); 2.0 |" in drawn and "| sdpa | failed |" in drawn
