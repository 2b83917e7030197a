"""The gates of differentiable top-k in Triton against `ops/reference.py`, their specification,
for the blocks that the kernels chose: in the interpreter on a CPU, on a GPU in every dtype by the
error budget."""

import pytest
import torch

from native_sparse_attention import (
    compressed_attention,
    native_sparse_attention,
    select_blocks,
    selected_attention,
    sliding_window_attention,
)
from native_sparse_attention.ops import reference
from tests.helpers.budget import CUDA, DEVICE
from tests.helpers.budget import assert_right as assert_layer_right
from tests.helpers.selections import DTYPE, SETTINGS, draw, sizes

pytestmark = pytest.mark.kernels

INTERPOLATED = dict(importance="logits", interpolated_importance_score=True)
PROBS = dict(importance="probs")


def eager_gates(q, ck, mem_k, lists, S, q_offset, scale, settings):
    """The gates of the blocks of `lists` [B T R n]."""
    call = dict(settings, seq_len=S, q_offset=q_offset, scale=scale)
    return reference.selection_gates(q, ck, lists, mem_k=mem_k, **call)


def gradients(fn, tensors, weights, dtype):
    leaves = [None if t is None else t.to(dtype).requires_grad_() for t in tensors]
    gates = fn(*leaves)
    there = [t for t in leaves if t is not None]
    return gates, torch.autograd.grad(
        (gates * weights.to(gates.dtype)).sum(), there, materialize_grads=True
    )


def assert_right(tensors, S, q_offset=None, scale=None, **changed):
    """Gates of 1, and gradients within twice the error of eager PyTorch in the same dtype, one ulp
    of the largest, and one float32 ulp of their terms."""
    q, ck, _ = tensors
    settings = {**SETTINGS, **changed}
    start = S - q.shape[1] if q_offset is None else q_offset
    call = dict(settings, seq_len=S, q_offset=start, scale=scale, return_gates=True)

    def kernels(q, ck, mem_k):
        nonlocal lists
        lists, gates = select_blocks(q, ck, mem_k=mem_k, backend="triton", **call)
        return gates

    def eager(q, ck, mem_k):
        return eager_gates(q, ck, mem_k, lists, S, start, scale, settings)

    lists = None
    ranks = ck.shape[2] if settings["query_heads_share_selected_kv"] else q.shape[2]
    weights = torch.randn(*q.shape[:2], ranks, settings["num_selected_blocks"], device=DEVICE)
    gates, actual = gradients(kernels, tensors, weights, q.dtype)
    assert gates.dtype == torch.float32 and (gates == 1).all()
    assert (lists >= 0).any(), "nothing was chosen"
    _, exact = gradients(eager, tensors, weights, torch.float64)
    _, low = gradients(eager, tensors, weights, q.dtype)
    norms = [t.double().norm(dim=-1).max() for t in tensors if t is not None]
    width = q.shape[-1] ** -0.5 if scale is None else abs(scale)
    logits = norms[0] * max(norms[1:]) * width
    terms = weights.norm(dim=-1).max() * max(norms) * width * (1 + logits)
    for name, value, right, eager_value in zip(("dq", "dck", "dmem_k"), actual, exact, low):
        assert value.dtype == q.dtype and value.isfinite().all(), name
        error, most = (value.double() - right).abs().max(), right.abs().max()
        assert settings["importance"] == "logits" or most > 0, name
        lowp = (eager_value.double() - right).abs().max()
        rounding = torch.finfo(torch.float32).eps * terms
        ulp = torch.finfo(q.dtype).eps * most + rounding
        assert error <= 2 * lowp + ulp, f"{name}: {error:.2e} > 2 x {lowp:.2e} + {ulp:.2e}"


# T, S, (H, K, D), changes of the settings: among them windows over several blocks and blocks in one
# window, heads that rank apart, the future, and groups of tokens
CASES = {
    "logits": (9, 37, (6, 2, 24), {}),
    "logits, d > s": (
        7, 29, (2, 1, 16),
        dict(sizes(12, 6, 2), causal=False, query_heads_share_selected_kv=False),
    ),
    "interpolated": (6, 37, (2, 1, 16), INTERPOLATED),
    "interpolated, d > s": (9, 29, (2, 1, 16), dict(sizes(8, 8, 4), **INTERPOLATED)),
    "probs": (9, 37, (6, 2, 24), PROBS),
    "probs, apart": (
        5, 19, (2, 1, 16),
        dict(sizes(9, 2, 4), causal=False, query_heads_share_selected_kv=False, **PROBS),
    ),
    "probs, d > s": (6, 29, (5, 1, 16), dict(sizes(12, 6, 2), num_local_blocks=2, **PROBS)),
    "probs, groups": (
        11, 31, (2, 1, 16),
        dict(selection_stride=4, num_selected_blocks=5, num_initial_blocks=0, **PROBS),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_gates(case):
    T, S, heads, changed = CASES[case]
    place = {n: changed[n] for n in ("causal",) if n in changed}
    d = changed.get("compress_block_sliding_stride", 4)
    dtype = DTYPE if case in ("logits", "probs") else torch.float32
    assert_right(draw(T, S, *heads, d=d, dtype=dtype, B=1, **place), S, **changed)


@pytest.mark.parametrize("rule", [INTERPOLATED, PROBS], ids=["interpolated", "probs"])
def test_rows_that_start_at_different_places(rule):
    """In the middle of groups, whose leaders came before."""
    starts = torch.tensor([38, 5], device=DEVICE)
    tensors = draw(6, 48, 2, 1, 16, dtype=torch.float32)
    assert_right(tensors, 48, q_offset=starts, selection_stride=4, scale=-0.4, **rule)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [{}, INTERPOLATED, PROBS], ids=["logits", "interpolated", "probs"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "each"])
@pytest.mark.parametrize(
    "dtype, heads",
    [(torch.bfloat16, heads) for heads in [(16, 1, 128), (4, 4, 64), (6, 2, 80), (64, 1, 192)]]
    + [(torch.float16, (8, 2, 128)), (torch.float16, (3, 1, 256)), (torch.float32, (6, 2, 64))],
    ids=lambda value: str(value).replace("torch.", ""),
)
def test_heads_and_dtypes(dtype, heads, shared, causal, rule):
    for T, S, changed in (
        (131, 2111, dict(sizes(32, 16, 64), num_selected_blocks=13)),
        (300, 300, dict(sizes(24, 4, 12), selection_stride=4, num_local_blocks=3)),
        (65, 1031, dict(sizes(16, 16, 4), num_selected_blocks=40)),
    ):
        d = changed["compress_block_sliding_stride"]
        tensors = draw(T, S, *heads, d=d, causal=causal, dtype=dtype, B=2)
        kwargs = dict(changed, causal=causal, query_heads_share_selected_kv=shared, **rule)
        assert_right(tensors, S, **kwargs)


@pytest.mark.parametrize("rule", [{}, PROBS], ids=["logits", "probs"])
def test_strided_inputs_and_a_repeat(rule):
    """Heads before tokens, as a layer lays them out, and a second time: bit for bit the same."""
    S = 700 if CUDA else 22
    tensors = draw(S // 3, S, 4, 2, 16, dtype=torch.float32, B=1 + CUDA)
    call = dict(sizes(8, 4, 8), num_selected_blocks=3, seq_len=S, backend="triton", **rule)
    strided = [t.transpose(-3, -2).contiguous().transpose(-3, -2) for t in tensors]
    runs = []
    for leaves in (tensors, strided):
        q, ck, mem_k = (t.detach().requires_grad_() for t in leaves)
        _, gates = select_blocks(q, ck, mem_k=mem_k, return_gates=True, **call)
        weights = torch.linspace(-1, 1, gates.numel(), device=DEVICE).view(gates.shape)
        grads = torch.autograd.grad((gates * weights).sum(), (q, ck, mem_k), materialize_grads=True)
        runs.append(grads)
    assert all(torch.equal(a, b) for a, b in zip(*runs))


def test_nothing_to_rank():
    q, ck, _ = draw(3, 3, 2, 1, 16)
    call = dict(num_selected_blocks=2, return_gates=True, **sizes(8, 4, 8))
    for backend in ("triton", "eager"):
        lists, gates = select_blocks(q.requires_grad_(), ck, backend=backend, **call)
        assert (lists == -1).all() and (gates == 1).all() and gates.shape == lists.shape


WINDOW = 21
SMALL = (150, 212, 4, 2, 64) if CUDA else (6, 28, 2, 1, 16)


@pytest.mark.parametrize(
    "shape, layer, changed",
    [
        (SMALL, sizes(8, 4, 8), dict(importance="probs", num_local_blocks=2)),
        (SMALL, sizes(8, 4, 8), dict(recompute=True, selection_stride=2)),
        *(
            ((512, 640, H, 2, 128), sizes(32, 16, 64), dict(importance=importance, **changed))
            for H in (32, 8)
            for importance in ("probs", "logits")
            for changed in ({}, {"selection_stride": 4})
            if CUDA
        ),
    ],
    ids=str,
)
def test_layer(shape, layer, changed):
    """The fused operator within the budget of its branches, under the selection that it made."""
    T, S, H, K, D = shape
    layer = dict(layer, num_selected_blocks=2)
    d, s = layer["compress_block_sliding_stride"], layer["selection_block_size"]
    dtype = torch.bfloat16 if CUDA else torch.float32
    shapes = {
        "q": (1, T, H, D), "k": (1, S, K, D), "v": (1, S, K, D), "ck": (1, S // d, K, D),
        "cv": (1, S // d, K, D), "mem_k": (K, 2, D), "mem_v": (K, 2, D),
    }  # fmt: skip
    if "selection_stride" in changed:
        shapes["cq"] = shapes["q"]
    tensors = {n: torch.randn(shape, device=DEVICE).to(dtype) for n, shape in shapes.items()}
    tensors["branch_gates"] = torch.rand(1, T, H, 3, device=DEVICE).to(dtype)
    call = dict(layer, sliding_window_size=WINDOW, use_diff_topk=True, **changed)
    with torch.no_grad():
        _, lists = native_sparse_attention(**tensors, **call, return_indices=True, backend="triton")
    settings = {**SETTINGS, **layer, **changed, "num_initial_blocks": 0}
    forced = dict(num_initial_blocks=0, num_local_blocks=settings["num_local_blocks"])

    def op(q, k, v, ck, cv, mem_k, mem_v, branch_gates, backend, cq=None):
        if backend == "triton":
            return native_sparse_attention(
                q, k, v, ck, cv, branch_gates, cq=cq, mem_k=mem_k, mem_v=mem_v, backend=backend,
                **call,
            )  # fmt: skip
        cq = q if cq is None else cq
        gates = eager_gates(cq, ck, mem_k, lists, S, S - T, None, settings)
        outs = (
            compressed_attention(
                cq, ck, cv, mem_k=mem_k, mem_v=mem_v, seq_len=S, backend=backend,
                compress_block_sliding_stride=d,
            ),
            selected_attention(
                q, k, v, lists, gates=gates, selection_block_size=s, backend=backend, **forced
            ),
            sliding_window_attention(q, k, v, sliding_window_size=WINDOW, backend=backend),
        )  # fmt: skip
        return reference.combine_branches(outs, branch_gates)

    assert_layer_right(op, tensors, dtype)


def test_sinks_that_are_strided():
    q, ck = (torch.randn(1, n, h, 16, device=DEVICE) for n, h in ((24, 2), (12, 1)))
    grads = []
    for sinks in (torch.ones(1, device=DEVICE).expand(2), torch.ones(2, device=DEVICE)):
        leaves = [t.clone().requires_grad_() for t in (q, ck)]
        leaves.append(sinks.detach().requires_grad_())
        _, gates = select_blocks(
            *leaves[:2], sinks=leaves[2], compress_block_size=2, selection_block_size=4,
            compress_block_sliding_stride=2, num_selected_blocks=2, importance="probs",
            return_gates=True, backend="triton",
        )  # fmt: skip
        weight = torch.linspace(0, 1, gates.numel(), device=DEVICE).view_as(gates)
        grads.append(torch.autograd.grad((gates * weight).sum(), leaves))
    torch.testing.assert_close(grads[0], grads[1])
