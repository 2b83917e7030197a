"""NaN and infinities stay where they are seen, in values and in gradients: eager PyTorch on a CPU
in all of its strategies, and flex_attention there."""

from __future__ import annotations

import math

import pytest
import torch

from native_sparse_attention import (
    SparseAttention,
    Transformer,
    chunked_attention,
    compressed_attention,
    mha_reference,
    native_sparse_attention,
    select_blocks,
    selected_attention,
    sliding_window_attention,
)
from native_sparse_attention.checks.tensors import BRANCHES
from native_sparse_attention.compress import (
    AttentionPool,
    CompressTransformer,
    ConvLinearCompress,
    GroupedMLP,
    MeanPool,
)
from native_sparse_attention.masks import causal as causal_mask
from native_sparse_attention.masks import dense_attention
from native_sparse_attention.ops.reference import eager, query_chunks

S, NAN = 24, math.nan
NAMES = ("q", "k", "v", "ck", "cv")
BLOCKS = dict(compress_block_sliding_stride=4)
SIZES = dict(
    compress_block_size=4, selection_block_size=4, num_selected_blocks=2, sliding_window_size=3,
    **BLOCKS,
)  # fmt: skip


@pytest.fixture(params=["whole", "gathered", "by queries"])
def strategy(request, monkeypatch):
    if request.param != "whole":
        monkeypatch.setattr(eager, "MAX_SCORES", 0)
        monkeypatch.setattr(query_chunks, "CHUNK_SCORES", 400)
        monkeypatch.setattr(query_chunks, "LEAST_QUERIES", 1)
        monkeypatch.setattr(eager, "few_blocks", lambda *_: request.param == "gathered")


def inputs(dtype=torch.float32):
    shapes = dict(q=(S, 2), k=(S, 1), v=(S, 1), ck=(S // 4, 1), cv=(S // 4, 1))
    return {name: torch.randn(1, *shape, 4).to(dtype) for name, shape in shapes.items()}


INDICES = (torch.arange(S).view(1, S, 1, 1) // 4 - torch.tensor([1, 2])).clamp(min=-1)
CALLS = {
    "whole": lambda q, k, v, ck, cv, **kw: native_sparse_attention(
        q, k, v, ck, cv, q.new_ones(*q.shape[:3], 3), **SIZES, **kw
    ),
    "differentiable top-k": lambda q, k, v, ck, cv, **kw: native_sparse_attention(
        q, k, v, ck, cv, q.new_ones(*q.shape[:3], 3), use_diff_topk=True, **SIZES, **kw
    ),
    "probs, capped": lambda q, k, v, ck, cv, **kw: native_sparse_attention(
        q, k, v, ck, cv, q.new_ones(*q.shape[:3], 3), use_diff_topk=True, importance="probs",
        soft_cap=2.0, sinks=q.new_zeros(3, 2), **SIZES, **kw,
    ),
    "compressed": lambda q, k, v, ck, cv, **kw: compressed_attention(q, ck, cv, **BLOCKS, **kw),
    "selected": lambda q, k, v, ck, cv, **kw: selected_attention(
        q, k, v, INDICES, selection_block_size=4, **kw
    ),
    "gated": lambda q, k, v, ck, cv, **kw: selected_attention(
        q, k, v, INDICES, selection_block_size=4, gates=q[:, :, :1, :2].sigmoid(), **kw
    ),
    "narrow window": lambda q, k, v, ck, cv, **kw: sliding_window_attention(
        q, k, v, sliding_window_size=3, **kw
    ),
    "wide window": lambda q, k, v, ck, cv, **kw: sliding_window_attention(
        q, k, v, sliding_window_size=20, **kw
    ),
}  # fmt: skip
OTHERS = {
    "chunked": lambda q, k, v, **_: chunked_attention(
        q, k, v, causal=True, q_chunk_size=7, k_chunk_size=9
    ),
    "mha": lambda q, k, v, **_: mha_reference(
        q.transpose(1, 2), *(t.transpose(1, 2).expand(-1, 2, -1, -1) for t in (k, v)), causal=True
    ).transpose(1, 2),
    "dense": lambda q, k, v, **_: dense_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), mask_mod=causal_mask
    ).transpose(1, 2),
}


def spoiled(x, start, value=NAN):
    """From token `start` on, a multiple of the windows' 4 unless it is the last."""
    x = {name: t.clone() for name, t in x.items()}
    for name, t in x.items():
        t[:, start // 4 if "c" in name else start :] = value
    return x


def past(call, x, stop, d_rest, **named):
    """The first outputs, and the gradients of what they depend on, d_rest reaching the others."""
    leaves = {name: t.clone().requires_grad_() for name, t in x.items()}
    out = call(**leaves, **named)
    d_out = torch.ones_like(out)
    d_out[:, stop:] = d_rest
    grads = torch.autograd.grad(out, list(leaves.values()), d_out, materialize_grads=True)
    stops = [stop // 4 if "c" in name else stop for name in leaves]
    return out[:, :stop], *(g[:, :end] for g, end in zip(grads, stops, strict=True))


@pytest.mark.slow(one_of=4)
@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("name", [*CALLS, *OTHERS])
def test_the_future_leaves_the_past_alone(name, strategy, value):
    """Outputs bit for bit; and gradients, if the future's have none."""
    call, x = (CALLS | OTHERS)[name], inputs()
    for start in (20, 12):
        clean = past(call, x, start, 0.0)
        dirty = past(call, spoiled(x, start, value), start, 0.0)
        torch.testing.assert_close(dirty[0], clean[0], atol=0, rtol=0)
        torch.testing.assert_close(dirty[1:], clean[1:])


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("name", ["q", "k"])
def test_an_infinite_logit_of_a_window(name, is_causal):
    """By package local-attention, and by the specification: a weight of 0 leaves outputs finite."""
    x = {n: inputs()[n].detach() for n in "qkv"}
    x[name][0, 7, 0, 1] = -math.inf
    call = dict(sliding_window_size=3, causal=is_causal)
    out, _ = sliding_window_attention(**x, **call, return_lse=True)
    torch.testing.assert_close(sliding_window_attention(**x, **call), out, equal_nan=True)
    assert out.isfinite().any(dim=-1)[:, 7:11].any()


@pytest.mark.parametrize("name", [n for n in CALLS if n != "narrow window"])
def test_documents_leave_each_other_alone(name, strategy):
    """Even if a gradient that comes in is NaN."""
    call, x = CALLS[name], inputs()
    cu = torch.tensor([0, 12, S])
    if name in ("selected", "gated"):  # indices count from a document's first block
        cu = torch.tensor([0, 24, 24])
        return
    clean = past(call, x, 12, 1.0, cu_seqlens=cu)
    for dirty in (
        past(call, spoiled(x, 12), 12, 1.0, cu_seqlens=cu),
        past(call, spoiled(x, 12), 12, NAN, cu_seqlens=cu),
        past(call, x, 12, NAN, cu_seqlens=cu),
    ):
        torch.testing.assert_close(dirty, clean)


def test_what_is_seen_is_reached(strategy):
    """A NaN is not lost, nor an infinity made a NaN."""
    x = inputs()
    x["v"][0, 9, 0, 1], x["v"][0, 10, 0, 2], x["v"][0, 11, 0, 2] = NAN, math.inf, -math.inf
    x["v"][0, 15, 0, 3] = math.inf
    out = sliding_window_attention(x["q"], x["k"], x["v"], sliding_window_size=4)[0, :, 0]
    i = torch.arange(S)
    seen = [(i >= at) & (i <= at + 4) for at in (9, 10, 11, 15)]
    torch.testing.assert_close(out[:, 1].isnan(), seen[0])
    torch.testing.assert_close(out[:, 2].isposinf(), seen[1] & ~seen[2])
    torch.testing.assert_close(out[:, 2].isnan(), seen[1] & seen[2])
    torch.testing.assert_close(out[:, 2].isneginf(), seen[2] & ~seen[1])
    torch.testing.assert_close(out[:, 3].isposinf(), seen[3])
    assert out[:, 0].isfinite().all()


def test_gradients_reach_what_is_seen(strategy):
    """A NaN that comes in: to the query and to the keys that it sees, to no others."""
    x = {name: t.requires_grad_() for name, t in inputs().items()}
    q, k, v = x["q"], x["k"], x["v"]
    out = sliding_window_attention(q, k, v, sliding_window_size=20, causal=True)
    d_out = torch.ones_like(out)
    d_out[:, 9] = NAN
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), d_out)
    i = torch.arange(S)
    torch.testing.assert_close(dq.isnan().any(-1)[0, :, 0], i == 9)
    for d in (dk, dv):
        torch.testing.assert_close(d.isnan().any(-1)[0, :, 0], i <= 9)


@pytest.mark.parametrize("name", ["wide window", "compressed", "selected", "whole"])
def test_flex(name, untraced_flex):
    call, x = CALLS[name], inputs()
    with torch.no_grad():
        clean = call(**x, backend="flex")
        dirty = call(**spoiled(x, 20), backend="flex")
    torch.testing.assert_close(dirty[:, :20], clean[:, :20], atol=0, rtol=0)
    assert dirty[:, 20:].isnan().all()


def test_ranking():
    """The scores of windows that a query does not see play no part."""
    x = inputs()
    for rule in ("logits", "probs", "max"):
        for interpolated in (False, rule == "logits"):
            settings = dict(
                seq_len=S, compress_block_size=4, selection_block_size=8, num_selected_blocks=2,
                importance=rule, interpolated_importance_score=interpolated, **BLOCKS,
            )  # fmt: skip
            clean = select_blocks(x["q"], x["ck"], **settings)
            bad = spoiled(x, 20)
            dirty = select_blocks(bad["q"], bad["ck"], **settings)
            assert torch.equal(clean[:, :20], dirty[:, :20])


# the layer

LAYER = dict(
    dim=16, dim_head=8, heads=4, kv_heads=2, sliding_window_size=3, compress_block_size=8,
    selection_block_size=8, num_selected_blocks=2, compress_block_sliding_stride=4,
)  # fmt: skip
NETWORKS = {
    "default": None,
    "mean": MeanPool(),
    "convolution": ConvLinearCompress(2, 8, 8),
    "attention": AttentionPool(8, 8),
    "grouped": GroupedMLP(8, 8, 2),
    "transformer": CompressTransformer(1, 16, 2),
}


@pytest.mark.parametrize("network", NETWORKS)
def test_tokens_of_a_layer(network, strategy):
    layer = SparseAttention(**LAYER, causal=True, compress_mlp=NETWORKS[network])
    x = torch.randn(2, 40, 16)
    bad = x.clone()
    bad[0, 29:] = NAN
    clean, dirty = layer(x), layer(bad)
    torch.testing.assert_close(dirty[0, :29], clean[0, :29], atol=0, rtol=0)
    torch.testing.assert_close(dirty[1], clean[1], atol=0, rtol=0)
    assert dirty[0, 29:].isnan().all()


@pytest.mark.parametrize("branches", [("selected", "window"), BRANCHES])
def test_gradients_of_a_layer_with_gates(branches, strategy):
    """The gate of a NaN token is NaN. A loss of earlier tokens has no gradient of it."""
    layer = SparseAttention(**LAYER, causal=True, branches=branches)

    def gradient(x):
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(layer(leaf)[:, :29].square().sum(), leaf)[0][:, :29]

    x = torch.randn(2, 40, 16)
    bad = x.clone()
    bad[0, 29:] = NAN
    torch.testing.assert_close(gradient(bad), gradient(x))
    leaf = bad.requires_grad_()
    (seen,) = torch.autograd.grad(layer(leaf)[:, 29:].sum(), leaf)
    assert seen[0, 29:].isnan().all() and seen[1].isfinite().all()


@pytest.mark.parametrize("is_causal", [True, False])
def test_padding_and_documents_of_a_layer(is_causal, strategy):
    layer = SparseAttention(**LAYER, causal=is_causal)
    x = torch.randn(2, 40, 16)
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[0, :7], mask[1, 30:] = False, False
    bad = x.masked_fill(~mask[..., None], NAN)
    torch.testing.assert_close(layer(bad, mask=mask), layer(x, mask=mask), atol=0, rtol=0)
    ids = torch.arange(40).expand(2, -1) // 19
    bad = x.masked_fill((ids == 1)[..., None], NAN)
    clean, dirty = layer(x, segment_ids=ids), layer(bad, segment_ids=ids)
    other = ids != 1
    torch.testing.assert_close(dirty[other], clean[other], atol=0, rtol=0)
    leaf = bad.clone().requires_grad_()
    (found,) = torch.autograd.grad(layer(leaf, segment_ids=ids)[other].sum(), leaf)
    leaf = x.clone().requires_grad_()
    (right,) = torch.autograd.grad(layer(leaf, segment_ids=ids)[other].sum(), leaf)
    torch.testing.assert_close(found[other], right[other])


def test_rows_of_a_batch():
    model = Transformer(32, 16, 2, 8, 4, causal=True)
    ids = torch.randint(32, (3, 20))
    clean = model(ids)
    with torch.no_grad():
        model.token_emb.weight[0] = NAN
    ids[1, 11] = 0
    kept = (ids != 0).all(dim=1)
    torch.testing.assert_close(model(ids)[kept], clean[kept], atol=0, rtol=0)
