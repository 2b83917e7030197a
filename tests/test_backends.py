"""What `backend="auto"` stands for."""

from types import SimpleNamespace

import pytest
import torch

from native_sparse_attention import native_sparse_attention
from native_sparse_attention.ops import backends


@pytest.mark.parametrize(
    "compiling, on_cuda, T, S, first",
    [
        (False, True, 1, 1, "triton"),
        (False, False, 1000, 1000, "eager"),
        (True, True, 256, 256, "eager"),
        (True, True, 256, 257, "triton"),
        (True, True, 1, 1 << 16, "eager"),
        (True, False, 1000, 1000, "eager"),
    ],
)
def test_few_scores_inside_a_graph_are_the_compilers(monkeypatch, compiling, on_cuda, T, S, first):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    q, k = (SimpleNamespace(is_cuda=on_cuda, shape=(1, n, 1, 16)) for n in (T, S))
    assert backends.automatic(q, k)[0] == first


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
@pytest.mark.parametrize("T, kernels", [(256, False), (260, True)])
def test_graphs_of_few_scores_have_no_kernels(T, kernels):
    assert bool(operators_in_graphs(T, "cuda")) == kernels
