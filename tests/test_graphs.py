"""torch.compile: results and gradients of eager PyTorch, and no more compilations than shapes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from native_sparse_attention import SparseAttention, compressed_attention
from native_sparse_attention.checks.tensors import BRANCHES

GEOMETRY = dict(
    dim=16, dim_head=8, heads=2, sliding_window_size=8, compress_block_size=8,
    compress_block_sliding_stride=4, selection_block_size=8, num_selected_blocks=2,
)  # fmt: skip

FRESH = """
import sys, torch
from native_sparse_attention import SparseAttention

graphs = []

def count(graph, inputs):
    graphs.append(graph)
    return graph.forward

settings = dict(causal=True, compress_block_sliding_stride=4, branches=sys.argv[1:])
layer = SparseAttention(16, 8, 2, 8, 8, 8, 2, **settings)
compiled = torch.compile(layer, backend=count, fullgraph=True)
counts = []
for n in (40, 40, 41, 50):
    compiled(torch.randn(2, n, 16))
    counts.append(len(graphs))
print(*counts)
"""


branches = pytest.mark.parametrize(
    "branches", [pytest.param(BRANCHES, marks=pytest.mark.slow), ("window",)], ids=["all", "window"]
)


@pytest.mark.slow
@branches
def test_no_second_compilation_in_a_fresh_process(branches):
    """The first length is compiled for itself, the second for all."""
    command = [sys.executable, "-c", FRESH, *branches]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["1", "1", "2", "2"]


def results(layer, x):
    """The output, and gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    out = layer(x)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    return [out, *torch.autograd.grad(out.square().sum(), [x, *parameters], allow_unused=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        dict(causal=True, importance="probs", use_diff_topk=True, attention_sinks=True),
        dict(causal=False, soft_cap=5.0, num_compressed_mem_kv=0, branch_kv="independent"),
        dict(causal=True, branches=("selected", "window"), importance="index", qk_norm=True),
    ],
    ids=["probs", "both_sides", "index"],
)  # fmt: skip
def test_traced_gradients(settings):
    torch.manual_seed(0)
    layer = SparseAttention(**GEOMETRY, **settings)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 37, 16)
    torch.testing.assert_close(results(compiled, x), results(layer, x))


@pytest.mark.slow(one_of=2)
@pytest.mark.parametrize("grad", [False, True])
def test_inductor_on_the_cpu(grad):
    """Logits, mask and softmax become one kernel, of memory slots and sinks that all see."""
    torch.manual_seed(0)
    tensors = [torch.randn(1, n, 2, 8, requires_grad=grad) for n in (37, 9, 9)]
    tensors += [torch.randn(2, 2, 8, requires_grad=grad) for _ in range(2)]
    tensors += [torch.randn(2, requires_grad=grad)]

    def run(attend):
        q, ck, cv, mem_k, mem_v, sinks = tensors
        out = attend(
            q, ck, cv, mem_k=mem_k, mem_v=mem_v, sinks=sinks, compress_block_sliding_stride=4
        )
        return [out, *torch.autograd.grad(out.square().sum(), tensors)] if grad else [out]

    compiled = torch.compile(compressed_attention, fullgraph=True)
    torch.testing.assert_close(run(compiled), run(compressed_attention))


@pytest.mark.parametrize("kind", ["mask", pytest.param("cu_seqlens", marks=pytest.mark.slow)])
@branches
def test_one_graph_for_padded_and_packed_rows_of_any_length(branches, kind):
    layer = SparseAttention(**GEOMETRY, causal=True, branches=branches)
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    for n in (20, 21, 37):
        x = torch.randn(1, n, 16)
        named = dict(mask=torch.arange(n)[None] > 2, cu_seqlens=torch.tensor([0, 4, n]))
        named = {kind: named[kind]}
        with torch._dynamo.config.patch(error_on_recompile=n != 20):
            out = compiled(x, **named)
        torch.testing.assert_close(out, layer(x, **named))
