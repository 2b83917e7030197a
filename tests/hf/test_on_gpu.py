"""Models of transformers on a GPU: kernels, in half precision too, and compiled static caches."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from native_sparse_attention.hf import use_sparse_attention
from tests.helpers.tiny_models import padded, prompts, step_by_step, tiny, without_padding

pytestmark = pytest.mark.gpu
SIZES = dict(head_dim=64, hidden_size=64, max_position_embeddings=1024)
SETTINGS = dict(
    selection_block_size=32,
    num_selected_blocks=2,
    num_initial_blocks=1,
    num_local_blocks=2,
    dense_length=0,
)
WINDOWS = dict(compress_block_size=16, compress_block_sliding_stride=8)
close = torch.testing.assert_close


def on_gpu(batch):
    return {name: t.cuda() for name, t in batch.items()}


@pytest.mark.parametrize("settings", [{}, WINDOWS, dict(dense_length=256)])
@pytest.mark.parametrize("family", ["Qwen3", "Gemma2", "GptOss"])
@torch.no_grad()
def test_kernels_give_what_the_cpu_gives(family, settings):
    model, texts = tiny(family, **SIZES), prompts(389, 400)
    use_sparse_attention(model, **SETTINGS | settings)
    alone = [model(text).logits for text in texts]
    model = model.cuda()
    batch = on_gpu(padded(texts, left=True))
    ids, mask = batch.pop("input_ids"), batch["attention_mask"]
    for cache in (
        transformers.DynamicCache(config=model.config),
        transformers.StaticCache(config=model.config, max_cache_len=448),
    ):
        out = step_by_step(model, ids, 390, cache, **batch).cpu()
        for one, expected in zip(without_padding(out, mask.cpu()), alone):
            # near-ties of the ranking may fall either way
            assert ((one - expected).abs() > 1e-3).double().mean() < 0.02


# torch's own, where it makes the memory pool of its graphs
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@torch.no_grad()
def test_compiled_static_cache_generates_what_a_dynamic_cache_does():
    """`generate` compiles steps over a static cache by itself."""
    model = use_sparse_attention(tiny("Qwen3", **SIZES), **SETTINGS).cuda()
    text = prompts(400)[0].cuda()
    given = dict(attention_mask=torch.ones_like(text), max_new_tokens=12, do_sample=False)
    expected = model.generate(text, **given)
    found = model.generate(text, **given, cache_implementation="static")
    assert (found == expected).double().mean() > 0.99


def test_training_in_half_precision():
    model, texts = tiny("Qwen3", **SIZES).cuda().train(), prompts(389, 400)
    use_sparse_attention(model, **SETTINGS)
    batch = on_gpu(padded(texts, left=False))
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)

    def gradients(dtype):
        model.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            model(**batch, labels=labels, use_cache=False).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    exact = gradients(torch.float32)
    error = (gradients(torch.bfloat16) - exact).norm() / exact.norm()
    assert exact.isfinite().all() and error < 0.1
