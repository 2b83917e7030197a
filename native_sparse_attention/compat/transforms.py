"""Derivatives beyond a backward: torch.func's transforms (`vmap`, `jvp` and those built on them)
and forward-mode AD. The eager backend supports all of them in its plain form, without autograd
functions and without reading values on the host. Kernels support none and raise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def refuse_transforms(op: str) -> None:
    """Refuse torch.func transforms (vmap, grad, jvp) and forward-mode AD, which know nothing of
    kernels and of memory that is written in place.

    Raises:
        NotImplementedError: one is active.
    """
    if active():
        raise NotImplementedError(
            f"{op} supports neither torch.func (vmap, grad, jvp) nor forward-mode AD: use "
            "torch.autograd, and one call for each sample where gradients of samples are wanted"
        )


WAY_OUT = "Use backend='eager', which is plain PyTorch then, of memory O(T S)."


def forward_mode() -> bool:
    return forward_ad._current_level >= 0


def active() -> bool:
    """Whether a transform of torch.func or forward-mode AD is active. False in a compiled graph,
    which uses the plain form anyway."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_mode()


def unsupported_by_kernels() -> list[str]:
    """Reasons why no kernel can run a call under the active transforms; empty if there are none."""
    if torch.compiler.is_compiling():
        return []
    if forward_mode():
        return ["kernels have no forward-mode derivatives (torch.func.jvp), backend='eager' has"]
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return ["kernels know no transforms of torch.func (vmap, grad), backend='eager' does"]
    return []


PLAIN = (Tensor, torch.nn.Parameter)


def is_plain(tensors: Sequence[Tensor | None]) -> bool:
    """Whether no compiler, transform, mode or tensor subclass observes a call, so that it may skip
    an operator's dispatch. False for meta tensors, which no kernel takes."""
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
    """Gradients of tensors by torch.func.vjp, which transforms can trace. Integer outputs are
    ignored."""

    def of_given(*given: Tensor) -> tuple[Tensor, ...]:
        some = iter(given)
        outs = function(*(None if t is None else next(some) for t in tensors))
        return tuple(out for out in outs if out.is_floating_point())

    backward: Any = torch.func.vjp(of_given, *(t for t in tensors if t is not None))[1]
    grads = iter(backward(tuple(d for d in d_outs if d is not None and d.is_floating_point())))
    return [None if t is None else next(grads) for t in tensors]


def numbers(tensor: Tensor) -> Any:
    """`tensor.tolist()` of an unbatched tensor. Torch 2.8 lacks it within a transform."""
    if torch.compiler.is_compiling():
        return tensor.tolist()
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    with torch._C._DisableFuncTorch():
        return tensor.tolist()


def is_batched(tensor: Tensor) -> bool:
    """Whether `vmap` maps over a tensor, so that the host cannot read its values."""
    return not torch.compiler.is_compiling() and torch._C._functorch.is_batchedtensor(tensor)


def is_legacy_batched(tensor: Tensor) -> bool:
    """Whether torch.autograd, and not torch.func, maps over a gradient (`is_grads_batched`)."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.is_legacy_batchedtensor(tensor)


def refuse_legacy_batched(*grads: Tensor | None) -> None:
    """Refuse batched gradients, in backwards with operations that are not torch's own.

    Raises:
        NotImplementedError: torch.autograd has batched the gradients.
    """
    if any(g is not None and is_legacy_batched(g) for g in grads):
        raise NotImplementedError(
            "torch.autograd cannot batch these gradients (is_grads_batched, vectorize=True): use "
            "torch.func.jacrev with backend='eager'"
        )


def on_values(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Make an operator refuse forward-mode AD, since torch would drop the tangents."""

    @functools.wraps(operator)
    def run(*args: Any, **kwargs: Any) -> Any:
        if forward_mode():
            raise NotImplementedError(
                f"{operator.__name__} has no forward-mode derivative (torch.func.jvp). {WAY_OUT}"
            )
        return operator(*args, **kwargs)

    return run


def refuse_vmap(operator: Any) -> None:
    """Make an operator refuse `vmap`."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{operator._name} has no batching rule (vmap). {WAY_OUT}")

    operator.register_vmap(refuse)


class Refused(torch.autograd.Function):
    """Gradients that are not differentiable themselves."""

    @staticmethod
    def forward(ctx: Any, *grads: Any) -> Any:
        return tuple(None if g is None else g.view_as(g) for g in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"SDPA gives first derivatives only here. {WAY_OUT}")


class FirstDerivatives(torch.autograd.Function):
    """The same tensors, for an operation of torch without second derivatives: it would raise a
    RuntimeError that names neither the layer nor a way out."""

    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> Any:
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return Refused.apply(*grads) if torch.is_grad_enabled() else grads


def refuse_second_derivatives(operator: Any) -> None:
    """Make the operator of a backward refuse to be differentiated."""

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            f"{operator.name} has no derivative itself: kernels give first derivatives only. "
            f"{WAY_OUT}"
        )

    operator.op.register_autograd(refuse)
