"""What the programs that walk the selected branch block by block leave in parts, joined in a fixed
order: attentions and dq of a query's slots, dk and dv of a block's items."""

import triton
import triton.language as tl

from ..common.primitives import grid_position, load_rows, store_combined, store_rows

# rows of a program
JOIN_ROWS, SUM_ROWS = 16, 16
# items whose shares are read at once; keys of a program, fewer where blocks are few
SPILLS, SPILT_KEYS = 4, 64


@triton.jit
def load_parts(part, offsets, WIDTH: tl.constexpr, BLOCK: tl.constexpr, mask):
    """As `load_rows`, of rows that are read once: the cache is for others."""
    d = tl.arange(0, BLOCK)
    inside = mask[:, None] if WIDTH == BLOCK else mask[:, None] & (d[None] < WIDTH)
    at = part + offsets[:, None] + d[None]
    return tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def store_parts(part, offsets, value, WIDTH: tl.constexpr, BLOCK: tl.constexpr, mask):
    """As `store_rows`, of rows that are read when the cache no longer holds them."""
    d = tl.arange(0, BLOCK)
    inside = mask[:, None] if WIDTH == BLOCK else mask[:, None] & (d[None] < WIDTH)
    at = part + offsets[:, None] + d[None]
    tl.store(at, value.to(part.dtype.element_ty), mask=inside, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["T", "first", "length"])
def nsa_selected_reduce_out(
    part, part_lse, block_indices, out, lse, combine_cmp, combine_win, combine_gates, layer_out, T,
    R, n, first, length, g_b, g_t, g_h, g_3,
    G: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    SLOTS: tl.constexpr, ADD: tl.constexpr, COMBINE: tl.constexpr, FLIPPED: tl.constexpr,
):  # fmt: skip
    """One program: M rows (token, head) of a span of tokens. Joins the parts of a row's slots, and
    with ADD what out and lse hold, into out and lse; part_lse is in units of log2. With MIX writes
    the layer's output too."""
    tile, b, _tiles, _rows = grid_position(FLIPPED)
    i, b = tile * BLOCK_M + tl.arange(0, BLOCK_M), b.to(tl.int64)
    H = R * G
    real = i < length * H
    row = (b * T + first) * H + i
    line = block_indices + ((b * T + first) * R + i // G) * n
    there = (b * length * R + i // G) * (n * G) + i % G

    # what all slots are measured from, first: then no part waits for the one before
    slot = tl.arange(0, SLOTS)
    mask = real[:, None] & (slot < n)[None]
    mask = mask & (tl.load(line[:, None] + slot[None], mask=mask, other=-1) >= 0)
    all_slots = there[:, None] + slot[None] * G
    logs = tl.load(part_lse + all_slots, mask=mask, other=float("-inf"))
    m = tl.max(logs, 1)
    if ADD:
        before = tl.load(lse + row, mask=real, other=float("-inf")) * 1.4426950408889634
        m = tl.maximum(m, before)
    origin = tl.where(m == float("-inf"), 0.0, m)
    l = tl.sum(tl.exp2(logs - origin[:, None]), 1)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    if ADD:
        weight = tl.exp2(before - origin)
        acc = load_rows(out, row * E, E, BLOCK_E, real).to(tl.float32) * weight[:, None]
        l += weight
    # of rows that list nothing, as united ones, there is nothing to read
    listing = tl.max(mask.to(tl.int32)) > 0
    for j in tl.range(0, tl.where(listing, n, 0), loop_unroll_factor=4):
        listed = real & (tl.load(line + j, mask=real, other=-1) >= 0)
        at = there + j * G
        weight = tl.exp2(tl.load(part_lse + at, mask=listed, other=float("-inf")) - origin)
        acc += weight[:, None] * load_parts(part, at * E, E, BLOCK_E, listed).to(tl.float32)
    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    acc = acc / l[:, None]
    if COMBINE:
        token = first + i // H
        gate = combine_gates + b * g_b + token.to(tl.int64) * g_t + i % H * g_h
        store_combined(layer_out, acc, combine_cmp, combine_win, gate, row, g_3, E, BLOCK_E, real)
    store_rows(out, row * E, acc, E, BLOCK_E, real)
    tl.store(
        lse + row, tl.where(empty, float("-inf"), (m + tl.log2(l)) * 0.6931471805599453), mask=real
    )


@triton.jit
def add_shares(spill, d, at, j, begin, end, s, there, D: tl.constexpr, BLOCK_D: tl.constexpr,
               SPILLS: tl.constexpr):  # fmt: skip
    """Rows `at` of d and keys j of the shares of items begin .. end - 1, added up in order."""
    acc = load_rows(d, at * D, D, BLOCK_D, there)
    for item in tl.range(begin, end, loop_unroll_factor=SPILLS):
        acc += load_rows(spill, (item * s + j) * D, D, BLOCK_D, there)
    store_rows(d, at * D, acc, D, BLOCK_D, there)


@triton.jit(do_not_specialize=["S", "C", "head", "heads"])
def nsa_selected_reduce_dkv(
    spill_k, spill_v, dk, dv, spill_bounds, S, K, s, C, head, heads,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr, SPILLS: tl.constexpr,
):  # fmt: skip
    """One program: N keys of a block that has several items. Adds their shares to dk, or to dv."""
    block = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(spill_bounds + block), tl.load(spill_bounds + block + 1)
    if begin < end:
        b, h, c = block // C // heads, head + block // C % heads, block % C
        j = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        there = (j < s) & (c * s + j < S)
        at = (b * S + c * s + j) * K + h
        if tl.program_id(2) == 0:
            add_shares(spill_k, dk, at, j, begin, end, s, there, D, BLOCK_D, SPILLS)
        else:
            add_shares(spill_v, dv, at, j, begin, end, s, there, E, BLOCK_E, SPILLS)


@triton.jit
def list_of_span(x, first, rank, RANKS: tl.constexpr):
    """Of list x of a span, whose tokens begin at `first` and have RANKS lists each there from
    `rank` on: the token, and the list's number among those of the token."""
    return first + x // RANKS, rank + x % RANKS


@triton.jit(do_not_specialize=["T", "first", "length", "rank"])
def nsa_selected_reduce_dq(
    part, places, dq, unless, T, R, n, first, length, rank, RANKS: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    PIECES: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, UNLESS: tl.constexpr,
    FLIPPED: tl.constexpr,
):  # fmt: skip
    """One program: M rows (token, head) of a span. The sum of a row's parts over its slots and
    their pieces, with ADD on top of what dq holds. A part has ROWS rows, the first G of which are
    heads. With UNLESS nothing where that is not 0."""
    tile, b, _tiles, _rows = grid_position(FLIPPED)
    i, b = tile * BLOCK_M + tl.arange(0, BLOCK_M), b.to(tl.int64)
    real = i < length * RANKS * G
    if UNLESS:
        real = real & (tl.load(unless) == 0)
    token, of_token = list_of_span(i // G, first, rank, RANKS)
    number = (b * T + token) * R + of_token
    row, line = number * G + i % G, number * n
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if ADD:
        acc = load_rows(dq, row * D, D, BLOCK_D, real).to(tl.float32)
    for slot in tl.range(0, n * PIECES, loop_unroll_factor=4):
        place = tl.load(places + line + slot // PIECES, mask=real, other=-1).to(tl.int64)
        listed, at = place >= 0, (place * PIECES + slot % PIECES) * ROWS + i % G
        acc += load_parts(part, at * D, D, BLOCK_D, listed).to(tl.float32)
    store_rows(dq, row * D, acc, D, BLOCK_D, real)
