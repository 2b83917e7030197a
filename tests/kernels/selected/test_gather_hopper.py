"""Lists that fill a tile of 64 rows, of tokens that share one or united, on a Hopper: right
wherever they are walked so."""

import pytest
import torch

from benchmarks.problem import pooled
from native_sparse_attention import native_sparse_attention, selected_attention
from tests.helpers.budget import DEVICE, assert_right, draw
from tests.helpers.composition import assert_layer_right
from tests.helpers.on_hopper import MARKS, chosen

pytest.importorskip("triton")

from native_sparse_attention.kernels.common import launch
from native_sparse_attention.kernels.selected import query_major_sm90

pytestmark = MARKS
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
SIZES = pytest.mark.parametrize("size", [1.0, 8.0], ids=["by the bound", "by the maximum"])


@pytest.fixture
def launches(monkeypatch, as_written):
    """How often each kernel was launched, which take small problems too."""
    seen = {"forward": 0, "backward_q": 0}

    def counted(name, run):
        def launched(*args):
            seen[name] += 1
            return run(*args)

        return launched

    for name in seen:
        monkeypatch.setattr(query_major_sm90, name, counted(name, getattr(query_major_sm90, name)))
    with launch.using({"query_major_sm90": True}):
        yield seen


@SIZES
@DTYPES
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "H, K, n, T, S",
    [(64, 1, 13, 193, 640), (128, 2, 1, 322, 384), (64, 1, 3, 448, 448), (64, 1, 70, 64, 4800)],
)
def test_a_tile_a_list(launches, H, K, n, T, S, whole, dtype, size):
    """Lists of as many rows as a tile has, with blocks missing at their end; or anywhere, and heads
    before tokens, as some projections give them."""
    q, k, v = draw(T, S, H, K, 128, 128, dtype)
    if not whole:
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
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
    "heads, T, S, stride",
    [((32, 2), 640, 640, 4), ((32, 2), 324, 640, 4), ((16, 1), 515, 515, 16),
     ((8, 2), 640, 640, 16), ((2, 2), 640, 640, 64)],
)  # fmt: skip
def test_layer_of_a_tile_a_list(launches, heads, T, S, stride, dtype):
    """Of tokens that share it, as many as fill a tile or more, against its branches in fp64; gates
    of either sign."""
    q, k, v = draw(T, S, *heads, 128, 128, dtype)
    ck, cv = (pooled(t, 32, 16) for t in (k, v))
    gates = torch.randn(2, T, heads[0], 3, device=DEVICE).to(dtype)
    tensors = {"q": q, "k": k, "v": v, "ck": ck, "cv": cv, "branch_gates": gates}
    sizes = dict(
        compress_block_size=32, compress_block_sliding_stride=16, selection_block_size=64,
        num_selected_blocks=5, sliding_window_size=255,
    )  # fmt: skip
    assert_layer_right(
        tensors, sizes, forced={"num_initial_blocks": 1, "num_local_blocks": 2},
        selection_stride=stride,
    )  # fmt: skip
    served = S % 64 == 0  # all blocks are whole
    # once to know the selection
    assert launches == {"forward": 2 * served, "backward_q": served}


def test_gates_of_rows_far_apart(launches):
    """The third of three begins more than 2^31 elements behind the first."""
    B, T, H, D, apart = 3, 128, 64, 128, (1 << 30) + 64
    if torch.cuda.mem_get_info()[0] < 6 * apart:
        pytest.skip("needs 6.5 GB")
    shapes = (B, T, H, D), (B, T, 1, D), (B, T, 1, D), (B, T, H, 3)
    q, k, v, gates = (torch.randn(shape, device=DEVICE).to(torch.bfloat16) for shape in shapes)
    ck, cv = (pooled(t, 32, 16) for t in (k, v))
    room = gates.new_empty((B - 1) * apart + gates[0].numel())
    far = room.as_strided(gates.shape, (apart, *gates.stride()[1:])).copy_(gates)
    settings = dict(
        compress_block_size=32, compress_block_sliding_stride=16, selection_block_size=64,
        num_selected_blocks=2, sliding_window_size=63, backend="triton",
    )  # fmt: skip
    outs = [native_sparse_attention(q, k, v, ck, cv, each, **settings) for each in (gates, far)]
    assert torch.equal(*outs) and launches["forward"] == 2


@pytest.mark.parametrize("most", [True, False])
@pytest.mark.parametrize("listed_dq", [True, False])
@pytest.mark.parametrize(
    "H, rule, shared",
    [(32, launch.UnionRule(4, 1.6, 0), True), (32, launch.UnionRule(4, 1.6, 0), False),
     (8, launch.UnionRule(16, 5.0, 0), False), (64, launch.UnionRule(2, 0.95, 0), False)],
)  # fmt: skip
def test_a_tile_a_union(launches, most, listed_dq, H, rule, shared):
    """Lists of which some, or most, are united, all of these or, as the device says, where most
    are. Of few heads a group the backward has all lists block by block."""
    T, count = 656, rule.members
    q, k, v = draw(T, 704, H, 2, 128, 128, torch.bfloat16)
    lists = chosen(2, T, 2, 5, 64)
    for first in range(0, T, count):
        if first // count % 5 < (4 if most else 2):
            lists[:, first : first + count] = lists[:, first + 1 : first + 2]
    with launch.using({"key_major_dq_sm90": listed_dq, "union": rule, "union_sm90": shared}):
        assert_right(
            selected_attention, {"q": q, "k": k, "v": v}, torch.bfloat16, block_indices=lists,
            selection_block_size=64, num_initial_blocks=1, num_local_blocks=2, causal=True,
            return_lse=True, q_offset=0,
        )  # fmt: skip
    assert launches == {"forward": 1, "backward_q": int(H // 2 >= launch.FEW_ROWS)}
