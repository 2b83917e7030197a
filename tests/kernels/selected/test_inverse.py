"""The selection turned round, against torch's stable sort."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import interpreter

pytest.importorskip("triton")
from native_sparse_attention.kernels.common import launch
from native_sparse_attention.kernels.selected import csr
from native_sparse_attention.kernels.selected import workspace as spans
from native_sparse_attention.kernels.selected.csr import SPLIT_PAIRS

pytestmark = pytest.mark.kernels
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# B, T, lists of a token, slots, KV heads, blocks, entries of an item, tokens and KV heads of a span
CASES = [
    (1, 40, 1, 3, 1, 5, 4, 40, 1),
    (2, 37, 4, 3, 2, 9, 4, 16, 2),
    (2, 37, 8, 3, 4, 9, 4, 16, 2),
    (3, 5, 6, 2, 3, 1, 2, 5, 1),
    (1, 900, 2, 5, 1, 40, 64, 900, 1),
    (1, 700, 2, 5, 2, 300, 64, 300, 2),
    pytest.param((1, 65536, 4, 13, 4, 1024, 1024, 65536, 4), marks=pytest.mark.gpu),
    pytest.param((1, 8192, 32, 13, 32, 128, 16384, 2048, 32), marks=pytest.mark.gpu),
    pytest.param((1, 8192, 32, 13, 32, 128, 16384, 8192, 8), marks=pytest.mark.gpu),
]


@pytest.fixture(autouse=True)
def numbered(monkeypatch, runnable):
    """As on a GPU, also in the interpreter."""
    monkeypatch.setattr(csr, "COUNT_PAIRS", interpreter.OWN.get("COUNT_PAIRS", csr.COUNT_PAIRS))


@pytest.mark.parametrize("longest", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_entries_lie_by_block_in_their_own_order(case, longest):
    B, T, R, n, K, C, chunk, length, heads = case
    lists = torch.randint(-1, C, (B, T, R, n), dtype=torch.int32, device=DEVICE)
    token, head = torch.arange(T, device=DEVICE), torch.arange(R, device=DEVICE) * K // R
    row = torch.arange(B, device=DEVICE)[:, None, None]
    span = head // heads * -(-T // length) + token[:, None] // length
    line = (span * B + row) * heads + head % heads
    block = torch.where(lists >= 0, line[..., None] * C + lists, -1).view(-1)
    order = block.argsort(stable=True)
    order = order[block[order] >= 0]
    spans = csr.allocate(lists, K, C, chunk, length, heads, longest).run(lists)
    firsts = [(h, t) for h in range(0, K, heads) for t in range(0, T, length)]
    assert [(span.head, span.first) for span in spans] == firsts
    assert sum(span.length * span.heads for span in spans) == T * K
    blocks = B * heads * C
    counts = block[order].bincount(minlength=len(spans) * blocks)
    for number, span in enumerate(spans):
        own = counts[number * blocks :][:blocks]
        before = counts[: number * blocks].sum()
        begin, end = span.offsets[0], span.offsets[-1]
        assert torch.equal(span.offsets.diff().long(), own)
        entries = order[before : before + own.sum()]
        assert torch.equal(span.pairs[begin:end].long(), entries)
        places = torch.arange(len(entries), device=DEVICE)
        assert torch.equal(span.pair_indices.view(-1)[entries].long(), places)
        assert (span.pair_indices.view(-1)[block < 0] == -1).all()
        # every entry belongs to one item, of its own block; by block, or of some blocks the longest
        # first
        items = (own + chunk - 1) // chunk
        count, owner = int(items.sum()), span.owner.long()
        assert (owner[count:] == blocks).all()
        owner, ordinals = owner[:count], span.ordinals[:count].long()
        each = torch.stack((owner, ordinals), 1)
        owners = torch.arange(blocks, device=DEVICE).repeat_interleave(items)
        firsts = items.cumsum(0) - items
        numbers = torch.arange(count, device=DEVICE) - firsts[owners]
        by_block = torch.stack((owners, numbers), 1)
        lengths = (own[owner] - ordinals * chunk).clamp(max=chunk)
        if longest:
            together = owner // csr.TILE_BLOCKS
            assert (together.diff() >= 0).all()
            shorter = lengths.diff() < chunk / csr.CLASSES
            assert (shorter | (together.diff() > 0)).all()
            each = each.unique(dim=0)
        assert torch.equal(each, by_block)
        several = torch.where(items > 1, items, 0)
        assert torch.equal(span.partial_offsets.diff().long(), several)


def test_lists_of_more_slots_than_a_share_has_entries():
    slots = torch.arange(SPLIT_PAIRS + 8, device=DEVICE, dtype=torch.int32) % 4
    lists = slots.expand(1, 3, 1, -1)
    lists = lists.contiguous()
    (span,) = csr.allocate(lists, 1, 4, 1 << 14, 3, 1).run(lists)
    assert torch.equal(span.pairs.long(), lists.reshape(-1).argsort(stable=True))


@pytest.mark.parametrize("kernel", ["forward", "backward"])
@pytest.mark.parametrize("T", [1, 100, 1024, 4096, 8192, 65536, 1 << 20])
@pytest.mark.parametrize("H, K", [(32, 32), (32, 8), (14, 7), (5, 1), (6, 3)])
def test_parts_of_a_span(H, K, T, kernel):
    """They take no more memory than they may, and spans are no shorter than they need be."""
    n = 13
    q, k = (torch.empty(1, T, heads, 128, device="meta") for heads in (H, K))
    lists = torch.empty(1, T, K, n, dtype=torch.int32, device="meta")
    found = spans.allocate(q, k, launch.Selection(lists, 64, 1, 2, True), kernel, H // K).chunks
    assert sum(span.length * span.heads for span in found) == T * K
    first = found[0]
    share, tokens, most = launch.row(spans.BUDGETS[kernel], H // K)
    # tokens whose parts, of all heads, may be kept
    allowed = int(max(min(max(share * T / n, tokens), most * T / n), spans.MIN_TOKENS))
    assert first.length * first.heads <= allowed * K
    if kernel == "forward":
        assert first.heads == K
    larger = [heads for heads in range(first.heads + 1, K + 1) if K % heads == 0]
    smaller = [heads for heads in range(1, first.heads) if K % heads == 0]
    of_tokens = len(found) * first.heads // K
    if of_tokens == 1 and kernel == "backward":  # of more heads the parts would take too much
        assert not larger or larger[0] * T > allowed * K
    else:  # in one span less too; and backward fewer heads would have too few blocks
        assert first.heads * T > (of_tokens - 1) * allowed * K
        assert (
            kernel == "forward" or not smaller or smaller[-1] * -(-T // 64) < launch.ENOUGH_PROGRAMS
        )
