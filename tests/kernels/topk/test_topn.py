"""The running top n of the selection kernels, on scores that are chosen."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from native_sparse_attention.kernels.topk import topn  # noqa: E402
from tests.helpers.budget import DEVICE  # noqa: E402

M, CHUNK = 4, 64

pytestmark = pytest.mark.kernels


@triton.jit
def rank_kernel(
    scores, out, missed, C,
    M: tl.constexpr, CHUNK: tl.constexpr, SLOTS: tl.constexpr, SLOTS_2: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, M)[:, None]
    running = topn.start(M, SLOTS_2, COLUMNS, DEPTH)
    for c0 in range(0, C, CHUNK):
        c = topn.permute_blocks(c0 + tl.arange(0, CHUNK), COLUMNS)
        s = tl.load(scores + row * C + c[None], mask=c[None] < C, other=float("-inf"))
        running = topn.fold(running, s, c, COLUMNS)
    ranking, lost = topn.finish(running, SLOTS, SLOTS_2, COLUMNS)
    tl.store(out + row * SLOTS_2 + tl.arange(0, SLOTS_2)[None], ranking)
    tl.store(missed, lost)


def ranked(scores, n, columns, depth):
    """(ranking [M, n] with -1 in empty slots, whether it must be done again)."""
    slots = max(2, triton.next_power_of_2(n))
    out = torch.empty(M, slots, dtype=torch.int32, device=DEVICE)
    missed = torch.empty(1, dtype=torch.int32, device=DEVICE)
    rank_kernel[(1,)](
        scores, out, missed, scores.shape[1], M=M, CHUNK=CHUNK, SLOTS=n, SLOTS_2=slots,
        COLUMNS=columns, DEPTH=depth,
    )  # fmt: skip
    assert (out[:, n:] == topn.NO_BLOCK.value).all()
    return out[:, :n].masked_fill(out[:, :n] == topn.NO_BLOCK.value, -1), bool(missed.item())


def expected(scores, n):
    best = scores.sort(dim=-1, descending=True, stable=True)
    order = best.indices.masked_fill(best.values == float("-inf"), -1)[:, :n].int()
    return torch.nn.functional.pad(order, (0, n - order.shape[1]), value=-1)


def patterns(C, columns):
    ascending = torch.arange(C).float()
    one_list, c = ascending % 8 == 0, torch.arange(C)
    if columns:  # blocks that go to the first list
        one_list = (c ^ (((c & -columns) * 2531 >> 12) & (columns - 1))) % columns == 0
    some = torch.randn(M, C)
    some[torch.rand(M, C) < 0.5] = float("-inf")
    few = torch.full((C,), float("-inf"))
    few[C // 2] = -3.0
    return {
        "random": torch.randn(M, C),
        "few values": torch.randint(0, 3, (M, C)).float(),
        "equal": torch.zeros(C),
        "zeros of both signs": torch.where(torch.rand(M, C) < 0.5, 0.0, -0.0),
        "ascending": ascending,
        "descending": -ascending,
        "one list": torch.where(one_list, 1000 + ascending, ascending),
        "some missing": some,
        "one there": few,
        "none there": torch.full((C,), float("-inf")),
    }


def to_device(scores):
    return scores.expand(M, -1).contiguous().to(DEVICE)


@pytest.mark.slow(one_of=2)
@pytest.mark.parametrize(
    "n, C, columns, depth",
    [(33, 150, 0, 0)] + [
        (*size, *columns)
        for size in ((1, 200), (5, 64), (16, 3), (16, 200))
        for columns in ((0, 0), (8, 8), (32, 4), (64, 2))
    ],
)  # fmt: skip
def test_n_best(n, C, columns, depth):
    for name, scores in patterns(C, columns).items():
        if not columns and name not in ("few values", "zeros of both signs", "some missing"):
            continue  # slow in the interpreter
        scores = to_device(scores)
        ranking, missed = ranked(scores, n, columns, depth)
        if not missed:
            torch.testing.assert_close(ranking, expected(scores, n), msg=lambda m, n=name: n + m)
        exact = not columns or columns * depth >= C or n <= depth
        assert not (exact and missed), name
        # lists that are full of equal scores hold the earliest
        if columns * depth >= 4 * n and name in ("equal", "descending", "none there"):
            assert not missed, name


def test_a_list_that_lost_one_says_so():
    """The nine best in one list of eight: its ninth is missing."""
    scores = to_device(patterns(200, 8)["one list"])
    ranking, missed = ranked(scores, 9, 8, 8)
    assert missed and not torch.equal(ranking, expected(scores, 9))
    assert not ranked(scores, 8, 8, 8)[1]
