"""Rotary frequencies stay in fp32: through casts, checkpoints of any dtype, and mixed precision."""

import copy

import pytest
import torch
from rotary_embedding_torch import RotaryEmbedding
from torch import nn

from native_sparse_attention import SparseAttention, Transformer
from native_sparse_attention.rotary import Rotary, rotate
from native_sparse_attention.transformer import Attention
from tests.helpers.layers import layer

D, P = 64, 10_000
NARROW = [torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def expected(theta=10_000.0, d=D):
    return theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)


def make(kind="own", **kwargs):
    if kind == "external":
        kwargs["rotary_emb"] = RotaryEmbedding(D)
    return SparseAttention(64, D, 1, 8, 8, 8, 2, causal=True, **kwargs)


def assert_exact(rotary, theta=10_000.0):
    assert rotary.freqs.dtype == torch.float32
    assert (P * rotary.freqs.double() - P * expected(theta)).abs().max() < 0.02
    assert torch.equal(rotary.exact.view(torch.float32), rotary.freqs)


KINDS = pytest.mark.parametrize("kind", ["own", "external"])


@KINDS
def test_casts(kind):
    module = make(kind)
    for cast in ("bfloat16", "half", "float"):
        assert_exact(getattr(module, cast)().rotary_emb)
    assert_exact(module.to(torch.bfloat16).rotary_emb)
    assert module.double().rotary_emb.freqs.dtype == torch.float64
    assert module.to_qkv.weight.dtype == torch.float64
    assert_exact(module.bfloat16().rotary_emb)


@KINDS
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [*NARROW, torch.float64], ids=str)
def test_checkpoints(kind, dtype, assign):
    """The embedding's own frequencies stand where these come rounded; others load."""
    saved = {name: t.to(dtype) for name, t in make(kind).state_dict().items()}
    module = make(kind)
    module.load_state_dict(saved, assign=assign)
    freqs = module.rotary_emb.freqs.double()
    assert (P * freqs - P * expected()).abs().max() < 0.02
    assert saved["rotary_emb.freqs"].dtype == dtype  # the caller's own
    if dtype == torch.float8_e4m3fn:
        return
    module = make(kind)
    module.load_state_dict({name: t.float() for name, t in saved.items()}, assign=assign)
    assert_exact(module.rotary_emb)

    # those of another theta, and a narrow file of them into a layer that has it
    if dtype != torch.float64:
        saved["rotary_emb.freqs"] = freqs = expected(500_000.0).to(dtype)
        module.load_state_dict(saved, assign=assign)
        module.bfloat16()
        assert torch.equal(module.rotary_emb.freqs, freqs.float())
        module = make(rope_theta=500_000.0)
        module.load_state_dict(saved, assign=assign)
        assert_exact(module.rotary_emb, 500_000.0)


def test_learned_frequencies_are_shared():
    rotary = RotaryEmbedding(8, learned_freq=True)
    model = Transformer(32, 16, 2, dim_head=8, heads=2, use_sparse_attn=True, rotary_emb=rotary)
    assert all(attn.rotary_emb is rotary for attn, _ in model.layers)
    twin = copy.deepcopy(model)
    assert twin.layers[0][0].rotary_emb is twin.layers[1][0].rotary_emb is not rotary
    dense = Transformer(32, 16, 2, dim_head=8, heads=2, rotary_emb=rotary)
    for net in (model, dense):
        for net.activation_checkpointing in (False, True):
            rotary.freqs.grad = None
            net(torch.zeros(1, 9, dtype=torch.long), return_loss=True).backward()
            assert rotary.freqs.grad is not None


@KINDS
def test_frequencies_that_others_cast(kind):
    """As mixed precision of FSDP casts buffers, and parameters for a forward."""
    module = make(kind)
    x = torch.randn(1, 1, 3, D)
    turned = rotate(module.rotary_emb, [x], P)[0]
    module.rotary_emb.freqs.data = module.rotary_emb.freqs.data.bfloat16()
    assert torch.equal(rotate(module.rotary_emb, [x], P)[0], turned)


def test_far_positions():
    """Within the rounding of fp32 at position 1,000,000."""
    angles = 1e6 * expected()
    x = torch.tensor([1.0, 0.0]).repeat(D // 2)[None, None, None]
    turned = rotate(Rotary(D), [x], 1_000_000)[0][0, 0, 0].unflatten(0, (-1, 2)).double()
    off = torch.stack((angles.cos(), angles.sin()), -1) - turned
    assert off.norm(dim=-1).max() < 0.1


EMBEDDINGS = [
    lambda **kwargs: layer(torch.float32, dim_head=8, **kwargs).rotary_emb,
    lambda **kwargs: Attention(16, 8, 2, **kwargs).rotary_embed,
    lambda **kwargs: Transformer(32, 16, 1, 8, 2, **kwargs).layers[0][0].rotary_embed,
    lambda **kwargs: (
        Transformer(32, 16, 1, 8, 2, use_sparse_attn=True, **kwargs).layers[0][0].rotary_emb
    ),
]


@pytest.mark.parametrize("make", EMBEDDINGS)
def test_theta_and_inv_freq(make):
    torch.testing.assert_close(make(rope_theta=5e5).freqs, expected(5e5, 8).float())
    given = torch.tensor([0.5, 0.125], dtype=torch.float64)
    assert torch.equal(make(inv_freq=given).freqs, given.float())
    assert make(rotary_emb=False) is None
    if make is EMBEDDINGS[-1]:
        with pytest.raises(TypeError, match="multiple values for keyword argument 'rope_theta'"):
            make(rope_theta=5.0, sparse_attn_kwargs=dict(rope_theta=7.0))


THETA = "rope_theta must be a number from 1e-28 to 3.4e38, got"
WRONG = [torch.ones(5), torch.ones(1, 4), torch.ones(4, dtype=torch.int32), [1.0, 0.5]]
WRONG += [torch.tensor([1.0, float("inf")]), torch.ones(4, device="meta")]
WRONG += [nn.Parameter(torch.ones(4)), torch.full((4,), 1e30)]
BAD = [
    (dict(rope_theta=0), f"{THETA} 0"),
    (dict(rope_theta=float("nan")), f"{THETA} nan"),
    (dict(rope_theta=10**400), f"{THETA} int 1000"),
    (dict(rope_theta="1e4"), f"{THETA} '1e4'"),
    *(
        (dict(inv_freq=wrong), "must be a vector of 1 to dim_head / 2 = 4 finite floats")
        for wrong in WRONG
    ),
    (dict(rope_theta=5.0, rotary_emb=False), "at most one of .*, got rotary_emb and rope_theta"),
    (dict(rope_theta=5.0, inv_freq=torch.ones(4)), "got rope_theta and inv_freq"),
    (dict(rotary_emb="none"), "or False for no positions, got 'none'"),
    (
        dict(rotary_emb=RotaryEmbedding(8, custom_freqs=torch.ones(4, dtype=torch.int64))),
        "frequencies of rotary_emb, must be a vector .* got a torch.int64",
    ),
]


@pytest.mark.parametrize("kwargs, message", BAD)
def test_refused(kwargs, message):
    for make in (layer, lambda **kwargs: Attention(16, **kwargs)):
        with pytest.raises(ValueError, match=message):
            make(dim_head=8, **kwargs)


def test_no_positions():
    """The last token does not notice an order of the tokens before it."""
    module = SparseAttention(16, 8, 2, 99, 4, 4, 99, causal=True, rotary_emb=False).double()
    with torch.no_grad():
        module.to_strategy_combine[0].bias[0::3] = -1e4
        x = torch.randn(1, 21, 16, dtype=torch.float64)
        order = torch.cat((torch.randperm(20), torch.tensor([20])))
        torch.testing.assert_close(module(x)[:, -1], module(x[:, order])[:, -1])
