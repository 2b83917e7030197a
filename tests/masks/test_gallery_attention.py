"""Attention under the masks of the gallery: flex_attention's graphs against SDPA with the mask
spelled out, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as flex

from native_sparse_attention import masks
from native_sparse_attention.masks import and_masks, catalog, or_masks
from tests.helpers.pictures import SMALL, dense


def problem(name, length=90, dtype=torch.float64, device="cpu", width=8):
    """q, k, v [2 2 T|S D], the mask mod, and the mask spelled out [T S]."""
    mod, q_len, kv_len = catalog.make(name, length, torch.device(device), **SMALL.get(name, {}))
    q, k, v = (
        torch.randn(2, 2, n, width, dtype=dtype, device=device, requires_grad=True)
        for n in (q_len, kv_len, kv_len)
    )
    mask = flex.create_mask(mod, 1, 1, q_len, kv_len, device=device)[0, 0]
    return (q, k, v), mod, mask


def with_gradients(call, tensors, bwd):
    out = call(*tensors)
    return out, *torch.autograd.grad(out, tensors, bwd)


def spelled_out(mask):
    """SDPA under the explicit mask; a row that sees nothing is 0."""

    def call(q, k, v):
        sees = mask.any(-1, keepdim=True)
        # such a row sees all, and is then left out
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask | ~sees)
        return out.masked_fill(~sees, 0.0)

    return call


@pytest.mark.slow(one_of=10)
@pytest.mark.parametrize("name", catalog.CATALOG)
def test_flex_attention_is_sdpa_under_the_mask(name, flex_gradients):
    """Forward and backward, by the graphs that torch makes of the mod."""
    tensors, mod, mask = problem(name)
    q_len, kv_len = mask.shape
    block_mask = masks.block_mask_of(mod, q_len, kv_len, "cpu")
    bwd = torch.randn_like(tensors[0])
    expected = with_gradients(spelled_out(mask), tensors, bwd)

    def ours(q, k, v):
        return flex_gradients(q, k, v, block_mask=block_mask)

    def by_definition(q, k, v):
        return masks.dense_attention(q, k, v, mask_mod=mod)

    for call in (ours, by_definition):
        for got, right in zip(with_gradients(call, tensors, bwd), expected):
            torch.testing.assert_close(got, right, rtol=0, atol=1e-12)


def test_rows_that_see_nothing(flex_gradients):
    """Zero and finite, gradients too."""
    mods = {
        "padding": masks.document(torch.tensor([-1, 0, 0, -1, -1])),
        "text before any image": masks.flamingo(torch.tensor([[2, 4]]), image_token_length=5),
    }
    for name, mod in mods.items():
        empty = ~dense(mod, 5).any(-1)
        assert empty.any() and not empty.all(), name
        tensors = [torch.randn(1, 1, 5, 8).double().requires_grad_() for _ in range(3)]
        block_mask = masks.block_mask_of(mod, 5, 5, "cpu")
        for call in (
            lambda q, k, v, m=block_mask: flex_gradients(q, k, v, block_mask=m),
            lambda q, k, v, m=mod: masks.dense_attention(q, k, v, mask_mod=m),
        ):
            out, dq, dk, dv = with_gradients(call, tensors, torch.randn(1, 1, 5, 8).double())
            for t in (out, dq, dk, dv):
                assert t.isfinite().all() and t.any()
            assert torch.equal((out == 0).all(-1)[0, 0], empty)
            assert not dq[0, 0, empty].any()
    # no key at all
    out = masks.dense_attention(*(torch.randn(1, 1, n, 8) for n in (3, 0, 0)))
    assert torch.equal(out, torch.zeros(1, 1, 3, 8))


def test_grouped_heads_and_scale():
    q, k, v = torch.randn(2, 6, 7, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 5)
    out = masks.dense_attention(q, k, v, scale=0.3)
    expected = F.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(out, expected)
    with pytest.raises(ValueError, match="heads=6 and kv_heads=4"):
        masks.dense_attention(q, *(torch.randn(2, 4, 9, 8) for _ in range(2)))
    with pytest.raises(ValueError, match="v has S=8 but k has S=9"):
        masks.dense_attention(q, k, v[:, :, 1:])


FACTORIES = {
    "sliding_window": lambda n: masks.sliding_window(n),
    "dilated_window": lambda n: masks.dilated_window(n, n),
    "prefix_lm": lambda n: masks.prefix_lm(n),
    "sasa": lambda n: masks.sasa(4, 2 + 2 * n, 2 * n + 1),
    "natten": lambda n: masks.natten(12, 2 + 2 * n, 2 * n + 1),
    "flamingo": lambda n: masks.flamingo(torch.tensor([[0, 9]]), image_token_length=n),
    "and_masks": lambda n: and_masks(masks.causal, masks.sliding_window(n)),
}


@pytest.mark.slow(one_of=3)
@pytest.mark.parametrize("name", FACTORIES)
def test_numbers_never_become_symbolic(name):
    """One compiled function meets a second setting: an integer that a closure holds is then an
    input of the graph, which flex_attention cannot lower."""
    graphs = []

    def record(graph, inputs):
        graphs.append([x for x in inputs if not isinstance(x, torch.Tensor)])
        return graph

    torch._dynamo.reset()
    q = torch.randn(1, 1, 24, 8)
    compiled = torch.compile(flex.flex_attention, backend=record, fullgraph=True)
    for n in (1, 2):
        mod = FACTORIES[name](n)
        out = compiled(q, q, q, block_mask=masks.block_mask_of(mod, 24, 24, "cpu"))
        torch.testing.assert_close(out, masks.dense_attention(q, q, q, mask_mod=mod))
    assert graphs == [[], []]


# on a GPU


COMPOSED = {
    "and": and_masks(masks.causal, masks.sliding_window(7)),
    "or": or_masks(masks.sliding_window(5), masks.prefix_lm(20)),
    "both": or_masks(
        and_masks(masks.causal, masks.dilated_window(40, 3)), lambda b, h, i, j: j < 2
    ),
}


def composed(name, length, dtype, device="cpu", width=8):
    tensors = [
        torch.randn(2, 2, length, width, dtype=dtype, device=device, requires_grad=True)
        for _ in range(3)
    ]
    mod = COMPOSED[name]
    return tensors, mod, flex.create_mask(mod, 1, 1, length, length, device=device)[0, 0]


@pytest.mark.parametrize("name", COMPOSED)
def test_composed_masks(name, flex_gradients):
    tensors, mod, mask = composed(name, 90, torch.float64)
    block_mask = masks.block_mask_of(mod, 90, 90, "cpu")
    bwd = torch.randn_like(tensors[0])
    expected = with_gradients(spelled_out(mask), tensors, bwd)
    got = with_gradients(
        lambda q, k, v: flex_gradients(q, k, v, block_mask=block_mask), tensors, bwd
    )
    for actual, right in zip(got, expected):
        torch.testing.assert_close(actual, right, rtol=0, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*catalog.CATALOG, *COMPOSED])
def test_gpu_agrees(name):
    """The compiled kernels, forward and backward, within the rounding of TF32-free fp32."""
    make = composed if name in COMPOSED else problem
    tensors, mod, mask = make(name, 300, torch.float32, "cuda", 32)
    block_mask = masks.block_mask_of(mod, *mask.shape)
    torch._dynamo.reset()
    compiled = torch.compile(flex.flex_attention, fullgraph=True)
    bwd = torch.randn_like(tensors[0])
    got = with_gradients(lambda q, k, v: compiled(q, k, v, block_mask=block_mask), tensors, bwd)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    expected = with_gradients(spelled_out(mask), exact, bwd.double())
    for actual, right in zip(got, expected):
        torch.testing.assert_close(actual.double(), right, rtol=0, atol=2e-3)


@pytest.mark.gpu
def test_gpu_takes_one_setting_after_another():
    torch._dynamo.reset()
    compiled = torch.compile(flex.flex_attention, fullgraph=True)
    q = torch.randn(1, 1, 200, 32, device="cuda")
    for n in (1, 2, 3):
        mod = masks.sliding_window(n)
        out = compiled(q, q, q, block_mask=masks.block_mask_of(mod, 200, 200))
        expected = masks.dense_attention(q, q, q, mask_mod=mod)
        torch.testing.assert_close(out, expected, rtol=0, atol=2e-3)
