"""Score mods: values by hand, and the one instruction of the approximate tanh."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from native_sparse_attention import masks
from native_sparse_attention.masks import gallery
from tests.helpers.budget import CUDA
from tests.masks.test_mask_attention import draw


def grid(mod, scores: Tensor) -> Tensor:
    """A score mod on scores [B H T S], as the definition calls it."""
    b, h, i, j = (torch.arange(n, device=scores.device) for n in scores.shape)
    return mod(scores, b[:, None, None, None], h[:, None, None], i[:, None], j)


@pytest.mark.parametrize(
    ("num_heads", "exponents"),
    [
        (1, [8]),
        (2, [4, 8]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        # no power of two: those of 2 or 4, then every other one of twice as many
        (3, [4, 8, 2]),
        (6, [2, 4, 6, 8, 1, 3]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
    ],
)
def test_slopes(num_heads, exponents):
    expected = torch.tensor([2.0**-e for e in exponents])
    torch.testing.assert_close(masks.alibi_slopes(num_heads), expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize("approximate", [False, True])
def test_soft_cap(approximate):
    scores = torch.tensor([-1e9, -2.0, 0.0, 1e-3, 2.0, 1e9], dtype=torch.float64)
    capped = grid(masks.soft_cap(2, approximate), scores.view(1, 1, 1, -1)).flatten()
    small = 2 * math.tanh(1)
    expected = torch.tensor([-2.0, -small, 0.0, 1e-3, small, 2.0]).double()
    torch.testing.assert_close(capped, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "mod",
    [
        masks.alibi(2, torch.rand(2).double()),
        masks.relative_bias(torch.randn(2, 5).double()),
        lambda score, b, h, i, j: i - j,
    ],
)
def test_scores_of_other_dtypes_and_axes(mod):
    """float64 tensors beside float32 scores, and a mod that does not read the score, as in
    flex_attention."""
    q, k, v = torch.randn(3, 2, 2, 6, 8)
    scores = torch.einsum("bhid,bhjd->bhij", q, k).double() * 8**-0.5
    expected = grid(mod, scores).expand_as(scores).double().softmax(-1) @ v.double()
    out = masks.dense_attention(q, k, v, score_mod=mod)
    torch.testing.assert_close(out, expected.float())


def test_tanh_approx_is_an_operator():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(masks.tanh_approx, (x,))
    assert torch.equal(masks.tanh_approx(x), torch.tanh(x))
    assert torch.autograd.gradcheck(masks.tanh_approx, (x,))
    assert torch.autograd.gradgradcheck(masks.tanh_approx, (x,))
    across = torch.vmap(torch.vmap(masks.tanh_approx), in_dims=1, out_dims=1)
    assert torch.equal(across(x), torch.tanh(x))


@pytest.mark.slow
def test_tanh_approx_in_a_mod_of_ones_own():
    """Compiled where nobody has made a `soft_cap`."""
    from torch._inductor.lowering import lowerings

    def capped(score, b, h, i, j):
        return 2 * masks.tanh_approx(score / 2)

    lowerings.pop(torch.ops.native_sparse_attention.tanh_approx.default, None)
    torch._dynamo.reset()
    q, k, v = (t.detach().float() for t in draw())
    out = torch.compile(flex.flex_attention)(q, k, v, score_mod=capped)
    expected = masks.dense_attention(q, k, v, score_mod=masks.soft_cap(2.0))
    torch.testing.assert_close(out, expected, atol=2e-3 if CUDA else 1e-5, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gpu_compiles_tanh_to_its_instruction(dtype):
    """In the code of flex_attention, forward and backward."""
    from torch._inductor.utils import run_and_get_code

    instruction = gallery.ASM.split()[0]
    q, k, v = draw(128, 128, 64, dtype=dtype, device="cuda")

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
