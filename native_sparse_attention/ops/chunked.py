"""The eager backend: the specification (`reference.py`) as written for small calls, and in memory
linear in the length, forward and backward, for larger ones.

Softmax attention goes tile by tile with a running maximum and sum (Rabe and Staats, arXiv
2112.05682); the selection goes a chunk of queries at a time. Backwards compute tiles and chunks
again. `dense/` uses the same tiles.

Half precisions are computed in fp32, products included, and results are rounded once. Axes have the
letters of `reference.py`, and e is the value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .. import blocks
from ..compat import cast_to_autocast_dtype, no_autocast, refuse_transforms
from ..config import AttentionConfig
from . import reference
from .call import Call
from .reference import Visibility, times, upcast

# On the CPU, scores that the specification forms at once: 16 MiB of fp32; and those of a tile or
# chunk: 4 MiB, so that intermediates stay in the cache. A GPU forms GPU_FACTOR times more, since it
# would wait for the launches of small chunks.
MAX_SCORES = 2**22
CHUNK_SCORES = 2**20
GPU_FACTOR = 16
KEYS = 1024  # of a tile
LEAST_QUERIES = 16  # of a tile or chunk, since each adds to the gradients of its keys


def gpu_factor(device: torch.device) -> int:
    return 1 if device.type == "cpu" else GPU_FACTOR


def split_range(start: int, stop: int, size: int) -> list[slice]:
    """Slices of `size` from start to stop; the last may be shorter."""
    return [slice(a, min(a + size, stop)) for a in range(start, stop, size)]


def refuse_batched(*grads: Tensor) -> None:
    """Refuse gradients that torch.autograd or `vmap` has batched, in backwards that write in
    place."""
    refuse_transforms("the backward of attention in linear memory")
    if torch.compiler.is_compiling():
        return
    if any(torch._C._functorch.is_legacy_batchedtensor(g) for g in grads):
        raise NotImplementedError(
            "the backward of attention in linear memory cannot batch gradients (is_grads_batched, "
            "vectorize=True): use torch.autograd.grad, one gradient at a time"
        )


class Plan(NamedTuple):
    """Which tiles to visit, and how to form their logits: for each chunk of queries, which cover
    all queries, its chunks of keys; and the logit of masked pairs. If `mask_value` is finite, it
    takes part in the softmax of a row that sees some key. A row that sees no key is empty."""

    tiles: Sequence[tuple[slice, Sequence[slice]]]
    visibility: Visibility
    scale: float
    soft_cap: float | None = None
    mask_value: float = float("-inf")


def form_tile(
    q: Tensor, k: Tensor, gates: Tensor | None, rows: slice, keys: slice, plan: Plan
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The tile of queries q [b k g i d], which are `rows`, with `keys` of k [b k j d]: the logits
    [b k g i j] of the softmax, those before gates and mask, the slope of the cap, the factors of
    the gates, and the mask."""
    s = times(q, k[:, :, keys].mT) * plan.scale
    slope, factors = s.new_ones(()), None
    if plan.soft_cap is not None:
        t = torch.tanh(s / plan.soft_cap)
        s, slope = t * plan.soft_cap, 1.0 - t.square()
    logits, mask = s, plan.visibility.mask(rows, keys)
    if gates is not None:
        factors = plan.visibility.expand_gates(gates[:, rows], rows, keys)
        logits = s * factors
    if mask is not None:
        logits = logits.masked_fill(~mask, plan.mask_value)
    return logits, s, slope, factors, mask


class AttendTiles(torch.autograd.Function):
    """Map q [b k g i d], k [b k j d], v [b k j e], gates [b i r n] or None and a plan to output
    [b k g i e], log-sum-exp and greatest logit [b k g i], which has no gradient. The backward
    computes each tile's probabilities again, in differentiable steps: autograd differentiates the
    backward too, and keeps every tile for that."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, plan: Plan
    ) -> tuple[Tensor, Tensor, Tensor]:
        # with q's memory order of axes
        is_same = v.shape[-1] == q.shape[-1]
        out = torch.empty_like(q) if is_same else q.new_empty(*q.shape[:-1], v.shape[-1])
        lse = q.new_empty(q.shape[:-1])
        greatest = torch.empty_like(lse)
        for rows, key_chunks in plan.tiles:
            q_rows = q[..., rows, :]
            acc = q.new_zeros(*q_rows.shape[:-1], v.shape[-1])  # unnormalized output
            m = q.new_full(q_rows.shape[:-1], float("-inf"))  # greatest logit so far
            l, has_keys = torch.zeros_like(m), torch.zeros_like(m, dtype=torch.bool)
            for keys in key_chunks:
                logits, *_, mask = form_tile(q_rows, k, gates, rows, keys, plan)
                m_new = torch.maximum(m, logits.amax(dim=-1))
                shift = m_new.masked_fill(m_new == float("-inf"), 0.0)  # rows that see nothing yet
                p, alpha = torch.exp(logits - shift[..., None]), torch.exp(m - shift)
                acc = acc * alpha[..., None] + times(p, v[:, :, keys])
                m, l = m_new, l * alpha + p.sum(dim=-1)
                has_keys = has_keys | (True if mask is None else mask.any(dim=-1))
            l = l.masked_fill(~has_keys, 1.0)
            out[..., rows, :] = (acc / l[..., None]).masked_fill(~has_keys[..., None], 0.0)
            lse[..., rows] = (m + l.log()).masked_fill(~has_keys, float("-inf"))
            greatest[..., rows] = m.masked_fill(~has_keys, float("-inf"))
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, gates, out, lse)
        ctx.mark_non_differentiable(greatest)
        return out, lse, greatest

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor, _: Any) -> Any:  # type: ignore[override]
        """Tile by tile: `ds = p (dO . v - dO . o + dlse)`."""
        refuse_batched(d_out, d_lse)
        plan, (q, k, v, gates, out, lse) = ctx.plan, ctx.saved_tensors
        d_q, d_k, d_v = (torch.zeros_like(t) for t in (q, k, v))
        d_gates: Any = None if gates is None else torch.zeros_like(gates)
        # exp(s - inf) is 0: rows that see no key get no gradient, whatever their logits
        lse = lse.masked_fill(lse == float("-inf"), float("inf"))
        with no_autocast(q.device.type):
            for rows, key_chunks in plan.tiles:
                q_rows, do = q[..., rows, :], d_out[..., rows, :]
                delta = (do * out[..., rows, :]).sum(dim=-1) - d_lse[..., rows]
                d_rows = torch.zeros_like(q_rows)
                for keys in key_chunks:
                    logits, capped, slope, factors, mask = form_tile(
                        q_rows, k, gates, rows, keys, plan
                    )
                    p = torch.exp(logits - lse[..., rows, None])
                    d_v[:, :, keys] += times_over_rows(p, do)
                    ds = p * (times(do, v[:, :, keys].mT) - delta[..., None])
                    if mask is not None:
                        ds = ds.masked_fill(~mask, 0.0)
                    if factors is not None:
                        d_factors = (ds * capped).sum_to_size(factors.shape)
                        with torch.enable_grad():  # factors are linear in the gates
                            leaf = gates[:, rows].detach().requires_grad_()
                            factors_of_leaf = plan.visibility.expand_gates(leaf, rows, keys)
                        d_gates[:, rows] += torch.autograd.grad(
                            factors_of_leaf, leaf, d_factors, create_graph=torch.is_grad_enabled()
                        )[0]
                        ds = ds * factors
                    ds = ds * slope * plan.scale
                    d_rows = d_rows + times(ds, k[:, :, keys])
                    d_k[:, :, keys] += times_over_rows(ds, q_rows)
                d_q[..., rows, :] = d_rows
        return d_q, d_k, d_v, d_gates, None


def times_over_rows(a: Tensor, x: Tensor) -> Tensor:
    """[b k g i j] times [b k g i y], summed over a group's heads and queries: [b k j y]."""
    b, k, g, i, j = a.shape
    rows = a.reshape(b, k, g * i, j)
    return torch.matmul(rows.transpose(2, 3), x.reshape(b, k, g * i, x.shape[-1]))


def attend(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, *, gates: Tensor | None = None,
    scale: float | None = None, soft_cap: float | None = None, sinks: Tensor | None = None,
    return_lse: bool = False, chunk_sizes: tuple[int, int] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`reference.attend` in memory O(T + S). `chunk_sizes` are queries and keys of a tile."""
    if chunk_sizes is None:
        most = CHUNK_SCORES * gpu_factor(q.device)
        queries = max(LEAST_QUERIES, most // max(1, q.shape[0] * q.shape[2] * KEYS))
        window = k.shape[1] - visibility.key_range(k.shape[1], k.shape[1])[0]
        # a window limits its queries
        chunk_sizes = min(queries, max(64, window) * gpu_factor(q.device)), KEYS
    tiles = []
    for rows in split_range(0, q.shape[1], chunk_sizes[0]):
        start, stop, offset = 0, k.shape[1], visibility.q_offset
        if isinstance(offset, int):  # else the host does not know the positions
            start, stop = visibility.key_range(offset + rows.start, offset + rows.stop - 1)
        key_chunks = split_range(max(0, start), min(k.shape[1], stop), chunk_sizes[1])
        tiles.append((rows, key_chunks))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse, _ = AttendTiles.apply(
        rearrange(q, "b i (k g) d -> b k g i d", k=k.shape[2]),
        rearrange(k, "b j k d -> b k j d"),
        rearrange(v, "b j k e -> b k j e"),
        gates,
        Plan(tiles, visibility, scale, soft_cap),
    )
    out, lse = rearrange(out, "b k g i e -> b i (k g) e"), rearrange(lse, "b k g i -> b i (k g)")
    if sinks is not None:
        sinks = sinks.to(lse.dtype)
        out = out * (lse - sinks).sigmoid()[..., None]
        lse = sinks - F.logsigmoid(sinks - lse)  # logaddexp makes NaN of second derivatives
    return (out, lse) if return_lse else out


def scores_of_query(call: Call, config: AttentionConfig) -> int:
    """Scores that the ranking of one query forms at once."""
    q, ck, mem_k = call.q, call.ck, call.mem_k
    ck = call.k if config.num_selected_groups else ck
    heads, keys = q.shape[2], ck.shape[1] + (0 if mem_k is None else mem_k.shape[1])
    is_mean = config.importance != "probs" and not config.ranks_by_heads
    if is_mean and config.query_heads_share_selected_kv:
        heads = ck.shape[2]
    # interpolation scores every token; otherwise every window and every block has a score
    per_key = max(1, config.d // config.selection_block_size)
    return heads * keys * (config.d if config.interpolated_importance_score else per_key)


def query_chunks(
    call: Call, i: Tensor, config: AttentionConfig
) -> list[tuple[slice, Call, Tensor]]:
    """Slices of the ranked queries; their calls, with the windows that they may see; and their
    positions."""
    q, offset, stride, chunks = call.q, call.q_offset, config.selection_stride, []
    most, per_query = CHUNK_SCORES * gpu_factor(q.device), len(q) * scores_of_query(call, config)
    for rows in split_range(0, q.shape[1], max(LEAST_QUERIES, most // max(1, per_query))):
        stop = call.ck.shape[1]
        if config.causal and isinstance(offset, int):
            last = (blocks.ceil_div(offset, stride) + rows.stop - 1) * stride
            stop = min(stop, blocks.num_visible_windows(last, config.d))
        documents, groups = reference.slice_documents(call.documents, rows), call.block_indices
        groups = None if groups is None else groups[:, rows]
        part = call.but(q=q[:, rows], ck=call.ck[:, :stop], documents=documents)
        part = part.but(block_indices=groups)
        chunks.append((rows, part, i[:, rows]))
    return chunks


def rank(call: Call, i: Tensor, config: AttentionConfig) -> Tensor:
    """`reference.rank` in memory O(T + S)."""
    parts = [reference.rank(part, i, config) for _, part, i in query_chunks(call, i, config)]
    return torch.cat(parts, dim=1)


def gate(call: Call, i: Tensor, config: AttentionConfig, block_indices: Tensor) -> Tensor:
    """`reference.gate` in memory O(T + S): the backward scores the queries again, chunk by
    chunk."""
    options: Any = dict(use_reentrant=False, preserve_rng_state=False)
    parts = [
        checkpoint(reference.gate, part, i, config, block_indices[:, rows], **options)
        for rows, part, i in query_chunks(call, i, config)
    ]
    return torch.cat(parts, dim=1)


def selection_gates(call: Call, config: AttentionConfig, block_indices: Tensor) -> Tensor:
    """`reference.selection_gates` in memory O(T + S), for every backend and device. Compiled graphs
    get the specification, of memory O(T S / d). Blocks other than -1 must be candidates."""
    form = reference.gate if torch.compiler.is_compiling() else gate
    return reference.selection_gates(call, config, block_indices, form)


def forms_few(scores_of_query: int, q: Tensor) -> bool:
    """Whether the specification may form all scores at once. Compiled graphs would unroll chunks,
    so they get the specification at any length."""
    scores = q.shape[0] * q.shape[1] * scores_of_query
    return torch.compiler.is_compiling() or scores <= MAX_SCORES * gpu_factor(q.device)


def select_blocks(call: Call, config: AttentionConfig) -> Tensor:
    scores = scores_of_query(call, config) // config.selection_stride
    form = reference.rank if forms_few(scores, call.q) else rank
    return reference.select_blocks(call, config, form)


def attend_branch(call: Call, config: AttentionConfig, return_lse: bool = False) -> Any:
    """The attention [B T H E] of one branch in fp32 or better, and on request its log-sum-exp."""
    names = [n for n in ("q", "k", "v", "mem_k", "mem_v") if getattr(call, n) is not None]
    floats = cast_to_autocast_dtype(*(getattr(call, n) for n in names))
    q, _, v, *_ = floats
    with no_autocast(q.device.type):
        call = call.but(**dict(zip(names, upcast(*floats), strict=True)))
        keys = call.k.shape[1]
        if config.branches == ("window",):  # only tiles leave out what a narrow window hides
            keys *= blocks.ceil_div(keys, config.sliding_window_size + 1)
        form = reference.attend if forms_few(q.shape[2] * keys, q) else attend
        result = reference.attend_branch(call, config, form, return_lse)
    return (result[0].to(v.dtype), result[1]) if return_lse else result.to(v.dtype)
