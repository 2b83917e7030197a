"""What tests of a Hopper's kernels share."""

import pytest
import torch

from native_sparse_attention import native_sparse_attention
from tests.helpers.budget import CUDA, DEVICE

pytest.importorskip("triton")

from native_sparse_attention.kernels.common import launch

MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not CUDA or not launch.supports_gluon(torch.empty(1, device=DEVICE)),
        reason="needs a Hopper and Triton 3.6 to 3.9",
    ),
]


def layer(tensors, d_out, within, **settings):
    """The layer and its gradients, by the kernels that `within` says. The tensors are those of
    `native_sparse_attention` in order."""
    # in all threads: the backward has its own
    with launch.using(within):
        q, k, v, ck, cv, gates = tensors
        out = native_sparse_attention(q, k, v, ck, cv, gates, backend="triton", **settings)
        return [out.detach(), *torch.autograd.grad(out, tensors, d_out)]
