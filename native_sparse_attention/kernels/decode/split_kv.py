"""The branches of a decoding step, each cut into shares: an output and a log-sum-exp of its own."""

import triton
import triton.language as tl

from ..common.primitives import load_rows, load_sinks, soft_capped, softmax_step, store_rows
from ..topk.topn import NO_SCORE
from .grid_barrier import arrived, first_turn, wait
from .kv_cache import offsets, pages_of, places

# what `windows` stores of each window's logits
NOTHING, SUM, EACH = (tl.constexpr(i) for i in range(3))


@triton.jit
def store_part(parts, part_lse, row, acc, m, l, E: tl.constexpr, BLOCK_E: tl.constexpr, real):
    """Write a share's output, of rows that saw something; and its lse in units of log2, -inf of
    others."""
    some = tl.where(l == 0.0, 1.0, l)
    store_rows(parts, row * E, acc * (1.0 / some)[:, None], E, BLOCK_E, real & (l > 0.0))
    tl.store(part_lse + row, tl.where(l == 0.0, NO_SCORE, m + tl.log2(some)), mask=real)


# branch 1


@triton.jit
def windows(
    q, ck, cv, mem_k, mem_v, lengths, counts, table, parts, part_lse, scores,
    split, SPLITS, b, h, tile, B, T, K, W, MEMORY, scale_log2, cap,
    q_b, q_t, q_h, k_b, k_n, k_h, v_b, v_n, v_h, m_h, m_m, u_h, u_m, t_b,
    G: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    d: tl.constexpr, PAGE: tl.constexpr, SCORES: tl.constexpr, CAPPED_SCORES: tl.constexpr,
    CAP: tl.constexpr, COUNTED: tl.constexpr, EARLY: tl.constexpr, scored,
):  # fmt: skip
    """Of a row and KV head, a tile of T x HEADS queries against one share of the windows that they
    see; the first share has the memory too. EARLY, where a share is one tile: it counts itself
    as `scored` as soon as it is."""
    length = tl.load(lengths + b)
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    row = tl.arange(0, BLOCK_M)
    t, g = tile * TOKENS + row // HEADS, row % HEADS
    real = (t < T) & (g < G)
    hi = (length + t) // d
    q_tile = load_rows(q, b * q_b + t.to(tl.int64) * q_t + (h * G + g) * q_h, D, BLOCK_D, real)

    m = tl.full([BLOCK_M], NO_SCORE, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    if split == 0:
        for n0 in range(0, MEMORY, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            k_tile = load_rows(mem_k, h * m_h + n.to(tl.int64) * m_m, D, BLOCK_D, n < MEMORY)
            v_tile = load_rows(mem_v, h * u_h + n.to(tl.int64) * u_m, E, BLOCK_E, n < MEMORY)
            x = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
            if CAP:
                x = soft_capped(x, cap)
            x = tl.where((n < MEMORY)[None], x, NO_SCORE)
            acc, m, l = softmax_step(x, v_tile, acc, m, l, "ieee")

    count = tl.load(counts + b) if COUNTED else T  # past it windows may not be written yet
    most = tl.minimum((length + count - 1) // d, W)
    share = tl.cdiv(tl.cdiv(most, BLOCK_N), SPLITS) * BLOCK_N
    end = tl.minimum((split + 1) * share, most)
    for n0 in tl.range(split * share, end, BLOCK_N, num_stages=STAGES):
        n = n0 + tl.arange(0, BLOCK_N)
        here = tl.minimum(n, most - 1)
        k_tile = load_rows(
            ck + h * k_h, places(here, b, table, k_b, k_n, t_b, PAGE), D, BLOCK_D, n < most
        )
        v_tile = load_rows(
            cv + h * v_h, places(here, b, table, v_b, v_n, t_b, PAGE), E, BLOCK_E, n < most
        )
        plain = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
        x = plain
        if CAP:
            x = soft_capped(x, cap)
        if SCORES == SUM:
            total = tl.sum(tl.reshape(plain, [TOKENS, HEADS, BLOCK_N]), 1)
            at = tile * TOKENS + tl.arange(0, TOKENS)
            to = ((b * T + at) * K + h) * W
            tl.store(
                scores + to[:, None] + n[None], total, mask=(at < T)[:, None] & (n < most)[None]
            )
        elif SCORES == EACH:
            to = ((b * T + t) * (K * G) + h * G + g) * W
            tl.store(
                scores + to[:, None] + n[None], x if CAPPED_SCORES else plain,
                mask=real[:, None] & (n < most)[None],
            )  # fmt: skip
        if EARLY:
            arrived(scored)
        x = tl.where(n[None] < hi[:, None], x, NO_SCORE)
        acc, m, l = softmax_step(x, v_tile, acc, m, l, "ieee")
    if EARLY:  # noqa: SIM102
        if split * share >= end:  # there was none
            arrived(scored)

    out_row = ((split * B + b) * T + t) * (K * G) + h * G + g
    store_part(parts, part_lse, out_row, acc, m, l, E, BLOCK_E, real)


# branches 2 and 3


@triton.jit
def blocks(
    q, k, v, wk, wv, block_indices, lengths, counts, table, parts, part_lse, before, programs,
    share, NEAR_SHARES, first_part, b, r, t, B, T, RANKS, NEAR_ITEMS, FAR_ITEMS, PAGES,
    scale_log2, cap, q_b, q_t, q_h, k_b, k_n, k_h, v_b, v_n, v_h, x_b, x_n, x_h, y_b, y_n, y_h, t_b,
    G: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    SLOTS: tl.constexpr, ITEMS_2: tl.constexpr, s: tl.constexpr, BLOCK_S: tl.constexpr,
    w: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr, LISTED: tl.constexpr,
    OWN_WINDOW: tl.constexpr, FUSED: tl.constexpr, PAGE: tl.constexpr, CAP: tl.constexpr,
    COUNTED: tl.constexpr, ROOM: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """The G query heads of token t that rank together, against one share of blocks, KEYS keys at
    once. The NEAR_SHARES are of the blocks that reach into the window, whose keys alone count; the
    others of the LISTED ones: those of its list, which is there once the `programs` before have
    arrived, the initial and the local. Where both branches have the same keys and the window covers
    the local blocks (FUSED), these are the last of the near shares, which counts for both."""
    h = r // SHARE
    is_near = share < NEAR_SHARES
    items = tl.where(is_near, NEAR_ITEMS, FAR_ITEMS)
    first = tl.where(is_near, share, share - NEAR_SHARES) * items
    # of tokens past `counts` there are no keys
    last = tl.load(lengths + b) + (tl.minimum(t, tl.load(counts + b) - 1) if COUNTED else t)
    own, edge = last // s, tl.maximum(last - w, 0)
    near, near_end, begin = edge // s + first, own + 1, tl.where(is_near, edge, 0)
    if FUSED:
        is_both = share == NEAR_SHARES - 1
        near = tl.where(is_both, tl.maximum(own - LOCAL + 1, 0), near)
        near_end = tl.where(is_both, own + 1, own - LOCAL + 1)
    row = tl.arange(0, BLOCK_M)
    head, real = r * G + row, row < G
    q_tile = load_rows(q, b * q_b + t.to(tl.int64) * q_t + head * q_h, D, BLOCK_D, real)
    if OWN_WINDOW:  # noqa: SIM102
        if is_near:
            k, k_b, k_n, k_h = wk, x_b, x_n, x_h
            v, v_b, v_n, v_h = wv, y_b, y_n, y_h
    own_blocks = tl.arange(0, ITEMS_2)
    item = first + own_blocks
    forced = item - SLOTS
    initial = (forced >= 0) & (forced < INITIAL) & (forced <= own - LOCAL)
    close = near + own_blocks
    AT_ONCE: tl.constexpr = KEYS // BLOCK_S
    which, u = tl.arange(0, KEYS) // BLOCK_S, tl.arange(0, KEYS) % BLOCK_S
    out_row = (((first_part + share) * B + b) * T + t) * (RANKS * G) + head
    if TABLE > 0:  # the row's PAGES: nothing to look up once its list is there
        slot = tl.arange(0, TABLE)
        row_pages = tl.load(table + b * t_b + slot, mask=slot < PAGES, other=0)
    turn = 1
    if SLOTS > 0:  # noqa: SIM102
        if not is_near:
            turn = first_turn(before, programs, ROOM)
    # of a bound that is the outcome of a branch Triton before 3.6 knows too little
    for now in range(tl.minimum(turn, 1), 2):
        c = own_blocks * 0 - 1
        if SLOTS > 0:  # noqa: SIM102
            if not is_near:
                if now == 1:
                    wait(before, programs)
                listed = block_indices + ((b * T + t) * RANKS + r) * SLOTS + item
                mask = (own_blocks < items) & (item < SLOTS) & (now == 1)
                c = tl.load(listed, mask=mask, other=-1)
        c = tl.where(initial, forced, c)
        c = tl.where((forced >= INITIAL) & (item < LISTED), own - (forced - INITIAL), c)
        c = tl.where(is_near, tl.where(close < near_end, close, -1), c)
        chosen = tl.where((own_blocks < items) & (now == 1), c, -1)
        # a page holds whole blocks
        inside = tl.maximum(tl.minimum(chosen, own), 0)
        if TABLE > 0:
            pages = tl.gather(row_pages, (inside * s // PAGE).to(tl.int32), 0).to(tl.int64)
        else:
            pages = pages_of(inside * s, b, table, t_b, PAGE)

        m = tl.full([BLOCK_M], NO_SCORE, tl.float32)
        l_sum = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
        for i in tl.range(0, tl.where(now == 1, items, AT_ONCE), AT_ONCE, num_stages=STAGES):
            is_this = own_blocks[None] == (i + which)[:, None]
            n = tl.max(tl.where(is_this, chosen[None], -1), 1) * s + u
            seen = (u < s) & (n >= begin) & (n <= last)  # none of block -1
            here, page = tl.minimum(tl.maximum(n, 0), tl.maximum(last, 0)), b
            if PAGE > 0:
                page = tl.max(tl.where(is_this, pages[None], 0), 1)
            k_rows = offsets(here, page, k_b, k_n, PAGE)
            v_rows = offsets(here, page, v_b, v_n, PAGE)
            k_tile = load_rows(k + h * k_h, k_rows, D, BLOCK_D, seen)
            v_tile = load_rows(v + h * v_h, v_rows, E, BLOCK_E, seen)
            x = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
            if CAP:
                x = soft_capped(x, cap)
            x = tl.where(seen[None], x, NO_SCORE)
            acc, m, l_sum = softmax_step(x, v_tile, acc, m, l_sum, "ieee")
        store_part(parts, part_lse, out_row, acc, m, l_sum, E, BLOCK_E, real & (now == 1))


# the gates


@triton.jit
def most_of_three(a, b, c, x, y, z):
    return tl.maximum(a, x), tl.maximum(b, y), tl.maximum(c, z)


@triton.jit
def sum_of_three(a, b, c, x, y, z):
    return a + x, b + y, c + z


@triton.jit
def powers(x, m):
    """2^(x - m); 0 where x is -inf."""
    return tl.exp2(x - tl.where(m == NO_SCORE, 0.0, m))


@triton.jit
def of_sum(gate, total):
    return gate / tl.where(total == 0.0, 1.0, total)


@triton.jit
def weights(
    x, is_cmp, is_sel, is_win, g_cmp, g_sel, g_win, sinks, head, H, SINKS: tl.constexpr,
):  # fmt: skip
    """What shares of log-sum-exp x [M, N], in units of log2, weigh in rows' outputs: of each branch
    that a share is of [1, N], what it is of the branch's sum, times the gate [M, 1]. Maxima and
    sums of the three are taken in one pass each: a pass is a wait of threads for one another."""
    cmp = tl.where(is_cmp, x, NO_SCORE)
    sel = tl.where(is_sel, x, NO_SCORE)
    win = tl.where(is_win, x, NO_SCORE)
    m_cmp, m_sel, m_win = tl.reduce((cmp, sel, win), 1, most_of_three, keep_dims=True)
    if SINKS:
        s_cmp = load_sinks(sinks, head)
        s_sel = load_sinks(sinks, H + head)
        s_win = load_sinks(sinks, 2 * H + head)
        m_cmp, m_sel = tl.maximum(m_cmp, s_cmp), tl.maximum(m_sel, s_sel)
        m_win = tl.maximum(m_win, s_win)
    cmp, sel, win = powers(cmp, m_cmp), powers(sel, m_sel), powers(win, m_win)
    l_cmp, l_sel, l_win = tl.reduce((cmp, sel, win), 1, sum_of_three, keep_dims=True)
    if SINKS:
        l_cmp += powers(s_cmp, m_cmp)
        l_sel += powers(s_sel, m_sel)
        l_win += powers(s_win, m_win)
    return cmp * of_sum(g_cmp, l_cmp) + sel * of_sum(g_sel, l_sel) + win * of_sum(g_win, l_win)
