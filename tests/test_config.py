"""The settings as one object: checked once, the layer's attributes, the operators' schemas."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch

from native_sparse_attention import BlockSizes, NSAConfig, SparseAttention
from native_sparse_attention.config import AttentionConfig

SIZES = dict(
    dim=16, dim_head=8, heads=4, kv_heads=2, sliding_window_size=4, compress_block_size=8,
    compress_block_sliding_stride=4, selection_block_size=8, num_selected_blocks=2,
)  # fmt: skip
OTHERS = dict(
    num_compressed_mem_kv=2, causal=True, norm=False, use_diff_topk=True, importance="probs",
    num_initial_blocks=1, num_local_blocks=2, selection_stride=2, branch_kv="independent",
    soft_cap=5.0, attention_sinks=True, recompute=True, backend="eager",
    query_heads_share_selected_kv=False, compress_mlp_expand_factor=2.0, qkv_bias=True,
    out_bias=True, qk_norm=True, qk_norm_eps=1e-5,
)  # fmt: skip


def test_layer_keeps_what_it_was_given():
    layer = SparseAttention(**SIZES, **OTHERS)
    assert layer.config == NSAConfig(**SIZES, **OTHERS)
    for name, value in (SIZES | OTHERS).items():
        assert getattr(layer.config, name) == value
        if name != "norm":
            assert getattr(layer, name) == value


def test_defaults_are_those_of_the_layer():
    """But the sizes, which a layer has none for: those of the config are the paper's."""
    layer = SparseAttention(**SIZES)
    assert layer.config == NSAConfig(**SIZES)
    config = NSAConfig(dim=16, dim_head=8, heads=4)
    assert (config.kv_heads, config.compress_block_sliding_stride) == (4, 32)
    paper = dict(l=32, s=64, n=16, w=512)
    names = ("compress_block_size", "selection_block_size", "num_selected_blocks",
             "sliding_window_size")  # fmt: skip
    assert [getattr(config, name) for name in names] == list(paper.values())


def test_from_config():
    torch.manual_seed(0)
    config = NSAConfig(**SIZES, **OTHERS)
    layer = SparseAttention.from_config(config, rope_theta=500.0)
    torch.manual_seed(0)
    twin = SparseAttention(**SIZES, **OTHERS, rope_theta=500.0)
    assert layer.config == twin.config
    x = torch.randn(2, 24, 16)
    assert torch.equal(layer(x), twin(x))
    with pytest.raises(ValueError, match="config must be an NSAConfig, got dict"):
        SparseAttention.from_config(SIZES)


def test_a_scale_of_its_own():
    torch.manual_seed(0)
    plain = SparseAttention.from_config(NSAConfig(**SIZES, causal=True))
    scaled = SparseAttention.from_config(NSAConfig(**SIZES, causal=True, scale=8**-0.5))
    other = SparseAttention.from_config(NSAConfig(**SIZES, causal=True, scale=0.1))
    for layer in (scaled, other):
        layer.load_state_dict(plain.state_dict())
    x = torch.randn(1, 24, 16)
    torch.testing.assert_close(scaled(x), plain(x))
    assert not torch.allclose(other(x), plain(x))


def test_attributes_make_another_config_and_are_checked():
    layer = SparseAttention(**SIZES, causal=True)
    before, x = layer.config, torch.randn(1, 24, 16)
    out = layer(x)
    layer.backend, layer.num_selected_blocks = "eager", np.int64(1)
    assert layer.config == dataclasses.replace(before, backend="eager", num_selected_blocks=1)
    assert type(layer.num_selected_blocks) is int
    assert not torch.allclose(layer(x), out)
    for name, value in (("backend", "cuda"), ("num_selected_blocks", -1), ("causal", 2)):
        with pytest.raises(ValueError, match=name):
            setattr(layer, name, value)
    assert layer.backend == "eager"


def test_is_frozen_hashable_and_copied():
    config = NSAConfig(**SIZES, block_sizes=BlockSizes(*[16] * 6))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.dim = 3
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert other == config and hash(other) == hash(config)
    assert dataclasses.replace(config, heads=2) != config


def test_a_layer_shows_its_settings():
    """Those of its config, which a new value of one replaces; of copies too."""
    layers = [SparseAttention(**SIZES)]
    first = layers[0].config
    layers += [
        copy.deepcopy(layers[0]),
        pickle.loads(pickle.dumps(layers[0])),
        copy.copy(layers[0]),
    ]
    for layer in layers[1:]:
        layer.num_selected_blocks = 1
        assert layer.num_selected_blocks == layer.config.num_selected_blocks == 1
        assert layer.settings().num_selected_blocks == 1 and "num_selected_blocks" not in vars(
            layer
        )
    assert layers[0].config is first and first.num_selected_blocks == 2
    layers[0].selection_block_size = 16
    assert layers[0].config.alignment == 16 and layers[0].config.geometry == first.geometry
    layers[0].selection_stride = 2
    assert layers[0].config.geometry == first.geometry | dict(
        selection_stride=2, num_selected_blocks=2, query_heads_share_selected_kv=True
    )
    assert layers[0].alignment == 16
    with pytest.raises(AttributeError, match="alignment"):
        layers[0].alignment = 3


def test_fewer_slots_for_a_call():
    """A layer with more slots than there are blocks; what travels then is whole."""
    torch.manual_seed(0)
    config = NSAConfig(**SIZES | dict(num_selected_blocks=80), causal=True)
    fewer = config.with_selected(3)
    assert fewer == AttentionConfig.unchecked(
        **{field.name: getattr(config, field.name) for field in dataclasses.fields(AttentionConfig)}
        | {"num_selected_blocks": 3}
    )
    assert "num_selected_blocks=3" in repr(fewer) and hash(fewer)
    layer, x = SparseAttention.from_config(config), torch.randn(1, 40, 16)
    expected = layer(x)
    layer.num_selected_blocks = 5
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize(
    "change, told",
    [
        (dict(dim=0), "dim must be"), (dict(kv_heads=3), "heads"),
        (dict(scale=float("nan")), "scale"),
        (dict(importance="mean"), "importance"), (dict(norm=1), "norm"),
        (dict(qkv_bias="False"), "qkv_bias"), (dict(out_bias=2), "out_bias"),
        (dict(qk_norm=None), "qk_norm"), (dict(qk_norm_eps=0.0), "qk_norm_eps"),
        (dict(qk_norm_eps=None), "qk_norm_eps"),
        (dict(soft_cap=-1.0), "soft_cap"),
        (dict(compress_block_sliding_stride=3), "compress_block_sliding_stride"),
        (dict(compress_mlp_expand_factor=0), "compress_mlp_expand_factor"),
    ],
)  # fmt: skip
def test_bad_settings_are_named(change, told):
    with pytest.raises(ValueError, match=told):
        NSAConfig(**SIZES | change)


def test_a_key_holds_every_setting():
    """By which the torch operators take them."""
    from native_sparse_attention.config import config_of_key

    config = AttentionConfig(
        sliding_window_size=7, soft_cap=2.0, causal=True, block_sizes=BlockSizes(*[32] * 6),
        branches=("compressed", "window"), scale=0.1,
    )  # fmt: skip
    assert config_of_key(config.key) == config
    changed = config.but(soft_cap=None, block_sizes=None)
    assert config_of_key(changed.key) == changed != config
