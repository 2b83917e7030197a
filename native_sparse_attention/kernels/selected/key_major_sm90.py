"""Launches of `key_major_fwd_sm90.py` and `key_major_bwd_sm90.py`: the calls that they support, and
the calls whose dq is key-major."""

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
# rows of a pair from which the tensor memory accelerator copies them
MIN_BOX_ROWS = 8
# stages of each consumer's ring, and registers of a consumer thread
STAGES, REGISTERS = 2, 240
# rows of block indices [B T R] from which key-major dq is faster than query-major. With half as
# many a layer's backward takes 1.03 times as long by it, and the selected branch 2.3 times the
# memory (H100, H = 64, K = 4, 8k tokens)
MIN_SELECTIONS = 1 << 16


def pair_rows(groups: int) -> int:
    """Rows of a tile per pair of `groups` heads."""
    return next_power_of_2(groups)


def partial_dq_rows(groups: int) -> int:
    """Rows of partial dq per pair."""
    rows = pair_rows(groups)
    return groups if rows < MIN_BOX_ROWS else rows


def is_supported(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float, kernel: str = "backward"
) -> bool:
    """Whether the Gluon kernel supports a call; never with a tile config of the caller or with
    `launch.using({"key_major_sm90": False})`."""
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
    # threads copy 16 bytes each, which Triton infers from strides divisible by 16
    copied = kernel == "forward" or pair_rows(groups) < MIN_BOX_ROWS
    if copied and any(stride % 16 for stride in q.stride()[:3]):
        return False
    return all(launch.tma_descriptor(t, KEYS) is not None for t in (q, k, v))


def pair_tokens(q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float) -> int:
    """Neighbouring tokens of one pair: they share their block indices and fit in a tile. 1 if they
    are not aligned to token 0, or have fewer than MIN_BOX_ROWS rows."""
    if selection.starts is not None or not is_supported(q, k, v, selection, scale):
        return 1
    rows = pair_rows(q.shape[2] // selection.block_indices.shape[2])
    tokens = math.gcd(selection.stride, selection.start, q.shape[1], ROWS // rows)
    return tokens if tokens * rows >= MIN_BOX_ROWS else 1


def forms_dq(q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float) -> bool:
    """Whether dq is key-major, by MIN_SELECTIONS or `launch.using({"key_major_dq_sm90": ...})`."""
    selections = selection.block_indices.shape[:3].numel()
    wanted = launch.override.get("key_major_dq_sm90", selections >= MIN_SELECTIONS)
    return bool(wanted) and selection.stride == 1 and is_supported(q, k, v, selection, scale)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    scale: float,
    block_csr: BlockCSR,
    partial_out: Tensor,
    partial_lse: Tensor,
) -> None:
    """Like `nsa_selected_fwd_key_major`: writes partial out and lse of a chunk of all heads."""
    from .key_major_fwd_sm90 import nsa_selected_fwd_key_major_sm90

    T, (S, K, D) = q.shape[1], k.shape[1:]
    R, n = selection.block_indices.shape[2:]
    num_tiles, blocks, groups = len(block_csr.owner), cdiv(S, KEYS), q.shape[2] // R
    nsa_selected_fwd_key_major_sm90[(num_tiles,)](
        q=q, k=sm90.box(k, [1, KEYS, 1, D]), v=sm90.box(v, [1, KEYS, 1, D]),
        partial_out=partial_out, partial_lse=partial_lse, pairs=block_csr.pairs,
        offsets=block_csr.offsets, owner=block_csr.owner, ordinals=block_csr.ordinals,
        tile_pairs=block_csr.tile_pairs, num_tiles=num_tiles, T=T, C=blocks,
        BLOCKS=q.shape[0] * K * blocks, first=block_csr.first, length=block_csr.length,
        scale_log2=scale * LOG2_E, q_b=q.stride(0), q_t=q.stride(1), q_h=q.stride(2), K=K, R=R,
        n=n, G=groups, GROUP=pair_rows(groups), num_warps=4,
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
    partials: list[Tensor],
    partial_dq: Tensor | None,
    overlapping: Tensor | None,
    block_csr: BlockCSR,
    tokens: int,
) -> None:
    """Like `nsa_selected_bwd_key_major`: adds to dk and dv or writes partial dk and dv. Writes
    partial dq [pairs, rows, D] unless `overlapping` is not 0. Pairs of several `tokens` have no
    partial dq."""
    from .key_major_bwd_sm90 import nsa_selected_bwd_key_major_sm90

    T, (S, K, D) = q.shape[1], k.shape[1:]
    R, n = selection.block_indices.shape[2:]
    num_tiles, blocks, groups = len(block_csr.owner), cdiv(S, KEYS), q.shape[2] // R
    shape = [1, tokens, pair_rows(groups), COLUMNS]
    by_row = tokens * shape[2] < MIN_BOX_ROWS
    partial_box = (
        partial_dq if by_row or partial_dq is None else sm90.box(partial_dq, [1, *shape[2:]])
    )
    nsa_selected_bwd_key_major_sm90[(cdiv(num_tiles, 2),)](
        q=q if by_row else sm90.box(q, shape), k=sm90.box(k, [1, KEYS, 1, D]),
        v=sm90.box(v, [1, KEYS, 1, D]),
        d_out=bwd.d_out if by_row else sm90.box(bwd.d_out, shape), q_b=q.stride(0),
        q_t=q.stride(1), q_h=q.stride(2), lse=bwd.lse, delta=bwd.delta, partial_dq=partial_box,
        overlapping=overlapping, dk=dk, dv=dv, partial_dk=partials[0], partial_dv=partials[1],
        pairs=block_csr.pairs, offsets=block_csr.offsets, owner=block_csr.owner,
        ordinals=block_csr.ordinals, partial_offsets=block_csr.partial_offsets,
        tile_pairs=block_csr.tile_pairs, num_tiles=num_tiles, head=block_csr.head, T=T, S=S,
        C=blocks, BLOCKS=q.shape[0] * block_csr.heads * blocks, scale=scale, K=K,
        HEADS=block_csr.heads, R=R, n=n, G=groups, TOKENS=tokens, GROUP=shape[2], STAGES=STAGES,
        GATED=bwd.gated, DQ=partial_dq is not None, OVERLAPPING=overlapping is not None,
        BY_ROW=by_row, REGISTERS=REGISTERS, num_warps=4,
    )  # fmt: skip
