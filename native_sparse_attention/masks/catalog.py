"""Masks by name for pictures and benchmarks, with default settings for any length."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import blocks
from ..checks.scalars import check_choice, check_int, check_ints
from . import gallery, jagged, nsa
from .tiles import MaskMod


@dataclass(frozen=True)
class Option:
    """An integer setting. Its default is a function of the length."""

    default: Callable[[int], int]
    meaning: str


@dataclass(frozen=True)
class Entry:
    """`build(length, device, **options)` returns a mod, or a mod and its number of keys where they
    are not the queries."""

    meaning: str
    build: Callable[..., Any]
    options: dict[str, Option]


def fixed(value: int, meaning: str) -> Option:
    return Option(lambda length: value, meaning)


def fraction(divisor: int, meaning: str) -> Option:
    return Option(lambda length: max(1, length // divisor), meaning)


def squarest_width(length: int) -> int:
    """The width of the canvas of `length` pixels that is closest to a square."""
    height = next(n for n in range(math.isqrt(length), 0, -1) if length % n == 0)
    return length // height


def canvas_height(length: int, canvas_width: int) -> int:
    check_ints(1, canvas_width=canvas_width)
    if length % canvas_width:
        raise ValueError(f"canvas_width must divide length={length}, got {canvas_width}")
    return length // canvas_width


def growing_offsets(length: int, documents: int, device: torch.device) -> Tensor:
    """Offsets of sequences with lengths in the ratio 1 : 2 : 3 : ... and a total of `length`."""
    check_ints(1, documents=documents)
    if documents > length:
        raise ValueError(f"documents must be at most length={length}, got {documents}")
    total = documents * (documents + 1)
    ends = [length * n * (n + 1) // total for n in range(documents + 1)]
    return torch.tensor(ends, device=device)


def build_flamingo(
    length: int, device: torch.device, images: int, image_token_length: int
) -> tuple[MaskMod, int]:
    """Texts of equal length, one after each image; each text sees the image before it."""
    check_ints(1, images=images)
    ends = [length * n // images for n in range(images + 1)]
    intervals = torch.tensor([ends[:-1], ends[1:]], device=device).T
    mod = gallery.flamingo(intervals, image_token_length=image_token_length)
    return mod, images * image_token_length


def build_compress(length: int, device: torch.device, stride: int) -> tuple[MaskMod, int]:
    check_ints(1, stride=stride)
    if stride > length:
        raise ValueError(f"stride must be at most length={length}, got {stride}")
    return nsa.compress_mask_mod(stride), blocks.num_windows(length, stride)


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
DOCUMENTS = {"documents": fixed(4, "sequences, of lengths as 1 : 2 : 3 : ...")}
PIXELS = {
    "canvas_width": Option(squarest_width, "pixels of a row; it divides the length"),
    "kernel_height": fixed(7, "rows of pixels, odd"),
    "kernel_width": fixed(7, "columns of pixels, odd"),
}

CATALOG = {
    "causal": Entry("keys up to the query", lambda n, device: gallery.causal, {}),
    "sliding_window": Entry(
        "the nearest keys before it",
        lambda n, device, window: gallery.sliding_window(window),
        WINDOW,
    ),
    "dilated_window": Entry(
        "keys before it, some distance apart",
        lambda n, device, window, dilation: gallery.dilated_window(window, dilation),
        {
            "window": fraction(16, "keys before the query"),
            "dilation": fixed(4, "from one key to the next"),
        },
    ),
    "prefix_lm": Entry(
        "a prefix and the past",
        lambda n, device, prefix_length: gallery.prefix_lm(prefix_length),
        {"prefix_length": fraction(4, "keys that all see")},
    ),
    "document": Entry(
        "the past of its own document",
        lambda n, device, documents: gallery.document(
            offsets=growing_offsets(n, documents, device)
        ),
        DOCUMENTS,
    ),
    "jagged": Entry(
        "a window within packed sequences",
        lambda n, device, documents, window: jagged.jagged_mask_mod(
            gallery.sliding_window(window), growing_offsets(n, documents, device)
        ),
        DOCUMENTS | WINDOW,
    ),
    "sasa": Entry(
        "pixels around it, cut at the border",
        lambda n, device, canvas_width, **kernel: gallery.sasa(
            canvas_height(n, canvas_width), canvas_width, **kernel
        ),
        PIXELS,
    ),
    "natten": Entry(
        "pixels around it, moved inside at the border",
        lambda n, device, canvas_width, **kernel: gallery.natten(
            canvas_height(n, canvas_width), canvas_width, **kernel
        ),
        PIXELS,
    ),
    "flamingo": Entry(
        "text on the image before it",
        build_flamingo,
        {
            "images": fixed(4, "images, each before as much text"),
            "image_token_length": fraction(4, "keys of an image"),
        },
    ),
    "compress": Entry(
        "native sparse attention: windows that ended before it",
        build_compress,
        {"stride": fixed(16, "tokens from window to window")},
    ),
    "selected": Entry(
        "native sparse attention: selected blocks and its own",
        build_selected,
        {
            "selection_block_size": fixed(64, "tokens of a block"),
            "num_selected_blocks": fixed(2, "blocks drawn at random"),
        },
    ),
}


def make(name: str, length: int, device: torch.device, **options: Any) -> tuple[MaskMod, int, int]:
    """A mask mod by name for `length` queries, and its numbers of queries and keys.

    Raises:
        ValueError: an unknown name or option, or a setting that the mask refuses.
    """
    check_choice("name", name, CATALOG)
    check_int("length", length, 1)
    entry = CATALOG[name]
    for option in options:
        check_choice("option", option, entry.options)
    settings = {key: options.get(key, o.default(length)) for key, o in entry.options.items()}
    built = entry.build(length, device, **settings)
    mod, kv_len = built if isinstance(built, tuple) else (built, length)
    return mod, length, kv_len
