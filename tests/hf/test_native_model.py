"""The model of this library in transformers: its numbers, its caches and `generate`."""

import copy

import pytest
import torch
import torch.nn.functional as F

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from native_sparse_attention import SparseAttention
from native_sparse_attention.hf import NSAForCausalLM, NSAModelConfig, convert, use_sparse_attention
from tests.helpers.tiny_models import (
    CACHE,
    FORMS,
    SIZES,
    dynamic,
    native,
    prompts,
    step_by_step,
    tiny,
)

TOL = dict(atol=1e-4, rtol=1e-4)
close = torch.testing.assert_close
form = pytest.mark.parametrize("form", FORMS)


@form
@torch.no_grad()
def test_model_is_its_layers_one_after_the_other(form):
    model, (text,) = native(form, qk_norm=True, dense_layers=[-1], rope_theta=500.0), prompts(40)
    config, x = model.config, model.model.embed_tokens(text)
    for index, layer in enumerate(model.model.layers):
        attention = SparseAttention.from_config(config.layer_config_of(index), rope_theta=500.0)
        attention.load_state_dict(layer.self_attn.attention.state_dict())
        x = x + attention(F.rms_norm(x, (32,), layer.input_layernorm.weight, 1e-6))
        y = F.rms_norm(x, (32,), layer.post_attention_layernorm.weight, 1e-6)
        mlp = layer.mlp
        gate, up = y @ mlp.gate_proj.weight.T, y @ mlp.up_proj.weight.T
        x = x + (F.silu(gate) * up) @ mlp.down_proj.weight.T
    x = F.rms_norm(x, (32,), model.model.norm.weight, 1e-6)
    close(model(text).logits, x @ model.lm_head.weight.T, **TOL)
    close(model.model(text).last_hidden_state, x, **TOL)


def test_converted_llama_is_this_model():
    """All blocks, under one softmax: dense attention, with the names of the converted model."""
    rope = dict(rope_type="default", rope_theta=1e4)
    llama, (text,) = tiny(rope_parameters=rope), prompts(40)
    given = dict(attention_mask=torch.ones_like(text), max_new_tokens=8, do_sample=False)
    blocks = dict(selection_block_size=4, num_selected_blocks=20, dense_length=0)
    converted = convert(copy.deepcopy(llama), **blocks)
    settings = dict(converted.config.nsa_converted)
    del settings["gate_bias"]
    model = native(settings)
    model.load_state_dict(converted.state_dict())
    close(model(text).logits, llama(text).logits, **TOL)
    assert model.generate(text, **given).equal(llama.generate(text, **given))
    for m in (model, llama):
        m(text, labels=text).loss.backward()
    close(model.lm_head.weight.grad, llama.lm_head.weight.grad, **TOL)
    close(model.model.embed_tokens.weight.grad, llama.model.embed_tokens.weight.grad, **TOL)


@torch.no_grad()
def test_dense_layers_attend_to_all_tokens():
    covered = FORMS["one_softmax"] | dict(num_selected_blocks=20)
    model, whole = native("one_softmax", dense_layers=(0, -1)), native(covered)
    whole.load_state_dict(model.state_dict())
    (text,) = prompts(40)
    close(model(text).logits, whole(text).logits, **TOL)
    sparse = native("one_softmax", dense_layers=[0])
    sparse.load_state_dict(model.state_dict())
    assert (sparse(text).logits - whole(text).logits).abs().max() > 1e-2


@torch.no_grad()
def test_local_layers_rank_nothing():
    model = native("one_softmax", local_layers=[-1])
    assert [model.config.layer_config_of(i).num_selected_blocks for i in (0, 1)] == [
        model.config.nsa["num_selected_blocks"], 0,
    ]  # fmt: skip
    attention = model.model.layers[1].self_attn.attention
    assert not attention.config.ranks and model.model.layers[0].self_attn.attention.config.ranks
    (text,) = prompts(40)
    whole = native("one_softmax")
    whole.load_state_dict(model.state_dict())
    assert (model(text).logits - whole(text).logits).abs().max() > 1e-2
    close(step_by_step(model, text, 33, dynamic(model)), model(text).logits, **TOL)


@torch.no_grad()
def test_logits_labels_and_outputs():
    model, (text,) = native("one_softmax", pad_token_id=None), prompts(24)
    out = model(text, labels=text, output_hidden_states=True)
    expected = F.cross_entropy(out.logits[0, :-1], text[0, 1:])
    close(out.loss, expected)
    assert len(out.hidden_states) == 3 and out.ranking_loss is None
    close(out.hidden_states[0], model.model.embed_tokens(text))
    close(model(text, logits_to_keep=2).logits, out.logits[:, -2:], **TOL)
    close(model(text, logits_to_keep=torch.tensor([3, 5])).logits, out.logits[:, [3, 5]], **TOL)
    embedded = model(inputs_embeds=model.model.embed_tokens(text)).logits
    close(embedded, out.logits, **TOL)
    pair = model(text, return_dict=False, use_cache=False)
    assert isinstance(pair, tuple) and len(pair) == 1
    first = model(text[:, :20], use_cache=True)
    close(model(text[:, 20:], **{CACHE: getattr(first, CACHE)}).logits, out.logits[:, 20:], **TOL)
    assert getattr(model.train()(text), CACHE) is None
    assert getattr(model(text, use_cache=True), CACHE) is not None


@torch.no_grad()
def test_calls_of_another_form_are_refused():
    model, (text,) = native("one_softmax"), prompts(12)
    sliding = transformers.StaticCache(tiny("Gemma3").config, max_cache_len=48)
    for given, message in (
        ({}, "exactly one of input_ids or inputs_embeds"),
        ({"input_ids": text, CACHE: sliding}, "must be a DynamicCache or a StaticCache"),
        (dict(input_ids=text, position_ids=2 * torch.arange(12)[None]), "must count up by 1"),
        (dict(input_ids=text, output_attentions=True), "output_attentions"),
        (dict(input_ids=text, ranking_queries=4), "ranking_queries goes with importance='index'"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**given)
    other = NSAForCausalLM._from_config(model.config, attn_implementation="sdpa")
    assert other.config._attn_implementation == "nsa"
    for switch in (use_sparse_attention, convert):
        with pytest.raises(ValueError, match="of SparseAttention layers"):
            switch(model)


# the configuration


def test_settings_are_those_of_the_preset_and_go_through_json(tmp_path):
    config = NSAModelConfig(**SIZES, nsa=FORMS["branches"], dense_layers=[-1], rope_theta=5e5)
    assert config.nsa["num_initial_blocks"] == 1 and config.nsa["selection_block_size"] == 8
    assert config.dense_layers == [1] and config.nsa["index_dim"] == 8
    config.save_pretrained(tmp_path)
    again = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(again) is NSAModelConfig
    assert again.to_dict() | dict(_name_or_path="") == config.to_dict()
    assert again.layer_config == config.layer_config
    assert copy.deepcopy(config).to_dict() == config.to_dict()
    by_length = NSAModelConfig(**SIZES, nsa="paper")  # max_position_embeddings=256
    assert by_length.nsa["selection_block_size"] == 16
    assert (
        NSAModelConfig(**SIZES, nsa=dict(preset="paper", length=9999)).nsa["compress_block_size"]
        == 32
    )
    assert NSAModelConfig(**SIZES).nsa["branches"] == ["selected"]
    layer = config.layer_config
    assert NSAModelConfig(**SIZES, rms_norm_eps=1e-6, nsa=layer).nsa == config.nsa


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(hidden_size=0), "hidden_size must be an integer of at least 1, got 0"),
        (dict(num_key_value_heads=3), "must divide num_attention_heads=4, got 3"),
        (dict(head_dim=None, hidden_size=30), "head_dim must be given .*hidden_size=30"),
        (dict(head_dim=7), "head_dim must be even for rotary embedding, got 7"),
        (dict(rope_theta=-1.0), "rope_theta must be a finite number above 0, got -1.0"),
        (dict(qk_norm="yes"), "qk_norm must be True or False, got 'yes'"),
        (dict(dense_layers=[2]), "dense_layers must be .* below 2, got 2"),
        (dict(dense_layers=1), "dense_layers must be a list of indices of layers, got 1"),
        (dict(local_layers=[2]), "local_layers must be .* below 2, got 2"),
        (dict(local_layers=[0, 1], dense_layers=[1]), r"local_layers must not .* \[1\] in both"),
        (dict(attention_dropout=0.1), "attention_dropout must be 0.0, .* got 0.1"),
        (dict(rope_scaling=dict(rope_type="yarn")), "rope_scaling must be None, .* got {"),
        (dict(hidden_act="gelu"), "hidden_act must be 'silu', .* got 'gelu'"),
        (dict(nsa=3), "nsa must be an NSAConfig, .* got 3"),
        (dict(nsa="dense"), "must be one of 'published', 'paper', .* 'one-softmax', got 'dense'"),
        (dict(nsa=dict(heads=2)), "heads must be 4, which the model decides, got 2"),
        (dict(nsa=dict(blocks=4)), "unexpected keyword argument 'blocks'"),
        (dict(nsa=dict(length=4)), "length in nsa goes with a preset, got 4"),
        (dict(nsa=dict(selection_block_size=0)), "selection_block_size must be .* got 0"),
        (dict(ranking_queries=8), "ranking_queries goes with importance='index' in nsa, got 8"),
        (dict(nsa=FORMS["index"], ranking_weights="sum"), "ranking_weights must be one of"),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        NSAModelConfig(**SIZES | settings)


def test_an_nsa_config_has_the_widths_of_the_model():
    layer = NSAModelConfig(**SIZES).layer_config
    with pytest.raises(ValueError, match="dim_head must be 16, which the model decides, got 8"):
        NSAModelConfig(**SIZES | dict(head_dim=16), nsa=layer)


@torch.no_grad()
def test_local_layers_of_a_preset_are_local():
    """Its `dense_length` is for layers that rank."""
    blocks = dict(selection_block_size=4, num_initial_blocks=1, num_local_blocks=2)
    model = native(dict(preset="one-softmax", **blocks), local_layers=[0, 1])
    (text,) = prompts(60)
    other = text.clone()
    other[0, 20] = text[0, 20] % 60 + 1
    ends = [model(ids, use_cache=False).logits[:, -1] for ids in (text, other)]
    assert torch.equal(*ends)
