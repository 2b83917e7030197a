"""Rotary embedding by its kernel against `rotation` in eager PyTorch: in the interpreter on a CPU,
on a GPU in every dtype."""

import warnings
from unittest.mock import patch

import pytest
import torch
from rotary_embedding_torch import RotaryEmbedding
from torch import nn

from native_sparse_attention import KVCache
from native_sparse_attention.ops.triton import elementwise as operator
from native_sparse_attention.rotary import Rotary, rotate, rotated_heads, rotation
from tests.helpers.budget import CUDA, DEVICE
from tests.helpers.layers import DIM, layer

pytest.importorskip("triton")

from native_sparse_attention.kernels import rotary as kernels
from native_sparse_attention.kernels.rotary import backward

pytestmark = pytest.mark.kernels

# the interpreter rounds to bf16 towards 0
DTYPES = [torch.bfloat16, torch.float16, torch.float32] if CUDA else [torch.float16, torch.float32]


def draw(dtype=torch.float32, b=2, n=5, heads=(3, 1), d=16):
    """Heads [b h n d] of one projection [b n ..], beside one another."""
    projection = torch.randn(b, n, sum(heads) * d, device=DEVICE).to(dtype)
    parts = projection.split([h * d for h in heads], -1)
    return [t.unflatten(-1, (-1, d)).transpose(1, 2) for t in parts]


def turned(rotary, tensors, where, dtype, backend):
    """The tensors turned, and gradients, in `dtype`."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
    outs = rotate(rotary, leaves, *where, backend)
    return [*outs, *torch.autograd.grad(outs, leaves, [t.flip(2).to(dtype) for t in tensors])]


def assert_right(rotary, tensors, start, positions=None):
    """Within twice the error of eager PyTorch in the same dtype, both against fp64, and one ulp."""
    rotary, dtype = rotary.to(DEVICE), tensors[0].dtype
    runs = [(dtype, "triton"), (torch.float64, "eager"), (dtype, "eager")]
    results = (turned(rotary, tensors, (start, positions), *run) for run in runs)
    for actual, exact, low in zip(*results):
        assert actual.dtype == dtype and actual.shape == exact.shape
        assert actual.transpose(1, 2).is_contiguous() and actual.isfinite().all()
        error, lowp = ((t.double() - exact).abs().max() for t in (actual, low))
        assert error <= 2 * lowp + torch.finfo(dtype).eps * exact.abs().max(), f"{error:.2e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "n, start", [(70, 0), (5, 1_000_000), (1, torch.int32), (6, torch.int64)], ids=str
)
def test_positions_go_on(n, start, dtype):
    """From an int, or where each row is."""
    if isinstance(start, torch.dtype):
        start = torch.tensor([3, 70_001], dtype=start, device=DEVICE)
    assert_right(Rotary(16), draw(dtype, n=n), start)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_given_positions(dtype):
    positions = torch.randint(100_000, (7, 2), dtype=dtype, device=DEVICE).T
    assert_right(Rotary(16), draw(n=7), 0, positions)


@pytest.mark.parametrize(
    "rotary, heads, d",
    [
        (Rotary(80), (3, 3), 80),
        (Rotary(6), (2, 1), 7),
        (Rotary(8), (9, 2), 24),
        (RotaryEmbedding(16, interpolate_factor=1.7), (2, 2), 16),
        (RotaryEmbedding(12, freqs_for="pixel").bfloat16(), (1, 1), 16),
        (Rotary(16), (2, 1, 1), 16),
    ],
    ids=["wide", "odd", "in part", "interpolated", "frequencies in bf16", "a key more"],
)
def test_shapes(rotary, heads, d):
    tensors = draw(heads=heads, d=d, n=2)
    assert_right(rotary, tensors, 11)
    out = rotate(rotary.to(DEVICE), tensors, 11, None, "triton")
    rest = 2 * len(rotary.freqs)
    assert all(torch.equal(a[..., rest:], b[..., rest:]) for a, b in zip(out, tensors))


def test_any_strides():
    x, y = torch.randn(2, 3, 4, 16, device=DEVICE), torch.randn(2, 1, 16, 4, device=DEVICE)
    assert_right(Rotary(16), [x, y.transpose(2, 3)], 5)


@pytest.mark.parametrize("b, n", [(0, 3), (2, 0), (1, 1)])
def test_few_tokens_and_one_tensor(b, n):
    tensors = draw(b=b, n=n)[:1]
    rotary = Rotary(16).to(DEVICE)
    (out,) = operator.rotate(tensors, rotary.freqs, 9, None, 1.0)
    torch.testing.assert_close(out, rotation(rotary, tensors[0], 9)(tensors[0]))


def test_the_inverse_undoes_it():
    """Gradients of gradients too are rotations."""
    tensors = draw()
    rotary = Rotary(16).to(DEVICE)
    there = operator.rotate(tensors, rotary.freqs, 1234, None, 1.0)
    back = operator.rotate(there, rotary.freqs, 1234, None, -1.0)
    for actual, expected in zip(back, tensors):
        torch.testing.assert_close(actual, expected)
    x = tensors[0].clone().requires_grad_()
    (out,) = operator.rotate([x], rotary.freqs, 7, None, 1.0)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    torch.testing.assert_close(second, torch.full_like(x, 2.0))


def test_one_graph_for_all_lengths():
    rotary, graphs = Rotary(16).to(DEVICE), []

    def count(module, inputs):
        graphs.append(module)
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    def call(q, k, start):
        return rotate(rotary, [q, k], start, None, "triton")

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=count)
    for n, start in ((5, 900), (9, 64), (12, 1000)):
        q, k = (t.detach().requires_grad_() for t in draw(n=n))
        results = []
        for run in (compiled, call):
            outs = run(q, k, start)
            results.append([*outs, *torch.autograd.grad([t.square().sum() for t in outs], (q, k))])
        for actual, expected in zip(*results):
            torch.testing.assert_close(actual, expected)
            assert actual.stride() == expected.stride()
    assert len(graphs) == 1


# of a projection


def heads_of(rotary, qkv, positions, sizes, backend):
    """q, k, cq, ck, v and cv: by one node, or by autograd's."""
    (h, k), d = sizes, rotary_width(rotary)
    if backend == "triton":
        return rotated_heads(rotary, qkv, h, d, positions, backend)
    split = qkv.unflatten(-1, (-1, d)).transpose(1, 2).split((h, k, k), 1)
    q, k, v = split
    return *rotate(rotary, [q, k], 0, positions, backend), q, k, v, v


def rotary_width(rotary):
    return 24 if len(rotary.freqs) == 4 else 2 * len(rotary.freqs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "rotary, sizes, n, given",
    [
        (Rotary(16), (3, 1), 70, False),
        (Rotary(80), (9, 3), 5, True),
        (Rotary(8), (2, 2), 1, False),
        (RotaryEmbedding(16, interpolate_factor=1.7), (4, 2), 9, True),
    ],
    ids=["plain", "wide", "in part", "interpolated"],
)
def test_projected_heads(rotary, sizes, n, given, dtype):
    """Within twice the error of eager PyTorch in the same dtype, and one ulp."""
    rotary, width = rotary.to(DEVICE), rotary_width(rotary)
    qkv = torch.randn(2, n, (sizes[0] + 2 * sizes[1]) * width, device=DEVICE).to(dtype)
    positions = torch.randint(100_000, (n, 2), device=DEVICE).T if given else None
    d_outs, results = None, []
    for kind, backend in ((dtype, "triton"), (torch.float64, "eager"), (dtype, "eager")):
        leaf = qkv.to(kind).requires_grad_()
        outs = heads_of(rotary, leaf, positions, sizes, backend)
        d_outs = d_outs or [torch.randn_like(t) for t in outs]
        results.append([*outs, *torch.autograd.grad(outs, leaf, [t.to(kind) for t in d_outs])])
    for actual, exact, low in zip(*results, strict=True):
        assert actual.dtype == dtype and actual.shape == exact.shape
        error, lowp = ((t.double() - exact).abs().max() for t in (actual, low))
        assert error <= 2 * lowp + torch.finfo(dtype).eps * exact.abs().max(), f"{error:.2e}"


@pytest.mark.parametrize("b, n", [(0, 3), (2, 0)])
def test_projected_heads_of_nothing(b, n):
    qkv = torch.randn(b, n, 5 * 16, device=DEVICE, requires_grad=True)
    outs = operator.projected_heads(qkv, 3, 16, Rotary(16).to(DEVICE).freqs, None, 1.0)
    assert [t.shape for t in outs] == [(b, h, n, 16) for h in (3, 1, 3, 1, 1, 1)]
    (grad,) = torch.autograd.grad([t.sum() for t in outs], qkv)
    assert grad.shape == qkv.shape


def test_projected_heads_only_for_gradients():
    rotary, qkv = Rotary(16).to(DEVICE), torch.randn(1, 3, 80, device=DEVICE)
    call = 3, 16, None
    assert rotated_heads(rotary, qkv, *call, "triton") is None
    leaf = qkv.clone().requires_grad_()
    for backend in ("eager", "flex"):
        assert rotated_heads(rotary, leaf, *call, backend) is None
    assert rotated_heads(None, leaf, *call, "triton") is None
    with torch.no_grad():
        assert rotated_heads(rotary, leaf, *call, "triton") is None
    rotary.freqs = nn.Parameter(rotary.freqs)
    assert rotated_heads(rotary, leaf, *call, "triton") is None
    outs = rotated_heads(Rotary(16).to(DEVICE), leaf, *call, "triton")
    with pytest.raises(NotImplementedError, match="rotary embedding give first derivatives only"):
        torch.autograd.grad(outs.q.square().sum(), leaf, create_graph=True)


@pytest.mark.slow(one_of=2)
@pytest.mark.parametrize("branch_kv", ["shared", "independent"])
def test_gradients_of_a_layer(branch_kv):
    """Of every parameter and the input, with packed documents and without; one launch joins those
    of shared keys."""
    module = layer(torch.float32, dim_head=16, branch_kv=branch_kv, backend="eager").to(DEVICE)
    x = torch.randn(2, 13, DIM, device=DEVICE, requires_grad=True)
    documents = torch.arange(13, device=DEVICE).expand(2, -1) // 8

    def run():
        loss = module(x).square().sum() + module(x, segment_ids=documents).sum()
        return torch.autograd.grad(loss, [x, *module.parameters()])

    expected, joined = run(), []
    module.backend = "triton"
    with patch.object(kernels, "backward", lambda *a: joined.append(a) or backward(*a)):
        for actual, e in zip(run(), expected, strict=True):
            torch.testing.assert_close(actual, e, atol=1e-4, rtol=1e-4)
    assert len(joined) == (2 if branch_kv == "shared" else 0)


@pytest.mark.gpu
def test_gradients_of_many_tokens():
    """Past 2^31 elements in one tensor."""
    n, rotary = 300_000, Rotary(128).cuda()
    q, k = (torch.randn(1, h, n, 128, device="cuda").bfloat16() for h in (64, 1))
    grads = q, q, k, k, k, k
    out = operator.projected_heads_backward(*grads, rotary.freqs, None, 0, -1.0)
    last = torch.cat((q, k), 1)[:, :, -3:].float()
    back = rotation(rotary, last.flip(2), torch.tensor([1 - n], device="cuda"))
    turned = back(last.flip(2)).flip(2)  # by the angles of positions -(n - 1), ..
    expected = torch.cat((turned + last, 2 * k[:, :, -3:].float()), 1)
    out = out.unflatten(-1, (-1, 128))[:, -3:].transpose(1, 2).float()
    torch.testing.assert_close(out, expected, atol=0.05, rtol=0.01)


# which layers take it


@pytest.fixture
def launches(monkeypatch):
    from native_sparse_attention.kernels import rotary

    seen, launch = [], rotary.rotate
    monkeypatch.setattr(rotary, "rotate", lambda *args: seen.append(args) or launch(*args))
    return seen


@pytest.mark.parametrize("branch_kv", ["shared", "independent"])
def test_layer(launches, monkeypatch, branch_kv):
    """Gradients, packed documents and a cache are those by eager PyTorch."""
    module = layer(torch.float32, dim_head=16, branch_kv=branch_kv, backend="eager").to(DEVICE)
    x = torch.randn(2, 13, DIM, device=DEVICE)
    documents = torch.arange(13, device=DEVICE).expand(2, -1) // 8

    def run():
        outs = [module(x), module(x, segment_ids=documents)]
        outs += torch.autograd.grad(outs[0].square().sum() + outs[1].sum(), module.to_qkv.weight)
        cache = KVCache(32, 2)
        for part, lengths in ((x[:, :5], None), (x[:, 5:8], [3, 2]), (x[:, 8:9], None)):
            outs.append(module(part, cache=cache, return_cache=True, lengths=lengths)[0])
        return outs

    expected = run()
    assert not launches
    by_kernel = "native_sparse_attention.attention.rotate"
    monkeypatch.setattr(by_kernel, lambda *args: rotate(*args[:-1], "triton"))
    for actual, e in zip(run(), expected):
        torch.testing.assert_close(actual, e, atol=1e-5, rtol=1e-4)
    # two rotations, turned back, and three with the cache
    assert len(launches) == 7


def test_step(launches):
    """Decoding by its kernels takes the lengths that the device knows."""
    module = layer(torch.float32, dim_head=16, num_selected_blocks=0, backend="eager").to(DEVICE)
    cache, x = KVCache(32, 2), torch.randn(2, 10, DIM, device=DEVICE)
    with torch.no_grad():
        expected = module(x)
        module(x[:, :9], cache=cache)
        module.backend = "triton"
        out = module(x[:, 9:], cache=cache)
    torch.testing.assert_close(out, expected[:, 9:], atol=1e-5, rtol=1e-4)
    assert [args[2] is cache.lengths_on(DEVICE) for args in launches] == [True]


def test_only_where_the_kernels_run(launches):
    tensors, rotary = draw(), Rotary(16).to(DEVICE)
    for backend in ("eager", "flex"):
        rotate(rotary, tensors, 0, None, backend)
    rotary.freqs = nn.Parameter(rotary.freqs)
    rotate(rotary, tensors, 0, None, "triton")
    assert not launches
    with torch.no_grad():
        rotate(rotary, tensors, 0, None, "triton")
    assert len(launches) == 1


@pytest.mark.gpu
def test_a_graph_goes_on(waits_for_nothing):
    """Replayed where rows have come to meanwhile; nothing waits for the device."""
    module = layer(torch.float32, dim_head=16).cuda()
    x = torch.randn(2, 1, DIM, device="cuda")
    qkv = module.to_qkv(x)
    q, (k, _) = module.split(qkv)
    held = torch.tensor([3, 70], dtype=torch.int32, device="cuda")
    with torch.no_grad():
        module.rotate(x, qkv, held, None, "triton")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found, _ = module.rotate(x, qkv, held, None, "triton")
        held += 40
        graph.replay()
        turn = rotation(module.rotary_emb, q, held)
        for name, t in (("q", q), ("k", k)):
            torch.testing.assert_close(found[name], turn(t))
        with waits_for_nothing():
            module.rotate(x, qkv, held, None, "triton")


@pytest.mark.gpu
def test_many_tokens():
    """Past 2^31 elements in one tensor: 64-bit offsets."""
    n, rotary = 300_000, Rotary(128).cuda()
    tensors = [torch.randn(1, n, h, 128, device="cuda").bfloat16().transpose(1, 2) for h in (64, 1)]
    outs = operator.rotate(tensors, rotary.freqs, 5, None, 1.0)
    for out, t in zip(outs, tensors):
        last = t[:, -1:, -3:]
        expected = rotation(rotary, last.float(), n + 2)(last.float())
        torch.testing.assert_close(out[:, -1:, -3:].float(), expected, atol=0.02, rtol=0.01)


@pytest.mark.gpu
def test_compiled():
    """By inductor, in one graph."""
    module = layer(torch.float32, dim_head=16).cuda()
    x = torch.randn(2, 300, DIM, device="cuda")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
        out = torch.compile(module, fullgraph=True)(x)
    torch.testing.assert_close(out, module(x), atol=1e-4, rtol=1e-4)
