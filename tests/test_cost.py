"""What `nsa_cost` counts, against layers, caches, drawn masks and the benchmarks' own counts."""

import dataclasses

import pytest
import torch

from benchmarks import problem
from benchmarks.providers import our_branches
from native_sparse_attention import KVCache, NSAConfig, SparseAttention, nsa_cost
from native_sparse_attention.compress import AttentionPool, MeanPool
from native_sparse_attention.cost import keys_read
from native_sparse_attention.ops import reference

CONFIG = NSAConfig(
    dim=48, dim_head=16, heads=4, kv_heads=2, sliding_window_size=5, compress_block_size=8,
    compress_block_sliding_stride=4, selection_block_size=8, num_selected_blocks=2, causal=True,
)  # fmt: skip
VARIED = {
    "plain": {},
    "forced": dict(num_initial_blocks=1, num_local_blocks=2, num_compressed_mem_kv=0),
    "independent": dict(branch_kv="independent", norm=False, attention_sinks=True),
    "shared rankings": dict(selection_stride=4, query_heads_share_selected_kv=False),
    "large stride": dict(compress_block_sliding_stride=16, compress_block_size=16),
    "probs": dict(importance="probs", kv_heads=None),
}
ONE = dict(branches=("selected",), rank_rotated=True)
TOKENS = dict(compress_block_size=1, compress_block_sliding_stride=1)
HELD = {
    "one softmax": (ONE, "ck k v"),
    "tokens": (ONE | TOKENS, "k v"),
    "no ranks": (ONE | dict(num_selected_blocks=0), "k v"),
    "learned": (ONE | TOKENS | dict(importance="index", index_dim=20), "ck k v"),
    **{name: (settings, None) for name, settings in VARIED.items()},
}


@pytest.mark.parametrize("name", HELD)
def test_parameters_and_cache(name):
    """One softmax has no compressed values, and no keys twice where single rotated keys rank."""
    settings, streams = HELD[name]
    config = dataclasses.replace(CONFIG, **settings)
    for network in (None, MeanPool(), AttentionPool(16, 8)):
        if network is not None and (streams or config.compress_block_size != 8):
            continue
        layer = SparseAttention.from_config(config, compress_mlp=network)
        cost = nsa_cost(config, 29, batch=2, dtype=torch.float32, compress_mlp=network).sparse
        assert cost.parameters == sum(p.numel() for p in layer.parameters())
        cache = KVCache(max_length=29)
        with torch.no_grad():
            layer(torch.randn(2, 29, 48), cache=cache)
        held = {n: size for n, size in cache.memory().items() if n[:4] not in ("tail", "leng")}
        assert cost.cache_bytes == sum(held.values()), held
        assert streams in (None, " ".join(sorted(held)))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", VARIED)
def test_keys_that_queries_see(name, causal):
    """By the specification's masks, with a ranking that fills every slot that it can."""
    config = dataclasses.replace(CONFIG, **VARIED[name], causal=causal)
    T, s = 41, config.selection_block_size
    i, c = torch.arange(T)[None], torch.arange(-(-T // s))
    d = config.compress_block_sliding_stride
    forced = reference.forced_blocks(i, c, config)[0]
    window_of = torch.arange(T)[:, None] - torch.arange(T)
    for t in range(T):
        leader = t - t % config.selection_stride
        allowed = ~forced[t]
        if causal:
            last = [b for b in c.tolist() if b < leader // s and all(
                (w + 1) * d - 1 < leader for w in windows_of(b, d, s)
            )]  # fmt: skip
            allowed &= torch.isin(c, torch.tensor(last, dtype=torch.long))
        chosen = forced[t].clone()
        chosen[allowed.nonzero()[: config.num_selected_blocks, 0]] = True
        seen = chosen.repeat_interleave(s)[:T] & ((window_of[t] >= 0) | (not causal))
        near = (window_of[t] <= 5) & (window_of[t] >= (0 if causal else -5))
        windows = t // d if causal else -(-T // d)
        expected = int(seen.sum()) + int(near.sum()) + windows + config.num_compressed_mem_kv
        assert int(keys_read(torch.tensor([t]), T, config)) == expected, t


def windows_of(block, d, s):
    first = block * s // d
    return range(first, first + max(1, s // d))


def test_operations_against_the_benchmarks():
    """At the paper's sizes, where the first blocks leave slots empty, to one part in a hundred."""
    setting = problem.Setting(T=65536, H=32, K=8)
    config = NSAConfig(
        dim=4096, dim_head=128, heads=32, kv_heads=8, sliding_window_size=511,
        compress_block_sliding_stride=16, num_selected_blocks=13, num_initial_blocks=1,
        num_local_blocks=2, causal=True, num_compressed_mem_kv=0,
    )  # fmt: skip
    costs = nsa_cost(config, 65536, compress_mlp=MeanPool())
    counted = problem.attention_flops(setting, [b.count for b in our_branches(setting)])
    counted += problem.scoring_flops(setting, "logits")
    assert costs.sparse.attention_flops == pytest.approx(counted, rel=1e-2)
    assert costs.dense.attention_flops == 4 * 128 * 32 * (65536 * 65537 // 2)
    products = 4096 * (2 * 32 + 2 * 8) * 128
    assert costs.dense.flops - costs.dense.attention_flops == 2 * 65536 * products
    gate = 2 * 65536 * 4096 * 3 * 32
    rest = costs.sparse.flops - costs.sparse.attention_flops
    assert rest == 2 * 65536 * products + gate
    assert costs.dense.cache_bytes == 65536 * 2 * 8 * 128 * 2
    assert costs.sparse.step_bytes < costs.dense.step_bytes / 2


def test_compression_networks_are_counted():
    """The layer's own: two linear maps of each window, of keys and of values."""
    mean = nsa_cost(CONFIG, 64, compress_mlp=MeanPool()).sparse
    own = nsa_cost(CONFIG, 64).sparse
    width = 8 * 16
    assert own.flops - mean.flops == 2 * 2 * (2 * 16 * width * width + 2 * 16 * width * 16)
