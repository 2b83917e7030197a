"""`generate` under sparse attention: each step is what a forward of all tokens gives."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from native_sparse_attention.hf import SparseCache, use_sparse_attention
from native_sparse_attention.hf.cache import kept_means
from tests.helpers.tiny_models import (
    CACHE,
    SPARSE,
    prompts,
    tiny,
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
    assert all(kept_means(layer.keys, 1, 1) is None for layer in tokens.layers)


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
