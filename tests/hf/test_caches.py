"""Caches of transformers under sparse attention, and in models of `SparseAttention` layers."""

import copy

import pytest
import torch
import transformers

from native_sparse_attention.hf import (
    SparseCache,
    StaticSparseCache,
    attention,
    convert,
    use_sparse_attention,
)
from native_sparse_attention.hf.cache import kept_means
from tests.helpers.batches import CACHE, call, call_in_pieces, dynamic, padded, static
from tests.helpers.tiny_models import FORMS, SPARSE, close, native, prompts, tiny


def sparse(l, d, **config):
    sizes = dict(compress_block_size=l, compress_block_sliding_stride=d)
    return use_sparse_attention(tiny(**config), **SPARSE | sizes)


def steps(model, ids, cache, first, chunk=1):
    """Logits of tokens from `first` on, so many at a time."""
    batch = dict(input_ids=ids, position_ids=torch.arange(ids.shape[1]).expand_as(ids))
    return call_in_pieces(model, batch, cache, *range(first, ids.shape[1] + 1, chunk))


# of the drop-in


@torch.no_grad()
def test_rows_that_change_places():
    """As beam search moves them, with their means. Of a `SparseCache`: test_stride.py."""
    model, texts = sparse(4, 4), torch.cat(prompts(40, 40, 40))
    expected, order = model(texts, use_cache=False).logits, torch.tensor([2, 0, 0])
    cache = StaticSparseCache(model.config, max_cache_len=40)
    call(model, texts[:, :30], cache)
    cache.reorder_cache(order)
    close(steps(model, texts[order], cache, 30), expected[order, 30:])


@torch.no_grad()
def test_a_step_over_a_sparse_cache_copies_no_other_tokens():
    """The keys stay where they are, until storage is full or another call has moved them; what was
    taken back is written over."""
    model, (text,) = sparse(1, 1), prompts(200)
    expected = model(text, use_cache=False).logits
    cache = SparseCache(model.config)
    layer = cache.layers[0]
    call(model, text[:, :30], cache)
    places, earlier = [], None
    for t in range(30, 200):
        if t == 60:
            cache.crop(-5)
            call(model, text[:, 55:60], cache)
        if t == 100:
            cache.reorder_cache(torch.tensor([0]))
        close(call(model, text[:, t : t + 1], cache), expected[:, t : t + 1])
        places.append(layer.keys.data_ptr())
        if t == 35:
            earlier = layer.keys, layer.keys.clone()
    assert torch.equal(*earlier)
    assert len(set(places)) <= 6 and len(set(places[3:34])) == 1 and places[69] != places[70]
    twin = copy.deepcopy(cache)
    call(model, text[:, :1], twin)
    assert (len(layer.keys[0, 0]), len(twin.layers[0].keys[0, 0])) == (200, 201)
    cache.reset()
    assert not layer.stores and kept_means(twin.layers[0].keys, 1, 1) is None


@pytest.mark.parametrize("l, d", [(8, 4), (4, 4), (6, 2), (1, 1)])
@torch.no_grad()
def test_static_sparse_cache_keeps_windows(l, d, monkeypatch):
    """Steps and chunks of any length are one forward, also after tokens were taken back."""
    model, ids = sparse(l, d), torch.cat(prompts(49, 49))
    expected = model(ids, use_cache=False).logits
    for first, chunk in ((33, 1), (1, 8), (5, 11), (33, 4)):
        cache = StaticSparseCache(model.config, max_cache_len=61)
        close(call(model, ids[:, :first], cache), expected[:, :first])
        with monkeypatch.context() as patch:
            if l > 1:  # compressed keys of a step come from the cache
                patch.setattr(attention, "windows_of", None)
            close(steps(model, ids, cache, first, chunk), expected[:, first:])
    if hasattr(cache.layers[0], "crop"):  # newer releases take tokens back
        cache.crop(-16)
        close(steps(model, ids, cache, 33), expected[:, 33:])


def test_wrong_arguments():
    for make, settings, message in (
        (StaticSparseCache, dict(config=None, max_cache_len=8), "config must be model.config"),
        (SparseCache, dict(config=None), "config must be model.config, got None"),
        (StaticSparseCache, dict(max_cache_len=0), "max_cache_len must be an integer of at least"),
        (StaticSparseCache, dict(max_cache_len=8.0), "max_cache_len must be .* got 8.0"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**dict(config=tiny().config) | settings)


@pytest.mark.slow(one_of=2)
@pytest.mark.parametrize("l", [1, 8])
@torch.no_grad()
def test_one_graph_serves_steps_of_all_lengths(l):
    """Over either static cache, which keeps the windows of several tokens."""
    model = sparse(l, l, num_hidden_layers=1)
    (text,) = prompts(36)
    expected = model(text).logits
    cache = static(model, 40) if l == 1 else StaticSparseCache(model.config, max_cache_len=40)
    outs = [call(model, text[:, :30], cache)]
    torch._dynamo.reset()
    step = torch.compile(model, backend="eager", fullgraph=True)
    for t in range(30, 36):
        with torch._dynamo.config.patch(error_on_recompile=t > 30):
            out = call(step, text[:, t : t + 1], cache, position_ids=torch.tensor([[t]]))
            outs.append(out.clone())
    close(torch.cat(outs, dim=1), expected)


# of `SparseAttention` layers


@torch.no_grad()
def test_one_cache_serves_texts_one_after_the_other():
    """A copy goes on by itself, also of a cache that was begun in inference mode."""
    model, texts = native("index"), prompts(40, 31)
    cache = static(model)
    for text in texts:
        expected = model(text, use_cache=False).logits
        with torch.inference_mode():
            call(model, text[:, :25], cache)
        for held in (copy.deepcopy(cache), cache):
            close(steps(model, text, held, 25), expected[:, 25:])
        cache.reset()
        assert cache.get_seq_length() == 0
    assert cache.layers[0].cache.nbytes > 0  # the storage stays


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
        call(model, text[:, :first], cache)
        assert cache.layers[0].cache.least_length == (dense if first >= dense else 0)
        for i in range(first, length):
            out = call(step, text[:, i : i + 1], cache, position_ids=torch.tensor([[i]]))
            close(out, expected[:, i : i + 1])


@pytest.mark.parametrize("name", ["converted", "native"])
@torch.no_grad()
def test_calls_of_another_form_are_refused(name):
    model = convert(tiny(), **SPARSE) if name == "converted" else native("index")
    (text,) = prompts(12)
    offloaded, held, short = (dynamic(model) for _ in range(3))
    offloaded.offloading = True  # its constructor asks for a GPU
    call(tiny(), text, held)
    model(**padded([text, text[:, :9]], left=True), **{CACHE: short})
    sliding = transformers.StaticCache(config=tiny("Gemma3").config, max_cache_len=48)
    for ids, given, message in (
        (text, {CACHE: sliding}, "must be a DynamicCache or a StaticCache"),
        (text, {CACHE: offloaded}, "an offloaded DynamicCache"),
        (text, {CACHE: held}, "12 tokens of another"),
        (text[:, :1].expand(2, 1), {CACHE: short}, r"show the \[12, 9\] tokens"),
        (text, dict(position_ids=2 * torch.arange(12)[None]), "position_ids must count up by 1"),
        (text, dict(output_attentions=True), "output_attentions"),
    ):
        with pytest.raises(ValueError, match=message):
            model(ids, **given)
    model.train()
    for layer in model.model.layers:
        layer.self_attn.dropout = 0.1
    with pytest.raises(ValueError, match="attention_dropout"):
        model(text)


@torch.no_grad()
def test_what_a_static_cache_cannot_do_is_refused():
    model, (text,) = native("one_softmax"), prompts(30)
    last = dict(position_ids=torch.tensor([[20]]))
    cache = static(model, 20)
    with pytest.raises(ValueError, match="cache is full: row 0 holds 0 of max_length=20 tokens"):
        call(model, text, cache)
    call(model, text[:, :20], cache)
    with pytest.raises(ValueError, match="cache is full: row 0 holds 20 of max_length=20 tokens"):
        call(model, text[:, 20:21], cache, **last)
    with pytest.raises(ValueError, match="must be a DynamicCache to be cropped"):
        cache.layers[0].crop(-1)
    held = static(model)
    call(tiny(), text, held)
    with pytest.raises(ValueError, match="30 tokens of another"):
        call(model, text, held)
    cache, mask = static(model), torch.ones(1, 21)
    call(model, text[:, :20], cache)
    mask[:, 3] = 0
    for wrong, told in (
        (mask, "must show the .20. tokens"),
        (mask[:, :20], r"attention_mask must have shape \[1, 21\], got \[1, 20\]"),
    ):
        with pytest.raises(ValueError, match=told):
            call(model, text[:, 20:21], cache, attention_mask=wrong, **last)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@torch.no_grad()
def test_prefill_in_chunks_with_padding(compiled):
    """transformers compiles such a prefill on a GPU, over a cache that it initialises early."""
    model, batch = native("one_softmax", num_hidden_layers=1), padded(prompts(17, 14), left=True)
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    given |= dict(max_new_tokens=9, do_sample=False)
    expected = model.generate(**given)
    torch._dynamo.reset()
    how = transformers.CompileConfig(backend="eager", fullgraph=True, mode=None)
    how._compile_all_devices = compiled
    ways = dict(cache_implementation="static", prefill_chunk_size=8, compile_config=how)
    assert torch.equal(model.generate(**given, **ways), expected)
