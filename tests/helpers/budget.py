"""What an error may be: a kernel's against that of eager PyTorch in the same dtype."""

from contextlib import contextmanager

import pytest
import torch

from native_sparse_attention.ops import chunked, reference

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"

KEYS, VALUES = ("k", "ck", "mem_k", "window_k"), ("v", "cv", "mem_v", "window_v")


def draw(T, S, H, K, D, E, dtype=torch.float32):
    shapes = (2, T, H, D), (2, S, K, D), (2, S, K, E)
    return [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]


def results(op, tensors, weights, dtype, backend, **kwargs):
    """Output, log-sum-exp where the operation gives one, and every gradient, in `dtype`."""
    leaves = {
        name: t.to(dtype).detach().requires_grad_() for name, t in tensors.items() if t is not None
    }
    given = op(**leaves, backend=backend, **kwargs)
    values = dict(zip(("out", "lse"), given if isinstance(given, tuple) else (given,)))
    loss = (values["out"] * weights[0].to(dtype)).sum()
    if "lse" in values:
        lse = values["lse"]
        loss = loss + torch.where(lse.isneginf(), 0.0, lse * weights[1].to(lse.dtype)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return values | {f"d{n}": g for n, g in zip(leaves, grads)}


@contextmanager
def products_in(dtype):
    """The specification with torch's own products of matrices in `dtype`, forward and backward; the
    library forms those of half precisions in float32."""

    def in_dtype(product):
        return lambda a, x: product(a.to(dtype), x.to(dtype)).to(a.dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "times", in_dtype(reference.times))
        patch.setattr(chunked, "times", in_dtype(chunked.times))
        patch.setattr(chunked, "times_over_rows", in_dtype(chunked.times_over_rows))
        yield


def assert_right(op, tensors, dtype, backend="triton", **kwargs):
    """Within twice the error of eager PyTorch in the same dtype, both against fp64, and one ulp of
    the largest value. What is a difference of larger terms (a gradient, a dot product) may also err
    by one float32 ulp of the terms: a row with one key has a gradient of exactly 0. Those of a
    block's gate are such differences times logits."""
    q = tensors["q"]
    values = [tensors[name] for name in VALUES if tensors.get(name) is not None]
    weights = (
        torch.randn(*q.shape[:3], values[0].shape[-1], device=DEVICE).to(dtype),
        torch.randn(q.shape[:3], device=DEVICE),
    )
    actual = results(op, tensors, weights, dtype, backend, **kwargs)
    exact = results(op, tensors, weights, torch.float64, "eager", **kwargs)
    with products_in(dtype):
        low = results(op, tensors, weights, dtype, "eager", **kwargs)
    sizes = [t.double().norm(dim=-1).max() for t in (weights[0], *values) if t.numel()]
    terms = sizes[0] * max(sizes[1:], default=0.0)
    keys = [tensors[name] for name in KEYS if tensors.get(name) is not None]
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
        rounding = {"out": 0.0, "lse": logits, "dgates": terms * logits}.get(name, terms)
        rounding = rounding * torch.finfo(torch.float32).eps
        precision = torch.float32 if name == "lse" else dtype
        ulp = torch.finfo(precision).eps * right.abs().max() + rounding
        error = (value - right).abs().max()
        assert error <= 2 * lowp + ulp, f"{name}: {error:.2e} > 2 x {lowp:.2e} + {ulp:.2e}"
