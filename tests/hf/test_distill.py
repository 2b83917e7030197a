"""Distillation of converted models: what it trains, what it leaves alone, and what it refuses."""

import copy

import pytest
import torch
import transformers

from native_sparse_attention import SparseAttention, view
from native_sparse_attention.hf import convert, distill, ranking_losses
from tests.helpers.batches import call, dynamic
from tests.helpers.tiny_models import SPARSE, checkpoint, close, prompts, tiny

# an index of another width than the heads begins at random
INDEX = SPARSE | dict(index_dim=12, index_heads=1, num_selected_blocks=3)
TRAIN = dict(steps=40, lr=1e-2, batch_size=2, ranking_queries=48)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def rows(count=4, length=64):
    return torch.randint(1, 64, (count, length), generator=seeded())


def train(model, ids, seed=0, **settings):
    return distill(model, ids, **TRAIN | settings, generator=seeded(seed))


@torch.no_grad()
def caught(model, ids):
    """The share of attention that the chosen blocks catch, over layers, heads and queries."""
    with view.collect(model) as seen:
        model(ids, use_cache=False)
    masses = [reading.mass.mean() for readings in seen.values() for reading in readings]
    return torch.stack(masses).mean().item()


def test_ranking_learns_and_nothing_else_changes():
    model, ids = convert(tiny("Qwen3"), **INDEX), rows()
    before = copy.deepcopy(model.state_dict())
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    mass = caught(model, ids)
    history = train(model, ids)
    losses = [step["ranking"] for step in history]
    assert len(losses) == 40 and history[0].keys() == {"ranking"}
    assert sum(losses[-8:]) < 0.8 * sum(losses[:8])
    assert caught(model, ids) > mass + 0.02
    for name, value in model.state_dict().items():
        assert value.equal(before[name]) != ("to_index" in name), name
    assert trained == {name: p.requires_grad for name, p in model.named_parameters()}
    assert all(p.grad is None for p in model.parameters())
    assert not any(m.dense for m in model.modules() if isinstance(m, SparseAttention))
    assert all(layer.self_attn.ranking is None for layer in model.model.layers)
    assert not model.training


def test_the_same_generator_gives_the_same_training():
    """Of ids of either width, and in a wrapper that has a forward alone, as that of
    DistributedDataParallel."""
    model = convert(tiny(), **INDEX)
    twin, wrapped = copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model)
    history = train(model, rows(), 3, steps=3)
    assert history == train(twin, rows().int(), 3, steps=3) == train(wrapped, rows(), 3, steps=3)
    close(model.state_dict(), twin.state_dict(), tol=0)
    assert train(twin, rows(), 4, steps=1) != train(model, rows(), 3, steps=1)


def test_autocast_around_it_sees_each_step():
    """Autocast keeps the casts of weights until it ends, steps of the optimizer or not."""
    model, histories = convert(tiny(), **INDEX), []
    for keeps in (True, False):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=keeps):
            histories.append(train(copy.deepcopy(model), rows(1), steps=3, stage="all"))
    assert histories[0] == histories[1]


@pytest.mark.parametrize("with_teacher", [False, True])
def test_all_parameters_learn_with_the_selection(with_teacher):
    original, ids = tiny("Llama"), rows(2)
    model = convert(copy.deepcopy(original), **INDEX)
    before = copy.deepcopy(model.state_dict())
    teacher = original if with_teacher else None
    history = train(model, ids, steps=25, lr=3e-3, stage="all", teacher=teacher)
    first, last = history[:4], history[-4:]
    for name in ("loss", "ranking"):
        assert sum(step[name] for step in last) < 0.95 * sum(step[name] for step in first)
    changed = {name for name, value in model.state_dict().items() if not value.equal(before[name])}
    assert changed == {name for name, _ in model.named_parameters()} | {"lm_head.weight"}
    assert not any(p.grad is not None for p in original.parameters())


def test_padding_moves_no_ranking_query():
    """Positions are those of the batch, with its padding."""
    model, ids, queries = convert(tiny(), **INDEX), rows(1), torch.arange(48, 64)
    mask = torch.arange(64)[None] >= 10
    with ranking_losses(model, queries) as padded:
        model(ids, attention_mask=mask.long(), use_cache=False)
    with ranking_losses(model, queries - 10) as alone:
        model(ids[:, 10:], use_cache=False)
    close(padded.loss, alone.loss)


def test_a_classifier_ranks_too():
    """Without a token for padding, of which its head would ask."""
    config = tiny().config
    config.pad_token_id = None
    model = convert(transformers.LlamaForSequenceClassification(config).eval(), **INDEX)
    (losses,) = train(model, rows(), steps=1)
    assert losses["ranking"] > 0


@pytest.mark.parametrize(
    "fault, stage, message",
    [
        ("reentrant", "ranking", "use_reentrant=False"),  # layers then run without gradients
        ("reentrant", "all", "use_reentrant=False"),
        ("infinite", "all", r"finite gradients, got losses of .*nan.* in step 0"),
    ],
)
def test_training_that_cannot_go_on_changes_nothing(fault, stage, message):
    model = convert(tiny("Qwen2"), **INDEX).train()
    if fault == "reentrant":
        checkpoint(model, reentrant=True)
    else:
        model.model.layers[1].mlp.down_proj.weight.data[0, 0] = float("inf")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        train(model, rows(), stage=stage)
    close(model.state_dict(), before, tol=0)
    assert all(p.grad is None for p in model.parameters())
    assert not any(m.dense for m in model.modules() if isinstance(m, SparseAttention))


def test_bad_input_is_refused():
    model, (text,) = convert(tiny(), **INDEX), prompts(64)
    frozen = copy.deepcopy(model).requires_grad_(False)
    for given, message in (
        (dict(steps=0), "steps must be"),
        (dict(lr=0.0), "lr must be"),
        (dict(stage="dense"), "stage must be one of 'ranking', 'all'"),
        (dict(batch_size=0), "batch_size must be"),
        (dict(ranking_weights="sum"), "ranking_weights must be"),
        (dict(ranking_queries=0), "ranking_queries must be"),
        (dict(teacher=tiny()), "teacher must be None"),
        (dict(stage="all", teacher=model), "teacher must .* have layers of its own"),
        (dict(stage="all", teacher="x"), "teacher must be an nn.Module or None, got 'x'"),
        (dict(stage="all", teacher=tiny(vocab_size=80)), "teacher must be one with 64 logits for"),
        (dict(stage="all", model=model.model), "logits for each token .* got LlamaModel"),
        (dict(stage="all", model=frozen), "model must be one with weights that require gradients"),
        (dict(generator=3), "generator must be a torch.Generator or None, got 3"),
        (dict(ids=text.float()), "ids must be a tensor of integers"),
        (dict(ids=text + 64), "ids must be token ids from 0 to 63"),
        (dict(ids=text.to("meta")), "ids must be a tensor with values"),
        (dict(model=torch.nn.Identity()), "model must have .* none in a Identity"),
        (dict(ids=text[:, :15]), "rows of 16 tokens"),
        (dict(model=tiny()), "that rank by importance='index', got none in a LlamaForCausalLM"),
        (dict(model=convert(tiny(), **SPARSE, importance="max")), "importance='index'"),
    ):
        with pytest.raises(ValueError, match=message):
            distill(**TRAIN | dict(model=model, ids=text) | given)
    for given in (8, torch.rand(4), torch.ones(1, 4).long()):
        with (
            pytest.raises(ValueError, match="queries must be positions"),
            ranking_losses(model, given),
        ):
            pass
    with ranking_losses(model, torch.arange(4)):
        with pytest.raises(ValueError, match="got a second one"):
            train(model, text)
        with pytest.raises(ValueError, match="use_cache=False"):
            call(model, text, dynamic(model))
