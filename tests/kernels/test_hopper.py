"""The kernels of a Hopper that stand in for others over intervals and over listed blocks: right on
a GPU, wherever they are launched."""

import pytest
import torch

from benchmarks.problem import pooled
from native_sparse_attention import (
    compressed_attention,
    selected_attention,
    sliding_window_attention,
)
from tests.helpers import selections
from tests.helpers.budget import DEVICE, assert_right, draw
from tests.helpers.on_hopper import MARKS, chosen, layer

pytest.importorskip("triton")

from native_sparse_attention.kernels.common import launch, sm90
from native_sparse_attention.kernels.common.tile_configs import FEW_KEYS
from native_sparse_attention.kernels.selected import csr, key_major_sm90
from native_sparse_attention.kernels.topk import softmax_mass_sm90

if not sm90.triton_is_known():
    pytest.skip("its kernels are not known to run with this Triton", allow_module_level=True)

from native_sparse_attention.kernels.flash import bwd_sm90, fwd_sm90

pytestmark = MARKS
LAUNCHES = [
    ("flash", fwd_sm90, "forward"),
    ("flash", bwd_sm90, "backward_q"),
    ("flash", bwd_sm90, "backward_kv"),
    ("key_major", key_major_sm90, "backward"),
    ("topk", softmax_mass_sm90, "rank"),
]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
SIZES = pytest.mark.parametrize("size", [1.0, 8.0], ids=["by the bound", "by the maximum"])


@pytest.fixture
def launches(monkeypatch, as_written):
    """How often each was launched."""
    seen = {}

    def counted(name, run):
        def launched(*args):
            seen[name] = seen.get(name, 0) + 1
            return run(*args)

        return launched

    for operation, module, name in LAUNCHES:
        short = f"{operation}.{name}"
        monkeypatch.setattr(module, name, counted(short, getattr(module, name)))
    with launch.using({"flash_sm90": True}):  # which takes small problems too
        yield seen


def of_keys(N):
    """Launches of all kernels over N keys: dk and dv of few are another's."""
    some = {"flash.forward": 1, "flash.backward_q": 1}
    return some | {"flash.backward_kv": 1} if N > FEW_KEYS else some


@SIZES
@DTYPES
@pytest.mark.parametrize(
    "heads, D, T, S, w",
    [((16, 1), 128, 300, 300, 127), ((8, 8), 128, 193, 257, 64), ((12, 3), 128, 130, 130, 511),
     ((64, 1), 128, 37, 37, 0), ((32, 1), 128, 65, 321, 100), ((2, 1), 128, 1, 70, 33)],
)  # fmt: skip
def test_window(launches, heads, D, T, S, w, dtype, size):
    q, k, v = draw(T, S, *heads, D, D, dtype)
    assert_right(
        sliding_window_attention, {"q": q * size, "k": k, "v": v}, dtype, sliding_window_size=w,
        q_offset=S - T, return_lse=True,
    )  # fmt: skip
    assert launches == of_keys(S)


@SIZES
@DTYPES
@pytest.mark.parametrize(
    "heads, D, T, before, d",
    [((16, 1), 128, 1300, 0, 16), ((8, 8), 128, 300, 0, 4), ((12, 3), 128, 130, 700, 8),
     ((64, 1), 128, 37, 5, 16), ((2, 1), 128, 9, 69, 8)],
)  # fmt: skip
@pytest.mark.parametrize("slots", [0, 1, 70])
def test_compressed(launches, heads, D, T, before, d, slots, dtype, size):
    N = (T + before) // d
    q, k, v = draw(T, N, *heads, D, D, dtype)
    tensors = {"q": q * size, "ck": k, "cv": v}
    if slots:
        memory = torch.randn(2, heads[1], slots, D, device=DEVICE).to(dtype)
        tensors |= {"mem_k": memory[0], "mem_v": memory[1]}
    assert_right(
        compressed_attention, tensors, dtype, compress_block_sliding_stride=d, q_offset=before,
        return_lse=True,
    )  # fmt: skip
    assert launches == of_keys(N)


@SIZES
@DTYPES
@pytest.mark.parametrize(
    "heads, T, s, initial, local",
    [((16, 1), 640, 64, 1, 8), ((8, 2), 513, 32, 2, 3), ((4, 1), 300, 16, 3, 5),
     ((2, 2), 257, 128, 0, 2), ((64, 1), 130, 64, 3, 1), ((32, 1), 70, 16, 1, 70)],
)  # fmt: skip
def test_forced_blocks(launches, heads, T, s, initial, local, dtype, size):
    """Local blocks, and initial ones as a causal prefix, with a ranked block or two."""
    q, k, v = draw(T, T, *heads, 128, 128, dtype)
    assert_right(
        selected_attention, {"q": q * size, "k": k, "v": v}, dtype,
        block_indices=chosen(2, T, heads[1], 2, s), selection_block_size=s,
        num_initial_blocks=initial, num_local_blocks=local, causal=True, return_lse=True,
        q_offset=0,
    )  # fmt: skip
    assert launches["flash.forward"] == launches["flash.backward_q"] == 1
    assert launches["flash.backward_kv"] >= 1  # of many initial keys in a second launch


@DTYPES
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize(
    "heads, D, n, T",
    [((16, 1), 128, 13, 640), ((32, 2), 64, 5, 448), ((24, 2), 128, 3, 320), ((9, 1), 64, 1, 192),
     ((48, 2), 128, 3, 320), ((64, 1), 128, 2, 256), ((8, 2), 128, 13, 640), ((4, 2), 128, 4, 448),
     ((6, 2), 64, 5, 320), ((2, 1), 128, 3, 192), ((7, 1), 128, 3, 320), ((16, 2), 64, 3, 320),
     ((2, 2), 128, 13, 640), ((3, 3), 64, 3, 192)],
)  # fmt: skip
def test_listed(launches, monkeypatch, heads, D, n, T, number, dtype):
    """dk and dv, and dq of few heads a group, in several chunks and work tiles of a block."""
    of_spans = {64: csr.Budget(n / number * 1.01, 1)}
    monkeypatch.setattr(csr, "BUDGETS", dict.fromkeys(csr.BUDGETS, of_spans))
    monkeypatch.setattr(csr, "MIN_TOKENS", 1)
    monkeypatch.setattr(csr, "MIN_DQ_TILE_ROWS", 1)
    monkeypatch.setattr(launch, "ENOUGH_PROGRAMS", 1)
    monkeypatch.setattr(launch, "WORK_TILE_ROWS", 1024)
    q, k, v = draw(T, T, *heads, D, D, dtype)
    assert_right(
        selected_attention, {"q": q, "k": k, "v": v}, dtype,
        block_indices=chosen(2, T, heads[1], n, 64), selection_block_size=64,
        num_initial_blocks=1, num_local_blocks=2, causal=True, return_lse=True, q_offset=0,
    )  # fmt: skip
    few = heads[0] // heads[1] < launch.FEW_ROWS
    assert launches["key_major.backward"] >= (number if few else 1)


@pytest.mark.parametrize("most", [True, False])
@pytest.mark.parametrize(
    "H, make_unions", [(32, launch.UnionRule(4, 1.6, 0)), (64, launch.UnionRule(2, 0.95, 0))]
)
def test_alike(launches, most, H, make_unions):
    """Where neighbours are alike, dq is formed of their unions."""
    T, n, count = 640, 3, make_unions.members
    q, k, v = draw(T, T, H, 2, 128, 128, torch.bfloat16)
    lists = chosen(2, T, 2, n, 64)
    for first in range(0, T, count):
        if first // count % 5 < (4 if most else 2):
            lists[:, first : first + count] = lists[:, first + 1 : first + 2]
    with launch.using({"union": make_unions}):
        assert_right(
            selected_attention, {"q": q, "k": k, "v": v}, torch.bfloat16, block_indices=lists,
            selection_block_size=64, num_initial_blocks=1, num_local_blocks=2, causal=True,
            return_lse=True, q_offset=0,
        )  # fmt: skip
    assert launches["key_major.backward"] == 1


def assert_ranked(q, ck, S, **settings):
    """The blocks that are best by probability, in float64."""
    usual = dict(
        compress_block_size=32, compress_block_sliding_stride=16, selection_block_size=64,
        num_selected_blocks=13, num_local_blocks=2, importance="probs",
    )  # fmt: skip
    with launch.using({"softmax_mass_sm90": True}):
        selections.assert_right(q, ck, None, S, **{**usual, **settings})


@DTYPES
@pytest.mark.parametrize("heads, D", [((8, 2), 128), ((16, 2), 128), ((16, 1), 64), ((32, 1), 128),
                                      ((64, 1), 64), ((128, 2), 128)])  # fmt: skip
@pytest.mark.parametrize(
    "T, S, settings",
    [
        (1, 1, {}),
        (131, 3001, {}),
        (1027, 1027, {"with_lse": True, "num_selected_blocks": 16}),
        (333, 7111, {"num_initial_blocks": 0, "num_local_blocks": 1, "scale": -0.3}),
        (700, 3000, {"num_initial_blocks": 18, "num_selected_blocks": 1, "causal": False}),
        (500, 2500, {"selection_stride": 4}),
        (130, 130, {"selection_stride": 8}),
    ],
    ids=str,
)
def test_ranking(launches, heads, D, T, S, settings, dtype):
    """Windows that fill no step, steps even and odd in number, tiles that are not full."""
    causal = settings.get("causal", True)
    q, ck, _ = selections.draw(T, S, *heads, D, d=16, causal=causal, dtype=dtype)
    assert_ranked(q, ck, S, **settings)
    assert launches == ({"topk.rank": 1} if ck.shape[1] else {})


@pytest.mark.parametrize(
    "l, d, s, n", [(16, 16, 64, 13), (80, 16, 64, 5), (32, 16, 32, 16), (64, 16, 128, 8)]
)
@pytest.mark.parametrize("heads", [(8, 2), (16, 2), (16, 1)])
def test_ranking_of_windows(launches, heads, l, d, s, n):
    """That do not overlap, that reach as far as they may, and blocks of fewer and more of them."""
    q, ck, _ = selections.draw(150, 3000, *heads, 128, d=d, dtype=torch.bfloat16)
    sizes = selections.sizes(l, d, s)
    assert_ranked(q, ck, 3000, **sizes, num_selected_blocks=n)
    assert launches == {"topk.rank": 1}


def test_ranking_of_one_list(launches):
    """All of the best blocks lie in one list."""
    q, ck, _ = selections.draw(100, 16 * 64 * 15, 16, 1, 128, d=16, dtype=torch.bfloat16)
    q[..., 0] += 3
    ck.view(2, -1, 4, 1, 128)[:, 5::16, ..., 0] += 3
    assert_ranked(q, ck, 16 * 64 * 15)
    assert launches == {"topk.rank": 1}


def test_ranking_in_other_places(launches):
    """Queries of several calls, and heads before tokens, as some projections give them."""
    S = 2000
    q, ck, _ = selections.draw(S, S, 16, 1, 128, d=16, dtype=torch.bfloat16)
    call = selections.SETTINGS | selections.sizes(32, 16, 64)
    call |= dict(importance="probs", num_selected_blocks=13, seq_len=S, mem_k=None)
    apart = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, ck)]
    with launch.using({"softmax_mass_sm90": True}):
        whole, _ = selections.triton_backend.select_blocks(q, ck, q_offset=0, **call)
        parts = [
            selections.triton_backend.select_blocks(part, ck, q_offset=start, **call)[0]
            for part, start in ((q[:, :777], 0), (q[:, 777:], 777))
        ]
        assert torch.equal(torch.cat(parts, 1), whole)
        assert torch.equal(
            selections.triton_backend.select_blocks(*apart, q_offset=0, **call)[0], whole
        )
    assert launches == {"topk.rank": 4}


@pytest.mark.parametrize(
    "T, S, settings",
    [
        (1024, 1024, {}),
        (500, 500, {"selection_block_size": 16, "num_local_blocks": 3, "num_initial_blocks": 5}),
        (333, 1027, {"selection_block_size": 32, "num_initial_blocks": 0}),
        (333, 1027, {"selection_block_size": 128, "num_initial_blocks": 2}),
        (640, 640, {"num_local_blocks": 1, "num_initial_blocks": 3, "selection_stride": 4}),
        (640, 640, {"sliding_window_size": 63}),  # narrower than the local blocks
    ],
)
@pytest.mark.parametrize("heads", [(32, 2), (8, 2), (4, 4)])
def test_layer(launches, heads, T, S, settings):
    """As with the other kernels; the same in every run."""
    settings = {
        "compress_block_size": 32, "compress_block_sliding_stride": 16, "selection_block_size": 64,
        "num_selected_blocks": 5, "num_initial_blocks": 1, "num_local_blocks": 2,
        "sliding_window_size": 255, **settings,
    }  # fmt: skip
    H, K = heads
    q, k, v = draw(T, S, H, K, 128, 128, torch.bfloat16)
    ck, cv = (pooled(t, 32, 16) for t in (k, v))
    gates = torch.rand(2, T, H, 3, device=DEVICE).to(torch.bfloat16)
    tensors = [t.requires_grad_() for t in (q, k, v, ck, cv, gates)]
    d_out = torch.randn_like(q)
    call = tensors, d_out
    none = dict.fromkeys(("flash_sm90", "key_major_sm90", "union_sm90"), False)
    plain = layer(*call, none, **settings)
    assert launches == {}
    first = layer(*call, {}, **settings)
    local = settings["num_local_blocks"] * settings["selection_block_size"]
    # a window that contains the local blocks reads them too
    assert launches["flash.forward"] == 2 + (local > settings["sliding_window_size"] + 1)
    for one, other in zip(first, plain, strict=True):
        error = (one.float() - other.float()).norm() / other.float().norm()
        assert error <= torch.finfo(torch.bfloat16).eps
    for _ in range(3):
        again = layer(*call, {}, **settings)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_strided(launches):
    """Heads before tokens, as some projections give them."""
    q, k, v = draw(256, 256, 16, 2, 128, 128, torch.bfloat16)
    apart = [t.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in (q, k, v)]
    whole = [t.requires_grad_() for t in (q, k, v)]

    def run(tensors):
        out = sliding_window_attention(*tensors, sliding_window_size=100, backend="triton")
        return [out, *torch.autograd.grad(out.float().square().sum(), tensors)]

    for one, other in zip(run(apart), run(whole), strict=True):
        assert torch.equal(one, other)
    assert launches == dict.fromkeys(("flash.forward", "flash.backward_q", "flash.backward_kv"), 2)


def test_gradient_at_any_address(launches):
    """That of a part of a tensor begins where the accelerator could not read."""
    T, H, K = 256, 16, 2
    q, k, v = draw(T, T, H, K, 128, 128, torch.bfloat16)
    ck, cv = (pooled(t, 32, 16) for t in (k, v))
    gates = torch.rand(2, T, H, 3, device=DEVICE).to(torch.bfloat16)
    tensors = [t.requires_grad_() for t in (q, k, v, ck, cv, gates)]
    d_out = torch.randn(q.numel() + 1, device=DEVICE).to(torch.bfloat16)[1:].view_as(q)
    settings = dict(
        compress_block_size=32, compress_block_sliding_stride=16, selection_block_size=64,
        num_selected_blocks=2, num_local_blocks=2, sliding_window_size=255,
    )  # fmt: skip
    found = layer(tensors, d_out, {}, **settings)
    assert launches["flash.backward_kv"] and launches["key_major.backward"]
    for one, other in zip(found, layer(tensors, d_out.clone(), {}, **settings), strict=True):
        assert torch.equal(one, other)

    def alone(d_out):
        out = sliding_window_attention(q, k, v, sliding_window_size=100, backend="triton")
        return torch.autograd.grad(out, (q, k, v), d_out)

    for one, other in zip(alone(d_out), alone(d_out.clone()), strict=True):
        assert torch.equal(one, other)


def test_layer_of_strided_keys(launches):
    """Heads before tokens: gradients lie as they do otherwise."""
    T, H, K = 256, 32, 2
    q, k, v = draw(T, T, H, K, 128, 128, torch.bfloat16)
    ck, cv = (pooled(t, 32, 16) for t in (k, v))
    gates = torch.rand(2, T, H, 3, device=DEVICE).to(torch.bfloat16)
    d_out = torch.randn_like(q)
    settings = dict(
        compress_block_size=32, compress_block_sliding_stride=16, selection_block_size=64,
        num_selected_blocks=2, num_local_blocks=2, sliding_window_size=255,
    )  # fmt: skip
    found = []
    for apart in (False, True):
        if apart:
            k, v = (t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
        leaves = [t.detach().requires_grad_() for t in (q, k, v, ck, cv, gates)]
        found.append(layer(leaves, d_out, {}, **settings))
    assert launches["key_major.backward"] == 2
    assert all(torch.equal(*grads) for grads in zip(*found, strict=True))


def test_captured_without_a_sync(waits_for_nothing):
    """A forward and backward pass, all of these kernels in it, on streams side by side."""
    T, H, K = 1024, 32, 2
    q, k, v = draw(T, T, H, K, 128, 128, torch.bfloat16)
    ck, cv = (pooled(t, 32, 16) for t in (k, v))
    gates = torch.rand(2, T, H, 3, device=DEVICE).to(torch.bfloat16)
    tensors = [t.requires_grad_() for t in (q, k, v, ck, cv, gates)]
    d_out = torch.randn_like(q)
    settings = dict(
        compress_block_size=32, compress_block_sliding_stride=16, selection_block_size=64,
        num_selected_blocks=5, num_local_blocks=2, sliding_window_size=255,
    )  # fmt: skip
    within = dict.fromkeys(("flash_sm90", "union_sm90"), True)
    within["union"] = launch.UnionRule(4, 1.6, least=0)
    right = layer(tensors, d_out, within, **settings)
    torch.cuda.synchronize()
    with waits_for_nothing():
        layer(tensors, d_out, within, **settings)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(tensors, d_out, within, **settings)
    for _ in range(2):
        for value in captured:
            value.zero_()
        graph.replay()
        for one, other in zip(captured, right, strict=True):
            assert torch.equal(one, other)
