"""Settings, models that are refused, and the way back."""

import copy
import importlib
import json
import re
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from native_sparse_attention import DenseAttentionWarning, NSAConfig
from native_sparse_attention.hf import (
    NSAForCausalLM,
    convert,
    load_converted,
    use_dense_attention,
    use_sparse_attention,
)
from native_sparse_attention.ops import branches
from tests.helpers.tiny_models import SIZES, SPARSE, close, native, of_parts, prompts, tiny

MESSAGES = [
    (dict(selection_block=4), "unexpected keyword argument 'selection_block': did you mean"),
    (dict(importance="index"), "importance must be one of .*'max', 'head_max', got 'index'"),
    (dict(branches=("window",)), r"branches must be \('selected',\), which the model decides"),
    (dict(causal=False), "causal must be True, which the model decides, got False"),
    (dict(soft_cap=3.0), "soft_cap must be None, which the model decides, got 3.0"),
    (dict(scale=np.ones(2)), "scale must be None, which the model decides, got array"),
    (dict(compress_block_size=3), "must divide one another, got 64 and 3"),
    (dict(dim=32), "unexpected keyword argument 'dim'"),
    (dict(config={1: 2}), "unexpected keyword argument 1"),
]


@pytest.mark.parametrize(("settings", "told"), MESSAGES)
def test_settings_are_checked(settings, told):
    model = tiny()
    with pytest.raises(ValueError, match=told):
        use_sparse_attention(model, **settings)
    assert model.config._attn_implementation == "sdpa"
    assert not hasattr(model.config, "nsa_config")


def test_dense_attention_is_told_once():
    model, (ids,) = use_sparse_attention(tiny()), prompts(9)
    branches.TOLD.clear()
    with pytest.warns(DenseAttentionWarning, match=r"up to 8192 tokens \(dense_length\)") as told:
        for _ in range(2):
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2)
    assert [warning.category for warning in told] == [DenseAttentionWarning]
    # over caches, too
    for other in (convert(tiny()), native(dict(preset="one-softmax"))):
        branches.TOLD.clear()
        with pytest.warns(DenseAttentionWarning, match="up to 8192 tokens"):
            other(ids)


def test_models_take_no_block_indices():
    for make in (lambda **given: native(given), lambda **given: convert(tiny(), **given)):
        with pytest.raises(ValueError, match="importance must be a rule by which"):
            make(importance="given")


def test_a_config_gives_settings():
    model = use_sparse_attention(tiny(), selection_block_size=32, compress_block_size=8)
    kept = model.config.nsa_config
    assert kept["selection_block_size"] == 32 and kept["num_selected_blocks"] == 16
    assert kept["compress_block_size"] == kept["compress_block_sliding_stride"] == 8
    assert use_sparse_attention(tiny("Gemma2"), kept).config.nsa_config == kept | dict(
        replaced_implementation="eager"
    )
    form = dict(dim=32, dim_head=8, heads=4, kv_heads=2, branches=("selected",), causal=True)
    config = NSAConfig(**form, rank_rotated=True, compress_block_size=1, importance="max")
    use_sparse_attention(model, dict(branches=["selected"]))  # as a file has it
    use_sparse_attention(model, config, num_selected_blocks=3, share_ranking=[np.int64(-2)])
    assert json.loads(model.config.to_json_string())["nsa_config"]["share_ranking"] == [0]
    assert model.config.nsa_config["num_selected_blocks"] == 3
    assert model.config.nsa_config["importance"] == "max"
    assert model.config.nsa_config["num_local_blocks"] == 1
    with pytest.raises(ValueError, match="branches must be .*, which the model decides"):
        use_sparse_attention(model, NSAConfig(**form | dict(branches=("selected", "window"))))
    for wrong in (dict(heads=8), dict(kv_heads=4), dict(dim=64), dict(dim_head=16)):
        (name,) = wrong
        with pytest.raises(ValueError, match=f"{name} must be .*, which the model decides, got"):
            use_sparse_attention(model, NSAConfig(**form | wrong, rank_rotated=True))
    with pytest.raises(ValueError, match="config must be an NSAConfig, a dict of settings or None"):
        use_sparse_attention(model, 64)


@torch.no_grad()
def test_settings_change_and_go():
    model, (text,) = tiny("Gemma2"), prompts(40)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    dense, config = model(text).logits, model.config.to_dict()
    assert use_sparse_attention(model, **SPARSE) is model
    sparse, kept = model(text).logits, dict(model.config.nsa_config)
    use_sparse_attention(model)  # again: nothing changes
    assert model.config.nsa_config == kept
    close(model(text).logits, sparse)
    use_sparse_attention(model, **SPARSE | dict(num_selected_blocks=3))
    assert not model(text).logits.equal(sparse)
    assert use_dense_attention(model) is model
    assert model.config._attn_implementation == "eager"
    assert model.config.to_dict() == config
    close(model(text).logits, dense, tol=0)
    use_sparse_attention(model).set_attn_implementation("eager")
    use_dense_attention(model)
    assert model.config.to_dict() == config  # else its file would say "nsa"
    use_dense_attention(model)
    assert all(p.equal(before[name]) for name, p in model.state_dict().items())


@torch.no_grad()
def test_saved_models_keep_their_settings(tmp_path, monkeypatch):
    model, (text,) = use_sparse_attention(tiny(), **SPARSE), prompts(40)
    expected = model(text).logits
    close(copy.deepcopy(model)(text).logits, expected)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["nsa_config"]
    assert saved["selection_block_size"] == 4
    load = transformers.AutoModelForCausalLM.from_pretrained
    for path in (tmp_path, tmp_path / "again"):
        again = load(path)
        assert again.config._attn_implementation == "nsa"
        close(again(text).logits, expected)
        again.save_pretrained(tmp_path / "again")
    for name, wrong in (("num_selected_block", 1), ("share_ranking", [1]), ("dense_length", "8")):
        edited = load(tmp_path, nsa_config={name: wrong})
        for _ in range(2):
            with pytest.raises(ValueError, match=name):
                edited(text)
    dense = use_dense_attention(again)
    assert dense.config._attn_implementation == "sdpa"
    dense.save_pretrained(tmp_path)
    for path, given in ((tmp_path, {}), (tmp_path / "again", dict(attn_implementation="sdpa"))):
        assert load(path, **given).config._attn_implementation == "sdpa"
    monkeypatch.delitem(transformers.AttentionInterface._global_mapping, "nsa")
    with pytest.raises(ValueError, match='"nsa"` is not supported'):  # without this library
        load(tmp_path / "again")


@torch.no_grad()
def test_settings_of_a_file(tmp_path):
    """A first forward checks and completes them, as `use_sparse_attention` does."""
    (text,) = prompts(40)

    def load(**settings):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        model.set_attn_implementation("nsa")
        model.config.nsa_config = settings
        return model

    tiny().save_pretrained(tmp_path)
    for change in (dict(importance="logits"), dict(num_selected_groups=1, num_local_blocks=4)):
        expected = use_sparse_attention(tiny(), **SPARSE | change)(text).logits
        model = load(**SPARSE | change)
        close(model(text).logits, expected, tol=0)
        assert model.config.nsa_config["ranking_bits"] == 16
    model = load(compress_block_size=8)
    model(text)
    assert model.config.nsa_config["compress_block_sliding_stride"] == 8


@pytest.mark.parametrize("change", [dict(importance="logits"), dict(num_selected_groups=2)])
def test_single_settings_that_exclude_8_bits_replace_those_of_a_config(change, tmp_path):
    config = NSAConfig(dim=32, dim_head=8, heads=4, kv_heads=2, norm=False)
    kept = use_sparse_attention(tiny(), config, **change).config.nsa_config
    assert config.ranking_bits == 8 and kept["ranking_bits"] == 16
    model = convert(tiny(), config, **change)
    assert model.model.layers[0].self_attn.attention.ranking_bits == 16
    convert(tiny(), config).save_pretrained(tmp_path / "converted")
    model = load_converted(tmp_path / "converted", **change)
    assert model.model.layers[0].self_attn.attention.ranking_bits == 16
    native(dict(preset="one-softmax")).save_pretrained(tmp_path / "native")
    for asked in (change, change | dict(ranking_bits=16)):
        model = NSAForCausalLM.from_pretrained(tmp_path / "native", nsa=asked)
        assert model.config.nsa["ranking_bits"] == 16
    with pytest.raises(ValueError, match="ranking_bits=8 goes with"):
        use_sparse_attention(tiny(), config, **change, ranking_bits=8)


HEADS = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
REFUSED = dict(
    Mistral=(SIZES, "full attention, got MistralForCausalLM with sliding_window=4096 in all"),
    T5=(dict(d_model=32, num_layers=1), "with an encoder"),
    Bert=(HEADS, "causal, got BertModel with is_causal=False"),
    Falcon=(HEADS, "FalconForCausalLM with attention of its"),
    Llama4Text=(dict(SIZES, num_local_experts=1, attention_chunk_size=16), "chunked_attention"),
    MllamaText=(
        dict(SIZES, cross_attention_layers=[1], bos_token_id=1, eos_token_id=2),
        r"without cross-attention, got MllamaForCausalLM with cross_attention_layers=\[1\]",
    ),
)
MODELS = dict(
    T5="T5ForConditionalGeneration", Bert="BertModel", Llama4Text="Llama4ForCausalLM",
    MllamaText="MllamaForCausalLM",
)  # fmt: skip


@pytest.mark.parametrize("family", REFUSED)
def test_models_of_another_form_are_refused(family):
    settings, told = REFUSED[family]
    config = getattr(transformers, family + "Config")(**settings)
    model = getattr(transformers, MODELS.get(family, f"{family}ForCausalLM"))(config).eval()
    with pytest.raises(ValueError, match=f"model must be .*{told}"):
        use_sparse_attention(model)
    if family == "Llama4Text":  # as from_pretrained(..., attn_implementation="nsa") gives it
        model.set_attn_implementation("nsa")
        with pytest.raises(ValueError, match="got Llama4TextConfig with .'chunked_attention'."):
            model(*prompts(40))


def test_models_that_change_their_masks_are_refused():
    sizes = dict(HEADS, num_key_value_heads=2, intermediate_size=48, pad_token_id=0)
    model = use_sparse_attention(transformers.DogeForCausalLM(transformers.DogeConfig(**sizes)))
    with pytest.raises(ValueError, match="model must be one that leaves masks to its attention"):
        model(*prompts(40))


@torch.no_grad()
def test_a_language_model_of_several_parts():
    model = of_parts()
    with pytest.raises(ValueError, match="give model.get_decoder.* of several parts"):
        use_sparse_attention(model)
    decoder = use_sparse_attention(model.get_decoder(), **SPARSE)
    assert model.config.vision_config._attn_implementation == "sdpa"
    (ids,) = prompts(40)
    sparse = decoder(ids).last_hidden_state
    use_dense_attention(decoder)
    assert (decoder(ids).last_hidden_state - sparse).abs().max() > 1e-2


def test_calls_of_another_form_are_refused():
    with pytest.raises(ValueError, match="model must be a PreTrainedModel of transformers, got"):
        use_sparse_attention(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="model must be a PreTrainedModel of transformers, got"):
        use_dense_attention(None)
    model, (text,) = use_sparse_attention(tiny(attention_dropout=0.1), **SPARSE), prompts(20)
    with pytest.raises(ValueError, match="attention_dropout must be 0 .* got 0.1: set"):
        model.train()(text)
    with pytest.raises(ValueError, match="output_attentions must be False with sparse attention"):
        model.eval()(text, output_attentions=True)
    model = use_sparse_attention(tiny(), **SPARSE)
    with pytest.raises(ValueError, match="nsa.* is not supported"):
        model.generate_batch([text[0].tolist()])


@pytest.mark.parametrize("version", ["4.57.3", "5.9.1", "5.16.0.dev0"])
def test_an_old_transformers_is_named(version, monkeypatch):
    """With the version that the extra asks for."""
    extra = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    least = re.search(r'"transformers>=([\d.]+)"', extra)[1]
    hf = importlib.import_module("native_sparse_attention.hf")
    monkeypatch.setattr(metadata, "version", lambda name: version)
    needed = f"pip install .*: transformers>={least} is required .* found transformers=={version}"
    with pytest.raises(ImportError, match=needed):
        importlib.reload(hf)
