"""The layer as one operator: one autograd node, what it keeps, modules and graphs over it."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.helpers.budget import CUDA, DEVICE
from tests.helpers.calls import draw
from tests.helpers.layers import DIM, layer, step

pytestmark = pytest.mark.kernels


def test_one_node():
    """Between the inputs and the output lies one node of autograd."""
    out = draw("layer", batch=1).leaves()("triton")
    assert all(
        node is None or "AccumulateGrad" in node.name() for node, _ in out.grad_fn.next_functions
    )


@pytest.mark.slow(one_of=2)
@pytest.mark.parametrize("recompute", [False, True])
def test_passes_over_one_graph(recompute):
    """The second finds what the first one found. That a last pass gives back what branches gave
    before most of the backward: the peak in kernels/test_without_gpu.py."""
    call = draw("layer", batch=1, recompute=recompute).leaves()
    out = call("triton")
    leaves, bwd = list(call.tensors.values()), torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, bwd, retain_graph=True)
    second = torch.autograd.grad(out, leaves, bwd)
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, leaves, bwd)


# training, as people train: recomputation, checkpoints, autocast

H, K = (4, 2) if CUDA else (2, 1)


def small(**settings):
    """The same weights each time, heads wide enough for the kernels."""
    torch.manual_seed(0)
    settings |= dict(dim_head=16, heads=H, kv_heads=K, backend="triton")
    return layer(torch.float32, **settings).to(DEVICE)


def tokens():
    return torch.randn(1, 15, DIM, device=DEVICE, requires_grad=True)


def test_recompute():
    """What the backward forms again is what the forward did not keep."""
    x = tokens()
    kept, formed = small(), small(recompute=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, id):
        sizes = []
        kept(x)
        all_kept, sizes = sum(sizes), []
        formed(x)
    assert sum(sizes) == all_kept - 3 * H * 15 * (16 + 1)
    assert all(map(torch.equal, step(formed, x), step(kept, x)))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    x, module = tokens(), small()
    # autograd.grad does not go through reentrant checkpoints
    results = []
    for call in (module, lambda x: checkpoint(module, x, use_reentrant=use_reentrant)):
        leaf = x.detach().requires_grad_()
        module.zero_grad()
        out = call(leaf)
        out.square().sum().backward()
        results.append([out, leaf.grad, *(p.grad.clone() for p in module.parameters())])
    assert all(map(torch.equal, *results))


def test_autocast_of_the_kernels():
    """In float16, the low dtype that the interpreter knows."""
    x, module = tokens(), small(num_selected_blocks=2)
    exact = copy.deepcopy(module)
    exact.backend = "eager"
    with torch.autocast(DEVICE, dtype=torch.float16):
        actual = step(module, x)
    assert actual[0].dtype == torch.float16
    for a, b in zip(actual, step(exact, x), strict=True):
        assert (a.float() - b).norm() < 64 * torch.finfo(torch.float16).eps * b.norm()
