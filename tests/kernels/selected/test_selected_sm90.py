"""The selected branch on a Hopper: unions of neighbours that chose differently, and pairs of
several tokens that share a ranking."""

import pytest
import torch

from benchmarks.problem import pooled
from native_sparse_attention import selected_attention
from tests.helpers.budget import DEVICE, assert_right, draw
from tests.helpers.composition import assert_layer_right
from tests.helpers.on_hopper import MARKS, chosen, layer

pytest.importorskip("triton")

from native_sparse_attention.kernels.common import launch
from native_sparse_attention.kernels.selected import key_major_sm90, union_sm90

pytestmark = MARKS

SETTINGS = dict(
    selection_block_size=64, num_initial_blocks=1, num_local_blocks=2, causal=True, return_lse=True,
    q_offset=0,
)  # fmt: skip
SIZES = {
    "compress_block_size": 32,
    "compress_block_sliding_stride": 16,
    "selection_block_size": 64,
    "num_selected_blocks": 5,
    "sliding_window_size": 255,
}


def layer_inputs(T, S, H, K, D=128, dtype=torch.bfloat16):
    q, k, v = draw(T, S, H, K, D, D, dtype)
    ck, cv = (pooled(t, 32, 16) for t in (k, v))
    gates = torch.rand(2, T, H, 3, device=DEVICE).to(dtype)
    return {"q": q, "k": k, "v": v, "ck": ck, "cv": cv, "branch_gates": gates}


def assert_near(found, other):
    for one, two in zip(found, other, strict=True):
        error = (one.float() - two.float()).norm() / two.float().norm()
        assert error <= torch.finfo(torch.bfloat16).eps


@pytest.fixture
def launches(monkeypatch, as_written):
    """How often the union kernel was launched, which takes small problems too."""
    seen, run = [], union_sm90.forward
    monkeypatch.setattr(union_sm90, "forward", lambda *a: (seen.append("forward"), run(*a)))
    with launch.using({"union_sm90": True}):
        yield seen


@pytest.mark.parametrize("size", [1.0, 8.0], ids=["by the bound", "by the maximum"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "heads, D, n, T",
    [((16, 1), 128, 13, 640), ((32, 2), 64, 5, 448), ((24, 2), 128, 3, 320), ((9, 1), 64, 1, 193)],
)
def test_union(launches, heads, D, n, T, dtype, size):
    H, K = heads
    q, k, v = draw(T, -(-T // 64) * 64, H, K, D, D, dtype)
    assert_right(
        selected_attention, {"q": q * size, "k": k, "v": v}, dtype,
        block_indices=chosen(2, T, K, n, 64), **SETTINGS,
    )  # fmt: skip
    assert launches == ["forward"]


@pytest.mark.parametrize("n", [3, 13])
@pytest.mark.parametrize("often", [6, 9])
def test_overlapping(launches, n, often):
    """Of groups of neighbours some are equal, or most, which are then read as their own unions."""
    T, S, heads = 480, 512, (32, 2)
    q, k, v = draw(T, S, *heads, 128, 128, torch.bfloat16)
    lists = chosen(2, T, 2, n, 64)
    for group in range(T // 4):
        if group % 10 < often:
            lists[:, 4 * group : 4 * group + 4] = lists[:, 4 * group : 4 * group + 1]
    with launch.using({"union": launch.UnionRule(4, 1.6, least=0)}):
        assert_right(
            selected_attention, {"q": q, "k": k, "v": v}, torch.bfloat16, block_indices=lists,
            **SETTINGS,
        )  # fmt: skip
    assert launches == ["forward"]


def test_two_runs_and_strides(launches):
    """Bit for bit the same, however heads and tokens lie."""
    T = 2048
    tensors = [t.requires_grad_() for t in draw(T, T, 32, 2, 128, 128, torch.bfloat16)]
    lists = chosen(2, T, 2, 13, 64)

    def run(tensors):
        out = selected_attention(
            *tensors, lists, selection_block_size=64, num_initial_blocks=1, num_local_blocks=2,
            causal=True, backend="triton",
        )  # fmt: skip
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), tensors)]

    first = run(tensors)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, run(tensors), strict=True))
    strided = [t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    assert torch.equal(run([t.requires_grad_() for t in strided])[0], first[0])
    assert len(launches) == 5


@pytest.mark.parametrize(
    "heads, stride, sinks",
    [((32, 2), 1, False), ((32, 2), 1, True), ((8, 2), 4, False), ((6, 2), 4, True),
     ((2, 2), 16, False), ((10, 2), 2, False)],
)  # fmt: skip
def test_union_in_the_layer(launches, heads, stride, sinks):
    """With the other branches' rows and the gates: as without the kernel."""
    tensors = [t.requires_grad_() for t in layer_inputs(1024, 1024, *heads).values()]
    d_out = torch.randn_like(tensors[0])
    settings = SIZES | {
        "selection_stride": stride,
        "sinks": torch.randn(3, heads[0], device=DEVICE) if sinks else None,
    }
    plain = layer(tensors, d_out, {"union_sm90": False}, **settings)
    assert launches == []
    assert_near(layer(tensors, d_out, {"union_sm90": True}, **settings), plain)
    assert launches == ["forward"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads, stride", [((32, 2), 1), ((8, 2), 4), ((2, 2), 16), ((6, 2), 4)])
def test_layer(launches, heads, stride, dtype):
    """Against its branches in fp64, of selections of one token and of several."""
    assert_layer_right(
        layer_inputs(1024, 1024, *heads, dtype=dtype), SIZES,
        forced={"num_initial_blocks": 1, "num_local_blocks": 2}, selection_stride=stride,
    )  # fmt: skip
    assert launches == ["forward"] * 2  # once to know the selection


@pytest.mark.parametrize(
    "heads, D, stride, T, S, causal, tokens",
    [
        ((32, 2), 128, 4, 640, 640, True, 4), ((32, 2), 64, 16, 640, 640, True, 4),
        ((8, 2), 128, 16, 640, 704, True, 16), ((6, 2), 64, 16, 640, 640, True, 16),
        ((4, 4), 128, 16, 640, 640, True, 16), ((16, 2), 128, 2, 640, 704, True, 2),
        ((24, 2), 64, 8, 640, 640, True, 4), ((64, 1), 128, 4, 320, 320, True, 1),
        ((8, 2), 128, 16, 650, 704, False, 2), ((4, 4), 64, 16, 650, 704, False, 1),
    ],
)  # fmt: skip
def test_pairs_of_several_tokens(monkeypatch, heads, D, stride, T, S, causal, tokens):
    """Neighbours that share a ranking are one pair of the key-major backward."""
    run, counts = key_major_sm90.backward, []
    monkeypatch.setattr(key_major_sm90, "backward", lambda *a: (counts.append(a[-1]), run(*a)))
    settings = SIZES | {"num_initial_blocks": 1, "num_local_blocks": 2}
    settings |= {"selection_stride": stride, "causal": causal} | ({} if causal else {"q_offset": 0})
    tensors = [t.requires_grad_() for t in layer_inputs(T, S, *heads, D).values()]
    d_out = torch.randn_like(tensors[0])
    plain = layer(tensors, d_out, {"flash_sm90": False, "key_major_sm90": False}, **settings)
    assert counts == []
    found = layer(tensors, d_out, {"flash_sm90": True}, **settings)
    assert counts == [tokens]
    assert_near(found, plain)
    again = layer(tensors, d_out, {"flash_sm90": True}, **settings)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
