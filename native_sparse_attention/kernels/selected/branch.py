"""The selected branch. The forced blocks are a KV range and a prefix. The top-n blocks are read
query-major (`query_major.py`), key-major (`key_major.py`), or as unions of neighbouring tokens
(`union.py`, `union_fwd_sm90.py`)."""

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
    """The selection with each document's initial blocks appended to its block indices. Without
    documents the initial blocks are a prefix of the row."""
    documents, count = selection.documents, selection.num_initial
    if documents is None or not count:
        return selection
    block_indices, gates, s = selection.block_indices, selection.gates, selection.s
    first, end = documents.blocks(s)
    if selection.causal:
        own = torch.arange(block_indices.shape[1], device=block_indices.device) // s
        # the KV range covers the local blocks
        end = end.minimum(own + 1 - selection.num_local)
    block = first[..., None] + torch.arange(count, device=block_indices.device)
    initial = torch.where(block < end[..., None], block, -1).to(block_indices.dtype)
    initial = initial[:, :, None].expand(-1, -1, block_indices.shape[2], -1)
    if gates is not None:
        gates = torch.cat((gates, gates.new_ones(initial.shape)), dim=-1)
    block_indices = torch.cat((block_indices, initial), dim=-1)
    return replace(selection, block_indices=block_indices, gates=gates, num_initial=0)


def forced_blocks(selection: Selection, k: Tensor, v: Tensor) -> dict[str, Any] | None:
    """Keys, values, KV range and prefix of the forced blocks; None without forced blocks."""
    s = selection.s
    query_args: dict[str, Any] = dict(
        start=selection.start, starts=selection.starts, documents=selection.documents,
        soft_cap=selection.soft_cap,
    )  # fmt: skip
    end = min(selection.num_initial * s, k.shape[1])
    first = (k[:, :end], v[:, :end])
    if not selection.causal:
        kv_range = KVRange(EVERYTHING.value, **query_args)
        return dict(k=first[0], v=first[1], kv_range=kv_range, prefix=None) if end else None
    if not end and not selection.num_local:
        return None
    reach = (selection.num_local - 1) * s
    kv_range = KVRange(LOCAL_BLOCKS.value, reach, s, floor=end, causal_prefix=True, **query_args)
    return dict(k=k, v=v, kv_range=kv_range, prefix=first if end else None)


def within_window(
    selection: Selection, k: Tensor, v: Tensor, w: int
) -> tuple[tuple[Tensor, Tensor] | None, KVRange | None]:
    """Prefix and KV range of the forced blocks if a causal window of w keys over the same k and v
    contains the local blocks: the window's kernel then runs both. Otherwise (None, None)."""
    reach = selection.num_local * selection.s - 1
    if not selection.causal or not selection.num_local or reach > w:
        return None, None
    forced = forced_blocks(selection, k, v)
    return (None, None) if forced is None else (forced["prefix"], forced["kv_range"])


def is_key_major(selection: Selection, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the forward over the top-n blocks is key-major rather than query-major."""
    rows = q.shape[2] // selection.block_indices.shape[2] * selection.stride
    return rows < launch.FEW_ROWS and launch.holds_block(selection.s, k, v)


@triton.jit(do_not_specialize=["ROWS", "T", "start", "C"])
def nsa_selected_valid_indices(
    block_indices, valid, starts, start, doc_first, doc_last, ROWS, T, R, n, s, C, num_initial,
    num_local, CAUSAL: tl.constexpr, RAGGED: tl.constexpr, DOCUMENTS: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One program: M rows of n block indices. Replaces an index by -1 if its block does not exist,
    is forced, lies in the query's future, or is in an earlier slot."""
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
    """Block indices with -1 for forced, future, missing and repeated blocks."""
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
    outputs: tuple[Tensor, Tensor], combine_inputs: CombineInputs | None
) -> tuple[Tensor, Tensor]:
    """`outputs` (out and lse). With `combine_inputs` also writes the layer's output."""
    if combine_inputs is not None:
        combine.forward(
            [combine_inputs.cmp, outputs[0], combine_inputs.win],
            combine_inputs.gates,
            combine_inputs.out,
        )
    return outputs


def empty_attention(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out [B T H E] and lse [B T H] over no keys."""
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    return out, q.new_full(q.shape[:3], float("-inf"), dtype=torch.float32)


class KeyMajorPlan(NamedTuple):
    """Plan of the key-major forward."""

    block_csr: CSRPlan

    def run(self, selection: Selection) -> None:
        self.block_csr.run(selection.block_indices)


def allocate(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float
) -> Plan | KeyMajorPlan | None:
    """Plan of the forward with allocated workspaces; None if the forward needs no plan."""
    if union_sm90.is_supported(q, k, v, selection, scale):
        return union_sm90.plan(q, k, selection)
    if not selection.block_indices.numel() or not is_key_major(selection, q, k, v):
        return None
    rows = q.shape[2] // selection.block_indices.shape[2]
    return KeyMajorPlan(workspace.allocate(q, k, selection, "forward", rows))


@contextmanager
def planned(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float
) -> Iterator[Plan | KeyMajorPlan | None]:
    """Run the forward's plan, if any, on a second stream beside the launches of this context."""
    plan = allocate(q, k, v, selection, scale)
    if plan is None:
        yield None
        return
    # short programs: behind a kernel that fills the GPU they would start last
    with streams.forked(q.device, ahead=True) as side:
        with side:
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
    """out [B T H E] and lse [B T H] over the top-n blocks; accumulates in place into `partial`."""
    call = (q, k, v, selection, scale)
    if isinstance(plan, KeyMajorPlan):
        return key_major.forward(*call, plan.block_csr.chunks, partial, combine_inputs)
    if plan is None:
        unions = union.make_unions(selection, q.shape[2], q.dtype)
        return query_major.forward(
            *call, partial, unions, norms=norms, combine_inputs=combine_inputs
        )
    outputs = partial or launch.empty_outputs(q, v)
    with streams.forked(q.device) as side:
        union_sm90.forward(*call, *outputs, partial is not None, norms, combine_inputs, plan.shared)
        if plan.overlapping is not None:
            with side:
                query_major.forward(
                    *call, partial, plan.overlapping, outputs, norms, combine_inputs
                )
    return outputs


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
    """out [B T H E] and natural lse [B T H]. `partial` holds out and lse of the forced blocks and
    sinks, if known; the forward accumulates into them. With `combine_inputs` also writes the
    layer's output. `norms` are the key norms, `plan` is a plan that has run."""
    norms = key_norms(q, k)[0] if norms is None else norms
    given = nullcontext(plan) if plan is not None else planned(q, k, v, selection, scale)
    with given as plan:
        forced = forced_blocks(selection, k, v) if partial is None else None
        if forced is not None:
            partial = flash_fwd.forward(q, scale=scale, sinks=sinks, **forced)[:2]
    has_topn = selection.block_indices.shape[-1] > 0
    if partial is None and (sinks is not None or not has_topn):
        out, lse = empty_attention(q, v)
        partial = out, lse if sinks is None else lse.copy_(sinks)
    if partial is not None and not has_topn:
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
    """Accumulates dq of the forced blocks."""
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
    """dk [B S K D] and dv [B S K E] of the forced blocks, in float32."""
    forced = forced_blocks(selection, k, v)
    if forced is None:
        dk, dv = (t.new_zeros(t.shape, dtype=torch.float32) for t in (k, v))
        return dk, dv
    prefix = forced.pop("prefix")
    partials = [flash_bwd.backward_kv(q, scale=scale, bwd=bwd, **forced)]
    if prefix is not None:
        kv_range = forced["kv_range"]
        partials.append(flash_bwd.backward_prefix(q, prefix, kv_range, scale, bwd))
    return reduce_partials(partials, k, v)


class BackwardPlan(NamedTuple):
    """Plan of the backward over the top-n blocks. dq is key-major if `is_key_major`, `concurrent`
    with the other branches. Otherwise, or if `overlapping` is not 0 on the device, dq is
    query-major with `unions`. `block_csr` has a pair per `pair_tokens` tokens."""

    is_key_major: bool
    concurrent: bool = False
    unions: Unions | None = None
    cost: float = 0.0
    overlapping: Tensor | None = None
    block_csr: CSRPlan | None = None
    pair_tokens: int = 1

    def run(self, selection: Selection) -> None:
        if self.unions is not None:
            union.write_unions(selection, self.unions, self.cost)
            if self.overlapping is not None:
                union.write_majority(self.unions, self.overlapping)
        if self.block_csr is not None:
            self.block_csr.run(selection.block_indices[:, :: self.pair_tokens].contiguous())


def plan_backward(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float
) -> BackwardPlan:
    """Choose the backward's kernels and allocate the workspaces that `run` writes."""
    if not selection.block_indices.shape[-1]:
        return BackwardPlan(False)
    call = (q, k, v, selection, scale)
    if is_key_major(selection, q, k, v):
        return BackwardPlan(True, block_csr=workspace.allocate_backward(*call, with_dq=True))
    unions, cost = union.allocate_unions(selection, q.shape[2], q.dtype)
    with_dq = key_major_sm90.forms_dq(*call)
    overlapping = None if unions is None or not with_dq else unions.counts.new_empty(())
    pair_tokens = 1 if with_dq else key_major_sm90.pair_tokens(*call)
    block_csr = workspace.allocate_backward(*call, with_dq, pair_tokens)
    return BackwardPlan(with_dq, with_dq, unions, cost, overlapping, block_csr, pair_tokens)


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
    """Accumulates query-major dq of the top-n blocks. Returns the gates' gradient or None."""
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
    """Accumulates dk and dv of the top-n blocks, in float32. With a key-major plan also accumulates
    dq, after the event `after`, and returns the gradient of the gates. The plan has run at
    `ready`."""
    if plan.block_csr is None:
        return None if selection.gates is None else torch.zeros_like(selection.gates)
    streams.wait(q.device, ready)
    rest = dq if plan.is_key_major else None
    return key_major.backward(
        q, k, v, selection, scale, bwd, plan.block_csr.chunks, dk, dv, rest, plan.overlapping,
        after, plan.pair_tokens,
    )  # fmt: skip


def backward(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float, bwd: BackwardInputs
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk and dv (dk and dv in float32), and the gradient of the gates."""
    given, dq = (q, k, v, selection, scale, bwd), Accumulator(q)
    plan = plan_backward(q, k, v, selection, scale)
    plan.run(selection)
    forced_backward_q(*given, dq)
    d_gates = topn_backward_q(*given, dq, plan)
    dk, dv = forced_backward_kv(*given)
    rest = topn_backward_kv(*given, dk, dv, dq, plan)
    return dq.result(), dk, dv, rest if d_gates is None else d_gates
