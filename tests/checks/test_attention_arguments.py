"""Bad arguments of `SparseAttention`: named, with what was expected and what came."""

import re
import warnings

import pytest
from rotary_embedding_torch import RotaryEmbedding
from torch import nn

from native_sparse_attention import KVCache, SparseAttention
from tests.helpers.layers import DIM, layer
from tests.test_attention import close, normal

# bad arguments: named, with what was expected and what came

GOOD = dict(
    dim=24,
    dim_head=8,
    heads=4,
    sliding_window_size=4,
    compress_block_size=8,
    selection_block_size=8,
    num_selected_blocks=2,
)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(dim=0), "dim must be an integer of at least 1, got 0"),
        (dict(heads=2.0), "heads must be an integer of at least 1, got 2.0"),
        (dict(heads=True), "heads must be an integer of at least 1, got True"),
        (dict(kv_heads=3), "heads must be a multiple of kv_heads, got heads=4 and kv_heads=3"),
        (dict(dim_head=7), "dim_head must be even for rotary embedding, got 7"),
        (dict(sliding_window_size=-1), "sliding_window_size must be an integer of at least 0"),
        (dict(num_compressed_mem_kv=-1), "num_compressed_mem_kv must be an integer of at least 0"),
        (dict(compress_block_sliding_stride=16), "compress_block_size must be at least"),
        (dict(selection_block_size=12), "must divide one another, got 12 and 8"),
        (dict(num_selected_blocks=-1), "num_selected_blocks must be an integer of at least 0"),
        (dict(selection_stride=3), "selection_stride must divide selection_block_size=8"),
        (dict(importance="mean"), "importance must be one of 'logits', 'probs', 'max', 'index'"),
        (dict(branch_kv="both"), "branch_kv must be one of 'shared', 'independent', got 'both'"),
        (dict(backend="cuda"), "backend must be one of 'auto', 'triton', 'flex', 'eager', got"),
        (dict(backend="flex", use_triton_kernel=True), "use_triton_kernel=True asks for"),
        (
            dict(importance="probs", interpolated_importance_score=True),
            "interpolated_importance_score=True goes with importance='logits' only",
        ),
        (dict(rotary_emb=RotaryEmbedding(8, use_xpos=True)), "rotary_emb must have use_xpos=False"),
        (dict(rope_theta=10**400), "rope_theta must be a positive finite number, got int 1000"),
        (dict(rotary_emb=RotaryEmbedding(16)), "rotary_emb must rotate at most dim_head=8"),
    ],
)
def test_bad_constructor(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        SparseAttention(**{**GOOD, **change})


def test_bad_calls():
    module = layer()
    two_sided = layer(causal=False)
    x = normal(2, 9, DIM)
    for call, message in [
        (lambda: module(x[..., :3]), f"inp must have shape [b, n, {DIM}], got [2, 9, 3]"),
        (lambda: module(x[0]), f"inp must have shape [b, n, {DIM}], got [9, {DIM}]"),
        (lambda: two_sided(x, return_cache=True), "need causal=True"),
        (lambda: module(x, cache=((x, x),)), "cache must be a KVCache, got tuple"),
        (lambda: module([1.0]), "inp must be a tensor of floating dtype, got list"),
        (lambda: module(x.long()), "inp must be a tensor of floating dtype, got torch.int64"),
        (lambda: layer(compress_mlp=nn.Identity())(x), "compress_mlp must map [b h w l d] to"),
        (lambda: module(x, generator=3), "generator must be a torch.Generator or None, got 3"),
        (
            lambda: module(x, sliding_window_flex_mask=x.numpy()),
            "sliding_window_flex_mask must be a BlockMask",
        ),
        (
            lambda: module(x, fine_selection_flex_mask=x.numpy()),
            "fine_selection_flex_mask must be a function",
        ),
        (lambda: module(x, lengths=[1, 2]), "lengths goes with a cache"),
        (lambda: module(x, cache=KVCache(), lengths=[1, 10]), "between 0 and 9"),
        (lambda: module(x, cache=KVCache(batch=3)), "cache holds 3 rows but the input has 2"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


def test_triton_says_why_not():
    module = layer(backend="triton")
    with pytest.raises(
        NotImplementedError, match="backend 'triton' cannot run.*Use backend='auto'"
    ):
        module(normal(1, 9, DIM))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(module(normal(1, 9, DIM), disable_triton_kernel=True).shape, (1, 9, DIM))
