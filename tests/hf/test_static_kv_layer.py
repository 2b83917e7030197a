"""Models whose layers are `SparseAttention` over a `StaticCache` of transformers."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from native_sparse_attention.hf import convert, settings
from tests.helpers.tiny_models import (
    CACHE,
    FORMS,
    SPARSE,
    native,
    padded,
    prompts,
    static,
    step_by_step,
    tiny,
)

TOL = dict(atol=1e-4, rtol=1e-4)
close = torch.testing.assert_close
MODELS = dict(
    {f"native, {form}": lambda form=form, **given: native(form, **given) for form in FORMS},
    converted=lambda **given: convert(tiny("Qwen3", **given), **SPARSE),
    ranked=lambda **given: convert(tiny(**given), **SPARSE, importance="index"),
    mixed=lambda **given: convert(tiny("Gemma3", **given), **SPARSE),
)
every = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def generate(model, batch, **given):
    batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return model.generate(**batch, max_new_tokens=9, do_sample=False, **given)


@torch.no_grad()
def test_one_cache_serves_texts_one_after_the_other():
    model, texts = native("index"), prompts(40, 31)
    cache = static(model)
    for text in texts:
        expected = model(text, use_cache=False).logits
        close(step_by_step(model, text, 25, cache), expected, **TOL)
        cache.reset()
        assert cache.get_seq_length() == 0
    assert cache.layers[0].cache.nbytes > 0  # the storage stays


@torch.no_grad()
def test_a_copy_goes_on_by_itself():
    model, (text,) = convert(tiny(), **SPARSE), prompts(40)
    expected, cache = model(text, use_cache=False).logits, static(model)
    model(text[:, :30], **{CACHE: cache})
    other = copy.deepcopy(cache)
    for held in (cache, other):
        given = dict(position_ids=torch.arange(30, 40)[None]) | {CACHE: held}
        close(model(text[:, 30:], **given).logits, expected[:, 30:], **TOL)


@pytest.mark.parametrize("length", [pytest.param(34, marks=pytest.mark.slow), 25])
@torch.no_grad()
def test_dense_length_in_compiled_steps(length):
    """Before `dense_length`, past it, and where the whole cache lies before it."""
    dense = 25
    form, (text,) = dict(FORMS["one_softmax"], dense_length=dense), prompts(length)
    model = native(form, num_hidden_layers=1)
    expected = model(text, use_cache=False).logits
    torch._dynamo.reset()
    step = torch.compile(model, backend="eager", fullgraph=True)
    for first in (22, 30):
        if first >= length:
            continue
        cache = static(model, length)
        model(text[:, :first], **{CACHE: cache})
        assert cache.layers[0].cache.least_length == (dense if first >= dense else 0)
        for i in range(first, length):
            given = dict(position_ids=torch.tensor([[i]])) | {CACHE: cache}
            close(step(text[:, i : i + 1], **given).logits, expected[:, i : i + 1], **TOL)


@torch.no_grad()
def test_what_a_static_cache_cannot_do_is_refused():
    model, (text,) = native("one_softmax"), prompts(30)
    cache = static(model, 20)
    with pytest.raises(ValueError, match="full"):
        model(text, **{CACHE: cache})
    model(text[:, :20], **{CACHE: cache})
    with pytest.raises(ValueError, match="is full: it holds 20 of 20 tokens, got 1 more"):
        model(text[:, 20:21], position_ids=torch.tensor([[20]]), **{CACHE: cache})
    with pytest.raises(ValueError, match="must be a DynamicCache to be cropped"):
        cache.layers[0].crop(-1)
    held = static(model)
    tiny()(text, **{CACHE: held})
    with pytest.raises(ValueError, match="30 tokens of another"):
        model(text, **{CACHE: held})
    padding, cache = torch.ones(1, 21), static(model, 20)
    padding[:, :2] = 0
    model(text[:, :20], attention_mask=padding[:, :20], **{CACHE: cache})
    with pytest.raises(ValueError, match="is full: it holds 20 of 20 tokens, got 1 more"):
        model(text[:, 20:21], attention_mask=padding, **{CACHE: cache})
    other = static(model)
    model(text[:, :10], **{CACHE: other})
    mask = torch.ones(1, 11)
    mask[:, 3] = 0
    with pytest.raises(ValueError, match="must show the .10. tokens"):
        model(text[:, 10:11], attention_mask=mask, **{CACHE: other})


def test_a_cache_begun_in_inference_mode_goes_on_in_another():
    model, (text,) = native("index"), prompts(40)
    with torch.inference_mode():
        expected, cache = model(text, use_cache=False).logits, static(model)
        model(text[:, :30], **{CACHE: cache})
    with torch.no_grad():
        given = dict(position_ids=torch.arange(30, 40)[None]) | {CACHE: cache}
        close(model(text[:, 30:], **given).logits, expected[:, 30:].clone(), **TOL)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@torch.no_grad()
def test_prefill_in_chunks_with_padding(compiled):
    """transformers compiles such a prefill on a GPU, over a cache that it initialises early."""
    model, batch = native("one_softmax", num_hidden_layers=1), padded(prompts(17, 14), left=True)
    expected = generate(model, batch)
    torch._dynamo.reset()
    how = transformers.CompileConfig(backend="eager", fullgraph=True, mode=None)
    how._compile_all_devices = compiled
    ways = dict(cache_implementation="static", prefill_chunk_size=8)
    assert torch.equal(generate(model, batch, **ways, compile_config=how), expected)


@torch.no_grad()
def test_masks_that_contradict_a_static_cache_are_refused():
    model, (text,), key = native("one_softmax"), prompts(30), torch.arange(48)
    cache = static(model)
    model(text[:, :10], **{CACHE: cache})
    given = dict(position_ids=torch.tensor([[10]])) | {CACHE: cache}
    with pytest.raises(
        ValueError, match=r"attention_mask must have shape \[1, 11\], got \[1, 10\]"
    ):
        model(text[:, 10:11], attention_mask=torch.ones(1, 10), **given)
    for visible, end in ((key < 5, 5), (key < 20, 20)):
        with pytest.raises(ValueError, match=f"must show the 11 keys .* got {end}"):
            model(text[:, 10:11], attention_mask=visible[None, None, None], **given)
    expected = model(text[:, :11], use_cache=False).logits[:, 10:]
    mask = (key < 11)[None, None, None]
    close(model(text[:, 10:11], attention_mask=mask, **given).logits, expected, **TOL)


@pytest.mark.slow
@torch.no_grad()
def test_one_graph_past_a_length_that_other_models_count_from(monkeypatch):
    """`dense_length` of `use_sparse_attention` says nothing about these layers."""
    monkeypatch.setitem(settings.DEFAULTS, "dense_length", 36)
    model, (text,) = native("one_softmax", num_hidden_layers=1), prompts(34)
    how = transformers.CompileConfig(backend="eager", fullgraph=True, mode=None)
    how._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    batch = dict(input_ids=text, attention_mask=torch.ones_like(text))
    generate(model, batch, cache_implementation="static", compile_config=how)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
