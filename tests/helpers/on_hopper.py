"""What tests of a Hopper's kernels share."""

import pytest
import torch

from native_sparse_attention import native_sparse_attention
from tests.helpers.budget import CUDA, DEVICE

pytest.importorskip("triton")

from native_sparse_attention.kernels.common import launch, sm90

MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not CUDA or not sm90.available(torch.empty(1, device=DEVICE)),
        reason="needs a Hopper and Triton 3.6 to 3.9",
    ),
]


def layer(tensors, d_out, within, **settings):
    """The layer and its gradients, by the kernels that `within` says."""
    # in all threads: the backward has its own
    with launch.using(within):
        out = native_sparse_attention(*tensors, backend="triton", **settings)
        return [out.detach(), *torch.autograd.grad(out, tensors, d_out)]


def chosen(B, T, R, n, s):
    """Blocks before each token's own, -1 where there are no more; some lists have none at all."""
    order = torch.rand(B, T, R, max(T // s, n)).argsort(-1)[..., :n].int()
    own = torch.arange(T)[:, None, None] // s
    order = torch.where((order > 0) & (order < own - 1), order, -1)
    order[:, ::11] = -1
    return order.to(DEVICE)
