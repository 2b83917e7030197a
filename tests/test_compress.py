"""The compression networks against those of the published package, and their protocol."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from native_sparse_attention import SparseAttention, compress
from native_sparse_attention.compress import MeanPool, SumPool, default_compress_mlp
from tests.helpers.budget import DEVICE
from tests.helpers.layers import close, networks_of, normal, step

H, L, D = 2, 5, 4

OURS = networks_of(L, D, H) | {
    "shallow": (
        compress.CompressTransformer,
        dict(num_layers=1, dim=H * D, num_heads=1, ff_hidden_dim=3, dropout=0.5),
    ),
    "default": (default_compress_mlp, dict(dim_head=D, compress_window_size=L)),
}
# the published package does not name the others
NETWORKS = OURS.keys() - {"default", "mean", "sum"}


def build(name: str) -> nn.Module:
    network, kwargs = OURS[name]
    net = network(**kwargs).eval()
    for p in net.parameters():
        nn.init.normal_(p, std=0.5)
    return net


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_agrees_with_published(name, published):
    """State dicts load both ways; outputs and all gradients agree in fp64. The default network:
    test_published.py."""
    network, kwargs = OURS[name]
    theirs = getattr(published("0.2.3").compress_networks, network.__name__)(**kwargs)
    theirs, ours = theirs.double().eval(), build(name).double()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    kv = normal(3, H, 7, L, D)
    close(step(ours, kv), step(theirs, kv), 1e-10)


@pytest.mark.parametrize("expand_factor", [1.0, 0.3, 0.2, 2.5])
def test_default_begins_as_the_sum(expand_factor):
    """Of the features for which there are two hidden units, beside what the other units give."""
    kv = torch.randn(2, H, 3, L, D, dtype=torch.float64)
    nets = []
    for start in ("sum", "random"):
        torch.manual_seed(0)
        nets.append(default_compress_mlp(D, L, expand_factor, start=start).double())
    begun, random = nets
    units = int(expand_factor * L * D)
    k = min(D, units // 2)
    with torch.no_grad():
        random[1].weight[: 2 * k] = random[1].bias[: 2 * k] = random[3].weight[:, : 2 * k] = 0
    expected = random(kv)
    expected[..., :k] += kv.sum(dim=-2)[..., :k]
    torch.testing.assert_close(begun(kv), expected)
    assert begun.state_dict().keys() == random.state_dict().keys()
    assert type(random[1]) is type(random[3]) is nn.Linear


@pytest.mark.parametrize("name", OURS)
def test_laws(name):
    """Windows are compressed one by one; none, or no rows, have gradients of zeros; copies are
    independent."""
    network, kwargs = OURS[name]
    initial = network(**kwargs).eval()
    net, kv = build(name), torch.randn(2, H, 6, L, D)
    assert initial(kv).isfinite().all()
    twin = deepcopy(net)
    order = torch.randperm(6)
    torch.testing.assert_close(twin(kv[:, :, order]), net(kv)[:, :, order])
    assert not {id(p) for p in net.parameters()} & {id(p) for p in twin.parameters()}
    for b, w in ((2, 0), (0, 3), (0, 0)):
        empty = torch.randn(b, H, w, L, D, requires_grad=True)
        net.zero_grad()
        out = net(empty)
        assert out.shape == (b, H, w, D)
        out.sum().backward()
        assert empty.grad.shape == empty.shape
        assert all(p.grad is not None and not p.grad.any() for p in net.parameters())


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(name, dtype):
    """Cast, and under autocast."""
    net, kv = build(name), torch.randn(1, H, 3, L, D)
    if dtype == torch.bfloat16:
        with torch.autocast("cpu", dtype):
            out = net(kv.to(dtype))
        torch.testing.assert_close(out.float(), net(kv), rtol=0.1, atol=0.1)
        assert out.dtype == dtype
        if out.requires_grad:
            out.sum().backward()
    kv = kv.to(dtype)
    exact = deepcopy(net).to(dtype).double()(kv.double())
    out = net.to(dtype)(kv)
    assert out.dtype == dtype
    tolerance = 20 * torch.finfo(dtype).eps * exact.abs().max().item()
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=tolerance)


def test_pools_by_hand():
    kv = torch.tensor([[1.0, 2.0], [3.0, 6.0]]).view(1, 1, 1, 2, 2)
    assert MeanPool()(kv).flatten().tolist() == [2.0, 4.0]
    net = SumPool(2)
    assert net(kv).flatten().tolist() == [4.0, 8.0]
    net.gain.data[1] = 0.5
    assert net(kv).flatten().tolist() == [4.0, 4.0]
    net = SumPool(2, gain=2.0)
    net.gain.data.zero_()
    net.reset_parameters()
    assert net(kv).flatten().tolist() == [8.0, 16.0]
    # identity weights: each feature is weighted by the softmax of itself over the window
    kv = torch.tensor([[0.0, 5.0], [1.0, 5.0]]).view(1, 1, 1, 2, 2)
    expected = torch.tensor([torch.tensor(1.0).sigmoid().item(), 5.0]).view(1, 1, 1, 2)
    torch.testing.assert_close(compress.AttentionPool(2, 2)(kv), expected)


def layer_of(name: str, l: int, d: int, **settings: Any) -> SparseAttention:
    """A layer of compressed keys and values, its network one of those above."""
    network, kwargs = OURS[name]
    settings = dict(branches=("compressed",), compress_mlp=network(**kwargs)) | settings
    layer = SparseAttention(
        8, D, H, 2, l, l * d, 1, compress_block_sliding_stride=d, **settings
    )  # fmt: skip
    for p in layer.parameters():
        nn.init.normal_(p, std=0.5)
    return layer.to(DEVICE)


def with_copies(layer: SparseAttention) -> SparseAttention:
    """The layer, its networks hooked: they then get a copy of every window."""
    layer = deepcopy(layer)
    for network in filter(None, (layer.k_compress, layer.v_compress)):
        network.register_forward_hook(lambda *args: None)
    return layer


@pytest.mark.slow(one_of=4)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n", [0, 2, 3, 6, 13, 24])
@pytest.mark.parametrize("l, d", [(4, 4), (6, 3), (6, 2), (4, 1), (6, 4)])
@pytest.mark.parametrize("name", ["mean", "sum"])
def test_windows_without_copies(name, l, d, n, causal):
    layer = layer_of(name, l, d, causal=causal, backend="eager").double()
    x = torch.randn(2, n, 8, dtype=torch.float64, device=DEVICE)
    torch.testing.assert_close(step(layer, x), step(with_copies(layer), x))


def test_means_are_summed_in_float32():
    """Sums of 2,048 tokens pass the largest float16; a window before the sequence is half zeros."""
    segments = torch.full((1, 1, 2, 1024, 3), 100.0, dtype=torch.float16)
    means = MeanPool().compress_segments(segments, 2)
    assert means.dtype == torch.float16 and means[0, 0, :, 0].tolist() == [50.0, 100.0]


def test_a_derived_network_gets_windows():
    layer, x = layer_of("mean", 4, 2), torch.randn(1, 12, 8).to(DEVICE)
    before = layer(x)
    layer.k_compress = type("Derived", (MeanPool,), dict(forward=lambda self, kv: kv[..., 0, :]))()
    torch.testing.assert_close(layer(x), with_copies(layer)(x))
    assert not torch.allclose(layer(x), before)
