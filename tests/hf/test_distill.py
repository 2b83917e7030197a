"""Distillation of converted models: what it trains, what it leaves alone, and what it refuses."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from native_sparse_attention import SparseAttention, view
from native_sparse_attention.hf import convert, distill, ranking_losses
from tests.helpers.tiny_models import CACHE, SPARSE, prompts, tiny

close = torch.testing.assert_close
# an index of another width than the heads begins at random
INDEX = SPARSE | dict(index_dim=12, index_heads=1, num_selected_blocks=3)
TRAIN = dict(steps=40, lr=1e-2, batch_size=2, ranking_queries=48)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def rows(count=4, length=64):
    return torch.randint(1, 64, (count, length), generator=seeded())


def layers_of(model):
    return [m for m in model.modules() if isinstance(m, SparseAttention)]


@torch.no_grad()
def caught(model, ids):
    """The share of attention that the chosen blocks catch, over layers, heads and queries."""
    with view.collect(model) as seen:
        model(ids, use_cache=False)
    masses = [reading.mass.mean() for readings in seen.values() for reading in readings]
    return torch.stack(masses).mean().item()


def test_ranking_learns_and_nothing_else_changes():
    torch.manual_seed(0)
    model, ids = convert(tiny("Qwen3"), **INDEX), rows()
    before = copy.deepcopy(model.state_dict())
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    mass = caught(model, ids)
    history = distill(model, ids, **TRAIN, generator=seeded())
    losses = [step["ranking"] for step in history]
    assert len(losses) == 40 and history[0].keys() == {"ranking"}
    assert sum(losses[-8:]) < 0.8 * sum(losses[:8])
    assert caught(model, ids) > mass + 0.02
    for name, value in model.state_dict().items():
        assert value.equal(before[name]) != ("to_index" in name), name
    assert trained == {name: p.requires_grad for name, p in model.named_parameters()}
    assert all(p.grad is None for p in model.parameters())
    assert not any(layer.dense for layer in layers_of(model))
    assert all(layer.self_attn.ranking is None for layer in model.model.layers)
    assert not model.training


def test_the_same_generator_gives_the_same_training():
    torch.manual_seed(0)
    model = convert(tiny(), **INDEX)
    twin = copy.deepcopy(model)
    settings = TRAIN | dict(steps=3)
    first, second = (distill(m, rows(), **settings, generator=seeded(3)) for m in (model, twin))
    assert first == second
    close(model.state_dict(), twin.state_dict(), atol=0, rtol=0)
    assert distill(twin, rows(), **settings, generator=seeded(4)) != first


def test_autocast_around_it_sees_each_step():
    """Autocast keeps the casts of weights until it ends, steps of the optimizer or not."""
    torch.manual_seed(0)
    model, ids = convert(tiny(), **INDEX), rows(1)
    settings = TRAIN | dict(steps=3, stage="all")
    histories = []
    for keeps in (True, False):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=keeps):
            twin = copy.deepcopy(model)
            histories.append(distill(twin, ids, **settings, generator=seeded()))
    assert histories[0] == histories[1]


def test_integers_of_either_width():
    torch.manual_seed(0)
    model, ids = convert(tiny("Qwen3"), **INDEX), rows()
    for stage in ("ranking", "all"):
        found = [
            distill(
                copy.deepcopy(model), x, **TRAIN | dict(steps=1), stage=stage, generator=seeded()
            )
            for x in (ids, ids.int())
        ]
        assert found[0] == found[1]


@pytest.mark.parametrize("with_teacher", [False, True])
def test_all_parameters_learn_with_the_selection(with_teacher):
    torch.manual_seed(0)
    original, ids = tiny("Llama"), rows(2)
    model = convert(copy.deepcopy(original), **INDEX)
    before = copy.deepcopy(model.state_dict())
    settings = TRAIN | dict(steps=25, lr=3e-3)
    teacher = original if with_teacher else None
    history = distill(model, ids, **settings, stage="all", teacher=teacher, generator=seeded())
    first, last = history[:4], history[-4:]
    for name in ("loss", "ranking"):
        assert sum(step[name] for step in last) < 0.95 * sum(step[name] for step in first)
    changed = {name for name, value in model.state_dict().items() if not value.equal(before[name])}
    assert changed == {name for name, _ in model.named_parameters()} | {"lm_head.weight"}
    assert not any(p.grad is not None for p in original.parameters())


def test_checkpointing_changes_no_ranking_loss():
    """The backward computes each forward again, for the same queries."""
    torch.manual_seed(0)
    model = convert(tiny("Qwen2"), **INDEX)
    twin = copy.deepcopy(model)
    twin.train()
    enable = getattr(twin, "activation_checkpointing_enable", None)  # since 5.24
    (enable or twin.gradient_checkpointing_enable)()
    settings = TRAIN | dict(steps=2, stage="all")
    expected, found = (distill(m, rows(), **settings, generator=seeded()) for m in (model, twin))
    close(
        torch.tensor([s["ranking"] for s in found]), torch.tensor([s["ranking"] for s in expected])
    )
    close(twin.state_dict(), model.state_dict(), atol=1e-4, rtol=1e-4)


def test_padding_moves_no_ranking_query():
    """Positions are those of the batch, with its padding."""
    torch.manual_seed(0)
    model, ids, queries = convert(tiny(), **INDEX), rows(1), torch.arange(48, 64)
    mask = torch.arange(64)[None] >= 10
    with ranking_losses(model, queries) as padded:
        model(ids, attention_mask=mask.long(), use_cache=False)
    with ranking_losses(model, queries - 10) as alone:
        model(ids[:, 10:], use_cache=False)
    close(padded.loss, alone.loss)


@pytest.mark.parametrize("stage", ["ranking", "all"])
def test_reentrant_checkpointing_is_refused(stage):
    """Under it the layers run without gradients, and the rankings would learn nothing."""
    model = convert(tiny("Qwen2"), **INDEX).train()
    enable = getattr(model, "activation_checkpointing_enable", None)  # since 5.24
    (enable or model.gradient_checkpointing_enable)(dict(use_reentrant=True))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="use_reentrant=False"):
        distill(model, rows(), **TRAIN, stage=stage)
    close(model.state_dict(), before, rtol=0, atol=0)
    assert not any(layer.dense for layer in layers_of(model))


def test_a_classifier_ranks_too():
    """Without a token for padding, of which its head would ask."""
    torch.manual_seed(0)
    config = tiny().config
    config.pad_token_id = None
    model = convert(transformers.LlamaForSequenceClassification(config).eval(), **INDEX)
    (found,) = distill(model, rows(), **TRAIN | dict(steps=1, batch_size=2))
    assert found["ranking"] > 0


def test_gradients_that_are_not_finite_change_nothing():
    model = convert(tiny(), **INDEX)
    model.model.layers[1].mlp.down_proj.weight.data[0, 0] = float("inf")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"finite gradients, got losses of .*nan.* in step 0"):
        distill(model, rows(), **TRAIN, stage="all")
    close(model.state_dict(), before, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())


def test_bad_input_is_refused():
    model, (text,) = convert(tiny(), **INDEX), prompts(64)
    for given, message in (
        (dict(steps=0), "steps must be"),
        (dict(lr=0.0), "lr must be"),
        (dict(stage="dense"), "stage must be one of 'ranking', 'all'"),
        (dict(batch_size=0), "batch_size must be"),
        (dict(ranking_weights="sum"), "ranking_weights must be"),
        (dict(ranking_queries=0), "ranking_queries must be"),
        (dict(teacher=tiny()), "teacher must be None"),
        (dict(stage="all", teacher=model), "teacher must have layers of its own"),
        (dict(ids=["text"]), "ids must be .N, T. integers"),
        (dict(ids=text.float()), "ids must be .N, T. integers"),
        (dict(ids=text[:, :15]), "rows of 16 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            distill(model, **(TRAIN | dict(ids=text) | given))
    with pytest.raises(ValueError, match=r"one of convert\(model\)"):
        distill(tiny(), text, **TRAIN)
    with (
        ranking_losses(model, torch.arange(4)),
        pytest.raises(ValueError, match="got a second one"),
    ):
        distill(model, text, **TRAIN)
    with pytest.raises(ValueError, match="importance='index'"):
        distill(convert(tiny(), **SPARSE, importance="max"), text, **TRAIN)
    cache = transformers.DynamicCache(config=model.config)
    with (
        ranking_losses(model, torch.arange(4)),
        pytest.raises(ValueError, match="use_cache=False"),
    ):
        model(text, **{CACHE: cache})
