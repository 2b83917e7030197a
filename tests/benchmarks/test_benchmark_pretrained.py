"""The benchmark of a model that is not trained further: its rules, its measures, its page."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from benchmarks import common, pretrained, pretrained_model
from benchmarks.pretrained import DENSE, Rule

pytestmark = pytest.mark.usefixtures("nothing_to_release")

CPU = torch.device("cpu")
S, BLOCK = 96, 8
RULES = pretrained.grid((BLOCK,), ((16, 16),), initial=8)
CHOOSING = [rule for rule in RULES if rule.n]


def label(rule):
    return pretrained.title({**rule.row()})


def draw(length=S, heads=6, kv_heads=2, width=16):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, length, h, width) for h in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return 2 * q, k, v


def dense(q, k, v, mask=None):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    options = dict(attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


@pytest.fixture(scope="module")
def model():
    pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")
    return pretrained_model.tiny(CPU)


@pytest.fixture(scope="module")
def coder():
    """What texts and needles need of a model."""
    return SimpleNamespace(encode=lambda text: list(text.encode()), device=CPU)


@pytest.fixture(scope="module")
def texts(model):
    return pretrained_model.Corpus("bytes", (common.ROOT / "README.md",)).windows(model, S, 1)


# rules


@pytest.mark.parametrize("length", [S, 97, 23])
def test_all_blocks_selected_is_dense_attention(length):
    q, k, v = draw(length)
    rule = Rule("window", BLOCK, 1, 2).whole(length)
    torch.testing.assert_close(pretrained.attend(rule, q, k, v), dense(q, k, v))


@pytest.mark.parametrize("rule", CHOOSING, ids=label)
def test_rules_attend_to_what_they_choose(rule):
    """The output is the softmax over forced and chosen blocks, of which there are none twice."""
    q, k, v = draw()
    indices = pretrained.choose(rule, q, k)
    assert indices.shape == (1, S, 6 if rule.per_head else 2, rule.n)
    between = pretrained.candidates(rule, S, S, 0, CPU)
    counts = between.sum(-1).clamp(max=rule.n)
    for head in indices[0].unbind(1):
        for query in (5, 40, 77, 95):
            blocks = [c for c in head[query].tolist() if c >= 0]
            assert len(blocks) == len(set(blocks)) == counts[query]
            assert between[query, blocks].all()
    read = ~pretrained.candidates(rule, S, S, 0, CPU).expand(1, 6, -1, -1)
    chosen = torch.zeros(1, 6, S, read.shape[-1] + 1, dtype=torch.bool)
    by_head = indices.repeat_interleave(6 // indices.shape[2], dim=2).transpose(1, 2)
    chosen.scatter_(-1, (by_head % chosen.shape[-1]).long(), True)
    mask = (read | chosen[..., :-1]).repeat_interleave(BLOCK, dim=-1)[..., :S].tril()
    torch.testing.assert_close(pretrained.attend(rule, q, k, v), dense(q, k, v, mask))


def test_window_reads_no_ranked_block():
    q, k, v = draw()
    rule = Rule("window", BLOCK, 1, 2)
    one = Rule("max", BLOCK, 1, 2, 1, 1, 1)
    early = 3 * BLOCK  # queries without a candidate
    out, ranked = (pretrained.attend(r, q, k, v) for r in (rule, one))
    torch.testing.assert_close(out[:, :early], ranked[:, :early])
    assert (out[:, early:] - ranked[:, early:]).abs().amin(dim=(0, 2, 3)).max() > 0
    assert not torch.allclose(out[:, early:], ranked[:, early:], atol=1e-3)


@pytest.mark.parametrize("rule", CHOOSING, ids=label)
def test_some_queries_choose_what_all_of_them_choose(rule):
    q, k, _ = draw()
    some = pretrained.choose(rule, q[:, 50:60].contiguous(), k, 50)
    assert torch.equal(some, pretrained.choose(rule, q, k)[:, 50:60])


def test_oracle_catches_most():
    """Of far mass, at least what any rule catches that a KV group shares."""
    q, k, _ = draw()
    mass = pretrained.attention_mass(q, k, 0)
    shares = {}
    for rule in CHOOSING:
        far, held = pretrained.caught(rule, pretrained.choose(rule, q, k), mass, 0)
        assert far.shape == held.shape == (6,) and (held <= far * (1 + 1e-5)).all()
        shares[rule] = (held.sum() / far.sum()).item()
    most = next(share for rule, share in shares.items() if rule.name == "oracle")
    assert min(shares.values()) > 0
    assert all(share <= most + 1e-6 for rule, share in shares.items() if not rule.per_head)
    assert most < 1


def test_far_mass_by_hand():
    """Uniform attention of the last of 8 tokens, blocks of 2, the first and the last forced."""
    q, k = torch.zeros(1, 1, 1, 4), torch.zeros(1, 8, 1, 4)
    rule = Rule("max", 2, 1, 1, 1, 1, 1)
    mass = pretrained.attention_mass(q, k, 7)
    assert torch.equal(mass, torch.full((1, 1, 1, 8), 1 / 8))
    indices = torch.tensor([[[[2]]]])
    far, held = pretrained.caught(rule, indices, mass, 7)
    assert far.tolist() == [0.5] and held.tolist() == [0.25]
    far, held = pretrained.caught(rule, indices - 3, mass, 7)
    assert held.tolist() == [0.0]


@pytest.mark.parametrize(("l", "d"), [(1, 1), (4, 4), (8, 4), (8, 2)])
def test_pooled_keys_are_means_of_windows(l, d):
    _, k, _ = draw(29)
    found = pretrained.pooled(k, l, d)
    assert found.shape[1] == 29 // d
    for j in range(29 // d):
        window = k[:, max(0, (j + 1) * d - l) : (j + 1) * d]
        torch.testing.assert_close(found[:, j], window.sum(dim=1) / l)


def test_bad_rules_and_grids():
    with pytest.raises(ValueError, match="name must be one of dense, window"):
        Rule("best")
    with pytest.raises(ValueError, match="s and local must be at least 1"):
        Rule("max", 16, 1, 0, 1, 1, 1)
    with pytest.raises(ValueError, match="d must be 1 to l=2, got 4"):
        Rule("probs", 16, 1, 2, 1, 2, 4)
    with pytest.raises(ValueError, match="s must divide 64"):
        pretrained.grid((24,))
    with pytest.raises(ValueError, match="at most 1152 keys, got 2112"):
        pretrained.grid((32,), ((1024, 1024),))


def test_grid_reads_few_keys():
    rules = pretrained.grid()
    assert len(set(rules)) == len(rules)
    assert {rule.keys for rule in rules} == {None, 1088, 1152}
    small = pretrained.grid((32,), pretrained.SPLITS[:1], small=True)
    assert [rule.row()["rule"] for rule in small] == [
        "dense", "window", "oracle", "logits", "probs", "max", "probs", "max",
    ]  # fmt: skip
    assert {(r.initial, r.local, r.n) for r in small[2:]} == {(2, 16, 16)}


# the model


def test_model_is_dense_with_every_block(model, texts):
    of_dense = model.losses(texts)
    assert of_dense.shape == (1, S // 2)
    direct = model.network(input_ids=texts).logits[:, S // 2 - 1 : -1]
    expected = F.cross_entropy(direct.transpose(1, 2), texts[:, S // 2 :], reduction="none")
    torch.testing.assert_close(of_dense, expected)
    plan = pretrained.Plan(RULES)
    assert pretrained.check(model, BLOCK, texts, of_dense, plan)["apart"] < 1e-5
    with pytest.raises(common.WrongResult, match="with every block of 8"):
        pretrained.check(model, BLOCK, texts, of_dense + 1, plan)
    window = pretrained.losses(model, RULES[1], texts, plan)
    assert (window - of_dense).abs().mean() > 0.01 and model.attend is None


def test_completed_counts_what_greedy_decoding_gives(model, texts):
    """The tokens that the model would append count up to the first other one."""
    prompt = texts[:, :40]
    with torch.no_grad():
        for _ in range(4):
            best = model.network(input_ids=prompt).logits[:, -1:].argmax(dim=-1)
            prompt = torch.cat((prompt, best), dim=1)
    assert model.completed(prompt, 4).tolist() == [4]
    for wrong in range(4):
        other = prompt.clone()
        other[:, 40 + wrong] = (other[:, 40 + wrong] + 1) % 256
        assert model.completed(other, 4).tolist() == [wrong]


def test_needle(coder):
    text = torch.full((200,), ord("x"))
    for depth in pretrained.DEPTHS:
        found = bytes(pretrained_model.needle(coder, text, depth, seed=3).tolist()).decode()
        digits, filler = found[-6:], found.count("x")
        before, told, after = found.partition("\n\nThe secret number of ")
        assert len(found) == 200 and digits.isdigit() and told
        assert abs(len(before) - depth * filler) <= 1
        assert after.count(f" is #{digits}") == 2 and f" is #{digits}.\n\nx" in after
    with pytest.raises(ValueError, match="lengths must leave room for a needle, got 80"):
        pretrained_model.needle(coder, text[:80], 0.5, seed=3)


def test_bad_settings_of_a_run(tmp_path):
    bad = {"--windows": "0", "--needles": "-1", "--lengths": "200"}
    for name, value in bad.items():
        with pytest.raises(ValueError, match=f"{name[2:]} must be at least .*, got {value}"):
            pretrained.main([name, value, "--device", "cpu"])


def test_load_needs_a_file(tmp_path):
    with pytest.raises(ValueError, match="model must be a GGUF file, got"):
        pretrained_model.load(tmp_path / "none.gguf", CPU)


# texts


def test_corpora(tmp_path, coder):
    for name, text in {"a/b.c": "int b;", "a/a.h": "int a;", "c.rst": "Words.", "d.o": "x"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    c, prose = pretrained_model.corpora([tmp_path])
    assert (c.name, prose.name) == ("C", "prose")
    assert [path.name for path in c.files] == ["a.h", "b.c"]
    windows = c.windows(coder, 8, 2)
    assert [bytes(line.tolist()) for line in windows] == [b"int a;\ni", b"int b;\ni"]
    with pytest.raises(ValueError, match="data must hold 100 tokens of C, got 13"):
        c.windows(coder, 100, 1)
    with pytest.raises(ValueError, match="data must name files and directories"):
        pretrained_model.corpora([tmp_path / "none"])
    with pytest.raises(ValueError, match="data must hold files named"):
        pretrained_model.corpora([])
    assert pretrained_model.corpora([tmp_path / "d.o"])[0].name == "prose"
    assert pretrained_model.own_texts()


# rows and the page


def test_quick_form(tmp_path, capsys, model):
    path = tmp_path / "rows.jsonl"
    rows = pretrained.main(["--quick", "--device", "cpu", "--out", str(path)])
    assert common.read_rows(path) == json.loads(json.dumps(rows))
    assert {row["text"] for row in rows} == {"Python"} and not any("failed" in r for r in rows)
    assert rows[0]["rule"] == "dense" and rows[0]["above"] == 0
    for row in rows:
        assert row["T"] == 256 and row["loss"] > 0 and row["windows"] == 2
        assert len(row["found"]) == len(row["right"]) == 3
        assert ("caught" in row) == (row["n"] > 0)
    of_rules = [row for row in rows if "caught" in row and not row["per_head"]]
    for row in of_rules:
        most = next(r for r in of_rules if r["rule"] == "oracle" and r["s"] == row["s"])
        assert 0 < row["caught"] <= most["caught"] <= 1 and 0 < row["far"] < 1
    assert "| dense | all |" in capsys.readouterr().out


def test_what_is_wrong_is_not_measured(monkeypatch, model):
    right = pretrained.attend

    def wrong(rule, q, k, v):
        return right(rule, q, k, v) * 0.5

    monkeypatch.setattr(pretrained, "attend", wrong)
    plan = pretrained.Plan((DENSE, *CHOOSING[:2]), (256,), windows=1, needles=1, watched=1)
    corpus = pretrained_model.Corpus("bytes", (common.ROOT / "README.md",))
    first, *others = pretrained.measure(model, corpus, 256, plan)
    assert "failed" not in first
    assert all(row["failed"].startswith("wrong: with every") for row in others)


def test_table():
    known = {"gpu": "a GPU", "dtype": "bf16", "torch": "2", "triton": "3", "commit": "abcdefghij"}
    known |= {"text": "C", "T": 2048, "windows": 8}
    rule = Rule("probs", 32, 2, 16, 16, 16, 8, True)
    loss = {"loss": 1.1, "above": 0.1, "above_stderr": 0.01, "above_percent": 10.0}
    rows = [
        {**DENSE.row(), **loss, **known, "loss": 1.0, "found": [8, 8, 8], "needles": 8},
        {**rule.row(), **loss, **known, "gpu": "another GPU", "loss": 2.0},
        {**rule.row(), **loss, **known},
        {**rule.row(), **loss, **known, "T": 8192, "found": [8, 7, 8], "needles": 8, "caught": 0.5},
        {**Rule("window", 32, 2, 32).row(), **known, "failed": "why"},
    ]
    drawn = pretrained.table(rows).splitlines()
    assert drawn[0] == "C:" and drawn[4] == "| dense | all | 1.0000 |  |  |  |"
    told = "| probs, means of 16 every 8, per head | 2 + 16 + 16 of 32 | +10.00 % ± 1.00 |"
    assert drawn[5] == f"{told} +10.00 % ± 1.00 | 8 / 7 / 8 of 8 | 0.50 |"
    assert drawn[6] == "| window | 2 + 32 + 0 of 32 | failed |  |  |  |"
    assert drawn[-1] == "* window: why"
    assert "a GPU, bf16" in drawn[-2]


def test_table_has_the_best_of_other_splits():
    known = {"gpu": "a GPU", "dtype": "bf16", "torch": "2", "triton": "3", "commit": "abcdefghij"}
    known |= {"text": "C", "T": 8192, "windows": 8, "needles": 2, "above_stderr": 0.001}
    of = {
        DENSE: (0.0, [1, 2, 2]),
        Rule("oracle", 32, 2, 16, 16): (0.5, [2, 2, 2]),
        Rule("max", 32, 2, 16, 16, 1, 1): (1.5, [2, 2, 2]),
        Rule("max", 32, 2, 8, 24, 1, 1): (1.2, [1, 2, 2]),
        Rule("probs", 32, 2, 8, 24, 16, 8): (1.1, [2, 1, 2]),
        Rule("logits", 32, 2, 8, 24, 32, 32): (2.5, [2, 2, 2]),
    }
    rows = [
        {
            **rule.row(),
            **known,
            "above_percent": p,
            "above": p / 100,
            "loss": 1 + p / 100,
            "found": f,
        }
        for rule, (p, f) in of.items()
    ]
    drawn = pretrained.table(rows)
    lines = [line.split(" | ")[:2] for line in drawn.splitlines() if line.startswith("| ")][2:]
    assert lines == [
        ["| dense", "all"],
        ["| oracle", "2 + 16 + 16 of 32"],
        ["| max, tokens", "2 + 16 + 16 of 32"],
        ["| probs, means of 16 every 8", "2 + 8 + 24 of 32"],
    ]
