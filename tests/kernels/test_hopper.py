"""The kernels of a Hopper: which calls launch them, and what the table, which holds their results
(`tests/ops/test_table.py`, "sm90"), does not reach. On a GPU."""

import pytest
import torch

from native_sparse_attention.kernels.common import launch
from tests.helpers.budget import CUDA, DEVICE, assert_right, in_chunks
from tests.helpers.calls import draw
from tests.helpers.memory import no_sync
from tests.kernels.test_same_bits import layer

if not launch.triton_is_known():
    pytest.skip("its kernels are not known to run with this Triton", allow_module_level=True)

from native_sparse_attention.kernels.flash import flash_sm90
from native_sparse_attention.kernels.selected import key_major_sm90, union_sm90

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not CUDA or not launch.supports_gluon(torch.empty(1, device=DEVICE)),
        reason="needs a Hopper",
    ),
]
BF16 = torch.bfloat16
LAUNCHES = {
    "flash": (flash_sm90, "run"),
    "key_major.forward": (key_major_sm90, "forward"),
    "key_major.backward": (key_major_sm90, "backward"),
    "union.forward": (union_sm90, "forward"),
}
FLASH = {"flash.forward": 1, "flash.dq": 1, "flash.dkv": 1}
KEY_MAJOR = {"key_major.forward": 1, "key_major.backward": 1}
FORCED = dict(num_initial_blocks=1, num_local_blocks=2)
SIZES = dict(FORCED, num_selected_blocks=5, sliding_window_size=255, memory=0)


@pytest.fixture
def launches(monkeypatch, as_written):
    """How often each was launched; they take small problems too."""
    seen = {}

    def counted(name, run):
        def launched(*args, **kwargs):
            kernel = f"flash.{args[0]}" if name == "flash" else name
            seen[kernel] = seen.get(kernel, 0) + 1
            return run(*args, **kwargs)

        return launched

    for name, (module, attribute) in LAUNCHES.items():
        monkeypatch.setattr(module, attribute, counted(name, getattr(module, attribute)))
    with launch.using({"flash_sm90": True, "union_sm90": True}):
        yield seen


def chosen(call):
    """The call with blocks before each token's own, -1 where there are no more; some rows have none
    at all."""
    indices = call.settings["block_indices"]
    B, T, R, n = indices.shape
    order = torch.rand(B, T, R, max(T // 64, n)).argsort(-1)[..., :n].int()
    own = torch.arange(T)[:, None, None] // 64
    order = torch.where((order > 0) & (order < own - 1), order, -1)
    order[:, ::11] = -1
    call.settings["block_indices"] = order.to(DEVICE)
    return call


def draw_layer(T, heads, **settings):
    """Leaves of a layer and d_out, and its settings."""
    call = draw("layer", BF16, place=(T, T), heads=heads, **{**SIZES, **settings}).leaves()
    d_out = torch.randn_like(call.tensors["q"])
    return list(call.tensors.values()), d_out, call.settings


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "branch, case, expected",
    [
        ("window", dict(heads=(16, 1, 128, 128), place=(2100, 2100)), FLASH),
        ("window", dict(heads=(8, 8, 128, 128), place=(193, 257)), {"flash.forward": 1}),
        ("compressed", dict(heads=(12, 3, 128, 128), place=(130, 830)), {"flash.forward": 1}),
        ("selected", dict(heads=(32, 2, 64, 64), place=(448, 448)), {"union.forward": 1}),
        ("selected", dict(heads=(9, 1, 64, 64), place=(193, 256)), {"union.forward": 1}),
        ("selected", dict(heads=(8, 2, 128, 128)), KEY_MAJOR),
        ("selected", dict(heads=(4, 4, 64, 64), place=(64, 448)), KEY_MAJOR),
        ("selected", dict(heads=(16, 1, 128, 128), num_local_blocks=8), FLASH),
        ("window", dict(heads=(16, 1, 64, 64), place=(2100, 2100)), FLASH),
        ("window", dict(heads=(32, 8, 64, 64), place=(700, 700)), FLASH),
        ("window", dict(heads=(8, 8, 64, 64), place=(193, 257)), FLASH),
        ("window", dict(heads=(12, 3, 64, 64), place=(64, 700), sliding_window_size=600), FLASH),
        ("compressed", dict(heads=(12, 3, 64, 64), place=(130, 830)), {"flash.forward": 1}),
        ("compressed", dict(heads=(32, 8, 64, 64), place=(2100, 2100), memory=0), FLASH),
        ("selected", dict(heads=(16, 1, 64, 64), num_local_blocks=8), FLASH),
        ("selected", dict(heads=(4, 1, 64, 64), place=(700, 700), num_local_blocks=8), FLASH),
    ],
    ids=str,
)  # fmt: skip
def test_launched(launches, branch, case, expected, dtype):
    call = draw(branch, dtype, **case)
    assert_right(call.op, call.tensors, dtype, **call.settings)
    for name, count in expected.items():
        assert launches.get(name, 0) >= count, launches


@pytest.mark.parametrize("width", [128, 64])
@pytest.mark.parametrize("w", [255, 63])
def test_launched_by_a_layer(launches, w, width):
    """A window that contains the local blocks reads them too."""
    tensors, d_out, settings = draw_layer(1024, (32, 2, width, width), sliding_window_size=w)
    none = dict.fromkeys(("flash_sm90", "key_major_sm90", "union_sm90"), False)
    layer(tensors, d_out, none, **settings)
    assert launches == {}
    layer(tensors, d_out, {}, **settings)
    assert launches["flash.forward"] == 2 + (w < 128)
    assert launches["union.forward"] == launches["key_major.backward"] == 1


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize(
    "heads, D, n, T",
    [((16, 1), 128, 13, 640), ((48, 2), 128, 3, 320), ((64, 1), 128, 2, 256),
     ((8, 2), 128, 13, 640),
     ((6, 2), 64, 5, 320), ((7, 1), 128, 3, 320), ((2, 2), 128, 13, 640)],
)  # fmt: skip
def test_chunks(launches, heads, D, n, T, number, dtype):
    """dk, dv and dq in several chunks and work tiles of a block."""
    call = chosen(draw("selected", dtype, heads=(*heads, D, D), place=(T, T), n=n, **FORCED))
    with in_chunks(64, (n / number * 1.01, 1), 1024, ENOUGH_PROGRAMS=1):
        assert_right(call.op, call.tensors, dtype, **call.settings)
    few = heads[0] // heads[1] < launch.FEW_ROWS
    assert launches["key_major.backward"] >= (number if few else 1)
    assert launches.get("key_major.forward", 0) >= few


@pytest.mark.parametrize("often", [2, 6, 9])
@pytest.mark.parametrize(
    "H, rule", [(32, launch.UnionRule(4, 1.6, 0)), (64, launch.UnionRule(2, 0.95, 0))]
)
def test_neighbours_that_are_alike(launches, H, rule, often):
    """dq is formed of unions of some of them, or of most."""
    T, size = 640, rule.members
    call = draw("selected", BF16, heads=(H, 2, 128, 128), place=(T, T), n=3, **FORCED)
    indices = chosen(call).settings["block_indices"]
    for group, first in enumerate(range(0, T, size)):
        if group % 10 < often:
            indices[:, first : first + size] = indices[:, first + 1 : first + 2]
    with launch.using({"union": rule}):
        assert_right(call.op, call.tensors, BF16, **call.settings)
    assert launches["key_major.backward"] == 1


@pytest.mark.parametrize(
    "heads, stride, T, tokens",
    [((32, 2, 128, 128), 4, 640, 4), ((32, 2, 64, 64), 16, 640, 4), ((8, 2, 128, 128), 16, 704, 16),
     ((4, 4, 128, 128), 16, 640, 16), ((16, 2, 128, 128), 2, 704, 2), ((24, 2, 64, 64), 8, 640, 4),
     ((64, 1, 128, 128), 4, 320, 1)],
)  # fmt: skip
def test_pairs_of_several_tokens(monkeypatch, as_written, heads, stride, T, tokens):
    """Neighbours that share a ranking are one pair of the key-major backward."""
    run, counts = key_major_sm90.backward, []
    monkeypatch.setattr(
        key_major_sm90, "backward", lambda *a: (counts.append(a[4].pair_tokens), run(*a))
    )
    tensors, d_out, settings = draw_layer(T, heads, selection_stride=stride)
    plain = layer(tensors, d_out, {"flash_sm90": False, "key_major_sm90": False}, **settings)
    assert counts == []
    found = layer(tensors, d_out, {"flash_sm90": True}, **settings)
    assert counts == [tokens]
    for one, other in zip(found, plain, strict=True):
        error = (one.float() - other.float()).norm() / other.float().norm()
        assert error <= torch.finfo(BF16).eps


def test_gradient_at_any_address(launches):
    """That of a part of a tensor begins where the accelerator could not read."""
    tensors, d_out, settings = draw_layer(256, (16, 2, 128, 128))
    shifted = d_out.new_empty(d_out.numel() + 1)[1:].view_as(d_out).copy_(d_out)
    found, right = (layer(tensors, grad, {}, **settings) for grad in (shifted, d_out))
    assert launches["flash.dkv"] and launches["key_major.backward"]
    assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True))


def test_captured_without_a_sync():
    """A forward and backward pass, all of these kernels in it, on streams side by side."""
    tensors, d_out, settings = draw_layer(1024, (32, 2, 128, 128))
    within = dict.fromkeys(("flash_sm90", "union_sm90"), True)
    within["union"] = launch.UnionRule(4, 1.6, min_groups=0)
    right = layer(tensors, d_out, within, **settings)
    torch.cuda.synchronize()
    with no_sync():
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
