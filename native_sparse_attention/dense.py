"""Dense attention in plain PyTorch, for masks that have no kernel: in chunks, under a mask that is
cut to blocks, and with forward and backward written out, as an oracle for kernels. Shapes, dtypes,
devices and settings that do not match are a ValueError that names the argument.

    B b  batch     T i  queries    H  query heads                     D d  key width
    K k  KV heads  S j  keys       G g  query heads of one KV head    E e  value width
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import blocks
from .checks import (
    FLOAT_DTYPES,
    INTEGER_DTYPES,
    TOO_LARGE,
    check_any_offset,
    check_bool,
    check_bools,
    check_broadcasts,
    check_callable,
    check_given,
    check_groups,
    check_int,
    check_ints,
    check_mask_value,
    check_number,
    check_positive,
    check_same,
    check_scale,
    check_shapes,
    check_tensor,
    describe,
    is_strided,
    refusal,
)
from .compat import cast_to_autocast_dtype, no_autocast, refuse_transforms
from .masks.nsa import MaskMod
from .ops.chunked import AttendTiles, Plan, attend, refuse_batched, split_range
from .ops.reference import Visibility, query_positions, upcast

# far below any logit, but adding a logit does not overflow float32
DEFAULT_MASK_VALUE = -0.7 * torch.finfo(torch.float32).max


class SegmentIds(NamedTuple):
    """Segment ids of queries [B, T] and of keys and values [B, S]: a query sees only keys with its
    own id, so attention never crosses documents that share a packed row. Ids are integers in any
    order. A segment need not be contiguous, and an id of the queries need not occur among the keys.
    """

    q: Tensor
    kv: Tensor


def check_segment_ids(
    segment_ids: SegmentIds | Tensor | None, dims: dict[str, int], device: torch.device
) -> SegmentIds | None:
    """Check segment ids: integers [B, T] and [B, S], or one tensor for both if T = S."""
    if segment_ids is None:
        return None
    if isinstance(segment_ids, Tensor) and dims["T"] == dims["S"]:
        segment_ids = SegmentIds(segment_ids, segment_ids)
    if not isinstance(segment_ids, tuple) or len(segment_ids) != 2:
        got = f"{describe(segment_ids)} for T={dims['T']} and S={dims['S']}"
        expected = "SegmentIds(q, kv), one tensor [B, T] where T = S, or None"
        raise refusal("segment_ids", expected, got=got)
    for name, ids, axis in zip(("q", "kv"), segment_ids, "TS", strict=True):
        check_given(**{f"segment_ids.{name}": ids})
        shape = (dims["B"], dims[axis])
        check_tensor(f"segment_ids.{name}", ids, INTEGER_DTYPES, device, shape)
    return SegmentIds(*segment_ids)


def is_same_segment(segments: SegmentIds, rows: slice, keys: slice) -> Tensor:
    """Which queries and keys of a tile share a segment, [b i j]."""
    return segments.q[:, rows, None] == segments.kv[:, None, keys]


def chunked_attention(
    q: Tensor, k: Tensor, v: Tensor, *, q_chunk_size: int = 1024, k_chunk_size: int = 4096,
    causal: bool = False, sliding_window_size: int | None = None,
    segment_ids: SegmentIds | Tensor | None = None, soft_cap: float | None = None,
    mask: Tensor | None = None, mask_mod: MaskMod | None = None,
    q_offset: int | Tensor | None = None, scale: float | None = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    """Softmax attention in memory O(T + S), forward and backward, under any mask.

    `out_i = softmax_j(cap(q_i . k_j * scale)) v_j`, `cap(x) = c tanh(x / c)` for `soft_cap` c, over
    the keys j that `causal`, `sliding_window_size`, `segment_ids`, `mask` and `mask_mod` all let
    query i see. Forward and backward visit tiles of queries and keys with a running maximum and sum
    (Rabe and Staats, arXiv 2112.05682): a few tiles of `B * H * q_chunk_size * k_chunk_size`
    float32 scores are alive at a time. Chunks of keys that causality or the window hides are
    skipped, unless `q_offset` is a tensor, since that would wait for the device.

    Args:
        q, k, v: [B, T, H, D], [B, S, K, D] and [B, S, K, E]. K divides H, and query head h reads KV
            head `h // (H / K)`. Autocast casts them to its dtype.
        q_chunk_size, k_chunk_size: queries and keys of a tile; they change results by rounding.
        causal: keys j <= i only.
        sliding_window_size: w, in tokens: keys `i - w .. i` if causal, else `i - w .. i + w`.
        segment_ids: `SegmentIds(q [B, T], kv [B, S])`, or one tensor [B, T] if T = S.
        soft_cap: c, in logits; applied after `scale` and before the masks.
        mask: bool, broadcasts to [B, H, T, S]; True is visible.
        mask_mod: `(b, h, i, j) -> bool` of index tensors that broadcast, as in flex_attention. i
            and j index q and k, regardless of `q_offset`. It is called tile by tile.
        q_offset: position of query 0, an int or a tensor [B]; key j has position j. By default
            `S - T`: the queries are the last tokens. They may lie before or past all keys.
        scale: multiplies the dot products; `D ** -0.5` by default.
        return_lse: also return the log-sum-exp of each query's logits.

    Returns:
        [B, T, H, E] in q's dtype, and with `return_lse` also the natural log-sum-exp [B, T, H],
        float32 (float64 for float64 inputs), which has gradients too. A query that sees no key has
        output 0, log-sum-exp -inf and no gradient. Deterministic. Second derivatives work, but keep
        every tile.
    """
    refuse_transforms("chunked_attention")
    dims = check_shapes(q=(q, "B T H D"), k=(k, "B S K D"), v=(v, "B S K E"))
    q, k, v = cast_to_autocast_dtype(q, k, v)
    check_same(q=q, k=k, v=v)
    causal, return_lse = check_bools(causal=causal, return_lse=return_lse)
    check_groups(dims["H"], dims["K"], (dims["T"], dims["S"]))
    B, T, S, H = (dims[axis] for axis in "BTSH")
    q_chunk_size, k_chunk_size = check_ints(1, q_chunk_size=q_chunk_size, k_chunk_size=k_chunk_size)
    if sliding_window_size is not None:
        sliding_window_size = check_int("sliding_window_size", sliding_window_size, 0)
    soft_cap = check_positive("soft_cap", soft_cap)
    scale = check_scale(scale)
    check_broadcasts("mask", mask, (torch.bool,), q.device, B=B, H=H, T=T, S=S)
    mask = None if mask is None else mask[(None,) * (4 - mask.ndim)].expand(-1, -1, T, S)
    check_callable("mask_mod", mask_mod, "(b, h, i, j)")
    segments = check_segment_ids(segment_ids, dims, q.device)
    q_offset = S - T if q_offset is None else check_any_offset(q_offset, B, q.device)
    is_banded = causal or sliding_window_size is not None
    max_past = TOO_LARGE if sliding_window_size is None else sliding_window_size
    max_future = 0 if causal else max_past
    positions = query_positions(q, q_offset)[:, None, :, None]
    b, h, i, j = (torch.arange(n, device=q.device) for n in (B, H, T, S))
    b, h, i = b[:, None, None, None], h[:, None, None], i[:, None]

    def tile_mask(rows: slice, keys: slice) -> Tensor | None:
        """[b|1 k|1 g|1 i j]"""
        masks = []
        # the band holds the whole tile, as far as the host knows the positions
        is_covered = (
            isinstance(q_offset, int)
            and q_offset + rows.stop - 1 - keys.start <= max_past
            and keys.stop - 1 - q_offset - rows.start <= max_future
        )
        if is_banded and not is_covered:
            distance = positions[:, :, rows] - j[keys]
            masks.append((distance <= max_past) & (-distance <= max_future))
        if segments is not None:
            masks.append(is_same_segment(segments, rows, keys)[:, None])
        if mask is not None:
            masks.append(mask[:, :, rows, keys])
        if mask_mod is not None:
            allowed = mask_mod(b, h, i[rows], j[keys])
            check_given(**{"what mask_mod returns": allowed})
            axes = dict(b=B, h=H, i=rows.stop - rows.start, j=keys.stop - keys.start)
            check_broadcasts("what mask_mod returns", allowed, (torch.bool,), q.device, **axes)
            masks.append(allowed[(None,) * (4 - allowed.ndim)])
        if not masks:
            return None
        visible = reduce(torch.logical_and, masks)
        # [b h i j] -> [b k g i j]; an axis of length 1 becomes two
        return visible.unflatten(1, (dims["K"], -1) if visible.shape[1] > 1 else (1, 1))

    def key_range(first: int, last: int) -> tuple[int, int]:
        return (first - max_past, last + max_future + 1) if is_banded else (0, S)

    dtype = q.dtype
    with no_autocast(q.device.type):
        q, k, v = upcast(q, k, v)
        out, lse = attend(
            q, k, v, Visibility(tile_mask, key_range, q_offset), scale=scale, soft_cap=soft_cap,
            return_lse=True, chunk_sizes=(q_chunk_size, k_chunk_size),
        )  # fmt: skip
    return (out.to(dtype), lse) if return_lse else out.to(dtype)


def mask_blocker(mask: Tensor, block_q: int, block_kv: int) -> Tensor:
    """Number of visible pairs in each block of a mask [.., q_len, kv_len] of any dtype.

    `counts[.., r, c] = sum of (mask != 0)` over the block's `block_q` rows and `block_kv` columns,
    int64 [.., ceil(q_len / block_q), ceil(kv_len / block_kv)]. The last blocks may be partial.
    """
    block_q, block_kv = check_ints(1, block_q=block_q, block_kv=block_kv)
    if not is_strided(mask) or mask.ndim < 2:
        raise refusal("mask", "a tensor of shape [.. q_len kv_len]", mask)
    q_len, kv_len = mask.shape[-2:]
    r, c = blocks.ceil_div(q_len, block_q), blocks.ceil_div(kv_len, block_kv)
    counts = torch.empty((*mask.shape[:-2], r, c), dtype=torch.int64, device=mask.device)
    # one row of blocks at a time avoids a second array of the mask's size
    for row, rows in enumerate(split_range(0, q_len, block_q)):
        line = F.pad((mask[..., rows, :] != 0).sum(dim=-2), (0, -kv_len % block_kv))
        counts[..., row, :] = line.unflatten(-1, (c, block_kv)).sum(dim=-1)
    return counts


def block_masked_attention(
    q: Tensor, k: Tensor, v: Tensor, segment_ids: SegmentIds | Tensor | None, block_kv: int,
    block_q: int, mask: Tensor, mask_value: float, cap: float | None = None,
    save_residuals: bool = False,
) -> Any:  # fmt: skip
    """Softmax attention under an arbitrary mask, block by block, in memory linear in the lengths
    besides the mask, with the signature of MaxText's `flash_attention_block_masked`.

    `out_i = softmax_j(s_ij) v_j` with `s_ij = cap(q_i . k_j)`, `cap(x) = c tanh(x / c)`, if query i
    sees key j, else `mask_value`, over the blocks of the mask that hold a nonzero. All other blocks
    are neither scored nor read. A query that sees no key gives 0.

    `mask_value` takes part in the softmax like any logit, but only in blocks that are not skipped.
    Choose it so low that `exp(mask_value - lse)` is 0 (-inf, -1e30). Then results depend on the
    block sizes only by rounding.

    Args:
        q: [batch, kv_heads, q_heads_per_kv, q_len, head_dim]. Nothing scales the dot products: pass
            `q * head_dim ** -0.5`. Autocast casts q, k and v to its dtype.
        k, v: [batch, kv_heads, kv_len, head_dim] and [batch, kv_heads, kv_len, v_head_dim].
        segment_ids: `SegmentIds(q [batch, q_len], kv [batch, kv_len])`, or None. Segments do not
            skip blocks.
        block_kv, block_q: keys and queries of a block; the last may be partial.
        mask: [q_len, kv_len] for the whole batch, or [batch, q_len, kv_len], of any dtype; nonzero
            is visible. A block is skipped if it is empty in the whole batch. The host waits for the
            counts of the blocks: once per call, and a graph break under torch.compile.
        mask_value: logit of masked pairs.
        cap: c, in logits; before the mask. None for no cap.

    Returns:
        [batch, kv_heads, q_heads_per_kv, q_len, v_head_dim] in q's dtype, and with `save_residuals`
        also a dict of `logsumexp` (natural) and `max_logits` [batch, kv_heads, q_heads_per_kv,
        q_len], float32 (float64 for float64 inputs), both -inf for a query that sees no key.
        Gradients pass through `logsumexp`, not through `max_logits`. Deterministic.
    """
    refuse_transforms("block_masked_attention")
    dims = check_shapes(q=(q, "B K G T D"), k=(k, "B K S D"), v=(v, "B K S E"))
    q, k, v = cast_to_autocast_dtype(q, k, v)
    check_same(q=q, k=k, v=v)
    B, T, S = (dims[axis] for axis in "BTS")
    block_kv, block_q = check_ints(1, block_kv=block_kv, block_q=block_q)
    cap = check_positive("cap", cap)
    save_residuals = check_bool("save_residuals", save_residuals)
    mask_value = check_mask_value(mask_value, q.dtype)
    segments = check_segment_ids(segment_ids, dims, q.device)
    if not is_strided(mask) or list(mask.shape) not in ([T, S], [B, T, S]):
        raise ValueError(f"mask must have shape {[T, S]} or {[B, T, S]}, got {describe(mask)}")
    check_tensor("mask", mask, (mask.dtype,), q.device)
    mask = mask if mask.ndim == 3 else mask[None]

    row_chunks, key_chunks = split_range(0, T, block_q), split_range(0, S, block_kv)
    counts = mask_blocker(mask, block_q, block_kv).sum(dim=0).tolist()
    tiles = [
        (rows, [keys for keys, count in zip(key_chunks, line, strict=True) if count])
        for rows, line in zip(row_chunks, counts, strict=True)
    ]

    def tile_mask(rows: slice, keys: slice) -> Tensor | None:
        """[b|1 1 1 i j]"""
        masks = []
        pairs = len(mask) * (rows.stop - rows.start) * (keys.stop - keys.start)
        if counts[rows.start // block_q][keys.start // block_kv] < pairs:
            masks.append(mask[:, rows, keys] != 0)
        if segments is not None:
            masks.append(is_same_segment(segments, rows, keys))
        return reduce(torch.logical_and, masks)[:, None, None] if masks else None

    visibility = Visibility(tile_mask, lambda first, last: (0, S), q_offset=0)
    plan = Plan(tiles, visibility, scale=1.0, soft_cap=cap, mask_value=mask_value)
    with no_autocast(q.device.type):
        out, lse, max_logits = AttendTiles.apply(*upcast(q, k, v), None, plan)
    out = out.to(q.dtype)
    return (out, {"logsumexp": lse, "max_logits": max_logits}) if save_residuals else out


def check_block_number(name: str, number: Any) -> int | Tensor:
    """Check a number of a block, or a tensor of them, which becomes int64: narrow ones overflow."""
    if not isinstance(number, Tensor):
        return check_int(name, number, 0)
    check_tensor(name, number, INTEGER_DTYPES, number.device)
    return number.long()


def below_or_on_diag(
    r: int | Tensor, r_blk_size: int, c: int | Tensor, c_blk_size: int
) -> bool | Tensor:
    """Whether block (r, c), of r_blk_size x c_blk_size, has a key that a causal query sees:
    `(r + 1) r_blk_size - 1 >= c c_blk_size`. A bool, or a tensor of them if r or c is one."""
    r_blk_size, c_blk_size = check_ints(1, r_blk_size=r_blk_size, c_blk_size=c_blk_size)
    r, c = check_block_number("r", r), check_block_number("c", c)
    return (r + 1) * r_blk_size - 1 >= c * c_blk_size


# written out: dense, memory O(T S), in the layout [B, H, T, D] of kernels


def check_call(
    q: Tensor, k: Tensor, v: Tensor, ab: Tensor | None, segment_ids: SegmentIds | Tensor | None,
    causal: bool, mask_value: float, softmax_scale: float,
) -> tuple[Tensor, float, float]:  # fmt: skip
    """Check a call. Returns the visible pairs [b|1 1 i j], the mask value and the scale."""
    dims = check_shapes(q=(q, "B H T D"), k=(k, "B H S D"), v=(v, "B H S E"))
    check_same(q=q, k=k, v=v)
    axes = {axis: dims[axis] for axis in "BHTS"}
    check_broadcasts("ab", ab, FLOAT_DTYPES, q.device, **axes)
    visible = torch.ones(1, 1, dims["T"], dims["S"], dtype=torch.bool, device=q.device)
    if check_bool("causal", causal):
        visible = visible.tril()
    segments = check_segment_ids(segment_ids, dims, q.device)
    if segments is not None:
        visible = visible & is_same_segment(segments, slice(None), slice(None))[:, None]
    mask_value = check_mask_value(mask_value, q.dtype)
    return visible, mask_value, check_number("softmax_scale", softmax_scale)


def masked_logits(
    q: Tensor, k: Tensor, ab: Tensor | None, visible: Tensor, mask_value: float, scale: float
) -> Tensor:
    """[b h i j]"""
    s = torch.matmul(q, k.mT) if ab is None else torch.matmul(q, k.mT) + ab
    return (s * scale).masked_fill(~visible, mask_value)


def mha_forward(
    q: Tensor, k: Tensor, v: Tensor, ab: Tensor | None, visible: Tensor, *settings: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, sum of exponentials, greatest logit, all in fp32 or better."""
    with no_autocast(q.device.type):
        q, k, v = upcast(q, k, v)
        s = masked_logits(q, k, ab, visible, *settings)
        m = s.detach().amax(dim=-1) if s.shape[-1] else s.new_zeros(s.shape[:-1])
        m = m.masked_fill(~visible.any(dim=-1), float("-inf"))
        hidden = m == float("-inf")  # also by a bias of -inf
        p = torch.exp(s - m.masked_fill(hidden, 0.0)[..., None])
        p = p.masked_fill(hidden[..., None], 0.0)
        l = p.sum(dim=-1)
        return torch.matmul(p / l.masked_fill(hidden, 1.0)[..., None], v), l, m


def mha_gradients(
    q: Tensor, k: Tensor, v: Tensor, ab: Tensor | None, o: Tensor, l: Tensor, m: Tensor, do: Tensor,
    visible: Tensor, mask_value: float, softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """`mha_reference_bwd` of checked arguments."""
    dtype = q.dtype
    with no_autocast(q.device.type):
        q, k, v, o, do = upcast(q, k, v, o, do)
        s = masked_logits(q, k, ab, visible, mask_value, softmax_scale)
        # exp(s - inf) is 0: a query that sees no key neither gives nor gets gradients
        hidden = m == float("-inf")
        p = torch.exp(s - m.masked_fill(hidden, float("inf"))[..., None])
        p = p / l.masked_fill(hidden, 1.0)[..., None]
        dv = torch.matmul(p.mT, do)
        delta = (do * o).sum(dim=-1, keepdim=True)
        ds = p * (torch.matmul(do, v.mT) - delta) * softmax_scale
        ds = ds.masked_fill(~visible, 0.0)
        dab = None if ab is None else ds.sum_to_size(ab.shape).to(ab.dtype)
        dq, dk = torch.matmul(ds, k), torch.matmul(ds.mT, q)
        return dq.to(dtype), dk.to(dtype), dv.to(dtype), dab


class Reference(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ab: Any, *settings: Any) -> Tensor:
        o, l, m = mha_forward(q, k, v, ab, *settings)
        ctx.save_for_backward(q, k, v, ab, o, l, m)
        ctx.settings = settings
        # compiled by torch 2.11, `to` without a cast would make all gradients zeros
        return o if o.dtype == q.dtype else o.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:  # type: ignore[override]
        refuse_batched(do)
        q, k, v, ab, o, l, m = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives need l to depend on the inputs
            o, l, m = mha_forward(q, k, v, ab, *ctx.settings)
        # not `mha_reference_bwd`: dynamo refuses its checks within a backward
        return *mha_gradients(q, k, v, ab, o, l, m, do, *ctx.settings), None, None, None


def mha_reference(
    q: Tensor, k: Tensor, v: Tensor, ab: Tensor | None = None,
    segment_ids: SegmentIds | Tensor | None = None, causal: bool = False,
    mask_value: float = DEFAULT_MASK_VALUE, softmax_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """Dense softmax attention with the backward `mha_reference_bwd`.

    `o_i = softmax_j(s_ij) v_j` with `s_ij = (q_i . k_j + ab_ij) softmax_scale` if query i sees key
    j, else `mask_value`. `softmax_scale` is 1 by default: for usual attention pass `D ** -0.5` and
    the bias divided by it. A query that sees no key gives 0, not the mean of hidden values.

    Args:
        q, k, v: [B, H, T, D], [B, H, S, D] and [B, H, S, E].
        ab: attention bias, broadcasts to [B, H, T, S]; None for none. -inf hides a key.
        segment_ids: `SegmentIds(q [B, T], kv [B, S])`, or one tensor [B, T] if T = S.
        causal: keys j <= i only, aligned at the top left even if T and S differ.
        mask_value: logit of masked pairs.
        softmax_scale: multiplies dot products and bias.

    Returns:
        [B, H, T, E]. Logits and softmax are float32 or better, without autocast. Deterministic.
    """
    refuse_transforms("mha_reference")
    settings = check_call(q, k, v, ab, segment_ids, causal, mask_value, softmax_scale)
    return Reference.apply(q, k, v, ab, *settings)


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
    o, l, m = mha_forward(q, k, v, ab, *settings)
    o = o.to(q.dtype)
    return (o, l, m) if check_bool("save_residuals", save_residuals) else o


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
    """
    settings = check_call(q, k, v, ab, segment_ids, causal, mask_value, softmax_scale)
    results = dict(o=(o, "B H T E"), l=(l, "B H T"), m=(m, "B H T"), do=(do, "B H T E"))
    check_shapes(q=(q, "B H T D"), v=(v, "B H S E"), **results)
    # no wider than what is computed in
    dtypes = (q.dtype,) if q.dtype == torch.float64 else FLOAT_DTYPES[:-1]
    for name, (tensor, _) in results.items():
        check_tensor(name, tensor, dtypes, q.device)
    return mha_gradients(q, k, v, ab, o, l, m, do, *settings)
