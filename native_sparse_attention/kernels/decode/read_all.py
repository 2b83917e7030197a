"""Decode kernel for a short cache: it reads every KV block before it knows which are selected.

One launch runs two stages. Each program runs one of them:

    write_partials        attention of a token over one tile of windows, of the memory, or of one or
                          more KV blocks, and the scores of the windows
    reduce_and_combine    the ranking of the blocks, then the reduction of the partial results of
                          each branch, weighted by the gates

The addresses that the first stage reads depend on no other program. The window covers only some
keys of the boundary block, which has a second partial result for these keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common.launch import cdiv, next_power_of_2
from ..common.primitives import candidates_end, load_rows, soft_capped
from ..topk.topn import NO_KEY, NO_SCORE
from .call import Call, Settings
from .grid_barrier import arrive, wait
from .split_kv import partial_weights, store_partial
from .topn import NEVER, block_sort_keys

# counters of a sequence and KV head: programs that have written window scores, programs that have
# written partial results, and reduce programs that have passed their waits
SCORES_DONE, PARTIALS_DONE, REDUCE_STARTED = (tl.constexpr(i) for i in range(3))


@triton.jit
def token_position(lengths, counts, b, t, HAS_COUNTS: tl.constexpr):
    """The position of new token t; of the last real token if t is past `counts`."""
    token = tl.minimum(t, tl.load(counts + b) - 1) if HAS_COUNTS else t
    return (tl.load(lengths + b) + token).to(tl.int32)


@triton.jit
def write_partials(
    cq, q, k, v, ck, cv, mem_k, mem_v, lengths, counts, page_table, scores, partial_out,
    partial_lse, scores_ready, program, t, b, h, B, T, K, W, N, MEMORY, CMP_SPLITS, MEM_SPLITS,
    NUM_BLOCKS, scale_log2, cap, p_b, p_t, p_h, q_b, q_t, q_h, k_b, k_n, k_h, v_b, v_n, v_h, c_b,
    c_n, c_h, o_b, o_n, o_h, m_h, m_m, u_h, u_m, t_b, G: tl.constexpr, BLOCK_G: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, d: tl.constexpr, s: tl.constexpr,
    w: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOWS_PER_PAGE: tl.constexpr,
    STORE_SCORES: tl.constexpr, CAP: tl.constexpr, HAS_COUNTS: tl.constexpr,
):  # fmt: skip
    """Attention of one token over one split of the keys, as partial results.

    A program owns the G query heads of one KV head and token t, and one split of the keys: BLOCK_N
    windows, BLOCK_N memory keys, the boundary block of the window, or BLOCKS_PER_PROGRAM KV blocks.
    It reads these keys and values and writes one partial result, or one per block. With
    STORE_SCORES it writes the window scores [B T K W], summed over the heads, and arrives at
    `scores_ready`. It computes its addresses without the sequence length, except for pages and for
    the boundary block."""
    position = token_position(lengths, counts, b, t, HAS_COUNTS)
    has_scores, block = program < CMP_SPLITS, program - CMP_SPLITS - MEM_SPLITS - 1
    is_cmp, is_boundary = block < -1, block == -1
    is_memory = is_cmp & (program >= CMP_SPLITS)
    i_key, head = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_G)
    valid = head < G
    q_stride = tl.where(is_cmp, p_h, q_h)
    q_ptr = tl.where(is_cmp, cq, q) + t * tl.where(is_cmp, p_t, q_t) + h * G * q_stride
    q_ptr += b * tl.where(is_cmp, p_b, q_b)
    k_ptr = tl.where(is_memory, mem_k, tl.where(is_cmp, ck, k))
    v_ptr = tl.where(is_memory, mem_v, tl.where(is_cmp, cv, v))
    k_ptr += h * tl.where(is_memory, m_h, tl.where(is_cmp, c_h, k_h))
    v_ptr += h * tl.where(is_memory, u_h, tl.where(is_cmp, o_h, v_h))
    k_stride_seq = tl.where(is_memory, 0, tl.where(is_cmp, c_b, k_b))
    v_stride_seq = tl.where(is_memory, 0, tl.where(is_cmp, o_b, v_b))
    k_stride = tl.where(is_memory, m_m, tl.where(is_cmp, c_n, k_n))
    v_stride = tl.where(is_memory, u_m, tl.where(is_cmp, o_n, v_n))
    if PAGE_SIZE == 0:
        k_ptr, v_ptr = k_ptr + b * k_stride_seq, v_ptr + b * v_stride_seq
    first_key = tl.where(is_memory, program - CMP_SPLITS, program) * BLOCK_N
    first_key = tl.where(is_cmp, first_key, block * (BLOCKS_PER_PROGRAM * s))
    if is_boundary:
        first_key = tl.maximum(position - w, 0) // s * s
    num_blocks = 1
    if BLOCKS_PER_PROGRAM > 1:
        is_block = block >= 0
        left = NUM_BLOCKS - block * BLOCKS_PER_PROGRAM
        num_blocks = tl.where(is_block, tl.minimum(BLOCKS_PER_PROGRAM, left), 1)
    partial = program + tl.maximum(block, 0) * (BLOCKS_PER_PROGRAM - 1)
    if PAGE_SIZE > 0:
        page_size, page_row = tl.where(is_cmp, WINDOWS_PER_PAGE, PAGE_SIZE), page_table + b * t_b
        in_storage = first_key + i_key < tl.where(is_memory, 0, tl.where(is_cmp, W, N))
        page = tl.load(page_row + (first_key + i_key) // page_size, mask=in_storage, other=0)
    for i in range(num_blocks):
        n = first_key + i * s + i_key
        in_range = n < tl.where(is_memory, MEMORY, tl.where(is_cmp, W, N))
        if s < BLOCK_N:
            in_range &= i_key < tl.where(is_cmp, BLOCK_N, s)
        k_offsets, v_offsets = n * k_stride, n * v_stride
        if PAGE_SIZE > 0:
            slot = tl.where(is_memory, n, n % page_size)
            # page table entries past the end of the sequence may not be pages
            end = tl.where(is_cmp, position // d, position + 1)
            page_id = tl.where(n < end, page, 0).to(tl.int64)
            k_offsets = page_id * k_stride_seq + slot * k_stride
            v_offsets = page_id * v_stride_seq + slot * v_stride
            end = tl.where(is_memory, MEMORY, tl.where(is_cmp, position // d, position + 1))
            in_range &= n < end
            if BLOCKS_PER_PROGRAM > 1:
                in_next = n + s < tl.where(is_cmp, 0, N)
                page = tl.load(page_row + (n + s) // page_size, mask=in_next, other=0)
        q_tile = load_rows(q_ptr, head * q_stride, D, BLOCK_D, valid)
        k_tile = load_rows(k_ptr, k_offsets, D, BLOCK_D, in_range)
        v_tile = load_rows(v_ptr, v_offsets, E, BLOCK_E, in_range)
        out_row = (((partial + i) * B + b) * T + t) * (K * G) + h * G + head
        visible_end = tl.where(is_memory, MEMORY, tl.where(is_cmp, position // d, position + 1))
        visible = in_range & (n < visible_end)
        # a tensor, because some versions of the interpreter cannot broadcast a scalar mask
        boundary = i_key * 0 + tl.where(is_boundary, 1, 0)
        visible &= (n >= position - w) | (boundary == 0)
        x = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
        if STORE_SCORES:  # noqa: SIM102
            if has_scores:
                tl.store(scores + ((b * T + t) * K + h) * W + n, tl.sum(x, 0), mask=in_range)
                arrive(scores_ready)
        if CAP:
            x = soft_capped(x, cap)
        x = tl.where(visible[None], x, NO_SCORE)
        m = tl.max(x, 1)
        p = tl.exp2(x - tl.where(m == NO_SCORE, 0.0, m)[:, None])
        # unwritten values may be non-finite, which a probability of 0 does not mask
        v_tile = tl.where(visible[:, None], v_tile, 0.0)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
        store_partial(partial_out, partial_lse, out_row, acc, m, tl.sum(p, 1), E, BLOCK_E, valid)


@triton.jit
def select_partials(
    scores, scratch, position, FIRST_BLOCK, TOPN: tl.constexpr, BLOCKS: tl.constexpr,
    PARTIALS: tl.constexpr, l: tl.constexpr, d: tl.constexpr, s: tl.constexpr,
    BLOCK_S: tl.constexpr, w: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr,
    INTERPOLATED: tl.constexpr,
):  # fmt: skip
    """Select the partial results of KV blocks that the token at `position` reads.

    Returns codes [PARTIALS]: code FIRST_BLOCK + i is 4 c + 2 (block c is selected) + 1 (block c
    overlaps the window), or 0 if unused. Codes are ordered: the TOPN ranked blocks, then the
    initial ones, then the blocks up to the token's own. The codes are scattered through `scratch`,
    PARTIALS zeros of this program."""
    c, own_block = tl.arange(0, BLOCKS), position // s
    UNRANKED: tl.constexpr = max(BLOCKS, TOPN)
    rank = tl.full([BLOCKS], UNRANKED, tl.int32)
    if TOPN > 0:
        candidate_end = candidates_end(position, NEVER, LOCAL if LOCAL > 0 else 1, d, s, True)
        is_candidate = (c >= INITIAL) & (c < candidate_end)
        # loops of one iteration: the compiler computes the result of a `while` once, and not again
        # for each layout in which it is used
        keys, again = tl.full([BLOCKS], NO_KEY, tl.int64), 1
        while again > 0:
            keys = block_sort_keys(
                scores, c, candidate_end, position // d, l, d, s, BLOCK_S, INITIAL, False,
                INTERPOLATED,
            )  # fmt: skip
            again -= 1
        again = 1
        while again > 0:
            # the number of better blocks, summed along the first axis: within a thread
            rank, again = tl.sum((keys[:, None] > keys[None]).to(tl.int32), 0), again - 1
        rank = tl.where(is_candidate, rank, UNRANKED)
    selected = ((c < INITIAL) | (c > own_block - LOCAL) | (rank < TOPN)) & (c <= own_block)
    in_window = (c > tl.maximum(position - w, 0) // s) & (c <= own_block)
    slot = TOPN + tl.where(c < INITIAL, c, INITIAL + own_block - c)
    slot = FIRST_BLOCK + tl.where(rank < TOPN, rank, slot)
    code = c * 4 + selected.to(tl.int32) * 2 + in_window.to(tl.int32)
    tl.store(scratch + slot, code, mask=selected | in_window)
    tl.debug_barrier()
    return tl.load(scratch + tl.arange(0, PARTIALS))


@triton.jit
def reduce_and_combine(
    partial_out, partial_lse, scores, block_indices, sinks, gates, lengths, counts, out,
    scores_ready, score_programs, partials_ready, partial_programs, reduce_started, reduce_tile, b,
    t, h, B, T, K, W, FIRST_BLOCK, g_b, g_t, g_h, g_3, G: tl.constexpr, E: tl.constexpr,
    REDUCE_COLUMNS: tl.constexpr, REDUCE_ROWS: tl.constexpr, TOPN: tl.constexpr,
    BLOCKS: tl.constexpr, PARTIALS: tl.constexpr, l: tl.constexpr, d: tl.constexpr, s: tl.constexpr,
    BLOCK_S: tl.constexpr, w: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr,
    INTERPOLATED: tl.constexpr, SINKS: tl.constexpr, HAS_COUNTS: tl.constexpr,
):  # fmt: skip
    """Reduce the partial results: `out = g_cmp cmp + g_sel sel + g_win win`.

    A program owns REDUCE_ROWS query heads of one KV head and token t, and REDUCE_COLUMNS features.
    It waits for the window scores and ranks the blocks, then waits for the partial results, reads
    those that the token selects, and writes `out`; zeros for a token past `counts`. The first
    FIRST_BLOCK partial results are those of the windows, of the memory and of the boundary block.
    Returns how many programs had passed their waits before."""
    COLUMN_TILES: tl.constexpr = (E + REDUCE_COLUMNS - 1) // REDUCE_COLUMNS
    i_head = reduce_tile // COLUMN_TILES * REDUCE_ROWS + tl.arange(0, REDUCE_ROWS)[:, None]
    e = tl.arange(0, REDUCE_COLUMNS)
    e += reduce_tile % COLUMN_TILES * REDUCE_COLUMNS
    valid, head = i_head < G, h * G + tl.minimum(i_head, G - 1)
    position = token_position(lengths, counts, b, t, HAS_COUNTS)
    row = (b * T + t) * (K * G) + head
    gate = gates + b * g_b + t * g_t + head * g_h
    g_cmp = tl.load(gate, mask=valid, other=0.0).to(tl.float32)
    g_sel = tl.load(gate + g_3, mask=valid, other=0.0).to(tl.float32)
    g_win = tl.load(gate + 2 * g_3, mask=valid, other=0.0).to(tl.float32)
    token_scores = scores + ((b * T + t) * K + h) * W
    slot = tl.arange(0, PARTIALS)
    scratch = block_indices + tl.program_id(0).to(tl.int64) * PARTIALS
    tl.store(scratch + slot, 0)
    tl.debug_barrier()
    is_cmp, is_boundary = slot < FIRST_BLOCK - 1, slot == FIRST_BLOCK - 1
    started_before = 0
    # phase 0 is a warm-up, see `grid_barrier.first_phase`; B < 0 is never true, which the compiler
    # does not know
    for phase in range((B < 0).to(tl.int32), 2):
        code = slot * 0
        if phase == 1:
            if TOPN > 0:
                wait(scores_ready, score_programs)
            code = select_partials(
                token_scores, scratch, position, FIRST_BLOCK, TOPN, BLOCKS, PARTIALS, l, d, s,
                BLOCK_S, w, INITIAL, LOCAL, INTERPOLATED,
            )  # fmt: skip
        is_sel, is_win = code & 2 > 0, (code & 1 > 0) | is_boundary
        partial = tl.where(slot < FIRST_BLOCK, slot, FIRST_BLOCK + (code >> 2))
        mask = valid & (is_cmp | is_sel | is_win)[None] & (phase == 1)
        partial_row = (partial * (B * T * K * G))[None] + row
        if phase == 1:
            wait(partials_ready, partial_programs)
        # a partial result with an lse of -inf is uninitialized: its weight is 0
        lse = tl.load(partial_lse + partial_row, mask=mask, other=NO_SCORE)
        values = tl.load(
            partial_out + partial_row[:, :, None] * E + e[None, None],
            mask=mask[:, :, None] & (e < E)[None, None], other=0.0,
        )  # fmt: skip
        if phase == 1:
            started_before = tl.atomic_add(reduce_started, 1, sem="relaxed")
        weight = partial_weights(
            lse, is_cmp[None], is_sel[None], is_win[None], g_cmp, g_sel, g_win, sinks, head, K * G,
            SINKS,
        )[:, :, None]  # fmt: skip
        acc = tl.sum(tl.where(weight != 0.0, values * weight, 0.0), 1)
        if HAS_COUNTS:
            acc = tl.where(t < tl.load(counts + b), acc, 0.0)
        out_mask = valid & (e < E)[None] & (phase == 1)
        tl.store(out + row * E + e[None], acc.to(out.dtype.element_ty), mask=out_mask)
    return started_before


@triton.jit(do_not_specialize=["B", "W", "N", "MEMORY", "CMP_SPLITS", "MEM_SPLITS", "NUM_BLOCKS"])
def nsa_decode_read_all(
    cq, q, k, v, ck, cv, mem_k, mem_v, gates, sinks, lengths, counts, page_table, scores,
    partial_out, partial_lse, block_indices, counters, out, B, W, N, MEMORY, CMP_SPLITS, MEM_SPLITS,
    NUM_BLOCKS, scale_log2, cap, p_b, p_t, p_h, q_b, q_t, q_h, k_b, k_n, k_h, v_b, v_n, v_h, c_b,
    c_n, c_h, o_b, o_n, o_h, m_h, m_m, u_h, u_m, g_b, g_t, g_h, g_3, t_b, T: tl.constexpr,
    K: tl.constexpr, G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    E: tl.constexpr, BLOCK_E: tl.constexpr, REDUCE_COLUMNS: tl.constexpr, REDUCE_ROWS: tl.constexpr,
    TOPN: tl.constexpr, BLOCKS: tl.constexpr, PARTIALS: tl.constexpr,
    BLOCKS_PER_PROGRAM: tl.constexpr, l: tl.constexpr, d: tl.constexpr, s: tl.constexpr,
    BLOCK_S: tl.constexpr, w: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr,
    INTERPOLATED: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOWS_PER_PAGE: tl.constexpr,
    CAP: tl.constexpr, SINKS: tl.constexpr, HAS_COUNTS: tl.constexpr, COUNTERS: tl.constexpr,
):  # fmt: skip
    """One decode step over a short KV cache: T new tokens of B sequences.

    A program owns one token and KV head, and one split of its keys (`write_partials`) or a tile of
    its output (`reduce_and_combine`). The last reduce program resets the counters to zero."""
    # windows come first, because the ranking waits for their scores
    index, tokens, FIRST_BLOCK = tl.program_id(0), B * T * K, CMP_SPLITS + MEM_SPLITS + 1
    program, token = index // tokens, index % tokens
    b, h = (token // K // T).to(tl.int64), (token % K).to(tl.int64)
    t = (token // K % T).to(tl.int64)
    own_counters = counters + (b * K + h) * COUNTERS
    partial_programs = FIRST_BLOCK + tl.cdiv(NUM_BLOCKS, BLOCKS_PER_PROGRAM)
    if program < partial_programs:
        write_partials(
            cq, q, k, v, ck, cv, mem_k, mem_v, lengths, counts, page_table, scores, partial_out,
            partial_lse, own_counters + SCORES_DONE, program, t, b, h, B, T, K, W, N, MEMORY,
            CMP_SPLITS, MEM_SPLITS, NUM_BLOCKS, scale_log2, cap, p_b, p_t, p_h, q_b, q_t, q_h, k_b,
            k_n, k_h, v_b, v_n, v_h, c_b, c_n, c_h, o_b, o_n, o_h, m_h, m_m, u_h, u_m, t_b, G,
            BLOCK_G, D, BLOCK_D, E, BLOCK_E, BLOCK_S, BLOCKS_PER_PROGRAM, d, s, w, PAGE_SIZE,
            WINDOWS_PER_PAGE, TOPN > 0, CAP, HAS_COUNTS,
        )  # fmt: skip
        arrive(own_counters + PARTIALS_DONE)
    else:
        ROW_TILES: tl.constexpr = (G + REDUCE_ROWS - 1) // REDUCE_ROWS
        COLUMN_TILES: tl.constexpr = (E + REDUCE_COLUMNS - 1) // REDUCE_COLUMNS
        started_before = reduce_and_combine(
            partial_out, partial_lse, scores, block_indices, sinks, gates, lengths, counts, out,
            own_counters + SCORES_DONE, T * CMP_SPLITS, own_counters + PARTIALS_DONE,
            T * partial_programs, own_counters + REDUCE_STARTED, program - partial_programs, b, t,
            h, B, T, K, W, FIRST_BLOCK, g_b, g_t, g_h, g_3, G, E, REDUCE_COLUMNS, REDUCE_ROWS, TOPN,
            BLOCKS, PARTIALS, l, d, s, BLOCK_S, w, INITIAL, LOCAL, INTERPOLATED, SINKS, HAS_COUNTS,
        )  # fmt: skip
        if started_before == T * ROW_TILES * COLUMN_TILES - 1:  # no program waits any more
            tl.store(own_counters + tl.arange(0, COUNTERS), 0)


# launch

# limits of this kernel: blocks of all tokens and KV heads, in a contiguous and in a paged cache;
# blocks of one token and KV head; bytes of the keys of a block; partial results that a token reads
MAX_TOTAL_BLOCKS, MAX_TOTAL_BLOCKS_PAGED = 512, 256
MAX_BLOCKS, MAX_BLOCK_BYTES, MAX_PARTIALS = 128, 16384, 64
# programs that read blocks; rows and features of a reduce program
BLOCK_PROGRAMS, REDUCE_ROWS, REDUCE_COLUMNS = 256, 4, 32
# registers of a thread, so that three programs fit on a multiprocessor
MAX_REGISTERS = 168


@dataclass(frozen=True)
class PartialsPlan:
    """Partial results of each token and KV head, by the keys that they cover.

    Windows have `cmp`, the memory `memory`, and KV blocks `blocks` partial results. A program
    computes those of `blocks_per_program` blocks. A reduce program reads at most `partials`."""

    cmp: int
    memory: int
    blocks: int
    blocks_per_program: int
    partials: int

    @property
    def first_block(self) -> int:
        """Index of the first block's partial result; that of the boundary block precedes it."""
        return self.cmp + self.memory + 1

    @property
    def programs(self) -> int:
        """Programs of `write_partials`."""
        return self.first_block + cdiv(self.blocks, self.blocks_per_program)


def plan_partials(call: Call, settings: Settings) -> PartialsPlan | None:
    """The partial results of a call; None if the cache is too long for this kernel."""
    B, T, _, K, D, E = call.sizes
    is_paged = call.metadata.page_table is not None
    block_s, max_total = launch.padded(settings.s), MAX_TOTAL_BLOCKS
    if is_paged:
        max_total = MAX_TOTAL_BLOCKS_PAGED
    blocks = cdiv(call.max_tokens, settings.s)
    cmp, memory = (cdiv(n, block_s) for n in (call.max_windows, call.memory_tokens))
    # one partial result per selected block and per block that the window overlaps
    local = max(settings.num_local, settings.window_blocks - 1)
    partials = next_power_of_2(cmp + memory + 1 + settings.n + settings.num_initial + local)
    block_bytes = block_s * launch.padded(max(D, E)) * call.q.element_size()
    fits = blocks <= MAX_BLOCKS and partials <= MAX_PARTIALS and block_bytes <= MAX_BLOCK_BYTES
    max_offset = max(
        n * t.stride(1)
        for n, pair in ((call.max_tokens, (call.k, call.v)), (call.max_windows, (call.ck, call.cv)))
        for t in pair
    )
    if B * T * K * blocks > max_total or not fits or max_offset >= 1 << 31:
        return None
    return PartialsPlan(cmp, memory, blocks, cdiv(B * T * K * blocks, BLOCK_PROGRAMS), partials)


def decode(call: Call, plan: PartialsPlan, settings: Settings) -> Tensor:
    """Run a decode step, [B T H E]."""
    B, T, H, K, _, E = call.sizes
    columns, out = min(launch.padded(E), REDUCE_COLUMNS), call.allocate_output()
    reduce_programs = cdiv(H // K, REDUCE_ROWS) * cdiv(E, columns)
    programs = B * T * K * (plan.programs + reduce_programs)
    partial_out, partial_lse = call.allocate_partials(plan.first_block + plan.blocks)
    nsa_decode_read_all[(programs,)](
        **call.arguments(settings), N=call.max_tokens,
        scores=partial_out.new_empty(B, T, K, call.max_windows),
        block_indices=call.counters.new_empty(programs, plan.partials), partial_out=partial_out,
        partial_lse=partial_lse, out=out, CMP_SPLITS=plan.cmp, MEM_SPLITS=plan.memory,
        NUM_BLOCKS=plan.blocks, BLOCK_G=launch.padded(H // K), REDUCE_ROWS=REDUCE_ROWS,
        REDUCE_COLUMNS=columns, BLOCKS_PER_PROGRAM=plan.blocks_per_program,
        BLOCKS=max(32, next_power_of_2(plan.blocks)), PARTIALS=plan.partials, num_warps=4,
        num_stages=1, maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    return out
