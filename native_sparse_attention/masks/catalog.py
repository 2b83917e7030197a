"""Masks by name for pictures and benchmarks, of any length."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import blocks
from ..checks import check_choice, check_int, check_ints, check_keywords
from ..config import AttentionConfig
from . import attention, gallery, nsa
from .nsa import MaskMod

# what makes each mask: its docstring describes the mask
CATALOG: dict[str, Any] = {
    "causal": gallery.causal,
    "sliding_window": gallery.sliding_window,
    "dilated_window": gallery.dilated_window,
    "prefix_lm": gallery.prefix_lm,
    "document": gallery.document,
    "jagged": attention.jagged_mask_mod,
    "sasa": gallery.sasa,
    "natten": gallery.natten,
    "flamingo": gallery.flamingo,
    "compress": nsa.compress_mask_mod,
    "selected": nsa.selected_mask_mod,
}


def options_of(name: str, length: int = 512) -> dict[str, int]:
    """The settings of a mask, and their defaults at a length."""
    height = next(n for n in range(math.isqrt(length), 0, -1) if length % n == 0)
    canvas = dict(canvas_width=length // height, kernel_height=7, kernel_width=7)
    options: dict[str, dict[str, int]] = {
        "sliding_window": dict(window=length // 8),
        "dilated_window": dict(window=length // 16, dilation=4),
        "prefix_lm": dict(prefix_length=length // 4),
        "document": dict(documents=4),
        "jagged": dict(documents=4, window=length // 8),
        "sasa": canvas,
        "natten": canvas,
        "flamingo": dict(images=4, image_token_length=max(1, length // 4)),
        "compress": dict(stride=16),
        "selected": dict(selection_block_size=64, num_selected_blocks=2),
    }
    return options.get(name, {})


def make(name: str, length: int, device: torch.device, **options: int) -> tuple[MaskMod, int, int]:
    """A mask mod by name for `length` queries, and its numbers of queries and keys."""
    check_choice("name", name, CATALOG)
    settings = options_of(name, check_int("length", length, 1))
    check_keywords(options, settings)
    settings |= options
    factory, kv_len = CATALOG[name], length
    mod: MaskMod
    match name:
        case "causal":
            mod = factory
        case "document":
            mod = factory(offsets=growing_documents(length, device, **settings))
        case "jagged":
            offsets = growing_documents(length, device, settings["documents"])
            mod = factory(gallery.sliding_window(settings["window"]), offsets)
        case "sasa" | "natten":
            width = check_int("canvas_width", settings.pop("canvas_width"), 1)
            if length % width:
                raise ValueError(f"canvas_width must divide length={length}, got {width}")
            mod = factory(length // width, width, **settings)
        case "flamingo":
            images = check_int("images", settings["images"], 1)
            size = settings["image_token_length"]
            ends = torch.arange(images + 1, device=device) * length // images
            intervals = torch.stack((ends[:-1], ends[1:]), dim=1)
            mod, kv_len = factory(intervals, image_token_length=size), images * size
        case "compress":
            stride = check_int("stride", settings["stride"], 1, length + 1)
            mod, kv_len = factory(stride), blocks.num_windows(length, stride)
        case "selected":
            mod = random_blocks(length, device, **settings)
        case _:
            mod = factory(**settings)
    return mod, length, kv_len


def growing_documents(length: int, device: torch.device, documents: int) -> Tensor:
    """Offsets of documents with lengths in the ratio 1 : 2 : 3 : ... and a total of `length`."""
    check_int("documents", documents, 1, length + 1)
    numbers = torch.arange(documents + 1, device=device)
    return length * numbers * (numbers + 1) // (documents * (documents + 1))


def random_blocks(
    length: int, device: torch.device, selection_block_size: int, num_selected_blocks: int
) -> MaskMod:
    """Blocks that are drawn for each block of queries, and its own."""
    check_ints(1, selection_block_size=selection_block_size)
    check_ints(0, num_selected_blocks=num_selected_blocks)
    count = blocks.num_blocks(length, selection_block_size)
    rank = torch.rand((count, count), generator=torch.Generator().manual_seed(0)).tril(-1)
    top, index = rank.topk(min(num_selected_blocks, count), dim=-1)
    index = torch.where(top > 0, index, -1).repeat_interleave(selection_block_size, 0)[:length]
    config = AttentionConfig.unchecked(selection_block_size=selection_block_size, causal=True)
    membership = nsa.block_membership(index[None, :, None].to(device), count, config)
    mod = nsa.selected_mask_mod(membership, selection_block_size)
    # all batch rows and heads use the membership of row 0 and head 0
    return lambda b, h, i, j: mod(b * 0, h * 0, i, j)
