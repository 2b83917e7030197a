"""Decoding: a few new tokens of each row over what a cache holds, lengths read on the device.

    windows_kernel   branch 1, a share of the windows; and what each window scores
    rank_kernel      block scores, and the n best of them
    blocks_kernel    branches 2 and 3, a share of the blocks: keys that both see are read once
    join_kernel      the shares of each branch to one, and the gates

A row's queries stand at positions `lengths[b] + 0 .. T - 1`; their keys are in the cache already.
"""

import triton
import triton.language as tl

from .block_keys import first_window, window_weight
from .device import candidates_end, load_rows, soft_capped, softmax_step, store_rows
from .entries import places
from .topn import NO_BLOCK, NO_SCORE, chunk_blocks, finish, fold, start

# what `windows_kernel` stores of each window's logits
NOTHING, SUM, EACH = (tl.constexpr(i) for i in range(3))
NEVER = tl.constexpr(1 << 30)


@triton.jit
def store_part(parts, part_lse, row, acc, m, l, E: tl.constexpr, BLOCK_E: tl.constexpr, real):
    """Write a share's output, of rows that saw something; and its lse in units of log2, -inf of
    others."""
    some = tl.where(l == 0.0, 1.0, l)
    store_rows(parts, row * E, acc / some[:, None], E, BLOCK_E, real & (l > 0.0))
    tl.store(part_lse + row, tl.where(l == 0.0, NO_SCORE, m + tl.log2(some)), mask=real)


# branch 1


@triton.jit(do_not_specialize=["T", "W", "MEMORY"])
def windows_kernel(
    q, ck, cv, mem_k, mem_v, lengths, counts, table, parts, part_lse, scores, T, K, W, MEMORY,
    scale_log2, cap, q_b, q_t, q_h, k_b, k_n, k_h, v_b, v_n, v_h, m_h, m_m, u_h, u_m, t_b,
    G: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, d: tl.constexpr,
    PAGE: tl.constexpr, SCORES: tl.constexpr, CAPPED_SCORES: tl.constexpr, CAP: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """One program: of a row and KV head, a tile of T x HEADS queries against one share of the
    windows that they see; the first share has the memory too."""
    split, tile = tl.program_id(0), tl.program_id(2)
    b, h = (tl.program_id(1) // K).to(tl.int64), (tl.program_id(1) % K).to(tl.int64)
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
    share = tl.cdiv(tl.cdiv(most, BLOCK_N), tl.num_programs(0)) * BLOCK_N
    for n0 in range(split * share, tl.minimum((split + 1) * share, most), BLOCK_N):
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
        x = tl.where(n[None] < hi[:, None], x, NO_SCORE)
        acc, m, l = softmax_step(x, v_tile, acc, m, l, "ieee")

    out_row = ((split * (tl.num_programs(1) // K) + b) * T + t) * (K * G) + h * G + g
    store_part(parts, part_lse, out_row, acc, m, l, E, BLOCK_E, real)


# the ranking


@triton.jit(do_not_specialize=["T", "W"])
def probabilities_kernel(
    scores, part_lse, sinks, lengths, out, T, W, RANKS, SPLITS, ROWS,
    HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr, d: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One program: the probabilities of N windows, summed over the HEADS heads of one token that
    rank together."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t, r = tl.program_id(2), tl.program_id(1) % RANKS
    b = (tl.program_id(1) // RANKS).to(tl.int64)
    hi = tl.minimum((tl.load(lengths + b) + t) // d, W)
    if tl.program_id(0) * BLOCK_N < hi:
        token = (b * T + t) * RANKS + r
        g = tl.arange(0, BLOCK_HEADS)
        row, real = token * HEADS + g, g < HEADS
        split = tl.arange(0, BLOCK_SPLITS)
        there = (split < SPLITS)[:, None] & real[None]
        x = tl.load(part_lse + split[:, None] * ROWS + row[None], mask=there, other=NO_SCORE)
        m = tl.max(x, 0)
        if SINKS:
            sink = tl.load(sinks + r * HEADS + g, mask=real, other=0.0) * 1.4426950408889634
            m = tl.maximum(m, sink)
        m = tl.where(m == NO_SCORE, 0.0, m)
        total = tl.sum(tl.exp2(x - m[None]), 0)
        if SINKS:
            total += tl.exp2(sink - m)
        there = real[:, None] & (n < hi)[None]
        x = tl.load(scores + row[:, None] * W + n[None], mask=there, other=NO_SCORE)
        p = tl.where(there, tl.exp2(x - (m + tl.log2(total))[:, None]), 0.0)
        tl.store(out + token * W + n, tl.sum(p, 0), mask=n < hi)


@triton.jit
def window_shares(c, j, l: tl.constexpr, d: tl.constexpr, s: tl.constexpr):
    """How many tokens blocks c share with the j-th of the windows that end in them or after."""
    share = c * 0 + 1
    if s >= d:
        past = (first_window(c, d, s) + j + 1) * d  # the window's end
        share = tl.minimum(past, (c + 1) * s) - tl.maximum(past - l, c * s)
    return tl.maximum(share, 0).to(tl.float32)


@triton.jit
def block_scores(
    scores, c, hi, l: tl.constexpr, d: tl.constexpr, s: tl.constexpr, PROBS: tl.constexpr,
    INTERPOLATED: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Scores [C] of blocks c from those of the windows, of which `hi` are seen."""
    WINDOWS: tl.constexpr = s // d if s > d else 1
    AROUND: tl.constexpr = 1 if INTERPOLATED else 0
    COUNT: tl.constexpr = (l + s - 1) // d if PROBS and s >= d else WINDOWS + AROUND
    total = tl.zeros([c.shape[0]], tl.float32)
    for j in tl.static_range(-AROUND, COUNT):
        w = first_window(c, d, s) + j
        if PROBS:
            weight = tl.where(w < hi, window_shares(c, j, l, d, s), 0.0)
        else:
            weight = window_weight(c, j, hi + c * 0, d, s, BLOCK_S, INTERPOLATED)
        w = tl.minimum(tl.maximum(w, 0), hi - 1)
        total += weight * tl.load(scores + w, mask=w >= 0, other=0.0)
    return total


@triton.jit
def best_blocks(
    scores, end, hi, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    SLOTS: tl.constexpr, SLOTS_2: tl.constexpr, l: tl.constexpr, d: tl.constexpr, s: tl.constexpr,
    BLOCK_S: tl.constexpr, INITIAL: tl.constexpr, PROBS: tl.constexpr, INTERPOLATED: tl.constexpr,
):  # fmt: skip
    """The ranking [1, SLOTS_2] of blocks INITIAL .. end - 1, and whether it must be done again.
    The scores of several chunks are asked for before the first is folded."""
    CHUNKS: tl.constexpr = 8 if COLUMNS > 0 else 1
    found = start(1, SLOTS_2, COLUMNS, DEPTH)
    for c0 in range(INITIAL // (CHUNKS * BLOCK_N) * (CHUNKS * BLOCK_N), end, CHUNKS * BLOCK_N):
        tiles = ()
        for i in tl.static_range(CHUNKS):
            c = chunk_blocks(c0 + i * BLOCK_N, BLOCK_N, COLUMNS)
            candidate = (c >= INITIAL) & (c < end)
            inside = tl.where(candidate, c, INITIAL)
            score = block_scores(scores, inside, hi, l, d, s, PROBS, INTERPOLATED, BLOCK_S)
            tiles += (tl.where(candidate, score, NO_SCORE)[None],)
        for i in tl.static_range(CHUNKS):
            c = chunk_blocks(c0 + i * BLOCK_N, BLOCK_N, COLUMNS)
            found = fold(found, tiles[i], c, COLUMNS)
    return finish(found, SLOTS, SLOTS_2, COLUMNS)


@triton.jit
def write_list(ranking, lists, ring, row, ring_row, kept, SLOTS: tl.constexpr, RING: tl.constexpr):
    """A ranking [SLOTS_2] as a token's list, and the first `kept` entries of it in the ring."""
    slot = tl.arange(0, ranking.shape[0])
    tl.store(lists + row * SLOTS + slot, ranking, mask=slot < SLOTS)
    if RING > 0:
        tl.store(ring + ring_row * SLOTS + slot, ranking, mask=slot < kept)


@triton.jit(do_not_specialize=["T", "W"])
def rank_kernel(
    scores, lengths, counts, lists, ring, T, W, RANKS,
    BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, MERGE_N: tl.constexpr,
    SLOTS: tl.constexpr, SLOTS_2: tl.constexpr, l: tl.constexpr, d: tl.constexpr, s: tl.constexpr,
    BLOCK_S: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr, STRIDE: tl.constexpr,
    RING: tl.constexpr, PROBS: tl.constexpr, INTERPOLATED: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """One program: the ranking of one token of a row and ranking head, for all tokens of its group
    where it leads one; else that which the ring holds."""
    t = tl.program_id(1)
    b, r = (tl.program_id(0) // RANKS).to(tl.int64), (tl.program_id(0) % RANKS).to(tl.int64)
    length, count = tl.load(lengths + b), tl.load(counts + b) if COUNTED else T
    position = length + t
    ring_row = (b * RANKS + r) * RING
    row = (b * T + t) * RANKS + r
    leader = position // STRIDE * STRIDE
    if (leader == position) & (t < count):
        hi = tl.minimum(position // d, W)
        end = candidates_end(position, NEVER, LOCAL, d, s, True)
        own = scores + row * W
        ranking, missed = best_blocks(
            own, end, hi, BLOCK_N, COLUMNS, DEPTH, SLOTS, SLOTS_2, l, d, s, BLOCK_S, INITIAL, PROBS,
            INTERPOLATED,
        )  # fmt: skip
        if DEPTH < SLOTS and COLUMNS > 0:  # noqa: SIM102
            if missed > 0:
                ranking, missed = best_blocks(
                    own, end, hi, MERGE_N, 0, 0, SLOTS, SLOTS_2, l, d, s, BLOCK_S, INITIAL, PROBS,
                    INTERPOLATED,
                )  # fmt: skip
        ranking = tl.reshape(tl.where(ranking == NO_BLOCK, -1, ranking), [SLOTS_2])
        for j in range(STRIDE):
            if t + j < T:
                to, at = row + j * RANKS, ring_row + (position + j) % max(RING, 1)
                write_list(
                    ranking, lists, ring, to, at, tl.where(t + j < count, SLOTS, 0), SLOTS, RING
                )
    elif (leader < length) & (t < count):
        slot = tl.arange(0, SLOTS_2)
        kept = ring + (ring_row + (length - 1) % max(RING, 1)) * SLOTS + slot
        ranking = tl.load(kept, mask=slot < SLOTS, other=-1)
        ring_at = ring_row + position % max(RING, 1)
        write_list(ranking, lists, ring, row, ring_at, SLOTS, SLOTS, RING)


# branches 2 and 3


@triton.jit(do_not_specialize=["T", "ITEMS"])
def blocks_kernel(
    q, k, v, lists, lengths, counts, table, parts, part_lse, T, RANKS, ITEMS, scale_log2, cap, q_b,
    q_t, q_h, k_b, k_n, k_h, v_b, v_n, v_h, t_b,
    G: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, SLOTS: tl.constexpr,
    SLOTS_2: tl.constexpr, s: tl.constexpr, BLOCK_S: tl.constexpr, w: tl.constexpr,
    INITIAL: tl.constexpr, LOCAL: tl.constexpr, LISTED: tl.constexpr, NEAR: tl.constexpr,
    FUSED: tl.constexpr, PAGE: tl.constexpr, CAP: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """One program: the G query heads of one token that rank together, against ITEMS blocks. With
    NEAR of those that reach into the window, whose keys alone count; else of the LISTED ones: those
    of its list, the initial and the local. Where both branches have the same keys and the window
    covers the local blocks (FUSED), these are the last NEAR share, which counts for both."""
    split, t = tl.program_id(0), tl.program_id(2)
    b, r = (tl.program_id(1) // RANKS).to(tl.int64), (tl.program_id(1) % RANKS).to(tl.int64)
    h = r // SHARE
    # of tokens past `counts` there are no keys
    last = tl.load(lengths + b) + (tl.minimum(t, tl.load(counts + b) - 1) if COUNTED else t)
    own, edge = last // s, tl.maximum(last - w, 0)
    begin, near, near_end = 0, edge // s + split * ITEMS, own + 1
    if NEAR:
        begin = edge
    if FUSED:
        is_both = split == tl.num_programs(0) - 1
        near = tl.where(is_both, tl.maximum(own - LOCAL + 1, 0), near)
        near_end = tl.where(is_both, own + 1, own - LOCAL + 1)
    row = tl.arange(0, BLOCK_M)
    head, real = r * G + row, row < G
    q_tile = load_rows(q, b * q_b + t.to(tl.int64) * q_t + head * q_h, D, BLOCK_D, real)
    slot = tl.arange(0, SLOTS_2)
    listed = lists + ((b * T + t) * RANKS + r) * SLOTS + slot
    if not NEAR:
        chosen = tl.load(listed, mask=slot < SLOTS, other=-1)

    m = tl.full([BLOCK_M], NO_SCORE, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for i in range(ITEMS):
        item, c = split * ITEMS + i, near + i
        c = tl.where(c < near_end, c, -1)
        if not NEAR:
            c = tl.max(tl.where(slot == item, chosen, -1), 0)
            forced = item - SLOTS
            initial = (forced >= 0) & (forced < INITIAL) & (forced <= own - LOCAL)
            c = tl.where(initial, forced, c)
            c = tl.where((forced >= INITIAL) & (item < LISTED), own - (forced - INITIAL), c)
        u = tl.arange(0, BLOCK_S)
        n = c * s + u
        seen = (u < s) & (n >= begin) & (n <= last)  # none of block -1
        # a page holds whole blocks
        first = tl.minimum(tl.maximum(c, 0), own) * s
        k_rows = places(first, b, table, k_b, k_n, t_b, PAGE) + u.to(tl.int64) * k_n
        v_rows = places(first, b, table, v_b, v_n, t_b, PAGE) + u.to(tl.int64) * v_n
        k_tile = load_rows(k + h * k_h, k_rows, D, BLOCK_D, seen)
        v_tile = load_rows(v + h * v_h, v_rows, E, BLOCK_E, seen)
        x = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
        if CAP:
            x = soft_capped(x, cap)
        x = tl.where(seen[None], x, NO_SCORE)
        acc, m, l = softmax_step(x, v_tile, acc, m, l, "ieee")

    out_row = ((split * (tl.num_programs(1) // RANKS) + b) * T + t) * (RANKS * G) + head
    store_part(parts, part_lse, out_row, acc, m, l, E, BLOCK_E, real)


# the gates


@triton.jit
def lse_of(x):
    """The log-sum-exp of x [N], in units of log2."""
    m = tl.max(x, 0)
    total = tl.sum(tl.exp2(x - tl.where(m == NO_SCORE, 0.0, m)), 0)
    return tl.where(m == NO_SCORE, NO_SCORE, m + tl.log2(total))


@triton.jit
def log_add(x, y):
    m, least = tl.maximum(x, y), tl.minimum(x, y)
    return tl.where(m == NO_SCORE, NO_SCORE, m + tl.log2(1.0 + tl.exp2(least - m)))


@triton.jit
def load_parts(parts, part_lse, row, SPLITS, ROWS, E: tl.constexpr, BLOCK_E: tl.constexpr,
               BLOCK_SPLITS: tl.constexpr):  # fmt: skip
    """A row's parts [SPLITS, E], which hold anything where their lse [SPLITS] is -inf."""
    split = tl.arange(0, BLOCK_SPLITS)
    at = split.to(tl.int64) * ROWS + row
    x = tl.load(part_lse + at, mask=split < SPLITS, other=NO_SCORE)
    return load_rows(parts, at * E, E, BLOCK_E, split < SPLITS), x


@triton.jit
def weights(x, lse):
    """What shares of log-sum-exp x are of one of `lse`."""
    return tl.where(x == NO_SCORE, 0.0, tl.exp2(x - lse))


@triton.jit
def weighted(tile, weight):
    """The sum [E] of parts [SPLITS, E] by their weights."""
    return tl.sum(tl.where((weight != 0.0)[:, None], tile * weight[:, None], 0.0), 0)


@triton.jit(do_not_specialize=["T", "ROWS"])
def join_kernel(
    cmp, cmp_lse, far, far_lse, near, near_lse, sinks, gates, counts, out, T, H, ROWS, CMP_SPLITS,
    FAR_SPLITS, NEAR_SPLITS, g_b, g_t, g_h, g_3,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_CMP: tl.constexpr, BLOCK_FAR: tl.constexpr,
    BLOCK_NEAR: tl.constexpr, FUSED: tl.constexpr, SINKS: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """One program: a row of `out = g_cmp cmp + g_sel sel + g_win win`; 0 past `counts`. The last
    share of the window is the selection's too (FUSED)."""
    row = tl.program_id(0)
    token, head = row // H, row % H
    b, t = (token // T).to(tl.int64), token % T
    cmp_tile, cmp_x = load_parts(cmp, cmp_lse, row, CMP_SPLITS, ROWS, E, BLOCK_E, BLOCK_CMP)
    far_tile, far_x = load_parts(far, far_lse, row, FAR_SPLITS, ROWS, E, BLOCK_E, BLOCK_FAR)
    near_tile, near_x = load_parts(near, near_lse, row, NEAR_SPLITS, ROWS, E, BLOCK_E, BLOCK_NEAR)
    gate = gates + b * g_b + t * g_t + head * g_h
    g_cmp = tl.load(gate).to(tl.float32)
    g_sel, g_win = tl.load(gate + g_3).to(tl.float32), tl.load(gate + 2 * g_3).to(tl.float32)
    near_sel = tl.full([BLOCK_NEAR], NO_SCORE, tl.float32)
    if FUSED:
        near_sel = tl.where(tl.arange(0, BLOCK_NEAR) == NEAR_SPLITS - 1, near_x, NO_SCORE)

    lse_cmp, lse_sel, lse_win = lse_of(cmp_x), lse_of(far_x), lse_of(near_x)
    lse_sel = log_add(lse_sel, lse_of(near_sel))
    if SINKS:
        lse_cmp = log_add(lse_cmp, tl.load(sinks + head) * 1.4426950408889634)
        lse_sel = log_add(lse_sel, tl.load(sinks + H + head) * 1.4426950408889634)
        lse_win = log_add(lse_win, tl.load(sinks + 2 * H + head) * 1.4426950408889634)
    both = g_sel * weights(near_sel, lse_sel) + g_win * weights(near_x, lse_win)
    acc = weighted(cmp_tile, g_cmp * weights(cmp_x, lse_cmp)) + weighted(near_tile, both)
    acc += weighted(far_tile, g_sel * weights(far_x, lse_sel))
    e = tl.arange(0, BLOCK_E)
    if COUNTED:
        acc = tl.where(t < tl.load(counts + b), acc, 0.0)
    tl.store(out + row.to(tl.int64) * E + e, acc.to(out.dtype.element_ty), mask=e < E)
