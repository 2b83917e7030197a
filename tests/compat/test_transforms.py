"""torch.func, forward-mode AD and derivatives of derivatives: eager PyTorch has them, kernels say
that they have not."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

from native_sparse_attention import (
    KVCache,
    SegmentIds,
    SparseAttention,
    block_masked_attention,
    chunked_attention,
    compressed_attention,
    mha_reference,
    native_sparse_attention,
    select_blocks,
    selected_attention,
    sliding_window_attention,
)
from native_sparse_attention.compat.transforms import unsupported_by_kernels
from native_sparse_attention.compress import (
    CompressTransformer,
    ConvLinearCompress,
    SingleProjection,
)
from native_sparse_attention.masks import causal, dense_attention, soft_cap
from native_sparse_attention.masks.tanh import tanh_approx
from native_sparse_attention.ops.reference import eager
from native_sparse_attention.ops.triton.rotary import rotate
from tests.helpers.budget import DEVICE

CLOSE = dict(atol=1e-9, rtol=1e-7)
# torch's own, as it loads forward-mode AD
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64)


def sparse(**settings):
    settings = dict(causal=True, compress_block_sliding_stride=4) | settings
    return SparseAttention(16, 8, 2, 8, 8, 8, 2, **settings).double()


torch.manual_seed(0)
Q, KEYS, V = normal(1, 12, 2, 4), normal(1, 12, 1, 4), normal(1, 12, 1, 4)
CK, CV = normal(1, 3, 1, 4), normal(1, 3, 1, 4)
INDICES = torch.tensor([-1, 0, 1]).repeat_interleave(4).view(1, 12, 1, 1)
PLACE = dict(selection_block_size=4, backend="eager")
SEGMENTS = torch.arange(12)[None] // 5


def whole(v):
    return native_sparse_attention(
        Q, KEYS, v, CK, CV, torch.ones(1, 12, 2, 3, dtype=torch.float64), compress_block_size=4,
        compress_block_sliding_stride=4, selection_block_size=4, num_selected_blocks=1,
        sliding_window_size=3,
    )  # fmt: skip


def gates(q):
    return select_blocks(
        q, CK, seq_len=12, compress_block_size=4, compress_block_sliding_stride=4,
        num_selected_blocks=1, return_gates=True, importance="probs", **PLACE,
    )[1]  # fmt: skip


OPERATIONS = {
    "whole": (whole, V),
    "compressed": (
        lambda q: compressed_attention(q, CK, CV, compress_block_sliding_stride=4, backend="eager"),
        Q,
    ),
    "selected": (lambda k: selected_attention(Q, k, V, INDICES, **PLACE), KEYS),
    "window": (lambda q: sliding_window_attention(q, KEYS, V, sliding_window_size=3), Q),
    "documents": (
        lambda k: sliding_window_attention(
            Q, k, V, sliding_window_size=3, cu_seqlens=torch.tensor([0, 5, 12])
        ),
        KEYS,
    ),
    "gates": (gates, Q),
    "chunked": (
        lambda q: chunked_attention(q, KEYS, V, q_chunk_size=5, k_chunk_size=7, causal=True), Q
    ),
    "chunked lse": (
        lambda q: chunked_attention(q, KEYS, V, q_chunk_size=5, causal=True, return_lse=True)[1], Q
    ),
    "block masked": (
        lambda k: block_masked_attention(
            Q.view(1, 1, 2, 12, 4), k.view(1, 1, 12, 4), V.view(1, 1, 12, 4),
            SegmentIds(SEGMENTS, SEGMENTS), 4, 4, torch.ones(12, 12).tril(), -1e30, 3.0,
        ),
        KEYS,
    ),
    "mha": (
        lambda q: mha_reference(
            q.transpose(1, 2), KEYS.expand(-1, -1, 2, -1).transpose(1, 2), V.expand(-1, -1, 2, -1)
            .transpose(1, 2), segment_ids=SEGMENTS, causal=True,
        ),
        Q,
    ),
    "dense": (
        lambda q: dense_attention(
            q.transpose(1, 2), KEYS.transpose(1, 2), V.transpose(1, 2), mask_mod=causal,
            score_mod=soft_cap(2.0),
        ),
        Q,
    ),
}  # fmt: skip


@pytest.fixture(params=OPERATIONS)
def operation(request):
    return OPERATIONS[request.param]


@pytest.fixture(params=[False, True], ids=["whole", "tiles"])
def strategy(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(eager, "MAX_SCORES", 0)


@pytest.mark.slow(one_of=3)
def test_jacobians(operation, strategy):
    """Backward and forward, batched and one by one, of torch.func and of torch.autograd."""
    f, x = operation
    expected = torch.autograd.functional.jacobian(f, x)
    torch.testing.assert_close(jacrev(f)(x), expected, **CLOSE)
    torch.testing.assert_close(jacfwd(f)(x), expected, **CLOSE)
    try:
        batched = torch.autograd.functional.jacobian(f, x, vectorize=True)
    except NotImplementedError as refused:
        assert "torch.func.jacrev" in str(refused)
    else:
        torch.testing.assert_close(batched, expected, **CLOSE)


def test_tangents(operation):
    f, x = operation
    t, e = torch.randn_like(x), 1e-6
    expected = (f(x + e * t) - f(x - e * t)) / (2 * e)
    _, found = jvp(f, (x,), (t,))
    with forward_ad.dual_level(), torch.no_grad():
        dual = forward_ad.unpack_dual(f(forward_ad.make_dual(x, t))).tangent
    torch.testing.assert_close(dual, found, **CLOSE)
    if f is not gates:  # whose value is 1, whatever its gradient
        torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-5)


def test_second_derivatives(operation, strategy):
    f, x = operation
    w = torch.randn(f(x).shape, dtype=torch.float64)

    def loss(x):
        return (f(x).square() * w).sum()

    def slope(x):
        return grad(loss)(x).square().sum()

    expected = hessian(loss)(x)
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    v = first.detach().flatten()
    torch.testing.assert_close(
        second.flatten(), 2 * expected.reshape(v.numel(), -1) @ v, atol=1e-8, rtol=1e-6
    )
    torch.testing.assert_close(grad(slope)(x.detach()), second, atol=1e-8, rtol=1e-6)


def test_mapped(operation):
    f, x = operation
    xs = torch.randn(3, *x.shape, dtype=torch.float64)
    torch.testing.assert_close(vmap(f)(xs), torch.stack([f(x) for x in xs]), **CLOSE)


def test_gradient_of_gradient_by_finite_differences(strategy):
    x = Q[:, :4].clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda q: sliding_window_attention(q, KEYS, V, sliding_window_size=3), x,
        check_forward_ad=True, fast_mode=True,
    )  # fmt: skip
    assert torch.autograd.gradgradcheck(
        lambda q: sliding_window_attention(q, KEYS, V, sliding_window_size=3), x, fast_mode=True
    )


# the layer


def per_sample(layer, x, **named):
    weights = dict(layer.named_parameters())

    def loss(w, row, named):
        named = {name: t[None] for name, t in named.items()}
        return functional_call(layer, w, (row[None],), named).square().sum()

    found = vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, named)
    for b in range(len(x)):
        own = {name: t[b : b + 1] for name, t in named.items()}
        value = layer(x[b : b + 1], **own).square().sum()
        expected = torch.autograd.grad(value, list(weights.values()), materialize_grads=True)
        for name, g in zip(weights, expected, strict=True):
            torch.testing.assert_close(found[name][b], g, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"causal": False},
        {"use_diff_topk": True, "selection_stride": 2, "num_initial_blocks": 1},
        {"importance": "probs", "attention_sinks": True, "soft_cap": 3.0},
        {"interpolated_importance_score": True, "branch_kv": "independent"},
    ],
)
def test_gradients_of_each_sample(settings):
    layer, x = sparse(**settings), normal(2, 24, 16)
    per_sample(layer, x)
    per_sample(layer, x, mask=torch.arange(24) >= torch.tensor([[0], [7]]))


@pytest.mark.parametrize(
    "network",
    [SingleProjection(8, 8), ConvLinearCompress(2, 8, 8), CompressTransformer(1, 16, 2)],
    ids=lambda network: type(network).__name__,
)
def test_networks_whose_weights_are_plain_tensors(network):
    layer, x = sparse(compress_mlp=network.double()), normal(1, 16, 16)
    weights = {name: t.detach() for name, t in layer.named_parameters()}
    found = grad(lambda w: functional_call(layer, w, (x,)).square().sum())(weights)
    expected = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    for value, g in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(value, g)


def test_long_rows_of_a_layer():
    """Past what the specification forms at once elsewhere."""
    layer, x = sparse(), normal(1, 1500, 16)
    t = torch.randn_like(x)
    assert not eager.few_scores("", *2 * (torch.empty(1, 1500, 2, 8),), {})
    _, tangent = jvp(layer, (x,), (t,))
    with torch.no_grad():
        expected = (layer(x + 1e-6 * t) - layer(x - 1e-6 * t)) / 2e-6
    torch.testing.assert_close(tangent, expected, atol=1e-6, rtol=1e-4)


def test_packed_documents():
    layer, x, t = sparse(), normal(3, 1, 24, 16), normal(3, 1, 24, 16)
    ends = torch.tensor([[0, 5, 24], [0, 11, 24], [0, 24, 24]])
    each = [layer(row, cu_seqlens=cu) for row, cu in zip(x, ends, strict=True)]
    mapped = vmap(lambda row, cu: layer(row, cu_seqlens=cu))
    torch.testing.assert_close(mapped(x, ends), torch.stack(each), **CLOSE)
    ids = torch.arange(24)[None] // 7
    _, tangent = jvp(lambda x: layer(x, segment_ids=ids), (x[0],), (t[0],))
    expected = layer(x[0] + 1e-6 * t[0], segment_ids=ids)
    expected = (expected - layer(x[0] - 1e-6 * t[0], segment_ids=ids)) / 2e-6
    torch.testing.assert_close(tangent, expected, atol=1e-7, rtol=1e-5)
    with pytest.raises(NotImplementedError, match="segment_ids cannot be mapped"):
        vmap(lambda row, ids: layer(row, segment_ids=ids))(x, ids.expand(3, 1, -1))


def test_what_vmap_cannot_write():
    layer, x = sparse(), normal(2, 1, 8, 16)
    with pytest.raises(NotImplementedError, match="as a batch"):
        vmap(lambda row: layer(row, return_cache=True)[0])(x)
    with pytest.raises(NotImplementedError, match="as a batch"):
        jvp(lambda x: layer(x, KVCache()), (x[0],), (x[1],))
    with pytest.raises(NotImplementedError, match="use chunked_attention"):
        vmap(
            lambda mask: block_masked_attention(
                Q.view(1, 1, 2, 12, 4), KEYS.view(1, 1, 12, 4), V.view(1, 1, 12, 4), None, 4, 4,
                mask, -1e30,
            )
        )(torch.ones(2, 12, 12))  # fmt: skip


# kernels

KERNEL_OPERATIONS = {
    "whole": lambda x, k, v, ck, cv, lists, **kw: native_sparse_attention(
        x, k, v, ck, cv, torch.ones(1, 12, 2, 3, device=x.device),
        compress_block_size=4, compress_block_sliding_stride=4, selection_block_size=4,
        num_selected_blocks=1, sliding_window_size=3, **kw,
    ),
    "compressed": lambda x, k, v, ck, cv, lists, **kw: compressed_attention(
        x, ck, cv, compress_block_sliding_stride=4, **kw
    ),
    "selected": lambda x, k, v, ck, cv, lists, **kw: selected_attention(
        x, k, v, lists, selection_block_size=4, **kw
    ),
    "window": lambda x, k, v, ck, cv, lists, **kw: sliding_window_attention(
        x, k, v, sliding_window_size=3, **kw
    ),
    "gates": lambda x, k, v, ck, cv, lists, **kw: select_blocks(
        x, ck, seq_len=12, compress_block_size=4, compress_block_sliding_stride=4,
        selection_block_size=4, num_selected_blocks=1, return_gates=True, **kw,
    )[1],
}  # fmt: skip


def run_operation(named, x, backend):
    """An operation of x as queries, over the keys and values of this file."""
    fixed = (KEYS.float(), V.float(), CK.float(), CV.float(), INDICES)
    return KERNEL_OPERATIONS[named](x, *(t.to(x.device) for t in fixed), backend=backend)


@pytest.fixture(params=KERNEL_OPERATIONS)
def named(request):
    return request.param


@pytest.mark.parametrize("backend", ["triton", "flex"])
def test_kernels_refuse(named, backend):
    if backend == "flex" and named == "gates":
        pytest.skip("flex_attention has no ranking")
    x = torch.randn(1, 12, 2, 4)

    def f(x):
        return run_operation(named, x, backend)

    with pytest.raises(NotImplementedError, match="backend='eager'"):
        jvp(f, (x,), (x,))
    for transformed in (lambda x: vmap(f)(x[None]), jacrev(f), grad(lambda x: f(x).sum())):
        with pytest.raises(NotImplementedError, match="backend='eager'"):
            transformed(x)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="backend='eager'"):
        f(forward_ad.make_dual(x, x))


@pytest.mark.kernels
def test_second_derivatives_of_kernels(named):
    """The first are right, with their graph too; asked for the second, kernels refuse."""
    x = torch.randn(1, 12, 2, 4, device=DEVICE, requires_grad=True)
    w = torch.randn(run_operation(named, x, "eager").shape, device=DEVICE)

    def loss(x, backend="triton"):
        return (run_operation(named, x, backend).square() * w).sum()

    (expected,) = torch.autograd.grad(loss(x, "eager"), x)
    (first,) = torch.autograd.grad(loss(x), x, create_graph=True)
    torch.testing.assert_close(first, expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(NotImplementedError, match="backend='eager'"):
        first.sum().backward()
    with pytest.raises(NotImplementedError, match="backend='eager'"):
        torch.autograd.functional.jacobian(
            lambda x: run_operation(named, x, "triton"), x, vectorize=True
        )


@pytest.mark.kernels
def test_rotation_by_the_kernel():
    x = torch.randn(1, 2, 3, 8, device=DEVICE)
    freqs = torch.rand(4, device=DEVICE)

    def turned(x):
        return rotate(tensors=[x, x[:, :1]], freqs=freqs, start=0, factor=1.0)[0]

    with pytest.raises(NotImplementedError, match="backend='eager'"):
        jvp(turned, (x,), (x,))
    with pytest.raises(NotImplementedError, match="backend='eager'"):
        vmap(turned)(x[None])


def test_the_approximate_tanh():
    x = torch.randn(5)
    torch.testing.assert_close(vmap(tanh_approx)(x), x.tanh())
    with pytest.raises(NotImplementedError, match="approximate=False"):
        jvp(tanh_approx, (x,), (x,))


def test_auto_falls_back():
    """No kernels where only eager PyTorch has what is asked."""
    assert not unsupported_by_kernels()
    found = []
    vmap(lambda x: found.append(unsupported_by_kernels()) or x)(torch.ones(2))
    grad(lambda x: found.append(unsupported_by_kernels()) or x)(torch.ones(()))
    assert [len(reasons) for reasons in found] == [1, 1]
