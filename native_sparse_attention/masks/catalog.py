"""Masks by name for pictures and benchmarks, with default settings for any length."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import blocks
from ..checks.tensors import check_choice, check_int, check_ints
from . import gallery, jagged, nsa
from .tiles import MaskMod


@dataclass(frozen=True)
class Option:
    """An integer setting. Its default is a function of the length."""

    default: Callable[[int], int]
    meaning: str


@dataclass(frozen=True)
class Entry:
    """`build(length, device, **options)` returns a mod and its numbers of queries and keys."""

    build: Callable[..., tuple[MaskMod, int, int]]
    meaning: str
    options: dict[str, Option]


def shares(length: int, parts: int, device: torch.device) -> Tensor:
    """Offsets of sequences with lengths in the ratio 1 : 2 : 3 : ... and a total of `length`."""
    if parts > length:
        raise ValueError(f"documents must be at most length={length}, got {parts}")
    ends = [length * n * (n + 1) // (parts * (parts + 1)) for n in range(parts + 1)]
    return torch.tensor(ends, device=device)


def canvas(length: int, width: int) -> int:
    """The height of a canvas of `length` pixels."""
    check_ints(1, canvas_width=width)
    if length % width:
        raise ValueError(f"canvas_width must divide length={length}, got {width}")
    return length // width


def squarest(length: int) -> int:
    """The largest divisor up to the square root: the height of a canvas."""
    return next(n for n in range(math.isqrt(length), 0, -1) if length % n == 0)


# entries


def square(mod: MaskMod, length: int) -> tuple[MaskMod, int, int]:
    return mod, length, length


def causal(length: int, device: torch.device) -> tuple[MaskMod, int, int]:
    return square(gallery.causal, length)


def sliding_window(length: int, device: torch.device, window: int) -> tuple[MaskMod, int, int]:
    return square(gallery.sliding_window(window), length)


def dilated_window(
    length: int, device: torch.device, window: int, dilation: int
) -> tuple[MaskMod, int, int]:
    return square(gallery.dilated_window(window, dilation), length)


def prefix_lm(length: int, device: torch.device, prefix_length: int) -> tuple[MaskMod, int, int]:
    return square(gallery.prefix_lm(prefix_length), length)


def document(length: int, device: torch.device, documents: int) -> tuple[MaskMod, int, int]:
    check_ints(1, documents=documents)
    return square(gallery.document(offsets=shares(length, documents, device)), length)


def packed(
    length: int, device: torch.device, documents: int, window: int
) -> tuple[MaskMod, int, int]:
    check_ints(1, documents=documents)
    offsets = shares(length, documents, device)
    return square(jagged.jagged_mask_mod(gallery.sliding_window(window), offsets), length)


def sasa(
    length: int, device: torch.device, canvas_width: int, kernel_height: int, kernel_width: int
) -> tuple[MaskMod, int, int]:
    height = canvas(length, canvas_width)
    return square(gallery.sasa(height, canvas_width, kernel_height, kernel_width), length)


def natten(
    length: int, device: torch.device, canvas_width: int, kernel_height: int, kernel_width: int
) -> tuple[MaskMod, int, int]:
    height = canvas(length, canvas_width)
    return square(gallery.natten(height, canvas_width, kernel_height, kernel_width), length)


def flamingo(
    length: int, device: torch.device, images: int, image_token_length: int
) -> tuple[MaskMod, int, int]:
    """Texts of equal length, one after each image; each text sees the image before it."""
    check_ints(1, images=images)
    ends = [length * n // images for n in range(images + 1)]
    intervals = torch.tensor([ends[:-1], ends[1:]], device=device).T
    mod = gallery.flamingo(intervals, image_token_length=image_token_length)
    return mod, length, images * image_token_length


def compress(length: int, device: torch.device, stride: int) -> tuple[MaskMod, int, int]:
    check_ints(1, stride=stride)
    windows = blocks.num_windows(length, stride)
    if windows < 1:
        raise ValueError(f"stride must be at most length={length}, got {stride}")
    return nsa.compress_mask_mod(stride), length, windows


def selected(
    length: int, device: torch.device, selection_block_size: int, num_selected_blocks: int
) -> tuple[MaskMod, int, int]:
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

    return square(broadcast, length)


def fixed(value: int, meaning: str) -> Option:
    return Option(lambda length: value, meaning)


def part(of: int, meaning: str) -> Option:
    return Option(lambda length: max(1, length // of), meaning)


WINDOW = part(8, "keys before the query")
DOCUMENTS = fixed(4, "sequences, of lengths as 1 : 2 : 3 : ...")
WIDTH = Option(lambda length: length // squarest(length), "pixels of a row; it divides the length")

CATALOG: dict[str, Entry] = {
    "causal": Entry(causal, "keys up to the query", {}),
    "sliding_window": Entry(sliding_window, "the nearest keys before it", {"window": WINDOW}),
    "dilated_window": Entry(
        dilated_window,
        "keys before it, some distance apart",
        {
            "window": part(16, "keys before the query"),
            "dilation": fixed(4, "from one key to the next"),
        },
    ),
    "prefix_lm": Entry(
        prefix_lm, "a prefix and the past", {"prefix_length": part(4, "keys that all see")}
    ),
    "document": Entry(document, "the past of its own document", {"documents": DOCUMENTS}),
    "jagged": Entry(
        packed,
        "a window within packed sequences",
        {"documents": DOCUMENTS, "window": WINDOW},
    ),
    "sasa": Entry(
        sasa,
        "pixels around it, cut at the border",
        {
            "canvas_width": WIDTH,
            "kernel_height": fixed(7, "rows of pixels, odd"),
            "kernel_width": fixed(7, "columns of pixels, odd"),
        },
    ),
    "natten": Entry(
        natten,
        "pixels around it, moved inside at the border",
        {
            "canvas_width": WIDTH,
            "kernel_height": fixed(7, "rows of pixels, odd"),
            "kernel_width": fixed(7, "columns of pixels, odd"),
        },
    ),
    "flamingo": Entry(
        flamingo,
        "text on the image before it",
        {
            "images": fixed(4, "images, each before as much text"),
            "image_token_length": part(4, "keys of an image"),
        },
    ),
    "compress": Entry(
        compress,
        "native sparse attention: windows that ended before it",
        {"stride": fixed(16, "tokens from window to window")},
    ),
    "selected": Entry(
        selected,
        "native sparse attention: selected blocks and its own",
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
    return entry.build(length, device, **settings)
