"""Registration of torch operators, and what their functions share. It imports no triton."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("native_sparse_attention", "DEF")


def operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as a torch operator of this schema, "name(Tensor q, ...) -> Tensor".
    `fake` allocates its results without values. Triton launches on the current GPU: the function
    runs with that of its first tensor."""

    def register(function: Callable[..., Any]) -> Any:
        name = schema.partition("(")[0]

        @functools.wraps(function)
        def run(*args: Any) -> Any:
            flat = (t for arg in args for t in (arg if isinstance(arg, (list, tuple)) else (arg,)))
            with torch.cuda.device_of(next(t for t in flat if isinstance(t, Tensor))):
                return function(*args)

        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"native_sparse_attention::{name}", fake, lib=LIBRARY)
        return getattr(torch.ops.native_sparse_attention, name).default

    return register


def unit_stride(*tensors: Tensor) -> list[Tensor]:
    """Tensors with a last stride of 1; kernels take any other strides."""
    return [t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous() for t in tensors]


def aligned(t: Tensor) -> Tensor:
    """A contiguous tensor at a 16-byte aligned address, for the tensor memory accelerator. A
    gradient may be a view into another tensor."""
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()
