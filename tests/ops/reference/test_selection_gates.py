"""Gates of given blocks, chunk by chunk, against those of the specification."""

import pytest
import torch

from native_sparse_attention import blocks, select_blocks
from native_sparse_attention.ops import chunked
from native_sparse_attention.varlen import Documents

SIZES = dict(compress_block_size=8, compress_block_sliding_stride=4, selection_block_size=8)
CASES = {
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


@pytest.mark.parametrize("place", ["causal", "two-sided", "rows", "documents"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_match_the_specification(case, place, monkeypatch):
    monkeypatch.setattr(chunked, "CHUNK_SCORES", 0)
    monkeypatch.setattr(chunked, "LEAST_QUERIES", 3)
    B, S, H, K, D, n = 2, 61, 4, 2, 4, 2
    settings = SIZES | dict(
        num_selected_blocks=n, importance="logits", interpolated_importance_score=False,
        num_initial_blocks=0, num_local_blocks=1, selection_stride=1, causal=place != "two-sided",
        query_heads_share_selected_kv=True, soft_cap=None,
    ) | CASES[case]  # fmt: skip
    T = S if place == "documents" else 30
    offset = torch.tensor([31, 8]) if place == "rows" else S - T
    documents = None
    if place == "documents":
        begins = torch.tensor([[0, 40], [0, 32]])
        edges = torch.cat((begins, torch.full((B, 1), S)), dim=1)
        which = (torch.arange(S) >= begins[..., None]).sum(1) - 1
        documents = Documents(*(edges.gather(1, w).int() for w in (which, which + 1)))
    d = settings["compress_block_sliding_stride"]
    W = blocks.num_windows(S, d, causal=settings["causal"])
    sinks = torch.randn(H) if settings["importance"] == "probs" else None
    leaves = dict(q=torch.randn(B, T, H, D), ck=torch.randn(B, W, K, D), mem_k=torch.randn(K, 2, D))
    leaves = {name: t.double().requires_grad_() for name, t in (leaves | dict(sinks=sinks)).items()
              if t is not None}  # fmt: skip
    call = dict(seq_len=S, q_offset=offset, documents=documents, **settings)
    before = torch.full((B, K if settings["query_heads_share_selected_kv"] else H, n), -1)
    leader = dict(leader_indices=before.int()) if settings["selection_stride"] > 1 else {}
    indices, expected = select_blocks(**leaves, **call, **leader, return_gates=True)
    gates = chunked.selection_gates(block_indices=indices, **leaves, **call)
    assert (gates == 1).all() and gates.shape == expected.shape
    weights = torch.randn_like(gates)
    actual, right = (
        torch.autograd.grad((g * weights).sum(), leaves.values(), materialize_grads=True)
        for g in (gates, expected)
    )
    assert right[0].any()
    for a, b in zip(actual, right, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
