"""Lists that fill a tile of 64 rows, of tokens that share one or united, on a Hopper: right
wherever they are walked so."""

import pytest
import torch

from benchmarks.problem import pooled
from native_sparse_attention import selected_attention
from tests.budget import DEVICE, assert_right, draw
from tests.composition import assert_layer_right
from tests.on_hopper import MARKS, chosen

pytest.importorskip("triton")

from native_sparse_attention.kernels import launch
from native_sparse_attention.kernels.hopper import gather_launch

pytestmark = MARKS
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
SIZES = pytest.mark.parametrize("size", [1.0, 8.0], ids=["by the bound", "by the maximum"])


@pytest.fixture
def launches(monkeypatch):
    """How often each kernel was launched, which take small problems too."""
    seen = {"forward": 0, "backward_q": 0}

    def counted(name, run):
        def launched(*args):
            seen[name] += 1
            return run(*args)

        return launched

    for name in seen:
        monkeypatch.setattr(gather_launch, name, counted(name, getattr(gather_launch, name)))
    with launch.using({"gather": True}):
        yield seen


@SIZES
@DTYPES
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "H, K, n, T, S", [(64, 1, 13, 193, 640), (128, 2, 1, 322, 384), (64, 1, 3, 448, 448)]
)
def test_a_tile_a_list(launches, H, K, n, T, S, whole, dtype, size):
    """Lists of as many rows as a tile has, with blocks missing at their end or anywhere."""
    q, k, v = draw(T, S, H, K, 128, 128, dtype)
    lists = chosen(2, S, K, n, 64)[:, S - T :].contiguous()
    if not whole:
        lists[..., ::3] = -1
    assert_right(
        selected_attention, {"q": q * size, "k": k, "v": v}, dtype, block_indices=lists,
        selection_block_size=64, num_initial_blocks=1, num_local_blocks=2, causal=True,
        return_lse=True, q_offset=S - T,
    )  # fmt: skip
    assert launches == {"forward": 1, "backward_q": 1}


@DTYPES
@pytest.mark.parametrize(
    "heads, T, stride",
    [((32, 2), 640, 4), ((16, 1), 515, 16), ((8, 2), 640, 16), ((2, 2), 640, 64)],
)
def test_layer_of_a_tile_a_list(launches, heads, T, stride, dtype):
    """Of tokens that share it, as many as fill a tile or more, against its branches in fp64."""
    q, k, v = draw(T, T, *heads, 128, 128, dtype)
    ck, cv = (pooled(t, 32, 16) for t in (k, v))
    gates = torch.rand(2, T, heads[0], 3, device=DEVICE).to(dtype)
    tensors = {"q": q, "k": k, "v": v, "ck": ck, "cv": cv, "branch_gates": gates}
    sizes = dict(
        compress_block_size=32, compress_block_sliding_stride=16, selection_block_size=64,
        num_selected_blocks=5, sliding_window_size=255,
    )  # fmt: skip
    assert_layer_right(
        tensors, sizes, forced={"num_initial_blocks": 1, "num_local_blocks": 2},
        selection_stride=stride,
    )  # fmt: skip
    served = T % 64 == 0  # all blocks are whole
    # once to know the selection
    assert launches == {"forward": 2 * served, "backward_q": served}


@pytest.mark.parametrize("most", [True, False])
@pytest.mark.parametrize("listed_dq", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_a_tile_a_union(launches, most, listed_dq, shared):
    """Lists of which some, or most, are united four at a time, all of these or, as the device says,
    where most are."""
    T = 648
    q, k, v = draw(T, 704, 32, 2, 128, 128, torch.bfloat16)
    lists = chosen(2, T, 2, 5, 64)
    for first in range(0, T, 4):
        if first // 4 % 5 < (4 if most else 2):
            lists[:, first : first + 4] = lists[:, first + 1 : first + 2]
    rule = launch.Unite(4, 1.6, 0)
    with launch.using({"listed_dq": listed_dq, "unite": rule, "shared": shared}):
        assert_right(
            selected_attention, {"q": q, "k": k, "v": v}, torch.bfloat16, block_indices=lists,
            selection_block_size=64, num_initial_blocks=1, num_local_blocks=2, causal=True,
            return_lse=True, q_offset=0,
        )  # fmt: skip
    assert launches == {"forward": 1, "backward_q": 1}
