"""Rankings that are hard for the kernels: ties, lists that lose blocks, many tokens, integers. The
table (`tests/ops/test_table.py`) holds the others."""

import math

import pytest
import torch

from native_sparse_attention import select_blocks
from native_sparse_attention.kernels.common import launch
from tests.helpers.budget import CUDA, DEVICE
from tests.helpers.selections import DTYPE, RULES, SETTINGS, assert_right, draw
from tests.helpers.sizes import sizes

pytestmark = pytest.mark.kernels


def select(q, ck, **settings):
    return select_blocks(q, ck, **{**SETTINGS, **settings}, backend="triton")


@pytest.mark.slow(one_of=2)
@pytest.mark.parametrize("l, d, s", [(8, 4, 4), (12, 4, 12), (40, 4, 16), (2, 1, 16)], ids=str)
def test_lists_that_lose_blocks(l, d, s):
    """Windows that reach into other blocks, over more blocks than a step takes, and blocks of more
    windows than a step takes of each; ranked in lists of one place each, and again by merging."""
    S = max(37 * s, 133 * d) + 3
    q, ck, mem_k = draw(3, S, 3, 1, 16, d=d, m=1, B=1)
    # what a step begins and ends with matters most
    q[..., 0] += 3
    ck[:, 63::64, :, 0] += 2
    ck[:, 64::64, :, 0] += 3
    call = dict(sizes(l, d, s), importance="probs", num_selected_blocks=5)
    lossy = launch.TopkTileConfig(16, 64, 16, 1, 4, 1, 32)
    with launch.using({"ranking.probs": lossy}):
        assert_right(q, ck, mem_k, S, **call)
        # candidates that end with a step
        assert_right(q, ck, mem_k, S, q_offset=64 * d, **call)


@pytest.mark.parametrize("columns, depth", [(0, 0), (8, 2), (8, 8), (32, 4)])
def test_chosen_scores(columns, depth):
    """All of them, and of few candidates: with ties, and in columns too short for some."""
    ascending, few_values = torch.arange(140) / 8, torch.randint(-2, 1, (2, 140))
    in_no_order = -ascending[torch.randperm(140)]
    rows = torch.stack([ascending, -ascending, 0 * ascending, in_no_order, *few_values])
    q, ck = torch.ones(6, 2, 1, 16), torch.nn.functional.pad(rows[..., None, None], (0, 15))
    tile = launch.TopkTileConfig(16, 64, columns, depth, 4, 1, 32)
    for windows in (140, 12):
        tensors = [t.to(DEVICE, DTYPE) for t in (q, ck[:, :windows])]
        call = SETTINGS | sizes(4, 4, 4, n=9) | dict(scale=1.0, num_initial_blocks=0)
        call["seq_len"] = 4 * windows + 3
        with launch.using({"ranking.logits": tile}):
            found = select_blocks(*tensors, **call, backend="triton")
        assert torch.equal(found, select_blocks(*tensors, **call, backend="eager"))


@pytest.mark.parametrize("l", [1, 2, 6])
def test_blocks_of_equal_probability(l):
    """Of equal scores the earlier blocks win, up to those whose later windows are not seen."""
    S = 141
    q, ck, _ = draw(2, S, 4, 1, 16, d=1, B=1)
    call = dict(sizes(l, 1, 2), importance="probs", num_initial_blocks=0, num_selected_blocks=5)
    indices = select(q, ck, **call, num_local_blocks=4, seq_len=S, scale=0.0)
    assert (indices.cpu() == torch.arange(5)).all()


@pytest.mark.parametrize("causal", [True, False])
def test_blocks_of_equal_interpolation(causal):
    """Behind the last window's centre and before the first one's all blocks have that window's
    score; of those the earlier win, whatever scores are rounded to."""
    q, ck, _ = draw(76, 76, 5, 1, 24, d=24, causal=causal, m=0, dtype=torch.float32)
    call = SETTINGS | sizes(24, 24, 4) | RULES["interpolated"]
    call |= dict(causal=causal, num_initial_blocks=0)
    right = select_blocks(q.double(), ck.double(), **call, backend="eager")
    assert torch.equal(select_blocks(q, ck, **call, backend="triton"), right)


def test_how_long_rankings_may_be():
    q, ck, mem_k = draw(20, 40, 4, 2, 16)
    with pytest.raises(NotImplementedError, match="a query has 65 selected blocks, at most 64"):
        select(q, ck, num_selected_blocks=65, mem_k=mem_k, seq_len=40)


@pytest.mark.gpu
@pytest.mark.parametrize("importance", ["logits", "probs", "max"])
def test_many_tokens(importance):
    """Past 2^31 elements in one tensor: 64-bit offsets. The last tokens rank as they do alone."""
    T, H, K, D = 300_000, 64, 4, 128
    q = torch.randn(1, T, H, D, device="cuda", dtype=torch.bfloat16)
    ck = torch.randn(1, T // 16, K, D, device="cuda", dtype=torch.bfloat16)
    call = sizes(32, 16, 64, n=13, importance=importance, backend="triton")
    every = select_blocks(q, ck, **call)
    last = select_blocks(q[:, -100:].clone(), ck, seq_len=T, **call)
    agree = (every[:, -100:] == last).float().mean()
    assert agree > 0.999  # a tile's rows may be added up in another order


LARGEST = [
    (128, sizes(1, 1, 64), dict(num_selected_blocks=16)),
    (64, sizes(1, 1, 32), dict(num_selected_blocks=5, selection_stride=4)),
    (128, sizes(2, 2, 128), dict(num_selected_blocks=3, causal=False)),
    (128, sizes(4, 4, 128), dict(num_local_blocks=3, scale=-0.1)),
    (32, sizes(1, 1, 64), dict(num_selected_blocks=8)),
    (16, sizes(1, 1, 32), dict(num_selected_blocks=8, selection_stride=2)),
    (128, sizes(1, 1, 64), dict(importance="head_max", num_selected_blocks=16)),
    (64, sizes(1, 1, 32), dict(importance="head_max", selection_stride=4, scale=-0.1)),
    (128, sizes(1, 1, 64), dict(importance="head_max", num_selected_blocks=32)),
    (64, sizes(1, 1, 32), dict(num_selected_blocks=24)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("D, size, settings", LARGEST)
def test_largest_keys_of_a_hopper(D, size, settings, dtype):
    """Of more tiles than multiprocessors, of queries after other tokens, of few keys, and of 3 and
    16 heads that share a ranking."""
    d, causal = size["compress_block_sliding_stride"], settings.get("causal", True)
    shapes = (1300, 1300, 3, 16, 8), (200, 1100, 2, 4, 2), (40, 104, 1, 2, 2)
    for T, S, B, H, K in (*shapes, (140, 700, 1, 6, 2), (260, 700, 1, 16, 1)):
        T = T if causal else S
        q, ck, _ = draw(T, S, H, K, D, d=d, causal=causal, m=0, dtype=dtype, B=B)
        with launch.using({"largest_sm90": True}):
            assert_right(q, ck, None, S, **dict(importance="max") | size | settings)


# rankings by integers (`ranking_bits` 8 or 4), to the bit the same of every backend; layers that
# rank so: test_block_indices.py

EACH_HEAD = dict(query_heads_share_selected_kv=False)
INTEGERS = [
    (128, sizes(1, 1, 64), dict(num_selected_blocks=16)),
    (64, sizes(1, 1, 32), dict(num_selected_blocks=5, selection_stride=4)),
    (128, sizes(4, 4, 128), dict(num_local_blocks=3, scale=-0.1)),
    (32, sizes(1, 1, 128), dict(num_selected_blocks=8, **EACH_HEAD)),
    (128, sizes(1, 1, 64), dict(importance="head_max", num_selected_blocks=16)),
    (64, sizes(1, 1, 32), dict(importance="head_max", num_selected_blocks=32, selection_stride=4)),
    (128, sizes(1, 1, 64), dict(importance="head_max", num_selected_blocks=24)),
]
LENGTHS = (1300, 1300, 3, 16, 8), (200, 1100, 2, 4, 2), (40, 520, 1, 2, 2)
if not CUDA:
    INTEGERS = [
        (32, sizes(1, 1, 32), dict(selection_stride=4, scale=-0.1)),
        (24, sizes(4, 4, 16), dict(scale=-0.3, **EACH_HEAD)),
        (16, sizes(8, 8, 4), dict(num_local_blocks=2)),
        (16, sizes(1, 1, 16), dict(importance="head_max")),
    ]
    LENGTHS = (30, 150, 2, 6, 2), (30, 150, 1, 4, 4)


@pytest.mark.parametrize("form", ["sm90", "portable"] if CUDA else ["portable"])
@pytest.mark.parametrize("dtype", [torch.bfloat16 if CUDA else torch.float32, torch.float16])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("D, size, settings", INTEGERS)
def test_integers(D, size, settings, bits, dtype, form):
    """To the bit the specification; in float16 of halves, many of which lie between integers."""
    if bits == 4 and size["selection_block_size"] < 16 * size["compress_block_sliding_stride"]:
        pytest.skip("of blocks of 16 windows or more")
    call = SETTINGS | dict(importance="max", ranking_bits=bits) | size | settings
    for T, S, B, H, K in LENGTHS:
        q, ck, _ = draw(T, S, H, K, D, d=size["compress_block_sliding_stride"], dtype=dtype, B=B)
        if dtype == torch.float16:
            q, ck = ((2 * t).round() / 2 for t in (q, ck))
        call |= dict(seq_len=S, q_offset=S - T)
        right = select_blocks(q, ck, **call, backend="eager")
        with launch.using({"largest_sm90": form == "sm90"}):
            assert torch.equal(select_blocks(q, ck, **call, backend="triton"), right)
        assert (right >= 0).any()


def cut(x, y):
    mantissa, exponent = math.frexp(torch.tensor(x).div(y).item())
    return math.ldexp(math.floor(mantissa * 2**12), exponent - 12)


def integers(x, bits=8):
    factor = cut(127.0 if bits == 8 else 119.0, x.abs().max().clamp(min=1e-30))
    numbers = (x.double() * factor).round()
    for column in numbers.T if bits == 4 else ():  # one of 16 values each
        least, largest = int(column.min()), int(column.max())
        step = max(1, -(-(largest - least) // 15))
        column.copy_(least + step * ((column - least) * cut(1.0, torch.tensor(step))).round())
    return numbers.to(torch.int64), torch.tensor(1.0).div(torch.tensor(factor))


def by_hand(q, ck, i, m, bits):
    """The blocks of query i, of queries [g d] and windows [w d] of its KV head, m a block."""
    queries, scores = integers(q)[0], {}
    for c in range(1, i // (2 * m)):
        keys, size = integers(ck[m * c : m * c + m], bits)
        scores[c] = (keys @ queries.T).max().to(torch.float32) * size
    best = sorted(scores, key=lambda c: (-float(scores[c]), c))[:3]
    return best + [-1] * (3 - len(best))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("importance", ["max", "head_max"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_definition_of_integers(dtype, importance, bits):
    """Of keys with large channels, in a sequence whose last block is partial."""
    q, ck = torch.randn(2, 20, 4, 16, device=DEVICE), torch.randn(2, 65, 2, 16, device=DEVICE)
    ck[..., 3] += 4
    ck[:, 12:16] = 0  # and a block of zeros
    q, ck = q.to(dtype), ck.to(dtype)
    m = 4 if bits == 8 else 16
    call = sizes(
        2, 2, 2 * m, n=3, num_initial_blocks=1, num_local_blocks=0, importance=importance,
        ranking_bits=bits, q_offset=110, seq_len=130,
    )  # fmt: skip
    found = select_blocks(q, ck, **call, backend="eager")
    for b, t, h in ((0, 19, 0), (1, 0, 1), (0, 7, 1), (1, 13, 0)):
        group = q[b, t, 2 * h : 2 * h + 2].float()
        group = group.sum(0, keepdim=True) if importance == "max" else group
        expected = by_hand(group.cpu(), ck[b, :, h].float().cpu(), 110 + t, m, bits)
        assert found[b, t, h].tolist() == expected
    assert not torch.equal(found, select_blocks(q, ck, **call | dict(ranking_bits=16)))
