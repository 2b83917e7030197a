"""Training of the model of this library in transformers: Trainer, adapters, graphs, rankings."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers

from native_sparse_attention.hf import NSAForCausalLM, ranking_losses
from tests.helpers.batches import padded
from tests.helpers.tiny_models import checkpoint, close, gradients, native, prompts

TEXT = b"the quick brown fox jumps over the lazy dog, and then it runs home. " * 12


def test_a_ranking_learns_beside_the_model():
    model = native("index", ranking_queries=16, dense_layers=[0]).train()
    batch = padded(prompts(33, 40), left=True)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    out, found = gradients(model, batch)
    assert out.ranking_loss > 0
    names = {name for name in found if "to_index" in name}
    assert names == {"model.layers.1.self_attn.attention.to_index.weight"}
    index = found[names.pop()]
    assert index.abs().sum() > 0
    queries = torch.arange(40)
    both = model(**batch, ranking_queries=queries)
    with ranking_losses(model, queries) as ranking:
        plain = model(**{name: t for name, t in batch.items() if name != "labels"}, use_cache=False)
    close(both.ranking_loss, ranking.loss)
    with torch.no_grad():
        alone = model.eval()(**batch)
        assert alone.ranking_loss is None  # not in inference mode
    close(both.loss, alone.loss + both.ranking_loss)
    close(plain.logits, both.logits)
    with pytest.raises(ValueError, match="use_cache=False"):
        model(**batch, ranking_queries=4, use_cache=True)
    weighed = model(**batch, ranking_queries=queries, ranking_weights="mass").ranking_loss
    assert (weighed - both.ranking_loss).abs() > 1e-4


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_accumulated_parts_give_the_gradients_of_the_batch(name):
    """Labels weigh alike, and rankings as the labels of their part that logits predict."""
    model, ids = native("index"), torch.cat(prompts(40, 40))
    labels = ids.clone()
    labels[0, 3:30] = labels[1, 0] = -100
    count = labels[:, 1:].ne(-100).sum()
    if name == "shift_labels":  # as a view
        labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
    given = {"ranking_queries": torch.arange(40), "use_cache": False, name: labels}
    whole, expected = gradients(model, dict(given, input_ids=ids))
    model.zero_grad()
    given["num_items_in_batch"], parts = count, []
    for row in (slice(0, 1), slice(1, 2)):
        parts.append(model(ids[row], **given | {name: labels[row]}))
        parts[-1].loss.backward()
    weights = torch.tensor([12, 39]) / 51
    ranking = sum(w * part.ranking_loss for w, part in zip(weights, parts, strict=True))
    close(sum(part.loss for part in parts), whole.loss - whole.ranking_loss + ranking)
    for key, p in model.named_parameters():
        if "to_index" not in key:
            close(p.grad, expected[key])


def test_a_batch_without_labels_teaches_nothing():
    model, (ids,) = native("index", ranking_queries=8).train(), prompts(40)
    batch = dict(input_ids=ids, labels=torch.full_like(ids, -100))
    for given in (
        batch,
        batch | dict(num_items_in_batch=0),
        dict(input_ids=ids[:, :1], labels=ids[:, :1].int()),
    ):
        out, found = gradients(model, given)
        assert out.loss == 0 and found.keys() == {name for name, _ in model.named_parameters()}
        assert not any(grad.any() for grad in found.values())


class Rows(torch.utils.data.Dataset):
    """Letters of a text, as tokens below 64."""

    def __init__(self, length=48):
        ids = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long() % 63 + 1
        self.rows = ids[: len(ids) // length * length].view(-1, length)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return dict(input_ids=self.rows[i], labels=self.rows[i])


def trainer(model, folder, steps=12, **settings):
    pytest.importorskip("accelerate", reason="Trainer needs it")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-2,
        lr_scheduler_type="constant", logging_steps=1, save_steps=6, report_to="none", seed=0,
        use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False, **settings,
    )  # fmt: skip
    return transformers.Trainer(model=model, args=arguments, train_dataset=Rows())


def losses_of(run):
    return [row["loss"] for row in run.state.log_history if "loss" in row]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_trainer_shifts_labels_that_it_smooths(tmp_path):
    """Else the model learns to copy its input."""
    run = trainer(native("one_softmax"), tmp_path, steps=25, label_smoothing_factor=0.1)
    assert run.evaluate(run.train_dataset)["eval_loss"] > 0
    assert len(run.predict(run.train_dataset).predictions) == len(run.train_dataset)
    run.train_dataset.rows = (torch.arange(48) % 61 + 3).expand(8, -1)
    run.train()
    ids = run.train_dataset.rows[:1]
    with torch.no_grad():
        found = run.model.eval()(ids).logits.argmax(-1)
    assert (found[:, :-1] == ids[:, 1:]).float().mean() > 0.9


@pytest.mark.slow(one_of=2)
# names that newer releases of transformers give up
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("form", ["branches", "index"])
def test_trainer_learns_and_resumes(form, tmp_path):
    settings = dict(initializer_range=0.05, ranking_queries=8 if form == "index" else None)
    run = trainer(native(form, **settings), tmp_path, gradient_checkpointing=True)
    run.train()
    losses = losses_of(run)
    assert len(losses) == 12 and sum(losses[-3:]) < 0.8 * sum(losses[:3])
    again = trainer(native(form, **settings), tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    close(again.model.state_dict(), run.model.state_dict(), tol=1e-2)
    close(losses_of(again)[-6:], losses[-6:], tol=1e-2)
    run.save_model(str(tmp_path / "last"))
    loaded = NSAForCausalLM.from_pretrained(tmp_path / "last")
    close(loaded.state_dict(), run.model.state_dict(), tol=0)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("form", ["branches", "one_softmax"])
def test_lora_trains_adapters_alone_and_merges(form):
    peft = pytest.importorskip("peft")
    model, (text,) = native(form), prompts(40)
    before = copy.deepcopy(model.state_dict())
    names = ["to_qkv", "combine_heads", "gate_proj", "up_proj", "down_proj"]
    settings = peft.LoraConfig(r=2, lora_alpha=8, target_modules=names, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(copy.deepcopy(model), settings).train()
    checkpoint(adapted.get_base_model(), reentrant=True)
    adapted.enable_input_require_grads()
    close(adapted(text).logits, model(text).logits)
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * len(names) and all("lora" in name for name in trained)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        adapted(text, labels=text).loss.backward()
        optimizer.step()
    for name, value in adapted.get_base_model().state_dict().items():
        if "lora" not in name:
            close(value, before[name.replace("base_layer.", "")], tol=0)
    with torch.no_grad():
        out = adapted.eval()(text).logits
        assert (out - model(text).logits).abs().max() > 1e-3
        merged = adapted.merge_and_unload()
        assert type(merged) is NSAForCausalLM
        close(merged(text).logits, out, tol=1e-3)
