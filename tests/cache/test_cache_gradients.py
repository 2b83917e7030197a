"""Chunks of a text through one cache and one backward for all: each chunk has the gradients that it
has over a past that is held fixed, whatever is trained."""

import itertools

import pytest
import torch

from native_sparse_attention import KVCache, PagedKVCache, Transformer
from native_sparse_attention.transformer import Attention
from tests.helpers.budget import DEVICE
from tests.helpers.layers import DIM, SETTINGS, layer

CUTS = (0, 11, 12, 25)
SPARSE = dict(attention_sinks=True, num_compressed_mem_kv=2)
TRAINED = [
    "sinks", "compress_mem_kv", "to_strategy_combine", "k_intrablock_positions", "v_compress",
    "k_compress", "combine_heads", "norm", "to_qkv", "",
]  # fmt: skip


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def only(module, name):
    """The parameters of that name, which alone are trained."""
    module.requires_grad_(False)
    params = [p for key, p in module.named_parameters() if key.startswith(name)]
    return [p.requires_grad_(True) for p in params if p.numel()]


def gradients(outs, params):
    return torch.autograd.grad(sum(out.square().sum() for out in outs), params, allow_unused=True)


def check(module, x, params, make, **more):
    cache = make()
    pieces = list(itertools.pairwise(CUTS))
    got = gradients([module(x[:, a:b], cache=cache, **more) for a, b in pieces], params)
    outs = []
    for a, b in pieces:
        cache = make()
        with torch.no_grad():
            for first, end in pieces[: pieces.index((a, b))]:
                module(x[:, first:end], cache=cache, **more)
        outs.append(module(x[:, a:b], cache=cache, **more))
        want = gradients([outs[-1]], params)
        outs[-1] = want
    total = [
        None if all(g is None for g in each) else sum(g for g in each if g is not None)
        for each in zip(*outs)
    ]
    assert any(g is not None and g.abs().max() > 0 for g in got)
    torch.testing.assert_close(list(got), total, atol=1e-12, rtol=1e-10)


def rows():
    return KVCache(max_length=40, batch=2)


def pages():
    return PagedKVCache(8, 12, 2, 48)


@pytest.mark.slow(one_of=2)
@pytest.mark.parametrize("make", [rows, KVCache, pages])
@pytest.mark.parametrize("name", TRAINED)
def test_whatever_is_trained(name, make):
    module = layer(**SPARSE)
    check(module, normal(2, 25, DIM), only(module, name), make)


@pytest.mark.parametrize("setting", ["shared rankings", "independent", "diff top-k", "probs"])
def test_settings(setting):
    for name in ("sinks", "v_compress"):
        module = layer(**SETTINGS[setting], **SPARSE)
        check(module, normal(2, 25, DIM), only(module, name), rows)


@pytest.mark.parametrize("name", ["to_q", "to_k", "to_v", "to_out", ""])
def test_dense(name):
    module = Attention(DIM, 8, 4, kv_heads=2).double()
    for make in (rows, KVCache, pages):
        check(module, normal(2, 25, DIM), only(module, name), make)


@pytest.mark.parametrize("make", [rows, pages])
def test_rows_of_different_lengths(make):
    """Padding, which holds anything at all, has no gradient, and gives none."""
    for name in ("sinks", ""):
        module = layer(**SPARSE)
        x, params = normal(2, 12, DIM), only(module, name)
        grads = []
        for value in (0.0, float("nan")):
            padded, cache = x.clone(), make()
            padded[0, 3:] = value
            padded.requires_grad_()
            outs = [module(padded, cache=cache, lengths=[3, 12]), module(x[:, :4], cache=cache)]
            grads.append(gradients(outs, [*params, padded]))
            assert name or (grads[-1][-1][0, 3:] == 0).all()
        torch.testing.assert_close(*grads, atol=0.0, rtol=0.0)


def test_nothing_is_lost_where_the_past_needs_no_gradient():
    """Then it is the gradient of one forward."""
    for name in ("sinks", "compress_mem_kv", "to_strategy_combine", "combine_heads"):
        module = layer(**SPARSE)
        x, params, cache = normal(2, 25, DIM), only(module, name), KVCache()
        outs = [module(x[:, a:b], cache=cache) for a, b in itertools.pairwise(CUTS)]
        torch.testing.assert_close(
            gradients(outs, params), gradients([module(x)], params), atol=1e-12, rtol=1e-10
        )


def test_weights_of_a_functional_call():
    """Trained weights that stand in for a frozen layer's own."""
    module = layer(**SPARSE).requires_grad_(False)
    sinks = module.sinks.clone().requires_grad_()
    x, cache = normal(2, 25, DIM), KVCache(40)
    outs = [
        torch.func.functional_call(module, {"sinks": sinks}, (x[:, a:b],), {"cache": cache})
        for a, b in itertools.pairwise(CUTS)
    ]
    (got,) = gradients(outs, [sinks])
    whole = torch.func.functional_call(module, {"sinks": sinks}, (x,))
    torch.testing.assert_close(got, gradients([whole], [sinks])[0], atol=1e-12, rtol=1e-10)


@pytest.mark.kernels
def test_kernels_leave_to_others_what_is_trained(steps):
    """Those of decoding have no gradients."""
    module = layer(**SPARSE, heads=2, kv_heads=1, dtype=torch.float32).to(DEVICE)
    x, params = torch.randn(1, 14, DIM, device=DEVICE), only(module, "sinks")
    for backend in ("eager", "auto"):
        module.backend, cache = backend, KVCache(40, 1)
        outs = [module(x[:, :13], cache=cache), module(x[:, 13:], cache=cache)]
        got = gradients(outs, params)
        torch.testing.assert_close(got, gradients([module(x)], params), atol=1e-4, rtol=1e-4)
    q = torch.randn(1, 2, 1, 8, device=DEVICE)
    call = KVCache(40, 1), q, [q[:, :1]] * 2, "triton"
    assert not module.supports_decode(*call) and not steps
    with torch.no_grad():
        assert module.supports_decode(*call)


def test_after_a_prefill_under_inference_mode():
    module = layer(**SPARSE)
    x, params = normal(2, 25, DIM), only(module, "to_strategy_combine")
    cache = KVCache(40)
    with torch.inference_mode():
        module(x[:, :11], cache=cache)
    outs = [module(x[:, 11:12], cache=cache), module(x[:, 12:], cache=cache)]
    want = gradients([module(x)[:, 11:]], params)
    torch.testing.assert_close(gradients(outs, params), want, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("use_sparse_attn", [True, False])
def test_a_model(use_sparse_attn):
    model = Transformer(40, 16, 2, dim_head=8, heads=2, use_sparse_attn=use_sparse_attn).double()
    ids, params = torch.randint(0, 40, (2, 25)), only(model, "to_logits")
    cache = model.new_cache(max_length=32)
    outs = [model(ids[:, a:b], cache=cache) for a, b in itertools.pairwise(CUTS)]
    want = gradients([model(ids)], params)
    torch.testing.assert_close(gradients(outs, params), want, atol=1e-12, rtol=1e-10)
