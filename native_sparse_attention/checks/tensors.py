"""Checks of tensors and of settings that depend on each other. Every message names the argument,
the expected value and the given value. `scalars.py` checks single values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import blocks
from ..compat.graphs import is_exporting
from .scalars import (
    TOO_LARGE,
    TOO_MANY_BLOCKS,
    as_int,
    check_bool,
    check_bools,
    check_choice,
    check_int,
    check_ints,
    check_mask_value,
    check_positive,
    check_scale,
    shown,
)

__all__ = [
    "BACKENDS", "BRANCHES", "BRANCH_KV", "FLOAT_DTYPES", "IMPORTANCE_RULES", "INDEX_DTYPES",
    "INTEGER_DTYPES",
    "check_any_offset", "check_bool", "check_bools", "check_branches", "check_broadcasts",
    "check_choice", "check_devices", "check_documents", "check_first_group",
    "check_forced_blocks", "check_given", "check_groups", "check_int", "check_ints",
    "check_leaders", "check_mask", "check_mask_value", "check_memory", "check_offset",
    "check_positive", "check_same", "check_scale", "check_selection", "check_shapes",
    "check_tensor", "check_windows", "default_seq_len", "mask_hint", "shown",
]  # fmt: skip

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)
INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, *INDEX_DTYPES)
BACKENDS = ("auto", "triton", "flex", "eager")
IMPORTANCE_RULES = ("logits", "probs", "max")
BRANCHES = ("compressed", "selected", "window")
BRANCH_KV = ("shared", "independent")


# axes that must not be empty: heads, heads of a group, and widths of keys and values
NEVER_EMPTY = "HKGDE"
HINT = "did you pass [B, H, T, D]? Tensors are [B, T, H, D]: use .transpose(1, 2)"


def check_shapes(**tensors: tuple[Tensor | None, str]) -> dict[str, int]:
    """Check tensors against shapes in axis letters; returns the size of every letter.

    `check_shapes(q=(q, "B T H D"), k=(k, "B S K D"))` raises ValueError if q is not 4-dimensional,
    if k's width differs from q's, or if heads or width are 0. A digit is a fixed size. None is
    skipped.
    """
    sizes: dict[str, tuple[int, str]] = {}
    for name, (tensor, spec) in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"{name} must be a tensor of shape [{spec}], got {type(tensor).__name__}"
            )
        axes = spec.split()
        if tensor.ndim != len(axes):
            raise ValueError(f"{name} must have shape [{spec}], got {list(tensor.shape)}")
        for place, (axis, size) in enumerate(zip(axes, tensor.shape, strict=True)):
            if axis.isdigit():
                if size != int(axis):
                    raise ValueError(f"{name} must have shape [{spec}], got {list(tensor.shape)}")
                continue
            size_of_axis, owner = sizes.setdefault(axis, (size, name))
            if size != size_of_axis:
                first = tensors[owner][0]
                slip = place in (1, 2) and isinstance(first, Tensor) and first.ndim == 4
                swapped = isinstance(first, Tensor) and slip and first.shape[3 - place] == size
                hint = f". {HINT}" if swapped else ""
                raise ValueError(
                    f"{name} has {axis}={size} but {owner} has {axis}={size_of_axis}{hint}"
                )
            if axis in NEVER_EMPTY and size == 0:
                raise ValueError(
                    f"{name} must have {axis} of at least 1 in its shape [{spec}], "
                    f"got {list(tensor.shape)}"
                )
    return {axis: size for axis, (size, _) in sizes.items()}


def check_given(**tensors: Any) -> None:
    """Check that arguments are tensors."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            got = None if tensor is None else type(tensor).__name__
            raise ValueError(f"{name} must be a tensor, got {got}")


def check_devices(**tensors: Tensor) -> None:
    """Check that all tensors are on the device of the first."""
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.device != first.device:
            raise ValueError(f"{name} is on {tensor.device} but {first_name} is on {first.device}")


def check_same(**tensors: Tensor | None) -> None:
    """Check that tensors share a device and a floating dtype, with no sparse or nested layout."""
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first_name, first = next(iter(present.items()))
    if first.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"{first_name} must be float16, bfloat16, float32 or float64, got {first.dtype}"
        )
    check_devices(**present)
    for name, tensor in present.items():
        if tensor.dtype != first.dtype:
            raise ValueError(f"{name} is {tensor.dtype} but {first_name} is {first.dtype}")
        if tensor.layout != torch.strided:
            raise ValueError(f"{name} must be a dense tensor, got one of layout {tensor.layout}")


def check_tensor(
    name: str,
    tensor: Any,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    shape: tuple[int, ...] | None = None,
) -> None:
    """Check the dtype, the device and the shape of a tensor, or None."""
    if tensor is None:
        return
    fits = isinstance(tensor, Tensor) and tensor.dtype in dtypes and tensor.device == device
    if not fits or (shape is not None and tensor.shape != shape):
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        kind = {FLOAT_DTYPES: "floating", INTEGER_DTYPES: "integers"}.get(dtypes, kinds)
        shaped = "" if shape is None else f" of shape {list(shape)}"
        raise ValueError(f"{name} must be {kind}{shaped} on {device}, got {shown(tensor)}")


def check_groups(heads: int, kv_heads: int, tokens: tuple[int, int] | None = None) -> int:
    """Query heads per KV head. `tokens`, the numbers of queries and keys, help to detect axes in
    the wrong order."""
    if kv_heads < 1 or heads % kv_heads:
        slip = (
            tokens is not None and 0 < tokens[1] <= tokens[0] < heads and tokens[0] % tokens[1] == 0
        )
        raise ValueError(
            f"heads must be a multiple of kv_heads, got heads={heads} and kv_heads={kv_heads}"
            + (f". {HINT}" if slip else "")
        )
    return heads // kv_heads


def check_forced_blocks(s: int, num_initial_blocks: Any, num_local_blocks: Any) -> tuple[int, int]:
    """Check numbers of forced blocks of s tokens; token positions must fit into 32 bits."""
    below = TOO_LARGE // s + 1
    return (
        check_int("num_initial_blocks", num_initial_blocks, 0, below),
        check_int("num_local_blocks", num_local_blocks, 0, below),
    )


def check_selection(**settings: Any) -> dict[str, Any]:
    """Check the settings of the selection, each alone and together. Returns plain values by
    name."""
    sizes = ("compress_block_size", "compress_block_sliding_stride", "selection_block_size")
    l, d, s = check_ints(1, **{name: settings[name] for name in sizes})
    if l < d:
        raise ValueError(
            "compress_block_size must be at least compress_block_sliding_stride, so that every "
            f"token lies in a window, got {l} and {d}"
        )
    if s % d and d % s:
        raise ValueError(
            "selection_block_size and compress_block_sliding_stride must divide one another, "
            f"got {s} and {d}"
        )
    n = check_int("num_selected_blocks", settings["num_selected_blocks"], 0, TOO_MANY_BLOCKS)
    forced = check_forced_blocks(s, settings["num_initial_blocks"], settings["num_local_blocks"])
    importance = settings["importance"]
    check_choice("importance", importance, IMPORTANCE_RULES)
    flags = ("interpolated_importance_score", "query_heads_share_selected_kv")
    bools = check_bools(**{name: settings[name] for name in flags})
    if bools[0] and importance != "logits":
        raise ValueError(
            "interpolated_importance_score=True goes with importance='logits' only, "
            f"got importance={importance!r}"
        )
    stride = check_int("selection_stride", settings["selection_stride"], 1)
    if s % stride:
        raise ValueError(
            f"selection_stride must divide selection_block_size={s}, so that the tokens that share "
            f"a ranking share their own block, got {stride}"
        )
    names = (*sizes, "num_initial_blocks", "num_local_blocks", *flags)
    values = dict(zip(names, (l, d, s, *forced, *bools), strict=True))
    return settings | values | dict(num_selected_blocks=n, selection_stride=stride)


def check_branches(branches: Any) -> tuple[str, ...]:
    """The branches of a layer, in the order of `BRANCHES`."""
    requested = branches if isinstance(branches, (tuple, list)) else ()
    names = tuple(name for name in BRANCHES if name in requested)
    if not requested or len(names) != len(requested):
        raise ValueError(
            f"branches must be some of {', '.join(map(repr, BRANCHES))}, each once, "
            f"got {shown(branches)}"
        )
    return names


def check_memory(mem_k: Tensor | None, mem_v: Tensor | None) -> None:
    if (mem_k is None) != (mem_v is None):
        name, partner = ("mem_k", "mem_v") if mem_v is None else ("mem_v", "mem_k")
        raise ValueError(f"mem_k and mem_v go together: {name} was given, {partner} was not")


def check_leaders(
    leader_indices: Any, dims: dict[str, int], n: int, shared: bool, device: torch.device
) -> None:
    shape = (dims["B"], dims["K" if shared else "H"], n)
    check_tensor("leader_indices", leader_indices, (torch.int32,), device, shape)


def check_first_group(
    q_offset: int | Tensor, selection_stride: int, leader_indices: Tensor | None
) -> None:
    if isinstance(q_offset, int) and q_offset % selection_stride and leader_indices is None:
        raise ValueError(
            f"leader_indices must be given where q_offset={q_offset} is not a multiple of "
            f"selection_stride={selection_stride}: the first query's group was ranked before"
        )


def default_seq_len(seq_len: Any, T: int, q_offset: Any) -> int:
    """S if only the queries are given: they end the sequence."""
    if seq_len is not None:
        return check_int("seq_len", seq_len, 0)
    if q_offset is None or isinstance(q_offset, Tensor):
        return T
    return check_int("q_offset", q_offset, 0) + T


def check_any_offset(
    q_offset: Any, B: int, device: torch.device, minimum: int = -TOO_LARGE
) -> int | Tensor:
    """Check the absolute position of the first query: an int, or int64 [B], one per sequence.
    Contiguous, since kernels read offsets by address."""
    if isinstance(q_offset, Tensor) and q_offset.ndim > 0:
        check_tensor("q_offset", q_offset, INDEX_DTYPES, device, (B,))
        return q_offset.long().contiguous()
    if as_int(q_offset) is None:
        raise ValueError(f"q_offset must be an int or a tensor [{B}], got {shown(q_offset)}")
    return check_int("q_offset", q_offset, minimum)


def check_offset(
    q_offset: Any, dims: dict[str, int], S: int, causal: bool, device: torch.device
) -> int | Tensor:
    """Check the position of the first query among S tokens, by default that of the last T."""
    T = dims["T"]
    if q_offset is None:
        if T > S:
            slip = S > 0 and T % S == 0 and dims["H"] <= dims["K"]
            hint = f". {HINT}" if slip else ""
            raise ValueError(
                f"q has T={T} tokens but there are only S={S} keys: T must be at most S{hint}"
            )
        return S - T
    offset = check_any_offset(q_offset, dims["B"], device, 0)
    if isinstance(offset, Tensor):
        if not causal:
            raise ValueError("q_offset must be an int where causal=False, got a tensor")
        return offset
    if offset + T > S:
        raise ValueError(f"q_offset + T must be at most S={S}, got {offset} + {T}")
    return offset


def check_windows(
    W: int, S: int, d: int, *, causal: bool, q_offset: int | Tensor | None = None
) -> None:
    """Check that W is the number of windows of S tokens. Causally one incomplete window, which no
    query sees, may follow. With a causal `q_offset` S is unknown, since tokens may follow."""
    if causal and q_offset is not None:
        return
    if is_exporting():  # comparing symbolic lengths would fix them
        return
    least = blocks.num_windows(S, d, causal=causal)
    if least == W:
        return
    most = blocks.num_windows(S, d, causal=False)
    if not least <= W <= most:
        raise ValueError(
            f"ck must hold the {least} windows, {d} apart, of a sequence of S={S} tokens, got {W}. "
            "Where keys are not at hand, seq_len gives S"
        )


def check_documents(
    documents: Any, dims: dict[str, int], q_offset: int | Tensor, device: torch.device
) -> None:
    """Check bounds of documents: queries and keys must be the same tokens."""
    if documents is None:
        return
    for name in ("first", "last"):
        bound, shape = getattr(documents, name, 0), (dims["B"], dims["T"])
        check_tensor(f"documents.{name}", bound, (torch.int32,), device, shape)
    if isinstance(q_offset, Tensor) or q_offset or dims.get("S", dims["T"]) != dims["T"]:
        raise ValueError(
            f"documents need queries that are all tokens, got q_offset={q_offset}, "
            f"T={dims['T']} and S={dims.get('S')}"
        )


def mask_hint(mask: Any) -> str:
    """A suggestion for a mask of another dtype than bool."""
    if not isinstance(mask, Tensor) or mask.dtype == torch.bool:
        return ""
    if mask.is_floating_point():
        return ". True is seen: of an additive mask give mask > -1"
    return ". True is seen: give mask.bool()"


def check_mask(name: str, mask: Any, device: torch.device, **axes: int) -> None:
    """Check for a bool tensor that broadcasts to the axes, or None."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.device != device:
        raise ValueError(
            f"{name} must be a bool tensor on {device}, got {shown(mask)}{mask_hint(mask)}"
        )
    check_broadcasts(name, mask, **axes)


def check_broadcasts(name: str, tensor: Tensor, **axes: int) -> None:
    """Check that a tensor broadcasts to exactly the axes."""
    wanted = list(axes.values())
    pairs = zip(reversed(tensor.shape), reversed(wanted), strict=False)
    if tensor.ndim > len(wanted) or any(have not in (1, want) for have, want in pairs):
        raise ValueError(
            f"{name} must broadcast to [{' '.join(axes)}] = {wanted}, got {list(tensor.shape)}"
        )
