"""Decoding: attention of a few new tokens per sequence over a KV cache. Sequence lengths differ and
stay on the device.

    B  sequences    T  new tokens per sequence    N  tokens per sequence of storage, or per page
    H, K  query and KV heads    D, E  head dimensions    R_  ranking heads: K or H    n  blocks
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import BRANCHES, check_bool, check_given, check_int, check_shapes, check_tensor
from ..compat import refuse_transforms
from ..config import AttentionConfig, config_of_key
from . import branches, dispatch, reference
from .branches import no_blocks
from .call import FIELDS, Call
from .functional import axes_of, check_read, check_tensors, expand_heads
from .triton.operator import operator

# counters per sequence and KV head
COUNTERS = 8
# tensors that a step reads come before those that it writes
READ = FIELDS[: FIELDS.index("counters")]


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
    block_indices: Tensor | None = None,
    ranking: Tensor | None = None,
    counters: Tensor | None = None,
    importance: str = "logits",
    interpolated_importance_score: bool = False,
    num_initial_blocks: int = 0,
    num_local_blocks: int = 1,
    selection_stride: int = 1,
    num_selected_groups: int = 0,
    ranking_bits: int = 16,
    query_heads_share_selected_kv: bool = True,
    branches: tuple[str, ...] = BRANCHES,
    dense_length: int = 0,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    return_block_indices: bool = False,
    backend: str | tuple[str, ...] = "auto",
) -> Any:
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
            None where the branches do not read them, as in `native_sparse_attention`. With
            ranking_bits=4 and windows of one token, ck may be the storage of `pack_keys(k, s)`.
        branch_gates: [B, T, H, branches], in the order compressed, selected, window; None for one.
        lengths: integers [B], tokens of each sequence before the new ones.
        counts: integers [B], how many of the T new tokens are real. Others output 0, any indices.
        page_table: int32 [B, pages per sequence]. Page `page_table[b, p // N]` holds token p of
            sequence b in slot `p % N`; page `page_table[b, j d // N]` holds window j.
        ranking: with a `selection_stride` R above 1, int32 [B, R_, size, n]: block indices of each
            token at its position modulo size, which is at least T + 1; in two stages the groups of
            blocks, n1 in place of n. The call reads those of tokens whose leader came before it,
            and writes its own.
        block_indices, return_block_indices: as in `native_sparse_attention`, of the new tokens.
        counters: `workspace(B, K, device)`: int32 zeros before and after the call. Concurrent steps
            need one each. None: the call allocates it, with one more launch.

    The remaining arguments, cq and the widths of what ranks among them, are those of
    `native_sparse_attention`.

    Returns:
        [B, T, H, E], and with `return_block_indices` also the block indices.

    Raises:
        ValueError: shapes, dtypes, devices or settings do not match.
        NotImplementedError: an explicit backend that cannot run the call.
    """
    refuse_transforms("decode_attention")
    check_given(q=q, k=k, v=v, lengths=lengths)
    return_block_indices = check_bool("return_block_indices", return_block_indices)
    if block_indices is not None:
        importance, num_selected_groups, ranking_bits = "given", 0, 16
        interpolated_importance_score = False
    config = AttentionConfig(
        compress_block_size=compress_block_size,
        compress_block_sliding_stride=compress_block_sliding_stride,
        selection_block_size=selection_block_size, num_selected_blocks=num_selected_blocks,
        sliding_window_size=sliding_window_size, importance=importance,
        interpolated_importance_score=interpolated_importance_score,
        num_initial_blocks=num_initial_blocks, num_local_blocks=num_local_blocks,
        selection_stride=selection_stride, num_selected_groups=num_selected_groups,
        ranking_bits=ranking_bits,
        query_heads_share_selected_kv=query_heads_share_selected_kv, branches=branches,
        dense_length=dense_length, scale=scale, soft_cap=soft_cap, causal=True,
    )  # fmt: skip
    call = Call(
        q, k, v, ck, cv, branch_gates, cq, mem_k, mem_v, window_k, window_v, sinks,
        block_indices=block_indices, lengths=lengths, counts=counts, page_table=page_table,
        counters=counters, ranking=ranking,
    )  # fmt: skip
    call = check_step(call, config)
    if isinstance(backend, str) and backend == "auto" and q.is_cuda:
        backend = ("triton", "eager")  # flex has no form of it
    if dispatch.choose(backend, "decode_attention", call, config) == "eager":
        out, indices = decode_eagerly(config, call, return_block_indices)
        return (out, indices) if return_block_indices else out
    if counters is None:
        call = call.but(counters=workspace(q.shape[0], k.shape[2], q.device))
    if not return_block_indices:
        return run_decode_kernels(config, call)
    if config.ranks:
        call = call.but(new_indices=no_blocks(call, config, config.num_selected_blocks))
    out, indices = run_decode_kernels(config, call), call.new_indices
    return out, call.block_indices if indices is None else indices


def check_step(call: Call, config: AttentionConfig) -> Call:
    packed: Any = None
    if isinstance(call.ck, Tensor) and call.ck.dtype == torch.int16 and config.ranking_bits == 4:
        packed, call = call.ck, call.but(ck=call.k)
        s, (B, N, K, D) = config.selection_block_size, call.k.shape
        if config.compress_block_size > 1 or call.cq is not None:
            raise ValueError("ck must be keys of windows where tokens do not rank by q, got packed")
        shape = B, N // s, K, reference.entry_words(s, D)
        check_tensor("ck", packed, (torch.int16,), call.q.device, shape)
    axes = {name: spec.replace("S", "N") for name, spec in axes_of(call, config).items()}
    if call.page_table is not None:
        stored = ("k", "v", "window_k", "window_v", "ck", "cv")
        axes |= {name: axes[name].replace("B", "pages") for name in stored}
    axes |= dict(lengths="B", counts="B", page_table="B most")
    check_read(call, config)
    dims = check_tensors(call, config, axes)
    if (call.window_k is None) != (call.window_v is None):
        raise ValueError("window_k and window_v go together: give both or none")
    N, W, d, s = dims["N"], dims.get("W"), config.d, config.selection_block_size
    if call.page_table is not None and (N % s or N % d):
        raise ValueError(f"a page must hold a multiple of s={s} and of d={d} tokens, got {N}")
    if call.page_table is not None and W is not None and W * d != N:
        raise ValueError(f"ck must hold N / d = {N // d} windows a page, got {W}")
    B, K, device = dims["B"], dims["K"], call.q.device
    check_tensor("counters", call.counters, (torch.int32,), device, (B, K, COUNTERS))
    ranking: Any = call.ranking
    check_tensor("ranking", ranking, (torch.int32,), device)
    if config.leader_stride > 1 and config.ranks:
        if ranking is None:
            raise ValueError(
                "ranking must be given where tokens share one: with selection_stride above 1, or "
                "with num_selected_groups"
            )
        heads = K if config.query_heads_share_selected_kv else dims["H"]
        size, least = ranking.shape[2] if getattr(ranking, "ndim", 0) == 4 else 0, dims["T"] + 1
        shape = (B, heads, max(size, least), config.leader_slots)
        name = f"ranking, of at least T + 1 = {least} tokens,"
        check_tensor(name, ranking, (torch.int32,), device, shape)
    for name, t in (("counters", call.counters), ("ranking", ranking)):
        if isinstance(t, Tensor) and not t.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {t.stride()}")
    return expand_heads(call if packed is None else call.but(ck=packed))


@operator(
    "pack_keys(Tensor k, SymInt m) -> Tensor",
    fake=lambda k, m: k.new_empty(
        k.shape[0],
        k.shape[1] // m,
        k.shape[2],
        reference.entry_words(m, k.shape[3]),
        dtype=torch.int16,
    ),
)
def packed_keys(k, m):
    """`pack_keys`, by a kernel on a GPU."""
    if not k.is_cuda:
        return reference.pack_keys(k, m)
    from ..kernels.decode import packed

    return packed.pack_keys(k, m)


def pack_keys(k: Tensor, s: int) -> Tensor:
    """Keys that rank blocks with `ranking_bits=4`, for `decode_attention`: of complete blocks of s
    keys [B, N, K, D] int16 [B, N / s, K, words], a seventh of what keys and values in 16 bits take.
    An entry depends on its block's keys alone."""
    s = check_int("s", s, 1)
    check_shapes(k=(k, "B N K D"))
    packed: Tensor = packed_keys(k.detach(), s)
    return packed


def pack_windows(windows: dict[str, Tensor]) -> dict[str, Tensor]:
    """`pack_keys` of blocks [b h w s d] of "k", as "ck" [b h w words]."""
    k = windows["k"]
    packed = pack_keys(k.flatten(2, 3).transpose(1, 2), k.shape[3])
    return {"ck": packed.transpose(1, 2)}


@operator(
    "decode_attention(Tensor?[] inputs, Tensor(a!) counters, Tensor(b!)? ranking, "
    "Tensor(c!)? new_indices, str key) -> Tensor",
    fake=lambda inputs, *_: inputs[0].new_empty(*inputs[0].shape[:-1], inputs[2].shape[-1]),
)
def decode(inputs, counters, ranking, new_indices, key):
    """A step [B T H E] by the kernels."""
    from ..kernels.decode import persistent

    call = Call(*inputs, counters=counters, ranking=ranking, new_indices=new_indices)
    return persistent.decode(call, config_of_key(key))


def run_decode_kernels(config: AttentionConfig, call: Call) -> Tensor:
    """`decode` of tensors by their names."""
    inputs = [getattr(call, name) for name in READ]
    out: Tensor = decode(inputs, call.counters, call.ranking, call.new_indices, config.key)
    return out


def decode_eagerly(
    config: AttentionConfig, call: Call, keep_slots: bool
) -> tuple[Tensor, Tensor | None]:
    """Decode in eager PyTorch, over the whole storage of each sequence: the output and, with
    `keep_slots`, the block indices."""
    if call.ck is not None and call.ck.dtype == torch.int16:  # of these keys
        call = call.but(ck=call.k)
    names: tuple[str, ...] = ("k", "v", "ck", "cv", "window_k", "window_v")
    streams = {name: t for name in names if (t := getattr(call, name)) is not None}
    if call.page_table is not None:  # [pages, N, K, D] -> [B, tokens, K, D]
        pages = call.page_table.long()
        streams = {name: t[pages].flatten(1, 2) for name, t in streams.items()}
    q, d, S = call.q, config.d, streams["k"].shape[1]
    ranking: Any = call.ranking
    if "ck" in streams:
        S = min(S, (streams["ck"].shape[1] + 1) * d - 1)
    starts, T = call.lengths.long(), q.shape[1]
    ends = starts + (T if call.counts is None else call.counts)
    for name, t in streams.items():
        every = d if name in ("ck", "cv") else 1
        t = t[:, : S // every]
        past_end = torch.arange(t.shape[1], device=q.device) >= (ends // every)[:, None]
        # zeros: a weight of 0 does not mask non-finite values
        streams[name] = t.masked_fill(past_end[..., None, None], 0)
    names = ("q", "cq", "mem_k", "mem_v", "sinks", "branch_gates", "block_indices")
    streams |= {name: getattr(call, name) for name in names}
    whole = Call(**streams, q_offset=starts)
    if ranking is None or config.leader_stride == 1:
        out, block_indices = branches.attend(whole, config, "eager", keep_slots)
    else:
        out, block_indices = attend_with_rankings(whole, config, "eager", ranking, ends, True)
    if call.counts is not None:
        padding = torch.arange(T, device=q.device) >= call.counts[:, None]
        out = out.masked_fill(padding[..., None, None], 0.0)
    return out, block_indices


def attend_with_rankings(
    call: Call, config: AttentionConfig, backend: str, ranking: Tensor, ends: Tensor,
    keep_slots: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`branches.attend` of tokens at positions before `ends` [B]. They take rankings of the tokens
    before them from the `ranking` of `decode_attention`, and write theirs to it."""
    starts: Any = call.q_offset
    if isinstance(starts, int):
        starts = torch.full_like(ends, starts)
    if isinstance(call.q_offset, Tensor) or call.q_offset > 0:
        call = call.but(leader_indices=read_leaders(ranking, starts))
    out, block_indices = branches.attend(call, config, backend, keep_slots)
    if block_indices is not None:
        shared: Any = branches.rankings_to_share(call, config, backend, block_indices)
        # without those of the first tokens, where they are dense
        num_dense = call.q.shape[1] - shared.shape[1]
        write_rankings(ranking, shared, starts + num_dense, ends)
    return out, block_indices


def read_leaders(ranking: Tensor, starts: Tensor) -> Tensor:
    """The block indices [B, R_, n] of the token before position `starts` [B], from the `ranking` of
    `decode_attention`: those of the group, for tokens whose group began before."""
    last = ((starts.long() - 1) % ranking.shape[2])[:, None, None, None]
    return ranking.gather(2, last.expand(-1, ranking.shape[1], -1, ranking.shape[3]))[:, :, 0]


def write_rankings(ranking: Tensor, block_indices: Tensor, starts: Tensor, ends: Tensor) -> None:
    """Write block indices [B, T, R_, up to n] of tokens at positions `starts` [B] + 0, 1, .. to the
    `ranking` of `decode_attention`: of those before `ends` [B] the last, as many as it holds."""
    T, (_, heads, size, n) = block_indices.shape[1], ranking.shape
    width = min(T, size)
    position = ends.long()[:, None] - width + torch.arange(width, device=ranking.device)
    t, slots = (x[:, None, :, None] for x in (position - starts[:, None], position % size))
    new = block_indices.transpose(1, 2)
    new = new.gather(2, t.clamp(min=0).expand(-1, heads, -1, new.shape[3]))
    new = F.pad(new, (0, n - new.shape[3]), value=-1)
    slots = slots.expand(-1, heads, -1, n)
    ranking.scatter_(2, slots, torch.where(t < 0, ranking.gather(2, slots), new))
