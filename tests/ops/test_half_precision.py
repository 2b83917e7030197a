"""Half precisions in eager PyTorch: no worse than SDPA, and right wherever fp32 is."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import native_sparse_attention as nsa
from native_sparse_attention.compress import AttentionPool, WindowAttention
from native_sparse_attention.masks import causal, dense_attention, jagged_attention
from native_sparse_attention.ops import chunked
from tests.dense.test_dense import FORMS

T, D = 48, 64


def swapped(op):
    """An operation on [B H T D]."""
    return lambda q, k, v: op(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)


def nested(q, k, v):
    lengths = torch.tensor([0, T])
    q, k, v = (torch.nested.nested_tensor_from_jagged(t[0], lengths) for t in (q, k, v))
    return jagged_attention(q, k, v, causal).values()[None]


def dense_form(name):
    return lambda q, k, v: FORMS[name](q, k, v, causal=True, scale=D**-0.5)[0]


# causal attention to everything, by all that can compute it
CALLS = {name: dense_form(name) for name in FORMS} | {
    "window": functools.partial(
        nsa.sliding_window_attention, sliding_window_size=T, backend="eager"
    ),
    "selected": lambda q, k, v: nsa.selected_attention(
        q, k, v, torch.zeros(1, T, 2, 1).int(), selection_block_size=T, backend="eager"
    ),
    "dense": swapped(functools.partial(dense_attention, mask_mod=causal)),
    "jagged": nested,
}


@pytest.fixture(params=CALLS)
def call(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["whole", "tiles"])
def strategy(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(chunked, "MAX_SCORES", 0)


@swapped
def sdpa(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def values_and_gradients(op, inputs, d_out, dtype):
    leaves = [t.to(dtype).requires_grad_() for t in inputs]
    out = op(*leaves)
    assert out.dtype == dtype
    return out, *torch.autograd.grad(out, leaves, d_out.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_worse_than_sdpa(call, strategy, dtype):
    """Errors against float64, outputs and gradients, of many elements: 5 % for their noise."""
    inputs = [torch.randn(1, T, 2, D).mul(s).to(dtype) for s in (3, 3, 1)]
    d_out = torch.randn(1, T, 2, D).to(dtype)
    found = values_and_gradients(CALLS[call], inputs, d_out, dtype)
    exact, other = (
        values_and_gradients(sdpa, inputs, d_out, kind) for kind in (torch.float64, dtype)
    )
    for ours, right, theirs in zip(found, exact, other, strict=True):
        error, budget = ((t.double() - right).norm() for t in (ours, theirs))
        assert error <= 1.05 * budget + 1e-12 * right.norm(), (error, budget)


def test_logits_past_the_range_of_fp16(call, strategy):
    base = torch.randn(1, 1, 1, D) * 35
    inputs = [(base + torch.randn(1, T, 2, D)).half() for _ in range(2)]
    assert (inputs[0].double() * inputs[1].double()).sum(-1).abs().min() > 65504
    inputs.append(torch.randn(1, T, 2, D).half())
    d_out = torch.randn(1, T, 2, D).half()
    found = values_and_gradients(CALLS[call], inputs, d_out, torch.float16)
    exact = values_and_gradients(sdpa, inputs, d_out, torch.float64)
    for ours, right in zip(found, exact, strict=True):
        atol = 0.02 * right.abs().max().item()
        torch.testing.assert_close(ours.double(), right, atol=atol, rtol=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(call, strategy, dtype):
    """Inputs are rounded to its dtype, once, and the output is; but for those of float64, and of
    the written-out attention, whose gradients stay what they are too."""
    if call in ("mha by autograd", "dense", "jagged"):
        pytest.skip("torch casts what it calls")
    inputs = [torch.randn(1, T, 2, D) * s for s in (30, 30, 1)]
    if call == "mha":
        given = CALLS[call], inputs, torch.randn(1, T, 2, D), torch.float32
        expected = values_and_gradients(*given)
        with torch.autocast("cpu", dtype):
            return torch.testing.assert_close(values_and_gradients(*given), expected)
    with torch.autocast("cpu", dtype):
        found, wide = CALLS[call](*inputs), CALLS[call](*(t.double() for t in inputs))
    assert (found.dtype, wide.dtype) == (dtype, torch.float64)
    torch.testing.assert_close(found, CALLS[call](*(t.to(dtype) for t in inputs)), atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_compression_networks(dtype, autocast):
    """Attention within a window, of products above 65504; and a pool of weights in fp32."""
    torch.manual_seed(0)
    attention, pool = WindowAttention(D, 2, dropout=0.0), AttentionPool(D, 8)
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj):
        torch.nn.init.eye_(linear.weight)
        torch.nn.init.zeros_(linear.bias)
    x = (torch.randn(6, 8, D) * 40).to(dtype)
    kv = torch.randn(2, 2, 3, 8, D).to(dtype)
    expected = attention.double()(x.double()), pool.double()(kv.double())
    attention, pool = (net.to(torch.float32 if autocast else dtype) for net in (attention, pool))
    with torch.autocast("cpu", dtype, enabled=autocast):
        found = attention(x), pool(kv)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        # the rounding of the output alone
        torch.testing.assert_close(a.double(), b, rtol=torch.finfo(dtype).eps, atol=1e-5)
