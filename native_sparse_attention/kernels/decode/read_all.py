"""Decode kernel for a short cache: it reads every KV block before it knows which are selected.

One launch runs two stages: `write_partials`, attention of a token over one tile of keys each and
the scores of the windows; then `reduce_and_combine`, the ranking of the blocks and the reduction of
the partial results of each branch, weighted by the gates. The addresses that the first stage reads
depend on no other program. The window covers only some keys of the boundary block, which has a
second partial result for these keys.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from ...config import AttentionConfig
from ..common import launch
from ..common.launch import cdiv, next_power_of_2
from ..common.primitives import candidates_end, load_rows, soft_capped
from ..topk.topn import NO_KEY, NO_SCORE
from . import step

# counters of a sequence and KV head: programs that have written window scores, programs that have
# written partial results, and reduce programs that have passed their waits
SCORES_DONE, PARTIALS_DONE, REDUCE_STARTED = (tl.constexpr(i) for i in range(3))
# numbers of a step: tensor sizes, splits of the windows and of the memory, KV blocks of a sequence
NUMBERS = "B W N MEMORY CMP_SPLITS MEM_SPLITS NUM_BLOCKS"
Call = step.tuple_type("Call", step.TENSORS + NUMBERS)


@triton.jit
def write_partials(call, scores_ready, program, t, b, h, F: tl.constexpr):
    """Attention of token t and the G query heads of a KV head over one split of the keys: BLOCK_S
    windows, BLOCK_S memory keys, the boundary block of the window, or BLOCKS_PER_PROGRAM KV blocks,
    a partial result each. If blocks are ranked, the program writes the window scores [B T K W],
    summed over the heads, and arrives at `scores_ready`."""
    position = step.token_position(call, b, t)
    has_scores, block = program < call.CMP_SPLITS, program - call.CMP_SPLITS - call.MEM_SPLITS - 1
    is_cmp, is_boundary = block < -1, block == -1
    is_memory = is_cmp & (program >= call.CMP_SPLITS)
    i_key, head = tl.arange(0, F.BLOCK_S), tl.arange(0, F.BLOCK_G)
    valid = head < F.G
    q_stride = tl.where(is_cmp, call.cq.h, call.q.h)
    q_ptr = tl.where(is_cmp, call.cq.ptr, call.q.ptr)
    q_ptr += t * tl.where(is_cmp, call.cq.n, call.q.n) + h * F.G * q_stride
    q_ptr += b * tl.where(is_cmp, call.cq.b, call.q.b)
    k_ptr = tl.where(is_memory, call.mem_k.ptr, tl.where(is_cmp, call.ck.ptr, call.k.ptr))
    v_ptr = tl.where(is_memory, call.mem_v.ptr, tl.where(is_cmp, call.cv.ptr, call.v.ptr))
    k_ptr += h * tl.where(is_memory, call.mem_k.h, tl.where(is_cmp, call.ck.h, call.k.h))
    v_ptr += h * tl.where(is_memory, call.mem_v.h, tl.where(is_cmp, call.cv.h, call.v.h))
    k_stride_seq = tl.where(is_memory, 0, tl.where(is_cmp, call.ck.b, call.k.b))
    v_stride_seq = tl.where(is_memory, 0, tl.where(is_cmp, call.cv.b, call.v.b))
    k_stride = tl.where(is_memory, call.mem_k.n, tl.where(is_cmp, call.ck.n, call.k.n))
    v_stride = tl.where(is_memory, call.mem_v.n, tl.where(is_cmp, call.cv.n, call.v.n))
    if F.PAGE_SIZE == 0:
        k_ptr, v_ptr = k_ptr + b * k_stride_seq, v_ptr + b * v_stride_seq
    first_key = tl.where(is_memory, program - call.CMP_SPLITS, program) * F.BLOCK_S
    first_key = tl.where(is_cmp, first_key, block * (F.BLOCKS_PER_PROGRAM * F.s))
    if is_boundary:
        first_key = tl.maximum(position - F.w, 0) // F.s * F.s
    num_blocks = 1
    if F.BLOCKS_PER_PROGRAM > 1:
        is_block = block >= 0
        left = call.NUM_BLOCKS - block * F.BLOCKS_PER_PROGRAM
        num_blocks = tl.where(is_block, tl.minimum(F.BLOCKS_PER_PROGRAM, left), 1)
    partial = program + tl.maximum(block, 0) * (F.BLOCKS_PER_PROGRAM - 1)
    if F.PAGE_SIZE > 0:
        page_size = tl.where(is_cmp, F.WINDOWS_PER_PAGE, F.PAGE_SIZE)
        page_row = call.cache.page_table + b * call.cache.t_b
        is_stored = first_key + i_key < tl.where(is_memory, 0, tl.where(is_cmp, call.W, call.N))
        page = tl.load(page_row + (first_key + i_key) // page_size, mask=is_stored, other=0)
    end = tl.where(is_cmp, position // F.d, position + 1)
    visible_end = tl.where(is_memory, call.MEMORY, end)
    for i in range(num_blocks):
        n = first_key + i * F.s + i_key
        exists = n < tl.where(is_memory, call.MEMORY, tl.where(is_cmp, call.W, call.N))
        if F.s < F.BLOCK_S:
            exists &= i_key < tl.where(is_cmp, F.BLOCK_S, F.s)
        k_offsets, v_offsets = n * k_stride, n * v_stride
        if F.PAGE_SIZE > 0:
            slot = tl.where(is_memory, n, n % page_size)
            # page table entries past the end of the sequence may not be pages
            page_id = tl.where(n < end, page, 0).to(tl.int64)
            k_offsets = page_id * k_stride_seq + slot * k_stride
            v_offsets = page_id * v_stride_seq + slot * v_stride
            exists &= n < visible_end
            if F.BLOCKS_PER_PROGRAM > 1:
                is_next = n + F.s < tl.where(is_cmp, 0, call.N)
                page = tl.load(page_row + (n + F.s) // page_size, mask=is_next, other=0)
        q_tile = load_rows(q_ptr, head * q_stride, F.D, F.BLOCK_D, valid)
        k_tile = load_rows(k_ptr, k_offsets, F.D, F.BLOCK_D, exists)
        v_tile = load_rows(v_ptr, v_offsets, F.E, F.BLOCK_E, exists)
        out_row = (((partial + i) * call.B + b) * F.T + t) * (F.K * F.G) + h * F.G + head
        visible = exists & (n < visible_end)
        # a tensor, because some versions of the interpreter cannot broadcast a scalar mask
        boundary = i_key * 0 + tl.where(is_boundary, 1, 0)
        visible &= (n >= position - F.w) | (boundary == 0)
        x = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * call.scale_log2
        if F.TOPN > 0:  # noqa: SIM102
            if has_scores:
                score_ptr = call.work.scores + ((b * F.T + t) * F.K + h) * call.W + n
                tl.store(score_ptr, tl.sum(x, 0), mask=exists)
                step.arrive(scores_ready)
        if F.CAP:
            x = soft_capped(x, call.cap)
        x = tl.where(visible[None], x, NO_SCORE)
        m = tl.max(x, 1)
        p = tl.exp2(x - tl.where(m == NO_SCORE, 0.0, m)[:, None])
        # unwritten values may be non-finite, which a probability of 0 does not mask
        v_tile = tl.where(visible[:, None], v_tile, 0.0)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
        step.store_partial(call, out_row, acc, m, tl.sum(p, 1), valid, F)


@triton.jit
def select_partials(scores, scratch, position, FIRST_BLOCK, F: tl.constexpr):
    """The partial results of KV blocks that the token at `position` reads, as codes [PARTIALS]:
    code FIRST_BLOCK + i is 4 c + 2 (block c is selected) + 1 (block c overlaps the window), or 0 if
    unused. First the ranked blocks, then the initial ones, then those up to the token's own. The
    codes are scattered through `scratch`, PARTIALS zeros of this program."""
    c, own_block = tl.arange(0, F.BLOCKS), position // F.s
    UNRANKED: tl.constexpr = F.BLOCKS if F.BLOCKS > F.TOPN else F.TOPN
    rank = tl.full([F.BLOCKS], UNRANKED, tl.int32)
    if F.TOPN > 0:
        candidate_end = candidates_end(position, step.NO_LIMIT, F.RANKED_LOCAL, F.d, F.s, True)
        is_candidate = (c >= F.INITIAL) & (c < candidate_end)
        # loops of one iteration: the compiler computes the result of a `while` once, and not again
        # for each layout in which it is used
        keys, rounds = tl.full([F.BLOCKS], NO_KEY, tl.int64), 1
        while rounds > 0:
            keys = step.block_sort_keys(scores, c, candidate_end, position // F.d, F)
            rounds -= 1
        rounds = 1
        while rounds > 0:
            # the number of better blocks, summed along the first axis: within a thread
            rank, rounds = tl.sum((keys[:, None] > keys[None]).to(tl.int32), 0), rounds - 1
        rank = tl.where(is_candidate, rank, UNRANKED)
    selected = ((c < F.INITIAL) | (c > own_block - F.LOCAL) | (rank < F.TOPN)) & (c <= own_block)
    overlaps = (c > tl.maximum(position - F.w, 0) // F.s) & (c <= own_block)
    slot = F.TOPN + tl.where(c < F.INITIAL, c, F.INITIAL + own_block - c)
    slot = FIRST_BLOCK + tl.where(rank < F.TOPN, rank, slot)
    code = c * 4 + selected.to(tl.int32) * 2 + overlaps.to(tl.int32)
    tl.store(scratch + slot, code, mask=selected | overlaps)
    tl.debug_barrier()
    return tl.load(scratch + tl.arange(0, F.PARTIALS))


@triton.jit
def reduce_and_combine(
    call, scores_ready, score_programs, partials_ready, partial_programs, reduce_started,
    reduce_tile, b, t, h, FIRST_BLOCK, F: tl.constexpr,
):  # fmt: skip
    """Rank the blocks, and reduce the partial results of REDUCE_ROWS query heads of one KV head and
    token t, REDUCE_COLUMNS features: `out = g_cmp cmp + g_sel sel + g_win win`. The first
    FIRST_BLOCK partial results are those of the windows, of the memory and of the boundary block.
    Returns how many programs had passed their waits before."""
    i_head = reduce_tile // F.COLUMN_TILES * F.REDUCE_ROWS + tl.arange(0, F.REDUCE_ROWS)[:, None]
    e = reduce_tile % F.COLUMN_TILES * F.REDUCE_COLUMNS + tl.arange(0, F.REDUCE_COLUMNS)
    valid, head = i_head < F.G, h * F.G + tl.minimum(i_head, F.G - 1)
    position = step.token_position(call, b, t)
    row = (b * F.T + t) * (F.K * F.G) + head
    branch_gates = step.load_gates(call, b, t, head, valid, False)
    token_scores = call.work.scores + ((b * F.T + t) * F.K + h) * call.W
    slot = tl.arange(0, F.PARTIALS)
    scratch = call.work.block_indices + tl.program_id(0).to(tl.int64) * F.PARTIALS
    tl.store(scratch + slot, 0)
    tl.debug_barrier()
    is_cmp, is_boundary = slot < FIRST_BLOCK - 1, slot == FIRST_BLOCK - 1
    started_before = 0
    # phase 0 is a warm-up, see `persistent.first_phase`; B < 0 is never true, which the compiler
    # does not know
    for phase in range((call.B < 0).to(tl.int32), 2):
        code = slot * 0
        if phase == 1:
            if F.TOPN > 0:
                step.wait(scores_ready, score_programs)
            code = select_partials(token_scores, scratch, position, FIRST_BLOCK, F)
        is_sel, is_win = code & 2 > 0, (code & 1 > 0) | is_boundary
        partial = tl.where(slot < FIRST_BLOCK, slot, FIRST_BLOCK + (code >> 2))
        mask = valid & (is_cmp | is_sel | is_win)[None] & (phase == 1)
        partial_row = (partial * (call.B * F.T * F.K * F.G))[None] + row
        if phase == 1:
            step.wait(partials_ready, partial_programs)
        started_before = step.reduce_partials(
            call, partial_row, mask, (is_cmp, is_sel, is_win), branch_gates, row, b, t, head,
            F.K * F.G, e, valid, reduce_started, phase, F,
        )  # fmt: skip
    return started_before


@triton.jit(do_not_specialize=NUMBERS.split())
def nsa_decode_read_all(
    cq, q, k, v, window_k, window_v, ck, cv, mem_k, mem_v, gates, sinks, cache, work, out, heads,
    scale_log2, cap, B, W, N, MEMORY, CMP_SPLITS, MEM_SPLITS, NUM_BLOCKS, F: tl.constexpr,
):  # fmt: skip
    """One decode step over a short KV cache: T new tokens of B sequences. A program owns one token
    and KV head, and one split of its keys or a tile of its output. The last reduce program resets
    the counters to zero."""
    call = Call(
        cq, q, k, v, window_k, window_v, ck, cv, mem_k, mem_v, gates, sinks, cache, work, out,
        heads, scale_log2, cap, B, W, N, MEMORY, CMP_SPLITS, MEM_SPLITS, NUM_BLOCKS,
    )  # fmt: skip
    # windows come first, because the ranking waits for their scores
    index, tokens, FIRST_BLOCK = tl.program_id(0), B * F.T * F.K, CMP_SPLITS + MEM_SPLITS + 1
    program, token = index // tokens, index % tokens
    b, h = (token // F.K // F.T).to(tl.int64), (token % F.K).to(tl.int64)
    t = (token // F.K % F.T).to(tl.int64)
    barriers = call.work.counters + (b * F.K + h) * step.COUNTERS
    partial_programs = FIRST_BLOCK + tl.cdiv(NUM_BLOCKS, F.BLOCKS_PER_PROGRAM)
    if program < partial_programs:
        write_partials(call, barriers + SCORES_DONE, program, t, b, h, F)
        step.arrive(barriers + PARTIALS_DONE)
    else:
        started_before = reduce_and_combine(
            call, barriers + SCORES_DONE, F.T * CMP_SPLITS, barriers + PARTIALS_DONE,
            F.T * partial_programs, barriers + REDUCE_STARTED, program - partial_programs, b, t, h,
            FIRST_BLOCK, F,
        )  # fmt: skip
        if started_before == F.T * F.REDUCE_TILES - 1:  # no program waits any more
            tl.store(barriers + tl.arange(0, step.COUNTERS), 0)


# limits of this kernel: blocks of all tokens and KV heads, in a contiguous and in a paged cache;
# blocks of one token and KV head; bytes of the keys of a block; partial results that a token reads
MAX_TOTAL_BLOCKS, MAX_TOTAL_BLOCKS_PAGED = 512, 256
MAX_BLOCKS, MAX_BLOCK_BYTES, MAX_PARTIALS = 128, 16384, 64
# programs that read blocks; rows and features of a reduce program
BLOCK_PROGRAMS, REDUCE_ROWS, REDUCE_COLUMNS = 256, 4, 32
# registers of a thread, so that three programs fit on a multiprocessor
MAX_REGISTERS = 168


@functools.lru_cache(maxsize=256)
def plan(shape: step.Shape, config: AttentionConfig) -> step.Plan | None:
    """The launch of a step; None where this kernel cannot run it, or the cache is too long."""
    B, T, K, E, s = shape.B, shape.T, shape.K, shape.E, config.selection_block_size
    settings = step.settings_of(shape, config)
    n, block_s, heads = settings["TOPN"], settings["BLOCK_S"], shape.H // K
    is_summed = n == 0 or (config.query_heads_share_selected_kv and not settings["PROBS"])
    is_max = config.ranks_by_heads or (config.ranks_by_largest and s > config.d)
    is_other = (
        shape.one_softmax
        or shape.has_window
        or shape.index_shape is not None
        or shape.returns_indices
    )
    if is_other or is_max or config.selection_stride > 1:
        return None
    blocks = cdiv(shape.tokens, s)
    cmp, memory = cdiv(shape.windows, block_s), cdiv(shape.memory, block_s)
    # one partial result per selected block and per block that the window overlaps
    local = max(config.num_local_blocks, cdiv(config.sliding_window_size, s))
    partials = next_power_of_2(cmp + memory + 1 + n + config.num_initial_blocks + local)
    block_bytes = block_s * launch.padded(max(shape.D, E)) * shape.dtype.itemsize
    total = B * T * K * blocks
    fits = total <= (MAX_TOTAL_BLOCKS_PAGED if shape.page_size else MAX_TOTAL_BLOCKS)
    fits &= blocks <= MAX_BLOCKS and partials <= MAX_PARTIALS and block_bytes <= MAX_BLOCK_BYTES
    if not is_summed or not fits or shape.is_wide:
        return None
    per_program, columns = cdiv(total, BLOCK_PROGRAMS), min(settings["BLOCK_E"], REDUCE_COLUMNS)
    column_tiles = cdiv(E, columns)
    reduce_tiles = cdiv(heads, REDUCE_ROWS) * column_tiles
    programs = B * T * K * (cmp + memory + 1 + cdiv(blocks, per_program) + reduce_tiles)
    numbers = B, shape.windows, shape.tokens, shape.memory, cmp, memory, blocks
    constants = step.constants(
        **settings, T=T, K=K, BLOCK_G=launch.padded(heads), REDUCE_ROWS=REDUCE_ROWS,
        REDUCE_COLUMNS=columns, BLOCKS=max(32, next_power_of_2(blocks)), PARTIALS=partials,
        BLOCKS_PER_PROGRAM=per_program, COLUMN_TILES=column_tiles, REDUCE_TILES=reduce_tiles,
    )  # fmt: skip
    return step.Plan(
        nsa_decode_read_all, programs, cmp + memory + 1 + blocks, (K, shape.windows), None,
        (programs, partials), dict(zip(NUMBERS.split(), numbers, strict=True))
        | dict(F=constants, num_warps=4, maxnreg=MAX_REGISTERS),
    )  # fmt: skip
