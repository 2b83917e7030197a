"""Mask mods for torch's flex_attention, besides the three of native sparse attention.

    b, h          batch row, query head
    i, j          query, key
    y, x          row and column of a pixel on a canvas: index = y * width + x

Each mask is a mod, or a factory of a mod. A mod tells for one pair whether i may attend to j.
torch's `and_masks` and `or_masks` combine mods.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import INTEGER_DTYPES, check_bool, describe
from .nsa import MaskMod, constant, sliding_mask_mod


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """`j <= i`. This is a mask mod, not a factory."""
    return j <= i


def sliding_window(window: int, causal: bool = True) -> MaskMod:
    """`i - window <= j <= i`, that is `window + 1` keys; up to `i + window` if not causal.

    As in native sparse attention; that of Mistral 7B, arXiv 2310.06825, counts the query's own key.
    """
    constant("window", window)
    return sliding_mask_mod(window, causal)


def dilated_window(window: int, dilation: int, causal: bool = True) -> MaskMod:
    """`j = i - m * dilation` for m of `0 .. window`: `window + 1` keys, `dilation` apart. If not
    causal, m of `-window .. window`. A dilation of 1 gives `sliding_window`.

    Longformer, arXiv 2004.05150.
    """
    step, reach = constant("dilation", dilation, 1), constant("window", window)
    window_mask = sliding_window(int(reach) * int(step), causal)

    def dilated_window_mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return window_mask(b, h, i, j) & ((i - j) % int(step) == 0)

    return dilated_window_mask


def prefix_lm(prefix_length: int) -> MaskMod:
    """`j < prefix_length` or `j <= i`: all queries see the prefix; the rest is causal.

    T5, arXiv 1910.10683. The common form `j <= prefix_length` has one key more than its length.
    """
    length = constant("prefix_length", prefix_length)
    return lambda b, h, i, j: (j < int(length)) | (j <= i)


def document(
    document_ids: Tensor | None = None, *, offsets: Tensor | None = None, causal: bool = True
) -> MaskMod:
    """`id(i) == id(j)`, and causally `j <= i`: attention never crosses packed documents.

    Args:
        document_ids: an integer for each token, [T] or [B T], in any order. A negative id marks
            padding, which sees nothing and is not seen.
        offsets: in place of ids, begins of documents and the end of the last one,
            [documents + 1] (`cu_seqlens`): `[0, 3, 5]` are documents of 3 and 2 tokens. A document
            may be empty.
    """
    causal = check_bool("causal", causal)
    check_one_of(document_ids=document_ids, offsets=offsets)
    if offsets is None:
        ids = check_integers("document_ids", document_ids, 1, 2)
    else:
        ids = sequence_ids("offsets", offsets)
    is_batched = ids.ndim == 2

    def document_mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        q_id, kv_id = (ids[b, t] if is_batched else ids[t] for t in (i, j))
        same = (q_id == kv_id) & (q_id >= 0)
        return same & (j <= i) if causal else same

    return document_mask


def sasa(
    canvas_height: int, canvas_width: int, kernel_height: int, kernel_width: int | None = None
) -> MaskMod:
    """`|y_i - y_j| <= kernel_height // 2` and `|x_i - x_j| <= kernel_width // 2`: a window around
    each pixel. The border of the canvas cuts the window, so pixels there see fewer pixels.

    Stand-alone self-attention, arXiv 1906.05909. The kernel has odd sides, `kernel_width` is
    `kernel_height` by default, and may be larger than the canvas.
    """
    return pixel_window((canvas_height, canvas_width), (kernel_height, kernel_width), False)


def natten(
    canvas_height: int, canvas_width: int, kernel_height: int, kernel_width: int | None = None
) -> MaskMod:
    """A window of kernel_height x kernel_width pixels around each pixel. At the border the window
    moves inside the canvas, so every pixel sees equally many pixels.

    `|c_y - y_j| <= kernel_height // 2` with `c_y` the query's row, clamped to at least that far
    from top and bottom; columns likewise. Neighborhood attention, arXiv 2204.07143. The kernel has
    odd sides, `kernel_width` is `kernel_height` by default, and is at most as large as the canvas.
    """
    return pixel_window((canvas_height, canvas_width), (kernel_height, kernel_width), True)


def pixel_window(
    canvas: tuple[int, int], kernel: tuple[int, int | None], is_moved: bool
) -> MaskMod:
    """A window around each pixel, moved inside the canvas at the border or not."""
    windows, width = [], constant("canvas_width", canvas[1], 1)
    sides = kernel[0], kernel[0] if kernel[1] is None else kernel[1]
    for axis, canvas_side, side in zip(("height", "width"), canvas, sides, strict=True):
        size = int(constant(f"canvas_{axis}", canvas_side, 1))
        reach, extra = divmod(int(constant(f"kernel_{axis}", side, 1)), 2)
        if not extra:
            raise ValueError(f"kernel_{axis} must be odd, so that it has a centre, got {side}")
        if is_moved and side > size:
            raise ValueError(f"kernel_{axis} must be at most canvas_{axis}={size}, got {side}")
        margin = reach if is_moved else 0
        windows.append((str(reach), str(margin), str(size - 1 - margin)))
    (reach_y, top, bottom), (reach_x, left, right) = windows

    def pixel_window_mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        y, x = i // int(width), i % int(width)
        y_distance = y.clamp(int(top), int(bottom)) - j // int(width)
        x_distance = x.clamp(int(left), int(right)) - j % int(width)
        return (y_distance.abs() <= int(reach_y)) & (x_distance.abs() <= int(reach_x))

    return pixel_window_mask


def flamingo(
    intervals: Tensor, image_ids: Tensor | None = None, *, image_token_length: int | None = None
) -> MaskMod:
    """`start <= i < end` for the interval `[start, end)` of key j's image: cross-attention of text
    to its images. Text outside all intervals sees no image.

    Args:
        intervals: the text that sees each image, integers [images 2]. Intervals may overlap.
        image_ids: the image of each key, integers [S], `0 .. images - 1`. No text sees others.
        image_token_length: in place of `image_ids`, the number of keys per image: `j // length`.

    Flamingo, arXiv 2204.14198.
    """
    check_integers("intervals", intervals, 2)
    if intervals.shape[1] != 2 or len(intervals) == 0:
        raise ValueError(f"intervals must have shape [images, 2], got {list(intervals.shape)}")
    check_one_of(image_ids=image_ids, image_token_length=image_token_length)
    length, last = "", str(len(intervals) - 1)
    if image_token_length is not None:
        length = constant("image_token_length", image_token_length, 1)
    else:
        check_integers("image_ids", image_ids, 1)
    starts, ends = (t.contiguous() for t in intervals.unbind(1))

    def flamingo_mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        image = j // int(length) if image_ids is None else image_ids[j]
        index = image.clamp(0, int(last))
        return (image == index) & (i >= starts[index]) & (i < ends[index])

    return flamingo_mask


# checks


def check_one_of(**values: object) -> None:
    if sum(value is not None for value in values.values()) != 1:
        got = "neither" if None in values.values() else "both"
        raise ValueError(f"{' or '.join(values)} must be given, and not both, got {got}")


def check_integers(name: str, value: Any, *ndims: int) -> Tensor:
    """Check that a tensor has integers and one of `ndims` axes."""
    is_integer = isinstance(value, Tensor) and value.dtype in INTEGER_DTYPES
    if not is_integer or value.ndim not in ndims:
        axes = " or ".join(map(str, ndims))
        raise ValueError(f"{name} must be an integer tensor of {axes} axes, got {describe(value)}")
    return value


def sequence_ids(name: str, offsets: Tensor) -> Tensor:
    """The number of the sequence of each packed token, int64 [tokens], from begins of sequences and
    the end of the last: they start at 0 and never decrease."""
    numbers = check_integers(name, offsets, 1).tolist()
    if len(numbers) < 2 or numbers[0] != 0 or sorted(numbers) != numbers:
        raise ValueError(f"{name} must hold 0 and ends that never decrease, got {numbers}")
    sequences = torch.arange(len(offsets) - 1, device=offsets.device)
    return sequences.repeat_interleave(offsets.diff().long())
