"""Layers that take the block indices of another (`share_ranking`): the drop-in, converted models
and the native one. Padding, packing, caches, checkpointing and files of them: test_models.py."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from native_sparse_attention import hf, native_sparse_attention
from native_sparse_attention.hf.attention import attention
from native_sparse_attention.hf.mask import NSAMask
from tests.helpers import tiny_models as models

FORMS = {
    "tokens": {},
    "groups": dict(selection_stride=4),
    "gates": dict(use_diff_topk=True, dense_length=9),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_reads_what_another_ranked(form):
    """In a layer that is computed again too, after others have ranked."""
    settings = models.SPARSE | FORMS[form]
    model = hf.use_sparse_attention(
        models.tiny(num_hidden_layers=4), **settings, share_ranking=[0, 2]
    )
    inputs = [[torch.randn(1, heads, 40, 8) for heads in (4, 2, 2)] for _ in range(4)]
    mask = NSAMask(40)
    modules = [SimpleNamespace(config=model.config, layer_idx=i) for i in range(4)]
    outs = [attention(module, *qkv, mask)[0] for module, qkv in zip(modules, inputs)]
    sizes = dict(sliding_window_size=0, compress_block_size=1, compress_block_sliding_stride=1)
    settings = settings | sizes | dict(branches=("selected",), importance="head_max")
    for i, (q, k, v) in enumerate([t.transpose(1, 2) for t in qkv] for qkv in inputs):
        if i % 2 == 0:
            call = q, k, v, k, None, None
            out, indices = native_sparse_attention(*call, **settings, return_block_indices=True)
        else:
            given = settings | dict(use_diff_topk=False, block_indices=indices)
            out = native_sparse_attention(q, k, v, None, None, None, **given)
        models.close(outs[i], out)
    assert attention(modules[1], *inputs[1], mask)[0].equal(outs[1])


@torch.no_grad()
def test_layers_of_the_native_model():
    model = models.native("index", num_hidden_layers=5, share_ranking=[0, 3], local_layers=[1])
    (ids,) = models.prompts(50)
    rules = [layer.self_attn.attention.importance for layer in model.model.layers]
    assert rules == ["index", "index", "given", "index", "given"]
    x, indices = model.model.embed_tokens(ids), None
    for i, layer in enumerate(model.model.layers):
        call = dict(return_block_indices=True) if i in (0, 3) else {}
        call = dict(block_indices=indices) if i in (2, 4) else call
        out = layer.self_attn.attention(layer.input_layernorm(x), **call)
        out, indices = out if i in (0, 3) else (out, indices)
        x = x + out
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    models.close(model(ids).logits, model.lm_head(model.model.norm(x)))


@torch.no_grad()
@pytest.mark.parametrize("is_packed", [True, False])
def test_rows_of_groups_are_longer_than_those_of_blocks(is_packed):
    """A document begins at a multiple of the groups of the layer that ranks, and of the blocks of
    the layer that is given blocks."""
    settings = dict(models.SPARSE, dense_length=0, num_selected_groups=1, num_local_blocks=4)
    model = hf.convert(models.tiny(), **settings, importance="max", share_ranking=[0])
    parts = [part[0] for part in models.prompts(9, 26, 15)]
    if is_packed:
        positions = torch.cat([torch.arange(len(part)) for part in parts])[None]
        call = dict(input_ids=torch.cat(parts)[None], position_ids=positions)
    else:
        mask = torch.arange(26) >= 26 - torch.tensor([[len(part)] for part in parts])
        ids = torch.zeros_like(mask, dtype=torch.long).masked_scatter(mask, torch.cat(parts))
        call = dict(input_ids=ids, attention_mask=mask)
    want = torch.cat([model(part[None], use_cache=False).logits[0] for part in parts])
    out = model(**call, use_cache=False).logits
    models.close(out[0] if is_packed else out[mask], want)


@torch.no_grad()
def test_windows():
    """Layers with a window are left out."""
    (ids,), kinds = models.prompts(40), ["sliding_attention", "full_attention"] * 2
    model = models.tiny("Gemma3", num_hidden_layers=4, layer_types=kinds)
    state = model.state_dict()
    hf.use_sparse_attention(model, **models.SPARSE, share_ranking=[-3])
    assert model.config.nsa_config["share_ranking"] == [1]
    converted = models.tiny("Gemma3", num_hidden_layers=4, layer_types=kinds)
    converted.load_state_dict(state)
    hf.convert(converted, **models.SPARSE, importance="head_max", share_ranking=[np.int64(1)])
    assert json.loads(converted.config.to_json_string())["nsa_converted"]["share_ranking"] == [1]
    models.close(converted(ids).logits, model(ids).logits)
    expected = r"must begin with layer 1 and leave out layers that select no blocks, got \[0\]"
    for change in (hf.use_sparse_attention, hf.convert):
        with pytest.raises(ValueError, match=expected):
            change(models.tiny("Gemma3", layer_types=kinds[:2]), share_ranking=[0])
    with pytest.raises(ValueError, match="begin with layer 0"):
        models.native(share_ranking=[1])
    inputs = [torch.randn(1, heads, 40, 8) for heads in (4, 2, 2)]
    with pytest.raises(ValueError, match="attention_mask must be of all layers with share_ranking"):
        attention(SimpleNamespace(config=model.config, layer_idx=3), *inputs)
