"""What `backend="auto"` stands for."""

import functools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from native_sparse_attention import (
    compressed_attention,
    native_sparse_attention,
    selected_attention,
    sliding_window_attention,
)
from native_sparse_attention.config import AttentionConfig
from native_sparse_attention.ops import chunked
from native_sparse_attention.ops.triton import backend as triton_backend
from tests.helpers.budget import DEVICE, assert_right, draw


def operators_in_graphs(T, device):
    """Our operators in the compiled layer of T tokens."""
    found = []

    def look(module, inputs):
        nodes = (node.target for node in module.graph.nodes)
        found.extend(str(name) for name in nodes if "native_sparse_attention" in str(name))
        return module.forward

    q, k, v, ck, cv = (torch.randn(1, n, 1, 16, device=device) for n in (T,) * 3 + (T // 4,) * 2)
    gates = torch.rand(1, T, 1, 3, device=device)
    call = dict(
        compress_block_size=8, compress_block_sliding_stride=4, selection_block_size=8,
        num_selected_blocks=2, sliding_window_size=9,
    )  # fmt: skip
    torch.compiler.reset()
    layer = torch.compile(native_sparse_attention, backend=look, fullgraph=True, dynamic=False)
    layer(q, k, v, ck, cv, gates, **call)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("T", [8, 300])
def test_graphs_have_the_kernels(T):
    """Whatever the length: torch's compiler has given wrong values for the specification."""
    assert operators_in_graphs(T, "cuda")


@pytest.mark.parametrize(
    "op, dtype, heads, width, T, s, held",
    [
        ("native_sparse_attention", torch.float32, 64, 192, 300, 64, 163),
        ("selected_attention", torch.float32, 32, 256, 300, 64, 99),
        ("decode_attention", torch.float32, 1, 256, 1, 64, 99),
        ("decode_attention", torch.float32, 16, 256, 4, 16, 99),
        ("decode_attention", torch.bfloat16, 64, 256, 1, 128, 99),
        ("native_sparse_attention", torch.bfloat16, 64, 256, 300, 128, None),
        ("native_sparse_attention", torch.float32, 64, 128, 300, 128, None),
        ("decode_attention", torch.float32, 64, 128, 16, 64, None),
    ],
)
def test_tiles_that_a_gpu_does_not_hold(monkeypatch, op, dtype, heads, width, T, s, held):
    """Are no error of a launch: `auto` takes another backend."""
    launch = pytest.importorskip("native_sparse_attention.kernels.common.launch")
    with FakeTensorMode():
        q, k = (
            torch.empty(1, n, h, width, dtype=dtype, device="cuda") for n, h in ((T, heads), (T, 1))
        )
    for memory in (99, 163, 227):
        monkeypatch.setattr(launch, "shared_memory", lambda memory=memory: memory * 1024)
        with torch.no_grad():
            config = AttentionConfig(selection_block_size=s, compress_block_sliding_stride=8)
            reasons = triton_backend.why_not(op, q, k, k, config=config)
        if held is None or memory > held:
            assert not reasons
        else:
            (reason,) = reasons
            assert f"this GPU holds {memory * 1024}" in reason


def in_pieces(op, monkeypatch):
    """The operation, whose `backend="pieces"` is eager in tiles or chunks whatever the size."""

    def run(*args, backend, **kwargs):
        with monkeypatch.context() as patch:
            if backend == "pieces":
                patch.setattr(chunked, "MAX_SCORES", 0)
                patch.setattr(chunked, "CHUNK_SCORES", 1 << 14)
                backend = "eager"
            return op(*args, backend=backend, **kwargs)

    return run


@pytest.mark.parametrize("backend", ["pieces", pytest.param("flex", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "dtype, causal",
    [(torch.float32, True), (torch.bfloat16, True), (torch.float16, False)],
    ids=str,
)
@pytest.mark.parametrize("branch", ["compressed", "selected", "window"])
def test_others_keep_the_budget_of_errors(monkeypatch, branch, dtype, causal, backend):
    """Outputs, log-sum-exps and all gradients, those of memories too, as the kernels' tests ask."""
    T, S, d, s = 150, 203, 8, 16
    H, K, D, E = 4, 2, 64, 32
    length = S if branch != "compressed" else S // d if causal else -(-S // d)
    q, k, v = draw(T, length, H, K, D, E, dtype)
    tensors = {"q": q, "k": k, "v": v}
    if branch == "compressed":
        memory = [torch.randn(K, 2, width, device=DEVICE).to(dtype) for width in (D, E)]
        tensors = {"q": q, "ck": k, "cv": v, "mem_k": memory[0], "mem_v": memory[1]}
        op, settings = compressed_attention, dict(compress_block_sliding_stride=d, seq_len=S)
    elif branch == "selected":
        lists = torch.rand(2, T, K, -(-S // s), device=DEVICE).argsort(-1)[..., :3].int()
        op = functools.partial(selected_attention, block_indices=lists)
        settings = dict(selection_block_size=s, num_initial_blocks=1, num_local_blocks=2)
    else:
        op, settings = sliding_window_attention, dict(sliding_window_size=40)
    op = in_pieces(op, monkeypatch)
    assert_right(op, tensors, dtype, backend, causal=causal, return_lse=True, **settings)
