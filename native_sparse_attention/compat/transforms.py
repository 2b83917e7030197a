"""torch.func's transforms and forward-mode AD, which the library refuses."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def refuse_transforms(op: str) -> None:
    """Refuse torch.func transforms (vmap, grad, jvp) and forward-mode AD, which know nothing of
    kernels and of memory that is written in place.

    Raises:
        NotImplementedError: one is active.
    """
    if torch.compiler.is_compiling():
        return
    if torch._C._functorch.peek_interpreter_stack() is None and forward_ad._current_level < 0:
        return
    raise NotImplementedError(
        f"{op} supports neither torch.func (vmap, grad, jvp) nor forward-mode AD: use "
        "torch.autograd, and one call for each sample where gradients of samples are wanted"
    )


def is_legacy_batched(tensor: Tensor) -> bool:
    """Whether torch.autograd, and not torch.func, maps over a gradient (`is_grads_batched`)."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.is_legacy_batchedtensor(tensor)
