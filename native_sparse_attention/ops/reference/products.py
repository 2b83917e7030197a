"""The products of attention. Masked pairs never contribute: a weight of 0 times a NaN or infinite
value is 0, in the forward and in the backward.

    b  batch      g  query heads of one KV head     i  query      d  key width
    k  KV heads   x, y  any widths                  j  key        e  value width

Only eager code on the CPU inspects values, since that costs no synchronization. GPUs, compiled
graphs and torch.func use torch's own products. `in_fp32` sets the precision of all products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...compat import transforms
from ...compat.graphs import is_exporting


def in_fp32(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast to fp32 or better for products and softmax. fp16 overflows if unscaled logits pass
    65504; bf16 rounds logits by 1 in 256."""
    return tuple(t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors)


def times(a: Tensor, x: Tensor) -> Tensor:
    """[b k g i j] times [b k j y] as one matmul for all heads of a group. An exported program keeps
    the axes apart, since merging them would fix the lengths."""
    if is_exporting():
        return torch.matmul(a, x[:, :, None])
    b, k, g, i, j = a.shape
    return torch.matmul(a.reshape(b, k, g * i, j), x).reshape(b, k, g, i, x.shape[-1])


def times_over_rows(a: Tensor, x: Tensor) -> Tensor:
    """[b k g i j] times [b k g i y], summed over a group's heads and queries: [b k j y]."""
    b, k, g, i, j = a.shape
    rows = a.reshape(b, k, g * i, j)
    return torch.matmul(rows.transpose(2, 3), x.reshape(b, k, g * i, x.shape[-1]))


def may_look(t: Tensor) -> bool:
    """Whether the host can read values of this tensor at no cost."""
    return (
        t.device.type == "cpu"
        and type(t) is Tensor
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and torch._C._len_torch_dispatch_stack() == 0
        and not transforms.active()
        and not transforms.is_legacy_batched(t)
    )


def is_finite(t: Tensor) -> bool:
    """Whether the sum of all values is finite. An overflow of the sum gives False."""
    return bool(t.detach().sum().isfinite())


def finite_part(x: Tensor) -> Tensor:
    """x with 0 for NaN and infinities."""
    return x if not may_look(x) or is_finite(x) else x.nan_to_num(0.0, 0.0, 0.0)


def contained(
    product: Callable[[Tensor, Tensor], Tensor],
    a: Tensor,
    x: Tensor,
    seen: Tensor | None,
    gradient: bool = False,
) -> Tensor:
    """`product(a, x)` of weights a [b k g i j] over pairs in `seen` or with a weight; `seen`
    broadcasts to a. Only a result that sees a NaN or infinite value becomes non-finite. In a
    gradient, that value must also have a weight."""
    out = product(a, x)
    if seen is None or not may_look(out) or is_finite(out):
        return out
    seen = seen & (a.detach() != 0) if gradient else seen | (a.detach().abs() > 0)
    clean = product(a.masked_fill(~seen, 0.0), x.nan_to_num(0.0, 0.0, 0.0))
    pairs = seen.to(a.dtype)
    nan, above, below = (
        product(pairs, kind(x.detach()).to(a.dtype)) > 0
        for kind in (torch.isnan, torch.isposinf, torch.isneginf)
    )
    return with_kinds(clean, nan, above, below)


def with_kinds(x: Tensor, nan: Tensor, above: Tensor, below: Tensor) -> Tensor:
    """x, or the sum of the NaN, inf and -inf that the masks mark."""
    x = x.masked_fill(above, float("inf")).masked_fill(below, float("-inf"))
    return x.masked_fill(nan | (above & below), float("nan"))


class WeightedValues(torch.autograd.Function):
    """`contained(times, p, v, seen)`: p [b k g i j], v [b k j e] to [b k g i e]."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, v: Tensor, seen: Tensor, gradient: bool) -> Tensor:
        ctx.save_for_backward(p, v, seen)
        return contained(times, p, v, seen, gradient)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        p, v, seen = ctx.saved_tensors
        d_p = None
        if ctx.needs_input_grad[0]:
            values = finite_part(v)
            d_p = times(d_out, values.transpose(2, 3))
            if values is not v:
                hit = seen & ~v.isfinite().all(-1)[:, :, None, None] & is_live(d_out)[..., None]
                d_p = d_p.masked_fill(hit, float("nan"))
        d_v = over_rows(p, d_out, seen) if ctx.needs_input_grad[1] else None
        return d_p, d_v, None, None


class OverRows(torch.autograd.Function):
    """`contained(times_over_rows, p, x, seen)`, a gradient: p [b k g i j], x [b k g i y] to
    [b k j y]."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, x: Tensor, seen: Tensor) -> Tensor:
        ctx.save_for_backward(p, x, seen)
        return contained(times_over_rows, p, x, seen, gradient=True)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        p, x, seen = ctx.saved_tensors
        d_p = times(finite_part(x), d_out.transpose(2, 3)) if ctx.needs_input_grad[0] else None
        d_x = weighted(p, d_out, seen, gradient=True) if ctx.needs_input_grad[1] else None
        return d_p, d_x, None


class Logits(torch.autograd.Function):
    """`times(q, k.mT)`: q [b k g i d], k [b k j d] to [b k g i j]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, seen)
        return times(q, k.mT)

    @staticmethod
    def backward(ctx: Any, d_sim: Tensor) -> Any:
        q, k, seen = ctx.saved_tensors
        d_q = weighted(d_sim, k, seen, gradient=True) if ctx.needs_input_grad[0] else None
        d_k = over_rows(d_sim, q, seen) if ctx.needs_input_grad[1] else None
        return d_q, d_k, None


class Finite(torch.autograd.Function):
    """Logits with 0 for NaN and a bound for infinities. Gradients pass unchanged."""

    @staticmethod
    def forward(ctx: Any, sim: Tensor, bound: float) -> Tensor:
        return sim.nan_to_num(0.0, bound, -bound)

    @staticmethod
    def backward(ctx: Any, d_sim: Tensor) -> Any:
        return d_sim, None


def finite(sim: Tensor, bound: float = 1e30) -> Tensor:
    return sim if not may_look(sim) or is_finite(sim) else Finite.apply(sim, bound)


class Spoiled(torch.autograd.Function):
    """`out` with `values` where `mask` is True. There a gradient other than 0 becomes NaN."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return torch.where(mask, values, out)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return d_out.masked_fill(mask & (d_out != 0), float("nan")), None, None


def is_live(*grads: Tensor) -> Tensor:
    """Rows [b k g i] with a gradient in an output [b k g i e] or in others [b k g i]."""
    live = (grads[0] != 0).any(dim=-1)
    for grad in grads[1:]:
        live = live | (grad != 0)
    return live


def isolated(
    attention: Callable[..., tuple[Tensor, ...]], sim: Tensor, gate: Tensor | None = None
) -> tuple[Tensor, ...]:
    """`attention(sim, gate)` of logits [.. i j]: an output [.. i e] and others [.. i]. A non-finite
    row with gradient 0 does not change the gradients of other rows."""
    given = (sim,) if gate is None else (sim, gate)
    first = attention(*given)
    if not may_look(first[0]) or is_finite(first[0]):
        return first
    out, *others = attention(
        *(finite(t, bound) for t, bound in zip(given, (1e30, 0.0), strict=False))
    )
    out = Spoiled.apply(out, first[0].detach(), ~first[0].isfinite())
    pairs = zip(others, first[1:], strict=True)
    return out, *(Spoiled.apply(t, before.detach(), before.isnan()) for t, before in pairs)


def apart(gate: Tensor, out: Tensor) -> Tensor:
    """`gate * out`. Where that is not finite, a gradient of 0 stays 0: 0 times a NaN gate is NaN,
    which would reach all keys that the query sees."""
    product = (gate * out).detach()
    return Spoiled.apply(finite(gate, 0.0) * finite(out, 0.0), product, ~product.isfinite())


def weighted(p: Tensor, v: Tensor, seen: Tensor, gradient: bool = False) -> Tensor:
    """`sum_j p_ij v_j` over the keys that i sees."""
    return WeightedValues.apply(p, v, seen, gradient) if may_look(p) else times(p, v)


def over_rows(p: Tensor, x: Tensor, seen: Tensor) -> Tensor:
    """`sum_i p_ij x_i` over the queries of all heads of the group that see j: a gradient."""
    return OverRows.apply(p, x, seen) if may_look(p) else times_over_rows(p, x)


def logits(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """`q_i . k_j`. Only pairs in `seen` pass gradients."""
    return Logits.apply(q, k, seen) if may_look(q) else times(q, k.mT)
