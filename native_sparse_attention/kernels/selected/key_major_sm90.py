"""Launches of `key_major_fwd_sm90.py` and `key_major_bwd_sm90.py`: which calls they support, and in
which the latter forms dq too."""

from __future__ import annotations

import math

from torch import Tensor

from ..common import launch, sm90
from ..common.counts import cdiv, next_power_of_2
from ..common.launch import LOG2_E, BackwardInputs, Selection
from ..common.overrides import requested_sizes
from .csr import BlockCSR

# rows of a tile, and columns that are read at once
ROWS, COLUMNS = 64, 64
# widths of heads, and keys of a block
WIDTHS, KEYS = (64, 128), 64
# rows of an entry under which they are no box
LEAST_BOX = 8
# places of each part's ring, and registers of a warp that computes
STAGES, REGISTERS = 2, 240
# lists from which on dq is formed sooner with dk and dv than query by query
LEAST_SELECTIONS = 1 << 15


def rows_of(groups: int) -> int:
    """Rows of a tile that an entry with so many heads takes."""
    return next_power_of_2(groups)


def rows_of_part(groups: int) -> int:
    """Rows of an entry's part of dq."""
    rows = rows_of(groups)
    return groups if rows < LEAST_BOX else rows


def is_supported(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float, kernel: str = "backward"
) -> bool:
    """Whether the kernel of that name takes a call. With `launch.using({"key_major_sm90": False})`
    never, and not where the call asks for tiles."""
    wanted = launch.override.get("key_major_sm90", True)
    if not wanted or requested_sizes(f"key_major.{kernel}") or not sm90.available(q):
        return False
    (B, T, R, n), S = selection.block_indices.shape, k.shape[1]
    groups = q.shape[2] // R
    whole = selection.s == KEYS and S % KEYS == 0 and not selection.diagonal
    whole = whole and not launch.ends(selection)["ENDS"]
    sizes = q.element_size() == 2 and k.shape[-1] == v.shape[-1] in WIDTHS
    plain = selection.gates is None and selection.soft_cap is None and scale > 0
    if not (groups <= ROWS and whole and sizes and plain):
        return False
    if not 0 < B * T * R * n < 1 << 31:
        return False
    # threads copy 16 bytes each where Triton knows that they can, by strides that 16 divides
    copied = kernel == "forward" or rows_of(groups) < LEAST_BOX
    if copied and any(stride % 16 for stride in q.stride()[:3]):
        return False
    return all(launch.tma_descriptor(t, KEYS) is not None for t in (q, k, v))


def tokens_of(q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float) -> int:
    """Neighbours that are one entry: of those that share a list as many as a tile has room for,
    where tokens are such groups from the first on. One where their rows are no box anyhow."""
    if selection.starts is not None or not is_supported(q, k, v, selection, scale):
        return 1
    rows = rows_of(q.shape[2] // selection.block_indices.shape[2])
    tokens = math.gcd(selection.stride, selection.start, q.shape[1], ROWS // rows)
    return tokens if tokens * rows >= LEAST_BOX else 1


def forms_dq(q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float) -> bool:
    """Whether dq is better formed block by block too. With `launch.using({"key_major_dq_sm90":
    ...})` as that says."""
    selections = selection.block_indices.shape[:3].numel()
    wanted = launch.override.get("key_major_dq_sm90", selections >= LEAST_SELECTIONS)
    return bool(wanted) and selection.stride == 1 and is_supported(q, k, v, selection, scale)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    scale: float,
    block_csr: BlockCSR,
    part: Tensor,
    part_lse: Tensor,
) -> None:
    """As `nsa_selected_fwd_key_major`: writes the parts of a span of all heads."""
    from .key_major_fwd_sm90 import nsa_selected_fwd_key_major_sm90

    T, (S, K, D) = q.shape[1], k.shape[1:]
    R, n = selection.block_indices.shape[2:]
    items, blocks, groups = len(block_csr.owner), cdiv(S, KEYS), q.shape[2] // R
    nsa_selected_fwd_key_major_sm90[(items,)](
        q=q, k=sm90.box(k, [1, KEYS, 1, D]), v=sm90.box(v, [1, KEYS, 1, D]), part=part,
        part_lse=part_lse, entries=block_csr.entries, bounds=block_csr.bounds,
        owner=block_csr.owner, ordinals=block_csr.ordinals, chunk=block_csr.chunk, items=items,
        T=T, C=blocks, BLOCKS=q.shape[0] * K * blocks, first=block_csr.first,
        length=block_csr.length, scale_log2=scale * LOG2_E, q_b=q.stride(0), q_t=q.stride(1),
        q_h=q.stride(2), K=K, R=R, n=n, G=groups, GROUP=rows_of(groups), num_warps=4,
    )  # fmt: skip


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    scale: float,
    bwd: BackwardInputs,
    dk: Tensor,
    dv: Tensor,
    spills: list[Tensor],
    part: Tensor | None,
    overlapping: Tensor | None,
    block_csr: BlockCSR,
    tokens: int,
) -> None:
    """As `nsa_selected_bwd_key_major`: adds to dk and dv or writes the items' shares, and the parts
    of dq [entries, rows, D], unless most neighbours overlap. Entries of so many `tokens` have no
    parts."""
    from .key_major_bwd_sm90 import nsa_selected_bwd_key_major_sm90

    T, (S, K, D) = q.shape[1], k.shape[1:]
    R, n = selection.block_indices.shape[2:]
    items, blocks, groups = len(block_csr.owner), cdiv(S, KEYS), q.shape[2] // R
    shape = [1, tokens, rows_of(groups), COLUMNS]
    few = tokens * shape[2] < LEAST_BOX
    into = part if few or part is None else sm90.box(part, [1, *shape[2:]])
    nsa_selected_bwd_key_major_sm90[(cdiv(items, 2),)](
        q=q if few else sm90.box(q, shape), k=sm90.box(k, [1, KEYS, 1, D]),
        v=sm90.box(v, [1, KEYS, 1, D]),
        d_out=bwd.d_out if few else sm90.box(bwd.d_out, shape), q_b=q.stride(0),
        q_t=q.stride(1), q_h=q.stride(2), lse=bwd.lse, delta=bwd.delta, part=into,
        overlapping=overlapping, dk=dk, dv=dv, spill_k=spills[0], spill_v=spills[1],
        entries=block_csr.entries, bounds=block_csr.bounds, owner=block_csr.owner,
        ordinals=block_csr.ordinals, spill_bounds=block_csr.spill_bounds, chunk=block_csr.chunk,
        items=items, head=block_csr.head, T=T, S=S, C=blocks,
        BLOCKS=q.shape[0] * block_csr.heads * blocks, scale=scale, K=K, HEADS=block_csr.heads, R=R,
        n=n, G=groups, TOKENS=tokens, GROUP=shape[2], STAGES=STAGES, GATED=bwd.gated,
        DQ=part is not None, OVERLAPPING=overlapping is not None, FEW=few,
        REGISTERS=REGISTERS, num_warps=4,
    )  # fmt: skip
