"""Score mods for torch's flex_attention: they change scaled logits before the softmax.

Each is a mod of (score, b, h, i, j), the score of a batch row, a query head, a query and a key, or
a factory of a mod. They hide no pairs: a mask can skip tiles, and a score of -inf cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..checks import (
    LEAST_NORMAL,
    TOO_MANY,
    check_bool,
    check_device,
    check_int,
    check_number,
    describe,
)

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def alibi_slopes(num_heads: int, device: torch.device | str | None = None) -> Tensor:
    """The slope of each head, float32 [H].

    `2^(-8 (h + 1) / H)` if H is a power of two. Otherwise the slopes of the next lower power P,
    then every other slope of 2 P from the first on, as in the authors' code.
    """
    num_heads = check_int("num_heads", num_heads, 1, TOO_MANY)
    device = None if device is None else check_device("device", device)
    power = 2 ** (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2 ** (-4 * (h + 1) / power) for h in range(0, 2 * power, 2)]
    return torch.tensor(slopes[:num_heads], dtype=torch.float32, device=device)


def alibi_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, slopes: Tensor) -> Tensor:
    """`score - slopes[h] * |i - j|`, for `functools.partial(alibi_bias, slopes=...)` or calls from
    other score mods. ALiBi, arXiv 2108.12409, which is causal: here later keys have the same bias.
    """
    return score - slopes[h] * (i - j).abs()


def alibi(
    num_heads: int, slopes: Tensor | None = None, device: torch.device | str | None = None
) -> ScoreMod:
    """`score - slopes[h] * |i - j|`, by default with `alibi_slopes(num_heads)` on `device`. Slopes
    that require gradients get them.
    """
    num_heads = check_int("num_heads", num_heads, 1, TOO_MANY)
    if slopes is None:
        slopes = alibi_slopes(num_heads, device)
    elif not is_floating(slopes) or list(slopes.shape) != [num_heads]:
        raise ValueError(f"slopes must be floating, of shape [{num_heads}], got {describe(slopes)}")
    return partial(alibi_bias, slopes=slopes)


def relative_position(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """`score + (i - j)`, for experiments. This is a score mod, not a factory."""
    return score + (i - j)


def relative_bias(table: Tensor) -> ScoreMod:
    """`score + table[h, clip(i - j, -m, m) + m]`: a learned bias of the clipped distance.

    Clipped as in arXiv 1803.02155, one number per head as in T5, arXiv 1910.10683. The table is
    floating, [H, 2 m + 1], or [2 m + 1] for all heads; its first entry applies to keys m or more
    after the query. If it requires gradients, it gets them: compiled on CUDA, and in
    `dense_attention` anywhere. Compiling may fail with "out of resource" (heads of 64 in bf16 on an
    H200, torch 2.11): then pass `kernel_options={"num_stages": 2}` to flex_attention.
    """
    if not is_floating(table) or table.ndim not in (1, 2) or table.shape[-1] % 2 == 0:
        raise ValueError(
            "table must be floating, of shape [heads, 2 m + 1] or [2 m + 1], an entry for every "
            f"distance of -m .. m, got {describe(table)}"
        )
    has_heads, largest = table.ndim == 2, repr(table.shape[-1] // 2)

    def relative_bias_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        m = int(largest)
        index = (i - j).clamp(-m, m) + m
        return score + (table[h, index] if has_heads else table[index])

    return relative_bias_mod


def soft_cap(cap: float, approximate: bool = False) -> ScoreMod:
    """`cap * tanh(score / cap)`: bounds scores by `cap` and hardly changes small ones.

    Gemma 2, arXiv 2408.00118. `approximate=True` compiles for CUDA to the GPU's tanh instruction
    (`tanh.approx.f32`, relative error 2^-11), forward and backward.
    """
    expected = f"a positive finite number of at least {LEAST_NORMAL:.2g}"
    # a string, as `nsa.constant` returns
    bound = repr(check_number("cap", cap, expected, LEAST_NORMAL))
    approximate = check_bool("approximate", approximate)

    def soft_cap_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        scaled = score / float(bound)
        return float(bound) * (tanh_approx(scaled) if approximate else torch.tanh(scaled))

    return soft_cap_mod


# inline assembly: $0 is the result, $1 the argument
ASM = "tanh.approx.f32 $0, $1;"


@torch.library.custom_op("native_sparse_attention::tanh_approx", mutates_args=())
def tanh_approx(x: Tensor) -> Tensor:
    """tanh in one instruction of an NVIDIA GPU, PTX's `tanh.approx.f32`, where it is compiled for
    CUDA, with a relative error of at most 2^-11; torch's tanh elsewhere. Its gradient is `1 - y^2`
    of its output y."""
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


tanh_approx.register_vmap(lambda info, in_dims, x: (tanh_approx(x), in_dims[0]))
tanh_approx.register_autograd(
    lambda ctx, grad: grad * (1 - ctx.saved_tensors[0].square()),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


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
            wide, asm=ASM, constraints="=f,f", dtype=torch.float32, is_pure=True, pack=1
        )

    def lower(x: Any) -> Any:
        is_nvidia = x.get_device().type == "cuda" and torch.version.hip is None
        has_instruction = is_nvidia and x.get_dtype() != torch.float64
        return make_pointwise(assembly if has_instruction else ops.tanh)(x)

    register_lowering(operator, type_promotion_kind=None)(lower)


def is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
