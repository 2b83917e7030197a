"""Every registered parameter gets a finite gradient: data-parallel training needs no setting."""

import pytest
import torch
from rotary_embedding_torch import RotaryEmbedding
from torch import nn

from native_sparse_attention import SparseAttention, Transformer
from native_sparse_attention.compress import (
    AttentionPool,
    CompressTransformer,
    ConvLinearCompress,
    GroupedMLP,
    MeanPool,
    SingleProjection,
    SumPool,
)
from tests.helpers.budget import DEVICE

ARGS = dict(
    dim=16, dim_head=8, heads=4, kv_heads=2, sliding_window_size=5, compress_block_size=8,
    compress_block_sliding_stride=4, selection_block_size=8, num_selected_blocks=2,
)  # fmt: skip

NETWORKS = {
    "default": lambda: None,
    "grouped": lambda: GroupedMLP(8, 8, 2),
    "convolution": lambda: ConvLinearCompress(2, 8, 8),
    "attention pool": lambda: AttentionPool(8, 8),
    "projection": lambda: SingleProjection(8, 8),
    "projection per head": lambda: SingleProjection(8, 8, 2),
    "transformer": lambda: CompressTransformer(2, 16, 2),
    "mean": lambda: MeanPool(),
    "sum": lambda: SumPool(8),
}

SETTINGS = {
    "default": dict,
    "gates": lambda: dict(use_diff_topk=True),
    "probs, gates": lambda: dict(use_diff_topk=True, importance="probs"),
    "independent": lambda: dict(branch_kv="independent"),
    "little": lambda: dict(num_compressed_mem_kv=0, num_selected_blocks=0, num_local_blocks=0),
    "sinks": lambda: dict(attention_sinks=True, norm=False),
    "interpolated": lambda: dict(interpolated_importance_score=True),
    "shared": lambda: dict(selection_stride=4, compress_block_sliding_stride=8),
    "own gate": lambda: dict(
        strategy_combine_mlp=nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 12))
    ),
    "learned frequencies": lambda: dict(rotary_emb=RotaryEmbedding(8, learned_freq=True)),
}


def assert_all(module, out):
    out.sum().backward()
    for name, p in module.named_parameters():
        if p.requires_grad:
            assert p.grad is not None, f"{name} has no gradient"
            assert p.grad.isfinite().all(), name


@pytest.mark.slow(one_of=8)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("network", NETWORKS)
def test_layer(network, setting, causal):
    for n in (0, 1, 3, 21):
        kwargs = ARGS | SETTINGS[setting]()
        module = SparseAttention(**kwargs, causal=causal, compress_mlp=NETWORKS[network]())
        assert_all(module, module(torch.randn(2, n, 16)))


SOME = [
    ("compressed",), ("selected",), ("window",), ("compressed", "selected"),
    ("compressed", "window"), ("selected", "window"),
]  # fmt: skip


@pytest.mark.slow(one_of=4)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("setting", ["default", "gates", "sinks", "learned frequencies"])
@pytest.mark.parametrize("branches", SOME)
def test_some_branches(branches, setting, causal):
    """Lengths of less than a block, and dense attention, which rank nothing."""
    learned = "compressed" in branches or (setting == "gates" and "selected" in branches)
    given = SETTINGS[setting]() | dict(branches=branches, causal=causal)
    if setting == "gates" and "selected" not in branches:
        pytest.skip("no top-k")
    for network in ("sum", "attention pool") if learned else ("default",):
        for more in ({}, dict(dense_length=64), dict(dense=True)):
            is_dense = more.pop("dense", False)
            if (is_dense or more) and branches != ("selected",):
                continue
            for n in (0, 1, 8, 21):
                layer = SparseAttention(**ARGS | given | more, compress_mlp=NETWORKS[network]())
                if is_dense:
                    layer.dense = True
                assert_all(layer, layer(torch.randn(2, n, 16)))


@pytest.mark.parametrize("setting", SETTINGS)
def test_documents_padding_and_no_rows(setting):
    for n in (1, 21):
        some = torch.arange(n).expand(2, -1) >= torch.tensor([[0], [n // 2]])
        calls = (
            (2, dict(mask=some)),
            (2, dict(mask=some & False)),
            (1, dict(cu_seqlens=torch.tensor([0, n // 3, n]))),
            (0, {}),
        )
        for rows, call in calls:
            module = SparseAttention(**ARGS | SETTINGS[setting](), causal=True)
            assert_all(module, module(torch.randn(rows, n, 16), **call))


@pytest.mark.kernels
@pytest.mark.parametrize("setting", ["default", "little", "learned frequencies"])
def test_kernels(setting):
    for n in (1, 21):
        kwargs = ARGS | SETTINGS[setting]()
        module = SparseAttention(**kwargs, causal=True, backend="triton").to(DEVICE)
        assert_all(module, module(torch.randn(1, n, 16, device=DEVICE)))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_transformer(sparse, checkpointing):
    for n in (2, 33):
        model = Transformer(
            32, 16, 2, 8, 2, use_sparse_attn=sparse, activation_checkpointing=checkpointing,
            rotary_emb=RotaryEmbedding(8, learned_freq=True),
        )  # fmt: skip
        assert_all(model, model(torch.zeros(1, n, dtype=torch.long), return_loss=True))


def test_no_memory_slots():
    """No parameter, but the name in checkpoints, as the published package has it."""
    module = SparseAttention(**ARGS | dict(num_compressed_mem_kv=0), causal=True)
    assert "compress_mem_kv" not in dict(module.named_parameters())
    saved = {name: torch.zeros_like(t) for name, t in module.state_dict().items()}
    assert saved["compress_mem_kv"].shape == (2, 2, 0, 8)
    module.load_state_dict(saved, strict=True)
