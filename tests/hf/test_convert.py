"""Converted models: their weights, settings and files."""

import copy
import json

import numpy as np
import pytest
import torch
import transformers
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from native_sparse_attention import NSAConfig, SparseAttention
from native_sparse_attention.hf import (
    convert,
    load_converted,
    use_dense_attention,
    use_sparse_attention,
)
from native_sparse_attention.recipes import set_dense
from native_sparse_attention.view import collect
from tests.helpers.tiny_models import LLAMA3, SPARSE, close, moved, of_parts, prompts, tiny
from tests.hf.test_families import FORMS

form = pytest.mark.parametrize("form", FORMS)


def layer_of(model, index=0):
    return model.model.layers[index].self_attn.attention


@torch.no_grad()
def test_learned_ranking_begins_with_the_mean_query_of_a_group():
    """Where queries and keys have neither biases nor norms, it is the drop-in's rule."""
    model, (text,) = tiny("Granite"), prompts(40)
    converted = convert(copy.deepcopy(model), **SPARSE)
    ranked = convert(copy.deepcopy(model), **SPARSE | dict(importance="max"))
    use_sparse_attention(model, importance="max", **SPARSE)
    close(converted(text).logits, model(text).logits)
    readings = []
    for one in (converted, ranked):
        with collect(one) as seen:
            one(text, use_cache=False)
        readings.append(next(iter(seen.values()))[0])
    close(readings[0].scores, readings[1].scores, equal_nan=True)


@form
def test_gradients_are_those_of_the_original(form):
    model, (text,) = tiny("Qwen3").train(), prompts(24)
    converted = convert(copy.deepcopy(model), **FORMS[form])
    for one in (model, converted):
        one(text, labels=text, use_cache=False).loss.backward()
    expected, grads = ({n: p.grad for n, p in m.named_parameters()} for m in (model, converted))
    for name in grads.keys() & expected.keys():
        close(grads[name], expected[name], tol=1e-3)
    new = {name: grad for name, grad in grads.items() if name not in expected}
    without = {name.split(".")[-2] for name, g in new.items() if g is None or not g.abs().sum()}
    # the output has no gradient in the index
    assert without == ({"to_index"} if form == "one_softmax" else set())


def test_each_frozen_weight_stays_frozen():
    model = tiny("Qwen3").requires_grad_(False)
    module = model.model.layers[0].self_attn
    module.q_proj.requires_grad_(True)
    module.k_norm.requires_grad_(True)
    convert(model, **SPARSE)
    trained = [
        {n for n, p in layer_of(model, i).named_parameters() if p.requires_grad} for i in (0, 1)
    ]
    assert trained == [{"to_qkv.weight", "to_index.weight", "k_norm.weight"}, {"to_index.weight"}]


@torch.no_grad()
def test_settings_of_layers():
    """Of an NSAConfig too; `dense`, and keys and values for each branch."""
    model, (text,) = tiny("Phi"), prompts(40)
    expected = model(text).logits
    settings = dict(branch_kv="independent", gate_bias=11)
    branches = convert(copy.deepcopy(model), **FORMS["branches"], **settings)
    close(branches(text).logits, expected)
    gate = layer_of(branches).to_strategy_combine[0]
    assert gate.bias.view(4, -1).unique(dim=0).tolist() == [[-11, -11, 11]]
    assert not gate.weight.any()
    sizes = dict(dim=32, dim_head=8, heads=4, kv_heads=2, causal=True)
    config = NSAConfig(**sizes, branches=("selected",), num_selected_blocks=1, qkv_bias=True)
    with pytest.raises(ValueError, match="dim_head must be 8, which the model decides, got 16"):
        convert(model, NSAConfig(**sizes | dict(dim_head=16)))
    blocks = dict(compress_block_size=4, compress_block_sliding_stride=4, selection_block_size=4)
    convert(model, config, **blocks)
    layer = layer_of(model)
    assert layer.num_selected_blocks == 1 and layer.selection_block_size == 4
    assert (model(text).logits - expected).abs().max() > 1e-2
    set_dense(model, True)
    close(model(text).logits, expected)


# experts have another format in files than in a state dict
@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
@torch.no_grad()
def test_saved_model_loads(family, tmp_path, monkeypatch):
    model, (text,) = moved(convert(tiny(family), **FORMS["one_softmax"])), prompts(40)
    expected = model(text).logits
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    load = transformers.AutoModelForCausalLM.from_pretrained
    for given in ({}, dict(attn_implementation="sdpa"), dict(attn_implementation="eager")):
        again = load(tmp_path, **given)
        assert again.config._attn_implementation == "nsa"
        close(again(text).logits, expected, tol=0)
        again.save_pretrained(tmp_path)
    loaded = load_converted(tmp_path)
    with monkeypatch.context() as patch:  # without this library
        patch.delitem(transformers.AttentionInterface._global_mapping, "nsa")
        patch.delitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "native_sparse_attention.hf")
        with pytest.raises(ValueError, match='"nsa"` is not supported'):
            load(tmp_path)
    file = tmp_path / "config.json"
    saved = json.loads(file.read_text())
    del saved["quantization_config"]  # as of an earlier version
    file.write_text(json.dumps(saved))
    close(load_converted(tmp_path)(text).logits, expected, tol=0)
    with pytest.raises(ValueError, match="model must be loaded by load_converted"):
        load(tmp_path)(text)
    assert loaded.config.nsa_converted == model.config.nsa_converted
    assert loaded.state_dict().keys() == model.state_dict().keys()
    close(loaded(text).logits, expected, tol=0)
    plain = tiny(family)
    plain.config.nsa_converted = model.config.nsa_converted
    convert(plain).load_state_dict(model.state_dict())  # the kept settings
    close(plain(text).logits, expected, tol=0)


@torch.no_grad()
def test_saved_model_of_several_parts_loads(tmp_path):
    """transformers writes other names than a state dict has."""
    model, ids = of_parts(), prompts(40)[0].clamp(max=59)
    convert(model.get_decoder(), **FORMS["one_softmax"])
    moved(model).save_pretrained(tmp_path, max_shard_size="20KB")
    for load in (load_converted, type(model).from_pretrained):
        loaded = load(tmp_path)
        assert type(loaded) is type(model)
        close(loaded(ids).logits, model(ids).logits, tol=0)
        loaded.save_pretrained(tmp_path)


@torch.no_grad()
def test_half_precision_but_for_frequencies(tmp_path):
    """Those of layers that keep their window too."""
    plain, (text,) = tiny("Gemma3"), prompts(40)
    plain.save_pretrained(tmp_path / "plain")
    load = transformers.Gemma3ForCausalLM.from_pretrained
    model = load(tmp_path / "plain", dtype=torch.bfloat16)
    expected = model(text).logits
    convert(model, **FORMS["one_softmax"])
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and not model.training
    out = model(text).logits
    assert (out - expected).abs().mean() < 0.02 * expected.abs().mean()
    model.save_pretrained(tmp_path / "converted")
    loaded = load(tmp_path / "converted", dtype=torch.bfloat16)
    close(loaded(text).logits, out, tol=0)
    for name, value in model.named_buffers():
        assert value.dtype == torch.float32 or "inv_freq" not in name
        close(loaded.get_buffer(name), value, tol=0)


def test_files_that_cannot_be_loaded_are_refused(tmp_path):
    convert(tiny(), **FORMS["one_softmax"]).save_pretrained(tmp_path)
    assert load_converted(tmp_path, num_selected_blocks=1).config.nsa_converted
    told = "settings must be those of the saved weights, got others for model.layers.0.*to_index"
    for path, settings, message in (
        (tmp_path, dict(index_dim=16), told),
        (tmp_path, dict(importance="max"), told),
        ("/there/is/none", {}, "path must be a folder with config.json"),
        (5, {}, "path must be a folder with config.json"),
    ):
        with pytest.raises(ValueError, match=message):
            load_converted(path, **settings)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | dict(architectures=["Mine"])))
    with pytest.raises(ValueError, match="path must be .* class Mine: call its from_pretrained"):
        load_converted(tmp_path)


@pytest.mark.parametrize(
    "family, sizes, settings, message",
    [
        ("Olmo2", {}, {}, "must have attention of .*, got Olmo2Attention"),
        ("Cohere2", {}, {}, "must have attention of .*, got Cohere2Attention"),
        ("GptOss", {}, {}, "must have attention of .*, got GptOssAttention"),
        ("Phi", dict(qk_layernorm=True), {}, "with LayerNorm"),
        ("Llama", dict(rope_parameters=LLAMA3 | dict(rope_type="dynamic")), {}, "pe='dynamic'"),
        ("Mistral", dict(sliding_window=8, rope_parameters=None), {}, "be one with full attention"),
        ("Llama", {}, dict(heads=2), "heads must be 4, which the model decides, got 2"),
        ("Llama", {}, dict(branches=("compressed",)), "branches must hold"),
        ("Llama", {}, dict(branches=("window",), share_ranking=[0]), "share_ranking must be None"),
        ("Llama", {}, dict(branches=np.array([1, 2])), "branches must be some of"),
        ("Llama", {}, dict(selection_block_size=0), "selection_block_size"),
        ("Llama", {}, dict(gate_bias=0), "gate_bias must be"),
    ],
)
def test_what_has_no_equivalent_is_refused(family, sizes, settings, message):
    model = tiny(family, **sizes)
    with pytest.raises(ValueError, match=message):
        convert(model, **settings)
    assert not any(isinstance(m, SparseAttention) for m in model.modules())


def test_models_of_other_modules_are_refused():
    model = tiny()
    model.model.layers[1].self_attn.k_proj = torch.nn.Identity()
    with pytest.raises(ValueError, match="nn.Linear"):
        convert(model)
    with pytest.raises(ValueError, match="with whole, loaded weights"):
        convert(tiny().to("meta"))
    model = convert(tiny())
    for again in (convert, use_sparse_attention, use_dense_attention):
        with pytest.raises(ValueError, match="not be converted already"):
            again(model)
