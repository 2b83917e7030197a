"""Split-KV attention of a decode step, and the grid barriers between programs of a launch.

The keys of each branch are divided into splits. A split gives a partial result: an output and its
log-sum-exp (lse). `partial_weights` computes the weights with which partial results are reduced.
"Windows" are compression windows; "the window" is the sliding window.

At a grid barrier a program waits until other programs of the launch have written their output. It
waits only for programs with smaller ids. A GPU starts programs in the order of their ids, so the
programs that it waits for are running or finished, and every wait ends.

Arguments that stages share: `call` (`call.Tensors`), `step` (`persistent.Step`); and constexpr S
(`call.Settings`) and P (`persistent.Tiles`).
"""

import triton
import triton.language as tl

from ..common.primitives import load_rows, load_sinks, soft_capped, softmax_step, store_rows
from ..topk.topn import NO_SCORE
from .kv_cache import cache_offsets, load_page, slot_offsets

# the scores of a window that `compressed_split` stores: none, the sum of the logits over the query
# heads of a KV head, or one logit per query head
SCORES_NONE, SCORES_SUM, SCORES_PER_HEAD = (tl.constexpr(i) for i in range(3))


@triton.jit
def arrive(counter):
    """Signal that this program has written its output; returns how many programs arrived before."""
    tl.debug_barrier()  # all threads of this program have written
    return tl.atomic_add(counter, 1, sem="acq_rel")


@triton.jit
def first_phase(counter, programs, WARMUP: tl.constexpr):
    """The phase in which a program starts: 1 (wait, then work) or 0 (warm up first).

    A program warms up with WARMUP, if it would have to wait now. Phase 0 executes the code that
    follows the wait with all loads and stores masked. This loads the instructions into the
    instruction cache before the wait ends.
    """
    phase = 1
    if WARMUP:
        phase = (tl.atomic_add(counter, 0, sem="relaxed") >= programs).to(tl.int32)
    return phase


@triton.jit
def wait(counter, programs):
    """Wait until `programs` programs have arrived at the counter. Their output is visible then."""
    while tl.atomic_add(counter, 0, sem="acquire") < programs:
        pass


@triton.jit
def store_partial(call, row, acc, m, l, valid, S: tl.constexpr):
    """Write the partial result of a split: the outputs of rows that see at least one key, and the
    lse of all rows in units of log2; -inf for a row that sees no key."""
    denominator = tl.where(l == 0.0, 1.0, l)
    offsets = row * S.E
    out = acc * (1.0 / denominator)[:, None]
    store_rows(call.work.partial_out, offsets, out, S.E, S.BLOCK_E, valid & (l > 0.0))
    lse_ptr = call.work.partial_lse + row
    tl.store(lse_ptr, tl.where(l == 0.0, NO_SCORE, m + tl.log2(denominator)), mask=valid)


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
        is_block = c * BLOCK_WINDOWS < num_windows
        tl.store(scores + row[:, None] + c[None], x, mask=valid[:, None] & is_block[None])
    else:
        mask = valid[:, None] & (n < num_windows)[None]
        tl.store(scores + row[:, None] + n[None], x, mask=mask)


@triton.jit
def compressed_split(call, scores_ready, split, tile, b, h, step, S: tl.constexpr, P: tl.constexpr):
    """Attention of the compressed branch over one split of the windows.

    A program owns one split for one sequence, KV head and tile of BLOCK_M (token, query head)
    rows. It reads the compressed keys and values of the windows in the split; split 0 also reads
    the memory keys and values. It writes the partial result and, by SCORE_MODE, the scores of the
    windows [B T heads SCORE_COLUMNS]; with BLOCK_WINDOWS the largest score of so many windows of a
    block. With ONE_SOFTMAX it only writes scores. With SIGNAL_EARLY a split has at most one tile of
    windows, and the program arrives at `scores_ready` as soon as the scores are written."""
    length = tl.load(call.cache.lengths + b).to(tl.int32)
    TOKENS: tl.constexpr = P.BLOCK_M // P.PADDED_G
    ATTEND: tl.constexpr = not P.ONE_SOFTMAX
    row = tl.arange(0, P.BLOCK_M)
    t, g = tile * TOKENS + row // P.PADDED_G, row % P.PADDED_G
    valid = (t < step.T) & (g < S.G)
    window_end = (length + t) // S.d
    q_offsets = b * call.cq.b + t.to(tl.int64) * call.cq.n + (h * S.G + g) * call.cq.h
    q_tile = load_rows(call.cq.ptr, q_offsets, S.D, S.BLOCK_D, valid)

    m = tl.full([P.BLOCK_M], NO_SCORE, tl.float32)
    l = tl.full([P.BLOCK_M], 0.0, tl.float32)
    acc = tl.full([P.BLOCK_M, S.BLOCK_E], 0.0, tl.float32)
    if ATTEND and split == 0:
        for n0 in range(0, step.MEMORY, P.BLOCK_N):
            n = n0 + tl.arange(0, P.BLOCK_N)
            k_offsets = h * call.mem_k.h + n.to(tl.int64) * call.mem_k.n
            v_offsets = h * call.mem_v.h + n.to(tl.int64) * call.mem_v.n
            k_tile = load_rows(call.mem_k.ptr, k_offsets, S.D, S.BLOCK_D, n < step.MEMORY)
            v_tile = load_rows(call.mem_v.ptr, v_offsets, S.E, S.BLOCK_E, n < step.MEMORY)
            x = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * call.scale_log2
            if S.CAP:
                x = soft_capped(x, call.cap)
            x = tl.where((n < step.MEMORY)[None], x, NO_SCORE)
            acc, m, l = softmax_step(x, v_tile, acc, m, l, "ieee")

    # windows past it may be unwritten
    count = tl.load(call.cache.counts + b).to(tl.int32) if S.HAS_COUNTS else step.T
    num_windows = tl.minimum((length + count - 1) // S.d, step.W)
    split_size = tl.cdiv(tl.cdiv(num_windows, P.BLOCK_N), step.CMP_SPLITS) * P.BLOCK_N
    end = tl.minimum((split + 1) * split_size, num_windows)
    for n0 in tl.range(split * split_size, end, P.BLOCK_N, num_stages=P.STAGES):
        n = n0 + tl.arange(0, P.BLOCK_N)
        clamped = tl.minimum(n, num_windows - 1)
        k_ptr = call.ck.ptr + h * call.ck.h
        k_offsets = cache_offsets(clamped, b, call.ck.b, call.ck.n, call.cache, S.WINDOWS_PER_PAGE)
        k_tile = load_rows(k_ptr, k_offsets, S.D, S.BLOCK_D, n < num_windows)
        if ATTEND:
            v_ptr = call.cv.ptr + h * call.cv.h
            v_offsets = cache_offsets(
                clamped, b, call.cv.b, call.cv.n, call.cache, S.WINDOWS_PER_PAGE
            )
            v_tile = load_rows(v_ptr, v_offsets, S.E, S.BLOCK_E, n < num_windows)
        logits = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * call.scale_log2
        x = logits
        if S.CAP:
            x = soft_capped(x, call.cap)
        if P.SCORE_MODE == SCORES_SUM:
            head_sum = tl.sum(tl.reshape(logits, [TOKENS, P.PADDED_G, P.BLOCK_N]), 1)
            token = tile * TOKENS + tl.arange(0, TOKENS)
            score_row = ((b * step.T + token) * call.heads.K + h) * step.SCORE_COLUMNS
            store_scores(
                call.work.scores, score_row, head_sum, n0, n, num_windows, token < step.T,
                P.BLOCK_WINDOWS,
            )  # fmt: skip
        elif P.SCORE_MODE == SCORES_PER_HEAD:
            score_row = ((b * step.T + t) * (call.heads.K * S.G) + h * S.G + g) * step.SCORE_COLUMNS
            score = x if S.PROBS else logits
            store_scores(
                call.work.scores, score_row, score, n0, n, num_windows, valid, P.BLOCK_WINDOWS
            )
        if P.SIGNAL_EARLY:
            arrive(scores_ready)
        if ATTEND:
            x = tl.where(n[None] < window_end[:, None], x, NO_SCORE)
            acc, m, l = softmax_step(x, v_tile, acc, m, l, "ieee")
    if P.SIGNAL_EARLY:  # noqa: SIM102
        if split * split_size >= end:  # the split is empty
            arrive(scores_ready)

    if ATTEND:
        out_row = ((split * step.B + b) * step.T + t) * (call.heads.K * S.G) + h * S.G + g
        store_partial(call, out_row, acc, m, l, valid, S)


# the selected branch and the sliding window


@triton.jit
def block_split(call, ready, producers, split, b, r, t, step, S: tl.constexpr, P: tl.constexpr):
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
    GROUP: tl.constexpr = S.G // S.RANKS_PER_KV
    h = r // S.RANKS_PER_KV
    is_window = split < step.WINDOW_SPLITS
    split_blocks = tl.where(is_window, step.WINDOW_SPLIT_BLOCKS, step.SELECTED_SPLIT_BLOCKS)
    first_index = tl.where(is_window, split, split - step.WINDOW_SPLITS) * split_blocks
    # tokens past `counts` have no keys: use the position of the last real token
    last = tl.minimum(t, tl.load(call.cache.counts + b) - 1) if S.HAS_COUNTS else t
    last = (last + tl.load(call.cache.lengths + b)).to(tl.int32)
    own_block, window_start = last // S.s, tl.maximum(last - S.w, 0)
    first_window_block, window_block_end = window_start // S.s + first_index, own_block + 1
    first_token = tl.where(is_window, window_start, 0)
    if P.FUSE_LOCAL:
        is_local = split == step.WINDOW_SPLITS - 1
        first_local_block = tl.maximum(own_block - S.LOCAL + 1, 0)
        first_window_block = tl.where(is_local, first_local_block, first_window_block)
        window_block_end = tl.where(is_local, own_block + 1, own_block - S.LOCAL + 1)
    row = tl.arange(0, P.BLOCK_G)
    head, valid = r * GROUP + row, row < GROUP
    q_offsets = b * call.q.b + t.to(tl.int64) * call.q.n + head * call.q.h
    q_tile = load_rows(call.q.ptr, q_offsets, S.D, S.BLOCK_D, valid)
    k, v = call.k, call.v
    if P.SEPARATE_WINDOW:  # noqa: SIM102
        if is_window:
            k, v = call.window_k, call.window_v
    i = tl.arange(0, P.PADDED_SPLIT_BLOCKS)
    # index among the selected blocks: TOPN ranked ones, INITIAL, LOCAL
    index = first_index + i
    forced = index - S.TOPN
    is_initial = (forced >= 0) & (forced < S.INITIAL) & (forced <= own_block - S.LOCAL)
    window_block = first_window_block + i
    BLOCKS_PER_TILE: tl.constexpr = P.BLOCK_KEYS // S.BLOCK_S
    tile_block = tl.arange(0, P.BLOCK_KEYS) // S.BLOCK_S
    key_slot = tl.arange(0, P.BLOCK_KEYS) % S.BLOCK_S
    out_row = (((step.CMP_PARTIALS + split) * step.B + b) * step.T + t) * (
        call.heads.RANKS * GROUP
    ) + head
    if P.PRELOADED_PAGES > 0:  # the whole page table row: no lookup after the wait
        page_slot = tl.arange(0, P.PRELOADED_PAGES)
        page_ptr = call.cache.page_table + b * call.cache.t_b + page_slot
        preloaded = tl.load(page_ptr, mask=page_slot < step.PAGES, other=0)
    start = 1
    if S.TOPN > 0:  # noqa: SIM102
        if not is_window:
            start = first_phase(ready, producers, P.WARMUP)
    # Triton before 3.6 loses the range of a bound that is set in a branch: repeat it by `minimum`
    for phase in range(tl.minimum(start, 1), 2):
        block = i * 0 - 1
        if S.TOPN > 0:  # noqa: SIM102
            if not is_window:
                if phase == 1:
                    wait(ready, producers)
                index_row = (b * step.T + t) * call.heads.RANKS + r
                index_ptr = call.work.block_indices + index_row * S.TOPN + index
                is_ranked = (i < split_blocks) & (index < S.TOPN) & (phase == 1)
                block = tl.load(index_ptr, mask=is_ranked, other=-1)
        block = tl.where(is_initial, forced, block)
        is_last = (forced >= S.INITIAL) & (index < P.SELECTED_BLOCKS)
        block = tl.where(is_last, own_block - (forced - S.INITIAL), block)
        is_window_block = window_block < window_block_end
        block = tl.where(is_window, tl.where(is_window_block, window_block, -1), block)
        split_block = tl.where((i < split_blocks) & (phase == 1), block, -1)
        # a block lies in one page
        clamped_block = tl.maximum(tl.minimum(split_block, own_block), 0)
        if P.PRELOADED_PAGES > 0:
            page_index = (clamped_block * S.s // S.PAGE_SIZE).to(tl.int32)
            block_pages = tl.gather(preloaded, page_index, 0).to(tl.int64)
        else:
            block_pages = load_page(clamped_block * S.s, b, call.cache, S.PAGE_SIZE)

        m = tl.full([P.BLOCK_G], NO_SCORE, tl.float32)
        l_sum = tl.full([P.BLOCK_G], 0.0, tl.float32)
        acc = tl.full([P.BLOCK_G, S.BLOCK_E], 0.0, tl.float32)
        num_blocks = tl.where(phase == 1, split_blocks, BLOCKS_PER_TILE)
        for i0 in tl.range(0, num_blocks, BLOCKS_PER_TILE, num_stages=P.BLOCK_STAGES):
            is_block = i[None] == (i0 + tile_block)[:, None]
            token = tl.max(tl.where(is_block, split_block[None], -1), 1) * S.s + key_slot
            visible = (
                (key_slot < S.s) & (token >= first_token) & (token <= last)
            )  # never of block -1
            clamped, page = tl.minimum(tl.maximum(token, 0), tl.maximum(last, 0)), b
            if S.PAGE_SIZE > 0:
                page = tl.max(tl.where(is_block, block_pages[None], 0), 1)
            k_offsets = slot_offsets(clamped, page, k.b, k.n, S.PAGE_SIZE)
            v_offsets = slot_offsets(clamped, page, v.b, v.n, S.PAGE_SIZE)
            k_tile = load_rows(k.ptr + h * k.h, k_offsets, S.D, S.BLOCK_D, visible)
            v_tile = load_rows(v.ptr + h * v.h, v_offsets, S.E, S.BLOCK_E, visible)
            x = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * call.scale_log2
            if S.CAP:
                x = soft_capped(x, call.cap)
            x = tl.where(visible[None], x, NO_SCORE)
            acc, m, l_sum = softmax_step(x, v_tile, acc, m, l_sum, "ieee")
        out_mask = valid & (phase == 1)
        store_partial(call, out_row, acc, m, l_sum, out_mask, S)


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


@triton.jit
def load_gates(call, b, t, head, valid, ONE_SOFTMAX: tl.constexpr):
    """Gates [M, 1] of the three branches; of one softmax 1 for the selected branch alone."""
    if ONE_SOFTMAX:
        g_sel = tl.full([head.shape[0], 1], 1.0, tl.float32)
        g_cmp = g_sel * 0.0
        g_win = g_cmp
    else:
        gate = call.gates.ptr + b * call.gates.b + t * call.gates.t + head * call.gates.h
        g_cmp = tl.load(gate, mask=valid, other=0.0).to(tl.float32)
        g_sel = tl.load(gate + call.gates.branch, mask=valid, other=0.0).to(tl.float32)
        g_win = tl.load(gate + 2 * call.gates.branch, mask=valid, other=0.0).to(tl.float32)
    return g_cmp, g_sel, g_win


@triton.jit
def reduce_partials(
    call, partial_row, mask, is_cmp, is_sel, is_win, branch_gates, row, b, t, head, H, e, valid,
    reduce_started, phase, S: tl.constexpr,
):  # fmt: skip
    """Reduce partial results to the output, `g_cmp cmp + g_sel sel + g_win win`.

    Reads N partial results of M rows, `partial_row` [M, N], where `mask` [M, N], with the branches
    that they belong to, [N]. Writes features e of rows `row` [M, 1] of `out`, zeros for tokens past
    `counts`; nothing in phase 0. Returns how many programs had passed their waits before."""
    g_cmp, g_sel, g_win = branch_gates
    started_before = 0
    # a partial result with an lse of -inf is uninitialized: its weight is 0
    lse = tl.load(call.work.partial_lse + partial_row, mask=mask, other=NO_SCORE)
    values = tl.load(
        call.work.partial_out + partial_row[:, :, None] * S.E + e[None, None],
        mask=mask[:, :, None] & (e < S.E)[None, None], other=0.0,
    )  # fmt: skip
    if phase == 1:
        started_before = tl.atomic_add(reduce_started, 1, sem="relaxed")
    weight = partial_weights(
        lse, is_cmp[None], is_sel[None], is_win[None], g_cmp, g_sel, g_win, call.sinks, head, H,
        S.SINKS,
    )[:, :, None]  # fmt: skip
    acc = tl.sum(tl.where(weight != 0.0, values * weight, 0.0), 1)
    if S.HAS_COUNTS:
        acc = tl.where(t < tl.load(call.cache.counts + b), acc, 0.0)
    out_mask = valid & (e < S.E)[None] & (phase == 1)
    out_ptr = call.out + row * S.E + e[None]
    tl.store(out_ptr, acc.to(call.out.dtype.element_ty), mask=out_mask)
    return started_before
