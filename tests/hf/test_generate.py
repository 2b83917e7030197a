"""`generate` under sparse attention: each step is what a forward of all tokens gives."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from native_sparse_attention.hf import SparseCache, use_dense_attention, use_sparse_attention
from native_sparse_attention.hf.cache import kept_means
from tests.helpers.tiny_models import (
    CACHE,
    SPARSE,
    WHOLE,
    padded,
    prompts,
    step_by_step,
    tiny,
    without_padding,
)

TOL = dict(atol=1e-4, rtol=1e-4)
close = torch.testing.assert_close
NEW = 8
WAYS = dict(
    greedy=dict(do_sample=False),
    sampling=dict(do_sample=True, temperature=0.7),
    beams=dict(do_sample=False, num_beams=3),
    static=dict(do_sample=False, cache_implementation="static"),
    lookup=dict(do_sample=False, prompt_lookup_num_tokens=3),
)
# windows of several tokens, whose compressed keys a cache keeps
WINDOWS = SPARSE | dict(compress_block_size=4, compress_block_sliding_stride=2)


def generated(model, batch, **settings):
    """New tokens [B, n] of a batch, at a fixed seed."""
    torch.manual_seed(1)
    n = batch["input_ids"].shape[1]
    batch = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    return model.generate(**batch, max_new_tokens=NEW, **settings)[:, n:]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_all_blocks_generate_what_dense_attention_does(family, way):
    model, texts = tiny(family), prompts(21, 30)
    batch = dict(input_ids=texts[0]) if way == "lookup" else padded(texts, left=True)
    expected = generated(model, batch, **WAYS[way])
    use_sparse_attention(model, **WHOLE)
    assert generated(model, batch, **WAYS[way]).equal(expected)


@pytest.mark.parametrize("way", ["greedy", "static", "lookup"])
@torch.no_grad()
def test_sparse_greedy_decoding_is_one_forward_a_step(way):
    model, (text,) = use_sparse_attention(tiny("Qwen2"), **SPARSE), prompts(30)
    found = generated(model, dict(input_ids=text), **WAYS[way])
    for _ in range(NEW):
        token = model(text, use_cache=False).logits[:, -1:].argmax(-1)
        text = torch.cat((text, token), dim=1)
    assert found.equal(text[:, 30:])


@pytest.mark.parametrize("way", ["greedy", "beams", "static"])
def test_sparse_batch_generates_what_sequences_do_alone(way):
    model, texts = use_sparse_attention(tiny("Gemma2"), **SPARSE), prompts(21, 30)
    found = generated(model, padded(texts, left=True), **WAYS[way])
    for text, row in zip(texts, found):
        given = dict(input_ids=text, attention_mask=torch.ones_like(text))
        assert generated(model, given, **WAYS[way])[0].equal(row)


@pytest.mark.parametrize("settings", [SPARSE, WINDOWS], ids=["tokens", "windows"])
def test_assisted_decoding_generates_what_greedy_does(settings):
    """The cache is cropped where a guess of the assistant is refused."""
    model, (text,) = use_sparse_attention(tiny(), **settings), prompts(30)
    assistant = copy.deepcopy(use_dense_attention(copy.deepcopy(model)))
    torch.nn.init.normal_(assistant.lm_head.weight, std=0.3)
    given = dict(input_ids=text, attention_mask=torch.ones_like(text))
    expected = generated(model, given, **WAYS["greedy"])
    found = generated(model, given, **WAYS["greedy"], assistant_model=assistant)
    assert found.equal(expected)
    cache = {CACHE: SparseCache(model.config)}
    found = generated(model, given, **WAYS["greedy"], assistant_model=assistant, **cache)
    assert found.equal(expected)


@pytest.mark.parametrize("importance", ["logits", "max", "probs"])
@torch.no_grad()
def test_windows_over_caches(importance):
    """Compressed keys that a cache keeps are those of one forward."""
    model = use_sparse_attention(tiny("Gemma3"), **WINDOWS, importance=importance)
    texts = prompts(29, 36)
    alone = [model(text).logits for text in texts]
    for cache in (SparseCache(model.config), transformers.DynamicCache(config=model.config)):
        close(step_by_step(model, texts[1], 3, cache), alone[1], **TOL)
    assert not any(hasattr(layer, "means") for layer in cache.layers)
    batch = padded(texts, left=True)
    ids, mask = batch.pop("input_ids"), batch["attention_mask"]
    for cache in (
        SparseCache(model.config),
        transformers.StaticCache(config=model.config, max_cache_len=48),
    ):
        out = step_by_step(model, ids, 30, cache, **batch)
        for one, expected in zip(without_padding(out, mask), alone):
            close(one, expected, **TOL)


@pytest.mark.parametrize("way", ["greedy", "beams"])
@pytest.mark.parametrize("settings", [SPARSE, WINDOWS], ids=["tokens", "windows"])
def test_sparse_cache_generates_what_a_dynamic_cache_does(settings, way):
    model, (text,) = use_sparse_attention(tiny(), **settings), prompts(30)
    given = dict(input_ids=text.repeat(2, 1), attention_mask=torch.ones(2, 30))
    expected = generated(model, given, **WAYS[way])
    found = generated(model, given, **WAYS[way], **{CACHE: SparseCache(model.config)})
    assert found.equal(expected)


@torch.no_grad()
def test_sparse_cache_keeps_its_windows_as_it_changes():
    model, (text,) = use_sparse_attention(tiny(), **WINDOWS), prompts(30)
    cache = SparseCache(model.config)
    changes = (
        lambda: None,
        lambda: cache.crop(-3),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.batch_select_indices(torch.tensor([3, 0, 1])),
        lambda: cache.reorder_cache(torch.tensor([2, 0, 1])),
    )
    model(text.repeat(2, 1), **{CACHE: cache})
    layer, rows = cache.layers[0], (2, 2, 4, 3, 3)
    for change, B in zip(changes, rows):
        change()
        for new in (5, 1):  # another tensor, and storage with room
            model(text[:, :new].repeat(B, 1), **{CACHE: cache})
            means = kept_means(layer.keys, 4, 2)
            assert means.shape[::2] == (B, layer.keys.shape[2] // 2)
            close(means[:, :, 1:], layer.keys.unfold(2, 4, 2).mean(-1))
    cache.reset()
    model(text, **{CACHE: cache})
    assert kept_means(layer.keys, 4, 2).shape[2] == 15
    tokens = SparseCache(use_sparse_attention(model, **SPARSE).config)
    model(text, **{CACHE: tokens})
    assert all(layer.means is None for layer in tokens.layers)


@torch.no_grad()
def test_a_step_over_a_sparse_cache_copies_no_other_tokens():
    """The keys stay where they are, until there is no room or another call has moved them; what was
    taken back is written over."""
    model, (text,) = use_sparse_attention(tiny(), **SPARSE), prompts(200)
    expected = model(text, use_cache=False).logits
    cache = SparseCache(model.config)
    layer = cache.layers[0]
    model(text[:, :30], **{CACHE: cache})
    places, earlier = [], None
    for t in range(30, 200):
        if t == 60:
            cache.crop(-5)
            model(text[:, 55:60], **{CACHE: cache})
        if t == 100:
            cache.reorder_cache(torch.tensor([0]))
        logits = model(text[:, t : t + 1], **{CACHE: cache}).logits
        close(logits, expected[:, t : t + 1], **TOL)
        places.append(layer.keys.data_ptr())
        if t == 35:
            earlier = layer.keys, layer.keys.clone()
    assert torch.equal(*earlier)
    assert len(set(places)) <= 4 and len(set(places[:65])) == 1 and places[69] != places[70]
    twin = copy.deepcopy(cache)
    model(text[:, :1], **{CACHE: twin})
    assert (len(layer.keys[0, 0]), len(twin.layers[0].keys[0, 0])) == (200, 201)
    cache.reset()
    assert not layer.stores


def test_gradients_through_a_sparse_cache():
    """Of chunks one after the other: nothing that autograd saved is written to."""
    model, (text,) = use_sparse_attention(tiny(num_hidden_layers=1), **SPARSE).train(), prompts(24)
    grads = []
    for cache in (SparseCache(model.config), transformers.DynamicCache(config=model.config)):
        model.zero_grad()
        outs = [model(chunk, **{CACHE: cache}).logits for chunk in text.split([16, 4, 4], dim=1)]
        sum(out.square().sum() for out in outs).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    close(*grads)


@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_dense_length_over_a_cache(static):
    """Queries before a position attend to all keys, also where a prefill or a step begins there."""
    settings = SPARSE | dict(dense_length=25)
    model, texts = use_sparse_attention(tiny(), **settings), prompts(33, 36)
    alone = [model(text).logits for text in texts]
    use_sparse_attention(model, **SPARSE)
    assert (model(texts[1]).logits - alone[1]).abs().max() > 1e-2
    use_sparse_attention(model, **settings)
    batch = padded(texts, left=True)
    ids, mask = batch.pop("input_ids"), batch["attention_mask"]
    for first in (20, 30):
        cache = transformers.DynamicCache(config=model.config)
        if static:
            cache = transformers.StaticCache(config=model.config, max_cache_len=40)
        again = copy.deepcopy(cache)
        close(step_by_step(model, texts[1], first, cache), alone[1], **TOL)
        out = step_by_step(model, ids, first, again, **batch)
        for one, expected in zip(without_padding(out, mask), alone):
            close(one, expected, **TOL)


@torch.no_grad()
def test_compiled_steps_over_a_static_cache():
    """One graph serves steps at all lengths."""
    model = use_sparse_attention(tiny(num_hidden_layers=1), **SPARSE)
    (text,) = prompts(36)
    expected = model(text).logits
    cache = transformers.StaticCache(config=model.config, max_cache_len=40)
    outs = [model(text[:, :30], **{CACHE: cache}).logits]
    torch._dynamo.reset()
    step = torch.compile(model, backend="eager", fullgraph=True)
    for t in range(30, 36):
        with torch._dynamo.config.patch(error_on_recompile=t > 30):
            mask = model.prepare_inputs_for_generation(
                text[:, : t + 1], next_sequence_length=1, attention_mask=torch.ones(1, t + 1),
                use_cache=True, is_first_iteration=False, **{CACHE: cache},
            )["attention_mask"]  # fmt: skip
            positions = torch.tensor([[t]])
            given = dict(attention_mask=mask, position_ids=positions)
            outs.append(step(text[:, t : t + 1], **given, **{CACHE: cache}).logits.clone())
    close(torch.cat(outs, dim=1), expected, **TOL)
