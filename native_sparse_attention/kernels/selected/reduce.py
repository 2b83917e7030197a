"""Reduction of the key-major kernels' partial results in a fixed order: out, lse and dq over a
query's slots, dk and dv over a block's work tiles."""

import triton
import triton.language as tl

from ..common.primitives import grid_position, load_rows, store_combined, store_rows

# rows of a program
OUT_ROWS, DQ_ROWS = 16, 16
# partials read at once; keys of a program, fewer if blocks are few
UNROLL, DKV_KEYS = 4, 64


@triton.jit
def load_partials(partial, offsets, WIDTH: tl.constexpr, BLOCK: tl.constexpr, mask):
    """`load_rows` with evict_first: the rows are read once."""
    d = tl.arange(0, BLOCK)
    inside = mask[:, None] if WIDTH == BLOCK else mask[:, None] & (d[None] < WIDTH)
    at = partial + offsets[:, None] + d[None]
    return tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def store_partials(partial, offsets, value, WIDTH: tl.constexpr, BLOCK: tl.constexpr, mask):
    """`store_rows` with evict_first: the rows are read after they have left the cache."""
    d = tl.arange(0, BLOCK)
    inside = mask[:, None] if WIDTH == BLOCK else mask[:, None] & (d[None] < WIDTH)
    at = partial + offsets[:, None] + d[None]
    tl.store(at, value.to(partial.dtype.element_ty), mask=inside, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["T", "first", "length"])
def nsa_selected_reduce_out(
    partial_out, partial_lse, block_indices, out, lse, combine_cmp, combine_win, combine_gates,
    layer_out, T, R, n, first, length, g_b, g_t, g_h, g_3,
    G: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    SLOTS: tl.constexpr, ADD: tl.constexpr, COMBINE: tl.constexpr, FLIPPED: tl.constexpr,
):  # fmt: skip
    """One program: M rows (token, head) of a chunk. Reduces the partials of a row's slots into out
    and lse; with ADD out and lse are a partial too. partial_lse is in units of log2. With COMBINE
    also writes the layer's output."""
    tile, b, _tiles, _rows = grid_position(FLIPPED)
    i, b = tile * BLOCK_M + tl.arange(0, BLOCK_M), b.to(tl.int64)
    H = R * G
    real = i < length * H
    row = (b * T + first) * H + i
    indices = block_indices + ((b * T + first) * R + i // G) * n
    base = (b * length * R + i // G) * (n * G) + i % G

    # the maximum over all slots first: then no partial waits for the previous one
    slot = tl.arange(0, SLOTS)
    mask = real[:, None] & (slot < n)[None]
    mask = mask & (tl.load(indices[:, None] + slot[None], mask=mask, other=-1) >= 0)
    all_slots = base[:, None] + slot[None] * G
    logs = tl.load(partial_lse + all_slots, mask=mask, other=float("-inf"))
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
    for j in tl.range(0, n, loop_unroll_factor=4):
        chosen = real & (tl.load(indices + j, mask=real, other=-1) >= 0)
        at = base + j * G
        weight = tl.exp2(tl.load(partial_lse + at, mask=chosen, other=float("-inf")) - origin)
        acc += weight[:, None] * load_partials(partial_out, at * E, E, BLOCK_E, chosen).to(
            tl.float32
        )
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
def add_partials(partials, d, at, j, begin, end, s, valid, D: tl.constexpr, BLOCK_D: tl.constexpr,
                 UNROLL: tl.constexpr):  # fmt: skip
    """Adds keys j of partials begin .. end - 1 to rows `at` of d, in order."""
    acc = load_rows(d, at * D, D, BLOCK_D, valid)
    for partial in tl.range(begin, end, loop_unroll_factor=UNROLL):
        acc += load_rows(partials, (partial * s + j) * D, D, BLOCK_D, valid)
    store_rows(d, at * D, acc, D, BLOCK_D, valid)


@triton.jit(do_not_specialize=["S", "C", "head", "heads"])
def nsa_selected_reduce_dkv(
    partial_dk, partial_dv, dk, dv, partial_offsets, S, K, s, C, head, heads,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """One program: N keys of a block that has several work tiles. Adds the partials to dk or dv."""
    block = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(partial_offsets + block), tl.load(partial_offsets + block + 1)
    if begin < end:
        b, h, c = block // C // heads, head + block // C % heads, block % C
        j = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = (j < s) & (c * s + j < S)
        at = (b * S + c * s + j) * K + h
        if tl.program_id(2) == 0:
            add_partials(partial_dk, dk, at, j, begin, end, s, valid, D, BLOCK_D, UNROLL)
        else:
            add_partials(partial_dv, dv, at, j, begin, end, s, valid, E, BLOCK_E, UNROLL)


@triton.jit
def chunk_row(x, first, first_group, GROUPS: tl.constexpr):
    """Token and head group of row x of a chunk: tokens from `first` on, GROUPS head groups of each
    from `first_group` on."""
    return first + x // GROUPS, first_group + x % GROUPS


@triton.jit(do_not_specialize=["T", "first", "length", "first_group"])
def nsa_selected_reduce_dq(
    partial_dq, pair_indices, dq, skip_if, T, R, n, first, length, first_group,
    GROUPS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, KEY_TILES: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr,
    SKIP_IF: tl.constexpr, FLIPPED: tl.constexpr,
):  # fmt: skip
    """One program: M rows (token, head) of a chunk. Writes, with ADD adds to dq, the sum of a row's
    partial dq over slots and key tiles. A partial has ROWS rows, of which the first G are heads.
    With SKIP_IF the kernel does nothing unless `skip_if` is 0."""
    tile, b, _tiles, _rows = grid_position(FLIPPED)
    i, b = tile * BLOCK_M + tl.arange(0, BLOCK_M), b.to(tl.int64)
    real = i < length * GROUPS * G
    if SKIP_IF:
        real = real & (tl.load(skip_if) == 0)
    token, group = chunk_row(i // G, first, first_group, GROUPS)
    group_row = (b * T + token) * R + group
    row, slots = group_row * G + i % G, group_row * n
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if ADD:
        acc = load_rows(dq, row * D, D, BLOCK_D, real).to(tl.float32)
    for slot in tl.range(0, n * KEY_TILES, loop_unroll_factor=4):
        index = tl.load(pair_indices + slots + slot // KEY_TILES, mask=real, other=-1).to(tl.int64)
        chosen, at = index >= 0, (index * KEY_TILES + slot % KEY_TILES) * ROWS + i % G
        acc += load_partials(partial_dq, at * D, D, BLOCK_D, chosen).to(tl.float32)
    store_rows(dq, row * D, acc, D, BLOCK_D, real)
