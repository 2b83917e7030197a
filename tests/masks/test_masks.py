"""Block masks against drawn masks, against brute force, and against torch's own construction."""

import itertools

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_mask

from native_sparse_attention import masks
from native_sparse_attention.config import AttentionConfig
from native_sparse_attention.masks import (
    create_compress_mask,
    create_fine_mask,
    create_sliding_mask,
)
from native_sparse_attention.masks.nsa import TILE
from tests.helpers.pictures import assert_torchs_tiles
from tests.helpers.pictures import dense as allowed

CPU = torch.device("cpu")


def dense(block_mask: BlockMask) -> torch.Tensor:
    """Every pair, asked of the mask mod: [b h i j]."""
    b, h, q_len, kv_len = block_mask.shape
    return create_mask(block_mask.mask_mod, b, h, q_len, kv_len, device="cpu")


LENGTHS = [1, 7, TILE - 1, TILE, TILE + 1, 2 * TILE + 1]


@pytest.mark.parametrize("length", LENGTHS)
def test_sliding_and_compress_masks(length):
    i, j = torch.arange(length)[:, None], torch.arange(length)
    for window, causal in itertools.product((0, 1, 5, TILE, 300, 1000), (True, False)):
        mask = create_sliding_mask(length, window, causal, device="cpu")
        expected = (j <= i) & (j >= i - window) if causal else (j - i).abs() <= window
        assert torch.equal(dense(mask)[0, 0], expected)
        assert torch.equal(allowed(masks.sliding_window(window, causal), length), expected)
        assert_torchs_tiles(mask)
    for mem, stride in itertools.product((0, 1, 3, TILE), (1, 3, 16)):
        windows = length // stride
        if mem + windows:
            mask = create_compress_mask(length, windows, stride, mem, device="cpu")
            expected = torch.ones(length, mem + windows, dtype=torch.bool)
            expected[:, mem:] = (j[:windows] + 1) * stride - 1 < i
            assert torch.equal(dense(mask)[0, 0], expected)
            mod = masks.compress_mask_mod(stride, mem)
            assert torch.equal(allowed(mod, length, mem + windows), expected)
            assert_torchs_tiles(mask)


def test_masks_of_nothing_and_of_many_tokens():
    assert create_compress_mask(8, 2, 4, causal=False) is None
    assert create_compress_mask(3, 0, 4, device="cpu").shape == (1, 1, 3, 0)
    mask = create_sliding_mask(131072, 512, device="cpu")  # 2^20 pairs of tiles
    assert mask.kv_indices.shape == (1, 1, 1024, 1024) and mask.sparsity() > 99


@pytest.mark.slow(one_of=3)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("block_size", [1, 16, 48, 200])
@pytest.mark.parametrize("length", [1, 7, TILE, TILE + 1, 2 * TILE + 1])
def test_fine_mask(length, block_size, causal):
    groups, num_blocks = 2, -(-length // block_size)
    selected = torch.randint(-1, num_blocks, (3, 2, length, 3), dtype=torch.int32)
    # the last batch row chooses everything, so that some tiles are full
    selected = torch.nn.functional.pad(selected, (0, num_blocks), value=-1)
    selected[-1, ..., :num_blocks] = torch.arange(num_blocks)

    mask = create_fine_mask(length, block_size, causal)(selected, num_grouped_queries=groups)
    assert mask.shape == (3, 4, length, length)
    i, j = torch.arange(length)[:, None], torch.arange(length)
    expected = (selected[..., None, :] == (j // block_size)[:, None]).any(dim=-1)
    if causal:
        expected = (expected | (i // block_size == j // block_size)) & (j <= i)
    assert torch.equal(dense(mask), expected.repeat_interleave(groups, dim=1))
    assert_torchs_tiles(mask, superset=block_size > 1 and causal)


@pytest.mark.parametrize("causal", [True, False])
def test_offset_is_a_slice(causal):
    """The last T of S queries: rows of the whole mask, in tiles as torch makes them."""
    S = 301
    for T in (1, 5, TILE, 130):
        offset = S - T
        whole = create_sliding_mask(S, 40, causal, device="cpu")
        mask = masks.nsa.sliding_block_mask(T, S, 40, causal, offset, CPU)
        assert torch.equal(dense(mask), dense(whole)[:, :, offset:])
        assert_torchs_tiles(mask)

        whole = create_compress_mask(S, 75, 4, 2, device="cpu")
        mask = masks.nsa.compress_block_mask(T, 77, 4, 2, offset, CPU)
        assert torch.equal(dense(mask), dense(whole)[:, :, offset:])
        assert_torchs_tiles(mask)

        indices = torch.randint(-1, 10, (1, S, 2, 2))
        blocks = dict(selection_block_size=32, num_initial_blocks=1, num_local_blocks=2)
        config = AttentionConfig(**blocks, causal=causal)
        all_rows = masks.nsa.block_membership(indices, 10, config)
        rows = masks.nsa.block_membership(indices[:, offset:], 10, config, offset)
        assert torch.equal(rows, all_rows[:, :, offset:])
        ends = torch.arange(1, S + 1)[None] if causal else torch.full((1, S), S)
        whole = masks.nsa.selected_block_mask(all_rows, ends, S, 32)
        mask = masks.nsa.selected_block_mask(rows, ends[:, offset:], S, 32)
        assert torch.equal(dense(mask), dense(whole)[:, :, offset:])
        assert_torchs_tiles(mask, superset=True)


def test_masks_are_kept_by_shape_and_fit_for_training():
    with torch.inference_mode():
        first = masks.nsa.sliding_block_mask(11, 13, 3, True, 2, CPU)
    assert masks.nsa.sliding_block_mask(11, 13, 3, True, 2, CPU) is first
    assert masks.nsa.sliding_block_mask(11, 13, 3, False, 2, CPU) is not first
    assert not first.kv_indices.is_inference()
