"""The launch of `decode.py`. Nothing here asks the device for a length: a step can be captured in a
CUDA graph."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from . import decode, decode_ahead, launch
from .decode_branches import EACH, NOTHING, SUM
from .entries import Step, widths
from .tiles import MOST_IN_LISTS, RankingTile, Tile

# programs that fill a GPU, of those that read windows and those that read blocks
PROGRAMS = {"windows": 396, "blocks": 396}
MOST_SPLITS = 64
# programs that a GPU runs side by side, or nearly: two a multiprocessor, of any registers, while
# the last to begin have to wait anyway; and how many there may be before more are added that rank
ROOM, ROOM_TO_RANK = 340, 290
# blocks that a program ranks, at least and at most, against how many at once, and how many times as
# many it asks for together
RANKED, COMPARED, ASKED = (16, 32), 256, 4
# pages of a row that a program holds, so as not to look them up when it knows its blocks
MOST_PAGES = 1024
# where every block is read before it is known which are selected: blocks of all tokens and KV
# heads, those of one, bytes of a block's keys, places for a token's shares, registers of a thread
# where three programs run on a multiprocessor; programs for blocks, rows and features to be joined
AHEAD, AHEAD_PAGED, AHEAD_BLOCKS, AHEAD_BYTES, AHEAD_SHARES = 512, 256, 128, 16384, 64
AHEAD_REGISTERS = 168
AHEAD_ITEMS, AHEAD_ROWS, AHEAD_COLUMNS = 256, 4, 32
# rows of queries at most, but for the heads of one token, and keys; rows against blocks are of one
# token, keys of one block at least, and the warps are those of the windows
TILES = {
    "windows": {128: Tile(64, 64, 4, 3), 256: Tile(64, 32, 4, 2)},
    "blocks": {128: Tile(0, 64, 4, 2), 256: Tile(0, 64, 4, 1)},
}
TILES_FLOAT32 = Tile(64, 32, 4, 1)
RANKING = RankingTile(1, 128, 128, 4, 4, 1, 64)
# numbers of shares that one program joins, and rows at most
JOINED, JOIN_ROWS = 8192, 4
RANK_CHUNKS = 8
# windows whose probabilities are formed at once
BLOCK_W = 256


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


def near_blocks(at: Settings) -> int:
    """Blocks that a window may reach into."""
    return (at.w + at.s - 1) // at.s + 1


def shares_of_blocks(programs: int, blocks: int, at_once: int, least: int = 1) -> tuple[int, int]:
    """Blocks of a share, at least so many and as many as are read at once; and shares of them."""
    each = triton.cdiv(blocks, splits_of(programs, PROGRAMS["blocks"], blocks))
    each = triton.cdiv(max(1, each, least), at_once) * at_once
    return each, triton.cdiv(blocks, each)


@dataclass(frozen=True)
class Shares:
    """Into how many shares the work of a step goes, by what it is: of the windows for each of
    `tiles` tiles of queries; of the probabilities; of the blocks near and far, so many each; and of
    the rows and features to be joined."""

    tiles: int
    cmp: int
    probabilities: int
    near: int
    near_items: int
    far: int
    far_items: int
    join_rows: int
    join_columns: int

    @property
    def parts(self) -> int:
        return self.cmp + self.near + self.far


def share_out(
    q: Tensor, kv_heads: int, E: int, W: int, ranks: int, block_m: int, keys: int, block_n: int,
    fused: bool, at: Settings,
) -> Shares:  # fmt: skip
    B, T, H, _ = q.shape
    tiles = triton.cdiv(T * triton.next_power_of_2(H // kv_heads), block_m)
    tokens, at_once = B * ranks * T, keys // launch.padded(at.s)
    cmp = splits_of(B * kv_heads * tiles, PROGRAMS["windows"], triton.cdiv(W, block_n))
    probabilities = splits_of(tokens, PROGRAMS["windows"], triton.cdiv(W, BLOCK_W))
    local = at.num_local * fused  # a share of their own
    near_items, near = shares_of_blocks(tokens, near_blocks(at) - local, at_once, local)
    far_items, far = shares_of_blocks(tokens, listed_blocks(at, fused), at_once)
    near += fused

    parts, columns = triton.next_power_of_2(cmp + near + far), launch.padded(E)
    return Shares(
        tiles=tiles,
        cmp=cmp,
        probabilities=probabilities if at.n and at.importance == "probs" else 0,
        near=near,
        near_items=near_items,
        far=far,
        far_items=far_items,
        join_rows=max(1, min(JOIN_ROWS, JOINED // (parts * columns))),
        join_columns=max(16, min(columns, JOINED // parts)),
    )


def capacity(k: Tensor, step: Step) -> int:
    """Entries that a row has room for, in rows k [b n ..] or pages [p n ..]."""
    return k.shape[1] * (1 if step.table is None else step.table.shape[1])


def rankers(blocks: int, tokens: int, room: int, at: Settings) -> tuple[int, int]:
    """Programs that rank the blocks of a token, and how many each, where there is room for more
    than one; else that one, which keeps lists of the best."""
    least, most = RANKED
    programs = min(triton.cdiv(blocks, least), 1 + max(0, room) // tokens)
    ranked = max(least, triton.next_power_of_2(triton.cdiv(blocks, programs)))
    if programs == 1 or ranked > most or at.stride > 1:
        return 1, 0
    return triton.cdiv(blocks, ranked), ranked


def listed_blocks(at: Settings, fused: bool) -> int:
    """Blocks that a token selects, but for the local ones where the window has them."""
    return at.n + at.num_initial + (0 if fused else at.num_local)


def ranking_tile(W: int, at: Settings) -> tuple[RankingTile, int]:
    """And chunks of its blocks whose scores are asked for at once."""
    tile = replace(RANKING, merge_n=max(RANKING.merge_n, triton.next_power_of_2(at.n)))
    if at.n > MOST_IN_LISTS:
        return replace(tile, block_n=tile.merge_n, columns=0, depth=0), 1
    chunks = triton.cdiv(max(1, W * at.d // at.s), tile.block_n)
    return tile, min(RANK_CHUNKS, triton.next_power_of_2(chunks))


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
    counters: Tensor,
    step: Step,
    at: Settings,
) -> Tensor:
    """The step, [B T H E]: see `ops.decode`."""
    B, T, H, D = q.shape
    K, E = k.shape[2], v.shape[-1]
    G, ranks = H // K, K if at.shared else H
    out = q.new_empty(B, T, H, E)
    if out.numel() == 0:
        return out
    cq, (wk, wv), (mem_k, mem_v) = q if cq is None else cq, window or (k, v), memory or (ck, cv)
    W = capacity(ck, step)
    at = at if W else replace(at, n=0)
    probs = at.n > 0 and at.importance == "probs"
    scores_of = NOTHING if at.n == 0 else EACH if probs or not at.shared else SUM
    if window is None and scores_of is not EACH and at.stride == 1:
        to = shares_ahead(q, k, v, ck, cv, 0 if memory is None else mem_k.shape[1], step, at)
        if to is not None:
            tensors = (q, k, v, ck, cv, mem_k, mem_v, gates, cq, sinks, counters, out)
            return attend_ahead(tensors, memory is not None, to, step, at)
    # the window covers the local blocks, and its keys are the selection's
    fused = window is None and 0 < at.num_local * at.s <= at.w + 1

    wide, narrow = (decode_tile(kernel, max(D, E), q.dtype) for kernel in ("windows", "blocks"))
    heads, block_s = triton.next_power_of_2(G), launch.padded(at.s)
    block_m = max(16, heads, min(wide.block_m, triton.next_power_of_2(T) * heads))
    keys = max(block_s, narrow.block_n)
    most_items = max(2, keys // block_s, near_blocks(at), listed_blocks(at, fused))
    most_items = triton.next_power_of_2(most_items)
    to = share_out(q, K, E, W, ranks, block_m, keys, wide.block_n, fused, at)
    rank, rank_chunks = ranking_tile(W, at)
    joins = triton.cdiv(T * G, to.join_rows) * triton.cdiv(E, to.join_columns)
    tokens = B * ranks * T
    programs = B * K * (to.cmp * to.tiles + joins)
    programs += tokens * (to.probabilities + (at.n > 0) + to.near + to.far)
    room = programs <= ROOM
    blocks, ranking_programs, ranked = triton.cdiv(capacity(k, step), at.s), 0, 0
    if at.n:
        ranking_programs, ranked = rankers(blocks, tokens, ROOM_TO_RANK - programs, at)
        programs += tokens * (ranking_programs - 1)
    # pages take longer to be read; rows are faster with their values asked for before they count
    early = room and at.n > 0 and not probs and to.cmp * wide.block_n >= W and step.page > 0
    pages = 0 if step.table is None else step.table.shape[1]
    held = max(32, triton.next_power_of_2(pages)) if room and 0 < pages <= MOST_PAGES else 0

    parts = q.new_empty(to.parts, B, T, H, E, dtype=torch.float32)
    part_lse = parts.new_empty(to.parts, B, T, H)
    scored = {NOTHING.value: 0, SUM.value: K, EACH.value: H}[scores_of.value]
    scores = parts.new_empty(B, T, scored, W)
    lists = counters.new_empty(B, T, ranks, at.n)
    ring = ranking if ranking is not None and at.stride > 1 and at.n else lists
    strides = {}
    for name, t in (("p", cq), ("q", q)):
        strides |= launch.strides(name, t, "bth")
    for name, t in (("k", k), ("v", v), ("x", wk), ("y", wv), ("c", ck), ("o", cv)):
        strides |= launch.strides(name, t, "bnh")
    for name, t in (("m", mem_k), ("u", mem_v)):
        strides |= launch.strides(name, t if memory else None, "hm")
    decode.step_kernel[(programs,)](
        cq=cq, q=q, k=k, v=v, wk=wk, wv=wv, ck=ck, cv=cv, mem_k=mem_k, mem_v=mem_v, gates=gates,
        sinks=part_lse if sinks is None else sinks.float().contiguous(), ring=ring, scores=scores,
        importances=parts.new_empty(B, T, ranks, W) if probs else scores, lists=lists, parts=parts,
        part_lse=part_lse, counters=counters, out=out, B=B, T=T, H=H, K=K, RANKS=ranks, W=W,
        MEMORY=0 if memory is None else mem_k.shape[1], scale_log2=at.scale * launch.LOG2_E,
        **launch.cap(at.soft_cap), TILES=to.tiles, PROB_SPLITS=to.probabilities, CMP_SPLITS=to.cmp,
        NEAR_SPLITS=to.near, FAR_SPLITS=to.far, NEAR_ITEMS=to.near_items, FAR_ITEMS=to.far_items,
        JOINS=joins, **strides, **launch.strides("g", gates, "bth3"), **step.arguments(),
        WINDOW_PAGE=0 if step.table is None else step.page // at.d, **widths(k, v), G=G,
        HEADS=heads, SHARE=ranks // K, BLOCK_M=block_m, BLOCK_N=wide.block_n,
        BLOCK_G=launch.padded(H // ranks), BLOCK_W=BLOCK_W,
        BLOCK_CMP=triton.next_power_of_2(to.cmp), BLOCK_SPLITS=triton.next_power_of_2(to.parts),
        JOIN_ROWS=to.join_rows, JOIN_COLUMNS=to.join_columns, STAGES=wide.num_stages, KEYS=keys,
        BLOCK_STAGES=narrow.num_stages if keys <= 64 else 1, RANK_CHUNKS=rank_chunks,
        RANK_N=rank.block_n, COLUMNS=rank.columns, DEPTH=min(rank.depth, at.n),
        MERGE_N=rank.merge_n, l=at.l, d=at.d, s=at.s, BLOCK_S=block_s, w=at.w, SLOTS=at.n,
        SLOTS_2=max(2, triton.next_power_of_2(at.n)), INITIAL=at.num_initial, LOCAL=at.num_local,
        LISTED=listed_blocks(at, fused), ITEMS_2=most_items, STRIDE=at.stride,
        RING=0 if ring is lists else ring.shape[2], SCORES=scores_of.value, PROBS=probs,
        INTERPOLATED=at.interpolated, FUSED=fused, SINKS=sinks is not None,
        COUNTERS=counters.shape[2], OWN_WINDOW=window is not None, ROOM=room, EARLY=early,
        PAGES=pages, TABLE=held, RANKERS=ranking_programs, RANKED=ranked, COMPARED=COMPARED,
        CHUNKS=min(ASKED, triton.next_power_of_2(triton.cdiv(blocks, COMPARED))),
        num_warps=wide.num_warps, num_stages=1,
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class SharesAhead:
    """Of a step whose blocks are all read: shares of each token and KV head, of windows, memory and
    blocks, the last so many to a program, and the places that those have which are joined."""

    cmp: int
    memory: int
    blocks: int
    items: int
    listed: int

    @property
    def before(self) -> int:
        """Blocks: one more has what the window cuts of its."""
        return self.cmp + self.memory + 1

    @property
    def programs(self) -> int:
        return self.before + triton.cdiv(self.blocks, self.items)


def shares_ahead(
    q: Tensor, k: Tensor, v: Tensor, ck: Tensor, cv: Tensor, memory: int, step: Step, at: Settings
) -> SharesAhead | None:
    """Where little is to be read; None where it is too much."""
    (B, T, _, D), K, E = q.shape, k.shape[2], v.shape[-1]
    block_s = launch.padded(at.s)
    tokens, W, most = (
        capacity(k, step),
        capacity(ck, step),
        AHEAD if step.table is None else AHEAD_PAGED,
    )
    blocks, cmp, mem = (
        triton.cdiv(n, size) for n, size in ((tokens, at.s), (W, block_s), (memory, block_s))
    )
    # each selected block has a place, and so has each that the window may reach into
    selected = at.n + at.num_initial + max(at.num_local, near_blocks(at) - 1)
    listed = triton.next_power_of_2(cmp + mem + 1 + selected)
    bytes_of_block = block_s * launch.padded(max(D, E)) * q.element_size()
    far = max(tokens * max(k.stride(1), v.stride(1)), W * max(ck.stride(1), cv.stride(1)))
    fits = blocks <= AHEAD_BLOCKS and listed <= AHEAD_SHARES and bytes_of_block <= AHEAD_BYTES
    if B * T * K * blocks > most or not fits or far >= 2**31:
        return None
    return SharesAhead(cmp, mem, blocks, triton.cdiv(B * T * K * blocks, AHEAD_ITEMS), listed)


def attend_ahead(
    tensors: tuple[Any, ...], has_memory: bool, to: SharesAhead, step: Step, at: Settings
) -> Tensor:
    """The step by `decode_ahead.py`."""
    q, k, v, ck, cv, mem_k, mem_v, gates, cq, sinks, counters, out = tensors
    (B, T, H, _), K, E = q.shape, k.shape[2], v.shape[-1]
    W, N = capacity(ck, step), capacity(k, step)
    columns = min(launch.padded(E), AHEAD_COLUMNS)
    joins = triton.cdiv(H // K, AHEAD_ROWS) * triton.cdiv(E, columns)
    parts = q.new_empty(to.before + to.blocks, B, T, H, E, dtype=torch.float32)
    part_lse = parts.new_empty(parts.shape[:-1])
    cq = q if cq is None else cq
    strides = {}
    for name, t in (("p", cq), ("q", q)):
        strides |= launch.strides(name, t, "bth")
    for name, t in (("k", k), ("v", v), ("c", ck), ("o", cv)):
        strides |= launch.strides(name, t, "bnh")
    for name, t in (("m", mem_k), ("u", mem_v)):
        strides |= launch.strides(name, t if has_memory else None, "hm")
    programs = B * T * K * (to.programs + joins)
    decode_ahead.ahead_kernel[(programs,)](
        cq=cq, q=q, k=k, v=v, ck=ck, cv=cv, mem_k=mem_k, mem_v=mem_v, gates=gates,
        sinks=part_lse if sinks is None else sinks.float().contiguous(),
        scores=parts.new_empty(B, T, K, W), lists=counters.new_empty(programs, to.listed),
        parts=parts, part_lse=part_lse, counters=counters, out=out, B=B, T=T, K=K, W=W, N=N,
        MEMORY=mem_k.shape[1] if has_memory else 0, CMP_SHARES=to.cmp, MEM_SHARES=to.memory,
        BLOCK_SHARES=to.blocks, scale_log2=at.scale * launch.LOG2_E, **launch.cap(at.soft_cap),
        **strides, **launch.strides("g", gates, "bth3"), **step.arguments(),
        WINDOW_PAGE=0 if step.table is None else step.page // at.d, **widths(k, v), G=H // K,
        BLOCK_G=launch.padded(H // K), ROWS=AHEAD_ROWS, COLUMNS=columns, ITEMS=to.items,
        SLOTS=at.n, BLOCKS=max(32, triton.next_power_of_2(to.blocks)), LISTED=to.listed, l=at.l,
        d=at.d, s=at.s, BLOCK_S=launch.padded(at.s), w=at.w, INITIAL=at.num_initial,
        LOCAL=at.num_local, INTERPOLATED=at.interpolated, SINKS=sinks is not None,
        COUNTERS=counters.shape[2], num_warps=4, num_stages=1, maxnreg=AHEAD_REGISTERS,
    )  # fmt: skip
    return out
