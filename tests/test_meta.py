"""Tensors without data: shapes, forward and backward."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from native_sparse_attention import SparseAttention, Transformer
from tests.helpers.layers import DIM, SETTINGS

ARGS = dict(
    dim=DIM, dim_head=8, heads=4, kv_heads=2, sliding_window_size=5, compress_block_size=8,
    compress_block_sliding_stride=4, selection_block_size=8, num_selected_blocks=2,
)  # fmt: skip


def trained(module):
    """The parameters but the index of a learned ranking, which has a loss of its own."""
    return [p for name, p in module.named_parameters() if not name.startswith("to_index")]


@pytest.mark.slow(one_of=10)
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
    assert all(p.grad.shape == p.shape for p in trained(module))


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


@pytest.mark.parametrize("storage", [{}, dict(max_length=64, batch=2), dict(
    page_size=8, num_pages=16, max_length=64, batch=2)])  # fmt: skip
@pytest.mark.parametrize("sparse", [False, True])
def test_cache_of_a_model(sparse, storage):
    with torch.device("meta"):
        model = Transformer(64, 32, 2, 8, 4, use_sparse_attn=sparse).requires_grad_(False)
        cache = model.new_cache(**storage)
        for n in (20, 1):
            ids = torch.zeros(2, n, dtype=torch.long)
            assert model(ids, cache=cache).shape == (2, n, 64)


@pytest.mark.parametrize("sparse", [False, True])
def test_packed(sparse):
    """Of documents whose bounds have no values, as many positions as any could need."""
    with torch.device("meta"):
        model = Transformer(64, 32, 2, 8, 4, use_sparse_attn=sparse)
        ids = torch.zeros(1, 33, dtype=torch.long)
        for call in (
            dict(cu_seqlens=torch.zeros(4, dtype=torch.int32)),
            dict(segment_ids=torch.zeros(1, 33, dtype=torch.int32)),
            dict(segment_ids=ids, mask=torch.ones(1, 33, dtype=torch.bool)),
        ):
            assert model(ids, **call).shape == (1, 33, 64)
            model(ids, return_loss=True, **call).backward()
    assert all(p.grad.is_meta for p in model.parameters())


@pytest.mark.slow(one_of=5)
# torch says so of its own deepcopy
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("setting", SETTINGS)
def test_fake_tensors(setting):
    """A layer that is made in a fake mode is of that mode."""
    with FakeTensorMode():
        module = SparseAttention(**ARGS | dict(causal=True) | SETTINGS[setting])
        x = torch.randn(2, 20, DIM, requires_grad=True)
        module(x).sum().backward()
        assert x.grad.shape == x.shape
    assert all(p.grad.shape == p.shape for p in trained(module))
