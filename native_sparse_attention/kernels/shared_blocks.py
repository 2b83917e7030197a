"""The selected branch of neighbouring queries that chose differently: each block that one of them
chose is read once for all, and attended to by those that chose it. In Gluon, for a Hopper.

A program holds the queries of PARTS x WARPS tokens, of one group of heads, one token a warp. One
warp more reads: the blocks of their union, one after the other, into a ring of CHUNK x CHUNKS. A
warp attends to a block that its token chose and passes by the others; the warps of a part meet once
in CHUNK blocks. So nothing is computed that is masked, and little is waited for.

A scalar is the same in all threads of a part, but for `warp_number` and what is made of it: a
branch on that is one that each warp takes for itself, and may hold nothing for which warps meet.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, mma_v2

from .shared_steps import LENGTHS, flat, load_row_block, place_of, read, ring, rows_of, warp_number


@gluon.jit
def fold(q, k_tile, v_tile, acc, m, l, scale_log2, BY_BOUND: gl.constexpr, SLICE: gl.constexpr):
    """A block of keys and values into a running softmax, SLICE keys at a time; see
    `device.scaled_step`."""
    MMA: gl.constexpr = acc.type.layout
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    for i in gl.static_range(k_tile.shape[0] // SLICE):
        keys = k_tile.slice(i * SLICE, SLICE, 0).permute((1, 0)).load(RIGHT)
        x = mma_v2(q, keys, gl.zeros([q.shape[0], SLICE], gl.float32, MMA))
        if BY_BOUND:
            p = gl.exp2(x * scale_log2 - m[:, None])
        else:
            before = m
            m = gl.maximum(m, gl.max(x, 1) * scale_log2)
            origin = gl.where(m == float("-inf"), 0.0, m)
            p, alpha = gl.exp2(x * scale_log2 - origin[:, None]), gl.exp2(before - origin)
            acc, l = acc * alpha[:, None], l * alpha
        l += gl.sum(p, 1)
        values = v_tile.slice(i * SLICE, SLICE, 0).load(RIGHT)
        acc = mma_v2(gl.convert_layout(p.to(q.dtype), q.type.layout), values, acc)
    return acc, m, l


@gluon.jit
def finish(
    acc, m, l, out, lse, mix_cmp, mix_win, mix_gates, mixed, b, r, token, T, R, g_b, g_t, g_h, g_3,
    G: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, ADD: gl.constexpr, MIX: gl.constexpr,
):  # fmt: skip
    """Write out and lse of a tile that begins at `token`, with ADD of the keys seen so far and
    these; and with MIX the layer's output."""
    M: gl.constexpr = acc.shape[0]
    E: gl.constexpr = acc.shape[1]
    FLAT: gl.constexpr = flat(WARPS, E)
    ROW: gl.constexpr = gl.SliceLayout(1, FLAT)
    row, real = rows_of(b, r, token, T, R, G, ROWS, M, ROW)
    feature = gl.arange(0, E, gl.SliceLayout(0, FLAT))

    empty = l == 0.0
    l = gl.where(empty, 1.0, l)
    # rounded as it is exchanged, for which there is little room
    acc = (acc * (1.0 / l)[:, None]).to(out.dtype.element_ty)
    acc = gl.convert_layout(acc, FLAT).to(gl.float32)
    log = gl.convert_layout(gl.where(empty, float("-inf"), m + gl.log2(l)), ROW)
    if ADD:
        before = gl.load(lse + row, mask=real, other=float("-inf")) * 1.4426950408889634
        top = gl.maximum(before, log)
        top = gl.where(top == float("-inf"), 0.0, top)
        w, w_before = gl.exp2(log - top), gl.exp2(before - top)
        total = w + w_before
        none = total == 0.0
        total = gl.where(none, 1.0, total)
        acc = acc * (w / total)[:, None]
        acc += load_row_block(out, row, E, feature, real) * (w_before / total)[:, None]
        log = gl.where(none, float("-inf"), top + gl.log2(total))
    at = row[:, None] * E + feature[None]
    gl.store(out + at, acc.to(out.dtype.element_ty), mask=real[:, None])
    gl.store(lse + row, log * 0.6931471805599453, mask=real)
    if MIX:
        i = gl.arange(0, M, ROW)
        gate = mix_gates + b * g_b + (token + i // ROWS).to(gl.int64) * g_t
        gate += (r * G + i % ROWS) * g_h
        x = gl.load(gate + g_3, mask=real, other=0.0).to(gl.float32)[:, None] * acc
        x += gl.load(gate, mask=real, other=0.0).to(gl.float32)[:, None] * load_row_block(
            mix_cmp, row, E, feature, real
        )
        x += gl.load(gate + 2 * g_3, mask=real, other=0.0).to(gl.float32)[:, None] * load_row_block(
            mix_win, row, E, feature, real
        )
        gl.store(mixed + at, x.to(mixed.dtype.element_ty), mask=real[:, None])


@gluon.jit
def attend(
    norms, entries, counts, out, lse, mix_cmp, mix_win, mix_gates, mixed, T, K, R, limit, groups,
    tiles, scale_log2, g_b, g_t, g_h, g_3,
    k_smem, v_smem, full, empty,
    PART: gl.constexpr, G: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr,
    WARPS: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr, SLICE: gl.constexpr,
    EACH: gl.constexpr, BOUNDED: gl.constexpr, ADD: gl.constexpr, MIX: gl.constexpr,
):  # fmt: skip
    """A part: its tokens' attention to the blocks that they chose."""
    M: gl.constexpr = WARPS * ROWS
    D: gl.constexpr = k_smem.shape[4]
    E: gl.constexpr = v_smem.shape[4]
    BLOCK_N: gl.constexpr = k_smem.shape[2]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    number = PART * WARPS + warp_number() % WARPS
    done = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, r, h, group = place_of(tile, groups, K, R)
        n = gl.load(counts + tile)
        at = entries + tile.to(gl.int64) * limit
        e = gl.load(at, mask=n > 0, other=0)
        # of all places: what is done with here must not count for what was there before
        turn = done % CHUNKS
        for i in gl.static_range(CHUNK):
            mbarrier.wait(full[i].index(turn), (done // CHUNKS) & 1)
        q_tile = (k_smem if PART == 0 else v_smem).index(turn * CHUNK).reshape([M, D])
        q = q_tile.load(gl.DotOperandLayout(0, MMA, 2))
        m = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
        by_bound = False
        if BOUNDED:
            x = q_tile.load(MMA).to(gl.float32)
            bound = gl.sqrt(gl.sum(x * x, 1)) * (gl.load(norms + b * K + h) * gl.abs(scale_log2))
            by_bound = gl.max(bound, 0) <= 48.0
            m = gl.where(by_bound, bound, m)
        for i in gl.static_range(CHUNK):
            async_copy.mbarrier_arrive(empty[i].index(turn), increment_count=False)
        done += 1

        acc = gl.zeros([M, E], gl.float32, MMA)
        l = gl.zeros([M], gl.float32, gl.SliceLayout(1, MMA))
        # by the bound, or else by the maximum
        for way in gl.static_range(0 if BOUNDED else 1, 2):
            count = n
            if BOUNDED:
                count = gl.where(by_bound == (way == 0), n, 0)
            for j in range(0, count, CHUNK):
                turn, phase = done % CHUNKS, (done // CHUNKS) & 1
                if EACH:
                    for i in gl.static_range(CHUNK):
                        chosen = ((e >> 32).to(gl.int32) >> number) & 1
                        e = gl.load(at + j + i + 1, mask=j + i + 1 < n, other=0)
                        mbarrier.wait(full[i].index(turn), phase)
                        if chosen != 0:
                            place = turn * CHUNK + i
                            acc, m, l = fold(
                                q, k_smem.index(place).reshape([BLOCK_N, D]),
                                v_smem.index(place).reshape([BLOCK_N, E]), acc, m, l, scale_log2,
                                way == 0, SLICE,
                            )  # fmt: skip
                        async_copy.mbarrier_arrive(empty[i].index(turn), increment_count=False)
                else:
                    for i in gl.static_range(CHUNK):
                        mbarrier.wait(full[i].index(turn), phase)
                    for i in range(CHUNK):
                        chosen = ((e >> 32).to(gl.int32) >> number) & 1
                        e = gl.load(at + j + i + 1, mask=j + i + 1 < n, other=0)
                        if chosen != 0:
                            place = turn * CHUNK + i
                            acc, m, l = fold(
                                q, k_smem.index(place).reshape([BLOCK_N, D]),
                                v_smem.index(place).reshape([BLOCK_N, E]), acc, m, l, scale_log2,
                                way == 0, SLICE,
                            )  # fmt: skip
                    for i in gl.static_range(CHUNK):
                        async_copy.mbarrier_arrive(empty[i].index(turn), increment_count=False)
                done += 1
        token = (group * PARTS + PART) * WARPS
        finish(
            acc, m, l, out, lse, mix_cmp, mix_win, mix_gates, mixed, b, r, token, T, R, g_b, g_t,
            g_h, g_3, G, ROWS, WARPS, ADD, MIX,
        )  # fmt: skip


@gluon.jit(do_not_specialize=LENGTHS)
def forward_kernel(
    q, k, v, norms, entries, counts, out, lse, mix_cmp, mix_win, mix_gates, mixed, T, K, R, limit,
    s, groups, tiles, scale_log2, g_b, g_t, g_h, g_3,
    G: gl.constexpr, WARPS: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr,
    SLICE: gl.constexpr, EACH: gl.constexpr, REGISTERS: gl.constexpr, BOUNDED: gl.constexpr,
    ADD: gl.constexpr, MIX: gl.constexpr,
):  # fmt: skip
    """One program: every so many tiles, of the tokens of a group of lists. Writes out and lse, with
    ADD of the keys seen so far and these; and with MIX the layer's output."""
    PARTS: gl.constexpr = 2
    ROWS: gl.constexpr = q.block_shape[2]
    k_smem, v_smem, full, empty = ring(k, v, PARTS, WARPS, CHUNK, CHUNKS)
    gl.warp_specialize(
        [
            (attend, (
                norms, entries, counts, out, lse, mix_cmp, mix_win, mix_gates, mixed, T, K, R,
                limit, groups, tiles, scale_log2, g_b, g_t, g_h, g_3, k_smem, v_smem, full, empty,
                0, G, ROWS, PARTS, WARPS, CHUNK, CHUNKS, SLICE, EACH, BOUNDED, ADD,
                MIX,
            )),
            (attend, (
                norms, entries, counts, out, lse, mix_cmp, mix_win, mix_gates, mixed, T, K, R,
                limit, groups, tiles, scale_log2, g_b, g_t, g_h, g_3, k_smem, v_smem, full, empty,
                1, G, ROWS, PARTS, WARPS, CHUNK, CHUNKS, SLICE, EACH, BOUNDED, ADD,
                MIX,
            )),
            (read, (
                (q,), k, v, entries, counts, K, R, limit, s, groups, tiles, k_smem, v_smem, full,
                empty, G, PARTS, WARPS, CHUNK, CHUNKS,
            )),
        ],
        [WARPS, 1],
        [REGISTERS, 24],
    )  # fmt: skip
