"""Attention in chunks against a dense softmax and against SDPA."""

import math

import pytest
import torch

from native_sparse_attention import SegmentIds, chunked_attention
from native_sparse_attention.ops import chunked

# B, T, S, H, K, D, E
SHAPES = {
    "one": (1, 1, 1, 1, 1, 4, 4),
    "grouped": (2, 13, 13, 4, 2, 4, 6),
    "last queries": (2, 7, 29, 3, 1, 4, 4),
    "more queries": (1, 23, 9, 2, 2, 4, 2),
    "a chunk and one": (2, 9, 17, 2, 1, 4, 4),
}
CHUNKS = dict(q_chunk_size=4, k_chunk_size=8)


def draw(B, T, S, H, K, D, E, dtype=torch.float64, device="cpu"):
    shapes = (B, T, H, D), (B, S, K, D), (B, S, K, E)
    made = [torch.randn(shape, dtype=torch.float32, device=device).to(dtype) for shape in shapes]
    return [t.requires_grad_() for t in made]


def dense(q, k, v, mask, scale=None, soft_cap=None):
    """Output [B T H E] and log-sum-exp [B T H] by a dense softmax; mask [B|1 H|1 T S]."""
    groups = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(groups, dim=2) for t in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k)
    s = s.to(torch.promote_types(s.dtype, torch.float32))
    s = s * (q.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        s = soft_cap * torch.tanh(s / soft_cap)
    mask = mask.expand(s.shape)
    empty = ~mask.any(-1, keepdim=True)
    s = s.masked_fill(~mask, float("-inf")).masked_fill(empty, 0.0)
    p = s.softmax(-1).masked_fill(empty, 0.0)
    out = torch.einsum("bhij,bjhe->bihe", p.to(v.dtype), v)
    lse = s.logsumexp(-1).masked_fill(empty[..., 0], float("-inf"))
    return out, lse.transpose(1, 2)


def causal_mask(T, S, offset=None, w=None, causal=True):
    i = torch.arange(T)[:, None] + (S - T if offset is None else offset)
    behind = i - torch.arange(S)
    mask = behind >= 0 if causal else torch.ones_like(behind, dtype=torch.bool)
    if w is not None:
        mask = mask & (behind <= w) & (behind >= -w)
    return mask[None, None]


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


MASKS = {
    "all": {},
    "causal": dict(causal=True),
    "window": dict(sliding_window_size=3),
    "causal window": dict(causal=True, sliding_window_size=3),
    "own key": dict(causal=True, sliding_window_size=0),
    "wide window": dict(sliding_window_size=100),
    "offset": dict(causal=True, sliding_window_size=6, q_offset=2),
    "past the keys": dict(sliding_window_size=6, q_offset=8),
    "before the keys": dict(causal=True, q_offset=-3),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("chunks", [(4, 8), (1, 3), (1024, 4096)])
def test_against_a_dense_softmax(name, shape, chunks):
    leaves = draw(*SHAPES[shape])
    T, S = leaves[0].shape[1], leaves[1].shape[1]
    kw = MASKS[name]
    sizes = dict(q_chunk_size=chunks[0], k_chunk_size=chunks[1])
    actual = chunked_attention(*leaves, **kw, **sizes, return_lse=True)
    mask = causal_mask(
        T, S, kw.get("q_offset"), kw.get("sliding_window_size"), kw.get("causal", False)
    )
    assert_same(actual, dense(*leaves, mask), leaves)


@pytest.mark.parametrize(
    "shape",
    [(2, 2, 13, 13), (2, 1, 13, 13), (1, 2, 1, 13), (2, 1, 13, 1), (13, 13), (13,), (1, 1), ()],
)
def test_masks_broadcast(shape):
    leaves = draw(2, 13, 13, 2, 1, 4, 4)
    mask = torch.rand(shape) < 0.6
    actual = chunked_attention(*leaves, mask=mask, return_lse=True, **CHUNKS)
    assert_same(actual, dense(*leaves, mask.expand(2, 2, 13, 13)), leaves)


def test_mask_mods_and_masks_of_every_kind_together():
    leaves = draw(2, 11, 19, 4, 2, 4, 4)
    ids = SegmentIds(torch.randint(0, 2, (2, 11)), torch.randint(0, 2, (2, 19)))
    mask = torch.rand(4, 11, 19) < 0.9
    asked = []

    def mod(b, h, i, j):
        answer = (i + j + h + b) % 3 != 0
        asked.append(answer.shape)
        return answer

    actual = chunked_attention(
        *leaves,
        causal=True,
        sliding_window_size=9,
        segment_ids=ids,
        soft_cap=2.0,
        scale=1.5,
        mask=mask,
        mask_mod=mod,
        return_lse=True,
        **CHUNKS,
    )
    whole = [
        torch.arange(n).view([-1 if a == x else 1 for a in range(4)])
        for x, n in enumerate((2, 4, 11, 19))
    ]
    seen = causal_mask(11, 19, w=9) & mask & ((whole[2] + whole[3] + whole[1] + whole[0]) % 3 != 0)
    seen = seen & (ids.q[:, :, None] == ids.kv[:, None])[:, None]
    assert not seen.any(-1).all(), "some row must see nothing"
    # i and j index the tensors, and no tile is larger than a chunk
    assert max(s[2] for s in asked) <= 4 and max(s[3] for s in asked) <= 8
    assert_same(actual, dense(*leaves, seen, 1.5, 2.0), leaves)


def test_a_mask_mod_that_broadcasts():
    leaves = draw(2, 9, 9, 4, 2, 4, 4)
    members = torch.rand(2, 9) < 0.5
    by_key = chunked_attention(*leaves, mask_mod=lambda b, h, i, j: members[b, j], **CHUNKS)
    torch.testing.assert_close(by_key, dense(*leaves, members[:, None, None])[0])
    by_head = chunked_attention(*leaves, mask_mod=lambda b, h, i, j: h != 1, **CHUNKS)
    assert (by_head[:, :, 1] == 0).all() and (by_head[:, :, 0] != 0).all()


def test_rows_at_different_places():
    leaves = draw(2, 5, 16, 2, 1, 4, 4)
    offset = torch.tensor([3, 11])
    actual = chunked_attention(
        *leaves, causal=True, sliding_window_size=4, q_offset=offset, return_lse=True, **CHUNKS
    )
    mask = torch.cat([causal_mask(5, 16, int(o), 4) for o in offset])
    assert_same(actual, dense(*leaves, mask), leaves)


def test_by_hand():
    # logits 0 and log 3: weights 1/4 and 3/4
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([0.0, math.log(3)]).view(1, 2, 1, 1)
    v = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
    out, lse = chunked_attention(q, k, v, k_chunk_size=1, return_lse=True)
    torch.testing.assert_close(out.item(), 7.0)
    torch.testing.assert_close(lse.item(), math.log(4))
    # causally the first of two queries sees the first key, the second both
    out = chunked_attention(q.expand(1, 2, 1, 1), k, v, causal=True, q_chunk_size=1)
    torch.testing.assert_close(out.flatten(), torch.tensor([4.0, 7.0]))
    # segments a b: each sees its own
    ids = torch.tensor([[5, -2]])
    out = chunked_attention(q.expand(1, 2, 1, 1), k, v, segment_ids=ids)
    torch.testing.assert_close(out.flatten(), v.flatten())
    # a cap of 1 turns logits (0, 3) into (0, tanh 3)
    _, lse = chunked_attention(q, k * 3 / math.log(3), v, soft_cap=1.0, return_lse=True)
    torch.testing.assert_close(lse.item(), math.log(1 + math.exp(math.tanh(3))))


def test_hidden_tiles_are_not_computed_and_covered_ones_not_masked(monkeypatch):
    tiles, form_tile = [], chunked.form_tile

    def record(q, k, gates, rows, keys, plan):
        tile = form_tile(q, k, gates, rows, keys, plan)
        tiles.append((rows.stop - rows.start, keys.stop - keys.start, tile.mask is not None))
        return tile

    monkeypatch.setattr(chunked, "form_tile", record)
    q = torch.randn(1, 16, 1, 4, requires_grad=True)
    sizes = dict(q_chunk_size=4, k_chunk_size=4)
    out = chunked_attention(q, q, q, causal=True, **sizes)
    assert tiles == [(4, 4, on_diagonal) for i in range(4) for on_diagonal in [False] * i + [True]]
    tiles.clear()
    out.sum().backward()
    assert len(tiles) == 1 + 2 + 3 + 4
    tiles.clear()
    chunked_attention(q, q, q, causal=True, sliding_window_size=2, **sizes)
    # keys 0..3, 2..7, 6..11, 10..15
    assert tiles == [(4, 4, True)] + [(4, 4, True), (4, 2, True)] * 3


@pytest.mark.parametrize("T, S", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("causal", [True, False])
def test_empty(T, S, causal):
    leaves = draw(2, T, S, 4, 2, 4, 6)
    out, lse = chunked_attention(*leaves, causal=causal, return_lse=True)
    assert out.shape == (2, T, 4, 6) and (out == 0).all()
    assert lse.shape == (2, T, 4) and lse.isneginf().all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), leaves))


def test_a_query_that_sees_nothing():
    leaves = draw(1, 4, 4, 2, 1, 4, 4)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    with torch.autograd.set_detect_anomaly(True):
        out, lse = chunked_attention(*leaves, mask=mask, return_lse=True, k_chunk_size=2)
        grads = gradients((out, lse), leaves)
    assert (out[:, 2] == 0).all() and lse[:, 2].isneginf().all()
    assert (grads[0][:, 2] == 0).all() and all(g.isfinite().all() for g in grads)
    assert (grads[0][:, 1] != 0).any()


@pytest.mark.parametrize("order", [1, 2])
def test_gradcheck(order):
    leaves = draw(1, 5, 6, 2, 1, 2, 2)
    # the fourth query sees nothing
    mask = torch.tensor([[1], [1], [1], [0], [1]], dtype=torch.bool)

    def attend(q, k, v):
        out, lse = chunked_attention(
            q,
            k,
            v,
            causal=True,
            mask=mask,
            soft_cap=3.0,
            return_lse=True,
            q_chunk_size=2,
            k_chunk_size=4,
        )
        return out, lse.masked_fill(lse.isneginf(), 0.0)

    check = torch.autograd.gradcheck if order == 1 else torch.autograd.gradgradcheck
    assert check(attend, leaves, fast_mode=order == 2)


# laws


def test_the_future_cannot_move_the_past():
    q, k, v = draw(2, 21, 21, 4, 2, 4, 4)
    kwargs = dict(causal=True, return_lse=True, **CHUNKS)
    out, lse = chunked_attention(q, k, v, **kwargs)
    with torch.no_grad():
        k[:, 13:], v[:, 13:] = 1e4, 1e4
    changed, changed_lse = chunked_attention(q, k, v, **kwargs)
    assert torch.equal(out[:, :13], changed[:, :13])
    assert torch.equal(lse[:, :13], changed_lse[:, :13])
    assert (out[:, 13:] != changed[:, 13:]).all()


def test_segments_are_each_alone():
    q, k, v = draw(1, 23, 23, 2, 1, 4, 4)
    lengths = [1, 9, 4, 9]
    ids = torch.tensor([7, 2, 5, 3]).repeat_interleave(torch.tensor(lengths))[None]
    packed = chunked_attention(q, k, v, causal=True, segment_ids=ids, **CHUNKS)
    parts = zip(*(t.split(lengths, dim=1) for t in (q, k, v)), strict=True)
    alone = [chunked_attention(*part, causal=True, **CHUNKS) for part in parts]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), atol=1e-13, rtol=1e-13)


# dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("soft_cap", [None, 4.0])
def test_within_budget(dtype, soft_cap):
    """At most twice what a dense softmax errs in the same dtype, both against fp64, and one ulp of
    the largest value; a difference of larger terms may err by a float32 ulp of those too."""
    leaves = draw(2, 61, 61, 4, 2, 16, 16, dtype)
    mask = causal_mask(61, 61)
    weight = torch.randn(2, 61, 4, 16).to(dtype)

    def results(fn, dtype):
        own = [t.detach().to(dtype).requires_grad_() for t in leaves]
        out, lse = fn(*own)
        loss = (out * weight.to(dtype)).sum() + lse.sum().to(dtype)
        return out, lse, *torch.autograd.grad(loss, own)

    sizes = dict(q_chunk_size=16, k_chunk_size=16)
    actual = results(
        lambda *t: chunked_attention(*t, causal=True, soft_cap=soft_cap, return_lse=True, **sizes),
        dtype,
    )
    assert actual[0].dtype == dtype and actual[1].dtype == torch.float32
    low = results(lambda *t: dense(*t, mask, soft_cap=soft_cap), dtype)
    exact = results(lambda *t: dense(*t, mask, soft_cap=soft_cap), torch.float64)
    terms = weight.double().norm(dim=-1).max() * leaves[2].double().norm(dim=-1).max()
    for name, a, b, c in zip(("out", "lse", "dq", "dk", "dv"), actual, low, exact, strict=True):
        precision = torch.float32 if name == "lse" else dtype
        slack = torch.finfo(precision).eps * c.abs().max()
        slack += 0.0 if name == "out" else terms * torch.finfo(torch.float32).eps
        error = (a.double() - c).abs().max()
        budget = 2 * (b.double() - c).abs().max() + slack
        assert error <= budget, f"{name}: {error:.2e} > {budget:.2e}"


def test_autocast_casts_as_a_matmul_does():
    q, k, v = draw(1, 9, 9, 2, 1, 8, 8, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = chunked_attention(q, k.bfloat16(), v, causal=True)
        grads = torch.autograd.grad(out.float().sum(), (q, v))
    expected = chunked_attention(*(t.bfloat16() for t in (q, k, v)), causal=True)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    assert all(g.dtype == torch.float32 for g in grads)
    wide = [t.detach().double() for t in (q, k, v)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert chunked_attention(*wide).dtype == torch.float64


@pytest.mark.slow
def test_compiles_into_one_graph():
    leaves = draw(1, 9, 9, 2, 1, 4, 4, torch.float32)
    ids = torch.arange(9)[None] // 5

    def attend(q, k, v):
        return chunked_attention(
            q,
            k,
            v,
            causal=True,
            segment_ids=ids,
            mask_mod=lambda b, h, i, j: (i + j) % 3 != 2,
            q_chunk_size=5,
            k_chunk_size=8,
            return_lse=True,
        )

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    actual, expected = compiled(*leaves), attend(*leaves)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(gradients(actual, leaves), gradients(expected, leaves))


@pytest.mark.slow
def test_compiles_with_dynamic_sizes():
    compiled = torch.compile(chunked_attention, fullgraph=True, backend="aot_eager", dynamic=True)
    leaves = draw(2, 9, 9, 2, 1, 4, 4, torch.float32)
    actual, expected = (attend(*leaves, causal=True) for attend in (compiled, chunked_attention))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(gradients(actual, leaves), gradients(expected, leaves))


def test_is_laid_out_as_its_queries_are():
    q = torch.randn(2, 5, 4, 8)
    assert chunked_attention(q, q, q).is_contiguous()
    heads_first = torch.randn(2, 4, 5, 8).transpose(1, 2)
    assert chunked_attention(heads_first, q, q).transpose(1, 2).is_contiguous()
