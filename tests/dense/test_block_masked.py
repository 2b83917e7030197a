"""Attention under a mask cut to blocks, against a dense softmax; and the counting of blocks."""

import math

import pytest
import torch

from native_sparse_attention import (
    SegmentIds,
    below_or_on_diag,
    block_masked_attention,
    chunked_attention,
    mask_blocker,
)
from native_sparse_attention.ops import chunked
from tests.helpers import memory

# batch, kv heads, query heads a kv head, queries, keys, widths of keys and values
SHAPES = [(1, 1, 1, 1, 1, 4, 4), (2, 2, 3, 13, 13, 4, 6), (2, 1, 2, 8, 16, 4, 4)]
SHAPES += [(1, 2, 1, 9, 5, 4, 2), (2, 2, 1, 5, 23, 4, 4)]


def draw(B, K, G, T, S, D, E, dtype=torch.float64):
    shapes = (B, K, G, T, D), (B, K, S, D), (B, K, S, E)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def dense(q, k, v, seen, cap=None, mask_value=-math.inf):
    """Softmax over `mask_value` where not seen; rows that see nothing give 0 and -inf."""
    s = torch.einsum("bkgid,bkjd->bkgij", q, k)
    if cap is not None:
        s = cap * torch.tanh(s / cap)
    seen = seen[:, None, None].expand(s.shape)
    empty = ~seen.any(-1)
    s = torch.where(seen, s, mask_value).masked_fill(empty[..., None], 0.0)
    out = torch.einsum("bkgij,bkje->bkgie", s.softmax(-1), v).masked_fill(empty[..., None], 0.0)
    lse, top = s.logsumexp(-1), s.amax(-1)
    return (out, *(t.masked_fill(empty, -math.inf) for t in (lse, top)))


def gradients(out, lse, leaves):
    torch.manual_seed(1)
    loss = (out * torch.randn(out.shape, dtype=out.dtype)).sum()
    loss = loss + lse.masked_fill(lse.isneginf(), 0.0).square().sum()
    return torch.autograd.grad(loss, leaves)


def assert_right(leaves, ids, mask, bkv, bq, mask_value, cap=None, share=-math.inf):
    out, residuals = block_masked_attention(*leaves, ids, bkv, bq, mask, mask_value, cap, True)
    assert set(residuals) == {"logsumexp", "max_logits"}
    seen = mask != 0
    seen = seen if seen.ndim == 3 else seen[None]
    if ids is not None:
        seen = seen & (ids.q[:, :, None] == ids.kv[:, None])
    expected = dense(*leaves, seen, cap, share)
    actual = (out, residuals["logsumexp"], residuals["max_logits"])
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
    found = gradients(*actual[:2], leaves)
    for a, b in zip(found, gradients(*expected[:2], leaves), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
    assert actual[1].requires_grad and not actual[2].requires_grad
    plain = block_masked_attention(*leaves, ids, bkv, bq, mask, mask_value, cap)
    assert torch.equal(plain, out)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("density", [0.1, 0.6])
@pytest.mark.parametrize("bkv, bq", [(4, 4), (3, 5), (1, 1), (64, 64)])
def test_against_a_dense_softmax(shape, density, bkv, bq):
    leaves = draw(*shape)
    mask = torch.rand(shape[3], shape[4]) < density
    assert_right(leaves, None, mask, bkv, bq, -math.inf)


@pytest.mark.parametrize("mask_value", [-math.inf, -1e30, -0.7 * torch.finfo(torch.float32).max])
def test_masks_of_each_row_segments_and_cap(mask_value):
    leaves = draw(2, 2, 2, 11, 17, 4, 4)
    mask = torch.randint(0, 3, (2, 11, 17))  # nonzero is visible
    mask[0, 4] = 0
    ids = SegmentIds(torch.randint(0, 2, (2, 11)), torch.randint(0, 2, (2, 17)))
    assert_right(leaves, ids, mask, 4, 3, mask_value, cap=2.0)


def test_a_mild_mask_value_has_a_share_like_any_logit():
    leaves = draw(2, 1, 2, 9, 9, 4, 4)
    mask = torch.rand(9, 9) < 0.5
    mask[3] = False
    assert (mask_blocker(mask, 9, 9) > 0).all()  # no block is skipped
    assert_right(leaves, None, mask, 9, 9, -0.5, share=-0.5)


def test_low_precision_logits_know_no_lower_mask_value():
    q, k, v = draw(1, 1, 1, 4, 4, 4, 4, torch.bfloat16)
    mask = torch.ones(4, 4).tril()
    out = block_masked_attention(q, k, v, None, 2, 2, mask, -1e300)
    assert torch.equal(out, block_masked_attention(q, k, v, None, 2, 2, mask, -math.inf))


def test_nothing_scales_the_dot_products_and_chunks_agree():
    q, k, v = draw(2, 2, 2, 10, 10, 4, 4)
    mask = torch.ones(10, 10, dtype=torch.bool).tril()
    out = block_masked_attention(q * 4**-0.5, k, v, None, 4, 4, mask, -1e30)
    chunked = chunked_attention(
        q.permute(0, 3, 1, 2, 4).flatten(2, 3), k.transpose(1, 2), v.transpose(1, 2), causal=True
    )
    torch.testing.assert_close(out.permute(0, 3, 1, 2, 4).flatten(2, 3), chunked)


def test_empty_blocks_are_not_computed_and_full_ones_not_masked(monkeypatch):
    visits, form_tile = [], chunked.form_tile

    def record(q, k, gates, rows, keys, plan):
        tile = form_tile(q, k, gates, rows, keys, plan)
        visits.append((rows.stop - rows.start, keys.stop - keys.start, tile.mask is not None))
        return tile

    monkeypatch.setattr(chunked, "form_tile", record)
    leaves = draw(1, 1, 1, 10, 10, 4, 4)
    mask = torch.zeros(10, 10)
    mask[:4, 4:8] = 1  # full
    mask[4, 0] = 1  # partial
    mask[8:, 8:] = 2  # full, the last and smaller one
    out = block_masked_attention(*leaves, None, 4, 4, mask, -1e30)
    assert visits == [(4, 4, False), (4, 4, True), (2, 2, False)]
    visits.clear()
    out.sum().backward()
    assert len(visits) == 3
    # what is skipped is not read either
    with torch.no_grad():
        leaves[2][:, :, 4:8] = math.nan
        leaves[1][:, :, 4:8] = math.nan
    spoilt = block_masked_attention(*leaves, None, 4, 4, mask, -1e30)
    assert torch.equal(spoilt[..., 4:, :], out[..., 4:, :])


@pytest.mark.parametrize("T, S", [(0, 3), (3, 0), (0, 0)])
def test_empty(T, S):
    leaves = draw(2, 1, 2, T, S, 4, 6)
    out, residuals = block_masked_attention(
        *leaves, None, 4, 4, torch.ones(T, S), -1e30, save_residuals=True
    )
    assert out.shape == (2, 1, 2, T, 6) and (out == 0).all()
    assert all(t.shape == (2, 1, 2, T) and t.isneginf().all() for t in residuals.values())
    torch.autograd.grad(out.sum(), leaves)


def test_by_hand():
    # logits 0, log 3 and one that is hidden: weights 1/4 and 3/4
    q = torch.ones(1, 1, 1, 2, 1)
    k = torch.tensor([0.0, math.log(3), 9.0]).view(1, 1, 3, 1)
    v = torch.tensor([4.0, 8.0, 100.0]).view(1, 1, 3, 1)
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    out, residuals = block_masked_attention(q, k, v, None, 2, 1, mask, -1e30, save_residuals=True)
    torch.testing.assert_close(out.flatten(), torch.tensor([7.0, 0.0]))
    expected = torch.tensor([math.log(4), -math.inf])
    torch.testing.assert_close(residuals["logsumexp"].flatten(), expected)
    expected = torch.tensor([math.log(3), -math.inf])
    torch.testing.assert_close(residuals["max_logits"].flatten(), expected)


def test_segments_are_each_alone():
    q, k, v = draw(1, 2, 1, 12, 12, 4, 4)
    mask = torch.ones(12, 12).tril()
    ids = torch.tensor([[4] * 5 + [1] * 7])
    packed = block_masked_attention(q, k, v, ids, 4, 4, mask, -1e30)
    alone = [
        block_masked_attention(*part, None, 4, 4, torch.ones(n, n).tril(), -1e30)
        for *part, n in (
            (q[..., :5, :], k[:, :, :5], v[:, :, :5], 5),
            (q[..., 5:, :], k[:, :, 5:], v[:, :, 5:], 7),
        )
    ]
    torch.testing.assert_close(packed, torch.cat(alone, dim=3), atol=1e-13, rtol=1e-13)


def test_gradcheck():
    leaves = draw(1, 1, 2, 5, 4, 2, 2)
    mask = torch.rand(5, 4) < 0.7
    mask[1] = False

    def attend(q, k, v):
        return block_masked_attention(q, k, v, None, 3, 2, mask, -1e30, cap=2.0)

    assert torch.autograd.gradcheck(attend, leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_within_budget(dtype):
    """At most twice what a dense softmax errs in the same dtype, and one ulp of the largest."""
    leaves = draw(2, 2, 2, 33, 33, 16, 16, dtype)
    with torch.no_grad():
        leaves[0] *= 0.25
    mask = torch.rand(33, 33) < 0.5
    mask |= torch.eye(33, dtype=torch.bool)
    weight = torch.randn(2, 2, 2, 33, 16).to(dtype)

    def results(fn, dtype):
        own = [t.detach().to(dtype).requires_grad_() for t in leaves]
        out = fn(*own)
        return out, *torch.autograd.grad((out * weight.to(dtype)).sum(), own)

    def eager(q, k, v):
        s = torch.einsum("bkgid,bkjd->bkgij", q, k)
        p = s.to(torch.promote_types(s.dtype, torch.float32)).masked_fill(~mask, -math.inf)
        return torch.einsum("bkgij,bkje->bkgie", p.softmax(-1).to(v.dtype), v)

    exact = results(eager, torch.float64)
    low = results(eager, dtype)
    actual = results(lambda *t: block_masked_attention(*t, None, 8, 8, mask, -1e30), dtype)
    for name, a, b, c in zip(("out", "dq", "dk", "dv"), actual, low, exact, strict=True):
        assert a.dtype == dtype
        budget = 2 * (b.double() - c).abs().max() + torch.finfo(dtype).eps * c.abs().max()
        error = (a.double() - c).abs().max()
        assert error <= budget, f"{name}: {error:.2e} > {budget:.2e}"


def test_memory_is_linear_beside_the_mask():
    """At four times the length; counting the mask's blocks included."""

    def step(T):
        leaves = draw(1, 1, 2, T, T, 8, 8, torch.float32)
        mask = (torch.rand(T, T) < 0.5).tril()
        return lambda: block_masked_attention(*leaves, None, 64, 64, mask, -1e30).sum().backward()

    peaks = [memory.peak(step(T)) for T in (256, 1024)]
    assert peaks[1] < 5 * peaks[0], peaks


# counting blocks


def test_blocks_are_counted():
    mask = torch.tensor(
        [
            [1, 1, 0, 0, 7],
            [1, 1, 0, 0, 0],
            [0, 0, 0, 3, -1],
        ]
    )
    assert mask_blocker(mask, 2, 2).tolist() == [[4, 0, 1], [0, 1, 1]]
    assert mask_blocker(mask.bool(), 3, 5).tolist() == [[7]]
    assert mask_blocker(mask.float(), 100, 1).tolist() == [[2, 2, 0, 1, 2]]
    batch = mask_blocker(torch.stack([mask, mask * 0]), 2, 3)
    assert batch.tolist() == [[[4, 1], [0, 2]], [[0, 0], [0, 0]]]
    assert mask_blocker(torch.ones(0, 5), 2, 2).shape == (0, 3)


@pytest.mark.parametrize("rows, columns", [(1, 1), (2, 3), (4, 2), (3, 1), (1, 4), (128, 128)])
def test_blocks_below_the_diagonal_are_those_a_causal_mask_occupies(rows, columns):
    mask = torch.ones(12, 12).tril()
    counts = mask_blocker(mask, rows, columns)
    r, c = (torch.arange(n) for n in counts.shape)
    found = below_or_on_diag(r[:, None], rows, c, columns)
    # a last block may be cut before it reaches the diagonal, or hang over the mask's end
    whole = ((r + 1) * rows <= 12)[:, None] & (c * columns < 12)
    assert torch.equal(found & whole, (counts > 0) & whole)
    assert below_or_on_diag(0, 1, 0, 1) is True
    assert below_or_on_diag(0, 128, 1, 128) is False


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(block_q=0), "block_q must be an integer of at least 1, got 0"),
        (dict(block_kv=1.0), "block_kv must be an integer of at least 1, got 1.0"),
        (dict(cap=-1.0), "cap must be a number above 0 or None, got -1.0"),
        (dict(mask_value=math.nan), "mask_value must be a number below inf, got nan"),
        (dict(mask_value=None), "mask_value must be a number below inf, got None"),
        (
            dict(mask=torch.ones(3, 4)),
            r"mask must have shape \[4, 6\] or \[2, 4, 6\], got \[3, 4\]",
        ),
        (dict(mask=None), "got NoneType"),
        (dict(k=torch.zeros(2, 2, 6, 3)), "k has D=3 but q has D=4"),
        (dict(segment_ids=torch.zeros(2, 4).long()), "one tensor for T=4 and S=6"),
    ],
)
def test_refusals(change, message):
    q, k, v = draw(2, 2, 1, 4, 6, 4, 4, torch.float32)
    call = dict(q=q, k=k, v=v, segment_ids=None, block_kv=2, block_q=2, mask=torch.ones(4, 6))
    with pytest.raises(ValueError, match=message):
        block_masked_attention(**(call | dict(mask_value=-1e30) | change))


@pytest.mark.parametrize("mask, message", [(torch.ones(3), r"got \[3\]"), ([1], "got list")])
def test_masks_that_cannot_be_blocked(mask, message):
    with pytest.raises(ValueError, match=message):
        mask_blocker(mask, 2, 2)
