"""Masks by name for pictures and benchmarks, with default settings for any length."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import blocks
from ..checks import check_choice, check_int, check_ints
from . import attention, gallery, nsa
from .tiles import MaskMod


class Option(NamedTuple):
    """An integer setting. Its default is a number, or a function of the length."""

    default: int | Callable[[int], int]
    meaning: str


class Entry(NamedTuple):
    """`build(length, device, **options)` returns a mod, or a mod and its number of keys where they
    are not the queries."""

    meaning: str
    build: Callable[..., Any]
    options: dict[str, Option]


def fraction(divisor: int, meaning: str) -> Option:
    return Option(lambda length: max(1, length // divisor), meaning)


def squarest_width(length: int) -> int:
    """The width of the canvas of `length` pixels that is closest to a square."""
    height = next(n for n in range(math.isqrt(length), 0, -1) if length % n == 0)
    return length // height


def build_sequence(
    mask: Callable[..., MaskMod], length: int, device: torch.device, **options: int
) -> MaskMod:
    return mask(**options)


def build_pixels(
    mask: Callable[..., MaskMod],
    length: int,
    device: torch.device,
    canvas_width: int,
    **kernel: int,
) -> MaskMod:
    check_ints(1, canvas_width=canvas_width)
    if length % canvas_width:
        raise ValueError(f"canvas_width must divide length={length}, got {canvas_width}")
    return mask(length // canvas_width, canvas_width, **kernel)


def build_documents(
    length: int, device: torch.device, documents: int, window: int | None = None
) -> MaskMod:
    """Documents with lengths in the ratio 1 : 2 : 3 : ... and a total of `length`."""
    check_ints(1, documents=documents)
    if documents > length:
        raise ValueError(f"documents must be at most length={length}, got {documents}")
    total = documents * (documents + 1)
    ends = [length * n * (n + 1) // total for n in range(documents + 1)]
    offsets = torch.tensor(ends, device=device)
    if window is None:
        return gallery.document(offsets=offsets)
    return attention.jagged_mask_mod(gallery.sliding_window(window), offsets)


def build_flamingo(
    length: int, device: torch.device, images: int, image_token_length: int
) -> tuple[MaskMod, int]:
    """Texts of equal length, one after each image; each text sees the image before it."""
    check_ints(1, images=images)
    ends = torch.arange(images + 1, device=device) * length // images
    intervals = torch.stack((ends[:-1], ends[1:]), dim=1)
    mod = gallery.flamingo(intervals, image_token_length=image_token_length)
    return mod, images * image_token_length


def build_compress(length: int, device: torch.device, stride: int) -> tuple[MaskMod, int]:
    mod = nsa.compress_mask_mod(stride)
    if stride > length:
        raise ValueError(f"stride must be at most length={length}, got {stride}")
    return mod, blocks.num_windows(length, stride)


def build_selected(
    length: int, device: torch.device, selection_block_size: int, num_selected_blocks: int
) -> MaskMod:
    """Block indices at random with a fixed seed; all queries of a block share them."""
    check_ints(1, selection_block_size=selection_block_size)
    check_ints(0, num_selected_blocks=num_selected_blocks)
    count = blocks.num_blocks(length, selection_block_size)
    generator = torch.Generator().manual_seed(0)
    rank = torch.rand((count, count), generator=generator).tril(-1)
    top, index = rank.topk(min(num_selected_blocks, count), dim=-1)
    index = torch.where(top > 0, index, -1).repeat_interleave(selection_block_size, 0)[:length]
    membership = nsa.block_membership(index[None, None].to(device), count, selection_block_size)
    mod = nsa.selected_mask_mod(membership, selection_block_size)

    def broadcast(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        # all batch rows and heads use the membership of row 0 and head 0
        return mod(b * 0, h * 0, q_idx, kv_idx)

    return broadcast


WINDOW = {"window": fraction(8, "keys before the query")}
DILATED = {
    "window": fraction(16, "keys before the query"),
    "dilation": Option(4, "from one key to the next"),
}
PREFIX = {"prefix_length": fraction(4, "keys that all see")}
DOCUMENTS = {"documents": Option(4, "sequences, of lengths as 1 : 2 : 3 : ...")}
PIXELS = {
    "canvas_width": Option(squarest_width, "pixels of a row; it divides the length"),
    "kernel_height": Option(7, "rows of pixels, odd"),
    "kernel_width": Option(7, "columns of pixels, odd"),
}
IMAGES = {
    "images": Option(4, "images, each before as much text"),
    "image_token_length": fraction(4, "keys of an image"),
}
STRIDE = {"stride": Option(16, "tokens from window to window")}
SELECTED = {
    "selection_block_size": Option(64, "tokens of a block"),
    "num_selected_blocks": Option(2, "blocks drawn at random"),
}

CATALOG = {
    "causal": Entry("keys up to the query", partial(build_sequence, lambda: gallery.causal), {}),
    "sliding_window": Entry(
        "the nearest keys before it", partial(build_sequence, gallery.sliding_window), WINDOW
    ),
    "dilated_window": Entry(
        "keys before it, some distance apart",
        partial(build_sequence, gallery.dilated_window),
        DILATED,
    ),
    "prefix_lm": Entry("a prefix and the past", partial(build_sequence, gallery.prefix_lm), PREFIX),
    "document": Entry("the past of its own document", build_documents, DOCUMENTS),
    "jagged": Entry("a window within packed sequences", build_documents, DOCUMENTS | WINDOW),
    "sasa": Entry(
        "pixels around it, cut at the border", partial(build_pixels, gallery.sasa), PIXELS
    ),
    "natten": Entry(
        "pixels around it, moved inside at the border",
        partial(build_pixels, gallery.natten),
        PIXELS,
    ),
    "flamingo": Entry("text on the image before it", build_flamingo, IMAGES),
    "compress": Entry(
        "native sparse attention: windows that ended before it", build_compress, STRIDE
    ),
    "selected": Entry(
        "native sparse attention: selected blocks and its own", build_selected, SELECTED
    ),
}


def make(name: str, length: int, device: torch.device, **options: Any) -> tuple[MaskMod, int, int]:
    """A mask mod by name for `length` queries, and its numbers of queries and keys.

    Raises:
        ValueError: an unknown name, or a setting that the mask refuses.
    """
    check_choice("name", name, CATALOG)
    check_int("length", length, 1)
    entry = CATALOG[name]
    defaults = {
        key: option.default(length) if callable(option.default) else option.default
        for key, option in entry.options.items()
    }
    built = entry.build(length, device, **defaults | options)
    mod, kv_len = built if isinstance(built, tuple) else (built, length)
    return mod, length, kv_len
