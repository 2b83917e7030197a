"""SDPA for steps: the same attention, and no plan of cuDNN for each number of keys."""

import pytest
import torch
import torch.nn.functional as F

from native_sparse_attention.compat.sdpa import sdpa


@pytest.mark.parametrize("T, plans", [(1, False), (2, True)])
def test_single_queries_on_a_gpu_run_without_cudnn(T, plans, monkeypatch):
    seen, own = [], F.scaled_dot_product_attention

    class OnGpu(torch.Tensor):
        is_cuda = True

    def attend(*args, **settings):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return own(*args, **settings)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    for before in (True, False):
        monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", flags := Flags(before))
        monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", flags.set)
        q, k, v = (torch.randn(1, 2, n, 8).as_subclass(OnGpu) for n in (T, 5, 5))
        out = sdpa(q, k, v, scale=0.5)
        assert torch.equal(out, own(q, k, v, scale=0.5))
        assert seen.pop() == (plans and before) and flags.value == before
        with pytest.raises(RuntimeError):
            sdpa(q, k[..., :4], v)
        assert seen.pop() == (plans and before) and flags.value == before


class Flags:
    def __init__(self, value):
        self.value = value

    def __call__(self):
        return self.value

    def set(self, value):
        self.value = value
