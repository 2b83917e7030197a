"""Caches under settings that change, and masks that look like those that layers exchange."""

import itertools

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from native_sparse_attention.hf import (
    SparseCache,
    distill,
    load_converted,
    ranking_losses,
    use_sparse_attention,
)
from tests.helpers.tiny_models import CACHE, SPARSE, WHOLE, native, padded, prompts, tiny

TOL = dict(atol=1e-4, rtol=1e-4)
close = torch.testing.assert_close
WINDOWS = dict(SPARSE, compress_block_size=8, compress_block_sliding_stride=2)


def last(model, ids, cache, first):
    """Logits of the last token, after `first` tokens in a call of their own."""
    given = {CACHE: cache}
    model(ids[:, :first], **given)
    return model(ids[:, first:], **given).logits[:, -1]


@torch.no_grad()
def test_windows_without_a_ranking():
    model, (ids,) = tiny(), prompts(50)
    use_sparse_attention(model, **dict(WINDOWS, num_selected_blocks=0))
    expected = model(ids, use_cache=False).logits[:, -1]
    close(last(model, ids, SparseCache(model.config), 44), expected, **TOL)


def test_inference_mode_and_then_generate():
    model, (ids,) = tiny(), prompts(50)
    use_sparse_attention(model, **dict(WINDOWS, compress_block_sliding_stride=4))
    cache = SparseCache(model.config)
    with torch.inference_mode():
        last(model, ids[:, :48], cache, 44)
    given = dict(attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    found = model.generate(ids, **given, **{CACHE: cache})
    assert torch.equal(found, model.generate(ids, **given, use_cache=False))


@torch.no_grad()
def test_means_of_other_windows_are_not_read():
    model, (ids,) = tiny(), prompts(50)
    use_sparse_attention(model, **WINDOWS)
    cache = SparseCache(model.config)
    model(ids[:, :44], **{CACHE: cache})
    use_sparse_attention(model, **dict(WINDOWS, compress_block_size=2))
    expected = model(ids[:, :44], use_cache=False)  # the second layer reads what the first gave
    del expected
    fresh = transformers.DynamicCache(config=model.config)
    for layer, (keys, values) in enumerate((x.keys, x.values) for x in cache.layers):
        fresh.update(keys.clone(), values.clone(), layer)
    found = model(ids[:, 44:], **{CACHE: cache}).logits
    close(found, model(ids[:, 44:], **{CACHE: fresh}).logits, **TOL)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int64])
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
@torch.no_grad()
def test_integer_masks_of_any_dtype(family, dtype):
    """Of the dtypes of the masks that layers exchange too."""
    model, (ids,) = tiny(family), prompts(12)
    use_sparse_attention(model, **WHOLE)
    visible = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    for T in (1, 2, 12):
        expected = model(ids[:, :T], attention_mask=visible[:, :, :T, :T]).logits
        found = model(ids[:, :T], attention_mask=visible[:, :, :T, :T].to(dtype)).logits
        close(found, expected, **TOL)
        if T == 12 or family == "Gemma2":  # whose caches hold a window, masks of 4 axes all keys
            continue
        hidden = torch.tensor([False, True])[:, None, None, None]  # a first token that is padding
        pair = ids[:, :1].expand(2, -1)
        outs = [model(pair, attention_mask=mask).logits for mask in (hidden.to(dtype), hidden)]
        close(*outs, **TOL)
        caches = [transformers.DynamicCache(config=model.config) for _ in range(2)]
        outs = []
        for cache, mask in zip(caches, (visible, visible.to(dtype))):
            model(ids[:, :-T], **{CACHE: cache})
            steps = model(ids[:, -T:], attention_mask=mask[:, :, -T:], **{CACHE: cache})
            outs.append(steps.logits)
        close(outs[1], outs[0], **TOL)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.int32, torch.int64])
@torch.no_grad()
def test_masks_of_a_step_over_a_static_cache(dtype):
    """0 says that a key is padding, or not written."""
    model, (ids,) = use_sparse_attention(tiny(), **WHOLE), prompts(10)
    expected = model(ids, use_cache=False).logits[:, -1:]
    for length in (16, 10):
        cache = transformers.StaticCache(config=model.config, max_cache_len=length)
        model(ids[:, :9], **{CACHE: cache})
        seen = (torch.arange(length) < 10)[None, None, None].to(dtype)
        out = model(ids[:, 9:], attention_mask=seen, position_ids=torch.tensor([[9]]),
                    **{CACHE: cache}).logits  # fmt: skip
        close(out, expected, **TOL)


@pytest.mark.parametrize("kind", ["drop-in", "native"])
@torch.no_grad()
def test_masks_of_another_width_are_refused(kind):
    """Of the dtype of masks between layers too."""
    model = use_sparse_attention(tiny(), **WHOLE) if kind == "drop-in" else native("index")
    ids = prompts(8)[0]
    for T, width in itertools.product((1, 2, 5), (1, 3, 6, 7, 9, 16)):
        cache = transformers.DynamicCache(config=model.config)
        model(ids[:, : 8 - T], **{CACHE: cache})
        mask = torch.ones(1, 1, min(T, 2), width, dtype=torch.int16)
        with pytest.raises(ValueError, match=r"attention_mask must have shape \[1, S\] or"):
            model(ids[:, 8 - T :], attention_mask=mask, position_ids=torch.arange(8 - T, 8)[None],
                  **{CACHE: cache})  # fmt: skip
        if T > 1:
            mask = torch.ones(1, 1, 2, 7, dtype=torch.int16)
            with pytest.raises(ValueError, match=r"attention_mask must have shape \[1, S\] or"):
                model(ids[:, :T], attention_mask=mask)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bool, torch.int16])
@torch.no_grad()
def test_masks_of_a_compiled_step_over_a_static_cache(dtype):
    """A graph serves a dtype: padding, and keys that are not written, are values of the mask."""
    model, ids = use_sparse_attention(tiny(), **WHOLE), torch.cat(prompts(10, 10))
    compiled = torch.compile(model, backend="eager", dynamic=False)
    real = torch.ones(2, 10, dtype=torch.bool)
    real[1, :3] = False
    expected = model(ids, attention_mask=real, use_cache=False).logits[:, -1:]
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    model(ids[:, :9], attention_mask=real[:, :9], **{CACHE: cache})
    seen = torch.nn.functional.pad(real, (0, 6))[:, None, None].to(dtype)
    out = compiled(ids[:, 9:], attention_mask=seen, position_ids=torch.tensor([[9]]),
                   **{CACHE: cache}).logits  # fmt: skip
    close(out, expected, **TOL)


@torch.inference_mode()
def test_masks_that_are_written_anew_in_inference_mode():
    """They count no writes: each forward looks again."""
    model, (ids,) = use_sparse_attention(tiny(), **WHOLE), prompts(10)
    expected, seen = model(ids, use_cache=False).logits[:, -1:], torch.ones(1, 1, 1, 16).short()
    for last in (16, 10):
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        model(ids[:, :9], **{CACHE: cache})
        seen.copy_(torch.arange(16) < last)
        out = model(ids[:, 9:], attention_mask=seen, position_ids=torch.tensor([[9]]),
                    **{CACHE: cache}).logits  # fmt: skip
    close(out, expected, **TOL)


def test_outputs_that_models_view():
    config = transformers.JetMoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_key_value_heads=2, kv_channels=8, num_local_experts=2, num_experts_per_tok=2,
    )  # fmt: skip
    model, (ids,) = transformers.JetMoeForCausalLM(config).eval(), prompts(40)
    expected = model(ids).logits
    close(use_sparse_attention(model)(ids).logits, expected, **TOL)


@pytest.mark.kernels
@torch.no_grad()
def test_rows_of_a_static_cache():
    """All of one length: their starts are one number, for every row."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, ids = tiny().to(device), torch.cat(prompts(40, 40)).to(device)
    use_sparse_attention(model, backend="triton")
    expected = model(ids, use_cache=False).logits[:, -1]
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    close(last(model, ids, cache, 39), expected, **TOL)


@pytest.mark.slow
def test_compiled_packed_sequences():
    model, ids = native("one_softmax", num_hidden_layers=1), prompts(60)[0]
    positions = torch.cat((torch.arange(20), torch.arange(40)))[None]
    expected = model(ids, position_ids=positions, use_cache=False).logits
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    close(compiled(ids, position_ids=positions, use_cache=False).logits, expected, **TOL)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda model: SparseCache(None), "config must be model.config"),
        (lambda model: SparseCache(model), "config must be model.config"),
        (lambda model: distill(None, torch.ones(1, 64).long(), steps=1, lr=1.0), "model must be"),
        (lambda model: ranking_losses(None, torch.zeros(1).long()).__enter__(), "model must be"),
        (lambda model: load_converted("/there/is/none"), "path must be a folder with config.json"),
        (lambda model: load_converted(5), "path must be a folder with config.json"),
        (
            lambda model: model(prompts(40)[0], attention_mask=torch.ones(1, 39)),
            r"attention_mask must have shape \[1, 40\], got \[1, 39\]",
        ),
    ],
)
def test_bad_arguments_name_themselves(call, message):
    with pytest.raises(ValueError, match=message):
        call(native("index"))


@torch.no_grad()
def test_layers_that_share_keys_and_leave_out_queries():
    """In a padded prefill they see the last token's query alone."""
    kind = getattr(transformers, "Gemma4ForCausalLM", None)
    if kind is None:
        pytest.skip("needs Gemma4")
    types = 2 * ["sliding_attention", "full_attention", "full_attention"]
    config = transformers.Gemma4TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, global_head_dim=8,
        sliding_window=8, layer_types=types, num_kv_shared_layers=3, pad_token_id=0,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=64, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    model, batch = kind(config).eval(), padded(prompts(23, 30), True)
    given = dict(batch, max_new_tokens=5, do_sample=False)
    expected = model.generate(**given)
    assert torch.equal(use_sparse_attention(model).generate(**given), expected)
