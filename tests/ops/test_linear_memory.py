"""The specification in memory linear in the length: its tiles, its memory, and derivatives of
derivatives. Its numbers are in the table (`test_table.py`)."""

import itertools
import shutil

import pytest
import torch

from native_sparse_attention import (
    compressed_attention,
    selected_attention,
    sliding_window_attention,
)
from native_sparse_attention.ops import chunked, reference
from tests.helpers import layers, memory

BLOCKS = dict(compress_block_size=8, compress_block_sliding_stride=4, selection_block_size=8)
WHOLE = 2**40


def normal(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


@pytest.fixture
def cut(monkeypatch):
    """Cuts calls into tiles and chunks of a few queries and keys, or leaves them whole; returns how
    many ran since the last call."""
    pieces = []

    def counted(fn):
        return lambda *args, **kwargs: pieces.append(fn) or fn(*args, **kwargs)

    monkeypatch.setattr(chunked, "attend_rows", counted(chunked.attend_rows))
    monkeypatch.setattr(reference.RankedQueries, "slice", counted(reference.RankedQueries.slice))
    monkeypatch.setattr(chunked, "LEAST_QUERIES", 1)
    monkeypatch.setattr(chunked, "KEYS", 16)

    def cut(scores):
        """Scores of a tile or chunk, or WHOLE."""
        monkeypatch.setattr(chunked, "MAX_SCORES", WHOLE if scores == WHOLE else 0)
        monkeypatch.setattr(chunked, "CHUNK_SCORES", scores)
        count = len(pieces)
        pieces.clear()
        return count

    return cut


@pytest.mark.slow(one_of=2)
@pytest.mark.parametrize("gated", [True, False])
def test_gradients_of_gradients(cut, gated):
    q, k, v = normal(1, 3, 2, 2), normal(1, 6, 1, 2), normal(1, 6, 1, 1)
    gates = normal(1, 3, 1, 2) if gated else None
    indices = torch.tensor([0, 1]).expand(1, 3, 1, 2)

    def op(q, k, v, gates):
        kwargs = dict(selection_block_size=2, gates=gates, soft_cap=3.0)
        return selected_attention(q, k, v, indices, **kwargs)

    cut(12)
    assert torch.autograd.gradcheck(op, (q, k, v, gates))
    assert torch.autograd.gradgradcheck(op, (q, k, v, gates))
    assert cut(WHOLE) > 2


def test_autocast(cut):
    """The dtype of autocast's matmuls, in the forward and again in the backward."""
    q, k, v = (normal(2, 40, h, 8, dtype=torch.float32) for h in (4, 2, 2))
    indices = torch.randint(0, 5, (2, 40, 2, 1))
    results = []
    for scores in (400, WHOLE):
        cut(scores)
        with torch.autocast("cpu", torch.bfloat16):
            out = selected_attention(q, k, v, indices, selection_block_size=8)
        assert out.dtype == torch.bfloat16
        weights = torch.arange(out.numel()).sin().view(out.shape)
        results.append((out, *torch.autograd.grad((out * weights).sum(), (q, k, v))))
        assert (cut(WHOLE) > 2) == (scores == 400)
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, atol=0.03, rtol=0.03)


# the selection, and the gates of differentiable top-k


def test_hidden_keys_are_not_computed(cut, monkeypatch):
    """Keys past a chunk's queries are cut, and those before its window."""
    q = torch.randn(2, 64, 4, 8)
    tiles, form_tile = [], chunked.form_tile

    def record(q, k, gates, rows, keys, plan):
        tiles.append((rows.stop - rows.start, keys.stop - keys.start))
        return form_tile(q, k, gates, rows, keys, plan)

    monkeypatch.setattr(chunked, "form_tile", record)
    cut(2 * 4 * 16 * 16)  # 16 queries by the 16 keys of a tile
    sliding_window_attention(q, q, q, sliding_window_size=3, return_lse=True)
    assert tiles == [(16, 16)] + [(16, 16), (16, 3)] * 3
    tiles.clear()
    ck = torch.randn(2, 32, 4, 8)
    compressed_attention(q, ck, ck, compress_block_sliding_stride=2)
    assert tiles == [(16, 7), (16, 15), (16, 16), (16, 7), (16, 16), (16, 15)]
    tiles.clear()
    indices = torch.full((2, 64, 4, 1), -1)
    selected_attention(q, q, q, indices, selection_block_size=8)
    assert tiles == [(16, 16)] * (1 + 2 + 3 + 4)
    settings = dict(seq_len=64, q_offset=0, causal=True, num_selected_blocks=1)
    settings |= dict(importance="logits", interpolated_importance_score=False)
    settings |= dict(num_initial_blocks=0, num_local_blocks=1, selection_stride=1)
    ranking = reference.Ranking(**BLOCKS, **settings, query_heads_share_selected_kv=True)
    queries = reference.RankedQueries(q, ck[:, :16], None, None, None, None)
    monkeypatch.setattr(chunked, "CHUNK_SCORES", 2 * 4 * 16 * 16)
    assert [windows.stop for _, windows in chunked.query_chunks(queries, ranking)] == [3, 7, 11, 15]


LONG = dict(
    compress_block_size=128,
    compress_block_sliding_stride=128,
    selection_block_size=128,
    heads=1,
    kv_heads=1,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings, longest", [({}, 16384), (dict(importance="probs", use_diff_topk=True), 8192)]
)
def test_a_layer_trains_in_linear_memory_on_the_cpu(settings, longest, monkeypatch):
    module = layers.layer(torch.float32, **settings, **LONG)
    monkeypatch.setattr(chunked, "MAX_SCORES", 32 * longest)
    monkeypatch.setattr(chunked, "CHUNK_SCORES", 32 * longest)
    x = torch.randn(1, longest, layers.DIM)

    def step(T):
        """Its peak, and what the first tokens have of it."""
        given, outs = x[:, :T].clone().requires_grad_(), []
        peak = memory.peak(lambda: outs.append(module(given)) or outs[0][:, :512].sum().backward())
        assert given.grad[:, :512].isfinite().all() and not given.grad[:, 512:].any()
        return peak, (outs[0][:, :512].detach(), given.grad[:, :512])

    steps = [step(T) for T in (longest // 16, longest // 4, longest)]
    for (less, _), (more, _) in itertools.pairwise(steps):
        assert more < 4 * less, [peak for peak, _ in steps]
    # the specification as it is has the same numbers; its memory is quadratic
    monkeypatch.setattr(chunked, "MAX_SCORES", WHOLE)
    (less, first), (more, _) = step(1024), step(4096)
    assert more > 8 * less
    for _, values in steps:
        torch.testing.assert_close(values, first)


@pytest.mark.gpu
def test_memory_of_the_layer_is_linear_on_a_gpu():
    module = layers.layer(torch.float32, backend="eager").cuda()

    def step(T):
        x = torch.randn(1, T, layers.DIM, device="cuda", requires_grad=True)
        return lambda: module(x).sum().backward()

    step(64)()
    peaks = [memory.cuda_peak(step(T)) for T in (4096, 16384, 65536)]
    assert all(more < 5 * less for less, more in itertools.pairwise(peaks)), peaks


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with it")
def test_compiled_for_a_cpu():
    """By torch's own compiler, of keys that fill no block, forward and backward."""
    q, k, v = (torch.randn(1, 75, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    lists = torch.randint(-1, 5, (1, 75, 2, 2), dtype=torch.int32)
    gates, weights = torch.rand(1, 75, 2, 2, dtype=torch.float64), torch.randn_like(q)
    leaves = [t.requires_grad_() for t in (q, k, v, gates)]

    def attend(q, k, v, gates):
        return selected_attention(
            q, k, v, lists, gates=gates, selection_block_size=16, backend="eager"
        )

    results = []
    for call in (attend, torch.compile(attend, fullgraph=True)):
        out = call(*leaves)
        results.append([out, *torch.autograd.grad((out * weights).sum(), leaves)])
    torch.testing.assert_close(*results)
