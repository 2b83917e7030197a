"""The whole layer as one operator against its branches: in the interpreter on a CPU, on a GPU in
every dtype by the error budget."""

import functools
import gc
import weakref

import pytest
import torch

from native_sparse_attention import BlockSizes, SparseAttention, native_sparse_attention
from native_sparse_attention.ops.triton import attention as fused
from native_sparse_attention.ops.triton.operator import aligned
from tests.helpers.budget import CUDA, DEVICE
from tests.helpers.composition import assert_layer_right
from tests.helpers.interpreter import not_of_3_4

pytest.importorskip("triton")


pytestmark = pytest.mark.kernels

L, D_, S_, N, W = 8, 4, 8, 2, 21
SETTINGS = {
    "compress_block_size": L,
    "compress_block_sliding_stride": D_,
    "selection_block_size": S_,
    "num_selected_blocks": N,
    "sliding_window_size": W,
}
FORCED = {"num_initial_blocks": 1, "num_local_blocks": 2}
SIZES = (2, 150, 211) if CUDA else (1, 11, 37)
# not causal, where all keys are queries too
LENGTH = 211 if CUDA else 25


def test_whole_at_any_address():
    """Copied where it is not contiguous or begins within 16 bytes, and else as it is."""
    t = torch.arange(33.0, dtype=torch.bfloat16, device=DEVICE)
    for part in (t[1:], t[:32].view(4, 8).T):
        found = aligned(part)
        assert torch.equal(found, part) and found.is_contiguous() and found.data_ptr() % 16 == 0
    assert aligned(t[:32]).data_ptr() == aligned(t[8:]).data_ptr() - 16 == t.data_ptr()


def draw(dtype=torch.float32, heads=(4, 2, 16, 16), causal=True, memory=2, own=False, raw=True):
    """The tensors of a call: with memory, with a window of its own, with raw queries."""
    (B, T, S), (H, K, D, E) = SIZES, heads
    if not causal:
        T = S = LENGTH
    W = S // D_ if causal else -(-S // D_)
    shapes = {
        "q": (B, T, H, D), "k": (B, S, K, D), "v": (B, S, K, E), "ck": (B, W, K, D),
        "cv": (B, W, K, E), "cq": (B, T, H, D) if raw else None,
        "mem_k": (K, memory, D) if memory else None, "mem_v": (K, memory, E) if memory else None,
        "window_k": (B, S, K, D) if own else None, "window_v": (B, S, K, E) if own else None,
    }  # fmt: skip
    tensors = {n: torch.randn(s, device=DEVICE).to(dtype) for n, s in shapes.items() if s}
    return tensors | {"branch_gates": torch.rand(B, T, H, 3, device=DEVICE).to(dtype)}


DTYPES = [torch.bfloat16, torch.float16, torch.float32] if CUDA else [torch.float32]
HEADS = [(4, 2, 64, 64), (16, 1, 128, 128), (6, 2, 80, 48)] if CUDA else [(4, 2, 16, 16)]


@pytest.mark.slow(one_of=4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not causal"])
@pytest.mark.parametrize("importance", ["logits", "probs", "max"])
def test_layer(dtype, heads, causal, importance):
    tensors = draw(dtype, heads, causal)
    assert_layer_right(tensors, SETTINGS, causal, FORCED, importance=importance)


@pytest.mark.parametrize(
    "memory, own, raw, recompute",
    [(0, False, False, False), (0, True, False, False), (2, True, True, True)],
)
def test_optional_tensors(memory, own, raw, recompute):
    tensors = draw(memory=memory, own=own, raw=raw)
    assert_layer_right(tensors, SETTINGS, recompute=recompute)


GROUPED = [(12, 1, 16, 16), (2, 2, 16, 16)] if CUDA else [(3, 1, 16, 16)]


@pytest.mark.parametrize("heads", GROUPED, ids=str)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "each"])
@pytest.mark.parametrize("stride", [1, 4])
def test_selections(heads, shared, stride):
    tensors = draw(heads=heads)
    kwargs = {"selection_stride": stride, "query_heads_share_selected_kv": shared}
    B, T, S = SIZES
    if stride > 1:
        first = (S - T) % stride
        assert first, "the first group was ranked before"
        ranks = heads[1] if shared else heads[0]
        leaders = torch.full((B, ranks, N), -1, dtype=torch.int32, device=DEVICE)
        leaders[..., 0] = 1
        kwargs["leader_indices"] = leaders
    assert_layer_right(tensors, SETTINGS, **kwargs)


def test_blocks_as_long_as_a_tile_of_keys():
    """With one ranking for all tokens of a block, and values of odd width."""
    B, T, H, K, D, E, W = 1, 56, 2, 1, 8, 5, 14
    shapes = {
        "q": (B, T, H, D), "k": (B, T, K, D), "v": (B, T, K, E), "ck": (B, W, K, D),
        "cv": (B, W, K, E), "branch_gates": (B, T, H, 3),
    }  # fmt: skip
    tensors = {name: torch.randn(shape, device=DEVICE) for name, shape in shapes.items()}
    sizes = {**SETTINGS, "selection_block_size": 16, "selection_stride": 16}
    call = functools.partial(native_sparse_attention, **tensors, **sizes)
    torch.testing.assert_close(call(backend="triton"), call(backend="eager"), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("n", [0, 5])
def test_few_and_many_blocks(n):
    tensors = draw()
    call = functools.partial(native_sparse_attention, **{**SETTINGS, "num_selected_blocks": n})
    torch.testing.assert_close(
        call(**tensors, backend="triton"), call(**tensors, backend="eager"), atol=2e-5, rtol=2e-5
    )


@pytest.mark.parametrize("given", [("window_k",), ("window_v",), ("window_k", "window_v")])
def test_window_that_shares_a_tensor(given):
    """k handed in again as the window's, or one of its tensors alone, is a window of its own."""
    results = []
    torch.manual_seed(0)
    leaves = {n: t.requires_grad_() for n, t in draw(memory=0, raw=False).items()}
    other = torch.randn_like(leaves["v"]).requires_grad_()
    window = {"window_k": leaves["k"], "window_v": other}
    for backend in ("triton", "eager"):
        out = native_sparse_attention(
            **leaves, **{n: window[n] for n in given}, **SETTINGS, **FORCED, backend=backend
        )
        grads = torch.autograd.grad(
            out.square().sum(), [*leaves.values(), other], materialize_grads=True
        )
        results.append([out, *grads])
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("forced", [{}, FORCED], ids=["free", "forced"])
def test_strided_keys(forced):
    """The same bits however keys and values lie."""
    tensors = draw(heads=(18, 2, 16, 16))
    results = []
    for transposed in (False, True):
        leaves = dict(tensors)
        if transposed:
            leaves |= {n: tensors[n].transpose(1, 2).contiguous().transpose(1, 2) for n in "kv"}
        leaves = {name: t.detach().requires_grad_() for name, t in leaves.items()}
        out = native_sparse_attention(**leaves, backend="triton", causal=True, **SETTINGS, **forced)
        results.append(torch.autograd.grad(out.square().sum(), list(leaves.values())))
    assert all(torch.equal(*grads) for grads in zip(*results, strict=True))


def test_leaders_that_make_no_sense():
    """Forced, repeated, past the keys or ahead of the query: as in eager PyTorch."""
    tensors = draw(memory=0)
    shape = (tensors["q"].shape[0], tensors["k"].shape[2], N)
    for blocks in ((0, 0), (1, 1), (2, 999), (4, 3)):
        leaders = torch.tensor(blocks, dtype=torch.int32, device=DEVICE).expand(shape)
        outs = [
            native_sparse_attention(
                **tensors, **SETTINGS, selection_stride=4, leader_indices=leaders, backend=backend
            )
            for backend in ("triton", "eager")
        ]
        torch.testing.assert_close(*outs, atol=2e-5, rtol=2e-5)


def test_twice_the_same():
    """Bit for bit, gradients too."""
    tensors = {n: t.requires_grad_() for n, t in draw().items()}
    runs = []
    for _ in range(2):
        out = native_sparse_attention(**tensors, **SETTINGS, **FORCED, backend="triton")
        runs.append([out, *torch.autograd.grad(out.square().sum(), tensors.values())])
    assert all(torch.equal(a, b) for a, b in zip(*runs))


def test_one_node():
    """Between the inputs and the output lies one node of autograd."""
    tensors = {n: t.requires_grad_() for n, t in draw().items()}
    out = native_sparse_attention(**tensors, **SETTINGS, backend="triton")
    assert all(
        node is None or "AccumulateGrad" in node.name() for node, _ in out.grad_fn.next_functions
    )


@pytest.mark.slow(one_of=2)
@not_of_3_4
@pytest.mark.parametrize("recompute", [False, True])
def test_what_branches_gave_is_gone_before_most_of_the_backward(recompute, monkeypatch, as_written):
    """Unless it is asked for again: the second of two passes finds what the first one found."""
    form, finish = fused.backward_preprocess, fused.attend_backward
    alive = []

    def backward_preprocess(d_out, kept, gates):
        alive[:] = [weakref.ref(t.untyped_storage()) for t in kept[:3]]
        return form(d_out, kept, gates)

    def attend_backward(*call):
        if not CUDA:
            gc.collect()  # frames of the interpreter
        found.append([ref() is not None for ref in alive])
        return finish(*call)

    monkeypatch.setattr(fused, "backward_preprocess", backward_preprocess)
    monkeypatch.setattr(fused, "attend_backward", attend_backward)
    tensors = {n: t.requires_grad_() for n, t in draw().items()}
    out = native_sparse_attention(**tensors, **SETTINGS, recompute=recompute, backend="triton")
    found, leaves, bwd = [], list(tensors.values()), torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, bwd, retain_graph=True)
    second = torch.autograd.grad(out, leaves, bwd)
    assert found == ([[], []] if recompute else [[True] * 3, [False] * 3])
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, leaves, bwd)


@pytest.mark.parametrize("stride, use_diff_topk", [(1, False), (4, True)])
def test_module(stride, use_diff_topk):
    """SparseAttention over these kernels is that over eager PyTorch, gradients and cache too."""
    torch.manual_seed(0)
    layer = SparseAttention(
        32, 16, 2, 9, 8, 8, 2, kv_heads=1, causal=True, compress_block_sliding_stride=4,
        selection_stride=stride, use_diff_topk=use_diff_topk, use_triton_kernel=True,
        num_compressed_mem_kv=2,
    ).to(DEVICE)  # fmt: skip
    for parameter in (layer.compress_mem_kv, layer.k_intrablock_positions):
        torch.nn.init.normal_(parameter)
    x = torch.randn(1, 29, 32, device=DEVICE)
    results = []
    for backend in ("triton", "eager"):
        layer.backend = backend
        out = layer(x)
        grads = torch.autograd.grad(out.square().sum(), list(layer.parameters()))
        with torch.no_grad():
            first, cache = layer(x[:, :22], return_cache=True)
            rest, _ = layer(x[:, 22:], cache=cache, return_cache=True)
        torch.testing.assert_close(torch.cat((first, rest), 1), out, atol=2e-5, rtol=2e-5)
        results.append([out, *grads])
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.slow
def test_one_graph_for_all_lengths():
    """`fullgraph=True`, forward and backward; a new length compiles nothing."""
    layer = SparseAttention(
        32, 16, 2, 9, 8, 8, 2, kv_heads=1, causal=True, compress_block_sliding_stride=4,
        use_diff_topk=True, use_triton_kernel=True, block_sizes=BlockSizes(*[32] * 18),
    ).to(DEVICE)  # fmt: skip
    graphs = []

    def count(module, inputs):
        graphs.append(module)
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=count)
    for length in (24, 29):
        x = torch.randn(1, length, 32, device=DEVICE, requires_grad=True)
        results = []
        # in this order: the first call ever changes what einops knows, for which it compiles anew
        for call in (layer, compiled):
            out = call(x)
            results.append([out, *torch.autograd.grad(out.square().sum(), [x])])
        for actual, expected in zip(*results):
            torch.testing.assert_close(actual, expected)
    assert len(graphs) == 1
