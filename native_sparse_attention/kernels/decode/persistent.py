"""Decoding: a few new tokens of each row over what a cache holds, lengths read on the device.

One launch, whose programs have parts to play in turn:

    windows          branch 1, a share of the windows; and what each window scores
    probabilities    with importance="probs": of some windows, the weight in the softmax
    rank             block scores, and the n best of them; or several programs, some blocks each
    blocks           branches 2 and 3, a share of the blocks: keys that both see are read once
    join             the shares of each branch to one, and the gates

A program that needs what others write waits until all of these, of its row and KV head, have
arrived; what it needs besides it has read by then.

A row's queries stand at positions `lengths[b] + 0 .. T - 1`; their keys are in the cache already.
"""

import triton
import triton.language as tl

from ..topk.topn import NO_SCORE
from .grid_barrier import arrived, first_turn, wait
from .split_kv import blocks, weights, windows
from .topn import probabilities, rank, rank_share

# which of the counters of a row and KV head is whose
WINDOWS, ATTENDED, PROBABILITIES, MEMBERS, BLOCKS, JOINED = (tl.constexpr(i) for i in range(6))


@triton.jit
def split(number, parts):
    """Which of so many parts a program has, and of what."""
    return number % parts, number // parts


@triton.jit
def token_of(token, T, RANKS):
    """Row, ranking head and token of the token-th of them all."""
    return (token // T // RANKS).to(tl.int64), (token // T % RANKS).to(tl.int64), token % T


@triton.jit
def join(
    parts, part_lse, sinks, gates, counts, out, before, programs, attended, windows, joined, part,
    b, h, B, T, H, CMP_SPLITS, NEAR_SPLITS, FAR_SPLITS, g_b, g_t, g_h, g_3, G: tl.constexpr,
    E: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    FUSED: tl.constexpr, SINKS: tl.constexpr, COUNTED: tl.constexpr, ROOM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Of the rows of a KV head ROWS, and COLUMNS features of them, once the `programs` before have
    arrived, and with EARLY the `windows` that counted themselves before they had attended:
    `out = g_cmp cmp + g_sel sel + g_win win`; 0 past `counts`. The last share of the window is the
    selection's too (FUSED). Returns how many programs had waited before."""
    SLICES: tl.constexpr = (E + COLUMNS - 1) // COLUMNS
    i, e = part // SLICES * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)
    e += part % SLICES * COLUMNS
    real, t, head = i < T * G, tl.minimum(i // G, T - 1), h * G + i % G
    row, share = (b * T + t) * H + head, tl.arange(0, BLOCK_SPLITS)
    far = CMP_SPLITS + NEAR_SPLITS
    at = share.to(tl.int64)[None] * B * T * H + row
    gate = gates + b * g_b + t * g_t + head * g_h
    g_cmp = tl.load(gate, mask=real).to(tl.float32)
    g_sel = tl.load(gate + g_3, mask=real).to(tl.float32)
    g_win = tl.load(gate + 2 * g_3, mask=real).to(tl.float32)
    is_cmp, is_sel = share < CMP_SPLITS, share >= (far - 1 if FUSED else far)
    is_win, ahead = (share >= CMP_SPLITS) & (share < far), 0
    for turn in range(first_turn(before, programs, ROOM), 2):
        if turn == 1:
            wait(before, programs)
            if EARLY:
                wait(attended, windows)
        # a share holds anything where its lse is -inf
        there = real & (share < far + FAR_SPLITS)[None] & (turn == 1)
        x = tl.load(part_lse + at, mask=there, other=NO_SCORE)
        there = there[:, :, None] & (e < E)[None, None]
        tile = tl.load(parts + at[:, :, None] * E + e[None, None], mask=there, other=0.0)
        if turn == 1:
            ahead = tl.atomic_add(joined, 1, sem="relaxed")
        weight = weights(
            x, is_cmp[None], is_sel[None], is_win[None], g_cmp, g_sel, g_win, sinks, head, H, SINKS
        )[:, :, None]
        acc = tl.sum(tl.where(weight != 0.0, tile * weight, 0.0), 1)
        if COUNTED:
            acc = tl.where(t < tl.load(counts + b), acc, 0.0)
        inside = real & (e < E)[None] & (turn == 1)
        tl.store(out + row * E + e[None], acc.to(out.dtype.element_ty), mask=inside)
    return ahead


@triton.jit(
    do_not_specialize=[
        "B", "T", "W", "MEMORY", "TILES", "PROB_SPLITS", "CMP_SPLITS", "NEAR_SPLITS", "FAR_SPLITS",
        "NEAR_ITEMS", "FAR_ITEMS", "JOINS", "PAGES", "RANKERS",
    ]
)  # fmt: skip
def nsa_decode_persistent(
    cq, q, k, v, wk, wv, ck, cv, mem_k, mem_v, gates, sinks, lengths, counts, table, ring, scores,
    importances, block_indices, parts, part_lse, counters, out, B, T, H, K, RANKS, W, MEMORY,
    scale_log2, cap, TILES, PROB_SPLITS, CMP_SPLITS, NEAR_SPLITS, FAR_SPLITS, NEAR_ITEMS,
    FAR_ITEMS, JOINS, PAGES, RANKERS, p_b, p_t, p_h, q_b, q_t, q_h, k_b, k_n, k_h, v_b, v_n, v_h,
    x_b, x_n, x_h, y_b, y_n, y_h, c_b, c_n, c_h, o_b, o_n, o_h, m_h, m_m, u_h, u_m, g_b, g_t, g_h,
    g_3, t_b, G: tl.constexpr,
    HEADS: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_CMP: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, JOIN_ROWS: tl.constexpr, JOIN_COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, KEYS: tl.constexpr, BLOCK_STAGES: tl.constexpr, RANK_CHUNKS: tl.constexpr,
    RANK_N: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, MERGE_N: tl.constexpr,
    l: tl.constexpr, d: tl.constexpr, s: tl.constexpr, BLOCK_S: tl.constexpr, w: tl.constexpr,
    SLOTS: tl.constexpr, SLOTS_2: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr,
    LISTED: tl.constexpr, STRIDE: tl.constexpr, RING: tl.constexpr, SCORES: tl.constexpr,
    PROBS: tl.constexpr, INTERPOLATED: tl.constexpr, FUSED: tl.constexpr, PAGE: tl.constexpr,
    WINDOW_PAGE: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, COUNTED: tl.constexpr,
    ITEMS_2: tl.constexpr, OWN_WINDOW: tl.constexpr, COUNTERS: tl.constexpr, ROOM: tl.constexpr,
    EARLY: tl.constexpr, TABLE: tl.constexpr, RANKED: tl.constexpr, CHUNKS: tl.constexpr,
    COMPARED: tl.constexpr,
):  # fmt: skip
    """One program: one part, of a row and KV head, or of a token and a head that ranks."""
    GROUP: tl.constexpr = G // SHARE  # query heads that rank together
    number = tl.program_id(0)
    windows_end = B * K * TILES * CMP_SPLITS
    probabilities_end = windows_end + B * RANKS * T * PROB_SPLITS
    near_end = probabilities_end + B * RANKS * T * (RANKERS + NEAR_SPLITS)
    far_end = near_end + B * RANKS * T * FAR_SPLITS

    if number < windows_end:
        pair, tile = number // (TILES * CMP_SPLITS), number // CMP_SPLITS % TILES
        b, h = (pair // K).to(tl.int64), (pair % K).to(tl.int64)
        windows(
            cq, ck, cv, mem_k, mem_v, lengths, counts, table, parts, part_lse, scores,
            number % CMP_SPLITS, CMP_SPLITS, b, h, tile, B, T, K, W, MEMORY, scale_log2, cap,
            p_b, p_t, p_h, c_b, c_n, c_h, o_b, o_n, o_h, m_h, m_m, u_h, u_m, t_b, G, HEADS, D,
            BLOCK_D, E, BLOCK_E, BLOCK_M, BLOCK_N, STAGES, d, WINDOW_PAGE, SCORES, PROBS,
            CAP, COUNTED, EARLY, counters + pair * COUNTERS + WINDOWS,
        )  # fmt: skip
        arrived(counters + pair * COUNTERS + (ATTENDED if EARLY else WINDOWS))
    elif number < probabilities_end:
        if PROBS:
            share, token = split(number - windows_end, PROB_SPLITS)
            b, r, t = token_of(token, T, RANKS)
            mine = counters + (b * K + r // SHARE) * COUNTERS
            probabilities(
                scores, part_lse, sinks, lengths, counts, importances, mine + WINDOWS,
                TILES * CMP_SPLITS, share, PROB_SPLITS, b, r, t, T, W, RANKS, CMP_SPLITS, B * T * H,
                GROUP, HEADS // SHARE, BLOCK_CMP, BLOCK_W, d, SINKS, COUNTED,
            )  # fmt: skip
            arrived(mine + PROBABILITIES)
    elif number < far_end:
        is_early = number < near_end
        programs = tl.where(is_early, RANKERS + NEAR_SPLITS, FAR_SPLITS)
        part, token = split(number - tl.where(is_early, probabilities_end, near_end), programs)
        share = part + tl.where(is_early, -RANKERS, NEAR_SPLITS)
        b, r, t = token_of(token, T, RANKS)
        mine = counters + (b * K + r // SHARE) * COUNTERS
        if SLOTS > 0:  # noqa: SIM102
            if share < 0:
                x, scored = scores, mine + WINDOWS
                scorers = TILES * CMP_SPLITS
                if PROBS:
                    x, scored = importances, mine + PROBABILITIES
                    scorers = PROB_SPLITS * T * SHARE
                if RANKED > 0:
                    rank_share(
                        x, lengths, counts, block_indices, scored, scorers, part, b, r, t, T, W,
                        RANKS, RANKED, CHUNKS, COMPARED, SLOTS, SLOTS_2, l, d, s, BLOCK_S, INITIAL,
                        LOCAL if LOCAL > 0 else 1, PROBS, INTERPOLATED, COUNTED, ROOM,
                    )  # fmt: skip
                else:
                    rank(
                        x, lengths, counts, block_indices, ring, scored, scorers, b, r, t, T, W,
                        RANKS, RANK_CHUNKS, RANK_N, COLUMNS, DEPTH, MERGE_N, SLOTS, SLOTS_2, l, d,
                        s, BLOCK_S, INITIAL, LOCAL if LOCAL > 0 else 1, STRIDE, RING, PROBS,
                        INTERPOLATED, COUNTED, ROOM,
                    )  # fmt: skip
                arrived(mine + MEMBERS)
        if share >= 0:
            blocks(
                q, k, v, wk, wv, block_indices, lengths, counts, table, parts, part_lse,
                mine + MEMBERS, RANKERS * T * SHARE, share, NEAR_SPLITS, CMP_SPLITS, b, r, t, B, T,
                RANKS, NEAR_ITEMS, FAR_ITEMS, PAGES, scale_log2, cap, q_b, q_t, q_h, k_b, k_n, k_h,
                v_b, v_n, v_h, x_b, x_n, x_h, y_b, y_n, y_h, t_b, GROUP, SHARE, D, BLOCK_D, E,
                BLOCK_E, BLOCK_G, KEYS, BLOCK_STAGES, SLOTS, ITEMS_2, s, BLOCK_S, w, INITIAL,
                LOCAL, LISTED, OWN_WINDOW, FUSED, PAGE, CAP, COUNTED, ROOM, TABLE,
            )  # fmt: skip
            arrived(mine + BLOCKS)
    else:
        part, pair = split(number - far_end, JOINS)
        b, h = (pair // K).to(tl.int64), pair % K
        mine = counters + pair * COUNTERS
        if SLOTS == 0:
            wait(mine + WINDOWS, TILES * CMP_SPLITS)
        ahead = join(
            parts, part_lse, sinks, gates, counts, out, mine + BLOCKS,
            (NEAR_SPLITS + FAR_SPLITS) * T * SHARE, mine + ATTENDED, TILES * CMP_SPLITS,
            mine + JOINED, part, b, h, B, T, H, CMP_SPLITS, NEAR_SPLITS, FAR_SPLITS, g_b, g_t, g_h,
            g_3, G, E, JOIN_ROWS, JOIN_COLUMNS, BLOCK_SPLITS, FUSED, SINKS, COUNTED, ROOM, EARLY,
        )  # fmt: skip
        if ahead == JOINS - 1:  # nobody waits any more: as they were
            tl.store(mine + tl.arange(0, COUNTERS), 0)
