"""The written-out attention: its bias, its residuals and its written-out backward."""

import math

import pytest
import torch
import torch.nn.functional as F

from native_sparse_attention import (
    SegmentIds,
    mha_reference,
    mha_reference_bwd,
    mha_reference_no_custom_vjp,
)
from tests.helpers.layers import close

# B, H, T, S, D and E, and the shape of the bias
SHAPES = [
    ((1, 1, 1, 1, 4, 4), (1, 1, 1, 1)), ((2, 3, 7, 7, 4, 6), (2, 3, 7, 7)),
    ((2, 1, 5, 9, 4, 4), (5, 9)), ((1, 2, 9, 4, 4, 2), (1, 2, 1, 4)), ((2, 2, 4, 5, 3, 2), (4, 1)),
]  # fmt: skip
OPS = pytest.mark.parametrize("op", [mha_reference, mha_reference_no_custom_vjp])


def draw(B, H, T, S, D, E, dtype=torch.float64):
    shapes = (B, H, T, D), (B, H, S, D), (B, H, S, E)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def bias(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@OPS
@pytest.mark.parametrize("shape, ab_shape", SHAPES)
@pytest.mark.parametrize("causal", [True, False])
def test_bias_is_scaled_too(op, shape, ab_shape, causal):
    """As in SDPA under a scaled bias; causal is aligned at the top left."""
    q, k, v = draw(*shape)
    B, H, T, S, D, _ = shape
    ab, scale = bias(*ab_shape), D**-0.5
    mask = (ab * scale).expand(B, H, T, S)
    if causal:
        mask = mask.masked_fill(~torch.ones(T, S, dtype=torch.bool).tril(), -math.inf)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    leaves, weight = (q, k, v, ab), torch.randn_like(expected)
    o = op(q, k, v, ab, causal=causal, softmax_scale=scale)
    close(o, expected)
    right = torch.autograd.grad((expected * weight).sum(), leaves)
    close(torch.autograd.grad((o * weight).sum(), leaves), right)


@OPS
def test_a_bias_that_hides_all_keys(op):
    """A query whose bias is -inf everywhere sees no key; another one sees some."""
    q, k, v = draw(1, 2, 3, 4, 4, 2)
    ab = torch.zeros(3, 4, dtype=torch.float64)
    ab[1], ab[2, :3] = -math.inf, -math.inf
    o = op(q, k, v, ab.requires_grad_())
    assert not o[:, :, 1].any()
    close(o[:, :, 2], v[:, :, 3])
    grads = torch.autograd.grad(o.sum(), (q, k, v, ab))
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("mask_value", [-math.inf, -1e30, -0.5])
def test_residuals(mask_value):
    q, k, v = draw(2, 2, 5, 5, 4, 4)
    ids = SegmentIds(torch.tensor([[0, 0, 9, 1, 1]] * 2), torch.tensor([[0, 0, 1, 1, 1]] * 2))
    kwargs = dict(causal=True, softmax_scale=0.5, mask_value=mask_value)
    o, l, m = mha_reference_no_custom_vjp(q, k, v, None, ids, save_residuals=True, **kwargs)
    logits = torch.einsum("bhid,bhjd->bhij", q, k) * 0.5
    seen = (ids.q[:, None, :, None] == ids.kv[:, None, None]) & torch.ones(5, 5).tril().bool()
    logits = logits.masked_fill(~seen, mask_value)
    rows = torch.tensor([0, 1, 3, 4])  # the third sees nothing
    close(m[..., rows], logits.amax(-1)[..., rows])
    # the backward alone: what is handed in for such a row reaches no key and no value
    do = torch.zeros_like(o)
    do[:, :, 2] = 1.0
    found = mha_reference_bwd(q, k, v, None, ids, o, l, m, do, **kwargs)
    assert all((g == 0).all() for g in found[:3]) and found[3] is None


@OPS
def test_second_derivatives_of_the_bias(op):
    q, k, v = draw(1, 2, 4, 3, 2, 2)
    ids = SegmentIds(torch.tensor([[0, 1, 1, 9]]), torch.tensor([[0, 1, 1]]))

    def attend(q, k, v, ab):
        return op(q, k, v, ab, ids, causal=True, softmax_scale=0.6)

    assert torch.autograd.gradgradcheck(attend, (q, k, v, bias(1, 2, 4, 3)))
