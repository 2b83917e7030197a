"""The selected branch. The forced blocks, which neighbouring queries share, are a range of keys and
a prefix. The blocks of the ranking are read query-major (`query_major.py`), key-major
(`key_major.py`), or as unions of neighbouring tokens (`union.py`, `union_fwd_sm90.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import combine
from ..common import launch, streams
from ..common.counts import cdiv, next_power_of_2
from ..common.key_norms import key_norms
from ..common.launch import Accumulator, BackwardInputs, CombineInputs, KVRange, Selection
from ..common.primitives import EVERYTHING, LOCAL_BLOCKS
from ..common.reduce import reduce_partials
from ..flash import bwd as flash_bwd
from ..flash import fwd as flash_fwd
from . import key_major, key_major_sm90, query_major, union, union_sm90, workspace
from .csr import CSRPlan
from .union import Unions
from .union_sm90 import Plan


def with_initial(selection: Selection) -> Selection:
    """The selection with the first blocks of each document, which are not those of the row, listed
    behind the others."""
    documents, count = selection.documents, selection.num_initial
    if documents is None or not count:
        return selection
    block_indices, gates, s = selection.block_indices, selection.gates, selection.s
    first, end = documents.blocks(s)
    if selection.causal:
        own = torch.arange(block_indices.shape[1], device=block_indices.device) // s
        # the local ones are seen to
        end = end.minimum(own + 1 - selection.num_local)
    block = first[..., None] + torch.arange(count, device=block_indices.device)
    initial = torch.where(block < end[..., None], block, -1).to(block_indices.dtype)
    initial = initial[:, :, None].expand(-1, -1, block_indices.shape[2], -1)
    if gates is not None:
        gates = torch.cat((gates, gates.new_ones(initial.shape)), dim=-1)
    block_indices = torch.cat((block_indices, initial), dim=-1)
    return replace(selection, block_indices=block_indices, gates=gates, num_initial=0)


def forced_blocks(selection: Selection, k: Tensor, v: Tensor) -> dict[str, Any] | None:
    """Keys, values, place and prefix of the forced blocks, for `interval`; None without any."""
    s = selection.s
    where: dict[str, Any] = dict(
        start=selection.start, starts=selection.starts, documents=selection.documents,
        soft_cap=selection.soft_cap,
    )  # fmt: skip
    end = min(selection.num_initial * s, k.shape[1])
    first = (k[:, :end], v[:, :end])
    if not selection.causal:
        kv_range = KVRange(EVERYTHING.value, **where)
        return dict(k=first[0], v=first[1], kv_range=kv_range, prefix=None) if end else None
    if not end and not selection.num_local:
        return None
    reach = (selection.num_local - 1) * s
    kv_range = KVRange(LOCAL_BLOCKS.value, reach, s, floor=end, causal_prefix=True, **where)
    return dict(k=k, v=v, kv_range=kv_range, prefix=first if end else None)


def within_window(
    selection: Selection, k: Tensor, v: Tensor, w: int
) -> tuple[tuple[Tensor, Tensor] | None, KVRange | None]:
    """Prefix and place of the forced blocks where the local ones lie in a causal window of w keys
    back over the same k and v, which can then see to them too; None otherwise."""
    reach = selection.num_local * selection.s - 1
    if not selection.causal or not selection.num_local or reach > w:
        return None, None
    forced = forced_blocks(selection, k, v)
    return (None, None) if forced is None else (forced["prefix"], forced["kv_range"])


def is_key_major(selection: Selection, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the listed blocks are better walked block by block than query by query."""
    rows = q.shape[2] // selection.block_indices.shape[2] * selection.stride
    return rows < launch.FEW_ROWS and launch.holds_block(selection.s, k, v)


@triton.jit(do_not_specialize=["ROWS", "T", "start", "C"])
def nsa_selected_valid_indices(
    block_indices, valid, starts, start, doc_first, doc_last, ROWS, T, R, n, s, C, num_initial,
    num_local, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, DOCUMENTS: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One program: M lists. Keeps each block that exists, is not forced, not ahead of the query and
    not in an earlier slot; others become -1."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tl.arange(0, SLOTS)
    real = (row < ROWS)[:, None] & (slot < n)[None]
    c = tl.load(block_indices + row[:, None] * n + slot[None], mask=real, other=-1)
    bt = row // R
    position = bt % T + start
    if RAGGED:
        position += tl.load(starts + bt // T, mask=row < ROWS, other=0)
    own = (position // s)[:, None]
    keep = (c >= num_initial) & (c >= 0) & (c < C)
    if DOCUMENTS:
        first = tl.load(doc_first + bt, mask=row < ROWS, other=0) // s + num_initial
        end = tl.cdiv(tl.load(doc_last + bt, mask=row < ROWS, other=0), s)
        keep = keep & (c >= first[:, None]) & (c < end[:, None])
    if CAUSAL:
        keep = keep & (c <= own) & (c <= own - num_local)
    c = tl.where(keep, c, -1)
    for other in range(0, n):
        before = tl.load(block_indices + row * n + other, mask=row < ROWS, other=-1)
        c = tl.where((c == before[:, None]) & (slot > other)[None], -1, c)
    tl.store(valid + row[:, None] * n + slot[None], c.to(tl.int32), mask=real)


def valid_block_indices(selection: Selection, S: int) -> Tensor:
    """The lists without what is forced, ahead of its query, past the keys, or there twice."""
    block_indices = selection.block_indices.contiguous()
    B, T, R, n = block_indices.shape
    valid = torch.empty_like(block_indices, dtype=torch.int32)
    if valid.numel():
        nsa_selected_valid_indices[(cdiv(B * T * R, 64),)](
            block_indices, valid, selection.starts, selection.start, ROWS=B * T * R, T=T, R=R, n=n,
            s=selection.s, C=cdiv(S, selection.s), num_initial=selection.num_initial,
            num_local=selection.num_local,
            **launch.bounds(selection.documents),
            CAUSAL=selection.causal, RAGGED=selection.starts is not None,
            SLOTS=next_power_of_2(n), BLOCK_M=64,
        )  # fmt: skip
    return valid


def combined(
    done: tuple[Tensor, Tensor], combine_inputs: CombineInputs | None
) -> tuple[Tensor, Tensor]:
    """What is done; the layer's output of it besides."""
    if combine_inputs is not None:
        combine.forward(
            [combine_inputs.cmp, done[0], combine_inputs.win],
            combine_inputs.gates,
            combine_inputs.out,
        )
    return done


def nothing(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse over no keys."""
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    return out, q.new_full(q.shape[:3], float("-inf"), dtype=torch.float32)


class KeyMajorPlan(NamedTuple):
    """What the key-major forward waits for: the tokens whose blocks overlap (`alike`), for
    `query_major.py`, and the block indices of the others, transposed at once only if that is
    all."""

    overlapping: Unions | None
    cost: float
    rest: Selection
    block_csr: CSRPlan

    def run(self, selection: Selection) -> None:
        if self.overlapping is not None:
            union.write_unions(selection, self.overlapping, self.cost, rest=self.rest.block_indices)
        else:
            self.block_csr.run(self.rest.block_indices)


def allocate(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float
) -> Plan | KeyMajorPlan | None:
    """For a plan of the forward, where there is one."""
    if union_sm90.is_supported(q, k, v, selection, scale):
        return union_sm90.plan(q, k, selection)
    if not selection.block_indices.numel() or not is_key_major(selection, q, k, v):
        return None
    overlapping, cost = union.allocate_unions(selection, q.shape[2], q.dtype)
    rest = selection
    if overlapping is not None:
        rest = replace(selection, block_indices=torch.empty_like(selection.block_indices))
    parts = q.shape[2] // selection.block_indices.shape[2]
    return KeyMajorPlan(overlapping, cost, rest, workspace.allocate(q, k, rest, "forward", parts))


@contextmanager
def planned(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float
) -> Iterator[Plan | KeyMajorPlan | None]:
    """A plan for the forward, made beside what is launched within, where there is one."""
    plan = allocate(q, k, v, selection, scale)
    if plan is None:
        yield None
        return
    # short programs, which would come last behind those of a kernel that fills the GPU
    with streams.forked(q.device, ahead=True) as beside:
        with beside:
            plan.run(selection)
        yield plan


def topn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    scale: float,
    partial: tuple[Tensor, Tensor] | None,
    norms: Tensor | None,
    combine_inputs: CombineInputs | None,
    plan: Plan | KeyMajorPlan | None,
) -> tuple[Tensor, Tensor]:
    """out and lse over the listed blocks, joined in place with those that `partial` holds."""
    call = (q, k, v, selection, scale)
    if isinstance(plan, KeyMajorPlan):
        rest, block_csrs, parts = plan.rest, plan.block_csr.spans, None
        if plan.overlapping is not None:
            done = partial or nothing(q, v)
            parts = key_major.allocate(q, v, rest, block_csrs)
            with streams.forked(q.device, ahead=True) as beside:
                with beside:  # short programs, each waiting for the one before, then the first span
                    plan.block_csr.run(rest.block_indices)
                    key_major.attend(q, k, v, rest, scale, block_csrs[0], parts)
                partial = query_major.forward(*call, partial, plan.overlapping, done, norms)
        return key_major.forward(q, k, v, rest, scale, block_csrs, partial, combine_inputs, parts)
    if plan is None:
        unions = union.make_unions(selection, q.shape[2], q.dtype)
        return query_major.forward(
            *call, partial, unions, norms=norms, combine_inputs=combine_inputs
        )
    done = partial or launch.empty_outputs(q, v)
    with streams.forked(q.device) as beside:
        union_sm90.forward(*call, *done, partial is not None, norms, combine_inputs, plan.shared)
        if plan.overlapping is not None:
            with beside:
                query_major.forward(
                    *call, partial, plan.overlapping, done, norms, combine_inputs, seldom=True
                )
    return done


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    scale: float,
    partial: tuple[Tensor, Tensor] | None = None,
    sinks: Tensor | None = None,
    combine_inputs: CombineInputs | None = None,
    norms: Tensor | None = None,
    plan: Plan | KeyMajorPlan | None = None,
) -> tuple[Tensor, Tensor]:
    """out [B T H E] and natural lse [B T H]; in those of the forced blocks if `partial` holds
    them, with their sinks. Given a `mix` also writes the layer's output. `norms` are those of the
    keys, and `plan` is what `planned` gave, if they are known."""
    norms = key_norms(q, k)[0] if norms is None else norms
    given = nullcontext(plan) if plan is not None else planned(q, k, v, selection, scale)
    with given as plan:
        forced = forced_blocks(selection, k, v) if partial is None else None
        if forced is not None:
            partial = flash_fwd.forward(q, scale=scale, sinks=sinks, **forced)[:2]
    listed = selection.block_indices.shape[-1] > 0
    if partial is None and (sinks is not None or not listed):
        out, lse = nothing(q, v)
        partial = out, lse if sinks is None else lse.copy_(sinks)
    if partial is not None and not listed:
        return combined(partial, combine_inputs)
    return topn_forward(q, k, v, selection, scale, partial, norms, combine_inputs, plan)


def forced_backward_q(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    scale: float,
    bwd: BackwardInputs,
    dq: Accumulator,
) -> None:
    """Adds to dq, through the forced blocks."""
    forced = forced_blocks(selection, k, v)
    if forced is not None:
        flash_bwd.backward_q(q, scale=scale, bwd=bwd, dq=dq, **forced)


def forced_backward_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    scale: float,
    bwd: BackwardInputs,
) -> tuple[Tensor, Tensor]:
    """dk and dv through the forced blocks, in float32."""
    forced = forced_blocks(selection, k, v)
    if forced is None:
        dk, dv = (t.new_zeros(t.shape, dtype=torch.float32) for t in (k, v))
        return dk, dv
    prefix = forced.pop("prefix")
    parts = [flash_bwd.backward_kv(q, scale=scale, bwd=bwd, **forced)]
    if prefix is not None:
        kv_range = forced["kv_range"]
        parts.append(flash_bwd.backward_prefix(q, prefix, kv_range, scale, bwd))
    return reduce_partials(parts, k, v)


class BackwardPlan(NamedTuple):
    """Whether dq through the listed blocks is formed block by block too, and that `apart`, beside
    what other keys give; and else, or where on the device `alike` is not 0 (most neighbours are),
    query by query with these unions. And the lists turned round, one of so many `neighbours`."""

    is_key_major: bool
    concurrent: bool = False
    unions: Unions | None = None
    cost: float = 0.0
    overlapping: Tensor | None = None
    block_csr: CSRPlan | None = None
    neighbours: int = 1

    def run(self, selection: Selection) -> None:
        if self.unions is not None:
            union.write_unions(selection, self.unions, self.cost)
            if self.overlapping is not None:
                union.most(self.unions, self.overlapping)
        if self.block_csr is not None:
            self.block_csr.run(selection.block_indices[:, :: self.neighbours].contiguous())


def plan_backward(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float
) -> BackwardPlan:
    """Room for what `fill` writes."""
    if not selection.block_indices.shape[-1]:
        return BackwardPlan(False)
    call = (q, k, v, selection, scale)
    if is_key_major(selection, q, k, v):
        return BackwardPlan(True, block_csr=workspace.allocate_backward(*call, with_dq=True))
    unions, cost = union.allocate_unions(selection, q.shape[2], q.dtype)
    with_dq = key_major_sm90.forms_dq(*call)
    overlapping = None if unions is None or not with_dq else unions.counts.new_empty(())
    neighbours = 1 if with_dq else key_major_sm90.tokens_of(*call)
    block_csr = workspace.allocate_backward(*call, with_dq, neighbours)
    return BackwardPlan(with_dq, with_dq, unions, cost, overlapping, block_csr, neighbours)


def topn_backward_q(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    scale: float,
    bwd: BackwardInputs,
    dq: Accumulator,
    plan: BackwardPlan,
) -> Tensor | None:
    """Adds to dq, through the listed blocks where those are walked query by query; the gradient of
    the gates."""
    if plan.is_key_major and plan.overlapping is None:
        return None
    if not selection.block_indices.shape[-1]:
        return None if selection.gates is None else torch.zeros_like(selection.gates)
    return query_major.backward_q(q, k, v, selection, scale, bwd, dq, plan.unions, plan.overlapping)


def topn_backward_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    scale: float,
    bwd: BackwardInputs,
    dk: Tensor,
    dv: Tensor,
    dq: Accumulator,
    plan: BackwardPlan,
    ready: torch.cuda.Event | None = None,
    after: torch.cuda.Event | None = None,
) -> Tensor | None:
    """Adds to dk and dv, in float32, through the listed blocks, and to dq what `listed_backward_q`
    has not, but not before `after`; then also gives the gradient of the gates. The plan is filled
    when `ready`."""
    if plan.block_csr is None:
        return None if selection.gates is None else torch.zeros_like(selection.gates)
    streams.wait(q.device, ready)
    rest = dq if plan.is_key_major else None
    return key_major.backward(
        q, k, v, selection, scale, bwd, plan.block_csr.spans, dk, dv, rest, plan.overlapping, after,
        plan.neighbours,
    )  # fmt: skip


def backward(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float, bwd: BackwardInputs
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk and dv, these in float32, and the gradient of the gates."""
    given, dq = (q, k, v, selection, scale, bwd), Accumulator(q)
    plan = plan_backward(q, k, v, selection, scale)
    plan.run(selection)
    forced_backward_q(*given, dq)
    d_gates = topn_backward_q(*given, dq, plan)
    dk, dv = forced_backward_kv(*given)
    rest = topn_backward_kv(*given, dk, dv, dq, plan)
    return dq.result(), dk, dv, rest if d_gates is None else d_gates
