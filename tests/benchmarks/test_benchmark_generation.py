"""The benchmark of `generate` of transformers: runs, refuses what is wrong, draws its page."""

import json

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf")

from benchmarks import common, generation, generation_report
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
    forms = ["sdpa", "sdpa without cuDNN", *sparse[:3], "converted, 16", "defaults"]
    forms += ["converted, defaults"]
    assert [row["form"] for row in rows] == forms
    for row in rows:
        assert row["B"] == 2 and row["T"] == 256 and row["all_layers"] == row["layers"] == 2
        assert row["prefill_ms"] > 0 and row["dynamic_first_s"] > 0
        assert row["dynamic_tokens_per_s"] == pytest.approx(2000 / row["dynamic_ms"], rel=1e-2)
        is_static = row["form"] in ("sdpa", "max of 16", "converted, 16")
        assert ("static_ms" in row, "graph_ms" in row) == (is_static, is_static)
        assert row["unseen_tokens_per_s"] == pytest.approx(2000 / row["unseen_ms"], rel=1e-2)
        assert row["sparse_cache"] == (row["form"] in sparse)
    assert rows[0]["settings"] is None and rows[6]["settings"]["dense_length"] == 8192
    assert rows[2]["settings"]["num_local_blocks"] == 2
    assert not rows[4]["settings"]["query_heads_share_selected_kv"]
    assert rows[5]["settings"]["importance"] == "index"
    assert "| decoding, tokens/s (times SDPA) | B=2, 256 |" in capsys.readouterr().out


def test_forms_share_the_weights(network):
    before = network.config._attn_implementation
    sparse = generation.under(Form("sparse", dict(dense_length=0)), network)
    pairs = zip(sparse.parameters(), network.parameters(), strict=True)
    assert all(own is given for own, given in pairs) and sparse.config is not network.config
    assert (sparse.config._attn_implementation, before) == ("nsa", "sdpa")
    assert network.config._attn_implementation == before


def test_wrong_attention_is_not_timed(monkeypatch, network):
    """A step of decoding that sees one key less; a forward that loses a little."""
    small = generation.checked_network(network, CPU)
    form = generation.forms_of((16,), 32, 32)[2]
    assert generation.check(form, small, static=True) < 1e-4
    forms = {form.name: form for form in generation.forms_of((16,), 32, 32)}
    assert generation.check(forms["converted, 16"], small) < 1e-4
    assert generation.check(forms["means of 16"], small, static=True) < 1e-4
    right = attention.native_sparse_attention

    def one_key_less(q, k, v, ck=None, **others):
        if q.shape[1] == 1:
            k, v = (torch.cat((t[:, :1], t[:, 2:]), dim=1) for t in (k, v))
            ck = k
        return right(q, k, v, ck, **others)

    def scaled(q, k, v, ck=None, **others):
        return 0.9 * right(q, k, v, ck, **others)

    for wrong in (one_key_less, scaled):
        monkeypatch.setattr(attention, "native_sparse_attention", wrong)
        with pytest.raises(WrongResult, match="logits with all blocks are .* off SDPA's"):
            generation.check(form, small)
    plan = generation.Plan("tiny", (Form("sdpa"), form))
    forms, told = generation.checked(network, plan, CPU)
    assert [f.name for f in forms] == ["sdpa"] and told.startswith("max of 16: logits")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sdpa", "max of 16", "means of 16", "converted, 16"])
def test_forward_in_graph(network, name):
    form = {form.name: form for form in generation.forms_of((16,), 32, 32)}[name]
    model, ids = generation.under(form, network), generation.draw(network, 2, 200)
    with torch.no_grad():
        exact = model(ids, use_cache=False).logits
        empty, forward = generation.in_graph(form, model, ids, 210)
        for _ in range(3):
            torch.testing.assert_close(forward(empty()).logits, exact, atol=1e-5, rtol=1e-4)
        assert forward(empty(), logits_to_keep=1).logits.shape == (2, 1, 256)


def test_graph_of_sdpa_has_no_mask(network):
    """As an eager forward has none; some releases of transformers make one where they compile."""
    masks = []

    def compiled(graph, inputs):
        nodes = [n for n in graph.graph.nodes if "scaled_dot_product" in str(n.target)]
        masks.extend(n.kwargs["attn_mask"] for n in nodes)
        return graph.forward

    ids = generation.draw(network, 1, 20)
    exact = network(ids, use_cache=False).logits
    model = generation.without_mask(generation.under(Form("sdpa"), network))
    given = {generation.cache_argument(): generation.new_cache(Form("sdpa"), model)}
    forward = torch.compile(model.forward, backend=compiled)
    torch.testing.assert_close(forward(ids, **given).logits, exact)
    assert masks == [None, None]


def test_lengths_are_not_seen_twice(network, monkeypatch):
    """By SDPA with or without cuDNN, which is as before afterwards."""
    forms = Form("sdpa"), Form("sdpa without cuDNN", cudnn=False)
    plan = generation.Plan("tiny", forms, new_tokens=10, repeats=3)
    seen = []

    def decode(self, cache, new_tokens, less=0):
        seen.append((self.form.name, torch.backends.cuda.cudnn_sdp_enabled(), cache, less))
        return 2.0, 1.0

    monkeypatch.setattr(generation.Timed, "decode", decode)
    monkeypatch.setattr(generation.Timed, "prefill", lambda self: 1.0)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    rows = generation.case(network, forms, 1, 35, False, plan)
    for form in forms:
        own = [call[1:] for call in seen if call[0] == form.name]
        assert own == [(before and form.cudnn, "dynamic", less) for less in (0, 0, 0, 10, 20, 30)]
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
    assert [row["unseen_tokens_per_s"] for row in rows] == [2.0, 2.0]


def test_deadline(network, capsys):
    plan = generation.Plan("tiny", (Form("sdpa"),), (8,), (1,), deadline=0.0)
    assert generation.run(network, plan) == []
    assert "stopped before B=1, T=8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--s", "48"], "s must divide 64, 512 and 512, got 48"),
        (["--forms", "dense"], "forms must be of sdpa, .*, max of 64, .*, got dense"),
        (["--static-forms", "max of 32"], "static-forms must be of .*, got max of 32"),
        (["--new-tokens", "9"], "new_tokens must be at least 10, got 9"),
        (["--contexts", "1"], "contexts must be at least 2, got 1"),
        (["--batches", "0"], "batches must be at least 1, got 0"),
        (["--layers", "0"], "layers must be at least 1, got 0"),
        (["--path", "none", "--layers", "2"], "layers must be left out"),
        (["--path", "none"], "path must be a folder or a GGUF file, got none"),
    ],
)
def test_bad_arguments(given, told):
    with pytest.raises(ValueError, match=told):
        generation.main([*given, "--device", "cpu"])


def test_table():
    dense = KNOWN | {"form": "sdpa", "prefill_tokens_per_s": 1e5, "prefill_peak_mib": 2048}
    dense |= {"dynamic_tokens_per_s": 100.0, "static_tokens_per_s": 200.0, "settings": None}
    dense |= {"unseen_tokens_per_s": 40.0}
    other = dense | {"form": "sdpa without cuDNN", "dynamic_tokens_per_s": 300.0}
    sparse = dense | {"form": "max of 64", "prefill_tokens_per_s": 9e4, "dynamic_peak_mib": 1024}
    sparse |= {"dynamic_tokens_per_s": 250.0, "static_failed": "why", "settings": {"a": 1}}
    sparse |= {"unseen_tokens_per_s": 60.0, "graph_tokens_per_s": 2e5}
    dense |= {"graph_tokens_per_s": 8e4}  # slower than without
    # a later run, whose baseline is no one else's
    again = dense | {"commit": "def", "prefill_tokens_per_s": 5e4}
    rows = [sparse, other, dense, again]
    drawn = generation_report.table(rows).splitlines()
    assert drawn[0] == "llama-8b (8 layers of 32, 32 query and 8 KV heads, bfloat16), a GPU:"
    assert "| prefill, thousand tokens/s (times SDPA) | B=16, 8k |" in drawn
    assert "| max of 64 | 90.0 (0.90)\\* |" in drawn and "| max of 64 | 250 (2.50)\\* |" in drawn
    assert "| max of 64 | 200.0 (2.00)\\* |" in drawn
    assert any(line.startswith("\\* times SDPA of its own run;") for line in drawn)
    together = generation_report.table(rows[:3])
    assert "| max of 64 | 90.0 (0.90) |" in together and "\\*" not in together
    alone = generation_report.table([dense, sparse | {"commit": "def"}])
    assert "| max of 64 | 90.0 |" in alone
    assert "| max of 64 | failed |" in drawn and "| max of 64 | 2.0 / 1.0 / - |" in drawn
    case = "* llama-8b, 8 layers, B=16, 8k, a GPU, "
    assert f"{case}prefill, thousand tokens/s: missed, max of 64 0.90 of 1" in drawn
    assert f"{case}decoding, tokens/s: hit, max of 64 2.50 of 2" in drawn
    unseen = generation_report.MEASURES["unseen"]
    assert f"{case}{unseen}: missed, max of 64 1.50 of 2" in drawn
    assert "* llama-8b, max of 64, B=16, 8k, static: why" in drawn
    assert "| sdpa | 50.0 |" in drawn
    drawn = generation_report.table([*rows, sparse | {"gpu": "another"}])
    assert "KV heads, bfloat16), another:" in drawn and "| max of 64 | 90.0 |" in drawn
    assert generation_report.table([]) == generation_report.NO_ROWS


def test_page_is_drawn_from_the_rows():
    page = generation_report.PAGE.read_text(encoding="utf-8")
    assert generation_report.render(page, common.read_rows(generation.RESULTS)) == page
    assert "<!-- begin: generation -->" in page
