"""Choice of the backend of an operation. Each backend reports which calls it cannot run, and why.

    triton   GPU kernels
    flex     torch's flex_attention, compiled on CUDA
    eager    plain PyTorch, everywhere

An explicit backend runs or raises. Only `auto` falls back: it tries triton, flex, eager on CUDA,
and eager elsewhere. With TRITON_INTERPRET=1 an explicit triton runs without CUDA too, for tests.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..checks.tensors import BACKENDS, check_choice, shown
from . import flex
from .reference import eager
from .triton import backend as triton_backend

# settings, beside `q_offset`, by which a backend decides whether it supports an operation
FACTS = {
    "select_blocks": ("num_selected_blocks", "importance", "return_gates"),
    "selected_attention": ("gates", "selection_block_size"),
}


def why_not(backend: str, op: str, call: dict[str, Any]) -> list[str]:
    """Reasons why a backend cannot run a call of an operation; empty if it can."""
    if backend == "triton":
        return triton_backend.why_not(op, **call)
    if backend == "flex" and op != "native_sparse_attention":
        if not hasattr(flex, op):
            return [f"flex_attention has no form of {op}"]
        return flex.why_not(op, **call)
    return []


def automatic(q: Tensor) -> tuple[str, ...]:
    """The backends that `auto` tries, in order."""
    return ("triton", "flex", "eager") if q.is_cuda else ("eager",)


def names_of(backend: str | tuple[str, ...], q: Tensor) -> tuple[str, ...]:
    """The backends to try, in order.

    Raises:
        ValueError: neither a name nor a tuple of at least one.
    """
    if not isinstance(backend, (str, tuple)):
        raise ValueError(f"backend must be a name or a tuple of names, got {shown(backend)}")
    if backend == "auto":
        return automatic(q)
    names = backend if isinstance(backend, tuple) else (backend,)
    if not names:
        raise ValueError("backend must be a name or a tuple of at least one, got ()")
    return names


def takes_kernels(
    backend: str | tuple[str, ...], op: str, q: Tensor, k: Tensor, **facts: Any
) -> bool:
    """Whether triton is the first choice and supports this call."""
    first = names_of(backend, q)[0]
    return first == "triton" and not why_not("triton", op, dict(q=q, k=k, **facts))


def choose(
    backend: str | tuple[str, ...],
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    gates: Tensor | None = None,
    q_offset: int | Tensor = 0,
    **facts: Any,
) -> str:
    """The first of the given backends that supports this call. `facts` are the other arguments of
    `why_not` for this operation.

    Raises:
        ValueError: the backend is unknown.
        NotImplementedError: no given backend supports the call; lists the reasons of each.
    """
    call = dict(q=q, k=k, v=v, gates=gates, q_offset=q_offset, **facts)
    reasons = {}
    for name in names_of(backend, q):
        check_choice("backend", name, BACKENDS)
        reasons[name] = why_not(name, op, call)
        if not reasons[name]:
            return name
    told = "; ".join(
        f"backend {name!r} cannot run this call of {op}: {', '.join(why)}"
        for name, why in reasons.items()
    )
    raise NotImplementedError(f"{told}. Use backend='auto' to fall back.")


def run(backend: str | tuple[str, ...], op: str, *tensors: Tensor, **settings: Any) -> Any:
    """Run an operation on checked arguments, with the first of the given backends that supports the
    call. `choose` raises if there is none."""
    if op == "select_blocks" and isinstance(backend, str) and backend == "flex":
        backend = "eager"  # flex_attention cannot rank
    facts = {name: settings[name] for name in ("q_offset", *FACTS.get(op, ()))}
    name = choose(backend, op, *tensors[:3], **facts)
    if name == "triton":
        return getattr(triton_backend, op)(*tensors, **settings)
    settings.pop("block_sizes", None)  # only triton has tile configs
    if name == "flex":
        return getattr(flex, op)(*tensors, **settings)
    return eager.run(op, *tensors, **settings)
