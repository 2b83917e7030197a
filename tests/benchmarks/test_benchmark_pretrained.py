"""The benchmark of a model that is not trained further: its rules, its measures, its page."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from benchmarks import common, distillation, pretrained, pretrained_model
from benchmarks.pretrained import DENSE, Rule

pytestmark = pytest.mark.usefixtures("nothing_to_release")

CPU = torch.device("cpu")
S, BLOCK = 96, 8
RULES = pretrained.grid((BLOCK,), (8, 16, 16))
CHOOSING = [rule for rule in RULES if rule.n]


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


@pytest.mark.parametrize("rule", CHOOSING, ids=lambda rule: pretrained.title(rule.row()))
def test_rules_attend_to_what_they_choose(rule):
    """The output is the softmax over forced and chosen blocks, of which there are none twice."""
    q, k, v = draw()
    indices = pretrained.choose(rule, q, k)
    assert indices.shape == (1, S, 6 if rule.per_head else 2, rule.n)
    some = pretrained.choose(rule, q[:, 48:58].contiguous(), k, 48)
    assert torch.equal(some, indices[:, 48:58])
    between = pretrained.candidates(rule, S, S, 0, CPU)
    chosen = torch.zeros(1, 6, S, between.shape[-1] + 1, dtype=torch.bool)
    by_head = indices.repeat_interleave(6 // indices.shape[2], dim=2).transpose(1, 2)
    chosen.scatter_(-1, (by_head % chosen.shape[-1]).long(), True)
    chosen = chosen[..., :-1]
    assert (chosen.sum(-1) == between.sum(-1).clamp(max=rule.n)).all()
    assert not (chosen & ~between).any()
    mask = (chosen | ~between).repeat_interleave(BLOCK, dim=-1)[..., :S].tril()
    torch.testing.assert_close(pretrained.attend(rule, {}, q, k, v), dense(q, k, v, mask))


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


def test_loss_above_dense_by_hand():
    """Texts of 2 tokens: their means are 1 and 3, of dense attention 0.5 and 1.5."""
    losses, of_dense = torch.tensor([[0.0, 2.0], [3.0, 3.0]]), torch.tensor([[0.5], [1.5]])
    row = dict(loss=2.0, above=1.0, above_stderr=0.5, above_percent=100.0, windows=2)
    assert pretrained.loss_row(losses, of_dense) == row
    assert pretrained.loss_row(losses[1:], of_dense[1:])["above_stderr"] is None


def test_model_is_dense_with_every_block(model, texts):
    of_dense = model.losses(texts)
    assert of_dense.shape == (1, S // 2)
    direct = model.network(input_ids=texts).logits[:, S // 2 - 1 : -1]
    expected = F.cross_entropy(direct.transpose(1, 2), texts[:, S // 2 :], reduction="none")
    torch.testing.assert_close(of_dense, expected)
    assert pretrained.check(model, BLOCK, texts, of_dense)["apart"] < 1e-5
    with pytest.raises(common.WrongResult, match="with every block of 8"):
        pretrained.check(model, BLOCK, texts, of_dense + 1)
    window = pretrained.losses(model, RULES[1], texts)
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


def test_what_is_wrong_is_not_measured(monkeypatch, model):
    right = pretrained.attend

    def wrong(*args):
        return right(*args) * 0.5

    monkeypatch.setattr(pretrained, "attend", wrong)
    plan = pretrained.Plan((DENSE, *CHOOSING[:2]), (256,), windows=1, needles=1, watched=1)
    corpus = pretrained_model.Corpus("bytes", (common.ROOT / "README.md",))
    first, *others = pretrained.measure(model, corpus, 256, plan)
    assert "failed" not in first
    assert all(row["failed"].startswith("wrong: with every") for row in others)


PLAN = distillation.Plan(
    (16,), (16, 32, 32), T=256, train_T=128, windows=2, needles=0, watched=0, steps=2,
    ranking_steps=2, queries=16,
)  # fmt: skip


def test_training_reads_what_no_evaluation_reads(tmp_path, coder):
    """Windows of 8 tokens read at most 64 characters of each file that they begin with."""
    paths = [tmp_path / f"{name}.txt" for name in "abcd"]
    for path in paths:
        path.write_text(path.stem * 64)
    corpus = pretrained_model.Corpus("prose", tuple(paths))
    assert [path.stem for path in corpus.without(8, 2).files] == ["b", "d"]
    plan = SimpleNamespace(T=8, windows=2, train_T=16, steps=3, batch=1)
    rows = distillation.training_rows([corpus], coder, plan)
    assert rows.shape == (3, 16) and set(rows.flatten().tolist()) == {ord("b")}


def test_wrong_conversions_are_not_measured(monkeypatch):
    model = pretrained_model.tiny(CPU)
    model.network.set_attn_implementation("sdpa")
    text = torch.tensor([list((common.ROOT / "README.md").read_bytes()[:256])])
    assert distillation.check(model, 16, text, PLAN) < 1e-4
    right = distillation.converted

    def one_block_less(*args, **settings):
        return right(*args, **settings | dict(num_selected_blocks=2))

    monkeypatch.setattr(distillation, "converted", one_block_less)
    with pytest.raises(common.WrongResult, match="with every block of 16"):
        distillation.check(model, 16, text, PLAN)
