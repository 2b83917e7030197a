"""NaN in padding is harmless, and in a sequence it reaches no other sequence of the batch. A NaN in
a token that a query does not see may reach it, as in SDPA: a weight of 0 times NaN is NaN."""

from __future__ import annotations

import math

import pytest
import torch

from native_sparse_attention import KVCache, SparseAttention, Transformer
from native_sparse_attention.ops import chunked

LAYER = dict(
    dim=16, dim_head=8, heads=4, kv_heads=2, sliding_window_size=3, compress_block_size=8,
    selection_block_size=8, num_selected_blocks=2, compress_block_sliding_stride=4,
)  # fmt: skip


def outputs_and_gradients(layer, x, mask):
    """Of the tokens that the mask keeps."""
    leaf = x.clone().requires_grad_()
    out = layer(leaf, mask=mask)
    grads = torch.autograd.grad(out.square().sum(), [leaf, *layer.parameters()])
    return out, grads


@pytest.mark.parametrize("settings", [{}, dict(use_diff_topk=True, importance="probs")])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("in_tiles", [True, False])
def test_padding_of_a_layer(settings, is_causal, in_tiles, monkeypatch):
    if in_tiles:
        monkeypatch.setattr(chunked, "MAX_SCORES", 0)
        monkeypatch.setattr(chunked, "CHUNK_SCORES", 400)
    layer = SparseAttention(**LAYER, **settings, causal=is_causal)
    x = torch.randn(2, 40, 16)
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[0, :7], mask[1, 30:] = False, False
    clean = outputs_and_gradients(layer, x, mask)
    dirty = outputs_and_gradients(layer, x.masked_fill(~mask[..., None], math.nan), mask)
    torch.testing.assert_close(dirty, clean, atol=0, rtol=0)
    assert (dirty[0][~mask] == 0).all() and (dirty[1][0][~mask] == 0).all()


def test_padding_in_a_cache():
    layer = SparseAttention(**LAYER, causal=True)
    x, mask = torch.randn(2, 24, 16), torch.ones(2, 20, dtype=torch.bool)
    mask[0, :7] = False
    bad = x.clone()
    bad[0, :7] = math.nan
    outs = []
    with torch.no_grad():
        for inp in (x, bad):
            cache = KVCache()
            prompt = layer(inp[:, :20], cache, mask=mask)
            outs.append((prompt, *(layer(inp[:, t : t + 1], cache) for t in range(20, 24))))
    torch.testing.assert_close(*outs, atol=0, rtol=0)


def test_sequences_of_a_batch():
    model = Transformer(32, 16, 2, 8, 4, causal=True)
    ids = torch.randint(32, (3, 20))
    clean = model(ids)
    with torch.no_grad():
        model.token_emb.weight[0] = math.nan
    ids[1, 11] = 0
    kept = (ids != 0).all(dim=1)
    torch.testing.assert_close(model(ids)[kept], clean[kept], atol=0, rtol=0)
