"""Logits measured from a bound instead of their maximum: what the bound is made of, and that both
ways are right, next to each other and where numbers are not finite."""

import pytest
import torch

from native_sparse_attention import sliding_window_attention
from tests.helpers.budget import CUDA, DEVICE, assert_right, draw
from tests.helpers.calls import draw as draw_call

pytest.importorskip("triton")
from native_sparse_attention.kernels.common import key_norms

pytestmark = pytest.mark.kernels
DTYPE = torch.bfloat16 if CUDA else torch.float32
T = 133 if CUDA else 49
HEADS = (4, 2, 16, 16)


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """Also what the interpreter can run."""
    monkeypatch.setattr(key_norms, "BOUNDED_DTYPES", (DTYPE,))


@pytest.mark.parametrize("D", [16, 80])
@pytest.mark.parametrize("N", [0, 1, 63, 64, 4097])
def test_largest_norms(N, D):
    k = torch.randn(2, N, 6, D, device=DEVICE).to(DTYPE)[:, :, ::2]
    norms = key_norms.key_norms(k.new_empty(2, max(N, 40), 3, D), k)
    expected = k.float().norm(dim=-1).amax(1) if N else k.new_zeros(2, 3).float()
    torch.testing.assert_close(norms, expected)


def test_not_of_few_queries():
    q, k = (torch.randn(1, n, 2, 16, device=DEVICE).to(DTYPE) for n in (8, 33))
    assert key_norms.key_norms(q, k) is None
    assert key_norms.key_norms(q, k[:, :32]) is not None
    assert key_norms.key_norms(q.half(), k[:, :32].half()) is None


@pytest.mark.slow(one_of=2)
@pytest.mark.parametrize("size, sinks", [(1.0, False), (8.0, True)])
def test_layer(monkeypatch, size, sinks):
    sizes = dict(
        compress_block_size=4, compress_block_sliding_stride=2, selection_block_size=16,
        sliding_window_size=37, sinks=sinks,
    )  # fmt: skip
    call = draw_call("layer", DTYPE, place=(T, T), heads=HEADS, **sizes)
    call.tensors["q"][:, T // 2 :] *= size
    q = call.tensors["q"].double()
    longest = call.tensors["k"].double().norm(dim=-1).amax()
    bound = q.norm(dim=-1) * longest * 16**-0.5 / torch.log(q.new_tensor(2.0))
    assert ((bound <= 48).any(), (bound > 48).any()) == (True, size > 1)
    by_bound = call("triton")
    monkeypatch.setattr(key_norms, "BOUNDED_DTYPES", ())
    by_maximum = call("triton")
    # another order of roundings, if any tile was measured from its bound
    assert not torch.equal(by_bound, by_maximum)
    exact = call._replace(tensors={n: t.double() for n, t in call.tensors.items()})("eager")
    error, other = ((t.double() - exact).abs().max() for t in (by_bound, by_maximum))
    assert error <= 2 * other + torch.finfo(DTYPE).eps * exact.abs().max()


@pytest.mark.slow(one_of=2)
@pytest.mark.parametrize("soft_cap", [None, 2.5])
@pytest.mark.parametrize("branch", ["compressed", "window"])
def test_branches_and_gradients(branch, soft_cap):
    call = draw_call(branch, DTYPE, place=(T, T), heads=HEADS, soft_cap=soft_cap)
    assert_right(call.op, call.tensors, DTYPE, **call.settings)


def test_one_key_has_all():
    """Exactly: where the probability is 1, what comes out is the value."""
    q, k, v = draw(T, T, 4, 2, 16, 16, DTYPE)
    out = sliding_window_attention(q, k, v, sliding_window_size=21, backend="triton")
    assert torch.equal(out[:, 0], v[:, 0].repeat_interleave(2, dim=1))
