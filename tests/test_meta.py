"""Tensors without data: shapes, forward and backward."""

import pytest
import torch
from layers import DIM, SETTINGS

from native_sparse_attention import SparseAttention, Transformer

ARGS = dict(
    dim=DIM, dim_head=8, heads=4, kv_heads=2, sliding_window_size=5, compress_block_size=8,
    compress_block_sliding_stride=4, selection_block_size=8, num_selected_blocks=2,
)  # fmt: skip


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("setting", SETTINGS)
def test_layer(setting, causal):
    with torch.device("meta"):
        module = SparseAttention(**ARGS | dict(causal=causal) | SETTINGS[setting])
        calls = [(20, {}), (20, dict(mask=torch.ones(2, 20, dtype=torch.bool))), (5000, {})]
        for n, call in calls:
            x = torch.randn(2, n, DIM, requires_grad=True)
            out = module(x, **call)
            assert out.is_meta and out.shape == x.shape and out.dtype == x.dtype
            out.sum().backward()
            assert x.grad.shape == x.shape
    assert all(p.grad.shape == p.shape for p in module.parameters())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_transformer(sparse, checkpointing):
    with torch.device("meta"):
        model = Transformer(
            64, 32, 2, 8, 4, use_sparse_attn=sparse, activation_checkpointing=checkpointing
        )
        ids = torch.zeros(2, 33, dtype=torch.long)
        assert model(ids).shape == (2, 33, 64)
        model(ids, return_loss=True).backward()
    assert all(p.grad.is_meta for p in model.parameters())


def test_cache():
    with torch.device("meta"):
        module = SparseAttention(**ARGS, causal=True)
        x = torch.randn(2, 20, DIM)
    with torch.no_grad():
        _, cache = module(x, return_cache=True)
        assert module(x[:, :1], cache=cache).shape == (2, 1, DIM)
