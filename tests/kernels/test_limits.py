"""The edges of the kernels: what no tile holds, work that is split, offsets and addresses."""

import functools

import pytest
import torch

from native_sparse_attention import selected_attention
from native_sparse_attention.kernels.common import launch
from tests.helpers.budget import CUDA, DEVICE, assert_right, in_chunks
from tests.helpers.calls import draw, normal

pytestmark = pytest.mark.kernels


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(2, 2, 16, 16), (8, 4, 16, 16), (12, 1, 16, 16)], ids=str)
def test_block_that_all_choose(heads):
    """Its queries are cut into several work tiles, and tokens and KV heads into several chunks."""
    call = draw("selected", place=(35, 50), heads=heads, n=2, selection_block_size=8)
    call.settings["block_indices"][:] = torch.tensor([0, -1], device=DEVICE)
    with in_chunks(8, (0.0, 16), 16):
        assert_right(call.op, call.tensors, torch.float32, **call.settings)


@pytest.mark.parametrize("causal", [True, False])
def test_window_in_splits(monkeypatch, causal):
    """Queries that see a block of keys are cut into splits of one tile each."""
    splits, query_splits = [], launch.query_splits
    monkeypatch.setattr(launch, "MIN_SPLIT_TILES", 1)
    monkeypatch.setattr(
        launch, "query_splits", lambda *args: splits.append(query_splits(*args)) or splits[-1]
    )
    T = 131 if CUDA else 45
    heads = (4, 2, 16, 16)
    call = draw("window", place=(T, T), heads=heads, causal=causal, sliding_window_size=21)
    assert_right(call.op, call.tensors, torch.float32, **call.settings)
    assert max(splits) > 1


def test_call_that_no_tile_holds():
    q = normal(1, 4, 1, 16)
    lists = torch.zeros(1, 4, 1, 1, dtype=torch.int32, device=DEVICE)
    attend = functools.partial(selected_attention, q, q, q, lists, selection_block_size=256)
    with pytest.raises(NotImplementedError, match="selection_block_size is 256, at most 128"):
        attend(backend="triton")
    assert attend(backend=("triton", "eager")).shape == q.shape


@pytest.mark.gpu
@pytest.mark.parametrize("branch", ["compressed", "window"])
@pytest.mark.parametrize("heads", [(3, 1, 192, 192), (6, 2, 144, 160), (6, 1, 224, 256)], ids=str)
def test_wide_heads_in_odd_groups(branch, heads):
    """In two stages ptxas compiles them wrong."""
    window = dict(sliding_window_size=63) if branch == "window" else {}
    call = draw(branch, torch.float16, heads=heads, lengths=[16, 0, 129], causal=False, **window)
    assert_right(call.op, call.tensors, torch.float16, **call.settings)


@pytest.mark.gpu
def test_gates_of_rows_far_apart():
    """The third of three begins more than 2^31 elements behind the first."""
    apart = (1 << 30) + 64
    if torch.cuda.mem_get_info()[0] < 6 * apart:
        pytest.skip("needs 6.5 GB")
    heads, place = (64, 1, 128, 128), (128, 128)
    call = draw("layer", torch.bfloat16, place=place, heads=heads, batch=3, memory=0)
    gates = call.tensors["branch_gates"]
    whole = gates.new_empty(2 * apart + gates[0].numel())
    far = whole.as_strided(gates.shape, (apart, *gates.stride()[1:])).copy_(gates)
    other = call._replace(tensors=call.tensors | {"branch_gates": far})
    assert torch.equal(call("triton"), other("triton"))
