"""Settings by name."""

import dataclasses

import pytest
import torch

from native_sparse_attention import NSAConfig, SparseAttention
from native_sparse_attention.presets import PRESETS, preset

SHAPE = dict(dim=32, dim_head=16, heads=4, kv_heads=2, causal=True)


@pytest.mark.parametrize("length", [1, 1024, 1025, 8192, 32768, None])
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_makes_a_layer(name, length):
    config = NSAConfig.preset(name, length, **SHAPE)
    with torch.device("meta"):
        layer = SparseAttention.from_config(config)
    assert layer.config == config
    for setting, value in preset(name, length).items():
        assert getattr(config, setting) == value
    assert (config.branches == ("selected",)) == (name == "one-softmax")


def test_published_is_the_default_form():
    given = NSAConfig.preset("published", **SHAPE)
    sizes = dict(sliding_window_size=511, compress_block_sliding_stride=16)
    assert given == NSAConfig(**SHAPE, **sizes)


def test_paper_selects_sixteen_blocks():
    paper = NSAConfig.preset("paper", **SHAPE)
    counts = paper.num_selected_blocks, paper.num_initial_blocks, paper.num_local_blocks
    assert sum(counts) == 16 and paper.importance == "probs" and paper.branch_kv == "independent"
    assert paper.sliding_window_size + 1 == 512


def test_one_softmax_reads_the_same_number_of_keys_or_more_at_length():
    def keys(length):
        config = NSAConfig.preset("one-softmax", length, **SHAPE)
        counts = config.num_selected_blocks, config.num_initial_blocks, config.num_local_blocks
        return config.selection_block_size * sum(counts)

    assert keys(4096) == keys(16384) == 1088 and keys(16385) == keys(None) == 1600


def test_settings_replace_those_of_a_preset():
    config = NSAConfig.preset("one-softmax", 8192, **SHAPE, num_selected_blocks=3, dense_length=64)
    assert (config.num_selected_blocks, config.dense_length) == (3, 64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dense",), "name must be one of"),
        (("paper", 0), "length must be an integer of at least 1"),
        (("paper", 2.5), "length must be an integer"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        NSAConfig.preset(*arguments, **SHAPE)


def test_one_softmax_is_dense_attention_up_to_its_dense_length():
    small = dict(selection_block_size=8, num_initial_blocks=1, num_local_blocks=1)
    small |= dict(num_selected_blocks=1, norm=False)
    config = NSAConfig.preset("one-softmax", 8192, **SHAPE, **small)
    layer = SparseAttention.from_config(config)
    x = torch.randn(1, 100, 32)
    out = layer(x)
    layer.dense = True
    assert config.dense_length == 8192 and torch.equal(layer(x), out)
    sparse = SparseAttention.from_config(dataclasses.replace(config, dense_length=0))
    sparse.load_state_dict(layer.state_dict())
    assert not torch.allclose(sparse(x), out, atol=1e-3)


@pytest.mark.parametrize(
    "own",
    [
        dict(branches=("selected", "window")),
        dict(selection_block_size=48, selection_stride=3),
    ],
)
def test_settings_that_exclude_a_dense_length_replace_it(own):
    assert NSAConfig.preset("one-softmax", 8192, **SHAPE, **own).dense_length == 0
    with pytest.raises(ValueError, match="dense_length"):
        NSAConfig.preset("one-softmax", 8192, **SHAPE, **own, dense_length=64)
