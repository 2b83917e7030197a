"""Rotary embedding by its kernels against eager PyTorch: in the interpreter on a CPU,
on a GPU in every dtype."""

import pytest
import torch
from rotary_embedding_torch import RotaryEmbedding
from torch import nn

from native_sparse_attention.ops.triton import elementwise as operator
from native_sparse_attention.rotary import Rotary, rotate
from tests.helpers.budget import CUDA, DEVICE

pytestmark = pytest.mark.kernels

# the interpreter rounds to bf16 towards 0
DTYPES = [torch.bfloat16, torch.float16, torch.float32] if CUDA else [torch.float16, torch.float32]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def draw(dtype=torch.float32, b=2, n=5, heads=(3, 1), d=16):
    """Heads [b h n d] of one projection [b n ..], beside one another."""
    projection = torch.randn(b, n, sum(heads) * d, device=DEVICE).to(dtype)
    parts = projection.split([h * d for h in heads], -1)
    return [t.unflatten(-1, (-1, d)).transpose(1, 2) for t in parts]


def assert_right(run, tensors):
    """Outputs and gradients err at most twice what eager PyTorch errs in the same dtype, both
    against fp64, and one ulp. `run(leaves, backend)` gives the outputs."""
    dtype, d_outs, results = tensors[0].dtype, None, []
    for backend, kind in (("triton", dtype), ("eager", torch.float64), ("eager", dtype)):
        leaves = [t.detach().to(kind).requires_grad_() for t in tensors]
        outs = run(leaves, backend)
        d_outs = d_outs or [torch.randn_like(t) for t in outs]
        grads = torch.autograd.grad(outs, leaves, [t.to(kind) for t in d_outs])
        results.append([*outs, *grads])
    for actual, exact, low in zip(*results, strict=True):
        assert actual.dtype == dtype and actual.shape == exact.shape and actual.isfinite().all()
        error, allowed = ((t.double() - exact).abs().max() for t in (actual, low))
        assert error <= 2 * allowed + torch.finfo(dtype).eps * exact.abs().max(), f"{error:.2e}"


def assert_rotates(rotary, tensors, start, positions=None):
    rotary = rotary.to(DEVICE)
    assert_right(lambda t, backend: rotate(rotary, t, start, positions, backend), tensors)


@dtypes
@pytest.mark.parametrize(
    "n, start", [(70, 0), (5, 1_000_000), (1, torch.int32), (6, torch.int64)], ids=str
)
def test_positions(n, start, dtype):
    """From an int, from where each sequence is, or as the caller says."""
    if isinstance(start, torch.dtype):
        positions = torch.randint(100_000, (n, 2), dtype=start, device=DEVICE).T
        assert_rotates(Rotary(16), draw(dtype, n=n), 0, positions)
        start = torch.tensor([3, 70_001], dtype=start, device=DEVICE)
    assert_rotates(Rotary(16), draw(dtype, n=n), start)


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
    assert_rotates(rotary, tensors, 11)
    out = rotate(rotary.to(DEVICE), tensors, 11, None, "triton")
    unchanged = 2 * len(rotary.freqs)
    pairs = zip(out, tensors, strict=True)
    assert all(torch.equal(a[..., unchanged:], b[..., unchanged:]) for a, b in pairs)


def test_strides_and_few_tokens():
    x, y = torch.randn(2, 3, 4, 16, device=DEVICE), torch.randn(2, 1, 16, 4, device=DEVICE)
    assert_rotates(Rotary(16), [x, y.transpose(2, 3)], 5)
    rotary = Rotary(16).to(DEVICE)
    for b, n in ((0, 3), (2, 0), (1, 1)):
        (x, _) = draw(b=b, n=n)
        (out,) = operator.rotate([x], rotary.freqs, 9, None, 1.0)
        torch.testing.assert_close(out, rotate(rotary, [x], 9)[0])


def test_the_inverse_undoes_it():
    """Gradients of gradients too are rotations."""
    tensors, rotary = draw(), Rotary(16).to(DEVICE)
    there = operator.rotate(tensors, rotary.freqs, 1234, None, 1.0)
    back = operator.rotate(there, rotary.freqs, 1234, None, -1.0)
    torch.testing.assert_close(list(back), tensors)
    x = tensors[0].clone().requires_grad_()
    (out,) = operator.rotate([x], rotary.freqs, 7, None, 1.0)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    torch.testing.assert_close(second, torch.full_like(x, 2.0))


def test_learned_frequencies():
    """They get gradients, so PyTorch rotates."""
    rotary = Rotary(16).to(DEVICE)
    rotary.freqs = nn.Parameter(rotary.freqs)
    out = rotate(rotary, draw(), 5, None, "triton")[0]
    (grad,) = torch.autograd.grad(out.square().sum() + out.sum(), rotary.freqs)
    assert grad.any()


@pytest.mark.gpu
def test_many_tokens():
    """Past 2^31 elements in one tensor: 64-bit offsets."""
    n, rotary = 300_000, Rotary(128).cuda()
    tensors = [torch.randn(1, n, h, 128, device="cuda").bfloat16().transpose(1, 2) for h in (64, 1)]
    outs = operator.rotate(tensors, rotary.freqs, 5, None, 1.0)
    for out, t in zip(outs, tensors):
        last = t[:, -1:, -3:]
        expected = rotate(rotary, [last.float()], n + 2)[0]
        torch.testing.assert_close(out[:, -1:, -3:].float(), expected, atol=0.02, rtol=0.01)


def test_too_wide():
    with pytest.raises(ValueError, match=r"^dim_head must be an integer .* got 2147483648"):
        Rotary(2**31)
