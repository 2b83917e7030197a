"""Epilogue of a query tile: it reads and writes rows with coalesced accesses. In Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def fetch_rows(base, row, real, BYTES: gl.constexpr):
    """Prefetch rows of a tensor, BYTES each, into the L2 cache."""
    gl.inline_asm_elementwise(
        """{
            .reg .pred p;
            setp.ne.b32 p, $2, 0;
            @p cp.async.bulk.prefetch.L2.global [$1], $3;
            mov.u32 $0, 0;
        }""", "=r,l,r,r",
        [base + row, real.to(gl.int32), gl.full(row.shape, BYTES, gl.int32, row.type.layout)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def flat(warps, width):
    """Layout of a tile with 16 rows per warp: as a product's accumulator, but a thread holds 8
    consecutive features. A conversion exchanges elements only between threads of one row."""
    features = [[0, 1 << bit] for bit in range(width.bit_length() - 1)]
    rows = [[1 << bit, 0] for bit in range(3 + warps.bit_length())]
    return gl.DistributedLinearLayout(
        reg_bases=[*features[:3], *features[5:], rows[3]],
        lane_bases=[*features[3:5], *rows[:3]],
        warp_bases=rows[4:],
        block_bases=[],
        shape=[16 * warps, width],
    )


@gluon.jit
def rows_of(
    b, r, first, T, R, G: gl.constexpr, GROUP: gl.constexpr, M: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Row indices into [B T H] for the rows of tokens from `first` on, and whether a row exists."""
    i = gl.arange(0, M, LAYOUT)
    token, g = first + i // GROUP, i % GROUP
    return (b * T + token).to(gl.int64) * (R * G) + r * G + g, (g < G) & (token < T)


@gluon.jit
def finish(
    acc, m, l, out, lse, combine_cmp, combine_win, combine_gates, layer_out, b, r, token, T, R,
    g_b, g_t, g_h, g_3, G: gl.constexpr, GROUP: gl.constexpr, WARPS: gl.constexpr,
    ADD: gl.constexpr, COMBINE: gl.constexpr,
):  # fmt: skip
    """Write out and lse of a tile that begins at `token`. ADD combines them with the stored out and
    lse of other keys. COMBINE also writes the layer's output."""
    M: gl.constexpr = acc.shape[0]
    E: gl.constexpr = acc.shape[1]
    FLAT: gl.constexpr = flat(WARPS, E)
    ROW: gl.constexpr = gl.SliceLayout(1, FLAT)
    row, real = rows_of(b, r, token, T, R, G, GROUP, M, ROW)
    feature = gl.arange(0, E, gl.SliceLayout(0, FLAT))

    # all loads come before the first store: no load is moved ahead of a store
    at = row[:, None] * E + feature[None]
    there = real[:, None]
    if ADD:
        stored_lse = gl.load(lse + row, mask=real, other=float("-inf")) * 1.4426950408889634
        stored_out = gl.load(out + at, mask=there, other=0.0)
    if COMBINE:
        i = gl.arange(0, M, ROW)
        gate = combine_gates + b.to(gl.int64) * g_b + (token + i // GROUP).to(gl.int64) * g_t
        gate += (r * G + i % GROUP).to(gl.int64) * g_h
        gate_cmp = gl.load(gate, mask=real, other=0.0).to(gl.float32)
        gate_sel = gl.load(gate + g_3, mask=real, other=0.0).to(gl.float32)
        gate_win = gl.load(gate + 2 * g_3, mask=real, other=0.0).to(gl.float32)
        cmp = gl.load(combine_cmp + at, mask=there, other=0.0)
        win = gl.load(combine_win + at, mask=there, other=0.0)

    empty = l == 0.0
    l = gl.where(empty, 1.0, l)
    # round before the layout conversion: shared memory for the exchange is small
    acc = (acc * (1.0 / l)[:, None]).to(out.dtype.element_ty)
    acc = gl.convert_layout(acc, FLAT).to(gl.float32)
    log = gl.convert_layout(gl.where(empty, float("-inf"), m + gl.log2(l)), ROW)
    if ADD:
        top = gl.maximum(stored_lse, log)
        top = gl.where(top == float("-inf"), 0.0, top)
        w, w_stored = gl.exp2(log - top), gl.exp2(stored_lse - top)
        w_sum = w + w_stored
        none = w_sum == 0.0
        w_sum = gl.where(none, 1.0, w_sum)
        acc = acc * (w / w_sum)[:, None] + stored_out.to(gl.float32) * (w_stored / w_sum)[:, None]
        log = gl.where(none, float("-inf"), top + gl.log2(w_sum))
    gl.store(out + at, acc.to(out.dtype.element_ty), mask=there)
    gl.store(lse + row, log * 0.6931471805599453, mask=real)
    if COMBINE:
        x = gate_sel[:, None] * acc + gate_cmp[:, None] * cmp.to(gl.float32)
        x += gate_win[:, None] * win.to(gl.float32)
        gl.store(layer_out + at, x.to(layer_out.dtype.element_ty), mask=there)
