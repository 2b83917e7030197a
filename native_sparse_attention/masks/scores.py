"""Score mods for torch's flex_attention: what becomes of a scaled logit before the softmax.

    b, h    batch row, query head
    i, j    query, key: `q_idx` and `kv_idx`

Each is a function, or a factory of one, of (score, b, h, i, j). They say nothing of who sees whom:
that is a mask's business, which may skip tiles where a score of -inf cannot.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..checks.scalars import (
    LARGEST,
    LEAST_NORMAL,
    TOO_MANY,
    as_float,
    check_bool,
    check_device,
    check_int,
    shown,
)
from . import tanh
from .constants import constant_defaults

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


# linear biases


def alibi_slopes(num_heads: int, device: torch.device | str | None = None) -> Tensor:
    """The slope of each head, float32 [H].

    `2^(-8 (h + 1) / H)` where H is a power of two. Else those of the next lower power P, and after
    them every other one of 2 P, from the first on, as the authors' code has it.

    Raises:
        ValueError: num_heads below 1.
    """
    num_heads = check_int("num_heads", num_heads, 1, TOO_MANY)
    device = None if device is None else check_device("device", device)
    power = 2 ** (num_heads.bit_length() - 1)
    of_power = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    of_double = [2 ** (-4 * (h + 1) / power) for h in range(0, 2 * power, 2)]
    slopes = (of_power + of_double)[:num_heads]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def alibi_bias(
    score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, slopes: Tensor
) -> Tensor:
    """`score - slopes[h] * |i - j|`, for `functools.partial(alibi_bias, slopes=...)`, or to be
    called by a score mod of one's own.

    ALiBi, arXiv 2108.12409: the further away, the lower. The paper is causal; keys after the query
    are lowered alike.
    """
    return score - slopes[h] * (q_idx - kv_idx).abs()


def alibi(
    num_heads: int, slopes: Tensor | None = None, device: torch.device | str | None = None
) -> ScoreMod:
    """`score - slopes[h] * |i - j|` with the slopes held, by default `alibi_slopes(num_heads)` on
    `device`; slopes that require gradients get them.

    Raises:
        ValueError: num_heads below 1, slopes that are not num_heads floating numbers.
    """
    num_heads = check_int("num_heads", num_heads, 1, TOO_MANY)
    if slopes is None:
        slopes = alibi_slopes(num_heads, device)
    elif (
        not isinstance(slopes, Tensor)
        or not slopes.is_floating_point()
        or list(slopes.shape) != [num_heads]
    ):
        got = type(slopes).__name__
        if isinstance(slopes, Tensor):
            got = f"{slopes.dtype} of shape {list(slopes.shape)}"
        raise ValueError(f"slopes must be floating, of shape [{num_heads}], got {got}")
    held = slopes

    def alibi_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return alibi_bias(score, b, h, q_idx, kv_idx, held)

    return alibi_mod


# relative positions


def relative_position(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """`score + (i - j)`: a score mod itself, no factory, to try things with."""
    return score + (q_idx - kv_idx)


def relative_bias(table: Tensor) -> ScoreMod:
    """`score + table[h, clip(i - j, -m, m) + m]`: a learned bias of the clipped distance.

    Clipped as in arXiv 1803.02155, one number a head as in T5, arXiv 1910.10683. A table that
    requires gradients gets them: compiled on CUDA, and in `dense_attention` anywhere. Where
    compiling fails with "out of resource" (heads of 64 in bf16 on an H200, torch 2.11),
    flex_attention has to keep less in shared memory: `kernel_options={"num_stages": 2}`.

    Args:
        table: floating, [H, 2 m + 1], or [2 m + 1] for all heads; the first entry is of keys m or
            more after the query.

    Raises:
        ValueError: a table of another shape or dtype.
    """
    if not isinstance(table, Tensor) or not table.is_floating_point():
        got = table.dtype if isinstance(table, Tensor) else type(table).__name__
        raise ValueError(f"table must be a floating tensor, got {got}")
    if table.ndim not in (1, 2) or table.shape[-1] % 2 == 0:
        raise ValueError(
            "table must have shape [heads, 2 m + 1] or [2 m + 1], an entry for every distance of "
            f"-m .. m, got {list(table.shape)}"
        )
    by_head = table.ndim == 2

    @constant_defaults
    def relative_bias_mod(
        score: Tensor,
        b: Tensor,
        h: Tensor,
        q_idx: Tensor,
        kv_idx: Tensor,
        furthest: int = table.shape[-1] // 2,
    ) -> Tensor:
        index = (q_idx - kv_idx).clamp(-furthest, furthest) + furthest
        return score + (table[h, index] if by_head else table[index])

    return relative_bias_mod


# bounds


def soft_cap(cap: float, approximate: bool = False) -> ScoreMod:
    """`cap * tanh(score / cap)`: scores of less than `cap`, small ones nearly as they were.

    Gemma 2, arXiv 2408.00118. `approximate=True` takes the GPU's own tanh where it is compiled for
    CUDA (`tanh.approx.f32`, relative error 2^-11), forward and backward.

    Raises:
        ValueError: a cap that is not positive and finite.
    """
    number = as_float(cap)
    if not LEAST_NORMAL <= number <= LARGEST:
        raise ValueError(
            f"cap must be a positive finite number of at least {LEAST_NORMAL:.2g}, got {shown(cap)}"
        )
    approximate = check_bool("approximate", approximate)
    # inside a graph the operator's fake implementation registers it
    if approximate and not torch.compiler.is_compiling():
        tanh.register_lowering()

    # two integers, exactly: dynamo makes a float symbolic even as a default (torch 2.15)
    numerator, denominator = number.as_integer_ratio()

    @constant_defaults
    def soft_cap_mod(
        score: Tensor,
        b: Tensor,
        h: Tensor,
        q_idx: Tensor,
        kv_idx: Tensor,
        numerator: int = numerator,
        denominator: int = denominator,
    ) -> Tensor:
        cap = numerator / denominator
        scaled = score / cap
        return cap * (tanh.tanh_approx(scaled) if approximate else torch.tanh(scaled))

    return soft_cap_mod
