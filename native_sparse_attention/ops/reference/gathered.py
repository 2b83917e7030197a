"""The selected branch by gathering the blocks that each query reads, a few queries at a time. Time
and memory are linear in the length.

    b  batch         i  query        h  query heads        d  key width
    k  KV heads      j  key          r  heads that choose: k (for their group) or h (each its own)
    n  slots         s  tokens of a block                  g  query heads per choosing head
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ... import blocks
from ...compat import transforms
from ...varlen import Documents
from .online import Plan, attend_rows, chunks, gradients


@dataclass(frozen=True, eq=False)
class Choice:
    """Which keys each query reads.

    Args:
        indices: the selected blocks [b i r n], -1 for an empty slot.
        positions: of the queries, [b|1 i].
        length: S, keys.
        rows: queries of a chunk.
    """

    indices: Tensor
    positions: Tensor
    length: int
    s: int
    num_initial: int
    num_local: int
    causal: bool
    documents: Documents | None
    rows: int

    def slots(self, rows: slice) -> tuple[Tensor, Tensor]:
        """The blocks of some queries, [b i r n]: initial, then local, then selected blocks. The
        second result marks the slots whose block exists and is in no earlier slot."""
        indices, i = self.indices[:, rows].long(), self.positions[:, rows, None]
        first = torch.zeros_like(i)
        if self.documents is not None:
            first = self.documents.blocks(self.s)[0][:, rows, None].long()
        forced = first + torch.arange(self.num_initial, device=i.device)
        if self.causal:
            own = i // self.s
            local = own - torch.arange(self.num_local, device=i.device)
            forced, local = (t.expand(len(first), -1, -1) for t in (forced, local))
            local = local.where(local >= first + self.num_initial, -1)
            forced = torch.cat((forced.where(forced <= own, -1), local), dim=-1)
        forced = forced[:, :, None].expand(len(indices), -1, indices.shape[2], -1)
        block = torch.cat((forced, indices), dim=-1)
        there = (block >= 0) & (block < blocks.num_blocks(self.length, self.s))
        same = (block[..., None] == block[..., None, :]) & there[..., None, :]
        return block, there & ~same.tril(diagonal=-1).any(dim=-1)

    def keys(self, rows: slice) -> tuple[Tensor, Tensor]:
        """The blocks of some queries [b r i n], 0 in empty slots, and the mask of their keys
        [b r i n s]."""
        block, there = (rearrange(t, "b i r n -> b r i n") for t in self.slots(rows))
        j = block[..., None] * self.s + torch.arange(self.s, device=block.device)
        seen = there[..., None] & (j < self.length)
        if self.causal:
            seen = seen & (j <= self.positions[:, None, rows, None, None])
        if self.documents is not None:
            low, high = (t[:, None, rows, None, None] for t in self.documents)
            seen = seen & (j >= low) & (j < high)
        return block.where(there, 0), seen


def in_blocks(x: Tensor, s: int) -> Tensor:
    """[b j k d] as [(b k c) (s d)], the last block padded with zeros."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % s))
    return rearrange(x, "b (c s) k d -> (b k c) (s d)", s=s)


def rows_of(block: Tensor, heads: int, num_blocks: int) -> Tensor:
    """Flat indices [(b r i n)] of blocks [b r i n] among the blocks (b k c) of `in_blocks`."""
    b, r = block.shape[:2]
    head = torch.arange(r, device=block.device) * heads // r
    row = torch.arange(b, device=block.device)[:, None] * heads + head
    return (row[..., None, None] * num_blocks + block).flatten()


def add_rows(to: Tensor, index: Tensor, rows: Tensor) -> None:
    """`to[index] += rows`, in a fixed order."""
    if to.is_cuda:
        to.index_put_((index,), rows, accumulate=True)
    else:
        to.index_add_(0, index, rows)


ONE = slice(0, 1)  # each batch row holds one query


@dataclass(frozen=True, eq=False)
class Chunk:
    """A few queries and the blocks that they read. Each query is a batch row of its own."""

    q: Tensor  # [b (r i) g 1 d]
    index: Tensor  # [(b r i n)] of the blocks
    plan: Plan  # of one tile
    weights: Tensor | None  # [b (r i) 1 1 (n s)]

    def gather(self, x: Tensor, s: int) -> Tensor:
        """[(b k c) (s d)] to [b (r i) (n s) d]"""
        entries = x.index_select(0, self.index)
        return entries.view(*self.q.shape[:2], -1, x.shape[1] // s)


def chunk(
    q: Tensor, gates: Tensor | None, rows: slice, choice: Choice, heads: int, plan: Plan
) -> Chunk:
    """Queries `rows` of q [b i (r g) d] and gates [b i r n]; `heads` is the number of KV heads."""
    block, seen = choice.keys(rows)
    r, s = block.shape[1], choice.s
    weights = None
    if gates is not None:
        gate = rearrange(gates[:, rows], "b i r n -> b r i n")
        gate = gate.to(q.dtype)
        gate = F.pad(gate, (block.shape[-1] - gate.shape[-1], 0), value=1.0)
        weights = gate[..., None].expand(-1, -1, -1, -1, s)
        weights = rearrange(weights, "b r i n s -> b (r i) 1 1 (n s)")
    visible = rearrange(seen, "b r i n s -> b (r i) 1 1 (n s)")
    tile = (ONE, [slice(0, visible.shape[-1])])
    return Chunk(
        rearrange(q[:, rows], "b i (r g) d -> b (r i) g 1 d", r=r),
        rows_of(block, heads, blocks.num_blocks(choice.length, s)),
        Plan([tile], lambda *_: visible, plan.scale, plan.soft_cap),
        weights,
    )


def attend_chunks(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, choice: Choice, plan: Plan
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield the rows, outputs [b i h e] and log-sum-exps [b i h] of each chunk of queries."""
    ks, vs, r = in_blocks(k, choice.s), in_blocks(v, choice.s), choice.indices.shape[2]
    for rows in chunks(0, q.shape[1], choice.rows):
        own = chunk(q, gates, rows, choice, k.shape[2], plan)
        kg, vg = own.gather(ks, choice.s), own.gather(vs, choice.s)
        out, lse, _ = attend_rows(own.q, kg, vg, *own.plan.tiles[0], own.plan, own.weights)
        out = rearrange(out, "b (r i) g 1 e -> b i (r g) e", r=r)
        yield rows, out, rearrange(lse, "b (r i) g 1 -> b i (r g)", r=r)


class Gathered(torch.autograd.Function):
    """Map q [b i h d], k [b j k d], v [b j k e] and gates [b i r n] or None to output [b i h e] and
    its log-sum-exp [b i h]. The backward gathers again, in differentiable steps."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, choice: Choice, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        lse = q.new_empty(q.shape[:-1])
        for rows, *found in attend_chunks(q, k, v, gates, choice, plan):
            out[:, rows], lse[:, rows] = found
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, gates, ctx.choice, ctx.plan = inputs
        ctx.save_for_backward(q, k, v, gates, *output)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> Any:  # type: ignore[override]
        transforms.refuse_legacy_batched(d_out, d_lse)
        q, k, v, gates, out, lse = ctx.saved_tensors
        choice = ctx.choice
        if transforms.active():  # of the backward alone, as by `jacrev`

            def plainly(q: Tensor, k: Tensor, v: Tensor, gates: Any = None) -> list[Tensor]:
                _, outs, lses = zip(*attend_chunks(q, k, v, gates, choice, ctx.plan), strict=True)
                return [torch.cat(some, dim=1) for some in (outs, lses)]

            return *transforms.vjp(plainly, (q, k, v, gates), (d_out, d_lse)), None, None
        s, r, heads = choice.s, choice.indices.shape[2], k.shape[2]
        ks, vs = in_blocks(k, s), in_blocks(v, s)
        d_q, d_gates = torch.zeros_like(q), None if gates is None else torch.zeros_like(gates)
        d_ks, d_vs = (torch.zeros_like(t) for t in (ks, vs))
        for rows in chunks(0, q.shape[1], choice.rows):
            own = chunk(q, gates, rows, choice, heads, ctx.plan)
            o, do = (
                rearrange(t[:, rows], "b i (r g) e -> b (r i) g 1 e", r=r) for t in (out, d_out)
            )
            ls, dls = (rearrange(t[:, rows], "b i (r g) -> b (r i) g 1", r=r) for t in (lse, d_lse))
            kg, vg = own.gather(ks, s), own.gather(vs, s)
            dq, dk, dv, dw = gradients(own.q, kg, vg, o, ls, do, dls, own.plan, own.weights)
            d_q[:, rows] = rearrange(dq, "b (r i) g 1 d -> b i (r g) d", r=r)
            for to, d in ((d_ks, dk), (d_vs, dv)):
                add_rows(to, own.index, d.reshape(len(own.index), -1))
            if d_gates is not None and dw is not None:
                dw = rearrange(dw, "b (r i) 1 1 (n s) -> b i r n s", r=r, s=s).sum(dim=-1)
                d_gates[:, rows] = dw[..., dw.shape[-1] - gates.shape[-1] :]
        d_k, d_v = (
            rearrange(d, "(b k c) (s d) -> b (c s) k d", b=len(q), k=heads, s=s)[:, : choice.length]
            for d in (d_ks, d_vs)
        )
        return d_q, d_k, d_v, d_gates, None, None
