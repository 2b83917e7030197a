"""Models of transformers on a GPU: kernels, in half precision too, and compiled static caches."""

import copy

import pytest
import torch

from native_sparse_attention.hf import convert, use_sparse_attention
from tests.helpers.batches import call_in_pieces, dynamic, padded, static, without_padding
from tests.helpers.sizes import sizes
from tests.helpers.tiny_models import FORMS, close, native, prompts, tiny

pytestmark = pytest.mark.gpu
SIZES = dict(head_dim=64, hidden_size=64, max_position_embeddings=1024)
SETTINGS = sizes(s=32, n=2, num_initial_blocks=1, num_local_blocks=2, dense_length=0)
WINDOWS = dict(compress_block_size=16, compress_block_sliding_stride=8)


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
    for cache in (dynamic(model), static(model, 448)):
        out = call_in_pieces(model, batch, cache, 0, *range(390, 401))
        for one, expected in zip(without_padding(out, batch["attention_mask"]), alone):
            # near-ties of the ranking may fall either way
            assert ((one.cpu() - expected).abs() > 1e-3).double().mean() < 0.02


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


def large(form, **settings):
    """A model of this library whose heads the kernels take."""
    windows = (32, 16) if form == "branches" else ()
    return native(
        FORMS[form] | sizes(*windows, s=32, n=2), **SIZES, initializer_range=0.1, **settings
    ).cuda()


@pytest.mark.parametrize("form", FORMS)
def test_kernels_of_a_native_model_err_as_eager_pytorch_does(form):
    """In bf16, logits and gradients, by norm: near-ties of the ranking may fall either way."""
    model, ids = large(form).train(), torch.cat(prompts(400, 400)).cuda()

    def found(dtype, backend):
        own = copy.deepcopy(model).to(dtype)
        for layer in own.model.layers:
            layer.self_attn.attention.backend = backend
        out = own(ids, labels=ids)
        out.loss.backward()
        grads = [p.grad.double().flatten() for p in own.parameters() if p.grad is not None]
        return out.logits.detach().double(), torch.cat(grads)

    exact = found(torch.float64, "eager")
    low, kernels = (found(torch.bfloat16, backend) for backend in ("eager", "triton"))
    for name, e, l, k in zip(("logits", "gradients"), exact, low, kernels):
        budget = 2 * (l - e).norm() + torch.finfo(torch.bfloat16).eps * e.norm()
        assert k.isfinite().all() and (k - e).norm() <= budget, name


@pytest.mark.parametrize("form", FORMS)
def test_native_model_generates_over_a_cache_what_it_does_without(form):
    model, texts = large(form), prompts(389, 400)
    batch = on_gpu(padded(texts, left=True))
    del batch["position_ids"]
    for dtype in (torch.float32, torch.bfloat16):
        model = model.to(dtype)
        ways = [dict(use_cache=False), {}, dict(num_beams=2)]
        outs = [model.generate(**batch, max_new_tokens=8, do_sample=False, **w) for w in ways]
        assert all(out.shape == (2, 408) for out in outs)
        if dtype == torch.float32:
            assert (outs[0] == outs[1]).double().mean() > 0.98


def test_compiled_native_model():
    model, ids = large("branches").train(), torch.cat(prompts(400, 400)).cuda()
    expected = model(ids, labels=ids).loss
    loss = torch.compile(model)(ids, labels=ids).loss
    loss.backward()
    close(loss, expected, tol=1e-3)
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_layers_of_a_native_model_on_two_gpus(tmp_path):
    pytest.importorskip("accelerate")
    model, ids = large("index", ranking_queries=8), prompts(400)[0].cuda()
    model.save_pretrained(tmp_path)
    places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1}
    places |= {"model.norm": 1, "lm_head": 1}
    split = type(model).from_pretrained(tmp_path, device_map=places)
    with torch.no_grad():
        close(split(ids).logits.to(ids.device), model(ids).logits, tol=1e-3)
    queries = torch.arange(100, 400, 10)
    losses = [m(ids, labels=ids, ranking_queries=queries).ranking_loss for m in (model, split)]
    close(losses[1].to(losses[0].device), losses[0], tol=1e-3)
    given = dict(attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert split.generate(ids, **given).shape == (1, 404)


COMPILED = dict(
    dropped_in=lambda: use_sparse_attention(tiny("Qwen3", **SIZES), **SETTINGS).cuda(),
    converted=lambda: convert(tiny("Qwen3", **SIZES), **SETTINGS, importance="index").cuda(),
    branches=lambda: large("branches"),
    index=lambda: large("index"),
)


# torch's own, where it makes the memory pool of its graphs
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("make", COMPILED.values(), ids=COMPILED)
@torch.no_grad()
def test_compiled_static_cache_generates_what_a_dynamic_cache_does(make):
    """`generate` compiles steps over a static cache by itself."""
    model, texts = make(), prompts(389, 400)
    for batch in (dict(input_ids=texts[1].cuda()), on_gpu(padded(texts, left=True))):
        batch.pop("position_ids", None)
        batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
        given = dict(max_new_tokens=12, do_sample=False)
        expected = model.generate(**batch, **given)
        found = model.generate(**batch, **given, cache_implementation="static")
        assert (found == expected).double().mean() > 0.98
