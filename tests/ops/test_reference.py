"""The specification against `oracles.py`, which is written from the definitions: outputs,
log-sum-exps, selections and gradients in fp64, in the cases of the table. And what it refuses."""

import itertools

import pytest
import torch

import native_sparse_attention as nsa
from tests.helpers import oracles
from tests.helpers.budget import CUDA
from tests.helpers.calls import RANKING, draw, under_selection
from tests.helpers.layers import close, normal
from tests.helpers.sizes import sizes
from tests.ops.test_table import CASES, LAYERS

pytestmark = pytest.mark.skipif(CUDA, reason="of the sizes that a CPU has")


def assert_same(op, other, call):
    """Values and all gradients."""
    leaves = call.leaves().tensors
    results = []
    for run in (op, other):
        values = run(**leaves)
        values = values if isinstance(values, tuple) else (values,)
        loss = 0.0 * sum(t.sum() for t in leaves.values())
        loss = loss + sum(
            (t.masked_fill(t.isneginf(), 0.0) * torch.arange(t.numel()).cos().view_as(t)).sum()
            for t in values
        )
        grads = torch.autograd.grad(loss, leaves.values(), materialize_grads=True)
        results.append([*values, *grads])
    for actual, expected in zip(*results, strict=True):
        close(actual, expected, 1e-11)


# the laws say what documents and rows at different places are
DRAWN = {"lengths", "starts"}


@pytest.mark.parametrize(
    "branch, case",
    [(b, case) for b, cases in CASES.items() for case in cases if not DRAWN & cases[case].keys()],
)
def test_branches(branch, case):
    call = draw(branch, torch.float64, batch=1, **CASES[branch][case])
    settings = {n: value for n, value in call.settings.items() if n != "return_lse"}
    assert_same(
        lambda **t: call.op(**t, **call.settings, backend="eager"),
        lambda **t: oracles.ORACLES[branch](**t, **settings),
        call,
    )


@pytest.mark.parametrize(
    "branch, case", [(b, case) for b, cases in LAYERS.items() for case in cases]
)
def test_layers(branch, case):
    """A layer is its branches under its selection."""
    given = LAYERS[branch][case]
    if {"use_diff_topk", "starts"} & given.keys() or given.get("dense_length") == 12:
        pytest.skip("the gates' gradients are those of the ranking; a layer at a row's own place "
                    "or dense in part is not of such branches")  # fmt: skip
    call = draw(branch, torch.float64, **given)
    _, block_indices = call("eager", return_block_indices=True)
    if given.get("dense_length"):
        block_indices = torch.arange(9, dtype=torch.int32).expand(*block_indices.shape[:3], -1)
    assert_same(
        lambda **t: call.op(**t, **call.settings, backend="eager"),
        lambda **t: under_selection(call, block_indices)(**t, backend="eager"),
        call,
    )


GEOMETRIES = [(4, 4, 4), (8, 4, 8), (8, 4, 4), (6, 2, 8), (8, 8, 4), (12, 8, 2)]
RULES = [("logits", False), ("logits", True)]
RULES += [(rule, False) for rule in ("probs", "max", "head_max")]


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
    indices, gates = nsa.select_blocks(
        q, ck, mem_k=mem_k, **sizes(l, d, s, n=n), importance=rule,
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
    close(actual, expected, 1e-11)


def test_caps_and_sinks_in_the_ranking():
    """By probabilities as branch 1 attends; the ranking by logits knows of neither."""
    tensors = draw("compressed", torch.float64, place=(45, 45)).tensors
    tensors = {n: 1.5 * tensors[n] for n in ("q", "ck", "mem_k")}
    for changed in (dict(soft_cap=0.3), dict(sinks=normal(tensors["q"].shape[2]) * 5)):
        for importance in ("probs", "logits"):
            call = dict(RANKING, importance=importance)
            plain = nsa.select_blocks(**tensors, **call)
            other = nsa.select_blocks(**tensors, **call, **changed)
            assert torch.equal(plain, other) == (importance == "logits")


SIZES = sizes(4, 2, 4, n=2, w=3)


@pytest.mark.parametrize("B, T, S", [(0, 5, 5), (2, 0, 7), (2, 0, 0), (0, 0, 0)])
def test_empty_tensors(B, T, S):
    shapes = (T, 4, 3), (S, 2, 3), (S, 2, 5), (S // 2, 2, 3), (S // 2, 2, 5), (T, 4, 3)
    tensors = [normal(B, *shape) for shape in shapes]
    out, indices = nsa.native_sparse_attention(*tensors, **SIZES, return_block_indices=True)
    assert out.shape == (B, T, 4, 5) and indices.shape == (B, T, 2, 2)


def test_windows_that_are_not_the_sequences():
    """Too few would hide tokens; too many tell that S is not what it seems, as in a decoding step
    without seq_len, whose query would stand at position 0 and see nothing."""
    q, ck = normal(1, 1, 4, 8), normal(1, 9, 2, 8)
    sizes = SIZES | dict(compress_block_sliding_stride=4)
    w = sizes.pop("sliding_window_size")
    stride = dict(compress_block_sliding_stride=4)
    attend = lambda **kwargs: nsa.compressed_attention(q, ck, ck, **stride, **kwargs)  # noqa: E731
    layer, k, gates = nsa.native_sparse_attention, normal(1, 40, 2, 8), normal(1, 1, 4, 3)
    for call, windows, S in (
        (attend, 0, 1),
        (lambda: nsa.select_blocks(q, ck, **sizes), 0, 1),
        (lambda: nsa.select_blocks(q, ck, **sizes, seq_len=37, causal=False), 10, 37),
        (lambda: layer(q, k, k, ck, ck, gates, sliding_window_size=w, **sizes), 10, 40),
    ):
        with pytest.raises(ValueError, match=f"hold the {windows} windows.* S={S} tokens, got 9"):
            call()
    expected = attend(seq_len=37)
    close(attend(q_offset=36), expected, 1e-11)
    close(attend(q_offset=torch.tensor([36])), expected, 1e-11)
    assert (nsa.select_blocks(q, ck, **sizes, seq_len=37) >= 0).all()
