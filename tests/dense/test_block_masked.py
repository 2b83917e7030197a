"""Attention under a mask cut to blocks, and the counting of blocks."""

import math

import pytest
import torch

from native_sparse_attention import below_or_on_diag, block_masked_attention, mask_blocker
from tests.dense.test_dense import SHAPES, assert_same, dense, draw, under_blocks


def draw_heads(B, K, G, T, S, D, E, dtype=torch.float64):
    shapes = (B, K, G, T, D), (B, K, S, D), (B, K, S, E)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("density", [0.1, 0.6])
@pytest.mark.parametrize("blocks", [(4, 4), (3, 5), (1, 1), (64, 64)])
def test_any_mask_in_blocks_of_any_size(shape, density, blocks):
    leaves = draw(*SHAPES[shape])
    mask = torch.rand(leaves[0].shape[1], leaves[1].shape[1]) < density
    assert_same(under_blocks(*leaves, mask=mask, blocks=blocks), dense(*leaves, mask), leaves)


@pytest.mark.parametrize("mask_value", [-math.inf, -1e30, -0.7 * torch.finfo(torch.float32).max])
def test_masks_of_each_row_segments_and_cap(mask_value):
    leaves = draw(2, 11, 17, 4, 2, 4, 4)
    mask = torch.randint(0, 3, (2, 11, 17))  # nonzero is visible
    mask[0, 4] = 0
    ids = torch.randint(0, 2, (2, 11)), torch.randint(0, 2, (2, 17))
    seen = (mask != 0) & (ids[0][:, :, None] == ids[1][:, None])
    actual = under_blocks(*leaves, ids=ids, mask_value=mask_value, mask=mask, cap=2.0)
    assert_same(actual, dense(*leaves, seen[:, None], soft_cap=2.0), leaves)


def test_residuals():
    leaves = draw_heads(2, 2, 2, 9, 9, 4, 4)
    mask = (torch.rand(9, 9) < 0.5).double()
    mask[3] = 0.0
    call = (*leaves, None, 4, 4, mask, -1e30, None)
    out, residuals = block_masked_attention(*call, save_residuals=True)
    assert set(residuals) == {"logsumexp", "max_logits"}
    logits = torch.einsum("bkgid,bkjd->bkgij", *leaves[:2]).masked_fill(mask == 0, -math.inf)
    torch.testing.assert_close(residuals["max_logits"], logits.amax(-1))
    assert residuals["logsumexp"].requires_grad and not residuals["max_logits"].requires_grad
    assert torch.equal(block_masked_attention(*call), out)


def test_empty_blocks_are_not_read():
    leaves = draw_heads(1, 1, 1, 10, 10, 4, 4)
    mask = torch.zeros(10, 10)
    mask[4, 0] = 1
    mask[8:, 8:] = 2  # nonzero is visible; the last blocks are smaller
    out = block_masked_attention(*leaves, None, 4, 4, mask, -1e30)
    with torch.no_grad():
        leaves[2][:, :, 4:8] = math.nan
        leaves[1][:, :, 4:8] = math.nan
    assert torch.equal(block_masked_attention(*leaves, None, 4, 4, mask, -1e30), out)


def test_blocks_are_counted():
    mask = torch.tensor([[1, 1, 0, 0, 7], [1, 1, 0, 0, 0], [0, 0, 0, 3, -1]])
    assert mask_blocker(mask, 2, 2).tolist() == [[4, 0, 1], [0, 1, 1]]
    assert mask_blocker(mask.bool(), 3, 5).tolist() == [[7]]
    assert mask_blocker(mask.float(), 100, 1).tolist() == [[2, 2, 0, 1, 2]]
    batch = mask_blocker(torch.stack([mask, mask * 0]), 2, 3)
    assert batch.tolist() == [[[4, 1], [0, 2]], [[0, 0], [0, 0]]]
    assert mask_blocker(torch.ones(0, 5), 2, 2).shape == (0, 3)


@pytest.mark.parametrize("rows, columns", [(1, 1), (2, 3), (4, 2), (3, 1), (1, 4), (128, 128)])
def test_blocks_below_the_diagonal_are_those_a_causal_mask_occupies(rows, columns):
    counts = mask_blocker(torch.ones(12, 12).tril(), rows, columns)
    r, c = (torch.arange(n) for n in counts.shape)
    found = below_or_on_diag(r[:, None], rows, c, columns)
    # a last block may be cut before it reaches the diagonal, or hang over the mask's end
    whole = ((r + 1) * rows <= 12)[:, None] & (c * columns < 12)
    assert torch.equal(found & whole, (counts > 0) & whole)
    assert below_or_on_diag(0, 1, 0, 1) is True
    assert below_or_on_diag(torch.tensor(3, dtype=torch.uint8), 128, 3, 128)  # 512 is 0 in 8 bits
    assert below_or_on_diag(0, 128, 1, 128) is False
