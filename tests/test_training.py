"""Training the layer over its kernels, as people train: activation checkpointing, autocast,
recomputation. In the interpreter on a CPU; `test_gpu.py` has what needs a GPU."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import native_sparse_attention.attention as attention
from tests.helpers.budget import CUDA, DEVICE
from tests.helpers.layers import DIM, layer

kernels = pytest.mark.kernels


H, K = (4, 2) if CUDA else (2, 1)


def small(**settings):
    """The same weights each time, heads wide enough for the kernels."""
    torch.manual_seed(0)
    settings |= dict(dim_head=16, heads=H, kv_heads=K, backend="triton")
    return layer(torch.float32, **settings).to(DEVICE)


def step(module, x, call=None):
    """The output, and the gradients of the input and of all parameters."""
    out = module(x) if call is None else call(module, x)
    grads = torch.autograd.grad(out.float().square().sum(), [x, *module.parameters()])
    return [out, *grads]


def same(actual, expected):
    """Bit for bit."""
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def draw(length):
    return torch.randn(1, length, DIM).to(DEVICE).requires_grad_()


@kernels
def test_recompute():
    """What the backward forms again is what the forward did not keep."""
    x = draw(15)
    kept, formed = small(), small(recompute=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, id):
        sizes = []
        kept(x)
        all_kept, sizes = sum(sizes), []
        formed(x)
    assert sum(sizes) == all_kept - 3 * H * 15 * (16 + 1)
    same(step(formed, x), step(kept, x))


@kernels
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    x, module = draw(15), small()
    # autograd.grad does not go through reentrant checkpoints
    results = []
    for call in (module, lambda x: checkpoint(module, x, use_reentrant=use_reentrant)):
        leaf = x.detach().requires_grad_()
        module.zero_grad()
        out = call(leaf)
        out.square().sum().backward()
        results.append([out, leaf.grad, *(p.grad.clone() for p in module.parameters())])
    same(*results)


LOW = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("branch_kv", ["shared", "independent"])
def test_autocast_casts_all_that_attends(monkeypatch, dtype, branch_kv):
    """Windows with their positions, summaries, memory and gates too; near what float32 gives."""
    given = {}
    attend = attention.branches.attend

    def spy(call, *settings):
        given.update(call._asdict())
        return attend(call, *settings)

    monkeypatch.setattr(attention.branches, "attend", spy)
    torch.manual_seed(0)
    # as many blocks as there are: nothing hangs on a near-tie
    module = layer(torch.float32, branch_kv=branch_kv, num_selected_blocks=6)
    x = torch.randn(2, 33, DIM, requires_grad=True)
    expected = step(module, x)
    for name in ("k_compress", "v_compress"):
        network = module.get_submodule(name)
        network.register_forward_pre_hook(lambda _, args, name=name: given.update({name: args[0]}))
    with torch.autocast("cpu", dtype=dtype):
        actual = step(module, x)
    tensors = {name: t for name, t in given.items() if isinstance(t, torch.Tensor)}
    assert {"q", "cq", "k", "v", "ck", "cv", "mem_k", "mem_v", "branch_gates", "k_compress",
            "v_compress"} <= tensors.keys()  # fmt: skip
    assert {t.dtype for t in tensors.values()} == {dtype}
    for a, b in zip(actual, expected, strict=True):
        error = (a.float() - b).norm() / b.norm()
        assert error < 32 * torch.finfo(dtype).eps


@kernels
def test_autocast_of_the_kernels():
    """In float16, the low dtype that the interpreter knows."""
    x, module = draw(15), small(num_selected_blocks=2)
    exact = copy.deepcopy(module)
    exact.backend = "eager"
    with torch.autocast(DEVICE, dtype=torch.float16):
        actual = step(module, x)
    assert actual[0].dtype == torch.float16
    for a, b in zip(actual, step(exact, x), strict=True):
        assert (a.float() - b).norm() < 64 * torch.finfo(torch.float16).eps * b.norm()
