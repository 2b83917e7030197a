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

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common.launch import cdiv, next_power_of_2
from ..common.tile_configs import MAX_COLUMN_N, TileConfig, TopkTileConfig
from ..topk.topn import NO_SCORE
from . import read_all
from .call import Call, Settings
from .grid_barrier import arrive, first_phase, wait
from .split_kv import (
    SCORES_NONE,
    SCORES_PER_HEAD,
    SCORES_SUM,
    block_split,
    compressed_split,
    partial_weights,
)
from .topn import rank_blocks, rank_blocks_split, window_probabilities

# counters of a sequence and KV head: programs that have finished a stage, and reduce programs that
# have passed their waits
(SCORES_DONE, COMPRESSED_DONE, PROBS_DONE, RANKING_DONE, BLOCKS_DONE, REDUCE_STARTED) = (
    tl.constexpr(i) for i in range(6)
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
    partial_out, partial_lse, sinks, gates, counts, out, ready, producers, compressed_done,
    compressed_programs, reduce_started, reduce_tile, b, h, B, T, H, CMP_SPLITS, WINDOW_SPLITS,
    SELECTED_SPLITS, g_b, g_t, g_h, g_3, G: tl.constexpr, E: tl.constexpr,
    REDUCE_ROWS: tl.constexpr, REDUCE_COLUMNS: tl.constexpr, PADDED_SPLITS: tl.constexpr,
    FUSE_LOCAL: tl.constexpr, SINKS: tl.constexpr, HAS_COUNTS: tl.constexpr, WARMUP: tl.constexpr,
    SIGNAL_EARLY: tl.constexpr, ONE_SOFTMAX: tl.constexpr,
):  # fmt: skip
    """Reduce the partial results: `out = g_cmp cmp + g_sel sel + g_win win`, or `out = sel` with
    ONE_SOFTMAX.

    A program owns REDUCE_ROWS (token, query head) rows of one sequence and KV head, and
    REDUCE_COLUMNS features of them. It waits until the `producers` programs of `block_split` have
    arrived at `ready`, and with SIGNAL_EARLY until the programs of `compressed_split` have arrived
    at `compressed_done`. It reads the partial results of all splits and writes `out`; zeros for
    tokens past `counts`. With FUSE_LOCAL the last window split counts for the selected branch too.
    Returns how many programs had passed their waits before."""
    COLUMN_TILES: tl.constexpr = (E + REDUCE_COLUMNS - 1) // REDUCE_COLUMNS
    i = reduce_tile // COLUMN_TILES * REDUCE_ROWS + tl.arange(0, REDUCE_ROWS)[:, None]
    e = tl.arange(0, REDUCE_COLUMNS)
    e += reduce_tile % COLUMN_TILES * REDUCE_COLUMNS
    valid, t, head = i < T * G, tl.minimum(i // G, T - 1), h * G + i % G
    row, split = (b * T + t) * H + head, tl.arange(0, PADDED_SPLITS)
    first_selected = CMP_SPLITS + WINDOW_SPLITS
    partial_row = split.to(tl.int64)[None] * B * T * H + row
    if ONE_SOFTMAX:
        g_sel = tl.full([REDUCE_ROWS, 1], 1.0, tl.float32)
        g_cmp = g_sel * 0.0
        g_win = g_cmp
    else:
        gate = gates + b * g_b + t * g_t + head * g_h
        g_cmp = tl.load(gate, mask=valid).to(tl.float32)
        g_sel = tl.load(gate + g_3, mask=valid).to(tl.float32)
        g_win = tl.load(gate + 2 * g_3, mask=valid).to(tl.float32)
    is_cmp = split < CMP_SPLITS
    is_sel = split >= (first_selected - 1 if FUSE_LOCAL else first_selected)
    is_win, started_before = (split >= CMP_SPLITS) & (split < first_selected), 0
    for phase in range(first_phase(ready, producers, WARMUP), 2):
        if phase == 1:
            wait(ready, producers)
            if SIGNAL_EARLY:
                wait(compressed_done, compressed_programs)
        # a partial result with an lse of -inf is uninitialized: its weight is 0
        mask = valid & (split < first_selected + SELECTED_SPLITS)[None] & (phase == 1)
        lse = tl.load(partial_lse + partial_row, mask=mask, other=NO_SCORE)
        partial_mask = mask[:, :, None] & (e < E)[None, None]
        partial_ptr = partial_out + partial_row[:, :, None] * E + e[None, None]
        partial = tl.load(partial_ptr, mask=partial_mask, other=0.0)
        if phase == 1:
            started_before = tl.atomic_add(reduce_started, 1, sem="relaxed")
        weight = partial_weights(
            lse, is_cmp[None], is_sel[None], is_win[None], g_cmp, g_sel, g_win, sinks, head, H,
            SINKS,
        )[:, :, None]  # fmt: skip
        acc = tl.sum(tl.where(weight != 0.0, partial * weight, 0.0), 1)
        if HAS_COUNTS:
            acc = tl.where(t < tl.load(counts + b), acc, 0.0)
        out_mask = valid & (e < E)[None] & (phase == 1)
        tl.store(out + row * E + e[None], acc.to(out.dtype.element_ty), mask=out_mask)
    return started_before


@triton.jit(
    do_not_specialize=[
        "B", "T", "W", "MEMORY", "TILES", "PROB_SPLITS", "CMP_SPLITS", "WINDOW_SPLITS",
        "SELECTED_SPLITS", "WINDOW_SPLIT_BLOCKS", "SELECTED_SPLIT_BLOCKS", "REDUCE_PROGRAMS",
        "PAGES", "RANK_PROGRAMS", "SCORE_COLUMNS", "CMP_PARTIALS",
    ]
)  # fmt: skip
def nsa_decode_persistent(
    cq, q, k, v, window_k, window_v, ck, cv, mem_k, mem_v, gates, sinks, lengths, counts,
    page_table, ranking_tail, scores, importances, block_indices, partial_out, partial_lse,
    counters, out, B, T, H, K, RANKS, W, MEMORY, scale_log2, cap, TILES, PROB_SPLITS, CMP_SPLITS,
    WINDOW_SPLITS, SELECTED_SPLITS, WINDOW_SPLIT_BLOCKS, SELECTED_SPLIT_BLOCKS, REDUCE_PROGRAMS,
    PAGES, RANK_PROGRAMS, SCORE_COLUMNS, CMP_PARTIALS, p_b, p_t, p_h, q_b, q_t, q_h, k_b, k_n, k_h,
    v_b, v_n, v_h, x_b, x_n, x_h, y_b, y_n, y_h, c_b, c_n, c_h, o_b, o_n, o_h, m_h, m_m, u_h, u_m,
    g_b, g_t, g_h, g_3, t_b,
    G: tl.constexpr, PADDED_G: tl.constexpr, RANKS_PER_KV: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_W: tl.constexpr,
    PADDED_CMP_SPLITS: tl.constexpr, PADDED_SPLITS: tl.constexpr, REDUCE_ROWS: tl.constexpr,
    REDUCE_COLUMNS: tl.constexpr, STAGES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    BLOCK_STAGES: tl.constexpr, RANK_CHUNKS: tl.constexpr, RANK_N: tl.constexpr,
    RANK_COLUMNS: tl.constexpr, RANK_DEPTH: tl.constexpr, RANK_MERGE_N: tl.constexpr,
    l: tl.constexpr, d: tl.constexpr, s: tl.constexpr, BLOCK_S: tl.constexpr, w: tl.constexpr,
    TOPN: tl.constexpr, PADDED_TOPN: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr,
    SELECTED_BLOCKS: tl.constexpr, STRIDE: tl.constexpr, TAIL_SIZE: tl.constexpr,
    SCORE_MODE: tl.constexpr, PROBS: tl.constexpr, INTERPOLATED: tl.constexpr,
    FUSE_LOCAL: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOWS_PER_PAGE: tl.constexpr,
    CAP: tl.constexpr, SINKS: tl.constexpr, HAS_COUNTS: tl.constexpr,
    PADDED_SPLIT_BLOCKS: tl.constexpr, SEPARATE_WINDOW: tl.constexpr, COUNTERS: tl.constexpr,
    WARMUP: tl.constexpr, SIGNAL_EARLY: tl.constexpr, PRELOADED_PAGES: tl.constexpr,
    RANK_SPLIT_BLOCKS: tl.constexpr, RANK_SPLIT_CHUNKS: tl.constexpr, RANK_COMPARED: tl.constexpr,
    ONE_SOFTMAX: tl.constexpr, BLOCK_WINDOWS: tl.constexpr,
):  # fmt: skip
    """One decode step: T new tokens of B sequences attend over a KV cache.

    A program owns one work tile of one stage, for a sequence and KV head or for a token and ranking
    head; the stages' functions say what it reads and writes. Stages are in the order of program
    ids, so a program waits only for programs with smaller ids. The last reduce program resets the
    counters to zero."""
    GROUP: tl.constexpr = G // RANKS_PER_KV  # query heads per ranking head
    # what one stored score covers
    RANK_L: tl.constexpr = s if BLOCK_WINDOWS > 0 else l
    RANK_D: tl.constexpr = s if BLOCK_WINDOWS > 0 else d
    program = tl.program_id(0)
    compressed_end = B * K * TILES * CMP_SPLITS
    probabilities_end = compressed_end + B * RANKS * T * PROB_SPLITS
    window_splits_end = probabilities_end + B * RANKS * T * (RANK_PROGRAMS + WINDOW_SPLITS)
    selected_splits_end = window_splits_end + B * RANKS * T * SELECTED_SPLITS

    if program < compressed_end:
        kv_index, tile = program // (TILES * CMP_SPLITS), program // CMP_SPLITS % TILES
        b, h = (kv_index // K).to(tl.int64), (kv_index % K).to(tl.int64)
        compressed_split(
            cq, ck, cv, mem_k, mem_v, lengths, counts, page_table, partial_out, partial_lse, scores,
            program % CMP_SPLITS, CMP_SPLITS, b, h, tile, B, T, K, W, MEMORY, scale_log2, cap,
            p_b, p_t, p_h, c_b, c_n, c_h, o_b, o_n, o_h, m_h, m_m, u_h, u_m, t_b, G, PADDED_G, D,
            BLOCK_D, E, BLOCK_E, BLOCK_M, BLOCK_N, STAGES, d, WINDOWS_PER_PAGE, SCORE_MODE, PROBS,
            CAP, HAS_COUNTS, SIGNAL_EARLY, counters + kv_index * COUNTERS + SCORES_DONE,
            SCORE_COLUMNS, not ONE_SOFTMAX, BLOCK_WINDOWS,
        )  # fmt: skip
        arrive(counters + kv_index * COUNTERS + (COMPRESSED_DONE if SIGNAL_EARLY else SCORES_DONE))
    elif program < probabilities_end:
        if PROBS:
            split, token = split_of(program - compressed_end, PROB_SPLITS)
            b, r, t = token_index(token, T, RANKS)
            own_counters = counters + (b * K + r // RANKS_PER_KV) * COUNTERS
            window_probabilities(
                scores, partial_lse, sinks, lengths, counts, importances,
                own_counters + SCORES_DONE, TILES * CMP_SPLITS, split, PROB_SPLITS, b, r, t, T, W,
                RANKS, CMP_SPLITS, B * T * H, GROUP, PADDED_G // RANKS_PER_KV, PADDED_CMP_SPLITS,
                BLOCK_W, d, SINKS, HAS_COUNTS,
            )  # fmt: skip
            arrive(own_counters + PROBS_DONE)
    elif program < selected_splits_end:
        is_early = program < window_splits_end
        splits = tl.where(is_early, RANK_PROGRAMS + WINDOW_SPLITS, SELECTED_SPLITS)
        first_program = tl.where(is_early, probabilities_end, window_splits_end)
        stage_split, token = split_of(program - first_program, splits)
        # negative for programs that rank; window splits come before selected ones
        split = stage_split + tl.where(is_early, -RANK_PROGRAMS, WINDOW_SPLITS)
        b, r, t = token_index(token, T, RANKS)
        own_counters = counters + (b * K + r // RANKS_PER_KV) * COUNTERS
        if TOPN > 0:  # noqa: SIM102
            if split < 0:
                scores_in, ready = scores, own_counters + SCORES_DONE
                producers = TILES * CMP_SPLITS
                if PROBS:
                    scores_in, ready = importances, own_counters + PROBS_DONE
                    producers = PROB_SPLITS * T * RANKS_PER_KV
                if RANK_SPLIT_BLOCKS > 0:
                    rank_blocks_split(
                        scores_in, lengths, counts, block_indices, ready, producers, stage_split,
                        b, r, t, T, SCORE_COLUMNS, RANKS, RANK_SPLIT_BLOCKS, RANK_SPLIT_CHUNKS,
                        RANK_COMPARED, TOPN, PADDED_TOPN, RANK_L, RANK_D, s, BLOCK_S, INITIAL,
                        LOCAL if LOCAL > 0 else 1, PROBS, INTERPOLATED, HAS_COUNTS, WARMUP,
                    )  # fmt: skip
                else:
                    rank_blocks(
                        scores_in, lengths, counts, block_indices, ranking_tail, ready, producers,
                        b, r, t, T, SCORE_COLUMNS, RANKS, RANK_CHUNKS, RANK_N, RANK_COLUMNS,
                        RANK_DEPTH, RANK_MERGE_N, TOPN, PADDED_TOPN, RANK_L, RANK_D, s, BLOCK_S,
                        INITIAL,
                        LOCAL if LOCAL > 0 else 1, STRIDE, TAIL_SIZE, PROBS, INTERPOLATED,
                        HAS_COUNTS, WARMUP,
                    )  # fmt: skip
                arrive(own_counters + RANKING_DONE)
        if split >= 0:
            block_split(
                q, k, v, window_k, window_v, block_indices, lengths, counts, page_table,
                partial_out, partial_lse, own_counters + RANKING_DONE,
                RANK_PROGRAMS * T * RANKS_PER_KV, split, WINDOW_SPLITS, CMP_PARTIALS, b, r, t, B, T,
                RANKS, WINDOW_SPLIT_BLOCKS, SELECTED_SPLIT_BLOCKS, PAGES, scale_log2, cap, q_b, q_t,
                q_h, k_b, k_n, k_h, v_b, v_n, v_h, x_b, x_n, x_h, y_b, y_n, y_h, t_b, GROUP,
                RANKS_PER_KV, D, BLOCK_D, E, BLOCK_E, BLOCK_G, BLOCK_KEYS, BLOCK_STAGES, TOPN,
                PADDED_SPLIT_BLOCKS, s, BLOCK_S, w, INITIAL, LOCAL, SELECTED_BLOCKS,
                SEPARATE_WINDOW, FUSE_LOCAL, PAGE_SIZE, CAP, HAS_COUNTS, WARMUP, PRELOADED_PAGES,
            )  # fmt: skip
            arrive(own_counters + BLOCKS_DONE)
    else:
        reduce_tile, kv_index = split_of(program - selected_splits_end, REDUCE_PROGRAMS)
        b, h = (kv_index // K).to(tl.int64), kv_index % K
        own_counters = counters + kv_index * COUNTERS
        if TOPN == 0:
            wait(own_counters + SCORES_DONE, TILES * CMP_SPLITS)
        started_before = reduce_and_combine(
            partial_out, partial_lse, sinks, gates, counts, out, own_counters + BLOCKS_DONE,
            (WINDOW_SPLITS + SELECTED_SPLITS) * T * RANKS_PER_KV, own_counters + COMPRESSED_DONE,
            TILES * CMP_SPLITS, own_counters + REDUCE_STARTED, reduce_tile, b, h, B, T, H,
            CMP_PARTIALS, WINDOW_SPLITS, SELECTED_SPLITS, g_b, g_t, g_h, g_3, G, E, REDUCE_ROWS,
            REDUCE_COLUMNS, PADDED_SPLITS, FUSE_LOCAL, SINKS, HAS_COUNTS, WARMUP, SIGNAL_EARLY,
            ONE_SOFTMAX,
        )  # fmt: skip
        if started_before == REDUCE_PROGRAMS - 1:  # no program waits any more: reset the counters
            tl.store(own_counters + tl.arange(0, COUNTERS), 0)


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
    programs: int, blocks: int, blocks_per_tile: int, least: int = 1
) -> tuple[int, int]:
    """Blocks per split, and the number of splits.

    A split has at least `least` blocks, in multiples of the blocks that one tile of keys holds."""
    split_blocks = cdiv(blocks, num_splits(programs, TARGET_PROGRAMS["blocks"], blocks))
    split_blocks = cdiv(max(1, split_blocks, least), blocks_per_tile) * blocks_per_tile
    return split_blocks, cdiv(blocks, split_blocks)


@dataclass(frozen=True)
class SplitPlan:
    """Number of splits of each stage.

    The windows have `cmp` splits for each of `tiles` query tiles; their probabilities have `probs`.
    The sliding window has `window` splits of `window_blocks` blocks, the selected branch `selected`
    splits of `selected_blocks` blocks. A reduce program reduces `reduce_rows` rows and
    `reduce_columns` features."""

    tiles: int
    cmp: int
    probs: int
    window: int
    window_blocks: int
    selected: int
    selected_blocks: int
    reduce_rows: int
    reduce_columns: int
    cmp_partials: int  # `cmp`, or 0 if the windows only rank blocks

    @property
    def splits(self) -> int:
        """Partial results of each row."""
        return self.cmp_partials + self.window + self.selected


def plan_splits(
    call: Call,
    ranks: int,
    block_m: int,
    block_keys: int,
    block_n: int,
    fuse_local: bool,
    settings: Settings,
) -> SplitPlan:
    """The splits of a call, so that each stage has about TARGET_PROGRAMS programs."""
    B, T, H, K, _, E = call.sizes
    tiles = cdiv(T * next_power_of_2(H // K), block_m)
    tokens, blocks_per_tile = B * ranks * T, block_keys // launch.padded(settings.s)
    cmp = num_splits(B * K * tiles, TARGET_PROGRAMS["windows"], cdiv(call.max_windows, block_n))
    cmp = 0 if settings.one_softmax and not settings.n else cmp
    cmp_partials = 0 if settings.one_softmax else cmp
    probs = num_splits(tokens, TARGET_PROGRAMS["windows"], cdiv(call.max_windows, BLOCK_W))
    # fused local blocks are one split of their own
    local = settings.num_local * fuse_local
    other_window = settings.window_blocks - local
    window_blocks, window = block_splits(tokens, other_window, blocks_per_tile, local)
    total = num_selected(settings, fuse_local)
    selected_blocks, selected = block_splits(tokens, total, blocks_per_tile)
    window += fuse_local

    splits, columns = next_power_of_2(cmp_partials + window + selected), launch.padded(E)
    return SplitPlan(
        tiles=tiles,
        cmp=cmp,
        probs=probs if settings.n and settings.importance == "probs" else 0,
        window=window,
        window_blocks=window_blocks,
        selected=selected,
        selected_blocks=selected_blocks,
        reduce_rows=max(1, min(REDUCE_ROWS, REDUCE_ELEMENTS // (splits * columns))),
        reduce_columns=max(16, min(columns, REDUCE_ELEMENTS // splits)),
        cmp_partials=cmp_partials,
    )


def plan_ranking(blocks: int, tokens: int, free: int, settings: Settings) -> tuple[int, int]:
    """Programs that rank the blocks of one token, and the blocks of each.

    (1, 0): one program ranks all blocks (`rank_blocks`), because there are not enough `free`
    programs or the selection stride is above 1."""
    least, most = RANK_SPLIT_BLOCKS
    programs = min(cdiv(blocks, least), 1 + max(0, free) // tokens)
    ranked = max(least, next_power_of_2(cdiv(blocks, programs)))
    if programs == 1 or ranked > most or settings.stride > 1:
        return 1, 0
    return cdiv(blocks, ranked), ranked


def num_selected(settings: Settings, fuse_local: bool) -> int:
    """Blocks of the selected branch per token, without the local ones if the window covers them."""
    return settings.n + settings.num_initial + (0 if fuse_local else settings.num_local)


def ranking_tile(W: int, settings: Settings) -> tuple[TopkTileConfig, int]:
    """The tile config of `rank_blocks`, and the number of chunks that it loads together."""
    tile = replace(RANKING_TILE, merge_n=max(RANKING_TILE.merge_n, next_power_of_2(settings.n)))
    if settings.n > MAX_COLUMN_N:
        return replace(tile, block_n=tile.merge_n, columns=0, depth=0), 1
    chunks = cdiv(max(1, W * settings.d // settings.s), tile.block_n)
    return tile, min(RANK_CHUNKS, next_power_of_2(chunks))


def decode(call: Call, settings: Settings) -> Tensor:
    """Run a decode step: `read_all` for a short cache, else the persistent kernel. [B T H E].

    See `ops.decode` for the arguments."""
    B, T, H, K, D, E = call.sizes
    W, G, ranks = call.max_windows, H // K, K if settings.shared else H
    out = call.allocate_output()
    if out.numel() == 0:
        return out
    settings = settings if W else replace(settings, n=0)
    if settings.one_softmax:  # a window of the local blocks
        settings = replace(settings, w=max(0, settings.num_local * settings.s - 1))
    probs = settings.n > 0 and settings.importance == "probs"
    score_mode = SCORES_SUM
    if settings.n == 0:
        score_mode = SCORES_NONE
    elif probs or not settings.shared:
        score_mode = SCORES_PER_HEAD
    plain = not settings.one_softmax and not settings.block_windows and settings.stride == 1
    if call.window is None and score_mode is not SCORES_PER_HEAD and plain:
        read_all_plan = read_all.plan_partials(call, settings)
        if read_all_plan is not None:
            return read_all.decode(call, read_all_plan, settings)
    # the window covers the local blocks, and both branches have the same keys
    fuse_local = call.window is None and 0 < settings.num_local * settings.s <= settings.w + 1
    per_block = settings.block_windows

    window_tile, block_tile = (
        decode_tile(kernel, max(D, E), call.q.dtype) for kernel in ("windows", "blocks")
    )
    heads, block_s = next_power_of_2(G), launch.padded(settings.s)
    if per_block:  # a tile holds whole blocks
        window_tile = replace(window_tile, block_n=max(window_tile.block_n, per_block))
    block_m = max(16, heads, min(window_tile.block_m, next_power_of_2(T) * heads))
    block_keys = max(block_s, block_tile.block_n)
    selected = num_selected(settings, fuse_local)
    most_blocks = max(2, block_keys // block_s, settings.window_blocks, selected)
    plan = plan_splits(call, ranks, block_m, block_keys, window_tile.block_n, fuse_local, settings)
    ranking, rank_chunks = ranking_tile(W, settings)
    reduce_programs = cdiv(T * G, plan.reduce_rows) * cdiv(E, plan.reduce_columns)
    tokens = B * ranks * T
    programs = B * K * (plan.cmp * plan.tiles + reduce_programs)
    programs += tokens * (plan.probs + (settings.n > 0) + plan.window + plan.selected)
    warmup = programs <= MAX_RESIDENT
    blocks, ranking_programs, rank_split_blocks = cdiv(call.max_tokens, settings.s), 0, 0
    if settings.n:
        free = MAX_RESIDENT_RANKING - programs
        ranking_programs, rank_split_blocks = plan_ranking(blocks, tokens, free, settings)
        programs += tokens * (ranking_programs - 1)
    # a contiguous cache is faster without: its programs load the values before they signal
    is_paged = call.metadata.page_size > 0
    is_one_tile = plan.cmp * window_tile.block_n >= W
    signal_early = warmup and settings.n > 0 and not probs and is_one_tile and is_paged
    preloaded_pages = 0
    if warmup and is_paged and call.pages <= MAX_PRELOADED_PAGES:
        preloaded_pages = max(32, next_power_of_2(call.pages))

    # 1 where the kernel does not read it: another value would compile it again
    padded_cmp_splits = next_power_of_2(plan.cmp) if probs else 1
    compared = next_power_of_2(cdiv(blocks, RANK_COMPARED)) if rank_split_blocks else 1

    partial_out, partial_lse = call.allocate_partials(plan.splits)
    score_heads = {SCORES_NONE.value: 0, SCORES_SUM.value: K, SCORES_PER_HEAD.value: H}
    columns = cdiv(W, per_block) if per_block else W
    scores = partial_out.new_empty(B, T, score_heads[score_mode.value], columns)
    block_indices = call.counters.new_empty(B, T, ranks, settings.n)
    ranking_tail = call.ranking_tail if settings.stride > 1 and settings.n else None
    window_k, window_v = call.window or (call.k, call.v)
    nsa_decode_persistent[(programs,)](
        **call.arguments(settings), **launch.strides("x", window_k, "bnh"),
        **launch.strides("y", window_v, "bnh"), window_k=window_k, window_v=window_v,
        ranking_tail=block_indices if ranking_tail is None else ranking_tail, scores=scores,
        block_indices=block_indices, partial_out=partial_out, partial_lse=partial_lse,
        importances=partial_out.new_empty(B, T, ranks, W) if probs else scores, out=out, H=H,
        RANKS=ranks, TILES=plan.tiles, PROB_SPLITS=plan.probs, CMP_SPLITS=plan.cmp,
        WINDOW_SPLITS=plan.window, SELECTED_SPLITS=plan.selected,
        WINDOW_SPLIT_BLOCKS=plan.window_blocks, SELECTED_SPLIT_BLOCKS=plan.selected_blocks,
        REDUCE_PROGRAMS=reduce_programs, PAGES=call.pages, RANK_PROGRAMS=ranking_programs,
        PADDED_G=heads, RANKS_PER_KV=ranks // K, BLOCK_M=block_m, BLOCK_N=window_tile.block_n,
        BLOCK_G=launch.padded(H // ranks), BLOCK_W=BLOCK_W,
        PADDED_CMP_SPLITS=padded_cmp_splits,
        PADDED_SPLITS=next_power_of_2(plan.splits),
        REDUCE_ROWS=plan.reduce_rows, REDUCE_COLUMNS=plan.reduce_columns,
        STAGES=window_tile.num_stages, BLOCK_KEYS=block_keys,
        BLOCK_STAGES=block_tile.num_stages if block_keys <= 64 else 1,
        RANK_CHUNKS=1 if rank_split_blocks else rank_chunks,
        RANK_N=ranking.block_n, RANK_COLUMNS=ranking.columns,
        RANK_DEPTH=min(ranking.depth, settings.n), RANK_MERGE_N=ranking.merge_n,
        RANK_SPLIT_BLOCKS=rank_split_blocks, RANK_COMPARED=RANK_COMPARED,
        RANK_SPLIT_CHUNKS=min(RANK_SPLIT_CHUNKS, compared),
        PADDED_TOPN=max(2, next_power_of_2(settings.n)),
        SELECTED_BLOCKS=selected,
        PADDED_SPLIT_BLOCKS=next_power_of_2(most_blocks), STRIDE=settings.stride,
        TAIL_SIZE=0 if ranking_tail is None else ranking_tail.shape[2],
        SCORE_MODE=score_mode.value, PROBS=probs, FUSE_LOCAL=fuse_local,
        SEPARATE_WINDOW=call.window is not None, WARMUP=warmup, SIGNAL_EARLY=signal_early,
        PRELOADED_PAGES=preloaded_pages, SCORE_COLUMNS=columns, CMP_PARTIALS=plan.cmp_partials,
        ONE_SOFTMAX=settings.one_softmax, BLOCK_WINDOWS=per_block,
        num_warps=window_tile.num_warps, num_stages=1,
    )  # fmt: skip
    return out
