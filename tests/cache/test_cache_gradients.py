"""Chunks of a text through one cache and one backward for all: each chunk has the gradients that it
has over a past that is held fixed, whatever is trained."""

import itertools

import pytest
import torch

from native_sparse_attention import KVCache
from native_sparse_attention.transformer import Attention
from tests.helpers.budget import DEVICE
from tests.helpers.decoder import CACHES
from tests.helpers.layers import DIM, SETTINGS, layer, normal

CUTS = list(itertools.pairwise((0, 11, 12, 25)))
SPARSE = dict(attention_sinks=True)
DENSE = "dense"
TRAINED = [
    "sinks", "compress_mem_kv", "to_strategy_combine", "k_intrablock_positions", "v_compress",
    "k_compress", "combine_heads", "norm", "to_qkv", "",
]  # fmt: skip
CASES = [("default", name) for name in TRAINED]
CASES += itertools.product(
    ["shared rankings", "independent", "diff top-k", "probs"], ["sinks", "v_compress"]
)
CASES += [(DENSE, name) for name in ("to_q", "to_k", "to_v", "to_out", "")]
caches = pytest.mark.parametrize("make", CACHES.values(), ids=list(CACHES))


def make_layer(setting, **settings):
    if setting == DENSE:
        return Attention(DIM, 8, 4, kv_heads=2).double()
    return layer(**SETTINGS[setting], **SPARSE, **settings)


def train(module, name):
    """Train the parameters of that name alone."""
    module.requires_grad_(False)
    params = [p for key, p in module.named_parameters() if key.startswith(name)]
    return [p.requires_grad_(True) for p in params if p.numel()]


def gradients(outs, params):
    return torch.autograd.grad(sum(out.square().sum() for out in outs), params, allow_unused=True)


def equal(actual, expected):
    torch.testing.assert_close(list(actual), list(expected), atol=1e-12, rtol=1e-10)


@pytest.mark.slow(one_of=2)
@caches
@pytest.mark.parametrize("setting, name", CASES)
def test_whatever_is_trained(setting, name, make):
    module, x, cache = make_layer(setting), normal(2, 25, DIM), make()
    params = train(module, name)
    actual = gradients([module(x[:, a:b], cache=cache) for a, b in CUTS], params)
    sums = [0] * len(params)
    for a, b in CUTS:
        cache = make()
        with torch.no_grad():
            for first, end in CUTS[: CUTS.index((a, b))]:
                module(x[:, first:end], cache=cache)
        grads = gradients([module(x[:, a:b], cache=cache)], params)
        sums = [t if grad is None else t + grad for t, grad in zip(sums, grads, strict=True)]
    assert any(grad is not None and grad.abs().max() > 0 for grad in actual)
    equal(
        [torch.zeros_like(p) if t is None else t for t, p in zip(actual, params)],
        [torch.zeros_like(p) + t for t, p in zip(sums, params)],
    )


@caches
def test_tokens_of_a_later_call(make):
    """Those of one forward, the past held fixed; padding, which holds anything at all, has none."""
    module, x = layer(**SPARSE), normal(2, 25, DIM)
    cache, leaf = make(), x[:, 16:].clone().requires_grad_()
    module(x[:, :16], cache=cache)
    whole = torch.cat((x[:, :16], leaf.detach()), dim=1).requires_grad_()
    (grad,) = gradients([module(leaf, cache=cache)], [leaf])
    equal([grad], [gradients([module(whole)[:, 16:]], [whole])[0][:, 16:]])
    grads = []
    for value in (0.0, float("nan")):
        padded, cache = x[:, :12].clone(), make()
        padded[0, 3:] = value
        padded.requires_grad_()
        outs = [module(padded, cache=cache, lengths=[3, 12]), module(x[:, :4], cache=cache)]
        grads.append(gradients(outs, [*module.parameters(), padded]))
        assert (grads[-1][-1][0, 3:] == 0).all()
    torch.testing.assert_close(*grads, atol=0.0, rtol=0.0)


@pytest.mark.parametrize("name", ["sinks", "compress_mem_kv", "to_strategy_combine", "combine_h"])
def test_a_past_that_needs_no_gradient(name):
    """Then nothing is lost: it is the gradient of one forward; after a prefill under
    inference_mode too."""
    module, x = layer(**SPARSE), normal(2, 25, DIM)
    params, cache, expected = train(module, name), KVCache(), module(x)
    equal(
        gradients([module(x[:, a:b], cache=cache) for a, b in CUTS], params),
        gradients([expected], params),
    )
    cache = KVCache(40)
    with torch.inference_mode():
        module(x[:, :11], cache=cache)
    outs = [module(x[:, a:b], cache=cache) for a, b in CUTS[1:]]
    equal(gradients(outs, params), gradients([module(x)[:, 11:]], params))


@pytest.mark.kernels
def test_kernels_leave_to_others_what_is_trained():
    """Those of decoding have no gradients."""
    module = layer(torch.float32, **SPARSE, heads=2, kv_heads=1).to(DEVICE)
    x, params = torch.randn(1, 14, DIM, device=DEVICE), train(module, "sinks")
    cache = KVCache(40, 1)
    outs = [module(x[:, :13], cache=cache), module(x[:, 13:], cache=cache)]
    actual, expected = gradients(outs, params), gradients([module(x)], params)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
