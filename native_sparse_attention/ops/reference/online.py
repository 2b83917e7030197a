"""Softmax attention tile by tile, with a running maximum and sum (Rabe and Staats, arXiv
2112.05682). Neither the forward nor the backward ever holds a whole row of scores.

    b  batch         i  query        g  query heads of one KV head     d  key width
    k  KV heads      j  key          e  value width

A `Plan` lists the tiles to compute. All tensors are fp32 or better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...compat import transforms
from ...compat.autocast import no_autocast
from .products import contained, is_finite, is_live, may_look, times, times_over_rows


@dataclass(frozen=True, eq=False)
class Plan:
    """Which tiles to visit, and how to form their logits.

    Args:
        tiles: for each chunk of queries its chunks of keys. The chunks cover all queries.
        visible: mask of a tile of queries and keys: a bool tensor that broadcasts to [b k g i j],
            or None if no pair is masked.
        scale: multiplies the dot products.
        soft_cap: c of `c tanh(logits / c)`.
        mask_value: the logit of masked pairs. If it is finite, it takes part in the softmax of a
            row that sees some key. A row that sees no key is empty.
    """

    tiles: Sequence[tuple[slice, Sequence[slice]]]
    visible: Callable[[slice, slice], Tensor | None]
    scale: float
    soft_cap: float | None = None
    mask_value: float = float("-inf")


class Running(NamedTuple):
    """The softmax over the keys so far: unnormalized output, greatest logit, sum of exponentials,
    and which rows saw a key."""

    acc: Tensor  # [b k g i e]
    m: Tensor  # [b k g i]
    l: Tensor  # [b k g i]
    seen: Tensor  # [b k g i]


def tile_logits(
    q: Tensor, k: Tensor, visible: Tensor | None, plan: Plan, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [b k g i j] for the softmax, the logits before weights and mask, and the slope of the
    cap."""
    s = times(q, k.mT) * plan.scale
    slope = s.new_ones(())
    if plan.soft_cap is not None:
        t = torch.tanh(s / plan.soft_cap)
        s, slope = t * plan.soft_cap, 1.0 - t.square()
    weighted = s if weights is None else s * weights
    masked = weighted if visible is None else weighted.masked_fill(~visible, plan.mask_value)
    return masked, s, slope


def fold(s: Tensor, v: Tensor, visible: Tensor | None, run: Running) -> Running:
    """Fold logits s [b k g i j] and values v [b k j e] into the running softmax."""
    m = torch.maximum(run.m, s.detach().amax(dim=-1))  # cancels: no gradient
    shift = m.masked_fill(m == float("-inf"), 0.0)  # rows that see nothing yet
    p, alpha = torch.exp(s - shift[..., None]), torch.exp(run.m - shift)
    return Running(
        run.acc * alpha[..., None] + contained(times, p, v, visible),
        m,
        run.l * alpha + p.sum(dim=-1),
        run.seen | (torch.ones_like(run.seen) if visible is None else visible.any(dim=-1)),
    )


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: slice,
    keys: Sequence[slice],
    plan: Plan,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [b k g i e], log-sum-exp and greatest logit [b k g i] of one chunk of queries.
    `weights` [b k g|1 i|1 j] of all queries and keys multiply the capped logits."""
    q = q[..., rows, :]
    m = q.new_full(q.shape[:-1], float("-inf"))
    acc = q.new_zeros(*q.shape[:-1], v.shape[-1])
    run = Running(acc, m, torch.zeros_like(m), torch.zeros_like(m, dtype=torch.bool))
    for some in keys:
        visible = plan.visible(rows, some)
        weight = None if weights is None else slice_axis(weights[..., some], 3, rows)
        s, _, _ = tile_logits(q, k[:, :, some], visible, plan, weight)
        run = fold(s, v[:, :, some], visible, run)
    out = run.acc / run.l.masked_fill(~run.seen, 1.0)[..., None]
    lse, top = run.m + run.l.masked_fill(~run.seen, 1.0).log(), run.m
    return (
        out.masked_fill(~run.seen[..., None], 0.0),
        lse.masked_fill(~run.seen, float("-inf")),
        top.masked_fill(~run.seen, float("-inf")),
    )


def empty_as(q: Tensor, width: int) -> Tensor:
    """Allocate a tensor like q with another last width and q's memory order of axes. A graph, whose
    compiler chooses the order, cannot sort symbolic strides."""
    if torch.compiler.is_compiling():
        return q.new_empty((*q.shape[:-1], width))
    strides = q.stride()
    order = sorted(range(q.ndim - 1), key=lambda axis: -strides[axis])
    return torch.empty_permuted(
        (*q.shape[:-1], width), (*order, q.ndim - 1), dtype=q.dtype, device=q.device
    )


class Attend(torch.autograd.Function):
    """Map q [b k g i d], k [b k j d], v [b k j e] and a plan to output [b k g i e], log-sum-exp and
    greatest logit [b k g i]. The greatest logit has no gradient.

    The forward saves the inputs, the output and the log-sum-exp. The backward recomputes each
    tile's probabilities from them, in differentiable steps. Autograd therefore differentiates the
    backward too, and keeps every tile for that.
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
        out = empty_as(q, v.shape[-1])
        lse = q.new_empty(q.shape[:-1])
        top = torch.empty_like(lse)
        for rows, keys in plan.tiles:
            chunk = attend_rows(q, k, v, rows, keys, plan)
            out[..., rows, :], lse[..., rows], top[..., rows] = chunk
        return out, lse, top

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, plan = inputs
        out, lse, top = output
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(top)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor, _: Any) -> Any:  # type: ignore[override]
        transforms.refuse_legacy_batched(d_out, d_lse)
        q, k, v, out, lse = ctx.saved_tensors
        plan = ctx.plan
        with no_autocast(q.device.type):
            if transforms.active():  # torch.func transforms only the backward, as `jacrev` does
                grads = transforms.vjp(
                    lambda q, k, v: plainly(q, k, v, plan)[:2], (q, k, v), (d_out, d_lse)
                )
                return *grads, None
            d_q, d_k, d_v, _ = gradients(q, k, v, out, lse, d_out, d_lse, plan)
            return d_q, d_k, d_v, None


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor,
    plan: Plan,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and weights, tile by tile: `ds = p (do . v - do . o + dlse)`."""
    d_q, d_k, d_v = (torch.zeros_like(t) for t in (q, k, v))
    d_weights = None if weights is None else torch.zeros_like(weights)
    # exp(s - inf) is 0: rows that see no key get no gradient, whatever their logits
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    live = None  # if a value is not finite: the rows that have a gradient
    if may_look(out) and not is_finite(out):
        live = is_live(d_out, d_lse)
    for rows, keys in plan.tiles:
        q_rows, do = q[..., rows, :], d_out[..., rows, :]
        delta = (do * out[..., rows, :]).sum(dim=-1) - d_lse[..., rows]
        d_rows = torch.zeros_like(q_rows)
        for some in keys:
            visible = plan.visible(rows, some)
            if live is not None:
                alive = live[..., rows, None]
                visible = alive if visible is None else visible & alive
            weight = None if weights is None else slice_axis(weights[..., some], 3, rows)
            s, unweighted, slope = tile_logits(q_rows, k[:, :, some], visible, plan, weight)
            p = torch.exp(s - lse[..., rows, None])
            d_v[:, :, some] += contained(times_over_rows, p, do, visible, gradient=True)
            ds = p * (times(do, v[:, :, some].mT) - delta[..., None])
            ds = hide(ds, visible)
            if weight is not None and d_weights is not None:
                d_weight = slice_axis(d_weights[..., some], 3, rows)
                d_weight += hide(ds * unweighted, visible).sum_to_size(d_weight.shape)
                ds = ds * weight
            ds = ds * slope * plan.scale
            d_rows = d_rows + contained(times, ds, k[:, :, some], visible, gradient=True)
            d_k[:, :, some] += contained(times_over_rows, ds, q_rows, visible, gradient=True)
        d_q[..., rows, :] = d_rows
    return d_q, d_k, d_v, d_weights


def attend(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """Attention by a plan; see `Attend`. The caller casts to fp32 or better and handles
    autocast."""
    return (plainly if transforms.active() else Attend.apply)(q, k, v, plan)


def plainly(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """`Attend` in operations that autograd and torch.func trace. It keeps every tile."""
    if not plan.tiles:
        return Attend.forward(q, k, v, plan)
    chunks = [attend_rows(q, k, v, rows, keys, plan) for rows, keys in plan.tiles]
    out, lse, top = zip(*chunks, strict=True)
    return torch.cat(out, dim=-2), torch.cat(lse, dim=-1), torch.cat(top, dim=-1).detach()


def hide(t: Tensor, visible: Tensor | None) -> Tensor:
    return t if visible is None else t.masked_fill(~visible, 0.0)


def chunks(start: int, stop: int, size: int) -> list[slice]:
    """Slices of `size` from start to stop; the last may be shorter."""
    return [slice(a, min(a + size, stop)) for a in range(start, stop, size)]


def slice_axis(t: Tensor, axis: int, some: slice) -> Tensor:
    """Slice an axis, unless it has length 1 and broadcasts."""
    return t if t.shape[axis] == 1 else t.narrow(axis, some.start, some.stop - some.start)
