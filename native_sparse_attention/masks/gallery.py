"""Mask mods for torch's flex_attention, besides the three of native sparse attention.

    b, h          batch row, query head
    i, j          query, key: `q_idx` and `kv_idx`
    y, x          row and column of a pixel on a canvas: index = y * width + x

Each mask is a mod, or a factory of a mod. A mod tells for one pair whether i may attend to j.
torch's `and_masks` and `or_masks` combine mods.

Integers are defaults of the mod's parameters; `constants.py` gives the reason.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks.tensors import check_bool, check_int, check_ints
from .constants import constant_defaults
from .tiles import MaskMod

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

# sequences


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """`j <= i`. This is a mask mod, not a factory."""
    return kv_idx <= q_idx


def sliding_window(window: int, causal: bool = True) -> MaskMod:
    """`i - window <= j <= i`, that is `window + 1` keys; up to `i + window` if not causal.

    Mistral 7B, arXiv 2310.06825, but its window counts the query's own key. Native sparse attention
    has this window.

    Raises:
        ValueError: window below 0.
    """
    window, causal = check_int("window", window, 0), check_bool("causal", causal)
    ahead = 0 if causal else window

    @constant_defaults
    def sliding_window_mask(
        b: Tensor,
        h: Tensor,
        q_idx: Tensor,
        kv_idx: Tensor,
        window: int = window,
        ahead: int = ahead,
    ) -> Tensor:
        return (q_idx - kv_idx <= window) & (kv_idx - q_idx <= ahead)

    return sliding_window_mask


def dilated_window(window: int, dilation: int, causal: bool = True) -> MaskMod:
    """`j = i - m * dilation` for m of `0 .. window`: `window + 1` keys, `dilation` apart. If not
    causal, m of `-window .. window`. A dilation of 1 gives `sliding_window`.

    Longformer, arXiv 2004.05150.

    Raises:
        ValueError: window below 0, dilation below 1.
    """
    window, causal = check_int("window", window, 0), check_bool("causal", causal)
    dilation = check_int("dilation", dilation, 1)
    behind, ahead = window * dilation, 0 if causal else window * dilation

    @constant_defaults
    def dilated_window_mask(
        b: Tensor,
        h: Tensor,
        q_idx: Tensor,
        kv_idx: Tensor,
        behind: int = behind,
        ahead: int = ahead,
        dilation: int = dilation,
    ) -> Tensor:
        distance = q_idx - kv_idx
        return (distance <= behind) & (distance >= -ahead) & (distance % dilation == 0)

    return dilated_window_mask


def prefix_lm(prefix_length: int) -> MaskMod:
    """`j < prefix_length` or `j <= i`: all queries see the prefix; the rest is causal.

    The prefix has exactly `prefix_length` keys. The common form `j <= prefix_length` has one more.
    T5, arXiv 1910.10683.

    Raises:
        ValueError: prefix_length below 0.
    """
    prefix_length = check_int("prefix_length", prefix_length, 0)

    @constant_defaults
    def prefix_lm_mask(
        b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, prefix_length: int = prefix_length
    ) -> Tensor:
        return (kv_idx < prefix_length) | (kv_idx <= q_idx)

    return prefix_lm_mask


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

    Raises:
        ValueError: both or neither are given, or one is malformed.
    """
    causal = check_bool("causal", causal)
    if (document_ids is None) == (offsets is None):
        raise ValueError(
            "document_ids or offsets must be given, and not both, got "
            + ("neither" if offsets is None else "both")
        )
    if offsets is not None:
        check_cu_seqlens("offsets", offsets)
        ids = sequence_of(offsets, int(offsets[-1]))
    else:
        ids = integers("document_ids", document_ids, (1, 2))
    by_row = ids.ndim == 2

    def document_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        of_q, of_kv = (ids[b, t] if by_row else ids[t] for t in (q_idx, kv_idx))
        same = (of_q == of_kv) & (of_q >= 0)
        return same & (kv_idx <= q_idx) if causal else same

    return document_mask


# canvases


def sasa(
    canvas_height: int, canvas_width: int, kernel_height: int, kernel_width: int | None = None
) -> MaskMod:
    """`|y_i - y_j| <= kernel_height // 2` and `|x_i - x_j| <= kernel_width // 2`: a window around
    each pixel. The border of the canvas cuts the window, so pixels there see fewer pixels.

    Stand-alone self-attention, arXiv 1906.05909. `kernel_width` is `kernel_height` by default. The
    kernel may be larger than the canvas.

    Raises:
        ValueError: a canvas below 1 x 1, an even kernel.
    """
    kernel_width = kernel_height if kernel_width is None else kernel_width
    canvas_height, canvas_width = check_ints(
        1, canvas_height=canvas_height, canvas_width=canvas_width
    )
    kernel_height, kernel_width = check_odd(kernel_height=kernel_height, kernel_width=kernel_width)
    reach_y, reach_x = kernel_height // 2, kernel_width // 2

    @constant_defaults
    def sasa_mask(
        b: Tensor,
        h: Tensor,
        q_idx: Tensor,
        kv_idx: Tensor,
        width: int = canvas_width,
        reach_y: int = reach_y,
        reach_x: int = reach_x,
    ) -> Tensor:
        dy = q_idx // width - kv_idx // width
        dx = q_idx % width - kv_idx % width
        return (dy.abs() <= reach_y) & (dx.abs() <= reach_x)

    return sasa_mask


def natten(
    canvas_height: int, canvas_width: int, kernel_height: int, kernel_width: int | None = None
) -> MaskMod:
    """A window of kernel_height x kernel_width pixels around each pixel. At the border the window
    moves inside the canvas, so every pixel sees equally many pixels.

    `|c_y - y_j| <= kernel_height // 2` with `c_y` the query's row, clamped to at least that far
    from top and bottom; columns likewise. Neighborhood attention, arXiv 2204.07143. `kernel_width`
    is `kernel_height` by default.

    Raises:
        ValueError: a canvas below 1 x 1, a kernel that is even or larger than the canvas.
    """
    kernel_width = kernel_height if kernel_width is None else kernel_width
    canvas_height, canvas_width = check_ints(
        1, canvas_height=canvas_height, canvas_width=canvas_width
    )
    kernel_height, kernel_width = check_odd(kernel_height=kernel_height, kernel_width=kernel_width)
    for axis, kernel, canvas in (
        ("height", kernel_height, canvas_height),
        ("width", kernel_width, canvas_width),
    ):
        if kernel > canvas:
            raise ValueError(f"kernel_{axis} must be at most canvas_{axis}={canvas}, got {kernel}")
    reach_y, reach_x = kernel_height // 2, kernel_width // 2
    last_y, last_x = canvas_height - 1 - reach_y, canvas_width - 1 - reach_x

    @constant_defaults
    def natten_mask(
        b: Tensor,
        h: Tensor,
        q_idx: Tensor,
        kv_idx: Tensor,
        width: int = canvas_width,
        reach_y: int = reach_y,
        reach_x: int = reach_x,
        last_y: int = last_y,
        last_x: int = last_x,
    ) -> Tensor:
        dy = (q_idx // width).clamp(reach_y, last_y) - kv_idx // width
        dx = (q_idx % width).clamp(reach_x, last_x) - kv_idx % width
        return (dy.abs() <= reach_y) & (dx.abs() <= reach_x)

    return natten_mask


# text and images


def flamingo(
    intervals: Tensor, image_ids: Tensor | None = None, *, image_token_length: int | None = None
) -> MaskMod:
    """`start <= i < end` for the interval `[start, end)` of key j's image: cross-attention of text
    to its images. Text outside all intervals sees no image.

    Args:
        intervals: the text that sees each image, integers [images 2]. Intervals may overlap.
        image_ids: the image of each key, integers [S], `0 .. images - 1`.
        image_token_length: in place of `image_ids`, the number of keys per image: `j // length`.

    Flamingo, arXiv 2204.14198.

    Raises:
        ValueError: both or neither of the two are given, or an argument is malformed.
    """
    integers("intervals", intervals, (2,))
    check_values("intervals", intervals)
    images = intervals.shape[0]
    if intervals.shape[1] != 2 or images == 0:
        raise ValueError(f"intervals must have shape [images, 2], got {list(intervals.shape)}")
    starts, ends = (t.contiguous() for t in intervals.unbind(1))
    if bool(((starts < 0) | (ends < starts)).any()):
        raise ValueError(
            "intervals must be pairs of 0 <= start <= end, got " + str(intervals.tolist())
        )
    if (image_ids is None) == (image_token_length is None):
        raise ValueError(
            "image_ids or image_token_length must be given, and not both, got "
            + ("neither" if image_ids is None else "both")
        )
    if image_ids is not None:
        ids = integers("image_ids", image_ids, (1,))
        check_values("image_ids", ids)
        if ids.device != intervals.device:
            raise ValueError(f"image_ids is on {ids.device}, intervals on {intervals.device}")
        if bool(((ids < 0) | (ids >= images)).any()):
            raise ValueError(
                f"image_ids must be of 0 .. {images - 1}, the images that have intervals, got "
                f"{int(ids.min())} .. {int(ids.max())}"
            )

        def by_id(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            image = ids[kv_idx]
            return (q_idx >= starts[image]) & (q_idx < ends[image])

        return by_id
    length = check_int("image_token_length", image_token_length, 1)

    @constant_defaults
    def by_length(
        b: Tensor,
        h: Tensor,
        q_idx: Tensor,
        kv_idx: Tensor,
        length: int = length,
        last: int = images - 1,
    ) -> Tensor:
        image = kv_idx // length
        inside = image.clamp(max=last)
        return (image <= last) & (q_idx >= starts[inside]) & (q_idx < ends[inside])

    return by_length


# checks


def integers(name: str, value: Tensor | None, ndims: tuple[int, ...]) -> Tensor:
    """Check that a tensor has integers and one of `ndims` axes."""
    if not isinstance(value, Tensor) or value.dtype not in INTEGERS:
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} must be an integer tensor, got {got}")
    if value.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got one of layout {value.layout}")
    if value.ndim not in ndims:
        axes = " or ".join(map(str, ndims))
        raise ValueError(f"{name} must have {axes} axes, got shape {list(value.shape)}")
    return value


def check_values(name: str, value: Tensor) -> None:
    """Check that a tensor holds values."""
    if value.is_meta:
        raise ValueError(f"{name} must hold numbers, got a tensor on meta")


def check_odd(**kernels: int) -> tuple[int, ...]:
    sizes = check_ints(1, **kernels)
    for name, value in zip(kernels, sizes, strict=True):
        if value % 2 == 0:
            raise ValueError(f"{name} must be odd, so that it has a centre, got {value}")
    return sizes


def check_cu_seqlens(name: str, offsets: Tensor) -> None:
    """Check begins of sequences and the end of the last: they start at 0 and never decrease."""
    integers(name, offsets, (1,))
    check_values(name, offsets)
    if len(offsets) < 2:
        raise ValueError(f"{name} must hold two numbers at least, 0 and an end, got {len(offsets)}")
    if int(offsets[0]) != 0:
        raise ValueError(f"{name} must begin with 0, got {int(offsets[0])}")
    steps = offsets.diff()
    if bool((steps < 0).any()):
        at = int((steps < 0).int().argmax())
        raise ValueError(
            f"{name} must not decrease, got {int(offsets[at])} before {int(offsets[at + 1])}"
        )


def sequence_of(offsets: Tensor, length: int) -> Tensor:
    """The sequence of each of `length` packed tokens, int64 [length]."""
    tokens = torch.arange(length, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets.contiguous(), tokens, right=True) - 1
