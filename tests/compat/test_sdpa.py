"""SDPA for steps: the same attention, and no plan of cuDNN for each number of keys."""

import pytest
import torch
import torch.nn.functional as F

from native_sparse_attention.compat import sdpa


@pytest.mark.parametrize("T, plans", [(1, False), (2, True)])
@pytest.mark.parametrize("is_enabled", [True, False])
def test_single_queries_on_a_gpu_run_without_cudnn(T, plans, is_enabled, monkeypatch):
    seen, own, flags = [], F.scaled_dot_product_attention, [is_enabled]

    class OnGpu(torch.Tensor):
        is_cuda = True

    def attend(*args, **settings):
        seen.append(flags[-1])
        return own(*args, **settings)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: flags[-1])
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", flags.append)
    q, k, v = (torch.randn(1, 2, n, 8).as_subclass(OnGpu) for n in (T, 5, 5))
    assert torch.equal(sdpa(q, k, v, scale=0.5), own(q, k, v, scale=0.5))
    assert seen.pop() == (plans and is_enabled) and flags[-1] == is_enabled
    with pytest.raises(RuntimeError):
        sdpa(q, k[..., :4], v)
    assert seen.pop() == (plans and is_enabled) and flags[-1] == is_enabled


@pytest.mark.parametrize("scale", [-0.8, 0.0])
def test_scales_of_0_and_below_mask_as_others_do(scale):
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in "qkv")
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    exact = (q @ k.mT * scale).masked_fill(hidden, float("-inf")).softmax(dim=-1) @ v
    torch.testing.assert_close(sdpa(q, k, v, is_causal=True, scale=scale), exact)
