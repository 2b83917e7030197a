"""Masks by name for pictures and benchmarks, of any length.

Each function returns a mod, or a mod and its number of keys where they are not the queries. The
options of the command are those of the functions; None is a default that depends on the length.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import blocks
from ..checks import check_choice, check_int, check_ints
from . import attention, gallery, nsa
from .tiles import MaskMod


def causal(length: int, device: torch.device) -> MaskMod:
    """keys up to the query"""
    return gallery.causal


def sliding_window(length: int, device: torch.device, window: int | None = None) -> MaskMod:
    """the nearest keys before it"""
    return gallery.sliding_window(length // 8 if window is None else window)


def dilated_window(
    length: int, device: torch.device, window: int | None = None, dilation: int = 4
) -> MaskMod:
    """keys before it, some distance apart"""
    return gallery.dilated_window(length // 16 if window is None else window, dilation)


def prefix_lm(length: int, device: torch.device, prefix_length: int | None = None) -> MaskMod:
    """a prefix and the past"""
    return gallery.prefix_lm(length // 4 if prefix_length is None else prefix_length)


def growing_documents(length: int, device: torch.device, documents: int) -> Tensor:
    """Offsets of documents with lengths in the ratio 1 : 2 : 3 : ... and a total of `length`."""
    check_int("documents", documents, 1, length + 1)
    numbers = torch.arange(documents + 1, device=device)
    return length * numbers * (numbers + 1) // (documents * (documents + 1))


def document(length: int, device: torch.device, documents: int = 4) -> MaskMod:
    """the past of its own document"""
    return gallery.document(offsets=growing_documents(length, device, documents))


def jagged(
    length: int, device: torch.device, documents: int = 4, window: int | None = None
) -> MaskMod:
    """a window within packed sequences"""
    offsets = growing_documents(length, device, documents)
    return attention.jagged_mask_mod(sliding_window(length, device, window), offsets)


def canvas_sides(length: int, canvas_width: int | None) -> tuple[int, int]:
    """Height and width of a canvas of `length` pixels; by default closest to a square."""
    if canvas_width is None:
        height = next(n for n in range(math.isqrt(length), 0, -1) if length % n == 0)
        return height, length // height
    if length % check_int("canvas_width", canvas_width, 1):
        raise ValueError(f"canvas_width must divide length={length}, got {canvas_width}")
    return length // canvas_width, canvas_width


def sasa(
    length: int, device: torch.device, canvas_width: int | None = None, kernel_height: int = 7,
    kernel_width: int = 7,
) -> MaskMod:  # fmt: skip
    """pixels around it, cut at the border"""
    return gallery.sasa(*canvas_sides(length, canvas_width), kernel_height, kernel_width)


def natten(
    length: int, device: torch.device, canvas_width: int | None = None, kernel_height: int = 7,
    kernel_width: int = 7,
) -> MaskMod:  # fmt: skip
    """pixels around it, moved inside at the border"""
    return gallery.natten(*canvas_sides(length, canvas_width), kernel_height, kernel_width)


def flamingo(
    length: int, device: torch.device, images: int = 4, image_token_length: int | None = None
) -> tuple[MaskMod, int]:
    """text on the image before it"""
    check_ints(1, images=images)
    size = max(1, length // 4) if image_token_length is None else image_token_length
    ends = torch.arange(images + 1, device=device) * length // images
    intervals = torch.stack((ends[:-1], ends[1:]), dim=1)
    return gallery.flamingo(intervals, image_token_length=size), images * size


def compress(length: int, device: torch.device, stride: int = 16) -> tuple[MaskMod, int]:
    """native sparse attention: windows that ended before it"""
    check_int("stride", stride, 1, length + 1)
    return nsa.compress_mask_mod(stride), blocks.num_windows(length, stride)


def selected(
    length: int, device: torch.device, selection_block_size: int = 64, num_selected_blocks: int = 2
) -> MaskMod:
    """native sparse attention: selected blocks, drawn at random, and its own"""
    check_ints(1, selection_block_size=selection_block_size)
    check_ints(0, num_selected_blocks=num_selected_blocks)
    count = blocks.num_blocks(length, selection_block_size)
    rank = torch.rand((count, count), generator=torch.Generator().manual_seed(0)).tril(-1)
    top, index = rank.topk(min(num_selected_blocks, count), dim=-1)
    # all queries of a block share its indices
    index = torch.where(top > 0, index, -1).repeat_interleave(selection_block_size, 0)[:length]
    membership = nsa.block_membership(index[None, None].to(device), count, selection_block_size)
    mod = nsa.selected_mask_mod(membership, selection_block_size)
    # all batch rows and heads use the membership of row 0 and head 0
    return lambda b, h, i, j: mod(b * 0, h * 0, i, j)


CATALOG: dict[str, Callable[..., Any]] = {
    build.__name__: build
    for build in (
        causal, sliding_window, dilated_window, prefix_lm, document, jagged, sasa, natten,
        flamingo, compress, selected,
    )
}  # fmt: skip


def options_of(name: str) -> dict[str, int | None]:
    """The settings of a mask and their defaults."""
    parameters = list(inspect.signature(CATALOG[name]).parameters.values())[2:]
    return {parameter.name: parameter.default for parameter in parameters}


def make(name: str, length: int, device: torch.device, **options: int) -> tuple[MaskMod, int, int]:
    """A mask mod by name for `length` queries, and its numbers of queries and keys.

    Raises:
        ValueError: an unknown name, or a setting that the mask refuses.
    """
    check_choice("name", name, CATALOG)
    made = CATALOG[name](check_int("length", length, 1), device, **options)
    mod, kv_len = made if isinstance(made, tuple) else (made, length)
    return mod, length, kv_len
