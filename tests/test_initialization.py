"""`reset_parameters` gives what the constructor gives, whoever calls it and in any order."""

import pytest
import torch
from rotary_embedding_torch import RotaryEmbedding
from torch import nn

from native_sparse_attention import SparseAttention, Transformer
from native_sparse_attention.transformer import Attention
from tests.helpers.layers import DIM, NETWORKS, SIZES

ARGS = SIZES | dict(causal=True, attention_sinks=True)


def embedding():
    return RotaryEmbedding(8, custom_freqs=torch.tensor([1.0, 0.3], device="cpu"))


MODULES = {
    name: lambda make=make: SparseAttention(**ARGS, compress_mlp=make())
    for name, make in NETWORKS.items()
} | {
    "theta": lambda: SparseAttention(**ARGS, rope_theta=500),
    "external": lambda: SparseAttention(**ARGS, rotary_emb=embedding()),
    "dense": lambda: Attention(24, 8, 4, rotary_emb=embedding()),
    "dense model": lambda: Transformer(32, 24, 2, 8, 4, rope_theta=5e5),
    "sparse model": lambda: Transformer(32, 24, 2, 8, 4, use_sparse_attn=True, rope_theta=5e5),
}


def tensors(module):
    return dict([*module.named_parameters(), *module.named_buffers()])


def ruined(make):
    """A module of which nothing is initialised, as `to_empty` leaves it."""
    with torch.device("meta"):
        module = make()
    module.to_empty(device="cpu")
    for t in tensors(module).values():
        t.data.fill_(float("nan") if t.is_floating_point() else -1)
    return module


def parents_first(module):
    for m in module.modules():
        if hasattr(m, "reset_parameters"):
            m.reset_parameters()


def children_first(module):
    module.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)


def whole(module):
    module.reset_parameters()


@pytest.mark.parametrize("recipe", [parents_first, children_first, whole])
@pytest.mark.parametrize("name", MODULES)
def test_start_after_to_empty(name, recipe):
    """One distribution, and by a seed what the seed gave; networks of keys and of values alike."""
    torch.manual_seed(5)
    fresh = tensors(MODULES[name]())
    module = ruined(MODULES[name])
    torch.manual_seed(5)
    recipe(module)
    is_drawn_alike = recipe is whole and name in ("default", "mean", "dense", "sparse model")
    special = ("freqs", "to_attn_logits", "to_strategy_combine")
    for key, actual in tensors(module).items():
        expected = fresh[key]
        is_random = actual.is_floating_point() and expected.std(correction=0) > 0
        if is_drawn_alike or not is_random or any(part in key for part in special):
            torch.testing.assert_close(actual, expected, atol=0, rtol=0, msg=key)
        else:
            assert actual.isfinite().all(), key
            if actual.numel() > 200:
                assert 0.8 < actual.std() / expected.std() < 1.25, key
    if name in NETWORKS and recipe is not parents_first:
        networks = module.k_compress.parameters(), module.v_compress.parameters()
        assert all(torch.equal(k, v) and k is not v for k, v in zip(*networks, strict=True))


def test_networks_of_the_user_start_as_they_say():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.to_gates = nn.Linear(DIM, 12)
            self.untouched = nn.Parameter(torch.ones(12))

        def forward(self, x):
            return self.to_gates(x) * self.untouched

        def reset_parameters(self):
            nn.init.constant_(self.to_gates.bias, 0.5)

    network = nn.Sequential(nn.Flatten(-2), nn.Sequential(nn.Linear(64, 8), nn.Tanh()))
    module = SparseAttention(**ARGS, compress_mlp=network, strategy_combine_mlp=Halves())
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(3.0)
    module.reset_parameters()
    gate = module.to_strategy_combine[0]
    assert (gate.to_gates.bias == 0.5).all() and (gate.to_gates.weight.abs() < 1).all()
    assert (gate.untouched == 3.0).all()
    assert (module.k_compress[1][0].weight.abs() < 1).all()
    assert torch.equal(module.k_compress[1][0].weight, module.v_compress[1][0].weight)


@pytest.mark.parametrize("is_told", [False, True])
def test_another_initialisation(is_told):
    """Of a framework that draws every linear layer anew, unless it is told to skip some; the gate
    and networks that begin as sums can be reset after it."""

    def initialise(m):
        if isinstance(m, nn.Linear) and not (is_told and getattr(m, "_no_reinit", False)):
            nn.init.normal_(m.weight, std=0.02)
            if m.bias is not None:
                nn.init.zeros_(m.bias)

    start = torch.tensor([-2.0, -2.0, 2.0]).repeat(4)
    sums = torch.cat((torch.eye(8), -torch.eye(8))).repeat(1, 8)
    layer, pooled = MODULES["default"](), MODULES["attention pool"]()
    layer.apply(initialise)
    pooled.apply(initialise)
    gate, network = layer.to_strategy_combine[0], layer.v_compress
    assert torch.equal(gate.bias, start) is is_told
    assert torch.equal(network[1].weight[:16], sums) is is_told
    assert torch.equal(pooled.k_compress.to_attn_logits.weight, torch.eye(8)) is is_told
    layer.reset_gate()
    network.reset_parameters()
    assert torch.equal(gate.bias, start) and not gate.weight.any()
    assert torch.equal(network[1].weight[:16], sums)
    assert torch.equal(network[3].weight[:, :16], sums[:, :8].T)


def test_an_embedding_of_unknown_frequencies():
    with torch.device("meta"), pytest.raises(ValueError, match="not on meta"):
        SparseAttention(**ARGS, rotary_emb=RotaryEmbedding(8))
