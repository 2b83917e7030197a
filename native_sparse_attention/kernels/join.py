"""What the programs that walk the selected branch block by block leave in parts, joined in a fixed
order: attentions and dq of a query's slots, dk and dv of a block's items."""

import triton
import triton.language as tl

from .device import grid_place, load_rows, store_rows

# rows of a program
JOIN_ROWS, SUM_ROWS = 32, 16


@triton.jit(do_not_specialize=["T", "first", "length"])
def join_kernel(
    part, part_lse, lists, out, lse, T, R, n, first, length,
    G: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    ADD: tl.constexpr, FLIPPED: tl.constexpr,
):  # fmt: skip
    """One program: M rows (token, head) from `first` on. Joins the parts of a row's slots, and with
    ADD what out and lse hold, into out and lse; part_lse is in units of log2."""
    tile, b, _tiles, _rows = grid_place(FLIPPED)
    i, b = tile * BLOCK_M + tl.arange(0, BLOCK_M), b.to(tl.int64)
    H = R * G
    real = i < length * H
    row = (b * T + first) * H + i
    line = ((b * T + first) * R + i // G) * n
    there = (b * length * R + i // G) * n
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if ADD:
        acc = load_rows(out, row * E, E, BLOCK_E, real).to(tl.float32)
        m = tl.load(lse + row, mask=real, other=float("-inf")) * 1.4426950408889634
        l = tl.where(m == float("-inf"), 0.0, 1.0)
    for slot in tl.range(0, n, loop_unroll_factor=4):
        listed = real & (tl.load(lists + line + slot, mask=real, other=-1) >= 0)
        at = (there + slot) * G + i % G
        new = tl.load(part_lse + at, mask=listed, other=float("-inf"))
        o = load_rows(part, at * E, E, BLOCK_E, listed).to(tl.float32)
        m_new = tl.maximum(m, new)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha, beta = tl.exp2(m - m_safe), tl.exp2(new - m_safe)
        acc = acc * alpha[:, None] + o * beta[:, None]
        m, l = m_new, l * alpha + beta
    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    store_rows(out, row * E, acc / l[:, None], E, BLOCK_E, real)
    log = tl.where(empty, float("-inf"), (m + tl.log2(l)) * 0.6931471805599453)
    tl.store(lse + row, log, mask=real)


@triton.jit(do_not_specialize=["S", "C"])
def gather_spill_kernel(
    spill, d, spill_bounds, S, K, s, C,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: N keys of a block that has several items. Adds their shares, in order, to d."""
    block = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(spill_bounds + block), tl.load(spill_bounds + block + 1)
    if begin < end:
        b, h, c = block // C // K, block // C % K, block % C
        j = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        there = (j < s) & (c * s + j < S)
        at = (b * S + c * s + j) * K + h
        acc = load_rows(d, at * D, D, BLOCK_D, there)
        for item in range(begin, end):
            acc += load_rows(spill, (item * s + j) * D, D, BLOCK_D, there)
        store_rows(d, at * D, acc, D, BLOCK_D, there)


@triton.jit(do_not_specialize=["T", "first", "length"])
def sum_kernel(
    part, lists, dq, unless, T, R, n, first, length,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    PIECES: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, UNLESS: tl.constexpr,
    FLIPPED: tl.constexpr,
):  # fmt: skip
    """One program: M rows (token, head) from `first` on. The sum of a row's parts over its slots
    and their pieces, with ADD on top of what dq holds. A part has ROWS rows, the first G of which
    are heads. With UNLESS nothing where that is not 0."""
    tile, b, _tiles, _rows = grid_place(FLIPPED)
    i, b = tile * BLOCK_M + tl.arange(0, BLOCK_M), b.to(tl.int64)
    H = R * G
    real = i < length * H
    if UNLESS:
        real = real & (tl.load(unless) == 0)
    row = (b * T + first) * H + i
    line = ((b * T + first) * R + i // G) * n
    there = (b * length * R + i // G) * n
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if ADD:
        acc = load_rows(dq, row * D, D, BLOCK_D, real).to(tl.float32)
    for slot in tl.range(0, n * PIECES, loop_unroll_factor=4):
        listed = real & (tl.load(lists + line + slot // PIECES, mask=real, other=-1) >= 0)
        at = (there * PIECES + slot) * ROWS + i % G
        acc += load_rows(part, at * D, D, BLOCK_D, listed).to(tl.float32)
    store_rows(dq, row * D, acc, D, BLOCK_D, real)
