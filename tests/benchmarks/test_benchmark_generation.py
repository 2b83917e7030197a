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
KNOWN = {"model": "llama-8b", "layers": 8, "all_layers": 32, "H": 32, "K": 8, "dtype": "bfloat16"}
KNOWN |= {"gpu": "a GPU", "torch": "2", "triton": "3", "transformers": "5", "commit": "abcdefghij"}
KNOWN |= {"B": 16, "T": 8192, "new_tokens": 64}


@pytest.fixture(scope="module")
def network():
    return generation.network_of("tiny", None, CPU, torch.float32)


@pytest.mark.slow
def test_quick_form(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    rows = generation.main(["--quick", "--device", "cpu", "--out", str(path)])
    assert common.read_rows(path) == json.loads(json.dumps(rows))
    sparse = ["max of 16", "means of 16", "max of 16 by each head", "defaults"]
    forms = ["sdpa", *sparse[:3], "converted, 16", "defaults"]
    forms += ["converted, defaults"]
    assert [row["form"] for row in rows] == forms
    for row in rows:
        assert row["B"] == 2 and row["T"] == 256 and row["all_layers"] == row["layers"] == 2
        assert row["prefill_ms"] > 0 and row["dynamic_first_s"] > 0
        assert row["dynamic_tokens_per_s"] == pytest.approx(2000 / row["dynamic_ms"], rel=1e-2)
        is_static = row["form"] in ("sdpa", "max of 16", "converted, 16")
        assert ("static_ms" in row) == is_static
        assert row["sparse_cache"] == (row["form"] in sparse)
    assert rows[0]["settings"] is None and rows[1]["settings"]["num_local_blocks"] == 2
    assert not rows[3]["settings"]["query_heads_share_selected_kv"]
    assert rows[4]["settings"]["importance"] == "index"
    assert "| decoding, tokens/s (times SDPA) | B=2, 256 |" in capsys.readouterr().out


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
    assert generation.check(form, small, static=True) < 1e-4
    forms = {form.name: form for form in generation.forms_of((16,), 32, 32)}
    assert generation.check(forms["converted, 16"], small) < 1e-4
    assert generation.check(forms["means of 16"], small, static=True) < 1e-4
    right = attention.native_sparse_attention

    def one_value_less(q, k, v, *others, **settings):
        if q.shape[1] == 1:
            v = v.index_fill(1, torch.tensor([1]), 0)
        return right(q, k, v, *others, **settings)

    def scaled(q, k, v, ck=None, **others):
        return 0.9 * right(q, k, v, ck, **others)

    for wrong in (one_value_less, scaled):
        monkeypatch.setattr(attention, "native_sparse_attention", wrong)
        with pytest.raises(WrongResult, match="logits with all blocks are .* off SDPA's"):
            generation.check(form, small)
    plan = generation.Plan("tiny", (Form("sdpa"), form), (8,), (1,))
    forms, told = generation.checked(network, plan)
    assert [f.name for f in forms] == ["sdpa"] and told.startswith("max of 16: logits")


def test_deadline(network, capsys):
    plan = generation.Plan("tiny", (Form("sdpa"),), (8,), (1,), deadline=0.0)
    assert generation.run(network, plan) == []
    assert "stopped before B=1, T=8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--s", "48"], "s must divide 64, 512 and 512, got 48"),
        (["--forms", "dense"], "forms must be of sdpa, max of 64, .*, got dense"),
        (["--static-forms", "max of 32"], "static-forms must be of .*, got max of 32"),
        (["--new-tokens", "9"], "new_tokens must be at least 10, got 9"),
        (["--contexts", "1"], "contexts must be at least 2, got 1"),
        (["--batches", "0"], "batches must be at least 1, got 0"),
    ],
)
def test_bad_arguments(given, told):
    with pytest.raises(ValueError, match=told):
        generation.main([*given, "--device", "cpu"])


def test_table():
    dense = KNOWN | {"form": "sdpa", "prefill_tokens_per_s": 1e5, "prefill_peak_mib": 2048}
    dense |= {"dynamic_tokens_per_s": 100.0, "static_tokens_per_s": 200.0, "settings": None}
    sparse = dense | {"form": "max of 64", "prefill_tokens_per_s": 9e4, "dynamic_peak_mib": 1024}
    sparse |= {"dynamic_tokens_per_s": 250.0, "static_failed": "why", "settings": {"a": 1}}
    # a later run, whose baseline is no one else's
    again = dense | {"commit": "def", "prefill_tokens_per_s": 5e4}
    rows = [sparse, dense, again]
    drawn = generation.table(rows).splitlines()
    assert drawn[0] == "llama-8b (8 layers of 32, 32 query and 8 KV heads, bfloat16), a GPU:"
    assert "| prefill, thousand tokens/s (times SDPA) | B=16, 8k |" in drawn
    assert "| max of 64 | 90.0 (0.90)\\* |" in drawn and "| max of 64 | 250 (2.50)\\* |" in drawn
    assert any(line.startswith("\\* times SDPA of its own run;") for line in drawn)
    together = generation.table(rows[:2])
    assert "| max of 64 | 90.0 (0.90) |" in together and "\\*" not in together
    alone = generation.table([dense, sparse | {"commit": "def"}])
    assert "| max of 64 | 90.0 |" in alone
    assert "| max of 64 | failed |" in drawn and "| max of 64 | 2.0 / 1.0 / - |" in drawn
    assert "* llama-8b, max of 64, B=16, 8k, static: why" in drawn and "| sdpa | 50.0 |" in drawn
    drawn = generation.table([*rows, sparse | {"gpu": "another"}])
    assert "KV heads, bfloat16), another:" in drawn and "| max of 64 | 90.0 |" in drawn
