"""The ranking of a decode step in two stages, in four launches before the step's kernel: scores of
groups of blocks by their windows, for the first tokens of groups alone, the best groups, which the
other tokens of a group share, scores of the blocks of these by their tokens, and the best blocks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...blocks import GROUP
from ...ops.call import Call
from ..common import launch
from ..common.launch import cdiv, next_power_of_2, strided
from ..common.precompile import launcher
from ..common.primitives import candidates_end, load_rows
from ..topk.topn import NO_BLOCK, NO_SCORE
from .kv_cache import cache_offsets
from .step import NO_LIMIT, cache_arguments, constants

# keys of a program of the first stage; units of which one warp takes the best without a barrier
PROGRAM_KEYS, ONE_WARP = 64, 512


@triton.jit
def candidates_of(cache, line, T, RANKS, F: tl.constexpr):
    """Sequence, token and ranking head of a line, the token's position, and one past the last unit
    that it ranks; -1 and 0 for padding."""
    r, t, b = line % RANKS, line // RANKS % T, (line // RANKS // T).to(tl.int64)
    position = tl.load(cache.lengths + b).to(tl.int32) + t
    end = candidates_end(position, NO_LIMIT, F.LOCAL, F.d, F.s, True)
    if cache.counts is not None:
        is_new = t < tl.load(cache.counts + b)
        position, end = tl.where(is_new, position, -1), tl.where(is_new, end, 0)
    return b, t, r, position, end


@triton.jit(do_not_specialize=["T", "RANKS", "COLUMNS"])
def nsa_decode_scores(q, k, cache, kept, scores, T, RANKS, COLUMNS, sign, F: tl.constexpr):
    """One program: scores of the units of KEYS keys, of those kept where some were, for a token and
    ranking head: the largest product with a key, or their sum, summed over the heads; or the
    largest of any of them."""
    line, part = tl.program_id(0), tl.program_id(1)
    b, t, r, position, end = candidates_of(cache, line, T, RANKS, F)
    if F.KEPT == 0:
        end = tl.where(position % F.s == 0, end, 0)
    UNITS: tl.constexpr = F.KEYS // F.UNIT
    first_unit = part * UNITS
    first = first_unit
    if F.KEPT > 0:
        group = tl.load(kept + line * F.KEPT + first_unit // F.GROUP)
        first = tl.where(group < 0, end, group * F.GROUP + first_unit % F.GROUP)
    first *= F.UNIT
    if first < end * F.UNIT:
        g = tl.arange(0, F.BLOCK_M)
        rows = b * q.b + t.to(tl.int64) * q.n + (r * F.G + g) * q.h
        q_tile = load_rows(q.ptr, rows, F.D, F.BLOCK_D, g < F.G)
        k_ptr = k.ptr + r // F.RANKS_PER_KV * k.h
        n = first + tl.arange(0, F.KEYS)
        is_key = n < end * F.UNIT
        offsets = cache_offsets(tl.where(is_key, n, 0), b, k.b, k.n, cache, F.PER_PAGE)
        k_tile = load_rows(k_ptr, offsets, F.D, F.BLOCK_D, is_key)
        x = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * sign
        x = tl.max(tl.where((g < F.G)[:, None], x, NO_SCORE), 0) if F.BY_HEADS else tl.sum(x, 0)
        x = tl.reshape(x, [UNITS, F.UNIT])
        x = tl.max(x, 1) if F.LARGEST else tl.sum(x, 1)
        unit = first_unit + tl.arange(0, UNITS)
        tl.store(scores + line.to(tl.int64) * COLUMNS + unit, x, mask=unit < COLUMNS)


@triton.jit(do_not_specialize=["T", "RANKS", "COLUMNS"])
def nsa_decode_best(
    scores, cache, kept, ranking, out, T, RANKS, COLUMNS, F: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: the best units of a token and ranking head, best first; of equal ones the
    earlier. Those of the first stage are the best of the first token of a group, which `ranking`
    has if that came before this step, and go there."""
    line = tl.program_id(0)
    b, t, r, position, end = candidates_of(cache, line, T, RANKS, F)
    i = tl.arange(0, BLOCK)
    number, is_candidate = i, i < COLUMNS
    leader = t
    if F.KEPT == 0:
        leader -= position % F.s
        end = tl.where(leader < 0, 0, end)
    ring = ranking + (b * RANKS + r) * F.SIZE * F.N
    if F.KEPT > 0:
        group = tl.load(kept + line * F.KEPT + i // F.GROUP, mask=is_candidate, other=-1)
        number, is_candidate = group * F.GROUP + i % F.GROUP, group >= 0
    is_candidate &= (number >= F.INITIAL) & (number < end)
    scored = (line + (leader - t) * RANKS).to(tl.int64)
    x = tl.load(scores + scored * COLUMNS + i, mask=is_candidate, other=NO_SCORE)
    for slot in range(F.N):
        best = tl.max(x, 0)
        c = tl.min(tl.where(x == best, number, NO_BLOCK), 0)
        x = tl.where(number == c, NO_SCORE, x)
        c = tl.where(best == NO_SCORE, -1, c)
        if F.KEPT == 0:
            last = tl.maximum(position - t - 1, 0) % F.SIZE  # the token before this step
            c = tl.where(leader < 0, tl.load(ring + last * F.N + slot), c)
            if position >= 0:
                tl.store(ring + position % F.SIZE * F.N + slot, c)
        tl.store(out + line * F.N + slot, c)


def rank_units(
    call: Call, keys: Tensor, config: Any, per_page: int, kept: Tensor | None = None
) -> Tensor:
    """One stage: int32 [B T R n], the best units of `config`, blocks or groups of them, by keys."""
    (B, T, H, D), K = call.q.shape, keys.shape[2]
    s, d, n = config.selection_block_size, config.d, config.num_selected_blocks
    ranks = K if config.query_heads_share_selected_kv else H
    ring = call.ranking
    if ring is None:  # nothing was ranked before
        ring = call.lengths.new_full((B, ranks, T + 1, n), -1, dtype=torch.int32)
    pages = 1 if call.page_table is None else call.page_table.shape[1]
    unit = s // d
    units = call.k.shape[1] * pages // s if kept is None else GROUP * kept.shape[3]
    # a program's blocks lie in one group
    keys_of_program = max(PROGRAM_KEYS, unit) if kept is None else max(unit, 16)
    # heads of a ranking and rankings of a KV head; keys of a program, and of each unit that is
    # scored; units of `s` tokens, of which N are kept; how many were KEPT by the stage before, each
    # of GROUP units, 0 in the first stage; tokens whose groups are kept for later steps
    F = constants(
        G=H // ranks, RANKS_PER_KV=ranks // K, D=D, BLOCK_D=launch.padded(D),
        BLOCK_M=launch.padded(H // ranks), KEYS=keys_of_program, UNIT=unit,
        LARGEST=config.ranks_by_largest, BY_HEADS=config.ranks_by_heads, PER_PAGE=per_page, d=d,
        s=s, INITIAL=config.num_initial_blocks, LOCAL=config.num_local_blocks, N=n,
        KEPT=0 if kept is None else kept.shape[3], GROUP=GROUP, SIZE=ring.shape[2],
    )  # fmt: skip
    lines, cache = B * T * ranks, cache_arguments(call.lengths, call.counts, call.page_table)
    scores = call.q.new_empty(lines, units, dtype=torch.float32)
    out = call.lengths.new_empty(B, T, ranks, n, dtype=torch.int32)
    kept, scale = out if kept is None else kept, config.scale_of(D)
    common = dict(T=T, RANKS=ranks, COLUMNS=units, F=F)
    parts = cdiv(units * unit, keys_of_program)
    launcher(nsa_decode_scores, (lines, parts))(
        strided(call.q), strided(keys), cache, kept, scores,
        sign=float((scale > 0) - (scale < 0)), **common,
    )  # fmt: skip
    launcher(nsa_decode_best, (lines,))(
        scores, cache, kept, ring, out, BLOCK=max(2, next_power_of_2(units)),
        num_warps=1 if units <= ONE_WARP else 4, **common,
    )  # fmt: skip
    return out


def rank(call: Call, config: Any) -> Tensor:
    """Block indices [B T R n] of the new tokens; -1 for padding."""
    by_groups, by_tokens = config.stages
    page = 0 if call.page_table is None else call.k.shape[1]
    groups = rank_units(call, call.ck, by_groups, page // config.d)
    return rank_units(call, call.k, by_tokens, page, groups)
