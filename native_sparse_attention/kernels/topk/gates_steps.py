"""Steps of the gates' backward (`gates_bwd.py`): which keys a row sees, which rows see a key, and
dp of a tile of keys from the gradients of the gates."""

import triton
import triton.language as tl

from ..common.primitives import (
    candidates_end,
    candidates_in_document,
    in_document,
    leaders,
    load_rows,
)

# which keys: windows behind the query, memory, candidate blocks; where interpolated and causal, the
# candidates that have other keys for this query apart, as EDGES
WINDOWS_BEHIND, MEMORY, BLOCKS, EDGES = (tl.constexpr(i) for i in range(4))
NOTHING = tl.constexpr(-1)


@triton.jit
def seen_keys(position, token, real, N, T, firsts, lasts, d: tl.constexpr, s: tl.constexpr,
              INITIAL: tl.constexpr, LOCAL: tl.constexpr, CAUSAL: tl.constexpr,
              APART: tl.constexpr, KIND: tl.constexpr, DOCUMENTS: tl.constexpr):  # fmt: skip
    """The first key and one past the last key of each row, of N; with APART there are EDGES."""
    lo = position * 0
    hi = lo + N
    if KIND == WINDOWS_BEHIND and CAUSAL:
        hi = tl.minimum(hi, position // d)
    if KIND == WINDOWS_BEHIND and DOCUMENTS:
        lo, hi = in_document(lo, hi, token, T, firsts, lasts, d)
    if KIND >= BLOCKS:
        lo += INITIAL
        hi = candidates_end(position, N, LOCAL, d, s, CAUSAL)
        if DOCUMENTS:
            lo, hi = candidates_in_document(hi, token, T, firsts, lasts, s, INITIAL)
        if APART:
            # the first block whose last window is the last that the query sees
            PER_BLOCK: tl.constexpr = s // d if s > d else 1
            PER_WINDOW: tl.constexpr = d // s if d > s else 1
            edge = (tl.cdiv(position // d, PER_BLOCK) - 1) * PER_WINDOW
            lo = tl.maximum(lo, edge) if KIND == EDGES else lo
            hi = tl.minimum(hi, edge) if KIND == BLOCKS else hi
    return tl.where(real, lo, N), tl.where(real, hi, 0)


@triton.jit
def seeing_groups(n, last, first_token, d: tl.constexpr, s: tl.constexpr, LOCAL: tl.constexpr,
                  STRIDE: tl.constexpr, CAUSAL: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """A first group before those that see key n or a later one, and one past those that see key
    `last` or an earlier one."""
    first = n * 0
    end = last * 0 + 0x7FFFFFFF
    PER_WINDOW: tl.constexpr = d // s if d > s else 1
    if KIND == WINDOWS_BEHIND and CAUSAL:
        first = (n + 1) * d
    if KIND >= BLOCKS and CAUSAL:
        WIDER: tl.constexpr = d if d > s else s
        first = tl.maximum((n + LOCAL) * s, (n // PER_WINDOW + 1) * WIDER)
        if KIND == EDGES:
            after = (last // PER_WINDOW + 2) * d if d > s else (last + 1) * s + d
            end = tl.cdiv(after, STRIDE) - first_token // STRIDE
    return tl.maximum(first // STRIDE - first_token // STRIDE, 0), end


@triton.jit
def slot_grads(chosen, grads, entry, index, unit, first, GROUPS, slots, STEP: tl.constexpr):
    """Gradients [TOKENS, UNITS] of the gates of units, as far as STEP slots name them."""
    slot = first + tl.arange(0, STEP)
    at = (entry + slot)[:, None] * GROUPS + index[None]
    there = (slot < slots)[:, None] & (index < GROUPS)[None]
    c = tl.load(chosen + at, mask=there, other=-1)
    g = tl.load(grads + at, mask=there, other=0.0)
    return tl.sum(tl.where(c[:, :, None] == unit[None, None], g[:, :, None], 0.0), 0)


@triton.jit
def gate_grads(
    chosen, grads, entry, index, n0, GROUPS, slots, BLOCK_N: tl.constexpr, SLOTS: tl.constexpr,
    STEP: tl.constexpr, PER_UNIT: tl.constexpr, EXPAND: tl.constexpr, REACH: tl.constexpr,
    WINDOW: tl.constexpr, d: tl.constexpr, s: tl.constexpr,
):  # fmt: skip
    """dp [TOKENS, N] of keys n0 and on. PER_UNIT keys make a unit that a slot may name, EXPAND
    neighbours lie in one; a key shares tokens with its own unit and REACH - 1 before it."""
    TOKENS: tl.constexpr = index.shape[0]
    UNITS: tl.constexpr = BLOCK_N // EXPAND
    unit = (n0 + tl.arange(0, UNITS) * EXPAND) // PER_UNIT
    end = ((n0 + tl.arange(0, BLOCK_N)) % PER_UNIT + 1) * d
    dp = tl.zeros([TOKENS, BLOCK_N], tl.float32)
    for back in tl.static_range(REACH):
        # [TOKENS, UNITS]
        grad = tl.zeros([TOKENS, UNITS], tl.float32)
        for first in range(0, SLOTS, STEP):
            grad += slot_grads(chosen, grads, entry, index, unit - back, first, GROUPS, slots, STEP)
        if EXPAND > 1:
            grad = tl.broadcast_to(grad[:, :, None], [TOKENS, UNITS, EXPAND])
            grad = tl.reshape(grad, [TOKENS, BLOCK_N])
        if WINDOW > 0:
            share = tl.minimum(end, (1 - back) * s) - tl.maximum(end - WINDOW, -back * s)
            grad *= tl.maximum(share, 0).to(tl.float32)[None]
        dp += grad
    return dp


@triton.jit
def for_heads(x, HEADS: tl.constexpr):
    """Rows [TOKENS, N] for each head, [TOKENS * HEADS, N]."""
    if HEADS > 1:
        TOKENS: tl.constexpr = x.shape[0]
        N: tl.constexpr = x.shape[1]
        x = tl.broadcast_to(x[:, None], [TOKENS, HEADS, N])
        x = tl.reshape(x, [TOKENS * HEADS, N])
    return x


@triton.jit
def row_tile(tile, r, first_token, T, G: tl.constexpr, HEADS: tl.constexpr, STRIDE: tl.constexpr,
             BLOCK_M: tl.constexpr):  # fmt: skip
    """The rows of a tile: group, position and token of its leader, head, and whether it is one."""
    row = tl.arange(0, BLOCK_M)
    index = tile * (BLOCK_M // HEADS) + row // HEADS
    position, token, real = leaders(index, first_token, T, STRIDE)
    return index, position, token, r * G + row % HEADS, real & (row % HEADS < G)


@triton.jit
def load_parts(base, offsets, D: tl.constexpr, BLOCK_D: tl.constexpr, mask, PARTS: tl.constexpr):
    """Rows [M, D] as what they are a sum of: of one part, the second is not to be used."""
    high = load_rows(base, offsets, D, BLOCK_D, mask)
    low = high
    if PARTS == 2:
        low = load_rows(base + D, offsets, D, BLOCK_D, mask)
    return high, low


@triton.jit
def cut(x, like, PARTS: tl.constexpr):
    """x as a sum of parts of the type of `like`."""
    high = x.to(like.dtype)
    low = high
    if PARTS == 2:
        low = (x - high.to(tl.float32)).to(like.dtype)
    return high, low


@triton.jit
def dot_parts(a, a_low, b, b_low, PARTS: tl.constexpr):
    """The product of sums of parts, in float32, without what two low parts give."""
    x = tl.dot(a, b, input_precision="ieee")
    if PARTS == 2:
        x = tl.dot(a, b_low, tl.dot(a_low, b, x))
    return x
