"""Masks as they are drawn in tests."""

import itertools

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from native_sparse_attention.masks import MaskMod


def drawn(picture: str) -> Tensor:
    return torch.tensor([[mark == "x" for mark in row] for row in picture.split()])


def dense(mod: MaskMod, q_len: int, kv_len: int | None = None) -> Tensor:
    """Every pair, asked of the mask mod: [i j]."""
    return create_mask(mod, 1, 1, q_len, q_len if kv_len is None else kv_len, device="cpu")[0, 0]


def tiles(block_mask: BlockMask, kind: str) -> Tensor:
    """Tiles listed as partial ("") or full ("full_"), from the keys' lists: bool [b h tq tk]."""
    count = getattr(block_mask, f"{kind}kv_num_blocks")
    index = getattr(block_mask, f"{kind}kv_indices")
    listed = torch.zeros(index.shape, dtype=torch.bool)
    for row in itertools.product(*map(range, count.shape)):
        listed[row][index[row][: count[row]].long()] = True
    return listed


def assert_torchs_tiles(ours: BlockMask, superset: bool = False) -> None:
    """Tile for tile what torch makes of the mask mod. With `superset`, partial tiles may also be
    listed where no pair is allowed."""
    torchs = create_block_mask(ours.mask_mod, *ours.shape, device="cpu")
    assert torch.equal(tiles(ours, "full_"), tiles(torchs, "full_"))
    partial, expected = tiles(ours, ""), tiles(torchs, "")
    assert (partial >= expected).all() if superset else torch.equal(partial, expected)


# settings of the catalogue that suit some 90 queries
SMALL = {
    "sasa": {"kernel_height": 3, "kernel_width": 5},
    "natten": {"kernel_height": 3, "kernel_width": 5},
    "flamingo": {"images": 3, "image_token_length": 11},
    "compress": {"stride": 8},
    "selected": {"selection_block_size": 16, "num_selected_blocks": 1},
}
