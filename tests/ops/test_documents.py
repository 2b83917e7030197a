"""Packed documents: each is what it is alone, on every backend, forward and backward."""

import pytest
import torch

from native_sparse_attention import (
    compressed_attention,
    native_sparse_attention,
    select_blocks,
    selected_attention,
    sliding_window_attention,
)
from native_sparse_attention import varlen as docs
from native_sparse_attention.ops import chunked
from tests.helpers.budget import DEVICE

LENGTHS = [13, 0, 1, 32, 5, 0, 41]
SIZES = dict(compress_block_size=8, compress_block_sliding_stride=4, selection_block_size=8)


def bounds(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def num_windows(length, d, causal=True):
    return length // d if causal else -(-length // d)


def test_layout_by_hand():
    """Documents of 3, 0, 1 and 4 tokens, at multiples of 4."""
    found = docs.layout((1, 8), torch.device("cpu"), 4, cu_seqlens=torch.tensor([0, 3, 3, 4, 8]))
    assert found.source.tolist() == [[0, 1, 2, -1, 3, -1, -1, -1, 4, 5, 6, 7]]
    assert found.target.tolist() == [[0, 1, 2, 4, 8, 9, 10, 11]]
    assert found.documents.first.tolist() == [[0] * 4 + [4] * 4 + [8] * 4]
    assert found.documents.last.tolist() == [[3] * 4 + [5] * 4 + [12] * 4]
    assert found.documents.positions().tolist() == [[0, 1, 2, 3] * 3]
    windows = found.windows(2, 3, causal=True)
    assert windows.source.tolist() == [[0, -1, -1, -1, 1, 2]]
    assert windows.target.tolist() == [[0, 4, 5]]
    windows = found.windows(2, 5, causal=False)
    assert windows.source.tolist() == [[0, 1, 2, -1, 3, 4]]


def test_layout_of_ids_and_padding():
    ids = torch.tensor([[7, 7, 5, 5, 5], [1, 1, 1, 7, 7]])
    found = docs.layout((2, 5), ids.device, 2, segment_ids=ids)
    assert found.source.tolist() == [[0, 1, 2, 3, 4, -1], [0, 1, 2, -1, 3, 4]]
    mask = torch.tensor([[False, True, True, True, False], [True, True, False, True, True]])
    found = docs.layout((2, 5), ids.device, 2, segment_ids=ids, mask=mask)
    assert found.source.tolist() == [[1, -1, 2, 3], [0, 1, 3, 4]]
    assert found.target.tolist() == [[-1, 0, 2, 3, -1], [0, 1, -1, 2, 3]]
    found = docs.layout((2, 5), ids.device, 1, mask=torch.zeros(2, 5, dtype=torch.bool))
    assert (found.source == -1).all() and (found.documents.last == 0).all()


@pytest.mark.parametrize("shape", [(1, 0), (0, 3), (2, 0)])
def test_layout_of_nothing(shape):
    found = docs.layout(shape, torch.device("cpu"), 4, mask=torch.ones(shape, dtype=torch.bool))
    x = torch.randn(*shape, 2)
    assert found.collect(found.spread(x)).shape == x.shape


def test_moving_there_and_back():
    cu = bounds(LENGTHS)
    total = int(cu[-1])
    layout = docs.layout((1, total), cu.device, 8, cu_seqlens=cu)
    x = torch.randn(1, total, 3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(layout.collect(layout.spread(x)), x)
    assert torch.autograd.gradgradcheck(layout.spread, x)
    (grad,) = torch.autograd.grad((layout.spread(x) ** 2).sum(), x)
    torch.testing.assert_close(grad, 2 * x)


def alone(op, tensors, per_document, lengths, causal, **kwargs):
    """The operation on each document by itself, results put together again."""
    results, t, w = [], 0, 0
    d = kwargs.get("compress_block_sliding_stride", 1)
    for length in lengths:
        more = num_windows(length, d, causal)
        own = {}
        for name, x in tensors.items():
            first, count = (w, more) if name in ("ck", "cv") else (t, length)
            own[name] = x[:, first : first + count]
        t, w = t + length, w + more
        results.append(op(**own, **per_document, causal=causal, **kwargs))
    if isinstance(results[0], tuple):
        return tuple(torch.cat(parts, 1) for parts in zip(*results))
    return torch.cat(results, 1)


def draw(lengths, d, causal, H=4, K=2, D=8, dtype=torch.float64):
    total, windows = sum(lengths), sum(num_windows(n, d, causal) for n in lengths)

    def normal(*shape):
        return torch.randn(*shape, dtype=dtype, device=DEVICE, requires_grad=True)

    tensors = dict(
        q=normal(1, total, H, D), k=normal(1, total, K, D), v=normal(1, total, K, D),
        ck=normal(1, windows, K, D), cv=normal(1, windows, K, D), cq=normal(1, total, H, D),
        branch_gates=normal(1, total, H, 3),
    )  # fmt: skip
    memory = dict(mem_k=normal(K, 2, D), mem_v=normal(K, 2, D))
    return tensors, memory


def compare(op, tensors, shared, lengths, causal, backend="eager", tolerance=1e-12, **kwargs):
    """Values and gradients, packed and alone."""
    packed = op(
        **tensors, **shared, causal=causal, cu_seqlens=bounds(lengths), backend=backend, **kwargs
    )
    parts = alone(op, tensors, shared, lengths, causal, backend="eager", **kwargs)
    packed, parts = (r if isinstance(r, tuple) else (r,) for r in (packed, parts))
    leaves = [t for t in (*tensors.values(), *shared.values()) if t.requires_grad]
    losses = []
    for results in (packed, parts):
        generator = torch.Generator(DEVICE).manual_seed(1)
        loss = 0
        for r in results:
            if r.requires_grad:
                weight = torch.randn(r.shape, generator=generator, device=DEVICE, dtype=r.dtype)
                loss = loss + (r.masked_fill(r.isneginf(), 0) * weight).sum()
        losses.append(loss)
    for a, b in zip(packed, parts):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
    if isinstance(losses[0], int):
        return
    grads = [torch.autograd.grad(loss, leaves, materialize_grads=True) for loss in losses]
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


CAUSAL = pytest.mark.parametrize("causal", [True, False])


@CAUSAL
@pytest.mark.parametrize("m", [0, 2])
def test_compressed(m, causal):
    tensors, memory = draw(LENGTHS, 4, causal)
    tensors = {n: tensors[n] for n in ("q", "ck", "cv")}
    compare(
        compressed_attention, tensors, memory if m else {}, LENGTHS, causal,
        compress_block_sliding_stride=4, return_lse=True,
    )  # fmt: skip


@CAUSAL
def test_window(causal):
    tensors, _ = draw(LENGTHS, 4, causal)
    tensors = {n: tensors[n] for n in ("q", "k", "v")}
    compare(
        sliding_window_attention, tensors, {}, LENGTHS, causal,
        sliding_window_size=6, return_lse=True,
    )  # fmt: skip


SELECTIONS = {
    "default": {},
    "probs": dict(importance="probs"),
    "forced": dict(num_initial_blocks=1, num_local_blocks=2, importance="probs"),
    "stride": dict(selection_stride=4),
    "own": dict(query_heads_share_selected_kv=False),
    "interpolated": dict(interpolated_importance_score=True),
    "wide windows": dict(compress_block_sliding_stride=8, selection_block_size=4),
    "long windows": dict(compress_block_size=20),
    "no local": dict(num_local_blocks=0),
}


@CAUSAL
@pytest.mark.parametrize("setting", SELECTIONS)
def test_selection(setting, causal):
    kwargs = SIZES | dict(num_selected_blocks=2) | SELECTIONS[setting]
    tensors, memory = draw(LENGTHS, kwargs["compress_block_sliding_stride"], causal)
    tensors = {n: tensors[n] for n in ("q", "ck")}
    compare(
        select_blocks, tensors, {"mem_k": memory["mem_k"]}, LENGTHS, causal, return_gates=True,
        **kwargs,
    )  # fmt: skip


@CAUSAL
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("initial, local", [(0, 1), (1, 2), (2, 0)])
def test_selected(initial, local, heads, causal):
    """Lists with empty slots, and with blocks that no document has."""
    tensors, _ = draw(LENGTHS, 4, causal)
    tensors = {n: tensors[n] for n in ("q", "k", "v")}
    shape = (1, sum(LENGTHS), heads, 3)
    lists = torch.rand(*shape[:3], 8, device=DEVICE).argsort(-1)[..., :3].to(torch.int32) - 1
    gates = torch.rand(shape, dtype=torch.float64, device=DEVICE, requires_grad=True)

    def op(block_indices, **kwargs):
        return selected_attention(block_indices=block_indices, **kwargs)

    compare(
        op, tensors | {"block_indices": lists, "gates": gates}, {}, LENGTHS, causal,
        selection_block_size=8, num_initial_blocks=initial, num_local_blocks=local,
        return_lse=True,
    )  # fmt: skip


@CAUSAL
@pytest.mark.parametrize("setting", [*SELECTIONS, "diff"])
def test_whole_layer(setting, causal):
    settings = dict(use_diff_topk=True) if setting == "diff" else SELECTIONS[setting]
    kwargs = SIZES | dict(num_selected_blocks=2, sliding_window_size=5) | settings
    tensors, memory = draw(LENGTHS, kwargs["compress_block_sliding_stride"], causal)
    compare(
        native_sparse_attention, tensors, memory, LENGTHS, causal, return_indices=True, **kwargs
    )


def test_block_indices_of_branches_that_select_none():
    q, k, v = (torch.randn(8, h, 8, dtype=torch.float64, device=DEVICE) for h in (4, 2, 2))
    kwargs = SIZES | dict(num_selected_blocks=2, sliding_window_size=5, branches=("window",))
    ends = torch.tensor([0, 5, 8], device=DEVICE)
    out, indices = native_sparse_attention(
        q, k, v, **kwargs, causal=True, return_indices=True, cu_seqlens=ends
    )
    assert indices is None
    window = sliding_window_attention(q, k, v, sliding_window_size=5, cu_seqlens=ends)
    torch.testing.assert_close(out, window)


@CAUSAL
def test_rows_of_ids_and_padding(causal):
    """Several rows, padding on both sides and within: each document alone, and 0 elsewhere."""
    ids = torch.tensor([[4] * 9 + [4] * 3 + [2] * 20, [1] * 17 + [5] + [6] * 14], device=DEVICE)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, :3] = mask[1, 28:] = mask[0, 15:18] = False
    q, k, v = (torch.randn(2, 32, h, 8, dtype=torch.float64, device=DEVICE) for h in (4, 2, 2))
    call = dict(sliding_window_size=4, causal=causal, backend="eager", return_lse=True)
    out, lse = sliding_window_attention(q, k, v, segment_ids=ids, mask=mask, **call)
    assert (out[~mask] == 0).all() and lse[~mask].isneginf().all()
    for row in range(2):
        for name in ids[row].unique():
            own = (ids[row] == name) & mask[row]
            alone = sliding_window_attention(*(t[row : row + 1, own] for t in (q, k, v)), **call)
            torch.testing.assert_close(out[row, own], alone[0][0])
            torch.testing.assert_close(lse[row, own], alone[1][0])


def test_packed_without_a_batch():
    tensors, memory = draw(LENGTHS, 4, True)
    kwargs = SIZES | dict(num_selected_blocks=2, sliding_window_size=5, cu_seqlens=bounds(LENGTHS))
    kwargs |= dict(memory, backend="eager", return_indices=True)
    flat = native_sparse_attention(**{n: t[0] for n, t in tensors.items()}, **kwargs)
    for a, b in zip(flat, native_sparse_attention(**tensors, **kwargs)):
        assert torch.equal(a, b[0])


def test_hidden_row():
    """Of a row without tokens: 0, -inf, no gradient."""
    q, k, v = (torch.randn(2, 5, 2, 8, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[True] * 5, [False] * 5])
    out, lse = sliding_window_attention(q, k, v, sliding_window_size=2, mask=mask, return_lse=True)
    out.sum().backward()
    assert (out[1] == 0).all() and lse[1].isneginf().all()
    assert all((t.grad[1] == 0).all() for t in (q, k, v))


BAD = {
    "rise": dict(cu_seqlens=torch.tensor([0, 5, 3, 8])),
    "from 0": dict(cu_seqlens=torch.tensor([1, 8])),
    "number of tokens, 8": dict(cu_seqlens=torch.tensor([0, 7])),
    "int32 or int64": dict(cu_seqlens=torch.tensor([0.0, 8.0])),
    r"\[documents \+ 1\]": dict(cu_seqlens=torch.tensor([[0, 8]])),
    "two ways": dict(cu_seqlens=torch.tensor([0, 8]), mask=torch.ones(1, 8, dtype=torch.bool)),
    "mask must be bool": dict(mask=torch.ones(1, 8)),
    "segment_ids must be int32 or int64": dict(segment_ids=torch.ones(1, 7, dtype=torch.long)),
    "q_offset must be None": dict(cu_seqlens=torch.tensor([0, 8]), q_offset=3),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    q = torch.randn(1, 8, 2, 8)
    with pytest.raises(ValueError, match=message):
        sliding_window_attention(q, q, q, sliding_window_size=2, **BAD[message])


def test_bad_batches_and_windows():
    q = torch.randn(2, 8, 2, 8)
    with pytest.raises(ValueError, match="one row of packed documents, got a batch of 2"):
        sliding_window_attention(q, q, q, sliding_window_size=2, cu_seqlens=torch.tensor([0, 8]))
    q, ck = q[:1], torch.randn(1, 2, 2, 8)
    with pytest.raises(ValueError, match="ck must hold the 1 complete windows"):
        compressed_attention(
            q, ck, ck, compress_block_sliding_stride=4, cu_seqlens=torch.tensor([0, 3, 8])
        )
    with pytest.raises(ValueError, match="compress_block_sliding_stride must be an integer"):
        compressed_attention(
            q, ck, ck, compress_block_sliding_stride="4", cu_seqlens=torch.tensor([0, 3, 8])
        )


@pytest.mark.slow(one_of=3)
@CAUSAL
@pytest.mark.parametrize("setting", ["default", "stride", "interpolated", "diff"])
def test_in_linear_memory(setting, causal, monkeypatch):
    """By tiles and chunks that cut documents as they come."""
    monkeypatch.setattr(chunked, "MAX_SCORES", 0)
    monkeypatch.setattr(chunked, "LEAST_QUERIES", 1)
    monkeypatch.setattr(chunked, "KEYS", 16)
    monkeypatch.setattr(chunked, "CHUNK_SCORES", 2000)
    test_whole_layer(setting, causal)


@CAUSAL
@pytest.mark.parametrize("branch", ["compressed", "selected", "window"])
def test_on_flex(branch, causal, untraced_flex):
    """Forward; flex_attention has no backward on a CPU. Over several of its tiles."""
    lengths = [*LENGTHS, 200, 0, 3, 129]
    tensors, memory = draw(lengths, 4, causal, D=16, dtype=torch.float32)
    tensors = {n: t.detach() for n, t in tensors.items()}
    call = dict(causal=causal, cu_seqlens=bounds(lengths), return_lse=True)
    if branch == "compressed":
        op, names = compressed_attention, ("q", "ck", "cv")
        call |= {n: t.detach() for n, t in memory.items()} | dict(compress_block_sliding_stride=4)
    else:
        op, names = sliding_window_attention, ("q", "k", "v")
        call |= dict(sliding_window_size=40)
    if branch == "selected":
        op = selected_attention
        lists = torch.rand(1, sum(lengths), 2, 30, device=DEVICE).argsort(-1)[..., :3] - 1
        del call["sliding_window_size"]
        call |= dict(
            block_indices=lists.to(torch.int32), selection_block_size=8, num_initial_blocks=1,
            num_local_blocks=2,
        )  # fmt: skip
    tensors = {n: tensors[n] for n in names}
    expected = op(**tensors, backend="eager", **call)
    for a, b in zip(op(**tensors, backend="flex", **call), expected):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
