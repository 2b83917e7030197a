"""The Triton kernels against the reference: in the interpreter on a CPU (float32, small), on a GPU
in every dtype by the error budget."""

import itertools

import pytest
import torch

from native_sparse_attention import compressed_attention, sliding_window_attention
from native_sparse_attention.ops import library

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"

pytestmark = pytest.mark.kernels


def draw(T, S, H, K, D, E, dtype=torch.float32):
    shapes = (2, T, H, D), (2, S, K, D), (2, S, K, E)
    return [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]


def results(op, tensors, weights, dtype, backend, **kwargs):
    """Output, log-sum-exp and every gradient, computed in `dtype`."""
    leaves = {
        name: t.to(dtype).detach().requires_grad_() for name, t in tensors.items() if t is not None
    }
    out, lse = op(**leaves, return_lse=True, backend=backend, **kwargs)
    loss = (out * weights[0].to(dtype)).sum()
    loss = loss + torch.where(lse.isneginf(), 0.0, lse * weights[1].to(lse.dtype)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return {"out": out, "lse": lse, **{f"d{n}": g for n, g in zip(leaves, grads)}}


def assert_right(op, tensors, dtype, **kwargs):
    """Within twice the error of eager PyTorch in the same dtype, both against fp64, and one ulp of
    the largest value. What is a difference of larger terms (a gradient, a dot product) may also err
    by one float32 ulp of the terms: a row with one key has a gradient of exactly 0."""
    q = tensors["q"]
    values = [tensors[name] for name in ("v", "cv", "mem_v") if tensors.get(name) is not None]
    weights = (
        torch.randn(*q.shape[:3], values[0].shape[-1], device=DEVICE).to(dtype),
        torch.randn(q.shape[:3], device=DEVICE),
    )
    actual = results(op, tensors, weights, dtype, "triton", **kwargs)
    exact = results(op, tensors, weights, torch.float64, "eager", **kwargs)
    low = results(op, tensors, weights, dtype, "eager", **kwargs)
    sizes = [t.double().norm(dim=-1).max() for t in (weights[0], *values) if t.numel()]
    terms = sizes[0] * max(sizes[1:], default=0.0)
    keys = [tensors[name] for name in ("k", "ck", "mem_k") if tensors.get(name) is not None]
    sizes = [t.double().norm(dim=-1).max() for t in (q, *keys) if t.numel()]
    logits = sizes[0] * max(sizes[1:], default=0.0) * q.shape[-1] ** -0.5
    for name, value in actual.items():
        value, right = value.double(), exact[name].double()
        empty = right.isneginf()
        assert torch.equal(value.isneginf(), empty), name
        value, right = value.masked_fill(empty, 0), right.masked_fill(empty, 0)
        assert value.isfinite().all(), name
        if not value.numel():
            continue
        lowp = (low[name].double().masked_fill(empty, 0) - right).abs().max()
        # differences are formed in float32 whatever the dtype, so their rounding is float32's
        rounding = {"out": 0.0, "lse": logits}.get(name, terms) * torch.finfo(torch.float32).eps
        precision = torch.float32 if name == "lse" else dtype
        ulp = torch.finfo(precision).eps * right.abs().max() + rounding
        error = (value - right).abs().max()
        assert error <= 2 * lowp + ulp, f"{name}: {error:.2e} > 2 x {lowp:.2e} + {ulp:.2e}"


if CUDA:
    HEADS = [
        *((torch.bfloat16, heads) for heads in [(4, 4, 64, 64), (6, 2, 128, 128), (16, 1, 80, 96)]),
        *((torch.bfloat16, heads) for heads in [(64, 4, 192, 128), (5, 1, 40, 256)]),
        (torch.float16, (8, 2, 128, 128)),
        (torch.float32, (6, 2, 64, 64)),
        (torch.float32, (4, 1, 128, 80)),
    ]
    PLACES = [(1, 1), (63, 63), (64, 64), (65, 65), (131, 131), (37, 211), (300, 300)]
else:
    HEADS = [(torch.float32, heads) for heads in [(2, 2, 16, 16), (3, 1, 24, 16), (4, 2, 16, 40)]]
    PLACES = [(1, 1), (15, 15), (16, 16), (17, 17), (67, 67), (9, 41)]
both = pytest.mark.parametrize("causal", [True, False])
cases = pytest.mark.parametrize(
    "dtype, heads, place",
    [(*kind, place) for kind, place in itertools.product(HEADS, PLACES)],
    ids=lambda value: str(value).replace("torch.", ""),
)


@both
@cases
def test_window(dtype, heads, place, causal):
    q, k, v = draw(*place, *heads, dtype)
    tensors = {"q": q, "k": k, "v": v}
    assert_right(sliding_window_attention, tensors, dtype, sliding_window_size=21, causal=causal)


@both
@cases
def test_compressed(dtype, heads, place, causal):
    (T, S), (H, K, D, E), d = place, heads, 4
    q, ck, cv = draw(T, S // d if causal else -(-S // d), H, K, D, E, dtype)
    for m in (0, 2):
        mem = [torch.randn(K, m, w, device=DEVICE).to(dtype) if m else None for w in (D, E)]
        tensors = {"q": q, "ck": ck, "cv": cv, "mem_k": mem[0], "mem_v": mem[1]}
        assert_right(
            compressed_attention,
            tensors,
            dtype,
            compress_block_sliding_stride=d,
            causal=causal,
            seq_len=S,
        )


def test_rows_that_start_at_different_places():
    q, k, v = draw(7, 40, 4, 2, 16, 16)
    tensors = {"q": q, "k": k, "v": v}
    starts = torch.tensor([30, 11], device=DEVICE)
    assert_right(
        sliding_window_attention, tensors, torch.float32, sliding_window_size=9, q_offset=starts
    )
    tensors = {"q": q, "ck": k[:, :10], "cv": v[:, :10]}
    assert_right(
        compressed_attention,
        tensors,
        torch.float32,
        compress_block_sliding_stride=4,
        q_offset=starts,
    )


def test_strided_inputs_and_a_repeat():
    """Heads before tokens, as a layer lays them out; twice the same, bit for bit."""
    q, k, v = (
        t.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        for t in draw(50, 50, 4, 2, 16, 16)
    )
    runs = []
    for inputs in (
        (q, k, v),
        (q, k, v),
        [t.detach().contiguous().requires_grad_() for t in (q, k, v)],
    ):
        out = sliding_window_attention(*inputs, sliding_window_size=7, backend="triton")
        runs.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0]))


def test_operator_is_well_formed():
    """Schema, fake, autograd registration: torch's own checks."""
    q, k, v = (t.requires_grad_() for t in draw(20, 20, 2, 1, 16, 16))
    args = (q, k, v, None, library.CAUSAL_WINDOW, 7, 1, 0, 0.25)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(library.interval_attention, args, test_utils=checks)


def test_numbers_of_the_kinds():
    """`ops.library` writes the kinds out, so as not to import triton."""
    from native_sparse_attention.kernels import device

    names = ("CAUSAL_WINDOW", "TWO_SIDED_WINDOW", "BEHIND", "EVERYTHING")
    assert [getattr(device, n).value for n in names] == [getattr(library, n) for n in names]


@pytest.mark.gpu
def test_many_tokens():
    """Past 2^31 elements in one tensor: 64-bit offsets. The last token sees what it should."""
    T, H, K, D = 300_000, 64, 4, 128
    q = torch.randn(1, T, H, D, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, T, K, D, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    out = sliding_window_attention(q, k, v, sliding_window_size=511, backend="triton")
    last = slice(T - 512, T)
    expected = sliding_window_attention(
        q[:, -1:].float(), k[:, last].float(), v[:, last].float(), sliding_window_size=511,
        backend="eager",
    )  # fmt: skip
    torch.testing.assert_close(out[:, -1:].float(), expected, atol=2e-2, rtol=2e-2)
