"""The laws of docs/semantics.md on the Triton kernels: in the interpreter on a CPU, small and in
float32; on a GPU in 16 bits too, at sizes that the kernels of a Hopper take."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks.problem import pooled
from native_sparse_attention import (
    compressed_attention,
    native_sparse_attention,
    select_blocks,
    selected_attention,
    sliding_window_attention,
)
from tests.helpers.budget import CUDA, DEVICE
from tests.helpers.selections import sizes

pytest.importorskip("triton")

from native_sparse_attention.kernels.common import launch

pytestmark = pytest.mark.kernels

if CUDA:
    LENGTH, ENDS = 512, (64, 193, 320)
    L, D, S, N, W, E = 32, 16, 64, 3, 255, 128
    KINDS = [((32, 2), torch.bfloat16), ((8, 2), torch.bfloat16), ((2, 2), torch.bfloat16)]
    KINDS += [((32, 2), torch.float16), ((8, 2), torch.float16), ((8, 2), torch.float32)]
else:
    LENGTH, ENDS = 21, (17,)
    L, D, S, N, W, E = 8, 4, 8, 1, 9, 16
    KINDS = [((4, 2), torch.float32)]

SIZES = dict(sizes(L, D, S), num_selected_blocks=N)
LAYERS = {
    "logits": {},
    "probs, forced": dict(importance="probs", num_initial_blocks=1, num_local_blocks=2),
    "4 tokens a ranking, diff top-k": dict(selection_stride=4, use_diff_topk=True),
}
if CUDA:
    LAYERS |= {
        "each head": dict(query_heads_share_selected_kv=False),
        "4 tokens a ranking": dict(selection_stride=4),
        "interpolated": dict(interpolated_importance_score=True),
        "recomputed": dict(importance="probs", recompute=True),
    }
layers = pytest.mark.parametrize("setting", LAYERS)
kinds = pytest.mark.parametrize(
    "heads, dtype", KINDS, ids=lambda value: str(value).removeprefix("torch.")
)
both = pytest.mark.parametrize("causal", [True, False], ids=["causal", "not causal"])


@pytest.fixture(autouse=True)
def small_problems():
    """The kernels of a Hopper take these too."""
    with launch.using(
        dict.fromkeys(
            (
                "flash_sm90",
                "union_sm90",
                "softmax_mass_sm90",
            ),
            True,
        )
    ):
        yield


def draw(heads, dtype, T=LENGTH, B=1):
    """What belongs to tokens: q, k, v and the gates."""
    H, K = heads
    shapes = {"q": (B, T, H, E), "k": (B, T, K, E), "v": (B, T, K, E)}
    tensors = {name: torch.randn(shape, device=DEVICE) for name, shape in shapes.items()}
    tensors["branch_gates"] = torch.rand(B, T, H, 3, device=DEVICE)
    return {name: t.to(dtype) for name, t in tensors.items()}


def attend(tokens, causal=True, **settings):
    """Output and selection of the layer, gradients of the windows reaching the tokens."""
    q, k, v, gates = tokens.values()
    ck, cv = (pooled(t, L, D) for t in (k, v))
    settings = {**SIZES, "sliding_window_size": W, **settings}
    return native_sparse_attention(
        q, k, v, ck, cv, gates, causal=causal, return_indices=True, backend="triton", **settings
    )


def leaves(tensors):
    return {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}


def close(actual, expected):
    """Every row within a few units in the last place of its size and of the usual size."""
    assert actual.isfinite().all()
    size = expected.double().norm(dim=-1)
    error = (actual.double() - expected.double()).norm(dim=-1)
    allowed = max(8 * torch.finfo(actual.dtype).eps, 2e-5)
    assert (error <= allowed * (size + size.mean())).all()


def chosen_alike(one, other):
    """Which tokens chose the same blocks: all but a few, between whose scores rounding decides."""
    one, other = (lists.sort(dim=-1).values for lists in (one, other))
    alike = (one == other).all(-1).all(-1)
    assert alike.float().mean() >= (0.98 if CUDA else 1.0)
    return alike


@layers
@kinds
def test_the_future_cannot_move_the_past(heads, dtype, setting):
    tokens, others = draw(heads, dtype), draw(heads, dtype)
    with torch.no_grad():
        out, lists = attend(tokens, **LAYERS[setting])
        for end in ENDS:
            shorter = {name: t[:, :end] for name, t in tokens.items()}
            longer = {name: torch.cat((t, others[name][:, end:]), 1) for name, t in shorter.items()}
            for given in (shorter, longer):
                past, ranked = attend(given, **LAYERS[setting])
                alike = chosen_alike(ranked[:, :end], lists[:, :end])
                close(past[:, :end][alike], out[:, :end][alike])


@layers
@kinds
def test_the_past_has_no_gradient_of_the_future(heads, dtype, setting):
    tokens = leaves(draw(heads, dtype))
    out, _ = attend(tokens, **LAYERS[setting])
    end = ENDS[-1]
    grads = torch.autograd.grad(out[:, :end].float().square().sum(), list(tokens.values()))
    for name, grad in zip(tokens, grads, strict=True):
        assert grad.isfinite().all() and (grad[:, end:] == 0).all(), name
        assert (grad[:, :end].abs().amax((-1, -2)) > 0).float().mean() > 0.9, name


@pytest.mark.slow(one_of=3)
@layers
@kinds
def test_a_row_alone_is_the_row_in_a_batch(heads, dtype, setting):
    """Gradients too."""
    tokens, found = draw(heads, dtype, B=2), []
    d_out = torch.randn_like(tokens["q"])
    for rows in (slice(1, 2), slice(0, 2)):
        some = leaves({name: t[rows] for name, t in tokens.items()})
        out, lists = attend(some, **LAYERS[setting])
        grads = torch.autograd.grad(out, list(some.values()), d_out[rows])
        found.append([t[-1] for t in (lists, out, *grads)])
    (lists, *alone), (expected_lists, *batch) = found
    assert torch.equal(lists, expected_lists)
    for actual, expected in zip(alone, batch, strict=True):
        close(actual, expected)


def all_blocks(q, k, causal, importance):
    ck = pooled(k, L, D)
    if not causal and LENGTH % D:  # a window more, of the last tokens
        ck = torch.cat((ck, k[:, -1:]), 1)
    settings = {**SIZES, "num_selected_blocks": -(-LENGTH // S), "importance": importance}
    return select_blocks(q, ck, seq_len=LENGTH, causal=causal, backend="triton", **settings)


def all_keys(branch, q, k, v, causal):
    """A branch in the settings in which it attends to all keys."""
    call = dict(causal=causal, backend="triton")
    if branch == "compressed":
        return compressed_attention(q, k, v, compress_block_sliding_stride=1, **call)
    if branch == "window":
        return sliding_window_attention(q, k, v, sliding_window_size=LENGTH - 1, **call)
    with torch.no_grad():
        lists = all_blocks(q, k, causal, branch.split()[-1])
    return selected_attention(q, k, v, lists, selection_block_size=S, **call)


def dense(branch, q, k, v, causal):
    """[b h t d]. A window of one token is seen by those behind it."""
    behind = branch == "compressed" and causal
    if behind:
        q, k, v = q[:, :, 1:], k[:, :, :-1], v[:, :, :-1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return F.pad(out, (0, 0, 1, 0)) if behind else out


@both
@kinds
@pytest.mark.parametrize("branch", ["compressed", "selected logits", "selected probs", "window"])
def test_all_keys_are_dense_attention(branch, heads, dtype, causal):
    """All blocks, a window as long as the keys, summaries of one token each; gradients too."""
    given = leaves({name: t for name, t in draw(heads, dtype).items() if name in ("q", "k", "v")})
    out = all_keys(branch, *given.values(), causal)
    exact = [t.detach().double().transpose(1, 2).requires_grad_() for t in given.values()]
    expected = dense(branch, *exact, causal)
    d_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, list(given.values()), d_out)
    expected_grads = torch.autograd.grad(expected, exact, d_out.double().transpose(1, 2))
    for actual, right in zip((out, *grads), (expected, *expected_grads), strict=True):
        close(actual, right.transpose(1, 2))


@kinds
def test_two_sided_sees_everything(heads, dtype):
    """Not causal, every token moves every output: through the window, a block or a summary."""
    tokens = leaves(draw(heads, dtype, T=LENGTH // D * D))
    out, _ = attend(tokens, causal=False)
    for i in (0, out.shape[1] // 2, out.shape[1] - 1):
        (grad,) = torch.autograd.grad(out[:, i].float().sum(), tokens["v"], retain_graph=True)
        assert (grad.abs().sum((-1, -2)) > 0).all()


@kinds
@pytest.mark.parametrize("importance", ["logits", "probs"][: 1 + CUDA])
def test_diff_topk_changes_gradients_alone(importance, heads, dtype):
    tokens, found = leaves(draw(heads, dtype)), []
    for gated in (False, True):
        out, _ = attend(tokens, importance=importance, use_diff_topk=gated)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), tokens["k"])])
    close(found[1][0], found[0][0])
    assert (found[1][1] - found[0][1]).abs().max() > 1e-4


@kinds
def test_a_query_that_sees_nothing(heads, dtype):
    """Output 0, log-sum-exp -inf, gradient 0."""
    q, k, v, _ = leaves(draw(heads, dtype)).values()
    ck, cv = (pooled(t, L, D) for t in (k, v))
    lists = torch.zeros(*q.shape[:2], k.shape[2], 2, dtype=torch.int32, device=DEVICE)
    lists[:, :D] = -1
    call = dict(return_lse=True, backend="triton")
    for out, lse in (
        compressed_attention(q, ck, cv, compress_block_sliding_stride=D, **call),
        selected_attention(
            q, k, v, lists, selection_block_size=S, num_local_blocks=0, **call
        ),
    ):  # fmt: skip
        assert (out[:, :D] == 0).all() and lse[:, :D].isneginf().all()
        assert lse[:, D:].isfinite().all()
        grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        assert all(g.isfinite().all() for g in grads) and (grads[0][:, :D] == 0).all()
