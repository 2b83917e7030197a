"""Score mods: values by hand, gradients through flex_attention's own graphs, and the one
instruction of the approximate tanh."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from native_sparse_attention import masks
from native_sparse_attention.masks import tanh


def grid(mod, scores: Tensor) -> Tensor:
    """A score mod on scores [B H T S], as the definition calls it."""
    b, h, i, j = (torch.arange(n, device=scores.device) for n in scores.shape)
    return mod(scores, b[:, None, None, None], h[:, None, None], i[:, None], j)


def draw(B=2, H=2, T=9, S=13, D=8, dtype=torch.float64, device="cpu"):
    shapes = (B, H, T, D), (B, H, S, D), (B, H, S, D)
    return [torch.randn(s, dtype=dtype, device=device, requires_grad=True) for s in shapes]


# by hand


@pytest.mark.parametrize(
    ("num_heads", "exponents"),
    [
        (1, [8]),
        (2, [4, 8]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        # no power of two: those of 2 or 4, then every other one of twice as many
        (3, [4, 8, 2]),
        (5, [2, 4, 6, 8, 1]),
        (6, [2, 4, 6, 8, 1, 3]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
    ],
)
def test_slopes(num_heads, exponents):
    expected = torch.tensor([2.0**-e for e in exponents])
    torch.testing.assert_close(masks.alibi_slopes(num_heads), expected, rtol=1e-7, atol=0)


def test_alibi_lowers_what_is_far():
    """Two heads, slopes 1/16 and 1/256; the nearest key highest, in both directions."""
    biases = grid(masks.alibi(2), torch.zeros(1, 2, 3, 3))
    distance = torch.tensor([[0.0, 1, 2], [1, 0, 1], [2, 1, 0]])
    assert torch.equal(biases, torch.stack((-distance / 16, -distance / 256))[None])
    functional = partial(masks.alibi_bias, slopes=masks.alibi_slopes(2))
    assert torch.equal(grid(functional, torch.zeros(1, 2, 3, 3)), biases)
    steep = masks.alibi(2, torch.tensor([1.0, 0.5]))
    assert torch.equal(grid(steep, torch.zeros(1, 2, 3, 3))[0, 1], -distance / 2)


def test_relative_position():
    expected = torch.tensor([[0.0, -1, -2], [1, 0, -1]])
    assert torch.equal(grid(masks.relative_position, torch.zeros(1, 1, 2, 3))[0, 0], expected)


def test_relative_bias():
    """Distances of -1, 0, 1 and their clipped neighbours."""
    table = torch.tensor([[10.0, 20, 30], [1, 2, 3]])
    first = torch.tensor([[20.0, 10, 10, 10], [30, 20, 10, 10], [30, 30, 20, 10]])
    found = grid(masks.relative_bias(table), torch.zeros(1, 2, 3, 4))
    assert torch.equal(found[0], torch.stack((first, first / 10)))
    shared = grid(masks.relative_bias(table[0]), torch.zeros(1, 2, 3, 4))
    assert torch.equal(shared[0], torch.stack((first, first)))


@pytest.mark.parametrize("approximate", [False, True])
def test_soft_cap(approximate):
    scores = torch.tensor([-1e9, -2.0, 0.0, 1e-3, 2.0, 1e9], dtype=torch.float64)
    found = grid(masks.soft_cap(2, approximate), scores.view(1, 1, 1, -1)).flatten()
    small = 2 * math.tanh(1)
    expected = torch.tensor([-2.0, -small, 0.0, 1e-3, small, 2.0]).double()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


# gradients. All through torch's graphs of the mod, forward and backward, and by the definition


def mods(dtype=torch.float64, device="cpu"):
    """Each with the tensors that it learns."""
    slopes = torch.rand(2, dtype=dtype, device=device).requires_grad_()
    table = torch.randn(2, 9, dtype=dtype, device=device).requires_grad_()
    shared = torch.randn(5, dtype=dtype, device=device).requires_grad_()
    return {
        "alibi": (masks.alibi(2, device=device), ()),
        "alibi, learned": (masks.alibi(2, slopes), (slopes,)),
        "alibi, functional": (partial(masks.alibi_bias, slopes=slopes.detach()), ()),
        "relative_position": (masks.relative_position, ()),
        "relative_bias": (masks.relative_bias(table), (table,)),
        "relative_bias, shared": (masks.relative_bias(shared), (shared,)),
        "soft_cap": (masks.soft_cap(0.75), ()),
        "soft_cap, approximate": (masks.soft_cap(0.75, approximate=True), ()),
    }


def by_formula(name, learned, device="cpu"):
    """What is added to a score [H T S], or done to it, in a few words."""

    def call(scores: Tensor) -> Tensor:
        T, S = scores.shape[-2:]
        away = torch.arange(T, device=device)[:, None] - torch.arange(S, device=device)
        if name.startswith("soft_cap"):
            return 0.75 * torch.tanh(scores / 0.75)
        if name.startswith("alibi"):
            slopes = learned[0] if learned else masks.alibi_slopes(2, device)
            return scores - slopes[:, None, None] * away.abs()
        if name == "relative_position":
            return scores + away
        m = learned[0].shape[-1] // 2
        return scores + learned[0][..., away.clamp(-m, m) + m]

    return call


def expected_attention(q, k, v, formula):
    """Causal, of a query that stands where its index says."""
    scores = formula((q @ k.mT) * q.shape[-1] ** -0.5)
    past = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~past, -torch.inf).softmax(-1) @ v


@pytest.mark.slow(one_of=4)
@pytest.mark.parametrize("name", mods())
def test_flex_attention_and_definition(name, flex_gradients):
    mod, learned = mods()[name]
    if name == "alibi, functional":
        learned_or_held = (mod.keywords["slopes"],)
    else:
        learned_or_held = learned
    tensors = draw()
    expected = expected_attention(*tensors, by_formula(name, learned_or_held))
    bwd = torch.randn_like(expected)
    leaves = (*tensors, *learned)
    right = torch.autograd.grad(expected, leaves, bwd)
    block_mask = masks.block_mask_of(masks.causal, 9, 13, "cpu")

    out = masks.dense_attention(*tensors, mask_mod=masks.causal, score_mod=mod)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    for got, grad in zip(torch.autograd.grad(out, leaves, bwd), right):
        torch.testing.assert_close(got, grad, rtol=0, atol=1e-12)

    out = flex_gradients(*tensors, score_mod=mod, block_mask=block_mask)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    for got, grad in zip(torch.autograd.grad(out, leaves, bwd), right):
        torch.testing.assert_close(got, grad, rtol=0, atol=1e-12)


def test_caps_and_tables_one_after_another():
    """One compiled function, a second value: none becomes an input of the graph."""
    graphs = []

    def record(graph, inputs):
        graphs.append([x for x in inputs if not isinstance(x, Tensor)])
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(flex.flex_attention, backend=record, fullgraph=True)
    q, k, v = (t.detach() for t in draw())
    cases = [masks.soft_cap(cap) for cap in (0.7, 50)]
    cases += [masks.relative_bias(torch.randn(5).double()) for _ in range(2)]
    for mod in cases:
        expected = masks.dense_attention(q, k, v, score_mod=mod)
        torch.testing.assert_close(compiled(q, k, v, score_mod=mod), expected)
    # a graph for each cap, one for tables of one size
    assert graphs == [[]] * 3


# on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", mods())
def test_gpu_agrees(name):
    """The compiled kernels, forward and backward, gradients of what is learned too."""
    mod, learned = mods(torch.float32, "cuda")[name]
    held = (mod.keywords["slopes"],) if name == "alibi, functional" else learned
    tensors = draw(T=150, S=200, D=32, dtype=torch.float32, device="cuda")
    block_mask = masks.block_mask_of(masks.causal, 150, 200)
    torch._dynamo.reset()
    out = torch.compile(flex.flex_attention, fullgraph=True)(
        *tensors, score_mod=mod, block_mask=block_mask
    )
    exact = [t.detach().double().requires_grad_() for t in tensors]
    of_double = [t.detach().double().requires_grad_() for t in held]
    expected = expected_attention(*exact, by_formula(name, of_double, "cuda"))
    # the instruction's error is 2^-11 of a tanh, which a softmax of capped scores hardly raises
    close = {"rtol": 0, "atol": 5e-3}
    torch.testing.assert_close(out.double(), expected, **close)
    bwd = torch.randn_like(out)
    leaves, right = (*tensors, *learned), (*exact, *of_double[: len(learned)])
    grads = torch.autograd.grad(out, leaves, bwd)
    expected_grads = torch.autograd.grad(expected, right, bwd.double())
    for t, grad, expected_grad in zip(leaves, grads, expected_grads):
        # what is learned sums the gradients of very many scores
        atol = 5e-3 * (1 if t.ndim == 4 else max(1.0, expected_grad.abs().max().item()))
        torch.testing.assert_close(grad.double(), expected_grad, rtol=0, atol=atol)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gpu_compiles_tanh_to_its_instruction(dtype):
    """In the code of flex_attention, forward and backward, and of a function of its own."""
    from torch._inductor.utils import run_and_get_code

    instruction = tanh.ASM.split()[0]
    q, k, v = draw(T=128, S=128, D=64, dtype=dtype, device="cuda")

    def run(approximate):
        torch._dynamo.reset()
        compiled = torch.compile(flex.flex_attention, fullgraph=True)

        def both():
            out = compiled(q, k, v, score_mod=masks.soft_cap(2.0, approximate))
            return out, *torch.autograd.grad(out.sum(), (q, k, v))

        with torch._inductor.config.patch(force_disable_caches=True):
            return run_and_get_code(both)

    approximate, codes = run(True)
    assert len(codes) > 1 and all(instruction in code for code in codes)
    exact, codes = run(False)
    assert not any(instruction in code for code in codes)
    for got, right in zip(approximate, exact):
        largest = right.abs().max().item()
        atol = max(2**-9, 2 * torch.finfo(dtype).eps) * max(1.0, largest)
        torch.testing.assert_close(got, right, rtol=0, atol=atol)

    torch._dynamo.reset()
    x = torch.randn(1000, device="cuda", dtype=dtype, requires_grad=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        y, (code, *_) = run_and_get_code(torch.compile(masks.tanh_approx, fullgraph=True), x)
    assert instruction in code
    assert y.dtype == dtype
    close = {"rtol": 2**-10 + torch.finfo(dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(y, torch.tanh(x), **close)
    (slope,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(slope, 1 - y.detach() ** 2, rtol=0, atol=4 * torch.finfo(dtype).eps)


# what is refused

BAD = [
    (lambda: masks.alibi_slopes(0), "num_heads must be an integer of at least 1, got 0"),
    (lambda: masks.alibi(-1), "num_heads must"),
    (
        lambda: masks.alibi(4, torch.ones(3)),
        r"slopes must be floating, of shape \[4\], got torch.float32 of shape \[3\]",
    ),
    (lambda: masks.alibi(2, torch.ones(2).long()), "slopes must be floating"),
    (lambda: masks.soft_cap(0), "cap must be a positive finite number of at least 1.2e-38, got 0"),
    (lambda: masks.soft_cap(-2.0), "cap must"),
    (lambda: masks.soft_cap(math.inf), "cap must"),
    (lambda: masks.soft_cap(math.nan), "cap must"),
    (
        lambda: masks.soft_cap("2"),
        "cap must be a positive finite number of at least 1.2e-38, got '2'",
    ),
    (lambda: masks.soft_cap(True), "cap must"),
    (lambda: masks.soft_cap(2.0, "yes"), "approximate must be True or False, got 'yes'"),
    (lambda: masks.relative_bias(torch.ones(4)), r"table must have shape \[heads, 2 m \+ 1\] or"),
    (lambda: masks.relative_bias(torch.ones(1, 1, 3)), "table must have shape"),
    (lambda: masks.relative_bias(torch.ones(3).long()), "table must be a floating tensor, got tor"),
    (lambda: masks.relative_bias([1.0]), "table must be a floating tensor, got list"),
]


@pytest.mark.parametrize(("call", "told"), BAD, ids=[told for _, told in BAD])
def test_bad_arguments_are_named(call, told):
    with pytest.raises(ValueError, match=f"^{told}"):
        call()
