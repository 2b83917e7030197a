"""The launch of `read_all.py`, and where it is the faster way."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..common import launch
from ..common.counts import cdiv, next_power_of_2
from . import read_all
from .call import Call, Settings

# blocks of all tokens and KV heads, in rows and in pages; those of one; bytes of a block's keys;
# places for a token's shares
MOST, MOST_IN_PAGES, BLOCKS, BYTES, SHARES = 512, 256, 128, 16384, 64
# programs for blocks; rows and features that one joins; registers of a thread where three programs
# run on a multiprocessor
ITEMS, ROWS, COLUMNS, REGISTERS = 256, 4, 32, 168


@dataclass(frozen=True)
class Shares:
    """Of each token and KV head, of windows, memory and blocks, the last so many to a program, and
    the places that those have which are joined."""

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
        return self.before + cdiv(self.blocks, self.items)


def share_out(call: Call, at: Settings) -> Shares | None:
    """Where little is to be read; None where it is too much."""
    B, T, _, K, D, E = call.sizes
    block_s, most = launch.padded(at.s), MOST if call.step.table is None else MOST_IN_PAGES
    blocks = cdiv(call.tokens, at.s)
    cmp, memory = (cdiv(n, block_s) for n in (call.windows, call.memories))
    # each selected block has a place, and so has each that the window may reach into
    selected = at.n + at.num_initial + max(at.num_local, at.near_blocks - 1)
    listed = next_power_of_2(cmp + memory + 1 + selected)
    bytes_of_block = block_s * launch.padded(max(D, E)) * call.q.element_size()
    fits = blocks <= BLOCKS and listed <= SHARES and bytes_of_block <= BYTES
    furthest = max(
        n * t.stride(1)
        for n, pair in ((call.tokens, (call.k, call.v)), (call.windows, (call.ck, call.cv)))
        for t in pair
    )
    if B * T * K * blocks > most or not fits or furthest >= 1 << 31:
        return None
    return Shares(cmp, memory, blocks, cdiv(B * T * K * blocks, ITEMS), listed)


def attend(call: Call, to: Shares, at: Settings) -> Tensor:
    """The step, [B T H E]."""
    B, T, H, K, _, E = call.sizes
    columns, out = min(launch.padded(E), COLUMNS), call.empty()
    joins = cdiv(H // K, ROWS) * cdiv(E, columns)
    programs = B * T * K * (to.programs + joins)
    parts, part_lse = call.shares(to.before + to.blocks)
    read_all.nsa_decode_read_all[(programs,)](
        **call.arguments(at), N=call.tokens, scores=parts.new_empty(B, T, K, call.windows),
        block_indices=call.counters.new_empty(programs, to.listed), parts=parts, part_lse=part_lse,
        out=out, CMP_SHARES=to.cmp, MEM_SHARES=to.memory, BLOCK_SHARES=to.blocks,
        BLOCK_G=launch.padded(H // K), ROWS=ROWS, COLUMNS=columns, ITEMS=to.items,
        BLOCKS=max(32, next_power_of_2(to.blocks)), LISTED=to.listed, num_warps=4,
        num_stages=1, maxnreg=REGISTERS,
    )  # fmt: skip
    return out
