"""The specification in memory linear in the length: the same numbers, by tiles and by chunks."""

import itertools
import shutil

import pytest
import torch

from native_sparse_attention import (
    compressed_attention,
    select_blocks,
    selected_attention,
    sliding_window_attention,
)
from native_sparse_attention.ops.reference import eager, gathered, online, query_chunks, tiled
from tests.helpers import layers, memory

B, H, K, D, E = 2, 4, 2, 4, 6
BLOCKS = dict(compress_block_size=8, compress_block_sliding_stride=4, selection_block_size=8)
WHOLE = 2**40


def normal(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def flat(given):
    return [t for t in (given if isinstance(given, tuple) else (given,)) if t is not None]


@pytest.fixture
def cut(monkeypatch):
    """Cuts calls into tiles and chunks of a few queries and keys, and says how many ran since it
    was asked last; or leaves them whole."""
    pieces = []

    def counted(fn):
        return lambda *args, **kwargs: pieces.append(fn) or fn(*args, **kwargs)

    monkeypatch.setattr(online, "attend_rows", counted(online.attend_rows))
    monkeypatch.setattr(gathered, "attend_rows", counted(gathered.attend_rows))
    monkeypatch.setattr(query_chunks, "Chunk", counted(query_chunks.Chunk))
    monkeypatch.setattr(query_chunks, "LEAST_QUERIES", 1)
    monkeypatch.setattr(tiled, "LEAST_QUERIES", 1)
    monkeypatch.setattr(tiled, "KEYS", 16)

    def cut(scores):
        """What a tile and a chunk may form, or WHOLE."""
        monkeypatch.setattr(eager, "MAX_SCORES", WHOLE if scores == WHOLE else 0)
        monkeypatch.setattr(tiled, "TILE_SCORES", scores)
        monkeypatch.setattr(query_chunks, "CHUNK_SCORES", scores)
        count = len(pieces)
        pieces.clear()
        return count

    return cut


def assert_same(op, cut, scores, *tensors, **kwargs):
    """In pieces and whole: outputs and every gradient to rounding, indices exactly."""
    leaves = [t for t in (*tensors, *kwargs.values()) if isinstance(t, torch.Tensor)]
    leaves = [t for t in leaves if t.requires_grad]
    results = []
    for most in (scores, WHOLE):
        cut(most)
        values = flat(op(*tensors, **kwargs))
        assert (cut(most) > 2) == (most == scores)
        torch.manual_seed(1)
        smooth = [t.masked_fill(t.isneginf(), 0.0) for t in values if t.is_floating_point()]
        loss = sum((t * torch.randn(t.shape, dtype=t.dtype)).sum() for t in smooth)
        grads = []
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
        results.append((values, grads))
    (pieces, pieces_grads), (whole, whole_grads) = results
    for actual, expected in zip((*pieces, *pieces_grads), (*whole, *whole_grads), strict=True):
        tolerance = 1e-12 if expected.is_floating_point() else 0
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.fixture(params=["gathered", "by queries"])
def selected_by(request, monkeypatch):
    monkeypatch.setattr(eager, "few_blocks", lambda *_: request.param == "gathered")


@pytest.mark.parametrize("T, S", [(37, 37), (19, 50)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lse", [True, False])
def test_compressed_and_window(cut, T, S, causal, lse):
    q, k, v = normal(B, T, H, D), normal(B, S, K, D), normal(B, S, K, E)
    place = dict(causal=causal, return_lse=lse)
    d = BLOCKS["compress_block_sliding_stride"]
    W = S // d if causal else -(-S // d)
    for m in (0, 3):
        memories = dict(mem_k=normal(K, m, D), mem_v=normal(K, m, E)) if m else {}
        kwargs = dict(compress_block_sliding_stride=d, seq_len=S, **memories, **place)
        ck, cv = normal(B, W, K, D), normal(B, W, K, E)
        assert_same(compressed_attention, cut, 5 * B * H * 16, q, ck, cv, **kwargs)
    for w in (0, 6) if lse else (30,):  # whole sequences without lse go another way
        kwargs = dict(sliding_window_size=w, **place)
        assert_same(sliding_window_attention, cut, 5 * B * H * 16, q, k, v, **kwargs)


@pytest.mark.slow(one_of=3)
@pytest.mark.parametrize("T, S", [(37, 37), (19, 50)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [K, H])
def test_selected(cut, selected_by, T, S, causal, heads):
    q, k, v = normal(B, T, H, D), normal(B, S, K, D), normal(B, S, K, E)
    indices = torch.randint(-1, -(-S // 8), (B, T, heads, 3)).sort(dim=-1).values
    indices = indices.masked_fill(indices.diff(dim=-1, prepend=indices[..., :1] - 1) == 0, -1)
    scores = 4 * B * H * S
    for gated, lse, initial, local in ((1, 0, 1, 2), (1, 1, 0, 0), (0, 1, 2, 1), (0, 0, 0, 1)):
        kwargs = dict(selection_block_size=8, causal=causal, return_lse=bool(lse))
        kwargs |= dict(num_initial_blocks=initial, num_local_blocks=local)
        kwargs |= dict(soft_cap=1.5, sinks=normal(H)) if lse else {}
        kwargs["gates"] = normal(B, T, heads, 3) if gated else None
        assert_same(selected_attention, cut, scores, q, k, v, indices, **kwargs)


def test_nothing_selected(cut, selected_by):
    q, k, v = normal(B, 9, H, D), normal(B, 20, K, D), normal(B, 20, K, E)
    none = torch.empty(B, 9, K, 0, dtype=torch.int32)
    kwargs = dict(selection_block_size=8, return_lse=True)
    for local in (0, 1):
        given = (q, k, v, none)
        assert_same(selected_attention, cut, 100, *given, num_local_blocks=local, **kwargs)


@pytest.mark.slow(one_of=4)
@pytest.mark.parametrize("gated", [True, False])
def test_gradients_of_gradients(cut, selected_by, gated):
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


def test_autocast(cut, selected_by):
    """The dtype of autocast's matmuls, in the forward and again in the backward."""
    q, k, v = (normal(B, 40, h, 8, dtype=torch.float32) for h in (H, K, K))
    indices = torch.randint(0, 5, (B, 40, K, 1))
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


SELECTIONS = {
    "logits": {},
    "probs": dict(importance="probs"),
    "interpolated": dict(interpolated_importance_score=True),
    "own": dict(query_heads_share_selected_kv=False),
    "long windows": dict(compress_block_sliding_stride=8, selection_block_size=4),
    "shared by 4": dict(selection_stride=4),
    "shared by 8, probs": dict(selection_stride=8, importance="probs"),
    "initial and local": dict(num_initial_blocks=1, num_local_blocks=2),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", SELECTIONS)
def test_selection(cut, name, causal):
    T, S = (40, 80) if SELECTIONS[name].get("selection_stride") else (37, 61)
    settings = BLOCKS | dict(num_selected_blocks=2, causal=causal) | SELECTIONS[name]
    d = settings["compress_block_sliding_stride"]
    W = S // d if causal else -(-S // d)
    q, ck, mem_k = normal(B, T, H, D), normal(B, W, K, D), normal(K, 1, D)
    kwargs = dict(seq_len=S, mem_k=mem_k, return_gates=True, **settings)
    if not causal:
        kwargs["q_offset"] = S - T
    scores = B * K * W * (4 * d if "interpolated" in name else 4)
    assert_same(select_blocks, cut, scores, q, ck, **kwargs)


@pytest.mark.parametrize("stride", [1, 4])
def test_rows_at_different_places(cut, selected_by, stride):
    """Whose groups no chunk can be aligned to: a group may be cut for some rows."""
    T, S = 23, 48
    offset = torch.tensor([9, 20])
    q, k, v = normal(B, T, H, D), normal(B, S, K, D), normal(B, S, K, E)
    ck, cv = normal(B, S // 4, K, D), normal(B, S // 4, K, E)
    place = dict(q_offset=offset)
    leader = torch.randint(0, 1, (B, K, 2), dtype=torch.int32)
    kwargs = dict(num_selected_blocks=2, selection_stride=stride, return_gates=True, seq_len=S)
    kwargs["leader_indices"] = leader if stride > 1 else None
    assert_same(select_blocks, cut, 2 * B * K * S // 4, q, ck, **BLOCKS, **kwargs, **place)
    place["return_lse"] = True
    tiles = (cut, 3 * B * H * 16)
    assert_same(compressed_attention, *tiles, q, ck, cv, compress_block_sliding_stride=4, **place)
    assert_same(sliding_window_attention, *tiles, q, k, v, sliding_window_size=4, **place)
    indices = torch.randint(-1, 2, (B, T, K, 1))
    given = (q, k, v, indices)
    assert_same(selected_attention, cut, 3 * B * H * S, *given, selection_block_size=8, **place)


def test_unaligned_start_continues_the_group_before(cut):
    T, S = 22, 47
    q, ck = normal(B, T, H, D), normal(B, S // 4, K, D)
    leader = torch.tensor([2, 0], dtype=torch.int32).expand(B, K, 2)
    kwargs = dict(BLOCKS, num_selected_blocks=2, selection_stride=4, return_gates=True)
    kwargs |= dict(q_offset=S - T, seq_len=S, leader_indices=leader)
    assert_same(select_blocks, cut, B * K * 11, q, ck, **kwargs)


@pytest.mark.slow(one_of=2)
@pytest.mark.parametrize("settings", ["default", "probs", "shared rankings", "diff top-k"])
@pytest.mark.parametrize("causal", [True, False])
def test_layer(cut, selected_by, settings, causal):
    module = layers.layer(**layers.SETTINGS[settings], causal=causal)
    x = torch.randn(2, 45, layers.DIM, dtype=torch.float64, requires_grad=True)
    results = []
    for most in (1000, WHOLE):
        cut(most)
        out = module(x)
        assert (cut(most) > 4) == (most == 1000)
        weights = torch.arange(out.numel(), dtype=out.dtype).sin().view_as(out)
        leaves = [x, *(p for p in module.parameters() if p.requires_grad)]
        grads = torch.autograd.grad((out * weights).sum(), leaves, materialize_grads=True)
        results.append((out, *grads))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


def test_what_no_query_sees_is_not_computed(cut, monkeypatch):
    """Keys past a chunk's queries are cut, and those before its window."""
    q = torch.randn(2, 64, 4, 8)
    tiles, logits = [], online.tile_logits
    monkeypatch.setattr(
        online,
        "tile_logits",
        lambda q, k, *rest: tiles.append((q.shape[3], k.shape[2])) or logits(q, k, *rest),
    )
    cut(2 * 4 * 16 * 16)  # 16 queries by the 16 keys of a tile
    sliding_window_attention(q, q, q, sliding_window_size=3, return_lse=True)
    assert tiles == [(16, 16)] + [(16, 16), (16, 3)] * 3
    tiles.clear()
    ck = torch.randn(2, 32, 4, 8)
    compressed_attention(q, ck, ck, compress_block_sliding_stride=2)
    assert tiles == [(16, 7), (16, 15), (16, 16), (16, 7), (16, 16), (16, 15)]

    seen, chunk = [], query_chunks.Chunk
    monkeypatch.setattr(
        query_chunks,
        "Chunk",
        lambda rows, parts, call: seen.append(parts[1]) or chunk(rows, parts, call),
    )
    monkeypatch.setattr(eager, "few_blocks", lambda *_: False)
    cut(2 * 4 * 64 * 16)
    indices = torch.full((2, 64, 4, 1), -1)
    selected_attention(q, q, q, indices, selection_block_size=8)
    assert [some.stop for some in seen] == [16, 32, 48, 64]


def test_how_the_selected_branch_is_cut():
    """Gathered where few of the keys are read, the sooner the more heads share them."""
    settings = dict(selection_block_size=16, num_initial_blocks=1, num_local_blocks=2, causal=True)

    def gathers(S, H, T=1):
        tensors = torch.empty(1, T, H, 4), torch.empty(1, S, 1, 4), torch.empty(1, T, 1, 7)
        return eager.few_blocks(*tensors, settings)

    read = 16 * 10
    assert gathers(15 * read + 1, 1) and not gathers(14 * read, 1)
    assert gathers(4 * read, 12) and not gathers(3 * read, 12)
    assert not gathers(4 * read, 12, T=4 * read)  # half of which the causal mask hides


def test_size_of_a_chunk():
    """Within the scores of a chunk, and never fewer queries than the least."""
    q, ck = torch.empty(2, 5000, 8, 4), torch.empty(2, 1024, 2, 4)
    assert query_chunks.chunk_size(q, 2**10) == query_chunks.CHUNK_SCORES // 2**11
    assert query_chunks.chunk_size(q, 2**30) == query_chunks.LEAST_QUERIES
    settings = dict(BLOCKS, importance="logits", mem_k=None, query_heads_share_selected_kv=True)
    settings["interpolated_importance_score"] = False
    assert query_chunks.scores_of_a_query(q, ck, settings) == 2 * 1024
    settings |= dict(importance="probs", mem_k=torch.empty(2, 1024, 4))
    assert query_chunks.scores_of_a_query(q, ck, settings) == 8 * 2048
    assert tiled.chunk_sizes(q) == (tiled.TILE_SCORES // (2 * 8 * tiled.KEYS), tiled.KEYS)
    assert tiled.chunk_sizes(q[:1, :1].expand(2**20, 1, 8, 4))[0] == tiled.LEAST_QUERIES


LONG = dict(
    compress_block_size=128,
    compress_block_sliding_stride=128,
    selection_block_size=128,
    heads=1,
    kv_heads=1,
)


@pytest.mark.slow
@pytest.mark.parametrize("importance, longest", [("logits", 16384), ("probs", 8192)])
def test_a_layer_trains_in_linear_memory_on_the_cpu(importance, longest, monkeypatch):
    module = layers.layer(torch.float32, importance=importance, **LONG)
    scores = 32 * longest
    monkeypatch.setattr(eager, "MAX_SCORES", scores)
    monkeypatch.setattr(query_chunks, "CHUNK_SCORES", scores)
    monkeypatch.setattr(tiled, "TILE_SCORES", scores)
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
    monkeypatch.setattr(eager, "MAX_SCORES", WHOLE)
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


@pytest.mark.gpu
def test_gathered_gradients_are_the_same_each_time_on_a_gpu(monkeypatch):
    monkeypatch.setattr(eager, "MAX_SCORES", 0)
    monkeypatch.setattr(eager, "few_blocks", lambda *_: True)
    q, k, v = (torch.randn(1, 2048, h, 32, device="cuda", requires_grad=True) for h in (8, 2, 2))
    indices = torch.rand(1, 2048, 2, 64, device="cuda").argsort(dim=-1)[..., :8]
    runs = []
    for _ in range(3):
        out = selected_attention(q, k, v, indices, selection_block_size=32, backend="eager")
        runs.append((out, *torch.autograd.grad(out.sin().sum(), (q, k, v))))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


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
