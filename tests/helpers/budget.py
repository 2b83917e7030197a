"""The oracle: what a backend's error may be, against that of eager PyTorch in the same dtype."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

from native_sparse_attention.ops import chunked, reference

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"

KEYS, VALUES = ("k", "ck", "mem_k", "window_k"), ("v", "cv", "mem_v", "window_v")
# kernels of a Hopper wherever they can run, and nowhere
SM90 = ("flash_sm90", "key_major_sm90", "union_sm90", "largest_sm90")
FORMS = {"sm90": dict.fromkeys(SM90, True), "portable": dict.fromkeys(SM90, False)}


@contextmanager
def running(backend: str) -> Iterator[str]:
    """The `backend` to ask for: "chunked" is eager PyTorch in small tiles, "sm90" and "portable"
    are forms of Triton's."""
    with ExitStack() as stack:
        if backend == "chunked":
            sizes = dict(MAX_SCORES=0, CHUNK_SCORES=800, LEAST_QUERIES=1, KEYS=16)
            stack.enter_context(patch.multiple(chunked, **sizes))
            yield "eager"
        elif backend in FORMS:
            from native_sparse_attention.kernels.common import launch

            stack.enter_context(launch.using(FORMS[backend]))
            yield "triton"
        else:
            yield backend


@contextmanager
def in_chunks(s, budget, work_tile_rows, **limits):
    """Key-major passes over blocks of s tokens in chunks of this budget, with small work tiles."""
    from native_sparse_attention.kernels.common import launch
    from native_sparse_attention.kernels.selected import key_major

    budgets = {key: {s: key_major.Budget(*budget, math.inf)} for key in key_major.BUDGETS}
    with (
        patch.multiple(key_major, BUDGETS=budgets, MIN_TOKENS=1, MIN_DQ_TILE_ROWS=1),
        patch.multiple(launch, WORK_TILE_ROWS=work_tile_rows, **limits),
    ):
        yield


def results(op, tensors, weights, dtype, backend, gradients=True, **kwargs):
    """Output, log-sum-exp where the operation gives one, and every gradient, in `dtype`."""
    leaves = {
        name: t.to(dtype).detach().requires_grad_(gradients)
        for name, t in tensors.items()
        if t is not None
    }
    outs = op(**leaves, backend=backend, **kwargs)
    values = dict(zip(("out", "lse"), outs if isinstance(outs, tuple) else (outs,)))
    if not gradients:
        return values
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

    with (
        patch.object(reference, "times", in_dtype(reference.times)),
        patch.object(chunked, "times", in_dtype(chunked.times)),
        patch.object(chunked, "times_over_rows", in_dtype(chunked.times_over_rows)),
    ):
        yield


def largest_norm(tensors):
    return max((t.double().norm(dim=-1).max() for t in tensors if t.numel()), default=0.0)


def assert_right(
    op, tensors, dtype, backend="triton", specification=None, gradients=True, reduced=1, **kwargs
):
    """Within twice the error of eager PyTorch in the same dtype, both against fp64 of the
    specification (by default the operation itself in eager PyTorch), and one ulp of the largest
    value. What is a difference of larger terms (a gradient, a dot product) may also err by one
    float32 ulp of the terms: a row with one key has a gradient of exactly 0. Those of queries and
    keys are such differences times keys and queries, those of a block's gate times logits. Those of
    keys and values are running sums of float32 over tiles of 64 rows, whose n roundings add up as
    sqrt(n). A memory key may be all that each of n rows reads: n differences of 0, each of random
    terms that are 1 / sqrt(E) of the largest. Where partial results of so many keys are `reduced`,
    the ulp of their log-sum-exps, of log(keys) at least, is one of their weights."""
    q, specification = tensors["q"], specification or op
    values, keys = (
        [tensors[name] for name in names if tensors.get(name) is not None]
        for names in (VALUES, KEYS)
    )
    weights = (
        torch.randn(*q.shape[:3], values[0].shape[-1], device=DEVICE).to(dtype),
        torch.randn(q.shape[:3], device=DEVICE),
    )
    with running(backend) as name:
        actual = results(op, tensors, weights, dtype, name, gradients, **kwargs)
    call = specification, tensors, weights
    exact = results(*call, torch.float64, "eager", gradients, **kwargs)
    with products_in(dtype):
        low = results(*call, dtype, "eager", gradients, **kwargs)
    terms = largest_norm(weights[:1]) * largest_norm(values)
    q_norm, k_norm, scale = largest_norm([q]), largest_norm(keys), q.shape[-1] ** -0.5
    logits = q_norm * k_norm * scale
    factors = {"dgates": logits} | dict.fromkeys(("dq", "dcq"), k_norm * scale)
    factors |= dict.fromkeys([f"d{n}" for n in KEYS], q_norm * scale)
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
        weighted = math.log(reduced) * right.abs().max()
        rounding = {"out": weighted, "lse": logits}.get(name, terms * factors.get(name, 1.0))
        if name[1:] in KEYS + VALUES:
            tiles = math.prod(q.shape[1:3]) / (64 * values[0].shape[2])
            rounding = rounding + 0.5 * math.sqrt(tiles) * right.abs().max()
        if name == "dmem_k":
            n, E = math.prod(q.shape[:3]) / values[0].shape[2], values[0].shape[3]
            rounding = rounding + math.sqrt(n / E) * terms * factors[name]
        rounding = rounding * torch.finfo(torch.float32).eps
        precision = torch.float32 if name == "lse" else dtype
        ulp = torch.finfo(precision).eps * right.abs().max() + rounding
        error = (value - right).abs().max()
        assert error <= 2 * lowp + ulp, f"{name}: {error:.2e} > 2 x {lowp:.2e} + {ulp:.2e}"
