"""The CSR of block indices, whole and in chunks, against torch's stable sort."""

import pytest
import torch

from native_sparse_attention.kernels.selected import key_major
from tests.helpers import interpreter
from tests.helpers.budget import DEVICE

pytestmark = pytest.mark.kernels

# B, T, head groups, slots, KV heads, blocks, pairs of a work tile, tokens and KV heads of a chunk
CASES = [
    (1, 40, 1, 3, 1, 5, 4, 40, 1),
    (2, 37, 4, 3, 2, 9, 4, 16, 2),
    (2, 37, 8, 3, 4, 9, 4, 16, 2),
    (3, 5, 6, 2, 3, 1, 2, 5, 1),
    (1, 900, 2, 5, 1, 40, 64, 900, 1),
    (1, 700, 2, 5, 2, 300, 64, 300, 2),
    (1, 3, 1, key_major.SPLIT_PAIRS + 8, 1, 4, 1 << 14, 3, 1),
    pytest.param((1, 65536, 4, 13, 4, 1024, 1024, 65536, 4), marks=pytest.mark.gpu),
    pytest.param((1, 8192, 32, 13, 32, 128, 16384, 2048, 32), marks=pytest.mark.gpu),
    pytest.param((1, 8192, 32, 13, 32, 128, 16384, 8192, 8), marks=pytest.mark.gpu),
]


@pytest.fixture(autouse=True)
def numbered(monkeypatch, runnable):
    """As on a GPU, also in the interpreter."""
    if interpreter.OWN:
        monkeypatch.setattr(key_major, "COUNT_PAIRS", interpreter.OWN["COUNT_PAIRS"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pairs_and_work_tiles(case):
    """Pairs are sorted by block, stably. Every pair is in one work tile of its block."""
    B, T, R, n, K, C, tile_pairs, length, heads = case
    block_indices = torch.randint(-1, C, (B, T, R, n), dtype=torch.int32, device=DEVICE)
    token, head = torch.arange(T, device=DEVICE), torch.arange(R, device=DEVICE) * K // R
    row = torch.arange(B, device=DEVICE)[:, None, None]
    chunk = head // heads * -(-T // length) + token[:, None] // length
    line = (chunk * B + row) * heads + head % heads
    block = torch.where(block_indices >= 0, line[..., None] * C + block_indices, -1).view(-1)
    order = block.argsort(stable=True)
    order = order[block[order] >= 0]
    table = key_major.CSR(block_indices, K, C, tile_pairs, length, heads)
    table.write(block_indices)
    chunks = list(table.chunks())
    expected = [(h, t) for h in range(0, K, heads) for t in range(0, T, length)]
    assert [(chunk.head, chunk.first) for chunk in chunks] == expected
    assert sum(chunk.length for chunk in chunks) * heads == T * K
    blocks = B * heads * C
    counts = block[order].bincount(minlength=len(chunks) * blocks)
    for number, chunk in enumerate(chunks):
        chunk_counts = counts[number * blocks :][:blocks]
        skipped = counts[: number * blocks].sum()
        offsets, partial_offsets = (
            t[: blocks + 1] for t in (chunk.csr.offsets, chunk.csr.partial_offsets)
        )
        assert torch.equal(offsets.diff().long(), chunk_counts)
        pairs = order[skipped : skipped + chunk_counts.sum()]
        assert torch.equal(table.pairs[offsets[0] : offsets[-1]].long(), pairs)
        indices = table.pair_indices.view(-1)
        assert torch.equal(indices[pairs].long(), torch.arange(len(pairs), device=DEVICE))
        assert (indices[block < 0] == -1).all()
        num_tiles = (chunk_counts + tile_pairs - 1) // tile_pairs
        count, owner = int(num_tiles.sum()), chunk.csr.owner.long()
        assert (owner[count:] == blocks).all()
        owner, ordinals = owner[:count], chunk.csr.ordinals[:count].long()
        work_tiles = torch.stack((owner, ordinals), 1)
        owners = torch.arange(blocks, device=DEVICE).repeat_interleave(num_tiles)
        first_tiles = num_tiles.cumsum(0) - num_tiles
        numbers = torch.arange(count, device=DEVICE) - first_tiles[owners]
        assert torch.equal(work_tiles.unique(dim=0), torch.stack((owners, numbers), 1))
        several = torch.where(num_tiles > 1, num_tiles, 0)
        assert torch.equal(partial_offsets.diff().long(), several)
