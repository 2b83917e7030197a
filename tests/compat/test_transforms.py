"""torch.func and forward-mode AD are refused, and never silently wrong. Eager PyTorch has second
derivatives; kernels refuse them."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import jacrev, jvp, vmap

import native_sparse_attention as nsa
from native_sparse_attention.masks import tanh_approx
from native_sparse_attention.ops import chunked
from tests.dense.test_dense import FORMS
from tests.helpers.budget import DEVICE
from tests.helpers.layers import normal

# torch's own, as it loads forward-mode AD
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


torch.manual_seed(0)
Q, KEYS, V = normal(1, 12, 2, 4), normal(1, 12, 1, 4), normal(1, 12, 1, 4)
CK, CV = normal(1, 3, 1, 4), normal(1, 3, 1, 4)
INDICES = torch.tensor([-1, 0, 1]).repeat_interleave(4).view(1, 12, 1, 1)
SINKS = normal(2)
PLACE = dict(selection_block_size=4, backend="eager")
SEGMENTS = torch.arange(12)[None] // 5


def gates(q):
    return nsa.select_blocks(
        q, CK, seq_len=12, compress_block_size=4, compress_block_sliding_stride=4,
        num_selected_blocks=1, return_gates=True, importance="probs", **PLACE,
    )[1]  # fmt: skip


EAGER = {
    "compressed": (
        lambda q: nsa.compressed_attention(
            q, CK, CV, compress_block_sliding_stride=4, backend="eager"
        ),
        Q,
    ),
    "selected": (lambda k: nsa.selected_attention(Q, k, V, INDICES, **PLACE), KEYS),
    "window": (lambda q: nsa.sliding_window_attention(q, KEYS, V, sliding_window_size=3), Q),
    "gates": (gates, Q),
}
# of a query that sees no key too
SECOND = {
    "selected, gates": (
        lambda gates: nsa.selected_attention(
            Q, KEYS, V, INDICES, gates=gates, sinks=SINKS, soft_cap=3.0, num_local_blocks=0, **PLACE
        ),
        torch.rand(1, 12, 1, 1, dtype=torch.float64),
    ),
    "selected, sinks": (
        lambda sinks: nsa.selected_attention(Q, KEYS, V, INDICES, sinks=sinks, **PLACE), SINKS
    ),
}  # fmt: skip
DENSE = {
    "chunked": (lambda q: FORMS["chunked"](q, KEYS, V, causal=True)[0], Q),
    "block masked": (
        lambda k: FORMS["block masked"](Q, k, V, True, (SEGMENTS, SEGMENTS), cap=3.0)[0], KEYS
    ),
    "mha": (lambda q: FORMS["mha"](q, KEYS, V, True, SEGMENTS)[0], Q),
}  # fmt: skip


@pytest.mark.parametrize("name", [*EAGER, *DENSE, *SECOND])
def test_linear_memory(name, monkeypatch):
    """Second derivatives are right; batched gradients refuse, but for those of gates."""
    f, x = (EAGER | DENSE | SECOND)[name]
    monkeypatch.setattr(chunked, "MAX_SCORES", 0)
    x = x.clone().requires_grad_()
    out = f(x)
    if name == "gates":  # whose value is constant
        batched = torch.autograd.grad(
            out, x, out[None].detach(), is_grads_batched=True, retain_graph=True
        )
        each = torch.autograd.grad(out, x, out.detach())
        return torch.testing.assert_close(batched[0][0], each[0])
    assert torch.autograd.gradgradcheck(f, x, fast_mode=True)
    if name in SECOND:
        return
    for refused in (
        lambda: torch.autograd.grad(out, x, out[None].detach(), is_grads_batched=True),
        lambda: vmap(lambda d: torch.autograd.grad(out, x, d, retain_graph=True))(out[None]),
    ):
        with pytest.raises(NotImplementedError, match="torch.autograd"):
            refused()


@pytest.mark.parametrize("name", [*EAGER, *DENSE])
def test_transforms_refuse(name):
    f, x = (EAGER | DENSE)[name]
    for transformed in (lambda: jvp(f, (x,), (x,)), lambda: vmap(f)(x[None]), lambda: jacrev(f)(x)):
        with pytest.raises(NotImplementedError, match="use torch.autograd"):
            transformed()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="use torch.autograd"):
        f(forward_ad.make_dual(x, x))


def test_caches_refuse():
    layer = nsa.SparseAttention(16, 8, 2, 8, 8, 8, 2, causal=True, compress_block_sliding_stride=4)
    x = torch.randn(2, 1, 8, 16)
    with pytest.raises(NotImplementedError):
        vmap(lambda row: layer(row, return_cache=True)[0])(x)
    with pytest.raises(NotImplementedError):
        jvp(lambda x: layer(x, nsa.KVCache()), (x[0],), (x[1],))


@pytest.mark.kernels
def test_second_derivatives_of_kernels():
    """The first are right, with their graph too; asked for the second, kernels refuse."""
    x = torch.randn(1, 12, 2, 4, device=DEVICE, requires_grad=True)
    k, v = (t.float().to(DEVICE) for t in (KEYS, V))

    def loss(backend):
        out = nsa.sliding_window_attention(x, k, v, sliding_window_size=3, backend=backend)
        return (out.square() * torch.arange(12, device=DEVICE)[:, None, None]).sum()

    (expected,) = torch.autograd.grad(loss("eager"), x)
    (first,) = torch.autograd.grad(loss("triton"), x)
    torch.testing.assert_close(first, expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(NotImplementedError, match="backend='eager'"):
        torch.autograd.grad(loss("triton"), x, create_graph=True)


def test_the_approximate_tanh():
    x = torch.randn(5)
    with pytest.raises(NotImplementedError, match="approximate=False"):
        jvp(tanh_approx, (x,), (x,))
