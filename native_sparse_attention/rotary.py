"""Rotary embedding (interleaved pairs, by rotary-embedding-torch) at any positions, in fp32
angles."""

from __future__ import annotations

from collections.abc import Callable

import torch
from rotary_embedding_torch import RotaryEmbedding, apply_rotary_emb
from torch import Tensor

from .ops import backends
from .ops.operators import offsets
from .ops.rotary import rotate as by_kernel


class Rotary(RotaryEmbedding):
    """RotaryEmbedding that computes its angles at each call, from frequencies that are a buffer
    (they are not learned: no optimizer or sharding should see them) and stay in fp32 whatever the
    model is cast to: in bf16 the angle at position 10,000 would be off by whole turns."""

    freqs: Tensor

    def __init__(self, dim: int):
        if dim % 2:
            raise ValueError(f"dim_head must be even for rotary embedding, got {dim}")
        # to torch.compile an int of a module is a constant; at a float it traces twice
        super().__init__(dim, interpolate_factor=1, cache_if_possible=False, cache_max_seq_len=1)
        freqs = self.freqs.detach()
        del self.freqs
        self.register_buffer("freqs", freqs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        before = self.freqs
        super()._apply(fn, recurse)
        if self.freqs.dtype.itemsize < before.dtype.itemsize:
            self.freqs = before.to(self.freqs.device, torch.float32)
        return self


def rotation(
    rotary: RotaryEmbedding,
    like: Tensor,
    start: int | Tensor,
    positions: Tensor | None = None,
) -> Callable[[Tensor], Tensor]:
    """Rotary embedding of [b h n d] at positions `start + 0 .. n - 1` (start: an int, or [b]), or
    at `positions` [b n].

    The angles are formed here: the embedding's own forward does so in the dtype of its frequencies,
    and bf16 cannot tell position 257 from 256.
    """
    if positions is None:
        position = torch.arange(like.shape[2], device=like.device)
        position = position + (start[:, None, None] if isinstance(start, Tensor) else start)
    else:
        position = positions[:, None]
    position = position.to(torch.promote_types(torch.float32, like.dtype))
    position = position / rotary.interpolate_factor
    angles = position[..., None] * rotary.freqs.to(position.dtype)
    angles = angles.repeat_interleave(2, dim=-1)
    return lambda t: apply_rotary_emb(angles, t)


def rotate(
    rotary: RotaryEmbedding,
    tensors: list[Tensor],
    start: int | Tensor,
    positions: Tensor | None,
    backend: str | tuple[str, ...],
) -> list[Tensor]:
    """`rotation` of queries and then keys [b h n d]: a pair by one launch where the kernels run,
    unless frequencies are learned."""
    q, k = (t.transpose(1, 2) for t in tensors[:2])
    learned = rotary.freqs.requires_grad and torch.is_grad_enabled()
    if learned or not backends.takes_kernels(backend, "rotate", q, k):
        turn = rotation(rotary, tensors[0], start, positions)
        return [turn(t) for t in tensors]
    starts, start = offsets(start)
    factor = float(rotary.interpolate_factor)
    return by_kernel(tensors, rotary.freqs, starts, positions, start, factor)


def check_rotary(rotary: RotaryEmbedding | None, dim_head: int) -> None:
    """An embedding handed in fits heads of this width, at any length.

    Raises:
        ValueError: it scales keys by their position, or rotates more than there is.
    """
    if rotary is not None and rotary.use_xpos:
        raise ValueError(
            "rotary_emb must have use_xpos=False: a key's scale would depend on the length"
        )
    if rotary is not None and 2 * len(rotary.freqs) > dim_head:
        raise ValueError(
            f"rotary_emb must rotate at most dim_head={dim_head} features, "
            f"got {2 * len(rotary.freqs)}"
        )
