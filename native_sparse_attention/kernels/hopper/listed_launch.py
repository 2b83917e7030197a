"""Launches of `listed_backward.py`: where it can run, and where it pays to form dq in it."""

from __future__ import annotations

import triton
from torch import Tensor

from .. import launch
from ..inverse import Inverse
from ..launch import Cotangent, Selection
from ..sizes import asked
from . import gpu

# rows of a tile, and columns that are read at once
ROWS, COLUMNS = 64, 64
# widths of heads, and keys of a block
WIDTHS, KEYS = (64, 128), 64
# places of each part's ring, and registers of a warp that computes
STAGES, REGISTERS = 2, 240
# lists from which on dq is formed sooner with dk and dv than query by query
LEAST_LISTS = 1 << 16


def rows_of(groups: int) -> int:
    """Rows of an entry with so many heads."""
    return launch.padded(groups)


def serves(q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float) -> bool:
    """Whether the kernel takes a call. With `launch.using({"listed": False})` never, and not where
    the call asks for tiles."""
    wanted = launch.override.get("listed", True)
    if not wanted or asked("pairs.backward") or not gpu.available(q):
        return False
    (B, T, R, n), S = selection.lists.shape, k.shape[1]
    rows = launch.FEW_ROWS <= q.shape[2] // R <= ROWS
    whole = selection.s == KEYS and S % KEYS == 0 and not selection.diagonal
    whole = whole and not launch.ends(selection)["ENDS"]
    sizes = q.element_size() == 2 and k.shape[-1] == v.shape[-1] in WIDTHS
    plain = selection.gates is None and selection.soft_cap is None and scale > 0
    if not (rows and whole and sizes and plain and 0 < B * T * R * n < 1 << 31):
        return False
    return all(launch.boxes(t, KEYS) is not None for t in (q, k, v))


def forms_dq(q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float) -> bool:
    """Whether dq is better formed block by block too. With `launch.using({"listed_dq": ...})` as
    that says."""
    lists = selection.lists.shape[:3].numel()
    wanted = launch.override.get("listed_dq", lists >= LEAST_LISTS)
    return bool(wanted) and selection.stride == 1 and serves(q, k, v, selection, scale)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    scale: float,
    cotangent: Cotangent,
    dk: Tensor,
    dv: Tensor,
    spills: list[Tensor],
    part: Tensor | None,
    alike: Tensor | None,
    inverse: Inverse,
) -> None:
    """As `pairs.backward_kernel`: adds to dk and dv or writes the items' shares, and the parts of
    dq [entries, rows, D], unless most neighbours are `alike`."""
    from .listed_backward import backward_kernel

    T, (S, K, D) = q.shape[1], k.shape[1:]
    R, n = selection.lists.shape[2:]
    items, blocks = len(inverse.owner), triton.cdiv(S, KEYS)
    shape = [1, 1, rows_of(q.shape[2] // R), COLUMNS]
    backward_kernel[(triton.cdiv(items, 2),)](
        q=gpu.box(q, shape), k=gpu.box(k, [1, KEYS, 1, D]), v=gpu.box(v, [1, KEYS, 1, D]),
        d_out=gpu.box(cotangent.d_out, shape), lse=cotangent.lse, delta=cotangent.delta,
        part=None if part is None else gpu.box(part, shape[1:]), alike=alike, dk=dk, dv=dv,
        spill_k=spills[0], spill_v=spills[1], entries=inverse.entries, bounds=inverse.bounds,
        owner=inverse.owner, item_bounds=inverse.item_bounds, spill_bounds=inverse.spill_bounds,
        chunk=inverse.chunk, items=items, first=inverse.first, length=inverse.length, T=T, S=S,
        C=blocks, BLOCKS=q.shape[0] * K * blocks, scale=scale, K=K, R=R, n=n,
        G=q.shape[2] // R, STAGES=STAGES, GATED=cotangent.gated, DQ=part is not None,
        ALIKE=alike is not None, REGISTERS=REGISTERS, num_warps=4,
    )  # fmt: skip
