"""Split-KV attention of a decode step.

The keys of each branch are divided into splits. A split gives a partial result: an output and its
log-sum-exp (lse). `partial_weights` computes the weights with which partial results are reduced.
"Windows" are compression windows; "the window" is the sliding window.
"""

import triton
import triton.language as tl

from ..common.primitives import load_rows, load_sinks, soft_capped, softmax_step, store_rows
from ..topk.topn import NO_SCORE
from .grid_barrier import arrive, first_phase, wait
from .kv_cache import cache_offsets, load_page, slot_offsets

# the scores of a window that `compressed_split` stores: none, the sum of the logits over the query
# heads of a KV head, or one logit per query head
SCORES_NONE, SCORES_SUM, SCORES_PER_HEAD = (tl.constexpr(i) for i in range(3))


@triton.jit
def store_partial(
    partial_out, partial_lse, row, acc, m, l, E: tl.constexpr, BLOCK_E: tl.constexpr, valid
):  # fmt: skip
    """Write the partial result of a split: the outputs of rows that see at least one key, and the
    lse of all rows in units of log2; -inf for a row that sees no key."""
    denominator = tl.where(l == 0.0, 1.0, l)
    offsets = row * E
    out = acc * (1.0 / denominator)[:, None]
    store_rows(partial_out, offsets, out, E, BLOCK_E, valid & (l > 0.0))
    tl.store(partial_lse + row, tl.where(l == 0.0, NO_SCORE, m + tl.log2(denominator)), mask=valid)


# the compressed branch


@triton.jit
def store_scores(scores, row, x, n0, n, num_windows, valid, BLOCK_WINDOWS: tl.constexpr):
    """Write scores x [M, N] of windows n to rows of `scores`; with BLOCK_WINDOWS the largest of
    each block."""
    if BLOCK_WINDOWS > 0:
        M: tl.constexpr = x.shape[0]
        N: tl.constexpr = x.shape[1]
        x = tl.where((n < num_windows)[None], x, NO_SCORE)
        x = tl.max(tl.reshape(x, [M, N // BLOCK_WINDOWS, BLOCK_WINDOWS]), 2)
        c = n0 // BLOCK_WINDOWS + tl.arange(0, N // BLOCK_WINDOWS)
        inside = c * BLOCK_WINDOWS < num_windows
        tl.store(scores + row[:, None] + c[None], x, mask=valid[:, None] & inside[None])
    else:
        mask = valid[:, None] & (n < num_windows)[None]
        tl.store(scores + row[:, None] + n[None], x, mask=mask)


@triton.jit
def compressed_split(
    q, ck, cv, mem_k, mem_v, lengths, counts, page_table, partial_out, partial_lse, scores, split,
    SPLITS, b, h, tile, B, T, K, W, MEMORY, scale_log2, cap, q_b, q_t, q_h, k_b, k_n, k_h, v_b, v_n,
    v_h, m_h, m_m, u_h, u_m, t_b, G: tl.constexpr, PADDED_G: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, d: tl.constexpr, PAGE_SIZE: tl.constexpr,
    SCORE_MODE: tl.constexpr, CAPPED_SCORES: tl.constexpr, CAP: tl.constexpr,
    HAS_COUNTS: tl.constexpr, SIGNAL_EARLY: tl.constexpr, scores_ready, SCORE_COLUMNS,
    ATTEND: tl.constexpr, BLOCK_WINDOWS: tl.constexpr,
):  # fmt: skip
    """Attention of the compressed branch over one split of the windows.

    A program owns one split for one sequence, KV head and tile of BLOCK_M (token, query head)
    rows. It reads the compressed keys and values of the windows in the split; split 0 also reads
    the memory keys and values. It writes the partial result and, by SCORE_MODE, the scores of the
    windows [B T heads SCORE_COLUMNS]; with BLOCK_WINDOWS, the largest score of so many windows of a
    block. Without ATTEND it only writes scores. With SIGNAL_EARLY a split has at most one tile of
    windows, and the program arrives at `scores_ready` as soon as the scores are written."""
    length = tl.load(lengths + b).to(tl.int32)
    TOKENS: tl.constexpr = BLOCK_M // PADDED_G
    row = tl.arange(0, BLOCK_M)
    t, g = tile * TOKENS + row // PADDED_G, row % PADDED_G
    valid = (t < T) & (g < G)
    window_end = (length + t) // d
    q_tile = load_rows(q, b * q_b + t.to(tl.int64) * q_t + (h * G + g) * q_h, D, BLOCK_D, valid)

    m = tl.full([BLOCK_M], NO_SCORE, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    if ATTEND and split == 0:
        for n0 in range(0, MEMORY, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            k_tile = load_rows(mem_k, h * m_h + n.to(tl.int64) * m_m, D, BLOCK_D, n < MEMORY)
            v_tile = load_rows(mem_v, h * u_h + n.to(tl.int64) * u_m, E, BLOCK_E, n < MEMORY)
            x = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
            if CAP:
                x = soft_capped(x, cap)
            x = tl.where((n < MEMORY)[None], x, NO_SCORE)
            acc, m, l = softmax_step(x, v_tile, acc, m, l, "ieee")

    # windows past it may be unwritten
    count = tl.load(counts + b).to(tl.int32) if HAS_COUNTS else T
    num_windows = tl.minimum((length + count - 1) // d, W)
    split_size = tl.cdiv(tl.cdiv(num_windows, BLOCK_N), SPLITS) * BLOCK_N
    end = tl.minimum((split + 1) * split_size, num_windows)
    for n0 in tl.range(split * split_size, end, BLOCK_N, num_stages=STAGES):
        n = n0 + tl.arange(0, BLOCK_N)
        clamped = tl.minimum(n, num_windows - 1)
        k_ptr = ck + h * k_h
        k_offsets = cache_offsets(clamped, b, page_table, k_b, k_n, t_b, PAGE_SIZE)
        k_tile = load_rows(k_ptr, k_offsets, D, BLOCK_D, n < num_windows)
        if ATTEND:
            v_ptr = cv + h * v_h
            v_offsets = cache_offsets(clamped, b, page_table, v_b, v_n, t_b, PAGE_SIZE)
            v_tile = load_rows(v_ptr, v_offsets, E, BLOCK_E, n < num_windows)
        logits = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
        x = logits
        if CAP:
            x = soft_capped(x, cap)
        if SCORE_MODE == SCORES_SUM:
            head_sum = tl.sum(tl.reshape(logits, [TOKENS, PADDED_G, BLOCK_N]), 1)
            token = tile * TOKENS + tl.arange(0, TOKENS)
            score_row = ((b * T + token) * K + h) * SCORE_COLUMNS
            store_scores(scores, score_row, head_sum, n0, n, num_windows, token < T, BLOCK_WINDOWS)
        elif SCORE_MODE == SCORES_PER_HEAD:
            score_row = ((b * T + t) * (K * G) + h * G + g) * SCORE_COLUMNS
            score = x if CAPPED_SCORES else logits
            store_scores(scores, score_row, score, n0, n, num_windows, valid, BLOCK_WINDOWS)
        if SIGNAL_EARLY:
            arrive(scores_ready)
        if ATTEND:
            x = tl.where(n[None] < window_end[:, None], x, NO_SCORE)
            acc, m, l = softmax_step(x, v_tile, acc, m, l, "ieee")
    if SIGNAL_EARLY:  # noqa: SIM102
        if split * split_size >= end:  # the split is empty
            arrive(scores_ready)

    if ATTEND:
        out_row = ((split * B + b) * T + t) * (K * G) + h * G + g
        store_partial(partial_out, partial_lse, out_row, acc, m, l, E, BLOCK_E, valid)


# the selected branch and the sliding window


@triton.jit
def block_split(
    q, k, v, window_k, window_v, block_indices, lengths, counts, page_table, partial_out,
    partial_lse, ready, producers, split, WINDOW_SPLITS, first_split, b, r, t, B, T, RANKS,
    WINDOW_SPLIT_BLOCKS, SELECTED_SPLIT_BLOCKS, PAGES, scale_log2, cap, q_b, q_t, q_h, k_b, k_n,
    k_h, v_b, v_n, v_h, x_b, x_n, x_h, y_b, y_n, y_h, t_b, GROUP: tl.constexpr,
    RANKS_PER_KV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_KEYS: tl.constexpr, STAGES: tl.constexpr,
    TOPN: tl.constexpr, PADDED_SPLIT_BLOCKS: tl.constexpr, s: tl.constexpr, BLOCK_S: tl.constexpr,
    w: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr, SELECTED_BLOCKS: tl.constexpr,
    SEPARATE_WINDOW: tl.constexpr, FUSE_LOCAL: tl.constexpr, PAGE_SIZE: tl.constexpr,
    CAP: tl.constexpr, HAS_COUNTS: tl.constexpr, WARMUP: tl.constexpr,
    PRELOADED_PAGES: tl.constexpr,
):  # fmt: skip
    """Attention of the selected branch or of the sliding window over one split of the KV blocks.

    A program owns one split for one token t and ranking head r, with the GROUP query heads that
    share the ranking. It reads the keys and values of the split's blocks, BLOCK_KEYS keys at a
    time, and writes the partial result.

    The first WINDOW_SPLITS splits cover the blocks that overlap the window, WINDOW_SPLIT_BLOCKS
    each; keys outside the window are masked. The other splits cover the SELECTED_BLOCKS blocks of
    the selected branch, SELECTED_SPLIT_BLOCKS each: TOPN ranked blocks, then the initial and the
    local ones. A program of these splits waits until the `producers` ranking programs have arrived
    at `ready`, and reads the ranked blocks from `block_indices`.

    With FUSE_LOCAL both branches have the same keys and the window covers the local blocks. The
    last window split then covers the local blocks and counts for both branches."""
    h = r // RANKS_PER_KV
    is_window = split < WINDOW_SPLITS
    split_blocks = tl.where(is_window, WINDOW_SPLIT_BLOCKS, SELECTED_SPLIT_BLOCKS)
    first_index = tl.where(is_window, split, split - WINDOW_SPLITS) * split_blocks
    # tokens past `counts` have no keys: use the position of the last real token
    last = (tl.minimum(t, tl.load(counts + b) - 1) if HAS_COUNTS else t) + tl.load(lengths + b)
    last = last.to(tl.int32)
    own_block, window_start = last // s, tl.maximum(last - w, 0)
    first_window_block, window_block_end = window_start // s + first_index, own_block + 1
    first_token = tl.where(is_window, window_start, 0)
    if FUSE_LOCAL:
        is_local = split == WINDOW_SPLITS - 1
        first_local_block = tl.maximum(own_block - LOCAL + 1, 0)
        first_window_block = tl.where(is_local, first_local_block, first_window_block)
        window_block_end = tl.where(is_local, own_block + 1, own_block - LOCAL + 1)
    row = tl.arange(0, BLOCK_M)
    head, valid = r * GROUP + row, row < GROUP
    q_tile = load_rows(q, b * q_b + t.to(tl.int64) * q_t + head * q_h, D, BLOCK_D, valid)
    if SEPARATE_WINDOW:  # noqa: SIM102
        if is_window:
            k, k_b, k_n, k_h = window_k, x_b, x_n, x_h
            v, v_b, v_n, v_h = window_v, y_b, y_n, y_h
    i = tl.arange(0, PADDED_SPLIT_BLOCKS)
    # index among the selected blocks: TOPN ranked ones, INITIAL, LOCAL
    index = first_index + i
    forced = index - TOPN
    is_initial = (forced >= 0) & (forced < INITIAL) & (forced <= own_block - LOCAL)
    window_block = first_window_block + i
    BLOCKS_PER_TILE: tl.constexpr = BLOCK_KEYS // BLOCK_S
    tile_block, in_block = tl.arange(0, BLOCK_KEYS) // BLOCK_S, tl.arange(0, BLOCK_KEYS) % BLOCK_S
    out_row = (((first_split + split) * B + b) * T + t) * (RANKS * GROUP) + head
    if PRELOADED_PAGES > 0:  # the whole page table row: no lookup after the wait
        page_slot = tl.arange(0, PRELOADED_PAGES)
        preloaded = tl.load(page_table + b * t_b + page_slot, mask=page_slot < PAGES, other=0)
    start = 1
    if TOPN > 0:  # noqa: SIM102
        if not is_window:
            start = first_phase(ready, producers, WARMUP)
    # Triton before 3.6 loses the range of a bound that is set in a branch: repeat it by `minimum`
    for phase in range(tl.minimum(start, 1), 2):
        block = i * 0 - 1
        if TOPN > 0:  # noqa: SIM102
            if not is_window:
                if phase == 1:
                    wait(ready, producers)
                index_ptr = block_indices + ((b * T + t) * RANKS + r) * TOPN + index
                is_ranked = (i < split_blocks) & (index < TOPN) & (phase == 1)
                block = tl.load(index_ptr, mask=is_ranked, other=-1)
        block = tl.where(is_initial, forced, block)
        is_last = (forced >= INITIAL) & (index < SELECTED_BLOCKS)
        block = tl.where(is_last, own_block - (forced - INITIAL), block)
        in_window = window_block < window_block_end
        block = tl.where(is_window, tl.where(in_window, window_block, -1), block)
        split_block = tl.where((i < split_blocks) & (phase == 1), block, -1)
        # a block lies in one page
        clamped_block = tl.maximum(tl.minimum(split_block, own_block), 0)
        if PRELOADED_PAGES > 0:
            page_index = (clamped_block * s // PAGE_SIZE).to(tl.int32)
            block_pages = tl.gather(preloaded, page_index, 0).to(tl.int64)
        else:
            block_pages = load_page(clamped_block * s, b, page_table, t_b, PAGE_SIZE)

        m = tl.full([BLOCK_M], NO_SCORE, tl.float32)
        l_sum = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
        num_blocks = tl.where(phase == 1, split_blocks, BLOCKS_PER_TILE)
        for i0 in tl.range(0, num_blocks, BLOCKS_PER_TILE, num_stages=STAGES):
            is_block = i[None] == (i0 + tile_block)[:, None]
            token = tl.max(tl.where(is_block, split_block[None], -1), 1) * s + in_block
            visible = (in_block < s) & (token >= first_token) & (token <= last)  # never of block -1
            clamped, page = tl.minimum(tl.maximum(token, 0), tl.maximum(last, 0)), b
            if PAGE_SIZE > 0:
                page = tl.max(tl.where(is_block, block_pages[None], 0), 1)
            k_offsets = slot_offsets(clamped, page, k_b, k_n, PAGE_SIZE)
            v_offsets = slot_offsets(clamped, page, v_b, v_n, PAGE_SIZE)
            k_tile = load_rows(k + h * k_h, k_offsets, D, BLOCK_D, visible)
            v_tile = load_rows(v + h * v_h, v_offsets, E, BLOCK_E, visible)
            x = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
            if CAP:
                x = soft_capped(x, cap)
            x = tl.where(visible[None], x, NO_SCORE)
            acc, m, l_sum = softmax_step(x, v_tile, acc, m, l_sum, "ieee")
        out_mask = valid & (phase == 1)
        store_partial(partial_out, partial_lse, out_row, acc, m, l_sum, E, BLOCK_E, out_mask)


# weights of the partial results


@triton.jit
def max_of_three(a, b, c, x, y, z):
    return tl.maximum(a, x), tl.maximum(b, y), tl.maximum(c, z)


@triton.jit
def sum_of_three(a, b, c, x, y, z):
    return a + x, b + y, c + z


@triton.jit
def masked_exp2(x, m):
    """2^(x - m); 0 where x is -inf."""
    return tl.exp2(x - tl.where(m == NO_SCORE, 0.0, m))


@triton.jit
def divide_nonzero(gate, total):
    """gate / total; the gate itself if the total is 0."""
    return gate / tl.where(total == 0.0, 1.0, total)


@triton.jit
def partial_weights(
    lse, is_cmp, is_sel, is_win, g_cmp, g_sel, g_win, sinks, head, H, SINKS: tl.constexpr,
):  # fmt: skip
    """Weights [M, N] of N partial results in the gated sum of the three branches, for M rows.

    `lse` [M, N] is in units of log2. `is_cmp`, `is_sel` and `is_win` [1, N] say which branches a
    partial result belongs to. Its weight is the sum over these branches of its fraction of the
    branch's softmax denominator, times the branch's gate [M, 1]. The maxima of the three branches
    share one reduction, and so do the sums: each reduction synchronizes the threads."""
    cmp = tl.where(is_cmp, lse, NO_SCORE)
    sel = tl.where(is_sel, lse, NO_SCORE)
    win = tl.where(is_win, lse, NO_SCORE)
    m_cmp, m_sel, m_win = tl.reduce((cmp, sel, win), 1, max_of_three, keep_dims=True)
    if SINKS:
        s_cmp = load_sinks(sinks, head)
        s_sel = load_sinks(sinks, H + head)
        s_win = load_sinks(sinks, 2 * H + head)
        m_cmp, m_sel = tl.maximum(m_cmp, s_cmp), tl.maximum(m_sel, s_sel)
        m_win = tl.maximum(m_win, s_win)
    cmp, sel, win = masked_exp2(cmp, m_cmp), masked_exp2(sel, m_sel), masked_exp2(win, m_win)
    l_cmp, l_sel, l_win = tl.reduce((cmp, sel, win), 1, sum_of_three, keep_dims=True)
    if SINKS:
        l_cmp += masked_exp2(s_cmp, m_cmp)
        l_sel += masked_exp2(s_sel, m_sel)
        l_win += masked_exp2(s_win, m_win)
    weight = cmp * divide_nonzero(g_cmp, l_cmp) + sel * divide_nonzero(g_sel, l_sel)
    return weight + win * divide_nonzero(g_win, l_win)
