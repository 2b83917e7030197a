"""Loading, saving and initial weights of the model of this library in transformers."""

import json

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from native_sparse_attention.hf import NSAForCausalLM, NSAModel
from tests.helpers.tiny_models import FORMS, native, prompts

close = torch.testing.assert_close
form = pytest.mark.parametrize("form", FORMS)
EXACT = dict(atol=0, rtol=0)


def moved(model):
    """The model, away from its initial weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def layers_of(model):
    return [layer.self_attn.attention for layer in model.base_model.layers]


@form
@torch.no_grad()
def test_saved_model_loads_in_shards(form, tmp_path):
    model, (text,) = moved(native(form, rope_theta=700.0)), prompts(40)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert type(loaded) is NSAForCausalLM and not any(info.values())
    assert not loaded.training
    for kind in ("named_parameters", "named_buffers"):  # those that are not saved, too
        found, expected = dict(getattr(loaded, kind)()), dict(getattr(model, kind)())
        close(found, expected, **EXACT)
    close(loaded(text).logits, model(text).logits, **EXACT)
    base = transformers.AutoModel.from_pretrained(tmp_path)
    assert type(base) is NSAModel
    close(base(text).last_hidden_state, model.model(text).last_hidden_state, **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_frequencies_stay_in_fp32(dtype, tmp_path):
    model, (text,) = moved(native("one_softmax", rope_theta=700.0)), prompts(40)
    model.save_pretrained(tmp_path)
    expected = layers_of(model)[0].rotary_emb.freqs.clone()
    loaded = NSAForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    for other in (loaded, model.to(dtype)):
        rotary = layers_of(other)[1].rotary_emb
        close(rotary.freqs, expected, **EXACT)
        close(rotary.exact.view(torch.float32), expected, **EXACT)
    close(loaded(text).logits, model(text).logits, **EXACT)
    loaded.save_pretrained(tmp_path)  # and in a checkpoint of this dtype
    again = NSAForCausalLM.from_pretrained(tmp_path)
    close(layers_of(again)[0].rotary_emb.freqs, expected, **EXACT)
    given = dict(attention_mask=torch.ones_like(text), max_new_tokens=4, do_sample=False)
    assert again.dtype == dtype and again.generate(text, **given).shape == (1, 44)


@form
def test_initial_weights_are_the_layers_own(form):
    model = native(form, initializer_range=0.5, qkv_bias=True)
    for layer in layers_of(model):
        projections = [layer.to_qkv, layer.combine_heads, layer.to_index]
        for projection in filter(None, projections):
            assert 0.4 < projection.weight.std() < 0.6
        assert not layer.to_qkv.bias.any()
        if form == "branches":
            gate = layer.to_strategy_combine[0]
            assert not gate.weight.any() and gate.bias.unique().tolist() == [-2, 2]
            assert not layer.compress_mem_kv.any() and not layer.k_intrablock_positions.any()
            twins = layer.k_compress.state_dict(), layer.v_compress.state_dict()
            close(*twins, **EXACT)
            assert layer.k_compress[1].weight.std() < 0.2  # of nn.Linear
    assert model.model.norm.weight.eq(1).all()
    assert 0.4 < model.model.embed_tokens.weight.std() < 0.6
    close(native(form, initializer_range=0.5, qkv_bias=True).state_dict(), model.state_dict())


@torch.no_grad()
def test_weights_that_a_checkpoint_lacks_begin_as_the_layers_own(tmp_path):
    model = moved(native())
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    kept = {n: t for n, t in load_file(file).items() if ".1.self_attn" not in n or "to_qkv" in n}
    kept = {n: t for n, t in kept.items() if "gate" not in n and "strategy_combine" not in n}
    save_file(kept, file, metadata={"format": "pt"})
    loaded, info = NSAForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == model.state_dict().keys() - kept.keys()
    for name, value in kept.items():
        close(loaded.state_dict()[name], value, **EXACT)
    for layer in layers_of(loaded):
        assert layer.to_strategy_combine[0].bias.unique().tolist() == [-2, 2]
    last = layers_of(loaded)[1]
    assert not last.k_intrablock_positions.any() and last.combine_heads.weight.std() > 0.2
    close(last.k_compress.state_dict(), last.v_compress.state_dict(), **EXACT)


@form
@torch.no_grad()
def test_layers_can_be_on_other_devices_and_on_disk(form, tmp_path):
    pytest.importorskip("accelerate", reason="device_map needs it")
    model, (text,) = moved(native(form)), prompts(40)
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    expected = model(text).logits
    auto = NSAForCausalLM.from_pretrained(tmp_path / "saved", device_map="auto")
    close(auto(text.to(auto.device)).logits, expected, atol=1e-4, rtol=1e-4, check_device=False)
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    split = NSAForCausalLM.from_pretrained(
        tmp_path / "saved", device_map=places, offload_folder=tmp_path / "offloaded"
    )
    assert layers_of(split)[1].to_qkv.weight.is_meta
    close(split(text).logits, expected, atol=1e-4, rtol=1e-4)
    given = dict(attention_mask=torch.ones_like(text), max_new_tokens=3, do_sample=False)
    assert split.generate(text, **given).equal(model.generate(text, **given))


@torch.no_grad()
def test_embeddings_can_be_tied_and_resized(tmp_path):
    model, (text,) = moved(native("one_softmax", tie_word_embeddings=True)), prompts(20)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = NSAForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    expected = model(text).logits
    close(loaded(text).logits, expected, **EXACT)
    loaded.resize_token_embeddings(70, mean_resizing=False)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    out = loaded(text, labels=text)
    assert out.logits.shape[-1] == loaded.config.vocab_size == 70 and out.loss.isfinite()
    close(out.logits[..., :64], expected)


def test_the_configuration_file_names_the_settings(tmp_path):
    native("index").save_pretrained(tmp_path)
    kept = json.loads((tmp_path / "config.json").read_text())
    assert kept["model_type"] == "nsa" and kept["architectures"] == ["NSAForCausalLM"]
    assert kept["nsa"]["importance"] == "index" and kept["nsa"]["selection_block_size"] == 4
    loaded = NSAForCausalLM.from_pretrained(tmp_path, rope_theta=99.0)
    assert layers_of(loaded)[0].rotary_emb.freqs[1].item() == pytest.approx(99.0**-0.25)


@torch.no_grad()
def test_settings_given_at_load_are_those_of_a_configuration(tmp_path):
    """transformers sets attributes of a configuration that it has made and checked."""
    model, (text,) = native("one_softmax"), prompts(40)
    model.save_pretrained(tmp_path)
    load = NSAForCausalLM.from_pretrained
    kept = model.config.nsa

    fewer = load(tmp_path, nsa=dict(num_selected_blocks=1))
    assert fewer.config.nsa == kept | dict(num_selected_blocks=1)
    assert all(layer.num_selected_blocks == 1 for layer in layers_of(fewer))
    assert load(tmp_path, nsa=dict(preset="one-softmax", length=64)).config.nsa != kept
    last = load(tmp_path, dense_layers=[-1])
    assert last.config.dense_layers == [model.config.num_hidden_layers - 1]
    expected = load(tmp_path, dense_layers=last.config.dense_layers)(text).logits
    close(last(text).logits, expected, atol=0, rtol=0)
    assert not expected.equal(model(text).logits)
    saved = json.loads((tmp_path / "config.json").read_text())
    for name in ("paper", None):  # as a file may say it
        (tmp_path / "config.json").write_text(json.dumps(saved | dict(nsa=name)))
        form = AutoConfig.from_pretrained(tmp_path).nsa
        fewer = AutoConfig.from_pretrained(tmp_path, nsa=dict(num_selected_blocks=1))
        assert fewer.nsa == form | dict(num_selected_blocks=1)
    for given, told in (
        (dict(dense_layers=[9]), "dense_layers"),
        (dict(nsa="papers"), "papers"),
        (dict(nsa=dict(nonsense=3)), "unexpected keyword argument 'nonsense'"),
        (dict(nsa=3), "nsa must be an NSAConfig, a dict of settings"),
    ):
        with pytest.raises(ValueError, match=told):
            AutoConfig.from_pretrained(tmp_path, **given)


def test_attributes_that_are_set_later_are_checked():
    config = native("one_softmax").config
    config.nsa = "one-softmax"
    assert NSAForCausalLM(config).config.nsa["branches"] == ["selected"]
    config.dense_layers = [9]
    with pytest.raises(ValueError, match="dense_layers"):
        NSAForCausalLM(config)
