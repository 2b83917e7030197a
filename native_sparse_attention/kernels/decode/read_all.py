"""Decoding where little is to be read: every block is, before it is known which are selected.

One launch of two parts, and no address that waits for anything:

    shares    a tile of windows or of the memory, or a block of keys, against the heads of a token:
              an output and a log-sum-exp of its own; and what each window scores
    join      once the windows are scored, the n best blocks; once all shares are there, those of
              the windows, of the blocks selected and of the blocks in the window, and the gates

The block that the window cuts has a second share, of its keys in the window.
"""

import triton
import triton.language as tl

from ..common.primitives import candidates_end, load_rows, soft_capped
from ..topk.topn import NO_KEY, NO_SCORE
from .grid_barrier import arrived, wait
from .split_kv import store_part, weights
from .topn import NEVER, score_keys

# which of the counters of a row and KV head is whose
WINDOWS, SHARES, JOINED = (tl.constexpr(i) for i in range(3))


@triton.jit
def last_of(lengths, counts, b, t, COUNTED: tl.constexpr):
    """The position of token t, of the last real one where t is none."""
    token = tl.minimum(t, tl.load(counts + b) - 1) if COUNTED else t
    return (tl.load(lengths + b) + token).to(tl.int32)


@triton.jit
def attend_shares(
    cq, q, k, v, ck, cv, mem_k, mem_v, lengths, counts, table, scores, parts, part_lse, scored,
    program, t, b, h, B, T, K, W, N, MEMORY, CMP_SHARES, MEM_SHARES, BLOCK_SHARES, scale_log2, cap,
    p_b, p_t, p_h, q_b, q_t, q_h, k_b, k_n, k_h, v_b, v_n, v_h, c_b, c_n, c_h, o_b, o_n, o_h, m_h,
    m_m, u_h, u_m, t_b,
    G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, ITEMS: tl.constexpr,
    d: tl.constexpr, s: tl.constexpr, w: tl.constexpr, PAGE: tl.constexpr,
    WINDOW_PAGE: tl.constexpr, RANKING: tl.constexpr, CAP: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """The G heads of token t against one share of windows, or of memory, or that of the block which
    the window cuts, or ITEMS blocks. But for the cut and for pages, what to read is known before
    the length is."""
    last = last_of(lengths, counts, b, t, COUNTED)
    is_window, block = program < CMP_SHARES, program - CMP_SHARES - MEM_SHARES - 1
    is_cmp, is_cut = block < -1, block == -1
    is_memory = is_cmp & (program >= CMP_SHARES)
    u, head = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_G)
    real = head < G
    q_row = tl.where(is_cmp, p_h, q_h)
    q_at = tl.where(is_cmp, cq, q) + t * tl.where(is_cmp, p_t, q_t) + h * G * q_row
    q_at += b * tl.where(is_cmp, p_b, q_b)
    k_at = tl.where(is_memory, mem_k, tl.where(is_cmp, ck, k))
    v_at = tl.where(is_memory, mem_v, tl.where(is_cmp, cv, v))
    k_at += h * tl.where(is_memory, m_h, tl.where(is_cmp, c_h, k_h))
    v_at += h * tl.where(is_memory, u_h, tl.where(is_cmp, o_h, v_h))
    k_of = tl.where(is_memory, 0, tl.where(is_cmp, c_b, k_b))
    v_of = tl.where(is_memory, 0, tl.where(is_cmp, o_b, v_b))
    k_row = tl.where(is_memory, m_m, tl.where(is_cmp, c_n, k_n))
    v_row = tl.where(is_memory, u_m, tl.where(is_cmp, o_n, v_n))
    if PAGE == 0:
        k_at, v_at = k_at + b * k_of, v_at + b * v_of
    first = tl.where(is_memory, program - CMP_SHARES, program) * BLOCK_N
    first = tl.where(is_cmp, first, block * (ITEMS * s))
    if is_cut:
        first = tl.maximum(last - w, 0) // s * s
    items = 1
    if ITEMS > 1:
        items = tl.where(block >= 0, tl.minimum(ITEMS, BLOCK_SHARES - block * ITEMS), 1)
    share = program + tl.maximum(block, 0) * (ITEMS - 1)
    if PAGE > 0:
        size, pages = tl.where(is_cmp, WINDOW_PAGE, PAGE), table + b * t_b
        is_there = first + u < tl.where(is_memory, 0, tl.where(is_cmp, W, N))
        page = tl.load(pages + (first + u) // size, mask=is_there, other=0)
    for i in range(items):
        n = first + i * s + u
        there = n < tl.where(is_memory, MEMORY, tl.where(is_cmp, W, N))
        if s < BLOCK_N:
            there &= u < tl.where(is_cmp, BLOCK_N, s)
        k_rows, v_rows = n * k_row, n * v_row
        if PAGE > 0:
            at = tl.where(is_memory, n, n % size)
            # what lies behind the row's end may be no page
            here = tl.where(n < tl.where(is_cmp, last // d, last + 1), page, 0).to(tl.int64)
            k_rows, v_rows = here * k_of + at * k_row, here * v_of + at * v_row
            there &= n < tl.where(is_memory, MEMORY, tl.where(is_cmp, last // d, last + 1))
            if ITEMS > 1:
                ahead = n + s < tl.where(is_cmp, 0, N)
                page = tl.load(pages + (n + s) // size, mask=ahead, other=0)
        q_tile = load_rows(q_at, head * q_row, D, BLOCK_D, real)
        k_tile = load_rows(k_at, k_rows, D, BLOCK_D, there)
        v_tile = load_rows(v_at, v_rows, E, BLOCK_E, there)
        row = (((share + i) * B + b) * T + t) * (K * G) + h * G + head
        seen = there & (n < tl.where(is_memory, MEMORY, tl.where(is_cmp, last // d, last + 1)))
        cut = u * 0 + tl.where(is_cut, 1, 0)  # not every interpreter has masks made of a scalar
        seen &= (n >= last - w) | (cut == 0)
        x = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
        if RANKING:  # noqa: SIM102
            if is_window:
                tl.store(scores + ((b * T + t) * K + h) * W + n, tl.sum(x, 0), mask=there)
                arrived(scored)
        if CAP:
            x = soft_capped(x, cap)
        x = tl.where(seen[None], x, NO_SCORE)
        m = tl.max(x, 1)
        p = tl.exp2(x - tl.where(m == NO_SCORE, 0.0, m)[:, None])
        # what nobody has written counts for nothing
        v_tile = tl.where(seen[:, None], v_tile, 0.0)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
        store_part(parts, part_lse, row, acc, m, tl.sum(p, 1), E, BLOCK_E, real)


@triton.jit
def members(
    scores, to, last, BEFORE, SLOTS: tl.constexpr, BLOCKS: tl.constexpr,
    LISTED: tl.constexpr, l: tl.constexpr, d: tl.constexpr, s: tl.constexpr,
    BLOCK_S: tl.constexpr, w: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr,
    INTERPOLATED: tl.constexpr,
):  # fmt: skip
    """Which of BLOCKS blocks the token at position `last` reads, from place BEFORE of [LISTED] on:
    4 c, plus 2 where block c is selected, plus 1 where it lies in the window; 0 in places that
    none has. First there is room for those ranked, in their order, then for the initial ones, then
    for those up to its own. They pass through `to`, zeros [LISTED] of this program's own."""
    c, own = tl.arange(0, BLOCKS), last // s
    rank = tl.full([BLOCKS], BLOCKS, tl.int32)
    if SLOTS > 0:
        end = candidates_end(last, NEVER, LOCAL if LOCAL > 0 else 1, d, s, True)
        candidate = (c >= INITIAL) & (c < end)
        # loops of one turn: what comes out of a `while` is not formed anew for each layout in which
        # a compiler would have it
        key, again = tl.full([BLOCKS], NO_KEY, tl.int64), 1
        while again > 0:
            key = score_keys(
                scores, c, end, last // d, l, d, s, BLOCK_S, INITIAL, False, INTERPOLATED
            )
            again -= 1
        again = 1
        while again > 0:
            # how many are better, along the first axis: a thread counts for blocks of its own
            rank, again = tl.sum((key[:, None] > key[None]).to(tl.int32), 0), again - 1
        rank = tl.where(candidate, rank, BLOCKS)
    selected = ((c < INITIAL) | (c > own - LOCAL) | (rank < SLOTS)) & (c <= own)
    in_window = (c > tl.maximum(last - w, 0) // s) & (c <= own)
    place = SLOTS + tl.where(c < INITIAL, c, INITIAL + own - c)
    place = BEFORE + tl.where(rank < SLOTS, rank, place)
    code = c * 4 + selected.to(tl.int32) * 2 + in_window.to(tl.int32)
    tl.store(to + place, code, mask=selected | in_window)
    tl.debug_barrier()
    return tl.load(to + tl.arange(0, LISTED))


@triton.jit
def join_shares(
    parts, part_lse, scores, block_indices, sinks, gates, lengths, counts, out, scored, windows,
    done, programs, joined, part, b, t, h, B, T, K, W, BEFORE, g_b, g_t, g_h, g_3,
    G: tl.constexpr, E: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    SLOTS: tl.constexpr, BLOCKS: tl.constexpr, LISTED: tl.constexpr,
    l: tl.constexpr, d: tl.constexpr, s: tl.constexpr, BLOCK_S: tl.constexpr, w: tl.constexpr,
    INITIAL: tl.constexpr, LOCAL: tl.constexpr, INTERPOLATED: tl.constexpr, SINKS: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """Of ROWS heads of token t `out = g_cmp cmp + g_sel sel + g_win win`; 0 past `counts`. BEFORE
    the blocks there are shares of windows and memory, and what the window cuts. Returns how many
    programs had waited before."""
    SLICES: tl.constexpr = (E + COLUMNS - 1) // COLUMNS
    g, e = part // SLICES * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)
    e += part % SLICES * COLUMNS
    real, head = g < G, h * G + tl.minimum(g, G - 1)
    last = last_of(lengths, counts, b, t, COUNTED)
    row = (b * T + t) * (K * G) + head
    gate = gates + b * g_b + t * g_t + head * g_h
    g_cmp = tl.load(gate, mask=real, other=0.0).to(tl.float32)
    g_sel = tl.load(gate + g_3, mask=real, other=0.0).to(tl.float32)
    g_win = tl.load(gate + 2 * g_3, mask=real, other=0.0).to(tl.float32)
    own_scores = scores + ((b * T + t) * K + h) * W
    slot = tl.arange(0, LISTED)
    own_list = block_indices + tl.program_id(0).to(tl.int64) * LISTED
    tl.store(own_list + slot, 0)
    tl.debug_barrier()
    is_cmp, is_cut = slot < BEFORE - 1, slot == BEFORE - 1
    before = 0
    # the first turn is of nothing: the instructions are there when it counts
    for turn in range((B < 0).to(tl.int32), 2):
        code = slot * 0
        if turn == 1:
            if SLOTS > 0:
                wait(scored, windows)
            code = members(
                own_scores, own_list, last, BEFORE, SLOTS, BLOCKS, LISTED, l, d, s, BLOCK_S, w,
                INITIAL, LOCAL, INTERPOLATED,
            )  # fmt: skip
        is_sel, is_win = code & 2 > 0, (code & 1 > 0) | is_cut
        share = tl.where(slot < BEFORE, slot, BEFORE + (code >> 2))
        there = real & (is_cmp | is_sel | is_win)[None] & (turn == 1)
        at = (share * (B * T * K * G))[None] + row
        if turn == 1:
            wait(done, programs)
        # a share holds anything where its lse is -inf
        x = tl.load(part_lse + at, mask=there, other=NO_SCORE)
        tile = tl.load(
            parts + at[:, :, None] * E + e[None, None],
            mask=there[:, :, None] & (e < E)[None, None], other=0.0,
        )  # fmt: skip
        if turn == 1:
            before = tl.atomic_add(joined, 1, sem="relaxed")
        weight = weights(
            x, is_cmp[None], is_sel[None], is_win[None], g_cmp, g_sel, g_win, sinks, head, K * G,
            SINKS,
        )[:, :, None]  # fmt: skip
        acc = tl.sum(tl.where(weight != 0.0, tile * weight, 0.0), 1)
        if COUNTED:
            acc = tl.where(t < tl.load(counts + b), acc, 0.0)
        to = real & (e < E)[None] & (turn == 1)
        tl.store(out + row * E + e[None], acc.to(out.dtype.element_ty), mask=to)
    return before


@triton.jit(do_not_specialize=["B", "W", "N", "MEMORY", "CMP_SHARES", "MEM_SHARES", "BLOCK_SHARES"])
def nsa_decode_read_all(
    cq, q, k, v, ck, cv, mem_k, mem_v, gates, sinks, lengths, counts, table, scores, parts,
    part_lse, block_indices, counters, out, B, W, N, MEMORY, CMP_SHARES, MEM_SHARES, BLOCK_SHARES,
    scale_log2, cap, p_b, p_t, p_h, q_b, q_t, q_h, k_b, k_n, k_h, v_b, v_n, v_h, c_b, c_n, c_h, o_b,
    o_n, o_h, m_h, m_m, u_h, u_m, g_b, g_t, g_h, g_3, t_b,
    T: tl.constexpr, K: tl.constexpr, G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, BLOCKS: tl.constexpr, LISTED: tl.constexpr,
    ITEMS: tl.constexpr, l: tl.constexpr, d: tl.constexpr, s: tl.constexpr, BLOCK_S: tl.constexpr,
    w: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr, INTERPOLATED: tl.constexpr,
    PAGE: tl.constexpr, WINDOW_PAGE: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    COUNTED: tl.constexpr, COUNTERS: tl.constexpr,
):  # fmt: skip
    """One program: a share of a token and KV head, or some of its rows to be joined."""
    # windows first: the ranking waits for them
    number, tokens, BEFORE = tl.program_id(0), B * T * K, CMP_SHARES + MEM_SHARES + 1
    program, token = number // tokens, number % tokens
    b, h = (token // K // T).to(tl.int64), (token % K).to(tl.int64)
    t = (token // K % T).to(tl.int64)
    mine = counters + (b * K + h) * COUNTERS
    programs = BEFORE + tl.cdiv(BLOCK_SHARES, ITEMS)
    if program < programs:
        attend_shares(
            cq, q, k, v, ck, cv, mem_k, mem_v, lengths, counts, table, scores, parts, part_lse,
            mine + WINDOWS, program, t, b, h, B, T, K, W, N, MEMORY, CMP_SHARES, MEM_SHARES,
            BLOCK_SHARES, scale_log2, cap, p_b, p_t, p_h, q_b, q_t, q_h, k_b, k_n, k_h, v_b, v_n,
            v_h, c_b, c_n, c_h, o_b, o_n, o_h, m_h, m_m, u_h, u_m, t_b, G, BLOCK_G, D, BLOCK_D, E,
            BLOCK_E, BLOCK_S, ITEMS, d, s, w, PAGE, WINDOW_PAGE, SLOTS > 0, CAP, COUNTED,
        )  # fmt: skip
        arrived(mine + SHARES)
    else:
        JOINS: tl.constexpr = ((G + ROWS - 1) // ROWS) * ((E + COLUMNS - 1) // COLUMNS)
        before = join_shares(
            parts, part_lse, scores, block_indices, sinks, gates, lengths, counts, out,
            mine + WINDOWS, T * CMP_SHARES, mine + SHARES, T * programs, mine + JOINED,
            program - programs, b, t, h, B, T, K, W, BEFORE, g_b, g_t, g_h, g_3, G, E, COLUMNS,
            ROWS, SLOTS, BLOCKS, LISTED, l, d, s, BLOCK_S, w, INITIAL, LOCAL, INTERPOLATED, SINKS,
            COUNTED,
        )  # fmt: skip
        if before == T * JOINS - 1:  # nobody waits any more: as they were
            tl.store(mine + tl.arange(0, COUNTERS), 0)
