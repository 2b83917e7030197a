"""Attention under mask and score mods: torch's graphs of flex_attention and `dense_attention`
against the formula, forward and backward."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from native_sparse_attention import masks
from native_sparse_attention.masks import and_masks, catalog, or_masks
from tests.helpers.pictures import SMALL, dense

COMPOSED = {
    "and": and_masks(masks.causal, masks.sliding_window(7)),
    "or": or_masks(masks.sliding_window(5), masks.prefix_lm(20)),
    "both": or_masks(
        and_masks(masks.causal, masks.dilated_window(40, 3)), lambda b, h, i, j: j < 2
    ),
}


def draw(q_len=9, kv_len=13, width=8, dtype=torch.float64, device="cpu", heads=2, batch=2):
    shapes = ((batch, heads, n, width) for n in (q_len, kv_len, kv_len))
    return [torch.randn(s, dtype=dtype, device=device, requires_grad=True) for s in shapes]


def score_mods(dtype=torch.float64, device="cpu"):
    """Score mods of two heads, what they do to scores [B H T S], and the tensors they learn."""
    slopes = torch.rand(2, dtype=dtype, device=device).requires_grad_()
    table = torch.randn(2, 9, dtype=dtype, device=device).requires_grad_()
    shared = torch.randn(5, dtype=dtype, device=device).requires_grad_()
    default = masks.alibi_slopes(2, device)

    def distance(scores):
        T, S = scores.shape[-2:]
        return torch.arange(T, device=device)[:, None] - torch.arange(S, device=device)

    def alibi(scores, slopes):
        return scores - slopes[:, None, None] * distance(scores).abs()

    def bias(scores, table):
        m = table.shape[-1] // 2
        return scores + table[..., distance(scores).clamp(-m, m) + m]

    def cap(scores):
        return 0.75 * torch.tanh(scores / 0.75)

    return {
        "alibi": (masks.alibi(2, device=device), lambda s: alibi(s, default), []),
        "alibi, learned": (masks.alibi(2, slopes), alibi, [slopes]),
        "relative_position": (masks.relative_position, lambda s: s + distance(s), []),
        "relative_bias": (masks.relative_bias(table), bias, [table]),
        "relative_bias, shared": (masks.relative_bias(shared), bias, [shared]),
        "soft_cap": (masks.soft_cap(0.75), cap, []),
        "soft_cap, approximate": (masks.soft_cap(0.75, approximate=True), cap, []),
    }


def problem(name, length, dtype=torch.float64, device="cpu", width=8):
    """q, k, v, the mods, the mask [T S], and what a score mod computes and learns."""
    score_mod, formula, learned, kv_len = None, lambda s: s, [], length
    if name in catalog.CATALOG:
        options = SMALL.get(name, {})
        mod, _, kv_len = catalog.make(name, length, torch.device(device), **options)
    elif name in COMPOSED:
        mod = COMPOSED[name]
    else:
        mod, kv_len = masks.causal, length + 13
        score_mod, formula, learned = score_mods(dtype, device)[name]
    tensors = draw(length, kv_len, width, dtype, device)
    mask = flex.create_mask(mod, 1, 1, length, kv_len, device=device)[0, 0]
    return tensors, mod, score_mod, mask, formula, learned


def attention(q, k, v, *learned, mask, formula):
    """By the formula; a query that sees nothing is 0."""
    scores = formula((q @ k.mT) * q.shape[-1] ** -0.5, *learned)
    empty = ~mask.any(-1, keepdim=True)
    return scores.masked_fill(~mask & ~empty, -torch.inf).softmax(-1).masked_fill(empty, 0) @ v


def with_gradients(out: Tensor, leaves, bwd: Tensor):
    return out, *torch.autograd.grad(out, leaves, bwd.to(out.dtype))


NAMES = [*catalog.CATALOG, *COMPOSED, *score_mods()]


@pytest.mark.slow(one_of=10)
@pytest.mark.parametrize("name", NAMES)
def test_flex_attention_and_definition(name, flex_gradients):
    tensors, mod, score_mod, mask, formula, learned = problem(name, 90)
    leaves, bwd = [*tensors, *learned], torch.randn_like(tensors[0])
    expected = with_gradients(attention(*leaves, mask=mask, formula=formula), leaves, bwd)
    block_mask = masks.block_mask_of(mod, *mask.shape, "cpu")
    for out in (
        flex_gradients(*tensors, score_mod=score_mod, block_mask=block_mask),
        masks.dense_attention(*tensors, score_mod=score_mod, mask_mod=mod),
    ):
        for got, right in zip(with_gradients(out, leaves, bwd), expected):
            torch.testing.assert_close(got, right, rtol=0, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_gpu_agrees(name):
    """The compiled kernels, forward and backward, gradients of what is learned too."""
    tensors, mod, score_mod, mask, formula, learned = problem(name, 300, torch.float32, "cuda", 32)
    leaves, bwd = [*tensors, *learned], torch.randn_like(tensors[0])
    block_mask = masks.block_mask_of(mod, *mask.shape)
    torch._dynamo.reset()
    out = torch.compile(flex.flex_attention, fullgraph=True)(
        *tensors, score_mod=score_mod, block_mask=block_mask
    )
    exact = [t.detach().double().requires_grad_() for t in leaves]
    expected = with_gradients(attention(*exact, mask=mask, formula=formula), exact, bwd)
    # the error of the approximate tanh is 2^-11; learned tensors sum gradients of many scores
    for got, right in zip(with_gradients(out, leaves, bwd), expected):
        largest = 1.0 if right.ndim == 4 else max(1.0, right.abs().max().item())
        atol = (2e-3 if score_mod is None else 5e-3) * largest
        torch.testing.assert_close(got.double(), right, rtol=0, atol=atol)


def test_rows_that_see_nothing(flex_gradients):
    """Zero and finite, gradients too."""
    mods = {
        "padding": masks.document(torch.tensor([-1, 0, 0, -1, -1])),
        "text before any image": masks.flamingo(torch.tensor([[2, 4]]), image_token_length=5),
    }
    for name, mod in mods.items():
        empty = ~dense(mod, 5).any(-1)
        assert empty.any() and not empty.all(), name
        tensors, bwd = draw(5, 5, heads=1, batch=1), torch.randn(1, 1, 5, 8)
        block_mask = masks.block_mask_of(mod, 5, 5, "cpu")
        for out in (
            flex_gradients(*tensors, block_mask=block_mask),
            masks.dense_attention(*tensors, mask_mod=mod),
        ):
            out, dq, *others = with_gradients(out, tensors, bwd)
            assert all(t.isfinite().all() and t.any() for t in (out, dq, *others))
            assert torch.equal((out == 0).all(-1)[0, 0], empty)
            assert not dq[0, 0, empty].any()
    # no key at all
    out = masks.dense_attention(*(torch.randn(1, 1, n, 8) for n in (3, 0, 0)))
    assert torch.equal(out, torch.zeros(1, 1, 3, 8))


FACTORIES = {
    "dilated_window": lambda n: {"mask_mod": masks.dilated_window(n, n)},
    "prefix_lm": lambda n: {"mask_mod": masks.prefix_lm(n)},
    "natten": lambda n: {"mask_mod": masks.natten(12, 2 + 2 * n, 2 * n + 1)},
    "flamingo": lambda n: {
        "mask_mod": masks.flamingo(torch.tensor([[0, 9]]), image_token_length=n)
    },
    "and_masks": lambda n: {"mask_mod": and_masks(masks.causal, masks.sliding_window(n))},
    "soft_cap": lambda n: {"score_mod": masks.soft_cap(0.7 * n)},
    "relative_bias": lambda n: {"score_mod": masks.relative_bias(torch.randn(5) * n)},
}


@pytest.mark.slow(one_of=3)
@pytest.mark.parametrize("name", FACTORIES)
def test_numbers_never_become_symbolic(name):
    """One compiled function meets other settings: a number that a closure holds would become an
    input of the graph, which flex_attention cannot lower."""
    graphs = []

    def record(graph, inputs):
        graphs.append([x for x in inputs if not isinstance(x, Tensor)])
        return graph

    torch._dynamo.reset()
    q = torch.randn(1, 1, 24, 8)
    compiled = torch.compile(flex.flex_attention, backend=record, fullgraph=True)
    for n in (1, 2, 3):
        mods = FACTORIES[name](n)
        mask_mod, score_mod = mods.get("mask_mod"), mods.get("score_mod")
        block_mask = mask_mod and masks.block_mask_of(mask_mod, 24, 24, "cpu")
        out = compiled(q, q, q, block_mask=block_mask, score_mod=score_mod)
        torch.testing.assert_close(out, masks.dense_attention(q, q, q, **mods))
    assert not any(graphs)
