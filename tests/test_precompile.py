"""Kernels compiled ahead of their first launch: side by side, and those that a layer then runs."""

import dataclasses
import threading

import pytest
import torch

from native_sparse_attention import NSAConfig, SparseAttention, warmup
from native_sparse_attention.compress import MeanPool
from tests.helpers.sizes import sizes

SHAPE = dict(dim=64, dim_head=32, heads=4, kv_heads=2, causal=True)
CONFIG = NSAConfig(**SHAPE, **sizes(16, 8, 16, n=4, w=31))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are kernels to compile")
def test_nothing_to_compile():
    assert warmup(CONFIG) == warmup(CONFIG, device="cuda:1") == warmup(CONFIG, device=1) == 0


@pytest.mark.gpu
def test_a_layer_runs_what_was_compiled():
    """Everything, at another batch too; and its results are right."""
    warmup(CONFIG, torch.float32, lengths=(300,), documents=True)
    layer = SparseAttention.from_config(CONFIG, compress_mlp=MeanPool()).cuda()
    x = torch.randn(2, 300, 64, device="cuda", requires_grad=True)
    outs = []
    for backend in ("triton", "eager"):
        layer.backend = backend
        out = layer(x)
        outs.append([out, *torch.autograd.grad(out.square().sum(), x)])
    for got, expected in zip(*outs, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)
    assert warmup(CONFIG, torch.float32, lengths=(300,), documents=True) == 0


@pytest.mark.gpu
def test_a_layer_that_ranks_by_an_index():
    """It takes no compression network."""
    config = dataclasses.replace(CONFIG, branches=("selected",), importance="index")
    warmup(config, torch.float32, lengths=(300,))
    assert warmup(config, torch.float32, lengths=(300,)) == 0


@pytest.mark.gpu
def test_a_first_call_compiles_the_branches_side_by_side(monkeypatch):
    """Of a layer of averaged windows: heads of a width that no other test has."""
    import triton

    from native_sparse_attention.kernels.common import precompile

    if not precompile.is_possible():
        pytest.skip("this Triton does not compile in threads, or there is one core")
    threads = []
    kind = triton.runtime.driver.active.launcher_cls
    build = kind.__init__

    def record_thread(*args):
        threads.append(threading.current_thread().name)
        return build(*args)

    monkeypatch.setattr(kind, "__init__", record_thread)
    config = dataclasses.replace(CONFIG, dim_head=40)
    layer = SparseAttention.from_config(config, compress_mlp=MeanPool()).cuda()
    layer(torch.randn(1, 300, 64, device="cuda")).sum().backward()
    # rotary embedding is an operator of its own, compiled at its launch
    at_launch = [name for name in threads if not name.startswith("nsa-compile")]
    assert len(threads) - len(at_launch) > 10 and len(at_launch) <= 2
