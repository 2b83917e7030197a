"""torch.compile: results and gradients of eager PyTorch, and no more compilations than shapes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from native_sparse_attention import SparseAttention

GEOMETRY = dict(
    dim=16, dim_head=8, heads=2, sliding_window_size=8, compress_block_size=8,
    compress_block_sliding_stride=4, selection_block_size=8, num_selected_blocks=2,
)  # fmt: skip

FRESH = """
import torch
from native_sparse_attention import SparseAttention

graphs = []

def count(graph, inputs):
    graphs.append(graph)
    return graph.forward

layer = SparseAttention(16, 8, 2, 8, 8, 8, 2, causal=True, compress_block_sliding_stride=4)
compiled = torch.compile(layer, backend=count, fullgraph=True)
counts = []
for n in (40, 40, 41, 50):
    compiled(torch.randn(2, n, 16))
    counts.append(len(graphs))
print(*counts)
"""


def test_no_second_compilation_in_a_fresh_process():
    """The first length is compiled for itself, the second for all."""
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["1", "1", "2", "2"]


def results(layer, x):
    """The output, and gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    out = layer(x)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    return [out, *torch.autograd.grad(out.square().sum(), [x, *parameters], allow_unused=True)]


@pytest.mark.parametrize(
    "settings",
    [
        dict(causal=True, importance="probs", use_diff_topk=True, attention_sinks=True),
        dict(causal=False, soft_cap=5.0, num_compressed_mem_kv=0, branch_kv="independent"),
        dict(causal=True, selection_stride=4, interpolated_importance_score=True,
             num_compressed_mem_kv=2),
    ],
    ids=["probs", "both_sides", "interpolated"],
)  # fmt: skip
def test_traced_gradients(settings):
    torch.manual_seed(0)
    layer = SparseAttention(**GEOMETRY, **settings)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 37, 16)
    torch.testing.assert_close(results(compiled, x), results(layer, x))


def test_inductor_on_the_cpu():
    """Without gradients too, where masks and their padding become one kernel."""
    torch.manual_seed(0)
    layer = SparseAttention(**GEOMETRY, causal=True, attention_sinks=True)
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(2, 37, 16)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))
    torch.testing.assert_close(results(compiled, x), results(layer, x))
