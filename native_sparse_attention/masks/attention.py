"""Attention under mods: dense, by flex_attention's definition; and over sequences of different
lengths, packed one after another into a single row. Mods for one sequence become mods for the
packed row. Offsets [sequences + 1] are the begin of each sequence and the end of the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..checks import (
    check_block_mask,
    check_callable,
    check_given,
    check_groups,
    check_same,
    check_scale,
    check_shapes,
    check_tensor,
    describe,
    refusal,
)
from ..ops.reference import masked_softmax, scores, times, upcast
from .gallery import ScoreMod, sequence_ids
from .nsa import MaskMod, block_mask_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask_mod: MaskMod | None = None,
    score_mod: ScoreMod | None = None,
    scale: float | None = None,
) -> Tensor:
    """`softmax(score_mod(scale * q k^T) over the keys that mask_mod allows) v`.

    q [B H T D], k [B K S D], v [B K S E] to [B H T E]. Query head h reads KV head `h // (H / K)`.
    Scores are float32 or wider. A query that sees no key gives 0 and zero gradients. The function
    calls the score mod once, with indices that broadcast against the scores [B H T S].
    """
    dims = check_shapes(q=(q, "B H T D"), k=(k, "B K S D"), v=(v, "B K S E"))
    check_same(q=q, k=k, v=v)
    groups = check_groups(dims["H"], dims["K"])
    check_callable("mask_mod", mask_mod, "(b, h, i, j)")
    check_callable("score_mod", score_mod, "(score, b, h, i, j)")
    scale = check_scale(scale)

    B, H, T, S = (dims[axis] for axis in "BHTS")
    dtype = v.dtype
    q, k, v = upcast(q, k, v)
    logits = scores(q.transpose(1, 2), k.transpose(1, 2), scale).flatten(1, 2)
    if score_mod is not None:
        b, h, i, j = (torch.arange(n, device=q.device) for n in (B, H, T, S))
        modified = score_mod(logits, b[:, None, None, None], h[:, None, None], i[:, None], j)
        check_given(**{"what score_mod returns": modified})
        # flex_attention too takes scores of any dtype, and of mods that do not read the score
        logits = modified.to(logits.dtype).expand_as(logits)
    allowed = ~logits.isneginf()
    if mask_mod is not None:
        from torch.nn.attention.flex_attention import create_mask

        visible = create_mask(mask_mod, B, H, T, S, device=str(q.device))
        check_tensor("what mask_mod returns", visible, (torch.bool,), q.device)
        allowed = allowed & visible
    probs, _ = masked_softmax(logits, allowed)
    out = times(probs.unflatten(1, (-1, groups)), v)
    return out.flatten(1, 2).to(dtype)


def locate(name: str, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The sequence of each packed token, and its position in it."""
    sequence = sequence_ids(name, offsets)
    return sequence, torch.arange(len(sequence), device=offsets.device) - offsets[sequence]


def jagged_mask_mod(
    mask_mod: MaskMod | None, offsets: Tensor, kv_offsets: Tensor | None = None
) -> MaskMod:
    """`mask_mod` within each sequence of a packed row. No pair crosses sequences.

    `mask_mod` gets the number of the sequence as b and positions within the sequence as i and j.
    None allows all pairs of a sequence. `kv_offsets`: offsets of the keys; by default `offsets`.
    """
    check_callable("mask_mod", mask_mod, "(b, h, i, j)")
    q_sequence, q_position = kv_sequence, kv_position = locate("offsets", offsets)
    if kv_offsets is not None:
        kv_sequence, kv_position = locate("kv_offsets", kv_offsets)

    def jagged_mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        same = q_sequence[i] == kv_sequence[j]
        if mask_mod is None:
            return same
        return same & mask_mod(q_sequence[i], h, q_position[i], kv_position[j])

    return jagged_mask


def jagged_score_mod(
    score_mod: ScoreMod, offsets: Tensor, kv_offsets: Tensor | None = None
) -> ScoreMod:
    """`score_mod` with the indices of `jagged_mask_mod`."""
    check_callable("score_mod", score_mod, "(score, b, h, i, j)", required=True)
    sequence, q_position = locate("offsets", offsets)
    kv_position = q_position if kv_offsets is None else locate("kv_offsets", kv_offsets)[1]
    return lambda score, b, h, i, j: score_mod(score, sequence[i], h, q_position[i], kv_position[j])


def jagged_block_mask(
    mask_mod: MaskMod | None, offsets: Tensor, kv_offsets: Tensor | None = None
) -> BlockMask:
    """The block mask of `jagged_mask_mod` on the device of the offsets, to share between layers of
    `jagged_attention`. `mask_mod` may not depend on h."""
    packed_mod = jagged_mask_mod(mask_mod, offsets, kv_offsets)
    q_len, kv_len = int(offsets[-1]), int((offsets if kv_offsets is None else kv_offsets)[-1])
    return block_mask_of(packed_mod, q_len, kv_len, offsets.device)


def unpack(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """The packed values [tokens, heads, width] and the offsets of a nested tensor [B, j, H, D]."""
    nested: Any = x
    is_jagged = isinstance(x, Tensor) and x.is_nested and x.layout == torch.jagged
    if not is_jagged or x.ndim != 4 or nested._ragged_idx != 1 or nested.lengths() is not None:
        kind = "a nested tensor [B, j, heads, width] of layout torch.jagged"
        raise refusal(name, f"{kind}, without holes between its sequences", x)
    return nested.values(), nested.offsets()


@cache
def compiled_attention() -> Callable[..., Tensor]:
    """flex_attention, compiled at first use, with its own count of recompilations."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(lambda *args, **options: flex_attention(*args, **options), fullgraph=True)


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

    On CUDA it runs compiled flex_attention, which has no float64 and needs widths of at least 16,
    on other devices `dense_attention`. (On the CPU flex_attention forms all scores too and has no
    gradients.) Any total length works. Differentiable.

    Args:
        mask_mod, score_mod: mods of one sequence, called as in `jagged_mask_mod`. `mask_mod` may
            not depend on h.
        block_mask: in place of `mask_mod`, the result of `jagged_block_mask` for these offsets.

    Returns:
        A nested tensor [B j H E] with the offsets of q. A query that sees no key gives 0.
    """
    (q_values, offsets), (k_values, kv_offsets), (v_values, v_offsets) = (
        unpack(name, x) for name, x in (("q", q), ("k", k), ("v", v))
    )
    dims = check_shapes(q=(q_values, "T H D"), k=(k_values, "S K D"), v=(v_values, "S K E"))
    check_same(q=q_values, k=k_values, v=v_values)
    groups = check_groups(dims["H"], dims["K"])
    if v_offsets is not kv_offsets and not torch.equal(v_offsets, kv_offsets):
        raise ValueError("k and v must have the same offsets, got different ones")
    if len(offsets) != len(kv_offsets):
        raise ValueError(f"q has B={len(offsets) - 1} but k has B={len(kv_offsets) - 1}")
    if block_mask is not None:
        check_block_mask("block_mask", block_mask, "jagged_block_mask")
    # flex_attention needs a query and a key
    uses_flex = q_values.is_cuda and dims["T"] > 0 and dims["S"] > 0
    if block_mask is None and uses_flex:
        block_mask = jagged_block_mask(mask_mod, offsets, kv_offsets)
    elif block_mask is None:
        mask_mod = jagged_mask_mod(mask_mod, offsets, kv_offsets)
    elif mask_mod is not None or block_mask.shape[-2:] != (dims["T"], dims["S"]):
        got = f"shape {block_mask.shape} and mask_mod={describe(mask_mod)}"
        expected = f"of {dims['T']} queries and {dims['S']} keys, without mask_mod"
        raise refusal("block_mask", expected, got=got)
    if score_mod is not None:
        score_mod = jagged_score_mod(score_mod, offsets, kv_offsets)
    options: dict[str, Any] = {"score_mod": score_mod, "scale": check_scale(scale)}

    # one row [1 heads tokens width]
    rows = [t.transpose(0, 1)[None] for t in (q_values, k_values, v_values)]
    if uses_flex:
        options |= {"block_mask": block_mask, "enable_gqa": groups > 1}
        with torch._dynamo.config.patch(recompile_limit=64):  # shapes of a compiled function
            out = compiled_attention()(*rows, **options)
    else:
        packed_mod = mask_mod if block_mask is None else block_mask.mask_mod
        out = dense_attention(*rows, mask_mod=packed_mod, **options)
    return torch.nested.nested_tensor_from_jagged(out[0].transpose(0, 1), offsets)
