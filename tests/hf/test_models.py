"""Laws of every kind of model: the drop-in, converted models and the native one. Padding, packing
and caches change no number, `generate` gives the same over every cache."""

import copy

import pytest
import torch
import transformers
from rotary_embedding_torch import RotaryEmbedding

from native_sparse_attention import SparseAttention
from native_sparse_attention.hf import (
    SparseCache,
    StaticSparseCache,
    convert,
    use_sparse_attention,
)
from tests.helpers.batches import CACHE, call_in_pieces, check_rows, dynamic, packed, padded, static
from tests.helpers.tiny_models import FORMS, SPARSE, checkpoint, close, moved, native, prompts, tiny
from tests.hf.test_families import FORMS as FORMS_OF_FAMILIES

WINDOWS = SPARSE | dict(compress_block_size=4, compress_block_sliding_stride=2)
BRANCHES = FORMS_OF_FAMILIES["branches"] | dict(sliding_window_size=6)


def drop_in(family, **settings):
    return lambda **sizes: use_sparse_attention(tiny(family, **sizes), **settings)


def converted(family, **settings):
    return lambda **sizes: convert(tiny(family, **sizes), **settings)


DROP_INS = {
    "drop-in": drop_in("Qwen2", **SPARSE),
    "drop-in, dense_length": drop_in("Gemma2", **SPARSE | dict(dense_length=25)),
    "drop-in, short": drop_in("GptOss"),
    "drop-in, windows": drop_in("Gemma3", **WINDOWS),
    "drop-in, logits": drop_in("Llama", **WINDOWS, importance="logits"),
    "drop-in, probs": drop_in("Llama", **WINDOWS, importance="probs"),
    "drop-in, shared": drop_in("Llama", **SPARSE | dict(dense_length=25), share_ranking=[0]),
}
LAYERS = {
    "converted": converted("Qwen3", **SPARSE, importance="max"),
    "converted, ranked": converted("Llama", **SPARSE),
    "converted, mixed": converted("Gemma3", **SPARSE | dict(dense_length=25)),
    "converted, windows by masks": converted("Qwen2Moe", **SPARSE),
    "converted, branches": converted("Phi", **BRANCHES),
    "converted, shared": converted("Qwen3", **SPARSE | dict(dense_length=25), share_ranking=[0]),
    "native, index shared": lambda **sizes: native("index", share_ranking=[0], **sizes),
    "native, branches shared": lambda **sizes: native("branches", share_ranking=[0], **sizes),
} | {
    f"native, {form}": lambda form=form, **sizes: native(form, dense_layers=[0], **sizes)
    for form in FORMS
}
MODELS = DROP_INS | LAYERS
every = pytest.mark.parametrize("name", MODELS)


def caches_of(name, model):
    caches = [dynamic(model), static(model)]
    if name in DROP_INS:
        caches += [SparseCache(model.config), StaticSparseCache(model.config, max_cache_len=48)]
    return caches


def generate(model, batch, new=8, **settings):
    """New tokens [B, n], at a fixed seed."""
    torch.manual_seed(1)
    batch = {name: t for name, t in batch.items() if name in ("input_ids", "attention_mask")}
    settings = dict(do_sample=False, max_new_tokens=new) | settings
    return model.generate(**batch, **settings)[:, batch["input_ids"].shape[1] :]


@every
@torch.no_grad()
def test_padding_and_packing_change_nothing(name):
    model, texts = MODELS[name](), prompts(33, 40)
    alone = [model(text, use_cache=False).logits for text in texts]
    for use_cache in (False, True):
        for left in (True, False):
            batch = padded([*texts, texts[0][:, :0]], left)  # and a row without tokens
            check_rows(model(**batch, use_cache=use_cache).logits, batch, [*alone, alone[0][:, :0]])
    given, expected = packed(texts), torch.cat(alone, dim=1)
    ids, positions = given["input_ids"], given["position_ids"]
    if name == "drop-in, short":  # transformers makes masks of GptOss without positions
        with pytest.raises(ValueError, match="position_ids must count up by 1"):
            model(**given, use_cache=False)
    else:
        for first in (0, 2):
            found = model(ids, position_ids=positions + first, use_cache=False).logits
            close(found, expected)
    bounds, seq_idx = torch.tensor([0, 33, 73]), (positions == 0).cumsum(1).int()
    for named in (
        dict(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=40, max_length_k=40),
        dict(cu_seq_lens_k=bounds.int(), position_ids=positions + 2, seq_idx=seq_idx),
        dict(seq_idx=seq_idx),
    ):
        close(model(ids, **named, use_cache=False).logits, expected)


@every
@torch.no_grad()
def test_steps_and_chunks_over_caches_are_one_forward(name):
    model, texts = MODELS[name](), prompts(29, 36)
    alone = [model(text, use_cache=False).logits for text in texts]
    for index in range(len(caches_of(name, model))):
        for first, length in ((22, 28), (30, 33)):  # `dense_length` lies between steps, or before
            cache = caches_of(name, model)[index]
            out = call_in_pieces(model, texts[1], cache, 0, *range(first, length + 1))
            close(out, alone[1][:, :length])
        for left in (True, False):  # padding among the new tokens of a chunk too
            batch, cache = padded(texts, left), caches_of(name, model)[index]
            check_rows(call_in_pieces(model, batch, cache, 0, 5, 22, 31, 35, 36), batch, alone)


@pytest.mark.slow(one_of=4)
@pytest.mark.parametrize("way", ["greedy", "sampling", "beams", "static", "static beams", "own"])
@every
@torch.no_grad()
def test_generate_gives_over_a_cache_what_it_gives_without(name, way):
    ways = dict(
        sampling=dict(do_sample=True, temperature=0.7), beams=dict(num_beams=3)
    ) | {"static beams": dict(num_beams=3)}  # fmt: skip
    model, batch = MODELS[name](), padded(prompts(21, 30), left=True)
    settings = ways.get(way, {})
    expected = generate(model, batch, use_cache=False, **settings)
    if way.startswith("static"):
        settings = dict(settings, cache_implementation="static")
    if way == "own":
        for cache in caches_of(name, model):
            assert generate(model, batch, **{CACHE: cache}).equal(expected)
    assert generate(model, batch, **settings).equal(expected)


@every
@torch.no_grad()
def test_saved_model_loads_in_shards(name, tmp_path):
    """What is not saved, too."""
    model, (text,) = moved(MODELS[name]()), prompts(40)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    load = transformers.AutoModelForCausalLM.from_pretrained
    loaded = load(tmp_path)
    assert type(loaded) is type(model) and not loaded.training
    for kind in ("named_parameters", "named_buffers"):
        close(dict(getattr(loaded, kind)()), dict(getattr(model, kind)()), tol=0)
    close(loaded(text).logits, model(text).logits, tol=0)


@pytest.mark.filterwarnings("ignore:You are calling .generate")  # the model is on meta
@pytest.mark.parametrize("name", ["drop-in", "converted, mixed", "native, index"])
@torch.no_grad()
def test_parameters_and_buffers_can_be_offloaded(name):
    """accelerate loads them for the forward of the module that holds them."""
    offload = pytest.importorskip("accelerate").cpu_offload
    model, (text,) = MODELS[name](), prompts(40)
    expected = model(text).logits, generate(model, dict(input_ids=text))
    offload(model, execution_device="cpu", offload_buffers=True)
    assert model.lm_head.weight.is_meta
    close((model(text).logits, generate(model, dict(input_ids=text))), expected)


@torch.no_grad()
def test_a_layer_of_learned_frequencies_can_be_offloaded():
    offload, x = pytest.importorskip("accelerate").cpu_offload, torch.randn(1, 24, 32)
    sizes = dict(dim=32, dim_head=8, heads=4, causal=True, num_compressed_mem_kv=0)
    layer = SparseAttention(**sizes, **BRANCHES, rotary_emb=RotaryEmbedding(8, learned_freq=True))
    expected = layer(x)
    offload(layer, execution_device="cpu", offload_buffers=True)
    assert layer.rotary_emb.freqs.is_meta
    close(layer(x), expected)
    out, cache = layer(x[:, :20], return_cache=True)
    close(torch.cat((out, layer(x[:, 20:], cache=cache)), dim=1), expected)


@pytest.mark.parametrize("guess", ["assistant", "lookup"])
@pytest.mark.parametrize(
    "name", ["drop-in", "drop-in, windows", "converted, ranked", "native, branches"]
)
@torch.no_grad()
def test_guesses_that_are_refused_leave_nothing(name, guess):
    """The cache is cropped there."""
    model, (text,) = MODELS[name](), prompts(30)
    batch = dict(input_ids=text, attention_mask=torch.ones_like(text))
    settings = dict(prompt_lookup_num_tokens=3)
    if guess == "assistant":
        settings = dict(assistant_model=copy.deepcopy(model))
        torch.nn.init.normal_(settings["assistant_model"].lm_head.weight, std=0.3)
    expected = generate(model, batch, use_cache=False)
    caches = [{}, {CACHE: SparseCache(model.config)}] if name in DROP_INS else [{}]
    for cache in caches:
        assert generate(model, batch, **settings, **cache).equal(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["drop-in", "converted, ranked", "native, branches", "drop-in, shared"]
)
@torch.no_grad()
def test_generate_compiles_one_graph(name):
    """As on a GPU: without a graph break, and no graph for each length."""
    model = MODELS[name](num_hidden_layers=1 + ("shared" in name))
    batch = padded(prompts(33, 30), left=True)
    expected = generate(model, batch)
    torch._dynamo.reset()
    compiled = transformers.CompileConfig(backend="eager", fullgraph=True, mode=None)
    compiled._compile_all_devices = True
    counted = torch._dynamo.utils.counters
    counted.clear()
    out = generate(model, batch, cache_implementation="static", compile_config=compiled)
    assert out.equal(expected)
    assert 1 <= counted["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("name", ["drop-in", "drop-in, shared", *LAYERS])
def test_checkpointing_and_caches_change_no_gradient(name):
    model, batch = MODELS[name]().train(), padded(prompts(33, 40), left=True)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    learns = getattr(model.config, "ranking_queries", False) is None and "index" in name
    model.config.ranking_queries = 8 if learns else None

    def gradients(use_cache=False):
        model.zero_grad()
        torch.manual_seed(3)  # of the queries of a ranking
        model(**batch, labels=labels, use_cache=use_cache).loss.backward()
        return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    assert any("to_index" in key for key in expected) == learns
    if not learns:
        close(gradients(use_cache=True), expected)
    checkpoint(model)
    close(gradients(), expected)
    if name in DROP_INS:
        return
    checkpoint(model, reentrant=True)
    if learns:  # no gradient reaches the rankings
        with pytest.raises(ValueError, match="without use_reentrant=True"):
            gradients()
    else:
        close(gradients(), expected)
