"""The specification in memory linear in the length: the same numbers, by tiles and by chunks."""

import itertools
import shutil

import pytest
import torch

from native_sparse_attention import (
    blocks,
    compressed_attention,
    select_blocks,
    selected_attention,
    sliding_window_attention,
)
from native_sparse_attention.ops import chunked, reference
from native_sparse_attention.varlen import Documents
from tests.helpers import layers, memory

B, H, K, D, E = 2, 4, 2, 4, 6
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


def assert_same(op, cut, scores, *tensors, **kwargs):
    """In pieces and whole: outputs and every gradient to rounding, indices exactly."""
    leaves = [t for t in (*tensors, *kwargs.values()) if isinstance(t, torch.Tensor)]
    leaves = [t for t in leaves if t.requires_grad]
    results = []
    for most in (scores, WHOLE):
        cut(most)
        values = op(*tensors, **kwargs)
        values = [t for t in (values if isinstance(values, tuple) else (values,)) if t is not None]
        assert (cut(most) > 2) == (most == scores)
        torch.manual_seed(1)
        smooth = [t.masked_fill(t.isneginf(), 0.0) for t in values if t.is_floating_point()]
        loss = sum((t * torch.randn(t.shape, dtype=t.dtype)).sum() for t in smooth)
        grads = []
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
        results.append((*values, *grads))
    for actual, expected in zip(*results, strict=True):
        tolerance = 1e-12 if expected.is_floating_point() else 0
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("T, S", [(37, 37), (19, 50)])
@pytest.mark.parametrize("causal", [True, False])
def test_compressed_and_window(cut, T, S, causal, monkeypatch):
    """The window's own form too, which local-attention spares most whole sequences."""
    monkeypatch.setattr(chunked.local, "is_supported", lambda *_: False)
    q, k, v = normal(B, T, H, D), normal(B, S, K, D), normal(B, S, K, E)
    d = BLOCKS["compress_block_sliding_stride"]
    W = S // d if causal else -(-S // d)
    ck, cv = normal(B, W, K, D), normal(B, W, K, E)
    for m, lse in ((0, True), (3, False)):
        kwargs = dict(mem_k=normal(K, m, D), mem_v=normal(K, m, E)) if m else {}
        kwargs |= dict(compress_block_sliding_stride=d, seq_len=S, causal=causal, return_lse=lse)
        assert_same(compressed_attention, cut, 5 * B * H * 16, q, ck, cv, **kwargs)
    for w, lse in ((0, True), (6, False), (30, True)):
        kwargs = dict(sliding_window_size=w, causal=causal, return_lse=lse)
        assert_same(sliding_window_attention, cut, 5 * B * H * 16, q, k, v, **kwargs)


@pytest.mark.parametrize("T, S", [(37, 37), (19, 50)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [K, H])
def test_selected(cut, T, S, causal, heads):
    q, k, v = normal(B, T, H, D), normal(B, S, K, D), normal(B, S, K, E)
    indices = torch.randint(-1, -(-S // 8), (B, T, heads, 3)).sort(dim=-1).values
    indices = indices.masked_fill(indices.diff(dim=-1, prepend=indices[..., :1] - 1) == 0, -1)
    for gated, lse, initial, local in ((1, 0, 1, 2), (1, 1, 0, 0), (0, 1, 2, 1), (0, 0, 0, 1)):
        kwargs = dict(selection_block_size=8, causal=causal, return_lse=bool(lse))
        kwargs |= dict(num_initial_blocks=initial, num_local_blocks=local)
        kwargs |= dict(soft_cap=1.5, sinks=normal(H)) if lse else {}
        kwargs["gates"] = normal(B, T, heads, 3) if gated else None
        assert_same(selected_attention, cut, 4 * B * H * 16, q, k, v, indices, **kwargs)
    nothing = indices[..., :0]
    for local in (0, 1):
        kwargs = dict(selection_block_size=8, return_lse=True, num_local_blocks=local)
        assert_same(selected_attention, cut, 4 * B * H * 16, q, k, v, nothing, **kwargs)


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


# the selection, and the gates of differentiable top-k

SELECTIONS = {
    "logits": {},
    "max": dict(importance="max"),
    "interpolated": dict(interpolated_importance_score=True),
    "probs": dict(importance="probs", soft_cap=2.0),
    "each head": dict(query_heads_share_selected_kv=False),
    "long windows": dict(compress_block_sliding_stride=8, selection_block_size=4),
    "groups": dict(selection_stride=4),
    "groups, probs": dict(selection_stride=8, importance="probs"),
    "forced": dict(num_initial_blocks=1, num_local_blocks=2),
}


@pytest.mark.parametrize("layout", ["causal", "two-sided", "rows", "documents"])
@pytest.mark.parametrize("name", SELECTIONS)
def test_selection(cut, name, layout):
    """Groups that began before the call too, and rows whose groups no chunk can be aligned to."""
    S = T = 61
    if layout != "documents":
        T = 30
    n, offset, documents = 2, S - T, None
    settings = BLOCKS | dict(
        num_selected_blocks=n, importance="logits", interpolated_importance_score=False,
        num_initial_blocks=0, num_local_blocks=1, selection_stride=1, causal=layout != "two-sided",
        query_heads_share_selected_kv=True, soft_cap=None,
    ) | SELECTIONS[name]  # fmt: skip
    if layout == "rows":
        offset = torch.tensor([31, 8])
    if layout == "documents":
        edges = torch.tensor([[0, 40, S], [0, 32, S]])
        which = (torch.arange(S) >= edges[:, :2, None]).sum(1) - 1
        documents = Documents(*(edges.gather(1, w).int() for w in (which, which + 1)))
    d, heads = settings["compress_block_sliding_stride"], K
    if not settings["query_heads_share_selected_kv"]:
        heads = H
    W = blocks.num_windows(S, d, causal=settings["causal"])
    leaves = dict(q=normal(B, T, H, D), ck=normal(B, W, K, D), mem_k=normal(K, 2, D))
    if settings["importance"] == "probs":
        leaves["sinks"] = normal(H)
    call = dict(seq_len=S, q_offset=offset, documents=documents, **leaves, **settings)
    leader = dict(leader_indices=torch.zeros(B, heads, n, dtype=torch.int32))
    before = leader if settings["selection_stride"] > 1 else {}
    assert_same(select_blocks, cut, B * K * W * 3, return_gates=True, **call, **before)

    indices = select_blocks(**call, **before)
    results = []
    for module in (chunked, reference):
        cut(B * K * W * 3)
        gates = module.selection_gates(block_indices=indices, **call)
        assert (gates == 1).all() and gates.dtype == torch.float64
        weights = torch.arange(gates.numel()).cos().view(gates.shape)
        grads = torch.autograd.grad(
            (gates * weights).sum(), list(leaves.values()), materialize_grads=True
        )
        assert (cut(WHOLE) > 2) == (module is chunked) and grads[0].any()
        results.append(grads)
    torch.testing.assert_close(*results, atol=1e-12, rtol=1e-12)


def test_rows_at_different_offsets(cut):
    T, S = 23, 48
    q, k, v = normal(B, T, H, D), normal(B, S, K, D), normal(B, S, K, E)
    ck, cv = normal(B, S // 4, K, D), normal(B, S // 4, K, E)
    call = dict(q_offset=torch.tensor([9, 20]), return_lse=True)
    tiles = (cut, 3 * B * H * 16)
    assert_same(compressed_attention, *tiles, q, ck, cv, compress_block_sliding_stride=4, **call)
    assert_same(sliding_window_attention, *tiles, q, k, v, sliding_window_size=4, **call)
    indices = torch.randint(-1, 2, (B, T, K, 1))
    assert_same(selected_attention, *tiles, q, k, v, indices, selection_block_size=8, **call)


@pytest.mark.slow(one_of=2)
@pytest.mark.parametrize("settings", ["default", "probs", "shared rankings", "diff top-k"])
@pytest.mark.parametrize("causal", [True, False])
def test_layer(cut, settings, causal):
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
