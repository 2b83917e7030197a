"""Bad arguments of public functions and constructors: one ValueError that names the argument; and
good ones of unusual types."""

import inspect
import re

import numpy as np
import pytest
import torch
from einops import EinopsError
from rotary_embedding_torch import RotaryEmbedding
from torch import nn

import native_sparse_attention as nsa
from native_sparse_attention import KVCache, SparseAttention, Transformer, masks, varlen, view
from native_sparse_attention import compress as networks
from native_sparse_attention.transformer import Attention
from tests.helpers.sizes import sizes

B, T, H, K, D = 2, 16, 4, 2, 8
SELECTION = sizes(8, 4, 8, n=2)
LAYER = dict(
    dim=16, dim_head=8, heads=4, kv_heads=2, sliding_window_size=4, causal=True, **SELECTION
)
MODEL = dict(num_tokens=32, dim=16, depth=1, dim_head=8, heads=2)

q, k, v = torch.randn(B, T, H, D), torch.randn(B, T, K, D), torch.randn(B, T, K, D)
ck, cv = torch.randn(B, 4, K, D), torch.randn(B, 4, K, D)
qkv = dict(q=q, k=k, v=v)
gates = torch.rand(B, T, H, 3)
indices = torch.zeros(B, T, K, 2, dtype=torch.int32)
square = torch.randn(B, H, T, D)
layer, model = SparseAttention(**LAYER), Transformer(**MODEL, use_sparse_attn=True)
ids = torch.randint(0, 32, (B, T))
whole = dict(**qkv, ck=ck, cv=cv, branch_gates=gates, sliding_window_size=4, **SELECTION)
compressed = dict(q=q, ck=ck, cv=cv, compress_block_sliding_stride=4)
selected = dict(**qkv, block_indices=indices, selection_block_size=8)
step = whole | dict(q=q[:, :1], branch_gates=gates[:, :1], lengths=torch.tensor([5, 9]))
grouped = torch.randn(B, K, 2, T, D)
blocks = dict(block_q=4, block_kv=4)
paged = dict(page_size=8, num_pages=9, batch=2, max_length=32)
canvas = dict(canvas_height=4, canvas_width=4, kernel_height=3)
window = dict(dim_head=2, compress_window_size=2)
# name: (function, a good call of it)
CALLS = {
    "SparseAttention": (SparseAttention, LAYER),
    "Transformer": (Transformer, MODEL),
    "KVCache": (KVCache, {}),
    "PagedKVCache": (nsa.PagedKVCache, paged),
    "layer": (layer.forward, dict(inp=torch.randn(B, T, 16))),
    "model": (model.forward, dict(ids=ids)),
    "stream": (model.stream, dict(prompt=ids, seq_len=T + 1)),
    "new_cache": (model.new_cache, paged),
    "compressed": (nsa.compressed_attention, compressed),
    "selected": (nsa.selected_attention, selected),
    "window": (nsa.sliding_window_attention, dict(**qkv, sliding_window_size=4)),
    "select": (nsa.select_blocks, dict(q=q, ck=ck, **SELECTION)),
    "whole": (nsa.native_sparse_attention, whole),
    "decode": (nsa.decode_attention, step),
    "chunked": (nsa.chunked_attention, qkv),
    "block_masked": (nsa.block_masked_attention, dict(
        q=grouped, k=grouped[:, :, 0], v=grouped[:, :, 0], segment_ids=None,
        mask=torch.ones(T, T), mask_value=-1e30, **blocks,
    )),
    "mask_blocker": (nsa.mask_blocker, dict(mask=torch.ones(T, T), **blocks)),
    "mha": (nsa.mha_reference, dict(q=square, k=square, v=square)),
    "mha backward": (nsa.mha_reference_bwd, dict(
        dict.fromkeys(("q", "k", "v", "o", "do"), square), ab=None, segment_ids=None,
        **dict.fromkeys("lm", square[..., 0]),
    )),
    "create_sliding_mask": (masks.create_sliding_mask, dict(seq_len=16, window_size=4)),
    "create_fine_mask": (masks.create_fine_mask, dict(seq_len=16, fine_block_size=4)),
    "create_compress_mask": (masks.create_compress_mask, dict(
        seq_len=16, kv_seq_len=4, compress_block_sliding_stride=4
    )),
    "sliding_mask_mod": (masks.sliding_mask_mod, dict(window_size=4)),
    "compress_mask_mod": (masks.compress_mask_mod, dict(stride=4)),
    "selected_mask_mod": (masks.selected_mask_mod, dict(
        membership=torch.ones(1, 2, 16, 5, dtype=torch.bool), block_size=4
    )),
    "block_mask_of": (masks.block_mask_of, dict(mask_mod=masks.causal, q_len=16, kv_len=16)),
    "sliding_window": (masks.sliding_window, dict(window=4)),
    "dilated_window": (masks.dilated_window, dict(window=4, dilation=2)),
    "prefix_lm": (masks.prefix_lm, dict(prefix_length=4)),
    "sasa": (masks.sasa, canvas),
    "natten": (masks.natten, canvas),
    "document": (masks.document, dict(offsets=torch.tensor([0, 4, 16]))),
    "dense": (masks.dense_attention, dict(q=square, k=square, v=square)),
    "soft_cap": (masks.soft_cap, dict(cap=2.0)),
    "alibi": (masks.alibi, dict(num_heads=4)),
    "dense layer": (Attention(16, 8, 2).forward, dict(x=torch.randn(B, T, 16))),
    "preset": (nsa.NSAConfig.preset, dict(name="paper", dim=32, dim_head=16, heads=4)),
    "nsa_cost": (nsa.nsa_cost, dict(config=nsa.NSAConfig(**LAYER), T=8)),
    "warmup": (nsa.warmup, dict(config=nsa.NSAConfig(**LAYER))),
    "below_or_on_diag": (nsa.below_or_on_diag, dict(r=0, r_blk_size=4, c=0, c_blk_size=4)),
    "byte_texts": (view.byte_texts, dict(data=b"")),
    "MLP": (networks.default_compress_mlp, window),
    "SumPool": (networks.SumPool, dict(dim_head=2)),
    "AttentionPool": (networks.AttentionPool, window),
    "ConvLinearCompress": (networks.ConvLinearCompress, window | dict(heads=1)),
    "GroupedMLP": (networks.GroupedMLP, window | dict(heads=1)),
    "SingleProjection": (networks.SingleProjection, window),
    "CompressTransformer": (
        networks.CompressTransformer, dict(num_layers=1, dim=4, num_heads=2)
    ),
}  # fmt: skip
TYPES = {"int": (None, "8", 1.5, True, -1, 2**40, 2**70, [8]), "bool": ("False", 2, None, [True])}
NUMBERS = ("1", True, float("nan"), float("inf"), 1j, [1.0], torch.ones(()))
FACTORS = {
    "scale", "soft_cap", "softmax_scale", "mask_value", "cap", "temperature", "filter_thres",
    "top_p", "dropout", "expand_factor", "ff_expansion_factor", "compress_mlp_expand_factor",
    "qk_norm_eps", "gain",
}  # fmt: skip


def bad_values(name, parameter, base):
    annotation = str(parameter.annotation)
    value = base.get(name)
    if isinstance(value, torch.Tensor):
        dtypes = (torch.complex64,)
        dtypes += (torch.bool, torch.long if value.is_floating_point() else torch.float16)
        other = [value.to(dtype) for dtype in dtypes if dtype != value.dtype]
        other += [value[None, None], value.to_sparse()]
        if sum(isinstance(t, torch.Tensor) for t in base.values()) > 1:
            other.append(value.to("meta"))
        return [None, [1.0], "x", *(other if name != "mask" else ())]
    if name in FACTORS:
        return list(NUMBERS)
    for kind, values in TYPES.items():
        if annotation in (kind, f"{kind} | None"):
            return [value for value in values if value is not None or "None" not in annotation]
    if annotation.startswith("str"):
        return ["nothing", 3, np.array([1, 2])]
    if "Tensor | None" in annotation and "int" not in annotation:
        return ["x", [1.0], torch.zeros(1, 1, 1, 1, 7, device="meta")]
    return ["x", [None]]


@pytest.mark.parametrize("call", CALLS)
def test_bad_values(call):
    function, base = CALLS[call]
    for name, parameter in inspect.signature(function).parameters.items():
        # of a selection_stride above 1, and of the kernels
        if name in ("ranking", "counters") or parameter.kind == parameter.VAR_KEYWORD:
            continue
        for bad in bad_values(name, parameter, base):
            told = "nothing"
            try:
                function(**{**base, name: bad})
            except ValueError as error:
                told = str(error)
            assert re.search(rf"\b{name}", told), f"{name}={bad!r}: {told}"


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, torch.tensor])
def test_integers_of_any_type(kind):
    """They are plain ints of the module, and what is computed is the same."""

    def converted(settings):
        return {n: v if isinstance(v, (bool, str)) else kind(v) for n, v in settings.items()}

    torch.manual_seed(0)
    plain = SparseAttention(**LAYER)
    torch.manual_seed(0)
    other = SparseAttention(**converted(LAYER))
    assert all(type(getattr(other, name)) in (int, bool) for name in LAYER)
    x = torch.randn(1, 20, 16)
    torch.testing.assert_close(other(x), plain(x))
    assert type(KVCache(max_length=kind(8)).max_length) is int
    torch.testing.assert_close(
        nsa.sliding_window_attention(q, k, v, sliding_window_size=kind(3), q_offset=kind(0)),
        nsa.sliding_window_attention(q, k, v, sliding_window_size=3),
    )
    for layer in (
        nsa.SparseAttention(**{**LAYER, "causal": np.bool_(False)}),
        Attention(16, 8, 2, np.bool_(False)),
    ):
        assert layer.causal is False and layer(x).shape == x.shape


@pytest.mark.parametrize(
    "q, k, indices",
    [
        ((2, 4, 16, 8), (2, 2, 16, 8), (2, 16, 2, 1)),  # 4 heads, of 2 KV heads
        ((2, 4, 15, 8), (2, 4, 16, 8), (2, 15, 4, 1)),
        ((2, 4, 16, 8), (2, 4, 16, 8), (2, 16, 4, 1)),
    ],
)
def test_hint_for_the_order_of_axes(q, k, indices):
    q, k, indices = torch.randn(q), torch.randn(k), torch.zeros(indices, dtype=torch.int32)
    with pytest.raises(ValueError, match=re.escape("did you pass [B, H, T, D]?")):
        nsa.selected_attention(q, k, k, indices, selection_block_size=4)


X = torch.randn(B, T, 16)


@pytest.mark.parametrize(
    "settings",
    [
        dict(strategy_combine_mlp=nn.Linear(16, 8)),
        dict(compress_mlp=nn.Identity()),
        dict(compress_mlp=networks.AttentionPool(4, 8)),
        dict(compress_mlp=networks.GroupedMLP(8, 8, 3)),
    ],
    ids=str,
)
def test_networks_of_other_widths(settings):
    """PyTorch, einops or the layer raises, at the latest in a forward."""
    with pytest.raises((ValueError, TypeError, RuntimeError, EinopsError)):
        SparseAttention(**LAYER | settings)(X)


def test_unexpected_keywords():
    for kind in (ValueError, TypeError):
        with pytest.raises(kind, match="did you mean soft_cap"):
            nsa.sliding_window_attention(q, k, v, sliding_window_size=3, softcap=1.0)


ONE = dict(branches=("selected",))
SINGLE = ONE | {n: t for n, t in whole.items() if n not in ("cv", "branch_gates")}
INDEX = dict(ONE, importance="index")
ROTATED = dict(ONE, importance="max", rank_rotated=True)
GIVEN = dict(importance="given")
LISTS = dict(inp=X, block_indices=torch.zeros(B, T, 1, 1, dtype=torch.int32))
PACKED, IDS = torch.tensor([0, T]), torch.zeros(B, T, dtype=torch.long)
NINE = torch.ones(9, dtype=torch.bool)
ROW = X[:1].unflatten(2, (2, 8))
# calls beside those above
BASES = CALLS | {
    "two-sided": (SparseAttention(**LAYER | dict(causal=False)), dict(inp=X)),
    "index": (SparseAttention, LAYER | INDEX),
    "index config": (nsa.NSAConfig, LAYER | INDEX),
    "index layer": (SparseAttention(**LAYER | INDEX), dict(inp=X)),
    "a row": (SparseAttention(**LAYER), dict(inp=X[:1])),
    "one row": (nsa.sliding_window_attention, dict.fromkeys("qkv", ROW) | dict(
        sliding_window_size=2
    )),
    "own rankings": (
        nsa.native_sparse_attention, SINGLE | dict(query_heads_share_selected_kv=False)
    ),
    "windows": (nsa.compressed_attention, dict(
        q=ROW, ck=ROW[:, :2], cv=ROW[:, :2], compress_block_sliding_stride=4
    )),
    "conv": (networks.ConvLinearCompress(2, 4, 4), dict(kv=torch.zeros(1, 2, 3, 6, 4))),
    "kv": (networks.CompressTransformer(1, 8, 2), dict(kv=torch.randn(1, 3, 2, 5, 4))),
    "stages": (nsa.NSAConfig, LAYER | ROTATED | dict(num_local_blocks=4, num_selected_groups=2)),
    "8 bits": (nsa.NSAConfig, LAYER | ROTATED | dict(ranking_bits=8)),
    "stages layer": (
        nsa.native_sparse_attention,
        SINGLE | dict(importance="max", num_local_blocks=4, num_selected_groups=2),
    ),
    **{name: (SparseAttention(**LAYER | ONE | settings), LISTS) for name, settings in dict(
        given={}, alone=GIVEN, window_layer=dict(branches=("window",)),
        groups=dict(selection_stride=4), top_k=dict(use_diff_topk=True),
    ).items()},
    "two-sided model": (Transformer(**MODEL, causal=False).stream, CALLS["stream"][1]),
}  # fmt: skip
TWO_WAYS = "use_flex_fine_selection and use_triton_fine_selection are two ways"
# what a call is changed by, of each message
REFUSED = {
    "SparseAttention": {
        "heads must be a multiple of kv_heads, got heads=4 and kv_heads=3": dict(kv_heads=3),
        "dim_head must be even for rotary embedding, got 7": dict(dim_head=7),
        "compress_block_size must be at least": dict(compress_block_sliding_stride=16),
        "must divide one another, got 10 and 4": dict(selection_block_size=10),
        "selection_stride must divide selection_block_size=8": dict(selection_stride=3),
        "use_triton_kernel=True asks for": dict(backend="flex", use_triton_kernel=True),
        "interpolated_importance_score=True goes with importance='logits', got 'probs'": dict(
            importance="probs", interpolated_importance_score=True
        ),
        "rotary_emb must have use_xpos=False": dict(rotary_emb=RotaryEmbedding(8, use_xpos=True)),
        "soft_cap must be a number of at least 1.2e-38 or None, got -1.0": dict(soft_cap=-1.0),
        "compress_mlp_expand_factor must be a finite": dict(compress_mlp_expand_factor=0),
        "qk_norm_eps must be a number of at least 1e-20, got 1e-21": dict(qk_norm_eps=1e-21),
        "each once, got ('selected', 'selected')": dict(branches=("selected", "selected")),
        "each once, got ('selected', 'far')": dict(branches=("selected", "far")),
        "dense_length=8 goes with branches=('selected',), got": dict(dense_length=8),
        "dense_length must be a multiple of the 4 tokens": dict(
            ONE, dense_length=6, selection_stride=4
        ),
        "rank_rotated=True goes with branches without 'compressed'": dict(rank_rotated=True),
        "strategy_combine_mlp must be None": dict(ONE, strategy_combine_mlp=nn.Linear(16, 4)),
        "of at least 0, got a torch.bool": dict(num_selected_blocks=torch.tensor(True)),
        "of at least 1, got a torch.int64": dict(index_dim=torch.tensor([8])),
    },
    "index": {
        "importance='index' goes with branches without": dict(branches=("compressed", "selected")),
        "use_diff_topk=False, got True": dict(use_diff_topk=True),
        "query_heads_share_selected_kv=True, got False": dict(query_heads_share_selected_kv=False),
        "index_heads must be 1 or kv_heads=2, got 3": dict(index_heads=3),
        "index_dim must be at least 8": sizes(1, 1, index_dim=6, rank_rotated=True),
        "compress_mlp must be None with": dict(compress_mlp=networks.MeanPool()),
    },
    "index config": {
        "scale must be a number of at least 1.2e-38 or None, got 0": dict(scale=0),
    },
    "index layer": {
        "ranking_queries must be an integer of at least 1": dict(ranking_queries=0),
        "got a torch.bool": dict(ranking_queries=torch.ones(3, dtype=torch.bool)),
        "of shape [1, 3] on cpu": dict(ranking_queries=torch.ones(1, 3, dtype=torch.long)),
        "of shape [3] on meta": dict(ranking_queries=torch.ones(3, dtype=torch.long).to("meta")),
        "must be positions from 0 to 15": dict(ranking_queries=torch.tensor([4, 20])),
        "must be positions from -1 to 15": dict(ranking_queries=torch.tensor([[4], [-2]])),
        "ranking_queries must be None with a": dict(ranking_queries=3, return_cache=True),
    },
    "layer": {
        "inp must have shape [b, n, 16], got [2, 16, 3]": dict(inp=X[..., :3]),
        "cache must be a KVCache or None, got tuple": dict(cache=((X, X),)),
        "between 0 and 16": dict(cache=KVCache(), lengths=[1, 17]),
        "cache holds 3 rows but the input has 2": dict(cache=KVCache(batch=3)),
        "inp must be a tensor with values, got a torch.float32": dict(inp=X.to("meta")),
        "mask must be bool of shape [2, 16] on cpu": dict(mask=torch.zeros(B, T)),
        "tensor of shape [2, 1, 16, 16]": dict(mask=torch.ones(B, 1, T, T, dtype=torch.bool)),
    },
    "two-sided": {"need causal=True": dict(return_cache=True)},
    "a row": {
        "cu_seqlens must be None with a cache": dict(cu_seqlens=PACKED, cache=KVCache()),
        "documents and cu_seqlens are two ways": dict(
            cu_seqlens=PACKED,
            documents=varlen.layout((1, T), X.device, 8, cu_seqlens=PACKED).documents,
        ),
        "mask and lengths are two ways": dict(
            mask=torch.ones(1, T, dtype=torch.bool), lengths=[8], cache=KVCache()
        ),
    },
    "preset": {
        "each once, got 3": dict(name="one-softmax", branches=3),
    },
    "Transformer": {
        TWO_WAYS: dict(
            use_sparse_attn=True, use_flex_fine_selection=True, use_triton_fine_selection=True
        ),
        "below 1, got 3": dict(use_sparse_attn=True, local_layers=[3]),
        "local_layers must be empty with use_sparse_attn=False": dict(local_layers=[0]),
        "importance must be a rule by which": dict(
            use_sparse_attn=True, sparse_attn_kwargs=dict(importance="given")
        ),
        **{
            f"unexpected keyword argument {name!r}": dict(
                use_sparse_attn=True, sparse_attn_kwargs={name: True}
            )
            for name in ("use_triton_kernel", "causal", "softcap", 1)
        },
    },
    "model": {
        "give torch.tensor(ids)": dict(ids=[[1, 2]]),
        "ids must be a tensor with values": dict(ids=IDS.to("meta")),
        "ids must be token ids from 0 to 31": dict(ids=torch.tensor([[0, 32]])),
        "got -1": dict(ids=torch.tensor([[-1, 3]])),
        "as new_cache makes it, got 0 of them": dict(cache=[]),
        "cache must be None with return_loss=True": dict(cache=[KVCache()], return_loss=True),
        "lengths goes with a cache": dict(lengths=[1, 2]),
        "ranking_queries goes with layers of importance='index'": dict(ranking_queries=3),
    },
    "stream": {
        "seq_len must be an integer of at least 16, got 3": dict(seq_len=3),
        "stop_tokens must be an integer of at least 0 and below 32": dict(stop_tokens=32),
        "prompt_lengths must be 2 integers between 1 and 16, the prompt's, got [5]": dict(
            prompt_lengths=[5]
        ),
        "got [0, 5]": dict(prompt_lengths=[0, 5]),
        "one for each row, got {1, 5}": dict(prompt_lengths={5, 1}),
        "top_k must be an integer of at least 1, got 0": dict(top_k=0),
        "filter_thres must be in [0, 1), got 1.0": dict(filter_thres=1.0),
        "top_p must be in (0, 1], got 0.0": dict(top_p=0.0),
        "with at least one token": dict(prompt=torch.zeros(2, 0, dtype=torch.long)),
    },
    "two-sided model": {"sampling needs causal=True": {}},
    "one row": {
        "rise from 0 to the number of tokens, 16": dict(cu_seqlens=torch.tensor([0, 5, 3, T])),
        "and never fall, got [1, 16]": dict(cu_seqlens=torch.tensor([1, T])),
        "and never fall, got [0, 7]": dict(cu_seqlens=torch.tensor([0, 7])),
        "[documents + 1]": dict(cu_seqlens=PACKED[None]),
        "two ways": dict(cu_seqlens=PACKED, mask=torch.ones(1, T, dtype=torch.bool)),
        "q_offset must be None": dict(cu_seqlens=PACKED, q_offset=3),
        "float32 or float64 of shape [2] on cpu, got": dict(sinks=torch.zeros(3)),
        "backend must be a name or a tuple of at least one": dict(backend=()),
    },
    "stages": {
        "importance='max' or 'head_max' or 'logits', got 'probs'": dict(importance="probs"),
        "causal=True, got False": dict(causal=False),
        "num_local_blocks must be a positive multiple of 4": dict(num_local_blocks=3),
        "a multiple of the 8 tokens of a group of blocks, got 6": sizes(6, 6, 2),
        "rank_rotated=True": dict(rank_rotated=False),
        "without 'compressed'": dict(branches=("compressed", "selected"), rank_rotated=False),
        "use_diff_topk=False, got True": dict(use_diff_topk=True),
    },
    "8 bits": {
        "ranking_bits must be 4, 8 or 16, got 2": dict(ranking_bits=2),
        "ranking_bits=8 goes with importance='max' or 'head_max'": dict(importance="logits"),
        "importance='index' goes with ranking_bits=16": INDEX,
        "importance='max' or 'head_max', got 'given'": GIVEN,
        "causal=True, got False": dict(causal=False),
        "use_diff_topk=False, got True": dict(use_diff_topk=True),
        "num_selected_groups=0, got 2": dict(num_selected_groups=2, num_local_blocks=4),
        "without 'compressed'": dict(branches=("compressed", "selected"), rank_rotated=False),
    },
    "stages layer": {"cq must be None with num_selected_groups": dict(cq=q)},
    "given": {
        "one of [1, 2, 4], slo": dict(block_indices=torch.zeros(B, T, 3, 1, dtype=torch.int32)),
        "block_indices must be int32 or int64": dict(block_indices=torch.zeros(B, T, 1, 1)),
    },
    "alone": {"must be given with importance='given'": dict(block_indices=None)},
    "window_layer": {"goes with the selected branch": {}},
    "groups": {"need selection_stride=1": dict(cache=KVCache())},
    "top_k": {"must be None with use_diff_topk=True": {}},
    "own rankings": {
        "returns must be a BlockMask": dict(fine_selection_flex_mask=lambda *a, **b: None),
        "cv must be None with branches": dict(cv=cv),
        "mem_k must be None with branches": dict(mem_k=torch.zeros(K, 1, D)),
        "branch_gates must be None with branches": dict(branch_gates=torch.zeros(B, T, H, 3)),
        "window_k must be None with branches": dict(window_k=k),
        "cq has H=2 but q has H=4": dict(cq=torch.zeros(B, T, K, 5), ck=torch.zeros(B, 4, K, 5)),
    },
    "window": {
        "documents.first must be a tensor, got None": dict(documents=varlen.Documents(None, IDS)),
        "last must be int32 or int64 of shape": dict(documents=varlen.Documents(IDS, IDS[:1])),
        "one row of packed documents, got a batch of 2": dict(cu_seqlens=PACKED),
        "q must be a tensor, got a nested tensor": dict(
            q=torch.nested.nested_tensor_from_jagged(X[0], PACKED)
        ),
    },
    "decode": {
        "ranking must be int32 on cpu, got 3": dict(ranking=3),
        "ranking must be given where tokens share one": dict(selection_stride=2),
        "ranking, of at least T + 1 = 2 tokens, must be int32 of shape": dict(
            selection_stride=2, ranking=torch.zeros(B, K, 1, 2, dtype=torch.int32)
        ),
        "lengths has B=3 but q has B=2": dict(lengths=IDS[0, :3]),
        "counts must be int32 or int64": dict(counts=IDS[:, 0].bool()),
        "ck has B=1 but q has B=2": dict(ck=ck[:1]),
        "window_k and window_v go together": dict(window_k=k),
        "ck must hold N / d = 4": dict(
            page_table=torch.zeros(B, 4, dtype=torch.int32), ck=ck[:, :3], cv=cv[:, :3]
        ),
        "counters must be int32 of shape [2, 2, 8] on": dict(counters=torch.zeros(B, 1, 8).int()),
    },
    "windows": {
        "ck must hold the 3 complete windows": dict(cu_seqlens=torch.tensor([0, 3, T])),
    },
    "warmup": {
        "got torch.float64": dict(dtype=torch.float64),
        "device must be a CUDA device, got device": dict(device="cpu"),
    },
    "chunked": {
        "mask must broadcast to [B H T S] = [2, 4, 16, 16], got [9]": dict(mask=NINE),
        "what mask_mod returns must broadcast to [b h i j]": dict(mask_mod=lambda *_: NINE),
        "what mask_mod returns must be a tensor, got None": dict(mask_mod=lambda *_: None),
        "for T=5 and S=16": dict(q=torch.zeros(B, 5, H, D), segment_ids=IDS[:, :5]),
        "of shape [2, 16] on cpu, got": dict(segment_ids=nsa.SegmentIds(IDS, IDS[:, 1:])),
        "must be int32 or int64 of shape [2]": dict(q_offset=IDS[0, :3]),
        "v has S=7 but k has S=16": dict(v=torch.zeros(B, 7, K, D)),
    },
    "block_masked": {
        "k has D=3 but q has D=8": dict(k=torch.zeros(B, K, T, 3)),
    },
    "mha": {
        "ab must broadcast to [B H T S] = [2, 4, 16, 16]": dict(ab=torch.zeros(3, T, T)),
        "k has H=2 but q has H=4": dict(k=torch.zeros(B, K, T, D)),
    },
    "dense": {
        "heads=4 and kv_heads=3": dict.fromkeys("kv", torch.zeros(B, 3, T, D)),
        "v has S=7 but k has S=16": dict(v=torch.zeros(B, H, 7, D)),
        "what score_mod returns must be a tensor, got 0.0": dict(score_mod=lambda *_: 0.0),
    },
    "mha backward": {
        "mask_value must be a number up to 3.4e+38, got 1e+39": dict(mask_value=1e39),
        "do has E=3 but v has E=8": dict(do=torch.zeros(B, H, T, 3)),
        "l has T=3 but q has T=16": dict(l=torch.zeros(B, H, 3)),
    },
    "conv": {
        "kv must have shape [b 2 w 4 d], got [1, 2, 3, 6, 4]": {},
        "kv must have shape [b 2 w 4 d], got [1, 4, 3, 4, 2]": dict(kv=torch.zeros(1, 4, 3, 4, 2)),
    },
    "CompressTransformer": {"num_heads must divide dim=4, got 3": dict(num_heads=3)},
    "kv": {"kv must have h * d = dim = 8, got h=3 and d=4": {}},
}


@pytest.mark.parametrize("call, message", [(call, m) for call, bad in REFUSED.items() for m in bad])
def test_refused(call, message):
    function, base = BASES[call]
    with pytest.raises(ValueError, match=re.escape(message)):
        function(**base | REFUSED[call][message])


def test_rows_of_a_cache_are_no_booleans():
    cache = KVCache(batch=2)
    for rows in (torch.tensor([True, False]), [True, False], [0.5], "01", [2], {}, torch.empty(0)):
        for call in (cache.reset, cache.reorder):
            with pytest.raises(ValueError, match="rows must be"):
                call(rows)
    for lengths in (True, torch.tensor(True), torch.tensor([0])):  # of one row, but there are two
        with pytest.raises(ValueError, match="lengths must be"):
            cache.truncate(lengths)
    cache.truncate(np.int64(0))
    with pytest.raises(ValueError, match="device must be"):
        cache.lengths_on("nothing")
