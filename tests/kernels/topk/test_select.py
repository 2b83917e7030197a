"""The selection in Triton against its specification: the blocks chosen are the best by the scores
of `ops/reference.py` in float64, except where two lie nearer than the kernel may err."""

import itertools

import pytest
import torch

from native_sparse_attention import select_blocks
from native_sparse_attention.ops.triton import backend as triton_backend
from tests.helpers.budget import CUDA, DEVICE
from tests.helpers.selections import RULES, SETTINGS, assert_right, both, draw, rules, sizes

pytestmark = pytest.mark.kernels


@pytest.mark.slow(one_of=10)
@rules
@both
@pytest.mark.parametrize("l, d, s", [(8, 4, 8), (5, 2, 8), (8, 8, 4), (12, 6, 2), (4, 4, 4)])
def test_geometry(l, d, s, rule, causal):
    for shared, local in ((True, 1), (False, 2)):
        q, ck, mem_k = draw(27, 61, 3, 1, 16, d=d, causal=causal)
        assert_right(
            q, ck, mem_k, 61, causal=causal, **sizes(l, d, s), **rule,
            query_heads_share_selected_kv=shared, num_local_blocks=local,
        )  # fmt: skip


if CUDA:
    HEADS = [
        *((torch.bfloat16, heads) for heads in [(4, 4, 64), (6, 2, 128), (16, 1, 80), (5, 1, 40)]),
        *(
            (torch.bfloat16, heads)
            for heads in [(64, 4, 128), (7, 1, 192), (12, 1, 96), (64, 1, 32)]
        ),
        *((torch.float16, heads) for heads in [(8, 2, 128), (3, 1, 256)]),
        *((torch.float32, heads) for heads in [(6, 2, 64), (4, 4, 128), (2, 1, 256)]),
    ]
    PLACES = [(1, 1), (63, 63), (64, 64), (65, 65), (131, 131), (37, 2111), (300, 300), (700, 5003)]
    COUNTS = [1, 2, 13, 16, 17, 32, 64]
else:
    HEADS = [
        *((torch.float16, heads) for heads in [(2, 2, 16), (5, 1, 24), (7, 1, 40), (12, 1, 16)]),
        (torch.float32, (3, 1, 16)),
    ]
    PLACES = [(1, 1), (8, 8), (9, 9), (67, 67), (5, 600)]
    COUNTS = [1, 5, 16, 17]


def name(value):
    return str(value).replace("torch.", "")


@pytest.mark.slow(one_of=2)
@rules
@pytest.mark.parametrize("dtype, heads", HEADS, ids=name)
def test_heads(dtype, heads, rule):
    T, S = (131, 1031) if CUDA else (9, 77)
    for causal, shared in ((True, True), (False, False)):
        q, ck, mem_k = draw(T, S, *heads, causal=causal, dtype=dtype, B=1)
        assert_right(
            q, ck, mem_k, S, causal=causal, query_heads_share_selected_kv=shared,
            num_selected_blocks=13 if CUDA else 3, **rule,
        )  # fmt: skip


@pytest.mark.slow(one_of=2)
@both
@rules
@pytest.mark.parametrize("place", PLACES, ids=name)
def test_places(place, rule, causal):
    T, S = place
    q, ck, mem_k = draw(T, S, 2, 1, 16, causal=causal, B=1)
    assert_right(q, ck, mem_k, S, causal=causal, num_initial_blocks=0, **rule)


@pytest.mark.parametrize("importance", ["logits", "probs", "max"])
@pytest.mark.parametrize("n", COUNTS)
def test_counts(n, importance):
    """More and fewer than there are blocks, in lists and by merging."""
    T, S = (200, 3000) if CUDA else (3, 61)
    q, ck, mem_k = draw(T, S, 2, 1, 16, B=1)
    for initial, local in ((0, 0), (2, 3)) if CUDA or n < 17 else ((1, 0),):
        assert_right(
            q, ck, mem_k, S, num_selected_blocks=n, importance=importance,
            num_initial_blocks=initial, num_local_blocks=local,
        )  # fmt: skip


REACHES = [(4, 4, 4), (8, 4, 4), (12, 4, 4), (8, 4, 16), (12, 4, 12), (40, 4, 16), (2, 1, 16)]


@pytest.mark.slow(one_of=2)
@pytest.mark.parametrize("l, d, s", REACHES, ids=name)
def test_windows_that_reach_into_other_blocks(l, d, s):
    """No further, into one block before theirs, and into more, over more blocks than a step takes;
    and blocks of more windows than a step takes of each. In lists, and in such as lose many."""
    from native_sparse_attention.kernels.common import launch

    S = max(37 * s, 133 * d) + 3
    q, ck, mem_k = draw(3, S, 3, 1, 16, d=d, m=1, B=1)
    # what a step begins and ends with matters most
    q[..., 0] += 3
    ck[:, 63::64, :, 0] += 2
    ck[:, 64::64, :, 0] += 3
    call = dict(sizes(l, d, s), importance="probs", num_selected_blocks=5, with_lse=True)
    assert_right(q, ck, mem_k, S, **call)
    lossy = launch.TopkTileConfig(16, 64, 16, 1, 4, 1, 32)
    # fewer candidates than slots, merged
    few = [t.float() for t in (q, ck, mem_k)]
    assert_right(*few, S, **call, q_offset=4 * max(s, d))
    with launch.using({"ranking.probs": lossy}):
        assert_right(q, ck, mem_k, S, **call)
        # candidates that end with a step
        assert_right(q, ck, mem_k, S, q_offset=64 * d, **call)


@pytest.mark.parametrize("l", [1, 2, 6])
def test_blocks_of_equal_probability(l):
    """Of equal scores the earlier blocks win, up to those whose later windows are not seen."""
    S = 141
    q, ck, _ = draw(2, S, 4, 1, 16, d=1, B=1)
    call = dict(SETTINGS, **sizes(l, 1, 2), importance="probs", num_initial_blocks=0)
    call |= dict(num_selected_blocks=5, num_local_blocks=4, seq_len=S, q_offset=S - 2)
    indices, _ = triton_backend.select_blocks(q, ck, **call, mem_k=None, scale=0.0)
    assert (indices.cpu() == torch.arange(5)).all()


@both
def test_blocks_of_equal_interpolation(causal):
    """Behind the last window's centre and before the first one's all blocks have that window's
    score; of those the earlier win, whatever scores are rounded to."""
    settings = SETTINGS | RULES[1] | sizes(24, 24, 4) | dict(causal=causal, num_initial_blocks=0)
    q, ck, _ = draw(76, 76, 5, 1, 24, d=24, causal=causal, m=0, dtype=torch.float32)
    kwargs = settings | dict(seq_len=76)
    actual, right = (
        select_blocks(q.to(dtype), ck.to(dtype), backend=backend, **kwargs)
        for backend, dtype in (("triton", torch.float32), ("eager", torch.float64))
    )
    assert torch.equal(actual, right)


@pytest.mark.parametrize("scale", [None, 0.7, -0.3])
@pytest.mark.parametrize("m", [0, 1, 5])
def test_probs_with_a_given_log_sum_exp(m, scale):
    q, ck, mem_k = draw(20, 61, 4, 2, 16, m=m, B=1)
    for with_lse, causal in ((True, True), (False, True), (True, False)):
        if not causal:
            ck = draw(20, 61, 4, 2, 16, causal=False, B=1)[1]
        assert_right(
            q, ck, mem_k, 61, scale=scale, with_lse=with_lse, causal=causal, importance="probs"
        )


def test_scale_of_the_logits():
    """A negative scale turns the ranking round, one of 0 makes all equal."""
    q, ck, _ = draw(20, 100, 2, 1, 16)
    assert_right(q, ck, None, 100, scale=-0.2)
    assert_right(1e4 * q.float(), 1e-30 * ck.float(), None, 100)
    equal, _ = triton_backend.select_blocks(
        q, ck, **SETTINGS, seq_len=100, mem_k=None, q_offset=80, scale=0.0
    )
    assert (equal == torch.tensor([1, 2, 3], device=DEVICE)).all()


@pytest.mark.slow(one_of=3)
@rules
@pytest.mark.parametrize("R", [2, 8][: 1 + CUDA])
def test_shared_rankings(R, rule):
    """A group has its leader's ranking; one whose leader came before this call has what is handed
    in, or nothing."""
    S = 64
    q, ck, mem_k = draw(S, S, 4, 2, 16)
    settings = {**SETTINGS, **rule, "selection_stride": R}
    assert_right(q, ck, mem_k, S, **settings)
    many, *_ = draw(150, S, 2, 1, 16)  # more groups than a tile has rows
    assert_right(many, ck[..., :1, :], mem_k[:1], 150, **settings)
    call = dict(settings, seq_len=S, mem_k=mem_k)
    every, _ = triton_backend.select_blocks(q, ck, q_offset=0, **call)
    for offset in (41, 47):
        lead = every[:, offset]
        part, _ = triton_backend.select_blocks(
            q[:, offset:], ck, q_offset=offset, leader_indices=lead, **call
        )
        assert torch.equal(part, every[:, offset:])
    # rows that start in different places, the second without a leader
    starts = torch.tensor([41, 21], device=DEVICE)
    rows = torch.stack([q[b, o : o + 20] for b, o in enumerate(starts.tolist())])
    right = torch.stack([every[b, o : o + 20] for b, o in enumerate(starts.tolist())])
    part, _ = triton_backend.select_blocks(
        rows, ck, q_offset=starts, leader_indices=right[:, 0], **call
    )
    assert torch.equal(part, right)
    part, _ = triton_backend.select_blocks(rows, ck, q_offset=starts, **call)
    before = -starts % R
    assert (part[0, : before[0]] == -1).all() and (part[1, : before[1]] == -1).all()
    assert torch.equal(part[1, before[1] :], right[1, before[1] :])


@rules
def test_rows_that_start_at_different_places(rule):
    q, ck, mem_k = draw(13, 80, 4, 2, 16)
    starts = torch.tensor([60, 5], device=DEVICE)
    assert_right(q, ck, mem_k, 80, q_offset=starts, **rule)
    # past the last window that there is
    assert_right(q, ck[:, :7], mem_k, 80, q_offset=starts, **rule)


def one_hot(values, H=1, dtype=torch.float16):
    """Queries and keys of one-token windows whose logits are these values, for any query."""
    q = torch.zeros(1, 5, H, 16, device=DEVICE, dtype=dtype)
    ck = torch.zeros(1, len(values), 1, 16, device=DEVICE, dtype=dtype)
    q[..., 3] = 1
    ck[..., 0, 3] = values.to(DEVICE)
    return q, ck


@pytest.mark.parametrize(
    "importance, n", [("logits", 3), ("probs", 13), ("logits", 13)][: 2 + CUDA]
)
@pytest.mark.parametrize("pattern", ["equal", "ascending", "descending", "one list", "most equal"])
def test_hard_orders(pattern, importance, n):
    """Rankings that the lists of the kernels find hard, some of which they lose and do again."""
    S = 140
    c = torch.arange(S)
    lists = (c ^ (((c & -8) * 2531 >> 12) & 7)) % 8
    values = {
        "equal": torch.zeros(S),
        "ascending": c / 64,
        "descending": -c / 64,
        "one list": torch.where(lists == 5, 4 + c / 64, c / 64),
        "most equal": torch.where(c % 37 == 5, 1.0, 0.0),
    }[pattern]
    q, ck = one_hot(values)
    settings = {
        **SETTINGS,
        **sizes(1, 1, 1),
        "num_selected_blocks": n,
        "importance": importance,
        "scale": 1.0,
    }
    indices, _ = triton_backend.select_blocks(
        q, ck, seq_len=S, mem_k=None, q_offset=S - 5, **settings
    )
    for t, i in enumerate(range(S - 5, S)):
        best = values[1:i].sort(descending=True, stable=True).indices[:n] + 1
        torch.testing.assert_close(indices[0, t, 0].cpu(), best.int())


@rules
def test_laws(rule):
    """The future cannot move the past; a second call and other strides give the same bits."""
    q, ck, mem_k = draw(70, 70, 4, 2, 16)
    settings = dict(SETTINGS, **rule, seq_len=70, q_offset=0)
    first, _ = triton_backend.select_blocks(q, ck, mem_k=mem_k, **settings)
    again, _ = triton_backend.select_blocks(q, ck, mem_k=mem_k, **settings)
    assert torch.equal(first, again)
    tensors = [t.transpose(-3, -2).contiguous().transpose(-3, -2) for t in (q, ck, mem_k)]
    strided, _ = triton_backend.select_blocks(*tensors[:2], mem_k=tensors[2], **settings)
    assert torch.equal(first, strided)
    i = 37
    q[:, i + 1 :] += 100
    ck[:, i // 4 :] *= -50
    changed, _ = triton_backend.select_blocks(q, ck, mem_k=mem_k, **settings)
    assert torch.equal(first[:, : i + 1], changed[:, : i + 1])


def test_public_operation():
    """Nothing to select; a ranking that is too long says so."""
    q, ck, mem_k = draw(20, 40, 4, 2, 16)
    call = dict(**sizes(8, 4, 8), mem_k=mem_k, seq_len=40)
    none = select_blocks(q, ck, num_selected_blocks=0, backend="triton", **call)
    assert none.shape == (2, 20, 2, 0) and none.dtype == torch.int32
    empty = select_blocks(
        q[:, :3], ck[:, :0], num_selected_blocks=2, **sizes(8, 4, 8), backend="triton"
    )
    assert (empty == -1).all()
    with pytest.raises(NotImplementedError, match="num_selected_blocks is 65, at most 64"):
        select_blocks(q, ck, num_selected_blocks=65, backend="triton", **call)


@pytest.mark.gpu
@pytest.mark.parametrize("importance", ["logits", "probs", "max"])
def test_many_tokens(importance):
    """Past 2^31 elements in one tensor: 64-bit offsets. The last tokens rank as they do alone."""
    T, H, K, D = 300_000, 64, 4, 128
    q = torch.randn(1, T, H, D, device="cuda", dtype=torch.bfloat16)
    ck = torch.randn(1, T // 16, K, D, device="cuda", dtype=torch.bfloat16)
    call = dict(
        num_selected_blocks=13, importance=importance, backend="triton", **sizes(32, 16, 64)
    )
    every = select_blocks(q, ck, **call)
    last = select_blocks(q[:, -100:].clone(), ck, seq_len=T, **call)
    agree = (every[:, -100:] == last).float().mean()
    assert agree > 0.999  # a tile's rows may be added up in another order


@pytest.mark.gpu
def test_lists_and_merging_agree():
    """Long enough for thousands of tiles, among which some lists overflow."""
    for n, heads in itertools.product((13, 16), ((16, 1, 128), (4, 4, 64))):
        q, ck, mem_k = draw(8192, 32768, *heads, d=16, m=1, dtype=torch.bfloat16, B=1)
        for rule in RULES:
            assert_right(q, ck, mem_k, 32768, num_selected_blocks=n, **sizes(32, 16, 64), **rule)
