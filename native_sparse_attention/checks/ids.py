"""Token ids: integer tensors [b, n] of a vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .tensors import INTEGER_DTYPES, shown


def has_values(tensor: Tensor) -> bool:
    """Whether the host can read a tensor's values at once. False on a GPU, which would have to
    synchronize, and without values: in a traced graph or under `torch.func`."""
    if type(tensor) is not Tensor or tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def check_ids(name: str, ids: Any, embedding: nn.Module) -> Tensor:
    """Check ids [b, n] of any integral dtype and return them as int64. The check of the vocabulary
    runs on the CPU only, since a GPU would synchronize; there a bad id is a device-side assert. A
    wrapper without a weight or a number of embeddings is not compared.

    Raises:
        ValueError: lists, floats, another shape, an id outside of the vocabulary.
    """
    if not isinstance(ids, Tensor) or ids.dtype not in INTEGER_DTYPES:
        hint = ""
        if isinstance(ids, (list, tuple)):
            hint = f": give torch.tensor({name})"
        elif isinstance(ids, Tensor):
            hint = f": give {name}.long()"
        raise ValueError(
            f"{name} must be a tensor of integers of shape [b, n], got {shown(ids)}{hint}"
        )
    if ids.ndim != 2:
        raise ValueError(f"{name} must have shape [b, n], got {list(ids.shape)}")
    if ids.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got one of layout {ids.layout}")
    weight, num_tokens = (getattr(embedding, n, None) for n in ("weight", "num_embeddings"))
    if type(weight) is nn.Parameter and ids.device != weight.device and not weight.is_meta:
        raise ValueError(f"{name} must be on {weight.device} as the model is, got {ids.device}")
    ids = ids.long()
    if num_tokens is None or not has_values(ids) or ids.numel() == 0:
        return ids
    smallest, largest = (int(t) for t in ids.aminmax())
    if smallest < 0 or largest >= num_tokens:
        raise ValueError(
            f"{name} must be token ids from 0 to {num_tokens - 1}, those of the vocabulary, "
            f"got {smallest if smallest < 0 else largest}"
        )
    return ids
