"""The settings as one object: checked once, the layer's attributes; and presets."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch

from native_sparse_attention import BlockSizes, NSAConfig, SparseAttention
from native_sparse_attention.checks import BRANCHES
from native_sparse_attention.presets import PRESETS, RECOMMENDED, preset
from tests.helpers.sizes import sizes

SIZES = sizes(8, 4, 8, n=2, w=4, dim=16, dim_head=8, heads=4, kv_heads=2)
OTHERS = dict(
    num_compressed_mem_kv=2, causal=True, norm=False, use_diff_topk=True, importance="probs",
    num_initial_blocks=1, num_local_blocks=2, selection_stride=2, branch_kv="independent",
    soft_cap=5.0, attention_sinks=True, recompute=True, backend="eager",
    query_heads_share_selected_kv=False, compress_mlp_expand_factor=2.0, qkv_bias=True,
    out_bias=True, qk_norm=True, qk_norm_eps=1e-5,
)  # fmt: skip


def test_a_layer_keeps_what_it_is_given():
    """From keyword arguments or from a config; the defaults are one."""
    torch.manual_seed(0)
    config = NSAConfig(**SIZES, **OTHERS)
    layer = SparseAttention.from_config(config, rope_theta=500.0)
    torch.manual_seed(0)
    twin = SparseAttention(**SIZES, **OTHERS, rope_theta=500.0)
    assert layer.config == twin.config == config
    for name, value in (SIZES | OTHERS).items():
        assert getattr(layer.config, name) == value
        if name != "norm":
            assert getattr(layer, name) == value
    x = torch.randn(2, 24, 16)
    assert torch.equal(layer(x), twin(x))
    with pytest.raises(ValueError, match="config must be an NSAConfig, got dict"):
        SparseAttention.from_config(SIZES)
    assert SparseAttention(**SIZES).config == NSAConfig(**SIZES)
    # without a size they are those of the recommended preset; with one the others are the paper's
    shape = dict(dim=16, dim_head=8, heads=4)
    assert NSAConfig(**shape) == NSAConfig.preset(RECOMMENDED, causal=True, **shape)
    assert NSAConfig(**shape, causal=False, qk_norm=True) == NSAConfig.preset(
        RECOMMENDED, causal=False, qk_norm=True, **shape
    )
    config = NSAConfig(**shape, num_selected_blocks=16)
    assert (config.compress_block_sliding_stride, config.branches) == (32, BRANCHES)
    assert (config.selection_block_size, config.sliding_window_size) == (64, 512)


def test_attributes_make_another_config_and_are_checked():
    """Of a layer and of its copies, each for itself."""
    first = SparseAttention(**SIZES, causal=True)
    before, x = first.config, torch.randn(1, 24, 16)
    out = first(x)
    copies = copy.deepcopy(first), pickle.loads(pickle.dumps(first)), copy.copy(first)
    for layer in (*copies, first):
        layer.backend, layer.num_selected_blocks = "eager", np.int64(1)
        assert layer.config == dataclasses.replace(before, backend="eager", num_selected_blocks=1)
        assert type(layer.num_selected_blocks) is int
        assert not torch.allclose(layer(x), out)
        assert first.config is before or layer is first
        for name, value in (("backend", "cuda"), ("num_selected_blocks", -1), ("causal", 2)):
            with pytest.raises(ValueError, match=name):
                setattr(layer, name, value)
        assert layer.backend == "eager"
    # more slots than there are blocks
    first.num_selected_blocks = 80
    wide = first(x)
    first.num_selected_blocks = 3
    torch.testing.assert_close(first(x), wide)
    first.scale = 8**-0.5  # what None stands for
    torch.testing.assert_close(first(x), wide)
    first.scale = 0.1
    assert not torch.allclose(first(x), wide)
    first.selection_block_size = 16
    assert first.config.alignment == first.alignment == 16


def test_is_frozen_hashable_and_copied():
    config = NSAConfig(**SIZES, block_sizes=BlockSizes(*[16] * 6))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.dim = 3
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert other == config and hash(other) == hash(config)
    assert dataclasses.replace(config, heads=2) != config


SHAPE = dict(dim=32, dim_head=16, heads=4, kv_heads=2, causal=True)


@pytest.mark.parametrize("length", [1, 1024, 1025, 8192, 32768, None])
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_makes_a_layer(name, length):
    config = NSAConfig.preset(name, length, **SHAPE)
    with torch.device("meta"):
        assert SparseAttention.from_config(config).config == config
    for setting, value in preset(name, length).items():
        assert getattr(config, setting) == value
    assert (config.branches == ("selected",)) == (name == "one-softmax")
    assert NSAConfig.preset(name, length, **SHAPE, num_selected_blocks=3).num_selected_blocks == 3


@pytest.mark.parametrize(
    "change",
    [
        dict(importance="logits"), dict(importance="index"), dict(num_selected_groups=2),
        dict(use_diff_topk=True), dict(causal=False),
    ],
    ids=str,
)  # fmt: skip
def test_8_bits_go_where_other_settings_exclude_them(change):
    assert NSAConfig.preset("one-softmax", **SHAPE).ranking_bits == 8
    assert NSAConfig.preset("one-softmax", **SHAPE | change).ranking_bits == 16


@pytest.mark.parametrize("name", ["causal", "use_diff_topk", "num_selected_groups", "importance"])
@pytest.mark.parametrize(
    "vector", [torch.tensor([0, 1]), torch.ones(0), torch.tensor(True, device="meta"), np.ones(2)],
    ids=str,
)  # fmt: skip
def test_vectors_are_refused_by_name(name, vector):
    """Also by what completes the settings of a preset before they are checked."""
    with pytest.raises(ValueError, match=f"{name} must be"):
        NSAConfig(dim=16, dim_head=8, heads=4, **{name: vector})


def test_sizes_of_presets():
    for name in PRESETS:
        lengths = 512, 1024, 2048, 4096, 8192, 16384, 32768
        grown = [length for length in lengths if preset(name, length) != preset(name, length + 1)]
        assert grown == ([16384] if name == "one-softmax" else [1024, 4096])
    sizes = dict(sliding_window_size=511, compress_block_sliding_stride=16)
    assert NSAConfig.preset("published", **SHAPE) == NSAConfig(**SHAPE, **sizes)
    paper = NSAConfig.preset("paper", **SHAPE)
    counts = paper.num_selected_blocks, paper.num_initial_blocks, paper.num_local_blocks
    assert sum(counts) == 16 and paper.importance == "probs" and paper.branch_kv == "independent"
    assert paper.sliding_window_size + 1 == 512
    for length, keys in ((4096, 1088), (16384, 1088), (16385, 1600), (None, 1600)):
        one = NSAConfig.preset("one-softmax", length, **SHAPE)
        counts = one.num_selected_blocks, one.num_initial_blocks, one.num_local_blocks
        assert one.selection_block_size * sum(counts) == keys
    groups = dict(selection_block_size=48, num_selected_groups=2, num_local_blocks=4)
    assert NSAConfig.preset("one-softmax", **SHAPE, **groups).dense_length == 0


def test_settings_that_exclude_a_dense_length_replace_it():
    assert NSAConfig.preset("one-softmax", 8192, **SHAPE).dense_length == 8192
    two = dict(branches=("selected", "window"))
    for settings in (two, dict(selection_block_size=48, selection_stride=3)):
        assert NSAConfig.preset("one-softmax", 8192, **SHAPE, **settings).dense_length == 0
        with pytest.raises(ValueError, match="dense_length"):
            NSAConfig.preset("one-softmax", 8192, **SHAPE, **settings, dense_length=64)
