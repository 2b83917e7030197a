"""flex_attention by its definition: all scores, a mask, a softmax. Differentiable, memory O(T S),
any device and dtype. A reference for tests, and gradients on a CPU, where flex has none."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks.scalars import check_callable, check_scale
from ..checks.tensors import check_given, check_groups, check_same, check_shapes
from .scores import ScoreMod
from .tiles import MaskMod


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask_mod: MaskMod | None = None,
    score_mod: ScoreMod | None = None,
    scale: float | None = None,
) -> Tensor:
    """`softmax(score_mod(scale * q k^T) over the keys that mask_mod allows) v`.

    q [B H T D], k [B K S D], v [B K S E] to [B H T E]. Query head h reads KV head `h // (H / K)`.
    Scores are float32 or wider. A query that sees no key gives 0 and zero gradients. The function
    calls the score mod once, with indices that broadcast against the scores [B H T S].

    Raises:
        ValueError: shapes, dtypes, devices or settings do not match.
    """
    check_given(q=q, k=k, v=v)
    dims = check_shapes(q=(q, "B H T D"), k=(k, "B K S D"), v=(v, "B K S E"))
    check_same(q=q, k=k, v=v)
    groups = check_groups(dims["H"], dims["K"])
    check_callable("mask_mod", mask_mod, "(b, h, i, j)")
    check_callable("score_mod", score_mod, "(score, b, h, i, j)")
    scale = check_scale(scale)

    B, H, T, S = (dims[axis] for axis in "BHTS")
    dtype = v.dtype
    q, k, v = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (q, k, v))
    scores = torch.einsum("bkgid,bkjd->bkgij", q.unflatten(1, (-1, groups)), k).flatten(1, 2)
    scores = scores * (dims["D"] ** -0.5 if scale is None else scale)
    if score_mod is not None:
        b, h, i, j = (torch.arange(n, device=q.device) for n in (B, H, T, S))
        scores = score_mod(scores, b[:, None, None, None], h[:, None, None], i[:, None], j)
    if mask_mod is not None:
        from torch.nn.attention.flex_attention import create_mask

        allowed = create_mask(mask_mod, B, H, T, S, device=str(q.device))
        scores = scores.masked_fill(~allowed, float("-inf"))
    is_empty = scores.isneginf().all(dim=-1, keepdim=True)
    probs = scores.masked_fill(is_empty, 0.0).softmax(dim=-1).masked_fill(is_empty, 0.0)
    out = torch.einsum("bkgij,bkje->bkgie", probs.unflatten(1, (-1, groups)), v)
    return out.flatten(1, 2).to(dtype)
