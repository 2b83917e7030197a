"""Mask and score mods for torch's flex_attention, besides the masks of native sparse attention.

    b, h          batch row, query head
    i, j          query, key
    y, x          row and column of a pixel on a canvas: index = y * width + x

Each is a mod, or a factory of a mod. A mask mod tells for one pair whether i may attend to j;
torch's `and_masks` and `or_masks` combine mask mods. A score mod changes the scaled logit of a pair
before the softmax. It hides no pairs: a mask can skip tiles, and a score of -inf cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..checks import (
    FLOAT_DTYPES,
    INTEGER_DTYPES,
    LEAST_NORMAL,
    TOO_MANY,
    check_bool,
    check_device,
    check_int,
    check_number,
    check_shapes,
    check_tensor,
    check_values,
    describe,
    is_strided,
)
from .nsa import MaskMod, constant, sliding_mask_mod

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


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
    return lambda b, h, i, j: window_mask(b, h, i, j) & ((i - j) % int(step) == 0)


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
        # narrower integers index as a mask, or not at all
        image_ids = check_integers("image_ids", image_ids, 1).long()
    starts, ends = (t.contiguous() for t in intervals.unbind(1))

    def flamingo_mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        image = j // int(length) if image_ids is None else image_ids[j]
        index = image.clamp(0, int(last))
        return (image == index) & (i >= starts[index]) & (i < ends[index])

    return flamingo_mask


def alibi_slopes(num_heads: int, device: torch.device | str | None = None) -> Tensor:
    """The slope of each head, float32 [H].

    `2^(-8 (h + 1) / H)` if H is a power of two. Otherwise the slopes of the next lower power P,
    then every other slope of 2 P from the first on, as in the authors' code.
    """
    num_heads = check_int("num_heads", num_heads, 1, TOO_MANY)
    device = None if device is None else check_device("device", device)
    power = 2 ** (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2 ** (-4 * (h + 1) / power) for h in range(0, 2 * power, 2)]
    return torch.tensor(slopes[:num_heads], dtype=torch.float32, device=device)


def alibi_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, slopes: Tensor) -> Tensor:
    """`score - slopes[h] * |i - j|`, for `functools.partial(alibi_bias, slopes=...)` or calls from
    other score mods. ALiBi, arXiv 2108.12409, which is causal: here later keys have the same bias.
    """
    return score - slopes[h] * (i - j).abs()


def alibi(
    num_heads: int, slopes: Tensor | None = None, device: torch.device | str | None = None
) -> ScoreMod:
    """`score - slopes[h] * |i - j|`, by default with `alibi_slopes(num_heads)` on `device`. Slopes
    that require gradients get them.
    """
    num_heads = check_int("num_heads", num_heads, 1, TOO_MANY)
    if slopes is None:
        slopes = alibi_slopes(num_heads, device)
    check_shapes(slopes=(slopes, str(num_heads)))
    check_tensor("slopes", slopes, FLOAT_DTYPES, slopes.device)
    return partial(alibi_bias, slopes=slopes)


def relative_position(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """`score + (i - j)`, for experiments. This is a score mod, not a factory."""
    return score + (i - j)


def relative_bias(table: Tensor) -> ScoreMod:
    """`score + table[h, clip(i - j, -m, m) + m]`: a learned bias of the clipped distance.

    Clipped as in arXiv 1803.02155, one number per head as in T5, arXiv 1910.10683. The table is
    floating, [H, 2 m + 1], or [2 m + 1] for all heads; its first entry applies to keys m or more
    after the query. If it requires gradients, it gets them: compiled on CUDA, and in
    `dense_attention` anywhere. Compiling may fail with "out of resource" (heads of 64 in bf16 on an
    H200, torch 2.11): then pass `kernel_options={"num_stages": 2}` to flex_attention.
    """
    is_floating = is_strided(table) and table.dtype in FLOAT_DTYPES
    if not is_floating or table.ndim not in (1, 2) or table.shape[-1] % 2 == 0:
        raise ValueError(
            "table must be floating, of shape [heads, 2 m + 1] or [2 m + 1], an entry for every "
            f"distance of -m .. m, got {describe(table)}"
        )
    has_heads, largest = table.ndim == 2, repr(table.shape[-1] // 2)

    def relative_bias_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        m = int(largest)
        index = (i - j).clamp(-m, m) + m
        return score + (table[h, index] if has_heads else table[index])

    return relative_bias_mod


def soft_cap(cap: float, approximate: bool = False) -> ScoreMod:
    """`cap * tanh(score / cap)`: bounds scores by `cap` and hardly changes small ones.

    Gemma 2, arXiv 2408.00118. `approximate=True` compiles for CUDA to the GPU's tanh instruction
    (`tanh.approx.f32`, relative error 2^-11), forward and backward.
    """
    expected = f"a positive finite number of at least {LEAST_NORMAL:.2g}"
    # a string, as `constant` returns
    bound = repr(check_number("cap", cap, expected, LEAST_NORMAL))
    approximate = check_bool("approximate", approximate)

    def soft_cap_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        scaled = score / float(bound)
        return float(bound) * (tanh_approx(scaled) if approximate else torch.tanh(scaled))

    return soft_cap_mod


# inline assembly: $0 is the result, $1 the argument
ASM = "tanh.approx.f32 $0, $1;"


@torch.library.custom_op("native_sparse_attention::tanh_approx", mutates_args=())
def tanh_approx(x: Tensor) -> Tensor:
    """tanh in one instruction of an NVIDIA GPU, PTX's `tanh.approx.f32`, where it is compiled for
    CUDA, with a relative error of at most 2^-11; torch's tanh elsewhere. Its gradient is `1 - y^2`
    of its output y."""
    if forward_ad._current_level >= 0:  # torch would drop the tangent
        raise NotImplementedError(
            "tanh_approx has no forward-mode derivative (torch.func.jvp): use torch.tanh, that is "
            "soft_cap(.., approximate=False)"
        )
    return torch.tanh(x)


@tanh_approx.register_fake
def tanh_approx_fake(x: Tensor) -> Tensor:
    if torch._guards.TracingContext.try_get() is not None:
        register_lowering()  # torch is about to compile this graph
    return torch.empty_like(x)


tanh_approx.register_vmap(lambda info, in_dims, x: (tanh_approx(x), in_dims[0]))
tanh_approx.register_autograd(
    lambda ctx, grad: grad * (1 - ctx.saved_tensors[0].square()),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


def register_lowering() -> None:
    """Register the operator in inductor as a pointwise step, which inductor fuses and accepts
    inside flex_attention. Not at import, since that would load inductor."""
    from torch._inductor.lowering import lowerings, make_pointwise, register_lowering
    from torch._inductor.virtualized import ops

    operator = torch.ops.native_sparse_attention.tanh_approx.default
    if operator in lowerings:
        return

    def assembly(x: Any) -> Any:
        # half precisions are float32 in registers and stay float32
        wide = ops.to_dtype(x, torch.float32)
        return ops.inline_asm_elementwise(
            wide, asm=ASM, constraints="=f,f", dtype=torch.float32, is_pure=True, pack=1
        )

    def lower(x: Any) -> Any:
        is_nvidia = x.get_device().type == "cuda" and torch.version.hip is None
        has_instruction = is_nvidia and x.get_dtype() != torch.float64
        return make_pointwise(assembly if has_instruction else ops.tanh)(x)

    register_lowering(operator, type_promotion_kind=None)(lower)


def check_one_of(**values: object) -> None:
    if (count := sum(value is not None for value in values.values())) != 1:
        got = "both" if count else "neither"
        raise ValueError(f"{' or '.join(values)} must be given, and not both, got {got}")


def check_integers(name: str, value: Any, *ndims: int) -> Tensor:
    """Check that a tensor has integers and one of `ndims` axes."""
    is_integer = is_strided(value) and value.dtype in INTEGER_DTYPES
    if not is_integer or value.ndim not in ndims:
        axes = " or ".join(map(str, ndims))
        raise ValueError(f"{name} must be an integer tensor of {axes} axes, got {describe(value)}")
    return value


def sequence_ids(name: str, offsets: Tensor) -> Tensor:
    """The number of the sequence of each packed token, int64 [tokens], from begins of sequences and
    the end of the last: they start at 0 and never decrease."""
    check_values(name, check_integers(name, offsets, 1))
    numbers = offsets.tolist()
    if len(numbers) < 2 or numbers[0] != 0 or sorted(numbers) != numbers:
        raise ValueError(f"{name} must hold 0 and ends that never decrease, got {numbers}")
    sequences = torch.arange(len(offsets) - 1, device=offsets.device)
    return sequences.repeat_interleave(offsets.diff().long())
