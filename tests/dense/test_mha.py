"""The written-out attention and its written-out backward, against SDPA, autograd and numbers."""

import math

import pytest
import torch
import torch.nn.functional as F

from native_sparse_attention import (
    SegmentIds,
    chunked_attention,
    mha_reference,
    mha_reference_bwd,
    mha_reference_no_custom_vjp,
)

SHAPES = [(1, 1, 1, 1, 4, 4), (2, 3, 7, 7, 4, 6), (2, 1, 5, 9, 4, 4), (1, 2, 9, 4, 4, 2)]
MASK_VALUES = [-math.inf, -1e30, -0.7 * torch.finfo(torch.float32).max]


def draw(B, H, T, S, D, E, dtype=torch.float64):
    shapes = (B, H, T, D), (B, H, S, D), (B, H, S, E)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def bias(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mask_value", MASK_VALUES)
def test_against_sdpa(shape, causal, mask_value):
    q, k, v = draw(*shape)
    B, H, T, S, D, _ = shape
    ab = bias(B, H, T, S)
    scale = D**-0.5
    # here the bias is scaled with the dot products; causal is aligned at the top left
    mask = ab * scale
    if causal:
        hidden = torch.ones(T, S, dtype=torch.bool).tril().logical_not()
        mask = mask.masked_fill(hidden, -math.inf)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    leaves = (q, k, v, ab)
    weight = torch.randn_like(expected)
    right = torch.autograd.grad((expected * weight).sum(), leaves)
    kwargs = dict(causal=causal, mask_value=mask_value, softmax_scale=scale)
    for op in (mha_reference, mha_reference_no_custom_vjp):
        o = op(q, k, v, ab, **kwargs)
        close(o, expected)
        close(torch.autograd.grad((o * weight).sum(), leaves), right)


def test_a_mild_mask_value_has_a_share_like_any_logit():
    """But in no row that sees nothing, here the third."""
    q, k, v = draw(2, 1, 5, 5, 4, 4)
    ids = SegmentIds(torch.tensor([[0, 0, 9, 0, 0]] * 2), torch.zeros(2, 5).long())
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    keep = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64)[:, None]
    expected = torch.where(seen, q @ k.mT, -0.5).softmax(-1) @ v * keep
    right = torch.autograd.grad(expected.square().sum(), (q, k, v))
    kwargs = dict(causal=True, mask_value=-0.5)
    for op in (mha_reference, mha_reference_no_custom_vjp):
        o = op(q, k, v, None, ids, **kwargs)
        close(o, expected)
        close(torch.autograd.grad(o.square().sum(), (q, k, v)), right)
    # the backward alone: what is handed in for such a row reaches no key and no value
    o, l, m = mha_reference_no_custom_vjp(q, k, v, None, ids, save_residuals=True, **kwargs)
    do = torch.zeros_like(o)
    do[:, :, 2] = 1.0
    found = mha_reference_bwd(q, k, v, None, ids, o, l, m, do, **kwargs)
    assert all((g == 0).all() for g in found[:3])


@pytest.mark.parametrize("mask_value", MASK_VALUES)
def test_segments_as_a_mask(mask_value):
    q, k, v = draw(2, 3, 6, 8, 4, 4)
    ids = SegmentIds(torch.randint(0, 3, (2, 6)), torch.randint(0, 2, (2, 8)))
    same = ids.q[:, None, :, None] == ids.kv[:, None, None, :]
    assert not same.any(-1).all(), "some query must see nothing"
    seen = same.any(-1, keepdim=True)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=same | ~seen, scale=1.0) * seen
    weight = torch.randn_like(expected)
    right = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    for op in (mha_reference, mha_reference_no_custom_vjp):
        o = op(q, k, v, None, ids, mask_value=mask_value)
        close(o, expected)
        found = torch.autograd.grad((o * weight).sum(), (q, k, v))
        close(found, right)
        assert (found[0][:, 0][~seen[:, 0, :, 0]] == 0).all()
    o, l, m = mha_reference_no_custom_vjp(
        q, k, v, segment_ids=ids, mask_value=mask_value, save_residuals=True
    )
    empty = ~seen[..., 0].expand(l.shape)
    assert (l[empty] == 0).all() and m[empty].isneginf().all() and (o[empty] == 0).all()


def test_residuals():
    q, k, v = draw(2, 2, 5, 5, 4, 4)
    ids = torch.tensor([[0, 0, 1, 1, 1]] * 2)
    o, l, m = mha_reference_no_custom_vjp(
        q, k, v, segment_ids=ids, causal=True, softmax_scale=0.5, save_residuals=True
    )
    logits = torch.einsum("bhid,bhjd->bhij", q, k) * 0.5
    seen = (ids[:, None, :, None] == ids[:, None, None]) & torch.ones(5, 5).tril().bool()
    logits = logits.masked_fill(~seen, -math.inf)
    close(m, logits.amax(-1))
    close(m + l.log(), logits.logsumexp(-1))
    chunked, lse = chunked_attention(
        *(t.transpose(1, 2) for t in (q, k, v)),
        causal=True,
        segment_ids=ids,
        scale=0.5,
        return_lse=True,
    )
    close(o, chunked.transpose(1, 2))
    close(m + l.log(), lse.transpose(1, 2))


@pytest.mark.parametrize("ab_shape", [None, (2, 2, 4, 5), (1, 2, 1, 5), (4, 5), (4, 1)])
def test_backward_written_out_is_what_autograd_finds(ab_shape):
    q, k, v = draw(2, 2, 4, 5, 3, 2)
    ab = None if ab_shape is None else bias(*ab_shape)
    ids = SegmentIds(torch.randint(0, 2, (2, 4)), torch.randint(0, 2, (2, 5)))
    kwargs = dict(causal=True, softmax_scale=0.7)
    o, l, m = mha_reference_no_custom_vjp(q, k, v, ab, ids, save_residuals=True, **kwargs)
    do = torch.randn_like(o)
    found = mha_reference_bwd(q, k, v, ab, ids, o, l, m, do, **kwargs)
    leaves = [t for t in (q, k, v, ab) if t is not None]
    expected = torch.autograd.grad((o * do).sum(), leaves)
    assert (found[3] is None) == (ab is None)
    for a, b in zip(found[: len(leaves)], expected, strict=True):
        assert a.shape == b.shape
        close(a, b)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("op", [mha_reference, mha_reference_no_custom_vjp])
def test_gradcheck(op, causal):
    q, k, v = draw(1, 2, 4, 3, 2, 2)
    ids = SegmentIds(torch.tensor([[0, 1, 1, 9]]), torch.tensor([[0, 1, 1]]))

    def attend(q, k, v, ab):
        return op(q, k, v, ab, ids, causal=causal, softmax_scale=0.6)

    leaves = (q, k, v, bias(1, 2, 4, 3))
    assert torch.autograd.gradcheck(attend, leaves)
    assert torch.autograd.gradgradcheck(attend, leaves)


def test_by_hand():
    # two keys of logits 0 and log 3: weights 1/4 and 3/4, o = 7
    q = torch.ones(1, 1, 1, 1).double().requires_grad_()
    k = torch.tensor([0.0, math.log(3)], dtype=torch.float64).view(1, 1, 2, 1).requires_grad_()
    v = torch.tensor([4.0, 8.0], dtype=torch.float64).view(1, 1, 2, 1).requires_grad_()
    ab = torch.zeros(1, 1, 1, 2).double().requires_grad_()
    o = mha_reference(q, k, v, ab)
    o.sum().backward()
    torch.testing.assert_close(o.item(), 7.0)
    # ds = p (v - o) = (1/4)(-3), (3/4)(1)
    assert ab.grad.flatten().tolist() == pytest.approx([-0.75, 0.75])
    assert k.grad.flatten().tolist() == pytest.approx([-0.75, 0.75])
    assert v.grad.flatten().tolist() == pytest.approx([0.25, 0.75])
    torch.testing.assert_close(q.grad.item(), 0.75 * math.log(3))
    # a scale of 2 squares the ratio, of the bias as of the dot products: weights 1/10, 9/10
    for x, y in ((k, None), (k * 0, k.detach().view(1, 1, 1, 2))):
        o = mha_reference(q, x, v, y, softmax_scale=2.0)
        torch.testing.assert_close(o.item(), 7.6)
    # causally and aligned at the top left, the first query sees the first key only
    o = mha_reference(q, k, v, causal=True)
    torch.testing.assert_close(o.item(), 4.0)


def test_the_future_cannot_move_the_past():
    q, k, v = draw(2, 2, 9, 9, 4, 4)
    before = mha_reference(q, k, v, causal=True)
    with torch.no_grad():
        k[:, :, 5:], v[:, :, 5:] = 1e4, 1e4
    after = mha_reference(q, k, v, causal=True)
    assert torch.equal(before[:, :, :5], after[:, :, :5])
    assert (before[:, :, 5:] != after[:, :, 5:]).all()


@pytest.mark.parametrize("T, S", [(0, 3), (3, 0)])
def test_empty(T, S):
    leaves = draw(2, 1, T, S, 4, 6)
    o = mha_reference(*leaves)
    assert o.shape == (2, 1, T, 6) and (o == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(o.sum(), leaves))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_within_budget(dtype):
    """The written-out backward errs at most twice what autograd's does, and one ulp."""
    leaves = draw(2, 2, 33, 33, 16, 16, dtype)
    weight = torch.randn(2, 2, 33, 16).to(dtype)

    def results(op, dtype):
        own = [t.detach().to(dtype).requires_grad_() for t in leaves]
        o = op(*own, causal=True, softmax_scale=0.25)
        return o, *torch.autograd.grad((o * weight.to(dtype)).sum(), own)

    exact = results(mha_reference_no_custom_vjp, torch.float64)
    low = results(mha_reference_no_custom_vjp, dtype)
    for name, a, b, c in zip(
        ("o", "dq", "dk", "dv"), results(mha_reference, dtype), low, exact, strict=True
    ):
        assert a.dtype == dtype
        budget = 2 * (b.double() - c).abs().max() + torch.finfo(dtype).eps * c.abs().max()
        error = (a.double() - c).abs().max()
        assert error <= budget, f"{name}: {error:.2e} > {budget:.2e}"


def test_autocast_does_not_reach_into_it():
    q, k, v = draw(1, 2, 5, 5, 4, 4, torch.float32)
    expected = mha_reference(q, k, v, causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = mha_reference(q, k, v, causal=True)
        grads = torch.autograd.grad(found.sum(), (q, k, v))
    assert torch.equal(found, expected)
    torch.testing.assert_close(grads, torch.autograd.grad(expected.sum(), (q, k, v)))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(ab=torch.zeros(2, 3, 4)), r"ab must broadcast to \[B H T S\] = \[2, 1, 4, 5\]"),
        (dict(ab=torch.zeros(4, 5).long()), "ab must be float16, bfloat16, float32 or float64"),
        (dict(ab=3.0), "ab must be a tensor, got float"),
        (dict(mask_value=math.inf), "mask_value must be a number below inf, got inf"),
        (dict(k=torch.zeros(2, 2, 5, 4)), "k has H=2 but q has H=1"),
        (dict(v=None), "v must be a tensor, got None"),
        (dict(segment_ids=torch.zeros(2, 4).long()), "one tensor for T=4 and S=5"),
    ],
)
@pytest.mark.parametrize("op", [mha_reference, mha_reference_no_custom_vjp])
def test_refusals(op, change, message):
    call = dict(zip("qkv", draw(2, 1, 4, 5, 4, 4, torch.float32), strict=True))
    with pytest.raises(ValueError, match=message):
        op(**(call | change))


def test_backward_refuses_residuals_that_do_not_fit():
    q, k, v = draw(1, 1, 4, 5, 4, 4)
    o, l, m = mha_reference_no_custom_vjp(q, k, v, save_residuals=True)
    with pytest.raises(ValueError, match="do has E=3 but o has E=4"):
        mha_reference_bwd(q, k, v, None, None, o, l, m, o[..., :3])
    with pytest.raises(ValueError, match="l has T=3 but q has T=4"):
        mha_reference_bwd(q, k, v, None, None, o, l[..., :3], m, o)


@pytest.mark.slow
def test_compiles_into_one_graph():
    leaves = draw(2, 3, 7, 7, 4, 6)
    ids = torch.arange(7).expand(2, -1) // 4

    def run(attend):
        out = attend(*leaves, segment_ids=ids, causal=True)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    compiled = torch.compile(mha_reference, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(compiled), run(mha_reference))
