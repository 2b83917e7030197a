"""One softmax by its kernels against eager PyTorch in float64, forward and backward."""

import pytest
import torch

from native_sparse_attention import native_sparse_attention, select_blocks, selected_attention
from tests.helpers.budget import CUDA, DEVICE

pytestmark = pytest.mark.kernels

SIZES = dict(
    compress_block_size=8, compress_block_sliding_stride=4, selection_block_size=8,
    num_selected_blocks=2, sliding_window_size=0, branches=("selected",),
)  # fmt: skip
TOKENS = dict(SIZES, compress_block_size=1, compress_block_sliding_stride=1)
CASES = {
    "logits": {},
    "tokens": dict(TOKENS, importance="max"),
    "probs": dict(importance="probs"),
    "forced": dict(num_initial_blocks=1, num_local_blocks=2),
    "a ranking per head": dict(query_heads_share_selected_kv=False),
    "no local block": dict(num_local_blocks=0),
    "two-sided": dict(causal=False, num_initial_blocks=1),
    "capped": dict(soft_cap=3.0),
    "sinks": dict(sinks=True),
    "later": dict(q_offset=21),
    "ragged": dict(q_offset=torch.tensor([3, 30])),
    "shared rankings": dict(selection_stride=4, importance="max"),
    "queries of their own": dict(cq=True),
    "dense at first": dict(dense_length=40),
    "differentiable": dict(use_diff_topk=True),
}


def draw(S=75, T=None, H=4, K=2, E=16, d=4):
    """q, k, v, ck in float32."""
    shapes = (2, S if T is None else T, H, E), (2, S, K, E), (2, S, K, E)
    q, k, v = (torch.randn(shape, device=DEVICE) for shape in shapes)
    ck = torch.randn(2, -(-S // d), K, E, device=DEVICE)
    return [q, k, v, ck]


def results(tensors, others, backend, dtype, **settings):
    """The output and the gradients."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
    q, k, v, ck = leaves
    named = {name: t.detach().to(dtype).requires_grad_() for name, t in others.items()}
    out = native_sparse_attention(q, k, v, ck, **named, **settings, backend=backend)
    g = torch.Generator().manual_seed(1)
    d_out = torch.randn(out.shape, generator=g).to(out)
    trained = [q, k, v, *(t for name, t in named.items() if name == "sinks")]
    return [out, *torch.autograd.grad(out, trained, d_out)]


@pytest.mark.slow(one_of=10)
@pytest.mark.parametrize("case", CASES)
def test_against_eager(case):
    settings = {**SIZES, **CASES[case]}
    d, causal = settings["compress_block_sliding_stride"], settings.get("causal", True)
    offset = settings.get("q_offset")
    if isinstance(offset, torch.Tensor):
        settings["q_offset"] = offset.to(DEVICE)
    tensors = draw(T=None if offset is None else 27, d=d)
    windows = 75 // d if causal else -(-75 // d)
    tensors[3] = tensors[3][:, :windows]
    others = {}
    if settings.pop("sinks", False):
        others["sinks"] = torch.randn(1, 4, device=DEVICE)
    if settings.pop("cq", False):
        others["cq"] = torch.randn_like(tensors[0])
    found = results(tensors, others, "triton", torch.float32, **settings)
    expected = results(tensors, others, "eager", torch.float64, **settings)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual.double(), wanted, atol=2e-5, rtol=2e-5)


def test_leaders_from_before():
    """The first tokens share the ranking of a token before this call."""
    settings = dict(SIZES, selection_stride=4, q_offset=41)
    tensors = draw(T=34)
    leaders = torch.tensor([[2, 0], [1, -1]], dtype=torch.int32, device=DEVICE)
    settings["leader_indices"] = leaders.expand(2, -1, -1).contiguous()
    found = results(tensors, {}, "triton", torch.float32, **settings)
    expected = results(tensors, {}, "eager", torch.float64, **settings)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual.double(), wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("importance", ["logits", "max"])
def test_packed(importance):
    settings = dict(SIZES, importance=importance, num_initial_blocks=1)
    q, k, v, ck = (t[:1] for t in draw())
    cu_seqlens = torch.tensor([0, 33, 34, 75])
    windows = 33 // 4 + 0 + 41 // 4
    tensors = [q, k, v, ck[:, :windows]]
    call = dict(settings, cu_seqlens=cu_seqlens)
    found = results(tensors, {}, "triton", torch.float32, **call)
    expected = results(tensors, {}, "eager", torch.float64, **call)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual.double(), wanted, atol=2e-5, rtol=2e-5)


def test_block_indices_are_those_of_the_selection():
    q, k, v, ck = draw()
    ck = ck[:, : 75 // 4]
    _, found = native_sparse_attention(q, k, v, ck, **SIZES, return_indices=True, backend="triton")
    names = [name for name in SIZES if name not in ("branches", "sliding_window_size")]
    alone = select_blocks(q, ck, **{name: SIZES[name] for name in names}, backend="triton")
    assert torch.equal(found, alone)


def test_derivatives_where_it_is_dense():
    """By SDPA: those of eager PyTorch."""
    tensors = draw(S=20)
    tensors[3] = tensors[3][:, :5]
    found, expected = (
        results(tensors, {}, backend, torch.float32, **SIZES) for backend in ("triton", "eager")
    )
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(64, 4, 128), (32, 8, 128), (9, 3, 64)], ids=str)
def test_half_precision(heads):
    """Of 4k tokens in bfloat16, with the same blocks: an error of at most twice that of eager
    PyTorch, and one ulp."""
    assert CUDA
    H, K, D = heads
    q, k, v, ck = draw(S=4096, H=H, K=K, E=D)
    settings = dict(
        compress_block_size=4, compress_block_sliding_stride=4, selection_block_size=64,
        num_selected_blocks=8, num_initial_blocks=1, num_local_blocks=8, sliding_window_size=0,
        branches=("selected",), importance="max",
    )  # fmt: skip
    q, k, v, ck = (t[:1].bfloat16().requires_grad_() for t in (q, k, v, ck))
    out, blocks = native_sparse_attention(
        q, k, v, ck, **settings, return_indices=True, backend="triton"
    )
    d_out = torch.randn_like(out)
    found = out, *torch.autograd.grad(out, (q, k, v), d_out)
    names = ("selection_block_size", "num_initial_blocks", "num_local_blocks")
    given = {name: settings[name] for name in names}

    def in_eager(dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        out = selected_attention(*leaves, blocks, **given, backend="eager")
        return out, *torch.autograd.grad(out, leaves, d_out.to(dtype))

    for a, e, x in zip(found, in_eager(torch.bfloat16), in_eager(torch.float64), strict=True):
        budget = 2 * (e.double() - x).norm() + 2**-8 * x.norm()
        assert (a.double() - x).norm() <= budget
