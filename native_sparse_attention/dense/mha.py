"""Multi-head attention with an explicit forward and backward: an oracle for kernels.

Dense, memory O(T S), in the layout [B, H, T, D] of kernels. For real work use `chunked_attention`.
Names, arguments and residuals are those of the reference in JAX's TPU flash attention; the code is
independent.

    b  batch    h  heads    i  query    j  key    d  key width    e  value width
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import (
    check_bool,
    check_broadcasts,
    check_devices,
    check_given,
    check_mask_value,
    check_number,
    check_same,
    check_shapes,
)
from ..compat import no_autocast, refuse_transforms
from ..ops.chunked import refuse_batched
from ..ops.reference import upcast
from .segments import SegmentIds, check_segment_ids

# far below any logit, but adding a logit does not overflow float32
DEFAULT_MASK_VALUE = -0.7 * torch.finfo(torch.float32).max


class Settings(NamedTuple):
    visible: Tensor  # [b|1 1 i j]
    mask_value: float
    softmax_scale: float


def check_call(
    q: Tensor, k: Tensor, v: Tensor, ab: Tensor | None, segment_ids: SegmentIds | Tensor | None,
    causal: bool, mask_value: float, softmax_scale: float,
) -> Settings:  # fmt: skip
    check_given(q=q, k=k, v=v)
    dims = check_shapes(q=(q, "B H T D"), k=(k, "B H S D"), v=(v, "B H S E"))
    check_same(q=q, k=k, v=v)
    B, H, T, S = (dims[axis] for axis in "BHTS")
    if ab is not None:
        check_given(ab=ab)
        check_same(ab=ab)
        check_devices(q=q, ab=ab)
        check_broadcasts("ab", ab, B=B, H=H, T=T, S=S)
    visible = torch.ones(1, 1, T, S, dtype=torch.bool, device=q.device)
    if check_bool("causal", causal):
        visible = visible.tril()
    segments = check_segment_ids(segment_ids, B, T, S, q.device)
    if segments is not None:
        visible = visible & (segments.q[:, None, :, None] == segments.kv[:, None, None])
    mask_value = check_mask_value(mask_value, q.dtype)
    return Settings(visible, mask_value, check_number("softmax_scale", softmax_scale))


def masked_logits(q: Tensor, k: Tensor, ab: Tensor | None, settings: Settings) -> Tensor:
    """[b h i j]"""
    s = torch.matmul(q, k.mT)
    s = (s if ab is None else s + ab) * settings.softmax_scale
    return s.masked_fill(~settings.visible, settings.mask_value)


def forward(
    q: Tensor, k: Tensor, v: Tensor, ab: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, sum of exponentials, greatest logit, all in fp32 or better."""
    with no_autocast(q.device.type):
        q, k, v = upcast(q, k, v)
        s = masked_logits(q, k, ab, settings)
        hidden = ~settings.visible.any(dim=-1)
        m = s.detach().amax(dim=-1) if s.shape[-1] else s.new_zeros(s.shape[:-1])
        m = m.masked_fill(hidden, float("-inf"))
        p = torch.exp(s - m.masked_fill(hidden, 0.0)[..., None])
        p = p.masked_fill(hidden[..., None], 0.0)
        l = p.sum(dim=-1)
        return torch.matmul(p / l.masked_fill(hidden, 1.0)[..., None], v), l, m


def mha_reference_no_custom_vjp(
    q: Tensor, k: Tensor, v: Tensor, ab: Tensor | None = None,
    segment_ids: SegmentIds | Tensor | None = None, *, causal: bool = False,
    mask_value: float = DEFAULT_MASK_VALUE, softmax_scale: float = 1.0,
    save_residuals: bool = False,
) -> Any:  # fmt: skip
    """`mha_reference` with the gradients of autograd.

    Returns:
        o [B, H, T, E], and with `save_residuals` (o, l, m): the sum of exponentials
        `l_i = sum_j exp(s_ij - m_i)` and the greatest logit m, both [B, H, T] in float32 (float64
        for float64 inputs). The log-sum-exp is `m + log(l)`. A query that sees no key has o = 0,
        l = 0 and m = -inf. m has no gradient.
    """
    settings = check_call(q, k, v, ab, segment_ids, causal, mask_value, softmax_scale)
    save_residuals = check_bool("save_residuals", save_residuals)
    o, l, m = forward(q, k, v, ab, settings)
    o = o.to(q.dtype)
    return (o, l, m) if save_residuals else o


def mha_reference_bwd(
    q: Tensor, k: Tensor, v: Tensor, ab: Tensor | None, segment_ids: SegmentIds | Tensor | None,
    o: Tensor, l: Tensor, m: Tensor, do: Tensor, causal: bool = False,
    mask_value: float = DEFAULT_MASK_VALUE, softmax_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Explicit gradients of `mha_reference`.

    With `p_ij = exp(s_ij - m_i) / l_i`: `dv_j = sum_i p_ij do_i`,
    `ds_ij = p_ij (do_i . v_j - do_i . o_i)` if i sees j, else 0, `dab = softmax_scale ds`,
    `dq_i = sum_j dab_ij k_j`, `dk_j = sum_i dab_ij q_i`.

    Args:
        q, k, v, ab, segment_ids, causal, mask_value, softmax_scale: arguments of the forward.
        o, l, m: results of `mha_reference_no_custom_vjp(..., save_residuals=True)`. o may be
            float32 if q is narrower.
        do: gradient of o, [B, H, T, E].

    Returns:
        (dq, dk, dv, dab), each with the shape and dtype of its tensor; dab is None if ab is None.

    Raises:
        ValueError: shapes, dtypes, devices or settings do not match.
    """
    settings = check_call(q, k, v, ab, segment_ids, causal, mask_value, softmax_scale)
    check_given(o=o, l=l, m=m, do=do)
    check_shapes(
        q=(q, "B H T D"), v=(v, "B H S E"), o=(o, "B H T E"), do=(do, "B H T E"),
        l=(l, "B H T"), m=(m, "B H T"),
    )  # fmt: skip
    check_same(q=q, do=do)
    check_same(l=l, m=m)
    check_devices(q=q, o=o, l=l)
    if o.dtype not in (q.dtype, torch.promote_types(q.dtype, torch.float32)):
        raise ValueError(f"o must be {q.dtype} as q is, or float32, got {o.dtype}")
    return gradients(q, k, v, ab, settings, o, l, m, do)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, ab: Tensor | None, settings: Settings, o: Tensor, l: Tensor,
    m: Tensor, do: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """`mha_reference_bwd` of checked arguments."""
    dtype = q.dtype
    with no_autocast(q.device.type):
        q, k, v, o, do = upcast(q, k, v, o, do)
        s = masked_logits(q, k, ab, settings)
        # exp(s - inf) is 0: a query that sees no key neither gives nor gets gradients
        hidden = m == float("-inf")
        p = torch.exp(s - m.masked_fill(hidden, float("inf"))[..., None])
        p = p / l.masked_fill(hidden, 1.0)[..., None]
        dv = torch.matmul(p.mT, do)
        delta = (do * o).sum(dim=-1, keepdim=True)
        ds = p * (torch.matmul(do, v.mT) - delta) * settings.softmax_scale
        ds = ds.masked_fill(~settings.visible, 0.0)
        dab = None if ab is None else ds.sum_to_size(ab.shape).to(ab.dtype)
        dq, dk = torch.matmul(ds, k), torch.matmul(ds.mT, q)
        return dq.to(dtype), dk.to(dtype), dv.to(dtype), dab


class Reference(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ab: Any, settings: Settings) -> Tensor:
        o, l, m = forward(q, k, v, ab, settings)
        ctx.save_for_backward(q, k, v, ab, o, l, m)
        ctx.settings = settings
        # compiled by torch 2.11, `to` without a cast would make all gradients zeros
        return o if o.dtype == q.dtype else o.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:  # type: ignore[override]
        refuse_batched(do)
        q, k, v, ab, o, l, m = ctx.saved_tensors
        if torch.is_grad_enabled():
            # second derivatives need l to depend on the inputs
            o, l, m = forward(q, k, v, ab, ctx.settings)
        # not `mha_reference_bwd`: dynamo refuses its checks within a backward
        return *gradients(q, k, v, ab, ctx.settings, o, l, m, do), None


def mha_reference(
    q: Tensor, k: Tensor, v: Tensor, ab: Tensor | None = None,
    segment_ids: SegmentIds | Tensor | None = None, causal: bool = False,
    mask_value: float = DEFAULT_MASK_VALUE, softmax_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """Dense softmax attention with the backward `mha_reference_bwd`.

    `o_i = softmax_j(s_ij) v_j` with `s_ij = (q_i . k_j + ab_ij) softmax_scale` if query i sees key
    j, else `mask_value`. `softmax_scale` multiplies the bias too and is 1 by default. For usual
    attention pass `softmax_scale = D ** -0.5` and the bias divided by it.

    A causal query i sees keys j <= i, even if T and S differ: the mask is aligned at the top left.
    (`chunked_attention` by default aligns the last query to the last key.) A query that sees no key
    gives 0. (A softmax over its mask values would give the mean of hidden values.)

    Args:
        q, k, v: [B, H, T, D], [B, H, S, D] and [B, H, S, E].
        ab: attention bias, broadcasts to [B, H, T, S]; None for none.
        segment_ids: `SegmentIds(q [B, T], kv [B, S])`, or one tensor [B, T] if T = S. A query sees
            only keys of its own segment.
        causal: keys j <= i only.
        mask_value: logit of masked pairs.
        softmax_scale: multiplies dot products and bias.

    Returns:
        [B, H, T, E]. Logits and softmax are float32 or better, without autocast. Deterministic.

    Raises:
        ValueError: shapes, dtypes, devices or settings do not match.
    """
    refuse_transforms("mha_reference")
    settings = check_call(q, k, v, ab, segment_ids, causal, mask_value, softmax_scale)
    return Reference.apply(q, k, v, ab, settings)
