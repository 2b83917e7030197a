"""Layers with random weights, and the settings and networks that every law is held for."""

import torch
from rotary_embedding_torch import RotaryEmbedding
from torch import nn

from native_sparse_attention import SparseAttention, compress
from native_sparse_attention.transformer import Attention
from tests.helpers.sizes import sizes

DIM = 24
SIZES = sizes(8, 4, 8, n=2, w=5, dim=DIM, dim_head=8, heads=4, kv_heads=2)

NO_COMPRESSED = dict(branches=("selected", "window"))
# single rotated keys rank blocks of one softmax
TOKENS = sizes(1, 1, branches=("selected",), rank_rotated=True)
SETTINGS = {
    "default": {},
    "stride = window": dict(compress_block_size=8, compress_block_sliding_stride=None),
    "window of windows": dict(compress_block_sliding_stride=8, selection_block_size=4),
    "probs": dict(importance="probs"),
    "paper": dict(importance="probs", num_initial_blocks=1, num_local_blocks=2),
    "shared rankings": dict(selection_stride=4),
    "shared rankings, probs": dict(selection_stride=8, importance="probs", num_local_blocks=2),
    "own rankings": dict(query_heads_share_selected_kv=False),
    "interpolated": dict(interpolated_importance_score=True),
    "diff top-k": dict(use_diff_topk=True),
    "independent": dict(branch_kv="independent"),
    "no memory": dict(num_compressed_mem_kv=0),
    "no selection": dict(num_selected_blocks=0),
    "no local block": dict(num_local_blocks=0),
    "no window": dict(sliding_window_size=0),
    "multi-query": dict(kv_heads=1),
    "multi-head": dict(kv_heads=4),
    "three groups": dict(heads=6, kv_heads=2),
    "no norm": dict(norm=False),
    "no positions": dict(rotary_emb=False),
    "biases and norms": dict(qkv_bias=True, out_bias=True, qk_norm=True, qk_norm_eps=1e-5),
    "caps and sinks": dict(soft_cap=2.0, attention_sinks=True),
    "one softmax": dict(branches=("selected",), num_initial_blocks=1, num_local_blocks=2),
    "one softmax, tokens": dict(TOKENS, importance="max"),
    "one softmax, shared rankings": dict(
        branches=("selected",), selection_stride=4, dense_length=12, importance="max"
    ),
    "dense at first": dict(
        branches=("selected",), dense_length=12, soft_cap=2.0, attention_sinks=True
    ),
    "learned ranking": dict(TOKENS, importance="index"),
    "learned ranking of windows": dict(
        NO_COMPRESSED, importance="index", index_pool="mean", index_dim=6, index_heads=2
    ),
    "no window branch": dict(branches=("compressed", "selected")),
    "no compressed branch": dict(NO_COMPRESSED, branch_kv="independent"),
    "window alone": dict(branches=("window",)),
}
# causal only
STAGES = sizes(
    2, 2, 2, branches=("selected",), rank_rotated=True, importance="max", num_local_blocks=4,
    num_selected_groups=1,
)  # fmt: skip
CAUSAL = {
    "two stages": STAGES,
    "4 bits": TOKENS | dict(importance="head_max", ranking_bits=4, selection_block_size=16),
}


def networks_of(l, d, h):
    """Class and arguments of networks for windows of l tokens, of h heads of width d."""
    window = dict(dim_head=d, compress_window_size=l)
    return {
        "grouped": (compress.GroupedMLP, dict(window, heads=h, expand_factor=1.5)),
        "convolution": (compress.ConvLinearCompress, dict(window, heads=h)),
        "attention pool": (compress.AttentionPool, window),
        "projection": (compress.SingleProjection, window),
        "projection per head": (compress.SingleProjection, dict(window, heads=h)),
        "transformer": (compress.CompressTransformer, dict(num_layers=2, dim=h * d, num_heads=2)),
        "mean": (compress.MeanPool, {}),
        "sum": (compress.SumPool, dict(dim_head=d)),
    }


# networks that a user gives, for layers of `SIZES`
NETWORKS = {"default": lambda: None} | {
    name: lambda network=network, given=given: network(**given)
    for name, (network, given) in networks_of(8, 8, 2).items()
}
PARTS = {name: lambda make=make: dict(compress_mlp=make()) for name, make in NETWORKS.items()} | {
    "gate": lambda: dict(
        strategy_combine_mlp=nn.Sequential(nn.Linear(DIM, 6), nn.Tanh(), nn.Linear(6, 12))
    ),
    "learned frequencies": lambda: dict(rotary_emb=RotaryEmbedding(8, learned_freq=True)),
}


def layer(dtype=torch.float64, **settings):
    """A causal layer whose every weight, memory, position and gate is random and non-zero."""
    kwargs = SIZES | dict(num_compressed_mem_kv=2, causal=True) | settings
    return randomize(SparseAttention(**kwargs)).to(dtype)


# makers of causal layers, in each of the settings, and of a dense one
LAYERS = {
    name: lambda settings=settings: layer(**settings)
    for name, settings in (SETTINGS | CAUSAL).items()
} | {"dense": lambda: Attention(DIM, 8, 4, kv_heads=2).double()}


def randomize(module):
    with torch.no_grad():
        for p in module.parameters():
            if p.requires_grad:
                p.copy_(torch.randn_like(p) * p.shape[-1] ** -0.5 if p.numel() else p)
    return module


def projected(module, x):
    """q, k and v [b h n d] of a layer."""
    parts = module.to_qkv(module.norm(x)).split(module.qkv_split, dim=-1)
    return [t.unflatten(-1, (-1, module.dim_head)).transpose(1, 2) for t in parts]


def step(module, x, run=None, **call):
    """The output, and the gradients of the input and of all parameters, of a module or of what runs
    it in its place."""
    x = x.detach().requires_grad_()
    out = (module if run is None else run)(x, **call)
    outs = out if isinstance(out, tuple) else (out,)
    loss = sum(t.to(torch.promote_types(t.dtype, torch.float32)).square().sum() for t in outs)
    leaves = [x, *(p for p in module.parameters() if p.requires_grad)]
    return [out, *torch.autograd.grad(loss, leaves, materialize_grads=True)]


def normal(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def close(actual, expected, tol=1e-12):
    torch.testing.assert_close(actual, expected, atol=tol, rtol=tol)
