"""Ranking of blocks: scores are computed tile by tile and folded into a running top n on chip.

A tile ranks the leaders of groups of STRIDE tokens (every token where STRIDE = 1). Every token of a
group gets the block indices of its leader. `ops/reference.py` is the specification.

Kernels omit a positive factor of all scores of a query: it does not change the ranking.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...varlen import Documents
from ..common import launch
from ..common import tile_configs as tiles
from ..common.launch import Layout, Plan, cdiv, layout, next_power_of_2, strided
from ..common.precompile import launcher
from ..common.primitives import Strided
from .largest import nsa_topk_max, window_keys
from .logits import block_keys, nsa_topk_logits
from .softmax_mass import nsa_topk_lse, nsa_topk_softmax_mass

# compile-time settings of the kernels. Of probs: HEADS pads G, a window covers WINDOW tokens; of
# logits and max: ONE_HALF where mean queries are exact in float16, keys of HALVES
Settings = namedtuple(
    "Settings",
    "G RANKS_PER_KV D BLOCK_D BLOCK_M BLOCK_N COLUMNS DEPTH MERGE_N SLOTS SLOTS_2 PER_BLOCK d s "
    "INITIAL LOCAL STRIDE CAUSAL RAGGED LEADERS DOCUMENTS FLIPPED INTERPOLATED ONE_HALF HALVES "
    "NUM_STAGES_Q WINDOW HEADS WARPS WIDE CAP",
)


class Facts(NamedTuple):
    """What a plan depends on besides the config."""

    q: Layout
    ck: Layout
    ranks: int
    n: int
    num_ranked: int
    has_starts: bool
    has_documents: bool
    has_leaders: bool
    needs_lse: bool


def options(settings: Settings, tile: Any) -> dict[str, Any]:
    return dict(F=settings, num_warps=tile.num_warps, num_stages=tile.num_stages)


@functools.lru_cache(maxsize=1024)
def plan(call: Facts, config: Any, _tuning: Any) -> tuple[Plan, Plan | None]:
    """The launches of the ranking and, where it needs them, of its log-sum-exps."""
    (B, T, H, D), K, dtype = call.q.shape, call.ck.shape[2], call.q.dtype
    G, n, s, d = H // call.ranks, call.n, config.selection_block_size, config.d
    importance, stride = config.importance, config.selection_stride
    interpolated = config.interpolated_importance_score
    tile = launch.topk_tile(importance, D, G, n, dtype, interpolated, call.num_ranked)
    probs, block_d = importance == "probs", launch.padded(D)
    rows = next_power_of_2(G) if probs else 1
    leaders = cdiv(T + stride - 1, stride)
    grid, flipped = launch.grid(cdiv(leaders, tile.block_m // rows), B * call.ranks)
    settings = Settings(
        G, call.ranks // K, D, block_d, tile.block_m, tile.block_n, tile.columns, tile.depth,
        tile.merge_n, n, max(2, next_power_of_2(n)), next_power_of_2(max(1, s // d)), d, s,
        config.num_initial_blocks, max(config.num_local_blocks, 1), stride, config.causal,
        call.has_starts, call.has_leaders, call.has_documents, flipped, interpolated,
        ONE_HALF=G == 1 and dtype != torch.float32, HALVES=2 if dtype == torch.float32 else 1,
        NUM_STAGES_Q=tiles.heads_in_flight(tile.block_m * block_d * dtype.itemsize),
        WINDOW=config.compress_block_size, HEADS=rows, WARPS=tile.num_warps,
        WIDE=probs and launch.has_wide_offsets(call.ck), CAP=config.soft_cap is not None,
    )  # fmt: skip
    ranking = Plan(grid, options(settings, tile))
    if not call.needs_lse:
        return ranking, None
    lse = launch.flash_tile("forward", True, D, rows, dtype)
    grid, flipped = launch.grid(cdiv(leaders, lse.block_m // rows), B * call.ranks)
    settings = settings._replace(BLOCK_M=lse.block_m, BLOCK_N=lse.block_n, FLIPPED=flipped)
    return ranking, Plan(grid, options(settings, lse))


def select_blocks(
    q: Tensor,
    ck: Tensor,
    config: Any,
    *,
    out: Tensor,
    num_ranked: int,
    start: int = 0,
    starts: Tensor | None = None,
    documents: Documents | None = None,
    leaders: Tensor | None = None,
    mem_k: Tensor | None = None,
    lse: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Write to `out` [B T R n] the block indices of q [B T H D] for ck [B W K D], by the settings
    of `config`, an `AttentionConfig`: the top n of the first `num_ranked` blocks. `leaders` [B R n]
    is the ranking of the first query's group if its leader came before this call. `lse` [B T H] and
    `sinks` [H] are those of the compressed branch."""
    q, ck = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, ck))
    ranks, n = out.shape[2:]
    call = Facts(
        layout(q), layout(ck), ranks, n, num_ranked, starts is not None, documents is not None,
        leaders is not None, lse is None and config.importance == "probs",
    )  # fmt: skip
    ranking, lse_plan = plan(call, config, launch.tuning())
    queries: dict[str, Any] = dict(
        q=strided(q), starts=starts, documents=documents, first_token=start, T=q.shape[1],
        RANKS=ranks,
    )  # fmt: skip
    args = queries | dict(out=out, leader_indices=leaders, C=num_ranked, **ranking.args)
    if config.importance == "logits":
        keys, sizes = block_keys(ck, num_ranked, config, documents)
        launcher(nsa_topk_logits, ranking.grid)(keys=keys, sizes=sizes, **args)
    elif config.importance == "max":
        keys, sizes = window_keys(ck, config)
        launcher(nsa_topk_max, ranking.grid)(keys=keys, sizes=sizes, W=ck.shape[1], **args)
    else:
        windows = dict(
            ck=strided(ck), W=ck.shape[1], scale_log2=config.scale_of(q.shape[-1]) * launch.LOG2_E,
            cap=launch.cap(config.soft_cap),
        )  # fmt: skip
        if lse is None and lse_plan is not None:
            lse = q.new_empty(q.shape[:3], dtype=torch.float32)
            launcher(nsa_topk_lse, lse_plan.grid)(
                **queries, **windows, **memory_arguments(ck, mem_k), lse=lse, **lse_plan.args
            )
            lse = lse if sinks is None else torch.logaddexp(lse, sinks)
        launcher(nsa_topk_softmax_mass, ranking.grid)(lse=lse, **windows, **args)


def memory_arguments(ck: Tensor, mem_k: Tensor | None) -> dict[str, Any]:
    """Arguments of the memory [K m D]; ck stands in for a missing one."""
    if mem_k is None:
        return dict(mem_k=Strided(ck, 0, 0, 0), MEMORY=0)
    mem_k = mem_k if mem_k.stride(-1) == 1 else mem_k.contiguous()
    return dict(mem_k=Strided(mem_k, 0, mem_k.stride(1), mem_k.stride(0)), MEMORY=mem_k.shape[1])
