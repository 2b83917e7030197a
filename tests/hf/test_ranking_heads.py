"""One query head of a group that ranks for it, and how it is chosen for a trained model."""

import pytest
import torch

from native_sparse_attention import SparseAttention, hf
from tests.helpers import tiny_models as models

HEADS = [[1, 0], [0, 1]]


def test_the_head_that_looks_farthest():
    model, (ids,) = models.tiny(num_hidden_layers=3), models.prompts(256)
    sizes = dict(selection_block_size=4, num_initial_blocks=1, num_local_blocks=3, dense_length=0)
    found = hf.choose_ranking_heads(hf.use_sparse_attention(model, **sizes), ids)
    assert model.config._attn_implementation == "nsa"
    hf.use_dense_attention(model).set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions
    i, j = torch.arange(256)[:, None], torch.arange(256)
    is_far = (j >= 4) & (j // 4 <= i // 4 - 3)
    for layer, places in zip(weights, found, strict=True):
        queries = torch.cat([128 + torch.arange(64) + 64 * run // 7 for run in range(8)])
        mass = (layer[0] * is_far)[:, queries].sum((1, 2))
        assert places == mass.unflatten(0, (2, 2)).argmax(-1).tolist()
    for wrong in (ids[:, :90], ids.expand(2, -1), ids[0]):
        with pytest.raises(ValueError, match=r"input_ids must be \[1, T\] with T of at least 160"):
            hf.choose_ranking_heads(hf.use_sparse_attention(model, **sizes), wrong)


@pytest.mark.parametrize("backend", ["eager", pytest.param("triton", marks=pytest.mark.kernels)])
@torch.no_grad()
def test_the_drop_in(backend, tmp_path):
    """Over caches as without, and after it was saved. A head that is all of its group is the mean
    query."""
    model, (ids,) = models.tiny(), models.prompts(40)
    plain = hf.use_sparse_attention(model, **models.SPARSE)(ids).logits
    hf.use_sparse_attention(model, **models.SPARSE, ranking_heads=HEADS, backend=backend)
    expected = model(ids, use_cache=False).logits
    assert (expected - plain).abs().max() > 1e-2
    for cache in (models.dynamic(model), hf.SparseCache(model.config)):
        parts = [models.call(model, part, cache) for part in ids.split([33, 1, 6], dim=1)]
        models.close(torch.cat(parts, dim=1), expected)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    models.close(again(ids).logits, expected)

    alone = models.tiny(num_key_value_heads=4)
    plain = hf.use_sparse_attention(alone, **models.SPARSE)(ids).logits
    hf.use_sparse_attention(alone, **models.SPARSE, ranking_heads=[[0] * 4] * 2, backend=backend)
    models.close(alone(ids).logits, plain)


def test_what_is_refused():
    model = models.tiny()
    for wrong, message in {
        "a list for each of 2 layers, got": [[0, 1]],
        "a number from 0 to 1, or one for each of 2 KV heads, got": [[0, 2], [0, 0]],
    }.items():
        with pytest.raises(ValueError, match=f"ranking_heads must be {wrong}"):
            hf.use_sparse_attention(model, **models.SPARSE, ranking_heads=message)
    with pytest.raises(ValueError, match="goes with query_heads_share_selected_kv=True"):
        hf.use_sparse_attention(
            model, **models.SPARSE, ranking_heads=HEADS, query_heads_share_selected_kv=False
        )
    hf.use_sparse_attention(model, **models.SPARSE, ranking_heads=HEADS)
    with pytest.raises(ValueError, match="ranking_heads must be None in a model to convert"):
        hf.convert(model)


@pytest.mark.parametrize("places", [1, (2, 0)])
def test_a_layer(places):
    """It selects what that head would select for itself."""
    torch.manual_seed(0)
    sizes = dict(
        dim=24, dim_head=8, heads=6, kv_heads=2, sliding_window_size=0, compress_block_size=1,
        selection_block_size=4, num_selected_blocks=2, causal=True, branches=("selected",),
        importance="max", rank_rotated=True,
    )  # fmt: skip
    layer = SparseAttention(**sizes, ranking_heads=places)
    each = SparseAttention(**sizes, query_heads_share_selected_kv=False)
    each.load_state_dict(layer.state_dict())
    x = torch.randn(2, 40, 24)
    out, found = layer(x, return_block_indices=True)
    _, right = each(x, return_block_indices=True)
    chosen = [0 + places, 3 + places] if places == 1 else [2, 3]
    assert torch.equal(found, right[:, :, chosen])
    cache, parts = None, []
    for part in x.split([30, 1, 9], dim=1):
        step, cache = layer(part, cache=cache, return_cache=True)
        parts.append(step)
    torch.testing.assert_close(torch.cat(parts, dim=1), out)
    for name, value in dict(rank_rotated=False, importance="probs").items():
        with pytest.raises(ValueError, match=f"ranking_heads=.* goes with {name}="):
            SparseAttention(**sizes | {name: value}, ranking_heads=1)
