"""Persistent decode kernel: ranks the KV blocks of a long cache, then reads the selected ones.

One launch runs all stages of a decode step. Each program runs one stage, chosen by its id:

    compressed_split        attention of the compressed branch over one split of the windows, and
                            the scores of the windows
    window_probabilities    softmax probabilities of the windows, with importance="probs"
    rank_blocks             the top-n blocks of a token; or rank_blocks_split, several programs
    block_split             attention of the window or the selected branch over one split of blocks
    reduce_and_combine      reduction of the partial results, weighted by the gates

A program that needs the output of another stage loads its other inputs first. Then it waits at a
grid barrier of its sequence and KV head until all programs of that stage have arrived.

The queries of sequence b are at positions `lengths[b]` .. `lengths[b] + T - 1`. Their keys and
values are in the cache already. The host reads no length, so a CUDA graph can capture the launch.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...config import AttentionConfig
from ...ops.call import DecodeInputs
from ..common import launch
from ..common.launch import cdiv, next_power_of_2
from ..common.precompile import launcher
from ..common.tile_configs import MAX_COLUMN_N, TileConfig, TopkTileConfig
from . import read_all
from .call import (
    Plan,
    Shape,
    Tensors,
    compile_time,
    has_wide_offsets,
    readable,
    shape_of,
    tensors_of,
    window_blocks,
)
from .split_kv import (
    SCORES_NONE,
    SCORES_PER_HEAD,
    SCORES_SUM,
    arrive,
    block_split,
    compressed_split,
    first_phase,
    load_gates,
    reduce_partials,
    wait,
)
from .topn import rank_blocks, rank_blocks_split, window_probabilities

# counters of a sequence and KV head: programs that have finished a stage, and reduce programs that
# have passed their waits
(SCORES_DONE, COMPRESSED_DONE, PROBS_DONE, RANKING_DONE, BLOCKS_DONE, REDUCE_STARTED) = (
    tl.constexpr(i) for i in range(6)
)


# numbers of a step: tensor sizes, and splits of the stages. The windows have CMP_SPLITS splits for
# each of TILES query tiles, of which CMP_PARTIALS give partial results; their probabilities have
# PROB_SPLITS. The sliding window has WINDOW_SPLITS splits of WINDOW_SPLIT_BLOCKS blocks, the
# selected branch SELECTED_SPLITS of SELECTED_SPLIT_BLOCKS. RANK_PROGRAMS rank a token's blocks
Step = namedtuple(
    "Step",
    "B T W MEMORY PAGES TILES CMP_SPLITS CMP_PARTIALS PROB_SPLITS WINDOW_SPLITS "
    "WINDOW_SPLIT_BLOCKS SELECTED_SPLITS SELECTED_SPLIT_BLOCKS REDUCE_PROGRAMS RANK_PROGRAMS "
    "SCORE_COLUMNS",
)
# compile-time settings of this kernel. BLOCK_WINDOWS: with importance="max", the windows of a
# block, whose largest score is stored; else 0
Tiles = namedtuple(
    "Tiles",
    "PADDED_G BLOCK_M BLOCK_N BLOCK_G BLOCK_W BLOCK_KEYS STAGES BLOCK_STAGES PADDED_CMP_SPLITS "
    "PADDED_SPLITS PADDED_SPLIT_BLOCKS REDUCE_ROWS REDUCE_COLUMNS RANK_CHUNKS RANK_N RANK_COLUMNS "
    "RANK_DEPTH RANK_MERGE_N RANK_SPLIT_BLOCKS RANK_SPLIT_CHUNKS RANK_COMPARED PADDED_TOPN "
    "SELECTED_BLOCKS TAIL_SIZE SCORE_MODE BLOCK_WINDOWS FUSE_LOCAL SEPARATE_WINDOW WARMUP "
    "SIGNAL_EARLY PRELOADED_PAGES ONE_SOFTMAX",
)


@triton.jit
def split_of(program, splits):
    """The split of a program, and the index of its work tile."""
    return program % splits, program // splits


@triton.jit
def token_index(token, T, RANKS):
    """Sequence, ranking head and new token of work tile `token`."""
    return (token // T // RANKS).to(tl.int64), (token // T % RANKS).to(tl.int64), token % T


@triton.jit
def reduce_and_combine(
    call, ready, producers, compressed_done, compressed_programs, reduce_started, reduce_tile, b, h,
    step, S: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Reduce the partial results: `out = g_cmp cmp + g_sel sel + g_win win`, or `out = sel` with
    ONE_SOFTMAX.

    A program owns REDUCE_ROWS (token, query head) rows of one sequence and KV head, and
    REDUCE_COLUMNS features of them. It waits until the `producers` programs of `block_split` have
    arrived at `ready`, and with SIGNAL_EARLY until the programs of `compressed_split` have arrived
    at `compressed_done`. It reads the partial results of all splits and writes `out`; zeros for
    tokens past `counts`. With FUSE_LOCAL the last window split counts for the selected branch too.
    Returns how many programs had passed their waits before."""
    COLUMN_TILES: tl.constexpr = (S.E + P.REDUCE_COLUMNS - 1) // P.REDUCE_COLUMNS
    i = reduce_tile // COLUMN_TILES * P.REDUCE_ROWS + tl.arange(0, P.REDUCE_ROWS)[:, None]
    e = tl.arange(0, P.REDUCE_COLUMNS)
    e += reduce_tile % COLUMN_TILES * P.REDUCE_COLUMNS
    valid, t, head = i < step.T * S.G, tl.minimum(i // S.G, step.T - 1), h * S.G + i % S.G
    row, split = (b * step.T + t) * call.heads.H + head, tl.arange(0, P.PADDED_SPLITS)
    first_selected = step.CMP_PARTIALS + step.WINDOW_SPLITS
    partial_row = split.to(tl.int64)[None] * step.B * step.T * call.heads.H + row
    branch_gates = load_gates(call, b, t, head, valid, P.ONE_SOFTMAX)
    is_cmp = split < step.CMP_PARTIALS
    is_sel = split >= (first_selected - 1 if P.FUSE_LOCAL else first_selected)
    is_win, started_before = (split >= step.CMP_PARTIALS) & (split < first_selected), 0
    for phase in range(first_phase(ready, producers, P.WARMUP), 2):
        if phase == 1:
            wait(ready, producers)
            if P.SIGNAL_EARLY:
                wait(compressed_done, compressed_programs)
        mask = valid & (split < first_selected + step.SELECTED_SPLITS)[None] & (phase == 1)
        started_before = reduce_partials(
            call, partial_row, mask, is_cmp, is_sel, is_win, branch_gates, row, b, t, head,
            call.heads.H, e, valid, reduce_started, phase, S,
        )  # fmt: skip
    return started_before


@triton.jit(do_not_specialize=list(Step._fields))
def nsa_decode_persistent(
    cq, q, k, v, window_k, window_v, ck, cv, mem_k, mem_v, gates, sinks, cache, work, out, heads,
    scale_log2, cap, B, T, W, MEMORY, PAGES, TILES, CMP_SPLITS, CMP_PARTIALS, PROB_SPLITS,
    WINDOW_SPLITS, WINDOW_SPLIT_BLOCKS, SELECTED_SPLITS, SELECTED_SPLIT_BLOCKS, REDUCE_PROGRAMS,
    RANK_PROGRAMS, SCORE_COLUMNS, S: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """One decode step: T new tokens of B sequences attend over a KV cache.

    A program owns one work tile of one stage, for a sequence and KV head or for a token and ranking
    head; the stages' functions say what it reads and writes. Stages are in the order of program
    ids, so a program waits only for programs with smaller ids. The last reduce program resets the
    counters to zero."""
    call = Tensors(
        cq, q, k, v, window_k, window_v, ck, cv, mem_k, mem_v, gates, sinks, cache, work, out,
        heads, scale_log2, cap,
    )  # fmt: skip
    # numbers of a tuple are compiled in where they are 1: these are flat arguments
    step = Step(
        B, T, W, MEMORY, PAGES, TILES, CMP_SPLITS, CMP_PARTIALS, PROB_SPLITS, WINDOW_SPLITS,
        WINDOW_SPLIT_BLOCKS, SELECTED_SPLITS, SELECTED_SPLIT_BLOCKS, REDUCE_PROGRAMS,
        RANK_PROGRAMS, SCORE_COLUMNS,
    )  # fmt: skip
    RANKS_PER_KV: tl.constexpr = S.RANKS_PER_KV
    K, RANKS, counters = call.heads.K, call.heads.RANKS, call.work.counters
    program = tl.program_id(0)
    compressed_end = B * K * TILES * CMP_SPLITS
    probabilities_end = compressed_end + B * RANKS * T * PROB_SPLITS
    window_splits_end = probabilities_end + B * RANKS * T * (RANK_PROGRAMS + WINDOW_SPLITS)
    selected_splits_end = window_splits_end + B * RANKS * T * SELECTED_SPLITS

    if program < compressed_end:
        kv_index, tile = program // (TILES * CMP_SPLITS), program // CMP_SPLITS % TILES
        b, h = (kv_index // K).to(tl.int64), (kv_index % K).to(tl.int64)
        own_counters = counters + kv_index * S.COUNTERS
        compressed_split(
            call, own_counters + SCORES_DONE, program % CMP_SPLITS, tile, b, h, step, S, P
        )
        arrive(own_counters + (COMPRESSED_DONE if P.SIGNAL_EARLY else SCORES_DONE))
    elif program < probabilities_end:
        if S.PROBS:
            split, token = split_of(program - compressed_end, PROB_SPLITS)
            b, r, t = token_index(token, T, RANKS)
            own_counters = counters + (b * K + r // RANKS_PER_KV) * S.COUNTERS
            window_probabilities(
                call, own_counters + SCORES_DONE, TILES * CMP_SPLITS, split, b, r, t, step, S, P
            )
            arrive(own_counters + PROBS_DONE)
    elif program < selected_splits_end:
        is_early = program < window_splits_end
        splits = tl.where(is_early, RANK_PROGRAMS + WINDOW_SPLITS, SELECTED_SPLITS)
        first_program = tl.where(is_early, probabilities_end, window_splits_end)
        stage_split, token = split_of(program - first_program, splits)
        # negative for programs that rank; window splits come before selected ones
        split = stage_split + tl.where(is_early, -RANK_PROGRAMS, WINDOW_SPLITS)
        b, r, t = token_index(token, T, RANKS)
        own_counters = counters + (b * K + r // RANKS_PER_KV) * S.COUNTERS
        if S.TOPN > 0:  # noqa: SIM102
            if split < 0:
                scores, ready = call.work.scores, own_counters + SCORES_DONE
                producers = TILES * CMP_SPLITS
                if S.PROBS:
                    scores, ready = call.work.importances, own_counters + PROBS_DONE
                    producers = PROB_SPLITS * T * RANKS_PER_KV
                if P.RANK_SPLIT_BLOCKS > 0:
                    rank_blocks_split(
                        scores, call, ready, producers, stage_split, b, r, t, step, S, P
                    )
                else:
                    rank_blocks(scores, call, ready, producers, b, r, t, step, S, P)
                arrive(own_counters + RANKING_DONE)
        if split >= 0:
            producers = RANK_PROGRAMS * T * RANKS_PER_KV
            block_split(call, own_counters + RANKING_DONE, producers, split, b, r, t, step, S, P)
            arrive(own_counters + BLOCKS_DONE)
    else:
        reduce_tile, kv_index = split_of(program - selected_splits_end, REDUCE_PROGRAMS)
        b, h = (kv_index // K).to(tl.int64), kv_index % K
        own_counters = counters + kv_index * S.COUNTERS
        if S.TOPN == 0:
            wait(own_counters + SCORES_DONE, TILES * CMP_SPLITS)
        started_before = reduce_and_combine(
            call, own_counters + BLOCKS_DONE, (WINDOW_SPLITS + SELECTED_SPLITS) * T * RANKS_PER_KV,
            own_counters + COMPRESSED_DONE, TILES * CMP_SPLITS, own_counters + REDUCE_STARTED,
            reduce_tile, b, h, step, S, P,
        )  # fmt: skip
        if started_before == REDUCE_PROGRAMS - 1:  # no program waits any more: reset the counters
            tl.store(own_counters + tl.arange(0, S.COUNTERS), 0)


# launch

# programs that fill a GPU, by what they read: windows of the compressed branch, or KV blocks
TARGET_PROGRAMS = {"windows": 396, "blocks": 396}
MAX_SPLITS = 64
# the most programs of a launch with warm-up phases: about as many as are resident on a GPU, two per
# multiprocessor (the last ones to start would have to wait anyway); and the most programs of a
# launch in which several programs rank the blocks of a token
MAX_RESIDENT, MAX_RESIDENT_RANKING = 340, 290
# `rank_blocks_split`: blocks per program (least, most), blocks that they are compared with at once,
# and the most such chunks that are loaded together
RANK_SPLIT_BLOCKS, RANK_COMPARED, RANK_SPLIT_CHUNKS = (16, 32), 256, 4
# the most pages of a sequence that a program loads before it waits for its block indices
MAX_PRELOADED_PAGES = 1024
# tile configs by head dimension; BLOCK_M holds at least all heads of one token. For blocks, BLOCK_M
# is one token, BLOCK_N is at least one block, and the number of warps is that of the windows
TILES = {
    "windows": {128: TileConfig(64, 64, 4, 3), 256: TileConfig(64, 32, 4, 2)},
    "blocks": {128: TileConfig(0, 64, 4, 2), 256: TileConfig(0, 64, 4, 1)},
}
TILES_FLOAT32 = TileConfig(64, 32, 4, 1)
RANKING_TILE = TopkTileConfig(1, 128, 128, 4, 4, 1, 64)
# the most partial result elements that one reduce program reads, and the most rows
REDUCE_ELEMENTS, REDUCE_ROWS = 8192, 4
# the most chunks of window scores that `rank_blocks` loads together
RANK_CHUNKS = 8
# windows per tile of `window_probabilities`
BLOCK_W = 256


def decode_tile(kernel: str, width: int, dtype: torch.dtype) -> TileConfig:
    """The tile config for "windows" or "blocks", by head dimension and dtype."""
    tile = TILES_FLOAT32 if dtype == torch.float32 else launch.row(TILES[kernel], width)
    return launch.override.get(f"decode.{kernel}", tile)


def num_splits(programs: int, target: int, units: int) -> int:
    """Splits per work tile, at most one per unit, so that `programs` tiles fill the GPU."""
    return max(1, min(target // max(1, programs), units, MAX_SPLITS))


def block_splits(
    programs: int, blocks: int, blocks_per_tile: int, min_blocks: int = 1
) -> tuple[int, int]:
    """Blocks per split, and the number of splits.

    A split has at least `min_blocks` blocks, a multiple of the blocks that a tile of keys holds."""
    split_blocks = cdiv(blocks, num_splits(programs, TARGET_PROGRAMS["blocks"], blocks))
    split_blocks = cdiv(max(1, split_blocks, min_blocks), blocks_per_tile) * blocks_per_tile
    return split_blocks, cdiv(blocks, split_blocks)


def plan_ranking(blocks: int, tokens: int, free: int, config: AttentionConfig) -> tuple[int, int]:
    """Programs that rank the blocks of one token, and the blocks of each.

    (1, 0): one program ranks all blocks (`rank_blocks`), because there are not enough `free`
    programs or the selection stride is above 1."""
    min_blocks, most = RANK_SPLIT_BLOCKS
    programs = min(cdiv(blocks, min_blocks), 1 + max(0, free) // tokens)
    ranked = max(min_blocks, next_power_of_2(cdiv(blocks, programs)))
    if programs == 1 or ranked > most or config.selection_stride > 1:
        return 1, 0
    return cdiv(blocks, ranked), ranked


def ranking_tile(W: int, n: int, config: AttentionConfig) -> tuple[TopkTileConfig, int]:
    """The tile config of `rank_blocks`, and the number of chunks that it loads together."""
    tile = replace(RANKING_TILE, merge_n=max(RANKING_TILE.merge_n, next_power_of_2(n)))
    if n > MAX_COLUMN_N:
        return replace(tile, block_n=tile.merge_n, columns=0, depth=0), 1
    chunks = cdiv(max(1, W * config.d // config.selection_block_size), tile.block_n)
    return tile, min(RANK_CHUNKS, next_power_of_2(chunks))


@functools.lru_cache(maxsize=256)
def plan(
    shape: Shape, config: AttentionConfig, window_tile: TileConfig, block_tile: TileConfig
) -> Plan:
    """The launch of a step, so that each stage has about TARGET_PROGRAMS programs."""
    B, T, H, K, E, W = shape.B, shape.T, shape.H, shape.K, shape.E, shape.windows
    s, d, local = config.selection_block_size, config.d, config.num_local_blocks
    n, one_softmax = config.num_selected_blocks if W else 0, shape.one_softmax
    ranks = K if config.query_heads_share_selected_kv else H
    # with importance="max" the largest score of a block is stored
    per_block = s // d if config.importance == "max" and s > d else 0
    settings = compile_time(shape, config, n, per_block)
    score_mode = SCORES_SUM
    if n == 0:
        score_mode = SCORES_NONE
    elif settings.PROBS or not config.query_heads_share_selected_kv:
        score_mode = SCORES_PER_HEAD
    # the window covers the local blocks, and both branches have the same keys
    fuse_local = not shape.has_window and 0 < local * s <= settings.w + 1

    heads, block_s = next_power_of_2(H // K), settings.BLOCK_S
    if per_block:  # a tile holds whole blocks
        window_tile = replace(window_tile, block_n=max(window_tile.block_n, per_block))
    block_m = max(16, heads, min(window_tile.block_m, next_power_of_2(T) * heads))
    block_keys = max(block_s, block_tile.block_n)
    # blocks of the selected branch, without the local ones if the window covers them
    selected = n + config.num_initial_blocks + (0 if fuse_local else local)
    most_window_blocks = window_blocks(config, one_softmax)

    tiles = cdiv(T * heads, block_m)
    tokens, blocks_per_tile = B * ranks * T, block_keys // block_s
    target = TARGET_PROGRAMS["windows"]
    cmp = num_splits(B * K * tiles, target, cdiv(W, window_tile.block_n))
    cmp = 0 if one_softmax and not n else cmp
    cmp_partials = 0 if one_softmax else cmp
    probs = num_splits(tokens, target, cdiv(W, BLOCK_W)) if settings.PROBS else 0
    # fused local blocks are one split of their own
    fused = local * fuse_local
    window_split, window = block_splits(tokens, most_window_blocks - fused, blocks_per_tile, fused)
    selected_split, num_selected = block_splits(tokens, selected, blocks_per_tile)
    window += fuse_local
    partials = cmp_partials + window + num_selected
    splits, columns = next_power_of_2(partials), settings.BLOCK_E
    reduce_rows = max(1, min(REDUCE_ROWS, REDUCE_ELEMENTS // (splits * columns)))
    reduce_columns = max(16, min(columns, REDUCE_ELEMENTS // splits))
    reduce_programs = cdiv(T * (H // K), reduce_rows) * cdiv(E, reduce_columns)

    tile, rank_chunks = ranking_tile(W, n, config)
    programs = B * K * (cmp * tiles + reduce_programs)
    programs += tokens * (probs + (n > 0) + window + num_selected)
    warmup = programs <= MAX_RESIDENT
    blocks, rank_programs, rank_split_blocks = cdiv(shape.tokens, s), 0, 0
    if n:
        free = MAX_RESIDENT_RANKING - programs
        rank_programs, rank_split_blocks = plan_ranking(blocks, tokens, free, config)
        programs += tokens * (rank_programs - 1)
    # a contiguous cache is faster without: its programs load the values before they signal
    is_one_tile = cmp * window_tile.block_n >= W
    is_paged, can_signal = shape.page_size > 0, n > 0 and not settings.PROBS
    preloaded_pages = 0
    if warmup and is_paged and shape.pages <= MAX_PRELOADED_PAGES:
        preloaded_pages = max(32, next_power_of_2(shape.pages))
    # 1 where the kernel does not read it: another value would compile it again
    compared = next_power_of_2(cdiv(blocks, RANK_COMPARED)) if rank_split_blocks else 1

    step = Step(
        B=B, T=T, W=W, MEMORY=shape.memory, PAGES=shape.pages, TILES=tiles, CMP_SPLITS=cmp,
        CMP_PARTIALS=cmp_partials, PROB_SPLITS=probs, WINDOW_SPLITS=window,
        WINDOW_SPLIT_BLOCKS=window_split, SELECTED_SPLITS=num_selected,
        SELECTED_SPLIT_BLOCKS=selected_split, REDUCE_PROGRAMS=reduce_programs,
        RANK_PROGRAMS=rank_programs, SCORE_COLUMNS=cdiv(W, per_block) if per_block else W,
    )  # fmt: skip
    constants = Tiles(
        PADDED_G=heads, BLOCK_M=block_m, BLOCK_N=window_tile.block_n,
        BLOCK_G=launch.padded(H // ranks), BLOCK_W=BLOCK_W, BLOCK_KEYS=block_keys,
        STAGES=window_tile.num_stages,
        BLOCK_STAGES=block_tile.num_stages if block_keys <= 64 else 1,
        PADDED_CMP_SPLITS=next_power_of_2(cmp) if settings.PROBS else 1, PADDED_SPLITS=splits,
        PADDED_SPLIT_BLOCKS=next_power_of_2(max(2, blocks_per_tile, most_window_blocks, selected)),
        REDUCE_ROWS=reduce_rows, REDUCE_COLUMNS=reduce_columns,
        RANK_CHUNKS=1 if rank_split_blocks else rank_chunks, RANK_N=tile.block_n,
        RANK_COLUMNS=tile.columns, RANK_DEPTH=min(tile.depth, n), RANK_MERGE_N=tile.merge_n,
        RANK_SPLIT_BLOCKS=rank_split_blocks, RANK_SPLIT_CHUNKS=min(RANK_SPLIT_CHUNKS, compared),
        RANK_COMPARED=RANK_COMPARED, PADDED_TOPN=max(2, next_power_of_2(n)),
        SELECTED_BLOCKS=selected,
        TAIL_SIZE=shape.tail_size if config.selection_stride > 1 and n else 0,
        SCORE_MODE=score_mode.value, BLOCK_WINDOWS=per_block, FUSE_LOCAL=fuse_local,
        SEPARATE_WINDOW=shape.has_window, WARMUP=warmup,
        SIGNAL_EARLY=warmup and is_paged and can_signal and is_one_tile,
        PRELOADED_PAGES=preloaded_pages, ONE_SOFTMAX=one_softmax,
    )  # fmt: skip
    score_heads = {SCORES_NONE.value: 0, SCORES_SUM.value: K, SCORES_PER_HEAD.value: H}
    return Plan(
        nsa_decode_persistent, programs, partials,
        (score_heads[score_mode.value], step.SCORE_COLUMNS),
        (ranks, W) if settings.PROBS else None, (B, T, ranks, n),
        step._asdict() | dict(S=settings, P=constants),
        dict(num_warps=window_tile.num_warps),
    )  # fmt: skip


def decode(call: DecodeInputs, config: AttentionConfig) -> Tensor:
    """Run a decode step: `read_all` for a short cache, else the persistent kernel. [B T H E]."""
    shape, call = shape_of(call), readable(call)
    out = call.q.new_empty(*call.q.shape[:3], shape.E)
    if out.numel() == 0:
        return out
    step_plan = read_all.plan(shape, config, has_wide_offsets(call))
    if step_plan is None:
        tiles = (decode_tile(name, max(shape.D, shape.E), shape.dtype) for name in TILES)
        step_plan = plan(shape, config, *tiles)
    tensors = tensors_of(call, step_plan, config, out)
    arguments = tensors._asdict() | step_plan.arguments | step_plan.options
    launcher(step_plan.kernel, (step_plan.programs,))(**arguments, num_stages=1)
    return out
