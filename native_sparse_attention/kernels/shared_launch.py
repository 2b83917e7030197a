"""Launches of `shared_blocks.py` and `shared_backward.py`, where they can run."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor

from . import launch, unite
from .launch import LOG2_E, Cotangent, Mixture, Selection, Sum
from .norms import bounds

# versions of Triton whose Gluon the kernels were written for: it changes from one to the next
GLUON = ((3, 6),)

# tokens of a program: parts of as many warps, and rows of each
PARTS, WARPS, ROWS = 2, 4, 16
# blocks between two meetings of a part, and how many times as many are on their way; keys of a
# product; registers of a warp
CHUNK, CHUNKS, SLICE, REGISTERS = 3, 2, 16, 208
# whether a block is waited for by itself, or a chunk (a third of the code)
EACH = True
# widths of heads, and sizes of blocks
WIDTHS, SIZES = (64, 128), (64,)
# slots of a list at most
MOST_SLOTS = 32


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def available(q: Tensor) -> bool:
    """Whether this GPU and this Triton can run them."""
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    return q.is_cuda and launch.capability(q.device.index) == (9, 0) and version in GLUON


def box(t: Tensor, shape: list[int]) -> Any:
    """A descriptor of t [B N K D], of whose boxes of this shape rows lie as products read them."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(128, 8 * t.element_size(), rank=4)
    return TensorDescriptor(t, list(t.shape), list(t.stride()), shape, layout)


def serves(q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float) -> bool:
    """Whether the kernels take a call."""
    if not launch.override.get("shared", True) or not available(q):
        return False
    rows, n = q.shape[2] // selection.lists.shape[2], selection.lists.shape[3]
    plain = selection.gates is None and selection.soft_cap is None and scale > 0
    whole = k.shape[1] % selection.s == 0 and selection.s in SIZES
    whole = whole and not selection.diagonal and not launch.ends(selection)["ENDS"]
    # rows of q lie where keys and values do
    sizes = q.element_size() == 2 and k.shape[-1] == v.shape[-1] in WIDTHS
    boxes = all(launch.boxes(t, ROWS) is not None for t in (q, k, v))
    few = launch.FEW_ROWS <= rows <= ROWS and selection.stride == 1 and 0 < n <= MOST_SLOTS
    return plain and whole and sizes and boxes and few


def arguments(q: Tensor, k: Tensor, v: Tensor, selection: Selection) -> dict[str, Any]:
    """What both kernels take."""
    s, R, E = selection.s, selection.lists.shape[2], v.shape[-1]
    unions = unite.shared(selection, triton.cdiv(k.shape[1], s), CHUNK)
    return dict(
        q=box(q, [1, WARPS, ROWS, q.shape[-1]]),
        k=box(k, [1, s, 1, k.shape[-1]]),
        v=box(v, [1, s, 1, E]),
        entries=unions.entries,
        counts=unions.counts,
        T=q.shape[1],
        K=k.shape[2],
        R=R,
        limit=unions.limit,
        s=s,
        groups=unions.groups,
        tiles=unions.counts.numel(),
        G=q.shape[2] // R,
        WARPS=WARPS,
        CHUNK=CHUNK,
        CHUNKS=CHUNKS,
        SLICE=SLICE,
        EACH=EACH,
        REGISTERS=REGISTERS,
        num_warps=WARPS,
    )


def programs(q: Tensor, args: dict[str, Any]) -> tuple[int]:
    """One for each multiprocessor, which it fills."""
    return (min(args["tiles"], multiprocessors(q.device)),)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    scale: float,
    partial: tuple[Tensor, Tensor] | None,
    norms: Tensor | None,
    mix: Mixture | None,
) -> tuple[Tensor, Tensor]:
    """As `gather.forward`."""
    from .shared_blocks import forward_kernel

    out, lse = partial or launch.empty_outputs(q, v)
    args = arguments(q, k, v, selection)
    if args["tiles"]:
        forward_kernel[programs(q, args)](
            out=out, lse=lse, scale_log2=scale * LOG2_E, ADD=partial is not None, **args,
            **bounds(norms), **launch.mixture(mix),
        )  # fmt: skip
    return out, lse


def backward_q(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    scale: float,
    cotangent: Cotangent,
    dq: Sum,
) -> None:
    """As `gather.backward_q`."""
    from .shared_backward import dq_kernel

    args = arguments(q, k, v, selection) | cotangent.arguments() | dq.arguments()
    args["d_out"] = box(args["d_out"], [1, WARPS, ROWS, v.shape[-1]])
    if args["tiles"]:
        dq_kernel[programs(q, args)](scale=scale, **args)
