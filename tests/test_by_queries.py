"""The specification by chunks of queries: the same numbers, in memory linear in the length."""

import itertools

import layers
import memory
import pytest
import torch

from native_sparse_attention import (
    compressed_attention,
    select_blocks,
    selected_attention,
    sliding_window_attention,
)
from native_sparse_attention.ops import by_queries

B, H, K, D, E = 2, 4, 2, 4, 6
BLOCKS = dict(compress_block_size=8, compress_block_sliding_stride=4, selection_block_size=8)


def normal(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def flat(given):
    return [t for t in (given if isinstance(given, tuple) else (given,)) if t is not None]


@pytest.fixture
def calls(monkeypatch):
    """Cuts calls to a few hundred scores, and counts the chunks that run."""
    counts = []
    again = by_queries.again

    def counted(fn, *args, **kwargs):
        counts.append(args[0].shape[1])
        return again(fn, *args, **kwargs)

    monkeypatch.setattr(by_queries, "again", counted)
    monkeypatch.setattr(by_queries, "LEAST_QUERIES", 1)
    return counts


def assert_same(op, calls, monkeypatch, scores, *tensors, **kwargs):
    """By chunks and whole: outputs and every gradient to rounding, indices exactly."""
    leaves = [t for t in (*tensors, *kwargs.values()) if isinstance(t, torch.Tensor)]
    leaves = [t for t in leaves if t.requires_grad]
    results = []
    for most in (scores, 2**40):
        monkeypatch.setattr(by_queries, "MAX_SCORES", most)
        calls.clear()
        values = flat(op(*tensors, **kwargs))
        assert (len(calls) > 2) == (most == scores), calls
        assert sum(calls) == (tensors[0].shape[1] if most == scores else 0)
        torch.manual_seed(1)
        smooth = [t.masked_fill(t.isneginf(), 0.0) for t in values if t.is_floating_point()]
        loss = sum((t * torch.randn_like(t)).sum() for t in smooth)
        grads = []
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
        results.append((values, grads))
    (chunked, chunked_grads), (whole, whole_grads) = results
    for actual, expected in zip((*chunked, *chunked_grads), (*whole, *whole_grads), strict=True):
        tolerance = 1e-12 if expected.is_floating_point() else 0
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("T, S", [(37, 37), (19, 50)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lse", [True, False])
def test_branches(calls, monkeypatch, T, S, causal, lse):
    q, k, v = normal(B, T, H, D), normal(B, S, K, D), normal(B, S, K, E)
    place = dict(causal=causal, return_lse=lse)
    d = BLOCKS["compress_block_sliding_stride"]
    W = S // d if causal else -(-S // d)
    same = (calls, monkeypatch, 5 * B * H * S)
    few = (calls, monkeypatch, 5 * B * H * W)
    for m in (0, 3):
        memories = dict(mem_k=normal(K, m, D), mem_v=normal(K, m, E)) if m else {}
        kwargs = dict(compress_block_sliding_stride=d, seq_len=S, **memories, **place)
        assert_same(compressed_attention, *few, q, normal(B, W, K, D), normal(B, W, K, E), **kwargs)
    for w in (0, 6) if lse else (30,):  # whole sequences without lse go another way
        assert_same(sliding_window_attention, *same, q, k, v, sliding_window_size=w, **place)
    for heads, gated in itertools.product((K, H), (True, False)):
        indices = torch.randint(-1, -(-S // 8), (B, T, heads, 3)).sort(dim=-1).values
        indices = indices.masked_fill(indices.diff(dim=-1, prepend=indices[..., :1] - 1) == 0, -1)
        kwargs = dict(selection_block_size=8, num_initial_blocks=1, num_local_blocks=2, **place)
        kwargs["gates"] = normal(B, T, heads, 3) if gated else None
        assert_same(selected_attention, *same, q, k, v, indices, **kwargs)


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
def test_selection(calls, monkeypatch, name, causal):
    T, S = (40, 80) if SELECTIONS[name].get("selection_stride") else (37, 61)
    settings = BLOCKS | dict(num_selected_blocks=2, causal=causal) | SELECTIONS[name]
    d = settings["compress_block_sliding_stride"]
    W = S // d if causal else -(-S // d)
    q, ck, mem_k = normal(B, T, H, D), normal(B, W, K, D), normal(K, 1, D)
    kwargs = dict(seq_len=S, mem_k=mem_k, return_gates=True, **settings)
    if not causal:
        kwargs["q_offset"] = S - T
    scores = B * K * W * (4 * d if "interpolated" in name else 4)
    assert_same(select_blocks, calls, monkeypatch, scores, q, ck, **kwargs)


@pytest.mark.parametrize("stride", [1, 4])
def test_rows_at_different_places(calls, monkeypatch, stride):
    """Whose groups no chunk can be aligned to: a group may be cut for some rows."""
    T, S = 23, 48
    offset = torch.tensor([9, 20])
    q, k, v = normal(B, T, H, D), normal(B, S, K, D), normal(B, S, K, E)
    ck, cv = normal(B, S // 4, K, D), normal(B, S // 4, K, E)
    place = dict(q_offset=offset)
    leader = torch.randint(0, 1, (B, K, 2), dtype=torch.int32)
    kwargs = dict(num_selected_blocks=2, selection_stride=stride, return_gates=True, seq_len=S)
    kwargs["leader_indices"] = leader if stride > 1 else None
    few = (calls, monkeypatch, 2 * B * K * S // 4)
    assert_same(select_blocks, *few, q, ck, **BLOCKS, **kwargs, **place)
    place["return_lse"] = True
    assert_same(compressed_attention, *few, q, ck, cv, compress_block_sliding_stride=4, **place)
    same = (calls, monkeypatch, 3 * B * H * S)
    assert_same(sliding_window_attention, *same, q, k, v, sliding_window_size=4, **place)
    indices = torch.randint(-1, 2, (B, T, K, 1))
    assert_same(selected_attention, *same, q, k, v, indices, selection_block_size=8, **place)


def test_unaligned_start_continues_the_group_before(calls, monkeypatch):
    T, S = 22, 47
    q, ck = normal(B, T, H, D), normal(B, S // 4, K, D)
    leader = torch.tensor([2, 0], dtype=torch.int32).expand(B, K, 2)
    kwargs = dict(BLOCKS, num_selected_blocks=2, selection_stride=4, return_gates=True)
    kwargs |= dict(q_offset=S - T, seq_len=S, leader_indices=leader)
    assert_same(select_blocks, calls, monkeypatch, B * K * 11, q, ck, **kwargs)


@pytest.mark.parametrize("settings", ["default", "probs", "shared rankings", "diff top-k"])
@pytest.mark.parametrize("causal", [True, False])
def test_layer(calls, monkeypatch, settings, causal):
    module = layers.layer(**layers.SETTINGS[settings], causal=causal)
    x = torch.randn(2, 45, layers.DIM, dtype=torch.float64, requires_grad=True)

    def run(x):
        return module(x)

    results = []
    for most in (2000, 2**40):
        monkeypatch.setattr(by_queries, "MAX_SCORES", most)
        calls.clear()
        out = run(x)
        assert (len(calls) > 4) == (most == 2000)
        weights = torch.arange(out.numel(), dtype=out.dtype).sin().view_as(out)
        leaves = [x, *(p for p in module.parameters() if p.requires_grad)]
        grads = torch.autograd.grad((out * weights).sum(), leaves, materialize_grads=True)
        results.append((out, *grads))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


def test_keys_that_no_query_of_a_chunk_sees_are_cut(monkeypatch):
    """The window's chunks are handed the keys of their own window only, the others the past."""
    seen = []
    monkeypatch.setattr(by_queries, "MAX_SCORES", 8 * 2 * 4 * 32)
    monkeypatch.setattr(by_queries, "LEAST_QUERIES", 1)
    monkeypatch.setattr(
        by_queries,
        "again",
        lambda fn, q, k, *args, **kw: seen.append(k.shape[1]) or fn(q, k, *args, **kw),
    )
    q = torch.randn(2, 32, 4, 8)
    sliding_window_attention(q, q, q, sliding_window_size=3, return_lse=True)
    assert seen == [8, 11, 11, 11]
    seen.clear()
    indices = torch.full((2, 32, 4, 1), -1)
    selected_attention(q, q, q, indices, selection_block_size=8)
    assert seen == [8, 16, 24, 32]


def test_size_of_a_chunk():
    """Within the scores of a chunk, whole groups, and never fewer queries than the least."""
    q, k = torch.empty(2, 5000, 8, 4), torch.empty(2, 1024, 2, 4)
    kwargs = dict(sliding_window_size=3, causal=True)
    assert by_queries.chunk_size("sliding_window_attention", q, k, **kwargs) == 2**22 // 2**14
    long = torch.empty(2, 2**20, 1, 1).expand(2, 2**20, 2, 4)
    assert by_queries.chunk_size("sliding_window_attention", q, long, **kwargs) == 16
    ranking = dict(BLOCKS, selection_stride=4, importance="logits")
    ranking |= dict(interpolated_importance_score=False, query_heads_share_selected_kv=True)
    assert by_queries.chunk_size("select_blocks", q, k, **ranking) == 4 * 2**22 // 2**12
    ranking |= dict(importance="probs", mem_k=torch.empty(2, 1024, 4))
    assert by_queries.chunk_size("select_blocks", q, k, **ranking) == 4 * 2**22 // 2**15


def test_a_call_that_has_what_is_not_known_here_runs_whole(calls, monkeypatch):
    monkeypatch.setattr(by_queries, "MAX_SCORES", 8)
    given = []
    monkeypatch.setattr(
        by_queries.reference, "sliding_window_attention", lambda *args, **kw: given.append(args)
    )
    q = torch.randn(1, 6, 1, 4)
    unknown = dict(sliding_window_size=2, causal=True, q_offset=0, along_queries=torch.ones(1, 6))
    by_queries.run("sliding_window_attention", q, q, q, **unknown)
    assert len(given) == 1 and given[0][0] is q and not calls


def layer_step(module, T):
    x = torch.randn(1, T, layers.DIM, requires_grad=True)
    return lambda: module(x).sum().backward()


@pytest.mark.parametrize("importance", ["logits", "probs"])
def test_memory_of_the_layer_is_linear_on_the_cpu(importance, monkeypatch):
    module = layers.layer(torch.float32, importance=importance)
    monkeypatch.setattr(by_queries, "MAX_SCORES", 2**15)
    peaks = [memory.peak(layer_step(module, T)) for T in (256, 1024)]
    assert peaks[1] < 5 * peaks[0], peaks
    # the same step whole shows that the measure would notice: 16 times is what T x S grows
    monkeypatch.setattr(by_queries, "MAX_SCORES", 2**40)
    dense = [memory.peak(layer_step(module, T)) for T in (256, 1024)]
    assert dense[1] > 10 * dense[0], dense


@pytest.mark.gpu
def test_memory_of_the_layer_is_linear_on_a_gpu():
    module = layers.layer(torch.float32, backend="eager").cuda()

    def step(T):
        x = torch.randn(1, T, layers.DIM, device="cuda", requires_grad=True)
        return lambda: module(x).sum().backward()

    step(64)()
    peaks = [memory.cuda_peak(step(T)) for T in (8192, 32768)]
    assert peaks[1] < 5 * peaks[0], peaks
