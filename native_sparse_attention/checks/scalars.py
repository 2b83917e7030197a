"""Checks of arguments other than tensors: booleans, integers, numbers and names. Each returns the
plain Python value. Every message names the argument, the expected value and the given value."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

# Integers must be below this, so that the sum of two fits into 32 bits.
TOO_LARGE = 2**30
# Limit of sequences and pages of a cache, since Python lists count them.
TOO_MANY = 2**24
# Limit of slots per query in block indices: with 64 tokens per block they cover 4 million tokens.
TOO_MANY_BLOCKS = 2**16
# The least normal float32: a division by less gives inf, and then NaN.
LEAST_NORMAL = torch.finfo(torch.float32).tiny
LARGEST = torch.finfo(torch.float32).max


def shown(value: Any) -> str:
    """A value in one line, for messages."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {list(value.shape)} on {value.device}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{type(value).__name__} {text[:60]}..."


def check_bool(name: str, value: Any) -> bool:
    """True or False, numpy's too; neither 1 nor "False"."""
    if value is True or value is False:
        return value
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise ValueError(f"{name} must be True or False, got {shown(value)}")


def check_bools(**values: Any) -> tuple[bool, ...]:
    return tuple(check_bool(name, value) for name, value in values.items())


def as_int(value: Any) -> Any:
    """A value of any integral type as an integer; None for other values, booleans included. A
    symbolic integer stays symbolic."""
    if type(value) is int or isinstance(value, torch.SymInt):
        return value
    if isinstance(value, (bool, float)) or type(value).__name__ == "bool_":
        return None
    if isinstance(value, Tensor) and (value.ndim > 0 or value.dtype == torch.bool):
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):
        return None


def check_int(name: str, value: Any, minimum: int, below: int = TOO_LARGE) -> int:
    """Check an integer of any integral type, bools excluded: `minimum <= value < below`. A symbolic
    integer is not compared, since that would add a guard to the graph."""
    number = as_int(value)
    if isinstance(value, torch.SymInt):
        return number
    if number is None or not minimum <= number < below:
        limit = f" and below {below}" if number is not None and number >= below else ""
        raise ValueError(
            f"{name} must be an integer of at least {minimum}{limit}, got {shown(value)}"
        )
    return number


def check_ints(minimum: int, **values: Any) -> tuple[int, ...]:
    return tuple(check_int(name, value, minimum) for name, value in values.items())


def check_layers(name: str, layers: Any, count: int) -> list[int]:
    """Indices of `count` layers, in order and counted from 0."""
    if not isinstance(layers, Sequence) or isinstance(layers, str):
        raise ValueError(f"{name} must be a list of indices of layers, got {shown(layers)}")
    return sorted({check_int(name, index, -count, below=count) % count for index in layers})


def check_choice(name: str, value: Any, choices: tuple[Any, ...] | Mapping[str, Any]) -> None:
    if not isinstance(value, (str, bool)) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def as_float(value: Any) -> float:
    """A real number as a float; NaN for anything else."""
    if type(value) is float:
        return value
    if isinstance(value, (bool, Tensor)) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]


def check_number(name: str, value: Any, expected: str, least: float, most: float) -> float:
    """Check a real number: `least <= value <= most`."""
    number = as_float(value)
    if not least <= number <= most:
        raise ValueError(f"{name} must be {expected}, got {shown(value)}")
    return number


def check_factor(name: str, value: Any) -> float:
    """Check a finite number above 0."""
    return check_number(name, value, "a finite number above 0", math.ulp(0.0), sys.float_info.max)


def check_positive(name: str, value: Any) -> float | None:
    """Check a number above 0 that can divide a float32, or None."""
    if value is None:
        return None
    expected = f"a number of at least {LEAST_NORMAL:.2g} or None"
    return check_number(name, value, expected, LEAST_NORMAL, LARGEST)


def check_finite(name: str, value: Any) -> float:
    return check_number(name, value, "a finite number", -LARGEST, LARGEST)


def check_scale(scale: Any) -> float | None:
    """Check a finite number, or None."""
    return None if scale is None else check_finite("scale", scale)


def check_probability(name: str, value: Any) -> float:
    return check_number(name, value, "a probability, in [0, 1]", 0.0, 1.0)


def check_mask_value(mask_value: Any, dtype: torch.dtype) -> float:
    """Check a number other than NaN and inf; -inf if the dtype of the logits rounds it to
    -inf."""
    number = check_number(
        "mask_value", mask_value, "a number below inf", -math.inf, sys.float_info.max
    )
    least = torch.finfo(torch.promote_types(dtype, torch.float32)).min
    return number if number >= least else -math.inf


def check_device(name: str, device: Any) -> torch.device:
    """Check a device, its name, or the number of a GPU."""
    if isinstance(device, torch.device):
        return device
    if isinstance(device, str) or (type(device) is int and 0 <= device < 128):
        try:
            return torch.device(device if isinstance(device, str) else f"cuda:{device}")
        except RuntimeError:
            pass
    raise ValueError(f"{name} must be a torch.device or the name of one, got {shown(device)}")


def check_callable(name: str, function: Any, signature: str, required: bool = False) -> None:
    if (function is not None or required) and not callable(function):
        wanted = f"a function of {signature}" + ("" if required else " or None")
        raise ValueError(f"{name} must be {wanted}, got {shown(function)}")


def check_hidden(name: str, factor: Any, width: int) -> int:
    """`int(width * factor)`, the hidden width of a network, at least 1."""
    hidden = int(min(width * check_factor(name, factor), float(2**62)))
    if hidden < 1:
        raise ValueError(
            f"{name} must leave at least one hidden unit of {width}, got {shown(factor)}"
        )
    return hidden
