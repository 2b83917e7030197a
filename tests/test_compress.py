"""The compression networks against those of the published package, and their protocol."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from native_sparse_attention import SparseAttention
from native_sparse_attention.compress import (
    AttentionPool,
    CompressTransformer,
    ConvLinearCompress,
    GroupedMLP,
    MeanPool,
    SingleProjection,
    SumPool,
    default_compress_mlp,
    slides,
    windows_of,
)
from tests.helpers.budget import DEVICE

H, L, D = 2, 5, 4

# name: constructor and arguments, those of the published network
NETWORKS = {
    "conv": (ConvLinearCompress, {"heads": H, "dim_head": D, "compress_window_size": L}),
    "pool": (AttentionPool, {"dim_head": D, "compress_window_size": L}),
    "grouped": (
        GroupedMLP,
        {"dim_head": D, "compress_window_size": L, "heads": H, "expand_factor": 1.5},
    ),
    "single": (SingleProjection, {"dim_head": D, "compress_window_size": L}),
    "single per head": (SingleProjection, {"dim_head": D, "compress_window_size": L, "heads": H}),
    "transformer": (CompressTransformer, {"num_layers": 2, "dim": H * D, "num_heads": 4}),
    "shallow": (
        CompressTransformer,
        {"num_layers": 1, "dim": H * D, "num_heads": 1, "ff_hidden_dim": 3, "dropout": 0.5},
    ),
}
# and those that the published package does not name
OURS = {
    **NETWORKS,
    "default": (default_compress_mlp, {"dim_head": D, "compress_window_size": L}),
    "mean": (MeanPool, {}),
    "sum": (SumPool, {"dim_head": D}),
}


def build(name: str) -> nn.Module:
    network, kwargs = OURS[name]
    net = network(**kwargs).eval()
    for p in net.parameters():
        nn.init.normal_(p, std=0.5)
    return net


def published_default(published, version: str, expand_factor: float) -> nn.Module:
    kwargs = {
        "dim": 8,
        "dim_head": D,
        "heads": H,
        "sliding_window_size": 2,
        "compress_block_size": L,
        "selection_block_size": L,
        "num_selected_blocks": 1,
        "compress_mlp_expand_factor": expand_factor,
    }
    if version == "0.2.3":
        kwargs["compress_block_sliding_stride"] = L
    return published(version).SparseAttention(**kwargs).k_compress


def assert_same_network(ours: nn.Module, theirs: nn.Module) -> None:
    """State dicts load both ways; outputs and all gradients agree in fp64."""
    ours, theirs = ours.double().eval(), theirs.double().eval()
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.5)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)

    outs, grads = [], []
    kv = torch.randn(3, H, 7, L, D, dtype=torch.float64)
    bwd = torch.randn(3, H, 7, D, dtype=torch.float64)
    for net in (ours, theirs):
        leaf = kv.clone().requires_grad_()
        out = net(leaf)
        outs.append(out)
        params = dict(net.named_parameters())
        found = torch.autograd.grad(out, [leaf, *params.values()], bwd)
        grads.append(dict(zip(["kv", *params], found, strict=True)))
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NETWORKS)
def test_agrees_with_published(name, published):
    network, kwargs = NETWORKS[name]
    theirs = getattr(published("0.2.3").compress_networks, network.__name__)(**kwargs)
    assert_same_network(network(**kwargs), theirs)


@pytest.mark.parametrize("version", ["0.2.3", "0.1.12"])
@pytest.mark.parametrize("expand_factor", [1.0, 0.3])
def test_default_agrees_with_published(version, expand_factor, published):
    theirs = published_default(published, version, expand_factor)
    assert_same_network(default_compress_mlp(D, L, expand_factor), theirs)


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


def test_published_versions_are_told_apart(published):
    assert hasattr(published("0.2.3").compress_networks, "CompressTransformer")
    assert not hasattr(published("0.1.12").compress_networks, "CompressTransformer")
    assert published("0.2.3") is published("0.2.3")


@pytest.mark.parametrize("name", OURS)
def test_initial_weights_are_finite_and_copies_are_independent(name):
    network, kwargs = OURS[name]
    net = network(**kwargs).eval()
    copy = deepcopy(net)
    kv = torch.randn(2, H, 3, L, D)
    torch.testing.assert_close(net(kv), copy(kv))
    assert net(kv).isfinite().all()
    assert not {id(p) for p in net.parameters()} & {id(p) for p in copy.parameters()}


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize(("b", "w"), [(2, 0), (0, 3), (0, 0)])
def test_empty_windows_give_zero_gradients(name, b, w):
    net = build(name)
    kv = torch.randn(b, H, w, L, D, requires_grad=True)
    out = net(kv)
    assert out.shape == (b, H, w, D)
    out.sum().backward()
    assert kv.grad.shape == kv.shape
    for key, p in net.named_parameters():
        assert p.grad is not None, key
        torch.testing.assert_close(p.grad, torch.zeros_like(p))


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(name, dtype):
    net, kv = build(name), torch.randn(1, H, 3, L, D).to(dtype)
    exact = deepcopy(net).to(dtype).double()(kv.double())
    out = net.to(dtype)(kv)
    assert out.dtype == dtype
    tolerance = 20 * torch.finfo(dtype).eps * exact.abs().max().item()
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", OURS)
def test_autocast(name):
    net, kv = build(name), torch.randn(1, H, 3, L, D)
    with torch.autocast("cpu", torch.bfloat16):
        out = net(kv.bfloat16())
    torch.testing.assert_close(out.float(), net(kv), rtol=0.1, atol=0.1)
    assert out.dtype == torch.bfloat16
    if out.requires_grad:
        out.sum().backward()


@pytest.mark.slow(one_of=7)
@pytest.mark.parametrize("name", OURS)
def test_compiles_without_a_break(name):
    net, kv = build(name), torch.randn(1, H, 3, L, D)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(kv), net(kv))


@pytest.mark.parametrize("name", OURS)
def test_windows_do_not_mix(name):
    """Windows are compressed one by one: permuting them permutes the result."""
    net, kv = build(name), torch.randn(2, H, 6, L, D)
    order = torch.randperm(6)
    torch.testing.assert_close(net(kv[:, :, order]), net(kv)[:, :, order])


@pytest.mark.parametrize("name", ["mean", "sum", "pool", "single per head"])
def test_order_of_tokens_is_immaterial(name):
    net, kv = build(name), torch.randn(2, H, 3, L, D)
    torch.testing.assert_close(net(kv[..., torch.randperm(L), :]), net(kv))


def test_order_before_the_last_token_is_immaterial_to_the_transformer():
    net, kv = build("transformer"), torch.randn(2, H, 3, L, D)
    out = net(kv)
    torch.testing.assert_close(net(kv[..., [2, 0, 3, 1, 4], :]), out)
    assert not torch.allclose(net(kv.flip(-2)), out, atol=1e-2)


def test_a_replaced_convolution_is_called():
    """Adapters replace `conv`, pruning hooks it."""
    network, kv = ConvLinearCompress(2, 4, 3), torch.randn(2, 2, 5, 3, 4)
    expected, calls = network(kv), []
    hook = network.conv.register_forward_hook(lambda *args: calls.append(1))
    torch.testing.assert_close(network(kv), expected)
    hook.remove()
    network(kv)
    assert calls == [1]
    for other in (dict(groups=8), dict(groups=1), dict(groups=2, bias=False)):
        network.conv = nn.Conv1d(8, 8, 3, stride=3, **other)
        rows = kv.permute(0, 2, 1, 4, 3).reshape(10, 8, 3)
        wanted = network.conv(rows).reshape(2, 5, 2, 4).transpose(1, 2)
        torch.testing.assert_close(network(kv), wanted)
    network = ConvLinearCompress(2, 4, 3)
    expected = network(kv)
    network.conv = nn.Sequential(network.conv, nn.ReLU())
    torch.testing.assert_close(network(kv), expected.relu())
    network = ConvLinearCompress(2, 4, 3)
    prune.random_unstructured(network.conv, "weight", 0.5)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(2):
        network(kv).square().sum().backward()
        optimizer.step()
    network(kv)  # applies the mask
    assert not network.conv.weight[network.conv.weight_mask == 0].any()


@pytest.mark.parametrize("name", ["default", "mean", "sum", "pool", "single"])
def test_heads_share_weights(name):
    net, kv = build(name), torch.randn(2, H, 3, L, D)
    torch.testing.assert_close(net(kv.flip(1)), net(kv).flip(1))


def test_mean_pool_by_hand():
    kv = torch.tensor([[1.0, 2.0], [3.0, 6.0]]).view(1, 1, 1, 2, 2)
    torch.testing.assert_close(MeanPool()(kv), torch.tensor([2.0, 4.0]).view(1, 1, 1, 2))


def test_sum_pool_by_hand():
    kv = torch.tensor([[1.0, 2.0], [3.0, 6.0]]).view(1, 1, 1, 2, 2)
    net = SumPool(2)
    torch.testing.assert_close(net(kv), torch.tensor([4.0, 8.0]).view(1, 1, 1, 2))
    net.gain.data[1] = 0.5
    torch.testing.assert_close(net(kv), torch.tensor([4.0, 4.0]).view(1, 1, 1, 2))
    net = SumPool(2, gain=2.0)
    net.gain.data.zero_()
    net.reset_parameters()
    torch.testing.assert_close(net(kv), torch.tensor([8.0, 16.0]).view(1, 1, 1, 2))
    with pytest.raises(ValueError, match="gain"):
        SumPool(2, gain=float("nan"))


def test_attention_pool_by_hand():
    """Identity weights: each feature is weighted by the softmax of itself over the window."""
    kv = torch.tensor([[0.0, 5.0], [1.0, 5.0]]).view(1, 1, 1, 2, 2)
    weight = torch.tensor(1.0).sigmoid().item()
    out = AttentionPool(2, 2)(kv)
    torch.testing.assert_close(out, torch.tensor([weight, 5.0]).view(1, 1, 1, 2))


BAD = [
    (default_compress_mlp, {"dim_head": 0, "compress_window_size": 2}, "dim_head"),
    (default_compress_mlp, {"dim_head": 2, "compress_window_size": 0}, "compress_window_size"),
    (
        default_compress_mlp,
        {"dim_head": 2, "compress_window_size": 2, "expand_factor": 0.1},
        "expand_factor",
    ),
    (
        default_compress_mlp,
        {"dim_head": 2, "compress_window_size": 2, "start": "mean"},
        "start",
    ),
    (ConvLinearCompress, {"heads": 0, "dim_head": 2, "compress_window_size": 2}, "heads"),
    (AttentionPool, {"dim_head": 2.0, "compress_window_size": 2}, "dim_head"),
    (GroupedMLP, {"dim_head": 2, "compress_window_size": 2, "heads": 0}, "heads"),
    (
        GroupedMLP,
        {"dim_head": 2, "compress_window_size": 2, "heads": 1, "expand_factor": 0.0},
        "expand_factor",
    ),
    (SingleProjection, {"dim_head": 2, "compress_window_size": 2, "heads": -1}, "heads"),
    (CompressTransformer, {"num_layers": 0, "dim": 4, "num_heads": 2}, "num_layers"),
    (CompressTransformer, {"num_layers": 1, "dim": 4, "num_heads": 3}, "num_heads"),
    (
        CompressTransformer,
        {"num_layers": 1, "dim": 4, "num_heads": 2, "ff_hidden_dim": 0},
        "ff_hidden_dim",
    ),
    (CompressTransformer, {"num_layers": 1, "dim": 4, "num_heads": 2, "dropout": 1.5}, "dropout"),
]


@pytest.mark.parametrize(("network", "kwargs", "argument"), BAD)
def test_bad_arguments_are_named(network, kwargs, argument):
    with pytest.raises(ValueError, match=f"^{argument} "):
        network(**kwargs)


def test_transformer_names_a_wrong_width():
    with pytest.raises(ValueError, match="kv must have h \\* d = dim = 8, got h=3 and d=4"):
        CompressTransformer(1, 8, 2)(torch.randn(1, 3, 2, L, 4))


# windows of a whole sequence, without copies

SLIDING = ["single", "single per head", "mean", "sum"]


def layer_of(name: str, l: int, d: int, causal: bool = True) -> SparseAttention:
    network, kwargs = OURS[name]
    kwargs = {name: l if name == "compress_window_size" else v for name, v in kwargs.items()}
    layer = SparseAttention(
        dim=8, dim_head=D, heads=H, sliding_window_size=2, compress_block_size=l,
        compress_block_sliding_stride=d, selection_block_size=l * d, num_selected_blocks=1,
        causal=causal, compress_mlp=network(**kwargs),
    )  # fmt: skip
    for p in layer.parameters():
        nn.init.normal_(p, std=0.5)
    return layer


def summaries(
    layer: SparseAttention, raw: dict[str, Tensor], copied: bool, backend: str = "eager"
) -> list[Tensor]:
    """Of whole sequences; by copies of each window, as for other networks."""
    l, d = layer.compress_block_size, layer.compress_block_sliding_stride
    if copied:
        found = layer.compress({n: windows_of(t, l, d, layer.causal) for n, t in raw.items()})
    else:
        found = layer.compress_whole(raw, None, backend)
    return [found["ck"], found["cv"]]


@pytest.mark.slow(one_of=4)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n", [0, 2, 3, 6, 13, 24])
@pytest.mark.parametrize("l, d", [(4, 4), (6, 3), (6, 2), (4, 1), (6, 4)])
@pytest.mark.parametrize("name", SLIDING)
def test_windows_without_copies(name, l, d, n, causal):
    layer = layer_of(name, l, d, causal).double()
    raw = {t: torch.randn(2, H, n, D).double().requires_grad_() for t in "kv"}
    inputs = [*raw.values(), *(p for p in layer.parameters() if p.requires_grad)]
    expected = summaries(layer, raw, copied=True)
    actual = summaries(layer, raw, copied=False)
    weights = [torch.randn_like(t) for t in expected]
    of = [torch.autograd.grad(t, inputs, weights, materialize_grads=True, allow_unused=True)
          for t in (expected, actual)]  # fmt: skip
    for right, found in zip((*expected, *of[0]), (*actual, *of[1]), strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.kernels
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n", [2, 13, 70])
@pytest.mark.parametrize("l, d", [(4, 4), (6, 2), (1, 1)])
def test_means_of_keys_alone(l, d, n, causal):
    """Of a layer whose compressed keys only rank blocks."""
    layer = SparseAttention(
        8, D, H, 2, l, l * d, 1, compress_block_sliding_stride=d, causal=causal,
        branches=("selected",),
    )  # fmt: skip
    k = torch.randn(2, n, H, D, device=DEVICE).transpose(1, 2)
    found, expected = (layer.compress_whole({"k": k}, None, b) for b in ("triton", "eager"))
    assert list(found) == ["ck"]
    torch.testing.assert_close(found["ck"], expected["ck"], atol=1e-6, rtol=1e-6)


@pytest.mark.slow(one_of=4)
@pytest.mark.kernels
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n", [2, 13, 70])
@pytest.mark.parametrize(
    "name, l, d", [("mean", 4, 4), ("mean", 6, 2), ("mean", 5, 1), ("sum", 6, 2)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_means_by_the_kernel(name, dtype, l, d, n, causal):
    """Of keys and values as a projection gives them, and positions of another dtype: no further
    from the means or sums of copied windows, and their gradients, than PyTorch in that dtype."""
    layer = layer_of(name, l, d, causal).to(DEVICE)
    projected = torch.randn(2, n, 3 * H * D, device=DEVICE).to(dtype)
    names = ("k", "v", "k_intrablock_positions", "v_intrablock_positions")
    results, weights = {}, None
    for way, kind in (("exact", torch.float64), ("eager", dtype), ("triton", dtype)):
        module = deepcopy(layer).to(kind if way == "exact" else torch.float32)
        leaf = projected.to(kind, copy=True).requires_grad_()
        k, v = (t.unflatten(2, (H, D)).transpose(1, 2) for t in leaf.chunk(3, 2)[1:])
        found = summaries(module, {"k": k, "v": v}, way == "exact", way)
        weights = weights or [torch.randn_like(t) for t in found]
        leaves = [leaf, *(getattr(module, name) for name in names[2:])]
        leaves += [*module.k_compress.parameters(), *module.v_compress.parameters()]
        loss = [(t * w.to(kind)).sum() for t, w in zip(found, weights, strict=True)]
        grads = torch.autograd.grad(sum(loss), leaves, allow_unused=True, materialize_grads=True)
        results[way] = [*found, *grads]
    for right, low, got in zip(*results.values(), strict=True):
        assert got.shape == right.shape and got.dtype == low.dtype
        error, allowed = ((t.double() - right).norm() for t in (got, low))
        assert error <= 1.5 * allowed + 4 * torch.finfo(dtype).eps * right.norm()


@pytest.mark.parametrize("name", SLIDING)
def test_windows_without_copies_round_no_more(name):
    layer = layer_of(name, 16, 8)
    raw = {t: torch.randn(2, H, 512, D) for t in "kv"}
    low, raw = layer.bfloat16(), {n: t.bfloat16() for n, t in raw.items()}
    exact = summaries(deepcopy(low).double(), {n: t.double() for n, t in raw.items()}, copied=True)
    found = {copied: summaries(low, raw, copied) for copied in (True, False)}
    error = {
        copied: sum((t.double() - e).square().sum() for t, e in zip(ts, exact, strict=True)).sqrt()
        for copied, ts in found.items()
    }
    assert 0 < error[False] <= 1.25 * error[True]


def test_windows_without_copies_keep_none():
    layer = layer_of("single", 16, 8)
    raw = {t: torch.randn(2, H, 512, D).requires_grad_() for t in "kv"}

    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}

    def kept(copied: bool) -> int:
        sizes = {}

        def note(t: Tensor) -> Tensor:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            out = summaries(layer, raw, copied)
        del out
        return sum(size for at, size in sizes.items() if at not in weights)

    assert kept(copied=False) < 0.7 * kept(copied=True)


def test_networks_that_someone_has_changed_get_windows():
    class Derived(MeanPool):
        def forward(self, kv):
            return kv[..., 0, :]

    raw = {t: torch.randn(1, H, 12, D) for t in "kv"}
    layer, seen = layer_of("mean", 4, 2), []
    layer.k_compress.register_forward_hook(lambda _, args, out: seen.append(args[0].shape))
    summaries(layer, raw, copied=False)
    assert seen == [(1, H, 6, 4, D)]

    layer = layer_of("single", 4, 2)
    layer.v_compress.compress[1] = torch.compile(layer.v_compress.compress[1], backend="eager")
    assert not slides(layer.v_compress) and slides(layer.k_compress)
    for right, found in zip(*(summaries(layer, raw, c) for c in (True, False)), strict=True):
        assert torch.equal(found, right)

    layer = layer_of("single", 4, 2)
    layer.k_compress.compress.append(nn.Linear(D, D))
    assert not slides(layer.k_compress) and slides(layer.v_compress)
    layer.k_compress = deepcopy(layer.v_compress)
    assert slides(layer.k_compress)
    layer.k_compress.compress[1].forward = lambda x: x[..., :D]
    assert not slides(layer.k_compress)

    layer = layer_of("mean", 4, 2)
    layer.k_compress = Derived()
    for right, found in zip(*(summaries(layer, raw, c) for c in (True, False)), strict=True):
        assert torch.equal(found, right)


@pytest.mark.slow
def test_windows_without_copies_compile():
    """In one graph; of lengths that the stride divides, and of others, one each."""
    layer = layer_of("mean", 4, 2)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for n in (17, 24, 31, 38, 45, 60):
        x = torch.randn(1, n, 8)
        torch.testing.assert_close(compiled(x), layer(x))
    assert len(graphs) <= 3
