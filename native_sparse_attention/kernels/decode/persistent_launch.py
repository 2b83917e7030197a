"""The launch of `persistent.py`. Nothing here asks the device for a length: a CUDA graph can
capture a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..common import launch
from ..common.counts import cdiv, next_power_of_2
from ..common.tile_configs import MOST_IN_LISTS, RankingTile, Tile
from . import persistent, read_all_launch
from .call import Call, Settings
from .split_kv import EACH, NOTHING, SUM

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


def decode_tile(kernel: str, width: int, dtype: torch.dtype) -> Tile:
    tile = TILES_FLOAT32 if dtype == torch.float32 else launch.row(TILES[kernel], width)
    return launch.override.get(f"decode.{kernel}", tile)


def splits_of(programs: int, room: int, pieces: int) -> int:
    """Into how many shares each of so many programs goes to fill the GPU."""
    return max(1, min(room // max(1, programs), pieces, MOST_SPLITS))


def shares_of_blocks(programs: int, blocks: int, at_once: int, least: int = 1) -> tuple[int, int]:
    """Blocks of a share, at least so many and as many as are read at once; and shares of them."""
    each = cdiv(blocks, splits_of(programs, PROGRAMS["blocks"], blocks))
    each = cdiv(max(1, each, least), at_once) * at_once
    return each, cdiv(blocks, each)


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
    call: Call, ranks: int, block_m: int, keys: int, block_n: int, fused: bool, at: Settings
) -> Shares:
    B, T, H, K, _, E = call.sizes
    tiles = cdiv(T * next_power_of_2(H // K), block_m)
    tokens, at_once = B * ranks * T, keys // launch.padded(at.s)
    cmp = splits_of(B * K * tiles, PROGRAMS["windows"], cdiv(call.windows, block_n))
    probabilities = splits_of(tokens, PROGRAMS["windows"], cdiv(call.windows, BLOCK_W))
    local = at.num_local * fused  # a share of their own
    near_items, near = shares_of_blocks(tokens, at.near_blocks - local, at_once, local)
    far_items, far = shares_of_blocks(tokens, listed_blocks(at, fused), at_once)
    near += fused

    parts, columns = next_power_of_2(cmp + near + far), launch.padded(E)
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


def rankers(blocks: int, tokens: int, room: int, at: Settings) -> tuple[int, int]:
    """Programs that rank the blocks of a token, and how many each, where there is room for more
    than one; else that one, which keeps lists of the best."""
    least, most = RANKED
    programs = min(cdiv(blocks, least), 1 + max(0, room) // tokens)
    ranked = max(least, next_power_of_2(cdiv(blocks, programs)))
    if programs == 1 or ranked > most or at.stride > 1:
        return 1, 0
    return cdiv(blocks, ranked), ranked


def listed_blocks(at: Settings, fused: bool) -> int:
    """Blocks that a token selects, but for the local ones where the window has them."""
    return at.n + at.num_initial + (0 if fused else at.num_local)


def ranking_tile(W: int, at: Settings) -> tuple[RankingTile, int]:
    """And chunks of its blocks whose scores are asked for at once."""
    tile = replace(RANKING, merge_n=max(RANKING.merge_n, next_power_of_2(at.n)))
    if at.n > MOST_IN_LISTS:
        return replace(tile, block_n=tile.merge_n, columns=0, depth=0), 1
    chunks = cdiv(max(1, W * at.d // at.s), tile.block_n)
    return tile, min(RANK_CHUNKS, next_power_of_2(chunks))


def attend(call: Call, at: Settings) -> Tensor:
    """The step, [B T H E]: see `ops.decode`."""
    B, T, H, K, D, E = call.sizes
    W, G, ranks = call.windows, H // K, K if at.shared else H
    out = call.empty()
    if out.numel() == 0:
        return out
    at = at if W else replace(at, n=0)
    probs = at.n > 0 and at.importance == "probs"
    scores_of = NOTHING if at.n == 0 else EACH if probs or not at.shared else SUM
    if call.window is None and scores_of is not EACH and at.stride == 1:
        ahead = read_all_launch.share_out(call, at)
        if ahead is not None:
            return read_all_launch.attend(call, ahead, at)
    # the window covers the local blocks, and its keys are the selection's
    fused = call.window is None and 0 < at.num_local * at.s <= at.w + 1

    wide, narrow = (
        decode_tile(kernel, max(D, E), call.q.dtype) for kernel in ("windows", "blocks")
    )
    heads, block_s = next_power_of_2(G), launch.padded(at.s)
    block_m = max(16, heads, min(wide.block_m, next_power_of_2(T) * heads))
    keys = max(block_s, narrow.block_n)
    most_items = max(2, keys // block_s, at.near_blocks, listed_blocks(at, fused))
    most_items = next_power_of_2(most_items)
    to = share_out(call, ranks, block_m, keys, wide.block_n, fused, at)
    rank, rank_chunks = ranking_tile(W, at)
    joins = cdiv(T * G, to.join_rows) * cdiv(E, to.join_columns)
    tokens = B * ranks * T
    programs = B * K * (to.cmp * to.tiles + joins)
    programs += tokens * (to.probabilities + (at.n > 0) + to.near + to.far)
    room = programs <= ROOM
    blocks, ranking_programs, ranked = cdiv(call.tokens, at.s), 0, 0
    if at.n:
        ranking_programs, ranked = rankers(blocks, tokens, ROOM_TO_RANK - programs, at)
        programs += tokens * (ranking_programs - 1)
    # pages take longer to be read; rows are faster with their values asked for before they count
    early = room and at.n > 0 and not probs and to.cmp * wide.block_n >= W and call.step.page > 0
    held = 0
    if room and call.step.page > 0 and call.pages <= MOST_PAGES:
        held = max(32, next_power_of_2(call.pages))

    parts, part_lse = call.shares(to.parts)
    scored = {NOTHING.value: 0, SUM.value: K, EACH.value: H}[scores_of.value]
    scores = parts.new_empty(B, T, scored, W)
    block_indices = call.counters.new_empty(B, T, ranks, at.n)
    ring = call.ranking if call.ranking is not None and at.stride > 1 and at.n else block_indices
    wk, wv = call.window or (call.k, call.v)
    persistent.nsa_decode_persistent[(programs,)](
        **call.arguments(at), **launch.strides("x", wk, "bnh"), **launch.strides("y", wv, "bnh"),
        wk=wk, wv=wv, ring=ring, scores=scores, block_indices=block_indices, parts=parts,
        part_lse=part_lse, importances=parts.new_empty(B, T, ranks, W) if probs else scores,
        out=out, H=H, RANKS=ranks, TILES=to.tiles, PROB_SPLITS=to.probabilities, CMP_SPLITS=to.cmp,
        NEAR_SPLITS=to.near, FAR_SPLITS=to.far, NEAR_ITEMS=to.near_items, FAR_ITEMS=to.far_items,
        JOINS=joins, PAGES=call.pages, RANKERS=ranking_programs, HEADS=heads, SHARE=ranks // K,
        BLOCK_M=block_m, BLOCK_N=wide.block_n, BLOCK_G=launch.padded(H // ranks), BLOCK_W=BLOCK_W,
        BLOCK_CMP=next_power_of_2(to.cmp), BLOCK_SPLITS=next_power_of_2(to.parts),
        JOIN_ROWS=to.join_rows, JOIN_COLUMNS=to.join_columns, STAGES=wide.num_stages, KEYS=keys,
        BLOCK_STAGES=narrow.num_stages if keys <= 64 else 1, RANK_CHUNKS=rank_chunks,
        RANK_N=rank.block_n, COLUMNS=rank.columns, DEPTH=min(rank.depth, at.n),
        MERGE_N=rank.merge_n, RANKED=ranked, COMPARED=COMPARED,
        CHUNKS=min(ASKED, next_power_of_2(cdiv(blocks, COMPARED))),
        SLOTS_2=max(2, next_power_of_2(at.n)), LISTED=listed_blocks(at, fused),
        ITEMS_2=most_items, STRIDE=at.stride, RING=0 if ring is block_indices else ring.shape[2],
        SCORES=scores_of.value, PROBS=probs, FUSED=fused, OWN_WINDOW=call.window is not None,
        ROOM=room, EARLY=early, TABLE=held, num_warps=wide.num_warps, num_stages=1,
    )  # fmt: skip
    return out
