"""Choice of the backend of a call. Each backend reports which calls it cannot run, and why.

    triton   GPU kernels
    flex     torch's flex_attention, compiled on CUDA
    eager    plain PyTorch, everywhere

An explicit backend runs or raises. Only `auto` falls back: it tries triton, flex, eager on CUDA,
and eager elsewhere. With TRITON_INTERPRET=1 an explicit triton runs without CUDA too, for tests.
`choose` is called once for each call of a user; everything below it takes the name that it returns.
"""

from __future__ import annotations

from typing import Any

from ..checks import BACKENDS, check_choice, describe
from ..config import AttentionConfig
from . import chunked, flex
from .call import Call
from .triton import backend as triton_backend

# Each has `attend_branch`, the attention [B T H E] of one branch of a checked call, and on request
# its log-sum-exp; and `select_blocks`, block indices [B T R n]. flex ranks in eager PyTorch.
MODULES: dict[str, Any] = dict(triton=triton_backend, flex=flex, eager=chunked)


def choose(backend: Any, op: str, call: Call, config: AttentionConfig) -> str:
    """The first of the given backends that supports this call. Without one, a
    NotImplementedError lists the reasons of each."""
    if not isinstance(backend, (str, tuple)):
        raise ValueError(f"backend must be a name or a tuple of names, got {describe(backend)}")
    if backend == "auto":
        backend = ("triton", "flex", "eager") if call.q.is_cuda else ("eager",)
    names = backend if isinstance(backend, tuple) else (backend,)
    if not names:
        raise ValueError("backend must be a name or a tuple of at least one, got ()")
    reasons = {}
    for name in names:
        check_choice("backend", name, MODULES if isinstance(backend, tuple) else BACKENDS)
        reasons[name] = [] if name == "eager" else MODULES[name].why_not(op, call, config)
        if not reasons[name]:
            return name
    message = "; ".join(
        f"backend {name!r} cannot run this call of {op}: {', '.join(why)}"
        for name, why in reasons.items()
    )
    raise NotImplementedError(f"{message}. Use backend='auto' to fall back.")
