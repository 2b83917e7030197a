"""Each family of models under sparse attention: what dense attention gives where all blocks are
selected, and with fewer blocks what each sequence gives alone."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from native_sparse_attention.hf import attention as hf_attention
from native_sparse_attention.hf import use_sparse_attention
from tests.helpers.tiny_models import (
    FAMILIES,
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
family = pytest.mark.parametrize("family", FAMILIES)


@family
@torch.no_grad()
def test_all_blocks_are_dense_attention(family):
    model, texts = tiny(family), prompts(33, 40)
    batches = [padded(texts, left) for left in (True, False)]
    packed = dict(input_ids=torch.cat(texts, 1), use_cache=False)
    packed |= dict(position_ids=torch.cat([torch.arange(t.shape[1]) for t in texts])[None])
    given = [dict(input_ids=texts[0]), packed, *batches]
    if family == "GptOss":  # transformers makes its masks without positions
        given.remove(packed)
    dense = [model(**batch).logits for batch in given]
    for settings in (WHOLE, WHOLE | dict(use_diff_topk=False), dict(selection_block_size=64)):
        use_sparse_attention(model, **settings)
        for batch, expected in zip(given, dense):
            out = model(**batch).logits
            assert out.isfinite().all()
            mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
            for one, other in zip(without_padding(out, mask), without_padding(expected, mask)):
                close(one, other, **TOL)


@pytest.mark.slow(one_of=3)
@family
@torch.no_grad()
def test_steps_over_a_cache_are_one_forward(family):
    model, texts = use_sparse_attention(tiny(family), **SPARSE), prompts(29, 36)
    alone = [model(text).logits for text in texts]
    batch = padded(texts, left=True)
    ids, mask = batch.pop("input_ids"), batch["attention_mask"]
    for cache in (
        transformers.DynamicCache(config=model.config),
        transformers.StaticCache(config=model.config, max_cache_len=48),
    ):
        out = step_by_step(model, ids, 30, cache, **batch)
        for one, expected in zip(without_padding(out, mask), alone):
            close(one, expected, **TOL)
    cache = transformers.StaticCache(config=model.config, max_cache_len=48)
    close(step_by_step(model, texts[0], 25, cache), alone[0], **TOL)


@torch.no_grad()
def test_positions_move_rope_alone():
    """Positions other than 0, 1, ... turn queries and keys, and hide none of them."""
    model, (text,) = tiny(), prompts(40)
    given = dict(position_ids=torch.arange(7, 47)[None], use_cache=False)
    expected = model(text, **given).logits
    use_sparse_attention(model, **WHOLE)
    close(model(text, **given).logits, expected, **TOL)


@family
def test_gradients_are_those_of_dense_attention(family):
    model, (text,) = tiny(family).train(), prompts(24)

    def gradients():
        model.zero_grad()
        model(text, labels=text, use_cache=False).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    use_sparse_attention(model, **WHOLE | dict(use_diff_topk=False))
    found = gradients()
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        close(grad, expected[name], atol=1e-3, rtol=1e-3, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision(dtype):
    model, (text,) = tiny().to(dtype), prompts(40)
    expected = model(text).logits
    use_sparse_attention(model, **WHOLE)
    out = model(text).logits
    assert out.dtype == dtype
    assert (out - expected).abs().mean() < 0.02 * expected.abs().mean()


def test_under_autocast():
    model, (text,) = tiny("Qwen3"), prompts(40)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(text).logits
        use_sparse_attention(model, **WHOLE)
        out = model(text).logits
    assert (out - expected).abs().mean() < 0.05 * expected.abs().mean()


@pytest.mark.kernels
@torch.no_grad()
def test_kernels_give_what_eager_gives(monkeypatch):
    """Prefill by the training kernels and steps by the decode kernels, with padding and without."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = tiny("Qwen3", head_dim=16, num_hidden_layers=1).to(device)
    texts = [text.to(device) for text in prompts(36, 40)]
    settings = SPARSE | dict(selection_block_size=8)
    use_sparse_attention(model, **settings)
    alone = [model(text).logits for text in texts]
    use_sparse_attention(model, **settings, backend="triton")
    steps, own = [], hf_attention.decode.run_decode_kernels

    def decode(*args, **kwargs):
        steps.append(kwargs["q"].shape[1])
        return own(*args, **kwargs)

    monkeypatch.setattr(hf_attention.decode, "run_decode_kernels", decode)
    cache = transformers.DynamicCache(config=model.config)
    close(step_by_step(model, texts[1], 39, cache), alone[1], **TOL)
    cache = transformers.StaticCache(config=model.config, max_cache_len=48)
    batch = {name: t.to(device) for name, t in padded(texts, left=True).items()}
    ids, mask = batch.pop("input_ids"), batch["attention_mask"]
    out = step_by_step(model, ids, 39, cache, **batch)
    for one, expected in zip(without_padding(out, mask), alone):
        close(one, expected, **TOL)
    assert steps == [1, 1]


@pytest.mark.slow(one_of=2)
@pytest.mark.parametrize("padding", [False, True])
def test_compiled_model(padding):
    """Without a mask the graph breaks where packed documents are looked for."""
    model = use_sparse_attention(tiny(num_hidden_layers=1), **SPARSE)
    texts = prompts(33, 40)
    given = padded(texts, left=True) if padding else dict(input_ids=texts[1])
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=padding)
    expected = model(**given, use_cache=False).logits
    close(compiled(**given, use_cache=False).logits, expected, **TOL)
