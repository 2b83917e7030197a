"""Converted models: what the original gives while a branch or the blocks cover the sequence, what
the drop-in gives where they do not, over caches and after saving too."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from native_sparse_attention import NSAConfig, SparseAttention
from native_sparse_attention.hf import (
    convert,
    load_converted,
    use_dense_attention,
    use_sparse_attention,
)
from native_sparse_attention.recipes import set_dense
from native_sparse_attention.view import collect
from tests.helpers.tiny_models import (
    CACHE,
    SPARSE,
    dynamic,
    of_parts,
    packed,
    padded,
    prompts,
    step_by_step,
    tiny,
    without_padding,
)

TOL = dict(atol=1e-4, rtol=1e-4)
close = torch.testing.assert_close
FAMILIES = (
    "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Phi", "Phi3", "SmolLM3",
    "Granite", "Mixtral", "Qwen3Moe",
)  # fmt: skip
# all blocks, under one softmax; and a window over the sequence beside two closed branches
ONE_SOFTMAX = dict(selection_block_size=4, num_selected_blocks=20, dense_length=0)
BRANCHES = dict(
    branches=("compressed", "selected", "window"), sliding_window_size=64,
    compress_block_size=8, compress_block_sliding_stride=4, selection_block_size=8,
    num_selected_blocks=1,
)  # fmt: skip
FORMS = dict(one_softmax=ONE_SOFTMAX, branches=BRANCHES)
family = pytest.mark.parametrize("family", FAMILIES)
form = pytest.mark.parametrize("form", FORMS)


@pytest.mark.slow(one_of=4)
@form
@family
@torch.no_grad()
def test_converted_model_gives_what_the_original_does(family, form):
    model, texts = tiny(family), prompts(33, 40)
    batches = [padded(texts, left) for left in (True, False)]
    given = [dict(input_ids=texts[0]), packed(texts), *batches]
    given.append({**batches[0], "position_ids": None})  # positions that count padding too
    expected = [model(**batch, use_cache=False).logits for batch in given]
    convert(model, **FORMS[form])
    for use_cache in (False, True):
        for batch, dense in zip(given, expected):
            out = model(**batch, use_cache=use_cache).logits
            assert out.isfinite().all()
            mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
            for one, other in zip(without_padding(out, mask), without_padding(dense, mask)):
                close(one, other, **TOL)


@family
@torch.no_grad()
def test_sparse_converted_model_gives_what_the_drop_in_does(family):
    """With the same rule for blocks. Over a cache too, in chunks with padding anywhere."""
    model, texts = tiny(family), prompts(33, 40)
    settings = SPARSE | dict(importance="max")
    converted = convert(copy.deepcopy(model), branches=("selected",), **settings)
    dense = model(texts[1]).logits
    use_sparse_attention(model, **settings)
    alone = [model(text).logits for text in texts]
    assert (alone[1] - dense).abs().max() > 1e-2, "nothing was sparse"
    for batch in (padded(texts, True), padded(texts, False)):
        mask = batch["attention_mask"]
        out = converted(**batch, use_cache=False).logits
        for one, expected in zip(without_padding(out, mask), alone):
            close(one, expected, **TOL)
        cache, outs = dynamic(converted), []
        for start, stop in ((0, 5), (5, 22), (22, 33), (33, 40)):
            part = {name: t[:, start:stop] for name, t in batch.items()}
            part |= {"attention_mask": mask[:, :stop], CACHE: cache}
            outs.append(converted(**part).logits)
        for one, expected in zip(without_padding(torch.cat(outs, dim=1), mask), alone):
            close(one, expected, **TOL)
    out = converted(**packed(texts)).logits
    for one, expected in zip(out.split([33, 40], dim=1), alone):
        close(one, expected, **TOL)


@torch.no_grad()
def test_learned_ranking_begins_with_the_mean_query_of_a_group():
    """Where queries and keys have neither biases nor norms, it is the drop-in's rule."""
    model, (text,) = tiny("Granite"), prompts(40)
    converted = convert(copy.deepcopy(model), **SPARSE)
    use_sparse_attention(model, **SPARSE)
    close(converted(text).logits, model(text).logits, **TOL)
    ranked = convert(tiny("Granite"), **SPARSE | dict(importance="max"))
    readings = []
    for one in (converted, ranked):
        with collect(one) as seen:
            one(text, use_cache=False)
        readings.append(next(iter(seen.values()))[0])
    close(readings[0].scores, readings[1].scores, equal_nan=True, **TOL)


@pytest.mark.parametrize("way", ["greedy", "sampling", "beams", "lookup"])
@pytest.mark.parametrize("form", FORMS)
def test_generate_gives_what_the_original_does(form, way):
    ways = dict(
        greedy=dict(do_sample=False),
        sampling=dict(do_sample=True, temperature=0.7),
        beams=dict(do_sample=False, num_beams=3),
        lookup=dict(do_sample=False, prompt_lookup_num_tokens=3),
    )
    texts = prompts(21, 30)
    batch = padded(texts, left=True)
    del batch["position_ids"]
    if way == "lookup":
        batch = dict(input_ids=texts[1], attention_mask=torch.ones_like(texts[1]))
    model = tiny("Gemma3" if form == "branches" else "Qwen2")
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        found.append(model.generate(**batch, **ways[way], max_new_tokens=8))
        if len(found) == 1:
            convert(model, **FORMS[form])
    assert found[0].equal(found[1])


@form
def test_gradients_are_those_of_the_original(form):
    model, (text,) = tiny("Qwen3").train(), prompts(24)
    converted = convert(copy.deepcopy(model), **FORMS[form])
    losses = [m(text, labels=text, use_cache=False).loss for m in (model, converted)]
    close(losses[1], losses[0], **TOL)
    for loss in losses:
        loss.backward()
    expected, found = (dict(m.named_parameters()) for m in (model, converted))
    for name in found.keys() & expected.keys():
        close(found[name].grad, expected[name].grad, atol=1e-3, rtol=1e-3, msg=name)
    own = {name: p.grad for name, p in found.items() if name not in expected}
    without = {name for name, grad in own.items() if grad is None or not grad.abs().sum()}
    # the output has no gradient in the index
    assert {name.split(".")[-2] for name in without} == (
        {"to_index"} if form == "one_softmax" else set()
    )


@form
@torch.no_grad()
def test_saved_model_loads(form, tmp_path):
    model, (text,) = convert(tiny("Gemma3"), **FORMS[form]), prompts(40)
    for parameter in model.parameters():
        parameter.add_(0.01 * torch.randn_like(parameter))
    expected = model(text).logits
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    loaded = load_converted(tmp_path)
    assert loaded.config.nsa_converted == model.config.nsa_converted
    assert loaded.state_dict().keys() == model.state_dict().keys()
    close(loaded(text).logits, expected, atol=0, rtol=0)
    plain = copy.deepcopy(tiny("Gemma3"))
    plain.config.nsa_converted = model.config.nsa_converted
    convert(plain).load_state_dict(model.state_dict())  # the kept settings
    close(plain(text).logits, expected, atol=0, rtol=0)


@torch.no_grad()
def test_saved_model_of_several_parts_loads(tmp_path):
    """transformers writes other names than a state dict has."""
    model = of_parts()
    convert(model.get_decoder(), **ONE_SOFTMAX)
    for parameter in model.parameters():
        parameter.add_(0.01 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    loaded, (ids,) = load_converted(tmp_path), prompts(40)
    assert type(loaded) is type(model)
    ids = ids.clamp(max=59)
    close(loaded(ids).logits, model(ids).logits, atol=0, rtol=0)


def test_settings_that_change_weights_are_refused_at_load(tmp_path):
    convert(tiny(), **ONE_SOFTMAX).save_pretrained(tmp_path)
    assert load_converted(tmp_path, num_selected_blocks=1).config.nsa_converted
    told = r"settings must keep the shapes of weights, got \['index_dim'\], for which .*to_index"
    with pytest.raises(ValueError, match=told):
        load_converted(tmp_path, index_dim=16)


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
@torch.no_grad()
def test_saved_model_of_experts_loads(family, tmp_path):
    """transformers saves experts in another format than a state dict has."""
    model, (text,) = convert(tiny(family), **ONE_SOFTMAX), prompts(40)
    model.save_pretrained(tmp_path)
    close(load_converted(tmp_path)(text).logits, model(text).logits, atol=0, rtol=0)


@torch.no_grad()
def test_frequencies_of_a_saved_model_stay_in_float32(tmp_path):
    """Of layers that keep their window."""
    tiny("Gemma3").save_pretrained(tmp_path / "plain")
    kind = transformers.Gemma3ForCausalLM
    model = convert(kind.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16), **ONE_SOFTMAX)
    model.save_pretrained(tmp_path / "converted")
    loaded = load_converted(tmp_path / "converted")
    for name, value in model.named_buffers():
        assert value.dtype == torch.float32 or "inv_freq" not in name
        close(loaded.get_buffer(name), value, atol=0, rtol=0)


@torch.no_grad()
def test_dtype_and_mode_are_the_models(tmp_path):
    model, (text,) = tiny("Qwen3"), prompts(40)
    for parameter in model.parameters():  # as loaded: rotary frequencies stay in fp32
        parameter.data = parameter.to(torch.bfloat16)
    expected = model(text).logits
    convert(model, **ONE_SOFTMAX)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(module.training for module in model.modules())
    out = model(text).logits
    assert (out - expected).abs().mean() < 0.02 * expected.abs().mean()
    model.save_pretrained(tmp_path)
    close(load_converted(tmp_path)(text).logits, out, atol=0, rtol=0)


@torch.no_grad()
def test_keys_and_values_of_each_branch_begin_alike():
    model, (text,) = tiny("Phi"), prompts(40)
    expected = model(text).logits
    convert(model, **BRANCHES, branch_kv="independent")
    close(model(text).logits, expected, **TOL)


def test_gates_begin_where_gate_bias_says():
    model = convert(tiny(), **BRANCHES, gate_bias=3)
    gate = model.model.layers[0].self_attn.attention.to_strategy_combine[0]
    close(gate.bias.detach().view(4, 3), torch.tensor([-3.0, -3.0, 3.0]).expand(4, 3))
    assert not gate.weight.any()
    model = convert(tiny(), branches=("compressed", "selected"))
    gate = model.model.layers[0].self_attn.attention.to_strategy_combine[0]
    close(gate.bias.detach().view(4, 2), torch.tensor([-12.0, 12.0]).expand(4, 2))


def test_a_frozen_model_trains_new_weights_alone():
    model = convert(tiny("Qwen3").requires_grad_(False), **ONE_SOFTMAX)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 and all("to_index" in name for name in trained)


@torch.no_grad()
def test_masks_of_the_user_and_rows_without_tokens():
    model, texts = tiny("Granite"), prompts(21, 30)
    alone = [model(text).logits for text in texts]
    convert(model, **SPARSE | dict(num_selected_blocks=20))
    causal = torch.ones(1, 1, 30, 30, dtype=torch.bool).tril()
    close(model(texts[1], attention_mask=causal).logits, alone[1], **TOL)
    batch = padded([*texts, texts[0][:, :0]], left=True)
    ids, mask = batch.pop("input_ids"), batch["attention_mask"]
    out = step_by_step(model, ids, 24, dynamic(model), **batch)
    assert out.isfinite().all()
    for one, expected in zip(without_padding(out, mask), alone):
        close(one, expected, **TOL)


@torch.no_grad()
def test_dense_can_be_set():
    model, (text,) = tiny(), prompts(40)
    expected = model(text).logits
    convert(model, **SPARSE)
    assert (model(text).logits - expected).abs().max() > 1e-2
    set_dense(model, True)
    close(model(text).logits, expected, **TOL)


@torch.no_grad()
def test_an_nsa_config_names_the_settings():
    model, sizes = tiny(), dict(dim=32, dim_head=8, heads=4, kv_heads=2)
    config = NSAConfig(**sizes, branches=("selected",), num_selected_blocks=3, causal=True)
    convert(model, config, selection_block_size=16)
    layer = next(m for m in model.modules() if isinstance(m, SparseAttention))
    assert layer.num_selected_blocks == 3 and layer.selection_block_size == 16
    with pytest.raises(ValueError, match="dim_head must be 8, which the model decides, got 16"):
        convert(tiny(), NSAConfig(**sizes | dict(dim_head=16)))


@pytest.mark.parametrize("family", ["Olmo2", "Cohere2", "GptOss"])
def test_other_families_are_refused_by_name(family):
    with pytest.raises(ValueError, match=f"must have attention of .*, got {family}Attention"):
        convert(tiny(family))


def test_what_has_no_equivalent_is_refused():
    normed = tiny("Phi", qk_layernorm=True)
    with pytest.raises(ValueError, match="with LayerNorm"):
        convert(normed)
    dynamic_ntk = dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)
    with pytest.raises(ValueError, match="rope_type='dynamic'"):
        convert(tiny("Llama", rope_parameters=dynamic_ntk))
    with pytest.raises(ValueError, match="layers of full attention"):
        convert(tiny("Mistral", sliding_window=8, rope_parameters=None))
    for settings, message in (
        (dict(heads=2), "heads must be 4, which the model decides, got 2"),
        (dict(branches=("compressed",)), "branches must hold"),
        (dict(num_blocks=2), "num_blocks"),
        (dict(selection_block_size=0), "selection_block_size"),
        (dict(gate_bias=0), "gate_bias must be"),
    ):
        model = tiny()
        with pytest.raises(ValueError, match=message):
            convert(model, **settings)
        assert not any(isinstance(m, SparseAttention) for m in model.modules())
    with pytest.raises(ValueError, match="nn.Linear"):
        model = tiny()
        model.model.layers[1].self_attn.k_proj = torch.nn.Identity()
        convert(model)
    model = convert(tiny())
    for again in (convert, use_sparse_attention, use_dense_attention):
        with pytest.raises(ValueError, match="not be converted already"):
            again(model)


@torch.no_grad()
def test_calls_of_another_form_are_refused():
    model, (text,) = convert(tiny(), **ONE_SOFTMAX), prompts(12)
    sliding = transformers.StaticCache(config=tiny("Gemma3").config, max_cache_len=48)
    with pytest.raises(ValueError, match="must be a DynamicCache or a StaticCache"):
        model(text, **{CACHE: sliding})
    offloaded = dynamic(model)
    offloaded.offloading = True  # its constructor asks for a GPU
    with pytest.raises(ValueError, match="an offloaded DynamicCache"):
        model(text, **{CACHE: offloaded})
    held = dynamic(model)
    tiny()(text, **{CACHE: held})
    with pytest.raises(ValueError, match="12 tokens of another"):
        model(text, **{CACHE: held})
    with pytest.raises(ValueError, match="position_ids must count up by 1"):
        model(text, position_ids=2 * torch.arange(12)[None])
    with pytest.raises(ValueError, match="output_attentions"):
        model(text, output_attentions=True)
    cache = dynamic(model)
    model(**packed([text, text]), **{CACHE: cache})
    with pytest.raises(ValueError, match="packed documents"):
        model(text, **{CACHE: cache})
    cache = dynamic(model)
    batch = padded([text, text[:, :9]], left=True)
    model(**batch, **{CACHE: cache})
    with pytest.raises(ValueError, match=r"show the \[12, 9\] tokens"):
        model(text[:, :1].expand(2, 1), **{CACHE: cache})
    model.train()
    for layer in model.model.layers:
        layer.self_attn.dropout = 0.1
    with pytest.raises(ValueError, match="attention_dropout"):
        model(text)


def test_each_frozen_weight_stays_frozen():
    model = tiny("Qwen3").requires_grad_(False)
    module = model.model.layers[0].self_attn
    module.q_proj.requires_grad_(True)
    module.k_norm.requires_grad_(True)
    convert(model, **SPARSE)
    layer = model.model.layers[0].self_attn.attention
    trained = {name for name, p in layer.named_parameters() if p.requires_grad}
    assert trained == {"to_qkv.weight", "to_index.weight", "k_norm.weight"}
