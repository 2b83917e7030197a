"""torch.func, forward-mode AD and second derivatives. Small eager operations are plain PyTorch and
have them; linear memory has second derivatives; all else refuses and says what to use."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

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
from native_sparse_attention.masks.tanh import tanh_approx
from native_sparse_attention.ops import chunked
from native_sparse_attention.ops.triton.rotary import rotate
from tests.helpers.budget import DEVICE

# torch's own, as it loads forward-mode AD
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64)


torch.manual_seed(0)
Q, KEYS, V = normal(1, 12, 2, 4), normal(1, 12, 1, 4), normal(1, 12, 1, 4)
CK, CV = normal(1, 3, 1, 4), normal(1, 3, 1, 4)
INDICES = torch.tensor([-1, 0, 1]).repeat_interleave(4).view(1, 12, 1, 1)
PLACE = dict(selection_block_size=4, backend="eager")
SEGMENTS = torch.arange(12)[None] // 5


def gates(q):
    return select_blocks(
        q, CK, seq_len=12, compress_block_size=4, compress_block_sliding_stride=4,
        num_selected_blocks=1, return_gates=True, importance="probs", **PLACE,
    )[1]  # fmt: skip


EAGER = {
    "compressed": (
        lambda q: compressed_attention(q, CK, CV, compress_block_sliding_stride=4, backend="eager"),
        Q,
    ),
    "selected": (lambda k: selected_attention(Q, k, V, INDICES, **PLACE), KEYS),
    "window": (lambda q: sliding_window_attention(q, KEYS, V, sliding_window_size=3), Q),
    "gates": (gates, Q),
}
DENSE = {
    "chunked": (
        lambda q: chunked_attention(q, KEYS, V, q_chunk_size=5, k_chunk_size=7, causal=True), Q
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
}  # fmt: skip


@pytest.mark.parametrize("name", EAGER)
def test_eager_operations(name, monkeypatch):
    """At any length: the specification runs, which forms all scores."""
    f, x = EAGER[name]
    monkeypatch.setattr(chunked, "MAX_SCORES", 0)
    close = dict(atol=1e-9, rtol=1e-7)
    expected = torch.autograd.functional.jacobian(f, x)
    torch.testing.assert_close(jacrev(f)(x), expected, **close)
    torch.testing.assert_close(jacfwd(f)(x), expected, **close)
    t = torch.randn_like(x)
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(f(forward_ad.make_dual(x, t))).tangent
    torch.testing.assert_close(dual, torch.einsum("abcdijkl,ijkl->abcd", expected, t), **close)
    xs = torch.stack((x, x + t))
    torch.testing.assert_close(vmap(f)(xs), torch.stack([f(x) for x in xs]), **close)


@pytest.mark.parametrize("name", [*EAGER, *DENSE])
def test_linear_memory(name, monkeypatch):
    """Second derivatives are right; torch.func, forward-mode AD and batched gradients refuse."""
    f, x = (EAGER | DENSE)[name]
    w = torch.randn(f(x).shape, dtype=torch.float64)

    def loss(x):
        return (f(x).square() * w).sum()

    monkeypatch.setattr(chunked, "MAX_SCORES", 0)
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    if name in EAGER:
        v = first.detach().flatten()
        expected = 2 * hessian(loss)(x.detach()).reshape(v.numel(), -1) @ v
        torch.testing.assert_close(second.flatten(), expected, atol=1e-8, rtol=1e-6)
    else:
        assert torch.autograd.gradgradcheck(f, x, fast_mode=True)
    out = f(x)
    refused = pytest.raises(NotImplementedError, match="backend='eager'")
    for batched in (
        lambda: torch.autograd.grad(out, x, out[None].detach(), is_grads_batched=True),
        lambda: vmap(lambda d: torch.autograd.grad(out, x, d, retain_graph=True))(out[None]),
    ):
        with refused:
            batched()
    if name in DENSE:
        x = x.detach()
        for transform in (
            lambda: jvp(f, (x,), (x,)),
            lambda: vmap(f)(x[None]),
            lambda: jacrev(f)(x),
        ):
            with refused:
                transform()
        with forward_ad.dual_level(), refused:
            f(forward_ad.make_dual(x, x))


def test_caches_refuse():
    layer = SparseAttention(16, 8, 2, 8, 8, 8, 2, causal=True, compress_block_sliding_stride=4)
    x = torch.randn(2, 1, 8, 16)
    with pytest.raises(NotImplementedError, match="as a batch"):
        vmap(lambda row: layer(row, return_cache=True)[0])(x)
    with pytest.raises(NotImplementedError, match="as a batch"):
        jvp(lambda x: layer(x, KVCache()), (x[0],), (x[1],))


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
