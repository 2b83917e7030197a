"""The selected branch, query-major: a tile of tokens that share block indices reads their blocks of
keys and values. Forward and dq.

Rows of a tile are tokens x heads. Block indices [B T R n] are -1 for empty slots; each of the R
head groups of a token has G = H / R query heads. Tokens of an aligned group of `stride` share block
indices.

A union has the blocks of a group, `members` neighbouring members of one head group; a member is an
aligned group of `stride` tokens. A packed block has the block in its low 32 bits, a bit per member
that chose it in its high 32. By `launch.UnionRule` the device decides which groups overlap enough
to have a union: one launch reads these, another the other groups. For `union_sm90.py` all groups
have one, whose blocks have an order for that kernel.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import launch
from ..common import primitives as steps
from ..common.precompile import launcher
from .inputs import Args, Backward, Facts, Inputs

# comparisons of block indices of a program at most, and block indices of a one-warp program
MAX_COMPARISONS, WARP_INDICES = 1 << 14, 256
# blocks of a chunk of a union that `union_sm90.py` reads
CHUNK = 3
# one compiled kernel for all lengths
LENGTHS = ["T", "S", "start", "groups", "limit", "members"]

# compile-time settings of unions. CHUNK: all groups have a union, in the order of chunks
UnionSettings = namedtuple("UnionSettings", "R MEMBERS STRIDE SLOTS CHUNK FLIPPED")


@triton.jit
def load_blocks(block_indices, b, r, token, slot, T, R, n):
    """Block indices of slots; -1 for empty ones. Tokens before the call share those of token 0."""
    line = (b * T + tl.maximum(token, 0)) * R + r
    return tl.load(block_indices + line * n + slot, mask=slot < tl.where(token < T, n, 0), other=-1)


@triton.jit
def spread_bits(x):
    """The low 8 bits, spread to the lowest of four bits each."""
    x = (x | (x << 12)) & 0x000F000F
    x = (x | (x << 6)) & 0x03030303
    return (x | (x << 3)) & 0x11111111


@triton.jit
def store_by_chunks(blocks, c, holders, leads, size, CHUNK: tl.constexpr):
    """Write packed blocks in an order in which a CHUNK has few blocks of one member."""
    # a key: number of members in the chunk that chose the block too, block, and mask of the members
    # that chose it, in 4, 18 and 8 bits; `none` is above all keys
    none = 0x40000000
    key = tl.where(leads, (c << 8) | holders, none)
    spread_holders = tl.where(leads, spread_bits(holders), 0)
    for first in range(0, size, CHUNK):
        used = size * 0
        for j in tl.static_range(CHUNK):
            score = key
            if j > 0:
                shared = ((spread_holders & used) * 0x11111111).to(tl.uint32, bitcast=True) >> 28
                score += shared.to(tl.int32) << 26
            best = tl.min(score, 0) & 0x3FFFFFF
            key = tl.where(key == best, none, key)
            used |= spread_bits(best & 0xFF)
            packed = ((best & 0xFF).to(tl.int64) << 32) | (best >> 8)
            tl.store(blocks + first + j, packed, mask=first + j < size)


@triton.jit(do_not_specialize=LENGTHS)
def nsa_selected_union(
    block_indices, blocks, counts, starts, start, T, n, limit, members, cost, F: tl.constexpr
):  # fmt: skip
    """One program: a group. Writes its union and the size, with a CHUNK ordered by chunks; without,
    a group with at least 1 / cost of the members' blocks has no union: its size is 0."""
    ALL: tl.constexpr = F.MEMBERS * F.SLOTS
    group, br, groups, _brs = steps.grid_position(F.FLIPPED)
    b, r = (br // F.R).to(tl.int64), br % F.R
    if starts is not None:
        start = tl.load(starts + b).to(tl.int32)
    first = group * (F.MEMBERS * F.STRIDE) - start % F.STRIDE
    i = tl.arange(0, ALL)
    member = i // F.SLOTS
    c = load_blocks(block_indices, b, r, first + member * F.STRIDE, i % F.SLOTS, T, F.R, n)
    holders = tl.full([ALL], 0, tl.int32)
    # few loops are unrolled: a program runs once, and unrolled code would have to be fetched
    for peer in range(0, members):
        same, token = c < -1, first + peer * F.STRIDE
        for first_slot in range(0, n, 4):
            for j in tl.static_range(4):
                same |= c == load_blocks(block_indices, b, r, token, first_slot + j, T, F.R, n)
        holders |= tl.where(same, 1 << peer, 0)

    # a block belongs to the first member that chose it
    leads = (c >= 0) & ((holders & ((1 << member) - 1)) == 0)
    size = tl.sum(leads.to(tl.int32), 0)
    line = br.to(tl.int64) * groups + group
    blocks += line * limit
    if F.CHUNK > 0:
        store_by_chunks(blocks, c, holders, leads, size, F.CHUNK)
    else:
        size = tl.where(size * cost < tl.sum((c >= 0).to(tl.int32), 0), size, 0)
        if size > 0:
            offset = tl.cumsum(leads.to(tl.int32), 0) - 1
            tl.store(blocks + offset, (holders.to(tl.int64) << 32) | c, mask=leads)
    tl.store(counts + line, size)


class Unions(NamedTuple):
    """Packed blocks [B R groups limit] of each group's union, and their number [B R groups], 0 for
    a group without a union; the members of a group; the cost of a block, relative to a block of one
    member, or 0 where all groups have a union, for `union_sm90.py`."""

    blocks: Tensor
    counts: Tensor
    members: int
    cost: float = 0.0

    def write(self, selection: launch.Selection) -> None:
        """Write the unions of the block indices."""
        (B, T, R, n), groups = selection.block_indices.shape, self.counts.shape[2]
        slots, chunk = launch.next_power_of_2(n), 0 if self.cost else CHUNK
        grid, flipped = launch.grid(groups, B * R)
        settings = UnionSettings(R, self.members, selection.stride, slots, chunk, flipped)
        launcher(nsa_selected_union, grid)(
            selection.block_indices, self.blocks, self.counts, selection.starts, selection.start, T,
            n, self.blocks.shape[3], self.members, self.cost, settings,
            num_warps=1 if self.members * slots <= (128 if chunk else WARP_INDICES) else 4,
        )  # fmt: skip


def allocate(selection: launch.Selection, members: int, limit: int, cost: float = 0.0) -> Unions:
    """Unions of `members` members each, of `limit` blocks at most, unwritten."""
    indices = selection.block_indices
    B, _T, R, _n = indices.shape
    groups = launch.cdiv(selection.aligned, members * selection.stride)
    blocks = indices.new_empty(B, R, groups, limit, dtype=torch.int64)
    counts = indices.new_empty(B, R, groups, dtype=torch.int32)
    return Unions(blocks, counts, members, cost)


def allocate_unions(inputs: Inputs) -> Unions | None:
    """The unwritten unions of a call; None if unions cannot be faster."""
    facts, n = inputs.facts, inputs.facts.F.n
    rule = launch.union_rule(facts.rows, facts.dtype)
    if rule is None or facts.F.GATES or not n:
        return None
    groups = facts.B * facts.F.R * launch.cdiv(facts.aligned, rule.members * facts.F.stride)
    if groups < rule.min_groups or rule.members * facts.F.SLOTS**2 > MAX_COMPARISONS:
        return None
    # a larger union is slower than its members
    limit = min(int(rule.members * n / rule.cost) + 1, rule.members * n)
    return allocate(inputs.selection, rule.members, limit, float(rule.cost))


@triton.jit
def tile_position(index, start, groups, F: tl.constexpr):
    """This program's tile, batch row, head group and KV head; position of the first token; and
    whether the launch reads the tile. `index.counts` is 0 for a group without a union."""
    tile, br, _tiles, _brs = steps.grid_position(F.FLIPPED)
    b, r = (br // F.R).to(tl.int64), (br % F.R).to(tl.int64)
    if F.RAGGED:
        start = tl.load(index.starts + b).to(tl.int32)
    is_read = True
    if F.MEMBERS > 1:
        group = tile if F.UNION else tile // F.MEMBERS
        count = tl.load(index.counts + (b * F.R + r) * groups + group)
        is_read = (count > 0) == F.UNION
    return tile, b, r, r * F.K // F.R, start, is_read


@triton.jit
def load_tile(q, index, b, r, tile, start, T, groups, F: tl.constexpr):
    """Queries of a tile; token, head, row of [B T H], validity and document's end of each; pointer
    to the blocks of the union, or the block indices up to the last valid one, and their number."""
    first = tile * F.TOKENS - start % F.stride
    i = tl.arange(0, F.BLOCK_M)
    token = first + i // F.G
    real = (i < F.TOKENS * F.G) & (token >= 0) & (token < T)
    if F.UNION:
        group = (b * F.R + r) * groups + tile
        blocks, length = index.blocks + group * F.n, tl.load(index.counts + group)
    else:
        # a token that has the tile's block indices
        index_token = tl.minimum(tl.maximum(first, 0), T - 1)
        blocks = index.blocks + ((b * T + index_token) * F.R + r) * F.n
        slot = tl.arange(0, F.SLOTS)
        c = tl.load(blocks + slot, mask=slot < F.n, other=-1)
        length = tl.max(tl.where(c >= 0, slot + 1, 0), 0)
    ends = token
    if F.ENDS:
        ends = tl.load(index.doc_last + b * T + token, mask=real, other=0)
    head = r * F.G + i % F.G
    row = (b * T + token) * (F.R * F.G) + head
    offsets = b * q.b + token.to(tl.int64) * q.n + head * q.h
    q_tile = steps.load_rows(q.ptr, offsets, F.D, F.BLOCK_D, real)
    return q_tile, token, head, row, real, ends, blocks, length


@triton.jit
def tile_keys(k, v, b, h, blocks, j0, n, S, F: tl.constexpr):
    """Keys and values from j0 on of n blocks, padded to BLOCK_S each: both tiles, positions and
    validity of the keys [N], and their packed blocks (a scalar if BLOCK_N <= BLOCK_S)."""
    j = j0 + tl.arange(0, F.BLOCK_N)
    slot = (j0 if F.BLOCK_N <= F.BLOCK_S else j) // F.BLOCK_S
    packed = tl.load(blocks + slot, mask=slot < n, other=-1)
    c = packed.to(tl.int32)
    key = c * F.s + j % F.BLOCK_S
    # key >= 0 stands for c >= 0: a scalar mask times a vector is an integer in Triton 3.9's
    # interpreter
    key0, valid = c * F.s + j0 % F.BLOCK_S, (key >= 0) & (j % F.BLOCK_S < F.s) & (key < S)
    k_tile = steps.load_keys(k, b, h, key, key0, valid, F.D, F.BLOCK_D, F.TMA)
    v_tile = steps.load_keys(v, b, h, key, key0, valid, F.E, F.BLOCK_E, F.TMA)
    return k_tile, v_tile, key, valid, packed


@triton.jit
def visible_keys(valid, key, position, end, F: tl.constexpr):
    """Mask of the `valid` keys that rows see; all shapes broadcast."""
    if F.DIAGONAL:
        valid = valid & (key <= position)
    if F.ENDS:
        valid = valid & (key < end)
    return valid


@triton.jit
def mask_logits(logits, packed, key, valid, position, ends, F: tl.constexpr):
    """Logits [M, N], -inf for keys that a row does not see; with WHOLE a row sees all keys of the
    block or none, and has a bias of 0 or -inf instead."""
    bias = 0.0
    member = tl.arange(0, F.BLOCK_M) // (F.G * F.stride)
    if F.WHOLE:
        if F.UNION:
            sees = (((packed >> 32).to(tl.int32) >> member) & 1) != 0
        else:
            sees = tl.full([F.BLOCK_M], packed, tl.int32) >= 0
        bias = tl.where(sees, 0.0, float("-inf"))
    else:
        visible = valid[None]
        if F.UNION:
            members = (packed + tl.zeros_like(key)) >> 32
            members = members.to(tl.int32)[None] >> member[:, None]
            visible = visible & ((members & 1) != 0)
        visible = visible_keys(visible, key[None], position[:, None], ends[:, None], F)
        logits = tl.where(visible, logits, float("-inf"))
    return logits, bias


@triton.jit
def gated_logits(product, scale, cap, weight, F: tl.constexpr):
    """Logits before the gates of slots, capped; and with these in units of log2."""
    if F.CAP or F.GATES:
        logits = product * scale
        if F.CAP:
            logits = steps.soft_capped(logits, cap)
        logits2 = logits * weight * 1.4426950408889634
    else:
        logits, logits2 = product, product * (scale * 1.4426950408889634)
    return logits, logits2


@triton.jit
def slot_gates(gates, bt, r, j0, real, F: tl.constexpr):
    """Gates [M, N] of the slots of keys [N] from j0 on, for rows [M]."""
    slot = (j0 + tl.arange(0, F.BLOCK_N)) // F.BLOCK_S
    offset = ((bt * F.R + r) * F.n)[:, None] + slot[None]
    valid = real[:, None] & (slot < F.n)[None]
    return tl.load(gates + offset, mask=valid, other=1.0).to(tl.float32)


@triton.jit(do_not_specialize=LENGTHS)
def nsa_selected_fwd_query_major(
    q, k, v, index, out, lse, combine, T, S, start, groups, scale_log2, cap, F: tl.constexpr,
):  # fmt: skip
    """One program: a tile of tokens that share block indices, or a union. Writes out and lse, with
    ADD combined with the previous ones; with COMBINE also the layer's output."""
    tile, b, r, h, start, is_read = tile_position(index, start, groups, F)
    if is_read:
        q_tile, token, head, row, real, ends, blocks, length = load_tile(
            q, index, b, r, tile, start, T, groups, F
        )
        if F.ADD:
            acc = steps.load_rows(out, row * F.E, F.E, F.BLOCK_E, real).to(tl.float32)
            m = tl.load(lse + row, mask=real, other=float("-inf")) * 1.4426950408889634
            l = tl.where(m == float("-inf"), 0.0, 1.0)
        else:
            acc = tl.full([F.BLOCK_M, F.BLOCK_E], 0.0, tl.float32)
            m = tl.full([F.BLOCK_M], float("-inf"), tl.float32)
            l = tl.full([F.BLOCK_M], 0.0, tl.float32)

        unit_scale = steps.logits_scale(scale_log2, F)
        for j0 in range(0, length * F.BLOCK_S, F.BLOCK_N):
            k_tile, v_tile, key, valid, packed = tile_keys(k, v, b, h, blocks, j0, length, S, F)
            logits = steps.logits(q_tile, k_tile, scale_log2, cap, F)
            if F.GATES:
                logits *= slot_gates(index.gates, b * T + token, r, j0, real, F)
            logits, bias = mask_logits(logits, packed, key, valid, start + token, ends, F)
            acc, m, l = steps.scaled_step(logits, unit_scale, bias, v_tile, acc, m, l)

        acc = steps.store_softmax(out, lse, row, acc, m, l, F.E, F.BLOCK_E, real)
        if F.COMBINE:
            steps.store_combined(combine, acc, b, token, head, row, F.E, F.BLOCK_E, real)


@triton.jit(do_not_specialize=LENGTHS)
def nsa_selected_dq_query_major(
    q, k, v, index, bwd, dq, d_gates, T, S, start, groups, scale, cap, F: tl.constexpr
):
    """One program: like the forward. Writes dq, with ADD adds to dq; with GATES also each head's
    gradient of each slot's gate, [B T H n]."""
    tile, b, r, h, start, is_read = tile_position(index, start, groups, F)
    if is_read:
        q_tile, token, _head, row, real, ends, blocks, length = load_tile(
            q, index, b, r, tile, start, T, groups, F
        )
        do_tile = steps.load_rows(bwd.d_out, row * F.E, F.E, F.BLOCK_E, real)
        lse_row = tl.load(bwd.lse + row, mask=real, other=0.0)
        delta_row = tl.load(bwd.delta + row, mask=real, other=0.0)
        acc = tl.full([F.BLOCK_M, F.BLOCK_D], 0.0, tl.float32)
        gate_sum = tl.full([F.BLOCK_M], 0.0, tl.float32)

        for j0 in range(0, length * F.BLOCK_S, F.BLOCK_N):
            k_tile, v_tile, key, valid, packed = tile_keys(k, v, b, h, blocks, j0, length, S, F)
            product = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
            weight = 1.0
            if F.GATES:
                weight = slot_gates(index.gates, b * T + token, r, j0, real, F)
            logits, logits2 = gated_logits(product, scale, cap, weight, F)
            logits2, bias = mask_logits(logits2, packed, key, valid, start + token, ends, F)
            dp = tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee")
            seen_lse = lse_row - bias
            _p, ds = steps.softmax_grad(
                logits2, 1.0, dp, seen_lse[:, None], delta_row[:, None], F.GATED
            )
            if F.GATES:
                gate_grad, first_slot = ds * logits, j0 // F.BLOCK_S
                if F.BLOCK_N < F.BLOCK_S:  # a block takes several iterations; store at the last
                    gate_sum = tl.sum(gate_grad, 1) + tl.where(j0 % F.BLOCK_S == 0, 0.0, gate_sum)
                    complete = real & ((j0 + F.BLOCK_N) % F.BLOCK_S == 0)
                    tl.store(d_gates + row * F.n + first_slot, gate_sum, mask=complete)
                else:
                    SLOTS: tl.constexpr = F.BLOCK_N // F.BLOCK_S
                    gate_grad = tl.reshape(gate_grad, [F.BLOCK_M, SLOTS, F.BLOCK_S])
                    slot = first_slot + tl.arange(0, SLOTS)
                    offset = (row * F.n)[:, None] + slot[None]
                    valid_slots = real[:, None] & (slot < F.n)[None]
                    tl.store(d_gates + offset, tl.sum(gate_grad, 2), mask=valid_slots)
                ds *= weight
            if F.CAP:
                ds *= steps.cap_slope(logits, cap)
            acc += tl.dot(ds.to(k_tile.dtype), k_tile, input_precision="ieee")

        acc *= scale
        if F.ADD:
            acc += steps.load_rows(dq, row * F.D, F.D, F.BLOCK_D, real).to(tl.float32)
        steps.store_rows(dq, row * F.D, acc, F.D, F.BLOCK_D, real)


KERNELS = {"forward": nsa_selected_fwd_query_major, "dq": nsa_selected_dq_query_major}


@functools.lru_cache(maxsize=256)
def plan(kernel: str, facts: Facts, members: int, limit: int, **flags: bool) -> launch.Plan:
    """The launch of "forward" or "dq": of groups of `members` that have a union of up to `limit`
    blocks, or with a limit of 0 of the other groups."""
    F, s, is_union = facts.F, facts.F.s, limit > 0
    # the largest number of tokens that divides the stride and fits in a tile
    max_rows = launch.architecture().query_major_rows
    fitting = (t for t in range(1, F.stride + 1) if F.stride % t == 0 and t * F.G <= max_rows)
    tokens = max(fitting, default=1)
    if is_union:
        tokens, F = tokens * members, F._replace(n=limit)
    tile = launch.query_major_tile(kernel, max(F.D, F.E), tokens * F.G, facts.dtype, is_union)
    block_n, block_s = tile.block_n, launch.next_power_of_2(s)
    grid, flipped = launch.grid(launch.cdiv(facts.aligned, tokens), facts.B * F.R)
    # a tile has TOKENS tokens, a group MEMBERS members of `stride` tokens
    F = F._replace(
        BLOCK_M=tile.block_m, BLOCK_N=block_n, BLOCK_S=block_s, TOKENS=tokens, MEMBERS=members,
        UNION=is_union,
        # TMA reads blocks that are a multiple of a tile
        TMA=facts.tma and block_n <= min(block_s, launch.MAX_BOX_ROWS),
        # a row sees all keys of a tile or none
        WHOLE=block_n <= block_s == s and facts.whole,
        FLIPPED=flipped, **flags,
    )  # fmt: skip
    num_stages = tile.num_stages
    if F.GATES and kernel == "forward":  # gates take shared memory in every stage, as keys do
        num_stages = max(1, num_stages - 1)
    return launch.Plan(grid, dict(F=F, num_warps=tile.num_warps, num_stages=num_stages))


def launch_tiles(
    kernel: str, inputs: Inputs, unions: Unions | None, flags: Args, **args: Any
) -> None:
    """Launch "forward" or "dq" for groups without a union and with one."""
    q, k, v, facts = inputs.q, inputs.k, inputs.v, inputs.facts
    blocks, counts, members, _ = unions or (None, None, 1, 0.0)
    for limit in [0] if blocks is None else [0, blocks.shape[3]]:
        step = plan(kernel, facts, members, limit, **flags)
        F = step.args["F"]
        keys, values = (launch.keys_argument(t, F.BLOCK_N, F.TMA) for t in (k, v))
        launcher(KERNELS[kernel], step.grid)(
            q=launch.strided(q), k=keys, v=values, T=facts.T, S=facts.S,
            index=inputs.index(blocks if limit else None, counts), start=inputs.selection.start,
            groups=0 if counts is None else counts.shape[2], **args, **step.args,
        )  # fmt: skip


def forward(inputs: Inputs, unions: Unions | None, outputs: Args, flags: Args) -> None:
    """Writes `outputs`, arguments of the kernel."""
    cap = launch.cap(inputs.selection.soft_cap)
    scale_log2 = inputs.scale * launch.LOG2_E
    launch_tiles("forward", inputs, unions, flags, scale_log2=scale_log2, cap=cap, **outputs)


def backward_q(
    inputs: Inputs, bwd: launch.BackwardInputs, dq: launch.Accumulator, unions: Unions | None
) -> Tensor | None:
    """Accumulates dq and returns the gradient of the gates."""
    q, F, d_gates = inputs.q, inputs.facts.F, None
    if F.GATES:
        d_gates = q.new_zeros(*q.shape[:3], F.n, dtype=torch.float32)
    dq_out, add = dq.next_launch()
    launch_tiles(
        "dq", inputs, unions, dict(ADD=add, GATED=bwd.gated), dq=dq_out, d_gates=d_gates,
        bwd=Backward(bwd.d_out, bwd.lse, bwd.delta), scale=inputs.scale,
        cap=launch.cap(inputs.selection.soft_cap, log2=False),
    )  # fmt: skip
    return None if d_gates is None else d_gates.unflatten(2, (F.R, -1)).sum(3)
