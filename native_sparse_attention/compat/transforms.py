"""Derivatives beyond a backward: torch.func's transforms (`vmap`, `jvp`, and what is made of them)
and forward-mode AD. Eager PyTorch has them all, by its plain form: autograd functions and data that
the host looks at stand aside. Kernels have none of them, and say so."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

WAY_OUT = "Use backend='eager', which is plain PyTorch then, of memory O(T S)."


def forward_mode() -> bool:
    return forward_ad._current_level >= 0


def active() -> bool:
    """Whether a transform of torch.func or forward-mode AD is under way. Not asked for in a
    compiled graph, in which the plain form stands anyway."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_mode()


def unsupported_by_kernels() -> list[str]:
    """Why no kernel can run a call under the transforms of the moment."""
    if torch.compiler.is_compiling():
        return []
    if forward_mode():
        return ["kernels have no forward-mode derivatives (torch.func.jvp), backend='eager' has"]
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return ["kernels know no transforms of torch.func (vmap, grad), backend='eager' does"]
    return []


PLAIN = (Tensor, torch.nn.Parameter)


def is_plain(tensors: Sequence[Tensor | None]) -> bool:
    """Whether nobody looks at a call from outside, compiler, transform, mode or tensor subclass, so
    that an operator's dispatch is for nothing. Not of meta tensors, which no kernel takes."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_mode()
        or torch.jit.is_tracing()
        or any(t is not None and (type(t) not in PLAIN or t.is_meta) for t in tensors)
    )


def vjp(
    function: Callable[..., Any],
    tensors: Sequence[Tensor | None],
    d_outs: Sequence[Tensor],
) -> list[Any]:
    """Gradients of tensors, by functions that a transform sees through; none of integers."""

    def of_given(*given: Tensor) -> tuple[Tensor, ...]:
        some = iter(given)
        outs = function(*(None if t is None else next(some) for t in tensors))
        return tuple(out for out in outs if out.is_floating_point())

    backward: Any = torch.func.vjp(of_given, *(t for t in tensors if t is not None))[1]
    grads = iter(backward(tuple(d for d in d_outs if d is not None and d.is_floating_point())))
    return [None if t is None else next(grads) for t in tensors]


def numbers(tensor: Tensor) -> Any:
    """`tensor.tolist()` of a tensor that is not batched. Torch 2.8 has none within a transform."""
    if torch.compiler.is_compiling():
        return tensor.tolist()
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    with torch._C._DisableFuncTorch():
        return tensor.tolist()


def is_batched(tensor: Tensor) -> bool:
    """Whether `vmap` stands between the host and the values of a tensor."""
    return not torch.compiler.is_compiling() and torch._C._functorch.is_batchedtensor(tensor)


def is_legacy_batched(tensor: Tensor) -> bool:
    """Whether torch.autograd, and not torch.func, maps over a gradient (`is_grads_batched`)."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.is_legacy_batchedtensor(tensor)


def refuse_legacy_batched(*grads: Tensor | None) -> None:
    """For backwards that are more than torch's own operations.

    Raises:
        NotImplementedError: gradients that torch.autograd has batched.
    """
    if any(g is not None and is_legacy_batched(g) for g in grads):
        raise NotImplementedError(
            "torch.autograd cannot batch these gradients (is_grads_batched, vectorize=True): use "
            "torch.func.jacrev with backend='eager'"
        )


def on_values(operator: Callable[..., Any]) -> Callable[..., Any]:
    """An operator's implementation that refuses forward-mode AD: torch would drop the tangents."""

    @functools.wraps(operator)
    def run(*args: Any, **kwargs: Any) -> Any:
        if forward_mode():
            raise NotImplementedError(
                f"{operator.__name__} has no forward-mode derivative (torch.func.jvp). {WAY_OUT}"
            )
        return operator(*args, **kwargs)

    return run


def refuse_vmap(operator: Any) -> None:
    """Let an operator of the library say that it has no batching rule."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{operator._name} has no batching rule (vmap). {WAY_OUT}")

    operator.register_vmap(refuse)


def refuse_second_derivatives(operator: Any) -> None:
    """Let a backward's operator say that it has no backward itself, nor a batching rule."""

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            f"{operator.name} has no derivative itself: kernels give first derivatives only. "
            f"{WAY_OUT}"
        )

    operator.op.register_autograd(refuse)
