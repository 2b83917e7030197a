"""Steps common to the kernels. A tile has M rows: its tokens times the G heads of a group. Logits
are in units of log2 (multiplied by `scale * log2 e`), so that `exp2` is the exponential."""

from collections import namedtuple

import triton
import triton.language as tl

# kinds of KV ranges: the query at position i sees keys [lo, hi) of N; both ends rise with i
CAUSAL_WINDOW = tl.constexpr(0)  # i - reach .. i
TWO_SIDED_WINDOW = tl.constexpr(1)  # i - reach .. i + reach
COMPRESSED = tl.constexpr(2)  # keys that end at or before i; one ends every `stride` tokens
EVERYTHING = tl.constexpr(3)
LOCAL_BLOCKS = tl.constexpr(4)  # i's block of `stride` tokens, up to i, and `reach` before it

# the prefix: none, seen by every query, or causal (key n by the queries from position n on)
NO_PREFIX, OPEN_PREFIX, CAUSAL_PREFIX = (tl.constexpr(i) for i in range(3))

# a tensor as one kernel argument: its pointer, and the strides of sequences or pages, of positions
# and of heads. Triton binds a named tuple in less time than flat arguments
Strided = namedtuple("Strided", "ptr b n h")
# gates [B T H 3] and their strides
Gates = namedtuple("Gates", "ptr b t h branch")
# for a kernel that also writes the layer's output, `out`, as it can if one program owns a row: the
# other branches' outputs [B T H E], contiguous as `out`, and gates [B T H 3] with their strides
Combine = namedtuple(
    "Combine", "cmp win gates out b t h branch", defaults=(None, None, None, None, 0, 0, 0, 0)
)


@triton.jit
def grid_position(FLIPPED: tl.constexpr):
    """This program's tile and line in a grid of `launch.grid`, and the number of both."""
    TILES: tl.constexpr = 1 if FLIPPED else 0
    LINES: tl.constexpr = 0 if FLIPPED else 1
    tile, line = tl.program_id(TILES), tl.program_id(LINES)
    return tile, line, tl.num_programs(TILES), tl.num_programs(LINES)


@triton.jit
def rare(pointer, n):
    """Mark a branch as rarely taken: the store never happens (n is not negative), but the compiler
    does not compute the branch always and select its result."""
    tl.store(pointer, 0.0, mask=n < 0)


@triton.jit
def interval(i, N, floor, reach, stride, KIND: tl.constexpr):
    """First key and one past the last key that query i sees; of a window none below `floor`."""
    lo = i * 0
    hi = lo + N
    if KIND == CAUSAL_WINDOW:
        lo, hi = tl.maximum(i - reach, floor), i + 1
    if KIND == TWO_SIDED_WINDOW:
        lo, hi = tl.maximum(i - reach, floor), i + reach + 1
    if KIND == COMPRESSED:
        hi = i // stride
    if KIND == LOCAL_BLOCKS:
        lo, hi = tl.maximum(i // stride * stride - reach, floor), i + 1
    return lo, tl.minimum(hi, N)


@triton.jit
def local_start(position, kv_range):
    """The first key of a position's local blocks inside a window."""
    first_key = position // kv_range.inner_stride * kv_range.inner_stride - kv_range.inner_reach
    return tl.maximum(first_key, kv_range.inner_floor)


@triton.jit
def prefix_end(position, P, PREFIX: tl.constexpr):
    """End of the prefix keys that each query sees, of P keys."""
    return tl.minimum(position + 1, P) if PREFIX == CAUSAL_PREFIX else position * 0 + P


@triton.jit
def document_interval(lo, hi, token, T, firsts, lasts, unit):
    """KV ranges [lo, hi) cut to the documents of tokens, bounded by the tokens at `firsts` and
    `lasts`. A key covers `unit` tokens."""
    token = tl.minimum(tl.maximum(token, 0), T - 1)
    lo = tl.maximum(lo, tl.load(firsts + token) // unit)
    return lo, tl.minimum(hi, tl.cdiv(tl.load(lasts + token), unit))


@triton.jit
def seen_by(n, last, reach, stride, KIND: tl.constexpr):
    """First query position that sees key n (may be negative), and one past the last that sees key
    `last`, without regard to the floor."""
    first = n * 0
    end = last * 0 + 0x7FFFFFFF
    if KIND == CAUSAL_WINDOW:
        first, end = n, last + reach + 1
    if KIND == TWO_SIDED_WINDOW:
        first, end = n - reach, last + reach + 1
    if KIND == COMPRESSED:
        first = (n + 1) * stride
    if KIND == LOCAL_BLOCKS:
        first, end = n, ((last + reach) // stride + 1) * stride
    return first, end


@triton.jit
def query_tiles(
    n0, last, seen, start, T, kv_range, split, splits, TOKENS: tl.constexpr, INNER: tl.constexpr
):
    """Tiles of TOKENS queries of one split that see keys n0 .. last: the first one, the first whose
    queries all see all keys (with INNER none as a local key), the end of these, the end of all.
    `seen` are positions: first and end of those that see some keys, then of those that see all."""
    first, end, full, full_end = seen
    begin = tl.maximum(first - start, 0) // TOKENS
    end = tl.cdiv(tl.minimum(tl.maximum(end - start, 0), T), TOKENS)
    split_tiles = tl.cdiv(tl.maximum(end - begin, 0), splits)
    begin += split * split_tiles
    end = tl.minimum(begin + split_tiles, end)
    full = tl.maximum(tl.cdiv(tl.maximum(full - start, 0), TOKENS), begin)
    full_end = tl.minimum(tl.minimum(tl.maximum(full_end - start, 0), T) // TOKENS, end)
    if INNER:
        _local_begin, local_end = seen_by(
            n0, last, kv_range.inner_reach, kv_range.inner_stride, LOCAL_BLOCKS
        )
        full = tl.maximum(full, tl.cdiv(tl.maximum(local_end - start, 0), TOKENS))
    full = tl.minimum(full, end)
    if n0 < kv_range.floor:
        full_end = full
    return begin, full, tl.maximum(full_end, full), end


@triton.jit
def leaders(index, first_token, T, STRIDE: tl.constexpr):
    """Of each group's leader: its position, its token (negative if it came before this call), and
    whether this call ranks it."""
    position = (first_token // STRIDE + index) * STRIDE
    token = position - first_token
    return position, token, (token >= 0) & (token < T)


@triton.jit
def candidates_end(position, C, LOCAL: tl.constexpr, d: tl.constexpr, s: tl.constexpr,
                   CAUSAL: tl.constexpr):  # fmt: skip
    """One past the last block that a query may rank, of C; LOCAL counts its own block."""
    end = position * 0 + C
    if CAUSAL:
        WIDER: tl.constexpr = d if d > s else s
        complete = position // WIDER * (WIDER // s)
        end = tl.minimum(end, tl.minimum(complete, position // s - (LOCAL - 1)))
    return end


@triton.jit
def two_halves(x, ROWS: tl.constexpr = 1):
    """Rows [M, D] as float16 `high + low`, each ROWS of them scaled by one power of two; also the
    factors [M] that undo the scaling. The error is at most 2^-23 of the largest element of them."""
    bits = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True)
    if ROWS > 1:
        groups: tl.constexpr = x.shape[0] // ROWS
        of_rows = tl.max(tl.reshape(bits, [groups, ROWS]), 1)
        bits = tl.reshape(tl.broadcast_to(of_rows[:, None], [groups, ROWS]), [x.shape[0]])
    exponent = tl.minimum(tl.maximum(bits >> 23, 1), 253)
    x = x * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    high = x.to(tl.float16)
    low = (x - high.to(tl.float32)).to(tl.float16)
    return high, low, (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def quotient(x, y):
    """The quotient of a constant x and a tensor y, rounded once."""
    return tl.div_rn(tl.full(y.shape, x, tl.float32), y)


@triton.jit
def cut_quotient(x, y):
    """`quotient` cut to 12 bits: `reference.cut_quotient`."""
    return (quotient(x, y).to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)


@triton.jit
def factor_of_integers(largest, BITS: tl.constexpr = 8):
    """The factor of `reference.quantize`, for numbers up to `largest`."""
    return cut_quotient(127.0 if BITS == 8 else 119.0, tl.maximum(largest, 1e-30))


@triton.jit
def round_even(x):
    """Floats below 2^22 rounded half to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def factor_of_rows(x, ROWS: tl.constexpr, BITS: tl.constexpr = 8):
    """The factors [M] of rows of absolute values x [M, D], one for each ROWS of them."""
    M: tl.constexpr = x.shape[0]
    factor = factor_of_integers(tl.max(tl.reshape(x, [M // ROWS, ROWS * x.shape[1]]), 1), BITS)
    return tl.reshape(tl.broadcast_to(factor[:, None], [M // ROWS, ROWS]), [M])


@triton.jit
def step_of_codes(least, largest):
    """The step of `reference.four_bits`, of integers from `least` to `largest`."""
    return tl.maximum((largest - least + 14).to(tl.int32) // 15, 1).to(tl.float32)


@triton.jit
def code_of(x, least, step):
    """The codes of `reference.four_bits`, as floats."""
    return round_even((x - least) * cut_quotient(1.0, step))


@triton.jit
def quantize(x, ROWS: tl.constexpr, BITS: tl.constexpr = 8):
    """Rows x [M, D] of float32 as 8-bit integers, as floats, and their sizes [M], one for each ROWS
    of them: `reference.quantize`. With 4 BITS each ROWS of them take 16 values a feature."""
    M: tl.constexpr = x.shape[0]
    factor = factor_of_rows(tl.abs(x), ROWS, BITS)
    integers = round_even(x * factor[:, None])
    if BITS == 4:
        in_blocks = tl.reshape(integers, [M // ROWS, ROWS, x.shape[1]])
        least = tl.min(in_blocks, 1, keep_dims=True)
        step = step_of_codes(least, tl.max(in_blocks, 1, keep_dims=True))
        values = least + code_of(in_blocks, least, step) * step
        integers = tl.reshape(values, [M, x.shape[1]])
    return integers, quotient(1.0, factor)


@triton.jit
def large(x, WIDE: tl.constexpr):
    """x in 64 bits if offsets formed from it may need them; 32 bits take fewer registers."""
    return x.to(tl.int64) if WIDE else x


@triton.jit
def narrow(x, WIDE: tl.constexpr):
    """x, of 64 bits, in 32 bits if offsets formed from it fit."""
    return x if WIDE else x.to(tl.int32)


@triton.jit
def load_rows(
    base, offsets, WIDTH: tl.constexpr, BLOCK: tl.constexpr, mask, STREAM: tl.constexpr = False
):  # fmt: skip
    """Rows [M, BLOCK] that begin at `base + offsets`; zeros where mask is False and past WIDTH.
    With STREAM the cache evicts them first."""
    d = tl.arange(0, BLOCK)
    exists = mask[:, None] if WIDTH == BLOCK else mask[:, None] & (d[None] < WIDTH)
    pointers = base + offsets[:, None] + d[None]
    POLICY: tl.constexpr = "evict_first" if STREAM else ""
    return tl.load(pointers, mask=exists, other=0.0, eviction_policy=POLICY)


@triton.jit
def load_keys(
    keys, b, h, n, n0, valid, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    """Rows n of head h of `keys` [B N K WIDTH], zeros where `valid` is False. With TMA `keys` is a
    descriptor, rows are n0 and the following positions, and only rows outside the tensor are
    zeros."""
    if TMA:
        corner = tl.cast(b, tl.int32), tl.cast(n0, tl.int32), tl.cast(h, tl.int32)
        tile = keys.load([corner[0], corner[1], corner[2], 0])
        return tl.reshape(tile, [n.shape[0], BLOCK])
    else:
        base = keys.ptr + b * keys.b + h * keys.h
        return load_rows(base, n.to(tl.int64) * keys.n, WIDTH, BLOCK, valid)


@triton.jit
def store_rows(
    base, offsets, value, WIDTH: tl.constexpr, BLOCK: tl.constexpr, mask,
    STREAM: tl.constexpr = False,
):  # fmt: skip
    """Write rows [M, BLOCK], up to WIDTH, to `base + offsets` where mask is True. With STREAM the
    cache evicts them first."""
    d = tl.arange(0, BLOCK)
    exists = mask[:, None] if WIDTH == BLOCK else mask[:, None] & (d[None] < WIDTH)
    pointers = base + offsets[:, None] + d[None]
    POLICY: tl.constexpr = "evict_first" if STREAM else ""
    tl.store(pointers, value.to(base.dtype.element_ty), mask=exists, eviction_policy=POLICY)


@triton.jit
def soft_capped(x, cap):
    """`cap tanh(x / cap)`, with tanh to float32's precision: a series near 0 (coefficients of
    Cephes), else exp2."""
    x /= cap
    z = x * x
    series = -5.70498872745e-3
    series = series * z + 2.06390887954e-2
    series = series * z - 5.37397155531e-2
    series = series * z + 1.33314422036e-1
    series = series * z - 3.33332819422e-1
    remainder = 2.0 / (tl.exp2(tl.minimum(tl.abs(x), 20.0) * 2.8853900817779268) + 1.0)
    saturated = tl.where(x < 0.0, remainder - 1.0, 1.0 - remainder)
    return cap * tl.where(tl.abs(x) < 0.625, series * z * x + x, saturated)


@triton.jit
def logits(x, y, scale_log2, cap, F: tl.constexpr):
    """Logits x y^T [M, N] of queries and keys; unless PLAIN scaled, and capped with CAP. Products
    that are PLAIN are left to be scaled with their exponentials, by `logits_scale`."""
    # in float32 errors of "tf32x3" are up to four times as large
    s = tl.dot(x, tl.trans(y), input_precision="ieee")
    if not F.PLAIN:
        s *= scale_log2
    if F.CAP:
        s = soft_capped(s, cap)
    return s


@triton.jit
def logits_scale(scale_log2, F: tl.constexpr):
    """What `logits` are to be multiplied by."""
    return scale_log2 if F.PLAIN else 1.0


@triton.jit
def cap_slope(capped, cap):
    """The derivative of `soft_capped` where its value is `capped`."""
    y = capped / cap
    return 1.0 - y * y


@triton.jit
def load_sinks(sinks, head):
    """Sink logits of the rows' heads, in units of log2."""
    return tl.load(sinks + head) * 1.4426950408889634


@triton.jit
def finite_log2(lse):
    """Log-sum-exps in units of log2, 0 for an empty row, whose tile may have keys."""
    return tl.where(lse == float("-inf"), 0.0, lse * 1.4426950408889634)


@triton.jit
def tile_rows(tile, T, G: tl.constexpr, BLOCK_M: tl.constexpr):
    """The rows of a query tile: token and group head of each, and whether the row exists. Rows run
    over the heads first. A tile holds as many whole tokens as fit, for any G <= BLOCK_M."""
    TOKENS: tl.constexpr = BLOCK_M // G
    row = tl.arange(0, BLOCK_M)
    token = tile * TOKENS + row // G
    return token, row % G, (row < TOKENS * G) & (token < T)


@triton.jit
def softmax_step(s, v, acc, m, l):
    """Fold logits s [M, N] and values v [N, E] into the running (acc [M, E], m [M], l [M])."""
    m_new = tl.maximum(m, tl.max(s, 1))
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # rows without keys so far
    p, alpha = tl.exp2(s - m_safe[:, None]), tl.exp2(m - m_safe)
    acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return acc, m_new, l * alpha + tl.sum(p, 1)


@triton.jit
def scaled_step(s, scale, bias, v, acc, m, l):
    """`softmax_step` of logits `scale s + bias[:, None]`, for a scale > 0. One FMA per element
    scales s and subtracts the maximum."""
    m_old, m = m, tl.maximum(m, tl.max(s, 1) * scale + bias)
    m_safe = tl.where(m == float("-inf"), 0.0, m)
    alpha = tl.exp2(m_old - m_safe)
    acc, l = acc * alpha[:, None], l * alpha
    p = tl.exp2(s * scale + (bias - m_safe)[:, None])
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return acc, m, l + tl.sum(p, 1)


@triton.jit
def join_softmaxes(acc, m, l, other_acc, other_m, other_l):
    """Combine two running softmaxes."""
    top = tl.maximum(m, other_m)
    safe = tl.where(top == float("-inf"), 0.0, top)
    a, b = tl.exp2(m - safe), tl.exp2(other_m - safe)
    return acc * a[:, None] + other_acc * b[:, None], top, l * a + other_l * b


@triton.jit
def store_softmax(out, lse, row, acc, m, l, E: tl.constexpr, BLOCK_E: tl.constexpr, real):
    """Write out and natural lse of a running softmax. Returns out [M, E] in float32."""
    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    acc *= (1.0 / l)[:, None]
    store_rows(out, row * E, acc, E, BLOCK_E, real)
    log = tl.where(empty, float("-inf"), (m + tl.log2(l)) * 0.6931471805599453)
    tl.store(lse + row, log, mask=real)
    return acc


@triton.jit
def store_combined(
    combine, sel, b, token, head, row, E: tl.constexpr, BLOCK_E: tl.constexpr, real
):  # fmt: skip
    """Write rows of `g_cmp cmp + g_sel sel + g_win win` to the layer's output."""
    gate = combine.gates + b * combine.b + token.to(tl.int64) * combine.t + head * combine.h
    g = tl.load(gate + combine.branch, mask=real, other=0.0).to(tl.float32)
    acc = g[:, None] * sel
    g = tl.load(gate, mask=real, other=0.0).to(tl.float32)
    acc += g[:, None] * load_rows(combine.cmp, row * E, E, BLOCK_E, real).to(tl.float32)
    g = tl.load(gate + 2 * combine.branch, mask=real, other=0.0).to(tl.float32)
    acc += g[:, None] * load_rows(combine.win, row * E, E, BLOCK_E, real).to(tl.float32)
    store_rows(combine.out, row * E, acc, E, BLOCK_E, real)


@triton.jit
def softmax_grad(s, scale, dp, lse, delta, GATED: tl.constexpr):
    """Probabilities and the gradient of logits `scale s`, from dp = d_out . v; `lse` and `delta`
    broadcast along the keys, with GATED those of a gated output (`launch.BackwardInputs`)."""
    p = tl.exp2(s * scale - lse)
    if GATED:
        sign = delta.to(tl.int32, bitcast=True) << 31
        p = (p.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
    return p, p * (dp - delta)
