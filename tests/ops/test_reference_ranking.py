"""The ranking of the eager operations, written out block by block."""

import itertools

import pytest
import torch

from native_sparse_attention import select_blocks
from tests.helpers import oracles
from tests.ops.test_reference import close, normal

GEOMETRIES = [(4, 4, 4), (8, 4, 8), (8, 4, 4), (6, 2, 8), (8, 8, 4), (12, 8, 2)]
RULES = [("logits", False), ("logits", True), ("probs", False), ("max", False)]


@pytest.mark.slow(one_of=10)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("rule, interpolated", RULES)
@pytest.mark.parametrize("l, d, s", GEOMETRIES)
def test_selection(l, d, s, rule, interpolated, shared, causal):
    """The indices are the n best of the candidates, in order, and the gates have their gradient."""
    T, S, H, K, D, n = 19, 37, 4, 2, 4, 3
    initial, local = 1, 2
    W = S // d if causal else -(-S // d)
    q, ck, mem_k = normal(1, T, H, D), normal(1, W, K, D), normal(K, 2, D)
    q.requires_grad_()
    indices, gates = select_blocks(
        q, ck, mem_k=mem_k, compress_block_size=l, compress_block_sliding_stride=d,
        selection_block_size=s, num_selected_blocks=n, importance=rule,
        interpolated_importance_score=interpolated, num_initial_blocks=initial,
        num_local_blocks=local, query_heads_share_selected_kv=shared, causal=causal, seq_len=S,
        return_gates=True,
    )  # fmt: skip
    assert indices.dtype == torch.int32
    assert (gates == 1).all()
    weight = torch.randn_like(gates)
    expected_sum = 0.0
    for t, r in itertools.product(range(T), range(K if shared else H)):
        i = S - T + t
        heads = range(r * H // K, (r + 1) * H // K) if shared else [r]
        scores = oracles.block_scores(
            q[0, t], ck, mem_k, i=i, b=0, heads=list(heads), kv=r if shared else r * K // H, l=l,
            d=d, s=s, S=S, rule=rule, interpolated=interpolated, causal=causal,
        )  # fmt: skip
        forced = oracles.forced_blocks(i, -(-S // s), s, causal, initial, local)
        scores = {c: score for c, score in scores.items() if c not in forced}
        best = sorted(scores, key=lambda c: -scores[c].item())[:n]
        assert indices[0, t, r].tolist() == best + [-1] * (n - len(best)), (i, r)
        if not best:
            continue
        values = torch.stack([scores[c] for c in scores])
        if rule != "probs":
            values = torch.cat((values.new_tensor([-1e3]), values)).softmax(0)[1:]
        found = torch.stack([values[list(scores).index(c)] for c in best])
        expected_sum = expected_sum + (found * weight[0, t, r, : len(best)]).sum()
    (actual,) = torch.autograd.grad((gates * weight).sum(), q)
    (expected,) = torch.autograd.grad(expected_sum, q)
    close(actual, expected)


def test_ties_go_to_the_earlier_block():
    q, ck = torch.ones(1, 64, 1, 4), torch.ones(1, 16, 1, 4)
    indices = select_blocks(
        q,
        ck,
        compress_block_size=4,
        compress_block_sliding_stride=4,
        selection_block_size=8,
        num_selected_blocks=3,
    )
    assert indices[0, 63, 0].tolist() == [0, 1, 2]
    assert indices[0, 17, 0].tolist() == [0, 1, -1]
    assert indices[0, 7, 0].tolist() == [-1, -1, -1]


@pytest.mark.parametrize("offset", [0, 4, 5, 6, 7])
def test_shared_rankings(offset):
    """With selection_stride=R a token has the ranking of its group's first token."""
    R, s, S = 4, 8, 64
    q, ck = normal(2, S, 4, 4), normal(2, S // 4, 2, 4)
    kwargs = dict(
        compress_block_size=8,
        compress_block_sliding_stride=4,
        selection_block_size=s,
        num_selected_blocks=2,
        seq_len=S,
    )
    every = select_blocks(q, ck, **kwargs)
    expected = every[:, torch.arange(S) // R * R]
    torch.testing.assert_close(select_blocks(q, ck, selection_stride=R, **kwargs), expected)
    # a later part of the sequence, its first group ranked before
    part = select_blocks(
        q[:, offset:],
        ck,
        selection_stride=R,
        leader_indices=expected[:, offset] if offset % R else None,
        **kwargs,
    )
    torch.testing.assert_close(part, expected[:, offset:])
    # rows that start in different places
    start = torch.tensor([offset, 4])
    rows = torch.stack([q[b, o : o + 20] for b, o in enumerate(start.tolist())])
    part = select_blocks(
        rows,
        ck,
        selection_stride=R,
        q_offset=start,
        leader_indices=torch.stack([expected[b, o] for b, o in enumerate(start.tolist())]),
        **kwargs,
    )
    for b, o in enumerate(start.tolist()):
        torch.testing.assert_close(part[b], expected[b, o : o + 20])
