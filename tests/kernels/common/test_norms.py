"""Norms of keys, of which kernels for Hopper GPUs bound logits."""

import pytest
import torch

from native_sparse_attention import sliding_window_attention
from tests.helpers.budget import CUDA, DEVICE, draw

pytest.importorskip("triton")
from native_sparse_attention.kernels.common import key_norms, launch

pytestmark = pytest.mark.kernels
DTYPE = torch.bfloat16 if CUDA else torch.float32
T = 133 if CUDA else 49


@pytest.fixture
def measured(monkeypatch):
    """Also what the interpreter can run."""
    monkeypatch.setattr(key_norms, "BOUNDED_DTYPES", (DTYPE,))
    monkeypatch.setattr(launch, "supports_gluon", lambda t: True)


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("D", [16, 80])
@pytest.mark.parametrize("N", [0, 1, 63, 64, 4097])
def test_largest_norms(N, D):
    k = torch.randn(2, N, 6, D, device=DEVICE).to(DTYPE)[:, :, ::2]
    norms = key_norms.key_norms(k.new_empty(2, max(N, 40), 3, D), k)
    expected = k.float().norm(dim=-1).amax(1) if N else k.new_zeros(2, 3).float()
    torch.testing.assert_close(norms, expected)


@pytest.mark.usefixtures("measured")
def test_not_of_few_queries():
    q, k = (torch.randn(1, n, 2, 16, device=DEVICE).to(DTYPE) for n in (8, 33))
    assert key_norms.key_norms(q, k) is None
    assert key_norms.key_norms(q, k[:, :32]) is not None
    assert key_norms.key_norms(q.half(), k[:, :32].half()) is None


def test_one_key_has_all():
    """Exactly: where the probability is 1, what comes out is the value."""
    q, k, v = draw(T, T, 4, 2, 16, 16, DTYPE)
    out = sliding_window_attention(q, k, v, sliding_window_size=21, backend="triton")
    assert torch.equal(out[:, 0], v[:, 0].repeat_interleave(2, dim=1))
