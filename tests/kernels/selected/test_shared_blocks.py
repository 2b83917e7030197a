"""Blocks read once for neighbours that chose differently: right on a GPU, by the bound and by the
maximum."""

import pytest
import torch

from benchmarks.problem import pooled
from native_sparse_attention import selected_attention
from tests.helpers.budget import DEVICE, assert_right, draw
from tests.helpers.composition import assert_layer_right
from tests.helpers.on_hopper import MARKS, layer

pytest.importorskip("triton")

from native_sparse_attention.kernels.common import launch
from native_sparse_attention.kernels.selected import union_sm90

pytestmark = MARKS


def chosen(B, T, R, n, s):
    """Blocks before each token's own, -1 where there are no more; some lists have none at all."""
    lists = torch.full((B, T, R, n), -1, dtype=torch.int32)
    for b in range(B):
        for t in range(T):
            for r in range(R):
                blocks = torch.randperm(max(t // s - 1, 0))[:n]
                if (t + r) % 11:
                    lists[b, t, r, : len(blocks)] = blocks.int() + 1
    return lists.to(DEVICE).clamp(max=T // s)


@pytest.fixture
def launches(monkeypatch, as_written):
    """How often the kernel was launched, which takes small problems too."""
    seen = []
    run = union_sm90.forward

    def counted(*args):
        seen.append("forward")
        return run(*args)

    monkeypatch.setattr(union_sm90, "forward", counted)
    with launch.using({"union_sm90": True}):
        yield seen


@pytest.mark.parametrize("size", [1.0, 8.0], ids=["by the bound", "by the maximum"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "heads, D, n, T",
    [((16, 1), 128, 13, 640), ((32, 2), 64, 5, 448), ((24, 2), 128, 3, 320), ((9, 1), 64, 1, 193)],
)
def test_right(launches, heads, D, n, T, dtype, size):
    H, K = heads
    S = -(-T // 64) * 64
    q, k, v = draw(T, S, H, K, D, D, dtype)
    lists = chosen(2, T, K, n, 64)
    assert_right(
        selected_attention, {"q": q * size, "k": k, "v": v}, dtype, block_indices=lists,
        selection_block_size=64, num_initial_blocks=1, num_local_blocks=2, causal=True,
        return_lse=True, q_offset=0,
    )  # fmt: skip
    assert launches == ["forward"]


@pytest.mark.parametrize("n", [3, 13])
@pytest.mark.parametrize("often", [6, 9])
def test_some_alike(launches, n, often):
    """Of groups of neighbours some are alike, or most and then read as unions."""
    T, S, heads = 480, 512, (32, 2)
    q, k, v = draw(T, S, *heads, 128, 128, torch.bfloat16)
    lists = chosen(2, T, 2, n, 64)
    for group in range(T // 4):
        if group % 10 < often:
            lists[:, 4 * group : 4 * group + 4] = lists[:, 4 * group : 4 * group + 1]
    with launch.using({"union": launch.UnionRule(4, 1.6, least=0)}):
        assert_right(
            selected_attention, {"q": q, "k": k, "v": v}, torch.bfloat16, block_indices=lists,
            selection_block_size=64, num_initial_blocks=1, num_local_blocks=2, causal=True,
            return_lse=True, q_offset=0,
        )  # fmt: skip
    assert launches == ["forward"]


def test_two_runs_are_equal(launches):
    T = 2048
    q, k, v = (t.requires_grad_() for t in draw(T, T, 32, 2, 128, 128, torch.bfloat16))
    lists = chosen(2, T, 2, 13, 64)

    def run():
        out = selected_attention(
            q, k, v, lists, selection_block_size=64, num_initial_blocks=1, num_local_blocks=2,
            causal=True, backend="triton",
        )  # fmt: skip
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), (q, k, v))]

    first = run()
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
    assert len(launches) == 5


def test_strided(launches):
    """Heads before tokens, as some projections give them."""
    T = 256
    q, k, v = draw(T, T, 16, 1, 128, 128, torch.bfloat16)
    lists = chosen(2, T, 1, 2, 64)
    settings = dict(selection_block_size=64, num_local_blocks=2, causal=True, backend="triton")
    out = selected_attention(q, k, v, lists, **settings)
    apart = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert torch.equal(selected_attention(*apart, lists, **settings), out)
    assert launches == ["forward"] * 2


SIZES = {
    "compress_block_size": 32,
    "compress_block_sliding_stride": 16,
    "selection_block_size": 64,
    "num_selected_blocks": 5,
    "sliding_window_size": 255,
}


def layer_inputs(H, K, dtype=torch.bfloat16):
    B, T, D = 2, 1024, 128
    q, k, v = draw(T, T, H, K, D, D, dtype)
    ck, cv = (pooled(t, 32, 16) for t in (k, v))
    gates = torch.rand(B, T, H, 3, device=DEVICE).to(dtype)
    return {"q": q, "k": k, "v": v, "ck": ck, "cv": cv, "branch_gates": gates}


@pytest.mark.parametrize(
    "heads, stride, sinks",
    [((32, 2), 1, False), ((32, 2), 1, True), ((8, 2), 4, False), ((6, 2), 4, True),
     ((2, 2), 16, False), ((10, 2), 2, False)],
)  # fmt: skip
def test_layer(launches, heads, stride, sinks):
    """With the other branches' rows and the gates: as where blocks are read for each list."""
    tensors = [t.requires_grad_() for t in layer_inputs(*heads).values()]
    d_out = torch.randn_like(tensors[0])
    settings = SIZES | {
        "selection_stride": stride,
        "sinks": torch.randn(3, heads[0], device=DEVICE) if sinks else None,
    }
    apart = layer(tensors, d_out, {"union_sm90": False}, **settings)
    assert launches == []
    found = layer(tensors, d_out, {"union_sm90": True}, **settings)
    for one, other in zip(found, apart, strict=True):
        error = (one.float() - other.float()).norm() / other.float().norm()
        assert error <= torch.finfo(torch.bfloat16).eps
    assert launches == ["forward"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads, stride", [((32, 2), 1), ((8, 2), 4), ((2, 2), 16), ((6, 2), 4)])
def test_layer_right(launches, heads, stride, dtype):
    """Against its branches in fp64, of lists for one token and for several."""
    tensors = layer_inputs(*heads, dtype)
    assert_layer_right(
        tensors, SIZES, forced={"num_initial_blocks": 1, "num_local_blocks": 2},
        selection_stride=stride,
    )  # fmt: skip
    # once to know the selection
    assert launches == ["forward"] * 2
