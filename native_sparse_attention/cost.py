"""Costs of a layer: parameters, operations, and bytes of a cache and of a decoding step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from . import blocks
from .attention import SparseAttention
from .checks import check_int, check_type, describe
from .config import NSAConfig
from .ops.reference import entry_words, visible_windows


@dataclass(frozen=True)
class Cost:
    """Costs of one layer, over `batch` sequences of T tokens.

    Args:
        parameters: number of learned values.
        flops: operations of one forward, 2 per multiply-add, without norms, softmaxes, rotary
            embedding and pooling by sums. A forward and backward take about three times as many.
        attention_flops: operations in products of queries with keys, of probabilities with values,
            and in the ranking; `flops` includes them.
        cache_bytes: keys, values and their summaries in a `KVCache` of T tokens, without the tails
            for the next windows, whose size is constant; 0 for a layer that is not causal.
        step_bytes: the least bytes that a decoding step after T tokens reads: each parameter once,
            and each cached key and value that a new token attends to or ranks by; 0 if not causal.
    """

    parameters: int
    flops: int
    attention_flops: int
    cache_bytes: int
    step_bytes: int


class Costs(NamedTuple):
    """A layer, and dense causal or full attention with the same width, heads and norm."""

    sparse: Cost
    dense: Cost


def selected_tokens(i: Tensor, T: int, config: NSAConfig) -> Tensor:
    """Number of keys of selected and forced blocks that queries i see."""
    s, n = config.selection_block_size, config.num_selected_blocks
    initial, num_local = config.num_initial_blocks, config.num_local_blocks
    if not config.causal:
        return torch.full_like(i, min(T, (initial + n) * s))
    # local tokens follow this one; without local blocks there are none
    first_local = (i // s - num_local + 1).clamp(min=0) * s if num_local else i + 1
    forced = first_local.clamp(max=initial * s) + i + 1 - first_local
    complete = blocks.num_complete_blocks(blocks.leader(i, config.selection_stride), config.d, s)
    candidates = complete.minimum(first_local // s if num_local else i // s) - initial
    return forced + candidates.clamp(min=0, max=n) * s


def tokens_ranked(i: Tensor, config: NSAConfig) -> Tensor:
    """Keys of tokens by which a second stage ranks for queries i."""
    size, local = blocks.GROUP * config.selection_block_size, config.num_local_blocks
    groups = i // size - local // blocks.GROUP + 1
    return groups.clamp(min=0, max=config.num_selected_groups) * size


def keys_read(i: Tensor, T: int, config: NSAConfig) -> Tensor:
    """Keys of all branches that queries i attend to, memory slots included."""
    w, read = config.sliding_window_size, torch.zeros_like(i)
    if "compressed" in config.branches:
        windows = blocks.num_windows(T, config.d, causal=config.causal)
        read = visible_windows(i, windows, config.d, config.causal)[1]
        read = read + config.num_compressed_mem_kv
    if "selected" in config.branches:
        read = read + selected_tokens(i, T, config)
    if "window" in config.branches:
        read = read + i.clamp(max=w) + 1 + (0 if config.causal else (T - 1 - i).clamp(max=w))
    if config.causal:
        return torch.where(i < config.dense_length, i + 1, read)
    return torch.full_like(i, T) if config.dense_length >= T else read


def first_ranking(T: int, config: NSAConfig) -> int:
    """The first of T queries that ranks blocks, T if none does: dense ones rank only for others."""
    if config.branches == ("selected",) and config.selection_stride > 1:
        return T if config.dense_length >= T else 0  # dense tokens rank for others
    if config.branches != ("selected",):
        return 0
    return T if config.dense_limit >= T else config.dense_length * config.causal


def nsa_cost(
    config: NSAConfig,
    T: int,
    *,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    compress_mlp: Module | None = None,
) -> Costs:
    """Count the costs of a `SparseAttention` with these settings, and of dense attention, over
    `batch` sequences of `T` tokens.

    Query i of a head multiplies `4 D` numbers for each key that it sees: `i // d` windows and m
    memory slots, the tokens of its selected, initial and local blocks, and `min(i, w) + 1` of the
    window. The ranking multiplies `2 D` for each window and group ("logits", "max") or head
    ("probs", "head_max", or one ranking per head), once per `selection_stride` tokens; in two
    stages once per group, and for every query the tokens of `num_selected_groups` groups, and a
    decoding step reads that share of the windows. A dense query, as all of dense attention, sees
    `i + 1` keys and ranks none.

    Args:
        dtype: dtype of weights, activations and cache.
        compress_mlp: the compression network, the layer's own by default. It must run on meta
            tensors.
    """
    from torch.utils.flop_counter import FlopCounterMode  # which imports Triton

    check_type("config", config, NSAConfig, "an NSAConfig")
    T, batch = check_int("T", T, 1), check_int("batch", batch, 1)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating dtype, got {describe(dtype)}")
    with torch.device("meta"):
        layer = SparseAttention.from_config(config, compress_mlp=compress_mlp, rotary_emb=False)
        layer.to(dtype)
    H, D, K = config.heads, config.dim_head, layer.kv_heads
    d, l, size = config.d, config.compress_block_size, dtype.itemsize
    i = torch.arange(T)
    num_kv = len(config.branches) if config.branch_kv == "independent" else 1
    networks = [] if layer.ranks_by_tokens() else [layer.k_compress, layer.v_compress]
    networks = [net for net in networks if net is not None]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        windows = blocks.num_windows(T, d, causal=config.causal)
        for network in networks:
            network(torch.empty(batch, K, windows, l, D, dtype=dtype, device="meta"))

    attention = 4 * D * H * batch * int(keys_read(i, T, config).sum())
    # width of the queries and keys that rank, and bytes of a cached key
    width, ranking_entry = D, K * D * size
    linears = layer.to_qkv, layer.to_strategy_combine, layer.to_index, layer.combine_heads
    matrices = [p for m in linears if m is not None for p in m.parameters() if p.ndim == 2]
    weights = sum(p.numel() for p in matrices)
    if layer.to_index is not None:
        width, ranking_entry = layer.index_dim, layer.index_heads * layer.index_dim * size
    if config.ranks:
        per_head = config.importance == "probs" or config.ranks_by_heads
        per_head |= not config.query_heads_share_selected_kv
        first, stride = first_ranking(T, config), config.leader_stride
        scored = int(visible_windows(i[first::stride], windows, d, config.causal)[1].sum())
        scored += int(tokens_ranked(i[first :: config.selection_stride], config).sum())
        attention += 2 * width * (H if per_head else K) * batch * scored
    parameters = sum(p.numel() for p in layer.parameters())
    entry = 2 * K * D * size
    has_window_cache = num_kv > 1 and config.branches[-1] == "window"
    window_entry = entry if len(networks) == 2 else ranking_entry * len(networks)
    packed = 0  # of the keys that rank
    if layer.packs_keys():
        s = layer.selection_block_size
        packed = T // s * K * 2 * entry_words(s, D)
    cache = batch * ((2 if has_window_cache else 1) * T * entry + T // d * window_entry + packed)
    read = int(keys_read(torch.tensor([T]), T + 1, config)) * entry
    if "compressed" in config.branches:
        read -= config.num_compressed_mem_kv * entry
    elif config.ranks and first_ranking(T + 1, config) <= T:
        tokens = int(tokens_ranked(torch.tensor([T]), config))
        every = config.leader_stride if config.num_selected_groups else 1
        read += packed or (T // d // every + tokens) * ranking_entry
    flops = 2 * batch * T * weights + counter.get_total_flops() + attention
    memory = (cache, parameters * size + batch * read) if config.causal else (0, 0)
    sparse = Cost(parameters, flops, attention, *memory)

    weights = config.dim * (2 * H + 2 * K) * D
    parameters = weights + sum(p.numel() for p in layer.norm.parameters())
    parameters += (H + 2 * K) * D * config.qkv_bias + config.dim * config.out_bias
    parameters += 2 * D * config.qk_norm
    attention = 4 * D * H * batch * (T * (T + 1) // 2 if config.causal else T * T)
    cache = batch * T * entry
    memory = (cache, parameters * size + cache + batch * entry) if config.causal else (0, 0)
    dense = Cost(parameters, 2 * batch * T * weights + attention, attention, *memory)
    return Costs(sparse, dense)
