"""The laws of the dense family, each for every form: in chunks, under a mask cut to blocks, and
written out, brought to one layout: q [B T H D], k and v [B S K .], positions from 0."""

import math

import pytest
import torch

from native_sparse_attention import (
    block_masked_attention,
    chunked_attention,
    mha_reference,
    mha_reference_no_custom_vjp,
)

CHUNKS = dict(q_chunk_size=4, k_chunk_size=8)
INF = math.inf


def draw(B, T, S, H, K, D, E, dtype=torch.float64):
    shapes = (B, T, H, D), (B, S, K, D), (B, S, K, E)
    made = [torch.randn(shape).to(dtype) for shape in shapes]
    return [t.requires_grad_() for t in made]


def causal_mask(T, S, offset=0, w=None, causal=True):
    behind = torch.arange(T)[:, None] + offset - torch.arange(S)
    mask = behind >= 0 if causal else torch.ones_like(behind, dtype=torch.bool)
    if w is not None:
        mask = mask & (behind <= w) & (behind >= -w)
    return mask[None, None]


def dense(q, k, v, mask, scale=1.0, soft_cap=None, mask_value=-INF):
    """Output [B T H E] and log-sum-exp [B T H] by a dense softmax; mask [B|1 H|1 T S]. Rows that
    see nothing give 0 and -inf."""
    groups = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(groups, dim=2) for t in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k)
    s = s.to(torch.promote_types(s.dtype, torch.float32)) * scale
    if soft_cap is not None:
        s = soft_cap * torch.tanh(s / soft_cap)
    mask = mask.to(s.device).expand(s.shape)
    empty = ~mask.any(-1, keepdim=True)
    s = torch.where(mask, s, mask_value).masked_fill(empty, 0.0)
    p = s.softmax(-1).masked_fill(empty, 0.0)
    out = torch.einsum("bhij,bjhe->bihe", p.to(v.dtype), v)
    lse = s.logsumexp(-1).masked_fill(empty[..., 0], -INF)
    return out, lse.transpose(1, 2)


def gradients(values, leaves):
    """Of a weighted sum of outputs and finite log-sum-exps."""
    torch.manual_seed(1)
    loss = sum(
        (t.masked_fill(t.isneginf(), 0.0) * torch.randn(t.shape, dtype=t.dtype)).sum()
        for t in values
    )
    return torch.autograd.grad(loss, leaves, materialize_grads=True)


def assert_same(actual, expected, leaves):
    found = [*actual, *gradients(actual, leaves)]
    right = [*expected, *gradients(expected, leaves)]
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


# the forms: output [B T H E], and where there is one the log-sum-exp [B T H]


def in_chunks(q, k, v, causal=False, ids=None, mask_value=-INF, scale=1.0, **settings):
    return chunked_attention(
        q, k, v, causal=causal, segment_ids=ids, q_offset=0, scale=scale, return_lse=True,
        **CHUNKS | settings,
    )  # fmt: skip


def under_blocks(
    q, k, v, causal=False, ids=None, mask_value=-INF, scale=1.0, mask=None, blocks=(4, 3), cap=None
):
    heads = q.unflatten(2, (k.shape[2], -1)).permute(0, 2, 3, 1, 4) * scale
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if mask is None:
        mask = torch.ones(q.shape[1], k.shape[2])
        mask = mask.tril() if causal else mask
    out, residuals = block_masked_attention(heads, k, v, ids, *blocks, mask, mask_value, cap, True)
    lse = residuals["logsumexp"]
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3), lse.permute(0, 3, 1, 2).flatten(2, 3)


def heads_first(q, k, v):
    groups = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(groups, dim=2) for t in (k, v))
    return [t.transpose(1, 2) for t in (q, k, v)]


def written_out(q, k, v, causal=False, ids=None, mask_value=-INF, scale=1.0):
    settings = dict(causal=causal, mask_value=mask_value, softmax_scale=scale)
    out = mha_reference(*heads_first(q, k, v), None, ids, **settings)
    return (out.transpose(1, 2),)


def by_autograd(q, k, v, causal=False, ids=None, mask_value=-INF, scale=1.0):
    settings = dict(causal=causal, mask_value=mask_value, softmax_scale=scale)
    out, l, m = mha_reference_no_custom_vjp(
        *heads_first(q, k, v), None, ids, save_residuals=True, **settings
    )
    safe = l.masked_fill(l == 0, 1.0).log() + m.detach()  # m has no gradient
    return out.transpose(1, 2), safe.transpose(1, 2)


FORMS = {
    "chunked": in_chunks,
    "block masked": under_blocks,
    "mha": written_out,
    "mha by autograd": by_autograd,
}
pytestmark = pytest.mark.parametrize("form", FORMS)

# B, T, S, H, K, D, E
SHAPES = {
    "one": (1, 1, 1, 1, 1, 4, 4),
    "grouped": (2, 13, 13, 4, 2, 4, 6),
    "fewer queries": (2, 7, 29, 3, 1, 4, 4),
    "more queries": (1, 23, 9, 2, 2, 4, 2),
    "a chunk and one": (2, 9, 17, 2, 1, 4, 4),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("has_segments", [True, False])
@pytest.mark.parametrize("mask_value", [-INF, -0.7 * torch.finfo(torch.float32).max])
def test_against_a_dense_softmax(form, shape, causal, has_segments, mask_value):
    leaves = draw(*SHAPES[shape])
    B, T, S, *_ = SHAPES[shape]
    ids, mask = None, causal_mask(T, S, causal=causal)
    if has_segments:
        ids = (torch.randint(0, 2, (B, T)), torch.randint(0, 2, (B, S)))
        mask = mask & (ids[0][:, :, None] == ids[1][:, None])[:, None]
    actual = FORMS[form](*leaves, causal, ids, mask_value, scale=0.7)
    assert_same(actual, dense(*leaves, mask, 0.7)[: len(actual)], leaves)


def test_by_hand(form):
    """Logits 0 and log 3: weights 1/4 and 3/4; causally the first of two queries sees one key."""
    q, k = torch.ones(1, 2, 1, 1), torch.tensor([0.0, math.log(3)]).view(1, 2, 1, 1)
    v = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
    out, *lse = FORMS[form](q, k, v, causal=True)
    torch.testing.assert_close(out.flatten(), torch.tensor([4.0, 7.0]))
    for found in lse:
        torch.testing.assert_close(found.flatten(), torch.tensor([0.0, math.log(4)]))
    # segments a b: each sees its own
    ids = torch.tensor([[5, -2]])
    torch.testing.assert_close(FORMS[form](q, k, v, ids=ids)[0].flatten(), v.flatten())


@pytest.mark.parametrize("T, S", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("causal", [True, False])
def test_empty(form, T, S, causal):
    leaves = draw(2, T, S, 4, 2, 4, 6)
    out, *lse = FORMS[form](*leaves, causal=causal)
    assert out.shape == (2, T, 4, 6) and (out == 0).all()
    assert all(t.shape == (2, T, 4) and t.isneginf().all() for t in lse)
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), leaves))


def test_queries_that_see_nothing(form):
    """No NaN on the way, and neither output nor gradient."""
    leaves = draw(1, 4, 4, 2, 1, 4, 4)
    ids = (torch.tensor([[0, 0, 9, 0]]), torch.zeros(1, 4).long())
    with torch.autograd.set_detect_anomaly(True):
        out, *lse = FORMS[form](*leaves, ids=ids)
        grads = gradients((out, *lse), leaves)
    assert (out[:, 2] == 0).all() and all(t[:, 2].isneginf().all() for t in lse)
    assert (grads[0][:, 2] == 0).all() and all(g.isfinite().all() for g in grads)
    assert (grads[0][:, 1] != 0).any()


def test_a_mild_mask_value_has_a_share_like_any_logit(form):
    """But in no row that sees nothing, here the third."""
    if form == "chunked":
        pytest.skip("it has no mask value")
    leaves = draw(2, 5, 5, 2, 1, 4, 4)
    ids = (torch.tensor([[0, 0, 9, 0, 0]] * 2), torch.zeros(2, 5).long())
    mask = causal_mask(5, 5) & (ids[0][:, :, None] == 0)[:, None]
    settings = dict(blocks=(9, 9)) if form == "block masked" else {}  # no block is skipped
    actual = FORMS[form](*leaves, True, ids, -0.5, **settings)
    assert_same(actual, dense(*leaves, mask, mask_value=-0.5)[: len(actual)], leaves)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_into_one_graph(form, dynamic):
    if form == "block masked":
        pytest.skip("the host reads which blocks are empty")
    if dynamic and form != "chunked":
        pytest.skip("of fixed sizes")
    leaves, ids = draw(2, 9, 9, 2, 1, 4, 4, torch.float32), torch.arange(9).expand(2, -1) // 5

    def attend(q, k, v):
        return FORMS[form](q, k, v, True, ids)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=dynamic or None)
    actual, expected = compiled(*leaves), attend(*leaves)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(gradients(actual, leaves), gradients(expected, leaves))
