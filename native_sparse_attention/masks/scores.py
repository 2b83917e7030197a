"""Score mods for torch's flex_attention: they change scaled logits before the softmax.

    b, h    batch row, query head
    i, j    query, key: `q_idx` and `kv_idx`

Each is a mod of (score, b, h, i, j), or a factory of a mod. They hide no pairs. Masks do that,
since a mask can skip tiles and a score of -inf cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..checks.scalars import (
    LARGEST,
    LEAST_NORMAL,
    TOO_MANY,
    check_bool,
    check_device,
    check_int,
    check_number,
    shown,
)
from .tanh import register_lowering, tanh_approx
from .tiles import constant

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def alibi_slopes(num_heads: int, device: torch.device | str | None = None) -> Tensor:
    """The slope of each head, float32 [H].

    `2^(-8 (h + 1) / H)` if H is a power of two. Otherwise the slopes of the next lower power P,
    then every other slope of 2 P from the first on, as in the authors' code.

    Raises:
        ValueError: num_heads below 1.
    """
    num_heads = check_int("num_heads", num_heads, 1, TOO_MANY)
    device = None if device is None else check_device("device", device)
    power = 2 ** (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2 ** (-4 * (h + 1) / power) for h in range(0, 2 * power, 2)]
    return torch.tensor(slopes[:num_heads], dtype=torch.float32, device=device)


def alibi_bias(
    score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, slopes: Tensor
) -> Tensor:
    """`score - slopes[h] * |i - j|`, for `functools.partial(alibi_bias, slopes=...)` or calls from
    other score mods.

    ALiBi, arXiv 2108.12409. The paper is causal; here keys after the query have the same bias.
    """
    return score - slopes[h] * (q_idx - kv_idx).abs()


def alibi(
    num_heads: int, slopes: Tensor | None = None, device: torch.device | str | None = None
) -> ScoreMod:
    """`score - slopes[h] * |i - j|`, by default with `alibi_slopes(num_heads)` on `device`. Slopes
    that require gradients get them.

    Raises:
        ValueError: num_heads below 1, slopes that are not num_heads floating numbers.
    """
    num_heads = check_int("num_heads", num_heads, 1, TOO_MANY)
    if slopes is None:
        slopes = alibi_slopes(num_heads, device)
    elif not is_floating(slopes) or list(slopes.shape) != [num_heads]:
        raise ValueError(f"slopes must be floating, of shape [{num_heads}], got {shown(slopes)}")
    return partial(alibi_bias, slopes=slopes)


def relative_position(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """`score + (i - j)`, for experiments. This is a score mod, not a factory."""
    return score + (q_idx - kv_idx)


def relative_bias(table: Tensor) -> ScoreMod:
    """`score + table[h, clip(i - j, -m, m) + m]`: a learned bias of the clipped distance.

    Clipped as in arXiv 1803.02155, one number per head as in T5, arXiv 1910.10683. A table that
    requires gradients gets them: compiled on CUDA, and in `dense_attention` anywhere. Compiling may
    fail with "out of resource" (heads of 64 in bf16 on an H200, torch 2.11). Then reduce the shared
    memory of flex_attention with `kernel_options={"num_stages": 2}`.

    Args:
        table: floating, [H, 2 m + 1], or [2 m + 1] for all heads. The first entry applies to keys
            m or more after the query.

    Raises:
        ValueError: a table of another shape or dtype.
    """
    if not is_floating(table):
        raise ValueError(f"table must be a floating tensor, got {shown(table)}")
    if table.ndim not in (1, 2) or table.shape[-1] % 2 == 0:
        raise ValueError(
            "table must have shape [heads, 2 m + 1] or [2 m + 1], an entry for every distance of "
            f"-m .. m, got {list(table.shape)}"
        )
    has_heads, furthest = table.ndim == 2, constant(table.shape[-1] // 2)

    def relative_bias_mod(
        score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        m = int(furthest)
        index = (q_idx - kv_idx).clamp(-m, m) + m
        return score + (table[h, index] if has_heads else table[index])

    return relative_bias_mod


def soft_cap(cap: float, approximate: bool = False) -> ScoreMod:
    """`cap * tanh(score / cap)`: bounds scores by `cap` and hardly changes small ones.

    Gemma 2, arXiv 2408.00118. `approximate=True` compiles for CUDA to the GPU's tanh instruction
    (`tanh.approx.f32`, relative error 2^-11), forward and backward.

    Raises:
        ValueError: a cap that is not positive and finite.
    """
    expected = f"a positive finite number of at least {LEAST_NORMAL:.2g}"
    number = check_number("cap", cap, expected, LEAST_NORMAL, LARGEST)
    approximate, bound = check_bool("approximate", approximate), constant(number)
    # inside a graph the operator's fake implementation registers the lowering
    if approximate and not torch.compiler.is_compiling():
        register_lowering()

    def soft_cap_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        scaled = score / float(bound)
        return float(bound) * (tanh_approx(scaled) if approximate else torch.tanh(scaled))

    return soft_cap_mod


def is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
