"""What `backend="auto"` stands for."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from native_sparse_attention import native_sparse_attention
from native_sparse_attention.config import AttentionConfig
from native_sparse_attention.ops.call import Call
from native_sparse_attention.ops.triton import backend as triton_backend


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
            reasons = triton_backend.why_not(op, Call(q, k, k), config)
        if held is None or memory > held:
            assert not reasons
        else:
            (reason,) = reasons
            assert f"this GPU holds {memory * 1024}" in reason
