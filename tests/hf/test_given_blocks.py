"""Models that select blocks themselves and hand them to the attention function: MiniMax M3."""

import copy

import pytest
import torch
import transformers

from native_sparse_attention.hf import use_sparse_attention
from tests.helpers import batches
from tests.helpers import tiny_models as models

if not hasattr(transformers, "MiniMaxM3VLTextConfig"):
    pytest.skip("a release without MiniMax M3", allow_module_level=True)
KINDS = ["full_attention", "minimax_m3_sparse"]
backends = pytest.mark.parametrize(
    "backend", ["eager", "flex", pytest.param("triton", marks=pytest.mark.kernels)]
)


def pair(backend, **settings):
    """A model with masks of its own, and under "nsa"."""
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

    torch.manual_seed(0)
    rope = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
    sizes = models.SIZES | dict(layer_types=KINDS, rotary_dim=4, rope_parameters=rope)
    sizes |= dict(mlp_layer_types=["dense"] * 2, dense_intermediate_size=48, index_head_dim=8)
    sizes |= dict(index_n_heads=2, index_block_size=4, index_topk_blocks=3)
    config = transformers.MiniMaxM3VLTextConfig(**sizes | settings)
    model = MiniMaxM3VLForCausalLM._from_config(config, attn_implementation="eager").eval()
    return model, use_sparse_attention(copy.deepcopy(model), backend=backend)


@backends
@torch.no_grad()
def test_forward(backend):
    """The block of a query is one of the given ones or not; heads may share indices."""
    for settings in ({}, dict(index_local_blocks=0, index_topk_blocks=1), dict(index_n_heads=1)):
        model, sparse = pair(backend, **settings)
        batch = batches.padded(models.prompts(33, 40), left=False)
        expected = model(**batch).logits
        batches.check_rows(sparse(**batch).logits, batch, expected)
        whole, _ = pair(backend, **settings | dict(index_topk_blocks=10))
        assert (whole(**batch).logits - expected)[batch["attention_mask"] > 0].abs().max() > 1e-2
    with pytest.raises(ValueError, match="padding on the right alone, none over a cache"):
        sparse(**batches.padded(models.prompts(33, 40), left=True))


@backends
@torch.no_grad()
def test_caches(backend):
    model, sparse = pair(backend)
    ids = torch.cat(models.prompts(17, 17))
    given = dict(attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=3)
    given["disable_compile"] = True
    expected = model.generate(ids, **given)
    # one offset for all rows
    static = {} if backend == "flex" else dict(cache_implementation="static")
    assert sparse.generate(ids, **given, **static).equal(expected)
    out = batches.call_in_pieces(sparse, expected, batches.dynamic(sparse), 0, 11, 14, 20)
    models.close(out, model(expected).logits)


def test_gradients():
    model, sparse = pair("eager")
    (ids,) = models.prompts(40)
    batch = dict(input_ids=ids, labels=ids, use_cache=False)
    models.close(*(models.gradients(one.train(), batch)[1] for one in (model, sparse)))
