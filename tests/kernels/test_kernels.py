"""The Triton kernels against the reference: in the interpreter on a CPU (float32, small), on a GPU
in every dtype by the error budget."""

import functools
import itertools

import pytest
import torch

from native_sparse_attention import (
    compressed_attention,
    selected_attention,
    sliding_window_attention,
)
from tests.helpers.budget import CUDA, DEVICE, assert_right, draw
from tests.helpers.interpreter import not_of_3_4

pytestmark = pytest.mark.kernels


if CUDA:
    HEADS = [
        *((torch.bfloat16, heads) for heads in [(4, 4, 64, 64), (6, 2, 128, 128), (16, 1, 80, 96)]),
        *((torch.bfloat16, heads) for heads in [(64, 4, 192, 128), (5, 1, 40, 256)]),
        (torch.float16, (8, 2, 128, 128)),
        (torch.float32, (6, 2, 64, 64)),
        (torch.float32, (4, 1, 128, 80)),
    ]
    PLACES = [(1, 1), (63, 63), (64, 64), (65, 65), (131, 131), (37, 211), (300, 300)]
else:
    HEADS = [(torch.float32, heads) for heads in [(2, 2, 16, 16), (3, 1, 24, 16), (4, 2, 16, 40)]]
    PLACES = [(1, 1), (17, 17), (9, 41)]
both = pytest.mark.parametrize("causal", [True, False])
cases = pytest.mark.parametrize(
    "dtype, heads, place",
    [(*kind, place) for kind, place in itertools.product(HEADS, PLACES)],
    ids=lambda value: str(value).replace("torch.", ""),
)


@pytest.mark.slow(one_of=3)
@both
@cases
def test_window(dtype, heads, place, causal):
    q, k, v = draw(*place, *heads, dtype)
    tensors = {"q": q, "k": k, "v": v}
    assert_right(
        sliding_window_attention,
        tensors,
        dtype,
        sliding_window_size=21,
        causal=causal,
        return_lse=True,
    )


@pytest.mark.slow(one_of=3)
@both
@cases
def test_compressed(dtype, heads, place, causal):
    (T, S), (H, K, D, E), d = place, heads, 4
    q, ck, cv = draw(T, S // d if causal else -(-S // d), H, K, D, E, dtype)
    for m in (0, 2):
        mem = [torch.randn(K, m, w, device=DEVICE).to(dtype) if m else None for w in (D, E)]
        tensors = {"q": q, "ck": ck, "cv": cv, "mem_k": mem[0], "mem_v": mem[1]}
        assert_right(
            compressed_attention,
            tensors,
            dtype,
            return_lse=True,
            compress_block_sliding_stride=d,
            causal=causal,
            seq_len=S,
        )


def draw_lists(T, S, heads, n, s):
    """Block indices as a caller may give them: any order, empty slots, forced blocks, repeats,
    blocks ahead of the query."""
    lists = torch.randint(-1, -(-S // s), (2, T, heads, n), device=DEVICE)
    lists[:, ::3, :, 1:2] = lists[:, ::3, :, :1]
    return lists.to(torch.int32)


def assert_selected(dtype, heads, place, *, n, s, each, causal, gated, **kwargs):
    q, k, v = draw(*place, *heads, dtype)
    lists = draw_lists(*place, heads[0] if each else heads[1], n, s)
    gates = torch.rand(lists.shape, device=DEVICE).to(dtype) + 0.5 if gated else None
    if gated:
        # of blocks that are listed twice one gate counts; which, nobody says
        lists = lists[..., :1]
        gates = gates[..., :1]
    assert_right(
        functools.partial(selected_attention, block_indices=lists, return_lse=True),
        {"q": q, "k": k, "v": v, "gates": gates},
        dtype,
        selection_block_size=s,
        causal=causal,
        **kwargs,
    )


@pytest.mark.slow(one_of=8)
@both
@cases
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_selected(dtype, heads, place, causal, each):
    forced = {"num_initial_blocks": 1, "num_local_blocks": 2}
    assert_selected(dtype, heads, place, n=3, s=16, each=each, causal=causal, gated=False, **forced)


@pytest.mark.slow(one_of=6)
@both
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize("heads", [(2, 2, 16, 16), (12, 1, 16, 16)], ids=["G=1", "G=12"])
@pytest.mark.parametrize(
    "n, s, initial, local",
    [(2, 4, 0, 1), (1, 12, 0, 0), (2, 128, 1, 1), (0, 8, 0, 0)]
    + [(3, 8, 2, 0), (2, 16, 0, 3), (0, 8, 1, 1)] * CUDA,
)
def test_selected_settings(n, s, initial, local, heads, each, causal):
    # in the interpreter one of the two, in turn
    gates = (False, True) if CUDA else (each == causal,)
    for gated in gates if n else (False,):
        assert_selected(
            torch.float32, heads, (29, 50) if CUDA else (7, 26), n=n, s=s, each=each,
            causal=causal, gated=gated, num_initial_blocks=initial, num_local_blocks=local,
        )  # fmt: skip


GATED = [torch.float32] + [torch.bfloat16] * CUDA


@pytest.mark.slow(one_of=3)
@not_of_3_4
@both
@pytest.mark.parametrize("dtype", GATED, ids=str)
@pytest.mark.parametrize("heads, s", [((12, 1, 16, 16), 48), ((16, 1, 40, 16), 128)], ids=str)
def test_gates_of_blocks_wider_than_a_tile(heads, s, dtype, causal):
    """The gradient of a gate adds up over several tiles of its block."""
    T, S = (5, 3 * s - 7) if not CUDA else (201, 6 * s - 7)
    q, k, v = draw(T, S, *heads, dtype)
    blocks = torch.stack([torch.randperm(-(-S // s))[:2] for _ in range(2 * T)])
    lists = blocks.int().view(2, T, 1, 2).to(DEVICE)
    lists[:, ::4, :, 1] = -1
    gates = torch.rand(lists.shape, device=DEVICE).to(dtype) + 0.5
    assert_right(
        functools.partial(selected_attention, block_indices=lists),
        {"q": q, "k": k, "v": v, "gates": gates},
        dtype,
        selection_block_size=s,
        causal=causal,
        num_initial_blocks=0,
        num_local_blocks=1,
    )


@pytest.mark.slow(one_of=3)
@pytest.mark.parametrize("scale", [None, -0.7, 0.0])
@pytest.mark.parametrize("heads", [(2, 1, 16, 16), (12, 1, 16, 16)], ids=["G=2", "G=12"])
def test_whole_blocks_and_any_scale(heads, scale):
    """Blocks that fill a tile and end with the keys: nothing of a tile is masked. And scales that a
    maximum does not go through."""
    T, S, s = 5, 64, 16
    q, k, v = draw(T, S, *heads, torch.float32)
    lists = draw_lists(T, S, heads[1], 3, s)
    tensors = {"q": q, "k": k, "v": v}
    settings = {"return_lse": True, "scale": scale}
    assert_right(
        lambda q, k, v, **kwargs: selected_attention(q, k, v, lists, **kwargs), tensors,
        torch.float32, selection_block_size=s, **settings,
    )  # fmt: skip
    assert_right(
        sliding_window_attention, tensors, torch.float32, sliding_window_size=21, **settings
    )


@pytest.mark.slow
def test_block_that_all_choose(monkeypatch):
    """A list of queries that is cut into several items, and tokens and KV heads into several
    spans."""
    from native_sparse_attention.kernels.common import launch
    from native_sparse_attention.kernels.selected import csr

    monkeypatch.setattr(launch, "WORK_TILE_ROWS", 16)
    few = {8: csr.Budget(0.0, 16)}
    monkeypatch.setattr(csr, "BUDGETS", dict.fromkeys(csr.BUDGETS, few))
    monkeypatch.setattr(csr, "MIN_TOKENS", 1)
    monkeypatch.setattr(csr, "MIN_DQ_TILE_ROWS", 1)
    lengths = (45, 45, 45) if CUDA else (35, 35, 9)
    for T, H, K in zip(lengths, (2, 8, 12), (2, 4, 1), strict=True):
        heads = (H, K, 16, 16)
        q, k, v = draw(T, T + 15, *heads)
        lists = torch.zeros(2, T, heads[1], 2, dtype=torch.int32, device=DEVICE)
        lists[..., 1] = -1
        assert_right(
            functools.partial(selected_attention, block_indices=lists, return_lse=True),
            {"q": q, "k": k, "v": v},
            torch.float32,
            selection_block_size=8,
        )


@both
def test_window_in_shares(monkeypatch, causal):
    """Queries that see a block of keys are cut into shares of one tile each."""
    from native_sparse_attention.kernels.common import launch

    shares, query_splits = [], launch.query_splits
    monkeypatch.setattr(launch, "MIN_SPLIT_TILES", 1)
    monkeypatch.setattr(
        launch, "query_splits", lambda *args: shares.append(query_splits(*args)) or shares[-1]
    )
    q, k, v = draw(131 if CUDA else 45, 131 if CUDA else 45, 4, 2, 16, 16)
    assert_right(
        sliding_window_attention, {"q": q, "k": k, "v": v}, torch.float32, sliding_window_size=21,
        causal=causal,
    )  # fmt: skip
    assert max(shares) > 1


def test_rows_that_start_at_different_places():
    q, k, v = draw(7, 40, 4, 2, 16, 16)
    tensors = {"q": q, "k": k, "v": v}
    starts = torch.tensor([30, 11], device=DEVICE)
    assert_right(
        sliding_window_attention,
        tensors,
        torch.float32,
        sliding_window_size=9,
        q_offset=starts,
        return_lse=True,
    )
    assert_right(
        functools.partial(
            selected_attention, block_indices=draw_lists(7, 40, 2, 2, 8), return_lse=True
        ),
        tensors,
        torch.float32,
        selection_block_size=8,
        q_offset=starts,
    )
    tensors = {"q": q, "ck": k[:, :10], "cv": v[:, :10]}
    assert_right(
        compressed_attention,
        tensors,
        torch.float32,
        return_lse=True,
        compress_block_sliding_stride=4,
        q_offset=starts,
    )


def test_offsets_that_are_strided():
    """Kernels read them by address."""
    q, k, v = draw(7, 40, 4, 2, 16, 16)
    for starts in (torch.tensor([30], device=DEVICE), torch.tensor([[30, 0], [11, 0]])):
        starts = starts.expand(2) if starts.ndim == 1 else starts.to(DEVICE)[:, 0]
        assert not starts.is_contiguous()
        assert_right(
            sliding_window_attention, {"q": q, "k": k, "v": v}, torch.float32,
            sliding_window_size=9, q_offset=starts,
        )  # fmt: skip


def test_call_that_no_tile_holds():
    q = torch.randn(1, 4, 1, 16, device=DEVICE)
    lists = torch.zeros(1, 4, 1, 1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(NotImplementedError, match="selection_block_size is 256, at most 128"):
        selected_attention(q, q, q, lists, selection_block_size=256, backend="triton")
    out = selected_attention(q, q, q, lists, selection_block_size=256, backend=("triton", "eager"))
    assert out.shape == q.shape


def test_strided_inputs_and_a_repeat():
    """Heads before tokens, as a layer lays them out; twice the same, bit for bit."""
    q, k, v = (
        t.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        for t in draw(*((50, 50) if CUDA else (21, 21)), 4, 2, 16, 16)
    )
    runs = []
    for inputs in (
        (q, k, v),
        (q, k, v),
        [t.detach().contiguous().requires_grad_() for t in (q, k, v)],
    ):
        out = sliding_window_attention(*inputs, sliding_window_size=7, backend="triton")
        runs.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0]))


@pytest.mark.gpu
def test_many_tokens():
    """Past 2^31 elements in one tensor: 64-bit offsets. The last token sees what it should."""
    T, H, K, D = 300_000, 64, 4, 128
    q = torch.randn(1, T, H, D, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, T, K, D, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    out = sliding_window_attention(q, k, v, sliding_window_size=511, backend="triton")
    last = slice(T - 512, T)
    expected = sliding_window_attention(
        q[:, -1:].float(), k[:, last].float(), v[:, last].float(), sliding_window_size=511,
        backend="eager",
    )  # fmt: skip
    torch.testing.assert_close(out[:, -1:].float(), expected, atol=2e-2, rtol=2e-2)
