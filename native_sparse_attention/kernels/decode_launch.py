"""Launches of the kernels of `decode.py`. Nothing here asks the device for a length: a step can be
captured in a CUDA graph."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from . import decode, launch
from .entries import Step, widths
from .tiles import MOST_IN_LISTS, RankingTile, Tile

# programs that fill a GPU, of those that read windows and those that read blocks
PROGRAMS = {"windows": 264, "blocks": 264}
MOST_SPLITS = 64
# rows of queries at most, but for the heads of one token, and windows; the blocks' own are of one
# token and as wide as they are
TILES = {
    "windows": {128: Tile(64, 64, 4, 3), 256: Tile(64, 32, 4, 2)},
    "blocks": {128: Tile(0, 0, 4, 2), 256: Tile(0, 0, 4, 1)},
}
TILES_FLOAT32 = Tile(64, 32, 4, 1)
RANKING = RankingTile(1, 128, 128, 4, 4, 1, 64)
# windows whose probabilities one program forms
BLOCK_W = 128


@dataclass(frozen=True)
class Settings:
    """Of the layer, as `ops.decode` names them."""

    l: int
    d: int
    s: int
    n: int
    w: int
    importance: str
    interpolated: bool
    num_initial: int
    num_local: int
    stride: int
    shared: bool
    scale: float
    soft_cap: float | None


def decode_tile(kernel: str, width: int, dtype: torch.dtype) -> Tile:
    tile = TILES_FLOAT32 if dtype == torch.float32 else launch.row(TILES[kernel], width)
    return launch.override.get(f"decode.{kernel}", tile)


def splits_of(programs: int, room: int, pieces: int) -> int:
    """Into how many shares each of so many programs goes to fill the GPU."""
    return max(1, min(room // max(1, programs), pieces, MOST_SPLITS))


def empty_parts(splits: int, q: Tensor, E: int) -> tuple[Tensor, Tensor]:
    rows = (splits, *q.shape[:3])
    return q.new_empty(*rows, E, dtype=torch.float32), q.new_empty(rows, dtype=torch.float32)


def attend_windows(
    q: Tensor,
    ck: Tensor,
    cv: Tensor,
    memory: tuple[Tensor, Tensor] | None,
    W: int,
    step: Step,
    at: Settings,
) -> tuple[Tensor, Tensor, Tensor]:
    """Shares of branch 1, their lse, and the windows' scores [B T heads W]."""
    B, T, H, D = q.shape
    K, E = ck.shape[2], cv.shape[-1]
    G, heads = H // K, triton.next_power_of_2(H // K)
    tile = decode_tile("windows", max(D, E), q.dtype)
    block_m = max(16, heads, min(tile.block_m, triton.next_power_of_2(T) * heads))
    tiles = triton.cdiv(T * heads, block_m)
    splits = splits_of(B * K * tiles, PROGRAMS["windows"], triton.cdiv(W, tile.block_n))
    parts, lse = empty_parts(splits, q, E)
    kind = decode.NOTHING
    if at.n and W:
        kind = decode.SUM if at.importance == "logits" and at.shared else decode.EACH
    scored = {decode.NOTHING.value: 0, decode.SUM.value: K, decode.EACH.value: H}[kind.value]
    scores = q.new_empty(B, T, scored, W, dtype=torch.float32)
    mem_k, mem_v = memory or (None, None)
    decode.windows_kernel[(splits, B * K, tiles)](
        q=q, ck=ck, cv=cv, mem_k=ck if mem_k is None else mem_k,
        mem_v=cv if mem_v is None else mem_v, parts=parts, part_lse=lse,
        scores=scores, T=T, K=K, W=W,
        MEMORY=0 if mem_k is None else mem_k.shape[1], scale_log2=at.scale * launch.LOG2_E,
        **launch.cap(at.soft_cap), **launch.strides("q", q, "bth"),
        **launch.strides("k", ck, "bnh"), **launch.strides("v", cv, "bnh"),
        **launch.strides("m", mem_k, "hm"), **launch.strides("u", mem_v, "hm"),
        **step.arguments(at.d), **widths(ck, cv), G=G, HEADS=heads, BLOCK_M=block_m,
        BLOCK_N=tile.block_n, d=at.d, SCORES=kind.value, CAPPED_SCORES=at.importance == "probs",
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return parts, lse, scores


def probabilities(
    scores: Tensor, lse: Tensor, sinks: Tensor | None, ranks: int, step: Step, at: Settings
) -> Tensor:
    """Scores [B T ranks W] by `importance="probs"`, from logits [B T H W] and the shares' lse."""
    B, T, H, W = scores.shape
    out = scores.new_empty(B, T, ranks, W)
    decode.probabilities_kernel[(triton.cdiv(W, BLOCK_W), B * ranks, T)](
        scores=scores, part_lse=lse, sinks=lse if sinks is None else sinks, lengths=step.lengths,
        out=out, T=T, W=W, RANKS=ranks, SPLITS=lse.shape[0], ROWS=B * T * H, HEADS=H // ranks,
        BLOCK_HEADS=triton.next_power_of_2(H // ranks),
        BLOCK_SPLITS=triton.next_power_of_2(lse.shape[0]), BLOCK_N=BLOCK_W, d=at.d,
        SINKS=sinks is not None, num_warps=4,
    )  # fmt: skip
    return out


def rank(scores: Tensor, lists: Tensor, ring: Tensor | None, step: Step, at: Settings) -> None:
    """Write lists [B T ranks n] of the blocks that tokens select, from windows' scores [B T ranks
    W]; a `ring` [B ranks size n] is read and written."""
    B, T, ranks, W = scores.shape
    tile, merge_n = RANKING, max(RANKING.merge_n, triton.next_power_of_2(at.n))
    if at.n > MOST_IN_LISTS:
        tile = replace(tile, block_n=merge_n, columns=0, depth=0)
    decode.rank_kernel[(B * ranks, T)](
        scores=scores, lengths=step.lengths,
        counts=step.lengths if step.counts is None else step.counts, lists=lists,
        ring=lists if ring is None else ring, T=T, W=W, RANKS=ranks, BLOCK_N=tile.block_n,
        COLUMNS=tile.columns, DEPTH=min(tile.depth, at.n), MERGE_N=merge_n, SLOTS=at.n,
        SLOTS_2=max(2, triton.next_power_of_2(at.n)), l=at.l, d=at.d, s=at.s,
        BLOCK_S=triton.next_power_of_2(at.s), INITIAL=at.num_initial, LOCAL=max(at.num_local, 1),
        STRIDE=at.stride, RING=0 if ring is None else ring.shape[2], PROBS=at.importance == "probs",
        INTERPOLATED=at.interpolated, COUNTED=step.counts is not None, num_warps=tile.num_warps,
    )  # fmt: skip


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Tensor,
    step: Step,
    at: Settings,
    near: bool,
    fused: bool,
) -> tuple[Tensor, Tensor]:
    """Shares of branch 3 (`near`) or of branch 2, and their lse. With `fused` the local blocks are
    the last of the former."""
    B, T, H, D = q.shape
    K, E, ranks = k.shape[2], v.shape[-1], lists.shape[2]
    listed = at.n + at.num_initial + (0 if fused else at.num_local)
    items = near_blocks(at) - at.num_local * fused if near else listed
    tile = decode_tile("blocks", max(D, E), q.dtype)
    each = max(1, triton.cdiv(items, splits_of(B * ranks * T, PROGRAMS["blocks"], items)))
    if near and fused:
        each = max(each, at.num_local)
    splits = triton.cdiv(items, each) + (near and fused)
    parts, lse = empty_parts(splits, q, E)
    if splits:
        decode.blocks_kernel[(splits, B * ranks, T)](
            q=q, k=k, v=v, lists=lists, parts=parts, part_lse=lse, T=T,
            RANKS=ranks, scale_log2=at.scale * launch.LOG2_E, **launch.cap(at.soft_cap),
            **launch.strides("q", q, "bth"), **launch.strides("k", k, "bnh"),
            **launch.strides("v", v, "bnh"), **step.arguments(), **widths(k, v), G=H // ranks,
            SHARE=ranks // K, BLOCK_M=launch.padded(H // ranks), SLOTS=at.n,
            SLOTS_2=max(2, triton.next_power_of_2(at.n)), s=at.s, BLOCK_S=launch.padded(at.s),
            w=at.w, INITIAL=at.num_initial, LOCAL=at.num_local,
            LISTED=listed, ITEMS=each, NEAR=near, FUSED=near and fused, num_warps=tile.num_warps,
            num_stages=tile.num_stages if at.s <= 64 else 1,
        )  # fmt: skip
    return parts, lse


def near_blocks(at: Settings) -> int:
    """Blocks that a window may reach into."""
    return (at.w + at.s - 1) // at.s + 1


def join(
    parts: list[tuple[Tensor, Tensor]],
    sinks: Tensor | None,
    gates: Tensor,
    step: Step,
    fused: bool,
    dtype: torch.dtype,
) -> Tensor:
    """The three branches, of shares, under their gates [B T H 3]: [B T H E]."""
    (cmp, cmp_lse), (far, far_lse), (near, near_lse) = parts
    B, T, H, E = near.shape[1:]
    out = gates.new_empty(B, T, H, E, dtype=dtype)
    counted, rows = step.counts is not None, B * T * H
    most = max(t.shape[0] for t, _ in parts)
    decode.join_kernel[(rows,)](
        cmp, cmp_lse, far, far_lse, near, near_lse, near_lse if sinks is None else sinks, gates,
        step.counts if counted else step.lengths, out, T, H, rows, cmp.shape[0], far.shape[0],
        near.shape[0], *gates.stride(), E=E, BLOCK_E=launch.padded(E),
        BLOCK_CMP=triton.next_power_of_2(cmp.shape[0]),
        BLOCK_FAR=triton.next_power_of_2(max(1, far.shape[0])),
        BLOCK_NEAR=triton.next_power_of_2(near.shape[0]), FUSED=fused, SINKS=sinks is not None,
        COUNTED=counted, num_warps=min(4, max(1, triton.next_power_of_2(most) // 16)),
    )  # fmt: skip
    return out


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Launch on a stream of its own, after what was launched before; the launches that follow do
    not wait until `caught_up`. A CUDA graph takes this for a branch."""
    if device.type != "cuda":
        yield
        return
    side = side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield


def caught_up(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(side_stream(device))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ck: Tensor,
    cv: Tensor,
    gates: Tensor,
    cq: Tensor | None,
    memory: tuple[Tensor, Tensor] | None,
    window: tuple[Tensor, Tensor] | None,
    ranking: Tensor | None,
    sinks: Tensor | None,
    step: Step,
    at: Settings,
) -> Tensor:
    """The step, [B T H E]: see `ops.decode`."""
    ranks = k.shape[2] if at.shared else q.shape[2]
    W = ck.shape[1] if step.table is None else ck.shape[1] * step.table.shape[1]
    sinks = None if sinks is None else sinks.float().contiguous()
    parts, lse, scores = attend_windows(q if cq is None else cq, ck, cv, memory, W, step, at)
    lists = q.new_full((*q.shape[:2], ranks, at.n), -1, dtype=torch.int32)
    wk, wv = window or (k, v)
    # the window covers the local blocks, and its keys are the selection's
    fused = window is None and 0 < at.num_local * at.s <= at.w + 1
    # the ranking leaves the GPU idle
    with beside(q.device):
        near = attend_blocks(q, wk, wv, lists, step, at, True, fused)
    if at.n and W:
        if at.importance == "probs":
            scores = probabilities(scores, lse, sinks, ranks, step, at)
        rank(scores, lists, ranking if at.stride > 1 else None, step, at)
    far = attend_blocks(q, k, v, lists, step, at, False, fused)
    caught_up(q.device)
    return join([(parts, lse), far, near], sinks, gates, step, fused, q.dtype)
