"""Unions of the block indices of neighbours: which groups have one, and that the selected branch is
right where some groups have a union and some do not."""

import itertools
from dataclasses import replace

import pytest
import torch

from native_sparse_attention import selected_attention
from native_sparse_attention.config import AttentionConfig
from native_sparse_attention.kernels.common import launch
from native_sparse_attention.kernels.common.launch import Selection, UnionRule
from native_sparse_attention.kernels.selected import query_major
from native_sparse_attention.kernels.selected.inputs import Inputs
from native_sparse_attention.ops.call import Call
from native_sparse_attention.ops.triton.attention import attention
from tests.helpers.budget import CUDA, DEVICE, assert_right
from tests.helpers.calls import draw

pytestmark = pytest.mark.kernels

GROUP = 4
RULE = UnionRule(GROUP, 1.6, min_groups=0)


def make_unions(selection, H):
    """Unions of a call; None without unions."""
    B, T, R, _ = selection.block_indices.shape
    q, k = (torch.empty(B, T, heads, 16, dtype=torch.float16, device=DEVICE) for heads in (H, R))
    return query_major.allocate_unions(Inputs(q, k, k, selection, 0.1))


def draw_lists(B, T, R, n, num_blocks, size=GROUP):
    """For groups of `size` neighbours in turn: alike in another order, not alike, alike but for a
    block, alike with empty slots, and empty; in each row of the batch groups begin elsewhere."""
    lists = torch.full((B, T, R, n), -1, dtype=torch.int32)
    for b, t, r in itertools.product(range(B), range(T), range(R)):
        group, i = divmod(t + b, size)
        alike = torch.Generator().manual_seed(100 * b + 10 * r + group)
        blocks = torch.randperm(num_blocks, generator=alike)
        kind = (group + r) % 5
        if kind == 1:
            blocks = blocks.roll(i * n)
        elif kind == 2:
            blocks[n - 1 :] = blocks[n - 1 :].roll(i)
        blocks = blocks[:n][torch.randperm(n)]
        if kind == 3:
            blocks[torch.randperm(n)[: n // 2]] = -1
        if kind != 4:
            lists[b, t, r] = blocks
    return lists.to(DEVICE)


def test_calls_without_unions():
    lists = draw_lists(1, 16, 1, 3, 9)
    selection = Selection(lists, 8, 0, 1, True)
    gated = replace(selection, gates=torch.ones(lists.shape, device=DEVICE))
    with launch.using({"union": RULE}):
        assert make_unions(selection, 16) is not None
        assert make_unions(gated, 16) is None
        assert make_unions(selection, 64) is None, "more rows than a tile has"
        assert make_unions(replace(selection, block_indices=lists[..., :0]), 16) is None
    assert make_unions(selection, 16) is None, "few tokens"
    assert launch.union_rule(16, torch.float32) is None
    assert launch.union_rule(8, torch.float16) is None, "the forward is key-major"
    with launch.using({"union": None}):
        assert launch.union_rule(16, torch.float16) is None


CASES = [
    (torch.float32, (12, 1, 16, 16), {}),
    (torch.float16, (16, 1, 16, 24), {"num_local": 0}),
    (torch.float32, (6, 1, 16, 16), {"starts": [43, 46], "num_local": 0, "stride": 2}),
    (torch.float32, (12, 1, 16, 16), {"num_initial": 1}),
    (torch.float32, (12, 1, 16, 16), {"num_local": 0}),
]
if CUDA:
    CASES += [
        (torch.bfloat16, (64, 4, 128, 128), {}),
        (torch.bfloat16, (64, 4, 128, 128), {"num_local": 0}),
        (torch.bfloat16, (48, 4, 192, 128), {"causal": False, "num_initial": 1}),
        (torch.bfloat16, (16, 4, 64, 64), {"start": 203, "num_local": 2, "stride": 4}),
        (torch.bfloat16, (24, 2, 64, 64), {"starts": [200, 189]}),
    ]


@pytest.mark.slow(one_of=2)
@pytest.mark.parametrize(
    "dtype, heads, settings", CASES, ids=lambda value: str(value).replace("torch.", "")
)
def test_selected(monkeypatch, dtype, heads, settings):
    """Groups with a union and groups without in one call. Bits: test_same_bits.py."""
    has_union, write = [], query_major.Unions.write

    def record(unions, selection):
        write(unions, selection)
        has_union.append(unions.counts.flatten() > 0)

    monkeypatch.setattr(query_major.Unions, "write", record)
    monkeypatch.setattr(query_major, "plan", query_major.plan.__wrapped__)  # not cached
    B, T, S, n, s = (2, 301, 504, 13, 4) if CUDA else (1, 14, 60, 3, 4)
    at = {"num_initial": 0, "num_local": 1, "causal": True, "stride": 1, "starts": None}
    at |= {"start": 0 if "starts" in settings else S - T, **settings}
    firsts = [at["start"]] * 2
    if at["starts"] is not None:
        # far enough that as many blocks lie behind
        firsts = [start + (112 if CUDA else 0) for start in at["starts"]]
        B, at["starts"] = 2, torch.tensor(firsts, device=DEVICE)
    tensors = draw("selected", dtype, place=(T, S), heads=heads, batch=B).tensors
    lists = draw_lists(B, T, heads[1], n, min(firsts) // s, GROUP * at["stride"])
    for b, t in itertools.product(range(B), range(T)):
        lists[b, t] = lists[b, max(t - (firsts[b] + t) % at["stride"], 0)]
        if at["num_local"] == 0 and (firsts[b] + t) // 2 % 2:
            lists[b, t, :, 0] = (firsts[b] + t) // s
    offset = at["start"] if at["starts"] is None else at["starts"]
    sizes = dict(
        selection_block_size=s, num_initial_blocks=at["num_initial"],
        num_local_blocks=at["num_local"], causal=at["causal"],
    )  # fmt: skip

    def op(q, k, v, backend):
        if backend == "triton":
            config = AttentionConfig.unchecked(
                **sizes, branches=("selected",), selection_stride=at["stride"]
            )
            return attention(Call(q, k, v, block_indices=lists, q_offset=offset), config)[:2]
        return selected_attention(
            q, k, v, lists, **sizes, return_lse=True, backend=backend, q_offset=offset
        )

    with launch.using({"union": RULE}):
        assert_right(op, tensors, dtype)
    assert torch.cat(has_union).any() and not torch.cat(has_union).all()


@pytest.mark.parametrize("n, T, blocks", [(5, 37, 40), (1, 8, 3), (33, 19, 40)])
def test_unions_in_chunks(n, T, blocks):
    """All blocks of 8 neighbours, each once, with those that chose it."""
    B, R = 2, 2
    lists = torch.full((B, T, R, n), -1, dtype=torch.int32)
    for b, t, r in itertools.product(range(B), range(T), range(R)):
        count = int(torch.randint(n + 1, ()))
        lists[b, t, r, :count] = torch.randperm(blocks)[:count].int()
    selection = Selection(lists.to(DEVICE), 8, 0, 1, True)
    unions = query_major.allocate(selection, 8, min(8 * n, blocks))
    unions.write(selection)

    for b, r, group in itertools.product(range(B), range(R), range(-(-T // 8))):
        members = {}
        for i, row in enumerate(lists[b, 8 * group : 8 * group + 8, r].tolist()):
            for c in row:
                members[c] = members.get(c, 0) | 1 << i
        members.pop(-1, None)
        entries = unions.blocks[b, r, group, : unions.counts[b, r, group]].tolist()
        assert sorted((e & 0xFFFFFFFF, e >> 32) for e in entries) == sorted(members.items())
