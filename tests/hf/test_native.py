"""The model of this library in transformers: numbers, configuration, files and initial weights."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from native_sparse_attention import KVCache, NSAConfig
from native_sparse_attention.checks import INTEGER_DTYPES
from native_sparse_attention.hf import (
    NSAForCausalLM,
    NSAModel,
    NSAModelConfig,
    convert,
    use_sparse_attention,
)
from tests.helpers.batches import CACHE, call, call_in_pieces, dynamic
from tests.helpers.tiny_models import FORMS, SIZES, close, moved, native, prompts, tiny

form = pytest.mark.parametrize("form", FORMS)


def layers_of(model):
    return [layer.self_attn.attention for layer in model.base_model.layers]


def test_converted_llama_is_this_model():
    """All blocks, under one softmax: dense attention, with the names of the converted model."""
    rope = dict(rope_type="default", rope_theta=1e4)
    llama, (text,) = tiny(rope_parameters=rope), prompts(40)
    blocks = dict(selection_block_size=4, num_selected_blocks=20, dense_length=0)
    converted = convert(copy.deepcopy(llama), **blocks)
    settings = dict(converted.config.nsa_converted)
    del settings["gate_bias"]
    model = native(settings)
    model.load_state_dict(converted.state_dict())
    close(model(text).logits, llama(text).logits)


@torch.no_grad()
def test_dense_and_local_layers():
    """Dense ones attend to all tokens, local ones rank nothing, whatever `dense_length` is."""
    (text,), covered = prompts(60), FORMS["one_softmax"] | dict(num_selected_blocks=20)
    whole = native(covered)

    def logits(ids=text, **layers):
        model = native(dict(covered, num_selected_blocks=1, dense_length=8), **layers)
        model.load_state_dict(whole.state_dict())
        listed = {index % 2 for indices in layers.values() for index in indices}
        assert [layer.config.ranks for layer in layers_of(model)] == [
            i not in listed for i in (0, 1)
        ]
        out = model(ids, use_cache=False).logits
        close(call_in_pieces(model, ids, dynamic(model), 0, *range(33, 61)), out)
        return out[:, -1]

    expected = whole(text).logits[:, -1]
    close(logits(dense_layers=[0, 1]), expected)
    assert (logits(dense_layers=[0]) - expected).abs().max() > 1e-2
    other = text.clone()
    other[0, 20] = text[0, 20] % 60 + 1
    assert torch.equal(*(logits(ids, local_layers=[0, 1]) for ids in (text, other)))


@torch.no_grad()
def test_outputs():
    model, (text,) = native("one_softmax", pad_token_id=None), prompts(24)
    out = model(text, labels=text, output_hidden_states=True)
    close(out.loss, F.cross_entropy(out.logits[0, :-1], text[0, 1:]))
    assert len(out.hidden_states) == 3 and out.ranking_loss is None
    for dtype in INTEGER_DTYPES:
        assert torch.equal(model(text.to(dtype), labels=text.to(dtype)).loss, out.loss)
    close(model(text, logits_to_keep=torch.tensor([3, 5])).logits, out.logits[:, [3, 5]])
    pair = model(text, return_dict=False, use_cache=False)
    assert isinstance(pair, tuple) and len(pair) == 1
    first = model(inputs_embeds=model.model.embed_tokens(text[:, :20]), use_cache=True)
    close(call(model, text[:, 20:], getattr(first, CACHE)), out.logits[:, 20:])
    assert getattr(model.train()(text), CACHE) is None
    assert getattr(model(text, use_cache=True), CACHE) is not None


@torch.no_grad()
def test_calls_of_another_form_are_refused():
    model, (text,) = native("one_softmax"), prompts(12)
    for given, message in (
        ({}, "exactly one of input_ids or inputs_embeds"),
        (dict(labels=text), "exactly one of input_ids or inputs_embeds"),
        (dict(input_ids=text[0], labels=text[0]), "input_ids or inputs_embeds, of shape"),
        (dict(input_ids=text, ranking_queries=4), "ranking_queries goes with importance='index'"),
        (dict(input_ids=text, ranking_weights=0), "weights must be one of 'output', 'mass'"),
        (dict(input_ids=text + 64), "input_ids must be token ids from 0 to 63"),
        (dict(input_ids=text.float()), "input_ids must be a tensor of integers"),
        (dict(input_ids=text, labels=text[0]), r"labels must be integers of shape \[1, 12\]"),
        (dict(input_ids=text, shift_labels=text[0]), "shift_labels must be integers of shape"),
        (dict(input_ids=text, labels=text + 64), "labels other .* ids from 0 to 63, got 1"),
        (dict(input_ids=text, labels=text, logits_to_keep=2), "to_keep must be 0 with labels"),
        (dict(input_ids=text, logits_to_keep=-3), "to_keep must be an integer of at least 0"),
        (dict(input_ids=[[3]], labels=text), "input_ids must be a tensor of integers"),
        (dict(inputs_embeds=[[3]], labels=text), "inputs_embeds must be a tensor of shape"),
        (dict(input_ids=text, attention_mask="x"), "attention_mask must be a tensor"),
        (dict(input_ids=text, attention_mask=torch.tensor(1)), "attention_mask must be a tensor"),
        (dict(input_ids=text, position_ids=torch.arange(5)[None]), "ids must be of 12 tokens, got"),
        (dict(input_ids=text, position_ids=3), "position_ids must be a tensor of shape"),
        (dict(input_ids=text, use_cache="no"), "use_cache must be True or False, got 'no'"),
        ({"input_ids": text, CACHE: [KVCache()]}, "past_key_values must be a Cache of transf"),
        (dict(input_ids=text, labels=text, num_items_in_batch=-1), "num_items_in_batch must be"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**given)
    for one in (model, model.model):
        with pytest.raises(TypeError, match="argument 'cu_seqlens': did you mean cu_seq_lens_q?"):
            one(text, cu_seqlens=text)
    other = NSAForCausalLM._from_config(model.config, attn_implementation="sdpa")
    assert other.config._attn_implementation == "nsa"
    for switch in (use_sparse_attention, convert):
        with pytest.raises(ValueError, match="of SparseAttention layers"):
            switch(model)


def test_settings_are_those_of_the_preset_and_go_through_json(tmp_path):
    config = NSAModelConfig(**SIZES, nsa=FORMS["branches"], dense_layers=[-1], rope_theta=5e5)
    assert config.nsa["num_initial_blocks"] == 1 and config.nsa["selection_block_size"] == 8
    assert config.dense_layers == [1] and config.nsa["index_dim"] == 8
    config.save_pretrained(tmp_path)
    again = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(again) is NSAModelConfig
    assert again.to_dict() | dict(_name_or_path="") == config.to_dict()
    assert again.layer_config_of(0) == config.layer_config_of(0)
    assert copy.deepcopy(config).to_dict() == config.to_dict()
    # of max_position_embeddings=256, and of a length of its own
    for nsa, size in (("paper", 16), (dict(preset="paper", length=9999), 64)):
        assert NSAModelConfig(**SIZES, nsa=nsa).nsa["selection_block_size"] == size
    assert NSAModelConfig(**SIZES).nsa["branches"] == ("selected",)
    layer = config.layer_config_of(0)
    assert NSAModelConfig(**SIZES, rms_norm_eps=1e-6, nsa=layer).nsa == config.nsa


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(hidden_size=0), "hidden_size must be an integer of at least 1, got 0"),
        (dict(head_dim=None, hidden_size=30), "head_dim must be given .*hidden_size=30"),
        (dict(num_key_value_heads=3), "num_attention_heads must be a multiple of num_key"),
        (dict(head_dim=7), "head_dim must be even for rotary embedding, got 7"),
        (dict(rope_theta=-1.0), "rope_theta must be a finite number above 0, got -1.0"),
        (dict(qk_norm="yes"), "qk_norm must be True or False, got 'yes'"),
        (dict(dense_layers=[2]), "dense_layers must be .* below 2, got 2"),
        (dict(dense_layers=1), "dense_layers must be a list of indices of layers, got 1"),
        (dict(local_layers=[0, 1], dense_layers=[1]), r"local_layers must not .* \[1\] in both"),
        (dict(attention_dropout=0.1), "attention_dropout must be 0.0, .* got 0.1"),
        (dict(rope_scaling=dict(rope_type="yarn")), "rope_scaling must be None, .* got {"),
        (dict(hidden_act="gelu"), "hidden_act must be 'silu', .* got 'gelu'"),
        (dict(nsa=3), "nsa must be an NSAConfig, .* got 3"),
        (dict(nsa="dense"), "preset in nsa must be one of 'published', .*softmax', got 'dense'"),
        (dict(nsa=dict(heads=2)), "heads must be 4, which the model decides, got 2"),
        (dict(nsa=NSAConfig(dim=32, dim_head=16, heads=4)), "dim_head must be 8, .* got 16"),
        (dict(nsa=dict(blocks=4)), "unexpected keyword argument 'blocks'"),
        (dict(nsa=dict(length=4)), "length in nsa goes with a preset, got 4"),
        (dict(num_selected_blocks=3), "num_selected_blocks must be a setting in nsa, got 3"),
        (dict(pad_token_id=64), "pad_token_id must be an integer .* below 64, got 64"),
        (dict(bos_token_id="4"), "bos_token_id must be an integer .* got .4."),
        (dict(eos_token_id=[2, 4.5]), "eos_token_id must be an integer .* got 4.5"),
        (dict(ranking_queries=8), "ranking_queries goes with importance='index' in nsa, got 8"),
        (dict(nsa=FORMS["index"], ranking_weights="sum"), "ranking_weights must be one of"),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        NSAModelConfig(**SIZES | settings)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_frequencies_stay_in_fp32(dtype, tmp_path):
    model, (text,) = moved(native("one_softmax", rope_theta=700.0)), prompts(40)
    model.save_pretrained(tmp_path)
    expected = layers_of(model)[0].rotary_emb.freqs.clone()
    base = transformers.AutoModel.from_pretrained(tmp_path)
    assert type(base) is NSAModel
    close(base(text).last_hidden_state, model.model(text).last_hidden_state, tol=0)
    loaded = NSAForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    for other in (loaded, model.to(dtype)):
        rotary = layers_of(other)[1].rotary_emb
        close(rotary.freqs, expected, tol=0)
        close(rotary.exact.view(torch.float32), expected, tol=0)
    close(loaded(text).logits, model(text).logits, tol=0)
    loaded.save_pretrained(tmp_path)  # and in a checkpoint of this dtype
    again = NSAForCausalLM.from_pretrained(tmp_path)
    close(layers_of(again)[0].rotary_emb.freqs, expected, tol=0)
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
            assert not layer.to_strategy_combine[0].weight.any()
            assert not layer.compress_mem_kv.any()
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
        close(loaded.state_dict()[name], value, tol=0)
    for layer in layers_of(loaded):
        assert layer.to_strategy_combine[0].bias.unique().tolist() == [-2, 2]
    last = layers_of(loaded)[1]
    assert not last.k_intrablock_positions.any() and last.combine_heads.weight.std() > 0.2
    close(last.k_compress.state_dict(), last.v_compress.state_dict(), tol=0)


@form
@torch.no_grad()
def test_layers_can_be_on_other_devices_and_on_disk(form, tmp_path):
    pytest.importorskip("accelerate", reason="device_map needs it")
    model, (text,) = moved(native(form)), prompts(40)
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    expected = model(text).logits
    auto = NSAForCausalLM.from_pretrained(tmp_path / "saved", device_map="auto")
    close(auto(text.to(auto.device)).logits, expected, check_device=False)
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    given = dict(attention_mask=torch.ones_like(text), max_new_tokens=3, do_sample=False)
    for offload_buffers in (False, True):
        split = NSAForCausalLM.from_pretrained(
            tmp_path / "saved", device_map=places, offload_folder=tmp_path / "offloaded",
            offload_buffers=offload_buffers,
        )  # fmt: skip
        assert layers_of(split)[1].to_qkv.weight.is_meta
        close(split(text).logits, expected)
        assert split.generate(text, **given).equal(model.generate(text, **given))


@torch.no_grad()
def test_embeddings_can_be_tied_and_resized(tmp_path):
    model, (text,) = moved(native("one_softmax", tie_word_embeddings=True)), prompts(20)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded, expected = NSAForCausalLM.from_pretrained(tmp_path), model(text).logits
    close(loaded(text).logits, expected, tol=0)
    loaded.resize_token_embeddings(70, mean_resizing=False)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    close(loaded(text, labels=text).logits[..., :64], expected)


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
    close(last(text).logits, expected, tol=0)
    assert not expected.equal(model(text).logits)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "nsa" and saved["architectures"] == ["NSAForCausalLM"]
    freqs = layers_of(load(tmp_path, rope_theta=99.0))[0].rotary_emb.freqs
    assert freqs[1].item() == pytest.approx(99.0**-0.25)
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
    model.config.nsa = "one-softmax"  # attributes that are set later are checked too
    assert NSAForCausalLM(model.config).config.nsa["branches"] == ("selected",)
    model.config.dense_layers = [9]
    with pytest.raises(ValueError, match="dense_layers"):
        NSAForCausalLM(model.config)
