"""Sequences of different lengths, packed one after another into a single row. Mods for one sequence
become mods for the packed row; attention takes torch's nested tensors.

    offsets     begin of each sequence and end of the last one, [sequences + 1]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..checks.scalars import check_callable, shown
from ..checks.tensors import check_groups, check_same, check_scale, check_shapes
from ..compat import transforms
from .dense import dense_attention
from .gallery import check_cu_seqlens, sequence_of
from .scores import ScoreMod
from .tiles import MaskMod, block_mask_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# smallest head width and limit of recompilations, as in ops/flex.py
MIN_WIDTH = 16
RECOMPILE_LIMIT = 64


class Packing:
    """The sequence of each token of a packed row, and the token's position in that sequence."""

    def __init__(self, offsets: Tensor, length: int) -> None:
        self.sequence = sequence_of(offsets, length)
        self.position = torch.arange(length, device=offsets.device) - offsets[self.sequence]


def packings(offsets: Tensor, kv_offsets: Tensor | None) -> tuple[Packing, Packing]:
    check_cu_seqlens("offsets", offsets)
    of_q = Packing(offsets, int(offsets[-1]))
    if kv_offsets is None:
        return of_q, of_q
    check_cu_seqlens("kv_offsets", kv_offsets)
    if len(kv_offsets) != len(offsets):
        raise ValueError(
            f"kv_offsets must be of {len(offsets) - 1} sequences as offsets are, "
            f"got {len(kv_offsets) - 1}"
        )
    return of_q, Packing(kv_offsets, int(kv_offsets[-1]))


def masked_within(mask_mod: MaskMod | None, of_q: Packing, of_kv: Packing) -> MaskMod:
    q_sequence, q_position = of_q.sequence, of_q.position
    kv_sequence, kv_position = of_kv.sequence, of_kv.position

    def jagged_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        same = q_sequence[q_idx] == kv_sequence[kv_idx]
        if mask_mod is None:
            return same
        return same & mask_mod(q_sequence[q_idx], h, q_position[q_idx], kv_position[kv_idx])

    return jagged_mask


def scored_within(score_mod: ScoreMod, of_q: Packing, of_kv: Packing) -> ScoreMod:
    q_sequence, q_position, kv_position = of_q.sequence, of_q.position, of_kv.position

    def jagged_score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score_mod(score, q_sequence[q_idx], h, q_position[q_idx], kv_position[kv_idx])

    return jagged_score


def jagged_mask_mod(
    mask_mod: MaskMod | None, offsets: Tensor, kv_offsets: Tensor | None = None
) -> MaskMod:
    """`mask_mod` within each sequence of a packed row. No pair crosses sequences.

    `mask_mod` gets the number of the sequence as b and positions within the sequence as i and j.
    None allows all pairs of a sequence. `kv_offsets`: offsets of the keys; by default `offsets`.

    Raises:
        ValueError: offsets are malformed, or differ in their number of sequences.
    """
    check_callable("mask_mod", mask_mod, "(b, h, i, j)")
    return masked_within(mask_mod, *packings(offsets, kv_offsets))


def jagged_score_mod(
    score_mod: ScoreMod, offsets: Tensor, kv_offsets: Tensor | None = None
) -> ScoreMod:
    """`score_mod` with the indices of `jagged_mask_mod`.

    Raises:
        ValueError: offsets are malformed, or differ in their number of sequences.
    """
    check_callable("score_mod", score_mod, "(score, b, h, i, j)", required=True)
    return scored_within(score_mod, *packings(offsets, kv_offsets))


# nested tensors


def check_jagged(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """The packed values [tokens, heads, width] and the offsets of a nested tensor [B, j, H, D]."""
    jagged = isinstance(x, Tensor) and x.is_nested and x.layout == torch.jagged
    if not jagged:
        got = f"a tensor of layout {x.layout}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be a nested tensor of layout torch.jagged, got {got}")
    inside: Any = x
    if x.ndim != 4 or inside._ragged_idx != 1:
        raise ValueError(
            f"{name} must have shape [B, j, heads, width], its second axis jagged, "
            f"got {list(x.shape)}"
        )
    if inside.lengths() is not None:
        raise ValueError(f"{name} must have no holes between its sequences: make it contiguous")
    return inside.values(), inside.offsets()


@cache
def compiled() -> Callable[..., Tensor]:
    """Compile flex_attention at first use, with its own count of recompilations."""
    from torch.nn.attention.flex_attention import flex_attention

    def packed_rows(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        return flex_attention(q, k, v, **options)

    return torch.compile(packed_rows, fullgraph=True)


def why_not(q: Tensor, v: Tensor) -> list[str]:
    """Reasons why flex_attention's CUDA kernels cannot run this call; empty if they can."""
    reasons = []
    if q.dtype == torch.float64:
        reasons.append("its CUDA kernels have no float64")
    for name, t in (("q", q), ("v", v)):
        if t.shape[-1] < MIN_WIDTH:
            reasons.append(f"{name} has head width {t.shape[-1]}, needs at least {MIN_WIDTH}")
    return reasons


def jagged_block_mask(
    mask_mod: MaskMod | None, offsets: Tensor, kv_offsets: Tensor | None = None
) -> BlockMask:
    """The block mask of `jagged_mask_mod` on the device of the offsets, to share between layers of
    `jagged_attention`. `mask_mod` may not depend on h.

    Raises:
        ValueError: offsets are malformed, differ in their number of sequences, or hold no token.
    """
    check_callable("mask_mod", mask_mod, "(b, h, i, j)")
    of_q, of_kv = packings(offsets, kv_offsets)
    mod = masked_within(mask_mod, of_q, of_kv)
    return block_mask_of(mod, len(of_q.position), len(of_kv.position), offsets.device)


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_mod: MaskMod | None = None,
    *,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention within each sequence of nested tensors q [B j H D], k [B j K D], v [B j K E].

    On CUDA it runs compiled flex_attention. On the CPU, under `vmap` and under forward-mode AD it
    runs `dense_attention`. (On the CPU flex_attention forms all scores too and has no gradients.)
    Any total length works. Differentiable.

    Args:
        mask_mod, score_mod: mods of one sequence, called as in `jagged_mask_mod`. `mask_mod` may
            not depend on h.
        block_mask: in place of `mask_mod`, the result of `jagged_block_mask` for these offsets.

    Returns:
        A nested tensor [B j H E] with the offsets of q. A query that sees no key gives 0.

    Raises:
        ValueError: tensors are not jagged or do not match; both masks are given; no token.
        NotImplementedError: flex_attention's CUDA kernels do not support the call.
    """
    (q_values, offsets), (k_values, kv_offsets), (v_values, v_offsets) = (
        check_jagged(name, x) for name, x in (("q", q), ("k", k), ("v", v))
    )
    dims = check_shapes(q=(q_values, "T H D"), k=(k_values, "S K D"), v=(v_values, "S K E"))
    check_same(q=q_values, k=k_values, v=v_values)
    check_groups(dims["H"], dims["K"])
    if v_offsets is not kv_offsets and not torch.equal(v_offsets, kv_offsets):
        raise ValueError("k and v must have the same offsets, got different ones")
    if len(offsets) != len(kv_offsets):
        raise ValueError(f"q has B={len(offsets) - 1} but k has B={len(kv_offsets) - 1}")
    if 0 in (dims["T"], dims["S"]):
        raise ValueError("q and k must hold one token at least, got none")
    if mask_mod is not None and block_mask is not None:
        raise ValueError("mask_mod or block_mask must be given, and not both, got both")

    check_callable("mask_mod", mask_mod, "(b, h, i, j)")
    check_callable("score_mod", score_mod, "(score, b, h, i, j)")
    if block_mask is not None:
        from torch.nn.attention.flex_attention import BlockMask

        if not isinstance(block_mask, BlockMask):
            raise ValueError(f"block_mask must be a BlockMask or None, got {shown(block_mask)}")
    scale = check_scale(scale)

    of_q = Packing(offsets, dims["T"])
    of_kv = of_q if kv_offsets is offsets else Packing(kv_offsets, dims["S"])
    within = score_mod and scored_within(score_mod, of_q, of_kv)
    if block_mask is None:
        mod = masked_within(mask_mod, of_q, of_kv)
        block_mask = block_mask_of(mod, dims["T"], dims["S"], q_values.device)
    elif block_mask.shape[-2:] != (dims["T"], dims["S"]):
        raise ValueError(
            f"block_mask must be of {dims['T']} queries and {dims['S']} keys, "
            f"got {block_mask.shape[-2]} and {block_mask.shape[-1]}"
        )
    q_row, k_row, v_row = (t.transpose(0, 1)[None] for t in (q_values, k_values, v_values))
    out = run(q_row, k_row, v_row, block_mask, within, scale)
    return torch.nested.nested_tensor_from_jagged(out[0].transpose(0, 1), offsets)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_mask: BlockMask,
    score_mod: ScoreMod | None,
    scale: float | None,
) -> Tensor:
    """Attention of one packed row: q [1 H T D], k and v [1 K S D|E]."""
    options: dict[str, Any] = {"score_mod": score_mod, "block_mask": block_mask, "scale": scale}
    options["enable_gqa"] = q.shape[1] != k.shape[1]
    if q.is_cuda and not transforms.unsupported_by_kernels():
        reasons = why_not(q, v)
        if reasons:
            raise NotImplementedError(
                f"flex_attention cannot run this call: {'; '.join(reasons)}. Use another dtype or "
                "width, or the CPU."
            )
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            return compiled()(q, k, v, options)
    mask_mod = block_mask.mask_mod
    return dense_attention(q, k, v, mask_mod=mask_mod, score_mod=score_mod, scale=scale)
