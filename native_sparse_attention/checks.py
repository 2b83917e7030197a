"""Checks of arguments, at the public edge. Each raises a ValueError that names the argument, what
was expected and what came. Those of single values return the plain Python value."""

from __future__ import annotations

import difflib
import math
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from numbers import Real
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from . import blocks
from .compat import is_exporting

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)
INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, *INDEX_DTYPES)
BACKENDS = ("auto", "triton", "flex", "eager")
IMPORTANCE_RULES = ("logits", "probs", "max", "head_max")
BRANCHES = ("compressed", "selected", "window")
BRANCH_KV = ("shared", "independent")

# Integers must be below this, so that the sum of two fits into 32 bits.
TOO_LARGE = 2**30
# Limit of sequences and pages of a cache, since Python lists count them.
TOO_MANY = 2**24
# Limit of slots per query in block indices: with 64 tokens per block they cover 4 million tokens.
TOO_MANY_BLOCKS = 2**16
# The least normal float32: a division by less gives inf, and then NaN.
LEAST_NORMAL = torch.finfo(torch.float32).tiny
LARGEST = torch.finfo(torch.float32).max

# axes that must not be empty: heads, heads of a group, and widths of keys and values
NEVER_EMPTY = "HKGDE"
HINT = "did you pass [B, H, T, D]? Tensors are [B, T, H, D]: use .transpose(1, 2)"


def is_strided(value: Any) -> TypeGuard[Tensor]:
    """Whether a value is a tensor, neither sparse nor nested."""
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested


def describe(value: Any) -> str:
    """A value in one line, for messages."""
    if isinstance(value, Tensor) and not is_strided(value):
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        return f"a {kind} tensor"
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {list(value.shape)} on {value.device}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{type(value).__name__} {text[:60]}..."


def refusal(name: str, expected: str, value: Any = None, *, got: str = "") -> ValueError:
    """The error of an argument: its name, what was expected, and the value or what `got` tells."""
    return ValueError(f"{name} must be {expected}, got {got or describe(value)}")


class UnexpectedKeyword(ValueError, TypeError):
    """An unknown keyword: a TypeError as in Python, and a ValueError as for other arguments."""


def check_keywords(keywords: Iterable[str], accepted: Iterable[str]) -> None:
    """Raise `UnexpectedKeyword` for the first unknown keyword, with a suggestion."""
    names = list(accepted)
    for name in keywords:
        if name not in names:
            similar = difflib.get_close_matches(str(name), names, n=1)
            hint = f": did you mean {similar[0]}?" if similar else ""
            raise UnexpectedKeyword(f"got an unexpected keyword argument {name!r}{hint}")


def check_type(
    name: str, value: Any, kind: type | tuple[type, ...], expected: str, or_none: bool = False
) -> None:
    if not (isinstance(value, kind) or (or_none and value is None)):
        raise refusal(name, expected + " or None" * or_none, value)


def check_generator(generator: Any) -> None:
    check_type("generator", generator, torch.Generator, "a torch.Generator", or_none=True)


def check_callable(name: str, function: Any, signature: str, required: bool = False) -> None:
    if (function is not None or required) and not callable(function):
        expected = f"a function of {signature}" + ("" if required else " or None")
        raise refusal(name, expected, function)


def check_block_mask(name: str, mask: Any, maker: str) -> None:
    from torch.nn.attention.flex_attention import BlockMask  # loads sympy, so not at import

    check_type(name, mask, BlockMask, f"a BlockMask, as {maker} makes it")


def check_device(name: str, device: Any) -> torch.device:
    """Check a device, its name, or the number of a GPU."""
    try:
        return torch.device(f"cuda:{device}" if type(device) is int else device)
    except (RuntimeError, TypeError) as error:
        raise refusal(name, "a torch.device or the name of one", device) from error


def is_usable(device: Any) -> bool:
    """Whether tensors with values can be on a device here."""
    try:
        torch.zeros(1, device=device).item()  # meta has no values
    except (AssertionError, ImportError, RuntimeError):
        return False
    return True


def check_choice(name: str, value: Any, choices: tuple[Any, ...] | Mapping[str, Any]) -> None:
    if not isinstance(value, (str, bool, torch.dtype)) or value not in choices:
        raise refusal(name, f"one of {', '.join(map(repr, choices))}", value)


def check_bool(name: str, value: Any) -> bool:
    """True or False, numpy's too; neither 1 nor "False"."""
    if value is True or value is False:
        return value
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise refusal(name, "True or False", value)


def check_bools(**values: Any) -> tuple[bool, ...]:
    return tuple(check_bool(name, value) for name, value in values.items())


def as_int(value: Any) -> Any:
    """A value of any integral type as an integer; None for other values, booleans and vectors
    included. A symbolic integer stays symbolic."""
    if type(value) is int or isinstance(value, torch.SymInt):
        return value
    is_other = isinstance(value, Tensor) and (value.ndim > 0 or value.dtype == torch.bool)
    try:
        return None if is_other or isinstance(value, bool) else operator.index(value)
    except (TypeError, RuntimeError):
        return None


def check_int(name: str, value: Any, minimum: int, limit: int = TOO_LARGE) -> int:
    """Check an integer of any integral type, bools excluded: `minimum <= value < limit`. A symbolic
    integer is not compared, since that would add a guard to the graph."""
    number = as_int(value)
    if number is None or not (isinstance(number, torch.SymInt) or minimum <= number < limit):
        end = f" and below {limit}" if number is not None and number >= limit else ""
        raise refusal(name, f"an integer of at least {minimum}{end}", value)
    return number


def check_ints(minimum: int, **values: Any) -> tuple[int, ...]:
    return tuple(check_int(name, value, minimum) for name, value in values.items())


def check_layers(name: str, layers: Any, count: int) -> list[int]:
    """Indices of `count` layers, in order and counted from 0."""
    if not isinstance(layers, Sequence) or isinstance(layers, (str, bytes)):
        raise refusal(name, "a list of indices of layers", layers)
    return sorted({check_int(name, index, -count, count) % count for index in layers})


def check_ranks(config: Any) -> Any:
    """The settings of the layers of a model, whose forward takes no block indices."""
    if config.takes_blocks:
        raise refusal("importance", "a rule by which the layers of a model rank", config.importance)
    return config


def check_share_ranking(layers: Any, selecting: Sequence[int], count: int) -> dict[int, int]:
    """Of the `selecting` ones of `count` layers those that give block indices to others or take
    them, each with the one that ranks, of `layers`. None: each ranks for itself."""
    if layers is None:
        return {}
    ranking = check_layers("share_ranking", layers, count)
    if not selecting or ranking[:1] != [*selecting[:1]] or not {*selecting}.issuperset(ranking):
        first = f"begin with layer {selecting[0]}" if selecting else "be None"
        expected = f"{first} and leave out layers that select no blocks"
        raise ValueError(f"share_ranking must {expected}, got {ranking}")
    sources = {i: max(r for r in ranking if r <= i) for i in selecting}
    shared = {r for i, r in sources.items() if i != r}
    return {i: r for i, r in sources.items() if r in shared}


def check_number(
    name: str, value: Any, expected: str = "a finite number", minimum: float = -LARGEST,
    maximum: float = LARGEST,
) -> float:  # fmt: skip
    """Check a real number: `minimum <= value <= maximum`."""
    try:
        is_real = isinstance(value, Real) and not isinstance(value, bool)
        number = float(value) if is_real else math.nan
    except OverflowError:
        number = math.nan
    if not minimum <= number <= maximum:
        raise refusal(name, expected, value)
    return number


def check_factor(name: str, value: Any) -> float:
    return check_number(name, value, "a finite number above 0", math.ulp(0.0), sys.float_info.max)


def check_positive(name: str, value: Any) -> float | None:
    """Check a number above 0 that can divide a float32, or None."""
    # written out: dynamo may make a module's float symbolic, and formats no such number
    expected = "a number of at least 1.2e-38 or None"
    return None if value is None else check_number(name, value, expected, LEAST_NORMAL)


def check_scale(scale: Any) -> float | None:
    return None if scale is None else check_number("scale", scale)


def check_mask_value(mask_value: Any, dtype: torch.dtype) -> float:
    """Check a number other than NaN and inf; -inf if the dtype of the logits rounds it to
    -inf."""
    limits = torch.finfo(torch.promote_types(dtype, torch.float32))
    expected = f"a number up to {limits.max:.1e}"
    number = check_number("mask_value", mask_value, expected, -math.inf, limits.max)
    return number if number >= limits.min else -math.inf


def check_hidden(name: str, factor: Any, width: int) -> int:
    """`int(width * factor)`, the hidden width of a network, at least 1."""
    expected = f"a number that leaves at least one hidden unit of {width}"
    return max(1, int(width * check_number(name, factor, expected, 1 / width, TOO_LARGE)))


def check_input(inp: Any, dim: int, linear: Any, name: str = "inp") -> None:
    """Check an input [b, n, dim] of the dtype of the layer's weights. Weights of a wrapper that
    shards or casts them are not compared."""
    if not is_strided(inp) or inp.dtype not in FLOAT_DTYPES:
        raise refusal(name, "a tensor of floating dtype", inp)
    if inp.ndim != 3 or inp.shape[-1] != dim:
        raise ValueError(f"{name} must have shape [b, n, {dim}], got {list(inp.shape)}")
    weight = getattr(linear, "weight", None)
    if type(weight) is not nn.Parameter or linear._forward_pre_hooks:
        return
    check_values(name, inp, weight)
    is_other = inp.dtype != weight.dtype and weight.dtype in FLOAT_DTYPES
    if is_other and not torch.is_autocast_enabled(inp.device.type):
        raise ValueError(
            f"{name} must be {weight.dtype} as the layer is, got {inp.dtype}: cast one of the two, "
            "or use torch.autocast"
        )


def check_values(name: str, tensor: Tensor, weight: Any = None) -> None:
    """Refuse a tensor on meta, unless the weights are there too: torch embeds ids without values as
    memory that nothing has written."""
    if tensor.device.type == "meta" and (weight is None or weight.device.type != "meta"):
        raise refusal(name, "a tensor with values", tensor)


def check_ids(name: str, ids: Any, embedding: nn.Module) -> Tensor:
    """Check ids [b, n] of any integral dtype and return them as int64. The host compares ids on the
    CPU with the vocabulary; on a GPU a bad id is a device-side assert."""
    if not is_strided(ids) or ids.dtype not in INTEGER_DTYPES:
        hint = f": give {name}.long()" if isinstance(ids, Tensor) else ""
        hint = f": give torch.tensor({name})" if isinstance(ids, (list, tuple)) else hint
        got = f"{describe(ids)}{hint}"
        raise refusal(name, "a tensor of integers of shape [b, n]", got=got)
    if ids.ndim != 2:
        raise ValueError(f"{name} must have shape [b, n], got {list(ids.shape)}")
    check_values(name, ids, getattr(embedding, "weight", ids))
    ids, size = ids.long(), getattr(embedding, "num_embeddings", None)
    is_on_host = type(ids) is Tensor and ids.device.type == "cpu"
    if size is None or not is_on_host or torch.compiler.is_compiling() or ids.numel() == 0:
        return ids
    smallest, largest = (int(t) for t in ids.aminmax())
    if smallest < 0 or largest >= size:
        wrong = smallest if smallest < 0 else largest
        raise refusal(name, f"token ids from 0 to {size - 1}", wrong)
    return ids


def copied(network: Any) -> Any:
    """A deep copy. Copies of fake tensors keep their mode; deepcopy alone would copy the mode."""
    tensors = network.parameters() if isinstance(network, nn.Module) else ()
    modes = {id(mode): mode for t in tensors if (mode := getattr(t, "fake_mode", None)) is not None}
    return deepcopy(network, modes)


def check_shapes(**tensors: tuple[Tensor, str]) -> dict[str, int]:
    """Check tensors against shapes in axis letters; returns the size of every letter.

    `check_shapes(q=(q, "B T H D"), k=(k, "B S K D"))` raises ValueError if q is not 4-dimensional,
    if k's width differs from q's, or if heads or width are 0. A digit is a fixed size.
    """
    sizes: dict[str, tuple[int, str]] = {}
    for name, (tensor, spec) in tensors.items():
        if not is_strided(tensor):
            raise refusal(name, f"a tensor of shape [{spec}]", tensor)
        axes, shape = spec.split(), list(tensor.shape)
        pairs = list(zip(axes, shape, strict=False))
        if len(shape) != len(axes) or [n for axis, n in pairs if axis.isdigit() and n != int(axis)]:
            raise ValueError(f"{name} must have shape [{spec}], got {shape}")
        for index, (axis, size) in enumerate(pairs):
            expected, owner = sizes.setdefault(axis, (size, name))
            if size != expected:
                first = tensors[owner][0]
                is_swapped = index in (1, 2) and first.ndim == 4 and first.shape[3 - index] == size
                hint = f". {HINT}" if is_swapped else ""
                got = f"{name} has {axis}={size} but {owner} has {axis}={expected}{hint}"
                raise ValueError(got)
            if axis in NEVER_EMPTY and size == 0:
                raise ValueError(f"{name} must have {axis} of at least 1 in [{spec}], got {shape}")
    return {axis: size for axis, (size, _) in sizes.items()}


def check_given(**tensors: Any) -> None:
    for name, tensor in tensors.items():
        if not is_strided(tensor):
            raise refusal(name, "a tensor", tensor)


def check_same(**tensors: Tensor) -> None:
    """Check that tensors share a device and a floating dtype."""
    first_name, first = next(iter(tensors.items()))
    check_tensor(first_name, first, FLOAT_DTYPES, first.device)
    for name, tensor in tensors.items():
        if tensor.device != first.device:
            raise ValueError(f"{name} is on {tensor.device} but {first_name} is on {first.device}")
        if tensor.dtype != first.dtype:
            raise ValueError(f"{name} is {tensor.dtype} but {first_name} is {first.dtype}")


def check_tensor(
    name: str, tensor: Any, dtypes: tuple[torch.dtype, ...], device: torch.device,
    shape: tuple[int, ...] | None = None,
) -> None:  # fmt: skip
    """Check the dtype, the device and the shape of a tensor, or None."""
    if tensor is None:
        return
    fits = is_strided(tensor) and tensor.dtype in dtypes and tensor.device == device
    if not fits or (shape is not None and tensor.shape != shape):
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        kind = "integers" if dtypes == INTEGER_DTYPES else kinds
        shaped = "" if shape is None else f" of shape {list(shape)}"
        raise refusal(name, f"{kind}{shaped} on {device}", tensor)


def check_broadcasts(
    name: str, tensor: Any, dtypes: tuple[torch.dtype, ...], device: torch.device, **axes: int
) -> None:
    """Check a tensor that broadcasts to exactly the axes, or None."""
    check_tensor(name, tensor, dtypes, device)
    if tensor is None:
        return
    sizes = list(axes.values())
    pairs = zip(reversed(tensor.shape), reversed(sizes), strict=False)
    if tensor.ndim > len(sizes) or any(size not in (1, axis) for size, axis in pairs):
        raise ValueError(
            f"{name} must broadcast to [{' '.join(axes)}] = {sizes}, got {list(tensor.shape)}"
        )


def check_bounds(
    shape: tuple[int, ...], device: torch.device, cu_seqlens: Any = None, segment_ids: Any = None,
    mask: Any = None,
) -> None:  # fmt: skip
    """Check what bounds the documents of rows [b t], or None; on their device or on the CPU."""
    if cu_seqlens is not None and (segment_ids is not None or mask is not None):
        name = "mask" if segment_ids is None else "segment_ids"
        raise ValueError(f"cu_seqlens and {name} are two ways to name documents: give one")
    for name, value, dtypes, rows in (
        ("cu_seqlens", cu_seqlens, INDEX_DTYPES, None),
        ("mask", mask, (torch.bool,), shape),
        ("segment_ids", segment_ids, INDEX_DTYPES, shape),
    ):
        is_on_host = isinstance(value, Tensor) and value.device.type == "cpu"
        check_tensor(name, value, dtypes, torch.device("cpu") if is_on_host else device, rows)
    if cu_seqlens is not None and (cu_seqlens.ndim != 1 or len(cu_seqlens) == 0):
        raise refusal("cu_seqlens", "a tensor [documents + 1]", cu_seqlens)
    if cu_seqlens is not None and shape[0] != 1:
        raise ValueError(
            f"cu_seqlens needs one row of packed documents, got a batch of {shape[0]}: give "
            "segment_ids for several rows"
        )


def check_documents(
    documents: Any, shape: tuple[int, ...], q_offset: int | Tensor, device: torch.device
) -> None:
    """Check `varlen.Documents` of queries [b p] at positions from `q_offset` on; or None."""
    if documents is None:
        return
    if not (hasattr(documents, "first") and hasattr(documents, "last")):
        raise refusal("documents", "varlen.Documents", documents)
    for name, t in (("documents.first", documents.first), ("documents.last", documents.last)):
        check_given(**{name: t})
        check_tensor(name, t, INDEX_DTYPES, device, shape)
    if isinstance(q_offset, Tensor):
        raise refusal("q_offset", "an integer with documents", q_offset)


def check_rows(
    inp: Tensor, cached: bool, lengths: Any, documents: Any = None, **bounds: Any
) -> None:
    """Check what a layer is told of its rows [b n ..]: documents or padding, or with a cache how
    many tokens are real."""
    shape, mask = inp.shape[:2], bounds.get("mask")
    names = [name for name, t in {**bounds, "documents": documents}.items() if t is not None]
    check_documents(documents, shape, 0, inp.device)
    if cached and names and names != ["mask"]:
        raise ValueError(f"{names[0]} must be None with a cache, whose rows hold one document each")
    if mask is not None and lengths is not None:
        raise ValueError("mask and lengths are two ways to name padding: give one")
    if documents is not None and len(names) > 1:
        raise ValueError(f"documents and {names[0]} are two ways to name documents: give one")
    check_bounds(shape, inp.device, **bounds)
    if lengths is not None and torch.compiler.is_compiling():
        rows = torch.as_tensor(lengths)
        check_tensor("lengths", rows, INTEGER_DTYPES, rows.device, shape[:1])


def check_block_indices(
    inp: Tensor, block_indices: Any, returns: bool, is_cached: bool, config: Any
) -> None:
    """Check block indices of the caller for a layer's input [b n ..], and what is asked for."""
    if block_indices is None and not returns:
        return
    if "selected" not in config.branches:
        name = "return_block_indices" if block_indices is None else "block_indices"
        raise ValueError(f"{name} goes with the selected branch, got branches={config.branches}")
    if block_indices is None:
        return
    check_tensor("block_indices", block_indices, INDEX_DTYPES, inp.device)
    heads = sorted({1, config.kv_heads, config.heads})
    shape = block_indices.shape
    if len(shape) != 4 or shape[:2] != inp.shape[:2] or shape[2] not in heads:
        expected = f"[{inp.shape[0]}, {inp.shape[1]}, one of {heads}, slots]"
        raise ValueError(f"block_indices must have shape {expected}, got {list(shape)}")
    if config.use_diff_topk:
        raise ValueError("block_indices must be None with use_diff_topk=True, which needs scores")
    if is_cached and config.ranks and config.leader_stride > 1:
        raise ValueError(
            "block_indices over a cache need selection_stride=1 and num_selected_groups=0, or "
            "importance='given': the cache keeps rankings of the layer's own"
        )


def check_groups(heads: int, kv_heads: int, tokens: tuple[int, int] | None = None) -> int:
    """Query heads per KV head. `tokens`, the numbers of queries and keys, help to detect axes in
    the wrong order."""
    if kv_heads < 1 or heads % kv_heads:
        T, S = tokens or (0, 0)
        hint = f". {HINT}" if 0 < S <= T < heads and T % S == 0 else ""
        raise ValueError(
            f"heads must be a multiple of kv_heads, got heads={heads} and kv_heads={kv_heads}{hint}"
        )
    return heads // kv_heads


def check_branches(branches: Any) -> tuple[str, ...]:
    """The branches of a layer, in the order of `BRANCHES`."""
    requested = branches if isinstance(branches, (tuple, list)) else ()
    names = tuple(name for name in BRANCHES if name in requested)
    if not requested or len(names) != len(requested):
        expected = f"some of {', '.join(map(repr, BRANCHES))}, each once"
        raise refusal("branches", expected, branches)
    return names


def check_any_offset(
    q_offset: Any, B: int, device: torch.device, minimum: int = -TOO_LARGE
) -> int | Tensor:
    """Check the absolute position of the first query: an int, or int64 [B], one per sequence.
    Contiguous, since kernels read offsets by address."""
    if isinstance(q_offset, Tensor) and q_offset.ndim > 0:
        check_tensor("q_offset", q_offset, INDEX_DTYPES, device, (B,))
        return q_offset.long().contiguous()
    if as_int(q_offset) is None:
        raise refusal("q_offset", f"an int or a tensor [{B}]", q_offset)
    return check_int("q_offset", q_offset, minimum)


def check_offset(
    q_offset: Any, dims: dict[str, int], S: int, causal: bool, device: torch.device
) -> int | Tensor:
    """Check the position of the first query among S tokens, by default that of the last T."""
    T = dims["T"]
    if q_offset is None:
        if T > S:
            hint = f". {HINT}" if S > 0 and T % S == 0 and dims["H"] <= dims["K"] else ""
            raise ValueError(
                f"q has T={T} tokens but there are only S={S} keys: T must be at most S{hint}"
            )
        return S - T
    offset = check_any_offset(q_offset, dims["B"], device, 0)
    if isinstance(offset, Tensor):
        if not causal:
            raise ValueError("q_offset must be an int where causal=False, got a tensor")
    elif offset + T > S:
        raise ValueError(f"q_offset + T must be at most S={S}, got {offset} + {T}")
    return offset


def check_windows(
    W: int, S: int, d: int, *, causal: bool, q_offset: int | Tensor | None = None
) -> None:
    """Check that W is the number of windows of S tokens. Causally one incomplete window, which no
    query sees, may follow. With a causal `q_offset` S is unknown, since tokens may follow."""
    # under torch.export, comparing symbolic lengths would fix them
    if (causal and q_offset is not None) or is_exporting():
        return
    complete = blocks.num_windows(S, d, causal=causal)
    if complete != W and not complete <= W <= blocks.num_windows(S, d, causal=False):
        raise ValueError(
            f"ck must hold the {complete} windows, {d} apart, of a sequence of S={S} tokens, got "
            f"{W}. Where keys are not at hand, seq_len gives S"
        )
