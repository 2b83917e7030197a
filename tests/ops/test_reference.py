"""The eager operations against `oracles.py`, in fp64: outputs, log-sum-exps, selections,
gradients."""

import itertools

import pytest
import torch

from native_sparse_attention import (
    compressed_attention,
    native_sparse_attention,
    select_blocks,
    selected_attention,
    sliding_window_attention,
)
from tests.helpers import oracles

# T, S, H, K, D, E
SHAPES = [
    (1, 1, 1, 1, 4, 4),
    (7, 7, 2, 2, 4, 4),
    (8, 8, 4, 1, 4, 6),
    (9, 9, 3, 1, 4, 4),
    (17, 17, 4, 2, 6, 4),
    (5, 23, 4, 2, 4, 4),
    (1, 16, 2, 1, 4, 4),
    (13, 29, 6, 2, 4, 2),
]


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("w", [0, 1, 4, 40])
@pytest.mark.parametrize("shape", SHAPES)
def test_window(shape, w, causal):
    T, S, H, K, D, E = shape
    q, k, v = normal(2, T, H, D), normal(2, S, K, D), normal(2, S, K, E)
    kwargs = dict(sliding_window_size=w, causal=causal)
    out, lse = sliding_window_attention(q, k, v, return_lse=True, **kwargs)
    expected, expected_lse = oracles.window(q, k, v, w, causal, S - T)
    close(out, expected)
    close(lse, expected_lse)
    # without a log-sum-exp another path may serve
    close(sliding_window_attention(q, k, v, **kwargs), expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("m", [0, 1, 3])
@pytest.mark.parametrize("shape, d", [*zip(SHAPES, itertools.cycle([1, 3, 4]), strict=False)])
def test_compressed(shape, d, m, causal):
    T, S, H, K, D, E = shape
    W = S // d if causal else -(-S // d)
    q, ck, cv = normal(2, T, H, D), normal(2, W, K, D), normal(2, W, K, E)
    mem_k, mem_v = (normal(K, m, D), normal(K, m, E)) if m else (None, None)
    kwargs = dict(compress_block_sliding_stride=d, mem_k=mem_k, mem_v=mem_v)
    kwargs |= dict(causal=causal, seq_len=S, return_lse=True)
    out, lse = compressed_attention(q, ck, cv, **kwargs)
    expected, expected_lse = oracles.compressed(q, ck, cv, mem_k, mem_v, d, causal, S - T)
    close(out, expected)
    close(lse, expected_lse)


@pytest.mark.slow(one_of=3)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("initial, local", [(0, 1), (1, 2), (0, 0), (2, 0)])
@pytest.mark.parametrize("shape", SHAPES)
def test_selected(shape, initial, local, shared, causal):
    T, S, H, K, D, E = shape
    s, n = 4, 2
    q, k, v = normal(2, T, H, D), normal(2, S, K, D), normal(2, S, K, E)
    C = -(-S // s)
    R = K if shared else H
    indices = torch.rand(2, T, R, C + 2).argsort(-1)[..., :n]  # distinct blocks
    indices = indices.masked_fill(indices >= C, -1).int()  # and empty slots
    gates = normal(2, T, R, n)
    kwargs = dict(selection_block_size=s, causal=causal, return_lse=True)
    kwargs |= dict(num_initial_blocks=initial, num_local_blocks=local)
    for gate in (None, gates):
        out, lse = selected_attention(q, k, v, indices, gates=gate, **kwargs)
        expected, expected_lse = oracles.selected(
            q, k, v, indices, s, causal, S - T, initial, local, gate
        )
        close(out, expected)
        close(lse, expected_lse)


SIZES = dict(
    compress_block_size=4, compress_block_sliding_stride=2, selection_block_size=4,
    num_selected_blocks=2, sliding_window_size=3,
)  # fmt: skip


def inputs(T=11, S=19, H=4, K=2, D=3, E=2, l=4, d=2, m=1):
    W = -(-S // d)
    tokens = (T, H, D), (S, K, D), (S, K, E), (W, K, D), (W, K, E)
    leaves = [normal(1, *shape) for shape in tokens]
    leaves += [torch.rand(1, T, H, 3, dtype=torch.float64), normal(1, T, H, D)]
    return [t.requires_grad_() for t in (*leaves, normal(K, m, D), normal(K, m, E))]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("use_diff_topk", [False, True])
@pytest.mark.parametrize("importance", ["logits", "probs", "max"])
def test_gradients(importance, use_diff_topk, causal):
    """gradcheck of the whole; with differentiable top-k the gates' forward is constant, so their
    part is held by test_selection and here only the rest is."""

    def whole(q, k, v, ck, cv, gates, cq, mem_k, mem_v):
        call = dict(cq=cq, mem_k=mem_k, mem_v=mem_v, importance=importance, causal=causal)
        return native_sparse_attention(q, k, v, ck, cv, gates, **call, **SIZES)

    if use_diff_topk:
        q, k, v = (t.detach() for t in inputs()[:3])
        indices = torch.randint(0, 4, (1, 11, 2, 1), dtype=torch.int32)
        gates = normal(1, 11, 2, 1)
        fn = lambda q, k, v, g: selected_attention(  # noqa: E731
            q, k, v, indices, selection_block_size=4, gates=g, causal=causal
        )
        leaves = [t.requires_grad_() for t in (q, k, v, gates)]
        assert torch.autograd.gradcheck(fn, leaves, fast_mode=True)
        return
    assert torch.autograd.gradcheck(whole, inputs(), fast_mode=True)


def test_empty_rows():
    """A query that sees nothing: output 0, log-sum-exp -inf, zero gradients, never NaN."""
    q, k, v = (normal(1, 6, 2, 4).requires_grad_() for _ in range(3))
    out, lse = compressed_attention(
        q, k[:, :1], v[:, :1], compress_block_sliding_stride=4, return_lse=True
    )
    assert (out[:, :4] == 0).all() and lse[:, :4].isneginf().all() and lse[:, 4:].isfinite().all()
    none = torch.full((1, 6, 2, 1), -1, dtype=torch.int32)
    chosen, lse_sel = selected_attention(
        q, k, v, none, selection_block_size=2, num_local_blocks=0, return_lse=True
    )
    assert (chosen == 0).all() and lse_sel.isneginf().all()
    grads = torch.autograd.grad((out.sum() + chosen.sum()) + lse[:, 4:].sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][:, :4] == 0).all()


@pytest.mark.parametrize("B, T, S", [(0, 5, 5), (2, 0, 7), (2, 0, 0), (0, 0, 0)])
def test_empty_tensors(B, T, S):
    shapes = (T, 4, 3), (S, 2, 3), (S, 2, 5), (S // 2, 2, 3), (S // 2, 2, 5), (T, 4, 3)
    tensors = [normal(B, *shape) for shape in shapes]
    out, indices = native_sparse_attention(*tensors, **SIZES, return_indices=True)
    assert out.shape == (B, T, 4, 5) and indices.shape == (B, T, 2, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    """Every dtype comes out as it went in, near the fp64 result (3 roundings of order eps)."""
    args = [t.detach().to(dtype) for t in inputs(T=19)]
    kwargs = SIZES | dict(num_selected_blocks=9)  # all blocks: no near-tie can matter
    names = ("cq", "mem_k", "mem_v")
    out = native_sparse_attention(*args[:6], **dict(zip(names, args[6:], strict=True)), **kwargs)
    exact = [t.double() for t in args]
    expected = native_sparse_attention(
        *exact[:6], **dict(zip(names, exact[6:], strict=True)), **kwargs
    )
    assert out.dtype == dtype
    eps = torch.finfo(dtype).eps
    assert (out.double() - expected).abs().max() <= 8 * eps * max(1.0, expected.abs().max())


def test_windows_that_are_not_the_sequences():
    """Too few would hide tokens; too many tell that S is not what it seems, as in a decoding step
    without seq_len, whose query would stand at position 0 and see nothing."""
    q, ck = normal(1, 1, 4, 8), normal(1, 9, 2, 8)
    sizes = SIZES | dict(compress_block_sliding_stride=4)
    w = sizes.pop("sliding_window_size")
    stride = dict(compress_block_sliding_stride=4)
    attend = lambda **kwargs: compressed_attention(q, ck, ck, **stride, **kwargs)  # noqa: E731
    with pytest.raises(ValueError, match="ck must hold the 0 windows.* S=1 tokens, got 9"):
        attend()
    with pytest.raises(ValueError, match="ck must hold the 0 windows.* S=1 tokens, got 9"):
        select_blocks(q, ck, **sizes)
    with pytest.raises(ValueError, match="ck must hold the 10 windows.* S=37 tokens, got 9"):
        select_blocks(q, ck, **sizes, seq_len=37, causal=False)
    with pytest.raises(ValueError, match="ck must hold the 10 windows.* S=40 tokens, got 9"):
        k, gates = normal(1, 40, 2, 8), normal(1, 1, 4, 3)
        native_sparse_attention(q, k, k, ck, ck, gates, sliding_window_size=w, **sizes)
    expected = attend(seq_len=37)
    close(attend(q_offset=36), expected)
    close(attend(q_offset=torch.tensor([36])), expected)
    assert (select_blocks(q, ck, **sizes, seq_len=37) >= 0).all()


def test_laws_of_the_branches():
    """n large enough is dense causal attention in branch 2, w >= S is in branch 3."""
    T, H, K, D = 37, 4, 2, 8
    q, k, v = normal(2, T, H, D), normal(2, T, K, D), normal(2, T, K, D)
    dense = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    for importance in ("logits", "probs", "max"):
        sizes = SIZES | dict(num_selected_blocks=10, importance=importance)
        del sizes["sliding_window_size"]
        indices = select_blocks(q, normal(2, T // 2, K, D), **sizes)
        close(selected_attention(q, k, v, indices, selection_block_size=4), dense)
    close(sliding_window_attention(q, k, v, sliding_window_size=T), dense)
    close(sliding_window_attention(q, k, v, sliding_window_size=T - 1), dense)


@pytest.mark.parametrize("backend", [None, (), "cuda", ("eager", "cuda")])
def test_bad_backend(backend):
    q, k, v = (normal(1, 4, 1, 4) for _ in range(3))
    if backend == ("eager", "cuda"):  # the first that can run is taken
        sliding_window_attention(q, k, v, sliding_window_size=1, backend=backend)
        return
    with pytest.raises(ValueError, match="backend must be"):
        sliding_window_attention(q, k, v, sliding_window_size=1, backend=backend)
