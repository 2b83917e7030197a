"""The models that `learning.py` and `recall.py` compare: settings by name, initial weights by seed.

A variant is a dict of JSON values: arguments of SparseAttention, and of these keys:

    dense          True: the layer is dense attention with the same weights
    local_layers   of Transformer: indices of the layers that rank nothing
    share_ranking  one of so many layers ranks, the others take its block indices
    compress_mlp   the network of compressed keys, a name of NETWORKS; the layer's own by default
    ranking_queries  m: the ranking loss of m queries a sequence and layer is added to the loss
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from native_sparse_attention import SparseAttention, Transformer, recipes
from native_sparse_attention.compress import MeanPool, default_compress_mlp
from native_sparse_attention.initialization import reset

from .common import Row

Settings = dict[str, Any]

KEYS = ("dense", "local_layers", "share_ranking", "compress_mlp", "ranking_queries")
# by name, of the head dimension and l
NETWORKS: dict[str, Callable[[int, int], nn.Module]] = {
    "mean": lambda dim_head, l: MeanPool(),
    "random mlp": lambda dim_head, l: default_compress_mlp(dim_head, l, start="random"),
}

# 1 initial, 2 local and 6 ranked blocks of 64 tokens and a window of 256 keys: 832 keys a query,
# and T / 16 compressed ones
THREE: Settings = dict(
    sliding_window_size=255, compress_block_size=32, compress_block_sliding_stride=16,
    selection_block_size=64, num_selected_blocks=6, num_initial_blocks=1, num_local_blocks=2,
)  # fmt: skip
# the preset "short-windows": T / 4 compressed keys
SHORT: Settings = dict(THREE, compress_block_size=8, compress_block_sliding_stride=4)
# the published package's defaults at the same sizes; its network begins with random weights
PUBLISHED: Settings = dict(THREE, num_initial_blocks=0, num_local_blocks=1)
# 1 initial, 5 local and 6 ranked blocks of 64 tokens: 768 keys a query
ONE: Settings = dict(THREE, branches=["selected"], num_local_blocks=5)
ROTATED: Settings = dict(ONE, importance="max", rank_rotated=True)
ROTATED.update(compress_block_size=1, compress_block_sliding_stride=1)
# 1 initial, 8 local and 8 ranked blocks of 64 tokens, or as many tokens in blocks of 32: 1088 keys
WIDE: Settings = dict(ROTATED, num_selected_blocks=8, num_local_blocks=8)
SMALL: Settings = dict(
    ROTATED, selection_block_size=32, num_selected_blocks=16, num_initial_blocks=2,
    num_local_blocks=16,
)  # fmt: skip
# 1 initial, 8 local and 16 ranked blocks of 64 tokens: 1600 keys, the preset of long sequences
LARGE: Settings = dict(WIDE, num_selected_blocks=16)
INDEX: Settings = dict(importance="index", ranking_queries=64)
ANY_HEAD: Settings = dict(importance="head_max", ranking_bits=8)
# what costs less than a score of every token, head group and layer
STAGES: Settings = dict(
    num_selected_groups=16, compress_block_size=16, compress_block_sliding_stride=16
)
RANKINGS: dict[str, Settings] = {
    "any head": dict(importance="head_max"),
    "any head, 8 bits": ANY_HEAD,
    "any head, 8 bits, R = 4": dict(ANY_HEAD, selection_stride=4),
    "32 by any head, 8 bits, R = 4": dict(ANY_HEAD, selection_stride=4, num_selected_blocks=32),
    "any head, 8 bits, one ranking for 2 layers": dict(ANY_HEAD, share_ranking=2),
    "any head, 8 bits, R = 16": dict(ANY_HEAD, selection_stride=16),
    "any head, 8 bits, one ranking for 4 layers": dict(ANY_HEAD, share_ranking=4),
    "any head, two stages": dict(importance="head_max", **STAGES),
    "index of 32": dict(INDEX, index_dim=32),
    "any head, layers 2 and 4 local": dict(importance="head_max", local_layers=[1, 3]),
    "any head, 8 bits, layers 2 and 4 local": dict(ANY_HEAD, local_layers=[1, 3]),
    "any head, 8 bits, layers 1 and 3 local": dict(ANY_HEAD, local_layers=[0, 2]),
}

# the most valuable first: this is the order in which they are trained
VARIANTS: dict[str, Settings] = {
    # nothing to rank: no time is spent on compressed keys
    "dense": dict(ONE, dense=True, num_selected_blocks=0),
    "window": dict(THREE, branches=["window"]),
    "paper's ranking, means": dict(
        THREE, compress_mlp="mean", importance="probs", branch_kv="independent"
    ),
    "one softmax, max of tokens, rotated": ROTATED,
    "published form": dict(PUBLISHED, compress_mlp="random mlp"),
    "1088 keys": WIDE,
    "1088 keys, blocks of 32": SMALL,
    "MLP over windows of 8": SHORT,
    "1600 keys, blocks of 64": LARGE,
    **{f"1088 keys, {name}": WIDE | ranking for name, ranking in RANKINGS.items()},
    **{f"1088 keys, blocks of 32, {name}": SMALL | ranking for name, ranking in RANKINGS.items()},
    **{f"1600 keys, blocks of 64, {name}": LARGE | ranking for name, ranking in RANKINGS.items()},
}


def scaled(settings: Settings, factor: int) -> Settings:
    """These settings with blocks and windows of fewer tokens, for shorter sequences. Compression
    windows of at most 8 tokens stay."""
    found, names = dict(settings), ["selection_block_size", "selection_stride"]
    if found.get("compress_block_size", 0) > 8:
        names += ["compress_block_size", "compress_block_sliding_stride"]
    for name in names:
        if name in found:
            found[name] = max(1, found[name] // factor)
    if "sliding_window_size" in found:
        found["sliding_window_size"] = max(1, (found["sliding_window_size"] + 1) // factor - 1)
    return found


def check(name: str, settings: Settings, shape: dict[str, Any]) -> None:
    """Raises ValueError for settings that make no model of this shape."""
    network = settings.get("compress_mlp")
    if network is not None and network not in NETWORKS:
        known = ", ".join(NETWORKS)
        raise ValueError(f"compress_mlp of {name} must be one of {known}, got {network!r}")
    try:
        with torch.device("meta"):
            make(settings, shape)
    except (TypeError, ValueError) as error:
        raise ValueError(f"variant {name}: {error}") from None


# the model


def make(settings: Settings, shape: dict[str, Any]) -> Transformer:
    layer = {key: value for key, value in settings.items() if key not in KEYS}
    if "compress_mlp" in settings:
        network = NETWORKS[settings["compress_mlp"]]
        layer["compress_mlp"] = network(shape["dim_head"], layer["compress_block_size"])
    every = settings.get("share_ranking")
    model = Transformer(
        **shape, use_sparse_attn=True, sparse_attn_kwargs=layer,
        local_layers=settings.get("local_layers", ()),
        share_ranking=None if every is None else range(0, shape["depth"], every),
    )  # fmt: skip
    if settings.get("dense"):
        recipes.set_dense(model, True)
    return model


def build(settings: Settings, shape: dict[str, Any], seed: int) -> Transformer:
    """A variant's model on the CPU. Weights of equal name and shape have equal initial values in
    all variants of a seed, those of `compress_mlp` where the whole network has equal shapes. With
    `branch_kv="independent"` all branches begin with the same projections."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(hashed(seed))
        model = make(settings, shape)
        torch.manual_seed(seed)
        donor = make({"branches": ["selected"]}, shape)
        given, own = donor.state_dict(), model.state_dict()
        with torch.no_grad():
            for name, value in given.items():
                if name.endswith("to_qkv.weight"):
                    kv = own[name].shape[0] - shape["heads"] * shape["dim_head"]
                    q, *rest = value.split([len(value) - 2 * dim_kv(shape), 2 * dim_kv(shape)])
                    value = torch.cat([q, *rest * (kv // (2 * dim_kv(shape)))])
                own[name].copy_(value)
        for index, attn in enumerate(layers(model)):
            for network in (attn.k_compress, attn.v_compress):
                if network is not None:
                    torch.manual_seed(hashed(seed, index))
                    reset(network)
    return model


def dim_kv(shape: dict[str, Any]) -> int:
    return shape["kv_heads"] * shape["dim_head"]


def hashed(*numbers: int) -> int:
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:4], "big")


def layers(model: Transformer) -> list[Any]:
    blocks: list[Any] = list(model.layers)
    return [attn for attn, _ in blocks]


def ranking_of(
    settings: Settings, seed: int, step: int, T: int, device: torch.device
) -> dict[str, Any]:
    """Arguments of the model's forward in a step with a ranking loss, of rows of T tokens. Queries
    are drawn here, as a compiled graph takes no generator."""
    m = settings.get("ranking_queries")
    if m is None:
        return {}
    generator = torch.Generator(device).manual_seed(hashed(seed, step))
    drawn = torch.randperm(T, generator=generator, device=device)[:m]
    return dict(ranking_queries=drawn.sort().values)


def keys_per_query(layer: SparseAttention, T: int) -> dict[str, int]:
    """Keys that the last query of T tokens reads, by branch."""
    config: Any = layer.config
    if layer.dense:
        return {"dense": T}
    blocks = config.num_selected_blocks + config.num_initial_blocks + config.num_local_blocks
    keys = {
        "compressed": T // config.compress_block_sliding_stride,
        "selected": min(T, blocks * config.selection_block_size),
        "window": min(T, config.sliding_window_size + 1),
    }
    return {name: count for name, count in keys.items() if name in config.branches}


def describe(model: Transformer, T: int) -> Row:
    """Fields of a row: the size of the model, keys of a query, every setting of a layer."""
    layer = layers(model)[0]
    names = [field.name for field in fields(layer.config) if field.name != "block_sizes"]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "keys_per_query": keys_per_query(layer, T),
        "config": {name: getattr(layer.config, name) for name in names},
    }
