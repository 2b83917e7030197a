"""Ranking of blocks by `importance="probs"`, as `softmax_mass.py`. In Gluon, for Hopper.

A program owns a tile of rows (tokens x the heads that rank together) and reads its windows, KEYS
per step. While an MMA runs, it inserts the scores of the previous step. While it computes
exponentials, only MMAs of other programs run: registers and shared memory fit three or four
programs per multiprocessor.

A thread of an MMA has columns 2 i and 2 i + 1 of every 8. Rows of q are ordered so that these are
heads of one token, and the thread sums them alone. The sums are then exchanged through shared
memory: a thread gets all windows of a block, and with them its score. It keeps the best of every
CHUNK-th block in a sorted column as deep as the top n, so no column loses one of the n best.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..common import launch, sm90
from ..common.gluon_sm90 import barriers, buffers, load_box, reinterpret, thread_barrier
from ..common.launch import LOG2_E, cdiv
from ..common.precompile import launcher

KEYS = gl.constexpr(64)  # windows of a step
WIDTH = gl.constexpr(64)  # of a box of queries
# layout of an MMA operand
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
NO_BLOCK = gl.constexpr(0x7FFFFFFF)
NO_SCORE = gl.constexpr(float("-inf"))
# one compiled kernel for all lengths
LENGTHS = ["first_token", "T", "C", "W", "tiles", "lines"]


@gluon.constexpr_function
def owners(windows, per_block, tokens, warps, by_block):
    """Layout of a step's windows [windows, tokens] or, `by_block`, [CHUNK, per_block, tokens]. A
    thread has all windows of a block and token. A warp has all blocks of a token."""
    first, size = per_block.bit_length() - 1, windows.bit_length() - 1
    window_bases = [[1 << bit, 0] for bit in range(size)]
    shape = [windows, tokens]
    if by_block:
        window_bases = [[0, 1 << bit, 0] for bit in range(first)]
        window_bases += [[1 << bit, 0, 0] for bit in range(size - first)]
        shape = [windows // per_block, per_block, tokens]
    token_bases = [[0] * (len(shape) - 1) + [1 << bit] for bit in range(tokens.bit_length() - 1)]
    threads, bases = 4 + warps.bit_length(), window_bases[first:] + token_bases
    spread = bases[:threads] + [[0] * len(shape)] * (threads - len(bases))
    return gl.DistributedLinearLayout(
        reg_bases=window_bases[:first] + bases[threads:],
        lane_bases=spread[:5],
        warp_bases=spread[5:],
        block_bases=[],
        shape=shape,
    )


@gluon.constexpr_function
def accumulator(rows, warps):
    """Layout of the accumulator of all windows of a step x `rows` rows."""
    return gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, rows * 4 // warps, 16])


@gluon.jit
def head_sums(x, lse_log2, scale_log2, TOKENS: gl.constexpr):
    """Probabilities [KEYS, TOKENS] of q.k [KEYS, ROWS], summed over heads. The index of a column is
    (token, head, token among NEAR, head among 8 // NEAR)."""
    NEAR: gl.constexpr = min(TOKENS, 4)
    FAR: gl.constexpr = TOKENS // NEAR
    HEADS: gl.constexpr = x.shape[1] // (8 * FAR)
    p = gl.exp2(x * scale_log2 - lse_log2[None])
    p = gl.sum(gl.reshape(p, [KEYS, FAR, HEADS, NEAR, 4 // NEAR, 2]), 5)
    return gl.reshape(gl.sum(gl.sum(p, 2), 3), [KEYS, TOKENS])


@gluon.jit
def overlap_tokens(j, P: gl.constexpr, g: gl.constexpr, WINDOW: gl.constexpr, d: gl.constexpr,
           s: gl.constexpr):  # fmt: skip
    """Tokens that block c shares with window j of the P windows that end in block c + g."""
    past = (j + (g * P + 1)) * d
    return gl.maximum(gl.minimum(past, s) - gl.maximum(past - WINDOW, 0), 0).to(gl.float32)


@gluon.jit
def empty_columns(
    T, DEPTH: gl.constexpr, CHUNK: gl.constexpr, TOKENS: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Scores and blocks of empty columns."""
    # T is never negative. With constants the compiler would track how they move down the columns,
    # and compute token_bases of them twice
    score, block = gl.where(T < 0, 0.0, NO_SCORE), gl.where(T < 0, 0, NO_BLOCK)
    scores = ()
    blocks = ()
    for _ in gl.static_range(DEPTH):
        scores += (gl.full([CHUNK, TOKENS], score, gl.float32, LAYOUT),)
        blocks += (gl.full([CHUNK, TOKENS], block, gl.int32, LAYOUT),)
    return scores, blocks


@gluon.jit
def insert(columns, score, block):
    """Insert the scores of CHUNK blocks, each into its column."""
    scores, blocks = columns
    new_scores = ()
    new_blocks = ()
    score_above, block_above = score, block
    for depth in gl.static_range(len(scores)):
        # strictly better: blocks already in the column are earlier
        better = score > scores[depth]
        new_scores += (gl.maximum(scores[depth], score_above),)
        new_blocks += (gl.where(better, block_above, blocks[depth]),)
        score_above = gl.minimum(scores[depth], score)
        block_above = gl.where(better, blocks[depth], block)
    return new_scores, new_blocks


@gluon.jit
def insert_scores(
    columns, kept, p, step, hi, end, WINDOW: gl.constexpr, d: gl.constexpr, s: gl.constexpr,
    INITIAL: gl.constexpr,
):  # fmt: skip
    """Insert the scores of a step's blocks, from probabilities p [CHUNK, P, TOKENS]. If windows
    reach into the block before, scores are shifted by one block: `kept` holds the incomplete score
    of the previous step's last block."""
    CHUNK: gl.constexpr = p.shape[0]
    P: gl.constexpr = p.shape[1]
    OWN: gl.constexpr = p.type.layout
    SCORE: gl.constexpr = gl.SliceLayout(1, OWN)
    c = gl.arange(0, CHUNK, gl.SliceLayout(1, SCORE))
    block = step * CHUNK + c
    j = gl.arange(0, P, gl.SliceLayout(0, gl.SliceLayout(2, OWN)))
    # windows that the token sees, from the block's first window on
    visible = hi[None] - (block * P)[:, None]
    p = gl.where(j[None, :, None] < gl.expand_dims(visible, 1), p, 0.0)
    score = gl.sum(p * overlap_tokens(j, P, 0, WINDOW, d, s)[None, :, None], 1)
    if d < WINDOW:
        rotated = gl.where((c == CHUNK - 1)[:, None], kept, score)
        kept = score
        previous, _ = gl.broadcast(((c - 1) & (CHUNK - 1))[:, None], rotated)
        score = gl.gather(rotated, previous, 0)
        score += gl.sum(p * overlap_tokens(j, P, 1, WINDOW, d, s)[None, :, None], 1)
        block -= 1
    candidate = (block >= INITIAL)[:, None] & (block[:, None] < end[None])
    score = gl.where(candidate, score, NO_SCORE)
    return insert(columns, score, block[:, None]), kept


@gluon.jit
def load_keys(ck, smem, full, b, h, chunk, iteration, iterations):
    """Load the windows of a chunk of blocks into their slot, if there are that many iterations.
    `expect_keys` has told the slot's barrier the number of bytes."""
    stage = iteration % smem.shape[0]
    at = [b, chunk * KEYS, h, 0]
    load_box(ck, at, full.index(stage), smem.index(stage), pred=iteration < iterations)


@gluon.jit
def expect_keys(smem, full, iteration, iterations):
    BYTES: gl.constexpr = KEYS * smem.shape[4] * 2
    mbarrier.expect(full.index(iteration % smem.shape[0]), BYTES, pred=iteration < iterations)


@gluon.jit
def load_probabilities(smem, P: gl.constexpr):
    """A step's probabilities [CHUNK, P, TOKENS]."""
    TOKENS: gl.constexpr = smem.shape[1]
    p = smem.load(owners(KEYS, P, TOKENS, gl.num_warps(), False))
    p = gl.reshape(p, [KEYS // P, P, TOKENS])
    return gl.convert_layout(p, owners(KEYS, P, TOKENS, gl.num_warps(), True), assert_trivial=True)


@gluon.jit
def process_chunks(
    ck, smem, full, q_tile, sums, lse_log2, scale_log2, hi, end, b, h, begin, iterations, columns,
    kept, WINDOW: gl.constexpr, d: gl.constexpr, s: gl.constexpr, INITIAL: gl.constexpr,
):  # fmt: skip
    """The sorted columns of a tile's tokens after `iterations` chunks of blocks."""
    ROWS: gl.constexpr = q_tile.shape[0]
    ACC: gl.constexpr = accumulator(ROWS, gl.num_warps())
    STAGES: gl.constexpr = smem.shape[0]
    x = gl.zeros([KEYS, ROWS], gl.float32, ACC)
    for iteration in range(0, iterations):
        chunk = begin + iteration
        mbarrier.wait(full.index(iteration % STAGES), iteration // STAGES & 1)
        k_tile = smem.index(iteration % STAGES).reshape([KEYS, q_tile.shape[1]])
        x = warpgroup_mma(k_tile, q_tile.permute((1, 0)), x, use_acc=False, is_async=True)
        # in the first iteration any values: their blocks are before the candidates
        p = load_probabilities(sums, s // d)
        columns, kept = insert_scores(columns, kept, p, chunk - 1, hi, end, WINDOW, d, s, INITIAL)
        x = warpgroup_mma_wait(0, deps=[x])
        expect_keys(smem, full, iteration + STAGES, iterations)
        thread_barrier()
        load_keys(ck, smem, full, b, h, chunk + STAGES, iteration + STAGES, iterations)
        sums.store(head_sums(x, lse_log2, scale_log2, sums.shape[1]))
        thread_barrier()
    p = load_probabilities(sums, s // d)
    columns, kept = insert_scores(
        columns, kept, p, begin + iterations - 1, hi, end, WINDOW, d, s, INITIAL
    )
    return columns


@gluon.jit
def best_blocks(columns, slot):
    """The best of all columns by slot [CHUNK, TOKENS], best first; -1 in empty slots and past the
    depth of a column."""
    scores, blocks = columns
    SLOTS: gl.constexpr = len(scores)
    indices = gl.full(scores[0].shape, -1, gl.int32, scores[0].type.layout)
    for j in gl.static_range(SLOTS):
        best = gl.max(scores[0], 0)
        block = gl.min(gl.where(scores[0] == best[None], blocks[0], NO_BLOCK), 0)
        indices = gl.where((slot == j)[:, None], block[None], indices)
        taken = blocks[0] == block[None]
        new_scores = ()
        new_blocks = ()
        for depth in gl.static_range(SLOTS - 1 - j):
            new_scores += (gl.where(taken, scores[depth + 1], scores[depth]),)
            new_blocks += (gl.where(taken, blocks[depth + 1], blocks[depth]),)
        scores, blocks = new_scores, new_blocks
    return gl.where(indices == NO_BLOCK, -1, indices)


@gluon.jit
def load_lse(
    lse, b, r, first, T, RANKS, G: gl.constexpr, TOKENS: gl.constexpr, STRIDE: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Log-sum-exps of a tile's rows in units of log2; inf for rows with probability 0."""
    NEAR: gl.constexpr = min(TOKENS, 4)
    column = gl.arange(0, TOKENS * G, LAYOUT)
    near, head = column % 8 // (8 // NEAR), column % (8 // NEAR)
    head += column // 8 % (G * NEAR // 8) * (8 // NEAR)
    token = (first + column // (G * NEAR) * NEAR + near) * STRIDE
    row = (b * T + token).to(gl.int64) * (RANKS * G) + r * G + head
    lse_log2 = gl.load(lse + row, mask=token < T, other=float("-inf")) * 1.4426950408889634
    return gl.where(lse_log2 == float("-inf"), float("inf"), lse_log2)


@gluon.jit(do_not_specialize=LENGTHS)
def nsa_topk_softmax_mass_sm90(
    q, ck, lse, out, first_token, T, C, W, RANKS, tiles, lines, scale_log2,
    G: gl.constexpr, RANKS_PER_KV: gl.constexpr, ROWS: gl.constexpr, SLOTS: gl.constexpr,
    WINDOW: gl.constexpr, d: gl.constexpr, s: gl.constexpr, INITIAL: gl.constexpr,
    LOCAL: gl.constexpr, STRIDE: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One program: the rankings of a tile of tokens, every STRIDE-th one, of one row and ranking
    head. Reads their queries, log-sum-exp and visible windows."""
    TOKENS: gl.constexpr = ROWS // G
    P: gl.constexpr = s // d
    CHUNK: gl.constexpr = KEYS // P
    D: gl.constexpr = ck.block_shape[3]
    FAR: gl.constexpr = TOKENS // q.block_shape[2]
    SCORE: gl.constexpr = gl.SliceLayout(1, owners(KEYS, P, TOKENS, gl.num_warps(), True))
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [0, 1])
    ACC: gl.constexpr = accumulator(ROWS, gl.num_warps())
    # tiles with most windows first
    tile, line = tiles - 1 - gl.program_id(0) // lines, gl.program_id(0) % lines
    b, r = line // RANKS, line % RANKS
    first = tile * TOKENS

    q_smem, q_bar = buffers(q, FAR * (D // WIDTH)), barriers(1, 1)
    smem, full = buffers(ck, STAGES), barriers(STAGES, 1)
    sums = gl.allocate_shared_memory(gl.float32, [KEYS, TOKENS], SUMS)
    fence_async_shared()
    thread_barrier()

    token = (first + gl.arange(0, TOKENS, gl.SliceLayout(0, SCORE))) * STRIDE
    last = gl.minimum((first + TOKENS - 1) * STRIDE, T - 1)
    hi, end, most = token * 0 + W, token * 0 + C, C
    if CAUSAL:
        hi = gl.minimum(hi, (first_token + token) // d)
        end = gl.minimum(end, (first_token + token) // s - (LOCAL - 1))
        most = gl.minimum(most, (first_token + last) // s - (LOCAL - 1))
    begin: gl.constexpr = INITIAL // CHUNK
    beyond: gl.constexpr = 1 if d < WINDOW else 0
    iterations = gl.maximum(gl.cdiv(gl.maximum(most + beyond, 1), CHUNK) - begin, 1)

    mbarrier.expect(q_bar.index(0), ROWS * D * 2)
    for iteration in gl.static_range(STAGES):
        expect_keys(smem, full, iteration, iterations)
    thread_barrier()
    for half in gl.static_range(D // WIDTH):
        for far in gl.static_range(FAR):
            at = [b, r * q.block_shape[1], first + far * q.block_shape[2], 0, half * WIDTH]
            stage = half * FAR + far
            load_box(q, at, q_bar.index(0), q_smem.index(stage))
    for iteration in gl.static_range(STAGES):
        load_keys(ck, smem, full, b, r // RANKS_PER_KV, begin + iteration, iteration, iterations)
    lse_log2 = load_lse(lse, b, r, first, T, RANKS, G, TOKENS, STRIDE, gl.SliceLayout(0, ACC))

    columns = empty_columns(T, SLOTS, CHUNK, TOKENS, SCORE)
    kept = gl.zeros([CHUNK, TOKENS], gl.float32, SCORE)
    mbarrier.wait(q_bar.index(0), 0)
    q_tile = reinterpret(q_smem, ck.dtype, [1, ROWS, D], TILE).index(0)
    columns = process_chunks(
        ck, smem, full, q_tile, sums, lse_log2, scale_log2, hi, end, b, r // RANKS_PER_KV, begin,
        iterations, columns, kept, WINDOW, d, s, INITIAL,
    )  # fmt: skip
    slot = gl.arange(0, CHUNK, gl.SliceLayout(1, SCORE))
    indices = best_blocks(columns, slot)
    for j in gl.static_range(STRIDE):
        row = (b * T + token + j).to(gl.int64) * RANKS + r
        mask = (token + j < T)[None] & (slot < SLOTS)[:, None]
        gl.store(out + row[None] * SLOTS + slot[:, None], indices, mask=mask)


# warps of a program, and stages
WARPS, STAGES = 4, 2
# rows of a tile, and registers of a thread, by heads that rank together: registers hold the sorted
# columns of 16 tokens besides scores of 4 heads, not of 8; 3 or 4 programs fit a multiprocessor
TILES = {4: (64, 168), 8: (64, 128), 64: (128, 168)}
# supported: widths of heads; heads that rank together; windows that end in a block; largest n
WIDTHS, GROUPS, PER_BLOCK, MAX_SLOTS = (64, 128), (4, 8, 16, 32, 64), (2, 4, 8), 16
# tiles of a multiprocessor at least
MIN_TILES_PER_SM = 8


def tiles_and_lines(q: Tensor, ranks: int, stride: int) -> tuple[int, int]:
    """Tiles of a line, and lines (batch rows x ranking heads)."""
    groups = q.shape[2] // ranks
    tokens = launch.row(TILES, groups)[0] // groups
    return cdiv(cdiv(q.shape[1], stride), tokens), q.shape[0] * ranks


def is_supported(q: Tensor, ck: Tensor, config: Any, out: Tensor, start: int) -> bool:
    """Whether the kernel can run a call of a `start` for all sequences, without documents.
    `launch.using({"softmax_mass_sm90": True})` lifts the least number of tiles; False disables the
    kernel, and so does an override of "ranking.probs"."""
    allowed, (ranks, n) = launch.override.get("softmax_mass_sm90"), out.shape[2:]
    if allowed is False or "ranking.probs" in launch.override or config.soft_cap is not None:
        return False
    l, d, s = config.compress_block_size, config.d, config.selection_block_size
    sizes = q.element_size() == 2 and q.shape[-1] in WIDTHS and q.shape[2] // ranks in GROUPS
    # windows end within one block, and reach at most into the block before
    windows = s % d == 0 and s // d in PER_BLOCK and d <= l <= d + s
    slots = windows and 0 < n <= min(MAX_SLOTS, KEYS.value // (s // d))
    if not (sizes and slots and start % config.selection_stride == 0):
        return False
    tiles, lines = tiles_and_lines(q, ranks, config.selection_stride)
    if not allowed and tiles * lines < MIN_TILES_PER_SM * sm90.multiprocessors(q.device):
        return False
    return all(launch.tma_descriptor(t, KEYS.value) is not None for t in (q, ck))


def rank(
    q: Tensor, ck: Tensor, config: Any, lse: Tensor, out: Tensor, start: int, num_ranked: int
) -> None:
    """Write block indices to `out`, as `nsa_topk_softmax_mass`."""
    (ranks, n), D, stride = out.shape[2:], q.shape[-1], config.selection_stride
    tiles, lines = tiles_and_lines(q, ranks, stride)
    groups = q.shape[2] // ranks
    size, registers = launch.row(TILES, groups)
    # the ranked queries [B, groups of heads, T, heads, D]: eight rows of a tile hold `heads` heads
    # of four neighbouring tokens, or of all its tokens if it has fewer
    heads = 8 // min(4, size // groups)
    rows = q[:, ::stride].unflatten(2, (-1, heads)).transpose(1, 2)
    shape = [1, groups // heads, 8 // heads, heads, WIDTH.value]
    launcher(nsa_topk_softmax_mass_sm90, (tiles * lines,))(
        q=sm90.box(rows, shape), ck=sm90.box(ck, [1, KEYS.value, 1, D]), lse=lse, out=out,
        first_token=start, T=q.shape[1], C=num_ranked, W=ck.shape[1], RANKS=ranks, tiles=tiles,
        lines=lines, scale_log2=config.scale_of(D) * LOG2_E, G=groups,
        RANKS_PER_KV=ranks // ck.shape[2], ROWS=size, SLOTS=n, WINDOW=config.compress_block_size,
        d=config.d, s=config.selection_block_size, INITIAL=config.num_initial_blocks,
        LOCAL=max(config.num_local_blocks, 1), STRIDE=stride, CAUSAL=config.causal, STAGES=STAGES,
        num_warps=WARPS, maxnreg=registers,
    )  # fmt: skip
