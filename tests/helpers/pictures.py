"""Masks as they are drawn in tests."""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from native_sparse_attention.masks import MaskMod


def drawn(picture: str) -> Tensor:
    return torch.tensor([[mark == "x" for mark in row] for row in picture.split()])


def dense(mod: MaskMod, q_len: int, kv_len: int | None = None) -> Tensor:
    """Every pair, asked of the mask mod: [i j]."""
    return create_mask(mod, 1, 1, q_len, q_len if kv_len is None else kv_len, device="cpu")[0, 0]


# settings of the catalogue that suit some 90 queries
SMALL = {
    "sasa": {"kernel_height": 3, "kernel_width": 5},
    "natten": {"kernel_height": 3, "kernel_width": 5},
    "flamingo": {"images": 3, "image_token_length": 11},
    "compress": {"stride": 8},
    "selected": {"selection_block_size": 16, "num_selected_blocks": 1},
}
