"""The selection turned round, against torch's stable sort."""

from __future__ import annotations

import interpreter
import pytest
import torch

pytest.importorskip("triton")
from native_sparse_attention.kernels.listed import inverse
from native_sparse_attention.kernels.listed.inverse import SHARE, invert

pytestmark = pytest.mark.kernels
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# B, T, lists of a token, slots, KV heads, blocks, entries of an item, tokens of a span
CASES = [
    (1, 40, 1, 3, 1, 5, 4, 40),
    (2, 37, 4, 3, 2, 9, 4, 16),
    (3, 5, 6, 2, 3, 1, 2, 5),
    (1, 900, 2, 5, 1, 40, 64, 900),
    (1, 700, 2, 5, 2, 300, 64, 300),
    pytest.param((1, 65536, 4, 13, 4, 1024, 1024, 65536), marks=pytest.mark.gpu),
    pytest.param((1, 8192, 32, 13, 32, 128, 16384, 2048), marks=pytest.mark.gpu),
]


@pytest.fixture(autouse=True)
def numbered(monkeypatch, runnable):
    """As on a GPU, also in the interpreter."""
    monkeypatch.setattr(inverse, "NUMBERED", interpreter.OWN.get("NUMBERED", inverse.NUMBERED))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_entries_lie_by_block_in_their_own_order(case):
    B, T, R, n, K, C, chunk, length = case
    lists = torch.randint(-1, C, (B, T, R, n), dtype=torch.int32, device=DEVICE)
    token, head = torch.arange(T, device=DEVICE), torch.arange(R, device=DEVICE) * K // R
    row = torch.arange(B, device=DEVICE)[:, None, None, None]
    line = (token[:, None] // length * B + row[..., 0]) * K + head
    block = torch.where(lists >= 0, line[..., None] * C + lists, -1).view(-1)
    order = block.argsort(stable=True)
    order = order[block[order] >= 0]
    spans = invert(lists, K, C, chunk, length)
    assert [span.first for span in spans] == list(range(0, T, length))
    assert sum(span.length for span in spans) == T
    counts = block[order].bincount(minlength=len(spans) * B * K * C)
    for number, span in enumerate(spans):
        own = counts[number * B * K * C :][: B * K * C]
        before = counts[: number * B * K * C].sum()
        begin, end = span.bounds[0], span.bounds[-1]
        assert torch.equal(span.bounds.diff().long(), own)
        assert torch.equal(span.entries[begin:end].long(), order[before : before + own.sum()])
        # every entry belongs to one item, of its own block
        items = (own + chunk - 1) // chunk
        owners = torch.arange(B * K * C, device=DEVICE).repeat_interleave(items)
        assert torch.equal(span.owner[: len(owners)].long(), owners)
        assert (span.owner[len(owners) :] == B * K * C).all()


def test_lists_of_more_slots_than_a_share_has_entries():
    slots = torch.arange(SHARE + 8, device=DEVICE, dtype=torch.int32) % 4
    lists = slots.expand(1, 3, 1, -1)
    (span,) = invert(lists, 1, 4, 1 << 14, 3)
    assert torch.equal(span.entries.long(), lists.reshape(-1).argsort(stable=True))
