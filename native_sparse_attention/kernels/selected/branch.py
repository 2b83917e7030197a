"""The selected branch. The forced blocks are a KV range and a prefix. The top-n blocks are read
query-major (`query_major.py`), key-major (`key_major.py`), or as unions of neighbouring tokens
(`query_major.py`, `union_sm90.py`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import combine
from ..common import launch
from ..common import primitives as steps
from ..common.launch import Accumulator, BackwardInputs
from ..common.precompile import launcher
from ..common.primitives import Combine as Combine
from ..common.reduce import reduce_partials
from ..flash import flash
from . import key_major, query_major
from .inputs import Inputs


def append_initial_blocks(selection: launch.Selection) -> launch.Selection:
    """The selection with each document's initial blocks appended to its block indices. Without
    documents the initial blocks are a prefix of the row."""
    documents, count = selection.documents, selection.num_initial
    if documents is None or not count:
        return selection
    block_indices, gates, s = selection.block_indices, selection.gates, selection.s
    first, end = documents.blocks(s)
    if selection.causal:
        token = torch.arange(block_indices.shape[1], device=block_indices.device)
        query_block = (selection.start + token) // s
        # the KV range covers the local blocks
        end = end.minimum(query_block + 1 - selection.num_local)
    block = first[..., None] + torch.arange(count, device=block_indices.device)
    initial = torch.where(block < end[..., None], block, -1).to(block_indices.dtype)
    initial = initial[:, :, None].expand(-1, -1, block_indices.shape[2], -1)
    if gates is not None:
        gates = torch.cat((gates, gates.new_ones(initial.shape)), dim=-1)
    block_indices = torch.cat((block_indices, initial), dim=-1)
    return replace(selection, block_indices=block_indices, gates=gates, num_initial=0)


def forced_blocks(inputs: Inputs) -> flash.Inputs | None:
    """Attention to the forced blocks; None without forced blocks."""
    q, k, v, selection, s = inputs.q, inputs.k, inputs.v, inputs.selection, inputs.selection.s
    kv_range = launch.KVRange(
        steps.EVERYTHING.value, start=selection.start, starts=selection.starts,
        documents=selection.documents, soft_cap=selection.soft_cap,
    )  # fmt: skip
    end = min(selection.num_initial * s, k.shape[1])
    prefix = (k[:, :end], v[:, :end]) if end else None
    if selection.causal and (end or selection.num_local):
        kind, reach = steps.LOCAL_BLOCKS.value, (selection.num_local - 1) * s
        kv_range = kv_range._replace(
            kind=kind, reach=reach, stride=s, floor=end, causal_prefix=True
        )
        return flash.Inputs(q, k, v, kv_range, inputs.scale, prefix)
    return None if prefix is None else flash.Inputs(q, *prefix, kv_range, inputs.scale)


def forced_blocks_in_window(inputs: Inputs, window: flash.Inputs) -> flash.Inputs | None:
    """`forced_blocks` if a causal window over the same k and v contains the local blocks: the
    window's kernel then runs both."""
    reach = inputs.selection.num_local * inputs.selection.s - 1
    contains = inputs.selection.causal and 0 <= reach <= window.kv_range.reach
    return forced_blocks(inputs) if contains else None


@triton.jit(do_not_specialize=["ROWS", "T", "start", "C"])
def nsa_selected_valid_indices(
    block_indices, valid, starts, documents, ROWS, T, start, C, n, R: tl.constexpr,
    s: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One program: M rows of n block indices. Replaces an index by -1 if its block does not exist,
    is forced, lies in the query's future, or is in an earlier slot. LOCAL blocks are forced; None
    if queries see the future."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tl.arange(0, SLOTS)
    real = (row < ROWS)[:, None] & (slot < n)[None]
    c = tl.load(block_indices + row[:, None] * n + slot[None], mask=real, other=-1)
    bt = row // R
    keep = (c >= INITIAL) & (c >= 0) & (c < C)
    if documents is not None:
        first = tl.load(documents.first + bt, mask=row < ROWS, other=0) // s + INITIAL
        end = tl.cdiv(tl.load(documents.last + bt, mask=row < ROWS, other=0), s)
        keep = keep & (c >= first[:, None]) & (c < end[:, None])
    if LOCAL is not None:
        position = bt % T + start
        if starts is not None:
            position += tl.load(starts + bt // T, mask=row < ROWS, other=0)
        keep = keep & (c <= (position // s)[:, None] - LOCAL)
    c = tl.where(keep, c, -1)
    for previous in range(0, n):
        repeated = tl.load(block_indices + row * n + previous, mask=row < ROWS, other=-1)
        c = tl.where((c == repeated[:, None]) & (slot > previous)[None], -1, c)
    tl.store(valid + row[:, None] * n + slot[None], c.to(tl.int32), mask=real)


def keep_valid_blocks(selection: launch.Selection, S: int) -> launch.Selection:
    """The selection with -1 for forced, future, missing and repeated blocks."""
    block_indices = selection.block_indices.contiguous()
    (B, T, R, n), s = block_indices.shape, selection.s
    valid = torch.empty_like(block_indices, dtype=torch.int32)
    if valid.numel():
        num_local = selection.num_local if selection.causal else None
        launcher(nsa_selected_valid_indices, (launch.cdiv(B * T * R, 64),))(
            block_indices, valid, selection.starts, selection.documents, B * T * R, T,
            selection.start, launch.cdiv(S, s), n, R, s, selection.num_initial, num_local,
            launch.next_power_of_2(n), 64,
        )  # fmt: skip
    return replace(selection, block_indices=valid)


class Plan(NamedTuple):
    """How a pass reads the top-n blocks, in the kernels of the module `gluon` if any. Forward:
    key-major by `csr`, or query-major by `unions` if any. Backward: dk, dv and, if `is_key_major`,
    dq by `csr`; else dq is query-major."""

    csr: key_major.CSR | None = None
    unions: query_major.Unions | None = None
    is_key_major: bool = False
    gluon: Any = None

    def run(self, selection: launch.Selection) -> None:
        """Write the unions and the CSR."""
        if self.unions is not None:
            self.unions.write(selection)
        if self.csr is not None:
            self.csr.write(selection.block_indices)


def plan_forward(inputs: Inputs) -> Plan | None:
    """Choose the forward's kernels and allocate the workspaces that `run` writes; None if the
    forward is query-major without unions."""
    if not inputs.selection.block_indices.numel():
        return None
    gluon: Any = None
    if launch.supports_gluon(inputs.q):
        from . import key_major_sm90, union_sm90

        gluon = key_major_sm90 if key_major_sm90.is_supported(inputs, "forward") else None
        if union_sm90.is_supported(inputs):
            members = union_sm90.MEMBERS
            limit = min(members * inputs.facts.F.n, inputs.facts.C)
            unions = query_major.allocate(inputs.selection, members, limit)
            return Plan(unions=unions, gluon=union_sm90)
    if key_major.is_faster(inputs):
        return Plan(key_major.allocate(inputs, "forward", inputs.facts.F.G), gluon=gluon)
    unions = query_major.allocate_unions(inputs)
    return None if unions is None else Plan(unions=unions)


def forward(
    inputs: Inputs, partial: tuple[Tensor, ...], sinks: Tensor | None,
    combined: Combine | None, plan: Plan | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [B T H E] and natural lse [B T H]. `partial` holds out and lse of the forced blocks and
    sinks, if there are some; the forward accumulates into them. With `combined` also writes the
    layer's output. The plan has run."""
    q, plan, has_topn = inputs.q, plan or Plan(), inputs.facts.F.n > 0
    out, lse = partial or launch.empty_outputs(q, inputs.v)
    is_begun = bool(partial) or sinks is not None or not has_topn
    if not partial and is_begun:
        out.zero_()
        lse.fill_(float("-inf")) if sinks is None else lse.copy_(sinks)
    outputs = dict(out=out, lse=lse, combine=combined or Combine())
    flags = dict(ADD=is_begun, COMBINE=combined is not None)
    if not has_topn:
        if combined is not None:
            combine.forward(out, combined)
    elif plan.csr is not None:
        key_major.forward(inputs, plan.csr, plan.gluon, outputs, flags)
    elif plan.gluon is not None:
        plan.gluon.forward(inputs, plan.unions, outputs, flags)
    else:
        query_major.forward(inputs, plan.unions, outputs, flags)
    return out, lse


def plan_backward(inputs: Inputs) -> Plan:
    """Choose the backward's kernels and allocate the workspaces that `run` writes."""
    if not inputs.facts.F.n:
        return Plan()
    gluon, facts = None, inputs.facts
    if launch.supports_gluon(inputs.q):
        from . import key_major_sm90

        gluon = key_major_sm90 if key_major_sm90.is_supported(inputs, "backward") else None
    if key_major.is_faster(inputs):
        step = key_major.plan("backward", facts, facts.T, facts.F.K, gluon is not None)
        csr = key_major.allocate(inputs, "backward", step["F"].KEY_TILES * facts.F.G)
        return Plan(csr, is_key_major=True, gluon=gluon)
    pair_tokens = 1 if gluon is None else gluon.pair_tokens(inputs)
    csr = key_major.allocate(inputs, "backward", 0, pair_tokens)
    return Plan(csr, query_major.allocate_unions(inputs), gluon=gluon)


def forced_backward_kv(inputs: Inputs, bwd: BackwardInputs) -> tuple[Tensor, Tensor]:
    """dk [B S K D] and dv [B S K E] of the forced blocks, in float32."""
    k, v, forced = inputs.k, inputs.v, forced_blocks(inputs)
    if forced is None:
        return k.new_zeros(k.shape, dtype=torch.float32), v.new_zeros(v.shape, dtype=torch.float32)
    partials = [flash.backward_kv(forced, bwd)]
    if forced.prefix is not None:
        partials.append(flash.backward_prefix(forced, bwd))
    return reduce_partials(partials, k, v)


def topn_backward_q(inputs: Inputs, bwd: BackwardInputs, dq: Accumulator, plan: Plan) -> Any:
    """Accumulates query-major dq of the top-n blocks. Returns the gates' gradient, if any."""
    if plan.is_key_major or not inputs.facts.F.n:
        gates = inputs.selection.gates
        return None if gates is None else torch.zeros_like(gates)
    return query_major.backward_q(inputs, bwd, dq, plan.unions)


def topn_backward_kv(
    inputs: Inputs, bwd: BackwardInputs, dk: Tensor, dv: Tensor, dq: Accumulator, plan: Plan
) -> None:
    """Accumulates dk and dv of the top-n blocks, in float32; with a key-major plan also dq."""
    if plan.csr is not None:
        dq_out = dq if plan.is_key_major else None
        key_major.backward(inputs, bwd, plan.csr, plan.gluon, dk, dv, dq_out)
