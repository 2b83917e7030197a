"""`reset_parameters` gives what the constructor gives, whoever calls it and in any order."""

import copy
import pickle

import pytest
import torch
from rotary_embedding_torch import RotaryEmbedding
from torch import nn

from native_sparse_attention import SparseAttention, Transformer
from native_sparse_attention.compress import (
    AttentionPool,
    CompressTransformer,
    ConvLinearCompress,
    GroupedMLP,
    MeanPool,
    SingleProjection,
    SumPool,
)
from native_sparse_attention.transformer import Attention

ARGS = dict(
    dim=24, dim_head=8, heads=4, kv_heads=2, sliding_window_size=8, compress_block_size=8,
    selection_block_size=8, num_selected_blocks=2, causal=True, attention_sinks=True,
)  # fmt: skip

NETWORKS = {
    "default": lambda: None,
    "grouped": lambda: GroupedMLP(8, 8, 2),
    "convolution": lambda: ConvLinearCompress(2, 8, 8),
    "attention pool": lambda: AttentionPool(8, 8),
    "projection": lambda: SingleProjection(8, 8),
    "projection per head": lambda: SingleProjection(8, 8, 2),
    "transformer": lambda: CompressTransformer(2, 16, 2),
    "mean": lambda: MeanPool(),
    "sum": lambda: SumPool(8),
}


def sparse(network, **kwargs):
    return lambda: SparseAttention(**ARGS, compress_mlp=NETWORKS[network](), **kwargs)


def embedding():
    return RotaryEmbedding(8, custom_freqs=torch.tensor([1.0, 0.3], device="cpu"))


MODULES = {name: sparse(name) for name in NETWORKS} | {
    "theta": sparse("default", rope_theta=500),
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


def at_the_top(module):
    module.reset_parameters()


@pytest.mark.parametrize("recipe", [parents_first, children_first, at_the_top])
@pytest.mark.parametrize("name", MODULES)
def test_start_after_to_empty(name, recipe):
    torch.manual_seed(0)
    fresh = tensors(MODULES[name]())
    module = ruined(MODULES[name])
    recipe(module)
    for key, actual in tensors(module).items():
        expected = fresh[key]
        if actual.is_floating_point() and expected.std(correction=0) > 0 and not special(key):
            assert actual.isfinite().all(), key
            if actual.numel() > 200:  # one distribution
                assert 0.8 < actual.std() / expected.std() < 1.25, key
        else:
            torch.testing.assert_close(actual, expected, atol=0, rtol=0, msg=key)


def special(key):
    return any(name in key for name in ("freqs", "to_attn_logits", "to_strategy_combine"))


@pytest.mark.parametrize("name", ["default", "mean", "dense", "sparse model", "dense model"])
def test_a_seed_gives_what_it_gave(name):
    torch.manual_seed(5)
    fresh = tensors(MODULES[name]())
    module = ruined(MODULES[name])
    torch.manual_seed(5)
    module.reset_parameters()
    for key, actual in tensors(module).items():
        torch.testing.assert_close(actual, fresh[key], atol=0, rtol=0, msg=key)


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_for_keys_and_values_start_alike(name):
    module = ruined(MODULES[name])
    module.reset_parameters()
    for k, v in zip(module.k_compress.parameters(), module.v_compress.parameters(), strict=True):
        assert torch.equal(k, v) and k is not v


def test_networks_of_the_user_start_as_they_say():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.to_gates = nn.Linear(24, 12)
            self.untouched = nn.Parameter(torch.ones(12))

        def forward(self, x):
            return self.to_gates(x) * self.untouched

        def reset_parameters(self):
            nn.init.constant_(self.to_gates.bias, 0.5)

    network = nn.Sequential(nn.Linear(64, 8), nn.Tanh())
    flat = nn.Sequential(nn.Flatten(-2), network)
    module = SparseAttention(**ARGS, compress_mlp=flat, strategy_combine_mlp=Halves())
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(3.0)
    module.reset_parameters()
    gate = module.to_strategy_combine[0]
    assert (gate.to_gates.bias == 0.5).all() and (gate.to_gates.weight.abs() < 1).all()
    assert (gate.untouched == 3.0).all()
    assert (module.k_compress[1][0].weight.abs() < 1).all()
    assert torch.equal(module.k_compress[1][0].weight, module.v_compress[1][0].weight)


def test_gate_under_another_initialisation():
    """Of a framework that draws every linear layer anew, its bias 0."""

    def initialise(m):
        if isinstance(m, nn.Linear) and not (skip and getattr(m, "_no_reinit", False)):
            nn.init.normal_(m.weight, std=0.02)
            if m.bias is not None:
                nn.init.zeros_(m.bias)

    start = torch.tensor([-2.0, -2.0, 2.0]).repeat(4)
    for skip in (False, True):
        layer = MODULES["attention pool"]()
        layer.apply(initialise)
        if not skip:
            assert not layer.to_strategy_combine[0].bias.any()
            layer.reset_gate()
        assert torch.equal(layer.to_strategy_combine[0].bias, start)
        assert not layer.to_strategy_combine[0].weight.any()
        if skip:
            assert torch.equal(layer.k_compress.to_attn_logits.weight, torch.eye(8))


def test_sums_under_another_initialisation():
    """Of a framework that draws every linear layer anew, unless it is told to skip some."""

    def initialise(m):
        if isinstance(m, nn.Linear) and not (skip and getattr(m, "_no_reinit", False)):
            nn.init.normal_(m.weight, std=0.02)

    sums = torch.cat((torch.eye(8), -torch.eye(8))).repeat(1, 8)
    for skip in (False, True):
        layer = MODULES["default"]()
        layer.apply(initialise)
        assert torch.equal(layer.v_compress[1].weight[:16], sums) is skip
        layer.v_compress.reset_parameters()
        assert torch.equal(layer.v_compress[1].weight[:16], sums)
        assert torch.equal(layer.v_compress[3].weight[:, :16], sums[:, :8].T)


def test_an_embedding_of_unknown_frequencies():
    with torch.device("meta"):
        layer = SparseAttention(**ARGS, rotary_emb=RotaryEmbedding(8))
    layer.to_empty(device="cpu")
    with pytest.raises(ValueError, match="rotary_emb was given on the meta device"):
        layer.reset_parameters()


@pytest.mark.parametrize("name", MODULES)
def test_copies_and_meta_modules_that_load(name):
    module = MODULES[name]()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        other.load_state_dict(module.state_dict())
        children_first(other)
    with torch.device("meta"):
        other = MODULES[name]()
    other.load_state_dict(module.state_dict(), assign=True)
    assert not [key for key, t in tensors(other).items() if t.is_meta]
    for key, t in tensors(other).items():
        torch.testing.assert_close(t, tensors(module)[key], atol=0, rtol=0)
