"""Which query heads of a trained model rank blocks for their groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..checks import refusal
from .attention import check_model
from .configuration import drop_in_settings

# an implementation of attention, and the queries that it watches: runs at equal distances
NAME = "nsa_far_mass"
QUERIES, RUNS = 64, 8


def choose_ranking_heads(model: Any, input_ids: Tensor) -> list[list[int]]:
    """Choose, for each layer and KV head, the query head of its group that looks farthest back.

    That is the head with the most attention on keys outside the initial and the local blocks, over
    512 queries from the second half of the text, with dense attention. A trained model loses much
    less when this head ranks the blocks of its group than when the mean query of the group does:
    `use_sparse_attention(model, ranking_heads=choose_ranking_heads(model, input_ids))`.

    Args:
        model: as of `use_sparse_attention`, before or after it.
        input_ids: some text [1, T] without padding; 8192 tokens are enough.

    Raises:
        ValueError: input_ids of another shape, or too short to have keys outside these blocks.

    Returns the number of that head within its group, for each layer and KV head.
    """
    decoder = check_model(model)
    settings = drop_in_settings(decoder.config)
    s = settings["selection_block_size"]
    begin, local = settings["num_initial_blocks"] * s, settings["num_local_blocks"]
    T, least = input_ids.shape[-1], 2 * (begin + local * s + QUERIES)
    if input_ids.ndim != 2 or len(input_ids) != 1 or least > T:
        raise refusal("input_ids", f"[1, T] with T of at least {least}", input_ids)
    far: dict[int, Tensor] = {}

    def attend(module: Any, query: Tensor, key: Tensor, *args: Any, **options: Any) -> Any:
        far[module.layer_idx] = far_mass(query, key, options.get("scaling"), begin, local, s)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, *args, **options)

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    before = decoder.config._attn_implementation
    decoder.set_attn_implementation(NAME)
    try:
        with torch.no_grad():
            decoder.base_model(input_ids=input_ids, use_cache=False)
    finally:
        decoder.set_attn_implementation(before)
    return [far[i].argmax(-1).tolist() for i in range(decoder.config.num_hidden_layers)]


def far_mass(
    query: Tensor, key: Tensor, scale: float | None, begin: int, local: int, s: int
) -> Tensor:
    """Attention [K, G] of query heads [1 H T D] on keys [1 K T D] from `begin` on, before the local
    blocks of s tokens, summed over some queries."""
    (K, T, D), total = key.shape[1:], query.new_zeros((), dtype=torch.float32)
    scale, j = D**-0.5 if scale is None else scale, torch.arange(T, device=key.device)
    for run in range(RUNS):
        first = T // 2 + (T - T // 2 - QUERIES) * run // (RUNS - 1)
        i = torch.arange(first, first + QUERIES, device=key.device)[:, None]
        q = query[0, :, first : first + QUERIES].float().unflatten(0, (K, -1))
        logits = torch.einsum("kgid,kjd->kgij", q, key[0].float()) * scale
        weights = logits.masked_fill(j > i, -torch.inf).softmax(-1)
        is_far = (j >= begin) & (j // s <= i // s - local)
        total = total + (weights * is_far).sum((-1, -2))
    return total
