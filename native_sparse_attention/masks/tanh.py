"""tanh in one instruction of an NVIDIA GPU, as a torch operator.

Compiled for CUDA it is PTX's `tanh.approx.f32`, with a relative error of at most 2^-11. On other
devices and in eager mode it is torch's tanh. Its gradient is `1 - y^2` of its output y.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

# operands of inline assembly: $0 is the result, $1 the argument
ASM, CONSTRAINTS = "tanh.approx.f32 $0, $1;", "=f,f"


@torch.library.custom_op("native_sparse_attention::tanh_approx", mutates_args=())
def tanh_approx(x: Tensor) -> Tensor:
    if forward_ad._current_level >= 0:  # torch would drop the tangent
        raise NotImplementedError(
            "tanh_approx has no forward-mode derivative (torch.func.jvp): use torch.tanh, that is "
            "soft_cap(.., approximate=False)"
        )
    return torch.tanh(x)


@tanh_approx.register_fake
def tanh_approx_fake(x: Tensor) -> Tensor:
    if torch._guards.TracingContext.try_get() is not None:
        register_lowering()  # torch is about to compile this graph
    return torch.empty_like(x)


@tanh_approx.register_vmap
def tanh_approx_vmap(
    info: Any, in_dims: tuple[int | None, ...], x: Tensor
) -> tuple[Tensor, int | None]:
    return tanh_approx(x), in_dims[0]


def tanh_setup(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def tanh_backward(ctx: Any, grad: Tensor) -> Tensor:
    (y,) = ctx.saved_tensors
    return grad * (1 - y * y)


tanh_approx.register_autograd(tanh_backward, setup_context=tanh_setup)


def register_lowering() -> None:
    """Register the operator in inductor as a pointwise step, which inductor fuses and accepts
    inside flex_attention. Not at import, since that would load inductor."""
    from torch._inductor.lowering import lowerings, make_pointwise, register_lowering
    from torch._inductor.virtualized import ops

    operator = torch.ops.native_sparse_attention.tanh_approx.default
    if operator in lowerings:
        return

    def assembly(x: Any) -> Any:
        # half precisions are float32 in registers and stay float32
        wide = ops.to_dtype(x, torch.float32)
        return ops.inline_asm_elementwise(
            wide, asm=ASM, constraints=CONSTRAINTS, dtype=torch.float32, is_pure=True, pack=1
        )

    def lower(x: Any) -> Any:
        is_nvidia = x.get_device().type == "cuda" and torch.version.hip is None
        has_instruction = is_nvidia and x.get_dtype() != torch.float64
        return make_pointwise(assembly if has_instruction else ops.tanh)(x)

    register_lowering(operator, type_promotion_kind=None)(lower)
