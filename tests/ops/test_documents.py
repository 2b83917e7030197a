"""Packed documents and padding: how rows are laid out, and what is refused. That each document is
what it is alone is a law (`test_laws.py`)."""

import pytest
import torch

from native_sparse_attention import native_sparse_attention, sliding_window_attention
from native_sparse_attention import varlen as docs
from tests.helpers.budget import CUDA, DEVICE, running
from tests.helpers.calls import DOCUMENTS, draw


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


def test_second_derivatives_of_moves():
    cu = torch.tensor([0, 5, 5, 6, 15, 18, 18, 29])
    layout = docs.layout((1, 29), cu.device, 8, cu_seqlens=cu)
    x = torch.randn(1, 29, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(layout.spread, x)


@pytest.mark.parametrize("causal", [True, False])
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
    call = draw("layer", lengths=DOCUMENTS)
    flat = {n: t if n.startswith("mem") else t[0] for n, t in call.tensors.items()}
    found = call._replace(tensors=flat)("eager", return_block_indices=True)
    for a, b in zip(found, call("eager", return_block_indices=True)):
        assert torch.equal(a, b[0])
    settings = call.settings | dict(branches=("window",), return_block_indices=True)
    out, indices = native_sparse_attention(*(flat[name] for name in "qkv"), **settings)
    assert out.shape == flat["q"].shape and indices is None  # nothing is selected


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("branch", ["compressed", "window"])
@pytest.mark.parametrize("backend", ["chunked", pytest.param("triton", marks=pytest.mark.kernels)])
def test_keys_behind_a_document(backend, branch, causal):
    """What aligned rows hold between a document's last token and the next one is seen by no token
    and has no gradient, however much of a tile it fills."""
    T, last = 61 if CUDA else 41, 34
    more = dict(compress_block_sliding_stride=1) if branch == "compressed" else {}
    call = draw(branch, place=(T, T), heads=(8, 1, 16, 16), memory=0, batch=1, causal=causal,
                **dict(sliding_window_size=T) if branch == "window" else more).leaves()  # fmt: skip
    call.settings["documents"] = docs.Documents(
        *(torch.full((1, T), at, dtype=torch.int32, device=DEVICE) for at in (0, last))
    )
    with running(backend) as name:
        out, _ = call(name)
        _, *keys = call.tensors.values()
        for grad in torch.autograd.grad(out[:, :last].sum(), keys):
            assert grad[:, last:].eq(0).all() and grad[:, : last - 1].ne(0).any()
