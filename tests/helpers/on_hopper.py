"""What tests of a Hopper's kernels share."""

import torch

from native_sparse_attention import native_sparse_attention
from native_sparse_attention.kernels.common import launch


def layer(tensors, d_out, within, **settings):
    """The layer and its gradients, by the kernels that `within` says. The tensors are those of
    `native_sparse_attention` in order."""
    # in all threads: the backward has its own
    with launch.using(within):
        q, k, v, ck, cv, gates = tensors
        out = native_sparse_attention(q, k, v, ck, cv, gates, backend="triton", **settings)
        return [out.detach(), *torch.autograd.grad(out, tensors, d_out)]
