"""Packed documents. The caller's rows become aligned rows, in which every document begins at a
multiple of the block sizes. Block geometry in an aligned row is then the same as in each document
alone, and a document only bounds the keys that its queries see.

    b  row        t  token in the caller's order      p  position in an aligned row
    w  window in the caller's order, document after document
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import blocks
from .checks import describe


class Documents(NamedTuple):
    """For each position [b p] of aligned rows, or those of queries alone: the first position of its
    document and one past the last, int32. Positions between two documents hold no token. Results
    there are meaningless, and no token sees them."""

    first: Tensor
    last: Tensor

    def windows(self, d: int, *, causal: bool) -> tuple[Tensor, Tensor]:
        """The first window of each position's document and one past its last."""
        low = self.first // d
        return low, low + blocks.num_windows(self.last - self.first, d, causal=causal)

    def blocks(self, s: int) -> tuple[Tensor, Tensor]:
        """The first selection block of each position's document and one past its last."""
        return self.first // s, blocks.ceil_div(self.last, s)

    def positions(self) -> Tensor:
        """Index of each position within its document, [b p]."""
        return torch.arange(self.first.shape[1], device=self.first.device) - self.first


class Move(torch.autograd.Function):
    """Gather entries `target` [b m] from x [b n ...]; zeros for -1. The gradient gathers entries
    `source` [b n]: without sums it is deterministic."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, source: Tensor) -> Tensor:
        ctx.save_for_backward(target, source)
        (b, n), m = x.shape[:2], target.shape[1]
        if n == 0 or target.numel() == 0:
            return x.new_zeros(b, m, *x.shape[2:])
        index = target.clamp(min=0) + torch.arange(b, device=x.device)[:, None] * n
        moved = x.reshape(b * n, *x.shape[2:]).index_select(0, index.flatten())
        hidden = (target < 0).reshape(b, m, *(1,) * (x.ndim - 2))
        return moved.reshape(b, m, *x.shape[2:]).masked_fill(hidden, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        target, source = ctx.saved_tensors
        return Move.apply(grad, source, target), None, None


@dataclass(frozen=True)
class Layout:
    """Index maps between the caller's rows and aligned rows."""

    documents: Documents
    source: Tensor  # [b p], the entry at each position; -1 for none
    target: Tensor  # [b t], the position of each entry; -1 for a hidden entry

    def spread(self, x: Tensor) -> Tensor:
        """Move entries [b t ...] to their positions [b p ...], with zeros between."""
        return Move.apply(x, self.source, self.target)  # type: ignore[no-any-return]

    def collect(self, x: Tensor) -> Tensor:
        """Move entries from their positions [b p ...] to [b t ...]; hidden entries are zero."""
        return Move.apply(x, self.target, self.source)  # type: ignore[no-any-return]

    def spread_blocks(self, block_indices: Tensor, s: int) -> Tensor:
        """Block indices [b t r n] of blocks of the documents, as [b p r n] of blocks of the rows;
        -1 past a document's end."""
        first, end = (t[..., None, None] for t in self.documents.blocks(s))
        indices = self.spread(block_indices)
        return torch.where((indices >= 0) & (indices < end - first), indices + first, -1)

    def collect_blocks(self, block_indices: Tensor, s: int) -> Tensor:
        """The way back: [b t r n]; hidden tokens select nothing."""
        first = self.documents.blocks(s)[0][..., None, None]
        block_indices = torch.where(block_indices >= 0, block_indices - first, -1)
        return self.collect(block_indices + 1) - 1

    def positions(self, entries: Tensor) -> Tensor:
        """Positions [b m] of entries [m] or [b m]; -1 for entry -1 and for hidden entries."""
        entries = entries.expand(len(self.target), -1)
        return self.target.gather(1, entries.clamp(min=0)).masked_fill(entries < 0, -1)

    def windows(self, d: int, count: int, *, causal: bool) -> Layout:
        """The layout of windows, with `count` windows in each of the caller's rows."""
        w = torch.arange(self.source.shape[1] // d, device=self.source.device)
        low, end = (t[:, ::d] for t in self.documents.windows(d, causal=causal))
        is_entry = (w >= low) & (w < end)
        source = torch.where(is_entry, is_entry.cumsum(1) - 1, -1)
        target = source.new_full((source.shape[0], count + 1), -1)
        target = target.scatter(
            1, source.where(is_entry & (source < count), count), w.expand_as(source)
        )
        return Layout(self.documents, source, target[:, :count])


def real_first(real: Tensor) -> Tensor:
    """The order [b t] that puts a row's real tokens first."""
    return (~real).to(torch.int8).argsort(dim=1, stable=True)


def align_documents(
    begins: Tensor, real: Tensor | None, step: int, length: int | None, device: torch.device
) -> Layout:
    """The layout on `device` in which every document begins at a multiple of `step`. `begins`
    [b t] tells, in the order of `real_first`, whether a token begins a document; `real` [b t],
    which tokens to keep, None for all. Without a `length` of the aligned rows the host waits for
    the GPU to know the least."""
    b, T = begins.shape
    t = torch.arange(T, device=begins.device)
    if real is None:
        order, count = t.expand(b, -1), torch.full((b, 1), T, device=begins.device)
    else:
        order, count = real_first(real), real.sum(1, keepdim=True)
    is_entry = t < count
    begins = (begins | (t == 0)) & is_entry
    begin = end = previous = begins.long()
    if T:
        begin = torch.where(begins, t, 0).cummax(1).values
        previous = F.pad(begin[:, :-1], (1, 0))
        next_begin = torch.where(begins, t, T).flip(1).cummin(1).values.flip(1)
        # not `value=T`: a graph with that constant is of one length
        end = (F.pad(next_begin[:, 1:] - T, (0, 1)) + T).minimum(count)

    # padding before a document, up to a multiple of `step`
    gap = torch.where(begins, -(t - previous) % step, 0)
    position = torch.where(is_entry, t + gap.cumsum(1), -1)
    if length is None:
        length = int(position.max()) + 1 if position.numel() else 0
        length = blocks.ceil_div(length, step) * step

    def put(values: Tensor, condition: Tensor, default: int) -> Tensor:
        out = torch.full((b, length + 1), default, device=begins.device)
        return out.scatter(1, torch.where(condition, position, length), values)[:, :length]

    first = put(position, begins, 0)
    last = put(position + end - begin, begins, 0)
    if length:
        first, last = first.cummax(1).values, last.cummax(1).values
    source = put(order, is_entry, -1)
    target = torch.full_like(position, -1).scatter(1, order, position)
    tensors = first.to(torch.int32), last.to(torch.int32), source, target
    first, last, source, target = (x.to(device, non_blocking=True) for x in tensors)
    return Layout(Documents(first, last), source, target)


def is_traced(tensor: Tensor) -> bool:
    """Whether the host cannot read a tensor's values: in a compiled or captured graph."""
    if torch.compiler.is_compiling():
        return True
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def layout(
    shape: tuple[int, int], device: torch.device, step: int, *, cu_seqlens: Tensor | None = None,
    segment_ids: Tensor | None = None, mask: Any = None,
) -> Layout:  # fmt: skip
    """The layout of rows [b t] whose documents begin at multiples of `step`, without the padding of
    `mask` [b t]. Documents begin at `cu_seqlens` [documents + 1] in a single row, or where
    `segment_ids` [b t] change; `checks.check_bounds` has checked all but the values of cu_seqlens.

    The host reads values, so it waits for tensors on a GPU, but not for cu_seqlens or segment_ids
    on the CPU. In a compiled or captured graph the host reads no cu_seqlens and cannot check them.
    """
    T, length = shape[1], None
    if cu_seqlens is not None:
        if is_traced(cu_seqlens) or cu_seqlens.is_meta:  # the most that the row may take
            length = blocks.ceil_div(T + (len(cu_seqlens) - 1) * (step - 1), step) * step
        else:
            cu_seqlens = cu_seqlens.cpu()
            bounds = cu_seqlens.tolist()
            if bounds[0] != 0 or bounds[-1] != T or sorted(bounds) != bounds:
                expected = f"rise from 0 to the number of tokens, {T}, and never fall"
                raise ValueError(f"cu_seqlens must {expected}, got {describe(bounds)}")
        begins = torch.zeros(1, T + 1, dtype=torch.bool, device=cu_seqlens.device)
        begins = begins.index_fill(1, cu_seqlens.long(), True)[:, :T]
    elif segment_ids is not None:
        ids = segment_ids
        if mask is not None:
            ids = ids.to(mask.device).gather(1, real_first(mask))
        begins = F.pad(ids[:, 1:] != ids[:, :-1], (min(T, 1), 0))
    else:
        begins = torch.zeros_like(mask)
    if cu_seqlens is None and (segment_ids is None or segment_ids.is_meta):
        length = blocks.ceil_div(T, step) * step  # one document, or assumed so
    return align_documents(begins, mask, step, length, device)


def layer_layout(
    inp: Tensor, step: int, cached: bool, lengths: Any, **bounds: Any
) -> tuple[Layout | None, Any]:
    """The layout of checked rows [b n ..], None if they need none, and the `lengths` for a cache,
    given or counted from the mask."""
    if all(t is None for t in bounds.values()):
        return None, lengths
    rows = layout((inp.shape[0], inp.shape[1]), inp.device, 1 if cached else step, **bounds)
    return rows, bounds["mask"].sum(1) if cached else lengths
