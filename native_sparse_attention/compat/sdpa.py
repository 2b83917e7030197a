"""`scaled_dot_product_attention` of torch, for steps of decoding too."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def sdpa(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
    """`F.scaled_dot_product_attention`; a single query [.. 1 D] on a GPU never runs in cuDNN.

    cuDNN plans each number of keys anew. In a model of 8 layers whose cache grows, a step takes 50
    to 80 ms so on an H100, and 8 to 11 with the other backends. Compiled graphs keep torch's
    choice. Other threads' calls may miss cuDNN while one runs: torch has one switch for all.
    """
    attend = F.scaled_dot_product_attention
    if torch.compiler.is_compiling() or not q.is_cuda or q.shape[-2] != 1:
        return attend(q, k, v, **settings)
    cuda = torch.backends.cuda
    was_enabled = cuda.cudnn_sdp_enabled()
    # `sdpa_kernel` does the same in 30 us
    cuda.enable_cudnn_sdp(False)
    try:
        return attend(q, k, v, **settings)
    finally:
        cuda.enable_cudnn_sdp(was_enabled)
