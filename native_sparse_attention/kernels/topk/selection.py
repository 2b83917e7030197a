"""Ranking of blocks: scores are computed tile by tile and folded into a running top n on chip.

A tile ranks the leaders of groups of STRIDE tokens (every token where STRIDE = 1). Every token of a
group gets the block indices of its leader. `ops/reference.py` is the specification.

Kernels omit a positive factor of all scores of a query: it does not change the ranking.
"""

from typing import Any

import torch
from torch import Tensor

from ...varlen import Documents
from ..common import launch, sm90
from ..common import tile_configs as tiles
from ..common.launch import next_power_of_2
from ..common.precompile import launcher
from .largest import nsa_topk_max, window_keys
from .logits import block_keys, nsa_topk_logits
from .softmax_mass import log_sum_exps, nsa_topk_softmax_mass
from .topn import topk_grid


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
    B, T, H, D = q.shape
    W, K = ck.shape[1:3]
    ranks, n = out.shape[2:]
    G, importance = H // ranks, config.importance
    d, s, num_local = config.d, config.selection_block_size, max(config.num_local_blocks, 1)
    q, ck = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, ck))
    if mem_k is not None and mem_k.stride(-1) != 1:
        mem_k = mem_k.contiguous()

    interpolated = config.interpolated_importance_score
    tile = launch.topk_tile(importance, D, G, n, q.dtype, interpolated, num_ranked)
    args: dict[str, Any] = dict(
        q=q, starts=starts, first_token=start, T=T, RANKS=ranks, G=G, RANKS_PER_KV=ranks // K, D=D,
        BLOCK_D=launch.padded(D), d=d, STRIDE=config.selection_stride, CAUSAL=config.causal,
        RAGGED=starts is not None, **launch.strides("q", q, "bth"), **launch.bounds(documents),
    )  # fmt: skip
    heads_in_flight = tiles.heads_in_flight(tile.block_m * args["BLOCK_D"] * q.element_size())
    rows, per_block = 1, next_power_of_2(max(1, s // d))
    kernel: Any
    if importance == "logits":
        kernel = nsa_topk_logits
        keys, sizes = block_keys(ck, num_ranked, config, documents)
        args |= dict(
            keys=keys, sizes=sizes, INTERPOLATED=interpolated,
            ONE_HALF=G == 1 and q.dtype != torch.float32, NUM_STAGES_Q=heads_in_flight,
        )  # fmt: skip
    elif importance == "max":
        kernel = nsa_topk_max
        keys, sizes = window_keys(ck, config.scale_of(D))
        args |= dict(
            keys=keys, sizes=sizes, W=W, HALVES=keys.shape[3], PER_BLOCK=per_block,
            NUM_STAGES_Q=heads_in_flight,
        )  # fmt: skip
    else:
        kernel, rows = nsa_topk_softmax_mass, next_power_of_2(G)
        args |= dict(
            ck=ck, W=W, scale_log2=config.scale_of(D) * launch.LOG2_E,
            **launch.strides("k", ck, "bwh"), HEADS=rows, PRECISION="ieee",
            **launch.cap(config.soft_cap),
        )  # fmt: skip
        if lse is None:
            lse = log_sum_exps(mem_k, sinks, args)
        if starts is None and documents is None and sm90.available(q):
            from . import softmax_mass_sm90

            if softmax_mass_sm90.is_supported(q, ck, config, out, start):
                softmax_mass_sm90.rank(q, ck, config, lse, out, start, num_ranked)
                return
        args |= dict(
            lse=lse, WINDOW=config.compress_block_size, PER_BLOCK=per_block, WARPS=tile.num_warps,
            WIDE=launch.wide(ck),
        )  # fmt: skip

    grid, flipped = topk_grid(args, tile.block_m // rows, B)
    launcher(kernel, grid)(
        out=out, leader_indices=leaders, C=num_ranked, SLOTS=n,
        SLOTS_2=max(2, next_power_of_2(n)), s=s, INITIAL=config.num_initial_blocks, LOCAL=num_local,
        LEADERS=leaders is not None, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        COLUMNS=tile.columns, DEPTH=tile.depth, MERGE_N=tile.merge_n, FLIPPED=flipped,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **args,
    )  # fmt: skip
