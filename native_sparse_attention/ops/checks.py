"""Checks of what a user hands in. Every message names the argument, what was expected, what
came."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import blocks

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BACKENDS = ("auto", "triton", "flex", "eager")
IMPORTANCE_RULES = ("logits", "probs")
BRANCH_KV = ("shared", "independent")


def check_shapes(**tensors: tuple[Tensor | None, str]) -> dict[str, int]:
    """Hold tensors to shapes written in axis letters; returns the size of every letter.

    `check_shapes(q=(q, "B T H D"), k=(k, "B S K D"))` raises ValueError if q is not 4-dimensional
    or if k's width differs from q's. A number stands for itself; a tensor of None is passed over.
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
        for axis, size in zip(axes, tensor.shape, strict=True):
            if axis.isdigit():
                if size != int(axis):
                    raise ValueError(f"{name} must have shape [{spec}], got {list(tensor.shape)}")
                continue
            known, owner = sizes.setdefault(axis, (size, name))
            if size != known:
                raise ValueError(f"{name} has {axis}={size} but {owner} has {axis}={known}")
    return {axis: size for axis, (size, _) in sizes.items()}


def check_given(**tensors: Any) -> None:
    """Tensors, where nothing else has a meaning."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            got = None if tensor is None else type(tensor).__name__
            raise ValueError(f"{name} must be a tensor, got {got}")


def check_same(**tensors: Tensor | None) -> None:
    """One device and one floating dtype for all."""
    first_name, first = next((n, t) for n, t in tensors.items() if t is not None)
    if first.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"{first_name} must be float16, bfloat16, float32 or float64, got {first.dtype}"
        )
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.device != first.device:
            raise ValueError(f"{name} is on {tensor.device} but {first_name} is on {first.device}")
        if tensor.dtype != first.dtype:
            raise ValueError(f"{name} is {tensor.dtype} but {first_name} is {first.dtype}")


def check_int(name: str, value: Any, minimum: int) -> int:
    """An integer of at least `minimum`, of any integral type (bools are not integers here)."""
    number = value
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        kinds = bool, Tensor  # which have an index, and are not integers here
        try:
            number = None if isinstance(value, kinds) else operator.index(value)
        except TypeError:
            number = None
    if number is None or number < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, got {value!r}")
    return number


def check_ints(minimum: int, **values: Any) -> None:
    for name, value in values.items():
        check_int(name, value, minimum)


def check_choice(name: str, value: Any, choices: tuple[Any, ...] | Mapping[str, Any]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_groups(heads: int, kv_heads: int) -> int:
    """Query heads per KV head."""
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"heads must be a multiple of kv_heads, got heads={heads} and kv_heads={kv_heads}"
        )
    return heads // kv_heads


def check_blocks(l: int, d: int, s: int) -> None:
    """Windows tile the sequence, and windows and selection blocks are aligned to each other."""
    check_ints(1, compress_block_size=l, compress_block_sliding_stride=d, selection_block_size=s)
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


def check_selection(
    *,
    l: int,
    d: int,
    s: int,
    n: int,
    importance: str,
    interpolated: bool,
    num_initial_blocks: int,
    num_local_blocks: int,
    selection_stride: int,
) -> None:
    """The settings of the selection, each alone and with the others."""
    check_blocks(l, d, s)
    check_ints(
        0,
        num_selected_blocks=n,
        num_initial_blocks=num_initial_blocks,
        num_local_blocks=num_local_blocks,
    )
    check_choice("importance", importance, IMPORTANCE_RULES)
    if interpolated and importance != "logits":
        raise ValueError(
            "interpolated_importance_score=True goes with importance='logits' only, "
            f"got importance={importance!r}"
        )
    check_int("selection_stride", selection_stride, 1)
    if s % selection_stride:
        raise ValueError(
            f"selection_stride must divide selection_block_size={s}, so that the tokens that share "
            f"a ranking share their own block, got {selection_stride}"
        )


def check_memory(mem_k: Tensor | None, mem_v: Tensor | None) -> None:
    if (mem_k is None) != (mem_v is None):
        given, missing = ("mem_k", "mem_v") if mem_v is None else ("mem_v", "mem_k")
        raise ValueError(f"mem_k and mem_v go together: {given} was given, {missing} was not")


def check_leaders(
    leader_indices: Tensor | None, dims: dict[str, int], n: int, shared: bool
) -> None:
    if leader_indices is None:
        return
    shape = [dims["B"], dims["K" if shared else "H"], n]
    if list(leader_indices.shape) != shape or leader_indices.dtype != torch.int32:
        raise ValueError(
            f"leader_indices must be int32 of shape {shape}, "
            f"got {leader_indices.dtype} of shape {list(leader_indices.shape)}"
        )


def check_first_group(
    q_offset: int | Tensor, selection_stride: int, leader_indices: Tensor | None
) -> None:
    if isinstance(q_offset, int) and q_offset % selection_stride and leader_indices is None:
        raise ValueError(
            f"leader_indices must be given where q_offset={q_offset} is not a multiple of "
            f"selection_stride={selection_stride}: the first query's group was ranked before"
        )


def default_seq_len(seq_len: int | None, T: int, q_offset: int | Tensor | None) -> int:
    """S where only the queries are at hand: they end the sequence."""
    if seq_len is not None:
        return check_int("seq_len", seq_len, 0)
    return q_offset + T if isinstance(q_offset, int) else T


def check_offset(
    q_offset: int | Tensor | None, T: int, S: int, B: int, causal: bool
) -> int | Tensor:
    """Absolute position of the first query, one for all rows or one a row; by default the queries
    are the last T of the S tokens. Returned as an int, or as an int64 tensor [B]."""
    if q_offset is None:
        q_offset = S - T
        if q_offset < 0:
            raise ValueError(
                f"q has T={T} tokens but there are only S={S} keys: T must be at most S"
            )
        return q_offset
    if isinstance(q_offset, Tensor):
        if not causal:
            raise ValueError("q_offset must be an int where causal=False, got a tensor")
        if q_offset.shape != (B,) or q_offset.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"q_offset must be an int or an integer tensor of shape [{B}], "
                f"got {q_offset.dtype} of shape {list(q_offset.shape)}"
            )
        return q_offset.long()
    check_int("q_offset", q_offset, 0)
    if q_offset + T > S:
        raise ValueError(f"q_offset + T must be at most S={S}, got {q_offset} + {T}")
    return q_offset


def check_windows(
    W: int, S: int, d: int, *, causal: bool, q_offset: int | Tensor | None = None
) -> None:
    """As many windows as S tokens have; causally an unfinished one, which nobody sees, may follow.
    With a `q_offset` the last query need not end the sequence: causally nothing is known of S."""
    if causal and q_offset is not None:
        return
    if torch.compiler.is_exporting():  # lengths are symbols, which nothing may be asked of
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


def check_sinks(sinks: Any, shape: tuple[int, ...], device: torch.device) -> None:
    if sinks is None:
        return
    fits = isinstance(sinks, Tensor) and sinks.shape == shape and sinks.dtype in FLOAT_DTYPES
    if not fits or sinks.device != device:
        got = type(sinks).__name__
        if isinstance(sinks, Tensor):
            got = f"{sinks.dtype} of shape {list(sinks.shape)} on {sinks.device}"
        raise ValueError(f"sinks must be floating, of shape {list(shape)} on {device}, got {got}")


def check_documents(documents: Any, dims: dict[str, int], q_offset: int | Tensor) -> None:
    """Bounds of documents, of rows whose queries and keys are the same tokens."""
    if documents is None:
        return
    shape = (dims["B"], dims["T"])
    for name in ("first", "last"):
        t = getattr(documents, name, None)
        if not isinstance(t, Tensor) or t.shape != shape or t.dtype != torch.int32:
            got = type(t).__name__
            if isinstance(t, Tensor):
                got = f"{t.dtype} of shape {list(t.shape)}"
            raise ValueError(f"documents.{name} must be int32 of shape {list(shape)}, got {got}")
    if isinstance(q_offset, Tensor) or q_offset or dims.get("S", dims["T"]) != dims["T"]:
        raise ValueError(
            f"documents need queries that are all tokens, got q_offset={q_offset}, "
            f"T={dims['T']} and S={dims.get('S')}"
        )


def check_input(inp: Tensor, dim: int) -> None:
    if not isinstance(inp, Tensor) or inp.dtype not in FLOAT_DTYPES:
        got = inp.dtype if isinstance(inp, Tensor) else type(inp).__name__
        raise ValueError(f"inp must be a tensor of floating dtype, got {got}")
    if inp.ndim != 3 or inp.shape[-1] != dim:
        raise ValueError(f"inp must have shape [b, n, {dim}], got {list(inp.shape)}")


def check_positive(name: str, value: Any) -> None:
    """A number above 0, or None."""
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a number above 0 or None, got {value!r}")


def check_scale(scale: Any) -> None:
    """A finite number, or None."""
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if scale is not None and not (number and math.isfinite(scale)):
        raise ValueError(f"scale must be a finite number or None, got {scale!r}")


def check_mask(name: str, mask: Any, device: torch.device, **axes: int) -> None:
    """A bool tensor that broadcasts to the axes, or None."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.device != device:
        got = f"{mask.dtype} on {mask.device}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"{name} must be a bool tensor on {device}, got {got}")
    check_broadcasts(name, mask, **axes)


def check_broadcasts(name: str, tensor: Tensor, **axes: int) -> None:
    """A shape that broadcasts to the axes and no further."""
    wanted = list(axes.values())
    pairs = zip(reversed(tensor.shape), reversed(wanted), strict=False)
    if tensor.ndim > len(wanted) or any(have not in (1, want) for have, want in pairs):
        raise ValueError(
            f"{name} must broadcast to [{' '.join(axes)}] = {wanted}, got {list(tensor.shape)}"
        )


def check_mask_value(mask_value: Any, dtype: torch.dtype) -> float:
    """A number that is not NaN or inf; -inf where the dtype of the logits cannot tell it from
    that."""
    number = isinstance(mask_value, (int, float)) and not isinstance(mask_value, bool)
    if not number or math.isnan(mask_value) or mask_value == float("inf"):
        raise ValueError(f"mask_value must be a number below inf, got {mask_value!r}")
    least = torch.finfo(torch.promote_types(dtype, torch.float32)).min
    return float(mask_value) if mask_value >= least else float("-inf")
