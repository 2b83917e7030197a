"""Decoding: attention of a few new tokens per sequence over a KV cache. Sequence lengths differ and
stay on the device.

    B  sequences    T  new tokens per sequence    N  tokens per sequence of storage, or per page
    H, K  query and KV heads    D, E  head dimensions    R_  ranking heads: K or H    n  blocks
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks.tensors import (
    BRANCHES,
    check_exactly,
    check_given,
    check_groups,
    check_indices,
    check_memory,
    check_same,
    check_shapes,
    check_sinks,
    check_weights,
    shown,
)
from ..compat.transforms import refuse_transforms
from ..config import AttentionConfig, config_of_key
from . import branches, dispatch, nsa
from .call import Call
from .triton.operator import operator

__all__ = ["decode_attention", "workspace"]

# counters per sequence and KV head
COUNTERS = 8


def workspace(batch: int, kv_heads: int, device: torch.device) -> Tensor:
    """Counters for `decode_attention`, [B, K, 8] zeros."""
    return torch.zeros(batch, kv_heads, COUNTERS, dtype=torch.int32, device=device)


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ck: Tensor | None,
    cv: Tensor | None,
    branch_gates: Tensor | None,
    lengths: Tensor,
    *,
    sliding_window_size: int,
    compress_block_size: int,
    compress_block_sliding_stride: int,
    selection_block_size: int,
    num_selected_blocks: int,
    counts: Tensor | None = None,
    cq: Tensor | None = None,
    mem_k: Tensor | None = None,
    mem_v: Tensor | None = None,
    window_k: Tensor | None = None,
    window_v: Tensor | None = None,
    page_table: Tensor | None = None,
    ranking: Tensor | None = None,
    counters: Tensor | None = None,
    importance: str = "logits",
    interpolated_importance_score: bool = False,
    num_initial_blocks: int = 0,
    num_local_blocks: int = 1,
    selection_stride: int = 1,
    query_heads_share_selected_kv: bool = True,
    branches: tuple[str, ...] = BRANCHES,
    dense_length: int = 0,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    backend: str | tuple[str, ...] = "auto",
) -> Tensor:
    """Causal `native_sparse_attention` of the T newest tokens of every sequence over a KV cache.
    The cache already holds their keys, values and complete windows.

    Token t of sequence b has position `lengths[b] + t` and sees no later token. Storage past the
    end of a sequence may hold any values, finite or not. The host never reads a length, and shapes
    do not depend on lengths, so a CUDA graph can capture a step.

    Args:
        q: queries with rotary embedding, [B, T, H, D]. The kernels take up to 16 new tokens.
        k, v: storage [B, N, K, D] and [B, N, K, E], with any strides. With `page_table` the shape
            is [pages, N, K, D], N tokens per page.
        ck, cv: storage of windows, [B, W, K, D] and [B, W, K, E]; paged, W = N / d.
            None where the branches do not read them, as in `native_sparse_attention`.
        branch_gates: [B, T, H, branches], in the order compressed, selected, window; None for one.
        lengths: integers [B], tokens of each sequence before the new ones.
        counts: integers [B], how many of the T new tokens are real. The others output 0.
        page_table: int32 [B, pages per sequence]. Page `page_table[b, p // N]` holds token p of
            sequence b in slot `p % N`; page `page_table[b, j d // N]` holds window j.
        ranking: with a `selection_stride` R above 1, int32 [B, R_, size, n]: block indices of each
            token at its position modulo size, which is at least T + 1. The call reads the indices
            of a group that began before it, and writes its own.
        counters: `workspace(B, K, device)`: int32 zeros before and after the call. Concurrent steps
            need one each. None: the call allocates it, with one more launch.

        cq: queries that rank blocks, in the shape of q.

    The remaining arguments are those of `native_sparse_attention`.

    Returns:
        [B, T, H, E].

    Raises:
        ValueError: shapes, dtypes, devices or settings do not match.
        NotImplementedError: an explicit backend that cannot run the call.
    """
    refuse_transforms("decode_attention")
    rows = dict(k="B N K D", v="B N K E", ck="B W K D", cv="B W K E")
    if page_table is not None:
        rows = {name: axes.replace("B", "pages") for name, axes in rows.items()}
    named: dict[str, Any] = dict(k=k, v=v, ck=ck, cv=cv)
    check_given(q=q, k=k, v=v, lengths=lengths)
    config = AttentionConfig(
        compress_block_size=compress_block_size,
        compress_block_sliding_stride=compress_block_sliding_stride,
        selection_block_size=selection_block_size,
        num_selected_blocks=num_selected_blocks,
        sliding_window_size=sliding_window_size,
        importance=importance,
        interpolated_importance_score=interpolated_importance_score,
        num_initial_blocks=num_initial_blocks,
        num_local_blocks=num_local_blocks,
        selection_stride=selection_stride,
        query_heads_share_selected_kv=query_heads_share_selected_kv,
        branches=branches,
        dense_length=dense_length,
        causal=True,
        scale=scale,
        soft_cap=soft_cap,
    )
    others = dict(cq=cq, mem_k=mem_k, mem_v=mem_v, window_k=window_k, window_v=window_v)
    nsa.check_branch_tensors(dict(ck=ck, cv=cv, branch_gates=branch_gates, **others), config)
    dims = check_shapes(
        q=(q, "B T H D"),
        cq=(cq, "B T H D"),
        **{name: (t, rows[name]) for name, t in named.items()},
        window_k=(window_k, rows["k"]),
        window_v=(window_v, rows["v"]),
        mem_k=(mem_k, "K m D"),
        mem_v=(mem_v, "K m E"),
        branch_gates=(branch_gates, f"B T H {len(config.branches)}"),
        lengths=(lengths, "B"),
        counts=(counts, "B"),
        page_table=(page_table, "B most"),
    )
    check_same(q=q, **named, **others)
    check_weights("branch_gates", branch_gates, q.device)
    check_groups(dims["H"], dims["K"])
    check_memory(mem_k, mem_v)
    d, s, n = config.d, config.selection_block_size, config.num_selected_blocks
    for name, t in (("lengths", lengths), ("counts", counts), ("page_table", page_table)):
        check_indices(name, t, q.device)
    check_pages(page_table, dims, d, s)
    check_sinks(sinks, (len(config.branches), dims["H"]), q.device)
    ranks = dims["K" if config.query_heads_share_selected_kv else "H"]
    check_ranking(ranking, dims, ranks, n if config.ranks else 0, config.selection_stride, q.device)
    check_counters(counters, dims, q.device)
    if (window_k is None) != (window_v is None):
        raise ValueError("window_k and window_v go together: give both or none")

    name = dispatch.choose(
        ("triton", "eager") if q.is_cuda and backend == "auto" else backend,  # flex has no form
        "decode_attention", q, k, v=v, config=config,
        dense_length=config.dense_length, others=(ck, cv, branch_gates, sinks, *others.values()),
    )  # fmt: skip
    tensors: dict[str, Any] = dict(
        q=q, k=k, v=v, ck=ck, cv=cv, branch_gates=branch_gates, lengths=lengths, counts=counts,
        page_table=page_table, ranking=ranking, sinks=sinks, **others,
    )  # fmt: skip
    if name == "triton":
        if counters is None:
            counters = workspace(q.shape[0], k.shape[2], q.device)
        return run_decode_kernels(config, counters, **tensors)
    return decode_eagerly(config, others, **{n: t for n, t in tensors.items() if n not in others})


class DecodeInputs(NamedTuple):
    """The tensors that a step reads, by the names of `decode_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor
    ck: Tensor | None = None
    cv: Tensor | None = None
    branch_gates: Tensor | None = None
    counts: Tensor | None = None
    page_table: Tensor | None = None
    sinks: Tensor | None = None
    cq: Tensor | None = None
    mem_k: Tensor | None = None
    mem_v: Tensor | None = None
    window_k: Tensor | None = None
    window_v: Tensor | None = None


# tensors whose rows the kernels read from consecutive addresses
READ_BY_ROWS = ("q", "k", "v", "ck", "cv", "cq", "mem_k", "mem_v", "window_k", "window_v")


def decode_fake(inputs, counters, ranking, key):
    q, _, v = inputs[:3]
    return q.new_empty(*q.shape[:-1], v.shape[-1])


@operator(
    "decode_attention(Tensor?[] inputs, Tensor(a!) counters, Tensor(b!)? ranking, str key) "
    "-> Tensor",
    fake=decode_fake,
)
def decode(inputs, counters, ranking, key):
    """A step [B T H E] by the kernels."""
    from ..kernels.decode import persistent
    from ..kernels.decode.call import Call

    at, config = DecodeInputs(*inputs), config_of_key(key)
    rows = {name: t for name in READ_BY_ROWS if (t := getattr(at, name)) is not None}
    at = at._replace(**{n: t.contiguous() for n, t in rows.items() if t.stride(-1) != 1})
    memory = None if at.mem_k is None or at.mem_v is None else (at.mem_k, at.mem_v)
    window = None if at.window_k is None or at.window_v is None else (at.window_k, at.window_v)
    # the kernels read them by address: one that is expanded has fewer elements
    lengths, counts, page_table = (
        t if t is None else t.contiguous() for t in (at.lengths, at.counts, at.page_table)
    )
    ck = at.k[:, :0] if at.ck is None else at.ck
    sinks = at.sinks
    if at.branch_gates is None and sinks is not None:
        sinks = sinks.expand(3, -1)
    call = Call(
        at.q, at.k, at.v, ck, ck if at.cv is None else at.cv, at.branch_gates, at.cq, memory,
        window, ranking, sinks, counters, lengths, counts, page_table,
    )  # fmt: skip
    return persistent.decode(call, config)


def run_decode_kernels(
    config: AttentionConfig, counters: Tensor, ranking: Tensor | None, **tensors: Any
) -> Tensor:
    """`decode` of tensors by their names."""
    out: Tensor = decode(list(DecodeInputs(**tensors)), counters, ranking, config.key)
    return out


def decode_eagerly(
    config: AttentionConfig,
    others: dict[str, Any],
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ck: Tensor | None,
    cv: Tensor | None,
    branch_gates: Tensor | None,
    lengths: Tensor,
    counts: Tensor | None,
    page_table: Tensor | None,
    ranking: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """Decode in eager PyTorch, over the whole storage of each sequence."""
    stored: dict[str, Any] = dict(k=k, v=v, ck=ck, cv=cv)
    stored |= {name: others[name] for name in ("window_k", "window_v")}
    stored = {name: t for name, t in stored.items() if t is not None}
    if page_table is not None:
        stored = {name: gathered(t, page_table) for name, t in stored.items()}
    d, S = config.d, stored["k"].shape[1]
    if ck is not None:
        S = min(S, (stored["ck"].shape[1] + 1) * d - 1)
    starts = lengths.long()
    ends = starts + (q.shape[1] if counts is None else counts)
    for name, t in stored.items():
        every = d if name in ("ck", "cv") else 1
        stored[name] = hide_behind(t[:, : S // every], ends // every)
    leader, keeps_ranking = None, ranking is not None and config.selection_stride > 1
    if ranking is not None and keeps_ranking:
        at = ((starts - 1) % ranking.shape[2])[:, None, None, None]
        leader = ranking.gather(2, at.expand(-1, ranking.shape[1], 1, ranking.shape[3]))[:, :, 0]
    call = Call(
        q, **others | stored, branch_gates=branch_gates, sinks=sinks, q_offset=starts,
        leader_indices=leader,
    )  # fmt: skip
    out, block_indices = branches.attend(call, config, "eager", keep_slots=keeps_ranking)
    T = q.shape[1]
    new = torch.arange(T, device=q.device)
    if ranking is not None and block_indices is not None and keeps_ranking:
        real = torch.full_like(starts, T) if counts is None else counts
        keep = (new < real[:, None])[:, None, :, None]
        at = ((starts[:, None] + new) % ranking.shape[2])[:, None, :, None]
        at = at.expand(-1, ranking.shape[1], -1, ranking.shape[3])
        ranking.scatter_(
            2, at, torch.where(keep, block_indices.transpose(1, 2), ranking.gather(2, at))
        )
    if counts is None:
        return out
    return out.masked_fill((new >= counts[:, None])[..., None, None], 0.0)


def hide_behind(t: Tensor, ends: Tensor) -> Tensor:
    """Zero sequences [B, N, K, D] past the end [B] of each. A weight of 0 does not mask non-finite
    values."""
    behind = torch.arange(t.shape[1], device=t.device) >= ends[:, None]
    return t.masked_fill(behind[..., None, None], 0)


def gathered(t: Tensor, page_table: Tensor) -> Tensor:
    """Gather pages [pages, N, K, D] to sequences [B, tokens, K, D]."""
    return t[page_table.long()].flatten(1, 2)


def check_pages(page_table: Tensor | None, dims: dict[str, int], d: int, s: int) -> None:
    """Check that pages hold whole selection blocks and windows."""
    if page_table is None:
        return
    N, W = dims["N"], dims.get("W")
    if N % s or N % d:
        raise ValueError(f"a page must hold a multiple of s={s} and of d={d} tokens, got {N}")
    if W is not None and W * d != N:
        raise ValueError(f"ck must hold N / d = {N // d} windows a page, got {W}")


def check_ranking(
    ranking: Tensor | None,
    dims: dict[str, int],
    ranks: int,
    n: int,
    stride: int,
    device: torch.device,
) -> None:
    if stride == 1 or n == 0:
        return
    if ranking is None:
        raise ValueError("ranking must be given where selection_stride is above 1")
    B, T = dims["B"], dims["T"]
    size = ranking.shape[2] if isinstance(ranking, Tensor) and ranking.ndim == 4 else 0
    shape = (B, ranks, max(size, T + 1), n)
    if not isinstance(ranking, Tensor) or ranking.shape != shape or ranking.dtype != torch.int32:
        raise ValueError(
            f"ranking must be int32 of shape {list(shape)}, of at least T + 1 = {T + 1} tokens, "
            f"got {shown(ranking)}"
        )
    check_exactly("ranking", ranking, shape, torch.int32, device)
    if not ranking.is_contiguous():
        raise ValueError("ranking must be contiguous, got strides " + str(ranking.stride()))


def check_counters(counters: Tensor | None, dims: dict[str, int], device: torch.device) -> None:
    if counters is None:
        return
    shape = (dims["B"], dims["K"], COUNTERS)
    check_exactly("counters", counters, shape, torch.int32, device)
    if not counters.is_contiguous():
        raise ValueError("counters must be contiguous, got strides " + str(counters.stride()))
